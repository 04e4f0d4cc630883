"""Read the texts to translate from a file: a column of each line, or subtitles."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from .text_files import lines_of, read_lines

# markup of subtitles: elements such as <i>, and commands such as {\an8}, which sets the position
MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|\{\\[^{}]*\}")
COMMANDS = re.compile(r"(?:\{\\[^{}]*\}\s*)+")
# a text that an element may enclose
ENCLOSED = re.compile(
    r"(?P<start><(?P<name>[A-Za-z]+)[^<>]*>)(?P<text>.*)(?P<end></(?P=name)>)", re.DOTALL
)
# start of a speaker's line; in "-5", a hyphen is a sign
DIALOGUE = re.compile(rf"(?:{MARKUP.pattern})*(?:[-\u2013\u2014] +|-(?=[^\s\d-]))")


class SubtitlePart(NamedTuple):
    """Part of a subtitle that is translated alone.

    Args:
        before: Markup and dash before the text.
        text: Text without markup, in one line.
        after: Markup after the text.
        num_lines: Number of lines of the part.
        has_markup: Whether markup inside the text was removed.
    """

    before: str
    text: str
    after: str
    num_lines: int
    has_markup: bool


def column_reader(path: str | None, column: str) -> Callable[[str, str], str]:
    """Return the function that extracts a column from a line.

    Args:
        path: File. Its suffix decides whether each line is a JSON object (.jsonl or .json) or has
            tabs between columns. None stands for standard input: lines have tabs if `column` is a
            number, otherwise they are JSON objects.
        column: Number of the column, from 1, or the name of a field of the JSON objects; dots
            separate the names of nested fields, as in "translation.en".

    Returns:
        Function that takes a line, and the name of the line for an error, and returns the text of
        the column. The function raises a ValueError if the line has no such column.

    Raises:
        ValueError: If a tab-separated file is given and `column` is not a number from 1.
    """
    is_json = any(suffix in (".jsonl", ".json") for suffix in Path((path or "").lower()).suffixes)
    if is_json or (path is None and not column.isdecimal()):
        return lambda line, line_name: _extract_field(line, line_name, column)
    if not column.isdecimal() or int(column) < 1:
        raise ValueError(
            f"column must be a number from 1 for a tab-separated file, got {column!r}. A file of "
            "JSON lines must have the suffix .jsonl."
        )
    return lambda line, line_name: _extract_cell(line, line_name, int(column))


def _extract_cell(line: str, line_name: str, column_number: int) -> str:
    cells = line.split("\t")
    if len(cells) < column_number:
        found_columns = "1 column" if len(cells) == 1 else f"{len(cells)} columns"
        raise ValueError(f"{line_name} must have a column {column_number}, got {found_columns}.")
    return cells[column_number - 1]


def _extract_field(line: str, line_name: str, column: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{line_name} must be a JSON object, as in JSON lines (.jsonl): {error}."
        ) from error
    # a dot can also be part of a name
    is_name = isinstance(value, dict) and column in value
    for name in [column] if is_name else column.split("."):
        if not isinstance(value, dict) or name not in value:
            found_fields = (
                f"the fields {', '.join(value)}"
                if isinstance(value, dict)
                else "no object, as JSON lines (.jsonl) have on each line"
            )
            raise ValueError(f"{line_name} must have the field {column!r}, got {found_fields}.")
        value = value[name]
    if not isinstance(value, str):
        raise ValueError(
            f"the field {column!r} of {line_name} must be text, got {type(value).__name__}."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the field {column!r} of {line_name} must be valid Unicode, got an unpaired surrogate "
            f"at index {error.start}."
        ) from error
    return value


def read_column(
    groups: Iterable[list[str]], name: str, extract_column: Callable[[str, str], str]
) -> Iterator[list[str]]:
    """Extract the column of each line.

    Args:
        groups: Lists of lines.
        name: Name of the file, for an error.
        extract_column: Function from `column_reader`.

    Yields:
        List of texts for each list of lines, with a space instead of each line break in a text. If
        a line has no such column, the texts of the lines before it are yielded before the error.

    Raises:
        ValueError: If a line has no such column; names the line.
    """
    line_number = 0
    for group in groups:
        texts: list[str] = []
        for line in group:
            line_number += 1
            try:
                texts.append(
                    " ".join(extract_column(line, f"{name} line {line_number}").splitlines())
                )
            except ValueError:
                if texts:
                    yield texts
                raise
        yield texts


def read_subtitles(file: IO[bytes], name: str) -> list[Any]:
    """Read a file of subtitles in the SubRip format (.srt).

    Args:
        file: File that is open for reading bytes.
        name: Name of the file, for an error.

    Returns:
        `Subtitle` objects of the package srt, with the attribute `content` and the method `to_srt`.

    Raises:
        ValueError: If the file contains no subtitles, or something else.
        ModuleNotFoundError: If the package srt is not installed. A command turns this error into
            the name of the extra to install.
    """
    import srt

    text = "\n".join(read_lines(lines_of(file), name))
    try:
        subtitles = list(srt.parse(text))
    except (srt.SRTParseError, ValueError) as error:
        raise ValueError(f"{name} must hold subtitles, got something else: {error}") from error
    if not subtitles:
        raise ValueError(f"{name} must hold subtitles, got none.")
    for number, subtitle in enumerate(subtitles, start=1):
        if subtitle.index is None:
            # the package would write the number 0
            subtitle.index = number
    return subtitles


def split_subtitle(content: str) -> list[SubtitlePart]:
    """Split a subtitle into the parts that are translated alone: all of it, or speakers' lines.

    A line that begins with a hyphen, or with a dash and a space, begins the part of another
    speaker. Markup that encloses a part, and the dash, surround its translation; other markup is
    removed.

    Args:
        content: Text of a subtitle, with its markup.
    """
    opening, content, closing = _take_off_markup(content)
    line_groups: list[list[str]] = [[]]
    for line in content.splitlines():
        if line_groups[-1] and DIALOGUE.match(line):
            line_groups.append([])
        line_groups[-1].append(line)
    parts = []
    for lines in line_groups:
        before, text, after = _take_off_markup("\n".join(lines))
        dash = DIALOGUE.match(text)
        dash_text = dash[0] if dash else ""
        inner_before, text, inner_after = _take_off_markup(text[len(dash_text) :])
        before += MARKUP.sub("", dash_text) + inner_before
        after = inner_after + after
        has_markup = MARKUP.search(dash_text + text) is not None
        clean_text = " ".join(MARKUP.sub("", text).split())
        parts.append(SubtitlePart(before, clean_text, after, len(lines), has_markup))
    parts[0] = parts[0]._replace(before=opening + parts[0].before)
    parts[-1] = parts[-1]._replace(after=parts[-1].after + closing)
    return parts


def _take_off_markup(text: str) -> tuple[str, str, str]:
    """Return the opening markup that encloses a whole text, the text, and the closing markup."""
    before = after = ""
    while True:
        text = text.strip()
        if commands := COMMANDS.match(text):
            before, text = before + commands[0].rstrip(), text[commands.end() :]
        match = ENCLOSED.fullmatch(text)
        # in <i>A</i> and <i>B</i>, the first element does not enclose the second one
        if match is None or re.search(rf"</?{match['name']}\b", match["text"]):
            return before, text, after
        before, text, after = before + match["start"], match["text"], match["end"] + after


def format_translated_subtitle(
    subtitle: Any, parts: Sequence[SubtitlePart], translations: Sequence[str]
) -> str:
    """Format a subtitle with its translation, in as many lines as before if it has enough words.

    Args:
        subtitle: Subtitle of the package srt; its content is replaced.
        parts: Parts of the content, from `split_subtitle`.
        translations: Translation of each part, in one line.

    Returns:
        Number, times and translated text, in the SubRip format.
    """
    subtitle.content = "\n".join(
        part.before + _break_lines(translation, part.num_lines) + part.after
        for part, translation in zip(parts, translations, strict=True)
    )
    return subtitle.to_srt().rstrip("\n") + "\n"


def _break_lines(text: str, num_lines: int) -> str:
    words = text.split()
    line_length = len(" ".join(words)) / (num_lines or 1)
    lines: list[str] = [""]
    for word in words:
        # lines get about equal lengths: begin a new line if the middle of the word would lie beyond
        # the even share of the lines so far
        word_middle = sum(map(len, lines)) + len(lines) - 1 + len(word) / 2
        if lines[-1] and len(lines) < num_lines and word_middle > line_length * len(lines):
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
