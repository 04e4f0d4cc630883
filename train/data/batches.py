"""Group pairs of similar length into steps, and divide each step among processes. Section 5.1.

An epoch shuffles all pairs and cuts their order into blocks. A block is cut into groups: the pairs
of a group have similar source lengths and similar target lengths. A step consists of several
groups, which are drawn at random from the block. Each process computes its part of a step in one or
more micro-batches.

Four choices are random: which pairs share a block, which pairs of similar length share a group,
which groups share a step, and the order of the steps in a block. Without corpus weights, an epoch
contains every pair once. With weights, an epoch contains each corpus in proportion to its weight.

The pairs of a step depend only on the corpora and their weights, on the seed, and on the settings
`tokens_per_step`, `length_groups_per_step` and `block_pairs`. They do not depend on the number of
processes or workers, nor on the memory of each process.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .pairs import PAIRS_PER_CHUNK, Pairs

# label of padding, which the loss ignores: the default `ignore_index` of torch's cross entropy
IGNORED = -100
# random noise from 0 to this number of tokens is added to each length before the sort. The noise
# decides between two sides whose lengths vary about equally, so that each epoch forms other groups;
# pairs of slightly different lengths can then share a group, which costs a little padding
LENGTH_NOISE = 1.0
# values of the attributes for the current block while no block is loaded
NO_BLOCK = dict.fromkeys(("_epoch", "_block_index", "_epoch_order", "_block"))


def plan_steps(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    num_steps: int,
    length_groups_per_step: int,
    random: np.random.Generator,
) -> list[list[np.ndarray]]:
    """Divide sentence pairs into steps, and each step into groups of similar length. Section 5.1.

    Args:
        source_lengths: Number of tokens of each source, [sentences].
        target_lengths: Number of tokens of each target, [sentences].
        num_steps: Number of steps, at most the number of sentence pairs. All steps get about the
            same number of tokens.
        length_groups_per_step: Number of groups in a step; fewer if a step would otherwise have
            more groups than sentence pairs.
        random: Random number generator, which decides the groups and the order of the steps.

    Returns:
        Groups of each step; each group is an array of sentence indices, [sentences of the group].
    """
    num_sentences = len(source_lengths)
    groups_per_step = min(length_groups_per_step, num_sentences // num_steps)
    num_groups = num_steps * groups_per_step
    # groups are cut so that each has about the same number of tokens, counted on the longer side of
    # each pair, because the longer side determines the padded size of a micro-batch
    longer_lengths = np.maximum(source_lengths, target_lengths)
    noisy_lengths = [
        side + LENGTH_NOISE * random.random(num_sentences)
        for side in (source_lengths, target_lengths)
    ]
    groups = _split_by_length(
        random.permutation(num_sentences), noisy_lengths, longer_lengths, num_groups
    )
    group_indices = random.permutation(num_groups).reshape(num_steps, groups_per_step)
    return [[groups[index] for index in step] for step in group_indices]


def _split_by_length(
    sentence_indices: np.ndarray,
    noisy_lengths: Sequence[np.ndarray],
    token_counts: np.ndarray,
    num_groups: int,
) -> list[np.ndarray]:
    """Halve the sentences recursively, each time sorted by the side with the wider length range."""
    if num_groups == 1:
        return [sentence_indices]
    side_lengths = [side[sentence_indices] for side in noisy_lengths]
    order = sentence_indices[np.argsort(max(side_lengths, key=np.ptp), kind="stable")]
    num_left_groups = num_groups // 2
    token_sums = np.cumsum(token_counts[order], dtype=np.int64)
    cut = int(
        np.searchsorted(token_sums, token_sums[-1] * num_left_groups / num_groups, side="right")
    )
    # leave at least one sentence for each group of both halves
    cut = min(max(cut, num_left_groups), len(order) - (num_groups - num_left_groups))
    halves = ((order[:cut], num_left_groups), (order[cut:], num_groups - num_left_groups))
    return [
        group
        for half, num_half_groups in halves
        for group in _split_by_length(half, noisy_lengths, token_counts, num_half_groups)
    ]


def count_steps(num_tokens: int, tokens_per_step: int) -> int:
    """Compute the number of steps for a number of tokens.

    Args:
        num_tokens: Sum over all pairs of the number of tokens of the longer side.
        tokens_per_step: Approximate maximum number of tokens in a step.

    Returns:
        Number of steps, at least one.
    """
    return max(1, -(-num_tokens // tokens_per_step))


def refuse_longest(longest_length: int, tokens_per_step: int) -> None:
    """Raise an error if the longest sentence has more tokens than a step.

    Args:
        longest_length: Number of tokens of the longest sentence.
        tokens_per_step: Number of tokens in a step.

    Raises:
        ValueError: If `longest_length` exceeds `tokens_per_step`.
    """
    if longest_length > tokens_per_step:
        raise ValueError(
            f"tokens_per_step must be at least {longest_length}, the tokens of the longest "
            f"sentence, got {tokens_per_step}."
        )


def split_step(
    groups: Sequence[np.ndarray],
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    tokens_per_micro_batch: int,
    num_processes: int,
    launch_tokens: int = 0,
) -> list[list[np.ndarray]]:
    """Cut a step into micro-batches of limited size, the same number for each process.

    On a GPU each micro-batch has a fixed launch overhead, so a few micro-batches with more padding
    can be faster than many with less. Groups share a micro-batch if their extra padding costs less
    time than the launch of another micro-batch.

    Args:
        groups: Sentence indices of the step, in groups of similar length.
        source_lengths: Number of tokens of each source, [sentences].
        target_lengths: Number of tokens of each target, [sentences].
        tokens_per_micro_batch: Maximum number of source tokens, and of target tokens, in a
            micro-batch, padding included; at least the length of the longest sentence.
        num_processes: Number of processes that share the step.
        launch_tokens: Launch overhead of a micro-batch, as the number of source and target tokens,
            padding included, that take the same time to compute. With 0, no groups share a
            micro-batch.

    Returns:
        Micro-batches of each process; each micro-batch is an array of sentence indices.

    Raises:
        ValueError: If the step has fewer sentences than processes.
    """

    def longest_lengths(sentences: np.ndarray) -> tuple[int, int]:
        # index first, then reduce: the arrays cover the whole block, which is hundreds of steps
        return int(source_lengths[sentences].max()), int(target_lengths[sentences].max())

    def count_padded_tokens(sentences: np.ndarray) -> int:
        return len(sentences) * max(longest_lengths(sentences))

    parts = []
    for group in groups:
        num_parts = max(1, -(-count_padded_tokens(group) // tokens_per_micro_batch) - 1)
        while any(
            count_padded_tokens(part) > tokens_per_micro_batch
            for part in np.array_split(group, num_parts)
        ):
            num_parts += 1
        parts += np.array_split(group, num_parts)
    if launch_tokens:
        part_sizes = [(len(part), *longest_lengths(part)) for part in parts]
        parts = [
            np.concatenate([parts[index] for index in indices])
            for indices in _choose_parts_to_merge(part_sizes, tokens_per_micro_batch, launch_tokens)
        ]
    while len(parts) % num_processes:
        largest = max(
            (part for part in parts if len(part) > 1),
            key=count_padded_tokens,
            default=np.empty(0, dtype=int),
        )
        if len(largest) == 0:
            raise ValueError(
                "a step must have at least one sentence for each process, got "
                f"{sum(map(len, groups))} for {num_processes} processes: raise tokens_per_step."
            )
        index = next(index for index, part in enumerate(parts) if part is largest)
        parts[index : index + 1] = np.array_split(largest, 2)
    # sort by size, so that the micro-batches that the processes compute at the same time have
    # similar sizes and no process waits long for another
    parts.sort(key=count_padded_tokens, reverse=True)
    return [parts[process::num_processes] for process in range(num_processes)]


def _choose_parts_to_merge(
    part_sizes: Sequence[tuple[int, int, int]], tokens_per_micro_batch: int, launch_tokens: int
) -> list[list[int]]:
    """Choose the parts of a step that share a micro-batch, so that the step takes the least time.

    The parts are sorted by length, and dynamic programming finds the best cuts of this order.
    `part_sizes` contains, for each part, the number of sentences, the length of the longest source
    and the length of the longest target. The result lists the part indices of each micro-batch.
    """
    order = sorted(range(len(part_sizes)), key=lambda index: max(part_sizes[index][1:]))
    # for the n shortest parts: the least time, in tokens, and where the last micro-batch starts
    least_times, last_starts = [0], [0]
    for end in range(1, len(order) + 1):
        num_sentences = longest_source = longest_target = 0
        times: dict[int, int] = {}
        for start in reversed(range(end)):
            part_sentences, source_length, target_length = part_sizes[order[start]]
            num_sentences += part_sentences
            longest_source = max(longest_source, source_length)
            longest_target = max(longest_target, target_length)
            padded_tokens = num_sentences * max(longest_source, longest_target)
            if times and padded_tokens > tokens_per_micro_batch:
                break
            micro_batch_time = num_sentences * (longest_source + longest_target) + launch_tokens
            times[start] = least_times[start] + micro_batch_time
        best_start = min(times, key=times.__getitem__)
        least_times.append(times[best_start])
        last_starts.append(best_start)
    micro_batches = []
    end = len(order)
    while end:
        micro_batches.append(order[last_starts[end] : end])
        end = last_starts[end]
    return micro_batches[::-1]


@dataclass
class Collator:
    """Collator that pads sentence pairs to the tensors of a micro-batch.

    Attributes:
        pad_token_id: Id of the padding token of sources and decoder inputs.
        decoder_start_token_id: Id of the first token that the decoder reads.
        vocab_size: Size of the vocabulary; every token id must be below `vocab_size`.
    """

    pad_token_id: int
    decoder_start_token_id: int
    vocab_size: int

    def __call__(
        self, rows: Mapping[str, Sequence[Sequence[int] | np.ndarray]]
    ) -> dict[str, Tensor]:
        """Make the tensors of one micro-batch.

        Args:
            rows: Columns "input_ids" and "labels", each a list of B sequences of token ids.

        Returns:
            `input_ids` and `attention_mask`, [B, S]; `labels`, with `IGNORED` as padding, and
            `decoder_input_ids`, the labels shifted right, [B, T].

        Raises:
            ValueError: If there is no pair, or a token id is not in the vocabulary.
        """
        if len(rows["input_ids"]) == 0:
            raise ValueError("a batch must have at least one sentence, got none.")
        input_ids, attention_mask = _pad_sentences(rows["input_ids"], self.pad_token_id)
        labels, is_label = _pad_sentences(rows["labels"], self.pad_token_id)
        for name, ids in (("input_ids", input_ids), ("labels", labels)):
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                wrong_id = int(ids.min() if ids.min() < 0 else ids.max())
                raise ValueError(f"{name} must be ids below {self.vocab_size}, got {wrong_id}.")
        start_ids = torch.full_like(labels[:, :1], self.decoder_start_token_id)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask.long(),
            "decoder_input_ids": torch.cat((start_ids, labels[:, :-1]), dim=1),
            "labels": labels.where(is_label, IGNORED),
        }


def _pad_sentences(
    sentences: Sequence[Sequence[int] | np.ndarray], pad_token_id: int
) -> tuple[Tensor, Tensor]:
    lengths = np.array([len(ids) for ids in sentences])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    padded_ids = np.full(is_token.shape, pad_token_id, dtype=np.int64)
    padded_ids[is_token] = np.concatenate(sentences)
    return torch.from_numpy(padded_ids), torch.from_numpy(is_token)


class StepData(NamedTuple):
    """Data of one step on one process.

    Args:
        batches: Micro-batches of this process, from `Collator`.
        position: Position in the streams at which the block of this step begins, in JSON types;
            None for a corpus that is not streamed.
    """

    batches: list[dict[str, Tensor]]
    position: dict | None = None


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Settings of the steps, and the share of each step that one process computes.

    Args:
        collator: Collator that makes the tensors of a micro-batch.
        tokens_per_step: Approximate number of source tokens, and of target tokens, in a step.
        length_groups_per_step: Number of groups of similar length in a step.
        tokens_per_micro_batch: Maximum number of source tokens, and of target tokens, in a
            micro-batch, padding included.
        block_pairs: Approximate number of pairs in a block.
        seed: Seed of the run.
        num_processes: Number of processes that share each step.
        process_index: Index of this process.
        launch_tokens: Launch overhead of a micro-batch on the device, in tokens; with 0, no groups
            share a micro-batch.
    """

    collator: Collator
    tokens_per_step: int
    length_groups_per_step: int
    tokens_per_micro_batch: int
    block_pairs: int
    seed: int
    num_processes: int = 1
    process_index: int = 0
    launch_tokens: int = 0


