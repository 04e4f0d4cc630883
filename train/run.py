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
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..atomic_files import DISK_FULL, free_space, make_folder
from ..console import add_file_to_errors
from ..identity_vanilla_transformer import difference_outside_layers
from ..tokenization.learning import refuse_small_vocabulary, tokenizer_hash
from .averaging import MovingAverage
from .config import LOSS, TrainConfig
from .data.batches import Collator, TrainingSteps
from .data.prepare import Data, explaining_recipe, load_texts, make_steps, prepare_data
from .data.streaming import StreamedSteps
from .devices import distribution
from .devices.memory import LAUNCH_TOKENS, max_micro_batch_tokens, refuse_too_large
from .model_class import copy_model_file, make_model, set_search, try_model
from .progress import Progress, open_trackers, refuse_trackers
from .recipe import RECIPE_FILE, config_of, save_config
from .resuming import STEP_SETTINGS, describe_changes, refuse_late_cooldown, refuse_other_run
from .run_folder import checkpoint as checkpointing
from .run_folder.environment import ENVIRONMENT_FILE, write_environment
from .run_folder.files import lock_run_folder, read_recipe
from .run_folder.run_state import RunState
from .schedule import learning_rate_of, make_scheduler
from .scoring import refuse_bleu_tokenizer, score_translations
from .step import REPLICATED, StepResult
from .vocabulary import prepare_tokenizer, refuse_files_of_no_run

logger = logging.getLogger(__name__)

# settings that may differ between the machines of one run
MACHINE_SETTINGS = ("dataset", "mix", "tokenizer", "num_workers", "output_dir", "bleu_tokenizer")
SHARED_FOLDER = ", as in a folder that all machines share"


