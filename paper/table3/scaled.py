"""The rows of Table 3, scaled down to be trained in minutes."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from ... import VanillaTransformerConfig
from ...train.config import TrainConfig
from ...train.recipe import load_config
from ..study import Section
from .rows import SIZE_COLUMNS, size_cells


def scaled_sizes(row: str, scale: int, layers: int, dropout: float) -> dict[str, float]:
    """A row's change, made to a smaller base: every ratio to the base is the paper's.

    Args:
        row: Name of a row of Table 3.
        scale: What all widths are divided by; heads stay as many.
        layers: N of the smaller base.
        dropout: Dropout probability of the smaller base model.

    Returns:
        Fields of the configuration.

    Raises:
        ValueError: If a width or a number of layers would not be whole.
    """
    base, sizes = (VanillaTransformerConfig.from_paper(name) for name in ("base", row))
    heads = sizes.encoder_attention_heads
    widths = {
        "hidden_size": sizes.d_model,
        "encoder_ffn_dim": sizes.encoder_ffn_dim,
        "decoder_ffn_dim": sizes.decoder_ffn_dim,
        "d_k": sizes.d_k or sizes.d_model // heads,
        "d_v": sizes.d_v or sizes.d_model // heads,
    }
    for name, width in widths.items():
        if scale < 1 or width % scale:
            raise ValueError(f"scale must divide {name} of row {row}, {width}, got {scale}.")
    if layers < 1 or sizes.encoder_layers * layers % base.encoder_layers:
        raise ValueError(
            f"layers must give row {row} a whole number, {sizes.encoder_layers} / "
            f"{base.encoder_layers} of it, got {layers}."
        )
    depth = sizes.encoder_layers * layers // base.encoder_layers
    return {
        **{name: width // scale for name, width in widths.items()},
        "encoder_layers": depth,
        "decoder_layers": depth,
        "dropout": sizes.dropout / base.dropout * dropout,
    }


def scaled_configs(flags: argparse.Namespace) -> dict[str, TrainConfig]:
    """The runs of the scaled rows: what differs is what the row changes, and the folder.

    Args:
        flags: As `add_flags` declares them, and `output_dir`.

    Returns:
        Settings by row.

    Raises:
        ValueError: If a setting does not fit.
    """
    warmup_steps = flags.warmup_steps
    if warmup_steps is None:
        warmup_steps = max(1, flags.max_steps // 3)
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps must be at least 1, got {warmup_steps}.")
    factor = flags.learning_rate_factor
    if factor is None:
        # eq. (3) at its highest is (d_model * warmup_steps)^-0.5
        factor = math.sqrt(warmup_steps / TrainConfig.warmup_steps)
    shared = {
        name: getattr(flags, name)
        for name in ("dataset", "name", "source_lang", "target_lang", "max_length", "max_steps")
    }
    shared |= {
        "tokens_per_step": flags.tokens_per_step,
        "seed": flags.seed,
        "warmup_steps": warmup_steps,
        "learning_rate_factor": factor,
        "vocab_size": flags.learned_vocab_size,
        # a step is smaller than the paper's, and each group of it is computed on its own
        "length_groups_per_step": 4,
        # Table 3 has the last weights as they are
        "num_averaged_checkpoints": 1,
        "eval_every_steps": flags.max_steps,
        "save_every_steps": max(1, flags.max_steps // 10),
    }
    configs = {}
    for row in flags.rows:
        own = {
            "model": scaled_sizes(row, flags.scale, flags.layers, flags.dropout),
            "output_dir": str(Path(flags.output_dir) / "rows" / row),
        }
        configs[row] = load_config(f"paper-{row}", shared | own)
        configs[row].model_config(flags.learned_vocab_size)
    return configs


def built_section(configs: Mapping[str, TrainConfig], flags: argparse.Namespace) -> Section:
    rows = [
        [row, *size_cells(config.model_config(config.vocab_size), config.label_smoothing)]
        for row, config in configs.items()
    ]
    config = next(iter(configs.values()))
    return Section(
        name="built",
        title="The rows as they are trained here",
        says=f"All widths are the paper's divided by {flags.scale}, the base has {flags.layers} "
        f"layers a stack and dropout {flags.dropout}, the other rows theirs in the paper's ratio; "
        "heads and label smoothing are the paper's own. Each row is trained on "
        f"{' '.join(filter(None, (flags.dataset, flags.name)))}, {flags.source_lang} to "
        f"{flags.target_lang}, for {config.max_steps:,} steps of {config.tokens_per_step:,} "
        f"tokens, {config.warmup_steps:,} of them warm-up, {config.learning_rate_factor:.3g} "
        f"times the rate of section 5.3, with seed {config.seed} and one vocabulary of "
        f"{flags.learned_vocab_size:,} tokens. The paper trained big three times as long as the "
        "others; here all have the same steps.",
        columns=("row", *SIZE_COLUMNS),
        rows=rows,
    )
