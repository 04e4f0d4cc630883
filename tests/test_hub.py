"""Publish and load over real HTTP, in fresh processes with and without the package.

The server is the stand-in on loopback; the clients are the real ones. Source and target shapes
differ.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_stand_in import TOKEN, HubStandIn, running_hub
from huggingface_hub import constants, errors
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    MarianConfig,
    pipeline,
)
from translation_toys import make_model, make_tokenizer

import vanilla_transformer
from vanilla_transformer import TranslationPipeline
from vanilla_transformer.loading import load_run
from vanilla_transformer.publishing import export_for_hub, push_to_hub

NAME = "user/tiny"
TEXTS = ["the small cat sleeps", "dogs", "the cat and the small dog sleep in the house"]
CODE_FILES = {
    "alignment_vanilla_transformer.py",
    "batches_vanilla_transformer.py",
    "changes_vanilla_transformer.py",
    "checks_vanilla_transformer.py",
    "configuration_vanilla_transformer.py",
    "constraints_vanilla_transformer.py",
    "cores_vanilla_transformer.py",
    "decoding_vanilla_transformer.py",
    "deviations_vanilla_transformer.py",
    "engine_checks_vanilla_transformer.py",
    "engine_vanilla_transformer.py",
    "ensemble_vanilla_transformer.py",
    "generation_vanilla_transformer.py",
    "identity_vanilla_transformer.py",
    "kernels_vanilla_transformer.py",
    "languages_vanilla_transformer.py",
    "modeling_vanilla_transformer.py",
    "pipeline_vanilla_transformer.py",
    "released_code_vanilla_transformer.py",
    "saving_vanilla_transformer.py",
    "scores_vanilla_transformer.py",
    "search_vanilla_transformer.py",
    "terms_vanilla_transformer.py",
    "tokenization_vanilla_transformer.py",
}
CARD = """---
language: [en, de]
library_name: transformers
model-index:
- name: tiny
  results:
  - task: {type: translation}
    dataset: {name: corpus, type: user/corpus}
    metrics: [{type: bleu, value: 12.5}]
---
# Tiny

```python
translate = pipeline("translation", model="runs/tiny")
```
"""

WITHOUT_THE_PACKAGE = """
import sys
sys.modules["vanilla_transformer"] = None  # every import of it, or from it, fails
try:
    import vanilla_transformer
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("the package can be imported")
"""

# expects `name`, `trust`, `source`; leaves the classes it got in `classes`
LOAD_AND_COMPARE = """
import torch
from transformers import (
    AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline
)
expected = torch.load(expected_file)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
inputs = tokenizer(expected["texts"], return_tensors="pt", padding=True)
assert inputs["input_ids"].tolist() == expected["input_ids"].tolist()
plain = PreTrainedTokenizerFast.from_pretrained(name)
assert plain(expected["texts"][0]).input_ids == tokenizer(expected["texts"][0]).input_ids

bare = AutoModel.from_pretrained(name, trust_remote_code=trust)
model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=trust)
target = expected["decoder_input_ids"]
with torch.no_grad():
    states = bare(**inputs, decoder_input_ids=target).last_hidden_state
    logits = model(**inputs, decoder_input_ids=target).logits
assert torch.equal(states, expected["states"])
assert torch.equal(logits, expected["logits"])
assert torch.equal(model.generate(**inputs), expected["found"])
assert model.generation_config.length_penalty_alpha == 0.6

translate = pipeline("translation", model=name, trust_remote_code=trust)
assert translate(expected["texts"]) == expected["translations"]
config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
classes = [type(x) for x in (tokenizer, bare, model, translate, config)]
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder as training writes it: model, tokenizer, card, and files of the run."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    tokenizer = vanilla_transformer.VanillaTransformerTokenizer().train_new_from_iterator(
        TEXTS * 20, vocab_size=290
    )
    torch.manual_seed(0)
    config = vanilla_transformer.VanillaTransformerConfig(
        vocab_size=len(tokenizer),
        d_model=24,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=32,
    )
    model = vanilla_transformer.VanillaTransformerForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        num_beams=4,
        length_penalty_alpha=0.6,
        max_extra_tokens=3,
    )
    # embeddings far apart, so that the end token is not the best translation of every sentence
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    (folder / "pictures").mkdir()
    (folder / "pictures" / "loss.png").write_bytes(b"a picture")
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "optimizer.pt").write_bytes(b"large and of no use")
    return folder


