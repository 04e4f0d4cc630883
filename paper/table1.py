"""Table 1: cost of a layer, and path length between two positions. Section 4."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..drawing import new_figure
from .study import Section
from .table1_layers import (
    ATTENTION,
    D_K,
    DILATED,
    FUSED,
    KINDS,
    PROJECTIONS,
    RECURRENT,
    Cost,
    chain_lengths,
    measure,
    path_lengths,
    slope,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEGABYTE = 1e6
MILLISECOND = 1e-3


class Sizes(NamedTuple):
    """Lengths n to measure at one width d, and widths d to measure at one length n."""

    lengths: Sequence[int]
    width: int
    widths: Sequence[int]
    length: int


DEFAULT_SIZES = Sizes((64, 128, 256, 512, 1024, 2048), 256, (64, 128, 256, 512, 1024), 256)
FULL_SIZES = Sizes(
    (128, 256, 512, 1024, 2048, 4096, 8192), 512, (64, 128, 256, 512, 1024, 2048, 4096), 512
)
SHORT_LENGTHS = (8, 16, 32, 64)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument(
        "--kernel",
        type=int,
        default=3,
        help="kernel width k of the convolution (default: %(default)s)",
    )
    parser.add_argument(
        "--neighbourhood",
        type=int,
        default=17,
        help="odd neighbourhood r of restricted attention (default: %(default)s)",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="measure longer sequences and wider layers, for a GPU; the default sizes take a "
        "minute or two on one core",
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: %(default)s)")


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Measure the cost and the path length of each kind of layer as n and d grow.

    Args:
        flags: Flags that `add_flags` declares.

    Yields:
        Six sections.

    Raises:
        ValueError: If the kernel or the neighbourhood is too small, or the neighbourhood is even.
    """
    if flags.kernel < 2:
        raise ValueError(f"kernel must be at least 2, got {flags.kernel}.")
    if flags.neighbourhood < 3 or flags.neighbourhood % 2 == 0:
        raise ValueError(f"neighbourhood must be odd and at least 3, got {flags.neighbourhood}.")
    torch.manual_seed(flags.seed)
    sizes = FULL_SIZES if flags.full else DEFAULT_SIZES
    by_length = _measure_all(flags, [(n, sizes.width) for n in sizes.lengths])
    yield _growth_section("length", "n", by_length, sizes.lengths, f"d = {sizes.width:,}", flags)
    by_width = _measure_all(flags, [(sizes.length, d) for d in sizes.widths])
    yield _growth_section("width", "d", by_width, sizes.widths, f"n = {sizes.length:,}", flags)
    yield _memory_section(by_length, by_width, sizes)
    yield _recurrence_section(by_length, sizes)
    yield _chain_section(flags)
    yield _path_section(flags)


def _measure_all(
    flags: argparse.Namespace, sizes: Sequence[tuple[int, int]]
) -> dict[str, list[Cost]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        kind: [measure(kind, n, d, flags.kernel, flags.neighbourhood, device) for n, d in sizes]
        for kind in KINDS
    }


def _slope_of_large_sizes(sizes: Sequence[int], values: Sequence[float]) -> float:
    # fit only the larger half of the sizes: at small sizes, constant costs dominate
    num_small = len(sizes) // 2
    return slope(sizes[num_small:], values[num_small:])


