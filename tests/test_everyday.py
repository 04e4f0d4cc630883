"""The scripts behind `make model`: the choice of everyday sentences, and the release."""

import json
import runpy
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration

FOLDER = Path(__file__).parents[1] / "results/everyday"
GOOD = [(f"I have {count} books.", f"Ich habe {count} Bücher.") for count in range(40)]
BAD = [
    ("Click OK", "Klicken Sie auf OK"),
    ("Great! have a good meal.", "Großartig! Guten Appetit."),
    ("Error 404_not_found.", "Fehler 404_not_found."),
    (f"I {'really ' * 12}like it.", "Ich mag es."),
    ("A dog runs.", "Ein Hund rennt."),
]


@pytest.fixture
def script():
    """Function that runs the module of a script, and returns its names."""
    return lambda name: runpy.run_path(str(FOLDER / f"{name}.py"))


def write(folder, name, splits):
    (folder / name).mkdir(parents=True)
    for split, pairs in splits.items():
        lines = [json.dumps({"translation": {"en": en, "de": de}}) for en, de in pairs]
        (folder / name / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    listed = f"---\nconfigs:\n- config_name: {name}\n  data_dir: {name}\n---\n"
    (folder / "README.md").write_text(listed, encoding="utf-8")
    return str(folder)


def test_whole_short_sentences_are_selected_once_and_none_of_the_left_out_corpus(script):
    select = script("select_pairs")["select"]
    assert select([*GOOD, *BAD, GOOD[0]], {"A dog runs."}) == GOOD
    # either side is enough
    assert select(GOOD, {GOOD[3][1]}) == GOOD[:3] + GOOD[4:]


def test_no_held_out_sentence_is_in_the_training_text(script):
    names = script("select_pairs")
    names["split"].__globals__["HELD_OUT"] = 5
    # a source with two translations must stay in training
    twice = [("Hello!", "Hallo!"), ("Hello!", "Guten Tag!")]
    splits = names["split"](GOOD + twice)
    assert [len(splits[name]) for name in ("train", "validation", "test")] == [32, 5, 5]
    assert set(twice) <= set(splits["train"])
    for side in (0, 1):
        texts = [{pair[side] for pair in splits[name]} for name in splits]
        assert not texts[0] & (texts[1] | texts[2])
        assert not texts[1] & texts[2]


def test_the_threshold_separates_poor_translations(script):
    best = script("release")["best_threshold"]
    values = torch.tensor([-2.0, -0.1, -1.5, -0.3, -0.9])
    is_poor = torch.tensor([True, False, True, False, True])
    threshold = best(values, is_poor)
    assert ((values < threshold) == is_poor).all()
    # one good translation below all poor ones cannot be separated
    mixed = best(torch.tensor([-3.0, -2.0, -1.0, -0.5]), torch.tensor([False, True, True, False]))
    assert mixed == -0.5


def test_the_release_has_calibrated_weights_in_float16_in_one_file(
    script, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.save_pretrained(run)
    tokenizer.save_pretrained(run)
    (run / "README.md").write_text("# A card\n", encoding="utf-8")
    # targets of the near corpus are the model's own translations
    ids = model.generate(**tokenizer(TEXTS, return_tensors="pt", padding=True))
    own = list(zip(TEXTS, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True))
    far = [(text, "nichts davon") for text in TEXTS]
    corpora = [
        write(tmp_path / name, "en-de", {"validation": pairs, "test": pairs})
        for name, pairs in (("near", own), ("far", far))
    ]
    names = script("release")
    names["main"].__globals__["SENTENCES"] = len(TEXTS)
    out = tmp_path / "release"
    sources = tmp_path / "sources.md"
    sources.write_text("Sentences of Tatoeba (CC BY 2.0 FR).\n", encoding="utf-8")
    flags = ["--near", corpora[0], "en-de", "--far", corpora[1], "en-de"]
    command = ["release.py", str(run), str(out), *flags, "--sources", str(sources)]
    monkeypatch.setattr(sys, "argv", command)
    names["main"]()
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(out)
    assert loaded.dtype == torch.float16
    found = loaded.generation_config.calibration
    assert found["near"]["poor"] == 0
    assert found["far"]["poor"] == 1
    assert found["sentences"] == 2 * len(TEXTS)
    assert found["marked"] == pytest.approx((found["near"]["marked"] + found["far"]["marked"]) / 2)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert card.startswith("# A card\n")
    assert f"than {found['threshold']:.2f}" in card.replace("\n", " ")
    assert "Tatoeba" in card
    with zipfile.ZipFile(f"{out}.zip") as packed:
        assert {"model.safetensors", "README.md", "tokenizer.json"} <= set(packed.namelist())
    assert "release.zip" in capsys.readouterr().out
    # without another corpus, and without a text about corpora
    monkeypatch.setattr(sys, "argv", ["release.py", str(run), str(out), *flags[:3]])
    names["main"]()
    found = VanillaTransformerForConditionalGeneration.from_pretrained(out).generation_config
    assert found.calibration["sentences"] == len(TEXTS)
    assert "far" not in found.calibration
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "Tatoeba" not in card
    assert "Name the corpora and their licenses" in card
    names["main"].__globals__["SENTENCES"] = 99
    message = f"must have the split validation with at least 99 pairs, got .* with {len(TEXTS)}"
    with pytest.raises(SystemExit, match=message):
        names["main"]()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"translation": {"en": "a", "fr": "b"}}, "translations of en and de, got en, fr."),
        ({"en": "a", "de": "b"}, "translations of en and de, got none."),
        ({"translation": {"en": "a", "de": "b"}}, "at least 4,000 everyday pairs .* got 0."),
    ],
)
def test_a_corpus_without_everyday_sentences_is_refused(
    record, message, script, tmp_path, monkeypatch
):
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    out = str(tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["select_pairs.py", str(tmp_path), "default", out])
    with pytest.raises(SystemExit, match=message):
        script("select_pairs")["main"]()
