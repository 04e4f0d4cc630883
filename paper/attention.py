"""Sections 3.2 and 4, figures 3 to 5: what the heads of a trained model attend to.

Shapes as in the model: N layers, h heads, S source tokens, T target tokens, Q queries, K keys.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention_maps import AttentionWeights, attention_weights
from ..drawing import label_places, new_figure
from ..records import read_text
from .inside_head import draw_head_steps, inside_head
from .study import Section
from .trained import add_model_flag, load_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SENTENCE = "Anna hopes that the package from Berlin will arrive in 3 weeks."
NUM_SENTENCES = 100
PLACES = ("own", "previous", "next", "special", "other")


class Kind(NamedTuple):
    """One of the three uses of attention. Section 3.2.3.

    Attributes:
        title: In words.
        queries: Which tokens ask, a field of `AttentionWeights`.
        keys: Which tokens are asked.
    """

    title: str
    queries: str
    keys: str


KINDS = {
    "encoder": Kind("encoder self-attention", "source", "source"),
    "decoder": Kind("decoder self-attention", "inputs", "inputs"),
    "cross": Kind("encoder-decoder attention", "target", "source"),
}


@dataclass(frozen=True, kw_only=True)
class HeadStatistics:
    """What a head does, as means over its queries.

    Attributes:
        entropy: Of the weights, in nats.
        distance: Places between query and key.
        shares: Of the weight, by `PLACES`: on the query's own place, the one before, the one
            after, the special token (the source's end or the target's start), and the rest.
    """

    entropy: float
    distance: float
    shares: dict[str, float]


class Link(NamedTuple):
    """A target word, the source word that it attends to most, and how much."""

    target: str
    source: str
    weight: float


def head_statistics(
    maps: Sequence[AttentionWeights], kind: str, is_uniform: bool = False
) -> list[list[HeadStatistics]]:
    """Measure what each head attends to. Section 4 and figure 5: heads learn different tasks.

    A query that sees only one key has no choice, and is left out. What falls on the special token
    counts as that alone, wherever the token stands.

    Args:
        maps: Of one or more sentences.
        kind: "encoder", "decoder" or "cross".
        is_uniform: Measure heads that look at all they can see alike, for comparison.

    Returns:
        For each layer its heads, [N][h].
    """
    sums, num_queries = None, 0
    for weights in maps:
        values = getattr(weights, kind).double()  # [N, h, Q, K]
        visible = torch.ones_like(values, dtype=torch.bool)
        if kind == "decoder":
            visible = ~weights.hidden().expand_as(values)
        if is_uniform:
            values = visible.double() / visible.sum(dim=-1, keepdim=True)
        has_choice = visible[0, 0].sum(dim=-1) > 1  # [Q]
        values = values[:, :, has_choice]
        places = _places(weights, kind)[:, has_choice]  # [places, Q, K]
        steps = torch.arange(places.shape[-1]) - has_choice.nonzero()  # [Q, K]
        entropy = -torch.special.xlogy(values, values).sum(dim=(-2, -1))  # [N, h]
        distance = (values * steps.abs()).sum(dim=(-2, -1))
        shares = torch.einsum("nhqk,pqk->pnh", values, places.double())
        found = torch.cat((entropy[None], distance[None], shares))  # [2 + places, N, h]
        sums = found if sums is None else sums + found
        num_queries += int(has_choice.sum())
    means = (sums / num_queries).permute(1, 2, 0).tolist()
    return [
        [
            HeadStatistics(
                entropy=head[0],
                distance=head[1],
                shares=dict(zip(PLACES, head[2:], strict=True)),
            )
            for head in layer
        ]
        for layer in means
    ]


def _places(weights: AttentionWeights, kind: str) -> Tensor:
    """Which keys are a query's own place, the one before, ...; each is one of `PLACES`."""
    num_queries, num_keys = getattr(weights, kind).shape[-2:]
    step = torch.arange(num_keys) - torch.arange(num_queries)[:, None]  # [Q, K]
    special = torch.zeros_like(step, dtype=torch.bool)
    special[:, 0 if kind == "decoder" else -1] = True
    near = [(step == offset) & ~special for offset in (0, -1, 1)]
    rest = ~(special | near[0] | near[1] | near[2])
    return torch.stack([*near, special, rest])  # [places, Q, K]


