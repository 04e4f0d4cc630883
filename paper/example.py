"""Figure 1 with three words and four features: every matrix, to compute by hand. Section 3.

The weights were trained on this one sentence pair and rounded to tenths.
"""

import argparse
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    sinusoidal_encoding,
)
from ..configuration_vanilla_transformer import closest_name
from .example_picture import Box, Matrix, draw, draw_steps
from .study import Section

TOKENS = ("pad", "start", "end", "the", "cat", "sleeps", "die", "Katze", "schläft")
SOURCE = ("the", "cat", "sleeps")
# input of the decoder, shifted right: the decoder predicts the word after each of these words
TARGET = ("start", "die", "Katze")
D_MODEL, NUM_HEADS, D_FF = 4, 2, 4
DECIMALS = 2
# weights in tenths, with a slash between rows; a linear layer of torch stores the transpose of the
# paper's matrix
WEIGHT_TENTHS = {
    "encoder.embed_tokens.weight": "-11 3 7 -6 / -1 3 9 -11 / -8 5 9 -5 / -8 7 10 -4 / "
    "-13 -3 6 -4 / -7 6 10 -5 / 10 -15 -1 2 / 9 15 -14 -10 / -9 6 -14 18",
    "encoder.layers.0.self_attention.q_proj.weight": "-2 -1 1 0 / -1 0 0 -1 / -1 -1 1 0 / 0 0 0 0",
    "encoder.layers.0.self_attention.k_proj.weight": "0 2 0 0 / 0 1 0 0 / 0 2 0 0 / 0 0 0 0",
    "encoder.layers.0.self_attention.v_proj.weight": "2 -2 0 0 / 4 -5 0 1 / 0 -5 -1 1 / -1 -1 2 3",
    "encoder.layers.0.self_attention.out_proj.weight": (
        "-2 -3 -1 1 / 1 4 3 0 / 1 -1 1 -2 / -1 -3 -2 0"
    ),
    "encoder.layers.0.feed_forward.fc1.weight": "0 0 0 0 / -1 0 -1 -3 / 1 -3 6 8 / 0 0 0 0",
    "encoder.layers.0.feed_forward.fc1.bias": "-1 2 5 0",
    "encoder.layers.0.feed_forward.fc2.weight": "0 0 12 -2 / 0 3 -1 4 / 0 4 0 3 / 0 1 -7 1",
    "encoder.layers.0.feed_forward.fc2.bias": "-2 -1 0 4",
    "decoder.layers.0.self_attention.q_proj.weight": "0 0 0 0 / 0 0 0 0 / -2 -1 1 -3 / 2 2 -2 2",
    "decoder.layers.0.self_attention.k_proj.weight": "0 0 0 0 / 0 0 0 -1 / 0 0 -1 -5 / 1 -3 0 2",
    "decoder.layers.0.self_attention.v_proj.weight": (
        "0 2 -2 6 / -1 -4 -1 -2 / 8 -4 5 2 / -5 -7 -3 5"
    ),
    "decoder.layers.0.self_attention.out_proj.weight": (
        "-3 1 -5 -8 / 4 -2 9 1 / -1 3 -3 4 / 2 -5 5 -2"
    ),
    "decoder.layers.0.cross_attention.q_proj.weight": (
        "-1 5 2 -8 / -2 8 -2 -7 / -1 2 -1 -2 / 1 -2 1 -1"
    ),
    "decoder.layers.0.cross_attention.k_proj.weight": "6 -4 -1 2 / 6 -4 -1 3 / -2 1 3 0 / 2 -2 0 0",
    "decoder.layers.0.cross_attention.v_proj.weight": (
        "5 -9 -1 0 / 7 -6 0 5 / -5 -1 6 9 / 2 -1 -1 2"
    ),
    "decoder.layers.0.cross_attention.out_proj.weight": (
        "-6 2 -4 -3 / -7 -7 0 -4 / -4 2 8 -2 / 7 5 0 -6"
    ),
    "decoder.layers.0.feed_forward.fc1.weight": "0 1 0 0 / -4 1 -6 1 / 2 -3 3 1 / -7 -2 -1 3",
    "decoder.layers.0.feed_forward.fc1.bias": "0 -2 -1 0",
    "decoder.layers.0.feed_forward.fc2.weight": "1 -1 1 -3 / -1 1 1 2 / 0 -1 -3 2 / 0 4 1 2",
    "decoder.layers.0.feed_forward.fc2.bias": "5 2 -1 3",
}


