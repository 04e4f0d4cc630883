"""Convert torch's nn.Transformer, which has no embeddings and adds a norm after each stack."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .check import check_decoder_states, refuse_modified_source
from .weights import build_model, check_class, rename_weights, split_projections

# nn.Transformer numbers the norms of a layer by sub-layer, so `norm2` has another meaning in the
# decoder
ENCODER_RENAMES = {
    ".self_attn.": ".self_attention.",
    ".linear1.": ".feed_forward.fc1.",
    ".linear2.": ".feed_forward.fc2.",
    ".norm1.": ".self_attention_norm.",
    ".norm2.": ".feed_forward_norm.",
}
DECODER_RENAMES = {
    **ENCODER_RENAMES,
    ".multihead_attn.": ".cross_attention.",
    ".norm2.": ".cross_attention_norm.",
    ".norm3.": ".feed_forward_norm.",
}


def from_torch(
    module: nn.Transformer, embedding: Tensor, **fields
) -> VanillaTransformerForConditionalGeneration:
    """Convert the stacks of an nn.Transformer to a model of this package with tied embeddings.

    Args:
        module: Pre-norm stacks, or post-norm stacks without a final norm
            (`module.encoder.norm = module.decoder.norm = None`).
        embedding: Embedding matrix, not multiplied by sqrt(d_model), [V, d_model].
        fields: Further fields of the configuration, such as the ids of special tokens.

    Returns:
        The model in evaluation mode; its weights are copies.

    Raises:
        TypeError: If `module` or `embedding` is of another class.
        ValueError: If the stacks are outside this architecture, do not run torch's own code, or
            compute other decoder states than the result; the message names the reason.
    """
    check_class("module", module, nn.Transformer)
    check_class("embedding", embedding, Tensor)
    check_class("module.encoder", module.encoder, nn.TransformerEncoder)
    check_class("module.decoder", module.decoder, nn.TransformerDecoder)
    for stack in (module.encoder, module.decoder):
        refuse_modified_source(stack, "torch's nn.Transformer")
    config = VanillaTransformerConfig(
        vocab_size=embedding.shape[0], **_read_fields(module), **fields
    )
    weights = {
        "model.encoder.embed_tokens.weight": embedding,
        "model.decoder.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
    }
    for stack, renames in (("encoder", ENCODER_RENAMES), ("decoder", DECODER_RENAMES)):
        torch_weights = getattr(module, stack).state_dict(prefix=f"model.{stack}.")
        weights |= split_projections(rename_weights(torch_weights, renames))
    return check_decoder_states(module, build_model(config, weights, "torch's nn.Transformer"))


def _read_fields(module: nn.Transformer) -> dict[str, Any]:
    """Return the fields of the configuration that describe the stacks; refuse other stacks."""
    encoder_layers, decoder_layers = module.encoder.layers, module.decoder.layers
    if not len(encoder_layers) or not len(decoder_layers):
        raise ValueError(
            f"encoder and decoder must have layers, got {len(encoder_layers)} and "
            f"{len(decoder_layers)} of them."
        )
    layers = [*encoder_layers, *decoder_layers]
    if any(layer.linear1.bias is None for layer in layers):
        raise ValueError("bias must be true: equation (2) has biases, got false.")
    norm_first = _shared_value("norm_first", (layer.norm_first for layer in layers))
    submodules = [submodule for layer in layers for submodule in layer.children()]
    attentions = [
        submodule for submodule in submodules if isinstance(submodule, nn.MultiheadAttention)
    ]
    num_heads = _shared_value("nhead", (attention.num_heads for attention in attentions))
    feed_forward_dropouts = [layer.dropout for layer in layers]
    residual_dropouts = [
        submodule
        for submodule in submodules
        if isinstance(submodule, nn.Dropout) and submodule not in feed_forward_dropouts
    ]
    norms = [submodule for submodule in module.modules() if isinstance(submodule, nn.LayerNorm)]
    _check_final_norms(module, norm_first)
    return {
        "hidden_size": module.d_model,
        "encoder_layers": len(encoder_layers),
        "encoder_attention_heads": num_heads,
        "encoder_ffn_dim": _shared_value(
            "dim_feedforward", (layer.linear1.out_features for layer in encoder_layers)
        ),
        "decoder_layers": len(decoder_layers),
        "decoder_attention_heads": num_heads,
        "decoder_ffn_dim": _shared_value(
            "dim_feedforward", (layer.linear1.out_features for layer in decoder_layers)
        ),
        "norm_first": norm_first,
        "attention_bias": True,
        "activation_function": _shared_value(
            "activation", (_activation_name(layer.activation) for layer in layers)
        ),
        "dropout": _shared_value("dropout", (dropout.p for dropout in residual_dropouts)),
        "attention_dropout": _shared_value(
            "dropout of attention", (attention.dropout for attention in attentions)
        ),
        "activation_dropout": _shared_value(
            "dropout of linear1", (dropout.p for dropout in feed_forward_dropouts)
        ),
        "layer_norm_eps": _shared_value("layer_norm_eps", (norm.eps for norm in norms)),
    }


def _check_final_norms(module: nn.Transformer, norm_first: bool):
    """Refuse post-norm stacks with a final norm, and pre-norm stacks without one."""
    for stack in ("encoder", "decoder"):
        has_norm = getattr(module, stack).norm is not None
        if has_norm and not norm_first:
            raise ValueError(
                f"{stack}.norm must be None if norm_first is False, got one: the paper's stacks "
                "end with the norm of their last layer, and torch adds one more unless it is "
                "removed before training."
            )
        if norm_first and not has_norm:
            raise ValueError(
                f"{stack}.norm must be given if norm_first is True, got None: pre-norm stacks "
                "of this package end with a norm."
            )


def _shared_value(name: str, values: Iterable[Any]) -> Any:
    distinct_values = list(dict.fromkeys(values))
    if len(distinct_values) > 1:
        raise ValueError(
            f"{name} must be the same in all layers of a model, got "
            f"{', '.join(map(str, distinct_values))}."
        )
    return distinct_values[0]


def _activation_name(activation: Callable | nn.Module) -> str:
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        return "gelu_pytorch_tanh"
    names = {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", nn.ReLU: "relu", nn.GELU: "gelu"}
    name = names.get(activation) or names.get(type(activation))
    if name is None:
        raise ValueError(f"activation must be ReLU or GELU, got {activation}.")
    return name
