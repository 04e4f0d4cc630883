"""A stranger's folder: no verb runs code that a file in it names, or makes what it cannot hold."""

import builtins
import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_toys
import yaml

from vanilla_transformer.cli import main
from vanilla_transformer.console import run_command
from vanilla_transformer.hub import AUTO_CLASS, export_for_hub
from vanilla_transformer.space.app import _load
from vanilla_transformer.train.fine_tune import main as fine_tune
from vanilla_transformer.train.loop import train

# what a user may have typed ahead, or a text that is piped in
STDIN = "y\n1\n"
TRUST = "--trust_remote_code"


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert train(train_toys.toy_config(corpus, folder, ema_decay=0.9))
    return folder


class Canary:
    """Code that leaves a file when it is run, and the files that name it."""

    def __init__(self, folder: Path):
        self.marker = folder / "has-run"

    @property
    def code(self) -> str:
        return f"import pathlib\npathlib.Path({str(self.marker)!r}).touch()\n"

    def __reduce__(self):
        return exec, (self.code,)

    def modules(self, *folders: Path):
        """Write `evil.py`, with a class for each name that a file may give."""
        classes = "".join(f"class {name}: pass\n" for name in ("Model", "Config", "Tokenizer"))
        for folder in folders:
            (folder / "evil.py").write_text(self.code + classes, encoding="utf-8")


def edit(path: Path, **entries):
    """Change entries of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(content | entries), encoding="utf-8")


def model_folders(run: Path) -> list[Path]:
    return [run, *(run / "checkpoints").glob("step-*")]


def plant_unknown_type(run: Path, canary: Canary):
    for folder in model_folders(run):
        canary.modules(folder)
        names = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", AUTO_CLASS: "evil.Model"}
        edit(folder / "config.json", model_type="evil", auto_map=names)


def plant_unknown_type_alone(run: Path, canary: Canary):
    for folder in model_folders(run):
        canary.modules(folder)
        edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})


def plant_model(run: Path, canary: Canary):
    for folder in model_folders(run):
        canary.modules(folder)
        edit(folder / "config.json", auto_map={AUTO_CLASS: "evil.Model"})


def plant_other_configuration(run: Path, canary: Canary):
    for folder in model_folders(run):
        canary.modules(folder)
        edit(folder / "config.json", auto_map={"AutoConfig": "evil.Config"})


def plant_changed_package(run: Path, canary: Canary):
    for folder in model_folders(run):
        for name in ("modeling", "configuration"):
            (folder / f"{name}_vanilla_transformer.py").write_text(canary.code, encoding="utf-8")
        address = "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration"
        edit(folder / "config.json", auto_map={AUTO_CLASS: address})


def plant_tokenizer(run: Path, canary: Canary):
    for folder in (run, run / "tokenizer"):
        canary.modules(folder)
        code = {"AutoTokenizer": ["evil.Tokenizer", None]}
        edit(folder / "tokenizer_config.json", auto_map=code, tokenizer_class="Evil")


def plant_tokenizer_list(run: Path, canary: Canary):
    for folder in (run, run / "tokenizer"):
        canary.modules(folder)
        code = ["evil.Tokenizer", "evil.Tokenizer"]
        edit(folder / "tokenizer_config.json", auto_map=code, tokenizer_class="Evil")
    edit(
        run / "tokenizer" / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"}
    )


def plant_generation(run: Path, canary: Canary):
    for folder in model_folders(run):
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(
            f"{canary.code}def generate(*args, **kwargs): pass\n", encoding="utf-8"
        )
        edit(folder / "generation_config.json", custom_generate=str(folder))


def plant_pipeline(run: Path, canary: Canary):
    for folder in model_folders(run):
        canary.modules(folder)
        pipelines = {"translation": {"impl": "evil.Model", "pt": [AUTO_CLASS]}}
        edit(folder / "config.json", custom_pipelines=pipelines)


def plant_adapter(run: Path, canary: Canary):
    for folder in model_folders(run):
        canary.modules(folder)
        entries = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 2}
        names = {"base_model_class": "Model", "parent_library": "evil"}
        names |= {"megatron_core": "evil", "megatron_config": {}}
        edit(folder / "adapter_config.json", **entries, auto_mapping=names, target_modules=["fc1"])


def plant_adapter_alone(run: Path, canary: Canary):
    plant_adapter(run, canary)
    for folder in model_folders(run):
        (folder / "config.json").unlink()


def plant_pickled_weights(run: Path, canary: Canary):
    for folder in model_folders(run):
        (folder / "model.safetensors").unlink()
        for name in ("pytorch_model.bin", "model.safetensors", "ema.safetensors"):
            torch.save({"lm_head.weight": canary}, folder / name)
        (folder / "model.safetensors").unlink()
        forget_sizes(folder)


def plant_pickled_optimizer(run: Path, canary: Canary):
    for folder in model_folders(run):
        torch.save({"optimizer": canary}, folder / "optimizer.pt")
        forget_sizes(folder)
    (run / "training_args.bin").write_bytes(pickle.dumps(canary))


def forget_sizes(folder: Path):
    """What a checkpoint notes of its files is a stranger's too."""
    if (folder / "state.json").is_file():
        names = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        edit(folder / "state.json", sizes={it: names[it] for it in names if it != "state.json"})


def plant_kernel(run: Path, canary: Canary):
    for folder in model_folders(run):
        edit(folder / "config.json", attn_implementation="somebody/evil")


def plant_model_class(run: Path, canary: Canary):
    canary.modules(*model_folders(run))
    edit_recipe(run, model_class=f"{run}/evil.py:Model")


