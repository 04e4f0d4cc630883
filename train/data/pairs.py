"""Encode sentence pairs as token ids, filter and count them, and read them by index. Section 5.1.

Encoded pairs and verdicts are cached on disk, so a second run on the same text reads them from the
cache.
"""

import dataclasses
import hashlib
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from ...tokenization import bpe_dropout
from ...tokenization.bpe_dropout import BpeDropout
from ...tokenization.learning import tokenizer_hash
from . import mojibake
from .cache import ensure_cached_file
from .corpus import text_hash, texts_of
from .mojibake import GARBLED

logger = logging.getLogger(__name__)

# source files that determine the cached token ids and verdicts, and are part of the cache key
CODE_FILES = (__file__, mojibake.__file__, bpe_dropout.__file__)

# verdicts on a pair: "kept", or the reason why the pair is dropped. If several reasons apply, the
# verdict is the first one
VERDICTS = ("kept", "wrong_encoding", "empty", "leak", "too_long", "length_ratio", "duplicate")
KEPT, WRONG_ENCODING, EMPTY, LEAK, TOO_LONG, LENGTH_RATIO, DUPLICATE = range(len(VERDICTS))
_TOKEN_IDS = datasets.List(datasets.Value("int32"))
FEATURES = datasets.Features(
    {
        "input_ids": _TOKEN_IDS,
        "labels": _TOKEN_IDS,
        "source_length": datasets.Value("int32"),
        "target_length": datasets.Value("int32"),
        "verdict": datasets.Value("int32"),
        "hash_high": datasets.Value("int64"),
        "hash_low": datasets.Value("int64"),
    }
)
# rows of the array of `filter_pairs`
SOURCE_LENGTHS, TARGET_LENGTHS, PAIR_VERDICTS = range(3)
# number of pairs that are processed at once, which limits memory and does not change the result
PAIRS_PER_CHUNK = 1_000_000


