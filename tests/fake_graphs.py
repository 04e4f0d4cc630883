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

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, results))
        return results

    def replay(self):
        """Run the operators again, and copy each result into the tensor that held it."""
        for operator, args, kwargs, before in self.calls:
            now = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FakeGraphs:
    """Stand-in for `kernels_vanilla_transformer.captured`.

    Attributes:
        num_graphs: Number of recorded graphs.
        num_replays: Number of replays.
    """

    def __init__(self):
        self.num_graphs = self.num_replays = 0

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
        # a GPU does not execute what it captures; here the operators run a second time, which
        # changes nothing because compute does not read its own results
        with Recorder() as recorder:
            compute()

        def replay():
            self.num_replays += 1
            recorder.replay()

        return replay
