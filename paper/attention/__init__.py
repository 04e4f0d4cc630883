"""Attention of the heads of a trained model. Sections 3.2 and 4, figures 3 to 5.

Shapes as in the model: N layers, h heads, S source tokens, T target tokens, Q queries, K keys.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...attention_maps import AttentionWeights, attention_weights
from ...records import read_text
from ..study import Section
from ..trained import add_model_flag, load_trained
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
    parser.add_argument("--sentence", default=SENTENCE, help="sentence to translate (%(default)s)")
    parser.add_argument(
        "--translation", help="translation of the sentence; by default that of the model"
    )
    parser.add_argument(
        "--layer",
        type=int,
        help="layer to show, counted from 1; by default the last one, or the best one for the "
        "alignment",
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
        help="translated test sentences on which heads are measured (%(default)s)",
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Show the attention of all heads, of one head, of one word, an alignment, and statistics.

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
    measured_on = "this sentence"
    maps = _test_maps(flags.model, model, tokenizer, flags.num_sentences)
    if maps:
        count = f"{len(maps)} sentences" if len(maps) > 1 else "one sentence"
        measured_on = f"{count} of the test split"
    maps = maps or [weights]
    for kind in KINDS:
        yield grid_section(weights, kind)
    yield steps_section(model, tokenizer, flags, weights)
    yield head_section(weights, flags.layer, flags.head)
    yield word_section(weights, flags.layer)
    yield alignment_section(weights, maps, flags.layer, measured_on)
    yield statistics_section(maps, measured_on)


def _check_layer_and_head(weights: AttentionWeights, layer: int | None, head: int | None):
    sizes = [getattr(weights, kind).shape[:2] for kind in KINDS]
    for name, number, last in (
        ("layer", layer, min(size[0] for size in sizes)),
        ("head", head, min(size[1] for size in sizes)),
    ):
        if number is not None and not 1 <= number <= last:
            raise ValueError(f"{name} must be from 1 to {last}, got {number}.")


def _test_maps(
    run: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_sentences: int
) -> list[AttentionWeights]:
    """Return the weights for the translations that `evaluate` saved; [] if it has saved none."""
    if num_sentences < 1:
        raise ValueError(f"num_sentences must be at least 1, got {num_sentences}.")
    files = [Path(run) / "hypotheses" / f"test.{side}.txt" for side in ("source", "translation")]
    if not all(file.is_file() for file in files):
        return []
    sides = [read_text(file).split("\n")[:-1] for file in files]
    pairs = [pair for pair in zip(*sides, strict=True) if all(map(str.strip, pair))]
    return [attention_weights(model, tokenizer, *pair) for pair in pairs[:num_sentences]]
