"""A run from parallel text to an averaged model. Sections 5 and 6.1."""

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..atomic_files import DISK_FULL, free_space, make_folder, whole_folder, write_whole
from ..console import Interrupted
from ..identity_vanilla_transformer import stacks_difference
from ..records import check, read_text
from ..tokenization.learning import learn_vocabulary, refuse_small_vocabulary
from . import checkpoint as checkpointing
from . import layout
from .averaging import MovingAverage, average_held_run
from .batches import Collator, StepData, TrainingSteps, evaluation_batches
from .config import (
    TrainConfig,
    changes_of_steps,
    recipe_text,
    refuse_late_cooldown,
    refuse_other_run,
    refuse_other_vocabulary,
    save_config,
)
from .data import Data, Texts, load_texts, make_steps, prepare_data, vocabulary_texts
from .ending import (
    Requests,
    ending_with_the_stalled,
    leave_signals_to_the_run,
    naming_a_dead_worker,
    noticing_requests,
    say_last,
)
from .evaluate import validation_loss
from .fused import FLOAT32_ATTENTION
from .memory import refuse_too_large, tokens_that_fit
from .model_class import keep_file, make_model, set_search, try_model
from .pairs import say_counts
from .progress import Progress, count_cells, open_trackers, refuse_trackers
from .run_folder import (
    ENVIRONMENT_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    hold_run,
    load_tokenizer,
    perplexity,
    read_recipe,
    refuse_other_files,
    save_tokenizer,
    tokenizer_hash,
    write_environment,
)
from .schedule import follow_rate, rate_of
from .scoring import refuse_bleu_tokenizer
from .step import REPLICATED, StepResult, mask_for_sdpa, training_step
from .streaming import StreamedSteps

# settings that each machine may have its own of
OF_A_MACHINE = ("dataset", "mix", "tokenizer", "num_workers", "output_dir", "bleu_tokenizer")
# of a tokenizer that was brought along: sentences to try it on, and the largest share of unknown
# tokens
SAMPLED_SENTENCES, MOST_UNKNOWN = 1000, 0.5
# beside a vocabulary, what it was learned from
TEXT_FILE = "text_sha256.txt"
SHARED_FOLDER = ", as in a folder that all machines share"

logger = logging.getLogger(__name__)
PACKAGE_LOGGER = logging.getLogger("vanilla_transformer")


def prepare_tokenizer(
    config: TrainConfig, texts: Texts | None = None, is_resumed: bool = False
) -> PreTrainedTokenizerBase:
    """Take the tokenizer that was asked for or learned before, or learn it; the run keeps a copy.

    Args:
        config: Settings of the run.
        texts: What to learn from; loaded if not given.
        is_resumed: Whether the run goes on, so that its settings are compared elsewhere.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If it cannot be loaded, lacks a token that training needs, was learned with
            other settings, or is not the one that the run folder keeps; or if a file that no run
            has left there would be replaced.
    """
    folder = Path(config.output_dir)
    own = folder / "tokenizer"
    if not is_resumed and not own.is_dir():
        _refuse_files_of_no_run(folder, config)
    kept = read_recipe(folder) if own.is_dir() and (folder / RECIPE_FILE).is_file() else None
    # the run's copy serves, even where what was brought along is gone
    if config.tokenizer is not None and (kept is None or kept.tokenizer != config.tokenizer):
        tokenizer = load_tokenizer(config.tokenizer)
        texts = texts or load_texts(config)
        _refuse_unknown_text(tokenizer, config, texts)
        if own.is_dir() and tokenizer_hash(load_tokenizer(str(own))) != tokenizer_hash(tokenizer):
            raise ValueError(
                f"output_dir must be new, or its vocabulary be that of tokenizer "
                f"{config.tokenizer!r}, got another in {own}."
            )
    elif own.is_dir():
        if kept is not None and config.tokenizer is None and not is_resumed:
            refuse_other_vocabulary(config, kept)
            _refuse_vocabulary_of_other_text(config, texts or load_texts(config), own)
        tokenizer = load_tokenizer(str(own))
    else:
        texts = texts or load_texts(config)
        tokenizer = _learn_tokenizer(config, texts)
    if not own.is_dir():
        with whole_folder(own) as unfinished:
            save_tokenizer(tokenizer, unfinished)
            if config.tokenizer is None and not config.streaming:
                write_whole(unfinished / TEXT_FILE, ", ".join(texts.hashes) + "\n")
            # whoever finds the vocabulary finds what it was made with
            save_config(config, folder / RECIPE_FILE)
    return tokenizer


