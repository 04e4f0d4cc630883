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
from ..train.run_folder.files import METRICS_FILE
from .peers import MARIAN, OURS
from .timing import Implementation, time_in_turn
from .training import Trainee, difference
from .work import Batch, model_config, training_flops

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# number of tokens on each side of a batch; a longer sentence is a batch of its own
TOKENS = 1024
# number of tokens in a sentence where the length does not vary
SENTENCE = 32
LENGTHS = (64, 256, 1024, 4096, 8192)
VOCABULARIES = (1_000, 8_000, 37_000)
# numbers of sentences in a batch
COUNTS = (1, 8, 32, 128)
# training steps with one process, and with two
STEPS = 30
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
        length: random_batch(max(1, TOKENS // length), length, vocab_size, seed)
        for length in lengths
    }
    by_count = {count: random_batch(count, SENTENCE, vocab_size, seed) for count in COUNTS}
    worst = difference(MARIAN, flags.sizes[0], by_count[COUNTS[0]], flags)
    yield _section(
        "length",
        "sentence length",
        f"Random sentences of one length, at least {TOKENS:,} tokens on each side. With Marian's "
        f"weights, loss and gradient of both differ by at most {worst:.0e}.",
        _time_batches(list(by_length.values()), vocab_size, flags),
        lengths,
        flags,
    )
    yield _section(
        "batch",
        "sentences in a batch",
        f"Random sentences of {SENTENCE} tokens.",
        _time_batches(list(by_count.values()), vocab_size, flags),
        COUNTS,
        flags,
    )
    timed = [
        _time_batches([random_batch(TOKENS // SENTENCE, SENTENCE, size, seed)], size, flags)
        for size in VOCABULARIES
    ]
    yield _section(
        "vocabulary",
        "tokens in the vocabulary",
        f"{TOKENS // SENTENCE} random sentences of {SENTENCE} tokens.",
        [points for (points,) in timed],
        VOCABULARIES,
        flags,
    )
    yield _processes(flags)


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
    sides = random.integers(3, vocab_size, (2, sentences, length))
    tensors = Collator(0, 1, vocab_size)({"input_ids": sides[0], "labels": sides[1]})
    lengths = np.full(sentences, length)
    return Batch(tensors, lengths, lengths)


class TraineeWithPositions:
    """`Trainee` with enough positions for the longest sentence.

    Args:
        name: `OURS` or `MARIAN`.
        size: One of `work.SIZES`.
        flags: Flags of the command line.
        vocab_size: Vocabulary size of the model.
        positions: Number of positions in Marian's table.
    """

    def __init__(
        self, name: str, size: str, flags: argparse.Namespace, vocab_size: int, positions: int
    ):
        given = argparse.Namespace(**{**vars(flags), "model_vocab_size": vocab_size})
        self.trainee = Trainee(name, size, given, max_position_embeddings=positions)

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
    size, positions = flags.sizes[0], max(batch.source_lengths.max() for batch in batches)
    config = model_config(size, vocab_size)
    implementations = [
        Implementation(
            name,
            TraineeWithPositions,
            (name, size, flags, vocab_size, int(positions)),
            batches,
            [batch.tokens for batch in batches],
            [training_flops(config, batch) for batch in batches],
        )
        for name in (OURS, MARIAN)
    ]
    # the peak memory of a process never falls, so small batches come first. Each batch warms up
    # twice, because Adam allocates its moments in its first step
    every = range(len(batches))
    twice = np.repeat(every, 2).tolist()
    results = time_in_turn(implementations, flags.rounds, torch.device(flags.device), warm_up=twice)
    return [
        [
            (
                result.name,
                float(np.median(result.rates[:, number])),
                float(1000 * np.median(result.seconds[:, number])),
                round(result.peaks[2 * number + 1] / 1e6),
            )
            for result in results
        ]
        for number in every
    ]


def _section(
    name: str,
    axis: str,
    finding: str,
    points: Sequence[Sequence[tuple[str, float, float, float]]],
    values: Sequence[int],
    flags: argparse.Namespace,
) -> Section:
    pairs = list(zip(values, points, strict=True))
    return Section(
        name=f"scaling-{name}",
        title=f"Training step against {axis}, {flags.sizes[0]}",
        finding=f"{finding} Vocabulary, device and precision as in the flags; medians over rounds.",
        columns=(axis, *COLUMNS),
        rows=[(value, *line) for value, lines in pairs for line in lines],
        figure=_figure(axis, values, points),
    )


def _figure(axis: str, values: Sequence[int], points: Sequence[Sequence[tuple]]) -> "Figure":
    figure, plots = new_figure(9, 3.4, 1, 2)
    speed, memory = plots[0]
    for lines in zip(*points, strict=True):
        _, rates, _, peaks = zip(*lines, strict=True)
        speed.plot(values, rates, "o-", label=lines[0][0])
        memory.plot(values, peaks, "o-", label=lines[0][0])
    for plot, title in ((speed, "tokens/s"), (memory, "peak MB")):
        plot.set(xlabel=axis, title=title, xscale="log", ylim=(0, None))
        plot.legend()
    return figure


def _processes(flags: argparse.Namespace) -> Section:
    """Train the recipe with the training command, on one process and on two."""
    cores = os.cpu_count() or 1
    # number of processes and threads per process: the processes share the cores; on GPUs, each
    # process has one GPU
    kinds = {"1 process": (1, cores), "2 processes": (2, max(1, cores // 2))}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (processes, threads) in kinds.items():
            run = Path(folder, name.replace(" ", "-"))
            tokenizer = Path(folder, "1-process", "tokenizer")
            command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
            command += ["--num_processes", str(processes), "--num_machines", "1"]
            command += ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else []
            command += ["--mixed_precision", "no", "--dynamo_backend", "no"]
            command += ["--num_cpu_threads_per_process", str(threads)]
            command += ["-m", "vanilla_transformer.train", flags.recipe, *flags.settings]
            command += ["--max_steps", str(STEPS), "--log_every_steps", str(STEPS // 3)]
            command += ["--output_dir", str(run)]
            if tokenizer.is_dir():
                command += ["--tokenizer", str(tokenizer)]
            environment = {**os.environ, "ACCELERATE_USE_CPU": str(flags.device == "cpu")}
            environment.pop("OMP_NUM_THREADS", None)
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            lines = (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()
            last = [line for line in map(json.loads, lines) if "tokens_per_second" in line][-1]
            rows.append((name, threads, last["tokens_per_second"], last["loss"]))
    return Section(
        name="scaling-processes",
        title=f"One process and two, recipe {flags.recipe}",
        finding=f"The training command, {STEPS} steps; each process has its share of the cores. "
        "Tokens/s and the loss are those of the last steps.",
        columns=("processes", "threads per process", "tokens/s", "loss"),
        rows=rows,
    )
