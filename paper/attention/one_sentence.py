"""The attention of one sentence: all heads, one head, and one word."""

import torch

from ...attention_maps import AttentionWeights
from ...drawing import new_figure
from ..study import Section
from .head_tasks import head_statistics
from .kinds import KINDS
from .pictures import draw_grid, draw_lines, head_colors


def grid_section(weights: AttentionWeights, kind: str) -> Section:
    values = getattr(weights, kind)
    num_layers, num_heads, num_queries, num_keys = values.shape
    sums = values.sum(dim=-1)
    rows_sum = f"each row sums to 1 (to {float((sums - 1).abs().max()):.0e})"
    says = {
        "encoder": f"Every token of the source may look at every one, {num_queries} by {num_keys} "
        f"weights in each of {num_layers} x {num_heads} heads; {rows_sum}. Queries, keys and "
        "values are all made from the same tokens.",
        "decoder": "A token of the target may look at itself and at what stands before it; the "
        "hatched places are hidden by the mask. It puts the score there as low as a number goes "
        f"before the softmax, so the largest weight behind the mask is {_behind_mask(weights):g}, "
        f"and {rows_sum} over what is left. The first token can only look at itself.",
        "cross": "The queries come from the target, keys and values from the encoder's output: "
        f"{num_queries} target tokens, each named by the token that it is about to predict, look "
        f"at {num_keys} of the source. Nothing is hidden: the whole source is known before the "
        f"first word is written. The translation is: {weights.translation}",
    }
    title = KINDS[kind].title
    return Section(
        name=kind,
        title=f"{title[0].upper()}{title[1:]}, every head",
        says=says[kind],
        figure=draw_grid(weights, kind),
        numbers={
            "queries": getattr(weights, KINDS[kind].queries),
            "keys": getattr(weights, KINDS[kind].keys),
            "weights": values.tolist(),
        },
    )


def _behind_mask(weights: AttentionWeights) -> float:
    return float(weights.decoder[..., weights.hidden()].max()) if len(weights.inputs) > 1 else 0.0


def head_section(weights: AttentionWeights, layer: int | None, head: int | None) -> Section:
    words = weights.by_word()
    figure, all_axes = new_figure(10.5, 1.2 + 0.27 * _most_words(words), 1, len(KINDS))
    rows = []
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
        title="One head, as figures 4 and 5 draw it",
        says="From each word on the left a line leads to each word that it looks at, the more "
        "opaque the higher the weight; the tokens of a word are joined. The strongest line, "
        "not counting those from a word to itself in self-attention, is in "
        f"{strongest[0]}: {strongest[3]} "
        f"looks at {strongest[4]} with {strongest[5]:.2f}.",
        columns=("attention", "layer", "head", "strongest line from", "to", "weight"),
        rows=rows,
        figure=figure,
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
    words = weights.by_word()
    index = (layer or len(words.encoder)) - 1
    values = words.encoder[index]  # [h, S, S]
    # where heads differ most: how far each is from their mean, in nats
    mean = values.mean(dim=0)
    differences = (torch.special.xlogy(values, values).sum(-1)).mean(dim=0)
    differences = differences - torch.special.xlogy(mean, mean).sum(-1)  # [S]
    query = int(differences.argmax())
    figure, axes = new_figure(5.6, 1.0 + 0.3 * len(words.source))
    draw_lines(axes, words, "encoder", index, range(len(values)), query)
    colors = head_colors(len(values))
    axes.set_title(f"“{words.source[query]}”, layer {index + 1}: one colour a head", fontsize=10)
    # a line without length has the colour of a head at full strength
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
        title="One word, all heads, as figure 3 draws it",
        says=f"What “{words.source[query]}” looks at in layer {index + 1} of the encoder, the word "
        f"for which its {len(rows)} heads differ most ({float(differences[query]):.2f} nats from "
        f"their mean, of {float(torch.tensor(float(len(rows))).log()):.2f} possible): they look "
        f"most at {distinct} different words. One head of the same width would have to average "
        "all of this into one set of weights.",
        columns=("head", "looks most at", "weight"),
        rows=rows,
        figure=figure,
    )
