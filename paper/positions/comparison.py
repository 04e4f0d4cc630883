"""Candidates for a positional encoding, and the properties of each candidate."""

import math
from typing import Any

from ... import sinusoidal_encoding
from .. import positional_encoding as encodings
from ..positional_encoding import DECIDED_BY, LEAST_DISTANCE, PAPER_BASE, PROPERTIES
from ..study import Section, join_names
from . import pictures

# smallest number of positions over which properties are measured
PROPERTY_POSITIONS = 512
# number of positions in which `more_pairs` looks for a repeated encoding
REPEAT_POSITIONS = 1024
NUM_PAIRS = range(1, 9)
LENGTHS = (2, 4, 8)
# width of the binary candidate, in bits
NUM_BITS = 16


def candidates(num_positions: int, d_model: int, base: float, seed: int) -> Section:
    """Compare sinusoids with other positional encodings, and show why the simplest ones fail.

    Args:
        num_positions: Length of the sentence.
        d_model: Number of features of the wide candidates.
        base: Base of the sinusoids.
        seed: Seed of the learned table.

    Returns:
        The section.
    """
    tables, shorter, repeats, rows = {}, {}, {}, []
    for label, (name, width) in _candidates(d_model).items():
        encoding, quarter = (
            encodings.candidate_encoding(name, length, width, base, seed)
            for length in (num_positions, max(1, num_positions // 4))
        )
        tolerance = LEAST_DISTANCE * encodings.median_step(encoding)
        repeat = encodings.first_repeat(encoding, tolerance)
        tables[label], shorter[label], repeats[label] = encoding, quarter, repeat
        rows.append(
            [
                label,
                encodings.CANDIDATES[name],
                encoding.abs().max().item(),
                None if name == "learned" else _second_values(name, width, base, seed),
                None if repeat is None else f"{repeat.position}, same as {repeat.earlier}",
            ]
        )
    repeated = [f'"{label}"' for label, found in repeats.items() if found is not None]
    second_of_two, second_of_four = (
        encodings.candidate_encoding("fraction", length, 2)[1].item() for length in (2, 4)
    )
    return Section(
        name="candidates",
        title="Candidates for a positional encoding",
        finding=f"The integer has no bound: it is {tables['integer'].max():g} at the last of "
        f"{num_positions} words, and the features of an embedding are near 1. Divided by the "
        "length (counting words from 1) it is small, but its meaning depends on the length: the "
        f"2nd word is {second_of_two} in a sentence of 2 words and {second_of_four} in a sentence "
        "of 4. One sine is small and does not depend on the length, but it repeats. "
        + (
            f"Among {num_positions} positions, some are the same with {join_names(repeated)}. "
            if repeated
            else ""
        )
        + "A sine with its cosine, and several waves of different length, repeat later.",
        columns=(
            "candidate",
            "formula",
            "largest |value|",
            f"2nd of {join_names(list(map(str, LENGTHS)))} words",
            "first repeat",
        ),
        rows=rows,
        figure=pictures.draw_candidates(tables, shorter, repeats),
    )


def _second_values(name: str, width: int, base: float, seed: int) -> str:
    """Return the first feature of the second word in sentences of `LENGTHS` words."""
    tables = (encodings.candidate_encoding(name, length, width, base, seed) for length in LENGTHS)
    return ", ".join(f"{table[1, 0].item():.3g}" for table in tables)


def property_rules() -> Section:
    """List the desired properties of an encoding, as rules.

    Returns:
        The section.
    """
    return Section(
        name="wishes",
        title="Desired properties of an encoding",
        finding="An encoding without a bound would be larger than the embeddings. Two positions "
        "with the same encoding cannot be distinguished. A step that depends on the length has "
        "another meaning in every sentence. An offset that is the same matrix at all positions is "
        "easy to learn. Each property is written as a rule that can be measured. A step is the "
        "distance between the encodings of two neighbouring positions.",
        columns=("property", "rule", "measured number"),
        rows=[[name, rule, DECIDED_BY[name]] for name, rule in PROPERTIES.items()],
    )


def desired_properties(d_model: int, base: float, seed: int) -> Section:
    """Measure each property of each candidate.

    Args:
        d_model: Number of features of the wide candidates.
        base: Base of the sinusoids.
        seed: Seed of the learned table.

    Returns:
        The section.
    """
    # a column of the matrix of an offset has d_model unknowns, and the fit uses half of the
    # positions: 4 * d_model positions give twice as many equations as unknowns
    num_positions = max(PROPERTY_POSITIONS, 4 * d_model)
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
        title="Properties of the candidates",
        finding=f"{'Only ' if len(all_of_them) == 1 else ''}"
        f"{join_names(all_of_them) if all_of_them else 'No candidate'} "
        f"{'has' if len(all_of_them) < 2 else 'have'} all properties over {num_positions} "
        "positions. Each cell has the result of the rule and the measured number. The next section "
        "shows how many pairs are needed until no position repeats. A matrix adds no constant: "
        "with one more feature that is always 1, the integer would have a linear offset too.",
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
    """Find how many waves are needed until no position repeats.

    Args:
        base: Base of the geometric wavelengths.

    Returns:
        The section.
    """
    rows = []
    for num_pairs in NUM_PAIRS:
        row: list[Any] = [num_pairs]
        for encoding in (
            encodings.harmonic_pairs(REPEAT_POSITIONS, num_pairs),
            sinusoidal_encoding(REPEAT_POSITIONS, 2 * num_pairs, base),
        ):
            tolerance = LEAST_DISTANCE * encodings.median_step(encoding)
            found = encodings.first_repeat(encoding, tolerance)
            row.append(None if found is None else found.position)
        rows.append(row)

    def enough(column: int) -> str:
        last = max((row[0] for row in rows if row[column] is not None), default=0)
        fewest = next((row[0] for row in rows if row[0] > last), None)
        return f"more than {NUM_PAIRS[-1]} pairs" if fewest is None else f"{fewest} pairs"

    of_base = "of the paper" if base == PAPER_BASE else f"with base {base:,g}"
    return Section(
        name="pairs",
        title="From one wave to several",
        finding="A pair of sine and cosine with wavelength 2 pi repeats after "
        f"{rows[0][1]} positions, which are {rows[0][1] / (2 * math.pi):.3f} waves. With more "
        "waves the first repeat comes later. For "
        f"{REPEAT_POSITIONS:,} positions without a repeat, wavelengths 2 pi, 4 pi, 6 pi, ... "
        f"(pos / 1, pos / 2, pos / 3) need {enough(1)}, and the geometric wavelengths {of_base} "
        f"need {enough(2)}.",
        columns=("pairs", "first repeat, pos / 1, pos / 2, ...", f"first repeat, base {base:,g}"),
        rows=rows,
    )


def _candidates(d_model: int) -> dict[str, tuple[str, int]]:
    """Return the name and the width of each candidate, by the label of the candidate."""
    found: dict[str, tuple[str, int]] = {}
    for name in encodings.CANDIDATES:
        if name == "pairs":
            # two pairs, whose encodings repeat, and as many pairs as the sinusoids have
            found |= {f"{width // 2} pairs": (name, width) for width in (4, max(4, d_model))}
        else:
            found[name] = (name, NUM_BITS if name == "binary" else d_model)
    return found
