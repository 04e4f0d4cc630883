"""Attention of the heads of a trained model. Sections 3.2 and 4, figures 3 to 5.

Shapes as in the model: N layers, h heads, S source tokens, T target tokens, Q queries, K keys.
"""

import argparse
from collections.abc import Iterator

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...attention_maps import AttentionWeights, attention_weights
from ..study import Section
from ..trained import add_model_flag, load_trained, saved_translations
from .alignment import alignment_section
from .head_tasks import statistics_section
from .inside_head import steps_section
from .kinds import KINDS
from .one_sentence import grid_section, head_section, word_section

SENTENCE = "Anna hopes that the package from Berlin will arrive in 3 weeks."
NUM_SENTENCES = 100


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    add_model_flag(parser)
    parser.add_argument(
        "--sentence", default=SENTENCE, help="sentence to translate (default: %(default)s)"
    )
    parser.add_argument(
        "--translation", help="translation of the sentence; by default that of the model"
    )
    parser.add_argument(
        "--layer",
        type=int,
        help="layer to show, counted from 1; by default the last one; in the alignment section, "
        "the one that aligns best",
    )
    parser.add_argument(
        "--head",
        type=int,
        help="head to show, counted from 1; by default the one with the lowest entropy",
    )
    parser.add_argument(
        "--num_sentences",
        type=int,
        default=NUM_SENTENCES,
        help="translated test sentences on which heads are measured (default: %(default)s)",
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Show the attention in one sentence, and measure all heads.

    The sections show all heads of each of the three kinds of attention, the steps of equation (1),
    one head of each kind, one word, an alignment, and the statistics of all heads.

    Args:
        flags: Flags of `add_flags`.

    Yields:
        Eight sections.

    Raises:
        ValueError: If the model cannot be loaded, the layer or head does not exist, a sentence has
            no word or is too long, or `num_sentences` is below 1.
    """
    model, tokenizer = load_trained(flags.model, flags.trust_remote_code)
    weights = attention_weights(model, tokenizer, flags.sentence, flags.translation)
    _check_layer_and_head(weights, flags.layer, flags.head)
    measured_weights = _test_weights(flags.model, model, tokenizer, flags.num_sentences)
    if measured_weights:
        num_measured = len(measured_weights)
        sentence_count = f"{num_measured} sentences" if num_measured > 1 else "one sentence"
        measured_on = f"{sentence_count} of the test split"
    else:
        measured_weights, measured_on = [weights], "this sentence"
    for kind in KINDS:
        yield grid_section(weights, kind)
    yield steps_section(model, tokenizer, flags, weights)
    yield head_section(weights, flags.layer, flags.head)
    yield word_section(weights, flags.layer)
    yield alignment_section(weights, measured_weights, flags.layer, measured_on)
    yield statistics_section(measured_weights, measured_on)


def _check_layer_and_head(weights: AttentionWeights, layer: int | None, head: int | None):
    shapes = [getattr(weights, kind).shape for kind in KINDS]  # [N, h, Q, K] each
    for name, number, last in (
        ("layer", layer, min(num_layers for num_layers, _, _, _ in shapes)),
        ("head", head, min(num_heads for _, num_heads, _, _ in shapes)),
    ):
        if number is not None and not 1 <= number <= last:
            raise ValueError(f"{name} must be from 1 to {last}, got {number}.")


def _test_weights(
    run: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_sentences: int
) -> list[AttentionWeights]:
    """Return the weights for the translations that `evaluate` saved; [] if it has saved none."""
    if num_sentences < 1:
        raise ValueError(f"num_sentences must be at least 1, got {num_sentences}.")
    pairs = saved_translations(run)[:num_sentences]
    return [attention_weights(model, tokenizer, *pair) for pair in pairs]
