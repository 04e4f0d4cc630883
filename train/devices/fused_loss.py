"""Training loss of the model in fewer passes over memory; tests prove that it is the same loss.

Between its matrix products, a training step is limited by memory bandwidth. To save passes over
memory, the logits of only some tokens are in memory at a time, and the gradients of the tied
embedding, one from each of its three uses, are summed in a single tensor.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from ...kernels_vanilla_transformer import exp_
from ...sizes import FLOAT32_BYTES
from .cpu_kernels import is_for_onednn, product

# size of a block, the logits that are in memory at a time, on a CPU and on other devices. Smaller
# blocks would be slower: each block after the first reads and writes the embedding's whole gradient
CPU_BLOCK_BYTES, BLOCK_BYTES = 2**27, 2**29
# size of a tile, the logits of a block for one part of the vocabulary. A CPU computes a block tile
# by tile: a tile stays in the cache, and tensors as large as a block would fragment the memory
CPU_TILE_BYTES = 2**22
# sums of a token's exponentials between which exp(logit) needs no offset: no exponential overflows,
# and those that underflow are below the rounding error of the sum
SAFE_SUMS = (1e-20, 1e30)


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
        device, dtype = states.device.type, states.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        # disable autocast: `compute` itself casts the factors of the products with weights to half
        # precision, and does the rest in float32
        with torch.autocast(device, enabled=False):
            compute = _loss_and_gradients_compiled if is_compiled else _loss_and_gradients
            loss_sum, ctx.gradients = compute(states, weight, bias, labels, label_smoothing, dtype)
        ctx.embedding_gradient = embedding_gradient
        return loss_sum

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
    dtype: torch.dtype,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None]]:
    device, vocab_size = states.device.type, weight.shape[0]
    smoothing_per_token = label_smoothing / vocab_size
    # the sum of a token's logits, without bias, is the product of its state with the sum of the
    # weight's rows
    weight_row_sum = weight.sum(0, dtype=torch.float32)
    bias_sum = 0.0 if bias is None else bias.sum(dtype=torch.float32)
    loss_sum, grad_states, grad_weight, grad_bias = _new_accumulators(states, weight, bias)
    # on a CPU, logits in half precision stay in memory, and each pass over a tile converts them in
    # a buffer that stays in the cache; elsewhere the exponentials replace the logits
    keeps_logits = device == "cpu" and dtype != torch.float32
    logit_bytes = dtype.itemsize if keeps_logits else FLOAT32_BYTES
    num_blocks = _check_labels_and_count_blocks(labels, vocab_size, logit_bytes)
    num_logits = vocab_size * -(-len(labels) // num_blocks)
    num_tiles = max(1, -(-FLOAT32_BYTES * num_logits // CPU_TILE_BYTES)) if device == "cpu" else 1
    tile_columns = -(-vocab_size // num_tiles)
    weight_tiles = weight.to(dtype).split(tile_columns)
    bias_tiles = [None] * len(weight_tiles) if bias is None else bias.split(tile_columns)
    for block_index, (x, block_labels, grad_block) in enumerate(
        zip(*(tensor.chunk(num_blocks) for tensor in (states, labels, grad_states)), strict=True)
    ):
        block_labels, x = block_labels[:, None], x.to(dtype)
        # column of the true token in each tile, and whether the tile contains it
        true_columns = [
            _locate_in_tile(block_labels - index * tile_columns, len(weight_tile))
            for index, weight_tile in enumerate(weight_tiles)
        ]
        buffer = x.new_empty(len(x) * tile_columns, dtype=torch.float32) if keeps_logits else None
        tiles, offset, true_logit, exponential_sums = _exponentiate(
            x, weight_tiles, bias_tiles, true_columns, buffer
        )
        logit_sum = (x.float() @ weight_row_sum + bias_sum)[:, None]
        loss = (
            offset
            + exponential_sums.log()
            - (1 - label_smoothing) * true_logit
            - smoothing_per_token * logit_sum
        )
        loss_sum += loss.sum()
        # the gradient of a logit is exponentials / exponential_sums - smoothing_per_token, minus
        # 1 - label_smoothing at the true token. The division comes after the products, where it has
        # fewer elements; only float16 cannot represent the undivided exponentials, so they are
        # divided before. smoothing_per_token is subtracted before the products, because a
        # difference of two similar products would be mostly rounding error
        divisor = torch.ones_like(exponential_sums) if dtype == torch.float16 else exponential_sums
        scaled_states = (x.float() / divisor).to(dtype)
        grad_scaled = torch.zeros_like(x, dtype=torch.float32)
        for index, (weight_tile, bias_tile, (column, is_in_tile)) in enumerate(
            zip(weight_tiles, bias_tiles, true_columns, strict=True)
        ):
            exponentials = tile = tiles.pop(0)
            if buffer is not None:
                exponentials = _exponentials(_in_float32(tile, bias_tile, buffer), offset)
            true_corrections = ((label_smoothing - 1) * exponential_sums).where(is_in_tile, 0.0)
            exponentials.sub_(smoothing_per_token * exponential_sums).scatter_add_(
                1, column, true_corrections
            )
            if dtype == torch.float16:
                exponentials /= exponential_sums
            grad_logits = exponentials.to(dtype)
            grad_scaled += product(grad_logits, weight_tile.T)
            tile_slice = slice(index * tile_columns, (index + 1) * tile_columns)
            _accumulate_product(
                grad_weight[tile_slice], grad_logits, scaled_states, is_first=block_index == 0
            )
            if grad_bias is not None:
                grad_bias[tile_slice] += (1 / divisor).T[0] @ grad_logits.float()
            # free the tile, which would otherwise stay in memory during the next block
            del tile, exponentials, grad_logits
        grad_block.copy_(grad_scaled / divisor)
    return loss_sum, (grad_states, grad_weight, grad_bias)


def _new_accumulators(
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


def _check_labels_and_count_blocks(
    labels: Tensor, vocab_size: int, logit_bytes: int = FLOAT32_BYTES
) -> int:
    # the check runs on the device, so that the host does not wait for the device
    is_in_vocabulary = ((labels >= 0) & (labels < vocab_size)).all()
    torch._assert_async(
        is_in_vocabulary, f"labels must be from 0 to {vocab_size - 1}, got another."
    )
    # at least one block, because there may be no labels
    return max(1, -(-logit_bytes * vocab_size * len(labels) // block_bytes(labels.device.type)))


def _loss_and_gradients_compiled(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float,
    dtype: torch.dtype,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None]]:
    """Compute the same as `_loss_and_gradients` with compiled kernels.

    The kernels read the logits three times and write them once.
    """
    loss_sum, grad_states, grad_weight, grad_bias = _new_accumulators(states, weight, bias)
    weight = weight.to(dtype)
    num_blocks = _check_labels_and_count_blocks(labels, weight.shape[0])
    for block_index, (x, block_labels, grad_block) in enumerate(
        zip(*(tensor.chunk(num_blocks) for tensor in (states, labels, grad_states)), strict=True)
    ):
        x = x.to(dtype)
        loss, grad_logits = _compiled_block()(
            product(x, weight), bias, block_labels[:, None], label_smoothing
        )
        loss_sum += loss
        grad_block.copy_(product(grad_logits, weight.T))
        _accumulate_product(grad_weight, grad_logits, x, is_first=block_index == 0)
        if grad_bias is not None:
            grad_bias += grad_logits.sum(0, dtype=torch.float32)
    return loss_sum, (grad_states, grad_weight, grad_bias)


def _loss_of_block(
    logits: Tensor, bias: Tensor | None, label: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss, summed over tokens, and the gradient of the logits in the logits' dtype."""
    dtype, vocab_size = logits.dtype, logits.shape[-1]
    logits = logits.float() if bias is None else logits.float() + bias
    max_logit = logits.amax(-1, keepdim=True)
    exponentials = (logits - max_logit).exp()
    exponential_sums = exponentials.sum(-1, keepdim=True)
    log_sums = max_logit + exponential_sums.log()
    true_logit, mean_logit = logits.gather(-1, label), logits.mean(-1, keepdim=True)
    loss = log_sums - (1 - label_smoothing) * true_logit - label_smoothing * mean_logit
    is_true = torch.arange(vocab_size, device=logits.device) == label
    gradient = (
        exponentials / exponential_sums
        - label_smoothing / vocab_size
        - (1 - label_smoothing) * is_true
    )
    return loss.sum(), gradient.to(dtype)


