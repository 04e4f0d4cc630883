"""Table 3: variations of the model, row by row. Section 6.2."""

import argparse
from collections.abc import Iterator

from ... import VanillaTransformerConfig
from ...train.config import TrainConfig
from ..study import Section
from .differences import differences_section
from .parameters import parameters_by_part, parameters_section
from .ranks import trained_section
from .rows import PAPER, paper_sizes, rows_section
from .scaled import built_section, scaled_configs


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument(
        "--vocab_size",
        type=int,
        default=TrainConfig.vocab_size,
        help="vocabulary size for the parameter counts of the paper's rows (default: %(default)s)",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        default=list(PAPER),
        help="rows of the table; all of them if not given",
    )
    _add_training_flags(parser)


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Build the rows, count their parameters, and train them if requested.

    Args:
        flags: Flags that `add_flags` declares.

    Yields:
        The rows; the parameter counts if the paper states any for these rows; two more sections if
        the rows are trained, and a third one if base and other rows are trained with several seeds.

    Raises:
        ValueError: If a row does not exist, or a setting is invalid.
        InterruptedError: If a signal stopped the training.
    """
    for row in flags.rows:
        # this call raises ValueError for an unknown row
        VanillaTransformerConfig.from_paper(row)
    # check the training settings too, before the first section is computed
    configs = scaled_configs(flags) if flags.train else {}
    counts = {row: parameters_by_part(paper_sizes(row, flags.vocab_size)) for row in flags.rows}
    yield rows_section(counts, flags.vocab_size)
    if any(PAPER[row].parameters for row in flags.rows):
        yield parameters_section(counts, flags.vocab_size)
    if flags.train:
        from .training import train_rows

        yield built_section(configs, flags)
        results = train_rows(configs, flags.output_dir)
        yield trained_section(results, flags)
        if flags.num_seeds > 1 and "base" in results and len(results) > 1:
            yield differences_section(results, flags)


def _add_training_flags(parser: argparse.ArgumentParser):
    group = parser.add_argument_group(
        "training",
        "Every row is scaled down by the same factors and trained with the same steps, tokens and "
        "seeds, under OUTPUT_DIR/rows. The same command resumes interrupted rows and skips "
        "finished rows. With the default flags a row takes about 4 minutes on one core, C5 and big "
        "twice as long, and all rows an hour and a half; --rows selects some rows.",
    )
    group.add_argument("--train", action="store_true", help="train the rows")
    group.add_argument(
        "--dataset", default="demo", help="dataset, as in `train` (default: %(default)s)"
    )
    group.add_argument("--name", help="configuration of the dataset")
    group.add_argument("--source_lang", default="en", help="source language (default: %(default)s)")
    group.add_argument("--target_lang", default="de", help="target language (default: %(default)s)")
    group.add_argument(
        "--scale",
        type=int,
        default=4,
        help="divisor of d_model, d_ff, d_k and d_v of each row (default: %(default)s)",
    )
    group.add_argument(
        "--layers",
        type=int,
        default=3,
        help="layers N of the scaled base; the other rows are scaled in proportion "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--dropout",
        type=float,
        default=0.1,
        help="dropout of the scaled base; the other rows are scaled in proportion "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--learned_vocab_size",
        type=int,
        default=2000,
        help="size of the vocabulary that all rows share (default: %(default)s)",
    )
    group.add_argument(
        "--max_length",
        type=int,
        default=128,
        help="longest sentence, in tokens (default: %(default)s)",
    )
    group.add_argument(
        "--max_steps",
        type=int,
        default=300,
        help="training steps of each row (default: %(default)s)",
    )
    group.add_argument(
        "--warmup_steps",
        type=int,
        help="warm-up steps of each row; a third of max_steps if not given",
    )
    group.add_argument(
        "--learning_rate_factor",
        type=float,
        help="factor of the learning rate of each row; if not given, the factor that gives the "
        "peak learning rate of the paper's warm-up",
    )
    group.add_argument(
        "--tokens_per_step",
        type=int,
        default=2000,
        help="tokens per step, on the source and on the target side (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=int, default=1, help="random seed of each row (default: %(default)s)"
    )
    group.add_argument(
        "--num_seeds",
        type=int,
        default=1,
        help="training runs of each row, with the seeds SEED, SEED + 1 and so on "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--settings",
        default="{}",
        metavar="YAML",
        help="other settings of `train` for all rows, such as '{precision: bf16, model: "
        "{initializer_gain: 0.5}}'",
    )
