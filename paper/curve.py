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
PANELS = {
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
    trained = {run: logged_values(lines, "loss") for run, lines in metrics.items()}
    for run, (steps, _) in trained.items():
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
            for run, (steps, losses) in trained.items()
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
    losses, *others = all_axes.flat
    for run, lines in metrics.items():
        plot_losses(losses, lines, run)
        for axes, (name, label) in zip(others, PANELS.items(), strict=True):
            axes.plot(*logged_values(lines, name), label=run)
            axes.set_xlabel("step")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
    for axes in others:
        axes.set_ylim(bottom=0.0)
    losses.legend(fontsize=8)
    if len(metrics) > 1:
        others[0].legend(fontsize=8)
    return figure


def _row(run: str, lines: Sequence[Mapping[str, Any]]) -> list[Any]:
    steps, losses = logged_values(lines, "loss")
    floor = None
    if (Path(run) / RECIPE_FILE).is_file():
        recipe = read_recipe(Path(run))
        vocab_size = vocabulary_size(Path(run), recipe)
        if vocab_size is not None:
            floor = least_loss(vocab_size, recipe.label_smoothing)
    evaluated = list(zip(*logged_values(lines, "validation_loss"), strict=True))
    at, lowest = min(evaluated, key=lambda point: point[1], default=(None, None))
    return [
        run,
        steps[-1],
        losses[0],
        losses[-1],
        floor,
        lowest,
        None if lowest is None else perplexity(lowest),
        at,
        statistics.median(logged_values(lines, "tokens_per_second")[1] or [0.0]),
        max(logged_values(lines, "grad_norm")[1], default=None),
    ]


def _findings(row: Sequence[Any]) -> str:
    run, last, first_loss, last_loss, floor, lowest, lowest_perplexity, at, speed, _ = row
    sentences = [
        f"The training loss of {run} goes from {first_loss:.3f} to {last_loss:.3f} in {last:,} "
        "steps"
        + ("." if floor is None else f"; its smoothed targets allow no loss below {floor:.3f}.")
    ]
    if lowest is not None:
        sentences.append(
            f"The lowest validation loss is {lowest:.3f} at step {at:,}, a perplexity of "
            f"{lowest_perplexity:.2f}."
        )
    sentences.append(f"The median speed is {speed:,.0f} target tokens per second.")
    return " ".join(sentences)
