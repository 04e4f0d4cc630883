"""Read text and JSON files, and validate their content against a description, a `Schema`."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .console import shown

# largest file that is read, in bytes; the logs of the longest runs are far smaller
LARGEST_FILE = 1 << 30
# largest int64, because tensors and other programs cannot store a larger integer
LARGEST_NUMBER = 2**63 - 1
# first bytes of the file that Git leaves in place of a file in LFS
LFS_POINTER = b"version https://git-lfs"


class Schema(NamedTuple):
    """Description of a value.

    Args:
        rule: Rule for the value in words, to be appended to "must be" in an error.
        matches: Function that returns whether a value matches; it does not check entries
            and items, which the other fields describe.
        required: Schema of each required entry, by name.
        optional: Schema of each optional entry, by name.
        other_items: Schema of all other entries of a mapping, or of all items of a list; None for
            any.
        other_names: Regular expression for the names of the other entries; empty for any. It
            applies only if `other_items` is given.
    """

    rule: str
    matches: Callable[[Any], bool]
    required: Mapping[str, "Schema"] = {}
    optional: Mapping[str, "Schema"] = {}
    other_items: "Schema | None" = None
    other_names: str = ""


def _is_number(value: Any) -> bool:
    # `type`, because isinstance(True, int) is true; the comparison is false for NaN and infinity
    return type(value) in (int, float) and abs(value) <= LARGEST_NUMBER


def is_storable_text(value: str) -> bool:
    """Return whether a text can be written to a file and can be a part of a file name.

    Args:
        value: Any text.

    Returns:
        False for a text with a NUL or with a lone surrogate.
    """
    return re.search("[\0\ud800-\udfff]", value) is None


ANYTHING = Schema("anything", lambda value: True)
# `other_items` of a mapping that must have no other entries
NOTHING = Schema("nothing", lambda value: False)
NUMBER = Schema("a number of at most 2^63 - 1 in size", _is_number)
TEXT = Schema("text", lambda value: isinstance(value, str) and is_storable_text(value))
TRUTH = Schema("true or false", lambda value: isinstance(value, bool))


def whole_number(least: int | None = None) -> Schema:
    """Describe an integer.

    Args:
        least: Smallest value; None for any.

    Returns:
        The description.
    """
    rule = "an integer" + ("" if least is None else f" of at least {least}")
    return Schema(
        rule,
        lambda value: (
            type(value) is int
            and (-LARGEST_NUMBER if least is None else least) <= value <= LARGEST_NUMBER
        ),
    )


def one_of(*values: Any) -> Schema:
    """Describe a value that is one of a list of values.

    Args:
        values: Allowed values.

    Returns:
        The description.
    """
    return Schema(f"one of {', '.join(map(str, values))}", lambda value: value in values)


def either(first: Schema, second: Schema) -> Schema:
    """Describe a value that matches one of two schemas.

    Args:
        first: Any schema; entries and items of a value are checked against this schema.
        second: Schema of a value without entries and items.

    Returns:
        The description.
    """
    return first._replace(
        rule=f"{first.rule} or {second.rule}",
        matches=lambda value: first.matches(value) or second.matches(value),
    )


def or_null(schema: Schema) -> Schema:
    """Describe a value that may be null.

    Args:
        schema: Schema of a value that is not null.

    Returns:
        The description.
    """
    return either(schema, Schema("null", lambda value: value is None))


def list_of(items: Schema, least: int = 0) -> Schema:
    """Describe a list.

    Args:
        items: Schema of each item.
        least: Smallest number of items.

    Returns:
        The description.
    """
    rule = "a list" + (f" of at least {least}" if least else "")
    return Schema(
        rule, lambda value: isinstance(value, list) and len(value) >= least, other_items=items
    )


def mapping(
    required: Mapping[str, Schema] | None = None,
    optional: Mapping[str, Schema] | None = None,
    other_items: Schema | None = None,
    other_names: str = "",
) -> Schema:
    """Describe a mapping of names to values.

    Args:
        required: Schema of each required entry, by name.
        optional: Schema of each optional entry, by name.
        other_items: Schema of all other entries; None for any.
        other_names: Regular expression for the names of the other entries; empty for any. It
            applies only if `other_items` is given.

    Returns:
        The description.
    """
    return Schema(
        "a mapping",
        lambda value: isinstance(value, dict),
        required or {},
        optional or {},
        other_items,
        other_names,
    )


def check(value: Any, schema: Schema, file: str | Path, field: str = "") -> None:
    """Refuse a value that does not match its description.

    Args:
        value: Value that was read from a file.
        schema: Description of the value.
        file: File that the value was read from.
        field: Path of the value in the file, such as "a.b[0]"; empty for the whole content.

    Raises:
        ValueError: If the value does not match; the message names the file, the field, the rule and
            the value.
    """
    location = f"{file}: {field}" if field else str(file)
    if not schema.matches(value):
        raise ValueError(f"{location} must be {schema.rule}, got {shown(value)}.")
    if isinstance(value, list) and schema.other_items is not None:
        for index, item in enumerate(value):
            check(item, schema.other_items, file, f"{field}[{index}]")
    if not isinstance(value, dict):
        return
    for name in schema.required:
        if name not in value:
            raise ValueError(f"{location} must have {name}, got {shown(sorted(map(str, value)))}.")
    for name, entry in value.items():
        entry_schema = schema.required.get(name) or schema.optional.get(name) or schema.other_items
        entry_field = f"{field}.{shown(name)[1:-1]}" if field else shown(name)[1:-1]
        is_named = name in schema.required or name in schema.optional
        if entry_schema is None:
            continue
        is_allowed = is_named or re.fullmatch(schema.other_names or ".*", name, re.S)
        if entry_schema is NOTHING or not is_allowed:
            raise ValueError(f"{location} must not have {shown(name)}.")
        check(entry, entry_schema, file, entry_field)


def refuse_lfs_pointer(path: str | Path):
    """Refuse a file of a Git repository that was cloned without the files in LFS.

    Args:
        path: File; a pipe, a file in /dev and a missing file are accepted, and not opened.

    Raises:
        ValueError: If the file is the pointer of a file in LFS.
        OSError: If the file cannot be read.
    """
    path = Path(path)
    # on macOS, bytes that are read here from /dev/stdin could not be read again
    if path.is_file() and not path.is_relative_to("/dev"):
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(
                    f"{path} must be a complete file, got a pointer of Git LFS: run `git lfs pull` "
                    "in the clone."
                )


def read_text(path: Path) -> str:
    """Read a whole text file.

    Args:
        path: File.

    Returns:
        The text.

    Raises:
        ValueError: If the path is not a regular file, or the file is too large or not UTF-8.
        OSError: If the file cannot be read.
    """
    # reading a pipe or a device may never end
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


def read_json(path: Path, schema: Schema) -> Any:
    """Read a JSON file.

    Args:
        path: File.
        schema: Description of the content.

    Returns:
        The content.

    Raises:
        ValueError: If the content does not match the description; the message names the file.
        OSError: If the file cannot be read.
    """
    value = parse_json(read_text(path), str(path))
    check(value, schema, path)
    return value


def read_json_lines(path: Path, schema: Schema) -> list[Any]:
    """Read a file with JSON on each line.

    Args:
        path: File.
        schema: Description of a line.

    Returns:
        The content of each line. A last line without a line end is skipped, because a killed
        program may have left it incomplete.

    Raises:
        ValueError: If a line does not match the description; the message names the file and the
            line.
        OSError: If the file cannot be read.
    """
    values = []
    for line_number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
        line_name = f"{path} line {line_number}"
        value = parse_json(line, line_name)
        check(value, schema, line_name)
        values.append(value)
    return values


def parse_json(text: str, file_name: str) -> Any:
    """Parse JSON more strictly than Python's parser.

    Args:
        text: JSON text.
        file_name: Name of the file, for errors.

    Returns:
        The content.

    Raises:
        ValueError: If the text is not JSON, is nested too deeply, has the same name twice in a
            mapping, or contains NaN, infinity or an integer with too many digits.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
    except RecursionError:
        problem = "lists or mappings that are too deep"
    except ValueError as error:
        problem = f"{shown(text)}: {error}"
    raise ValueError(f"{file_name} must be JSON, got {problem}.")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        entry_names = [name for name, _ in pairs]
        repeated_name = next(name for name in entry_names if entry_names.count(name) > 1)
        raise ValueError(f"{shown(repeated_name)} is given twice")
    return entries


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")
