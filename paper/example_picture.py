"""The picture of the worked example: the boxes of figure 1 with their matrices, as SVG."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor

# width of an entry, height of a row, space between matrices, space inside a box, in pixels
CELL, LINE, GAP, PADDING = 38, 15, 22, 12
FONT = 12
# colours of figure 1, by a word in the title of a box
COLORS = {
    "Embedding": "#fbe3e4",
    "Attention": "#fdebd0",
    "Norm": "#fbf8d0",
    "Forward": "#d9eef7",
    "Linear": "#e3e3f5",
    "Softmax": "#dcf0dc",
}
INK, WEIGHT_INK, LINE_INK = "#111111", "#8a4b08", "#555555"
# number of matrices in each line of a box, from above, by a part of the name of the box
LAYOUTS = {
    "input": (3,),
    "attention": (3, 3, 4, 3),
    "norm": (2,),
    "feed-forward": (3, 3),
    "linear": (1, 1),
    "softmax": (1,),
}
TITLE = "Figure 1 translates “the cat sleeps”: every matrix of three words and four features"
MINUS, INFINITY = "\u2212", "\u221e"


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """A matrix of the example, with the names of its rows and columns.

    Attributes:
        name: Symbol of the matrix, as in the paper.
        values: The numbers, [rows, columns].
        rows: Name of each row.
        columns: Name of each column.
        is_weight: Whether the numbers are weights of the model, which do not depend on the words.
    """

    name: str
    values: Tensor
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    is_weight: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Box:
    """A box of figure 1, with its equation and its matrices in the order of the computation."""

    title: str
    equation: str
    matrices: tuple[Matrix, ...]


def draw(boxes: Mapping[str, Box]) -> str:
    """Draw the boxes of figure 1: the encoder on the left, the decoder on the right.

    Args:
        boxes: Boxes by name, from the bottom; the name of a box in the encoder begins with
            "encoder".

    Returns:
        The picture as SVG.
    """
    columns = [
        {name: box for name, box in boxes.items() if name.startswith("encoder") == is_encoder}
        for is_encoder in (True, False)
    ]
    widths = [max(_size(name, box)[0] for name, box in one.items()) for one in columns]
    heights = [sum(_size(name, box)[1] + GAP for name, box in one.items()) for one in columns]
    left, top, middle = 20, 66, 70
    width = left + widths[0] + middle + widths[1] + left
    height = top + max(heights) + 30
    parts = [
        *_svg_head(width, height, TITLE),
        _text(left, 28, TITLE, 18, True),
        _text(
            left,
            50,
            "Data flows upwards. Brown: weights. Black: numbers that depend on the words.",
            FONT,
        ),
    ]
    tops, bottoms = {}, {}
    for column, x, box_width in zip(
        columns, (left, left + widths[0] + middle), widths, strict=True
    ):
        y = height - 30
        previous = None
        for name, box in column.items():
            box_height = _size(name, box)[1]
            y -= box_height + (GAP if previous else 0)
            tops[name], bottoms[name] = (x + box_width / 2, y), (x, y + box_height)
            parts += _box(name, box, x, y, box_width, box_height)
            if previous:
                parts.append(_arrow([(tops[previous]), (x + box_width / 2, y + box_height + 2)]))
            previous = name
    end_x, end_y = list(tops.values())[len(columns[0]) - 1]
    to_x, to_y = bottoms["decoder cross-attention"]
    to_y -= 60
    turn = left + widths[0] + middle / 2
    above = end_y - 18
    path = [(end_x, end_y), (end_x, above), (turn, above), (turn, to_y), (to_x - 2, to_y)]
    parts.append(_arrow(path))
    parts.append(_text(end_x + 8, above - 6, "memory: x of the encoder", FONT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_steps() -> str:
    """Draw training and inference of a recurrent network and of a decoder, step by step.

    Returns:
        The picture as SVG: a panel for each network in training and in inference.
    """
    words = ("start", "die", "Katze", "schläft", "end")
    count = len(words) - 1
    panel_width, panel_height, left, top = 470, 250, 20, 70
    width, height = 2 * panel_width + 3 * left, top + 2 * (panel_height + 20)
    title = "In training a decoder needs one step; in inference it needs as many as a recurrence"
    note = "A number is the step that computes a state. Dashed: the predicted word is read next."
    parts = _svg_head(width, height, title)
    parts += [_text(left, 32, title, 18, True), _text(left, 54, note, FONT)]
    panels = [
        ("RNN, training: each state waits for the one before it", True, True),
        ("Decoder, training: all states in one step", False, True),
        ("RNN, inference: one state is kept", True, False),
        ("Decoder, inference: keys and values of all words are kept", False, False),
    ]
    for index, (heading, is_recurrent, is_training) in enumerate(panels):
        x = left + (index % 2) * (panel_width + left)
        y = top + (index // 2) * (panel_height + 20)
        parts.append(
            f'<g><rect x="{x}" y="{y}" width="{panel_width}" height="{panel_height}" rx="8" '
            f'fill="#f7f7f7" stroke="{LINE_INK}"/>'
        )
        parts.append(_text(x + PADDING, y + 22, heading, 13, True))
        columns = [x + 70 + 110 * column for column in range(count)]
        top_y, state_y, bottom_y = y + 62, y + 130, y + 222
        for column, center in enumerate(columns):
            step = 1 if is_training and not is_recurrent else column + 1
            if is_recurrent and column:
                parts.append(_arrow([(columns[column - 1] + 20, state_y), (center - 20, state_y)]))
            for earlier in range(column if is_recurrent else 0, column + 1):
                ends = [(columns[earlier], bottom_y - 16), (center, state_y + 20)]
                parts.append(_line(ends, LINE_INK))
            parts.append(_arrow([(center, state_y - 20), (center, top_y + 6)]))
            if column and not is_training:
                ends = [(columns[column - 1] + 26, top_y), (center - 28, bottom_y - 10)]
                parts.append(_arrow(ends, "#b03a2e", is_dashed=True))
            parts.append(
                f'<circle cx="{center}" cy="{state_y}" r="19" fill="#d9eef7" stroke="{LINE_INK}"/>'
            )
            parts.append(_text(center, state_y + 5, str(step), 14, True, "middle"))
            parts.append(_text(center, bottom_y, words[column], FONT, anchor="middle"))
            parts.append(_text(center, top_y, words[column + 1], FONT, anchor="middle"))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _svg_head(width: float, height: float, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="{FONT}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]


def _layout(name: str) -> tuple[int, ...]:
    return next(lines for kind, lines in LAYOUTS.items() if kind in name)


def _lines(name: str, box: Box) -> list[list[Matrix]]:
    lines, rest = [], list(box.matrices)
    for count in _layout(name):
        lines.append(rest[:count])
        rest = rest[count:]
    return lines


def _matrix_size(matrix: Matrix) -> tuple[int, int]:
    names = _row_names(matrix)
    width = (max(map(len, names)) * 7 + 6 if any(names) else 0) + CELL * len(matrix.columns) + 8
    return width, LINE * (len(matrix.rows) + 1 + _has_words(matrix.columns))


def _has_words(names: Iterable[str]) -> bool:
    return not all(name.isdigit() for name in names)


def _row_names(matrix: Matrix) -> list[str]:
    # the rows of a weight matrix are numbered; the picture leaves out these numbers
    return [name if _has_words([name]) else "" for name in matrix.rows]


def _size(name: str, box: Box) -> tuple[int, int]:
    lines = [[_matrix_size(one) for one in line] for line in _lines(name, box)]
    width = max(sum(w for w, _ in line) + GAP * (len(line) - 1) for line in lines)
    height = sum(max(h for _, h in line) + 8 for line in lines)
    return max(width, 7 * len(box.equation)) + 2 * PADDING, height + 40


def _box(name: str, box: Box, x: float, y: float, width: float, height: float) -> list[str]:
    color = next(color for word, color in COLORS.items() if word in box.title)
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{color}" '
        f'stroke="{LINE_INK}"/>',
        _text(x + PADDING, y + 18, box.title, 13, True),
        _text(x + PADDING, y + 34, box.equation, 11),
    ]
    line_y = y + 42
    for line in _lines(name, box):
        line_x = x + PADDING
        for matrix in line:
            parts += _matrix(matrix, line_x, line_y)
            line_x += _matrix_size(matrix)[0] + GAP
        line_y += max(_matrix_size(one)[1] for one in line) + 8
    return parts


def _matrix(matrix: Matrix, x: float, y: float) -> list[str]:
    ink = WEIGHT_INK if matrix.is_weight else INK
    names = _row_names(matrix)
    width, height = _matrix_size(matrix)
    cells = x + width - CELL * len(matrix.columns) - 4
    parts = [_text(cells, y + LINE - 3, matrix.name, FONT, True, color=ink)]
    head = LINE
    if _has_words(matrix.columns):
        head += LINE
        for index, column in enumerate(matrix.columns):
            right = cells + CELL * (index + 1) - 3
            parts.append(_text(right, y + head - 3, column, 10, anchor="end", color=LINE_INK))
    parts.append(
        f'<path d="M{cells + 2} {y + head} h-4 v{height - head} h4 M{x + width - 4} {y + head} '
        f'h4 v{height - head} h-4" fill="none" stroke="{ink}"/>'
    )
    for index, values in enumerate(matrix.values.tolist()):
        base = y + head + LINE * (index + 1) - 4
        if names[index]:
            parts.append(_text(cells - 6, base, names[index], 11, anchor="end", color=LINE_INK))
        for offset, value in enumerate(values):
            right = cells + CELL * (offset + 1) - 3
            parts.append(_text(right, base, _number(value, matrix), FONT, anchor="end", color=ink))
    return parts


def _number(value: float, matrix: Matrix) -> str:
    if math.isinf(value):
        return f"{MINUS}{INFINITY}"
    return f"{value:z.{1 if matrix.is_weight else 2}f}".replace("-", MINUS)


def _arrow(
    points: Sequence[tuple[float, float]], color: str = LINE_INK, is_dashed: bool = False
) -> str:
    path = " L".join(f"{x} {y}" for x, y in points)
    dashes = ' stroke-dasharray="4 3"' if is_dashed else ""
    (x0, y0), (x, y) = points[-2:]
    length = math.dist((x0, y0), (x, y))
    # the head ends 6 behind the point, 4 on each side of the line
    back, side = (6 * (x0 - x) / length, 6 * (y0 - y) / length), 4 / 6
    ends = [
        f"{x + back[0] - sign * side * back[1]:g} {y + back[1] + sign * side * back[0]:g}"
        for sign in (1, -1)
    ]
    style = f'fill="none" stroke="{color}" stroke-width="1.5"'
    return f'<path d="M{path}" {style}{dashes}/><path d="M{ends[0]} L{x} {y} L{ends[1]}" {style}/>'


def _line(points: Sequence[tuple[float, float]], color: str) -> str:
    (x0, y0), (x, y) = points
    return f'<path d="M{x0} {y0} L{x} {y}" fill="none" stroke="{color}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    size: float,
    is_bold: bool = False,
    anchor: str = "start",
    color: str = INK,
) -> str:
    weight = ' font-weight="bold"' if is_bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}>'
        f"{escape(text)}</text>"
    )
