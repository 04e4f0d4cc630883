"""Section 3.5: what positional encoding is, why it is so, and what happens without it."""

import argparse
import math
from collections.abc import Iterator

import torch

from .. import VanillaTransformerConfig, sinusoidal_encoding
from ..modeling_vanilla_transformer import VanillaTransformerEncoder
from . import order_task
from . import positional_encoding as encodings
from . import positional_pictures as pictures
from .order_task import COPYING, WHO_CHASES_WHOM, Training
from .positional_encoding import DECIDED_BY, LEAST_DISTANCE, PAPER_BASE, PROPERTIES
from .study import Section
from .trained import add_model_flag, load_trained

EXAMPLE_WORDS = ("River", "Bank")
EXAMPLE_WIDTH = 6
# a word before, one in the middle and one after; a matrix of positions by positions fits a laptop
LEAST_LENGTH, MOST_LENGTH = 3, 4096
# four times as many positions, at four times the length, have as many bits as the binary candidate
MOST_WIDTH = 4096
# positions of the table of properties, and of the search for repeats
MANY_POSITIONS = 512
MOST_POSITIONS = 1024
NUM_PAIRS = range(1, 9)
FARTHEST = 20000
REACH_DISTANCES = (1, 10, 100, 1000)
OFFSETS = (1, 2, 5, 10, 50)
DIRECTION = 5
SMALL_WIDTH = 16
NUM_BITS = 5
# steps in which changes are counted, as a power of 2: the slowest sine needs 50 for one
COUNTED_BITS = 8
# bits of the binary candidate
WIDEST = 16
# how far out of its range a feature must be to be new
NEW_VALUE = 0.1
WIDTHS = (8, 16, 32, 64, 128, 256, 512)
NUM_WORDS = 1000
# the directions that hold this share of the positions' energy are compared
ENERGY = 0.9
EXTRA_WIDTHS = (0, 64, 128, 512)
SENTENCES = ("A chases B", "B chases A")
TASK_ENCODINGS = ("sinusoidal", "learned", "none")
FULL_WHO = Training(d_model=64, layers=2, steps=1000, warmup_steps=200)
FULL_COPYING = Training(
    d_model=256, layers=2, num_heads=8, steps=5000, sentences_per_step=128, warmup_steps=1000
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked of this study.

    Args:
        parser: Of the command line.
    """
    parser.add_argument(
        "--base",
        type=float,
        nargs="+",
        default=[PAPER_BASE, 100.0, 1.0],
        help="bases to compare; all other sections have the first (%(default)s)",
    )
    parser.add_argument("--d_model", type=int, default=128, help="width (%(default)s)")
    parser.add_argument(
        "--num_positions", type=int, default=64, help="length of the tables (%(default)s)"
    )
    add_model_flag(parser, default=None)
    parser.add_argument("--seed", type=int, default=0, help="of all chance (%(default)s)")
    parser.add_argument(
        "--no_train", action="store_true", help="leave out the sections that train small models"
    )
    parser.add_argument(
        "--full", action="store_true", help="train larger models, for longer, with more seeds"
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """The table, the choice of its base, its properties, and attention with and without it.

    Args:
        flags: As `add_flags` declares them.

    Yields:
        The sections, those that train last.

    Raises:
        ValueError: If a size or a base cannot be, or the model cannot be loaded or has no
            positions.
    """
    # all is refused here, not after minutes
    if not LEAST_LENGTH <= flags.num_positions <= MOST_LENGTH:
        raise ValueError(
            f"num_positions must be between {LEAST_LENGTH} and {MOST_LENGTH}, "
            f"got {flags.num_positions}."
        )
    if flags.d_model > MOST_WIDTH:
        raise ValueError(f"d_model must be at most {MOST_WIDTH}, got {flags.d_model}.")
    for base in flags.base:
        if not math.isfinite(base):
            raise ValueError(f"base must be finite, got {base}.")
        sinusoidal_encoding(1, flags.d_model, base)
    model = None if flags.model is None else load_trained(flags.model, flags.trust_remote_code)[0]
    if model is not None:
        encodings.model_encoding(model, 1)
    base = flags.base[0]
    yield table(flags.num_positions, flags.d_model, base)
    yield worked_example(base)
    yield waves(flags.num_positions, flags.d_model, base)
    yield bases(flags.num_positions, flags.d_model, flags.base)
    yield reaches(flags.d_model, flags.base)
    yield candidates(flags.num_positions, flags.d_model, base, flags.seed)
    yield wishes()
    yield desired_properties(flags.d_model, base, flags.seed)
    yield more_pairs(base)
    yield offset_maps(flags.num_positions, flags.d_model, base)
    yield dot_products(flags.num_positions, flags.d_model, base)
    yield direction(flags.num_positions, flags.d_model, base)
    yield binary(flags.d_model, base)
    yield addition(flags.num_positions, base, flags.seed)
    if model is not None:
        yield trained_addition(model, flags.num_positions, flags.seed)
    yield concatenation()
    yield two_orders(flags.seed)
    if not flags.no_train:
        yield order_accuracies(flags.seed, flags.full)
        yield length_extrapolation(flags.seed, flags.full)


def table(num_positions: int, d_model: int, base: float) -> Section:
    """The table itself.

    Args:
        num_positions: Rows.
        d_model: Columns.
        base: Of the wavelengths.

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
        base: Of the wavelengths.

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
        base: Of the wavelengths.

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
            f"With base {_enumerate(unique)} they do not come back together within these "
            f"{num_positions} positions, and no two of these are the same. "
            if unique
            else ""
        )
        + (f"With base {_enumerate(repeating)} positions repeat. " if repeating else "")
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
    """How far similarity tells of distance.

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
            f"It reaches zero at distance {_enumerate(ends)}: from there on it says nothing of the "
            "distance any more. "
            if ends
            else ""
        )
        + (
            f"With base {_enumerate(endless)} it stays above zero up to distance {FARTHEST:,}. "
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


def candidates(num_positions: int, d_model: int, base: float, seed: int) -> Section:
    """What else could say where a word stands, and how the simplest fail.

    Args:
        num_positions: Length of the sentence.
        d_model: Of the wide ones.
        base: Of the sinusoids.
        seed: Of the learned table.

    Returns:
        The section.
    """
    tables, shorter, repeats = {}, {}, {}
    for label, (name, width) in _candidates(d_model).items():
        encoding = encodings.candidate_encoding(name, num_positions, width, base, seed)
        tables[label] = encoding
        shorter[label] = encodings.candidate_encoding(
            name, max(1, num_positions // 4), width, base, seed
        )
        tolerance = LEAST_DISTANCE * encodings.usual_step(encoding)
        repeats[label] = encodings.first_repeat(encoding, tolerance)

    def second_of(length: int) -> float:
        return encodings.candidate_encoding("fraction", length, 2)[1].item()

    lengths = (2, 4, 8)
    rows = [
        [
            label,
            encodings.CANDIDATES[name],
            tables[label].abs().max().item(),
            ", ".join(
                f"{encodings.candidate_encoding(name, length, width, base, seed)[1, 0].item():.3g}"
                for length in lengths
            )
            if name != "learned"
            else None,
            None
            if repeats[label] is None
            else f"{repeats[label].position}, like {repeats[label].earlier}",
        ]
        for label, (name, width) in _candidates(d_model).items()
    ]
    repeated = [f'"{label}"' for label, found in repeats.items() if found is not None]
    return Section(
        name="candidates",
        title="What else could say where a word stands",
        says=f"The integer grows without end: {tables['integer'].max():g} at the last of "
        f"{num_positions} words, where an embedding's features are near 1. Divided by the length "
        f"(counting words from 1) it stays small but means nothing by itself: the 2nd of 2 words "
        f"is {second_of(2)}, of 4 it is {second_of(4)}. One sine stays small and means the same "
        "everywhere, but comes back. "
        + (
            f"Of {num_positions} positions some look the same with {_enumerate(repeated)}. "
            if repeated
            else ""
        )
        + "Several waves of different length, and a sine with its cosine, mend that.",
        columns=(
            "candidate",
            "of position pos",
            "largest",
            f"2nd of {_enumerate(list(map(str, lengths)))}",
            "first repeat",
        ),
        rows=rows,
        figure=pictures.draw_candidates(tables, shorter, repeats),
    )


def wishes() -> Section:
    """The properties that one wishes of an encoding, as rules.

    Returns:
        The section.
    """
    return Section(
        name="wishes",
        title="What one wishes of an encoding",
        says="A number without a bound would drown the embeddings; two positions that look alike "
        "cannot be told apart; a step that depends on the length means something else in every "
        "sentence; and what is the same matrix everywhere is easy to learn. Each wish becomes a "
        "rule that can be measured.",
        columns=("property", "the rule", "decided by"),
        rows=[[name, rule, DECIDED_BY[name]] for name, rule in PROPERTIES.items()],
    )


def desired_properties(d_model: int, base: float, seed: int) -> Section:
    """Each property, measured for each candidate.

    Args:
        d_model: Of the wide ones.
        base: Of the sinusoids.
        seed: Of the learned table.

    Returns:
        The section.
    """
    # a matrix is fitted on half the positions: they must be more than its rows
    num_positions = max(MANY_POSITIONS, 4 * d_model)
    measured = {
        label: encodings.properties(name, num_positions, width, base, seed)
        for label, (name, width) in _candidates(d_model).items()
    }
    rows = [
        [label, *(f"{'yes' if one.holds else 'no'}: {one.text}" for one in found.values())]
        for label, found in measured.items()
    ]
    all_of_them = [
        label for label, found in measured.items() if all(one.holds for one in found.values())
    ]
    return Section(
        name="properties",
        title="Which candidate has what one wishes",
        says=f"{'Only ' if len(all_of_them) == 1 else ''}"
        f"{_enumerate(all_of_them) if all_of_them else 'No candidate'} "
        f"{'has' if len(all_of_them) < 2 else 'have'} every property in {num_positions} positions. "
        "Beside each yes and no stands the number that decides it, by the rules above. How many "
        "pairs it takes until nothing repeats is in the next section. A matrix has no constant: "
        "with one more feature that is always 1, the integer too would have a linear offset.",
        columns=("candidate", *PROPERTIES),
        rows=rows,
        figure=pictures.draw_properties(measured),
        numbers={
            "values": {
                label: {name: one.value for name, one in found.items()}
                for label, found in measured.items()
            }
        },
    )


def more_pairs(base: float) -> Section:
    """How many waves it takes until nothing repeats.

    Args:
        base: Of the geometric wavelengths.

    Returns:
        The section.
    """
    rows = []
    for num_pairs in NUM_PAIRS:
        row = [num_pairs]
        for encoding in (
            encodings.harmonic_pairs(MOST_POSITIONS, num_pairs),
            sinusoidal_encoding(MOST_POSITIONS, 2 * num_pairs, base),
        ):
            tolerance = LEAST_DISTANCE * encodings.usual_step(encoding)
            found = encodings.first_repeat(encoding, tolerance)
            row.append(None if found is None else found.position)
        rows.append(row)

    def enough(column: int) -> str:
        # from here on nothing repeats
        last = max((row[0] for row in rows if row[column] is not None), default=0)
        return next((f"{row[0]} pairs" for row in rows if row[0] > last), "more pairs than these")

    whose = "the paper's" if base == PAPER_BASE else f"base {base:,g}'s"
    return Section(
        name="pairs",
        title="From one wave to many",
        says="A pair of sine and cosine with wavelength 2 pi looks the same again after "
        f"{rows[0][1]} positions, which are {rows[0][1] / (2 * math.pi):.3f} waves. More waves "
        "push the first repeat out: wavelengths 2 pi, 4 pi, 6 pi, ... (pos / 1, pos / 2, pos / 3) "
        f"need {enough(1)} for {MOST_POSITIONS:,} positions without one, {whose} geometric "
        f"wavelengths {enough(2)}.",
        columns=("pairs", "first repeat, pos / 1, pos / 2, ...", f"first repeat, base {base:,g}"),
        rows=rows,
    )


def offset_maps(num_positions: int, d_model: int, base: float) -> Section:
    """The matrix that moves every position by k.

    Args:
        num_positions: To check.
        d_model: Width.
        base: Of the wavelengths.

    Returns:
        The section.
    """
    rows = []
    for offset in OFFSETS:
        encoding = sinusoidal_encoding(num_positions + offset, d_model, base).double()
        now, later = encoding[:num_positions], encoding[offset:]
        forward, back = (encodings.offset_map(k, d_model, base) for k in (offset, -offset))
        rows.append(
            [
                offset,
                (now @ forward.T - later).abs().max().item(),
                (later @ back.T - now).abs().max().item(),
                (forward - back).abs().max().item(),
            ]
        )
    worst = max(max(row[1:3]) for row in rows)
    return Section(
        name="offset-maps",
        title="Relative position: one matrix moves every position by k",
        says="M_k turns each pair by its own angle w_i k, so that PE(pos + k) = M_k PE(pos). One "
        f"matrix does it for all of {num_positions} positions: the largest error is {worst:.0e}, "
        "which is rounding. M_-k, its transpose, turns back. Attention compares positions through "
        'matrices it learns, and so can learn to look "k words on" wherever it stands.',
        columns=(
            "k",
            "|PE(pos + k) - M_k PE(pos)|",
            "|PE(pos) - M_-k PE(pos + k)|",
            "|M_k - M_-k|",
        ),
        rows=rows,
        figure=pictures.draw_offset_maps((1, DIRECTION, -DIRECTION), SMALL_WIDTH, base),
    )


def dot_products(num_positions: int, d_model: int, base: float) -> Section:
    """The dot product of two positions depends on their distance alone.

    Args:
        num_positions: To check.
        d_model: Width.
        base: Of the wavelengths.

    Returns:
        The section.
    """
    encoding = sinusoidal_encoding(num_positions, d_model, base)
    exact = encoding.double()
    means, lowest, highest = encodings.by_offset(exact @ exact.T)
    offsets = [k for k in (0, *OFFSETS) if k < num_positions]
    formula = encodings.dot_product_by_offset(offsets, d_model, base).tolist()
    mirrored = encodings.dot_product_by_offset([-k for k in offsets], d_model, base).tolist()
    rows = [
        [k, forward, backward, means[k].item(), (highest[k] - lowest[k]).item()]
        for k, forward, backward in zip(offsets, formula, mirrored, strict=True)
    ]
    spread = (highest - lowest).max().item()
    return Section(
        name="dot-product",
        title="The dot product knows the distance",
        says="PE(pos) . PE(pos + k) is the sum of cos(w_i k) over the pairs, in which pos does not "
        f"occur: over all of {num_positions} positions it varies by {spread:.0e}. At k = 0 it is "
        f"d_model / 2 = {d_model / 2:g}, and it is the same to both sides, because a cosine is the "
        "same for k and -k. So by itself it tells of the distance of two words, and not which of "
        "them is first.",
        columns=("k", "sum of cos(w_i k)", "at -k", "mean of PE . PE", "largest - smallest"),
        rows=rows,
        figure=pictures.draw_dot_product(encoding),
    )


def direction(num_positions: int, d_model: int, base: float) -> Section:
    """M_k tells before from after.

    Args:
        num_positions: To look at.
        d_model: Width.
        base: Of the wavelengths.

    Returns:
        The section.
    """
    encoding = sinusoidal_encoding(num_positions, d_model, base).double()
    position = num_positions // 2
    offset = min(DIRECTION, num_positions - 1 - position)
    scores = {
        k: encoding @ (encodings.offset_map(k, d_model, base) @ encoding[position])
        for k in (-offset, 0, offset)
    }
    rows = [
        [
            k,
            values.argmax().item(),
            values[position - offset].item(),
            values[position].item(),
            values[position + offset].item(),
        ]
        for k, values in scores.items()
    ]
    return Section(
        name="direction",
        title="What knows the direction is M_k",
        says=f"A query at position {position} that is its own encoding fits position {rows[1][1]} "
        f"best, and those before and after it equally. Turned by M_k it fits position {rows[2][1]} "
        f"best for k = {offset}, and {rows[0][1]} for k = {-offset}. W^Q and W^K of an attention "
        "head can hold such a turn: that is how a head comes to look at the word before, or the "
        "word after.",
        columns=(
            "k",
            "best position",
            f"score at {position - offset}",
            f"at {position}",
            f"at {position + offset}",
        ),
        rows=rows,
        figure=pictures.draw_directions(scores, position),
    )


def binary(d_model: int, base: float) -> Section:
    """Bits of the position and signs of sinusoids.

    Args:
        d_model: Width of the paper's table.
        base: Of the paper's wavelengths.

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


