"""The three uses of attention. Section 3.2.3."""

from typing import NamedTuple

from torch import Tensor


class Kind(NamedTuple):
    """One of the three uses of attention. Section 3.2.3.

    Attributes:
        title: Title.
        queries: Tokens of the queries, a field of `AttentionWeights`.
        keys: Tokens of the keys, a field of `AttentionWeights`.
    """

    title: str
    queries: str
    keys: str


KINDS = {
    "encoder": Kind("encoder self-attention", "source", "source"),
    "decoder": Kind("decoder self-attention", "inputs", "inputs"),
    "cross": Kind("encoder-decoder attention", "target", "source"),
}


def head_or_mean(values: Tensor, layer: int, head: int | None) -> Tensor:
    """Return the weights of one head, or the mean over the heads of the layer.

    Args:
        values: Attention weights, [N, h, Q, K].
        layer: Layer number, counted from 0.
        head: Head number, counted from 0; None for the mean over all heads.

    Returns:
        The weights, [Q, K].
    """
    return values[layer].mean(dim=0) if head is None else values[layer, head]