@functools.cache
def _compiled_block() -> Callable[..., tuple[Tensor, Tensor]]:
    # with dynamic shapes, because blocks differ in their number of tokens
    return torch.compile(_loss_of_block, dynamic=True)


class _Exponentials(NamedTuple):
    """Exponentials exp(logit - offset) of a block of tokens.

    Attributes:
        tiles: Logits if there is a buffer for the exponentials, else the exponentials,
            [block, columns] each.
        offset: Largest logit of each token, [block, 1], or 0.
        true_logit: Logit of the true token, [block, 1].
        sums: Sum of the exponentials of each token, [block, 1].
    """

    tiles: list[Tensor]
    offset: Tensor | float
    true_logit: Tensor
    sums: Tensor


def _exponentiate(
    x: Tensor,
    weight_tiles: Sequence[Tensor],
    bias_tiles: Sequence[Tensor | None],
    true_columns: Sequence[tuple[Tensor, Tensor]],
    buffer: Tensor | None,
) -> _Exponentials:
    def logit_tiles() -> Iterator[Tensor]:
        for weight_tile, bias_tile in zip(weight_tiles, bias_tiles, strict=True):
            logits = product(x, weight_tile)
            yield logits if buffer is not None else _add_bias(logits.float(), bias_tile)

    # without an offset, a tile is still in the cache when its exponentials are computed. On a GPU,
    # checking the sums would make the host wait
    if x.device.type == "cpu":
        exponentials = _exponentiate_tiles(logit_tiles(), bias_tiles, 0.0, true_columns, buffer)
        sums = exponentials.sums.numpy()
        if ((sums > SAFE_SUMS[0]) & (sums < SAFE_SUMS[1])).all():
            return exponentials
        # free the tiles before new ones are computed
        del exponentials
    tiles = list(logit_tiles())
    max_logit = functools.reduce(
        torch.maximum,
        (
            _in_float32(tile, bias_tile, buffer).amax(-1, keepdim=True)
            for tile, bias_tile in zip(tiles, bias_tiles, strict=True)
        ),
    )
    return _exponentiate_tiles(tiles, bias_tiles, max_logit, true_columns, buffer)


