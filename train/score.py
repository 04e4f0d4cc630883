"""Score given translations: `vanilla-transformer score RUN --source FILE --target FILE`."""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from .. import TranslationPipeline
from ..console import add_trust_flag
from ..loading import load
from ..pipeline_vanilla_transformer import TEXTS_PER_WINDOW
from .data.text_files import lines_of, opened, read_lines
from .translate import add_languages, fitting_lines


def run(argv: list[str], prog: str) -> Iterator[str]:
    """Run the command line.

    A progress bar appears on stderr if stderr is a terminal and stdout is not.

    Args:
        argv: Arguments of the command line.
        prog: Name of the command, for its help.

    Yields:
        Log-probability and score of each pair, in order, as soon as they are known.

    Raises:
        ValueError: If a file cannot be read, the files differ in their number of lines, the model
            cannot be loaded, or a line is not UTF-8 or too long for the model.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Compute the log-probability of each translation, and write it to stdout: "
        "natural logarithm, tab, the same divided by the length penalty of the model's search.",
    )
    parser.add_argument("run", metavar="RUN", help="run folder, model folder or Hub name")
    add_pairs(parser)
    parser.add_argument(
        "--jsonl",
        action="store_true",
        help="write a JSON object for each pair, with the log-probability of each token",
    )
    parser.add_argument(
        "--length_penalty_alpha",
        type=float,
        default=argparse.SUPPRESS,
        help="length penalty, section 6.1 (default: the model's own)",
    )
    add_languages(parser)
    add_trust_flag(parser)
    settings = vars(parser.parse_args(argv))
    name, jsonl = settings.pop("run"), settings.pop("jsonl")
    trust = settings.pop("trust_remote_code")
    files = [settings.pop(side) for side in ("source", "target")]
    num_lines = count_pairs(files)
    pipeline = load(name, trust_remote_code=trust)
    for sources, targets in read_pairs(pipeline, files, num_lines, "scoring"):
        for source, target, found in zip(
            sources, targets, pipeline.score(sources, targets, **settings), strict=True
        ):
            if jsonl:
                pair = {"source": source, "target": target, **found}
                yield json.dumps(pair, ensure_ascii=False)
            else:
                yield f"{found['log_probability']:.6f}\t{found['score']:.6f}"


def add_pairs(parser: argparse.ArgumentParser):
    """Add the files of sentences and translations to a command.

    Args:
        parser: Parser of the command.
    """
    for name, what in (("source", "sentences"), ("target", "translations, as many lines")):
        parser.add_argument(
            f"--{name}",
            required=True,
            type=Path,
            metavar="FILE",
            help=f"{what}; plain or compressed",
        )


def read_pairs(
    pipeline: TranslationPipeline, files: list[Path], num_lines: int, doing: str
) -> Iterator[tuple[list[str], list[str]]]:
    """Read pairs that fit the model, with a progress bar.

    Args:
        pipeline: Model and tokenizer.
        files: Files of sources and targets.
        num_lines: Number of lines of each.
        doing: What the progress bar says.

    Yields:
        Sources and targets, some lines at a time.

    Raises:
        ValueError: If a line is not UTF-8 or too long for the model; names the line.
    """
    windows = zip(
        *(fitting_lines(_windows(path), pipeline, str(path)) for path in files), strict=True
    )
    is_hidden = sys.stdout.isatty() or not sys.stderr.isatty()
    with tqdm(total=num_lines, desc=doing, unit=" lines", disable=is_hidden) as bar:
        for sources, targets in windows:
            yield sources, targets
            bar.update(len(sources))


def _windows(path: Path) -> Iterator[list[str]]:
    with opened(path) as file:
        lines = read_lines(lines_of(file), str(path))
        while window := list(islice(lines, TEXTS_PER_WINDOW)):
            yield window


def count_pairs(files: list[Path]) -> int:
    """Return the number of lines of two files.

    Args:
        files: Files of sources and targets.

    Raises:
        ValueError: If they differ in it, or a file cannot be read.
    """
    counts = [sum(map(len, _windows(path))) for path in files]
    if counts[0] != counts[1]:
        raise ValueError(
            "source and target must have the same number of lines, got "
            f"{counts[0]:,} in {files[0]} and {counts[1]:,} in {files[1]}."
        )
    return counts[0]
