"""The learning rate of section 5.3."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


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


def paper_schedule(
    optimizer: Optimizer, d_model: int, warmup_steps: int, factor: float = 1.0, steps_done: int = 0
) -> LambdaLR:
    """Make `optimizer` follow `learning_rate`, one `scheduler.step()` a step.

    Do not hand it to `accelerator.prepare`, which would step it once for each process.

    Args:
        optimizer: Its rate must be 1 when it is made.
        d_model: Width of the model.
        warmup_steps: Steps in which the rate rises.
        factor: Scales the whole.
        steps_done: Steps already taken, where a run is resumed.

    Returns:
        The scheduler, set to the rate of the next step.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = 1.0
    # the scheduler counts from 0, the paper from 1
    return LambdaLR(
        optimizer,
        lambda index: learning_rate(index + 1, d_model, warmup_steps, factor),
        last_epoch=steps_done - 1,
    )
