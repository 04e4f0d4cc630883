"""A treebank as sentence pairs for training."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..parsing import prepare_treebank
from ..study import Section


def treebank_section(
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
    total_counts = sum(counts.values(), Counter())
    num_tags, num_empty_elements = total_counts["function tags"], total_counts["empty elements"]
    count_names = list(
        dict.fromkeys(name for split_counts in counts.values() for name in split_counts)
    )
    return Section(
        name="treebank",
        title="The treebank as sentence pairs",
        finding=f"{folder} has {total_counts['trees']:,} sentence pairs: the words, and the "
        "linearized tree. Parsers are scored without traces and function tags, so "
        f"{num_tags:,} tags and {num_empty_elements:,} empty elements were removed. To train a "
        f"parser, run `vanilla-transformer train paper-parsing --dataset {folder}`, or use "
        "parsing-small on a CPU.",
        columns=("split", *count_names),
        rows=[
            [split, *(split_counts[name] for name in count_names)]
            for split, split_counts in counts.items()
        ],
        # do not replace the page of the study, which may have scores from an earlier call
        is_printed_only=True,
    )