def _growth_section(
    name: str,
    letter: str,
    costs: Mapping[str, Sequence[Cost]],
    sizes: Sequence[int],
    fixed_size: str,
    flags: argparse.Namespace,
) -> Section:
    rows: list[list[Any]] = [
        [
            kind,
            KINDS[kind].complexity,
            KINDS[kind].flops,
            KINDS[kind].exponents["nd".index(letter)],
            slope(sizes, [cost.flops for cost in kind_costs]),
            _slope_of_large_sizes(sizes, [cost.seconds for cost in kind_costs]),
            kind_costs[-1].flops,
            kind_costs[-1].seconds / MILLISECOND,
        ]
        for kind, kind_costs in costs.items()
    ]
    worst_row = max(rows, key=lambda row: abs(row[5] - row[3]))
    worst_kind, _, _, exponent, _, time_exponent, *_ = worst_row
    size_name = {"n": "length n", "d": "width d"}[letter]
    growth = {
        "n": "Self-attention grows with the square of the length, because every position attends "
        "to every other; the fused kernel computes the same. All other kinds grow linearly, "
        "restricted attention included.",
        "d": "A product with weights grows with the square of the width. Attention itself has no "
        "weights and grows linearly, so attention is cheap in wide layers.",
    }[letter]
    message = {
        "n": "Self-attention grows with the square of the length n, all other kinds linearly",
        "d": "Products with weights grow with the square of the width d, attention linearly",
    }[letter]
    return Section(
        name=name,
        title=f"Complexity per layer, against the {size_name}",
        finding=f"The forward pass of one sequence, with {fixed_size}, k = {flags.kernel}, r = "
        f"{flags.neighbourhood} and heads of width {D_K}; time is {_clock_name()}. {growth} FLOPs "
        "are those that torch counts, and their exponent is exactly that of the formula. The "
        "exponent of time is close to it only if the work is much larger than the constant cost, "
        "so it is fitted to the larger half of the sizes. Data that no longer fits into the caches "
        f"changes it too. The largest deviation is {time_exponent:.2f} instead of {exponent} "
        f"({worst_kind}).",
        columns=(
            "layer",
            "the paper",
            "FLOPs",
            f"exponent of {letter}",
            "of FLOPs",
            "of time",
            f"FLOPs at {letter} = {sizes[-1]:,}",
            "ms",
        ),
        rows=rows,
        figure=_draw_growth(costs, sizes, letter),
        message=f"{message} ({fixed_size})",
        numbers={
            "sizes": list(sizes),
            "costs": {
                kind: [cost._asdict() for cost in kind_costs] for kind, kind_costs in costs.items()
            },
        },
    )


def _clock_name() -> str:
    if torch.cuda.is_available():
        return "measured on a GPU"
    return "CPU time of one thread"


def _draw_growth(
    costs: Mapping[str, Sequence[Cost]], sizes: Sequence[int], letter: str
) -> "Figure":
    figure, plots = new_figure(10.0, 4.4, columns=2)
    axis_label = {"n": "positions n", "d": "width d"}[letter]
    for axes, measurement, unit in (
        (plots[0][0], lambda cost: cost.flops, "FLOPs"),
        (plots[0][1], lambda cost: cost.seconds / MILLISECOND, "milliseconds"),
    ):
        for kind, kind_costs in costs.items():
            axes.loglog(sizes, list(map(measurement, kind_costs)), **_line_style(kind))
        _label_sizes(axes, sizes, axis_label)
        axes.set_ylabel(f"{unit} of a forward pass")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _line_style(kind: str) -> dict[str, str]:
    color_number = list(KINDS).index(kind.removesuffix(DILATED))
    linestyle = {FUSED: "--", PROJECTIONS: ":"}.get(kind, "--" if kind.endswith(DILATED) else "-")
    return {"label": kind, "color": f"C{color_number}", "linestyle": linestyle, "marker": "o"}


def _label_sizes(axes, sizes: Sequence[int], label: str):
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def _memory_section(
    by_length: Mapping[str, Sequence[Cost]], by_width: Mapping[str, Sequence[Cost]], sizes: Sizes
) -> Section:
    rows = []
    for kind, kind_costs in by_length.items():
        rows.append(
            [
                kind,
                KINDS[kind].saved_exponents[0],
                _slope_of_large_sizes(sizes.lengths, [cost.saved_bytes for cost in kind_costs]),
                KINDS[kind].saved_exponents[1],
                _slope_of_large_sizes(sizes.widths, [cost.saved_bytes for cost in by_width[kind]]),
                kind_costs[-1].saved_bytes / MEGABYTE,
                *([] if kind_costs[-1].peak is None else [kind_costs[-1].peak / MEGABYTE]),
            ]
        )
    columns = ["layer", "exponent of n", "measured", "exponent of d", "measured"]
    columns.append(f"MB at n = {sizes.lengths[-1]:,}")
    has_peak = len(rows[0]) > len(columns)
    written_megabytes, fused_megabytes = (
        by_length[kind][-1].saved_bytes / MEGABYTE for kind in (ATTENTION, FUSED)
    )
    return Section(
        name="memory",
        title="Memory kept for the backward pass",
        finding="Table 1 does not count memory, but training needs it. These are the bytes that a "
        "forward pass keeps for the backward pass: with the input, without the model's weights, "
        "each block of memory once. Equation (1) as written keeps its attention weights, n^2 for "
        f"each of the d / {D_K} heads: {written_megabytes:,.1f} MB at n = {sizes.lengths[-1]:,} "
        f"and d = {sizes.width:,}. The fused kernel computes them again in the backward pass, and "
        f"keeps {fused_megabytes:,.1f} MB: more work, but memory that grows linearly. The exponent "
        "is fitted to the larger half of the sizes, where the n^2 term dominates the n d terms."
        + (" The peak is the maximum GPU memory of both passes." if has_peak else ""),
        columns=[*columns, "peak MB"] if has_peak else columns,
        rows=rows,
        figure=_draw_memory(by_length, sizes.lengths),
        message="Only equation (1) as written keeps memory that grows with the square of the "
        f"length n (d = {sizes.width:,})",
    )