def _refuse_unknown_text(tokenizer: PreTrainedTokenizerBase, config: TrainConfig, texts: Texts):
    """Refuse a tokenizer that does not know most of the text of a language."""
    if tokenizer.unk_token_id is None:
        return
    for language in (config.source_lang, config.target_lang):
        sample = list(islice(vocabulary_texts(texts, [language], config.seed), SAMPLED_SENTENCES))
        # the last token of a sentence is its end
        tokens = [token for ids in tokenizer(sample).input_ids for token in ids[:-1]]
        num_unknown = tokens.count(tokenizer.unk_token_id)
        if num_unknown > MOST_UNKNOWN * len(tokens):
            raise ValueError(
                f"tokenizer {config.tokenizer!r} must know the text in {language!r}, but "
                f"{num_unknown:,} of the {len(tokens):,} tokens of {len(sample):,} sentences are "
                f"{tokenizer.unk_token!r}."
            )


def _refuse_vocabulary_of_other_text(config: TrainConfig, texts: Texts, own: Path):
    noted = own / TEXT_FILE
    # an earlier version noted none, and of a stream nothing is known before it is read
    if config.streaming or not noted.is_file():
        return
    before, now = read_text(noted).strip(), ", ".join(texts.hashes)
    if now != before:
        raise ValueError(
            f"output_dir must be new, or its vocabulary have been learned from the same text: the "
            f"SHA-256 of its text was {before}, got {now}. Without {own} it is learned anew."
        )


def _learn_tokenizer(config: TrainConfig, texts: Texts) -> PreTrainedTokenizerBase:
    languages = [config.source_lang, config.target_lang]
    symbols = set()
    if config.symbol_lang is not None:
        languages.remove(config.symbol_lang)
        for text in vocabulary_texts(texts, [config.symbol_lang], config.seed):
            symbols.update(text.split())
    return learn_vocabulary(
        vocabulary_texts(texts, languages, config.seed),
        config.vocab_size,
        symbols=sorted(symbols),
        seed=config.seed,
    )


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


def train(config: TrainConfig, resume: bool = False) -> bool:
    """Train a model and leave its run folder: tokenizer, checkpoints, averaged model, model card.

    Works as one process, or as one of many that `accelerate launch` started.

    Args:
        config: Settings of the run.
        resume: Go on from the last checkpoint, if there is one.

    Returns:
        Whether the run is finished; if not, it was asked to end and can be resumed.

    Raises:
        ValueError: If a setting, the data or the folder does not fit.
        FloatingPointError: If the loss stays infinite or not a number.
        OSError: If a checkpoint cannot be written.
    """
    return train_until_asked(config, resume) is None


def train_until_asked(config: TrainConfig, resume: bool = False) -> int | None:
    """Train as `train` does, and say which signal asked the run to end.

    Args:
        config: As in `train`.
        resume: As in `train`.

    Returns:
        Number of the signal; None if the run is finished.

    Raises:
        Interrupted: If the signal came before the first step, or after the last.
        ValueError: As in `train`.
        FloatingPointError: As in `train`.
        OSError: As in `train`.
    """
    # it is said once for all processes
    is_main = os.environ.get("RANK", "0") == "0"
    with noticing_requests(is_main) as requests:
        try:
            with contextlib.ExitStack() as until_end:
                run = _open_run(config, resume, until_end)
                with naming_a_dead_worker(config.num_workers):
                    return _train(run, requests)
        except Interrupted as error:
            if is_main:
                last = checkpointing.checkpoints(Path(config.output_dir) / "checkpoints")
                saved = f"{last[-1].name} is saved" if last else "no step is saved yet"
                _say_end(error.number, saved)
            raise
        except RuntimeError as error:
            # torch says so in whatever this process does at that moment
            if "DataLoader worker" not in str(error):
                raise
            # even in the middle of the bar's last line
            sys.stderr.write("\n")
            raise OSError(
                f"a process that prepares batches died, {_intact(Path(config.output_dir))}: resume "
                "with --resume, and with fewer num_workers if memory was full "
                f"({str(error).strip().splitlines()[0].strip()})"
            ) from error


def _say_end(number: int, saved: str):
    text = f"{signal.Signals(number).name}: {saved}. Resume with --resume."
    logger.warning("%s", text)
    say_last(text)


