"""Inference engine: the computations of the released model, with weights packed for search.

The engine computes the same logits as the model's modules, up to rounding, but faster: weights are
packed once, padding is left out, and beams are reordered without a copy of the KV cache.
`engine_for` returns an engine only if the model runs the released code
(`identity_vanilla_transformer`), and if the engine's logits for a small batch, the probe, agree
with those of the modules. Otherwise it returns the reason, and the search runs the modules.

Shapes: B sentences, R hypotheses of a sentence (1 or the number of beams), S source positions, N
source tokens without padding, W slots of the self-attention cache, h heads, V tokens in the
vocabulary.
"""

import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .cores_vanilla_transformer import shared_cores
from .identity_vanilla_transformer import (
    attention_difference,
    computing_modules,
    first_difference,
)
from .kernels_vanilla_transformer import (
    Int8Linear,
    PackedLinear,
    PlainLinear,
    captured,
    is_used_in_place,
)
from .search_vanilla_transformer import Decoding

# maximum number of attention scores in memory at a time
MOST_SCORES = 2**25
# initial number of slots of the self-attention cache, for plain and for captured steps. A captured
# step reads all slots, but must be captured again when the cache grows
FIRST_SLOTS, FIRST_CAPTURED_SLOTS = 64, 256
# devices on which a step is captured once as a graph and then replayed, because launching its
# kernels takes longer than their work
CAPTURING_DEVICES = ("cuda",)

# dtypes of the weights on a CPU: packed products exist in float32 only
CPU_DTYPES = (torch.float32,)
# dtypes of the weights on other devices
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# attributes of the released modules that the engine reads
SETTINGS = ("norm_first", "scaling", "d_k", "d_v")
# number of weights in a checksum: matrix-vector products read memory fastest with rows of this
# length
NUMBERS_PER_SUM = 4096
# number of tokens of each source sentence in the probe
PROBE_LENGTHS = (7, 4, 2)
# allowed deviation of the engine's logits from those of the modules, in standard deviations of the
# logits: the largest deviation in float32, the root mean square in half precision and in int8
FLOAT32_TOLERANCE, HALF_TOLERANCE, INT8_TOLERANCE = 1e-3, 0.05, 0.5

logger = logging.getLogger(__name__)


