"""Read pairs from tables: a pair on each line, with tabs or commas between the columns."""

import csv
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from ...console import LONGEST_VALUE, shortened, shown
from .text_files import MAX_LINE_BYTES, count_lines, lines_of, opened, read_lines

logger = logging.getLogger(__name__)

# first line by which a CSV file names its separator, as Excel reads it; some programs quote it
SEPARATOR_LINE = re.compile(r'("?)sep=([,;:|\t])\1', re.IGNORECASE)
# advice for a table with tabs and quotes
READ_AS_CSV = (
    "give the file the suffix .csv, and add the line sep=TAB, with a tab instead of TAB, before "
    "the first line"
)
# cell of CSV whose quotes are text, because a space is before them
SPACE_AND_QUOTES = re.compile(r' +".*"', re.DOTALL)
# cell without a text in the tables of TED talks in many languages
MISSING_TEXT = "__NULL__"
# words in the names of the columns of the source and of the target, beside those of its language
SIDE_WORDS = (("source", "src"), ("target", "tgt", "trg"))
# column of each language, by its name or its number from 1
Columns = Mapping[str, str | int]


def read_table(
    path: Path,
    is_csv: bool,
    languages: Sequence[str],
    columns: Columns | None = None,
    repair: bool = False,
) -> Iterator[dict[str, str]]:
    """Read the pairs of a table.

    In a table with tabs, every other character is text, also a quote. In CSV, quotes follow RFC
    4180. Some programs write CSV with semicolons: semicolons separate the columns if the first line
    contains a semicolon and no comma. A first line such as "sep=;" names the separator. Empty lines
    are skipped. A cell `MISSING_TEXT` is an empty text.

    Args:
        path: Path of the file, plain or compressed.
        is_csv: Whether the file is CSV; otherwise tabs separate the columns.
        languages: Source and target language.
        columns: Column of each language. By default, the first line contains the languages as names
            of columns, or the table has tabs and two columns without names, source and target.
        repair: Whether to replace bytes that are not UTF-8 by U+FFFD.

    Yields:
        Text of each language.

    Raises:
        ValueError: If the file is not a table, lacks a column, or a row has another number of
            columns than the first; names the line.
    """
    if count_lines(path) == 0:
        raise ValueError(f"{path} must have at least one line, got none.")
    with opened(path) as file:
        rows = _read_rows(file, path, is_csv, repair)
        first_line_number, first_row = next(rows, (1, []))
        indices = _find_named_columns(first_row, column_names(languages, columns))
        advice = ""
        if indices is not None:
            _refuse_repeated_names(first_row, indices, path)
            second_row = next(rows, None)
            _refuse_names_in_rows(second_row, first_row, indices, languages, path)
            rows = chain([second_row] if second_row else [], rows)
        else:
            indices = _find_numbered_columns(first_row, is_csv, languages, columns, path)
            rows = chain([(first_line_number, first_row)], rows)
            advice = _separator_advice(first_row, languages) if is_csv else ""
        is_quoted: Callable[[str], Any] = SPACE_AND_QUOTES.fullmatch if is_csv else _is_quoted
        is_warned = False
        for line_number, row in rows:
            if len(row) != len(first_row):
                raise ValueError(
                    f"{path} line {line_number} must have {len(first_row)} columns, as line "
                    f"{first_line_number} has, got {len(row)}.{advice}"
                )
            if not is_warned and any(is_quoted(row[index]) for index in indices):
                is_warned = True
                logger.warning(
                    "%s line %d has quotes as in CSV, which are read as text. To read the text "
                    "without quotes, %s.",
                    path,
                    line_number,
                    "remove the spaces before the quotes" if is_csv else READ_AS_CSV,
                )
            yield {
                language: "" if row[index] == MISSING_TEXT else row[index]
                for language, index in zip(languages, indices, strict=True)
            }