@dataclass
class Run:
    """Objects and state of a training run.

    Args:
        config: Settings of the run, with `tokens_per_micro_batch` filled in.
        accelerator: Accelerator of this process.
        folder: Run folder.
        data: Training and validation data.
        collator: Collator of micro-batches.
        step_dataset: Dataset that contains the micro-batches of this process for each step.
        model: Model, not wrapped.
        has_own_loss: Whether the model is trained with its own loss.
        wrapped_model: Model that `accelerator` prepared.
        optimizer: Optimizer, not wrapped.
        wrapped_optimizer: Optimizer that `accelerator` prepared.
        learning_rate: Function from a step, counted from 1, to its learning rate.
        scheduler: Scheduler of the optimizer.
        moving_average: Exponential moving average of the weights; None without `ema_decay`.
        state: State to resume from, which the training loop keeps up to date, except for the
            entries that `state_to_save` fills in.
        start_time: Time at which this process began, on the monotonic clock, in seconds.
        unread_results: Number, result and `count_positions` of each step whose result was not read
            yet.
        reduced_end_requests: Sums over all processes after the last step, on the device, [3]: the
            processes with a pending signal, the processes whose time is over, and the steps of a
            due cooldown; None in a single process.
        scores: Validation scores of the last evaluation, by name, and its `step`.
        progress: Progress bar, metrics and trackers; set when the run folder is ready.
    """

    config: TrainConfig
    accelerator: Accelerator
    folder: Path
    data: Data
    collator: Collator
    step_dataset: TrainingSteps | StreamedSteps
    model: PreTrainedModel
    has_own_loss: bool
    wrapped_model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    wrapped_optimizer: AcceleratedOptimizer
    learning_rate: Callable[[int], float]
    scheduler: LRScheduler
    moving_average: MovingAverage | None
    state: RunState
    start_time: float = field(default_factory=time.monotonic)
    unread_results: list[tuple[int, StepResult, dict[str, int]]] = field(default_factory=list)
    reduced_end_requests: Tensor | None = None
    scores: dict[str, float] = field(default_factory=dict)
    progress: Progress = field(init=False)

    def state_to_save(self, step: int) -> RunState:
        """Return the whole state after a step.

        Args:
            step: Number of the step.
        """
        return dataclasses.replace(
            self.state,
            step=step,
            seconds=self.seconds,
            window=self.progress.window,
            data=data_identity(self.data, self.step_dataset),
            num_processes=self.accelerator.num_processes,
            tokens_per_micro_batch=self.config.tokens_per_micro_batch,
        )

    @property
    def steps_done(self) -> int:
        """Number of steps done before this process began."""
        return self.state.step

    @property
    def seconds(self) -> float:
        """Training time in seconds, including the parts of the run before it was resumed."""
        return self.state.seconds + time.monotonic() - self.start_time

    @property
    def is_time_over(self) -> bool:
        """Return whether the run has trained for `max_minutes`."""
        minutes = self.config.max_minutes
        return minutes is not None and self.seconds >= 60 * minutes

    @property
    def last_step(self) -> int:
        """Last step of the run, unless `max_minutes` or `patience` end the run earlier."""
        last_step, cooldown = self.config.max_steps, self.state.cooldown
        return last_step if cooldown is None else min(last_step, cooldown["last_step"])

    def expected_last_step(self, step: int) -> int:
        """Estimate the last step of the run from the mean time of the steps so far.

        Args:
            step: Number of the step that was done last.
        """
        if self.config.max_minutes is None:
            return self.last_step
        steps_in_time = int(60 * self.config.max_minutes * step / self.seconds)
        return max(step, min(self.last_step, steps_in_time))

    def due_cooldown(self, step: int) -> int:
        """Return the length of a cooldown that must begin now to end within `max_minutes`.

        A cooldown has at most `cooldown_steps` steps, and begins in the second half of the time.

        Args:
            step: Number of the step that was done last.

        Returns:
            Number of steps of the cooldown; 0 if no cooldown is due.
        """
        config = self.config
        planned_start = config.max_steps - config.cooldown_steps
        cooldown = self.state.cooldown
        if config.max_minutes is None or cooldown is not None or step >= planned_start:
            return 0
        seconds = self.seconds
        seconds_left = 60 * config.max_minutes - seconds
        steps_left = int(seconds_left * step / seconds)
        if seconds_left > seconds or steps_left > config.cooldown_steps:
            return 0
        return max(0, steps_left)

    @property
    def is_patience_over(self) -> bool:
        """Return whether `patience` checkpoints in a row were no better than the best one."""
        patience, best = self.config.patience, self.state.best_checkpoint
        return patience is not None and best is not None and best["later"] >= patience

    @property
    def was_finished_at_start(self) -> bool:
        """Return whether the run was finished before this process began."""
        minutes = self.config.max_minutes
        is_time_over = minutes is not None and self.state.seconds >= 60 * minutes
        return self.steps_done == self.last_step or is_time_over or self.is_patience_over