def _exponentiate_tiles(
    logit_tiles: Iterable[Tensor],
    bias_tiles: Sequence[Tensor | None],
    offset: Tensor | float,
    true_columns: Sequence[tuple[Tensor, Tensor]],
    buffer: Tensor | None,
) -> _Exponentials:
    tiles, true_logits, sums = [], [], []
    for tile, bias_tile, (column, is_in_tile) in zip(
        logit_tiles, bias_tiles, true_columns, strict=True
    ):
        logits = _in_float32(tile, bias_tile, buffer)
        true_logits.append(logits.gather(1, column).where(is_in_tile, 0.0))
        sums.append(_exponentials(logits, offset).sum(-1, keepdim=True))
        tiles.append(tile)
    true_logit, total = torch.stack(true_logits).sum(0), torch.stack(sums).sum(0)
    return _Exponentials(tiles, offset, true_logit, total)


def _in_float32(tile: Tensor, bias_tile: Tensor | None, buffer: Tensor | None) -> Tensor:
    """Return logits in float32 with bias: the tile, or if there is a buffer, a copy in it."""
    if buffer is None:
        return tile
    return _add_bias(buffer[: tile.numel()].view(tile.shape).copy_(tile), bias_tile)


def _add_bias(logits: Tensor, bias_tile: Tensor | None) -> Tensor:
    return logits if bias_tile is None else logits.add_(bias_tile)


def _exponentials(logits: Tensor, offset: Tensor | float) -> Tensor:
    """Replace logits by exp(logit - offset)."""
    return exp_(logits.sub_(offset) if isinstance(offset, Tensor) else logits)


def _locate_in_tile(column: Tensor, tile_columns: int) -> tuple[Tensor, Tensor]:
    return column.clamp(0, tile_columns - 1), (column >= 0) & (column < tile_columns)


def _accumulate_product(out: Tensor, grad_logits: Tensor, states: Tensor, is_first: bool) -> None:
    if grad_logits.dtype == torch.float32 and not is_for_onednn(grad_logits, states):
        out.addmm_(grad_logits.T, states, beta=0 if is_first else 1)
        return
    if grad_logits.device.type == "cpu" and grad_logits.dtype != torch.float32:
        # oneDNN would transpose the left factor, and the states are the smaller one
        gradient = product(states.T.contiguous(), grad_logits.T).T
    else:
        gradient = product(grad_logits.T, states.T)
    if is_first:
        out.copy_(gradient)
    else:
        out += gradient


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
        embeddings = Lookup.apply(weight, ids, embedding_gradient)
        source_embeddings, target_embeddings = embeddings.split(
            (input_ids.numel(), decoder_input_ids.numel())
        )
        model_inputs = {
            "inputs_embeds": source_embeddings.view(*input_ids.shape, -1),
            "decoder_inputs_embeds": target_embeddings.view(*decoder_input_ids.shape, -1),
        }
        weight = weight.detach()
    else:
        model_inputs = {"input_ids": input_ids, "decoder_input_ids": decoder_input_ids}
    outputs = model.model(**model_inputs, attention_mask=attention_mask, use_cache=False)
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
