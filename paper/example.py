"""Figure 1 with three words and four features: every matrix, to compute by hand. Section 3.

The weights were trained on this one sentence pair and rounded to tenths.
"""

import argparse
import math
from collections.abc import Iterator
from typing import Any

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
WEIGHTS = {
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
        for name, tenths in WEIGHTS.items():
            rows = [list(map(int, row.split())) for row in tenths.split("/")]
            weight = model.get_parameter(f"model.{name}")
            weight.copy_(torch.tensor(rows).view_as(weight) / 10)
    return model


def token_ids() -> tuple[Tensor, Tensor]:
    """Return the token ids of the source and of the words that the decoder reads.

    Returns:
        Two tensors, [1, 3] each.
    """
    source, target = ([TOKENS.index(word) for word in words] for words in (SOURCE, TARGET))
    return torch.tensor([source]), torch.tensor([target])


@torch.no_grad()
def boxes(model: VanillaTransformerForConditionalGeneration | None = None) -> dict[str, Box]:
    """Run the model, and return the matrices of every box of figure 1.

    Args:
        model: Model with the sizes of `example_model`; that model by default.

    Returns:
        Boxes by name, from the source to the probabilities.
    """
    model = example_model() if model is None else model
    seen = _inputs_and_outputs(model)
    found = {}
    for stack, words in (("encoder", SOURCE), ("decoder", TARGET)):
        layer = f"model.{stack}.layers.0"
        kind = "Input" if stack == "encoder" else "Output"
        found[f"{stack} input"] = _embedding_box(model, seen, stack, words, f"{kind} Embedding")
        title = "Multi-Head Attention" if stack == "encoder" else "Masked Multi-Head Attention"
        found[f"{stack} self-attention"] = _attention_box(
            model, seen, f"{layer}.self_attention", words, words, title
        )
        found[f"{stack} norm 1"] = _norm_box(seen, f"{layer}.self_attention_norm", words)
        if stack == "decoder":
            found["decoder cross-attention"] = _attention_box(
                model, seen, f"{layer}.cross_attention", words, SOURCE, "Multi-Head Attention"
            )
            found["decoder norm 2"] = _norm_box(seen, f"{layer}.cross_attention_norm", words)
        found[f"{stack} feed-forward"] = _feed_forward_box(
            model, seen, f"{layer}.feed_forward", words
        )
        last = f"{stack} norm {2 if stack == 'encoder' else 3}"
        found[last] = _norm_box(seen, f"{layer}.feed_forward_norm", words)
    logits = seen["lm_head"][1]
    table = model.get_input_embeddings().weight
    found["linear"] = Box(
        title="Linear",
        equation="logits = x E^T",
        matrices=(
            Matrix(name="E", values=table, rows=TOKENS, columns=_numbers(D_MODEL), is_weight=True),
            Matrix(name="logits", values=logits, rows=TARGET, columns=TOKENS),
        ),
    )
    found["softmax"] = Box(
        title="Softmax",
        equation="probabilities of the next word",
        matrices=(Matrix(name="P", values=logits.softmax(dim=-1), rows=TARGET, columns=TOKENS),),
    )
    return found


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
    found = boxes()
    if name not in found:
        raise ValueError(
            f"name must be one of {', '.join(found)}, got {name!r}."
            + closest_name(name, list(found))
        )
    tables = []
    for matrix in found[name].matrices:
        width = max(8, *map(len, matrix.columns))
        lines = [[matrix.name, *matrix.columns]]
        for row, values in zip(matrix.rows, matrix.values.tolist(), strict=True):
            lines.append([row, *map(number, values)])
        tables += [
            f"{line[0]:10}" + "".join(one.rjust(width) for one in line[1:]) for line in lines
        ]
        tables.append("")
    return "\n".join(tables[:-1])


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
    found = boxes()
    probabilities = found["softmax"].matrices[0]
    best = probabilities.values.max(dim=-1)
    answer = " ".join(TOKENS[index] for index in best.indices.tolist())
    yield Section(
        name="figure-1",
        title="Figure 1 with every matrix",
        finding=f'The encoder reads "{" ".join(SOURCE)}". The decoder reads a {TARGET[0]} token '
        f'and "{" ".join(TARGET[1:])}", and predicts the word after each: "{answer}", with '
        "probabilities of at least "
        f"{number(best.values.min().item())}. The model has one layer in each stack, d_model = "
        f"{D_MODEL}, {NUM_HEADS} heads and d_ff = {D_FF}. Its weights were trained on this one "
        "sentence pair and rounded to one decimal; the gain of each norm is 1 and its bias is 0. "
        f"All other numbers are rounded to {DECIMALS} decimals.",
        drawing=draw(found),
    )
    for name, box in found.items():
        rows = []
        width = max(len(matrix.columns) for matrix in box.matrices)
        for matrix in box.matrices:
            for row, values in zip(matrix.rows, matrix.values.tolist(), strict=True):
                cells = [number(value) for value in values]
                rows.append([matrix.name, row, *cells, *[None] * (width - len(cells))])
        yield Section(
            name=name.replace(" ", "-"),
            title=f"{name[0].upper()}{name[1:]}: {box.title}",
            finding=f"{box.equation}.",
            columns=("matrix", "row", *map(str, range(1, width + 1))),
            rows=rows,
            numbers={
                "matrices": [
                    {"name": one.name, "rows": list(one.rows), "columns": list(one.columns)}
                    | {"values": one.values.tolist()}
                    for one in box.matrices
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


def _inputs_and_outputs(
    model: VanillaTransformerForConditionalGeneration,
) -> dict[str, tuple[Tensor, Any]]:
    """Run the model; return first input and output of each module by its name, without batch."""
    seen = {}

    def remember(name: str):
        def hook(module, inputs, output):
            if inputs and isinstance(inputs[0], Tensor):
                without_batch = output[0] if isinstance(output, Tensor) else output
                seen[name] = (inputs[0][0], without_batch)

        return hook

    hooks = [part.register_forward_hook(remember(name)) for name, part in model.named_modules()]
    source, target = token_ids()
    try:
        model(input_ids=source, decoder_input_ids=target, use_cache=False)
    finally:
        for one in hooks:
            one.remove()
    return seen


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(1, count + 1)))


def _features(name: str, values: Tensor, rows: tuple[str, ...]) -> Matrix:
    return Matrix(name=name, values=values, rows=rows, columns=_numbers(values.shape[-1]))


def _weight(name: str, values: Tensor) -> Matrix:
    rows, columns = map(_numbers, values.shape)
    return Matrix(name=name, values=values, rows=rows, columns=columns, is_weight=True)


def _embedding_box(model, seen, stack: str, words: tuple[str, ...], title: str) -> Box:
    scaled, x = seen[f"model.{stack}.positions"]
    return Box(
        title=f"{title}, Positional Encoding",
        equation=f"x = sqrt(d_model) E + PE, sqrt({D_MODEL}) = {math.sqrt(D_MODEL):g}",
        matrices=(
            _features("E", scaled / math.sqrt(D_MODEL), words),
            _features("PE", sinusoidal_encoding(len(words), D_MODEL), words),
            _features("x", x, words),
        ),
    )


def _attention_box(
    model, seen, name: str, words: tuple[str, ...], attended: tuple[str, ...], title: str
) -> Box:
    module = model.get_submodule(name)
    parts = []
    for symbol in ("Q", "K", "V"):
        # a linear layer of torch stores the transpose of the paper's matrix
        weight = module.get_submodule(f"{symbol.lower()}_proj").weight.T
        parts.append(_weight(f"W^{symbol}", weight))
    projected = {symbol: seen[f"{name}.{symbol.lower()}_proj"][1] for symbol in ("Q", "K", "V")}
    for symbol, values in projected.items():
        parts.append(_features(symbol, values, words if symbol == "Q" else attended))
    weights = seen[name][1][1][0]  # [h, Q, K]
    width = D_MODEL // NUM_HEADS
    for head in range(NUM_HEADS):
        columns = slice(head * width, (head + 1) * width)
        query, key = (projected[symbol][:, columns] for symbol in ("Q", "K"))
        scores = query @ key.T / math.sqrt(width)
        if "cross" not in name and "decoder" in name:
            later = torch.ones(len(words), len(words), dtype=torch.bool).triu(diagonal=1)
            scores = scores.masked_fill(later, -math.inf)
        for label, values in (("scores", scores), ("weights", weights[head])):
            parts.append(
                Matrix(name=f"{label} {head + 1}", values=values, rows=words, columns=attended)
            )
    context, output = seen[f"{name}.out_proj"]
    parts.append(_features("heads", context, words))
    parts.append(_weight("W^O", module.out_proj.weight.T))
    parts.append(_features("output", output, words))
    source = "memory" if "cross" in name else "x"
    return Box(
        title=title,
        equation=f"Q = x W^Q, K = {source} W^K, V = {source} W^V, "
        f"weights = softmax(Q K^T / sqrt({width})) in each head",
        matrices=tuple(parts),
    )


def _norm_box(seen, name: str, words: tuple[str, ...]) -> Box:
    total, normed = seen[name]
    return Box(
        title="Add & Norm",
        equation="x = LayerNorm(x + output)",
        matrices=(_features("x + output", total, words), _features("x", normed, words)),
    )


def _feed_forward_box(model, seen, name: str, words: tuple[str, ...]) -> Box:
    module = model.get_submodule(name)
    return Box(
        title="Feed Forward",
        equation="inner = max(0, x W_1 + b_1), output = inner W_2 + b_2",
        matrices=(
            _weight("W_1", module.fc1.weight.T),
            _weight("b_1", module.fc1.bias[None]),
            _features("inner", seen[f"{name}.activation"][1], words),
            _weight("W_2", module.fc2.weight.T),
            _weight("b_2", module.fc2.bias[None]),
            _features("output", seen[f"{name}.fc2"][1], words),
        ),
    )
