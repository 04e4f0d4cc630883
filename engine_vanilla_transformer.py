"""The model's arithmetic laid out for search: the same numbers, sooner.

`generate` takes it wherever it finds the same translations as the model's own modules, which stay
the reference. Weights are packed once and watched: what changes them is seen before the next
search. On a GPU, where to begin a kernel takes longer than its arithmetic, it is the number of
kernels that is small, and the host waits for the device once a step.

Shapes: B sentences, R rows of each (1 or beams), S source positions, N source tokens without
padding, W slots of the self-attention cache, h heads, C candidates, V tokens in the vocabulary.
"""

import functools
import math
import platform
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

# rows that products are packed for, and numbers of rows that may come, to try what is packed with
PACKED_ROWS = 128
TRIED_ROWS = (1, 4, 7, 60, 300)
# numbers of rows beyond it are made multiples of it, where a kernel is made for each number
ROWS_TOGETHER = 8
# the likeliest tokens are looked for among the best of so many groups of the vocabulary
TOKENS_PER_GROUP = 64
SMALLEST_GROUPED_VOCABULARY = 4096
# scores of attention in memory at a time
MOST_SCORES = 2**25
# slots for keys and values at first
FIRST_SLOTS = 64
# beyond this an exponential of float32 needs the largest logit taken off
LARGEST_SAFE_LOGIT = 60.0
HIGHEST_INT8 = 127
SMALLEST_SCALE = 1e-12
# kernels in whole numbers: the sooner one for few outputs of all rows together, and for more
INT8_KERNELS = ("fbgemm", "onednn")
FEW_OUTPUTS = 2**19

# a processor's packed products are of one type
CPU_DTYPES = (torch.float32,)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN_MODULES = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList)
ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")
ATTENTION_KERNELS = ("eager", "sdpa", "sdpa_float32")
# where hooks come from that do nothing to a search: what is left after outputs of layers were asked
# for, and what lets gradients begin at the embeddings
HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils")

_engines: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# every thread that searches asks for one, and torch packs for one kernel at a time
_engines_lock = threading.Lock()


class FloatProduct:
    """x W^T + b for one or several linear layers side by side, with the weights laid out once.

    Args:
        layers: Of one input; their outputs come one after the other.
        then_relu: Whether what is below zero becomes zero.
    """

    def __init__(self, layers: Sequence[nn.Linear], then_relu: bool = False):
        weight, self.bias = side_by_side(layers)
        self.then_relu = then_relu
        is_on_cpu = weight.device.type == "cpu"
        self.library = packing_library() if is_on_cpu else None
        if not is_on_cpu:
            self.weight = weight.t()
            return
        if self.library is None:
            self.weight = weight.t().contiguous()
            return
        if self.library == "onednn":
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
            return
        self.weight = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_ROWS)
        # of the weight itself the product reads the shape only
        self.shape_of_weight = weight
        if len(layers) > 1:
            weight.untyped_storage().resize_(0)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: [rows, inputs].

        Returns:
            [rows, outputs of all layers].
        """
        if self.library == "onednn":
            return onednn_product(x, self.weight, self.bias, self.then_relu)
        if self.library == "mkl":
            product = packed_product(x, self.weight, self.shape_of_weight, self.bias)
        elif self.bias is None:
            product = x @ self.weight
        else:
            product = torch.addmm(self.bias, x, self.weight)
        return product.relu_() if self.then_relu else product


class Int8Product:
    """The same in whole numbers: weights scaled for each output, x for all rows together.

    Args:
        layers: Of one input; their outputs come one after the other.
        then_relu: Whether what is below zero becomes zero.
    """

    def __init__(self, layers: Sequence[nn.Linear], then_relu: bool = False):
        weight, bias = side_by_side(layers)
        scales = weight.abs().amax(dim=1).clamp(min=SMALLEST_SCALE) / HIGHEST_INT8
        zeros = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():
            # the kernels take no other tensors, though these are to go
            warnings.filterwarnings("ignore", ".*quantize_per_channel", UserWarning)
            levels = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.num_outputs = len(weight)
        before = torch.backends.quantized.engine
        known = torch.backends.quantized.supported_engines
        self.weights = []
        try:
            for kernel in [name for name in INT8_KERNELS if name in known] or [before]:
                torch.backends.quantized.engine = kernel
                self.weights.append(torch.ops.quantized.linear_prepack(levels, bias))
        finally:
            torch.backends.quantized.engine = before
        kernels = torch.ops.quantized
        kernel = kernels.linear_relu_dynamic if then_relu else kernels.linear_dynamic
        self.multiply = kernel.default
        # older processors add pairs of products in 16 bits
        self.in_seven_bits = not torch.cpu._is_vnni_supported()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: [rows, inputs].

        Returns:
            [rows, outputs of all layers].
        """
        few, many = self.weights[0], self.weights[-1]
        weight = few if len(x) * self.num_outputs <= FEW_OUTPUTS else many
        return self.multiply(x, weight, self.in_seven_bits)


