"""Atomic writes of files and folders, and the lock for one command at a time."""

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import train_toys
from filelock import FileLock
from translation_toys import make_model, make_tokenizer

from vanilla_transformer.atomic_files import (
    atomic_folder,
    is_disk_full,
    locked_folder,
    write_atomically,
)
from vanilla_transformer.cli import main
from vanilla_transformer.export.marian import to_marian
from vanilla_transformer.loading import load_run
from vanilla_transformer.publishing import export_for_hub
from vanilla_transformer.train.averaging import average_run
from vanilla_transformer.train.loop import train

STEPS = 12


def test_a_write_replaces_the_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    for text in ("dataset: demo\n", "dataset: größer\n"):
        write_atomically(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace"), (Path, "open")])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, owner, name, error):
    path = tmp_path / "recipe.yaml"
    write_atomically(path, "dataset: demo\n")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(type(error) if isinstance(error, OSError) else error):
            write_atomically(path, "dataset: other\n")
    assert path.read_text(encoding="utf-8") == "dataset: demo\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_that_is_not_writable_is_named_by_its_final_path(tmp_path, monkeypatch, number):
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    path, sentence = tmp_path / "out", f"/out cannot be written: {os.strerror(number)}."
    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", refuse)
        with pytest.raises(OSError, match=sentence), locked_folder(path):
            pytest.fail("the folder cannot be locked")
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match=sentence), locked_folder(path):
        pytest.fail("the folder cannot be made")
    with pytest.raises(OSError, match=sentence), atomic_folder(path):
        pytest.fail("the folder cannot be made")
    with pytest.raises(OSError, match=sentence):
        write_atomically(path, "text")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "open")])
def test_a_file_on_a_full_disk_is_named_with_the_free_space(
    tmp_path, monkeypatch, number, owner, name
):
    path = tmp_path / "scores.json"

    def fill(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owner, name, fill)
    sentence = rf"^{path} cannot be written \([\d,]+ kB free\): {os.strerror(number)}\.$"
    with pytest.raises(OSError, match=sentence) as error:
        write_atomically(path, "text")
    assert error.value.errno == number
    assert not list(tmp_path.iterdir())


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    outside, path = tmp_path / "outside", tmp_path / "link"
    outside.write_text("mine")
    path.symlink_to(outside)
    write_atomically(path, "new")
    assert (outside.read_text(), path.read_text(), path.is_symlink()) == ("mine", "new", False)


def test_every_file_of_a_run_has_the_permissions_of_the_umask(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    umask_before = os.umask(0o027)
    try:
        train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=4, save_every_steps=4))
        to_marian(*load_run(tmp_path / "run"), tmp_path / "marian")
    finally:
        os.umask(umask_before)
    files = [path for name in ("run", "marian") for path in (tmp_path / name).rglob("*.*")]
    assert sum(path.suffix == ".safetensors" for path in files) == 3
    assert {oct(path.stat().st_mode & 0o777) for path in files if path.is_file()} == {"0o640"}


def test_a_folder_has_one_lock_holder_and_keeps_no_lock_file(tmp_path):
    folder = tmp_path / "a" / "run"
    with locked_folder(folder) as is_locked:
        assert is_locked
        with (
            pytest.raises(ValueError, match=f"{folder} is in use by another command"),
            locked_folder(folder),
        ):
            pass
        (folder / "mine").write_text("x")
    assert [path.name for path in folder.iterdir()] == ["mine"]
    # only the command that created the folder removes it
    with locked_folder(folder):
        (folder / "mine").unlink()
    assert not list(folder.iterdir())
    folder.rmdir()
    with locked_folder(folder):
        pass
    assert not folder.exists()


