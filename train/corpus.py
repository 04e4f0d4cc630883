"""Parallel text, from files, folders or the Hub to token ids. Section 5.1."""

import gzip
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import datasets
import numpy as np
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.configuration_vanilla_transformer import closest_name
from vanilla_transformer.train.run_folder import tokenizer_hash

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")


def load_translations(
    dataset: str, name: str | None, source_lang: str, target_lang: str
) -> datasets.DatasetDict:
    """Load parallel text in the translation schema: one column, a text for each language.

    Args:
        dataset: "demo", a Hub name, a local folder, or a prefix of text files: `PREFIX.en`,
            or in a folder `train.en`, `validation.en`, `test.en`; plain or .gz.
        name: Configuration of the dataset; text files have none.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        The splits, with the one column "translation".

    Raises:
        ValueError: If it cannot be loaded, or lacks a language or a split to train on.
    """
    text_files = _text_files(dataset, source_lang, target_lang)
    if dataset == "demo":
        from vanilla_transformer.train.demo_corpus import build_demo_corpus

        splits = build_demo_corpus()
    elif text_files:
        splits = datasets.DatasetDict(
            {
                split: _read_text_files(*paths, source_lang, target_lang)
                for split, paths in text_files.items()
            }
        )
    else:
        try:
            splits = datasets.load_dataset(dataset, name)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"dataset {dataset!r} with name {name!r} cannot be loaded: "
                f"{' '.join(str(error.__cause__ or error).split())}"
            ) from error
    for split, rows in splits.items():
        known = _languages(dataset, rows)
        for setting, language in (("source_lang", source_lang), ("target_lang", target_lang)):
            if language not in known:
                raise ValueError(
                    f"{setting} must be one of {', '.join(known)} in split {split} of dataset "
                    f"{dataset!r}, got {language!r}.{closest_name(language, known)}"
                )
    return splits.select_columns("translation")


def _languages(dataset: str, rows: datasets.Dataset) -> list[str]:
    column = rows.features.get("translation")
    if isinstance(column, datasets.Translation):
        return sorted(column.languages)
    if isinstance(column, dict):
        return sorted(column)
    raise ValueError(
        f"dataset {dataset!r} must have a column 'translation', a text for each language, "
        f"got {', '.join(rows.column_names)}."
    )