class PackedAttention:
    """One attention's products and sizes.

    Args:
        attention: A `MultiHeadAttention`.
        product: `FloatProduct` or `Int8Product`.
        reads_memory: Whether keys and values are made elsewhere, for all layers at once.
    """

    def __init__(self, attention: nn.Module, product: type, reads_memory: bool = False):
        self.d_k, self.d_v = attention.d_k, attention.d_v
        self.num_heads = attention.q_proj.out_features // self.d_k
        self.scaling = attention.scaling
        projections = [attention.q_proj]
        if not reads_memory:
            projections += [attention.k_proj, attention.v_proj]
        self.project = product(projections)
        self.out = product([attention.out_proj])
        self.widths = [self.num_heads * width for width in (self.d_k, self.d_k, self.d_v)]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """Equation (1) for the rows of each sentence together.

        Args:
            query: [B * R, h * d_k].
            keys: [B, h, d_k, W].
            values: [B, h, W, d_v].
            bias: 0 where attention is allowed, -inf where not, [B * h, 1 or R, W], of the
                query's type.

        Returns:
            [B * R, h * d_v].
        """
        sentences, heads, _, slots = keys.shape
        query = query.view(sentences, -1, heads, self.d_k).transpose(1, 2)  # [B, h, R, d_k]
        query = query.reshape(sentences * heads, -1, self.d_k)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        # of long texts some rows at a time, or their scores would be most of the memory
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
    """An encoder or a decoder layer; norms and activation are the model's own modules.

    Args:
        layer: An `EncoderLayer` or a `DecoderLayer`.
        product: `FloatProduct` or `Int8Product`.
        is_decoder: Which of the two.
    """

    def __init__(self, layer: nn.Module, product: type, is_decoder: bool):
        self.norm_first = layer.norm_first
        self.self_attention = PackedAttention(layer.self_attention, product)
        self.self_attention_norm = layer.self_attention_norm
        if is_decoder:
            self.cross_attention = PackedAttention(layer.cross_attention, product, True)
            self.cross_attention_norm = layer.cross_attention_norm
        self.activation = layer.feed_forward.activation
        is_relu = type(self.activation) is nn.ReLU
        if is_relu:
            self.activation = nn.Identity()
        self.fc1 = product([layer.feed_forward.fc1], then_relu=is_relu)
        self.fc2 = product([layer.feed_forward.fc2])
        self.feed_forward_norm = layer.feed_forward_norm

    def feed_forward(self, x: Tensor) -> Tensor:
        """Equation (2).

        Args:
            x: [rows, d_model].

        Returns:
            [rows, d_model].
        """
        return self.fc2(self.activation(self.fc1(x)))

    def add_and_norm(
        self, x: Tensor, sublayer: Callable[[Tensor], Tensor], norm: nn.LayerNorm
    ) -> Tensor:
        """As the model's, without dropout.

        Args:
            x: Residual stream, [rows, d_model].
            sublayer: Makes a new tensor of the same shape.
            norm: The normalization that belongs to the sub-layer.

        Returns:
            Residual stream, [rows, d_model].
        """
        if self.norm_first:
            return sublayer(norm(x)).add_(x)
        return norm(sublayer(x).add_(x))


