"""What every conversion does: build a model, give it weights under our names, set its search."""

from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..configuration_vanilla_transformer import (
    LAYER_FIELDS,
    TOKEN_ID_FIELDS,
    VanillaTransformerConfig,
)
from ..generation_vanilla_transformer import set_paper_search
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..sizes import FLOAT32_BYTES, num_weights, refuse_beyond_memory, refuse_impossible
from ..weight_checks import check_fit

Value = TypeVar("Value")
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

# fields that have one name and meaning in our configuration and in those of Marian and FSMT
SAME_FIELDS = (
    *LAYER_FIELDS,
    "max_position_embeddings",
    "activation_function",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    *TOKEN_ID_FIELDS,
)


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


def bart_fields(theirs: PreTrainedConfig) -> dict[str, Any]:
    """The fields of our configuration that Marian and FSMT have alike.

    Args:
        theirs: The other model's configuration.

    Returns:
        Our fields, without those of the vocabulary.

    Raises:
        ValueError: If the embeddings are not scaled, or the stacks have heads of two widths.
    """
    if not theirs.scale_embedding:
        raise ValueError(
            "scale_embedding must be true: section 3.4 multiplies by sqrt(d_model), got false."
        )
    heads = theirs.encoder_attention_heads, theirs.decoder_attention_heads
    if heads[0] != heads[1]:
        raise ValueError(
            "encoder_attention_heads and decoder_attention_heads must be equal, for heads of one "
            f"width, got {heads[0]} and {heads[1]}."
        )
    return {name: getattr(theirs, name) for name in SAME_FIELDS} | {
        "hidden_size": theirs.d_model,
        "position_layout": "halves",
        "attention_bias": True,
    }


def split_projections(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take queries, keys and values out of the one matrix [3 d_model, d_model] they are kept in.

    Args:
        weights: Tensors by name, some of them `in_proj_weight` or `in_proj_bias`.

    Returns:
        The same with three tensors in the place of each of these.
    """
    split = {}
    for name, tensor in weights.items():
        if "in_proj_" not in name:
            split[name] = tensor
            continue
        attention, kind = name.split("in_proj_")
        for projection, part in zip("qkv", tensor.chunk(3), strict=True):
            split[f"{attention}{projection}_proj.{kind}"] = part
    return split


def number_of_layers(weights: dict[str, Tensor], prefix: str) -> int:
    """How many layers a stack has.

    Args:
        weights: Tensors by the other model's names.
        prefix: What stands before the number of a layer.

    Returns:
        The number of numbers.
    """
    return len({name[len(prefix) :].split(".")[0] for name in weights if name.startswith(prefix)})


def needed(entries: dict[str, Value], name: str, origin: str) -> Value:
    """A weight, or a setting, that every model of a kind has.

    Args:
        entries: Weights or settings by the other model's names.
        name: Which.
        origin: What they all are, for the error.

    Returns:
        The weight or setting.

    Raises:
        ValueError: If there is none.
    """
    if name not in entries:
        raise ValueError(f"{origin} must be complete, got none for {name}.")
    return entries[name]


def check_kind(name: str, value: Any, kind: type):
    """Refuse what is no source of a conversion.

    Args:
        name: Of the argument, for the error.
        value: What was given.
        kind: What it must be.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got a {type(value).__name__}.")


def assembled(
    config: VanillaTransformerConfig, weights: dict[str, Tensor], origin: str
) -> VanillaTransformerForConditionalGeneration:
    """A model with these weights, in evaluation mode, that searches as the paper does.

    Args:
        config: Sizes of the model.
        weights: Every parameter, by our names.
        origin: What the weights are of, for an error.

    Returns:
        The model; its weights are copies.

    Raises:
        ValueError: If a parameter is missing, left over or of another shape, or the model is too
            large for this machine.
    """
    refuse_impossible(config, origin)
    refuse_beyond_memory(FLOAT32_BYTES * num_weights(config), origin)
    model = VanillaTransformerForConditionalGeneration(config)
    check_fit(model, weights, origin)
    model.load_state_dict(weights, strict=True)
    set_paper_search(model)
    return model.eval()