class ModuleRecord(NamedTuple):
    """First input and output of a module; tensors are without the dimension of the batch."""

    input: Tensor
    output: Any


def example_model() -> VanillaTransformerForConditionalGeneration:
    """Create the model: one layer in each stack, two heads, weights with one decimal.

    Returns:
        The model, in evaluation mode. The gain of each norm is 1, the bias 0.
    """
    config = VanillaTransformerConfig(
        vocab_size=len(TOKENS),
        d_model=D_MODEL,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=NUM_HEADS,
        decoder_attention_heads=NUM_HEADS,
        encoder_ffn_dim=D_FF,
        decoder_ffn_dim=D_FF,
        dropout=0.0,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, tenths in WEIGHT_TENTHS.items():
            rows = [list(map(int, row.split())) for row in tenths.split("/")]
            weight = model.get_parameter(f"model.{name}")
            weight.copy_(torch.tensor(rows).view_as(weight) / 10)
    return model


def token_ids() -> tuple[Tensor, Tensor]:
    """Return the token ids of the source and of the words that the decoder reads.

    Returns:
        Two tensors, [1, 3] each.
    """
    source_ids, target_ids = ([TOKENS.index(word) for word in words] for words in (SOURCE, TARGET))
    return torch.tensor([source_ids]), torch.tensor([target_ids])


@torch.no_grad()
def boxes() -> dict[str, Box]:
    """Run the model, and return the matrices of every box of figure 1.

    Returns:
        Boxes by name, from the source to the probabilities.
    """
    model = example_model()
    records = _record_modules(model)
    boxes_by_name = {}
    for stack, words in (("encoder", SOURCE), ("decoder", TARGET)):
        layer_name = f"model.{stack}.layers.0"
        is_encoder = stack == "encoder"
        embedding_title = "Input Embedding" if is_encoder else "Output Embedding"
        boxes_by_name[f"{stack} input"] = _embedding_box(records, stack, words, embedding_title)
        attention_title = "Multi-Head Attention" if is_encoder else "Masked Multi-Head Attention"
        boxes_by_name[f"{stack} self-attention"] = _attention_box(
            model, records, f"{layer_name}.self_attention", words, words, attention_title
        )
        boxes_by_name[f"{stack} norm 1"] = _norm_box(
            records, f"{layer_name}.self_attention_norm", words
        )
        if not is_encoder:
            boxes_by_name["decoder cross-attention"] = _attention_box(
                model,
                records,
                f"{layer_name}.cross_attention",
                words,
                SOURCE,
                "Multi-Head Attention",
            )
            boxes_by_name["decoder norm 2"] = _norm_box(
                records, f"{layer_name}.cross_attention_norm", words
            )
        boxes_by_name[f"{stack} feed-forward"] = _feed_forward_box(
            model, records, f"{layer_name}.feed_forward", words
        )
        last_norm = f"{stack} norm {2 if is_encoder else 3}"
        boxes_by_name[last_norm] = _norm_box(records, f"{layer_name}.feed_forward_norm", words)
    logits = records["lm_head"].output
    embedding_matrix = model.get_input_embeddings().weight
    boxes_by_name["linear"] = Box(
        title="Linear",
        equation="logits = x E^T",
        matrices=(
            Matrix(
                name="E",
                values=embedding_matrix,
                rows=TOKENS,
                columns=_count_names(D_MODEL),
                is_weight=True,
            ),
            Matrix(name="logits", values=logits, rows=TARGET, columns=TOKENS),
        ),
    )
    boxes_by_name["softmax"] = Box(
        title="Softmax",
        equation="probabilities of the next word",
        matrices=(Matrix(name="P", values=logits.softmax(dim=-1), rows=TARGET, columns=TOKENS),),
    )
    return boxes_by_name


def number(value: float) -> str:
    """Format a number of the example.

    Args:
        value: The number, or minus infinity.

    Returns:
        The number with `DECIMALS` decimals, "-inf" for minus infinity.
    """
    return f"{value:z.{DECIMALS}f}"


def show(name: str) -> str:
    """Return the matrices of a box as text.

    Args:
        name: Name of the box, such as "encoder input".

    Returns:
        A table for each matrix, with its symbol at the top left.

    Raises:
        ValueError: If there is no box of this name.
    """
    boxes_by_name = boxes()
    if name not in boxes_by_name:
        raise ValueError(
            f"name must be one of {', '.join(boxes_by_name)}, got {name!r}."
            + closest_name(name, list(boxes_by_name))
        )
    text_lines = []
    for matrix in boxes_by_name[name].matrices:
        width = max(8, *map(len, matrix.columns))
        table_lines = [[matrix.name, *matrix.columns]]
        for row, row_values in zip(matrix.rows, matrix.values.tolist(), strict=True):
            table_lines.append([row, *map(number, row_values)])
        text_lines += [
            f"{row_name:10}" + "".join(cell.rjust(width) for cell in cells)
            for row_name, *cells in table_lines
        ]
        text_lines.append("")
    return "\n".join(text_lines[:-1])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study: it has none.

    Args:
        parser: Parser of the command line.
    """


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Draw figure 1 with all matrices, list them by box, and draw the steps of inference.

    Args:
        flags: Flags of `add_flags`.

    Yields:
        The picture, a section for each box, and the steps of a decoder and a recurrent network.
    """
    boxes_by_name = boxes()
    probabilities = boxes_by_name["softmax"].matrices[0].values  # [3, V]
    best_probabilities, best_ids = probabilities.max(dim=-1)
    answer = " ".join(TOKENS[token_id] for token_id in best_ids.tolist())
    yield Section(
        name="figure-1",
        title="Figure 1 with every matrix",
        finding=f'The encoder reads "{" ".join(SOURCE)}". The decoder reads a {TARGET[0]} token '
        f'and "{" ".join(TARGET[1:])}", and predicts the word after each: "{answer}", with '
        "probabilities of at least "
        f"{number(best_probabilities.min().item())}. The model has one layer in each stack, "
        f"d_model = {D_MODEL}, {NUM_HEADS} heads and d_ff = {D_FF}. Its weights were trained on "
        "this one sentence pair and rounded to one decimal; the gain of each norm is 1 and its "
        f"bias is 0. All other numbers are rounded to {DECIMALS} decimals.",
        drawing=draw(boxes_by_name),
    )
    for name, box in boxes_by_name.items():
        rows = []
        num_columns = max(len(matrix.columns) for matrix in box.matrices)
        for matrix in box.matrices:
            for row, row_values in zip(matrix.rows, matrix.values.tolist(), strict=True):
                cells = [number(value) for value in row_values]
                rows.append([matrix.name, row, *cells, *[None] * (num_columns - len(cells))])
        yield Section(
            name=name.replace(" ", "-"),
            title=f"{name[0].upper()}{name[1:]}: {box.title}",
            finding=f"{box.equation}.",
            columns=("matrix", "row", *map(str, range(1, num_columns + 1))),
            rows=rows,
            numbers={
                "matrices": [
                    {
                        "name": matrix.name,
                        "rows": list(matrix.rows),
                        "columns": list(matrix.columns),
                        "values": matrix.values.tolist(),
                    }
                    for matrix in box.matrices
                ]
            },
        )

    yield Section(
        name="steps",
        title="Training and inference beside a recurrent network",
        finding="In training all words are known. A recurrent network still computes its states "
        "one after the other, because each state is computed from the one before it. A decoder "
        "computes all of them at once: in a layer no state is computed from another one of the "
        "same layer. In inference both need a step for each word, because a word must be "
        "chosen before it is read. The recurrent network keeps one state, the decoder the keys and "
        "values of all words.",
        columns=("network", "steps, n words in training", "in inference", "kept after n words"),
        rows=[
            ["recurrent", "n", "n", "1 state"],
            ["decoder", "1", "n", "n keys and n values in each layer"],
        ],
        drawing=draw_steps(),
    )


def _record_modules(
    model: VanillaTransformerForConditionalGeneration,
) -> dict[str, ModuleRecord]:
    """Run the model, and return the first input and the output of each module by its name."""
    records = {}

    def remember(name: str):
        def hook(module, inputs, output):
            if inputs and isinstance(inputs[0], Tensor):
                without_batch = output[0] if isinstance(output, Tensor) else output
                records[name] = ModuleRecord(inputs[0][0], without_batch)

        return hook

    handles = [
        module.register_forward_hook(remember(name)) for name, module in model.named_modules()
    ]
    source_ids, target_ids = token_ids()
    try:
        model(input_ids=source_ids, decoder_input_ids=target_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return records


def _count_names(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(1, count + 1)))


def _feature_matrix(name: str, values: Tensor, rows: tuple[str, ...]) -> Matrix:
    return Matrix(name=name, values=values, rows=rows, columns=_count_names(values.shape[-1]))


def _weight_matrix(name: str, values: Tensor) -> Matrix:
    rows, columns = map(_count_names, values.shape)
    return Matrix(name=name, values=values, rows=rows, columns=columns, is_weight=True)


def _embedding_box(records, stack: str, words: tuple[str, ...], title: str) -> Box:
    scaled_embeddings, x = records[f"model.{stack}.positions"]
    return Box(
        title=f"{title}, Positional Encoding",
        equation=f"x = sqrt(d_model) E + PE, sqrt({D_MODEL}) = {math.sqrt(D_MODEL):g}",
        matrices=(
            _feature_matrix("E", scaled_embeddings / math.sqrt(D_MODEL), words),
            _feature_matrix("PE", sinusoidal_encoding(len(words), D_MODEL), words),
            _feature_matrix("x", x, words),
        ),
    )


def _attention_box(
    model, records, name: str, words: tuple[str, ...], attended_words: tuple[str, ...], title: str
) -> Box:
    module = model.get_submodule(name)
    matrices = []
    for symbol in ("Q", "K", "V"):
        # a linear layer of torch stores the transpose of the paper's matrix
        weight = module.get_submodule(f"{symbol.lower()}_proj").weight.T
        matrices.append(_weight_matrix(f"W^{symbol}", weight))
    projections = {
        symbol: records[f"{name}.{symbol.lower()}_proj"].output for symbol in ("Q", "K", "V")
    }
    for symbol, values in projections.items():
        matrices.append(_feature_matrix(symbol, values, words if symbol == "Q" else attended_words))
    _, batch_weights = records[name].output  # [1, h, Q, K]
    weights = batch_weights[0]  # [h, Q, K]
    head_width = D_MODEL // NUM_HEADS
    for head in range(NUM_HEADS):
        columns = slice(head * head_width, (head + 1) * head_width)
        query, key = (projections[symbol][:, columns] for symbol in ("Q", "K"))
        scores = query @ key.T / math.sqrt(head_width)
        if "cross" not in name and "decoder" in name:
            is_later = torch.ones(len(words), len(words), dtype=torch.bool).triu(diagonal=1)
            scores = scores.masked_fill(is_later, -math.inf)
        for label, values in (("scores", scores), ("weights", weights[head])):
            matrices.append(
                Matrix(
                    name=f"{label} {head + 1}", values=values, rows=words, columns=attended_words
                )
            )
    context, output = records[f"{name}.out_proj"]
    matrices.append(_feature_matrix("heads", context, words))
    matrices.append(_weight_matrix("W^O", module.out_proj.weight.T))
    matrices.append(_feature_matrix("output", output, words))
    key_symbol = "memory" if "cross" in name else "x"
    return Box(
        title=title,
        equation=f"Q = x W^Q, K = {key_symbol} W^K, V = {key_symbol} W^V, "
        f"weights = softmax(Q K^T / sqrt({head_width})) in each head",
        matrices=tuple(matrices),
    )


def _norm_box(records, name: str, words: tuple[str, ...]) -> Box:
    residual_sum, normed = records[name]
    return Box(
        title="Add & Norm",
        equation="x = LayerNorm(x + output)",
        matrices=(
            _feature_matrix("x + output", residual_sum, words),
            _feature_matrix("x", normed, words),
        ),
    )


def _feed_forward_box(model, records, name: str, words: tuple[str, ...]) -> Box:
    module = model.get_submodule(name)
    return Box(
        title="Feed Forward",
        equation="inner = max(0, x W_1 + b_1), output = inner W_2 + b_2",
        matrices=(
            _weight_matrix("W_1", module.fc1.weight.T),
            _weight_matrix("b_1", module.fc1.bias[None]),
            _feature_matrix("inner", records[f"{name}.activation"].output, words),
            _weight_matrix("W_2", module.fc2.weight.T),
            _weight_matrix("b_2", module.fc2.bias[None]),
            _feature_matrix("output", records[f"{name}.fc2"].output, words),
        ),
    )
