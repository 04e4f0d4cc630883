"""Positional encodings of section 3.5 as functions, and measurements of their properties.

Shapes: N positions, d features of an encoding, V words, K offsets. An encoding is a table with a
row for each position. An encoding that is added to embeddings has d = d_model features.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import VanillaTransformerConfig, sinusoidal_encoding
from ..configuration_vanilla_transformer import closest_name
from ..modeling_vanilla_transformer import (
    VanillaTransformerEncoder,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)

PAPER_BASE = 10000.0

# formula of each candidate for position pos, from the simplest encoding to the two of the paper
CANDIDATES = {
    "integer": "pos",
    "fraction": "(pos + 1) / length",
    "sine": "sin(pos)",
    "sine and cosine": "sin(pos), cos(pos)",
    "pairs": "sin(pos / 1), cos(pos / 1), sin(pos / 2), cos(pos / 2), ...",
    "binary": "the bits of pos, lowest bit first",
    "sinusoidal": "sin(pos / base^(2i/d)), cos(pos / base^(2i/d)), section 3.5",
    "learned": "a learned table, Table 3, row (E)",
}

# the highest bit of a positive int64, which is 0 in every position of a table. Higher bits are read
# from this bit, because torch does not define a right shift of an int64 by 64 or more
HIGHEST_BIT = 62

# `properties` also encodes a sentence shorter by this factor and a sentence longer by this factor
LENGTH_FACTOR = 4
# numbers of words of the sentences whose first steps "same step" compares
SENTENCE_LENGTHS = (2, 4, 64)
# offsets k for which "linear offset" fits a matrix
FITTED_OFFSETS = (1, 2, 5, 10)

# the rule that an encoding must follow to have a property
PROPERTIES = {
    "bounded": f"the largest |value| does not double in a sentence {LENGTH_FACTOR} times as long",
    "deterministic": "two seeds give the same encoding",
    "unique": "every two positions are at least a tenth of the median step apart",
    "same step": "the step from the 1st word to the 2nd is the same in sentences of "
    f"{', '.join(map(str, SENTENCE_LENGTHS[:-1]))} and {SENTENCE_LENGTHS[-1]} words",
    "smooth": "the largest step by one position is smaller than the smallest step by two",
    "extends": f"an encoding of {LENGTH_FACTOR} times the length exists, begins with the same "
    "rows, and has the same range of values",
    "linear offset": "one matrix maps every PE(pos) to PE(pos + k): fitted on every other "
    "position, its relative error on the rest is below 0.1%",
}
# the measured number that decides each property; the tables show this number beside yes or no
DECIDING_NUMBERS = {
    "bounded": "largest |value| of the shorter and of the longer sentence",
    "deterministic": "largest difference between the two encodings",
    "unique": "smallest distance of two positions, divided by the median step",
    "same step": "length of this step in each sentence",
    "smooth": "largest step by one position, divided by the smallest step by two",
    "extends": "largest |value| of the longer encoding, divided by that of the shorter",
    "linear offset": "largest relative error",
}
# "bounded": the largest |value| of the longer sentence must be below this many times the shorter's
MOST_GROWTH = 2.0
# "unique": smallest distance between two different positions, in median steps
LEAST_DISTANCE = 0.1
# "linear offset": the relative error of the fitted matrix must be below this
MOST_RESIDUAL = 1e-3
# "extends": the largest |value| of the longer encoding must exceed the shorter's by at most this
# relative amount
MOST_RANGE_CHANGE = 1e-3
# two float32 computations of the same value may differ by this relative error
ROUNDING_TOLERANCE = 1e-6


class Measurement(NamedTuple):
    """A measured property: the number or None, the number as text, and whether the rule holds."""

    value: float | None
    text: str
    holds: bool


class Repeat(NamedTuple):
    """The first position whose encoding equals that of an earlier position, up to a tolerance."""

    position: int
    earlier: int


class Overlap(NamedTuple):
    """Overlap of two subspaces: the k strongest directions of words, and those of positions.

    A direction is a right singular vector. Energy is squared length.

    Attributes:
        num_directions: Number of directions k.
        word_energy: Share of the words' energy along the k directions of the positions.
        position_energy: Share of the positions' energy along the k directions of the words.
        smallest_angle: Smallest principal angle, in degrees; 0 if the two subspaces share a
            direction.
        mean_angle: Mean of the k principal angles, in degrees.
        mean_cosine: Mean |cosine| over all pairs of a word and a position.
        position_to_word: Mean energy of a position, divided by that of a word, both along the k
            directions of the positions.
    """

    num_directions: int
    word_energy: float
    position_energy: float
    smallest_angle: float
    mean_angle: float
    mean_cosine: float
    position_to_word: float


class Cost(NamedTuple):
    """Parameters outside the embedding, and FLOPs of one forward pass."""

    parameters: int
    flops: int


def candidate_encoding(
    name: str, num_positions: int, d_model: int, base: float = PAPER_BASE, seed: int = 0
) -> Tensor:
    """Return the encoding that a candidate gives to the positions of a sentence.

    Args:
        name: One of `CANDIDATES`.
        num_positions: N, the length of the sentence.
        d_model: Width of "pairs", "binary", "sinusoidal" and "learned", even; the others have one
            or two features.
        base: Base of the wavelengths of "sinusoidal".
        seed: Seed of the initial values of "learned".

    Returns:
        The encoding, float32 [N, d].

    Raises:
        ValueError: If the name is unknown, a size or the base is not positive, `d_model` is odd, or
            "binary" has fewer features than the last position has bits.
    """
    if name not in CANDIDATES:
        raise ValueError(
            f"name must be one of {', '.join(CANDIDATES)}, got {name!r}."
            + closest_name(name, list(CANDIDATES))
        )
    if num_positions < 1:
        raise ValueError(f"num_positions must be positive, got {num_positions}.")
    if d_model <= 0 or d_model % 2:
        raise ValueError(f"d_model must be even, for sin/cos pairs, and positive, got {d_model}.")
    positions = torch.arange(num_positions)
    if name == "integer":
        return positions[:, None].float()
    if name == "fraction":
        # count from 1, so that the last word of every sentence gets 1
        return (positions[:, None] + 1) / num_positions
    if name == "sine":
        return harmonic_pairs(num_positions, 1)[:, :1]
    if name == "sine and cosine":
        return harmonic_pairs(num_positions, 1)
    if name == "pairs":
        return harmonic_pairs(num_positions, d_model // 2)
    if name == "binary":
        return position_bits(num_positions, d_model)
    if name == "sinusoidal":
        return sinusoidal_encoding(num_positions, d_model, base)
    return learned_encoding(num_positions, d_model, seed)


def harmonic_pairs(num_positions: int, num_pairs: int) -> Tensor:
    """Return sin(pos / 1), cos(pos / 1), sin(pos / 2), cos(pos / 2), ...

    The wavelengths are 2 pi, 4 pi, 6 pi, ...

    Args:
        num_positions: Number of positions N.
        num_pairs: Number of pairs of a sine and a cosine.

    Returns:
        The encoding, float32 [N, 2 * num_pairs].
    """
    divisors = torch.arange(1, num_pairs + 1, dtype=torch.float64)
    angles = torch.arange(num_positions)[:, None] / divisors  # [N, num_pairs]
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


def position_bits(num_positions: int, num_bits: int) -> Tensor:
    """Return each position as a binary number, lowest bit first.

    Args:
        num_positions: Number of positions N.
        num_bits: Number of bits.

    Returns:
        Zeros and ones, float32 [N, num_bits].

    Raises:
        ValueError: If the last position needs more than `num_bits` bits.
    """
    if (num_positions - 1).bit_length() > num_bits:
        raise ValueError(
            f"num_positions must be at most 2^{num_bits} for {num_bits} bits, got {num_positions}."
        )
    shifts = torch.arange(num_bits).clamp(max=HIGHEST_BIT)
    return (torch.arange(num_positions)[:, None] >> shifts & 1).float()


def learned_encoding(num_positions: int, d_model: int, seed: int = 0) -> Tensor:
    """Return the initial values of a learned table. Table 3, row (E).

    Args:
        num_positions: Number of rows N.
        d_model: Width.
        seed: Seed of the random values.

    Returns:
        The table, float32 [N, d_model].
    """
    config = VanillaTransformerConfig(
        vocab_size=3,
        hidden_size=d_model,
        encoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        encoder_ffn_dim=1,
        position_encoding="learned",
        max_position_embeddings=num_positions,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VanillaTransformerEncoder(config).positions.table.weight.detach()


def model_encoding(model: VanillaTransformerForConditionalGeneration, num_positions: int) -> Tensor:
    """Return the positional encoding that a model adds to its embeddings.

    Args:
        model: Trained or untrained model.
        num_positions: Number of positions N; a learned table with fewer rows is returned whole.

    Returns:
        The encoding, float32 [N, d_model].

    Raises:
        ValueError: If the model has no positional encoding.
    """
    config = model.config
    if config.position_encoding == "none":
        raise ValueError("model must have positions, got position_encoding 'none'.")
    if config.position_encoding == "learned":
        num_positions = min(num_positions, config.max_position_embeddings)
    zero_embeddings = torch.zeros(1, num_positions, config.d_model, device=model.device)
    with torch.no_grad():
        return model.get_encoder().positions(zero_embeddings)[0].float().cpu()


def word_embeddings(model: VanillaTransformerForConditionalGeneration) -> Tensor:
    """Return the word embeddings, scaled by sqrt(d_model). Section 3.4.

    Args:
        model: Trained or untrained model.

    Returns:
        The vectors to which the positional encoding is added, float32 [V, d_model].
    """
    unscaled_embeddings = model.get_input_embeddings().weight.detach().float().cpu()
    return unscaled_embeddings * math.sqrt(model.config.d_model)


def wavelengths(d_model: int, base: float = PAPER_BASE) -> Tensor:
    """Return the wavelength of each sin/cos pair: 2 pi * base^(2i / d_model).

    The last wavelength is 2 pi * base^((d_model - 2) / d_model), which tends to 2 pi * base as
    d_model grows.

    Args:
        d_model: Width, even.
        base: Base of the wavelengths.

    Returns:
        Wavelengths in positions, float64 [d_model / 2].
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    return 2 * math.pi * base**exponents


