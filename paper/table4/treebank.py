"""A treebank as sentence pairs for training."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..parsing import prepare_treebank
from ..study import Section


def preparation(
    folder: Path, train: Sequence[str], validation: Sequence[str], test: Sequence[str]
) -> Section:
    """Write a treebank as sentence pairs for training, and report its counts.

    Args:
        folder: Folder to write `train.en`, `train.tree` and so on to.
        train: Files or folders of bracketed trees for training.
        validation: Files or folders for validation; if empty, the last training trees.
        test: Files or folders for evaluation.

    Returns:
        Section with the counts.

    Raises:
        ValueError: If a file cannot be read or is not a treebank, or a split has no tree.
    """
    counts = prepare_treebank(folder, train, validation, test)
    total = sum(counts.values(), Counter())
    tags, empty = total["function tags"], total["empty elements"]
    names = list(dict.fromkeys(name for found in counts.values() for name in found))
    return Section(
        name="treebank",
        title="The treebank as sentence pairs",
        finding=f"{folder} has {total['trees']:,} sentence pairs: the words, and the linearized "
        "tree. Parsers are scored without traces and function tags, so "
        f"{tags:,} tags and {empty:,} empty elements were removed. To train a parser, run "
        f"`vanilla-transformer train paper-parsing --dataset {folder}`, or use parsing-small on a "
        "CPU.",
        columns=("split", *names),
        rows=[[split, *(found[name] for name in names)] for split, found in counts.items()],
        # do not replace the page of the study, which may have scores from an earlier call
        is_printed_only=True,
    )
