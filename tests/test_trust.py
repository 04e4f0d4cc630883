"""Folders of others: no command runs code that they name, or allocates sizes that they declare."""

import builtins
import io
import json
import pickle
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import train_toys
import yaml
from safetensors.torch import save_file

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer import sizes as sizing
from vanilla_transformer.cli import main
from vanilla_transformer.console import run_command
from vanilla_transformer.explainer.command import write_model
from vanilla_transformer.loading import AUTO_CLASS
from vanilla_transformer.paper.trained import load_trained
from vanilla_transformer.publishing import export_for_hub
from vanilla_transformer.serving.models import load_models
from vanilla_transformer.train.fine_tune import main as fine_tune
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.run_folder import checkpoint as checkpointing

# answers that a user may have typed ahead, or a text that is piped in
STDIN = "y\n1\n"
TRUST = "--trust_remote_code"
PEERS = Path(__file__).parent / "peers"


# commands that take seconds, and the stranger's file that they read
SLOW = {
    "train": ("model_class", "auto_class", "dataset"),
    "tokenizer": ("tokenizer", "tokenizer_list"),
    "paper attention": ("unknown_type", "model", "adapter", "generation"),
    "paper curve": ("model_class",),
    "explain": ("unknown_type", "model", "tokenizer", "generation"),
    "resume": ("unknown_type", "tokenizer", "pickled_weights", "pickled_optimizer", "model_class"),
    "resume own recipe": ("model_class", "auto_class", "pickled_optimizer"),
    "average": ("unknown_type", "tokenizer", "kernel", "pickled_weights", "model_class"),
    "average ema": ("adapter", "adapter_alone", "auto_class"),
}


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Finished run, with a Marian export in a subfolder."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert train(train_toys.toy_config(corpus, folder, ema_decay=0.9))
    assert main(["export", "marian", str(folder), str(folder / "marian")]) == 0
    return folder


class Canary:
    """Code that writes a file when it runs, and the files that name this code."""

    def __init__(self, folder: Path):
        self.marker = folder / "has-run"

    @property
    def code(self) -> str:
        return f"import pathlib\npathlib.Path({str(self.marker)!r}).touch()\n"

    def __reduce__(self):
        return exec, (self.code,)

    def modules(self, *folders: Path):
        """Write `evil.py`, with a class for each name that a file may use."""
        classes = "".join(f"class {name}: pass\n" for name in ("Model", "Config", "Tokenizer"))
        for folder in folders:
            (folder / "evil.py").write_text(self.code + classes, encoding="utf-8")


def edit(path: Path, **entries):
    """Change entries of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(content | entries), encoding="utf-8")


def model_folders(run: Path) -> list[Path]:
    return [run, run / "marian", *(run / "checkpoints").glob("step-*")]


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
    for folder in (run, run / "marian", run / "tokenizer"):
        canary.modules(folder)
        code = {"AutoTokenizer": ["evil.Tokenizer", None]}
        edit(folder / "tokenizer_config.json", auto_map=code, tokenizer_class="Evil")


def plant_tokenizer_list(run: Path, canary: Canary):
    for folder in (run, run / "marian", run / "tokenizer"):
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


def plant_pickled_optimizer(run: Path, canary: Canary):
    for folder in model_folders(run):
        torch.save({"optimizer": canary}, folder / "optimizer.pt")
    (run / "training_args.bin").write_bytes(pickle.dumps(canary))


def note_sizes(run: Path):
    """Update the digests of each checkpoint, as a stranger can."""
    for folder in (run / "checkpoints").glob("step-*"):
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = [path for path in folder.iterdir() if path.name != "state.json"]
        files = [path for path in files if path.is_file()]
        state["sizes"] = {path.name: path.stat().st_size for path in files}
        state["sha256"] = {path.name: checkpointing.sha256_of(path) for path in files}
        checkpointing.write_state(folder, state)


def plant_kernel(run: Path, canary: Canary):
    for folder in model_folders(run):
        edit(folder / "config.json", attn_implementation="somebody/evil")


def plant_model_class(run: Path, canary: Canary):
    canary.modules(*model_folders(run))
    edit_recipe(run, model_class=f"{run}/evil.py:Model")


def plant_auto_class(run: Path, canary: Canary):
    """Let the library's Auto classes run the code that a folder names."""
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