def flip_rates(is_on: Tensor) -> Tensor:
    """Return how often each bit, or the sign of each feature, changes.

    Args:
        is_on: True where the bit is 1, or the feature is not negative, [N, d].

    Returns:
        Mean number of changes per step from a position to the next, float64 [d].
    """
    return (is_on[1:] != is_on[:-1]).double().mean(dim=0)


def distances(encoding: Tensor) -> Tensor:
    """Return the Euclidean distance between the encodings of every two positions.

    Args:
        encoding: Encoding of the positions, [N, d].

    Returns:
        Symmetric matrix with zeros on its diagonal, float64 [N, N].
    """
    encoding = encoding.double()
    return torch.cdist(encoding, encoding, compute_mode="donot_use_mm_for_euclid_dist")


def cosine_similarity_matrix(encoding: Tensor) -> Tensor:
    """Return the cosine similarity of the encodings of every two positions.

    Args:
        encoding: Encoding of the positions, [N, d].

    Returns:
        Symmetric matrix, float64 [N, N]; 0 for a position whose encoding is all zeros.
    """
    unit_vectors = F.normalize(encoding.double(), dim=-1)
    return unit_vectors @ unit_vectors.T


def steps(encoding: Tensor, size: int = 1) -> Tensor:
    """Return the distance between the encodings of each position and of the position `size` later.

    Args:
        encoding: Encoding of the positions, [N, d].
        size: Offset between the two positions.

    Returns:
        Distances, float64 [N - size].
    """
    return (encoding[size:].double() - encoding[:-size].double()).norm(dim=-1)


