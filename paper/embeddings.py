"""Embeddings of section 3.4: look-up, the factor sqrt(d_model), and one matrix for three uses.

Shapes: S source and T target tokens, V tokens in the vocabulary.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..drawing import new_figure
from ..train.config import TrainConfig
from ..train.step import smoothed_loss_sum
from .positional_encoding import model_encoding
from .study import Section
from .trained import add_optional_model_flag, load_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOCAB_SIZE = TrainConfig.vocab_size
NUM_TOKENS = 64
NUM_POSITIONS = 64
ROWS = ("C4", "base", "big")
ROWS_OF_TABLE_3 = "C4, base, big: rows of Table 3"
# vocabulary for measuring random embeddings: their root mean square does not depend on its size
FEW_TOKENS = 2_000
MATRICES = ("shared matrix, or source embedding", "target embedding", "output projection")
MATRIX_COLORS = ("#35b779", "#90d743", "#fde725")
LAYERS_COLOR = "#31688e"
# use of the matrix: its place in figure 1, and its parameter in an untied model
USES = {
    "source": ("encoder's input", "model.encoder.embed_tokens.weight"),
    "target": ("decoder's input", "model.decoder.embed_tokens.weight"),
    "output": ("projection before the softmax", "lm_head.weight"),
}


@dataclass(frozen=True, kw_only=True)
class EmbeddingSize:
    """Root mean squares of embeddings and positional encoding.

    Attributes:
        d_model: Width.
        plain: Root mean square of the embedding matrix.
        scaled: Root mean square of the embeddings after the factor sqrt(d_model).
        positions: Root mean square of the positional encoding.
    """

    d_model: int
    plain: float
    scaled: float
    positions: float


class ParameterCount(NamedTuple):
    """Number of embedding matrices of a model, parameters of its layers and of one such matrix."""

    num_matrices: int
    layers: int
    matrix: int


def one_hot_product(ids: Tensor, table: Tensor) -> Tensor:
    """Embed tokens by a product of one-hot rows and the embedding matrix.

    Args:
        ids: Token ids, [T].
        table: Embedding matrix, [V, d_model].

    Returns:
        The embeddings, [T, d_model].
    """
    return F.one_hot(ids, len(table)).to(table.dtype) @ table


def embedding_size(model: PreTrainedModel, num_positions: int = NUM_POSITIONS) -> EmbeddingSize:
    """Measure the embeddings and the positional encoding of a model.

    Args:
        model: Model of this package.
        num_positions: Number of positions to measure; a learned table with fewer rows is
            measured whole.

    Returns:
        Root mean squares of the embeddings and of the positional encoding.

    Raises:
        ValueError: If the model has no positional encoding.
    """
    table = model.get_input_embeddings().weight.detach().float()  # [V, d_model]
    d_model = model.config.d_model
    plain = _root_mean_square(table)
    return EmbeddingSize(
        d_model=d_model,
        plain=plain,
        scaled=plain * math.sqrt(d_model),
        positions=_root_mean_square(model_encoding(model, num_positions)),
    )


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def gradients_by_use(
    model: PreTrainedModel, source: Tensor, inputs: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """Return the gradient of the tied matrix, and of each matrix of an untied copy of the model.

    Args:
        model: Model with tied matrices; it is copied and does not change.
        source: Source tokens, [B, S].
        inputs: Target tokens, shifted right, [B, T].
        labels: Target tokens, [B, T].

    Returns:
        Gradients of the untied matrices by the names of `USES`, and of the tied matrix as "tied",
        [V, d_model] each.
    """
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    untied = VanillaTransformerForConditionalGeneration(config).eval()
    untied.load_state_dict(model.state_dict())
    tied = copy.deepcopy(model).eval()
    for copied in (tied, untied):
        logits = copied(input_ids=source, decoder_input_ids=inputs).logits
        smoothed_loss_sum(logits, labels, 0.0).backward()
    parameters = dict(untied.named_parameters())
    found = {use: parameters[name].grad for use, (_, name) in USES.items()}
    return {**found, "tied": tied.get_input_embeddings().weight.grad}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    add_optional_model_flag(parser)
    parser.add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Compare look-up and product, measure the effect of the factor, and count tied parameters.

    Args:
        flags: Flags of `add_flags`.

    Yields:
        Three sections.

    Raises:
        ValueError: If the model does not exist or has no positional encoding.
    """
    torch.manual_seed(flags.seed)
    own = {}
    if flags.model is not None:
        trained, _ = load_trained(flags.model, flags.trust_remote_code)
        untrained = VanillaTransformerForConditionalGeneration(trained.config)
        own = {
            "this model, untrained": embedding_size(untrained),
            "this model, trained": embedding_size(trained),
        }
    yield _one_hot_section()
    yield _factor_section(own, flags.model)
    yield _tie_section()