class SearchEngine:
    """A model's packed weights, and what is computed with them.

    Args:
        model: A `VanillaTransformerForConditionalGeneration` of which `why_not` has nothing to say.
        int8: Whether products are in whole numbers.
    """

    def __init__(self, model: nn.Module, int8: bool = False):
        product = Int8Product if int8 else FloatProduct
        encoder, decoder = model.get_encoder(), model.get_decoder()
        self.d_model = model.config.d_model
        self.encoder_layers = [PackedLayer(layer, product, False) for layer in encoder.layers]
        self.decoder_layers = [PackedLayer(layer, product, True) for layer in decoder.layers]
        self.stacks = {"encoder": _Stack(encoder), "decoder": _Stack(decoder)}
        attentions = [layer.cross_attention for layer in decoder.layers]
        self.memory_projection = product(
            [linear for attention in attentions for linear in (attention.k_proj, attention.v_proj)]
        )
        self.vocabulary = product([model.lm_head])
        self.vocab_size = model.config.vocab_size

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The memory of a batch, computed for tokens only.

        Args:
            input_ids: Source tokens, [B, S].
            attention_mask: 1 for a token, 0 for padding, [B, S]; all tokens where None.

        Returns:
            The memory, 0 where there is padding, [B, S, d_model].
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
                projected = tokens.padded(attention.project(x))  # [B * S, 3 * h * width]
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

    def begin(self, memory: Tensor, attention_mask: Tensor | None) -> "Decoding":
        """Make ready to write translations.

        Args:
            memory: What `encode` or the model's encoder gave, [B, S, d_model].
            attention_mask: 1 for a source token, 0 for padding, [B, S]; all tokens where None.

        Returns:
            A state at which nothing is written yet.
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
        return Decoding(self, keys, values, tokens.bias(heads, memory.dtype))

    def logits(self, states: Tensor) -> Tensor:
        """Score every token.

        Args:
            states: Last states of the decoder, [rows, d_model].

        Returns:
            In float32, [rows, V].
        """
        return self.vocabulary(states).float()

    def likeliest(
        self, states: Tensor, count: int, suppressed: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """The most probable tokens of each row, by exact search.

        Args:
            states: Last states of the decoder, [rows, d_model].
            count: C, how many.
            suppressed: Tokens that are none, though their probability counts.

        Returns:
            Log-probabilities and tokens, [rows, C] each, the likeliest first.
        """
        logits = self.logits(states)
        if not suppressed:
            best, tokens = largest(logits, count)
            return best - log_sum_exp_(logits, best[:, :1]), tokens
        index = torch.tensor(suppressed, device=logits.device)
        kept = logits[:, index]
        logits[:, index] = -torch.inf
        best, tokens = largest(logits, count)
        logits[:, index] = kept
        highest = torch.cat((best[:, :1], kept), dim=1).amax(dim=1, keepdim=True)
        return best - log_sum_exp_(logits, highest), tokens


class Decoding:
    """Translations as far as they are written: keys and values, and whose they are.

    Each step writes its keys and values into new slots of its sentence, which stay where they are.
    Beams that change places take their lists of slots with them; slots on no list are given back
    when room is needed.

    Args:
        engine: The packed model.
        memory_keys: Of each layer, [B, h, d_k, S].
        memory_values: Of each layer, [B, h, S, d_v].
        memory_bias: 0 for a source token, -inf for padding, [B * h, 1, S]; None for no padding.
    """

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
            self.keys.append(memory.new_empty(*sizes, attention.d_k, FIRST_SLOTS))
            self.values.append(memory.new_empty(*sizes, FIRST_SLOTS, attention.d_v))
        shape = self.num_sentences, 1, FIRST_SLOTS
        # which slots the next token of each row may look at
        self.is_past = torch.zeros(shape, dtype=torch.bool, device=memory_keys[0].device)

    def step(self, tokens: Tensor) -> Tensor:
        """Write one token to each row.

        Args:
            tokens: [B, R]; R is 1, or the number of rows that `follow` has made.

        Returns:
            The decoder's last states, [B * R, d_model].
        """
        num_rows = tokens.shape[1]
        if self.num_used + num_rows > self.is_past.shape[2]:
            self._make_room(num_rows)
        new = slice(self.num_used, self.num_used + num_rows)
        self.is_past[:, :, new] = torch.eye(num_rows, dtype=torch.bool, device=self.is_past.device)
        self.num_used = new.stop
        self.length += 1
        bias = self._self_attention_bias()

        stack = self.engine.stacks["decoder"]
        x = stack.embed(tokens.flatten())  # [B * R, d_model]
        positions = stack.positions(self.length)
        if positions is not None:
            x += positions[-1]
        for index, layer in enumerate(self.layers):

            def attend_to_target(x: Tensor, index=index, attention=layer.self_attention) -> Tensor:
                query, key, value = attention.project(x).split(attention.widths, dim=-1)
                shape = self.num_sentences, num_rows, self.num_heads, -1
                self.keys[index][..., new] = key.view(shape).permute(0, 2, 3, 1)
                self.values[index][:, :, new] = value.view(shape).transpose(1, 2)
                keys = self.keys[index][..., : self.num_used]
                values = self.values[index][:, :, : self.num_used]
                return attention.out(attention(query, keys, values, bias))

            def attend_to_memory(x: Tensor, index=index, attention=layer.cross_attention) -> Tensor:
                keys, values = self.memory_keys[index], self.memory_values[index]
                query = attention.project(x)
                return attention.out(attention(query, keys, values, self.memory_bias))

            x = layer.add_and_norm(x, attend_to_target, layer.self_attention_norm)
            x = layer.add_and_norm(x, attend_to_memory, layer.cross_attention_norm)
            x = layer.add_and_norm(x, layer.feed_forward, layer.feed_forward_norm)
        return stack.norm(x)

    def follow(self, parents: Tensor, stays: Tensor | None = None):
        """Let each row go on from one of the rows that are; sentences may leave.

        Args:
            parents: The row of its sentence that each row continues, [B', R'].
            stays: The sentences that are still searched, [B']; None for all of them.
        """
        if stays is not None:
            self.num_sentences = len(stays)
            for tensors in (self.keys, self.values, self.memory_keys, self.memory_values):
                tensors[:] = [tensor.index_select(0, stays) for tensor in tensors]
            if self.memory_bias is not None:
                bias = self.memory_bias.unflatten(0, (-1, self.num_heads))
                self.memory_bias = bias.index_select(0, stays).flatten(0, 1)
            self.is_past = self.is_past.index_select(0, stays)
        # where there is one row yet, hypotheses without hope may name others
        parents = parents.clamp(max=self.is_past.shape[1] - 1)
        wide = parents[:, :, None].expand(-1, -1, self.is_past.shape[2])
        self.is_past = self.is_past.gather(1, wide)

    def _self_attention_bias(self) -> Tensor | None:
        is_past = self.is_past[:, :, : self.num_used]  # [B, R, W]
        if self.num_used == self.length:
            return None
        bias = is_past.new_zeros(is_past.shape, dtype=self.keys[0].dtype)
        bias.masked_fill_(~is_past, -torch.inf)
        return bias[:, None].expand(-1, self.num_heads, -1, -1).flatten(0, 1)  # [B * h, R, W]

    def _make_room(self, num_rows: int):
        is_alive = self.is_past[:, :, : self.num_used].any(dim=1)  # [B, W]
        num_alive = int(is_alive.sum(dim=1).max())
        # those alive come first, in their order
        order = is_alive.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :num_alive]
        num_slots = max(FIRST_SLOTS, 2 * (num_alive + num_rows))
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            sizes = keys.shape[:3]
            self.keys[index] = keys.new_empty(*sizes, num_slots)
            kept = keys.gather(3, order[:, None, None].expand(*sizes, -1))
            self.keys[index][..., :num_alive] = kept
            sizes, width = values.shape[:2], values.shape[3]
            self.values[index] = values.new_empty(*sizes, num_slots, width)
            kept = values.gather(2, order[:, None, :, None].expand(*sizes, -1, width))
            self.values[index][:, :, :num_alive] = kept
        is_past = self.is_past.new_zeros(*self.is_past.shape[:2], num_slots)
        wide = order[:, None].expand(-1, is_past.shape[1], -1)
        is_past[:, :, :num_alive] = self.is_past.gather(2, wide)
        self.is_past, self.num_used = is_past, num_alive


class _Stack:
    """What stands before and after the layers of a stack."""

    def __init__(self, stack: nn.Module):
        self.embedding = stack.embed_tokens
        self.encoding = stack.positions
        self.norm = stack.norm
        self.scale = math.sqrt(stack.config.d_model)
        self.table = None

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).mul_(self.scale)  # [rows, d_model]

    def positions(self, length: int) -> Tensor | None:
        """What is added at each of the first positions, [length, d_model]."""
        config = self.encoding.config
        if config.position_encoding == "none":
            return None
        if config.position_encoding == "learned":
            return self.encoding.table.weight[config.position_offset :][:length]
        # another thread may write its own here in between
        table = self.table
        if table is None or len(table) < length:
            nothing = self.embedding.weight.new_zeros(1, 2 * length, config.d_model)
            table = self.table = self.encoding(nothing)[0]
        return table[:length]


class _Tokens:
    """Where the tokens of a padded batch are."""

    def __init__(self, attention_mask: Tensor | None, sentences: int, length: int):
        self.num_places = sentences * length
        self.is_token = self.index = None
        if attention_mask is not None and not bool(attention_mask.all()):
            self.is_token = attention_mask.bool()
            self.index = self.is_token.flatten().nonzero()[:, 0]  # [N]

    def bias(self, num_heads: int, dtype: torch.dtype) -> Tensor | None:
        """0 for a token, -inf for padding, [B * h, 1, S]; None for no padding."""
        if self.is_token is None:
            return None
        bias = self.is_token.new_zeros(self.is_token.shape, dtype=dtype)
        bias.masked_fill_(~self.is_token, -torch.inf)
        return bias.repeat_interleave(num_heads, dim=0)[:, None]

    def packed(self, places: Tensor) -> Tensor:
        """[B * S, ...] to [N, ...]."""
        return places if self.index is None else places.index_select(0, self.index)

    def padded(self, tokens: Tensor) -> Tensor:
        """[N, ...] to [B * S, ...], zeros where there is padding."""
        if self.index is None:
            return tokens
        places = tokens.new_zeros(self.num_places, *tokens.shape[1:])
        return places.index_copy_(0, self.index, tokens)


def packed_product(x: Tensor, packed_weight: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b from weights that MKL has laid out.

    Args:
        x: [rows, inputs].
        packed_weight: The weight as `_mkl_reorder_linear_weight` gave it.
        weight: [outputs, inputs]; only its shape is read.
        bias: [outputs], or None.

    Returns:
        [rows, outputs].
    """
    # the number of rows given is the one that says: take what is packed
    return torch.ops.mkl._mkl_linear.default(x, packed_weight, weight, bias, x.shape[0])


def onednn_product(
    x: Tensor, packed_weight: Tensor, bias: Tensor | None, then_relu: bool
) -> Tensor:
    """The same from weights that oneDNN has laid out.

    Args:
        x: [rows, inputs].
        packed_weight: The weight as `_reorder_linear_weight` gave it.
        bias: [outputs], or None.
        then_relu: Whether what is below zero becomes zero.

    Returns:
        [rows, outputs].
    """
    rows = len(x)
    # it makes a kernel for each number of rows, and there should not be many
    if rows > ROWS_TOGETHER and rows % ROWS_TOGETHER:
        x = nn.functional.pad(x, (0, 0, 0, -rows % ROWS_TOGETHER))
    then = "relu" if then_relu else "none"
    product = torch.ops.mkldnn._linear_pointwise.default(x, packed_weight, bias, then, [], "")
    return product[:rows]


@functools.cache
def packing_library() -> str | None:
    """Which library multiplies with packed weights here, of those that do it right.

    MKL has its best kernels for Intel's processors only; on others oneDNN is the faster. Both are
    there for torch's own use and promise little, so they are tried, once in a process: MKL names
    the number of rows that it packs for.

    Returns:
        "mkl", "onednn", or None where neither is there or right for all numbers of rows.
    """
    return next(filter(_multiplies, ("mkl",) if is_intel() else ("onednn", "mkl")), None)


def is_intel() -> bool:
    """Whether the processor is one of Intel's, as far as the system says.

    Returns:
        Whether it is.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return "GenuineIntel" in file.read(2**12)
    except OSError:
        return "Intel" in platform.processor()


def _multiplies(library: str) -> bool:
    if not getattr(torch.backends, "mkl" if library == "mkl" else "mkldnn").is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(150, 70, generator=generator, dtype=torch.float32)
    try:
        if library == "mkl":
            packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_ROWS)
            multiply = functools.partial(
                packed_product, packed_weight=packed, weight=weight, bias=None
            )
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
            multiply = functools.partial(
                onednn_product, packed_weight=packed, bias=None, then_relu=False
            )
        for num_rows in TRIED_ROWS:
            x = torch.randn(num_rows, weight.shape[1], generator=generator, dtype=torch.float32)
            if not torch.allclose(multiply(x), x @ weight.T, rtol=1e-4, atol=1e-4):
                return False
    except (AttributeError, RuntimeError):
        # another torch has no such operators, or refuses what they are given
        return False
    return True


def side_by_side(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix and one bias for several layers of one input.

    Args:
        layers: All with a bias, or none.

    Returns:
        The weights [outputs, inputs], the layer's own where it is alone, and the biases [outputs].
    """
    if len(layers) == 1:
        bias = layers[0].bias
        return layers[0].weight.detach(), None if bias is None else bias.detach()
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if layers[0].bias is None:
        return weight, None
    return weight, torch.cat([layer.bias.detach() for layer in layers])


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of each row: the same as `topk`, in one pass over what is much.

    No more groups than `count` can hold one of the `count` largest.

    Args:
        scores: [rows, V].
        count: C, how many.

    Returns:
        Their scores and places, [rows, C] each, the largest first.
    """
    rows, size = scores.shape
    num_groups = size // TOKENS_PER_GROUP
    if size < SMALLEST_GROUPED_VOCABULARY or 4 * count > num_groups:
        best = scores.topk(count, dim=1)
        return best.values, best.indices
    rest = num_groups * TOKENS_PER_GROUP
    # a group is what stands below each other
    grouped = scores[:, :rest].unflatten(1, (TOKENS_PER_GROUP, num_groups))
    groups = grouped.amax(dim=1).topk(count, dim=1).indices  # [rows, C]
    wide = groups[:, None].expand(-1, TOKENS_PER_GROUP, -1)
    found = torch.cat((grouped.gather(2, wide).flatten(1), scores[:, rest:]), dim=1)
    best = found.topk(count, dim=1)
    steps = torch.arange(0, rest, num_groups, device=scores.device)[:, None]
    places = (groups[:, None] + steps).flatten(1)  # [rows, C * group]
    last = torch.arange(rest, size, device=scores.device).expand(rows, -1)
    return best.values, torch.cat((places, last), dim=1).gather(1, best.indices)


def exp_(exponents: Tensor) -> Tensor:
    """Replace numbers by their exponentials, by the faster way.

    Args:
        exponents: Of any shape.

    Returns:
        The same tensor.
    """
    # on a processor torch's exp is MKL's, slow on one that is not Intel's, and its exp2 is not
    if exponents.device.type == "cpu":
        return exponents.mul_(math.log2(math.e)).exp2_()
    return exponents.exp_()


def log_sum_exp_(logits: Tensor, highest: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials of each row; the logits are used up.

    Args:
        logits: [rows, V].
        highest: About the largest of each row, [rows, 1].

    Returns:
        [rows, 1].
    """
    is_on_cpu = logits.device.type == "cpu"
    # to ask a GPU is to wait for it
    if is_on_cpu and bool((highest.abs() < LARGEST_SAFE_LOGIT).all()):
        return exp_(logits).sum(dim=1, keepdim=True).log_()
    return logits.logsumexp(dim=1, keepdim=True)


def why_not(model: nn.Module, int8: bool = False) -> str | None:
    """What about a model the engine could not follow.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`, or what was made of one.
        int8: Whether products are to be in whole numbers.

    Returns:
        A clause that says what; None where there is nothing.
    """
    kernel = model.config._attn_implementation
    if kernel not in ATTENTION_KERNELS:
        return f"attention by {' or '.join(ATTENTION_KERNELS)}, got {kernel}"
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return "no hooks on modules, got one"
    home = sys.modules[type(model.get_encoder().layers[0]).__module__]
    for module in model.modules():
        kind = type(module)
        if "forward" in vars(module) or module._forward_pre_hooks:
            return "no hooks on modules, got one"
        hooks = module._forward_hooks.values()
        if any(hook.__module__ not in HARMLESS_HOOKS for hook in hooks):
            return "no hooks on modules, got one"
        is_ours = getattr(home, kind.__name__, None) is kind
        # what takes a plain module's place in training says so
        is_plain = kind in PLAIN_MODULES or getattr(kind, "is_plain_in_evaluation", False)
        if not (is_plain or is_ours or kind.__module__ in ACTIVATION_MODULES):
            return f"plain modules, got {kind.__name__} of {kind.__module__}"
        # others do the same in either mode, and new ones are made in training
        if module.training and (is_ours or isinstance(module, nn.Dropout)):
            return f"a model in evaluation mode, got its {kind.__name__} in training"
    device = model.device
    if device.type == "meta":
        return "weights in memory, got none"
    if torch.is_autocast_enabled(device.type) or torch.compiler.is_compiling():
        return "neither autocast nor compilation, got one"
    if int8 and device.type != "cpu":
        return f"a model on the CPU, got {device}"
    dtypes = CPU_DTYPES if device.type == "cpu" else DTYPES
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    for parameter in model.parameters():
        if type(parameter) is not nn.Parameter or parameter.dtype not in dtypes:
            return f"plain weights in {names}, got {parameter.dtype}"
        if parameter.device != device:
            return f"a model on one device, got {device} and {parameter.device}"
        if parameter.dtype != model.dtype:
            return f"weights of one type, got {model.dtype} and {parameter.dtype}"
    return None


def engine_for(model: nn.Module, int8: bool = False) -> SearchEngine:
    """A model's engine, made where there is none of the weights as they are now.

    One is kept: to search in turns in whole numbers and not is to make it anew each time.

    Args:
        model: Of which `why_not` has nothing to say.
        int8: Whether products are in whole numbers.

    Returns:
        The engine.
    """
    state = (int8, *_fingerprint(model))
    with _engines_lock:
        known = _engines.get(model)
        if known is None or known[0][:-1] != state[:-1] or not torch.equal(known[0][-1], state[-1]):
            # the old one's memory first
            known = None
            _engines.pop(model, None)
            known = _engines[model] = state, SearchEngine(model, int8)
    return known[1]


def forget_engine(model: nn.Module):
    """Give back the memory of a model's engine.

    Args:
        model: Any.
    """
    _engines.pop(model, None)


def _fingerprint(model: nn.Module) -> tuple:
    """What is no weight, where the weights are, how often written, and numbers of what they are.

    Only the numbers see what is written through `.data` or other names of the same memory.
    """
    config = model.config
    settings = [config.position_encoding, config.position_base, config.position_layout]
    settings.append(config.position_offset)
    for layer in (*model.get_encoder().layers, *model.get_decoder().layers):
        settings += [layer.norm_first, layer.feed_forward.activation, layer.self_attention.scaling]
        if hasattr(layer, "cross_attention"):
            settings.append(layer.cross_attention.scaling)
    places, numbers = [], []
    for parameter in model.parameters():
        weight = parameter.detach()
        # of what is made for inference alone nobody counts it
        version = None if parameter.is_inference() else parameter._version
        where = weight.device, weight.dtype
        places.append((weight.data_ptr(), weight.shape, weight.stride(), version, *where))
        if weight.dim() > 1:
            weight = torch.mv(weight, _random_vector(weight.shape[1], *where))
        numbers.append(weight.float())
    # by their bits: not a number is equal to itself
    return tuple(settings), tuple(places), torch.cat(numbers).view(torch.int32)


@functools.cache
def _random_vector(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    vector = torch.rand(size, generator=generator, dtype=torch.float32, device="cpu") + 0.5
    return vector.to(device, dtype)


__all__ = ["Decoding", "SearchEngine", "engine_for", "forget_engine", "why_not"]
