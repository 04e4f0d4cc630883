"""Section 5.3, eq. (3): how the learning rate rises and falls."""

import argparse
from collections.abc import Iterator

from vanilla_transformer.paper.study import Section
from vanilla_transformer.pictures import new_figure
from vanilla_transformer.train.config import load_config
from vanilla_transformer.train.schedule import learning_rate

POINTS = 400


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked of this study.

    Args:
        parser: Of the command line.
    """
    parser.add_argument(
        "--recipes",
        nargs="+",
        metavar="RECIPE",
        default=["paper-base", "paper-big", "t2t-base"],
        help="whose rates to draw, names or .yaml files (%(default)s)",
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """The rate against the steps, for each recipe.

    Args:
        flags: As `add_flags` declares them.

    Yields:
        One section.

    Raises:
        ValueError: If there is no such recipe.
    """
    figure, axes = new_figure(7.0, 4.0)
    rows = []
    for recipe in flags.recipes:
        config = load_config(recipe)
        d_model = config.model_config(config.vocab_size).d_model
        shape = (d_model, config.warmup_steps, config.learning_rate_factor)
        last = config.max_steps
        steps = sorted({1, last, config.warmup_steps, *range(1, last + 1, max(1, last // POINTS))})
        rates = [learning_rate(step, *shape) for step in steps]
        axes.plot(steps, rates, label=recipe)
        peak = learning_rate(config.warmup_steps, *shape)
        rows.append([recipe, *shape, peak, rates[-1], last])
    axes.set_xlabel("step")
    axes.set_ylabel("learning rate")
    axes.grid(alpha=0.3)
    axes.legend()
    highest = max(rows, key=lambda row: row[4])
    yield Section(
        name="schedule",
        title="The learning rate, step by step",
        says="The rate rises in a line while the moments of Adam are still rough, then falls with "
        "the inverse square root of the step; warm-up ends where the two curves meet. A wider "
        f"model gets a lower rate, by the root of its width. The highest here is {highest[0]}'s, "
        f"{highest[4]:.2e} at step {highest[2]:,}.",
        columns=("recipe", "d_model", "warm-up", "factor", "peak rate", "last rate", "steps"),
        rows=rows,
        figure=figure,
    )
