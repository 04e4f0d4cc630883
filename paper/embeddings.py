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
NUM_EMBEDDED_TOKENS = 64
NUM_POSITIONS = 64
TABLE_3_ROWS = ("C4", "base", "big")
TABLE_3_NOTE = "C4, base, big: rows of Table 3"
# vocabulary for measuring random embeddings: their root mean square does not depend on its size
SMALL_VOCAB_SIZE = 2_000
MATRIX_NAMES = ("shared matrix, or source embedding", "target embedding", "output projection")
MATRIX_COLORS = ("#35b779", "#90d743", "#fde725")
LAYERS_COLOR = "#31688e"
# use of the matrix: its place in figure 1, and its parameter in an untied model
MATRIX_USES = {
    "source": ("encoder's input", "model.encoder.embed_tokens.weight"),
    "target": ("decoder's input", "model.decoder.embed_tokens.weight"),
    "output": ("projection before the softmax", "lm_head.weight"),
}


@dataclass(frozen=True, kw_only=True)
class EmbeddingSize:
    """Root mean squares of embeddings and positional encoding.

    Attributes:
        d_model: Width.
        unscaled: Root mean square of the embedding matrix.
        scaled: Root mean square of the embeddings after the factor sqrt(d_model).
        positions: Root mean square of the positional encoding.
    """

    d_model: int
    unscaled: float
    scaled: float
    positions: float


class ParameterCount(NamedTuple):
    """Number of embedding matrices of a model, parameters of its layers and of one such matrix."""

    num_matrices: int
    layer_parameters: int
    matrix_parameters: int


def one_hot_product(ids: Tensor, embedding_matrix: Tensor) -> Tensor:
    """Embed tokens by a product of one-hot rows and the embedding matrix.

    Args:
        ids: Token ids, [T].
        embedding_matrix: Embedding matrix, [V, d_model].

    Returns:
        The embeddings, [T, d_model].
    """
    return F.one_hot(ids, len(embedding_matrix)).to(embedding_matrix.dtype) @ embedding_matrix


