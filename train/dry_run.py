"""Preview of a run, computed without data and without weights."""

import dataclasses
import math
from typing import Any

import torch
import yaml
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..sizes import size_of
from ..tokenization.learning import refuse_small_vocabulary
from .config import TrainConfig
from .devices.memory import CPU_TOKENS, bytes_per_token, fixed_step_bytes, state_bytes
from .model_class import make_model
from .progress import refuse_trackers
from .recipe import read_recipe_file, recipe_comment
from .schedule import rate_of
from .scoring import refuse_bleu_tokenizer
from .vocabulary import load_tokenizer


def describe(config: TrainConfig, recipe: str) -> str:
    """Describe a run: its settings, sizes and memory, and measured results of its recipe.

    Args:
        config: Settings of the run.
        recipe: Name or path of the recipe.

    Returns:
        Lines of text, in groups.

    Raises:
        ValueError: If the recipe is unknown, the tokenizer cannot be read, or the model, the BLEU
            tokenizer or a tracker is refused.
    """
    refuse_bleu_tokenizer(config.bleu_tokenizer)
    refuse_trackers(config.report_to)
    vocab_size = config.vocab_size
    if config.tokenizer is not None:
        vocab_size = len(load_tokenizer(config.tokenizer))
    else:
        refuse_small_vocabulary(vocab_size)
    model_config = config.model_config(vocab_size)
    with torch.device("meta"):
        model = make_model(config, model_config)
    # a run may end, or begin its cooldown, before the warmup ends
    highest = min(config.warmup_steps, config.max_steps - config.cooldown_steps)
    peak = rate_of(config, model_config.d_model)(highest)
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
    parts = [
        "\n".join([recipe, *(f"  {line}" for line in recipe_comment(recipe))]),
        _group("computed", _lines(computed)),
        *(
            _group("measured, with the unchanged recipe", _lines(run))
            for run in read_recipe_file(recipe)[1]
        ),
        _group("settings that differ from the paper's base model", _yaml_lines(differing)),
        _group("default settings", _yaml_lines(others)),
    ]
    return "\n\n".join(parts)


def _memory(config: TrainConfig, model: PreTrainedModel) -> dict[str, str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = state_bytes(config, model.num_parameters())
    parts["loss and buffers"] = fixed_step_bytes(model.config, config.precision, device)
    each = bytes_per_token(model.config, config.precision, config.max_length, device)
    sizes = [min(config.tokens_per_micro_batch or CPU_TOKENS, config.tokens_per_step)]
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


def _group(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _lines(facts: dict[str, str]) -> list[str]:
    return [f"{name}: {fact}" for name, fact in facts.items()]


def _yaml_lines(settings: dict[str, Any]) -> list[str]:
    # one line each, in the form of a recipe
    return [
        yaml.safe_dump(
            {name: value},
            default_flow_style=None if isinstance(value, dict | list) else False,
            sort_keys=False,
            allow_unicode=True,
            width=math.inf,
        ).rstrip()
        for name, value in settings.items()
    ]


def flops_per_token(model: nn.Module) -> int:
    """Return the work of training on one source token and one target token.

    Each weight is multiplied once with each source or target token that it processes. Backward
    takes twice the work of forward.

    Args:
        model: Model or part of a model; the weights may be on the meta device.

    Returns:
        Floating-point operations, without those between queries, keys and values, which depend on
        the length of sentences.
    """
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    return 6 * sum(weight.numel() for weight in weights)
