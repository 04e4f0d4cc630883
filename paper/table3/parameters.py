"""Parameters of a row of Table 3 by part, and the vocabulary size that the paper's counts imply."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ...drawing import new_figure
from ...train.config import TrainConfig
from ..study import Section
from .rows import MILLION, PAPER, paper_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# the paper rounds its counts to millions, so a count is off by at most half a million
ROUNDING = MILLION / 2


def parameters_by_part(config: VanillaTransformerConfig) -> dict[str, int]:
    """Count the weights of a model by part, without allocating memory for the weights.

    Args:
        config: Sizes of the model.

    Returns:
        Number of weights of the embedding (shared with the output projection), of learned
        positions, and of the layers of encoder and decoder.
    """
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    parts = {"embedding": 0, "positions": 0, "encoder": 0, "decoder": 0}
    # named_parameters lists a shared matrix once
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            parts["embedding"] += weight.numel()
        elif "positions" in name:
            parts["positions"] += weight.numel()
        else:
            parts["encoder" if ".encoder." in name else "decoder"] += weight.numel()
    return parts


def implied_vocabulary(config: VanillaTransformerConfig, parameters: float) -> float:
    """Compute the vocabulary size that gives a model this number of parameters.

    Args:
        config: Sizes of the model.
        parameters: Number of all weights of the model.

    Returns:
        Number of tokens: the weights that are neither in a layer nor in a table of learned
        positions, divided by d_model.
    """
    parts = parameters_by_part(config)
    return (parameters - sum(parts.values()) + parts["embedding"]) / config.d_model


def vocabularies_that_fit(rows: Mapping[str, tuple[float, float]]) -> tuple[range, list[str]]:
    """Find the vocabulary sizes with which the most rows have the paper's rounded count.

    Args:
        rows: Smallest and largest vocabulary size with which a row has the paper's count, by row.

    Returns:
        The vocabulary sizes, and the rows that have the paper's count with each of these sizes.
    """
    # the largest group of overlapping intervals overlaps at the start of one of them, so it is
    # enough to try the starts
    fitting = [
        [row for row, (fewest, most) in rows.items() if fewest <= start <= most]
        for start, _ in rows.values()
    ]
    best = max(fitting, key=len)
    fewest = max(math.ceil(rows[row][0]) for row in best)
    most = min(math.floor(rows[row][1]) for row in best)
    return range(fewest, most + 1), best


def parameters_section(counts: Mapping[str, Mapping[str, int]], vocab_size: int) -> Section:
    implied, rows = {}, []
    base, base_of_paper = _base_millions(vocab_size), PAPER["base"].parameters
    for row, parts in counts.items():
        paper = PAPER[row].parameters
        if paper is None or base_of_paper is None:
            continue
        config = paper_sizes(row, vocab_size)
        ours = sum(parts.values())
        tokens = implied_vocabulary(config, paper * MILLION)
        implied[row] = (tokens, ROUNDING / config.d_model)
        rows.append(
            [
                row,
                ours,
                paper,
                ours / MILLION - paper,
                round(tokens),
                ours / MILLION - base,
                paper - base_of_paper,
            ]
        )
    return Section(
        name="parameters",
        title="Parameters beside the paper's, and the vocabulary size that they imply",
        finding=_difference_findings(rows, vocab_size) + _vocabulary_findings(implied, vocab_size),
        columns=(
            "row",
            "parameters",
            "paper's (M)",
            "difference (M)",
            "implied vocabulary",
            "minus base (M)",
            "paper's minus base (M)",
        ),
        rows=rows,
        figure=_draw_vocabularies(implied, vocab_size),
        message="No single vocabulary size gives the paper's count in all rows",
    )


def _difference_findings(rows: Sequence[Sequence[Any]], vocab_size: int) -> str:
    exact = [row for row in rows if abs(row[3]) <= ROUNDING / MILLION]
    others = [row for row in rows if row[0] != "base"]
    # the paper's difference of two rounded counts is off by at most twice the rounding error
    alike = [row for row in others if abs(row[5] - row[6]) <= 2 * ROUNDING / MILLION]
    if vocab_size == TrainConfig.vocab_size:
        size = ", the size of section 5.1,"
    else:
        size = f" (section 5.1 says about {TrainConfig.vocab_size:,})"
    finding = (
        f"With {vocab_size:,} tokens{size} {len(exact)} of {len(rows)} counts round to the "
        "paper's. "
    )
    if others:
        finding += (
            "The difference of a row from base, in the last two columns, agrees within "
            f"rounding in {len(alike)} of {len(others)} rows. So the layers are the same, and the "
            "embedding explains the rest: each count implies a vocabulary size. "
        )
    return finding


def _vocabulary_findings(implied: Mapping[str, tuple[float, float]], vocab_size: int) -> str:
    intervals = {row: (tokens - error, tokens + error) for row, (tokens, error) in implied.items()}
    fitting, best = vocabularies_that_fit(intervals)
    others = ", ".join(
        f"{row} needs {fewest:,.0f} to {most:,.0f}"
        for row, (fewest, most) in intervals.items()
        if row not in best
    )
    model = f"with {vocab_size:,} tokens"
    if vocab_size == TrainConfig.vocab_size:
        model = f"as described, {model},"
    return (
        f"With {fitting[0]:,} to {fitting[-1]:,} tokens, {len(best)} of {len(implied)} rows have "
        "the paper's count"
        + (f"; {others}. No vocabulary size fits all rows" if others else "")
        + f". The paper does not say how it counted. A base model {model} has "
        f"{_base_millions(vocab_size):.2f} million parameters."
    )


def _base_millions(vocab_size: int) -> float:
    return sum(parameters_by_part(paper_sizes("base", vocab_size)).values()) / MILLION


def _draw_vocabularies(implied: Mapping[str, tuple[float, float]], vocab_size: int) -> "Figure":
    figure, axes = new_figure(7.0, 1.4 + 0.25 * len(implied))
    tokens, errors = zip(*implied.values(), strict=True)
    axes.errorbar(tokens, list(implied), xerr=errors, fmt="o", capsize=4, label="implied")
    axes.axvline(vocab_size, color="k", linestyle="--", label=f"{vocab_size:,} tokens")
    axes.invert_yaxis()
    axes.set_xlabel("vocabulary size that gives the paper's count (rounded to a million)")
    axes.set_ylabel("row")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
