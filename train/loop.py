"""Training loop, from parallel text to an averaged model. Sections 5 and 6.1."""

import contextlib
import logging
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.contrib.logging import logging_redirect_tqdm

from ..console import Interrupted
from ..identity_vanilla_transformer import difference_outside_layers
from .averaging import average_locked_run
from .config import LOSS, TrainConfig
from .data.batches import StepData, TrainingSteps, evaluation_batches
from .data.pairs import format_counts
from .data.streaming import StreamedSteps
from .devices import distribution
from .devices.cpu_kernels import CPU_ATTENTION
from .ending import (
    StopRequests,
    ending_if_stalled,
    ignore_signals,
    naming_a_dead_worker,
    noticing_requests,
    print_after_launcher,
)
from .progress import count_positions, perplexity
from .run import (
    Run,
    describe_intact_checkpoint,
    metric_of,
    naming_intact_checkpoint,
    open_run,
)
from .run_folder import checkpoint as checkpointing
from .run_folder.run_state import STREAM_POSITIONS
from .schedule import learning_rate_of, make_scheduler
from .step import StepResult, mask_for_sdpa, training_step
from .validation import score_sample, validation_loss

logger = logging.getLogger(__name__)
PACKAGE_LOGGER = logging.getLogger("vanilla_transformer")


def train(config: TrainConfig, resume: bool = False) -> bool:
    """Train a model and fill its run folder: tokenizer, checkpoints, averaged model, model card.

    Call it in a single process, or in each of the processes that `accelerate launch` starts.

    Args:
        config: Settings of the run.
        resume: Whether to resume from the last checkpoint; without one, the run begins with step 1.

    Returns:
        True if the run is finished; False if a signal stopped the run, which can then be resumed.

    Raises:
        Interrupted: If a signal comes before the first step or after the last step.
        ValueError: If a setting is invalid, a corpus or tokenizer cannot be used, or the run folder
            is locked, contains other files, or belongs to a run with other settings or data.
        FloatingPointError: If loss or gradient is infinite or NaN in `max_skipped_steps` steps in a
            row, or a weight to be saved is infinite or NaN.
        MemoryError: If a step does not fit into memory.
        OSError: If a file of the run cannot be written, or a DataLoader worker dies.
    """
    return train_until_signal(config, resume) is None


def train_until_signal(config: TrainConfig, resume: bool = False) -> int | None:
    """Train like `train`, with the same arguments and errors, and return the signal.

    Returns:
        Number of the signal, or None if the run is finished.
    """
    # only the main process prints
    is_main = os.environ.get("RANK", "0") == "0"
    with noticing_requests(is_main) as requests:
        try:
            with contextlib.ExitStack() as until_end:
                run = open_run(config, resume, until_end)
                with naming_a_dead_worker(config.num_workers):
                    return _train_and_average(run, requests)
        except Interrupted as error:
            if is_main:
                saved_checkpoints = checkpointing.checkpoints(config.folder / "checkpoints")
                saved_clause = (
                    f"{saved_checkpoints[-1].name} is saved"
                    if saved_checkpoints
                    else "no step is saved yet"
                )
                _report_signal(error.number, saved_clause)
            raise
        except RuntimeError as error:
            # torch's signal handler raises this error, so it can come out of any call of the main
            # thread, and only its text identifies it
            if "DataLoader worker" not in str(error):
                raise
            # the line of the progress bar is still open, so the error needs a new line
            sys.stderr.write("\n")
            intact_clause, reason = describe_intact_checkpoint(config.folder), str(error).strip()
            raise OSError(
                f"a process that prepares batches died, {intact_clause}: resume with --resume, and "
                "with fewer num_workers if the process ran out of memory "
                f"({reason.splitlines()[0].strip()})"
            ) from error


def _report_signal(number: int, saved_clause: str):
    text = f"{signal.Signals(number).name}: {saved_clause}. To resume, add --resume to the command."
    logger.warning("%s", text)
    print_after_launcher(text)


