"""Numerical kernels of the inference engine: matrix products, top-k and CUDA graphs.

The functions here depend only on tensors and linear layers, not on the Transformer.
"""

import functools
import math
import platform
import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

# number of rows of the input for which weights are packed
PACKED_ROWS = 128
# numbers of rows with which products of packed weights are tested
TESTED_ROWS = (1, 4, 7, 60, 300)
# oneDNN builds a kernel for each number of rows, so numbers above this one are rounded up to one of
# its multiples
ROW_MULTIPLE = 8
# weights with more elements, and weights with at least this many inputs and at least this many
# outputs, are not packed: the packed copy would take much memory and would hardly be faster
MAX_PACKED_ELEMENTS, MAX_PACKED_WIDTH = 2**25, 2**10
# up to this number of rows, a product with unpacked weights, divided into this number of parts, is
# faster than oneDNN on a CPU with AVX2 and without AVX-512
FEWEST_ROWS, WEIGHT_PARTS = 4, 8
# up to this number of rows, oneDNN is faster if weights that are not packed are the left factor
FEW_ROWS = 64
# number of scores in a group; top-k searches only the groups with the largest maxima
TOKENS_PER_GROUP = 64
# smallest number of scores, of all rows, that top-k divides into groups
FEWEST_GROUPED_SCORES = 2**16
# the same, where only the largest score of a row is needed
FEWEST_GROUPED_FOR_LARGEST = 2**19
# if the largest logit of a row is within this distance of 0, the sum of the exponentials of the row
# neither overflows nor underflows in float32. Otherwise the maximum must be subtracted first
LARGEST_SAFE_LOGIT = 60.0
# almost 32 MiB, the largest block that raises the amount of freed memory that glibc keeps
LARGEST_KEPT_BYTES = 2**25 - 2**16
HIGHEST_INT8 = 127
# the largest weight of an output counts as at least this number, so that no scale is 0
SMALLEST_SCALE = 1e-12
# kernels for few outputs and for many; a CPU without VNNI uses only the first, which is always
# faster there
INT8_KERNELS = ("fbgemm", "onednn")
# with VNNI, largest number of outputs, over all rows, for which fbgemm is faster than oneDNN
FEW_OUTPUTS = 2**19


class PackedLinear:
    """x W^T + b of one or several linear layers with the same input.

    On a CPU the product is in float32. Small weights are packed, as are weights of another dtype,
    and large weights are read from the layers. With oneDNN on a CPU with AVX2 and without AVX-512,
    products of few rows read all float32 weights of single layers from the layers. On a GPU the
    product is in the dtype of the weights.

    Args:
        layers: Layers with the same input; their outputs are concatenated.
        then_relu: Apply ReLU to the outputs.
    """

    def __init__(self, layers: Sequence[nn.Linear], then_relu: bool = False):
        self.layers, self.then_relu = layers, then_relu
        self.weights_in_place = [side_by_side([layer]) for layer in layers]
        if any(self.is_used_in_place(weight) for weight, _ in self.weights_in_place):
            self.library = "onednn" if _is_available_and_correct("onednn") else None
            return
        self.weights_in_place = []
        weight, self.bias = side_by_side(layers)
        is_on_cpu = weight.device.type == "cpu"
        self.library = packing_library() if is_on_cpu else None
        if not is_on_cpu:
            self.weight = weight.t()
            return
        weight, self.bias = _converted(weight, self.bias, torch.float32)
        if self.library is None:
            self.weight = weight.t().contiguous()
            return
        if self.library == "onednn":
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
            return
        self.weight = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_ROWS)
        # the product reads only the shape of the original weight, so a concatenated or converted
        # weight frees its memory
        self.original_weight = weight
        if len(layers) > 1 or layers[0].weight.dtype != torch.float32:
            weight.untyped_storage().resize_(0)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: Input, [rows, inputs].

        Returns:
            Outputs of all layers, [rows, outputs].
        """
        if self.weights_in_place:
            parts = [
                self._product_in_place(x, weight, bias) for weight, bias in self.weights_in_place
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.library == "onednn":
            if is_faster_in_parts(x) and self.layers[0].weight.dtype == torch.float32:
                return product_in_parts(x, self.unpacked_weight, self.bias, self.then_relu)
            return onednn_product(x, self.weight, self.bias, self.then_relu)
        if self.library == "mkl":
            product = mkl_product(x, self.weight, self.original_weight, self.bias)
        elif self.bias is None:
            product = x @ self.weight
        else:
            product = torch.addmm(self.bias, x, self.weight)
        return product.relu_() if self.then_relu else product

    @functools.cached_property
    def unpacked_weight(self) -> Tensor:
        """W, [outputs, inputs]: the weight of a single layer, or a copy of those of several layers.

        It is not used for layers of another dtype than float32, which would need a second copy.
        """
        return side_by_side(self.layers)[0]

    @staticmethod
    def is_used_in_place(weight: Tensor) -> bool:
        """Return whether a weight of a linear layer is read from the layer, without a copy."""
        return weight.device.type == "cpu" and weight.dtype == torch.float32 and is_large(weight)

    def _product_in_place(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.library is None:
            product = nn.functional.linear(x, weight, bias)
            return product.relu_() if self.then_relu else product
        return onednn_product_in_place(x, weight, bias, self.then_relu)


class Bf16Linear:
    """x W^T + b in bf16, on a CPU that has instructions for it.

    Small weights are packed, as are weights of another dtype. Large weights in bf16 are read from
    the layers.

    Args:
        layers: Layers with the same input; their outputs are concatenated.
        then_relu: Apply ReLU to the outputs. They then stay in bf16, in which the next product
            reads them; otherwise they are converted to float32.
    """

    def __init__(self, layers: Sequence[nn.Linear], then_relu: bool = False):
        self.then_relu = then_relu
        self.weights_in_place = [side_by_side([layer]) for layer in layers]
        if not any(self.is_used_in_place(weight) for weight, _ in self.weights_in_place):
            self.weights_in_place = []
            weight, self.bias = _converted(*side_by_side(layers), torch.bfloat16)
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: Input in float32 or bf16, [rows, inputs].

        Returns:
            Outputs of all layers, [rows, outputs], in float32, or in bf16 after ReLU.
        """
        x = x.to(torch.bfloat16)
        if self.weights_in_place:
            parts = [
                onednn_product_in_place(x, weight, bias, self.then_relu)
                for weight, bias in self.weights_in_place
            ]
            product = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        else:
            product = onednn_product(x, self.weight, self.bias, self.then_relu)
        return product if self.then_relu else product.float()

    @staticmethod
    def is_used_in_place(weight: Tensor) -> bool:
        """Return whether a weight of a linear layer is read from the layer, without a copy."""
        return weight.dtype == torch.bfloat16 and is_large(weight)