def embedding_size(model: PreTrainedModel) -> EmbeddingSize:
    """Measure the embeddings and the positional encoding of a model.

    Args:
        model: Model of this package; a learned table with fewer rows than `NUM_POSITIONS` is
            measured whole.

    Returns:
        Root mean squares of the embeddings and of the positional encoding.

    Raises:
        ValueError: If the model has no positional encoding.
    """
    embedding_matrix = model.get_input_embeddings().weight.detach().float()  # [V, d_model]
    d_model = model.config.d_model
    unscaled = _root_mean_square(embedding_matrix)
    return EmbeddingSize(
        d_model=d_model,
        unscaled=unscaled,
        scaled=unscaled * math.sqrt(d_model),
        positions=_root_mean_square(model_encoding(model, NUM_POSITIONS)),
    )


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def gradients_by_use(
    model: PreTrainedModel, source: Tensor, decoder_inputs: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """Return the gradient of the tied matrix, and of each matrix of an untied copy of the model.

    Args:
        model: Model with tied matrices; it is copied and does not change.
        source: Source tokens, [B, S].
        decoder_inputs: Target tokens, shifted right, [B, T].
        labels: Target tokens, [B, T].

    Returns:
        Gradients of the untied matrices by the names of `MATRIX_USES`, and of the tied matrix as
        "tied", [V, d_model] each.
    """
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    untied_model = VanillaTransformerForConditionalGeneration(config).eval()
    untied_model.load_state_dict(model.state_dict())
    tied_model = copy.deepcopy(model).eval()
    for model_copy in (tied_model, untied_model):
        logits = model_copy(input_ids=source, decoder_input_ids=decoder_inputs).logits
        smoothed_loss_sum(logits, labels, 0.0).backward()
    untied_parameters = dict(untied_model.named_parameters())
    gradients = {use: untied_parameters[name].grad for use, (_, name) in MATRIX_USES.items()}
    return {**gradients, "tied": tied_model.get_input_embeddings().weight.grad}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    add_optional_model_flag(parser)
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")


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
    run_sizes = {}
    if flags.model is not None:
        trained_model, _ = load_trained(flags.model, flags.trust_remote_code)
        untrained_model = VanillaTransformerForConditionalGeneration(trained_model.config)
        run_sizes = {
            "this model, untrained": embedding_size(untrained_model),
            "this model, trained": embedding_size(trained_model),
        }
    yield _one_hot_section()
    yield _factor_section(run_sizes, flags.model)
    yield _tie_section()


def _one_hot_section() -> Section:
    d_model = VanillaTransformerConfig.from_paper("base").d_model
    embedding_matrix = torch.randn(VOCAB_SIZE, d_model) * d_model**-0.5
    ids = torch.randint(VOCAB_SIZE, (NUM_EMBEDDED_TOKENS,))
    product, product_seconds = _measure_seconds(lambda: one_hot_product(ids, embedding_matrix))
    look_up, look_up_seconds = _measure_seconds(lambda: F.embedding(ids, embedding_matrix))
    product_flops = 2 * NUM_EMBEDDED_TOKENS * VOCAB_SIZE * d_model
    one_hot_bytes = NUM_EMBEDDED_TOKENS * VOCAB_SIZE * embedding_matrix.element_size()
    id_bytes = NUM_EMBEDDED_TOKENS * ids.element_size()
    difference = float((product - look_up).abs().max())
    return Section(
        name="one_hot",
        title="Look-up, and product with one-hot rows",
        finding="An embedding is a linear layer with a one-hot input: a row of zeros with a single "
        f"1, which selects a row of the matrix. For {NUM_EMBEDDED_TOKENS} tokens and the matrix of "
        f"base, {VOCAB_SIZE:,} x {d_model}, product and look-up give identical results (largest "
        f"difference {difference:g}). The product needs {product_flops / 1e9:.1f} GFLOP, nearly "
        f"all of them multiplications by 0, and took {1e3 * product_seconds:.1f} ms. The look-up "
        f"copies {NUM_EMBEDDED_TOKENS} rows and took {1e3 * look_up_seconds:.3f} ms.",
        columns=("method", "FLOPs", "bytes of input", "milliseconds", "largest difference"),
        rows=[
            [
                "product with one-hot rows",
                product_flops,
                one_hot_bytes,
                1e3 * product_seconds,
                None,
            ],
            ["look-up", 0, id_bytes, 1e3 * look_up_seconds, difference],
        ],
        figure=_draw_one_hot(),
        message="A product with one-hot rows selects the framed rows, as a look-up does",
        numbers={"equal": torch.equal(product, look_up)},
    )


def _measure_seconds(function: Callable[[], Tensor], repeats: int = 3) -> tuple[Tensor, float]:
    result, fewest_seconds = function(), math.inf
    for _ in range(repeats):
        start_time = time.perf_counter()
        result = function()
        fewest_seconds = min(fewest_seconds, time.perf_counter() - start_time)
    return result, fewest_seconds


def _draw_one_hot() -> "Figure":
    from matplotlib.patches import Rectangle

    ids, embedding_matrix = torch.tensor([7, 2, 2, 9]), torch.randn(11, 6)
    panels = (
        (F.one_hot(ids, len(embedding_matrix)).float(), "one-hot rows of the positions", "token"),
        (embedding_matrix, "embedding matrix", "component"),
        (one_hot_product(ids, embedding_matrix), "embeddings of the positions", "component"),
    )
    figure, all_axes = new_figure(10.0, 4.4, 1, 3)
    for axes, (panel_matrix, title, xlabel) in zip(all_axes[0], panels, strict=True):
        image = axes.imshow(panel_matrix.numpy(), cmap="RdBu_r", vmin=-2.5, vmax=2.5)
        axes.set_title(title)
        axes.set_xlabel(xlabel)
        axes.set_xticks(range(panel_matrix.shape[1]))
        axes.set_yticks(range(panel_matrix.shape[0]))
    tokens = [f"{position}: token {token}" for position, token in enumerate(ids.tolist())]
    all_axes[0, 0].set_yticks(range(len(ids)), tokens)
    for axes, operator_sign in ((all_axes[0, 1], "×"), (all_axes[0, 2], "=")):  # noqa: RUF001
        axes.text(-0.32, 0.5, operator_sign, transform=axes.transAxes, fontsize=18, va="center")
    for token in sorted(set(ids.tolist())):
        frame_style: dict[str, Any] = {"fill": False, "edgecolor": "black", "linewidth": 2}
        all_axes[0, 1].add_patch(
            Rectangle((-0.5, token - 0.5), embedding_matrix.shape[1], 1, **frame_style)
        )
    figure.colorbar(image, ax=all_axes, label="value", shrink=0.7)
    return figure


def _factor_section(run_sizes: Mapping[str, EmbeddingSize], run: str | None) -> Section:
    sizes = {}
    for row in TABLE_3_ROWS:
        config = VanillaTransformerConfig.from_paper(
            row, vocab_size=SMALL_VOCAB_SIZE, encoder_layers=1, decoder_layers=1
        )
        model = VanillaTransformerForConditionalGeneration(config)
        sizes[f"{row}, untrained"] = embedding_size(model)
    sizes |= run_sizes
    base_size = sizes["base, untrained"]
    finding = (
        "Sizes are root mean squares. The matrix is initialized with a standard deviation of "
        "1 / sqrt(d_model), which suits the output projection: the embeddings of base have a size "
        f"of {base_size.unscaled:.3f}. Sinusoids have a size of {base_size.positions:.3f} = 1 / "
        "sqrt(2), because sin^2 + cos^2 = 1 in each pair. Without the factor, positions would be "
        f"{base_size.positions / base_size.unscaled:.0f} times as large as words in base. With the "
        f"factor, words have a size of {base_size.scaled:.2f}, similar to that of positions at any "
        "width."
    )
    if run_sizes:
        trained_size = sizes["this model, trained"]
        finding += (
            " Training has changed the size of the scaled words of "
            f"{run} from {sizes['this model, untrained'].scaled:.2f} to {trained_size.scaled:.2f}; "
            "without the factor, its positions would be "
            f"{trained_size.positions / trained_size.unscaled:.3g} times as large as its words."
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
                size.unscaled,
                size.scaled,
                size.positions,
                size.positions / size.unscaled,
                size.positions / size.scaled,
            ]
            for name, size in sizes.items()
        ],
        figure=_draw_sizes(sizes),
        message="The factor sqrt(d_model) gives words a size similar to that of positions "
        f"({TABLE_3_NOTE}{f'; this model: {run}' if run_sizes else ''})",
    )


