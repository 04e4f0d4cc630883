"""Inference engine: the computations of the released model, with weights packed for search.

The engine computes the same logits as the model's modules, up to rounding, but faster: weights are
packed once, padding is left out, and beams are reordered without a copy of the KV cache.
`engine_checks_vanilla_transformer` decides which models it may compute.

Shapes: B sentences, R hypotheses of a sentence (1 or the number of beams), S source positions, N
source tokens without padding, W slots of the self-attention cache, h heads, V tokens in the
vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .checks_vanilla_transformer import check_ids
from .cores_vanilla_transformer import shared_cores
from .kernels_vanilla_transformer import (
    ROW_MULTIPLE,
    PackedLinear,
    captured,
    keep_freed_memory,
)
from .search_vanilla_transformer import Decoding

# maximum number of attention scores in memory at a time
MOST_SCORES = 2**25
# initial number of slots of the self-attention cache, for plain and for captured steps. A captured
# step reads all slots, but must be captured again when the cache grows
FIRST_SLOTS, FIRST_CAPTURED_SLOTS = 64, 256
# maximum number of logits that are computed before tokens are selected from them, 24 MiB. More
# logits would leave the cache of the CPU before they are read
MOST_LOGITS = 6 * 2**20
# devices on which a step is captured once as a graph and then replayed, because launching its
# kernels takes longer than their work
CAPTURING_DEVICES = ("cuda",)


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
        self.project_output = linear_class([attention.out_proj])
        self.projection_widths = [
            self.num_heads * width for width in (self.d_k, self.d_k, self.d_v)
        ]

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
        num_sentences, num_heads, _, num_slots = keys.shape
        if len(query) > num_sentences:
            query = query.view(num_sentences, -1, num_heads, self.d_k).transpose(1, 2)
        query = query.reshape(num_sentences * num_heads, -1, self.d_k)  # [B * h, R, d_k]
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        # in long texts, the scores of all queries together may not fit into memory
        queries_per_part = max(1, MOST_SCORES // (num_sentences * num_heads * num_slots))
        contexts = []
        for start in range(0, query.shape[1], queries_per_part):
            query_part = query[:, start : start + queries_per_part]
            if bias is None:
                scores = torch.bmm(query_part, keys).mul_(self.scaling)  # [B * h, rows, W]
            else:
                bias_part = bias
                if bias.shape[1] > 1:
                    bias_part = bias[:, start : start + queries_per_part]
                scores = torch.baddbmm(bias_part, query_part, keys, alpha=self.scaling)
            contexts.append(torch.bmm(scores.softmax(dim=-1), values))  # [B * h, rows, d_v]
        # [B * h, R, d_v]
        context = contexts[0] if len(contexts) == 1 else torch.cat(contexts, dim=1)
        if context.shape[1] > 1:
            context = context.view(num_sentences, num_heads, -1, self.d_v).transpose(1, 2)
        return context.reshape(-1, num_heads * self.d_v)


class PackedLayer:
    """Encoder or decoder layer with packed weights; the norms read the model's own weights.

    Args:
        layer: An `EncoderLayer` or a `DecoderLayer`.
        linear_class: Class that computes the linear layers, such as `PackedLinear`.
        is_decoder: Whether the layer is a `DecoderLayer`.
    """

    def __init__(self, layer: Any, linear_class: type, is_decoder: bool):
        self.norm_first = layer.norm_first
        self.self_attention = PackedAttention(layer.self_attention, linear_class)
        self.self_attention_norm = _norm_on_device(layer.self_attention_norm)
        if is_decoder:
            self.cross_attention = PackedAttention(layer.cross_attention, linear_class, True)
            self.cross_attention_norm = _norm_on_device(layer.cross_attention_norm)
        self.activation = layer.feed_forward.activation
        is_relu = type(self.activation) is nn.ReLU
        if is_relu:
            self.activation = nn.Identity()
        self.fc1 = linear_class([layer.feed_forward.fc1], then_relu=is_relu)
        self.fc2 = linear_class([layer.feed_forward.fc2])
        self.feed_forward_norm = _norm_on_device(layer.feed_forward_norm)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Compute equation (2).

        Args:
            x: Residual stream, [rows, d_model].

        Returns:
            Result, [rows, d_model].
        """
        return self.fc2(self.activation(self.fc1(x)))

    def add_and_norm(
        self, x: Tensor, sublayer: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]
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


