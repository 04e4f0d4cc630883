"""Section 3.5 as functions: encodings of position, and what tells a good one from a bad one.

Shapes: N positions, d the width of an encoding, which is d_model where it is added to embeddings.
An encoding is a table with a row for each position.
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

# what could say where a word stands, from the simplest to the paper's two
CANDIDATES = {
    "integer": "pos",
    "fraction": "(pos + 1) / length",
    "sine": "sin(pos)",
    "sine and cosine": "sin(pos), cos(pos)",
    "pairs": "sin(pos / 1), cos(pos / 1), sin(pos / 2), cos(pos / 2), ...",
    "binary": "the bits of pos, the lowest first",
    "sinusoidal": "sin(pos / base^(2i/d)), cos(pos / base^(2i/d)), section 3.5",
    "learned": "a table of parameters, Table 3, row (E)",
}

# the widest shift of a whole number that torch defines
HIGHEST_BIT = 62

# an encoding is longer than at training, or shorter, by this factor
LENGTH_FACTOR = 4
SENTENCE_LENGTHS = (2, 4, 64)
OFFSETS = (1, 2, 5, 10)

# the rule of each property that `properties` measures
PROPERTIES = {
    "bounded": f"the largest |value| does not double in a sentence {LENGTH_FACTOR} times as long",
    "deterministic": "made twice, with two seeds, it is the same",
    "unique": "no two positions are nearer than a tenth of the usual step to the next position",
    "same step": "the step from the 1st word to the 2nd is the same in sentences of "
    f"{', '.join(map(str, SENTENCE_LENGTHS[:-1]))} and {SENTENCE_LENGTHS[-1]} words",
    "smooth": "the largest step of one position is below the smallest step of two",
    "extends": f"{LENGTH_FACTOR} times the length exists, begins with the same rows, and stays in "
    "the range of the values",
    "linear offset": "one matrix takes every PE(pos) to PE(pos + k): fitted on every other "
    "position, it misses the rest by less than 0.1%",
}
# the number that decides each, as it is written beside yes and no
DECIDED_BY = {
    "bounded": "the largest |value|, of the shorter sentence and of the longer",
    "deterministic": "the largest difference of the two",
    "unique": "the smallest distance of two positions, in usual steps",
    "same step": "the length of that step",
    "smooth": "the largest step of one position, in smallest steps of two",
    "extends": "the largest |value| of the longer, in that of the shorter",
    "linear offset": "the largest share that is missed",
}
MOST_GROWTH = 2.0
LEAST_DISTANCE = 0.1
MOST_RESIDUAL = 1e-3
# two sums of the same numbers differ by this share in float32
ROUNDING = 1e-6


class Measured(NamedTuple):
    """A property of an encoding: the number, how to write it, and whether its rule holds."""

    value: float | None
    text: str
    holds: bool


class Repeat(NamedTuple):
    """The first position that looks like an earlier one."""

    position: int
    earlier: int


class Overlap(NamedTuple):
    """Overlap of the subspaces of words and of positions.

    Attributes:
        num_directions: k, of either's strongest directions.
        word_energy: Share of the words' squared length along the k directions of the positions.
        position_energy: Share of the positions' along the k directions of the words.
        smallest_angle: Between the two subspaces, in degrees: 0 where they share a direction.
        mean_angle: Mean of the k principal angles, in degrees.
        mean_cosine: Mean |cosine| of a word and a position.
        position_to_word: Energy of the mean position to that of the mean word, both along the k
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
    """Cost of a width: parameters outside the embedding, and FLOPs of one forward pass."""

    parameters: int
    flops: int


