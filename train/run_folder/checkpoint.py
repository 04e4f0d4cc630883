"""Write, find, verify and read the checkpoints of a run. A checkpoint is written atomically."""

import bisect
import hashlib
import json
import logging
import math
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...atomic_files import (
    finish,
    free_space,
    is_disk_full,
    make_folder,
    remove,
    to_disk,
    unfinished_path,
    write_atomically,
)
from ...records import NUMBER, TEXT, TRUTH, mapping, read_json, whole_number
from ...weight_checks import UNREADABLE, check_stored

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.pt"
WEIGHTS_FILE = "model.safetensors"
EMA_FILE = "ema.safetensors"
# name of the entry of the state that contains the SHA-256 of all other entries
STATE_HASH = "state_sha256"
BAD_FILE = "missing, truncated or changed"
# entries of Adam's state for each weight, except the step count
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
# entries of the state of torch's gradient scaler
SCALER_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
DAMAGE_ADVICE = "remove this checkpoint's folder to resume from the checkpoint before it"

logger = logging.getLogger(__name__)
# regular expression for the names of files inside the checkpoint folder. It allows no path, so that
# a changed state cannot name a file elsewhere
FILE_NAME_PATTERN = r"(?!\.{1,2}$)[^/\\\0]+"
STATE_SCHEMA = mapping(
    {
        "step": whole_number(0),
        "is_stop": TRUTH,
        "seconds": NUMBER,
        "sizes": mapping(other_items=whole_number(0), other_names=FILE_NAME_PATTERN),
        "sha256": mapping(other_items=TEXT, other_names=FILE_NAME_PATTERN),
        STATE_HASH: TEXT,
    }
)


