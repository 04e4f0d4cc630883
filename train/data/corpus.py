"""Load parallel text from files, folders or the Hub. Section 5.1."""

import functools
import glob
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets.fingerprint import Hasher
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.text.text import Text
from datasets.packaged_modules.xml.xml import Xml

from ...configuration_vanilla_transformer import closest_name
from ...console import LONGEST_VALUE, shortened
from ...loading import check_local
from ...records import TEXT, list_of, mapping, refuse_lfs_pointer
from ...records import read_json as read_checked_json
from . import tables, text_files, translation_memories
from .cache import ensure_cached_file, naming_full_cache, refuse_unwritable_cache
from .json_records import is_json, read_json
from .tables import (
    Columns,
    column_names,
    columns_flag,
    join_text_columns,
    log_columns,
    read_table,
    side_names,
)
from .text_files import (
    COMPRESSIONS,
    count_sentences,
    decode_line,
    opened,
    read_sentences,
    warn_of_other_lines,
)
from .translation_memories import read_memory

# names of each split in files and in datasets. `datasets` also accepts the other names of the
# validation split
SPLIT_NAMES = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
SPLITS = tuple(SPLIT_NAMES)
WMT14 = "wmt/wmt14"
# number of lines of newstest2013 and newstest2014, by configuration; None stands for all others.
# They are checked because some copies of newstest2014 have only 2,737 lines
WMT14_LINES = {
    None: {"validation": 3000, "test": 3003},
    "hi-en": {"validation": 520, "test": 2507},
}
# number of rows that are written to the cache at once
ROWS_PER_BATCH = 10_000
# suffixes of files with records, which `datasets` or `json_records` reads
RECORD_SUFFIXES = ("json", "jsonl", "ndjson", "parquet", "arrow")
RECORD_FILE = re.compile(rf"\.({'|'.join(RECORD_SUFFIXES)})(\.(gz|xz|bz2|zst))?$", re.IGNORECASE)
# suffixes of tables and translation memories, which this package reads itself
TABLE_SUFFIXES = ("tsv", "csv")
PAIR_SUFFIXES = (*TABLE_SUFFIXES, "tmx")
PAIR_FILE = re.compile(rf"\.({'|'.join(PAIR_SUFFIXES)})(\.(gz|xz|bz2|zst))?$", re.IGNORECASE)
# errors of `datasets` for a folder without files of a known format
NO_DATA_FILES = (
    datasets.exceptions.DataFilesNotFoundError,
    datasets.data_files.EmptyDatasetError,
)
# advice for files that can be converted, by suffix
FORMAT_ADVICE = {
    **dict.fromkeys((".zip", ".tar", ".tgz"), "Unpack the archive."),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "Save it as a table (.csv)."),
    **dict.fromkeys(
        (".po", ".xlf", ".xliff", ".sdlxliff", ".mxliff"),
        "Convert it to a translation memory (.tmx).",
    ),
    **dict.fromkeys(
        (".sgm", ".sgml", ".xml"),
        "Write the text of its segments to a text file for each language, one on each line. "
        "`evaluate --sacrebleu` has the test sets of WMT and IWSLT.",
    ),
    ".txt": "If tabs separate its columns, give it the suffix .tsv. If it has the sentences of one "
    "language, end its name with the language instead of .txt.",
}
# files that `save_to_disk` of `datasets` writes for several splits, and for one
SAVED_SPLITS = mapping({"splits": list_of(TEXT, least=1)})
SAVED_FILES = mapping({"_data_files": list_of(mapping({"filename": TEXT}), least=1)})
# source files that determine the cached pairs, and are part of the cache key
CODE_FILES = (
    __file__,
    *(str(module.__file__) for module in (tables, text_files, translation_memories)),
)


@functools.cache
def _demo_corpus() -> datasets.DatasetDict:
    from .demo_corpus import build_demo_corpus

    return build_demo_corpus()