def align(weights: AttentionWeights, layer: int, head: int | None = None) -> list[Link]:
    """Read a word alignment off the encoder-decoder attention.

    Args:
        weights: Of a sentence and its translation.
        layer: Of the decoder, counted from 0.
        head: Counted from 0; the mean of all heads of the layer if not given.

    Returns:
        For each word of the translation the one of the source with the highest weight; the end
        tokens are neither.
    """
    words = weights.by_word()
    matrix = _of_layer(words.cross, layer, head)[:, :-1]  # [T, S - 1]
    targets = words.target
    return [
        Link(target, words.source[int(row.argmax())], float(row.max()))
        for target, row in zip(targets, matrix, strict=True)
        if target != words.source[-1]
    ]


def unchanged_words(
    maps: Sequence[AttentionWeights], layer: int | None, head: int | None = None
) -> tuple[int, int]:
    """How many words that are spelled the same in both languages are aligned to themselves.

    Names, numbers and the like tell how good an alignment is where nobody has made a better one.

    Args:
        maps: Of one or more sentences.
        layer: As in `align`; None to align by place alone, the first word to the first.
        head: As in `align`.

    Returns:
        How many are, and of how many words. Those count that are once in each sentence.
    """
    right = total = 0
    for weights in maps:
        words = weights.by_word()
        matrix = None if layer is None else _of_layer(words.cross, layer, head)[:, :-1]
        for row, word in enumerate(words.target):
            if words.target.count(word) != 1 or words.source[:-1].count(word) != 1:
                continue
            if not any(map(str.isalnum, word)):
                continue
            by_place = row * len(words.source) // len(words.target)
            found = by_place if matrix is None else int(matrix[row].argmax())
            right += words.source[found] == word
            total += 1
    return right, total


def _of_layer(cross: Tensor, layer: int, head: int | None) -> Tensor:
    return cross[layer].mean(dim=0) if head is None else cross[layer, head]  # [T, S]


def draw_grid(weights: AttentionWeights, kind: str) -> "Figure":
    """All heads of one kind of attention: a row a layer, a column a head.

    Args:
        weights: Of a sentence.
        kind: "encoder", "decoder" or "cross".

    Returns:
        The picture; what the mask hides is hatched.
    """
    values = getattr(weights, kind)  # [N, h, Q, K]
    queries, keys = getattr(weights, KINDS[kind].queries), getattr(weights, KINDS[kind].keys)
    num_layers, num_heads = values.shape[:2]
    width, height = 1.6 + 0.17 * len(keys) * num_heads, 1.4 + 0.17 * len(queries) * num_layers
    figure, all_axes = new_figure(width, height, num_layers, num_heads)
    for layer in range(num_layers):
        for head in range(num_heads):
            axes = all_axes[layer, head] if num_layers * num_heads > 1 else all_axes
            image = draw_matrix(axes, weights, kind, layer, head)
            axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8)
            label_places(axes, queries, keys)
            is_left, is_bottom = head == 0, layer == num_layers - 1
            axes.tick_params(labelsize=7, length=2, labelleft=is_left, labelbottom=is_bottom)
    figure.supxlabel("is looked at (key)", fontsize=9)
    figure.supylabel("looks (query)", fontsize=9)
    figure.colorbar(image, ax=all_axes, label="weight", shrink=0.6, aspect=30)
    return figure


