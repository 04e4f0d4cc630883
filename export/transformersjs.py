"""Export to transformers.js, which translates in browsers and in Node.js.

Shapes: B sentences, T target positions, V tokens in the vocabulary.
"""

import copy
import hashlib
import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, compose, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedTokenizerBase

from ..atomic_files import atomic_folder
from ..comparison import TOLERANCES
from ..console import shown
from ..deviations_vanilla_transformer import deviations, without_bias
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..tokenization.tokenization_vanilla_transformer import (
    WORDS,
    VanillaTransformerTokenizer,
    _byte_symbols,
    _has_default_decoder,
)
from .onnx import (
    DECODER_FILE,
    DECODER_WITH_PAST_FILE,
    ENCODER_FILE,
    DecoderWithPastGraph,
    check_graph_logits,
    logits_of_graphs,
    save_description,
    trace_graphs,
)
from .parts import save_tokenizer, with_search_ids

logger = logging.getLogger(__name__)

MERGED_FILE = "decoder_model_merged.onnx"
# suffix of the file names for each type of stored weights
SUFFIXES = {"float32": "", "int8": "_quantized"}
# logit of a token that cannot follow the end token
LOWEST_LOGIT = -1e4


@torch.no_grad()
def to_transformersjs(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
):
    """Write a folder that `pipeline("translation")` of transformers.js loads.

    The folder `onnx` contains the encoder, and one merged decoder for the first step and the later
    steps, each with float32 weights and with int8 weights. `config.json` declares a Marian model,
    because transformers.js supports Marian. The search is greedy: transformers.js has no beam
    search.

    Args:
        model: Model to export.
        tokenizer: Tokenizer of the model.
        folder: Output folder.

    Raises:
        ValueError: If the tokenizer has no `tokenizer.json`, or the graphs compute other logits
            than the model.
    """
    model = with_search_ids(copy.deepcopy(model).eval().float().cpu())
    # with several beams, transformers.js computes all of them and keeps the first one at each step,
    # which is greedy search at a higher cost
    model.generation_config.update(
        num_beams=1, length_penalty_alpha=None, length_penalty=None, early_stopping=None
    )
    with atomic_folder(folder) as unfinished:
        save_tokenizer_for_javascript(tokenizer, unfinished)
        save_description(model, unfinished)
        graphs = {
            name: _store_transposes(_replace_float64(program.model_proto))
            for name, program in trace_graphs(model, EndingDecoderGraph).items()
        }
        (unfinished / "onnx").mkdir()
        for weight_type, suffix in SUFFIXES.items():
            if weight_type == "int8":
                graphs = {name: _quantize(graph) for name, graph in graphs.items()}
            encoder_file, decoder_file = (
                (unfinished / "onnx" / name).with_stem(Path(name).stem + suffix)
                for name in (ENCODER_FILE, MERGED_FILE)
            )
            merged_decoder = _merge_decoders(graphs[DECODER_FILE], graphs[DECODER_WITH_PAST_FILE])
            onnx.save(graphs[ENCODER_FILE], encoder_file)
            onnx.save(merged_decoder, decoder_file)
            if weight_type == "float32":
                # the merged decoder serves both the first step and the later steps
                check_graph_logits(model, encoder_file, decoder_file, decoder_file)
            else:
                _warn_about_rounding(model, encoder_file, decoder_file)


def save_tokenizer_for_javascript(tokenizer: PreTrainedTokenizerBase, folder: Path):
    """Save a tokenizer so that transformers.js encodes and decodes text in the same way.

    Args:
        tokenizer: Tokenizer of the model.
        folder: Output folder.

    Raises:
        ValueError: If the tokenizer has no `tokenizer.json`, or is a `VanillaTransformerTokenizer`
            with another normalizer, pre-tokenizer or decoder.
    """
    save_tokenizer(
        tokenizer,
        folder,
        lambda content: _change_for_javascript(content, tokenizer),
        # transformers.js skips these tokens in decoded text, and those that `tokenizer.json` marks
        additional_special_tokens=list(tokenizer.special_tokens_map.values()),
    )
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"the tokenizer must have a tokenizer.json for transformers.js, got one of "
            f"{type(tokenizer).__name__}, which has none."
        )


def _warn_about_rounding(
    model: VanillaTransformerForConditionalGeneration, encoder_file: Path, decoder_file: Path
):
    """Warn if the int8 graphs, which also quantize activations, deviate too much from the model."""
    largest_deviation = max(
        float(
            deviations(
                graph_logits,
                model_logits,
                without_bias(model_logits, model.lm_head.bias),
                is_exact=False,
            ).max()
        )
        for graph_logits, model_logits in logits_of_graphs(
            model, encoder_file, decoder_file, decoder_file
        )
    )
    # `not <=` is also true for NaN
    if not largest_deviation <= TOLERANCES["int8"]:
        logger.warning(
            "With dtype q8, the scores differ from those of the model by up to %.2g standard "
            "deviations of the logits; compare its translations with those of dtype fp32.",
            largest_deviation,
        )


