"""The search of section 6.1, behind the library's own `generate`.

A generation configuration with `length_penalty_alpha` selects it wherever the library would do beam
search; one with `max_extra_tokens` bounds every mode by the length of each source sentence. A
configuration with neither leaves the library's behavior as it is.

Shapes: B sentences still searched, K beams, C candidates, V tokens in the vocabulary, L length of
the longest allowed target with its start token.
"""

import math
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from .engine_vanilla_transformer import (
    Decoding,
    SearchEngine,
    engine_for,
    forget_engine,
    why_not,
)

# name of the cache in outputs and among the arguments that `generate` passes: `past_key_values` in
# transformers before 5.24
CACHE_NAME = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
SEARCH_FIELDS = ("length_penalty_alpha", "max_extra_tokens", "int8")
# what an engine knows of what the library gives the model, beside what says nothing
ENGINE_ARGUMENTS = ("encoder_outputs", "attention_mask", CACHE_NAME, "decoder_input_ids")
SILENT_ARGUMENTS = ("use_cache", "logits_to_keep")
# how many of the sentences must be done before an engine's caches are copied without them
SHARE_THAT_LEAVES = 0.1


def gnmt_length_penalty(length: int | Tensor, alpha: float) -> float | Tensor:
    """What the log-probability of a hypothesis is divided by. Section 6.1, after Wu et al. 2016.

    Args:
        length: Number of target tokens, the end token included, of any shape.
        alpha: 0 for no penalty; the paper's searches use 0.6.

    Returns:
        ((5 + length) / 6) ** alpha, of the same shape.
    """
    return ((5 + length) / 6) ** alpha


class SentenceLengthCriteria(StoppingCriteria):
    """Stops each sentence at its own number of new tokens. Section 6.1.

    Args:
        max_new_tokens: The bound of each sentence, [B].
        prompt_length: Number of target tokens given beforehand.
    """

    def __init__(self, max_new_tokens: Tensor, prompt_length: int):
        self.max_new_tokens = max_new_tokens
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        """Tell which rows have reached their bound.

        Args:
            input_ids: Target tokens so far, the same number of rows for each sentence, [rows, T].
            scores: Unused.
            kwargs: Unused.

        Returns:
            True where a row is to stop, [rows].
        """
        rows_per_sentence = input_ids.shape[0] // self.max_new_tokens.shape[0]
        limits = self.max_new_tokens.repeat_interleave(rows_per_sentence).to(input_ids.device)
        return input_ids.shape[1] - self.prompt_length >= limits


@dataclass
class Hypotheses:
    """Some partial or complete translations of each sentence.

    Args:
        ids: Target tokens, [B, C, L].
        origins: Row of the batch that each new token's score came from, -1 where none yet,
            [B, C, L - prompt].
        scores: Log-probability, or its quotient by the length penalty, [B, C].
    """

    ids: Tensor
    origins: Tensor
    scores: Tensor

    def pick(self, index: Tensor) -> "Hypotheses":
        """Choose among the hypotheses of each sentence.

        Args:
            index: Which to keep, [B, C'].

        Returns:
            The chosen ones, [B, C', ...].
        """
        wide = index[:, :, None]
        return Hypotheses(
            self.ids.gather(1, wide.expand(-1, -1, self.ids.shape[2])),
            self.origins.gather(1, wide.expand(-1, -1, self.origins.shape[2])),
            self.scores.gather(1, index),
        )

    def best(self, count: int) -> "Hypotheses":
        """The `count` highest scores of each sentence, best first.

        Args:
            count: How many to keep.

        Returns:
            The best ones, [B, count, ...].
        """
        return self.pick(self.scores.topk(count, dim=1).indices)

    def joined(self, other: "Hypotheses") -> "Hypotheses":
        """These and others of the same sentences.

        Args:
            other: [B, C', ...].

        Returns:
            All of them, [B, C + C', ...].
        """
        return Hypotheses(
            torch.cat((self.ids, other.ids), dim=1),
            torch.cat((self.origins, other.origins), dim=1),
            torch.cat((self.scores, other.scores), dim=1),
        )

    def of_sentences(self, index: Tensor) -> "Hypotheses":
        """Keep some of the sentences.

        Args:
            index: Which sentences, [B'].

        Returns:
            Their hypotheses, [B', C, ...].
        """
        return Hypotheses(self.ids[index], self.origins[index], self.scores[index])


