"""`python -m vanilla_transformer.benchmarks [PART ...]`: this package beside its peers."""

import argparse
import importlib
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..configuration_vanilla_transformer import closest_name
from ..console import run_command
from ..paper.study import show_study
from ..train.recipe import parse_arguments
from .work import SIZES, add_device, open_device

if TYPE_CHECKING:
    from ..paper.study import Section


class Part(NamedTuple):
    """What is measured, the module that does it, and whether it is done where none is named."""

    title: str
    module: str
    is_default: bool = True


AT_LEAST_ONE = (
    "rounds",
    "batches",
    "model_vocab_size",
    "tokens_per_batch",
    "threads",
    "longest",
    "steps",
    "blocks",
)
TRAINED_PEERS = ("marian", "fsmt", "torch", "joeynmt", "usual")
PARTS = {
    "training": Part("a step of training", "training"),
    "translation": Part("greedy and beam search", "translation"),
    "tokenizer": Part("learning a vocabulary, text to tokens and back", "text"),
    "data": Part("from text to batches: pairs a second, memory, padding", "data_preparation"),
    "scaling": Part("length, vocabulary, batch and processes", "scaling", is_default=False),
    "startup": Part("imports and the first translation", "startup"),
}


def parser() -> argparse.ArgumentParser:
    """The command line.

    Returns:
        Its parser; what it does not know is a setting of training.
    """
    parts = "\n".join(
        f"  {name:12} {part.title}" + ("" if part.is_default else " (only where named)")
        for name, part in PARTS.items()
    )
    made = argparse.ArgumentParser(
        prog="python -m vanilla_transformer.benchmarks",
        description="Measure this package beside its peers, on the same work in the same run.",
        epilog=f"parts:\n{parts}\n\nOf a trained model, each with --help: "
        "python -m vanilla_transformer.benchmarks.natural, .exports and .marian_trainer.\n\n"
        "Any other flag is a setting of training: --dataset, --name, "
        "--source_lang, --target_lang, --vocab_size, --precision, --compile, --seed ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("parts", nargs="*", metavar="PART", help="as below; the usual ones if none")
    made.add_argument(
        "--recipe", default="demo", help="names text, languages and vocabulary (%(default)s)"
    )
    add_device(made)
    made.add_argument("--rounds", type=int, default=2, help="over all batches (%(default)s)")
    made.add_argument("--batches", type=int, default=3, help="of each contender (%(default)s)")
    made.add_argument(
        "--sizes",
        type=_names(SIZES),
        default=["small", "base"],
        help=f"of models, of {', '.join(SIZES)}, with commas between (small,base)",
    )
    made.add_argument(
        "--model_vocab_size",
        type=int,
        default=37000,
        help="of models with random weights, whatever the text has (%(default)s)",
    )
    made.add_argument(
        "--tokens_per_batch",
        type=int,
        default=2048,
        help="target tokens of a batch of training (%(default)s)",
    )
    made.add_argument(
        "--peers",
        type=_names(TRAINED_PEERS),
        default=list(TRAINED_PEERS),
        help="in training, beside Marian, all of which are in memory at once: of "
        f"{', '.join(TRAINED_PEERS)}, with commas between (all that are installed); usual is "
        "Marian on sentences as they come",
    )
    made.add_argument(
        "--beams", type=_numbers, default=[1, 4], help="beam sizes, with commas between (1,4)"
    )
    made.add_argument(
        "--batch_sizes",
        type=_numbers,
        default=[1, 32],
        help="sentences translated together, with commas between (1,32)",
    )
    made.add_argument(
        "--longest", type=int, default=8192, help="sentences of scaling, in tokens (%(default)s)"
    )
    made.add_argument(
        "--millions",
        type=float,
        default=4.5,
        help="pairs of a corpus to plan epochs of, in millions (%(default)s)",
    )
    made.add_argument(
        "--steps", type=int, default=50, help="steps to make batches of (%(default)s)"
    )
    made.add_argument(
        "--blocks", type=int, default=3, help="blocks to read with --streaming true (%(default)s)"
    )
    made.add_argument(
        "--output_dir",
        type=Path,
        default=Path("runs/benchmarks"),
        help="for page, numbers and pictures (%(default)s)",
    )
    return made


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(
            f"must be numbers from 1 with commas between, got {text!r}"
        )
    return [int(number) for number in text.split(",")]


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"must be of {', '.join(known)}, got {name!r}.{closest_name(name, list(known))}"
                )
        return given

    return names


def run(argv: list[str]) -> None:
    """Measure, to stdout and into a folder.

    Args:
        argv: The arguments.

    Raises:
        ValueError: If there is no such part, or a flag has a value that it cannot have.
    """
    flags, rest = parser().parse_known_args(argv)
    flags.settings = rest
    flags.config, _ = parse_arguments([flags.recipe, *rest], "vanilla_transformer.benchmarks")
    for name in flags.parts:
        if name not in PARTS:
            known = closest_name(name, list(PARTS))
            raise ValueError(f"{name!r} is not a part.{known} They are {', '.join(PARTS)}.")
    for name in AT_LEAST_ONE:
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if not flags.millions > 0:
        raise ValueError(f"millions must be above 0, got {flags.millions}.")
    open_device(flags)
    names = flags.parts or [name for name, part in PARTS.items() if part.is_default]

    def sections() -> Iterator["Section"]:
        # what was left out of the text is in the tables where it matters
        logging.getLogger("vanilla_transformer").setLevel(logging.WARNING)
        for name in names:
            module = importlib.import_module(f"vanilla_transformer.benchmarks.{PARTS[name].module}")
            yield from module.sections(flags)

    show_study(sections(), f"Benchmarks: {', '.join(names)}", flags.output_dir)


def main(argv: list[str] | None = None) -> int:
    """Measure, and turn what goes wrong into one sentence.

    Args:
        argv: The arguments; the process's own if not given.

    Returns:
        0 if all went well, 1 if it was refused.
    """
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