def candidate_encoding(
    name: str, num_positions: int, d_model: int, base: float = PAPER_BASE, seed: int = 0
) -> Tensor:
    """Return one encoding of the positions of a sentence.

    Args:
        name: One of `CANDIDATES`.
        num_positions: N, the length of the sentence.
        d_model: Width of "pairs", "binary", "sinusoidal" and "learned", even; the others have one
            feature, or two.
        base: Base of the wavelengths of "sinusoidal".
        seed: Seed of "learned", which is as the model has it before training.

    Returns:
        The encoding, float32 [N, d].

    Raises:
        ValueError: If there is no such candidate, a size is not positive, `d_model` is odd, or too
            narrow for the bits of the last position.
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
        # counted from 1, so that the last word of any sentence is at 1
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
    """sin(pos / 1), cos(pos / 1), sin(pos / 2), cos(pos / 2), ...: wavelengths 2 pi, 4 pi, 6 pi ...

    Args:
        num_positions: N.
        num_pairs: Number of pairs of a sine and a cosine.

    Returns:
        The encoding, float32 [N, 2 * num_pairs].
    """
    divisors = torch.arange(1, num_pairs + 1, dtype=torch.float64)
    angles = torch.arange(num_positions)[:, None] / divisors  # [N, num_pairs]
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


def position_bits(num_positions: int, num_bits: int) -> Tensor:
    """Each position as a binary number, its lowest bit first.

    Args:
        num_positions: N.
        num_bits: Digits of the number.

    Returns:
        Zeros and ones, float32 [N, num_bits].

    Raises:
        ValueError: If the last position has more bits.
    """
    if (num_positions - 1).bit_length() > num_bits:
        raise ValueError(
            f"num_positions must be at most 2^{num_bits} for {num_bits} bits, got {num_positions}."
        )
    places = torch.arange(num_bits).clamp(max=HIGHEST_BIT)
    return (torch.arange(num_positions)[:, None] >> places & 1).float()


def learned_encoding(num_positions: int, d_model: int, seed: int = 0) -> Tensor:
    """A learned table as the model has it before training. Table 3, row (E).

    Args:
        num_positions: N, rows of the table.
        d_model: Width.
        seed: Seed of its random values.

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
    """Return what a model adds to its embeddings, for any encoding of position.

    Args:
        model: Trained or untrained model.
        num_positions: N; fewer where a learned table has fewer rows.

    Returns:
        The encoding, float32 [N, d_model].

    Raises:
        ValueError: If the model has no positions.
    """
    config = model.config
    if config.position_encoding == "none":
        raise ValueError("model must have positions, got position_encoding 'none'.")
    if config.position_encoding == "learned":
        num_positions = min(num_positions, config.max_position_embeddings)
    nothing = torch.zeros(1, num_positions, config.d_model, device=model.device)
    with torch.no_grad():
        return model.get_encoder().positions(nothing)[0].float().cpu()


def word_embeddings(model: VanillaTransformerForConditionalGeneration) -> Tensor:
    """The words as positions are added to them: scaled by sqrt(d_model). Section 3.4.

    Args:
        model: Trained or untrained model.

    Returns:
        A row for each token, float32 [V, d_model].
    """
    table = model.get_input_embeddings().weight.detach().float().cpu()
    return table * math.sqrt(model.config.d_model)