class PaperSearchMixin:
    """Gives a model the paper's search; stands before `GenerationMixin` among its bases."""

    def _prepare_generation_config(self, generation_config, *args, **kwargs):
        given = {name: kwargs.pop(name) for name in SEARCH_FIELDS if name in kwargs}
        prepared, model_kwargs = super()._prepare_generation_config(
            generation_config, *args, **kwargs
        )
        for name in SEARCH_FIELDS:
            setattr(prepared, name, given.get(name, getattr(prepared, name, None)))
        check_search_settings(prepared)
        # Seq2SeqTrainer writes the library's default length into the model's own configuration,
        # where it would look like a wish to cut every translation there
        wished = [kwargs.get("max_length"), getattr(generation_config, "max_length", None)]
        default = prepared._get_default_generation_params()["max_length"]
        prepared._max_length_is_default = wished == [None, None] and prepared.max_length == default
        prepared._engine = None
        return prepared, model_kwargs

    def save_pretrained(self, *args, **kwargs):
        """As every model's; the library would lose a search that was set on a new model.

        Args:
            args: The folder.
            kwargs: As the library takes them.
        """
        config = self.generation_config
        if any(getattr(config, name, None) is not None for name in SEARCH_FIELDS):
            # else it is made anew of the model's configuration when it is loaded
            config._from_model_config = False
        super().save_pretrained(*args, **kwargs)

    def train(self, mode: bool = True):
        """As every module's; what a search packed of weights that are to change is given back.

        Args:
            mode: Whether to train.

        Returns:
            The model.
        """
        if mode:
            forget_engine(self)
        return super().train(mode)

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, inputs_tensor, model_kwargs, model_input_name, generation_config
    ):
        is_encoded = model_kwargs.get("encoder_outputs") is not None
        # an assistant's configuration is not prepared
        is_search = "_engine" in vars(generation_config)
        if is_search and model_input_name == "input_ids" and not is_encoded:
            engine = self._engine(generation_config, model_kwargs)
            if engine is not None:
                memory = engine.encode(inputs_tensor, model_kwargs.get("attention_mask"))
                model_kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=memory)
                return model_kwargs
        return super()._maybe_prepare_encoder_kwargs_for_generation(
            inputs_tensor, model_kwargs, model_input_name, generation_config
        )

    def _engine(
        self, generation_config, model_kwargs, only_modules_can: str | None = None
    ) -> SearchEngine | None:
        """What computes this search; None where that are the model's own modules."""
        config = generation_config
        only_modules_can = only_modules_can or needs_modules(config, model_kwargs)
        if (
            only_modules_can is None
            and (only_modules_can := why_not(self, bool(config.int8))) is not None
        ):
            # of a model that was moved or changed; its weights would be kept as they were
            forget_engine(self)
        if only_modules_can is None:
            # the encoder has asked before the search does; configurations are copied on the way
            engine = config._engine and config._engine()
            if engine is None:
                engine = engine_for(self, bool(config.int8))
                config._engine = weakref.ref(engine)
            return engine
        if config.int8:
            raise ValueError(f"int8 must be used with {only_modules_can}.")
        return None

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        prepared = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        source, name, _ = prepared
        # the library stands in meaningless ids for a source that is encoded already
        if name == "input_ids" and model_kwargs.get("encoder_outputs") is None:
            check_ids("input_ids", source, self.config.vocab_size)
        if (prompt := model_kwargs.get("decoder_input_ids")) is not None:
            check_ids("decoder_input_ids", prompt, self.config.vocab_size)
        learned = self.config.position_encoding == "learned"
        if learned and source.shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"A source must have at most {self.config.max_position_embeddings} tokens, the "
                f"number of learned positions, got {source.shape[1]}."
            )
        return prepared

    def _prepare_generated_length(
        self,
        generation_config,
        has_default_max_length,
        *args,
        inputs_tensor,
        input_ids_length,
        **kwargs,
    ):
        extra = generation_config.max_extra_tokens
        learned = self.config.position_encoding == "learned"
        # the last token is never read, so it needs no position
        max_length = self.config.max_position_embeddings + 1
        is_default = has_default_max_length or generation_config._max_length_is_default
        if extra is not None and is_default and generation_config.max_new_tokens is None:
            has_default_max_length = True
            longest = inputs_tensor.shape[1] + extra
            room = max_length - input_ids_length
            generation_config.max_new_tokens = min(longest, room) if learned else longest
        prepared = super()._prepare_generated_length(
            generation_config,
            has_default_max_length,
            *args,
            inputs_tensor=inputs_tensor,
            input_ids_length=input_ids_length,
            **kwargs,
        )
        if learned and prepared.max_length > max_length:
            raise ValueError(
                f"max_length must be at most {max_length}, one more than the number of learned "
                f"positions, got {prepared.max_length}."
            )
        return prepared

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        limited = limit_by_sentence(stopping_criteria, input_ids, generation_config, kwargs)
        streamer, synced_gpus = kwargs.pop("streamer", None), kwargs.pop("synced_gpus", False)
        only_modules_can = None
        if streamer is not None or synced_gpus:
            only_modules_can = "no streamer in one process, got another search"
        elif generation_config.eos_token_id is None:
            only_modules_can = "eos_token_id, got None"
        engine = self._engine(generation_config, kwargs, only_modules_can)
        if engine is not None:
            return greedy_search(
                engine, input_ids, logits_processor, limited, generation_config, **kwargs
            )
        kwargs |= {"streamer": streamer, "synced_gpus": synced_gpus}
        return super()._sample(
            input_ids, logits_processor, limited, generation_config=generation_config, **kwargs
        )

    # the library looks for the name of `inputs_tensor`, which the assistant reads too
    def _assisted_decoding(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        inputs_tensor=None,
        **kwargs,
    ):
        limited = limit_by_sentence(stopping_criteria, input_ids, generation_config, kwargs)
        if generation_config.int8:
            raise ValueError("int8 must be used with no assistant, got one.")
        # the library refuses more only after the assistant has read them
        if len(input_ids) > 1:
            raise ValueError(
                f"assisted decoding takes one sentence at a time, got a batch of {len(input_ids)}."
            )
        return super()._assisted_decoding(
            input_ids,
            logits_processor,
            limited,
            generation_config=generation_config,
            inputs_tensor=inputs_tensor,
            **kwargs,
        )

    def _beam_search(
        self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
    ):
        if generation_config.length_penalty_alpha is None or generation_config.do_sample:
            self._engine(generation_config, kwargs)
            limited = limit_by_sentence(stopping_criteria, input_ids, generation_config, kwargs)
            return super()._beam_search(
                input_ids, logits_processor, limited, generation_config=generation_config, **kwargs
            )
        synced_gpus = kwargs.pop("synced_gpus", False)
        engine = self._engine(
            generation_config,
            kwargs,
            "one process, got several in step" if synced_gpus else None,
        )
        search = PaperBeamSearch(
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            engine,
            **kwargs,
        )
        return search.run()


