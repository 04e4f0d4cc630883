"""Export to CTranslate2, an engine in C++: a weight file, the vocabulary, and the tokenizer."""

import logging
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.specs import common_spec, transformer_spec
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..atomic_files import atomic_folder
from ..comparison import batch_to_compare, refuse_difference
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..deviations_vanilla_transformer import without_bias
from ..languages_vanilla_transformer import target_tokenizer
from ..modeling_vanilla_transformer import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    VanillaTransformerDecoder,
    VanillaTransformerEncoder,
    VanillaTransformerForConditionalGeneration,
)
from .check import DIFFERS, refuse_changed_model
from .parts import activation_of, position_table, save_tokenizer, vocabulary, with_search_ids

logger = logging.getLogger(__name__)

ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "gelu_new": common_spec.Activation.GELUTanh,
    "silu": common_spec.Activation.SWISH,
    "swish": common_spec.Activation.SWISH,
}
QUANTIZATIONS = ("float32", "float16", "int8")
# search settings that CTranslate2 does not store, and the option of `translate_batch` that replaces
# each, or None
LOST_SETTINGS = {
    "forced_bos_token_id": "target_prefix",
    "forced_eos_token_id": None,
    "min_length": "min_decoding_length",
    "min_new_tokens": "min_decoding_length",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "bad_words_ids": "suppress_sequences",
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": None,
    "encoder_repetition_penalty": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
}
# values of these settings that have no effect, so that no warning is needed
VALUES_WITHOUT_EFFECT = {
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
}
# output bias of a forbidden token: the lowest finite number of float16, because float16 is the
# smallest type of stored biases
LOWEST_BIAS = -65504.0


