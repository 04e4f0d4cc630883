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
import re
import sys
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file

logger = logging.getLogger(__name__)

# methods that only initialize weights: an edit of them does not change what a loaded model computes
NOT_COMPUTING = ("_init_weights",)
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
}
LIBRARY_FOLDERS = tuple(str(module.__path__[0]) for module in (torch, transformers))
# Python modules whose hooks change no result: hooks that record outputs, and hooks that make the
# output of the embeddings require gradients
HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils")
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
    found: list[tuple[str, Any, Any]] = []
    _collect("", model, HEAD, found)
    return found


def _collect(name: str, module: Any, kinds: Any, found: list[tuple[str, Any, Any]]):
    found.append((name, module, kinds))
    kind = type(module).__name__
    parts = SUBMODULES.get(kind)
    if parts is None:
        return
    children = vars(module)["_modules"]
    for part, kinds in parts.items():
        path = f"{name}.{part}" if name else part
        child = children.get(part)
        if child is None and (kind, part) in OPTIONAL_SUBMODULES:
            continue
        if type(kinds) is not list:
            _collect(path, child, kinds, found)
            continue
        found.append((path, child, MODULE_LIST))
        for index, layer in enumerate(child if type(child) is nn.ModuleList else ()):
            _collect(f"{path}.{index}", layer, tuple(kinds), found)


def first_difference(modules: list[tuple[str, Any, Any]]) -> str | None:
    """Return the first difference between a model's code and the code of this release.

    Args:
        modules: Result of `computing_modules`; the first module is the model.

    Returns:
        A clause that names the module and its difference, or None if there is none.
    """
    if (difference := _torch_difference()) is not None:
        return difference
    # a model has many modules of few classes from few files, so each is compared only once
    classes: dict[tuple[type, int], tuple[str | None, frozenset[str]]] = {}
    files: dict[CodeComparison, str | None] = {}
    model = modules[0][1]
    for name, module, kinds in modules:
        key = type(module), id(kinds)
        if key not in classes:
            classes[key] = _class_difference(type(module), kinds, files)
        difference, methods = classes[key]
        if difference is None:
            difference = _instance_difference(vars(module), methods)
        if difference is None:
            difference = _settings_difference(name, module, model)
        if difference is not None:
            return f"{name or type(model).__name__} {difference}"
    return _replaced_method(model)


def _replaced_method(model: nn.Module) -> str | None:
    replaced = [
        name
        for name, value in vars(model).items()
        if callable(value) and callable(getattr(type(model), name, None))
    ]
    return f"{type(model).__name__} has its own {replaced[0]}" if replaced else None


def _torch_difference() -> str | None:
    hooks = nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "torch has a global forward hook"
    replaced = _replaced_function()
    return None if replaced is None else f"torch.nn.functional.{replaced} was replaced"


def _settings_difference(name: str, module: nn.Module, model: nn.Module) -> str | None:
    """Return the first setting of a module that the configuration of the model does not imply."""
    own = vars(module)
    if own.get("max_norm") is not None:
        return "has max_norm, which changes its weights as they are read"
    # the engine's probe does not find a wrong is_causal: attention kernels read it only without
    # padding, and the probe has padding
    if (is_causal := own.get("is_causal")) is not None and is_causal != _is_causal(name):
        return f"has is_causal {is_causal}"
    config = own.get("config", model.config)
    if config is not model.config and config != model.config:
        return "has another configuration than the model"
    return None


def _is_causal(name: str) -> bool:
    """Return whether an attention of a released model, or of Marian, is causal. Section 3.2.3."""
    return re.search(r"decoder\.layers\.\d+\.self_att[a-z]*$", name) is not None


def library_difference(model: nn.Module) -> str | None:
    """Return the first difference between a model of transformers or torch and its library's code.

    Args:
        model: Model whose classes are in `RELEASED`, or stacks of torch's own Transformer.

    Returns:
        A clause that names the module and its difference, or None if there is none.
    """
    files: dict[CodeComparison, str | None] = {}
    for name, module in model.named_modules():
        kind = type(module)
        kinds: tuple[type | str, ...] = ACTIVATION
        if kind.__module__ != "transformers.activations":
            kinds = (*LIBRARY_CLASSES, *ACTIVATION, kind.__name__)
        difference, methods = _class_difference(kind, kinds, files)
        difference = difference or _instance_difference(vars(module), methods)
        is_causal = getattr(module, "is_causal", None)
        if difference is None and is_causal is not None and is_causal != _is_causal(name):
            difference = f"has is_causal {is_causal}"
        if difference is not None:
            return f"{name or type(model).__name__} {difference}"
    return _replaced_method(model)


