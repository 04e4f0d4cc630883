"""From torch's own nn.Transformer, which has no embeddings and adds a norm after each stack."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.conversion.weights import assembled, renamed, split_projections
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)

# nn.Transformer numbers a layer's norms in the order of its sub-layers
ENCODER_PARTS = {
    ".self_attn.": ".self_attention.",
    ".linear1.": ".feed_forward.fc1.",
    ".linear2.": ".feed_forward.fc2.",
    ".norm1.": ".self_attention_norm.",
    ".norm2.": ".feed_forward_norm.",
}
DECODER_PARTS = {
    **ENCODER_PARTS,
    ".multihead_attn.": ".cross_attention.",
    ".norm2.": ".cross_attention_norm.",
    ".norm3.": ".feed_forward_norm.",
}


def from_torch(
    module: nn.Transformer, embedding: Tensor, **fields
) -> VanillaTransformerForConditionalGeneration:
    """The same stacks between tied embeddings, as a model of this package.

    Args:
        module: Stacks that normalize first, or after the addition without a final norm
            (`module.encoder.norm = module.decoder.norm = None`).
        embedding: The embedding matrix, before scaling, [V, d_model].
        fields: Further fields of the configuration, the special tokens' ids for some.

    Returns:
        A model in evaluation mode; its weights are copies.

    Raises:
        ValueError: If the stacks are outside this architecture; the message says in what.
    """
    encoder_layer, decoder_layer = module.encoder.layers[0], module.decoder.layers[0]
    norm_first = encoder_layer.norm_first
    if encoder_layer.linear1.bias is None:
        raise ValueError("bias must be true: equation (2) has biases, got false.")
    for stack in ("encoder", "decoder"):
        has_norm = getattr(module, stack).norm is not None
        if has_norm != norm_first:
            raise ValueError(
                f"{stack}.norm must be {'given' if norm_first else 'None'} where norm_first is "
                f"{norm_first}, got {'one' if has_norm else 'None'}."
            )
    config = VanillaTransformerConfig(
        vocab_size=embedding.shape[0],
        hidden_size=module.d_model,
        encoder_layers=len(module.encoder.layers),
        encoder_attention_heads=module.nhead,
        encoder_ffn_dim=encoder_layer.linear1.out_features,
        decoder_layers=len(module.decoder.layers),
        decoder_attention_heads=module.nhead,
        decoder_ffn_dim=decoder_layer.linear1.out_features,
        norm_first=norm_first,
        attention_bias=True,
        activation_function=_activation(encoder_layer.activation),
        dropout=encoder_layer.dropout1.p,
        attention_dropout=encoder_layer.self_attn.dropout,
        activation_dropout=encoder_layer.dropout.p,
        layer_norm_eps=encoder_layer.norm1.eps,
        **fields,
    )
    weights = {
        "model.encoder.embed_tokens.weight": embedding,
        "model.decoder.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
    }
    for stack, parts in (("encoder", ENCODER_PARTS), ("decoder", DECODER_PARTS)):
        theirs = getattr(module, stack).state_dict(prefix=f"model.{stack}.")
        weights |= split_projections(renamed(theirs, parts))
    return assembled(config, weights, "torch's nn.Transformer")


def _activation(activation: Callable | nn.Module) -> str:
    names = {F.relu: "relu", F.gelu: "gelu", nn.ReLU: "relu", nn.GELU: "gelu"}
    name = names.get(activation) or names.get(type(activation))
    if name is None:
        raise ValueError(f"activation must be ReLU or GELU, got {activation}.")
    return name