def wavelengths(d_model: int, base: float = PAPER_BASE) -> Tensor:
    """After how many positions each sin/cos pair repeats: 2 pi * base^(2i / d_model).

    The last is 2 pi * base^((d_model - 2) / d_model): it comes near to base * 2 pi with the width.

    Args:
        d_model: Width, even.
        base: Base of the wavelengths.

    Returns:
        In positions, float64 [d_model / 2].
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    return 2 * math.pi * base**exponents


def flip_rates(is_on: Tensor) -> Tensor:
    """Return how often each bit, or the sign of each feature, changes.

    Args:
        is_on: Whether the bit is 1, or the feature not negative, [N, d].

    Returns:
        Changes for each step to the next position, float64 [d].
    """
    return (is_on[1:] != is_on[:-1]).double().mean(dim=0)


def distances(encoding: Tensor) -> Tensor:
    """Return the distance between every two positions.

    Args:
        encoding: [N, d].

    Returns:
        Float64 [N, N], symmetric, with zeros in its diagonal.
    """
    exact = encoding.double()
    return torch.cdist(exact, exact, compute_mode="donot_use_mm_for_euclid_dist")


def cosine_similarity_matrix(encoding: Tensor) -> Tensor:
    """Return the cosine similarity of every two positions.

    Args:
        encoding: [N, d].

    Returns:
        Float64 [N, N], symmetric; 0 for a position whose encoding is all zeros.
    """
    unit = F.normalize(encoding.double(), dim=-1)
    return unit @ unit.T


def steps(encoding: Tensor, size: int = 1) -> Tensor:
    """The distance from each position to the one that stands `size` later.

    Args:
        encoding: [N, d].
        size: In positions.

    Returns:
        Float64 [N - size].
    """
    return (encoding[size:].double() - encoding[:-size].double()).norm(dim=-1)


def usual_step(encoding: Tensor) -> float:
    """The median distance of neighbours, the ruler for "near".

    Args:
        encoding: [N, d], of two positions at least.

    Returns:
        A distance.
    """
    return steps(encoding).median().item()


def smallest_distance(encoding: Tensor) -> float:
    """The distance of the two positions that are hardest to tell apart.

    Args:
        encoding: [N, d].

    Returns:
        A distance; infinite where there is only one position.
    """
    return distances(encoding).fill_diagonal_(math.inf).min().item()


def collisions(encoding: Tensor, tolerance: float) -> int:
    """Count the pairs of positions that look the same.

    Args:
        encoding: [N, d].
        tolerance: Distance up to which two positions look the same.

    Returns:
        The number of pairs.
    """
    return int(_looks_like_earlier(encoding, tolerance).sum())


def first_repeat(encoding: Tensor, tolerance: float) -> Repeat | None:
    """The first position that looks like an earlier one.

    Args:
        encoding: [N, d].
        tolerance: Distance up to which two positions look the same.

    Returns:
        It and the earlier one; None where all can be told apart.
    """
    found = _looks_like_earlier(encoding, tolerance).nonzero()
    return Repeat(*found[0].tolist()) if len(found) else None


def by_offset(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, smallest and largest value at each distance, of a matrix of positions by positions.

    Args:
        matrix: Symmetric, [N, N].

    Returns:
        Three tensors, for the distances 0, 1, ... N - 1, each [N].
    """
    diagonals = [matrix.diagonal(offset) for offset in range(len(matrix))]
    return tuple(
        torch.stack([measure(values) for values in diagonals])
        for measure in (torch.mean, torch.min, torch.max)
    )


def _looks_like_earlier(encoding: Tensor, tolerance: float) -> Tensor:
    """Mark the positions (rows) whose encoding equals an earlier one's (columns), [N, N]."""
    return (distances(encoding) <= tolerance).tril(diagonal=-1)


def offset_map(offset: int, d_model: int, base: float = PAPER_BASE) -> Tensor:
    """M_k, the matrix with PE(pos + k) = M_k PE(pos) at every position. Section 3.5.

    Each sin/cos pair is turned by its own angle w_i k: blocks [[cos, sin], [-sin, cos]] along the
    diagonal. M_-k is its transpose, and turns back.

    Args:
        offset: k, of either sign.
        d_model: Width, even.
        base: Base of the wavelengths.

    Returns:
        Float64 [d_model, d_model].
    """
    angles = 2 * math.pi * offset / wavelengths(d_model, base)
    sin, cos = angles.sin(), angles.cos()
    blocks = torch.stack((torch.stack((cos, sin), -1), torch.stack((-sin, cos), -1)), dim=-2)
    return torch.block_diag(*blocks)


def dot_product_by_offset(
    offsets: Tensor | Sequence[int], d_model: int, base: float = PAPER_BASE
) -> Tensor:
    """PE(pos) . PE(pos + k) = sum_i cos(w_i k), whatever pos is.

    Args:
        offsets: k, of either sign, [K].
        d_model: Width, even.
        base: Base of the wavelengths.

    Returns:
        Float64 [K].
    """
    offsets = torch.as_tensor(offsets, dtype=torch.float64)
    return (2 * math.pi * offsets[:, None] / wavelengths(d_model, base)).cos().sum(dim=-1)


def reach(d_model: int, base: float = PAPER_BASE, farthest: int = 20000) -> int | None:
    """The distance at which two positions are no longer alike: where the dot product leaves > 0.

    Args:
        d_model: Width, even.
        base: Base of the wavelengths.
        farthest: Distance to look up to.

    Returns:
        The smallest such distance; None where there is none.
    """
    found = (dot_product_by_offset(range(farthest + 1), d_model, base) <= 0).nonzero()
    return found[0].item() if len(found) else None


