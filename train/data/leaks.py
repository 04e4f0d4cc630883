"""Find sentences of the evaluation splits in the training text.

A training sentence contains an evaluation sentence of the same language

* exactly, if both are equal after normalization: Unicode's NFKC, case folding, and one space for
  each run of punctuation and white space;
* nearly, if it contains at least 70% of the distinct 5-grams of the evaluation sentence, which must
  have at least four distinct 5-grams.

The units of an n-gram are words, or characters in languages that do not separate words by spaces.
The 70% are those of PaLM (Chowdhery et al. 2022, section 8), which counts how many 8-grams of an
evaluation example occur anywhere in the training text. Two things differ here, because sentences
are shorter than PaLM's examples: the n-grams are shorter, and a single training sentence must
contain them.
"""

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
from .cache import cached
from .corpus import texts_of

# number of units, words or characters, in an n-gram
NGRAM_SIZE = 5
# a training sentence is a near copy if it has this percentage of an evaluation sentence's n-grams
PERCENTAGE = 70
# an evaluation sentence with fewer distinct n-grams has no near copies: a few common n-grams would
# be enough for the percentage
FEWEST = 4
DEFINITION = (
    "exact: equal without case, punctuation and white space; near: one training sentence has at "
    f"least {PERCENTAGE}% of the {NGRAM_SIZE}-grams of the sentence, of at least {FEWEST}"
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
TABLE_BITS = 22
# Unicode categories of the characters that separate units: control and format characters, modifier
# symbols, punctuation and spaces
SEPARATORS = ("Cc", "Cf", "Sk", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Zs", "Zl", "Zp")
# multiplier of the polynomial hash: odd, so that it has an inverse modulo 2^64. The value is 2^64
# divided by the golden ratio
MULTIPLIER = 0x9E3779B97F4A7C15
INVERSE = pow(MULTIPLIER, -1, 2**64)


@cache
def _separators() -> re.Pattern[str]:
    # leave out code points from 0x10000 on: there only historic scripts have punctuation, and a
    # pattern with these characters searches much slower
    codes = range(0x10000)
    found = [code for code in codes if unicodedata.category(chr(code)) in SEPARATORS]
    found = [code for code in found if chr(code) not in " \n"]
    return re.compile("[{}]+".format("".join(f"\\u{code:04x}" for code in found)))


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
    joined = _separators().sub(" ", joined)
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
def _powers(number: int, size: int) -> np.ndarray:
    """Return the powers of a number modulo 2^64, from its power 0."""
    powers = np.full(size, number, np.uint64)
    powers[0] = 1
    return np.cumprod(powers)


def _ngram_hashes(lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hash all n-grams of normalized sentences; return their line numbers and their hashes.

    The hash of an n-gram is the sum of its bytes, each times MULTIPLIER^(position in the n-gram),
    modulo 2^64. It is computed as the difference of two prefix sums over the whole text, divided by
    the power for the n-gram's first byte.
    """
    text = np.frombuffer("\n".join([*lines, ""]).encode(), np.uint8)
    # round the size up to a power of two, so that `_powers` caches only a few sizes
    size = 1 << len(text).bit_length()
    sums = np.zeros(len(text) + 1, np.uint64)
    np.cumsum(text * _powers(MULTIPLIER, size)[: len(text)], out=sums[1:])
    is_end = text == ord("\n")
    line_of = np.cumsum(is_end, dtype=np.int32)
    is_space = is_end | (text == ord(" "))
    starts = np.flatnonzero(~is_space & np.concatenate([[True], is_space[:-1]]))
    ends = np.flatnonzero(is_space & ~np.concatenate([[True], is_space[:-1]]))
    ends = ends[NGRAM_SIZE - 1 :]
    starts = starts[: len(ends)]
    # keep only the n-grams that end in the line in which they start
    is_whole = line_of[starts] == line_of[ends - 1]
    starts, ends = starts[is_whole], ends[is_whole]
    hashes = (sums[ends] - sums[starts]) * _powers(INVERSE, size)[starts]
    return line_of[starts], hashes


class Sentences:
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
        self._numbers_of: dict[str, list[int]] = {}
        for number, line in enumerate(self.lines):
            if line:
                self._numbers_of.setdefault(line, []).append(number)
        numbers, hashes = _ngram_hashes(self.lines)
        if len(numbers):
            numbers, hashes = np.unique(np.stack([numbers.astype(np.uint64), hashes]), axis=1)
        numbers = numbers.astype(np.int64)
        sizes = np.bincount(numbers, minlength=len(self.lines))
        self.needed = -(-sizes * PERCENTAGE // 100)  # rounded up
        is_long = sizes[numbers] >= FEWEST
        order = np.argsort(hashes[is_long], kind="stable")
        self._hashes, self._numbers = hashes[is_long][order], numbers[is_long][order]
        self._table = np.zeros(1 << TABLE_BITS, bool)
        self._table[self._hashes >> np.uint64(64 - TABLE_BITS)] = True

    def find(self, texts: Sequence[str]) -> list[tuple[int, int, int]]:
        """Find the evaluation sentences in training sentences.

        Args:
            texts: Training sentences.

        Returns:
            Hits: index of the training sentence, index of the evaluation sentence that it contains,
            and kind, `EXACT` or `NEAR`.
        """
        lines = normalize(texts, self.language)
        found = {
            (index, number % self.num_sentences): EXACT
            for index, line in enumerate(lines)
            if line in self._numbers_of
            for number in self._numbers_of[line]
        }
        for index, number in self._candidates(lines):
            # count the shared n-grams themselves, because different n-grams can have equal hashes
            num_shared = len(ngrams(lines[index]) & ngrams(self.lines[number]))
            if num_shared >= self.needed[number]:
                found.setdefault((index, number % self.num_sentences), NEAR)
        return [(*key, kind) for key, kind in sorted(found.items())]

    def _candidates(self, lines: Sequence[str]) -> list[list[int]]:
        """Return pairs of a line index and a sentence index that share enough n-gram hashes."""
        line_numbers, hashes = _ngram_hashes(lines)
        is_known = self._table[hashes >> np.uint64(64 - TABLE_BITS)]
        line_numbers, hashes = line_numbers[is_known], hashes[is_known]
        first = np.searchsorted(self._hashes, hashes, side="left")
        counts = np.searchsorted(self._hashes, hashes, side="right") - first
        # indices of all entries that have the first hash, then of all that have the second, and so
        # on: each entry is one evaluation sentence with this n-gram
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = self._numbers[np.repeat(first, counts) + offsets]
        pairs = np.repeat(line_numbers, counts).astype(np.int64) * len(self.lines) + numbers
        pairs, num_shared = np.unique(pairs, return_counts=True)
        indices, numbers = np.divmod(pairs, len(self.lines) or 1)
        is_enough = num_shared >= self.needed[numbers]
        return np.stack([indices, numbers])[:, is_enough].T.tolist()


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
    def _sides(self) -> list[Sentences]:
        # made at the first search, because results from the cache of `find_leaks` do not need them
        sides = zip(self.texts, self.languages, strict=True)
        return [Sentences(texts, language, len(self.texts[0])) for texts, language in sides]

    def find(self, sides: Sequence[Sequence[str]], first: int = 0) -> np.ndarray:
        """Find the evaluation sentences in training pairs, sources in sources, targets in targets.

        Args:
            sides: Sources and targets of the training pairs.
            first: Index of the first training pair, for the result.

        Returns:
            Hits: index of the training pair, index in `SIDES`, index of the evaluation sentence and
            index in `KINDS`, [hits, 4].
        """
        found = [
            (first + index, side, number, kind)
            for side, (sentences, texts) in enumerate(zip(self._sides, sides, strict=True))
            for index, number, kind in sentences.find(texts)
        ]
        return np.array(found, np.int32).reshape(-1, 4)


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
    hits, start = [], 0
    for rows, text_sha256 in zip(corpora, hashes, strict=True):
        key = Hasher.hash([text_sha256, finder.texts, finder.languages])

        def write(path: Path, rows: datasets.Dataset = rows):
            parts = [np.empty((0, 4), np.int32)]
            first = 0
            with tqdm(total=len(rows), desc="searching for leaks", unit=" pairs") as bar:
                for table in rows.with_format("arrow").iter(batch_size=BLOCK_PAIRS):
                    sides = texts_of(table, finder.languages, "train", first + 1, repair=True)
                    parts.append(finder.find(sides, first))
                    first += len(table)
                    bar.update(len(table))
            with path.open("wb") as file:
                np.save(file, np.concatenate(parts))

        found = np.load(cached(f"{key}.npy", [__file__], write))
        found[:, PAIR] += start
        hits.append(found)
        start += len(rows)
    return np.concatenate(hits)


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
        of_side = hits[hits[:, SIDE] == side]
        exact, near = (
            np.unique(of_side[of_side[:, KIND] == kind, SENTENCE]) for kind in (EXACT, NEAR)
        )
        counts[f"{name}_exact"] = len(exact)
        counts[f"{name}_near"] = len(np.setdiff1d(near, exact))
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
