"""ONNX graphs of encoder and decoder that output all values that the page shows. Figure 1.

Shapes: B prefixes of one sentence, S source tokens, T target tokens, h heads, d_k and d_v widths of
a head's keys and values, d_ff inner width, V tokens in the vocabulary.

The name of a value has its stack, its layer and its box in figure 1, as in `encoder.0.self.query`.
"""

from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn
from torch.export import Dim

from ..comparison import refuse_difference
from ..deviations_vanilla_transformer import without_bias
from ..export.check import DIFFERS
from ..export.onnx import run_graph, trace_module
from ..export.parts import position_table
from ..modeling_vanilla_transformer import (
    FeedForward,
    MultiHeadAttention,
    VanillaTransformerDecoder,
    VanillaTransformerEncoder,
    VanillaTransformerForConditionalGeneration,
    scaled_dot_product_attention,
)
from .weights import share_weights

ENCODER_FILE = "encoder.onnx"
DECODER_FILE = "decoder.onnx"
# sizes of the traced batch: all differ and none is 1, so that the tracer treats each as dynamic
NUM_PREFIXES, SOURCE_LENGTH, TARGET_LENGTH = 2, 5, 3


class TracedStack(nn.Module):
    """Base class of both graphs: computes with the model's modules and records each value by name.

    Args:
        model: Model to explain, in evaluation mode.
        stack: Encoder or decoder of the model.
        name: "encoder" or "decoder".
        num_positions: Number of positions in the table: tokens of the longest sentence.
    """

    table: Tensor

    def __init__(
        self,
        model: VanillaTransformerForConditionalGeneration,
        stack: VanillaTransformerEncoder | VanillaTransformerDecoder,
        name: str,
        num_positions: int,
    ):
        super().__init__()
        self.model = model
        self.stack = stack
        self.name = name
        # a table replaces the sines, which the model computes in float64: browsers have no float64
        self.register_buffer("table", position_table(stack, num_positions))
        self.values: dict[str, Tensor] = {}

    def record_embeddings(self, input_ids: Tensor) -> Tensor:
        """Record embeddings, positions and their sum. Sections 3.4 and 3.5.

        Args:
            input_ids: Tokens, [B, T].

        Returns:
            The sum, [B, T, d_model].
        """
        embeddings = self.stack._embed(input_ids, None)
        positions = self.table[: input_ids.shape[1]]
        x = embeddings + positions
        box_values = {"embeddings": embeddings, "positions": positions, "input": x}
        self.values |= {f"{self.name}.{box}": value for box, value in box_values.items()}
        return x

    def record_attention(
        self,
        prefix: str,
        attention: MultiHeadAttention,
        norm: nn.Module,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Record an attention with its addition and norm. Sections 3.2 and 3.1.

        Args:
            prefix: Prefix of the names of the values.
            attention: Attention of the model.
            norm: Norm after the attention.
            x: Source of the queries, [B, T, d_model].
            memory: Source of keys and values, [B, K, d_model].
            mask: 0 where attention is allowed, very low where not, [T, K], or None.

        Returns:
            LayerNorm(x + Sublayer(x)), [B, T, d_model].
        """
        query = attention._heads(attention.q_proj(x), attention.d_k)
        key = attention._heads(attention.k_proj(memory), attention.d_k)
        value = attention._heads(attention.v_proj(memory), attention.d_v)
        scores = query @ key.transpose(-2, -1) * attention.scaling
        context, weights = scaled_dot_product_attention(query, key, value, mask)
        output = attention.out_proj(context.transpose(1, 2).reshape(*x.shape[:-1], -1))
        normalized = norm(x + output)
        box_values = {
            "query": query,
            "key": key,
            "value": value,
            "scores": scores,
            "weights": weights,
            "context": context,
            "output": output,
            "norm": normalized,
        }
        self.values |= {f"{prefix}.{box}": box_value for box, box_value in box_values.items()}
        return normalized

    def record_feed_forward(
        self, prefix: str, network: FeedForward, norm: nn.Module, x: Tensor
    ) -> Tensor:
        """Record a feed-forward network with its addition and norm. Section 3.3.

        Args:
            prefix: Prefix of the names of the values.
            network: Network of the model.
            norm: Norm after the network.
            x: Residual stream, [B, T, d_model].

        Returns:
            LayerNorm(x + Sublayer(x)), [B, T, d_model].
        """
        inner = network.activation(network.fc1(x))
        output = network.fc2(inner)
        normalized = norm(x + output)
        self.values |= {f"{prefix}.inner": inner, f"{prefix}.output": output}
        self.values[f"{prefix}.norm"] = normalized
        return normalized


class TracedEncoder(TracedStack):
    """Graph of the encoder, from the tokens of one sentence to the memory."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """Encode a sentence.

        Args:
            input_ids: Source tokens, [1, S].

        Returns:
            The values in the order of `values`; the last one is the memory, [1, S, d_model].
        """
        self.values = {}
        x = self.record_embeddings(input_ids)
        layer: Any
        for number, layer in enumerate(self.stack.layers):
            prefix = f"encoder.{number}"
            norm = layer.self_attention_norm
            x = self.record_attention(f"{prefix}.self", layer.self_attention, norm, x, x, None)
            x = self.record_feed_forward(
                f"{prefix}.ff", layer.feed_forward, layer.feed_forward_norm, x
            )
        return tuple(self.values.values())


class TracedDecoder(TracedStack):
    """Graph of the decoder without a KV cache, from target prefixes and the memory to logits."""

    def forward(self, input_ids: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        """Decode prefixes of the same length.

        Args:
            input_ids: Target tokens with the start token, [B, T].
            memory: Output of the encoder, repeated for each prefix, [B, S, d_model].

        Returns:
            The values in the order of `values`; the last one is the logits, [B, T, V].
        """
        self.values = {}
        x = self.record_embeddings(input_ids)
        positions = torch.arange(input_ids.shape[1])
        is_future = positions[None] > positions[:, None]
        mask = torch.where(is_future, torch.finfo(torch.float32).min, 0.0)
        layer: Any
        for number, layer in enumerate(self.stack.layers):
            prefix = f"decoder.{number}"
            norm = layer.self_attention_norm
            x = self.record_attention(f"{prefix}.self", layer.self_attention, norm, x, x, mask)
            norm = layer.cross_attention_norm
            x = self.record_attention(
                f"{prefix}.cross", layer.cross_attention, norm, x, memory, None
            )
            x = self.record_feed_forward(
                f"{prefix}.ff", layer.feed_forward, layer.feed_forward_norm, x
            )
        self.values["logits"] = self.model.lm_head(x)
        return tuple(self.values.values())


@torch.no_grad()
def save_graphs(
    model: VanillaTransformerForConditionalGeneration, folder: Path, num_positions: int
) -> dict[str, list[str]]:
    """Save both graphs with their weights, and compare their logits with those of the model.

    Args:
        model: Model to explain, in float32 on the CPU and in evaluation mode.
        folder: Output folder.
        num_positions: Number of positions in the table: tokens of the longest sentence.

    Returns:
        Names of the outputs of each graph, by file name.

    Raises:
        ValueError: If the graphs compute other logits than the model.
    """
    source_length, target_length = Dim("source"), Dim("target")
    num_prefixes = Dim("prefixes")
    source_ids = torch.zeros(1, SOURCE_LENGTH, dtype=torch.long)
    encoder = TracedEncoder(model, model.get_encoder(), "encoder", num_positions)
    memory = encoder(source_ids)[-1].repeat(NUM_PREFIXES, 1, 1)
    target_ids = torch.zeros(NUM_PREFIXES, TARGET_LENGTH, dtype=torch.long)
    encoder_inputs: dict[str, Any] = {"input_ids": source_ids}
    decoder_inputs: dict[str, Any] = {"input_ids": target_ids, "memory": memory}
    decoder = TracedDecoder(model, model.get_decoder(), "decoder", num_positions)
    # the first run, as that of the encoder above, gives the names of the values
    decoder(**decoder_inputs)
    output_names = {ENCODER_FILE: [*encoder.values], DECODER_FILE: [*decoder.values]}
    encoder_axes = {"input_ids": {1: source_length}}
    decoder_axes = {
        "input_ids": {0: num_prefixes, 1: target_length},
        "memory": {0: num_prefixes, 1: source_length},
    }
    for file_name, graph, inputs, axes in (
        (ENCODER_FILE, encoder, encoder_inputs, encoder_axes),
        (DECODER_FILE, decoder, decoder_inputs, decoder_axes),
    ):
        trace_module(graph, inputs, output_names[file_name], axes).save(folder / file_name)
    share_weights([folder / file_name for file_name in output_names])
    _refuse_other_logits(model, folder, num_positions)
    return output_names


def _refuse_other_logits(
    model: VanillaTransformerForConditionalGeneration, folder: Path, num_positions: int
):
    """Refuse graphs that compute other logits than the model, on sentences of two lengths."""
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / file_name, providers=["CPUExecutionProvider"])
        for file_name in (ENCODER_FILE, DECODER_FILE)
    )
    generator = torch.Generator().manual_seed(0)
    for length in (2, min(7, num_positions)):
        source_ids, target_ids = (
            torch.randint(model.config.vocab_size, (1, length), generator=generator)
            for _ in range(2)
        )
        model_logits = model(
            input_ids=source_ids,
            attention_mask=torch.ones_like(source_ids),
            decoder_input_ids=target_ids,
            decoder_attention_mask=torch.ones_like(target_ids),
            use_cache=False,
        ).logits
        encoder_outputs = run_graph(encoder, {"input_ids": source_ids.numpy()})
        memory = [*encoder_outputs.values()][-1]
        decoder_outputs = run_graph(decoder, {"input_ids": target_ids.numpy(), "memory": memory})
        graph_logits = torch.from_numpy(decoder_outputs["logits"])
        unit_logits = without_bias(model_logits, model.lm_head.bias)
        refuse_difference(graph_logits, model_logits, unit_logits, DIFFERS.format("ONNX Runtime"))