def test_a_waiting_command_gets_the_lock(tmp_path):
    order = []

    def first():
        with locked_folder(tmp_path):
            order.append("first")
            time.sleep(0.5)
            order.append("left")

    thread = threading.Thread(target=first)
    thread.start()
    while not order:
        time.sleep(0.01)
    with locked_folder(tmp_path, seconds=20):
        order.append("second")
    thread.join()
    assert order == ["first", "left", "second"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file/run", errno.ENOTDIR),
        ("file/runs/run", errno.ENOTDIR),
        ("nowhere", errno.EEXIST),
        ("loop/run", errno.ELOOP),
    ],
)
def test_a_folder_that_cannot_be_made_is_named_with_its_setting(tmp_path, name, reason):
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("absent")
    (tmp_path / "loop").symlink_to("loop")
    sentence = f"^output_dir must be a folder that can be made, got {tmp_path / name}: "
    with (
        pytest.raises(ValueError, match=f"{sentence}{os.strerror(reason)}"),
        locked_folder(tmp_path / name),
    ):
        pytest.fail("the folder cannot be made")


def test_a_folder_that_cannot_be_locked_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ValueError, match="must be a folder, got the file"),
        locked_folder(tmp_path / "file"),
    ):
        pass


def test_a_new_folder_gets_all_files_at_once_or_none(tmp_path):
    out = tmp_path / "out"

    def fail():
        with atomic_folder(out) as unfinished:
            (unfinished / "a").write_text("1")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not list(tmp_path.iterdir())
    out.mkdir()
    with atomic_folder(out) as unfinished:
        (unfinished / "sub").mkdir()
        (unfinished / "sub/a").write_text("1")
        assert not list(out.iterdir())
    assert (out / "sub/a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # default permissions, not those of a temporary folder for one user
    (tmp_path / "plain").mkdir()
    assert out.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_with_files_keeps_those_that_are_not_replaced(tmp_path):
    (tmp_path / "mine").write_text("x")
    (tmp_path / "old").write_text("x")
    with atomic_folder(tmp_path) as unfinished:
        (unfinished / "old").write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "mine": "x",
        "old": "new",
    }


