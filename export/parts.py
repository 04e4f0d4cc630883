"""Parts of a model that several exports need: tokenizer, position table, activation function."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import (
    VanillaTransformerDecoder,
    VanillaTransformerEncoder,
    VanillaTransformerForConditionalGeneration,
)
from ..tokenization.tokenization_vanilla_transformer import VanillaTransformerTokenizer

Name = TypeVar("Name")
# default number of positions in an exported position table
USUAL_POSITIONS = 1024


def with_search_ids(
    model: VanillaTransformerForConditionalGeneration,
) -> VanillaTransformerForConditionalGeneration:
    """Return a model whose configuration has the start and end tokens of its search.

    `generate` reads them from the generation configuration, whose file a user may have changed.

    Args:
        model: Model to export.

    Returns:
        Model with the same weights, and a configuration of its own.
    """
    search, model = model.generation_config, copy.copy(model)
    model.config = copy.deepcopy(model.config)
    start_id = search.decoder_start_token_id
    # without a start token, `generate` starts with the token for the beginning of a sentence
    start_id = search.bos_token_id if start_id is None else start_id
    for name, token_id in (
        ("decoder_start_token_id", start_id),
        ("eos_token_id", search.eos_token_id),
    ):
        if token_id is not None:
            setattr(model.config, name, token_id)
    return model


def vocabulary(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Return the token of each id.

    Args:
        model: Model to export.
        tokenizer: Tokenizer of the model.

    Returns:
        The tokens by id. An id without a token gets a name that does not occur in text.
    """
    # M2M100's vocabulary lacks the tokens of its languages
    ids = getattr(tokenizer, "lang_token_to_id", {}) | tokenizer.get_vocab()
    tokens = {token_id: token for token, token_id in ids.items()}
    return [
        tokens.get(token_id, f"<row {token_id}>") for token_id in range(model.config.vocab_size)
    ]


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    **settings: Any,
):
    """Save a tokenizer as a class that transformers 4, transformers 5 and transformers.js have.

    A tokenizer that is neither a `VanillaTransformerTokenizer` nor a `TokenizersBackend` is saved
    without changes.

    Args:
        tokenizer: Tokenizer of the model.
        folder: Output folder.
        change: Function that takes the content of `tokenizer.json` and returns the content to save;
            called only for a `VanillaTransformerTokenizer`.
        **settings: Further settings for `tokenizer_config.json`.
    """
    if isinstance(tokenizer, VanillaTransformerTokenizer):
        content = json.loads(tokenizer.backend_for_others().to_str())
        content = content if change is None else change(content)
    elif type(tokenizer) is TokenizersBackend:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
    else:
        tokenizer.save_pretrained(folder)
        return
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # without this, transformers 4 returns `token_type_ids`, which `generate` refuses
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": tokenizer.model_max_length,
        # by default, transformers.js removes spaces before punctuation
        "clean_up_tokenization_spaces": False,
        # PreTrainedTokenizerFast finds tokens that a user added only if this setting is off
        "split_special_tokens": tokenizer.split_special_tokens
        and not tokenizer.extra_special_tokens,
        **tokenizer.special_tokens_map,
        **settings,
    }
    for file_name, value in (("tokenizer.json", content), ("tokenizer_config.json", settings)):
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (folder / file_name).write_text(text, encoding="utf-8")


@torch.no_grad()
def position_table(
    stack: VanillaTransformerEncoder | VanillaTransformerDecoder, num_positions: int | None
) -> Tensor:
    """Return the positional encoding of a stack as a table.

    Args:
        stack: Encoder or decoder.
        num_positions: Number of positions; if not given, the number of learned positions, or
            `USUAL_POSITIONS`.

    Returns:
        The table in float32; zeros if the model has no positional encoding,
        [num_positions, d_model].

    Raises:
        ValueError: If `num_positions` is below 1, or above the number of learned positions.
    """
    config = stack.config
    is_learned = config.position_encoding == "learned"
    num_learned_positions = config.max_position_embeddings if is_learned else None
    if num_positions is None:
        num_positions = num_learned_positions or USUAL_POSITIONS
    if num_positions < 1:
        raise ValueError(f"num_positions must be at least 1, got {num_positions}.")
    if num_learned_positions is not None and num_positions > num_learned_positions:
        raise ValueError(
            f"num_positions must be at most {num_learned_positions}, the number of learned "
            f"positions, got {num_positions}."
        )
    # `positions` adds the table to these zeros; in bf16 or fp16, the sum would be rounded
    device = stack.embed_tokens.weight.device
    zero_embeddings = torch.zeros(1, num_positions, config.d_model, device=device)
    return stack.positions(zero_embeddings)[0]


def activation_of(config: VanillaTransformerConfig, engine_names: dict[str, Name]) -> Name:
    """Return another engine's name of the activation function.

    Args:
        config: Configuration of the model.
        engine_names: The engine's names of activation functions, by our names.

    Returns:
        The engine's name.

    Raises:
        ValueError: If the engine does not have the activation function.
    """
    if config.activation_function not in engine_names:
        raise ValueError(
            f"activation_function must be one of {', '.join(engine_names)} for this engine, got "
            f"{config.activation_function!r}."
        )
    return engine_names[config.activation_function]