def to_ctranslate2(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    quantization: str = "float32",
    num_positions: int | None = None,
):
    """Write a folder that `ctranslate2.Translator` loads, with the tokenizer.

    CTranslate2 does not store beam size and length penalty: both are arguments of each translation.
    Tokens that the model never generates (`suppress_tokens`, `bad_words_ids` of one token) get
    `LOWEST_BIAS` as their output bias.

    Args:
        model: Model to export.
        tokenizer: Tokenizer of the model.
        folder: Output folder; its files are replaced.
        quantization: Type of the stored weights, one of `QUANTIZATIONS`.
        num_positions: Number of positions in the engine's table, which limits the length of sources
            and translations in tokens. By default, the number of learned positions, or
            `USUAL_POSITIONS` of `export/parts.py` if the model has none.

    Raises:
        ValueError: If the engine does not support the model, the code of the model is not the
            released one, an argument is out of range, or the engine's scores differ from the
            model's.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}."
        )
    refuse_changed_model(model, "CTranslate2")
    model = with_search_ids(model)
    target_tokens = vocabulary(model, target_tokenizer(tokenizer))
    _warn_about_lost_settings(model.generation_config, target_tokens)
    converter = _Converter(_build_specification(model, tokenizer, num_positions))
    with atomic_folder(folder) as unfinished:
        converter.convert(str(unfinished), quantization=quantization, force=True)
        save_tokenizer(tokenizer, unfinished)
        _refuse_other_scores(model, tokenizer, unfinished, quantization, num_positions)


def _warn_about_lost_settings(search: GenerationConfig, tokens: list[str]):
    """Warn about search settings that the engine does not store, and name their replacements."""
    for name, option in LOST_SETTINGS.items():
        value = getattr(search, name, None)
        if name == "bad_words_ids":
            # the output bias forbids single tokens, so only longer sequences are lost
            value = [ids for ids in value or [] if len(ids) > 1]
        if value in (None, [], {}) or value == VALUES_WITHOUT_EFFECT.get(name):
            continue
        if name == "forced_bos_token_id" and isinstance(value, int):
            option = f'{option}=[["{tokens[value]}"]]'
        advice = f"give {option} to translate_batch" if option else "it has no such option"
        logger.warning("CTranslate2 does not store %s %s: %s.", name, value, advice)


def _refuse_other_scores(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    quantization: str,
    num_positions: int | None,
):
    """Refuse an export that gives random target tokens other log-probabilities than the model."""
    batch = batch_to_compare(model, num_positions)
    logits = batch.logits.clone()
    if forbidden_ids := _forbidden_ids(model.generation_config, model.config.vocab_size):
        logits[:, :, forbidden_ids] += LOWEST_BIAS
    # the engine scores the tokens after the start token, and the end token after them
    end_ids = torch.full_like(batch.target[:, :1], _one_token_id(model.config, "eos_token_id"))
    scored_ids = torch.cat((batch.target[:, 1:], end_ids), dim=1)
    model_scores = logits.log_softmax(-1).gather(2, scored_ids[:, :, None])[:, :, 0]
    source_tokens = vocabulary(model, tokenizer)
    target_tokens = vocabulary(model, target_tokenizer(tokenizer))
    # compute in float32 with the stored weights, because results of int8 products depend on the CPU
    engine = ctranslate2.Translator(
        str(folder), compute_type="float32", intra_threads=torch.get_num_threads()
    )
    results = engine.score_batch(
        [
            [source_tokens[source_id] for source_id in source_ids[mask.bool()].tolist()]
            for source_ids, mask in zip(batch.source, batch.mask, strict=True)
        ],
        [
            [target_tokens[target_id] for target_id in target_ids[1:].tolist()]
            for target_ids in batch.target
        ],
        max_input_length=0,
    )
    engine_scores = torch.tensor([result.log_probs for result in results])
    is_allowed = ~torch.isin(scored_ids, torch.tensor(forbidden_ids, dtype=torch.long))
    refuse_difference(
        engine_scores[is_allowed],
        model_scores[is_allowed],
        without_bias(batch.logits, model.lm_head.bias),
        DIFFERS.format("CTranslate2"),
        quantization,
        scored_ids[is_allowed],
    )


class _Converter(ctranslate2.converters.Converter):
    def __init__(self, specification: transformer_spec.TransformerSpec):
        self.specification = specification

    def _load(self) -> transformer_spec.TransformerSpec:
        return self.specification


@torch.no_grad()
def _build_specification(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    num_positions: int | None,
) -> transformer_spec.TransformerSpec:
    config = model.config
    shared_options = {
        "pre_norm": config.norm_first,
        "activation": activation_of(config, ACTIVATIONS),
    }
    encoder, decoder = model.get_encoder(), model.get_decoder()
    encoder_spec = transformer_spec.TransformerEncoderSpec(
        config.encoder_layers,
        config.encoder_attention_heads,
        head_dim=_head_width(encoder.layers[0].self_attention),
        **shared_options,
    )
    decoder_spec = transformer_spec.TransformerDecoderSpec(
        config.decoder_layers,
        config.decoder_attention_heads,
        head_dim=_head_width(decoder.layers[0].self_attention),
        **shared_options,
    )
    _set_stack(encoder_spec, encoder_spec.embeddings[0], encoder, num_positions)
    _set_stack(decoder_spec, decoder_spec.embeddings, decoder, num_positions)
    for layer_spec, layer in zip(encoder_spec.layer, encoder.layers, strict=True):
        _set_layer(layer_spec, layer)
    for layer_spec, layer in zip(decoder_spec.layer, decoder.layers, strict=True):
        _set_layer(layer_spec, layer)
        _set_attention(layer_spec.attention, layer.cross_attention)
        _set_norm(layer_spec.attention.layer_norm, layer.cross_attention_norm)
    _set_linear(decoder_spec.projection, model.lm_head)
    forbidden_ids = _forbidden_ids(model.generation_config, model.config.vocab_size)
    if forbidden_ids:
        output_bias = decoder_spec.projection.bias
        if not isinstance(output_bias, np.ndarray):
            output_bias = np.zeros(config.vocab_size, dtype="float32")
        output_bias[forbidden_ids] = LOWEST_BIAS
        decoder_spec.projection.bias = output_bias

    start_id = _one_token_id(config, "decoder_start_token_id")
    end_id = _one_token_id(config, "eos_token_id")
    if tokenizer.unk_token is None:
        raise ValueError("tokenizer must have an unknown token for CTranslate2, got none.")
    spec = transformer_spec.TransformerSpec(encoder_spec, decoder_spec)
    spec.register_source_vocabulary(vocabulary(model, tokenizer))
    tokens = vocabulary(model, target_tokenizer(tokenizer))
    spec.register_target_vocabulary(tokens)
    spec.config.bos_token = spec.config.decoder_start_token = tokens[start_id]
    spec.config.eos_token = tokens[end_id]
    spec.config.unk_token = tokenizer.unk_token
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    return spec


def _one_token_id(config: VanillaTransformerConfig, name: str) -> int:
    token_id = getattr(config, name)
    if not isinstance(token_id, int) or token_id < 0:
        raise ValueError(f"{name} must be one token for CTranslate2, got {token_id}.")
    return token_id


def _forbidden_ids(search: GenerationConfig, vocab_size: int) -> list[int]:
    single_ids = [ids[0] for ids in search.bad_words_ids or () if len(ids) == 1]
    forbidden_ids = (*(search.suppress_tokens or ()), *single_ids)
    # a search ignores other ids
    return [token_id for token_id in forbidden_ids if 0 <= token_id < vocab_size]


def _set_stack(
    spec: transformer_spec.TransformerEncoderSpec | transformer_spec.TransformerDecoderSpec,
    embeddings: common_spec.EmbeddingsSpec,
    stack: VanillaTransformerEncoder | VanillaTransformerDecoder,
    num_positions: int | None,
):
    embeddings.weight = _array(stack.embed_tokens.weight)
    spec.scale_embeddings = True
    spec.position_encodings.encodings = _array(position_table(stack, num_positions))
    if isinstance(stack.norm, nn.LayerNorm):
        _set_norm(spec.layer_norm, stack.norm)


def _set_layer(
    spec: transformer_spec.TransformerEncoderLayerSpec
    | transformer_spec.TransformerDecoderLayerSpec,
    layer: EncoderLayer | DecoderLayer,
):
    _set_attention(spec.self_attention, layer.self_attention)
    _set_norm(spec.self_attention.layer_norm, layer.self_attention_norm)
    _set_feed_forward(spec.ffn, layer.feed_forward)
    _set_norm(spec.ffn.layer_norm, layer.feed_forward_norm)


def _set_attention(spec, attention: MultiHeadAttention):
    d_k, d_v, width = attention.d_k, attention.d_v, _head_width(attention)
    query = _widen_heads(attention.q_proj, d_k, width)
    key = _widen_heads(attention.k_proj, d_k, width)
    value = _widen_heads(attention.v_proj, d_v, width)
    # the engine fuses query, key and value in self-attention, but only key and value in
    # cross-attention
    is_self_attention = len(spec.linear) == 2
    groups = [[query, key, value]] if is_self_attention else [[query], [key, value]]
    for linear, group in zip(spec.linear[:-1], groups, strict=True):
        linear.weight = np.concatenate([weight for weight, _ in group])
        if attention.q_proj.bias is not None:
            linear.bias = np.concatenate([bias for _, bias in group])
    out_weight = attention.out_proj.weight.unflatten(1, (-1, d_v))  # [d_model, h, d_v]
    out_weight = nn.functional.pad(out_weight, (0, width - d_v)).flatten(1)  # [d_model, h * width]
    spec.linear[-1].weight = _array(out_weight)
    if attention.out_proj.bias is not None:
        spec.linear[-1].bias = _array(attention.out_proj.bias)
    # the engine's default scale would depend on the padded width
    spec.queries_scale = np.dtype("float32").type(attention.scaling)


def _head_width(attention: MultiHeadAttention) -> int:
    """Return the engine's single width of heads; narrower keys or values are padded with zeros."""
    return max(attention.d_k, attention.d_v)


