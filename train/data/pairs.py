"""Pairs as token ids: made once, cleaned and counted, taken by their numbers. Section 5.1."""

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

# what token ids and judgements are made by
CODE = (__file__, bpe_dropout.__file__)

# what becomes of a pair: it is kept, or the first of these rules that holds leaves it out
VERDICTS = ("kept", "wrong_encoding", "empty", "too_long", "length_ratio", "duplicate")
KEPT, WRONG_ENCODING, EMPTY, TOO_LONG, LENGTH_RATIO, DUPLICATE = range(len(VERDICTS))
# what remains of text that was read with a wrong encoding. The second byte of a letter or a symbol
# in UTF-8, as Windows-1252 shows it:
_SECOND = bytes(byte for byte in range(0x80, 0xC0) if byte not in b"\x81\x8d\x8f\x90\x9d").decode(
    "cp1252"
)
# of these, marks and symbols that may follow a word which ends with a capital letter, as in ALEMÃ»
_MARKS = "\u2026\u2019\u201c\u201d\u2013\u2014"
_SYMBOLS = "\xa0\xad«»°§®·\u00b4²³™\u2039\u203a"
_CAPITALS, _SMALL = (
    "".join(filter(is_of_kind, map(chr, [*range(0x250), *range(0x1E00, 0x1F00)])))
    for is_of_kind in (str.isupper, str.islower)
)
# every alternative looks back at the first character: a search skips to one of these at once
NO_TEXT = re.compile(
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
                # a replaced character, a control character of the second kind, half of a wider one
                "(?<=[\ufffd\x80-\x9f\0])",
                "(?<=[ÂÃ])[{clear}]",
                "(?<=â)€[{second}]",
                "(?<=Å)[{marks}](?=[{small}])",
                # a letter inside a word of small letters, or at its start
                "(?<=[{small}]Ã)[{marks}{symbols}]",
                "(?<=Ã)(?<![{capitals}]Ã)[{marks}{symbols}](?=[{small}])",
                # the word à
                "(?<=Ã)(?<!\\SÃ)\xa0(?!\\S)",
                # a symbol behind no capital letter; a text may begin with the Â, or be about it
                "(?<=[^{capitals}«\u201c\u2018\u201e\"'(]Â)[{symbols}]",
                # N°
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
# pairs that are looked at together: bounds memory, changes no result
CHUNK = 1_000_000


@dataclass(frozen=True)
class Spelling:
    """One of the ways in which a corpus is spelled.

    Args:
        dropout: Chance that a merge is left out, of sources and of targets.
        seed: Of the run.
        number: Which of them, from 0.
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
    """Turn texts into token ids; the result is cached by text, tokenizer, languages and spelling.

    The tokenizer itself computes on all cores.

    Args:
        rows: A split, with the column "translation".
        split: Its name; in "train" bytes that are no UTF-8 are repaired, to be counted.
        tokenizer: A fast one, which ends each sentence with its end token.
        source_lang: Language to translate from.
        target_lang: Language to translate into.
        text_sha256: From `text_hash`, where it is known.
        spelling: How to spell words other than the tokenizer does; each pair has its own chances.

    Returns:
        The columns "input_ids" and "labels", and what `judge` wants to know of each pair.

    Raises:
        ValueError: If a row is no text; says which.
        ValueError: If the tokenizer knows no other spelling.
    """
    languages = [source_lang, target_lang]
    # the tokenizer itself would not do: one that was learned is another object than the same loaded
    text_sha256 = text_sha256 or text_hash(rows, languages, split)
    content = [text_sha256, tokenizer_hash(tokenizer), split == "train"]
    if spelling is not None:
        content += dataclasses.astuple(spelling)
    key = Hasher.hash([*content, str(FEATURES), "encode_pairs"])
    own = {"split": split, "tokenizer": tokenizer, "languages": languages, "spelling": spelling}

    def encoded(place: Path) -> datasets.Dataset:
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
                fn_kwargs=own,
                new_fingerprint=key,
                cache_file_name=str(place),
                desc=f"tokenizing {split}",
            )
            .with_format(None)
        )

    return encoded(cached(f"{key}.arrow", CODE, encoded))


def encode_table(
    table: pa.Table,
    indices: Sequence[int],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    languages: Sequence[str],
    spelling: Spelling | None = None,
) -> pa.Table:
    """Turn some texts into token ids.

    Args:
        table: Rows of the column "translation".
        indices: Their numbers in the split, of which the first is looked at, for an error.
        split: As in `encode_pairs`.
        tokenizer: As in `encode_pairs`.
        languages: Source and target.
        spelling: As in `encode_pairs`.

    Returns:
        The columns of `FEATURES`.

    Raises:
        ValueError: If a row is no text; says which.
    """
    sides = texts_of(table, languages, split, indices[0] + 1, repair=split == "train")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    sentences = [[text.ids for text in backend.encode_batch_fast(side)] for side in sides]
    if spelling is not None:
        chances = [random.Random(f"{spelling.seed} {spelling.number} {index}") for index in indices]
        for number, (side, dropout) in enumerate(zip(sides, spelling.dropout, strict=True)):
            if dropout:
                spell = BpeDropout(tokenizer, dropout)
                sentences[number] = list(map(spell, backend.encode_batch(side), chances))
    source, target = sentences
    verdicts, hashes = [], []
    for pair in zip(*sides, strict=True):
        is_wrong = any(NO_TEXT.search(text) for text in pair)
        is_empty = not all(text.strip() for text in pair)
        verdicts.append(WRONG_ENCODING if is_wrong else EMPTY if is_empty else KEPT)
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


def lengths(rows: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of all pairs, in tokens.

    Args:
        rows: From `encode_pairs`.

    Returns:
        Of the sources, and of the targets.
    """
    columns = rows.with_format("numpy")
    return columns["source_length"][:], columns["target_length"][:]


def judge(
    rows: datasets.Dataset,
    max_length: int,
    max_length_ratio: float | None = None,
    drop_duplicates: bool = False,
) -> np.ndarray:
    """Say of each pair whether it is fit to train on.

    Args:
        rows: From `encode_pairs`.
        max_length: Most tokens of either side, the end token included.
        max_length_ratio: Most tokens of the longer side for each of the shorter, end tokens left
            out.
        drop_duplicates: Keep only the first of pairs that are equal in every character. Takes 40
            bytes for each of a few million pairs at a time.

    Returns:
        Lengths of the sources, lengths of the targets, and places in `VERDICTS`, [3, pairs].
    """
    judged = np.empty((3, len(rows)), np.int32)
    columns = rows.select_columns(["source_length", "target_length", "verdict"])
    for first in range(0, len(rows), CHUNK):
        part = columns.with_format("numpy")[first : first + CHUNK]
        source, target, verdict = (part[name] for name in columns.column_names)
        shorter, longer = np.minimum(source, target), np.maximum(source, target)
        # an empty sentence is its end token
        verdict[(verdict == KEPT) & (shorter <= 1)] = EMPTY
        verdict[(verdict == KEPT) & (longer > max_length)] = TOO_LONG
        if max_length_ratio is not None:
            is_skewed = longer - 1 > max_length_ratio * (shorter - 1)
            verdict[(verdict == KEPT) & is_skewed] = LENGTH_RATIO
        judged[:, first : first + CHUNK] = source, target, verdict
    if drop_duplicates:
        for numbers in _repeats(rows, judged[2] == KEPT):
            judged[2, numbers] = DUPLICATE
    return judged


def _repeats(rows: datasets.Dataset, is_kept: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers of pairs that have come before, a part of all hashes at a time."""
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
        # of equal hashes the order stays, and the first pair is first
        order = np.lexsort((low, high))
        is_repeat = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
        yield numbers[order[1:][is_repeat]]


def counts_of(verdicts: np.ndarray) -> dict[str, int]:
    """Count what was kept and what was left out, and why.

    Args:
        verdicts: Places in `VERDICTS`, [pairs].

    Returns:
        A number for each of `VERDICTS`, also where it is 0.
    """
    numbers = np.bincount(verdicts, minlength=len(VERDICTS)).tolist()
    return dict(zip(VERDICTS, numbers, strict=True))


def say_counts(counts: Mapping[str, int]) -> str:
    """The counts, to be read.

    Args:
        counts: From `counts_of`.

    Returns:
        One line.
    """
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def refuse_useless(counts: Mapping[str, int], corpus: str) -> None:
    """Refuse text of which nothing is left, or which was read with a wrong encoding.

    Args:
        counts: From `counts_of`.
        corpus: Its name, for an error.

    Raises:
        ValueError: If no pair is kept, or most have a wrong encoding.
    """
    if 2 * counts["wrong_encoding"] > sum(counts.values()):
        raise ValueError(
            f"{corpus} must be UTF-8 in at least half of its pairs, got {say_counts(counts)}."
        )
    if counts["kept"] == 0:
        raise ValueError(
            f"{corpus} must have a pair that is fit to be used, got {say_counts(counts)}."
        )


def drop_untrainable(
    rows: datasets.Dataset, split: str, max_length: int
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Leave out pairs with an empty, a too long or a garbled side, and say how many.

    Args:
        rows: From `encode_pairs`.
        split: Its name, for the log.
        max_length: Most tokens of either side, the end token included.

    Returns:
        The pairs to train on, and how many were kept and left out.

    Raises:
        ValueError: If nothing is left, or most are garbled.
    """
    verdicts = judge(rows, max_length)[2]
    counts = counts_of(verdicts)
    logger.info("%s: %s", split, say_counts(counts))
    refuse_useless(counts, split)
    if counts["kept"] == len(rows):
        return rows, counts
    return rows.select(np.flatnonzero(verdicts == KEPT)), counts


class Pairs:
    """Tokenized pairs, on disk or in memory, that are taken by their numbers.

    Args:
        rows: From `encode_pairs`.
        judged: From `judge`; nothing is copied, and a file that is mapped is one for all processes.
    """

    def __init__(self, rows: datasets.Dataset, judged: np.ndarray):
        self.rows = rows
        self.judged = judged

    def __reduce__(self):
        return Pairs, (self.rows, self.judged)

    @property
    def source_lengths(self) -> np.ndarray:
        """Tokens of each source, [pairs]."""
        return self.judged[0]

    @property
    def target_lengths(self) -> np.ndarray:
        """Tokens of each target, [pairs]."""
        return self.judged[1]

    def kept(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Numbers of the pairs that are fit to train on.

        Args:
            first: Number of the first pair to look at.
            last: Number of the pair after the last; None for the end.

        Returns:
            The numbers, in order.
        """
        verdicts = self.judged[2, first:last]
        parts = [
            (first + start + np.flatnonzero(verdicts[start : start + CHUNK] == KEPT)).astype(
                np.int32
            )
            for start in range(0, len(verdicts), CHUNK)
        ]
        return np.concatenate([np.empty(0, np.int32), *parts])

    def __getitem__(self, numbers: np.ndarray) -> dict[str, list[np.ndarray]]:
        """Take some pairs.

        Args:
            numbers: Of the pairs.

        Returns:
            Columns "input_ids" and "labels".
        """
        starts, columns = self._columns
        places = np.searchsorted(starts, numbers, side="right") - 1
        inside = (numbers - starts[places]).tolist()
        return {
            name: [
                chunks[place][1][slice(*chunks[place][0][index : index + 2])]
                for place, index in zip(places.tolist(), inside, strict=True)
            ]
            for name, chunks in columns.items()
        }

    @cached_property
    def _columns(self) -> tuple[np.ndarray, dict[str, list[tuple[np.ndarray, np.ndarray]]]]:
        """Where each part of the table starts, and its ends of sentences and tokens, not copied."""
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
) -> Pairs:
    """Put corpora together and judge their pairs; the judgement is cached by its content.

    Args:
        parts: Corpora, from `encode_pairs`.
        max_length: As in `judge`.
        max_length_ratio: As in `judge`.
        drop_duplicates: As in `judge`, across the corpora.
        spelled: The same corpora spelled in other ways, one way after another.

    Returns:
        All pairs; in the other spellings if there are any, none of which is too long.
    """
    rows = datasets.concatenate_datasets(list(parts))
    rules = (max_length, max_length_ratio, drop_duplicates)
    prints = [[part._fingerprint for part in some] for some in (parts, spelled)]
    key = Hasher.hash([*prints, rules, "judge"])

    def write(place: Path):
        judged = judge(rows, *rules)
        if spelled:
            sides = zip(*map(lengths, spelled), strict=True)
            sizes = np.stack([np.concatenate(side) for side in sides])  # [2, spellings * pairs]
            longest = sizes.max(axis=0).reshape(-1, len(rows)).max(axis=0)
            # a pair must fit however it is spelled
            judged[2, (judged[2] == KEPT) & (longest > max_length)] = TOO_LONG
            judged = np.concatenate([sizes, [np.tile(judged[2], len(spelled) // len(parts))]])
        with place.open("wb") as file:
            np.save(file, judged)

    path = cached(f"{key}.npy", CODE, write)
    if spelled:
        rows = datasets.concatenate_datasets(list(spelled))
    return Pairs(rows, np.load(path, mmap_mode="r"))
