"""Attention in one sentence: all heads, one head, and one word."""

import math
from typing import Any, NamedTuple

import torch

from ...attention_maps import AttentionWeights
from ...drawing import new_figure
from ..study import Section
from .head_tasks import head_statistics
from .kinds import KINDS
from .pictures import draw_grid, draw_lines, head_colors


class Line(NamedTuple):
    """A line between a word that attends and the word that it attends to, and the weight."""

    query: str
    key: str
    weight: float


def grid_section(weights: AttentionWeights, kind: str) -> Section:
    """Show all heads of one kind of attention.

    Args:
        weights: Attention weights of the sentence.
        kind: "encoder", "decoder" or "cross".

    Returns:
        The section.
    """
    head_weights = getattr(weights, kind)
    num_layers, num_heads, num_queries, num_keys = head_weights.shape
    row_sums = head_weights.sum(dim=-1)
    row_sum_clause = f"each row sums to 1 (to {float((row_sums - 1).abs().max()):.0e})"
    findings = {
        "encoder": f"Every source token attends to all source tokens: {num_queries} by {num_keys} "
        f"weights in each of {num_layers} x {num_heads} heads; {row_sum_clause}. Queries, keys and "
        "values are computed from the same tokens.",
        "decoder": "A target token attends to itself and to earlier tokens. The mask hides the "
        "hatched positions: it sets their scores to the lowest number before the softmax, so the "
        f"largest weight there is {_largest_masked_weight(weights):g}, and {row_sum_clause} over "
        "the other positions. The first token can only attend to itself.",
        "cross": "The queries come from the target, keys and values from the encoder's output. "
        f"{num_queries} target tokens, each labelled with the token that it predicts, attend to "
        f"{num_keys} source tokens. No position is masked: the whole source is known before the "
        f"first target token is predicted. The translation is: {weights.translation}",
    }
    messages = {
        "encoder": "Each panel is a head: the word of a row attends to the words of the columns",
        "decoder": "A word attends to itself and the words before it; hatched positions are masked",
        "cross": "A row is a word to be predicted, a column a source word that it attends to",
    }
    kind_title = KINDS[kind].title
    return Section(
        name=kind,
        title=f"{kind_title[0].upper()}{kind_title[1:]}: all heads",
        finding=findings[kind],
        figure=draw_grid(weights, kind),
        message=messages[kind],
        numbers={
            "queries": getattr(weights, KINDS[kind].queries),
            "keys": getattr(weights, KINDS[kind].keys),
            "weights": head_weights.tolist(),
        },
    )


def _largest_masked_weight(weights: AttentionWeights) -> float:
    return float(weights.decoder[..., weights.hidden()].max()) if len(weights.inputs) > 1 else 0.0


def head_section(weights: AttentionWeights, layer: int | None, head: int | None) -> Section:
    """Show one head of each kind of attention as lines between words.

    Args:
        weights: Attention weights of the sentence.
        layer: Layer number, counted from 1; by default the last layer.
        head: Head number, counted from 1; by default the head with the lowest entropy.

    Returns:
        The section.
    """
    words = weights.by_word()
    figure, all_axes = new_figure(10.5, 1.2 + 0.27 * _longer_side(words), 1, len(KINDS))
    rows: list[list[Any]] = []
    strongest_lines: dict[str, Line] = {}
    for axes, kind in zip(all_axes[0], KINDS, strict=True):
        kind_title = KINDS[kind].title
        layer_index = (layer or len(getattr(words, kind))) - 1
        statistics = head_statistics([weights], kind)[layer_index]
        lowest_entropy_head = min(range(len(statistics)), key=lambda i: statistics[i].entropy)
        head_index = lowest_entropy_head if head is None else head - 1
        draw_lines(axes, words, kind, layer_index, [head_index])
        axes.set_title(f"{kind_title}\nlayer {layer_index + 1}, head {head_index + 1}", fontsize=10)
        line = _strongest_line(words, kind, layer_index, head_index)
        strongest_lines[kind_title] = line
        rows.append([kind_title, layer_index + 1, head_index + 1, *line])
    strongest_kind = max(strongest_lines, key=lambda title: strongest_lines[title].weight)
    strongest_line = strongest_lines[strongest_kind]
    return Section(
        name="head",
        title="One head of each kind, as in figures 4 and 5",
        finding="Lines connect each word on the left with the words that it attends to. The "
        "opacity of a line is the weight. The tokens of a word are merged. The strongest line, "
        "except for lines from a word to itself in self-attention, is in "
        f"{strongest_kind}: {strongest_line.query} attends to {strongest_line.key} with a weight "
        f"of {strongest_line.weight:.2f}.",
        columns=("attention", "layer", "head", "strongest line from", "to", "weight"),
        rows=rows,
        figure=figure,
        message="The stronger a line, the more the left word attends to the right word",
    )


