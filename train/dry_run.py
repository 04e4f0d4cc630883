"""Preview of a run: its first pairs, and its sizes, computed without allocating weights."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import yaml
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..console import LONGEST_VALUE, shortened
from ..loading import is_allowed_on_hub
from ..sizes import size_of
from ..tokenization.learning import refuse_small_vocabulary
from .config import TrainConfig
from .data.corpus import is_file_name, is_local, refuse_other_languages, refuse_unloadable, texts_of
from .data.counts import count_pairs
from .data.prepare import Texts, load_texts
from .devices.cpu_kernels import emulates_bf16
from .devices.memory import CPU_MICRO_BATCH_TOKENS, bytes_per_token, fixed_step_bytes, state_bytes
from .model_class import make_model
from .progress import refuse_trackers
from .recipe import read_recipe_file, recipe_comment
from .schedule import learning_rate_of
from .scoring import refuse_bleu_tokenizer
from .vocabulary import learn_tokenizer, load_tokenizer, refuse_unknown_text

# numbers of pairs of each corpus: to show, to learn a vocabulary from, and to count tokens in
SHOWN_PAIRS, LEARNED_PAIRS, COUNTED_PAIRS = 3, 100_000, 2000


def describe(config: TrainConfig, recipe: str) -> str:
    """Describe a run: its first pairs, settings, sizes and memory, and results of its recipe.

    Only corpora in files and folders are read, so that nothing is downloaded.

    Args:
        config: Settings of the run.
        recipe: Name or path of the recipe.

    Returns:
        Lines of text, in groups.

    Raises:
        ValueError: If the recipe is unknown, the tokenizer or a corpus cannot be read or used, or
            the model, the BLEU tokenizer or a tracker is invalid.
    """
    refuse_bleu_tokenizer(config.bleu_tokenizer)
    refuse_trackers(config.report_to)
    vocab_size, tokenizer = config.vocab_size, None
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
        vocab_size = len(tokenizer)
    else:
        refuse_small_vocabulary(vocab_size)
    model_config = config.model_config(vocab_size)
    with torch.device("meta"):
        model = make_model(config, model_config)
    # the learning rate is highest at the end of the warm-up, or before it, if the run ends or its
    # cooldown begins within the warm-up
    peak_step = min(config.warmup_steps, config.max_steps - config.cooldown_steps)
    peak_learning_rate = learning_rate_of(config, model_config.d_model)(peak_step)
    training_tokens = config.max_steps * config.tokens_per_step
    num_flops = training_tokens * flops_per_token(model)
    computed_facts = {
        "sizes": _describe_sizes(model_config),
        "parameters": f"{model.num_parameters():,} with {vocab_size:,} tokens",
        "steps": f"{config.max_steps:,}",
        "tokens per step": f"{config.tokens_per_step:,} of the source and of the target",
        "total tokens": f"{training_tokens:,} of the source and of the target",
        "training": f"{num_flops:.2g} FLOPs, without attention scores",
        **_describe_memory(config, model),
        "peak learning rate": f"{peak_learning_rate:.3g} at step {peak_step:,}",
    }
    is_on_cpu = not torch.accelerator.is_available()
    if config.precision == "bf16" and is_on_cpu and emulates_bf16():
        computed_facts["precision"] = (
            "bf16, many times slower than --precision fp32 on this CPU, which has no instructions "
            "for bf16"
        )
    paper_config, settings = TrainConfig(), dataclasses.asdict(config)
    changed_settings = {
        name: value for name, value in settings.items() if value != getattr(paper_config, name)
    }
    default_settings = {
        name: value for name, value in settings.items() if name not in changed_settings
    }
    corpora = [config.dataset, *(corpus["dataset"] for corpus in config.mix)]
    remote_corpora = _remote_corpora(corpora, config.source_lang, config.target_lang)
    if remote_corpora:
        computed_facts["text"] = (
            f"not read, because a dry run downloads nothing: {', '.join(remote_corpora)}"
        )
    texts = None if remote_corpora or "demo" in corpora else load_texts(config)
    text_groups: list[str] = []
    if texts is not None:
        if tokenizer is not None:
            refuse_unknown_text(tokenizer, config, texts)
        computed_facts |= _describe_epochs(config, texts, tokenizer)
        text_groups = first_pairs(texts, tokenizer, config.streaming)
        if not config.streaming:
            counts = count_pairs(texts)
            text_groups.append(_format_group("training text", [f"{counts}", *counts.cleaning]))
    groups = [
        "\n".join([recipe, *(f"  {line}" for line in recipe_comment(recipe))]),
        *text_groups,
        format_facts("computed", computed_facts),
        *(
            format_facts("measured, with the unchanged recipe", run)
            for run in read_recipe_file(recipe)[1]
        ),
        _format_group(
            "settings that differ from the paper's base model", _yaml_lines(changed_settings)
        ),
        _format_group("default settings", _yaml_lines(default_settings)),
    ]
    return "\n\n".join(groups)


def _remote_corpora(corpora: Sequence[str], *languages: str) -> list[str]:
    """Return the corpora that may be on the Hub; refuse a name that the Hub does not allow."""
    remote_corpora = []
    for dataset in corpora:
        # a missing file is refused when the text is loaded
        if is_local(dataset, *languages) or is_file_name(dataset):
            continue
        refuse_other_languages(dataset, *languages)
        # a name that the Hub allows is not looked up there
        if not is_allowed_on_hub(dataset):
            refuse_unloadable(dataset, *languages)
        remote_corpora.append(dataset)
    return remote_corpora


def _describe_epochs(
    config: TrainConfig, texts: Texts, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, str]:
    """Estimate the number of epochs from the first pairs."""
    # the size of a stream is unknown, and corpora with weights do not end at the same time
    if config.streaming or texts.corpus_weights is not None:
        return {}
    first_rows = [
        rows_of_corpus.select(range(min(len(rows_of_corpus), LEARNED_PAIRS)))
        for rows_of_corpus in texts.train
    ]
    if tokenizer is None:
        first_texts = dataclasses.replace(texts, train=first_rows)
        tokenizer = learn_tokenizer(config, first_texts, progress=False)
    num_tokens = 0.0
    for rows_of_corpus, all_rows in zip(first_rows, texts.train, strict=True):
        table = next(iter(rows_of_corpus.with_format("arrow").iter(COUNTED_PAIRS)))
        sides = texts_of(table, texts.languages, "train", repair=True)
        lengths = [map(len, tokenizer(side).input_ids) for side in sides]
        num_tokens += sum(map(max, *lengths)) * len(all_rows) / len(table)
    epochs = config.max_steps * config.tokens_per_step / num_tokens
    return {"epochs": f"about {epochs:,.0f}" if epochs >= 100 else f"about {epochs:.3g}"}


def first_pairs(
    texts: Texts, tokenizer: PreTrainedTokenizerBase | None = None, is_stream: bool = False
) -> list[str]:
    """Show the first pairs of each corpus.

    Args:
        texts: Text from `load_texts`.
        tokenizer: Tokenizer that counts the tokens; None to count characters.
        is_stream: Whether the numbers of pairs are unknown.

    Returns:
        Lines of text for each corpus.
    """
    groups = []
    for name, rows in zip(texts.names, texts.train, strict=True):
        table = next(iter(rows.with_format("arrow").iter(SHOWN_PAIRS)))
        sides = texts_of(table, texts.languages, "train", repair=True)
        lines = [
            f"{language}, {_describe_length(text, tokenizer)}: "
            f"{shortened(repr(text), 3 * LONGEST_VALUE)}"
            for pair in zip(*sides, strict=True)
            for language, text in zip(texts.languages, pair, strict=True)
        ]
        total_text = "" if is_stream else f", {len(rows):,} in total"
        groups.append(_format_group(f"first pairs of {name}{total_text}", lines))
    return groups


def _describe_length(text: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    unit = "character" if tokenizer is None else "token"
    count = len(text if tokenizer is None else tokenizer(text).input_ids)
    return f"{count:,} {unit}{'s' * (count != 1)}"


def _describe_memory(config: TrainConfig, model: PreTrainedModel) -> dict[str, str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bytes_by_part = state_bytes(config, model.num_parameters())
    bytes_by_part["loss and buffers"] = fixed_step_bytes(model.config, config.precision, device)
    bytes_of_token = bytes_per_token(model.config, config.precision, config.max_length, device)
    batch_sizes = [
        min(config.tokens_per_micro_batch or CPU_MICRO_BATCH_TOKENS, config.tokens_per_step)
    ]
    if config.tokens_per_micro_batch is None:
        batch_sizes.append(config.tokens_per_step)
    batches = ", ".join(
        f"{_format_bytes(size * bytes_of_token)} with {size:,}"
        for size in dict.fromkeys(batch_sizes)
    )
    return {
        "memory": f"{_format_bytes(sum(bytes_by_part.values()))} for {', '.join(bytes_by_part)}",
        "memory of a micro-batch": f"{_format_bytes(bytes_of_token)} for a source and a target "
        f"token: {batches}",
    }


def _format_bytes(number: int) -> str:
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
    unit, name = next((unit, name) for unit, name in units if number >= unit)
    return f"{number / unit:.3g} {name}"


def _describe_sizes(config: PreTrainedConfig) -> str:
    layers, heads, inner = (
        f"{size_of(config, f'encoder_{name}')} + {size_of(config, f'decoder_{name}')}"
        for name in ("layers", "attention_heads", "ffn_dim")
    )
    return f"{layers} layers, {heads} heads, d_model {config.d_model}, d_ff {inner}"


def _format_group(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def format_facts(title: str, facts: dict[str, str]) -> str:
    """Format facts below a title.

    Args:
        title: Title.
        facts: Facts by name.

    Returns:
        Lines of text.
    """
    return _format_group(title, [f"{name}: {fact}" for name, fact in facts.items()])


def _yaml_lines(settings: dict[str, Any]) -> list[str]:
    # one line for each setting, in the form of a recipe: a mapping {name: value} without its braces
    return [
        yaml.safe_dump(
            {name: value},
            default_flow_style=True,
            sort_keys=False,
            allow_unicode=True,
            width=math.inf,
        ).strip()[1:-1]
        for name, value in settings.items()
    ]


def flops_per_token(model: nn.Module) -> int:
    """Count the floating-point operations of training on one source token and one target token.

    In the forward pass, each weight of a linear layer takes 2 operations for a token, a
    multiplication and an addition. The backward pass takes twice as many, so both take 6.

    Args:
        model: Model or part of a model; the weights may be on the meta device.

    Returns:
        Number of operations, without the products of queries, keys and values, whose number depends
        on the length of sentences.
    """
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    return 6 * sum(weight.numel() for weight in weights)