def open_run(config: TrainConfig, resume: bool, until_end: contextlib.ExitStack) -> Run:
    """Set up a run, or load it from its last checkpoint.

    Args:
        config: Settings of the run.
        resume: Whether to resume from the last checkpoint; without one, the run begins with step 1.
        until_end: Stack that keeps the run folder locked until the stack is closed.

    Returns:
        The run, ready for its next step.

    Raises:
        ValueError: If a setting is invalid, a corpus or tokenizer cannot be used, or the run folder
            is locked, contains other files, or belongs to a run with other settings or data.
        OSError: If a file cannot be written.
    """
    accelerator = _open_accelerator(config)
    checkpoint, old_config, tokenizer, data = _lock_and_prepare_folder(
        config, resume, accelerator, until_end
    )
    # weights are loaded before `prepare`, which may leave only a part of them in each process
    model, has_own_loss, collator, state = distribution.in_all_processes(
        lambda: _make_or_load_model(config, tokenizer, checkpoint)
    )
    wrapped_model, optimizer, wrapped_optimizer = distribution.prepare(accelerator, model, config)
    wrapped_model.train()
    moving_average = None
    if config.ema_decay is not None:
        moving_average = MovingAverage(model, config.ema_decay)
    user_config = config
    state.settings = dataclasses.asdict(user_config)
    config = _fill_in_micro_batch_size(config, accelerator, model, state)
    step_dataset, saved_states = distribution.in_all_processes(
        lambda: (
            _make_step_dataset(config, accelerator, data, collator, state),
            _read_saved_states(config, model, checkpoint),
        )
    )
    if isinstance(step_dataset, StreamedSteps):
        distribution.refuse_disagreement({"text": step_dataset.text_sha256}, SHARED_FOLDER)
    if checkpoint is not None:
        distribution.load_optimizer_state(
            accelerator, model, optimizer, wrapped_optimizer, saved_states["optimizer"]
        )
        if accelerator.scaler is not None and "scaler" in saved_states:
            accelerator.scaler.load_state_dict(saved_states["scaler"])
        if moving_average is not None:
            moving_average.load(distribution.shard_tensors(model, saved_states["moving_average"]))
    _drop_outdated(state, config, old_config)
    folder = config.folder
    learning_rate = learning_rate_of(config, model.config.d_model, state.cooldown)
    run = Run(
        config=config,
        accelerator=accelerator,
        folder=folder,
        data=data,
        collator=collator,
        step_dataset=step_dataset,
        model=model,
        has_own_loss=has_own_loss,
        wrapped_model=wrapped_model,
        optimizer=optimizer,
        wrapped_optimizer=wrapped_optimizer,
        learning_rate=learning_rate,
        scheduler=make_scheduler(optimizer, learning_rate, steps_done=state.step),
        moving_average=moving_average,
        state=state,
    )
    with naming_intact_checkpoint(folder):
        if accelerator.is_main_process:
            _record_start(run, user_config, old_config, checkpoint)
        open_trackers(accelerator, config, state.step)
        run.progress = Progress(folder, config, state.step, state.window, accelerator)
    return run


def metric_of(config: TrainConfig) -> str:
    """Name the metric that decides which checkpoint is the best.

    Args:
        config: Settings of the run, with a `best_metric`.

    Returns:
        Name of the metric. For BLEU and chrF it includes the number of translated pairs, because
        scores of different samples cannot be compared.
    """
    if config.best_metric == LOSS:
        return LOSS
    return f"{config.best_metric} of {config.validation_sample} pairs"


def _drop_outdated(state: RunState, config: TrainConfig, old_config: TrainConfig | None):
    """Remove the best checkpoint and the cooldown of a saved state if the settings have changed."""
    best, cooldown = state.best_checkpoint, state.cooldown
    if best is not None and old_config is not None:
        is_same_metric = config.best_metric is not None and best["metric"] == metric_of(config)
        if config.best_metric == "bleu":
            is_same_metric &= config.bleu_tokenizer == old_config.bleu_tokenizer
        # scores of different metrics cannot be compared, so another metric begins without a best
        # one
        if not is_same_metric:
            state.best_checkpoint = None
    # with other `max_minutes` the cooldown begins at another step
    if cooldown is not None and cooldown["max_minutes"] != config.max_minutes:
        state.cooldown = None


def _open_accelerator(config: TrainConfig) -> Accelerator:
    """Check the settings as far as possible without data, and join the other processes."""
    refuse_trackers(config.report_to)
    refuse_bleu_tokenizer(config.bleu_tokenizer)
    if config.validation_sample is not None:
        # a tokenizer without its packages would fail at the first evaluation, after many steps
        score_translations(["a"], ["a"], config.bleu_tokenizer)
    accelerator = distribution.open_accelerator(config)
    if not accelerator.is_main_process:
        logging.getLogger("vanilla_transformer").setLevel(logging.ERROR)
        datasets.disable_progress_bars()

    def refuse_impossible_model():
        model_config = config.model_config(config.vocab_size)
        refuse_too_large(config, model_config, accelerator.device, accelerator.num_processes)
        if config.tokenizer is None:
            refuse_small_vocabulary(config.vocab_size)

    # refused now, because preparing the data may take hours
    distribution.in_all_processes(refuse_impossible_model)
    # the run is started on each machine, so the commands may differ
    settings = dataclasses.asdict(config).items()
    distribution.refuse_disagreement(
        {name: value for name, value in settings if name not in MACHINE_SETTINGS}
    )
    return accelerator


