"""Comparison of Python code with the code of this release.

Code is compared by digests of its syntax tree, without comments, docstrings and annotations. An
unedited copy on the Hub therefore counts as released. `make digests` updates `RELEASED` after a
change of the model.
"""

import ast
import hashlib
import importlib
import inspect
import logging
import operator
import os
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
from transformers import PreTrainedConfig
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


def is_of_library(function: Any) -> bool:
    """Return whether a function was defined in a file of torch or transformers.

    Args:
        function: A function, possibly wrapped by `functools.wraps`.
    """
    codes = list(code_objects_of(function))
    return bool(codes) and all(code.co_filename.startswith(LIBRARY_FOLDERS) for code in codes)


def may_be_of_library(value: Any) -> bool:
    """Return False for a function or callable that torch and transformers cannot have defined.

    Args:
        value: Any object.
    """
    if type(value).__module__ == "functools":
        value = getattr(value, "__wrapped__", value)
    if any(code_objects_of(value)):
        return is_of_library(value)
    if isinstance(value, type | ModuleType | MethodDescriptorType) or not callable(value):
        return True
    definition = type(value) if value.__class__ is not BuiltinFunctionType else value
    package = (definition.__module__ or "").partition(".")[0]
    return package in ("torch", "transformers", "typing", "typing_extensions")


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
            if are_same_objects(objects_before, objects):
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
        # missing names come last, because an edited definition may no longer use an import
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
            is_from_library = (
                isinstance(node, ast.ImportFrom)
                and not node.level
                and (node.module or "").partition(".")[0] in ("torch", "transformers")
            )
            if is_from_library and not may_be_of_library(value):
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


def are_same_objects(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return whether two sequences have the same objects, in the same order.

    Args:
        before: Objects at an earlier time.
        now: Objects now.
    """
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
    comparison = None if module is None else comparison_for_module(module)
    if comparison is None or vars(module).get(module_class.__name__) is not module_class:
        return None
    return comparison if module_class.__name__ in comparison.released_digests else None


def comparison_for_module(module: ModuleType) -> CodeComparison | None:
    """Return the comparison for a module of this package or a copy, or None for another module.

    Args:
        module: Any imported module.
    """
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
        "CACHE_NAME": "a0e5d6394b7118b6",
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
        "SavingMixin": "df43bd91c0ab63c9",
        "SearchMixin": "49af72b922b7d3e8",
        "Seq2SeqLMOutput": "a87aff490cf1f8eb",
        "Seq2SeqModelOutput": "83309f49cf1c28a7",
        "TransformerLayer": "f50fdd5e80c9ea84",
        "VanillaTransformerDecoder": "58f9176c293570fb",
        "VanillaTransformerEncoder": "45f39afa6b4be78e",
        "VanillaTransformerForConditionalGeneration": "c1312b02d00044bf",
        "VanillaTransformerModel": "630cef095ea5d5d9",
        "VanillaTransformerPreTrainedModel": "b3c129c33af50c12",
        "arguments_of_stack": "faef99ac16f81599",
        "cached_length": "c738fdc3b709da83",
        "can_return_tuple": "09ccf8253a8fa0ae",
        "capture_outputs": "0c50027034c4b681",
        "check_arguments": "55e3c480cdd23c4e",
        "check_ids": "dd42a572e066c92d",
        "check_length": "2c54e279ec3b6a9a",
        "create_bidirectional_mask": "2a80c02e743bb2ce",
        "create_causal_mask": "73927767e615f2bd",
        "decoder_cache": "7bc847c5d89807a8",
        "eager_attention": "69cee3318b38f522",
        "math": "b67c9ddef3e0c371",
        "merge_with_config_defaults": "58859508ad22e652",
        "nn": "5ee2fc1d4e7e0465",
        "output_of_encoder": "f6848a59c97ec6a9",
        "scaled_dot_product_attention": "65e4d311d812106e",
        "sinusoidal_encoding": "c2cbf2c39b990333",
        "sinusoids": "0330b1dc75c239c6",
        "torch": "cf1070d3a16f24b2",
        "vocab_size_of": "16a69625dee1a72c",
        "warn_of_other_code": "a9027c045e6e4a47",
        "with_output_object": "cbb4a6e40eea0b9e",
    },
    "cpu_kernels": {
        "CheapDropout": "1b7589462f4f3fd4",
        "OneDnnLinear": "2266c24038f7c178",
        "half_precision_attention": "11f22c55015bb600",
    },
}
