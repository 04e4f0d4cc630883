"""What a run leaves to look at: environment, log, scores, loss curve and an attention map."""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..atomic_files import all_to_disk, held, refuse_links, remove, write_whole
from ..attention_maps import attention_weights
from ..console import shown
from ..drawing import label_places, new_figure, save_figure
from ..hub import WITHOUT_CODE, check_local, read_config, read_tokenizer
from ..records import (
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
    read_text,
    whole,
)
from .config import RECIPE_FILE, TrainConfig, load_config

LIBRARIES = (
    "vanilla_transformer",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "safetensors",
    "sacrebleu",
    "sacremoses",
)
METRICS_FILE = "metrics.jsonl"
SCORES_FILE = "scores.json"
ENVIRONMENT_FILE = "environment.txt"
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


def environment_facts() -> dict[str, Any]:
    """What the program runs on, and as what.

    Returns:
        Command, machine, versions and commit, by name.
    """
    return {
        # in one line, which a shell reads as the several that were given
        "command": shlex.join([*_program(), *sys.argv[1:]]).replace("\n", "'$'\\n''"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        "gpus": ", ".join(
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        )
        or "none",
        **{name: _version(name) for name in LIBRARIES},
        "commit": _commit(),
    }


def write_environment(folder: Path, facts: Mapping[str, Any]) -> None:
    """Note what the run ran on, in `environment.txt`; a resumed run adds to it.

    Args:
        folder: The run folder.
        facts: What else to note, by name.
    """
    lines = {**environment_facts(), **facts}
    path = folder / ENVIRONMENT_FILE
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    block = "".join(f"{name}: {value}\n" for name, value in lines.items())
    write_whole(path, f"{before}{block}\n")


def _program() -> list[str]:
    """How the command line begins, without where it lies on this machine."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is None:
        return [Path(sys.argv[0]).name]
    return ["python", "-m", module.name.removesuffix(".__main__")]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # a checkout of something else may surround an installed package
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package.resolve():
            return "none"
        return git("rev-parse", "HEAD") + (" (dirty)" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"


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


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run.

    Args:
        source: A folder or a Hub name.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If it cannot be loaded, needs code of its own, is not fast, or lacks a token
            that training needs.
    """
    check_local(source, "tokenizer must be a folder or a Hub name")
    tokenizer = read_tokenizer(source, remedy=WITHOUT_CODE)
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer {source!r} must be a fast one, got {type(tokenizer).__name__}."
        )
    for token in ("pad_token", "eos_token"):
        if getattr(tokenizer, token) is None:
            raise ValueError(f"tokenizer {source!r} must have a {token}, got none.")
    if tokenizer("").input_ids != [tokenizer.eos_token_id]:
        raise ValueError(
            f"tokenizer {source!r} must end each sentence with {tokenizer.eos_token!r}."
        )
    highest = max(tokenizer.get_vocab().values())
    if highest >= len(tokenizer):
        raise ValueError(
            f"tokenizer {source!r} must number its {len(tokenizer):,} tokens from 0 without a gap, "
            f"got the id {highest:,}."
        )
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer.

    Args:
        tokenizer: A fast tokenizer.
        folder: Where to.

    Raises:
        OSError: If it cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
        all_to_disk(folder)
    # tokenizers has no error of its own: a full disk is a bare Exception to it
    except Exception as error:
        raise OSError(f"{folder} cannot be written: {' '.join(str(error).split())}") from error


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A name for exactly this vocabulary.

    Args:
        tokenizer: A fast tokenizer.

    Returns:
        The SHA-256 of its definition.
    """
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


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


def logged(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """One quantity against the steps.

    Args:
        metrics: From `read_metrics`.
        name: Of the quantity.

    Returns:
        The steps where it was logged and finite, and what it was.
    """
    points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot_losses(axes: Any, metrics: Sequence[Mapping[str, Any]], run: str | None = None) -> None:
    """Plot training and validation loss over the steps, in one colour where they are a run's.

    Args:
        axes: To plot on.
        metrics: From `read_metrics`.
        run: What to call it beside other runs.
    """
    color = None
    for name, label in (("loss", "training, smoothed"), ("validation_loss", "validation")):
        steps, values = logged(metrics, name)
        if not steps:
            continue
        is_faint = run is not None and name == "loss"
        (line,) = axes.plot(
            steps,
            values,
            label=label if run is None else f"{run}, {label}",
            marker="." if len(steps) < 40 else "",
            color=color,
            alpha=0.45 if is_faint else 1.0,
        )
        color = line.get_color() if run is not None else None
    axes.set_xlabel("step")
    axes.set_ylabel("loss per target token")
    axes.grid(alpha=0.3)


def draw_loss_curve(folder: Path) -> None:
    """Draw training and validation loss over the steps, as `pictures/loss.png`.

    Args:
        folder: The run folder, with its metrics.
    """
    figure, axes = new_figure(6.0, 3.6)
    plot_losses(axes, read_metrics(folder))
    if axes.lines:
        axes.legend()
    save_figure(figure, folder / "pictures" / "loss.png")


def draw_attention(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str
) -> None:
    """Draw what each target token attends to in the source, as `pictures/attention.png`.

    The mean over the heads of the decoder's last layer, section 3.2.3, for the translation that
    the model itself finds.

    Args:
        folder: The run folder.
        model: A trained model.
        tokenizer: Its tokenizer.
        source: A sentence to translate.
    """
    weights = attention_weights(model, tokenizer, source)
    width, height = 2.8 + 0.32 * len(weights.source), 1.5 + 0.28 * len(weights.target)
    figure, axes = new_figure(width, height)
    image = axes.imshow(
        weights.cross[-1].mean(dim=0).numpy(), cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto"
    )
    figure.colorbar(image, ax=axes, label="weight, the mean of the heads of the last layer")
    label_places(axes, weights.target, weights.source)
    axes.set_xlabel("source")
    axes.set_ylabel("translation")
    save_figure(figure, folder / "pictures" / "attention.png")


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


def read_environment(folder: Path) -> list[dict[str, str]]:
    """Read `environment.txt`.

    Args:
        folder: The run folder.

    Returns:
        What was noted, by name, when the run began and each time it went on.

    Raises:
        ValueError: If it is no text, or a number is none.
    """
    path = folder / ENVIRONMENT_FILE
    blocks = read_text(path).replace("\r\n", "\n").split("\n\n") if path.exists() else []
    starts = [
        dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        for block in blocks
        if block.strip()
    ]
    for start in starts:
        for name in ("cpus", "threads_per_process", "processes"):
            if not re.fullmatch("[0-9]{1,9}", start.get(name, "0")):
                raise ValueError(
                    f"{path}: {name} must be a whole number, got {shown(start[name])}."
                )
    return starts


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


def perplexity(loss: float) -> float:
    """The perplexity of a loss per token, infinite where it is too large to say.

    Args:
        loss: Unsmoothed, in nats.

    Returns:
        Its exponential.
    """
    return math.exp(loss) if loss < 700 else math.inf