def addition(num_positions: int, base: float, seed: int) -> Section:
    """Random words and positions are nearly at right angles, the wider the nearer.

    Args:
        num_positions: Of the positions.
        base: Of the wavelengths.
        seed: Of the words.

    Returns:
        The section.
    """
    found, rows = {}, []
    for d_model in WIDTHS:
        generator = torch.Generator().manual_seed(seed)
        # embeddings begin with variance 1 / d_model, and are scaled by its root
        words = torch.randn(NUM_WORDS, d_model, generator=generator)
        positions = sinusoidal_encoding(num_positions, d_model, base)
        found[d_model] = _overlap(words, positions)
        rows.append([d_model, *_overlap_cells(found[d_model], d_model)])
    narrow, wide = found[WIDTHS[0]], found[WIDTHS[-1]]
    return Section(
        name="addition",
        title="Added, not concatenated: random words",
        says=f"The k directions that hold {ENERGY:.0%} of the energy of {num_positions} positions "
        f"are few: {wide.num_directions} of {WIDTHS[-1]}. Of {NUM_WORDS:,} random words, drawn "
        f"as a new embedding is, {narrow.word_energy:.0%} of the energy lies along these "
        f"directions with d_model = {WIDTHS[0]}, and {wide.word_energy:.1%} with {WIDTHS[-1]}: "
        f"k / d_model, as chance has it. The subspaces of the k strongest directions of either "
        "come near to a right angle "
        f"({wide.mean_angle:.0f} degrees on average). Along them a position has "
        f"{narrow.position_to_word:.1f} times the energy of a word with {WIDTHS[0]} features, and "
        f"{wide.position_to_word:.0f} times with {WIDTHS[-1]}: there it can be read off the sum.",
        columns=("d_model", *OVERLAP_COLUMNS),
        rows=rows,
        figure=pictures.draw_overlaps(found),
    )


