"""The picture of the worked example: the boxes of figure 1 with their matrices, as SVG."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from torch import Tensor

# width of an entry, height of a row, space between matrices, space inside a box, in pixels
CELL_WIDTH, ROW_HEIGHT, MATRIX_GAP, BOX_PADDING = 38, 15, 22, 12
FONT_SIZE = 12
# colours of figure 1, by a word in the title of a box
BOX_COLORS = {
    "Embedding": "#fbe3e4",
    "Attention": "#fdebd0",
    "Norm": "#fbf8d0",
    "Forward": "#d9eef7",
    "Linear": "#e3e3f5",
    "Softmax": "#dcf0dc",
}
INK_COLOR, WEIGHT_COLOR, LINE_COLOR = "#111111", "#8a4b08", "#555555"
# number of matrices in each line of a box, from above, by a part of the name of the box
MATRICES_PER_LINE = {
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


class Size(NamedTuple):
    """Size of a matrix, of a box, or of a column of boxes, in pixels."""

    width: int
    height: int


def draw(boxes: Mapping[str, Box]) -> str:
    """Draw the boxes of figure 1: the encoder on the left, the decoder on the right.

    Args:
        boxes: Boxes by name, from the bottom; the name of a box in the encoder begins with
            "encoder".

    Returns:
        The picture as SVG.
    """
    encoder_boxes = {name: box for name, box in boxes.items() if name.startswith("encoder")}
    decoder_boxes = {name: box for name, box in boxes.items() if name not in encoder_boxes}
    encoder_size, decoder_size = map(_column_size, (encoder_boxes, decoder_boxes))
    margin, first_y, column_gap = 20, 66, 70
    decoder_x = margin + encoder_size.width + column_gap
    width = decoder_x + decoder_size.width + margin
    height = first_y + max(encoder_size.height, decoder_size.height) + 30
    svg_parts = [
        *_svg_head(width, height, TITLE),
        _draw_text(margin, 28, TITLE, 18, True),
        _draw_text(
            margin,
            50,
            "Data flows upwards. Brown: weights. Black: numbers that depend on the words.",
            FONT_SIZE,
        ),
    ]
    top_points, bottom_corners = {}, {}
    for column, x, box_width in (
        (encoder_boxes, margin, encoder_size.width),
        (decoder_boxes, decoder_x, decoder_size.width),
    ):
        y = height - 30
        previous_name = None
        for name, box in column.items():
            box_height = _box_size(name, box).height
            y -= box_height + (MATRIX_GAP if previous_name else 0)
            center_x = x + box_width / 2
            top_points[name], bottom_corners[name] = (center_x, y), (x, y + box_height)
            svg_parts += _draw_box(name, box, x, y, box_width, box_height)
            if previous_name:
                below_box = (center_x, y + box_height + 2)
                svg_parts.append(_draw_arrow([top_points[previous_name], below_box]))
            previous_name = name
    end_x, end_y = top_points[list(encoder_boxes)[-1]]
    target_x, target_y = bottom_corners["decoder cross-attention"]
    target_y -= 60
    turn_x = decoder_x - column_gap / 2
    above_y = end_y - 18
    arrow_points = [
        (end_x, end_y),
        (end_x, above_y),
        (turn_x, above_y),
        (turn_x, target_y),
        (target_x - 2, target_y),
    ]
    svg_parts.append(_draw_arrow(arrow_points))
    svg_parts.append(_draw_text(end_x + 8, above_y - 6, "memory: x of the encoder", FONT_SIZE))
    return "\n".join([*svg_parts, "</svg>"]) + "\n"


def draw_steps() -> str:
    """Draw training and inference of a recurrent network and of a decoder, step by step.

    Returns:
        The picture as SVG: a panel for each network in training and in inference.
    """
    words = ("start", "die", "Katze", "schläft", "end")
    num_steps = len(words) - 1
    panel_width, panel_height, margin, first_y = 470, 250, 20, 70
    width, height = 2 * panel_width + 3 * margin, first_y + 2 * (panel_height + 20)
    title = "In training a decoder needs one step; in inference it needs as many as a recurrence"
    note = "A number is the step that computes a state. Dashed: the predicted word is read next."
    svg_parts = _svg_head(width, height, title)
    svg_parts += [_draw_text(margin, 32, title, 18, True), _draw_text(margin, 54, note, FONT_SIZE)]
    panels = [
        ("RNN, training: each state waits for the one before it", True, True),
        ("Decoder, training: all states in one step", False, True),
        ("RNN, inference: one state is kept", True, False),
        ("Decoder, inference: keys and values of all words are kept", False, False),
    ]
    for index, (heading, is_recurrent, is_training) in enumerate(panels):
        x = margin + (index % 2) * (panel_width + margin)
        y = first_y + (index // 2) * (panel_height + 20)
        svg_parts.append(
            f'<g><rect x="{x}" y="{y}" width="{panel_width}" height="{panel_height}" rx="8" '
            f'fill="#f7f7f7" stroke="{LINE_COLOR}"/>'
        )
        svg_parts.append(_draw_text(x + BOX_PADDING, y + 22, heading, 13, True))
        centers = [x + 70 + 110 * step_index for step_index in range(num_steps)]
        top_y, state_y, bottom_y = y + 62, y + 130, y + 222
        for step_index, center in enumerate(centers):
            step = 1 if is_training and not is_recurrent else step_index + 1
            if is_recurrent and step_index:
                svg_parts.append(
                    _draw_arrow([(centers[step_index - 1] + 20, state_y), (center - 20, state_y)])
                )
            for earlier_index in range(step_index if is_recurrent else 0, step_index + 1):
                line_ends = [(centers[earlier_index], bottom_y - 16), (center, state_y + 20)]
                svg_parts.append(_draw_line(line_ends, LINE_COLOR))
            svg_parts.append(_draw_arrow([(center, state_y - 20), (center, top_y + 6)]))
            if step_index and not is_training:
                line_ends = [(centers[step_index - 1] + 26, top_y), (center - 28, bottom_y - 10)]
                svg_parts.append(_draw_arrow(line_ends, "#b03a2e", is_dashed=True))
            svg_parts.append(
                f'<circle cx="{center}" cy="{state_y}" r="19" fill="#d9eef7" '
                f'stroke="{LINE_COLOR}"/>'
            )
            svg_parts.append(_draw_text(center, state_y + 5, str(step), 14, True, "middle"))
            svg_parts.append(
                _draw_text(center, bottom_y, words[step_index], FONT_SIZE, anchor="middle")
            )
            svg_parts.append(
                _draw_text(center, top_y, words[step_index + 1], FONT_SIZE, anchor="middle")
            )
        svg_parts.append("</g>")
    return "\n".join([*svg_parts, "</svg>"]) + "\n"


def _svg_head(width: float, height: float, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="{FONT_SIZE}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]


def _line_lengths(name: str) -> tuple[int, ...]:
    return next(lines for kind, lines in MATRICES_PER_LINE.items() if kind in name)


def _matrix_lines(name: str, box: Box) -> list[list[Matrix]]:
    lines, remaining = [], list(box.matrices)
    for line_length in _line_lengths(name):
        lines.append(remaining[:line_length])
        remaining = remaining[line_length:]
    return lines


def _matrix_size(matrix: Matrix) -> Size:
    row_names = _row_names(matrix)
    names_width = max(map(len, row_names)) * 7 + 6 if any(row_names) else 0
    width = names_width + CELL_WIDTH * len(matrix.columns) + 8
    num_rows = len(matrix.rows) + 1 + _has_words(matrix.columns)
    return Size(width, ROW_HEIGHT * num_rows)


def _has_words(names: Iterable[str]) -> bool:
    return not all(name.isdigit() for name in names)


def _row_names(matrix: Matrix) -> list[str]:
    # the rows of a weight matrix are numbered; the picture leaves out these numbers
    return [name if _has_words([name]) else "" for name in matrix.rows]


def _box_size(name: str, box: Box) -> Size:
    sizes_by_line = [[_matrix_size(matrix) for matrix in line] for line in _matrix_lines(name, box)]
    width = max(
        sum(size.width for size in line_sizes) + MATRIX_GAP * (len(line_sizes) - 1)
        for line_sizes in sizes_by_line
    )
    height = sum(max(size.height for size in line_sizes) + 8 for line_sizes in sizes_by_line)
    return Size(max(width, 7 * len(box.equation)) + 2 * BOX_PADDING, height + 40)


def _column_size(boxes: Mapping[str, Box]) -> Size:
    sizes = [_box_size(name, box) for name, box in boxes.items()]
    return Size(max(size.width for size in sizes), sum(size.height + MATRIX_GAP for size in sizes))


def _draw_box(name: str, box: Box, x: float, y: float, width: float, height: float) -> list[str]:
    color = next(color for word, color in BOX_COLORS.items() if word in box.title)
    svg_parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{color}" '
        f'stroke="{LINE_COLOR}"/>',
        _draw_text(x + BOX_PADDING, y + 18, box.title, 13, True),
        _draw_text(x + BOX_PADDING, y + 34, box.equation, 11),
    ]
    line_y = y + 42
    for matrix_line in _matrix_lines(name, box):
        line_x = x + BOX_PADDING
        for matrix in matrix_line:
            svg_parts += _draw_matrix(matrix, line_x, line_y)
            line_x += _matrix_size(matrix).width + MATRIX_GAP
        line_y += max(_matrix_size(matrix).height for matrix in matrix_line) + 8
    return svg_parts


def _draw_matrix(matrix: Matrix, x: float, y: float) -> list[str]:
    ink = WEIGHT_COLOR if matrix.is_weight else INK_COLOR
    row_names = _row_names(matrix)
    width, height = _matrix_size(matrix)
    cells_x = x + width - CELL_WIDTH * len(matrix.columns) - 4
    svg_parts = [_draw_text(cells_x, y + ROW_HEIGHT - 3, matrix.name, FONT_SIZE, True, color=ink)]
    head_height = ROW_HEIGHT
    if _has_words(matrix.columns):
        head_height += ROW_HEIGHT
        for column_index, column in enumerate(matrix.columns):
            cell_end = cells_x + CELL_WIDTH * (column_index + 1) - 3
            svg_parts.append(
                _draw_text(
                    cell_end, y + head_height - 3, column, 10, anchor="end", color=LINE_COLOR
                )
            )
    bracket_height = height - head_height
    svg_parts.append(
        f'<path d="M{cells_x + 2} {y + head_height} h-4 v{bracket_height} h4 '
        f'M{x + width - 4} {y + head_height} h4 v{bracket_height} h-4" fill="none" '
        f'stroke="{ink}"/>'
    )
    for row_index, row_values in enumerate(matrix.values.tolist()):
        baseline = y + head_height + ROW_HEIGHT * (row_index + 1) - 4
        if row_names[row_index]:
            svg_parts.append(
                _draw_text(
                    cells_x - 6, baseline, row_names[row_index], 11, anchor="end", color=LINE_COLOR
                )
            )
        for column_index, value in enumerate(row_values):
            cell_end = cells_x + CELL_WIDTH * (column_index + 1) - 3
            svg_parts.append(
                _draw_text(
                    cell_end,
                    baseline,
                    _format_number(value, matrix),
                    FONT_SIZE,
                    anchor="end",
                    color=ink,
                )
            )
    return svg_parts


def _format_number(value: float, matrix: Matrix) -> str:
    if math.isinf(value):
        return f"{MINUS}{INFINITY}"
    return f"{value:z.{1 if matrix.is_weight else 2}f}".replace("-", MINUS)


def _draw_arrow(
    points: Sequence[tuple[float, float]], color: str = LINE_COLOR, is_dashed: bool = False
) -> str:
    path = " L".join(f"{x} {y}" for x, y in points)
    dashes = ' stroke-dasharray="4 3"' if is_dashed else ""
    (x0, y0), (x, y) = points[-2:]
    length = math.dist((x0, y0), (x, y))
    # the head ends 6 behind the point, 4 on each side of the line
    back_x, back_y = 6 * (x0 - x) / length, 6 * (y0 - y) / length
    side_ratio = 4 / 6
    first_end, second_end = (
        f"{x + back_x - sign * side_ratio * back_y:g} {y + back_y + sign * side_ratio * back_x:g}"
        for sign in (1, -1)
    )
    style = f'fill="none" stroke="{color}" stroke-width="1.5"'
    head = f"M{first_end} L{x} {y} L{second_end}"
    return f'<path d="M{path}" {style}{dashes}/><path d="{head}" {style}/>'


def _draw_line(points: Sequence[tuple[float, float]], color: str) -> str:
    (x0, y0), (x, y) = points
    return f'<path d="M{x0} {y0} L{x} {y}" fill="none" stroke="{color}"/>'


def _draw_text(
    x: float,
    y: float,
    text: str,
    size: float,
    is_bold: bool = False,
    anchor: str = "start",
    color: str = INK_COLOR,
) -> str:
    weight = ' font-weight="bold"' if is_bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}>'
        f"{escape(text)}</text>"
    )
