"""Training step with the loss of section 5.4, averaged over the target tokens of all processes."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LRScheduler

from ..cores_vanilla_transformer import shared_cores
from ..identity_vanilla_transformer import difference_outside_layers
from .data.batches import IGNORED
from .devices.fused_loss import fused_loss_sum

# layouts in which every process has all weights
REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


@dataclass
class StepResult:
    """Result of a step, the same on every process. Reading a value waits for the device.

    Args:
        loss: Mean smoothed loss per target token.
        num_tokens: Number of target tokens of the step, over all processes.
        grad_norm: L2 norm of the gradient before clipping.
        is_skipped: Whether loss or gradient was not finite, so that no weight changed.
    """

    loss: Tensor
    num_tokens: Tensor
    grad_norm: Tensor
    is_skipped: Tensor


def smoothed_loss_sum(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Return the cross entropy with smoothed targets, summed over tokens. Section 5.4.

    The target distribution gives 1 - label_smoothing to the true token, and spreads label_smoothing
    evenly over the whole vocabulary, including the true token.

    Args:
        logits: Logits of the next token, [B, T, V].
        labels: Ids of the next tokens, with `IGNORED` at padding, [B, T].
        label_smoothing: epsilon_ls.

    Returns:
        Sum of the loss, a scalar in float32.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def takes_fused_loss(accelerator: Accelerator, model: nn.Module) -> bool:
    """Return whether the loss can be computed without keeping all logits.

    Every process must have all weights, and embeddings, output projection and layer stacks must
    run the released code. An edited model, a subclass, and a model compiled as a whole compute
    their own logits.

    Args:
        accelerator: Accelerator that prepared the model.
        model: Prepared model.
    """
    if accelerator.distributed_type != DistributedType.NO:
        if not isinstance(model, DistributedDataParallel):
            return False
        model = model.module
    return difference_outside_layers(model) is None


def batch_loss_sum(
    accelerator: Accelerator,
    model: nn.Module,
    inputs: dict[str, Tensor],
    label_smoothing: float,
    has_own_loss: bool = False,
) -> Tensor:
    """Sum the smoothed loss over a batch's tokens, with the fused loss if the model allows it.

    Args:
        accelerator: Accelerator that prepared the model.
        model: Prepared model.
        inputs: Batch on the device, with `label_indices`, the indices of the labels that are not
            `IGNORED`, in the flattened labels [B * T].
        label_smoothing: epsilon_ls.
        has_own_loss: Whether the loss is the model's own; it counts as a mean over the tokens.

    Returns:
        Sum of the loss, a scalar in float32.
    """
    if has_own_loss:
        model_inputs = {name: inputs[name] for name in inputs if name != "label_indices"}
        return model(**model_inputs, use_cache=False).loss.float() * len(inputs["label_indices"])
    if not takes_fused_loss(accelerator, model):
        model_inputs = {
            name: inputs[name] for name in inputs if name not in ("labels", "label_indices")
        }
        logits = model(**model_inputs, use_cache=False).logits
        return smoothed_loss_sum(logits, inputs["labels"], label_smoothing)
    if not isinstance(model, DistributedDataParallel):
        with accelerator.autocast():
            return fused_loss_sum(model, **inputs, label_smoothing=label_smoothing)
    # DistributedDataParallel reduces gradients over processes only after its own forward, so the
    # fused loss replaces the forward that it calls
    module = model.module
    # accelerate sets a forward on the instance; usually there is only that of the class
    forward_before = vars(module).get("forward")
    module.forward = partial(fused_loss_sum, module)
    try:
        with accelerator.autocast():
            return model(**inputs, label_smoothing=label_smoothing)
    finally:
        del module.forward
        if forward_before is not None:
            module.forward = forward_before


def mask_for_sdpa(batch: dict[str, Tensor], keeps_mask: bool = False) -> dict[str, Tensor]:
    """Convert the padding mask of a batch to the form of torch's scaled_dot_product_attention.

    With the original mask, transformers would check on the device whether the mask hides any
    position, and the host would wait for the result.

    Args:
        batch: Batch in host memory, with `attention_mask`, [B, S].
        keeps_mask: Whether to keep a mask that hides nothing. A compiled model should keep it,
            because torch would compile one graph with a mask and another one without.

    Returns:
        Batch with a boolean mask, [B, 1, 1, S], or without a mask if the mask hides nothing.
    """
    mask = batch["attention_mask"].bool()
    other_tensors = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    if mask.numpy().all() and not keeps_mask:
        return other_tensors
    return {**other_tensors, "attention_mask": mask[:, None, None, :]}


def on_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy a batch to the device, without waiting for the copy.

    Args:
        batch: Tensors in host memory.
        device: Device of the model.

    Returns:
        The same tensors on the device.
    """
    if device.type == "cuda":
        # a copy from memory that is not pinned would make the host wait
        batch = {
            name: tensor if tensor.is_pinned() else tensor.pin_memory()
            for name, tensor in batch.items()
        }
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def training_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    scheduler: LRScheduler,
    batches: Sequence[dict[str, Tensor]],
    *,
    label_smoothing: float,
    max_grad_norm: float | None = None,
    has_own_loss: bool = False,
) -> StepResult:
    """Update the weights once, with the mean loss over all target tokens of all processes.

    If loss or gradient is not finite, the weights stay and only the learning rate advances. The
    host does not wait for the device, except with DeepSpeed.

    Args:
        accelerator: Accelerator that prepared model and optimizer.
        model: Prepared model.
        optimizer: Prepared optimizer, made with `fused=True`.
        scheduler: Scheduler of the optimizer, not prepared.
        batches: Micro-batches of this process in host memory; each process has the same number.
        label_smoothing: epsilon_ls.
        max_grad_norm: Norm to which a larger gradient is clipped; None for no clipping.
        has_own_loss: Whether the loss is the model's own; it counts as a mean over the tokens.

    Returns:
        Result of the step, on the device.

    Raises:
        ValueError: If this process has no batch or no target token.
    """
    if not batches:
        raise ValueError("a step must have at least one batch, got none.")
    local_tokens = sum(
        int(np.count_nonzero(batch["labels"].numpy() != IGNORED)) for batch in batches
    )
    if local_tokens == 0:
        raise ValueError("a step must have at least one target token, got none.")
    device = accelerator.device
    step_tokens = accelerator.reduce(torch.full((), local_tokens, device=device), reduction="sum")
    step_loss = torch.zeros((), device=device)
    # autocast caches its half-precision copies of the weights until the outermost autocast context
    # ends. This outer context keeps the cache for all micro-batches of the step. It is disabled,
    # because the backward pass should run without autocast
    with torch.autocast(device.type, enabled=False):
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            shared_cores.update()
            # with DeepSpeed, the backward pass for which this flag is set also updates the weights
            accelerator.sync_gradients = is_last
            with nullcontext() if is_last else accelerator.no_sync(model):
                label_indices = np.flatnonzero(batch["labels"].numpy() != IGNORED)
                inputs = on_device(
                    {**batch, "label_indices": torch.from_numpy(label_indices)}, device
                )
                loss_sum = batch_loss_sum(accelerator, model, inputs, label_smoothing, has_own_loss)
                # data-parallel training averages gradients over processes; the factor
                # num_processes turns the average into a sum
                accelerator.backward(loss_sum * accelerator.num_processes / step_tokens)
            step_loss += loss_sum.detach()
    step_loss = accelerator.reduce(step_loss, reduction="sum") / step_tokens
    grad_norm = _clip_gradient(accelerator, model, optimizer, max_grad_norm)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # DeepSpeed has clipped the gradient by its own setting, and checked whether it is finite
        grad_norm = torch.full((), float(grad_norm), device=device)
        is_skipped = torch.full((), optimizer.step_was_skipped, device=device)
    else:
        is_skipped = ~(torch.isfinite(step_loss) & torch.isfinite(grad_norm))
        # if `found_inf` is 1, a fused optimizer leaves the weights unchanged; in float16 the
        # gradient scaler sets `found_inf`
        if accelerator.scaler is None:
            optimizer.optimizer.found_inf = is_skipped.float()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return StepResult(step_loss, step_tokens, grad_norm, is_skipped)


def _clip_gradient(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    max_grad_norm: float | None,
) -> Tensor:
    """Clip the gradient if `max_grad_norm` is set, and return its norm before clipping."""
    if max_grad_norm is None and accelerator.distributed_type in REPLICATED:
        # the paper does not clip; clipping at infinity would only multiply each gradient by 1
        accelerator.unscale_gradients(optimizer)
        return get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    # with FSDP2 every process has only a part of the gradient, so its norm is a DTensor
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
