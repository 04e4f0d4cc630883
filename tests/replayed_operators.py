"""Graph of a GPU on the CPU: the recorded operators are repeated on the recorded tensors.

Nothing of the Python code runs again. What a replay reads is what stands in the recorded tensors.
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
        """Repeat the operators, with their results in the tensors that had them before."""
        for operator, args, kwargs, before in self.calls:
            now = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recordings:
    """Stand-in for `kernels_vanilla_transformer.recorded`.

    Attributes:
        recorded: Number of graphs.
        replayed: Number of replays.
        operators: Number of operators in the last graph.
    """

    def __init__(self):
        self.recorded = self.replayed = self.operators = 0

    def __call__(self, compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Compute, and record the work.

        Args:
            compute: Argument of `recorded`.
            device: Argument of `recorded`.

        Returns:
            Function that repeats the operators.
        """
        compute()
        self.recorded += 1
        # recording on a GPU computes nothing: another step would read its own result
        with Recorder() as recorder:
            compute()
        self.operators = len(recorder.calls)

        def replay():
            self.replayed += 1
            recorder.replay()

        return replay