def _train_and_average(run: Run, requests: StopRequests) -> int | None:
    stop = _run_steps(run, requests)
    if stop is not None:
        step, number = stop
        # log the signal here, because the progress bar is still open in `_run_steps`
        if run.accelerator.is_main_process:
            _report_signal(number, f"step {step} is saved")
        end_run(run)
        return number
    if run.accelerator.is_main_process:
        average_description = average_locked_run(run.folder, trust_remote_code=True)
        logger.info("%s, is in %s", average_description, run.folder)
    run.accelerator.wait_for_everyone()
    end_run(run)
    return None


def _run_steps(run: Run, requests: StopRequests) -> tuple[int, int] | None:
    """Train to the end of the run; after a signal, return the last step and the signal's number."""
    config, is_single_process = run.config, run.accelerator.num_processes == 1
    if run.was_finished_at_start:
        run.progress.bar.close()
        _log_how_to_continue(run)
        if run.state.is_save_postponed:
            _warn_of_skipped_end(run, run.steps_done)
        return None
    with (
        run.progress.bar,
        logging_redirect_tqdm([PACKAGE_LOGGER]),
        naming_intact_checkpoint(run.folder),
        requests.deferred(),
        ending_if_stalled(config.stall_minutes),
    ):
        for step, batches in enumerate(batches_of(run), start=run.steps_done + 1):
            result = make_step(run, step, batches)
            is_stop_requested, is_time_over, cooldown_steps = _reasons_to_end(run, requests, step)
            if is_time_over:
                _refuse_short_time(run, step)
            is_last = step == run.last_step or is_time_over
            if cooldown_steps and run.state.cooldown is None and not is_last:
                _begin_cooldown(run, step, cooldown_steps)
            if step % config.log_every_steps == 0 or is_last:
                _log_step(run, step, result)
                run.progress.bar.total = run.expected_last_step(step)
            if step % config.eval_every_steps == 0 or is_last:
                evaluate_step(run, step)
            # a single process also stops at a signal that came during logging or evaluation;
            # several processes first have to agree, in `_reasons_to_end`
            is_stop_requested = is_stop_requested or (
                is_single_process and requests.pending() is not None
            )
            is_stopped = is_stop_requested and not is_last
            if _save_if_due(run, step, is_last, is_stopped):
                return None
            if is_stopped:
                return step, requests.signal_number or signal.SIGTERM
    return None


def _save_if_due(run: Run, step: int, is_last: bool, is_stopped: bool) -> bool:
    """Save a checkpoint if one is due or the run is stopped; return whether the run is finished."""
    is_save_step = step % run.config.save_every_steps == 0 or is_last
    is_save_due = run.state.is_save_postponed or is_save_step
    if not (is_save_due or is_stopped):
        return False
    _read_results(run)
    # if the last steps were skipped, the weights may be bad already, and saving them would remove a
    # good checkpoint. So the save waits for a step that is not skipped
    run.state.is_save_postponed = is_save_due and run.state.skipped_in_a_row > 0
    is_regular_save = is_save_due and not run.state.is_save_postponed
    if is_regular_save and run.config.best_metric is not None:
        _compare_with_best(run, step, run.config.best_metric)
    if is_regular_save or is_stopped:
        save_step(run, step, is_stop=not is_regular_save)
    is_finished = is_last or (is_regular_save and run.is_patience_over)
    if is_finished:
        _log_reason_of_end(run, step)
        if run.state.is_save_postponed:
            _warn_of_skipped_end(run, step)
    return is_finished


def _reasons_to_end(run: Run, requests: StopRequests, step: int) -> tuple[bool, bool, int]:
    """Return whether a signal asks for the end, whether the time is over, and `due_cooldown`.

    With several processes, the values are those of the previous step: to read the reduced values
    of this step, the host would have to wait for the device.
    """
    # clocks differ, so only the main process decides on a cooldown; the others add 0 to the sum
    cooldown_steps = run.due_cooldown(step) if run.accelerator.is_main_process else 0
    reasons = requests.pending() is not None, run.is_time_over, cooldown_steps
    if run.accelerator.num_processes == 1:
        return reasons
    previous_requests = run.reduced_end_requests
    own_requests = torch.tensor(reasons, dtype=torch.int, device=run.accelerator.device)
    run.reduced_end_requests = run.accelerator.reduce(own_requests, reduction="sum")
    num_signals, num_over, cooldown_steps = (
        [0, 0, 0] if previous_requests is None else previous_requests.tolist()
    )
    return num_signals > 0, num_over > 0, cooldown_steps


