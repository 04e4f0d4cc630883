"""Validation during training: the loss, and BLEU and chrF of some translated pairs."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import PreTrainedModel

from ..changes_vanilla_transformer import evaluating
from ..identity_vanilla_transformer import difference_outside_layers
from ..pipeline_vanilla_transformer import TranslationPipeline
from .data.batches import IGNORED
from .data.corpus import texts_of
from .data.pairs import Pairs
from .devices.distribution import gather_weights
from .devices.fused_loss import block_bytes
from .model_class import make_model
from .run import Run
from .run_folder.checkpoint import load_weights
from .scoring import score_translations
from .step import REPLICATED, smoothed_loss_sum
from .translate import translate_shared


@torch.no_grad()
def validation_loss(
    accelerator: Accelerator, model: PreTrainedModel, batches: Iterable[dict[str, Tensor]]
) -> float:
    """Compute the loss without label smoothing and without dropout, over all processes.

    Args:
        accelerator: Accelerator of the run, which determines device and precision.
        model: Model, not wrapped; the mode of each module is restored afterwards.
        batches: Batches of this process.

    Returns:
        Mean loss per target token, in nats.
    """
    # the losses are summed in float32, because some devices do not support float64
    loss_sum = torch.zeros((), device=accelerator.device)
    num_tokens = torch.zeros((), dtype=torch.long, device=accelerator.device)
    # the model runs uncompiled, because compiling graphs without gradients would take longer than
    # these batches
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        for batch in batches:
            inputs = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            labels = inputs.pop("labels")
            with accelerator.autocast():
                loss_sum += _loss_sum(accelerator, model, inputs, labels)
            num_tokens += (labels != IGNORED).sum()
    loss_sum, num_tokens = accelerator.reduce((loss_sum, num_tokens), reduction="sum")
    return float(loss_sum) / int(num_tokens)


def _loss_sum(
    accelerator: Accelerator, model: PreTrainedModel, inputs: dict[str, Tensor], labels: Tensor
) -> Tensor:
    if (
        accelerator.distributed_type not in REPLICATED
        or difference_outside_layers(model) is not None
    ):
        # a sharded weight is whole only inside the forward of its module, and an edited model must
        # run its own forward
        return smoothed_loss_sum(model(**inputs, use_cache=False).logits, labels, 0.0)
    hidden_states = model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    # each logit is stored three times, in at most 4 bytes: as computed, in float32, and as a
    # log-probability
    block_rows = max(1, block_bytes(hidden_states.device.type) // (3 * 4 * model.config.vocab_size))
    blocks = zip(hidden_states.split(block_rows), labels.flatten().split(block_rows), strict=True)
    losses = (
        smoothed_loss_sum(model.lm_head(block)[None], block_labels, 0.0)
        for block, block_labels in blocks
    )
    return sum(losses, start=torch.zeros((), device=hidden_states.device))


def score_sample(run: Run, validation: Pairs, num_pairs: int) -> dict[str, float]:
    """Translate validation pairs with the weights of this step. All processes must call this.

    The pairs are evenly spaced among the validation pairs that the filter of training keeps, so
    that every evaluation translates the same pairs.

    Args:
        run: Run that is evaluated.
        validation: Validation pairs.
        num_pairs: Number of pairs to translate.

    Returns:
        `bleu` and `chrf` of greedy translations.
    """
    texts: Any = run.data.texts
    kept = validation.kept_indices()
    number = min(len(kept), num_pairs)
    rows = texts.validation.select(kept[np.arange(number) * len(kept) // number])
    sources, references = texts_of(
        rows.with_format("arrow")[:], texts.languages, "validation", repair=True
    )
    model = _whole_model(run)
    # the model runs uncompiled, because compiling graphs without gradients would take longer than
    # these batches
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        pipeline = TranslationPipeline(model, run.data.tokenizer, device=run.accelerator.device)
        translations = translate_shared(PartialState(), pipeline, sources, num_beams=1)
    scores = score_translations(translations, references, run.config.bleu_tokenizer)
    return {name: scores[name] for name in ("bleu", "chrf")}


def _whole_model(run: Run) -> PreTrainedModel:
    """Return the model, or a copy with all weights if this process has only a part of each."""
    if run.accelerator.distributed_type != DistributedType.FSDP:
        return run.model
    weights = gather_weights(run.model)
    model = make_model(run.config, run.model.config)
    load_weights(model, weights)
    return model.to(run.accelerator.device)