class EndingDecoderGraph(DecoderWithPastGraph):
    """Decoder for one more token; only end tokens follow an end token.

    transformers.js stops only when the last tokens of all sentences in a batch are end tokens, so a
    sentence that has ended must continue with end tokens.

    Args:
        model: Model to export.
    """

    ends: Tensor
    after_end: Tensor

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__(model)
        ends = torch.tensor(model.config.eos_token_id).reshape(-1)
        after_end = torch.full((model.config.vocab_size,), LOWEST_LOGIT)
        after_end[ends] = 0.0
        self.register_buffer("ends", ends)
        self.register_buffer("after_end", after_end)

    def logits(
        self, mask: Tensor, input_ids: Tensor, memory: Tensor, cache: EncoderDecoderCache
    ) -> Tensor:
        """Return logits that allow only end tokens after an end token; see `DecoderGraph.logits`.

        Returns:
            Logits, [B, T, V].
        """
        logits = super().logits(mask, input_ids, memory, cache)
        has_ended = (input_ids[..., None] == self.ends).any(-1, keepdim=True)  # [B, T, 1]
        return torch.where(has_ended, self.after_end, logits)


def _replace_float64(model: ModelProto) -> ModelProto:
    """Replace float64, in which positions are computed, because browsers do not support float64."""
    tensors = list(model.graph.initializer)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                tensors.append(attribute.t)
            elif node.op_type == "Cast" and attribute.i == TensorProto.DOUBLE:
                attribute.i = TensorProto.FLOAT
    for tensor in tensors:
        if tensor.data_type == TensorProto.DOUBLE:
            values = numpy_helper.to_array(tensor).astype("float32")
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    # remove the declared types of intermediate values; ONNX Runtime infers the new ones
    del model.graph.value_info[:]
    return model


def _store_transposes(model: ModelProto) -> ModelProto:
    """Store each transposed weight as its transpose, and remove the Transpose node.

    The quantizer skips a weight that is used through a Transpose node. If the embedding shares the
    matrix of the output layer, a token's embedding becomes a column, and Gather reads along axis 1.
    """
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    transpose_nodes = [
        node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights
    ]
    # names of weights by the names of their transposes
    weight_names = {node.output[0]: node.input[0] for node in transpose_nodes}
    for name in set(weight_names.values()):
        matrix = numpy_helper.to_array(weights[name]).T
        weights[name].CopyFrom(numpy_helper.from_array(matrix.copy(), name))
    new_nodes = []
    for node in graph.node:
        if node in transpose_nodes:
            continue
        node.input[:] = [weight_names.get(name, name) for name in node.input]
        new_nodes.append(node)
        if node.op_type == "Gather" and node.input[0] in weight_names.values():
            embeddings = node.output[0]
            columns = f"{embeddings}.columns"
            new_nodes.append(helper.make_node("Transpose", [columns], [embeddings], perm=[1, 2, 0]))
            node.output[0] = columns
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("axis", 1))
    del graph.node[:]
    graph.node.extend(new_nodes)
    return model


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "pre-processing before quantization" not in record.getMessage()