def _begin_cooldown(run: Run, step: int, cooldown_steps: int):
    """Begin a cooldown, in which the learning rate decays linearly from the next step on."""
    run.state.cooldown = {
        "steps": cooldown_steps,
        "last_step": step + cooldown_steps,
        "max_minutes": run.config.max_minutes,
    }
    run.learning_rate = learning_rate_of(run.config, run.model.config.d_model, run.state.cooldown)
    run.scheduler = make_scheduler(run.optimizer, run.learning_rate, steps_done=step)
    run.progress.write(step=step, cooldown_steps=cooldown_steps)
    logger.info(
        "The cooldown begins after step %d and takes %d steps, or fewer if max_minutes ends the "
        "run.",
        step,
        cooldown_steps,
    )
    if step < run.config.warmup_steps:
        logger.warning(
            "The warm-up of %d steps is longer than max_minutes allows: the learning rate does not "
            "reach its peak. `vanilla-transformer new` with --max_minutes writes a recipe "
            "for this time.",
            run.config.warmup_steps,
        )


def _refuse_short_time(run: Run, step: int):
    # several processes exchange the end of the time one step late, so step 2 is refused too
    if step > min(run.accelerator.num_processes, 2):
        return

    def refuse():
        raise ValueError(
            f"max_minutes must be longer than a step, which took {run.seconds / step:.1f} seconds, "
            f"got {run.config.max_minutes:g}."
        )

    distribution.in_all_processes(refuse)


def _compare_with_best(run: Run, step: int, metric: str):
    """Compare the validation score of a step with the best one; evaluate first if necessary."""
    if run.scores.get("step") != step:
        evaluate_step(run, step)
    score, best = run.scores[metric], run.state.best_checkpoint
    if best is not None:
        best = {**best, "later": best["later"] + 1}
    sign = -1 if metric == LOSS else 1
    # the loss of a model that diverges may be infinite or NaN, and must not count as the best
    if math.isfinite(score) and (best is None or sign * score > sign * best["score"]):
        best = {
            "metric": metric_of(run.config),
            "step": step,
            "score": score,
            "later": 0,
        }
    run.state.best_checkpoint = best


def _log_how_to_continue(run: Run):
    """Log which setting must be raised to continue a finished run."""
    if not run.accelerator.is_main_process:
        return
    config = run.config
    if run.is_patience_over:
        reason = f"a larger patience than {config.patience}"
    elif run.steps_done < config.max_steps:
        reason = f"a larger max_minutes than {config.max_minutes:g}"
    else:
        reason = f"a larger max_steps than {config.max_steps:,}"
        if config.max_minutes is not None:
            reason += f", and a larger max_minutes than {config.max_minutes:g} if this time is over"
    logger.info("The run has ended with step %d: to continue it, give %s.", run.steps_done, reason)


def _log_reason_of_end(run: Run, step: int):
    if step == run.config.max_steps or not run.accelerator.is_main_process:
        return
    best = run.state.best_checkpoint
    if best is not None and run.is_patience_over:
        logger.info(
            "The run ends with step %d: %d checkpoints in a row are no better than that of step "
            "%d.",
            step,
            best["later"],
            best["step"],
        )
    elif step == run.last_step:
        logger.info("The run ends with step %d, the last one of its cooldown.", step)
    else:
        minutes = run.config.max_minutes
        logger.info("The run ends with step %d: its %g minutes are over.", step, minutes)


def _warn_of_skipped_end(run: Run, step: int):
    """Warn that the last step was skipped and is not saved; raise if no other step is saved."""
    saved_checkpoints = checkpointing.checkpoints(run.folder / "checkpoints")
    if not saved_checkpoints:
        distribution.in_all_processes(lambda: _refuse_to_skip_more(run, step))
    logger.warning(
        "Step %d was skipped and is not saved: the model is averaged from checkpoints up to %s.",
        step,
        saved_checkpoints[-1].name,
    )


