"""Checkpoints that are whole or not there."""

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

from ...atomic_files import free_space, make_folder, remove, to_disk, unfinished_path, write_whole
from ...hub import UNREADABLE
from ...records import (
    ANYTHING,
    NOTHING,
    NUMBER,
    TEXT,
    TRUTH,
    list_of,
    mapping,
    or_null,
    read_json,
    whole,
)
from ...sizes import check_stored

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.pt"
WEIGHTS_FILE = "model.safetensors"
EMA_FILE = "ema.safetensors"
# name in the state of the SHA-256 of all else in it
OWN_HASH = "state_sha256"
BAD_FILE = "missing, cut off or changed"
# state of Adam for each weight, beside the number of steps
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
# state of torch's scaler of the loss
SCALER_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
DAMAGED = "a run goes on from the checkpoint before where this one's folder is removed"

logger = logging.getLogger(__name__)
# name of a file of the checkpoint itself
PLAIN_NAME = r"(?!\.{1,2}$)[^/\\\0]+"
COUNTS = mapping(others=whole(0))
WINDOW = mapping(
    {"loss": NUMBER, "tokens": whole(0), "cells": whole(0), "filled_cells": whole(0)},
    others=NOTHING,
)
PLACE = mapping({"pass": whole(0), "shard": whole(0), "pairs": whole(0), "state": ANYTHING})
POSITION = mapping(
    {
        "block": whole(0),
        "first_step": whole(0),
        "counts": COUNTS,
        "places": list_of(PLACE, least=1),
    },
    {"block_counts": COUNTS, "text_sha256": TEXT},
)
STATE = mapping(
    {"step": whole(0), "sizes": mapping(others=whole(0), names=PLAIN_NAME)},
    {"is_stop": TRUTH, "seconds": NUMBER, "sha256": mapping(others=TEXT, names=PLAIN_NAME)},
)
# of a run that can be resumed; earlier versions noted less
RUN_STATE = mapping(
    {
        "skipped": whole(0),
        "skipped_in_a_row": whole(0),
        "data": mapping(),
        "window": or_null(WINDOW),
    },
    {
        "is_late": TRUTH,
        "num_processes": whole(1),
        "tokens_per_micro_batch": or_null(whole(1)),
        "position": or_null(POSITION),
    },
)


def save_checkpoint(
    folder: Path,
    step: int,
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Any],
    state: Mapping[str, Any],
    keep: int,
    keep_seconds: float | None = None,
    moving_average: Mapping[str, Tensor] | None = None,
    scaler: Any = None,
    is_stop: bool = False,
) -> Path:
    """Write `step-N` in a folder of checkpoints, and remove those that are not to be kept.

    It is written beside its place and renamed when all of it is on disk: whatever has the name of
    a checkpoint is one. One that a stop made is there to go on from: it takes no other's place, and
    goes with the next.

    Args:
        folder: Of all checkpoints.
        step: Steps done.
        model: The model, not wrapped for several processes, which may have a part of each weight.
        weights: All of its weights, by name.
        optimizer_state: All that its optimizer has.
        state: What else the run needs to go on.
        keep: How many checkpoints to keep.
        keep_seconds: To keep those of so much training time, `seconds` in the state, instead.
        moving_average: Of the weights, where the run has one.
        scaler: Of the loss, in half precision.
        is_stop: Whether it is made out of turn, because the run was asked to end.

    Returns:
        The folder of this checkpoint.

    Raises:
        OSError: If it cannot be written, for want of space for one; the last one is untouched.
    """
    final = folder / f"step-{step}"
    unfinished = unfinished_path(final)
    try:
        make_folder(folder)
        remove_unfinished(folder)
        unfinished.mkdir()
        hashes: dict[Path, Future[str]] = {}
        synced: list[Future[None]] = []
        with ThreadPoolExecutor() as threads:

            def settle():
                # while the next file is written
                for path in sorted(set(unfinished.iterdir()) - set(hashes)):
                    hashes[path] = threads.submit(_sha256, path)
                    synced.append(threads.submit(to_disk, path))

            model.save_pretrained(unfinished, state_dict=dict(weights), max_shard_size="1TB")
            settle()
            if moving_average is not None:
                save_file(dict(moving_average), unfinished / EMA_FILE, metadata={"format": "pt"})
                settle()
            tensors = {"optimizer": optimizer_state}
            if scaler is not None:
                tensors["scaler"] = scaler.state_dict()
            torch.save(tensors, unfinished / OPTIMIZER_FILE)
            settle()
        for done in synced:
            done.result()
        sha256 = {path.name: found.result() for path, found in hashes.items()}
        sizes = {path.name: path.stat().st_size for path in hashes}
        notes = {"step": step, "is_stop": is_stop, **state, "sizes": sizes, "sha256": sha256}
        write_whole(unfinished / STATE_FILE, _state_text(notes))
        if final.exists():
            _remove(final)
        unfinished.rename(final)
        to_disk(folder)
    # the writers of safetensors and torch have their own names for a full disk
    except (OSError, SafetensorError, RuntimeError) as error:
        free = free_space(folder)
        shutil.rmtree(unfinished, ignore_errors=True)
        last = checkpoints(folder)
        intact = f"{last[-1]} is intact" if last else "there is none before it"
        raise OSError(
            f"checkpoint {final} cannot be written with {free}, {intact}: "
            f"{' '.join(str(error).split())}"
        ) from error
    found = checkpoints(folder)
    regular = [path for path in found if not _is_of_a_stop(path)]
    kept = regular[-keep:] if keep_seconds is None else of_the_last(keep_seconds, regular)
    for path in found:
        if path != final and path not in kept:
            _remove(path)
    return final


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state_text(notes: Mapping[str, Any]) -> str:
    notes = {name: note for name, note in notes.items() if name != OWN_HASH}
    return json.dumps({**notes, OWN_HASH: _hash_of(notes)}, indent=1)


