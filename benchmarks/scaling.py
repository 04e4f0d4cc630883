"""Measure the cost of a training step against length, vocabulary, batch and processes."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..drawing import new_figure
from ..paper.study import Section
from ..train.data.batches import Collator
from ..train.devices.distribution import num_usable_cores
from ..train.run_folder.files import METRICS_FILE
from .peers import MARIAN, OURS
from .timing import Implementation, time_in_turn
from .training import Trainee, difference
from .work import Batch, model_config, training_flops

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# number of tokens on each side of a batch; a longer sentence is a batch of its own
TOKENS_PER_SIDE = 1024
# number of tokens in a sentence where the length does not vary
SENTENCE_TOKENS = 32
LENGTHS = (64, 256, 1024, 4096, 8192)
VOCABULARIES = (1_000, 8_000, 37_000)
# numbers of sentences in a batch
SENTENCE_COUNTS = (1, 8, 32, 128)
# training steps with one process, and with two
NUM_STEPS = 30
COLUMNS = ("implementation", "tokens/s", "ms/step", "peak MB")


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Measure the cost of a training step, for the first of `--sizes`.

    Args:
        flags: Flags of the command line.

    Yields:
        Four sections.
    """
    vocab_size, seed = flags.model_vocab_size, flags.config.seed
    lengths = [length for length in LENGTHS if length <= flags.longest]
    by_length = {
        length: random_batch(max(1, TOKENS_PER_SIDE // length), length, vocab_size, seed)
        for length in lengths
    }
    by_count = {
        count: random_batch(count, SENTENCE_TOKENS, vocab_size, seed) for count in SENTENCE_COUNTS
    }
    largest_difference = difference(MARIAN, flags.sizes[0], by_count[SENTENCE_COUNTS[0]], flags)
    yield _section(
        "length",
        "sentence length",
        f"Random sentences of one length, at least {TOKENS_PER_SIDE:,} tokens on each side. With "
        f"Marian's weights, loss and gradient of both differ by at most {largest_difference:.0e}.",
        _time_batches(list(by_length.values()), vocab_size, flags),
        lengths,
        flags,
    )
    yield _section(
        "batch",
        "sentences in a batch",
        f"Random sentences of {SENTENCE_TOKENS} tokens.",
        _time_batches(list(by_count.values()), vocab_size, flags),
        SENTENCE_COUNTS,
        flags,
    )
    vocabulary_points = [
        _time_batches(
            [random_batch(TOKENS_PER_SIDE // SENTENCE_TOKENS, SENTENCE_TOKENS, size, seed)],
            size,
            flags,
        )
        for size in VOCABULARIES
    ]
    yield _section(
        "vocabulary",
        "tokens in the vocabulary",
        f"{TOKENS_PER_SIDE // SENTENCE_TOKENS} random sentences of {SENTENCE_TOKENS} tokens.",
        [batch_points for (batch_points,) in vocabulary_points],
        VOCABULARIES,
        flags,
    )
    yield _processes_section(flags)


def random_batch(sentences: int, length: int, vocab_size: int, seed: int) -> Batch:
    """Return a batch of random sentences of one length.

    Args:
        sentences: Number of sentences.
        length: Number of tokens in each source and target.
        vocab_size: Size of the vocabulary.
        seed: Seed of the tokens.

    Returns:
        A batch without padding.
    """
    random = np.random.default_rng(seed)
    token_ids = random.integers(3, vocab_size, (2, sentences, length))
    tensors = Collator(0, 1, vocab_size)({"input_ids": token_ids[0], "labels": token_ids[1]})
    lengths = np.full(sentences, length)
    return Batch(tensors, lengths, lengths)


class TraineeWithPositions:
    """`Trainee` with enough positions for the longest sentence.

    Args:
        name: `OURS` or `MARIAN`.
        size: One of `work.SIZES`.
        flags: Flags of the command line.
        vocab_size: Vocabulary size of the model.
        num_positions: Number of positions in Marian's table.
    """

    def __init__(
        self, name: str, size: str, flags: argparse.Namespace, vocab_size: int, num_positions: int
    ):
        trainee_flags = argparse.Namespace(**{**vars(flags), "model_vocab_size": vocab_size})
        self.trainee = Trainee(name, size, trainee_flags, max_position_embeddings=num_positions)

    def __call__(self, batch: Batch) -> None:
        """Update the weights once.

        Args:
            batch: Training batch.
        """
        self.trainee(batch)


def _time_batches(
    batches: list[Batch], vocab_size: int, flags: argparse.Namespace
) -> list[list[tuple[str, float, float, float]]]:
    """Time all implementations in turn, and return a row for each batch and implementation."""
    size, num_positions = flags.sizes[0], max(batch.source_lengths.max() for batch in batches)
    config = model_config(size, vocab_size)
    implementations = [
        Implementation(
            name,
            TraineeWithPositions,
            (name, size, flags, vocab_size, int(num_positions)),
            batches,
            [batch.tokens for batch in batches],
            [training_flops(config, batch) for batch in batches],
        )
        for name in (OURS, MARIAN)
    ]
    # the peak memory of a process never falls, so small batches come first. Each batch warms up
    # twice, because Adam allocates its moments in its first step
    batch_indices = range(len(batches))
    warm_up = np.repeat(batch_indices, 2).tolist()
    results = time_in_turn(
        implementations, flags.rounds, torch.device(flags.device), warm_up=warm_up
    )
    return [
        [
            (
                result.name,
                float(np.median(result.rates[:, batch_index])),
                float(1000 * np.median(result.seconds[:, batch_index])),
                round(result.peaks[2 * batch_index + 1] / 1e6),
            )
            for result in results
        ]
        for batch_index in batch_indices
    ]


def _section(
    name: str,
    axis: str,
    finding: str,
    points: Sequence[Sequence[tuple[str, float, float, float]]],
    values: Sequence[int],
    flags: argparse.Namespace,
) -> Section:
    points_by_value = list(zip(values, points, strict=True))
    return Section(
        name=f"scaling-{name}",
        title=f"Training step against {axis}, {flags.sizes[0]}",
        finding=f"{finding} Vocabulary, device and precision as in the flags; medians over rounds.",
        columns=(axis, *COLUMNS),
        rows=[
            (value, *measurements)
            for value, batch_points in points_by_value
            for measurements in batch_points
        ],
        figure=_figure(axis, values, points),
    )


def _figure(axis: str, values: Sequence[int], points: Sequence[Sequence[tuple]]) -> "Figure":
    figure, all_axes = new_figure(9, 3.4, 1, 2)
    speed_axes, memory_axes = all_axes[0]
    for curve_points in zip(*points, strict=True):
        _, rates, _, peaks = zip(*curve_points, strict=True)
        speed_axes.plot(values, rates, "o-", label=curve_points[0][0])
        memory_axes.plot(values, peaks, "o-", label=curve_points[0][0])
    for axes, title in ((speed_axes, "tokens/s"), (memory_axes, "peak MB")):
        axes.set(xlabel=axis, title=title, xscale="log", ylim=(0, None))
        axes.legend()
    return figure


def _processes_section(flags: argparse.Namespace) -> Section:
    """Train the recipe with the training command, on one process and on two."""
    cores = num_usable_cores()
    # number of processes and threads per process: the processes share the cores; on GPUs, each
    # process has one GPU
    process_and_thread_counts = {"1 process": (1, cores), "2 processes": (2, max(1, cores // 2))}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (num_processes, num_threads) in process_and_thread_counts.items():
            run_folder = Path(folder, name.replace(" ", "-"))
            tokenizer = Path(folder, "1-process", "tokenizer")
            command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
            command += ["--num_processes", str(num_processes), "--num_machines", "1"]
            command += ["--multi_gpu", "--main_process_port", "0"] if num_processes > 1 else []
            command += ["--mixed_precision", "no", "--dynamo_backend", "no"]
            command += ["--num_cpu_threads_per_process", str(num_threads)]
            command += ["-m", "vanilla_transformer.train", flags.recipe, *flags.settings]
            command += ["--max_steps", str(NUM_STEPS), "--log_every_steps", str(NUM_STEPS // 3)]
            command += ["--output_dir", str(run_folder)]
            if tokenizer.is_dir():
                command += ["--tokenizer", str(tokenizer)]
            environment = {**os.environ, "ACCELERATE_USE_CPU": str(flags.device == "cpu")}
            environment.pop("OMP_NUM_THREADS", None)
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            metrics_lines = (run_folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
            last_metrics = [
                line for line in map(json.loads, metrics_lines) if "tokens_per_second" in line
            ][-1]
            rows.append(
                (name, num_threads, last_metrics["tokens_per_second"], last_metrics["loss"])
            )
    return Section(
        name="scaling-processes",
        title=f"One process and two, recipe {flags.recipe}",
        finding=f"The training command, {NUM_STEPS} steps; each process has its share of the "
        "cores. Tokens/s and the loss are those of the last steps.",
        columns=("processes", "threads per process", "tokens/s", "loss"),
        rows=rows,
    )