class PaperBeamSearch:
    """One beam search over a batch. Section 6.1.

    At each step the likeliest candidates of all beams of a sentence are taken; those that end the
    sentence are complete hypotheses, scored by log-probability over length penalty, the others go
    on. A sentence is done when no open hypothesis can still be among the best, or at its bound;
    only where too few are complete by then do cut ones take their place. Done sentences leave the
    batch.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        input_ids: The decoder's prompt, once for each beam, [B * K, prompt].
        logits_processor: Changes the log-probabilities of each step.
        stopping_criteria: End a hypothesis beside the end token.
        generation_config: Prepared by `generate`.
        synced_gpus: Go on with empty steps until every process is done.
        engine: Computes in place of the model's modules, where given.
        model_kwargs: For the model: encoder's outputs, mask and cache.
    """

    def __init__(
        self,
        model,
        input_ids: Tensor,
        logits_processor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        engine: SearchEngine | None = None,
        **model_kwargs,
    ):
        self.model = model
        self.engine = engine
        self.config = generation_config
        self.synced_gpus = synced_gpus
        self.model_kwargs = model_kwargs
        self.forward = model
        # with a cache of fixed size on a GPU, as the library's own searches
        if engine is None and model._valid_auto_compile_criteria(model_kwargs, generation_config):
            self.forward = model.get_compiled_call(generation_config.compile_config)
        self.logits_processor = logits_processor
        # the bound is kept below, and the end token is known without looking at whole hypotheses;
        # a caller's own criteria of these kinds stand in the place of those that were prepared
        self.stopping_criteria = StoppingCriteriaList(
            criterion
            for criterion in stopping_criteria
            if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria)
        )
        self.num_beams = generation_config.num_beams
        self.num_returned = generation_config.num_return_sequences
        self.alpha = generation_config.length_penalty_alpha
        ends = [c.eos_token_id for c in stopping_criteria if isinstance(c, EosTokenCriteria)]
        self.end_tokens = torch.cat(ends) if ends else generation_config._eos_token_tensor
        pad = generation_config._pad_token_tensor
        self.fill = int(self.end_tokens[0] if pad is None else pad)
        # what ends a sentence may be among the likeliest for every beam, and as many go on
        self.num_candidates = max(2, 1 + len(self.end_tokens)) * self.num_beams
        self.num_sentences = input_ids.shape[0] // self.num_beams
        self.prompt_length = input_ids.shape[1]
        self.limits = new_token_limits(
            input_ids, stopping_criteria, generation_config, model_kwargs, self.num_beams
        )
        self.first_limit = int(self.limits.min())
        # where each searched sentence stands in the batch as it was given
        self.places = torch.arange(self.num_sentences, device=input_ids.device)
        self.has_result = [False] * self.num_sentences

        length = self.prompt_length + int(self.limits.max())
        shape = (self.num_sentences, self.num_beams)
        ids = input_ids.new_full((*shape, length), self.fill)
        ids[:, :, : self.prompt_length] = input_ids.view(*shape, -1)
        origins = input_ids.new_full((*shape, length - self.prompt_length), -1)
        scores = torch.zeros(shape, dtype=torch.float32, device=input_ids.device)
        nothing = torch.full_like(scores, -torch.inf)
        # all beams begin alike: only the first may be continued at first
        scores[:, 1:] = -torch.inf
        self.open = Hypotheses(ids, origins, scores)
        self.complete = Hypotheses(ids, origins, nothing)
        self.results = Hypotheses(ids.clone(), origins.clone(), nothing.clone())
        self.record = {"scores": [], "logits": [], "decoder_attentions": []}
        self.record |= {"cross_attentions": [], "decoder_hidden_states": []}
        self.decoding = self.suppression = None
        if engine is not None:
            self.suppression = Suppression.of(logits_processor, model.config.vocab_size)
            self.decoding = begin_decoding(engine, input_ids, self.num_beams, model_kwargs)

    def run(self) -> GenerateBeamEncoderDecoderOutput | Tensor:
        """Search until every sentence is done.

        Returns:
            The best hypotheses, [sentences * num_return_sequences, T], in the order of the batch,
            or the library's output with scores and whatever else was asked for.
        """
        step, finished_here = 0, False
        while self.model._has_unfinished_sequences(
            finished_here, self.synced_gpus, device=self.places.device
        ):
            step += not finished_here
            scored = self._next_scores(step)
            if finished_here:
                continue
            # the one time in a step that the host waits for the device
            done = self._advance(scored, step).tolist()
            finished_here = all(done)
            self._leave(done, finished_here)
        return self._output()

    def _next_scores(self, step: int) -> tuple[Tensor, Tensor | None]:
        """Score tokens after every open hypothesis, [B, K, C], and name them.

        All tokens, C = V, have no names. At first an engine has one hypothesis of each sentence.
        """
        if self.decoding is None:
            return self._next_log_probs(step), None
        length = self.prompt_length + step - 1
        is_first = step == 1
        rows = 1 if is_first else self.num_beams
        states = self.decoding.step(self.open.ids[:, :rows, length - 1])  # [B * K, d_model]
        vocab_size = self.model.config.vocab_size
        if self.suppression is not None and self.num_candidates <= vocab_size:
            suppressed = self.suppression.at(length)
            found = self.engine.likeliest(states, self.num_candidates, suppressed)
            return tuple(part.view(-1, rows, self.num_candidates) for part in found)
        log_probs = self.engine.logits(states).log_softmax(dim=-1)
        if is_first:
            log_probs = log_probs.repeat_interleave(self.num_beams, dim=0)
        log_probs = self._processed(self.open.ids[:, :, :length].flatten(0, 1), log_probs)
        return log_probs.view(-1, self.num_beams, log_probs.shape[-1]), None

    def _next_log_probs(self, step: int) -> Tensor:
        """Score every token after every open hypothesis, [B, K, V]."""
        length = self.prompt_length + step - 1
        ids = self.open.ids[:, :, :length].flatten(0, 1)  # [B * K, length]
        cache = self.model_kwargs.get(CACHE_NAME)
        unseen = None if cache is None else 1
        if cache is not None and step == 1:
            unseen = length - int(cache.get_seq_length())
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=unseen,
            is_first_iteration=step == 1,
            **self.model_kwargs,
        )
        # the first tokens have shapes of their own
        outputs = (self.model if step == 1 else self.forward)(**inputs, return_dict=True)
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, is_encoder_decoder=True
        )
        logits = outputs.logits[:, -1].to(ids.device, torch.float32)  # [B * K, V]
        log_probs = self._processed(ids, logits.log_softmax(dim=-1))
        if self.config.return_dict_in_generate:
            self._record(outputs, logits, log_probs)
        return log_probs.view(-1, self.num_beams, log_probs.shape[-1])

    def _processed(self, ids: Tensor, log_probs: Tensor) -> Tensor:
        if not self.logits_processor:
            return log_probs
        if len(self.places) == self.num_sentences:
            return self.logits_processor(ids, log_probs)
        # a processor may know each row by its place in the whole batch
        beams = torch.arange(self.num_beams, device=ids.device)
        rows = (self.places[:, None] * self.num_beams + beams).flatten()
        all_rows = self.num_sentences * self.num_beams
        # done sentences with what they came to
        all_ids = self.results.ids[:, :, : ids.shape[1]].flatten(0, 1).clone()
        all_log_probs = log_probs.new_zeros(all_rows, log_probs.shape[1])
        all_ids[rows] = ids
        all_log_probs[rows] = log_probs
        return self.logits_processor(all_ids, all_log_probs)[rows]

    def _advance(self, scored: tuple[Tensor, Tensor | None], step: int) -> Tensor:
        """Take one step, and tell which sentences are done, [B]."""
        candidates, beams = self._candidates(*scored, step)
        ends = self._ends(candidates, step)  # [B, C]

        ended = candidates.scores / gnmt_length_penalty(step, self.alpha)
        ended = Hypotheses(candidates.ids, candidates.origins, ended.masked_fill(~ends, -torch.inf))
        self.complete = self.complete.joined(ended).best(self.num_beams)

        going_on = candidates.scores.masked_fill(ends, -torch.inf)
        chosen = going_on.topk(self.num_beams, dim=1).indices  # [B, K]
        candidates.scores = going_on
        self.open = candidates.pick(chosen)
        self.chosen_beams = beams.gather(1, chosen)

        at_limit = step >= self.limits
        if step >= self.first_limit:
            cut = self.open.scores / gnmt_length_penalty(step, self.alpha)
            self._fill_with_cut(at_limit, cut)
        # log-probabilities only fall, so the penalty at either end of what is left bounds the score
        best_open = self.open.scores[:, 0]
        attainable = torch.maximum(
            best_open / gnmt_length_penalty(step + 1, self.alpha),
            best_open / gnmt_length_penalty(self.limits, self.alpha),
        )
        worst_returned = self.complete.scores[:, self.num_returned - 1]
        return at_limit | (worst_returned >= attainable)

    def _candidates(
        self, log_probs: Tensor, tokens: Tensor | None, step: int
    ) -> tuple[Hypotheses, Tensor]:
        """The likeliest continuations of each sentence, [B, C], and the beams they continue."""
        rows, num_tokens = log_probs.shape[1:]
        totals = (log_probs + self.open.scores[:, :rows, None]).flatten(1)  # [B, K * V]
        scores, index = totals.topk(min(self.num_candidates, totals.shape[1]), dim=1)
        beams = index // num_tokens
        tokens = index % num_tokens if tokens is None else tokens.flatten(1).gather(1, index)
        candidates = self.open.pick(beams)
        candidates.scores = scores
        candidates.ids[:, :, self.prompt_length + step - 1] = tokens
        candidates.origins[:, :, step - 1] = self.places[:, None] * self.num_beams + beams
        return candidates, beams

    def _ends(self, candidates: Hypotheses, step: int) -> Tensor:
        length = self.prompt_length + step
        ends = torch.isin(candidates.ids[:, :, length - 1], self.end_tokens)
        if self.stopping_criteria:
            ids = candidates.ids[:, :, :length].flatten(0, 1)
            scores = tuple(self.record["scores"]) or None
            ends = ends | self.stopping_criteria(ids, scores).view_as(ends)
        return ends

    def _fill_with_cut(self, at_limit: Tensor, cut_scores: Tensor):
        """Where a sentence must stop, let cut hypotheses take the places no complete one has."""
        missing = at_limit[:, None] & (self.complete.scores == -torch.inf)  # [B, K]
        # the open ones stand best first: the first of them goes to the first empty place
        rank = (missing.cumsum(dim=1) - 1).clamp(min=0)
        cut = Hypotheses(self.open.ids, self.open.origins, cut_scores).pick(rank)
        wide = missing[:, :, None]
        self.complete = Hypotheses(
            torch.where(wide, cut.ids, self.complete.ids),
            torch.where(wide, cut.origins, self.complete.origins),
            torch.where(missing, cut.scores, self.complete.scores),
        )

    def _leave(self, done: list[bool], all_done: bool):
        """Set done sentences' results, take them out, and line the cache up with the beams."""
        newly_done = [
            row for row, is_done in enumerate(done) if is_done and not self.has_result[row]
        ]
        if newly_done:
            rows = self.places.new_tensor(newly_done)
            places = self.places[rows]
            self.results.ids[places] = self.complete.ids[rows]
            self.results.origins[places] = self.complete.origins[rows]
            self.results.scores[places] = self.complete.scores[rows]
            for row in newly_done:
                self.has_result[row] = True
        if all_done:
            return
        stays = [row for row, is_done in enumerate(done) if not is_done]
        if self.decoding is not None:
            kept = None
            if len(done) - len(stays) >= max(1, SHARE_THAT_LEAVES * len(done)):
                kept = self.places.new_tensor(stays)
                self._keep(stays, kept)
                self.chosen_beams = self.chosen_beams[kept]
            self.decoding.follow(self.chosen_beams, kept)
            return
        cache = self.model_kwargs.get(CACHE_NAME)
        fixed_size = cache is not None and cache.is_compileable
        # outputs for each step, and collective steps, need every row to the end
        if fixed_size or self.config.return_dict_in_generate or self.synced_gpus:
            stays = list(range(len(done)))
        kept = self.places.new_tensor(stays)
        rows = (kept[:, None] * self.num_beams + self.chosen_beams[kept]).flatten()
        if len(stays) < len(done):
            self._keep(stays, kept)
            self.model_kwargs = {
                name: select_rows(value, rows, len(done) * self.num_beams)
                for name, value in self.model_kwargs.items()
            }
            if cache is not None:
                cache.reorder_cache(rows)
        elif cache is not None:
            # all beams of a sentence share its memory: only what they wrote themselves moves
            getattr(cache, "self_attention_cache", cache).reorder_cache(rows)

    def _keep(self, stays: list[int], kept: Tensor):
        """Leave some sentences, as the host and as the device know them."""
        self.open = self.open.of_sentences(kept)
        self.complete = self.complete.of_sentences(kept)
        self.limits, self.places = self.limits[kept], self.places[kept]
        self.first_limit = int(self.limits.min())
        self.has_result = [self.has_result[row] for row in stays]

    def _record(self, outputs, logits: Tensor, log_probs: Tensor):
        config, record = self.config, self.record
        if config.output_logits:
            record["logits"].append(logits)
        if config.output_scores:
            record["scores"].append(log_probs)
        if config.output_attentions:
            record["decoder_attentions"].append(outputs.decoder_attentions)
            record["cross_attentions"].append(outputs.cross_attentions)
        if config.output_hidden_states:
            record["decoder_hidden_states"].append(outputs.decoder_hidden_states)

    def _output(self) -> GenerateBeamEncoderDecoderOutput | Tensor:
        ids = self.results.ids[:, : self.num_returned].flatten(0, 1)
        origins = self.results.origins[:, : self.num_returned].flatten(0, 1)
        longest = int((origins >= 0).sum(dim=1).max())
        ids = ids[:, : self.prompt_length + longest]
        config = self.config
        if not config.return_dict_in_generate:
            return ids
        encoder_outputs = self.model_kwargs["encoder_outputs"]
        scores = self.results.scores[:, : self.num_returned].flatten()
        return GenerateBeamEncoderDecoderOutput(
            sequences=ids,
            sequences_scores=scores if config.output_scores else None,
            beam_indices=origins[:, :longest],
            encoder_attentions=(
                encoder_outputs.get("attentions") if config.output_attentions else None
            ),
            encoder_hidden_states=(
                encoder_outputs.get("hidden_states") if config.output_hidden_states else None
            ),
            **{CACHE_NAME: self.model_kwargs.get(CACHE_NAME)},
            **{name: tuple(steps) or None for name, steps in self.record.items()},
        )


