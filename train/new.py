"""Write a recipe for a corpus: settings for its number of pairs, each with its reason."""

import argparse
import dataclasses
import math
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from ..atomic_files import atomic_file
from ..console import shown
from ..kernels_vanilla_transformer import has_bf16_instructions
from .config import TrainConfig
from .data.counts import Counts, count_pairs
from .data.prepare import load_texts
from .dry_run import first_pairs
from .recipe import load_config, parse_settings
from .schedule import learning_rate_of

# settings that describe a corpus: the flags of the command
CORPUS_SETTINGS = (
    *("dataset", "name", "revision", "columns", "weight", "mix", "source_lang", "target_lang"),
    "validation_pairs",
)
MAX_MINUTES = "max_minutes"
# flags that must be given
REQUIRED_SETTINGS = ("dataset", "source_lang", "target_lang")
# one pair in HELD_OUT_SHARE is held out for validation, but at most MOST_HELD_OUT pairs
HELD_OUT_SHARE, MOST_HELD_OUT = 20, 1000
# width of a comment in a recipe, without "# " and the indent of the model's settings
COMMENT_WIDTH = 96
# share of the minutes for which steps are planned; the rest is a margin, because the speed of a
# machine varies
PLANNED_SHARE = 0.95
# smallest number of steps in max_minutes; fewer steps would not train a useful model
FEWEST_STEPS = 100


class Rule(NamedTuple):
    """Settings for corpora of similar size, taken from one run.

    Args:
        below: Number of pairs below which the rule applies.
        pairs: Number of training pairs of the run.
        run: Name of the run, for a comment of the recipe.
        recipe: Recipe that the settings of the run come from.
        settings: Settings of the run that differ from this recipe.
    """

    below: float
    pairs: int
    run: str
    recipe: str = "paper-base"
    settings: Mapping[str, Any] = {}

    @property
    def config(self) -> TrainConfig:
        """Settings of the run."""
        return load_config(self.recipe, dict(self.settings))


def _small_model(width: int, inner_width: int, dropout: float) -> dict[str, Any]:
    sides = ("encoder", "decoder")
    return {
        "hidden_size": width,
        **{f"{side}_layers": 4 for side in sides},
        **{f"{side}_attention_heads": 4 for side in sides},
        **{f"{side}_ffn_dim": inner_width for side in sides},
        "dropout": dropout,
        "initializer_gain": 0.5,
    }


RULES = (
    Rule(
        4000,
        1600,
        "results/few-pairs/1600-pairs",
        "few-pairs",
        {"model": {"dropout": 0.3}, "bpe_dropout": 0.1},
    ),
    Rule(10_000, 8000, "results/few-pairs", "few-pairs"),
    Rule(
        100_000,
        29_000,
        "results/multi30k-en-de/gain-0.5",
        settings={
            "vocab_size": 8000,
            "model": _small_model(128, 256, dropout=0.3),
            "tokens_per_step": 4096,
            "max_steps": 3000,
            "warmup_steps": 1500,
            "learning_rate_factor": 1.53,
            "max_grad_norm": 25.0,
            "eval_every_steps": 250,
            "save_every_steps": 100,
            "num_averaged_checkpoints": 10,
        },
    ),
    Rule(
        1_000_000,
        416_210,
        "results/mini-wmt14",
        settings={
            "vocab_size": 8000,
            "model": _small_model(256, 1024, dropout=0.1),
            "tokens_per_step": 4096,
            "length_groups_per_step": 2,
            "max_steps": 12_878,
            "warmup_steps": 2000,
            "cooldown_steps": 1200,
            "eval_every_steps": 1000,
            "save_every_steps": 150,
            "num_averaged_checkpoints": 10,
        },
    ),
    Rule(
        10_000_000,
        4_500_000,
        "the paper, English to German; this package has no run of this size",
        settings={"model": {"dropout": 0.1}},
    ),
    Rule(
        math.inf,
        36_000_000,
        "the paper, English to French; this package has no run of this size",
        "paper-big-en-fr",
    ),
)
# a corpus with fewer pairs gets as many steps as one of this size: no run shows that fewer steps
# are enough
FEWEST_GROWING_PAIRS = 8000
# settings that grow with the square root of the number of pairs
STEP_NUMBER_SETTINGS = (
    "max_steps",
    "warmup_steps",
    "cooldown_steps",
    "eval_every_steps",
    "save_every_steps",
)

