"""Changes of a model that are undone at the end of a `with` block."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files

# for each model and each function that has changed it: the number of threads that use the changed
# model, and the function that undoes the change
_CHANGED: dict[tuple[nn.Module, Callable], tuple[int, Callable[[], Any]]] = {}
_CHANGED_LOCK = Lock()
# entries of a configuration that name code in the folder of the model
ADDRESS_FIELDS = ("auto_map", "custom_pipelines")


@contextmanager
def changed(model: nn.Module, change: Callable[[Any], Callable[[], Any]]) -> Iterator[None]:
    """Change a model within a `with` block.

    If several threads change the model in the same way, the first one changes it, and the last one
    undoes the change.

    Args:
        model: Any model.
        change: Function that changes a model, and returns the function that undoes the change.
    """
    key = model, change
    with _CHANGED_LOCK:
        num_threads, undo = _CHANGED[key] if key in _CHANGED else (0, change(model))
        _CHANGED[key] = num_threads + 1, undo
    try:
        yield
    finally:
        with _CHANGED_LOCK:
            num_threads, undo = _CHANGED.pop(key)
            if num_threads > 1:
                _CHANGED[key] = num_threads - 1, undo
            else:
                undo()


@contextmanager
def without_missing_code(
    config: PreTrainedConfig, model_class: type[PreTrainedModel], folder: str | PathLike
) -> Iterator[None]:
    """Leave addresses of code out of a configuration, if the saved model lacks the code.

    A published model names its code in `auto_map` and `custom_pipelines`. If the classes of
    an installed package load this model, `save_pretrained` copies no code.

    Args:
        config: Configuration of the model.
        model_class: Class of the model.
        folder: Folder that the model is saved to within the `with` block.
    """
    file_names = {path.name for path in Path(folder).glob("*.py")}
    # `save_pretrained` copies the file of a registered class and all files that this file imports,
    # except the file of a notebook or a script
    if model_class._auto_class is not None and model_class.__module__ != "__main__":
        class_file = str(sys.modules[model_class.__module__].__file__)
        copied_files = class_file, *get_relative_import_files(class_file)
        file_names |= {Path(file).name for file in copied_files}
    entries = vars(config)
    before = {name: entries.pop(name) for name in ADDRESS_FIELDS if entries.get(name)}
    for name, addresses in before.items():
        kept = {
            key: address for key, address in addresses.items() if _is_in_files(address, file_names)
        }
        if kept:
            entries[name] = kept
    try:
        yield
    finally:
        entries |= before


def _is_in_files(address: Any, file_names: set[str]) -> bool:
    """Return whether the code at an address is in one of the files, or in another repository."""
    if isinstance(address, dict):
        address = address["impl"]
    modules = [address] if isinstance(address, str) else [part for part in address if part]
    return all("--" in part or f"{part.partition('.')[0]}.py" in file_names for part in modules)


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Keep a model in evaluation mode within a `with` block, then restore each module's mode.

    If several threads use the model, the last one restores the modes.

    Args:
        model: Any model.
    """
    return changed(model, _evaluate)


def _evaluate(model: nn.Module) -> Callable[[], None]:
    modes_before = [(module, module.training) for module in model.modules()]

    def restore():
        if modes_before[0][1]:
            # `train` also frees the packed weights of the inference engine
            model.train()
        # modules of the model may have been in different modes
        for module, training in modes_before:
            module.training = training

    model.eval()
    return restore