def _draw_memory(costs: Mapping[str, Sequence[Cost]], lengths: Sequence[int]) -> "Figure":
    figure, axes = new_figure(8.0, 4.2)
    for kind, kind_costs in costs.items():
        axes.loglog(
            lengths, [cost.saved_bytes / MEGABYTE for cost in kind_costs], **_line_style(kind)
        )
    _label_sizes(axes, lengths, "positions n")
    axes.set_ylabel("MB kept for the backward pass")
    figure.legend(loc="outside right center", fontsize=9)
    return figure


def _recurrence_section(costs: Mapping[str, Sequence[Cost]], sizes: Sizes) -> Section:
    rows = []
    for index, n in enumerate(sizes.lengths):
        written, fused, projections, recurrent = (
            costs[kind][index] for kind in (ATTENTION, FUSED, PROJECTIONS, RECURRENT)
        )
        rows.append(
            [
                n,
                n / sizes.width,
                (written.flops + projections.flops) / recurrent.flops,
                (written.seconds + projections.seconds) / recurrent.seconds,
                (fused.seconds + projections.seconds) / recurrent.seconds,
            ]
        )
    _, _, equal_flops, equal_written, equal_fused = rows[sizes.lengths.index(sizes.width)]
    longest, _, longest_flops, longest_written, longest_fused = rows[-1]
    return Section(
        name="recurrence",
        title="Self-attention against a recurrence: n < d",
        finding="Section 4: self-attention layers are faster than recurrent ones when n is smaller "
        "than d, as it usually is for sentences of word pieces. The table divides the cost of an "
        "attention layer, projections included, by that of torch's gated recurrent unit of the "
        f"same width, d = {sizes.width:,}. They need 8 n d^2 + 4 n^2 d and 12 n d^2 operations, "
        f"which are equal exactly at n = d; the counted ratio there is {equal_flops:.2f}. The "
        "ratio of times is lower, because each of the recurrence's n steps must wait for the "
        f"previous one. Equation (1) as written takes {equal_written:.2g} times as long as the "
        f"recurrence at n = d, and {longest_written:.2g} times as long at n = {longest:,}, with "
        f"{longest_flops:.2g} times the operations. With torch's fused kernel the ratios are "
        f"{equal_fused:.2g} and {longest_fused:.2g}. This is one sequence; a batch of many "
        "sequences would use the recurrence's steps better.",
        columns=(
            "n",
            "n / d",
            "FLOPs, attention / recurrence",
            "time, equation (1)",
            "time, fused kernel",
        ),
        rows=rows,
        figure=_draw_recurrence(rows),
        message="Self-attention needs fewer FLOPs than a recurrence if n is smaller than d "
        f"(d = {sizes.width:,}; below 1, attention costs less)",
    )