def load_translations(
    dataset: str,
    name: str | None,
    source_lang: str,
    target_lang: str,
    *,
    revision: str | None = None,
    streaming: bool = False,
    columns: Columns | None = None,
    repair: bool = True,
) -> dict[str, datasets.Dataset | datasets.IterableDataset]:
    """Load parallel text in the translation schema: one column with a text for each language.

    Args:
        dataset: "demo", a Hub name, a file to train on, the prefix of two text files to train on
            (`PREFIX.en` and `PREFIX.de`), or a folder. A file contains records (.jsonl, .parquet),
            a table (.tsv, .csv) or a translation memory (.tmx). A folder contains files or pairs of
            text files that are named train, validation and test. Files are plain or compressed
            (.gz, .bz2, .xz, .zst). A folder can also be one that `datasets` saved to disk.
        name: Configuration of the dataset; must be None for text files, tables and memories.
        source_lang: Language to translate from.
        target_lang: Language to translate into.
        revision: Commit, branch or tag of a dataset on the Hub.
        streaming: Whether to read the training split during training, without storing it.
        columns: Column of each language in a table or in records; its name, or its number from 1
            in a table without names. By default the column names are the languages. Must be None
            for text files and memories.
        repair: Whether to replace bytes of the training split that are not UTF-8 by U+FFFD, so that
            training drops and counts these pairs. In all other splits, such bytes are an error.

    Returns:
        Splits, each with the single column "translation".

    Raises:
        ValueError: If the dataset cannot be loaded, lacks a language, has several files for a
            split, or is an incomplete copy of WMT14.
        OSError: If the cache of `datasets` cannot be written, or its disk is full; names it.
    """
    if not dataset:
        raise ValueError("dataset must not be empty, got ''.")
    languages = (source_lang, target_lang)
    pair_files = _find_pair_files(dataset, languages)
    # languages in the JSON files of each split; the features of such a split name the requested
    # languages instead
    json_languages: dict[str, list[str]] = {}
    if name is not None and (pair_files or dataset == "demo"):
        raise ValueError(
            f"name must be null because {dataset!r} has no configurations, got {name!r}."
        )
    if columns is not None and not _has_columns(dataset, pair_files):
        raise ValueError(f"columns must be null because {dataset!r} has no columns, got {columns}.")
    if revision is not None and is_local(dataset, source_lang, target_lang):
        raise ValueError(
            f"revision must be null because {dataset!r} is not on the Hub, got {revision!r}."
        )
    # a local folder or text files named "demo" take precedence over the demo corpus
    if dataset == "demo" and not pair_files:
        splits = dict(_demo_corpus())
        if streaming:
            splits["train"] = splits["train"].to_iterable_dataset()
    elif pair_files:
        splits = {
            split: _read_pair_files(split, paths, languages, columns, streaming, repair)
            for split, paths in pair_files.items()
        }
    else:
        refuse_unloadable(dataset, source_lang, target_lang)
        with naming_full_cache():
            splits, json_languages = _load_with_datasets(
                dataset, name, languages, revision, streaming, columns, repair
            )
    splits = _rename_validation(dataset, splits)
    # "wmt14" is the former name of the same dataset, which the Hub redirects
    if dataset in (WMT14, "wmt14") and not is_local(dataset, source_lang, target_lang):
        _refuse_incomplete_wmt14(name, splits)
    for split, rows in splits.items():
        corpus_languages = json_languages.get(split) or _find_languages(dataset, rows, languages)
        for setting, language in (("source_lang", source_lang), ("target_lang", target_lang)):
            if language not in corpus_languages:
                raise ValueError(
                    f"{setting} must be one of {', '.join(corpus_languages)} in split {split} of "
                    f"dataset {dataset!r}, got {language!r}."
                    f"{closest_name(language, corpus_languages)}"
                )
    return {split: rows.select_columns("translation") for split, rows in splits.items()}


def _rename_validation(dataset: str, splits: dict[str, Any]) -> dict[str, Any]:
    """Give a split "valid", "val" or "dev" the name "validation"."""
    names = [split for split in SPLIT_NAMES["validation"] if split in splits]
    if "validation" in names:
        return splits
    if len(names) > 1:
        raise ValueError(
            f"dataset {dataset!r} must have one split for validation, got {' and '.join(names)}: "
            "give one of them the name 'validation'."
        )
    return {"validation" if split in names else split: rows for split, rows in splits.items()}