def commands(run: Path, corpus: Path, new: Path) -> dict:
    """Return a call of each command that reads a folder or a recipe of a stranger."""
    lines = new / "lines.txt"
    lines.write_text("ant bee\n", encoding="utf-8")
    recipe, out = str(run / "recipe.yaml"), ["--output_dir"]
    toy = train_toys.toy_settings(corpus, new / "own", max_steps=13, ema_decay=0.9)
    own = str(train_toys.write_recipe(new / "own.yaml", toy))
    tokenizer = ["--tokenizer", str(run / "tokenizer")]
    data = ["--dataset", str(corpus), "--source_lang", "en", "--target_lang", "de"]
    planted = run / "corpus" if (run / "corpus").is_dir() else corpus
    words = {
        "new": ["new", "mine", "--dataset", str(planted), *data[2:]],
        "tokenize": ["tokenize", recipe, *out, str(new / "tokenize")],
        "train": ["train", recipe, "--max_steps", "1", *out, str(new / "train")],
        "dry_run": ["train", recipe, "--dry_run"],
        "resume": ["train", recipe, "--resume", "--max_steps", "13", *out, str(run)],
        "resume own recipe": ["train", own, "--resume", "--max_steps", "13", *out, str(run)],
        "tokenizer": ["train", own, *tokenizer, *out, str(new / "tokenizer")],
        "tokenizer dry_run": ["train", own, *tokenizer, "--dry_run"],
        "average": ["average", str(run)],
        "average ema": ["average", str(run), "--ema", *out, str(new / "ema")],
        "evaluate": ["evaluate", str(run)],
        "evaluate checkpoint": ["evaluate", str(run / "checkpoints" / "step-12"), *data],
        "translate": ["translate", str(run), str(lines)],
        "translate stdin": ["translate", str(run)],
        "translate checkpoint": ["translate", str(run / "checkpoints" / "step-12"), str(lines)],
        "score": ["score", str(run), "--source", str(lines), "--target", str(lines)],
        "align": [
            *("align", str(run), "--source", str(lines), "--target", str(lines)),
            "--choose_heads",
        ],
        "distill": ["distill", str(run), *out, str(new / "distilled")],
        "back-translate": [
            *("back-translate", str(run), "--target", str(lines), *out, str(new / "back")),
        ],
        "convert marian": ["convert", "marian", str(run / "marian"), str(new / "from-marian")],
        "convert fsmt": ["convert", "fsmt", str(run), str(new / "from-fsmt")],
        "convert fairseq": [
            *("convert", "fairseq", str(run / "checkpoints" / "step-12" / "optimizer.pt")),
            str(new / "from-fairseq"),
        ],
        "convert opennmt": [
            *("convert", "opennmt", str(run / "pytorch_model.bin"), str(new / "from-opennmt")),
        ],
        "convert joeynmt": [
            *("convert", "joeynmt", str(run / "pytorch_model.bin"), str(new / "from-joeynmt")),
        ],
        "export marian": ["export", "marian", str(run), str(new / "marian")],
        "export ctranslate2": ["export", "ctranslate2", str(run), str(new / "ctranslate2")],
        "export transformersjs": ["export", "transformersjs", str(run), str(new / "javascript")],
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
    calls["push"] = lambda: run_command(lambda _: export_for_hub(run, new / "published"), [])
    calls["serve"] = lambda: run_command(lambda _: load_models([str(run)], False) and None, [])
    calls["explain"] = lambda: run_command(lambda _: write_model(str(run), new), [])
    calls["space"] = lambda: run_command(lambda _: load_trained(str(run)) and None, [])
    return calls


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """Forbid questions to the user, and change to the folder of the test."""

    def asked(prompt=""):
        raise AssertionError(f"a user was asked: {prompt}")

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.removeprefix("plant_"))
@pytest.mark.usefixtures("quiet", "new_process")
def test_no_command_runs_code_that_a_folder_names(
    plant, run, corpus, tmp_path, monkeypatch, capsys
):
    canary, kind = Canary(tmp_path), plant.__name__.removeprefix("plant_")
    for name in commands(run, corpus, tmp_path):
        if kind not in SLOW.get(name, [kind]):
            continue
        new = tmp_path / name.replace(" ", "-")
        new.mkdir()
        stranger = Path(shutil.copytree(run, new / "stranger"))
        edit_recipe(stranger, output_dir=str(stranger))
        plant(stranger, canary)
        note_sizes(stranger)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(STDIN.encode())))
        code = commands(stranger, corpus, new)[name]()
        said = capsys.readouterr().err
        assert not canary.marker.exists(), name
        assert code in (0, 1), name
        assert code == 0 or said.count("error: ") == 1, (name, said)
        # the error names the file and its code, and how to run the code
        if kind in ("unknown_type", "model") and name in ("translate stdin", "push", "space"):
            assert (
                "config.json refers to custom code, evil.py (class Model), which would be run."
                in said
            )
            assert TRUST in said


