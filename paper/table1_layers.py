"""The layers of Table 1, their costs and their path lengths. Section 4.

Shapes: n positions, d width of a layer, k kernel width of a convolution, r neighbourhood of
restricted attention, h heads.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ..modeling_vanilla_transformer import scaled_dot_product_attention

# width of a head, as in the base model: a wider layer has more heads
D_K = 64
# smallest number of timed runs of a layer; the fastest run counts, because it was disturbed least
MIN_RUNS = 5
# smallest total time of these runs, so that a fast layer runs more often
MIN_SECONDS = 0.25
# width of the layers whose path lengths are measured
PATH_WIDTH = 8


class Kind(NamedTuple):
    """A kind of layer: its row in the paper, and the exponents of its formula.

    Attributes:
        build: Function that returns a layer for d, k and r; a layer maps [1, n, d] to [1, n, d].
        complexity: Complexity of a layer, in the paper's notation.
        sequential: Number of sequential operations, in the paper's notation.
        exponents: Exponents of n and of d in the complexity.
        flops: Formula for the FLOPs of a forward pass.
        saved_exponents: Exponents of n and of d in the memory saved for the backward pass.
    """

    build: Callable[[int, int, int], Callable[[Tensor], Tensor]]
    complexity: str
    sequential: str
    exponents: tuple[int, int]
    flops: str
    saved_exponents: tuple[int, int]


def split_heads(x: Tensor) -> Tensor:
    """Split a sequence into heads of the paper's width.

    Args:
        x: Sequence, [1, n, d].

    Returns:
        Heads, [1, h, n, d / h].
    """
    return x.unflatten(-1, (-1, min(D_K, x.shape[-1]))).transpose(1, 2)


def self_attention(x: Tensor) -> Tensor:
    """Compute equation (1) as written, which stores all attention weights, without projections.

    Args:
        x: Queries, keys and values, [1, n, d].

    Returns:
        Attention output, [1, n, d].
    """
    heads = split_heads(x)
    return scaled_dot_product_attention(heads, heads, heads, None)[0].transpose(1, 2).flatten(2)


def fused_self_attention(x: Tensor) -> Tensor:
    """Compute attention with torch's fused kernel, which does not store all attention weights.

    Args:
        x: Queries, keys and values, [1, n, d].

    Returns:
        Attention output, [1, n, d].
    """
    heads = split_heads(x)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def restricted_self_attention(x: Tensor, neighbourhood: int) -> Tensor:
    """Compute attention of each position to its neighbourhood only. Section 4.

    Args:
        x: Queries, keys and values, [1, n, d].
        neighbourhood: Neighbourhood r, odd: the position itself and (r - 1) / 2 positions on either
            side.

    Returns:
        Attention output, [1, n, d].
    """
    n, side_width = x.shape[1], neighbourhood // 2
    query = x[0].unflatten(-1, (-1, min(D_K, x.shape[-1])))  # [n, h, d_k]
    # unfold returns the windows as a view, so no key is copied
    padded = F.pad(query, (0, 0, 0, 0, side_width, side_width))
    windows = padded.unfold(0, neighbourhood, 1)  # [n, h, d_k, r]
    positions = torch.arange(n, device=x.device)[:, None] + torch.arange(
        -side_width, side_width + 1, device=x.device
    )  # [n, r]
    is_outside = (positions < 0) | (positions >= n)
    scores = query[:, :, None] @ windows / math.sqrt(query.shape[-1])  # [n, h, 1, r]
    weights = scores.masked_fill(is_outside[:, None, None], -math.inf).softmax(dim=-1)
    return (weights @ windows.transpose(-2, -1)).flatten(1)[None]


class Projections(nn.Module):
    """The four projections of an attention layer. Section 3.2.2.

    Args:
        d: Width of the layer.
    """

    def __init__(self, d: int):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(d, d, bias=False) for _ in "qkvo")

    def forward(self, x: Tensor) -> Tensor:
        """Apply the four projections, with a sum in place of attention.

        Args:
            x: Input, [1, n, d].

        Returns:
            Output, [1, n, d].
        """
        return self.out(self.query(x) + self.key(x) + self.value(x))


class Recurrence(nn.Module):
    """torch's gated recurrent unit over a sequence.

    Args:
        d: Width of input and state.
    """

    def __init__(self, d: int):
        super().__init__()
        self.layer = nn.GRU(d, d, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the states one after the other.

        Args:
            x: Input, [1, n, d].

        Returns:
            All states, [1, n, d].
        """
        return self.layer(x)[0]


