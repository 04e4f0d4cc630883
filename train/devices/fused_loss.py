"""Training loss of the model in fewer passes over memory; tests prove that it is the same loss.

Between its matrix products, a training step is limited by memory bandwidth. To save passes over
memory, the logits of only some tokens are in memory at a time, and the gradients of the tied
embedding, one from each of its three uses, are summed in a single tensor.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from ...kernels_vanilla_transformer import exp_
from .cpu_kernels import is_for_onednn, product

# size of a block, the logits that are in memory at a time, on a CPU and on other devices. Smaller
# blocks would be slower: each block after the first reads and writes the embedding's whole gradient
CPU_BLOCK_BYTES, BLOCK_BYTES = 2**27, 2**29
# size of a tile, the logits of a block for one part of the vocabulary. A CPU computes a block tile
# by tile: a tile stays in the cache, and tensors as large as a block would fragment the memory
CPU_TILE_BYTES = 2**22
FLOAT32_BYTES = 4


def block_bytes(device: str) -> int:
    """Return the size of the logits that are in memory at a time.

    Args:
        device: Device type, such as "cuda" or "cpu".

    Returns:
        Size in bytes.
    """
    return CPU_BLOCK_BYTES if device == "cpu" else BLOCK_BYTES


class LossOfStates(torch.autograd.Function):
    """Smoothed loss of section 5.4, summed over tokens, from decoder states and output projection.

    The forward pass computes loss and gradients together, one block of tokens at a time. The
    backward pass only scales the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        label_smoothing: float,
        embedding_gradient: "EmbeddingGradient | None",
        is_compiled: bool = False,
    ) -> Tensor:
        """Compute the sum of the loss, and the gradients of states, weight and bias.

        Args:
            ctx: Context, which stores the gradients.
            states: Decoder states, [tokens, d_model].
            weight: Weight of the output projection, [V, d_model].
            bias: Bias of the output projection, [V], or None.
            labels: Next tokens, [tokens].
            label_smoothing: epsilon_ls.
            embedding_gradient: Container that receives the gradient of a tied weight in the
                backward pass; None if the weight is not tied.
            is_compiled: Whether to use compiled kernels between the matrix products.

        Returns:
            Sum of the loss, a scalar in float32.
        """
        device, kind = states.device.type, states.dtype
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
        # disable autocast: `compute` itself casts the factors of the products with weights to half
        # precision, and does the rest in float32
        with torch.autocast(device, enabled=False):
            compute = _loss_and_gradients_compiled if is_compiled else _loss_and_gradients
            total, ctx.gradients = compute(states, weight, bias, labels, label_smoothing, kind)
        ctx.embedding_gradient = embedding_gradient
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that the forward pass computed.

        Args:
            ctx: Context, which contains the gradients.
            grad_output: Gradient of the sum of the loss, a scalar.

        Returns:
            Gradients of the arguments of `forward`.
        """
        if ctx.gradients is None:
            raise RuntimeError("the gradient of this loss can be taken only once.")
        states, weight, bias = (
            None if gradient is None else gradient.mul_(grad_output) for gradient in ctx.gradients
        )
        ctx.gradients = None
        if ctx.embedding_gradient is not None:
            ctx.embedding_gradient.value = weight
            weight = None
        return states, weight, bias, None, None, None, None, None


def _loss_and_gradients(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float,
    kind: torch.dtype,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None]]:
    device, size = states.device.type, weight.shape[0]
    spread = label_smoothing / size
    # the sum of a token's logits, without bias, is the product of its state with the sum of the
    # weight's rows
    summed = weight.sum(0, dtype=torch.float32)
    summed_bias = 0.0 if bias is None else bias.sum(dtype=torch.float32)
    total, grad_states, grad_weight, grad_bias = _new_sums(states, weight, bias)
    score_bytes = FLOAT32_BYTES * size * states.shape[0]
    blocks = _num_blocks(labels, size)
    tiles = max(1, -(-score_bytes // (blocks * CPU_TILE_BYTES))) if device == "cpu" else 1
    columns = -(-size // tiles)
    parts = weight.to(kind).split(columns)
    for number, (x, label, grad) in enumerate(
        zip(*(tensor.chunk(blocks) for tensor in (states, labels, grad_states)), strict=True)
    ):
        label, x = label[:, None], x.to(kind)
        scores = _logits(x, parts, bias)  # [block, columns] each
        # column of the true token in each tile, and whether the tile contains it
        true_columns = [
            _column_in_tile(label - index * columns, tile.shape[1])
            for index, tile in enumerate(scores)
        ]
        max_logit, true_logit, sums = _exponentiate(scores, true_columns)
        logit_sum = (x.float() @ summed + summed_bias)[:, None]
        loss = max_logit + sums.log() - (1 - label_smoothing) * true_logit - spread * logit_sum
        total += loss.sum()
        # the gradient of a logit is exponentials / sums - spread, minus 1 - smoothing at the true
        # token. the division by sums comes after the products, where it has fewer elements; only
        # float16 cannot represent the undivided exponentials, so they are divided before. spread is
        # subtracted before the products, because a difference of two similar products would be
        # mostly rounding error
        divisor = torch.ones_like(sums) if kind == torch.float16 else sums
        weighted = (x.float() / divisor).to(kind)
        grad_scaled = torch.zeros_like(x, dtype=torch.float32)
        for index, (part, (column, is_in_tile)) in enumerate(zip(parts, true_columns, strict=True)):
            exponentials = scores.pop(0)
            at_true = ((label_smoothing - 1) * sums).where(is_in_tile, 0.0)
            exponentials.sub_(spread * sums).scatter_add_(1, column, at_true)
            if kind == torch.float16:
                exponentials /= sums
            exponentials = exponentials.to(kind)
            grad_scaled += product(exponentials, part.T)
            columns_here = slice(index * columns, (index + 1) * columns)
            _put_product(grad_weight[columns_here], exponentials, weighted, is_first=number == 0)
            if grad_bias is not None:
                grad_bias[columns_here] += (1 / divisor).T[0] @ exponentials.float()
            # free the exponentials, which would otherwise stay in memory during the next block
            del exponentials
        grad.copy_(grad_scaled / divisor)
    return total, (grad_states, grad_weight, grad_bias)


def _new_sums(
    states: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return a loss of 0, and the gradients of states and weight (uninitialized) and bias (0)."""
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    return (
        torch.zeros((), device=states.device),
        torch.empty_like(states),
        torch.empty_like(weight, dtype=torch.float32),
        grad_bias,
    )


