# Copyright 2026 The vanilla_transformer authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The Transformer of "Attention Is All You Need", section 3, from its parts to the whole.

Shapes: B sentences, S source positions, T target positions, Q queries, K keys, h heads, d_k and d_v
widths of a head's keys and values, d_model width of the residual stream, d_ff inner width of the
feed-forward network, V tokens in the vocabulary.

Arguments that mean the same in every module:
    config: Sizes and options of the model.
    x: Residual stream, [B, T, d_model]; [B, S, d_model] in the encoder.
    memory: Output of the encoder, [B, S, d_model].
    mask: Attention mask from transformers, in the form that the attention function accepts; None if
        nothing is masked. In the decoder, `memory_mask` masks the padding of the source.
    cache: KV cache, the keys and values of earlier decoding steps.
    kwargs: Further arguments of the attention function.
"""

import math
from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .checks_vanilla_transformer import (
    arguments_of_stack,
    check_arguments,
    check_ids,
    check_length,
    vocab_size_of,
    with_output_object,
)
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .decoding_vanilla_transformer import CACHE_NAME, cached_length, decoder_cache
from .generation_vanilla_transformer import SearchMixin, output_of_encoder
from .released_code_vanilla_transformer import warn_of_other_code
from .saving_vanilla_transformer import SavingMixin

# ---- 3.2.1 Scaled Dot-Product Attention ----


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Average the values, weighted by the match of query and key. Section 3.2.1, eq. (1).

    Args:
        query: Queries, [B, h, Q, d_k].
        key: Keys, [B, h, K, d_k].
        value: Values, [B, h, K, d_v].
        mask: 0 where attention is allowed, very low where not, broadcastable to [B, h, Q, K].
        dropout: Probability of dropping an attention weight.

    Returns:
        The weighted values [B, h, Q, d_v] and the weights [B, h, Q, K].
    """
    d_k = query.shape[-1]
    scores = query @ key.transpose(-2, -1) / math.sqrt(d_k)  # [B, h, Q, K]
    weights = (scores if mask is None else scores + mask).softmax(dim=-1)
    context = F.dropout(weights, dropout, training=dropout > 0) @ value  # [B, h, Q, d_v]
    return context, weights