@pytest.fixture(scope="module")
def expected_file(run_folder: Path) -> Path:
    """File with the results of the model in this process, for comparison in other processes."""
    model, tokenizer = load_run(run_folder)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    target = torch.randint(4, len(tokenizer), (len(TEXTS), 5))
    translate = vanilla_transformer.TranslationPipeline(model, tokenizer)
    with torch.no_grad():
        expected = {
            "texts": TEXTS,
            "input_ids": inputs["input_ids"],
            "decoder_input_ids": target,
            "states": model.model(**inputs, decoder_input_ids=target).last_hidden_state,
            "logits": model(**inputs, decoder_input_ids=target).logits,
            "found": model.generate(**inputs),
            "translations": translate(TEXTS),
        }
    assert len({translation["translation_text"] for translation in expected["translations"]}) == 3
    path = run_folder.parent / "expected.pt"
    torch.save(expected, path)
    return path


@pytest.fixture(scope="module")
def hub(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStandIn]:
    """Hub that another process has published to, in every supported way."""
    with running_hub() as running:
        running.failing = r"POST /api/models/user/unlucky/commit/"
        code = f"""
from vanilla_transformer.loading import load_run
from vanilla_transformer.publishing import push_to_hub
from vanilla_transformer import TranslationPipeline
run = {str(run_folder)!r}
print(push_to_hub(run, {NAME!r}, commit_message="publish tiny").commit_url)
model, tokenizer = load_run(run)
push_to_hub(TranslationPipeline(model, tokenizer), "user/objects", private=True, revision="next")
push_to_hub({NAME!r}, "user/copy")
model.push_to_hub("user/weights")
try:
    push_to_hub(run, "user/unlucky")
except OSError as error:
    assert "500" in str(error), error
else:
    raise AssertionError("the Hub failed, and nobody said so")
try:
    push_to_hub(run, "someone/else")
except ValueError as error:
    print(error)
else:
    raise AssertionError("someone else's name was taken")
"""
        home = tmp_path_factory.mktemp("home-of-the-publisher")
        running.published = run_python(code, running, home)
        yield running


def run_python(code: str, hub: HubStandIn, home: Path, token: str | None = TOKEN) -> str:
    """Run code in a fresh process that can reach the stand-in only; return its output."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING", "PYTHONPATH"))
    }
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **hub.environment(home, token)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert hub.unknown == []
    return done.stdout


def loading(name: str, expected_file: Path, trust: bool | None) -> str:
    given = f"name, trust, expected_file = {name!r}, {trust}, {str(expected_file)!r}"
    return given + LOAD_AND_COMPARE


def test_one_push_is_one_commit_with_everything(hub, run_folder):
    history = list(hub.repositories["models", NAME].history("main"))
    assert [commit.title for commit in history] == ["publish tiny", "initial commit"]
    assert hub.published.splitlines()[0] == f"{hub.endpoint}/{NAME}/commit/{history[0].oid}"
    assert set(hub.files(NAME)) == CODE_FILES | {
        ".gitattributes",
        "README.md",
        "config.json",
        "generation_config.json",
        "metrics.jsonl",
        "model.safetensors",
        "pictures/loss.png",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_shared_weights_are_published_once(hub):
    content = hub.files(NAME)["model.safetensors"]
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert "model.encoder.embed_tokens.weight" in header
    assert not {"lm_head.weight", "model.decoder.embed_tokens.weight"} & header.keys()


def test_the_card_keeps_its_results_and_shows_how_to_load_the_model_by_name(hub):
    card = hub.files(NAME)["README.md"].decode()
    assert "value: 12.5" in card
    assert "pipeline_tag: translation" in card
    assert "runs/tiny" not in card
    assert f'pipeline("translation", model="{NAME}")' in card
    assert f'pipeline("translation", model="{NAME}", trust_remote_code=True)' in card


def test_it_loads_where_the_package_is_not_installed(hub, expected_file, tmp_path):
    again, from_pipeline = tmp_path / "again", tmp_path / "from_pipeline"
    code = f"""
{WITHOUT_THE_PACKAGE}
{loading(NAME, expected_file, True)}
for cls in classes:
    assert cls.__module__.startswith("transformers_modules."), cls
