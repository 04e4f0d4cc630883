"""Encode sentence pairs as token ids, filter and count them, and read them by index. Section 5.1.

Encoded pairs and verdicts are cached on disk, so a second run on the same text reads them from the
cache.
"""

import dataclasses
import hashlib
import logging
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from ...tokenization import bpe_dropout
from ...tokenization.bpe_dropout import BpeDropout
from ...tokenization.learning import tokenizer_hash
from .cache import cached
from .corpus import text_hash, texts_of

logger = logging.getLogger(__name__)

# source files that determine the cached token ids and verdicts, and are part of the cache key
CODE = (__file__, bpe_dropout.__file__)

# verdicts on a pair: it is kept, or it is dropped for the first of these reasons that applies
VERDICTS = ("kept", "wrong_encoding", "empty", "leak", "too_long", "length_ratio", "duplicate")
KEPT, WRONG_ENCODING, EMPTY, LEAK, TOO_LONG, LENGTH_RATIO, DUPLICATE = range(len(VERDICTS))
# `GARBLED` finds mojibake: UTF-8 text that was decoded as Windows-1252, so that each byte of a
# character became a character of its own. `_SECOND` are the characters of the continuation bytes,
# 0x80 to 0xBF, without the bytes that Windows-1252 leaves undefined
_SECOND = bytes(byte for byte in range(0x80, 0xC0) if byte not in b"\x81\x8d\x8f\x90\x9d").decode(
    "cp1252"
)
# those characters of `_SECOND` that correct text can contain after a word in capital letters, such
# as the closing quotation mark in «ALEMÃ»
_MARKS = "\u2026\u2019\u201c\u201d\u2013\u2014"
_SYMBOLS = "\xa0\xad«»°§®·\u00b4²³™\u2039\u203a"
_CAPITALS, _SMALL = (
    "".join(filter(is_of_kind, map(chr, [*range(0x250), *range(0x1E00, 0x1F00)])))
    for is_of_kind in (str.isupper, str.islower)
)
# all patterns begin with this set of characters, so a search skips quickly to the next one of them;
# each alternative then checks by a lookbehind which of these characters it was
GARBLED = re.compile(
    "[\ufffd\x80-\x9f\0ÂÃÅâ](?:{})".format(
        "|".join(
            part.format(
                clear=re.escape("".join(sorted({*_SECOND} - {*_MARKS, *_SYMBOLS}))),
                second=re.escape(_SECOND),
                marks=_MARKS,
                symbols=_SYMBOLS,
                capitals=_CAPITALS,
                small=_SMALL,
            )
            for part in (
                # a replacement character, a C1 control character, or a NUL byte of UTF-16 text
                "(?<=[\ufffd\x80-\x9f\0])",
                "(?<=[ÂÃ])[{clear}]",
                "(?<=â)€[{second}]",
                "(?<=Å)[{marks}](?=[{small}])",
                # a letter inside or at the start of a word in lower case
                "(?<=[{small}]Ã)[{marks}{symbols}]",
                "(?<=Ã)(?<![{capitals}]Ã)[{marks}{symbols}](?=[{small}])",
                # the word à, whose second byte becomes a no-break space
                "(?<=Ã)(?<!\\SÃ)\xa0(?!\\S)",
                # a symbol such as ° or ». In correct text, a symbol can follow Â if Â ends a word
                # in capital letters, begins the text, or follows an opening quotation mark
                "(?<=[^{capitals}«\u201c\u2018\u201e\"'(]Â)[{symbols}]",
                # N° (number), where N is not the end of a word
                "(?<=NÂ)(?<![^\\W\\d_]NÂ)°",
            )
        )
    )
)

_LIST = datasets.List(datasets.Value("int32"))
FEATURES = datasets.Features(
    {
        "input_ids": _LIST,
        "labels": _LIST,
        "source_length": datasets.Value("int32"),
        "target_length": datasets.Value("int32"),
        "verdict": datasets.Value("int32"),
        "hash_high": datasets.Value("int64"),
        "hash_low": datasets.Value("int64"),
    }
)
# number of pairs that are processed at once, which limits memory and does not change the result
CHUNK = 1_000_000


