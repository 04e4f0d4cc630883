"""What the plain model does in training, in fewer passes over memory; tests prove it equal.

Between the products with weights a step only moves numbers to and from memory. Here the scores of
all tokens of the vocabulary are never kept, the embedding has one gradient instead of three that
are added up, and dropout draws four decisions from one random number. The products themselves are
oneDNN's on a processor that has wide vectors and is not Intel's, for which MKL has narrow ones.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ... import VanillaTransformerForConditionalGeneration
from ...kernels_vanilla_transformer import exp_
from .cpu_kernels import is_for_onednn, product

# scores in memory at a time; each block but the first reads and writes the embedding's gradient
CPU_BLOCK_BYTES, BLOCK_BYTES = 2**27, 2**29
# of those of one part of the vocabulary, on a processor: they stay in its cache, and tensors as
# large as a whole block leave gaps in memory into which the others do not fit
CPU_TILE_BYTES = 2**22
FLOAT32_BYTES = 4


def block_bytes(device: str) -> int:
    """How much of the scores of the vocabulary is in memory at a time.

    Args:
        device: "cuda", "cpu" and so on.

    Returns:
        Bytes.
    """
    return CPU_BLOCK_BYTES if device == "cpu" else BLOCK_BYTES


class LossOfStates(torch.autograd.Function):
    """The smoothed loss of section 5.4, summed, from states and output embedding.

    Loss and gradients are computed together, some tokens at a time; backward only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        label_smoothing: float,
        table: "Table | None",
    ) -> Tensor:
        """Compute the sum.

        Args:
            ctx: Keeps the gradients.
            states: Of the decoder, [tokens, d_model].
            weight: Of the output projection, [V, d_model].
            bias: Of the output projection, [V], or None.
            labels: The next tokens, [tokens].
            label_smoothing: epsilon_ls.
            table: Where the weight's gradient goes, in place of the weight; None where it is tied
                to nothing.

        Returns:
            The sum, a scalar in float32.
        """
        device, kind = states.device.type, states.dtype
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
        # what is not a product with weights stays in float32
        with torch.autocast(device, enabled=False):
            total, ctx.gradients = _loss_and_gradients(
                states, weight, bias, labels, label_smoothing, kind
            )
        ctx.table = table
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what forward found.

        Args:
            ctx: Has the gradients.
            grad_output: Gradient of the sum.

        Returns:
            Gradients of the arguments of forward.
        """
        if ctx.gradients is None:
            raise RuntimeError("the gradient of this loss can be taken only once.")
        states, weight, bias = (
            None if gradient is None else gradient.mul_(grad_output) for gradient in ctx.gradients
        )
        ctx.gradients = None
        if ctx.table is not None:
            ctx.table.gradient = weight
            weight = None
        return states, weight, bias, None, None, None, None


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
    # the sum over the vocabulary of scores is the score of a sum
    summed = weight.sum(0, dtype=torch.float32)
    summed_bias = 0.0 if bias is None else bias.sum(dtype=torch.float32)
    total = torch.zeros((), device=states.device)
    grad_states = torch.empty_like(states)
    grad_weight = torch.empty_like(weight, dtype=torch.float32)
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    score_bytes = FLOAT32_BYTES * size * states.shape[0]
    is_known = ((labels >= 0) & (labels < size)).all()
    torch._assert_async(is_known, f"labels must be from 0 to {size - 1}, got another.")
    # none of the labels of a batch may count
    blocks = max(1, -(-score_bytes // block_bytes(device)))
    tiles = max(1, -(-score_bytes // (blocks * CPU_TILE_BYTES))) if device == "cpu" else 1
    columns = -(-size // tiles)
    parts = weight.to(kind).split(columns)
    for number, (x, label, grad) in enumerate(
        zip(*(tensor.chunk(blocks) for tensor in (states, labels, grad_states)), strict=True)
    ):
        label, x = label[:, None], x.to(kind)
        scores = [product(x, part).float() for part in parts]  # [block, columns] each
        if bias is not None:
            for tile, of_tile in zip(scores, bias.split(columns), strict=True):
                tile += of_tile
        places = [
            _place(label - index * columns, tile.shape[1]) for index, tile in enumerate(scores)
        ]
        most = functools.reduce(torch.maximum, (tile.amax(-1, keepdim=True) for tile in scores))
        true, sums = torch.zeros_like(most), torch.zeros_like(most)
        for tile, (place, is_here) in zip(scores, places, strict=True):
            true += tile.gather(1, place).where(is_here, 0.0)
            sums += exp_(tile.sub_(most)).sum(-1, keepdim=True)
        del tile
        mean = (x.float() @ summed + summed_bias)[:, None]
        loss = most + sums.log() - (1 - label_smoothing) * true - spread * mean
        total += loss.sum()
        # the gradient of a score is powers / sums - spread, less 1 - smoothing at the true one;
        # to divide the sum of a product is less than to divide all that goes into it. spread
        # goes off before it: what is left of like sums would be rounding
        # float16 has numbers neither as large as the sums nor as small as what they divide: there
        # it is what goes into the product
        divisor = torch.ones_like(sums) if kind == torch.float16 else sums
        weighted = (x.float() / divisor).to(kind)
        grad_scaled = torch.zeros_like(x, dtype=torch.float32)
        for index, (part, (place, is_here)) in enumerate(zip(parts, places, strict=True)):
            powers = scores.pop(0)
            of_true = ((label_smoothing - 1) * sums).where(is_here, 0.0)
            powers.sub_(spread * sums).scatter_add_(1, place, of_true)
            if kind == torch.float16:
                powers /= sums
            powers = powers.to(kind)
            grad_scaled += product(powers, part.T)
            columns_here = slice(index * columns, (index + 1) * columns)
            _put_product(grad_weight[columns_here], powers, weighted, is_first=number == 0)
            if bias is not None:
                grad_bias[columns_here] += (1 / divisor).T[0] @ powers.float()
            # or they would be in memory while the next block is made
            del powers
        grad.copy_(grad_scaled / divisor)
    return total, (grad_states, grad_weight, grad_bias)


def _place(column: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    return column.clamp(0, columns - 1), (column >= 0) & (column < columns)


def _put_product(out: Tensor, powers: Tensor, weighted: Tensor, is_first: bool) -> None:
    if powers.dtype == torch.float32 and not is_for_onednn(powers, weighted):
        out.addmm_(powers.T, weighted, beta=0 if is_first else 1)
    elif is_first:
        out.copy_(product(powers.T, weighted.T))
    else:
        out += product(powers.T, weighted.T)


class Table:
    """The one embedding matrix while a batch is trained on. Section 3.4.

    Attributes:
        gradient: Of the output projection, from when it is known until all of it is given away.
    """

    def __init__(self):
        self.gradient: Tensor | None = None


class Lookup(torch.autograd.Function):
    """Rows of the embedding; backward adds what they are due to what the projection is due."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, table: Table) -> Tensor:
        """Look up.

        Args:
            ctx: Keeps the ids.
            weight: The embedding, [V, d_model].
            ids: Of source and target, [tokens].
            table: Where the projection leaves its gradient.

        Returns:
            Embeddings, [tokens, d_model].
        """
        ctx.save_for_backward(ids)
        ctx.table = table
        return weight.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradient of embeddings and projection together.

        Args:
            ctx: Has the ids.
            grad_output: Gradient of the embeddings.

        Returns:
            Gradients of the arguments of forward.
        """
        (ids,) = ctx.saved_tensors
        gradient, ctx.table.gradient = ctx.table.gradient, None
        return gradient.index_add_(0, ids, grad_output.to(gradient.dtype)), None, None


def fused_loss_sum(
    model: VanillaTransformerForConditionalGeneration,
    input_ids: Tensor,
    decoder_input_ids: Tensor,
    labels: Tensor,
    places: Tensor,
    label_smoothing: float,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """The smoothed loss of a batch, summed over its target tokens. Section 5.4.

    Args:
        model: The model.
        input_ids: Source tokens, [B, S].
        decoder_input_ids: Target tokens, shifted right, [B, T].
        labels: The next tokens, [B, T].
        places: Where in [B * T] the labels that count are.
        label_smoothing: epsilon_ls.
        attention_mask: As the model takes it.

    Returns:
        The sum, a scalar in float32.
    """
    head, table = model.lm_head, None
    weight = head.weight
    if model.config.tie_word_embeddings:
        table = Table()
        ids = torch.cat((input_ids.flatten(), decoder_input_ids.flatten()))
        embedded = Lookup.apply(weight, ids, table)
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
    if len(places) < len(labels):
        states, labels = states.index_select(0, places), labels.index_select(0, places)
    return LossOfStates.apply(states, weight, head.bias, labels, label_smoothing, table)
