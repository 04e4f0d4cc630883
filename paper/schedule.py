"""Learning rate schedule of section 5.3, eq. (3)."""

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..drawing import new_figure
from ..train.recipe import load_config
from ..train.schedule import learning_rate
from .study import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# number of points of a curve
CURVE_POINTS = 400
# recipes whose learning rates are drawn by default
RECIPES = ("paper-base", "paper-big", "t2t-base")


class Schedule(NamedTuple):
    """Arguments of `learning_rate`, and the number of training steps."""

    d_model: int
    warmup_steps: int
    factor: float
    max_steps: int

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return learning_rate(step, self.d_model, self.warmup_steps, self.factor)


def draw_schedules(schedules: Mapping[str, Schedule]) -> "Figure":
    """Draw learning rates against the step.

    Args:
        schedules: Schedules by their label in the legend.

    Returns:
        The picture.
    """
    figure, axes = new_figure(7.0, 4.0)
    for name, schedule in schedules.items():
        last_step = schedule.max_steps
        steps = {1, last_step, *range(1, last_step + 1, max(1, last_step // CURVE_POINTS))}
        if schedule.warmup_steps <= last_step:
            steps.add(schedule.warmup_steps)
        axes.plot(sorted(steps), list(map(schedule.learning_rate, sorted(steps))), label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument(
        "--recipes",
        nargs="+",
        metavar="RECIPE",
        default=list(RECIPES),
        help="recipes whose learning rates are drawn, names or .yaml files (default: "
        f"{' '.join(RECIPES)})",
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Compare the learning rates of recipes.

    Args:
        flags: Flags of `add_flags`.

    Yields:
        One section.

    Raises:
        ValueError: If a recipe is unknown.
    """
    schedules = {}
    for recipe in flags.recipes:
        config = load_config(recipe)
        schedules[recipe] = Schedule(
            config.model_config(config.vocab_size).d_model,
            config.warmup_steps,
            config.learning_rate_factor,
            config.max_steps,
        )
    peaks = {
        recipe: schedule.learning_rate(schedule.warmup_steps)
        for recipe, schedule in schedules.items()
    }
    highest_recipe = max(peaks, key=peaks.__getitem__)
    yield Section(
        name="schedule",
        title="Learning rate at each step",
        finding="The learning rate rises linearly during warm-up, while Adam's estimates of the "
        "moments are rough. Then it falls with the inverse square root of the step. It is "
        "proportional to the inverse square root of d_model, so a wider model gets a lower "
        f"learning rate. {highest_recipe} has the highest learning rate here, "
        f"{peaks[highest_recipe]:.2e} at step {schedules[highest_recipe].warmup_steps:,}.",
        columns=(
            "recipe",
            "d_model",
            "warm-up steps",
            "factor",
            "steps",
            "peak learning rate",
            "last learning rate",
        ),
        rows=[
            [
                recipe,
                *schedule,
                peaks[recipe],
                schedule.learning_rate(schedule.max_steps),
            ]
            for recipe, schedule in schedules.items()
        ],
        figure=draw_schedules(schedules),
        message="The learning rate rises during warm-up, then falls with the root of the step",
    )
