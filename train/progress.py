"""Progress of a run: progress bar, `metrics.jsonl` and trackers."""

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from torch import Tensor
from tqdm import tqdm

from ..atomic_files import is_disk_full, to_disk, write_atomically
from ..configuration_vanilla_transformer import closest_name
from ..records import NUMBER
from .config import LOSS, TrainConfig
from .data.batches import IGNORED
from .run_folder.files import METRICS_FILE, TRACKERS_FOLDER, read_metrics
from .run_folder.run_state import NON_PADDING_TOKENS, POSITIONS
from .step import StepResult

# format of the bar, which fits into 80 columns
BAR_FORMAT = "|{bar}| {n_fmt}/{total_fmt} {remaining} left{desc}"
# with `max_minutes` the number of steps is estimated from the speed
ESTIMATING_BAR_FORMAT = BAR_FORMAT.replace("/", "/~")
SECONDS_BETWEEN_LINES = 30
TRACKERS = tuple(logger_type.value for logger_type in LoggerType if logger_type != LoggerType.ALL)


def refuse_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that accelerate does not support, or that are not installed.

    Args:
        names: Names of trackers.

    Raises:
        ValueError: If a tracker is unknown or not installed; names it.
    """
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"report_to must be none or some of {', '.join(TRACKERS)}, got {name!r}."
                + closest_name(str(name), list(TRACKERS))
            )
        if LoggerType(name) not in get_available_trackers():
            raise ValueError(f"report_to {name!r} must be installed, but its package is missing.")


def open_trackers(accelerator: Accelerator, config: TrainConfig, steps_done: int) -> None:
    """Start the trackers of `report_to`, and send them the settings.

    Args:
        accelerator: Accelerator, which passes metrics to the trackers.
        config: Settings of the run.
        steps_done: Number of steps done before; metrics of later steps are removed from trackers
            that support it.

    Raises:
        ValueError: If a tracker does not start; names the trackers.
    """
    if not config.report_to:
        return
    folder = config.folder / TRACKERS_FOLDER
    accelerator.project_configuration.logging_dir = str(folder)
    accelerator.log_with = [LoggerType(name) for name in config.report_to]
    plain_types = (bool, int, float, str)
    settings = {
        name: value if isinstance(value, plain_types) else json.dumps(value)
        for name, value in dataclasses.asdict(config).items()
    }
    options = {"tensorboard": {"purge_step": steps_done + 1}, "wandb": {"dir": str(folder)}}
    if accelerator.is_main_process:
        folder.mkdir(exist_ok=True)
    with _naming_trackers(accelerator):
        accelerator.init_trackers("vanilla_transformer", settings, options)


@contextlib.contextmanager
def _naming_trackers(accelerator: Accelerator) -> Iterator[None]:
    """Name the trackers in their own errors, such as a missing key or an unreachable server."""
    try:
        yield
    # each tracker has errors of its own
    except Exception as error:
        if is_disk_full(error):
            raise
        names = ", ".join(tracker.value for tracker in accelerator.log_with)
        raise ValueError(
            f"report_to must name trackers that work, or be none, got {names}: "
            f"{type(error).__name__}: {error}"
        ) from error


class Progress:
    """Progress bar on stderr, `metrics.jsonl`, and the sums of loss and tokens since its last line.

    Args:
        folder: Run folder.
        config: Settings of the run.
        steps_done: Number of steps done before; lines of later steps are removed from
            `metrics.jsonl`.
        window: Sums since the last line of `metrics.jsonl`, from the checkpoint to resume from;
            None for a new run.
        accelerator: Accelerator, which passes metrics to the trackers.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        steps_done: int,
        window: dict[str, float] | None,
        accelerator: Accelerator,
    ):
        self.path = folder / METRICS_FILE
        self.accelerator = accelerator
        self.window = window or self._empty_window()
        self.start_time = time.monotonic()
        self.tokens_before = self.window["tokens"]
        # parts of the bar's text
        self.training_text = self.validation_text = ""
        # in a log file every update of the bar takes a line
        seconds_between_updates = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
        self.bar = tqdm(
            total=config.max_steps,
            initial=steps_done,
            bar_format=BAR_FORMAT if config.max_minutes is None else ESTIMATING_BAR_FORMAT,
            mininterval=seconds_between_updates,
            # a thread of tqdm redraws a bar that has not moved for this time
            maxinterval=max(seconds_between_updates, 10.0),
            disable=not accelerator.is_main_process,
            dynamic_ncols=True,
        )
        if accelerator.is_main_process:
            kept_lines = [line for line in read_metrics(folder) if line["step"] <= steps_done]
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept_lines))

    @staticmethod
    def _empty_window() -> dict[str, float]:
        return {"loss": 0.0, "tokens": 0, POSITIONS: 0, NON_PADDING_TOKENS: 0}

    def count(self, result: StepResult, position_counts: dict[str, int]):
        """Add a step that was not skipped to the sums.

        Args:
            result: Result of the step.
            position_counts: Counts from `count_positions`, for the batches of this process.
        """
        tokens = int(result.num_tokens)
        self.window["loss"] += float(result.loss) * tokens
        self.window["tokens"] += tokens
        for name, number in position_counts.items():
            self.window[name] += number

    def log(self, **facts: Any):
        """Write a line with mean loss, share of non-padding tokens and speed since the last line.

        Args:
            facts: Other entries of the line.
        """
        elapsed = time.monotonic() - self.start_time
        tokens = self.window["tokens"]
        facts |= {
            "loss": self.window["loss"] / tokens if tokens else None,
            "non_padding": self.window[NON_PADDING_TOKENS] / max(self.window[POSITIONS], 1),
            # a coarse clock can show the same time after a fast step
            "tokens_per_second": (tokens - self.tokens_before) / elapsed if elapsed else 0.0,
        }
        self.write(**facts)
        self.training_text = (
            f" loss {facts['loss'] or math.nan:.3f} lr {facts['learning_rate']:.1e} "
            f"{facts['tokens_per_second']:,.0f} tok/s"
        )
        self._show_texts()
        self.window = self._empty_window()
        self.tokens_before = 0
        self.start_time = time.monotonic()

    def log_scores(self, step: int, scores: Mapping[str, float]):
        """Write a line with validation scores, and show them in the bar.

        Args:
            step: Number of the step.
            scores: Validation scores by name, `loss` among them.
        """
        self.write(step=step, **{f"validation_{name}": score for name, score in scores.items()})
        # the bar shows only one score: BLEU if it was computed, otherwise the loss
        has_bleu = "bleu" in scores
        self.validation_text = (
            f" BLEU {scores['bleu']:.1f}" if has_bleu else f" val {scores[LOSS]:.3f}"
        )
        self._show_texts()

    def _show_texts(self):
        self.bar.set_description_str(f"{self.training_text}{self.validation_text}", refresh=False)

    def write(self, **facts: Any):
        """Write a line to `metrics.jsonl`, and send it to the trackers.

        Args:
            facts: Entries of the line; null replaces a number that is not finite, or too large
                to be read again.

        Raises:
            ValueError: If a tracker fails; names the trackers.
        """
        if not self.accelerator.is_main_process:
            return
        facts = {
            name: None if isinstance(fact, float) and not NUMBER.matches(fact) else fact
            for name, fact in facts.items()
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts, allow_nan=False) + "\n")
        numbers = {name: fact for name, fact in facts.items() if fact is not None}
        with _naming_trackers(self.accelerator):
            self.accelerator.log(numbers, step=numbers.pop("step"))

    def to_disk(self):
        """Force all lines to disk, so that after a power loss no checkpoint lacks its metrics."""
        to_disk(self.path)


def count_positions(batches: list[dict[str, Tensor]]) -> dict[str, int]:
    """Count the positions of batches, and the non-padding tokens.

    Args:
        batches: Micro-batches in host memory.

    Returns:
        Number of all `POSITIONS`, and of `NON_PADDING_TOKENS`, of sources and targets together.
    """
    counts = {POSITIONS: 0, NON_PADDING_TOKENS: 0}
    for batch in batches:
        source, target = batch["attention_mask"], batch["labels"]
        counts[POSITIONS] += source.numel() + target.numel()
        counts[NON_PADDING_TOKENS] += int(source.sum()) + int((target != IGNORED).sum())
    return counts


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss per token.

    Args:
        loss: Unsmoothed loss per token, in nats.

    Returns:
        Exponential of the loss; infinity if it is too large for a float.
    """
    # the largest float is about exp(709.8)
    return math.exp(loss) if loss < 700 else math.inf