def greedy_search(
    engine: SearchEngine,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    **model_kwargs,
) -> Tensor:
    """The library's greedy search by an engine; finished sentences leave the batch.

    Args:
        engine: Computes in place of the model's modules.
        input_ids: The decoder's prompt, [B, prompt].
        logits_processor: Changes the logits of each step.
        stopping_criteria: End a sentence.
        config: Prepared by `generate`.
        model_kwargs: With the encoder's outputs and the source's mask.

    Returns:
        Prompts and translations, [B, T].
    """
    decoding = begin_decoding(engine, input_ids, 1, model_kwargs)
    num_sentences, length = input_ids.shape
    pad = int(config._pad_token_tensor)
    ids = input_ids.new_full((num_sentences, longest_target(stopping_criteria, config)), pad)
    ids[:, :length] = input_ids
    # where each searched sentence stands in the batch as it was given
    places = torch.arange(num_sentences, device=ids.device)
    is_done = torch.zeros_like(places, dtype=torch.bool)
    suppression = Suppression.of(logits_processor, engine.vocab_size)
    # of the sentences still searched, as the host knows it
    done = [False] * num_sentences
    while not all(done):
        logits = engine.logits(decoding.step(ids[places, length - 1, None]))  # [rows, V]
        if suppression is None:
            # a processor may know each row by its place in the whole batch
            whole = logits.new_zeros(num_sentences, logits.shape[1]).index_copy_(0, places, logits)
            logits = logits_processor(ids[:, :length], whole)[places]
        elif suppressed := suppression.at(length):
            logits[:, torch.tensor(suppressed, device=logits.device)] = -torch.inf
        ids[places, length] = logits.argmax(dim=-1).masked_fill_(is_done[places], pad)
        length += 1
        is_done |= stopping_criteria(ids[:, :length], None)
        done = is_done[places].tolist()
        stays = None
        if 0 < done.count(False) <= (1 - SHARE_THAT_LEAVES) * len(done):
            stays = places.new_tensor([row for row, is_over in enumerate(done) if not is_over])
            places, done = places[stays], [False] * len(stays)
        decoding.follow(torch.zeros_like(places)[:, None], stays)
    return ids[:, :length]


