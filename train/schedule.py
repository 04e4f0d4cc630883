"""Learning rate of section 5.3."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .config import TrainConfig


def learning_rate(step: int, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """Return the learning rate of a step: warm-up, then inverse square root. Section 5.3, eq. (3).

    Args:
        step: Number of the step, from 1.
        d_model: Width of the model.
        warmup_steps: Number of first steps, in which the learning rate rises linearly.
        factor: Factor on the learning rate; 1 in the paper.

    Returns:
        The learning rate.

    Raises:
        ValueError: If `step` or `warmup_steps` is not positive.
    """
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}.")
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps must be at least 1, got {warmup_steps}.")
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def cooled_down(
    schedule: Callable[[int], float], max_steps: int, cooldown_steps: int
) -> Callable[[int], float]:
    """Add a linear cooldown, in which the learning rate would reach 0 one step after the last.

    The paper has no cooldown. Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training
    Beyond Fixed Training Durations", measure its effect.

    Args:
        schedule: Function from a step, counted from 1, to its learning rate.
        max_steps: Number of steps of the run.
        cooldown_steps: Number of last steps, in which the learning rate decays; below `max_steps`.

    Returns:
        Function from a step to its learning rate, with cooldown.
    """
    last_full_step = max_steps - cooldown_steps

    def learning_rate_with_cooldown(step: int) -> float:
        if step <= last_full_step:
            return schedule(step)
        return schedule(last_full_step) * max(0, max_steps + 1 - step) / (cooldown_steps + 1)

    return learning_rate_with_cooldown


def learning_rate_of(
    config: TrainConfig, d_model: int, cooldown: Mapping[str, Any] | None = None
) -> Callable[[int], float]:
    """Return the learning rate of a run as a function of the step.

    Args:
        config: Settings of the run.
        d_model: Width of the model.
        cooldown: Number of `steps` and `last_step` of a cooldown that began early; None for the
            cooldown of the settings.

    Returns:
        Function from a step, counted from 1, to its learning rate.
    """
    without_cooldown = partial(
        learning_rate,
        d_model=d_model,
        warmup_steps=config.warmup_steps,
        factor=config.learning_rate_factor,
    )
    if cooldown is None:
        cooldown = {"steps": config.cooldown_steps, "last_step": config.max_steps}
    return cooled_down(without_cooldown, cooldown["last_step"], cooldown["steps"])


def make_scheduler(
    optimizer: Optimizer, schedule: Callable[[int], float], steps_done: int = 0
) -> LambdaLR:
    """Make a scheduler that sets the learning rate of each step.

    Do not pass the scheduler to `accelerator.prepare`: in each step, a prepared scheduler advances
    once for each process.

    Args:
        optimizer: Optimizer that was made with a learning rate of 1.
        schedule: Function from a step, counted from 1, to its learning rate.
        steps_done: Number of steps done before, in a resumed run.

    Returns:
        Scheduler, set to the learning rate of the next step.
    """
    # LambdaLR multiplies `schedule` by this entry, and sets it itself only if `last_epoch` is -1
    for group in optimizer.param_groups:
        group["initial_lr"] = 1.0
    # the scheduler counts steps from 0, the paper from 1
    return LambdaLR(optimizer, lambda index: schedule(index + 1), last_epoch=steps_done - 1)
