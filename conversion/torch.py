"""Convert torch's nn.Transformer, which has no embeddings and adds a norm after each stack."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .check import check_decoder_states, refuse_modified_source
from .weights import build_model, check_kind, rename_weights, split_projections

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
    check_kind("module", module, nn.Transformer)
    check_kind("embedding", embedding, Tensor)
    check_kind("module.encoder", module.encoder, nn.TransformerEncoder)
    check_kind("module.decoder", module.decoder, nn.TransformerDecoder)
    for stack in (module.encoder, module.decoder):
        refuse_modified_source(stack, "torch's nn.Transformer")
    encoder, decoder = module.encoder.layers, module.decoder.layers
    if not len(encoder) or not len(decoder):
        raise ValueError(
            f"encoder and decoder must have layers, got {len(encoder)} and {len(decoder)} of them."
        )
    layers = [*encoder, *decoder]
    if any(layer.linear1.bias is None for layer in layers):
        raise ValueError("bias must be true: equation (2) has biases, got false.")
    norm_first = _same("norm_first", (layer.norm_first for layer in layers))
    submodules = [submodule for layer in layers for submodule in layer.children()]
    attentions = [it for it in submodules if isinstance(it, nn.MultiheadAttention)]
    num_heads = _same("nhead", (attention.num_heads for attention in attentions))
    feed_forward_dropouts = [layer.dropout for layer in layers]
    residual_dropouts = [
        it for it in submodules if isinstance(it, nn.Dropout) and it not in feed_forward_dropouts
    ]
    norms = [it for it in module.modules() if isinstance(it, nn.LayerNorm)]
    for stack in ("encoder", "decoder"):
        has_norm = getattr(module, stack).norm is not None
        if has_norm != norm_first:
            raise ValueError(
                f"{stack}.norm must be {'given' if norm_first else 'None'} where norm_first is "
                f"{norm_first}, got {'one' if has_norm else 'None'}: the paper's stacks end with "
                "the norm of their last layer, and torch adds one more unless it is removed "
                "before training."
            )
    config = VanillaTransformerConfig(
        vocab_size=embedding.shape[0],
        hidden_size=module.d_model,
        encoder_layers=len(encoder),
        encoder_attention_heads=num_heads,
        encoder_ffn_dim=_same("dim_feedforward", (x.linear1.out_features for x in encoder)),
        decoder_layers=len(decoder),
        decoder_attention_heads=num_heads,
        decoder_ffn_dim=_same("dim_feedforward", (x.linear1.out_features for x in decoder)),
        norm_first=norm_first,
        attention_bias=True,
        activation_function=_same("activation", (_activation(x.activation) for x in layers)),
        dropout=_same("dropout", (it.p for it in residual_dropouts)),
        attention_dropout=_same("dropout of attention", (it.dropout for it in attentions)),
        activation_dropout=_same("dropout of linear1", (it.p for it in feed_forward_dropouts)),
        layer_norm_eps=_same("layer_norm_eps", (norm.eps for norm in norms)),
        **fields,
    )
    weights = {
        "model.encoder.embed_tokens.weight": embedding,
        "model.decoder.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
    }
    for stack, names in (("encoder", ENCODER_RENAMES), ("decoder", DECODER_RENAMES)):
        theirs = getattr(module, stack).state_dict(prefix=f"model.{stack}.")
        weights |= split_projections(rename_weights(theirs, names))
    return check_decoder_states(module, build_model(config, weights, "torch's nn.Transformer"))


def _same(name: str, values: Iterable[Any]) -> Any:
    found = list(dict.fromkeys(values))
    if len(found) > 1:
        raise ValueError(
            f"{name} must be the same in all layers of a model, got {', '.join(map(str, found))}."
        )
    return found[0]


def _activation(activation: Callable | nn.Module) -> str:
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        return "gelu_pytorch_tanh"
    names = {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", nn.ReLU: "relu", nn.GELU: "gelu"}
    name = names.get(activation) or names.get(type(activation))
    if name is None:
        raise ValueError(f"activation must be ReLU or GELU, got {activation}.")
    return name
