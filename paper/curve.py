"""Training curves from the logged metrics of runs. Sections 5 and 6."""

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..drawing import new_figure
from ..train.progress import perplexity
from ..train.recipe import RECIPE_FILE
from ..train.run_folder.files import METRICS_FILE, read_metrics, read_recipe, vocabulary_size
from ..train.run_folder.plots import logged_values, plot_losses
from .label_smoothing import least_loss
from .study import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# label of the axis in the picture, by name in metrics.jsonl
AXIS_LABELS = {
    "learning_rate": "learning rate",
    "tokens_per_second": "target tokens per second",
    "grad_norm": "gradient norm",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument("runs", nargs="+", metavar="RUN", help=f"run folder with {METRICS_FILE}")


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Compare losses, learning rates, speeds and gradient norms of runs.

    Args:
        flags: Flags of `add_flags`.

    Yields:
        One section.

    Raises:
        ValueError: If a folder has no logged loss.
    """
    metrics = {run: read_metrics(Path(run)) for run in dict.fromkeys(flags.runs)}
    training_losses = {run: logged_values(lines, "loss") for run, lines in metrics.items()}
    for run, (steps, _) in training_losses.items():
        if not steps:
            raise ValueError(
                f"RUN must be a run folder with training losses in {METRICS_FILE}, got {run} "
                "without any."
            )
    rows = [_row(run, lines) for run, lines in metrics.items()]
    yield Section(
        name="curve",
        title="Loss, learning rate, speed and gradient norm",
        finding=" ".join(_findings(row) for row in rows)
        + " The training loss has label smoothing and dropout, the validation loss has neither, so "
        "the validation loss can be lower. `lower bound` is the entropy of the smoothed targets.",
        columns=(
            "run",
            "steps",
            "first loss",
            "last loss",
            "lower bound",
            "lowest validation loss",
            "perplexity",
            "at step",
            "tokens per second",
            "largest gradient norm",
        ),
        rows=rows,
        figure=draw_curves(metrics),
        message="; ".join(
            f"{run}: training loss {losses[0]:.2f} at first, {losses[-1]:.2f} at step {steps[-1]:,}"
            for run, (steps, losses) in training_losses.items()
        ),
    )


def draw_curves(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> "Figure":
    """Draw losses, learning rates, speeds and gradient norms of runs.

    Args:
        metrics: Lines of `metrics.jsonl`, by the name of the run.

    Returns:
        The picture with four plots.
    """
    figure, all_axes = new_figure(11.0, 7.0, 2, 2)
    loss_axes, *other_axes = all_axes.flat
    for run, lines in metrics.items():
        plot_losses(loss_axes, lines, run)
        for axes, (name, label) in zip(other_axes, AXIS_LABELS.items(), strict=True):
            axes.plot(*logged_values(lines, name), label=run)
            axes.set_xlabel("step")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
    for axes in other_axes:
        axes.set_ylim(bottom=0.0)
    loss_axes.legend(fontsize=8)
    if len(metrics) > 1:
        other_axes[0].legend(fontsize=8)
    return figure


def _row(run: str, lines: Sequence[Mapping[str, Any]]) -> list[Any]:
    steps, losses = logged_values(lines, "loss")
    lower_bound = None
    if (Path(run) / RECIPE_FILE).is_file():
        recipe = read_recipe(Path(run))
        vocab_size = vocabulary_size(Path(run), recipe)
        if vocab_size is not None:
            lower_bound = least_loss(vocab_size, recipe.label_smoothing)
    validation_points = list(zip(*logged_values(lines, "validation_loss"), strict=True))
    lowest_step, lowest_loss = min(
        validation_points, key=lambda point: point[1], default=(None, None)
    )
    return [
        run,
        steps[-1],
        losses[0],
        losses[-1],
        lower_bound,
        lowest_loss,
        None if lowest_loss is None else perplexity(lowest_loss),
        lowest_step,
        statistics.median(logged_values(lines, "tokens_per_second")[1] or [0.0]),
        max(logged_values(lines, "grad_norm")[1], default=None),
    ]


def _findings(row: Sequence[Any]) -> str:
    (
        run,
        last_step,
        first_loss,
        last_loss,
        lower_bound,
        lowest_loss,
        lowest_perplexity,
        lowest_step,
        speed,
        _,
    ) = row
    sentences = [
        f"The training loss of {run} goes from {first_loss:.3f} to {last_loss:.3f} in "
        f"{last_step:,} steps"
        + (
            "."
            if lower_bound is None
            else f"; its smoothed targets allow no loss below {lower_bound:.3f}."
        )
    ]
    if lowest_loss is not None:
        sentences.append(
            f"The lowest validation loss is {lowest_loss:.3f} at step {lowest_step:,}, a "
            f"perplexity of {lowest_perplexity:.2f}."
        )
    sentences.append(f"The median speed is {speed:,.0f} target tokens per second.")
    return " ".join(sentences)
