"""Table 4: English constituency parsing as translation into brackets. Section 6.3."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..study import Section
from ..trained import add_model_flag
from .examples import example, rules
from .model_scores import results
from .paper_scores import published
from .treebank import preparation


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    group = parser.add_argument_group("prepare a treebank, to train on with recipe paper-parsing")
    group.add_argument(
        "--prepare", metavar="FOLDER", type=Path, help="for train.en, train.tree and so on"
    )
    for split, what in (
        ("train", "to train on"),
        ("validation", "to validate with; the last of those to train on if not given"),
        ("test", "to evaluate with"),
    ):
        group.add_argument(
            f"--{split}",
            metavar="TREES",
            nargs="+",
            default=[],
            help=f"bracketed files or folders {what}",
        )
    group = parser.add_argument_group("parse with a trained model, and score")
    add_model_flag(group, default=None)
    group.add_argument(
        "--trees", metavar="TREES", nargs="+", help="bracketed files or folders: the gold trees"
    )
    group.add_argument(
        "--num_sentences", type=int, default=50, help="the first so many; 0: all (%(default)s)"
    )
    group.add_argument("--num_beams", type=int, help="beam size; the model's own if not given")
    group.add_argument(
        "--batch_size", type=int, default=32, help="sentences at a time (%(default)s)"
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Table 4; how a tree becomes a sentence and is scored; and how a model of ours parses.

    Args:
        flags: As `add_flags` declares them.

    Yields:
        One section for a treebank that is prepared; else three, and three more with a model.

    Raises:
        ValueError: If a flag lacks another, or a treebank or model cannot be read.
    """
    _refuse_halves(flags)
    if flags.prepare is not None:
        yield preparation(flags.prepare, flags.train, flags.validation, flags.test)
        return
    # what cannot be read is refused before anything is shown
    found = iter(()) if flags.model is None else results(flags)
    yield published()
    yield example(is_all=flags.model is None)
    yield rules()
    yield from found


def _refuse_halves(flags: argparse.Namespace):
    if flags.prepare is not None and not flags.train:
        raise ValueError("train must be given with prepare, got none.")
    if flags.prepare is None and (flags.train or flags.validation or flags.test):
        raise ValueError("prepare must be given with train, validation and test, got none.")
    if (flags.model is None) != (flags.trees is None):
        raise ValueError("model and trees must be given together, got one.")
    if flags.prepare is not None and flags.model is not None:
        raise ValueError("prepare must be alone, for a model is trained after it, got model too.")
    if flags.num_sentences < 0:
        raise ValueError(f"num_sentences must not be negative, got {flags.num_sentences}.")
    if flags.batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {flags.batch_size}.")
