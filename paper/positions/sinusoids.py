"""Sections about sinusoids: the table, an example by hand, waves, the base, binary numbers."""

import math
from typing import NamedTuple

from torch import Tensor

from ... import sinusoidal_encoding
from .. import positional_encoding as encodings
from ..positional_encoding import LEAST_DISTANCE, PAPER_BASE
from ..study import Section, join_names
from . import pictures

EXAMPLE_WORDS = ("River", "Bank")
EXAMPLE_WIDTH = 6
FARTHEST_DISTANCE = 20000
REACH_DISTANCES = (1, 10, 100, 1000)
NUM_BITS = 5
# sign changes are counted over 2^COUNTED_BITS steps. The slowest sine changes its sign only about
# every 50 steps, so fewer steps would give an inexact count
COUNTED_BITS = 8


class Uniqueness(NamedTuple):
    """Measures of how distinct the positions of an encoding are: a row of the table of bases.

    Attributes:
        step: Median distance between two neighbouring positions.
        smallest_distance: Smallest distance between two positions.
        num_collisions: Number of pairs of positions with the same encoding, up to a tolerance.
        first_repeat: The first position with the encoding of an earlier one, and the earlier one.
        similarity_at_1: Mean cosine similarity of two neighbouring positions.
        similarity_at_half: Mean cosine similarity at half the number of positions.
        largest_variation: Largest difference between similarities at the same distance.
    """

    step: float
    smallest_distance: float
    num_collisions: int
    first_repeat: str | None
    similarity_at_1: float
    similarity_at_half: float
    largest_variation: float


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
    pair_wavelengths = encodings.wavelengths(d_model, base)
    num_slow_pairs = int((pair_wavelengths > num_positions).sum())
    if pair_wavelengths[0] <= num_positions < pair_wavelengths[-1]:
        speed_note = (
            "Pairs on the left change from word to word, pairs on the right change slowly: "
            f"{num_slow_pairs} of the {len(pair_wavelengths)} pairs do not complete a wave within "
            f"{num_positions} positions. Fast pairs distinguish neighbours, slow pairs show the "
            "rough position in the sentence."
        )
    else:
        speed_note = (
            f"{len(pair_wavelengths) - num_slow_pairs} of the {len(pair_wavelengths)} pairs "
            f"complete a wave within {num_positions} positions."
        )
    return Section(
        name="table",
        title="The table that is added to the embeddings",
        finding="Each row is the encoding of one position. Each pair of columns is a sine and a "
        f"cosine of one wavelength. {speed_note}",
        figure=pictures.draw_heatmap(encoding),
        message=f"Sinusoidal encoding (d_model = {d_model}): "
        f"{len(pair_wavelengths) - num_slow_pairs} of the {len(pair_wavelengths)} pairs complete a "
        f"wave within {num_positions} positions",
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
        f"{join_names([f'{divisor:.4g}' for divisor in divisors])}. At position 0 all sines are 0 "
        "and all cosines are 1. At position 1 the angle of the first pair is 1 radian, and the "
        f"angle of the last pair is {1 / divisors[-1]:.4f}.",
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
    pair_wavelengths = encodings.wavelengths(d_model, base)
    last_pair = len(pair_wavelengths) - 1
    shown_pairs = sorted({round(last_pair * share / 6) for share in range(7)})
    rows = [
        [
            pair,
            2 * pair,
            2 * pair + 1,
            pair_wavelengths[pair].item(),
            num_positions / pair_wavelengths[pair].item(),
        ]
        for pair in shown_pairs
    ]
    if pair_wavelengths[-1] == pair_wavelengths[0]:
        finding = f"Every pair has the wavelength 2 pi = {pair_wavelengths[0]:.3f} positions."
    else:
        next_wavelength = f"{base:,g} * 2 pi = {_format_rounded(base * 2 * math.pi)}"
        longest_wavelength = float(pair_wavelengths[-1])
        paper_note = ", the end of the progression in the paper," if base == PAPER_BASE else ""
        finding = (
            f"The wavelengths are a geometric progression from 2 pi = {pair_wavelengths[0]:.3f} to "
            f"{_format_rounded(longest_wavelength)} positions: each is {base ** (2 / d_model):.4g} "
            f"times the one before. {next_wavelength}{paper_note} would be the wavelength of the "
            f"next pair: the exponent of the last pair is {d_model - 2}/{d_model}, not 1."
        )
    return Section(
        name="waves",
        title="Wavelengths of the pairs",
        finding=finding,
        columns=("pair i", "sin", "cos", "wavelength", f"waves in {num_positions} positions"),
        rows=rows,
        figure=pictures.draw_waves(d_model, num_positions, base, shown_pairs[:4], EXAMPLE_WORDS),
    )


def _format_rounded(length: float) -> str:
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
    uniqueness = {base: _measure_uniqueness(encoding) for base, encoding in tables.items()}
    unique_bases = [
        f"{base:,g}" for base, measured in uniqueness.items() if not measured.num_collisions
    ]
    repeating_bases = [
        f"{base:,g} (position {measured.first_repeat})"
        for base, measured in uniqueness.items()
        if measured.num_collisions
    ]
    largest_variation = max(measured.largest_variation for measured in uniqueness.values())
    return Section(
        name="bases",
        title="Why 10000: uniqueness",
        finding="Two positions count as the same if their distance is at most "
        f"{LEAST_DISTANCE:g} of the step to the next position. Pairs with the same wavelength, as "
        "with base 1, all repeat at the same position; pairs with different wavelengths repeat at "
        "different positions. "
        + (
            f"With base {join_names(unique_bases)}, all {num_positions} positions are different. "
            if unique_bases
            else ""
        )
        + (
            f"With base {join_names(repeating_bases)}, positions repeat. "
            if repeating_bases
            else ""
        )
        + "Similarity depends only on distance, up to rounding: it varies by at most "
        f"{largest_variation:.0e} among pairs of positions at the same distance. (The "
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
        rows=[[f"{base:,g}", *measured] for base, measured in uniqueness.items()],
        figure=pictures.draw_bases(tables),
    )


def _measure_uniqueness(encoding: Tensor) -> Uniqueness:
    step = encodings.median_step(encoding)
    tolerance = LEAST_DISTANCE * step
    repeat = encodings.first_repeat(encoding, tolerance)
    means, lowest, highest = encodings.by_offset(encodings.cosine_similarity_matrix(encoding))
    return Uniqueness(
        step=step,
        smallest_distance=encodings.smallest_distance(encoding),
        num_collisions=encodings.collisions(encoding, tolerance),
        first_repeat=None if repeat is None else f"{repeat.position}, same as {repeat.earlier}",
        similarity_at_1=means[1].item(),
        similarity_at_half=means[len(encoding) // 2].item(),
        largest_variation=(highest - lowest).max().item(),
    )


def reaches(d_model: int, bases: list[float]) -> Section:
    """Show how similarity depends on distance.

    Args:
        d_model: Width.
        bases: Bases to compare.

    Returns:
        The section.
    """
    curves, zero_distances = {}, {}
    for base in bases:
        zero_distances[base] = encodings.reach(d_model, base, FARTHEST_DISTANCE)
        dot_products = encodings.dot_product_by_offset(
            range(1, FARTHEST_DISTANCE + 1), d_model, base
        )
        curves[base] = dot_products / (d_model / 2)
    rows = [
        [f"{base:,g}", *(curve[k - 1].item() for k in REACH_DISTANCES), zero_distances[base]]
        for base, curve in curves.items()
    ]
    ends_by_base = [
        f"{zero_distance:,} (base {base:,g})"
        for base, zero_distance in zero_distances.items()
        if zero_distance is not None
    ]
    bases_without_zero = [
        f"{base:,g}" for base, zero_distance in zero_distances.items() if zero_distance is None
    ]
    return Section(
        name="reach",
        title="Why 10000: similarity falls with distance",
        finding="With a large base the similarity of two positions falls roughly with the "
        "logarithm of their distance, with small ripples, up to the distances of the longest "
        "wavelengths. "
        + (
            f"It reaches zero at distance {join_names(ends_by_base)}; beyond this distance it does "
            "not show how far apart two positions are. "
            if ends_by_base
            else ""
        )
        + (
            f"With base {join_names(bases_without_zero)} it is positive up to distance "
            f"{FARTHEST_DISTANCE:,}. "
            if bases_without_zero
            else ""
        )
        + "A larger base extends the range. The paper gives no reason for its choice.",
        columns=("base", *(f"similarity at {k}" for k in REACH_DISTANCES), "zero at"),
        rows=rows,
        figure=pictures.draw_reach(
            # end a curve at twice the distance of its zero: beyond the zero, similarity no longer
            # shows how far apart two positions are
            {
                base: curve[: 2 * (zero_distances[base] or FARTHEST_DISTANCE)]
                for base, curve in curves.items()
            }
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
    bit_flip_rates = encodings.flip_rates(bits > 0)
    sign_flip_rates = encodings.flip_rates(sinusoids >= 0)[::2]
    pair_wavelengths = encodings.wavelengths(2 * NUM_BITS, 2**NUM_BITS)
    rows = [
        [
            bit,
            2.0 ** (bit + 1),
            bit_flip_rates[bit].item(),
            pair_wavelengths[bit].item(),
            sign_flip_rates[bit].item(),
        ]
        for bit in range(NUM_BITS)
    ]
    table_wavelengths = encodings.wavelengths(d_model, base)
    if table_wavelengths[-1] < 2 * table_wavelengths[0]:
        halving_note = "no pair has half the frequency of the first."
    else:
        pairs_per_halving = math.log(2) / math.log(base) * d_model / 2
        halving_note = f"the frequency halves every {pairs_per_halving:.1f} pairs"
        halving_note += ", so each bit has several waves." if pairs_per_halving >= 2 else "."
    return Section(
        name="binary",
        title="Sinusoids and binary numbers",
        finding="In a binary number each bit changes half as often as the one before. The signs of "
        "sines with doubling wavelengths (base 2^n with n pairs) change in the same way. So a sine "
        f"is like a bit without jumps. Changes are counted in {num_steps} steps. In the table of "
        f"width {d_model} with base {base:,g}, {halving_note}",
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
