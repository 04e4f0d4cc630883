"""A treebank as pairs of sentences to train on."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..parsing import prepare_treebank
from ..study import Section


def preparation(
    folder: Path, train: Sequence[str], validation: Sequence[str], test: Sequence[str]
) -> Section:
    """Write a treebank as text to train on, and report its counts.

    Args:
        folder: Gets `train.en`, `train.tree` and so on.
        train: Files or folders of bracketed trees.
        validation: The same; taken from those to train on if empty.
        test: The same.

    Returns:
        The counts.

    Raises:
        ValueError: If a file cannot be read or holds no tree.
    """
    counts = prepare_treebank(folder, train, validation, test)
    total = sum(counts.values(), Counter())
    tags, empty = total["function tags"], total["empty elements"]
    names = list(dict.fromkeys(name for found in counts.values() for name in found))
    return Section(
        name="treebank",
        title="The treebank as pairs of sentences",
        says=f"{folder} has a line for each of {total['trees']:,} sentences and a line for its "
        f"tree. Parsers are scored without traces and function tags: {tags:,} tags and {empty:,} "
        "empty elements are gone. To train: `vanilla-transformer train paper-parsing --dataset "
        f"{folder}`, or parsing-small on a CPU.",
        columns=("split", *names),
        rows=[[split, *(found[name] for name in names)] for split, found in counts.items()],
    )