@pytest.mark.usefixtures("quiet")
def test_input_text_is_no_consent_to_run_code(run, tmp_path):
    stranger, canary = Path(shutil.copytree(run, tmp_path / "stranger")), Canary(tmp_path)
    plant_unknown_type(stranger, canary)
    plant_tokenizer(stranger, canary)
    result = subprocess.run(
        [sys.executable, "-m", "vanilla_transformer.cli", "translate", str(stranger)],
        input=STDIN,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert (
        "config.json refers to custom code, evil.py (class Model), which would be run."
        in result.stderr
    )
    assert "[y/N]" not in result.stderr
    assert not canary.marker.exists()


HUGE = [
    {"hidden_size": 10**7},
    {"vocab_size": 10**9},
    {"encoder_layers": 10**8},
    {"decoder_layers": 10**8},
    {"encoder_attention_heads": 10**8, "decoder_attention_heads": 10**8, "d_k": 2, "d_v": 2},
    {"encoder_ffn_dim": 10**9},
    {"decoder_ffn_dim": 10**9},
    {"d_k": 10**9},
    {"d_v": 10**9},
    {"position_encoding": "learned", "max_position_embeddings": 10**9},
]


@pytest.mark.parametrize("sizes", HUGE, ids=lambda sizes: next(iter(sizes)))
@pytest.mark.usefixtures("quiet")
def test_a_model_larger_than_its_files_is_not_built(sizes, run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sizing, "MOST_WEIGHTS", 10**30)
    stranger = Path(shutil.copytree(run, tmp_path / "stranger"))
    for folder in model_folders(stranger):
        if folder.name != "marian":
            edit(folder / "config.json", **sizes)
    note_sizes(stranger)
    calls = commands(stranger, tmp_path, tmp_path)
    began = time.perf_counter()
    for name in ("translate", "average ema", "export marian", "push", "space"):
        assert calls[name]() == 1
        said = capsys.readouterr().err
        assert (
            "config.json must declare the sizes of its weights" in said or "at most 1,000" in said
        )
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize(
    "sizes",
    [
        {"d_model": 10**7},
        {"vocab_size": 10**9},
        {"decoder_vocab_size": 10**9},
        {"encoder_layers": 10**8},
        {"decoder_ffn_dim": 10**9},
        {"max_position_embeddings": 10**9},
    ],
    ids=lambda sizes: next(iter(sizes)),
)
@pytest.mark.usefixtures("quiet")
def test_a_source_of_a_conversion_larger_than_its_files_is_not_built(sizes, run, tmp_path, capsys):
    stranger = Path(shutil.copytree(run / "marian", tmp_path / "marian"))
    edit(stranger / "config.json", **sizes)
    assert main(["convert", "marian", str(stranger), str(tmp_path / "out")]) == 1
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [it for it in HUGE if "vocab_size" not in it], ids=str)
@pytest.mark.usefixtures("quiet")
def test_a_recipe_of_an_impossible_model_is_refused_at_once(sizes, corpus, tmp_path, capsys):
    toy = train_toys.toy_settings(corpus, tmp_path / "run", model=sizes)
    words = ["train", str(train_toys.write_recipe(tmp_path / "toy.yaml", toy))]
    assert main(words) == 1
    assert "must" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    if "hidden_size" in sizes or "encoder_layers" in sizes:
        assert main([*words, "--dry_run"]) == 1
        assert "model: " in capsys.readouterr().err


@pytest.mark.usefixtures("quiet", "new_process")
def test_a_model_for_a_larger_machine_is_planned_but_not_trained(
    corpus, tmp_path, capsys, monkeypatch
):
    class Memory:
        total = 2 * 10**9

    monkeypatch.setattr(sizing.psutil, "virtual_memory", Memory)
    sizes = {"hidden_size": 4096, "encoder_ffn_dim": 16384, "decoder_ffn_dim": 16384}
    toy = train_toys.toy_settings(corpus, tmp_path / "run", model=sizes)
    words = ["train", str(train_toys.write_recipe(tmp_path / "toy.yaml", toy))]
    assert main([*words, "--dry_run"]) == 0
    assert "GB for weights, gradients, Adam's moments" in capsys.readouterr().out
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "the training of this model must fit into the memory of this machine" in said
    assert re.search(r"which has 2.0 GB, got \d+.\d GB", said)


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False, "d_k": 6, "d_v": 10}])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_weights_are_counted_without_building_the_model(fields, positions):
    model = train_toys.toy_model(**fields, position_encoding=positions)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    assert sizing.num_weights(model.config) == matrices


def moment(change):
    """Change a moment of the second weight in the optimizer state."""

    def apply(saved):
        slots = saved["optimizer"]["state"][1]
        slots["exp_avg"] = change(slots["exp_avg"])

    return apply