def draw_matrix(
    axes: Any, weights: AttentionWeights, kind: str, layer: int, head: int | None = None
) -> Any:
    """One head: a row a query, a column a key.

    Args:
        axes: To draw on.
        weights: Of a sentence.
        kind: "encoder", "decoder" or "cross".
        layer: Counted from 0.
        head: Counted from 0; the mean of all heads of the layer if not given.

    Returns:
        The image, for a colour bar.
    """
    import numpy as np

    values = _of_layer(getattr(weights, kind), layer, head).numpy()  # [Q, K]
    # what is hidden is no weight of zero: there the hatched ground shows
    mask = weights.hidden().numpy() if kind == "decoder" else False
    axes.patch.set(facecolor="0.92", hatch="/////", edgecolor="0.75")
    shown = np.ma.masked_where(np.broadcast_to(mask, values.shape), values)
    return axes.imshow(shown, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")


def head_colors(num_heads: int) -> list[tuple[float, float, float]]:
    """A colour for each head.

    Args:
        num_heads: Of a layer.

    Returns:
        Red, green and blue from 0 to 1; beyond twenty heads they repeat.
    """
    import matplotlib

    colors = matplotlib.colormaps["tab10" if num_heads <= 10 else "tab20"].colors
    return [colors[head % len(colors)] for head in range(num_heads)]


def draw_lines(
    axes: Any,
    weights: AttentionWeights,
    kind: str,
    layer: int,
    heads: Sequence[int],
    query: int | None = None,
) -> None:
    """Words on both sides, and lines as opaque as the weight between them. Figures 3 to 5.

    Args:
        axes: To draw on.
        weights: Of a sentence, by token or by word.
        kind: "encoder", "decoder" or "cross".
        layer: Counted from 0.
        heads: Counted from 0; one colour each.
        query: The one query to draw, counted from 0; all if not given.
    """
    queries, keys = getattr(weights, KINDS[kind].queries), getattr(weights, KINDS[kind].keys)
    values = getattr(weights, kind)[layer].tolist()  # [h][Q][K]
    colors = head_colors(len(values))
    shown = range(len(queries)) if query is None else [query]
    for place, head in enumerate(heads):
        color = colors[head]
        for row in shown:
            for column, weight in enumerate(values[head][row]):
                # side by side, or the last head would cover the others
                shift = (place - (len(heads) - 1) / 2) * 0.6 / len(heads)
                ends = [row + shift, column + shift]
                axes.plot([0, 1], ends, color=color, alpha=weight, linewidth=2.2)
    plain = {"parse_math": False, "va": "center", "fontsize": 9}
    for row, text in enumerate(queries):
        axes.text(-0.04, row, text, ha="right", alpha=1 if row in shown else 0.35, **plain)
    for column, text in enumerate(keys):
        axes.text(1.04, column, text, ha="left", **plain)
    heading = {"fontsize": 8, "color": "0.4", "style": "italic"}
    axes.text(-0.04, -1, "looks", ha="right", **heading)
    axes.text(1.04, -1, "is looked at", ha="left", **heading)
    axes.set_ylim(max(len(queries), len(keys)) - 0.5, -1.5)
    axes.set_xlim(-0.9, 1.9)
    axes.axis("off")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked of this study.

    Args:
        parser: Of the command line.
    """
    add_model_flag(parser)
    parser.add_argument("--sentence", default=SENTENCE, help="to be translated (%(default)s)")
    parser.add_argument("--translation", help="of the sentence; the model's own if not given")
    parser.add_argument(
        "--layer", type=int, help="of the lines and the alignment, from 1; chosen if not given"
    )
    parser.add_argument(
        "--head", type=int, help="of the lines, from 1; the most focused one if not given"
    )
    parser.add_argument(
        "--num_sentences",
        type=int,
        default=NUM_SENTENCES,
        help="of the run's translated test split, to measure the heads on (%(default)s)",
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Grids of heads, the inside of one, a head and a word in lines, an alignment, what heads do.

    Args:
        flags: As `add_flags` declares them.

    Yields:
        Eight sections.

    Raises:
        ValueError: If there is no such model, layer or head, or no sentence.
    """
    model, tokenizer = load_trained(flags.model, flags.trust_remote_code)
    weights = attention_weights(model, tokenizer, flags.sentence, flags.translation)
    _refuse_absent(weights, flags.layer, flags.head)
    measured_on = "this sentence"
    maps = _test_maps(flags.model, model, tokenizer, flags.num_sentences)
    if maps:
        count = f"{len(maps)} sentences" if len(maps) > 1 else "one sentence"
        measured_on = f"{count} of its test split"
    maps = maps or [weights]
    for kind in KINDS:
        yield _grid_section(weights, kind)
    yield _steps_section(model, tokenizer, flags, weights)
    yield _head_section(weights, flags.layer, flags.head)
    yield _word_section(weights, flags.layer)
    yield _alignment_section(weights, maps, flags.layer, measured_on)
    yield _tasks_section(maps, measured_on)


def _refuse_absent(weights: AttentionWeights, layer: int | None, head: int | None):
    sizes = [getattr(weights, kind).shape[:2] for kind in KINDS]
    for name, number, most in (
        ("layer", layer, min(size[0] for size in sizes)),
        ("head", head, min(size[1] for size in sizes)),
    ):
        if number is not None and not 1 <= number <= most:
            raise ValueError(f"{name} must be from 1 to {most}, got {number}.")


def _test_maps(
    run: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, most: int
) -> list[AttentionWeights]:
    """Of the sentences that `evaluate` has left in a run folder; none where it has not run."""
    if most < 1:
        raise ValueError(f"num_sentences must be at least 1, got {most}.")
    files = [Path(run) / "hypotheses" / f"test.{side}.txt" for side in ("source", "translation")]
    if not all(file.is_file() for file in files):
        return []
    sides = [read_text(file).split("\n")[:-1] for file in files]
    pairs = [pair for pair in zip(*sides, strict=True) if all(map(str.strip, pair))]
    return [attention_weights(model, tokenizer, *pair) for pair in pairs[:most]]


def _grid_section(weights: AttentionWeights, kind: str) -> Section:
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


def _steps_section(
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


def _head_section(weights: AttentionWeights, layer: int | None, head: int | None) -> Section:
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


def _word_section(weights: AttentionWeights, layer: int | None) -> Section:
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


def _alignment_section(
    weights: AttentionWeights,
    maps: Sequence[AttentionWeights],
    layer: int | None,
    measured_on: str,
) -> Section:
    num_layers = len(weights.cross)
    found = [unchanged_words(maps, index) for index in range(num_layers)]
    total = found[0][1]
    best = max(range(num_layers), key=lambda index: (found[index][0], index))
    index = best if layer is None else layer - 1
    words = weights.by_word()
    links = align(weights, index)
    width, height = 2.4 + 0.42 * len(words.source), 1.5 + 0.33 * len(words.target)
    figure, axes = new_figure(width, height)
    image = draw_matrix(axes, words, "cross", index)
    label_places(axes, words.target, words.source)
    axes.set_xlabel("source")
    axes.set_ylabel("translation")
    matrix = words.cross[index].mean(dim=0)
    for row, link in enumerate(links):
        column = int(matrix[row, :-1].argmax())
        axes.text(
            column,
            row,
            f"{link.weight:.2f}",
            ha="center",
            va="center",
            fontsize=7,
            color="black" if link.weight > 0.5 else "white",
        )
    figure.colorbar(image, ax=axes, label=f"weight, mean of layer {index + 1}'s heads")
    says = (
        f"Each word of the translation, and the source word that layer {index + 1} of the decoder "
        "looks at most when it writes it, by the mean of the layer's heads. Nobody told the model "
        "which words belong together, and the order of the two languages differs. "
    )
    by_place, _ = unchanged_words(maps, None)
    if total:
        shares = ", ".join(
            f"{right / total:.0%} by layer {i + 1}" for i, (right, _) in enumerate(found)
        )
        says += (
            f"On {measured_on}, {total} words are spelled alike in both languages, as names and "
            f"numbers are; aligned to themselves are {shares}, and {by_place / total:.0%} if words "
            "are paired by place alone."
        )
    return Section(
        name="alignment",
        title="A word alignment, read off the encoder-decoder attention",
        says=says,
        columns=("translation", "source", "weight"),
        rows=[list(link) for link in links],
        figure=figure,
        numbers={
            "unchanged_words": total,
            "aligned_to_themselves": [right for right, _ in found],
            "aligned_by_place": by_place,
        },
    )


def _tasks_section(maps: Sequence[AttentionWeights], measured_on: str) -> Section:
    rows, names, shares = [], [], []
    for kind, (title, _, _) in KINDS.items():
        found = head_statistics(maps, kind)
        uniform = head_statistics(maps, kind, is_uniform=True)[0][0]
        heads = [
            (layer + 1, str(head + 1), statistics)
            for layer, layer_heads in enumerate(found)
            for head, statistics in enumerate(layer_heads)
        ]
        for layer, head, statistics in [*heads, (None, "all alike", uniform)]:
            values = [statistics.shares[place] for place in PLACES]
            rows.append([title, layer, head, statistics.entropy, statistics.distance, *values])
            names.append(f"layer {layer}, head {head}" if layer else head)
            shares.append((kind, values))
    return Section(
        name="tasks",
        title="Heads learn different tasks, in numbers",
        says=_tasks_say(rows, measured_on),
        columns=("attention", "layer", "head", "entropy (nats)", "distance (tokens)", *PLACES),
        rows=rows,
        figure=_draw_tasks(names, shares),
    )


def _tasks_say(rows: Sequence[Sequence[Any]], measured_on: str) -> str:
    own_shares = [row for row in rows if row[1]]
    alike = {row[0]: row for row in rows if not row[1]}
    clauses = []
    for place in ("previous", "next", "own", "special"):
        column = 5 + PLACES.index(place)
        best = max(own_shares, key=lambda row, column=column: row[column])
        token = {"own": "own place", "special": "end or start token"}.get(place, f"{place} token")
        clauses.append(
            f"{best[column]:.0%} on the {token} (layer {best[1]}, head {best[2]} of "
            f"{best[0]}; {alike[best[0]][column]:.0%} if it looked at all alike)"
        )
    sharpest = min(own_shares, key=lambda row: row[3])
    broadest = max(own_shares, key=lambda row: row[3])
    return (
        f"Measured on {measured_on}. The most that a head puts on one kind of place: "
        f"{'; '.join(clauses)}. The entropy goes from {sharpest[3]:.2f} nats (layer {sharpest[1]}, "
        f"head {sharpest[2]} of {sharpest[0]}) to {broadest[3]:.2f} (layer {broadest[1]}, head "
        f"{broadest[2]} of {broadest[0]}). `special` is the end token of the source, or the start "
        "token that the decoder reads; in encoder-decoder attention, `own` is the same place in "
        "the other sentence."
    )


def _draw_tasks(names: Sequence[str], shares: Sequence[tuple[str, Sequence[float]]]) -> "Figure":
    import matplotlib

    counts = [sum(kind == other for other, _ in shares) for kind in KINDS]
    figure, all_axes = new_figure(11.0, 1.6 + 0.26 * max(counts), 1, len(KINDS))
    colors = dict(zip(PLACES, matplotlib.colormaps["viridis"]([0.0, 0.3, 0.6, 0.9]), strict=False))
    colors["other"] = "0.88"
    for axes, kind in zip(all_axes[0], KINDS, strict=True):
        own = [
            (name, values) for name, (of, values) in zip(names, shares, strict=True) if of == kind
        ]
        left = [0.0] * len(own)
        for index, place in enumerate(PLACES):
            widths = [values[index] for _, values in own]
            label = place if axes is all_axes[0, 0] else None
            axes.barh(range(len(own)), widths, left=left, color=colors[place], label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(own)), [name for name, _ in own], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0.0, 1.0)
        axes.set_xlabel("share of the weight")
        axes.set_title(KINDS[kind].title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(PLACES))
    return figure
