"""Table 4: English constituency parsing as translation into brackets. Section 6.3."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..study import Section
from ..trained import add_model_flag
from .examples import example_section, rules_section
from .model_scores import model_sections
from .paper_scores import published_section
from .treebank import treebank_section


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    group = parser.add_argument_group("prepare a treebank for training with recipe paper-parsing")
    group.add_argument(
        "--prepare",
        metavar="FOLDER",
        type=Path,
        help="folder to write train.en, train.tree and so on to",
    )
    for split, purpose in (
        ("train", "for training"),
        ("validation", "for validation; the last part of the training trees if not given"),
        ("test", "for evaluation"),
    ):
        group.add_argument(
            f"--{split}",
            metavar="TREES",
            nargs="+",
            default=[],
            help=f"files or folders of bracketed trees {purpose}",
        )
    group = parser.add_argument_group("parse with a trained model and score the trees")
    add_model_flag(group, default=None)
    group.add_argument(
        "--trees", metavar="TREES", nargs="+", help="files or folders of bracketed gold trees"
    )
    group.add_argument(
        "--num_sentences",
        type=int,
        default=50,
        help="number of sentences to parse, from the first one; 0 for all (default: %(default)s)",
    )
    group.add_argument("--num_beams", type=int, help="beam size; the model's own if not given")
    group.add_argument(
        "--batch_size", type=int, default=32, help="sentences per batch (default: %(default)s)"
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Prepare a treebank, or show Table 4, score an example, and score a model if one is given.

    Args:
        flags: Flags that `add_flags` declares.

    Yields:
        One section if a treebank is prepared. Otherwise three sections, and two or three more with
        a model.

    Raises:
        ValueError: If a flag is given without a flag that it needs or with a flag that excludes it,
            a number is out of range, or a treebank or model cannot be read.
    """
    _check_flags(flags)
    if flags.prepare is not None:
        yield treebank_section(flags.prepare, flags.train, flags.validation, flags.test)
        return
    # read model and trees first, so that an error comes before any output
    scored_sections = iter(()) if flags.model is None else model_sections(flags)
    yield published_section()
    yield example_section(has_model=flags.model is not None)
    yield rules_section()
    yield from scored_sections


def _check_flags(flags: argparse.Namespace):
    if flags.prepare is not None and not flags.train:
        raise ValueError("train must be given with prepare, got none.")
    if flags.prepare is None and (flags.train or flags.validation or flags.test):
        raise ValueError("prepare must be given with train, validation and test, got none.")
    if (flags.model is None) != (flags.trees is None):
        raise ValueError("model and trees must be given together, got one.")
    if flags.prepare is not None and flags.model is not None:
        raise ValueError(
            "prepare must be given without model, because training comes between them, got both."
        )
    if flags.num_sentences < 0:
        raise ValueError(f"num_sentences must not be negative, got {flags.num_sentences}.")
    if flags.batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {flags.batch_size}.")
