"""Pairs of commands in one folder: one fails with a sentence, or both succeed."""

import itertools
import json
import random
import shutil
import time

import forked
import pytest
import torch
import train_toys

from vanilla_transformer import cli
from vanilla_transformer.loading import load_run
from vanilla_transformer.train.averaging import average_weights
from vanilla_transformer.train.loop import train

pytestmark = pytest.mark.usefixtures("new_process")

STEPS = 12
# refusals of a command if another one holds the folder, or has written to it already
REFUSALS = ("is in use by another command", "must be new", "must be a new or an empty folder")


def run_both(commands, offset, folder):
    """Start two commands, some seconds apart; return their exit statuses and output."""
    said = [folder / f"{number}.txt" for number in range(2)]
    processes = []
    for arguments, place in zip(commands, said, strict=True):
        processes.append(forked.begin(cli.main, arguments, said=str(place)))
        time.sleep(0 if len(processes) == 2 else offset)
    for process in processes:
        process.join(300)
    return [it.exitcode for it in processes], [path.read_text() for path in said]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """Finished run with three checkpoints, and its recipe."""
    folder = tmp_path_factory.mktemp("finished")
    settings = train_toys.toy_settings(corpus, folder / "run", num_averaged_checkpoints=3)
    settings["dataset"] = str(corpus)
    recipe = train_toys.write_recipe(folder / "toy.yaml", settings)
    assert train(train_toys.load_config(str(recipe)))
    return folder / "run", recipe


def commands_of(recipe, run, out):
    """Commands by name: on a new run, on a finished run, and into a new folder."""
    new = ["--output_dir", str(run)]
    return {
        "begun": {
            "train": ["train", str(recipe), *new],
            "resume": ["train", str(recipe), *new, "--resume"],
            "train of another seed": ["train", str(recipe), *new, "--seed", "2"],
            "tokenize": ["tokenize", str(recipe), *new],
            "tokenize with another seed": ["tokenize", str(recipe), *new, "--seed", "2"],
        },
        "finished": {
            "train on": ["train", str(recipe), *new, "--resume", "--max_steps", str(STEPS + 4)],
            "average of 1": ["average", str(run), "--num_checkpoints", "1"],
            "average of 3": ["average", str(run), "--num_checkpoints", "3"],
            "average elsewhere": ["average", str(run), "--output_dir", str(out)],
            "evaluate": ["evaluate", str(run)],
            "evaluate validation": ["evaluate", str(run), "--split", "validation"],
        },
        "out": {
            "marian": ["export", "marian", str(run), str(out), "--num_positions", "60"],
            "marian of 40": ["export", "marian", str(run), str(out), "--num_positions", "40"],
            "average elsewhere": ["average", str(run), "--output_dir", str(out)],
        },
    }


def check_run(run):
    """Check that the model is the mean of its recorded checkpoints, or that there is none."""
    assert not [path.name for path in run.glob(".*")]
    if not (run / "model.safetensors").is_file():
        return
    load_run(run)
    steps = json.loads((run / "average.json").read_text())["steps"]
    places = [run / "checkpoints" / f"step-{step}" for step in steps]
    if all(place.is_dir() for place in places):
        expected = average_weights(places)
        for name, tensor in train_toys.weights(run).items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_two_commands_in_one_folder_lose_nothing(corpus, finished, tmp_path, count):
    whole, recipe = finished
    rng = random.Random(count)
    kinds = commands_of(recipe, None, None)
    pairs = [(kind, *pair) for kind in kinds for pair in itertools.product(kinds[kind], repeat=2)]
    rng.shuffle(pairs)
    refused = 0
    for number, (kind, *names) in enumerate(itertools.islice(itertools.cycle(pairs), count)):
        place = tmp_path / str(number)
        place.mkdir()
        run, out = place / "run", place / "out"
        if kind != "begun":
            shutil.copytree(whole, run)
        commands = commands_of(recipe, run, out)[kind]
        offset = rng.uniform(0, 2.5)
        statuses, said = run_both([commands[name] for name in names], offset, place)
        where = f"{names}, {offset:.2f} s apart: {said}"
        assert statuses in ([0, 0], [0, 1], [1, 0]), where
        for status, text in zip(statuses, said, strict=True):
            assert "Traceback" not in text, where
            if status:
                refused += 1
                assert any(refusal in text.splitlines()[-1] for refusal in REFUSALS), where
        if kind == "begun":
            # the first command can always be completed, with the result of an undisturbed run
            seed = 2 if "another seed" in names[statuses.index(0)] else 1
            config = train_toys.load_config(str(recipe), {"output_dir": str(run), "seed": seed})
            assert train(config, resume=True) or (run / "model.safetensors").is_file()
            if seed == 1:
                train_toys.assert_same_bits(run, whole)
        check_run(run)
        if (out / "config.json").is_file():
            assert not [path.name for path in place.glob(".*")]
        shutil.rmtree(place)
    assert refused, "no two commands met"
