"""Checkpoints that are whole or not there."""

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from vanilla_transformer.hub import UNREADABLE
from vanilla_transformer.records import (
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
from vanilla_transformer.train.files import write_whole

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.pt"
WEIGHTS_FILE = "model.safetensors"
EMA_FILE = "ema.safetensors"
DAMAGED = "a run goes on from the checkpoint before where this one's folder is removed"

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
    unfinished = folder / f".step-{step}.unfinished"
    try:
        remove_unfinished(folder)
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished, state_dict=dict(weights), max_shard_size="1TB")
        if moving_average is not None:
            save_file(dict(moving_average), unfinished / EMA_FILE, metadata={"format": "pt"})
        tensors = {"optimizer": optimizer_state}
        if scaler is not None:
            tensors["scaler"] = scaler.state_dict()
        torch.save(tensors, unfinished / OPTIMIZER_FILE)
        sizes = {path.name: path.stat().st_size for path in unfinished.iterdir()}
        notes = {"step": step, "is_stop": is_stop, **state, "sizes": sizes}
        text = json.dumps(notes, indent=1)
        (unfinished / STATE_FILE).write_text(text, encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            _to_disk(path)
        if final.exists():
            _remove(final)
        unfinished.rename(final)
        _to_disk(folder)
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


def free_space(folder: Path) -> str:
    """How much can still be written.

    Args:
        folder: Where to; it may not be there yet.

    Returns:
        A number of kB, in words.
    """
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free // 1000:,} kB free"


def _remove(path: Path):
    # what is half removed has no longer the name of a checkpoint
    doomed = path.with_name(f".{path.name}.removed.unfinished")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _to_disk(path: Path):
    is_folder = path.is_dir()
    # Windows has no descriptors of folders, and flushes those that can be written alone
    if is_folder and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed save left behind, half written or half removed.

    Args:
        folder: Of all checkpoints.
    """
    for path in folder.glob(".step-*.unfinished"):
        shutil.rmtree(path)


def checkpoints(folder: Path, spared: Collection[str] = ()) -> list[Path]:
    """The whole checkpoints of a folder; one with a missing or cut file is passed over.

    Args:
        folder: Of all checkpoints.
        spared: Names of files that need not be whole.

    Returns:
        Their folders, the oldest first.
    """
    return [path for path in _named(folder) if _damaged_file(path, spared) is None]


def damaged(folder: Path, after: Path) -> list[tuple[Path, str]]:
    """The checkpoints that are passed over though they are newer than one that is whole.

    Args:
        folder: Of all checkpoints.
        after: The one that is whole.

    Returns:
        Each with the first file that it lacks.
    """
    named = _named(folder)
    newer = named[named.index(after) + 1 :]
    return [(path, file) for path in newer if (file := _damaged_file(path, ())) is not None]


def refuse_damaged(folder: Path, spared: Collection[str] = ()) -> None:
    """Refuse a folder without a whole checkpoint, where there are others.

    Args:
        folder: Of all checkpoints.
        spared: Names of files that need not be whole.

    Raises:
        ValueError: If there are any; says what the newest lacks.
    """
    found = _named(folder)
    if found:
        raise ValueError(
            f"{folder} must have a whole checkpoint, got {found[-1].name} with "
            f"{_damaged_file(found[-1], spared)} missing or cut off."
        )


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
    text = json.dumps({**read_state(checkpoint), "is_stop": False}, indent=1)
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
    if _is_name(checkpoint) and checkpoint.name != f"step-{state['step']}":
        raise ValueError(f"{path}: step must be that of its folder, got {state['step']}.")
    return state


def read_optimizer(checkpoint: Path) -> dict[str, Any]:
    """Read what an optimizer needs to go on.

    Args:
        checkpoint: Folder of one checkpoint.

    Returns:
        `optimizer`, the `state_dict` of all of it, and `scaler` of the loss in half precision.

    Raises:
        ValueError: If the file is damaged.
    """
    path = checkpoint / OPTIMIZER_FILE
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # what is damaged may be the archive, what is pickled in it, or the names
    except UNREADABLE as error:
        raise ValueError(f"{path} must be as it was saved, and is damaged: {DAMAGED}.") from error


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
