"""Batches of about equal length, and what each process sees at each step. Section 5.1.

An epoch is a shuffled order of all pairs, cut into blocks; a block is cut into groups of pairs that
are about as long on both sides, and a step is some groups drawn from the block. Random are the
order of the pairs and with it who shares a block, who of those of about equal length shares a
group, which groups make a step, and the order of the steps in a block. Not random is that the pairs
of a group are alike in length. Every pair comes once an epoch, or with weights each corpus its
share.

The pairs of a step depend on corpus, seed and batch size alone: not on the number of processes or
workers, nor on the memory of each.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .pairs import CHUNK, Pairs

# label of a position without a target token
IGNORED = -100
# widens the choice of those who share a group, for a little padding
LENGTH_NOISE = 1.0
# what is known of the steps at hand, before any are
NO_BLOCK = dict.fromkeys(("_epoch", "_block_index", "_order", "_block"))


def plan_steps(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    num_steps: int,
    length_groups_per_step: int,
    random: np.random.Generator,
) -> list[list[np.ndarray]]:
    """Divide sentences into steps, and each step into groups of about equal length. Section 5.1.

    Args:
        source_lengths: Tokens of each source, [sentences].
        target_lengths: Tokens of each target, [sentences].
        num_steps: How many steps of about equally many tokens to make.
        length_groups_per_step: Groups that a step is drawn from.
        random: Decides the order.

    Returns:
        For each step its groups, each an array of sentence numbers.

    Raises:
        ValueError: If there are fewer sentences than steps.
    """
    sentences = len(source_lengths)
    if sentences < num_steps:
        raise ValueError(
            f"{num_steps} steps must have at least one sentence each, got {sentences}: "
            "raise tokens_per_step."
        )
    groups_per_step = min(length_groups_per_step, sentences // num_steps)
    num_groups = num_steps * groups_per_step
    # the larger side bounds both; equal shares leave no small last step
    tokens = np.maximum(source_lengths, target_lengths)
    noisy = [
        side + LENGTH_NOISE * random.random(sentences) for side in (source_lengths, target_lengths)
    ]
    groups = _alike(random.permutation(sentences), noisy, tokens, num_groups)
    drawn = random.permutation(num_groups).reshape(num_steps, groups_per_step)
    return [[groups[index] for index in step] for step in drawn]


def _alike(
    sentences: np.ndarray, lengths: Sequence[np.ndarray], tokens: np.ndarray, num_groups: int
) -> list[np.ndarray]:
    """Halve by the side that differs more, again and again: groups are alike on both sides."""
    if num_groups == 1:
        return [sentences]
    sides = [side[sentences] for side in lengths]
    order = sentences[np.argsort(max(sides, key=np.ptp), kind="stable")]
    half = num_groups // 2
    summed = np.cumsum(tokens[order], dtype=np.int64)
    cut = int(np.searchsorted(summed, summed[-1] * half / num_groups, side="right"))
    # no group without a sentence
    cut = min(max(cut, half), len(order) - (num_groups - half))
    parts = ((order[:cut], half), (order[cut:], num_groups - half))
    return [group for part, size in parts for group in _alike(part, lengths, tokens, size)]


def steps_for(num_tokens: int, tokens_per_step: int) -> int:
    """How many steps so many tokens make.

    Args:
        num_tokens: Of the larger side of each pair.
        tokens_per_step: Most tokens of a step, about.

    Returns:
        At least one.
    """
    return max(1, -(-num_tokens // tokens_per_step))


def refuse_longest(longest: int, tokens_per_step: int) -> None:
    """Refuse sentences that no step can hold.

    Args:
        longest: Tokens of the longest one.
        tokens_per_step: Tokens of a step.

    Raises:
        ValueError: If it does not fit.
    """
    if longest > tokens_per_step:
        raise ValueError(
            f"tokens_per_step must hold the longest sentence, of {longest} tokens, "
            f"got {tokens_per_step}."
        )


def split_step(
    groups: Sequence[np.ndarray],
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    tokens_per_micro_batch: int,
    num_processes: int,
) -> list[list[np.ndarray]]:
    """Cut a step into micro-batches that fit into memory, as many for each process.

    Args:
        groups: The sentences of the step, each group of about equal length.
        source_lengths: Tokens of each source, [sentences].
        target_lengths: Tokens of each target, [sentences].
        tokens_per_micro_batch: Most source or target tokens of a micro-batch, padding included.
        num_processes: Processes that share the step.

    Returns:
        For each process its micro-batches, each an array of sentence numbers.

    Raises:
        ValueError: If a sentence does not fit, or there are fewer sentences than processes.
    """

    def longest(part: np.ndarray) -> int:
        # of this part alone: a block has hundreds of times as many sentences as a step
        return int(max(source_lengths[part].max(), target_lengths[part].max()))

    def padded(part: np.ndarray) -> int:
        return len(part) * longest(part)

    parts = []
    for group in groups:
        pieces = max(1, -(-padded(group) // tokens_per_micro_batch) - 1)
        while any(padded(part) > tokens_per_micro_batch for part in np.array_split(group, pieces)):
            pieces += 1
            if pieces > len(group):
                raise ValueError(
                    "tokens_per_micro_batch must hold every sentence, "
                    f"got {tokens_per_micro_batch} and one of {longest(group)} tokens."
                )
        parts += np.array_split(group, pieces)
    while len(parts) % num_processes:
        largest = max(
            (part for part in parts if len(part) > 1), key=padded, default=np.empty(0, dtype=int)
        )
        if len(largest) == 0:
            raise ValueError(
                "a step must have at least one sentence for each process, "
                f"got {sum(map(len, groups))} for {num_processes}: raise tokens_per_step."
            )
        index = next(index for index, part in enumerate(parts) if part is largest)
        parts[index : index + 1] = np.array_split(largest, 2)
    # what runs at the same time on all processes is about equally large
    parts.sort(key=padded, reverse=True)
    return [parts[process::num_processes] for process in range(num_processes)]


class Collator:
    """Pads sentences to a batch.

    Args:
        pad_token_id: Fills the shorter sources and decoder inputs.
        decoder_start_token_id: What the decoder reads first.
        vocab_size: Every id must be below it.
    """

    def __init__(self, pad_token_id: int, decoder_start_token_id: int, vocab_size: int):
        self.pad_token_id = pad_token_id
        self.decoder_start_token_id = decoder_start_token_id
        self.vocab_size = vocab_size

    def __call__(self, rows: dict[str, Sequence[Sequence[int]]]) -> dict[str, Tensor]:
        """Make the tensors of one micro-batch.

        Args:
            rows: Columns "input_ids" and "labels" of some pairs.

        Returns:
            `input_ids` and `attention_mask`, [B, S]; `labels`, `IGNORED` where padded, and
            `decoder_input_ids`, the labels shifted right, [B, T].

        Raises:
            ValueError: If there is no pair, or an id is not in the vocabulary.
        """
        if len(rows["input_ids"]) == 0:
            raise ValueError("a batch must have at least one sentence, got none.")
        input_ids, attention_mask = _padded(rows["input_ids"], self.pad_token_id)
        labels, is_label = _padded(rows["labels"], self.pad_token_id)
        for name, ids in (("input_ids", input_ids), ("labels", labels)):
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise ValueError(f"{name} must be ids below {self.vocab_size}, got {wrong}.")
        start = torch.full_like(labels[:, :1], self.decoder_start_token_id)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask.long(),
            "decoder_input_ids": torch.cat((start, labels[:, :-1]), dim=1),
            "labels": labels.where(is_label, IGNORED),
        }


def _padded(sentences: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    sizes = np.array([len(ids) for ids in sentences])
    is_token = np.arange(sizes.max()) < sizes[:, None]
    array = np.full(is_token.shape, pad_token_id, dtype=np.int64)
    array[is_token] = np.concatenate(sentences)
    return torch.from_numpy(array), torch.from_numpy(is_token)


class StepData(NamedTuple):
    """What one process has of a step.

    Args:
        batches: Its micro-batches, from `Collator`.
        position: Where a stream stood, as JSON has it; None where the step's number says it all.
    """

    batches: list[dict[str, Tensor]]
    position: dict | None = None


class Block:
    """Pairs that are planned into steps together.

    Args:
        pairs: Where they are taken from.
        numbers: Which of them.
        num_steps: As in `plan_steps`.
        length_groups_per_step: As in `plan_steps`.
        random: As in `plan_steps`.
    """

    def __init__(
        self,
        pairs: Pairs,
        numbers: np.ndarray,
        num_steps: int,
        length_groups_per_step: int,
        random: np.random.Generator,
    ):
        self.pairs = pairs
        self.numbers = numbers
        self.lengths = pairs.source_lengths[numbers], pairs.target_lengths[numbers]
        self.steps = plan_steps(*self.lengths, num_steps, length_groups_per_step, random)

    def micro_batches(
        self,
        index: int,
        collator: "Collator",
        tokens_per_micro_batch: int,
        num_processes: int,
        process_index: int,
    ) -> list[dict[str, Tensor]]:
        """What one process has of a step.

        Args:
            index: Of the step in the block.
            collator: Makes a micro-batch.
            tokens_per_micro_batch: As in `split_step`.
            num_processes: As in `split_step`.
            process_index: Which of them this is.

        Returns:
            Its micro-batches.
        """
        parts = split_step(self.steps[index], *self.lengths, tokens_per_micro_batch, num_processes)[
            process_index
        ]
        return [collator(self.pairs[self.numbers[part]]) for part in parts]


def shares_of(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """How many pairs of each corpus an epoch has.

    Args:
        sizes: Pairs of each corpus.
        weights: Its share of the pairs that are drawn, of any sum; None for all pairs once.

    Returns:
        Numbers of pairs, as many in all as the corpora have.
    """
    if weights is None:
        return list(sizes)
    # where each corpus ends, rounded, leaves no pair over
    ends = np.rint(np.cumsum(weights) / np.sum(weights) * sum(sizes)).astype(int)
    return np.diff(ends, prepend=0).tolist()


def epoch_order(
    corpora: Sequence[np.ndarray], shares: Sequence[int], seed: int, epoch: int
) -> np.ndarray:
    """The order of an epoch. Each corpus gives its share, and goes through its pairs pass by pass.

    Args:
        corpora: Numbers of the pairs of each corpus.
        shares: How many of them an epoch has, from `shares_of`.
        seed: Of the run.
        epoch: Counted from 0.

    Returns:
        Numbers of pairs.
    """
    drawn = []
    for corpus, (numbers, share) in enumerate(zip(corpora, shares, strict=True)):
        # all of them are in order enough: they are shuffled below
        if share == len(numbers):
            drawn.append(numbers)
            continue
        first = epoch * share
        while first < (epoch + 1) * share:
            a_pass, start = divmod(first, len(numbers))
            order = numbers.copy()
            np.random.default_rng([seed, 2, corpus, a_pass]).shuffle(order)
            drawn.append(order[start : start + (epoch + 1) * share - first])
            first += len(drawn[-1])
    order = np.concatenate(drawn)
    np.random.default_rng([seed, 0, epoch]).shuffle(order)
    return order


class TrainingSteps(torch.utils.data.Dataset):
    """What one process sees at each step: a function of the step, so that a run can go on anywhere.

    Args:
        pairs: Pairs to train on, corpus after corpus, one spelling of all after another.
        collator: Makes a micro-batch.
        tokens_per_step: About how many source tokens, and how many target tokens, a step has.
        length_groups_per_step: As in `plan_steps`.
        tokens_per_micro_batch: As in `split_step`.
        seed: Of the run.
        num_processes: As in `split_step`.
        process_index: Which of them this is.
        block_pairs: About how many pairs are planned into steps together.
        sizes: Rows of each corpus; one if not given.
        weights: As in `shares_of`.
        num_spellings: How often the same corpora stand in `pairs`; an epoch sees one spelling.

    Raises:
        ValueError: If there is no pair, or one does not fit into a step.
    """

    def __init__(
        self,
        pairs: Pairs,
        collator: Collator,
        tokens_per_step: int,
        length_groups_per_step: int,
        tokens_per_micro_batch: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
        block_pairs: int = 500_000,
        sizes: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        num_spellings: int = 1,
    ):
        self.pairs = pairs
        self.collator = collator
        self.length_groups_per_step = length_groups_per_step
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.seed = seed
        self.num_processes = num_processes
        self.process_index = process_index
        self.num_spellings = num_spellings
        self._ends = np.cumsum([0, *(sizes or [len(pairs.rows) // num_spellings])]).tolist()
        parts = [
            [_totals(pairs, numbers) for numbers in self._corpora(spelling)]
            for spelling in range(num_spellings)
        ]
        self._shares = shares_of([total["pairs"] for total in parts[0]], weights)
        totals = [_joined(totals) for totals in zip(*parts, strict=True)]
        refuse_longest(max(total["longest"] for total in totals), tokens_per_step)
        expected = [
            total["larger_tokens"] * share / total["pairs"]
            for total, share in zip(totals, self._shares, strict=True)
            if share
        ]
        self.steps_per_epoch = steps_for(round(sum(expected)), tokens_per_step)
        self._num_blocks = max(1, min(round(sum(self._shares) / block_pairs), self.steps_per_epoch))
        names = ("pairs", "source_tokens", "target_tokens")
        # of an epoch, which sees one spelling
        self._totals = {
            name: sum(total[name] for total in totals) // num_spellings for name in names
        }
        self._forget()

    def _forget(self):
        self.__dict__ |= NO_BLOCK

    def __getstate__(self) -> dict:
        # a worker that is started anew makes its own
        return self.__dict__ | NO_BLOCK

    def _corpora(self, epoch: int) -> Iterator[np.ndarray]:
        start = epoch % self.num_spellings * self._ends[-1]
        for first, last in itertools.pairwise(self._ends):
            yield self.pairs.kept(start + first, start + last)

    def fingerprint(self) -> dict[str, int]:
        """What must be the same where a run is resumed.

        Returns:
            Numbers of pairs, of tokens and of steps.
        """
        return {**self._totals, "steps_per_epoch": self.steps_per_epoch}

    def __getitem__(self, steps_done: int) -> StepData:
        """What this process has of the step after `steps_done` others.

        Args:
            steps_done: Steps before it, over all epochs.

        Returns:
            Its micro-batches.
        """
        block, index = self.block_of(steps_done)
        batches = block.micro_batches(
            index,
            self.collator,
            self.tokens_per_micro_batch,
            self.num_processes,
            self.process_index,
        )
        return StepData(batches)

    def block_of(self, steps_done: int) -> tuple[Block, int]:
        """Where the step after `steps_done` others is planned.

        Args:
            steps_done: Steps before it, over all epochs.

        Returns:
            Its block, and its place there.
        """
        epoch, index = divmod(steps_done, self.steps_per_epoch)
        # the last block that starts at this step or before
        block = (index * self._num_blocks + self._num_blocks - 1) // self.steps_per_epoch
        if (epoch, block) != (self._epoch, self._block_index):
            self._load_block(epoch, block)
        return self._block, index - self._first_step(block)

    def _first_step(self, block: int) -> int:
        return block * self.steps_per_epoch // self._num_blocks

    def _load_block(self, epoch: int, block: int):
        if epoch != self._epoch:
            self._forget()
            self._order = epoch_order(list(self._corpora(epoch)), self._shares, self.seed, epoch)
        self._epoch, self._block_index = epoch, block
        steps = [self._first_step(end) for end in (block, block + 1)]
        # in proportion to its steps, so that there is a sentence for each
        first, last = (len(self._order) * step // self.steps_per_epoch for step in steps)
        self._block = Block(
            self.pairs,
            self._order[first:last],
            steps[1] - steps[0],
            self.length_groups_per_step,
            np.random.default_rng([self.seed, 1, epoch, block]),
        )


def _totals(pairs: Pairs, numbers: np.ndarray) -> dict[str, int]:
    totals = dict.fromkeys(("source_tokens", "target_tokens", "larger_tokens", "longest"), 0)
    for first in range(0, len(numbers), CHUNK):
        part = numbers[first : first + CHUNK]
        source, target = pairs.source_lengths[part], pairs.target_lengths[part]
        larger = np.maximum(source, target)
        totals["source_tokens"] += int(source.sum())
        totals["target_tokens"] += int(target.sum())
        totals["larger_tokens"] += int(larger.sum())
        totals["longest"] = max(totals["longest"], int(larger.max()))
    return {"pairs": len(numbers), **totals}


def _joined(totals: Sequence[dict[str, int]]) -> dict[str, int]:
    return {
        name: (max if name == "longest" else sum)(total[name] for total in totals)
        for name in totals[0]
    }


def evaluation_batches(
    pairs: Pairs,
    collator: Collator,
    tokens_per_micro_batch: int,
    num_processes: int = 1,
    process_index: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Go once through a split, each pair on one process, in as many micro-batches on each.

    A process that would have one less gets one in which no target token counts: where each process
    has a part of the model, all of them must go through it together.

    Args:
        pairs: The split.
        collator: Makes a micro-batch.
        tokens_per_micro_batch: As in `split_step`.
        num_processes: Processes that share the split.
        process_index: Which of them this is.

    Yields:
        Micro-batches of this process.
    """
    numbers = pairs.kept()
    num_steps = steps_for(_totals(pairs, numbers)["larger_tokens"], tokens_per_micro_batch)
    block = Block(pairs, numbers, num_steps, 1, np.random.default_rng(0))
    parts = [
        part
        for groups in block.steps
        for part in split_step(groups, *block.lengths, tokens_per_micro_batch, num_processes=1)[0]
    ]
    for first in range(0, len(parts), num_processes):
        number = first + process_index
        batch = collator(pairs[numbers[parts[min(number, len(parts) - 1)]]])
        if number >= len(parts):
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        yield batch
