"""Check that a model's modules run exactly the code of this release.

The inference engine computes the released equations. It may replace a model's modules only if each
module that computes is an instance of a released class with the released code. This file detects an
edited file, a subclass, a patched method or a user's own attention function. If it finds one, the
engine is not used and the model's own modules run.
"""

import contextlib
import functools
import operator
import re
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
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
from transformers.generation import utils as generation_utils
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .released_code_vanilla_transformer import (
    LIBRARY_FOLDERS,
    CodeComparison,
    are_same_objects,
    code_objects_of,
    comparison_for_class,
    comparison_for_module,
    is_of_library,
    may_be_of_library,
)

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
# functions that activations of transformers call as an attribute
POINTWISE_FUNCTIONS = (nn.functional.gelu, nn.functional.mish)
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
    difference = _difference_in_modules(modules, model)
    for _, module, _ in modules:
        # also the encoder, the decoder and the model of both, which have methods of the library
        if difference is None and isinstance(module, PreTrainedModel):
            difference = _replaced_method(module)
    return difference


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
    class_results: dict[tuple[type, Any], tuple[str | None, frozenset[str]]] = {}
    file_differences: dict[CodeComparison, str | None] = {}
    for name, module, allowed_classes in modules:
        key = type(module), allowed_classes
        if key not in class_results:
            class_results[key] = _class_difference(type(module), allowed_classes, file_differences)
        difference, methods = class_results[key]
        difference = difference or _instance_difference(vars(module), methods)
        difference = difference or _settings_difference(name, module, model)
        if difference is None and allowed_classes is ACTIVATION:
            difference = _function_difference(module)
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
    for owner in COMPUTING_OWNERS:
        if (name := _replaced_function(owner)) is not None:
            return f"{owner.__name__}.{name} was replaced"
    for kernel in torch.library._impls - KERNELS:
        if kernel.startswith("aten/") and not kernel.endswith(NEW_KERNELS):
            return f"the kernel {kernel} was replaced by torch.library"
    return None


def _settings_difference(name: str, module: nn.Module, model: nn.Module) -> str | None:
    """Return the first setting of a module that the configuration of the model does not imply."""
    attributes = vars(module)
    if (difference := _attribute_difference(name, attributes)) is not None:
        return difference
    config = attributes.get("config", model.config)
    if config is not model.config and config != model.config:
        return "has a configuration other than that of the model"
    return None


def _attribute_difference(name: str, attributes: Mapping[str, Any]) -> str | None:
    """Return the first attribute that changes what a module of a translation model computes."""
    if attributes.get("max_norm") is not None:
        return "has max_norm, which changes its weights as they are read"
    # no comparison of logits finds a wrong is_causal: attention kernels read it only without
    # padding, and the compared batches have padding
    is_causal = attributes.get("is_causal")
    if is_causal is not None and is_causal != _must_be_causal(name):
        return f"has is_causal {is_causal}"
    return None


def _function_difference(activation: nn.Module) -> str | None:
    """Return the first function of an activation that may not be elementwise, or None."""
    for name, value in vars(activation).items():
        function = value.func if isinstance(value, functools.partial) else value
        if name.startswith("_") or not callable(function):
            continue
        is_own_method = getattr(function, "__self__", None) is activation
        if not is_own_method and function not in POINTWISE_FUNCTIONS:
            return f"has its own {name}"
    return None


def _difference_around_modules(config: PreTrainedConfig | None) -> str | None:
    """Return a hook, mode or configuration field that affects all modules, or None."""
    if (difference := _torch_difference()) is not None:
        return difference
    if modes := _get_current_dispatch_mode_stack():
        return f"the mode {type(modes[0]).__name__} is active"
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
            # in a copied layer, torch itself sets an attribute that shadows the module `activation`
            attributes.pop("activation", None)
        difference = difference or _instance_difference(attributes, methods)
        difference = difference or _attribute_difference(name, attributes)
        if difference is None and module_class.__module__ == "transformers.activations":
            difference = _function_difference(module)
        scaling = getattr(module, "scaling", None)
        if difference is None and scaling not in (None, getattr(module, "head_dim", 1) ** -0.5):
            difference = f"has the scaling {scaling}"
        if difference is not None:
            return f"{name or type(model).__name__} {difference}"
    return _replaced_method(model)


