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
        Link(target, words.source[int(row_weights.argmax())], float(row_weights.max()))
        for target, row_weights in zip(words.target, matrix, strict=True)
        if target != words.source[-1]
    ]


def count_aligned_to_themselves(
    measured_weights: Sequence[AttentionWeights], layer: int | None, head: int | None = None
) -> tuple[int, int]:
    """Count the words with the same spelling in both languages that are aligned to themselves.

    Such words, mostly names and numbers, make it possible to measure an alignment without a
    reference alignment.

    Args:
        measured_weights: Attention weights of one or more sentences.
        layer: Decoder layer, counted from 0; None to align each word to the source word at the same
            relative position in its sentence.
        head: Head number, counted from 0; by default the mean of all heads of the layer.

    Returns:
        Number of words that are aligned to themselves, and number of words with the same spelling
        in both languages. A word counts only if it has a letter or digit and occurs exactly once in
        each of the two sentences.
    """
    num_aligned = num_same_spelling = 0
    for weights in measured_weights:
        words = weights.by_word()
        matrix = None if layer is None else head_or_mean(words.cross, layer, head)[:, :-1]
        for target_index, word in enumerate(words.target):
            if words.target.count(word) != 1 or words.source[:-1].count(word) != 1:
                continue
            if not any(map(str.isalnum, word)):
                continue
            if matrix is None:
                source_index = target_index * len(words.source) // len(words.target)
            else:
                source_index = int(matrix[target_index].argmax())
            num_aligned += words.source[source_index] == word
            num_same_spelling += 1
    return num_aligned, num_same_spelling


def alignment_section(
    weights: AttentionWeights,
    measured_weights: Sequence[AttentionWeights],
    layer: int | None,
    measured_on: str,
) -> Section:
    """Show the alignment of one sentence, and how often words are aligned to themselves.

    Args:
        weights: Attention weights of the sentence.
        measured_weights: Attention weights of the sentences to count on.
        layer: Decoder layer, counted from 1; by default the layer that aligns the most words to
            themselves.
        measured_on: Phrase for the text that describes the sentences of `measured_weights`.

    Returns:
        The section.
    """
    num_layers = len(weights.cross)
    aligned_by_layer = [
        count_aligned_to_themselves(measured_weights, index)[0] for index in range(num_layers)
    ]
    aligned_by_position, num_same_spelling = count_aligned_to_themselves(measured_weights, None)
    best_index = max(range(num_layers), key=lambda index: (aligned_by_layer[index], index))
    layer_index = best_index if layer is None else layer - 1
    links, words = align(weights, layer_index), weights.by_word()
    finding = (
        "The table has the words of the translation. Each is aligned to the source word with the "
        f"highest weight in decoder layer {layer_index + 1}, by the mean over the heads. The model "
        "was not trained on alignments, and the two languages have different word orders. "
    )
    if num_same_spelling:
        layer_shares = [
            f"{num_aligned / num_same_spelling:.0%} in layer {index + 1}"
            for index, num_aligned in enumerate(aligned_by_layer)
        ]
        finding += (
            f"In {measured_on}, {num_same_spelling} words have the same spelling in both "
            "languages, for example names and numbers. Of these words, "
            f"{join_names(layer_shares)} are aligned to themselves, and "
            f"{aligned_by_position / num_same_spelling:.0%} by position alone."
        )
    return Section(
        name="alignment",
        title="Word alignment from encoder-decoder attention",
        finding=finding,
        columns=("translation", "source", "weight"),
        rows=[list(link) for link in links],
        figure=_draw_alignment(words, links, layer_index),
        message="Attention of each word of the translation to the words of the source. A number "
        "marks the highest weight of a row, without </s>.",
        numbers={
            "count_aligned_to_themselves": num_same_spelling,
            "aligned_to_themselves": aligned_by_layer,
            "aligned_by_position": aligned_by_position,
        },
    )


def _draw_alignment(words: AttentionWeights, links: Sequence[Link], layer_index: int) -> "Figure":
    width, height = 2.4 + 0.42 * len(words.source), 1.5 + 0.33 * len(words.target)
    figure, axes = new_figure(width, height)
    image = draw_matrix(axes, words, "cross", layer_index)
    label_rows_and_columns(axes, words.target, words.source)
    axes.set_xlabel("source")
    axes.set_ylabel("translation")
    mean_weights = words.cross[layer_index].mean(dim=0)  # [T, S]
    for row, link in enumerate(links):
        column = int(mean_weights[row, :-1].argmax())
        axes.text(
            column,
            row,
            f"{link.weight:.2f}",
            ha="center",
            va="center",
            fontsize=7,
            color="black" if link.weight > 0.5 else "white",
        )
    figure.colorbar(image, ax=axes, label=f"mean weight of the heads of layer {layer_index + 1}")
    return figure
