"""Steps of a search with the model's own modules, and their KV cache.

`ModuleDecoding` calls the modules. Code that a user has changed may read earlier tokens that no
cache stores, such as a moving average over positions. `reason_against_cached_steps` compares the
logits with and without a cache, so that `generate` uses no cache for such a model.
"""

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import Seq2SeqLMOutput

from .checks_vanilla_transformer import vocab_size_of
from .cores_vanilla_transformer import shared_cores
from .deviations_vanilla_transformer import logit_difference, tolerance_of
from .identity_vanilla_transformer import (
    attention_difference,
    computing_modules,
    first_difference,
)
from .search_vanilla_transformer import Decoding

# name of the KV cache in model outputs and in the arguments that `generate` passes to the model:
# `past_key_values` in transformers before 5.24
CACHE_NAME = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
# cache index of an attention that does not have the attribute
NO_INDEX = "no attribute"
# numbers of target tokens and of sentences whose logits are compared with and without a cache
NUM_COMPARED_TOKENS, NUM_COMPARED_SENTENCES = 6, 8
# for each changed model: its state, and the reason against a cache in this state, or None
_reasons: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str | None]] = weakref.WeakKeyDictionary()


def one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return the cache that is given under one of its two names, or None.

    Args:
        cache: The cache under its name from transformers 5.24 on.
        past_key_values: The cache under its name before transformers 5.24.

    Raises:
        ValueError: If both are given.
    """
    if cache is not None and past_key_values is not None:
        raise ValueError(
            "cache and past_key_values are two names of one argument: give one, got both. Prefix "
            "tuning of PEFT gives both with transformers 5.24: search with transformers 5.23."
        )
    return past_key_values if cache is None else cache


def decoder_cache(
    decoder: PreTrainedModel,
    cache: Cache | None,
    past_key_values: Cache | None,
    use_cache: bool | None,
) -> EncoderDecoderCache | None:
    """Return the cache that a decoder reads and extends: the given one, a new one, or None.

    Args:
        decoder: Decoder with `layers` and a configuration.
        cache: Given cache, under its name from transformers 5.24 on.
        past_key_values: Given cache, under its name before transformers 5.24.
        use_cache: Whether to create a cache if none is given and each layer has its own index.

    Raises:
        ValueError: If a cache is given under both names, two layers use the same cache index, or
            there are more layers than in the configuration.
    """
    cache = one_cache(cache, past_key_values)
    is_deprecated = past_key_values is not None and CACHE_NAME == "cache"
    if is_deprecated and not torch.compiler.is_compiling():
        message = "`past_key_values` is deprecated in transformers 5.24: use `cache`."
        warnings.warn(message, FutureWarning, stacklevel=3)
    if cache is None and not use_cache:
        return None
    if (reason := reason_against_cache(decoder)) is not None:
        if cache is None:
            return None
        raise ValueError(
            f"each layer of the decoder must have its own cache index, but {reason}: set "
            "`layer_idx` of the layers to 0, 1, ..., and `decoder_layers` of the configuration to "
            "their number, or set use_cache=False."
        )
    if isinstance(cache, EncoderDecoderCache):
        return cache
    # a given cache of another class contains the target's keys and values only, so those of the
    # memory are computed again
    self_attention_cache = DynamicCache(config=decoder.config) if cache is None else cache
    return EncoderDecoderCache(self_attention_cache, DynamicCache(config=decoder.config))


def reason_against_cache(decoder: Any) -> str | None:
    """Return the reason why a KV cache does not fit the layers of a decoder, or None.

    Args:
        decoder: Decoder, with a configuration if it has layers; attentions that do not have the
            attribute `layer_idx` are not checked.

    Returns:
        A clause that names the cache indices or the number of layers, or None if each layer has its
        own index, and the cache that the library creates has as many layers.
    """
    layers = getattr(decoder, "layers", ())
    if not isinstance(layers, Iterable):
        # a recurrent decoder, for example
        return None
    for attention_name in ("self_attention", "cross_attention"):
        indices = [index for layer in layers for index in _cache_indices(layer, attention_name)]
        if NO_INDEX in indices:
            continue
        if indices != list(range(len(indices))):
            return f"the layers of the decoder have the cache indices {indices} in {attention_name}"
        if indices and len(indices) > decoder.config.decoder_layers:
            return (
                f"the decoder has {len(indices)} layers, and decoder_layers of its configuration "
                f"is {decoder.config.decoder_layers}"
            )
    return None


def _cache_indices(layer: nn.Module, attention_name: str) -> list[Any]:
    """Return the cache indices of a layer's attentions, also of a layer that another one wraps."""
    attention = getattr(layer, attention_name, None)
    attentions = [attention]
    if attention is None:
        attentions = [
            module
            for name, module in layer.named_modules()
            if name.rpartition(".")[2] == attention_name
        ]
    return [getattr(attention, "layer_idx", NO_INDEX) for attention in attentions] or [NO_INDEX]