class PlainLinear:
    """x W^T + b, computed by the linear layers themselves, without packed weights.

    Args:
        layers: Layers with the same input; their outputs are concatenated.
        then_relu: Apply ReLU to the outputs.
    """

    def __init__(self, layers: Sequence[nn.Linear], then_relu: bool = False):
        self.layers, self.then_relu = layers, then_relu

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: Input, [rows, inputs].

        Returns:
            Outputs of all layers, [rows, outputs].
        """
        product = torch.cat([layer(x) for layer in self.layers], dim=-1)
        return product.relu_() if self.then_relu else product


class Int8Linear:
    """x W^T + b in int8, with one scale for each output and one scale for the whole input.

    Args:
        layers: Layers with the same input; their outputs are concatenated.
        then_relu: Apply ReLU to the outputs.
    """

    def __init__(self, layers: Sequence[nn.Linear], then_relu: bool = False):
        weight, bias = side_by_side(layers)
        scales = weight.abs().amax(dim=1).clamp(min=SMALLEST_SCALE) / HIGHEST_INT8
        zeros = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():
            # the kernels accept only quantized tensors, which torch has deprecated
            warnings.filterwarnings("ignore", ".*quantize_per_channel", UserWarning)
            quantized_weight = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.num_outputs = len(weight)
        # a CPU without VNNI adds pairs of products in 16 bits, which would overflow with inputs of
        # 8 bits
        self.uses_seven_bits = not torch.cpu._is_vnni_supported()
        engine_before = torch.backends.quantized.engine
        supported_kernels = torch.backends.quantized.supported_engines
        usable_kernels = [name for name in INT8_KERNELS if name in supported_kernels]
        usable_kernels = usable_kernels or [engine_before]
        self.weights = []
        try:
            for name in usable_kernels[:1] if self.uses_seven_bits else usable_kernels:
                torch.backends.quantized.engine = name
                self.weights.append(torch.ops.quantized.linear_prepack(quantized_weight, bias))
        finally:
            torch.backends.quantized.engine = engine_before
        kernels = torch.ops.quantized
        kernel = kernels.linear_relu_dynamic if then_relu else kernels.linear_dynamic
        self.multiply = kernel.default

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: Input, [rows, inputs].

        Returns:
            Outputs of all layers, [rows, outputs].
        """
        has_few_outputs = x.shape[0] * self.num_outputs <= FEW_OUTPUTS
        weight = self.weights[0 if has_few_outputs else -1]
        return self.multiply(x, weight, self.uses_seven_bits)

    @staticmethod
    def is_used_in_place(weight: Tensor) -> bool:
        """Return whether a weight of a linear layer is read from the layer, without a copy."""
        return False