def _load_with_datasets(
    dataset: str,
    name: str | None,
    languages: tuple[str, str],
    revision: str | None,
    streaming: bool,
    columns: Columns | None,
    repair: bool,
) -> tuple[dict[str, datasets.Dataset | datasets.IterableDataset], dict[str, list[str]]]:
    """Load a dataset with `datasets`; return its splits, and the languages of splits in JSON.

    In a folder, `datasets` only finds the JSON files and tables of each split: it would parse them
    by other rules.
    """
    load_arguments: dict[str, Any] = {"path": dataset}
    # a single file becomes the training split
    record_files = {"train": Path(dataset)} if Path(dataset).is_file() else {}
    record_files |= _find_capital_records(dataset)
    if record_files:
        file_format = _file_format(next(iter(record_files.values())), RECORD_FILE)
        load_arguments = {
            "path": file_format if file_format in ("parquet", "arrow") else "json",
            "data_files": {
                split: glob.escape(str(path.resolve())) for split, path in record_files.items()
            },
        }
    if saved_files := _find_saved_files(Path(dataset)):
        load_arguments = {"path": "arrow", "data_files": saved_files}
    whole_path = str(Path(dataset).resolve())
    # `datasets` would read this path as a pattern, and load the folders that match it, or none
    if Path(dataset).is_dir() and not saved_files and glob.has_magic(whole_path):
        raise ValueError(
            "dataset must be a folder whose absolute path has no *, ? or [, which the library "
            f"datasets reads as a pattern, got {whole_path!r}: rename the folder, or give a file."
        )
    if Path(dataset).exists() and "::" in whole_path:
        raise ValueError(
            "dataset must have no :: in its absolute path, because the library datasets reads :: "
            f"as a separator of URLs, got {whole_path!r}: rename the folder or the file."
        )
    # `datasets` locks a file in its cache, even if it reads a dataset from there
    refuse_unwritable_cache(Path(datasets.config.HF_DATASETS_CACHE))
    # without a network, the library loads the prepared folder that was modified last. So update the
    # modification time of the folders with these languages
    language_pair = "-".join(map(glob.escape, languages))
    for prepared_folder in _prepared_folder(dataset).glob(f"*/*/*-{language_pair}"):
        os.utime(prepared_folder)
    try:
        builder = datasets.load_dataset_builder(**load_arguments, name=name, revision=revision)
        # `datasets` reads XML as one text, for example the test sets of WMT
        if isinstance(builder, Xml) and Path(dataset).is_dir():
            raise datasets.exceptions.DataFilesNotFoundError
        if Path(dataset).exists():
            for file in chain.from_iterable((builder.config.data_files or {}).values()):
                refuse_lfs_pointer(file)
        has_records = is_json(builder)
        has_tables = isinstance(builder, Csv) and Path(dataset).is_dir()
        if isinstance(builder, Text) and Path(dataset).is_dir():
            raise ValueError(
                "text must be in a file for each language, such as train.en and train.de: rename "
                "the files."
            )
        if not (has_records or has_tables):
            splits = datasets.load_dataset(
                **load_arguments, name=name, revision=revision, streaming=streaming
            )
    # the library raises RuntimeError for a dataset that is a loading script
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        settings = {"name": name, "revision": revision}
        described = " and ".join(f"{key} {value!r}" for key, value in settings.items() if value)
        reason = " ".join(str(error.__cause__ or error).split())
        if isinstance(error, NO_DATA_FILES) and Path(dataset).is_dir():
            reason = (
                "it must have a table or records for each split, such as train.tsv, or a text file "
                f"for each language, such as train.{languages[0]} and train.{languages[1]}"
            )
        raise ValueError(
            f"dataset {dataset!r}{f' with {described}' if described else ''} cannot be loaded"
            f"{_folder_description(dataset)}: {reason}"
        ) from error
    json_languages: dict[str, list[str]] = {}
    if has_records:
        splits, json_languages = read_json(builder, languages, streaming, columns)
    elif has_tables:
        splits = {
            str(split): _read_pair_files(
                str(split), _as_tables(files), languages, columns, streaming, repair
            )
            for split, files in builder.config.data_files.items()
        }
    else:
        splits = {
            split: _to_translation_schema(dataset, rows, languages, columns)
            for split, rows in splits.items()
        }
    if streaming:
        splits |= {
            split: _read_into_memory(rows) for split, rows in splits.items() if split != "train"
        }
    return splits, json_languages


def _as_tables(names: Sequence[str]) -> tuple[Path, ...]:
    for name in names:
        if not PAIR_FILE.search(name):
            raise ValueError(f"{name} must be a table (.tsv or .csv): unpack it.")
    return tuple(map(Path, names))


def _find_capital_records(dataset: str) -> dict[str, Path]:
    """Return the file of each split in a folder if a suffix has capitals; else no files.

    `datasets` itself finds only suffixes in lower case.
    """
    files = {
        split: path
        for split, names in SPLIT_NAMES.items()
        for name in names
        for path in _find_files(str(Path(dataset, name)), *RECORD_SUFFIXES)
    }
    return files if any(path.name != path.name.lower() for path in files.values()) else {}


def _find_saved_files(folder: Path) -> dict[str, list[str]]:
    """Return the files of each split in a folder from `save_to_disk`; empty for other folders.

    The folder can also have cache files of `map`, which are not part of the dataset.
    """
    split_folders = {"train": folder}
    if (folder / datasets.config.DATASETDICT_JSON_FILENAME).is_file():
        splits = read_checked_json(
            folder / datasets.config.DATASETDICT_JSON_FILENAME, SAVED_SPLITS
        )["splits"]
        split_folders = {split: folder / split for split in splits}
    elif not (
        (folder / datasets.config.DATASET_STATE_JSON_FILENAME).is_file()
        and (folder / datasets.config.DATASET_INFO_FILENAME).is_file()
    ):
        return {}
    return {
        split: [
            glob.escape(str((split_folder / file["filename"]).resolve()))
            for file in read_checked_json(
                split_folder / datasets.config.DATASET_STATE_JSON_FILENAME, SAVED_FILES
            )["_data_files"]
        ]
        for split, split_folder in split_folders.items()
    }


