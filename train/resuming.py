"""Changes of settings that a resumed run allows."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .config import TrainConfig

# settings on which the learned vocabulary depends
VOCABULARY_SETTINGS = (
    "dataset",
    "name",
    "revision",
    "columns",
    "weight",
    "mix",
    "validation_pairs",
    "streaming",
    "source_lang",
    "target_lang",
    "tokenizer",
    "vocab_size",
    "symbol_lang",
    "seed",
)
# settings that determine the last step; a resumed run may change them, and records the change
END_SETTINGS = ("max_steps", "max_minutes", "patience")
# settings of each step; a resumed run may change them, and records the change
STEP_SETTINGS = (
    "tokens_per_micro_batch",
    "warmup_steps",
    "learning_rate_factor",
    "cooldown_steps",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "label_smoothing",
    "max_grad_norm",
    "precision",
    "compile",
)


def refuse_other_run(config: TrainConfig, old_config: TrainConfig) -> None:
    """Refuse to resume a run with settings that would make it another run.

    The path of a corpus may change, because the hash of its text is compared later. The hash of a
    streamed corpus is unknown, so its path must stay the same.

    Args:
        config: New settings.
        old_config: Settings of the run so far.

    Raises:
        ValueError: If a setting of data, batches or model differs; names the settings.
    """
    names = [
        field.name for field in dataclasses.fields(TrainConfig) if field.metadata["fixed_on_resume"]
    ]
    if not config.streaming and len(config.mix) == len(old_config.mix):
        mix_with_new_paths = [
            {**old_corpus, "dataset": new_corpus["dataset"]}
            for new_corpus, old_corpus in zip(config.mix, old_config.mix, strict=True)
        ]
        old_config = dataclasses.replace(old_config, dataset=config.dataset, mix=mix_with_new_paths)
    # the path of a tokenizer may change too: its content is compared later
    if None not in (config.tokenizer, old_config.tokenizer):
        names.remove("tokenizer")
    # the path of a model class may change too, but not the name of its file and class. The file in
    # `old_config` is never loaded, because that would run code that only the run folder names
    if Path(config.model_class or "").name == Path(old_config.model_class or "").name:
        old_config = dataclasses.replace(old_config, model_class=config.model_class)
        # whole configurations are compared, because a field that is set to its default value does
        # not change the model
        model_configs = [
            each.model_config(old_config.vocab_size).to_dict() for each in (config, old_config)
        ]
        if model_configs[0] == model_configs[1]:
            names = [name for name in names if name not in ("paper_row", "model")]
    differences = _describe_differences(config, old_config, names)
    if differences:
        raise ValueError(f"a run must be resumed with its own settings: {differences}.")


def describe_changes(config: TrainConfig, old_config: TrainConfig) -> str:
    """Describe the changes of `END_SETTINGS` and `STEP_SETTINGS` in a resumed run.

    Args:
        config: New settings.
        old_config: Settings of the run so far.

    Returns:
        Changed settings with both values; an empty text if there are none.
    """
    return "; ".join(
        f"{name} {new!r} (was {old!r})"
        for name, old, new in _changed_settings(config, old_config, (*END_SETTINGS, *STEP_SETTINGS))
    )


def refuse_late_cooldown(config: TrainConfig, old_config: TrainConfig, steps_done: int) -> None:
    """Refuse a new cooldown that is longer than the remaining steps.

    Args:
        config: New settings.
        old_config: Settings of the run so far.
        steps_done: Number of steps done.

    Raises:
        ValueError: If a changed cooldown is longer than the remaining steps, so that the learning
            rate would jump; names the longest cooldown.
    """
    if not _describe_differences(config, old_config, ("max_steps", "cooldown_steps")):
        return
    steps_left = config.max_steps - steps_done
    if config.cooldown_steps > steps_left:
        raise ValueError(
            f"cooldown_steps must be at most {steps_left}, the number of remaining steps, because "
            f"the learning rate would jump, got {config.cooldown_steps}."
        )


def refuse_other_vocabulary(config: TrainConfig, old_config: TrainConfig) -> None:
    """Refuse a vocabulary that was learned with other settings.

    Args:
        config: New settings.
        old_config: Settings that the vocabulary was learned with.

    Raises:
        ValueError: If the settings of the vocabulary differ; names them.
    """
    differences = _describe_differences(config, old_config, VOCABULARY_SETTINGS)
    if differences:
        raise ValueError(
            f"output_dir must be new, or have a vocabulary that was learned with the same "
            f"settings: {differences}."
        )


def _describe_differences(
    config: TrainConfig, old_config: TrainConfig, names: Iterable[str]
) -> str:
    return "; ".join(
        f"{name} was {old!r}, got {new!r}"
        for name, old, new in _changed_settings(config, old_config, names)
    )


def _changed_settings(
    config: TrainConfig, old_config: TrainConfig, names: Iterable[str]
) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        old_value, new_value = getattr(old_config, name), getattr(config, name)
        if old_value != new_value:
            yield name, old_value, new_value
