"""Search with a model of transformers on the inference engine, without a copy of its weights.

The converted model shares its parameters with its source, so both change together. Before each use,
`SharedConversion` checks everything else that the conversion has read, and converts again after a
change.
"""

from collections.abc import Iterator
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    FSMTForConditionalGeneration,
    M2M100ForConditionalGeneration,
    MarianMTModel,
    PreTrainedModel,
)

from ..engine_checks_vanilla_transformer import engine_for, reason_against_engine
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .check import refuse_modified_source
from .fsmt import from_fsmt
from .m2m100 import from_m2m100
from .marian import from_marian
from .weights import BART_RENAMES, rename_weights

# pipelines in several threads may share a model. The lock is global, because a model with a lock as
# an attribute could not be pickled
_LOCK = Lock()
CONVERSIONS = {
    MarianMTModel: from_marian,
    FSMTForConditionalGeneration: from_fsmt,
    M2M100ForConditionalGeneration: from_m2m100,
}
# classes that count the positions of all tokens but padding tokens; the converted model counts the
# positions by the attention mask
COUNTING_BY_TOKEN = (FSMTForConditionalGeneration, M2M100ForConditionalGeneration)
# our names of the embeddings and of the output projection, by the names in transformers
OUR_EMBEDDING_NAMES = {
    "model.shared.weight": (
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
    ),
    "model.encoder.embed_tokens.weight": ("model.encoder.embed_tokens.weight",),
    "model.decoder.embed_tokens.weight": ("model.decoder.embed_tokens.weight",),
    "model.decoder.output_projection.weight": ("lm_head.weight",),
}
# types of the module attributes that a conversion may have read
FUNCTION_TYPES = (FunctionType, BuiltinFunctionType, MethodType)
SETTING_TYPES = (bool, int, float, str, type(None), *FUNCTION_TYPES)
# attributes of these types that no conversion reads
UNREAD_ATTRIBUTES = ("training", "_is_hf_initialized")


class SharedConversion:
    """A model of transformers and its conversion, which share their weights.

    Args:
        model: Any model of transformers.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._converted: VanillaTransformerForConditionalGeneration | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._state_at_conversion: tuple[Any, ...] = ()
        # state of the model at the last refused conversion, and the reason. A refused conversion is
        # not tried again for the same state, because a conversion is slow
        self._refusal: tuple[list[Any], str] | None = None
        # precision, dtype and device for which `engine_for` has accepted the model. A call of
        # `engine_for` reads all packed weights, and `generate` makes such a call anyway
        self._accepted_settings: set[tuple[str | None, torch.dtype, torch.device]] = set()

    def for_engine(
        self, precision: str | None = None, has_padding_tokens: bool = False
    ) -> tuple[VanillaTransformerForConditionalGeneration | None, str | None]:
        """Return the converted model, if the inference engine computes what the source computes.

        Args:
            precision: Precision of the linear layers, as in `engine_for`.
            has_padding_tokens: Whether a text contains the padding token.

        Returns:
            The converted model, with the source's generation configuration, and None; or None and
            the reason, a clause.
        """
        convert = CONVERSIONS.get(type(self._model))
        if convert is None:
            return None, f"{type(self._model).__name__} is not of an architecture that converts"
        if has_padding_tokens and issubclass(type(self._model), COUNTING_BY_TOKEN):
            return None, "a text contains the padding token, which has no position of its own"
        with _LOCK:
            try:
                refuse_modified_source(self._model, f"transformers' {type(self._model).__name__}")
            except ValueError as error:
                return None, str(error).removesuffix(".")
            if self._refusal is not None and self._refusal[0] == self._whole_state():
                return None, self._refusal[1]
            if self._converted is None or not self._is_unchanged(self._converted):
                try:
                    # keep torch's random state: the user may have set the seed of a search
                    with torch.random.fork_rng(devices=[]):
                        converted = convert(self._model, copy=False)
                except ValueError as error:
                    self._converted = None
                    refusal = str(error).removesuffix(".")
                    self._refusal = self._whole_state(), refusal
                    return None, refusal
                self._refusal = None
                self._converted = converted.to(self._model.device, self._model.dtype)
                self._accepted_settings.clear()
                self._share(self._converted)
            self._converted.generation_config = self._model.generation_config
            engine_settings = precision, self._model.dtype, self._model.device
            if engine_settings in self._accepted_settings:
                reason = reason_against_engine(self._converted, precision)
            else:
                _, reason = engine_for(self._converted, precision)
            if reason is not None:
                return None, reason
            self._accepted_settings.add(engine_settings)
            return self._converted, None

    def _share(self, converted: VanillaTransformerForConditionalGeneration):
        self._parameters = dict(self._model.named_parameters())
        converted_parameters = dict(converted.named_parameters(remove_duplicate=False))
        for name, parameter in self._parameters.items():
            (our_layer_name,) = rename_weights({name: parameter}, BART_RENAMES)
            for our_name in OUR_EMBEDDING_NAMES.get(name, (our_layer_name,)):
                # the converted model computes Marian's sinusoids, so it has no parameter for them
                if our_name in converted_parameters:
                    module_name, _, parameter_name = our_name.rpartition(".")
                    setattr(converted.get_submodule(module_name), parameter_name, parameter)
        self._state_at_conversion = tuple(self._unshared_state(converted))

    def _is_unchanged(self, converted: VanillaTransformerForConditionalGeneration) -> bool:
        parameters = dict(self._model.named_parameters())
        if parameters.keys() != self._parameters.keys():
            return False
        if any(parameters[name] is not self._parameters[name] for name in parameters):
            return False
        state = tuple(self._unshared_state(converted))
        return len(state) == len(self._state_at_conversion) and all(
            map(_is_equal, state, self._state_at_conversion)
        )

    def _unshared_state(self, converted: nn.Module) -> Iterator[Any]:
        """Yield everything that the conversion has read, except the weights that it shares."""
        shared_ids = {id(parameter) for parameter in converted.parameters()}
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if id(tensor) not in shared_ids:
                yield tensor.detach().clone()
        yield from self._settings()

    def _whole_state(self) -> list[Any]:
        """Return everything that a conversion reads; tensors by their addresses and versions."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        states = [
            (
                tensor.data_ptr() if tensor.layout is torch.strided else id(tensor),
                None if tensor.is_inference() else tensor._version,
                tensor.dtype,
                tensor.device,
            )
            for tensor in tensors
        ]
        return [*states, *self._settings()]

    def _settings(self) -> Iterator[Any]:
        """Yield the configuration, and the classes and settings of all modules."""
        yield dict(vars(self._model.config))
        for name, module in self._model.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, SETTING_TYPES) and attribute not in UNREAD_ATTRIBUTES:
                    yield name, attribute, value
            yield name, type(module)


def _is_equal(now: Any, before: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        are_comparable = (now.device, now.dtype) == (before.device, before.dtype)
        return are_comparable and torch.equal(now, before)
    return type(now) is type(before) and now == before
