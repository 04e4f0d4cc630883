"""Why positions are added to the embeddings and not concatenated."""

import torch

from ... import VanillaTransformerConfig, sinusoidal_encoding
from .. import positional_encoding as encodings
from ..study import Section
from . import pictures

WIDTHS = (8, 16, 32, 64, 128, 256, 512)
NUM_WORDS = 1000
# the directions that hold this share of the positions' energy are compared
ENERGY = 0.9
EXTRA_WIDTHS = (0, 64, 128, 512)
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


def addition(num_positions: int, base: float, seed: int) -> Section:
    """Random words and positions are nearly at right angles, the wider the nearer.

    Args:
        num_positions: Number of positions.
        base: Base of the wavelengths.
        seed: Seed of the words.

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
        num_positions: Number of positions.
        seed: Seed of the random words to compare with.

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


def concatenation() -> Section:
    """Compute the cost of separate features for positions.

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
