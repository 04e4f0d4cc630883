"""Check a conversion: the source runs unmodified library code, and the logits are equal."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..changes_vanilla_transformer import evaluating
from ..comparison import batch_to_compare, in_float32, refuse_difference
from ..deviations_vanilla_transformer import without_bias
from ..identity_vanilla_transformer import MASKS, library_difference
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..released_code_vanilla_transformer import RELEASED, is_of_library
from .library_code import library_digests

DIFFERS = "a conversion must compute what its source computes, but the logits differ"
# a version of transformers without digests adds nothing, so its models are refused
RELEASED.update(library_digests(transformers.__version__.rsplit(".", 1)[0]))


def refuse_modified_source(model: nn.Module, name: str):
    """Refuse a model that does not run the released code of its library.

    Args:
        model: Model of transformers, or a stack of torch's own Transformer.
        name: Library and class, for the error, such as "transformers' MarianMTModel".

    Raises:
        ValueError: If a module is of another class, was patched or has a hook, or the attention
            function is not the library's; the message names the module or the function.
    """
    difference = library_difference(model)
    config = getattr(model, "config", None)
    if difference is None and config is not None:
        implementation = getattr(config, "_attn_implementation", None) or "eager"
        # eager attention is not in the registry: `get_interface` then returns its second argument,
        # which is only a sentinel here
        attention_function = ALL_ATTENTION_FUNCTIONS.get_interface(
            implementation, library_difference
        )
        mask_function = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
        for kind, function, own_functions in (
            ("attention", attention_function, {"sdpa": sdpa_attention_forward}),
            ("mask", mask_function, MASKS),
        ):
            own_function = own_functions.get(implementation, function)
            is_absent = function in (None, library_difference)
            if function is not own_function or not (is_absent or is_of_library(function)):
                difference = f"its {kind} function {implementation!r} is not that of transformers"
                break
    if difference is not None:
        raise ValueError(f"model must be {name} with the code of transformers: {difference}.")


@contextlib.contextmanager
def _rounding_positions(
    model: VanillaTransformerForConditionalGeneration, dtype: torch.dtype
) -> Iterator[None]:
    """Round the positional encodings to a dtype, as a model of transformers in this dtype does."""

    def round_encoding(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        x, *first_position = args
        encoding = module.forward(torch.zeros_like(x), *first_position)
        return x + encoding.to(dtype).to(x.dtype)

    stacks = model.get_encoder(), model.get_decoder()
    hooks = [stack.positions.register_forward_hook(round_encoding) for stack in stacks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def check_logits(
    source: Any, converted: VanillaTransformerForConditionalGeneration
) -> VanillaTransformerForConditionalGeneration:
    """Compare the logits of a converted model with those of its source.

    Args:
        source: Model of transformers.
        converted: Model that was converted from the source.

    Returns:
        The converted model.

    Raises:
        ValueError: If the logits differ by more than the tolerance for float32.
    """
    most_tokens = getattr(source.config, "max_position_embeddings", None)
    with _rounding_positions(converted, source.dtype):
        batch = batch_to_compare(converted, most_tokens)
    source = in_float32(source)
    with evaluating(source):
        source_logits = source(**batch.inputs(), use_cache=False).logits
    unit_logits = without_bias(source_logits, converted.lm_head.bias)
    refuse_difference(batch.logits, source_logits, unit_logits, DIFFERS)
    return converted


@torch.no_grad()
def check_decoder_states(
    source: nn.Transformer, converted: VanillaTransformerForConditionalGeneration
) -> VanillaTransformerForConditionalGeneration:
    """Compare the decoder states [B, T, d_model] of a converted model with those of its source.

    nn.Transformer has no output projection, so the source has no logits to compare.

    Args:
        source: torch's own Transformer.
        converted: Model that was converted from the source.

    Returns:
        The converted model.

    Raises:
        ValueError: If the states differ by more than the tolerance for float32.
    """
    batch = batch_to_compare(converted)
    encoder, decoder = converted.get_encoder(), converted.get_decoder()
    converted_states = converted.model(**batch.inputs()).last_hidden_state
    source = in_float32(source)

    def batch_first(x: Tensor) -> Tensor:
        return x if source.batch_first else x.transpose(0, 1)

    def embed(stack: Any, ids: Tensor) -> Tensor:
        return batch_first(stack.positions(stack.embed_tokens(ids) * converted.config.d_model**0.5))

    is_padding = batch.mask == 0
    length = batch.target.shape[1]
    causal_mask = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
    with evaluating(source):
        memory = source.encoder(embed(encoder, batch.source), src_key_padding_mask=is_padding)
        states = source.decoder(
            embed(decoder, batch.target),
            memory,
            tgt_mask=causal_mask,
            memory_key_padding_mask=is_padding,
        )
    source_states = batch_first(states)
    refuse_difference(
        converted_states, source_states, source_states, DIFFERS.replace("logits", "states")
    )
    return converted