@functools.cache
def keep_freed_memory():
    """Let glibc keep freed memory for the next step of a search, instead of returning it.

    Memory that was returned to the kernel is cleared, page by page, when it is used again. In int8
    this took as long as the products of a step. glibc keeps up to twice the size of the largest
    block that was mapped and freed, if this block has at most 32 MiB (mallopt(3), M_MMAP_THRESHOLD
    and M_TRIM_THRESHOLD), so freeing one such block is enough.
    """
    torch.empty(LARGEST_KEPT_BYTES, dtype=torch.uint8, device="cpu")


def is_large(weight: Tensor) -> bool:
    """Return whether a weight is too large to be packed.

    Args:
        weight: Weight of a linear layer.
    """
    return weight.numel() > MAX_PACKED_ELEMENTS or min(weight.shape) >= MAX_PACKED_WIDTH


def _converted(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def side_by_side(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights and the biases of layers with the same input.

    Args:
        layers: One layer or several.

    Returns:
        Weights [outputs, inputs], and biases [outputs] or None if no layer has a bias. Weight and
        bias of a single layer are not copied.
    """
    if len(layers) == 1:
        bias = layers[0].bias
        return layers[0].weight.detach(), None if bias is None else bias.detach()
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [
        weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    return weight, torch.cat(biases)


def mkl_product(x: Tensor, packed_weight: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b with weights that MKL has packed.

    Args:
        x: Input, [rows, inputs].
        packed_weight: Weight, packed by `_mkl_reorder_linear_weight`.
        weight: Original weight, of which only the shape is read, [outputs, inputs].
        bias: Bias, [outputs], or None.

    Returns:
        Outputs, [rows, outputs].
    """
    # MKL uses the packed weight only if the last argument is the number of rows
    return torch.ops.mkl._mkl_linear.default(x, packed_weight, weight, bias, x.shape[0])


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None, then_relu: bool) -> Tensor:
    """Compute x W^T + b with oneDNN; for few rows, faster than torch even if nothing is packed.

    Args:
        x: Input, [rows, inputs].
        weight: Weight [outputs, inputs], or the result of `_reorder_linear_weight`.
        bias: Bias, [outputs], or None.
        then_relu: Apply ReLU to the outputs.

    Returns:
        Outputs, [rows, outputs].
    """
    activation_name = "relu" if then_relu else "none"
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return multiply(_pad_rows(x), weight, bias, activation_name, [], "")[: len(x)]


def onednn_product_in_place(
    x: Tensor, weight: Tensor, bias: Tensor | None, then_relu: bool
) -> Tensor:
    """Compute x W^T + b with oneDNN and a weight that is not packed.

    Args:
        x: Input, [rows, inputs].
        weight: Weight, [outputs, inputs].
        bias: Bias, [outputs], or None.
        then_relu: Apply ReLU to the outputs.

    Returns:
        Outputs, [rows, outputs].
    """
    if len(x) > FEW_ROWS:
        return onednn_product(x, weight, bias, then_relu)
    if is_faster_in_parts(x):
        return product_in_parts(x, weight, bias, then_relu)
    product = product_of_few_rows(x, weight, bias)
    return product.relu_() if then_relu else product


def is_faster_in_parts(x: Tensor) -> bool:
    """Return whether `product_in_parts` is faster than oneDNN.

    Args:
        x: Input, [rows, inputs].
    """
    return len(x) <= FEWEST_ROWS and x.dtype == torch.float32 and has_mkl_and_avx2()


def product_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, then_relu: bool) -> Tensor:
    """Compute x W^T + b as a batch of products with parts of W, which the threads read in parallel.

    Args:
        x: Input of few rows, [rows, inputs].
        weight: Weight, not packed, [outputs, inputs].
        bias: Bias, [outputs], or None.
        then_relu: Apply ReLU to the outputs.

    Returns:
        Outputs, [rows, outputs].
    """
    outputs_per_part = len(weight) // WEIGHT_PARTS
    num_divided = WEIGHT_PARTS * outputs_per_part
    parts = weight[:num_divided].unflatten(0, (WEIGHT_PARTS, outputs_per_part))
    product = torch.bmm(parts, x.t().expand(WEIGHT_PARTS, -1, -1)).flatten(0, 1)  # [outputs, rows]
    if num_divided < len(weight):
        product = torch.cat((product, weight[num_divided:] @ x.t()))
    product = product.t().contiguous()
    if bias is not None:
        product.add_(bias)
    return product.relu_() if then_relu else product


