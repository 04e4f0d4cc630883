"""Batches of about equal length, and what each process sees at each step. Section 5.1.

The sentences of a step depend on corpus, seed and batch size alone: not on the number of processes,
nor on the memory of each. Random are the order among pairs of about equal length, which groups of
such pairs make a step, and the order of the steps; every pair comes once an epoch.
"""

from collections.abc import Iterator, Sequence

import datasets
import numpy as np
import torch
from torch import Tensor

from vanilla_transformer.train.corpus import lengths
from vanilla_transformer.train.step import IGNORED

# widens the choice of neighbors in the order by length, for a little padding
LENGTH_NOISE = 1.5


def plan_steps(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    tokens_per_step: int,
    length_groups_per_step: int,
    seed: int,
    epoch: int,
) -> list[list[np.ndarray]]:
    """Divide an epoch into steps, and each step into groups of about equal length. Section 5.1.

    Args:
        source_lengths: Tokens of each source, [sentences].
        target_lengths: Tokens of each target, [sentences].
        tokens_per_step: About how many source tokens, and how many target tokens, a step has.
        length_groups_per_step: Groups that a step is drawn from.
        seed: Of the run.
        epoch: Counted from 0; as many steps as in any other.

    Returns:
        For each step its groups, each an array of sentence numbers.

    Raises:
        ValueError: If there is no sentence, or one does not fit into a step.
    """
    sentences = len(source_lengths)
    if sentences == 0:
        raise ValueError("an epoch must have at least one sentence, got none.")
    longest = int(max(source_lengths.max(), target_lengths.max()))
    if longest > tokens_per_step:
        raise ValueError(
            f"tokens_per_step must hold the longest sentence, of {longest} tokens, "
            f"got {tokens_per_step}."
        )
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(sentences)
    source = source_lengths[shuffled] + LENGTH_NOISE * random.random(sentences)
    target = target_lengths[shuffled]
    # sources turn back at each target length, so that neighbors are alike on both sides
    order = shuffled[np.lexsort((np.where(target % 2 == 0, source, -source), target))]

    # the larger side bounds both; equal shares leave no small last step
    tokens = np.cumsum(np.maximum(source_lengths, target_lengths)[order])
    num_steps = -(-int(tokens[-1]) // tokens_per_step)
    groups_per_step = min(length_groups_per_step, sentences // num_steps)
    num_groups = num_steps * groups_per_step
    number = np.arange(1, num_groups)
    cuts = np.searchsorted(tokens, tokens[-1] / num_groups * number, side="right")
    # no group without a sentence
    cuts = np.maximum.accumulate(np.maximum(cuts, 1) - number) + number
    cuts = np.minimum(cuts, sentences - num_groups + number)
    groups = np.split(order, cuts)
    drawn = random.permutation(num_groups).reshape(num_steps, groups_per_step)
    return [[groups[index] for index in step] for step in drawn]


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
    longer = np.maximum(source_lengths, target_lengths)

    def padded(part: np.ndarray) -> int:
        return len(part) * int(longer[part].max())

    parts = []
    for group in groups:
        pieces = max(1, -(-padded(group) // tokens_per_micro_batch) - 1)
        while any(padded(part) > tokens_per_micro_batch for part in np.array_split(group, pieces)):
            pieces += 1
            if pieces > len(group):
                raise ValueError(
                    "tokens_per_micro_batch must hold every sentence, "
                    f"got {tokens_per_micro_batch} and one of {longer[group].max()} tokens."
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
        input_ids = _padded(rows["input_ids"], self.pad_token_id)
        labels = _padded(rows["labels"], self.pad_token_id)
        for name, ids in (("input_ids", input_ids), ("labels", labels)):
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise ValueError(f"{name} must be ids below {self.vocab_size}, got {wrong}.")
        attention_mask = _is_token(rows["input_ids"], input_ids)
        start = torch.full_like(labels[:, :1], self.decoder_start_token_id)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask.long(),
            "decoder_input_ids": torch.cat((start, labels[:, :-1]), dim=1),
            "labels": labels.where(_is_token(rows["labels"], labels), IGNORED),
        }


def _padded(sentences: Sequence[Sequence[int]], pad_token_id: int) -> Tensor:
    array = np.full((len(sentences), max(map(len, sentences))), pad_token_id, dtype=np.int64)
    for row, ids in zip(array, sentences, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(array)


def _is_token(sentences: Sequence[Sequence[int]], padded: Tensor) -> Tensor:
    sizes = torch.tensor([len(ids) for ids in sentences])
    return torch.arange(padded.shape[1]) < sizes[:, None]


class TrainingSteps(torch.utils.data.Dataset):
    """What one process sees at each step: a function of the step, so that a run can go on anywhere.

    Args:
        rows: Pairs to train on, from `encode_pairs`.
        collator: Makes a micro-batch.
        tokens_per_step: As in `plan_steps`.
        length_groups_per_step: As in `plan_steps`.
        tokens_per_micro_batch: As in `split_step`.
        seed: As in `plan_steps`.
        num_processes: As in `split_step`.
        process_index: Which of them this is.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        collator: Collator,
        tokens_per_step: int,
        length_groups_per_step: int,
        tokens_per_micro_batch: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
    ):
        self.rows = rows.select_columns(["input_ids", "labels"]).with_format("numpy")
        self.source_lengths, self.target_lengths = lengths(rows)
        self.collator = collator
        self.tokens_per_step = tokens_per_step
        self.length_groups_per_step = length_groups_per_step
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.seed = seed
        self.num_processes = num_processes
        self.process_index = process_index
        self._load_epoch(0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every epoch."""
        return len(self._plan)

    def fingerprint(self) -> dict[str, int]:
        """What must be the same where a run is resumed.

        Returns:
            Numbers of pairs, of tokens and of steps.
        """
        return {
            "pairs": len(self.rows),
            "source_tokens": int(self.source_lengths.sum()),
            "target_tokens": int(self.target_lengths.sum()),
            "steps_per_epoch": self.steps_per_epoch,
        }

    def __getitem__(self, steps_done: int) -> list[dict[str, Tensor]]:
        """The micro-batches of this process for the step after `steps_done` others.

        Args:
            steps_done: Steps before it, over all epochs.

        Returns:
            Micro-batches, from `Collator`.
        """
        epoch, index = divmod(steps_done, self.steps_per_epoch)
        if epoch != self._epoch:
            self._load_epoch(epoch)
        parts = split_step(
            self._plan[index],
            self.source_lengths,
            self.target_lengths,
            self.tokens_per_micro_batch,
            self.num_processes,
        )[self.process_index]
        return [self.collator(self.rows[part]) for part in parts]

    def _load_epoch(self, epoch: int):
        self._epoch = epoch
        self._plan = plan_steps(
            self.source_lengths,
            self.target_lengths,
            self.tokens_per_step,
            self.length_groups_per_step,
            self.seed,
            epoch,
        )


def evaluation_batches(
    rows: datasets.Dataset,
    collator: Collator,
    tokens_per_micro_batch: int,
    num_processes: int = 1,
    process_index: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Go once through a split, each pair on one process.

    Args:
        rows: Pairs, from `encode_pairs`.
        collator: Makes a micro-batch.
        tokens_per_micro_batch: As in `split_step`.
        num_processes: Processes that share the split.
        process_index: Which of them this is.

    Yields:
        Micro-batches of this process.
    """
    sizes = lengths(rows)
    steps = plan_steps(*sizes, tokens_per_micro_batch, length_groups_per_step=1, seed=0, epoch=0)
    parts = [
        part
        for groups in steps
        for part in split_step(groups, *sizes, tokens_per_micro_batch, num_processes=1)[0]
    ]
    columns = rows.select_columns(["input_ids", "labels"]).with_format("numpy")
    for part in parts[process_index::num_processes]:
        yield collator(columns[part])
