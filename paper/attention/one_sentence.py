"""Attention in one sentence: all heads, one head, and one word."""

import math
from typing import Any

import torch

from ...attention_maps import AttentionWeights
from ...drawing import new_figure
from ..study import Section
from .head_tasks import head_statistics
from .kinds import KINDS
from .pictures import draw_grid, draw_lines, head_colors


def grid_section(weights: AttentionWeights, kind: str) -> Section:
    """Show all heads of one kind of attention.

    Args:
        weights: Attention weights of the sentence.
        kind: "encoder", "decoder" or "cross".

    Returns:
        The section.
    """
    values = getattr(weights, kind)
    num_layers, num_heads, num_queries, num_keys = values.shape
    sums = values.sum(dim=-1)
    rows_sum = f"each row sums to 1 (to {float((sums - 1).abs().max()):.0e})"
    findings = {
        "encoder": f"Every source token attends to all source tokens: {num_queries} by {num_keys} "
        f"weights in each of {num_layers} x {num_heads} heads; {rows_sum}. Queries, keys and "
        "values are computed from the same tokens.",
        "decoder": "A target token attends to itself and to earlier tokens. The mask hides the "
        "hatched positions: it sets their scores to the lowest number before the softmax, so the "
        f"largest weight there is {_largest_masked_weight(weights):g}, and {rows_sum} over the "
        "other positions. The first token can only attend to itself.",
        "cross": "The queries come from the target, keys and values from the encoder's output. "
        f"{num_queries} target tokens, each labelled with the token that it predicts, attend to "
        f"{num_keys} source tokens. No position is masked: the whole source is known before the "
        f"first target token is predicted. The translation is: {weights.translation}",
    }
    messages = {
        "encoder": "Each panel is a head: a row is a word that reads, a column one that it reads",
        "decoder": "A word reads itself and the words before it; hatched positions are hidden",
        "cross": "A row is a word to be written, a column a source word that it takes from",
    }
    title = KINDS[kind].title
    return Section(
        name=kind,
        title=f"{title[0].upper()}{title[1:]}: all heads",
        finding=findings[kind],
        figure=draw_grid(weights, kind),
        message=messages[kind],
        numbers={
            "queries": getattr(weights, KINDS[kind].queries),
            "keys": getattr(weights, KINDS[kind].keys),
            "weights": values.tolist(),
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
    figure, all_axes = new_figure(10.5, 1.2 + 0.27 * _most_words(words), 1, len(KINDS))
    rows: list[list[Any]] = []
    for axes, (kind, (title, _, _)) in zip(all_axes[0], KINDS.items(), strict=True):
        index = (layer or len(getattr(words, kind))) - 1
        statistics = head_statistics([weights], kind)[index]
        focused = min(range(len(statistics)), key=lambda i: statistics[i].entropy)
        chosen = focused if head is None else head - 1
        draw_lines(axes, words, kind, index, [chosen])
        axes.set_title(f"{title}\nlayer {index + 1}, head {chosen + 1}", fontsize=10)
        rows.append([title, index + 1, chosen + 1, *_strongest(words, kind, index, chosen)])
    strongest = max(rows, key=lambda row: row[-1])
    return Section(
        name="head",
        title="One head of each kind, as in figures 4 and 5",
        finding="Lines connect each word on the left with the words that it attends to. The "
        "opacity of a line is the weight. The tokens of a word are merged. The strongest line, "
        "except for lines from a word to itself in self-attention, is in "
        f"{strongest[0]}: {strongest[3]} attends to {strongest[4]} with a weight of "
        f"{strongest[5]:.2f}.",
        columns=("attention", "layer", "head", "strongest line from", "to", "weight"),
        rows=rows,
        figure=figure,
        message="The stronger a line, the more does a word on the left take from one on the right",
    )


def _most_words(words: AttentionWeights) -> int:
    return max(len(words.source), len(words.target))


def _strongest(words: AttentionWeights, kind: str, layer: int, head: int) -> tuple[str, str, float]:
    queries, keys = getattr(words, KINDS[kind].queries), getattr(words, KINDS[kind].keys)
    values = getattr(words, kind)[layer, head].clone()  # [Q, K]
    if kind != "cross":
        values.fill_diagonal_(0.0)
    query, key = divmod(int(values.argmax()), len(keys))
    return queries[query], keys[key], float(values[query, key])


def word_section(weights: AttentionWeights, layer: int | None) -> Section:
    """Show all heads of an encoder layer for the word on which they differ most.

    Args:
        weights: Attention weights of the sentence.
        layer: Layer number, counted from 1; by default the last layer.

    Returns:
        The section.
    """
    words = weights.by_word()
    index = (layer or len(words.encoder)) - 1
    values = words.encoder[index]  # [h, S, S]
    # mean KL divergence of the heads from their average, in nats (Jensen-Shannon divergence)
    mean = values.mean(dim=0)
    differences = (torch.special.xlogy(values, values).sum(-1)).mean(dim=0)
    differences = differences - torch.special.xlogy(mean, mean).sum(-1)  # [S]
    query = int(differences.argmax())
    figure, axes = new_figure(5.6, 1.0 + 0.3 * len(words.source))
    draw_lines(axes, words, "encoder", index, range(len(values)), query)
    colors = head_colors(len(values))
    axes.set_title(f"“{words.source[query]}”, layer {index + 1}: one colour per head", fontsize=10)
    # the drawn lines are transparent, so the legend gets its opaque colours from empty lines
    for head in range(len(values)):
        axes.plot([], [], color=colors[head], label=f"head {head + 1}")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    rows = []
    for head, row in enumerate(values[:, query]):
        best = int(row.argmax())
        rows.append([head + 1, words.source[best], float(row[best])])
    distinct = len({row[1] for row in rows})
    return Section(
        name="word",
        title="All heads for one word, as in figure 3",
        finding=f"The {len(rows)} heads of encoder layer {index + 1} differ most for "
        f"“{words.source[query]}”: their mean divergence from their average is "
        f"{float(differences[query]):.2f} nats, where {math.log(len(rows)):.2f} is the maximum. "
        + (
            f"The highest weights of the heads are on {distinct} different words. "
            if distinct > 1
            else "The highest weights of all heads are on the same word. "
        )
        + "A single head of the same width would have to average these weights.",
        columns=("head", "attends most to", "weight"),
        rows=rows,
        figure=figure,
        message=f"{len(rows)} heads look at {distinct} different words (stronger: more weight)",
    )
