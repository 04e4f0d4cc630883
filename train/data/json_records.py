"""Read parallel text from JSON files.

A record is {"translation": {"de": ..., "en": ...}}, or has a field for each language.

The JSON reader of `datasets` infers the type of a column from its values, so a single number can
change the type of a column of texts. The reader here has fixed types, and refuses a value of
another type.
"""

import codecs
import dataclasses
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.json
from datasets.packaged_modules.json.json import Json
from fsspec.compression import available_compressions
from fsspec.utils import infer_compression

from ...console import LONGEST_VALUE, shortened
from .tables import Columns, column_names, columns_flag, join_text_columns
from .text_files import GZIP_MAGIC, TRUNCATION_ERRORS

# number of bytes to read at once
BYTES_PER_READ = 10 << 20
# longest record, so that a damaged file cannot fill the memory
MAX_RECORD_BYTES = 10 << 20
TRANSLATION_COLUMN = "translation"
NO_SPACE = re.compile(r"\S")
# separators in a list of records: before the first record, and before each further record
BEFORE_FIRST, BEFORE_NEXT = re.compile(r"\s*"), re.compile(r"\s*,\s*")
# path of the field of each language, from the record to the text
Fields = tuple[tuple[str, ...], ...]


@dataclasses.dataclass
class JsonRecordsConfig(datasets.BuilderConfig):
    """Settings of the reader.

    Args:
        languages: Source and target language.
        fields: For each split, the paths of the fields that contain the source and the target, from
            the record to the text; empty if the texts are in the field "translation".
    """

    languages: tuple[str, ...] = ()
    fields: Mapping[str, Fields] = dataclasses.field(default_factory=dict)


class JsonRecords(datasets.ArrowBasedBuilder):
    """Builder of a dataset from files of JSON records. Other fields of a record are ignored."""

    BUILDER_CONFIG_CLASS = JsonRecordsConfig

    def _info(self) -> datasets.DatasetInfo:
        column = datasets.Translation(languages=list(self.config.languages))
        return datasets.DatasetInfo(features=datasets.Features({TRANSLATION_COLUMN: column}))

    def _split_generators(self, dl_manager) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(
                name=split,
                # one list item for each file, because a stream has a shard for each item
                gen_kwargs={
                    "paths": dl_manager.download(list(names)),
                    "names": list(names),
                    "fields": self.config.fields[str(split)],
                },
            )
            for split, names in self.config.data_files.items()
        ]

    def _generate_tables(
        self, paths: list[str], names: list[str], fields: Fields
    ) -> Iterator[tuple[tuple[int, int], pa.Table]]:
        for file_index, (path, name) in enumerate(zip(paths, names, strict=True)):
            for table_index, table in enumerate(
                _read_tables(path, name, self.config.languages, fields)
            ):
                yield (file_index, table_index), table


def is_json(builder: datasets.DatasetBuilder) -> bool:
    """Return whether a dataset consists of files that this module can read.

    Args:
        builder: Builder from `datasets.load_dataset_builder`.

    Returns:
        False for archives, for encodings other than UTF-8, and for records inside a field of one
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
        streaming: Whether to return streams, which read the files during training.
        columns: Field of each language; by default the texts are in the field "translation", or, if
            there is no such field, in fields with the languages as names.

    Returns:
        Splits, and the languages of each split. A text that is missing in a record is None.

    Raises:
        ValueError: If a value is not a text, there are no translations, or a file cannot be read;
            names the record.
    """
    files = builder.config.data_files
    wanted_fields = [str(name) for name in column_names(languages, columns)] if columns else []
    languages_and_fields = {
        str(split): _find_languages_and_fields(names, languages, wanted_fields)
        for split, names in files.items()
    }
    cache_key = {"hash": builder.hash}
    if builder.repo_id is not None:
        # use the configuration's name, because without a network the library finds prepared data
        # only by this name. The hash distinguishes the languages and columns
        config_name = builder.config.name
        cache_key = {"config_name": config_name, "config_id": config_name}
        cache_key["hash"] = "-".join([builder.hash, *languages, *wanted_fields])
    records_builder = JsonRecords(
        dataset_name=builder.dataset_name,
        base_path=builder.base_path,
        repo_id=builder.repo_id,
        data_files=files,
        languages=tuple(languages),
        fields={split: fields for split, (_, fields) in languages_and_fields.items()},
        **cache_key,
    )
    split_languages = {
        split: found_languages for split, (found_languages, _) in languages_and_fields.items()
    }
    if streaming:
        return dict(records_builder.as_streaming_dataset()), split_languages
    try:
        records_builder.download_and_prepare()
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from error
        raise
    return dict(records_builder.as_dataset()), split_languages