def _hash_of(notes: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(notes).encode()).hexdigest()


def _remove(path: Path):
    # what is half removed has no longer the name of a checkpoint
    doomed = unfinished_path(path)
    try:
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        logger.warning("%s cannot be removed, and stays: %s", path, error)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed save left behind, half written or half removed.

    Args:
        folder: Of all checkpoints.
    """
    for path in folder.glob(".step-*.unfinished"):
        remove(path)


def checkpoints(folder: Path, spared: Collection[str] = ()) -> list[Path]:
    """The whole checkpoints of a folder; one with a missing or cut file is passed over.

    Args:
        folder: Of all checkpoints.
        spared: Names of files that need not be whole.

    Returns:
        Their folders, the oldest first.
    """
    return [path for path in _named(folder) if _damaged_file(path, spared) is None]


def newest_intact(folder: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Find the newest checkpoint of which every file is as it was saved.

    Args:
        folder: Folder of all checkpoints.

    Returns:
        The checkpoint, or None; and the newer ones, each with the first file that is missing, cut
        off or changed.
    """
    passed_over: list[tuple[Path, str]] = []
    for path in reversed(_named(folder)):
        file = _damaged_file(path, ()) or changed_file(path)
        if file is None:
            return path, passed_over
        passed_over.append((path, file))
    return None, passed_over


def cut_checkpoints(folder: Path, spared: Collection[str] = ()) -> dict[Path, str]:
    """Find the checkpoints that `checkpoints` leaves out.

    Args:
        folder: Folder of all checkpoints.
        spared: Names of files that need not be whole.

    Returns:
        The first file of each that is missing or cut off.
    """
    found = {path: _damaged_file(path, spared) for path in _named(folder)}
    return {path: file for path, file in found.items() if file is not None}


def changed_file(checkpoint: Path, spared: Collection[str] = ()) -> str | None:
    """Read a whole checkpoint once, and find what is no longer as it was saved.

    Args:
        checkpoint: Folder of one checkpoint.
        spared: Names of files that need not be as they were.

    Returns:
        Name of the first file whose SHA-256 is not the one in the state, or None. An earlier
        version saved no SHA-256.
    """
    for name, sha256 in read_state(checkpoint).get("sha256", {}).items():
        if name not in spared and _sha256(checkpoint / name) != sha256:
            return name
    return None


def _named(folder: Path) -> list[Path]:
    # a user's copy of one has another name
    return sorted(
        filter(_is_name, folder.glob("step-*")),
        key=lambda path: int(path.name.removeprefix("step-")),
    )


def _is_name(path: Path) -> bool:
    return re.fullmatch(r"step-(0|[1-9][0-9]{0,18})", path.name) is not None


