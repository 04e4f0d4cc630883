"""Averaged model of a run, from checkpoints or a moving average. Section 6.1."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..atomic_files import atomic_folder, write_atomically
from ..batches_vanilla_transformer import max_source_tokens
from ..console import refuse_code, require_nonempty_path
from ..loading import load_whole
from .config import TrainConfig
from .data.corpus import texts_of
from .data.prepare import load_main_corpus
from .model_class import model_class_of, set_search
from .recipe import RECIPE_FILE
from .run_folder.checkpoint import (
    BAD_FILE,
    EMA_FILE,
    OPTIMIZER_FILE,
    changed_file,
    checkpoints,
    checkpoints_around,
    incomplete_checkpoints,
    load_weights,
    read_state,
    read_weights,
    recent_checkpoints,
    refuse_not_finite,
    regular_checkpoints,
)
from .run_folder.environment import ENVIRONMENT_FILE
from .run_folder.files import (
    AVERAGE_FILE,
    METRICS_FILE,
    describe_average,
    lock_run_folder,
    read_recipe,
    refuse_other_files,
    write_average,
)
from .run_folder.model_card import write_model_card
from .run_folder.plots import draw_attention, draw_loss_curve
from .vocabulary import load_tokenizer, save_tokenizer

logger = logging.getLogger(__name__)

# in a run with `max_minutes`, only the checkpoints of this last share of its steps are averaged
AVERAGED_SHARE = 0.2


def average_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Average the weights of checkpoints. Section 6.1.

    Args:
        folders: Folders of the checkpoints.

    Returns:
        Mean of each weight by name, in float32.

    Raises:
        ValueError: If there is no checkpoint, or the checkpoints have different weights.
        FloatingPointError: If a weight is not finite; names the weight.
    """
    if not folders:
        raise ValueError("an average must have at least one checkpoint, got none.")
    total: dict[str, Tensor] = {}
    for folder in folders:
        weights = {name: tensor.float() for name, tensor in read_weights(folder).items()}
        refuse_not_finite(weights, f"the weights of {folder}")
        if not total:
            total = weights
            continue
        if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in total.items()}:
            raise ValueError(f"{folder} must have the same weights as {folders[0]} to be averaged.")
        for name, tensor in weights.items():
            total[name] += tensor
    return {name: tensor / len(folders) for name, tensor in total.items()}


class MovingAverage:
    """Exponential moving average of the weights in float32, with one update per step.

    In early steps the decay is (1 + step) / (10 + step), as long as this is smaller than `decay`.
    With the full decay, the random initial weights would dominate the average for thousands of
    steps.

    Args:
        model: Model in training; the average begins with its weights.
        decay: Weight of the old average in an update.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        # `named_parameters` lists tied weights once
        parameters = {name: weight.detach() for name, weight in model.named_parameters()}
        self._parameters = list(parameters.values())
        # averaged weights by name, in float32
        self.averages = {name: weight.float().clone() for name, weight in parameters.items()}

    @torch.no_grad()
    def update(self, step: int, is_skipped: Tensor) -> None:
        """Update the average with the weights after a step, without waiting for the device.

        Args:
            step: Number of the step, from 1.
            is_skipped: Whether the step was skipped, a boolean scalar; if so, the average stays.
        """
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        averages = list(self.averages.values())
        differences = torch._foreach_sub([weight.float() for weight in self._parameters], averages)
        torch._foreach_mul_(differences, share * ~is_skipped)
        torch._foreach_add_(averages, differences)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the average.

        Args:
            tensors: Averaged weights by name.
        """
        for name, average in self.averages.items():
            average.copy_(tensors[name])