@dataclass(frozen=True)
class Segmentation:
    """Random segmentation of a corpus by BPE-dropout.

    Args:
        dropout: Probability of skipping a merge, for sources and for targets.
        seed: Seed of the run.
        number: Index of the segmentation, from 0.
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
    segmentation: Segmentation | None = None,
) -> datasets.Dataset:
    """Encode texts as token ids, with all cores.

    The result is cached by text, tokenizer, languages and segmentation.

    Args:
        rows: Rows of the split, with the column "translation".
        split: Name of the split. In "train", bytes that are not UTF-8 are replaced instead of
            refused, so that `filter_pairs` can drop and count these pairs.
        tokenizer: Fast tokenizer that ends each sentence with its end token.
        source_lang: Language to translate from.
        target_lang: Language to translate into.
        text_sha256: Hash of the rows from `text_hash`; computed if not given.
        segmentation: Segmentation by BPE-dropout; each pair has its own random generator, so that
            the result does not depend on the batches. None for the normal segmentation.

    Returns:
        Columns "input_ids" and "labels", and the columns that `filter_pairs` reads.

    Raises:
        ValueError: If a side of a row is not text; names the row.
        ValueError: If a segmentation is given and the tokenizer does not support BPE-dropout.
    """
    languages = [source_lang, target_lang]
    text_sha256 = text_sha256 or text_hash(rows, languages, split)
    # use our hash of a tokenizer, because the hash of `datasets` differs between a tokenizer that
    # was just learned and the same tokenizer after loading
    key_parts = [text_sha256, tokenizer_hash(tokenizer), split == "train"]
    if segmentation is not None:
        key_parts += dataclasses.astuple(segmentation)
    key = Hasher.hash([*key_parts, str(FEATURES), "encode_pairs"])
    encode_arguments = {
        "split": split,
        "tokenizer": tokenizer,
        "languages": languages,
        "segmentation": segmentation,
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
                fn_kwargs=encode_arguments,
                new_fingerprint=key,
                cache_file_name=str(path),
                desc=f"tokenizing {split}",
            )
            .with_format(None)
        )

    return encode(ensure_cached_file(f"{key}.arrow", CODE_FILES, encode))


def encode_table(
    table: pa.Table,
    indices: Sequence[int],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    languages: Sequence[str],
    segmentation: Segmentation | None = None,
) -> pa.Table:
    """Encode a table of texts as token ids.

    Args:
        table: Rows with the column "translation".
        indices: Indices of the rows in the split; with the normal segmentation only the first one
            is read.
        split: Name of the split. In "train", bytes that are not UTF-8 are replaced instead of
            refused.
        tokenizer: Fast tokenizer that ends each sentence with its end token.
        languages: Source and target language.
        segmentation: Segmentation by BPE-dropout; None for the normal segmentation.

    Returns:
        Columns of `FEATURES`.

    Raises:
        ValueError: If a side of a row is not text; names the row.
    """
    sides = texts_of(table, languages, split, indices[0] + 1, repair=split == "train")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    side_ids = [[encoding.ids for encoding in backend.encode_batch_fast(side)] for side in sides]
    if segmentation is not None:
        random_generators = [
            random.Random(f"{segmentation.seed} {segmentation.number} {index}") for index in indices
        ]
        for side_index, (side, dropout) in enumerate(zip(sides, segmentation.dropout, strict=True)):
            if dropout:
                segment = BpeDropout(tokenizer, dropout)
                side_ids[side_index] = list(
                    map(segment, backend.encode_batch(side), random_generators)
                )
    source_ids, target_ids = side_ids
    verdicts, pair_hashes = [], []
    for pair in zip(*sides, strict=True):
        is_garbled = any(GARBLED.search(text) for text in pair)
        is_empty = not all(text.strip() for text in pair)
        verdict = EMPTY if is_empty else KEPT
        verdicts.append(WRONG_ENCODING if is_garbled else verdict)
        pair_bytes = "\n".join((str(len(pair[0])), *pair)).encode()
        pair_hashes.append(hashlib.blake2b(pair_bytes, digest_size=16).digest())
    hash_columns = np.frombuffer(b"".join(pair_hashes), "<i8").reshape(-1, 2)
    columns = [
        pa.array(source_ids, pa.list_(pa.int32())),
        pa.array(target_ids, pa.list_(pa.int32())),
        pa.array([len(ids) for ids in source_ids], pa.int32()),
        pa.array([len(ids) for ids in target_ids], pa.int32()),
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
    leaking_pairs: np.ndarray | None = None,
) -> np.ndarray:
    """Decide for each pair whether it is used.

    Args:
        rows: Rows from `encode_pairs`.
        max_length: Maximum number of tokens of either side, end token included.
        max_length_ratio: Maximum ratio of the longer side to the shorter side, in tokens without
            end tokens.
        drop_duplicates: Whether to keep only the first of several pairs with the same text. The
            search needs 40 bytes of memory for each pair, and searches a few million pairs at a
            time.
        leaking_pairs: Indices of the pairs to drop because they contain a sentence of an evaluation
            split.

    Returns:
        Source length, target length and index in `VERDICTS` of each pair, [3, pairs].
    """
    lengths_and_verdicts = np.empty((3, len(rows)), np.int32)
    is_leak = np.zeros(len(rows), bool)
    if leaking_pairs is not None:
        is_leak[leaking_pairs] = True
    columns = rows.select_columns(["source_length", "target_length", "verdict"])
    for first in range(0, len(rows), PAIRS_PER_CHUNK):
        chunk_columns = columns.with_format("numpy")[first : first + PAIRS_PER_CHUNK]
        source_lengths, target_lengths, verdicts = (
            chunk_columns[name] for name in columns.column_names
        )
        shorter_lengths = np.minimum(source_lengths, target_lengths)
        longer_lengths = np.maximum(source_lengths, target_lengths)
        # a sentence of one token is empty: the token is the end token
        verdicts[(verdicts == KEPT) & (shorter_lengths <= 1)] = EMPTY
        verdicts[(verdicts == KEPT) & is_leak[first : first + PAIRS_PER_CHUNK]] = LEAK
        verdicts[(verdicts == KEPT) & (longer_lengths > max_length)] = TOO_LONG
        if max_length_ratio is not None:
            is_skewed = longer_lengths - 1 > max_length_ratio * (shorter_lengths - 1)
            verdicts[(verdicts == KEPT) & is_skewed] = LENGTH_RATIO
        lengths_and_verdicts[:, first : first + PAIRS_PER_CHUNK] = (
            source_lengths,
            target_lengths,
            verdicts,
        )
    if drop_duplicates:
        for repeated_pairs in _find_duplicates(rows, lengths_and_verdicts[PAIR_VERDICTS] == KEPT):
            lengths_and_verdicts[PAIR_VERDICTS, repeated_pairs] = DUPLICATE
    return lengths_and_verdicts


def _find_duplicates(rows: datasets.Dataset, is_kept: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of the pairs that repeat an earlier pair.

    To limit memory, the hashes are divided into parts by the lowest bits of `hash_high`, and the
    parts are searched one after another. Equal pairs have equal hashes, so they are in the same
    part.
    """
    columns = rows.select_columns(["hash_high", "hash_low"]).with_format("numpy")
    num_part_bits = max(0, math.ceil(math.log2(max(len(rows), 1) / (4 * PAIRS_PER_CHUNK))))
    for part in range(2**num_part_bits):
        part_chunks = []
        for first in range(0, len(rows), PAIRS_PER_CHUNK):
            hashes = columns[first : first + PAIRS_PER_CHUNK]
            is_of_part = is_kept[first : first + PAIRS_PER_CHUNK].copy()
            is_of_part &= hashes["hash_high"] % 2**num_part_bits == part
            part_chunks.append(
                (
                    first + np.flatnonzero(is_of_part),
                    *(hashes[name][is_of_part] for name in columns.column_names),
                )
            )
        pair_indices, high_hashes, low_hashes = (
            np.concatenate(column) for column in zip(*part_chunks, strict=True)
        )
        # the sort is stable, so the first of several equal pairs stays first and is kept
        order = np.lexsort((low_hashes, high_hashes))
        is_repeat = (np.diff(high_hashes[order]) == 0) & (np.diff(low_hashes[order]) == 0)
        yield pair_indices[order[1:][is_repeat]]