def refuse_unloadable(dataset: str, *languages: str):
    """Refuse a file of an unknown kind, and a dataset that is neither local nor on the Hub.

    Args:
        dataset: Name or path of a dataset, as for `load_translations`.
        *languages: Source and target language.

    Raises:
        ValueError: If the dataset cannot be loaded. Only a valid Hub name is looked up on the Hub.
    """
    path = Path(dataset)
    if is_file_name(dataset) and not path.exists():
        raise ValueError(f"dataset must be a file that exists, got {dataset!r}.")
    refuse_other_languages(dataset, *languages)
    if path.is_file() and not is_file_name(dataset):
        raise ValueError(
            "dataset must be a file of records (.jsonl, .json, .parquet or .arrow), a table (.tsv "
            "or .csv), a translation memory (.tmx), or the prefix of two text files, before "
            f".{languages[0]} and .{languages[1]}, got {dataset!r}."
            + (_closest_prefix(path, languages) or _format_advice(path))
        )
    # refuse a folder whose tables or memories have other names: `datasets` would load these files,
    # but would parse them by other rules
    if description := describe_pair_files(dataset, *languages):
        raise ValueError(
            "dataset must be a file, or a folder with files named train, validation and test, got "
            f"{dataset!r}{description}"
        )
    # accept a dataset that the library prepared earlier, because it loads without a network
    is_address = "://" in dataset or dataset.startswith("buckets/")
    if not (path.exists() or _prepared_folder(dataset).is_dir() or is_address):
        check_local(dataset, "dataset must be a file, a folder or a Hub name", "dataset")


def refuse_other_languages(dataset: str, *languages: str):
    """Refuse a prefix of text files that has files in other languages only.

    Args:
        dataset: Name or path of a dataset that is not local, as for `load_translations`.
        *languages: Source and target language.

    Raises:
        ValueError: If there are such files in several languages; names them.
    """
    if Path(dataset).exists():
        return
    folder, name = os.path.split(dataset)
    paths = Path(folder).glob(f"{glob.escape(name)}.*")
    stems = {path.stem if path.suffix.lower() in COMPRESSIONS else path.name for path in paths}
    suffixes = sorted(stem.removeprefix(f"{name}.") for stem in stems)
    names = side_names() if len(suffixes) > 1 else set()
    found = [
        suffix
        for suffix in suffixes
        if re.split("[_-]", suffix.casefold().removesuffix(".txt"))[0] in names
    ]
    # a single file, such as `wmt14.pl`, is not a corpus
    if len(found) > 1:
        advice = "set source_lang and target_lang to two of these languages, or rename the files"
        if any(suffix.endswith(".txt") for suffix in found):
            advice = "rename the files, without .txt"
        raise ValueError(
            f"dataset must be the prefix of two text files, before .{languages[0]} and "
            f".{languages[1]}, got {dataset!r}, which has files in {', '.join(found)}: {advice}."
        )


def _closest_prefix(path: Path, languages: Sequence[str]) -> str:
    """Return a sentence with the prefix of two text files, if a path is that of one of them."""
    name = str(path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path)
    for language in languages:
        prefix = name.removesuffix(f".{language}")
        if prefix != name and all(_find_files(prefix, language) for language in languages):
            return f" Did you mean the prefix {prefix!r}?"
    return ""


def _format_advice(path: Path) -> str:
    """Return advice for a file of an unknown kind, or an empty string."""
    # the order of `FORMAT_ADVICE` decides between several suffixes: x.txt.zip is an archive
    suffixes = {suffix.lower() for suffix in path.suffixes}
    return next(
        (f" {advice}" for suffix, advice in FORMAT_ADVICE.items() if suffix in suffixes), ""
    )


def _prepared_folder(dataset: str) -> Path:
    """Return the folder in which the library stores a dataset from the Hub."""
    *user, name = dataset.split("/")
    folder = "___".join([*user, camelcase_to_snakecase(name)])
    return Path(datasets.config.HF_DATASETS_CACHE, folder)


def _read_into_memory(rows: datasets.IterableDataset) -> datasets.Dataset:
    return datasets.Dataset.from_list(list(rows), features=rows.features)