# groups of settings in the order of a recipe, each with its reason, which becomes a comment
CORPUS_REASONS = {
    " ".join(CORPUS_SETTINGS[:-1]): "The corpus, and the direction of translation.",
    "validation_pairs": "Pairs to hold out for validation. If the corpus has no validation split, "
    f"the number is one in {HELD_OUT_SHARE}, at most {MOST_HELD_OUT:,}.",
}
MODEL_REASONS = {
    "hidden_size encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads "
    "encoder_ffn_dim decoder_ffn_dim": "Size of the model: larger for a larger corpus, because a "
    "large model overfits few pairs.",
    "dropout": "Dropout, as in the run.",
    "initializer_gain": "Initial weights smaller than the paper's: the loss falls faster "
    "(results/multi30k-en-de).",
}
SETTING_REASONS = {
    "vocab_size": "Size of the vocabulary, as in the run.",
    "paper_row": "Size of the model: a row of the paper's Table 3.",
    "model": MODEL_REASONS,
    "tokens_per_step length_groups_per_step": "Batch size: source tokens and target tokens of a "
    "step. A small batch gives more updates in the same time.",
    "max_steps": "Training steps. The run on {pairs} pairs had {steps}. The number of steps "
    "grows with the square root of the number of pairs, from {fewest} pairs on.",
    "warmup_steps learning_rate_factor": "The learning rate rises to {peak}, as in the run, over "
    "the same fraction of all steps.",
    "cooldown_steps": "The learning rate decays linearly to zero at the end, over the same "
    "fraction of all steps.",
    "bpe_dropout": "BPE-dropout: words are split into tokens at random, in several ways that the "
    "epochs use in turn. This data augmentation helps when there are few pairs.",
    "max_grad_norm": "A gradient with a larger norm is clipped: one batch cannot damage the model.",
    "eval_every_steps": "Steps between two evaluations of the validation loss.",
    "save_every_steps num_averaged_checkpoints": "The model of the run is the mean of its last "
    "checkpoints, section 6.1.",
    "precision": "This machine has instructions for bf16. Set fp32 on a machine that has none.",
    MAX_MINUTES: "Maximum training time in minutes. The numbers of steps above fit into this time "
    "on the machine that wrote the recipe: a step took {seconds} seconds.",
}
# settings that a recipe always contains, even with their default values
ALWAYS_WRITTEN = (
    *("vocab_size", "tokens_per_step", "max_steps", "warmup_steps", "eval_every_steps"),
    *("save_every_steps", "num_averaged_checkpoints"),
)