def average_run(
    folder: str | Path,
    *,
    num_checkpoints: int | None = None,
    minutes: float | None = None,
    ema: bool = False,
    output_dir: str | Path | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Average the weights of a run, so that its folder can be loaded as a model. Section 6.1.

    Without `num_checkpoints`, `minutes` and `ema`, the recipe of the run decides.

    Args:
        folder: Run folder.
        num_checkpoints: Number of last checkpoints to average.
        minutes: Last minutes of training whose checkpoints are averaged.
        ema: Whether to use the exponential moving average of the run.
        output_dir: Folder for the model, instead of the run folder.
        trust_remote_code: Whether to run the Python code of the model class in the run folder.

    Returns:
        Description of the average.

    Raises:
        ValueError: If the folder is not a run folder, or lacks the checkpoints or the moving
            average, arguments contradict each other, code is not trusted, or the model would
            replace files that are not an average.
        FloatingPointError: If a weight is not finite; names the weight.
        OSError: If the model cannot be written.
    """
    folder = require_nonempty_path(folder, "run")
    target = folder if output_dir is None else require_nonempty_path(output_dir, "output_dir")
    with lock_run_folder(target):
        return average_locked_run(
            folder,
            num_checkpoints=num_checkpoints,
            minutes=minutes,
            ema=ema,
            target=target,
            trust_remote_code=trust_remote_code,
        )


def average_locked_run(
    folder: Path,
    *,
    num_checkpoints: int | None = None,
    minutes: float | None = None,
    ema: bool = False,
    target: Path | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Average a run like `average_run`, in a process that already holds the lock.

    Args:
        folder: Run folder. The other arguments are those of `average_run`.
        target: Folder for the model, which is locked; the run folder if not given.
    """
    config = read_recipe(folder)
    if config.model_class and config.has_model_file and not trust_remote_code:
        refuse_code(folder / RECIPE_FILE, config.model_class)
    target = target or folder
    is_other_folder = target.resolve() != folder.resolve()
    if is_other_folder:
        if (target / "checkpoints").exists():
            raise ValueError(f"output_dir must not be another run's folder, got {target}.")
        # an average may replace an earlier average, but no other files
        if not (target / AVERAGE_FILE).is_file():
            refuse_other_files(target, "output_dir must be new, or contain an average")
    model, states, is_ema = _load_averaged_model(folder, config, num_checkpoints, minutes, ema)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    set_search(model, config)
    example_sentence = _find_example_sentence(config, tokenizer, max_source_tokens(model.config))
    copied_files = {
        name: (folder / name).read_bytes()
        for name in (RECIPE_FILE, ENVIRONMENT_FILE, METRICS_FILE)
        if is_other_folder and (folder / name).is_file()
    }
    # an interrupted write must not leave the old description beside new weights
    (target / AVERAGE_FILE).unlink(missing_ok=True)
    _save_model(target, model, tokenizer)
    for name, content in copied_files.items():
        write_atomically(target / name, content)
    steps, seconds = [state["step"] for state in states], states[-1]["seconds"]
    write_average(target, steps, config.ema_decay if is_ema else None, seconds)
    draw_loss_curve(target)
    # if no new picture is drawn, the model card would show the attention of the previous average
    (target / "pictures" / "attention.png").unlink(missing_ok=True)
    if example_sentence is not None:
        try:
            draw_attention(target, model, tokenizer, example_sentence)
        except Exception as error:
            # a model of another class may not return its attention weights
            if config.model_class is None:
                raise
            logger.warning("No attention of %s is drawn: %s", config.model_class, error)
    write_model_card(target, config, model.num_parameters())
    # the folder has a description now, because the model is complete
    description: Any = describe_average(target)
    return description


def _load_averaged_model(
    folder: Path, config: TrainConfig, num_checkpoints: int | None, minutes: float | None, ema: bool
) -> tuple[PreTrainedModel, list[dict[str, Any]], bool]:
    """Return the averaged model, the states of its checkpoints, and whether it is the EMA."""
    changed_files: dict[Path, str] = {}
    while True:
        checkpoint_folders, is_ema = _checkpoints_to_average(
            folder, config, num_checkpoints, minutes, ema, changed_files
        )
        try:
            changed_file_of = {
                path: changed_file(path, _unused_files(is_ema)) for path in checkpoint_folders
            }
            if not any(changed_file_of.values()):
                model_class = model_class_of(config, folder)
                model = load_whole(model_class, checkpoint_folders[-1]).float().eval()
                if is_ema:
                    weights = read_weights(checkpoint_folders[-1], EMA_FILE)
                    refuse_not_finite(weights, f"the moving average of {checkpoint_folders[-1]}")
                else:
                    weights = average_weights(checkpoint_folders)
                load_weights(model, weights)
                return model, [read_state(path) for path in checkpoint_folders], is_ema
        except (OSError, ValueError):
            # a training run may have removed a checkpoint in the meantime: choose again
            if all(path.is_dir() for path in checkpoint_folders):
                raise
            continue
        changed_files |= {path: name for path, name in changed_file_of.items() if name is not None}


def _unused_files(is_ema: bool) -> list[str]:
    """Return the files of a checkpoint that averaging does not need."""
    return [OPTIMIZER_FILE] if is_ema else [OPTIMIZER_FILE, EMA_FILE]


def _checkpoints_to_average(
    folder: Path,
    config: TrainConfig,
    num_checkpoints: int | None,
    minutes: float | None,
    ema: bool,
    changed_files: Mapping[Path, str],
) -> tuple[list[Path], bool]:
    """Return the checkpoints to average and False, or a single checkpoint and True for its EMA."""
    arguments = {"num_checkpoints": num_checkpoints, "minutes": minutes, "ema": ema or None}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if len(arguments) > 1:
        raise ValueError(
            "only one of num_checkpoints, minutes and ema must be given, got "
            f"{' and '.join(f'{name} {value}' for name, value in arguments.items())}."
        )
    if not arguments:
        ema, minutes = config.ema_decay is not None, config.averaged_minutes
    checkpoints_folder, unused_files = folder / "checkpoints", _unused_files(ema)
    bad_files = {**incomplete_checkpoints(checkpoints_folder, unused_files), **changed_files}
    bad_files_text = "; ".join(
        f"{path.name}, whose {name} is {BAD_FILE}" for path, name in bad_files.items()
    )
    intact_checkpoints = [
        path
        for path in regular_checkpoints(checkpoints_folder, unused_files)
        if path not in bad_files
    ]
    if not intact_checkpoints:
        raise ValueError(
            f"{folder} must have a checkpoint to average, got {bad_files_text or 'none'}."
        )
    if bad_files_text:
        logger.warning("%s: not used.", bad_files_text)
    best_step = None
    if not arguments and config.best_metric is not None:
        best_step = (read_state(intact_checkpoints[-1]).get("best_checkpoint") or {}).get("step")
    if ema:
        ema_checkpoint = [
            path for path in checkpoints(checkpoints_folder, unused_files) if path not in bad_files
        ][-1]
        if best_step is not None:
            (ema_checkpoint,) = checkpoints_around(best_step, 1, intact_checkpoints)
        if not (ema_checkpoint / EMA_FILE).is_file():
            raise ValueError(
                f"{folder} must have a moving average, from training with ema_decay, but "
                f"{ema_checkpoint.name} has none."
            )
        return [ema_checkpoint], True
    if minutes is not None:
        if not minutes > 0:
            raise ValueError(f"minutes must be above 0, got {minutes}.")
        return recent_checkpoints(60 * minutes, intact_checkpoints), False
    if num_checkpoints is not None and not 1 <= num_checkpoints <= len(intact_checkpoints):
        raise ValueError(
            f"num_checkpoints must be from 1 to {len(intact_checkpoints)}, the number of "
            f"checkpoints in {folder} that can be averaged, got {num_checkpoints}."
        )
    if best_step is not None:
        return checkpoints_around(
            best_step, config.num_averaged_checkpoints, intact_checkpoints
        ), False
    last_checkpoints = intact_checkpoints[-(num_checkpoints or config.num_averaged_checkpoints) :]
    if not arguments and config.max_minutes is not None:
        # if `max_minutes` allows few steps, compared with `save_every_steps`, the first of these
        # checkpoints are too early in the run to be averaged
        steps = [read_state(path)["step"] for path in last_checkpoints]
        first_averaged_step = (1 - AVERAGED_SHARE) * steps[-1]
        last_checkpoints = [
            path
            for path, step in zip(last_checkpoints, steps, strict=True)
            if step >= first_averaged_step
        ]
    return last_checkpoints, False


def _save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
    with atomic_folder(folder) as unfinished:
        model.save_pretrained(unfinished, max_shard_size="1TB")
        save_tokenizer(tokenizer, unfinished)
        reloaded = type(model).from_pretrained(unfinished, trust_remote_code=False)
        for (name, tensor), reloaded_tensor in zip(
            model.state_dict().items(), reloaded.state_dict().values(), strict=True
        ):
            if not torch.equal(tensor, reloaded_tensor):
                raise OSError(f"{folder}: {name} differs between disk and memory.")


def _find_example_sentence(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> str | None:
    try:
        splits = load_main_corpus(config)
    except (ValueError, OSError) as error:
        logger.warning("No picture of attention is drawn: %s", error)
        return None
    split = "validation" if "validation" in splits else "train"
    table = next(splits[split].with_format("arrow").iter(200))
    (sentences,) = texts_of(table, [config.source_lang], split, repair=True)
    return next(
        (
            text
            for text in sentences
            if 5 <= len(text.split()) <= 14
            and (max_tokens is None or len(tokenizer(text).input_ids) <= max_tokens)
        ),
        None,
    )
