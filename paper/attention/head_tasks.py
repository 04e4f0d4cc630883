"""Statistics of heads: entropy, distance, and shares of the weight by position of the key."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...attention_maps import AttentionWeights
from ...drawing import new_figure
from ..study import Section, join_names
from .kinds import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# kinds of keys, by their position relative to the query; "special" is a special token
KEY_KINDS = ("own", "previous", "next", "special", "other")


@dataclass(frozen=True, kw_only=True)
class HeadStatistics:
    """Statistics of a head, as means over its queries.

    Attributes:
        entropy: Entropy of the weights, in nats.
        distance: Mean distance between query and key in positions, weighted by attention.
        shares: Shares of the weight by `KEY_KINDS`: on the position of the query, the previous
            position, the next position, the special token (end of the source, start of the target),
            and all other positions.
    """

    entropy: float
    distance: float
    shares: dict[str, float]


def head_statistics(
    maps: Sequence[AttentionWeights], kind: str, is_uniform: bool = False
) -> list[list[HeadStatistics]]:
    """Measure the attention of each head. Section 4 and figure 5.

    Queries that can attend to only one key are not counted. Weight on the special token counts only
    as "special", even if this token is also the own, previous or next position.

    Args:
        maps: Attention weights of one or more sentences.
        kind: "encoder", "decoder" or "cross".
        is_uniform: Whether to measure uniform weights instead of the heads' own, for comparison.

    Returns:
        Statistics of each layer and head, [N][h].
    """
    sums: Any = 0
    num_queries = 0
    for weights in maps:
        values = getattr(weights, kind).double()  # [N, h, Q, K]
        visible = torch.ones_like(values, dtype=torch.bool)
        if kind == "decoder":
            visible = ~weights.hidden().expand_as(values)
        if is_uniform:
            values = visible.double() / visible.sum(dim=-1, keepdim=True)
        has_choice = visible[0, 0].sum(dim=-1) > 1  # [Q]
        values = values[:, :, has_choice]
        masks = _key_kind_masks(weights, kind)[:, has_choice]  # [key kinds, Q, K]
        steps = torch.arange(masks.shape[-1]) - has_choice.nonzero()  # [Q, K]
        entropy = -torch.special.xlogy(values, values).sum(dim=(-2, -1))  # [N, h]
        distance = (values * steps.abs()).sum(dim=(-2, -1))
        shares = torch.einsum("nhqk,pqk->pnh", values, masks.double())
        found = torch.cat((entropy[None], distance[None], shares))  # [2 + key kinds, N, h]
        sums = sums + found
        num_queries += int(has_choice.sum())
    means = (sums / num_queries).permute(1, 2, 0).tolist()
    return [
        [
            HeadStatistics(
                entropy=head[0],
                distance=head[1],
                shares=dict(zip(KEY_KINDS, head[2:], strict=True)),
            )
            for head in layer
        ]
        for layer in means
    ]


def _key_kind_masks(weights: AttentionWeights, kind: str) -> Tensor:
    """Return one mask for each of `KEY_KINDS`; every key of a query is True in exactly one mask."""
    num_queries, num_keys = getattr(weights, kind).shape[-2:]
    step = torch.arange(num_keys) - torch.arange(num_queries)[:, None]  # [Q, K]
    special = torch.zeros_like(step, dtype=torch.bool)
    special[:, 0 if kind == "decoder" else -1] = True
    near = [(step == offset) & ~special for offset in (0, -1, 1)]
    rest = ~(special | near[0] | near[1] | near[2])
    return torch.stack([*near, special, rest])  # [key kinds, Q, K]


def statistics_section(maps: Sequence[AttentionWeights], measured_on: str) -> Section:
    """Compare the statistics of all heads.

    Args:
        maps: Attention weights of one or more sentences.
        measured_on: Phrase for the text that describes the sentences of `maps`.

    Returns:
        The section.
    """
    rows, names, shares = [], [], []
    for kind, (title, _, _) in KINDS.items():
        found = head_statistics(maps, kind)
        uniform = head_statistics(maps, kind, is_uniform=True)[0][0]
        heads = [
            (layer + 1, str(head + 1), statistics)
            for layer, layer_heads in enumerate(found)
            for head, statistics in enumerate(layer_heads)
        ]
        for layer, head, statistics in [*heads, (None, "uniform", uniform)]:
            values = [statistics.shares[key_kind] for key_kind in KEY_KINDS]
            rows.append([title, layer, head, statistics.entropy, statistics.distance, *values])
            names.append(f"layer {layer}, head {head}" if layer else head)
            shares.append((kind, values))
    return Section(
        name="tasks",
        title="Statistics of the heads",
        finding=_findings(rows, measured_on),
        columns=("attention", "layer", "head", "entropy (nats)", "distance (tokens)", *KEY_KINDS),
        rows=rows,
        figure=_draw_shares(names, shares),
        message="Where the weights of each head go, beside uniform weights",
    )


def _findings(rows: Sequence[Sequence[Any]], measured_on: str) -> str:
    heads = [row for row in rows if row[1]]
    uniform = {row[0]: row for row in rows if not row[1]}
    clauses = []
    for key_kind in ("previous", "next", "own", "special"):
        column = 5 + KEY_KINDS.index(key_kind)
        best = max(heads, key=itemgetter(column))
        clauses.append(
            f"{best[column]:.0%} on `{key_kind}` (layer {best[1]}, head {best[2]} of {best[0]}; "
            f"uniform weights would give {uniform[best[0]][column]:.0%})"
        )
    sharpest = min(heads, key=lambda row: row[3])
    broadest = max(heads, key=lambda row: row[3])
    return (
        f"Measured on {measured_on}. The columns `own`, `previous`, `next`, `special` and `other` "
        "are shares of the weight, by the position of the key relative to the query. `special` is "
        "the end token of the source or the start token of the decoder. In encoder-decoder "
        "attention, `own` is the same position in the other sentence. The largest shares of a head "
        f"are {join_names(clauses)}. The entropy is between {sharpest[3]:.2f} nats (layer "
        f"{sharpest[1]}, head {sharpest[2]} of {sharpest[0]}) and {broadest[3]:.2f} (layer "
        f"{broadest[1]}, head {broadest[2]} of {broadest[0]})."
    )


def _draw_shares(names: Sequence[str], shares: Sequence[tuple[str, Sequence[float]]]) -> "Figure":
    import matplotlib

    counts = [sum(kind == other for other, _ in shares) for kind in KINDS]
    figure, all_axes = new_figure(11.0, 1.6 + 0.26 * max(counts), 1, len(KINDS))
    colors = dict(
        zip(KEY_KINDS, matplotlib.colormaps["viridis"]([0.0, 0.3, 0.6, 0.9]), strict=False)
    )
    colors["other"] = "0.88"
    for axes, kind in zip(all_axes[0], KINDS, strict=True):
        own = [
            (name, values) for name, (of, values) in zip(names, shares, strict=True) if of == kind
        ]
        left = [0.0] * len(own)
        for index, key_kind in enumerate(KEY_KINDS):
            widths = [values[index] for _, values in own]
            label = key_kind if axes is all_axes[0, 0] else None
            axes.barh(range(len(own)), widths, left=left, color=colors[key_kind], label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(own)), [name for name, _ in own], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0.0, 1.0)
        axes.set_xlabel("share of the weight")
        axes.set_title(KINDS[kind].title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(KEY_KINDS))
    return figure
