"""Kernels for training on a CPU: products by oneDNN, cheap dropout, attention in float32."""

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...identity_vanilla_transformer import computing_modules, first_difference
from ...kernels_vanilla_transformer import is_intel

# of matrices, below which to make oneDNN's kernel for their shapes takes longer than it saves
SMALLEST_FOR_ONEDNN = 2**14
# a decision of dropout has 16 random bits
LANES = 2**16
# the name under which the library knows `attention_in_float32`
FLOAT32_ATTENTION = "sdpa_float32"


@functools.cache
def is_onednn_faster() -> bool:
    """Whether oneDNN is the faster in float32 here: MKL has 512 bits on Intel's processors only.

    Its operator is there for torch's own use and promises little, so it is tried, once in a
    process, as a backward pass uses it.

    Returns:
        Whether it is, and multiplies right.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or is_intel():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 90, 70, generator=generator, dtype=torch.float32)
    try:
        products = onednn_product(x, weight), onednn_product(x.T, weight.T)
    except (AttributeError, RuntimeError):
        # another torch has no such operator, or refuses what it is given
        return False
    expected = x @ weight.T, x.T @ weight
    return all(map(functools.partial(torch.allclose, atol=1e-4), products, expected))


def is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is the faster to multiply two matrices.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs].

    Returns:
        Whether it is.
    """
    is_single = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    is_large = min(x.numel(), weight.numel()) >= SMALLEST_FOR_ONEDNN
    return is_single and is_large and is_onednn_faster()


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b by oneDNN.

    Args:
        x: [rows, inputs]; may be transposed in memory, as may the weight.
        weight: [outputs, inputs].
        bias: [outputs], or None.

    Returns:
        [rows, outputs].
    """
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T by the library that is the faster here.

    Args:
        x: [rows, inputs].
        weight: [outputs, inputs].

    Returns:
        [rows, outputs].
    """
    return (onednn_product if is_for_onednn(x, weight) else F.linear)(x, weight)


class OneDnnLinear(nn.Linear):
    """A linear layer whose products in training, there and back, are oneDNN's in float32."""

    is_plain_in_evaluation = True

    def forward(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: [..., inputs].

        Returns:
            [..., outputs].
        """
        # what is compiled is not to break off here
        if torch.compiler.is_compiling() or not self.training:
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type) or not is_for_onednn(x, self.weight):
            return super().forward(x)
        rows = x.reshape(-1, x.shape[-1])
        return _OneDnnProduct.apply(rows, self.weight, self.bias).view(*x.shape[:-1], -1)


class _OneDnnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            onednn_product(grad_output, weight.T) if of_x else None,
            onednn_product(grad_output.T, x.T) if of_weight else None,
            grad_output.sum(0) if of_bias else None,
        )


class CheapDropout(nn.Dropout):
    """Dropout on a processor, where to draw random numbers is a good part of its time.

    A decision has 16 bits of a number from a fast generator, whose seed torch's own draws: what is
    dropped is a function of torch's seed. The scale is exact for the share that is dropped.
    """

    is_plain_in_evaluation = True

    def forward(self, x: Tensor) -> Tensor:
        """Drop some, and scale the others up.

        Args:
            x: Of any shape.

        Returns:
            The same shape.
        """
        # what is compiled draws its random numbers by itself
        if not self.training or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        return _Drop.apply(x, round(self.p * LANES))


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: int) -> Tensor:
        seed = int(torch.randint(2**63 - 1, ()))
        words = np.random.SFC64(seed).random_raw(-(-x.numel() // 4))
        is_kept = np.greater_equal(words.view(np.uint16)[: x.numel()], dropped)
        ctx.is_kept = torch.from_numpy(is_kept.view(np.uint8)).view(x.shape)
        ctx.scale = LANES / (LANES - dropped)
        return x * ctx.is_kept.to(x.dtype).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output * ctx.is_kept.to(grad_output.dtype).mul_(ctx.scale), None


def attention_in_float32(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """torch's own attention in single precision, whatever the precision around it. Section 3.2.1.

    On a processor its backward pass takes several times as long in half precision.

    Args:
        module: The attention, which knows whether it is causal.
        query: [B, h, T, d_k].
        key: [B, h, S, d_k].
        value: [B, h, S, d_v].
        attention_mask: Which keys are seen, as torch's own attention takes it.
        kwargs: As the library's function for torch's own attention takes them.

    Returns:
        Values, [B, T, h, d_v], in the precision of the query, and None for the weights.
    """
    singles = (tensor.float() for tensor in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        values, _ = sdpa_attention_forward(module, *singles, attention_mask, **kwargs)
    return values.to(query.dtype), None


AttentionInterface.register(FLOAT32_ATTENTION, attention_in_float32)
AttentionMaskInterface.register(FLOAT32_ATTENTION, sdpa_mask)


def use_cpu_kernels(model: PreTrainedModel, is_half: bool) -> None:
    """Exchange modules that are slow to train on a CPU, in place, in a model of this release.

    A model with code of its own stays as it is: it may use the exchanged modules in another way.

    Args:
        model: The model.
        is_half: Whether it is trained in half precision.
    """
    if first_difference(computing_modules(model)) is not None:
        return
    use_cheap_dropout(model)
    if not is_half:
        use_onednn(model)
    is_sdpa = model.config._attn_implementation == "sdpa"
    if is_half and is_sdpa and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
        model.set_attn_implementation(FLOAT32_ATTENTION)


def use_onednn(model: nn.Module) -> None:
    """Let a model multiply with oneDNN in training, where that is the faster in float32.

    Args:
        model: Whose linear layers become of another class, in place, with their weights and hooks;
            tools that look for `nn.Linear` itself do not find them then.
    """
    if is_onednn_faster():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDnnLinear


def use_cheap_dropout(model: nn.Module) -> None:
    """Let a model draw what it drops from the fast generator.

    Args:
        model: Whose dropout is exchanged, in place.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout and 0 < child.p < 1:
                setattr(module, name, CheapDropout(child.p).train(child.training))
