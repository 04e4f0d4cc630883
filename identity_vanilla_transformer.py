"""Check that a model's modules run exactly the code of this release.

The inference engine computes the released equations. It may replace a model's modules only if each
module that computes is an instance of a released class with the released code. This file detects an
edited file, a subclass, a patched method or a user's own attention function. If it finds one, the
engine is not used and the model's own modules run.

Code is compared by digests of its syntax tree, without comments, docstrings and annotations. An
unedited copy on the Hub therefore counts as released. `make digests` updates `RELEASED` after a
change of the model.
"""

import ast
import contextlib
import hashlib
import importlib
import inspect
import logging
import operator
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
)
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file

logger = logging.getLogger(__name__)

# methods that only initialize weights: an edit of them does not change what a loaded model computes
INITIALIZING_METHODS = ("_init_weights",)
# attributes that transformers adds to a class while it is created
ADDED_BY_LIBRARY = {"config_class", "_auto_class", "forward"}
# wrappers that decorators of transformers and torch put around a released `forward`; they do not
# change its result
LIBRARY_WRAPPERS = {
    "GradientCheckpointingLayer.__init_subclass__.<locals>.forward_with_checkpointing",
    "can_return_tuple.<locals>.wrapper",
    "capture_outputs.<locals>.wrapped_fn.<locals>.wrapper",
    "context_decorator.<locals>.decorate_context",
    "deprecate_kwarg.<locals>.wrapper.<locals>.wrapped_func",
    "merge_with_config_defaults.<locals>.wrapper",
    # torch 2.15 names a wrapper of `context_decorator` after its context
    "no_grad",
}
# with the separator, so that the folder of another package, such as torchvision, is not included
LIBRARY_FOLDERS = tuple(f"{module.__path__[0]}{os.sep}" for module in (torch, transformers))
# Python modules whose hooks change no result: hooks that record outputs, and hooks that make the
# output of the embeddings require gradients
HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils")
# fields of a configuration that the library's masks and caches read
MASKING_FIELDS = ("attention_chunk_size", "kv_sharing_modes", "layer_types", "sliding_window")
# methods that a search calls if the model has them; the released class does not
OPTIONAL_METHODS = ("_reorder_cache",)
# methods that tools replace to print a tensor in another way
DESCRIBING_METHODS = ("__dir__", "__format__", "__repr__", "__str__")
# elementwise activations of torch
POINTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)
# allowed classes of each kind of module: classes of torch, or names of released classes
LINEAR, EMBEDDING = (nn.Linear, "OneDnnLinear"), (nn.Embedding,)
DROPOUT, NORM = (nn.Dropout, nn.Identity, "CheapDropout"), (nn.LayerNorm, nn.Identity)
MODULE_LIST, HEAD = (nn.ModuleList,), ("VanillaTransformerForConditionalGeneration",)
# allowed activations; every class of transformers.activations is allowed too
ACTIVATION = (*POINTWISE, nn.Identity)
# classes of torch in models of transformers and in torch's own Transformer
LIBRARY_CLASSES = (
    nn.Dropout,
    nn.Embedding,
    nn.LayerNorm,
    nn.Linear,
    nn.ModuleList,
    nn.MultiheadAttention,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
)
ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), LINEAR)
ENCODER_LAYER = {
    "self_attention": ("MultiHeadAttention",),
    "self_attention_norm": NORM,
    "feed_forward": ("FeedForward",),
    "feed_forward_norm": NORM,
    "dropout": DROPOUT,
}
STACK = {"embed_tokens": EMBEDDING, "positions": ("PositionalEncoding",), "dropout": DROPOUT}
# for each released class, the allowed classes of its submodules; a list stands for a ModuleList
SUBMODULES: dict[str, dict[str, Any]] = {
    "VanillaTransformerForConditionalGeneration": {
        "model": ("VanillaTransformerModel",),
        "lm_head": LINEAR,
    },
    "VanillaTransformerModel": {
        "encoder": ("VanillaTransformerEncoder",),
        "decoder": ("VanillaTransformerDecoder",),
    },
    "VanillaTransformerEncoder": {**STACK, "layers": ["EncoderLayer"], "norm": NORM},
    "VanillaTransformerDecoder": {**STACK, "layers": ["DecoderLayer"], "norm": NORM},
    "EncoderLayer": ENCODER_LAYER,
    "DecoderLayer": {
        **ENCODER_LAYER,
        "cross_attention": ("MultiHeadAttention",),
        "cross_attention_norm": NORM,
    },
    "MultiHeadAttention": ATTENTION,
    "FeedForward": {"fc1": LINEAR, "fc2": LINEAR, "activation": ACTIVATION, "dropout": DROPOUT},
    "PositionalEncoding": {"table": EMBEDDING},
}
# submodules that exist only in some configurations
OPTIONAL_SUBMODULES = {("PositionalEncoding", "table")}


