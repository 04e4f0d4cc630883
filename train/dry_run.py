"""Preview of a run: its first pairs, and its sizes, computed without allocating weights."""

import dataclasses
import math
from typing import Any

import torch
import yaml
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..console import LONGEST_VALUE, shortened
from ..sizes import size_of
from ..tokenization.learning import refuse_small_vocabulary
from .config import TrainConfig
from .data.corpus import is_file_name, is_local, texts_of
from .data.prepare import Texts, load_texts
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
        ValueError: If the recipe is unknown, the tokenizer or a corpus cannot be read, or the
            model, the BLEU tokenizer or a tracker is invalid.
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
    highest = min(config.warmup_steps, config.max_steps - config.cooldown_steps)
    peak = learning_rate_of(config, model_config.d_model)(highest)
    tokens = config.max_steps * config.tokens_per_step
    computed = {
        "sizes": _sizes(model_config),
        "parameters": f"{model.num_parameters():,} with {vocab_size:,} tokens",
        "steps": f"{config.max_steps:,}",
        "tokens per step": f"{config.tokens_per_step:,} of the source and of the target",
        "tokens in all": f"{tokens:,} of the source and of the target",
        "training": f"{tokens * flops_per_token(model):.2g} FLOPs, without attention scores",
        **_memory(config, model),
        "highest learning rate": f"{peak:.3g} at step {highest:,}",
    }
    papers, settings = TrainConfig(), dataclasses.asdict(config)
    differing = {name: value for name, value in settings.items() if value != getattr(papers, name)}
    others = {name: value for name, value in settings.items() if name not in differing}
    texts = _local_texts(config)
    if texts is not None:
        if tokenizer is not None:
            refuse_unknown_text(tokenizer, config, texts)
        computed |= _epochs(config, texts, tokenizer)
    parts = [
        "\n".join([recipe, *(f"  {line}" for line in recipe_comment(recipe))]),
        *(() if texts is None else first_pairs(texts, tokenizer, config.streaming)),
        group("computed", computed),
        *(group("measured, with the unchanged recipe", run) for run in read_recipe_file(recipe)[1]),
        _titled("settings that differ from the paper's base model", _yaml_lines(differing)),
        _titled("default settings", _yaml_lines(others)),
    ]
    return "\n\n".join(parts)


def _local_texts(config: TrainConfig) -> Texts | None:
    """Load the corpora as training does; return None if one of them is no file or folder."""
    languages = (config.source_lang, config.target_lang)
    corpora = [config.dataset, *(corpus["dataset"] for corpus in config.mix)]
    # `load_texts` refuses a missing file; a name that may be on the Hub is not looked up
    is_path = [is_local(it, *languages) or is_file_name(it) for it in corpora]
    return load_texts(config) if all(is_path) and "demo" not in corpora else None


def _epochs(
    config: TrainConfig, texts: Texts, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, str]:
    """Estimate the number of epochs from the first pairs."""
    # the size of a stream is unknown, and corpora with weights do not end at the same time
    if config.streaming or texts.corpus_weights is not None:
        return {}
    first = [rows.select(range(min(len(rows), LEARNED_PAIRS))) for rows in texts.train]
    if tokenizer is None:
        sample = dataclasses.replace(texts, train=first)
        tokenizer = learn_tokenizer(config, sample, progress=False)
    num_tokens = 0.0
    for rows, in_all in zip(first, texts.train, strict=True):
        table = next(iter(rows.with_format("arrow").iter(COUNTED_PAIRS)))
        sides = texts_of(table, texts.languages, "train", repair=True)
        lengths = [map(len, tokenizer(side).input_ids) for side in sides]
        num_tokens += sum(map(max, *lengths)) * len(in_all) / len(table)
    epochs = config.max_steps * config.tokens_per_step / num_tokens
    return {"epochs": f"about {epochs:.3g}"}


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
            f"{language}, {_size(text, tokenizer)}: {shortened(repr(text), 3 * LONGEST_VALUE)}"
            for pair in zip(*sides, strict=True)
            for language, text in zip(texts.languages, pair, strict=True)
        ]
        in_all = "" if is_stream else f", {len(rows):,} in all"
        groups.append(_titled(f"first pairs of {name}{in_all}", lines))
    return groups


def _size(text: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    kind = "character" if tokenizer is None else "token"
    count = len(text if tokenizer is None else tokenizer(text).input_ids)
    return f"{count:,} {kind}{'s' * (count != 1)}"


def _memory(config: TrainConfig, model: PreTrainedModel) -> dict[str, str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = state_bytes(config, model.num_parameters())
    parts["loss and buffers"] = fixed_step_bytes(model.config, config.precision, device)
    each = bytes_per_token(model.config, config.precision, config.max_length, device)
    sizes = [min(config.tokens_per_micro_batch or CPU_MICRO_BATCH_TOKENS, config.tokens_per_step)]
    if config.tokens_per_micro_batch is None:
        sizes.append(config.tokens_per_step)
    batches = ", ".join(f"{_bytes(size * each)} with {size:,}" for size in dict.fromkeys(sizes))
    return {
        "memory": f"{_bytes(sum(parts.values()))} for {', '.join(parts)}",
        "memory of a micro-batch": f"{_bytes(each)} for a source and a target token: {batches}",
    }


def _bytes(number: int) -> str:
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
    unit, name = next((unit, name) for unit, name in units if number >= unit)
    return f"{number / unit:.3g} {name}"


def _sizes(config: PreTrainedConfig) -> str:
    layers, heads, inner = (
        f"{size_of(config, f'encoder_{name}')} + {size_of(config, f'decoder_{name}')}"
        for name in ("layers", "attention_heads", "ffn_dim")
    )
    return f"{layers} layers, {heads} heads, d_model {config.d_model}, d_ff {inner}"


def _titled(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def group(title: str, facts: dict[str, str]) -> str:
    """Format facts below a title.

    Args:
        title: Title.
        facts: Facts by name.

    Returns:
        Lines of text.
    """
    return _titled(title, [f"{name}: {fact}" for name, fact in facts.items()])


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