def test_the_second_of_two_writers_to_a_new_folder_is_refused(tmp_path):
    out = tmp_path / "out"

    def write_both():
        with atomic_folder(out) as second:
            with atomic_folder(out) as first:
                (first / "a").write_text("first")
            (second / "a").write_text("second")

    with pytest.raises(ValueError, match="must be new or empty, but another command has written"):
        write_both()
    assert (out / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def toy():
    tokenizer = make_tokenizer()
    return make_model(tokenizer), tokenizer


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(train_toys.toy_config(corpus, folder))
    return folder


def to_ctranslate2(model, tokenizer, folder):
    from vanilla_transformer.export.ctranslate2 import to_ctranslate2

    to_ctranslate2(model, tokenizer, folder)


WRITERS = {
    "marian": lambda toy, run, out: to_marian(*toy, out, num_positions=60),
    "ctranslate2": lambda toy, run, out: to_ctranslate2(*toy, out),
    "publish": lambda toy, run, out: export_for_hub(run, out),
}


@contextlib.contextmanager
def full_disk_after(call, monkeypatch):
    """Let fsync fail after a number of calls."""
    calls, real = [], os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > call:
            raise OSError(28, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        yield


@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_nothing_and_the_next_try_works(
    toy, run, tmp_path, monkeypatch, writer, call
):
    out = tmp_path / "out"
    with (
        full_disk_after(call, monkeypatch),
        pytest.raises(
            OSError,
            match=rf"{out} cannot be written \(.* kB free\), and all unfinished files were removed",
        ),
    ):
        WRITERS[writer](toy, run, out)
    assert not list(tmp_path.iterdir())
    WRITERS[writer](toy, run, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("library", ["torch", "safetensors"])
def test_the_error_of_a_library_on_a_full_disk_is_recognized(tmp_path, library):
    code = """
import resource, signal, sys, torch
from safetensors.torch import save_file
from vanilla_transformer.atomic_files import is_disk_full
# as on a full disk: no file may grow beyond some kilobytes
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
save = {"torch": torch.save, "safetensors": save_file}[sys.argv[1]]
try:
    save({"weight": torch.zeros(10_000)}, sys.argv[2])
except Exception as error:
    assert not isinstance(error, OSError)
    assert is_disk_full(error), error
    print("recognized")
"""
    command = [sys.executable, "-c", code, library, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "recognized\n"


def test_the_error_of_torchs_streams_is_recognized():
    # torch raises this error at the end of a file that does not fit into a tmpfs
    assert is_disk_full(RuntimeError("basic_ios::clear: iostream error"))


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), PermissionError(13, "denied")])
def test_another_error_is_not_a_full_disk(error):
    assert not is_disk_full(error)


@pytest.mark.parametrize("call", range(0, 12, 2))
def test_a_failed_average_leaves_a_consistent_model(run, tmp_path, monkeypatch, call):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    with full_disk_after(call, monkeypatch), pytest.raises(OSError, match="No space left"):
        average_run(copy, num_checkpoints=1)
    before, left = train_toys.weights(run), train_toys.weights(copy)
    is_new = any(not (before[name] == left[name]).all() for name in before)
    # no average is claimed for weights without a note
    said = (copy / "average.json").read_text() if (copy / "average.json").exists() else None
    assert said in ([None] if is_new else [None, (run / "average.json").read_text()])
    load_run(copy)
    assert average_run(copy, num_checkpoints=1) == "the mean of 1 checkpoint, of step 12"
    assert not list(copy.glob(".*"))


LINKS = (
    *("recipe.yaml", "environment.txt", "metrics.jsonl", "config.json", "model.safetensors"),
    *("average.json", "scores.json", "README.md", "tokenizer.json", ".lock"),
    *("checkpoints", "tokenizer", "pictures", "hypotheses", "trackers"),
    "trackers/wandb",
    *("checkpoints/step-12", "pictures/loss.png", "hypotheses/test.source.txt"),
    *("checkpoints/.step-16.unfinished", ".model.unfinished", ".metrics.jsonl.unfinished"),
)


def content(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.usefixtures("new_process")
def test_no_command_writes_through_a_link_of_a_run_folder(run, tmp_path, name, monkeypatch):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    outside = tmp_path / "outside"
    outside.mkdir()
    link = copy / name
    if link.exists():
        shutil.move(link, outside / "it")
    elif "unfinished" in name:
        (outside / "it").mkdir()
        (outside / "it" / "mine").write_text("mine")
    else:
        (outside / "it").write_text("mine")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside / "it")
    before = content(outside)
    recipe = str(run / "recipe.yaml")
    for arguments in (
        ["average", str(copy)],
        ["evaluate", str(copy)],
        ["train", recipe, "--output_dir", str(copy), "--resume", "--max_steps", "14"],
    ):
        assert main(arguments) in (0, 1)
        assert content(outside) == before, arguments


def test_a_run_is_resumed_although_a_tracker_made_links_in_its_own_folder(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    logs = copy / "trackers/wandb/offline-run-1/logs"
    logs.mkdir(parents=True)
    (copy / "trackers/wandb/latest-run").symlink_to("offline-run-1")
    (logs / "debug-core.log").symlink_to(tmp_path / "debug-core.log")
    assert main(["train", str(copy / "recipe.yaml"), "--output_dir", str(copy), "--resume"]) == 0


def test_the_target_of_a_link_is_not_published(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (copy / "environment.txt").unlink()
    (copy / "environment.txt").symlink_to(secret)
    with pytest.raises(ValueError, match=r"environment\.txt is a link to .*secret, outside of"):
        export_for_hub(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_in_the_folder_of_a_tracker_do_not_prevent_publication(toy, tmp_path):
    run, secret = tmp_path / "run", tmp_path / "secret"
    for part in toy:
        part.save_pretrained(run)
    secret.write_text("mine")
    logs, other = run / "trackers/wandb/run-1/logs", run / "hypotheses/trackers"
    logs.mkdir(parents=True)
    # W&B makes a link to a log in the home folder
    (logs / "debug-core.log").symlink_to(secret)
    export_for_hub(run, tmp_path / "out")
    assert not (tmp_path / "out/trackers").exists()
    other.mkdir(parents=True)
    (other / "log").symlink_to(secret)
    with pytest.raises(ValueError, match=r"log is a link to .*secret, outside of"):
        export_for_hub(run, tmp_path / "again")


def test_a_model_in_the_cache_of_the_hub_is_published_though_its_files_are_links(run, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1234", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in run.iterdir():
        if path.is_file():
            shutil.copyfile(path, blobs / path.name)
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    export_for_hub(snapshot, tmp_path / "out")
    load_run(tmp_path / "out")
