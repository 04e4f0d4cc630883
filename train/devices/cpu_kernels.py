"""CPU kernels for training: oneDNN products, cheap dropout, attention in half precision."""

import functools
import logging
import platform
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

from ...identity_vanilla_transformer import difference_below_head
from ...kernels_vanilla_transformer import has_bf16_instructions, is_intel

logger = logging.getLogger(__name__)

# names of x86 CPUs in Linux, macOS and Windows
X86_MACHINES = ("x86_64", "AMD64")
# smallest number of elements of each factor for oneDNN: for smaller matrices, building oneDNN's
# kernel takes longer than the kernel saves
SMALLEST_FOR_ONEDNN = 2**14
# number of values of the 16 random bits that dropout uses for each element
LANES = 2**16
# name under which `half_precision_attention` is registered in transformers
CPU_ATTENTION = "sdpa_half_on_cpu"
# largest number of keys for attention in bf16, which keeps all weights for the backward pass
LONGEST_FOR_BF16 = 256
# settings of the library's `sdpa_attention_forward` that attention in bf16 does not have
SDPA_SETTINGS = ("is_causal", "position_bias", "softcap")
# number of scores that are computed at a time: 4 MiB in float32
SCORES_IN_CACHE = 2**20


@functools.cache
def is_onednn_faster() -> bool:
    """Return whether oneDNN is faster than MKL in float32 on this CPU, and works.

    MKL uses 512-bit vectors only on Intel CPUs, so oneDNN is faster on other CPUs with AVX-512. The
    operator for oneDNN is internal to torch and may change, so it is tested once per process, also
    with transposed operands as in a backward pass.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or is_intel():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 90, 70, generator=generator, dtype=torch.float32)
    try:
        products = onednn_product(x, weight), onednn_product(x.T, weight.T)
    except (AttributeError, RuntimeError):
        # another version of torch may lack the operator or refuse the arguments
        return False
    expected = x @ weight.T, x.T @ weight
    return all(map(functools.partial(torch.allclose, atol=1e-4), products, expected))


def is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN is the faster library for the product x W^T.

    Args:
        x: Input, [..., inputs].
        weight: Weight, [outputs, inputs].
    """
    is_single = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    is_large = min(x.numel(), weight.numel()) >= SMALLEST_FOR_ONEDNN
    return is_single and is_large and is_onednn_faster()


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, computed by oneDNN.

    Args:
        x: Input, [rows, inputs]; input and weight may be transposed views.
        weight: Weight, [outputs, inputs].
        bias: Bias, [outputs], or None.

    Returns:
        Output, [rows, outputs].
    """
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, computed by the faster library.

    Args:
        x: Input, [rows, inputs].
        weight: Weight, [outputs, inputs].

    Returns:
        Output, [rows, outputs].
    """
    return (onednn_product if is_for_onednn(x, weight) else F.linear)(x, weight)


class OneDnnLinear(nn.Linear):
    """Linear layer that uses oneDNN in float32 training, in forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: Input, [..., inputs].

        Returns:
            Output, [..., outputs].
        """
        # a compiled model uses the plain layer, because the custom function would break its graph
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
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        of_x, of_weight, of_bias = ctx.needs_input_grad
        # a loss may contain a gradient, so the products have gradients themselves
        return (
            _OneDnnProduct.apply(grad_output, weight.T, None) if of_x else None,
            _OneDnnProduct.apply(grad_output.T, x.T, None) if of_weight else None,
            grad_output.sum(0) if of_bias else None,
        )


class CheapDropout(nn.Dropout):
    """Dropout with a fast random number generator.

    On a CPU, torch's random numbers take a large part of the time of dropout. Here each element
    uses 16 bits from a faster generator, which is seeded from torch's generator, so the result
    depends only on torch's seed. The probability is rounded to 16 bits, and the scale of the kept
    elements is exact for the rounded probability.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout.

        Args:
            x: Input, of any shape.

        Returns:
            Output, of the same shape.
        """
        # a compiled model uses the plain module, because compiled code draws its own random numbers
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
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output * ctx.is_kept.to(grad_output.dtype).mul_(ctx.scale), None


def half_precision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a model in half precision as fast as this CPU can. Section 3.2.1.

    In a training step, the products are in bf16 and the softmax is in float32. Elsewhere, and on a
    CPU without instructions for bf16, torch's attention runs in float32. In half precision, its
    backward pass takes several times as long.

    Args:
        module: Attention module, which has the attribute `is_causal`.
        query: Queries, [B, h, T, d_k].
        key: Keys, [B, h, S, d_k].
        value: Values, [B, h, S, d_v].
        attention_mask: Mask for torch's attention, or None.
        kwargs: Further arguments of the library's `sdpa_attention_forward`.

    Returns:
        Context in the precision of the query, [B, T, h, d_v], and None instead of the weights.
    """
    is_bf16_step = module.training and query.dtype == torch.bfloat16 and has_bf16_instructions()
    if is_bf16_step and _takes_bf16(key, attention_mask, kwargs):
        bias = _score_bias(module, query, key, attention_mask)
        scaling = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
        return _Bf16Attention.apply(query, key, value, bias, scaling).transpose(1, 2), None
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    singles = (tensor.float() for tensor in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        values, _ = sdpa_attention_forward(module, *singles, attention_mask, **kwargs)
    return values.to(query.dtype), None


def _takes_bf16(key: Tensor, mask: Tensor | None, settings: dict[str, Any]) -> bool:
    """Return whether `_Bf16Attention` computes what torch's attention computes."""
    if torch.compiler.is_compiling() or key.shape[2] > LONGEST_FOR_BF16:
        return False
    if settings.get("dropout") or any(settings.get(name) is not None for name in SDPA_SETTINGS):
        return False
    if mask is None:
        return True
    # where a mask hides every key, torch's attention returns 0
    hides_all_keys = mask.dtype == torch.bool and not mask.any(dim=-1).all()
    return mask.dim() == 4 and not mask.requires_grad and not hides_all_keys