translate.save_pretrained({str(from_pipeline)!r})
model.save_pretrained({str(again)!r})
tokenizer.save_pretrained({str(again)!r})
"""
    run_python(code, hub, tmp_path, token=None)
    # saved by a process with code from the Hub only, and loaded by a third process
    for folder in (again, from_pipeline):
        assert {path.name for path in folder.glob("*.py")} == CODE_FILES
    code = f"""
{WITHOUT_THE_PACKAGE}
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
expected = torch.load({str(expected_file)!r})
tokenizer = AutoTokenizer.from_pretrained({str(again)!r}, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained({str(again)!r}, trust_remote_code=True)
inputs = tokenizer(expected["texts"], return_tensors="pt", padding=True)
with torch.no_grad():
    logits = model(**inputs, decoder_input_ids=expected["decoder_input_ids"]).logits
assert torch.equal(logits, expected["logits"])
# the code is not edited, so that the inference engine runs
assert torch.equal(model.generate(**inputs, engine="required"), expected["found"])
translate = pipeline("translation", model={str(again)!r}, trust_remote_code=True)
assert translate(expected["texts"]) == expected["translations"]
"""
    run_python(code, hub, tmp_path / "home", token=None)


def test_search_runs_the_code_that_was_edited_on_the_hub(run_folder, hub, tmp_path):
    edited = tmp_path / "edited"
    export_for_hub(run_folder, edited)
    path = edited / "modeling_vanilla_transformer.py"
    source = path.read_text(encoding="utf-8")
    line = "self.dropout(self.activation(self.fc1(x)))"
    path.write_text(source.replace(line, f"({line}).square()"), encoding="utf-8")
    code = f"""
{WITHOUT_THE_PACKAGE}
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
tokenizer = AutoTokenizer.from_pretrained({str(edited)!r}, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained({str(edited)!r}, trust_remote_code=True)
inputs = tokenizer({TEXTS!r}, return_tensors="pt", padding=True)
by_modules = model.generate(**inputs, return_dict_in_generate=True).sequences
assert torch.equal(model.generate(**inputs), by_modules)
translate = pipeline("translation", model={str(edited)!r}, trust_remote_code=True)
texts = tokenizer.batch_decode(by_modules, skip_special_tokens=True)
assert [found["translation_text"] for found in translate({TEXTS!r})] == texts
try:
    model.generate(**inputs, engine="required")
except ValueError as error:
    assert "FeedForward differs from the released code" in str(error), error
else:
    raise AssertionError("an engine was used that computes something else")
"""
    run_python(code, hub, tmp_path / "home", token=None)


def test_code_from_the_hub_saves_the_tokens_that_every_text_gets(run_folder, hub, tmp_path):
    published, saved = tmp_path / "published", tmp_path / "saved"
    export_for_hub(run_folder, published)
    code = f"""
{WITHOUT_THE_PACKAGE}
from tokenizers import normalizers, processors
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(published)!r}, trust_remote_code=True)
plain = tokenizer("dogs")["input_ids"]
tokenizer.add_bos_token = True
tokenizer.save_pretrained({str(saved)!r})
loaded = AutoTokenizer.from_pretrained({str(saved)!r}, trust_remote_code=True)
assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
assert loaded("dogs")["input_ids"] == [loaded.bos_token_id, *plain]
# a changed post-processor is saved too
unknown = tokenizer.unk_token, tokenizer.unk_token_id
tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
    single="<unk> $A <unk>", special_tokens=[unknown]
)
tokenizer.save_pretrained({str(saved)!r})
loaded = AutoTokenizer.from_pretrained({str(saved)!r}, trust_remote_code=True)
assert loaded("dogs")["input_ids"] == tokenizer("dogs")["input_ids"]
assert loaded("dogs")["input_ids"] == [unknown[1], *plain[:-1], unknown[1]]
# and a changed normalizer, beside tokens that a user added
tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
tokenizer.add_special_tokens({{"extra_special_tokens": ["<2de>"]}})
tokenizer.add_tokens(["zürich"])
tokenizer.save_pretrained({str(saved)!r})
loaded = AutoTokenizer.from_pretrained({str(saved)!r}, trust_remote_code=True)
text = "<2de> DOGS in Zürich"
assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
ids = loaded(text)["input_ids"]
assert ids[1] == loaded.convert_tokens_to_ids("<2de>")
assert ids[-2] == loaded.convert_tokens_to_ids("zürich")
assert loaded.decode(ids[1:-1]) == tokenizer.decode(ids[1:-1]) == "<2de> dogs in zürich"
"""
    run_python(code, hub, tmp_path / "home", token=None)


def test_it_loads_with_the_package_without_trust(hub, expected_file, tmp_path):
    code = f"""