def _longer_side(words: AttentionWeights) -> int:
    return max(len(words.source), len(words.target))


def _strongest_line(words: AttentionWeights, kind: str, layer: int, head: int) -> Line:
    queries, keys = getattr(words, KINDS[kind].queries), getattr(words, KINDS[kind].keys)
    head_weights = getattr(words, kind)[layer, head].clone()  # [Q, K]
    if kind != "cross":
        head_weights.fill_diagonal_(0.0)
    query, key = divmod(int(head_weights.argmax()), len(keys))
    return Line(queries[query], keys[key], float(head_weights[query, key]))


def word_section(weights: AttentionWeights, layer: int | None) -> Section:
    """Show all heads of an encoder layer for the word on which they differ most.

    Args:
        weights: Attention weights of the sentence.
        layer: Layer number, counted from 1; by default the last layer.

    Returns:
        The section.
    """
    words = weights.by_word()
    layer_index = (layer or len(words.encoder)) - 1
    head_weights = words.encoder[layer_index]  # [h, S, S]
    # mean KL divergence of the heads from their average, in nats (Jensen-Shannon divergence)
    mean_weights = head_weights.mean(dim=0)
    divergences = (torch.special.xlogy(head_weights, head_weights).sum(-1)).mean(dim=0)
    divergences = divergences - torch.special.xlogy(mean_weights, mean_weights).sum(-1)  # [S]
    query = int(divergences.argmax())
    figure, axes = new_figure(5.6, 1.0 + 0.3 * len(words.source))
    draw_lines(axes, words, "encoder", layer_index, range(len(head_weights)), query)
    colors = head_colors(len(head_weights))
    drawn_word = words.source[query]
    title = f"“{drawn_word}”, layer {layer_index + 1}: one color per head"
    # a dollar sign in the word must not start a formula
    axes.set_title(title, fontsize=10, parse_math=False)
    # the drawn lines are transparent, so the legend gets its opaque colours from empty lines
    for head in range(len(head_weights)):
        axes.plot([], [], color=colors[head], label=f"head {head + 1}")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    key_weights, key_indices = head_weights[:, query].max(dim=-1)  # [h]
    key_words = [words.source[key] for key in key_indices.tolist()]
    rows = [
        [head, key_word, weight]
        for head, (key_word, weight) in enumerate(
            zip(key_words, key_weights.tolist(), strict=True), 1
        )
    ]
    num_distinct_words = len(set(key_words))
    return Section(
        name="word",
        title="All heads for one word, as in figure 3",
        finding=f"The {len(rows)} heads of encoder layer {layer_index + 1} differ most for "
        f"“{drawn_word}”: their mean divergence from their average is "
        f"{float(divergences[query]):.2f} nats, where {math.log(len(rows)):.2f} is the maximum. "
        + (
            f"The highest weights of the heads are on {num_distinct_words} different words. "
            if num_distinct_words > 1
            else "The highest weights of all heads are on the same word. "
        )
        + "A single head of the same width would have to average these weights.",
        columns=("head", "attends most to", "weight"),
        rows=rows,
        figure=figure,
        message=f"{len(rows)} heads attend most to {num_distinct_words} different words (stronger "
        "line: larger weight)",
    )