def run(argv: list[str], prog: str = "vanilla-transformer new") -> str:
    """Write the recipe of a new model for a corpus.

    Args:
        argv: Command-line arguments.
        prog: Name of the command in the help text.

    Returns:
        Size of the corpus, path of the recipe, and the next commands.

    Raises:
        ValueError: If an argument is missing or invalid, the corpus cannot be read, or the recipe
            exists.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        exit_on_error=False,
        description="Read a corpus as training would, and write a recipe for its number of pairs.",
        epilog=f"With --{MAX_MINUTES}, the command trains a few steps, and writes numbers of steps "
        "that fit into this time. All other settings can be changed in the recipe.",
    )
    # optional, because argparse would answer a missing name with its usage; `_new_recipe_path`
    # refuses it
    parser.add_argument("model", nargs="?", help="name of the model; the recipe is MODEL.yaml")
    arguments, corpus_settings = parse_settings(
        parser, argv, "model", (*CORPUS_SETTINGS, MAX_MINUTES), REQUIRED_SETTINGS
    )
    path = _new_recipe_path(arguments.model)
    missing_flags = [f"--{name}" for name in REQUIRED_SETTINGS if name not in corpus_settings]
    if missing_flags:
        raise ValueError(
            f"{', '.join(missing_flags)} must be given: `new` has no defaults for the corpus and "
            "its languages."
        )
    config = TrainConfig(**corpus_settings)
    corpus_settings.pop(MAX_MINUTES, None)
    texts = load_texts(config)
    counts = count_pairs(texts)
    if texts.validation is None:
        num_held_out = min(counts.pairs // HELD_OUT_SHARE, MOST_HELD_OUT)
        if num_held_out == 0:
            raise ValueError(
                f"{texts.names[0]} must have at least {HELD_OUT_SHARE} pairs that can be used, so "
                f"that one of them is held out for validation, got {counts.pairs}."
            )
        corpus_settings["validation_pairs"] = num_held_out
        # training also leaves out the pairs that share a sentence with the held-out pairs
        texts = load_texts(dataclasses.replace(config, validation_pairs=num_held_out))
        counts = count_pairs(texts)
    yaml_text = recipe_for(path, corpus_settings, counts, config.max_minutes)
    try:
        with atomic_file(path) as file:
            file.write(yaml_text.encode())
            file.flush()
            # `touch` fails if another command has written the recipe in the meantime
            path.touch(exist_ok=False)
    except FileExistsError as error:
        raise ValueError(_exists_message(path)) from error
    run_folder = shlex.quote(f"runs/{path.stem}")
    split_flag = "" if texts.test is not None else " --split validation"
    return "\n".join(
        [
            f"{', '.join(texts.names)}: {counts}",
            *counts.cleaning,
            *first_pairs(texts),
            f"{path} has the settings, with their reasons. Next:",
            f"  vanilla-transformer train {shlex.quote(str(path))} --dry_run",
            f"  vanilla-transformer train {shlex.quote(str(path))}",
            f"  vanilla-transformer evaluate {run_folder}{split_flag}",
        ]
    )


def _new_recipe_path(name: str | None) -> Path:
    """Return the path of a recipe that does not exist."""
    is_name = name and name.isprintable() and Path(name).name == name and name.strip(". ")
    if not is_name:
        raise ValueError(
            f"the name of the model must be given without a folder, as in "
            f"`vanilla-transformer new my-model`, got {'no name' if name is None else shown(name)}."
        )
    path = Path(f"{str(name).removesuffix('.yaml')}.yaml")
    if path.exists():
        raise ValueError(_exists_message(path))
    return path


def _exists_message(path: Path) -> str:
    return f"{path} exists and is not overwritten. Choose another name, or remove the file."


def settings_for(pairs: int, most_steps: float = math.inf) -> tuple[Rule, TrainConfig]:
    """Choose the settings for a number of training pairs.

    Args:
        pairs: Number of training pairs.
        most_steps: Largest number of steps.

    Returns:
        The rule for this number of pairs, and the settings of its run. The numbers of steps grow
        with the square root of the number of pairs, as they do from the run on 29,000 pairs to the
        run on 416,210 pairs. The precision is bf16 if this machine has instructions for it.
    """
    rule = next(rule for rule in RULES if pairs < rule.below)
    config = rule.config
    growth = math.sqrt(max(pairs, FEWEST_GROWING_PAIRS) / max(rule.pairs, FEWEST_GROWING_PAIRS))
    growth = min(growth, most_steps / config.max_steps)
    for name in STEP_NUMBER_SETTINGS:
        # 0 stays 0: some runs have no cooldown
        lower_bound = min(1, getattr(config, name))
        setattr(config, name, max(lower_bound, round(growth * getattr(config, name))))
    # the warm-up is `growth` times as long; this factor keeps the peak learning rate of the run
    config.learning_rate_factor = round(config.learning_rate_factor * math.sqrt(growth), 3)
    if has_fast_bf16():
        config.precision = "bf16"
    return rule, config


def has_fast_bf16() -> bool:
    """Return whether the GPU, or without one the CPU, has instructions for bf16."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return has_bf16_instructions()