import vanilla_transformer
{loading(NAME, expected_file, None)}
for cls in classes:
    assert cls.__module__.startswith("vanilla_transformer."), cls
assert pipeline("translation", model="user/copy")(expected["texts"]) == expected["translations"]
weights = AutoModelForSeq2SeqLM.from_pretrained("user/weights")
assert torch.equal(weights.generate(**inputs), expected["found"])
assert pipeline("translation", model=name, trust_remote_code=True)("dogs")
assert pipeline(model=name)("dogs")
"""
    run_python(code, hub, tmp_path, token=None)


def test_the_librarys_push_has_weights_and_no_code(hub):
    files = set(hub.files("user/weights"))
    assert "model.safetensors" in files
    assert not any(name.endswith(".py") for name in files)
    assert "auto_map" not in json.loads(hub.files("user/weights")["config.json"])


def test_a_private_push_to_a_branch_stays_private_and_on_it(hub):
    assert hub.repositories["models", "user/objects"].private
    assert set(hub.files("user/objects")) == {".gitattributes"}
    on_branch = hub.files("user/objects", revision="next")
    assert set(on_branch) >= CODE_FILES | {"README.md", "model.safetensors", "tokenizer.json"}
    with pytest.raises(errors.RepositoryNotFoundError):
        hub.api(token=False).model_info("user/objects")


def test_a_failed_push_leaves_no_partial_model(hub):
    assert any("user/unlucky/commit" in request for request in hub.requests)
    assert set(hub.files("user/unlucky")) == {".gitattributes"}


def test_a_name_of_someone_else_is_refused_in_one_sentence(hub):
    said = hub.published.splitlines()[-1]
    assert said.startswith("repo_id must be one that your token may write to")
    assert "'someone/else'" in said
    assert ("models", "someone/else") not in hub.repositories


@pytest.mark.parametrize("repo_id", ["tiny", "user/tiny/main", "user/", "us er/tiny"])
def test_an_invalid_name_is_refused_before_any_request(run_folder, repo_id):
    with pytest.raises(ValueError, match=r"repo_id|Repo id"):
        push_to_hub(run_folder, repo_id)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("nothing", "run must be a run folder, a model folder or a Hub name"),
        ("no configuration", "run must be a run folder.*run', a folder without config.json"),
        ("no weights", "run must be a run folder.*model.safetensors"),
        ("half the weights", "run must have complete weight files.*incomplete"),
        ("no tokenizer", "must hold a tokenizer.json"),
        ("another model", "run must be a vanilla_transformer, got a marian"),
        ("a model of an engine", "run must be .*run', whose config.json names no model_type"),
        ("a broken tokenizer", "tokenizer '.*run' cannot be loaded"),
        ({"model_type": "nosuch"}, "run must .*, whose model_type 'nosuch' is not in transformers"),
        ({"encoder_layers": 9}, "must be complete, but model.encoder.layers"),
        (
            {"encoder_layers": 1},
            "must all have a parameter in the model, got model.encoder.layers.1",
        ),
        ("half the search settings", "must have a generation_config.json of search settings"),
        ({"encoder_ffn_dim": "many"}, "run must be a run folder.*'encoder_ffn_dim'.*int"),
        ({"encoder_ffn_dim": 5}, "must be of shape .*, got .* in .*run"),
    ],
)
def test_a_run_that_cannot_be_read_is_refused(run_folder, tmp_path, damage, message):
    run = tmp_path / "run"
    if damage != "nothing":
        shutil.copytree(run_folder, run)
    weights = run / "model.safetensors"
    if damage == "no configuration":
        shutil.rmtree(run / "checkpoints")
        (run / "config.json").unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "a model of an engine":
        (run / "config.json").write_text('{"unk_token": "<unk>"}', encoding="utf-8")
    elif damage == "half the weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif damage == "half the search settings":
        (run / "generation_config.json").write_text('{"num_beams": 4', encoding="utf-8")
    elif damage == "no tokenizer":
        (run / "tokenizer.json").unlink()
    elif damage == "a broken tokenizer":
        (run / "tokenizer.json").write_text('{"a" 1}', encoding="utf-8")
    elif isinstance(damage, dict):
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        assert config.keys() >= damage.keys()
        (run / "config.json").write_text(json.dumps(config | damage), encoding="utf-8")
    elif damage == "another model":
        MarianConfig(vocab_size=290, pad_token_id=0, decoder_start_token_id=0).save_pretrained(run)
    with pytest.raises(ValueError, match=message):
        export_for_hub(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, "user/incomplete.*: user/incomplete has no config.json"), ("{}", "names no model_typ")],
)
def test_a_repository_without_a_configuration_is_refused(config, message, tmp_path, monkeypatch):
    folder = tmp_path / "incomplete"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    if config is not None:
        (folder / "config.json").write_text(config, encoding="utf-8")
    with running_hub() as hub:
        hub.add_folder("user/incomplete", folder)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        file_url = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", file_url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        with pytest.raises(ValueError, match=f"run must be a run folder.*{message}"):
            vanilla_transformer.load("user/incomplete")


def test_a_model_may_be_in_a_folder_called_checkpoints(run_folder, tmp_path):
    model = Path(shutil.copytree(run_folder, tmp_path / "checkpoints" / "mine"))
    assert load_run(model)[1].get_vocab() == load_run(run_folder)[1].get_vocab()


def test_a_tokenizer_of_another_model_is_not_published(run_folder, tmp_path):
    model, _ = load_run(run_folder)
    broken = tmp_path / "broken"
    model.save_pretrained(broken)
    other = vanilla_transformer.VanillaTransformerTokenizer().train_new_from_iterator(
        [f"{a}{b}" for a in "qwertz" for b in "asdfgh"] * 50, vocab_size=320
    )
    other.save_pretrained(broken)
    assert len(other) > model.config.vocab_size
    with pytest.raises(ValueError, match="tokenizer must be the model's own"):
        export_for_hub(broken, tmp_path / "out")


def test_publishing_leaves_no_trace_in_the_classes(run_folder, tmp_path):
    export_for_hub(run_folder, tmp_path / "export")
    model, tokenizer = load_run(run_folder)
    model.save_pretrained(tmp_path / "later")
    tokenizer.save_pretrained(tmp_path / "later")
    assert not list((tmp_path / "later").glob("*.py"))
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" in json.loads((tmp_path / "export" / name).read_text())
        assert "auto_map" not in json.loads((tmp_path / "later" / name).read_text())


def test_a_published_model_that_is_saved_again_names_no_missing_code(run_folder, tmp_path):
    published, again = tmp_path / "published", tmp_path / "again"
    export_for_hub(run_folder, published)
    model = AutoModelForSeq2SeqLM.from_pretrained(published)
    tokenizer = AutoTokenizer.from_pretrained(published)
    for folder in (again, published):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    TranslationPipeline(model, tokenizer).save_pretrained(tmp_path / "from_pipeline")
    assert not list(again.glob("*.py"))
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((again / name).read_text())
        # the code is still in the folder
        assert "auto_map" in json.loads((published / name).read_text())
    assert "custom_pipelines" not in json.loads((again / "config.json").read_text())
    expected = TranslationPipeline(model, tokenizer)(TEXTS)
    for folder in (again, published, tmp_path / "from_pipeline"):
        for trust in (False, True):
            translate = pipeline("translation", model=str(folder), trust_remote_code=trust)
            assert translate(TEXTS) == expected


def test_a_class_of_a_notebook_is_saved(run_folder, tmp_path, monkeypatch):
    class Mine(vanilla_transformer.VanillaTransformerForConditionalGeneration):
        pass

    Mine.register_for_auto_class("AutoModelForSeq2SeqLM")
    # a notebook has no file
    monkeypatch.setattr(Mine, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    Mine.from_pretrained(run_folder).save_pretrained(tmp_path / "saved")
    assert Mine.from_pretrained(tmp_path / "saved").config.d_model == 24


@pytest.mark.parametrize("name", ["runz/demo", "demo"])
def test_an_unknown_name_is_refused_at_once(name, tmp_path):
    program = """
