"""Convert M2M100 models and dense NLLB models of transformers."""

from transformers import M2M100ForConditionalGeneration

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .check import check_logits, refuse_modified_source
from .weights import bart_fields, build_model, check_class, layer_weights


def from_m2m100(
    model: M2M100ForConditionalGeneration, copy: bool = True
) -> VanillaTransformerForConditionalGeneration:
    """Convert an M2M100 or NLLB model to this package; the same ids give the same logits.

    Args:
        model: M2M100 model. Dense NLLB models, without a mixture of experts, have the same class.
        copy: Whether to copy all weights. If False, both models share the weights that are already
            in float32 on the CPU.

    Returns:
        The model in evaluation mode, in float32.

    Raises:
        TypeError: If the model is of another class.
        ValueError: If the model is outside this architecture, does not run the library's own code,
            or its logits differ from those of the result; the message names the reason.
    """
    check_class("model", model, M2M100ForConditionalGeneration)
    refuse_modified_source(model, "transformers' M2M100ForConditionalGeneration")
    m2m100_config = model.config
    d_model = m2m100_config.d_model
    if not m2m100_config.tie_word_embeddings:
        raise ValueError(
            "tie_word_embeddings must be true: source, target and output share one matrix here, "
            "got an M2M100 model with several."
        )
    config = VanillaTransformerConfig(
        **bart_fields(m2m100_config),
        vocab_size=m2m100_config.vocab_size,
        norm_first=True,
        # M2M100 has FSMT's sinusoids and first position, which `from_fsmt` explains
        position_base=10000.0 ** (d_model / (d_model - 2)),
        position_offset=m2m100_config.pad_token_id + 1,
    )
    embeddings = model.model.shared.weight
    weights = {
        **layer_weights(model, "encoder"),
        **layer_weights(model, "decoder"),
        "model.encoder.embed_tokens.weight": embeddings,
        "model.decoder.embed_tokens.weight": embeddings,
        "lm_head.weight": embeddings,
    }
    for name in ("encoder", "decoder"):
        norm = model.get_submodule(f"model.{name}.layer_norm")
        weights[f"model.{name}.norm.weight"] = norm.weight
        weights[f"model.{name}.norm.bias"] = norm.bias
    converted = build_model(config, weights, "an M2M100 model", copy, model.generation_config)
    return check_logits(model, converted)