def _lock_and_prepare_folder(
    config: TrainConfig, resume: bool, accelerator: Accelerator, until_end: contextlib.ExitStack
) -> tuple[Path | None, TrainConfig | None, PreTrainedTokenizerBase, Data]:
    """Lock the run folder; return the checkpoint, its settings, the tokenizer and the data."""
    folder = config.folder

    def lock():
        # two commands in one folder would overwrite each other's files
        if accelerator.is_main_process:
            until_end.enter_context(lock_run_folder(folder))

    distribution.in_all_processes(lock)
    # the main process creates files in the folder, which the other processes then find
    prepared = distribution.main_process_first(lambda: _prepare_folder(folder, config, resume))
    checkpoint, _, tokenizer, data = prepared
    distribution.refuse_disagreement(
        {
            "checkpoint": checkpoint.name if checkpoint else "none",
            "vocabulary": tokenizer_hash(tokenizer),
            # the hash of a stream is unknown before it is read
            "text": data.facts.get("text_sha256"),
        },
        SHARED_FOLDER,
    )
    return prepared


def _prepare_folder(
    folder: Path, config: TrainConfig, resume: bool
) -> tuple[Path | None, TrainConfig | None, PreTrainedTokenizerBase, Data]:
    """Find the checkpoint to resume, make the run folder and its vocabulary, and read the data."""
    checkpoint, old_config = _checkpoint_to_resume(folder, config, resume), None
    if checkpoint is not None:
        old_config = _settings_so_far(folder, checkpoint)
        refuse_other_run(config, old_config)
        refuse_late_cooldown(config, old_config, checkpointing.read_state(checkpoint)["step"])
    make_folder(folder)
    new_paths = [path for path in (folder / "tokenizer", folder / RECIPE_FILE) if not path.exists()]
    explanation: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if old_config is not None and (config.dataset, config.mix) == (
        old_config.dataset,
        old_config.mix,
    ):
        remedy = "the path from here with --dataset or --mix"
        explanation = explaining_recipe(config, folder / RECIPE_FILE, remedy)
    try:
        with explanation:
            texts = load_texts(config)
        tokenizer = prepare_tokenizer(config, texts, old_config)
        return checkpoint, old_config, tokenizer, prepare_data(config, texts, tokenizer)
    except ValueError:
        # if the user corrects the corpus, the vocabulary that was just made no longer fits
        for path in filter(Path.exists, new_paths):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _checkpoint_to_resume(folder: Path, config: TrainConfig, resume: bool) -> Path | None:
    newest, damaged_checkpoints = checkpointing.newest_intact(folder / "checkpoints")
    damage_reports = [
        f"{path.name}, whose {file} is {checkpointing.BAD_FILE}"
        for path, file in damaged_checkpoints
    ]
    if newest is None:
        if damage_reports:
            raise ValueError(
                f"{folder / 'checkpoints'} must have an intact checkpoint, got "
                f"{'; '.join(damage_reports)}."
            )
        if resume:
            logger.warning("There is no checkpoint in %s: the run begins with step 1.", folder)
        refuse_files_of_no_run(folder, config)
        return None
    if not resume:
        raise ValueError(
            f"output_dir must be new, or --resume must be given, got {folder} with {newest.name}."
        )
    if damage_reports:
        logger.warning(
            "%s: not used. The run resumes from %s.", "; ".join(damage_reports), newest.name
        )
    step = checkpointing.read_state(newest)["step"]
    if config.max_steps < step:
        raise ValueError(
            f"max_steps must be at least {step}, the steps that {folder} has done, got "
            f"{config.max_steps}."
        )
    return newest


def _read_run_state(checkpoint: Path) -> RunState:
    entries = checkpointing.read_state(checkpoint)
    return RunState.from_json(entries, checkpoint / checkpointing.STATE_FILE)


