"""Translate lines as they arrive: `vanilla-transformer translate RUN [FILE]`."""

import argparse
import json
import logging
import os
import re
import stat
import sys
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from accelerate import PartialState
from accelerate.utils import gather_object
from accelerate.utils.memory import should_reduce_batch_size
from tqdm import tqdm
from transformers import PreTrainedModel

from .. import TranslationPipeline
from ..batches_vanilla_transformer import max_source_tokens
from ..checks_vanilla_transformer import ENGINES, SEARCH_PRECISIONS
from ..console import add_trust_flag, parse_flags
from ..loading import load
from ..pipeline_vanilla_transformer import DEFAULT_SEARCH, TEXTS_PER_WINDOW
from .data.lines import (
    column_reader,
    format_translated_subtitle,
    read_column,
    read_subtitles,
    split_subtitle,
)
from .data.text_files import (
    MAX_LINE_BYTES,
    NO_SENTENCE,
    lines_of,
    opened,
    read_lines,
    refuse_other_format,
)

logger = logging.getLogger(__name__)

# flags of the search: type and help text
SEARCH_FLAGS = {
    "num_beams": (int, "beam size"),
    "length_penalty_alpha": (float, "length penalty, section 6.1"),
    "max_extra_tokens": (
        int,
        "maximum number of tokens of a translation beyond the length of its source",
    ),
}
# characters at which `str.splitlines` splits
LINE_ENDS = re.compile("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
TABS_WARNING = (
    "The first line of {} has a tab, but whole lines are translated. To translate one column, give "
    "--column, for example --column 1."
)
NO_SENTENCE_WARNING = (
    "The first line of {} has JSON or markup, but whole lines are translated. To translate a field "
    "of JSON lines, give --column."
)
# second line of .srt, or an early line of .vtt
SUBTITLE_TIMES = re.compile(r"[\d:]+[.,]\d+ --> ")
SUBTITLE_LINES = 4
SUBTITLES_WARNING = (
    "Line {} of {} has the times of a subtitle, but whole lines are translated. To translate "
    "subtitles, give a file with the suffix .srt."
)
# what to do with files that have no sentence on each line, by suffix
ADVICE = {
    ".csv": "convert it to .tsv, or name the file .txt if each line is a sentence",
    **dict.fromkeys((".vtt", ".ass", ".ssa", ".sbv"), "convert the subtitles to .srt"),
    ".jsonl": "name the field of the sentences, such as --column translation.en",
    ".json": "write JSON lines (.jsonl), and name the field, such as --column translation.en",
}
# capacity of a pipe on Linux, in bytes
PIPE_BYTES = 65536
# name of a model on the Hub, and the extension of a file
HUB_NAME, FILE_EXTENSION = re.compile(r"\w[\w.-]*/[\w.-]+"), re.compile(r"\.[A-Za-z]\w*")
# beginnings of the Unicode names of characters of scripts without spaces between words
UNSPACED_SCRIPTS = (
    "CJK",
    "HALFWIDTH KATAKANA",
    "HIRAGANA",
    "IDEOGRAPHIC",
    "KATAKANA",
    "KHMER",
    "LAO",
    "MYANMAR",
    "THAI",
)
# longest line that is translated, in tokens: memory and time grow with the square of its length
MAX_LINE_TOKENS = 4096


def translate_lines(
    pipeline: TranslationPipeline, lines: Iterable[str], **search: Any
) -> Iterator[str]:
    """Translate lines, with the search of the model's generation configuration.

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
    pipeline: TranslationPipeline,
    lines: Iterable[str],
    glossary: Mapping[str, str] | None = None,
    **search: Any,
) -> Iterator[list[dict[str, Any]]]:
    """Translate lines, and yield the complete results of the pipeline.

    Args:
        pipeline: Model and tokenizer.
        lines: Sentences without line feeds.
        glossary: Target term by source term, from `read_glossary`; if a line has the source
            term, its translation must contain the target term.
        search: Settings of the pipeline's call that differ from the model's.

    Yields:
        The results for each line, in order: a mapping for each of its translations, best first.

    Raises:
        MemoryError: If a batch with its beams does not fit into memory.
    """
    try:
        if glossary is None:
            yield from pipeline(iter(lines), **search)
        else:
            yield from _translate_with_glossary(pipeline, iter(lines), glossary, search)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        num_beams = search.get("num_beams", pipeline.model.generation_config.num_beams) or 1
        raise MemoryError(
            f"out of memory: a batch with {num_beams:,} beams for each sentence does not fit. Use "
            "a smaller num_beams or max_extra_tokens."
        ) from error


def translate_shared(
    state: PartialState,
    pipeline: TranslationPipeline,
    sources: list[str],
    title: str | None = None,
    **search: Any,
) -> list[str]:
    """Translate sentences, divided among all processes. All processes must call this.

    Args:
        state: State of the processes.
        pipeline: Model and tokenizer.
        sources: Sentences.
        title: Name of the data in the progress bar; None for no progress bar.
        search: Settings of the pipeline's call that differ from the model's.

    Returns:
        Translations of all sentences, in order.
    """
    share = slice(state.process_index, None, state.num_processes)
    own_translations = list(
        tqdm(
            translate_lines(pipeline, sources[share], **search),
            total=len(sources[share]),
            desc=f"translating {title}",
            unit=" sentences",
            disable=title is None or not state.is_main_process,
        )
    )
    translations = [""] * len(sources)
    for rank, rank_translations in enumerate(gather_object([own_translations])):
        translations[rank :: state.num_processes] = rank_translations
    return translations


def one_line(text: str) -> str:
    """Replace each character at which `str.splitlines` splits by a space.

    Args:
        text: Translation.

    Returns:
        Translation that is one line for every reader.
    """
    return LINE_ENDS.sub(" ", text)


def arriving_lines(file: IO[bytes], name: str) -> Iterator[list[str]]:
    """Read lines as they arrive; each list contains the lines that were complete after one read.

    Args:
        file: Buffered file that is open for bytes.
        name: Name of the file, for an error.

    Yields:
        One or more lines, without line feeds.

    Raises:
        ValueError: If a line is not UTF-8 or is longer than `MAX_LINE_BYTES`; names the line.
    """
    # number of lines of each read, to group the lines after `read_lines`, which yields them singly
    group_sizes: deque[int] = deque()

    def read_complete_lines() -> Iterator[bytes]:
        # a bytearray, which grows in place, because a line can arrive in thousands of parts
        unfinished = bytearray()
        # read1 returns as soon as some bytes have arrived; IO[bytes] does not declare it
        read = file.read1  # type: ignore[attr-defined]
        while len(unfinished) <= MAX_LINE_BYTES and (chunk := read(PIPE_BYTES)):
            first_part, *next_parts = chunk.split(b"\n")
            unfinished += first_part
            if next_parts:
                complete_lines = [bytes(unfinished), *next_parts[:-1]]
                unfinished = bytearray(next_parts[-1])
                group_sizes.append(len(complete_lines))
                yield from (line + b"\n" for line in complete_lines)
        if unfinished:
            group_sizes.append(1)
            yield bytes(unfinished)

    lines = read_lines(read_complete_lines(), name)
    for first_line in lines:
        group = [first_line]
        try:
            for line in islice(lines, group_sizes.popleft() - 1):
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
    """Yield the lists of lines until a line has too many tokens.

    Args:
        groups: Lists of lines.
        pipeline: Model that translates the lines, and its tokenizer.
        name: Name of the file, for an error.
        split: Function that splits a line into the texts that the model reads.

    Yields:
        The same lists; if a line is too long, first the lines before it.

    Raises:
        ValueError: If a line has more tokens than `MAX_LINE_TOKENS`, or than the model has
            positions; names the line.
    """
    max_tokens = min(MAX_LINE_TOKENS, max_source_tokens(pipeline.model.config) or MAX_LINE_TOKENS)
    num_lines_read = 0
    for lines in groups:
        line_parts = [split(line) or [""] for line in lines]
        token_counts = map(len, pipeline.tokenizer(list(chain(*line_parts)))["input_ids"])
        for index, parts in enumerate(line_parts):
            num_tokens = max(islice(token_counts, len(parts)))
            if num_tokens > max_tokens:
                # the lines before it are still translated
                if index:
                    yield lines[:index]
                raise ValueError(
                    f"{name} line {num_lines_read + index + 1} must have at most {max_tokens:,} "
                    f"tokens, got {num_tokens:,}: split the line into sentences, one on each line. "
                    "`translate --split_sentences` does this."
                )
        num_lines_read += len(lines)
        yield lines


def add_language_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup):
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


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the search to a command.

    Args:
        parser: Parser of the command.
    """
    search_group = parser.add_argument_group("search", "the defaults are the model's own settings")
    for name, (flag_type, help_text) in SEARCH_FLAGS.items():
        search_group.add_argument(
            f"--{name}", type=flag_type, default=argparse.SUPPRESS, help=help_text
        )
    add_language_flags(search_group)
    search_group.add_argument(
        "--precision",
        choices=SEARCH_PRECISIONS,
        default=argparse.SUPPRESS,
        help="precision of the linear layers on a CPU: bf16 is faster than fp32 if the CPU has "
        "instructions for it (default: that of the weights)",
    )
    search_group.add_argument(
        "--int8",
        action="store_true",
        default=argparse.SUPPRESS,
        help="quantize the linear layers to int8: faster on a CPU, nearly the same translations",
    )
    search_group.add_argument(
        "--engine",
        choices=ENGINES,
        default=argparse.SUPPRESS,
        help="auto: use the inference engine if it can run the model, else the model's modules; "
        "off: always use the modules; required: stop with an error if the engine cannot run "
        "(default: auto)",
    )


def _make_parser(prog: str) -> argparse.ArgumentParser:
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
        help="run folder, model folder or Hub name; several models with the same vocabulary form "
        "an ensemble",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="text file, plain or compressed (.gz, .bz2, .xz, .zst); - or no file reads stdin. A "
        f"line must have at most {MAX_LINE_TOKENS:,} tokens. A subtitle file (.srt) gives a "
        "subtitle file",
    )
    parser.add_argument(
        "--column",
        default=None,
        help="translate only a part of each line: a column of a tab-separated file, by its number "
        "from 1, or a field of JSON lines (.jsonl), by its name, such as translation.en",
    )
    parser.add_argument(
        "--split_sentences",
        nargs="?",
        const=True,
        metavar="LANGUAGE",
        help="split each line into sentences, and translate each sentence separately; LANGUAGE, "
        "such as en, selects the splitting rules (default: the source language of the model)",
    )
    term_group = parser.add_argument_group(
        "terms", "what a translation must or must not contain; case matters"
    )
    term_group.add_argument(
        "--target_prefix", metavar="TEXT", help="text with which each translation begins"
    )
    for term_kind, rule in (
        ("required", "must contain"),
        ("forbidden", "must not contain"),
    ):
        term_group.add_argument(
            f"--{term_kind}_term",
            dest=f"{term_kind}_terms",
            metavar="TEXT",
            action="append",
            help=f"text that each translation {rule}; may be given several times",
        )
    term_group.add_argument(
        "--glossary",
        metavar="FILE",
        default=None,
        help="file with a source term, a tab and a target term on each line: if a line has the "
        "source term, its translation must contain the target term",
    )
    output_group = parser.add_argument_group("output", "by default, one translation on a line")
    output_group.add_argument(
        "--num_return_sequences",
        type=int,
        help="write an n-best list with this number of translations for each line, at most "
        "num_beams, best first: NUMBER ||| TRANSLATION, where NUMBER is the line number, from 0",
    )
    output_group.add_argument(
        "--scores",
        action="store_true",
        default=False,
        help="add the log-probability of a translation, and its score, the log-probability divided "
        "by the length penalty: NUMBER ||| TRANSLATION ||| LOG-PROBABILITY ||| SCORE",
    )
    output_group.add_argument(
        "--alignment",
        dest="return_alignment",
        action="store_true",
        help="add the word alignment, as pairs of source and target word numbers, from 0: "
        "TRANSLATION ||| 0-0 1-2",
    )
    output_group.add_argument(
        "--jsonl",
        action="store_true",
        default=False,
        help="write a JSON object for each line: --scores adds the scores of the translation and "
        "of each token, --alignment the alignment",
    )
    add_search_flags(parser)
    add_trust_flag(parser)
    return parser


