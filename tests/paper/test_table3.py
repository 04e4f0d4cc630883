"""Table 3, section 6.2: its rows, their parameters, and the scaled rows trained."""

import argparse
import json
import math

import equations
import pytest
import torch
import torch.nn.functional as F

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.cli import main
from vanilla_transformer.configuration_vanilla_transformer import PAPER_ROWS
from vanilla_transformer.paper import table3
from vanilla_transformer.paper.table3 import differences, parameters, ranks, training
from vanilla_transformer.paper.table3.scaled import scaled_sizes
from vanilla_transformer.train import loop
from vanilla_transformer.train.recipe import load_config
from vanilla_transformer.train.run_folder.environment import read_environment
from vanilla_transformer.train.vocabulary import load_tokenizer

TOY = "--scale 16 --layers 3 --learned_vocab_size 290 --max_length 60 --max_steps 6"
TOY = f"{TOY} --tokens_per_step 300 --train --rows"


def toy(corpus, folder, *rows):
    """Return the command line of a table that takes seconds."""
    given = ["--dataset", str(corpus), "--output_dir", str(folder)]
    return ["paper", "table3", *given, *TOY.split(), *rows]


def trained_rows(folder):
    """Read the table of the trained rows, by row."""
    written = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    trained = written["sections"]["trained"]
    return {row[0]: dict(zip(trained["columns"], row, strict=True)) for row in trained["rows"]}


def test_the_table_has_every_row_that_the_package_knows():
    assert table3.PAPER.keys() == PAPER_ROWS.keys()


@pytest.mark.parametrize("row", equations.PARAMETERS)
def test_parameters_are_those_that_follow_from_the_sizes(row):
    parts = table3.parameters_by_part(table3.paper_sizes(row, 37000))
    assert sum(parts.values()) / 1e6 == pytest.approx(equations.PARAMETERS[row], abs=0.005)


def test_the_parts_of_a_model_are_all_of_it(small_model):
    model = small_model(position_encoding="learned", max_position_embeddings=9)
    parts = table3.parameters_by_part(model.config)
    assert parts["embedding"] == 23 * 12
    assert parts["positions"] == 2 * 9 * 12
    assert parts["decoder"] == sum(p.numel() for p in model.get_decoder().layers.parameters())
    assert sum(parts.values()) == model.num_parameters()


def test_a_model_with_the_implied_vocabulary_has_the_papers_count():
    for row, paper in table3.PAPER.items():
        if paper.parameters is None:
            continue
        config = table3.paper_sizes(row, 1000)
        tokens = parameters.implied_vocabulary(config, paper.parameters * 1e6)
        counted = table3.parameters_by_part(table3.paper_sizes(row, round(tokens)))
        assert sum(counted.values()) == pytest.approx(paper.parameters * 1e6, abs=config.d_model)


def test_the_vocabulary_that_fits_most_rows_is_where_most_intervals_meet():
    rows = {"a": (1.5, 8.0), "b": (3.0, 5.5), "c": (5.0, 9.0), "d": (20.0, 30.0)}
    assert parameters.vocabularies_that_fit(rows) == (range(5, 6), ["a", "b", "c"])


@pytest.mark.parametrize(
    ("rows", "said"), [([], "in 8 of 10 rows."), (["B1", "C5"], "in 1 of 2 rows.")]
)
def test_base_does_not_count_as_a_row_that_differs_from_base(rows, said):
    section = parameters_section(*rows)
    assert f"agrees within rounding {said}" in section.finding
    assert "agrees within rounding" not in parameters_section("base").finding


def test_only_the_papers_vocabulary_size_is_described_as_the_papers():
    finding = parameters_section("base", "C1").finding
    assert "With 37,000 tokens, the size of section 5.1, " in finding
    assert "A base model as described, with 37,000 tokens, has 63.05 million" in finding
    finding = parameters_section("base", "C1", vocab_size=41000).finding
    assert "With 41,000 tokens (section 5.1 says about 37,000) " in finding
    assert "A base model with 41,000 tokens has 65.09 million" in finding


def parameters_section(*rows, vocab_size=37000):
    """Return the section on parameters for these rows; for all rows if none is given."""
    parser = argparse.ArgumentParser()
    table3.add_flags(parser)
    sizes = ["--vocab_size", str(vocab_size)]
    flags = parser.parse_args([*sizes, "--rows", *rows] if rows else sizes)
    return {section.name: section for section in table3.sections(flags)}["parameters"]


def test_a_rank_correlation_with_ties_is_that_of_the_worked_example():
    # ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: covariance 4.5, variances 4.5 and 5
    assert ranks.ranks([0.1, 7.0, 7.0, 30.0]) == [1, 2.5, 2.5, 4]
    found = ranks.rank_correlation([0.1, 7.0, 7.0, 30.0], [10, 30, 20, 40])
    assert found == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert ranks.rank_correlation([1, 2, 3], [9, 8, -1]) == pytest.approx(-1)
    assert ranks.rank_correlation([1, 2, 3], [5, 5, 5]) is None