def save_checkpoint(
    folder: Path,
    state: Mapping[str, Any],
    *,
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Any],
    keep: int,
    keep_seconds: float | None = None,
    best_step: int | None = None,
    moving_average: Mapping[str, Tensor] | None = None,
    scaler: Any = None,
    is_stop: bool = False,
) -> Path:
    """Write the checkpoint `step-N`, and remove old checkpoints.

    The checkpoint is written under a temporary name, flushed to disk and then renamed, so that a
    folder with the name of a checkpoint is always complete. A stop checkpoint exists only to resume
    from: it does not displace a regular checkpoint, and the next save removes it.

    Args:
        folder: Folder of all checkpoints.
        state: Entries of the state, by name, with the number of steps done in `step` and the
            training time in `seconds`.
        model: Model, not wrapped, which writes its configuration; its own weights may be sharded.
        weights: Whole weights and persistent buffers of the model, by name.
        optimizer_state: Whole `state_dict` of the optimizer.
        keep: Number of newest regular checkpoints to keep.
        keep_seconds: Length of the last part of the training, in seconds, whose regular checkpoints
            are kept instead of the newest `keep`.
        best_step: Step of the best checkpoint; `keep` regular checkpoints around it are kept too.
        moving_average: Moving average of the weights, if the run has one.
        scaler: Gradient scaler, with precision fp16.
        is_stop: Whether this is a stop checkpoint: a signal stops the run between two regular
            checkpoints.

    Returns:
        Folder of this checkpoint.

    Raises:
        OSError: If the checkpoint cannot be written, on a full disk for example. The checkpoint
            before it stays intact.
    """
    checkpoint = folder / f"step-{state['step']}"
    unfinished = unfinished_path(checkpoint)
    try:
        make_folder(folder)
        # half written and half removed checkpoints that a killed process left
        for path in folder.glob(".step-*.unfinished"):
            remove(path)
        unfinished.mkdir()
        optimizer_content = {"optimizer": optimizer_state}
        if scaler is not None:
            optimizer_content["scaler"] = scaler.state_dict()
        sha256 = _write_files(unfinished, model, weights, moving_average, optimizer_content)
        sizes = {name: (unfinished / name).stat().st_size for name in sha256}
        write_state(unfinished, {**state, "is_stop": is_stop, "sizes": sizes, "sha256": sha256})
        if checkpoint.exists():
            _remove_checkpoint(checkpoint)
        unfinished.rename(checkpoint)
        to_disk(folder)
    except Exception as error:
        free_text = free_space(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
        # safetensors has an error of its own for a failed write
        if not (isinstance(error, OSError | SafetensorError) or is_disk_full(error)):
            raise
        earlier_checkpoints = checkpoints(folder)
        intact_text = (
            f"{earlier_checkpoints[-1]} is intact"
            if earlier_checkpoints
            else "there is no checkpoint before it"
        )
        raise OSError(
            f"checkpoint {checkpoint} cannot be written ({free_text}), {intact_text}: "
            f"{' '.join(str(error).split())}"
        ) from error
    complete_checkpoints = checkpoints(folder)
    regular_paths = [path for path in complete_checkpoints if not _is_stop_checkpoint(path)]
    kept_paths = (
        regular_paths[-keep:]
        if keep_seconds is None
        else recent_checkpoints(keep_seconds, regular_paths)
    )
    if best_step is not None:
        kept_paths += checkpoints_around(best_step, keep, regular_paths)
    for path in complete_checkpoints:
        if path != checkpoint and path not in kept_paths:
            _remove_checkpoint(path)
    return checkpoint


def _write_files(
    folder: Path,
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    moving_average: Mapping[str, Tensor] | None,
    optimizer_content: Mapping[str, Any],
) -> dict[str, str]:
    """Write the files of a checkpoint except its state; return their SHA-256 by name."""
    hash_futures: dict[Path, Future[str]] = {}
    sync_futures: list[Future[None]] = []
    with ThreadPoolExecutor() as threads:

        def hash_and_sync():
            # hash and flush the new files in other threads, while the next file is written
            for path in sorted(set(folder.iterdir()) - set(hash_futures)):
                hash_futures[path] = threads.submit(sha256_of, path)
                sync_futures.append(threads.submit(finish, path))

        model.save_pretrained(folder, state_dict=dict(weights), max_shard_size="1TB")
        hash_and_sync()
        if moving_average is not None:
            save_file(dict(moving_average), folder / EMA_FILE, metadata={"format": "pt"})
            hash_and_sync()
        torch.save(optimizer_content, folder / OPTIMIZER_FILE)
        hash_and_sync()
    for sync_future in sync_futures:
        sync_future.result()
    return {path.name: hash_future.result() for path, hash_future in hash_futures.items()}


def sha256_of(path: Path) -> str:
    """Hash a file.

    Args:
        path: Path of the file.

    Returns:
        SHA-256 of its content, in hexadecimal.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_state(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a checkpoint, with a hash of its own content.

    Args:
        checkpoint: Folder of the checkpoint.
        state: Entries of the state, by name.
    """
    state = {name: entry for name, entry in state.items() if name != STATE_HASH}
    text = json.dumps({**state, STATE_HASH: _hash_state(state)}, indent=1)
    write_atomically(checkpoint / STATE_FILE, text)


def _hash_state(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _remove_checkpoint(path: Path):
    # rename before the removal, so that a half-removed folder never has the name of a checkpoint
    renamed_path = unfinished_path(path)
    try:
        path.rename(renamed_path)
        shutil.rmtree(renamed_path)
    except OSError as error:
        logger.warning("%s cannot be removed, and stays: %s", path, error)


def checkpoints(folder: Path, ignored_files: Collection[str] = ()) -> list[Path]:
    """List the complete checkpoints of a folder, without those with a missing or truncated file.

    Args:
        folder: Folder of all checkpoints.
        ignored_files: Names of files that may be missing or truncated.

    Returns:
        Folders of the checkpoints, oldest first.
    """
    return [
        path
        for path in _list_named_checkpoints(folder)
        if _find_damaged_file(path, ignored_files) is None
    ]


def newest_intact(folder: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Find the newest intact checkpoint: all its files are as they were saved.

    Args:
        folder: Folder of all checkpoints.

    Returns:
        Folder of the checkpoint, or None; and the newer, damaged checkpoints, newest first, each
        with the name of its first file that is missing, truncated or changed.
    """
    damaged_checkpoints: list[tuple[Path, str]] = []
    for path in reversed(_list_named_checkpoints(folder)):
        damaged_file = _find_damaged_file(path, ()) or changed_file(path)
        if damaged_file is None:
            return path, damaged_checkpoints
        damaged_checkpoints.append((path, damaged_file))
    return None, damaged_checkpoints


def incomplete_checkpoints(folder: Path, ignored_files: Collection[str] = ()) -> dict[Path, str]:
    """Find the incomplete checkpoints, which `checkpoints` leaves out.

    Args:
        folder: Folder of all checkpoints.
        ignored_files: Names of files that may be missing or truncated.

    Returns:
        Name of the first missing or truncated file, for the folder of each incomplete checkpoint.
    """
    damaged_files = {
        path: _find_damaged_file(path, ignored_files) for path in _list_named_checkpoints(folder)
    }
    return {path: file for path, file in damaged_files.items() if file is not None}


def changed_file(checkpoint: Path, ignored_files: Collection[str] = ()) -> str | None:
    """Find a file of a checkpoint that has changed since it was saved.

    Args:
        checkpoint: Folder of the checkpoint.
        ignored_files: Names of files that may have changed.

    Returns:
        Name of the first file whose SHA-256 differs from that in the state; None if all are equal.
    """
    for name, sha256 in read_state(checkpoint)["sha256"].items():
        if name not in ignored_files and sha256_of(checkpoint / name) != sha256:
            return name
    return None


def _list_named_checkpoints(folder: Path) -> list[Path]:
    # ignore folders with similar names, such as a user's copy of a checkpoint
    return sorted(
        filter(_has_checkpoint_name, folder.glob("step-*")),
        key=lambda path: int(path.name.removeprefix("step-")),
    )


def _has_checkpoint_name(path: Path) -> bool:
    return re.fullmatch(r"step-(0|[1-9][0-9]{0,18})", path.name) is not None


def _find_damaged_file(checkpoint: Path, ignored_files: Collection[str]) -> str | None:
    """Return the name of the first file that is missing or changed in size, or None."""
    try:
        sizes = read_state(checkpoint)["sizes"]
    except (OSError, ValueError, KeyError):
        return STATE_FILE
    for name, size in sizes.items():
        path = checkpoint / name
        if name not in ignored_files and not (path.is_file() and path.stat().st_size == size):
            return name
    return None


def regular_checkpoints(folder: Path, ignored_files: Collection[str] = ()) -> list[Path]:
    """List the complete checkpoints that are not stop checkpoints.

    Args:
        folder: Folder of all checkpoints.
        ignored_files: Names of files that may be missing or truncated.

    Returns:
        Folders of the checkpoints, oldest first. If all are stop checkpoints, the newest one.
    """
    complete_checkpoints = checkpoints(folder, ignored_files)
    regular_paths = [path for path in complete_checkpoints if not _is_stop_checkpoint(path)]
    return regular_paths or complete_checkpoints[-1:]


def recent_checkpoints(seconds: float, candidates: Sequence[Path]) -> list[Path]:
    """Select the checkpoints of the last part of the training.

    Args:
        seconds: Length of this part, in seconds of training before the last checkpoint; the time
            between a stop and its resume does not count.
        candidates: Checkpoints, oldest first.

    Returns:
        Selected checkpoints, oldest first, always including the last one.
    """
    training_seconds = {path: read_state(path)["seconds"] for path in candidates}
    return [
        path
        for path in candidates
        if training_seconds[candidates[-1]] - training_seconds[path] <= seconds
    ]


def checkpoints_around(step: int, num_checkpoints: int, candidates: Sequence[Path]) -> list[Path]:
    """Select the checkpoints around that of a step.

    Args:
        step: Step of the checkpoint in the middle.
        num_checkpoints: Number of checkpoints to select. If it is even, one more is before the
            middle checkpoint than after it.
        candidates: Checkpoints, oldest first.

    Returns:
        Selected checkpoints, oldest first. If one side of the middle checkpoint has too few
        checkpoints, more are selected on the other side.
    """
    steps = [int(path.name.removeprefix("step-")) for path in candidates]
    index = max(bisect.bisect_right(steps, step) - 1, 0)
    first = max(min(index - num_checkpoints // 2, len(candidates) - num_checkpoints), 0)
    return list(candidates[first : first + num_checkpoints])


def make_regular(checkpoint: Path) -> None:
    """Turn a stop checkpoint into a regular one, because the run ends with this checkpoint.

    Args:
        checkpoint: Folder of the checkpoint.
    """
    write_state(checkpoint, {**read_state(checkpoint), "is_stop": False})


def _is_stop_checkpoint(checkpoint: Path) -> bool:
    return read_state(checkpoint)["is_stop"]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read the state of a checkpoint: everything except the tensors.

    Args:
        checkpoint: Folder of the checkpoint.

    Returns:
        Entries that `save_checkpoint` has written, by name.

    Raises:
        ValueError: If the file is damaged or was changed, or its step is not that of the folder's
            name.
    """
    path = checkpoint / STATE_FILE
    state = read_json(path, STATE_SCHEMA)
    if state.pop(STATE_HASH) != _hash_state(state):
        raise ValueError(f"{path} must be as it was saved, but was changed.")
    if _has_checkpoint_name(checkpoint) and checkpoint.name != f"step-{state['step']}":
        raise ValueError(
            f"{path}: step must match the name of the folder, {checkpoint.name}, got "
            f"{state['step']}."
        )
    return state


def read_optimizer(checkpoint: Path) -> dict[str, Any]:
    """Read the optimizer file. Its tensors are memory-mapped: they are read when they are used.

    Args:
        checkpoint: Folder of the checkpoint.

    Returns:
        `optimizer`, the whole `state_dict` of the optimizer; with precision fp16 also `scaler`, the
        `state_dict` of the gradient scaler.

    Raises:
        ValueError: If the file is damaged.
    """
    path = checkpoint / OPTIMIZER_FILE
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # the zip archive, or the pickled data or the names inside the archive can be damaged
    except UNREADABLE as error:
        raise ValueError(
            f"{path} must be as it was saved, but is damaged: {DAMAGE_ADVICE}."
        ) from error


def read_optimizer_of(checkpoint: Path, model: nn.Module) -> dict[str, Any]:
    """Read the state of an optimizer, and check each tensor against the model before copying it.

    Args:
        checkpoint: Folder of the checkpoint.
        model: Model that the optimizer trains, not wrapped.

    Returns:
        `optimizer`, whose entry `state` contains the state of each weight by the weight's index;
        and `scaler`, the `state_dict` of the gradient scaler, if it was saved.

    Raises:
        ValueError: If the file is damaged, or contains the state of another model.
    """
    path, content = checkpoint / OPTIMIZER_FILE, read_optimizer(checkpoint)
    optimizer = _require_mapping(path, "its content", content).get("optimizer")
    weight_states = _require_mapping(path, "optimizer", optimizer).get("state")
    parameters = list(model.named_parameters())
    checked_states = {}
    for index, weight_state in _require_mapping(path, "state", weight_states).items():
        if type(index) is not int or not 0 <= index < len(parameters):
            raise ValueError(
                f"{path} must hold the state of the model's {len(parameters)} weights, got an "
                f"entry with the index {index!r:.40}."
            )
        name, weight = parameters[index]
        expected_entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "step": ((), torch.float32)
        }
        expected_entries |= dict.fromkeys(ADAM_MOMENTS, (weight.shape, weight.dtype))
        _refuse_other_names(
            path,
            f"the state of {name}",
            _require_mapping(path, name, weight_state),
            expected_entries,
        )
        for entry, (shape, dtype) in expected_entries.items():
            _check_tensor(path, f"{entry} of {name}", weight_state[entry], shape, dtype)
        # copy the memory-mapped tensors, because saving a later checkpoint removes the file
        checked_states[index] = {entry: weight_state[entry].clone() for entry in expected_entries}
    checked_content: dict[str, Any] = {"optimizer": {"state": dict(sorted(checked_states.items()))}}
    if "scaler" in content:
        checked_content["scaler"] = _require_mapping(path, "scaler", content["scaler"])
        _refuse_other_names(path, "the gradient scaler", checked_content["scaler"], SCALER_STATE)
        for name, value in checked_content["scaler"].items():
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(
                    f"{path} must hold a number for {name} of the gradient scaler, got "
                    f"{value!r:.40}."
                )
    return checked_content


def read_moving_average(checkpoint: Path, model: nn.Module) -> dict[str, Tensor]:
    """Read the moving average of the weights, and check its names, shapes and types.

    Args:
        checkpoint: Folder of the checkpoint.
        model: Model in training, not wrapped.

    Returns:
        Averaged tensors, by the name of the weight.

    Raises:
        ValueError: If the file is damaged, or contains the average of another model.
    """
    path, averages = checkpoint / EMA_FILE, read_weights(checkpoint, EMA_FILE)
    parameters = dict(model.named_parameters())
    _refuse_other_names(path, "the moving average", averages, parameters)
    for name, weight in parameters.items():
        _check_tensor(path, name, averages[name], weight.shape, torch.float32)
    return averages


def _require_mapping(path: Path, name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{path} must hold a mapping for {name}, got a {type(value).__name__}: {DAMAGE_ADVICE}."
        )
    return value


def _refuse_other_names(
    path: Path, description: str, names: Collection[Any], expected_names: Collection[str]
):
    if set(names) != set(expected_names):
        missing_names = set(expected_names) - set(names)
        unknown_names = set(names) - set(expected_names)
        if missing_names:
            difference = f"without {min(missing_names)}"
        else:
            difference = f"with {unknown_names.pop()!r:.40}"
        raise ValueError(
            f"{path} must fit the model, got {description} {difference}: {DAMAGE_ADVICE}."
        )


def _check_tensor(
    path: Path, name: str, tensor: Any, shape: Sequence[int], dtype: torch.dtype
) -> None:
    check_stored(tensor, name, path)
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(shape)):
        raise ValueError(
            f"{path} must fit the model: {name} must be {dtype} of shape {list(shape)}, got "
            f"{tensor.dtype} of shape {list(tensor.shape)}. {DAMAGE_ADVICE.capitalize()}."
        )


def read_weights(folder: Path, name: str = WEIGHTS_FILE) -> dict[str, Tensor]:
    """Read the weights of a saved model. The file contains tied weights only once.

    Args:
        folder: Folder of a checkpoint or a model.
        name: Name of the file, `WEIGHTS_FILE` or `EMA_FILE`.

    Returns:
        Tensors by name.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        with safe_open(folder / name, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{folder / name} must be as it was saved, but is damaged: {error}. "
            f"{DAMAGE_ADVICE.capitalize()}."
        ) from error


def refuse_not_finite(weights: Mapping[str, Tensor], owner: str):
    """Refuse weights that contain an infinity or NaN.

    Args:
        weights: Tensors by name.
        owner: Description of the weights, for the error.

    Raises:
        FloatingPointError: If a weight is not finite; names the weight.
    """
    for name, weight in weights.items():
        # minimum and maximum suffice, because `aminmax` returns NaN if any element is NaN
        if weight.numel() and not all(map(torch.isfinite, weight.detach().aminmax())):
            raise FloatingPointError(
                f"{owner} must be finite, got {name} with infinity or NaN. Train with a lower "
                "learning_rate_factor, more warmup_steps or max_grad_norm 1.0."
            )


def load_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Load weights into a model. Weights that are tied in the model get the one saved tensor.

    Args:
        model: The model to change.
        weights: Tensors by name. Tied weights that are listed under another name, buffers, and
            weights that the model's class does not save may be missing.

    Raises:
        ValueError: If another weight is missing, a name is unknown, or a shape differs.
    """
    try:
        missing_names, unexpected_names = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ValueError(f"weights must fit the model: {' '.join(str(error).split())}") from error
    missing_names = set(missing_names) - set(model.all_tied_weights_keys)
    missing_names -= {*(model._keys_to_ignore_on_save or ()), *dict(model.named_buffers())}
    if missing_names or unexpected_names:
        raise ValueError(
            f"weights must fit the model, got missing {sorted(missing_names)}, unexpected "
            f"{unexpected_names}."
        )
