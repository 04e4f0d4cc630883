"""Convert checkpoints of OpenNMT-py's Transformer, which is pre-norm."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .toolkit_files import NAMED_TOKENS, read_checkpoint, settings_of, token_tokenizer
from .weights import Converted, build_model, number_of_layers, rename_weights, required_entry

# description of the weights in error messages
WEIGHTS_ORIGIN = "the weights of OpenNMT-py's Transformer"
# names of the embedding tables, and of the sinusoids that OpenNMT-py stores with them
EMBEDDING_NAMES = re.compile(r"\.make_embedding\.(emb_luts\.0\.weight|pe\.pe)$")
# pieces of OpenNMT-py's weight names and our pieces; replaced in this order
RENAMES = {
    "encoder.transformer.": "encoder.layers.",
    "decoder.transformer_layers.": "decoder.layers.",
    "coder.layer_norm.": "coder.norm.",
    ".feed_forward.layer_norm.": ".feed_forward_norm.",
    ".feed_forward.w_1.": ".feed_forward.fc1.",
    ".feed_forward.w_2.": ".feed_forward.fc2.",
    ".self_attn.": ".self_attention.",
    ".context_attn.": ".cross_attention.",
    ".layer_norm.": ".self_attention_norm.",
    ".layer_norm_1.": ".self_attention_norm.",
    ".layer_norm_2.": ".cross_attention_norm.",
    ".linear_query.": ".q_proj.",
    ".linear_keys.": ".k_proj.",
    ".linear_values.": ".v_proj.",
    ".final_linear.": ".out_proj.",
}
# the only supported value of each setting, and the meaning of any other value
EXPECTED_SETTINGS = {
    "encoder_type": ("transformer", "another encoder"),
    "decoder_type": ("transformer", "another decoder"),
    "position_encoding": (True, "embeddings without positions, which are not scaled"),
    "relative_positions_buckets": (0, "relative positions, as in T5"),
    "layer_norm": ("standard", "RMSNorm"),
    "num_kv": (0, "keys and values shared by heads"),
    "multiquery": (False, "keys and values shared by heads"),
    "num_experts": (0, "a mixture of experts"),
    "parallel_residual": (False, "attention and feed-forward side by side"),
    "sliding_window": (0, "sliding-window attention"),
    "copy_attn": (False, "a copy mechanism"),
    "generator_function": ("softmax", "other probabilities"),
    "lora_layers": ([], "LoRA, which must be merged first"),
    "lora_embedding": (False, "LoRA, which must be merged first"),
    "n_src_feats": (0, "word features"),
}
# meanings of special values of `max_relative_positions`
RELATIVE_POSITIONS = {-1: "rotary positions (RoPE)", -2: "positions as biases (ALiBi)"}
GATED_ACTIVATIONS = {
    "silu": "a gated feed-forward (SwiGLU)",
    "gated-gelu": "a gated feed-forward (GEGLU)",
}
POSITION_LAYOUTS = {"SinusoidalInterleaved": "interleaved", "SinusoidalConcat": "halves"}


def from_opennmt(checkpoint: str | Path) -> VanillaTransformerForConditionalGeneration:
    """Convert a checkpoint of OpenNMT-py to this package; the same ids give the same logits.

    Args:
        checkpoint: Checkpoint file of OpenNMT-py 3, or of OpenNMT-py 2 if its vocabulary is stored
            as lists of plain tokens.

    Returns:
        The model in evaluation mode, in float32 on the CPU.

    Raises:
        ValueError: If the model is outside this architecture; the message names the reason.
        OSError: If the file cannot be read.
    """
    return _convert(read_checkpoint(checkpoint))


def opennmt_with_tokenizer(checkpoint: str | Path) -> Converted:
    """Convert a checkpoint, and build a tokenizer with its vocabulary.

    Args:
        checkpoint: Checkpoint file of OpenNMT-py, as for `from_opennmt`.

    Returns:
        The model, a tokenizer for tokenized text, the input of OpenNMT-py's own commands, and one
        sentence about the tokenizer.

    Raises:
        ValueError: If the model is outside this architecture, or source and target have separate
            vocabularies.
        OSError: If the file cannot be read.
    """
    content = read_checkpoint(checkpoint)
    model, tokens = _convert(content), _vocabulary(content)
    # adds_eos=False, because OpenNMT-py adds no end token to a source
    tokenizer = token_tokenizer(tokens, NAMED_TOKENS | {"pad_token": "<blank>"}, adds_eos=False)
    return (
        model,
        tokenizer,
        "The tokenizer reads and writes tokens separated by spaces: the checkpoint has the "
        "vocabulary, but not the BPE codes or the SentencePiece model that split text into tokens.",
    )


def _convert(content: dict[str, Any]) -> VanillaTransformerForConditionalGeneration:
    settings, tokens = _settings(content), _vocabulary(content)
    weights = content["model"]
    source_embeddings, target_embeddings = (
        required_entry(
            weights, f"{stack}.embeddings.make_embedding.emb_luts.0.weight", WEIGHTS_ORIGIN
        )
        for stack in ("encoder", "decoder")
    )
    # OpenNMT-py 2 stores an nn.Sequential, so the names of the linear layer begin with "0."
    generator = {name.removeprefix("0."): tensor for name, tensor in content["generator"].items()}
    output_weight = required_entry(generator, "weight", "the generator of OpenNMT-py's Transformer")
    embeddings_are_equal = torch.equal(source_embeddings, target_embeddings)
    is_tied = embeddings_are_equal and torch.equal(target_embeddings, output_weight)
    config = VanillaTransformerConfig(
        **_fields(settings, weights),
        **_token_ids(tokens, content["vocab"]),
        vocab_size=len(tokens),
        tie_word_embeddings=is_tied,
        output_bias="bias" in generator,
    )
    stack_weights = {
        f"model.{name}": tensor
        for name, tensor in weights.items()
        if not EMBEDDING_NAMES.search(name)
    }
    our_weights = _with_biases(rename_weights(stack_weights, RENAMES))
    our_weights |= {
        "model.encoder.embed_tokens.weight": source_embeddings,
        "model.decoder.embed_tokens.weight": target_embeddings,
        **{f"lm_head.{name}": tensor for name, tensor in generator.items()},
    }
    return build_model(config, our_weights, "an OpenNMT-py model")


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    settings = settings_of(content.get("opt"))
    if settings is None or not isinstance(content.get("generator"), dict):
        raise ValueError(_wrong_toolkit_message(content))
    for name, (expected_value, meaning) in EXPECTED_SETTINGS.items():
        if settings.get(name, expected_value) != expected_value:
            raise ValueError(
                f"{name} must be {expected_value}, got {settings[name]}: that is {meaning}, "
                "outside this architecture."
            )
    max_relative_positions = settings.get("max_relative_positions", 0)
    if max_relative_positions:
        meaning = RELATIVE_POSITIONS.get(max_relative_positions, "relative positions")
        raise ValueError(
            f"max_relative_positions must be 0, got {max_relative_positions}: that is {meaning}, "
            "outside this architecture."
        )
    activation = settings.get("pos_ffn_activation_fn", "relu")
    if activation in GATED_ACTIVATIONS:
        raise ValueError(
            f"pos_ffn_activation_fn must be relu or gelu, got {activation}: that is "
            f"{GATED_ACTIVATIONS[activation]}, outside this architecture."
        )
    return settings


def _wrong_toolkit_message(content: dict[str, Any]) -> str:
    return (
        "the checkpoint must be OpenNMT-py's, with model, generator, vocab and opt, got "
        f"{', '.join(content)}."
    )


def _vocabulary(content: dict[str, Any]) -> list[str]:
    if not isinstance(content.get("vocab"), dict):
        raise ValueError(_wrong_toolkit_message(content))
    source_tokens, target_tokens = (content["vocab"].get(side) for side in ("src", "tgt"))
    if not isinstance(source_tokens, list) or not isinstance(target_tokens, list):
        raise ValueError(
            "vocab must be lists of plain tokens, src and tgt, as OpenNMT-py 3 saves them, got "
            f"{type(source_tokens).__name__} and {type(target_tokens).__name__}."
        )
    if source_tokens != target_tokens:
        raise ValueError(
            "source and target must share one vocabulary (-share_vocab), got separate "
            f"vocabularies of {len(source_tokens)} and {len(target_tokens)} tokens."
        )
    return target_tokens


def _token_ids(tokens: list[str], vocabulary: dict[str, Any]) -> dict[str, int]:
    special_tokens = {
        "pad_token_id": "<blank>",
        "bos_token_id": "<s>",
        "eos_token_id": "</s>",
        "decoder_start_token_id": vocabulary.get("decoder_start_token", "<s>"),
    }
    for token in special_tokens.values():
        if token not in tokens:
            raise ValueError(f"vocab must hold the special token {token}, got none.")
    return {field: tokens.index(token) for field, token in special_tokens.items()}


def _fields(settings: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    d_model = required_entry(weights, "encoder.layer_norm.weight", WEIGHTS_ORIGIN).shape[0]
    encoding_type = settings.get("position_encoding_type", "SinusoidalInterleaved")
    if encoding_type not in POSITION_LAYOUTS:
        raise ValueError(
            f"position_encoding_type must be one of {', '.join(POSITION_LAYOUTS)}, got "
            f"{encoding_type}."
        )
    layout = POSITION_LAYOUTS[encoding_type]
    # SinusoidalConcat has fairseq's wavelengths, 2 pi 10000^(2i / (d_model - 2))
    base = 10000.0 if layout == "interleaved" else 10000.0 ** (d_model / (d_model - 2))
    layer_prefixes = {
        "encoder": "encoder.transformer.",
        "decoder": "decoder.transformer_layers.",
    }
    stack_fields = {}
    for stack, prefix in layer_prefixes.items():
        stack_fields[f"{stack}_layers"] = number_of_layers(weights, prefix)
        fc1_weight = required_entry(weights, f"{prefix}0.feed_forward.w_1.weight", WEIGHTS_ORIGIN)
        stack_fields[f"{stack}_ffn_dim"] = fc1_weight.shape[0]
        num_heads = required_entry(settings, "heads", "the settings of OpenNMT-py's Transformer")
        stack_fields[f"{stack}_attention_heads"] = num_heads
    return {
        **stack_fields,
        "hidden_size": d_model,
        "position_layout": layout,
        "position_base": base,
        "norm_first": True,
        "attention_bias": "encoder.transformer.0.self_attn.linear_query.bias" in weights,
        "activation_function": settings.get("pos_ffn_activation_fn", "relu"),
        "dropout": _first_dropout(settings.get("dropout", 0.1)),
        "attention_dropout": _first_dropout(settings.get("attention_dropout", 0.0)),
        "activation_dropout": _first_dropout(settings.get("dropout", 0.1)),
        "layer_norm_eps": settings.get("norm_eps", 1e-6),
    }


def _first_dropout(dropout: float | list[float]) -> float:
    """Return the first dropout of a list: OpenNMT-py can change the dropout during training."""
    return dropout[0] if isinstance(dropout, list) else dropout


def _with_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add zero biases for equation (2) if the checkpoint has no biases."""
    zero_biases = {
        name.replace("weight", "bias"): tensor.new_zeros(tensor.shape[0])
        for name, tensor in weights.items()
        if name.endswith(("fc1.weight", "fc2.weight"))
    }
    return zero_biases | weights
