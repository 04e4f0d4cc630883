"""Convert Marian models of transformers, such as the OPUS-MT models."""

import torch
from transformers import MarianMTModel

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    sinusoidal_encoding,
)
from .check import check_logits, refuse_modified_source
from .weights import bart_fields, build_model, check_class, layer_weights


def from_marian(
    model: MarianMTModel, copy: bool = True
) -> VanillaTransformerForConditionalGeneration:
    """Convert a Marian model to a model of this package; the same ids give the same logits.

    Args:
        model: Marian model whose source, target and output share one matrix.
        copy: Whether to copy all weights. If False, both models share the weights that are already
            in float32 on the CPU.

    Returns:
        The model in evaluation mode, in float32.

    Raises:
        TypeError: If the model is of another class.
        ValueError: If the model is outside this architecture, does not run the library's own code,
            or its logits differ from those of the result; the message names the reason.
    """
    check_class("model", model, MarianMTModel)
    refuse_modified_source(model, "transformers' MarianMTModel")
    marian_config = model.config
    if not marian_config.share_encoder_decoder_embeddings or not marian_config.tie_word_embeddings:
        raise ValueError(
            "share_encoder_decoder_embeddings and tie_word_embeddings must be true: source, "
            "target and output share one matrix here, got a Marian model with several."
        )
    position_tables = {
        f"model.{name}.positions.table.weight": stack.embed_positions.weight
        for name, stack in (("encoder", model.model.encoder), ("decoder", model.model.decoder))
    }
    sinusoids = sinusoidal_encoding(
        marian_config.max_position_embeddings, marian_config.d_model, layout="halves"
    )
    # Marian stores its sinusoids as weights; other values there become learned positions
    are_sinusoids = all(
        torch.allclose(table, sinusoids.to(table), atol=1e-4) for table in position_tables.values()
    )
    config = VanillaTransformerConfig(
        **bart_fields(marian_config),
        vocab_size=marian_config.vocab_size,
        output_bias=True,
        position_encoding="sinusoidal" if are_sinusoids else "learned",
    )
    embeddings = model.model.shared.weight
    weights = {
        **layer_weights(model, "encoder"),
        **layer_weights(model, "decoder"),
        "model.encoder.embed_tokens.weight": embeddings,
        "model.decoder.embed_tokens.weight": embeddings,
        "lm_head.weight": embeddings,
        "lm_head.bias": model.final_logits_bias[0],
        **({} if are_sinusoids else position_tables),
    }
    converted = build_model(config, weights, "a Marian model", copy, model.generation_config)
    return check_logits(model, converted)
