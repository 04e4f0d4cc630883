"""A word alignment from the weights of encoder-decoder attention."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...attention_maps import AttentionWeights
from ...drawing import label_rows_and_columns, new_figure
from ..study import Section, join_names
from .kinds import head_or_mean
from .pictures import draw_matrix

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Link(NamedTuple):
    """A target word, the source word to which the target word attends most, and the weight."""

    target: str
    source: str
    weight: float


def align(weights: AttentionWeights, layer: int, head: int | None = None) -> list[Link]:
    """Return a word alignment from the weights of encoder-decoder attention.

    Args:
        weights: Attention weights of a sentence and its translation.
        layer: Decoder layer, counted from 0.
        head: Head number, counted from 0; by default the mean of all heads of the layer.

    Returns:
        One link for each word of the translation, to the source word with the highest weight. End
        tokens of both sides are left out.
    """
    words = weights.by_word()
    matrix = head_or_mean(words.cross, layer, head)[:, :-1]  # [T, S - 1]
    return [
        Link(target, words.source[int(row.argmax())], float(row.max()))
        for target, row in zip(words.target, matrix, strict=True)
        if target != words.source[-1]
    ]


def count_aligned_to_themselves(
    maps: Sequence[AttentionWeights], layer: int | None, head: int | None = None
) -> tuple[int, int]:
    """Count the words with the same spelling in both languages that are aligned to themselves.

    Such words, mostly names and numbers, make it possible to measure an alignment without a
    reference alignment.

    Args:
        maps: Attention weights of one or more sentences.
        layer: Decoder layer, counted from 0; None to align each word to the source word at the same
            relative position in its sentence.
        head: Head number, counted from 0; by default the mean of all heads of the layer.

    Returns:
        Number of words that are aligned to themselves, and number of words with the same spelling
        in both languages. A word counts only if it has a letter or digit and occurs exactly once in
        each of the two sentences.
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
            by_position = row * len(words.source) // len(words.target)
            found = by_position if matrix is None else int(matrix[row].argmax())
            right += words.source[found] == word
            total += 1
    return right, total


def alignment_section(
    weights: AttentionWeights,
    maps: Sequence[AttentionWeights],
    layer: int | None,
    measured_on: str,
) -> Section:
    """Show the alignment of one sentence, and how often words are aligned to themselves.

    Args:
        weights: Attention weights of the sentence.
        maps: Attention weights of the sentences to count on.
        layer: Decoder layer, counted from 1; by default the layer that aligns the most words to
            themselves.
        measured_on: Phrase for the text that describes the sentences of `maps`.

    Returns:
        The section.
    """
    found = [count_aligned_to_themselves(maps, index) for index in range(len(weights.cross))]
    total = found[0][1]
    by_position, _ = count_aligned_to_themselves(maps, None)
    best = max(range(len(found)), key=lambda index: (found[index][0], index))
    index = best if layer is None else layer - 1
    links, words = align(weights, index), weights.by_word()
    strongest = words.cross[index].mean(dim=0)[: len(links), :-1].argmax(dim=-1)
    num_back = int((strongest.diff() < 0).sum())
    finding = (
        "The table has the words of the translation. Each is aligned to the source word with the "
        f"highest weight in decoder layer {index + 1}, by the mean over the heads. The model was "
        "not trained on alignments, and the two languages have different word orders. "
    )
    if total:
        shares = [f"{right / total:.0%} in layer {i + 1}" for i, (right, _) in enumerate(found)]
        finding += (
            f"In {measured_on}, {total} words have the same spelling in both languages, for "
            f"example names and numbers. Of these words, {join_names(shares)} are aligned to "
            f"themselves, and {by_position / total:.0%} by position alone."
        )
    return Section(
        name="alignment",
        title="Word alignment from encoder-decoder attention",
        finding=finding,
        columns=("translation", "source", "weight"),
        rows=[list(link) for link in links],
        figure=_draw_alignment(words, links, index),
        message="Attention of the translation to the source: the highest weight of a row (with its "
        f"number, </s> left out) moves back in the source {num_back} of {len(links) - 1} times",
        numbers={
            "count_aligned_to_themselves": total,
            "aligned_to_themselves": [right for right, _ in found],
            "aligned_by_position": by_position,
        },
    )


def _draw_alignment(words: AttentionWeights, links: Sequence[Link], index: int) -> "Figure":
    width, height = 2.4 + 0.42 * len(words.source), 1.5 + 0.33 * len(words.target)
    figure, axes = new_figure(width, height)
    image = draw_matrix(axes, words, "cross", index)
    label_rows_and_columns(axes, words.target, words.source)
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
    figure.colorbar(image, ax=axes, label=f"mean weight of the heads of layer {index + 1}")
    return figure
