"""Checks of an export: no part of the model is lost, and the exported model has its logits."""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..identity_vanilla_transformer import computing_modules, first_difference
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

# allowed difference of logits or log-probabilities, in standard deviations of the logits, by the
# type in which the weights are stored
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "int8": 0.5}
# numbers of tokens of the sources and of the targets to compare
SOURCE_LENGTHS, TARGET_LENGTH = (9, 5, 2), 6


class Batch(NamedTuple):
    """Sentences to compare two models on.

    Args:
        source: Source tokens, [B, S].
        mask: 1 for a source token, 0 for padding, [B, S].
        target: Target tokens with the start token, [B, T].
        logits: Logits of the model, in float32, [B, T, V].
    """

    source: Tensor
    mask: Tensor
    target: Tensor
    logits: Tensor


@contextmanager
def finished_folder(folder: str | Path) -> Iterator[Path]:
    """Give an empty folder to write to; its files go to `folder` if nothing was raised.

    Args:
        folder: Folder of the export; made if it does not exist.

    Yields:
        The folder to write to.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f".{folder.name}."
        ) as unfinished:
            yield Path(unfinished)
            for path in sorted(Path(unfinished).iterdir()):
                path.replace(folder / path.name)
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def refuse_changed_model(model: nn.Module, engine: str):
    """Refuse a model that computes something else than the released code of its configuration.

    Args:
        model: A model to export.
        engine: Name of the other engine, for the error.

    Raises:
        ValueError: If a weight, buffer or submodule has no place in the other engine, or the code
            of a module is not the released one.
    """
    with torch.device("meta"):
        released = VanillaTransformerForConditionalGeneration(model.config)
    for kind, names in (
        ("weight", lambda it: dict(it.named_parameters(remove_duplicate=False))),
        ("buffer", lambda it: dict(it.named_buffers(remove_duplicate=False))),
        ("submodule", lambda it: dict(it.named_modules(remove_duplicate=False))),
    ):
        given, known = names(model), names(released)
        extra = [name for name in given if name not in known]
        missing = [name for name in known if name not in given]
        if extra or missing:
            what = f"the {kind} {extra[0]}" if extra else f"no {kind} {missing[0]}"
            raise ValueError(
                f"{engine} has a place only for the weights of a released model, got {what}"
                + (f" and {len(extra) - 1} more" if len(extra) > 1 else "")
                + "."
            )
    difference = first_difference(computing_modules(model))
    if difference is not None:
        raise ValueError(f"{engine} computes only what a released model does, and {difference}.")


@torch.no_grad()
def batch_to_compare(model: nn.Module, most_tokens: int | None = None) -> Batch:
    """Score random sentences with a model, in float32 on the CPU.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        most_tokens: Maximum number of tokens of a sentence, if there is one.

    Returns:
        The sentences and their logits.
    """
    if model.dtype != torch.float32 or model.device.type != "cpu":
        model = copy.deepcopy(model).float().cpu()
    config = model.config
    limits = [most_tokens] if most_tokens is not None else []
    limits += [config.max_position_embeddings] if config.position_encoding == "learned" else []
    longest = min([max(SOURCE_LENGTHS), *limits])
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(SOURCE_LENGTHS).clamp(max=longest)[:, None]
    source = torch.randint(config.vocab_size, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) < lengths).long()
    shape = len(lengths), min([TARGET_LENGTH, *limits])
    target = torch.randint(config.vocab_size, shape, generator=generator)
    target[:, 0] = config.decoder_start_token_id
    was_training = model.training
    logits = model.eval()(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    model.train(was_training)
    return Batch(source, mask, target, logits)


def refuse_difference(
    found: Tensor, expected: Tensor, logits: Tensor, engine: str, stored: str = "float32"
):
    """Refuse an export that computes something else than its model.

    Args:
        found: Logits or log-probabilities of the exported model.
        expected: The same of the model.
        logits: Logits of the model, whose standard deviation is the unit.
        engine: Name of the other engine, for the error.
        stored: Type in which the exported weights are stored.

    Raises:
        ValueError: If the largest difference is beyond the tolerance of the type.
    """
    difference = float((found - expected).abs().max() / logits.std())
    if not difference <= TOLERANCES[stored]:
        raise ValueError(
            f"the exported model must compute what the model computes, and its scores in {engine} "
            f"differ by up to {difference:.2g} standard deviations of the logits (allowed for "
            f"{stored} weights: {TOLERANCES[stored]:g}). Nothing was written."
        )