def log_columns(path: Path, is_csv: bool, languages: Sequence[str], columns: Columns | None):
    """Log once which column of a table without names is read as which language, and its first text.

    Args:
        path: Path of a table that `read_table` can read.
        is_csv: Whether the file is CSV; otherwise tabs separate the columns.
        languages: Source and target language.
        columns: Column of each language, as for `read_table`.
    """
    names = column_names(languages, columns)
    with opened(path) as file:
        _, first_row = next(_read_rows(file, path, is_csv, repair=True))
    if _find_named_columns(first_row, names) is not None:
        return
    indices = _find_numbered_columns(first_row, is_csv, languages, columns, path)
    texts = ", ".join(
        f"column {index + 1} is read as {language} ({shown(first_row[index])})"
        for language, index in zip(languages, indices, strict=True)
    )
    other_order = f" To read them in the other order: {columns_flag(languages, (2, 1))}."
    _log_once(f"{path} has no names of columns: {texts}.{'' if columns else other_order}")


@cache
def _log_once(message: str):
    logger.info("%s", message)


def _read_rows(
    file: IO[bytes], path: Path, is_csv: bool, repair: bool
) -> Iterator[tuple[int, list[str]]]:
    lines = read_lines(lines_of(file), str(path), repair)
    return _csv_rows(lines, path) if is_csv else _tsv_rows(lines)


def _is_quoted(cell: str) -> bool:
    """Return whether a cell is quoted as in CSV: in quotes, with each quote in the text doubled."""
    inner_text = cell[1:-1]
    return (
        '""' in inner_text
        and cell[0] == cell[-1] == '"'
        and '"' not in inner_text.replace('""', "")
    )


def _tsv_rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    for line_number, line in enumerate(lines, start=1):
        if line:
            yield line_number, line.split("\t")


def _csv_rows(lines: Iterator[str], path: Path) -> Iterator[tuple[int, list[str]]]:
    row_size = 0

    def limit_row_size() -> Iterator[str]:
        nonlocal row_size
        for line in chain(["" if separator_line else first_line], lines):
            row_size += len(line)
            # limit the size, because a quote that is not closed would make the rest of the file
            # part of this row
            if row_size > MAX_LINE_BYTES:
                raise csv.Error(f"row longer than {MAX_LINE_BYTES:,} characters")
            yield f"{line}\n"

    num_empty_lines, first_line = next(
        ((number, line) for number, line in enumerate(lines) if line), (0, "")
    )
    delimiter = ";" if ";" in first_line and "," not in first_line else ","
    if separator_line := SEPARATOR_LINE.fullmatch(first_line):
        delimiter = separator_line[2]
    reader = csv.reader(limit_row_size(), delimiter=delimiter, strict=True)
    line_number = num_empty_lines + 1
    try:
        for row in reader:
            row_size = 0
            if row:
                yield line_number, row
            # number of the line in which the next row begins
            line_number = num_empty_lines + reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path} line {line_number} must be CSV with quotes as in RFC 4180, got: {error}."
        ) from error


def _find_named_columns(first_row: Sequence[str], names: Sequence[str | int]) -> list[int] | None:
    """Return the indices of named columns; None if the first line does not contain the names."""
    cells = _fold_names(first_row)
    wanted_names = [name.casefold() for name in names if isinstance(name, str)]
    is_header = len(wanted_names) == len(names) and set(wanted_names) <= set(cells)
    return [cells.index(name) for name in wanted_names] if is_header else None


def _refuse_repeated_names(first_row: Sequence[str], indices: Sequence[int], path: Path):
    cells = _fold_names(first_row)
    for name in (cells[index] for index in indices):
        if cells.count(name) > 1:
            raise ValueError(
                f"{path} must have one column {name!r}, got {_number_cells(first_row)}."
            )


