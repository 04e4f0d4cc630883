"""Every command and function that reads a damaged file names it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import train_toys

from vanilla_transformer.cli import main
from vanilla_transformer.conversion.command import run as run_convert
from vanilla_transformer.loading import load, load_run, read_tokenizer
from vanilla_transformer.publishing import export_for_hub
from vanilla_transformer.train.averaging import average_run
from vanilla_transformer.train.evaluate import evaluate
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.recipe import load_config


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    corpus = train_toys.write_corpus(folder / "corpus")
    # these paths are Path objects, not text
    settings = {**train_toys.toy_settings(corpus, folder / "run", max_steps=4), "dataset": corpus}
    train(load_config("paper-base", {**settings, "output_dir": folder / "run"}))
    evaluate(folder / "run")
    return folder / "run"


@pytest.fixture
def run(evaluated, tmp_path):
    return Path(shutil.copytree(evaluated, tmp_path / "run"))


def change(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


LOAD = (
    lambda run: load_run(run),
    lambda run: load(str(run)),
    lambda run: export_for_hub(str(run), run.parent / "out"),
)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"dtype": "float13"}, "dtype must be the name of a floating-point dtype"),
        ("config.json", {"dtype": 32}, "dtype must be the name of a floating-point dtype"),
        ("config.json", {"auto_map": ["x"]}, "auto_map must be a mapping"),
        ("config.json", {"auto_map": {"AutoConfig": 5}}, "auto_map.AutoConfig must be text"),
        ("config.json", {"architectures": "x"}, "architectures must be a list"),
        ("config.json", {"vocab_size": "290"}, "vocab_size must be an integer"),
        ("config.json", {"decoder_start_token_id": 290}, "decoder_start_token_id must be below"),
        ("config.json", {"hidden_size": None}, "hidden_size"),
        ("generation_config.json", {"num_beams": "4"}, "num_beams|'str' and 'int'"),
        ("generation_config.json", {"num_return_sequences": 0}, "num_return_sequences must be"),
        ("generation_config.json", {"decoder_start_token_id": 290}, "decoder_start_token_id must"),
        ("generation_config.json", {"eos_token_id": [2, 999]}, "eos_token_id must be"),
        ("generation_config.json", {"length_penalty": 10**400}, "length_penalty must be a number"),
        ("config.json", {"dropout": 10**400}, "dropout must be"),
        ("config.json", {"transformers_version": None, "hiden_size": 5}, "hiden_size is not a"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "model_max_length must be a number"),
        ("tokenizer_config.json", {"pad_token": 5}, "pad_token must be text"),
        ("tokenizer_config.json", {"auto_map": "x.T"}, "auto_map must be a mapping of addresses"),
        ("tokenizer.json", {"model": 5}, "cannot be loaded"),
        ("tokenizer.json", {"added_tokens": "x"}, "cannot be loaded"),
    ],
)
@pytest.mark.parametrize("read", LOAD, ids=["load_run", "load", "export_for_hub"])
def test_a_file_of_a_model_is_named(run, read, file, changes, message):
    change(run / file, **changes)
    with pytest.raises(ValueError, match=message) as refused:
        read(run)
    assert str(run) in "".join([str(refused.value), *getattr(refused.value, "__notes__", ())])
    assert len(str(refused.value)) < 2000


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n"


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("read", LOAD, ids=["load_run", "load", "export_for_hub"])
def test_a_clone_without_files_in_lfs_is_named(run, read, file):
    (run / file).write_bytes(LFS_POINTER)
    with pytest.raises(
        ValueError, match=rf"{run / file} must be a complete file, .* `git lfs pull`"
    ):
        read(run)


def test_a_shard_in_lfs_is_named(run):
    load_run(run)[0].save_pretrained(run, max_shard_size="20KB")
    (run / "model.safetensors").unlink()
    shard = max(run.glob("model-*.safetensors"))
    shard.write_bytes(LFS_POINTER)
    # a file that is not loaded may be a pointer
    (run / "pytorch_model.bin").write_bytes(LFS_POINTER)
    with pytest.raises(ValueError, match=rf"{shard} must be a complete file, got a pointer of Git"):
        load_run(run)


def test_weights_that_may_not_be_read_are_not_called_missing(run, monkeypatch):
    opened = Path.open

    def refuse(path, *arguments, **options):
        if path.name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"Permission denied: .*model\.safetensors"):
        load_run(run)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("model.npz", r"Convert a model of Marian .*\.convert_marian_to_pytorch"),
        ("model.pt", "`vanilla-transformer convert` reads checkpoints"),
        ("best.ckpt", "`vanilla-transformer convert joeynmt` reads checkpoints"),
        ("params.best", "A model of Sockeye cannot be converted: use its own toolkit, or train"),
        ("params.00012", "A model of Sockeye cannot be converted"),
        ("model.00.safetensors", "A model of Eole cannot be converted"),
        ("ckpt-500.index", r"A model of TensorFlow \(OpenNMT-tf, tensor2tensor\) cannot be"),
        ("ckpt-500.data-00000-of-00001", "A model of TensorFlow"),
        (
            "model.bin",
            "The file model.bin is a model of CTranslate2: use the model that it was exp",
        ),
    ],
)
def test_a_model_of_another_toolkit_is_refused_with_the_way_to_convert_it(name, advice, tmp_path):
    (tmp_path / name).touch()
    for source, rest in ((tmp_path, "a folder without config.json"), (tmp_path / name, name)):
        with pytest.raises(ValueError, match=rf"{rest}'?\. {advice}"):
            load_run(source)
    with pytest.raises(ValueError, match=advice):
        run_convert(["marian", str(tmp_path), str(tmp_path / "out")], "convert")
    if name.endswith(("pt", "ckpt")):
        return
    for kind in ("fairseq", "opennmt", "joeynmt"):
        with pytest.raises(ValueError, match=advice):
            run_convert([kind, str(tmp_path), str(tmp_path / "out")], "convert")
        with pytest.raises(ValueError, match=advice):
            run_convert([kind, str(tmp_path / name), str(tmp_path / "out")], "convert")


def test_a_checkpoint_is_recognized_by_its_name_without_suffix(tmp_path):
    """The programs of TensorFlow take such a name."""
    for suffix in ("index", "data-00000-of-00001"):
        (tmp_path / f"ckpt-500.{suffix}").touch()
    for read in (load_run, lambda it: run_convert(["fairseq", str(it), "out"], "convert")):
        with pytest.raises(ValueError, match=r"no such f.* A model of TensorFlow"):
            read(tmp_path / "ckpt-500")
    with pytest.raises(ValueError, match=r"no such folder\.$"):
        load_run(tmp_path / "ckpt")


def test_weights_of_sockeye_that_torch_reads_are_named(tmp_path):
    torch.save({"decoder.layers.0.weight": torch.zeros(2)}, tmp_path / "params.best")
    with pytest.raises(ValueError, match=r"'model', got decoder\..* A model of Sockeye cannot"):
        run_convert(["fairseq", str(tmp_path / "params.best"), str(tmp_path / "out")], "convert")


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (["model.bin", "shared_vocabulary.json"], "model.bin is a model of CTranslate2"),
        (["model.00.safetensors", "vocab.json"], "A model of Eole cannot be converted"),
        (["weights"], "Models of other programs, such as CTranslate2 and Eole, run only in these"),
    ],
)
def test_a_configuration_of_another_program_is_named(files, advice, tmp_path):
    (tmp_path / "config.json").write_text('{"model": {"architecture": "transformer"}}')
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"config\.json names no model_type\. .*{advice}"):
        load_run(tmp_path)
    message = "names no model_type" if files == ["weights"] else rf"model_type\. .*{advice}"
    with pytest.raises(ValueError, match=message):
        run_convert(["marian", str(tmp_path), str(tmp_path / "out")], "convert")


def test_a_large_model_without_weights_is_not_refused_for_its_sizes(run):
    (run / "model.safetensors").unlink()
    change(run / "config.json", hidden_size=4096)
    with pytest.raises(ValueError, match=r"no file named model\.safetensors"):
        load_run(run)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", '{"model_type": "t5"}', "it has none of spiece.model, tokenizer.json"),
        ("config.json", '{"model_type": "bart"}', "it has none of vocab.json, merges.txt, token"),
        # as `save_model` of the library tokenizers writes it
        ("vocab.txt", "[UNK]\na\n", "it has no tokenizer.json, which `save` of the library"),
    ],
)
def test_a_tokenizer_without_its_files_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"cannot be loaded: {message}"):
        read_tokenizer(tmp_path)


NOT_JSON = (b"", b"\xff\xfe{\0", b"[" * 99_999, b"{", b'{"a": 1, "a": 2}', b"[]", b"5", b"null")


@pytest.mark.parametrize("content", NOT_JSON)
@pytest.mark.parametrize(
    "file",
    ["config.json", "generation_config.json", "tokenizer_config.json", "scores.json"],
)
def test_a_file_without_a_mapping_is_refused(run, file, content, capsys):
    (run / file).write_bytes(content)
    command = ["evaluate"] if file == "scores.json" else ["translate"]
    assert main([*command, str(run)]) == 1
    said = capsys.readouterr().err
    (sentence,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert str(run) in sentence
    assert "unexpected" not in sentence
    assert len(sentence) < 2000


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("scores.json", b'{"test": {"bleu": 5}}', "scores.json: test must have dataset"),
        ("scores.json", b'{"test": 5}', "scores.json: test must be a mapping, got 5"),
        ("average.json", b'{"steps": []}', "average.json must have ema_decay"),
        (
            "average.json",
            b'{"steps": [], "ema_decay": null, "seconds": null}',
            "average.json: steps must be a list of at least 1",
        ),
        (
            "average.json",
            b'{"steps": [8], "ema_decay": null, "seconds": ' + b"9" * 400 + b"}",
            "average.json: seconds must be a number of at most 2^63 - 1 in size",
        ),
        ("metrics.jsonl", b'{"step": "8"}\n', "metrics.jsonl line 1: step must be an integer"),
        (
            "metrics.jsonl",
            b'{"step": 8, "loss": "x"}\n',
            "line 1: loss must be a number of at most 2^63 - 1 in size or",
        ),
        ("metrics.jsonl", b"\xff\n", "metrics.jsonl must be UTF-8"),
        ("environment.txt", b"cpus: many\n", "environment.txt: cpus must be an integer"),
        ("environment.txt", b"\xff", "environment.txt must be UTF-8"),
        ("recipe.yaml", b"\xff", "recipe.yaml must be UTF-8"),
    ],
)
def test_a_file_of_a_run_is_named_by_evaluate(run, file, content, message, capsys):
    (run / file).write_bytes(content)
    assert main(["evaluate", str(run)]) == 1
    said = capsys.readouterr().err
    sentences = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1
    assert message in sentences[0]


@pytest.mark.parametrize("metadata", ["a: b: c", "- 5", "5: x", "{", "a: [", "tags: *x"])
def test_a_model_card_with_bad_metadata_is_named(run, metadata, tmp_path):
    (run / "README.md").write_text(f"---\n{metadata}\n---\n# A model\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"README.md must begin with its metadata in YAML: \S"):
        export_for_hub(run, tmp_path / "out", "user/name")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"\xff", b"\0", b"class", b"(" * 9999, b"-" * 99_999 + b"1"])
def test_published_code_that_cannot_be_parsed_is_not_trusted(run, content, tmp_path):
    folder = tmp_path / "out"
    export_for_hub(run, folder)
    (folder / "modeling_vanilla_transformer.py").write_bytes(content)
    with pytest.raises(ValueError, match=r"modeling_vanilla_transformer\.py .*cannot be parsed"):
        load_run(folder)


def test_an_environment_that_is_no_text_is_named_when_a_run_is_resumed(corpus, tmp_path):
    config = train_toys.toy_config(corpus, tmp_path / "run", max_steps=2)
    train(config)
    (tmp_path / "run" / "environment.txt").write_bytes(b"\xe1")
    later = train_toys.toy_config(corpus, tmp_path / "run", max_steps=3)
    with pytest.raises(ValueError, match=r"environment\.txt must be UTF-8"):
        train(later, resume=True)


def test_saved_translations_that_are_no_text_are_named(run, capsys):
    path = run / "hypotheses" / "test.source.txt"
    path.write_bytes(b"\xff\n")
    assert main(["evaluate", str(run), "--against", str(run)]) == 1
    assert f"{path} must be UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["average", "RUN", "--output_dir", ""],
        ["average", ""],
        ["evaluate", "RUN", "--output_dir", ""],
        ["evaluate", ""],
        ["translate", ""],
        ["train", "demo", "--output_dir", ""],
        ["tokenize", "demo", "--output_dir", " "],
        ["demo", "--output_dir", ""],
        ["paper", "schedule", "--output_dir", ""],
        ["export", "onnx", "RUN", ""],
    ],
)
def test_a_folder_without_a_name_is_refused(evaluated, arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = [str(evaluated) if argument == "RUN" else argument for argument in arguments]
    assert main(given) == 1
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert "''" in said or "' '" in said
    assert not list(tmp_path.iterdir())


def test_a_path_object_works_like_its_text(run, tmp_path):
    said = average_run(str(run), num_checkpoints=1, output_dir=str(tmp_path / "one"))
    assert said == average_run(run, num_checkpoints=1, output_dir=tmp_path / "other")
    assert evaluate(run, output_dir=tmp_path / "other", against=run)["against"]
    with pytest.raises(ValueError, match="folder must be the path of a folder, got ''"):
        export_for_hub(run, "")


def test_a_search_with_settings_that_a_run_does_not_have_is_another_search(run):
    scores = json.loads((run / "scores.json").read_text())
    scores["test"]["search"]["num_beamss"] = 4
    (run / "scores.json").write_text(json.dumps(scores))
    average_run(run, num_checkpoints=1)
    assert "num_beamss 4" in (run / "README.md").read_text()
