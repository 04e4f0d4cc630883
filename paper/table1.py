"""Table 1: what a layer costs, and how far apart two positions are in it. Section 4."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

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
    """Lengths and widths to measure: some lengths at one width, some widths at one length."""

    lengths: Sequence[int]
    width: int
    widths: Sequence[int]
    length: int


DEFAULT = Sizes((64, 128, 256, 512, 1024, 2048), 256, (64, 128, 256, 512, 1024), 256)
FULL = Sizes(
    (128, 256, 512, 1024, 2048, 4096, 8192), 512, (64, 128, 256, 512, 1024, 2048, 4096), 512
)
SHORT_LENGTHS = (8, 16, 32, 64)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument("--kernel", type=int, default=3, help="k, of the convolution (%(default)s)")
    parser.add_argument(
        "--neighbourhood",
        type=int,
        default=17,
        help="r, of restricted attention, odd (%(default)s)",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="longer sequences and wider layers, for a GPU; without it a minute or two on one core",
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed (%(default)s)")


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Measure the cost and the path length of each kind of layer as n and d grow.

    Args:
        flags: As `add_flags` declares them.

    Yields:
        Six sections.

    Raises:
        ValueError: If kernel or neighbourhood cannot be.
    """
    if flags.kernel < 2:
        raise ValueError(f"kernel must be at least 2, got {flags.kernel}.")
    if flags.neighbourhood < 3 or flags.neighbourhood % 2 == 0:
        raise ValueError(f"neighbourhood must be odd and at least 3, got {flags.neighbourhood}.")
    torch.manual_seed(flags.seed)
    sizes = FULL if flags.full else DEFAULT
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


def _long_slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    # where things are small their beginning takes longer than they do
    half = len(sizes) // 2
    return slope(sizes[half:], values[half:])


def _growth_section(
    name: str,
    letter: str,
    costs: Mapping[str, Sequence[Cost]],
    sizes: Sequence[int],
    other: str,
    flags: argparse.Namespace,
) -> Section:
    place = ("n", "d").index(letter)
    rows = [
        [
            kind,
            KINDS[kind].complexity,
            KINDS[kind].flops,
            KINDS[kind].exponents[place],
            slope(sizes, [cost.flops for cost in own]),
            _long_slope(sizes, [cost.seconds for cost in own]),
            own[-1].flops,
            own[-1].seconds / MILLISECOND,
        ]
        for kind, own in costs.items()
    ]
    worst = max(rows, key=lambda row: abs(row[5] - row[3]))
    word = {"n": "length n", "d": "width d"}[letter]
    growth = {
        "n": "Attention grows with the square of the length, for every position looks at every "
        "other; the rest, attention between neighbours only among it, grows linearly.",
        "d": "A product with weights grows with the square of the width; attention itself has no "
        "weights and grows linearly. Wide layers are where attention is cheap.",
    }[letter]
    return Section(
        name=name,
        title=f"Complexity per layer, against the {word}",
        says=f"One sequence forward, {other}, k = {flags.kernel}, r = {flags.neighbourhood}, heads "
        f"of width {D_K}; time is {_clock()}. {growth} FLOPs, which torch counts product by "
        "product, have exactly the exponent of the formula. Time has it only where the work is "
        "large enough to hide what does not grow, so its exponent is fitted to the larger half of "
        "the sizes; memory that no longer fits into caches bends it too. It is farthest off for "
        f"{_full_name(worst[0])}: {worst[5]:.2f} instead of {worst[3]}.",
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
        numbers={
            "sizes": list(sizes),
            "costs": {kind: [cost._asdict() for cost in own] for kind, own in costs.items()},
        },
    )


def _clock() -> str:
    if torch.cuda.is_available():
        return "a GPU's"
    threads = torch.get_num_threads()
    return f"that of {threads} thread{'s' * (threads > 1)} of a CPU"


def _full_name(kind: str) -> str:
    names = {FUSED: "the fused kernel", PROJECTIONS: f"the projections of {ATTENTION}"}
    return names.get(kind, kind)


