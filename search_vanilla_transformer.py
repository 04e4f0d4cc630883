"""Beam search of section 6.1 and greedy search, with any decoder.

A search accesses the model only through the methods of `Decoding`. `ModuleDecoding` in
`generation_vanilla_transformer` implements them with the model's own modules, and `EngineDecoding`
in `engine_vanilla_transformer` with the inference engine.

Shapes: B sentences that are still searched, K beams, R hypotheses of a sentence (1 or K), C
candidates, V tokens in the vocabulary, T target tokens so far, L length of the longest allowed
target with its start token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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

from .kernels_vanilla_transformer import likeliest


class Decoding:
    """Decoder of a model during one search, with R hypotheses for each of B sentences.

    A search calls `step` and `reorder` in turn, and `finish` at its end.

    Attributes:
        is_fixed: Whether every sentence must stay in the batch until the search ends.
        min_finished_share: Smallest share of finished sentences in the batch at which they are
            removed.
    """

    is_fixed = False
    min_finished_share = 0.1

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

    def reorder(self, parents: Tensor, kept_sentences: Tensor | None = None):
        """Reorder the hypotheses after a step, and remove finished sentences.

        Args:
            parents: Index of the hypothesis that each new hypothesis continues, within its
                sentence, [B', R'].
            kept_sentences: Indices of the sentences that stay in the batch, [B']; None if all do.
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

    def of_sentences(self, index: Tensor) -> "Hypotheses":
        """Keep the hypotheses of some sentences.

        Args:
            index: Indices of the sentences, [B'].

        Returns:
            Their hypotheses, [B', C, ...].
        """
        return Hypotheses(self.ids[index], self.origins[index], self.scores[index])


class PaperBeamSearch:
    """Beam search over a batch of sentences. Section 6.1.

    Each step selects the most probable continuations of all beams of a sentence. Continuations with
    an end token are complete hypotheses; their score is the log-probability divided by the length
    penalty. The best other continuations stay open. A sentence is finished when no open hypothesis
    can still become one of the best, or when it reaches its maximum length. If a sentence then has
    too few complete hypotheses, open hypotheses are returned without an end token. Finished
    sentences leave the batch.

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
        # without rules, every token is scored, as other processors and an output of scores need it
        self.rules = None
        if not (config.output_scores or config.output_logits):
            self.rules = TokenRules.of(logits_processor)
        # `limits` and `end_tokens` below replace these criteria, so that no step calls them
        replaced_criteria = (MaxLengthCriteria, EosTokenCriteria, SentenceLengthCriteria)
        self.stopping_criteria = StoppingCriteriaList(
            criterion
            for criterion in stopping_criteria
            if not isinstance(criterion, replaced_criteria)
        )
        self.num_beams = config.num_beams
        self.num_returned = config.num_return_sequences
        self.alpha = alpha
        end_token_tensors = [
            c.eos_token_id for c in stopping_criteria if isinstance(c, EosTokenCriteria)
        ]
        self.end_tokens = (
            torch.cat(end_token_tensors) if end_token_tensors else config._eos_token_tensor
        )
        padding_tensor = config._pad_token_tensor
        self.padding_id = int(self.end_tokens[0] if padding_tensor is None else padding_tensor)
        # each beam may end with any of the end tokens, and K hypotheses must still stay open
        self.num_candidates = max(2, 1 + len(self.end_tokens)) * self.num_beams
        self.num_sentences = input_ids.shape[0] // self.num_beams
        self.prompt_length = input_ids.shape[1]
        self.limits = new_token_limits(stopping_criteria, config, input_ids, self.num_sentences)
        self.first_limit = int(self.limits.min())
        # for each sentence that is still searched, its index in the original batch
        self.sentence_indices = torch.arange(self.num_sentences, device=input_ids.device)
        self.has_result = [False] * self.num_sentences

        length = self.prompt_length + int(self.limits.max())
        shape = (self.num_sentences, self.num_beams)
        ids = input_ids.new_full((*shape, length), self.padding_id)
        ids[:, :, : self.prompt_length] = input_ids.view(*shape, -1)
        origins = input_ids.new_full((*shape, length - self.prompt_length), -1)
        scores = torch.zeros(shape, dtype=torch.float32, device=input_ids.device)
        no_scores = torch.full_like(scores, -torch.inf)
        # at first all beams of a sentence are equal, so only one of them may be continued
        scores[:, 1:] = -torch.inf
        self.open = Hypotheses(ids, origins, scores)
        self.complete = Hypotheses(ids, origins, no_scores)
        self.results = Hypotheses(ids.clone(), origins.clone(), no_scores.clone())
        self.record: dict[str, list[Tensor]] = {"scores": [], "logits": []}

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
            finished_flags = self._advance(*self._next_scores(step), step).tolist()
            is_search_finished = all(finished_flags)
            self._remove_finished(finished_flags, is_search_finished)
        self.decoding.finish()
        return self._output()

    def _next_scores(self, step: int) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities of C next tokens of each open hypothesis, and these tokens.

        Both have the shape [B, R, C]. If all tokens are scored, C = V, the tokens are None.
        """
        length = self.prompt_length + step - 1
        ids = self.open.ids[:, :, :length]
        logits = self.decoding.step(ids)  # [B, R, V]
        num_rows, vocab_size = logits.shape[1:]
        logits = logits.flatten(0, 1)  # [B * R, V]
        if self.rules is not None:
            candidates = self.rules.likeliest(logits, self.num_candidates, length)
            if candidates is not None:
                scores, tokens = (it.view(-1, num_rows, self.num_candidates) for it in candidates)
                return scores, tokens
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
        return log_probs.view(-1, self.num_beams, vocab_size), None

    def _process(self, ids: Tensor, log_probs: Tensor) -> Tensor:
        if not self.logits_processor:
            return log_probs
        if len(self.sentence_indices) == self.num_sentences:
            return self.logits_processor(ids, log_probs)
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
        return self.logits_processor(all_ids, all_log_probs)[remaining_rows]

    def _advance(self, log_probs: Tensor, tokens: Tensor | None, step: int) -> Tensor:
        """Take one step, and return which sentences are finished, [B]."""
        candidates, beams = self._choose_candidates(log_probs, tokens, step)
        is_ended = self._find_ends(candidates, step)  # [B, C]

        scores = candidates.scores / self._penalty(step)
        scores = scores.masked_fill(~is_ended, -torch.inf)
        ended_candidates = Hypotheses(candidates.ids, candidates.origins, scores)
        self.complete = self.complete.joined(ended_candidates).best(self.num_beams)

        candidates.scores = candidates.scores.masked_fill(is_ended, -torch.inf)
        scores, chosen_index = self._choose_open(candidates, step)  # [B, K] each
        self.open = candidates.pick(chosen_index)
        self.open.scores = scores
        self.chosen_beams = beams.gather(1, chosen_index)

        at_limit = step >= self.limits
        if step >= self.first_limit:
            scores = self.open.scores / self._penalty(step)
            truncated = Hypotheses(self.open.ids, self.open.origins, scores)
            self._fill_with_truncated(at_limit, truncated)
        # upper bound of the final score: the log-probability can only decrease, and the penalty
        # grows or falls with the length, so it is most favorable at the next or the maximum length
        best_open = self.open.scores.amax(dim=1)
        attainable = torch.maximum(
            best_open / self._penalty(step + 1), best_open / self._penalty(self.limits)
        )
        worst_returned = self.complete.scores[:, self.num_returned - 1]
        return at_limit | (worst_returned >= attainable)

    def _choose_candidates(
        self, log_probs: Tensor, tokens: Tensor | None, step: int
    ) -> tuple[Hypotheses, Tensor]:
        """Return the most probable continuations of each sentence and their beams, [B, C] each."""
        num_rows, num_tokens = log_probs.shape[1:]
        totals = (log_probs + self.open.scores[:, :num_rows, None]).flatten(1)  # [B, R * V]
        scores, index = totals.topk(min(self.num_candidates, totals.shape[1]), dim=1)
        beams = index // num_tokens
        tokens = index % num_tokens if tokens is None else tokens.flatten(1).gather(1, index)
        candidates = self.open.pick(beams)
        candidates.scores = scores
        self._append(candidates, tokens, beams, step)
        return candidates, beams

    def _append(self, candidates: Hypotheses, tokens: Tensor, beams: Tensor, step: int):
        candidates.ids[:, :, self.prompt_length + step - 1] = tokens
        candidates.origins[:, :, step - 1] = self.sentence_indices[:, None] * self.num_beams + beams

    def _choose_open(self, candidates: Hypotheses, step: int) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the candidates that stay open, best first, [B, K] each."""
        scores, index = candidates.scores.topk(self.num_beams, dim=1)
        return scores, index

    def _penalty(self, length: int | Tensor) -> float | Tensor:
        return length_penalty(length, self.alpha, self.config.length_penalty)

    def _find_ends(self, candidates: Hypotheses, step: int) -> Tensor:
        length = self.prompt_length + step
        is_ended = torch.isin(candidates.ids[:, :, length - 1], self.end_tokens)
        if self.stopping_criteria:
            ids = candidates.ids[:, :, :length].flatten(0, 1)
            scores = tuple(self.record["scores"]) or None
            is_ended = is_ended | self.stopping_criteria(ids, scores).view_as(is_ended)
        return is_ended

    def _fill_with_truncated(self, at_limit: Tensor, truncated: Hypotheses):
        """Fill missing complete hypotheses of sentences at their limit with truncated ones."""
        is_missing = at_limit[:, None] & (self.complete.scores == -torch.inf)  # [B, K]
        truncated = truncated.pick((is_missing.cumsum(dim=1) - 1).clamp(min=0))
        wide_missing = is_missing[:, :, None]
        self.complete = Hypotheses(
            torch.where(wide_missing, truncated.ids, self.complete.ids),
            torch.where(wide_missing, truncated.origins, self.complete.origins),
            torch.where(is_missing, truncated.scores, self.complete.scores),
        )

    def _remove_finished(self, finished_flags: list[bool], is_search_finished: bool):
        """Store results of finished sentences, shrink the batch if worthwhile, reorder beams."""
        new_rows = [
            row
            for row, is_finished in enumerate(finished_flags)
            if is_finished and not self.has_result[row]
        ]
        if new_rows:
            row_tensor = self.sentence_indices.new_tensor(new_rows)
            sentences = self.sentence_indices[row_tensor]
            self.results.ids[sentences] = self.complete.ids[row_tensor]
            self.results.origins[sentences] = self.complete.origins[row_tensor]
            self.results.scores[sentences] = self.complete.scores[row_tensor]
            for row in new_rows:
                self.has_result[row] = True
        if is_search_finished:
            return
        kept_sentences = None
        if is_worth_shrinking(self.decoding, finished_flags):
            kept_rows = [row for row, is_finished in enumerate(finished_flags) if not is_finished]
            kept_sentences = self.sentence_indices.new_tensor(kept_rows)
            self.open = self.open.of_sentences(kept_sentences)
            self.complete = self.complete.of_sentences(kept_sentences)
            self.chosen_beams = self.chosen_beams[kept_sentences]
            self.limits = self.limits[kept_sentences]
            self.sentence_indices = self.sentence_indices[kept_sentences]
            self.first_limit = int(self.limits.min())
            self.has_result = [self.has_result[row] for row in kept_rows]
        self.decoding.reorder(self.chosen_beams, kept_sentences)

    def _refuse_missing_results(self):
        """Refuse to return a hypothesis with a token that a processor has forbidden."""
        is_allowed = self.results.scores[:, : self.num_returned] != -torch.inf
        counts = is_allowed.sum(dim=1).tolist()
        if min(counts) < self.num_returned:
            sentence = counts.index(min(counts))
            raise ValueError(
                f"num_return_sequences must be at most {min(counts)}, got {self.num_returned}: the "
                f"settings of the search allow no more translations of sentence {sentence} of the "
                "batch (counted from 0)."
                if min(counts)
                else "the settings of the search must allow a translation, but forbid every one "
                f"of sentence {sentence} of the batch (counted from 0)."
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
    ids = input_ids.new_full((num_sentences, longest_target(stopping_criteria, config)), padding_id)
    ids[:, :length] = input_ids
    # for each sentence that is still searched, its index in the original batch
    sentence_indices = torch.arange(num_sentences, device=ids.device)
    is_done = torch.zeros_like(sentence_indices, dtype=torch.bool)
    rules = TokenRules.of(logits_processor)
    # for each sentence in the batch, whether it is finished; in CPU memory
    finished_flags = [False] * num_sentences
    while not all(finished_flags):
        logits = decoding.step(ids[sentence_indices, None, :length])[:, 0]  # [B, V]
        suppressed = None if rules is None else rules.suppressed(length, logits.shape[1])
        if suppressed is None:
            # a processor may identify each row by its index in the original batch, so all rows of
            # this batch are restored
            all_logits = logits.new_zeros(num_sentences, logits.shape[1])
            all_logits.index_copy_(0, sentence_indices, logits)
            logits = logits_processor(ids[:, :length], all_logits)[sentence_indices]
        elif suppressed:
            logits[:, torch.tensor(suppressed, device=logits.device)] = -torch.inf
        ids[sentence_indices, length] = logits.argmax(dim=-1).masked_fill_(
            is_done[sentence_indices], padding_id
        )
        length += 1
        is_done |= stopping_criteria(ids[:, :length], None)
        finished_flags = is_done[sentence_indices].tolist()
        kept_sentences = None
        if not all(finished_flags) and is_worth_shrinking(decoding, finished_flags):
            kept_sentences = sentence_indices.new_tensor(
                [row for row, is_finished in enumerate(finished_flags) if not is_finished]
            )
            sentence_indices = sentence_indices[kept_sentences]
            finished_flags = [False] * len(kept_sentences)
        decoding.reorder(torch.zeros_like(sentence_indices)[:, None], kept_sentences)
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


class TokenRules:
    """Effect of logits processors that only forbid tokens, force tokens, or renormalize.

    With these rules, a search can select the most probable tokens without calling the processors.

    Args:
        forbidden: Pairs of a length and tokens that are forbidden in hypotheses below this length.
        forced_lengths: Lengths of hypotheses whose next token a processor forces.
        renormalizes: Whether the probabilities of the allowed tokens are rescaled to the sum 1.
        highest_bad_word: Highest token of `bad_words_ids`, -1 without any; the processor refuses a
            token that is not in the vocabulary.
    """

    def __init__(
        self,
        forbidden: list[tuple[float, set[int]]],
        forced_lengths: set[int],
        renormalizes: bool,
        highest_bad_word: int,
    ):
        self.highest_bad_word = highest_bad_word
        self.forbidden = forbidden
        self.forced_lengths = forced_lengths
        self.renormalizes = renormalizes

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> "TokenRules | None":
        """Derive the rules from the processors; read their tensors from the device only once.

        Args:
            processors: Processors, as `generate` has prepared them.

        Returns:
            The rules, or None if a processor has an effect that they do not describe.
        """
        forbidden: list[tuple[float, set[int]]] = []
        forced_lengths = set()
        renormalizes, highest_bad_word = False, -1
        for processor in processors:
            if renormalizes:
                # a processor after the renormalization would change the sum again
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
                if any(len(ids) > 1 for ids in processor.sequence_bias):
                    return None
                tokens = [token for ids in processor.sequence_bias for token in ids]
                highest_bad_word = max([highest_bad_word, *tokens])
            elif type(processor) is ForcedBOSTokenLogitsProcessor:
                tokens = []
                forced_lengths.add(1)
            elif type(processor) is ForcedEOSTokenLogitsProcessor:
                tokens = []
                forced_lengths.add(processor.max_length - 1)
            elif type(processor) is LogitNormalization:
                tokens, renormalizes = [], True
            else:
                return None
            forbidden.append((end_length, set(tokens)))
        return cls(forbidden, forced_lengths, renormalizes, highest_bad_word)

    def likeliest(self, logits: Tensor, count: int, length: int) -> tuple[Tensor, Tensor] | None:
        """Return the most probable allowed tokens of each row; the logits are overwritten.

        Args:
            logits: Scores of all tokens in float32, [rows, V].
            count: C, number of tokens to return.
            length: Number of target tokens so far, the prompt included.

        Returns:
            Log-probabilities and tokens, most probable first, [rows, C] each; None if the
            processors must be called, or if the vocabulary has fewer than C tokens.
        """
        suppressed = self.suppressed(length, logits.shape[1])
        if suppressed is None or count > logits.shape[1]:
            return None
        if suppressed and self.renormalizes:
            logits[:, torch.tensor(suppressed, device=logits.device)] = -torch.inf
            suppressed = []
        return likeliest(logits, count, suppressed)

    def suppressed(self, length: int, vocab_size: int) -> list[int] | None:
        """Return the tokens that are forbidden at one step.

        Args:
            length: Number of target tokens so far, the prompt included.
            vocab_size: V; transformers ignores `suppress_tokens` that are not in the vocabulary.

        Returns:
            Token ids, sorted; None if the processors must be called: one of them forces the next
            token, or refuses a bad word that is not in the vocabulary.
        """
        if length in self.forced_lengths or self.highest_bad_word >= vocab_size:
            return None
        forbidden_tokens = set().union(
            *(tokens for end_length, tokens in self.forbidden if length < end_length)
        )
        return sorted(token for token in forbidden_tokens if 0 <= token < vocab_size)


def longest_target(stopping_criteria: StoppingCriteriaList, config: GenerationConfig) -> int:
    """Return the maximum number of target tokens, the prompt included.

    Args:
        stopping_criteria: Criteria, as `generate` has prepared them.
        config: Generation configuration, as `generate` has prepared it.

    Returns:
        The smallest maximum length among the criteria; without one, `max_length` of the
        configuration.
    """
    lengths = [
        criterion.max_length
        for criterion in stopping_criteria
        if isinstance(criterion, MaxLengthCriteria)
    ]
    return min(lengths, default=config.max_length)


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
    max_new_tokens = longest_target(stopping_criteria, config) - input_ids.shape[1]
    limits = input_ids.new_full((num_sentences,), max_new_tokens)
    for criterion in stopping_criteria:
        if isinstance(criterion, SentenceLengthCriteria):
            limits = torch.minimum(limits, criterion.max_new_tokens.to(limits))
    return limits.clamp(min=1)


__all__ = [
    "Decoding",
    "PaperBeamSearch",
    "SentenceLengthCriteria",
    "gnmt_length_penalty",
    "greedy_search",
    "length_penalty",
]
