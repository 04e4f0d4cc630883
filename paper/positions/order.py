"""Attention with and without positions: two word orders, a word-order task, longer sentences."""

import math

import torch

from ... import VanillaTransformerConfig, sinusoidal_encoding
from ...modeling_vanilla_transformer import VanillaTransformerEncoder
from .. import order_task
from .. import positional_encoding as encodings
from ..order_task import COPYING, WHO_CHASES_WHOM, ToyTraining
from ..study import Section
from . import pictures

# a value of a feature counts as new if its distance from the trained range is above this
NEW_VALUE = 0.1
SENTENCES = ("A chases B", "B chases A")
TASK_ENCODINGS = ("sinusoidal", "learned", "none")
FULL_WHO = ToyTraining(d_model=64, layers=2, steps=1000, warmup_steps=200)
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
        name: (plain - moved).abs().amax(dim=-1).tolist() for name, (plain, moved) in found.items()
    }
    without, with_positions = (max(differences[name]) for name in ("none", "sinusoidal"))
    return Section(
        name="two-orders",
        title="Attention without positions ignores word order",
        finding=f'An encoder with random weights reads "{SENTENCES[0]}" and "{SENTENCES[1]}". '
        "Without positions each word has the same vector in both sentences, up to rounding: the "
        f"largest difference is {without:.0e}. So no weights can tell who chases whom: "
        "self-attention sums over words, and a sum has no order. With sinusoids the vectors differ "
        f"by up to {with_positions:.2f}.",
        columns=("positions", *(f"difference of {word}" for word in words)),
        rows=[[name, *values] for name, values in differences.items()],
        figure=pictures.draw_two_orders(found, words, SENTENCES),
    )


def order_accuracies(seed: int, full: bool = False) -> Section:
    """Train small models on a word-order task, with and without positions.

    Args:
        seed: First seed.
        full: Whether to train a larger model for more steps, with more seeds.

    Returns:
        The section.
    """
    training, num_seeds = (FULL_WHO, 5) if full else (WHO_CHASES_WHOM, 3)
    seeds = range(seed, seed + num_seeds)
    found = {
        name: [order_task.who_chases_whom(name, one, training).accuracy for one in seeds]
        for name in TASK_ENCODINGS
    }
    means = {name: sum(shares) / len(shares) for name, shares in found.items()}
    return Section(
        name="order-task",
        title="A task of order, with and without positions",
        finding=f'A small model is trained for {training.steps} steps to turn "A chases B" into '
        '"B flees A", and tested on pairs of names that it has not seen together. Its accuracy is '
        f"{means['sinusoidal']:.0%} with sinusoids, {means['learned']:.0%} with learned positions "
        f"and {means['none']:.0%} without positions. Without positions the model can know both "
        "names, but not their order; a random order is correct in half of the cases.",
        columns=("positions", *(f"seed {one}" for one in seeds), "mean"),
        rows=[[name, *shares, means[name]] for name, shares in found.items()],
        figure=pictures.draw_accuracies(found, 0.5),
    )


def length_extrapolation(seed: int, full: bool = False) -> Section:
    """Compare learned positions with sinusoids, within the trained length and beyond it.

    Args:
        seed: First seed.
        full: Whether to train a larger model for more steps on longer sequences, with more seeds.

    Returns:
        The section.
    """
    training, num_seeds, trained = (FULL_COPYING, 3, 64) if full else (COPYING, 2, 12)
    length, num_symbols = 2 * trained, 16
    # losses on sequences of the longest trained length, and on longer sequences
    usual, longer = {}, {}
    for name in TASK_ENCODINGS:
        found = (
            order_task.copying_losses(name, one, training, trained, length, num_symbols)
            for one in range(seed, seed + num_seeds)
        )
        usual[name], longer[name] = map(torch.stack, zip(*found, strict=True))  # [seeds, T]
    losses = {
        kind: {name: curves.tolist() for name, curves in by_name.items()}
        for kind, by_name in (("usual", usual), ("longer", longer))
    }
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
    table = sinusoidal_encoding(length, training.d_model)
    new = encodings.share_of_new_values(table, trained, NEW_VALUE)
    return Section(
        name="length",
        title="Learned positions, sinusoids, and sentences longer than in training",
        finding=f"Small models learn to copy sequences of up to {trained} symbols, and are tested "
        f"on sequences of {length}. Up to the trained length both kinds work, as in row (E) of "
        f"Table 3: the losses are {within['sinusoidal']:.2f} (sinusoids) and "
        f"{within['learned']:.2f} (learned); a random guess has {chance:.2f}. The learned rows "
        f"after position {trained} were never trained, and the loss there is "
        f"{past['learned']:.1f}. Sinusoids exist at all positions, and their loss there is "
        f"{past['sinusoidal']:.1f}. The paper says only that they may extrapolate. After position "
        f"{trained}, {new:.0%} of their features leave the trained range by more than {NEW_VALUE}, "
        "and the model was not trained on such values.",
        columns=(
            "positions",
            f"loss, sequences of {trained}",
            f"positions 1 to {trained} of {length}",
            f"position {trained + 1}",
            f"positions {trained + 1} to {length}",
        ),
        rows=rows,
        figure=pictures.draw_losses(longer, trained, chance),
        numbers={"losses": losses},
    )
