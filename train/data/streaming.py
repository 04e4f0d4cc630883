"""Stream training text: read it during training, for corpora that do not fit on disk. Section 5.1.

A stream reads its corpus in passes, and each pass reads the files in a new random order. The pairs
of a block are tokenized, filtered and planned into steps together, as in `batches`. A single corpus
smaller than `block_pairs` is one block. In a mixture of corpora, every block contains the share of
each corpus. A corpus smaller than its share of a block is then read several times for one block, so
`block_pairs` should not be many times the size of a corpus.

The pairs of a step depend only on the corpora and their weights, on the seed, and on the settings
`tokens_per_step`, `length_groups_per_step` and `block_pairs`. Duplicates are found only within a
block. Only the order of the files, and the pairs within a block, are shuffled: a sorted corpus
should be shuffled beforehand, or divided into many files.
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

from ..run_folder.run_state import STREAM_POSITIONS
from .batches import BatchPlan, Block, StepData, count_steps, refuse_longest
from .corpus import texts_of
from .leaks import PAIR, LeakFinder
from .pairs import (
    KEPT,
    LEAK,
    PAIR_VERDICTS,
    Pairs,
    count_verdicts,
    encode_table,
    filter_pairs,
    refuse_unusable,
)

# largest number of pairs that are read at once
READ_PAIRS = 1000


class Stream:
    """Endless stream of one corpus, pass after pass, which can start from any position.

    Args:
        rows: Pairs of the corpus.
        seed: Seed of the run; seed and `corpus_index` determine the order of the files in each
            pass.
        corpus_index: Index of the corpus in the run.
        position: Position to start from, which is the attribute `position` of an earlier stream; by
            default the beginning.
        read_pairs: Number of pairs to read at once.
    """

    def __init__(
        self,
        rows: datasets.IterableDataset,
        seed: int,
        corpus_index: int,
        position: dict[str, Any] | None = None,
        read_pairs: int = READ_PAIRS,
    ):
        self.rows = rows
        self.seed = seed
        self.corpus_index = corpus_index
        self.read_pairs = read_pairs
        # position after the last pair that was read, in JSON types; "pairs" counts the pairs of all
        # passes
        self.position = position or {"pass": 0, "shard": 0, "state": None, "pairs": 0}

    def tables(self) -> Iterator[pa.Table | None]:
        """Read tables of pairs, pass after pass without an end.

        Yields:
            Pairs, with the column "translation"; None at the end of a pass.

        Raises:
            ValueError: If a whole pass has no pairs.
        """
        while True:
            start_position = self.position
            pass_number = start_position["pass"]
            random = np.random.default_rng([self.seed, 3, self.corpus_index, pass_number])
            order = random.permutation(self.rows.num_shards).tolist()
            for shard in range(start_position["shard"], len(order)):
                rows = self.rows.shard(len(order), order[shard]).with_format("arrow")
                if self.position["state"] is not None:
                    rows.load_state_dict(self.position["state"])
                for table in rows.iter(self.read_pairs):
                    self.position = {
                        "pass": pass_number,
                        "shard": shard,
                        "state": rows.state_dict(),
                        "pairs": self.position["pairs"] + len(table),
                    }
                    yield table
                self.position = {**self.position, "shard": shard + 1, "state": None}
            if starts_a_pass(start_position) and self.position["pairs"] == start_position["pairs"]:
                raise ValueError("a corpus must have at least one pair to stream, got none.")
            self.position = {**self.position, "pass": pass_number + 1, "shard": 0}
            yield None


def starts_a_pass(position: dict[str, Any]) -> bool:
    """Return whether a position is the beginning of a pass.

    Args:
        position: Position of a stream.

    Returns:
        True if no pair of the pass has been read.
    """
    return position["shard"] == 0 and position["state"] is None


class StreamedSteps(torch.utils.data.Dataset):
    """Training data of one process, indexed by step, from streams.

    Every process and every worker reads, tokenizes and plans all pairs, not only its own share.
    Each step also prepares a part of the next block, so that no step waits for a whole block.

    Args:
        corpora: Corpora to read.
        plan: Settings of the steps, and the share of this process. A block has about `block_pairs`
            pairs before filtering.
        weights: Relative share of each corpus in a block; None for a single corpus.
        tokenizer: Tokenizer of the model.
        languages: Source and target language.
        filter_settings: Limits of `filter_pairs`, by the name of its argument.
        position: Position to resume from, from the `StepData` of an earlier step; by default the
            beginning.
        leak_finder: Finder of evaluation sentences; training pairs that contain one are dropped.
            If None, these pairs are kept.

    Raises:
        ValueError: If a corpus has no pair, the first block has no usable pair or has a sentence
            that is too long, or the text at the position has changed.
    """

    _block: Block | None
    _tables: list[Iterator[pa.Table | None]] | None
    _encoded_tables: list[list[pa.Table]]
    _stream_positions: list[dict[str, Any]]

    def __init__(
        self,
        corpora: Sequence[datasets.IterableDataset],
        plan: BatchPlan,
        *,
        weights: Sequence[float] | None,
        tokenizer: PreTrainedTokenizerBase,
        languages: Sequence[str],
        filter_settings: dict[str, Any],
        position: dict[str, Any] | None = None,
        leak_finder: LeakFinder | None = None,
    ):
        self.corpora = corpora
        self.plan = plan
        self.tokenizer = tokenizer
        self.languages = languages
        self.filter_settings = filter_settings
        weights = [1.0] if weights is None else weights
        self._corpus_shares = [plan.block_pairs * weight / sum(weights) for weight in weights]
        self.leak_finder = leak_finder
        self._start_position = position or {
            "block": 0,
            "first_step": 0,
            STREAM_POSITIONS: [
                Stream(rows, plan.seed, index).position for index, rows in enumerate(corpora)
            ],
            "counts": {},
        }
        # load the first block now, to refuse unusable text before the training. Forked workers
        # inherit the block, but not the open files, because processes that share an open file also
        # share its read position
        self._load_first_block()
        self._tables = None

    def __getstate__(self) -> dict[str, Any]:
        # do not pickle the block for a spawned worker: the worker reads the block again
        return self.__dict__ | {"_block": None, "_tables": None}

    @property
    def text_sha256(self) -> str:
        """SHA-256 of the pairs of the current block."""
        return self._position["text_sha256"]

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts that must be unchanged when a run is resumed.

        Counts of the whole text are unknown. Instead, the SHA-256 of the block that a run resumes
        from is compared.

        Returns:
            The fact that the text is streamed.
        """
        return {"streaming": True}

    def __getitem__(self, steps_done: int) -> StepData:
        """Make the micro-batches of a step.

        Args:
            steps_done: Number of steps before this step, since the beginning of the run.

        Returns:
            Micro-batches of this process, and the position at which their block begins.

        Raises:
            ValueError: If the step is before the position that the run resumed from, a row is not
                text, or a sentence has more tokens than `tokens_per_step`.
        """
        if steps_done < self._start_position["first_step"]:
            raise ValueError(
                f"steps of this stream must not be before {self._start_position['first_step']}, "
                f"got {steps_done}."
            )
        if self._block is None or steps_done < self._position["first_step"]:
            self._load_first_block()
        while self._block is None or steps_done >= self._next_position["first_step"]:
            self._read_pairs(1.0)
            self._plan_block()
        step_index = steps_done - self._position["first_step"]
        # read the same share of the next block, so that it is complete when this block ends
        self._read_pairs((step_index + 1) / len(self._block.steps))
        return StepData(self._block.make_micro_batches(step_index, self.plan), self._position)

    def _load_first_block(self):
        self._block = self._tables = None
        self._has_whole_corpus = False
        self._next_position, self._encoded_tables = self._start_position, [[] for _ in self.corpora]
        self._read_pairs(1.0)
        self._plan_block()
        text_sha256 = self._position["text_sha256"]
        expected_sha256 = self._start_position.get("text_sha256", None)
        if expected_sha256 not in (None, text_sha256):
            raise ValueError(
                f"a run must be resumed with the same text, got block {self._position['block']} "
                f"with the SHA-256 {text_sha256} instead of {expected_sha256}."
            )

    def _read_pairs(self, share: float):
        """Read and tokenize pairs of the next block until this share of the block is complete.

        Args:
            share: Share of the block, from 0 to 1.
        """
        if self._tables is None:
            positions = (
                self._stream_positions
                if any(self._encoded_tables)
                else self._next_position[STREAM_POSITIONS]
            )
            # read at most a corpus's share of a block at once: the surplus of a larger read could
            # be the whole share of the next block
            self._streams = [
                Stream(
                    rows,
                    self.plan.seed,
                    corpus_index,
                    position,
                    max(1, min(READ_PAIRS, int(share))),
                )
                for corpus_index, (rows, position, share) in enumerate(
                    zip(self.corpora, positions, self._corpus_shares, strict=True)
                )
            ]
            self._tables = [stream.tables() for stream in self._streams]
        for stream, tables, encoded_tables, position, corpus_share in zip(
            self._streams,
            self._tables,
            self._encoded_tables,
            self._next_position[STREAM_POSITIONS],
            self._corpus_shares,
            strict=True,
        ):
            # number of pairs from the beginning of the run to the end of this block, so that the
            # surplus pairs of a block are deducted from the next block
            end_pair = (self._next_position["block"] + 1) * corpus_share
            needed_pairs = position["pairs"] + share * (end_pair - position["pairs"])
            while not self._has_whole_corpus and stream.position["pairs"] < needed_pairs:
                first_pair = stream.position["pairs"]
                table = next(tables)
                if table is None:
                    self._has_whole_corpus = len(self.corpora) == 1 and starts_a_pass(position)
                    continue
                try:
                    encoded_table = encode_table(
                        table, [first_pair], "train", self.tokenizer, self.languages
                    )
                except ValueError as error:
                    raise ValueError(
                        f"{error} Lines of a stream are counted in the order in which its files "
                        "are read."
                    ) from error
                encoded_tables.append(self._mark_leaks(encoded_table, table))
        self._stream_positions = [stream.position for stream in self._streams]

    def _mark_leaks(self, encoded_table: pa.Table, table: pa.Table) -> pa.Table:
        """Set the verdict `LEAK` for the pairs that contain a sentence of an evaluation split.

        Args:
            encoded_table: Encoded pairs, with the columns of `FEATURES`.
            table: Texts of the same pairs.

        Returns:
            The encoded pairs with their new verdicts.
        """
        if self.leak_finder is None:
            return encoded_table
        hits = self.leak_finder.find(texts_of(table, self.languages, "train", repair=True))
        verdicts = encoded_table["verdict"].to_numpy().copy()
        leaking_pairs = np.unique(hits[:, PAIR])
        verdicts[leaking_pairs[verdicts[leaking_pairs] == KEPT]] = LEAK
        column = encoded_table.column_names.index("verdict")
        return encoded_table.set_column(column, "verdict", pa.array(verdicts))

    def _plan_block(self):
        """Filter the pairs that were read, and plan them as the current block."""
        # a fixed fingerprint saves time, because `datasets` would otherwise hash the whole table
        tables = itertools.chain.from_iterable(self._encoded_tables)
        self._has_whole_corpus = False
        rows = datasets.Dataset(pa.concat_tables(tables), fingerprint="block")
        self._encoded_tables = [[] for _ in self.corpora]
        lengths_and_verdicts = filter_pairs(rows, **self.filter_settings)
        counts = count_verdicts(lengths_and_verdicts[PAIR_VERDICTS])
        digest = hashlib.sha256()
        for name in ("hash_high", "hash_low"):
            for chunk in rows.data.column(name).chunks:
                digest.update(chunk.to_numpy())
        self._position = {
            **self._next_position,
            "block_counts": counts,
            "text_sha256": digest.hexdigest(),
        }
        # unusable text is an error only in the first block. Later blocks are only counted, because
        # an error would end a long run
        if self._position["block"] == 0:
            refuse_unusable(counts, "the first block of the training text")
        pairs = Pairs(rows.select_columns(["input_ids", "labels"]), lengths_and_verdicts)
        pair_indices = pairs.kept_indices()
        self._block = None
        if len(pair_indices):
            longer_lengths = np.maximum(pairs.source_lengths, pairs.target_lengths)[pair_indices]
            refuse_longest(int(longer_lengths.max()), self.plan.tokens_per_step)
            self._block = Block(
                pairs,
                pair_indices,
                count_steps(int(longer_lengths.sum()), self.plan.tokens_per_step),
                self.plan.length_groups_per_step,
                np.random.default_rng([self.plan.seed, 4, self._position["block"]]),
            )
        num_steps = len(self._block.steps) if self._block else 0
        self._next_position = {
            "block": self._position["block"] + 1,
            "first_step": self._position["first_step"] + num_steps,
            STREAM_POSITIONS: self._stream_positions,
            "counts": dict(Counter(self._position["counts"]) + Counter(counts)),
        }
