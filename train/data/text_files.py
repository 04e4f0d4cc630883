"""Read text files, plain or compressed, line by line in bounded memory."""

import bz2
import codecs
import gzip
import io
import logging
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from ...records import refuse_lfs_pointer

logger = logging.getLogger(__name__)

# first bytes of a gzip file
GZIP_MAGIC = b"\x1f\x8b"
# first bytes of compressed files and names of their formats, by their suffix in `COMPRESSIONS`
COMPRESSED_STARTS = {
    ".gz": (re.compile(GZIP_MAGIC), "a gzip"),
    ".bz2": (re.compile(rb"BZh[1-9]1AY&SY"), "a bzip2"),
    ".xz": (re.compile(rb"\xfd7zXZ\x00"), "an xz"),
    ".zst": (re.compile(rb"\x28\xb5\x2f\xfd"), "a Zstandard"),
}
# errors that the decompressors raise for a truncated file
TRUNCATION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)


@contextmanager
def _open_zstd(path: Path, mode: Literal["rb"]) -> Iterator[Any]:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise ValueError(
            f"{path} needs backports.zstd, which is not installed: pip install "
            "'vanilla_transformer[text]'"
        ) from error
    try:
        with zstd.open(path, mode) as file:
            yield file
    except zstd.ZstdError as error:
        raise OSError(str(error)) from error


# functions that open compressed files, by suffix of the file
COMPRESSIONS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
# suffixes of files that do not have a sentence on each line
OTHER_FORMATS = (
    *(".csv", ".jsonl", ".json", ".parquet"),
    *(".srt", ".vtt", ".ass", ".ssa", ".sbv"),
    *(".html", ".htm", ".xhtml", ".xml", ".sgm", ".sgml"),
    *(".xliff", ".xlf", ".sdlxliff", ".mxliff", ".tmx", ".po", ".pot"),
    *(".doc", ".docx", ".odt", ".rtf", ".pdf", ".epub", ".xls", ".xlsx", ".ods"),
    *(".tar", ".tgz", ".zip"),
)
# what to do with a file that does not have a sentence on each line, by suffix
ADVICE = {
    **dict.fromkeys(
        (".sgm", ".sgml", ".xml"),
        "write the text of its segments to a text file, one on each line, or take a test set of "
        "WMT from sacreBLEU, such as `sacrebleu -t wmt14 -l en-de --echo src`",
    ),
    **dict.fromkeys((".tar", ".tgz", ".zip"), "unpack it, and give a text file"),
}
# start of the names of IWSLT's training files, and what they have besides sentences: lines with
# metadata, and tags around titles and descriptions
IWSLT_PREFIX = "train.tags."
IWSLT_METADATA = re.compile(r"\s*</?(doc|keywords|reviewer|speaker|talkid|translator|url)\b")
IWSLT_TAGS = re.compile(r"</?(description|title)>")
# first line of JSON lines, markup, an office document or a PDF
NO_SENTENCE = re.compile(r'\{"|\[\{|<[A-Za-z!/?]|PK\x03\x04|%PDF')
# patterns of lines that have more than a sentence, and what a warning says about such a line
OTHER_LINES = {
    re.compile(r".*\t"): "a tab",
    re.compile(r".* \|\|\| "): "the separator |||",
    NO_SENTENCE: "JSON or markup",
}
# longest line in a file or a pipe, line feed included
MAX_LINE_BYTES = 1 << 20


def lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """Read the lines of a file in bounded memory, for `read_lines`, which refuses long lines.

    Args:
        file: File that is open for reading bytes.

    Yields:
        Lines with their line feeds. A line longer than `MAX_LINE_BYTES` may be split, but its first
        part is longer than the limit too, so that `read_lines` refuses it.
    """
    while chunk := file.read(MAX_LINE_BYTES):
        # also read the rest of the last line, up to the limit
        yield from io.BytesIO(chunk + file.readline(MAX_LINE_BYTES + 1))


