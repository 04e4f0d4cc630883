"""Export to ONNX: encoder, decoder, and decoder with cache, under the names that optimum expects.

Shapes: B sentences, S source positions, T target positions, P cached target positions, h heads,
d_k and d_v widths of a head's keys and values, V tokens in the vocabulary.
"""

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

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
from ..generation_vanilla_transformer import CACHE_NAME
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .check import DIFFERS

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
    """Export a model as three ONNX graphs, with its configuration and tokenizer.

    `encoder_model.onnx` takes `input_ids` and `attention_mask`, and returns `last_hidden_state`.
    `decoder_model.onnx` takes `input_ids` [B, T], `encoder_hidden_states` and
    `encoder_attention_mask`. It returns `logits` [B, T, V], and keys and values of target and
    source in each layer: `present.0.decoder.key` [B, h, T, d_k] and so on.
    `decoder_with_past_model.onnx` takes one new token, `input_ids` [B, 1],
    `encoder_attention_mask`, and these keys and values as `past_key_values.0.decoder.key`
    [B, h, P, d_k] and so on. It returns `logits` [B, 1, V], and the keys and values of the target,
    one position longer.

    Args:
        model: Model to export.
        tokenizer: Tokenizer of the model.
        folder: Output folder; created if it does not exist.

    Raises:
        ValueError: If the graphs compute other logits than the model.
    """
    model = copy.deepcopy(model).eval().float().cpu()
    with atomic_folder(folder) as unfinished:
        _write_graphs(model, unfinished)
        model.config.save_pretrained(unfinished)
        model.generation_config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        _check_logits(model, unfinished)


def _write_graphs(model: VanillaTransformerForConditionalGeneration, folder: Path):
    sentences, source, target = Dim("batch"), Dim("source"), Dim("target")
    ids = torch.full((SIZES["sentences"], SIZES["source"]), 0)
    mask = torch.ones_like(ids)
    mask[1:, -1] = 0
    encoder = EncoderGraph(model)
    source_axes = {0: sentences, 1: source}
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    _write(
        encoder,
        inputs,
        folder / ENCODER_FILE,
        ["last_hidden_state"],
        dict.fromkeys(inputs, source_axes),
    )

    decoder = DecoderGraph(model)
    inputs = {
        "encoder_attention_mask": mask,
        "input_ids": ids[:, : SIZES["target"]],
        "encoder_hidden_states": encoder(ids, mask),
    }
    axes: dict[str, Any] = dict.fromkeys(inputs, source_axes) | {
        "input_ids": {0: sentences, 1: target}
    }
    numbers = range(model.config.decoder_layers)
    kinds = [f"{side}.{part}" for side in ("decoder", "encoder") for part in ("key", "value")]
    present = [f"present.{number}.{kind}" for number in numbers for kind in kinds]
    _write(decoder, inputs, folder / DECODER_FILE, ["logits", *present], axes)

    _, *cache = decoder(**inputs)
    names = [name.replace("present", "past_key_values") for name in present]
    past_axes = {0: sentences, 2: Dim("past")}
    inputs = {"encoder_attention_mask": mask, "input_ids": ids[:, :1], "past": tuple(cache)}
    axes = {
        "encoder_attention_mask": source_axes,
        "input_ids": {0: sentences},
        "past": tuple(
            past_axes if "decoder" in name else {0: sentences, 2: source} for name in names
        ),
    }
    target_names = [name for name in present if "decoder" in name]
    _write(
        DecoderWithPastGraph(model),
        inputs,
        folder / DECODER_WITH_PAST_FILE,
        ["logits", *target_names],
        axes,
        ["encoder_attention_mask", "input_ids", *names],
    )


def _check_logits(model: VanillaTransformerForConditionalGeneration, folder: Path):
    """Compare the logits of the graphs with those of the model; the last graph adds a token."""
    encoder, decoder, decoder_with_past = (
        onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
        for name in (ENCODER_FILE, DECODER_FILE, DECODER_WITH_PAST_FILE)
    )
    names = [one.name.replace("present", "past_key_values") for one in decoder.get_outputs()[1:]]
    # also a batch without padding: a changed model may compute that one in another way
    for lengths in (SOURCE_LENGTHS, SOURCE_LENGTHS[:1]):
        batch = batch_to_compare(model, source_lengths=lengths)
        mask, target = batch.mask.numpy(), batch.target.numpy()
        (memory,) = encoder.run(None, {"input_ids": batch.source.numpy(), "attention_mask": mask})
        first_inputs = {"encoder_attention_mask": mask, "input_ids": target[:, :-1]}
        logits, *present = decoder.run(None, {**first_inputs, "encoder_hidden_states": memory})
        past = dict(zip(names, present, strict=True))
        next_inputs = {"encoder_attention_mask": mask, "input_ids": target[:, -1:]}
        next_logits, *_ = decoder_with_past.run(None, {**next_inputs, **past})
        found = torch.cat((torch.from_numpy(logits), torch.from_numpy(next_logits)), dim=1)
        refuse_difference(found, batch.logits, batch.logits, DIFFERS.format("ONNX Runtime"))


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
        return self.encoder(input_ids, attention_mask).last_hidden_state


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
        """
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        logits = self.logits(encoder_attention_mask, input_ids, encoder_hidden_states, cache)
        stacks = (cache.self_attention_cache.layers, cache.cross_attention_cache.layers)
        pairs = zip(*stacks, strict=True)
        return logits, *[
            tensor for pair in pairs for layer in pair for tensor in (layer.keys, layer.values)
        ]

    def logits(
        self, mask: Tensor, input_ids: Tensor, memory: Tensor, cache: EncoderDecoderCache
    ) -> Tensor:
        """Return logits, and add the tokens to the cache.

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

    # the graph has other inputs than the one for the first tokens
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
        for number in range(len(past) // 4):
            keys, values, memory_keys, memory_values = past[4 * number : 4 * number + 4]
            self_cache.update(keys, values, number)
            cross_cache.update(memory_keys, memory_values, number)
        # the cache has keys and values of the memory, so only the size of the memory matters
        memory = past[2].new_zeros(*encoder_attention_mask.shape, self.model.config.d_model)
        cache = EncoderDecoderCache(self_cache, cross_cache)
        logits = self.logits(encoder_attention_mask, input_ids, memory, cache)
        return logits, *[
            tensor for layer in self_cache.layers for tensor in (layer.keys, layer.values)
        ]


def _write(
    graph: nn.Module,
    inputs: dict[str, Any],
    path: Path,
    output_names: list[str],
    axes: dict[str, Any],
    input_names: list[str] | None = None,
):
    """Trace a graph and save it; `axes` names its dynamic sizes."""
    # the exporter warns about missing operators of other packages, and about its own names
    logger = logging.getLogger("torch.onnx._internal.exporter")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            program: Any = torch.onnx.export(
                graph.eval(),
                kwargs=inputs,
                dynamo=True,
                input_names=input_names or list(inputs),
                output_names=output_names,
                dynamic_shapes=axes,
                verbose=False,
            )
    finally:
        logger.setLevel(level)
    program.save(path)


__all__ = ["DECODER_FILE", "DECODER_WITH_PAST_FILE", "ENCODER_FILE", "to_onnx"]