def _text_files(dataset: str, *languages: str) -> dict[str, list[Path]]:
    found = {}
    for split in SPLITS:
        prefixes = [str(Path(dataset, split))] + [dataset] * (split == "train")
        for prefix in prefixes:
            paths = [
                next(
                    (p for p in (Path(f"{prefix}.{lang}{z}") for z in ("", ".gz")) if p.is_file()),
                    None,
                )
                for lang in languages
            ]
            if all(paths):
                found[split] = paths
            elif any(paths):
                missing = languages[paths.index(None)]
                raise ValueError(
                    f"{prefix}.{missing} must exist beside {next(filter(None, paths))}."
                )
    return found


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def read_lines(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode lines of text. Only a line feed ends one: text may hold Unicode's other separators.

    Args:
        lines: A file opened for bytes, or what gives the same.
        name: Of the file, for an error.

    Yields:
        The lines, without their ends.

    Raises:
        ValueError: If a line is not UTF-8; says which.
    """
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} line {number} must be UTF-8, got {error.reason}.") from error
        yield text.rstrip("\r\n")


def _text_lines(path: Path) -> Iterator[str]:
    try:
        with _open(path) as file:
            yield from read_lines(file, str(path))
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read to its end: {error}") from error


def _text_pairs(
    source: Path, target: Path, source_lang: str, target_lang: str, stamp: str
) -> Iterator[dict]:
    for source_text, target_text in zip(_text_lines(source), _text_lines(target), strict=True):
        yield {"translation": {source_lang: source_text, target_lang: target_text}}


def _read_text_files(
    source: Path, target: Path, source_lang: str, target_lang: str
) -> datasets.Dataset:
    counts = [sum(1 for _ in _text_lines(path)) for path in (source, target)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"{source} and {target} must have as many lines, got {counts[0]} and {counts[1]}."
        )
    if counts[0] == 0:
        raise ValueError(f"{source} must have at least one line, got none.")
    return datasets.Dataset.from_generator(
        _text_pairs,
        features=datasets.Features(
            {"translation": datasets.Translation(languages=[source_lang, target_lang])}
        ),
        gen_kwargs={
            "source": source,
            "target": target,
            "source_lang": source_lang,
            "target_lang": target_lang,
            # a file that changed is read again, not taken from the cache; a list would be taken
            # for the parts of a corpus
            "stamp": str([_stamp(path) for path in (source, target)]),
        },
    )


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def checked_texts(
    pairs: Sequence[dict[str, str]], languages: Sequence[str], split: str, first_line: int = 1
) -> list[list[str]]:
    """Take the texts of some languages out of a column of translations.

    Args:
        pairs: Rows of the column "translation".
        languages: The languages wanted.
        split: Name of the split, for an error.
        first_line: Number of the first row in the split, for an error.

    Returns:
        The texts, a list for each language.

    Raises:
        ValueError: If a side of a row is no text; says which.
    """
    for line, pair in enumerate(pairs, start=first_line):
        for language in languages:
            if not isinstance(pair[language], str):
                raise ValueError(
                    f"{split} line {line} must have text in {language!r}, got {pair[language]!r}."
                )
    return [[pair[language] for pair in pairs] for language in languages]


def encode_pairs(
    rows: datasets.Dataset,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    source_lang: str,
    target_lang: str,
) -> datasets.Dataset:
    """Turn texts into token ids; the result is cached by text, tokenizer and languages.

    Args:
        rows: A split, with the column "translation".
        split: Its name, for an error.
        tokenizer: A fast one, which ends each sentence with its end token.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        The columns "input_ids", "labels", "source_length" and "target_length".

    Raises:
        ValueError: If a row is no text; says which.
    """
    ids = datasets.List(datasets.Value("int32"))
    length = datasets.Value("int32")
    # the tokenizer itself would not do: one that was learned is another object than the same loaded
    name = [rows._fingerprint, tokenizer_hash(tokenizer), source_lang, target_lang, "encode_pairs"]
    return rows.map(
        _encode,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        features=datasets.Features(
            {"input_ids": ids, "labels": ids, "source_length": length, "target_length": length}
        ),
        fn_kwargs={
            "split": split,
            "tokenizer": tokenizer,
            "languages": [source_lang, target_lang],
        },
        new_fingerprint=Hasher.hash(name),
        desc=f"tokenizing {split}",
    )


def _encode(
    rows: dict[str, list],
    indices: list[int],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    languages: list[str],
) -> dict[str, list]:
    texts = checked_texts(rows["translation"], languages, split, first_line=indices[0] + 1)
    source, target = (tokenizer(side, return_attention_mask=False)["input_ids"] for side in texts)
    return {
        "input_ids": source,
        "labels": target,
        "source_length": [len(ids) for ids in source],
        "target_length": [len(ids) for ids in target],
    }


def lengths(rows: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of all pairs, in tokens.

    Args:
        rows: From `encode_pairs`.

    Returns:
        Of the sources, and of the targets.
    """
    columns = rows.with_format("numpy")
    return columns["source_length"][:], columns["target_length"][:]


def drop_untrainable(
    rows: datasets.Dataset, split: str, max_length: int
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Leave out pairs with an empty or a too long side, and say how many.

    Args:
        rows: From `encode_pairs`.
        split: Its name, for the log.
        max_length: Most tokens of either side, the end token included.

    Returns:
        The pairs to train on, and how many were kept and left out.

    Raises:
        ValueError: If nothing is left.
    """
    source_lengths, target_lengths = lengths(rows)
    # an empty sentence is its end token
    is_empty = np.minimum(source_lengths, target_lengths) <= 1
    is_long = np.maximum(source_lengths, target_lengths) > max_length
    keep = ~(is_empty | is_long)
    counts = {
        "kept": int(keep.sum()),
        "empty": int(is_empty.sum()),
        "too_long": int((is_long & ~is_empty).sum()),
    }
    logger.info(
        "%s: %d pairs kept, %d with an empty side and %d above %d tokens left out",
        split,
        counts["kept"],
        counts["empty"],
        counts["too_long"],
        max_length,
    )
    if counts["kept"] == 0:
        raise ValueError(
            f"{split} must have a pair of at most {max_length} tokens with two sides, got "
            f"{counts['empty']} with an empty and {counts['too_long']} with a too long side."
        )
    if keep.all():
        return rows, counts
    return rows.select(np.flatnonzero(keep)), counts
