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


def match_colors(tree: Tree, against: Tree) -> list[str]:
    """Return the color of each bracket: matched, wrong or not scored.

    Args:
        tree: Tree to draw.
        against: Tree over the same words to compare with.

    Returns:
        Color of each bracket.
    """
    return [
        NOT_SCORED if bracket is None else MATCHED if is_match else WRONG
        for bracket, is_match in zip(scored_brackets(tree), matches(against, tree), strict=True)
    ]


def tree_pair(gold: Tree, predicted: Tree) -> "Figure":
    """Draw two trees over one sentence, with unmatched brackets in red.

    Args:
        gold: Upper tree.
        predicted: Lower tree.

    Returns:
        Figure with both trees.
    """
    figure, axes = tree_figure([gold, predicted])
    draw_tree(axes[0], gold, match_colors(gold, predicted))
    draw_tree(axes[1], predicted, match_colors(predicted, gold))
    axes[0].set_title("gold", loc="left")
    axes[1].set_title("predicted", loc="left")
    # use the same limit for both axes, so that a level has the same height in both trees
    highest = max(one.get_ylim()[1] for one in axes)
    for one in axes:
        one.set_ylim(top=highest)
    return figure


def tree_figure(trees: Sequence[Tree]) -> tuple["Figure", Sequence["Axes"]]:
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
    inside: list[int] = []
    opened = 0
    for kind, _ in walk(tree):
        if kind == "(":
            inside.append(opened)
            opened += 1
        elif kind == ")":
            index = inside.pop()
            if inside:
                heights[inside[-1]] = max(heights[inside[-1]], heights[index] + 1)
    return heights


def draw_tree(axes: "Axes", tree: Tree, colors: Sequence[str]) -> None:
    """Draw a tree over its words.

    Args:
        axes: Axes to draw on.
        tree: Tree to draw.
        colors: Color of each bracket.
    """
    # a dollar sign in a token must not start a formula
    text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "parse_math": False}
    heights = _heights(tree)
    widths = _word_widths(tree)
    right = 0
    inside: list[tuple[int, Bracket, list[tuple[float, float]]]] = []
    opened = 0
    for kind, item in walk(tree):
        if kind == "(":
            inside.append((opened, item, []))
            opened += 1
            continue
        if kind == WORD:
            spot = (right + widths[item] / 2, 0.0)
            right += widths[item]
            axes.text(*spot, tree.words[item], **text)
        else:
            index, bracket, below = inside.pop()
            spot = ((below[0][0] + below[-1][0]) / 2, float(heights[index]))
            # draw a bar over all children and a line down to each, so that no lines cross
            line: dict[str, Any] = {"color": colors[index], "lw": 0.9}
            bar = spot[1] - 0.5
            axes.plot([below[0][0], below[-1][0]], [bar, bar], **line)
            axes.plot([spot[0]] * 2, [spot[1] - 0.25, bar], **line)
            for x, y in below:
                axes.plot([x, x], [bar, y + 0.3], **line)
            axes.text(*spot, bracket.label, color=colors[index], fontweight="bold", **text)
        if inside:
            inside[-1][2].append(spot)
    axes.set_xlim(0, right)
    axes.set_ylim(-0.6, max(heights) + 0.6)
    axes.axis("off")