def product_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b as (W x^T)^T + b, so that oneDNN copies x and not the weight.

    Args:
        x: Input, [rows, inputs].
        weight: Weight, not packed, [outputs, inputs].
        bias: Bias, [outputs], or None.

    Returns:
        Outputs, [rows, outputs].
    """
    multiply = torch.ops.mkldnn._linear_pointwise.default
    product = multiply(weight, _pad_rows(x), None, "none", [], "").t()[: len(x)].contiguous()
    return product if bias is None else product.add_(bias)


def _pad_rows(x: Tensor) -> Tensor:
    # oneDNN builds a kernel for each number of rows, so rounding up limits the number of kernels
    num_rows = len(x)
    if num_rows <= ROW_MULTIPLE or num_rows % ROW_MULTIPLE == 0:
        return x
    return nn.functional.pad(x, (0, 0, 0, -num_rows % ROW_MULTIPLE))


@functools.cache
def packing_library() -> str | None:
    """Return the library that multiplies with packed weights on this CPU.

    MKL has its fastest kernels for Intel CPUs only; oneDNN is faster on other CPUs. Their operators
    are private in torch, so each library is tested once per process. It is tested with several
    numbers of rows, because MKL guarantees correct results only for `PACKED_ROWS` rows.

    Returns:
        "mkl", "onednn", or None if neither is available and correct for all numbers of rows.
    """
    libraries = ("mkl",) if is_intel() else ("onednn", "mkl")
    return next(filter(_is_available_and_correct, libraries), None)


@functools.cache
def is_intel() -> bool:
    """Return whether the CPU is made by Intel, according to the operating system."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return "GenuineIntel" in file.read(2**12)
    except OSError:
        return "Intel" in platform.processor()


@functools.cache
def has_mkl_and_avx2() -> bool:
    """Return whether torch has MKL, and uses AVX2 but not AVX-512."""
    return torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2"


def has_bf16_instructions() -> bool:
    """Return whether the CPU multiplies in bf16, which torch would otherwise emulate slowly."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@functools.cache
def _is_available_and_correct(library: str) -> bool:
    if not getattr(torch.backends, "mkl" if library == "mkl" else "mkldnn").is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(150, 70, generator=generator, dtype=torch.float32)
    products: list[Callable[[Tensor], Tensor]]
    try:
        if library == "mkl":
            packed_weight = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_ROWS)
            products = [
                functools.partial(
                    mkl_product, packed_weight=packed_weight, weight=weight, bias=None
                )
            ]
        else:
            packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
            products = [
                functools.partial(onednn_product, weight=some_weight, bias=None, then_relu=False)
                for some_weight in (packed_weight, weight)
            ]
            products.append(functools.partial(product_of_few_rows, weight=weight, bias=None))
        for num_rows in TESTED_ROWS:
            x = torch.randn(num_rows, weight.shape[1], generator=generator, dtype=torch.float32)
            for product in products:
                if not torch.allclose(product(x), x @ weight.T, rtol=1e-4, atol=1e-4):
                    return False
    except (AttributeError, RuntimeError):
        # another version of torch lacks these operators, or refuses these arguments
        return False
    return True


def top_k_log_probs(logits: Tensor, count: int, suppressed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable tokens of each row; the logits may be overwritten.

    Args:
        logits: Scores of all tokens in float32, [rows, V].
        count: C, number of tokens to return.
        suppressed: Tokens that are never returned, on the device of the logits; their probabilities
            still count in the sum that normalizes the others.

    Returns:
        Log-probabilities and tokens, most probable first, [rows, C] each.
    """
    if not len(suppressed):
        best_logits, tokens = grouped_topk(logits, count)
        return best_logits - log_sum_exp_(logits, best_logits[:, :1]), tokens
    suppressed_logits = logits[:, suppressed]
    logits.index_fill_(1, suppressed, -torch.inf)
    best_logits, tokens = grouped_topk(logits, count)
    logits.index_copy_(1, suppressed, suppressed_logits)
    highest = torch.cat((best_logits[:, :1], suppressed_logits), dim=1).amax(dim=1, keepdim=True)
    return best_logits - log_sum_exp_(logits, highest), tokens


