"""Find sentences of the evaluation splits in the training text.

A training sentence contains an evaluation sentence of the same language

* exactly, if both are equal after normalization: Unicode's NFKC, case folding, and one space for
  each run of punctuation and white space;
* nearly, if it contains at least 70% of the distinct 5-grams of the evaluation sentence, which must
  have at least four distinct 5-grams.

The units of an n-gram are words, or characters in Korean and in languages without spaces between
words.
PaLM (Chowdhery et al. 2022, section 8) also uses 70%, but of the 8-grams of an evaluation example
that occur anywhere in the training text. Sentences are shorter than PaLM's examples. Therefore, the
n-grams here are shorter, and a single training sentence must contain them.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.fingerprint import Hasher
from datasets.utils import tqdm

from ..config import UNSPACED_LANGUAGES
from .cache import ensure_cached_file
from .corpus import texts_of

# number of units, words or characters, in an n-gram
NGRAM_SIZE = 5
# a training sentence is a near copy if it has this percentage of an evaluation sentence's n-grams
NEAR_PERCENTAGE = 70
# an evaluation sentence with fewer distinct n-grams has no near copies: a few common n-grams would
# be enough for the percentage
MIN_NGRAMS = 4
DEFINITION = (
    "exact: equal without case, punctuation and white space; near: one training sentence has at "
    f"least {NEAR_PERCENTAGE}% of the {NGRAM_SIZE}-grams of the sentence, which must have at least "
    f"{MIN_NGRAMS} different ones"
)
SIDES = ("source", "target")
KINDS = ("exact", "near")
EXACT, NEAR = range(2)
# columns of an array of hits
PAIR, SIDE, SENTENCE, KIND = range(4)
# number of pairs that are searched at once, so small that their arrays stay in the cache of a core
BLOCK_PAIRS = 2000
# number of leading bits of a hash that index a table, which says whether an evaluation sentence has
# an n-gram whose hash begins with these bits
HASH_PREFIX_BITS = 22
# Unicode categories of the characters that separate units: control and format characters, modifier
# symbols, punctuation and spaces
SEPARATORS = ("Cc", "Cf", "Sk", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Zs", "Zl", "Zp")
# multiplier of the polynomial hash: odd, so that it has an inverse modulo 2^64. The value is 2^64
# divided by the golden ratio
HASH_MULTIPLIER = 0x9E3779B97F4A7C15
INVERSE_MULTIPLIER = pow(HASH_MULTIPLIER, -1, 2**64)


@cache
def _separator_pattern() -> re.Pattern[str]:
    # leave out code points from 0x10000 on: there only historic scripts have punctuation, and a
    # pattern with these characters searches much slower
    codes = range(0x10000)
    separator_codes = [code for code in codes if unicodedata.category(chr(code)) in SEPARATORS]
    separator_codes = [code for code in separator_codes if chr(code) not in " \n"]
    return re.compile("[{}]+".format("".join(f"\\u{code:04x}" for code in separator_codes)))


def normalize(texts: Sequence[str], language: str) -> list[str]:
    """Normalize sentences, so that case, punctuation and white space do not count in a comparison.

    Args:
        texts: Sentences.
        language: Language of the sentences.

    Returns:
        Units of each sentence, words or characters, with one space between them.
    """
    joined = "\n".join(texts)
    if joined.count("\n") >= len(texts):
        joined = "\n".join(text.replace("\n", " ") for text in texts)
    joined = unicodedata.normalize("NFKC", joined).casefold()
    joined = _separator_pattern().sub(" ", joined)
    while "  " in joined:
        joined = joined.replace("  ", " ")
    lines = [line.strip(" ") for line in joined.split("\n")]
    if re.split("[-_]", language.lower())[0] in UNSPACED_LANGUAGES:
        return [" ".join(line.replace(" ", "")) for line in lines]
    return lines


def ngrams(line: str) -> set[str]:
    """Return the distinct n-grams of a sentence.

    Args:
        line: Normalized sentence.

    Returns:
        N-grams of `NGRAM_SIZE` units; an empty set if the sentence has fewer units.
    """
    units = line.split(" ")
    return {" ".join(units[i : i + NGRAM_SIZE]) for i in range(len(units) - NGRAM_SIZE + 1)}


@lru_cache(maxsize=8)
def _powers(base: int, num_powers: int) -> np.ndarray:
    """Return the powers of a number modulo 2^64, from its power 0."""
    powers = np.full(num_powers, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers)


def _hash_ngrams(lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hash all n-grams of normalized sentences; return their line numbers and their hashes.

    The hash of an n-gram is the sum of its bytes, each times HASH_MULTIPLIER^(position in the
    n-gram), modulo 2^64. It is computed as the difference of two prefix sums over the whole text,
    divided by the power for the n-gram's first byte.
    """
    text_bytes = np.frombuffer("\n".join([*lines, ""]).encode(), np.uint8)
    # round the size up to a power of two, so that `_powers` caches only a few sizes
    num_powers = 1 << len(text_bytes).bit_length()
    prefix_sums = np.zeros(len(text_bytes) + 1, np.uint64)
    np.cumsum(
        text_bytes * _powers(HASH_MULTIPLIER, num_powers)[: len(text_bytes)], out=prefix_sums[1:]
    )
    is_end = text_bytes == ord("\n")
    line_indices = np.cumsum(is_end, dtype=np.int32)
    is_space = is_end | (text_bytes == ord(" "))
    starts = np.flatnonzero(~is_space & np.concatenate([[True], is_space[:-1]]))
    ends = np.flatnonzero(is_space & ~np.concatenate([[True], is_space[:-1]]))
    ends = ends[NGRAM_SIZE - 1 :]
    starts = starts[: len(ends)]
    # keep only the n-grams that end in the line in which they start
    is_within_line = line_indices[starts] == line_indices[ends - 1]
    starts, ends = starts[is_within_line], ends[is_within_line]
    inverse_powers = _powers(INVERSE_MULTIPLIER, num_powers)
    hashes = (prefix_sums[ends] - prefix_sums[starts]) * inverse_powers[starts]
    return line_indices[starts], hashes


