"""Read text files, plain or compressed, line by line in bounded memory."""

import bz2
import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

# first bytes of a gzip file
GZIP = b"\x1f\x8b"
# errors that the decompressors raise for a truncated file
TRUNCATED = (OSError, EOFError, zlib.error, lzma.LZMAError)


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
    while part := file.read(MAX_LINE_BYTES):
        # also read the rest of the last line, up to the limit
        yield from io.BytesIO(part + file.readline(MAX_LINE_BYTES + 1))


def read_lines(lines: Iterable[bytes], name: str, repair: bool = False) -> Iterator[str]:
    """Decode lines of text. Only a line feed ends a line: other Unicode separators are text.

    Args:
        lines: Lines of a file, from `lines_of`.
        name: Name of the file, for an error.
        repair: Replace bytes that are not UTF-8 by U+FFFD.

    Yields:
        Lines without their line feeds.

    Raises:
        ValueError: If a line is too long, a line is not UTF-8 and `repair` is false, or carriage
            returns end the lines; names the line.
    """
    errors = "replace" if repair else "strict"
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
            if not line.endswith(b"\n"):
                _refuse_carriage_returns(line.count(b"\r", 0, -1), name)
        if len(line) > MAX_LINE_BYTES:
            raise _too_long(name, number)
        try:
            text = line.decode(errors=errors)
        except UnicodeDecodeError as error:
            raise not_utf_8(f"{name} line {number}", error) from error
        yield text.rstrip("\r\n")


def _refuse_carriage_returns(count: int, name: str):
    """Refuse a file without line feeds that has carriage returns."""
    if count:
        raise ValueError(
            f"{name} must end its lines with line feeds, got none and {count:,} carriage returns: "
            f"convert the file with `tr '\\r' '\\n'`."
        )


def _too_long(name: str, number: int) -> ValueError:
    return ValueError(
        f"{name} line {number} must have at most {MAX_LINE_BYTES:,} bytes, got more: split the "
        "line into sentences, one on each line."
    )


def decoded(line: bytes, name: str, repair: bool) -> str:
    try:
        return line.decode(errors="replace" if repair else "strict")
    except UnicodeDecodeError as error:
        raise not_utf_8(name, error) from error


def not_utf_8(name: str, error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"{name} must be UTF-8, got {error.reason}.")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a plain or compressed file for reading bytes.

    Args:
        path: Path of the file, plain or with a suffix of `COMPRESSIONS`.

    Yields:
        The file, which is decompressed while it is read.

    Raises:
        ValueError: If the file cannot be read to its end, or needs a package that is not
            installed.
    """
    opener = COMPRESSIONS.get(path.suffix, Path.open)
    try:
        with opener(path, "rb") as file:
            yield file
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except TRUNCATED as error:
        raise ValueError(f"{path} cannot be read to its end: {error}") from error


def count_lines(path: Path) -> int:
    # `begun` is the number of bytes read so far of the last line, which is not complete yet
    count, num_returns, begun, last = 0, 0, 0, b"\n"
    with opened(path) as file:
        while part := file.read(MAX_LINE_BYTES):
            if count == begun == 0 and part.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ValueError(f"{path} must be UTF-8, got UTF-16 by its byte order mark.")
            if count == begun == 0 and part.startswith(GZIP):
                raise ValueError(f"{path} must be text, or have the suffix .gz, got a gzip file.")
            last = part[-1:]
            num_returns += part.count(b"\r")
            end = part.find(b"\n")
            if begun + (len(part) if end < 0 else end + 1) > MAX_LINE_BYTES:
                if count == 0:
                    _refuse_carriage_returns(num_returns - (last == b"\r"), str(path))
                raise _too_long(str(path), count + 1)
            count += part.count(b"\n")
            begun = begun + len(part) if end < 0 else len(part) - part.rfind(b"\n") - 1
    if count == 0:
        _refuse_carriage_returns(num_returns - (last == b"\r"), str(path))
    return count + (last != b"\n")