# ---- 3.2.2 Multi-Head Attention ----


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[Tensor, Tensor]:
    """Compute equation (1) with the signature of the attention functions of transformers.

    `query`, `key`, `value`, `mask` and `dropout` are passed to `scaled_dot_product_attention`;
    `module`, the calling attention module, and `kwargs` are ignored.

    Returns:
        The weighted values [B, Q, h, d_v] and the weights [B, h, Q, K].
    """
    # CODEPATH: heads of a changed attention may share keys and values
    if (group_size := query.shape[1] // key.shape[1]) > 1:
        key = key.repeat_interleave(group_size, dim=1)
        value = value.repeat_interleave(group_size, dim=1)
    context, weights = scaled_dot_product_attention(query, key, value, mask, dropout)
    return context.transpose(1, 2).contiguous(), weights


class MultiHeadAttention(nn.Module):
    """Attention with h heads. Section 3.2.2.

    Args:
        num_heads: Number of heads, h; `config.encoder_attention_heads` if None.
        layer_idx: Index of the decoder layer in the KV cache; None in the encoder, which has no
            cache.
        is_causal: Whether later positions are hidden, section 3.2.3. Attention functions read this
            attribute if the causal mask is not passed to them.
    """

    def __init__(
        self,
        config: VanillaTransformerConfig,
        num_heads: int | None = None,
        layer_idx: int | None = None,
        is_causal: bool = False,
    ):
        super().__init__()
        num_heads = num_heads or config.encoder_attention_heads
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.d_k = config.d_k or config.d_model // num_heads
        self.d_v = config.d_v or config.d_model // num_heads
        self.scaling = self.d_k**-0.5
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.d_model, num_heads * self.d_k, bias=bias)
        self.k_proj = nn.Linear(config.d_model, num_heads * self.d_k, bias=bias)
        self.v_proj = nn.Linear(config.d_model, num_heads * self.d_v, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.d_v, config.d_model, bias=bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        mask: Tensor | None,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each position of `x` to `memory`, or to `x` itself.

        Args:
            x: Input of the query projection, [B, Q, d_model].
            memory: Input of the key and value projections, [B, K, d_model]; `x` if None.

        Returns:
            The output [B, Q, d_model], and the attention weights [B, h, Q, K], or None if the
            attention function does not return weights.
        """
        query = self._heads(self.q_proj(x), self.d_k)  # [B, h, Q, d_k]
        key, value = self._keys_and_values(x, memory, cache)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        dropout = self.config.attention_dropout if self.training else 0.0
        context, weights = attention(
            self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.out_proj(context.reshape(*x.shape[:-1], -1)), weights

    def _keys_and_values(
        self, x: Tensor, memory: Tensor | None, cache: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        if cache is not None and memory is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        source = x if memory is None else memory
        key = self._heads(self.k_proj(source), self.d_k)  # [B, h, K, d_k]
        value = self._heads(self.v_proj(source), self.d_v)  # [B, h, K, d_v]
        if cache is None:
            return key, value
        if memory is None:
            return cache.self_attention_cache.update(key, value, self.layer_idx)
        cache.is_updated[self.layer_idx] = True
        return cache.cross_attention_cache.update(key, value, self.layer_idx)

    @staticmethod
    def _heads(x: Tensor, width: int) -> Tensor:
        return x.view(*x.shape[:-1], -1, width).transpose(1, 2)  # [B, h, T, width]


# ---- 3.3 Position-wise Feed-Forward Networks ----


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 at each position. Section 3.3, eq. (2).

    Args:
        d_ff: Inner width; `config.encoder_ffn_dim` if None.
    """

    def __init__(self, config: VanillaTransformerConfig, d_ff: int | None = None):
        super().__init__()
        d_ff = d_ff or config.encoder_ffn_dim
        self.fc1 = nn.Linear(config.d_model, d_ff)
        self.fc2 = nn.Linear(d_ff, config.d_model)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position, [B, T, d_model] to [B, T, d_model]."""
        return self.fc2(self.dropout(self.activation(self.fc1(x))))


# ---- 3.1 Encoder and Decoder Stacks ----


class TransformerLayer(GradientCheckpointingLayer):
    """Base class of encoder and decoder layers, with "Add & Norm" of figure 1. Section 3.1."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.norm_first = config.norm_first
        self.dropout = nn.Dropout(config.dropout)

    def add_and_norm(
        self, x: Tensor, sublayer: Callable[[Tensor], Tensor], norm: nn.LayerNorm
    ) -> Tensor:
        """Compute LayerNorm(x + Dropout(Sublayer(x))), [B, T, d_model]. Sections 3.1 and 5.4.

        Args:
            sublayer: Attention or feed-forward, [B, T, d_model] to [B, T, d_model].
            norm: Layer normalization that belongs to the sub-layer.
        """
        # CODEPATH: the paper normalizes after the addition; the authors' later code normalizes the
        # input of the sub-layer
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))