def trained_addition(model, num_positions: int, seed: int) -> Section:
    """The same for the words of a trained model.

    Args:
        model: A trained model.
        num_positions: Of the positions.
        seed: Of the random words to compare with.

    Returns:
        The section.

    Raises:
        ValueError: If the model has no positions.
    """
    positions = encodings.model_encoding(model, num_positions)
    words = encodings.word_embeddings(model)
    generator = torch.Generator().manual_seed(seed)
    random_words = torch.randn(words.shape, generator=generator) * words.std()
    found = {
        "trained": _overlap(words, positions),
        "random": _overlap(random_words, positions),
    }
    d_model = words.shape[1]
    trained, chance = found["trained"], found["random"]
    closer = trained.mean_angle < chance.mean_angle
    more = "more" if trained.word_energy > chance.word_energy else "less"
    sizes = words.norm(dim=1).mean().item(), positions.norm(dim=1).mean().item()
    return Section(
        name="addition-trained",
        title="Added, not concatenated: trained words",
        says=f"The {len(words):,} words of this model, scaled as section 3.4 says, have the mean "
        f"length {sizes[0]:.3g}, its positions {sizes[1]:.3g}. Along the "
        f"{trained.num_directions} strongest directions of the positions the words have "
        f"{trained.word_energy:.1%} of their energy, {more} than random words of the same width "
        f"({chance.word_energy:.1%}), and a position has "
        f"{trained.position_to_word:.1f} times the energy of a word there. The two subspaces are "
        f"{'nearer' if closer else 'less near'} to each other than by chance: their mean principal "
        f"angle is {trained.mean_angle:.0f} degrees, of random words {chance.mean_angle:.0f}.",
        columns=("words", *OVERLAP_COLUMNS),
        rows=[[name, *_overlap_cells(one, d_model)] for name, one in found.items()],
        numbers={"mean_word_length": sizes[0], "mean_position_length": sizes[1]},
    )