def computing_modules(model: nn.Module) -> list[tuple[str, Any, Any]]:
    """Return the modules that the released code of a model computes with.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.

    Returns:
        For each module, its name, the module itself or None if it is missing, and its allowed
        classes: classes of torch, names of released classes, or `ACTIVATION`.
    """
    modules: list[tuple[str, Any, Any]] = []
    _collect_modules("", model, HEAD, modules)
    return modules


def _collect_modules(
    name: str, module: Any, allowed_classes: Any, modules: list[tuple[str, Any, Any]]
):
    modules.append((name, module, allowed_classes))
    class_name = type(module).__name__
    submodules = SUBMODULES.get(class_name)
    if submodules is None:
        return
    children = vars(module)["_modules"]
    for child_name, allowed_classes in submodules.items():
        child_path = f"{name}.{child_name}" if name else child_name
        child = children.get(child_name)
        if child is None and (class_name, child_name) in OPTIONAL_SUBMODULES:
            continue
        if type(allowed_classes) is not list:
            _collect_modules(child_path, child, allowed_classes, modules)
            continue
        modules.append((child_path, child, MODULE_LIST))
        for index, layer in enumerate(child if type(child) is nn.ModuleList else ()):
            _collect_modules(f"{child_path}.{index}", layer, tuple(allowed_classes), modules)


def first_difference(modules: list[tuple[str, Any, Any]]) -> str | None:
    """Return the first difference between a model's code and the code of this release.

    Args:
        modules: Result of `computing_modules`; the first module is the model.

    Returns:
        A clause that names the module and its difference, or None if there is none.
    """
    model = modules[0][1]
    return _difference_in_modules(modules, model) or _replaced_method(model)


def difference_below_head(model: PreTrainedModel) -> str | None:
    """Return the first difference in the code of a model's modules; the model may be of any class.

    Args:
        model: Any model.

    Returns:
        A clause that names the module and its difference, or None if there is none.
    """
    modules: list[tuple[str, Any, Any]] = []
    children = vars(model)["_modules"]
    for name in children:
        if name not in SUBMODULES[HEAD[0]]:
            return f"{name} is a module that the released model does not have"
    for name, allowed_classes in SUBMODULES[HEAD[0]].items():
        _collect_modules(name, children.get(name), allowed_classes, modules)
    return _difference_in_modules(modules, model)


def _difference_in_modules(
    modules: list[tuple[str, Any, Any]], model: PreTrainedModel
) -> str | None:
    if (difference := _difference_around_modules(model.config)) is not None:
        return difference
    # a model has many modules of few classes from few files, so each is compared only once
    class_results: dict[tuple[type, int], tuple[str | None, frozenset[str]]] = {}
    file_differences: dict[CodeComparison, str | None] = {}
    for name, module, allowed_classes in modules:
        key = type(module), id(allowed_classes)
        if key not in class_results:
            class_results[key] = _class_difference(type(module), allowed_classes, file_differences)
        difference, methods = class_results[key]
        if difference is None:
            difference = _instance_difference(vars(module), methods)
        if difference is None:
            difference = _settings_difference(name, module, model)
        if difference is not None:
            return f"{name or type(model).__name__} {difference}"
    return None


def _replaced_method(model: nn.Module) -> str | None:
    replaced_names = [
        name
        for name, value in vars(model).items()
        if callable(value)
        and (callable(getattr(type(model), name, None)) or name in OPTIONAL_METHODS)
    ]
    return f"{type(model).__name__} has its own {replaced_names[0]}" if replaced_names else None


def _torch_difference() -> str | None:
    """Return a hook, mode or replaced function that changes what the modules compute, or None."""
    hooks = nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "torch has a global forward hook"
    for mode in _get_current_function_mode_stack():
        if type(mode) is not DeviceContext:
            return f"the mode {type(mode).__name__} is active"
    for owner in COMPUTING_FUNCTIONS:
        if (name := _replaced_function(owner)) is not None:
            return f"{owner.__name__}.{name} was replaced"
    return None