def _quantize(model: ModelProto) -> ModelProto:
    """Return a graph whose weight matrices are in int8."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quantized.onnx"
        # hide a warning: onnxruntime recommends a preprocessing that the tracer has already done
        root_logger = logging.getLogger()
        root_logger.addFilter(_is_no_advice)
        try:
            quantize_dynamic(model, path, per_channel=True, weight_type=QuantType.QInt8)
        finally:
            root_logger.removeFilter(_is_no_advice)
        return onnx.load(path)


def _merge_decoders(first_step: ModelProto, later_steps: ModelProto) -> ModelProto:
    """Merge the decoders of the first step and of the later steps into one graph.

    Equal weights are stored once. If the input `use_cache_branch` is true, the graph runs the
    decoder of the later steps.
    """
    shared_weights: dict[tuple, TensorProto] = {}
    branches = []
    output_names = [output.name for output in first_step.graph.output]
    for prefix, decoder in (("first/", first_step), ("later/", later_steps)):
        shared_names = {}
        for tensor in decoder.graph.initializer:
            digest = hashlib.sha256(numpy_helper.to_array(tensor).tobytes()).digest()
            key = (tensor.data_type, *tensor.dims, digest)
            if key not in shared_weights:
                shared_weights[key] = TensorProto()
                shared_weights[key].CopyFrom(tensor)
                shared_weights[key].name = prefix + tensor.name
            shared_names[tensor.name] = shared_weights[key].name
        graph = compose.add_prefix_graph(
            decoder.graph,
            prefix,
            rename_inputs=False,
            rename_initializers=False,
            name_map=shared_names,
        )
        branches.append(_build_branch(graph, [prefix + name for name in output_names], prefix))
    first_branch, later_branch = branches
    if_node = helper.make_node(
        "If",
        ["use_cache_branch"],
        output_names,
        then_branch=later_branch,
        else_branch=first_branch,
    )
    past_inputs = [
        graph_input
        for graph_input in later_steps.graph.input
        if graph_input.name.startswith("past_key_values")
    ]
    use_cache_branch = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    inputs = [*first_step.graph.input, *past_inputs, use_cache_branch]
    merged = helper.make_graph(
        [if_node],
        "decoder",
        [_name_own_length(value_info) for value_info in inputs],
        [_name_own_length(value_info) for value_info in first_step.graph.output],
        [*shared_weights.values()],
    )
    return helper.make_model(
        merged, opset_imports=first_step.opset_import, ir_version=first_step.ir_version
    )


def _build_branch(graph: GraphProto, output_names: list[str], prefix: str) -> GraphProto:
    """Return a branch of the merged decoder, with the outputs of both branches.

    Keys and values that the branch does not compute are copied from `past_key_values`.
    """
    computed_names = {output.name for output in graph.output}
    nodes = list(graph.node)
    for name in output_names:
        if name not in computed_names:
            past_name = name.removeprefix(prefix).replace("present", "past_key_values")
            nodes.append(helper.make_node("Identity", [past_name], [name]))
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in output_names
    ]
    return helper.make_graph(nodes, prefix.rstrip("/"), [], outputs)


def _name_own_length(value_info: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Name the symbolic length of keys and values after their tensor.

    Past and present differ in length, so their lengths must not have the same name.
    """
    if "key_values" in value_info.name or "present" in value_info.name:
        length = value_info.type.tensor_type.shape.dim[2]
        length.dim_param = re.sub(r"\.(key|value)$", "", value_info.name)
    return value_info


def _change_for_javascript(
    content: dict[str, Any], tokenizer: VanillaTransformerTokenizer
) -> dict[str, Any]:
    """Change `tokenizer.json` so that transformers.js encodes and decodes text as we do.

    transformers.js differs in four ways. First, it finds special tokens in a text even if
    `split_special_tokens` makes them plain text, so special tokens are removed from the file.
    Second, it normalizes the text after an added token like a new text, so a space is put only
    before the whole text. Third, the pattern of its byte-level pre-tokenizer matches other spaces,
    so the pattern `WORDS` splits words. Fourth, it decodes added tokens as bytes, so a decoder step
    first replaces them by their byte symbols.

    Args:
        content: Content of `tokenizer.json`.
        tokenizer: Tokenizer of the model.

    Returns:
        The new content.

    Raises:
        ValueError: If a user has changed the normalizer, the pre-tokenizer or the decoder.
    """
    released_tokenizer = VanillaTransformerTokenizer(symbols=tokenizer.symbols)
    released_content = json.loads(released_tokenizer.backend_tokenizer.to_str())
    changed_names = [
        name for name in ("normalizer", "pre_tokenizer") if content[name] != released_content[name]
    ]
    if not _has_default_decoder(tokenizer.backend_tokenizer):
        changed_names.append("decoder")
    if changed_names:
        raise ValueError(
            f"the {' and the '.join(changed_names)} of the tokenizer must be unchanged for "
            f"transformers.js, got {shown(content[changed_names[0]])}."
        )
    if tokenizer.split_special_tokens:
        special_tokens = set(tokenizer.special_tokens_map.values())
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["content"] not in special_tokens
        ]
    added_tokens = sorted(token["content"] for token in content["added_tokens"])
    # every text gets a space before it, except a text that begins with an added token
    any_added_token = "|".join(map(re.escape, added_tokens))
    content["normalizer"]["normalizers"][1:] = [
        {"type": "Prepend", "prepend": " "},
        *([_replacement(rf"\A (?={any_added_token})", "")] if added_tokens else []),
    ]
    _, *word_splitters, byte_level = content["pre_tokenizer"]["pretokenizers"]
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"]["pretokenizers"] = [
        *(word_splitters or [split]),
        byte_level | {"use_regex": False},
    ]
    added_token_decoders = [
        _replacement(f"^{re.escape(token)}$", _byte_symbols(token)) for token in added_tokens
    ]
    content["decoder"]["decoders"] = [*added_token_decoders, *content["decoder"]["decoders"][-2:]]
    return content


def _replacement(pattern: str, text: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": text}
