"""Equation (1) inside one head of a trained model: its queries, keys and values, and the rest.

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
from ...drawing import label_places, new_figure
from ...modeling_vanilla_transformer import MultiHeadAttention, scaled_dot_product_attention
from ..study import Section
from .head_tasks import head_statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROJECTIONS = ("query", "key", "value")
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, kw_only=True)
class HeadSteps:
    """The steps of one head for a sentence, in the order of equation (1).

    Attributes:
        asking: The tokens that the queries are of, [Q].
        asked: The tokens that the keys and values are of, [K].
        query: [Q, d_k].
        key: [K, d_k].
        value: [K, d_v].
        scores: Products of queries and keys, divided by sqrt(d_k); -inf where masked, [Q, K].
        weights: Softmax of the scores, [Q, K].
        context: The values, weighted, [Q, d_v].
        difference: Largest between these weights and those that the model itself used.
    """

    asking: list[str]
    asked: list[str]
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
    """Follow equation (1) through one head. Sections 3.2.1 and 3.2.2.

    Args:
        model: A trained model.
        tokenizer: Its tokenizer.
        source: A sentence.
        kind: "encoder", "decoder" or "cross".
        layer: Layer number, counted from 0.
        head: Head number, counted from 0.
        target: Its translation; the one that the model finds if not given.

    Returns:
        Every step, on the CPU.

    Raises:
        ValueError: If a text has no word, or is too long for the model.
    """
    stack = model.model.encoder if kind == "encoder" else model.model.decoder
    block = stack.layers[layer]
    attention = block.cross_attention if kind == "cross" else block.self_attention
    with _watched(attention) as projected:
        found = attention_weights(model, tokenizer, source, target)
    asking, asked = _tokens(found, kind)
    widths = (attention.d_k, attention.d_k, attention.d_v)
    query, key, value = (
        projected[name][0].view(-1, projected[name].shape[-1] // width, width)[:, head]
        for name, width in zip(PROJECTIONS, widths, strict=True)
    )
    hidden = found.hidden() if kind == "decoder" else torch.zeros(len(asking), len(asked)).bool()
    mask = torch.zeros(hidden.shape).masked_fill(hidden, LOWEST)
    context, weights = scaled_dot_product_attention(query, key, value, mask)
    return HeadSteps(
        asking=asking,
        asked=asked,
        query=query,
        key=key,
        value=value,
        scores=(query @ key.T / attention.d_k**0.5).masked_fill(hidden, -torch.inf),
        weights=weights,
        context=context,
        difference=(weights - getattr(found, kind)[layer, head]).abs().max().item(),
    )


@contextmanager
def _watched(attention: MultiHeadAttention) -> Iterator[dict[str, Tensor]]:
    """Keep what the last forward pass projects, [1, T, h * width] each."""
    projected: dict[str, Tensor] = {}
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)

    def keep(name: str):
        def hook(module, inputs, output: Tensor):
            projected[name] = output.detach().float().cpu()

        return hook

    handles = [
        layer.register_forward_hook(keep(name))
        for name, layer in zip(PROJECTIONS, layers, strict=True)
    ]
    try:
        yield projected
    finally:
        for handle in handles:
            handle.remove()


def _tokens(found: AttentionWeights, kind: str) -> tuple[list[str], list[str]]:
    if kind == "encoder":
        return found.source, found.source
    return (found.target, found.source) if kind == "cross" else (found.inputs, found.inputs)


def draw_head_steps(steps: HeadSteps) -> "Figure":
    """Draw equation (1) step by step: Q, K, V, scores, weights and context.

    Args:
        steps: Steps of the computation of a head.

    Returns:
        The picture.
    """
    height = 1.6 + 0.42 * max(len(steps.asking), len(steps.asked))
    figure, all_axes = new_figure(12.0, height, 2, 3)
    asking, asked = steps.asking, steps.asked
    panels = [
        ("Q", steps.query, asking, None),
        ("K", steps.key, asked, None),
        ("V", steps.value, asked, None),
        ("Q K^T / sqrt(d_k)", steps.scores, asking, asked),
        ("softmax(Q K^T / sqrt(d_k))", steps.weights, asking, asked),
        ("softmax(...) V", steps.context, asking, None),
    ]
    for axes, (title, values, rows, columns) in zip(all_axes.flat, panels, strict=True):
        is_weights = values is steps.weights
        most = values[values.isfinite()].abs().max().item()
        image = axes.imshow(
            values.masked_fill(~values.isfinite(), torch.nan).numpy(),
            cmap="viridis" if is_weights else "RdBu_r",
            vmin=0 if is_weights else -most,
            vmax=1 if is_weights else most,
            aspect="auto",
        )
        axes.patch.set(facecolor="0.92", hatch="/////", edgecolor="0.75")
        axes.set_title(title)
        if columns is None:
            label_places(axes, rows, [])
            axes.set_xlabel("feature")
        else:
            label_places(axes, rows, columns)
        axes.tick_params(labelsize=8, length=2)
        figure.colorbar(image, ax=axes)
    return figure


def steps_section(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    flags: argparse.Namespace,
    weights: AttentionWeights,
) -> Section:
    layer = (flags.layer or len(weights.cross)) - 1
    statistics = head_statistics([weights], "cross")[layer]
    focused = min(range(len(statistics)), key=lambda index: statistics[index].entropy)
    head = focused if flags.head is None else flags.head - 1
    steps = inside_head(model, tokenizer, flags.sentence, "cross", layer, head, flags.translation)
    row = int(steps.weights.max(dim=-1).values.argmax())
    column = int(steps.weights[row].argmax())
    return Section(
        name="equation-1",
        title="Equation (1), inside one head",
        says=f"Head {head + 1} of encoder-decoder attention in layer {layer + 1}: a query of "
        f"{steps.query.shape[1]} features for each token that is about to be written, a key and a "
        f"value for each of the source. Where query and key point the same way the score is high: "
        f"{steps.scores[row, column]:.2f} for {steps.asking[row]} and {steps.asked[column]}, where "
        f"the mean of that row is {steps.scores[row].mean():.2f}. The softmax makes it a weight of "
        f"{steps.weights[row, column]:.2f}, the share that this value has in the row of the "
        "result. Computed here from Q and K, the weights differ from the model's own by "
        f"{steps.difference:.1g} at most.",
        figure=draw_head_steps(steps),
        numbers={"layer": layer + 1, "head": head + 1, "difference": steps.difference},
    )