def plant_auto_class(run: Path, canary: Canary):
    """The library's Auto classes run the code that a folder names."""
    name = "AutoModelForImageClassification"
    for folder in model_folders(run):
        canary.modules(folder)
        code = {name: "evil.Model"}
        edit(folder / "config.json", model_type="marian", architectures=[name], auto_map=code)
    edit_recipe(run, model_class=f"transformers:{name}")


def edit_recipe(run: Path, **settings):
    path = run / "recipe.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8")) | settings
    path.write_text(yaml.safe_dump(content), encoding="utf-8")


def plant_dataset(run: Path, canary: Canary):
    folder = run / "corpus"
    folder.mkdir()
    for name in ("corpus.py", "dataset.py", "train.py"):
        (folder / name).write_text(canary.code, encoding="utf-8")
    for name in ("train.pkl", "validation.pkl", "train.pickle"):
        (folder / name).write_bytes(pickle.dumps(canary))
    edit_recipe(run, dataset=str(folder))


PLANTS = [it for name, it in list(globals().items()) if name.startswith("plant_")]


def verbs(run: Path, corpus: Path, new: Path) -> dict:
    """A call for each verb that takes a folder or a recipe from somebody else."""
    lines = new / "lines.txt"
    lines.write_text("ant bee\n", encoding="utf-8")
    recipe, out = str(run / "recipe.yaml"), ["--output_dir"]
    toy = train_toys.toy_settings(corpus, new / "own", max_steps=1)
    own = str(train_toys.write_recipe(new / "own.yaml", toy))
    tokenizer = ["--tokenizer", str(run / "tokenizer")]
    data = ["--dataset", str(corpus), "--source_lang", "en", "--target_lang", "de"]
    words = {
        "tokenize": ["tokenize", recipe, *out, str(new / "tokenize")],
        "train": ["train", recipe, "--max_steps", "1", *out, str(new / "train")],
        "dry_run": ["train", recipe, "--dry_run"],
        "resume": ["train", recipe, "--resume", "--max_steps", "13", *out, str(run)],
        "resume own recipe": ["train", own, "--resume", "--max_steps", "13", *out, str(run)],
        "tokenizer": ["train", own, *tokenizer, *out, str(new / "tokenizer")],
        "tokenizer dry_run": ["train", own, *tokenizer, "--dry_run"],
        "average": ["average", str(run)],
        "average elsewhere": ["average", str(run), *out, str(new / "average")],
        "average ema": ["average", str(run), "--ema", *out, str(new / "ema")],
        "evaluate": ["evaluate", str(run)],
        "evaluate checkpoint": ["evaluate", str(run / "checkpoints" / "step-12"), *data],
        "translate": ["translate", str(run), str(lines)],
        "translate stdin": ["translate", str(run)],
        "translate checkpoint": ["translate", str(run / "checkpoints" / "step-12"), str(lines)],
        "convert marian": ["convert", "marian", str(run), str(new / "from-marian")],
        "convert fsmt": ["convert", "fsmt", str(run), str(new / "from-fsmt")],
        "convert fairseq": [
            *("convert", "fairseq", str(run / "checkpoints" / "step-12" / "optimizer.pt")),
            str(new / "from-fairseq"),
        ],
        "convert opennmt": [
            *("convert", "opennmt", str(run / "pytorch_model.bin"), str(new / "from-opennmt")),
        ],
        "export marian": ["export", "marian", str(run), str(new / "marian")],
        "export ctranslate2": ["export", "ctranslate2", str(run), str(new / "ctranslate2")],
        "paper attention": [
            *("paper", "attention", "--model", str(run), "--sentence", "ant bee"),
            *(*out, str(new / "attention")),
        ],
        "paper curve": ["paper", "curve", str(run), *out, str(new / "curve")],
    }
    calls = {name: lambda it=it: main(it) for name, it in words.items()}
    tuning = ["--do_train", "--max_steps", "1", "--report_to", "none", "--use_cpu"]
    tuning += ["--source_lang", "en", "--target_lang", "de", *out, str(new / "tuned")]
    calls["fine_tune"] = lambda: fine_tune([str(run), *data, *tuning])
    calls["push"] = lambda: run_command(lambda: export_for_hub(run, new / "published"))
    calls["space"] = lambda: run_command(lambda: _load(str(run)) and None)
    return calls


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """A process in which nobody may ask, and which finds what lies in its folder."""

    def asked(prompt=""):
        raise AssertionError(f"a user was asked: {prompt}")

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.chdir(tmp_path)
    _load.cache_clear()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.removeprefix("plant_"))
@pytest.mark.usefixtures("quiet", "new_process")
def test_no_verb_runs_code_that_a_folder_names(plant, run, corpus, tmp_path, monkeypatch, capsys):
    canary = Canary(tmp_path)
    for name in verbs(run, corpus, tmp_path):
        new = tmp_path / name.replace(" ", "-")
        new.mkdir()
        stranger = Path(shutil.copytree(run, new / "stranger"))
        edit_recipe(stranger, output_dir=str(stranger))
        plant(stranger, canary)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(STDIN.encode())))
        import time

        began = time.time()  # DEBUG
        code = verbs(stranger, corpus, new)[name]()
        said = capsys.readouterr().err
        assert not canary.marker.exists(), name
        assert code in (0, 1), name
        assert code == 0 or said.count("error: ") == 1, (name, said)
        with open("/tmp/trust.log", "a") as log:  # DEBUG
            print(
                plant.__name__,
                "|",
                name,
                "|",
                round(time.time() - began, 2),
                code,
                said[said.find("error: ") :][:330] if code else "",
                file=log,
            )  # DEBUG
