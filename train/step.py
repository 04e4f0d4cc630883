"""One step of training: the loss of section 5.4, and every target token of equal weight."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..identity_vanilla_transformer import stacks_difference
from .data.batches import IGNORED
from .devices.fused_loss import fused_loss_sum

# every process has all weights
REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


@dataclass
class StepResult:
    """What a step reports, the same on every process; to read any of it waits for the device.

    Args:
        loss: Smoothed loss for each target token.
        num_tokens: Target tokens of the step, over all processes.
        grad_norm: Norm of the gradient, before clipping.
        is_skipped: Whether loss or gradient were not finite, so that no weight changed.
    """

    loss: Tensor
    num_tokens: Tensor
    grad_norm: Tensor
    is_skipped: Tensor


def smoothed_loss_sum(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Cross entropy against smoothed targets, summed over the tokens. Section 5.4.

    The true token keeps 1 - label_smoothing; the rest is spread over the whole vocabulary.

    Args:
        logits: Scores of the next token, [B, T, vocabulary].
        labels: The next tokens, `IGNORED` where there is none, [B, T].
        label_smoothing: epsilon_ls.

    Returns:
        The sum, a scalar in float32.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def takes_fused_loss(accelerator: Accelerator, model: nn.Module) -> bool:
    """Return whether the loss can be computed without the scores of all tokens of the vocabulary.

    Every process must have all weights, and embeddings, head and stacks must be those of this
    release: the forward of an edited model, a subclass or a compiled model is called as it is.

    Args:
        accelerator: Knows the layout.
        model: A model that `accelerator` prepared.
    """
    if accelerator.distributed_type != DistributedType.NO:
        if not isinstance(model, DistributedDataParallel):
            return False
        model = model.module
    return stacks_difference(model) is None


def batch_loss_sum(
    accelerator: Accelerator, model: nn.Module, inputs: dict[str, Tensor], label_smoothing: float
) -> Tensor:
    """The smoothed loss of a batch, in the way that its layout on the processes allows.

    Args:
        accelerator: Knows the layout and the precision.
        model: A model that `accelerator` prepared.
        inputs: A batch on the device, with `places`, where in [B * T] labels count.
        label_smoothing: epsilon_ls.

    Returns:
        The sum, a scalar in float32.
    """
    if not takes_fused_loss(accelerator, model):
        others = {name: inputs[name] for name in inputs if name not in ("labels", "places")}
        logits = model(**others, use_cache=False).logits
        return smoothed_loss_sum(logits, inputs["labels"], label_smoothing)
    if not isinstance(model, DistributedDataParallel):
        with accelerator.autocast():
            return fused_loss_sum(model, **inputs, label_smoothing=label_smoothing)
    # its gradients are summed over processes only after a forward of its own
    plain, model.module.forward = model.module.forward, partial(fused_loss_sum, model.module)
    try:
        with accelerator.autocast():
            return model(**inputs, label_smoothing=label_smoothing)
    finally:
        model.module.forward = plain


def mask_for_sdpa(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make of a batch's mask what torch's own attention takes, while it is on the host.

    The library would look whether the mask hides anything, and so wait for the device.

    Args:
        batch: In the memory of the host, with `attention_mask`, [B, S].

    Returns:
        The batch with its mask in the form [B, 1, 1, S], or without one where nothing is hidden.
    """
    mask = batch["attention_mask"].bool()
    others = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    return others if mask.numpy().all() else {**others, "attention_mask": mask[:, None, None, :]}


def training_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    batches: Sequence[dict[str, Tensor]],
    label_smoothing: float,
    max_grad_norm: float | None = None,
) -> StepResult:
    """Change the weights once, by the mean over all target tokens of all batches of all processes.

    A step whose loss or gradient is not finite changes nothing but the rate. The host never waits
    for the device here.

    Args:
        accelerator: Knows the processes and the precision.
        model: A model that `accelerator` prepared.
        optimizer: A fused optimizer that `accelerator` prepared.
        scheduler: Of that optimizer, not prepared.
        batches: The part of the step that this process has, as many as on any other process; in
            the memory of the host, where to count does not wait for the device.
        label_smoothing: epsilon_ls.
        max_grad_norm: Clips the gradient's norm, or None.

    Returns:
        Loss and gradient of the step.

    Raises:
        ValueError: If this process has no batch, or no target token in any.
    """
    if not batches:
        raise ValueError("a step must have at least one batch, got none.")
    local_tokens = sum(np.count_nonzero(batch["labels"].numpy() != IGNORED) for batch in batches)
    if local_tokens == 0:
        raise ValueError("a step must have at least one target token, got none.")
    device = accelerator.device
    step_tokens = accelerator.reduce(torch.full((), local_tokens, device=device), reduction="sum")
    step_loss = torch.zeros((), device=device)
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        # DeepSpeed takes its step at the end of the backward pass that is to sum over processes
        accelerator.sync_gradients = is_last
        with nullcontext() if is_last else accelerator.no_sync(model):
            places = np.flatnonzero(batch["labels"].numpy() != IGNORED)
            inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            inputs["places"] = torch.from_numpy(places).to(device, non_blocking=True)
            loss_sum = batch_loss_sum(accelerator, model, inputs, label_smoothing)
            # data-parallel training averages gradients over processes; undo it to get a sum
            accelerator.backward(loss_sum * accelerator.num_processes / step_tokens)
        step_loss += loss_sum.detach()
    step_loss = accelerator.reduce(step_loss, reduction="sum") / step_tokens
    if max_grad_norm is None and accelerator.distributed_type in REPLICATED:
        # the paper does not clip; with an infinite bound the gradient would be written anew
        accelerator.unscale_gradients(optimizer)
        grad_norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    else:
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # it clips by its own setting, and has looked for itself whether the gradient is finite
        grad_norm = torch.full((), float(grad_norm), device=device)
        is_skipped = torch.full((), optimizer.step_was_skipped, device=device)
    else:
        # with FSDP2 every process has a part of the gradient, and here the norm of all of it
        grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        is_skipped = ~(torch.isfinite(step_loss) & torch.isfinite(grad_norm))
        # a fused optimizer then changes nothing; the scaler of half precision tells it by itself
        if accelerator.scaler is None:
            optimizer.optimizer.found_inf = is_skipped.float()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return StepResult(step_loss, step_tokens, grad_norm, is_skipped)
