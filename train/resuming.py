"""Settings that may change when a run is resumed, and those that may not."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .config import TrainConfig

_OF_THE_VOCABULARY = (
    "dataset",
    "name",
    "revision",
    "weight",
    "mix",
    "streaming",
    "source_lang",
    "target_lang",
    "tokenizer",
    "vocab_size",
    "symbol_lang",
    "seed",
)


_OF_THE_STEPS = (
    "tokens_per_micro_batch",
    "max_steps",
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


def refuse_other_run(config: TrainConfig, before: TrainConfig) -> None:
    """Refuse to resume a run with settings that would make it another run.

    The text itself is compared later, wherever it lies now; of a stream only its name is known.

    Args:
        config: The settings asked for.
        before: The settings the run began with.

    Raises:
        ValueError: If data, batches or model differ; says where.
    """
    names = [known.name for known in dataclasses.fields(TrainConfig) if known.metadata["data"]]
    if not config.streaming and len(config.mix) == len(before.mix):
        mix = [
            {**old, "dataset": new["dataset"]}
            for new, old in zip(config.mix, before.mix, strict=True)
        ]
        before = dataclasses.replace(before, dataset=config.dataset, mix=mix)
    # of a tokenizer that lies elsewhere the content is compared later as well
    if None not in (config.tokenizer, before.tokenizer):
        names.remove("tokenizer")
    # of a model class in a file that lies elsewhere too; another class is not loaded, which would
    # run the file that the recipe in the run folder names
    if Path(config.model_class or "").name == Path(before.model_class or "").name:
        before = dataclasses.replace(before, model_class=config.model_class)
        # a field that is given as what it is without is no other model
        resolved = [each.model_config(before.vocab_size).to_dict() for each in (config, before)]
        if resolved[0] == resolved[1]:
            names = [name for name in names if name not in ("paper_row", "model")]
    differences = _differences(config, before, names)
    if differences:
        raise ValueError(f"a run must be resumed with its own settings: {differences}.")


def changes_of_steps(config: TrainConfig, before: TrainConfig) -> str:
    """What a resumed run does otherwise than before.

    Args:
        config: The settings asked for.
        before: The settings the run had.

    Returns:
        The settings of a step that changed, with both values; nothing if none has.
    """
    return "; ".join(
        f"{name} {new!r}, before it {old!r}"
        for name, old, new in _changed(config, before, _OF_THE_STEPS)
    )


def refuse_late_cooldown(config: TrainConfig, before: TrainConfig, steps_done: int) -> None:
    """Refuse to resume a run so that its rate would have begun to fall before.

    Args:
        config: The settings asked for.
        before: The settings the run had.
        steps_done: Of the run.

    Raises:
        ValueError: If the rate would jump; says how long it can fall.
    """
    if not _differences(config, before, ("max_steps", "cooldown_steps")):
        return
    left = config.max_steps - steps_done
    if config.cooldown_steps > left:
        raise ValueError(
            f"cooldown_steps must be at most {left}, the steps that are left of max_steps, for the "
            f"rate not to jump, got {config.cooldown_steps}."
        )


def refuse_other_vocabulary(config: TrainConfig, before: TrainConfig) -> None:
    """Refuse to use a vocabulary that was learned with settings that make another.

    Args:
        config: The settings asked for.
        before: The settings it was learned with.

    Raises:
        ValueError: If they differ; says where.
    """
    differences = _differences(config, before, _OF_THE_VOCABULARY)
    if differences:
        raise ValueError(
            f"output_dir must be new, or its vocabulary have been learned with the same settings: "
            f"{differences}."
        )


def _differences(config: TrainConfig, before: TrainConfig, names: Iterable[str]) -> str:
    return "; ".join(
        f"{name} was {old!r}, got {new!r}" for name, old, new in _changed(config, before, names)
    )


def _changed(
    config: TrainConfig, before: TrainConfig, names: Iterable[str]
) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        old, new = getattr(before, name), getattr(config, name)
        if old != new:
            yield name, old, new


def by_field(model: dict[str, Any]) -> dict[str, Any]:
    """Fields of a model by one name each, or the recipe's would stand beside the one that wins."""
    return {VanillaTransformerConfig.attribute_map.get(name, name): model[name] for name in model}
