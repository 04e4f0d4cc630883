"""Table 2, section 6.1: FLOPs of training, counted and as estimated in the paper."""

import argparse
import json
import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from train_toys import toy_settings, write_recipe

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.cli import main
from vanilla_transformer.paper.table2 import (
    TRAININGS,
    scored_runs,
    sections,
    sustained_flops,
    training_flops,
)
from vanilla_transformer.train.recipe import load_config


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.recipe)
def test_time_times_gpus_times_sustained_speed_is_the_papers_estimate(training):
    estimate = sustained_flops(training.hours)
    # two digits, as in the table
    assert float(f"{estimate:.1e}") == training.system.flops_de


@pytest.mark.parametrize(
    ("recipe", "d", "f", "h", "steps"),
    [("paper-base", 512, 2048, 8, 100_000), ("paper-big", 1024, 4096, 16, 300_000)],
)
def test_the_flops_of_the_papers_training_are_those_of_its_products(recipe, d, f, h, steps):
    tokens, length = 25_000 * steps, 30
    # a product of a token with an a x b matrix is 2 a b operations, three times with backward
    attention, feed_forward = 4 * d * d, 2 * d * f
    expected = {
        "encoder": 6 * tokens * 6 * (attention + feed_forward),
        "decoder": 6 * tokens * 6 * (2 * attention + feed_forward),
        "output projection": 6 * tokens * 37_000 * d,
        # for each pair of tokens of a sentence: a score and a weighted value, in every head
        "attention itself": 6 * tokens * 6 * 3 * length * h * (64 + 64),
    }
    assert training_flops(load_config(recipe), length) == pytest.approx(expected)


