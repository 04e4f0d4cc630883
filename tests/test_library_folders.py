"""Folders of transformers' own models: `load`, `translate` and `evaluate` take them as they are."""

import json

import pytest
import torch
from library_models import KINDS, SENTENCES, by_hand, make_pieces
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel

import vanilla_transformer
from vanilla_transformer.cli import main
from vanilla_transformer.loading import load_run
from vanilla_transformer.train.evaluate import evaluate

TEXTS = SENTENCES[:3]
ON_ENGINE = ("marian", "fsmt", "m2m100", "nllb")

pytestmark = pytest.mark.usefixtures("new_process")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder and expected translations of each kind."""
    home = tmp_path_factory.mktemp("folders")
    pieces, found = make_pieces(home), {}
    for kind, (make, languages) in KINDS.items():
        folder = home / kind
        folder.mkdir()
        torch.manual_seed(3)
        model, tokenizer = make(pieces, folder)
        model.generation_config.update(max_new_tokens=7, num_beams=2, max_length=None)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found[kind] = folder, by_hand(model.eval(), tokenizer, TEXTS, languages)
    return found


def flags_of(languages):
    return [part for name, code in languages.items() for part in (f"--{name}", code)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_loaded_and_translates_as_by_hand(kind, folders):
    folder, expected = folders[kind]
    translator = vanilla_transformer.load(folder, device="cpu", **KINDS[kind][1])
    assert [found["translation_text"] for found in translator(TEXTS)] == expected
    assert not any(module.training for module in translator.model.modules())


@pytest.mark.parametrize("setting", [{"revision": "v1"}, {"dtype": torch.bfloat16}])
def test_settings_of_from_pretrained_are_refused(setting, folders):
    (name,) = setting
    with pytest.raises(ValueError, match=f"load does not take {name}: give it to from_pretrained"):
        vanilla_transformer.load(folders["marian"][0], device="cpu", **setting)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_translates_with_a_folder(kind, folders, tmp_path, capsys):
    folder, expected = folders[kind]
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{text}\n" for text in TEXTS))
    flags = flags_of(KINDS[kind][1])
    assert main(["translate", str(folder), str(lines), *flags]) == 0
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_can_be_required_where_it_computes_the_model(kind, folders, capsys, tmp_path):
    folder, _ = folders[kind]
    lines = tmp_path / "lines.txt"
    lines.write_text(f"{TEXTS[0]}\n")
    flags = [*flags_of(KINDS[kind][1]), "--engine", "required"]
    assert main(["translate", str(folder), str(lines), *flags]) == int(kind not in ON_ENGINE)
    said = capsys.readouterr().err
    refused = "needs the inference engine, which cannot be used: " in said
    assert refused == (kind not in ON_ENGINE), said


def test_a_folder_is_converted_once_for_all_lines(folders, tmp_path, monkeypatch):
    from vanilla_transformer.conversion import shared_weights
    from vanilla_transformer.train import translate

    converted = []
    (kind,) = (it for it in shared_weights.CONVERSIONS if it.__name__ == "MarianMTModel")
    convert = shared_weights.CONVERSIONS[kind]

    def counted(model, copy):
        converted.append(model)
        return convert(model, copy)

    monkeypatch.setitem(shared_weights.CONVERSIONS, kind, counted)
    # each read gives one line
    monkeypatch.setattr(translate, "PIPE_BYTES", 8)
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{text}\n" for text in TEXTS))
    assert len(list(translate.run([str(folders["marian"][0]), str(lines)], "translate"))) == 3
    assert len(converted) == 1


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("nllb", [], "src_lang and tgt_lang must be given for a multilingual model"),
        ("nllb", ["--src_lang", "eng_Latn"], "src_lang and tgt_lang must be given"),
        ("nllb", ["--src_lang", "en", "--tgt_lang", "deu_Latn"], "src_lang must be a language of"),
        ("marian", ["--src_lang", "de"], "src_lang must be 'en': the model translates en to de"),
        ("t5", ["--length_penalty_alpha", "0.6"], "length_penalty_alpha needs the inference engi"),
        ("bart", ["--max_extra_tokens", "9"], "max_extra_tokens needs the inference engine"),
    ],
)
def test_what_a_model_cannot_do_is_refused(kind, flags, message, folders, tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    lines.write_text(f"{TEXTS[0]}\n")
    assert main(["translate", str(folders[kind][0]), str(lines), *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said


def test_the_papers_search_runs_on_the_engine(folders, tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    lines.write_text(f"{TEXTS[0]}\n")
    flags = ["--length_penalty_alpha", "0.6", "--max_extra_tokens", "3"]
    assert main(["translate", str(folders["marian"][0]), str(lines), *flags]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("kind", ["marian", "nllb"])
def test_a_folder_is_evaluated(kind, folders, tmp_path):
    folder, expected = folders[kind]
    rows = [{"translation": {"en": text, "de": text}} for text in TEXTS]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    scores = evaluate(
        folder,
        dataset=corpus,
        source_lang="en",
        target_lang="de",
        output_dir=tmp_path / "out",
        **KINDS[kind][1],
    )
    assert scores["bleu_signature"]
    (written,) = (tmp_path / "out" / "hypotheses").glob("*.translation.txt")
    assert written.read_text().splitlines() == expected


def test_a_model_that_is_no_encoder_decoder_is_refused(tmp_path):
    BertLMHeadModel(
        BertConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, is_decoder=True
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be an encoder-decoder for translation, got a bert"):
        vanilla_transformer.load(tmp_path)


def changed(folders, tmp_path, change):
    """Copy the Marian folder with other weights."""
    folder = tmp_path / "changed"
    folder.mkdir()
    for path in folders["marian"][0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_unknown_weights_are_ignored(folders, tmp_path):
    folder = changed(folders, tmp_path, lambda weights: weights.update(old=torch.ones(2)))
    translator = vanilla_transformer.load(folder, device="cpu")
    assert [found["translation_text"] for found in translator(TEXTS)] == folders["marian"][1]


def test_missing_weights_are_refused(folders, tmp_path):
    name = "model.encoder.layers.0.fc1.weight"
    folder = changed(folders, tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match=f"must be complete, but {name}"):
        vanilla_transformer.load(folder)


def test_tools_for_models_of_this_package_refuse_others(folders):
    with pytest.raises(ValueError, match="run must be a vanilla_transformer, got a marian"):
        load_run(folders["marian"][0])