class Block:
    """Pairs that are shuffled and planned into steps together.

    Args:
        pairs: Pairs that contain those of this block.
        pair_indices: Indices in `pairs` of the pairs of this block.
        num_steps: Number of steps, at most the number of pairs.
        length_groups_per_step: Number of groups of similar length in a step.
        random: Random number generator, which decides the groups and the order of the steps.
    """

    def __init__(
        self,
        pairs: Pairs,
        pair_indices: np.ndarray,
        num_steps: int,
        length_groups_per_step: int,
        random: np.random.Generator,
    ):
        self.pairs = pairs
        self.pair_indices = pair_indices
        self.lengths = pairs.source_lengths[pair_indices], pairs.target_lengths[pair_indices]
        self.steps = plan_steps(*self.lengths, num_steps, length_groups_per_step, random)

    def make_micro_batches(self, step_index: int, plan: BatchPlan) -> list[dict[str, Tensor]]:
        """Make the micro-batches of a step for one process.

        Args:
            step_index: Index of the step in this block.
            plan: Settings of the steps, and the share of this process.

        Returns:
            Micro-batches of this process.
        """
        process_parts = split_step(
            self.steps[step_index],
            *self.lengths,
            plan.tokens_per_micro_batch,
            plan.num_processes,
            plan.launch_tokens,
        )
        return [
            plan.collator(self.pairs[self.pair_indices[part]])
            for part in process_parts[plan.process_index]
        ]


