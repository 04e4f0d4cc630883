"""Beam search of section 6.1 and greedy search, with any decoder.

A search accesses the model only through the methods of `Decoding`. `ModuleDecoding` in
`decoding_vanilla_transformer` implements them with the model's own modules, and `EngineDecoding`
in `engine_vanilla_transformer` with the inference engine.

Shapes: B sentences that are still searched, K beams, R hypotheses of a sentence (1 or K), C
candidates, V tokens in the vocabulary, T target tokens so far, L length of the longest allowed
target with its start token.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from .kernels_vanilla_transformer import index_of_largest, top_k_log_probs

# processors that `TokenRules` describes, each with its released code; a program may replace it
PROCESSORS = {
    processor: processor.__call__
    for processor in (
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        LogitNormalization,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        SuppressTokensLogitsProcessor,
    )
}
CALL_PROCESSORS = LogitsProcessorList.__call__
CALL_CRITERIA = StoppingCriteriaList.__call__
# initial capacity of the hypotheses in new tokens; the capacity doubles when it is used up
FIRST_NEW_TOKENS = 32


class Decoding:
    """Decoder of a model during one search, with R hypotheses for each of B sentences.

    A search calls `step` and `reorder` in turn, and `finish` at its end.

    Attributes:
        is_fixed: Whether every sentence must stay in the batch until the search ends.
        min_finished_share: Smallest share of finished sentences in the batch at which they are
            removed.
        is_captured: Whether work on the device can be captured and replayed, with `capture`.
        num_tokens: V, size of the vocabulary; None if only the logits of a step show it.
    """

    is_fixed = False
    min_finished_share = 0.1
    is_captured = False
    num_tokens: int | None = None

    def step(self, ids: Tensor) -> Tensor:
        """Read the tokens that were added since the last call, and score the next token.

        Args:
            ids: All tokens of each hypothesis, [B, R, T]. In the first call the rows of a sentence
                are equal.

        Returns:
            Logits in float32, [B, R, V], a tensor that the caller and the next call may overwrite.
            The first call may return one row for each sentence, [B, 1, V].
        """
        raise NotImplementedError

    def select(
        self, ids: Tensor, choose: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Read tokens as `step` does, and choose from the logits of the next token.

        Args:
            ids: All tokens of each hypothesis, [B, R, T], as in `step`.
            choose: Function of the logits of some rows, [rows, V], which it may overwrite. It
                returns scores and tokens, [rows, C] each.

        Returns:
            Scores and tokens of all rows, [B, R, C] each, or [B, 1, C] where `step` returns one row
            for each sentence.
        """
        logits = self.step(ids)
        scores, tokens = choose(logits.flatten(0, 1))
        shape = logits.shape[:2]
        return scores.unflatten(0, shape), tokens.unflatten(0, shape)

    def reorder(self, parents: Tensor, kept_sentences: Tensor | None = None):
        """Reorder the hypotheses after a step, and remove finished sentences.

        Args:
            parents: Index of the hypothesis that each new hypothesis continues, within its
                sentence, [B', R'].
            kept_sentences: Indices of the sentences that stay in the batch, [B']; None if all do.
        """
        raise NotImplementedError

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Compute once, and capture the work.

        Args:
            compute: Function that reads and writes the same existing tensors in each call, and
                never waits for the device.

        Returns:
            Function that repeats the work without running the Python code again.
        """
        raise NotImplementedError

    def finish(self):
        """Take part in the steps that all processes run together until all have finished."""

    def outputs(self) -> dict[str, Any]:
        """Return the model's part of an output object: attentions, hidden states and KV cache."""
        return {}


def gnmt_length_penalty(length: int | Tensor, alpha: float) -> float | Tensor:
    """Return the divisor of a hypothesis's log-probability. Section 6.1, after Wu et al. 2016.

    Args:
        length: Number of target tokens, the end token included, of any shape.
        alpha: 0 for no penalty; the paper uses 0.6 for translation and 0.3 for parsing.

    Returns:
        ((5 + length) / 6) ** alpha, of the same shape.
    """
    return ((5 + length) / 6) ** alpha


def length_penalty(
    length: int | Tensor, alpha: float | None, exponent: float | None
) -> float | Tensor:
    """Return the divisor of a log-probability, by the paper's formula or that of transformers.

    Args:
        length: Number of tokens of the translation, the end token included, of any shape.
        alpha: `length_penalty_alpha`, for the paper's formula.
        exponent: `length_penalty` of transformers, which is read if alpha is None; 1 if None.

    Returns:
        The penalty, of the same shape.
    """
    if alpha is not None:
        return gnmt_length_penalty(length, alpha)
    return length ** (1.0 if exponent is None else exponent)