import sys, time
from vanilla_transformer.loading import load_run
started = time.monotonic()
try:
    load_run(sys.argv[1])
except ValueError as error:
    print(error)
print(time.monotonic() - started < 9)
"""

    def said(environment):
        done = subprocess.run(
            [sys.executable, "-c", program, name],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        sentence, is_quick = done.stdout.splitlines()
        assert is_quick == "True"
        assert f"got '{name}': no such folder, and " in sentence
        return sentence

    with running_hub() as hub:
        online = hub.environment(tmp_path / "home")
        if "/" in name:
            assert "no such model on the Hub" in said(online)
    assert "cannot be reached" in said(online)
    assert "cannot be reached" in said({**online, "HF_HUB_OFFLINE": "1"})


def test_a_push_without_a_network_is_one_sentence(tmp_path):
    with running_hub() as hub:
        environment = hub.environment(tmp_path / "home")
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    program = "import sys; from vanilla_transformer.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "push", str(tmp_path / "model"), "me/model"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"error: the Hub at http://\S+ cannot be reached \(.*\): nothing .*", line)


def test_a_second_push_replaces_the_weights_and_keeps_foreign_files(hub, run_folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    api = hub.api()
    api.create_repo("user/twice")
    shard = "model-00001-of-00002.safetensors"
    for path in (shard, "notes.txt", "handler.py"):
        api.upload_file(path_or_fileobj=b"old", path_in_repo=path, repo_id="user/twice")
    push_to_hub(run_folder, "user/twice", token=TOKEN)
    files = hub.files("user/twice")
    assert shard not in files
    assert {"notes.txt", "handler.py", "model.safetensors"} <= files.keys()


def test_a_dataset_is_uploaded_and_downloaded(hub, tmp_path):
    code = """
