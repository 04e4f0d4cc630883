"""Attention weights as matrices and as lines between words. Figures 3 to 5."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...attention_maps import AttentionWeights
from ...drawing import label_rows_and_columns, new_figure
from .kinds import KINDS, head_or_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_grid(weights: AttentionWeights, kind: str) -> "Figure":
    """Draw all heads of one kind of attention: a row for each layer, a column for each head.

    Args:
        weights: Attention weights of a sentence.
        kind: "encoder", "decoder" or "cross".

    Returns:
        The picture; masked positions are hatched.
    """
    head_weights = getattr(weights, kind)  # [N, h, Q, K]
    queries, keys = getattr(weights, KINDS[kind].queries), getattr(weights, KINDS[kind].keys)
    num_layers, num_heads = head_weights.shape[:2]
    width, height = 1.6 + 0.17 * len(keys) * num_heads, 1.4 + 0.17 * len(queries) * num_layers
    figure, all_axes = new_figure(width, height, num_layers, num_heads)
    for layer in range(num_layers):
        for head in range(num_heads):
            axes = all_axes[layer, head] if num_layers * num_heads > 1 else all_axes
            image = draw_matrix(axes, weights, kind, layer, head)
            axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8)
            label_rows_and_columns(axes, queries, keys)
            is_left, is_bottom = head == 0, layer == num_layers - 1
            axes.tick_params(labelsize=7, length=2, labelleft=is_left, labelbottom=is_bottom)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.colorbar(image, ax=all_axes, label="weight", shrink=0.6, aspect=30)
    return figure


def draw_matrix(
    axes: Any, weights: AttentionWeights, kind: str, layer: int, head: int | None = None
) -> Any:
    """Draw one head: a row for each query, a column for each key.

    Args:
        axes: Axes to draw on.
        weights: Attention weights of a sentence.
        kind: "encoder", "decoder" or "cross".
        layer: Layer number, counted from 0.
        head: Head number, counted from 0; by default the mean of all heads of the layer.

    Returns:
        The matplotlib image, from which a colour bar can be made.
    """
    import numpy as np

    matrix = head_or_mean(getattr(weights, kind), layer, head).numpy()  # [Q, K]
    # masked positions show the hatched background, not the colour of a weight of zero
    hidden_mask = weights.hidden().numpy() if kind == "decoder" else False
    axes.patch.set(facecolor="0.92", hatch="/////", edgecolor="0.75")
    visible_matrix = np.ma.masked_where(np.broadcast_to(hidden_mask, matrix.shape), matrix)
    return axes.imshow(visible_matrix, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")


def head_colors(num_heads: int) -> list[tuple[float, float, float]]:
    """Return a colour for each head.

    Args:
        num_heads: Number of heads h of a layer.

    Returns:
        Red, green and blue from 0 to 1, for each head; the colours repeat after twenty heads.
    """
    import matplotlib

    colormap: Any = matplotlib.colormaps["tab10" if num_heads <= 10 else "tab20"]
    return [colormap.colors[head % len(colormap.colors)] for head in range(num_heads)]


def draw_lines(
    axes: Any,
    weights: AttentionWeights,
    kind: str,
    layer: int,
    heads: Sequence[int],
    query: int | None = None,
) -> None:
    """Draw lines between queries on the left and keys on the right. Figures 3 to 5.

    The opacity of a line is the attention weight.

    Args:
        axes: Axes to draw on.
        weights: Attention weights of a sentence, by token or by word.
        kind: "encoder", "decoder" or "cross".
        layer: Layer number, counted from 0.
        heads: Head numbers, counted from 0; one colour each.
        query: Number of the query to draw, counted from 0; by default all queries.
    """
    queries, keys = getattr(weights, KINDS[kind].queries), getattr(weights, KINDS[kind].keys)
    layer_weights = getattr(weights, kind)[layer].tolist()  # [h][Q][K]
    colors = head_colors(len(layer_weights))
    shown_queries = range(len(queries)) if query is None else [query]
    for line_set, head in enumerate(heads):
        color = colors[head]
        # shift the lines of each head, because the last head would cover the heads before it
        shift = (line_set - (len(heads) - 1) / 2) * 0.6 / len(heads)
        for query_index in shown_queries:
            for key_index, weight in enumerate(layer_weights[head][query_index]):
                ends = [query_index + shift, key_index + shift]
                axes.plot([0, 1], ends, color=color, alpha=weight, linewidth=2.2)
    word_style = {"parse_math": False, "va": "center", "fontsize": 9}
    for query_index, text in enumerate(queries):
        opacity = 1 if query_index in shown_queries else 0.35
        axes.text(-0.04, query_index, text, ha="right", alpha=opacity, **word_style)
    for key_index, text in enumerate(keys):
        axes.text(1.04, key_index, text, ha="left", **word_style)
    heading_style = {"fontsize": 8, "color": "0.4", "style": "italic"}
    axes.text(-0.04, -1, "query", ha="right", **heading_style)
    axes.text(1.04, -1, "key", ha="left", **heading_style)
    axes.set_ylim(max(len(queries), len(keys)) - 0.5, -1.5)
    axes.set_xlim(-0.9, 1.9)
    axes.axis("off")
