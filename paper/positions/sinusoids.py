"""Sections about sinusoids: the table, an example by hand, waves, the base, binary numbers."""

import math
from typing import Any

from torch import Tensor

from ... import sinusoidal_encoding
from .. import positional_encoding as encodings
from ..positional_encoding import LEAST_DISTANCE, PAPER_BASE
from ..study import Section, join_names
from . import pictures

EXAMPLE_WORDS = ("River", "Bank")
EXAMPLE_WIDTH = 6
FARTHEST = 20000
REACH_DISTANCES = (1, 10, 100, 1000)
NUM_BITS = 5
# sign changes are counted over 2^COUNTED_BITS steps. The slowest sine changes its sign only about
# every 50 steps, so fewer steps would give an inexact count
COUNTED_BITS = 8


def table(num_positions: int, d_model: int, base: float) -> Section:
    """Draw the table of sinusoids.

    Args:
        num_positions: Number of rows.
        d_model: Number of columns.
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    encoding = sinusoidal_encoding(num_positions, d_model, base)
    # a slow pair has a wavelength above the number of positions: no complete wave in the table
    lengths = encodings.wavelengths(d_model, base)
    slow = int((lengths > num_positions).sum())
    if lengths[0] <= num_positions < lengths[-1]:
        speeds = (
            "Pairs on the left change from word to word, pairs on the right change slowly: "
            f"{slow} of the {len(lengths)} pairs do not complete a wave within {num_positions} "
            "positions. Fast pairs distinguish neighbours, slow pairs show the rough position in "
            "the sentence."
        )
    else:
        speeds = (
            f"{len(lengths) - slow} of the {len(lengths)} pairs complete a wave within "
            f"{num_positions} positions."
        )
    return Section(
        name="table",
        title="The table that is added to the embeddings",
        finding="Each row is the encoding of one position. Each pair of columns is a sine and a "
        f"cosine of one wavelength. {speeds}",
        figure=pictures.draw_heatmap(encoding),
        message=f"Sinusoidal encoding (d_model = {d_model}): {len(lengths) - slow} of the "
        f"{len(lengths)} pairs complete a wave within {num_positions} positions",
    )


def worked_example(base: float) -> Section:
    """Compute the encoding of two words with six features.

    Args:
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    encoding = sinusoidal_encoding(len(EXAMPLE_WORDS), EXAMPLE_WIDTH, base)
    rows = [
        [word, position, *(f"{value:.2f}" for value in encoding[position].tolist())]
        for position, word in enumerate(EXAMPLE_WORDS)
    ]
    divisors = [base ** (2 * pair / EXAMPLE_WIDTH) for pair in range(EXAMPLE_WIDTH // 2)]
    return Section(
        name="worked-example",
        title=f"By hand: two words, d_model = {EXAMPLE_WIDTH}",
        finding="The angles of the pairs are the position divided by "
        f"{join_names([f'{one:.4g}' for one in divisors])}. At position 0 all sines are 0 and all "
        "cosines are 1. At position 1 the angle of the first pair is 1 radian, and the angle of "
        f"the last pair is {1 / divisors[-1]:.4f}.",
        columns=("word", "pos", *(f"{kind} {2 * i}" for i in range(3) for kind in ("sin", "cos"))),
        rows=rows,
        figure=pictures.draw_values(encoding, EXAMPLE_WORDS),
        numbers={"encoding": encoding.tolist()},
    )


def waves(num_positions: int, d_model: int, base: float) -> Section:
    """Show the wavelengths of the pairs.

    Args:
        num_positions: Number of positions to draw.
        d_model: Width.
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    lengths = encodings.wavelengths(d_model, base)
    last = len(lengths) - 1
    shown = sorted({round(last * share / 6) for share in range(7)})
    rows = [
        [pair, 2 * pair, 2 * pair + 1, lengths[pair].item(), num_positions / lengths[pair].item()]
        for pair in shown
    ]
    if lengths[-1] == lengths[0]:
        finding = f"Every pair has the wavelength 2 pi = {lengths[0]:.3f} positions."
    else:
        end = f"{base:,g} * 2 pi = {_rounded(base * 2 * math.pi)}"
        longest = float(lengths[-1])
        of_paper = ", the end of the progression in the paper," if base == PAPER_BASE else ""
        finding = (
            f"The wavelengths are a geometric progression from 2 pi = {lengths[0]:.3f} to "
            f"{_rounded(longest)} positions: each is {base ** (2 / d_model):.4g} times the one "
            f"before. {end}{of_paper} would be the wavelength of the next pair: the exponent of "
            f"the last pair is {d_model - 2}/{d_model}, not 1."
        )
    return Section(
        name="waves",
        title="Wavelengths of the pairs",
        finding=finding,
        columns=("pair i", "sin", "cos", "wavelength", f"waves in {num_positions} positions"),
        rows=rows,
        figure=pictures.draw_waves(d_model, num_positions, base, shown[:4], EXAMPLE_WORDS),
    )


def _rounded(length: float) -> str:
    return f"{length:,.0f}" if length >= 1000 else f"{length:.4g}"


def bases(num_positions: int, d_model: int, bases: list[float]) -> Section:
    """Compare bases by how well they distinguish positions.

    Args:
        num_positions: Number of rows.
        d_model: Number of columns.
        bases: Bases to compare.

    Returns:
        The section.
    """
    tables = {base: sinusoidal_encoding(num_positions, d_model, base) for base in bases}
    rows = [[f"{base:,g}", *_uniqueness(encoding)] for base, encoding in tables.items()]
    unique = [row[0] for row in rows if not row[3]]
    repeating = [f"{row[0]} (position {row[4]})" for row in rows if row[3]]
    return Section(
        name="bases",
        title="Why 10000: uniqueness",
        finding="Two positions count as the same if their distance is at most "
        f"{LEAST_DISTANCE:g} of the step to the next position. Pairs with the same wavelength, as "
        "with base 1, all repeat at the same position; pairs with different wavelengths repeat at "
        "different positions. "
        + (
            f"With base {join_names(unique)}, all {num_positions} positions are different. "
            if unique
            else ""
        )
        + (f"With base {join_names(repeating)}, positions repeat. " if repeating else "")
        + "Similarity depends only on distance, up to rounding: it varies by at most "
        f"{max(row[-1] for row in rows):.0e} among pairs of positions at the same distance. (The "
        "symmetry of the matrices does not show this: every similarity matrix is symmetric.)",
        columns=(
            "base",
            "step",
            "smallest distance",
            "pairs of same positions",
            "first repeat",
            "similarity at 1",
            f"at {num_positions // 2}",
            "largest variation at one distance",
        ),
        rows=rows,
        figure=pictures.draw_bases(tables),
    )


def _uniqueness(encoding: Tensor) -> list[Any]:
    """Measure how distinct the positions of an encoding are; return the cells of a table row."""
    step = encodings.median_step(encoding)
    tolerance = LEAST_DISTANCE * step
    repeat = encodings.first_repeat(encoding, tolerance)
    means, lowest, highest = encodings.by_offset(encodings.cosine_similarity_matrix(encoding))
    return [
        step,
        encodings.smallest_distance(encoding),
        encodings.collisions(encoding, tolerance),
        None if repeat is None else f"{repeat.position}, same as {repeat.earlier}",
        means[1].item(),
        means[len(encoding) // 2].item(),
        (highest - lowest).max().item(),
    ]


def reaches(d_model: int, bases: list[float]) -> Section:
    """Show how similarity depends on distance.

    Args:
        d_model: Width.
        bases: Bases to compare.

    Returns:
        The section.
    """
    curves, zeros = {}, {}
    for base in bases:
        zeros[base] = encodings.reach(d_model, base, FARTHEST)
        products = encodings.dot_product_by_offset(range(1, FARTHEST + 1), d_model, base)
        curves[base] = products / (d_model / 2)
    rows = [
        [f"{base:,g}", *(curve[k - 1].item() for k in REACH_DISTANCES), zeros[base]]
        for base, curve in curves.items()
    ]
    ends = [f"{zero:,} (base {base:,g})" for base, zero in zeros.items() if zero is not None]
    endless = [f"{base:,g}" for base, zero in zeros.items() if zero is None]
    return Section(
        name="reach",
        title="Why 10000: similarity falls with distance",
        finding="With a large base the similarity of two positions falls roughly with the "
        "logarithm of their distance, with small ripples, up to the distances of the longest "
        "wavelengths. "
        + (
            f"It reaches zero at distance {join_names(ends)}; beyond this distance it does not "
            "show how far apart two positions are. "
            if ends
            else ""
        )
        + (
            f"With base {join_names(endless)} it is positive up to distance {FARTHEST:,}. "
            if endless
            else ""
        )
        + "A larger base extends the range. The paper gives no reason for its choice.",
        columns=("base", *(f"similarity at {k}" for k in REACH_DISTANCES), "zero at"),
        rows=rows,
        figure=pictures.draw_reach(
            # end a curve at twice the distance of its zero: beyond the zero, similarity no longer
            # shows how far apart two positions are
            {base: curve[: 2 * (zeros[base] or FARTHEST)] for base, curve in curves.items()}
        ),
        message="With a larger base, similarity falls over a longer distance "
        f"(d_model = {d_model})",
    )


def binary(d_model: int, base: float) -> Section:
    """Compare the bits of the position with the signs of sinusoids.

    Args:
        d_model: Width of the table.
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    num_steps = 2**COUNTED_BITS
    bits = encodings.position_bits(num_steps + 1, COUNTED_BITS + 1)[:, :NUM_BITS]
    # with this base, each pair has half the frequency of the pair before, as bits do
    sinusoids = sinusoidal_encoding(num_steps + 1, 2 * NUM_BITS, 2**NUM_BITS)
    of_bits = encodings.flip_rates(bits > 0)
    of_signs = encodings.flip_rates(sinusoids >= 0)[::2]
    lengths = encodings.wavelengths(2 * NUM_BITS, 2**NUM_BITS)
    rows = [
        [
            bit,
            2.0 ** (bit + 1),
            of_bits[bit].item(),
            lengths[bit].item(),
            of_signs[bit].item(),
        ]
        for bit in range(NUM_BITS)
    ]
    own = encodings.wavelengths(d_model, base)
    if own[-1] < 2 * own[0]:
        halving = "no pair has half the frequency of the first."
    else:
        pairs = math.log(2) / math.log(base) * d_model / 2
        halving = f"the frequency halves every {pairs:.1f} pairs"
        halving += ", so each bit has several waves." if pairs >= 2 else "."
    return Section(
        name="binary",
        title="Sinusoids and binary numbers",
        finding="In a binary number each bit changes half as often as the one before. The signs of "
        "sines with doubling wavelengths (base 2^n with n pairs) change in the same way. So a sine "
        f"is like a bit without jumps. Changes are counted in {num_steps} steps. In the table of "
        f"width {d_model} with base {base:,g}, {halving}",
        columns=(
            "bit, pair",
            "period of the bit",
            "changes of the bit per step",
            "wavelength",
            "changes of the sign per step",
        ),
        rows=rows,
        figure=pictures.draw_bits(bits[: 2**NUM_BITS], sinusoids[: 2**NUM_BITS]),
    )
