"""Runs that are killed, stopped or out of disk space, and then resume."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import train_toys
import yaml
from accelerate.state import AcceleratorState
from train_toys import FOREVER, curve, last_step, wait_until

from vanilla_transformer.console import sentence_of
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.recipe import load_config
from vanilla_transformer.train.run_folder.checkpoint import checkpoints, read_state, write_state
from vanilla_transformer.train.run_folder.environment import read_environment
from vanilla_transformer.train.run_folder.files import read_metrics

pytestmark = pytest.mark.usefixtures("new_process")


def unfinished_saves(folder):
    return list((folder / "checkpoints").glob(".step-*.unfinished"))


def epochs(folder):
    return max((line.get("epoch", 0) for line in read_metrics(folder)), default=0)


def cut_epochs(folder):
    """Return the first steps of all starts of a run, except those that begin an epoch."""
    if epochs(folder) == 0:
        return []
    steps_per_epoch = round(last_step(folder) / epochs(folder))
    said = (folder / "environment.txt").read_text(encoding="utf-8").splitlines()
    first_steps = [int(line.split()[1]) for line in said if "first_step" in line]
    return [step for step in first_steps if (step - 1) % steps_per_epoch]


def kill_at_a_random_instant(process, folder, rng, in_a_save):
    """Send SIGKILL at a random time, or while a checkpoint is written."""
    before = last_step(folder)
    # what a killed save left is there until the next save removes it
    seen = {path.name for path in unfinished_saves(folder)}
    if in_a_save:
        wait_until(
            lambda: {path.name for path in unfinished_saves(folder)} - seen, process, seconds=300
        )
        time.sleep(rng.uniform(0, 0.02))
    else:
        if rng.random() < 0.8:
            wait_until(lambda: last_step(folder) > before, process, seconds=300)
        time.sleep(rng.uniform(0, 0.5))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("kills", "num_workers"),
    [
        (3, 2),
        pytest.param(20, 0, marks=pytest.mark.slow),
        pytest.param(20, 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_again_and_again_ends_as_one_never_killed(
    corpus, tmp_path, start, kills, num_workers
):
    folder = tmp_path / "run"
    settings = {"save_every_steps": 3, "eval_every_steps": 50, "num_workers": num_workers}
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml",
        train_toys.toy_settings(corpus, folder, max_steps=FOREVER, **settings),
    )
    rng = random.Random(kills)
    number = torn = 0
    # more often where chance wants it: a save must be torn, an epoch be cut, and another begun
    while number < kills or not torn or not cut_epochs(folder) or epochs(folder) <= 1:
        process = start(recipe, "--resume")
        kill_at_a_random_instant(process, folder, rng, in_a_save=number % 3 == 1)
        torn += bool(unfinished_saves(folder))
        number += 1
    reached = last_step(folder)
    # the toy is fast: how far it comes is known only now
    end = reached + 4
    resumed = train_toys.toy_config(corpus, folder, max_steps=end, **settings)
    whole = train_toys.toy_config(corpus, tmp_path / "never", max_steps=end, **settings)
    assert train(resumed, resume=True)
    assert train(whole)
    for part in ("", f"checkpoints/step-{end}"):
        train_toys.assert_same_bits(folder / part, tmp_path / "never" / part)
    assert curve(folder) == curve(tmp_path / "never")
    assert not unfinished_saves(folder)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_is_asked_to_end_saves_first(corpus, tmp_path, start, num_workers):
    folder = tmp_path / "run"
    settings = {"save_every_steps": FOREVER, "num_workers": num_workers}
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml",
        train_toys.toy_settings(corpus, folder, max_steps=FOREVER, **settings),
    )
    process = start(recipe)
    wait_until(lambda: last_step(folder) >= 2, process)
    # its workers too, as a launcher does
    os.killpg(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    (saved,) = checkpoints(folder / "checkpoints")
    assert (
        f"SIGTERM: {saved.name.replace('-', ' ')} is saved. To resume, add --resume to the command."
        in stderr
    )
    assert not (folder / "model.safetensors").exists()


def test_processes_that_are_asked_to_stop_save_together_and_resume(corpus, tmp_path, start):
    folder = tmp_path / "run"
    settings = {"eval_every_steps": 50, "save_every_steps": FOREVER}
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml",
        train_toys.toy_settings(corpus, folder, max_steps=FOREVER, **settings),
    )
    process = start(recipe, processes=2)
    wait_until(lambda: last_step(folder) >= 2, process)
    # as a scheduler of jobs does: the launcher passes it on
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode != 0
    (saved,) = checkpoints(folder / "checkpoints")
    step = int(saved.name.split("-")[1])
    # after the traceback of the launcher
    assert (
        stderr.strip().splitlines()[-1]
        == f"SIGTERM: step {step} is saved. To resume, add --resume to the command."
    )
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    end = step + 4
    for name in ("run", "never"):
        config = train_toys.toy_settings(corpus, tmp_path / name, max_steps=end, **settings)
        recipe = train_toys.write_recipe(tmp_path / f"{name}.yaml", config)
        train_toys.run_command(recipe, "--resume", processes=2)
    train_toys.assert_same_bits(folder, tmp_path / "never")
    assert curve(folder) == curve(tmp_path / "never")


@pytest.fixture
def small_disk(tmp_path):
    """File system of some megabytes, if this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let root mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def last_words(recipe):
    """Return the error of a run that fails."""
    ended = subprocess.run(
        train_toys.command(recipe, "--resume"),
        env=train_toys.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_the_last_checkpoint_is_good(corpus, tmp_path, small_disk):
    folder = small_disk / "run"
    train(train_toys.toy_config(corpus, folder, max_steps=5))
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step-4", "step-5"]
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", train_toys.toy_settings(corpus, folder))
    ballast = small_disk / "ballast"
    status = os.statvfs(small_disk)
    # room for some lines of the log and half a checkpoint
    ballast.write_bytes(bytes(status.f_bavail * status.f_frsize - 200_000))
    last = last_words(recipe)
    assert last.startswith(f"error: checkpoint {folder}/checkpoints/step-8 cannot be written (")
    assert f"{folder}/checkpoints/step-5 is intact" in last
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step-4", "step-5"]
    assert not unfinished_saves(folder)
    # fill the disk, so that not even a line can be written
    with contextlib.suppress(OSError), ballast.open("ab") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    last = last_words(recipe)
    assert last.startswith(f"error: {folder} cannot be written (0 kB free), step-5 is intact: ")
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step-4", "step-5"]
    ballast.unlink()
    train_toys.run_command(recipe, "--resume")
    train(train_toys.toy_config(corpus, tmp_path / "never"))
    train_toys.assert_same_bits(
        folder / "checkpoints/step-12", tmp_path / "never/checkpoints/step-12"
    )


def test_a_file_that_cannot_grow_stops_the_run_and_the_last_checkpoint_is_good(corpus, tmp_path):
    folder = tmp_path / "run"
    train(train_toys.toy_config(corpus, folder, max_steps=4))
    size = (folder / "checkpoints/step-4/model.safetensors").stat().st_size
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", train_toys.toy_settings(corpus, folder))
    code = f"""
import resource, sys
from vanilla_transformer.train.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({size - 1000}, {size - 1000}))
sys.exit(main([{str(recipe)!r}, "--resume"]))
"""
    full = subprocess.run(
        [sys.executable, "-c", code],
        env=train_toys.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert full.returncode == 1
    last = full.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: checkpoint {folder}/checkpoints/step-8 cannot be written (")
    assert f"{folder}/checkpoints/step-4 is intact" in last
    assert train(train_toys.toy_config(corpus, folder), resume=True)
    train(train_toys.toy_config(corpus, tmp_path / "never"))
    train_toys.assert_same_bits(folder, tmp_path / "never")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Separate corpus, and a run on it that has only begun."""
    corpus = train_toys.write_corpus(tmp_path_factory.mktemp("own") / "corpus")
    folder = corpus.parent / "run"
    AcceleratorState._reset_state(reset_partial_state=True)
    train(train_toys.toy_config(corpus, folder, max_steps=2))
    return corpus, folder


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"tokens_per_step": 400}, "tokens_per_step was 300, got 400"),
        ({"length_groups_per_step": 2}, "length_groups_per_step was 3, got 2"),
        ({"max_length": 50}, "max_length was 60, got 50"),
        ({"seed": 2}, "seed was 1, got 2"),
        ({"model": {"dropout": 0.3}}, "model was .*, got .*'dropout': 0.3"),
        ({"vocab_size": 280}, "vocab_size was 290, got 280"),
        ({"target_lang": "en", "source_lang": "de"}, "source_lang was 'en', got 'de'"),
    ],
)
def test_another_run_is_not_taken_for_the_same(begun, changed, difference):
    corpus, folder = begun
    before = (folder / "recipe.yaml").read_bytes()
    with pytest.raises(ValueError, match=f"resumed with its own settings: .*{difference}"):
        train(train_toys.toy_config(corpus, folder, **changed), resume=True)
    assert (folder / "recipe.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"seed": 2}, "seed was 1, got 2"),
        ({"drop_duplicates": True}, "drop_duplicates was False, got True"),
        ({"ema_decay": 0.9}, "ema_decay was None, got 0.9"),
        ({"model": {"dropout": 0.5}}, "model was .*, got .*'dropout': 0.5"),
        ({"vocab_size": 280}, "vocab_size was 290, got 280"),
        ({"tokenizer": "elsewhere"}, "tokenizer was None, got 'elsewhere'"),
    ],
)
def test_an_edited_recipe_of_the_run_is_compared_with_the_settings_of_its_checkpoint(
    begun, tmp_path, changed, difference
):
    _, before = begun
    folder = Path(shutil.copytree(before, tmp_path / "run"))
    config = edited_recipe(folder, **changed)
    with pytest.raises(ValueError, match=f"resumed with its own settings: .*{difference}"):
        train(config, resume=True)


def edited_recipe(folder, **changes):
    """Change settings in the recipe of a run, as in an editor, and return all of its settings."""
    recipe = folder / "recipe.yaml"
    settings = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    changes["model"] = settings["model"] | changes.get("model", {})
    train_toys.write_recipe(recipe, settings | changes | {"output_dir": str(folder)})
    return load_config(recipe)


def test_an_edited_setting_of_the_steps_is_recorded(begun, tmp_path):
    _, before = begun
    folder = Path(shutil.copytree(before, tmp_path / "run"))
    state = read_state(folder / "checkpoints/step-2")
    assert state["settings"] == yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    train(edited_recipe(folder, label_smoothing=0.2, max_steps=3), resume=True)
    change = "max_steps 3 (was 2); label_smoothing 0.2 (was 0.1)"
    assert read_environment(folder)[-1]["changed"] == change
    assert read_state(folder / "checkpoints/step-3")["settings"]["label_smoothing"] == 0.2


def test_a_checkpoint_without_settings_resumes_with_the_recipe_of_its_run(begun, tmp_path):
    _, before = begun
    folder = Path(shutil.copytree(before, tmp_path / "run"))
    checkpoint = folder / "checkpoints/step-2"
    state = read_state(checkpoint)
    del state["settings"]
    write_state(checkpoint, state)
    train(edited_recipe(folder, max_steps=3), resume=True)
    assert read_state(folder / "checkpoints/step-3")["settings"]["max_steps"] == 3


def test_a_relative_corpus_is_explained_when_the_run_is_resumed_elsewhere(begun, tmp_path):
    _, before = begun
    folder = Path(shutil.copytree(before, tmp_path / "run"))
    # as if the training had been started where this path begins
    write_state(
        folder / "checkpoints/step-2",
        {**read_state(folder / "checkpoints/step-2"), "settings": None},
    )
    config = edited_recipe(folder, dataset="texts/of/mine")
    with pytest.raises(ValueError, match="got 'texts/of/mine': no such folder") as error:
        train(config, resume=True)
    said = sentence_of(error.value)
    assert f"({folder / 'recipe.yaml'} names this dataset; relative paths start from the" in said
    assert said.endswith(
        "run the command there, or give the path from here with --dataset or --mix)."
    )
    # here the user names the dataset
    config.dataset = "texts/of/others"
    with pytest.raises(ValueError, match="got 'texts/of/others': no such folder") as error:
        train(config, resume=True)
    assert "names this dataset" not in sentence_of(error.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([], "settings must be"),
        ({"sead": 1}, "sead is not a setting"),
        ({"seed": "x"}, "seed must"),
    ],
)
def test_wrong_settings_in_a_checkpoint_are_named(begun, tmp_path, settings, problem):
    corpus, before = begun
    folder = Path(shutil.copytree(before, tmp_path / "run"))
    checkpoint = folder / "checkpoints/step-2"
    write_state(checkpoint, read_state(checkpoint) | {"settings": settings})
    with pytest.raises(ValueError, match=problem) as error:
        train(train_toys.toy_config(corpus, folder), resume=True)
    assert str(checkpoint / "state.json") in sentence_of(error.value)


@pytest.mark.parametrize("resume", [False, True])
def test_the_model_of_another_run_is_not_trained_over(begun, tmp_path, resume):
    corpus, before = begun
    folder = Path(shutil.copytree(before, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints")
    found = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"must be new, .* with a config.json, which would be"):
        train(train_toys.toy_config(corpus, folder, max_steps=2), resume=resume)
    assert found == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_changed_word_makes_other_data(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=2))
    path = Path(corpus, "train.en")
    text = path.read_text(encoding="utf-8")
    assert "ant" in text
    path.write_text(text.replace("ant", "tan", 1), encoding="utf-8")
    with pytest.raises(ValueError, match=r"with its own data: .*text_sha256 was \w+, got \w+\.$"):
        train(train_toys.toy_config(corpus, tmp_path / "run"), resume=True)
