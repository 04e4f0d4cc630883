"""The beam search of section 6.1, as a part of `generate` of transformers ("the library").

In a generation configuration, `length_penalty_alpha` selects the paper's beam search instead of the
library's, and `max_extra_tokens` limits the length of each translation to the length of its source
plus this number. Without these settings, `generate` runs the library's searches.

`SearchMixin.generate` reads the settings, validates the input and decides which code computes the
logits: the inference engine if the model runs the released code, otherwise the model's own modules.
Then it calls the library's `generate`, which calls `_beam_search` or `_sample` of this mixin. The
library's own searches use the engine too: `EngineModel` takes the place of the model.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode, LogitsProcessorList
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import ModelOutput

from .checks_vanilla_transformer import (
    LIBRARY_ARGUMENTS,
    LIBRARY_MAX_LENGTH,
    RELEASED_ARGUMENTS,
    SEARCH_FIELDS,
    check_inputs,
    check_length,
    check_mode,
    check_numbers,
    check_search_settings,
    check_search_tokens,
    check_terms,
    engine_precision,
    own_arguments,
    plain_numbers,
    vocab_size_of,
    warn_once,
)
from .decoding_vanilla_transformer import (
    CACHE_NAME,
    ModuleDecoding,
    one_cache,
    reason_against_cache,
    reason_against_cached_steps,
)
from .engine_checks_vanilla_transformer import (
    engine_for,
    forget_engine,
    refusing_changes,
    settings_that_need_engine,
)
from .engine_vanilla_transformer import SearchEngine
from .ensemble_vanilla_transformer import EnsembleEngine, ensemble_engine
from .identity_vanilla_transformer import generation_difference
from .search_vanilla_transformer import (
    Decoding,
    PaperBeamSearch,
    SentenceLengthCriteria,
    TokenRules,
    WholeSearchCriteria,
    count_candidates,
    greedy_search,
)
from .terms_vanilla_transformer import TermBeamSearch, num_banks

# arguments of the model that the engine reads
ENGINE_ARGUMENTS = (
    "input_ids",
    "encoder_outputs",
    "attention_mask",
    "decoder_input_ids",
    CACHE_NAME,
)
# arguments that `forward` of the released model passes to every encoder
ENCODER_ARGUMENTS = ("input_ids", "attention_mask", "inputs_embeds")
# name of the encoder's `forward` in the released code, which refuses arguments that it cannot read
ENCODER_FORWARD = "VanillaTransformerEncoder.forward"
# searches of the library whose logits the engine can compute
ENGINE_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
# integers that an embedding of torch cannot read, or that a search cannot extend
SMALL_INTEGERS = (torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8)
# arguments of the model that the engine accepts and does not read: they change no token
IGNORED_ARGUMENTS = ("use_cache", "logits_to_keep", "tokenizer")


if TYPE_CHECKING:
    # transformers saves a class of the Hub with all files that its file imports, here also the
    # pipeline, which the model's configuration names
    from .pipeline_vanilla_transformer import TranslationPipeline  # noqa: F401

# for type checkers, the mixin derives from the model class whose attributes its methods use
_Base: Any = PreTrainedModel if TYPE_CHECKING else object


class SearchMixin(_Base):
    """Mixin that adds the paper's search and the inference engine to a model.

    It precedes `GenerationMixin` among the base classes, whose methods it overrides.
    """

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        assistant_model: nn.Module | None = None,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Translate like `generate` of transformers, with further settings of this package.

        Args:
            inputs: Source tokens, [B, S].
            generation_config: Settings of the search; a setting that is None is read from the
                model's own generation configuration.
            logits_processor: Additional logits processors.
            stopping_criteria: Additional criteria that end a translation.
            prefix_allowed_tokens_fn: Function that returns the allowed next tokens.
            synced_gpus: Whether every process runs as many steps as the longest search among all
                processes, as models with sharded weights require (ZeRO-3, FSDP).
            assistant_model: Model that proposes tokens in assisted decoding.
            streamer: Object that receives each token as soon as it is generated.
            kwargs: Settings of the search and inputs of the model, as in transformers, and these
                settings of this package:

                - `length_penalty_alpha`: Alpha of the length penalty, which selects the paper's
                  beam search. Section 6.1.
                - `max_extra_tokens`: Maximum number of tokens of a translation beyond the length of
                  its source. Section 6.1.
                - `precision`: "fp32" or "bf16", in which a CPU computes the linear layers; by
                  default that of the weights. "bf16" needs a CPU with instructions for it.
                - `int8`: Whether to quantize the linear layers to int8.
                - `engine`: "auto" uses the inference engine if its logits agree with those of the
                  model's modules, "off" uses the modules, and "required" refuses a search that the
                  engine cannot run. With "required", an output object contains no KV cache.
                - `ensemble`: List of further models of this class and vocabulary. Each step
                  averages the probabilities of all models.
                - `required_tokens`: For each sentence, a list of terms that its translation must
                  contain, each a list of token ids. The search has `num_beams` beams for each
                  possible number of term tokens in a hypothesis, from 0 on.

        Returns:
            Prompts and translations, [B * num_return_sequences, T], or an output object of
            transformers if `return_dict_in_generate` is set.

        Raises:
            TypeError: If `generation_config` is of another class.
            ValueError: If settings contradict each other, an input is invalid, `engine`,
                `precision`, `int8` or `ensemble` needs the inference engine, and it cannot run this
                search, or the model changes while the engine searches.
        """
        if not isinstance(generation_config, GenerationConfig | None):
            raise TypeError(
                "generation_config must be a GenerationConfig, got "
                f"{type(generation_config).__name__}."
            )
        library_generate = partial(
            super().generate,
            logits_processor=logits_processor,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            synced_gpus=synced_gpus,
            assistant_model=assistant_model,
            streamer=streamer,
        )
        kwargs = plain_numbers(kwargs)
        if kwargs.get("custom_generate") is not None:
            generation_config, length_criteria = self._prepare_custom_generate(
                inputs, generation_config, kwargs
            )
            all_criteria = StoppingCriteriaList([*(stopping_criteria or ()), *length_criteria])
            return library_generate(
                inputs, generation_config, stopping_criteria=all_criteria, **kwargs
            )
        ensemble = kwargs.pop("ensemble", None) or ()
        if ensemble and kwargs.get("encoder_outputs") is not None:
            raise ValueError("encoder_outputs must not be given with ensemble: each model encodes.")
        required_tokens = kwargs.pop("required_tokens", None)
        self._name_inputs(inputs, kwargs)
        # validate early: the library compares these numbers before it checks their types
        check_numbers(kwargs)
        config, model_inputs = self._resolve_settings(generation_config, kwargs)
        check_search_settings(config)
        target_vocab_size = vocab_size_of(self.get_decoder())
        check_search_tokens(config, target_vocab_size)
        check_inputs(self, model_inputs)
        check_length(self.config, source_shape(model_inputs)[0], "source")
        for name in SEARCH_FIELDS:
            kwargs.pop(name, None)
        self._encode_as_forward(config, model_inputs, kwargs)
        source_length, num_sentences = source_shape(model_inputs)
        terms = None
        if required_tokens is not None and any(required_tokens):
            terms = required_tokens
            check_terms(terms, config, num_sentences, target_vocab_size)
            config.num_beams = kwargs["num_beams"] = (config.num_beams or 1) * num_banks(terms)
        mode = config.get_generation_mode(assistant_model)
        check_mode(mode, config, num_sentences, streamer is not None)
        all_criteria = StoppingCriteriaList(stopping_criteria or ())
        if source_length:
            generation_config, length_criteria = self._limit_length(
                config, generation_config, model_inputs, kwargs
            )
            all_criteria += length_criteria
        modules_reason = reason_for_modules(config, mode, model_inputs)
        if synced_gpus:
            modules_reason = modules_reason or "synced_gpus is set"
        engine: Any = self._choose_engine(config, modules_reason, bool(ensemble))
        if ensemble:
            engine = ensemble_engine(self, engine, ensemble, engine_precision(vars(config)))
        all_criteria.append(ChosenSearch(config.length_penalty_alpha, engine, terms))
        if engine is not None and kwargs.get("encoder_outputs") is None:
            memory = engine.encode(kwargs["input_ids"], kwargs.get("attention_mask"))
            kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=memory)
        if engine is not None:
            kwargs[CACHE_NAME] = EngineCache()
        # code of the user that runs during the search may change the models
        calls_user = any((logits_processor, stopping_criteria, prefix_allowed_tokens_fn, streamer))
        with refusing_changes([self, *ensemble] if engine is not None and calls_user else []):
            output = library_generate(
                None, generation_config, stopping_criteria=all_criteria, **kwargs
            )
        if engine is not None and config.return_dict_in_generate:
            output[CACHE_NAME] = None
        return output

    def _name_inputs(self, inputs: Tensor | None, kwargs: dict[str, Any]):
        """Pass each input of the model in the form and under the name that the library reads."""
        if inputs is not None:
            # transformers accepts the source under two names, `inputs` and `input_ids`; a class
            # with an encoder of speech or images names its own
            name = self.main_input_name
            if kwargs.get(name) is not None:
                raise ValueError(f"inputs and {name} are two names of one argument: give one.")
            kwargs[name] = inputs
        for name in ("input_ids", "decoder_input_ids"):
            ids = kwargs.get(name)
            if isinstance(ids, Tensor) and ids.dtype in SMALL_INTEGERS:
                kwargs[name] = ids.long()
        if kwargs.get("encoder_outputs") is not None:
            # a copy, because the library's beam search repeats the rows in place
            kwargs["encoder_outputs"] = copy.copy(output_of_encoder(kwargs["encoder_outputs"]))
        # each version of the library reads the cache under one of two names
        cache = one_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        if cache is not None:
            kwargs[CACHE_NAME] = cache
        # Seq2SeqTrainer passes labels, which no search reads
        kwargs.pop("labels", None)

    def _prepare_custom_generate(
        self,
        inputs: Tensor | None,
        given_config: GenerationConfig | None,
        kwargs: dict[str, Any],
    ) -> tuple[GenerationConfig | None, list[StoppingCriteria]]:
        """Check the settings of a search by custom code, and limit its length as `_limit_length`.

        The settings of the engine are removed from `kwargs`: custom code does not know them.
        """
        config, model_inputs = self._resolve_settings(given_config, kwargs)
        # custom code may combine any length penalties
        config.length_penalty_alpha = None
        check_search_settings(config)
        self._choose_engine(config, "custom_generate is given", False)
        for name in ("precision", "int8", "engine"):
            kwargs.pop(name, None)
        if not any(
            hasattr(each, "max_extra_tokens") for each in (given_config, self.generation_config)
        ):
            # the library refuses a setting that neither configuration has
            kwargs.pop("max_extra_tokens", None)
        if inputs is not None:
            model_inputs[self.main_input_name] = inputs
        self._encode_as_forward(config, model_inputs, kwargs)
        if not source_shape(model_inputs)[0]:
            return given_config, []
        return self._limit_length(config, given_config, model_inputs, kwargs)

    def _own_arguments(self) -> set[str]:
        """Return the arguments that a changed `forward` of the model or a part declares."""
        stacks = self.get_encoder(), self.get_decoder()
        return set().union(*map(own_arguments, (self, self.base_model, *stacks)))

    def _encode_as_forward(
        self, config: GenerationConfig, inputs: dict[str, Any], kwargs: dict[str, Any]
    ):
        """Encode the source here if the library would call the encoder with wrong arguments.

        The library also passes arguments of the decoder or of the head, which the released encoder
        refuses. A changed encoder would get arguments that `forward` does not pass. It would get no
        mask if its `**kwargs` have another name.
        """
        encoder = self.get_encoder()
        is_released = getattr(encoder.forward, "__qualname__", "") == ENCODER_FORWARD
        names = own_arguments(encoder)
        if is_released and not self._own_arguments().difference(names) & kwargs.keys():
            return
        names |= set(ENCODER_ARGUMENTS)
        arguments = {name: value for name, value in inputs.items() if name in names}
        has_source = bool(arguments.keys() - {"attention_mask"})
        if inputs.get("encoder_outputs") is not None or not has_source:
            return
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                arguments[name] = True
        # `forward` passes these arguments even if they are None
        for name in inspect.signature(encoder.forward).parameters:
            if name in ENCODER_ARGUMENTS:
                arguments.setdefault(name)
        kwargs["encoder_outputs"] = output_of_encoder(encoder(**arguments))
        if not source_shape(inputs)[0]:
            # the source is speech or an image, so its length is that of the encoder's output
            inputs["encoder_outputs"] = kwargs["encoder_outputs"]

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]):
        # the search passes the output of the encoder to every `forward`, also to one that declares
        # only `**kwargs`
        known_names = {"encoder_outputs"}
        if not model_kwargs.keys() <= {*RELEASED_ARGUMENTS, *LIBRARY_ARGUMENTS}:
            known_names |= self._own_arguments()
        super()._validate_model_kwargs(
            {name: value for name, value in model_kwargs.items() if name not in known_names}
        )

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ):
        """Prepare the cache of the library; if this cache would be wrong, warn and use no cache."""
        is_of_engine = isinstance(model_kwargs.get(CACHE_NAME), EngineCache)
        if generation_config.use_cache is False or is_of_engine:
            return
        if (reason := reason_against_cache(self.get_decoder())) is not None:
            advice = (
                " To use the cache, set `layer_idx` of the layers to 0, 1, ..., and "
                "`decoder_layers` of the configuration to their number."
            )
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
            cache = model_kwargs.get(CACHE_NAME)
            # a model that reorders a state of its own needs no cache of the library
            if cache is None or cache.get_seq_length() or hasattr(self, "_reorder_cache"):
                return
            reason = reason_against_cached_steps(self, generation_config, model_kwargs)
            advice = ""
            if reason is None:
                return
        message = "%s.generate uses no cache, because %s.%s"
        warn_once(message, type(self).__name__, reason, advice)
        model_kwargs.pop(CACHE_NAME, None)
        generation_config.use_cache = False

    def _resolve_settings(
        self, given_config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Separate the settings of the search from the inputs of the model, as the library does."""
        config = GenerationConfig() if given_config is None else copy.deepcopy(given_config)
        defaults = self.generation_config.to_dict()
        config.update(**defaults, defaults_only=True, allow_custom_entries=True)
        for name in SEARCH_FIELDS:
            setattr(config, name, getattr(config, name, None))
        return config, config.update(**kwargs)

    def _limit_length(
        self,
        config: GenerationConfig,
        given_config: GenerationConfig | None,
        inputs: Mapping[str, Any],
        kwargs: dict[str, Any],
    ) -> tuple[GenerationConfig | None, list[StoppingCriteria]]:
        """Limit the length of translations by their sources.

        The maximum length of the batch is set in `kwargs`, or in a copy of the user's
        configuration, which is returned. The returned criterion limits the length of each sentence.
        """
        prompt_length = self._count_prompt_tokens(config, inputs)
        max_length = self._default_max_length(
            config,
            source_shape(inputs)[0],
            prompt_length,
            self._has_max_length(given_config, kwargs),
        )
        if max_length is not None:
            if given_config is None:
                kwargs["max_length"] = max_length
            else:
                given_config = copy.deepcopy(given_config)
                given_config.max_length = max_length
        if config.max_extra_tokens is None:
            return given_config, []
        sentence_limits = source_lengths(inputs) + config.max_extra_tokens
        return given_config, [SentenceLengthCriteria(sentence_limits, prompt_length)]

    def _has_max_length(
        self, given_config: GenerationConfig | None, kwargs: Mapping[str, Any]
    ) -> bool:
        """Return whether the user has set a maximum length."""
        own_config = self.generation_config
        max_lengths = [
            kwargs.get("max_length"),
            kwargs.get("max_new_tokens"),
            own_config.max_new_tokens,
        ]
        if given_config is not None:
            max_lengths += [given_config.max_length, given_config.max_new_tokens]
        # Seq2SeqTrainer writes the library's default into the model's own configuration, so the
        # default does not count as a maximum that the user has set
        if own_config.max_length not in (None, LIBRARY_MAX_LENGTH):
            return True
        return any(max_length is not None for max_length in max_lengths)

    def _count_prompt_tokens(self, config: GenerationConfig, inputs: Mapping[str, Any]) -> int:
        """Return the number of tokens in the decoder's prompt, including its start token."""
        prompt = inputs.get("decoder_input_ids")
        if prompt is None:
            return 1
        start_id = config.decoder_start_token_id
        start_id = torch.tensor(config.bos_token_id if start_id is None else start_id).to(prompt)
        # the library adds the start token if no sentence begins with it
        return prompt.shape[1] + int((prompt[:, 0] != start_id).all())

    def _default_max_length(
        self, config: GenerationConfig, source_length: int, prompt_length: int, has_max_length: bool
    ) -> int | None:
        """Return the maximum length for the longest source, or None to keep the configured one."""
        has_learned_positions = self.config.position_encoding == "learned"
        # the decoder never reads the last token of a target, so this token needs no position
        longest_target = math.inf
        if has_learned_positions:
            longest_target = self.config.max_position_embeddings + 1
        if config.max_extra_tokens is not None and not has_max_length:
            return min(prompt_length + source_length + config.max_extra_tokens, longest_target)
        length = config.max_length
        if config.max_new_tokens is not None:
            length = prompt_length + config.max_new_tokens
        if length is not None and length > longest_target:
            explanation = ", the prompt plus max_new_tokens"
            if config.max_new_tokens is None:
                explanation = ""
            raise ValueError(
                f"max_length must be at most {longest_target}, one more than the number of learned "
                f"positions, got {length}{explanation}."
            )
        return None

    def _choose_engine(
        self, config: GenerationConfig, modules_reason: str | None, is_ensemble: bool
    ) -> SearchEngine | None:
        """Return the engine that runs this search, or None if the model's modules run it."""
        engine_settings = {
            "ensemble": is_ensemble,
            **settings_that_need_engine(self, vars(config)),
        }
        if config.engine == "off":
            for name, is_set in engine_settings.items():
                if is_set:
                    raise ValueError(f"{name} needs the inference engine, got engine='off'.")
            return None
        engine, reason = None, modules_reason
        if reason is None:
            reason = generation_difference()
        if reason is None:
            engine, reason = engine_for(self, engine_precision(vars(config)))
        if engine is not None:
            return engine
        engine_settings["engine='required'"] = config.engine == "required"
        for name, is_set in engine_settings.items():
            if is_set:
                raise ValueError(
                    f"{name} needs the inference engine, which cannot be used: {reason}."
                )
        # if the decoder cannot use a cache, `_prepare_cache_for_generation` warns instead
        if modules_reason is None and reason_against_cache(self.get_decoder()) is None:
            warn_once(
                "%s.generate uses the model's own modules, not the faster inference engine, "
                "because %s. The translations are those of the model; engine='off' turns this "
                "warning off.",
                type(self).__name__,
                reason,
            )
        return None

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        # the criterion of `stop_strings` reads the tokenizer, but the model does not accept it
        kwargs.pop("tokenizer", None)
        config = generation_config
        choice, other_criteria = separate_choice(stopping_criteria, config)
        library_search = super()._sample
        if choice.engine is not None:
            is_greedy = not (config.do_sample or config.return_dict_in_generate)
            if is_greedy and kwargs.get("streamer") is None:
                decoding = begin_decoding(choice.engine, kwargs, 1)
                return greedy_search(decoding, input_ids, logits_processor, other_criteria, config)
            model = EngineModel(self, choice.engine, kwargs, config, logits_processor)
            library_search = partial(GenerationMixin._sample, model)
        return library_search(
            input_ids, logits_processor, other_criteria, generation_config=config, **kwargs
        )

    def _beam_search(
        self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
    ):
        # the criterion of `stop_strings` reads the tokenizer, but the model does not accept it
        kwargs.pop("tokenizer", None)
        config = generation_config
        choice, other_criteria = separate_choice(stopping_criteria, config)
        alpha, terms = choice.length_penalty_alpha, choice.terms
        if terms is None and (alpha is None or config.do_sample):
            library_search = super()._beam_search
            if choice.engine is not None:
                model = EngineModel(self, choice.engine, kwargs, config, logits_processor)
                logits_processor = model.process
                library_search = partial(GenerationMixin._beam_search, model)
            return library_search(
                input_ids, logits_processor, other_criteria, generation_config=config, **kwargs
            )
        synced_gpus = kwargs.pop("synced_gpus", False)
        decoding: Decoding
        if choice.engine is None:
            decoding = ModuleDecoding(self, config, kwargs, synced_gpus)
        else:
            decoding = begin_decoding(choice.engine, kwargs, config.num_beams)
            # the output contains the scores of all sentences in every step, so a finished sentence
            # must stay in the batch
            decoding.is_fixed = bool(config.return_dict_in_generate)
        search_arguments = (decoding, input_ids, logits_processor, other_criteria, config, alpha)
        if terms is not None:
            return TermBeamSearch(*search_arguments, terms=terms).run()
        return PaperBeamSearch(*search_arguments).run()

    def train(self, mode: bool = True):
        """Set training or evaluation mode; training mode frees the engine's packed weights.

        Args:
            mode: Training mode if true, evaluation mode if false.

        Returns:
            The model.
        """
        if mode:
            forget_engine(self)
        return super().train(mode)


def output_of_encoder(outputs: Any) -> ModelOutput:
    """Return the output of an encoder as an output object of transformers.

    Args:
        outputs: Output object of transformers, or a tuple that begins with the memory.

    Raises:
        ValueError: If the output is neither.
    """
    if isinstance(outputs, tuple | list):
        return BaseModelOutput(*outputs)
    if not isinstance(outputs, ModelOutput):
        raise ValueError(
            "the output of the encoder must be a tuple or an output of transformers, such as "
            f"BaseModelOutput, got {type(outputs).__name__}."
        )
    return outputs


@dataclass(eq=False)
class ChosenSearch(WholeSearchCriteria):
    """Choice of search and engine, in the form of a stopping criterion that never stops a search.

    The library's `generate` passes stopping criteria to the search. So `SearchMixin.generate` can
    pass its choice to `_beam_search` and `_sample` as a criterion.

    Attributes:
        length_penalty_alpha: Alpha of the paper's beam search; None for the library's search.
        engine: Inference engine, or None to run the model's modules.
        terms: For each sentence, the terms that its translation must contain, as token ids.
    """

    length_penalty_alpha: float | None
    engine: SearchEngine | None
    terms: Sequence[Sequence[Sequence[int]]] | None = None

    def is_met(self) -> bool:
        """Return False."""
        return False


def separate_choice(
    stopping_criteria: StoppingCriteriaList, config: GenerationConfig
) -> tuple[ChosenSearch, StoppingCriteriaList]:
    """Separate the choice of `SearchMixin.generate` from the other stopping criteria.

    Args:
        stopping_criteria: Criteria, as `generate` has prepared them.
        config: Generation configuration, as `generate` has prepared it.

    Returns:
        The choice and the other criteria. If there is no choice among the criteria, it is the
        model's modules with the `length_penalty_alpha` of the configuration.
    """
    choices = [each for each in stopping_criteria if isinstance(each, ChosenSearch)]
    others = [each for each in stopping_criteria if not isinstance(each, ChosenSearch)]
    if not choices:
        choices = [ChosenSearch(getattr(config, "length_penalty_alpha", None), None)]
    return choices[0], StoppingCriteriaList(others)


def begin_decoding(
    engine: SearchEngine | EnsembleEngine, model_kwargs: Mapping[str, Any], num_beams: int
) -> Decoding:
    """Return the decoder of an engine for the memory of a batch, before its first step.

    Args:
        engine: Inference engine of one model or several.
        model_kwargs: Encoder outputs and source mask, repeated for each beam, [B * K, ...].
        num_beams: Beam size, K.

    Returns:
        Decoder with one row for each sentence.
    """
    memory = model_kwargs["encoder_outputs"].last_hidden_state
    mask = model_kwargs.get("attention_mask")
    return engine.begin(memory[::num_beams], None if mask is None else mask[::num_beams])


class EngineCache(EncoderDecoderCache):
    """Empty stand-in for the engine's cache: the library reorders beams only if it has a cache."""

    def __init__(self):
        super().__init__(DynamicCache(), DynamicCache())


class EngineModel:
    """Stand-in for the model in a search of the library; the engine computes its logits.

    The methods here replace those that read or change the inputs of a step; all other attributes
    are those of the model. If the logits processors allow it, a beam search receives only the most
    probable tokens of each hypothesis, because the library's passes over the whole vocabulary would
    take as long as the engine.

    Args:
        model: Model that is replaced in the search.
        engine: Inference engine of the model.
        model_kwargs: Encoder outputs and source mask, repeated for each beam, [B * K, ...].
        config: Generation configuration, as `generate` has prepared it.
        processors: Logits processors of the search.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: SearchEngine,
        model_kwargs: Mapping[str, Any],
        config: GenerationConfig,
        processors: LogitsProcessorList,
    ):
        self._model, self._num_beams = model, config.num_beams
        self._decoding = begin_decoding(engine, model_kwargs, self._num_beams)
        self._processors = processors
        self._rules = None
        if self._num_beams > 1 and not (
            config.do_sample or config.output_scores or config.output_logits
        ):
            num_end_tokens = config._eos_token_tensor.shape[0]
            num_candidates = count_candidates(num_end_tokens, self._num_beams)
            self._rules = TokenRules.of(processors, num_candidates)
        # log-probabilities and tokens of the candidates in this step, [B * K, C] each; None if the
        # search receives all tokens
        self._step_candidates: tuple[Tensor, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, input_ids: Tensor, **kwargs: Any) -> Seq2SeqLMOutput:
        """Score the next token.

        Args:
            input_ids: All tokens of each hypothesis, [B * K, T].
            kwargs: Unused.

        Returns:
            Logits of all tokens, [B * K, 1, V], or log-probabilities of the candidates,
            [B * K, 1, C].
        """
        ids = input_ids.unflatten(0, (-1, self._num_beams))  # [B, K, T]
        candidates = None if self._rules is None else self._rules.select(self._decoding, ids)
        if candidates is None:
            self._step_candidates = None
            return Seq2SeqLMOutput(logits=self._row_of_each_beam(self._decoding.step(ids))[:, None])
        scores, tokens = map(self._row_of_each_beam, candidates)
        self._step_candidates = scores, tokens
        return Seq2SeqLMOutput(logits=scores[:, None])

    def _row_of_each_beam(self, numbers: Tensor) -> Tensor:
        """Return one row for each beam, [B * K, ...]; a first step may return one per sentence."""
        num_repeats = self._num_beams // numbers.shape[1]
        return numbers.flatten(0, 1).repeat_interleave(num_repeats, dim=0)

    def process(self, input_ids: Tensor, log_probs: Tensor) -> Tensor:
        """Return the processed log-probabilities of a step, [B * K, V or C].

        `TokenRules` has already applied the processors to the log-probabilities of candidates.
        """
        if self._step_candidates is None:
            return self._processors(input_ids, log_probs)
        return self._step_candidates[0]

    def _get_top_k_continuations(self, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        scores, sequences, origins = self._model._get_top_k_continuations(**kwargs)
        if self._step_candidates is not None:
            position = kwargs["cur_len"]
            rows = origins[:, :, position - kwargs["decoder_prompt_len"]].long()
            # the library stored the index of each candidate as a token: replace it by the token
            sequences[:, :, position] = self._step_candidates[1][rows, sequences[:, :, position]]
        return scores, sequences, origins

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        """Return the inputs of a step."""
        return {"input_ids": input_ids}

    def _prefill(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Seq2SeqLMOutput:
        return self(input_ids)

    def _update_model_kwargs_for_generation(
        self, outputs: Seq2SeqLMOutput, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        return model_kwargs

    def _reorder_cache(self, cache: Cache, rows: Tensor) -> Cache:
        # the library's cache stays empty, because the engine has its own
        self._decoding.reorder(rows.view(-1, self._num_beams) % self._num_beams)
        return cache


def reason_for_modules(
    config: GenerationConfig, mode: GenerationMode, inputs: Mapping[str, Any]
) -> str | None:
    """Return the reason why a search needs the model's own modules, or None.

    Args:
        config: Settings of the search.
        mode: Kind of search that the library derives from the settings.
        inputs: Inputs of the model.

    Returns:
        A clause that names the setting or input, or None if the engine can run the search.
    """
    if mode not in ENGINE_MODES:
        return f"this is {mode.value.replace('_', ' ')}"
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            return f"{name} is set"
    if config.return_dict_in_generate and config.engine != "required":
        return (
            "return_dict_in_generate is set, and the engine returns no cache "
            "(engine='required' allows this)"
        )
    if config.use_cache is False:
        return "use_cache is False"
    if config.cache_implementation is not None:
        return f"cache_implementation is {config.cache_implementation!r}"
    if config.eos_token_id is None:
        return "eos_token_id is None"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size is set"
    if inputs.get(CACHE_NAME) is not None:
        return "a cache is given"
    if inputs.get("input_ids") is None and inputs.get("encoder_outputs") is None:
        return "input_ids are not given"
    mask = inputs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or not mask.bool().any(dim=1).all()):
        return "attention_mask is not [B, S] with a token in each row"
    for name in ENGINE_ARGUMENTS:
        value = inputs.get(name)
        tensor = value[0] if name == "encoder_outputs" and value is not None else value
        # a class of its own may override the functions of torch
        if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
            return f"{name} is of the class {type(tensor).__name__}"
    for name, value in inputs.items():
        # an `output_` option that is False has no effect
        is_empty = value is None or (value is False and name.startswith("output_"))
        if name not in (*ENGINE_ARGUMENTS, *IGNORED_ARGUMENTS) and not is_empty:
            return f"{name} is given"
    return None


def source_shape(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the length of the longest source and the number of sentences.

    Args:
        inputs: Inputs of the model.

    Returns:
        S and B; both are 0 if there is no source.
    """
    encoder_outputs = inputs.get("encoder_outputs")
    for source in (
        None if encoder_outputs is None else encoder_outputs[0],
        inputs.get("input_ids"),
        inputs.get("inputs_embeds"),
    ):
        if source is not None:
            return source.shape[1], source.shape[0]
    return 0, 0


def source_lengths(inputs: Mapping[str, Any]) -> Tensor:
    """Return the number of tokens of each source.

    Args:
        inputs: Inputs of the model.

    Returns:
        Lengths, [B].
    """
    mask = inputs.get("attention_mask")
    if mask is not None:
        return mask.sum(dim=-1).long()
    length, num_sentences = source_shape(inputs)
    return torch.full((num_sentences,), length)


def set_paper_search(
    model: Any, num_beams: int = 4, length_penalty_alpha: float = 0.6, max_extra_tokens: int = 50
):
    """Make the search of section 6.1 the default of a model.

    Args:
        model: Model whose generation configuration is replaced.
        num_beams: Beam size.
        length_penalty_alpha: Alpha of the length penalty.
        max_extra_tokens: Maximum number of tokens by which a translation is longer than its source.
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


__all__ = ["SearchMixin", "set_paper_search"]