class EncoderLayer(TransformerLayer):
    """Self-attention, then feed-forward. Section 3.1, left half of figure 1."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.self_attention = MultiHeadAttention(config, config.encoder_attention_heads)
        self.self_attention_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config, config.encoder_ffn_dim)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self, x: Tensor, mask: Tensor | None, **kwargs: Unpack[TransformersKwargs]
    ) -> Tensor:
        """Transform the residual stream of the source, [B, S, d_model] to [B, S, d_model]."""

        def attend_to_source(x: Tensor) -> Tensor:
            return self.self_attention(x, None, mask, **kwargs)[0]

        x = self.add_and_norm(x, attend_to_source, self.self_attention_norm)
        return self.add_and_norm(x, self.feed_forward, self.feed_forward_norm)


class DecoderLayer(TransformerLayer):
    """Self-attention, attention to the memory, feed-forward. Section 3.1, right half of figure 1.

    Args:
        layer_idx: Index of the layer in the KV cache.
    """

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config)
        heads = config.decoder_attention_heads
        self.self_attention = MultiHeadAttention(config, heads, layer_idx, is_causal=True)
        self.self_attention_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.cross_attention = MultiHeadAttention(config, heads, layer_idx)
        self.cross_attention_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config, config.decoder_ffn_dim)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        memory: Tensor,
        memory_mask: Tensor | None,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        """Transform the residual stream of the target, [B, T, d_model] to [B, T, d_model].

        `mask` hides the future and the target's padding.
        """

        def attend_to_past(x: Tensor) -> Tensor:
            return self.self_attention(x, None, mask, cache, **kwargs)[0]

        def attend_to_memory(x: Tensor) -> Tensor:
            return self.cross_attention(x, memory, memory_mask, cache, **kwargs)[0]

        x = self.add_and_norm(x, attend_to_past, self.self_attention_norm)
        x = self.add_and_norm(x, attend_to_memory, self.cross_attention_norm)
        return self.add_and_norm(x, self.feed_forward, self.feed_forward_norm)


# ---- 3.4 Embeddings and 3.5 Positional Encoding ----


def sinusoids(
    positions: Tensor, d_model: int, base: float = 10000.0, layout: str = "interleaved"
) -> Tensor:
    """Return sines and cosines of positions, with wavelengths from 2 pi to `base` * 2 pi.

    `d_model`, `base` and `layout` are documented in `sinusoidal_encoding`; they are not validated
    here.

    Args:
        positions: Integers of any shape, [...].

    Returns:
        The encoding, float32 [..., d_model].
    """
    # float32 would lose three decimal digits of the angle at positions of some thousands; MPS
    # devices have no float64
    precise = torch.float32 if positions.device.type == "mps" else torch.float64
    exponents = torch.arange(0, d_model, 2, device=positions.device, dtype=precise) / d_model
    angles = positions[..., None].to(precise) * base**-exponents  # [..., d_model / 2]
    pairs = torch.stack((angles.sin(), angles.cos()), dim=-1).float()  # [..., d_model / 2, 2]
    return (pairs if layout == "interleaved" else pairs.transpose(-2, -1)).flatten(-2)


def sinusoidal_encoding(
    num_positions: int, d_model: int, base: float = 10000.0, layout: str = "interleaved"
) -> Tensor:
    """Return the positional encoding of positions 0, 1, 2, ... Section 3.5.

    Args:
        num_positions: Number of positions.
        d_model: Width of the encoding, even.
        base: Base of the wavelengths, 2 pi base^(2i / d_model) for feature pair i; the default is
            the paper's.
        layout: "interleaved", sines and cosines in alternating features as in the paper, or
            "halves", all sines before all cosines.

    Returns:
        The table, float32 [num_positions, d_model].

    Raises:
        ValueError: If a size or the base is out of range, or the layout is unknown.
    """
    if num_positions < 0:
        raise ValueError(f"num_positions must not be negative, got {num_positions}.")
    if d_model <= 0 or d_model % 2:
        raise ValueError(f"d_model must be even, for sin/cos pairs, and positive, got {d_model}.")
    if base <= 0:
        raise ValueError(f"base must be positive, got {base}.")
    if layout not in ("interleaved", "halves"):
        raise ValueError(f"layout must be 'interleaved' or 'halves', got {layout!r}.")
    return sinusoids(torch.arange(num_positions), d_model, base, layout)


class PositionalEncoding(nn.Module):
    """Sum of embeddings and positional encoding. Section 3.5.

    Sinusoids are computed in each call, so they have no maximum length; learned positions have one.
    """

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.config = config
        # CODEPATH: Table 3, row E, learns a vector for each position
        if config.position_encoding == "learned":
            rows = config.max_position_embeddings + config.position_offset
            self.table = nn.Embedding(rows, config.d_model)

    def forward(self, x: Tensor, first_position: int | Tensor = 0) -> Tensor:
        """Add the encodings of consecutive positions, [B, T, d_model] to [B, T, d_model].

        Args:
            x: Scaled embeddings, [B, T, d_model].
            first_position: Number of tokens before `x`, which is the length of the KV cache.
        """
        config = self.config
        # CODEPATH: no positional encoding, to show that attention alone ignores the token order
        if config.position_encoding == "none":
            return x
        positions = torch.arange(x.shape[1], device=x.device) + first_position  # [T]
        positions = positions + config.position_offset
        # CODEPATH: Table 3, row E
        if config.position_encoding == "learned":
            try:
                return x + self.table(positions)
            except IndexError:
                check_length(config, int(first_position) + x.shape[1], "sequence")
                raise
        encoding = sinusoids(
            positions, config.d_model, config.position_base, config.position_layout
        )
        return x + encoding.to(x.dtype)


# ---- The Hugging Face contract ----


class VanillaTransformerPreTrainedModel(SavingMixin, PreTrainedModel):
    """Base class of all models: weights, loading, and supported features of transformers."""

    config: VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _skip_keys_device_placement = ["cache", "past_key_values"]

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike, *args: Any, **kwargs: Any
    ) -> Any:
        """Load a model as transformers does, but refuse a model that another class saved.

        Returns:
            The model; if `output_loading_info` is set, a pair of the model and the loading report.

        Raises:
            ValueError: If another class saved the model: this class would run without its code.
        """
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        # only classes of this file are checked: a user's subclass may load weights of any class
        if cls.__name__ in __all__:
            config = (loaded[0] if isinstance(loaded, tuple) else loaded).config
            for name in config.architectures or ():
                if name not in __all__:
                    raise ValueError(
                        f"the model must be loaded by the class that saved it, {name}: "
                        f"{cls.__name__} does not have its code. {name}.from_pretrained loads it."
                    )
            warn_of_other_code(pretrained_model_name_or_path, config, __name__)
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        # the paper does not state its initialization; with a gain of 1, the initialization is that
        # of the authors' code
        super()._init_weights(module)
        gain = self.config.initializer_gain
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight, gain=gain)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=gain * self.config.d_model**-0.5)

    def post_init(self):
        """Initialize the weights as transformers does, and register the tied weights of all parts.

        A part may be a model of transformers, which has tied weights of its own.
        """
        super().post_init()
        self.all_tied_weights_keys |= self.get_expanded_tied_weights_keys(all_submodels=True)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args, **kwargs
    ) -> str:
        if "flash" in (attn_implementation or "") and self.config.qk_head_dim is not None:
            raise ValueError(
                f"{attn_implementation} needs d_k equal to d_v, got d_k {self.config.qk_head_dim} "
                "and another d_v. Use 'sdpa', 'flex_attention' or 'eager'."
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def _resize_token_embeddings(
        self, new_num_tokens, pad_to_multiple_of=None, mean_resizing=True
    ) -> nn.Embedding:
        resized = super()._resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        # transformers resizes the source embedding and the output projection, but not the target
        # embedding of an untied model
        decoder = self.get_decoder()
        if decoder.embed_tokens.num_embeddings != resized.num_embeddings:
            decoder.embed_tokens = self._get_resized_embeddings(
                decoder.embed_tokens, new_num_tokens, pad_to_multiple_of, mean_resizing
            )
        return resized

    def _final_norm(self) -> nn.Module:
        # CODEPATH: layers that normalize their input leave the output of the last layer without a
        # norm
        if self.config.norm_first:
            return nn.LayerNorm(self.config.d_model, eps=self.config.layer_norm_eps)
        return nn.Identity()

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "Exactly one of input_ids and inputs_embeds must be given, got "
                + ("neither." if input_ids is None else "both.")
            )
        if inputs_embeds is None:
            try:
                inputs_embeds = self.embed_tokens(input_ids)
            except IndexError:
                # torch's error names neither the id nor the vocabulary size: raise a better one
                check_ids("token ids", input_ids, vocab_size_of(self))
                raise
        return inputs_embeds * math.sqrt(self.config.d_model)  # [B, T, d_model]


class VanillaTransformerEncoder(VanillaTransformerPreTrainedModel):
    """Embedding, positions and N encoder layers, from source tokens to memory. Section 3.1."""

    _can_record_outputs = {"hidden_states": EncoderLayer, "attentions": MultiHeadAttention}
    _tp_plan = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attention.q_proj": "colwise",
        "layers.*.self_attention.k_proj": "colwise",
        "layers.*.self_attention.v_proj": "colwise",
        "layers.*.self_attention.out_proj": "rowwise",
        "layers.*.feed_forward.fc1": "colwise",
        "layers.*.feed_forward.fc2": "rowwise",
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = PositionalEncoding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList([EncoderLayer(config) for _ in range(config.encoder_layers)])
        self.norm = self._final_norm()
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Compute the memory, `last_hidden_state`, [B, S, d_model].

        The arguments are documented in `VanillaTransformerForConditionalGeneration.forward`.
        """
        check_arguments(self, kwargs, eager_attention)
        embedded = self._embed(input_ids, inputs_embeds)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=embedded, attention_mask=attention_mask
        )
        x = self.dropout(self.positions(embedded))
        for layer in self.layers:
            x = layer(x, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class VanillaTransformerDecoder(VanillaTransformerPreTrainedModel):
    """Embedding, positions and N decoder layers, from target to hidden states. Section 3.1."""

    _can_record_outputs = {
        "hidden_states": DecoderLayer,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attention"),
        "cross_attentions": OutputRecorder(
            MultiHeadAttention, index=1, layer_name="cross_attention"
        ),
    }
    _tp_plan = {
        **VanillaTransformerEncoder._tp_plan,
        "layers.*.cross_attention.q_proj": "colwise",
        "layers.*.cross_attention.k_proj": "colwise",
        "layers.*.cross_attention.v_proj": "colwise",
        "layers.*.cross_attention.out_proj": "rowwise",
    }

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = PositionalEncoding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList([DecoderLayer(config, i) for i in range(config.decoder_layers)])
        self.norm = self._final_norm()
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Compute the hidden states of the target, `last_hidden_state`, [B, T, d_model].

        The other arguments are documented in `VanillaTransformerForConditionalGeneration.forward`,
        where `input_ids`, `attention_mask` and `inputs_embeds` have the prefix `decoder_`.

        Args:
            encoder_hidden_states: Memory, [B, S, d_model].
            encoder_attention_mask: 1 for a source token, 0 for padding, [B, S].
        """
        check_arguments(self, kwargs, eager_attention)
        if encoder_hidden_states is None:
            raise ValueError("encoder_hidden_states must be given: every layer attends to them.")
        embedded = self._embed(input_ids, inputs_embeds)
        cache = decoder_cache(self, cache, past_key_values, use_cache and not self.training)
        past_length = 0 if cache is None else cached_length(cache)
        own_cache = None if cache is None else cache.self_attention_cache
        # positional arguments, because transformers 5.24 renamed the last one
        mask = create_causal_mask(self.config, embedded, attention_mask, own_cache)
        memory_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        x = self.dropout(self.positions(embedded, past_length))
        for layer in self.layers:
            x = layer(x, mask, encoder_hidden_states, memory_mask, cache=cache, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(x), **{CACHE_NAME: cache}
        )


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder of figure 1, without the output projection.

    Source and target share one embedding matrix if `tie_word_embeddings` is set, as by default.
    """

    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the source embedding, [V, d_model]; target and output use it too if tied."""
        if not hasattr(self.encoder, "get_input_embeddings"):
            # transformers expects this error from a model without token embeddings
            raise NotImplementedError(
                f"The encoder must have get_input_embeddings, but {type(self.encoder).__name__} "
                "has none."
            )
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding):
        """Replace the source embedding, [V, d_model], and the target embedding if tied."""
        self.encoder.set_input_embeddings(value)
        # CODEPATH: an untied target embedding stays; the decoder's own method replaces it
        if self.config.tie_word_embeddings:
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Compute hidden states of the decoder, [B, T, d_model], and the encoder, [B, S, d_model].

        The arguments are documented in `VanillaTransformerForConditionalGeneration.forward`.
        """
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            found = "neither. A model with a head also makes decoder_input_ids from labels."
            raise ValueError(
                "Exactly one of decoder_input_ids and decoder_inputs_embeds must be given, got "
                + (found if decoder_input_ids is None else "both.")
            )
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                **arguments_of_stack(self.encoder, self.decoder, kwargs),
            )
        # the encoder may be of another class, whose output may have other fields
        encoder_outputs = output_of_encoder(encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **arguments_of_stack(self.decoder, self.encoder, kwargs),
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            **{CACHE_NAME: decoder_outputs.get(CACHE_NAME)},
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.get("hidden_states"),
            encoder_attentions=encoder_outputs.get("attentions"),
        )


