"""Differences of the trained rows from base, beside the paper's and the noise of the seeds."""

import argparse
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, NamedTuple

from ..study import Section, join_names
from .rows import PAPER

if TYPE_CHECKING:
    from .training import RowResult

# a difference with more standard errors than this counts as one that another choice of seeds would
# show too; with normal noise, a row that equals base exceeds it in one of 22 comparisons
CLEAR_ERRORS = 2.0


class Difference(NamedTuple):
    """Difference of a row from base in one score.

    Attributes:
        ours: Difference of the means over the seeds.
        error: Standard error of `ours`.
        paper: Difference in the paper.
    """

    ours: float
    error: float
    paper: float

    def verdict(self) -> str:
        """Return "same" (as in the paper), "opposite", "unclear", or "none in paper"."""
        if self.paper == 0:
            return "none in paper"
        if abs(self.ours) <= CLEAR_ERRORS * self.error:
            return "unclear"
        return "same" if self.ours * self.paper > 0 else "opposite"


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation within groups that share one variance.

    Args:
        groups: Values of each group, at least two, and as many in each group.

    Returns:
        Square root of the mean of the groups' variances.
    """
    return math.sqrt(fmean(variance(values) for values in groups))


def differences_from_base(
    values: Mapping[str, Sequence[float]], paper_values: Mapping[str, float]
) -> dict[str, Difference]:
    """Compare each row with base.

    Args:
        values: For each row, one value for each seed; base is among the rows.
        paper_values: The paper's value of each row.

    Returns:
        Difference of each row but base. All rows have the same standard error, because the seeds
        vary about as much in one row as in another, and a variance of few seeds is itself noisy.
    """
    num_seeds = len(values["base"])
    error = pooled_deviation([*values.values()]) * math.sqrt(2 / num_seeds)
    return {
        row: Difference(
            fmean(row_values) - fmean(values["base"]),
            error,
            paper_values[row] - paper_values["base"],
        )
        for row, row_values in values.items()
        if row != "base"
    }


def differences_section(
    results: Mapping[str, Sequence["RowResult"]], flags: argparse.Namespace
) -> Section:
    """Say which of the paper's differences from base these trainings show.

    Args:
        results: Results of `train_rows`, with base and several seeds.
        flags: Flags that `add_flags` declares.

    Returns:
        Section with a table row for each row but base.
    """
    losses = differences_from_base(
        {
            row: [math.log(result.perplexity) for result in row_results]
            for row, row_results in results.items()
        },
        {row: math.log(PAPER[row].perplexity) for row in results},
    )
    bleu = differences_from_base(
        {row: [result.bleu for result in row_results] for row, row_results in results.items()},
        {row: PAPER[row].bleu for row in results},
    )
    rows: list[list[Any]] = [
        [
            row,
            losses[row].ours,
            losses[row].paper,
            losses[row].verdict(),
            bleu[row].ours,
            bleu[row].paper,
            bleu[row].verdict(),
        ]
        for row in losses
    ]
    loss_error, bleu_error = (next(iter(scores.values())).error for scores in (losses, bleu))
    return Section(
        name="differences",
        title="Differences from base, beside the paper's",
        finding="The logarithm of PPL is the loss per token, in nats. "
        f"{_verdicts_sentence('loss', losses)} {_verdicts_sentence('BLEU', bleu)} "
        f"A difference is unclear up to {CLEAR_ERRORS:g} standard errors: with these "
        f"{flags.num_seeds} seeds, {CLEAR_ERRORS * loss_error:.2g} nats and "
        f"{CLEAR_ERRORS * bleu_error:.2g} BLEU. "
        f"{_needed_seeds_sentence(bleu, flags.num_seeds)}",
        columns=(
            "row",
            "log PPL minus base",
            "paper's log PPL minus base",
            "direction",
            "BLEU minus base",
            "paper's BLEU minus base",
            "direction of BLEU",
        ),
        rows=rows,
        numbers={"standard_errors": {"log_perplexity": loss_error, "bleu": bleu_error}},
    )


def _verdicts_sentence(score: str, differences: Mapping[str, Difference]) -> str:
    parts = []
    for verdict, phrase in (
        ("same", "the paper's"),
        ("opposite", "the opposite"),
        ("unclear", "unclear"),
        ("none in paper", "none in the paper"),
    ):
        rows = [row for row, difference in differences.items() if difference.verdict() == verdict]
        if rows:
            parts.append(f"{phrase} for {join_names(rows)}")
    return f"The direction of the {score} difference is {join_names(parts)}."


def _needed_seeds_sentence(differences: Mapping[str, Difference], num_seeds: int) -> str:
    """Say how many seeds would make the paper's largest and smallest difference in BLEU clear."""
    # the standard error is proportional to the inverse square root of the number of seeds
    deviation = next(iter(differences.values())).error * math.sqrt(num_seeds / 2)
    sizes = sorted({abs(difference.paper) for difference in differences.values()} - {0.0})
    if not sizes:
        return "In the paper, these rows have the BLEU of base."
    needed_seeds = {
        # the standard deviation itself needs at least two seeds
        size: max(2, math.ceil(2 * (CLEAR_ERRORS * deviation / size) ** 2))
        for size in (sizes[-1], sizes[0])
    }
    phrases = [f"{seeds:,} seeds for {size:.2g} BLEU" for size, seeds in needed_seeds.items()]
    return f"For a difference as large as the paper's, each row needs {join_names(phrases)}."