class SentenceLengthCriteria(StoppingCriteria):
    """Stopping criterion with a maximum number of new tokens for each sentence. Section 6.1.

    Args:
        max_new_tokens: Maximum number of new tokens of each sentence, [B].
        prompt_length: Number of tokens in the decoder's prompt.
    """

    def __init__(self, max_new_tokens: Tensor, prompt_length: int):
        self.max_new_tokens = max_new_tokens
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        """Return which rows have reached their maximum length.

        Args:
            input_ids: Target tokens so far, the same number of rows for each sentence, [rows, T].
            scores: Unused.
            kwargs: Unused.

        Returns:
            True where a row has to stop, [rows].
        """
        rows_per_sentence = input_ids.shape[0] // self.max_new_tokens.shape[0]
        row_limits = self.max_new_tokens.repeat_interleave(rows_per_sentence).to(input_ids.device)
        return input_ids.shape[1] - self.prompt_length >= row_limits


class WholeSearchCriteria(StoppingCriteria):
    """Stopping criterion that does not depend on the hypotheses, and so ends a whole search.

    A search checks it on the CPU between two steps, so that the steps can still be captured.
    """

    def is_met(self) -> bool:
        """Return whether the search has to end."""
        raise NotImplementedError

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return whether the search has to end, for each row.

        Args:
            input_ids: Target tokens so far, [rows, T].
            scores: Unused.
            kwargs: Unused.

        Returns:
            The same for each row, [rows].
        """
        return torch.full((len(input_ids),), self.is_met(), device=input_ids.device)


# criteria that a search reads instead of calling them, each with its released code
CRITERIA = {
    criterion: criterion.__call__
    for criterion in (EosTokenCriteria, MaxLengthCriteria, SentenceLengthCriteria)
}


@dataclass
class Hypotheses:
    """Partial or complete translations of each sentence.

    Args:
        ids: Target tokens, [B, C, L].
        origins: Row of the original batch (sentence * K + beam) whose scores each new token was
            chosen from, -1 where there is no token, [B, C, L - prompt].
        scores: Log-probability; for a complete translation, divided by the length penalty, [B, C].
    """

    ids: Tensor
    origins: Tensor
    scores: Tensor

    def pick(self, index: Tensor) -> "Hypotheses":
        """Choose among the hypotheses of each sentence.

        Args:
            index: Indices of the chosen hypotheses, [B, C'].

        Returns:
            The chosen hypotheses, [B, C', ...].
        """
        wide_index = index[:, :, None]
        return Hypotheses(
            self.ids.gather(1, wide_index.expand(-1, -1, self.ids.shape[2])),
            self.origins.gather(1, wide_index.expand(-1, -1, self.origins.shape[2])),
            self.scores.gather(1, index),
        )

    def best(self, count: int) -> "Hypotheses":
        """Return the hypotheses with the highest scores, best first.

        Args:
            count: Number of hypotheses of each sentence.

        Returns:
            The best hypotheses, [B, count, ...].
        """
        return self.pick(self.scores.topk(count, dim=1).indices)

    def joined(self, other: "Hypotheses") -> "Hypotheses":
        """Concatenate two sets of hypotheses of the same sentences.

        Args:
            other: Other hypotheses, [B, C', ...].

        Returns:
            All hypotheses, [B, C + C', ...].
        """
        return Hypotheses(
            torch.cat((self.ids, other.ids), dim=1),
            torch.cat((self.origins, other.origins), dim=1),
            torch.cat((self.scores, other.scores), dim=1),
        )

    def overwrite(self, other: "Hypotheses"):
        """Copy other hypotheses into the tensors of these.

        Args:
            other: Hypotheses of the same shapes.
        """
        self.ids.copy_(other.ids)
        self.origins.copy_(other.origins)
        self.scores.copy_(other.scores)

    def replaced(self, is_replaced: Tensor, others: "Hypotheses") -> "Hypotheses":
        """Replace some hypotheses.

        Args:
            is_replaced: Which hypotheses are replaced, [B, C] or [B, 1].
            others: Hypotheses of the same shapes, from which the new ones are taken.

        Returns:
            The hypotheses, [B, C, ...].
        """
        is_wide = is_replaced[:, :, None]
        return Hypotheses(
            torch.where(is_wide, others.ids, self.ids),
            torch.where(is_wide, others.origins, self.origins),
            torch.where(is_replaced, others.scores, self.scores),
        )

    def lengthened(self, num_tokens: int, padding_id: int) -> "Hypotheses":
        """Increase the capacity of the hypotheses.

        Args:
            num_tokens: Number of tokens by which the capacity increases.
            padding_id: Token at the new positions.

        Returns:
            The same hypotheses, [B, C, ...].
        """
        return Hypotheses(
            nn.functional.pad(self.ids, (0, num_tokens), value=padding_id),
            nn.functional.pad(self.origins, (0, num_tokens), value=-1),
            self.scores,
        )

    def of_sentences(self, index: Tensor) -> "Hypotheses":
        """Keep the hypotheses of some sentences.

        Args:
            index: Indices of the sentences, [B'].

        Returns:
            Their hypotheses, [B', C, ...].
        """
        return Hypotheses(self.ids[index], self.origins[index], self.scores[index])


class _CapturedSelection(NamedTuple):
    """Selection of one step, captured on the device, and the tensors that it reads."""

    replay: Callable[[], None]
    logits: Tensor
    suppressed: Tensor


class PaperBeamSearch:
    """Beam search over a batch of sentences. Section 6.1.

    Each step selects the most probable continuations of all beams of a sentence. Continuations with
    an end token are complete hypotheses; their score is the log-probability divided by the length
    penalty. The best other continuations stay open. A sentence is finished when no open hypothesis
    can still become one of the best, or when it reaches its maximum length. If a sentence then has
    too few complete hypotheses, open hypotheses are returned without an end token. Finished
    sentences leave the batch.

    If the decoder captures its steps, the selection of a step is captured too, unless it needs more
    than the logits.

    Args:
        decoding: Decoder, before its first step.
        input_ids: Prompt of the decoder, repeated for each beam, [B * K, prompt].
        logits_processor: Processors of the log-probabilities of each step.
        stopping_criteria: Criteria that end a hypothesis.
        config: Generation configuration, as `generate` has prepared it.
        alpha: Alpha of the length penalty; None for the length penalty of transformers.
    """

    def __init__(
        self,
        decoding: Decoding,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        alpha: float | None,
    ):
        self.decoding = decoding
        self.config = config
        self.logits_processor = logits_processor
        self.num_beams = config.num_beams
        self.num_returned = config.num_return_sequences
        self.end_tokens, criteria = separate_ends(stopping_criteria, input_ids)
        self.whole_search_criteria = [
            criterion for criterion in criteria if isinstance(criterion, WholeSearchCriteria)
        ]
        self.stopping_criteria = StoppingCriteriaList(
            criterion for criterion in criteria if not isinstance(criterion, WholeSearchCriteria)
        )
        self.is_stopped = False
        self.padding_id = int(config._pad_token_tensor)
        self.num_candidates = count_candidates(len(self.end_tokens), self.num_beams)
        # without rules every token is scored: other processors and an output of scores need all
        # scores
        self.rules = None
        if not (config.output_scores or config.output_logits):
            self.rules = TokenRules.of(logits_processor, self.num_candidates)
        self.num_sentences = input_ids.shape[0] // self.num_beams
        self.prompt_length = input_ids.shape[1]
        self.limits = new_token_limits(stopping_criteria, config, input_ids, self.num_sentences)
        self.first_limit = int(self.limits.min())
        # for each sentence that is still searched, its index in the original batch
        self.sentence_indices = torch.arange(self.num_sentences, device=input_ids.device)

        most_new_tokens = int(self.limits.max())
        length = self.prompt_length + most_new_tokens
        # penalty of each number of new tokens
        lengths = torch.arange(most_new_tokens + 2, dtype=torch.float64)
        penalties = torch.as_tensor(length_penalty(lengths, alpha, config.length_penalty))
        self.penalties = penalties.float().to(input_ids.device)
        shape = (self.num_sentences, self.num_beams)
        ids = input_ids.new_full((*shape, length), self.padding_id)
        ids[:, :, : self.prompt_length] = input_ids.view(*shape, -1)
        origins = input_ids.new_full((*shape, length - self.prompt_length), -1)
        scores = torch.zeros(shape, dtype=torch.float32, device=input_ids.device)
        no_scores = torch.full_like(scores, -torch.inf)
        # at first all beams of a sentence are equal, so only one of them may be continued
        scores[:, 1:] = -torch.inf
        self.results = Hypotheses(ids, origins, no_scores)
        # the time of a selection grows with the capacity, so the capacity begins small. Captured
        # steps need tensors whose shapes do not change, so they begin with the full capacity
        num_tokens = most_new_tokens
        if not decoding.is_captured:
            num_tokens = min(FIRST_NEW_TOKENS, most_new_tokens)
        ids = ids[:, :, : self.prompt_length + num_tokens].clone()
        origins = origins[:, :, :num_tokens].clone()
        self.open = Hypotheses(ids, origins, scores)
        self.complete = Hypotheses(ids, origins, no_scores.clone())
        self.record: dict[str, list[Tensor]] = {"scores": [], "logits": []}
        self.chosen_beams = torch.zeros_like(ids[:, :, 0])
        self.is_finished = torch.zeros_like(self.sentence_indices, dtype=torch.bool)
        self._captured: _CapturedSelection | None = None

    def run(self) -> GenerateBeamEncoderDecoderOutput | Tensor:
        """Search until every sentence is finished.

        Returns:
            The best hypotheses in the order of the batch, [sentences * num_return_sequences, T], or
            an output object of transformers if `return_dict_in_generate` is set.

        Raises:
            ValueError: If a sentence has fewer allowed hypotheses than are to be returned.
        """
        step, is_search_finished = 0, False
        while not is_search_finished:
            step += 1
            # `tolist` makes the CPU wait for the device, once in each step
            finished_flags = self._take_step(step).tolist()
            is_search_finished = all(finished_flags)
            self._remove_finished(finished_flags, is_search_finished)
        self.decoding.finish()
        return self._output()

    def _take_step(self, step: int) -> Tensor:
        """Add a token to each hypothesis, and return which sentences are finished, [B]."""
        length = self.prompt_length + step - 1
        self.is_stopped = any(criterion.is_met() for criterion in self.whole_search_criteria)
        if step > (num_tokens := self.open.origins.shape[2]):
            num_added = min(num_tokens, self.results.origins.shape[2] - num_tokens)
            self.open = self.open.lengthened(num_added, self.padding_id)
            self.complete = self.complete.lengthened(num_added, self.padding_id)
        ids = self.open.ids[:, :, :length]
        can_capture = self._can_capture(step)
        candidates: tuple[Tensor, Tensor | None] | None = None
        if self.rules is not None and not can_capture:
            candidates = self.rules.select(self.decoding, ids)
        if candidates is None:
            logits = self.decoding.step(ids)  # [B, R, V]
            suppressed = None
            if self.rules is not None:
                suppressed = self.rules.suppressed(length, logits.shape[-1], logits.device)
            if self.rules is None or suppressed is None:
                candidates = self._log_probs(logits, length), None
            elif can_capture:
                return self._take_captured_step(self.rules, logits, suppressed, step)
            else:
                candidates = self.rules.top_k_log_probs(logits, suppressed)
        log_probs, tokens = candidates
        self._captured = None
        self.is_finished = self.is_finished | self._advance(log_probs, tokens, step)
        return self.is_finished

    def _can_capture(self, step: int) -> bool:
        """Return whether the selection of a step is like that of the next one."""
        is_last_step = self.is_stopped or step >= self.first_limit
        is_constant = not (step == 1 or is_last_step or self.stopping_criteria)
        return is_constant and self.decoding.is_captured

    def _take_captured_step(
        self, rules: "TokenRules", logits: Tensor, suppressed: Tensor, step: int
    ) -> Tensor:
        """Repeat the captured selection, or capture it if it has read other tensors."""
        selection = self._captured
        if selection and selection.logits is logits and selection.suppressed is suppressed:
            selection.replay()
            return self.is_finished
        open_hypotheses, complete, chosen_beams = self.open, self.complete, self.chosen_beams
        step_tensor = self.sentence_indices.new_full((1,), step)

        def select():
            log_probs, tokens = rules.top_k_log_probs(logits, suppressed)
            self.is_finished |= self._advance(log_probs, tokens, step_tensor)
            open_hypotheses.overwrite(self.open)
            complete.overwrite(self.complete)
            chosen_beams.copy_(self.chosen_beams)
            self.open, self.complete, self.chosen_beams = open_hypotheses, complete, chosen_beams
            step_tensor.add_(1)

        replay = self.decoding.capture(select)
        self._captured = _CapturedSelection(replay, logits, suppressed)
        return self.is_finished

    def _log_probs(self, logits: Tensor, length: int) -> Tensor:
        """Return the processed log-probabilities of all tokens, [B, K, V]."""
        ids = self.open.ids[:, :, :length]
        num_rows, vocab_size = logits.shape[1:]
        logits = logits.flatten(0, 1)  # [B * R, V]
        if self.config.return_dict_in_generate and self.config.output_logits:
            # a copy, because the next step may overwrite the logits; the first step may return one
            # row for all beams of a sentence
            num_repeats = self.num_beams // num_rows
            self.record["logits"].append(logits.repeat_interleave(num_repeats, dim=0))
        log_probs = logits.log_softmax(dim=-1)
        if num_rows < self.num_beams:
            log_probs = log_probs.repeat_interleave(self.num_beams, dim=0)
        log_probs = self._process(ids.flatten(0, 1), log_probs)
        if self.config.return_dict_in_generate and self.config.output_scores:
            self.record["scores"].append(log_probs)
        return log_probs.view(-1, self.num_beams, vocab_size)

    def _process(self, ids: Tensor, log_probs: Tensor) -> Tensor:
        if not self.logits_processor:
            return log_probs
        if len(self.sentence_indices) == self.num_sentences:
            # a processor may compute in another precision
            return self.logits_processor(ids, log_probs).to(log_probs.dtype)
        # a processor may identify each row by its index in the original batch, so all rows of this
        # batch are restored
        beams = torch.arange(self.num_beams, device=ids.device)
        remaining_rows = (self.sentence_indices[:, None] * self.num_beams + beams).flatten()
        num_rows = self.num_sentences * self.num_beams
        # the rows of finished sentences contain their results
        all_ids = self.results.ids[:, :, : ids.shape[1]].flatten(0, 1).clone()
        all_log_probs = log_probs.new_zeros(num_rows, log_probs.shape[1])
        all_ids[remaining_rows] = ids
        all_log_probs[remaining_rows] = log_probs
        return self.logits_processor(all_ids, all_log_probs)[remaining_rows].to(log_probs.dtype)

    def _advance(self, log_probs: Tensor, tokens: Tensor | None, step: int | Tensor) -> Tensor:
        """Select the hypotheses of a step, and return which sentences are finished, [B].

        The number of the step, counted from 1, is a tensor, [1], if the selection is captured.
        """
        candidates, tokens, beams = self._choose_candidates(log_probs, tokens, step)
        is_ended = self._find_ends(candidates, tokens, step)  # [B, C]

        scores = candidates.scores / self.penalties[step]
        # the results of a finished sentence stay as they are
        scores = scores.masked_fill(~is_ended | self.is_finished[:, None], -torch.inf)
        ended_candidates = Hypotheses(candidates.ids, candidates.origins, scores)
        complete_before = self.complete
        self.complete = self.complete.joined(ended_candidates).best(self.num_beams)

        candidates.scores = candidates.scores.masked_fill(is_ended, -torch.inf)
        scores, chosen_index = self._choose_open(candidates, step)  # [B, K] each
        self.open = candidates.pick(chosen_index)
        self.open.scores = scores
        self.chosen_beams = beams.gather(1, chosen_index)

        at_limit = step >= self.limits
        # steps at a limit are not captured
        if not isinstance(step, Tensor) and step >= self.first_limit:
            scores = self.open.scores / self.penalties[step]
            truncated = Hypotheses(self.open.ids, self.open.origins, scores)
            self._fill_with_truncated(at_limit & ~self.is_finished, truncated)
            # complete hypotheses come before truncated ones even if their scores are lower, so the
            # hypotheses are not sorted again
            self.complete = self.complete.replaced(self.is_finished[:, None], complete_before)
        # upper bound of the final score: the log-probability can only decrease, and the penalty
        # grows or falls with the length, so the score is highest at the next or the maximum length
        best_open = self.open.scores.amax(dim=1)
        attainable = torch.maximum(
            best_open / self.penalties[step + 1], best_open / self.penalties[self.limits]
        )
        worst_returned = self.complete.scores[:, self.num_returned - 1]
        return at_limit | (worst_returned >= attainable)

    def _choose_candidates(
        self, log_probs: Tensor, tokens: Tensor | None, step: int | Tensor
    ) -> tuple[Hypotheses, Tensor, Tensor]:
        """Return the most probable continuations of each sentence, their tokens and beams.

        All have the shape [B, C].
        """
        num_rows, num_tokens = log_probs.shape[1:]
        totals = (log_probs + self.open.scores[:, :num_rows, None]).flatten(1)  # [B, R * V]
        scores, index = totals.topk(min(self.num_candidates, totals.shape[1]), dim=1)
        beams = index // num_tokens
        tokens = index % num_tokens if tokens is None else tokens.flatten(1).gather(1, index)
        candidates = self.open.pick(beams)
        candidates.scores = scores
        self._append(candidates, tokens, beams, step)
        return candidates, tokens, beams

    def _append(self, candidates: Hypotheses, tokens: Tensor, beams: Tensor, step: int | Tensor):
        origins = self.sentence_indices[:, None] * self.num_beams + beams
        for rows, start, new in (
            (candidates.ids, self.prompt_length - 1, tokens),
            (candidates.origins, -1, origins),
        ):
            if isinstance(step, Tensor):
                rows.index_copy_(2, start + step, new[:, :, None])
            else:
                rows[:, :, start + step] = new

    def _choose_open(self, candidates: Hypotheses, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the candidates that stay open, best first, [B, K] each."""
        scores, index = candidates.scores.topk(self.num_beams, dim=1)
        return scores, index

    def _find_ends(self, candidates: Hypotheses, tokens: Tensor, step: int | Tensor) -> Tensor:
        if self.is_stopped:
            return torch.ones_like(tokens, dtype=torch.bool)
        is_ended = torch.isin(tokens, self.end_tokens)
        if self.stopping_criteria:
            # like a processor, a criterion may identify each row by its index in the original batch
            ids = self.results.ids[:, :1, : candidates.ids.shape[2]].repeat(1, tokens.shape[1], 1)
            ids[self.sentence_indices] = candidates.ids
            ids = ids[:, :, : self.prompt_length + step].flatten(0, 1)
            scores = tuple(self.record["scores"]) or None
            # a criterion may return integers
            is_stopped = self.stopping_criteria(ids, scores).bool().view(self.num_sentences, -1)
            is_ended = is_ended | is_stopped[self.sentence_indices]
        return is_ended

    def _fill_with_truncated(self, at_limit: Tensor, truncated: Hypotheses):
        """Fill missing complete hypotheses of sentences at their limit with truncated ones."""
        is_missing = at_limit[:, None] & (self.complete.scores == -torch.inf)  # [B, K]
        truncated = truncated.pick((is_missing.cumsum(dim=1) - 1).clamp(min=0))
        self.complete = self.complete.replaced(is_missing, truncated)

    def _remove_finished(self, finished_flags: list[bool], is_search_finished: bool):
        """Remove finished sentences from the batch if worthwhile, and reorder the beams."""
        if is_search_finished:
            self._store_results()
            return
        kept_sentences = None
        if is_worth_shrinking(self.decoding, finished_flags):
            self._store_results()
            self._captured = None
            kept_rows = [row for row, is_finished in enumerate(finished_flags) if not is_finished]
            kept_sentences = self.sentence_indices.new_tensor(kept_rows)
            self.open = self.open.of_sentences(kept_sentences)
            self.complete = self.complete.of_sentences(kept_sentences)
            self.chosen_beams = self.chosen_beams[kept_sentences]
            self.is_finished = self.is_finished[kept_sentences]
            self.limits = self.limits[kept_sentences]
            self.sentence_indices = self.sentence_indices[kept_sentences]
            self.first_limit = int(self.limits.min())
        self.decoding.reorder(self.chosen_beams, kept_sentences)

    def _store_results(self):
        """Store the complete hypotheses of the batch; those of unfinished sentences come later."""
        num_tokens = self.complete.origins.shape[2]
        length = self.prompt_length + num_tokens
        self.results.ids[self.sentence_indices, :, :length] = self.complete.ids
        self.results.origins[self.sentence_indices, :, :num_tokens] = self.complete.origins
        self.results.scores[self.sentence_indices] = self.complete.scores

    def _refuse_missing_results(self):
        """Refuse results with fewer allowed hypotheses of a sentence than are to be returned."""
        is_allowed = self.results.scores[:, : self.num_returned] != -torch.inf
        counts = is_allowed.sum(dim=1).tolist()
        if min(counts) < self.num_returned:
            sentence = counts.index(min(counts))
            raise MissingTranslationError(
                f"num_return_sequences must be at most {min(counts)}, got {self.num_returned}: the "
                "settings of the search allow no more translations"
                if min(counts)
                else "the settings of the search must allow a translation, but forbid every one",
                sentence,
            )

    def _output(self) -> GenerateBeamEncoderDecoderOutput | Tensor:
        self._refuse_missing_results()
        ids = self.results.ids[:, : self.num_returned].flatten(0, 1)
        origins = self.results.origins[:, : self.num_returned].flatten(0, 1)
        max_new_tokens = int((origins >= 0).sum(dim=1).max())
        ids = ids[:, : self.prompt_length + max_new_tokens]
        if not self.config.return_dict_in_generate:
            return ids
        scores = self.results.scores[:, : self.num_returned].flatten()
        return GenerateBeamEncoderDecoderOutput(
            sequences=ids,
            sequences_scores=scores if self.config.output_scores else None,
            beam_indices=origins[:, :max_new_tokens],
            **{name: tuple(steps) or None for name, steps in self.record.items()},
            **self.decoding.outputs(),
        )


def count_candidates(num_end_tokens: int, num_beams: int) -> int:
    """Return the number of continuations of a sentence that a step of beam search selects.

    Each beam may end with any of the end tokens, and K hypotheses must still stay open.

    Args:
        num_end_tokens: Number of end tokens.
        num_beams: K.
    """
    return max(2, 1 + num_end_tokens) * num_beams


class MissingTranslationError(ValueError):
    """Exception for a search whose settings allow too few translations of a sentence.

    Args:
        rule: The broken rule, without the sentence.
        sentence: Index of the sentence in the batch.
    """

    def __init__(self, rule: str, sentence: int):
        super().__init__(f"{rule} of sentence {sentence} of the batch (counted from 0).")
        self.rule = rule
        self.sentence = sentence


def greedy_search(
    decoding: Decoding,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> Tensor:
    """Search greedily, as transformers does, but remove finished sentences from the batch.

    Args:
        decoding: Decoder, before its first step.
        input_ids: Prompt of the decoder, [B, prompt].
        logits_processor: Processors of the logits of each step.
        stopping_criteria: Criteria that end a sentence.
        config: Generation configuration, as `generate` has prepared it.

    Returns:
        Prompts and translations, [B, T].
    """
    num_sentences, length = input_ids.shape
    padding_id = int(config._pad_token_tensor)
    limits = length + new_token_limits(stopping_criteria, config, input_ids, num_sentences)
    first_limit = int(limits.min())
    ids = input_ids.new_full((num_sentences, int(limits.max())), padding_id)
    ids[:, :length] = input_ids
    end_tokens, other_criteria = separate_ends(stopping_criteria, input_ids)
    # for each sentence that is still searched, its index in the original batch
    sentence_indices = torch.arange(num_sentences, device=ids.device)
    is_done = torch.zeros_like(sentence_indices, dtype=torch.bool)
    # the only hypothesis of a sentence always continues itself
    parents = torch.zeros_like(sentence_indices)[:, None]
    rules = TokenRules.of(logits_processor, 1)
    is_search_finished = False
    while not is_search_finished:
        logits = decoding.step(ids[sentence_indices, None, :length])[:, 0]  # [B, V]
        suppressed = None
        if rules is not None:
            suppressed = rules.suppressed(length, logits.shape[-1], logits.device)
        if suppressed is None:
            # a processor may identify each row by its index in the original batch, so all rows of
            # this batch are restored
            all_logits = logits.new_zeros(num_sentences, logits.shape[1])
            all_logits.index_copy_(0, sentence_indices, logits)
            logits = logits_processor(ids[:, :length], all_logits)[sentence_indices]
        elif len(suppressed):
            logits.index_fill_(1, suppressed, -torch.inf)
        tokens = index_of_largest(logits).masked_fill_(is_done, padding_id)
        ids[:, length].index_copy_(0, sentence_indices, tokens)
        length += 1
        is_done |= torch.isin(tokens, end_tokens)
        if length >= first_limit:
            is_done |= length >= limits[sentence_indices]
        if other_criteria:
            is_done |= other_criteria(ids[:, :length], None).bool()[sentence_indices]
        finished_flags = is_done.tolist()
        is_search_finished = all(finished_flags)
        kept_sentences = None
        if not is_search_finished and is_worth_shrinking(decoding, finished_flags):
            kept_sentences = sentence_indices.new_tensor(
                [row for row, is_finished in enumerate(finished_flags) if not is_finished]
            )
            sentence_indices = sentence_indices[kept_sentences]
            is_done = torch.zeros_like(sentence_indices, dtype=torch.bool)
            parents = parents[: len(kept_sentences)]
        decoding.reorder(parents, kept_sentences)
    decoding.finish()
    return ids[:, :length]


def is_worth_shrinking(decoding: Decoding, finished_flags: Sequence[bool]) -> bool:
    """Return whether enough sentences are finished to remove them from the batch.

    Args:
        decoding: Decoder of the batch.
        finished_flags: Whether each sentence of the batch is finished.
    """
    min_finished = max(1, decoding.min_finished_share * len(finished_flags))
    return not decoding.is_fixed and sum(finished_flags) >= min_finished


@dataclass
class TokenRules:
    """Effect of logits processors that only forbid tokens, force tokens, or renormalize.

    With these rules, a search can select the most probable tokens without calling the processors.

    Attributes:
        count: C, number of tokens that a step selects for each hypothesis.
        forbidden: Pairs of a length and tokens that are forbidden in hypotheses below this length.
        forced_lengths: Lengths of hypotheses whose next token a processor forces.
        renormalizes: Whether the probabilities of the allowed tokens are rescaled to the sum 1.
        highest_bad_word: Highest token of `bad_words_ids`, -1 without any; the processor refuses a
            token that is not in the vocabulary.
    """

    count: int
    forbidden: list[tuple[float, set[int]]]
    forced_lengths: set[int]
    renormalizes: bool
    highest_bad_word: int
    # sets of forbidden tokens that steps had so far, on the device
    _suppressed: dict[frozenset[int], Tensor] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, processors: LogitsProcessorList, count: int) -> "TokenRules | None":
        """Derive the rules from the processors; read their tensors from the device only once.

        Args:
            processors: Processors, as `generate` has prepared them.
            count: C, number of tokens that a step selects for each hypothesis.

        Returns:
            The rules, or None if a processor has an effect that they do not describe.
        """
        forbidden: list[tuple[float, set[int]]] = []
        forced_lengths = set()
        renormalizes, highest_bad_word = False, -1
        if LogitsProcessorList.__call__ is not CALL_PROCESSORS:
            return None
        for processor in processors:
            # a processor after the renormalization would change the sum again
            if renormalizes or type(processor).__call__ is not PROCESSORS.get(type(processor)):
                return None
            end_length = math.inf
            if type(processor) is SuppressTokensLogitsProcessor:
                tokens = processor.suppress_tokens.tolist()
            elif type(processor) is MinLengthLogitsProcessor:
                tokens, end_length = processor.eos_token_id.tolist(), processor.min_length
            elif type(processor) is MinNewTokensLengthLogitsProcessor:
                tokens = processor.eos_token_id.tolist()
                end_length = processor.prompt_length_to_skip + processor.min_new_tokens
            elif type(processor) is NoBadWordsLogitsProcessor:
                # a program may have replaced the bias of a bad word
                for ids, bias in processor.sequence_bias.items():
                    if len(ids) > 1 or bias != -math.inf:
                        return None
                tokens = [token for ids in processor.sequence_bias for token in ids]
                highest_bad_word = max([highest_bad_word, *tokens])
            elif type(processor) is ForcedBOSTokenLogitsProcessor:
                tokens = []
                forced_lengths.add(1)
            elif type(processor) is ForcedEOSTokenLogitsProcessor:
                tokens = []
                forced_lengths.add(processor.max_length - 1)
            else:  # LogitNormalization
                tokens, renormalizes = [], True
            forbidden.append((end_length, set(tokens)))
        return cls(count, forbidden, forced_lengths, renormalizes, highest_bad_word)

    def top_k_log_probs(self, logits: Tensor, suppressed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most probable allowed tokens of each row; the logits may be overwritten.

        Args:
            logits: Scores of all tokens in float32, [..., V].
            suppressed: Tokens that are forbidden at this step, from `suppressed`.

        Returns:
            Log-probabilities and tokens, most probable first, [..., C] each.
        """
        rows = logits.view(-1, logits.shape[-1])
        if self.renormalizes and len(suppressed):
            rows.index_fill_(1, suppressed, -torch.inf)
            suppressed = suppressed[:0]
        log_probs, tokens = top_k_log_probs(rows, self.count, suppressed)
        shape = *logits.shape[:-1], self.count
        return log_probs.view(shape), tokens.view(shape)

    def select(self, decoding: Decoding, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Let a decoder read tokens, and return the most probable allowed next tokens.

        Args:
            decoding: Decoder, which reads the tokens only if these rules suffice for the selection.
            ids: All tokens of each hypothesis, [B, R, T].

        Returns:
            Log-probabilities and tokens, most probable first, [B, R, C] each, or [B, 1, C] where
            `step` returns one row for each sentence; None if the selection needs all logits of
            `step`.
        """
        if decoding.num_tokens is None:
            return None
        suppressed = self.suppressed(ids.shape[-1], decoding.num_tokens, ids.device)
        if suppressed is None:
            return None
        return decoding.select(ids, functools.partial(self.top_k_log_probs, suppressed=suppressed))

    def suppressed(self, length: int, vocab_size: int, device: torch.device) -> Tensor | None:
        """Return the tokens that are forbidden at one step.

        Args:
            length: Number of target tokens so far, the prompt included.
            vocab_size: V; transformers ignores `suppress_tokens` that are not in the vocabulary.
            device: Device of the logits.

        Returns:
            Token ids on the device, the same tensor for the same tokens; None if the processors
            must be called, because one of them forces the next token or refuses a bad word that is
            not in the vocabulary, or if the vocabulary has fewer than C tokens.
        """
        highest_token = max(self.highest_bad_word, self.count - 1)
        if length in self.forced_lengths or highest_token >= vocab_size:
            return None
        tokens = frozenset().union(
            *(tokens for end_length, tokens in self.forbidden if length < end_length)
        )
        if tokens not in self._suppressed:
            ids = sorted(token for token in tokens if 0 <= token < vocab_size)
            self._suppressed[tokens] = torch.tensor(ids, dtype=torch.long, device=device)
        return self._suppressed[tokens]


def separate_ends(
    stopping_criteria: StoppingCriteriaList, input_ids: Tensor
) -> tuple[Tensor, StoppingCriteriaList]:
    """Separate the end tokens from the criteria that must be called.

    Args:
        stopping_criteria: Criteria, as `generate` has prepared them.
        input_ids: Prompt of the decoder, on its device.

    Returns:
        End tokens, [tokens], and the criteria that are neither end tokens nor maximum lengths.
    """
    end_tokens = [
        criterion.eos_token_id
        for criterion in stopping_criteria
        if type(criterion) is EosTokenCriteria and _is_read(criterion)
    ]
    others = StoppingCriteriaList(
        criterion for criterion in stopping_criteria if not _is_read(criterion)
    )
    return torch.cat([input_ids.new_empty(0), *end_tokens]), others


def _is_read(criterion: StoppingCriteria) -> bool:
    """Return False for a criterion that must be called: a subclass, or replaced code."""
    is_list_released = StoppingCriteriaList.__call__ is CALL_CRITERIA
    return is_list_released and type(criterion).__call__ is CRITERIA.get(type(criterion))


def new_token_limits(
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    input_ids: Tensor,
    num_sentences: int,
) -> Tensor:
    """Return the maximum number of new tokens of each sentence. Section 6.1.

    Args:
        stopping_criteria: Criteria, as `generate` has prepared them.
        config: Generation configuration, as `generate` has prepared it.
        input_ids: Prompt of the decoder, [rows, prompt].
        num_sentences: Number of sentences.

    Returns:
        Maximum of each sentence, at least 1, [B].
    """
    max_lengths = [
        criterion.max_length
        for criterion in stopping_criteria
        if type(criterion) is MaxLengthCriteria and _is_read(criterion)
    ]
    max_new_tokens = min(max_lengths, default=config.max_length) - input_ids.shape[1]
    limits = input_ids.new_full((num_sentences,), max_new_tokens)
    for criterion in stopping_criteria:
        if isinstance(criterion, SentenceLengthCriteria) and _is_read(criterion):
            limits = torch.minimum(limits, criterion.max_new_tokens.to(limits))
    return limits.clamp(min=1)
