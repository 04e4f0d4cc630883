"""From transformers' Marian, the family of the OPUS-MT models."""

from transformers import MarianMTModel

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.conversion.weights import assembled, stack_weights
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)


def from_marian(model: MarianMTModel) -> VanillaTransformerForConditionalGeneration:
    """The same function of the same tokens, as a model of this package.

    Args:
        model: A Marian model with one vocabulary.

    Returns:
        A model with equal logits, in evaluation mode; its weights are copies.

    Raises:
        ValueError: If the model is outside this architecture; the message says in what.
    """
    theirs = model.config
    if not theirs.share_encoder_decoder_embeddings or not theirs.tie_word_embeddings:
        raise ValueError(
            "share_encoder_decoder_embeddings and tie_word_embeddings must be true: source, "
            "target and output share one matrix here, got a Marian model with several."
        )
    if not theirs.scale_embedding:
        raise ValueError(
            "scale_embedding must be true: section 3.4 multiplies by sqrt(d_model), got false."
        )
    config = VanillaTransformerConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.d_model,
        encoder_layers=theirs.encoder_layers,
        encoder_attention_heads=theirs.encoder_attention_heads,
        encoder_ffn_dim=theirs.encoder_ffn_dim,
        decoder_layers=theirs.decoder_layers,
        decoder_attention_heads=theirs.decoder_attention_heads,
        decoder_ffn_dim=theirs.decoder_ffn_dim,
        d_k=theirs.d_model // theirs.encoder_attention_heads,
        d_v=theirs.d_model // theirs.encoder_attention_heads,
        position_layout="halves",
        max_position_embeddings=theirs.max_position_embeddings,
        attention_bias=True,
        output_bias=True,
        activation_function=theirs.activation_function,
        dropout=theirs.dropout,
        attention_dropout=theirs.attention_dropout,
        activation_dropout=theirs.activation_dropout,
        pad_token_id=theirs.pad_token_id,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        decoder_start_token_id=theirs.decoder_start_token_id,
    )
    table = model.model.shared.weight
    weights = {
        **stack_weights(model, "encoder"),
        **stack_weights(model, "decoder"),
        "model.encoder.embed_tokens.weight": table,
        "model.decoder.embed_tokens.weight": table,
        "lm_head.weight": table,
        "lm_head.bias": model.final_logits_bias[0],
    }
    return assembled(config, weights)