def entry(path, value):
    """Replace an entry."""

    def apply(saved):
        *names, last = path
        for name in names:
            saved = saved[name]
        saved[last] = value

    return apply


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (moment(lambda it: torch.zeros(3)), "must be torch.float32 of shape"),
        (moment(lambda it: torch.zeros(1).expand(10**6, 10**5)), "that are expanded to the shape"),
        (moment(lambda it: torch.zeros(1).expand_as(it)), "that are expanded to the shape"),
        (moment(lambda it: it.double()), "got torch.float64"),
        (moment(lambda it: it.to("meta")), "got another kind"),
        (moment(lambda it: it.to_sparse()), "got another kind"),
        (moment(lambda it: "x"), "must hold a tensor for exp_avg of .*, got a str"),
        (entry(["optimizer", "state", 1, "step"], torch.zeros(7)), "step of .* must be"),
        (entry(["optimizer", "state", 1, "step"], 3), "step of .*, got a int"),
        (entry(["optimizer", "state", 1, "more"], 3), "the state of .* with 'more'"),
        (entry(["optimizer", "state", 1], {}), "the state of .* without exp_avg"),
        (entry(["optimizer", "state", 1], None), "must hold a mapping"),
        (entry(["optimizer", "state", 999], {}), "an entry with the index 999"),
        (entry(["optimizer", "state", "1"], {}), "an entry with the index '1'"),
        (entry(["optimizer", "state"], [1]), "must hold a mapping for state"),
        (entry(["optimizer"], [1]), "must hold a mapping for optimizer"),
        (entry(["scaler"], {"scale": 1.0}), "the gradient scaler without"),
        (
            entry(["scaler"], dict.fromkeys(checkpointing.SCALER_STATE, torch.zeros(1))),
            "must hold a number for scale",
        ),
    ],
)
def test_the_state_of_another_optimizer_is_refused_before_it_is_used(
    change, sentence, run, tmp_path
):
    folder = run / "checkpoints" / "step-12"
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    torch.save(saved, tmp_path / "optimizer.pt")
    checkpointing.read_optimizer_of(tmp_path, model)
    change(saved)
    torch.save(saved, tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match=sentence) as refused:
        checkpointing.read_optimizer_of(tmp_path, model)
    assert str(tmp_path / "optimizer.pt") in str(refused.value)


@pytest.mark.usefixtures("quiet", "new_process")
def test_a_run_is_not_resumed_with_another_optimizer(run, corpus, tmp_path, capsys):
    stranger = Path(shutil.copytree(run, tmp_path / "stranger"))
    for folder in (stranger / "checkpoints").glob("step-*"):
        saved = torch.load(folder / "optimizer.pt", weights_only=True)
        moment(lambda it: torch.zeros(1).expand(10**6, 10**5))(saved)
        torch.save(saved, folder / "optimizer.pt")
    note_sizes(stranger)
    assert commands(stranger, corpus, tmp_path)["resume own recipe"]() == 1
    said = capsys.readouterr().err
    assert "optimizer.pt must hold all 100,000,000,000 numbers of exp_avg of model." in said


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda it: it.popitem() and None, "the moving average without"),
        (lambda it: it.update(more=torch.zeros(1)), "the moving average with 'more'"),
        # it would be expanded to every element
        (lambda it: it.update({name: torch.zeros(1) for name in it}), "of shape \\[1\\]"),
        (lambda it: it.update({name: one.half() for name, one in it.items()}), "torch.float16"),
    ],
)
def test_the_moving_average_of_another_model_is_refused(change, sentence, run, tmp_path):
    folder = run / "checkpoints" / "step-12"
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    averages = checkpointing.read_moving_average(folder, model)
    change(averages)
    save_file(averages, tmp_path / "ema.safetensors")
    with pytest.raises(ValueError, match=sentence):
        checkpointing.read_moving_average(tmp_path, model)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(10**5, 10**5),
        torch.zeros(4).as_strided((10**5, 10**5), (0, 0)),
        torch.empty(10**5, 10**5, device="meta"),
        torch.zeros(10**5, 10**5, layout=torch.sparse_coo),
    ],
    ids=["expanded", "strided", "meta", "sparse"],
)
@pytest.mark.parametrize(
    ("peer", "is_legacy"), [("fairseq-post", True), ("opennmt", False), ("joeynmt-words", False)]
)
def test_a_small_checkpoint_of_a_large_tensor_is_refused(peer, is_legacy, tensor, tmp_path, capsys):
    kind = peer.split("-")[0]
    file, entry = ("best.ckpt", "model_state") if kind == "joeynmt" else ("model.pt", "model")
    path = tmp_path / file
    content = torch.load(PEERS / peer / file, weights_only=False)
    name = next(name for name in content[entry] if name.endswith("weight"))
    content[entry][name] = tensor
    torch.save(content, path, _use_new_zipfile_serialization=not is_legacy)
    assert main(["convert", kind, str(path), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert f"{path} must" in said