OVERLAP_COLUMNS = (
    "k",
    "k / d_model",
    "words' energy on positions",
    "positions' energy on words",
    "smallest angle",
    "mean principal angle",
    "mean |cosine|",
    "position : word",
)


def concatenation() -> Section:
    """What features of their own would cost.

    Returns:
        The section.
    """
    width = VanillaTransformerConfig.from_paper("base").d_model
    costs = {extra: encodings.concatenation_cost(extra) for extra in EXTRA_WIDTHS}
    added = costs[0]
    rows = [
        [
            f"{width} + {extra}" if extra else f"{width}, added",
            cost.parameters,
            cost.parameters / added.parameters,
            cost.flops,
            cost.flops / added.flops,
        ]
        for extra, cost in costs.items()
    ]
    return Section(
        name="concatenation",
        title="What concatenation would cost",
        says=f"Counted are the layers of the base model: words keep {width} features, those of the "
        "position stand beside them through every layer, and heads, d_k, d_v and d_ff stay as they "
        "are. Embedding and output projection, which would not change, are left out. A position as "
        f"wide as the word multiplies parameters by {rows[-1][2]:.2f} and FLOPs by "
        f"{rows[-1][4]:.2f}; {EXTRA_WIDTHS[1]} features cost {rows[1][2] - 1:.0%} more. Added, "
        "it costs nothing.",
        columns=("features", "parameters", "ratio", "FLOPs for 32 + 32 tokens", "ratio of FLOPs"),
        rows=rows,
    )


