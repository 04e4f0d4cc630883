"""Every command block of the README, run as it is written, in a folder with a small `runs/demo`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from document_blocks import ROOT, SMALL, TRAINING, blocks, commands, train_small_demo
from hub_stand_in import running_hub

BLOCKS = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "bash", "python")

PAIRS = [{"de": f"Satz {i} ist kurz.", "en": f"Sentence {i} is short."} for i in range(40)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder and an environment of someone who has run the demo, before a Hub of their own."""
    folder = tmp_path_factory.mktemp("reader")
    train_small_demo(folder)
    texts = folder / "my" / "texts"
    texts.mkdir(parents=True)
    for split in ("train", "validation"):
        for language in ("de", "en"):
            lines = "".join(f"{pair[language]}\n" for pair in PAIRS)
            (texts / f"{split}.{language}").write_text(lines, encoding="utf-8")
    with running_hub() as hub:
        environment = {**os.environ, **hub.environment(folder / "home")}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment["HF_DATASETS_CACHE"] = str(folder / "cache")
        put_wmt14(hub, folder / "wmt14")
        yield folder, environment


def put_wmt14(hub, folder):
    """A corpus in the schema and under the name of WMT14's."""
    names = {"de-en": "de", "fr-en": "fr"}
    for name, other in names.items():
        (folder / name).mkdir(parents=True)
        # other sentences than those of the texts that it is mixed with
        rows = [
            {"translation": {other: f"Zeile {i}: sie ist lang.", "en": f"Line {i}: it is long."}}
            for i in range(40)
        ]
        # newstest2013 and newstest2014 have so many lines, and nothing else is taken for them
        for split, count in (("train", 40), ("validation", 3000), ("test", 3003)):
            lines = [json.dumps(rows[i % 40]) + "\n" for i in range(count)]
            (folder / name / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in names)
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    hub.add_folder("wmt/wmt14", folder, "datasets")


def shortened(command):
    """A command as it is tested: trainings get small, make is asked what it would do."""
    if command.startswith("make "):
        return f"make -C {ROOT} -n -o .venv/.ready {command.removeprefix('make ')}"
    if TRAINING.search(command):
        return f"{command} {' '.join(map(repr, SMALL))}"
    if command.startswith("vanilla-transformer paper positions"):
        return f"{command} --no_train"
    if command.startswith("vanilla-transformer space"):
        # it serves until it is interrupted; tests/test_space.py uses it in a browser
        return f"{command} --help"
    if "fine_tune" in command:
        return f"{command} --max_steps 2"
    return command


def test_the_readme_has_its_blocks():
    assert len(BLOCKS) >= 12
    every = "\n".join(text for _, text in BLOCKS)
    for needed in ("make demo", "train paper-base", "accelerate launch", "fine_tune", "push"):
        assert needed in every


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_readme_runs(number, reader):
    folder, environment = reader
    language, block = BLOCKS[number]
    if language == "python":
        code = block
        if 'model="user/name"' in block:
            # the block before it has published this
            assert (folder / "published").exists()
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return
    for command in commands(block):
        done = subprocess.run(
            ["bash", "-ec", shortened(command)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        if " push " in command:
            (folder / "published").touch()
