"""Model classes of the user and of the library: train, resume, average, evaluate, push."""

import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_toys
import transformers
from accelerate import Accelerator
from huggingface_hub.dataclasses import strict
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.alignment_vanilla_transformer import return_weights
from vanilla_transformer.changes_vanilla_transformer import changed
from vanilla_transformer.cli import main
from vanilla_transformer.loading import load_run
from vanilla_transformer.publishing import export_for_hub
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.data.batches import Collator, evaluation_batches
from vanilla_transformer.train.data.prepare import load_texts, prepare_data
from vanilla_transformer.train.dry_run import describe
from vanilla_transformer.train.evaluate import evaluate
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.model_class import (
    make_config,
    make_model,
    model_class_of,
    size_of,
    try_model,
)
from vanilla_transformer.train.run_folder.checkpoint import checkpoints, read_weights
from vanilla_transformer.train.run_folder.files import read_metrics
from vanilla_transformer.train.validation import validation_loss

pytestmark = pytest.mark.usefixtures("new_process")

# a model with a field, a weight and a buffer that the paper's has not
GATED = """
import torch
from huggingface_hub.dataclasses import strict
from torch import nn

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)


@strict
class GatedConfig(VanillaTransformerConfig):
    model_type = "gated_transformer"
    first_gate: float = 0.5


class Gate(nn.Module):
    def __init__(self, inner, config):
        super().__init__()
        self.inner = inner
        self.gate = nn.Parameter(torch.full((config.hidden_size,), config.first_gate))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.gate * (1 + self.calls / 64) * self.inner(x)


class Gated(VanillaTransformerForConditionalGeneration):
    config: GatedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in (*self.model.encoder.layers, *self.model.decoder.layers):
            layer.feed_forward = Gate(layer.feed_forward, config)
        self.post_init()
"""
# a loss of its own, the smoothed one, and weights that get no gradient in all or some steps
OWN_LOSS = """
import torch
import torch.nn.functional as F
from torch import nn

from vanilla_transformer import VanillaTransformerForConditionalGeneration


class Plain(VanillaTransformerForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        self.unused = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.zeros(config.vocab_size))
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if input_ids is not None and (is_shifted := input_ids[:, 0] % 4 == 1).any():
            output.logits = output.logits + is_shifted[:, None, None] * self.shift
        return output


class Own(Plain):
    def forward(self, labels=None, **kwargs):
        output = super().forward(**kwargs)
        if labels is not None:
            logits = output.logits.float().flatten(0, 1)
            output.loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)
        return output
"""
# the names of T5's sizes, where they are not Marian's
T5_SIZES = {
    "d_model": 16,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "d_ff": 24,
}


# a recipe that names a file may come from somebody else
TRUST = "--trust_remote_code"