class PackedAttention:
    """Packed projections and sizes of a `MultiHeadAttention`.

    Args:
        attention: A `MultiHeadAttention`.
        linear_class: Class that computes the linear layers, such as `PackedLinear`.
        is_cross: Whether this is encoder-decoder attention, for which `SearchEngine` computes keys
            and values, in one product for all layers.
    """

    def __init__(self, attention: Any, linear_class: type, is_cross: bool = False):
        self.d_k, self.d_v = attention.d_k, attention.d_v
        self.num_heads = attention.q_proj.out_features // self.d_k
        self.scaling = attention.scaling
        projections = [attention.q_proj]
        if not is_cross:
            projections += [attention.k_proj, attention.v_proj]
        self.project = linear_class(projections)
        self.out = linear_class([attention.out_proj])
        self.widths = [self.num_heads * width for width in (self.d_k, self.d_k, self.d_v)]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """Compute equation (1) for all queries of each sentence together.

        In the encoder, R and W are both S, the number of source positions; in encoder-decoder
        attention, W is S.

        Args:
            query: Queries, [B * R, h * d_k].
            keys: Keys, [B, h, d_k, W].
            values: Values, [B, h, W, d_v].
            bias: 0 where attention is allowed, -inf where not, [B * h, 1 or R, W], of the query's
                dtype; None if attention to every position is allowed.

        Returns:
            Weighted values, [B * R, h * d_v].
        """
        sentences, heads, _, slots = keys.shape
        query = query.view(sentences, -1, heads, self.d_k).transpose(1, 2)  # [B, h, R, d_k]
        query = query.reshape(sentences * heads, -1, self.d_k)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        # in long texts, the scores of all queries together may not fit into memory
        rows = max(1, MOST_SCORES // (sentences * heads * slots))
        parts = []
        for start in range(0, query.shape[1], rows):
            part = query[:, start : start + rows]
            if bias is None:
                scores = torch.bmm(part, keys).mul_(self.scaling)  # [B * h, rows, W]
            else:
                own = bias if bias.shape[1] == 1 else bias[:, start : start + rows]
                scores = torch.baddbmm(own, part, keys, alpha=self.scaling)
            parts.append(torch.bmm(scores.softmax(dim=-1), values))  # [B * h, rows, d_v]
        context = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # [B * h, R, d_v]
        context = context.view(sentences, heads, -1, self.d_v).transpose(1, 2)
        return context.reshape(-1, heads * self.d_v)


class PackedLayer:
    """Encoder or decoder layer with packed weights; norms and activation are the model's modules.

    Args:
        layer: An `EncoderLayer` or a `DecoderLayer`.
        linear_class: Class that computes the linear layers, such as `PackedLinear`.
        is_decoder: Whether the layer is a `DecoderLayer`.
    """

    def __init__(self, layer: Any, linear_class: type, is_decoder: bool):
        self.norm_first = layer.norm_first
        self.self_attention = PackedAttention(layer.self_attention, linear_class)
        self.self_attention_norm = layer.self_attention_norm
        if is_decoder:
            self.cross_attention = PackedAttention(layer.cross_attention, linear_class, True)
            self.cross_attention_norm = layer.cross_attention_norm
        self.activation = layer.feed_forward.activation
        is_relu = type(self.activation) is nn.ReLU
        if is_relu:
            self.activation = nn.Identity()
        self.fc1 = linear_class([layer.feed_forward.fc1], then_relu=is_relu)
        self.fc2 = linear_class([layer.feed_forward.fc2])
        self.feed_forward_norm = layer.feed_forward_norm

    def feed_forward(self, x: Tensor) -> Tensor:
        """Compute equation (2).

        Args:
            x: Residual stream, [rows, d_model].

        Returns:
            Result, [rows, d_model].
        """
        return self.fc2(self.activation(self.fc1(x)))

    def add_and_norm(
        self, x: Tensor, sublayer: Callable[[Tensor], Tensor], norm: nn.LayerNorm
    ) -> Tensor:
        """Compute LayerNorm(x + Sublayer(x)), or x + Sublayer(LayerNorm(x)) if `norm_first`.

        Args:
            x: Residual stream, [rows, d_model].
            sublayer: Function that returns a new tensor of the same shape.
            norm: Layer normalization that belongs to the sub-layer.

        Returns:
            Residual stream, [rows, d_model].
        """
        if self.norm_first:
            return sublayer(norm(x)).add_(x)
        return norm(sublayer(x).add_(x))


class SearchEngine:
    """Inference engine of one model: its packed weights, and encoder and decoder that use them.

    Args:
        model: A `VanillaTransformerForConditionalGeneration` for which `reason_against_engine`
            returns None.
        linear_class: Class that computes the linear layers: `PackedLinear`, `PlainLinear` or
            `Int8Linear`.
    """

    def __init__(self, model: PreTrainedModel, linear_class: type = PackedLinear):
        encoder, decoder = model.get_encoder(), model.get_decoder()
        self.encoder_layers = [PackedLayer(layer, linear_class, False) for layer in encoder.layers]
        self.decoder_layers = [PackedLayer(layer, linear_class, True) for layer in decoder.layers]
        self.stacks = {"encoder": _Stack(encoder), "decoder": _Stack(decoder)}
        attentions = [layer.cross_attention for layer in decoder.layers]
        self.memory_projection = linear_class(
            [linear for attention in attentions for linear in (attention.k_proj, attention.v_proj)]
        )
        self.vocabulary = linear_class([model.lm_head])
        self.num_tokens = model.lm_head.out_features

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Encode a batch; padding is left out of the computation.

        Args:
            input_ids: Source tokens, [B, S].
            attention_mask: 1 for a token, 0 for padding, [B, S]; all are tokens if None.

        Returns:
            Memory, 0 at padding, [B, S, d_model].
        """
        sentences, length = input_ids.shape
        tokens = _Tokens(attention_mask, sentences, length)
        stack = self.stacks["encoder"]
        ids = tokens.packed(input_ids.flatten())  # [N]
        positions = stack.positions(length)  # [S, d_model]
        x = stack.embed(ids)
        if positions is not None:
            x += tokens.packed(positions.repeat(sentences, 1))
        for layer in self.encoder_layers:

            def attend_to_source(x: Tensor, attention=layer.self_attention) -> Tensor:
                projected = tokens.padded(attention.project(x))  # [B * S, h * (2 * d_k + d_v)]
                query, *heads = projected.split(attention.widths, dim=-1)
                keys, values = (
                    part.reshape(sentences, length, attention.num_heads, -1) for part in heads
                )
                keys, values = keys.permute(0, 2, 3, 1), values.transpose(1, 2)
                context = attention(query, keys, values, tokens.bias(attention.num_heads, x.dtype))
                return attention.out(tokens.packed(context))

            x = layer.add_and_norm(x, attend_to_source, layer.self_attention_norm)
            x = layer.add_and_norm(x, layer.feed_forward, layer.feed_forward_norm)
        return tokens.padded(stack.norm(x)).view(sentences, length, -1)

    def begin(self, memory: Tensor, attention_mask: Tensor | None) -> "EngineDecoding":
        """Return the decoder for a batch, before its first step.

        Args:
            memory: Output of `encode` or of the model's encoder, [B, S, d_model].
            attention_mask: 1 for a source token, 0 for padding, [B, S]; all are tokens if None.

        Returns:
            Decoder with an empty self-attention cache.
        """
        sentences, length, width = memory.shape
        tokens = _Tokens(attention_mask, sentences, length)
        projected = self.memory_projection(tokens.packed(memory.reshape(-1, width)))
        padded = tokens.padded(projected).view(sentences, length, -1)
        widths = [
            width for layer in self.decoder_layers for width in layer.cross_attention.widths[1:]
        ]
        heads = self.decoder_layers[0].cross_attention.num_heads
        parts = [part.unflatten(-1, (heads, -1)) for part in padded.split(widths, dim=-1)]
        keys = [part.permute(0, 2, 3, 1).contiguous() for part in parts[::2]]  # [B, h, d_k, S]
        values = [part.transpose(1, 2).contiguous() for part in parts[1::2]]  # [B, h, S, d_v]
        is_captured = memory.device.type in CAPTURING_DEVICES
        decoding = CapturedDecoding if is_captured else EngineDecoding
        return decoding(self, keys, values, tokens.bias(heads, memory.dtype))


class EngineDecoding(Decoding):
    """Decoder of the engine during one search.

    Each step writes its keys and values into new slots of the KV cache. A mask, `is_visible`, marks
    the slots that each hypothesis may attend to; reordering the beams changes only this mask. When
    the cache is full, it is copied without the slots that no hypothesis uses.

    Args:
        engine: Packed model.
        memory_keys: Keys of the memory in each layer, [B, h, d_k, S].
        memory_values: Values of the memory in each layer, [B, h, S, d_v].
        memory_bias: 0 for a source token, -inf for padding, [B * h, 1, S]; None without padding.
    """

    first_slots = FIRST_SLOTS

    def __init__(
        self,
        engine: SearchEngine,
        memory_keys: list[Tensor],
        memory_values: list[Tensor],
        memory_bias: Tensor | None,
    ):
        self.engine = engine
        self.layers = engine.decoder_layers
        self.memory_keys, self.memory_values = memory_keys, memory_values
        self.memory_bias = memory_bias
        self.num_sentences = memory_keys[0].shape[0]
        self.num_heads = memory_keys[0].shape[1]
        self.length = self.num_used = 0
        self.keys, self.values = [], []
        for layer, memory in zip(self.layers, memory_keys, strict=True):
            sizes = self.num_sentences, self.num_heads
            attention = layer.self_attention
            self.keys.append(memory.new_zeros(*sizes, attention.d_k, self.first_slots))
            self.values.append(memory.new_zeros(*sizes, self.first_slots, attention.d_v))
        shape = self.num_sentences, 1, self.first_slots
        # slots that each hypothesis may attend to, [B, R, W]
        self.is_visible = torch.zeros(shape, dtype=torch.bool, device=memory_keys[0].device)

    def step(self, ids: Tensor) -> Tensor:
        """Read the tokens that were added since the last call, and score the next token.

        Args:
            ids: All tokens of each hypothesis, [B, R, T].

        Returns:
            Logits in float32, [B, R, V]; in the first call one row for each sentence, [B, 1, V].
        """
        shared_cores.update()
        # in the first call all rows of a sentence are equal, so only one of them is read
        rows = ids if self.length else ids[:, :1]
        for position in range(self.length, ids.shape[2]):
            states = self._read(rows[:, :, position])  # [B * R, d_model]
        logits = self.engine.vocabulary(states).float()  # [B * R, V]
        return logits.view(*rows.shape[:2], -1)

    def _read(self, tokens: Tensor) -> Tensor:
        """Read one token of each row, [B, R], and return the decoder's states, [B * R, d_model]."""
        num_rows = tokens.shape[1]
        if self.num_used + num_rows > self.is_visible.shape[2]:
            self._make_room(num_rows)
        new = slice(self.num_used, self.num_used + num_rows)
        self.is_visible[:, :, new] = self._own_slots(num_rows)
        self.num_used = new.stop
        self.length += 1
        positions = self.engine.stacks["decoder"].positions(self.length)
        return self._states(
            tokens,
            None if positions is None else positions[-1],
            new,
            slice(self.num_used),
            self._self_attention_bias(),
        )

    def _own_slots(self, num_rows: int) -> Tensor:
        """Return which of the new slots each row may attend to, [R, R]."""
        return torch.eye(num_rows, dtype=torch.bool, device=self.is_visible.device)

    def _states(
        self,
        tokens: Tensor,
        position: Tensor | None,
        new: slice | Tensor,
        used: slice,
        bias: Tensor | None,
    ) -> Tensor:
        """Compute the states of one token of each row.

        Args:
            tokens: Tokens, [B, R].
            position: Positional encoding of the tokens, [d_model], or None.
            new: Slots to write the keys and values to, [R].
            used: The W slots that attention reads.
            bias: 0 for a slot that a row may attend to, -inf otherwise, [B * h, R, W]; None if
                every row may attend to all W slots.

        Returns:
            States, [B * R, d_model].
        """
        stack, num_rows = self.engine.stacks["decoder"], tokens.shape[1]
        x = stack.embed(tokens.flatten())  # [B * R, d_model]
        if position is not None:
            x += position
        for index, layer in enumerate(self.layers):

            def attend_to_target(x: Tensor, index=index, attention=layer.self_attention) -> Tensor:
                query, key, value = attention.project(x).split(attention.widths, dim=-1)
                shape = self.num_sentences, num_rows, self.num_heads, -1
                self.keys[index][..., new] = key.view(shape).permute(0, 2, 3, 1)
                self.values[index][:, :, new] = value.view(shape).transpose(1, 2)
                keys, values = self.keys[index][..., used], self.values[index][:, :, used]
                return attention.out(attention(query, keys, values, bias))

            def attend_to_memory(x: Tensor, index=index, attention=layer.cross_attention) -> Tensor:
                keys, values = self.memory_keys[index], self.memory_values[index]
                query = attention.project(x)
                return attention.out(attention(query, keys, values, self.memory_bias))

            x = layer.add_and_norm(x, attend_to_target, layer.self_attention_norm)
            x = layer.add_and_norm(x, attend_to_memory, layer.cross_attention_norm)
            x = layer.add_and_norm(x, layer.feed_forward, layer.feed_forward_norm)
        return stack.norm(x)

    def reorder(self, parents: Tensor, kept: Tensor | None = None):
        """Reorder the hypotheses after a step, and remove finished sentences.

        Args:
            parents: Index of the hypothesis that each new hypothesis continues, within its
                sentence, [B', R'].
            kept: Indices of the sentences that stay in the batch, [B']; None if all do.
        """
        if kept is not None:
            self.num_sentences = len(kept)
            for tensors in (self.keys, self.values, self.memory_keys, self.memory_values):
                tensors[:] = [tensor.index_select(0, kept) for tensor in tensors]
            if self.memory_bias is not None:
                bias = self.memory_bias.unflatten(0, (-1, self.num_heads))
                self.memory_bias = bias.index_select(0, kept).flatten(0, 1)
            self.is_visible = self.is_visible.index_select(0, kept)
        # a hypothesis with a score of -inf may have a parent that does not exist, because the first
        # step has one row per sentence
        parents = parents.clamp(max=self.is_visible.shape[1] - 1)
        wide = parents[:, :, None].expand(-1, -1, self.is_visible.shape[2])
        self.is_visible = self.is_visible.gather(1, wide)

    def _self_attention_bias(self) -> Tensor | None:
        # each hypothesis attends to `length` slots, so without further slots nothing is masked
        if self.num_used == self.length:
            return None
        return self._bias_of(self.is_visible[:, :, : self.num_used])

    def _bias_of(self, is_visible: Tensor) -> Tensor:
        bias = is_visible.new_zeros(is_visible.shape, dtype=self.keys[0].dtype)
        bias.masked_fill_(~is_visible, -torch.inf)
        return bias[:, None].expand(-1, self.num_heads, -1, -1).flatten(0, 1)  # [B * h, R, W]

    def _make_room(self, num_rows: int):
        is_alive = self.is_visible[:, :, : self.num_used].any(dim=1)  # [B, W]
        num_alive = int(is_alive.sum(dim=1).max())
        # slots in use come first, in their order
        order = is_alive.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :num_alive]
        num_slots = max(self.first_slots, 2 * (num_alive + num_rows))
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            sizes = keys.shape[:3]
            self.keys[index] = keys.new_zeros(*sizes, num_slots)
            kept = keys.gather(3, order[:, None, None].expand(*sizes, -1))
            self.keys[index][..., :num_alive] = kept
            sizes, width = values.shape[:2], values.shape[3]
            self.values[index] = values.new_zeros(*sizes, num_slots, width)
            kept = values.gather(2, order[:, None, :, None].expand(*sizes, -1, width))
            self.values[index][:, :, :num_alive] = kept
        is_visible = self.is_visible.new_zeros(*self.is_visible.shape[:2], num_slots)
        wide = order[:, None].expand(-1, is_visible.shape[1], -1)
        is_visible[:, :, :num_alive] = self.is_visible.gather(2, wide)
        self.is_visible, self.num_used = is_visible, num_alive


