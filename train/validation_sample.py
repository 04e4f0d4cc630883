"""BLEU and chrF of some validation pairs, translated during training."""

from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import PreTrainedModel

from ..changes_vanilla_transformer import evaluating
from ..pipeline_vanilla_transformer import TranslationPipeline
from .data.corpus import texts_of
from .data.pairs import Pairs
from .devices.distribution import gather_weights
from .evaluate import translate_shared
from .model_class import make_model
from .run import Run
from .run_folder.checkpoint import load_weights
from .scoring import score_translations


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
    # not compiled, because compiling graphs without gradients takes longer than these batches
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