def _refuse_incomplete_wmt14(name: str | None, splits: dict[str, datasets.Dataset]):
    for split, expected_lines in WMT14_LINES.get(name, WMT14_LINES[None]).items():
        num_lines = len(splits[split]) if split in splits else 0
        if num_lines != expected_lines:
            raise ValueError(
                f"{split} of {WMT14} {name} must have {expected_lines:,} lines, got {num_lines:,}: "
                "load another revision."
            )


def is_file_name(dataset: str) -> bool:
    """Return whether a dataset has the name of a file with pairs, which no Hub name has.

    Args:
        dataset: Name or path of a dataset, as for `load_translations`.

    Returns:
        False for a folder, a prefix of text files and a Hub name.
    """
    return bool(RECORD_FILE.search(dataset) or PAIR_FILE.search(dataset))


def is_local(dataset: str, source_lang: str, target_lang: str) -> bool:
    """Return whether a dataset is the demo corpus, a folder, a file or a prefix of text files.

    Args:
        dataset: Name or path of a dataset, as for `load_translations`.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        False for a dataset that can only be on the Hub.
    """
    # only files with a language suffix count: another file with this prefix, such as a recipe, does
    # not make a Hub name local
    is_prefix = bool(_find_files(dataset, source_lang, target_lang))
    return dataset == "demo" or Path(dataset).exists() or is_prefix


def is_available_offline(dataset: str, source_lang: str, target_lang: str) -> bool:
    """Return whether a dataset can be loaded without a download.

    Args:
        dataset: Name or path of a dataset, as for `load_translations`.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        False for a dataset on the Hub that was not loaded before.
    """
    return is_local(dataset, source_lang, target_lang) or _prepared_folder(dataset).is_dir()


def has_columns(dataset: str, source_lang: str, target_lang: str) -> bool:
    """Return whether the setting `columns` can apply to a dataset.

    Args:
        dataset: Name or path of a dataset, as for `load_translations`.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        False for the demo corpus, text files and translation memories.

    Raises:
        ValueError: If a split has several files, of which only one would be read.
    """
    return _has_columns(dataset, _find_pair_files(dataset, (source_lang, target_lang)))


def _has_columns(dataset: str, pair_files: Mapping[str, tuple[Path, ...]]) -> bool:
    if not pair_files:
        return dataset != "demo"
    return any(_file_format(paths[0]) in TABLE_SUFFIXES for paths in pair_files.values())


def is_hub_name(dataset: str, source_lang: str, target_lang: str) -> bool:
    """Return whether a dataset has a Hub name and is not local, so that others can find it there.

    Args:
        dataset: Name or path of a dataset, as for `load_translations`.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        False for a local dataset, and for a name that the Hub does not allow.
    """
    is_path = is_local(dataset, source_lang, target_lang) or is_file_name(dataset)
    return not is_path and re.fullmatch(r"[\w.-]+/[\w.-]+", dataset) is not None


def dataset_commit(
    dataset: str, name: str | None, revision: str | None, source_lang: str, target_lang: str
) -> str | None:
    """Find the commit of a dataset on the Hub.

    Args:
        dataset: Dataset that `load_translations` has loaded.
        name: Configuration of the dataset.
        revision: Commit, branch or tag of a dataset on the Hub.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        Commit hash of the revision; None for a dataset that is not on the Hub.
    """
    if is_local(dataset, source_lang, target_lang):
        return None
    data_files = datasets.load_dataset_builder(dataset, name, revision=revision).config.data_files
    commit_match = re.search(r"@([0-9a-f]{40})/", str(data_files))
    return commit_match and commit_match[1]


def _find_languages(
    dataset: str,
    rows: datasets.Dataset | datasets.IterableDataset,
    wanted_languages: Sequence[str],
) -> list[str]:
    # a stream may have no features before it is read
    columns: dict[str, Any] = rows.features or next(iter(rows), {})
    translation_column = columns.get("translation")
    if isinstance(translation_column, datasets.Translation):
        return sorted(translation_column.languages)
    # refuse columns of the library's type `Json`, whose values can be numbers
    if isinstance(translation_column, dict) and not any(
        type(feature).__name__ == "Json" for feature in translation_column.values()
    ):
        return sorted(translation_column)
    column_description = f"{translation_column}" if translation_column else ", ".join(columns)
    raise ValueError(
        f"dataset {dataset!r} must have a column 'translation' with a text for each language, or "
        f"a column of text for each language, got {column_description or 'none'}. To read other "
        f"columns, give their names: {columns_flag(wanted_languages)}."
    )