def _refuse_names_in_rows(
    second_row: tuple[int, Sequence[str]] | None,
    first_row: Sequence[str],
    indices: Sequence[int],
    languages: Sequence[str],
    path: Path,
):
    """Refuse a table whose rows name the languages of their texts, in columns beside the texts."""
    if second_row is None:
        return
    line_number, cells = second_row
    if all(cells[index : index + 1] == [first_row[index]] for index in indices):
        raise ValueError(
            f"{path} must have names of columns only in its first line, got "
            f"{_number_cells(cells)} in line {line_number}. Give the numbers of the columns with "
            f"texts: {columns_flag(languages)}."
        )


def _fold_names(row: Sequence[str]) -> list[str]:
    return [cell.strip().casefold() for cell in row]


def _fold_name(cell: str) -> str:
    """Return a name without its last word if this word only says that it is a text."""
    return re.sub(r" (text|sentence|segment|language|term)$", "", cell.strip().casefold())


def _number_cells(row: Sequence[str]) -> str:
    cell_texts = ", ".join(f"{number} {cell!r}" for number, cell in enumerate(row, start=1))
    return shortened(cell_texts, 3 * LONGEST_VALUE)


def _find_numbered_columns(
    first_row: Sequence[str],
    is_csv: bool,
    languages: Sequence[str],
    columns: Columns | None,
    path: Path,
) -> list[int]:
    """Return the indices of the columns in a file whose first line is a pair."""
    wanted_columns = column_names(languages, columns)
    column_numbers = [number for number in wanted_columns if isinstance(number, int)]
    if column_numbers and max(column_numbers) <= len(first_row):
        numbered_cells = [first_row[number - 1] for number in column_numbers]
        if names := _find_other_names(numbered_cells, languages):
            raise ValueError(
                f"{path} must have a pair in its first line if columns are numbers, got "
                f"{_number_cells(first_row)}. Give the names: {columns_flag(languages, names)}."
            )
        return [number - 1 for number in column_numbers]
    unquoted_row = [cell.strip('"') for cell in first_row]
    is_quoted = not is_csv and unquoted_row != first_row
    if is_quoted and _has_names(unquoted_row, wanted_columns, languages):
        raise ValueError(
            f"{path} must have no quotes around the names of its columns, got "
            f"{_number_cells(first_row)}: {READ_AS_CSV}."
        )
    has_language = any(_find_named_columns(first_row, [language]) for language in languages)
    other_names = _find_other_names(first_row, languages)
    is_pair = (
        len(first_row) == 2 and not has_language and not other_names and not is_header(first_row)
    )
    if columns is None and not is_csv and is_pair:
        _refuse_opposite_name(path, languages)
        return [0, 1]
    advice = _separator_advice(first_row, wanted_columns) if is_csv else ""
    # if there are more than two columns, the texts need not be in the first two
    suggested_columns = other_names or ((1, 2) if is_pair else ())
    raise ValueError(
        f"{path} must have the columns {' and '.join(map(str, wanted_columns))}, got "
        f"{_number_cells(first_row)}.{advice} To read other columns, give their names, or their "
        f"numbers if the first line is a pair: {columns_flag(languages, suggested_columns)}."
    )


def _has_names(
    row: Sequence[str], wanted_columns: Sequence[str | int], languages: Sequence[str]
) -> bool:
    has_columns = _find_named_columns(row, wanted_columns) is not None
    return has_columns or bool(_find_other_names(row, languages)) or is_header(row)


def _refuse_opposite_name(path: Path, languages: Sequence[str]):
    """Refuse a table without names of columns whose file name has the target first.

    The name of a public corpus, such as `news-commentary-v16.de-en.tsv`, has the languages in the
    order of the columns.
    """
    source, target = languages
    pair = f"{target}-{source}"
    if re.search(rf"(?<![a-z]){re.escape(pair)}(?![a-z])", path.name, re.IGNORECASE):
        raise ValueError(
            f"columns must be given for {path}, because its name has {pair}, got none. If "
            f"the first column is in {target}: {columns_flag(languages, (2, 1))}."
        )


