"""Training text that is read while it is trained on, for corpora that fit no disk. Section 5.1.

A stream goes through its files pass by pass, each pass in another order of files, and is read in
blocks: as many pairs as are tokenized, cleaned and planned into steps together, as in a block of
`batches`; a single corpus smaller than that is a block. In a mixture every block has each corpus's
share of pairs, and small corpora are read again and again to fill it: `block_pairs` should not be
many times their size. The pairs of a step depend on corpus, seed and
size of a block alone. Repeats are found within a block only; a pair is at most a block away from
where its file has it, so that a corpus that is sorted should be shuffled, or have many files.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from .batches import Block, Collator, StepData, refuse_longest, steps_for
from .pairs import Pairs, counts_of, encode_table, judge, refuse_useless

# read at once
READ_PAIRS = 1000


class Stream:
    """One corpus, pass after pass, from any place in it.

    Args:
        rows: Its pairs.
        seed: Of the run; with `number` it decides the order of the files in each pass.
        number: Of the corpus in the run.
        place: Where to go on, from another stream's; the beginning if not given.
        read_pairs: Pairs to read at once.
    """

    def __init__(
        self,
        rows: datasets.IterableDataset,
        seed: int,
        number: int,
        place: dict[str, Any] | None = None,
        read_pairs: int = READ_PAIRS,
    ):
        self.rows = rows
        self.seed = seed
        self.number = number
        self.read_pairs = read_pairs
        # after the last pairs that were read, in JSON's types; pairs are those of all passes
        self.place = place or {"pass": 0, "shard": 0, "state": None, "pairs": 0}

    def tables(self) -> Iterator[pa.Table | None]:
        """Read on, without an end.

        Yields:
            Some pairs, with the column "translation"; None where a pass ends.

        Raises:
            ValueError: If a whole pass has none.
        """
        while True:
            begun = self.place
            a_pass = begun["pass"]
            random = np.random.default_rng([self.seed, 3, self.number, a_pass])
            order = random.permutation(self.rows.num_shards).tolist()
            for shard in range(begun["shard"], len(order)):
                rows = self.rows.shard(len(order), order[shard]).with_format("arrow")
                if self.place["state"] is not None:
                    rows.load_state_dict(self.place["state"])
                for table in rows.iter(self.read_pairs):
                    self.place = {
                        "pass": a_pass,
                        "shard": shard,
                        "state": rows.state_dict(),
                        "pairs": self.place["pairs"] + len(table),
                    }
                    yield table
                self.place = {**self.place, "shard": shard + 1, "state": None}
            if starts_a_pass(begun) and self.place["pairs"] == begun["pairs"]:
                raise ValueError("a corpus must have at least one pair to stream, got none.")
            self.place = {**self.place, "pass": a_pass + 1, "shard": 0}
            yield None


def starts_a_pass(place: dict[str, Any]) -> bool:
    """Whether nothing of a pass has been read.

    Args:
        place: Of a stream.

    Returns:
        True where a pass begins.
    """
    return place["shard"] == 0 and place["state"] is None


class StreamedSteps(torch.utils.data.Dataset):
    """What one process sees at each step, of text that is read on from step to step.

    Every process and worker reads, tokenizes and plans all of the text: the next block a little at
    each step, so that none waits for it.

    Args:
        corpora: What to read.
        weights: Share of each in a block, of any sum; None for a single one.
        tokenizer: As in `encode_pairs`.
        languages: Source and target.
        rules: The arguments of `judge`.
        collator: Makes a micro-batch.
        tokens_per_step: As in `TrainingSteps`.
        length_groups_per_step: As in `plan_steps`.
        tokens_per_micro_batch: As in `split_step`.
        block_pairs: Pairs, about, of a block, before any is left out.
        seed: Of the run.
        num_processes: As in `split_step`.
        process_index: Which of them this is.
        position: Where to go on: that of a step before; the beginning if not given.

    Raises:
        ValueError: If there is no text, or not that of the position.
    """

    def __init__(
        self,
        corpora: Sequence[datasets.IterableDataset],
        weights: Sequence[float] | None,
        tokenizer: PreTrainedTokenizerBase,
        languages: Sequence[str],
        rules: dict[str, Any],
        collator: Collator,
        tokens_per_step: int,
        length_groups_per_step: int,
        tokens_per_micro_batch: int,
        block_pairs: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
        position: dict[str, Any] | None = None,
    ):
        self.corpora = corpora
        self.tokenizer = tokenizer
        self.languages = languages
        self.rules = rules
        self.collator = collator
        self.tokens_per_step = tokens_per_step
        self.length_groups_per_step = length_groups_per_step
        self.tokens_per_micro_batch = tokens_per_micro_batch
        weights = [1.0] if weights is None else weights
        self._shares = [block_pairs * weight / sum(weights) for weight in weights]
        self.seed = seed
        self.num_processes = num_processes
        self.process_index = process_index
        self._start = position or {
            "block": 0,
            "first_step": 0,
            "places": [Stream(rows, seed, number).place for number, rows in enumerate(corpora)],
            "counts": {},
        }
        # what cannot be trained on is refused here; forked workers have the block, but open the
        # files again: to read from one that is open would move it for all
        self._load_first_block()
        self._tables = None

    def __getstate__(self) -> dict[str, Any]:
        # a worker that is started anew reads its own
        return self.__dict__ | {"_block": None, "_tables": None}

    @property
    def text_sha256(self) -> str:
        """SHA-256 of the pairs of the block that was read last."""
        return self._position["text_sha256"]

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same where a run is resumed; the text is compared block by block.

        Returns:
            That it is streamed.
        """
        return {"streaming": True}

    def __getitem__(self, steps_done: int) -> StepData:
        """What this process has of the step after `steps_done` others.

        Args:
            steps_done: Steps before it, since the beginning of the run.

        Returns:
            Its micro-batches, and the place where the block began that they are of.

        Raises:
            ValueError: If the text cannot be trained on, or the step is before the position that
                was gone on from.
        """
        if steps_done < self._start["first_step"]:
            raise ValueError(
                f"steps of this stream must not be before {self._start['first_step']}, "
                f"got {steps_done}."
            )
        if self._block is None or steps_done < self._position["first_step"]:
            self._load_first_block()
        while steps_done >= self._following["first_step"]:
            self._read(1.0)
            self._plan()
        index = steps_done - self._position["first_step"]
        # the next block is there when this one ends
        self._read((index + 1) / len(self._block.steps))
        batches = self._block.micro_batches(
            index,
            self.collator,
            self.tokens_per_micro_batch,
            self.num_processes,
            self.process_index,
        )
        return StepData(batches, self._position)

    def _load_first_block(self):
        self._block = self._tables = None
        self._is_whole = False
        self._following, self._parts = self._start, [[] for _ in self.corpora]
        self._read(1.0)
        self._plan()
        found, expected = self._position["text_sha256"], self._start.get("text_sha256", None)
        if expected not in (None, found):
            raise ValueError(
                f"a run must be resumed with its own text, with the SHA-256 {expected} in block "
                f"{self._position['block']}, got {found}."
            )

    def _read(self, share: float):
        """Read so much of the following block as is not read yet."""
        if self._tables is None:
            places = self._places if any(self._parts) else self._following["places"]
            # no more at once than a block has of a corpus, or the next would have none
            self._streams = [
                Stream(rows, self.seed, number, place, max(1, min(READ_PAIRS, int(share))))
                for number, (rows, place, share) in enumerate(
                    zip(self.corpora, places, self._shares, strict=True)
                )
            ]
            self._tables = [stream.tables() for stream in self._streams]
        for stream, tables, parts, place, own_share in zip(
            self._streams,
            self._tables,
            self._parts,
            self._following["places"],
            self._shares,
            strict=True,
        ):
            # what a block has too much of a corpus, the next has less
            end = (self._following["block"] + 1) * own_share
            while not self._is_whole and stream.place["pairs"] < place["pairs"] + share * (
                end - place["pairs"]
            ):
                first = stream.place["pairs"]
                table = next(tables)
                if table is None:
                    self._is_whole = len(self.corpora) == 1 and starts_a_pass(place)
                    continue
                try:
                    tokens = encode_table(table, [first], "train", self.tokenizer, self.languages)
                except ValueError as error:
                    raise ValueError(
                        f"{error} Lines of a stream are counted as they are read, over files in "
                        "the order of their pass."
                    ) from error
                parts.append(tokens)
        self._places = [stream.place for stream in self._streams]

    def _plan(self):
        """Make the block of what was read."""
        # with a name of its own the library does not read all of it to find one
        tables = itertools.chain.from_iterable(self._parts)
        self._is_whole = False
        rows = datasets.Dataset(pa.concat_tables(tables), fingerprint="block")
        self._parts = [[] for _ in self.corpora]
        judged = judge(rows, **self.rules)
        counts = counts_of(judged[2])
        digest = hashlib.sha256()
        for name in ("hash_high", "hash_low"):
            for chunk in rows.data.column(name).chunks:
                digest.update(chunk.to_numpy())
        self._position = {
            **self._following,
            "block_counts": counts,
            "text_sha256": digest.hexdigest(),
        }
        # later on, a run would be lost for what is only to be counted
        if self._position["block"] == 0:
            refuse_useless(counts, "the first block of the text to train on")
        pairs = Pairs(rows.select_columns(["input_ids", "labels"]), judged)
        numbers = pairs.kept()
        self._block = None
        if len(numbers):
            larger = np.maximum(pairs.source_lengths, pairs.target_lengths)[numbers]
            refuse_longest(int(larger.max()), self.tokens_per_step)
            self._block = Block(
                pairs,
                numbers,
                steps_for(int(larger.sum()), self.tokens_per_step),
                self.length_groups_per_step,
                np.random.default_rng([self.seed, 4, self._position["block"]]),
            )
        num_steps = len(self._block.steps) if self._block else 0
        self._following = {
            "block": self._position["block"] + 1,
            "first_step": self._position["first_step"] + num_steps,
            "places": self._places,
            "counts": dict(Counter(self._position["counts"]) + Counter(counts)),
        }
