"""Read parallel text from JSON files.

A record is {"translation": {"de": ..., "en": ...}}, or has a field for each language.

The JSON reader of `datasets` infers the type of a column from its values, so a single number can
change the type of a column of texts. The reader here has fixed types, and refuses a value of
another type.
"""

import codecs
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.json
from datasets.packaged_modules.json.json import Json
from fsspec.compression import available_compressions
from fsspec.utils import infer_compression

from .tables import Columns, column_names, with_translations
from .text_files import GZIP, TRUNCATED

# number of bytes to read at once
CHUNK = 10 << 20
# longest record, so that a damaged file cannot fill the memory
MAX_RECORD_BYTES = 10 << 20
COLUMN = "translation"
NO_SPACE = re.compile(r"\S")
# separators in a list of records: before the first record, and before each further record
BEFORE_FIRST, BEFORE_NEXT = re.compile(r"\s*"), re.compile(r"\s*,\s*")


@dataclass
class JsonRecordsConfig(datasets.BuilderConfig):
    """Settings of the reader.

    Args:
        languages: Source and target language.
        fields: Fields of a record that contain the source and the target; empty if the texts are in
            the field "translation".
    """

    languages: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


class JsonRecords(datasets.ArrowBasedBuilder):
    """Builder of a dataset from files of JSON records. Other fields of a record are ignored."""

    BUILDER_CONFIG_CLASS = JsonRecordsConfig

    def _info(self) -> datasets.DatasetInfo:
        column = datasets.Translation(languages=list(self.config.languages))
        return datasets.DatasetInfo(features=datasets.Features({COLUMN: column}))

    def _split_generators(self, dl_manager) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(
                name=split,
                # one list item for each file, because a stream has a shard for each item
                gen_kwargs={"paths": dl_manager.download(list(names)), "names": list(names)},
            )
            for split, names in self.config.data_files.items()
        ]

    def _generate_tables(
        self, paths: list[str], names: list[str]
    ) -> Iterator[tuple[tuple[int, int], pa.Table]]:
        for file, (path, name) in enumerate(zip(paths, names, strict=True)):
            for number, table in enumerate(
                _tables(path, name, self.config.languages, self.config.fields)
            ):
                yield (file, number), table


def is_json(builder: datasets.DatasetBuilder) -> bool:
    """Return whether a dataset consists of files that this module can read.

    Args:
        builder: Builder from `datasets.load_dataset_builder`.

    Returns:
        False for archives, for another encoding than UTF-8, and for records inside a field of one
        JSON object. `datasets` reads such files.
    """
    if not isinstance(builder, Json) or builder.config.field is not None:
        return False
    if builder.config.encoding.lower() not in ("utf-8", "utf8"):
        return False
    names = [name for files in builder.config.data_files.values() for name in files]
    return not any(infer_compression(name) == "zip" or ".tar" in name for name in names)


def read_json(
    builder: datasets.DatasetBuilder,
    languages: Sequence[str],
    streaming: bool,
    columns: Columns | None = None,
) -> tuple[dict[str, datasets.Dataset | datasets.IterableDataset], dict[str, list[str]]]:
    """Read the splits of a dataset in JSON files.

    Args:
        builder: Builder for which `is_json` is true.
        languages: Source and target language.
        streaming: Return streams, which read the files during training.
        columns: Field of each language; by default the texts are in the field "translation", or, if
            there is no such field, in fields with the languages as names.

    Returns:
        Splits, and the languages of each split. A text that is missing in a record is None.

    Raises:
        ValueError: If a value is not a text, there are no translations, or a file cannot be read;
            names the record.
    """
    files = builder.config.data_files
    wanted = [str(name) for name in column_names(languages, columns)] if columns else []
    known = {split: _languages(names, languages, wanted) for split, names in files.items()}
    fields = next(filter(None, (fields for _, fields in known.values())), ())
    cache_key = {"hash": builder.hash}
    if builder.repo_id is not None:
        # use the configuration's name, because without a network the library finds prepared data
        # only by this name. The hash distinguishes the languages and columns
        name = builder.config.name
        cache_key = {"config_name": name, "config_id": name}
        cache_key["hash"] = "-".join([builder.hash, *languages, *wanted])
    records = JsonRecords(
        dataset_name=builder.dataset_name,
        base_path=builder.base_path,
        repo_id=builder.repo_id,
        data_files=files,
        languages=tuple(languages),
        fields=fields,
        **cache_key,
    )
    of_splits = {split: found for split, (found, _) in known.items()}
    if streaming:
        return dict(records.as_streaming_dataset()), of_splits
    try:
        records.download_and_prepare()
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from error
        raise
    return dict(records.as_dataset()), of_splits