def begin_decoding(
    engine: SearchEngine, input_ids: Tensor, num_beams: int, model_kwargs: dict
) -> Decoding:
    """Give an engine the memory and all of the prompt but its last token.

    Args:
        engine: Computes in place of the model's modules.
        input_ids: The decoder's prompt, once for each beam, [B * K, prompt].
        num_beams: K.
        model_kwargs: With the encoder's outputs and the source's mask.

    Returns:
        A state with one row a sentence.
    """
    memory = model_kwargs["encoder_outputs"].last_hidden_state
    mask = model_kwargs.get("attention_mask")
    decoding = engine.begin(memory[::num_beams], None if mask is None else mask[::num_beams])
    for tokens in input_ids[::num_beams, :-1].T:
        decoding.step(tokens[:, None])
    return decoding


class Suppression:
    """What the processors of a search forbid, where they do nothing else.

    Args:
        rules: Tokens, and the length from which on they may come again.
    """

    def __init__(self, rules: list[tuple[float, set[int]]]):
        self.rules = rules

    @classmethod
    def of(cls, processors: LogitsProcessorList, vocab_size: int) -> "Suppression | None":
        """Read it from the processors, and so from the device, once.

        Args:
            processors: Those `generate` prepared.
            vocab_size: V.

        Returns:
            What they forbid; None where a processor is of another kind.
        """
        rules = []
        for processor in processors:
            if type(processor) is SuppressTokensLogitsProcessor:
                tokens, end = processor.suppress_tokens, math.inf
            elif type(processor) is MinLengthLogitsProcessor:
                tokens, end = processor.eos_token_id, processor.min_length
            elif type(processor) is MinNewTokensLengthLogitsProcessor:
                tokens = processor.eos_token_id
                end = processor.prompt_length_to_skip + processor.min_new_tokens
            else:
                return None
            # the library's processors pass over what is no token
            rules.append((end, {token for token in tokens.tolist() if 0 <= token < vocab_size}))
        return cls(rules)

    def at(self, length: int) -> list[int]:
        """What is forbidden at a step.

        Args:
            length: Target tokens so far, the prompt's too.

        Returns:
            The tokens.
        """
        return sorted(set().union(*(tokens for end, tokens in self.rules if length < end)))