def _draw_growth(
    costs: Mapping[str, Sequence[Cost]], sizes: Sequence[int], letter: str
) -> "Figure":
    figure, plots = new_figure(10.0, 4.4, columns=2)
    label = {"n": "positions n", "d": "width d"}[letter]
    for axes, measured, unit in (
        (plots[0][0], lambda cost: cost.flops, "FLOPs"),
        (plots[0][1], lambda cost: cost.seconds / MILLISECOND, "milliseconds"),
    ):
        for kind, own in costs.items():
            axes.loglog(sizes, list(map(measured, own)), **_style(kind))
        _name_sizes(axes, sizes, label)
        axes.set_ylabel(f"{unit} of a forward pass")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _style(kind: str) -> dict[str, str]:
    number = list(KINDS).index(kind.removesuffix(DILATED))
    line = {FUSED: "--", PROJECTIONS: ":"}.get(kind, "--" if kind.endswith(DILATED) else "-")
    return {"label": kind, "color": f"C{number}", "linestyle": line, "marker": "o"}


def _name_sizes(axes, sizes: Sequence[int], label: str):
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def _memory_section(
    by_length: Mapping[str, Sequence[Cost]], by_width: Mapping[str, Sequence[Cost]], sizes: Sizes
) -> Section:
    rows = []
    for kind, own in by_length.items():
        rows.append(
            [
                kind,
                KINDS[kind].kept[0],
                _long_slope(sizes.lengths, [cost.kept for cost in own]),
                KINDS[kind].kept[1],
                _long_slope(sizes.widths, [cost.kept for cost in by_width[kind]]),
                own[-1].kept / MEGABYTE,
                *([] if own[-1].peak is None else [own[-1].peak / MEGABYTE]),
            ]
        )
    columns = ["layer", "exponent of n", "measured", "exponent of d", "measured"]
    columns.append(f"MB at n = {sizes.lengths[-1]:,}")
    has_peak = len(rows[0]) > len(columns)
    whole, fused = (by_length[kind][-1].kept / MEGABYTE for kind in (ATTENTION, FUSED))
    return Section(
        name="memory",
        title="Memory kept for backward",
        says="Table 1 does not count memory, but training needs it. Counted are the bytes that a "
        "forward pass keeps for backward, input included and weights not, each piece of memory "
        "once. Equation (1) as it is written keeps its weights, n^2 for each of the "
        f"d / {D_K} heads: {whole:,.1f} MB at n = {sizes.lengths[-1]:,} and d = {sizes.width:,}. "
        f"The fused kernel computes them again when backward wants them, and keeps {fused:,.1f} "
        "MB: more work backward, but memory that grows linearly. The exponent is fitted to the "
        "larger half of the sizes, where the n^2 term has left the n d terms behind."
        + (" The peak is the most that the GPU held on both passes." if has_peak else ""),
        columns=[*columns, "peak MB"] if has_peak else columns,
        rows=rows,
        figure=_draw_memory(by_length, sizes.lengths),
    )


def _draw_memory(costs: Mapping[str, Sequence[Cost]], lengths: Sequence[int]) -> "Figure":
    figure, axes = new_figure(8.0, 4.2)
    for kind, own in costs.items():
        axes.loglog(lengths, [cost.kept / MEGABYTE for cost in own], **_style(kind))
    _name_sizes(axes, lengths, "positions n")
    axes.set_ylabel("MB kept for backward")
    figure.legend(loc="outside right center", fontsize=9)
    return figure


