"""What a run leaves to look at: environment, log, scores, loss curve and an attention map."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ...atomic_files import held, refuse_links, remove, write_whole
from ...hub import read_config
from ...records import (
    NOTHING,
    NUMBER,
    TEXT,
    Kind,
    check,
    list_of,
    mapping,
    or_null,
    read_json,
    read_json_lines,
    whole,
)
from ..config import TrainConfig
from ..recipe import RECIPE_FILE, load_config
from .environment import ENVIRONMENT_FILE

METRICS_FILE = "metrics.jsonl"
SCORES_FILE = "scores.json"
AVERAGE_FILE = "average.json"
SETTING = Kind("a number, text, true, false or null", lambda it: not isinstance(it, list | dict))
METRICS = mapping({"step": whole(0)}, others=or_null(NUMBER))
AVERAGE = mapping(
    {
        "steps": list_of(whole(0), least=1),
        "ema_decay": or_null(NUMBER),
        "seconds": or_null(NUMBER),
    }
)
COMPARISON = mapping(
    {
        **dict.fromkeys(("score", "ci", "other", "other_ci", "p_value"), NUMBER),
        "signature": TEXT,
    }
)
SCORES = mapping(
    others=mapping(
        optional={
            "average": or_null(TEXT),
            "search": mapping(others=SETTING),
            "against": mapping(
                others=mapping(optional={"bleu": COMPARISON, "chrf": COMPARISON}, others=NOTHING)
            ),
        }
    )
)
# an entry of translations; there are others, of trees for one
TRANSLATED = mapping(
    {
        **dict.fromkeys(("dataset", "split", "source_lang", "target_lang"), TEXT),
        "name": or_null(TEXT),
        "sentences": whole(1),
        **dict.fromkeys(("bleu", "chrf", "exact_match"), NUMBER),
        **dict.fromkeys(("bleu_signature", "chrf_signature"), TEXT),
    },
    {
        **dict.fromkeys(("comet", "compound_bleu", "seconds"), NUMBER),
        **dict.fromkeys(("comet_signature", "compound_bleu_signature"), TEXT),
    },
)
# what a model in a folder consists of, and what was found of it
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
# all that commands write to a run folder
WRITTEN = (
    *(name for name in MODEL_FILES if "/" not in name),
    RECIPE_FILE,
    METRICS_FILE,
    ENVIRONMENT_FILE,
    "checkpoints",
    "tokenizer",
    "pictures",
    "trackers",
)


def refuse_other_files(folder: Path, rule: str, names: Iterable[str] = MODEL_FILES) -> None:
    """Refuse a folder with files that what is to be left in it would replace.

    Args:
        folder: Where it is to be.
        rule: What the folder must be, for the error.
        names: Of the files; those of a model if not given.

    Raises:
        ValueError: If there is such a file; says which.
    """
    for name in names:
        if (folder / name).exists():
            raise ValueError(f"{rule}, got {folder} with a {name}, which would be replaced.")


@contextlib.contextmanager
def hold_run(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Keep a run folder from other commands until the block ends.

    Args:
        folder: Run folder; made if it does not exist.
        seconds: Time to wait for another command.

    Raises:
        ValueError: If another command has it, or a file or folder in it is a link.
    """
    with held(folder, seconds) as is_locked:
        refuse_links(folder, WRITTEN)
        if is_locked:
            # left by commands that were killed
            for path in folder.glob(".*.unfinished"):
                remove(path)
        yield


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of `metrics.jsonl`.

    Args:
        folder: The run folder.

    Returns:
        A mapping a line, in order; a line that a killed run left unfinished is left out.

    Raises:
        ValueError: If a whole line is not as it was written; says which.
    """
    path = folder / METRICS_FILE
    return read_json_lines(path, METRICS) if path.exists() else []


def read_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """Read `scores.json`.

    Args:
        folder: The run folder.

    Returns:
        What `evaluate` found, by split; nothing if it has not run.

    Raises:
        ValueError: If the file is damaged.
    """
    path = folder / SCORES_FILE
    scores = read_json(path, SCORES) if path.exists() else {}
    for key, score in scores.items():
        if "bleu" in score:
            check(score, TRANSLATED, path, key)
    return scores


def write_average(
    folder: Path, steps: Sequence[int], ema_decay: float | None, seconds: float | None
) -> None:
    """Note what the model in a run folder is the average of.

    Args:
        folder: The run folder.
        steps: Of the checkpoints.
        ema_decay: Of the moving average, which is that of the one checkpoint; or None.
        seconds: Of training until the last of them; None where that was not counted.
    """
    text = json.dumps({"steps": list(steps), "ema_decay": ema_decay, "seconds": seconds})
    write_whole(folder / AVERAGE_FILE, text + "\n")


def read_average(folder: Path) -> dict[str, Any] | None:
    """Read what `write_average` has noted.

    Args:
        folder: The run folder.

    Returns:
        `steps`, `ema_decay` and `seconds`; None where an earlier version has not noted it.

    Raises:
        ValueError: If the file is damaged.
    """
    path = folder / AVERAGE_FILE
    return read_json(path, AVERAGE) if path.exists() else None


def describe_average(folder: Path) -> str | None:
    """What the model in a run folder is the average of, in words.

    Args:
        folder: The run folder.

    Returns:
        A clause; None where an earlier version has not noted it.
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
    numbers = ", ".join(map(str, steps))
    return f"the mean of {len(steps)} checkpoint{plural}, of step{plural} {numbers}"


def read_recipe(folder: Path) -> TrainConfig:
    """Read the settings of a run.

    Args:
        folder: The run folder.

    Returns:
        The settings it was started with.

    Raises:
        ValueError: If the folder is none of a run, or its recipe is refused.
    """
    path = folder / RECIPE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} must be a run folder, with {RECIPE_FILE}, got none.")
    return load_config(str(path))


def vocabulary_size(folder: Path, recipe: TrainConfig) -> int | None:
    """How many tokens a run's model has, which may be fewer than it was to learn.

    Args:
        folder: The run folder.
        recipe: Its settings.

    Returns:
        As its configuration says, or as it was to learn before there is one; None for the tokens
        of a tokenizer that was given.

    Raises:
        OSError: If the configuration cannot be read.
    """
    if (folder / CONFIG_NAME).exists():
        return read_config(folder).get("vocab_size")
    return None if recipe.tokenizer else recipe.vocab_size