def _norm_on_device(norm: nn.LayerNorm | nn.Identity) -> Callable[[Tensor], Tensor]:
    """Return a norm that, on a CPU, computes in float32 with weights of any dtype."""
    if isinstance(norm, nn.Identity) or norm.weight is None:
        return norm
    if norm.weight.device.type != "cpu":
        return norm

    def norm_in_float32(x: Tensor) -> Tensor:
        # the weights are read in each call, because the model may change them
        weight: Tensor = norm.weight
        bias: Tensor | None = norm.bias
        if weight.dtype != torch.float32:
            weight, bias = weight.float(), None if bias is None else bias.float()
        return torch.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)

    return norm_in_float32


class SearchEngine:
    """Inference engine of one model: its packed weights, and encoder and decoder that use them.

    On a CPU everything but the products of the linear layers is computed in float32.

    Args:
        model: A `VanillaTransformerForConditionalGeneration` for which `reason_against_engine`
            returns None.
        linear_class: Class that computes the linear layers, such as `PackedLinear`.
    """

    def __init__(self, model: PreTrainedModel, linear_class: type = PackedLinear):
        keep_freed_memory()
        encoder, decoder = model.get_encoder(), model.get_decoder()
        self.encoder_layers = [PackedLayer(layer, linear_class, False) for layer in encoder.layers]
        self.decoder_layers = [PackedLayer(layer, linear_class, True) for layer in decoder.layers]
        self.stacks = {"encoder": _Stack(encoder), "decoder": _Stack(decoder)}
        cross_attentions = [layer.cross_attention for layer in decoder.layers]
        self.memory_projection = linear_class(
            [
                linear
                for attention in cross_attentions
                for linear in (attention.k_proj, attention.v_proj)
            ]
        )
        self.memory_width = cross_attentions[0].k_proj.in_features
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
        num_sentences, length = input_ids.shape
        source_tokens = _Tokens(attention_mask, num_sentences, length)
        stack = self.stacks["encoder"]
        ids = source_tokens.remove_padding(input_ids.flatten())  # [N]
        positions = stack.positions(length)  # [S, d_model]
        x = stack.embed(ids)
        if positions is not None:
            x += source_tokens.remove_padding(positions.repeat(num_sentences, 1))
        for layer in self.encoder_layers:

            def attend_to_source(x: Tensor, attention=layer.self_attention) -> Tensor:
                # [B * S, h * (2 * d_k + d_v)]
                projected = source_tokens.insert_padding(attention.project(x))
                query, *keys_and_values = projected.split(attention.projection_widths, dim=-1)
                keys, values = (
                    part.reshape(num_sentences, length, attention.num_heads, -1)
                    for part in keys_and_values
                )
                keys, values = keys.permute(0, 2, 3, 1), values.transpose(1, 2)
                context = attention(
                    query, keys, values, source_tokens.bias(attention.num_heads, x.dtype)
                )
                return attention.project_output(source_tokens.remove_padding(context))

            x = layer.add_and_norm(x, attend_to_source, layer.self_attention_norm)
            x = layer.add_and_norm(x, layer.feed_forward, layer.feed_forward_norm)
        return source_tokens.insert_padding(stack.norm(x)).view(num_sentences, length, -1)

    def begin(self, memory: Tensor, attention_mask: Tensor | None) -> "EngineDecoding":
        """Return the decoder for a batch, before its first step.

        Args:
            memory: Output of `encode` or of the model's encoder, [B, S, d_model].
            attention_mask: 1 for a source token, 0 for padding, [B, S]; all are tokens if None.

        Returns:
            Decoder with an empty self-attention cache.

        Raises:
            ValueError: If the memory has another width than the decoder reads.
        """
        num_sentences, length, width = memory.shape
        # the packed products do not check the sizes of their inputs
        if width != self.memory_width:
            raise ValueError(
                f"encoder_outputs must have {self.memory_width} numbers for each token, "
                f"got {width}."
            )
        # the model's own encoder may have computed in half precision
        memory = memory.to(self.stacks["decoder"].dtype)
        source_tokens = _Tokens(attention_mask, num_sentences, length)
        projected = self.memory_projection(source_tokens.remove_padding(memory.reshape(-1, width)))
        padded_projections = source_tokens.insert_padding(projected).view(num_sentences, length, -1)
        widths = [
            width
            for layer in self.decoder_layers
            for width in layer.cross_attention.projection_widths[1:]
        ]
        num_heads = self.decoder_layers[0].cross_attention.num_heads
        layer_parts = [
            part.unflatten(-1, (num_heads, -1)) for part in padded_projections.split(widths, dim=-1)
        ]
        # [B, h, d_k, S] and [B, h, S, d_v]
        keys = [part.permute(0, 2, 3, 1).contiguous() for part in layer_parts[::2]]
        values = [part.transpose(1, 2).contiguous() for part in layer_parts[1::2]]
        captures_steps = memory.device.type in CAPTURING_DEVICES
        decoding_class = CapturedDecoding if captures_steps else EngineDecoding
        return decoding_class(self, keys, values, source_tokens.bias(num_heads, memory.dtype))


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
        self.num_tokens = engine.num_tokens
        self.num_sentences = memory_keys[0].shape[0]
        self.num_heads = memory_keys[0].shape[1]
        self.length = self.num_used_slots = 0
        self.keys, self.values = [], []
        for layer, layer_memory_keys in zip(self.layers, memory_keys, strict=True):
            sizes = self.num_sentences, self.num_heads
            attention = layer.self_attention
            self.keys.append(layer_memory_keys.new_zeros(*sizes, attention.d_k, self.first_slots))
            self.values.append(layer_memory_keys.new_zeros(*sizes, self.first_slots, attention.d_v))
        mask_shape = self.num_sentences, 1, self.first_slots
        # slots that each hypothesis may attend to, [B, R, W]
        self.is_visible = torch.zeros(mask_shape, dtype=torch.bool, device=memory_keys[0].device)

    def step(self, ids: Tensor) -> Tensor:
        """Read the tokens that were added since the last call, and score the next token.

        Args:
            ids: All tokens of each hypothesis, [B, R, T].

        Returns:
            Logits in float32, [B, R, V]; in the first call one row for each sentence, [B, 1, V].
        """
        states = self._read(ids)
        return self.engine.vocabulary(states.flatten(0, 1)).float().unflatten(0, states.shape[:2])

    def select(
        self, ids: Tensor, choose: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Read tokens as `step` does, and choose from the logits of the next token, part by part.

        Args:
            ids: All tokens of each hypothesis, [B, R, T].
            choose: Function of the logits of some rows, [rows, V], which it may overwrite. It
                returns scores and tokens, [rows, C] each.

        Returns:
            Scores and tokens, [B, R, C] each; in the first call [B, 1, C].
        """
        states = self._read(ids)
        shape, states = states.shape[:2], states.flatten(0, 1)
        num_parts = math.ceil(len(states) * self.engine.num_tokens / MOST_LOGITS)
        rows_per_part = math.ceil(len(states) / num_parts / ROW_MULTIPLE) * ROW_MULTIPLE
        parts = [
            choose(self.engine.vocabulary(part).float()) for part in states.split(rows_per_part)
        ]
        scores, tokens = map(torch.cat, zip(*parts, strict=True))
        return scores.unflatten(0, shape), tokens.unflatten(0, shape)

    def _read(self, ids: Tensor) -> Tensor:
        """Read the tokens that were added since the last call; return states, [B, R, d_model]."""
        shared_cores.update()
        # in the first call all rows of a sentence are equal, so only one of them is read
        read_ids = ids if self.length else ids[:, :1]
        for position in range(self.length, ids.shape[2]):
            states = self._read_tokens(read_ids[:, :, position])  # [B * R, d_model]
        return states.unflatten(0, read_ids.shape[:2])

    def _read_tokens(self, tokens: Tensor) -> Tensor:
        """Read one token of each row, [B, R], and return the decoder's states, [B * R, d_model]."""
        num_rows = tokens.shape[1]
        if self.num_used_slots + num_rows > self.is_visible.shape[2]:
            self._make_room(num_rows)
        new_slots = slice(self.num_used_slots, self.num_used_slots + num_rows)
        self.is_visible[:, :, new_slots] = self._visible_new_slots(num_rows)
        self.num_used_slots = new_slots.stop
        self.length += 1
        positions = self.engine.stacks["decoder"].positions(self.length)
        return self._compute_states(
            tokens,
            None if positions is None else positions[-1],
            new_slots,
            slice(self.num_used_slots),
            self._self_attention_bias(),
        )

    def _visible_new_slots(self, num_rows: int) -> Tensor:
        """Return which of the new slots each row may attend to, [R, R]."""
        return torch.eye(num_rows, dtype=torch.bool, device=self.is_visible.device)

    def _compute_states(
        self,
        tokens: Tensor,
        position: Tensor | None,
        new_slots: slice | Tensor,
        used_slots: slice,
        bias: Tensor | None,
    ) -> Tensor:
        """Compute the states of one token of each row.

        Args:
            tokens: Tokens, [B, R].
            position: Positional encoding of the tokens, [d_model], or None.
            new_slots: Slots to write the keys and values to, [R].
            used_slots: The W slots that attention reads.
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
                projected = attention.project(x)
                # `split` of a tensor first checks its arguments in Python
                query, key, value = torch.split_with_sizes(
                    projected, attention.projection_widths, dim=-1
                )
                shape = self.num_sentences, num_rows, self.num_heads, -1
                self.keys[index][..., new_slots] = key.view(shape).permute(0, 2, 3, 1)
                self.values[index][:, :, new_slots] = value.view(shape).transpose(1, 2)
                keys = self.keys[index][..., used_slots]
                values = self.values[index][:, :, used_slots]
                return attention.project_output(attention(query, keys, values, bias))

            def attend_to_memory(x: Tensor, index=index, attention=layer.cross_attention) -> Tensor:
                keys, values = self.memory_keys[index], self.memory_values[index]
                query = attention.project(x)
                return attention.project_output(attention(query, keys, values, self.memory_bias))

            x = layer.add_and_norm(x, attend_to_target, layer.self_attention_norm)
            x = layer.add_and_norm(x, attend_to_memory, layer.cross_attention_norm)
            x = layer.add_and_norm(x, layer.feed_forward, layer.feed_forward_norm)
        return stack.norm(x)

    def reorder(self, parents: Tensor, kept_sentences: Tensor | None = None):
        """Reorder the hypotheses after a step, and remove finished sentences.

        Args:
            parents: Index of the hypothesis that each new hypothesis continues, within its
                sentence, [B', R'].
            kept_sentences: Indices of the sentences that stay in the batch, [B']; None if all do.
        """
        if kept_sentences is not None:
            self.num_sentences = len(kept_sentences)
            for tensors in (self.keys, self.values, self.memory_keys, self.memory_values):
                tensors[:] = [tensor.index_select(0, kept_sentences) for tensor in tensors]
            if self.memory_bias is not None:
                bias = self.memory_bias.unflatten(0, (-1, self.num_heads))
                self.memory_bias = bias.index_select(0, kept_sentences).flatten(0, 1)
            self.is_visible = self.is_visible.index_select(0, kept_sentences)
        if parents.shape[1] == 1:
            # the only hypothesis of a sentence continues itself
            return
        # a hypothesis with a score of -inf may have a parent that does not exist, because the first
        # step has one row per sentence
        parents = parents.clamp(max=self.is_visible.shape[1] - 1)
        parent_rows = parents[:, :, None].expand(-1, -1, self.is_visible.shape[2])
        self.is_visible = self.is_visible.gather(1, parent_rows)

    def _self_attention_bias(self) -> Tensor | None:
        # each hypothesis attends to `length` slots, so without further slots nothing is masked
        if self.num_used_slots == self.length:
            return None
        return self._attention_bias(self.is_visible[:, :, : self.num_used_slots])

    def _attention_bias(self, is_visible: Tensor) -> Tensor:
        bias = is_visible.new_zeros(is_visible.shape, dtype=self.keys[0].dtype)
        bias.masked_fill_(~is_visible, -torch.inf)
        return bias[:, None].expand(-1, self.num_heads, -1, -1).flatten(0, 1)  # [B * h, R, W]

    def _make_room(self, num_rows: int):
        is_used = self.is_visible[:, :, : self.num_used_slots].any(dim=1)  # [B, W]
        num_kept_slots = int(is_used.sum(dim=1).max())
        # slots in use come first, in their order
        slot_order = is_used.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        slot_order = slot_order[:, :num_kept_slots]
        num_slots = max(self.first_slots, 2 * (num_kept_slots + num_rows))
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            sizes = keys.shape[:3]
            self.keys[index] = keys.new_zeros(*sizes, num_slots)
            kept_keys = keys.gather(3, slot_order[:, None, None].expand(*sizes, -1))
            self.keys[index][..., :num_kept_slots] = kept_keys
            sizes, width = values.shape[:2], values.shape[3]
            self.values[index] = values.new_zeros(*sizes, num_slots, width)
            kept_values = values.gather(2, slot_order[:, None, :, None].expand(*sizes, -1, width))
            self.values[index][:, :, :num_kept_slots] = kept_values
        is_visible = self.is_visible.new_zeros(*self.is_visible.shape[:2], num_slots)
        visible_order = slot_order[:, None].expand(-1, is_visible.shape[1], -1)
        is_visible[:, :, :num_kept_slots] = self.is_visible.gather(2, visible_order)
        self.is_visible, self.num_used_slots = is_visible, num_kept_slots


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

    is_captured = True
    first_slots = FIRST_CAPTURED_SLOTS
    # a new capture pays off when half of the sentences leave the batch
    min_finished_share = 0.5
    _replay: Callable[[], None] | None = None
    # a captured step computes all logits
    select = Decoding.select

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Compute once, and capture the work as a CUDA graph.

        Args:
            compute: Function that reads and writes the same existing tensors in each call, and
                never waits for the device.

        Returns:
            Function that repeats the work.
        """
        return captured(compute, self.is_visible.device)

    def step(self, ids: Tensor) -> Tensor:
        """Read the tokens that were added since the last call, and score the next token.

        Args:
            ids: All tokens of each hypothesis, [B, R, T].

        Returns:
            Logits in float32, [B, R, V]; the next call overwrites them and returns the same tensor,
            if it repeats the captured step. In the first call one row for each sentence, [B, 1, V].
        """
        # the first step is not captured, because it has one hypothesis per sentence, and may read a
        # prompt of several tokens
        if not self.length:
            return super().step(ids)
        num_rows = ids.shape[1]
        if self.num_used_slots + num_rows > self.is_visible.shape[2]:
            self._make_room(num_rows)
            self._replay = None
        replay = self._replay
        if replay is None:
            self._make_buffers(num_rows)
        self.tokens.copy_(ids[:, :, -1])
        torch.add(self.row_indices, self.num_used_slots, out=self.new_slots)
        self.num_used_slots += num_rows
        self.length += 1
        positions = self.engine.stacks["decoder"].positions(self.length)
        if positions is not None:
            self.position.copy_(positions[-1])
        if replay is None:
            # `captured` also computes the step once
            self._replay = self.capture(self._read_into_buffers)
        else:
            replay()
        return self.logits

    def _make_buffers(self, num_rows: int):
        device = self.is_visible.device
        self.row_indices = torch.arange(num_rows, device=device)
        self.new_slots = torch.empty_like(self.row_indices)
        self.visible_new_slots = self._visible_new_slots(num_rows)
        self.tokens = self.row_indices.new_empty(self.num_sentences, num_rows)
        d_model = self.engine.stacks["decoder"].embedding.embedding_dim
        self.position = self.keys[0].new_zeros(d_model)
        logits_shape = self.num_sentences, num_rows, self.engine.num_tokens
        self.logits = torch.empty(logits_shape, dtype=torch.float32, device=device)

    def _read_into_buffers(self):
        self.is_visible.index_copy_(
            2, self.new_slots, self.visible_new_slots.expand(self.num_sentences, -1, -1)
        )
        bias = self._attention_bias(self.is_visible)
        states = self._compute_states(self.tokens, self.position, self.new_slots, slice(None), bias)
        self.logits.copy_(self.engine.vocabulary(states).view_as(self.logits))

    def reorder(self, parents: Tensor, kept_sentences: Tensor | None = None):
        """Reorder the hypotheses after a step, and remove finished sentences.

        Args:
            parents: Index of the hypothesis that each new hypothesis continues, within its
                sentence, [B', R'].
            kept_sentences: Indices of the sentences that stay in the batch, [B']; None if all do.
        """
        mask_buffer = self.is_visible
        super().reorder(parents, kept_sentences)
        if kept_sentences is not None or mask_buffer.shape != self.is_visible.shape:
            self._replay = None
        elif mask_buffer is not self.is_visible:
            self.is_visible = mask_buffer.copy_(self.is_visible)


class _Stack:
    """Embedding, positions and final norm of an encoder or decoder."""

    def __init__(self, stack: PreTrainedModel):
        self.embedding = stack.embed_tokens
        self.position_module = stack.positions
        self.norm = _norm_on_device(stack.norm)
        # dtype of the residual stream
        self.dtype = torch.float32 if stack.device.type == "cpu" else stack.dtype
        self.embedding_scale = math.sqrt(stack.config.d_model)
        self.position_table: Tensor | None = None

    def embed(self, ids: Tensor) -> Tensor:
        try:
            embedded = self.embedding(ids)
        except IndexError:
            # a changed output projection may have more tokens than the embedding
            check_ids("token ids", ids, self.embedding.num_embeddings)
            raise
        return embedded.to(self.dtype).mul_(self.embedding_scale)  # [rows, d_model]

    def positions(self, length: int) -> Tensor | None:
        """Return the encodings of the first positions, [length, d_model], or None."""
        config = self.position_module.config
        if config.position_encoding == "none":
            return None
        if config.position_encoding == "learned":
            table = self.position_module.table.weight[config.position_offset :][:length]
            return table.to(self.dtype)
        # read `self.position_table` once, because another thread may replace it meanwhile
        position_table = self.position_table
        if position_table is None or len(position_table) < length:
            placeholder = self.embedding.weight.new_zeros(
                1, 2 * length, config.d_model, dtype=self.dtype
            )
            position_table = self.position_table = self.position_module(placeholder)[0]
        return position_table[:length]


class _Tokens:
    """Indices of the non-padding tokens in a padded batch."""

    def __init__(self, attention_mask: Tensor | None, num_sentences: int, length: int):
        self.num_positions = num_sentences * length
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

    def remove_padding(self, positions: Tensor) -> Tensor:
        """Remove the padding, from [B * S, ...] to [N, ...]."""
        return positions if self.index is None else positions.index_select(0, self.index)

    def insert_padding(self, tokens: Tensor) -> Tensor:
        """Insert zeros in place of the padding, from [N, ...] to [B * S, ...]."""
        if self.index is None:
            return tokens
        positions = tokens.new_zeros(self.num_positions, *tokens.shape[1:])
        return positions.index_copy_(0, self.index, tokens)
