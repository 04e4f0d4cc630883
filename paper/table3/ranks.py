"""The order of the trained rows beside the order of the paper's rows."""

import argparse
from collections.abc import Mapping, Sequence
from statistics import fmean
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
    both_ranks = torch.tensor([ranks(left), ranks(right)], dtype=torch.float64)  # [2, items]
    if (both_ranks.amin(dim=1) == both_ranks.amax(dim=1)).any():
        return None
    return float(torch.corrcoef(both_ranks)[0, 1])


def trained_section(
    results: Mapping[str, Sequence["RowResult"]], flags: argparse.Namespace
) -> Section:
    """Compare perplexity and BLEU of the trained rows with the paper's.

    Args:
        results: Results of `train_rows`.
        flags: Flags that `add_flags` declares.

    Returns:
        Section with a table row for each trained row, the mean of its seeds.
    """
    rows: list[list[Any]] = [
        [
            code,
            sum(parameters_by_part(seed_results[0].config).values()),
            fmean(result.perplexity for result in seed_results),
            PAPER[code].perplexity,
            fmean(result.bleu for result in seed_results),
            PAPER[code].bleu,
            fmean(result.seconds for result in seed_results),
        ]
        for code, seed_results in results.items()
    ]
    codes, orders = list(results), _values_by_score(results)
    correlations = {
        score: rank_correlation(our_values, paper_values)
        for score, (our_values, paper_values) in orders.items()
    }
    correlations_text = ", ".join(
        f"{'none' if correlation is None else f'{correlation:.2f}'} for {score}"
        for score, correlation in correlations.items()
    )
    best_codes = {
        score: codes[our_values.index(min(our_values))] for score, (our_values, _) in orders.items()
    }
    signature = next(iter(results.values()))[0].signature
    seeds_sentence = (
        "This is one seed; with another seed, rows with similar results may swap."
        if flags.num_seeds == 1
        else f"All numbers are means of {flags.num_seeds} seeds."
    )
    return Section(
        name="trained",
        title="Perplexity and BLEU beside the paper's",
        finding="Results on the validation split, with the last weights, not averaged. PPL is per "
        f"token and from the loss without smoothing, BLEU is {signature}. The values cannot equal "
        "the paper's, because corpus and sizes differ; only the order of the rows can be compared. "
        f"Spearman's rank correlation with the paper's order is {correlations_text}, over "
        f"{len(rows)} rows; 1 means the same order, 0 no relation. The best row here is "
        f"{best_codes['PPL']} by PPL and {best_codes['BLEU']} by BLEU. {seeds_sentence}",
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
        figure=_draw_ranks(codes, orders, correlations),
        message=f"Rows on the grey line have the same rank here as in the paper ({ROW_CODES})",
        numbers={"rank_correlation": correlations, "signature": signature, "seed": flags.seed},
    )


def _values_by_score(
    results: Mapping[str, Sequence["RowResult"]],
) -> dict[str, tuple[list[float], list[float]]]:
    """Return our values and the paper's for each score, by row; a lower value is better.

    BLEU is negated, because a higher BLEU is better.
    """
    return {
        "PPL": (
            [fmean(result.perplexity for result in row) for row in results.values()],
            [PAPER[code].perplexity for code in results],
        ),
        # negative, because the highest BLEU is the best
        "BLEU": (
            [-fmean(result.bleu for result in row) for row in results.values()],
            [-PAPER[code].bleu for code in results],
        ),
    }


def _draw_ranks(
    codes: Sequence[str],
    orders: Mapping[str, tuple[list[float], list[float]]],
    correlations: Mapping[str, float | None],
) -> "Figure":
    figure, plots = new_figure(10.0, 6.0, columns=2)
    groups = ["base and big" if code in ("base", "big") else code[0] for code in codes]
    for axes, (score, (our_values, paper_values)) in zip(plots[0], orders.items(), strict=True):
        axes.axline((1, 1), slope=1, color="0.8", zorder=0)
        points = list(zip(ranks(paper_values), ranks(our_values), strict=True))
        for color_number, group in enumerate(dict.fromkeys(groups)):
            group_points = [
                point
                for point, group_of_point in zip(points, groups, strict=True)
                if group_of_point == group
            ]
            axes.scatter(*zip(*group_points, strict=True), color=f"C{color_number}", label=group)
        for code, point in zip(codes, points, strict=True):
            label = axes.annotate(code, point, (5, 3), textcoords="offset points", fontsize=9)
            # exclude the label from the layout: a label at the edge would shrink the plot
            label.set_in_layout(False)
        correlation = correlations[score]
        axes.set_title(
            score if correlation is None else f"{score}, rank correlation {correlation:.2f}"
        )
        axes.set_xlabel("rank in the paper (1 is best)")
        axes.set_ylabel("rank here (1 is best)")
        axes.locator_params(integer=True)
        axes.set_aspect("equal")
        axes.margins(0.1)
    plots[0][0].legend(fontsize=8)
    return figure