def batches_of(run: Run) -> Iterator[list[dict[str, Tensor]]]:
    # without this variable, each forked worker would warn that its tokenizer uses no threads
    if run.config.num_workers:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loader = DataLoader(
        _StepsOrErrors(run.step_dataset),
        batch_size=None,
        sampler=range(run.steps_done, run.config.max_steps),
        num_workers=run.config.num_workers,
        worker_init_fn=ignore_signals,
        pin_memory=run.accelerator.device.type == "cuda",
        # without its own generator, DataLoader draws a seed from the one that dropout uses
        generator=torch.Generator(),
    )
    for step, step_data in enumerate(loader, start=run.steps_done + 1):
        if isinstance(step_data, Exception):
            raise step_data
        run.state.stream_position = step_data.position
        if step_data.position is not None and step_data.position["first_step"] == step - 1:
            _log_block(run, step_data.position, step)
        yield step_data.batches


class _StepsOrErrors(torch.utils.data.Dataset):
    """Dataset of steps that returns errors: DataLoader adds a worker's traceback to raised ones."""

    def __init__(self, steps: TrainingSteps | StreamedSteps):
        self.steps = steps

    def __getitem__(self, steps_done: int) -> StepData | ValueError | OSError:
        try:
            return self.steps[steps_done]
        except (ValueError, OSError) as error:
            # some errors of libraries cannot be pickled, so a worker returns a built-in error
            error_class = ValueError if isinstance(error, ValueError) else OSError
            return error_class(str(error))


def _log_block(run: Run, position: dict[str, Any], step: int):
    earlier_counts, block_counts = Counter(position["counts"]), position["block_counts"]
    counts_so_far = {name: earlier_counts[name] + block_counts[name] for name in block_counts}
    facts = {f"pairs_{name}": count for name, count in counts_so_far.items()}
    run.progress.write(step=step, block=position["block"], **facts)
    logger.info("pairs read so far: %s", format_counts(counts_so_far))


def make_step(run: Run, step: int, batches: list[dict[str, Tensor]]) -> StepResult:
    """Train one step; its result stays on the device.

    Args:
        run: Run that makes the step.
        step: Number of the step, from 1.
        batches: Micro-batches of this process.

    Returns:
        Result of the step, which is also appended to `run.unread_results`.

    Raises:
        MemoryError: If the step does not fit into memory.
    """
    # dropout is seeded by the step, so checkpoints need not store the state of the generator
    seeds = np.random.SeedSequence([run.config.seed, step, run.accelerator.process_index])
    torch.manual_seed(int(seeds.generate_state(1)[0]))
    position_counts = count_positions(batches)
    # an edited model may read the mask itself, so only the released code gets a mask for SDPA
    is_sdpa = run.model.config._attn_implementation in ("sdpa", CPU_ATTENTION)
    if is_sdpa and difference_outside_layers(run.model) is None:
        batches = [mask_for_sdpa(batch, keeps_mask=run.config.compile) for batch in batches]
    try:
        result = training_step(
            run.accelerator,
            run.wrapped_model,
            run.wrapped_optimizer,
            run.scheduler,
            batches,
            label_smoothing=run.config.label_smoothing,
            max_grad_norm=run.config.max_grad_norm,
            has_own_loss=run.has_own_loss,
        )
        if run.moving_average is not None:
            run.moving_average.update(step, result.is_skipped)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        raise MemoryError(
            f"out of memory in step {step}: resume with --resume and tokens_per_micro_batch below "
            f"{run.config.tokens_per_micro_batch}."
        ) from error
    run.progress.bar.update()
    run.unread_results.append((step, result, position_counts))
    return result


def _read_results(run: Run):
    # reading a result makes the host wait for the device, so results are read only when metrics or
    # checkpoints are written
    for step, result, position_counts in run.unread_results:
        if not result.is_skipped:
            run.state.skipped_in_a_row = 0
            run.progress.count(result, position_counts)
            continue
        run.state.num_skipped += 1
        run.state.skipped_in_a_row += 1
        logger.warning("Step %d is skipped: the loss or a gradient is not finite.", step)
        if run.state.skipped_in_a_row >= run.config.max_skipped_steps:
            # every process has the same loss, so all processes raise the error
            distribution.in_all_processes(partial(_refuse_to_skip_more, run, step))
    run.unread_results.clear()


