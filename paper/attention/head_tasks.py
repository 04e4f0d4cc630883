"""Statistics of heads: entropy, distance, and shares of the weight by position of the key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...attention_maps import AttentionWeights
from ...drawing import new_figure
from ..study import Section, join_names
from .kinds import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# kinds of keys, by their position relative to the query. "own" is the position of the query,
# "special" is a special token
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


class MeasuredHead(NamedTuple):
    """The statistics of a head, or of uniform weights.

    Attributes:
        kind: "encoder", "decoder" or "cross".
        layer: Layer number, counted from 1; None for uniform weights.
        head: Head number, counted from 1; None for uniform weights.
        statistics: The statistics.
    """

    kind: str
    layer: int | None
    head: int | None
    statistics: HeadStatistics


def head_statistics(
    measured_weights: Sequence[AttentionWeights], kind: str, uses_uniform_weights: bool = False
) -> list[list[HeadStatistics]]:
    """Measure the attention of each head. Section 4 and figure 5.

    Queries that can attend to only one key are not counted. Weight on the special token counts only
    as "special", even if this token is also the own, previous or next position.

    Args:
        measured_weights: Attention weights of one or more sentences.
        kind: "encoder", "decoder" or "cross".
        uses_uniform_weights: Whether to measure uniform weights instead of those of the heads, for
            comparison.

    Returns:
        Statistics of each layer and head, [N][h].
    """
    sums: Any = 0
    num_queries = 0
    for weights in measured_weights:
        head_weights = getattr(weights, kind).double()  # [N, h, Q, K]
        is_visible = torch.ones_like(head_weights, dtype=torch.bool)
        if kind == "decoder":
            is_visible = ~weights.hidden().expand_as(head_weights)
        if uses_uniform_weights:
            head_weights = is_visible.double() / is_visible.sum(dim=-1, keepdim=True)
        has_choice = is_visible[0, 0].sum(dim=-1) > 1  # [Q]
        head_weights = head_weights[:, :, has_choice]
        key_kind_masks = _key_kind_masks(weights, kind)[:, has_choice]  # [key kinds, Q, K]
        query_positions = has_choice.nonzero()  # [Q, 1]
        key_positions = torch.arange(key_kind_masks.shape[-1])  # [K]
        offsets = key_positions - query_positions  # [Q, K]
        entropy = -torch.special.xlogy(head_weights, head_weights).sum(dim=(-2, -1))  # [N, h]
        distance = (head_weights * offsets.abs()).sum(dim=(-2, -1))  # [N, h]
        shares = torch.einsum("nhqk,pqk->pnh", head_weights, key_kind_masks.double())
        sentence_sums = torch.cat((entropy[None], distance[None], shares))
        sums = sums + sentence_sums  # [2 + key kinds, N, h]
        num_queries += int(has_choice.sum())
    means = (sums / num_queries).permute(1, 2, 0).tolist()  # [N][h][2 + key kinds]
    return [
        [
            HeadStatistics(
                entropy=entropy,
                distance=distance,
                shares=dict(zip(KEY_KINDS, shares, strict=True)),
            )
            for entropy, distance, *shares in layer_means
        ]
        for layer_means in means
    ]


def _key_kind_masks(weights: AttentionWeights, kind: str) -> Tensor:
    """Return one mask for each of `KEY_KINDS`; every key of a query is True in exactly one mask."""
    num_queries, num_keys = getattr(weights, kind).shape[-2:]
    offsets = torch.arange(num_keys) - torch.arange(num_queries)[:, None]  # [Q, K]
    special_mask = torch.zeros_like(offsets, dtype=torch.bool)
    special_mask[:, 0 if kind == "decoder" else -1] = True
    near_masks = [(offsets == near_offset) & ~special_mask for near_offset in (0, -1, 1)]
    other_mask = ~torch.stack([*near_masks, special_mask]).any(dim=0)
    return torch.stack([*near_masks, special_mask, other_mask])  # [key kinds, Q, K]


def statistics_section(measured_weights: Sequence[AttentionWeights], measured_on: str) -> Section:
    """Compare the statistics of all heads.

    Args:
        measured_weights: Attention weights of one or more sentences.
        measured_on: Phrase for the text that describes the sentences of `measured_weights`.

    Returns:
        The section.
    """
    heads: list[MeasuredHead] = []
    uniform_heads: dict[str, MeasuredHead] = {}
    rows: list[list[Any]] = []
    for kind in KINDS:
        heads_of_kind = [
            MeasuredHead(kind, layer, head, statistics)
            for layer, layer_statistics in enumerate(head_statistics(measured_weights, kind), 1)
            for head, statistics in enumerate(layer_statistics, 1)
        ]
        uniform_statistics = head_statistics(measured_weights, kind, uses_uniform_weights=True)
        uniform_heads[kind] = MeasuredHead(kind, None, None, uniform_statistics[0][0])
        heads += heads_of_kind
        rows += [_table_row(head) for head in [*heads_of_kind, uniform_heads[kind]]]
    return Section(
        name="tasks",
        title="Statistics of the heads",
        finding=_finding(heads, uniform_heads, measured_on),
        columns=("attention", "layer", "head", "entropy (nats)", "distance (tokens)", *KEY_KINDS),
        rows=rows,
        figure=_draw_shares(heads, uniform_heads),
        message="Where the weights of each head go, beside uniform weights",
    )


def _table_row(measured_head: MeasuredHead) -> list[Any]:
    kind, layer, head, statistics = measured_head
    head_name = "uniform" if head is None else str(head)
    shares = [statistics.shares[key_kind] for key_kind in KEY_KINDS]
    return [KINDS[kind].title, layer, head_name, statistics.entropy, statistics.distance, *shares]


def _finding(
    heads: Sequence[MeasuredHead], uniform_heads: Mapping[str, MeasuredHead], measured_on: str
) -> str:
    clauses = []
    for key_kind in ("previous", "next", "own", "special"):
        best_head = max(heads, key=lambda head: head.statistics.shares[key_kind])
        uniform_share = uniform_heads[best_head.kind].statistics.shares[key_kind]
        clauses.append(
            f"{best_head.statistics.shares[key_kind]:.0%} on `{key_kind}` "
            f"({_describe_head(best_head)}; uniform weights would give {uniform_share:.0%})"
        )
    sharpest_head = min(heads, key=lambda head: head.statistics.entropy)
    broadest_head = max(heads, key=lambda head: head.statistics.entropy)
    return (
        f"Measured on {measured_on}. The columns `own`, `previous`, `next`, `special` and `other` "
        "are shares of the weight, by the position of the key relative to the query. `special` is "
        "the end token of the source or the start token of the decoder. In encoder-decoder "
        "attention, `own` is the same position in the other sentence. The largest shares of a head "
        f"are {join_names(clauses)}. The entropy is between "
        f"{sharpest_head.statistics.entropy:.2f} nats ({_describe_head(sharpest_head)}) and "
        f"{broadest_head.statistics.entropy:.2f} ({_describe_head(broadest_head)})."
    )


def _describe_head(head: MeasuredHead) -> str:
    return f"layer {head.layer}, head {head.head} of {KINDS[head.kind].title}"


def _draw_shares(
    heads: Sequence[MeasuredHead], uniform_heads: Mapping[str, MeasuredHead]
) -> "Figure":
    import matplotlib

    bars = {
        kind: [*(head for head in heads if head.kind == kind), uniform_heads[kind]]
        for kind in KINDS
    }
    figure, all_axes = new_figure(11.0, 1.6 + 0.26 * max(map(len, bars.values())), 1, len(KINDS))
    shades = matplotlib.colormaps["viridis"]([0.0, 0.3, 0.6, 0.9])
    colors = {**dict(zip(KEY_KINDS[:-1], shades, strict=True)), "other": "0.88"}
    for axes, (kind, kind_bars) in zip(all_axes[0], bars.items(), strict=True):
        bar_starts = [0.0] * len(kind_bars)
        for key_kind in KEY_KINDS:
            shares = [head.statistics.shares[key_kind] for head in kind_bars]
            axes.barh(
                range(len(kind_bars)),
                shares,
                left=bar_starts,
                color=colors[key_kind],
                label=key_kind if axes is all_axes[0, 0] else None,
            )
            bar_starts = [start + share for start, share in zip(bar_starts, shares, strict=True)]
        bar_names = [
            f"layer {head.layer}, head {head.head}" if head.layer else "uniform"
            for head in kind_bars
        ]
        axes.set_yticks(range(len(kind_bars)), bar_names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0.0, 1.0)
        axes.set_xlabel("share of the weight")
        axes.set_title(KINDS[kind].title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(KEY_KINDS))
    return figure