def _settings_so_far(folder: Path, checkpoint: Path) -> TrainConfig:
    """Return the settings that a checkpoint was made with; the user may have edited the recipe."""
    settings = _read_run_state(checkpoint).settings
    # a checkpoint of an earlier version
    if settings is None:
        return read_recipe(folder)
    with add_file_to_errors(checkpoint / checkpointing.STATE_FILE):
        return config_of(settings)


def _make_or_load_model(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, checkpoint: Path | None
) -> tuple[PreTrainedModel, bool, Collator, RunState]:
    """Return the model, whether it has its own loss, the collator and the state of the run."""
    model, has_own_loss, collator = _make_model_and_collator(config, tokenizer)
    if checkpoint is None:
        return model, has_own_loss, collator, RunState()
    checkpointing.load_weights(model, checkpointing.read_weights(checkpoint))
    return model, has_own_loss, collator, _read_run_state(checkpoint)


def _make_step_dataset(
    config: TrainConfig,
    accelerator: Accelerator,
    data: Data,
    collator: Collator,
    state: RunState,
) -> TrainingSteps | StreamedSteps:
    """Return the steps of this process; refuse other data than that of a resumed run."""
    step_dataset = make_steps(
        config,
        data,
        collator,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        position=state.stream_position,
        launch_tokens=LAUNCH_TOKENS if accelerator.device.type == "cuda" else 0,
    )
    if state.data is not None:
        _refuse_changed_data(data_identity(data, step_dataset), state.data)
    return step_dataset


def _read_saved_states(
    config: TrainConfig, model: PreTrainedModel, checkpoint: Path | None
) -> dict[str, Any]:
    """Read the state of optimizer, gradient scaler and moving average; none without checkpoint."""
    if checkpoint is None:
        return {}
    saved_states = checkpointing.read_optimizer_of(checkpoint, model)
    if config.ema_decay is not None:
        saved_states["moving_average"] = checkpointing.read_moving_average(checkpoint, model)
    return saved_states


def _record_start(
    run: Run, user_config: TrainConfig, old_config: TrainConfig | None, checkpoint: Path | None
):
    """Write environment, recipe and model file of a run that begins or resumes.

    `user_config` contains the settings of the user, without a computed `tokens_per_micro_batch`.
    """
    changes = "" if old_config is None else describe_changes(user_config, old_config)
    first_step = run.steps_done + 1
    facts = {
        "layout": run.accelerator.distributed_type.value,
        "processes": run.accelerator.num_processes,
        "device": run.accelerator.device,
        "tokens_per_micro_batch": run.config.tokens_per_micro_batch,
        "attention": run.model.config._attn_implementation,
        "first_step": first_step,
        "tokenizer_sha256": tokenizer_hash(run.data.tokenizer),
        **run.data.facts,
        **run.step_dataset.fingerprint(),
    }
    # a finished run makes no further step, so changed settings have no effect
    if changes and not run.was_finished_at_start:
        facts["changed"] = changes
        logger.warning("From step %d on: %s.", first_step, changes)
    if checkpoint is None:
        # an earlier start that saved no checkpoint has no effect, and may have had other text
        (run.folder / ENVIRONMENT_FILE).unlink(missing_ok=True)
    write_environment(run.folder, facts)
    # the recipe of a finished run keeps the settings with which its steps were made
    if old_config is not None and run.was_finished_at_start:
        user_config = dataclasses.replace(
            user_config, **{name: getattr(old_config, name) for name in STEP_SETTINGS}
        )
    # the recipe is written after the environment. A checkpoint of an earlier version has no
    # settings: if the process is killed in between, the next start still finds the old recipe, and
    # records the changes
    save_config(user_config, run.folder / RECIPE_FILE)
    copy_model_file(user_config, run.folder)
    if checkpoint is not None and run.was_finished_at_start:
        checkpointing.make_regular(checkpoint)
    counts = {"parameters": run.model.num_parameters()}
    if not run.config.streaming:
        counts |= run.step_dataset.fingerprint()
    logger.info(
        "%s", ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())
    )
    if checkpoint is not None and not run.was_finished_at_start:
        logger.info("The run resumes after step %s.", f"{run.steps_done:,}")


