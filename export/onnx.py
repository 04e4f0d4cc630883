"""Export to ONNX: encoder, decoder, and decoder with KV cache, in the files that optimum expects.

Shapes: B sentences, S source positions, T target positions, P cached target positions, h heads,
d_k and d_v widths of a head's keys and values, V tokens in the vocabulary.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

# imported here so that a missing onnxscript is an error before the export starts
import onnxscript  # noqa: F401
import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedTokenizerBase,
)

from ..atomic_files import atomic_folder
from ..comparison import SOURCE_LENGTHS, batch_to_compare, refuse_difference
from ..decoding_vanilla_transformer import CACHE_NAME, layers_without_cache
from ..deviations_vanilla_transformer import without_bias
from ..generation_vanilla_transformer import output_of_encoder
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .check import DIFFERS
from .marian import marian_config, marian_generation_config
from .parts import save_tokenizer, with_search_ids

ENCODER_FILE = "encoder_model.onnx"
DECODER_FILE = "decoder_model.onnx"
DECODER_WITH_PAST_FILE = "decoder_with_past_model.onnx"
# sizes of the traced batch: all differ and none is 1, so that the tracer treats each as dynamic
SIZES = {"sentences": 2, "source": 5, "target": 3}


@torch.no_grad()
def to_onnx(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
):
    """Export a model as three ONNX graphs, with Marian's configuration and the tokenizer.

    `encoder_model.onnx` takes `input_ids` and `attention_mask`, and returns `last_hidden_state`.
    `decoder_model.onnx` takes `input_ids` [B, T], `encoder_hidden_states` and
    `encoder_attention_mask`. The decoder returns `logits` [B, T, V], and the KV cache of each
    layer for target and source: `present.0.decoder.key` [B, h, T, d_k] and so on.
    `decoder_with_past_model.onnx` takes one new token, `input_ids` [B, 1],
    `encoder_attention_mask`, and the KV cache as `past_key_values.0.decoder.key` [B, h, P, d_k]
    and so on. The decoder returns `logits` [B, 1, V], and the KV cache of the target, one position
    longer.

    `config.json` declares a Marian model, because optimum supports Marian. The graphs compute what
    the given model computes.

    Args:
        model: Model to export.
        tokenizer: Tokenizer of the model.
        folder: Output folder; created if it does not exist.

    Raises:
        ValueError: If the graphs compute other logits than the model.
    """
    model = with_search_ids(copy.deepcopy(model).eval().float().cpu())
    with atomic_folder(folder) as unfinished:
        for name, program in trace_graphs(model).items():
            program.save(unfinished / name)
        save_description(model, unfinished)
        save_tokenizer(tokenizer, unfinished)
        files = [unfinished / name for name in (ENCODER_FILE, DECODER_FILE, DECODER_WITH_PAST_FILE)]
        check_graph_logits(model, *files)


def trace_graphs(
    model: VanillaTransformerForConditionalGeneration,
    with_past: "type[DecoderWithPastGraph] | None" = None,
) -> dict[str, Any]:
    """Trace the three graphs of a model.

    Args:
        model: Model to export, in evaluation mode.
        with_past: Class of the decoder for later steps; `DecoderWithPastGraph` if None.

    Returns:
        An `ONNXProgram` of torch for each file name.
    """
    batch_size, source_length, target_length = Dim("batch_size"), Dim("source"), Dim("target")
    source_ids = torch.full((SIZES["sentences"], SIZES["source"]), 0)
    mask = torch.ones_like(source_ids)
    mask[1:, -1] = 0
    encoder = EncoderGraph(model)
    source_axes = {0: batch_size, 1: source_length}
    inputs: dict[str, Any] = {"input_ids": source_ids, "attention_mask": mask}
    programs = {
        ENCODER_FILE: trace_module(
            encoder, inputs, ["last_hidden_state"], dict.fromkeys(inputs, source_axes)
        )
    }

    decoder = DecoderGraph(model)
    inputs = {
        "encoder_attention_mask": mask,
        "input_ids": source_ids[:, : SIZES["target"]],
        "encoder_hidden_states": encoder(source_ids, mask),
    }
    axes: dict[str, Any] = dict.fromkeys(inputs, source_axes) | {
        "input_ids": {0: batch_size, 1: target_length}
    }
    layer_cache_names = [
        f"{stack}.{part}" for stack in ("decoder", "encoder") for part in ("key", "value")
    ]
    present_names = [
        f"present.{layer}.{name}"
        for layer in range(model.config.decoder_layers)
        for name in layer_cache_names
    ]
    # before the tracer, which would hide the error of a changed layer
    _, *cache = decoder(**inputs)
    programs[DECODER_FILE] = trace_module(decoder, inputs, ["logits", *present_names], axes)

    past_names = [name.replace("present", "past_key_values") for name in present_names]
    past_target_axes = {0: batch_size, 2: Dim("past")}
    past_source_axes = {0: batch_size, 2: source_length}
    inputs = {"encoder_attention_mask": mask, "input_ids": source_ids[:, :1], "past": tuple(cache)}
    axes = {
        "encoder_attention_mask": source_axes,
        "input_ids": {0: batch_size},
        "past": tuple(
            past_target_axes if "decoder" in name else past_source_axes for name in past_names
        ),
    }
    present_target_names = [name for name in present_names if "decoder" in name]
    programs[DECODER_WITH_PAST_FILE] = trace_module(
        (with_past or DecoderWithPastGraph)(model),
        inputs,
        ["logits", *present_target_names],
        axes,
        ["encoder_attention_mask", "input_ids", *past_names],
    )
    return programs


def save_description(model: VanillaTransformerForConditionalGeneration, folder: Path):
    """Save configuration and search settings as those of Marian, which other programs support.

    Args:
        model: Model to export.
        folder: Output folder.
    """
    config = marian_config(model.config, model.config.max_position_embeddings)
    config.save_pretrained(folder)
    marian_generation_config(model.generation_config, config).save_pretrained(folder)


def check_graph_logits(model: VanillaTransformerForConditionalGeneration, *files: Path):
    """Compare the logits of graphs with those of their model.

    Args:
        model: The exported model.
        files: Encoder, decoder, and decoder with cache, as for `logits_of_graphs`.

    Raises:
        ValueError: If the logits differ by more than the tolerance for float32.
    """
    for graph_logits, model_logits in logits_of_graphs(model, *files):
        unit_logits = without_bias(model_logits, model.lm_head.bias)
        refuse_difference(graph_logits, model_logits, unit_logits, DIFFERS.format("ONNX Runtime"))


def logits_of_graphs(
    model: VanillaTransformerForConditionalGeneration,
    encoder_file: Path,
    decoder_file: Path,
    decoder_with_past_file: Path,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute logits of two batches with the graphs and with their model.

    Args:
        model: The exported model.
        encoder_file: File of the encoder.
        decoder_file: File of the decoder for all target tokens but the last.
        decoder_with_past_file: File of the decoder with cache, for the last target token.

    Yields:
        Logits of the graphs, and logits of the model, for a batch, both [B, T, V].
    """
    encoder, decoder, decoder_with_past = (
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        for path in (encoder_file, decoder_file, decoder_with_past_file)
    )
    # the second batch has no padding: a changed model may take another code path for it
    for lengths in (SOURCE_LENGTHS, SOURCE_LENGTHS[:1]):
        batch = batch_to_compare(model, source_lengths=lengths)
        mask, target_ids = batch.mask.numpy(), batch.target.numpy()
        encoder_inputs = {"input_ids": batch.source.numpy(), "attention_mask": mask}
        encoder_outputs = run_graph(encoder, encoder_inputs)
        inputs = {
            "encoder_attention_mask": mask,
            "encoder_hidden_states": encoder_outputs["last_hidden_state"],
        }
        first_outputs = run_graph(decoder, inputs | {"input_ids": target_ids[:, :-1]})
        past = {
            name.replace("present", "past_key_values"): array
            for name, array in first_outputs.items()
        }
        last_inputs = inputs | {"input_ids": target_ids[:, -1:]} | past
        last_outputs = run_graph(decoder_with_past, last_inputs)
        graph_logits = np.concatenate((first_outputs["logits"], last_outputs["logits"]), axis=1)
        yield torch.from_numpy(graph_logits), batch.logits


