"""The rows of Table 3: the paper's results, and the sizes and parameters of each model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ... import VanillaTransformerConfig
from ...drawing import new_figure
from ...train.recipe import load_config
from ..study import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PaperRow(NamedTuple):
    """Results of a row on newstest2013 in the paper; parameters in millions, None if not stated."""

    perplexity: float
    bleu: float
    parameters: int | None = None


PAPER = {
    "base": PaperRow(4.92, 25.8, 65),
    "A1": PaperRow(5.29, 24.9),
    "A2": PaperRow(5.00, 25.5),
    "A3": PaperRow(4.91, 25.8),
    "A4": PaperRow(5.01, 25.4),
    "B1": PaperRow(5.16, 25.1, 58),
    "B2": PaperRow(5.01, 25.4, 60),
    "C1": PaperRow(6.11, 23.7, 36),
    "C2": PaperRow(5.19, 25.3, 50),
    "C3": PaperRow(4.88, 25.5, 80),
    "C4": PaperRow(5.75, 24.5, 28),
    "C5": PaperRow(4.66, 26.0, 168),
    "C6": PaperRow(5.12, 25.4, 53),
    "C7": PaperRow(4.75, 26.2, 90),
    "D1": PaperRow(5.77, 24.6),
    "D2": PaperRow(4.95, 25.5),
    "D3": PaperRow(4.67, 25.3),
    "D4": PaperRow(5.47, 25.7),
    "E": PaperRow(4.92, 25.7),
    "big": PaperRow(4.33, 26.4, 213),
}
# the setting that the rows of each letter change
ROW_CODES = "A: heads, B: d_k, C: sizes, D: dropout and smoothing, E: learned positions"
MILLION = 1_000_000
SIZE_COLUMNS = ("N", "d_model", "d_ff", "h", "d_k", "d_v", "P_drop", "eps_ls")


def paper_sizes(row: str, vocab_size: int) -> VanillaTransformerConfig:
    """Return the model configuration of a row of the paper.

    Args:
        row: Name of a row of Table 3.
        vocab_size: Vocabulary size.

    Returns:
        Configuration of the row.

    Raises:
        ValueError: If the row does not exist, or the vocabulary size is invalid.
    """
    return load_config(f"paper-{row}").model_config(vocab_size)


def size_cells(config: VanillaTransformerConfig, label_smoothing: float) -> list[float]:
    """Return the cells of `SIZE_COLUMNS`.

    Args:
        config: Sizes of the model.
        label_smoothing: Label smoothing of the training.

    Returns:
        A cell for each column.
    """
    heads = config.encoder_attention_heads
    return [
        config.encoder_layers,
        config.d_model,
        config.encoder_ffn_dim,
        heads,
        config.d_k or config.d_model // heads,
        config.d_v or config.d_model // heads,
        float(config.dropout),
        label_smoothing,
    ]


def rows_section(counts: Mapping[str, Mapping[str, int]], vocab_size: int) -> Section:
    """Show the sizes, the parameters and the paper's results of the rows.

    Args:
        counts: Number of weights of each part of the model, by row.
        vocab_size: Vocabulary size of the counted models.

    Returns:
        Section with a table row for each row.
    """
    rows = []
    for code, parts in counts.items():
        recipe = load_config(f"paper-{code}")
        sizes = size_cells(recipe.model_config(vocab_size), recipe.label_smoothing)
        paper_row = PAPER[code]
        rows.append(
            [
                code,
                *sizes,
                sum(parts.values()) / MILLION,
                paper_row.parameters,
                paper_row.perplexity,
                paper_row.bleu,
            ]
        )
    embedding_shares = {
        code: parts["embedding"] / sum(parts.values()) for code, parts in counts.items()
    }
    smallest_code, largest_code = (
        choose(embedding_shares, key=lambda code: embedding_shares[code]) for choose in (min, max)
    )
    return Section(
        name="rows",
        title="All rows, built",
        finding="Each row except big changes one setting of the base model. Every row is built, "
        "and its weights are counted, not computed from a formula. The embedding is one matrix for "
        f"source, target and output: with {vocab_size:,} tokens it has from "
        f"{embedding_shares[smallest_code]:.0%} ({smallest_code}) to "
        f"{embedding_shares[largest_code]:.0%} ({largest_code}) of the weights. The decoder has "
        "more weights than the encoder, because each of its layers has two attention sub-layers. "
        "Rows A change the heads, but not the number of weights. Rows D change dropout and label "
        "smoothing, which have no weights. Row E learns a vector for each source and each target "
        "position. PPL and BLEU here are the paper's.",
        columns=("row", *SIZE_COLUMNS, "params (M)", "paper's (M)", "PPL", "BLEU"),
        rows=rows,
        figure=_draw_counts(counts),
        message="Parameters of Table 3's rows; the paper states them where a row changes them "
        f"({ROW_CODES})",
        numbers={"parameters": {code: dict(parts) for code, parts in counts.items()}},
    )


def _draw_counts(counts: Mapping[str, Mapping[str, int]]) -> "Figure":
    figure, axes = new_figure(7.0, 1.6 + 0.24 * len(counts))
    codes = list(counts)
    colors = {"embedding": "0.75", "positions": "C3", "encoder": "C0", "decoder": "C1"}
    bar_starts = [0.0] * len(codes)
    for part, color in colors.items():
        bar_widths = [counts[code][part] / MILLION for code in codes]
        if any(bar_widths):
            axes.barh(codes, bar_widths, left=bar_starts, color=color, label=part)
        bar_starts = [start + width for start, width in zip(bar_starts, bar_widths, strict=True)]
    paper_millions = {code: PAPER[code].parameters for code in codes if PAPER[code].parameters}
    if paper_millions:
        axes.plot(
            list(paper_millions.values()),
            list(paper_millions),
            "k|",
            markersize=11,
            mew=2,
            label="the paper's",
        )
    axes.invert_yaxis()
    axes.set_xlabel("millions of parameters")
    axes.set_ylabel("row")
    axes.legend()
    return figure