def test_the_count_is_that_of_torch_for_a_training_step():
    sizes = {"d_k": 6, "d_v": 10, "hidden_size": 32, "encoder_layers": 2, "decoder_layers": 3}
    sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 40}
    length, sentences = 7, 5
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(
            VanillaTransformerConfig(vocab_size=50, attn_implementation="eager", **sizes)
        )
        tokens = torch.zeros(sentences, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits.sum().backward()
    step = {"tokens_per_step": length * sentences, "max_steps": 1, "vocab_size": 50}
    config = load_config("paper-base", {**step, "model": sizes})
    assert sum(training_flops(config, length).values()) == counter.get_total_flops()


MEASURED = {
    **dict.fromkeys(("bleu_signature", "chrf_signature"), "how"),
    "sentences": 9,
    "chrf": 50.0,
    "exact_match": 0.0,
    "search": {},
}


def test_scores_of_a_run_stand_beside_its_corpus_and_the_flops_of_its_steps(tmp_path):
    run = tmp_path / "results" / "a-run"
    run.mkdir(parents=True)
    settings = toy_settings(tmp_path, run, max_steps=40)
    write_recipe(run / "recipe.yaml", settings)
    (run / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n{"step": 10, "loss": 1.0}\n')
    languages = {"source_lang": "en", "target_lang": "de"}
    score = {**languages, **MEASURED, "bleu": 12.5}
    scores = {
        "test": {**score, "dataset": "my corpus", "name": "x", "split": "test"},
        "other": {**score, "dataset": "wmt/wmt14", "name": "de-en", "split": "test"},
        "trees": {**languages, "f1": 1.0},
    }
    (run / "scores.json").write_text(json.dumps(scores))
    shutil.copytree(run, tmp_path / "results" / "group" / "seed-2")
    # without a recipe the FLOPs of a run are unknown
    (tmp_path / "results" / "no-run").mkdir()
    (tmp_path / "results" / "no-run" / "scores.json").write_text(json.dumps(scores))
    found = scored_runs(tmp_path / "results", 30)
    assert [(run.name, run.corpus, run.bleu, run.is_comparable) for run in found] == [
        ("a-run", "my corpus x", 12.5, False),
        ("a-run", "wmt/wmt14 de-en", 12.5, True),
        ("group/seed-2", "my corpus x", 12.5, False),
        ("group/seed-2", "wmt/wmt14 de-en", 12.5, True),
    ]
    whole = sum(training_flops(load_config("paper-base", settings), 30).values())
    assert found[0].flops == pytest.approx(whole * 10 / 40)


def test_the_flops_of_a_run_are_those_of_its_models_vocabulary(tmp_path):
    run = tmp_path / "results" / "a-run"
    run.mkdir(parents=True)
    settings = toy_settings(tmp_path, run, tokenizer=str(tmp_path / "tokenizer"))
    write_recipe(run / "recipe.yaml", settings)
    languages = {"source_lang": "en", "target_lang": "de", "split": "test"}
    scores = {**languages, "dataset": "wmt/wmt14", "name": "de-en", "bleu": 27.0}
    scores |= {**MEASURED, "compound_bleu": 28.0}
    (run / "scores.json").write_text(json.dumps({"test": scores}))
    assert [found.flops for found in scored_runs(tmp_path / "results", 30)] == [None]
    # a run with unknown FLOPs is not drawn
    flags = argparse.Namespace(results=tmp_path / "results", sentence_length=30)
    table = next(section for section in sections(flags) if section.name == "table2")
    texts = [text.get_text() for axes in table.figure.axes for text in axes.texts]
    assert "a-run" not in texts
    VanillaTransformerConfig(vocab_size=123).save_pretrained(run)
    (found,) = scored_runs(tmp_path / "results", 30)
    config = load_config("paper-base", {**settings, "tokenizer": None, "vocab_size": 123})
    assert found.flops == sum(training_flops(config, 30).values())


def test_the_flops_for_french_are_those_of_the_french_recipes(tmp_path):
    flags = argparse.Namespace(results=tmp_path, sentence_length=30)
    table = next(section for section in sections(flags) if section.name == "table2")
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    for panel, (language, ending) in enumerate((("de", ""), ("fr", "-en-fr"))):
        drawn = {
            tuple(point)
            for points in table.figure.axes[panel].collections
            for point in points.get_offsets().tolist()
        }
        for name, recipe in (
            ("Transformer (base)", "paper-base"),
            ("Transformer (big)", "paper-big"),
        ):
            expected = sum(training_flops(load_config(recipe + ending), 30).values())
            assert rows[name][f"our count, en-{language}"] == expected
            assert (expected, rows[name][f"en-{language}"]) in drawn


def test_only_bleu_with_split_compounds_is_drawn_beside_the_papers(tmp_path):
    def marked(**score) -> list[str]:
        run = tmp_path / "results" / "ours"
        run.mkdir(parents=True, exist_ok=True)
        write_recipe(run / "recipe.yaml", toy_settings(tmp_path, run))
        (run / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n')
        languages = {"source_lang": "en", "target_lang": "de", "split": "test"}
        corpus = {"dataset": "wmt/wmt14", "name": "de-en"}
        scores = {**languages, **corpus, **MEASURED, "bleu": 27.0, **score}
        (run / "scores.json").write_text(json.dumps({"test": scores}))
        flags = argparse.Namespace(results=tmp_path / "results", sentence_length=30)
        table = next(section for section in sections(flags) if section.name == "table2")
        return [text.get_text() for axes in table.figure.axes for text in axes.texts]

    assert "ours" not in marked()
    assert "ours" in marked(compound_bleu=28.0)


def test_without_results_the_study_says_that_no_run_was_found(tmp_path, capsys):
    folder = tmp_path / "out"
    none = ["--results", str(tmp_path / "nothing")]
    assert main(["paper", "table2", "--output_dir", str(folder), *none]) == 0
    assert "No run with scores was found" in capsys.readouterr().out
    sections = json.loads((folder / "study.json").read_text(encoding="utf-8"))["sections"]
    assert sections["runs"]["rows"] == []
    work = {row[0]: row for row in sections["work"]["rows"]}
    assert work["Transformer (base)"][4] == pytest.approx(3.28e18, rel=1e-3)
    assert main(["paper", "table2", "--sentence_length", "0"]) == 1
    assert "sentence_length must be at least 1, got 0." in capsys.readouterr().err
