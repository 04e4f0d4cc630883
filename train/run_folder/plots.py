"""Plots of a run: the loss curve and an attention map."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...attention_maps import attention_weights
from ...drawing import label_rows_and_columns, new_figure, save_figure, write_message
from .files import read_metrics


def logged_values(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Extract one quantity from the metrics.

    Args:
        metrics: Metrics from `read_metrics`.
        name: Name of the quantity.

    Returns:
        Steps at which a finite value of the quantity was logged, and these values.
    """
    points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot_losses(axes: Any, metrics: Sequence[Mapping[str, Any]], run: str | None = None) -> None:
    """Plot training and validation loss against the steps.

    Args:
        axes: Axes to plot on.
        metrics: Metrics from `read_metrics`.
        run: Name of the run, for a plot of several runs: the two curves of a run then have the same
            color. None for a plot of one run.
    """
    color = None
    for name, label in (
        ("loss", "training, with label smoothing"),
        ("validation_loss", "validation"),
    ):
        steps, values = logged_values(metrics, name)
        if not steps:
            continue
        is_faint = run is not None and name == "loss"
        (line,) = axes.plot(
            steps,
            values,
            label=label if run is None else f"{run}, {label}",
            marker="." if len(steps) < 40 else "",
            color=color,
            alpha=0.45 if is_faint else 1.0,
        )
        color = line.get_color() if run is not None else None
    axes.set_xlabel("step")
    axes.set_ylabel("loss per target token (nats)")
    axes.grid(alpha=0.3)


def draw_loss_curve(folder: Path) -> None:
    """Draw training and validation loss against the steps, as `pictures/loss.png`.

    Args:
        folder: Run folder with metrics.
    """
    figure, axes = new_figure(6.0, 3.6)
    metrics = read_metrics(folder)
    plot_losses(axes, metrics)
    if axes.lines:
        axes.legend()
    steps, losses = logged_values(metrics, "loss")
    if steps:
        write_message(
            figure,
            f"The training loss is {losses[0]:.2f} at step {steps[0]:,} and {losses[-1]:.2f} at "
            f"step {steps[-1]:,}",
        )
    save_figure(figure, folder / "pictures" / "loss.png")


def draw_attention(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str
) -> None:
    """Draw the attention of each target token to the source, as `pictures/attention.png`.

    The picture shows the encoder-decoder attention of the decoder's last layer, section 3.2.3, as
    the mean over its heads, for the model's own translation.

    Args:
        folder: Run folder.
        model: Trained model.
        tokenizer: Tokenizer of the model.
        source: Sentence to translate.
    """
    weights = attention_weights(model, tokenizer, source)
    width, height = 2.8 + 0.32 * len(weights.source), 1.5 + 0.28 * len(weights.target)
    figure, axes = new_figure(width, height)
    image = axes.imshow(
        weights.cross[-1].mean(dim=0).numpy(), cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto"
    )
    # the label is short, because beside a translation of a few tokens a longer one would be cut off
    figure.colorbar(image, ax=axes, label="mean weight, last layer")
    label_rows_and_columns(axes, weights.target, weights.source)
    axes.set_xlabel("source")
    axes.set_ylabel("translation")
    write_message(figure, "Each target token attends most to the brightest source tokens")
    save_figure(figure, folder / "pictures" / "attention.png")
