"""Pictures of trees, with a color for each bracket."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...drawing import new_figure
from ..evalb import matches, scored_brackets
from ..trees import WORD, Bracket, Tree, walk

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MATCHED, WRONG, NOT_SCORED = "#2a6f97", "#c1121f", "#8d99ae"


def match_colors(tree: Tree, reference: Tree) -> list[str]:
    """Return the color of each bracket: matched, wrong or not scored.

    Args:
        tree: Tree to draw.
        reference: Tree over the same words to compare with.

    Returns:
        Color of each bracket.
    """
    colors = []
    for bracket, is_match in zip(scored_brackets(tree), matches(reference, tree), strict=True):
        color = MATCHED if is_match else WRONG
        colors.append(NOT_SCORED if bracket is None else color)
    return colors


def tree_pair(gold: Tree, predicted: Tree) -> "Figure":
    """Draw two trees over one sentence, with unmatched brackets in red.

    Args:
        gold: Upper tree.
        predicted: Lower tree.

    Returns:
        Figure with both trees.
    """
    figure, both_axes = tree_figure([gold, predicted])
    draw_tree(both_axes[0], gold, match_colors(gold, predicted))
    draw_tree(both_axes[1], predicted, match_colors(predicted, gold))
    both_axes[0].set_title("gold", loc="left")
    both_axes[1].set_title("predicted", loc="left")
    # use the same limit for both axes, so that a level has the same height in both trees
    highest_limit = max(axes.get_ylim()[1] for axes in both_axes)
    for axes in both_axes:
        axes.set_ylim(top=highest_limit)
    return figure


def tree_figure(trees: Sequence[Tree]) -> tuple["Figure", Sequence["Axes"]]:
    """Return an empty figure that has room for trees below each other.

    Args:
        trees: Trees over one sentence.

    Returns:
        The figure, and axes for each tree.
    """
    width = max(sum(_word_widths(tree)) for tree in trees)
    levels = max(max(_heights(tree)) for tree in trees) + 2
    size = (max(4.0, 0.105 * width), 0.42 * levels * len(trees))
    figure, axes = new_figure(*size, rows=len(trees))
    return figure, axes.flat if len(trees) > 1 else [axes]


def _word_widths(tree: Tree) -> list[int]:
    return [max(len(word), 3) + 2 for word in tree.words]


def _heights(tree: Tree) -> list[int]:
    """Return the height of each bracket in levels: 1 if it has only words inside."""
    heights = [1] * len(tree.brackets)
    open_indices: list[int] = []
    num_opened = 0
    for kind, _ in walk(tree):
        if kind == "(":
            open_indices.append(num_opened)
            num_opened += 1
        elif kind == ")":
            index = open_indices.pop()
            if open_indices:
                heights[open_indices[-1]] = max(heights[open_indices[-1]], heights[index] + 1)
    return heights


def draw_tree(axes: "Axes", tree: Tree, colors: Sequence[str]) -> None:
    """Draw a tree over its words.

    Args:
        axes: Axes to draw on.
        tree: Tree to draw.
        colors: Color of each bracket.
    """
    # a dollar sign in a token must not start a formula
    text_style: dict[str, Any] = {
        "ha": "center",
        "va": "center",
        "fontsize": 9,
        "parse_math": False,
    }
    heights = _heights(tree)
    widths = _word_widths(tree)
    right_edge = 0
    open_brackets: list[tuple[int, Bracket, list[tuple[float, float]]]] = []
    num_opened = 0
    for kind, item in walk(tree):
        if kind == "(":
            open_brackets.append((num_opened, item, []))
            num_opened += 1
            continue
        if kind == WORD:
            position = (right_edge + widths[item] / 2, 0.0)
            right_edge += widths[item]
            axes.text(*position, tree.words[item], **text_style)
        else:
            index, bracket, child_positions = open_brackets.pop()
            position = ((child_positions[0][0] + child_positions[-1][0]) / 2, float(heights[index]))
            # draw a bar over all children and a line down to each, so that no lines cross
            line_style: dict[str, Any] = {"color": colors[index], "lw": 0.9}
            bar_height = position[1] - 0.5
            axes.plot(
                [child_positions[0][0], child_positions[-1][0]],
                [bar_height, bar_height],
                **line_style,
            )
            axes.plot([position[0]] * 2, [position[1] - 0.25, bar_height], **line_style)
            for x, y in child_positions:
                axes.plot([x, x], [bar_height, y + 0.3], **line_style)
            axes.text(
                *position, bracket.label, color=colors[index], fontweight="bold", **text_style
            )
        if open_brackets:
            open_brackets[-1][2].append(position)
    axes.set_xlim(0, right_edge)
    axes.set_ylim(-0.6, max(heights) + 0.6)
    axes.axis("off")