def _class_difference(
    kind: type[Any], kinds: Any, files: dict["CodeComparison", str | None]
) -> tuple[str | None, frozenset[str]]:
    """Return the difference of a class, and the methods that its instances must not override."""
    where = f"is of the class {kind.__module__}.{kind.__name__}"
    is_activation = kinds is ACTIVATION
    if kind is type(None):
        return "is missing", frozenset()
    if issubclass(kind, nn.Module):
        for caller in ("__call__", "_call_impl"):
            if not is_of_library(getattr(kind, caller)):
                return f"{where}, whose {caller} was replaced", frozenset()
    if kind.__module__.startswith("torch.") or (
        is_activation and kind.__module__ == "transformers.activations"
    ):
        is_known = kind in kinds or (is_activation and not kind.__module__.startswith("torch."))
        if not is_known:
            return f"{where}, which the released model does not use here", frozenset()
        if not is_of_library(kind.forward):
            return f"{where}, whose forward was replaced", frozenset()
        return None, frozenset(("forward",))
    code = comparison_for_class(kind)
    if code is None or kind.__name__ not in kinds:
        return f"{where}, which is not one of this release", frozenset()
    if code not in files:
        files[code] = code.difference()
    if files[code] is not None:
        return f"{where}; in its file, {files[code]}", frozenset()
    return None, frozenset().union(*(code.methods.get(base, ()) for base in kind.__mro__))


def _instance_difference(own: Mapping[str, Any], methods: frozenset[str]) -> str | None:
    """Return the first attribute of a module that overrides or extends the code of its class."""
    if not methods.isdisjoint(own):
        return f"has its own {min(methods & own.keys())}"
    if "_call_impl" in own:
        return "has its own _call_impl"
    if own["_forward_pre_hooks"]:
        return "has a forward pre-hook"
    for hook in own["_forward_hooks"].values():
        if getattr(hook, "__module__", None) not in HARMLESS_HOOKS:
            return "has a forward hook"
    for name in ("weight", "bias"):
        if name in own or name in own["_buffers"]:
            return f"has a {name} that is not a parameter"
    return None if own.get("_compiled_call_impl") is None else "was compiled"


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
    files: dict[CodeComparison, str | None] = {}
    weights = []
    for name, module, kinds in computing_modules(model):
        if ".layers" in name or name.endswith("dropout"):
            continue
        difference, methods = _class_difference(type(module), kinds, files)
        if difference is None:
            own = dict(vars(module))
            # accelerate replaces the forward of a model that it prepares, and keeps the original
            original = own.pop("_original_forward", None)
            if getattr(original, "__func__", None) is type(module).forward:
                own.pop("forward", None)
            difference = _instance_difference(own, methods) or _gradient_difference(own)
            difference = difference or _settings_difference(name, module, model)
        if difference is not None:
            return f"{name or type(model).__name__} {difference}"
        if name == "lm_head" or name.endswith("embed_tokens"):
            weights.append(module.weight)
    is_tied = weights[0] is weights[1] is weights[2]
    if is_tied != model.config.tie_word_embeddings:
        found = "tied" if is_tied else "not tied"
        set_to = model.config.tie_word_embeddings
        return f"tie_word_embeddings is {set_to}, but the embeddings are {found}"
    return None


def _gradient_difference(own: Mapping[str, Any]) -> str | None:
    """Return the first hook or setting of a module that changes its gradients."""
    if own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return "has a backward hook"
    for name in ("padding_idx", "scale_grad_by_freq", "sparse"):
        if own.get(name) not in (None, False):
            return f"has {name}"
    for name, weight in own["_parameters"].items():
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
            mask = ALL_MASK_ATTENTION_FUNCTIONS[name]
            if not is_of_library(mask):
                return f"the mask function {name!r} is not the library's"
    return None


