"""Sections of a study, and functions that print a study and write it to a folder."""

import json
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic_files import locked_folder, make_folder, write_atomically
from ..console import print_line
from ..drawing import save_figure, write_message

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_FILE = "README.md"
NUMBERS_FILE = "study.json"
SIGNIFICANT_DIGITS = 4
LINE_WIDTH = 100
# a bar inside a cell, escaped, because a plain bar ends the cell of a Markdown table
ESCAPED_BAR = r"\|"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a study: a finding, its table and its picture.

    Attributes:
        name: Name of the picture file and key in the JSON file, unique in the study.
        title: Heading of the section.
        finding: Finding with its numbers, in one paragraph.
        columns: Column heads of the table.
        rows: Rows of the table: texts, numbers, or None for an empty cell.
        figure: The picture, as a figure of matplotlib.
        message: Finding that the figure shows, one sentence to write above the figure.
        drawing: The picture as SVG text, instead of `figure`.
        numbers: Further entries of the section in the JSON file, by name.
        is_printed_only: Whether the section is only printed, and not written to the study's folder.
    """

    name: str
    title: str
    finding: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    figure: "Figure | None" = None
    message: str = ""
    drawing: str | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    is_printed_only: bool = False

    def has_picture(self) -> bool:
        """Return whether the section has a picture.

        Returns:
            True for a figure or a drawing.
        """
        return self.figure is not None or self.drawing is not None

    def text(self) -> str:
        """Return the section as text for a terminal: title, table and findings."""
        parts = [f"{self.title}\n{'-' * len(self.title)}"]
        if self.columns:
            parts.append(text_table(self.columns, self.rows))
        return "\n".join([*parts, *textwrap.wrap(self.finding, LINE_WIDTH), ""])


def text_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table as plain text, with right-aligned numbers.

    Args:
        columns: Column heads.
        rows: Texts, numbers, or None for an empty cell.

    Returns:
        One line for the column heads and one for each row.
    """
    cells = [list(map(format_cell, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    is_numeric = _numeric_columns(columns, rows)
    return "\n".join(
        "  ".join(
            text.rjust(width) if is_right_aligned else text.ljust(width)
            for text, width, is_right_aligned in zip(texts, widths, is_numeric, strict=True)
        ).rstrip()
        for texts in [list(columns), *cells]
    )


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table as Markdown, with right-aligned numbers.

    Args:
        columns: Column heads.
        rows: Texts, numbers, or None for an empty cell.

    Returns:
        The lines of the table.
    """
    is_numeric = _numeric_columns(columns, rows)
    rule_line = ["--:" if is_right_aligned else "---" for is_right_aligned in is_numeric]
    lines = [list(columns), rule_line, *(list(map(format_cell, row)) for row in rows)]
    return "\n".join(
        f"| {' | '.join(text.replace('|', ESCAPED_BAR) for text in texts)} |" for texts in lines
    )


def format_cell(value: Any) -> str:
    """Format a value for a table.

    Args:
        value: A text, a number, or None.

    Returns:
        The text: `SIGNIFICANT_DIGITS` digits of a float, all digits of an integer, "yes" or "no"
        for a boolean, an empty text for None.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.{SIGNIFICANT_DIGITS}g}"
    return str(value)


def join_names(names: Sequence[str]) -> str:
    """Join names for a sentence: "a, b and c".

    Args:
        names: At least one name.

    Returns:
        The joined names.
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def write_study(
    folder: Path,
    title: str,
    sections: Iterable[Section],
    environment: Mapping[str, Any],
    pictures_folder: Path | None = None,
) -> None:
    """Write a study as a Markdown page, a JSON file of its numbers, and pictures.

    Args:
        folder: Folder for the page and the JSON file.
        title: Title of the study.
        sections: Sections of the study.
        environment: Software and hardware of the run, by name, with its command as `command`.
        pictures_folder: Folder for the pictures; `folder` by default.
    """
    make_folder(folder)
    pictures_folder = folder if pictures_folder is None else pictures_folder
    pictures_link = Path(os.path.relpath(pictures_folder, folder)).as_posix()
    page_blocks = [f"# {title}", f"```text\n{environment['command']}\n```"]
    section_entries = {}
    for section in sections:
        page_blocks.append(f"## {section.title}")
        page_blocks.append(section.finding)
        if section.columns:
            page_blocks.append(markdown_table(section.columns, section.rows))
        if section.has_picture():
            picture_file = f"{section.name}.{'png' if section.drawing is None else 'svg'}"
            if section.drawing is not None:
                make_folder(pictures_folder)
                write_atomically(pictures_folder / picture_file, section.drawing)
            elif section.figure is not None:
                if section.message:
                    write_message(section.figure, section.message)
                save_figure(section.figure, pictures_folder / picture_file)
            picture_link = (
                picture_file if pictures_link == "." else f"{pictures_link}/{picture_file}"
            )
            page_blocks.append(f"![{section.title}]({picture_link})")
        section_entries[section.name] = {
            "title": section.title,
            "says": section.finding,
            "columns": list(section.columns),
            "rows": [list(row) for row in section.rows],
            **section.numbers,
        }
    write_atomically(folder / PAGE_FILE, "\n\n".join(page_blocks) + "\n")
    study_entries = {
        "title": title,
        "environment": dict(environment),
        "sections": _replace_non_finite(section_entries),
    }
    text = json.dumps(study_entries, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / NUMBERS_FILE, text + "\n")


def show_study(
    sections: Iterable[Section], title: str, folder: Path, pictures_folder: Path | None = None
) -> None:
    """Print each section as soon as it is computed, and write the study at the end.

    Args:
        sections: Sections of the study, computed while they are iterated over.
        title: Title of the study.
        folder: Folder for the page and the JSON file.
        pictures_folder: Folder for the pictures; `folder` by default.

    Raises:
        ValueError: If a folder or one of its parents is a file, or another command writes to
            `folder`.
    """
    from ..train.run_folder.environment import environment_facts

    # check the folders now, because a computation may take minutes
    for flag_name, chosen_folder in (
        ("output_dir", folder),
        ("pictures_dir", pictures_folder or folder),
    ):
        path_and_parents = (chosen_folder, *chosen_folder.absolute().parents)
        nearest_path = next(path for path in path_and_parents if path.exists())
        if not nearest_path.is_dir():
            raise ValueError(f"{flag_name} must be a folder, got the file {nearest_path}.")
    finished_sections = []
    with locked_folder(folder):
        try:
            for section in sections:
                if not section.is_printed_only:
                    finished_sections.append(section)
                print_line(section.text(), flush=True)
        finally:
            # also after an error or an interrupt, so that finished sections are not lost
            if finished_sections:
                write_study(folder, title, finished_sections, environment_facts(), pictures_folder)
    if not finished_sections:
        return
    has_pictures = any(section.has_picture() for section in finished_sections)
    content_phrase = "the findings with their pictures" if has_pictures else "the findings"
    print_line(f"{folder / PAGE_FILE} has {content_phrase}")


def _numeric_columns(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    """Return whether each column has only numbers, which is False in a table without rows."""
    if not rows:
        return [False] * len(columns)
    return [_is_numeric_column(column) for column in zip(*rows, strict=True)]


def _is_numeric_column(column: Iterable[Any]) -> bool:
    nonempty_cells = [value for value in column if value is not None]
    return bool(nonempty_cells) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in nonempty_cells
    )


def _replace_non_finite(value: Any) -> Any:
    # JSON has neither infinity nor NaN, so they become texts
    if isinstance(value, Mapping):
        return {name: _replace_non_finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