def _draw_sizes(sizes: Mapping[str, EmbeddingSize]) -> "Figure":
    figure, axes = new_figure(8.0, 0.9 + 0.75 * len(sizes))
    bar_positions = range(len(sizes))
    for shift, field, label in (
        (-0.18, "unscaled", "embeddings"),
        (0.18, "scaled", "embeddings times sqrt(d_model)"),
    ):
        bar_lengths = [getattr(size, field) for size in sizes.values()]
        drawn_bars = axes.barh(
            [bar + shift for bar in bar_positions], bar_lengths, height=0.34, label=label
        )
        axes.bar_label(drawn_bars, fmt="%.3f", padding=3, fontsize=8)
    for bar, size in enumerate(sizes.values()):
        line_label = None if bar else "positions of the model"
        axes.plot([size.positions] * 2, [bar - 0.4, bar + 0.4], "k--", label=line_label)
    axes.set_yticks(
        bar_positions,
        [f"{name}\nd_model {size.d_model}" for name, size in sizes.items()],
        fontsize=9,
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("root mean square")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _tie_section() -> Section:
    counts = {row: _count_parameters(row) for row in TABLE_3_ROWS}
    config = VanillaTransformerConfig.from_paper(
        "base", vocab_size=100, d_model=64, encoder_layers=1, decoder_layers=1
    )
    model = VanillaTransformerForConditionalGeneration(config)
    addresses = {
        model.get_parameter(parameter_name).data_ptr() for _, parameter_name in MATRIX_USES.values()
    }
    source_ids, target_ids = torch.randint(100, (2, 8, 10)).unbind()
    start_tokens = torch.zeros_like(target_ids[:, :1])
    decoder_inputs = torch.cat((start_tokens, target_ids[:, :-1]), dim=1)
    gradients = gradients_by_use(model, source_ids, decoder_inputs, target_ids)
    tied_gradient = gradients.pop("tied")
    largest_difference = (sum(gradients.values()) - tied_gradient).abs().max()
    relative_difference = float(largest_difference / tied_gradient.abs().max())
    parameters = {
        row: {
            "tied": tied_count.layer_parameters + tied_count.matrix_parameters,
            "untied": untied_count.layer_parameters + 3 * untied_count.matrix_parameters,
        }
        for row, (tied_count, untied_count) in counts.items()
    }
    base_parameters = parameters["base"]
    saved_parameters = base_parameters["untied"] - base_parameters["tied"]
    norms = {use: float(gradient.norm()) for use, gradient in gradients.items()}
    return Section(
        name="tie",
        title="One matrix, three uses",
        finding="The encoder's input, the decoder's input and the output projection share "
        f"{len(addresses)} address{'es' if len(addresses) > 1 else ''} in memory, so they are "
        f"{'one matrix' if len(addresses) == 1 else 'different matrices'}. A shared vocabulary "
        f"makes this possible. With {VOCAB_SIZE:,} tokens, base saves "
        f"{saved_parameters / 1e6:.2f}M of {base_parameters['untied'] / 1e6:.2f}M parameters. The "
        "gradient of the matrix is the sum of the gradients of three separate matrices (largest "
        f"difference {relative_difference:.0e} of the largest entry). So the vectors of source "
        "tokens also get gradients from the output, where every step changes the vector of every "
        "token.",
        columns=("use", "in figure 1", "parameter", "norm of the gradient of this use"),
        rows=[
            [use, use_in_figure, parameter_name, norms[use]]
            for use, (use_in_figure, parameter_name) in MATRIX_USES.items()
        ],
        figure=_draw_parameters(counts),
        message="One matrix for three uses saves two matrices "
        f"({VOCAB_SIZE:,} tokens; {TABLE_3_NOTE})",
        numbers={"parameters": parameters, "gradient_difference": relative_difference},
    )


def _draw_parameters(counts: Mapping[str, Sequence[ParameterCount]]) -> "Figure":
    figure, axes = new_figure(8.0, 3.6)
    bar_names = [f"{row}, {kind}" for row in counts for kind in ("one matrix", "three matrices")]
    for bar, count in enumerate(count for row_counts in counts.values() for count in row_counts):
        bar_parts = [("layers", count.layer_parameters, LAYERS_COLOR)]
        matrix_parts = list(zip(MATRIX_NAMES, MATRIX_COLORS, strict=True))[: count.num_matrices]
        bar_parts += [(label, count.matrix_parameters, color) for label, color in matrix_parts]
        bar_end = 0.0
        for label, size, color in bar_parts:
            # label the second bar only: it has all parts, and each part is once in the legend
            axes.barh(bar, size / 1e6, left=bar_end, color=color, label=label if bar == 1 else None)
            bar_end += size / 1e6
        axes.text(bar_end, bar, f" {bar_end:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(bar_names)), bar_names)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("parameters (millions)")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _count_parameters(row: str) -> tuple[ParameterCount, ParameterCount]:
    """Count the parameters of a row of Table 3 with one matrix and with three matrices."""
    counts = []
    for num_matrices in (1, 3):
        config = VanillaTransformerConfig.from_paper(
            row, vocab_size=VOCAB_SIZE, tie_word_embeddings=num_matrices == 1
        )
        # weights on the meta device have a size but take no memory
        with torch.device("meta"):
            model = VanillaTransformerForConditionalGeneration(config)
        matrix_parameters = VOCAB_SIZE * config.d_model
        layer_parameters = model.num_parameters() - num_matrices * matrix_parameters
        counts.append(ParameterCount(num_matrices, layer_parameters, matrix_parameters))
    tied_count, untied_count = counts
    return tied_count, untied_count
