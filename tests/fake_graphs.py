"""Stand-in for CUDA graphs on the CPU: record operators, and run them again on the same tensors.

A replay runs no Python code of the model. It reads only the recorded tensors.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Mode that keeps every operator with its arguments and results."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.values_before = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        for argument, tensor in zip(operator._schema.arguments, args, strict=False):
            if argument.is_write:
                self.values_before.append((tensor, tensor.clone()))
        results = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, results))
        return results

    def undo(self):
        """Give the tensors that were written to the values that they had before."""
        for tensor, value in reversed(self.values_before):
            tensor.copy_(value)

    def replay(self):
        """Run the operators again, and copy each new result into the tensor that held it."""
        for operator, args, kwargs, before in self.calls:
            now = operator(*args, **kwargs)
            # a view of a recorded tensor is the same view again
            if any(returned.alias_info for returned in operator._schema.returns):
                continue
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)


class FakeGraphs:
    """Stand-in for `kernels_vanilla_transformer.captured`.

    Attributes:
        num_graphs: Number of recorded graphs.
        num_replays: Number of replays.
        is_replaying: Whether a replay runs.
    """

    def __init__(self):
        self.num_graphs = self.num_replays = 0
        self.is_replaying = False

    def __call__(self, compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Compute, and record the work.

        Args:
            compute: Argument of `captured`.
            device: Argument of `captured`.

        Returns:
            Function that repeats the operators.
        """
        compute()
        self.num_graphs += 1
        # a GPU does not execute what it captures; here the operators run a second time
        with Recorder() as recorder:
            compute()
        recorder.undo()

        def replay():
            self.num_replays += 1
            self.is_replaying = True
            recorder.replay()
            self.is_replaying = False

        return replay


class HostOperators(TorchDispatchMode):
    """Mode that counts the operators that the host launches one by one, outside of replays.

    Args:
        graphs: Stand-in whose replays are not counted.

    Attributes:
        count: Number of operators; views, which launch nothing, are not counted.
    """

    def __init__(self, graphs: FakeGraphs):
        super().__init__()
        self.graphs = graphs
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += not (self.graphs.is_replaying or operator.is_view)
        return operator(*args, **(kwargs or {}))
