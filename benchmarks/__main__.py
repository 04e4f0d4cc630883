"""Benchmarks of this package and other toolkits: `python -m vanilla_transformer.benchmarks`."""

import argparse
import contextlib
import importlib
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..configuration_vanilla_transformer import closest_name
from ..console import run_command
from ..paper.study import show_study
from ..train.recipe import parse_arguments
from .work import MODELS, SIZES, add_device, open_device

if TYPE_CHECKING:
    from ..paper.study import Section


class Part(NamedTuple):
    """A benchmark: its title, its module, and whether it runs by default."""

    title: str
    module: str
    is_default: bool = True


# flags whose value must be at least 1
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
# a program that busy-waits until its parent process ends, even if the parent is killed
BUSY_PROGRAM = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
TRAINED_PEERS = ("marian", "fsmt", "torch", "joeynmt", "usual")
PARTS = {
    "training": Part("training step", "training"),
    "translation": Part("greedy and beam search", "translation"),
    "tokenizer": Part("learn a vocabulary, encode and decode text", "text"),
    "data": Part("from text to batches: pairs/s, memory, padding", "data_preparation"),
    "scaling": Part(
        "cost against length, vocabulary, batch, processes", "scaling", is_default=False
    ),
    "startup": Part("imports and the first translation", "startup"),
    "device": Part("whether a GPU computes what a CPU computes", "device", is_default=False),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Returns:
        The parser of the flags; the parts and the training settings are left for
        `split_arguments`.
    """
    parts = "\n".join(
        f"  {name:12} {part.title}" + ("" if part.is_default else " (only if named)")
        for name, part in PARTS.items()
    )
    flags_parser = argparse.ArgumentParser(
        prog="python -m vanilla_transformer.benchmarks",
        usage="%(prog)s [PART ...] [FLAG ...]",
        description="Measure this package and other toolkits on the same work, side by side.",
        epilog=f"parts (default: all but scaling and device):\n{parts}\n\n"
        "Benchmarks of a trained model, each with --help: "
        "python -m vanilla_transformer.benchmarks.natural, .identical, .exports, .serve and "
        ".marian_trainer.\n\n"
        "All other flags are training settings: --dataset, --name, "
        "--source_lang, --target_lang, --vocab_size, --precision, --compile, --seed ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags_parser.add_argument(
        "--recipe",
        default="demo",
        help="recipe of the corpus and vocabulary (default: %(default)s)",
    )
    add_device(flags_parser)
    flags_parser.add_argument(
        "--rounds", type=int, default=2, help="repetitions of all batches (default: %(default)s)"
    )
    flags_parser.add_argument(
        "--batches",
        type=int,
        default=3,
        help="batches of each implementation (default: %(default)s)",
    )
    flags_parser.add_argument(
        "--sizes",
        type=_name_parser(SIZES),
        default=["small", "base"],
        help=f"model sizes, from {', '.join(SIZES)}, separated by commas (default: small,base)",
    )
    flags_parser.add_argument(
        "--model_vocab_size",
        type=int,
        default=37000,
        help="vocabulary size of the models with random weights (default: %(default)s)",
    )
    flags_parser.add_argument(
        "--busy",
        type=int,
        default=0,
        help="other programs that keep one core each busy during the measurement (default: "
        "%(default)s)",
    )
    flags_parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("runs/benchmarks"),
        help="folder for page, numbers and pictures (default: %(default)s)",
    )
    _add_part_flags(flags_parser)
    return flags_parser


def _add_part_flags(flags_parser: argparse.ArgumentParser):
    """Add the flags that only one part reads, in a group for each part."""
    training = flags_parser.add_argument_group("flags of training")
    training.add_argument(
        "--tokens_per_batch",
        type=int,
        default=2048,
        help="target tokens in a training batch (default: %(default)s)",
    )
    training.add_argument(
        "--peers",
        type=_name_parser(TRAINED_PEERS),
        default=list(TRAINED_PEERS),
        help="implementations to compare with Marian in training, from "
        f"{', '.join(TRAINED_PEERS)}, separated by commas (default: all that are installed); all "
        "are in memory at once; usual is Marian on random sentences",
    )
    translation = flags_parser.add_argument_group("flags of translation")
    translation.add_argument(
        "--models",
        type=_name_parser(MODELS),
        default=[],
        help="models of transformers to translate with in place of --sizes, random weights, from "
        f"{', '.join(MODELS)}, separated by commas",
    )
    translation.add_argument(
        "--beams",
        type=_parse_numbers,
        default=[1, 4],
        help="beam sizes, separated by commas (default: 1,4)",
    )
    translation.add_argument(
        "--batch_sizes",
        type=_parse_numbers,
        default=[1, 32],
        help="sentences in a batch of translation, separated by commas (default: 1,32)",
    )
    data = flags_parser.add_argument_group("flags of data")
    data.add_argument(
        "--millions",
        type=float,
        default=4.5,
        help="millions of pairs in the corpus of a planned epoch (default: %(default)s)",
    )
    data.add_argument(
        "--steps",
        type=int,
        default=50,
        help="number of steps to build batches for (default: %(default)s)",
    )
    data.add_argument(
        "--blocks",
        type=int,
        default=3,
        help="blocks to read with --streaming true (default: %(default)s)",
    )
    scaling = flags_parser.add_argument_group("flags of scaling")
    scaling.add_argument(
        "--longest",
        type=int,
        default=8192,
        help="longest sentences of scaling, in tokens (default: %(default)s)",
    )


def _parse_numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(
            f"must be numbers from 1, separated by commas, got {text!r}"
        )
    return [int(number) for number in text.split(",")]


def _name_parser(allowed_names: Collection[str]) -> Callable[[str], list[str]]:
    def parse_names(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed_names:
                raise argparse.ArgumentTypeError(
                    f"must be of {', '.join(allowed_names)}, got {name!r}."
                    f"{closest_name(name, list(allowed_names))}"
                )
        return names

    return parse_names


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments that the parser does not know.

    Args:
        arguments: Names of parts, and training settings: flags with one value each.

    Returns:
        Names of parts, and training settings.
    """
    part_names: list[str] = []
    training_arguments: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            part_names.append(argument)
            continue
        training_arguments.append(argument)
        if "=" not in argument:
            training_arguments += islice(rest, 1)
    return part_names, training_arguments


def run(argv: list[str]) -> None:
    """Run the parts, and write the results to stdout and a folder.

    Args:
        argv: Command-line arguments.

    Raises:
        ValueError: If there is no such part, or a flag has an invalid value.
    """
    flags, other_arguments = parser().parse_known_args(argv)
    part_names, training_arguments = split_arguments(other_arguments)
    flags.settings = training_arguments
    flags.config, _ = parse_arguments(
        [flags.recipe, *training_arguments], "vanilla_transformer.benchmarks"
    )
    for name in part_names:
        if name not in PARTS:
            suggestion = closest_name(name, list(PARTS))
            raise ValueError(f"{name!r} is not a part.{suggestion} They are {', '.join(PARTS)}.")
    for name in AT_LEAST_ONE:
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if flags.busy < 0:
        raise ValueError(f"busy must be at least 0, got {flags.busy}.")
    if not flags.millions > 0:
        raise ValueError(f"millions must be above 0, got {flags.millions}.")
    open_device(flags)
    part_names = part_names or [name for name, part in PARTS.items() if part.is_default]

    def sections() -> Iterator["Section"]:
        # hide the log lines about dropped pairs, because the tables contain these counts
        logging.getLogger("vanilla_transformer").setLevel(logging.WARNING)
        for name in part_names:
            module = importlib.import_module(f"vanilla_transformer.benchmarks.{PARTS[name].module}")
            yield from module.sections(flags)

    title = f"Benchmarks: {', '.join(part_names)}"
    if flags.busy:
        title += f", beside {flags.busy} busy program{'s' if flags.busy > 1 else ''}"
    with _run_busy_programs(flags.busy):
        show_study(sections(), title, flags.output_dir)


@contextlib.contextmanager
def _run_busy_programs(num_programs: int) -> Iterator[None]:
    programs = [subprocess.Popen([sys.executable, "-c", BUSY_PROGRAM]) for _ in range(num_programs)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


# `main` shows an error as one sentence, and returns the exit status
main = partial(run_command, run)


if __name__ == "__main__":
    sys.exit(main())