def needs_modules(config: GenerationConfig, model_kwargs: dict) -> str | None:
    """What about a search only the model's own modules can do.

    Args:
        config: Prepared by `generate`.
        model_kwargs: For the model, as far as they are prepared.

    Returns:
        What should be, and what is; None where there is nothing.
    """
    if config.do_sample:
        return "do_sample=False, got True"
    if config.num_beams > 1 and config.length_penalty_alpha is None:
        return "length_penalty_alpha, as all beams are, got None"
    if config.return_dict_in_generate:
        return "return_dict_in_generate=False, got True"
    if config.use_cache is False or model_kwargs.get("use_cache") is False:
        return "use_cache=True, got False"
    if config.cache_implementation is not None:
        return f"no cache_implementation, got {config.cache_implementation}"
    cache = model_kwargs.get(CACHE_NAME)
    if cache is not None and (
        type(cache) is not EncoderDecoderCache
        or type(cache.self_attention_cache) is not DynamicCache
        or cache.get_seq_length() > 0
    ):
        return "no past_key_values, got some"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or not mask.bool().any(dim=1).all()):
        return "an attention_mask of [B, S] with a token in each row, got another"
    for name, value in model_kwargs.items():
        if name not in (*ENGINE_ARGUMENTS, *SILENT_ARGUMENTS) and not (
            value is None or value is False
        ):
            return f"no {name}, got one"
    return None


