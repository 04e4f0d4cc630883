"""Convert checkpoints of OpenNMT-py's Transformer, which is pre-norm."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .toolkit_files import read_checkpoint, settings_of, token_tokenizer
from .weights import build_model, number_of_layers, rename_weights, required_entry

# description of the weights in error messages
WEIGHTS = "the weights of OpenNMT-py's Transformer"
# names of the embedding tables, and of the sinusoids that OpenNMT-py stores with them
EMBEDDING = re.compile(r"\.make_embedding\.(emb_luts\.0\.weight|pe\.pe)$")
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
    "lora_layers": ([], "LoRA, which must be merged first"),
    "lora_embedding": (False, "LoRA, which must be merged first"),
    "n_src_feats": (0, "word features"),
}
# meanings of special values of `max_relative_positions`
RELATIVE_POSITIONS = {-1: "rotary positions (RoPE)", -2: "positions as biases (ALiBi)"}
GATED = {"silu": "a gated feed-forward (SwiGLU)", "gated-gelu": "a gated feed-forward (GEGLU)"}
POSITIONS = {"SinusoidalInterleaved": "interleaved", "SinusoidalConcat": "halves"}


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
    content = read_checkpoint(checkpoint)
    settings, tokens = _settings(content), _vocabulary(content)
    weights = content["model"]
    source_table, target_table = (
        required_entry(weights, f"{stack}.embeddings.make_embedding.emb_luts.0.weight", WEIGHTS)
        for stack in ("encoder", "decoder")
    )
    # OpenNMT-py 2 stores an nn.Sequential, so the names of the linear layer begin with "0."
    generator = {name.removeprefix("0."): one for name, one in content["generator"].items()}
    output_table = required_entry(generator, "weight", "the generator of OpenNMT-py's Transformer")
    tied = torch.equal(source_table, target_table) and torch.equal(target_table, output_table)
    config = VanillaTransformerConfig(
        **_fields(settings, weights),
        **_token_ids(tokens, content["vocab"]),
        vocab_size=len(tokens),
        tie_word_embeddings=tied,
        output_bias="bias" in generator,
    )
    layers = {
        f"model.{name}": tensor for name, tensor in weights.items() if not EMBEDDING.search(name)
    }
    ours = _with_biases(rename_weights(layers, RENAMES))
    ours |= {
        "model.encoder.embed_tokens.weight": source_table,
        "model.decoder.embed_tokens.weight": target_table,
        **{f"lm_head.{name}": tensor for name, tensor in generator.items()},
    }
    return build_model(config, ours, "an OpenNMT-py model")


def opennmt_tokenizer(checkpoint: str | Path) -> tuple[PreTrainedTokenizerBase, str]:
    """Build a tokenizer with the vocabulary of a checkpoint.

    Args:
        checkpoint: Checkpoint file of OpenNMT-py.

    Returns:
        A tokenizer for tokenized text, the input of OpenNMT-py's own commands, and one sentence
        about the tokenizer.

    Raises:
        ValueError: If the checkpoint is of another toolkit, or source and target have separate
            vocabularies.
        OSError: If the file cannot be read.
    """
    tokens = _vocabulary(read_checkpoint(checkpoint))
    # ends=False, because OpenNMT-py adds no end token to a source
    tokenizer = token_tokenizer(tokens, "<blank>", "<s>", "</s>", "<unk>", ends=False)
    return tokenizer, (
        "The tokenizer reads and writes tokens with spaces between: the checkpoint has the "
        "vocabulary, but not the BPE codes or the SentencePiece model that split text into tokens."
    )


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    settings = settings_of(content.get("opt"))
    if settings is None or not isinstance(content.get("generator"), dict):
        raise ValueError(_expected(content))
    for name, (expected, meaning) in EXPECTED_SETTINGS.items():
        if settings.get(name, expected) != expected:
            raise ValueError(
                f"{name} must be {expected}, got {settings[name]}: that is {meaning}, outside "
                "this architecture."
            )
    relative = settings.get("max_relative_positions", 0)
    if relative:
        meaning = RELATIVE_POSITIONS.get(relative, "relative positions")
        raise ValueError(
            f"max_relative_positions must be 0, got {relative}: that is {meaning}, outside this "
            "architecture."
        )
    activation = settings.get("pos_ffn_activation_fn", "relu")
    if activation in GATED:
        raise ValueError(
            f"pos_ffn_activation_fn must be relu or gelu, got {activation}: that is "
            f"{GATED[activation]}, outside this architecture."
        )
    return settings


def _expected(content: dict[str, Any]) -> str:
    return (
        "the checkpoint must be OpenNMT-py's, with model, generator, vocab and opt, got "
        f"{', '.join(content)}."
    )


def _vocabulary(content: dict[str, Any]) -> list[str]:
    if not isinstance(content.get("vocab"), dict):
        raise ValueError(_expected(content))
    source, target = (content["vocab"].get(side) for side in ("src", "tgt"))
    if not isinstance(source, list) or not isinstance(target, list):
        raise ValueError(
            "vocab must be lists of plain tokens, src and tgt, as OpenNMT-py 3 saves them, got "
            f"{type(source).__name__} and {type(target).__name__}."
        )
    if source != target:
        raise ValueError(
            "source and target must share one vocabulary (-share_vocab), got separate "
            f"vocabularies of {len(source)} and {len(target)} tokens."
        )
    return target


def _token_ids(tokens: list[str], vocabulary: dict[str, Any]) -> dict[str, int]:
    names = {
        "pad_token_id": "<blank>",
        "bos_token_id": "<s>",
        "eos_token_id": "</s>",
        "decoder_start_token_id": vocabulary.get("decoder_start_token", "<s>"),
    }
    for token in names.values():
        if token not in tokens:
            raise ValueError(f"vocab must hold the special token {token}, got none.")
    return {field: tokens.index(token) for field, token in names.items()}


def _fields(settings: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    width = required_entry(weights, "encoder.layer_norm.weight", WEIGHTS).shape[0]
    kind = settings.get("position_encoding_type", "SinusoidalInterleaved")
    if kind not in POSITIONS:
        raise ValueError(
            f"position_encoding_type must be one of {', '.join(POSITIONS)}, got {kind}."
        )
    layout = POSITIONS[kind]
    # SinusoidalConcat has fairseq's wavelengths, 2 pi 10000^(2i / (d_model - 2))
    base = 10000.0 if layout == "interleaved" else 10000.0 ** (width / (width - 2))
    names = {"encoder": "encoder.transformer.", "decoder": "decoder.transformer_layers."}
    sizes = {}
    for stack, prefix in names.items():
        sizes[f"{stack}_layers"] = number_of_layers(weights, prefix)
        fc1_weight = required_entry(weights, f"{prefix}0.feed_forward.w_1.weight", WEIGHTS)
        sizes[f"{stack}_ffn_dim"] = fc1_weight.shape[0]
        heads = required_entry(settings, "heads", "the settings of OpenNMT-py's Transformer")
        sizes[f"{stack}_attention_heads"] = heads
    return {
        **sizes,
        "hidden_size": width,
        "position_layout": layout,
        "position_base": base,
        "norm_first": True,
        "attention_bias": "encoder.transformer.0.self_attn.linear_query.bias" in weights,
        "activation_function": settings.get("pos_ffn_activation_fn", "relu"),
        "dropout": _first(settings.get("dropout", 0.1)),
        "attention_dropout": _first(settings.get("attention_dropout", 0.0)),
        "activation_dropout": _first(settings.get("dropout", 0.1)),
        "layer_norm_eps": settings.get("norm_eps", 1e-6),
    }


def _first(dropout: float | list[float]) -> float:
    """Return the first dropout of a list: OpenNMT-py can change the dropout during training."""
    return dropout[0] if isinstance(dropout, list) else dropout


def _with_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add zero biases for equation (2) if the checkpoint has no biases."""
    zeros = {
        name.replace("weight", "bias"): tensor.new_zeros(tensor.shape[0])
        for name, tensor in weights.items()
        if name.endswith(("fc1.weight", "fc2.weight"))
    }
    return zeros | weights


__all__ = ["from_opennmt", "opennmt_tokenizer"]
