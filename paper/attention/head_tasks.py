"""The tasks of heads in numbers: entropy, distance, and the share of the weight by position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...attention_maps import AttentionWeights
from ...drawing import new_figure
from ..study import Section
from .kinds import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = ("own", "previous", "next", "special", "other")


@dataclass(frozen=True, kw_only=True)
class HeadStatistics:
    """Statistics of a head, as means over its queries.

    Attributes:
        entropy: Entropy of the weights, in nats.
        distance: Number of positions between query and key.
        shares: Shares of the weight, by `PLACES`: on the query's own position, the previous one,
            the next one, the special token (the source's end or the target's start), and the
            other positions.
    """

    entropy: float
    distance: float
    shares: dict[str, float]


def head_statistics(
    maps: Sequence[AttentionWeights], kind: str, is_uniform: bool = False
) -> list[list[HeadStatistics]]:
    """Measure what each head attends to. Section 4 and figure 5: heads learn different tasks.

    A query that sees only one key has no choice, and is left out. What falls on the special token
    counts as that alone, wherever the token stands.

    Args:
        maps: Attention weights of one or more sentences.
        kind: "encoder", "decoder" or "cross".
        is_uniform: Measure heads that look at all they can see alike, for comparison.

    Returns:
        For each layer its heads, [N][h].
    """
    sums, num_queries = None, 0
    for weights in maps:
        values = getattr(weights, kind).double()  # [N, h, Q, K]
        visible = torch.ones_like(values, dtype=torch.bool)
        if kind == "decoder":
            visible = ~weights.hidden().expand_as(values)
        if is_uniform:
            values = visible.double() / visible.sum(dim=-1, keepdim=True)
        has_choice = visible[0, 0].sum(dim=-1) > 1  # [Q]
        values = values[:, :, has_choice]
        places = _places(weights, kind)[:, has_choice]  # [places, Q, K]
        steps = torch.arange(places.shape[-1]) - has_choice.nonzero()  # [Q, K]
        entropy = -torch.special.xlogy(values, values).sum(dim=(-2, -1))  # [N, h]
        distance = (values * steps.abs()).sum(dim=(-2, -1))
        shares = torch.einsum("nhqk,pqk->pnh", values, places.double())
        found = torch.cat((entropy[None], distance[None], shares))  # [2 + places, N, h]
        sums = found if sums is None else sums + found
        num_queries += int(has_choice.sum())
    means = (sums / num_queries).permute(1, 2, 0).tolist()
    return [
        [
            HeadStatistics(
                entropy=head[0],
                distance=head[1],
                shares=dict(zip(PLACES, head[2:], strict=True)),
            )
            for head in layer
        ]
        for layer in means
    ]


def _places(weights: AttentionWeights, kind: str) -> Tensor:
    """Which keys are a query's own place, the one before, ...; each is one of `PLACES`."""
    num_queries, num_keys = getattr(weights, kind).shape[-2:]
    step = torch.arange(num_keys) - torch.arange(num_queries)[:, None]  # [Q, K]
    special = torch.zeros_like(step, dtype=torch.bool)
    special[:, 0 if kind == "decoder" else -1] = True
    near = [(step == offset) & ~special for offset in (0, -1, 1)]
    rest = ~(special | near[0] | near[1] | near[2])
    return torch.stack([*near, special, rest])  # [places, Q, K]


def tasks_section(maps: Sequence[AttentionWeights], measured_on: str) -> Section:
    rows, names, shares = [], [], []
    for kind, (title, _, _) in KINDS.items():
        found = head_statistics(maps, kind)
        uniform = head_statistics(maps, kind, is_uniform=True)[0][0]
        heads = [
            (layer + 1, str(head + 1), statistics)
            for layer, layer_heads in enumerate(found)
            for head, statistics in enumerate(layer_heads)
        ]
        for layer, head, statistics in [*heads, (None, "all alike", uniform)]:
            values = [statistics.shares[place] for place in PLACES]
            rows.append([title, layer, head, statistics.entropy, statistics.distance, *values])
            names.append(f"layer {layer}, head {head}" if layer else head)
            shares.append((kind, values))
    return Section(
        name="tasks",
        title="Heads learn different tasks, in numbers",
        says=_tasks_say(rows, measured_on),
        columns=("attention", "layer", "head", "entropy (nats)", "distance (tokens)", *PLACES),
        rows=rows,
        figure=_draw_tasks(names, shares),
    )


def _tasks_say(rows: Sequence[Sequence[Any]], measured_on: str) -> str:
    own_shares = [row for row in rows if row[1]]
    alike = {row[0]: row for row in rows if not row[1]}
    clauses = []
    for place in ("previous", "next", "own", "special"):
        column = 5 + PLACES.index(place)
        best = max(own_shares, key=lambda row, column=column: row[column])
        token = {"own": "own place", "special": "end or start token"}.get(place, f"{place} token")
        clauses.append(
            f"{best[column]:.0%} on the {token} (layer {best[1]}, head {best[2]} of "
            f"{best[0]}; {alike[best[0]][column]:.0%} if it looked at all alike)"
        )
    sharpest = min(own_shares, key=lambda row: row[3])
    broadest = max(own_shares, key=lambda row: row[3])
    return (
        f"Measured on {measured_on}. The most that a head puts on one kind of place: "
        f"{'; '.join(clauses)}. The entropy goes from {sharpest[3]:.2f} nats (layer {sharpest[1]}, "
        f"head {sharpest[2]} of {sharpest[0]}) to {broadest[3]:.2f} (layer {broadest[1]}, head "
        f"{broadest[2]} of {broadest[0]}). `special` is the end token of the source, or the start "
        "token that the decoder reads; in encoder-decoder attention, `own` is the same place in "
        "the other sentence."
    )


def _draw_tasks(names: Sequence[str], shares: Sequence[tuple[str, Sequence[float]]]) -> "Figure":
    import matplotlib

    counts = [sum(kind == other for other, _ in shares) for kind in KINDS]
    figure, all_axes = new_figure(11.0, 1.6 + 0.26 * max(counts), 1, len(KINDS))
    colors = dict(zip(PLACES, matplotlib.colormaps["viridis"]([0.0, 0.3, 0.6, 0.9]), strict=False))
    colors["other"] = "0.88"
    for axes, kind in zip(all_axes[0], KINDS, strict=True):
        own = [
            (name, values) for name, (of, values) in zip(names, shares, strict=True) if of == kind
        ]
        left = [0.0] * len(own)
        for index, place in enumerate(PLACES):
            widths = [values[index] for _, values in own]
            label = place if axes is all_axes[0, 0] else None
            axes.barh(range(len(own)), widths, left=left, color=colors[place], label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(own)), [name for name, _ in own], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0.0, 1.0)
        axes.set_xlabel("share of the weight")
        axes.set_title(KINDS[kind].title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(PLACES))
    return figure