def _refuse_to_skip_more(run: Run, step: int) -> NoReturn:
    raise FloatingPointError(
        f"loss and gradient must be finite, but {run.state.skipped_in_a_row} steps in a row up to "
        f"step {step} were not: try a lower learning_rate_factor, more warmup_steps, "
        "max_grad_norm 1.0, or precision bf16 or fp32, and resume with --resume."
    )


def _log_step(run: Run, step: int, result: StepResult):
    _read_results(run)
    run.progress.log(
        step=step,
        # a stream has no known length, so its number of passes stands for the epoch
        epoch=round(step / run.step_dataset.steps_per_epoch, 4)  # type: ignore[union-attr]
        if run.state.stream_position is None
        else run.state.stream_position[STREAM_POSITIONS][0]["pass"],
        # computed, because the scheduler already has the learning rate of the next step
        learning_rate=run.learning_rate(step),
        grad_norm=float(result.grad_norm),
        skipped=run.state.num_skipped,
    )


def evaluate_step(run: Run, step: int):
    """Evaluate the model on the validation split, if there is one, and log the scores.

    All processes must call this.

    Args:
        run: Run; its `scores` are replaced.
        step: Number of the step.
    """
    validation = run.data.validation
    if validation is None:
        return
    # the model that is evaluated must be the one that is saved
    distribution.broadcast_buffers(run.model)
    loss = validation_loss(
        run.accelerator,
        run.model,
        evaluation_batches(
            validation,
            run.collator,
            run.step_dataset.plan.tokens_per_micro_batch,
            run.accelerator.num_processes,
            run.accelerator.process_index,
        ),
    )
    scores = {LOSS: loss, "perplexity": perplexity(loss)}
    if run.config.validation_sample is not None:
        scores |= score_sample(run, validation, run.config.validation_sample)
    run.scores = {"step": step, **scores}
    run.progress.log_scores(step, scores)
    numbers = ", ".join(f"{name} {score:.4g}" for name, score in scores.items())
    logger.info("step %d: validation %s", step, numbers)


def _refuse_not_finite(step: int, *weight_groups: Mapping[str, Tensor] | None):
    for weights in filter(None, weight_groups):
        checkpointing.refuse_not_finite(weights, f"the weights after step {step}")


def save_step(run: Run, step: int, is_stop: bool = False):
    """Save a checkpoint. All processes must call this.

    Args:
        run: Run to save.
        step: Number of the step.
        is_stop: Whether the checkpoint is a stop checkpoint, which exists only to resume from.

    Raises:
        FloatingPointError: If a weight is not finite; names the weight.
        OSError: If the checkpoint cannot be written.
    """
    averaged_minutes = run.config.averaged_minutes
    # with FSDP2 or DeepSpeed a process has only parts of the tensors, so all processes gather them
    weights = distribution.gather_weights(run.model)
    optimizer_state = distribution.gather_optimizer_state(run.accelerator, run.model, run.optimizer)
    moving_average = None
    if run.moving_average is not None:
        moving_average = distribution.gather_tensors(run.moving_average.averages)
    distribution.in_all_processes(lambda: _refuse_not_finite(step, weights, moving_average))
    if run.accelerator.is_main_process:
        run.progress.to_disk()
        best = run.state.best_checkpoint
        checkpointing.save_checkpoint(
            run.folder / "checkpoints",
            run.state_to_save(step).to_json(),
            model=run.model,
            weights=weights,
            optimizer_state=optimizer_state,
            keep=run.config.num_averaged_checkpoints,
            keep_seconds=60 * averaged_minutes if averaged_minutes is not None else None,
            best_step=best["step"] if best is not None else None,
            moving_average=moving_average,
            scaler=run.accelerator.scaler,
            is_stop=is_stop,
        )
    run.accelerator.wait_for_everyone()


def end_run(run: Run):
    """Free the model, and leave the process group.

    Args:
        run: Run, which cannot be used afterwards.
    """
    # the model is freed before the process group: otherwise its destructor would hold Python's GIL
    # while it waits for threads that need the GIL, a deadlock
    del run.wrapped_model
    run.accelerator.free_memory()
    run.accelerator.end_training()
