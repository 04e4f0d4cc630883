"""Comparison of a converted or exported model with its original: both must compute the same."""

import copy
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .changes_vanilla_transformer import evaluating
from .checks_vanilla_transformer import vocab_size_of, with_output_object
from .deviations_vanilla_transformer import deviations

# number of tokens of each source and of all targets
SOURCE_LENGTHS, TARGET_LENGTH = (9, 5, 2), 6
# allowed deviation of logits or log-probabilities, in standard deviations of the logits, by the
# dtype in which the weights are stored
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "int8": 0.5}

Module = TypeVar("Module", bound=nn.Module)


class Batch(NamedTuple):
    """Sentence pairs on which two models are compared.

    Args:
        source: Source tokens, [B, S].
        mask: 1 for a source token, 0 for padding, [B, S].
        target: Target tokens with the start token, [B, T].
        logits: Logits of the first model, in float32, [B, T, V].
    """

    source: Tensor
    mask: Tensor
    target: Tensor
    logits: Tensor

    def inputs(self) -> dict[str, Tensor]:
        """Return the sentences as keyword arguments for a model of transformers."""
        return {
            "input_ids": self.source,
            "attention_mask": self.mask,
            "decoder_input_ids": self.target,
        }


@torch.no_grad()
def batch_to_compare(
    model: PreTrainedModel,
    most_tokens: int | None = None,
    source_lengths: Sequence[int] = SOURCE_LENGTHS,
) -> Batch:
    """Score random sentences with a model, in float32 on the CPU.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        most_tokens: Maximum number of tokens of a sentence; None for no maximum.
        source_lengths: Number of tokens of each source.

    Returns:
        The sentences and their logits.
    """
    config, model = model.config, in_float32(model)
    max_lengths = [] if most_tokens is None else [most_tokens]
    if config.position_encoding == "learned":
        max_lengths.append(config.max_position_embeddings)
    source_length = min([max(source_lengths), *max_lengths])
    lengths = torch.tensor(source_lengths).clamp(max=source_length)[:, None]
    generator = torch.Generator().manual_seed(0)
    target_length = min([TARGET_LENGTH, *max_lengths])
    source, target = (
        torch.randint(vocab_size_of(stack), (len(lengths), length), generator=generator)
        for stack, length in (
            (model.get_encoder(), source_length),
            (model.get_decoder(), target_length),
        )
    )
    mask = (torch.arange(source_length) < lengths).long()
    padding_id, end_ids = config.pad_token_id, config.eos_token_id
    # no random token is padding or an end token: some models derive positions from padding tokens,
    # and in real text no token follows an end token
    special_ids = {padding_id, *(end_ids if isinstance(end_ids, list) else [end_ids])} - {None}
    ordinary_id = next(index for index in range(len(special_ids) + 1) if index not in special_ids)
    source, target = (
        ids.masked_fill(torch.isin(ids, torch.tensor([*special_ids])), ordinary_id)
        for ids in (source, target)
    )
    if padding_id is not None:
        source = source.masked_fill(mask == 0, padding_id)
    target[:, 0] = config.decoder_start_token_id
    batch = Batch(source, mask, target, torch.empty(0))
    with evaluating(model):
        return batch._replace(logits=model(**with_output_object(model, batch.inputs())).logits)


def in_float32(model: Module) -> Module:
    """Return a model in float32 on the CPU: the model itself if it already is, else a copy.

    Args:
        model: A model with weights.
    """
    weight = next(model.parameters())
    if weight.dtype == torch.float32 and weight.device.type == "cpu":
        return model
    return copy.deepcopy(model).float().cpu()


def refuse_difference(
    actual: Tensor,
    expected: Tensor,
    unit_logits: Tensor,
    message_start: str,
    stored_dtype: str = "float32",
    tokens: Tensor | None = None,
):
    """Refuse a converted or exported model whose outputs differ from those of its original.

    Args:
        actual: Logits or log-probabilities of the new model.
        expected: Logits or log-probabilities of the original model.
        unit_logits: Logits whose standard deviation is the unit of the deviation, `without_bias`.
        message_start: Beginning of the error message.
        stored_dtype: Dtype in which the new model's weights are stored, a key of `TOLERANCES`.
        tokens: Token of each number; None if the last dimension is the whole vocabulary.

    Raises:
        ValueError: If the largest deviation is above the tolerance of the dtype.
    """
    is_exact = stored_dtype == "float32"
    difference = float(deviations(actual, expected, unit_logits, tokens, is_exact).max())
    if not difference <= TOLERANCES[stored_dtype]:
        raise ValueError(
            f"{message_start} by up to {difference:.2g} standard deviations of the logits (allowed "
            f"for {stored_dtype} weights: {TOLERANCES[stored_dtype]:g}). The new model was "
            "discarded."
        )