class Convolution(nn.Module):
    """torch's convolution, causal: each position sees itself and k - 1 earlier positions.

    Args:
        d: Width of the layer.
        kernel: Kernel width k.
        dilation: Distance between two neighbouring positions that the kernel sees.
    """

    def __init__(self, d: int, kernel: int, dilation: int = 1):
        super().__init__()
        self.left_padding = dilation * (kernel - 1)
        self.layer = nn.Conv1d(d, d, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Compute all positions at once.

        Args:
            x: Input, [1, n, d].

        Returns:
            Output, [1, n, d].
        """
        return self.layer(F.pad(x.transpose(1, 2), (self.left_padding, 0))).transpose(1, 2)


KINDS = {
    "self-attention": Kind(lambda d, k, r: self_attention, "n^2 d", "1", (2, 1), "4 n^2 d", (2, 1)),
    "self-attention, fused": Kind(
        lambda d, k, r: fused_self_attention, "n^2 d", "1", (2, 1), "4 n^2 d", (1, 1)
    ),
    "projections": Kind(lambda d, k, r: Projections(d), "n d^2", "1", (1, 2), "8 n d^2", (1, 1)),
    "recurrent": Kind(lambda d, k, r: Recurrence(d), "n d^2", "n", (1, 2), "12 n d^2", (1, 1)),
    "convolutional": Kind(
        lambda d, k, r: Convolution(d, k), "k n d^2", "1", (1, 2), "2 k n d^2", (1, 1)
    ),
    "restricted attention": Kind(
        lambda d, k, r: lambda x: restricted_self_attention(x, r),
        "r n d",
        "1",
        (1, 1),
        "4 r n d",
        (1, 1),
    ),
}
ATTENTION, FUSED, PROJECTIONS, RECURRENT = list(KINDS)[:4]
# suffix for a stack of layers whose dilation grows from layer to layer; only its path is measured
DILATED = ", dilated"


class Cost(NamedTuple):
    """Cost of a layer at one size.

    Attributes:
        flops: FLOPs of a forward pass, as torch counts them.
        seconds: Time of a forward pass, in seconds; on a CPU, with one thread.
        saved_bytes: Bytes saved for the backward pass, without the model's weights.
        peak: Peak GPU memory of forward and backward pass, in bytes; None on a CPU.
    """

    flops: int
    seconds: float
    saved_bytes: int
    peak: int | None


def measure(kind: str, n: int, d: int, kernel: int, neighbourhood: int, device: str) -> Cost:
    """Measure the cost of a layer on one sequence.

    Args:
        kind: Name of a kind in `KINDS`.
        n: Number of positions.
        d: Width of the layer.
        kernel: Kernel width k of the convolution.
        neighbourhood: Neighbourhood r of restricted attention.
        device: Device to measure time and memory on.

    Returns:
        The cost of the layer.
    """
    build = KINDS[kind].build
    # count on the meta device, where torch also sees the operations inside fused kernels. A
    # recurrence is the exception: each of its steps takes milliseconds on the meta device, and on a
    # CPU it has no fused kernel
    counting_device = "cpu" if kind == RECURRENT else "meta"
    with torch.device(counting_device), torch.no_grad(), FlopCounterMode(display=False) as counter:
        build(d, kernel, neighbourhood)(torch.empty(1, n, d))
    with torch.device(device):
        layer = build(d, kernel, neighbourhood)
        x = torch.randn(1, n, d)
    seconds = _measure_seconds(layer, x)
    weights = layer.parameters() if isinstance(layer, nn.Module) else ()
    weight_addresses = {weight.untyped_storage().data_ptr() for weight in weights}
    x.requires_grad_()
    saved_bytes = count_saved_bytes(layer, x, weight_addresses)
    peak = None
    if x.is_cuda:
        allocated_before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layer(x).sum().backward()
        peak = torch.cuda.max_memory_allocated() - allocated_before
    return Cost(counter.get_total_flops(), seconds, saved_bytes, peak)


@torch.inference_mode()
def _measure_seconds(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    run_seconds: list[float] = []
    num_threads = torch.get_num_threads()
    # measure the CPU time of a single thread, so that other programs have no effect
    torch.set_num_threads(1)
    try:
        layer(x)
        while len(run_seconds) < MIN_RUNS or sum(run_seconds) < MIN_SECONDS:
            started = _read_clock(x)
            layer(x)
            run_seconds.append(_read_clock(x) - started)
    finally:
        torch.set_num_threads(num_threads)
    return min(run_seconds)


def _read_clock(x: Tensor) -> float:
    if not x.is_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def count_saved_bytes(
    layer: Callable[[Tensor], Tensor], x: Tensor, weight_addresses: set[int]
) -> int:
    """Count the bytes that a forward pass saves for the backward pass; shared memory counts once.

    Args:
        layer: Layer to run.
        x: Input that requires a gradient.
        weight_addresses: Memory addresses of the weights, which are not counted.

    Returns:
        Number of bytes, including those of the input if the layer saves its input.
    """
    sizes_by_address: dict[int, int] = {}

    def record_size(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_addresses:
            sizes_by_address[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(record_size, lambda tensor: tensor):
        # the output keeps the saved tensors alive, so no two of them can have the same address
        output = layer(x)
    del output
    return sum(sizes_by_address.values())


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Fit the exponent of a power law by least squares on logarithms.

    Args:
        sizes: Sizes, for example numbers of positions.
        values: Cost at each size.

    Returns:
        The exponent: the slope of the logarithms.
    """
    x, y = (
        torch.tensor(values_of_axis, dtype=torch.float64).log()
        for values_of_axis in (sizes, values)
    )
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def longest_chain(output: Tensor) -> int:
    """Return the length of the longest chain of dependent operations in a graph.

    Args:
        output: Result of a computation that tracks gradients.

    Returns:
        Number of operations on the longest path back to a leaf.
    """
    depth: dict[Node, int] = {}
    last_node: Any = output.grad_fn
    stack: list[Node] = [last_node]
    while stack:
        node = stack[-1]
        inputs = [input_node for input_node, _ in node.next_functions if input_node is not None]
        unvisited_inputs = [input_node for input_node in inputs if input_node not in depth]
        if unvisited_inputs:
            stack += unvisited_inputs
            continue
        # a leaf has depth 0: its node only accumulates the gradient and is not an operation
        depth[node] = 1 + max((depth[input_node] for input_node in inputs), default=-1)
        stack.pop()
    return depth[last_node]


def layers_to_connect(n: int, layer_at: Callable[[int], Callable[[Tensor], Tensor]]) -> int:
    """Count the layers until the last position depends on the first.

    Args:
        n: Number of positions.
        layer_at: Function that returns the layer at an index, counted from 0; a layer maps
            [1, n, `PATH_WIDTH`] to the same shape.

    Returns:
        Smallest number of layers with which the gradient of the last output with respect to the
        first input is not zero.
    """
    x = torch.randn(1, n, PATH_WIDTH, dtype=torch.float64, requires_grad=True)
    y, num_layers = x, 0
    while True:
        y, num_layers = layer_at(num_layers)(y), num_layers + 1
        (gradient,) = torch.autograd.grad(y[0, -1].sum(), x, retain_graph=True)
        if gradient[0, 0].count_nonzero():
            return num_layers


def states_to_connect(n: int) -> int:
    """Count the states that the gradient passes from the last position to the first.

    Args:
        n: Number of positions.

    Returns:
        Number of states whose gradient is not zero; 0 if the gradient does not reach the first
        input.
    """
    cell = nn.GRUCell(PATH_WIDTH, PATH_WIDTH, dtype=torch.float64)
    inputs = torch.randn(n, 1, PATH_WIDTH, dtype=torch.float64).requires_grad_().unbind()
    inputs[0].retain_grad()
    state, has_gradient = torch.zeros(1, PATH_WIDTH, dtype=torch.float64), []
    for x in inputs:
        state = cell(x, state)
        state.register_hook(lambda gradient: has_gradient.append(gradient.count_nonzero()))
    state.sum().backward()
    gradient: Any = inputs[0].grad
    return sum(map(bool, has_gradient)) if gradient.count_nonzero() else 0


def path_lengths(n: int, kernel: int, neighbourhood: int) -> dict[str, tuple[int, int]]:
    """Return the maximum path length between two positions, by gradients and by the formula.

    Args:
        n: Number of positions, at least 2.
        kernel: Kernel width k, at least 2.
        neighbourhood: Neighbourhood r, odd, at least 3.

    Returns:
        Measured and computed number of operations from the first position to the last, by kind.
    """

    def build_convolution(dilation: int) -> Convolution:
        return Convolution(PATH_WIDTH, kernel, dilation).double()

    side_width = neighbourhood // 2
    return {
        "self-attention": (layers_to_connect(n, lambda _: self_attention), 1),
        "recurrent": (states_to_connect(n), n),
        "convolutional": (
            layers_to_connect(n, lambda _: build_convolution(1)),
            math.ceil((n - 1) / (kernel - 1)),
        ),
        # with the dilations 1, k, k^2, ... the receptive field of a stack is k^layers positions
        f"convolutional{DILATED}": (
            layers_to_connect(n, lambda layer_index: build_convolution(kernel**layer_index)),
            next(num_layers for num_layers in range(1, n) if kernel**num_layers >= n),
        ),
        "restricted attention": (
            layers_to_connect(n, lambda _: lambda x: restricted_self_attention(x, neighbourhood)),
            math.ceil((n - 1) / side_width),
        ),
    }


def chain_lengths(n: int, kernel: int, neighbourhood: int) -> dict[str, int]:
    """Return the longest chain of dependent operations of each layer, on a CPU.

    Args:
        n: Number of positions.
        kernel: Kernel width k.
        neighbourhood: Neighbourhood r, odd.

    Returns:
        Number of operations on the longest chain of torch's graph, by kind.
    """
    return {
        name: longest_chain(
            kind.build(PATH_WIDTH, kernel, neighbourhood)(
                torch.randn(1, n, PATH_WIDTH, requires_grad=True)
            )
        )
        for name, kind in KINDS.items()
    }