def count_verdicts(verdicts: np.ndarray) -> dict[str, int]:
    """Count the pairs by verdict.

    Args:
        verdicts: Indices in `VERDICTS`, [pairs].

    Returns:
        Number of pairs for each of `VERDICTS`, zeros included.
    """
    counts = np.bincount(verdicts, minlength=len(VERDICTS)).tolist()
    return dict(zip(VERDICTS, counts, strict=True))


def format_counts(counts: Mapping[str, int]) -> str:
    """Format counts as text.

    Args:
        counts: Counts from `count_verdicts`.

    Returns:
        Names and counts in one line.
    """
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def refuse_unusable(counts: Mapping[str, int], corpus: str) -> None:
    """Raise an error if no pair of a corpus is kept, or most pairs have a wrong encoding.

    Args:
        counts: Counts from `count_verdicts`.
        corpus: Name of the corpus, for an error.

    Raises:
        ValueError: If no pair is kept, or more than half of the pairs have a wrong encoding.
    """
    if 2 * counts["wrong_encoding"] > sum(counts.values()):
        raise ValueError(
            f"{corpus} must be UTF-8 without signs of a wrong encoding, such as Ã¼, U+FFFD and the "
            "control characters U+0080 to U+009F, in at least half of its pairs, got "
            f"{format_counts(counts)}."
        )
    if counts["kept"] == 0:
        raise ValueError(
            f"{corpus} must have a pair that can be used, got {format_counts(counts)}."
        )


def drop_untrainable(rows: datasets.Dataset, max_length: int) -> datasets.Dataset:
    """Drop pairs with a side that is empty, too long or in a wrong encoding, and log the counts.

    Args:
        rows: Rows of the training split from `encode_pairs`.
        max_length: Maximum number of tokens of either side, end token included.

    Returns:
        Rows to train on.

    Raises:
        ValueError: If no pair is kept, or more than half of the pairs have a wrong encoding.
    """
    verdicts = filter_pairs(rows, max_length)[PAIR_VERDICTS]
    counts = count_verdicts(verdicts)
    logger.info("train: %s", format_counts(counts))
    refuse_unusable(counts, "train")
    if counts["kept"] == len(rows):
        return rows
    return rows.select(np.flatnonzero(verdicts == KEPT))


class _ChunkOfIds(NamedTuple):
    """Token ids of many sentences, one after another, and the offset at which each one begins."""

    offsets: np.ndarray
    ids: np.ndarray