def cached_length(cache: EncoderDecoderCache) -> int | Tensor:
    """Return the number of target tokens in a cache.

    Args:
        cache: Cache; a changed layer may store nothing in it, so the first layer that does counts.
    """
    own_cache = cache.self_attention_cache
    indices = (index for index, layer in enumerate(own_cache.layers) if layer.is_initialized)
    return own_cache.get_seq_length(next(indices, 0))


def layers_without_cache(decoder: PreTrainedModel, cache: Cache) -> list[int]:
    """Return the indices of the layers that have stored no keys and values in a cache.

    Args:
        decoder: Decoder; one without a list of layers, such as a recurrent one, counts as a layer.
        cache: Cache of self-attention or of cross-attention, after a step.
    """
    layers = getattr(decoder, "layers", None)
    num_layers = len(layers) if isinstance(layers, Sized) else 1
    stored = {index for index, layer in enumerate(cache.layers) if layer.is_initialized}
    return [index for index in range(num_layers) if index not in stored]


class ModuleDecoding(Decoding):
    """Decoder that runs the model's own modules during one search.

    Finished sentences stay in the batch, as in transformers: what an edited module computes for a
    sentence may depend on the others, for example in a dynamically quantized layer.

    Args:
        model: A model with `GenerationMixin`.
        config: Generation configuration, as `generate` has prepared it.
        model_kwargs: Encoder outputs, source mask and KV cache, repeated for each beam.
        synced_gpus: Whether every process runs as many steps as the longest search among all
            processes.
    """

    is_fixed = True

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        synced_gpus: bool = False,
    ):
        self.model = model
        self.config = config
        self.model_kwargs = model_kwargs
        self.synced_gpus = synced_gpus
        self.is_first_step = True
        self.step_inputs: dict[str, Any] = {}
        self.step_outputs: list[Any] = []
        self.call_model = model
        if model._valid_auto_compile_criteria(model_kwargs, config):
            self.call_model = model.get_compiled_call(config.compile_config)

    def step(self, ids: Tensor) -> Tensor:
        """Read the tokens that were added since the last call, and score the next token.

        Args:
            ids: All tokens of each hypothesis, [B, K, T].

        Returns:
            Logits in float32, [B, K, V].
        """
        shared_cores.update()
        self.num_sentences, self.num_beams, length = ids.shape
        # tell the other processes that this one has not finished
        self.model._has_unfinished_sequences(False, self.synced_gpus, device=ids.device)
        cache = self.model_kwargs.get(CACHE_NAME)
        num_unseen_tokens = None if cache is None else 1
        if cache is not None and self.is_first_step:
            num_unseen_tokens = length - int(cache.get_seq_length())
        self.step_inputs = self.model.prepare_inputs_for_generation(
            ids.flatten(0, 1),
            next_sequence_length=num_unseen_tokens,
            is_first_iteration=self.is_first_step,
            **self.model_kwargs,
        )
        outputs = self._run_step()
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, is_encoder_decoder=True
        )
        if self.config.return_dict_in_generate:
            self.step_outputs.append(outputs)
        logits = outputs.logits[:, -1].to(ids.device, torch.float32)  # [B * K, V]
        return logits.view(*ids.shape[:2], -1)

    def _run_step(self) -> Any:
        # the first step reads the whole prompt: its shape would need a compilation of its own
        call_model = self.model if self.is_first_step else self.call_model
        self.is_first_step = False
        return call_model(**self.step_inputs, return_dict=True)

    def reorder(self, parents: Tensor, kept_sentences: Tensor | None = None):
        """Reorder the hypotheses after a step.

        Args:
            parents: Index of the hypothesis that each new hypothesis continues, within its
                sentence, [B, K].
            kept_sentences: None, because all sentences stay in the batch.
        """
        cache = self.model_kwargs.get(CACHE_NAME)
        if cache is None:
            return
        sentences = torch.arange(self.num_sentences, device=parents.device)
        rows = (sentences[:, None] * self.num_beams + parents).flatten()
        if hasattr(self.model, "_reorder_cache"):
            self.model_kwargs[CACHE_NAME] = self.model._reorder_cache(cache, rows)
        else:
            # all beams of a sentence have the same memory, so only the keys and values of
            # self-attention are reordered
            getattr(cache, "self_attention_cache", cache).reorder_cache(rows)

    def finish(self):
        """Repeat the last step until all processes have finished: they wait for one another."""
        if not self.synced_gpus:
            return
        device = self.model.device
        while self.model._has_unfinished_sequences(True, self.synced_gpus, device=device):
            self._run_step()

    def outputs(self) -> dict[str, Any]:
        """Return the model's part of an output object: attentions, hidden states and KV cache."""
        encoder_outputs = self.model_kwargs["encoder_outputs"]
        outputs = {CACHE_NAME: self.model_kwargs.get(CACHE_NAME)}
        output_names = {
            "output_attentions": ("attentions", ("decoder_attentions", "cross_attentions")),
            "output_hidden_states": ("hidden_states", ("decoder_hidden_states",)),
        }
        for setting, (encoder_name, decoder_names) in output_names.items():
            if getattr(self.config, setting):
                outputs[f"encoder_{encoder_name}"] = encoder_outputs.get(encoder_name)
                for name in decoder_names:
                    outputs[name] = tuple(getattr(step, name) for step in self.step_outputs) or None
        return outputs