def two_orders(seed: int) -> Section:
    """The same words in two orders, through an encoder with and without positions.

    Args:
        seed: Of its weights.

    Returns:
        The section.
    """
    words = SENTENCES[0].split()
    order = [words.index(word) for word in SENTENCES[1].split()]
    tokens = [3, 4, 5]
    found = {}
    for name in ("none", "sinusoidal"):
        config = VanillaTransformerConfig(
            vocab_size=6, d_model=64, encoder_layers=2, position_encoding=name
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder = VanillaTransformerEncoder(config).eval()
        found[name] = order_task.encode_in_two_orders(encoder, tokens, order)
    differences = {
        name: [(plain - moved)[place].abs().max().item() for place in range(len(words))]
        for name, (plain, moved) in found.items()
    }
    without, with_positions = (max(differences[name]) for name in ("none", "sinusoidal"))
    return Section(
        name="two-orders",
        title="Attention without positions sees a bag of words",
        says=f'A random encoder of ours reads "{SENTENCES[0]}" and "{SENTENCES[1]}". Without '
        f"positions each word has the same vector in both: the largest difference is "
        f"{without:.0e}, which is rounding. Whoever is chased cannot be told from whoever chases, "
        "with any weights: self-attention sums over words, and a sum has no order. With "
        f"sinusoids the vectors differ by up to {with_positions:.2f}.",
        columns=("positions", *(f"difference of {word}" for word in words)),
        rows=[[name, *values] for name, values in differences.items()],
        figure=pictures.draw_two_orders(found, words, SENTENCES),
    )


def order_accuracies(seed: int, full: bool = False) -> Section:
    """A task of order, learned with and without positions.

    Args:
        seed: The first of the seeds.
        full: Train a larger model for longer.

    Returns:
        The section.
    """
    sizes, num_seeds = (FULL_WHO, 5) if full else (WHO_CHASES_WHOM, 3)
    seeds = range(seed, seed + num_seeds)
    found = {
        name: [order_task.who_chases_whom(name, one, sizes) for one in seeds]
        for name in TASK_ENCODINGS
    }
    means = {name: sum(shares) / len(shares) for name, shares in found.items()}
    return Section(
        name="order-task",
        title="A task of order, with and without positions",
        says=f'A small model ({sizes.steps} steps) learns to turn "A chases B" into "B flees A", '
        "and is asked for pairs of names that it has never seen together. With sinusoids it gets "
        f"{means['sinusoidal']:.0%} of them right, with learned positions {means['learned']:.0%}. "
        f"Without positions {means['none']:.0%}: it knows who is in the sentence, and tosses a "
        "coin for who chases whom.",
        columns=("positions", *(f"seed {one}" for one in seeds), "mean"),
        rows=[[name, *shares, means[name]] for name, shares in found.items()],
        figure=pictures.draw_accuracies(found, 0.5),
    )


def length_extrapolation(seed: int, full: bool = False) -> Section:
    """Learned against sinusoidal, within the length of the training and past it.

    Args:
        seed: The first of the seeds.
        full: Train a larger model for longer, on longer rows.

    Returns:
        The section.
    """
    sizes, num_seeds, trained = (FULL_COPYING, 3, 64) if full else (COPYING, 2, 12)
    length, num_symbols = 2 * trained, 16
    seeds = range(seed, seed + num_seeds)
    # of rows as long as any in training, and longer ones
    usual, longer = {}, {}
    for name in TASK_ENCODINGS:
        found = [
            order_task.copying_losses(name, one, sizes, trained, length, num_symbols)
            for one in seeds
        ]
        usual[name], longer[name] = map(torch.stack, zip(*found, strict=True))  # [seeds, T]
    chance = math.log(num_symbols)
    rows = [
        [
            name,
            usual[name].mean().item(),
            curves[:, :trained].mean().item(),
            curves[:, trained].mean().item(),
            curves[:, trained:].mean().item(),
        ]
        for name, curves in longer.items()
    ]
    within = {row[0]: row[1] for row in rows}
    past = {row[0]: row[4] for row in rows}
    table = sinusoidal_encoding(length, sizes.d_model)
    new = encodings.share_of_new_values(table, trained, NEW_VALUE)
    return Section(
        name="length",
        title="Learned against sinusoidal, and sentences longer than any in training",
        says=f"Small models learn to copy rows of up to {trained} symbols, and are then given rows "
        f"of {length}. In rows of {trained} both kinds do it, as row (E) of Table 3 finds: their "
        f"losses are {within['sinusoidal']:.2f} (sinusoids) and {within['learned']:.2f} "
        f"(learned), where {chance:.2f} is knowing nothing. Past position {trained} the learned "
        f"table has only rows that no training has touched, and the loss is {past['learned']:.1f}. "
        f"The sinusoids exist there, and the loss is {past['sinusoidal']:.1f}. The paper says only "
        f"that they may extrapolate: past position {trained}, {new:.0%} of their features take "
        f"values more than {NEW_VALUE} out of the range they had before it, and no training has "
        "shown what those mean.",
        columns=(
            "positions",
            f"loss in rows of {trained}",
            f"1 to {trained} in rows of {length}",
            f"at {trained + 1}",
            f"{trained + 1} to {length}",
        ),
        rows=rows,
        figure=pictures.draw_losses(longer, trained, chance),
        numbers={
            "losses": {
                kind: {name: curves.tolist() for name, curves in losses.items()}
                for kind, losses in (("usual", usual), ("longer", longer))
            }
        },
    )


def _candidates(d_model: int) -> dict[str, tuple[str, int]]:
    """What to call each candidate, its name and its width."""
    found = {}
    for name in encodings.CANDIDATES:
        if name == "pairs":
            # so few that one sees how they fail, and as many as the sinusoids are
            found |= {f"{width // 2} pairs": (name, width) for width in (4, max(4, d_model))}
        else:
            found[name] = (name, WIDEST if name == "binary" else d_model)
    return found


def _overlap(words: torch.Tensor, positions: torch.Tensor) -> encodings.Overlap:
    num_directions = encodings.num_directions_for(positions, ENERGY)
    return encodings.overlap(words, positions, num_directions)


def _overlap_cells(found: encodings.Overlap, d_model: int) -> list[float]:
    return [
        found.num_directions,
        found.num_directions / d_model,
        found.word_energy,
        found.position_energy,
        found.smallest_angle,
        found.mean_angle,
        found.mean_cosine,
        found.position_to_word,
    ]


def _rounded(length: float) -> str:
    return f"{length:,.0f}" if length >= 1000 else f"{length:.4g}"


def _enumerate(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
