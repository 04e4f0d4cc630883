"""The order of the trained rows beside the order of the paper's rows."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...drawing import new_figure
from ..study import Section
from .parameters import parameters_by_part
from .rows import PAPER, ROW_CODES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .training import RowResult


def ranks(values: Sequence[float]) -> list[float]:
    """Rank values from the lowest; equal values share the mean of their ranks.

    Args:
        values: Values to rank.

    Returns:
        Rank of each value, from 1.
    """
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Compute Spearman's rank correlation of two lists.

    Args:
        left: Values of the items.
        right: Other values of the same items, in the same order.

    Returns:
        1 for the same order, -1 for the reverse order, about 0 for no relation; None if all values
        of a list are equal.
    """
    both = torch.tensor([ranks(left), ranks(right)], dtype=torch.float64)  # [2, items]
    if (both.amin(dim=1) == both.amax(dim=1)).any():
        return None
    return float(torch.corrcoef(both)[0, 1])


def trained_section(results: Mapping[str, "RowResult"], flags: argparse.Namespace) -> Section:
    rows: list[list[Any]] = [
        [
            row,
            sum(parameters_by_part(result.config).values()),
            result.perplexity,
            PAPER[row].perplexity,
            result.bleu,
            PAPER[row].bleu,
            result.seconds,
        ]
        for row, result in results.items()
    ]
    perplexities, bleus = (
        ([row[column] for row in rows], [row[column + 1] for row in rows]) for column in (2, 4)
    )
    correlations = {
        "PPL": rank_correlation(perplexities[0], perplexities[1]),
        "BLEU": rank_correlation(bleus[0], bleus[1]),
    }
    said = ", ".join(
        f"{'none' if value is None else f'{value:.2f}'} for {name}"
        for name, value in correlations.items()
    )
    best = {
        "PPL": rows[perplexities[0].index(min(perplexities[0]))][0],
        "BLEU": rows[bleus[0].index(max(bleus[0]))][0],
    }
    signature = next(iter(results.values())).signature
    return Section(
        name="trained",
        title="Perplexity and BLEU beside the paper's",
        finding="Results on the validation split, with the last weights, not averaged. PPL is per "
        f"token and from the loss without smoothing, BLEU is {signature}. The values cannot equal "
        "the paper's, because corpus and sizes differ; only the order of the rows can be compared. "
        f"Spearman's rank correlation with the paper's order is {said}, over {len(rows)} rows; 1 "
        "means the same order, 0 no relation. The best row here is "
        f"{best['PPL']} by PPL and {best['BLEU']} by BLEU. This is one seed; with another seed, "
        "rows with similar results may swap.",
        columns=(
            "row",
            "parameters",
            "PPL",
            "paper's PPL",
            "BLEU",
            "paper's BLEU",
            "training (s)",
        ),
        rows=rows,
        figure=_draw_ranks(results, correlations),
        message=f"Rows on the grey line have the same rank here as in the paper ({ROW_CODES})",
        numbers={"rank_correlation": correlations, "signature": signature, "seed": flags.seed},
    )


def _draw_ranks(
    results: Mapping[str, "RowResult"], correlations: Mapping[str, float | None]
) -> "Figure":
    figure, plots = new_figure(10.0, 6.0, columns=2)
    names = list(results)
    orders = {
        "PPL": (
            [result.perplexity for result in results.values()],
            [PAPER[row].perplexity for row in names],
        ),
        # negative, because the highest BLEU is the best
        "BLEU": (
            [-result.bleu for result in results.values()],
            [-PAPER[row].bleu for row in names],
        ),
    }
    for axes, (name, (ours, papers)) in zip(plots[0], orders.items(), strict=True):
        axes.axline((1, 1), slope=1, color="0.8", zorder=0)
        points = list(zip(ranks(papers), ranks(ours), strict=True))
        groups = ["base and big" if row in ("base", "big") else row[0] for row in names]
        for number, group in enumerate(dict.fromkeys(groups)):
            own = [point for point, other in zip(points, groups, strict=True) if other == group]
            axes.scatter(*zip(*own, strict=True), color=f"C{number}", label=group)
        for row, point in zip(names, points, strict=True):
            label = axes.annotate(row, point, (5, 3), textcoords="offset points", fontsize=9)
            # exclude the label from the layout: a label at the edge would shrink the plot
            label.set_in_layout(False)
        value = correlations[name]
        axes.set_title(name if value is None else f"{name}, rank correlation {value:.2f}")
        axes.set_xlabel("rank in the paper (1 is best)")
        axes.set_ylabel("rank here (1 is best)")
        axes.locator_params(integer=True)
        axes.set_aspect("equal")
        axes.margins(0.1)
    plots[0][0].legend(fontsize=8)
    return figure
