"""Files of a run folder: recipe, metrics, scores, and the record of the averaged model."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ...atomic_files import locked_folder, refuse_links, remove, write_atomically
from ...loading import read_config
from ...records import (
    NOTHING,
    NUMBER,
    TEXT,
    Schema,
    check,
    either,
    list_of,
    mapping,
    or_null,
    read_json,
    read_json_lines,
    whole_number,
)
from ..config import TrainConfig
from ..recipe import RECIPE_FILE, load_config
from .environment import ENVIRONMENT_FILE

METRICS_FILE = "metrics.jsonl"
SCORES_FILE = "scores.json"
AVERAGE_FILE = "average.json"
SETTING_SCHEMA = Schema(
    "a number, text, true, false or null", lambda it: not isinstance(it, list | dict)
)
METRICS_SCHEMA = mapping({"step": whole_number(0)}, other_items=or_null(NUMBER))
AVERAGE_SCHEMA = mapping(
    {
        "steps": list_of(whole_number(0), least=1),
        "ema_decay": or_null(NUMBER),
        "seconds": NUMBER,
    }
)
COMPARISON_SCHEMA = mapping(
    {
        **dict.fromkeys(("score", "ci", "other", "other_ci", "p_value"), NUMBER),
        "signature": TEXT,
    }
)
INTERVAL_SCHEMA = mapping({"mean": NUMBER, "ci": NUMBER})
LEAKS_SCHEMA = mapping(
    dict.fromkeys(
        ("source_exact", "source_near", "target_exact", "target_near", "pairs"), whole_number(0)
    )
)
SCORES_SCHEMA = mapping(
    other_items=mapping(
        optional={
            "average": or_null(TEXT),
            "against": mapping(
                other_items=mapping(
                    optional={"bleu": COMPARISON_SCHEMA, "chrf": COMPARISON_SCHEMA},
                    other_items=NOTHING,
                )
            ),
        }
    )
)
# entry of `scores.json` for translations; entries for other results, such as trees, have other
# fields
TRANSLATION_SCORE_SCHEMA = mapping(
    {
        **dict.fromkeys(("dataset", "source_lang", "target_lang"), TEXT),
        **dict.fromkeys(("split", "name"), or_null(TEXT)),
        "sentences": whole_number(1),
        **dict.fromkeys(("bleu", "chrf", "exact_match"), NUMBER),
        **dict.fromkeys(("bleu_signature", "chrf_signature"), TEXT),
        "search": mapping(other_items=SETTING_SCHEMA),
    },
    {
        **dict.fromkeys(("comet", "compound_bleu", "seconds"), NUMBER),
        **dict.fromkeys(("comet_signature", "compound_bleu_signature"), TEXT),
        "empty": whole_number(0),
        "references": list_of(TEXT, least=1),
        "intervals": mapping({"bleu": INTERVAL_SCHEMA, "chrf": INTERVAL_SCHEMA, "signature": TEXT}),
        "leaks": either(LEAKS_SCHEMA, TEXT),
    },
)
# files of a saved model, its model card, its scores and its pictures
MODEL_FILES = (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
    AVERAGE_FILE,
    SCORES_FILE,
    "hypotheses",
    "pictures/loss.png",
    "pictures/attention.png",
)
# names of the files and folders that commands write to a run folder, without those of trackers
WRITTEN_NAMES = (
    *(name for name in MODEL_FILES if "/" not in name),
    RECIPE_FILE,
    METRICS_FILE,
    ENVIRONMENT_FILE,
    "checkpoints",
    "tokenizer",
    "pictures",
)
TRACKERS_FOLDER = "trackers"


def refuse_other_files(folder: Path, rule: str, names: Iterable[str] = MODEL_FILES) -> None:
    """Refuse a folder with files that a command would replace.

    Args:
        folder: Folder to write to.
        rule: Rule for the folder, the beginning of the error.
        names: Names of the files that the command writes; by default the files of a model.

    Raises:
        ValueError: If there is such a file; names the file.
    """
    for name in names:
        if (folder / name).exists():
            raise ValueError(f"{rule}, got {folder} with a {name}, which would be replaced.")


@contextlib.contextmanager
def lock_run_folder(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Lock a run folder against other commands until the block ends.

    Args:
        folder: Run folder; created if it does not exist.
        seconds: Time to wait for another command.

    Raises:
        ValueError: If another command has locked the folder, or a file or folder in it is a link.
    """
    with locked_folder(folder, seconds) as is_locked:
        refuse_links(folder, WRITTEN_NAMES)
        # in its own folder a tracker makes links, such as latest-run of wandb
        paths = (folder / TRACKERS_FOLDER, *(folder / TRACKERS_FOLDER).glob("*"))
        refuse_links(folder, [str(path.relative_to(folder)) for path in paths], is_recursive=False)
        if is_locked:
            # remove the temporary files of killed commands. The lock makes this safe: no other
            # command is writing
            for path in folder.glob(".*.unfinished"):
                remove(path)
        yield


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of `metrics.jsonl`.

    Args:
        folder: Run folder.

    Returns:
        Metrics of each line, in order, without a last line that a killed run left unfinished.

    Raises:
        ValueError: If a complete line is damaged; names the line.
    """
    path = folder / METRICS_FILE
    return read_json_lines(path, METRICS_SCHEMA) if path.exists() else []


def read_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """Read `scores.json`.

    Args:
        folder: Run folder.

    Returns:
        Results of `evaluate`, by name; empty before the first evaluation.

    Raises:
        ValueError: If the file is damaged.
    """
    path = folder / SCORES_FILE
    scores = read_json(path, SCORES_SCHEMA) if path.exists() else {}
    for key, score in scores.items():
        if "bleu" in score:
            check(score, TRANSLATION_SCORE_SCHEMA, path, key)
    return scores


def write_average(
    folder: Path, steps: Sequence[int], ema_decay: float | None, seconds: float
) -> None:
    """Record the checkpoints from which the model in a run folder was averaged.

    Args:
        folder: Run folder.
        steps: Steps of the checkpoints.
        ema_decay: Decay, if the model is the moving average in a single checkpoint; else None.
        seconds: Training time up to the last of these checkpoints, in seconds.
    """
    text = json.dumps({"steps": list(steps), "ema_decay": ema_decay, "seconds": seconds})
    write_atomically(folder / AVERAGE_FILE, text + "\n")


def read_average(folder: Path) -> dict[str, Any] | None:
    """Read the record that `write_average` has written.

    Args:
        folder: Run folder.

    Returns:
        `steps`, `ema_decay` and `seconds`; None if the folder has no complete model.

    Raises:
        ValueError: If the file is damaged.
    """
    path = folder / AVERAGE_FILE
    return read_json(path, AVERAGE_SCHEMA) if path.exists() else None


def describe_average(folder: Path) -> str | None:
    """Describe in words the checkpoints from which the model in a run folder was averaged.

    Args:
        folder: Run folder.

    Returns:
        Noun phrase for a sentence; None if the folder has no complete model.
    """
    average = read_average(folder)
    if average is None:
        return None
    steps = average["steps"]
    if average["ema_decay"] is not None:
        return (
            f"the exponential moving average of the weights at step {steps[-1]}, "
            f"with decay {average['ema_decay']}"
        )
    plural = "s" if len(steps) > 1 else ""
    step_numbers = ", ".join(map(str, steps))
    return f"the mean of {len(steps)} checkpoint{plural}, of step{plural} {step_numbers}"


def read_recipe(folder: Path) -> TrainConfig:
    """Read the settings of a run.

    Args:
        folder: Run folder.

    Returns:
        Settings that the run was started with.

    Raises:
        ValueError: If the folder is not a run folder, or its recipe is invalid.
    """
    path = folder / RECIPE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} must be a run folder, with {RECIPE_FILE}, got none.")
    return load_config(str(path))


def vocabulary_size(folder: Path, recipe: TrainConfig) -> int | None:
    """Return the vocabulary size of a run. It can be smaller than the size in the recipe.

    Args:
        folder: Run folder.
        recipe: Settings of the run.

    Returns:
        Size in the model's configuration, or in the recipe if there is no model yet; None if there
        is no model and the recipe names a tokenizer.

    Raises:
        OSError: If the configuration cannot be read.
    """
    if (folder / CONFIG_NAME).exists():
        return read_config(folder).get("vocab_size")
    return None if recipe.tokenizer else recipe.vocab_size
