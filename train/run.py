"""Set up a training run: data, model, optimizer and the state to resume from."""

import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..atomic_files import DISK_FULL, free_space, make_folder
from ..identity_vanilla_transformer import stacks_difference
from ..records import check
from ..tokenization.learning import refuse_small_vocabulary, tokenizer_hash
from .averaging import MovingAverage
from .config import TrainConfig
from .data.batches import Collator, TrainingSteps
from .data.prepare import Data, load_texts, make_steps, prepare_data
from .data.streaming import StreamedSteps
from .devices import distribution
from .devices.memory import refuse_too_large, tokens_that_fit
from .model_class import keep_file, make_model, set_search, try_model
from .progress import Progress, open_trackers, refuse_trackers
from .recipe import RECIPE_FILE, save_config
from .resuming import changes_of_steps, refuse_late_cooldown, refuse_other_run
from .run_folder import checkpoint as checkpointing
from .run_folder.environment import write_environment
from .run_folder.files import hold_run, read_recipe
from .schedule import follow_rate, rate_of
from .scoring import refuse_bleu_tokenizer
from .step import REPLICATED, StepResult
from .vocabulary import prepare_tokenizer, refuse_files_of_no_run

logger = logging.getLogger(__name__)

# settings that each machine may have its own of
OF_A_MACHINE = ("dataset", "mix", "tokenizer", "num_workers", "output_dir", "bleu_tokenizer")
SHARED_FOLDER = ", as in a folder that all machines share"


@dataclass
class Run:
    """What a run works with.

    Args:
        config: Its settings.
        accelerator: Knows the processes, the device and the precision.
        folder: Where it leaves everything.
        data: What it trains on and validates with.
        collator: Makes a micro-batch.
        steps: What this process sees at each step.
        model: The model as it is saved.
        wrapped_model: The model as it is trained.
        optimizer: The optimizer as it is saved.
        wrapped_optimizer: The optimizer as it is used.
        rate: Of each step.
        scheduler: Gives it to the optimizer.
        moving_average: Of the weights, if the run is to have one.
        progress: What is reported.
        steps_done: Steps before this process began.
        position: Where in a stream the block of the last step began.
        skipped: Steps that changed no weight, so far.
        skipped_in_a_row: Those of them that came last.
        is_late: Whether a checkpoint is due that waits for a step which is not skipped.
        seconds_before: Training time before this process began.
        started: When it began.
        unread: Steps whose results are still on the device, with what `count_cells` found.
        asked_to_end: How many processes had been asked to end by the last step, on the device.
    """

    config: TrainConfig
    accelerator: Accelerator
    folder: Path
    data: Data
    collator: Collator
    steps: TrainingSteps | StreamedSteps
    model: PreTrainedModel
    wrapped_model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    wrapped_optimizer: torch.optim.Optimizer
    rate: Callable[[int], float]
    scheduler: LRScheduler
    moving_average: MovingAverage | None
    progress: Progress
    steps_done: int
    position: dict[str, Any] | None
    skipped: int
    skipped_in_a_row: int
    is_late: bool
    seconds_before: float
    started: float
    unread: list[tuple[int, StepResult, dict[str, int]]] = field(default_factory=list)
    asked_to_end: Tensor | None = None


