"""Translate lines as they arrive: `vanilla-transformer translate RUN [FILE]`."""

import argparse
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from accelerate.utils.memory import should_reduce_batch_size
from tqdm import tqdm

from .. import TranslationPipeline
from ..checks_vanilla_transformer import ENGINES
from ..console import add_trust_flag
from ..loading import load
from ..pipeline_vanilla_transformer import max_source_tokens
from .data.lines import column_reader, read_column, read_subtitles, with_translation
from .data.text_files import MAX_LINE_BYTES, opened, read_lines

SEARCH = {
    "num_beams": (int, "beam size"),
    "length_penalty_alpha": (float, "length penalty, section 6.1"),
    "max_extra_tokens": (int, "maximum number of output tokens beyond the source length"),
}
# characters at which `str.splitlines` splits
LINE_ENDS = re.compile("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
# capacity of a pipe
PIPE_BYTES = 65536
# longest line that is translated: memory and time grow with the square of its length
MAX_LINE_TOKENS = 4096


def translate_lines(
    pipeline: TranslationPipeline, lines: Iterable[str], **search: Any
) -> Iterator[str]:
    """Translate lines, with the search of the model's generation config.

    Args:
        pipeline: Model and tokenizer.
        lines: Sentences without line feeds.
        search: Settings of the pipeline's call that differ from the model's, `num_beams` for
            example.

    Yields:
        Translation of each line, in order.

    Raises:
        MemoryError: If a batch with its beams does not fit into memory.
    """
    for translations in search_lines(pipeline, lines, **search):
        yield one_line(translations[0]["translation_text"])


def search_lines(
    pipeline: TranslationPipeline, lines: Iterable[str], **search: Any
) -> Iterator[list[dict[str, Any]]]:
    """Translate lines, and return all that the pipeline finds.

    Args:
        pipeline: Model and tokenizer.
        lines: Sentences without line feeds.
        search: Settings of the pipeline's call that differ from the model's.

    Yields:
        The results for each line, in order: a mapping for each of its translations, best first.

    Raises:
        MemoryError: If a batch with its beams does not fit into memory.
    """
    try:
        yield from pipeline(iter(lines), **search)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        beams = search.get("num_beams", pipeline.model.generation_config.num_beams) or 1
        raise MemoryError(
            f"out of memory: a batch with {beams:,} beams for each sentence does not fit. Use a "
            "smaller num_beams."
        ) from error


def one_line(text: str) -> str:
    """Replace each character at which `str.splitlines` splits by a space.

    Args:
        text: Translation.

    Returns:
        Translation that is one line for every reader.
    """
    return LINE_ENDS.sub(" ", text)


def arriving_lines(file: IO[bytes], name: str) -> Iterator[list[str]]:
    """Read lines as they arrive. Each list holds the lines of one read.

    Args:
        file: Buffered file that is open for bytes.
        name: Name of the file, for an error.

    Yields:
        One or more lines, without line feeds.

    Raises:
        ValueError: If a line is not UTF-8 or is longer than `MAX_LINE_BYTES`; names the line.
    """
    # number of lines of each read: `read_lines` checks the lines one by one
    counts: deque[int] = deque()

    def arriving() -> Iterator[bytes]:
        # a bytearray grows in place: a line can arrive in thousands of parts
        unfinished = bytearray()
        # read1 returns as soon as some bytes have arrived; IO[bytes] does not declare it
        read = file.read1  # type: ignore[attr-defined]
        while len(unfinished) <= MAX_LINE_BYTES and (arrived := read(PIPE_BYTES)):
            rest, *lines = arrived.split(b"\n")
            unfinished += rest
            if lines:
                whole = [bytes(unfinished), *lines[:-1]]
                unfinished = bytearray(lines[-1])
                counts.append(len(whole))
                yield from (line + b"\n" for line in whole)
        if unfinished:
            counts.append(1)
            yield bytes(unfinished)

    lines = read_lines(arriving(), name)
    for first in lines:
        group = [first]
        try:
            for line in islice(lines, counts.popleft() - 1):
                group.append(line)
        except ValueError:
            # the lines before the refused line are still translated
            yield group
            raise
        yield group


def fitting_lines(
    groups: Iterable[list[str]],
    pipeline: TranslationPipeline,
    name: str,
    split: Callable[[str], list[str]] = lambda line: [line],
) -> Iterator[list[str]]:
    """Pass lines through until a line has too many tokens.

    Args:
        groups: Lists of lines.
        pipeline: Model that translates the lines, and its tokenizer.
        name: Name of the file, for an error.
        split: Function that splits a line into the texts that the model reads.

    Yields:
        The same lists; if a line is too long, first the lines before it.

    Raises:
        ValueError: If a line has more tokens than `MAX_LINE_TOKENS` or the positions of the model;
            names the line.
    """
    most = min(MAX_LINE_TOKENS, max_source_tokens(pipeline.model.config) or MAX_LINE_TOKENS)
    num_lines_read = 0
    for lines in groups:
        parts = [split(line) or [""] for line in lines]
        lengths = map(len, pipeline.tokenizer(list(chain(*parts)))["input_ids"])
        for index, part in enumerate(parts):
            length = max(islice(lengths, len(part)))
            if length > most:
                # the lines before it are still translated
                if index:
                    yield lines[:index]
                raise ValueError(
                    f"{name} line {num_lines_read + index + 1} must have at most {most:,} tokens, "
                    f"got {length:,}: split the line into sentences, one on each line, or with "
                    "--split_sentences."
                )
        num_lines_read += len(lines)
        yield lines


def add_languages(parser: argparse.ArgumentParser | argparse._ArgumentGroup):
    """Add the languages of a multilingual model to a command.

    Args:
        parser: Parser of the command, or a group of its flags.
    """
    for name, side in (("src_lang", "source"), ("tgt_lang", "target")):
        parser.add_argument(
            f"--{name}",
            default=argparse.SUPPRESS,
            help=f"{side} language, for a multilingual model",
        )


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the search to a command.

    Args:
        parser: Parser of the command.
    """
    group = parser.add_argument_group("search", "the defaults are the model's own settings")
    for name, (kind, help_text) in SEARCH.items():
        group.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=help_text)
    add_languages(group)
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
        help="auto: use the inference engine if it can run the model, else the model's modules; "
        "off: always use the modules; required: stop with an error if the engine cannot run (auto)",
    )


def run(argv: list[str], prog: str) -> Iterator[str]:
    """Run the command line of the translation.

    A progress bar appears on stderr if stderr is a terminal and stdout is not.

    Args:
        argv: Arguments of the command line.
        prog: Name of the command, for its help.

    Yields:
        Translation of each line, in order, as soon as it is complete.

    Raises:
        ValueError: If the file cannot be read, the model cannot be loaded, or a line is not UTF-8
            or too long for the model.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Translate the lines of a file or stdin, and write them to stdout.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="run folder, model folder or Hub name; several models of one vocabulary translate "
        "together, with the mean of their probabilities",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="text file, plain or .gz, .bz2, .xz, .zst; by default, or as -, stdin. A line must "
        f"have at most {MAX_LINE_TOKENS:,} tokens. Subtitles (.srt) are translated to subtitles",
    )
    parser.add_argument(
        "--column",
        help="what to translate of each line: the number of a column, from 1, in a file with tabs, "
        "or the name of a field in JSON lines (.jsonl), such as translation.en (default: all)",
    )
    output = parser.add_argument_group("output", "by default, one translation on a line")
    output.add_argument(
        "--split_sentences",
        nargs="?",
        const=True,
        metavar="LANGUAGE",
        default=argparse.SUPPRESS,
        help="translate each sentence of a line alone, with the rules of a language, such as en "
        "(default: that of the model)",
    )
    output.add_argument(
        "--num_return_sequences",
        type=int,
        default=argparse.SUPPRESS,
        help="number of translations of each line, best first: an n-best list, with lines "
        "NUMBER ||| TRANSLATION, where NUMBER is that of the line, from 0",
    )
    output.add_argument(
        "--scores",
        action="store_true",
        help="add the log-probability of a translation, and the same divided by the length "
        "penalty: NUMBER ||| TRANSLATION ||| LOG-PROBABILITY ||| SCORE",
    )
    output.add_argument(
        "--jsonl",
        action="store_true",
        help="write a JSON object for each line, with scores and those of each token if --scores "
        "is given",
    )
    add_search(parser)
    add_trust_flag(parser)
    # the file can follow flags
    search = vars(parser.parse_intermixed_args(argv))
    trust = search.pop("trust_remote_code")
    runs, path = search.pop("runs"), search.pop("file", None)
    # the parser takes every word for a run
    if len(runs) > 1 and not Path(runs[-1]).is_dir():
        path = runs.pop()
    scores, jsonl = (search.pop(name, False) for name in ("scores", "jsonl"))
    path = None if path == "-" else path
    name, column = path or "stdin", search.pop("column", None)
    is_subtitles = ".srt" in Path(name).suffixes
    for flag, value in (
        ("column", column),
        ("jsonl", jsonl),
        ("scores", scores),
        ("num_return_sequences", search.get("num_return_sequences")),
    ):
        if is_subtitles and value:
            raise ValueError(f"{flag} must not be given: subtitles are translated to subtitles.")
    take = None if column is None else column_reader(path, column)
    for side, stream in (("stdin", path or sys.stdin), ("stdout", sys.stdout)):
        if stream is None:
            raise ValueError(f"{side} must be open, got a closed one.")
    # on one terminal, the progress bar would appear between the translations
    is_hidden = sys.stdout.isatty() or not sys.stderr.isatty()
    # opened first, so that an unreadable file is reported before the model is loaded
    with opened(Path(path)) if path else nullcontext(sys.stdin.buffer) as file:
        int8 = search.get("int8", False)
        pipeline, *others = [load(run, trust_remote_code=trust, int8=int8) for run in runs]
        if others:
            _refuse_other_vocabularies(runs, [pipeline, *others])
            search["ensemble"] = [other.model for other in others]
        subtitles = read_subtitles(file, name) if is_subtitles else []
        split_sentences, src_lang = search.get("split_sentences"), search.get("src_lang")
        split = partial(pipeline.split, split_sentences=split_sentences, src_lang=src_lang)
        groups: Iterable[list[str]] = arriving_lines(file, name)
        if subtitles:
            groups = [[" ".join(subtitle.content.split()) for subtitle in subtitles]]
        elif take is not None:
            groups = read_column(groups, name, take)
        number = 0
        is_plain = not (scores or jsonl or "num_return_sequences" in search)
        if scores:
            search["return_scores"] = True
        with tqdm(desc="translating", unit=" lines", disable=is_hidden) as bar:
            for lines in fitting_lines(groups, pipeline, name, split):
                for line, found in zip(lines, search_lines(pipeline, lines, **search), strict=True):
                    if subtitles:
                        text = one_line(found[0]["translation_text"])
                        yield with_translation(subtitles[number], text)
                    elif is_plain:
                        yield one_line(found[0]["translation_text"])
                    elif jsonl:
                        record = {"source": line, "translations": found}
                        yield json.dumps(record, ensure_ascii=False)
                    else:
                        yield from n_best(number, found)
                    number += 1
                    bar.update()


def _refuse_other_vocabularies(runs: list[str], pipelines: list[TranslationPipeline]):
    vocabularies = [pipeline.tokenizer.get_vocab() for pipeline in pipelines]
    for run, vocabulary in zip(runs[1:], vocabularies[1:], strict=True):
        if vocabulary != vocabularies[0]:
            raise ValueError(
                f"models that translate together must have one vocabulary, and that of {run} "
                f"differs from that of {runs[0]}."
            )


def n_best(number: int, translations: list[dict[str, Any]]) -> Iterator[str]:
    """Write translations as an n-best list of Moses and Marian.

    Args:
        number: Number of the source line, from 0.
        translations: Results of the pipeline, with or without scores.

    Yields:
        A line for each translation, with fields between " ||| ".
    """
    for found in translations:
        fields = [str(number), one_line(found["translation_text"])]
        if "score" in found:
            fields += [f"{found[name]:.6f}" for name in ("log_probability", "score")]
        yield " ||| ".join(fields)