def _settings_difference(name: str, module: nn.Module, model: nn.Module) -> str | None:
    """Return the first setting of a module that the configuration of the model does not imply."""
    attributes = vars(module)
    if attributes.get("max_norm") is not None:
        return "has max_norm, which changes its weights as they are read"
    # the engine's probe does not find a wrong is_causal: attention kernels read it only without
    # padding, and the probe has padding
    is_causal = attributes.get("is_causal")
    if is_causal is not None and is_causal != _must_be_causal(name):
        return f"has is_causal {is_causal}"
    config = attributes.get("config", model.config)
    if config is not model.config and config != model.config:
        return "has a configuration other than that of the model"
    return None


def _difference_around_modules(config: PreTrainedConfig | None) -> str | None:
    """Return a hook, mode or configuration field that affects all modules, or None."""
    if (difference := _torch_difference()) is not None:
        return difference
    for mode in _get_current_dispatch_mode_stack():
        return f"the mode {type(mode).__name__} is active"
    # with these fields, the library's masks and caches hide other positions than the paper does
    if getattr(config, "is_causal", True) is not True:
        return "the configuration has an is_causal that is not true"
    for name in MASKING_FIELDS:
        if getattr(config, name, None) is not None:
            return f"the configuration has {name}"
    return None


def _must_be_causal(name: str) -> bool:
    """Return whether an attention of a released model, or of Marian, is causal. Section 3.2.3."""
    return re.search(r"decoder\.layers\.\d+\.self_att[a-z]*$", name) is not None


def library_difference(model: nn.Module) -> str | None:
    """Return the first difference between a model of transformers or torch and its library's code.

    Args:
        model: Model whose classes are in `RELEASED`, or stacks of torch's own Transformer.

    Returns:
        A clause that names the module and its difference, or None if there is none.
    """
    difference = _difference_around_modules(getattr(model, "config", None))
    if difference is not None:
        return difference
    file_differences: dict[CodeComparison, str | None] = {}
    for name, module in model.named_modules():
        module_class = type(module)
        allowed_classes: tuple[type | str, ...] = ACTIVATION
        if module_class.__module__ != "transformers.activations":
            allowed_classes = (*LIBRARY_CLASSES, *ACTIVATION, module_class.__name__)
        difference, methods = _class_difference(module_class, allowed_classes, file_differences)
        attributes = dict(vars(module))
        if module_class is nn.TransformerDecoderLayer:
            # torch itself hides the activation of a copied layer
            attributes.pop("activation", None)
        difference = difference or _instance_difference(attributes, methods)
        is_causal = getattr(module, "is_causal", None)
        if difference is None and is_causal is not None and is_causal != _must_be_causal(name):
            difference = f"has is_causal {is_causal}"
        scaling = getattr(module, "scaling", None)
        if difference is None and scaling not in (None, getattr(module, "head_dim", 1) ** -0.5):
            difference = f"has the scaling {scaling}"
        if difference is not None:
            return f"{name or type(model).__name__} {difference}"
    return _replaced_method(model)


def _class_difference(
    module_class: type[Any],
    allowed_classes: Any,
    file_differences: dict["CodeComparison", str | None],
) -> tuple[str | None, frozenset[str]]:
    """Return the difference of a class, and the methods that its instances must not override."""
    class_clause = f"is of the class {module_class.__module__}.{module_class.__name__}"
    is_activation = allowed_classes is ACTIVATION
    if module_class is type(None):
        return "is missing", frozenset()
    if issubclass(module_class, nn.Module):
        for method_name in ("__call__", "_call_impl"):
            if not _is_own_method(module_class, method_name):
                return f"{class_clause}, whose {method_name} was replaced", frozenset()
    if module_class.__module__.startswith("torch.") or (
        is_activation and module_class.__module__ == "transformers.activations"
    ):
        is_allowed = module_class in allowed_classes or (
            is_activation and not module_class.__module__.startswith("torch.")
        )
        if not is_allowed:
            return f"{class_clause}, which the released model does not use here", frozenset()
        if not _is_own_method(module_class, "forward"):
            return f"{class_clause}, whose forward was replaced", frozenset()
        return None, frozenset(("forward",))
    comparison = comparison_for_class(module_class)
    if comparison is None or module_class.__name__ not in allowed_classes:
        return f"{class_clause}, which is not one of this release", frozenset()
    if comparison not in file_differences:
        file_differences[comparison] = comparison.difference()
    if file_differences[comparison] is not None:
        return f"{class_clause}; in its file, {file_differences[comparison]}", frozenset()
    return None, frozenset().union(
        *(comparison.methods.get(base, ()) for base in module_class.__mro__)
    )


# for each class and name, the method and its code that the library defined
_own_methods: dict[tuple[type, str], tuple[Any, Any]] = {}