def _score_bias(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None
) -> Tensor | None:
    """Return what is added to the scores, broadcastable to [B, h, T, S], or None for nothing."""
    if mask is None:
        if query.shape[2] == 1 or not module.is_causal:
            return None
        mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    if mask.dtype == torch.bool:
        lowest = torch.finfo(torch.float32).min
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, lowest)
    return mask.expand(len(query), -1, -1, -1)


class _Bf16Attention(torch.autograd.Function):
    """Attention of whole sentences, of as many at a time as the cache holds the scores of."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float
    ) -> Tensor:
        batch, heads, length, _ = query.shape
        query, key, value = (each.flatten(0, 1).contiguous() for each in (query, key, value))
        weights = query.new_empty(len(query), length, key.shape[1])
        context = query.new_empty(len(query), length, value.shape[2])
        size = max(1, SCORES_IN_CACHE // max(1, heads * length * key.shape[1]))
        for start in range(0, batch, size):
            rows = slice(start * heads, (start + size) * heads)
            scores = torch.bmm(query[rows], key[rows].transpose(1, 2)).float().mul_(scaling)
            if bias is not None:
                scores.unflatten(0, (-1, heads)).add_(bias[start : start + size])
            weights[rows] = scores.softmax(-1)
            torch.bmm(weights[rows], value[rows], out=context[rows])
        ctx.save_for_backward(query, key, value, weights)
        ctx.heads, ctx.size, ctx.scaling = heads, size, scaling
        return context.unflatten(0, (batch, heads))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, all_weights = ctx.saved_tensors
        grad_output = grad_output.flatten(0, 1).contiguous()
        grads = of_query, of_key, of_value = tuple(map(torch.empty_like, (query, key, value)))
        for start in range(0, len(query), ctx.size * ctx.heads):
            rows = slice(start, start + ctx.size * ctx.heads)
            weights, grad = all_weights[rows], grad_output[rows]
            torch.bmm(weights.transpose(1, 2), grad, out=of_value[rows])
            # the gradient of the softmax: w (g - sum(w g))
            single_weights = weights.float()
            of_scores = torch.bmm(grad, value[rows].transpose(1, 2)).float().mul_(single_weights)
            of_scores.addcmul_(single_weights, of_scores.sum(-1, keepdim=True), value=-1)
            of_scores = of_scores.mul_(ctx.scaling).to(query.dtype)
            torch.bmm(of_scores, key[rows], out=of_query[rows])
            torch.bmm(of_scores.transpose(1, 2), query[rows], out=of_key[rows])
        return *(grad.unflatten(0, (-1, ctx.heads)) for grad in grads), None, None


AttentionInterface.register(CPU_ATTENTION, half_precision_attention)
AttentionMaskInterface.register(CPU_ATTENTION, sdpa_mask)


def use_cpu_kernels(model: PreTrainedModel, is_half: bool) -> None:
    """Make a model train faster on a CPU: replace its dropout, linear layers or attention in place.

    A model with modules that are not those of this release stays unchanged, because they may use
    dropout, linear layers and attention in another way. The class of the model may be any class.

    Args:
        model: Model to change.
        is_half: Whether the model is trained in half precision.
    """
    if difference_below_head(model) is not None:
        return
    use_cheap_dropout(model)
    if not is_half:
        use_onednn(model)
    is_sdpa = model.config._attn_implementation == "sdpa"
    if is_half and is_sdpa and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
        model.set_attn_implementation(CPU_ATTENTION)


def emulates_bf16() -> bool:
    """Return whether this is an x86 CPU without instructions for bf16, where torch emulates it.

    `has_bf16_instructions` checks only for the instructions of x86 CPUs.
    """
    return platform.machine() in X86_MACHINES and not has_bf16_instructions()


def warn_of_emulated_bf16(remedy: str) -> None:
    """Warn if this CPU emulates bf16.

    Args:
        remedy: Flag that sets fp32 instead.
    """
    if emulates_bf16():
        logger.warning(
            "Training in bf16 is many times slower than in fp32 on this CPU, which has no "
            "instructions for bf16 (avx512_bf16 or amx_bf16): set %s.",
            remedy,
        )


def use_onednn(model: nn.Module) -> None:
    """Make the linear layers of a model use oneDNN in training, if it is faster in float32.

    Args:
        model: Model to change. The class of its linear layers changes in place; their weights and
            hooks stay. Tools that look for the exact class `nn.Linear` no longer find the layers.
    """
    if is_onednn_faster():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDnnLinear


def use_cheap_dropout(model: nn.Module) -> None:
    """Replace the dropout modules of a model by `CheapDropout`.

    Args:
        model: Model, changed in place.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout and 0 < child.p < 1:
                setattr(module, name, CheapDropout(child.p).train(child.training))
