"""Addition of positions to the embeddings, compared with concatenation."""

from typing import Any

import torch

from ... import VanillaTransformerConfig, sinusoidal_encoding
from .. import positional_encoding as encodings
from ..study import Section
from . import pictures

WIDTHS = (8, 16, 32, 64, 128, 256, 512)
NUM_WORDS = 1000
# the compared directions are the strongest ones that contain this share of the positions' energy
ENERGY = 0.9
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
    found, rows = {}, []
    for d_model in WIDTHS:
        generator = torch.Generator().manual_seed(seed)
        # initial embeddings have variance 1 / d_model and are multiplied by sqrt(d_model), so the
        # variance of a word is 1
        words = torch.randn(NUM_WORDS, d_model, generator=generator)
        positions = sinusoidal_encoding(num_positions, d_model, base)
        found[d_model] = _overlap(words, positions)
        rows.append([d_model, *_overlap_cells(found[d_model], d_model)])
    narrow, wide = found[WIDTHS[0]], found[WIDTHS[-1]]
    return Section(
        name="addition",
        title="Addition of positions: random words",
        finding=f"Energy is squared length. With d_model = {WIDTHS[-1]}, the k = "
        f"{wide.num_directions} strongest directions hold {ENERGY:.0%} of the energy of "
        f"{num_positions} positions. {NUM_WORDS:,} random words, drawn like initial embeddings, "
        f"have {wide.word_energy:.1%} of their energy along these directions, and "
        f"{narrow.word_energy:.0%} with d_model = {WIDTHS[0]}. This is about k / d_model, the "
        "expected share of a random vector. The subspace of these k directions and that of the k "
        f"strongest directions of the words are nearly orthogonal with {WIDTHS[-1]} features: the "
        f"mean principal angle is {wide.mean_angle:.0f} degrees. Along the directions of the "
        f"positions, a position has {narrow.position_to_word:.1f} times the energy of a word with "
        f"{WIDTHS[0]} features, and {wide.position_to_word:.0f} times with {WIDTHS[-1]}, so it can "
        "be recovered from the sum.",
        columns=("d_model", *OVERLAP_COLUMNS),
        rows=rows,
        figure=pictures.draw_overlaps(found),
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
    found = {
        "trained": _overlap(words, positions),
        "random": _overlap(random_words, positions),
    }
    d_model = words.shape[1]
    trained, chance = found["trained"], found["random"]
    closer = trained.mean_angle < chance.mean_angle
    more = "more" if trained.word_energy > chance.word_energy else "less"
    lengths = words.norm(dim=1).mean().item(), positions.norm(dim=1).mean().item()
    return Section(
        name="addition-trained",
        title="Addition of positions: trained words",
        finding=f"The {len(words):,} word embeddings of this model, scaled as in section 3.4, have "
        f"a mean length of {lengths[0]:.3g}, and its positions have {lengths[1]:.3g}. The words "
        f"have {trained.word_energy:.1%} of their energy along the {trained.num_directions} "
        f"strongest directions of the positions, {more} than random words of the same width "
        f"({chance.word_energy:.1%}). Along these directions a position has "
        f"{trained.position_to_word:.1f} times the energy of a word. The two subspaces are "
        f"{'closer to' if closer else 'farther from'} each other than those of random words: the "
        f"mean principal angle is {trained.mean_angle:.0f} degrees, with random words "
        f"{chance.mean_angle:.0f}.",
        columns=("words", *OVERLAP_COLUMNS),
        rows=[[name, *_overlap_cells(one, d_model)] for name, one in found.items()],
        numbers={"mean_word_length": lengths[0], "mean_position_length": lengths[1]},
    )


def concatenation() -> Section:
    """Compute the cost of separate features for the position.

    Returns:
        The section.
    """
    width = VanillaTransformerConfig.from_paper("base").d_model
    costs = {extra: encodings.concatenation_cost(extra) for extra in EXTRA_WIDTHS}
    added = costs[0]
    rows: list[list[Any]] = [
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
        title="Cost of concatenation",
        finding=f"The table counts the layers of the base model. Words keep {width} features, the "
        "features of the position are concatenated to them in every layer, and heads, d_k, d_v "
        "and d_ff do not change. Embedding and output projection would not change either, and are "
        "not counted. A position as wide as the word multiplies the parameters by "
        f"{rows[-1][2]:.2f} and the FLOPs by {rows[-1][4]:.2f}; {EXTRA_WIDTHS[1]} features add "
        f"{rows[1][2] - 1:.0%} to the parameters. Addition needs no parameters.",
        columns=("features", "parameters", "ratio", "FLOPs for 32 + 32 tokens", "ratio of FLOPs"),
        rows=rows,
    )


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