def data_identity(data: Data, steps: TrainingSteps | StreamedSteps) -> dict[str, Any]:
    """Return facts about data and tokenizer that must be unchanged when the run is resumed.

    Args:
        data: Data of the run.
        steps: Steps of the run.

    Returns:
        Hashes, counts and special tokens, by name.
    """
    tokenizer = data.tokenizer
    return {
        **steps.fingerprint(),
        "text_sha256": data.facts.get("text_sha256"),
        "validation_sha256": data.facts["validation_sha256"],
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        # special tokens are in the tokenizer's configuration, which the hash does not cover
        **{name: getattr(tokenizer, name) for name in ("pad_token", "bos_token", "eos_token")},
    }


def _refuse_changed_data(new_identity: dict[str, Any], old_identity: dict[str, Any]):
    differences = [
        f"{name} was {fact}, got {new_identity.get(name)}"
        for name, fact in old_identity.items()
        if new_identity.get(name) != fact
    ]
    if differences:
        raise ValueError(f"a run must be resumed with its own data: {'; '.join(differences)}.")


def _make_model_and_collator(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, bool, Collator]:
    start_id = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    model_config = config.model_config(
        len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=start_id,
    )
    # with the same seed, every process makes the same initial weights
    set_seed(config.seed)
    model = make_model(config, model_config)
    set_search(model, config)
    has_own_loss = config.model_class is not None and try_model(model)
    if has_own_loss:
        name = type(model).__name__
        if config.label_smoothing:
            raise ValueError(
                f"label_smoothing must be 0 for {name}, which has its own loss, got "
                f"{config.label_smoothing:g}: set --label_smoothing 0."
            )
        logger.info("The training loss is that of %s.", name)
    return model, has_own_loss, Collator(tokenizer.pad_token_id, start_id, len(tokenizer))


def _fill_in_micro_batch_size(
    config: TrainConfig,
    accelerator: Accelerator,
    model: PreTrainedModel,
    state: RunState,
) -> TrainConfig:
    """Return the settings with the size of a micro-batch, the same on every process."""
    if config.tokens_per_micro_batch is not None:
        return config
    # the size of micro-batches changes the rounding of sums, so a resumed run keeps the size
    saved_size = state.tokens_per_micro_batch
    if saved_size is not None and state.num_processes == accelerator.num_processes:
        return dataclasses.replace(config, tokens_per_micro_batch=saved_size)
    fitting_tokens = distribution.in_all_processes(
        lambda: max_micro_batch_tokens(
            config,
            model.config,
            model.num_parameters(),
            accelerator.device,
            accelerator.num_processes,
            # other layouts and edited models keep all logits in memory
            accelerator.distributed_type in REPLICATED and difference_outside_layers(model) is None,
        )
    )
    fitting_tokens = accelerator.gather(
        torch.full((1,), fitting_tokens, device=accelerator.device)
    ).min()
    return dataclasses.replace(config, tokens_per_micro_batch=int(fitting_tokens))


@contextlib.contextmanager
def naming_intact_checkpoint(folder: Path) -> Iterator[None]:
    """Add the name of the checkpoint to resume from to the error of a full disk.

    Args:
        folder: Run folder.

    Raises:
        OSError: If the disk is full; names the last checkpoint.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise OSError(
            f"{folder} cannot be written ({free_space(folder)}), "
            f"{describe_intact_checkpoint(folder)}: {error}"
        ) from error


def describe_intact_checkpoint(folder: Path) -> str:
    """Return a clause for an error message, which names the last checkpoint of a run.

    Args:
        folder: Run folder.

    Returns:
        Clause without a period.
    """
    saved_checkpoints = checkpointing.checkpoints(folder / "checkpoints")
    return (
        f"{saved_checkpoints[-1].name} is intact"
        if saved_checkpoints
        else "there is no checkpoint yet"
    )