def open_run(config: TrainConfig, resume: bool, until_end: contextlib.ExitStack) -> Run:
    refuse_trackers(config.report_to)
    refuse_bleu_tokenizer(config.bleu_tokenizer)
    accelerator = distribution.open_accelerator(config)
    if not accelerator.is_main_process:
        logging.getLogger("vanilla_transformer").setLevel(logging.ERROR)
        datasets.disable_progress_bars()
    # a model that cannot be is refused before the data is prepared for it
    model_config = config.model_config(config.vocab_size)
    refuse_too_large(config, model_config, accelerator.device, accelerator.num_processes)
    if config.tokenizer is None:
        refuse_small_vocabulary(config.vocab_size)
    folder = Path(config.output_dir)
    # a machine may have been given another command
    settings = dataclasses.asdict(config).items()
    distribution.refuse_disagreement(
        {name: it for name, it in settings if name not in OF_A_MACHINE}
    )
    # two commands in one folder would take each other's files
    distribution.together(lambda: _hold(folder, accelerator, until_end))
    # the main process decides first: the others would see what it makes
    prepared = distribution.main_process_first(lambda: _prepare(folder, config, resume))
    checkpoint, changes, tokenizer, data = prepared
    distribution.refuse_disagreement(
        {
            "checkpoint": checkpoint.name if checkpoint else "none",
            "vocabulary": tokenizer_hash(tokenizer),
            # of a stream nothing is known before it is read
            "text": data.facts.get("text_sha256"),
        },
        SHARED_FOLDER,
    )

    # before every process is left with a part of its weights
    model, collator, state = distribution.together(lambda: _begin(config, tokenizer, checkpoint))
    wrapped_model, optimizer, wrapped_optimizer = distribution.prepare(accelerator, model, config)
    wrapped_model.train()
    moving_average = None
    if config.ema_decay is not None:
        moving_average = MovingAverage(model, config.ema_decay)
    saved = config
    config = _with_micro_batch(config, accelerator, model, state)
    processes = (accelerator.num_processes, accelerator.process_index)
    steps, before = distribution.together(
        lambda: _go_on(config, model, data, collator, processes, checkpoint, state)
    )
    if isinstance(steps, StreamedSteps):
        distribution.refuse_disagreement({"text": steps.text_sha256}, SHARED_FOLDER)
    if checkpoint is not None:
        distribution.load_optimizer_state(
            accelerator, model, optimizer, wrapped_optimizer, before["optimizer"]
        )
        if accelerator.scaler is not None and "scaler" in before:
            accelerator.scaler.load_state_dict(before["scaler"])
        if moving_average is not None:
            moving_average.load(distribution.own_parts(model, before["moving_average"]))
    rate = rate_of(config, model.config.d_model)
    with saying_what_is_left(folder):
        if accelerator.is_main_process:
            facts = {
                "layout": accelerator.distributed_type.value,
                "processes": accelerator.num_processes,
                "device": accelerator.device,
                "tokens_per_micro_batch": config.tokens_per_micro_batch,
                "attention": model.config._attn_implementation,
                "first_step": state["step"] + 1,
                "tokenizer_sha256": tokenizer_hash(tokenizer),
                **data.facts,
                **steps.fingerprint(),
            }
            if changes:
                facts["changed"] = changes
                logger.warning("From step %d on: %s.", state["step"] + 1, changes)
            write_environment(folder, facts)
            # after the note of what it changes: a start that is killed in between notes it again
            save_config(saved, folder / RECIPE_FILE)
            keep_file(saved, folder)
            if checkpoint is not None and state["step"] == config.max_steps:
                checkpointing.make_regular(checkpoint)
            logger.info("%s parameters, %s", f"{model.num_parameters():,}", steps.fingerprint())
        open_trackers(accelerator, config, state["step"])
        progress = Progress(folder, config, state["step"], state["window"], accelerator)
    return Run(
        config=config,
        accelerator=accelerator,
        folder=folder,
        data=data,
        collator=collator,
        steps=steps,
        model=model,
        wrapped_model=wrapped_model,
        optimizer=optimizer,
        wrapped_optimizer=wrapped_optimizer,
        rate=rate,
        scheduler=follow_rate(optimizer, rate, steps_done=state["step"]),
        moving_average=moving_average,
        progress=progress,
        steps_done=state["step"],
        position=state.get("position"),
        skipped=state["skipped"],
        skipped_in_a_row=state["skipped_in_a_row"],
        # an earlier version noted neither
        is_late=state.get("is_late", False),
        seconds_before=state.get("seconds", 0.0),
        started=time.monotonic(),
    )


def _hold(folder: Path, accelerator: Accelerator, until_end: contextlib.ExitStack):
    if accelerator.is_main_process:
        until_end.enter_context(hold_run(folder))


def _prepare(
    folder: Path, config: TrainConfig, resume: bool
) -> tuple[Path | None, str, PreTrainedTokenizerBase, Data]:
    checkpoint, changes = _last_checkpoint(folder, config, resume), ""
    if checkpoint is not None:
        before = read_recipe(folder)
        refuse_other_run(config, before)
        refuse_late_cooldown(config, before, checkpointing.read_state(checkpoint)["step"])
        changes = changes_of_steps(config, before)
    make_folder(folder)
    made_here = [path for path in (folder / "tokenizer", folder / RECIPE_FILE) if not path.exists()]
    try:
        texts = load_texts(config)
        tokenizer = prepare_tokenizer(config, texts, is_resumed=checkpoint is not None)
        return checkpoint, changes, tokenizer, prepare_data(config, texts, tokenizer)
    except ValueError:
        # the text may be mended in its place, and then has another vocabulary
        for path in filter(Path.exists, made_here):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _last_checkpoint(folder: Path, config: TrainConfig, resume: bool) -> Path | None:
    newest, passed_over = checkpointing.newest_intact(folder / "checkpoints")
    said = [f"{path.name}, whose {file} is {checkpointing.BAD_FILE}" for path, file in passed_over]
    if newest is None:
        if said:
            raise ValueError(
                f"{folder / 'checkpoints'} must have a whole checkpoint, got {'; '.join(said)}."
            )
        if resume:
            logger.warning("There is no checkpoint in %s: the run begins with step 1.", folder)
        refuse_files_of_no_run(folder, config)
        return None
    if not resume:
        raise ValueError(
            f"output_dir must be new, or --resume be given, got {folder} with {newest.name}."
        )
    if said:
        logger.warning("%s: passed over. The run resumes from %s.", "; ".join(said), newest.name)
    step = checkpointing.read_state(newest)["step"]
    if config.max_steps < step:
        raise ValueError(
            f"max_steps must be at least {step}, the steps that {folder} has done, got "
            f"{config.max_steps}."
        )
    return newest