def read_lines(lines: Iterable[bytes], name: str, repair: bool = False) -> Iterator[str]:
    """Decode lines of text. Only a line feed ends a line: other Unicode separators are text.

    Args:
        lines: Lines of a file, from `lines_of`.
        name: Name of the file, for an error.
        repair: Whether to replace bytes that are not UTF-8 by U+FFFD.

    Yields:
        Lines without their line feeds.

    Raises:
        ValueError: If a line is too long, a line is not UTF-8 and `repair` is false, carriage
            returns end the lines, or the text is UTF-16 or compressed; names the line or the file.
    """
    errors = "replace" if repair else "strict"
    for line_number, line in enumerate(lines, start=1):
        if line_number == 1:
            _refuse_other_bytes(line, name)
            line = line.removeprefix(codecs.BOM_UTF8)
            if not line.endswith(b"\n"):
                _refuse_carriage_returns(line.count(b"\r", 0, -1), name)
        if len(line) > MAX_LINE_BYTES:
            raise _line_too_long_error(name, line_number)
        try:
            text = line.decode(errors=errors)
        except UnicodeDecodeError as error:
            raise not_utf_8_error(f"{name} line {line_number}", error) from error
        yield text.rstrip("\r\n")


def _refuse_other_bytes(start: bytes, name: str):
    """Refuse a file that is UTF-16 or compressed, by its first bytes."""
    encoding, sign = _find_utf_16(start)
    if encoding:
        raise ValueError(
            f"{name} must be UTF-8, got UTF-16 by its {sign}: convert the file with "
            f"`iconv -f {encoding} -t UTF-8`."
        )
    for suffix, (pattern, format_name) in COMPRESSED_STARTS.items():
        if pattern.match(start):
            raise ValueError(
                f"{name} must be text, or have the suffix {suffix}, got {format_name} file."
            )


def _find_utf_16(start: bytes) -> tuple[str, str]:
    """Return the encoding of text in UTF-16 and its sign; empty strings for other text."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16", "byte order mark"
    # without this mark, most characters of Latin text have a NUL as their first or second byte.
    # A single NUL is text
    even_bytes, odd_bytes = start[:1000:2], start[1:1000:2]
    for encoding, high_bytes, low_bytes in (
        ("UTF-16LE", odd_bytes, even_bytes),
        ("UTF-16BE", even_bytes, odd_bytes),
    ):
        num_nul = high_bytes.count(0)
        if num_nul > max(1, 0.75 * len(high_bytes)) and low_bytes.count(0) < 0.25 * len(low_bytes):
            return encoding, "NUL in every second byte"
    return "", ""


def _refuse_carriage_returns(count: int, name: str):
    """Refuse a file without line feeds that has carriage returns."""
    if count:
        raise ValueError(
            f"{name} must end its lines with line feeds, got none and {count:,} carriage returns: "
            f"convert the file with `tr '\\r' '\\n'`."
        )


def _line_too_long_error(name: str, line_number: int) -> ValueError:
    return ValueError(
        f"{name} line {line_number} must have at most {MAX_LINE_BYTES:,} bytes, got more: split "
        "the line into sentences, one on each line."
    )


def decode_line(line: bytes, name: str, repair: bool) -> str:
    try:
        return line.decode(errors="replace" if repair else "strict")
    except UnicodeDecodeError as error:
        raise not_utf_8_error(name, error) from error


def not_utf_8_error(name: str, error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"{name} must be UTF-8, got {error.reason}.")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a plain or compressed file for reading bytes.

    Args:
        path: Path of the file, plain or with a suffix of `COMPRESSIONS`, in any case.

    Yields:
        The file, which is decompressed while it is read.

    Raises:
        ValueError: If the file cannot be read to its end, or needs a package that is not
            installed.
    """
    opener = COMPRESSIONS.get(path.suffix.lower(), Path.open)
    try:
        refuse_lfs_pointer(path)
        with opener(path, "rb") as file:
            yield file
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        hint = " Give /dev/stdin to read stdin." if str(path) == "-" else ""
        raise ValueError(f"{path} cannot be read: {error.strerror}.{hint}") from error
    except TRUNCATION_ERRORS as error:
        raise ValueError(f"{path} cannot be read to its end: {error}") from error


