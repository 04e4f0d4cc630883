"""The learning rate of section 5.3."""

from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .config import TrainConfig


def learning_rate(step: int, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """The rate of one step: a rising line, then its inverse root. Section 5.3, eq. (3).

    Args:
        step: The step, counted from 1.
        d_model: Width of the model.
        warmup_steps: Steps in which the rate rises.
        factor: Scales the whole; the paper has 1.

    Returns:
        The rate.

    Raises:
        ValueError: If a step or the warmup is not positive.
    """
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}.")
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps must be at least 1, got {warmup_steps}.")
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def cooled_down(
    rate: Callable[[int], float], max_steps: int, cooldown_steps: int
) -> Callable[[int], float]:
    """A rate that falls in a line at the end: the step after the last would have none.

    The paper has no such end; how much it gives is in Hägele et al. 2024, "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations".

    Args:
        rate: Of a step, counted from 1.
        max_steps: Of the run.
        cooldown_steps: The last so many; fewer than all.

    Returns:
        The same rate but for those steps.
    """
    last = max_steps - cooldown_steps

    def cooled(step: int) -> float:
        if step <= last:
            return rate(step)
        return rate(last) * max(0, max_steps + 1 - step) / (cooldown_steps + 1)

    return cooled


def rate_of(config: TrainConfig, d_model: int) -> Callable[[int], float]:
    """The rate of each step of a run.

    Args:
        config: Settings of the run.
        d_model: Width of the model.

    Returns:
        From a step, counted from 1, to its rate.
    """
    rate = partial(
        learning_rate,
        d_model=d_model,
        warmup_steps=config.warmup_steps,
        factor=config.learning_rate_factor,
    )
    return cooled_down(rate, config.max_steps, config.cooldown_steps)


def follow_rate(
    optimizer: Optimizer, rate: Callable[[int], float], steps_done: int = 0
) -> LambdaLR:
    """Make `optimizer` follow a rate, one `scheduler.step()` a step.

    Do not hand it to `accelerator.prepare`, which would step it once for each process.

    Args:
        optimizer: Its rate must be 1 when it is made.
        rate: Of a step, counted from 1.
        steps_done: Steps already taken, where a run is resumed.

    Returns:
        The scheduler, set to the rate of the next step.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = 1.0
    # the scheduler counts from 0, the paper from 1
    return LambdaLR(optimizer, lambda index: rate(index + 1), last_epoch=steps_done - 1)
