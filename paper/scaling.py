"""Section 3.2.1: why attention divides scores by the square root of d_k.

Shapes: d_k width of queries and keys, Q queries, K keys.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..drawing import new_figure
from ..modeling_vanilla_transformer import scaled_dot_product_attention
from .study import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512)
NUM_HEADS = 8
NUM_KEYS = 64
NUM_QUERIES = 1024
# d_k of the base model; the text states the numbers at this width
BASE_WIDTH = 64
# the gradient of a query has vanished if the norm of the softmax's Jacobian is below this
VANISHED_NORM = 0.01
SCALE_OF_WIDTH = {
    "none": lambda d_k: 1.0,
    "1 / sqrt(d_k)": lambda d_k: d_k**-0.5,
    "1 / sqrt(d_model)": lambda d_k: (NUM_HEADS * d_k) ** -0.5,
}


@dataclass(frozen=True, kw_only=True)
class SoftmaxStatistics:
    """Statistics of scaled scores and their softmax: means over queries unless stated otherwise.

    Attributes:
        variance: Variance of the scaled scores.
        entropy: Entropy of the weights, in nats.
        largest_weight: Largest weight of a query.
        mean_jacobian_norm: Frobenius norm of the softmax's Jacobian. The gradient of the scores is
            at most this many times as long as the gradient of the weights.
        median_jacobian_norm: Median over the queries of the norm of the Jacobian.
        vanished_share: Share of the queries for which the norm of the Jacobian is below
            `VANISHED_NORM`.
    """

    variance: float
    entropy: float
    largest_weight: float
    mean_jacobian_norm: float
    median_jacobian_norm: float
    vanished_share: float


def measure(
    d_k: int,
    scale: float,
    num_keys: int = NUM_KEYS,
    num_queries: int = NUM_QUERIES,
    seed: int = 0,
) -> SoftmaxStatistics:
    """Measure attention with random queries and keys, whose components have mean 0 and variance 1.

    Args:
        d_k: Width of queries and keys.
        scale: Factor of the scores.
        num_keys: Number of keys of each query.
        num_queries: Number of queries to average over.
        seed: Seed of queries and keys.

    Returns:
        Statistics of the scores and of their softmax.

    Raises:
        ValueError: If a size is below 1.
    """
    for size_name, size in (("d_k", d_k), ("num_keys", num_keys), ("num_queries", num_queries)):
        if size < 1:
            raise ValueError(f"{size_name} must be at least 1, got {size}.")
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_queries, 1, d_k, generator=generator)  # [Q, 1, d_k]
    key = torch.randn(num_queries, num_keys, d_k, generator=generator)  # [Q, K, d_k]
    scores = query @ key.transpose(-2, -1) * scale  # [Q, 1, K]
    # the model's attention divides by sqrt(d_k): multiply first, so that only `scale` has an effect
    scaled_query = query * (scale * math.sqrt(d_k))
    _, weights = scaled_dot_product_attention(scaled_query, key, key[..., :1], None)
    weights = weights[:, 0].double()  # [Q, K]
    jacobian_norms = jacobian_norm(weights)  # [Q]
    return SoftmaxStatistics(
        variance=float(scores.var()),
        entropy=float(-torch.special.xlogy(weights, weights).sum(dim=-1).mean()),
        largest_weight=float(weights.max(dim=-1).values.mean()),
        mean_jacobian_norm=float(jacobian_norms.mean()),
        median_jacobian_norm=float(jacobian_norms.median()),
        vanished_share=float((jacobian_norms < VANISHED_NORM).double().mean()),
    )


def jacobian_norm(weights: Tensor) -> Tensor:
    """Return the Frobenius norm of the softmax's Jacobian, diag(p) - p p^T.

    Args:
        weights: Output of the softmax, [..., K].

    Returns:
        Norms, [...]; 0 if one weight is 1.
    """
    squares = weights.square().sum(dim=-1)
    cubes = weights.pow(3).sum(dim=-1)
    return (squares - 2 * cubes + squares.square()).clamp(min=0.0).sqrt()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument(
        "--d_k",
        type=int,
        nargs="+",
        default=list(WIDTHS),
        help=f"widths of queries and keys (default: {' '.join(map(str, WIDTHS))})",
    )
    parser.add_argument(
        "--num_keys",
        type=int,
        default=NUM_KEYS,
        help="number of keys of each query (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of queries and keys (default: %(default)s)"
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Measure the variance of the scores, and the effect on the softmax.

    Args:
        flags: Flags that `add_flags` declares.

    Yields:
        Two sections.

    Raises:
        ValueError: If a size is below 1.
    """
    widths = sorted(set(flags.d_k))
    statistics_by_scale = {
        name: [measure(d_k, scale(d_k), num_keys=flags.num_keys, seed=flags.seed) for d_k in widths]
        for name, scale in SCALE_OF_WIDTH.items()
    }
    yield _variance_section(widths, statistics_by_scale)
    yield _softmax_section(widths, statistics_by_scale, flags.num_keys)


