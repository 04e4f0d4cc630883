"""Score given translations: `vanilla-transformer score RUN --source FILE --target FILE`."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import TranslationPipeline
from ..console import add_trust_flag, parse_flags
from ..loading import load
from ..pipeline_vanilla_transformer import TEXTS_PER_WINDOW
from .data.text_files import (
    lines_of,
    opened,
    read_lines,
    refuse_other_format,
    warn_of_other_lines,
)
from .translate import add_language_flags, fitting_lines

# function that reads the lines of a file, some at a time
Reader = Callable[[], Iterable[list[str]]]


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
    parser = pairs_parser(
        prog,
        "Compute the log-probability of each translation. Write one line for each sentence pair: "
        "the log-probability (natural logarithm), a tab, and the log-probability divided by the "
        "length penalty of the model's search.",
    )
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
    settings = vars(parse_flags(parser, argv))
    writes_jsonl = settings.pop("jsonl")
    pipeline, pairs = load_with_pairs(settings, "scoring")
    for sources, targets in pairs:
        for source, target, result in zip(
            sources, targets, pipeline.score(sources, targets, **settings), strict=True
        ):
            if writes_jsonl:
                pair = {"source": source, "target": target, **result}
                yield json.dumps(pair, ensure_ascii=False)
            else:
                yield f"{result['log_probability']:.6f}\t{result['score']:.6f}"


def pairs_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Make the parser of a command that reads a model and pairs of sentences.

    Args:
        prog: Name of the command, for its help.
        description: Purpose of the command.

    Returns:
        Parser, whose arguments `load_with_pairs` reads.
    """
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False, description=description)
    parser.add_argument("run", metavar="RUN", help="run folder, model folder or Hub name")
    for name, description_of_file in (
        ("source", "sentences"),
        ("target", "translations, with the same number of lines"),
    ):
        parser.add_argument(
            f"--{name}",
            required=True,
            type=Path,
            metavar="FILE",
            help=f"{description_of_file}; plain or compressed",
        )
    add_language_flags(parser)
    add_trust_flag(parser)
    return parser


def load_with_pairs(
    settings: dict[str, Any], progress_text: str
) -> tuple[TranslationPipeline, Iterator[tuple[list[str], list[str]]]]:
    """Load a model, and read the pairs that it can process, with a progress bar.

    Args:
        settings: Parsed arguments of `pairs_parser`; all except the languages are removed.
        progress_text: Text of the progress bar.

    Returns:
        Pipeline, and an iterator over lists of sources and targets. If a line is too long for the
        model, the iterator yields the pairs before it, and then raises a ValueError that names the
        line.

    Raises:
        ValueError: If a file cannot be read, a line is not UTF-8, the files differ in their number
            of lines, or the model cannot be loaded.
    """
    files = [settings.pop(side) for side in ("source", "target")]
    readers = [_reader(path) for path in files]
    for path, read in zip(files, readers, strict=True):
        warn_of_other_lines(next(iter(read()), [""])[0], path)
    num_lines = _count_lines(files, readers)
    trust_remote_code = settings.pop("trust_remote_code")
    pipeline = load(settings.pop("run"), trust_remote_code=trust_remote_code)
    return pipeline, _read_pairs(pipeline, files, readers, num_lines, progress_text)


def _read_pairs(
    pipeline: TranslationPipeline,
    files: list[Path],
    readers: list[Reader],
    num_lines: int,
    progress_text: str,
) -> Iterator[tuple[list[str], list[str]]]:
    windows = zip(
        *(
            fitting_lines(read(), pipeline, str(path))
            for path, read in zip(files, readers, strict=True)
        ),
        strict=True,
    )
    is_hidden = sys.stdout.isatty() or not sys.stderr.isatty()
    with tqdm(total=num_lines, desc=progress_text, unit=" lines", disable=is_hidden) as bar:
        for sources, targets in windows:
            # the lines of one file end before a line that is too long, which is then refused
            num_pairs = min(len(sources), len(targets))
            yield sources[:num_pairs], targets[:num_pairs]
            bar.update(num_pairs)


def _reader(path: Path) -> Reader:
    """Return a function that reads the lines of a file, and can be called again."""
    if path.is_fifo():
        # a pipe can be read only once
        windows = list(_read_windows(path))
        return lambda: windows
    return partial(_read_windows, path)


def _read_windows(path: Path) -> Iterator[list[str]]:
    refuse_other_format(path)
    with opened(path) as file:
        lines = read_lines(lines_of(file), str(path))
        while window := list(islice(lines, TEXTS_PER_WINDOW)):
            yield window


def _count_lines(files: list[Path], readers: list[Reader]) -> int:
    line_counts = [sum(map(len, read())) for read in readers]
    if line_counts[0] != line_counts[1]:
        raise ValueError(
            "source and target must have the same number of lines, got "
            f"{line_counts[0]:,} in {files[0]} and {line_counts[1]:,} in {files[1]}."
        )
    return line_counts[0]
