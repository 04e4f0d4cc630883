"""The model of a run: the mean of its last checkpoints. Section 6.1."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.generation_vanilla_transformer import set_paper_search
from vanilla_transformer.train.checkpoint import load_weights, read_weights, regular_checkpoints
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.corpus import checked_texts, load_translations
from vanilla_transformer.train.run_folder import (
    draw_attention,
    draw_loss_curve,
    load_tokenizer,
    read_recipe,
    save_tokenizer,
    write_model_card,
)

logger = logging.getLogger(__name__)


def average_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each weight over some checkpoints. Section 6.1.

    Args:
        folders: Of the checkpoints.

    Returns:
        Tensors by name, in float32.

    Raises:
        ValueError: If there is no checkpoint, or they are of different models.
    """
    if not folders:
        raise ValueError("an average must have at least one checkpoint, got none.")
    total: dict[str, Tensor] = {}
    for folder in folders:
        weights = {name: tensor.float() for name, tensor in read_weights(folder).items()}
        if not total:
            total = weights
            continue
        if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in total.items()}:
            raise ValueError(f"{folder} must have the same weights as {folders[0]} to be averaged.")
        for name, tensor in weights.items():
            total[name] += tensor
    return {name: tensor / len(folders) for name, tensor in total.items()}


def average_run(folder: Path, num_checkpoints: int | None = None) -> int:
    """Average the last checkpoints of a run into its folder, which then loads as a model. Sec. 6.1.

    Args:
        folder: The run folder.
        num_checkpoints: How many to average; as many as the recipe says if not given.

    Returns:
        How many were averaged.

    Raises:
        ValueError: If the folder is none of a run, or has no whole checkpoint.
        OSError: If the model cannot be written.
    """
    config = read_recipe(folder)
    found = regular_checkpoints(folder / "checkpoints")
    if not found:
        raise ValueError(f"{folder} must have a checkpoint to average, got none.")
    if num_checkpoints is not None and not 1 <= num_checkpoints <= len(found):
        raise ValueError(
            f"{folder} has {len(found)} checkpoints to average, got {num_checkpoints}."
        )
    averaged = found[-(num_checkpoints or config.num_averaged_checkpoints) :]
    tokenizer = load_tokenizer(config.tokenizer or str(folder / "tokenizer"))
    model = VanillaTransformerForConditionalGeneration.from_pretrained(
        averaged[-1], dtype=torch.float32
    ).eval()
    load_weights(model, average_weights(averaged))
    set_paper_search(model, config.num_beams, config.length_penalty_alpha, config.max_extra_tokens)
    _put_model(folder, model, tokenizer)
    names = ", ".join(path.name for path in averaged)
    logger.info("the mean of %s is in %s", names, folder)
    draw_loss_curve(folder)
    source = _a_sentence(config)
    if source is not None:
        draw_attention(folder, model, tokenizer, source)
    write_model_card(folder, config, model.num_parameters())
    return len(averaged)


def _put_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
    unfinished = folder / ".model.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        model.save_pretrained(unfinished, max_shard_size="1TB")
        save_tokenizer(tokenizer, unfinished)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(
            f"the model cannot be written to {folder}, its checkpoints are intact: "
            f"{' '.join(str(error).split())}"
        ) from error
    reloaded = VanillaTransformerForConditionalGeneration.from_pretrained(unfinished)
    for (name, tensor), other in zip(
        model.state_dict().items(), reloaded.state_dict().values(), strict=True
    ):
        if not torch.equal(tensor, other):
            raise OSError(f"{folder}: {name} is not on disk what it was in memory.")
    # the weights come last: without them the folder does not load
    for path in sorted(unfinished.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        path.replace(folder / path.name)
    unfinished.rmdir()


def _a_sentence(config: TrainConfig) -> str | None:
    texts = load_translations(config.dataset, config.name, config.source_lang, config.target_lang)
    rows = texts.get("validation", texts["train"])
    sides = checked_texts(rows[:200]["translation"], [config.source_lang], "validation")
    return next((text for text in sides[0] if 5 <= len(text.split()) <= 14), None)
