"""Candidates for an encoding of position, and the properties that each of them has."""

import math

from ... import sinusoidal_encoding
from .. import positional_encoding as encodings
from ..positional_encoding import DECIDED_BY, LEAST_DISTANCE, PAPER_BASE, PROPERTIES
from ..study import Section, join_names
from . import pictures

# positions of the table of properties, and of the search for repeats
MANY_POSITIONS = 512
MOST_POSITIONS = 1024
NUM_PAIRS = range(1, 9)
# bits of the binary candidate
WIDEST = 16


def candidates(num_positions: int, d_model: int, base: float, seed: int) -> Section:
    """Compare sinusoids with other encodings of position, and show how the simplest fail.

    Args:
        num_positions: Length of the sentence.
        d_model: Number of features of the wide candidates.
        base: Base of the sinusoids.
        seed: Seed of the learned table.

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
            f"Of {num_positions} positions some look the same with {join_names(repeated)}. "
            if repeated
            else ""
        )
        + "Several waves of different length, and a sine with its cosine, mend that.",
        columns=(
            "candidate",
            "of position pos",
            "largest",
            f"2nd of {join_names(list(map(str, lengths)))}",
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
        d_model: Number of features of the wide candidates.
        base: Base of the sinusoids.
        seed: Seed of the learned table.

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
        f"{join_names(all_of_them) if all_of_them else 'No candidate'} "
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
    """The number of waves after which no position repeats.

    Args:
        base: Base of the geometric wavelengths.

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


def _candidates(d_model: int) -> dict[str, tuple[str, int]]:
    """Return the label of each candidate, its name and its width."""
    found = {}
    for name in encodings.CANDIDATES:
        if name == "pairs":
            # so few that one sees how they fail, and as many as the sinusoids are
            found |= {f"{width // 2} pairs": (name, width) for width in (4, max(4, d_model))}
        else:
            found[name] = (name, WIDEST if name == "binary" else d_model)
    return found
