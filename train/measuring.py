"""Measurement of how long a run will take."""

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from ..atomic_files import remove
from .config import TrainConfig
from .data.streaming import StreamedSteps
from .dry_run import group
from .loop import batches_of, end_run, evaluate_step, make_step, save_step
from .run import Run, open_run

# approximate time to measure steps for, and their largest number
MEASURED_SECONDS, MOST_STEPS = 20, 50


def measure(config: TrainConfig) -> str:
    """Train a few steps in a folder that is removed, and estimate the time of a run.

    Works in one process, or in several processes of `accelerate launch`.

    Args:
        config: Settings of the run.

    Returns:
        Lines of text.

    Raises:
        ValueError: As in `train`.
        MemoryError: If a step does not fit into memory.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    # the same path in all processes
    folder = config.folder.with_name(f".{config.folder.name}.measured.unfinished")
    vocabulary = config.folder / "tokenizer"
    changes: dict[str, Any] = {"output_dir": str(folder), "report_to": [], "max_minutes": None}
    if config.tokenizer is None and vocabulary.is_dir():
        changes["tokenizer"] = str(vocabulary)
    # the learning rate does not matter
    changes |= {"max_steps": MOST_STEPS + 2, "cooldown_steps": 0}
    is_new = not folder.parent.exists()
    if is_main:
        remove(folder)
    try:
        with contextlib.ExitStack() as until_end:
            run = open_run(dataclasses.replace(config, **changes), False, until_end)
            with run.progress.bar:
                facts = _measured(run, config)
            end_run(run)
    finally:
        if is_main:
            remove(folder)
            if is_new:
                # unless something else was put there meanwhile
                with contextlib.suppress(OSError):
                    folder.parent.rmdir()
    return group("measured", facts)


def _measured(run: Run, config: TrainConfig) -> dict[str, str]:
    steps = enumerate(batches_of(run), start=1)
    # the first step is slower
    _seconds_of(run, steps, 1)
    numbers = [max(2, min(MOST_STEPS, int(MEASURED_SECONDS / _seconds_of(run, steps, 1))))]
    broadcast_object_list(numbers)
    (number,) = numbers
    before = len(run.unread)
    seconds = _seconds_of(run, steps, number) / number
    tokens = sum(int(result.num_tokens) for _, result, _ in run.unread[before:]) / number
    costs = {"step": (seconds, config.max_steps)}
    for name, function, every in (
        ("evaluation", evaluate_step, config.eval_every_steps),
        ("checkpoint", save_step, config.save_every_steps),
    ):
        began = time.monotonic()
        function(run, number + 2)
        costs[name] = (time.monotonic() - began, -(-config.max_steps // every))
    in_all = sum(seconds * number for seconds, number in costs.values())
    budget = math.inf if config.max_minutes is None else 60 * config.max_minutes
    facts = {
        name: f"{seconds:.3g} seconds, {number:,} of them"
        for name, (seconds, number) in costs.items()
    }
    facts["speed"] = f"{tokens / seconds:,.0f} target tokens per second"
    if not isinstance(run.steps, StreamedSteps):
        per_epoch = run.steps.steps_per_epoch
        facts["epochs"] = f"{config.max_steps / per_epoch:.3g}, of {per_epoch:,} steps"
    if budget < in_all:
        number = int(budget / in_all * config.max_steps)
        facts["within max_minutes"] = f"about {number:,} of {config.max_steps:,} steps"
        in_all = budget
    return {**facts, "training": f"{timedelta(seconds=round(in_all))} hours, after the preparation"}


def _seconds_of(run: Run, steps: Iterator, number: int) -> float:
    """Make the next steps, and return the seconds that they took."""
    _wait_for_device(run)
    began = time.monotonic()
    for step, batches in itertools.islice(steps, number):
        make_step(run, step, batches)
    _wait_for_device(run)
    return time.monotonic() - began


def _wait_for_device(run: Run):
    if run.accelerator.device.type != "cpu":
        torch.accelerator.synchronize()