def compute_shares(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Compute the number of pairs of each corpus in an epoch.

    Args:
        sizes: Number of pairs of each corpus.
        weights: Relative share of each corpus in an epoch, with any sum; None for all pairs once.

    Returns:
        Number of pairs of each corpus in an epoch. The numbers sum to the sum of `sizes`.
    """
    if weights is None:
        return list(sizes)
    # round the cumulative sums, because separately rounded shares may not sum to the total
    cumulative_shares = np.rint(np.cumsum(weights) / np.sum(weights) * sum(sizes)).astype(int)
    return np.diff(cumulative_shares, prepend=0).tolist()


def draw_epoch_order(
    corpora: Sequence[np.ndarray], shares: Sequence[int], seed: int, epoch: int
) -> np.ndarray:
    """Draw and shuffle the pairs of an epoch.

    If the share of a corpus is not its size, the epochs draw from one endless sequence of shuffled
    passes over the corpus: each epoch continues where the previous epoch stopped.

    Args:
        corpora: Indices of the pairs of each corpus.
        shares: Number of pairs of each corpus in an epoch, from `compute_shares`.
        seed: Seed of the run.
        epoch: Index of the epoch, from 0.

    Returns:
        Indices of the pairs, in the order of the epoch.
    """
    drawn_parts = []
    for corpus_index, (pair_indices, share) in enumerate(zip(corpora, shares, strict=True)):
        # a corpus that is used exactly once is not shuffled here: the whole epoch is shuffled below
        if share == len(pair_indices):
            drawn_parts.append(pair_indices)
            continue
        first_draw = epoch * share
        while first_draw < (epoch + 1) * share:
            pass_number, start = divmod(first_draw, len(pair_indices))
            order = pair_indices.copy()
            np.random.default_rng([seed, 2, corpus_index, pass_number]).shuffle(order)
            drawn_parts.append(order[start : start + (epoch + 1) * share - first_draw])
            first_draw += len(drawn_parts[-1])
    order = np.concatenate(drawn_parts)
    np.random.default_rng([seed, 0, epoch]).shuffle(order)
    return order


class TrainingSteps(torch.utils.data.Dataset):
    """Training data of one process, indexed by step, so that a run can resume at any step.

    Args:
        pairs: Training pairs, corpus after corpus. With several segmentations, all corpora in the
            first segmentation come before all corpora in the second, and so on.
        plan: Settings of the steps, and the share of this process.
        corpus_sizes: Number of pairs of each corpus in one segmentation, dropped pairs included;
            by default there is one corpus.
        weights: Relative share of each corpus in an epoch, with any sum; None for all pairs once.
        num_segmentations: Number of segmentations in `pairs`, which the epochs use in turn. Each
            one segments all corpora at random by BPE-dropout, see `pairs.Segmentation`.

    Raises:
        ValueError: If the longest sentence has more tokens than `tokens_per_step`.
    """

    # attributes for the current block, with the values of `NO_BLOCK` while no block is loaded
    _epoch: int | None
    _block_index: int | None
    _epoch_order: np.ndarray
    _block: Block

    def __init__(
        self,
        pairs: Pairs,
        plan: BatchPlan,
        corpus_sizes: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        num_segmentations: int = 1,
    ):
        self.pairs = pairs
        self.plan = plan
        self.num_segmentations = num_segmentations
        self._corpus_ends = np.cumsum(
            [0, *(corpus_sizes or [len(pairs.rows) // num_segmentations])]
        ).tolist()
        totals_by_segmentation = [
            [
                _count_totals(pairs, pair_indices)
                for pair_indices in self._kept_pairs_by_corpus(segmentation)
            ]
            for segmentation in range(num_segmentations)
        ]
        self._corpus_shares = compute_shares(
            [total["pairs"] for total in totals_by_segmentation[0]], weights
        )
        corpus_totals = [
            _add_totals(segmentation_totals)
            for segmentation_totals in zip(*totals_by_segmentation, strict=True)
        ]
        refuse_longest(max(total["longest"] for total in corpus_totals), plan.tokens_per_step)
        expected_tokens = [
            total["larger_tokens"] * share / total["pairs"]
            for total, share in zip(corpus_totals, self._corpus_shares, strict=True)
            if share
        ]
        self.steps_per_epoch = count_steps(round(sum(expected_tokens)), plan.tokens_per_step)
        self._num_blocks = max(
            1, min(round(sum(self._corpus_shares) / plan.block_pairs), self.steps_per_epoch)
        )
        summed_names = ("pairs", "source_tokens", "target_tokens")
        # mean over the segmentations, because an epoch uses one of them
        self._totals = {
            name: sum(total[name] for total in corpus_totals) // num_segmentations
            for name in summed_names
        }
        self._forget_block()

    def _forget_block(self):
        self.__dict__ |= NO_BLOCK

    def __getstate__(self) -> dict:
        # do not pickle the block for a spawned worker: the worker plans the block again
        return self.__dict__ | NO_BLOCK

    def _kept_pairs_by_corpus(self, epoch: int) -> Iterator[np.ndarray]:
        segmentation_start = epoch % self.num_segmentations * self._corpus_ends[-1]
        for first, last in itertools.pairwise(self._corpus_ends):
            yield self.pairs.kept_indices(segmentation_start + first, segmentation_start + last)

    def fingerprint(self) -> dict[str, int]:
        """Return the facts that must be unchanged when a run is resumed.

        Returns:
            Number of kept pairs, their numbers of source and target tokens, and number of steps in
            an epoch, by name.
        """
        return {**self._totals, "steps_per_epoch": self.steps_per_epoch}

    def __getitem__(self, steps_done: int) -> StepData:
        """Make the micro-batches of a step.

        Args:
            steps_done: Number of steps before this step, summed over all epochs.

        Returns:
            Micro-batches of this process.
        """
        block, step_index = self.find_block(steps_done)
        return StepData(block.make_micro_batches(step_index, self.plan))

    def find_block(self, steps_done: int) -> tuple[Block, int]:
        """Find the block of a step, and load the block if it is not the current one.

        Args:
            steps_done: Number of steps before this step, summed over all epochs.

        Returns:
            Block, and index of the step in the block.
        """
        epoch, step_index = divmod(steps_done, self.steps_per_epoch)
        # index of the last block whose first step is this step or an earlier one
        block_index = (step_index * self._num_blocks + self._num_blocks - 1) // self.steps_per_epoch
        if (epoch, block_index) != (self._epoch, self._block_index):
            self._load_block(epoch, block_index)
        return self._block, step_index - self._first_step(block_index)

    def _first_step(self, block_index: int) -> int:
        return block_index * self.steps_per_epoch // self._num_blocks

    def _load_block(self, epoch: int, block_index: int):
        if epoch != self._epoch:
            self._forget_block()
            self._epoch_order = draw_epoch_order(
                list(self._kept_pairs_by_corpus(epoch)), self._corpus_shares, self.plan.seed, epoch
            )
        self._epoch, self._block_index = epoch, block_index
        first_step, end_step = self._first_step(block_index), self._first_step(block_index + 1)
        # a block gets pairs in proportion to its steps, so that every step has at least one pair
        first_pair, end_pair = (
            len(self._epoch_order) * step // self.steps_per_epoch for step in (first_step, end_step)
        )
        self._block = Block(
            self.pairs,
            self._epoch_order[first_pair:end_pair],
            end_step - first_step,
            self.plan.length_groups_per_step,
            np.random.default_rng([self.plan.seed, 1, epoch, block_index]),
        )


def _count_totals(pairs: Pairs, pair_indices: np.ndarray) -> dict[str, int]:
    totals = dict.fromkeys(("source_tokens", "target_tokens", "larger_tokens", "longest"), 0)
    for first in range(0, len(pair_indices), PAIRS_PER_CHUNK):
        chunk = pair_indices[first : first + PAIRS_PER_CHUNK]
        source_lengths, target_lengths = pairs.source_lengths[chunk], pairs.target_lengths[chunk]
        longer_lengths = np.maximum(source_lengths, target_lengths)
        totals["source_tokens"] += int(source_lengths.sum())
        totals["target_tokens"] += int(target_lengths.sum())
        totals["larger_tokens"] += int(longer_lengths.sum())
        totals["longest"] = max(totals["longest"], int(longer_lengths.max()))
    return {"pairs": len(pair_indices), **totals}


def _add_totals(totals_to_add: Sequence[dict[str, int]]) -> dict[str, int]:
    return {
        name: (max if name == "longest" else sum)(total[name] for total in totals_to_add)
        for name in totals_to_add[0]
    }


def evaluation_batches(
    pairs: Pairs,
    collator: Collator,
    tokens_per_micro_batch: int,
    num_processes: int = 1,
    process_index: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Make the batches of one pass over a split, divided among the processes.

    All processes get the same number of micro-batches, because the forward pass of a sharded model
    needs all processes. A process without a last micro-batch of its own gets a copy of another one,
    with `IGNORED` as every label, so that the loss counts each pair once.

    Args:
        pairs: Pairs of the split.
        collator: Collator that makes the tensors of a micro-batch.
        tokens_per_micro_batch: Maximum number of source tokens, and of target tokens, in a
            micro-batch, padding included.
        num_processes: Number of processes that share the split.
        process_index: Index of this process.

    Yields:
        Micro-batches of this process.
    """
    pair_indices = pairs.kept_indices()
    num_steps = count_steps(
        _count_totals(pairs, pair_indices)["larger_tokens"], tokens_per_micro_batch
    )
    block = Block(pairs, pair_indices, num_steps, 1, np.random.default_rng(0))
    parts = [
        part
        for groups in block.steps
        for part in split_step(groups, *block.lengths, tokens_per_micro_batch, num_processes=1)[0]
    ]
    for first_part in range(0, len(parts), num_processes):
        part_index = first_part + process_index
        batch = collator(pairs[pair_indices[parts[min(part_index, len(parts) - 1)]]])
        if part_index >= len(parts):
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        yield batch