def _find_languages_and_fields(
    names: Sequence[str], languages: Sequence[str], columns: Sequence[str]
) -> tuple[list[str], Fields]:
    """Return the languages of a split, and the `fields` of `JsonRecordsConfig` for its texts.

    Reading stops at the first record after which the requested languages are found.
    """
    found_languages: set[str] = set()
    # path of each field, by its name, in which dots separate the names of nested fields
    found_fields: dict[str, tuple[str, ...]] = {}
    other_records: list[Any] = []
    other_translation: Any = None
    for name in names:
        for chunk in _read_chunks(name, name):
            for record in _parse_records(chunk.decode(errors="replace"), name):
                if not isinstance(record, dict):
                    other_records = other_records or [record]
                    continue
                found_fields |= _field_paths(record)
                translation = record.get(TRANSLATION_COLUMN)
                if isinstance(translation, dict):
                    found_languages |= translation.keys()
                elif other_translation is None:
                    other_translation = translation
                if columns and found_fields.keys() >= set(columns):
                    return sorted(languages), tuple(found_fields[name] for name in columns)
                if not columns and found_languages.issuperset(languages):
                    return sorted(found_languages), ()
                has_no_translations = TRANSLATION_COLUMN not in found_fields
                if not columns and has_no_translations and found_fields.keys() >= set(languages):
                    return sorted(languages), tuple(found_fields[name] for name in languages)
    if columns or not found_languages:
        rule = (
            f"a column {TRANSLATION_COLUMN!r} with a text for each language, or a column for each "
            "language"
        )
        advice = f" To read other columns, give their names: {columns_flag(languages)}."
        if columns:
            rule, advice = f"the columns {' and '.join(map(repr, columns))}", ""
        found = ", ".join(sorted(found_fields)) or "no records"
        if not found_fields and other_records:
            value = json.dumps(other_records[0], ensure_ascii=False)
            found = f"a record that is not an object, {value}"
        elif other_translation is not None and not columns:
            value = shortened(json.dumps(other_translation, ensure_ascii=False), LONGEST_VALUE)
            example = json.dumps(dict.fromkeys(languages, "..."))
            found += f"; {TRANSLATION_COLUMN!r} is {value}, not an object such as {example}"
        raise ValueError(
            f"{', '.join(names)} must have {rule}, got "
            f"{shortened(found, 3 * LONGEST_VALUE)}."
            f"{advice if found_fields else ''}"
        )
    return sorted(found_languages), ()


