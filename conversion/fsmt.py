"""From transformers' FSMT, the family of fairseq's WMT19 models."""

import torch
from transformers import FSMTForConditionalGeneration

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .check import checked, refuse_changed
from .weights import assembled, bart_fields, check_kind, stack_weights


def from_fsmt(
    model: FSMTForConditionalGeneration,
) -> VanillaTransformerForConditionalGeneration:
    """The same function of the same tokens, as a model of this package.

    Args:
        model: An FSMT model whose vocabularies are of one size.

    Returns:
        A model with equal logits, in evaluation mode, its embeddings tied where source and target
        were the same; its weights are copies.

    Raises:
        TypeError: If it is another kind of model.
        ValueError: If the model is outside this architecture, does not run the library's own code,
            or has other logits than the result; the message says what.
    """
    check_kind("model", model, FSMTForConditionalGeneration)
    refuse_changed(model, "transformers' FSMTForConditionalGeneration")
    theirs = model.config
    if theirs.src_vocab_size != theirs.tgt_vocab_size:
        raise ValueError(
            "src_vocab_size and tgt_vocab_size must be equal: source and target share one "
            f"vocabulary here, got {theirs.src_vocab_size} and {theirs.tgt_vocab_size}."
        )
    source_table = model.model.encoder.embed_tokens.weight
    target_table = model.model.decoder.embed_tokens.weight
    output_table = model.model.decoder.output_projection.weight
    tied = torch.equal(source_table, target_table) and torch.equal(target_table, output_table)
    width = theirs.d_model
    config = VanillaTransformerConfig(
        **bart_fields(theirs),
        vocab_size=theirs.tgt_vocab_size,
        # the longest wavelength stands at feature d_model / 2 - 1, not at d_model / 2
        position_base=10000.0 ** (width / (width - 2)),
        # fairseq counts from the row after the padding token's
        position_offset=theirs.pad_token_id + 1,
        tie_word_embeddings=tied,
    )
    weights = {
        **stack_weights(model, "encoder"),
        **stack_weights(model, "decoder"),
        "model.encoder.embed_tokens.weight": source_table,
        "model.decoder.embed_tokens.weight": target_table,
        "lm_head.weight": output_table,
    }
    return checked(model, assembled(config, weights, "an FSMT model"))