def _measure_steps_in(minutes: float, config: TrainConfig) -> tuple[int, float]:
    """Measure how many steps a run makes in these minutes; return also the seconds of a step."""
    # this module is imported here, because it imports the libraries of training
    from .measuring import measure_costs

    config = dataclasses.replace(config, max_minutes=minutes)
    costs = measure_costs(config)
    cost_parts = costs.parts(config)
    # a run with fewer steps has as many evaluations and checkpoints, because their intervals shrink
    # with the number of steps
    other_seconds = sum(math.prod(cost_parts[name]) for name in ("evaluation", "checkpoint"))
    steps = int((PLANNED_SHARE * 60 * minutes - other_seconds) / costs.step)
    if steps < FEWEST_STEPS:
        raise ValueError(
            f"{MAX_MINUTES} must be enough for at least {FEWEST_STEPS} steps, which take "
            f"{(FEWEST_STEPS * costs.step + other_seconds) / PLANNED_SHARE / 60:.2g} minutes on "
            f"this machine, got {minutes:g}."
        )
    return steps, costs.step


def recipe_for(
    path: Path, corpus_settings: Mapping[str, Any], counts: Counts, minutes: float | None = None
) -> str:
    """Return a recipe with the reason for each setting.

    Args:
        path: Path of the recipe.
        corpus_settings: Settings of the corpus.
        counts: Counts from `count_pairs`.
        minutes: Minutes of training; a few steps are then trained to measure their time.

    Returns:
        YAML text with comments.

    Raises:
        ValueError: If fewer than `FEWEST_STEPS` steps fit into the minutes.
    """
    rule, config = settings_for(counts.pairs)
    step_seconds = math.nan
    if minutes is not None:
        run_folder = f"runs/{path.stem}"
        corpus_and_folder = {"name": None, **corpus_settings, "output_dir": run_folder}
        steps, step_seconds = _measure_steps_in(
            minutes, dataclasses.replace(config, **corpus_and_folder)
        )
        rule, config = settings_for(counts.pairs, steps)
        config.max_minutes = minutes
    defaults = TrainConfig()
    learning_rate = learning_rate_of(config, config.model_config(1000).d_model)
    settings = {
        name: getattr(config, name)
        for names in SETTING_REASONS
        for name in names.split()
        if name in ALWAYS_WRITTEN or getattr(config, name) != getattr(defaults, name)
    }
    facts = {
        "pairs": f"{rule.pairs:,}",
        "steps": f"{rule.config.max_steps:,}",
        "fewest": f"{FEWEST_GROWING_PAIRS:,}",
        "seconds": f"{step_seconds:.2g}",
        "peak": f"{learning_rate(config.warmup_steps):.2g}",
    }
    blocks = [
        _format_comment(
            f"{counts}.",
            f"Written by `vanilla-transformer new` for `vanilla-transformer train {path}`.",
            f"The settings are those of one run, adapted to this number of pairs: {rule.run}.",
        ),
        *_explain_settings(corpus_settings, CORPUS_REASONS, facts),
        *_explain_settings(settings, SETTING_REASONS, facts),
    ]
    return "\n".join(blocks)


def _explain_settings(
    settings: Mapping[str, Any], reasons: Mapping[str, Any], facts: Mapping[str, str]
) -> list[str]:
    """Return settings as blocks of YAML, each below its reason."""
    blocks = []
    for names, reason in reasons.items():
        group_settings = {name: settings[name] for name in names.split() if name in settings}
        if group_settings and isinstance(reason, dict):
            inner_blocks = "".join(_explain_settings(settings[names], reason, facts))
            blocks.append(f"{names}:\n{textwrap.indent(inner_blocks, '  ')}")
        elif group_settings:
            yaml_text = yaml.safe_dump(group_settings, sort_keys=False, allow_unicode=True)
            blocks.append(_format_comment(reason.format(**facts)) + yaml_text)
    return blocks


def _format_comment(*sentences: str) -> str:
    lines = [
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, COMMENT_WIDTH, break_on_hyphens=False)
    ]
    return "".join(f"# {line}\n" for line in lines)