def run(argv: list[str], prog: str) -> Iterator[str]:
    """Run the command line of the translation.

    A progress bar appears on stderr if stderr is a terminal and stdout is not.

    Args:
        argv: Arguments of the command line.
        prog: Name of the command, for its help.

    Yields:
        Translation of each line, in order, as soon as the translation is complete, in the format
        that the flags select.

    Raises:
        ValueError: If the file cannot be read, a model cannot be loaded, a line is not UTF-8 or too
            long for the model, or flags contradict each other.
    """
    # FILE can follow flags
    search = vars(parse_flags(_make_parser(prog), argv, is_intermixed=True))
    trust_remote_code, column, shows_scores, writes_jsonl, runs, glossary_path = (
        search.pop(flag)
        for flag in ("trust_remote_code", "column", "scores", "jsonl", "runs", "glossary")
    )
    # the parser assigns FILE to `runs` too: the last of several words is FILE unless it is a model
    path = runs.pop() if len(runs) > 1 and not _is_model_name(runs[-1]) else None
    path = None if path == "-" else path
    if early_file := next((word for word in runs[1:] if Path(word).is_file()), None):
        raise ValueError(
            f"only the last argument may be a file, got the file {early_file} before it: run the "
            "command once for each file, with the file as the last argument."
        )
    file_name = path or "stdin"
    supported = (".srt",) if column is None else (".srt", ".jsonl", ".json")
    refuse_other_format(file_name, supported, ADVICE)
    is_subtitles = ".srt" in Path(file_name.lower()).suffixes
    is_n_best = shows_scores or "num_return_sequences" in search
    is_aligned = "return_alignment" in search
    if is_subtitles and (column or writes_jsonl or is_n_best or is_aligned):
        raise ValueError(
            "column, jsonl, scores, alignment and num_return_sequences must not be given: "
            "subtitles are translated to subtitles."
        )
    if glossary_path is not None and "split_sentences" in search:
        raise ValueError("glossary must not be given with split_sentences.")
    glossary = None if glossary_path is None else read_glossary(Path(glossary_path))
    field_reader = None if column is None else column_reader(path, column)
    for stream_name, stream in (("stdin", path or sys.stdin), ("stdout", sys.stdout)):
        if stream is None:
            raise ValueError(f"{stream_name} must be open, got a closed one.")
    if shows_scores:
        search["return_scores"] = True
    # the file is opened first, so that an unreadable file is reported before the model is loaded
    with opened(Path(path)) if path else nullcontext(sys.stdin.buffer) as file:
        _refuse_output_to_input(path)
        subtitles = read_subtitles(file, file_name) if is_subtitles else []
        int8 = search.get("int8", False)
        pipeline, _ = load_ensemble(runs, trust_remote_code=trust_remote_code, int8=int8)
        _check_num_returned(pipeline, search)
        if subtitles:
            yield from _translate_subtitles(pipeline, subtitles, file_name, search, glossary)
            return
        groups: Iterable[list[str]] = arriving_lines(file, file_name)
        if field_reader is not None:
            groups = read_column(groups, file_name, field_reader)
        for number, (line, translations) in enumerate(
            _translate_groups(pipeline, groups, file_name, search, glossary)
        ):
            if number == 0 and field_reader is None:
                if "\t" in line:
                    logger.warning("%s", TABS_WARNING.format(file_name))
                if NO_SENTENCE.match(line):
                    logger.warning("%s", NO_SENTENCE_WARNING.format(file_name))
            if number < SUBTITLE_LINES and field_reader is None and SUBTITLE_TIMES.match(line):
                logger.warning("%s", SUBTITLES_WARNING.format(number + 1, file_name))
            if writes_jsonl:
                yield json.dumps({"source": line, "translations": translations}, ensure_ascii=False)
            elif is_n_best:
                # an n-best list of Moses and Marian
                for translation in translations:
                    yield " ||| ".join([str(number), *output_fields(translation)])
            else:
                yield " ||| ".join(output_fields(translations[0]))


