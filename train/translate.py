"""Translate lines as they come: `vanilla-transformer translate RUN [FILE]`."""

import argparse
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import TranslationPipeline
from ..console import add_trust_flag
from ..generation_vanilla_transformer import ENGINES
from ..hub import load_run
from ..pipeline_vanilla_transformer import max_source_tokens
from .data.corpus import MAX_LINE_BYTES, opened, read_lines

SEARCH = {
    "num_beams": (int, "beam size"),
    "length_penalty_alpha": (float, "length penalty, section 6.1"),
    "max_extra_tokens": (int, "longest output beyond the source"),
}
# where `str.splitlines` ends a line
LINE_ENDS = re.compile("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
# what a pipe holds
MOST_BYTES = 65536
# longest line that is translated: memory and time grow with the square of its length
MAX_LINE_TOKENS = 4096


def load_model(
    run: str | Path,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    int8: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load what translates.

    Args:
        run: A run folder, a model folder or a Hub name.
        device: Device of the model; the GPU, if there is one, if not given.
        trust_remote_code: Run the Python code that is saved with the model.
        int8: The model is to be quantized, which needs weights in float32.

    Returns:
        The model, ready to translate, and its tokenizer.

    Raises:
        ValueError: If it cannot be loaded.
    """
    model, tokenizer = load_run(run, trust_remote_code)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.eval().to(device, torch.float32 if int8 else None), tokenizer


def translate_lines(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lines: Iterable[str],
    **search: Any,
) -> Iterator[str]:
    """Translate as many lines as are asked for, with the search of the model's generation config.

    Args:
        model: A model with a decoder and a head.
        tokenizer: Its tokenizer.
        lines: A sentence each, without its line feed.
        search: Settings of `generate` that differ, `num_beams` for one.

    Yields:
        A translation each, in order.

    Raises:
        MemoryError: If there is not enough for a batch and its beams.
    """
    pipeline = TranslationPipeline(model, tokenizer, device=model.device)
    try:
        for translations in pipeline(iter(lines), **search):
            yield one_line(translations[0]["translation_text"])
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        beams = search.get("num_beams", model.generation_config.num_beams)
        raise MemoryError(
            f"memory must hold a batch of sentences with {beams:,} beams each, and was full: ask "
            "for fewer num_beams."
        ) from error


def one_line(text: str) -> str:
    """A translation as a line of a file.

    Args:
        text: With or without characters that end a line for some reader: what `str.splitlines`
            splits at.

    Returns:
        A space for each of them.
    """
    return LINE_ENDS.sub(" ", text)


def lines_as_they_come(file: IO[bytes], name: str) -> Iterator[list[str]]:
    """Read lines, each time as many as have come.

    Args:
        file: Opened for bytes, with a buffer.
        name: Of the file, for an error.

    Yields:
        One or more lines, without their ends.

    Raises:
        ValueError: If a line is not UTF-8 or has more than `MAX_LINE_BYTES`; says which.
    """
    counts: deque[int] = deque()

    def arriving() -> Iterator[bytes]:
        # grows in place: a line may come in thousands of parts
        begun = bytearray()
        # this waits for something, and not until there is so much
        while len(begun) <= MAX_LINE_BYTES and (arrived := file.read1(MOST_BYTES)):
            end, *lines = arrived.split(b"\n")
            begun += end
            if lines:
                whole = [bytes(begun), *lines[:-1]]
                begun = bytearray(lines[-1])
                counts.append(len(whole))
                yield from (line + b"\n" for line in whole)
        if begun:
            counts.append(1)
            yield bytes(begun)

    lines = read_lines(arriving(), name)
    for first in lines:
        come = [first]
        try:
            for line in islice(lines, counts.popleft() - 1):
                come.append(line)
        except ValueError:
            # those before the one that cannot be read have their answers
            yield come
            raise
        yield come


def fitting_lines(
    windows: Iterable[list[str]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
) -> Iterator[list[str]]:
    """Pass lines on until one has too many tokens.

    Args:
        windows: Lists of lines.
        model: Model that is to translate them.
        tokenizer: Its tokenizer.
        name: Name of the file, for an error.

    Yields:
        The same lists, the last one without the line that is too long and those after it.

    Raises:
        ValueError: If a line has more than `MAX_LINE_TOKENS`, or more than the model has positions;
            says which.
    """
    most = min(MAX_LINE_TOKENS, max_source_tokens(model.config) or MAX_LINE_TOKENS)
    num_before = 0
    for lines in windows:
        for index, ids in enumerate(tokenizer(lines)["input_ids"]):
            if len(ids) > most:
                # those before it have their answers
                if index:
                    yield lines[:index]
                raise ValueError(
                    f"{name} line {num_before + index + 1} must have at most {most:,} tokens, got "
                    f"{len(ids):,}: split it into sentences, one on each line."
                )
        num_before += len(lines)
        yield lines


def add_search(parser: argparse.ArgumentParser) -> None:
    """Let a command take the settings of the search.

    Args:
        parser: Of the command.
    """
    group = parser.add_argument_group("search", "the model's own settings where not given")
    for name, (kind, help_text) in SEARCH.items():
        group.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=help_text)
    group.add_argument(
        "--int8",
        action="store_true",
        default=argparse.SUPPRESS,
        help="quantize the linear layers to int8: faster on a CPU, nearly the same translations",
    )
    group.add_argument(
        "--engine",
        choices=ENGINES,
        default=argparse.SUPPRESS,
        help="auto: use the search engine if it can run the model, else the model's modules; off: "
        "always use the modules; required: stop with an error if the engine cannot run (auto)",
    )


def run(argv: list[str], prog: str) -> Iterator[str]:
    """Translate as a command line says, with the progress on stderr if that is a terminal.

    Args:
        argv: The arguments.
        prog: Name of the command, for its help.

    Yields:
        A translation for each line, in order, as soon as it is there.

    Raises:
        ValueError: If the file cannot be read, the model cannot be loaded, or a line is not UTF-8
            or too long for the model.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Translate lines, from a file or stdin, to stdout.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, model folder or Hub name")
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default=None,
        help="a text file, plain or .gz; stdin if not given, or -. A line must have at most "
        f"{MAX_LINE_TOKENS:,} tokens",
    )
    add_search(parser)
    add_trust_flag(parser)
    # a file may come after flags
    search = vars(parser.parse_intermixed_args(argv))
    trust = search.pop("trust_remote_code")
    path = search.pop("file")
    path = None if path == "-" else path
    for name, stream in (("stdin", path or sys.stdin), ("stdout", sys.stdout)):
        if stream is None:
            raise ValueError(f"{name} must be open, got a closed one.")
    # the bar would stand between the lines where both are on one terminal
    is_hidden = sys.stdout.isatty() or not sys.stderr.isatty()
    # a file that cannot be read is known before a model is loaded
    with opened(Path(path)) if path else nullcontext(sys.stdin.buffer) as file:
        int8 = search.get("int8", False)
        model, tokenizer = load_model(search.pop("run"), trust_remote_code=trust, int8=int8)
        with tqdm(desc="translating", unit=" lines", disable=is_hidden) as bar:
            name = path or "stdin"
            for lines in fitting_lines(lines_as_they_come(file, name), model, tokenizer, name):
                for line in translate_lines(model, tokenizer, lines, **search):
                    yield line
                    bar.update()