def _train(run: Run, requests: Requests) -> int | None:
    stopped = _make_steps(run, requests)
    if stopped is not None:
        step, number = stopped
        # the bar is closed now, and would come after it
        if run.accelerator.is_main_process:
            _say_end(number, f"step {step} is saved")
        _end(run)
        return number
    if run.is_late:
        _say_that_the_end_was_skipped(run)
    if run.accelerator.is_main_process:
        average = average_held_run(run.folder, trust_remote_code=True)
        logger.info("%s, is in %s", average, run.folder)
    run.accelerator.wait_for_everyone()
    _end(run)
    return None


def _make_steps(run: Run, requests: Requests) -> tuple[int, int] | None:
    """Train to the last step; or return the step after which a signal ended it, and the signal."""
    config = run.config
    with (
        run.progress.bar,
        logging_redirect_tqdm([PACKAGE_LOGGER]),
        _saying_what_is_left(run.folder),
        requests.deferred(),
        ending_with_the_stalled(config.stall_minutes),
    ):
        for step, batches in enumerate(_batches(run), start=run.steps_done + 1):
            result = _step(run, step, batches)
            is_last = step == config.max_steps
            if step % config.log_every_steps == 0 or is_last:
                _log(run, step, result)
            if (step % config.eval_every_steps == 0 or is_last) and run.data.validation is not None:
                _evaluate(run, step)
            number = requests.pending()
            is_stopped = _is_asked_to_end(run, number is not None) and not is_last
            is_due = run.is_late or step % config.save_every_steps == 0 or is_last
            if is_due or is_stopped:
                _read_results(run)
                # where steps are skipped, the weights may be spoilt already: no good checkpoint
                # makes room for them
                run.is_late = is_due and run.skipped_in_a_row > 0
                if is_stopped or not run.is_late:
                    _save(run, step, is_stop=run.is_late or not is_due)
            if is_stopped:
                return step, number or signal.SIGTERM
    return None


def _say_that_the_end_was_skipped(run: Run):
    """Warn that the last step was skipped and is not saved; refuse where no other step is."""
    last = checkpointing.checkpoints(run.folder / "checkpoints")
    if not last:
        layout.together(lambda: _refuse_to_skip_more(run, run.config.max_steps))
    logger.warning(
        "step %d was skipped and is not saved: the model is made of checkpoints until %s.",
        run.config.max_steps,
        last[-1].name,
    )


def _open_run(config: TrainConfig, resume: bool, until_end: contextlib.ExitStack) -> Run:
    refuse_trackers(config.report_to)
    refuse_bleu_tokenizer(config.bleu_tokenizer)
    accelerator = layout.open_accelerator(config)
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
    layout.refuse_disagreement({name: it for name, it in settings if name not in OF_A_MACHINE})
    # two commands in one folder would take each other's files
    layout.together(lambda: _hold(folder, accelerator, until_end))
    # the main process decides first: the others would see what it makes
    prepared = layout.main_process_first(lambda: _prepare(folder, config, resume))
    checkpoint, changes, tokenizer, data = prepared
    layout.refuse_disagreement(
        {
            "checkpoint": checkpoint.name if checkpoint else "none",
            "vocabulary": tokenizer_hash(tokenizer),
            # of a stream nothing is known before it is read
            "text": data.facts.get("text_sha256"),
        },
        SHARED_FOLDER,
    )

    # before every process is left with a part of its weights
    model, collator, state = layout.together(lambda: _begin(config, tokenizer, checkpoint))
    wrapped_model, optimizer, wrapped_optimizer = layout.prepare(accelerator, model, config)
    wrapped_model.train()
    moving_average = None
    if config.ema_decay is not None:
        moving_average = MovingAverage(model, config.ema_decay)
    saved = config
    config = _with_micro_batch(config, accelerator, model, state)
    processes = (accelerator.num_processes, accelerator.process_index)
    steps, before = layout.together(
        lambda: _go_on(config, model, data, collator, processes, checkpoint, state)
    )
    if isinstance(steps, StreamedSteps):
        layout.refuse_disagreement({"text": steps.text_sha256}, SHARED_FOLDER)
    if checkpoint is not None:
        layout.load_optimizer_state(
            accelerator, model, optimizer, wrapped_optimizer, before["optimizer"]
        )
        if accelerator.scaler is not None and "scaler" in before:
            accelerator.scaler.load_state_dict(before["scaler"])
        if moving_average is not None:
            moving_average.load(layout.own_parts(model, before["moving_average"]))
    rate = rate_of(config, model.config.d_model)
    with _saying_what_is_left(folder):
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
        _refuse_files_of_no_run(folder, config)
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