def check_search_settings(config: GenerationConfig):
    """Refuse settings that contradict each other.

    Args:
        config: A generation configuration with `SEARCH_FIELDS`.

    Raises:
        ValueError: If two length penalties are given, or a value is out of range.
    """
    extra, alpha = config.max_extra_tokens, config.length_penalty_alpha
    if config.int8 not in (None, True, False):
        raise ValueError(f"int8 must be True or False, got {config.int8!r}.")
    if not isinstance(config.num_beams, int) or config.num_beams < 1:
        raise ValueError(f"num_beams must be a whole number of at least 1, got {config.num_beams}.")
    if extra is not None and (not isinstance(extra, int) or extra < 0):
        raise ValueError(f"max_extra_tokens must be a whole number, 0 or more, got {extra!r}.")
    if alpha is None:
        return
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"length_penalty_alpha must be a number, got {alpha!r}.")
    if config.length_penalty not in (None, 1.0):
        raise ValueError(
            "length_penalty and length_penalty_alpha are two formulas for one thing: give one, got "
            f"{config.length_penalty} and {alpha}; length_penalty_alpha=None is for the library's "
            "own search."
        )
    if config.early_stopping is True:
        raise ValueError(
            "early_stopping must not be True with length_penalty_alpha, whose search stops when no "
            "open hypothesis can still win; length_penalty_alpha=None is for the library's own."
        )
    if config.eos_token_id is None and config.num_beams > 1:
        raise ValueError("eos_token_id must be set for length_penalty_alpha, got None.")