def refuse_other_format(
    path: str | Path, supported: Collection[str] = (), advice: Mapping[str, str] | None = None
):
    """Refuse a file that does not have a sentence on each line, by its suffix.

    Args:
        path: Path of the file, plain or compressed.
        supported: Suffixes that are allowed.
        advice: What to do with the file, by suffix, before `ADVICE`.

    Raises:
        ValueError: If the suffix is one of `OTHER_FORMATS` and is not supported.
    """
    path = Path(path)
    suffix = Path(path.stem if path.suffix.lower() in COMPRESSIONS else path.name).suffix.lower()
    if suffix in OTHER_FORMATS and suffix not in supported:
        what_to_do = {**ADVICE, **(advice or {})}.get(
            suffix, "write its sentences to a text file, one on each line"
        )
        raise ValueError(f"{path} must have a sentence on each line, got {suffix}: {what_to_do}.")


def warn_of_other_lines(first_line: str, path: Path):
    """Warn of a file that has more than a sentence on its first line, such as columns.

    Args:
        first_line: First line of the file.
        path: Path of the file.
    """
    for pattern, name in OTHER_LINES.items():
        if pattern.match(first_line):
            logger.warning(
                "The first line of %s has %s, but whole lines are read: give a file with only a "
                "sentence on each line.",
                path,
                name,
            )


def has_iwslt_tags(path: Path) -> bool:
    """Return whether a training file of IWSLT has metadata between its sentences, by its name.

    Args:
        path: Path of a text file.
    """
    return path.name.startswith(IWSLT_PREFIX)


def read_sentences(file: IO[bytes], path: Path, repair: bool = False) -> Iterator[str]:
    """Read the sentences of a text file. In IWSLT's training files, skip metadata and tags.

    Args:
        file: File that is open for reading bytes.
        path: Path of the file.
        repair: Whether to replace bytes that are not UTF-8 by U+FFFD.

    Yields:
        Sentences, one from each line.

    Raises:
        ValueError: As `read_lines`.
    """
    lines = read_lines(lines_of(file), str(path), repair)
    if not has_iwslt_tags(path):
        yield from lines
        return
    for line in lines:
        if not IWSLT_METADATA.match(line):
            yield IWSLT_TAGS.sub("", line).strip()


def count_sentences(path: Path) -> int:
    """Count the sentences that `read_sentences` reads.

    Args:
        path: Path of a text file.

    Returns:
        Number of sentences.

    Raises:
        ValueError: As `count_lines`.
    """
    if not has_iwslt_tags(path):
        return count_lines(path)
    with opened(path) as file:
        return sum(1 for _ in read_sentences(file, path, repair=True))


def count_lines(path: Path) -> int:
    # `unfinished_bytes` is the number of bytes read so far of the last line, which is not complete
    # yet
    num_lines, num_carriage_returns, unfinished_bytes, last_byte = 0, 0, 0, b"\n"
    with opened(path) as file:
        while chunk := file.read(MAX_LINE_BYTES):
            is_first_chunk = num_lines == unfinished_bytes == 0
            if is_first_chunk:
                _refuse_other_bytes(chunk, str(path))
            last_byte = chunk[-1:]
            num_carriage_returns += chunk.count(b"\r")
            first_line_end = chunk.find(b"\n")
            first_line_bytes = len(chunk) if first_line_end < 0 else first_line_end + 1
            if unfinished_bytes + first_line_bytes > MAX_LINE_BYTES:
                if num_lines == 0:
                    _refuse_carriage_returns(num_carriage_returns - (last_byte == b"\r"), str(path))
                raise _line_too_long_error(str(path), num_lines + 1)
            num_lines += chunk.count(b"\n")
            if first_line_end < 0:
                unfinished_bytes += len(chunk)
            else:
                unfinished_bytes = len(chunk) - chunk.rfind(b"\n") - 1
    if num_lines == 0:
        _refuse_carriage_returns(num_carriage_returns - (last_byte == b"\r"), str(path))
    return num_lines + (last_byte != b"\n")
