"""What every export needs of a model: its tokens, its table of positions, its activation."""

from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import (
    VanillaTransformerDecoder,
    VanillaTransformerEncoder,
    VanillaTransformerForConditionalGeneration,
)

Name = TypeVar("Name")
# tokens of the longest sentence, where nothing says how many
USUAL_POSITIONS = 1024


def vocabulary(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """The token of each row of the embedding.

    Args:
        model: The model.
        tokenizer: Its tokenizer.

    Returns:
        The tokens by id; a row that no token has gets a name that no text spells.
    """
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    return [names.get(index, f"<row {index}>") for index in range(model.config.vocab_size)]


@torch.no_grad()
def position_table(
    stack: VanillaTransformerEncoder | VanillaTransformerDecoder, num_positions: int | None
) -> Tensor:
    """What a stack adds to the token at each place.

    Args:
        stack: Encoder or decoder.
        num_positions: Number of rows; if not given, as many as were learned, or
            `USUAL_POSITIONS`.

    Returns:
        The table in float32, zeros where the model has no positions, [num_positions, d_model].

    Raises:
        ValueError: If there would be no row, or more than were learned.
    """
    config = stack.config
    learned = config.max_position_embeddings if config.position_encoding == "learned" else None
    if num_positions is None:
        num_positions = learned or USUAL_POSITIONS
    if num_positions < 1:
        raise ValueError(f"num_positions must be at least 1, got {num_positions}.")
    if learned is not None and num_positions > learned:
        raise ValueError(
            f"num_positions must be at most {learned}, the number of learned positions, got "
            f"{num_positions}."
        )
    # in the type of a model in half precision it would be rounded
    nothing = torch.zeros(1, num_positions, config.d_model, device=stack.embed_tokens.weight.device)
    return stack.positions(nothing)[0]


def activation_of(config: VanillaTransformerConfig, known: dict[str, Name]) -> Name:
    """The activation by the name that another engine has for it.

    Args:
        config: Of the model.
        known: Our names, and the engine's.

    Returns:
        The engine's.

    Raises:
        ValueError: If it has none.
    """
    if config.activation_function not in known:
        raise ValueError(
            f"activation_function must be one of {', '.join(known)} for this engine, got "
            f"{config.activation_function!r}."
        )
    return known[config.activation_function]


__all__ = ["activation_of", "position_table", "vocabulary"]