def linear_map_residual(encoding: Tensor, offset: int) -> float:
    """Return the relative error of the best matrix from PE(pos) to PE(pos + k).

    It is fitted on every other position and judged on those between, which it has not seen.

    Args:
        encoding: [N, d].
        offset: k.

    Returns:
        Size of the error relative to that of PE(pos + k).
    """
    now, later = encoding[:-offset].double(), encoding[offset:].double()
    # the pairs of long wavelengths hardly differ: this driver bears columns that depend on others
    fitted = torch.linalg.lstsq(now[::2], later[::2], driver="gelsd").solution
    return ((now[1::2] @ fitted - later[1::2]).norm() / later[1::2].norm()).item()


def properties(
    name: str, num_positions: int, d_model: int, base: float = PAPER_BASE, seed: int = 0
) -> dict[str, Measured]:
    """Measure the desired properties of an encoding, by the rules of `PROPERTIES`.

    Args:
        name: One of `CANDIDATES`.
        num_positions: N, the longest sentence of the training; at least 64.
        d_model: Width, as `candidate_encoding` takes it.
        base: Base of the wavelengths of "sinusoidal".
        seed: Seed of "learned".

    Returns:
        What was found, by property, in the order of `PROPERTIES`.

    Raises:
        ValueError: As `candidate_encoding`, or if there are too few positions.
    """
    if num_positions < max(SENTENCE_LENGTHS):
        raise ValueError(
            f"num_positions must be at least {max(SENTENCE_LENGTHS)}, got {num_positions}."
        )

    def encode(length: int, seed: int = seed) -> Tensor | None:
        if name != "learned":
            return candidate_encoding(name, length, d_model, base)
        # a table is made once, for the longest sentence; a shorter one takes its first rows
        table = learned_encoding(num_positions, d_model, seed)
        return table[:length] if length <= num_positions else None

    encoding = encode(num_positions)
    short, long = encode(num_positions // LENGTH_FACTOR), encode(num_positions * LENGTH_FACTOR)
    sizes = [short.abs().max().item(), encoding.abs().max().item()]
    apart = (encoding - encode(num_positions, seed + 1)).abs().max().item()
    nearest = smallest_distance(encoding) / usual_step(encoding)
    first_steps = [steps(encode(length))[0].item() for length in SENTENCE_LENGTHS]
    smallest_of_two = steps(encoding, 2).min().item()
    unevenness = steps(encoding).max().item() / smallest_of_two if smallest_of_two else math.inf
    residual = max(linear_map_residual(encoding, offset) for offset in OFFSETS)
    return {
        "bounded": Measured(
            sizes[1] / sizes[0],
            f"{sizes[0]:.3g} to {sizes[1]:.3g}",
            sizes[1] < MOST_GROWTH * sizes[0],
        ),
        "deterministic": Measured(apart, f"{apart:.3g}", apart == 0),
        "unique": Measured(nearest, f"{nearest:.3g}", nearest >= LEAST_DISTANCE),
        "same step": Measured(
            max(first_steps) / min(first_steps),
            ", ".join(f"{step:.3g}" for step in dict.fromkeys(first_steps)),
            max(first_steps) <= min(first_steps) * (1 + ROUNDING),
        ),
        "smooth": Measured(unevenness, f"{unevenness:.3g}", unevenness < 1),
        "extends": _extends(encoding, long),
        "linear offset": Measured(residual, f"{residual:.3g}", residual < MOST_RESIDUAL),
    }


def _extends(encoding: Tensor, long: Tensor | None) -> Measured:
    if long is None:
        return Measured(None, f"none past {len(encoding)}", False)
    moved = (long[: len(encoding)] - encoding).abs().max().item()
    if moved > ROUNDING:
        return Measured(moved, f"moves by {moved:.3g}", False)
    growth = (long.abs().max() / encoding.abs().max()).item()
    return Measured(growth, f"{growth:.3g} times as large", growth <= 1 + MOST_RESIDUAL)


def share_of_new_values(encoding: Tensor, trained_length: int, margin: float = 0.0) -> float:
    """Return the share of features that leave their range of the training positions.

    Args:
        encoding: [N, d], with N beyond `trained_length`.
        trained_length: Positions that were trained.
        margin: How far out of its range a value may be and still be near.

    Returns:
        Share of the d features that leave their own range by more than that.
    """
    seen, new = encoding[:trained_length], encoding[trained_length:]
    lowest, highest = seen.min(dim=0).values, seen.max(dim=0).values
    is_new = ((new < lowest - margin) | (new > highest + margin)).any(dim=0)
    return is_new.double().mean().item()


def num_directions_for(vectors: Tensor, share: float) -> int:
    """Count the strongest directions that hold a share of the vectors' energy.

    Args:
        vectors: [N, d].
        share: Share of the sum of squares.

    Returns:
        The number of directions, the strongest first.
    """
    energy = torch.linalg.svdvals(vectors.double()).square()
    return int((energy.cumsum(0) < share * energy.sum()).sum()) + 1


def overlap(words: Tensor, positions: Tensor, num_directions: int) -> Overlap:
    """Measure how much the directions of words and positions overlap.

    Args:
        words: Scaled embeddings, [V, d_model].
        positions: Their encoding, [N, d_model].
        num_directions: k, how many of either's strongest directions to compare.

    Returns:
        Shares of energy, and angles.

    Raises:
        ValueError: If there are not that many directions.
    """
    most = min(len(words), *positions.shape)
    if not 1 <= num_directions <= most:
        raise ValueError(f"num_directions must be between 1 and {most}, got {num_directions}.")
    words, positions = words.double(), positions.double()
    of_words, of_positions = (
        torch.linalg.svd(vectors, full_matrices=False).Vh[:num_directions]
        for vectors in (words, positions)
    )  # [k, d_model]
    angles = torch.linalg.svdvals(of_words @ of_positions.T).clamp(max=1).acos().rad2deg()
    cosines = F.normalize(words, dim=-1) @ F.normalize(positions, dim=-1).T  # [V, N]
    heard, noise = (
        (vectors @ of_positions.T).square().sum(dim=-1).mean() for vectors in (positions, words)
    )
    return Overlap(
        num_directions=num_directions,
        word_energy=_energy_along(words, of_positions),
        position_energy=_energy_along(positions, of_words),
        smallest_angle=angles.min().item(),
        mean_angle=angles.mean().item(),
        mean_cosine=cosines.abs().mean().item(),
        position_to_word=(heard / noise).item(),
    )


def concatenation_cost(
    extra_width: int, row: str = "base", source_length: int = 32, target_length: int = 32
) -> Cost:
    """Count the cost of the layers of a Table 3 row if positions are concatenated.

    Words keep d_model features and `extra_width` come beside them, through all layers; heads, d_k,
    d_v and d_ff stay. Embedding and output projection, which keep their size, are not counted.

    Args:
        extra_width: Features of the position; 0 where it is added to the words.
        row: Name of a row of Table 3.
        source_length: Tokens.
        target_length: Tokens.

    Returns:
        Parameters, and FLOPs of a forward pass over one pair (a multiplication and an addition are
        two), as torch counts them.
    """
    from torch.utils.flop_counter import FlopCounterMode

    paper = VanillaTransformerConfig.from_paper(row)
    sizes = {
        "hidden_size": paper.d_model + extra_width,
        "d_k": paper.head_dim,
        "d_v": paper.d_v or paper.d_model // paper.encoder_attention_heads,
    }
    config = VanillaTransformerConfig.from_paper(row, **sizes)
    with torch.device("meta"):
        model = VanillaTransformerModel(config).eval()
        source, target = (
            torch.zeros(1, length, dtype=torch.long) for length in (source_length, target_length)
        )
        with FlopCounterMode(display=False) as counter:
            model(input_ids=source, decoder_input_ids=target, use_cache=False)
    embedding = model.get_input_embeddings().weight.numel()
    return Cost(model.num_parameters() - embedding, counter.get_total_flops())


def _energy_along(vectors: Tensor, directions: Tensor) -> float:
    return ((vectors @ directions.T).square().sum() / vectors.square().sum()).item()