def _recurrence_section(costs: Mapping[str, Sequence[Cost]], sizes: Sizes) -> Section:
    rows = []
    for place, n in enumerate(sizes.lengths):
        written, fused, projections, recurrent = (
            costs[kind][place] for kind in (ATTENTION, FUSED, PROJECTIONS, RECURRENT)
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
    equal = rows[sizes.lengths.index(sizes.width)]
    return Section(
        name="recurrence",
        title="Self-attention against a recurrence: n < d",
        says="Section 4: self-attention layers are faster than recurrent ones when n is smaller "
        "than d, as it is for sentences of word pieces. Here is the whole of an attention layer, "
        "its projections with it, over torch's gated recurrent unit of the same width, d = "
        f"{sizes.width:,}: 8 n d^2 + 4 n^2 d against 12 n d^2 operations, which are as many "
        f"exactly where n = d: counted there, the ratio is {equal[2]:.2f}. Time is another matter, "
        "for the n steps of the recurrence wait for each other: at n = d attention takes "
        f"{equal[3]:.2g} of its time, and at n = {rows[-1][0]:,}, with {rows[-1][2]:.2g} times the "
        f"work, {rows[-1][3]:.2g}. That is equation (1) as it is written; by torch's fused kernel "
        f"the same takes {equal[4]:.2g} and {rows[-1][4]:.2g}. "
        "This is one sequence; many at once would fill the recurrence's steps better.",
        columns=(
            "n",
            "n / d",
            "FLOPs, attention over recurrence",
            "time, equation (1)",
            "time, fused kernel",
        ),
        rows=rows,
        figure=_draw_recurrence(rows),
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
    axes.set_ylabel("attention layer over recurrence")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _chain_section(flags: argparse.Namespace) -> Section:
    chains = [chain_lengths(n, flags.kernel, flags.neighbourhood) for n in SHORT_LENGTHS]
    rows = []
    for kind in KINDS:
        own = [chain[kind] for chain in chains]
        added = (own[-1] - own[-2]) / (SHORT_LENGTHS[-1] - SHORT_LENGTHS[-2])
        rows.append([kind, f"O({KINDS[kind].sequential})", *own, added])
    added = next(row[-1] for row in rows if row[0] == RECURRENT)
    return Section(
        name="sequential",
        title="Sequential operations",
        says="The longest chain of operations that wait for each other, in the graph that torch "
        "made of one layer. It is what no number of parallel cores makes shorter. For a recurrence "
        f"each position adds {added:g} operations; for the other kinds none: O(1), though a layer "
        "that takes a few more operations has a longer chain.",
        columns=("layer", "the paper", *(f"n = {n}" for n in SHORT_LENGTHS), "a position adds"),
        rows=rows,
        figure=_draw_against_length(
            {row[0]: row[2 : 2 + len(SHORT_LENGTHS)] for row in rows}, "operations in a chain"
        ),
    )


def _path_section(flags: argparse.Namespace) -> Section:
    formulas = {
        "self-attention": "O(1)",
        "recurrent": "O(n)",
        "convolutional": "O(n / k)",
        f"convolutional{DILATED}": "O(log_k(n))",
        "restricted attention": "O(n / r)",
    }
    found = [path_lengths(n, flags.kernel, flags.neighbourhood) for n in SHORT_LENGTHS]
    measured = {kind: [paths[kind][0] for paths in found] for kind in formulas}
    computed = {kind: [paths[kind][1] for paths in found] for kind in formulas}
    equal = sum(
        one == other
        for kind in formulas
        for one, other in zip(measured[kind], computed[kind], strict=True)
    )
    exact = {
        "self-attention": "1",
        "recurrent": "n",
        "convolutional": "(n - 1) / (k - 1), up",
        f"convolutional{DILATED}": "log_k(n), up",
        "restricted attention": "(n - 1) / ((r - 1) / 2), up",
    }
    return Section(
        name="path",
        title="Maximum path length",
        says="How many operations a signal passes from the first position to the last: the fewest "
        "layers, for the recurrence the states, until the gradient of the last output with "
        "respect to the first input is not zero. Measured on layers with random weights, "
        f"k = {flags.kernel}, r = {flags.neighbourhood}; {equal} of "
        f"{len(formulas) * len(SHORT_LENGTHS)} are the exact number beside the paper's order. The "
        "shorter the path, the easier it is to learn what depends on what: with self-attention "
        "any two positions are one step apart.",
        columns=("layer", "the paper", "exactly", *(f"n = {n}" for n in SHORT_LENGTHS)),
        rows=[[kind, formulas[kind], exact[kind], *measured[kind]] for kind in formulas],
        figure=_draw_against_length(measured, "path from the first position to the last"),
        numbers={"computed": computed},
    )


def _draw_against_length(values: Mapping[str, Sequence[int]], label: str) -> "Figure":
    figure, axes = new_figure(8.0, 4.0)
    for kind, own in values.items():
        axes.loglog(SHORT_LENGTHS, own, **_style(kind))
    _name_sizes(axes, SHORT_LENGTHS, "positions n")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(label)
    figure.legend(loc="outside right center", fontsize=9)
    return figure