import datasets
pairs = [{"de": f"Satz {i}", "en": f"sentence {i}"} for i in range(30)]
made = datasets.Dataset.from_list([{"translation": pair} for pair in pairs])
both = datasets.DatasetDict({"train": made, "test": made.select(range(7))})
both.push_to_hub("user/corpus", "de-en")
loaded = datasets.load_dataset("user/corpus", "de-en")
assert [row["translation"] for row in loaded["train"]] == pairs
assert loaded["test"].num_rows == 7
streamed = datasets.load_dataset("user/corpus", "de-en", split="test", streaming=True)
assert [row["translation"] for row in streamed] == pairs[:7]
"""
    run_python(code, hub, tmp_path)
    assert "de-en/train-00000-of-00001.parquet" in hub.files("user/corpus", "datasets")


class TestStandIn:
    """Tests of the stand-in: it answers like the real Hub."""

    @pytest.fixture(autouse=True)
    def _clients_in_this_process(self, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def test_files_come_back_whole_small_and_large(self, hub, tmp_path):
        api = hub.api()
        api.create_repo("user/files")
        contents = {
            "small.txt": b"hello",
            "sub/large.safetensors": os.urandom(70_000),
            "empty": b"",
        }
        for path, content in contents.items():
            (tmp_path / "up" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "up" / path).write_bytes(content)
        api.upload_folder(repo_id="user/files", folder_path=tmp_path / "up")
        down = Path(hub.api(False).snapshot_download("user/files", cache_dir=tmp_path / "cache"))
        for path, content in contents.items():
            assert (down / path).read_bytes() == content
        # only the large file was uploaded separately from the commit
        uploads = [request for request in hub.requests if request.startswith("PUT")]
        large = hub.repositories["models", "user/files"].at("main").files["sub/large.safetensors"]
        assert f"PUT /lfs-objects/{large.sha256}" in uploads
        assert [file.path for file in api.list_repo_tree("user/files")] == [
            ".gitattributes",
            "empty",
            "small.txt",
            "sub",
        ]

    def test_an_upload_without_changes_is_no_commit(self, hub):
        api = hub.api()
        api.create_repo("user/same")
        for _ in range(2):
            api.upload_file(path_or_fileobj=b"same", path_in_repo="a.txt", repo_id="user/same")
        assert len(api.list_repo_commits("user/same")) == 2

    def test_errors_name_the_missing_file_or_repository(self, hub):
        api = hub.api()
        api.create_repo("user/here")
        with pytest.raises(errors.RepositoryNotFoundError):
            api.model_info("user/nowhere")
        with pytest.raises(errors.RevisionNotFoundError):
            api.model_info("user/here", revision="no-branch")
        with pytest.raises(errors.RemoteEntryNotFoundError):
            api.hf_hub_download("user/here", "nothing.txt")
        with pytest.raises(errors.HfHubHTTPError, match="409"):
            api.create_repo("user/here")

    @pytest.mark.parametrize("token", [False, "hf_of_nobody"])
    def test_a_write_without_the_token_is_refused(self, hub, token):
        with pytest.raises(errors.HfHubHTTPError, match="401"):
            hub.api(token).create_repo("user/forbidden")
        assert ("models", "user/forbidden") not in hub.repositories

    def test_a_card_with_broken_metadata_is_refused(self, hub):
        hub.api().create_repo("user/card")
        with pytest.raises(ValueError, match="Invalid metadata"):
            hub.api().upload_file(
                path_or_fileobj=b"---\nlanguage: [en\n---\n",
                path_in_repo="README.md",
                repo_id="user/card",
            )


def test_a_published_model_with_edited_code_is_not_taken_for_this_release(tmp_path, caplog):
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    published = tmp_path / "published"
    export_for_hub(TranslationPipeline(model, tokenizer), published)
    load_run(published)
    AutoModelForSeq2SeqLM.from_pretrained(published)
    assert "other model code" not in caplog.text
    file = published / "modeling_vanilla_transformer.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("# CODEPATH", "# code path"), encoding="utf-8")
    load_run(published)
    edit = "x + self.dropout(sublayer(x))", "x - self.dropout(sublayer(x))"
    assert edit[0] in text
    file.write_text(text.replace(*edit), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"refers to custom code, modeling_vanilla_transformer\.py \(\w+ differs"
    ):
        load_run(published)
    inputs = {"input_ids": model.dummy_inputs["input_ids"]}
    inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        found, expected = (
            one.eval()(**inputs).logits for one in (load_run(published, True)[0], model)
        )
    assert (found - expected).abs().max() > 1e-2
    # the library uses the class that is registered for this name
    AutoModelForSeq2SeqLM.from_pretrained(published, trust_remote_code=True)
    assert "holds other model code than vanilla_transformer.modeling" in caplog.text