def _refuse_output_to_input(path: str | None):
    """Refuse to write the translations to the file that is read, where they would be read too."""
    # file descriptors of stdin and stdout
    input_status, output_status = os.stat(0 if path is None else path), os.fstat(1)
    if stat.S_ISREG(input_status.st_mode) and os.path.samestat(input_status, output_status):
        raise ValueError(
            f"{path or 'stdin'} must not be the file to which stdout is written: write the "
            "translations to another file."
        )


def _is_model_name(word: str) -> bool:
    """Return whether a word names a folder, or can be the name of a model on the Hub."""
    path = Path(word)
    is_path = path.is_file() or path.parent.is_dir() or FILE_EXTENSION.fullmatch(path.suffix)
    return path.is_dir() or (not is_path and HUB_NAME.fullmatch(word) is not None)


def _check_num_returned(pipeline: TranslationPipeline, search: Mapping[str, Any]):
    defaults = pipeline.model.generation_config
    num_beams = search.get("num_beams", defaults.num_beams or DEFAULT_SEARCH["num_beams"])
    num_returned = search.get("num_return_sequences", 1)
    if num_returned > max(num_beams, 1) and not defaults.do_sample:
        raise ValueError(
            f"num_return_sequences must be at most num_beams, {num_beams}, got {num_returned}."
        )