def grouped_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores of each row, as `topk` does, in one pass over a large row.

    A large row is divided into groups. The `count` largest scores are in the `count` groups with
    the largest maxima, so only these groups are searched.

    Args:
        scores: Scores, [rows, V].
        count: C, number of scores to return.

    Returns:
        Scores and their indices, largest first, [rows, C] each.
    """
    num_groups = scores.shape[1] // TOKENS_PER_GROUP
    if scores.numel() < FEWEST_GROUPED_SCORES or 4 * count > num_groups:
        best = scores.topk(count, dim=1)
        return best.values, best.indices
    num_grouped = num_groups * TOKENS_PER_GROUP
    grouped_scores = scores[:, :num_grouped].unflatten(1, (num_groups, TOKENS_PER_GROUP))
    best_groups = grouped_scores.amax(dim=2).topk(count, dim=1).indices  # [rows, C]
    wide_groups = best_groups[:, :, None].expand(-1, -1, TOKENS_PER_GROUP)
    searched_scores = torch.cat(
        (grouped_scores.gather(1, wide_groups).flatten(1), scores[:, num_grouped:]), dim=1
    )
    best = searched_scores.topk(count, dim=1)
    # the rest of a row is its last group, which is always searched
    searched_groups = nn.functional.pad(best_groups, (0, 1), value=num_groups)  # [rows, C + 1]
    first_indices = TOKENS_PER_GROUP * searched_groups.gather(1, best.indices // TOKENS_PER_GROUP)
    return best.values, first_indices + best.indices % TOKENS_PER_GROUP


def index_of_largest(scores: Tensor) -> Tensor:
    """Return the index of the largest score of each row, as `argmax` does, but faster on a CPU.

    Args:
        scores: Scores, [rows, V].

    Returns:
        Indices, [rows].
    """
    if scores.device.type == "cpu" and scores.numel() >= FEWEST_GROUPED_FOR_LARGEST:
        best_scores, indices = grouped_topk(scores, 2)
        # `argmax` returns the first of equal scores, and of scores that are not numbers
        if bool((best_scores[:, 0] > best_scores[:, 1]).all()):
            return indices[:, 0]
    # the same indices as those of `argmax`, which is slower on a CPU
    return scores.max(dim=-1).indices


def exp_(exponents: Tensor) -> Tensor:
    """Compute exponentials in place, with the faster function of the device.

    Args:
        exponents: Numbers, of any shape.

    Returns:
        The same tensor.
    """
    # on a CPU, torch's exp is MKL's, which is slow on CPUs that are not Intel's; exp2 is not MKL's
    if exponents.device.type == "cpu" and not is_intel():
        return exponents.mul_(math.log2(math.e)).exp2_()
    return exponents.exp_()


def log_sum_exp_(logits: Tensor, highest: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials of each row; the logits may be overwritten.

    Args:
        logits: Scores, [rows, V].
        highest: Largest score of each row, [rows, 1].

    Returns:
        Logarithms, [rows, 1].
    """
    is_on_cpu = logits.device.type == "cpu"
    # on a GPU, reading `highest` would make the CPU wait
    if is_on_cpu and bool((highest.abs() < LARGEST_SAFE_LOGIT).all()):
        return exp_(logits).sum(dim=1, keepdim=True).log_()
    return logits.logsumexp(dim=1, keepdim=True)


class _Captures(threading.local):
    """Capture stream of each thread, and the memory pool that the thread's graphs share, by device.

    The graphs of a thread are replayed one after another, and they write their results to tensors
    that were allocated before the capture. So they can share the memory of intermediate tensors.
    """

    def __init__(self):
        self.by_device: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]] = {}

    def __call__(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
        if device not in self.by_device:
            # the first graph is never replayed: it keeps the memory pool alive
            stream, pool_graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                pool_graph.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device=device)
                pool_graph.capture_end()
            self.by_device[device] = stream, pool_graph
        return self.by_device[device]


_captures = _Captures()


def captured(compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Compute once on a GPU, and capture the work as a CUDA graph.

    Args:
        compute: Function that reads and writes the same existing tensors in each call, and never
            waits for the GPU.
        device: GPU of the tensors.

    Returns:
        Function that repeats the work on the GPU without running the Python code again.
    """
    stream, pool_graph = _captures(device)
    current_stream = torch.cuda.current_stream(device)
    stream.wait_stream(current_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # this call is a warm-up, because libraries initialize themselves in their first call, and
        # an initialization cannot be captured. The warm-up also computes the result
        compute()
        # thread_local, because other threads may use the GPU meanwhile
        graph.capture_begin(pool=pool_graph.pool(), capture_error_mode="thread_local")
        try:
            compute()
        finally:
            graph.capture_end()
    current_stream.wait_stream(stream)
    return graph.replay