def _draw_recurrence(rows: Sequence[Sequence[float]]) -> "Figure":
    figure, axes = new_figure(7.0, 4.0)
    _, ratios, flops, seconds, fused = zip(*rows, strict=True)
    axes.loglog(ratios, flops, "o-", label="FLOPs")
    axes.loglog(ratios, seconds, "s-", label="time, equation (1)")
    axes.loglog(ratios, fused, "^--", label="time, fused kernel")
    axes.axhline(1, color="0.5", linewidth=1)
    axes.axvline(1, color="0.5", linewidth=1, linestyle="--")
    axes.annotate("n = d", (1, min(*seconds, *fused)), (5, 0), textcoords="offset points")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.minorticks_off()
    axes.set_xlabel("n / d")
    axes.set_ylabel("attention layer / recurrence")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _chain_section(flags: argparse.Namespace) -> Section:
    chains = [chain_lengths(n, flags.kernel, flags.neighbourhood) for n in SHORT_LENGTHS]
    rows: list[list[Any]] = []
    for kind in KINDS:
        kind_lengths = [chain[kind] for chain in chains]
        added_operations = (kind_lengths[-1] - kind_lengths[-2]) / (
            SHORT_LENGTHS[-1] - SHORT_LENGTHS[-2]
        )
        rows.append([kind, f"O({KINDS[kind].sequential})", *kind_lengths, added_operations])
    added_operations = next(row[-1] for row in rows if row[0] == RECURRENT)
    return Section(
        name="sequential",
        title="Sequential operations",
        finding="The length of the longest chain of dependent operations, in torch's graph of one "
        "layer. More parallel cores do not shorten it. In a recurrence each position adds "
        f"{added_operations:g} operations. In the other kinds a position adds none, which is O(1); "
        "the constant depends on the number of operations of the layer.",
        columns=("layer", "the paper", *(f"n = {n}" for n in SHORT_LENGTHS), "added per position"),
        rows=rows,
        figure=_draw_short_lengths(
            {row[0]: row[2 : 2 + len(SHORT_LENGTHS)] for row in rows},
            "operations in the longest chain",
        ),
        message="In a recurrence, each position adds operations that must wait for others",
    )


def _path_section(flags: argparse.Namespace) -> Section:
    formulas = {
        "self-attention": "O(1)",
        "recurrent": "O(n)",
        "convolutional": "O(n / k)",
        f"convolutional{DILATED}": "O(log_k(n))",
        "restricted attention": "O(n / r)",
    }
    paths_by_length = [path_lengths(n, flags.kernel, flags.neighbourhood) for n in SHORT_LENGTHS]
    measured = {kind: [paths[kind][0] for paths in paths_by_length] for kind in formulas}
    computed = {kind: [paths[kind][1] for paths in paths_by_length] for kind in formulas}
    num_equal = sum(
        measured_length == computed_length
        for kind in formulas
        for measured_length, computed_length in zip(measured[kind], computed[kind], strict=True)
    )
    exact_formulas = {
        "self-attention": "1",
        "recurrent": "n",
        "convolutional": "(n - 1) / (k - 1), rounded up",
        f"convolutional{DILATED}": "log_k(n), rounded up",
        "restricted attention": "(n - 1) / ((r - 1) / 2), rounded up",
    }
    return Section(
        name="path",
        title="Maximum path length",
        finding="The number of operations that a signal passes from the first position to the "
        "last: the smallest number of layers (for the recurrence, of states) with which the "
        "gradient of the last output with respect to the first input is not zero. It is measured "
        f"on layers with random weights, k = {flags.kernel}, r = {flags.neighbourhood}; "
        f"{num_equal} of {len(formulas) * len(SHORT_LENGTHS)} measured lengths are equal to the "
        "exact formula. Dependencies are easier to learn over a shorter path. With self-attention "
        "the path between any two positions is one step long.",
        columns=("layer", "the paper", "exact formula", *(f"n = {n}" for n in SHORT_LENGTHS)),
        rows=[[kind, formulas[kind], exact_formulas[kind], *measured[kind]] for kind in formulas],
        figure=_draw_short_lengths(measured, "path length from the first position to the last"),
        message="Self-attention connects any two positions in one step "
        f"(k = {flags.kernel}, r = {flags.neighbourhood})",
        numbers={"computed": computed},
    )


def _draw_short_lengths(values: Mapping[str, Sequence[int]], label: str) -> "Figure":
    figure, axes = new_figure(8.0, 4.0)
    for kind, kind_values in values.items():
        axes.loglog(SHORT_LENGTHS, kind_values, **_line_style(kind))
    _label_sizes(axes, SHORT_LENGTHS, "positions n")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(label)
    figure.legend(loc="outside right center", fontsize=9)
    return figure