def _flatten(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns and the fields inside of columns, by names with dots between."""
    flat_features: dict[str, Any] = {}
    for name, feature in features.items():
        inner_features = feature.flatten() if isinstance(feature, datasets.Translation) else feature
        if isinstance(inner_features, Mapping):
            inner_features = _flatten(inner_features)
            flat_features |= {f"{name}.{inner}": found for inner, found in inner_features.items()}
    return flat_features | dict(features)


def _to_translation_schema(
    dataset: str,
    rows: datasets.Dataset | datasets.IterableDataset,
    languages: Sequence[str],
    columns: Columns | None,
) -> datasets.Dataset | datasets.IterableDataset:
    """Convert columns of text to the translation schema."""
    # a stream may have no features before it is read
    input_features: dict[str, Any] = rows.features or next(iter(rows), {})
    names = column_names(languages, columns)
    if columns is None and (
        "translation" in input_features or not set(names) <= set(input_features)
    ):
        return rows
    column_types = {
        name: getattr(column_type, "dtype", type(column_type).__name__)
        for name, column_type in _flatten(input_features).items()
    }
    for name in names:
        if column_types.get(str(name)) not in ("string", "large_string", "string_view", "str"):
            found = ", ".join(f"{found} ({type_name})" for found, type_name in column_types.items())
            raise ValueError(
                f"dataset {dataset!r} must have a column {name!r} of text, got {found}. Set other "
                "names with --columns."
            )
    output_features = datasets.Features(
        {"translation": datasets.Translation(languages=list(languages))}
    )
    paths = [[str(name)] if name in input_features else str(name).split(".") for name in names]
    input_columns = list(dict.fromkeys(path[0] for path in paths))
    # select the columns first, so that `map` need not remove an input column named "translation":
    # in a stream, this would also remove the output column of the same name
    return (
        rows.select_columns(input_columns)
        .with_format("arrow")
        .map(
            join_text_columns,
            batched=True,
            remove_columns=[name for name in input_columns if name != "translation"],
            features=output_features,
            fn_kwargs={"paths": paths, "languages": list(languages)},
        )
        .with_format(None)
    )


def _find_files(prefix: str, *suffixes: str) -> list[Path]:
    """Return the files with a prefix and one of some suffixes, plain or compressed.

    The case of a format or compression suffix is ignored. The case of a language must match.
    """
    folder, name = os.path.split(prefix)
    paths = sorted(path for path in Path(folder).glob(f"{glob.escape(name)}.*") if path.is_file())

    def has_suffix(path: Path, suffix: str) -> bool:
        stem = path.stem if path.suffix.lower() in COMPRESSIONS else path.name
        found = stem.removeprefix(f"{name}.")
        return suffix == (found.lower() if suffix in PAIR_SUFFIXES + RECORD_SUFFIXES else found)

    return [path for suffix in suffixes for path in paths if has_suffix(path, suffix)]


def _find_pair_files(dataset: str, languages: tuple[str, str]) -> dict[str, tuple[Path, ...]]:
    """Return the files of each split: two text files, or one table or translation memory.

    Raises:
        ValueError: If a split has several files, of which only one would be read.
    """
    split_files: dict[str, tuple[Path, ...]] = {}
    record_files: list[Path] = []
    for split, names in SPLIT_NAMES.items():
        prefixes = [str(Path(dataset, name)) for name in names]
        text_files: list[Path] = []
        for prefix in prefixes + [dataset] * (split == "train"):
            source_files, target_files = (_find_files(prefix, language) for language in languages)
            if bool(source_files) != bool(target_files):
                missing_language = languages[1] if source_files else languages[0]
                raise ValueError(
                    f"{prefix}.{missing_language} must exist beside "
                    f"{(source_files + target_files)[0]}."
                )
            text_files += source_files + target_files
        tables = [path for prefix in prefixes for path in _find_files(prefix, *PAIR_SUFFIXES)]
        records = [path for prefix in prefixes for path in _find_files(prefix, *RECORD_SUFFIXES)]
        files = text_files + tables + records
        if len(files) > (2 if text_files else 1):
            raise ValueError(
                f"the split {split} must be in one file, or in two text files, one for each "
                f"language, got {_join_names(files)}."
            )
        if files and not records:
            split_files[split] = tuple(files)
        record_files += records
    all_split_files = _find_longer_names(Path(dataset), languages) | split_files
    if "train" in all_split_files:
        split_files = all_split_files
    if split_files and record_files:
        pair_files = [path for files in split_files.values() for path in files]
        raise ValueError(
            "the splits of a folder must all be records (.jsonl, .json, .parquet or .arrow), or "
            f"none of them, got {_join_names(pair_files)} beside {_join_names(record_files)}."
        )
    if PAIR_FILE.search(dataset) and Path(dataset).is_file():
        split_files["train"] = (Path(dataset),)
    return split_files


def _find_longer_names(folder: Path, languages: tuple[str, str]) -> dict[str, tuple[Path, ...]]:
    """Return the two text files of each split whose names have more words, as in `train.tok.en`.

    A split with several such pairs of files is left out.
    """
    all_prefixes = _text_prefixes(folder, languages)
    split_files = {}
    for split, names in SPLIT_NAMES.items():
        prefixes = [prefix for prefix in all_prefixes if prefix.split(".")[0] in names]
        files = [
            path for prefix in prefixes for path in _find_files(f"{folder / prefix}", *languages)
        ]
        if len(prefixes) == 1 and len(files) == 2:
            split_files[split] = tuple(files)
    return split_files


def _text_prefixes(folder: Path, languages: Sequence[str]) -> list[str]:
    """Return what the names of two text files in a folder share, before the languages."""
    text_file = re.compile(rf"(.+)\.({'|'.join(map(re.escape, languages))})(?i:\.(gz|bz2|xz|zst))?")
    matches = filter(None, (text_file.fullmatch(path.name) for path in folder.glob("*")))
    names = {(match[1], match[2]) for match in matches}
    # a single file, such as README.de, is not a corpus
    return sorted(
        prefix
        for prefix, language in names
        if language == languages[0] and (prefix, languages[1]) in names
    )


def _join_names(paths: Sequence[Path]) -> str:
    return shortened(" and ".join(map(str, paths)), 3 * LONGEST_VALUE)


def describe_pair_files(dataset: str, source_lang: str, target_lang: str) -> str:
    """List the tables, memories and pairs of text files in a folder, for an error.

    Args:
        dataset: Path of the folder.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        Names of the files, and how to read text files by their prefix; an empty string without
        such files.
    """
    folder = Path(dataset)
    # suggest training text, not a test set
    prefixes = sorted(
        _text_prefixes(folder, (source_lang, target_lang)), key=lambda prefix: "train" not in prefix
    )
    names = [path.name for path in folder.glob("*") if PAIR_FILE.search(path.name)]
    names += [
        f"{prefix}.{language}" for prefix in prefixes for language in (source_lang, target_lang)
    ]
    if not names:
        return ""
    hint = f" To read {prefixes[0]}.*, set --dataset {folder / prefixes[0]}." if prefixes else ""
    return f" with {shortened(', '.join(sorted(names)), LONGEST_VALUE)}.{hint}"


def _folder_description(dataset: str) -> str:
    """Return the part of the error that lists the training files, or all files, of a folder."""
    folder = Path(dataset)
    if not folder.exists():
        return ", and is not a local folder"
    # the folder may contain text files in other languages than the requested ones
    paths = sorted(folder.glob("train.*")) or sorted(folder.glob("*"))
    names = shortened(", ".join(path.name for path in paths), LONGEST_VALUE)
    return f", and has {names}" if names else ""


def _read_pairs(
    paths: tuple[Path, ...],
    languages: tuple[str, str],
    columns: Columns | None,
    repair: bool,
) -> Iterator[dict[str, Any]]:
    pairs: Iterator[Any]
    file_format = _file_format(paths[0])
    if not file_format:
        pairs = _read_text_pairs(paths, languages, repair)
    elif file_format == "tmx":
        pairs = read_memory(paths[0], languages)
    else:
        pairs = chain.from_iterable(
            read_table(path, _file_format(path) == "csv", languages, columns, repair)
            for path in paths
        )
    for pair in pairs:
        yield {"translation": pair}


def _file_format(path: Path, pattern: re.Pattern[str] = PAIR_FILE) -> str:
    match = pattern.search(path.name)
    return match[1].lower() if match else ""


def _read_text_pairs(
    paths: tuple[Path, ...], languages: tuple[str, str], repair: bool
) -> Iterator[dict[str, str]]:
    with opened(paths[0]) as source_file, opened(paths[1]) as target_file:
        sides = (
            read_sentences(file, path, repair)
            for file, path in zip((source_file, target_file), paths, strict=True)
        )
        for texts in zip(*sides, strict=True):
            yield dict(zip(languages, texts, strict=True))


def _read_pair_files(
    split: str,
    paths: tuple[Path, ...],
    languages: tuple[str, str],
    columns: Columns | None,
    streaming: bool,
    repair: bool,
) -> datasets.Dataset | datasets.IterableDataset:
    line_counts = [] if _file_format(paths[0]) else [count_sentences(path) for path in paths]
    if len(set(line_counts)) > 1:
        raise ValueError(
            f"{paths[0]} and {paths[1]} must have the same number of lines, "
            f"got {line_counts[0]} and {line_counts[1]}."
        )
    if 0 in line_counts:
        raise ValueError(f"{paths[0]} must have at least one line, got none.")
    if line_counts:
        for path in paths:
            with opened(path) as file:
                warn_of_other_lines(next(read_sentences(file, path, repair=True)), path)
    is_training_split = split == "train"
    read_arguments: dict[str, Any] = {
        "paths": paths,
        "languages": languages,
        "columns": columns,
        # no line of an evaluation split may be dropped
        "repair": repair and is_training_split,
    }
    features = datasets.Features({"translation": datasets.Translation(languages=list(languages))})
    if streaming and is_training_split:
        # read the whole file once before training, because an error in the middle of the file would
        # end a long run
        if not (line_counts or sum(1 for _ in _read_pairs(**read_arguments))):
            raise ValueError(f"{paths[0]} must have at least one pair, got none.")
        _log_columns(paths[0], languages, columns)
        return datasets.IterableDataset.from_generator(
            _read_pairs, features=features, gen_kwargs=read_arguments
        )

    def write(path: Path):
        schema = features.arrow_schema
        pairs = _read_pairs(**read_arguments)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            while rows := list(islice(pairs, ROWS_PER_BATCH)):
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))

    # size and modification time are part of the key, so that a changed file is read again
    stamps = [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = Hasher.hash([read_arguments, stamps, str(features)])
    rows = datasets.Dataset.from_file(str(ensure_cached_file(f"{key}.arrow", CODE_FILES, write)))
    if len(rows) == 0:
        raise ValueError(f"{paths[0]} must have at least one pair, got none.")
    _log_columns(paths[0], languages, columns)
    return rows


def _log_columns(path: Path, languages: tuple[str, str], columns: Columns | None):
    if (file_format := _file_format(path)) in TABLE_SUFFIXES:
        log_columns(path, file_format == "csv", languages, columns)


def texts_of(
    table: pa.Table, languages: Sequence[str], split: str, first_line: int = 1, repair: bool = False
) -> list[list[str]]:
    """Extract the texts of some languages from a column of translations.

    Args:
        table: Rows with the column "translation".
        languages: Languages to extract.
        split: Name of the split, for an error.
        first_line: Number in the split, from 1, of the first row of the table, for an error.
        repair: Whether to replace bytes that are not UTF-8 by U+FFFD, as in text files, and a
            missing text by an empty string.

    Returns:
        Texts, a list for each language.

    Raises:
        ValueError: If a side of a row is not text; names the row.
    """
    sides = []
    for language in languages:
        column = pc.struct_field(table["translation"], language)
        try:
            texts = column.to_pylist()
        except UnicodeDecodeError:
            # some programs write bytes that are not UTF-8 into a text column
            lines = column.cast(pa.binary()).to_pylist()
            texts = [
                line and decode_line(line, f"{split} line {number} in {language!r}", repair)
                for number, line in enumerate(lines, start=first_line)
            ]
        if repair:
            texts = ["" if text is None else text for text in texts]
        for line, text in enumerate(texts, start=first_line):
            if not isinstance(text, str):
                row = table["translation"][line - first_line].as_py()
                raise ValueError(
                    f"{split} line {line} must have text in {language!r}, got {text!r} in {row}."
                )
        sides.append(texts)
    return sides


def text_hash(rows: datasets.Dataset, languages: Sequence[str], split: str) -> str:
    """Hash the texts of a split. The hash does not depend on the path or the storage format.

    Args:
        rows: Rows of the split, with the column "translation".
        languages: Source and target language.
        split: Name of the split, for an error.

    Returns:
        SHA-256 of the lengths and bytes of all texts.

    Raises:
        ValueError: If the column of a language does not contain text; names the row.
    """
    language_hashes = [(hashlib.sha256(), hashlib.sha256()) for _ in languages]
    for table in rows.with_format("arrow").iter(batch_size=10_000):
        for language, (sizes_hash, bytes_hash) in zip(languages, language_hashes, strict=True):
            column = pc.struct_field(table["translation"], language)
            try:
                texts = column.cast(pa.large_binary()).combine_chunks()
            except pa.ArrowNotImplementedError:
                # `texts_of` raises a clearer error, which names the row and its value
                texts_of(table, [language], split)
                raise
            sizes = pc.fill_null(pc.binary_length(texts), -1)
            sizes_hash.update(sizes.to_numpy().astype("<i8"))
            texts = pc.fill_null(texts, b"")
            _, offsets, text_bytes = texts.buffers()
            ends = np.frombuffer(offsets, np.int64)[texts.offset :][: len(texts) + 1]
            if text_bytes is not None:
                bytes_hash.update(memoryview(text_bytes)[ends[0] : ends[-1]])
    digests = [part_hash.digest() for hash_pair in language_hashes for part_hash in hash_pair]
    return hashlib.sha256(b"".join(digests)).hexdigest()
