"""Figures that are drawn and saved without a window system."""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic_files import make_folder, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 120
# number of characters per inch in the message above a picture
LETTERS_PER_INCH = 12


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Create a figure with its axes.

    Args:
        width: Width in inches.
        height: Height in inches.
        rows: Number of rows of plots.
        columns: Number of columns of plots.

    Returns:
        The figure and its axes: a single object, or an array of them, [rows, columns].
    """
    # pyplot is not used, because it looks for a window system and keeps figures in a global list
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, axes if rows * columns > 1 else axes[0, 0]


def write_message(figure: "Figure", message: str) -> None:
    """Write a message above a picture.

    Args:
        figure: The picture.
        message: Sentence that states what the picture shows.
    """
    figure.suptitle(wrap_text(figure, message), fontsize=11, parse_math=False)


def wrap_text(figure: "Figure", text: str) -> str:
    """Return a text, wrapped to lines that are not wider than a picture.

    Args:
        figure: The picture.
        text: Text to wrap.
    """
    return textwrap.fill(text, int(LETTERS_PER_INCH * figure.get_figwidth()))


def label_rows_and_columns(axes: Any, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Label the rows and columns of a matrix with words or tokens.

    Args:
        axes: Axes that show the matrix.
        rows: Label of each row.
        columns: Label of each column.
    """
    # a dollar sign in a token must not start a formula
    plain_text = {"parse_math": False}
    turned_text = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(columns)), columns, **turned_text, **plain_text)
    axes.set_yticks(range(len(rows)), rows, **plain_text)


def save_figure(figure: "Figure", path: Path) -> None:
    """Save a picture; create its folder if needed.

    Args:
        figure: The picture.
        path: Path of the .png file.
    """
    image_buffer = io.BytesIO()
    figure.savefig(image_buffer, dpi=DOTS_PER_INCH, format=path.suffix.removeprefix("."))
    make_folder(path.parent)
    write_atomically(path, image_buffer.getvalue())