def _widen_heads(
    projection: nn.Linear, head_width: int, width: int
) -> tuple[np.ndarray, np.ndarray | None]:
    def widened(tensor: torch.Tensor) -> np.ndarray:
        heads = tensor.unflatten(0, (-1, head_width))  # [h, head_width, ...]
        zeros = heads.new_zeros(heads.shape[0], width - head_width, *heads.shape[2:])
        return _array(torch.cat((heads, zeros), dim=1).flatten(0, 1))  # [h * width, ...]

    bias = None if projection.bias is None else widened(projection.bias)
    return widened(projection.weight), bias


def _set_feed_forward(spec: transformer_spec.FeedForwardSpec, feed_forward: FeedForward):
    _set_linear(spec.linear_0, feed_forward.fc1)
    _set_linear(spec.linear_1, feed_forward.fc2)


def _set_linear(spec: common_spec.LinearSpec, linear: nn.Linear):
    spec.weight = _array(linear.weight)
    if linear.bias is not None:
        spec.bias = _array(linear.bias)


def _set_norm(spec: common_spec.LayerNormSpec, norm: nn.LayerNorm):
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: torch.Tensor) -> np.ndarray:
    # a copy, because the engine's converter quantizes in place
    return tensor.detach().cpu().float().numpy().copy()