@pytest.mark.parametrize("row", PAPER_ROWS)
def test_a_scaled_row_changes_what_the_papers_row_changes_in_the_same_ratio(row):
    def numbers(config):
        heads = config.encoder_attention_heads
        return {
            "N": config.encoder_layers,
            "d_model": config.d_model,
            "d_ff": config.decoder_ffn_dim,
            "h": heads,
            "d_k": config.d_k or config.d_model // heads,
            "d_v": config.d_v or config.d_model // heads,
            "dropout": config.dropout,
        }

    def scaled(row):
        sizes = scaled_sizes(row, 8, 3, 0.06)
        return numbers(load_config(f"paper-{row}", {"model": sizes}).model_config(37000))

    paper, paper_base = (numbers(table3.paper_sizes(name, 37000)) for name in (row, "base"))
    ours, our_base = scaled(row), scaled("base")
    assert (our_base["d_model"], our_base["N"], our_base["dropout"]) == (64, 3, 0.06)
    for name in paper:
        assert ours[name] / our_base[name] == pytest.approx(paper[name] / paper_base[name]), name


def test_a_short_warmup_ends_at_the_peak_learning_rate_of_the_paper():
    parser = argparse.ArgumentParser()
    table3.add_flags(parser)
    flags = parser.parse_args(["--max_steps", "90", "--rows", "base", "C5", "D3"])
    flags.output_dir = "none"
    for row, (config,) in table3.scaled_configs(flags).items():
        d_model = 256 if row == "C5" else 128
        rate = equations.learning_rate(30, d_model, config.warmup_steps)
        highest = equations.learning_rate(4000, d_model, 4000)
        assert config.learning_rate_factor * rate == pytest.approx(highest)
        assert config.num_averaged_checkpoints == 1
        assert config.label_smoothing == (0.0 if row == "D3" else 0.1)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--scale", "3"], "scale must divide hidden_size = 512 of row base, got 3."),
        (["--layers", "2"], "layers times 2 / 6 must be an integer for row C1, got layers 2."),
        (["--rows", "C8"], "got 'C8'."),
        (["--warmup_steps", "-5"], "warmup_steps must be at least 1, got -5."),
        (["--dropout", "0.4", "--rows", "big"], "dropout must be at least 0 and below 1"),
        (["--num_seeds", "0"], "num_seeds must be at least 1, got 0."),
        (["--settings", "{model: 3}"], "model must be of type dict, got 3"),
        (["--settings", "{model: {d_model: 64}}"], "settings must not have hidden_size, which the"),
        (["--settings", "{label_smoothing: 0.3}"], "settings must not have label_smoothing"),
        (["--settings", "{tokenizer: runs/demo}"], "settings must not have tokenizer, which the"),
        (["--settings", "{max_steps: 9}"], "settings must not have max_steps, which the rows or"),
        (["--settings", "bf16"], "settings must be a mapping of names to values, got 'bf16'."),
        (
            ["--settings", "{precison: bf16}"],
            "precison is not a setting. Did you mean 'precision'?",
        ),
    ],
)
def test_an_invalid_scale_is_refused_before_training(flags, sentence, tmp_path, capsys):
    assert main(["paper", "table3", "--train", "--output_dir", str(tmp_path), *flags]) == 1
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_corpus_without_a_validation_split_is_refused_before_training(tmp_path, capsys):
    for lang in ("en", "de"):
        (tmp_path / f"train.{lang}").write_text("a b\n" * 5)
    assert main(toy(tmp_path, tmp_path / "out", "base")) == 1
    assert "dataset must have a split 'validation'" in capsys.readouterr().err


def test_an_interrupted_table_resumes_and_trains_no_row_twice(
    corpus, tmp_path, capsys, monkeypatch, new_process
):
    command = toy(corpus, tmp_path, "D4", "C1")
    with monkeypatch.context() as patch:
        # the first row finishes, the second is interrupted after its first step
        patch.setattr(loop, "_reasons_to_end", lambda run, *_: (run.folder.name == "C1", False, 0))
        assert main(command) == 1
    assert "row C1 was stopped: run the same command again" in capsys.readouterr().err
    first = (tmp_path / "rows" / "D4" / "model.safetensors").stat().st_mtime_ns
    assert main(command) == 0
    rows = trained_rows(tmp_path)
    assert list(rows) == ["D4", "C1"]
    begun = read_environment(tmp_path / "rows" / "C1")
    assert [block["first_step"] for block in begun] == ["1", "2"]
    assert len(read_environment(tmp_path / "rows" / "D4")) == 1
    assert (tmp_path / "rows" / "D4" / "model.safetensors").stat().st_mtime_ns == first
    assert begun[0]["tokenizer_sha256"] == begun[1]["tokenizer_sha256"]

    monkeypatch.setattr(training, "train", lambda *_, **__: pytest.fail("trained again"))
    assert main(command) == 0
    assert trained_rows(tmp_path) == rows
    assert main([*command, "--max_steps", "7"]) == 1
    error = capsys.readouterr().err
    assert "output_dir must be new for other settings" in error
    assert "max_steps of row D4 was 6, got 7" in error

    # the perplexity is that of the loss without smoothing, also for a row with smoothing
    folder = tmp_path / "rows" / "D4"
    expected = unsmoothed_loss(folder, corpus)
    assert rows["D4"]["PPL"] == pytest.approx(math.exp(expected), rel=1e-4)