def _damaged_file(checkpoint: Path, spared: Collection[str]) -> str | None:
    """The first file that is not there as it was saved, if there is one."""
    try:
        sizes = read_state(checkpoint)["sizes"]
    except (OSError, ValueError, KeyError):
        return STATE_FILE
    for name, size in sizes.items():
        path = checkpoint / name
        if name not in spared and not (path.is_file() and path.stat().st_size == size):
            return name
    return None


def regular_checkpoints(folder: Path, spared: Collection[str] = ()) -> list[Path]:
    """The whole checkpoints that were made in their turn, none of them by a stop.

    Args:
        folder: Of all checkpoints.
        spared: Names of files that need not be whole.

    Returns:
        Their folders, the oldest first; where stops made all there are, the newest of those.
    """
    found = checkpoints(folder, spared)
    return [path for path in found if not _is_of_a_stop(path)] or found[-1:]


def of_the_last(seconds: float, found: Sequence[Path]) -> list[Path]:
    """The checkpoints that were made in the last so many seconds of training.

    Args:
        seconds: Of training time, which goes on where a resumed run goes on.
        found: Checkpoints, the oldest first.

    Returns:
        Those of them from the last one back, which is always among them.
    """
    # an earlier version did not count
    made_at = {path: read_state(path).get("seconds", 0.0) for path in found}
    return [path for path in found if made_at[found[-1]] - made_at[path] <= seconds]


def make_regular(checkpoint: Path) -> None:
    """Let a checkpoint that a stop made count as any other, because the run ends with it.

    Args:
        checkpoint: Its folder.
    """
    text = _state_text({**read_state(checkpoint), "is_stop": False})
    write_whole(checkpoint / STATE_FILE, text)