class CapturedDecoding(EngineDecoding):
    """Decoder of the engine whose step is captured as a CUDA graph, and replayed.

    A graph stores the addresses of its tensors, so every replay reads and writes the same tensors.
    The step is captured again when the sizes of these tensors change: when the KV cache is full, or
    when sentences leave the batch.

    Args:
        engine: Packed model.
        memory_keys: Keys of the memory in each layer, [B, h, d_k, S].
        memory_values: Values of the memory in each layer, [B, h, S, d_v].
        memory_bias: 0 for a source token, -inf for padding, [B * h, 1, S]; None without padding.
    """

    first_slots = FIRST_CAPTURED_SLOTS
    # a new capture pays off when half of the sentences leave the batch
    min_finished_share = 0.5
    _replay: Callable[[], None] | None = None

    def step(self, ids: Tensor) -> Tensor:
        """Read the tokens that were added since the last call, and score the next token.

        Args:
            ids: All tokens of each hypothesis, [B, R, T].

        Returns:
            Logits in float32, [B, R, V], which the next call overwrites; in the first call one row
            for each sentence, [B, 1, V].
        """
        # not captured: the first step has one hypothesis per sentence, and may read a prompt of
        # several tokens
        if not self.length:
            return super().step(ids)
        num_rows = ids.shape[1]
        if self.num_used + num_rows > self.is_visible.shape[2]:
            self._make_room(num_rows)
            self._replay = None
        replay = self._replay
        if replay is None:
            self._make_buffers(num_rows)
        self.tokens.copy_(ids[:, :, -1])
        torch.add(self.rows, self.num_used, out=self.new)
        self.num_used += num_rows
        self.length += 1
        positions = self.engine.stacks["decoder"].positions(self.length)
        if positions is not None:
            self.position.copy_(positions[-1])
        if replay is None:
            # `captured` also computes the step once
            self._replay = captured(self._read_into_buffers, self.is_visible.device)
        else:
            replay()
        return self.logits.view(*ids.shape[:2], -1)

    def _make_buffers(self, num_rows: int):
        device = self.is_visible.device
        self.rows = torch.arange(num_rows, device=device)
        self.new = torch.empty_like(self.rows)
        self.own_slots = self._own_slots(num_rows)
        self.tokens = self.rows.new_empty(self.num_sentences, num_rows)
        width = self.engine.stacks["decoder"].embedding.embedding_dim
        self.position = self.keys[0].new_zeros(width)
        size = self.num_sentences * num_rows, self.engine.num_tokens
        self.logits = torch.empty(size, dtype=torch.float32, device=device)

    def _read_into_buffers(self):
        self.is_visible.index_copy_(2, self.new, self.own_slots.expand(self.num_sentences, -1, -1))
        bias = self._bias_of(self.is_visible)
        states = self._states(self.tokens, self.position, self.new, slice(None), bias)
        self.logits.copy_(self.engine.vocabulary(states))

    def reorder(self, parents: Tensor, kept: Tensor | None = None):
        """Reorder the hypotheses after a step, and remove finished sentences.

        Args:
            parents: Index of the hypothesis that each new hypothesis continues, within its
                sentence, [B', R'].
            kept: Indices of the sentences that stay in the batch, [B']; None if all do.
        """
        buffer = self.is_visible
        super().reorder(parents, kept)
        if kept is None and buffer.shape == self.is_visible.shape:
            self.is_visible = buffer.copy_(self.is_visible)
        else:
            self._replay = None