def _num_blocks(labels: Tensor, size: int) -> int:
    # the check runs on the device, so that the host does not wait for the device
    is_known = ((labels >= 0) & (labels < size)).all()
    torch._assert_async(is_known, f"labels must be from 0 to {size - 1}, got another.")
    # at least one block, because there may be no labels
    return max(1, -(-FLOAT32_BYTES * size * len(labels) // block_bytes(labels.device.type)))


def _loss_and_gradients_compiled(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float,
    kind: torch.dtype,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None]]:
    """Compute the same as `_loss_and_gradients` with compiled kernels.

    The kernels read the logits three times and write them once.
    """
    total, grad_states, grad_weight, grad_bias = _new_sums(states, weight, bias)
    weight = weight.to(kind)
    blocks = _num_blocks(labels, weight.shape[0])
    for number, (x, label, grad) in enumerate(
        zip(*(tensor.chunk(blocks) for tensor in (states, labels, grad_states)), strict=True)
    ):
        x = x.to(kind)
        loss, grad_logits = _compiled_block()(
            product(x, weight), bias, label[:, None], label_smoothing
        )
        total += loss
        grad.copy_(product(grad_logits, weight.T))
        _put_product(grad_weight, grad_logits, x, is_first=number == 0)
        if grad_bias is not None:
            grad_bias += grad_logits.sum(0, dtype=torch.float32)
    return total, (grad_states, grad_weight, grad_bias)


def _loss_of_block(
    logits: Tensor, bias: Tensor | None, label: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss, summed over tokens, and the gradient of the logits in the logits' dtype."""
    kind, size = logits.dtype, logits.shape[-1]
    logits = logits.float() if bias is None else logits.float() + bias
    max_logit = logits.amax(-1, keepdim=True)
    exponentials = (logits - max_logit).exp()
    sums = exponentials.sum(-1, keepdim=True)
    log_sums = max_logit + sums.log()
    true_logit, mean_logit = logits.gather(-1, label), logits.mean(-1, keepdim=True)
    loss = log_sums - (1 - label_smoothing) * true_logit - label_smoothing * mean_logit
    is_true = torch.arange(size, device=logits.device) == label
    gradient = exponentials / sums - label_smoothing / size - (1 - label_smoothing) * is_true
    return loss.sum(), gradient.to(kind)


@functools.cache
def _compiled_block() -> Callable[..., tuple[Tensor, Tensor]]:
    # with dynamic shapes, because blocks differ in their number of tokens
    return torch.compile(_loss_of_block, dynamic=True)


def _logits(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> list[Tensor]:
    logits = [product(x, part).float() for part in parts]
    if bias is not None:
        for tile, of_tile in zip(logits, bias.split(len(parts[0])), strict=True):
            tile += of_tile
    return logits


def _exponentiate(
    scores: list[Tensor], true_columns: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace logits by exp(logit - maximum); return maximum, true logit and new sum."""
    max_logit = functools.reduce(torch.maximum, (tile.amax(-1, keepdim=True) for tile in scores))
    true_logit, sums = torch.zeros_like(max_logit), torch.zeros_like(max_logit)
    for tile, (column, is_in_tile) in zip(scores, true_columns, strict=True):
        true_logit += tile.gather(1, column).where(is_in_tile, 0.0)
        sums += exp_(tile.sub_(max_logit)).sum(-1, keepdim=True)
    return max_logit, true_logit, sums


def _column_in_tile(column: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    return column.clamp(0, columns - 1), (column >= 0) & (column < columns)


def _put_product(out: Tensor, grad_logits: Tensor, states: Tensor, is_first: bool) -> None:
    if grad_logits.dtype == torch.float32 and not is_for_onednn(grad_logits, states):
        out.addmm_(grad_logits.T, states, beta=0 if is_first else 1)
    elif is_first:
        out.copy_(product(grad_logits.T, states.T))
    else:
        out += product(grad_logits.T, states.T)


class EmbeddingGradient:
    """Container that passes a gradient of the tied embedding between two functions. Section 3.4.

    Attributes:
        value: Gradient from the output projection. `LossOfStates` sets it in its backward pass,
            and `Lookup` adds its own gradient to it in the backward pass that follows.
    """

    def __init__(self):
        self.value: Tensor | None = None


class Lookup(torch.autograd.Function):
    """Embedding lookup whose backward pass adds its gradient to that of the output projection."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, embedding_gradient: EmbeddingGradient
    ) -> Tensor:
        """Look up the embeddings.

        Args:
            ctx: Context, which stores the ids.
            weight: Embedding matrix, [V, d_model].
            ids: Ids of source and target tokens, [tokens].
            embedding_gradient: Container of the gradient of the output projection, filled before
                the backward pass of this function.

        Returns:
            Embeddings, [tokens, d_model].
        """
        ctx.save_for_backward(ids)
        ctx.embedding_gradient = embedding_gradient
        return weight.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the sum of the gradients of the embedding lookup and the output projection.

        Args:
            ctx: Context, which contains the ids.
            grad_output: Gradient of the embeddings, [tokens, d_model].

        Returns:
            Gradients of the arguments of `forward`.
        """
        (ids,) = ctx.saved_tensors
        gradient, ctx.embedding_gradient.value = ctx.embedding_gradient.value, None
        return gradient.index_add_(0, ids, grad_output.to(gradient.dtype)), None, None


def fused_loss_sum(
    model: PreTrainedModel,
    input_ids: Tensor,
    decoder_input_ids: Tensor,
    labels: Tensor,
    label_indices: Tensor,
    label_smoothing: float,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return the smoothed loss of a batch, summed over its target tokens. Section 5.4.

    Args:
        model: Model.
        input_ids: Source token ids, [B, S].
        decoder_input_ids: Target token ids, shifted right, [B, T].
        labels: Next tokens, [B, T].
        label_indices: Indices in the flattened labels, [B * T], of the labels that are not padding.
        label_smoothing: epsilon_ls.
        attention_mask: Mask of the source, in a form that the model accepts, or None.

    Returns:
        Sum of the loss, a scalar in float32.
    """
    head, embedding_gradient = model.lm_head, None
    weight = head.weight
    if model.config.tie_word_embeddings:
        embedding_gradient = EmbeddingGradient()
        ids = torch.cat((input_ids.flatten(), decoder_input_ids.flatten()))
        embedded = Lookup.apply(weight, ids, embedding_gradient)
        source, target = embedded.split((input_ids.numel(), decoder_input_ids.numel()))
        tokens = {
            "inputs_embeds": source.view(*input_ids.shape, -1),
            "decoder_inputs_embeds": target.view(*decoder_input_ids.shape, -1),
        }
        weight = weight.detach()
    else:
        tokens = {"input_ids": input_ids, "decoder_input_ids": decoder_input_ids}
    outputs = model.model(**tokens, attention_mask=attention_mask, use_cache=False)
    states, labels = outputs.last_hidden_state.flatten(0, 1), labels.flatten()
    if len(label_indices) < len(labels):
        states = states.index_select(0, label_indices)
        labels = labels.index_select(0, label_indices)
    return LossOfStates.apply(
        states, weight, head.bias, labels, label_smoothing, embedding_gradient, _is_compiled(model)
    )


def _is_compiled(model: PreTrainedModel) -> bool:
    # a CPU does not use compiled kernels, because tiles already keep the logits in the cache
    is_cpu = model.device.type == "cpu"
    return not is_cpu and model.get_decoder().layers[0]._compiled_call_impl is not None