def _is_of_a_stop(checkpoint: Path) -> bool:
    # a checkpoint of an earlier version does not say
    return read_state(checkpoint).get("is_stop", False)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What the run had noted beside the tensors.

    Args:
        checkpoint: Folder of one checkpoint.

    Returns:
        `step`, and what was given to `save_checkpoint`.

    Raises:
        ValueError: If it is not as it was written.
    """
    path = checkpoint / STATE_FILE
    state = read_json(path, STATE)
    # an earlier version had none
    saved = state.pop(OWN_HASH, None)
    if saved is not None and saved != _hash_of(state):
        raise ValueError(f"{path} must be as it was saved, and was changed.")
    if _is_name(checkpoint) and checkpoint.name != f"step-{state['step']}":
        raise ValueError(f"{path}: step must be that of its folder, got {state['step']}.")
    return state


def read_optimizer(checkpoint: Path) -> dict[str, Any]:
    """Read what an optimizer needs to go on; the tensors stay in the file until they are used.

    Args:
        checkpoint: Folder of one checkpoint.

    Returns:
        `optimizer`, the `state_dict` of all of it, and `scaler` of the loss in half precision.

    Raises:
        ValueError: If the file is damaged.
    """
    path = checkpoint / OPTIMIZER_FILE
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # what is damaged may be the archive, what is pickled in it, or the names
    except UNREADABLE as error:
        raise ValueError(f"{path} must be as it was saved, and is damaged: {DAMAGED}.") from error


def read_optimizer_of(checkpoint: Path, model: nn.Module) -> dict[str, Any]:
    """Read the state of an optimizer, and check that it fits the model before it takes memory.

    Args:
        checkpoint: Folder of one checkpoint.
        model: The model, not wrapped.

    Returns:
        `optimizer`, with the state of each weight by its number, and `scaler` if there is one.

    Raises:
        ValueError: If the file is damaged, or holds the state of another model.
    """
    path, content = checkpoint / OPTIMIZER_FILE, read_optimizer(checkpoint)
    optimizer = _mapping(path, "its content", content).get("optimizer")
    slots_of = _mapping(path, "optimizer", optimizer).get("state")
    parameters = list(model.named_parameters())
    state = {}
    for index, slots in _mapping(path, "state", slots_of).items():
        if type(index) is not int or not 0 <= index < len(parameters):
            raise ValueError(
                f"{path} must hold the state of the model's {len(parameters)} weights, got one of "
                f"the number {index!r:.40}."
            )
        name, weight = parameters[index]
        wanted = {"step": ((), torch.float32)}
        wanted |= dict.fromkeys(ADAM_MOMENTS, (weight.shape, weight.dtype))
        _refuse_other_names(path, f"the state of {name}", _mapping(path, name, slots), wanted)
        for slot, (shape, dtype) in wanted.items():
            _check_tensor(path, f"{slot} of {name}", slots[slot], shape, dtype)
        # out of the file, which goes when a later checkpoint is saved
        state[index] = {slot: slots[slot].clone() for slot in wanted}
    before = {"optimizer": {"state": dict(sorted(state.items()))}}
    if "scaler" in content:
        before["scaler"] = _mapping(path, "scaler", content["scaler"])
        _refuse_other_names(path, "the scale of the loss", before["scaler"], SCALER_STATE)
        for name, value in before["scaler"].items():
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(
                    f"{path} must hold a number for {name} of the scale of the loss, got "
                    f"{value!r:.40}."
                )
    return before


def read_moving_average(checkpoint: Path, model: nn.Module) -> dict[str, Tensor]:
    """Read the moving average of the weights, and check that it fits the model.

    Args:
        checkpoint: Folder of one checkpoint.
        model: The model, not wrapped.

    Returns:
        Tensors by the name of the weight.

    Raises:
        ValueError: If the file is damaged, or holds the average of another model.
    """
    path, averages = checkpoint / EMA_FILE, read_weights(checkpoint, EMA_FILE)
    parameters = dict(model.named_parameters())
    _refuse_other_names(path, "the moving average", averages, parameters)
    for name, weight in parameters.items():
        _check_tensor(path, name, averages[name], weight.shape, torch.float32)
    return averages


def _mapping(path: Path, name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{path} must hold a mapping for {name}, as it was saved, got a "
            f"{type(value).__name__}: {DAMAGED}."
        )
    return value


def _refuse_other_names(path: Path, what: str, given: Collection[Any], wanted: Collection[str]):
    if set(given) != set(wanted):
        missing, others = set(wanted) - set(given), set(given) - set(wanted)
        difference = f"without {min(missing)}" if missing else f"with {others.pop()!r:.40}"
        raise ValueError(f"{path} must fit the model, got {what} {difference}: {DAMAGED}.")


def _check_tensor(
    path: Path, name: str, tensor: Any, shape: Sequence[int], dtype: torch.dtype
) -> None:
    check_stored(tensor, name, path)
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(shape)):
        raise ValueError(
            f"{path} must fit the model: {name} must be {dtype} of shape {list(shape)}, got "
            f"{tensor.dtype} of shape {list(tensor.shape)}. {DAMAGED.capitalize()}."
        )


def read_weights(folder: Path, name: str = WEIGHTS_FILE) -> dict[str, Tensor]:
    """Read the weights of a saved model, tied ones once.

    Args:
        folder: Of a checkpoint or a model.
        name: Of the file, that of a moving average for one.

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
            f"{folder / name} must be as it was saved, and is damaged: {error}. {DAMAGED}."
        ) from error


def refuse_not_finite(weights: Mapping[str, Tensor], owner: str):
    """Refuse weights with an infinite number, or one that is not a number.

    Args:
        weights: Tensors by name.
        owner: What they are the weights of, for the error.

    Raises:
        FloatingPointError: If there is one; says in which weight.
    """
    for name, weight in weights.items():
        # a number that is none is the least and the greatest
        if weight.numel() and not all(map(torch.isfinite, weight.detach().aminmax())):
            raise FloatingPointError(
                f"{owner} must be finite, got {name} with numbers that are not. Train with a lower "
                "learning_rate_factor, more warmup_steps or max_grad_norm 1.0."
            )


def load_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Put weights into a model; tied ones follow the one that was saved.

    Args:
        model: The model to change.
        weights: Tensors by name; buffers and weights that the model's class does not save may be
            missing.

    Raises:
        ValueError: If a name or a size is not the model's.
    """
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ValueError(f"weights must fit the model: {' '.join(str(error).split())}") from error
    missing = set(missing) - set(model.all_tied_weights_keys)
    missing -= {*(model._keys_to_ignore_on_save or ()), *dict(model.named_buffers())}
    if missing or unexpected:
        raise ValueError(
            f"weights must be the model's, got without {sorted(missing)}, with {unexpected}."
        )