class VanillaTransformerForConditionalGeneration(
    SearchMixin, VanillaTransformerPreTrainedModel, GenerationMixin
):
    """The whole model of figure 1, with logits of the next token and search. Sections 3 and 6.1."""

    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias)
        # transformers selects the loss by class name; the one for this name would shift the labels
        # a second time
        self.loss_type = "ForMaskedLM"
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift the labels right, so that each position predicts the next token. Section 3.1.

        Args:
            labels: Target tokens, -100 for positions without loss, [B, T].

        Returns:
            The start token and all labels but the last, with padding in place of -100, [B, T].

        Raises:
            ValueError: If the configuration lacks the start or the padding token.
        """
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(self.config, name) is None:
                raise ValueError(f"{name} must be set to shift labels, got None.")
        start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
        shifted = torch.cat((start, labels[:, :-1]), dim=1)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Compute the logits of the next token at each target position.

        Args:
            input_ids: Source tokens, [B, S].
            attention_mask: 1 for a source token, 0 for padding, [B, S]; all are tokens if None.
                Positions are counted from the first column, so padding belongs on the right.
            decoder_input_ids: Target tokens, shifted right, [B, T]; made from `labels` if None.
            decoder_attention_mask: 1 for a target token, 0 for padding, [B, T]; all are tokens if
                None.
            encoder_outputs: Output of the encoder, used in place of `input_ids` or `inputs_embeds`.
            cache: KV cache of the target tokens that precede `decoder_input_ids`.
            inputs_embeds: Embedded source in place of `input_ids`, before scaling, [B, S, d_model].
            decoder_inputs_embeds: Embedded target in place of `decoder_input_ids`, before scaling,
                [B, T, d_model].
            labels: Target tokens, -100 for positions without loss, [B, T].
            use_cache: Whether to return a KV cache for the next step; ignored in training mode and
                if labels are given.
            logits_to_keep: Number of last positions to compute logits for, or indices of positions;
                0 means all positions.
            past_key_values: Name of `cache` in transformers before 5.24, which also uses this name
                in the output.
            kwargs: `num_items_in_batch`, by which the summed loss is divided; `output_attentions`,
                `output_hidden_states`; arguments of the attention function; and arguments that
                `forward` of a changed stack or layer declares, which only its stack receives.

        Returns:
            `logits`, [B, T, V], the KV cache if one is used, and `loss` if labels are given: the
            mean loss over the labels that are not -100, or the sum of their losses divided by
            `num_items_in_batch`.

        Raises:
            TypeError: If an argument is unknown.
            ValueError: If source or target is missing or given twice, the cache is given under both
                names, two layers use the same cache index, or, on the CPU, an id or a label is not
                in the vocabulary, or a sequence is longer than the learned positions.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **with_output_object(self.model, kwargs),
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])  # [B, T, V]
        loss = None
        if labels is not None:
            try:
                loss = self.loss_function(logits, labels, logits.shape[-1], **kwargs)
            except IndexError:
                check_ids("labels", labels[labels != -100], logits.shape[-1])
                raise
        others = {name: it for name, it in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)


__all__ = [
    "VanillaTransformerDecoder",
    "VanillaTransformerEncoder",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