def _field_paths(record: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the path of each field of a record, by its name."""
    paths: dict[str, tuple[str, ...]] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            inner_paths = _field_paths(value).items()
            paths |= {f"{name}.{inner_name}": (name, *path) for inner_name, path in inner_paths}
    # a name with a dot is that of a field, not of a nested field
    return paths | {name: (name,) for name in record}


def _text_schema(paths: Sequence[Sequence[str]]) -> pa.Schema:
    """Return the schema of records that have texts at some paths."""
    inner_paths: dict[str, list[Sequence[str]]] = {}
    for name, *inner_path in paths:
        inner_paths.setdefault(name, []).append(inner_path)
    return pa.schema(
        [
            (name, pa.struct(_text_schema(inner)) if all(inner) else pa.string())
            for name, inner in inner_paths.items()
        ]
    )


def _parse_records(text: str, name: str) -> Iterator[Any]:
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
            raise _nesting_error(name) from error
        yield record


def _read_tables(
    path: str, name: str, languages: Sequence[str], fields: Fields
) -> Iterator[pa.Table]:
    paths = fields or [(TRANSLATION_COLUMN, language) for language in languages]
    schema = _text_schema(paths)
    parse_options = pyarrow.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="ignore"
    )
    num_read = 0
    for chunk in _read_chunks(path, name):
        if chunk.isspace():
            continue
        # parse the chunk as a single block: with several blocks, each would count its records from
        # 0, so an error could not name the record
        read_options = pyarrow.json.ReadOptions(block_size=len(chunk))
        try:
            table = pyarrow.json.read_json(io.BytesIO(chunk), read_options, parse_options)
        except pa.ArrowInvalid as error:
            raise ValueError(_describe_record_error(error, chunk, name, num_read)) from error
        num_read += len(table)
        yield join_text_columns(table, paths, languages)


def _read_chunks(path: str, name: str) -> Iterator[bytes]:
    """Read a file in chunks of whole lines; a JSON list of records is converted to lines."""
    try:
        with fsspec.open(path, "rb", compression=_find_compression(path, name)) as file:
            pending_bytes = b""
            while chunk := file.read(BYTES_PER_READ):
                if file.tell() == len(chunk):
                    chunk = chunk.removeprefix(codecs.BOM_UTF8)
                    if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        raise ValueError(f"{name} must be UTF-8, got UTF-16.")
                    if chunk.lstrip()[:1] == b"[":
                        yield from _convert_list_to_lines(chunk, file, name)
                        return
                # the last line of a chunk can continue in the next chunk
                last_line_bytes = len(pending_bytes) - pending_bytes.rfind(b"\n") - 1
                first_line_end = chunk.find(b"\n") + 1 or len(chunk)
                if last_line_bytes + first_line_end > MAX_RECORD_BYTES:
                    raise ValueError(
                        f"{name} must have records of at most {MAX_RECORD_BYTES:,} bytes, one on "
                        "each line, got a longer line."
                    )
                if pending_bytes and chunk[first_line_end - 1 : first_line_end] == b"\n":
                    yield pending_bytes + chunk[:first_line_end]
                    pending_bytes = chunk[first_line_end:]
                else:
                    pending_bytes += chunk
            if pending_bytes:
                yield pending_bytes
    except TRUNCATION_ERRORS as error:
        raise ValueError(f"{name} cannot be read to its end: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be UTF-8, got {error.reason}.") from error
    except RecursionError as error:
        raise _nesting_error(name) from error


def _nesting_error(name: str) -> ValueError:
    return ValueError(f"{name} must hold JSON records, got one that is nested too deeply.")


def _convert_list_to_lines(first_chunk: bytes, file: IO[bytes], name: str) -> Iterator[bytes]:
    """Convert a JSON list of records to lines with one record each, in bounded memory."""
    utf8_decoder, json_decoder = codecs.getincrementaldecoder("utf-8")(), json.JSONDecoder()
    text = utf8_decoder.decode(first_chunk).lstrip().removeprefix("[")
    num_read, new_bytes = 0, first_chunk
    while new_bytes:
        new_bytes = file.read(BYTES_PER_READ)
        text += utf8_decoder.decode(new_bytes, final=not new_bytes)
        lines, position = [], 0
        while separator := (BEFORE_NEXT if num_read else BEFORE_FIRST).match(text, position):
            try:
                record, position = json_decoder.raw_decode(text, separator.end())
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
    rest = text.strip()
    if rest.startswith("]") and rest != "]":
        raise ValueError(
            f"{name} must hold records that are objects, in one list or one on each line, got "
            f"after the list: {rest[1:].strip()[:100]!r}."
        )
    if rest != "]":
        raise ValueError(
            f"{name} record {num_read + 1} must be a JSON record of at most {MAX_RECORD_BYTES:,} "
            f"bytes in a list, got {rest[:100]!r}."
        )


def _find_compression(path: str, name: str) -> str | None:
    """Return the compression of a file, known by its name or its first bytes; None if plain."""
    if name.lower().endswith(".zst") and "zstd" not in available_compressions():
        raise ValueError(f"{name} needs zstandard, which is not installed: pip install zstandard.")
    if infer_compression(name) is None and Path(path).is_file():
        with Path(path).open("rb") as file:
            return "gzip" if file.read(2) == GZIP_MAGIC else None
    return infer_compression(name)


def _describe_record_error(error: pa.ArrowInvalid, chunk: bytes, name: str, num_read: int) -> str:
    """Return the error message for a record that Arrow has refused."""
    row_match = re.search(r"in row (\d+)", str(error))
    if row_match is None:
        return f"{name} must hold JSON records: {error}."
    row = int(row_match[1])
    record_name = f"{name} record {num_read + row + 1}"
    type_match = re.search(r"Column\((\S*)\) changed from (\w+) to (\w+)", str(error))
    if type_match is None:
        return (
            f"{record_name} must be a JSON record: {str(error).removeprefix('JSON parse error: ')}."
        )
    column, expected_type, actual_type = type_match.groups()
    rule = {"string": "a text", "object": "an object"}[expected_type]
    rule += f" in {column.split('/')[-1]!r}" if column else ""
    lines = [line for line in chunk.splitlines() if line.strip()]
    record = lines[row].decode(errors="replace") if row < len(lines) else ""
    return f"{record_name} must have {rule}, got {actual_type}: {record[:200]}"
