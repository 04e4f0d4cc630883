"""What every conversion does: build a model, give it weights under our names, set its search."""

from torch import Tensor, nn

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.generation_vanilla_transformer import set_paper_search
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)

# BART's names of a layer's parts, which Marian and FSMT share, and ours
BART_PARTS = {
    ".self_attn.": ".self_attention.",
    ".self_attn_layer_norm.": ".self_attention_norm.",
    ".encoder_attn.": ".cross_attention.",
    ".encoder_attn_layer_norm.": ".cross_attention_norm.",
    ".final_layer_norm.": ".feed_forward_norm.",
    ".fc1.": ".feed_forward.fc1.",
    ".fc2.": ".feed_forward.fc2.",
}


def renamed(weights: dict[str, Tensor], parts: dict[str, str]) -> dict[str, Tensor]:
    """Give the parts of a layer our names.

    Args:
        weights: Tensors by the other model's names.
        parts: Their piece of a name, and ours.

    Returns:
        The same tensors by our names.
    """
    ours = {}
    for name, tensor in weights.items():
        for theirs, our in parts.items():
            name = name.replace(theirs, our)
        ours[name] = tensor
    return ours


def stack_weights(model: nn.Module, stack: str) -> dict[str, Tensor]:
    """The layers of one stack of a BART-like model.

    Args:
        model: With `model.encoder.layers` and `model.decoder.layers`.
        stack: "encoder" or "decoder".

    Returns:
        Tensors by our names.
    """
    prefix = f"model.{stack}.layers."
    layers = {
        name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)
    }
    return renamed(layers, BART_PARTS)


def assembled(
    config: VanillaTransformerConfig, weights: dict[str, Tensor]
) -> VanillaTransformerForConditionalGeneration:
    """A model with these weights, in evaluation mode, that searches as the paper does.

    Args:
        config: Sizes of the model.
        weights: Every parameter, by our names.

    Returns:
        The model; its weights are copies.

    Raises:
        RuntimeError: If a parameter is missing, left over or of another shape.
    """
    model = VanillaTransformerForConditionalGeneration(config)
    model.load_state_dict(weights, strict=True)
    set_paper_search(model)
    return model.eval()
