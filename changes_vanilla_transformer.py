"""Changes of a model that are undone at the end of a `with` block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

from torch import nn

# for each model and each function that has changed it: the number of threads that use the changed
# model, and the function that undoes the change
_CHANGED: dict[tuple[nn.Module, Callable], tuple[int, Callable[[], Any]]] = {}
_CHANGED_LOCK = Lock()


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