def _begin(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, checkpoint: Path | None
) -> tuple[PreTrainedModel, Collator, dict[str, Any]]:
    """The model, what makes its batches, and the state, as they were left or at the beginning."""
    model, collator = _make_model(config, tokenizer)
    if checkpoint is None:
        state = {"step": 0, "skipped": 0, "skipped_in_a_row": 0, "window": None}
        return model, collator, state
    checkpointing.load_weights(model, checkpointing.read_weights(checkpoint))
    state = checkpointing.read_state(checkpoint)
    check(state, checkpointing.RUN_STATE, checkpoint / checkpointing.STATE_FILE)
    return model, collator, state


def _go_on(
    config: TrainConfig,
    model: PreTrainedModel,
    data: Data,
    collator: Collator,
    processes: tuple[int, int],
    checkpoint: Path | None,
    state: dict[str, Any],
) -> tuple[TrainingSteps | StreamedSteps, dict[str, Any]]:
    """Return the steps, and the saved state of optimizer, loss scale and moving average."""
    steps = make_steps(config, data, collator, *processes, state.get("position"))
    if checkpoint is None:
        return steps, {}
    _refuse_other_pairs(data_identity(data, steps), state["data"])
    before = checkpointing.read_optimizer_of(checkpoint, model)
    if config.ema_decay is not None:
        before["moving_average"] = checkpointing.read_moving_average(checkpoint, model)
    return steps, before


def data_identity(data: Data, steps: TrainingSteps | StreamedSteps) -> dict[str, Any]:
    return {
        **steps.fingerprint(),
        "text_sha256": data.facts.get("text_sha256"),
        "validation_sha256": data.facts["validation_sha256"],
        "tokenizer_sha256": tokenizer_hash(data.tokenizer),
    }


def _refuse_other_pairs(now: dict[str, Any], before: dict[str, Any]):
    # an earlier version noted no tokenizer
    differences = [
        f"{name} was {fact}, got {now.get(name)}"
        for name, fact in before.items()
        if now.get(name) != fact
    ]
    if differences:
        raise ValueError(f"a run must be resumed with its own data: {'; '.join(differences)}.")


def _make_model(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, Collator]:
    start = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    model_config = config.model_config(
        len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=start,
    )
    # the same weights on every process
    set_seed(config.seed)
    model = make_model(config, model_config)
    set_search(model, config)
    if config.model_class is not None:
        try_model(model)
    return model, Collator(tokenizer.pad_token_id, start, len(tokenizer))


def _with_micro_batch(
    config: TrainConfig,
    accelerator: Accelerator,
    model: PreTrainedModel,
    state: dict[str, Any],
) -> TrainConfig:
    """Fill in how large a micro-batch is, the same on every process."""
    if config.tokens_per_micro_batch is not None:
        return config
    # how a step is cut decides the last bit of its sums: a run goes on as it began
    before = state.get("tokens_per_micro_batch")
    if before is not None and state["num_processes"] == accelerator.num_processes:
        return dataclasses.replace(config, tokens_per_micro_batch=before)
    fitting = distribution.together(
        lambda: tokens_that_fit(
            config,
            model.config,
            model.num_parameters(),
            accelerator.device,
            accelerator.num_processes,
            # an edited model keeps the scores of all tokens
            accelerator.distributed_type in REPLICATED and stacks_difference(model) is None,
        )
    )
    fitting = accelerator.gather(torch.full((1,), fitting, device=accelerator.device)).min()
    return dataclasses.replace(config, tokens_per_micro_batch=int(fitting))


@contextlib.contextmanager
def saying_what_is_left(folder: Path) -> Iterator[None]:
    """Where the disk is full between checkpoints, name the one to resume from."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        free = free_space(folder)
        raise OSError(
            f"{folder} cannot be written with {free}, {intact_checkpoint(folder)}: {error}"
        ) from error


def intact_checkpoint(folder: Path) -> str:
    last = checkpointing.checkpoints(folder / "checkpoints")
    return f"{last[-1].name} is intact" if last else "there is no checkpoint yet"
