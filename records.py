"""Files of text and JSON, each read against one description of what it holds."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .console import shown

# bytes of a file that is read whole; the logs of the longest runs have a fraction of it
LARGEST_FILE = 1 << 30
# what the tensors and the files of other programs hold
LARGEST_NUMBER = 2**63 - 1


class Kind(NamedTuple):
    """Description of a value.

    Args:
        words: What the value must be, for errors.
        fits: Function that says whether a value is of this kind, its parts aside.
        needed: Kind of each entry that must be there, by name.
        optional: Kind of each entry that may be there.
        others: Kind of all other entries or items; None for any.
        names: What the names of the entries must match.
    """

    words: str
    fits: Callable[[Any], bool]
    needed: Mapping[str, "Kind"] = {}
    optional: Mapping[str, "Kind"] = {}
    others: "Kind | None" = None
    names: str = ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= LARGEST_NUMBER


def is_whole_text(value: str) -> bool:
    """Return whether a text can be written to a file, and can be the name of one.

    Args:
        value: Any text.

    Returns:
        False for a text with a NUL or with half of a character.
    """
    return re.search("[\0\ud800-\udfff]", value) is None


ANYTHING = Kind("anything", lambda value: True)
# for the other entries of a mapping that must have none
NOTHING = Kind("nothing", lambda value: False)
NUMBER = Kind("a finite number", _is_number)
TEXT = Kind("text", lambda value: isinstance(value, str) and is_whole_text(value))
TRUTH = Kind("true or false", lambda value: isinstance(value, bool))


def whole(least: int | None = None) -> Kind:
    """Describe a whole number.

    Args:
        least: Least value; None for any.

    Returns:
        The description.
    """
    words = "a whole number" + ("" if least is None else f" of at least {least}")
    return Kind(
        words,
        lambda value: (
            type(value) is int
            and (-LARGEST_NUMBER if least is None else least) <= value <= LARGEST_NUMBER
        ),
    )


def one_of(*values: Any) -> Kind:
    """Describe a value that is one of some.

    Args:
        values: All that it may be.

    Returns:
        The description.
    """
    return Kind(f"one of {', '.join(map(str, values))}", lambda value: value in values)


def either(first: Kind, second: Kind) -> Kind:
    """Describe a value of one kind or of another one.

    Args:
        first: Any kind; the parts of a value are checked by it.
        second: A kind of values without parts.

    Returns:
        The description.
    """
    return first._replace(
        words=f"{first.words} or {second.words}",
        fits=lambda value: first.fits(value) or second.fits(value),
    )


def or_null(kind: Kind) -> Kind:
    """Describe a value that may be missing.

    Args:
        kind: What it is where it is there.

    Returns:
        The description.
    """
    return either(kind, Kind("null", lambda value: value is None))


def list_of(items: Kind, least: int = 0) -> Kind:
    """Describe a list.

    Args:
        items: Kind of each item.
        least: Least number of items.

    Returns:
        The description.
    """
    words = "a list" + (f" of at least {least}" if least else "")
    return Kind(words, lambda value: isinstance(value, list) and len(value) >= least, others=items)


def mapping(
    needed: Mapping[str, Kind] | None = None,
    optional: Mapping[str, Kind] | None = None,
    others: Kind | None = None,
    names: str = "",
) -> Kind:
    """Describe a mapping of names to values.

    Args:
        needed: Kind of each entry that must be there, by name.
        optional: Kind of each entry that may be there.
        others: Kind of all other entries; None for any.
        names: Regular expression for the names of the other entries.

    Returns:
        The description.
    """
    return Kind(
        "a mapping",
        lambda value: isinstance(value, dict),
        needed or {},
        optional or {},
        others,
        names,
    )


def check(value: Any, kind: Kind, file: str | Path, field: str = "") -> None:
    """Refuse a value that is not as described.

    Args:
        value: Value that was read from a file.
        kind: Its description.
        file: File that it was read from.
        field: Place in the file; the whole file if empty.

    Raises:
        ValueError: If it is not; names the file, the field, the rule and the value.
    """
    what = f"{file}: {field}" if field else str(file)
    if not kind.fits(value):
        raise ValueError(f"{what} must be {kind.words}, got {shown(value)}.")
    if isinstance(value, list) and kind.others is not None:
        for index, item in enumerate(value):
            check(item, kind.others, file, f"{field}[{index}]")
    if not isinstance(value, dict):
        return
    for name in kind.needed:
        if name not in value:
            raise ValueError(f"{what} must have {name}, got {shown(sorted(value))}.")
    for name, part in value.items():
        described = kind.needed.get(name) or kind.optional.get(name) or kind.others
        place = f"{field}.{shown(name)[1:-1]}" if field else shown(name)[1:-1]
        is_named = name in kind.needed or name in kind.optional
        if described is None:
            continue
        is_allowed = is_named or re.fullmatch(kind.names or ".*", name, re.S)
        if described is NOTHING or not is_allowed:
            raise ValueError(f"{what} must not have {shown(name)}.")
        check(part, described, file, place)


def read_text(path: Path) -> str:
    """Read a text file whole.

    Args:
        path: File.

    Returns:
        Its text.

    Raises:
        ValueError: If it is no regular file, is too large, or is not UTF-8; names it.
        OSError: If it cannot be read.
    """
    # a pipe or a device may never end
    if not path.is_file():
        raise ValueError(
            f"{path} must be a file, got {'something else' if path.exists() else 'none'}."
        )
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise ValueError(f"{path} must be of at most {LARGEST_FILE:,} bytes, got {size:,}.")
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8, got {error.reason} at byte {error.start:,}."
        ) from error


def read_json(path: Path, kind: Kind) -> Any:
    """Read a JSON file.

    Args:
        path: File.
        kind: Description of what it holds.

    Returns:
        What it holds.

    Raises:
        ValueError: If it is not as described; names it.
        OSError: If it cannot be read.
    """
    value = parse_json(read_text(path), str(path))
    check(value, kind, path)
    return value


def read_json_lines(path: Path, kind: Kind) -> list[Any]:
    """Read a file with JSON on each line.

    Args:
        path: File.
        kind: Description of what a line holds.

    Returns:
        What the lines hold; a last line without its end, which a killed program left, is left out.

    Raises:
        ValueError: If a line is not as described; names the file and the line.
        OSError: If it cannot be read.
    """
    values = []
    for number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
        place = f"{path} line {number}"
        value = parse_json(line, place)
        check(value, kind, place)
        values.append(value)
    return values


def parse_json(text: str, name: str) -> Any:
    """Parse JSON, without the liberties that Python's parser takes.

    Args:
        text: Text.
        name: File, for errors.

    Returns:
        What the text holds.

    Raises:
        ValueError: If it is no JSON, is too deep, or holds a name twice, NaN or a number that is
            too long.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_refuse_constant)
    except RecursionError:
        problem = "lists or mappings that are too deep"
    except ValueError as error:
        problem = f"{shown(text)}: {error}"
    raise ValueError(f"{name} must be JSON, got {problem}.")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} is given twice")
    return found


def _refuse_constant(name: str):
    raise ValueError(f"{name} is no number of JSON")