def run_graph(
    session: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Run a graph with ONNX Runtime.

    Args:
        session: Session that has loaded the graph.
        inputs: Arrays by input name; names that the graph does not have are ignored. A merged
            decoder also gets `use_cache_branch`, and empty keys and values if `inputs` has none.

    Returns:
        Arrays by output name.
    """
    graph_inputs = {}
    for graph_input in session.get_inputs():
        if graph_input.name in inputs:
            graph_inputs[graph_input.name] = inputs[graph_input.name]
        elif graph_input.name == "use_cache_branch":
            graph_inputs[graph_input.name] = np.array([any("past" in name for name in inputs)])
        else:
            shape = [len(inputs["input_ids"]), graph_input.shape[1], 0, graph_input.shape[3]]
            graph_inputs[graph_input.name] = np.zeros(shape, dtype=np.float32)
    output_names = [output.name for output in session.get_outputs()]
    return dict(zip(output_names, session.run(None, graph_inputs), strict=True))


class EncoderGraph(nn.Module):
    """Encoder, from source tokens to memory.

    Args:
        model: Model to export.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode the source.

        Args:
            input_ids: Source tokens, [B, S].
            attention_mask: 1 for a token, 0 for padding, [B, S].

        Returns:
            Memory, [B, S, d_model].
        """
        outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return output_of_encoder(outputs).last_hidden_state


class DecoderGraph(nn.Module):
    """Decoder, from target tokens and memory to logits and the cache for the next step.

    Args:
        model: Model to export.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.model = model

    def forward(
        self, encoder_attention_mask: Tensor, input_ids: Tensor, encoder_hidden_states: Tensor
    ) -> tuple[Tensor, ...]:
        """Decode the first tokens.

        Args:
            encoder_attention_mask: 1 for a token, 0 for padding, [B, S].
            input_ids: Target tokens so far, [B, T].
            encoder_hidden_states: Memory, [B, S, d_model].

        Returns:
            Logits [B, T, V]; for each layer, keys [B, h, T, d_k] and values [B, h, T, d_v] of
            the target, then [B, h, S, d_k] and [B, h, S, d_v] of the source.

        Raises:
            ValueError: If a layer stores nothing in the cache.
        """
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        logits = self.logits(encoder_attention_mask, input_ids, encoder_hidden_states, cache)
        for attention, attention_cache in (
            ("self_attention", cache.self_attention_cache),
            ("cross_attention", cache.cross_attention_cache),
        ):
            if indices := layers_without_cache(self.model.get_decoder(), attention_cache):
                raise ValueError(
                    "each layer of the decoder must store keys and values in the cache for an "
                    f"export to ONNX, but the layers {indices} store none in {attention}."
                )
        layer_caches = zip(
            cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True
        )
        return logits, *[
            tensor
            for self_and_cross in layer_caches
            for attention_cache in self_and_cross
            for tensor in (attention_cache.keys, attention_cache.values)
        ]

    def logits(
        self, mask: Tensor, input_ids: Tensor, memory: Tensor, cache: EncoderDecoderCache
    ) -> Tensor:
        """Return logits, and add keys and values of the tokens to the cache.

        Args:
            mask: 1 for a source token, 0 for padding, [B, S].
            input_ids: Target tokens that are not in the cache, [B, T].
            memory: Output of the encoder, [B, S, d_model].
            cache: Keys and values of earlier steps.

        Returns:
            Logits, [B, T, V].
        """
        return self.model(
            encoder_outputs=(memory,),
            attention_mask=mask,
            decoder_input_ids=input_ids,
            use_cache=True,
            **{CACHE_NAME: cache},
        ).logits


class DecoderWithPastGraph(DecoderGraph):
    """Decoder for one more token, with the cache of earlier steps.

    Args:
        model: Model to export.
    """

    # the signature differs from that of `DecoderGraph.forward`, because that graph reads no cache
    def forward(  # type: ignore[override]
        self, encoder_attention_mask: Tensor, input_ids: Tensor, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Decode one more token.

        Args:
            encoder_attention_mask: 1 for a token, 0 for padding, [B, S].
            input_ids: Last token, [B, 1].
            past: For each layer, keys [B, h, P, d_k] and values [B, h, P, d_v] of the target, then
                keys [B, h, S, d_k] and values [B, h, S, d_v] of the source.

        Returns:
            Logits [B, 1, V]; for each layer, keys [B, h, P + 1, d_k] and values
            [B, h, P + 1, d_v] of the target.
        """
        self_cache, cross_cache = DynamicCache(), DynamicCache()
        for layer in range(len(past) // 4):
            keys, values, memory_keys, memory_values = past[4 * layer : 4 * layer + 4]
            self_cache.update(keys, values, layer)
            cross_cache.update(memory_keys, memory_values, layer)
        # cross-attention reads keys and values from the cache, so only the shape of memory matters
        memory = past[2].new_zeros(*encoder_attention_mask.shape, self.model.config.d_model)
        cache = EncoderDecoderCache(self_cache, cross_cache)
        logits = self.logits(encoder_attention_mask, input_ids, memory, cache)
        return logits, *[
            tensor
            for layer_cache in self_cache.layers
            for tensor in (layer_cache.keys, layer_cache.values)
        ]


def trace_module(
    module: nn.Module,
    inputs: dict[str, Any],
    output_names: list[str],
    axes: dict[str, Any],
    input_names: list[str] | None = None,
) -> Any:
    """Trace a module to an ONNX graph.

    Args:
        module: Module to trace.
        inputs: Arguments of the module's `forward`, by name.
        output_names: Names of the outputs in ONNX.
        axes: Symbolic dimensions of each argument, by axis.
        input_names: Names of the inputs in ONNX, if they differ from the names of the arguments.

    Returns:
        An `ONNXProgram` of torch.
    """
    # hide warnings that users cannot act on, about operators of packages that are not installed and
    # about names of symbolic dimensions
    exporter_logger = logging.getLogger("torch.onnx._internal.exporter")
    level_before = exporter_logger.level
    exporter_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            program: Any = torch.onnx.export(
                module.eval(),
                kwargs=inputs,
                dynamo=True,
                input_names=input_names or list(inputs),
                output_names=output_names,
                dynamic_shapes=axes,
                verbose=False,
            )
    finally:
        exporter_logger.setLevel(level_before)
    # the exporter stores lines of source code and paths of this machine; remove them
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    return program