@pytest.fixture
def forgotten():
    """Forget the modules of users' files, as a new process does."""
    yield
    for name in [name for name in sys.modules if name.rpartition(".")[2].startswith("gated")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """File of a user with a model class."""
    path = tmp_path_factory.mktemp("user") / "gated.py"
    path.write_text(GATED, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def settings(corpus, file):
    """Settings of a run with this class."""

    def made(folder, **changes):
        model = {"first_gate": 0.8, **changes.pop("model", {})}
        changes = {"model_class": f"{file}:Gated", "ema_decay": 0.9, **changes}
        return train_toys.toy_settings(corpus, folder, model=model, **changes)

    return made


@pytest.fixture(scope="module")
def run(settings, tmp_path_factory):
    """Run with this class, in a separate process."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    recipe = train_toys.write_recipe(folder.with_suffix(".yaml"), settings(folder))
    train_toys.run_command(recipe, TRUST)
    return folder


def test_a_users_class_is_trained_with_its_weights_buffers_and_file(run, file):
    assert (run / "gated.py").read_bytes() == file.read_bytes()
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Gated"]
    assert config["first_gate"] == 0.8
    gates = [name for name in train_toys.weights(run) if name.endswith(".gate")]
    assert len(gates) == 3
    for folder in checkpoints(run / "checkpoints"):
        assert (folder / "gated.py").read_bytes() == file.read_bytes()
        weights = read_weights(folder)
        for name in gates:
            assert not torch.equal(weights[name], torch.full((16,), 0.8))
            assert weights[name.replace("gate", "calls")] > 0
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "A model of the class Gated" in card
    assert "trust_remote_code=True" in card


def test_a_run_folder_alone_evaluates_translates_and_averages(run, tmp_path, capsys, forgotten):
    # on another machine, where the file is not
    moved = Path(shutil.copytree(run, tmp_path / "moved"))
    (tmp_path / "lines.txt").write_text("ant bee\ncat\n", encoding="utf-8")
    lines = str(tmp_path / "lines.txt")
    ours, trust = str(moved), "--trust_remote_code"
    for words in (["evaluate", ours], ["translate", ours, lines], ["average", ours, "--ema"]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert re.search(r"(recipe\.yaml|config\.json) refers to custom code, ", said)
        assert trust in said
        assert main([*words, trust]) == 0


def test_a_format_without_a_place_for_the_class_refuses_it(run, tmp_path, capsys, forgotten):
    for kind in ("ctranslate2", "marian"):
        assert main(["export", kind, str(run), str(tmp_path / kind), "--trust_remote_code"]) == 1
        assert "got the weight model.encoder.layers.0.feed_forward.gate" in capsys.readouterr().err
        assert not list((tmp_path / kind).glob("*"))


def test_its_attention_is_looked_at_like_that_of_any_model(run, tmp_path, capsys, forgotten):
    words = ["paper", "attention", "--model", str(run), "--output_dir", str(tmp_path / "study")]
    words += ["--sentence", "ant bee cat"]
    assert main(words) == 1
    assert "trust_remote_code" in capsys.readouterr().err
    assert main([*words, "--trust_remote_code"]) == 0


def test_what_is_evaluated_is_what_the_class_computes(run, tmp_path, forgotten):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    model, _ = load_run(folder, trust_remote_code=True)
    # one that is trained for twelve steps ends each translation at once
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
    model.generation_config.suppress_tokens = [0, 1]
    model.save_pretrained(folder)
    options = {"split": "validation", "num_beams": 1, "max_extra_tokens": 5}
    evaluate(str(folder), **options, output_dir=str(tmp_path), trust_remote_code=True)
    (kept,) = (tmp_path / "hypotheses").glob("*translation.txt")
    (sources,) = (tmp_path / "hypotheses").glob("*source.txt")
    model, tokenizer = load_run(folder, trust_remote_code=True)
    model.eval()
    translations = []
    for source in sources.read_text(encoding="utf-8").splitlines():
        inputs = tokenizer(source, return_tensors="pt")
        ids = torch.tensor([[model.config.decoder_start_token_id]])
        for _ in range(inputs["input_ids"].shape[1] + 5):
            with torch.no_grad():
                scores = model(**inputs, decoder_input_ids=ids, use_cache=False).logits[0, -1]
            scores[:2] = -torch.inf
            ids = torch.cat((ids, scores.argmax().view(1, 1)), dim=1)
            if int(ids[0, -1]) == model.config.eos_token_id:
                break
        translations.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    assert len(set(translations)) > 1
    assert [line.strip() for line in kept.read_text(encoding="utf-8").splitlines()] == [
        line.strip() for line in translations
    ]


def test_a_run_that_is_resumed_ends_as_one_that_was_not(run, settings, tmp_path):
    folder = tmp_path / "run"
    recipe = train_toys.write_recipe(tmp_path / "half.yaml", settings(folder, max_steps=6))
    train_toys.run_command(recipe, TRUST)
    recipe = train_toys.write_recipe(tmp_path / "whole.yaml", settings(folder))
    train_toys.run_command(recipe, TRUST, "--resume")
    train_toys.assert_same_bits(folder, run)
    last = [checkpoints(each / "checkpoints")[-1] for each in (folder, run)]
    train_toys.assert_same_bits(*last)


def test_a_run_resumes_with_the_file_in_its_folder(
    run, settings, file, corpus, tmp_path, forgotten
):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    elsewhere = Path(shutil.copy(file, tmp_path / "gated.py"))
    for path in (elsewhere, tmp_path / "no such folder" / "gated.py"):
        changes = {"model_class": f"{path}:Gated", "max_steps": 14}
        assert train(TrainConfig(**settings(folder, **changes)), resume=True)
    elsewhere.write_text(GATED.replace("1 + self.calls", "2 + self.calls"), encoding="utf-8")
    changes["model_class"] = f"{elsewhere}:Gated"
    with pytest.raises(ValueError, match=r"in the file that the run began with: .* differs from"):
        train(TrainConfig(**settings(folder, **changes)), resume=True)
    with pytest.raises(
        ValueError, match=r"its own settings: .* model_class was .*:Gated', got None"
    ):
        train(train_toys.toy_config(corpus, folder, max_steps=14), resume=True)


FACTORIZED = """
from torch import nn

from vanilla_transformer import VanillaTransformerForConditionalGeneration


class Embedding(nn.Module):
    def __init__(self, num_tokens, width):
        super().__init__()
        self.table = nn.Embedding(num_tokens, 3)
        self.projection = nn.Linear(3, width, bias=False)

    def forward(self, ids):
        return self.projection(self.table(ids))


class Factorized(VanillaTransformerForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        for stack in (self.model.encoder, self.model.decoder):
            stack.embed_tokens = Embedding(config.vocab_size, config.d_model)
        self.post_init()
"""


def test_a_class_with_embeddings_of_its_own_is_trained(corpus, tmp_path, forgotten):
    file = tmp_path / "factorized.py"
    file.write_text(FACTORIZED)
    config = train_toys.toy_config(
        corpus, tmp_path / "run", max_steps=3, model_class=f"{file}:Factorized"
    )
    config.model["tie_word_embeddings"] = False
    assert train(config)
    weights = train_toys.weights(tmp_path / "run")
    assert weights["model.encoder.embed_tokens.table.weight"].shape[1] == 3


def test_two_processes_train_it_as_one_does(settings, tmp_path):
    # each process counts its own calls
    still = tmp_path / "gated_still.py"
    still.write_text(GATED.replace("(1 + self.calls / 64) * ", ""), encoding="utf-8")
    changes = {"tokens_per_micro_batch": 300, "model": {"dropout": 0.0}, "max_steps": 4}
    changes["model_class"] = f"{still}:Gated"
    for processes in (0, 2):
        recipe = train_toys.write_recipe(
            tmp_path / f"{processes}.yaml", settings(tmp_path / str(processes), **changes)
        )
        train_toys.run_command(recipe, TRUST, processes=processes)
    one, two = (train_toys.weights(tmp_path / name) for name in "02")
    for name in [name for name in one if not name.endswith("calls")]:
        torch.testing.assert_close(two[name], one[name], atol=2e-4, rtol=1e-3)


def test_two_processes_evaluate_the_buffers_that_are_saved(settings, tmp_path):
    settings = settings(tmp_path / "run", max_steps=2, num_averaged_checkpoints=1, ema_decay=None)
    recipe = train_toys.write_recipe(tmp_path / "run.yaml", settings)
    source = Path(settings["model_class"].rpartition(":")[0])
    # the processes have different sources, and so different means
    counting = source.read_text().replace(
        "self.calls += 1", "self.calls += x.detach().mean().exp() * 9"
    )
    (tmp_path / "gated_mean.py").write_text(counting, encoding="utf-8")
    model_class = f"{tmp_path}/gated_mean.py:Gated"
    train_toys.run_command(recipe, "--model_class", model_class, processes=2)
    (line,) = [line for line in read_metrics(tmp_path / "run") if "validation_loss" in line]
    model, tokenizer = load_run(tmp_path / "run", trust_remote_code=True)
    config = TrainConfig(**settings)
    validation = prepare_data(config, load_texts(config), tokenizer).validation
    collator = Collator(tokenizer.pad_token_id, tokenizer.bos_token_id, len(tokenizer))
    batches = evaluation_batches(validation, collator, 80, 1, 0)
    loss = validation_loss(Accelerator(cpu=True), model, batches)
    assert loss == pytest.approx(line["validation_loss"], rel=1e-6)


@pytest.fixture
def own_loss(corpus, tmp_path, forgotten):
    """Return a function that gives the settings of a run with a class of `OWN_LOSS`."""
    (tmp_path / "gated_loss.py").write_text(OWN_LOSS, encoding="utf-8")

    def made(folder, name, **changes):
        smoothing = 0.1 if name == "Plain" else 0.0
        changes = {"label_smoothing": smoothing, "tokens_per_micro_batch": 60, **changes}
        model_class = f"{tmp_path}/gated_loss.py:{name}"
        return train_toys.toy_settings(
            corpus, tmp_path / folder, model_class=model_class, **changes
        )

    return made


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_of_its_own_is_trained_as_it_is_written(own_loss, tmp_path, precision, caplog):
    caplog.set_level("INFO")
    for folder, name in (("plain", "Plain"), ("own", "Own"), ("resumed", "Own")):
        settings = own_loss(folder, name, precision=precision)
        if folder == "resumed":
            train(TrainConfig(**settings | {"max_steps": 6}))
        caplog.clear()
        train(TrainConfig(**settings), resume=folder == "resumed")
        assert ("The training loss is that of Own." in caplog.text) == (name == "Own")
    train_toys.assert_same_bits(tmp_path / "own", tmp_path / "resumed")
    plain, own = (train_toys.weights(tmp_path / name) for name in ("plain", "own"))
    torch.testing.assert_close(own, plain, atol=1e-4, rtol=1e-3)
    assert own["shift"].any()
    losses = [
        {line["step"]: line["loss"] for line in read_metrics(tmp_path / name) if "loss" in line}
        for name in ("plain", "own")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_two_processes_train_a_loss_and_weights_that_some_steps_do_not_use(own_loss, tmp_path):
    for processes in (0, 2):
        settings = own_loss(str(processes), "Own", model={"dropout": 0.0}, max_steps=4)
        recipe = train_toys.write_recipe(tmp_path / f"{processes}.yaml", settings)
        train_toys.run_command(recipe, TRUST, processes=processes)
    one, two = (train_toys.weights(tmp_path / name) for name in "02")
    torch.testing.assert_close(two, one, atol=2e-4, rtol=1e-3)
    assert one["shift"].any()


def test_a_loss_of_its_own_smooths_by_itself(own_loss):
    config = TrainConfig(**own_loss("run", "Own", label_smoothing=0.1))
    with pytest.raises(ValueError, match=r"must be 0 for Own, .* set --label_smoothing 0"):
        train(config)


class InTraining(VanillaTransformerForConditionalGeneration):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.training:
            output.loss = output.logits.square().mean()
        return output


class InEvaluation(VanillaTransformerForConditionalGeneration):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if not self.training:
            output.loss = output.logits.square().mean()
        return output


class LossFunction(VanillaTransformerForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        self.loss_function = lambda logits, labels, vocab_size: logits.square().mean()


class LossType(VanillaTransformerForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        self.loss_type = "ForCausalLM"


class WithoutLabels(VanillaTransformerForConditionalGeneration):
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        encoder_outputs=None,
        cache=None,
        past_key_values=None,
        use_cache=None,
        return_dict=None,
    ):
        arguments = {name: value for name, value in locals().items() if value is not None}
        del arguments["self"], arguments["__class__"]
        return super().forward(**arguments)


class Counting(VanillaTransformerForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, *args, **kwargs):
        self.calls += self.training
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("model_class", "expected"),
    [
        *[(each, True) for each in (InTraining, InEvaluation, LossFunction, LossType)],
        *[(each, False) for each in (WithoutLabels, Counting)],
    ],
)
def test_a_loss_that_is_not_the_cross_entropy_of_the_logits_is_noticed(model_class, expected):
    model = model_class(train_toys.toy_model().config)
    model.generation_config.decoder_start_token_id = model.generation_config.bos_token_id = 1
    assert try_model(model) is expected
    assert not any(buffer.any() for name, buffer in model.named_buffers() if name == "calls")
    assert model.training


@pytest.mark.parametrize("pad", [3, 5])
def test_a_class_is_tried_with_any_padding_token(pad):
    model = Counting(train_toys.toy_model(pad_token_id=pad).config)
    model.generation_config.decoder_start_token_id = model.generation_config.bos_token_id = 1
    assert not try_model(model)


def test_it_loads_from_the_hub_where_only_the_package_is_installed(run, tmp_path, forgotten):
    export_for_hub(run, tmp_path / "published", trust_remote_code=True)
    model, _ = load_run(run, trust_remote_code=True)
    ids = model.dummy_inputs["input_ids"]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, decoder_input_ids=ids).logits
    torch.save((ids, expected), tmp_path / "expected.pt")
    code = """if True:
        import sys
        import torch
        import vanilla_transformer
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
        name = sys.argv[1]
        model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True).eval()
        ids, expected = torch.load(sys.argv[2])
        with torch.no_grad():
            logits = model(input_ids=ids, decoder_input_ids=ids).logits
        assert torch.equal(logits, expected)
        translate = pipeline("translation", model=name, trust_remote_code=True)
        assert type(translate.model).__name__ == "Gated"
        print(translate("ant bee")[0]["translation_text"])
    """
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "published"), str(tmp_path / "expected.pt")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**train_toys.environment(), "HF_HOME": str(tmp_path / "home")},
    )
    assert said.returncode == 0, said.stderr
    assert "reinitialized" not in said.stderr
    assert "newly initialized" not in said.stderr


@pytest.mark.parametrize(
    ("name", "sizes"), [("MarianMTModel", {}), ("T5ForConditionalGeneration", T5_SIZES)]
)
def test_a_class_of_the_library_is_trained_evaluated_and_resumed(
    corpus, tmp_path, name, sizes, capsys
):
    changes = {"model_class": f"transformers:{name}", "num_beams": 2}
    folder = tmp_path / "run"
    toy = train_toys.toy_settings(corpus, folder, **changes)
    if sizes:
        toy["model"] = sizes
    assert train(TrainConfig(**toy | {"max_steps": 6}))
    assert train(TrainConfig(**toy), resume=True)
    never = tmp_path / "never"
    assert train(TrainConfig(**toy | {"output_dir": str(never)}))
    train_toys.assert_same_bits(folder, never)
    model, tokenizer = load_run(folder)
    assert type(model) is getattr(transformers, name)
    assert model.config.vocab_size == len(tokenizer) == 290
    assert size_of(model.config, "encoder_ffn_dim") == 24
    assert model.generation_config.num_beams == 2
    assert model.generation_config.decoder_start_token_id == tokenizer.bos_token_id
    assert evaluate(str(folder), split="validation", max_new_tokens=5)["sentences"] == 11
    assert main(["average", str(folder), "--num_checkpoints", "2"]) == 0
    capsys.readouterr()
    lines = tmp_path / "lines.txt"
    lines.write_text("ant bee\ncat\n", encoding="utf-8")
    assert main(["translate", str(folder), str(lines)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert f"A model of the class {name}" in (folder / "README.md").read_text(encoding="utf-8")
    # it needs no code to be trusted
    export_for_hub(folder, tmp_path / "published")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "published")
    assert type(again) is type(model)


WRONG_FILES = {
    "no model at all": ("class Gated:\n    pass\n", "must name a PreTrainedModel, got"),
    "a slip in the name": (GATED.replace("Gated(Van", "Gatde(Van"), "Did you mean 'Gatde'"),
    "no such argument": (
        GATED + "\n    def forward(self, input_ids, attention_mask):\n        pass\n",
        "Gated.forward has no decoder_input_ids",
    ),
    "a decoder alone": (
        "from transformers import GPT2LMHeadModel\n\n\nclass Gated(GPT2LMHeadModel):\n"
        "    def forward(self, **inputs):\n        pass\n",
        "Gated.forward has no decoder_input_ids",
    ),
    "no sizes": (
        "from transformers import EncoderDecoderModel, PreTrainedConfig\n\n\n"
        "class Config(PreTrainedConfig):\n    is_encoder_decoder = True\n\n\n"
        "class Gated(EncoderDecoderModel):\n    config_class = Config\n\n"
        "    def forward(self, **inputs):\n        pass\n",
        "must have a configuration with the field vocab_size, but Config has none",
    ),
    "a field that is not saved": (
        GATED + "\n\ndef lost(self):\n    return {n: v for n, v in plain(self).items()"
        " if n != 'first_gate'}\n\n\nplain, GatedConfig.to_dict = GatedConfig.to_dict, lost\n",
        "model: first_gate would be lost when the model is saved: it was 0.8, and would be 0.5",
    ),
}


SHARED = """
from vanilla_transformer import VanillaTransformerForConditionalGeneration as Base


class Shared(Base):
    _tied_weights_keys = {**Base._tied_weights_keys, r"model.decoder.layers.1": "DECLARED"}

    def __init__(self, config):
        super().__init__(config)
        self.model.decoder.layers[1].SHARED = self.model.decoder.layers[0].SHARED
        self.post_init()
"""


@pytest.mark.parametrize("shared", ["feed_forward", "feed_forward_norm.weight"])
def test_weights_that_modules_share_must_be_declared(shared, corpus, tmp_path):
    file = tmp_path / "shared.py"
    code = SHARED.replace("SHARED", shared)
    file.write_text(code.replace(', r"model.decoder.layers.1": "DECLARED"', ""), encoding="utf-8")
    settings = {"model_class": f"{file}:Shared", "max_steps": 4}
    config = train_toys.toy_config(corpus, tmp_path / "run", **settings)
    for refusing in (lambda: describe(config, "demo"), lambda: train(config)):
        with pytest.raises(ValueError, match=rf"layers\.1\.{shared}.* has no entry"):
            refusing()
    code = code.replace("layers.1", f"layers.1.{shared}")
    code = code.replace("DECLARED", f"model.decoder.layers.0.{shared}")
    file.write_text(code, encoding="utf-8")
    assert train(config)
    assert train(dataclasses.replace(config, max_steps=5), resume=True)
    weights = load_run(tmp_path / "run", trust_remote_code=True)[0].state_dict()
    shared_names = [name for name in weights if f"decoder.layers.1.{shared}" in name]
    assert shared_names
    for name in shared_names:
        assert torch.equal(weights[name], weights[name.replace("layers.1", "layers.0")])


def test_a_class_without_post_init_has_declared_no_shared_weights(corpus, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from vanilla_transformer import VanillaTransformerForConditionalGeneration as Base\n\n\n"
        "class Own(Base):\n    def post_init(self):\n        pass\n",
        encoding="utf-8",
    )
    config = train_toys.toy_config(corpus, tmp_path / "run", model_class=f"{file}:Own")
    with pytest.raises(ValueError, match="Own must declare shared weights in"):
        make_model(config, config.model_config(300))


@pytest.mark.parametrize("kind", WRONG_FILES)
def test_a_class_that_cannot_be_trained_is_refused(kind, corpus, tmp_path, forgotten):
    code, sentence = WRONG_FILES[kind]
    (tmp_path / "gated.py").write_text(code, encoding="utf-8")
    config = train_toys.toy_config(
        corpus,
        tmp_path / "run",
        model_class=f"{tmp_path}/gated.py:Gated",
        model={"first_gate": 0.8} if "saved" in kind else {},
    )
    for refusing in (lambda: describe(config, "demo"), lambda: train(config)):
        with pytest.raises(ValueError, match=sentence):
            refusing()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("model_class", "model", "sentence"),
    [
        ("no_such_file.py:Gated", {}, "the file no_such_file.py does not exist"),
        ("transformers:MarianMTModle", {}, "Did you mean 'MarianMTModel'"),
        ("transformers:MarianConfig", {}, "must name a PreTrainedModel"),
        ("transformers:MarianModel", {}, "with a language model head, got MarianModel"),
        ("transformers:MarianForCausalLM", {}, "forward has no decoder_input_ids"),
        ("transformers:EncoderDecoderModel", {}, "EncoderDecoderConfig has none"),
        ("transformers:FSMTForConditionalGeneration", {}, "embeddings for vocab_size=290 tokens"),
        ("transformers:MarianMTModel", {"d_modle": 8}, "d_modle is not a field of MarianConfig"),
        (
            "transformers:MarianMTModel",
            {"hidden_size": 15},
            "d_model must be even, for sin/cos pairs, got 15",
        ),
    ],
)
def test_a_class_of_the_library_that_cannot_be_trained_is_refused(
    corpus, tmp_path, model_class, model, sentence
):
    config = train_toys.toy_config(corpus, tmp_path / "run", model_class=model_class, model=model)
    with pytest.raises(ValueError, match=sentence):
        describe(config, "demo")


@pytest.mark.parametrize("command", ["train", "tokenize"])
def test_a_recipe_of_others_runs_no_code(command, corpus, tmp_path, monkeypatch, capsys, forgotten):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "gated_evil.py").write_text("open('ran', 'w')\n" + GATED, encoding="utf-8")
    toy = train_toys.toy_settings(corpus, "foreign", model_class="gated_evil.py:Gated")
    train_toys.write_recipe(foreign / "recipe.yaml", toy)
    monkeypatch.chdir(tmp_path)
    words = [command, "foreign/recipe.yaml"]
    ours = ["--model_class", "gated_evil.py:Gated"]
    for more in ([], ["--dry_run"], ["--resume"], [*ours, "--dry_run"], [*ours, "--resume"]):
        assert main([*words, *more]) == 1
        said = capsys.readouterr().err
        assert "Read this code, then set trust_remote_code=True" in said
        copied = f"the copy {Path('foreign', 'gated_evil.py')} would be run"
        assert (copied in said) == ("--model_class" in more)
        assert not Path("ran").exists()
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copy(foreign / "gated_evil.py", tmp_path)
    # what the user names is there
    assert main([*words, *ours, "--dry_run"]) == 0
    assert Path("ran").exists()


def test_a_file_of_a_class_that_does_not_exist_is_named(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train_toys.write_recipe(tmp_path / "toy.yaml", train_toys.toy_settings(corpus, "run"))
    assert main(["train", "toy.yaml", "--model_class", "nowhere.py:Gated"]) == 1
    said = capsys.readouterr().err
    assert said == "error: model_class names nowhere.py, which does not exist.\n"


def test_a_file_with_the_name_of_a_module_does_not_replace_it(file, corpus, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    path = shutil.copy(file, tmp_path / "colorsys.py")
    config = train_toys.toy_config(corpus, tmp_path / "run", model_class=f"{path}:Gated")
    saved = model_class_of(config)
    assert saved is model_class_of(config)
    assert importlib.import_module("colorsys").__file__ != str(path)


def test_a_class_with_the_name_of_a_released_one_is_refused(corpus, tmp_path, forgotten):
    name = "VanillaTransformerForConditionalGeneration"
    text = GATED.replace("class Gated(", f"class {name}(").replace(
        f"    {name},\n)", f"    {name},\n)\n"
    )
    (tmp_path / "gated.py").write_text(text, encoding="utf-8")
    model_class = f"{tmp_path}/gated.py:{name}"
    config = train_toys.toy_config(corpus, tmp_path / "run", model_class=model_class)
    with pytest.raises(ValueError, match=f"must have a name of its own, got {name}"):
        train(config)


def test_an_attention_function_of_a_users_class_is_set_by_the_class(corpus, tmp_path):
    with pytest.raises(ValueError, match="Call set_attn_implementation in the __init__"):
        train_toys.toy_config(
            corpus,
            tmp_path / "run",
            model_class="gated.py:Gated",
            model={"attn_implementation": "eager"},
        )


def test_an_attention_function_of_a_users_file_computes_the_alignment(corpus, tmp_path):
    text = f"from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\n{GATED}"
    text += """

def own_attention(module, query, key, value, mask, **kwargs):
    return value.new_zeros(query.shape).transpose(1, 2), value.new_ones(1)


ALL_ATTENTION_FUNCTIONS["own_attention"] = own_attention
"""
    path = tmp_path / "gated_own.py"
    path.write_text(text, encoding="utf-8")
    config = train_toys.toy_config(corpus, tmp_path / "run", model_class=f"{path}:Gated")
    model_class = model_class_of(config)
    model = model_class(model_class.config_class(**train_toys.toy_model().config.to_diff_dict()))
    model.set_attn_implementation("own_attention")
    with changed(model, return_weights):
        assert model.config._attn_implementation == "own_attention"


def test_dropout_of_a_users_class_stays_the_users(corpus, tmp_path, forgotten):
    text = GATED.replace(
        "        self.post_init()\n",
        "        self.drops = [it for it in self.modules() if type(it) is nn.Dropout]\n"
        "        self.post_init()\n",
    )
    text += (
        "\n    def forward(self, *args, **kwargs):\n"
        "        for drop in self.drops:\n"
        "            drop.p = 0.0\n"
        "        return super().forward(*args, **kwargs)\n"
    )
    losses = []
    for dropout in (0.0, 0.5):
        name = f"gated_{int(10 * dropout)}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        folder = tmp_path / name
        train(
            train_toys.toy_config(
                corpus,
                folder,
                max_steps=3,
                model_class=f"{tmp_path}/{name}.py:Gated",
                model={"dropout": dropout},
            )
        )
        losses.append([line["loss"] for line in read_metrics(folder) if "loss" in line])
    # the class turns dropout off
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "sizes"), [("MarianMTModel", {}), ("T5ForConditionalGeneration", T5_SIZES)]
)
def test_the_layers_of_a_class_of_the_library_are_compiled(
    corpus, tmp_path, name, sizes, monkeypatch
):
    compiled = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compiled.append(type(module).__name__)
    )
    changes = {"model_class": f"transformers:{name}", "max_steps": 1, "compile": True}
    toy = train_toys.toy_settings(corpus, tmp_path / "run", **changes)
    if sizes:
        toy["model"] = sizes
    assert train(TrainConfig(**toy))
    # a layer of T5 is a block, whose parts are not compiled again
    assert set(compiled) in ({"MarianEncoderLayer", "MarianDecoderLayer"}, {"T5Block"})


def test_a_model_that_cannot_translate_is_refused_before_it_is_trained(corpus, tmp_path):
    # the library sizes its cache by the encoder's layers
    sizes = {**T5_SIZES, "num_decoder_layers": 2}
    toy = train_toys.toy_settings(
        corpus, tmp_path / "run", model_class="transformers:T5ForConditionalGeneration"
    )
    with pytest.raises(ValueError, match=r"failed on a batch of two sentences: IndexError: list"):
        train(TrainConfig(**toy | {"model": sizes}))
    assert not (tmp_path / "run" / "checkpoints").exists()


FAILING = """
from vanilla_transformer import VanillaTransformerForConditionalGeneration


class Failing(VanillaTransformerForConditionalGeneration):
    def forward(self, input_ids=None, return_dict=None, **kwargs):
        if input_ids is not None and len(input_ids) CONDITION:
            ACTION
        return super().forward(input_ids, **kwargs)
"""


@pytest.mark.parametrize(
    ("condition", "action", "sentence"),
    [
        (
            "== 2",
            "return super().forward(input_ids, **kwargs, return_dict=False)",
            "Failing must run .* TypeError: forward must return an output with `.logits`, .* tuple",
        ),
        ("== 2", "1 / 0", r"Failing must run .* zero \(in .*gated_failing.py, line 8\)"),
        ("!= 2", "1 / 0", r"ZeroDivisionError: .* zero \(in .*gated_failing.py, line 8\)"),
        ("!= 2", "raise ValueError('no')", r"no \(in .*gated_failing.py, line 8\)"),
        ("!=", "pass", r"SyntaxError: .* \(gated_failing.py, line 7\)"),
    ],
)
def test_an_error_in_the_users_file_is_reported_as_one(
    corpus, tmp_path, capsys, forgotten, condition, action, sentence
):
    code = FAILING.replace("CONDITION", condition).replace("ACTION", action)
    (tmp_path / "gated_failing.py").write_text(code, encoding="utf-8")
    model_class = f"{tmp_path}/gated_failing.py:Failing"
    settings = train_toys.toy_settings(corpus, tmp_path / "run", model_class=model_class)
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    assert main(["train", str(recipe), TRUST]) == 1
    (said,) = re.findall(r"^error: (.*)$", capsys.readouterr().err, re.MULTILINE)
    assert re.fullmatch(rf"{sentence}\.?", said)


def test_a_dry_run_describes_the_users_model(settings, corpus, tmp_path, forgotten):
    plain = describe(train_toys.toy_config(corpus, tmp_path / "run"), "demo")
    said = describe(TrainConfig(**settings(tmp_path / "run")), "demo")
    counts = [
        int(re.search(r"([\d,]+) with 290", each)[1].replace(",", "")) for each in (plain, said)
    ]
    # a gate for each of three feed-forward networks
    assert counts[1] - counts[0] == 3 * 16


@strict
class SameTypeConfig(VanillaTransformerConfig):
    more: int = 1


class SameType(VanillaTransformerForConditionalGeneration):
    config: SameTypeConfig


def test_a_class_that_the_auto_classes_would_not_find_is_not_published(small_model, tmp_path):
    SameType(SameTypeConfig(vocab_size=50, d_model=16)).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="saved by the class SameType, but holds no code"):
        load_run(tmp_path / "model")
    for kind in (VanillaTransformerForConditionalGeneration, AutoModelForSeq2SeqLM):
        with pytest.raises(ValueError, match="by the class that saved it, SameType"):
            kind.from_pretrained(tmp_path / "model")
    assert type(SameType.from_pretrained(tmp_path / "model")) is SameType
    # a new class may begin with the weights of any
    small_model(vocab_size=50).save_pretrained(tmp_path / "ours")
    assert type(SameType.from_pretrained(tmp_path / "ours")) is SameType


# a value that differs from the default for each field of the configuration
OTHER_VALUES = {
    "vocab_size": 99,
    "hidden_size": 24,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 28,
    "d_k": 7,
    "d_v": 5,
    "position_encoding": "learned",
    "position_base": 500.0,
    "position_layout": "halves",
    "position_offset": 2,
    "max_position_embeddings": 77,
    "norm_first": True,
    "attention_bias": True,
    "output_bias": True,
    "activation_function": "gelu",
    "dropout": 0.3,
    "attention_dropout": 0.2,
    "activation_dropout": 0.15,
    "layer_norm_eps": 1e-3,
    "initializer_gain": 0.5,
    "pad_token_id": 4,
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
    "decoder_start_token_id": 8,
    "use_cache": False,
    "tie_word_embeddings": False,
}


def test_every_field_survives_being_saved_and_loaded(tmp_path):
    fields = {*VanillaTransformerConfig.__annotations__} - {"is_encoder_decoder", "model_type"}
    assert fields == OTHER_VALUES.keys()
    plain = VanillaTransformerConfig()
    assert all(getattr(plain, name) != value for name, value in OTHER_VALUES.items())
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**OTHER_VALUES))
    model.save_pretrained(tmp_path)
    for kind in (VanillaTransformerForConditionalGeneration, AutoModelForSeq2SeqLM):
        again = kind.from_pretrained(tmp_path).config
        assert {name: getattr(again, name) for name in OTHER_VALUES} == OTHER_VALUES
    kept = make_config(VanillaTransformerForConditionalGeneration, "base", **OTHER_VALUES)
    assert {name: getattr(kept, name) for name in OTHER_VALUES} == OTHER_VALUES


def test_a_run_folder_says_which_attention_it_was_trained_with(corpus, tmp_path):
    for kernel in ("eager", "sdpa"):
        train(
            train_toys.toy_config(
                corpus, tmp_path / kernel, max_steps=1, model={"attn_implementation": kernel}
            )
        )
        said = (tmp_path / kernel / "environment.txt").read_text(encoding="utf-8")
        assert f"attention: {kernel}\n" in said