def _refuse_files_of_no_run(folder: Path, config: TrainConfig):
    rule = "output_dir must be new, or that of an unfinished run"
    refuse_other_files(folder, rule)
    recipe = folder / RECIPE_FILE
    if not ((folder / "tokenizer").is_dir() and recipe.is_file()):
        # nothing of a run is there yet but, if it was killed as it began, its recipe
        is_own = recipe.is_file() and recipe.read_bytes() == recipe_text(config).encode()
        refuse_other_files(
            folder, rule, [METRICS_FILE, ENVIRONMENT_FILE, *([] if is_own else [RECIPE_FILE])]
        )


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
    _refuse_other_pairs(_identity(data, steps), state["data"])
    before = checkpointing.read_optimizer_of(checkpoint, model)
    if config.ema_decay is not None:
        before["moving_average"] = checkpointing.read_moving_average(checkpoint, model)
    return steps, before


def _identity(data: Data, steps: TrainingSteps | StreamedSteps) -> dict[str, Any]:
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
    fitting = layout.together(
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


def _batches(run: Run) -> Iterator[list[dict[str, Tensor]]]:
    # a forked worker would warn that its tokenizer cannot use threads
    if run.config.num_workers:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loader = DataLoader(
        _Answers(run.steps),
        batch_size=None,
        sampler=range(run.steps_done, run.config.max_steps),
        num_workers=run.config.num_workers,
        worker_init_fn=leave_signals_to_the_run,
        pin_memory=run.accelerator.device.type == "cuda",
        # without one of its own it draws from the generator of dropout
        generator=torch.Generator(),
    )
    for step, item in enumerate(loader, start=run.steps_done + 1):
        if isinstance(item, Exception):
            raise item
        run.position = item.position
        if item.position is not None and item.position["first_step"] == step - 1:
            _log_block(run, step)
        yield item.batches


class _Answers(torch.utils.data.Dataset):
    """Steps, or why there is none; what a worker raises comes out with its trace as the text."""

    def __init__(self, steps: TrainingSteps | StreamedSteps):
        self.steps = steps

    def __getitem__(self, steps_done: int) -> StepData | ValueError | OSError:
        try:
            return self.steps[steps_done]
        except (ValueError, OSError) as error:
            # an error of a library may not survive the way between processes
            kind = ValueError if isinstance(error, ValueError) else OSError
            return kind(str(error))


def _log_block(run: Run, step: int):
    before, own = (Counter(run.position[name]) for name in ("counts", "block_counts"))
    counts = {name: before[name] + own[name] for name in own}
    facts = {f"pairs_{name}": count for name, count in counts.items()}
    run.progress.write(step=step, block=run.position["block"], **facts)
    logger.info("pairs read so far: %s", say_counts(counts))


def _step(run: Run, step: int, batches: list[dict[str, Tensor]]) -> StepResult:
    # dropout is a function of the step, so that no generator need be saved
    seeds = np.random.SeedSequence([run.config.seed, step, run.accelerator.process_index])
    torch.manual_seed(int(seeds.generate_state(1)[0]))
    cells = count_cells(batches)
    # an edited model may read the mask itself
    is_sdpa = run.model.config._attn_implementation in ("sdpa", FLOAT32_ATTENTION)
    if is_sdpa and stacks_difference(run.model) is None:
        batches = [mask_for_sdpa(batch) for batch in batches]
    try:
        result = training_step(
            run.accelerator,
            run.wrapped_model,
            run.wrapped_optimizer,
            run.scheduler,
            batches,
            run.config.label_smoothing,
            run.config.max_grad_norm,
        )
        if run.moving_average is not None:
            run.moving_average.update(step, result.is_skipped)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        raise MemoryError(
            f"memory must hold a micro-batch, and was full in step {step}: go on with --resume and "
            f"tokens_per_micro_batch below {run.config.tokens_per_micro_batch}."
        ) from error
    run.progress.bar.update()
    run.unread.append((step, result, cells))
    return result


def _read_results(run: Run):
    # the device is waited for here, and no more often than something is written down
    for step, result, cells in run.unread:
        if not result.is_skipped:
            run.skipped_in_a_row = 0
            run.progress.count(result, cells)
            continue
        run.skipped += 1
        run.skipped_in_a_row += 1
        logger.warning("step %d skipped: loss or gradient is not finite", step)
        if run.skipped_in_a_row >= run.config.max_skipped_steps:
            # every process has the same loss, and so the same to say
            layout.together(lambda step=step: _refuse_to_skip_more(run, step))
    run.unread.clear()


def _refuse_to_skip_more(run: Run, step: int) -> NoReturn:
    raise FloatingPointError(
        f"loss or gradient must be finite, got {run.skipped_in_a_row} steps in a row, the "
        f"last one step {step}, where they were not: try a lower learning_rate_factor, "
        "more warmup_steps, max_grad_norm 1.0, or precision bf16 or fp32, and go on with "
        "--resume."
    )


def _log(run: Run, step: int, result: StepResult):
    _read_results(run)
    run.progress.log(
        step=step,
        # a stream does not know how long it is
        epoch=round(step / run.steps.steps_per_epoch, 4)
        if run.position is None
        else run.position["places"][0]["pass"],
        # the scheduler already has the rate of the next step
        learning_rate=run.rate(step),
        grad_norm=float(result.grad_norm),
        skipped=run.skipped,
    )


def _evaluate(run: Run, step: int):
    loss = validation_loss(
        run.accelerator,
        run.model,
        evaluation_batches(
            run.data.validation,
            run.collator,
            run.config.tokens_per_micro_batch,
            run.accelerator.num_processes,
            run.accelerator.process_index,
        ),
    )
    run.progress.write(step=step, validation_loss=loss, validation_perplexity=perplexity(loss))
    logger.info("step %d: validation loss %.4f, perplexity %.2f", step, loss, perplexity(loss))


def _refuse_not_finite(step: int, *groups: Mapping[str, Tensor] | None):
    for weights in filter(None, groups):
        checkpointing.refuse_not_finite(weights, f"the weights after step {step}")


def _save(run: Run, step: int, is_stop: bool = False):
    minutes = run.config.averaged_minutes
    # every process may have a part of each
    weights = layout.whole_weights(run.model)
    optimizer_state = layout.whole_optimizer_state(run.accelerator, run.model, run.optimizer)
    moving_average = None
    if run.moving_average is not None:
        moving_average = layout.whole_tensors(run.moving_average.tensors())
    layout.together(lambda: _refuse_not_finite(step, weights, moving_average))
    if run.accelerator.is_main_process:
        run.progress.to_disk()
        checkpointing.save_checkpoint(
            run.folder / "checkpoints",
            step,
            run.model,
            weights,
            optimizer_state,
            {
                "skipped": run.skipped,
                "skipped_in_a_row": run.skipped_in_a_row,
                "is_late": run.is_late,
                "window": run.progress.window,
                "data": _identity(run.data, run.steps),
                "position": run.position,
                "num_processes": run.accelerator.num_processes,
                "tokens_per_micro_batch": run.config.tokens_per_micro_batch,
                "seconds": run.seconds_before + time.monotonic() - run.started,
            },
            keep=run.config.num_averaged_checkpoints,
            keep_seconds=60 * minutes if minutes is not None else None,
            moving_average=moving_average,
            scaler=run.accelerator.scaler,
            is_stop=is_stop,
        )
    run.accelerator.wait_for_everyone()


def _end(run: Run):
    # freed after the group of processes, what sums gradients over them would hold Python's lock
    # while it waits for threads that need it
    del run.wrapped_model
    run.accelerator.free_memory()
    run.accelerator.end_training()


@contextlib.contextmanager
def _saying_what_is_left(folder: Path) -> Iterator[None]:
    """Where the disk is full between checkpoints, name the one to resume from."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        free = free_space(folder)
        raise OSError(
            f"{folder} cannot be written with {free}, {_intact(folder)}: {error}"
        ) from error


def _intact(folder: Path) -> str:
    last = checkpointing.checkpoints(folder / "checkpoints")
    return f"{last[-1].name} is intact" if last else "there is no checkpoint yet"


def _is_asked_to_end(run: Run, is_asked_here: bool) -> bool:
    if run.accelerator.num_processes == 1:
        return is_asked_here
    # what all processes said one step ago: to read what they say now would wait for the device
    before = run.asked_to_end
    here = torch.full((), int(is_asked_here), device=run.accelerator.device)
    run.asked_to_end = run.accelerator.reduce(here, reduction="sum")
    return before is not None and bool(before)
