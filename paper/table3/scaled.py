"""The rows of Table 3, scaled down so that a row trains in minutes."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import VanillaTransformerConfig
from ...configuration_vanilla_transformer import PAPER_ROWS
from ...train.config import TrainConfig, by_canonical_name
from ...train.recipe import load_config, parse_yaml_value
from ..study import Section
from .rows import SIZE_COLUMNS, size_cells

# settings that the rows set, beside those that have a flag
ROW_SETTINGS = ("label_smoothing", "paper_row", "tokenizer")


def scaled_sizes(row: str, scale: int, layers: int, dropout: float) -> dict[str, float]:
    """Scale a row of Table 3 down; the ratio of each size to that of base stays the paper's.

    Args:
        row: Name of a row of Table 3.
        scale: Divisor of all widths; the number of heads stays the same.
        layers: Number of layers N of the scaled base model.
        dropout: Dropout probability of the scaled base model.

    Returns:
        Fields of the model configuration, by name.

    Raises:
        ValueError: If a scaled width or the scaled number of layers would not be an integer.
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
            raise ValueError(f"scale must divide {name} = {width} of row {row}, got {scale}.")
    if layers < 1 or sizes.encoder_layers * layers % base.encoder_layers:
        raise ValueError(
            f"layers times {sizes.encoder_layers} / {base.encoder_layers} must be an integer "
            f"for row {row}, got layers {layers}."
        )
    depth = sizes.encoder_layers * layers // base.encoder_layers
    return {
        **{name: width // scale for name, width in widths.items()},
        "encoder_layers": depth,
        "decoder_layers": depth,
        "dropout": sizes.dropout / base.dropout * dropout,
    }


def scaled_configs(flags: argparse.Namespace) -> dict[str, list[TrainConfig]]:
    """Return the training settings of the scaled rows.

    Args:
        flags: Flags that `add_flags` declares, and `output_dir`.

    Returns:
        For each row, the settings of each seed. Rows differ only in the setting that a row changes,
        and in the folder.

    Raises:
        ValueError: If a setting is invalid.
    """
    warmup_steps = flags.warmup_steps
    if warmup_steps is None:
        warmup_steps = max(1, flags.max_steps // 3)
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps must be at least 1, got {warmup_steps}.")
    factor = flags.learning_rate_factor
    if factor is None:
        # the peak of eq. (3) is (d_model * warmup_steps)^-0.5; this factor gives the peak of the
        # paper's warm-up steps
        factor = math.sqrt(warmup_steps / TrainConfig.warmup_steps)
    shared_settings = {
        name: getattr(flags, name)
        for name in ("dataset", "name", "source_lang", "target_lang", "max_length", "max_steps")
    }
    shared_settings |= {
        "tokens_per_step": flags.tokens_per_step,
        "warmup_steps": warmup_steps,
        "learning_rate_factor": factor,
        "vocab_size": flags.learned_vocab_size,
        # fewer groups than by default: a step has fewer tokens than in the paper, and each length
        # group is computed separately
        "length_groups_per_step": 4,
        # results in Table 3 are of the last weights, without averaging of checkpoints
        "num_averaged_checkpoints": 1,
        "eval_every_steps": flags.max_steps,
        "save_every_steps": max(1, flags.max_steps // 10),
    }
    if flags.num_seeds < 1:
        raise ValueError(f"num_seeds must be at least 1, got {flags.num_seeds}.")
    given_settings = _given_settings(flags)
    configs: dict[str, list[TrainConfig]] = {}
    for row in flags.rows:
        sizes = scaled_sizes(row, flags.scale, flags.layers, flags.dropout)
        configs[row] = []
        for seed in range(flags.seed, flags.seed + flags.num_seeds):
            folder_name = row if seed == flags.seed else f"{row}-seed-{seed}"
            row_settings = {
                "model": {**given_settings.get("model", {}), **sizes},
                "seed": seed,
                "output_dir": str(Path(flags.output_dir) / "rows" / folder_name),
            }
            config = load_config(f"paper-{row}", shared_settings | given_settings | row_settings)
            config.model_config(flags.learned_vocab_size)
            configs[row].append(config)
    return configs


def _given_settings(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the flag `settings`, which must not be those of a row or of a flag."""
    settings = parse_yaml_value("settings", flags.settings)
    if not isinstance(settings, dict):
        raise ValueError(f"settings must be a mapping of names to values, got {flags.settings!r}.")
    # raises an error if a name is unknown or a value is invalid
    load_config("paper-base", settings)
    row_fields = {field for sizes in PAPER_ROWS.values() for field in sizes}
    for name in (*settings, *by_canonical_name(settings.get("model", {}))):
        if name in row_fields or name in ROW_SETTINGS or name in vars(flags):
            raise ValueError(f"settings must not have {name}, which the rows or other flags set.")
    return settings


def built_section(
    configs: Mapping[str, Sequence[TrainConfig]], flags: argparse.Namespace
) -> Section:
    """Show the sizes of the scaled rows.

    Args:
        configs: Training settings by row, from `scaled_configs`.
        flags: Flags that `add_flags` declares.

    Returns:
        Section with a table row for each scaled row.
    """
    rows = [
        [row, *size_cells(config.model_config(config.vocab_size), config.label_smoothing)]
        for row, (config, *_) in configs.items()
    ]
    config, *others = next(iter(configs.values()))
    seeds_text = f"seeds {config.seed} to {others[-1].seed}" if others else f"seed {config.seed}"
    given_text = "" if flags.settings == "{}" else f" Other settings: `{flags.settings}`."
    return Section(
        name="built",
        title="The scaled rows of this training",
        finding=f"All widths are the paper's divided by {flags.scale}. Base has {flags.layers} "
        f"layers per stack and dropout {flags.dropout}; the other rows keep the paper's ratios. "
        "The number of heads and label smoothing are the paper's. Each row is trained on "
        f"{' '.join(filter(None, (flags.dataset, flags.name)))}, {flags.source_lang} to "
        f"{flags.target_lang}, for {config.max_steps:,} steps of {config.tokens_per_step:,} "
        f"tokens, with {config.warmup_steps:,} warm-up steps, {config.learning_rate_factor:.3g} "
        f"times the learning rate of section 5.3, {seeds_text} and a shared vocabulary of "
        f"{flags.learned_vocab_size:,} tokens.{given_text} The paper trained big for three times "
        "as many steps as the other rows; here all rows have the same number of steps.",
        columns=("row", *SIZE_COLUMNS),
        rows=rows,
    )