@dataclass(frozen=True)
class Spelling:
    """One random segmentation of a corpus by BPE-dropout.

    Args:
        dropout: Probability of skipping a merge, for sources and for targets.
        seed: Seed of the run.
        number: Index of the spelling, from 0.
    """

    dropout: tuple[float, float]
    seed: int
    number: int


def encode_pairs(
    rows: datasets.Dataset,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    source_lang: str,
    target_lang: str,
    text_sha256: str | None = None,
    spelling: Spelling | None = None,
) -> datasets.Dataset:
    """Encode texts as token ids. The result is cached by text, tokenizer, languages and spelling.

    The tokenizer uses all cores.

    Args:
        rows: Rows of the split, with the column "translation".
        split: Name of the split. In "train", bytes that are not UTF-8 are replaced instead of
            refused, so that `filter_pairs` can drop and count these pairs.
        tokenizer: Fast tokenizer that ends each sentence with its end token.
        source_lang: Language to translate from.
        target_lang: Language to translate into.
        text_sha256: Hash of the rows from `text_hash`; computed if not given.
        spelling: Spelling by BPE-dropout; each pair has its own random generator, so that the
            result does not depend on the batches. None for the normal segmentation.

    Returns:
        Columns "input_ids" and "labels", and the columns that `filter_pairs` reads.

    Raises:
        ValueError: If a side of a row is not text; names the row.
        ValueError: If a spelling is given and the tokenizer does not support BPE-dropout.
    """
    languages = [source_lang, target_lang]
    # use our hash of a tokenizer, because the hash of `datasets` differs between a tokenizer that
    # was just learned and the same tokenizer after loading
    text_sha256 = text_sha256 or text_hash(rows, languages, split)
    content = [text_sha256, tokenizer_hash(tokenizer), split == "train"]
    if spelling is not None:
        content += dataclasses.astuple(spelling)
    key = Hasher.hash([*content, str(FEATURES), "encode_pairs"])
    settings = {
        "split": split,
        "tokenizer": tokenizer,
        "languages": languages,
        "spelling": spelling,
    }

    def encode(path: Path) -> datasets.Dataset:
        return (
            rows.with_format("arrow")
            .map(
                encode_table,
                batched=True,
                batch_size=5000,
                writer_batch_size=50_000,
                with_indices=True,
                remove_columns=rows.column_names,
                features=FEATURES,
                fn_kwargs=settings,
                new_fingerprint=key,
                cache_file_name=str(path),
                desc=f"tokenizing {split}",
            )
            .with_format(None)
        )

    return encode(cached(f"{key}.arrow", CODE, encode))


def encode_table(
    table: pa.Table,
    indices: Sequence[int],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    languages: Sequence[str],
    spelling: Spelling | None = None,
) -> pa.Table:
    """Encode a table of texts as token ids.

    Args:
        table: Rows with the column "translation".
        indices: Indices of the rows in the split; without a spelling only the first one is read.
        split: Argument of `encode_pairs`.
        tokenizer: Argument of `encode_pairs`.
        languages: Source and target language.
        spelling: Argument of `encode_pairs`.

    Returns:
        Columns of `FEATURES`.

    Raises:
        ValueError: If a side of a row is not text; names the row.
    """
    sides = texts_of(table, languages, split, indices[0] + 1, repair=split == "train")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    sentences = [[text.ids for text in backend.encode_batch_fast(side)] for side in sides]
    if spelling is not None:
        generators = [
            random.Random(f"{spelling.seed} {spelling.number} {index}") for index in indices
        ]
        for number, (side, dropout) in enumerate(zip(sides, spelling.dropout, strict=True)):
            if dropout:
                segment = BpeDropout(tokenizer, dropout)
                sentences[number] = list(map(segment, backend.encode_batch(side), generators))
    source, target = sentences
    verdicts, hashes = [], []
    for pair in zip(*sides, strict=True):
        is_garbled = any(GARBLED.search(text) for text in pair)
        is_empty = not all(text.strip() for text in pair)
        verdicts.append(WRONG_ENCODING if is_garbled else EMPTY if is_empty else KEPT)
        content = "\n".join((str(len(pair[0])), *pair)).encode()
        hashes.append(hashlib.blake2b(content, digest_size=16).digest())
    hash_columns = np.frombuffer(b"".join(hashes), "<i8").reshape(-1, 2)
    columns = [
        pa.array(source, pa.list_(pa.int32())),
        pa.array(target, pa.list_(pa.int32())),
        pa.array([len(ids) for ids in source], pa.int32()),
        pa.array([len(ids) for ids in target], pa.int32()),
        pa.array(verdicts, pa.int32()),
        *(pa.array(column) for column in hash_columns.T),
    ]
    return pa.table(columns, names=list(FEATURES))


