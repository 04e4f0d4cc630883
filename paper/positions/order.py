"""Attention with and without positions: two orders of a sentence, a task of order, lengths."""

import math

import torch

from ... import VanillaTransformerConfig, sinusoidal_encoding
from ...modeling_vanilla_transformer import VanillaTransformerEncoder
from .. import order_task
from .. import positional_encoding as encodings
from ..order_task import COPYING, WHO_CHASES_WHOM, Training
from ..study import Section
from . import pictures

# how far out of its range a feature must be to be new
NEW_VALUE = 0.1
SENTENCES = ("A chases B", "B chases A")
TASK_ENCODINGS = ("sinusoidal", "learned", "none")
FULL_WHO = Training(d_model=64, layers=2, steps=1000, warmup_steps=200)
FULL_COPYING = Training(
    d_model=256, layers=2, num_heads=8, steps=5000, sentences_per_step=128, warmup_steps=1000
)


def two_orders(seed: int) -> Section:
    """The same words in two orders, through an encoder with and without positions.

    Args:
        seed: Seed of its weights.

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
        name: [(plain - moved)[place].abs().max().item() for place in range(len(words))]
        for name, (plain, moved) in found.items()
    }
    without, with_positions = (max(differences[name]) for name in ("none", "sinusoidal"))
    return Section(
        name="two-orders",
        title="Attention without positions sees a bag of words",
        says=f'A random encoder of ours reads "{SENTENCES[0]}" and "{SENTENCES[1]}". Without '
        f"positions each word has the same vector in both: the largest difference is "
        f"{without:.0e}, which is rounding. Whoever is chased cannot be told from whoever chases, "
        "with any weights: self-attention sums over words, and a sum has no order. With "
        f"sinusoids the vectors differ by up to {with_positions:.2f}.",
        columns=("positions", *(f"difference of {word}" for word in words)),
        rows=[[name, *values] for name, values in differences.items()],
        figure=pictures.draw_two_orders(found, words, SENTENCES),
    )


def order_accuracies(seed: int, full: bool = False) -> Section:
    """A task of order, learned with and without positions.

    Args:
        seed: The first of the seeds.
        full: Train a larger model for longer.

    Returns:
        The section.
    """
    sizes, num_seeds = (FULL_WHO, 5) if full else (WHO_CHASES_WHOM, 3)
    seeds = range(seed, seed + num_seeds)
    found = {
        name: [order_task.who_chases_whom(name, one, sizes) for one in seeds]
        for name in TASK_ENCODINGS
    }
    means = {name: sum(shares) / len(shares) for name, shares in found.items()}
    return Section(
        name="order-task",
        title="A task of order, with and without positions",
        says=f'A small model ({sizes.steps} steps) learns to turn "A chases B" into "B flees A", '
        "and is asked for pairs of names that it has never seen together. With sinusoids it gets "
        f"{means['sinusoidal']:.0%} of them right, with learned positions {means['learned']:.0%}. "
        f"Without positions {means['none']:.0%}: it knows who is in the sentence, and tosses a "
        "coin for who chases whom.",
        columns=("positions", *(f"seed {one}" for one in seeds), "mean"),
        rows=[[name, *shares, means[name]] for name, shares in found.items()],
        figure=pictures.draw_accuracies(found, 0.5),
    )


def length_extrapolation(seed: int, full: bool = False) -> Section:
    """Learned against sinusoidal, within the length of the training and past it.

    Args:
        seed: The first of the seeds.
        full: Train a larger model for longer, on longer rows.

    Returns:
        The section.
    """
    sizes, num_seeds, trained = (FULL_COPYING, 3, 64) if full else (COPYING, 2, 12)
    length, num_symbols = 2 * trained, 16
    seeds = range(seed, seed + num_seeds)
    # of rows as long as any in training, and longer ones
    usual, longer = {}, {}
    for name in TASK_ENCODINGS:
        found = [
            order_task.copying_losses(name, one, sizes, trained, length, num_symbols)
            for one in seeds
        ]
        usual[name], longer[name] = map(torch.stack, zip(*found, strict=True))  # [seeds, T]
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
    table = sinusoidal_encoding(length, sizes.d_model)
    new = encodings.share_of_new_values(table, trained, NEW_VALUE)
    return Section(
        name="length",
        title="Learned against sinusoidal, and sentences longer than any in training",
        says=f"Small models learn to copy rows of up to {trained} symbols, and are then given rows "
        f"of {length}. In rows of {trained} both kinds do it, as row (E) of Table 3 finds: their "
        f"losses are {within['sinusoidal']:.2f} (sinusoids) and {within['learned']:.2f} "
        f"(learned), where {chance:.2f} is knowing nothing. Past position {trained} the learned "
        f"table has only rows that no training has touched, and the loss is {past['learned']:.1f}. "
        f"The sinusoids exist there, and the loss is {past['sinusoidal']:.1f}. The paper says only "
        f"that they may extrapolate: past position {trained}, {new:.0%} of their features take "
        f"values more than {NEW_VALUE} out of the range they had before it, and no training has "
        "shown what those mean.",
        columns=(
            "positions",
            f"loss in rows of {trained}",
            f"1 to {trained} in rows of {length}",
            f"at {trained + 1}",
            f"{trained + 1} to {length}",
        ),
        rows=rows,
        figure=pictures.draw_losses(longer, trained, chance),
        numbers={
            "losses": {
                kind: {name: curves.tolist() for name, curves in losses.items()}
                for kind, losses in (("usual", usual), ("longer", longer))
            }
        },
    )
