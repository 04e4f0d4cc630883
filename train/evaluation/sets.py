"""Test sets outside of a dataset: text files, and the test sets of sacreBLEU."""

import logging
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from sacrebleu.dataset import DATASETS

from ...configuration_vanilla_transformer import closest_name
from ..data.text_files import NO_SENTENCE, lines_of, opened, read_lines, refuse_other_format

logger = logging.getLogger(__name__)


def read_files(paths: Sequence[str | Path]) -> list[list[str]]:
    """Read text files that have one sentence on each line and the same number of lines.

    Args:
        paths: Source file and reference files, plain or compressed.

    Returns:
        Sentences of each file.

    Raises:
        ValueError: If a file cannot be read, is empty, is not UTF-8, or has another number of lines
            than the first.
    """
    for path in paths:
        refuse_other_format(path)
    texts = []
    for path in paths:
        # read once: a path can be a pipe
        with opened(Path(path)) as file:
            texts.append(list(read_lines(lines_of(file), str(path))))
    for path, lines in zip(paths, texts, strict=True):
        if not lines:
            raise ValueError(f"{path} must have at least one line, got none.")
        if NO_SENTENCE.match(lines[0]):
            logger.warning(
                "The first line of %s has JSON or markup, but whole lines are scored.", path
            )
        if "\t" in lines[0]:
            logger.warning(
                "The first line of %s has a tab, but whole lines are scored. To score the pairs of "
                "a table, give --dataset.",
                path,
            )
        if len(lines) != len(texts[0]):
            raise ValueError(
                f"{paths[0]} and {path} must have the same number of lines, got "
                f"{len(texts[0]):,} and {len(lines):,}."
            )
    return texts


def refuse_sacrebleu_set(name: str, source_lang: str, target_lang: str) -> None:
    """Refuse a test set that sacreBLEU does not have, or does not have in these languages.

    Args:
        name: Name of the test set.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Raises:
        ValueError: If there is no such test set; names the closest one, or the language pairs.
    """
    if name not in DATASETS:
        raise ValueError(
            f"sacrebleu must be a test set of sacreBLEU, such as wmt14/full, got {name!r}."
            + (closest_name(name, list(DATASETS)) or " `sacrebleu --list` lists them.")
        )
    pairs = DATASETS[name].langpairs
    if f"{source_lang}-{target_lang}" not in pairs:
        raise ValueError(
            f"source_lang and target_lang must be a language pair of sacreBLEU's {name}, one of "
            f"{', '.join(pairs)}, got {source_lang}-{target_lang}."
        )


def read_sacrebleu_set(name: str, source_lang: str, target_lang: str) -> list[list[str]]:
    """Read a test set of sacreBLEU, and download it if it is not stored yet.

    sacreBLEU stores test sets in the folder of the environment variable `SACREBLEU`, or else in
    `~/.sacrebleu`.

    Args:
        name: Name of the test set.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        Sources, and one or more lists of references.

    Raises:
        ValueError: If the test set cannot be downloaded or read.
    """
    pair = f"{source_lang}-{target_lang}"
    try:
        files = [DATASETS[name].get_source_file(pair), *DATASETS[name].get_reference_files(pair)]
    # for a wrong checksum or certificate, sacreBLEU logs the reason and raises SystemExit
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, SystemExit) as error:
        reason = "see above" if isinstance(error, SystemExit) else " ".join(str(error).split())
        raise ValueError(
            f"sacreBLEU's {name} for {pair} cannot be downloaded or read: {reason}."
        ) from error
    return read_files(files)