def columns_flag(languages: Sequence[str], columns: Sequence[str | int] = ()) -> str:
    """Return the flag that sets the columns, for an error.

    Args:
        languages: Source and target language.
        columns: Column of each language; by default the word COLUMN, for the user to replace.
    """
    columns = columns or ["COLUMN"] * len(languages)
    pairs = zip(languages, columns, strict=True)
    return f"--columns '{{{', '.join(f'{language}: {column}' for language, column in pairs)}}}'"


def is_header(cells: Sequence[str]) -> bool:
    """Return whether cells are different names of columns, so not a pair of texts.

    Args:
        cells: Cells of a row, such as "English" and "French", "en-US" and "fr", "eng_Latn" and
            "deu_Latn", or "Source term" and "Target term".
    """
    names = {re.sub(r"[_-][a-z]{2,4}$", "", _fold_name(cell)) for cell in cells}
    return len(names) == len(cells) and names <= side_names()


def side_names() -> set[str]:
    """Return names of a side of a corpus: codes and English names of languages, and "source".

    Returns:
        Names in lower case, without regions and scripts.
    """
    # imported here, because only few files need the names of the languages
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    three_letter_codes = (code.split("_")[0] for code in FAIRSEQ_LANGUAGE_CODES)
    return {*LANGUAGES, *LANGUAGES.values(), *three_letter_codes, *chain(*SIDE_WORDS)}


def _find_other_names(first_row: Sequence[str], languages: Sequence[str]) -> list[str]:
    """Return the cells that name the columns by other names than the languages, or no cells."""
    # imported here, because only few files need the English names of the languages
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    names = []
    for language, side_words in zip(languages, SIDE_WORDS, strict=True):
        code = language.casefold()
        words = {code, LANGUAGES.get(re.split("[_-]", code)[0]), *side_words}
        for cell in first_row:
            # such as "English", "en-US" and "text_en"
            name = _fold_name(cell)
            if not words.isdisjoint([name, *re.split("[_.-]", name)]):
                names.append(cell.strip())
                break
    return names if len(set(names)) == len(languages) else []


def _separator_advice(first_row: Sequence[str], wanted_columns: Sequence[str | int]) -> str:
    """Return advice if another separator divides the first row into names, or into two texts."""
    for separator in (";", "|", "\t", ","):
        cells = [name for cell in first_row for name in cell.split(separator)]
        has_names = len(cells) > len(first_row) and _find_named_columns(cells, wanted_columns)
        # texts have commas too
        is_pair = separator != "," and len(cells) == len(first_row) + 1
        if has_names or is_pair:
            way = f"add the line sep={separator} before the first line"
            if separator == "\t":
                way = "give the file the suffix .tsv"
            return f" If {separator!r} separates the columns, {way}."
    return ""


def column_names(languages: Sequence[str], columns: Columns | None) -> list[str | int]:
    """Return the names or numbers of the columns of some languages.

    Args:
        languages: Source and target language.
        columns: Column of each language; by default the column names are the languages.

    Returns:
        Names or numbers, in the order of the languages.
    """
    return [(columns or {}).get(language, language) for language in languages]


def join_text_columns(
    table: pa.Table, paths: Sequence[Sequence[str]], languages: Sequence[str]
) -> pa.Table:
    """Convert texts to the single column "translation".

    Args:
        table: Rows with the texts of each language.
        paths: Name of the column of the source and of the target; for a field inside of a column,
            the names from the column to the field.
        languages: Source and target language.

    Returns:
        Rows in the translation schema.
    """
    columns = []
    for name, *inner_names in paths:
        column = table[name]
        for inner_name in inner_names:
            column = pc.struct_field(column, inner_name)
        columns.append(column)
    pairs = pa.table(columns, names=list(languages)).combine_chunks()
    pairs = pairs.cast(pa.schema([(language, pa.string()) for language in languages]))
    return pa.table({"translation": pairs.to_struct_array()})