def _one_hot_section() -> Section:
    d_model = VanillaTransformerConfig.from_paper("base").d_model
    table = torch.randn(VOCAB_SIZE, d_model) * d_model**-0.5
    ids = torch.randint(VOCAB_SIZE, (NUM_TOKENS,))
    product, product_seconds = _timed(lambda: one_hot_product(ids, table))
    looked_up, look_up_seconds = _timed(lambda: F.embedding(ids, table))
    flops = 2 * NUM_TOKENS * VOCAB_SIZE * d_model
    bytes_of_rows = NUM_TOKENS * VOCAB_SIZE * table.element_size()
    bytes_of_ids = NUM_TOKENS * ids.element_size()
    difference = float((product - looked_up).abs().max())
    return Section(
        name="one_hot",
        title="Look-up, and product with one-hot rows",
        finding="An embedding is a linear layer with a one-hot input: a row of zeros with a single "
        f"1, which selects a row of the matrix. For {NUM_TOKENS} tokens and the matrix of base, "
        f"{VOCAB_SIZE:,} x {d_model}, product and look-up give identical results (largest "
        f"difference {difference:g}). The product needs {flops / 1e9:.1f} GFLOP, nearly all of "
        f"them multiplications by 0, and took {1e3 * product_seconds:.1f} ms. The look-up copies "
        f"{NUM_TOKENS} rows and took {1e3 * look_up_seconds:.3f} ms.",
        columns=("method", "FLOPs", "bytes of input", "milliseconds", "largest difference"),
        rows=[
            ["product with one-hot rows", flops, bytes_of_rows, 1e3 * product_seconds, None],
            ["look-up", 0, bytes_of_ids, 1e3 * look_up_seconds, difference],
        ],
        figure=_draw_one_hot(),
        message="A product with one-hot rows selects the framed rows, as a look-up does",
        numbers={"equal": torch.equal(product, looked_up)},
    )


def _timed(function: Callable[[], Tensor], repeats: int = 3) -> tuple[Tensor, float]:
    result, fastest = function(), math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        result = function()
        fastest = min(fastest, time.perf_counter() - started)
    return result, fastest


def _draw_one_hot() -> "Figure":
    from matplotlib.patches import Rectangle

    ids, table = torch.tensor([7, 2, 2, 9]), torch.randn(11, 6)
    parts = (
        (F.one_hot(ids, len(table)).float(), "one-hot rows of the positions", "token"),
        (table, "embedding matrix", "component"),
        (one_hot_product(ids, table), "embeddings of the positions", "component"),
    )
    figure, all_axes = new_figure(10.0, 4.4, 1, 3)
    for axes, (values, title, xlabel) in zip(all_axes[0], parts, strict=True):
        image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-2.5, vmax=2.5)
        axes.set_title(title)
        axes.set_xlabel(xlabel)
        axes.set_xticks(range(values.shape[1]))
        axes.set_yticks(range(values.shape[0]))
    tokens = [f"{position}: token {token}" for position, token in enumerate(ids.tolist())]
    all_axes[0, 0].set_yticks(range(len(ids)), tokens)
    for axes, sign in ((all_axes[0, 1], "×"), (all_axes[0, 2], "=")):  # noqa: RUF001
        axes.text(-0.32, 0.5, sign, transform=axes.transAxes, fontsize=18, va="center")
    for row in sorted(set(ids.tolist())):
        box: dict[str, Any] = {"fill": False, "edgecolor": "black", "linewidth": 2}
        all_axes[0, 1].add_patch(Rectangle((-0.5, row - 0.5), table.shape[1], 1, **box))
    figure.colorbar(image, ax=all_axes, label="value", shrink=0.7)
    return figure


def _factor_section(own: Mapping[str, EmbeddingSize], run: str | None) -> Section:
    found = {}
    for row in ROWS:
        config = VanillaTransformerConfig.from_paper(
            row, vocab_size=FEW_TOKENS, encoder_layers=1, decoder_layers=1
        )
        model = VanillaTransformerForConditionalGeneration(config)
        found[f"{row}, untrained"] = embedding_size(model)
    found |= own
    base = found["base, untrained"]
    finding = (
        "Sizes are root mean squares. The matrix is initialized with a standard deviation of "
        "1 / sqrt(d_model), which suits the output projection: the embeddings of base have a size "
        f"of {base.plain:.3f}. Sinusoids have a size of {base.positions:.3f} = 1 / sqrt(2), "
        "because sin^2 + cos^2 = 1 in each pair. Without the factor, positions would be "
        f"{base.positions / base.plain:.0f} times as large as words in base. With the factor, "
        f"words have a size of {base.scaled:.2f}, similar to that of positions at any width."
    )
    if own:
        size = found["this model, trained"]
        finding += (
            " Training has changed the size of the scaled words of "
            f"{run} from {found['this model, untrained'].scaled:.2f} to {size.scaled:.2f}; without "
            "the factor, its positions would be "
            f"{size.positions / size.plain:.3g} times as large as its words."
        )
    return Section(
        name="factor",
        title="The factor sqrt(d_model)",
        finding=finding,
        columns=(
            "model",
            "d_model",
            "embeddings",
            "scaled embeddings",
            "positions",
            "positions / embeddings",
            "positions / scaled embeddings",
        ),
        rows=[
            [
                name,
                size.d_model,
                size.plain,
                size.scaled,
                size.positions,
                size.positions / size.plain,
                size.positions / size.scaled,
            ]
            for name, size in found.items()
        ],
        figure=_draw_sizes(found),
        message="The factor sqrt(d_model) gives words a size similar to that of positions "
        f"({ROWS_OF_TABLE_3}{f'; this model: {run}' if own else ''})",
    )


