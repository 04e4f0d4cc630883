"""Search with an ensemble of models: each step averages their next-token probabilities.

Shapes: as in `search_vanilla_transformer`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .engine_checks_vanilla_transformer import engine_for
from .engine_vanilla_transformer import SearchEngine
from .search_vanilla_transformer import Decoding


class EnsembleEngine:
    """Inference engines of several models, with the interface of a single `SearchEngine`.

    Args:
        engines: Engines of models with the same vocabulary.
        widths: d_model of each model.
    """

    def __init__(self, engines: Sequence[SearchEngine], widths: Sequence[int]):
        self.engines, self.widths = engines, list(widths)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Encode a batch with each model.

        Args:
            input_ids: Source tokens, [B, S].
            attention_mask: 1 for a token, 0 for padding, [B, S]; all are tokens if None.

        Returns:
            Memories of all models, concatenated, [B, S, sum of d_model].
        """
        return torch.cat(
            [engine.encode(input_ids, attention_mask) for engine in self.engines], dim=-1
        )

    def begin(self, memory: Tensor, attention_mask: Tensor | None) -> "EnsembleDecoding":
        """Return the decoder for a batch, before its first step.

        Args:
            memory: Output of `encode`, [B, S, sum of d_model].
            attention_mask: 1 for a source token, 0 for padding, [B, S]; all are tokens if None.

        Returns:
            Decoder of all models.
        """
        parts = zip(self.engines, memory.split(self.widths, dim=-1), strict=True)
        return EnsembleDecoding([engine.begin(part, attention_mask) for engine, part in parts])


class EnsembleDecoding(Decoding):
    """Decoders of several models, which read the same hypotheses.

    Args:
        members: Decoder of each model, before its first step.
    """

    def __init__(self, members: Sequence[Decoding]):
        self.members = members
        self.num_tokens = members[0].num_tokens
        self.min_finished_share = max(member.min_finished_share for member in members)

    def step(self, ids: Tensor) -> Tensor:
        """Read the tokens that were added since the last call, and score the next token.

        Args:
            ids: All tokens of each hypothesis, [B, R, T].

        Returns:
            Logarithm of the mean probability, [B, R or 1, V].
        """
        return mean_log_probs([member.step(ids).log_softmax(dim=-1) for member in self.members])

    def reorder(self, parents: Tensor, kept_sentences: Tensor | None = None):
        """Reorder the hypotheses after a step, and remove finished sentences.

        Args:
            parents: Index of the hypothesis that each new hypothesis continues, within its
                sentence, [B', R'].
            kept_sentences: Indices of the sentences that stay in the batch, [B']; None if all do.
        """
        for member in self.members:
            member.reorder(parents, kept_sentences)


def mean_log_probs(log_probs: Sequence[Tensor]) -> Tensor:
    """Return the logarithm of the mean probability, from log-probabilities of one shape."""
    if len(log_probs) == 1:
        return log_probs[0]
    # several times as fast on a CPU as `logsumexp` of the stacked tensors
    return functools.reduce(torch.logaddexp, log_probs) - math.log(len(log_probs))


def ensemble_engine(
    model: PreTrainedModel,
    engine: SearchEngine,
    other_models: Sequence[Any],
    precision: str | None,
) -> EnsembleEngine:
    """Return the engine of an ensemble.

    Args:
        model: Model whose `generate` is called.
        engine: Engine of this model.
        other_models: The other models of the ensemble.
        precision: Precision of the linear layers, as in `engine_for`.

    Returns:
        Engine of all models.

    Raises:
        ValueError: If another model differs from the first in class, vocabulary size, end token,
            device or dtype, has fewer positions, or cannot run on the inference engine.
    """
    engines = [engine]
    for model_number, other_model in enumerate(other_models, start=2):
        name = f"model {model_number} of the ensemble"
        if type(other_model) is not type(model):
            raise ValueError(
                f"{name} must be a {type(model).__name__}, got a {type(other_model).__name__}."
            )
        for field, expected, other_value in (
            ("vocab_size", model.config.vocab_size, other_model.config.vocab_size),
            ("eos_token_id", model.config.eos_token_id, other_model.config.eos_token_id),
            ("device", model.device, other_model.device),
            ("dtype", model.dtype, other_model.dtype),
        ):
            if expected != other_value:
                raise ValueError(f"{name} must have the {field} {expected}, got {other_value}.")
        expected = _num_positions(model.config)
        num_positions = _num_positions(other_model.config)
        if num_positions < expected:
            raise ValueError(
                f"{name} must have at least {expected} positions, got {num_positions}."
            )
        other_engine, reason = engine_for(other_model, precision)
        if other_engine is None:
            raise ValueError(f"{name} cannot run on the inference engine: {reason}.")
        engines.append(other_engine)
    return EnsembleEngine(engines, [member.config.d_model for member in (model, *other_models)])


def _num_positions(config: Any) -> float:
    return config.max_position_embeddings if config.position_encoding == "learned" else math.inf
