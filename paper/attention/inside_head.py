"""Each step of equation (1) in one head of a trained model.

Shapes as in the model: Q queries, K keys.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...attention_maps import AttentionWeights, attention_weights
from ...drawing import label_rows_and_columns, new_figure
from ...modeling_vanilla_transformer import MultiHeadAttention, scaled_dot_product_attention
from ..study import Section
from .head_tasks import head_statistics
from .kinds import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROJECTIONS = ("query", "key", "value")
LOWEST_FLOAT = torch.finfo(torch.float32).min


@dataclass(frozen=True, kw_only=True)
class HeadSteps:
    """Steps of equation (1) in one head for a sentence.

    Attributes:
        query_tokens: Tokens of the queries, [Q].
        key_tokens: Tokens of the keys and values, [K].
        query: Queries, [Q, d_k].
        key: Keys, [K, d_k].
        value: Values, [K, d_v].
        scores: Dot products of queries and keys, divided by sqrt(d_k); -inf where masked, [Q, K].
        weights: Softmax of the scores, [Q, K].
        context: Weighted sums of the values, [Q, d_v].
        difference: Largest difference between `weights` and the attention weights of the model.
    """

    query_tokens: list[str]
    key_tokens: list[str]
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    weights: Tensor
    context: Tensor
    difference: float


def inside_head(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    kind: str,
    layer: int,
    head: int,
    target: str | None = None,
) -> HeadSteps:
    """Compute each step of equation (1) in one head. Sections 3.2.1 and 3.2.2.

    Args:
        model: Trained model.
        tokenizer: Tokenizer of the model.
        source: Source sentence.
        kind: "encoder", "decoder" or "cross".
        layer: Layer number, counted from 0.
        head: Head number, counted from 0.
        target: Translation; by default the translation of the model.

    Returns:
        The steps, on the CPU.

    Raises:
        ValueError: If a text has no word, or is too long for the model.
    """
    stack = model.model.encoder if kind == "encoder" else model.model.decoder
    stack_layer = stack.layers[layer]
    attention = stack_layer.cross_attention if kind == "cross" else stack_layer.self_attention
    with _record_projections(attention) as projections:
        sentence_weights = attention_weights(model, tokenizer, source, target)
    query_tokens = getattr(sentence_weights, KINDS[kind].queries)
    key_tokens = getattr(sentence_weights, KINDS[kind].keys)
    head_widths = (attention.d_k, attention.d_k, attention.d_v)
    query, key, value = (
        projections[name][0].view(-1, projections[name].shape[-1] // width, width)[:, head]
        for name, width in zip(PROJECTIONS, head_widths, strict=True)
    )
    is_hidden = torch.zeros(len(query_tokens), len(key_tokens), dtype=torch.bool)
    if kind == "decoder":
        is_hidden = sentence_weights.hidden()
    mask = torch.zeros(is_hidden.shape).masked_fill(is_hidden, LOWEST_FLOAT)
    context, weights = scaled_dot_product_attention(query, key, value, mask)
    return HeadSteps(
        query_tokens=query_tokens,
        key_tokens=key_tokens,
        query=query,
        key=key,
        value=value,
        scores=(query @ key.T / attention.d_k**0.5).masked_fill(is_hidden, -torch.inf),
        weights=weights,
        context=context,
        difference=(weights - getattr(sentence_weights, kind)[layer, head]).abs().max().item(),
    )


@contextmanager
def _record_projections(attention: MultiHeadAttention) -> Iterator[dict[str, Tensor]]:
    """Record Q, K and V of all heads in the last forward pass, [1, Q or K, h * width] each."""
    projections: dict[str, Tensor] = {}
    projection_layers = (attention.q_proj, attention.k_proj, attention.v_proj)

    def record(name: str):
        def hook(module, inputs, output: Tensor):
            projections[name] = output.detach().float().cpu()

        return hook

    handles = [
        layer.register_forward_hook(record(name))
        for name, layer in zip(PROJECTIONS, projection_layers, strict=True)
    ]
    try:
        yield projections
    finally:
        for handle in handles:
            handle.remove()


def draw_head_steps(steps: HeadSteps) -> "Figure":
    """Draw equation (1) step by step: Q, K, V, scores, weights and context.

    Args:
        steps: Steps in one head.

    Returns:
        The picture.
    """
    queries, keys = steps.query_tokens, steps.key_tokens
    figure, all_axes = new_figure(12.0, 1.6 + 0.42 * max(len(queries), len(keys)), 2, 3)
    panels = [
        ("Q", steps.query, queries, None),
        ("K", steps.key, keys, None),
        ("V", steps.value, keys, None),
        ("Q K^T / sqrt(d_k)", steps.scores, queries, keys),
        ("softmax(Q K^T / sqrt(d_k))", steps.weights, queries, keys),
        ("result: softmax(...) V", steps.context, queries, None),
    ]
    for axes, (title, values, row_tokens, column_tokens) in zip(all_axes.flat, panels, strict=True):
        is_weights = values is steps.weights
        largest_value = values[values.isfinite()].abs().max().item()
        image = axes.imshow(
            values.masked_fill(~values.isfinite(), torch.nan).numpy(),
            cmap="viridis" if is_weights else "RdBu_r",
            vmin=0 if is_weights else -largest_value,
            vmax=1 if is_weights else largest_value,
            aspect="auto",
        )
        axes.patch.set(facecolor="0.92", hatch="/////", edgecolor="0.75")
        axes.set_title(title)
        if column_tokens is None:
            label_rows_and_columns(axes, row_tokens, [])
            axes.set_xlabel("feature")
        else:
            label_rows_and_columns(axes, row_tokens, column_tokens)
        axes.tick_params(labelsize=8, length=2)
        figure.colorbar(image, ax=axes)
    return figure


def steps_section(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    flags: argparse.Namespace,
    weights: AttentionWeights,
) -> Section:
    """Show the steps of one head of encoder-decoder attention.

    Args:
        model: Trained model.
        tokenizer: Tokenizer of the model.
        flags: Flags of the study.
        weights: Attention weights of the sentence.

    Returns:
        The section.
    """
    layer = (flags.layer or len(weights.cross)) - 1
    statistics = head_statistics([weights], "cross")[layer]
    lowest_entropy_head = min(range(len(statistics)), key=lambda index: statistics[index].entropy)
    head = lowest_entropy_head if flags.head is None else flags.head - 1
    steps = inside_head(model, tokenizer, flags.sentence, "cross", layer, head, flags.translation)
    query_index = int(steps.weights.max(dim=-1).values.argmax())
    key_index = int(steps.weights[query_index].argmax())
    return Section(
        name="equation-1",
        title="Equation (1) in one head",
        finding=f"Head {head + 1} of encoder-decoder attention in layer {layer + 1} has a query of "
        f"{steps.query.shape[1]} features for each token to be predicted, and a key and a value "
        "for each source token. The score is high if query and key have similar directions: it is "
        f"{steps.scores[query_index, key_index]:.2f} for {steps.query_tokens[query_index]} and "
        f"{steps.key_tokens[key_index]}, and the mean of this row is "
        f"{steps.scores[query_index].mean():.2f}. The softmax turns this score into a weight of "
        f"{steps.weights[query_index, key_index]:.2f}, the share of this value in the row of the "
        "result. The weights computed here from Q and K differ from those of the model by at most "
        f"{steps.difference:.1g}.",
        figure=draw_head_steps(steps),
        message=f"Equation (1) in head {head + 1} of encoder-decoder attention in layer "
        f"{layer + 1}: rows of Q are words to be written, rows of K and V source words",
        numbers={"layer": layer + 1, "head": head + 1, "difference": steps.difference},
    )
