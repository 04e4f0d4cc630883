"""Convert FSMT models of transformers, the architecture of fairseq's WMT19 models."""

import torch
from transformers import FSMTForConditionalGeneration

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .check import check_logits, refuse_modified_source
from .weights import bart_fields, build_model, check_class, layer_weights


def from_fsmt(
    model: FSMTForConditionalGeneration, copy: bool = True
) -> VanillaTransformerForConditionalGeneration:
    """Convert an FSMT model to a model of this package; the same ids give the same logits.

    Args:
        model: FSMT model whose two vocabularies have the same size.
        copy: Whether to copy all weights. If False, both models share the weights that are already
            in float32 on the CPU.

    Returns:
        The model in evaluation mode, in float32. `tie_word_embeddings` is true if the matrices of
        source, target and output are equal.

    Raises:
        TypeError: If the model is of another class.
        ValueError: If the model is outside this architecture, was patched or has hooks, or its
            logits differ from those of the result; the message names the reason.
    """
    check_class("model", model, FSMTForConditionalGeneration)
    refuse_modified_source(model, "transformers' FSMTForConditionalGeneration")
    fsmt_config = model.config
    if fsmt_config.src_vocab_size != fsmt_config.tgt_vocab_size:
        raise ValueError(
            "src_vocab_size and tgt_vocab_size must be equal: source and target share one "
            f"vocabulary here, got {fsmt_config.src_vocab_size} and {fsmt_config.tgt_vocab_size}."
        )
    source_embeddings = model.model.encoder.embed_tokens.weight
    target_embeddings = model.model.decoder.embed_tokens.weight
    output_weight = model.model.decoder.output_projection.weight
    embeddings_are_equal = torch.equal(source_embeddings, target_embeddings)
    is_tied = embeddings_are_equal and torch.equal(target_embeddings, output_weight)
    d_model = fsmt_config.d_model
    config = VanillaTransformerConfig(
        **bart_fields(fsmt_config),
        vocab_size=fsmt_config.tgt_vocab_size,
        # our wavelengths are 2 pi base^(2i / d), and those of FSMT are 2 pi 10000^(2i / (d - 2)):
        # they are equal if the base is 10000^(d / (d - 2))
        position_base=10000.0 ** (d_model / (d_model - 2)),
        # the first position is the id of the padding token plus 1, as in fairseq
        position_offset=fsmt_config.pad_token_id + 1,
        tie_word_embeddings=is_tied,
    )
    weights = {
        **layer_weights(model, "encoder"),
        **layer_weights(model, "decoder"),
        "model.encoder.embed_tokens.weight": source_embeddings,
        "model.decoder.embed_tokens.weight": target_embeddings,
        "lm_head.weight": output_weight,
    }
    converted = build_model(config, weights, "an FSMT model", copy, model.generation_config)
    return check_logits(model, converted)
