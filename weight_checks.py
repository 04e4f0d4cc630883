"""Checks of weights that were read from a file: none is missing, truncated or of another shape."""

import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# errors of `torch.load` for a file that is truncated or of another format
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, struct.error)
# parts of weight names in other architectures, and the feature that each of these parts shows; the
# first match counts
FOREIGN_PARTS = {
    "adapter": "adapters",
    "lora_": "LoRA, which must be merged first",
    "layernorm_embedding": "a norm of the embeddings (BART and mBART)",
    "project_in_dim": "embeddings whose width differs from that of the layers",
    "project_out_dim": "embeddings whose width differs from that of the layers",
    "adaptive_softmax": "an adaptive softmax",
    "rotary": "rotary positions (RoPE)",
    "relative": "relative positions",
    "embed_positions": "learned positions",
    "expert": "a mixture of experts",
    "w_3": "a gated feed-forward (SwiGLU)",
    "gate_proj": "a gated feed-forward (SwiGLU)",
    "q_norm": "normalized queries and keys",
    "k_norm": "normalized queries and keys",
    "copy": "a copy mechanism",
    "rnn": "a recurrent network",
    "conv": "convolutions",
}


def check_fit(model: nn.Module, weights: dict[str, Tensor], origin: str):
    """Refuse weights of another architecture, and name that architecture if it is known.

    Args:
        model: Model that the weights are for.
        weights: Tensors by the names of `model`; a tensor without a counterpart in the model keeps
            its original name.
        origin: Model or folder that the weights come from, for the error.

    Raises:
        ValueError: If a weight is unknown, missing or of another shape; the message names the
            weight.
    """
    model_weights = model.state_dict()
    for name in sorted(weights.keys() - model_weights.keys()):
        features = (feature for part, feature in FOREIGN_PARTS.items() if part in name)
        feature = next(features, None)
        raise ValueError(
            f"the weights of {origin} must all have a parameter in the model, got {name}"
            + (f", which belongs to {feature}." if feature else ".")
        )
    for name in sorted(model_weights.keys() - weights.keys()):
        raise ValueError(f"the weights of {origin} must be complete, but {name} is missing.")
    for name, tensor in weights.items():
        if tensor.shape != model_weights[name].shape:
            raise ValueError(
                f"{name} must be of shape {list(model_weights[name].shape)}, got "
                f"{list(tensor.shape)} in {origin}."
            )


def check_stored(tensor: Any, name: str, path: str | Path) -> None:
    """Refuse a value that is not a plain tensor, or whose file has fewer elements than its shape.

    Args:
        tensor: Value that `torch.load` returned for the name.
        name: Name of the tensor, for the error.
        path: File, for the error.

    Raises:
        ValueError: If the value is not a plain tensor, or not all of its elements are in the file.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path} must hold a tensor for {name}, got a {type(tensor).__name__}.")
    is_plain = (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_nested or tensor.is_quantized)
    )
    if not is_plain:
        raise ValueError(
            f"{path} must hold a plain tensor for {name}, got another kind: a "
            f"{type(tensor).__name__} with layout {tensor.layout} on {tensor.device}."
        )
    num_stored = tensor.untyped_storage().nbytes() // tensor.element_size()
    if num_stored < tensor.numel():
        raise ValueError(
            f"{path} must hold all {tensor.numel():,} numbers of {name}, got {num_stored:,} that "
            f"are expanded to the shape {list(tensor.shape)}."
        )
