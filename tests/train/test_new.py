"""Recipes that `vanilla-transformer new` writes: their values and reasons, and what is refused."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from document_blocks import ROOT, SMALL
from train_toys import WORDS

from vanilla_transformer.cli import main
from vanilla_transformer.train import measuring
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.measuring import Costs
from vanilla_transformer.train.new import (
    CORPUS_SETTINGS,
    MAX_MINUTES,
    REQUIRED_SETTINGS,
    RULES,
    STEP_NUMBER_SETTINGS,
    Counts,
    recipe_for,
    settings_for,
)
from vanilla_transformer.train.recipe import load_config, recipe_names
from vanilla_transformer.train.schedule import learning_rate_of

DATA = ["--source_lang", "en", "--target_lang", "de"]
COUNTS = Counts(8000, ("en", "de"), (60.0, 70.0), (11.0, 12.0))
SIZES = (
    10,
    3999,
    4000,
    9_999,
    10_000,
    99_999,
    100_000,
    999_999,
    1_000_000,
    9_999_999,
    10_000_000,
    10**9,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_table(path, pairs=60, header="en\tde\tid\n"):
    lines = [f"{first} {second}\t{second} {first}\t1\n" for first in WORDS for second in WORDS]
    path.write_text(header + "".join(lines[:pairs]), encoding="utf-8")
    return str(path)


def new(folder, *words):
    table = write_table(folder / "pairs.tsv")
    return main(["new", "mine", "--dataset", table, *DATA, *words])


def test_a_recipe_is_written_and_trains_as_it_is(folder, capsys):
    table = write_table(folder / "pairs.tsv")
    assert main(["new", "my-model", "--dataset", table, *DATA]) == 0
    out = capsys.readouterr().out
    assert f"{table}: 57 pairs to train on; averages per sentence: en 7." in out
    assert "\n  en, " in out
    config = load_config("my-model.yaml")
    assert (config.dataset, config.validation_pairs) == (table, 3)
    assert config.output_dir == "runs/my-model"
    assert main(["train", "my-model.yaml", "--dry_run"]) == 0
    assert main(["train", "my-model.yaml", *SMALL]) == 0
    # the last command that is printed
    last = out.splitlines()[-1].split()
    assert last[0] == "vanilla-transformer"
    assert main([*last[1:], "--num_beams", "1", "--max_extra_tokens", "1"]) == 0


def test_a_corpus_with_all_splits_holds_out_no_pair(folder, capsys):
    for split, pairs in (("train", 90), ("validation", 11), ("test", 7)):
        write_table(folder / f"{split}.tsv", pairs, f"{split}\tde\ten\n")
    assert main(["new", "my model", "--dataset", str(folder), *DATA]) == 0
    assert load_config("my model.yaml").validation_pairs is None
    assert capsys.readouterr().out.endswith("evaluate 'runs/my model'\n")


def test_held_out_pairs_and_columns_can_be_given(folder):
    table = write_table(folder / "pairs.tsv", header="one\ttwo\tid\n")
    flags = ["--columns", "{en: one, de: two}", "--validation_pairs", "7"]
    assert main(["new", "mine", "--dataset", table, *DATA, *flags]) == 0
    config = load_config("mine.yaml")
    assert (config.validation_pairs, config.columns) == (7, {"en": "one", "de": "two"})


def test_pairs_that_cannot_be_used_are_not_counted(folder, capsys):
    table = folder / "pairs.tsv"
    write_table(table)
    with table.open("a", encoding="utf-8") as file:
        file.write("ant\t \t1\nf\u00c3\u00bcr\tant\t1\n")
    assert main(["new", "mine", "--dataset", str(table), *DATA]) == 0
    out = capsys.readouterr().out
    assert f"{table}: 57 pairs to train on" in out
    assert f"training pairs of {table}: kept 57, wrong_encoding 1, empty 1\n" in out


@pytest.mark.parametrize("pairs", SIZES)
def test_every_setting_of_a_recipe_has_its_reason(pairs, folder):
    path = folder / "mine.yaml"
    corpus = {"dataset": "my.tsv", "source_lang": "nl", "target_lang": "fy", "mix": []}
    text = recipe_for(path, {**corpus, "validation_pairs": 5}, COUNTS._replace(pairs=pairs))
    path.write_text(text, encoding="utf-8")
    written = load_config(str(path))
    rule, chosen = settings_for(pairs)
    assert rule.run in " ".join(text.replace("\n#", "").split())
    corpus |= {"validation_pairs": 5, "output_dir": "runs/mine", "bleu_tokenizer": "13a"}
    assert written == dataclasses.replace(chosen, name=None, **corpus)
    for block in text.removesuffix("\n").split("\n\n"):
        first = block.split("\n")[1 if block.startswith("model:") else 0]
        assert first.strip().startswith("# "), block
        assert first.strip() != "#"
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "{" not in text, "a fact is missing"


def test_more_pairs_never_get_a_smaller_model_or_less_training():
    chosen = [settings_for(pairs)[1] for pairs in SIZES]
    models = [config.model_config(config.vocab_size) for config in chosen]
    for quantities in (
        [config.max_steps * config.tokens_per_step for config in chosen],
        [config.tokens_per_step for config in chosen],
        [model.d_model * (model.encoder_layers + model.decoder_layers) for model in models],
    ):
        assert quantities == sorted(quantities)
        assert len(set(quantities)) >= 2
    sizes = [config.vocab_size for config in chosen[:-2]]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.run.split(",")[0])
def test_the_settings_of_a_rule_are_those_of_its_run(rule):
    others = {"output_dir": None, "precision": "fp32", "bleu_tokenizer": None, "seed": 1}
    others |= dict.fromkeys(CORPUS_SETTINGS) | {
        "source_lang": "a",
        "target_lang": "b",
        "dataset": "c",
    }
    others["mix"] = []
    found = settings_for(rule.pairs)[1]
    if not rule.run.startswith("results/"):
        assert rule.recipe in recipe_names()
        assert "no run of this size" in rule.run
        assert found.max_steps == load_config(rule.recipe).max_steps
        return
    seeds = sorted((ROOT / rule.run).glob("seed-*"))
    for folder in seeds or [ROOT / rule.run]:
        run = load_config(str(folder / "recipe.yaml"))
        others["max_length"] = run.max_length
        others["log_every_steps"] = run.log_every_steps
        assert dataclasses.replace(found, **others) == dataclasses.replace(run, **others)
        facts = (folder / "environment.txt").read_text(encoding="utf-8")
        assert f"\npairs: {rule.pairs}\n" in facts


def test_the_learning_rate_reaches_that_of_the_run_and_the_steps_keep_their_shares():
    for pairs in SIZES:
        rule, config = settings_for(pairs)
        run = rule.config
        for name in STEP_NUMBER_SETTINGS:
            share = getattr(config, name) / config.max_steps
            assert share == pytest.approx(getattr(run, name) / run.max_steps, rel=0.02)
        factor = config.learning_rate_factor / math.sqrt(config.warmup_steps)
        of_run = run.learning_rate_factor / math.sqrt(run.warmup_steps)
        assert factor == pytest.approx(of_run, rel=0.01)


def test_a_time_limits_the_steps_and_keeps_their_shares_and_the_learning_rate():
    whole, limited = (settings_for(8000, most)[1] for most in (math.inf, 750))
    assert limited.max_steps == 750
    for name in STEP_NUMBER_SETTINGS:
        assert getattr(limited, name) == pytest.approx(getattr(whole, name) / 4, abs=1)
    peaks = [learning_rate_of(config, 128)(config.warmup_steps) for config in (whole, limited)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


@pytest.mark.parametrize("minutes", ["10", "1e1"])
def test_a_recipe_for_a_time_has_the_steps_that_were_measured(minutes, folder, monkeypatch):
    costs = Costs(step=0.5, evaluation=2.0, checkpoint=1.0, tokens=1000, steps_per_epoch=9)
    measured = []
    monkeypatch.setattr(measuring, "measure_costs", lambda config: measured.append(config) or costs)
    new(folder, "--max_minutes", minutes)
    (config,) = measured
    assert (config.max_minutes, config.output_dir) == (10, "runs/mine")
    settings = yaml.safe_load(Path("mine.yaml").read_text())
    # 12 evaluations and 30 checkpoints, as in the recipe of 3,000 steps
    assert settings["max_steps"] == int((0.95 * 600 - 12 * 2 - 30 * 1) / 0.5)
    assert settings["max_minutes"] == 10
    assert "a step took 0.5 seconds" in Path("mine.yaml").read_text()


def test_a_run_in_the_current_folder_is_measured_beside_it(folder, monkeypatch):
    def opened(config, *others):
        raise ValueError(config.output_dir)

    monkeypatch.setattr(measuring, "open_run", opened)
    path = re.escape(str(folder.with_name(f".{folder.name}.measured.unfinished")))
    with pytest.raises(ValueError, match=f"^{path}$"):
        measuring.measure_costs(load_config("demo", {"output_dir": "."}))


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_recipe_has_bf16_where_the_machine_has_instructions_for_it(is_fast, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: is_fast)
    new(folder)
    text = Path("mine.yaml").read_text(encoding="utf-8")
    assert load_config("mine.yaml").precision == ("bf16" if is_fast else "fp32")
    assert ("instructions for bf16" in text) == is_fast


def test_a_time_without_a_hundred_steps_is_refused(folder, capsys, monkeypatch):
    costs = Costs(step=9.0, evaluation=0.0, checkpoint=0.0, tokens=1000, steps_per_epoch=9)
    monkeypatch.setattr(measuring, "measure_costs", lambda config: costs)
    assert new(folder, "--max_minutes", "10") == 1
    assert (
        "max_minutes must be enough for at least 100 steps, which take 16 minutes on this machine, "
        "got 10." in capsys.readouterr().err
    )
    assert not Path("mine.yaml").exists()


def test_fewer_pairs_than_the_smallest_run_get_its_steps():
    assert settings_for(20)[1].max_steps == load_config("few-pairs").max_steps


def test_an_existing_recipe_is_never_overwritten(folder, capsys, monkeypatch):
    table = write_table(folder / "pairs.tsv")
    path = folder / "mine.yaml"
    path.write_text("# my own\n", encoding="utf-8")
    words = ["new", "mine", "--dataset", table, *DATA]
    assert main(words) == 1
    assert "mine.yaml exists and is not overwritten" in capsys.readouterr().err
    # one that appears while the corpus is read
    monkeypatch.setattr("vanilla_transformer.train.new._new_recipe_path", lambda name: path)
    assert main(words) == 1
    assert "mine.yaml exists and is not overwritten" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "# my own\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the name of the model must be given .* got no name"),
        (["a/b", "--dataset", "pairs.tsv", *DATA], "without a folder, .* got 'a/b'"),
        (["a\nb", "--dataset", "pairs.tsv", *DATA], "the name of the model must be"),
        (["..", "--dataset", "pairs.tsv", *DATA], "the name of the model must be"),
        (["mine"], "--dataset, --source_lang, --target_lang must be given"),
        (["mine", "--dataset", "pairs.tsv", "--source_lang", "en"], "--target_lang must be given"),
        (["mine", "--dataset", "no.tsv", *DATA], "dataset must be a file that exists"),
        (["mine", "--dataset", "empty.tsv", *DATA], "empty.tsv"),
        (["mine", "--dataset", "blank.tsv", *DATA], "must have a pair that can .* empty 1"),
        (["mine", "--dataset", "latin.tsv", *DATA], "must be UTF-8 .* wrong_encoding 40, empty 0"),
        (["mine", "--dataset", "same.tsv", *DATA], "must leave pairs of same.tsv to train on"),
        (["mine", "--dataset", "few.tsv", *DATA], "at least 20 pairs .* got 19"),
        (
            ["mine", "--dataset", "pairs.tsv", "--source_lang", "en", "--target_lang", "fy"],
            "must have the columns en and fy, got 1 'en', 2 'de', 3 'id'",
        ),
        (
            ["mine", "--dataset", "pairs.tsv", *DATA, "--columns", "{en: en, de: German}"],
            "must have the columns en and German, got 1 'en', 2 'de', 3 'id'",
        ),
        (
            ["mine", "--dataset", "demo", "--source_lang", "en", "--target_lang", "fy"],
            "target_lang must be one of de, en in split .* got 'fy'",
        ),
        (["mine", "--dataset", "pairs.tsv", *DATA, "--datset", "x"], "Did you mean 'dataset'"),
        (
            ["mine", "--dataset", "pairs.tsv", *DATA, "--max_steps", "9"],
            "max_steps must be set in the recipe",
        ),
        (["mine", "twice"], "'twice' is one argument too many: the model is 'mine'"),
        (["mine", "--validation_pairs", "many"], "must be given|of type int"),
    ],
)
def test_what_is_refused_is_refused_in_one_sentence(words, message, folder, capsys):
    write_table(folder / "pairs.tsv")
    write_table(folder / "few.tsv", 19)
    write_table(folder / "empty.tsv", 0)
    (folder / "latin.tsv").write_bytes(b"a\tb\n" * 20 + b"a\t\xfc\n" * 40)
    (folder / "same.tsv").write_text("a\tb\n" * 60)
    (folder / "blank.tsv").write_text("en\tde\n \t \n", encoding="utf-8")
    assert main(["new", *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    [line] = [line for line in err.splitlines() if "error: " in line]
    assert re.search(message, line), line
    assert not list(folder.glob("*.yaml"))


def test_the_help_has_only_the_flags_of_a_corpus(capsys):
    with pytest.raises(SystemExit):
        main(["new", "--help"])
    out = capsys.readouterr().out
    assert [name for name in TrainConfig.__dataclass_fields__ if f"--{name} VALUE" in out] == [
        name for name in TrainConfig.__dataclass_fields__ if name in (*CORPUS_SETTINGS, MAX_MINUTES)
    ]
    # `new` has no defaults for the corpus and its languages
    assert out.count("(required)") == len(REQUIRED_SETTINGS)
    assert set(re.findall(r"\(default: (.*?)\)", " ".join(out.split()))) == {"null", "[]"}


def test_json_records_are_read_too(folder):
    pairs = [{"en": f"{one} {two}", "de": two} for one in WORDS for two in WORDS]
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (folder / "pairs.jsonl").write_text(lines, encoding="utf-8")
    assert main(["new", "mine", "--dataset", "pairs.jsonl", *DATA]) == 0
    assert load_config("mine.yaml").validation_pairs == 12
