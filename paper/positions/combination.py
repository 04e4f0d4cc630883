"""Addition of positions to the embeddings, compared with concatenation."""

from typing import Any

import torch

from ... import VanillaTransformerConfig, sinusoidal_encoding
from .. import positional_encoding as encodings
from ..study import Section
from . import pictures

MODEL_WIDTHS = (8, 16, 32, 64, 128, 256, 512)
NUM_WORDS = 1000
# the compared directions are the strongest ones that contain this share of the positions' energy
ENERGY_SHARE = 0.9
EXTRA_WIDTHS = (0, 64, 128, 512)
OVERLAP_COLUMNS = (
    "k",
    "k / d_model",
    "energy of words along positions",
    "energy of positions along words",
    "smallest angle",
    "mean principal angle",
    "mean |cosine|",
    "energy of position / word",
)


def addition(num_positions: int, base: float, seed: int) -> Section:
    """Compare the directions of random words with those of the positions, by width.

    Args:
        num_positions: Number of positions.
        base: Base of the wavelengths.
        seed: Seed of the random words.

    Returns:
        The section.
    """
    overlaps, rows = {}, []
    for d_model in MODEL_WIDTHS:
        generator = torch.Generator().manual_seed(seed)
        # initial embeddings have variance 1 / d_model and are multiplied by sqrt(d_model), so the
        # variance of a word is 1
        words = torch.randn(NUM_WORDS, d_model, generator=generator)
        positions = sinusoidal_encoding(num_positions, d_model, base)
        overlaps[d_model] = _measure_overlap(words, positions)
        rows.append([d_model, *_overlap_cells(overlaps[d_model], d_model)])
    narrowest, widest = overlaps[MODEL_WIDTHS[0]], overlaps[MODEL_WIDTHS[-1]]
    return Section(
        name="addition",
        title="Addition of positions: random words",
        finding=f"Energy is squared length. With d_model = {MODEL_WIDTHS[-1]}, the k = "
        f"{widest.num_directions} strongest directions hold {ENERGY_SHARE:.0%} of the energy of "
        f"{num_positions} positions. {NUM_WORDS:,} random words, drawn like initial embeddings, "
        f"have {widest.word_energy:.1%} of their energy along these directions, and "
        f"{narrowest.word_energy:.0%} with d_model = {MODEL_WIDTHS[0]}. This is about k / d_model, "
        "the expected share of a random vector. The subspace of these k directions and that of the "
        f"k strongest directions of the words are nearly orthogonal with {MODEL_WIDTHS[-1]} "
        f"features: the mean principal angle is {widest.mean_angle:.0f} degrees. Along the "
        f"directions of the positions, a position has {narrowest.position_to_word:.1f} times the "
        f"energy of a word with {MODEL_WIDTHS[0]} features, and {widest.position_to_word:.0f} "
        f"times with {MODEL_WIDTHS[-1]}, so it can be recovered from the sum.",
        columns=("d_model", *OVERLAP_COLUMNS),
        rows=rows,
        figure=pictures.draw_overlaps(overlaps),
    )


def trained_addition(model, num_positions: int, seed: int) -> Section:
    """Compare the directions of a trained model's words with those of its positions.

    Args:
        model: Trained model.
        num_positions: Number of positions.
        seed: Seed of the random words for comparison.

    Returns:
        The section.

    Raises:
        ValueError: If the model has no positional encoding.
    """
    positions = encodings.model_encoding(model, num_positions)
    words = encodings.word_embeddings(model)
    generator = torch.Generator().manual_seed(seed)
    random_words = torch.randn(words.shape, generator=generator) * words.std()
    overlaps = {
        "trained": _measure_overlap(words, positions),
        "random": _measure_overlap(random_words, positions),
    }
    d_model = words.shape[1]
    trained_overlap, random_overlap = overlaps["trained"], overlaps["random"]
    is_closer = trained_overlap.mean_angle < random_overlap.mean_angle
    comparison = "more" if trained_overlap.word_energy > random_overlap.word_energy else "less"
    mean_word_length = words.norm(dim=1).mean().item()
    mean_position_length = positions.norm(dim=1).mean().item()
    return Section(
        name="addition-trained",
        title="Addition of positions: trained words",
        finding=f"The {len(words):,} word embeddings of this model, scaled as in section 3.4, have "
        f"a mean length of {mean_word_length:.3g}, and its positions have "
        f"{mean_position_length:.3g}. The words have {trained_overlap.word_energy:.1%} of their "
        f"energy along the {trained_overlap.num_directions} strongest directions of the positions, "
        f"{comparison} than random words of the same width ({random_overlap.word_energy:.1%}). "
        f"Along these directions a position has {trained_overlap.position_to_word:.1f} times the "
        f"energy of a word. The two subspaces are {'closer to' if is_closer else 'farther from'} "
        "each other than those of random words: the mean principal angle is "
        f"{trained_overlap.mean_angle:.0f} degrees, with random words "
        f"{random_overlap.mean_angle:.0f}.",
        columns=("words", *OVERLAP_COLUMNS),
        rows=[[name, *_overlap_cells(overlap, d_model)] for name, overlap in overlaps.items()],
        numbers={
            "mean_word_length": mean_word_length,
            "mean_position_length": mean_position_length,
        },
    )


def concatenation() -> Section:
    """Compute the cost of separate features for the position.

    Returns:
        The section.
    """
    word_width = VanillaTransformerConfig.from_paper("base").d_model
    costs = {extra_width: encodings.concatenation_cost(extra_width) for extra_width in EXTRA_WIDTHS}
    addition_cost = costs[0]
    parameter_ratios = {
        extra_width: cost.parameters / addition_cost.parameters
        for extra_width, cost in costs.items()
    }
    flop_ratios = {
        extra_width: cost.flops / addition_cost.flops for extra_width, cost in costs.items()
    }
    narrow_width, full_width = EXTRA_WIDTHS[1], EXTRA_WIDTHS[-1]
    rows: list[list[Any]] = [
        [
            f"{word_width} + {extra_width}" if extra_width else f"{word_width}, added",
            cost.parameters,
            parameter_ratios[extra_width],
            cost.flops,
            flop_ratios[extra_width],
        ]
        for extra_width, cost in costs.items()
    ]
    return Section(
        name="concatenation",
        title="Cost of concatenation",
        finding=f"The table counts the layers of the base model. Words keep {word_width} features, "
        "the features of the position are concatenated to them in every layer, and heads, d_k, d_v "
        "and d_ff do not change. Embedding and output projection would not change either, and are "
        "not counted. A position as wide as the word multiplies the parameters by "
        f"{parameter_ratios[full_width]:.2f} and the FLOPs by {flop_ratios[full_width]:.2f}; "
        f"{narrow_width} features add {parameter_ratios[narrow_width] - 1:.0%} to the parameters. "
        "Addition needs no parameters.",
        columns=("features", "parameters", "ratio", "FLOPs for 32 + 32 tokens", "ratio of FLOPs"),
        rows=rows,
    )


def _measure_overlap(words: torch.Tensor, positions: torch.Tensor) -> encodings.Overlap:
    num_directions = encodings.num_directions_for(positions, ENERGY_SHARE)
    return encodings.overlap(words, positions, num_directions)


def _overlap_cells(overlap: encodings.Overlap, d_model: int) -> list[float]:
    return [
        overlap.num_directions,
        overlap.num_directions / d_model,
        overlap.word_energy,
        overlap.position_energy,
        overlap.smallest_angle,
        overlap.mean_angle,
        overlap.mean_cosine,
        overlap.position_to_word,
    ]