def _variance_section(
    widths: Sequence[int], statistics_by_scale: dict[str, list[SoftmaxStatistics]]
) -> Section:
    formulas = {
        "none": widths,
        "1 / sqrt(d_k)": [1.0] * len(widths),
        "1 / sqrt(d_model)": [1 / NUM_HEADS] * len(widths),
    }
    figure, axes = new_figure(7.0, 4.2)
    for name, statistics in statistics_by_scale.items():
        (line,) = axes.plot(widths, formulas[name], linewidth=1, label=f"formula, {name}")
        variances = [width_statistics.variance for width_statistics in statistics]
        axes.plot(widths, variances, "o", color=line.get_color(), label=f"measured, {name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(widths, [str(d_k) for d_k in widths])
    axes.set_xlabel("d_k")
    axes.set_ylabel("variance of the scores")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    largest_error = max(
        abs(width_statistics.variance / formula - 1)
        for name, statistics in statistics_by_scale.items()
        for width_statistics, formula in zip(statistics, formulas[name], strict=True)
    )
    rows = []
    for width_index, d_k in enumerate(widths):
        row: list[float] = [d_k]
        for name in SCALE_OF_WIDTH:
            measured_variance = statistics_by_scale[name][width_index].variance
            row += [measured_variance, float(formulas[name][width_index])]
        rows.append(row)
    unscaled = statistics_by_scale["none"]
    first_variance, last_variance = unscaled[0].variance, unscaled[-1].variance
    return Section(
        name="variance",
        title="The variance of q . k is d_k",
        finding="A score is a sum of d_k products. If the components of queries and keys have mean "
        "0 and variance 1, so has each product, and the variance of the score is d_k: measured "
        f"{first_variance:.2f} at d_k = {widths[0]} and {last_variance:.1f} at {widths[-1]}. "
        "Divided by the root of d_k, scores have variance 1 at every width. Divided by the root of "
        f"d_model = {NUM_HEADS} d_k, a common error, they have variance 1 / h = {1 / NUM_HEADS:g}. "
        f"Every measured variance is within {largest_error:.1%} of its formula.",
        columns=(
            "d_k",
            *(
                f"{name}: {number_kind}"
                for name in SCALE_OF_WIDTH
                for number_kind in ("measured", "formula")
            ),
        ),
        rows=rows,
        figure=figure,
        message="Scores without scaling grow with d_k; divided by its root they keep variance 1",
    )


def _softmax_section(
    widths: Sequence[int], statistics_by_scale: dict[str, list[SoftmaxStatistics]], num_keys: int
) -> Section:
    width_index = widths.index(BASE_WIDTH) if BASE_WIDTH in widths else len(widths) - 1
    stated_width = widths[width_index]
    unscaled, scaled, overscaled = (
        statistics_by_scale[name][width_index] for name in SCALE_OF_WIDTH
    )
    last_unscaled = statistics_by_scale["none"][-1]
    last_scaled = statistics_by_scale["1 / sqrt(d_k)"][-1]
    return Section(
        name="softmax",
        title="The effect on the softmax",
        finding=f"At d_k = {stated_width} and {num_keys} keys, unscaled scores give a largest "
        f"weight of {unscaled.largest_weight:.2f} and an entropy of {unscaled.entropy:.2f} nats; "
        f"the maximum is {math.log(num_keys):.2f}. Scaled scores give {scaled.largest_weight:.2f} "
        f"and {scaled.entropy:.2f}. The gradient passes through the Jacobian of the softmax. "
        f"Without scaling, the Jacobian vanishes (norm below {VANISHED_NORM}) for "
        f"{unscaled.vanished_share:.0%} of the queries at d_k = {stated_width} and for "
        f"{last_unscaled.vanished_share:.0%} at {widths[-1]}. Its median norm is "
        f"{unscaled.median_jacobian_norm:.3f} at {stated_width}, and "
        f"{scaled.median_jacobian_norm:.3f} with scaling; at {widths[-1]} it is "
        f"{last_unscaled.median_jacobian_norm:.4f}, and {last_scaled.median_jacobian_norm:.3f} "
        f"with scaling. The mean norm falls more slowly ({unscaled.mean_jacobian_norm:.3f} and "
        f"{last_unscaled.mean_jacobian_norm:.3f}), because a few queries have similar weights on "
        "two keys. Divided by the root of d_model, the weights are too even (entropy "
        f"{overscaled.entropy:.2f}): every head begins almost as an average of all keys, with a "
        f"median norm of {overscaled.median_jacobian_norm:.3f}, and the smaller factor also scales "
        "the gradient of queries and keys.",
        columns=(
            "scaling",
            "d_k",
            "entropy (nats)",
            "largest weight",
            "norm of the Jacobian, mean",
            "median",
            f"share below {VANISHED_NORM}",
        ),
        rows=[
            [
                name,
                d_k,
                width_statistics.entropy,
                width_statistics.largest_weight,
                width_statistics.mean_jacobian_norm,
                width_statistics.median_jacobian_norm,
                width_statistics.vanished_share,
            ]
            for name, statistics in statistics_by_scale.items()
            for d_k, width_statistics in zip(widths, statistics, strict=True)
        ],
        figure=_draw_softmax(widths, statistics_by_scale, num_keys),
        message="Without scaling the softmax chooses a single key, and more and more queries lose "
        f"their gradient (d_model = {NUM_HEADS} d_k)",
    )


def _draw_softmax(
    widths: Sequence[int], statistics_by_scale: dict[str, list[SoftmaxStatistics]], num_keys: int
) -> "Figure":
    figure, all_axes = new_figure(10.5, 4.0, 1, 3)
    panels = (
        ("entropy", "entropy of the weights (nats)"),
        ("median_jacobian_norm", "norm of the softmax's Jacobian, median"),
        ("vanished_share", f"share of queries with a norm below {VANISHED_NORM}"),
    )
    for axes, (field, field_label) in zip(all_axes[0], panels, strict=True):
        for curve_index, (name, statistics) in enumerate(statistics_by_scale.items()):
            values = [getattr(width_statistics, field) for width_statistics in statistics]
            # draw the last curve dashed and thin, so that an equal curve below it stays visible
            is_last = curve_index == len(statistics_by_scale) - 1
            line_style, marker_size = ("--", 4) if is_last else ("-", 7 - curve_index)
            label = "not scaled" if name == "none" else f"scaled by {name}"
            axes.plot(
                widths,
                values,
                marker="o",
                linestyle=line_style,
                linewidth=marker_size / 2,
                markersize=marker_size,
                label=label,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [str(d_k) for d_k in widths], fontsize=7)
        axes.set_xlabel("d_k")
        axes.set_ylabel(field_label)
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
    # equal weights for all keys have the highest entropy
    all_axes[0, 0].axhline(math.log(num_keys), color="0.5", linestyle="--", linewidth=1)
    all_axes[0, 0].set_ylim(top=1.15 * math.log(num_keys))
    all_axes[0, 0].text(
        widths[0],
        1.03 * math.log(num_keys),
        f"equal weights for {num_keys} keys",
        fontsize=8,
        color="0.4",
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