def median_step(encoding: Tensor) -> float:
    """Return the median step: the median distance between two neighbouring positions.

    Args:
        encoding: Encoding of at least two positions, [N, d].

    Returns:
        The median distance, which is the unit for other distances.
    """
    return steps(encoding).median().item()


def smallest_distance(encoding: Tensor) -> float:
    """Return the smallest distance between the encodings of two positions.

    Args:
        encoding: Encoding of the positions, [N, d].

    Returns:
        The distance; infinite if there is only one position.
    """
    return distances(encoding).fill_diagonal_(math.inf).min().item()


def collisions(encoding: Tensor, tolerance: float) -> int:
    """Count the pairs of positions with the same encoding, up to a tolerance.

    Args:
        encoding: Encoding of the positions, [N, d].
        tolerance: Largest distance of two encodings that count as the same.

    Returns:
        The number of pairs.
    """
    return int(_mark_repeats(encoding, tolerance).sum())


def first_repeat(encoding: Tensor, tolerance: float) -> Repeat | None:
    """Find the first position with the encoding of an earlier position, up to a tolerance.

    Args:
        encoding: Encoding of the positions, [N, d].
        tolerance: Largest distance of two encodings that count as the same.

    Returns:
        Both positions; None if all encodings differ.
    """
    repeats = _mark_repeats(encoding, tolerance).nonzero()
    return Repeat(*repeats[0].tolist()) if len(repeats) else None


