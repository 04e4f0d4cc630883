"""Attention with and without positions: two word orders, a word-order task, longer sentences."""

import math
from statistics import fmean

import torch

from ... import VanillaTransformerConfig, sinusoidal_encoding
from ...modeling_vanilla_transformer import VanillaTransformerEncoder
from .. import order_task
from .. import positional_encoding as encodings
from ..order_task import COPYING, WHO_CHASES_WHOM, ToyTraining
from ..study import Section
from . import pictures

# a value of a feature counts as new if its distance from the trained range is above this
NEW_VALUE_MARGIN = 0.1
SENTENCES = ("A chases B", "B chases A")
TASK_ENCODINGS = ("sinusoidal", "learned", "none")
FULL_WHO_CHASES_WHOM = ToyTraining(d_model=64, layers=2, steps=1000, warmup_steps=200)
FULL_COPYING = ToyTraining(
    d_model=256, layers=2, num_heads=8, steps=5000, sentences_per_step=128, warmup_steps=1000
)


def two_orders(seed: int) -> Section:
    """Encode the same words in two orders, with and without positions.

    Args:
        seed: Seed of the weights of the encoder.

    Returns:
        The section.
    """
    words = SENTENCES[0].split()
    order = [words.index(word) for word in SENTENCES[1].split()]
    token_ids = [3, 4, 5]
    word_vectors = {}
    for name in ("none", "sinusoidal"):
        config = VanillaTransformerConfig(
            vocab_size=6, d_model=64, encoder_layers=2, position_encoding=name
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder = VanillaTransformerEncoder(config).eval()
        word_vectors[name] = order_task.encode_in_two_orders(encoder, token_ids, order)
    differences = {
        name: (first - second).abs().amax(dim=-1).tolist()
        for name, (first, second) in word_vectors.items()
    }
    without_positions, with_positions = (max(differences[name]) for name in ("none", "sinusoidal"))
    return Section(
        name="two-orders",
        title="Attention without positions ignores word order",
        finding=f'An encoder with random weights reads "{SENTENCES[0]}" and "{SENTENCES[1]}". '
        "Without positions each word has the same vector in both sentences, up to rounding: the "
        f"largest difference is {without_positions:.0e}. So no weights can tell who chases whom: "
        "self-attention sums over words, and a sum has no order. With sinusoids the vectors differ "
        f"by up to {with_positions:.2f}.",
        columns=("positions", *(f"difference of {word}" for word in words)),
        rows=[[name, *values] for name, values in differences.items()],
        figure=pictures.draw_two_orders(word_vectors, words, SENTENCES),
    )


def order_accuracies(seed: int, full: bool = False) -> Section:
    """Train small models on a word-order task, with and without positions.

    Args:
        seed: First seed.
        full: Whether to train a larger model for more steps, with more seeds.

    Returns:
        The section.
    """
    training, num_seeds = (FULL_WHO_CHASES_WHOM, 5) if full else (WHO_CHASES_WHOM, 3)
    seeds = range(seed, seed + num_seeds)
    accuracies = {
        name: [order_task.who_chases_whom(name, run_seed, training).accuracy for run_seed in seeds]
        for name in TASK_ENCODINGS
    }
    means = {name: fmean(seed_accuracies) for name, seed_accuracies in accuracies.items()}
    return Section(
        name="order-task",
        title="A task of order, with and without positions",
        finding=f'A small model is trained for {training.steps} steps to turn "A chases B" into '
        '"B flees A", and tested on pairs of names that it has not seen together. Its accuracy is '
        f"{means['sinusoidal']:.0%} with sinusoids, {means['learned']:.0%} with learned positions "
        f"and {means['none']:.0%} without positions. Without positions the model can know both "
        "names, but not their order; a random order is correct in half of the cases.",
        columns=("positions", *(f"seed {run_seed}" for run_seed in seeds), "mean"),
        rows=[
            [name, *seed_accuracies, means[name]] for name, seed_accuracies in accuracies.items()
        ],
        figure=pictures.draw_accuracies(accuracies, 0.5),
    )


def length_extrapolation(seed: int, full: bool = False) -> Section:
    """Compare learned positions with sinusoids, within the trained length and beyond it.

    Args:
        seed: First seed.
        full: Whether to train a larger model for more steps on longer sequences, with more seeds.

    Returns:
        The section.
    """
    training, num_seeds, trained_length = (FULL_COPYING, 3, 64) if full else (COPYING, 2, 12)
    tested_length, num_symbols = 2 * trained_length, 16
    # losses on sequences of the longest trained length, and on longer sequences
    trained_length_losses, longer_losses = {}, {}
    for name in TASK_ENCODINGS:
        runs = (
            order_task.copying_losses(
                name, run_seed, training, trained_length, tested_length, num_symbols
            )
            for run_seed in range(seed, seed + num_seeds)
        )
        trained_length_losses[name], longer_losses[name] = map(
            torch.stack, zip(*runs, strict=True)
        )  # [seeds, T]
    losses = {
        kind: {name: curves.tolist() for name, curves in by_name.items()}
        for kind, by_name in (("usual", trained_length_losses), ("longer", longer_losses))
    }
    chance = math.log(num_symbols)
    losses_within = {name: curves.mean().item() for name, curves in trained_length_losses.items()}
    losses_beyond = {
        name: curves[:, trained_length:].mean().item() for name, curves in longer_losses.items()
    }
    rows = [
        [
            name,
            losses_within[name],
            curves[:, :trained_length].mean().item(),
            curves[:, trained_length].mean().item(),
            losses_beyond[name],
        ]
        for name, curves in longer_losses.items()
    ]
    table = sinusoidal_encoding(tested_length, training.d_model)
    new_value_share = encodings.share_of_new_values(table, trained_length, NEW_VALUE_MARGIN)
    return Section(
        name="length",
        title="Learned positions, sinusoids, and sentences longer than in training",
        finding=f"Small models learn to copy sequences of up to {trained_length} symbols, and are "
        f"tested on sequences of {tested_length}. Up to the trained length both kinds work, as in "
        f"row (E) of Table 3: the losses are {losses_within['sinusoidal']:.2f} (sinusoids) and "
        f"{losses_within['learned']:.2f} (learned); a random guess has {chance:.2f}. The learned "
        f"rows after position {trained_length} were never trained, and the loss there is "
        f"{losses_beyond['learned']:.1f}. Sinusoids exist at all positions, and their loss there "
        f"is {losses_beyond['sinusoidal']:.1f}. The paper says only that they may extrapolate. "
        f"After position {trained_length}, {new_value_share:.0%} of their features leave the "
        f"trained range by more than {NEW_VALUE_MARGIN}, and the model was not trained on such "
        "values.",
        columns=(
            "positions",
            f"loss, sequences of {trained_length}",
            f"positions 1 to {trained_length} of {tested_length}",
            f"position {trained_length + 1}",
            f"positions {trained_length + 1} to {tested_length}",
        ),
        rows=rows,
        figure=pictures.draw_losses(longer_losses, trained_length, chance),
        numbers={"losses": losses},
    )
