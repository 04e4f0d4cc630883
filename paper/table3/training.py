"""Training of the rows of Table 3, one after the other. Section 6.2."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ... import VanillaTransformerConfig
from ...train.config import TrainConfig
from ...train.data.prepare import load_main_corpus
from ...train.evaluate import evaluate
from ...train.loop import train
from ...train.progress import perplexity
from ...train.recipe import RECIPE_FILE
from ...train.run_folder.files import (
    lock_run_folder,
    read_average,
    read_metrics,
    read_recipe,
    read_scores,
)
from ...train.vocabulary import prepare_tokenizer

logger = logging.getLogger(__name__)

# the paper evaluates on newstest2013, its development set
SPLIT = "validation"
# settings that may differ between two calls for the same row
PATH_SETTINGS = ("output_dir", "tokenizer")


class RowResult(NamedTuple):
    """A row of Table 3, trained with one seed, and its results on the validation split.

    Attributes:
        config: Sizes of the model.
        perplexity: Perplexity per target token, from the loss without smoothing.
        bleu: BLEU of sacreBLEU.
        signature: sacreBLEU's signature of the BLEU score.
        seconds: Training time, in seconds.
    """

    config: VanillaTransformerConfig
    perplexity: float
    bleu: float
    signature: str
    seconds: float


def train_rows(
    configs: Mapping[str, Sequence[TrainConfig]], folder: Path
) -> dict[str, list[RowResult]]:
    """Train and evaluate the rows that are not finished, and read the results of all rows.

    All rows share one vocabulary.

    Args:
        configs: For each row, the settings of each seed, which contain its folder.
        folder: Folder whose subfolder `vocabulary` stores the shared vocabulary.

    Returns:
        For each row, the results of each seed, in the order of `configs`.

    Raises:
        ValueError: If a row was started with other settings, or the dataset is invalid.
        InterruptedError: If a signal stopped the training; the next call resumes the training.
    """
    unfinished = [
        (row, config)
        for row, row_configs in configs.items()
        for config in row_configs
        if not _is_finished(row, config)
    ]
    if unfinished:
        first_config = next(iter(configs.values()))[0]
        vocabulary = _learn_vocabulary(first_config, folder / "vocabulary")
    for number, (row, row_config) in enumerate(unfinished, start=1):
        config = dataclasses.replace(row_config, tokenizer=vocabulary)
        logger.info("row %s, seed %d, %d of %d", row, config.seed, number, len(unfinished))
        if not train(config, resume=True):
            raise InterruptedError(
                f"row {row} was stopped: run the same command again to resume it."
            )
        evaluate(config.folder, SPLIT)
    return {
        row: [_read_result(config.folder) for config in row_configs]
        for row, row_configs in configs.items()
    }


def _is_finished(row: str, config: TrainConfig) -> bool:
    folder = config.folder
    if not (folder / RECIPE_FILE).is_file():
        return False
    earlier_settings = dataclasses.asdict(read_recipe(folder))
    for name, value in dataclasses.asdict(config).items():
        if name not in PATH_SETTINGS and earlier_settings[name] != value:
            raise ValueError(
                f"output_dir must be new for other settings: {name} of row {row} was "
                f"{earlier_settings[name]!r}, got {value!r}."
            )
    # a row is finished when its translations are scored
    return SPLIT in read_scores(folder)


def _learn_vocabulary(config: TrainConfig, folder: Path) -> str:
    if SPLIT not in load_main_corpus(config):
        raise ValueError(f"dataset must have a split {SPLIT!r}, got {config.dataset!r} without.")
    with lock_run_folder(folder):
        prepare_tokenizer(dataclasses.replace(config, output_dir=str(folder)))
    return str(folder / "tokenizer")


def _read_result(folder: Path) -> RowResult:
    validation_losses = [
        line["validation_loss"] for line in read_metrics(folder) if "validation_loss" in line
    ]
    scores = read_scores(folder)[SPLIT]
    average_record: Any = read_average(folder)
    return RowResult(
        config=VanillaTransformerConfig.from_pretrained(folder),
        perplexity=perplexity(validation_losses[-1]),
        bleu=scores["bleu"],
        signature=scores["bleu_signature"],
        seconds=average_record["seconds"],
    )