def by_offset(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, smallest and largest value at each distance between two positions.

    Args:
        matrix: Symmetric matrix of positions by positions, [N, N].

    Returns:
        Three tensors for the distances 0, 1, ... N - 1, [N] each.
    """
    diagonals = [matrix.diagonal(offset) for offset in range(len(matrix))]
    means, smallest, largest = (
        torch.stack([reduce(values) for values in diagonals])
        for reduce in (torch.mean, torch.min, torch.max)
    )
    return means, smallest, largest


def _mark_repeats(encoding: Tensor, tolerance: float) -> Tensor:
    """Mark the positions (rows) with the encoding of an earlier position (columns), [N, N]."""
    return (distances(encoding) <= tolerance).tril(diagonal=-1)


def offset_map(offset: int, d_model: int, base: float = PAPER_BASE) -> Tensor:
    """Return the matrix M_k with PE(pos + k) = M_k PE(pos) at every position. Section 3.5.

    M_k rotates pair i by the angle w_i k, where w_i = base^(-2i / d_model) is the frequency of the
    pair. So M_k has blocks [[cos, sin], [-sin, cos]] along its diagonal. M_-k is the transpose of
    M_k and also its inverse.

    Args:
        offset: Offset k, positive or negative.
        d_model: Width, even.
        base: Base of the wavelengths.

    Returns:
        The matrix, float64 [d_model, d_model].
    """
    angles = 2 * math.pi * offset / wavelengths(d_model, base)
    sin, cos = angles.sin(), angles.cos()
    blocks = torch.stack((torch.stack((cos, sin), -1), torch.stack((-sin, cos), -1)), dim=-2)
    return torch.block_diag(*blocks)


def dot_product_by_offset(
    offsets: Tensor | Sequence[int], d_model: int, base: float = PAPER_BASE
) -> Tensor:
    """Return PE(pos) . PE(pos + k) = sum_i cos(w_i k), which is the same for every pos.

    Args:
        offsets: Offsets k, positive or negative, [K].
        d_model: Width, even.
        base: Base of the wavelengths.

    Returns:
        Dot products, float64 [K].
    """
    offsets = torch.as_tensor(offsets, dtype=torch.float64)
    return (2 * math.pi * offsets[:, None] / wavelengths(d_model, base)).cos().sum(dim=-1)


def reach(d_model: int, base: float = PAPER_BASE, farthest: int = 20000) -> int | None:
    """Return the smallest distance at which the dot product of two positions is not positive.

    Args:
        d_model: Width, even.
        base: Base of the wavelengths.
        farthest: Largest distance to check.

    Returns:
        The distance; None if the dot product is positive at all checked distances.
    """
    dot_products = dot_product_by_offset(range(farthest + 1), d_model, base)
    zero_distances = (dot_products <= 0).nonzero()
    return int(zero_distances[0]) if len(zero_distances) else None


def linear_map_residual(encoding: Tensor, offset: int) -> float:
    """Return the relative error of the best matrix that maps PE(pos) to PE(pos + k).

    The matrix is fitted by least squares on every other position. Its error is measured on the
    remaining positions.

    Args:
        encoding: Encoding of the positions, [N, d].
        offset: Offset k.

    Returns:
        Norm of the error, divided by the norm of PE(pos + k), both over the remaining positions.
    """
    start, shifted = encoding[:-offset].double(), encoding[offset:].double()
    # features with long wavelengths are almost constant, so the system may be rank-deficient: use
    # the driver gelsd, which solves such systems too
    offset_matrix = torch.linalg.lstsq(start[::2], shifted[::2], driver="gelsd").solution
    return ((start[1::2] @ offset_matrix - shifted[1::2]).norm() / shifted[1::2].norm()).item()


def properties(
    name: str, num_positions: int, d_model: int, base: float = PAPER_BASE, seed: int = 0
) -> dict[str, Measurement]:
    """Measure the properties of an encoding by the rules of `PROPERTIES`.

    Args:
        name: One of `CANDIDATES`.
        num_positions: Length N of the longest training sentence, at least the longest of
            `SENTENCE_LENGTHS`.
        d_model: Width, as in `candidate_encoding`.
        base: Base of the wavelengths of "sinusoidal".
        seed: Seed of "learned".

    Returns:
        A measurement for each property, in the order of `PROPERTIES`.

    Raises:
        ValueError: If `candidate_encoding` refuses an argument, or `num_positions` is below the
            longest of `SENTENCE_LENGTHS`.
    """
    if num_positions < max(SENTENCE_LENGTHS):
        raise ValueError(
            f"num_positions must be at least {max(SENTENCE_LENGTHS)}, got {num_positions}."
        )

    def encode(length: int, seed: int = seed) -> Tensor:
        if name != "learned":
            return candidate_encoding(name, length, d_model, base)
        # a learned table has a fixed length; a shorter sentence uses its first rows
        return learned_encoding(num_positions, d_model, seed)[:length]

    encoding = encode(num_positions)
    shorter_encoding = encode(num_positions // LENGTH_FACTOR)
    longer_encoding = None if name == "learned" else encode(num_positions * LENGTH_FACTOR)
    shorter_bound, bound = shorter_encoding.abs().max().item(), encoding.abs().max().item()
    seed_difference = (encoding - encode(num_positions, seed + 1)).abs().max().item()
    smallest_step_ratio = smallest_distance(encoding) / median_step(encoding)
    first_steps = [steps(encode(length))[0].item() for length in SENTENCE_LENGTHS]
    smallest_double_step = steps(encoding, 2).min().item()
    unevenness = math.inf
    if smallest_double_step:
        unevenness = steps(encoding).max().item() / smallest_double_step
    residual = max(linear_map_residual(encoding, offset) for offset in FITTED_OFFSETS)
    return {
        "bounded": Measurement(
            bound / shorter_bound,
            f"{shorter_bound:.3g} to {bound:.3g}",
            bound < MOST_GROWTH * shorter_bound,
        ),
        "deterministic": Measurement(
            seed_difference, f"{seed_difference:.3g}", seed_difference == 0
        ),
        "unique": Measurement(
            smallest_step_ratio, f"{smallest_step_ratio:.3g}", smallest_step_ratio >= LEAST_DISTANCE
        ),
        "same step": Measurement(
            max(first_steps) / min(first_steps),
            ", ".join(f"{step:.3g}" for step in dict.fromkeys(first_steps)),
            max(first_steps) <= min(first_steps) * (1 + ROUNDING_TOLERANCE),
        ),
        "smooth": Measurement(unevenness, f"{unevenness:.3g}", unevenness < 1),
        "extends": _measure_extension(encoding, longer_encoding),
        "linear offset": Measurement(residual, f"{residual:.3g}", residual < MOST_RESIDUAL),
    }


def _measure_extension(encoding: Tensor, longer_encoding: Tensor | None) -> Measurement:
    if longer_encoding is None:
        return Measurement(None, f"no rows after {len(encoding)}", False)
    row_change = (longer_encoding[: len(encoding)] - encoding).abs().max().item()
    if row_change > ROUNDING_TOLERANCE:
        return Measurement(row_change, f"rows change by {row_change:.3g}", False)
    range_growth = (longer_encoding.abs().max() / encoding.abs().max()).item()
    return Measurement(
        range_growth, f"{range_growth:.3g} times as large", range_growth <= 1 + MOST_RANGE_CHANGE
    )


def share_of_new_values(encoding: Tensor, trained_length: int, margin: float = 0.0) -> float:
    """Return the share of features that leave the range of their values at training positions.

    Args:
        encoding: Encoding of more than `trained_length` positions, [N, d].
        trained_length: Number of training positions.
        margin: Largest distance from the range at which a value still counts as inside the range.

    Returns:
        Share of the d features that have a value outside the range at a later position.
    """
    training_rows, later_rows = encoding[:trained_length], encoding[trained_length:]
    lowest, highest = training_rows.min(dim=0).values, training_rows.max(dim=0).values
    is_new = ((later_rows < lowest - margin) | (later_rows > highest + margin)).any(dim=0)
    return is_new.double().mean().item()


def num_directions_for(vectors: Tensor, share: float) -> int:
    """Count the strongest directions that together contain a share of the vectors' energy.

    Args:
        vectors: Vectors, [N, d].
        share: Share of the energy, which is the sum of the squared lengths.

    Returns:
        The smallest sufficient number of right singular vectors.
    """
    energy = torch.linalg.svdvals(vectors.double()).square()
    return int((energy.cumsum(0) < share * energy.sum()).sum()) + 1


def overlap(words: Tensor, positions: Tensor, num_directions: int) -> Overlap:
    """Measure how much the directions of words and positions overlap.

    Args:
        words: Scaled embeddings, [V, d_model].
        positions: Encoding of the positions, [N, d_model].
        num_directions: Number k of strongest directions to compare, the same for both.

    Returns:
        Shares of energy, and angles.

    Raises:
        ValueError: If k is below 1, or words or positions have fewer than k directions.
    """
    max_directions = min(len(words), *positions.shape)
    if not 1 <= num_directions <= max_directions:
        raise ValueError(
            f"num_directions must be between 1 and {max_directions}, got {num_directions}."
        )
    words, positions = words.double(), positions.double()
    word_directions, position_directions = (
        torch.linalg.svd(vectors, full_matrices=False).Vh[:num_directions]
        for vectors in (words, positions)
    )  # [k, d_model]
    principal_cosines = torch.linalg.svdvals(word_directions @ position_directions.T)
    angles = principal_cosines.clamp(max=1).acos().rad2deg()
    cosines = F.normalize(words, dim=-1) @ F.normalize(positions, dim=-1).T  # [V, N]
    mean_position_energy, mean_word_energy = (
        (vectors @ position_directions.T).square().sum(dim=-1).mean()
        for vectors in (positions, words)
    )
    return Overlap(
        num_directions=num_directions,
        word_energy=_energy_along(words, position_directions),
        position_energy=_energy_along(positions, word_directions),
        smallest_angle=angles.min().item(),
        mean_angle=angles.mean().item(),
        mean_cosine=cosines.abs().mean().item(),
        position_to_word=(mean_position_energy / mean_word_energy).item(),
    )


def concatenation_cost(
    extra_width: int, row: str = "base", source_length: int = 32, target_length: int = 32
) -> Cost:
    """Count parameters and FLOPs of a Table 3 row if positions are concatenated to the words.

    Every layer has `extra_width` features for the position beside the d_model features of the word.
    Heads, d_k, d_v and d_ff do not change. Embedding and output projection keep their size and are
    not counted.

    Args:
        extra_width: Features of the position; 0 if the encoding is added to the words.
        row: Name of a row of Table 3.
        source_length: Number of source tokens.
        target_length: Number of target tokens.

    Returns:
        Parameters, and FLOPs of a forward pass over one sentence pair, as torch counts them: a
        multiplication and an addition count as two.
    """
    from torch.utils.flop_counter import FlopCounterMode

    paper_config = VanillaTransformerConfig.from_paper(row)
    sizes = {
        "hidden_size": paper_config.d_model + extra_width,
        "d_k": paper_config.head_dim,
        "d_v": paper_config.d_v or paper_config.d_model // paper_config.encoder_attention_heads,
    }
    config = VanillaTransformerConfig.from_paper(row, **sizes)
    with torch.device("meta"):
        model = VanillaTransformerModel(config).eval()
        source_ids, target_ids = (
            torch.zeros(1, length, dtype=torch.long) for length in (source_length, target_length)
        )
        with FlopCounterMode(display=False) as counter:
            model(input_ids=source_ids, decoder_input_ids=target_ids, use_cache=False)
    embedding_parameters = model.get_input_embeddings().weight.numel()
    return Cost(model.num_parameters() - embedding_parameters, counter.get_total_flops())


def _energy_along(vectors: Tensor, directions: Tensor) -> float:
    return ((vectors @ directions.T).square().sum() / vectors.square().sum()).item()
