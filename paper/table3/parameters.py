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


def vocabularies_that_fit(
    size_ranges: Mapping[str, tuple[float, float]],
) -> tuple[range, list[str]]:
    """Find the vocabulary sizes with which the most rows have the paper's rounded count.

    Args:
        size_ranges: Smallest and largest vocabulary size with which a row has the paper's count,
            by row.

    Returns:
        The vocabulary sizes, and the rows that have the paper's count with each of these sizes.
    """
    # the largest group of overlapping intervals overlaps at the start of one of them, so it is
    # enough to try the starts
    fitting_codes = [
        [code for code, (fewest, most) in size_ranges.items() if fewest <= start <= most]
        for start, _ in size_ranges.values()
    ]
    best_codes = max(fitting_codes, key=len)
    fewest = max(math.ceil(size_ranges[code][0]) for code in best_codes)
    most = min(math.floor(size_ranges[code][1]) for code in best_codes)
    return range(fewest, most + 1), best_codes


def parameters_section(counts: Mapping[str, Mapping[str, int]], vocab_size: int) -> Section:
    """Compare the parameters of the rows with the paper's.

    Args:
        counts: Number of weights of each part of the model, by row.
        vocab_size: Vocabulary size of the counted models.

    Returns:
        Section with a table row for each row whose parameters the paper states.
    """
    implied_sizes, rows = {}, []
    base_millions, paper_base_millions = _base_millions(vocab_size), PAPER["base"].parameters
    for code, parts in counts.items():
        paper_millions = PAPER[code].parameters
        if paper_millions is None or paper_base_millions is None:
            continue
        config = paper_sizes(code, vocab_size)
        num_parameters = sum(parts.values())
        vocabulary_size = implied_vocabulary(config, paper_millions * MILLION)
        implied_sizes[code] = (vocabulary_size, ROUNDING / config.d_model)
        rows.append(
            [
                code,
                num_parameters,
                paper_millions,
                num_parameters / MILLION - paper_millions,
                round(vocabulary_size),
                num_parameters / MILLION - base_millions,
                paper_millions - paper_base_millions,
            ]
        )
    return Section(
        name="parameters",
        title="Parameters beside the paper's, and the vocabulary size that they imply",
        finding=_difference_findings(rows, vocab_size)
        + _vocabulary_findings(implied_sizes, vocab_size),
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
        figure=_draw_vocabularies(implied_sizes, vocab_size),
        message="No single vocabulary size gives the paper's count in all rows",
    )


def _difference_findings(rows: Sequence[Sequence[Any]], vocab_size: int) -> str:
    num_exact = sum(abs(difference) <= ROUNDING / MILLION for _, _, _, difference, *_ in rows)
    minus_base = [
        (our_millions, paper_millions)
        for code, *_, our_millions, paper_millions in rows
        if code != "base"
    ]
    # the paper's difference of two rounded counts is off by at most twice the rounding error
    num_alike = sum(
        abs(our_millions - paper_millions) <= 2 * ROUNDING / MILLION
        for our_millions, paper_millions in minus_base
    )
    if vocab_size == TrainConfig.vocab_size:
        size_remark = ", the size of section 5.1,"
    else:
        size_remark = f" (section 5.1 says about {TrainConfig.vocab_size:,})"
    finding = (
        f"With {vocab_size:,} tokens{size_remark} {num_exact} of {len(rows)} counts round to the "
        "paper's. "
    )
    if minus_base:
        finding += (
            "The difference of a row from base, in the last two columns, agrees within "
            f"rounding in {num_alike} of {len(minus_base)} rows. So the layers are the same, and "
            "the embedding explains the rest: each count implies a vocabulary size. "
        )
    return finding


def _vocabulary_findings(implied_sizes: Mapping[str, tuple[float, float]], vocab_size: int) -> str:
    intervals = {
        code: (implied_size - rounding_error, implied_size + rounding_error)
        for code, (implied_size, rounding_error) in implied_sizes.items()
    }
    fitting_sizes, fitting_codes = vocabularies_that_fit(intervals)
    misfits_text = ", ".join(
        f"{code} needs {fewest:,.0f} to {most:,.0f}"
        for code, (fewest, most) in intervals.items()
        if code not in fitting_codes
    )
    size_phrase = f"with {vocab_size:,} tokens"
    if vocab_size == TrainConfig.vocab_size:
        size_phrase = f"as described, {size_phrase},"
    return (
        f"With {fitting_sizes[0]:,} to {fitting_sizes[-1]:,} tokens, {len(fitting_codes)} of "
        f"{len(implied_sizes)} rows have the paper's count"
        + (f"; {misfits_text}. No vocabulary size fits all rows" if misfits_text else "")
        + f". The paper does not say how it counted. A base model {size_phrase} has "
        f"{_base_millions(vocab_size):.2f} million parameters."
    )


def _base_millions(vocab_size: int) -> float:
    return sum(parameters_by_part(paper_sizes("base", vocab_size)).values()) / MILLION


def _draw_vocabularies(
    implied_sizes: Mapping[str, tuple[float, float]], vocab_size: int
) -> "Figure":
    figure, axes = new_figure(7.0, 1.4 + 0.25 * len(implied_sizes))
    sizes, errors = zip(*implied_sizes.values(), strict=True)
    axes.errorbar(sizes, list(implied_sizes), xerr=errors, fmt="o", capsize=4, label="implied")
    axes.axvline(vocab_size, color="k", linestyle="--", label=f"{vocab_size:,} tokens")
    axes.invert_yaxis()
    axes.set_xlabel("vocabulary size that gives the paper's count (rounded to a million)")
    axes.set_ylabel("row")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