def _class_difference(
    module_class: type[Any],
    allowed_classes: Any,
    file_differences: dict[CodeComparison, str | None],
) -> tuple[str | None, frozenset[str]]:
    """Return the difference of a class, and the methods that its instances must not override."""
    class_clause = f"is of the class {module_class.__module__}.{module_class.__name__}"
    is_activation = allowed_classes is ACTIVATION
    if module_class is type(None):
        return "is missing", frozenset()
    if issubclass(module_class, nn.Module):
        names = ["__call__", "_call_impl", "__getattr__"]
        if issubclass(module_class, PreTrainedModel):
            names += ["get_encoder", "get_decoder"]
        for method_name in names:
            if not _is_own_method(module_class, method_name):
                return f"{class_clause}, whose {method_name} was replaced", frozenset()
        for name in ("weight", "bias"):
            # an attribute of the class, such as a property, hides the parameter
            if hasattr(module_class, name):
                return f"{class_clause}, which was given a {name}", frozenset()
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
                return f"the mask function {name!r} is not that of transformers"
    return None


def _is_released_function(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    comparison = None if module is None else comparison_for_module(module)
    if (
        comparison is None
        or name not in comparison.released_digests
        or vars(module).get(name) is not function
    ):
        return False
    return comparison.difference() is None


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


# classes of the KV cache of transformers. A program may replace their methods, for example to
# compress the cache: then the modules run with this cache
CACHE_CLASSES = tuple(
    dict.fromkeys(
        base
        for cache_class in (DynamicCache, EncoderDecoderCache, DynamicLayer)
        for base in cache_class.__mro__
        if base.__module__ == DynamicLayer.__module__
    )
)
# modules and classes whose functions compute the logits of a model
COMPUTING_OWNERS: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    nn.functional,
    masking_utils,
    sdpa_attention,
)
# functions of these modules and classes at import
FUNCTIONS_AT_IMPORT: dict[Any, dict[str, Any]] = {
    owner: _functions_of(owner) for owner in (*COMPUTING_OWNERS, *CACHE_CLASSES)
}
# the library's mask function for each of its attention functions
MASKS = {"eager": eager_mask, "sdpa": sdpa_mask}
# kernels that Python code has registered, at import: namespace, operator and device
KERNELS = frozenset(torch.library._impls)
# dispatch keys of kernels that replace none: torch registers those of shapes and of `vmap` when it
# first uses them, and a device outside torch (PrivateUse1) brings all of its own
NEW_KERNELS = ("/Meta", "/FuncTorchBatched", "/PrivateUse1")
# all values of a module or class at the last comparison that found no difference
_accepted_values: dict[Any, list[Any]] = {}


def _replaced_function(owner: Any) -> str | None:
    """Return the first function of a module or class that is not the library's own, or None."""
    values = list(vars(owner).values())
    accepted_values = _accepted_values.get(owner)
    if accepted_values is not None and are_same_objects(accepted_values, values):
        return None
    functions = FUNCTIONS_AT_IMPORT[owner]
    for name, function in functions.items():
        if vars(owner).get(name) is not function:
            return name
        # a function may have been replaced before the import of this file
        if accepted_values is None and not name.startswith("_"):
            own_name = getattr(function, "__name__", name).replace("_", "")
            if own_name != name.replace("_", "") or not may_be_of_library(function):
                return name
    if isinstance(owner, type):
        # a new function in a class hides that of its base
        for name in _functions_of(owner).keys() - functions.keys():
            if any(name in vars(base) for base in owner.__mro__[1:]):
                return name
    _accepted_values[owner] = values
    return None


# classes and functions that `generate` reads from the file of `GenerationMixin`, at import
GENERATION_NAMES: dict[str, Any] = {
    name: value
    for name, value in vars(generation_utils).items()
    if isinstance(value, type | FunctionType)
}
# values in GenerationMixin at the last comparison that found no difference
_accepted_methods: list[Any] = []


def generation_difference() -> str | None:
    """Return a clause that names the first replaced part of `generate` or of the KV cache."""
    for cache_class in CACHE_CLASSES:
        if (name := _replaced_function(cache_class)) is not None:
            return f"{cache_class.__name__}.{name} was replaced"
    for name, value in GENERATION_NAMES.items():
        # a user's cache class, for example
        if vars(generation_utils).get(name) is not value:
            return f"transformers.generation.utils.{name} was replaced"
    methods = list(vars(GenerationMixin).values())
    if are_same_objects(_accepted_methods, methods):
        return None
    for name, method in vars(GenerationMixin).items():
        # one method is a context manager, whose wrapper is defined in contextlib
        files = {code.co_filename for code in code_objects_of(method)} - {contextlib.__file__}
        if not all(file.startswith(LIBRARY_FOLDERS) for file in files):
            return f"transformers.GenerationMixin.{name} was replaced"
    _accepted_methods[:] = methods
    return None
