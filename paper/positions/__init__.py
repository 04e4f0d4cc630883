"""Positional encoding, its properties, and attention without positions. Section 3.5."""

import argparse
import math
from collections.abc import Iterator

from ... import sinusoidal_encoding
from ..positional_encoding import PAPER_BASE, model_encoding
from ..study import Section
from ..trained import add_optional_model_flag, load_trained
from .combination import addition, concatenation, trained_addition
from .comparison import candidates, desired_properties, more_pairs, property_rules
from .offsets import direction, dot_products, offset_maps
from .order import length_extrapolation, order_accuracies, two_orders
from .sinusoids import bases, binary, reaches, table, waves, worked_example

# `direction` compares a position with the position before it and the position after it, so the
# minimum is three; the maximum limits the memory for matrices [N, N]
MIN_POSITIONS, MAX_POSITIONS = 3, 4096
# `desired_properties` encodes 16 * d_model positions, and the 16 bits of the binary candidate can
# encode at most 16 * 4096
MAX_WIDTH = 4096
# bases that are compared by default
BASES = (PAPER_BASE, 100.0, 1.0)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument(
        "--base",
        type=float,
        nargs="+",
        default=list(BASES),
        help="bases to compare; the other sections use the first one (default: "
        f"{' '.join(f'{base:g}' for base in BASES)})",
    )
    parser.add_argument(
        "--d_model", type=int, default=128, help="width d_model (default: %(default)s)"
    )
    parser.add_argument(
        "--num_positions", type=int, default=64, help="number of positions (default: %(default)s)"
    )
    add_optional_model_flag(parser)
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--no_train", action="store_true", help="skip the sections that train small models"
    )
    parser.add_argument(
        "--full", action="store_true", help="train larger models for longer, with more seeds"
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Show the encoding, its base, its properties, and attention with and without positions.

    Args:
        flags: Flags of `add_flags`.

    Yields:
        The sections; the sections that train a model come last.

    Raises:
        ValueError: If a size or a base is out of range, or the model cannot be loaded or has no
            positional encoding.
    """
    # check all flags before the first computation
    if not MIN_POSITIONS <= flags.num_positions <= MAX_POSITIONS:
        raise ValueError(
            f"num_positions must be between {MIN_POSITIONS} and {MAX_POSITIONS}, "
            f"got {flags.num_positions}."
        )
    if flags.d_model > MAX_WIDTH:
        raise ValueError(f"d_model must be at most {MAX_WIDTH}, got {flags.d_model}.")
    for base in flags.base:
        if not math.isfinite(base):
            raise ValueError(f"base must be finite, got {base}.")
        sinusoidal_encoding(1, flags.d_model, base)
    model = None if flags.model is None else load_trained(flags.model, flags.trust_remote_code)[0]
    if model is not None:
        model_encoding(model, 1)
    base = flags.base[0]
    yield table(flags.num_positions, flags.d_model, base)
    yield worked_example(base)
    yield waves(flags.num_positions, flags.d_model, base)
    yield bases(flags.num_positions, flags.d_model, flags.base)
    yield reaches(flags.d_model, flags.base)
    yield candidates(flags.num_positions, flags.d_model, base, flags.seed)
    yield property_rules()
    yield desired_properties(flags.d_model, base, flags.seed)
    yield more_pairs(base)
    yield offset_maps(flags.num_positions, flags.d_model, base)
    yield dot_products(flags.num_positions, flags.d_model, base)
    yield direction(flags.num_positions, flags.d_model, base)
    yield binary(flags.d_model, base)
    yield addition(flags.num_positions, base, flags.seed)
    if model is not None:
        yield trained_addition(model, flags.num_positions, flags.seed)
    yield concatenation()
    yield two_orders(flags.seed)
    if not flags.no_train:
        yield order_accuracies(flags.seed, flags.full)
        yield length_extrapolation(flags.seed, flags.full)
