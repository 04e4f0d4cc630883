"""From transformers' Marian, the family of the OPUS-MT models."""

from transformers import MarianMTModel

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.conversion.weights import assembled, bart_fields, stack_weights
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
    config = VanillaTransformerConfig(
        **bart_fields(theirs), vocab_size=theirs.vocab_size, output_bias=True
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
    ours = assembled(config, weights, "a Marian model")
    # its padding token starts the decoder and was never trained as an output
    ours.generation_config.bad_words_ids = model.generation_config.bad_words_ids
    return ours
