"""Figures without a window system."""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic_files import make_folder, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 120
# of a message above a picture
LETTERS_PER_INCH = 12


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Create a figure with its axes.

    Args:
        width: Width in inches.
        height: Height in inches.
        rows: Number of rows of plots.
        columns: Number of columns of plots.

    Returns:
        The figure, and its axes: one, or an array of them, [rows, columns].
    """
    # without pyplot there is no window system to find, and nothing global
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, axes if rows * columns > 1 else axes[0, 0]


def write_message(figure: "Figure", message: str) -> None:
    """Write what a picture shows above it.

    Args:
        figure: The picture.
        message: One sentence.
    """
    figure.suptitle(wrapped(figure, message), fontsize=11, parse_math=False)


def wrapped(figure: "Figure", text: str) -> str:
    """Return a text in lines that are not wider than a picture.

    Args:
        figure: The picture.
        text: Words.
    """
    return textwrap.fill(text, int(LETTERS_PER_INCH * figure.get_figwidth()))


def label_rows_and_columns(axes: Any, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Write words, or tokens, along both sides of a matrix.

    Args:
        axes: Axes that show the matrix.
        rows: A text for each row.
        columns: A text for each column.
    """
    # a dollar sign in a token must not start a formula
    plain = {"parse_math": False}
    turned = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(columns)), columns, **turned, **plain)
    axes.set_yticks(range(len(rows)), rows, **plain)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a picture; make its folder if needed.

    Args:
        figure: The picture.
        path: Path of the .png file.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DOTS_PER_INCH, format=path.suffix.removeprefix("."))
    make_folder(path.parent)
    write_atomically(path, drawn.getvalue())
