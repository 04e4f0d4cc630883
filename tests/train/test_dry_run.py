"""Preview of a run."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.tokenization.learning import learn_vocabulary
from vanilla_transformer.train.__main__ import main
from vanilla_transformer.train.data.prepare import load_texts
from vanilla_transformer.train.dry_run import describe, flops_per_token
from vanilla_transformer.train.recipe import load_config
from vanilla_transformer.train.schedule import learning_rate_of


def groups(text):
    """Return the lines of each group, by title."""
    found = {}
    for block in text.strip().split("\n\n"):
        title, *lines = block.split("\n")
        assert all(line.startswith("  ") for line in lines)
        found[title] = [line[2:] for line in lines]
    return found


def test_a_dry_run_counts_every_parameter_and_trains_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["paper-base", "--dry_run"]) == 0
    out = capsys.readouterr().out
    # no attention biases, biased feed-forward, embeddings tied three ways
    attention, feed_forward, norm = 4 * 512 * 512, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    layers = 6 * (attention + feed_forward + 2 * norm) + 6 * (
        2 * attention + feed_forward + 3 * norm
    )
    assert f"parameters: {37000 * 512 + layers:,} with 37,000 tokens" in out
    assert "tokens per step: 25,000" in out
    assert "total tokens: 2,500,000,000" in out
    assert "warmup_steps: 4000" in out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_the_smallest_model_counts_bytes(capsys, tmp_path):
    tiny = "{hidden_size: 2, encoder_layers: 1, decoder_layers: 1, encoder_ffn_dim: 1, "
    tiny += "decoder_ffn_dim: 1, encoder_attention_heads: 1, decoder_attention_heads: 1}"
    assert main(["demo", "--dry_run", "--model", tiny, "--max_length", "2"]) == 0
    assert " bytes for a source and a target token" in capsys.readouterr().out


def test_a_dry_run_counts_with_the_tokenizer_that_was_given(tmp_path):
    learn_vocabulary(["a b c"] * 3, 262).save_pretrained(tmp_path)
    config = load_config("demo", {"tokenizer": str(tmp_path)})
    assert " with 262 tokens" in describe(config, "demo")
    config = load_config("demo", {"bleu_tokenizer": "13b"})
    with pytest.raises(ValueError, match=r"bleu_tokenizer must be one of .*, got '13b'.*13a"):
        describe(config, "demo")


@pytest.mark.parametrize(
    ("steps", "cooldown", "highest"), [(9000, 0, 4000), (100, 0, 100), (4500, 1000, 3500)]
)
def test_the_highest_rate_is_one_that_the_run_has(steps, cooldown, highest):
    config = load_config("paper-base", {"max_steps": steps, "cooldown_steps": cooldown})
    rate = max(map(learning_rate_of(config, 512), range(1, steps + 1)))
    assert f"peak learning rate: {rate:.3g} at step {highest:,}\n" in describe(config, "paper-base")


def test_the_settings_of_a_dry_run_are_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    for language in ("de", "en"):
        (tmp_path / f"my/text: 1.{language}").write_text("a b c\n", encoding="utf-8")
    config = load_config("iwslt14", {"adam_epsilon": 1e-7, "dataset": "my/text: 1"})
    found = groups(describe(config, "iwslt14"))
    other = yaml.safe_load("\n".join(found["settings that differ from the paper's base model"]))
    default = yaml.safe_load("\n".join(found["default settings"]))
    assert {**other, **default} == dataclasses.asdict(config)
    assert (other["vocab_size"], default["label_smoothing"]) == (10_000, 0.1)
    assert not other.keys() & default.keys()


def test_a_dry_run_says_what_the_recipe_is_and_what_it_gave():
    found = groups(describe(load_config("demo"), "demo"))
    assert found["demo"][0].startswith("Dates, money, countries")
    measured = dict(line.split(": ", 1) for line in found["measured, with the unchanged recipe"])
    assert measured["results"].startswith("results/")
    assert not any(title.startswith("measured") for title in groups(describe_base()))


def test_a_dry_run_refuses_what_the_run_would():
    for slip in ({"report_to": ["wandbb"]}, {"bleu_tokenizer": "31a"}):
        with pytest.raises(ValueError, match=f"{next(iter(slip))} must be .* Did you mean"):
            describe(load_config("demo", slip), "demo")


def test_a_dry_run_shows_the_first_pairs_as_they_are_read(tmp_path):
    table = tmp_path / "pairs.tsv"
    table.write_text('a "b"\tc\x1b\n' + "d\te\n" * 5, encoding="utf-8")
    other = tmp_path / "other.tsv"
    other.write_text("f\tgg\n", encoding="utf-8")
    settings = {"dataset": str(table), "mix": [{"dataset": str(other)}], "source_lang": "de"}
    settings["target_lang"] = "en"
    found = groups(describe(load_config("demo", settings), "demo"))
    assert found[f"first pairs of {table}, 6 in total"] == [
        "de, 5 characters: 'a \"b\"'",
        "en, 2 characters: 'c\\x1b'",
        *["de, 1 character: 'd'", "en, 1 character: 'e'"] * 2,
    ]
    assert found[f"first pairs of {other}, 1 in total"][1] == "en, 2 characters: 'gg'"
    learn_vocabulary(["a b c"] * 3, 262).save_pretrained(tmp_path / "tokenizer")
    settings |= {"tokenizer": str(tmp_path / "tokenizer"), "mix": [], "streaming": True}
    found = groups(describe(load_config("demo", settings), "demo"))
    # a token for each byte with the space before a word, and the end token
    assert found[f"first pairs of {table}"][1:3] == ["en, 4 tokens: 'c\\x1b'", "de, 3 tokens: 'd'"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dry_run_refuses_the_text_that_training_would(streaming, tmp_path):
    table = tmp_path / "pairs.tsv"
    table.write_text("a\tb\n" * 9 + "c\n", encoding="utf-8")
    config = load_config("demo", {"dataset": str(table), "streaming": streaming})
    sentences = []
    for refusing in (lambda: describe(config, "demo"), lambda: load_texts(config)):
        with pytest.raises(ValueError, match="line 10 must have 2 columns") as refused:
            refusing()
        sentences.append(str(refused.value))
    assert len(set(sentences)) == 1
    with pytest.raises(ValueError, match="dataset must be a file that exists, got"):
        describe(load_config("demo", {"dataset": "my/pears.tsv"}), "demo")


def test_a_dry_run_refuses_text_that_is_not_readable(tmp_path):
    table = tmp_path / "pairs.tsv"
    table.write_text("a\tb\nc\tf\u00c3\u00bcr\nd\tsch\u00c3\u00b6n\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"UTF-8 without signs .* kept 1, wrong_encoding 2"):
        describe(load_config("demo", {"dataset": str(table)}), "demo")
    table.write_text("a\tb\nc\tf\u00c3\u00bcr\nd\tb c\n", encoding="utf-8")
    found = groups(describe(load_config("demo", {"dataset": str(table)}), "demo"))
    assert found["training text"] == [
        "2 pairs to train on; averages per sentence: en 1.0 characters, 1.0 words; de 2.0 "
        "characters, 1.5 words",
        f"training pairs of {table}: kept 2, wrong_encoding 1, empty 0",
    ]


@pytest.mark.parametrize("dataset", ["./nope", "/tmp/nope", "a/b/c/nope", "a--b", "my text"])
def test_a_dry_run_refuses_a_dataset_that_can_be_nowhere(dataset, tmp_path):
    for settings in ({"dataset": dataset}, {"mix": [{"dataset": dataset}]}):
        config = load_config("paper-base", settings)
        with pytest.raises(ValueError, match="dataset must be a file, a folder or a Hub name, got"):
            describe(config, "paper-base")


def test_a_dry_run_refuses_text_files_in_other_languages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for language in ("fr", "cs"):
        Path(f"news.{language}").write_text("a\n", encoding="utf-8")
    with pytest.raises(ValueError, match="got 'news', which has files in cs, fr"):
        describe(load_config("paper-base", {"dataset": "news"}), "paper-base")


def test_a_dry_run_says_which_text_it_has_not_read(tmp_path):
    (tmp_path / "pairs.tsv").write_text("a\tb\n", encoding="utf-8")
    mix = [{"dataset": str(tmp_path / "pairs.tsv")}, {"dataset": "wmt14"}]
    computed = groups(describe(load_config("paper-base", {"mix": mix}), "paper-base"))["computed"]
    assert "text: not read, because a dry run downloads nothing: wmt/wmt14, wmt14" in computed


def describe_base():
    return describe(load_config("paper-base"), "paper-base")


@pytest.mark.parametrize("row", ["base", "B1", "C4", "big"])
def test_the_work_of_a_token_is_that_of_the_products_with_weights(row):
    config = VanillaTransformerConfig.from_paper(row, decoder_layers=3)
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    d, f, h = config.d_model, config.encoder_ffn_dim, config.encoder_attention_heads
    d_k, d_v = config.d_k or d // h, config.d_v or d // h
    attention = 2 * d * h * d_k + 2 * d * h * d_v
    encoder, decoder = attention + 2 * d * f, 2 * attention + 2 * d * f
    expected = 6 * (6 * encoder + 3 * decoder + config.vocab_size * d)
    assert flops_per_token(model) == expected
