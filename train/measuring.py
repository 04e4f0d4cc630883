"""Measurement of how long a run will take."""

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list

from ..atomic_files import remove
from .config import TrainConfig
from .data.streaming import StreamedSteps
from .dry_run import format_facts
from .loop import batches_of, end_run, evaluate_step, make_step, save_step
from .run import Run, open_run

# approximate duration of the measured steps in seconds, and their largest number
MEASURED_SECONDS, MOST_STEPS = 20, 50


class Costs(NamedTuple):
    """Time that the parts of a run take, and the size of its steps.

    Args:
        step: Seconds for one step.
        evaluation: Seconds for one evaluation.
        checkpoint: Seconds for saving one checkpoint.
        tokens: Mean number of target tokens in a step.
        steps_per_epoch: Number of steps in an epoch; None for a stream.
    """

    step: float
    evaluation: float
    checkpoint: float
    tokens: float
    steps_per_epoch: int | None

    def parts(self, config: TrainConfig) -> dict[str, tuple[float, int]]:
        """Return the seconds of a step, an evaluation and a checkpoint, and the number of each.

        Args:
            config: Settings of the run.
        """
        return {
            "step": (self.step, config.max_steps),
            "evaluation": (self.evaluation, -(-config.max_steps // config.eval_every_steps)),
            "checkpoint": (self.checkpoint, -(-config.max_steps // config.save_every_steps)),
        }


def measure(config: TrainConfig) -> str:
    """Measure the costs of a run, and estimate its time.

    Args:
        config: Settings of the run.

    Returns:
        Lines of text.

    Raises:
        ValueError: If a setting, a corpus or a tokenizer cannot be used.
        MemoryError: If a step does not fit into memory.
    """
    costs = measure_costs(config)
    cost_parts = costs.parts(config)
    facts = {
        name: f"{seconds:.3g} seconds, {number:,} of them"
        for name, (seconds, number) in cost_parts.items()
    }
    facts["speed"] = f"{costs.tokens / costs.step:,.0f} target tokens per second"
    total_seconds = sum(seconds * number for seconds, number in cost_parts.values())
    num_steps = config.max_steps
    if config.max_minutes is not None and 60 * config.max_minutes < total_seconds:
        num_steps = int(60 * config.max_minutes / total_seconds * num_steps)
        total_seconds = 60 * config.max_minutes
        facts["within max_minutes"] = f"about {num_steps:,} of {config.max_steps:,} steps"
    if costs.steps_per_epoch is not None:
        epochs = num_steps / costs.steps_per_epoch
        facts["epochs"] = f"{epochs:.3g}, of {costs.steps_per_epoch:,} steps"
    facts["training"] = (
        f"{timedelta(seconds=round(total_seconds))} (hours:minutes:seconds), after the preparation"
    )
    return format_facts("measured", facts)


def measure_costs(config: TrainConfig) -> Costs:
    """Train a few steps in a temporary folder, and measure the time of each part.

    Works in one process, or in several processes of `accelerate launch`.

    Args:
        config: Settings of the run.

    Returns:
        The costs.

    Raises:
        ValueError: If a setting, a corpus or a tokenizer cannot be used.
        MemoryError: If a step does not fit into memory.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    # resolve the path first, because "." has no name
    own_folder = config.folder.resolve()
    # the name is not random, because all processes must use the same path
    folder = own_folder.with_name(f".{own_folder.name}.measured.unfinished")
    tokenizer_folder = config.folder / "tokenizer"
    changed_settings: dict[str, Any] = {
        "output_dir": str(folder),
        "report_to": [],
        "max_minutes": None,
    }
    if config.tokenizer is None and tokenizer_folder.is_dir():
        changed_settings["tokenizer"] = str(tokenizer_folder)
    # the learning rate does not change the time, so the cooldown can be left out
    changed_settings |= {"max_steps": MOST_STEPS + 2, "cooldown_steps": 0}
    is_parent_new = not folder.parent.exists()
    if is_main:
        remove(folder)
    try:
        with contextlib.ExitStack() as until_end:
            run = open_run(dataclasses.replace(config, **changed_settings), False, until_end)
            with run.progress.bar:
                costs = _measure_run(run)
            end_run(run)
    finally:
        if is_main:
            remove(folder)
            if is_parent_new:
                # if the folder has other files in the meantime, `rmdir` fails and the folder stays
                with contextlib.suppress(OSError):
                    folder.parent.rmdir()
    return costs


def _measure_run(run: Run) -> Costs:
    steps = enumerate(batches_of(run), start=1)
    # the first step is slower than the others, so it is not measured
    _time_steps(run, steps, 1)
    step_counts = [max(2, min(MOST_STEPS, int(MEASURED_SECONDS / _time_steps(run, steps, 1))))]
    # all processes must make the same number of steps
    broadcast_object_list(step_counts)
    (num_steps,) = step_counts
    num_unmeasured = len(run.unread_results)
    seconds = _time_steps(run, steps, num_steps) / num_steps
    tokens = (
        sum(int(result.num_tokens) for _, result, _ in run.unread_results[num_unmeasured:])
        / num_steps
    )
    evaluation_start = time.monotonic()
    evaluate_step(run, num_steps + 2)
    save_start = time.monotonic()
    save_step(run, num_steps + 2)
    save_end = time.monotonic()
    steps_per_epoch = (
        None if isinstance(run.step_dataset, StreamedSteps) else run.step_dataset.steps_per_epoch
    )
    return Costs(
        seconds, save_start - evaluation_start, save_end - save_start, tokens, steps_per_epoch
    )


def _time_steps(run: Run, steps: Iterator, num_steps: int) -> float:
    """Make the next steps, and return the seconds that they took."""
    _wait_for_device(run)
    start_time = time.monotonic()
    for step, batches in itertools.islice(steps, num_steps):
        make_step(run, step, batches)
    _wait_for_device(run)
    return time.monotonic() - start_time


def _wait_for_device(run: Run):
    if run.accelerator.device.type != "cpu":
        torch.accelerator.synchronize()
