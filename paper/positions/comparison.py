"""Candidates for a positional encoding, and the properties of each candidate."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ... import sinusoidal_encoding
from .. import positional_encoding as encodings
from ..positional_encoding import DECIDING_NUMBERS, LEAST_DISTANCE, PAPER_BASE, PROPERTIES
from ..study import Section, join_names
from . import pictures

# smallest number of positions over which properties are measured
PROPERTY_POSITIONS = 512
# number of positions in which `more_pairs` looks for a repeated encoding
REPEAT_POSITIONS = 1024
NUM_PAIRS = range(1, 9)
SENTENCE_LENGTHS = (2, 4, 8)
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
    tables, shorter_tables, repeats, rows = {}, {}, {}, []
    for label, (name, width) in _candidates(d_model).items():
        encoding, shorter_encoding = (
            encodings.candidate_encoding(name, length, width, base, seed)
            for length in (num_positions, max(1, num_positions // 4))
        )
        tolerance = LEAST_DISTANCE * encodings.median_step(encoding)
        repeat = encodings.first_repeat(encoding, tolerance)
        tables[label], shorter_tables[label], repeats[label] = encoding, shorter_encoding, repeat
        rows.append(
            [
                label,
                encodings.CANDIDATES[name],
                encoding.abs().max().item(),
                None if name == "learned" else _second_values(name, width, base, seed),
                None if repeat is None else f"{repeat.position}, same as {repeat.earlier}",
            ]
        )
    repeating_labels = [f'"{label}"' for label, repeat in repeats.items() if repeat is not None]
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
            f"Among {num_positions} positions, some are the same with "
            f"{join_names(repeating_labels)}. "
            if repeating_labels
            else ""
        )
        + "A sine with its cosine, and several waves of different length, repeat later.",
        columns=(
            "candidate",
            "formula",
            "largest |value|",
            f"2nd of {join_names(list(map(str, SENTENCE_LENGTHS)))} words",
            "first repeat",
        ),
        rows=rows,
        figure=pictures.draw_candidates(tables, shorter_tables, repeats),
    )


def _second_values(name: str, width: int, base: float, seed: int) -> str:
    """Return the first feature of the second word in sentences of `LENGTHS` words."""
    tables = (
        encodings.candidate_encoding(name, length, width, base, seed) for length in SENTENCE_LENGTHS
    )
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
        rows=[[name, rule, DECIDING_NUMBERS[name]] for name, rule in PROPERTIES.items()],
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
    measurements = {
        label: encodings.properties(name, num_positions, width, base, seed)
        for label, (name, width) in _candidates(d_model).items()
    }
    rows = [
        [
            label,
            *(
                f"{'yes' if measurement.holds else 'no'}: {measurement.text}"
                for measurement in by_property.values()
            ),
        ]
        for label, by_property in measurements.items()
    ]
    with_all_properties = [
        label
        for label, by_property in measurements.items()
        if all(measurement.holds for measurement in by_property.values())
    ]
    return Section(
        name="properties",
        title="Properties of the candidates",
        finding=f"{'Only ' if len(with_all_properties) == 1 else ''}"
        f"{join_names(with_all_properties) if with_all_properties else 'No candidate'} "
        f"{'has' if len(with_all_properties) < 2 else 'have'} all properties over {num_positions} "
        "positions. Each cell has the result of the rule and the measured number. The next section "
        "shows how many pairs are needed until no position repeats. A matrix adds no constant: "
        "with one more feature that is always 1, the integer would have a linear offset too.",
        columns=("candidate", *PROPERTIES),
        rows=rows,
        figure=pictures.draw_properties(measurements),
        numbers={
            "values": {
                label: {name: measurement.value for name, measurement in by_property.items()}
                for label, by_property in measurements.items()
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
    harmonic_repeats = [
        _first_repeat_position(encodings.harmonic_pairs(REPEAT_POSITIONS, num_pairs))
        for num_pairs in NUM_PAIRS
    ]
    geometric_repeats = [
        _first_repeat_position(sinusoidal_encoding(REPEAT_POSITIONS, 2 * num_pairs, base))
        for num_pairs in NUM_PAIRS
    ]
    rows = list(zip(NUM_PAIRS, harmonic_repeats, geometric_repeats, strict=True))

    one_pair_repeat: Any = harmonic_repeats[0]

    def describe_enough_pairs(repeats: Sequence[int | None]) -> str:
        repeating = [
            num_pairs
            for num_pairs, repeat in zip(NUM_PAIRS, repeats, strict=True)
            if repeat is not None
        ]
        most_repeating_pairs = max(repeating, default=0)
        if most_repeating_pairs == NUM_PAIRS[-1]:
            return f"more than {NUM_PAIRS[-1]} pairs"
        return f"{most_repeating_pairs + 1} pairs"

    base_note = "of the paper" if base == PAPER_BASE else f"with base {base:,g}"
    return Section(
        name="pairs",
        title="From one wave to several",
        finding="A pair of sine and cosine with wavelength 2 pi repeats after "
        f"{one_pair_repeat} positions, which are {one_pair_repeat / (2 * math.pi):.3f} "
        f"waves. With more waves the first repeat comes later. For {REPEAT_POSITIONS:,} positions "
        "without a repeat, wavelengths 2 pi, 4 pi, 6 pi, ... (pos / 1, pos / 2, pos / 3) need "
        f"{describe_enough_pairs(harmonic_repeats)}, and the geometric wavelengths {base_note} "
        f"need {describe_enough_pairs(geometric_repeats)}.",
        columns=("pairs", "first repeat, pos / 1, pos / 2, ...", f"first repeat, base {base:,g}"),
        rows=rows,
    )


def _first_repeat_position(encoding: Tensor) -> int | None:
    tolerance = LEAST_DISTANCE * encodings.median_step(encoding)
    repeat = encodings.first_repeat(encoding, tolerance)
    return None if repeat is None else repeat.position


def _candidates(d_model: int) -> dict[str, tuple[str, int]]:
    """Return the name and the width of each candidate, by the label of the candidate."""
    name_and_width_by_label: dict[str, tuple[str, int]] = {}
    for name in encodings.CANDIDATES:
        if name == "pairs":
            # two pairs, whose encodings repeat, and as many pairs as the sinusoids have
            name_and_width_by_label |= {
                f"{width // 2} pairs": (name, width) for width in (4, max(4, d_model))
            }
        else:
            name_and_width_by_label[name] = (name, NUM_BITS if name == "binary" else d_model)
    return name_and_width_by_label