def _draw_sizes(found: Mapping[str, EmbeddingSize]) -> "Figure":
    figure, axes = new_figure(8.0, 0.9 + 0.75 * len(found))
    bars = range(len(found))
    for shift, field, label in (
        (-0.18, "plain", "embeddings"),
        (0.18, "scaled", "embeddings times sqrt(d_model)"),
    ):
        values = [getattr(size, field) for size in found.values()]
        drawn = axes.barh([bar + shift for bar in bars], values, height=0.34, label=label)
        axes.bar_label(drawn, fmt="%.3f", padding=3, fontsize=8)
    for bar, size in enumerate(found.values()):
        legend = None if bar else "positions of the model"
        axes.plot([size.positions] * 2, [bar - 0.4, bar + 0.4], "k--", label=legend)
    axes.set_yticks(
        bars, [f"{name}\nd_model {size.d_model}" for name, size in found.items()], fontsize=9
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("root mean square")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _tie_section() -> Section:
    counts = {row: _count_parameters(row) for row in ROWS}
    config = VanillaTransformerConfig.from_paper(
        "base", vocab_size=100, d_model=64, encoder_layers=1, decoder_layers=1
    )
    model = VanillaTransformerForConditionalGeneration(config)
    addresses = {model.get_parameter(name).data_ptr() for _, name in USES.values()}
    source, target = torch.randint(100, (2, 8, 10)).unbind()
    start = torch.zeros_like(target[:, :1])
    inputs = torch.cat((start, target[:, :-1]), dim=1)
    gradients = gradients_by_use(model, source, inputs, target)
    tied = gradients.pop("tied")
    difference = float((sum(gradients.values()) - tied).abs().max() / tied.abs().max())
    parameters = {
        row: {"tied": one.layers + one.matrix, "untied": three.layers + 3 * three.matrix}
        for row, (one, three) in counts.items()
    }
    saved = parameters["base"]["untied"] - parameters["base"]["tied"]
    norms = {use: float(gradient.norm()) for use, gradient in gradients.items()}
    return Section(
        name="tie",
        title="One matrix, three uses",
        finding="The encoder's input, the decoder's input and the output projection share "
        f"{len(addresses)} address{'es' if len(addresses) > 1 else ''} in memory, so they are "
        f"{'one matrix' if len(addresses) == 1 else 'different matrices'}. A shared vocabulary "
        f"makes this possible. With {VOCAB_SIZE:,} tokens, base saves {saved / 1e6:.2f}M of "
        f"{parameters['base']['untied'] / 1e6:.2f}M parameters. The gradient of the matrix is the "
        "sum of the gradients of three separate matrices (largest difference "
        f"{difference:.0e} of the largest entry). So the vectors of source tokens also get "
        "gradients from the output, where every step changes the vector of every token.",
        columns=("use", "in figure 1", "parameter", "norm of the gradient of this use"),
        rows=[[use, where, name, norms[use]] for use, (where, name) in USES.items()],
        figure=_draw_parameters(counts),
        message="One matrix for three uses saves two matrices "
        f"({VOCAB_SIZE:,} tokens; {ROWS_OF_TABLE_3})",
        numbers={"parameters": parameters, "gradient_difference": difference},
    )


def _draw_parameters(counts: Mapping[str, Sequence[ParameterCount]]) -> "Figure":
    figure, axes = new_figure(8.0, 3.6)
    names = [f"{row}, {kind}" for row in counts for kind in ("one matrix", "three matrices")]
    for bar, count in enumerate(count for both in counts.values() for count in both):
        parts = [("layers", count.layers, LAYERS_COLOR)]
        matrices = list(zip(MATRICES, MATRIX_COLORS, strict=True))[: count.num_matrices]
        parts += [(label, count.matrix, color) for label, color in matrices]
        left = 0.0
        for label, size, color in parts:
            # label the second bar only: it has all parts, and each part is once in the legend
            axes.barh(bar, size / 1e6, left=left, color=color, label=label if bar == 1 else None)
            left += size / 1e6
        axes.text(left, bar, f" {left:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("parameters (millions)")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _count_parameters(row: str) -> tuple[ParameterCount, ParameterCount]:
    """Count the parameters of a row of Table 3 with one matrix and with three matrices."""
    found = []
    for num_matrices in (1, 3):
        config = VanillaTransformerConfig.from_paper(
            row, vocab_size=VOCAB_SIZE, tie_word_embeddings=num_matrices == 1
        )
        # weights on the meta device have a size but take no memory
        with torch.device("meta"):
            model = VanillaTransformerForConditionalGeneration(config)
        matrix = VOCAB_SIZE * config.d_model
        layers = model.num_parameters() - num_matrices * matrix
        found.append(ParameterCount(num_matrices, layers, matrix))
    one, three = found
    return one, three