def pair_lengths(rows: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of all pairs, in tokens.

    Args:
        rows: Rows from `encode_pairs`.

    Returns:
        Lengths of the sources and lengths of the targets, each [pairs].
    """
    columns = rows.with_format("numpy")
    return columns["source_length"][:], columns["target_length"][:]


def filter_pairs(
    rows: datasets.Dataset,
    max_length: int,
    max_length_ratio: float | None = None,
    drop_duplicates: bool = False,
    leaks: np.ndarray | None = None,
) -> np.ndarray:
    """Decide for each pair whether it is used.

    Args:
        rows: Rows from `encode_pairs`.
        max_length: Maximum number of tokens of either side, end token included.
        max_length_ratio: Maximum ratio of the longer side to the shorter side, in tokens without
            end tokens.
        drop_duplicates: Keep only the first of several pairs with the same text. The search needs
            40 bytes of memory for each pair, and searches a few million pairs at a time.
        leaks: Indices of the pairs to drop because they contain a sentence of an evaluation split.

    Returns:
        Source length, target length and index in `VERDICTS` of each pair, [3, pairs].
    """
    filtered = np.empty((3, len(rows)), np.int32)
    is_leak = np.zeros(len(rows), bool)
    if leaks is not None:
        is_leak[leaks] = True
    columns = rows.select_columns(["source_length", "target_length", "verdict"])
    for first in range(0, len(rows), CHUNK):
        part = columns.with_format("numpy")[first : first + CHUNK]
        source, target, verdict = (part[name] for name in columns.column_names)
        shorter, longer = np.minimum(source, target), np.maximum(source, target)
        # a sentence of one token is empty: the token is the end token
        verdict[(verdict == KEPT) & (shorter <= 1)] = EMPTY
        verdict[(verdict == KEPT) & is_leak[first : first + CHUNK]] = LEAK
        verdict[(verdict == KEPT) & (longer > max_length)] = TOO_LONG
        if max_length_ratio is not None:
            is_skewed = longer - 1 > max_length_ratio * (shorter - 1)
            verdict[(verdict == KEPT) & is_skewed] = LENGTH_RATIO
        filtered[:, first : first + CHUNK] = source, target, verdict
    if drop_duplicates:
        for numbers in _duplicates(rows, filtered[2] == KEPT):
            filtered[2, numbers] = DUPLICATE
    return filtered


def _duplicates(rows: datasets.Dataset, is_kept: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of the pairs that repeat an earlier pair.

    To limit memory, the hashes are divided into parts by their lowest bits, and the parts are
    searched one after another. Equal pairs have equal hashes, so they are in the same part.
    """
    columns = rows.select_columns(["hash_high", "hash_low"]).with_format("numpy")
    bits = max(0, math.ceil(math.log2(max(len(rows), 1) / (4 * CHUNK))))
    for part in range(2**bits):
        found = []
        for first in range(0, len(rows), CHUNK):
            hashes = columns[first : first + CHUNK]
            is_of_part = is_kept[first : first + CHUNK].copy()
            is_of_part &= hashes["hash_high"] % 2**bits == part
            found.append(
                (
                    first + np.flatnonzero(is_of_part),
                    *(hashes[name][is_of_part] for name in columns.column_names),
                )
            )
        numbers, high, low = (np.concatenate(column) for column in zip(*found, strict=True))
        # the sort is stable, so the first of several equal pairs stays first and is kept
        order = np.lexsort((low, high))
        is_repeat = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
        yield numbers[order[1:][is_repeat]]


def counts_of(verdicts: np.ndarray) -> dict[str, int]:
    """Count the pairs by verdict.

    Args:
        verdicts: Indices in `VERDICTS`, [pairs].

    Returns:
        Number of pairs for each of `VERDICTS`, zeros included.
    """
    numbers = np.bincount(verdicts, minlength=len(VERDICTS)).tolist()
    return dict(zip(VERDICTS, numbers, strict=True))


def format_counts(counts: Mapping[str, int]) -> str:
    """Format counts as text.

    Args:
        counts: Counts from `counts_of`.

    Returns:
        Names and counts in one line.
    """
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def refuse_unusable(counts: Mapping[str, int], corpus: str) -> None:
    """Raise an error if no pair of a corpus is kept, or most pairs have a wrong encoding.

    Args:
        counts: Counts from `counts_of`.
        corpus: Name of the corpus, for an error.

    Raises:
        ValueError: If no pair is kept, or more than half of the pairs have a wrong encoding.
    """
    if 2 * counts["wrong_encoding"] > sum(counts.values()):
        raise ValueError(
            f"{corpus} must be UTF-8 in at least half of its pairs, got {format_counts(counts)}."
        )
    if counts["kept"] == 0:
        raise ValueError(
            f"{corpus} must have a pair that can be used, got {format_counts(counts)}."
        )


def drop_untrainable(
    rows: datasets.Dataset, split: str, max_length: int
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Drop pairs with a side that is empty, too long or in a wrong encoding, and log the counts.

    Args:
        rows: Rows from `encode_pairs`.
        split: Name of the split, for the log.
        max_length: Maximum number of tokens of either side, end token included.

    Returns:
        Rows to train on, and the counts from `counts_of`.

    Raises:
        ValueError: If no pair is kept, or more than half of the pairs have a wrong encoding.
    """
    verdicts = filter_pairs(rows, max_length)[2]
    counts = counts_of(verdicts)
    logger.info("%s: %s", split, format_counts(counts))
    refuse_unusable(counts, split)
    if counts["kept"] == len(rows):
        return rows, counts
    return rows.select(np.flatnonzero(verdicts == KEPT)), counts


class Pairs:
    """Tokenized pairs, on disk or in memory, that are read by index.

    Args:
        rows: Rows from `encode_pairs`.
        filtered: Result of `filter_pairs`. The array is not copied, so that all processes on a
            machine share the memory of a memory-mapped file.
    """

    def __init__(self, rows: datasets.Dataset, filtered: np.ndarray):
        self.rows = rows
        self.filtered = filtered

    def __reduce__(self):
        return Pairs, (self.rows, self.filtered)

    @property
    def source_lengths(self) -> np.ndarray:
        """Number of tokens of each source, [pairs]."""
        return self.filtered[0]

    @property
    def target_lengths(self) -> np.ndarray:
        """Number of tokens of each target, [pairs]."""
        return self.filtered[1]

    @property
    def verdicts(self) -> np.ndarray:
        """Index in `VERDICTS` of each pair, [pairs]."""
        return self.filtered[2]

    def kept(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the indices of the pairs that are kept.

        Args:
            first: Index of the first pair to consider.
            last: Index after the last pair to consider; None for all following pairs.

        Returns:
            Indices of the kept pairs, in order.
        """
        verdicts = self.verdicts[first:last]
        parts = [
            (first + start + np.flatnonzero(verdicts[start : start + CHUNK] == KEPT)).astype(
                np.int32
            )
            for start in range(0, len(verdicts), CHUNK)
        ]
        return np.concatenate([np.empty(0, np.int32), *parts])

    def __getitem__(self, numbers: np.ndarray) -> dict[str, list[np.ndarray]]:
        """Return the token ids of some pairs.

        Args:
            numbers: Indices of the pairs.

        Returns:
            Columns "input_ids" and "labels", each with one array of token ids for each pair.
        """
        starts, columns = self._columns
        chunk_numbers = np.searchsorted(starts, numbers, side="right") - 1
        inside = (numbers - starts[chunk_numbers]).tolist()
        return {
            name: [
                chunks[chunk][1][slice(*chunks[chunk][0][index : index + 2])]
                for chunk, index in zip(chunk_numbers.tolist(), inside, strict=True)
            ]
            for name, chunks in columns.items()
        }

    @cached_property
    def _columns(self) -> tuple[np.ndarray, dict[str, list[tuple[np.ndarray, np.ndarray]]]]:
        """First pair index of each Arrow chunk; views of the offsets and ids of the chunks."""
        columns = {name: self.rows.data.column(name).chunks for name in ("input_ids", "labels")}
        sizes = [len(chunk) for chunk in columns["input_ids"]]
        return np.cumsum([0, *sizes[:-1]]), {
            name: [(chunk.offsets.to_numpy(), chunk.values.to_numpy()) for chunk in chunks]
            for name, chunks in columns.items()
        }


def prepare_pairs(
    parts: Sequence[datasets.Dataset],
    max_length: int,
    max_length_ratio: float | None = None,
    drop_duplicates: bool = False,
    spelled: Sequence[datasets.Dataset] = (),
    leaks: np.ndarray | None = None,
) -> Pairs:
    """Concatenate corpora and filter their pairs. The verdicts are cached by content.

    Args:
        parts: Corpora in the normal segmentation, from `encode_pairs`.
        max_length: Argument of `filter_pairs`.
        max_length_ratio: Argument of `filter_pairs`.
        drop_duplicates: Argument of `filter_pairs`, applied across the corpora.
        spelled: The same corpora with BPE-dropout, from `encode_pairs`: all corpora in the first
            spelling, then all corpora in the second, and so on.
        leaks: Argument of `filter_pairs`; a pair is counted over all corpora.

    Returns:
        Pairs of all corpora: those of `spelled` if it is given, otherwise those of `parts`. The
        verdicts include the dropped pairs. A kept pair is short enough in every spelling.
    """
    rows = datasets.concatenate_datasets(list(parts))
    rules = (max_length, max_length_ratio, drop_duplicates)
    fingerprints = [[part._fingerprint for part in some] for some in (parts, spelled)]
    key = Hasher.hash([*fingerprints, rules, leaks, "filter_pairs"])

    def write(path: Path):
        filtered = filter_pairs(rows, *rules, leaks)
        if spelled:
            sides = zip(*map(pair_lengths, spelled), strict=True)
            sizes = np.stack([np.concatenate(side) for side in sides])  # [2, spellings * pairs]
            longest = sizes.max(axis=0).reshape(-1, len(rows)).max(axis=0)
            # drop a pair in all spellings if it is too long in one of them, so that every epoch has
            # the same pairs
            filtered[2, (filtered[2] == KEPT) & (longest > max_length)] = TOO_LONG
            filtered = np.concatenate([sizes, [np.tile(filtered[2], len(spelled) // len(parts))]])
        with path.open("wb") as file:
            np.save(file, filtered)

    path = cached(f"{key}.npy", CODE, write)
    if spelled:
        rows = datasets.concatenate_datasets(list(spelled))
    return Pairs(rows, np.load(path, mmap_mode="r"))