def reason_against_cached_steps(
    model: Any, config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    """Return why a model must read the whole target in each step, or None if it can use a cache.

    The released code can use a cache. Changed code is called for a few tokens: with a cache for
    each token alone, and without a cache for the whole target so far. Between two steps, the beams
    are swapped. The result is kept until the beam size, or code, settings or weights of the model
    change.

    Args:
        model: Model with `SearchMixin`.
        config: Generation configuration, as `generate` has prepared it.
        model_kwargs: Encoder outputs, source mask and other arguments, repeated for each beam.

    Returns:
        A clause that states the difference.
    """
    if (first_difference(computing_modules(model)) or attention_difference(model)) is None:
        return None
    state = [config.num_beams, *_state_of(model)]
    known = _reasons.get(model)
    if known is None or known[0] != state:
        devices = [model.device] if model.device.type == "cuda" else []
        # modules that draw random numbers must not change the random numbers of the search
        with torch.random.fork_rng(devices):
            known = _reasons[model] = state, _compare_steps(model, config, model_kwargs)
    return known[1]


def _compare_steps(
    model: Any, config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    decoder, decoder_config = model.get_decoder(), model.config.get_text_config(decoder=True)
    num_beams = config.num_beams or 1
    num_sentences = len(model_kwargs["encoder_outputs"][0]) // num_beams
    num_tokens = NUM_COMPARED_TOKENS
    if getattr(decoder_config, "position_encoding", None) == "learned":
        num_tokens = min(num_tokens, decoder_config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    vocab_size = min(vocab_size_of(decoder), decoder_config.vocab_size)
    shape = num_sentences, num_beams, num_tokens
    ids = torch.randint(vocab_size, shape, generator=generator).to(model.device)
    # a hypothesis contains no padding, and all beams of a sentence begin with the same token
    ids[ids == decoder_config.pad_token_id] = int(decoder_config.pad_token_id == 0)
    ids[:, :, 0] = ids[:, :1, 0]

    def logits_of_steps(cache: EncoderDecoderCache | None) -> Tensor:
        inputs = {**model_kwargs, CACHE_NAME: cache, "use_cache": cache is not None}
        decoding = ModuleDecoding(model, config, inputs)
        target, logits = ids[:, :, :1], []
        for position in range(1, num_tokens + 1):
            # the slice is copied, so that the memory of the other sentences' logits is freed
            logits.append(decoding.step(target)[:NUM_COMPARED_SENTENCES].clone())
            # each beam continues the one with which it changes places
            decoding.reorder(torch.arange(num_beams, device=ids.device).flip(0).expand(shape[:2]))
            target = torch.cat((target.flip(1), ids[:, :, position : position + 1]), dim=2)
        return torch.cat(logits).flatten(0, 1)  # [T * B * K, V]

    try:
        expected = logits_of_steps(None)
    except Exception:
        # the search itself shows the error
        return None
    if not expected.equal(logits_of_steps(None)):
        # no comparison is possible if the logits are random, for example with dropout
        return None
    cache = EncoderDecoderCache(*(DynamicCache(config=decoder_config) for _ in range(2)))
    try:
        logits = logits_of_steps(cache)
    except Exception as error:
        return f"the model fails with a cache ({type(error).__name__}: {error})"
    tolerance, is_exact = tolerance_of(model)
    bias = getattr(model.get_output_embeddings(), "bias", None)
    # the bias of a quantized layer is a method
    bias = bias if isinstance(bias, Tensor) else None
    if logit_difference(logits, expected, bias, is_exact) <= tolerance:
        return None
    if indices := layers_without_cache(decoder, cache.self_attention_cache):
        return f"the layers {indices} of {type(decoder).__name__} store nothing in it"
    return "the logits with a cache differ from those of the whole target"


def _state_of(model: nn.Module) -> list[Any]:
    """Return all that the comparison depends on: code, settings and versions of the weights."""
    state: list[Any] = [repr(vars(model.config))]
    for module_class in {type(module): None for module in model.modules()}:
        for base in module_class.__mro__:
            if base not in (nn.Module, object):
                state += map(id, vars(base).values())
    for module in model.modules():
        attributes = vars(module)
        for value in attributes.values():
            is_simple = isinstance(value, int | float | str)
            # a tensor that is no weight may be a state, which each call replaces
            if not isinstance(value, Tensor):
                state.append(value if is_simple else id(value))
        for hooks in (attributes["_forward_hooks"], attributes["_forward_pre_hooks"]):
            state += map(id, hooks.values())
        for weight in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
            # tensors that were created in inference mode have no version
            if weight is not None and not weight.is_inference():
                state += [id(weight), weight._version]
    return state