def load_ensemble(
    names: Sequence[str], **settings: Any
) -> tuple[TranslationPipeline, list[PreTrainedModel]]:
    """Load the models of an ensemble, or a single model.

    Args:
        names: Run folders, model folders or Hub names. The tokenizer and the search settings are
            those of the first model.
        **settings: Arguments of `load`.

    Returns:
        Pipeline whose search averages the probabilities of all models, and these models.

    Raises:
        ValueError: If a model cannot be loaded, or the models differ in their vocabulary.
    """
    others = [load(name, **settings) for name in names[1:]]
    if others:
        settings["ensemble"] = [other.model for other in others]
    pipeline = load(names[0], **settings)
    vocabulary = pipeline.tokenizer.get_vocab()
    for name, other in zip(names[1:], others, strict=True):
        if other.tokenizer.get_vocab() != vocabulary:
            raise ValueError(
                f"the models of an ensemble must have the same vocabulary, but that of {name} "
                f"differs from that of {names[0]}."
            )
    return pipeline, [pipeline.model, *(other.model for other in others)]


def _translate_groups(
    pipeline: TranslationPipeline,
    groups: Iterable[list[str]],
    name: str,
    search: Mapping[str, Any],
    glossary: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each line with its translations, as soon as they are complete."""
    split_sentences, src_lang = search.get("split_sentences"), search.get("src_lang")
    split = partial(pipeline.split, split_sentences=split_sentences, src_lang=src_lang)
    # on one terminal, the progress bar would appear between the translations
    is_hidden = sys.stdout.isatty() or not sys.stderr.isatty()
    with tqdm(desc="translating", unit=" lines", disable=is_hidden) as bar:
        for lines in fitting_lines(groups, pipeline, name, split):
            results = search_lines(pipeline, lines, glossary, **search)
            for line_and_translations in zip(lines, results, strict=True):
                yield line_and_translations
                bar.update()


def _translate_with_glossary(
    pipeline: TranslationPipeline,
    lines: Iterator[str],
    glossary: Mapping[str, str],
    search: Mapping[str, Any],
) -> Iterator[list[dict[str, Any]]]:
    common_terms = search.get("required_terms", [])
    while window := list(islice(lines, TEXTS_PER_WINDOW)):
        required_terms = [common_terms + glossary_targets(line, glossary) for line in window]
        results = pipeline(window, **{**search, "required_terms": required_terms})
        for result in results:
            yield result if isinstance(result, list) else [result]


def read_glossary(path: Path) -> dict[str, str]:
    """Read the terms of a glossary.

    Args:
        path: File with a source term, a tab and a target term on each line; further columns are
            ignored.

    Returns:
        Target term by source term, which is in NFC.

    Raises:
        ValueError: If the file cannot be read, its first line has names of columns, a line does
            not have two terms, or a source term has two target terms; names the line.
    """
    # this module is imported here, because it imports pyarrow, which only few commands need
    from .data.tables import is_header

    glossary: dict[str, str] = {}
    with opened(path) as file:
        for number, line in enumerate(read_lines(lines_of(file), str(path)), start=1):
            source, *next_cells = (cell.strip() for cell in line.split("\t"))
            if not line.strip():
                continue
            if not source or not next_cells or not next_cells[0]:
                raise ValueError(
                    f"{path} line {number} must have a source term, a tab and a target term, got "
                    f"{line!r}."
                )
            if not glossary and is_header([source, next_cells[0]]):
                raise ValueError(
                    f"{path} line {number} must have a source term and a target term, got the "
                    f"names of columns, {line!r}. Remove this line."
                )
            source = unicodedata.normalize("NFC", source)
            if glossary.setdefault(source, next_cells[0]) != next_cells[0]:
                raise ValueError(
                    f"{path} line {number} must have another source term: {source!r} already has "
                    f"the target term {glossary[source]!r}. Remove one of the two lines."
                )
    return glossary


def glossary_targets(line: str, glossary: Mapping[str, str]) -> list[str]:
    """Return the target terms of the source terms that a line contains as whole words.

    Args:
        line: Source text.
        glossary: Target term by source term, which is in NFC.
    """
    line = unicodedata.normalize("NFC", line)
    # `in` is tested first, because it is much faster than a search for whole words
    return [
        target
        for source, target in glossary.items()
        if source in line and has_whole_words(line, source)
    ]


def has_whole_words(text: str, term: str) -> bool:
    """Return whether a text contains a term that neither begins nor ends inside a word.

    A term may begin or end anywhere in a script without spaces, but not before a combining mark.

    Args:
        text: Any text.
        term: One or more words.
    """
    start = text.find(term)
    while start >= 0:
        end = start + len(term)
        before, after = text[max(0, start - 1) : start], text[end : end + 1]
        is_in_word = (
            _is_mark(after)
            or _are_in_one_word(before, term[0])
            or _are_in_one_word(after, term[-1])
        )
        if not is_in_word:
            return True
        start = text.find(term, start + 1)
    return False


def _is_mark(character: str) -> bool:
    return character != "" and unicodedata.category(character).startswith("M")


def _are_in_one_word(neighbor: str, end: str) -> bool:
    """Return whether a character next to the end of a term continues its word."""
    is_of_word = neighbor.isalnum() or neighbor == "_" or _is_mark(neighbor)
    return is_of_word and not any(
        unicodedata.name(character, "").startswith(UNSPACED_SCRIPTS)
        for character in (neighbor, end)
    )


def _translate_subtitles(
    pipeline: TranslationPipeline,
    subtitles: list[Any],
    name: str,
    search: Mapping[str, Any],
    glossary: Mapping[str, str] | None,
) -> Iterator[str]:
    parts_of_subtitles = [split_subtitle(subtitle.content) for subtitle in subtitles]
    num_changed = sum(any(part.has_markup for part in parts) for parts in parts_of_subtitles)
    if num_changed:
        logger.warning(
            "%s: markup that encloses only some words of a subtitle, such as <i>, is removed. "
            "Subtitles with such markup: %s.",
            name,
            f"{num_changed:,}",
        )
    texts = [part.text for parts in parts_of_subtitles for part in parts]
    results = _translate_groups(pipeline, [texts], name, search, glossary)
    lines = (one_line(translations[0]["translation_text"]) for _, translations in results)
    for subtitle, parts in zip(subtitles, parts_of_subtitles, strict=True):
        yield format_translated_subtitle(subtitle, parts, list(islice(lines, len(parts))))


def output_fields(result: Mapping[str, Any]) -> list[str]:
    """Return the parts of a result: translation, and alignment and scores if the result has them.

    Args:
        result: Result of the pipeline.
    """
    fields = [one_line(result["translation_text"])]
    if "alignment" in result:
        fields.append(" ".join(f"{source}-{target}" for source, target in result["alignment"]))
    if "score" in result:
        fields += [f"{result[name]:.6f}" for name in ("log_probability", "score")]
    return fields