def _languages(
    names: Sequence[str], languages: Sequence[str], columns: Sequence[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Return the languages of a split, and the `fields` of `JsonRecordsConfig` for its texts.

    Reading stops at the first record after which the requested languages are found.
    """
    found: set[str] = set()
    fields: set[str] = set()
    for name in names:
        for chunk in _chunks(name, name):
            for record in _records(chunk.decode(errors="replace"), name):
                if not isinstance(record, dict):
                    continue
                fields |= record.keys()
                column = record.get(COLUMN)
                found |= column.keys() if isinstance(column, dict) else set()
                if columns and fields.issuperset(columns):
                    return sorted(languages), tuple(columns)
                if not columns and found.issuperset(languages):
                    return sorted(found), ()
                if not columns and COLUMN not in fields and fields.issuperset(languages):
                    return sorted(languages), tuple(languages)
    if columns or not found:
        rule = f"a column {COLUMN!r} with a text for each language, or a column for each language"
        if columns:
            rule = f"the columns {' and '.join(map(repr, columns))}"
        raise ValueError(
            f"{', '.join(names)} must have {rule}, got {', '.join(sorted(fields)) or 'no records'}."
        )
    return sorted(found), ()


def _records(text: str, name: str) -> Iterator[Any]:
    """Parse consecutive records, which need not be on separate lines."""
    decoder, position = json.JSONDecoder(), 0
    while match := NO_SPACE.search(text, position):
        try:
            record, position = decoder.raw_decode(text, match.start())
        except ValueError:
            # continue with the next line: the error is reported later, when the data is read
            position = text.find("\n", match.start()) + 1 or len(text)
            continue
        except RecursionError as error:
            raise _too_deep(name) from error
        yield record


def _tables(
    path: str, name: str, languages: Sequence[str], fields: Sequence[str]
) -> Iterator[pa.Table]:
    schema = pa.schema([(COLUMN, pa.struct([(language, pa.string()) for language in languages]))])
    if fields:
        schema = pa.schema([(field, pa.string()) for field in fields])
    parsing = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    num_read = 0
    for chunk in _chunks(path, name):
        if chunk.isspace():
            continue
        # parse the chunk as a single block: with several blocks, each would count its records from
        # 0, so an error could not name the record
        reading = pyarrow.json.ReadOptions(block_size=len(chunk))
        try:
            table = pyarrow.json.read_json(io.BytesIO(chunk), reading, parsing)
        except pa.ArrowInvalid as error:
            raise ValueError(_record_error(error, chunk, name, num_read)) from error
        num_read += len(table)
        yield with_translations(table, fields, languages) if fields else table


def _chunks(path: str, name: str) -> Iterator[bytes]:
    """Read a file in chunks of whole lines; a JSON list of records is converted to lines."""
    try:
        with fsspec.open(path, "rb", compression=_compression(path, name)) as file:
            held = b""
            while chunk := file.read(CHUNK):
                if file.tell() == len(chunk):
                    chunk = chunk.removeprefix(codecs.BOM_UTF8)
                    if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        raise ValueError(f"{name} must be UTF-8, got UTF-16.")
                    if chunk.lstrip()[:1] == b"[":
                        yield from _list_as_lines(chunk, file, name)
                        return
                # the last line of a chunk can continue in the next chunk
                begun = len(held) - held.rfind(b"\n") - 1
                end = chunk.find(b"\n") + 1 or len(chunk)
                if begun + end > MAX_RECORD_BYTES:
                    raise ValueError(
                        f"{name} must have records of at most {MAX_RECORD_BYTES:,} bytes, one on "
                        "each line, got a longer line."
                    )
                if held and chunk[end - 1 : end] == b"\n":
                    yield held + chunk[:end]
                    held = chunk[end:]
                else:
                    held += chunk
            if held:
                yield held
    except TRUNCATED as error:
        raise ValueError(f"{name} cannot be read to its end: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be UTF-8, got {error.reason}.") from error
    except RecursionError as error:
        raise _too_deep(name) from error


def _too_deep(name: str) -> ValueError:
    return ValueError(f"{name} must hold JSON records, got one that is nested too deeply.")


def _list_as_lines(start: bytes, file: IO[bytes], name: str) -> Iterator[bytes]:
    """Convert a JSON list of records to lines with one record each, in bounded memory."""
    to_text, decoder = codecs.getincrementaldecoder("utf-8")(), json.JSONDecoder()
    text, num_read, arrived = to_text.decode(start).lstrip().removeprefix("["), 0, start
    while arrived:
        arrived = file.read(CHUNK)
        text += to_text.decode(arrived, final=not arrived)
        lines, position = [], 0
        while before := (BEFORE_NEXT if num_read else BEFORE_FIRST).match(text, position):
            try:
                record, position = decoder.raw_decode(text, before.end())
            except ValueError:
                # the record may end in the next chunk
                break
            lines.append(json.dumps(record))
            num_read += 1
        text = text[position:]
        if lines:
            yield "\n".join(lines).encode()
        if len(text) > MAX_RECORD_BYTES:
            break
    if text.strip() != "]":
        raise ValueError(
            f"{name} record {num_read + 1} must be a JSON record of at most {MAX_RECORD_BYTES:,} "
            f"bytes in a list, got {text.strip()[:100]!r}."
        )


def _compression(path: str, name: str) -> str | None:
    """Return the compression of a file, known by its name or its first bytes; None if plain."""
    if name.endswith(".zst") and "zstd" not in available_compressions():
        raise ValueError(f"{name} needs zstandard, which is not installed: pip install zstandard.")
    if infer_compression(name) is None and Path(path).is_file():
        with Path(path).open("rb") as file:
            return "gzip" if file.read(2) == GZIP else None
    return infer_compression(name)


def _record_error(error: pa.ArrowInvalid, chunk: bytes, name: str, num_read: int) -> str:
    """Return the error message for a record that Arrow has refused."""
    found = re.search(r"in row (\d+)", str(error))
    if found is None:
        return f"{name} must hold JSON records: {error}."
    row = int(found[1])
    where = f"{name} record {num_read + row + 1}"
    field = re.search(r"Column\((\S*)\) changed from (\w+) to (\w+)", str(error))
    if field is None:
        return f"{where} must be a JSON record: {str(error).removeprefix('JSON parse error: ')}."
    column, expected, got = field.groups()
    rule = {"string": "a text", "object": "an object"}[expected]
    rule += f" in {column.split('/')[-1]!r}" if column else ""
    lines = [line for line in chunk.splitlines() if line.strip()]
    record = lines[row].decode(errors="replace") if row < len(lines) else ""
    return f"{where} must have {rule}, got {got}: {record[:200]}"


__all__ = ["JsonRecords", "is_json", "read_json"]