def _is_own_method(module_class: type[Any], name: str) -> bool:
    """Return whether the library defined a method of a class, for the class that has it."""
    method = getattr(module_class, name)
    method_and_code = method, getattr(method, "__code__", None)
    accepted = _own_methods.get((module_class, name))
    if accepted is not None and all(map(operator.is_, accepted, method_and_code)):
        return True
    owner = next(base for base in module_class.__mro__ if name in vars(base))
    # `nn.Module` has two of its methods under other names
    own_names = {
        f"{owner.__qualname__}.{name}",
        f"{owner.__qualname__}._wrapped_call_impl",
        "_forward_unimplemented",
    }
    is_own = (
        is_of_library(method)
        and method.__module__ == owner.__module__
        and method.__qualname__ in own_names
    )
    if is_own:
        _own_methods[module_class, name] = method_and_code
    return is_own


def _instance_difference(attributes: Mapping[str, Any], method_names: frozenset[str]) -> str | None:
    """Return the first attribute of a module that overrides or extends the code of its class."""
    if not method_names.isdisjoint(attributes):
        return f"has its own {min(method_names & attributes.keys())}"
    if "_call_impl" in attributes:
        return "has its own _call_impl"
    if attributes["_forward_pre_hooks"]:
        return "has a forward pre-hook"
    for hook in attributes["_forward_hooks"].values():
        if getattr(hook, "__module__", None) not in HARMLESS_HOOKS:
            return "has a forward hook"
    for name in ("weight", "bias"):
        if name in attributes or name in attributes["_buffers"]:
            return f"has a {name} that is not a parameter"
    for registered in (attributes["_modules"], attributes["_parameters"], attributes["_buffers"]):
        if not attributes.keys().isdisjoint(registered):
            name = min(attributes.keys() & registered.keys())
            return f"has an attribute {name} that hides its {name}"
    return None if attributes.get("_compiled_call_impl") is None else "was compiled"


def difference_outside_layers(model: PreTrainedModel) -> str | None:
    """Return the first difference in the code of a model outside its layers.

    Training has its own code for the embeddings and the loss, and calls only the layers as modules.
    This code is correct only if head, encoder and decoder are as released; layers may be changed.

    Args:
        model: Any model.

    Returns:
        A clause that names the module and its difference, or None if there is none.
    """
    if (difference := _torch_difference()) is not None:
        return difference
    file_differences: dict[CodeComparison, str | None] = {}
    vocabulary_weights = []
    for name, module, allowed_classes in computing_modules(model):
        if ".layers" in name or name.endswith("dropout"):
            continue
        difference, methods = _class_difference(type(module), allowed_classes, file_differences)
        if difference is None:
            attributes = dict(vars(module))
            # accelerate replaces the forward of a model that it prepares, and keeps the original
            original_forward = attributes.pop("_original_forward", None)
            if getattr(original_forward, "__func__", None) is type(module).forward:
                attributes.pop("forward", None)
            difference = _instance_difference(attributes, methods)
            difference = difference or _gradient_difference(attributes)
            difference = difference or _settings_difference(name, module, model)
        if difference is not None:
            return f"{name or type(model).__name__} {difference}"
        if name == "lm_head" or name.endswith("embed_tokens"):
            vocabulary_weights.append(module.weight)
    is_tied = vocabulary_weights[0] is vocabulary_weights[1] is vocabulary_weights[2]
    if is_tied != model.config.tie_word_embeddings:
        state = "tied" if is_tied else "not tied"
        setting = model.config.tie_word_embeddings
        return f"tie_word_embeddings is {setting}, but the embeddings are {state}"
    return None


def _gradient_difference(attributes: Mapping[str, Any]) -> str | None:
    """Return the first hook or setting of a module that changes its gradients."""
    if attributes["_backward_hooks"] or attributes["_backward_pre_hooks"]:
        return "has a backward hook"
    for name in ("padding_idx", "scale_grad_by_freq", "sparse"):
        if attributes.get(name) not in (None, False):
            return f"has {name}"
    for name, weight in attributes["_parameters"].items():
        if weight is not None and weight._backward_hooks:
            return f"has a hook on {name}"
    return None