class Pairs:
    """Tokenized pairs, on disk or in memory, that are read by index.

    Args:
        rows: Rows from `encode_pairs`.
        lengths_and_verdicts: Result of `filter_pairs`. The array is not copied, so that all
            processes on a machine share the memory of a memory-mapped file.
    """

    def __init__(self, rows: datasets.Dataset, lengths_and_verdicts: np.ndarray):
        self.rows = rows
        self.lengths_and_verdicts = lengths_and_verdicts

    def __reduce__(self):
        return Pairs, (self.rows, self.lengths_and_verdicts)

    @property
    def source_lengths(self) -> np.ndarray:
        """Number of tokens of each source, [pairs]."""
        return self.lengths_and_verdicts[SOURCE_LENGTHS]

    @property
    def target_lengths(self) -> np.ndarray:
        """Number of tokens of each target, [pairs]."""
        return self.lengths_and_verdicts[TARGET_LENGTHS]

    @property
    def verdicts(self) -> np.ndarray:
        """Index in `VERDICTS` of each pair, [pairs]."""
        return self.lengths_and_verdicts[PAIR_VERDICTS]

    def kept_indices(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the indices of the pairs that are kept.

        Args:
            first: Index of the first pair to consider.
            last: Index after the last pair to consider; None for all following pairs.

        Returns:
            Indices of the kept pairs, in order.
        """
        verdicts = self.verdicts[first:last]
        index_chunks = [
            (
                first + start + np.flatnonzero(verdicts[start : start + PAIRS_PER_CHUNK] == KEPT)
            ).astype(np.int32)
            for start in range(0, len(verdicts), PAIRS_PER_CHUNK)
        ]
        return np.concatenate([np.empty(0, np.int32), *index_chunks])

    def __getitem__(self, pair_indices: np.ndarray) -> dict[str, list[np.ndarray]]:
        """Return the token ids of some pairs.

        Args:
            pair_indices: Indices of the pairs.

        Returns:
            Columns "input_ids" and "labels", each with one array of token ids for each pair.
        """
        chunk_starts, chunked_columns = self._chunked_columns
        chunk_indices = np.searchsorted(chunk_starts, pair_indices, side="right") - 1
        indices_in_chunk = (pair_indices - chunk_starts[chunk_indices]).tolist()
        return {
            name: [
                chunks[chunk].ids[slice(*chunks[chunk].offsets[index : index + 2])]
                for chunk, index in zip(chunk_indices.tolist(), indices_in_chunk, strict=True)
            ]
            for name, chunks in chunked_columns.items()
        }

    @cached_property
    def _chunked_columns(self) -> tuple[np.ndarray, dict[str, list[_ChunkOfIds]]]:
        """First pair index of each Arrow chunk; views of the offsets and ids of the chunks."""
        columns = {name: self.rows.data.column(name).chunks for name in ("input_ids", "labels")}
        sizes = [len(chunk) for chunk in columns["input_ids"]]
        return np.cumsum([0, *sizes[:-1]]), {
            name: [
                _ChunkOfIds(chunk.offsets.to_numpy(), chunk.values.to_numpy()) for chunk in chunks
            ]
            for name, chunks in columns.items()
        }


def prepare_pairs(
    corpora: Sequence[datasets.Dataset],
    max_length: int,
    max_length_ratio: float | None = None,
    drop_duplicates: bool = False,
    segmented_corpora: Sequence[datasets.Dataset] = (),
    leaking_pairs: np.ndarray | None = None,
) -> Pairs:
    """Concatenate corpora and filter their pairs. The verdicts are cached by content.

    Args:
        corpora: Corpora in the normal segmentation, from `encode_pairs`.
        max_length: Maximum number of tokens of either side, end token included.
        max_length_ratio: Maximum ratio of the longer side to the shorter side, in tokens without
            end tokens.
        drop_duplicates: Whether to keep only the first of several pairs with the same text, in all
            corpora together.
        segmented_corpora: The same corpora with BPE-dropout, from `encode_pairs`: all corpora in
            the first segmentation, then all corpora in the second, and so on.
        leaking_pairs: Indices, over all corpora, of the pairs to drop because they contain a
            sentence of an evaluation split.

    Returns:
        Pairs of all corpora: those of `segmented_corpora` if it is given, otherwise those of
        `corpora`. The verdicts include the dropped pairs. A kept pair is short enough in every
        segmentation.
    """
    rows = datasets.concatenate_datasets(list(corpora))
    filter_settings = (max_length, max_length_ratio, drop_duplicates)
    fingerprints = [
        [corpus._fingerprint for corpus in group] for group in (corpora, segmented_corpora)
    ]
    key = Hasher.hash([*fingerprints, filter_settings, leaking_pairs, "filter_pairs"])

    def write(path: Path):
        lengths_and_verdicts = filter_pairs(rows, *filter_settings, leaking_pairs)
        if segmented_corpora:
            corpus_lengths = zip(*map(pair_lengths, segmented_corpora), strict=True)
            # [2, segmentations * pairs]
            lengths = np.stack([np.concatenate(side_lengths) for side_lengths in corpus_lengths])
            longest_lengths = lengths.max(axis=0).reshape(-1, len(rows)).max(axis=0)
            # drop a pair in all segmentations if it is too long in one of them, so that every epoch
            # has the same pairs
            verdicts = lengths_and_verdicts[PAIR_VERDICTS]
            verdicts[(verdicts == KEPT) & (longest_lengths > max_length)] = TOO_LONG
            num_segmentations = len(segmented_corpora) // len(corpora)
            lengths_and_verdicts = np.concatenate([lengths, [np.tile(verdicts, num_segmentations)]])
        with path.open("wb") as file:
            np.save(file, lengths_and_verdicts)

    path = ensure_cached_file(f"{key}.npy", CODE_FILES, write)
    if segmented_corpora:
        rows = datasets.concatenate_datasets(list(segmented_corpora))
    return Pairs(rows, np.load(path, mmap_mode="r"))