def check_ids(name: str, ids: Tensor, vocab_size: int):
    """Refuse what no model of this vocabulary can read.

    Args:
        name: Of the argument, for the error.
        ids: Tokens, [B, T].
        vocab_size: V.

    Raises:
        ValueError: If the batch is empty or an id is not in the vocabulary.
    """
    if ids.numel() == 0:
        raise ValueError(
            f"{name} must hold at least one sentence of one token, got {list(ids.shape)}."
        )
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{name} must be at least 0 and below the vocabulary size {vocab_size}, got "
            f"{lowest if lowest < 0 else highest}."
        )


def longest_target(stopping_criteria: StoppingCriteriaList, config: GenerationConfig) -> int:
    """How many target tokens there may be, the prompt's too.

    Args:
        stopping_criteria: Those `generate` prepared, or a caller's own in their place.
        config: Prepared by `generate`: `max_length` is set.

    Returns:
        The number of the criteria, which is the configuration's where a caller gave none.
    """
    lengths = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
    return min(lengths, default=config.max_length)


def new_token_limits(
    input_ids: Tensor,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict,
    rows_per_sentence: int,
) -> Tensor:
    """How many tokens each sentence may get. Section 6.1.

    Args:
        input_ids: The decoder's prompt, [B * rows_per_sentence, prompt].
        stopping_criteria: Those `generate` prepared, or a caller's own in their place.
        config: Prepared by `generate`: `max_length` is set.
        model_kwargs: With the source's mask, or the encoder's outputs where all is source.
        rows_per_sentence: Beams, or sampled sequences.

    Returns:
        The bounds, at least 1, [B].
    """
    rows, prompt_length = input_ids.shape
    longest = longest_target(stopping_criteria, config) - prompt_length
    limits = input_ids.new_full((rows,), longest)
    if config.max_extra_tokens is not None:
        mask = model_kwargs.get("attention_mask")
        if mask is None:
            source_lengths = model_kwargs["encoder_outputs"].last_hidden_state.shape[1]
        else:
            source_lengths = mask.sum(dim=1).to(limits)
        limits = (limits * 0 + source_lengths + config.max_extra_tokens).clamp(max=longest)
    return limits[::rows_per_sentence].clamp(min=1)


def limit_by_sentence(
    stopping_criteria: StoppingCriteriaList,
    input_ids: Tensor,
    config: GenerationConfig,
    model_kwargs: dict,
) -> StoppingCriteriaList:
    """Add the bound of each sentence to the criteria of the library's own modes.

    Args:
        stopping_criteria: Those `generate` prepared.
        input_ids: The decoder's prompt, [rows, prompt].
        config: Prepared by `generate`.
        model_kwargs: With the source's mask, or the encoder's outputs.

    Returns:
        The criteria, with one more where `max_extra_tokens` is set.
    """
    if config.max_extra_tokens is None:
        return stopping_criteria
    limits = new_token_limits(
        input_ids, stopping_criteria, config, model_kwargs, rows_per_sentence=1
    )
    own = SentenceLengthCriteria(limits, input_ids.shape[1])
    return StoppingCriteriaList([*stopping_criteria, own])


def select_rows(value, rows: Tensor, num_rows: int):
    """Keep some rows of whatever belongs to the rows of a batch.

    Args:
        value: A tensor [num_rows, ...], a library output of such tensors, or anything else.
        rows: Which rows to keep, [R].
        num_rows: Size of the batch now.

    Returns:
        The rows [R, ...]; `value` itself where it has no rows.
    """
    if isinstance(value, Tensor):
        return value[rows] if value.shape[:1] == (num_rows,) else value
    if isinstance(value, dict):
        kept = {name: select_rows(part, rows, num_rows) for name, part in value.items()}
        return type(value)(**kept)
    return value


def set_paper_search(
    model, num_beams: int = 4, length_penalty_alpha: float = 0.6, max_extra_tokens: int = 50
):
    """Give a trained model the search of section 6.1 as its default; the values are the paper's.

    Args:
        model: Whose generation configuration is replaced.
        num_beams: Beam size.
        length_penalty_alpha: Alpha of the length penalty.
        max_extra_tokens: How much longer than its source a translation may get.
    """
    config = model.config
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        num_beams=num_beams,
        length_penalty_alpha=length_penalty_alpha,
        max_extra_tokens=max_extra_tokens,
    )
