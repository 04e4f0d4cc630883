"""Recipes of the package: Tables 2 and 3, and later results."""

import dataclasses
import json
import math
import re
import shlex
from pathlib import Path

import equations
import pytest
import torch

import vanilla_transformer
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.configuration_vanilla_transformer import PAPER_ROWS
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.recipe import (
    RECIPES_FOLDER,
    load_config,
    parse_arguments,
    read_recipe_file,
    recipe_comment,
    recipe_names,
)
from vanilla_transformer.train.schedule import learning_rate

ROOT = Path(vanilla_transformer.__file__).parent
VARIATIONS = [row for row in PAPER_ROWS if row not in ("base", "big")]
# a command ends where a line begins with another word
COMMAND = re.compile(r"^vanilla-transformer train (.*?)(?=^\S)", re.MULTILINE | re.DOTALL)
KEPT = {
    recipe: commands
    for page in sorted(ROOT.glob("results/*/README.md"))
    if (commands := COMMAND.findall(page.read_text(encoding="utf-8")))
    for recipe in sorted(page.parent.rglob("recipe.yaml"))
}
MEASURED = [(name, run) for name in recipe_names() for run in read_recipe_file(name)[1]]


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_recipe_says_what_it_reproduces_and_differs_from_the_defaults(recipe):
    lines = (RECIPES_FOLDER / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"# {recipe_comment(recipe)[0]}"
    assert lines[0].endswith("."), "the first line stands alone in the list of recipes"
    settings, _ = read_recipe_file(recipe)
    for name, value in settings.items():
        # the default configuration is that of the default dataset
        if name != "name" or "dataset" not in settings:
            assert getattr(TrainConfig(), name) != value, f"{name} is the default"
    config = load_config(recipe)
    assert config.output_dir == f"runs/{recipe}"
    assert config.model_config(config.vocab_size).vocab_size == config.vocab_size


def test_the_help_lists_every_recipe_in_a_line(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    listed = capsys.readouterr().out.split("\nrecipes:\n")[1].splitlines()
    assert [line.split()[0] for line in listed] == recipe_names()
    assert all(line.endswith(".") for line in listed)


def million_parameters(config):
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config.model_config(37000))
    return model.num_parameters() / 1e6


def test_a_recipe_file_that_does_not_exist_names_the_closest_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("max_steps: 5\n")
    with pytest.raises(ValueError, match=r"'min.yaml' does not exist. Did you mean 'mine.yaml'\?"):
        load_config("min.yaml")


@pytest.mark.parametrize("row", VARIATIONS)
def test_a_variation_of_table_3_is_the_last_checkpoint_of_its_row(row):
    config = load_config(f"paper-{row}")
    assert (config.paper_row, config.model) == (row, {})
    assert config.num_averaged_checkpoints == 1
    assert (config.max_steps, config.vocab_size) == (100_000, 37_000)
    # one vector of d_model for each of 1,024 positions, in encoder and decoder
    more = 2 * 1024 * 512 / 1e6 if row == "E" else 0
    expected = equations.PARAMETERS.get(row, equations.PARAMETERS["base"]) + more
    assert million_parameters(config) == pytest.approx(expected, abs=0.006)


def test_rows_d_change_dropout_and_smoothing():
    configs = {row: load_config(f"paper-{row}") for row in ("D1", "D2", "D3", "D4", "E")}
    smoothing = {row: config.label_smoothing for row, config in configs.items()}
    assert smoothing == {"D1": 0.1, "D2": 0.1, "D3": 0.0, "D4": 0.2, "E": 0.1}
    dropout = {row: config.model_config(37000).dropout for row, config in configs.items()}
    assert dropout == {"D1": 0.0, "D2": 0.2, "D3": 0.1, "D4": 0.1, "E": 0.1}


@pytest.mark.parametrize(
    ("recipe", "target", "tokens", "dropout", "steps", "averaged"),
    [
        ("paper-base", "de", 37_000, 0.1, 100_000, 5),
        ("paper-big", "de", 37_000, 0.3, 300_000, 20),
        ("paper-base-en-fr", "fr", 32_000, 0.1, 100_000, 5),
        ("paper-big-en-fr", "fr", 32_000, 0.1, 300_000, 20),
    ],
)
def test_the_models_of_table_2(recipe, target, tokens, dropout, steps, averaged):
    config = load_config(recipe)
    assert (config.dataset, config.source_lang) == ("wmt/wmt14", "en")
    assert (config.target_lang, config.name) == (target, f"{target}-en")
    assert config.vocab_size == tokens
    assert config.model_config(tokens).dropout == dropout
    assert (config.max_steps, config.num_averaged_checkpoints) == (steps, averaged)
    row = "big" if "big" in recipe else "base"
    assert million_parameters(config) == pytest.approx(equations.PARAMETERS[row], abs=0.006)


def test_t2t_base_has_the_constants_of_its_authors():
    config = load_config("t2t-base")
    assert (config.adam_beta2, config.warmup_steps) == (0.997, 8000)
    assert config.learning_rate_factor == 2
    sizes = config.model_config(config.vocab_size)
    assert (sizes.norm_first, sizes.position_layout) == (True, "halves")
    assert (sizes.dropout, sizes.attention_dropout, sizes.activation_dropout) == (0.1, 0.1, 0.1)
    # the last of d / 2 wavelengths is 10000 times the first
    longest = sizes.position_base ** ((sizes.d_model - 2) / sizes.d_model)
    assert longest == pytest.approx(10_000, rel=1e-12)
    assert million_parameters(config) == pytest.approx(63.05, abs=0.006)


def test_the_rate_of_iwslt14_reaches_what_was_published():
    config = load_config("iwslt14")
    sizes = config.model_config(config.vocab_size)
    assert (sizes.d_model, sizes.encoder_ffn_dim, sizes.decoder_attention_heads) == (512, 1024, 4)
    peak = learning_rate(
        config.warmup_steps, sizes.d_model, config.warmup_steps, config.learning_rate_factor
    )
    assert math.isclose(peak, 7e-4, rel_tol=1e-3)


def test_something_was_measured():
    assert "demo" in dict(MEASURED)


@pytest.mark.parametrize(("recipe", "run"), MEASURED)
def test_the_measurements_in_a_recipe_match_its_folder(recipe, run):
    folder = ROOT / run["results"]
    number, split = re.fullmatch(r"(\d+\.\d\d) BLEU on (\w+)", run["score"]).groups()
    score = json.loads((folder / "scores.json").read_text(encoding="utf-8"))[split]
    assert (f"{score['bleu']:.2f}", score["bleu_signature"]) == (number, run["signature"])
    # with no setting beside those of the recipe
    trained = dataclasses.asdict(load_config(str(folder / "recipe.yaml")))
    for name, value in dataclasses.asdict(load_config(recipe)).items():
        assert name == "output_dir" or trained[name] == value, f"{name} was another"


def facts(config):
    """Return the settings of a run without folders, with its resolved model configuration."""
    model = config.model_config(config.vocab_size).to_diff_dict()
    own = dataclasses.asdict(config)
    return {**own, "model": model, "paper_row": None, "output_dir": None}


@pytest.mark.parametrize("recipe", KEPT, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_command_printed_beside_a_kept_run_makes_it(recipe):
    run = load_config(str(recipe))
    # on pages with several runs by one command, S is the seed
    commands = [command.replace("--seed S", f"--seed {run.seed}") for command in KEPT[recipe]]
    printed = [
        facts(parse_arguments(shlex.split(command.replace("\\\n", " ")))[0]) for command in commands
    ]
    assert facts(run) in printed
