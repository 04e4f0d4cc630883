"""Hold out pairs of a corpus for validation, and remove their sentences from the training text."""

from collections.abc import Sequence
from functools import reduce

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .corpus import texts_of
from .mojibake import GARBLED


def hold_out(
    rows: datasets.Dataset, languages: Sequence[str], num_pairs: int, seed: int, corpus: str
) -> datasets.Dataset:
    """Draw pairs of a corpus at random, without those that have an empty side or a wrong encoding.

    Args:
        rows: Training split of the corpus, with the column "translation".
        languages: Source and target language.
        num_pairs: Number of pairs to draw.
        seed: Seed of the run, which determines the pairs.
        corpus: Name of the corpus, for an error.

    Returns:
        The pairs, in the order of the corpus.

    Raises:
        ValueError: If fewer than `num_pairs` pairs of the corpus can be used.
    """
    order = np.arange(len(rows), dtype=np.int32)
    np.random.default_rng([seed, 5]).shuffle(order)
    usable_pairs: list[int] = []
    for first in range(0, len(order), num_pairs):
        pair_indices = order[first : first + num_pairs]
        table = rows.select(pair_indices).with_format("arrow")[:]
        sides = texts_of(table, languages, "train", repair=True)
        usable_pairs += [
            int(pair_index)
            for pair_index, *pair in zip(pair_indices, *sides, strict=True)
            if all(text.strip() and not GARBLED.search(text) for text in pair)
        ]
        if len(usable_pairs) >= num_pairs:
            return rows.select(sorted(usable_pairs[:num_pairs]))
    raise ValueError(
        f"validation_pairs must be at most {len(usable_pairs):,}, the pairs of {corpus} that can "
        f"be used, got {num_pairs:,}."
    )


def drop_overlapping_pairs(
    rows: datasets.Dataset, held_out: datasets.Dataset, languages: Sequence[str]
) -> datasets.Dataset:
    """Leave out the pairs whose source or target is that of a held-out pair.

    Args:
        rows: Training split of a corpus, with the column "translation".
        held_out: Pairs from `hold_out`.
        languages: Source and target language.

    Returns:
        The remaining pairs, in order.
    """
    table = held_out.with_format("arrow")[:]
    held_out_texts = {language: _text_bytes(table, language) for language in languages}
    is_unshared = [
        pc.invert(
            reduce(
                pc.or_,
                (
                    pc.is_in(_text_bytes(chunk, language), held_out_texts[language])
                    for language in languages
                ),
            )
        )
        for chunk in rows.with_format("arrow").iter(batch_size=10_000)
    ]
    return rows.select(np.flatnonzero(pa.chunked_array(is_unshared).to_numpy()))


def _text_bytes(table: pa.Table, language: str) -> pa.Array:
    # compare bytes, because some programs write bytes that are not UTF-8 into a text column
    return pc.struct_field(table["translation"], language).cast(pa.large_binary()).combine_chunks()