class EvaluationSentences:
    """Finder of evaluation sentences of one language in training sentences.

    Args:
        texts: Sentences. Several versions of all sentences, such as references, follow one another.
        language: Language of the sentences.
        num_sentences: Number of sentences in one version.
    """

    def __init__(self, texts: Sequence[str], language: str, num_sentences: int):
        self.language = language
        self.num_sentences = num_sentences
        self.lines = normalize(texts, language)
        self._sentences_by_line: dict[str, list[int]] = {}
        for sentence_index, line in enumerate(self.lines):
            if line:
                self._sentences_by_line.setdefault(line, []).append(sentence_index)
        sentence_indices, hashes = _hash_ngrams(self.lines)
        if len(sentence_indices):
            sentence_indices, hashes = np.unique(
                np.stack([sentence_indices.astype(np.uint64), hashes]), axis=1
            )
        sentence_indices = sentence_indices.astype(np.int64)
        ngram_counts = np.bincount(sentence_indices, minlength=len(self.lines))
        self.min_shared_ngrams = -(-ngram_counts * NEAR_PERCENTAGE // 100)  # rounded up
        is_long = ngram_counts[sentence_indices] >= MIN_NGRAMS
        order = np.argsort(hashes[is_long], kind="stable")
        self._ngram_hashes = hashes[is_long][order]
        self._ngram_sentences = sentence_indices[is_long][order]
        self._has_hash_prefix = np.zeros(1 << HASH_PREFIX_BITS, bool)
        self._has_hash_prefix[self._ngram_hashes >> np.uint64(64 - HASH_PREFIX_BITS)] = True

    def find(self, texts: Sequence[str]) -> list[tuple[int, int, int]]:
        """Find the evaluation sentences in training sentences.

        Args:
            texts: Training sentences.

        Returns:
            Hits: index of the training sentence, index of the evaluation sentence that it contains,
            and kind, `EXACT` or `NEAR`.
        """
        lines = normalize(texts, self.language)
        hit_kinds = {
            (line_index, sentence % self.num_sentences): EXACT
            for line_index, line in enumerate(lines)
            if line in self._sentences_by_line
            for sentence in self._sentences_by_line[line]
        }
        for line_index, sentence in self._find_candidates(lines):
            # count the shared n-grams themselves, because different n-grams can have equal hashes
            num_shared = len(ngrams(lines[line_index]) & ngrams(self.lines[sentence]))
            if num_shared >= self.min_shared_ngrams[sentence]:
                hit_kinds.setdefault((line_index, sentence % self.num_sentences), NEAR)
        return [(*line_and_sentence, kind) for line_and_sentence, kind in sorted(hit_kinds.items())]

    def _find_candidates(self, lines: Sequence[str]) -> list[list[int]]:
        """Return pairs of a line index and a sentence index that share enough n-gram hashes."""
        line_indices, hashes = _hash_ngrams(lines)
        is_possible = self._has_hash_prefix[hashes >> np.uint64(64 - HASH_PREFIX_BITS)]
        line_indices, hashes = line_indices[is_possible], hashes[is_possible]
        first_entries = np.searchsorted(self._ngram_hashes, hashes, side="left")
        entry_counts = np.searchsorted(self._ngram_hashes, hashes, side="right") - first_entries
        # indices of all entries that have the first hash, then of all that have the second, and so
        # on: each entry is one evaluation sentence with this n-gram
        offsets = np.arange(entry_counts.sum()) - np.repeat(
            np.cumsum(entry_counts) - entry_counts, entry_counts
        )
        sentence_indices = self._ngram_sentences[np.repeat(first_entries, entry_counts) + offsets]
        pair_codes = (
            np.repeat(line_indices, entry_counts).astype(np.int64) * len(self.lines)
            + sentence_indices
        )
        pair_codes, num_shared = np.unique(pair_codes, return_counts=True)
        line_indices, sentence_indices = np.divmod(pair_codes, len(self.lines) or 1)
        is_enough = num_shared >= self.min_shared_ngrams[sentence_indices]
        return np.stack([line_indices, sentence_indices])[:, is_enough].T.tolist()


class LeakFinder:
    """Finder of evaluation sentence pairs in training pairs.

    Args:
        sources: Source sentences.
        targets: Target sentences. With several references, the first reference of all sentences
            comes before the second reference of all sentences.
        languages: Source and target language.
    """

    def __init__(self, sources: Sequence[str], targets: Sequence[str], languages: Sequence[str]):
        self.texts = list(sources), list(targets)
        self.languages = tuple(languages)

    @cached_property
    def _sides(self) -> list[EvaluationSentences]:
        # made at the first search, because results from the cache of `find_leaks` do not need them
        sides = zip(self.texts, self.languages, strict=True)
        return [
            EvaluationSentences(texts, language, len(self.texts[0])) for texts, language in sides
        ]

    def find(self, sides: Sequence[Sequence[str]], first_pair: int = 0) -> np.ndarray:
        """Find the evaluation sentences in training pairs, sources in sources, targets in targets.

        Args:
            sides: Sources and targets of the training pairs.
            first_pair: Index of the first training pair, for the result.

        Returns:
            Hits: index of the training pair, index in `SIDES`, index of the evaluation sentence and
            index in `KINDS`, [hits, 4].
        """
        hits = [
            (first_pair + pair, side, sentence, kind)
            for side, (sentences, texts) in enumerate(zip(self._sides, sides, strict=True))
            for pair, sentence, kind in sentences.find(texts)
        ]
        return np.array(hits, np.int32).reshape(-1, 4)


def find_leaks(
    corpora: Sequence[datasets.Dataset],
    hashes: Sequence[str],
    finder: LeakFinder,
) -> np.ndarray:
    """Find evaluation sentences in the training text. The hits are cached by the texts of both.

    Args:
        corpora: Training split of each corpus.
        hashes: Hash of each corpus, from `text_hash`.
        finder: Finder of the evaluation sentences.

    Returns:
        Hits as in `LeakFinder.find`; training pairs are numbered corpus after corpus.

    Raises:
        ValueError: If a row of the training text is not text; names the row.
    """
    hits_by_corpus, corpus_start = [], 0
    for rows, text_sha256 in zip(corpora, hashes, strict=True):
        key = Hasher.hash([text_sha256, finder.texts, finder.languages])

        def write(path: Path, rows: datasets.Dataset = rows):
            hit_chunks = [np.empty((0, 4), np.int32)]
            first_pair = 0
            with tqdm(total=len(rows), desc="searching for leaks", unit=" pairs") as progress_bar:
                for table in rows.with_format("arrow").iter(batch_size=BLOCK_PAIRS):
                    sides = texts_of(table, finder.languages, "train", first_pair + 1, repair=True)
                    hit_chunks.append(finder.find(sides, first_pair))
                    first_pair += len(table)
                    progress_bar.update(len(table))
            with path.open("wb") as file:
                np.save(file, np.concatenate(hit_chunks))

        corpus_hits = np.load(ensure_cached_file(f"{key}.npy", [__file__], write))
        corpus_hits[:, PAIR] += corpus_start
        hits_by_corpus.append(corpus_hits)
        corpus_start += len(rows)
    return np.concatenate(hits_by_corpus)


def hash_inputs(training_sha256: str, finder: LeakFinder) -> str:
    """Hash everything that determines the hits of `find_leaks`, so that their counts can be saved.

    Args:
        training_sha256: Hashes of all corpora, from `text_hash`, as one text.
        finder: Finder of the evaluation sentences.

    Returns:
        SHA-256 of the inputs and of the code of this module.
    """
    inputs = json.dumps([training_sha256, finder.texts, finder.languages])
    return hashlib.sha256(Path(__file__).read_bytes() + inputs.encode()).hexdigest()


def count_leaks(hits: np.ndarray) -> dict[str, int]:
    """Count the evaluation sentences that the training text contains.

    Args:
        hits: Hits from `find_leaks`.

    Returns:
        Number of evaluation sentences, by side and kind: `source_exact` and so on. A sentence that
        is contained exactly is not counted as near. `pairs` is the number of training pairs that
        contain an evaluation sentence.
    """
    counts = {}
    for side, name in enumerate(SIDES):
        side_hits = hits[hits[:, SIDE] == side]
        exact_sentences, near_sentences = (
            np.unique(side_hits[side_hits[:, KIND] == kind, SENTENCE]) for kind in (EXACT, NEAR)
        )
        counts[f"{name}_exact"] = len(exact_sentences)
        counts[f"{name}_near"] = len(np.setdiff1d(near_sentences, exact_sentences))
    return {**counts, "pairs": len(np.unique(hits[:, PAIR]))}


def describe_leaks(counts: Mapping[str, Any] | str) -> str:
    """Describe how many evaluation sentences the training text contains.

    Args:
        counts: Counts from `count_leaks`, or the reason why the sentences are not counted.

    Returns:
        The counts or the reason, in one line.
    """
    if isinstance(counts, str):
        return f"not counted, because {counts}"
    sides = ", ".join(
        f"{side} {counts[f'{side}_exact']:,} exact and {counts[f'{side}_near']:,} near"
        for side in SIDES
    )
    pairs = counts["pairs"]
    return f"{sides}, in {pairs:,} training pair{'s' * (pairs != 1)}"
