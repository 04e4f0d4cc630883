"""Checkpoints: complete or absent."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_toys
from safetensors import SafetensorError

from vanilla_transformer import VanillaTransformerForConditionalGeneration, atomic_files
from vanilla_transformer.train.run_folder import checkpoint as checkpointing
from vanilla_transformer.train.run_folder.checkpoint import (
    checkpoints,
    load_weights,
    make_regular,
    newest_intact,
    read_optimizer,
    read_state,
    read_weights,
    refuse_not_finite,
    regular_checkpoints,
    save_checkpoint,
    write_state,
)


def make_model(seed=0, hidden_size=8):
    return train_toys.toy_model(seed, hidden_size=hidden_size)


def make_optimizer(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def save(folder, step, seed=0, keep=5, is_stop=False):
    model = make_model(seed)
    optimizer = make_optimizer(model)
    weights, state = dict(model.named_parameters()), optimizer.state_dict()
    notes = {"step": step, "note": "x", "seconds": 0.0}
    files = {"model": model, "weights": weights, "optimizer_state": state}
    save_checkpoint(folder, notes, **files, keep=keep, is_stop=is_stop)
    return model, optimizer


def test_a_checkpoint_gives_back_weights_optimizer_and_state(tmp_path):
    model, optimizer = save(tmp_path, 3)
    other = make_model(seed=9)
    path = checkpoints(tmp_path)[0]
    load_weights(other, read_weights(path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    before, after = optimizer.state_dict()["state"], read_optimizer(path)["optimizer"]["state"]
    assert len(before) == len(after) > 10
    assert all(torch.equal(before[i][name], after[i][name]) for i in before for name in before[i])
    assert (read_state(path)["step"], read_state(path)["note"]) == (3, "x")


def test_the_newest_checkpoints_are_kept_in_the_order_of_their_steps(tmp_path):
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep=3)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-9", "step-10", "step-11"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-11", "step-9"]


def names(found):
    return [path.name for path in found]


def test_a_checkpoint_of_a_stop_replaces_no_other_and_is_removed_with_the_next_save(tmp_path):
    save(tmp_path, 3, keep=2, is_stop=True)
    assert names(regular_checkpoints(tmp_path)) == ["step-3"]
    for step in (4, 8):
        save(tmp_path, step, keep=2)
    for step in (9, 11):
        save(tmp_path, step, keep=2, is_stop=True)
    assert names(checkpoints(tmp_path)) == ["step-4", "step-8", "step-11"]
    assert names(regular_checkpoints(tmp_path)) == ["step-4", "step-8"]
    save(tmp_path, 12, keep=2)
    assert names(checkpoints(tmp_path)) == ["step-8", "step-12"]


def test_a_checkpoint_of_a_stop_becomes_regular_if_the_run_ends_with_it(tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 7, is_stop=True)
    make_regular(tmp_path / "step-7")
    assert names(regular_checkpoints(tmp_path)) == ["step-4", "step-7"]
    assert read_state(tmp_path / "step-7")["note"] == "x"


class Killed(BaseException):
    """Exception that a test raises in place of a SIGKILL."""


@pytest.mark.parametrize("writes", range(7))
def test_a_killed_save_leaves_the_last_checkpoint_intact(tmp_path, monkeypatch, writes):
    save(tmp_path, 4)
    left = writes

    def fsync(descriptor):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    monkeypatch.setattr(os, "fsync", fsync)
    try:
        save(tmp_path, 5, seed=1)
    except Killed:
        names = ["step-4"]
        # only the last write comes after the rename
        names += ["step-5"] if (tmp_path / "step-5").exists() else []
        assert [path.name for path in checkpoints(tmp_path)] == names
    assert left < 0, "it was not killed"
    monkeypatch.undo()
    save(tmp_path, 6)
    assert not list(tmp_path.glob(".*")), "the unfinished checkpoint is still there"


def test_a_killed_removal_leaves_no_incomplete_checkpoint(tmp_path, monkeypatch):
    def killed_after_one_file(path, **options):
        (path / "optimizer.pt").unlink()
        raise Killed

    save(tmp_path, 4, keep=1)
    monkeypatch.setattr(shutil, "rmtree", killed_after_one_file)
    with pytest.raises(Killed):
        save(tmp_path, 5, keep=1)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-5"]
    save(tmp_path, 6, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-6"]


def test_a_checkpoint_is_written_where_only_files_open_to_write_can_be_flushed(
    tmp_path, monkeypatch
):
    """Windows has no descriptors of folders, and cannot flush a descriptor that only reads."""
    opened, flushed = {}, set()

    def open_as_windows(path, flags):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied")
        descriptor = os.open(path, flags)
        opened[descriptor] = (Path(path).name, flags == os.O_RDWR)
        return descriptor

    def fsync_as_windows(descriptor):
        # the state is written through a file object
        name, is_writable = opened.pop(descriptor, ("state.json", True))
        if not is_writable:
            raise OSError(9, "Bad file descriptor")
        flushed.add(name)

    windows = {"name": "nt", "open": open_as_windows, "fsync": fsync_as_windows}
    own = {name: getattr(os, name) for name in ("close", "O_RDONLY", "O_RDWR")}
    monkeypatch.setattr(atomic_files, "os", SimpleNamespace(**own, **windows))
    save(tmp_path, 4)
    assert names(checkpoints(tmp_path)) == ["step-4"]
    assert flushed == {path.name for path in (tmp_path / "step-4").iterdir()}
    assert len(flushed) > 3


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json"])
def test_an_incomplete_checkpoint_is_skipped(tmp_path, name):
    save(tmp_path, 4)
    save(tmp_path, 5)
    torn = tmp_path / "step-5" / name
    torn.write_bytes(torn.read_bytes()[:-20])
    assert [path.name for path in checkpoints(tmp_path)] == ["step-4"]
    torn.unlink()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-4"]


def test_a_users_copy_of_a_checkpoint_is_not_touched(tmp_path):
    save(tmp_path, 8, keep=2)
    shutil.copytree(tmp_path / "step-8", tmp_path / "step-8-keep")
    assert names(checkpoints(tmp_path)) == ["step-8"]
    for step in (9, 10, 11):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-11", "step-8-keep"]


def full_disk(*args, **options):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("writer", ["torch.save", "safetensors", "state"])
def test_a_full_disk_leaves_the_last_checkpoint_and_names_it(tmp_path, monkeypatch, writer):
    save(tmp_path, 4)
    if writer == "torch.save":
        monkeypatch.setattr(torch, "save", full_disk)
    elif writer == "safetensors":
        monkeypatch.setattr(
            VanillaTransformerForConditionalGeneration, "save_pretrained", full_disk
        )
    else:
        monkeypatch.setattr(checkpointing, "write_atomically", full_disk)
    with pytest.raises(
        OSError,
        match=r"step-5 cannot be written \(.* kB free\), .*step-4 is intact.*No space left",
    ):
        save(tmp_path, 5)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    assert len(checkpoints(tmp_path)) == 1


def raising(error):
    def fail(*args, **options):
        raise error

    return fail


def test_an_error_of_safetensors_names_the_intact_checkpoint(tmp_path, monkeypatch):
    fail = raising(SafetensorError("I/O error: Input/output error (os error 5)"))
    save(tmp_path, 4)
    monkeypatch.setattr(VanillaTransformerForConditionalGeneration, "save_pretrained", fail)
    with pytest.raises(OSError, match=r"step-5 cannot be written .*step-4 is intact.*os error 5"):
        save(tmp_path, 5)


def test_an_error_that_is_not_of_the_disk_keeps_its_words_and_leaves_no_files(
    tmp_path, monkeypatch
):
    save(tmp_path, 4)
    monkeypatch.setattr(torch, "save", raising(RuntimeError("tensors on two devices")))
    with pytest.raises(RuntimeError, match=r"^tensors on two devices$"):
        save(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_damaged_file_is_named(tmp_path, name):
    save(tmp_path, 1)
    checkpoint = tmp_path / "step-1"
    path = checkpoint / name
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert checkpoints(tmp_path) == [checkpoint]
    read = {"model.safetensors": read_weights, "optimizer.pt": read_optimizer}[name]
    with pytest.raises(ValueError, match=rf"{name} must be as it was saved, .* checkpoint before"):
        read(checkpoint)


def test_weights_of_another_model_are_refused(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="weights must fit the model"):
        load_weights(make_model(hidden_size=4), read_weights(tmp_path / "step-1"))
    with pytest.raises(ValueError, match="got missing"):
        load_weights(make_model(), {})


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "optimizer.pt", "state.json"])
def test_a_flipped_bit_is_detected_and_the_checkpoint_before_is_used(tmp_path, name):
    save(tmp_path, 4)
    save(tmp_path, 5)
    assert newest_intact(tmp_path) == (tmp_path / "step-5", [])
    flip_a_bit(tmp_path / "step-5" / name)
    newest, passed_over = newest_intact(tmp_path)
    assert (newest.name, passed_over) == ("step-4", [(tmp_path / "step-5", name)])
    shutil.rmtree(tmp_path / "step-4")
    assert newest_intact(tmp_path)[0] is None


def test_a_changed_number_in_a_state_is_detected(tmp_path):
    save(tmp_path, 4)
    path = tmp_path / "step-4/state.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 7'))
    with pytest.raises(ValueError, match=r"state\.json must be as it was saved, but was changed"):
        read_state(tmp_path / "step-4")
    assert newest_intact(tmp_path) == (None, [(tmp_path / "step-4", "state.json")])


def test_a_checkpoint_that_is_made_regular_keeps_its_checksums(tmp_path):
    save(tmp_path, 7, is_stop=True)
    make_regular(tmp_path / "step-7")
    assert newest_intact(tmp_path) == (tmp_path / "step-7", [])


@pytest.mark.parametrize("cannot", ["rename", "rmtree"])
def test_a_checkpoint_that_cannot_be_removed_does_not_block_the_saves_that_follow(
    tmp_path, monkeypatch, caplog, cannot
):
    real = {"rename": Path.rename, "rmtree": shutil.rmtree}

    def refuse(path, *args, **options):
        if "step-4" not in path.name:
            return real[cannot](path, *args, **options)
        if not options.get("ignore_errors"):
            raise PermissionError(1, "Operation not permitted")
        return None

    save(tmp_path, 4, keep=1)
    monkeypatch.setattr(*((Path, "rename") if cannot == "rename" else (shutil, "rmtree")), refuse)
    for step in (5, 6, 7):
        save(tmp_path, step, keep=1)
    assert "step-4 cannot be removed" in caplog.text
    assert checkpoints(tmp_path)[-1].name == "step-7"
    assert not (tmp_path / "step-5").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    weights = {"a": torch.zeros(3), "b": torch.tensor([0.0, value]), "c": torch.zeros(0)}
    with pytest.raises(FloatingPointError, match="the weights must be finite, got b with"):
        refuse_not_finite(weights, "the weights")
    refuse_not_finite({"a": torch.tensor([3e38, -3e38])}, "the weights")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 8},
        {"step": True},
        {"step": "3"},
        {"step": None},
        {"sizes": {"../step-3/model.safetensors": 5}},
        {"sizes": {"..": 5}},
        {"sizes": []},
        {"sizes": {"model.safetensors": "5"}},
        {"seconds": "5"},
        {"is_stop": 1},
    ],
)
def test_a_checkpoint_with_a_damaged_state_is_not_a_checkpoint(changes, tmp_path):
    save(tmp_path, 3)
    path = tmp_path / "step-3" / "state.json"
    write_state(path.parent, {**json.loads(path.read_text()), **changes})
    with pytest.raises(ValueError, match=f"{path}: {next(iter(changes))}"):
        read_state(tmp_path / "step-3")
    assert not checkpoints(tmp_path)