class _Stack:
    """Embedding, positions and final norm of an encoder or decoder."""

    def __init__(self, stack: PreTrainedModel):
        self.embedding = stack.embed_tokens
        self.encoding = stack.positions
        self.norm = stack.norm
        self.scale = math.sqrt(stack.config.d_model)
        self.table: Tensor | None = None

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).mul_(self.scale)  # [rows, d_model]

    def positions(self, length: int) -> Tensor | None:
        """Return the encodings of the first positions, [length, d_model]."""
        config = self.encoding.config
        if config.position_encoding == "none":
            return None
        if config.position_encoding == "learned":
            return self.encoding.table.weight[config.position_offset :][:length]
        # read `self.table` once, because another thread may replace it meanwhile
        table = self.table
        if table is None or len(table) < length:
            nothing = self.embedding.weight.new_zeros(1, 2 * length, config.d_model)
            table = self.table = self.encoding(nothing)[0]
        return table[:length]


class _Tokens:
    """Indices of the non-padding tokens in a padded batch."""

    def __init__(self, attention_mask: Tensor | None, sentences: int, length: int):
        self.num_positions = sentences * length
        self.is_token = self.index = None
        if attention_mask is not None and not bool(attention_mask.all()):
            self.is_token = attention_mask.bool()
            self.index = self.is_token.flatten().nonzero()[:, 0]  # [N]

    def bias(self, num_heads: int, dtype: torch.dtype) -> Tensor | None:
        """Return 0 for a token and -inf for padding, [B * h, 1, S], or None without padding."""
        if self.is_token is None:
            return None
        bias = self.is_token.new_zeros(self.is_token.shape, dtype=dtype)
        bias.masked_fill_(~self.is_token, -torch.inf)
        return bias.repeat_interleave(num_heads, dim=0)[:, None]

    def packed(self, positions: Tensor) -> Tensor:
        """Remove the padding, from [B * S, ...] to [N, ...]."""
        return positions if self.index is None else positions.index_select(0, self.index)

    def padded(self, tokens: Tensor) -> Tensor:
        """Insert zeros in place of the padding, from [N, ...] to [B * S, ...]."""
        if self.index is None:
            return tokens
        positions = tokens.new_zeros(self.num_positions, *tokens.shape[1:])
        return positions.index_copy_(0, self.index, tokens)


