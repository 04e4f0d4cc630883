"""Deviations between two computations of the same logits, and how large they may be."""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

# allowed deviation of the engine's logits from those of the modules, in standard deviations of the
# logits: the largest deviation in float32, the root mean square in half precision and in int8
FLOAT32_TOLERANCE, HALF_TOLERANCE, INT8_TOLERANCE = 1e-3, 0.05, 0.5
# Python modules whose layers quantize their inputs, some with one scale for all tokens of a call
QUANTIZED_MODULES = ("torch.ao.", "bitsandbytes.")


def tolerance_of(model: PreTrainedModel) -> tuple[float, bool]:
    """Return the allowed deviation between two computations of a model's logits.

    Args:
        model: Any model.

    Returns:
        The deviation in standard deviations of the logits, and whether only rounding in float32
        may cause it.
    """
    if any(type(module).__module__.startswith(QUANTIZED_MODULES) for module in model.modules()):
        return INT8_TOLERANCE, False
    # below the precision "highest", torch may compute float32 products in bfloat16 or TF32
    is_exact = model.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if is_exact and not torch.is_autocast_enabled(model.device.type):
        return FLOAT32_TOLERANCE, True
    return HALF_TOLERANCE, False


def logit_difference(
    actual: Tensor, expected: Tensor, bias: Tensor | None, is_exact: bool
) -> float:
    """Return the largest deviation of logits if `is_exact`, else their root mean square.

    Args:
        actual: Logits to check, [..., V].
        expected: Logits to compare with, [..., V].
        bias: Bias of the output projection, [V], or None.
        is_exact: Whether only rounding in float32 may separate them.
    """
    is_finite = expected.isfinite()
    if not is_finite.any() or not torch.equal(is_finite, actual.isfinite()):
        return math.inf
    unit_logits = without_bias(expected, bias)
    differences = deviations(actual, expected, unit_logits, is_exact=is_exact)
    differences = differences[is_finite]
    return float(differences.max() if is_exact else differences.square().mean().sqrt())


def without_bias(logits: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits without the bias of each token, except an infinite one.

    Args:
        logits: Logits, [..., V].
        bias: Bias of the output projection, [V], or None.
    """
    if bias is None:
        return logits
    return logits - bias.detach().to(logits).nan_to_num(posinf=0.0, neginf=0.0)


def deviations(
    actual: Tensor,
    expected: Tensor,
    unit_logits: Tensor,
    tokens: Tensor | None = None,
    is_exact: bool = True,
) -> Tensor:
    """Return the deviations of logits from the expected logits, in units of standard deviations.

    If `is_exact`, each token has a unit of its own: the standard deviation of its logits over all
    positions. A unit is at least the median of these standard deviations over the tokens whose
    logits vary. Rounding errors grow with the size of the numbers, so a unit is also at least 1/300
    of the median size of the logits of all tokens. If not `is_exact`, all tokens have the same
    unit: the standard deviation of the logits of the tokens whose logits vary. In both cases, the
    unit is at least 1/1000 of the expected number.

    Args:
        actual: Logits or log-probabilities of the model to check, [..., V].
        expected: Logits or log-probabilities of the model to compare with, [..., V].
        unit_logits: Logits of the model to compare with, [..., V], `without_bias`: a large bias
            says nothing about rounding errors of the other tokens.
        tokens: Token of each number; None if the last dimension is the whole vocabulary.
        is_exact: Whether only rounding in float32 may separate the two models; false for products
            in lower precision and for quantized weights.

    Returns:
        Deviations, in the shape of `actual`.
    """
    logit_rows = unit_logits.flatten(0, -2)
    spread, size = logit_rows.std(dim=0), logit_rows.abs().mean(dim=0)
    is_ordinary = spread > 1e-5 * size
    if not is_ordinary.any():
        units = logit_rows[logit_rows.isfinite()].std().expand_as(spread)
    elif is_exact:
        unit = torch.maximum(spread[is_ordinary].median(), size[size.isfinite()].median() / 300)
        # the standard deviation of logits that are -inf is NaN
        units = torch.maximum(unit, spread.nan_to_num(0.0))
    else:
        units = logit_rows[:, is_ordinary].std().expand_as(spread)
    units = units.clamp(min=torch.finfo(torch.float32).tiny)
    units = units if tokens is None else units[tokens]
    return (actual - expected).abs() / torch.maximum(units, expected.abs() / 1000)