def attention_difference(model: PreTrainedModel) -> str | None:
    """Return the first attention or mask function of a model that is not of this release.

    Args:
        model: A `VanillaTransformerForConditionalGeneration` for which `first_difference` returns
            None.

    Returns:
        A clause that names the function, or None if there is no difference.
    """
    for stack in (model.get_encoder(), model.get_decoder()):
        eager = vars(sys.modules[type(stack).__module__])["eager_attention"]
        names = {stack.config._attn_implementation}
        for layer in stack.layers:
            names.add(layer.self_attention.config._attn_implementation)
            if hasattr(layer, "cross_attention"):
                names.add(layer.cross_attention.config._attn_implementation)
        for name in names:
            function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
            is_released = function is eager or (
                function is sdpa_attention_forward and is_of_library(function)
            )
            if not is_released and not _is_released_function(function):
                return f"the attention function {name!r} is neither eager nor sdpa of this release"
            if ALL_MASK_ATTENTION_FUNCTIONS[name] is not MASKS.get(name, sdpa_mask):
                return f"the mask function {name!r} is not the library's"
    return None


def _is_released_function(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    comparison = None if module is None else _comparison_for_module(module)
    if (
        comparison is None
        or name not in comparison.released_digests
        or vars(module).get(name) is not function
    ):
        return False
    return comparison.difference() is None


def is_of_library(function: Any) -> bool:
    """Return whether a function was defined in a file of torch or transformers.

    Args:
        function: A function, possibly wrapped by `functools.wraps`.
    """
    codes = list(code_objects_of(function))
    return bool(codes) and all(code.co_filename.startswith(LIBRARY_FOLDERS) for code in codes)


def _functions_of(owner: Any) -> dict[str, Any]:
    """Return the functions that compute something; of torch itself, only those in compiled code."""
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in DESCRIBING_METHODS
        if (type(value) is BuiltinFunctionType if owner is torch else _is_function(value))
    }


def _is_function(value: Any) -> bool:
    is_function = callable(value) and not isinstance(value, type)
    return is_function or isinstance(value, staticmethod | classmethod | property)


# modules and classes that compute the logits of a model, with their functions at import
COMPUTING_FUNCTIONS: dict[Any, dict[str, Any]] = {
    owner: _functions_of(owner)
    for owner in (
        torch,
        torch.Tensor,
        nn.functional,
        masking_utils,
        sdpa_attention,
        DynamicCache,
        EncoderDecoderCache,
        DynamicLayer,
    )
}
# the library's mask function for each of its attention functions
MASKS = {"eager": eager_mask, "sdpa": sdpa_mask}
# all values of a module or class at the last comparison that found no difference
_accepted_values: dict[Any, list[Any]] = {}


def _replaced_function(owner: Any) -> str | None:
    """Return the first function of a module or class that is not the library's own, or None."""
    values = list(vars(owner).values())
    accepted_values = _accepted_values.get(owner)
    if accepted_values is not None and _are_same_objects(accepted_values, values):
        return None
    functions = COMPUTING_FUNCTIONS[owner]
    for name, function in functions.items():
        if vars(owner).get(name) is not function:
            return name
        # a function may have been replaced before the import of this file
        if accepted_values is None and not name.startswith("_"):
            own_name = getattr(function, "__name__", name).replace("_", "")
            if own_name != name.replace("_", "") or not _may_be_of_library(function):
                return name
    if isinstance(owner, type):
        # a new function in a class hides that of its base
        for name in _functions_of(owner).keys() - functions.keys():
            if any(name in vars(base) for base in owner.__mro__[1:]):
                return name
    _accepted_values[owner] = values
    return None


def _may_be_of_library(value: Any) -> bool:
    """Return False for a function or callable that torch and transformers cannot have defined."""
    if type(value).__module__ == "functools":
        value = getattr(value, "__wrapped__", value)
    if any(code_objects_of(value)):
        return is_of_library(value)
    if isinstance(value, type | ModuleType | MethodDescriptorType) or not callable(value):
        return True
    definition = type(value) if value.__class__ is not BuiltinFunctionType else value
    package = (definition.__module__ or "").partition(".")[0]
    return package in ("torch", "transformers", "typing", "typing_extensions")


# values in GenerationMixin at the last comparison that found no difference
_accepted_methods: list[Any] = []


def generation_difference() -> str | None:
    """Return a clause that names the first replaced method of `GenerationMixin`, or None."""
    methods = list(vars(GenerationMixin).values())
    if _are_same_objects(_accepted_methods, methods):
        return None
    for name, method in vars(GenerationMixin).items():
        # one method is a context manager, whose wrapper is defined in contextlib
        files = {code.co_filename for code in code_objects_of(method)} - {contextlib.__file__}
        if not all(file.startswith(LIBRARY_FOLDERS) for file in files):
            return f"transformers.GenerationMixin.{name} was replaced"
    _accepted_methods[:] = methods
    return None