def reason_against_engine(model: PreTrainedModel, int8: bool = False) -> str | None:
    """Return the reason why the engine cannot run a model, or None.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`, possibly modified.
        int8: Whether the engine quantizes the linear layers to int8.

    Returns:
        A clause that states the first reason, or None if the engine can run the model.
    """
    return _reason_against_engine(model, computing_modules(model), int8)


def _reason_against_engine(
    model: PreTrainedModel, modules: list[tuple[str, Any, Any]], int8: bool
) -> str | None:
    difference = first_difference(modules) or attention_difference(model)
    if difference is not None:
        return difference
    for name, module, _ in modules:
        if isinstance(module, nn.ModuleList) and not len(module):
            return f"{name} has no layers"
        if isinstance(module, nn.Linear) and module.weight.shape != (
            module.out_features,
            module.in_features,
        ):
            return f"{name} has a weight of another shape than its features"
        # all other modules compute the same in training mode and in evaluation mode
        if module.training and (name == "" or isinstance(module, nn.Dropout) or _is_ours(module)):
            return f"{name or 'the model'} is in training mode"
    for stack in ("encoder", "decoder"):
        layers = getattr(model.model, stack).layers
        attentions = [layer.self_attention for layer in layers]
        if stack == "decoder":
            attentions += [layer.cross_attention for layer in layers]
            if (reason := reason_against_cache(layers)) is not None:
                return reason
        if len({it.q_proj.out_features // it.d_k for it in attentions}) > 1:
            return f"the layers of the {stack} have different numbers of heads"
    device = model.device
    if torch.is_autocast_enabled(device.type) or torch.compiler.is_compiling():
        return "autocast or compilation is active"
    if int8 and device.type != "cpu":
        return f"int8 needs a model on the CPU, got {device}"
    config = model.config
    if config.position_encoding == "learned":
        for stack in (model.get_encoder(), model.get_decoder()):
            if stack.positions.table.num_embeddings < config.max_position_embeddings:
                return (
                    f"the configuration has {config.max_position_embeddings} positions, the table "
                    f"{stack.positions.table.num_embeddings}"
                )
    dtype, dtypes = model.dtype, CPU_DTYPES if device.type == "cpu" else DTYPES
    if dtype not in dtypes:
        names = " or ".join(str(kind).removeprefix("torch.") for kind in dtypes)
        return f"weights on {device.type} must be {names}, got {str(dtype).removeprefix('torch.')}"
    for name, weight in _weights(modules):
        if type(weight) is not nn.Parameter or not weight.numel() or weight.is_meta:
            return f"{name} is not a parameter in memory"
        if weight.device != device or weight.dtype != dtype:
            return f"{name} is {weight.dtype} on {weight.device}, the model {dtype} on {device}"
    return None


def reason_against_cache(layers: Iterable[nn.Module]) -> str | None:
    """Return the reason why a KV cache would mix up the layers of a decoder, or None.

    Args:
        layers: Layers of the decoder in order; attentions without a `layer_idx` are not checked.

    Returns:
        A clause that names the cache indices, or None if each layer has its own index.
    """
    for kind in ("self_attention", "cross_attention"):
        indices = [getattr(getattr(it, kind, None), "layer_idx", None) for it in layers]
        if None not in indices and indices != list(range(len(indices))):
            return f"the layers of the decoder have the cache indices {indices} in {kind}"
    return None


def _is_ours(module: nn.Module) -> bool:
    return not type(module).__module__.startswith(("torch.", "transformers."))


def _weights(modules: list[tuple[str, Any, Any]]) -> Iterator[tuple[str, Tensor]]:
    for name, module, _ in modules:
        for part, weight in vars(module)["_parameters"].items():
            if weight is not None:
                yield f"{name}.{part}", weight


# for each model: the state that its engine was built from, the engine or None, and the reason if it
# is None
Known = tuple[tuple[Any, ...], SearchEngine | None, str | None]
_engines: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()
# several threads may ask for an engine, and packing changes a global setting of torch: the kernel
# library of int8 products
_engines_lock = threading.Lock()


def engine_for(
    model: PreTrainedModel, int8: bool = False
) -> tuple[SearchEngine | None, str | None]:
    """Return the engine of a model; build it if the model is new or has changed.

    Only one engine is kept for each model, so a call that switches int8 on or off builds a new one.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`, possibly modified.
        int8: Whether the engine quantizes the linear layers to int8.

    Returns:
        The engine and None, or None and the reason why the modules must be used.
    """
    modules = computing_modules(model)
    reason = _reason_against_engine(model, modules, int8)
    if reason is not None:
        # otherwise the packed weights of a model that was moved or changed would stay in memory
        forget_engine(model)
        return None, reason
    state = (int8, *_state(modules, int8))
    with _engines_lock:
        known = _engines.get(model)
        if known is None or not _is_equal(known[0], state):
            # free the memory of the old engine first
            known = None
            _engines.pop(model, None)
            engine = SearchEngine(model, Int8Linear if int8 else PackedLinear)
            reason = probe(engine, model, int8)
            known = _engines[model] = state, None if reason else engine, reason
    return known[1:]


def forget_engine(model: nn.Module):
    """Free the memory of a model's engine.

    Args:
        model: Any model.
    """
    _engines.pop(model, None)


@torch.no_grad()
def probe(engine: SearchEngine, model: PreTrainedModel, int8: bool = False) -> str | None:
    """Compare the logits of engine and modules on a small batch.

    The probe has padding and two beams per sentence; it swaps the beams and removes a sentence. For
    an int8 engine, two engines are compared with the modules: one with the model's own linear
    layers, within the tolerance of unquantized weights, and the int8 engine within that of int8.

    Args:
        engine: Engine of the model.
        model: A `VanillaTransformerForConditionalGeneration`.
        int8: Whether the engine's linear layers are quantized to int8.

    Returns:
        A clause that states the deviation, or None if the logits agree.
    """
    config, num_steps = model.config, 4
    longest = max(PROBE_LENGTHS)
    if config.position_encoding == "learned":
        longest = min(longest, config.max_position_embeddings)
        if longest < num_steps:
            return f"the model has {longest} positions, too few for a probe of the engine"
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(PROBE_LENGTHS).clamp(max=longest)
    vocab_size = model.get_input_embeddings().num_embeddings
    source = torch.randint(vocab_size, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    target = torch.randint(vocab_size, (len(lengths), 2, num_steps), generator=generator)
    # both beams of a sentence begin with the same token, as the prompt of a search
    target[:, 1, 0] = target[:, 0, 0]
    batch = [tensor.to(model.device) for tensor in (source, mask, target)]
    expected = _logits_of_modules(model, *batch)
    # below the precision "highest", torch may compute float32 products in bfloat16 or TF32
    is_exact = model.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    comparisons = [(engine, "", FLOAT32_TOLERANCE if is_exact else HALF_TOLERANCE, is_exact)]
    if int8:
        plain = SearchEngine(model, PlainLinear)
        comparisons = [(plain, *comparisons[0][1:]), (engine, " in int8", INT8_TOLERANCE, False)]
    for one, name, tolerance, is_exact in comparisons:
        difference = _difference(_logits_of_engine(one, *batch), expected, is_exact)
        if not difference <= tolerance:
            return (
                f"the logits of the engine{name} differ from those of the model's modules by "
                f"{difference:.2g} standard deviations (allowed: {tolerance:g})"
            )
    return None


def _difference(found: Tensor, expected: Tensor, is_exact: bool) -> float:
    """Return the largest deviation if `is_exact`, else the root mean square of the deviations."""
    is_finite = expected.isfinite()
    if not is_finite.any() or not torch.equal(is_finite, found.isfinite()):
        return math.inf
    apart = deviations(found, expected, expected, is_exact=is_exact)[is_finite]
    return float(apart.max() if is_exact else apart.square().mean().sqrt())


def deviations(
    found: Tensor,
    expected: Tensor,
    logits: Tensor,
    tokens: Tensor | None = None,
    is_exact: bool = True,
) -> Tensor:
    """Return the deviations of logits from the expected logits, in units of standard deviations.

    If `is_exact`, each token has a unit of its own: the standard deviation of its logits over all
    positions, which a bias of the token does not change. A unit is at least the median of these
    standard deviations over the tokens whose logits vary. Rounding errors grow with the size of the
    numbers, so a unit is also at least 1/300 of the median size of the logits of these tokens. If
    not `is_exact`, all tokens have the same unit: the standard deviation of the logits of these
    tokens together. In both cases, the unit is at least 1/1000 of the expected number.

    Args:
        found: Logits or log-probabilities of the model to check, [..., V].
        expected: Logits or log-probabilities of the model to compare with, [..., V].
        logits: Logits of the model to compare with, [..., V].
        tokens: Token of each number; None if the last dimension is the whole vocabulary.
        is_exact: Whether only rounding in float32 may separate the two models; false for products
            in lower precision and for quantized weights.

    Returns:
        Deviations, in the shape of `found`.
    """
    rows = logits.flatten(0, -2)
    spread, size = rows.std(dim=0), rows.abs().mean(dim=0)
    is_ordinary = spread > 1e-5 * size
    if not is_ordinary.any():
        units = rows[rows.isfinite()].std().expand_as(spread)
    elif is_exact:
        unit = torch.maximum(spread[is_ordinary].median(), size[is_ordinary].median() / 300)
        # the standard deviation of logits that are -inf is NaN
        units = torch.maximum(unit, spread.nan_to_num(0.0))
    else:
        units = rows[:, is_ordinary].std().expand_as(spread)
    units = units.clamp(min=torch.finfo(torch.float32).tiny)
    units = units if tokens is None else units[tokens]
    return (found - expected).abs() / torch.maximum(units, expected.abs() / 1000)


def _logits_of_engine(engine: SearchEngine, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    """Score the tokens of the probe, [B, 2, 4], step by step as a search does; [rows, V]."""
    decoding = engine.begin(engine.encode(source, mask), mask)
    first = decoding.step(target[:, :, :1])  # [B, 1, V]
    decoding.reorder(torch.zeros_like(target[:, :, 0]))
    # a copy, because the next step may overwrite the logits
    second = decoding.step(target[:, :, :2]).clone()  # [B, 2, V]
    # swap the beams, continue each with the tokens of the other, and remove the last sentence
    kept = torch.arange(len(target) - 1, device=target.device)
    decoding.reorder(torch.tensor([1, 0], device=target.device).expand(len(kept), -1), kept)
    changed = _changed(target)[:-1]
    third = decoding.step(changed[:, :, :3]).clone()  # [B - 1, 2, V]
    decoding.reorder(torch.tensor([0, 1], device=target.device).expand(len(kept), -1))
    fourth = decoding.step(changed)  # [B - 1, 2, V]
    return torch.cat([part.flatten(0, 1) for part in (first, second, third, fourth)])


def _logits_of_modules(
    model: PreTrainedModel, source: Tensor, mask: Tensor, target: Tensor
) -> Tensor:
    """Score the same tokens with two forward passes of the model's modules; [rows, V]."""
    memory = model.get_encoder()(source, mask).last_hidden_state.repeat_interleave(2, dim=0)
    steps = []
    for ids in (target[:, :, :2], _changed(target)):
        logits = model(
            encoder_outputs=(memory,),
            attention_mask=mask.repeat_interleave(2, dim=0),
            decoder_input_ids=ids.flatten(0, 1),
            use_cache=False,
        ).logits
        steps.append(logits.unflatten(0, (len(target), 2)).float())  # [B, 2, T, V]
    parts = steps[0][:, :1, 0], steps[0][:, :, 1], steps[1][:-1, :, 2], steps[1][:-1, :, 3]
    return torch.cat([part.flatten(0, 1) for part in parts])


def _changed(target: Tensor) -> Tensor:
    """Swap the beams of the probe after two tokens."""
    return torch.cat((target[:, :, :2].flip(1), target[:, :, 2:]), dim=2)


def _state(modules: list[tuple[str, Any, Any]], int8: bool) -> tuple[list[Any], list[Any], Tensor]:
    """Return all that an engine depends on: modules, settings, and the state of the weights.

    The state of a weight is its address, its version and its checksum. Checksums detect writes
    through `.data` or NumPy, which do not change the version of a tensor. Embeddings and norms are
    left out, and large weights have no checksum, because the engine reads them from the model.
    """
    objects: list[Any] = []
    addresses: list[Any] = []
    sums = []
    for name, module, _ in modules:
        own = vars(module)
        # without the model itself, whose name is "": a value of the weak dictionary would keep its
        # own key alive
        objects += [module] if name else []
        objects += [own[setting] for setting in SETTINGS if setting in own]
        if type(module).__name__ == "PositionalEncoding":
            config = own["config"]
            objects += [config.position_encoding, config.position_base, config.position_layout]
            objects += [config.position_offset, config.d_model, config._attn_implementation]
        is_linear = isinstance(module, nn.Linear)
        is_in_place = is_linear and not int8 and is_used_in_place(module.weight)
        for weight in own["_parameters"].values() if is_linear else ():
            if weight is None:
                continue
            # tensors that were created in inference mode have no version
            version = None if weight.is_inference() else weight._version
            addresses.append((weight.data_ptr(), weight.shape, weight.stride(), version))
            addresses.append((weight.device, weight.dtype))
            if is_in_place:
                continue
            # a sum in half precision would round small changes away
            numbers = weight.detach().flatten().float()
            rest = len(numbers) % NUMBERS_PER_SUM
            rows = numbers[rest:].view(-1, NUMBERS_PER_SUM)
            sums += [numbers[:rest], torch.mv(rows, _random_vector(weight.device))]
    # compared as bits, because NaN is not equal to itself
    return objects, addresses, torch.cat(sums or [torch.empty(0)]).view(torch.int32)


def _is_equal(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if before[0] != now[0] or len(before[1]) != len(now[1]) or before[2] != now[2]:
        return False
    for old, new in zip(before[1], now[1], strict=True):
        if old is not new and (isinstance(old, nn.Module) or old != new):
            return False
    return torch.equal(before[3], now[3])


@functools.cache
def _random_vector(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    vector = torch.rand(NUMBERS_PER_SUM, generator=generator, dtype=torch.float32, device="cpu")
    return (vector + 0.5).to(device)


__all__ = [
    "CapturedDecoding",
    "EngineDecoding",
    "SearchEngine",
    "deviations",
    "engine_for",
    "forget_engine",
    "reason_against_cache",
    "reason_against_engine",
]
