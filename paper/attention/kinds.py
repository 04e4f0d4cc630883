"""The three uses of attention. Section 3.2.3.

Shapes: N layers, h heads, Q queries, K keys.
"""

from typing import NamedTuple

from torch import Tensor


class Kind(NamedTuple):
    """A use of attention in the model: encoder, decoder or encoder-decoder. Section 3.2.3.

    Attributes:
        title: Name of the attention in headings, as in the paper.
        queries: Field of `AttentionWeights` that contains the tokens of the queries.
        keys: Field of `AttentionWeights` that contains the tokens of the keys.
    """

    title: str
    queries: str
    keys: str


KINDS = {
    "encoder": Kind("encoder self-attention", "source", "source"),
    "decoder": Kind("decoder self-attention", "inputs", "inputs"),
    "cross": Kind("encoder-decoder attention", "target", "source"),
}


def head_or_mean(weights: Tensor, layer: int, head: int | None) -> Tensor:
    """Return the weights of one head, or the mean over the heads of the layer.

    Args:
        weights: Attention weights, [N, h, Q, K].
        layer: Layer number, counted from 0.
        head: Head number, counted from 0; None for the mean over all heads.

    Returns:
        The weights, [Q, K].
    """
    return weights[layer].mean(dim=0) if head is None else weights[layer, head]