def code_objects_of(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions that it wraps, outermost first.

    Args:
        function: A function, method or property, possibly wrapped by `functools.wraps`.

    Yields:
        The code object of each wrapper, then that of the wrapped function.
    """
    function = getattr(function, "__func__", None) or getattr(function, "fget", function)
    while isinstance(function, FunctionType):
        yield function.__code__
        function = getattr(function, "__wrapped__", None)


class CodeComparison:
    """Comparison of the code in one Python module with the code of this release.

    Args:
        module: Module of this package, or a copy of it with the same name.
        released_digests: Digests of the released definitions, by name.
    """

    def __init__(self, module: ModuleType, released_digests: Mapping[str, str]):
        self.module = module
        self.released_digests = released_digests
        # for each released class, the names of the methods that its instances must not override
        self.methods: dict[type, frozenset[str]] = {}
        self._last_comparison: tuple[list[Any], str | None] | None = None

    def difference(self) -> str | None:
        """Return the first definition that differs from the released one.

        Source and compiled code are compared once. Later calls compare only whether all classes,
        functions and imported names are still the same objects.

        Returns:
            A clause, or None if there is no difference.
        """
        objects = self._objects()
        if self._last_comparison is not None:
            objects_before, result = self._last_comparison
            if _are_same_objects(objects_before, objects):
                return result
        result = self._compare()
        self._last_comparison = self._objects(), result
        return result

    def _objects(self) -> list[Any]:
        """Return all objects that the code consists of, as they are now."""
        objects = []
        for name in self.released_digests:
            value = vars(self.module).get(name)
            objects.append(value)
            if getattr(value, "__module__", None) != self.module.__name__:
                # only the identity of an imported object is compared, not its parts
                continue
            for attribute in vars(value).values() if isinstance(value, type) else (value,):
                objects.append(attribute)
                if isinstance(attribute, FunctionType | staticmethod | classmethod | property):
                    objects.extend(code_objects_of(attribute))
        return objects

    def _compare(self) -> str | None:
        module_name = self.module.__name__
        try:
            source = inspect.getsource(self.module)
        except (OSError, TypeError):
            return f"the source of {module_name} cannot be read"
        digests, tree = digests_of(source), ast.parse(source)
        for definition, digest in self.released_digests.items():
            if digests.get(definition, digest) != digest:
                return f"{definition} differs from the released code"
        for definition in self.released_digests:
            if definition not in digests:
                return f"{definition} is missing in {module_name}"
        compiled = compile(source, self.module.__file__ or module_name, "exec", dont_inherit=True)
        codes_by_name = {code.co_qualname: code for code in _nested_code_objects(compiled)}
        self.methods = {}
        for node in tree.body:
            for definition in _bound_names(node):
                if definition not in self.released_digests:
                    continue
                if not self._matches_compiled(definition, node, codes_by_name):
                    return f"{definition} was changed after {module_name} was imported"
        return None

    def _matches_compiled(
        self, name: str, node: ast.stmt, codes_by_name: Mapping[str, CodeType]
    ) -> bool:
        value = vars(self.module).get(name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = (
                (node.module or "") if isinstance(node, ast.ImportFrom) and not node.level else ""
            )
            is_from_library = origin.partition(".")[0] in ("torch", "transformers")
            if is_from_library and not _may_be_of_library(value):
                return False
            return value is _imported_object(self.module, node, name)
        if isinstance(node, ast.FunctionDef):
            return _has_code(value, codes_by_name[name])
        if isinstance(node, ast.ClassDef):
            own_names = {
                bound_name for statement in node.body for bound_name in _bound_names(statement)
            }
            if not isinstance(value, type) or _added_methods(value, own_names):
                return False
            method_names = [
                statement.name for statement in node.body if isinstance(statement, ast.FunctionDef)
            ]
            self.methods[value] = frozenset(method_names)
            return all(
                _has_code(vars(value)[method_name], codes_by_name[f"{name}.{method_name}"])
                for method_name in method_names
                if method_name not in INITIALIZING_METHODS
            )
        return True


def _are_same_objects(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


_comparisons: dict[str, CodeComparison] = {}


def comparison_for_class(module_class: type) -> CodeComparison | None:
    """Return the comparison for the module that defines a class.

    Args:
        module_class: Any class.

    Returns:
        The comparison, or None if this release has no such class.
    """
    module = sys.modules.get(module_class.__module__)
    comparison = None if module is None else _comparison_for_module(module)
    if comparison is None or vars(module).get(module_class.__name__) is not module_class:
        return None
    return comparison if module_class.__name__ in comparison.released_digests else None


def _comparison_for_module(module: ModuleType) -> CodeComparison | None:
    comparison = _comparisons.get(module.__name__)
    if comparison is None or comparison.module is not module:
        released_digests = RELEASED.get(module.__name__.rsplit(".", 1)[-1])
        if released_digests is None:
            return None
        comparison = _comparisons[module.__name__] = CodeComparison(module, released_digests)
    return comparison


def file_difference(path: str | Path) -> str | None:
    """Return the first difference between a copy of a file of this package and the code that runs.

    Args:
        path: File with the name of an imported module of this package.

    Returns:
        A clause, or None if both have the same code.
    """
    module = sys.modules[f"{__package__}.{Path(path).stem}"]
    running_digests = digests_of(inspect.getsource(module))
    try:
        file_digests = digests_of(Path(path).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "it cannot be parsed"
    for name in sorted({*running_digests, *file_digests}):
        if file_digests.get(name) != running_digests.get(name):
            return f"{name} differs"
    return None


def warn_of_other_code(source: str | PathLike, config: PreTrainedConfig, name: str):
    """Warn if a folder contains other model code than the module that loads its weights.

    Args:
        source: Folder or Hub name of a model.
        config: Configuration of the model.
        name: Name of the module that defines the model's class.
    """
    module_name = name.rpartition(".")[2]
    address = (getattr(config, "auto_map", None) or {}).get("AutoModelForSeq2SeqLM", "")
    # an address of code in another repository begins with the name of the repository and "--"
    if address.rpartition("--")[2].partition(".")[0] != module_name:
        return
    file = cached_file(source, f"{module_name}.py", _raise_exceptions_for_missing_entries=False)
    if file is not None and (difference := file_difference(file)) is not None:
        logger.warning(
            "%s holds other model code than %s: %s. This process runs the installed code. To run "
            "the code in the folder, load the model in a process that does not import "
            "vanilla_transformer.",
            source,
            name,
            difference,
        )


def _has_code(function: Any, compiled: CodeType) -> bool:
    function_codes = list(code_objects_of(function))
    if not function_codes or not _is_same_code(function_codes[-1], compiled):
        return False
    return all(
        code.co_qualname in LIBRARY_WRAPPERS and code.co_filename.startswith(LIBRARY_FOLDERS)
        for code in function_codes[:-1]
    )


def _is_same_code(first_code: CodeType, second_code: CodeType) -> bool:
    if (first_code.co_code, first_code.co_names, first_code.co_varnames) != (
        second_code.co_code,
        second_code.co_names,
        second_code.co_varnames,
    ):
        return False
    constants = list(zip(first_code.co_consts, second_code.co_consts, strict=False))
    return len(first_code.co_consts) == len(second_code.co_consts) and all(
        _is_same_code(first_constant, second_constant)
        if isinstance(first_constant, CodeType) and isinstance(second_constant, CodeType)
        else type(first_constant) is type(second_constant) and first_constant == second_constant
        for first_constant, second_constant in constants
    )


def _added_methods(module_class: type, own_names: set[str]) -> set[str]:
    """Return the methods and other descriptors of a class that its source does not define."""
    return {
        name
        for name, value in vars(module_class).items()
        if callable(value) or hasattr(type(value), "__get__")
        if name not in own_names | ADDED_BY_LIBRARY and not name.startswith("__annot")
    }


def _nested_code_objects(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested_code_objects(constant)


def _imported_object(module: ModuleType, node: ast.Import | ast.ImportFrom, name: str) -> Any:
    """Return the object that an import statement would bind to a name now."""
    for alias in node.names:
        if (alias.asname or alias.name) != name:
            continue
        if isinstance(node, ast.Import):
            return importlib.import_module(alias.name)
        path = "." * node.level + (node.module or "")
        origin = importlib.import_module(path, module.__package__)
        if hasattr(origin, alias.name):
            return getattr(origin, alias.name)
        return importlib.import_module(f"{origin.__name__}.{alias.name}")
    return None


def digests_of(source: str) -> dict[str, str]:
    """Return a digest of each definition of a module, and of each import that its code uses.

    Comments, docstrings, annotations and the methods of `INITIALIZING_METHODS` do not change a
    digest.

    Args:
        source: Text of the module.

    Returns:
        Digests of classes, functions, constants and imports, by name.
    """
    canonical_texts, import_texts = {}, {}
    used_names: set[str] = set()
    for node in ast.parse(source).body:
        for name in _bound_names(node):
            if isinstance(node, ast.Import | ast.ImportFrom):
                alias = next(
                    imported
                    for imported in node.names
                    if (imported.asname or imported.name) == name
                )
                origin = "" if isinstance(node, ast.Import) else f"{node.level} {node.module}."
                import_texts[name] = f"import {origin}{alias.name}"
            elif not name.startswith("__"):
                canonical_texts[name] = _canonical_text(node, used_names)
    canonical_texts |= {name: text for name, text in import_texts.items() if name in used_names}
    return {
        name: hashlib.sha256(text.encode()).hexdigest()[:16]
        for name, text in canonical_texts.items()
    }


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _canonical_text(node: Any, used_names: set[str]) -> str:
    """Return a syntax tree as text that is the same in every version of Python.

    Names that the code uses are added to `used_names`.
    """
    if isinstance(node, list):
        return f"[{','.join(_canonical_text(item, used_names) for item in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Name):
        used_names.add(node.id)
    fields = dict(ast.iter_fields(node))
    for field_name in ("annotation", "returns", "ctx", "kind", "type_comment", "simple"):
        fields.pop(field_name, None)
    body = fields.get("body")
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and body:
        is_constant = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        has_docstring = is_constant and isinstance(body[0].value.value, str)
        statements = body[1:] if has_docstring else body
        fields["body"] = [
            item
            for item in statements
            if not (isinstance(item, ast.FunctionDef) and item.name in INITIALIZING_METHODS)
        ]
    # empty fields are left out: later versions of Python add fields that are empty in code for
    # earlier versions
    parts = [
        f"{name}={_canonical_text(value, used_names)}"
        for name, value in fields.items()
        if value or value == 0
    ]
    return f"{type(node).__name__}({','.join(parts)})"


# digests of the released code, by module and name; `make digests` writes them
RELEASED: dict[str, dict[str, str]] = {
    "modeling_vanilla_transformer": {
        "ACT2FN": "d5d349eb092c23da",
        "ALL_ATTENTION_FUNCTIONS": "6ce6dfb904c11712",
        "BaseModelOutput": "8ffdb55c7f5d4fd4",
        "BaseModelOutputWithPastAndCrossAttentions": "a48a691b21ee0993",
        "CACHE_NAME": "381c84a8671a108e",
        "DecoderLayer": "dd8cba96033e0a08",
        "EncoderLayer": "eebfb37c97781268",
        "F": "08c471404e04e5d5",
        "FeedForward": "a9d75dc59f8d3475",
        "GenerationMixin": "cf469887d119c051",
        "GradientCheckpointingLayer": "c7c4ea168221f8c0",
        "MultiHeadAttention": "3a5b81a21015d544",
        "OutputRecorder": "09e0acb577104c93",
        "PositionalEncoding": "7c0ed335302044be",
        "PreTrainedModel": "868a6b02a930fd85",
        "SearchMixin": "49af72b922b7d3e8",
        "Seq2SeqLMOutput": "a87aff490cf1f8eb",
        "Seq2SeqModelOutput": "83309f49cf1c28a7",
        "TransformerLayer": "f50fdd5e80c9ea84",
        "VanillaTransformerDecoder": "4ae040dc65d8bec9",
        "VanillaTransformerEncoder": "45f39afa6b4be78e",
        "VanillaTransformerForConditionalGeneration": "ac230e5e41cf71c9",
        "VanillaTransformerModel": "d34775cb7ab6b7df",
        "VanillaTransformerPreTrainedModel": "5faf94d12d9796d0",
        "can_return_tuple": "09ccf8253a8fa0ae",
        "capture_outputs": "0c50027034c4b681",
        "check_arguments": "55e3c480cdd23c4e",
        "check_ids": "dd42a572e066c92d",
        "check_length": "2c54e279ec3b6a9a",
        "create_bidirectional_mask": "2a80c02e743bb2ce",
        "create_causal_mask": "73927767e615f2bd",
        "decoder_cache": "92ab3aacdd3e6a7d",
        "eager_attention": "4258edc91f427f12",
        "math": "b67c9ddef3e0c371",
        "merge_with_config_defaults": "58859508ad22e652",
        "nn": "5ee2fc1d4e7e0465",
        "scaled_dot_product_attention": "65e4d311d812106e",
        "sinusoidal_encoding": "c2cbf2c39b990333",
        "sinusoids": "0330b1dc75c239c6",
        "torch": "cf1070d3a16f24b2",
        "warn_of_other_code": "e6df13159db8b5a4",
    },
    "cpu_kernels": {
        "CheapDropout": "1b7589462f4f3fd4",
        "OneDnnLinear": "2266c24038f7c178",
        "half_precision_attention": "11f22c55015bb600",
    },
}