def test_a_difference_is_clear_from_two_standard_errors_on():
    # the variances are 2, 8 and 8; the standard error is sqrt(mean of the variances * 2 / 2 seeds)
    values = {"base": [4.0, 6.0], "A1": [8.0, 12.0], "C1": [3.0, 7.0]}
    found = differences.differences_from_base(values, {"base": 1.0, "A1": 3.0, "C1": 0.5})
    assert list(found) == ["A1", "C1"]
    assert found["A1"].ours == pytest.approx(5)
    assert found["A1"].error == pytest.approx(math.sqrt((2 + 8 + 8) / 3))
    assert found["A1"].verdict() == "same"
    assert found["A1"]._replace(paper=-2.0).verdict() == "opposite"
    assert found["A1"]._replace(paper=0.0).verdict() == "none in paper"
    assert found["C1"].verdict() == "unclear"


@pytest.mark.parametrize("row", ["A1", "A3", "E"])
def test_the_differences_of_any_one_row_can_be_stated(row):
    # in the paper, A3 has the BLEU of base, and E its perplexity
    results = {
        code: [training.RowResult(None, 10.0 + seed, 30.0 + seed, "", 1.0) for seed in range(3)]
        for code in ("base", row)
    }
    section = differences.differences_section(results, argparse.Namespace(num_seeds=3))
    loss_verdict, bleu_verdict = section.rows[0][3], section.rows[0][6]
    assert loss_verdict == ("none in paper" if row == "E" else "unclear")
    assert bleu_verdict == ("none in paper" if row == "A3" else "unclear")
    assert ("these rows have the BLEU of base" in section.finding) == (row == "A3")
    # the deviation of the seeds is 1 BLEU: 2 * (2 * 1 / 0.9)^2 is 9.9
    assert ("each row needs 10 seeds for 0.9 BLEU." in section.finding) == (row == "A1")


def test_a_table_with_several_seeds_has_means_and_reads_the_seeds_that_are_there(
    corpus, tmp_path, monkeypatch, new_process
):
    command = toy(corpus, tmp_path, "base", "C1")
    command += ["--warmup_steps", "3", "--settings", "{model: {initializer_gain: 0.5}}"]
    assert main(command) == 0
    alone = trained_rows(tmp_path)
    trained = []
    train = training.train
    monkeypatch.setattr(
        training, "train", lambda config, **kw: trained.append(config) or train(config, **kw)
    )
    assert main([*command, "--num_seeds", "2"]) == 0
    assert [(config.folder.name, config.seed) for config in trained] == [
        ("base-seed-2", 2),
        ("C1-seed-2", 2),
    ]
    assert all(config.warmup_steps == 3 for config in trained)
    assert all(config.model["initializer_gain"] == 0.5 for config in trained)
    sections = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))["sections"]
    scores = {
        folder.name: json.loads((folder / "scores.json").read_text())["validation"]["bleu"]
        for folder in (tmp_path / "rows").iterdir()
    }
    together = trained_rows(tmp_path)
    for row in ("base", "C1"):
        assert alone[row]["BLEU"] == scores[row]
        assert together[row]["BLEU"] == pytest.approx((scores[row] + scores[f"{row}-seed-2"]) / 2)
    assert "All numbers are means of 2 seeds." in sections["trained"]["says"]
    (difference,) = sections["differences"]["rows"]
    losses = {row: math.log(values["PPL"]) for row, values in together.items()}
    assert difference[0] == "C1"
    # the mean of the logarithms is not quite the logarithm of the mean
    assert difference[1] == pytest.approx(losses["C1"] - losses["base"], abs=0.01)


@torch.no_grad()
def unsmoothed_loss(folder, corpus):
    """Compute the loss of the validation split, sentence by sentence."""
    tokenizer = load_tokenizer(str(folder))
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder).eval()
    sides = [(corpus / f"validation.{lang}").read_text().splitlines() for lang in ("en", "de")]
    losses = []
    for source, target in zip(*sides, strict=True):
        labels = tokenizer(target, return_tensors="pt").input_ids
        start = torch.full((1, 1), model.config.decoder_start_token_id)
        logits = model(
            input_ids=tokenizer(source, return_tensors="pt").input_ids,
            decoder_input_ids=torch.cat((start, labels[:, :-1]), dim=1),
        ).logits
        losses.append(F.cross_entropy(logits[0], labels[0], reduction="none"))
    assert losses
    return float(torch.cat(losses).mean())