def _is_released_function(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    code = None if module is None else _comparison_of(module)
    if code is None or name not in code.known or vars(module).get(name) is not function:
        return False
    return code.difference() is None


def is_of_library(function: Any) -> bool:
    """Return whether a function was defined in a file of torch or transformers.

    Args:
        function: A function, possibly wrapped by `functools.wraps`.
    """
    codes = list(code_objects_of(function))
    return bool(codes) and all(code.co_filename.startswith(LIBRARY_FOLDERS) for code in codes)


def _replaced_function() -> str | None:
    """Return the first public function of torch.nn.functional that is not torch's, or None."""
    functions = list(vars(nn.functional).values())
    if len(_functions) == len(functions) and all(map(_is_same, _functions, functions)):
        return None
    for name, function in vars(nn.functional).items():
        if not name.startswith("_") and not _may_be_of_library(function):
            return name
    _functions[:] = functions
    return None


def _may_be_of_library(value: Any) -> bool:
    """Return False for a function or callable that torch and transformers cannot have defined."""
    if isinstance(value, FunctionType):
        return is_of_library(value)
    if isinstance(value, type | ModuleType) or not callable(value):
        return True
    home = type(value) if value.__class__ is not BuiltinFunctionType else value
    return (home.__module__ or "").startswith(("torch", "transformers", "typing"))


# values in torch.nn.functional and GenerationMixin at the last comparison that found no difference
_functions: list[Any] = []
_methods: list[Any] = []


def generation_difference() -> str | None:
    """Return a clause that names the first replaced method of `GenerationMixin`, or None."""
    methods = list(vars(GenerationMixin).values())
    if len(_methods) == len(methods) and all(map(_is_same, _methods, methods)):
        return None
    for name, method in vars(GenerationMixin).items():
        # one method is a context manager, whose wrapper is defined in contextlib
        files = (*LIBRARY_FOLDERS, contextlib.__file__)
        if not all(code.co_filename.startswith(files) for code in code_objects_of(method)):
            return f"transformers.GenerationMixin.{name} was replaced"
    _methods[:] = methods
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
        known: Digests of the released definitions, by name.
    """

    def __init__(self, module: ModuleType, known: Mapping[str, str]):
        self.module = module
        self.known = known
        # for each released class, the names of the methods that its instances must not override
        self.methods: dict[type, frozenset[str]] = {}
        self._compared: tuple[list[Any], str | None] | None = None

    def difference(self) -> str | None:
        """Return the first definition that differs from the released one.

        Source and compiled code are compared once. Later calls compare only whether all classes,
        functions and imported names are still the same objects.

        Returns:
            A clause, or None if there is no difference.
        """
        objects = self._objects()
        if self._compared is not None:
            before, result = self._compared
            if len(before) == len(objects) and all(map(_is_same, before, objects)):
                return result
        result = self._compare()
        self._compared = self._objects(), result
        return result

    def _objects(self) -> list[Any]:
        """Return all objects that the code consists of, as they are now."""
        objects = []
        for name in self.known:
            value = vars(self.module).get(name)
            objects.append(value)
            if getattr(value, "__module__", None) != self.module.__name__:
                # only the identity of an imported object is compared, not its parts
                continue
            for part in vars(value).values() if isinstance(value, type) else (value,):
                objects.append(part)
                if isinstance(part, FunctionType | staticmethod | classmethod | property):
                    objects.extend(code_objects_of(part))
        return objects

    def _compare(self) -> str | None:
        name = self.module.__name__
        try:
            source = inspect.getsource(self.module)
        except (OSError, TypeError):
            return f"the source of {name} cannot be read"
        found, tree = digests_of(source), ast.parse(source)
        for definition, digest in self.known.items():
            if found.get(definition, digest) != digest:
                return f"{definition} differs from the released code"
        for definition in self.known:
            if definition not in found:
                return f"{definition} is missing in {name}"
        compiled = compile(source, self.module.__file__ or name, "exec", dont_inherit=True)
        codes = {code.co_qualname: code for code in _nested(compiled)}
        self.methods = {}
        for node in tree.body:
            for definition in _bound_names(node):
                if definition in self.known and not self._is_as_compiled(definition, node, codes):
                    return f"{definition} was changed after {name} was imported"
        return None

    def _is_as_compiled(self, name: str, node: ast.stmt, codes: Mapping[str, CodeType]) -> bool:
        value = vars(self.module).get(name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = (
                (node.module or "") if isinstance(node, ast.ImportFrom) and not node.level else ""
            )
            is_known = not origin.startswith(("torch", "transformers")) or _may_be_of_library(value)
            return is_known and value is _imported(self.module, node, name)
        if isinstance(node, ast.FunctionDef):
            return _has_code(value, codes[name])
        if isinstance(node, ast.ClassDef):
            own = {bound for part in node.body for bound in _bound_names(part)}
            if not isinstance(value, type) or _added_methods(value, own):
                return False
            functions = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            self.methods[value] = frozenset(functions)
            return all(
                _has_code(vars(value)[function], codes[f"{name}.{function}"])
                for function in functions
                if function not in NOT_COMPUTING
            )
        return True


def _is_same(before: Any, now: Any) -> bool:
    return before is now


_comparisons: dict[str, CodeComparison] = {}


def comparison_for_class(kind: type) -> CodeComparison | None:
    """Return the comparison for the module that defines a class.

    Args:
        kind: Any class.

    Returns:
        The comparison, or None if this release has no such class.
    """
    module = sys.modules.get(kind.__module__)
    code = None if module is None else _comparison_of(module)
    if code is None or vars(module).get(kind.__name__) is not kind:
        return None
    return code if kind.__name__ in code.known else None


def _comparison_of(module: ModuleType) -> CodeComparison | None:
    code = _comparisons.get(module.__name__)
    if code is None or code.module is not module:
        known = RELEASED.get(module.__name__.rsplit(".", 1)[-1])
        if known is None:
            return None
        code = _comparisons[module.__name__] = CodeComparison(module, known)
    return code


def file_difference(path: str | Path) -> str | None:
    """Return the first difference between a copy of a file of this package and the code that runs.

    Args:
        path: File with the name of an imported module of this package.

    Returns:
        A clause, or None if both have the same code.
    """
    module = sys.modules[f"{__package__}.{Path(path).stem}"]
    running = digests_of(inspect.getsource(module))
    try:
        found = digests_of(Path(path).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "it cannot be parsed"
    for name in sorted({*running, *found}):
        if found.get(name) != running.get(name):
            return f"{name} differs"
    return None


def warn_of_other_code(source: str | PathLike, config: PreTrainedConfig, name: str):
    """Warn if a folder contains other model code than the module that loads its weights.

    Args:
        source: Folder or Hub name of a model.
        config: Configuration of the model.
        name: Name of the module that defines the model's class.
    """
    own = name.rpartition(".")[2]
    address = (getattr(config, "auto_map", None) or {}).get("AutoModelForSeq2SeqLM", "")
    # an address of code in another repository begins with the name of the repository and "--"
    if address.rpartition("--")[2].partition(".")[0] != own:
        return
    file = cached_file(source, f"{own}.py", _raise_exceptions_for_missing_entries=False)
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
    codes = list(code_objects_of(function))
    if not codes or not _is_same_code(codes[-1], compiled):
        return False
    return all(
        code.co_qualname in LIBRARY_WRAPPERS and code.co_filename.startswith(LIBRARY_FOLDERS)
        for code in codes[:-1]
    )


def _is_same_code(one: CodeType, other: CodeType) -> bool:
    if (one.co_code, one.co_names, one.co_varnames) != (
        other.co_code,
        other.co_names,
        other.co_varnames,
    ):
        return False
    constants = list(zip(one.co_consts, other.co_consts, strict=False))
    return len(one.co_consts) == len(other.co_consts) and all(
        _is_same_code(first, second)
        if isinstance(first, CodeType) and isinstance(second, CodeType)
        else type(first) is type(second) and first == second
        for first, second in constants
    )


def _added_methods(kind: type, own: set[str]) -> set[str]:
    """Return the methods and other descriptors of a class that its source does not define."""
    return {
        name
        for name, value in vars(kind).items()
        if callable(value) or hasattr(type(value), "__get__")
        if name not in own | ADDED_BY_LIBRARY and not name.startswith("__annot")
    }


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _imported(module: ModuleType, node: ast.Import | ast.ImportFrom, name: str) -> Any:
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

    Comments, docstrings, annotations and the methods of `NOT_COMPUTING` do not change a digest.

    Args:
        source: Text of the module.

    Returns:
        Digests of classes, functions, constants and imports, by name.
    """
    texts, imports = {}, {}
    used: set[str] = set()
    for node in ast.parse(source).body:
        for name in _bound_names(node):
            if isinstance(node, ast.Import | ast.ImportFrom):
                alias = next(it for it in node.names if (it.asname or it.name) == name)
                origin = "" if isinstance(node, ast.Import) else f"{node.level} {node.module}."
                imports[name] = f"import {origin}{alias.name}"
            elif not name.startswith("__"):
                texts[name] = _canonical(node, used)
    texts |= {name: text for name, text in imports.items() if name in used}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _canonical(node: Any, used: set[str]) -> str:
    """Return a syntax tree as text that is the same in every version of Python.

    Names that the code uses are added to `used`.
    """
    if isinstance(node, list):
        return f"[{','.join(_canonical(part, used) for part in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Name):
        used.add(node.id)
    fields = dict(ast.iter_fields(node))
    for unused in ("annotation", "returns", "ctx", "kind", "type_comment", "simple"):
        fields.pop(unused, None)
    body = fields.get("body")
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and body:
        is_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        kept = body[1:] if is_text and isinstance(body[0].value.value, str) else body
        fields["body"] = [
            part
            for part in kept
            if not (isinstance(part, ast.FunctionDef) and part.name in NOT_COMPUTING)
        ]
    # empty fields are left out: later versions of Python add fields that are empty in code for
    # earlier versions
    parts = [
        f"{name}={_canonical(value, used)}" for name, value in fields.items() if value or value == 0
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
        "PositionalEncoding": "c0a46ee84a34d950",
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
        "attention_in_float32": "d38cce84b67a3d61",
    },
}

__all__ = [
    "attention_difference",
    "computing_modules",
    "difference_outside_layers",
    "file_difference",
    "first_difference",
    "generation_difference",
    "is_of_library",
    "library_difference",
    "warn_of_other_code",
]
