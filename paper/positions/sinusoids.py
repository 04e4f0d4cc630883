"""The table of sinusoids: an example by hand, waves, the base, and binary numbers."""

import math

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
# steps in which changes are counted, as a power of 2: the slowest sine needs 50 for one
COUNTED_BITS = 8


def table(num_positions: int, d_model: int, base: float) -> Section:
    """The table itself.

    Args:
        num_positions: Rows.
        d_model: Columns.
        base: Base of the wavelengths.

    Returns:
        The section.
    """
    encoding = sinusoidal_encoding(num_positions, d_model, base)
    # the slow pairs are those that do not end a wave within the table
    lengths = encodings.wavelengths(d_model, base)
    slow = int((lengths > num_positions).sum())
    if lengths[0] <= num_positions < lengths[-1]:
        speeds = (
            "To the left they change from word to word, to the right more slowly: "
            f"{slow} of the {len(lengths)} pairs do not complete a wave within {num_positions} "
            "positions. The fast ones tell neighbours apart, the slow ones say where in the "
            "sentence they are."
        )
    else:
        speeds = (
            f"{len(lengths) - slow} of the {len(lengths)} pairs complete a wave within "
            f"{num_positions} positions."
        )
    return Section(
        name="table",
        title="The table that is added to the embeddings",
        says="Each row is the encoding of a position, each pair of columns a sine and a cosine of "
        f"one wavelength. {speeds}",
        figure=pictures.draw_heatmap(encoding),
    )


def worked_example(base: float) -> Section:
    """Two words and six features, by hand.

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
        says=f"The position is divided by {', '.join(f'{one:.4g}' for one in divisors)}, one for "
        f"each pair, and sine and cosine are taken. At position 0 all sines are 0 and all cosines "
        f"1. One word on, the first pair has moved a whole radian, the last one by "
        f"{1 / divisors[-1]:.4f}.",
        columns=("word", "pos", *(f"{kind} {2 * i}" for i in range(3) for kind in ("sin", "cos"))),
        rows=rows,
        figure=pictures.draw_values(encoding, EXAMPLE_WORDS),
        numbers={"encoding": encoding.tolist()},
    )


def waves(num_positions: int, d_model: int, base: float) -> Section:
    """The wavelengths, from 2 pi on.

    Args:
        num_positions: To draw.
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
        says = f"Every pair has the wavelength 2 pi = {lengths[0]:.3f} positions."
    else:
        whose = "The paper's" if base == PAPER_BASE else "The"
        says = (
            f"The wavelengths are a geometric progression: each is {base ** (2 / d_model):.4g} "
            f"times the one before, from 2 pi = {lengths[0]:.3f} to {_rounded(lengths[-1])} "
            f"positions. {whose} end of the progression, {base:,g} * 2 pi = "
            f"{_rounded(base * 2 * math.pi)}, is where the next pair would be: the exponent of the "
            f"last is {d_model - 2}/{d_model}, not 1."
        )
    return Section(
        name="waves",
        title="A position is read off many clocks",
        says=says,
        columns=("pair i", "sin", "cos", "wavelength", f"waves in {num_positions} positions"),
        rows=rows,
        figure=pictures.draw_waves(d_model, num_positions, base, shown[:4], EXAMPLE_WORDS),
    )


def _rounded(length: float) -> str:
    return f"{length:,.0f}" if length >= 1000 else f"{length:.4g}"


