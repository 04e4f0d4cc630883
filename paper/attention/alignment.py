"""A word alignment, read off the encoder-decoder attention."""

from collections.abc import Sequence
from typing import NamedTuple

from ...attention_maps import AttentionWeights
from ...drawing import label_places, new_figure
from ..study import Section
from .kinds import head_or_mean
from .pictures import draw_matrix


class Link(NamedTuple):
    """A target word, the source word that it attends to most, and how much."""

    target: str
    source: str
    weight: float


def align(weights: AttentionWeights, layer: int, head: int | None = None) -> list[Link]:
    """Read a word alignment off the encoder-decoder attention.

    Args:
        weights: Attention weights of a sentence and its translation.
        layer: Decoder layer, counted from 0.
        head: Head number, counted from 0; the mean of all heads of the layer if not given.

    Returns:
        For each word of the translation the one of the source with the highest weight; the end
        tokens are neither.
    """
    words = weights.by_word()
    matrix = head_or_mean(words.cross, layer, head)[:, :-1]  # [T, S - 1]
    targets = words.target
    return [
        Link(target, words.source[int(row.argmax())], float(row.max()))
        for target, row in zip(targets, matrix, strict=True)
        if target != words.source[-1]
    ]


def unchanged_words(
    maps: Sequence[AttentionWeights], layer: int | None, head: int | None = None
) -> tuple[int, int]:
    """Count the words spelled alike in both languages that are aligned to themselves.

    Names, numbers and the like tell how good an alignment is where nobody has made a better one.

    Args:
        maps: Attention weights of one or more sentences.
        layer: As in `align`; None to align by place alone, the first word to the first.
        head: As in `align`.

    Returns:
        How many are, and of how many words. Those count that are once in each sentence.
    """
    right = total = 0
    for weights in maps:
        words = weights.by_word()
        matrix = None if layer is None else head_or_mean(words.cross, layer, head)[:, :-1]
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


def alignment_section(
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
