"""Count the pairs of a training text that can be used, before it is tokenized."""

from typing import NamedTuple

import numpy as np

from .corpus import texts_of
from .mojibake import GARBLED
from .pairs import format_counts, refuse_unusable
from .prepare import Texts

# largest number of pairs of a corpus that are read to estimate how many pairs can be used
SAMPLED_PAIRS = 100_000


class Counts(NamedTuple):
    """Size of a training text.

    Args:
        pairs: Number of pairs that can be used.
        languages: Source and target language.
        characters: Mean number of characters of a source and of a target.
        words: Mean number of words, between spaces, of a source and of a target.
        cleaning: Numbers of pairs of each corpus that are kept and left out, as text.
    """

    pairs: int
    languages: tuple[str, ...]
    characters: tuple[float, ...]
    words: tuple[float, ...]
    cleaning: tuple[str, ...] = ()

    def __str__(self) -> str:
        means = zip(self.languages, self.characters, self.words, strict=True)
        return f"{self.pairs:,} pairs to train on; averages per sentence: " + "; ".join(
            f"{language} {characters:.1f} characters, {words:.1f} words"
            for language, characters, words in means
        )


def count_pairs(texts: Texts) -> Counts:
    """Count the pairs to train on, without those that have an empty side or a wrong encoding.

    Args:
        texts: Text from `load_texts`.

    Returns:
        The counts; estimates for a corpus of more than `SAMPLED_PAIRS`.

    Raises:
        ValueError: If no pair of a corpus can be used, or most of its pairs have a wrong encoding.
    """
    num_pairs, length_sums, cleaning = 0.0, np.zeros((2, 2)), []
    for name, rows in zip(texts.names, texts.train, strict=True):
        num_kept = num_garbled = 0
        row_numbers = np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_PAIRS)).astype(int)
        for table in rows.select(row_numbers).with_format("arrow").iter(batch_size=10_000):
            sides = texts_of(table, texts.languages, "train", repair=True)
            readable_pairs = [
                pair
                for pair in zip(*sides, strict=True)
                if not any(GARBLED.search(text) for text in pair)
            ]
            pair_lengths = [
                ([len(text) for text in pair], [len(text.split()) for text in pair])
                for pair in readable_pairs
                if all(text.strip() for text in pair)
            ]
            num_garbled += len(table) - len(readable_pairs)
            num_kept += len(pair_lengths)
            if pair_lengths:
                length_sums += np.sum(pair_lengths, axis=0) * len(rows) / len(row_numbers)
        num_empty = len(row_numbers) - num_kept - num_garbled
        sampled_counts = {"kept": num_kept, "wrong_encoding": num_garbled, "empty": num_empty}
        refuse_unusable(sampled_counts, name)
        growth = len(rows) / len(row_numbers)
        num_pairs += num_kept * growth
        counts = {verdict: round(count * growth) for verdict, count in sampled_counts.items()}
        cleaning.append(f"training pairs of {name}: {format_counts(counts)}")
    characters, words = (length_sums / num_pairs).tolist()
    return Counts(
        round(num_pairs), texts.languages, tuple(characters), tuple(words), tuple(cleaning)
    )