def bases(num_positions: int, d_model: int, bases: list[float]) -> Section:
    """The same table with other bases.

    Args:
        num_positions: Rows.
        d_model: Columns.
        bases: To compare.

    Returns:
        The section.
    """
    tables = {base: sinusoidal_encoding(num_positions, d_model, base) for base in bases}
    rows = []
    for base, encoding in tables.items():
        tolerance = LEAST_DISTANCE * encodings.usual_step(encoding)
        repeat = encodings.first_repeat(encoding, tolerance)
        similarity = encodings.cosine_similarity_matrix(encoding)
        means, lowest, highest = encodings.by_offset(similarity)
        rows.append(
            [
                f"{base:,g}",
                encodings.usual_step(encoding),
                encodings.smallest_distance(encoding),
                encodings.collisions(encoding, tolerance),
                None if repeat is None else f"{repeat.position}, like {repeat.earlier}",
                means[1].item(),
                means[num_positions // 2].item(),
                (highest - lowest).max().item(),
            ]
        )
    unique = [row[0] for row in rows if not row[3]]
    repeating = [f"{row[0]} (position {row[4]})" for row in rows if row[3]]
    return Section(
        name="bases",
        title="Why 10000: uniqueness",
        says=f"Positions nearer to each other than {LEAST_DISTANCE:g} of the step to the next "
        "position count as the same. "
        "Pairs that all turn at one speed, as with base 1, come back together; pairs of many "
        "speeds come back at different times. "
        + (
            f"With base {join_names(unique)} they do not come back together within these "
            f"{num_positions} positions, and no two of these are the same. "
            if unique
            else ""
        )
        + (f"With base {join_names(repeating)} positions repeat. " if repeating else "")
        + f"Over all pairs of positions that are equally far apart, similarity varies by "
        f"{max(row[-1] for row in rows):.0e} at most, which is rounding: it is a matter of "
        "distance alone. (That the matrices are symmetric does not show it: any matrix of "
        "similarities is.)",
        columns=(
            "base",
            "step",
            "smallest distance",
            "same pairs",
            "first repeat",
            "similarity at 1",
            f"at {num_positions // 2}",
            "varies at one distance by",
        ),
        rows=rows,
        figure=pictures.draw_bases(tables),
    )


def reaches(d_model: int, bases: list[float]) -> Section:
    """Show how similarity depends on distance.

    Args:
        d_model: Width.
        bases: To compare.

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
    ends = [f"{place:,} (base {base:,g})" for base, place in zeros.items() if place is not None]
    endless = [f"{base:,g}" for base, place in zeros.items() if place is None]
    return Section(
        name="reach",
        title="Why 10000: similarity falls with distance, and how far",
        says="With a large base the similarity of two positions, summed over many waves, falls "
        "with the logarithm of their distance, with small ripples, until the longest waves begin "
        "to turn. "
        + (
            f"It reaches zero at distance {join_names(ends)}: from there on it says nothing of the "
            "distance any more. "
            if ends
            else ""
        )
        + (
            f"With base {join_names(endless)} it stays above zero up to distance {FARTHEST:,}. "
            if endless
            else ""
        )
        + "The base sets how far that is. The paper gives no reason for its choice; here is what "
        "it buys.",
        columns=("base", *(f"similarity at {k}" for k in REACH_DISTANCES), "zero at"),
        rows=rows,
        figure=pictures.draw_reach(
            # past its zero a curve has nothing more to say
            {base: curve[: 2 * (zeros[base] or FARTHEST)] for base, curve in curves.items()}
        ),
    )


def binary(d_model: int, base: float) -> Section:
    """Bits of the position and signs of sinusoids.

    Args:
        d_model: Width of the paper's table.
        base: Base of the paper's wavelengths.

    Returns:
        The section.
    """
    num_steps = 2**COUNTED_BITS
    bits = encodings.position_bits(num_steps + 1, COUNTED_BITS + 1)[:, :NUM_BITS]
    # with this base each pair turns at half the rate of the one before
    halving = sinusoidal_encoding(num_steps + 1, 2 * NUM_BITS, 2**NUM_BITS)
    of_bits = encodings.flip_rates(bits > 0)
    of_signs = encodings.flip_rates(halving >= 0)[::2]
    lengths = encodings.wavelengths(2 * NUM_BITS, 2**NUM_BITS)
    rows = [
        [
            place,
            2.0 ** (place + 1),
            of_bits[place].item(),
            lengths[place].item(),
            of_signs[place].item(),
        ]
        for place in range(NUM_BITS)
    ]
    own = encodings.wavelengths(d_model, base)
    if own[-1] < 2 * own[0]:
        rates = "no pair turns at half the rate of the first."
    else:
        pairs = math.log(2) / math.log(base) * d_model / 2
        rates = f"it takes {pairs:.1f} pairs to halve the rate"
        rates += ": there are several waves for each bit." if pairs >= 2 else "."
    return Section(
        name="binary",
        title="The link to binary numbers",
        says="In a binary number each bit changes half as often as the one before. So do the signs "
        "of sines whose wavelengths double, drawn beside it (base 2^n with n pairs). A sine is a "
        f"bit without jumps. Changes are counted in {num_steps} steps. "
        f"In the table of width {d_model} with base {base:,g} {rates}",
        columns=("bit, pair", "period", "changes a step", "wavelength", "changes of sign a step"),
        rows=rows,
        figure=pictures.draw_bits(bits[: 2**NUM_BITS], halving[: 2**NUM_BITS]),
    )
