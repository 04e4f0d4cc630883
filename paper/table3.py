"""Table 3: what each part of the model is worth, row by row. Section 6.2."""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..drawing import new_figure
from ..train.config import TrainConfig
from ..train.recipe import load_config
from .study import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .table3_training import RowResult


class PaperRow(NamedTuple):
    """What the paper reports of a row, on newstest2013; parameters in millions where it does."""

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
MILLION = 1_000_000
# the paper's counts are whole millions
ROUNDING = MILLION / 2
SIZE_COLUMNS = ("N", "d_model", "d_ff", "h", "d_k", "d_v", "P_drop", "eps_ls")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked of this study.

    Args:
        parser: Of the command line.
    """
    parser.add_argument(
        "--vocab_size",
        type=int,
        default=TrainConfig.vocab_size,
        help="tokens to count the paper's rows with (%(default)s)",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        default=list(PAPER),
        help="which rows; all of them if not given",
    )
    group = parser.add_argument_group(
        "training",
        "Every row is scaled down by the same factors and trained with the same steps, tokens and "
        "seed, under OUTPUT_DIR/rows; the same command goes on with rows that were interrupted, "
        "and trains none twice. As the flags are by default, a row takes about 4 minutes on one "
        "core, C5 and big twice that, all rows an hour and a half: choose some with --rows.",
    )
    group.add_argument("--train", action="store_true", help="train the rows")
    group.add_argument("--dataset", default="demo", help="as of `train` (%(default)s)")
    group.add_argument("--name", help="configuration of the dataset")
    group.add_argument("--source_lang", default="en", help="to translate from (%(default)s)")
    group.add_argument("--target_lang", default="de", help="to translate into (%(default)s)")
    group.add_argument(
        "--scale",
        type=int,
        default=4,
        help="what d_model, d_ff, d_k and d_v of each row are divided by (%(default)s)",
    )
    group.add_argument(
        "--layers",
        type=int,
        default=3,
        help="N of the scaled base; the other rows have theirs in proportion (%(default)s)",
    )
    group.add_argument(
        "--dropout",
        type=float,
        default=0.1,
        help="of the scaled base; the other rows have theirs in proportion (%(default)s)",
    )
    group.add_argument(
        "--learned_vocab_size",
        type=int,
        default=2000,
        help="tokens of the one vocabulary that is learned for all rows (%(default)s)",
    )
    group.add_argument(
        "--max_length", type=int, default=128, help="longest sentence, in tokens (%(default)s)"
    )
    group.add_argument("--max_steps", type=int, default=300, help="of each row (%(default)s)")
    group.add_argument("--warmup_steps", type=int, help="of each row; a third of them if not given")
    group.add_argument(
        "--learning_rate_factor",
        type=float,
        help="of each row; if not given, the one with which the rate rises as high as after the "
        "paper's warm-up: a shorter one alone would end at too high a rate",
    )
    group.add_argument(
        "--tokens_per_step",
        type=int,
        default=2000,
        help="of the source and of the target (%(default)s)",
    )
    group.add_argument("--seed", type=int, default=1, help="of each row (%(default)s)")


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """The rows, their parameters, and what they learn.

    Args:
        flags: As `add_flags` declares them.

    Yields:
        Two sections; two more where the rows are trained.

    Raises:
        ValueError: If there is no such row, or a setting does not fit.
        InterruptedError: If training was asked to end.
    """
    for row in flags.rows:
        # refuses what is no row
        VanillaTransformerConfig.from_paper(row)
    # a setting that does not fit is found before anything is counted
    configs = scaled_configs(flags) if flags.train else {}
    counts = {row: parameters_by_part(paper_sizes(row, flags.vocab_size)) for row in flags.rows}
    yield _rows_section(counts, flags.vocab_size)
    if any(PAPER[row].parameters for row in flags.rows):
        yield _parameters_section(counts, flags.vocab_size)
    if flags.train:
        from .table3_training import train_rows

        yield _built_section(configs, flags)
        yield _trained_section(train_rows(configs, flags.output_dir), flags)


def paper_sizes(row: str, vocab_size: int) -> VanillaTransformerConfig:
    """The configuration of a row as the paper has it.

    Args:
        row: Of Table 3.
        vocab_size: Tokens of the vocabulary.

    Returns:
        Its sizes.

    Raises:
        ValueError: If the row or the vocabulary cannot be.
    """
    return load_config(f"paper-{row}").model_config(vocab_size)


def parameters_by_part(config: VanillaTransformerConfig) -> dict[str, int]:
    """Build a model, without memory for its weights, and count them.

    Args:
        config: Its sizes.

    Returns:
        Weights of the embedding, which is the output projection too, of learned positions if there
        are any, and of the layers of encoder and decoder.
    """
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    parts = {"embedding": 0, "positions": 0, "encoder": 0, "decoder": 0}
    # a matrix that is shared comes once
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            parts["embedding"] += weight.numel()
        elif "positions" in name:
            parts["positions"] += weight.numel()
        else:
            parts["encoder" if ".encoder." in name else "decoder"] += weight.numel()
    return parts


def implied_vocabulary(config: VanillaTransformerConfig, parameters: float) -> float:
    """How many tokens a model must have for its weights to be so many.

    Args:
        config: Its sizes.
        parameters: All its weights.

    Returns:
        Tokens: what the layers leave, in rows of width d_model.
    """
    parts = parameters_by_part(config)
    return (parameters - sum(parts.values()) + parts["embedding"]) / config.d_model


def vocabularies_that_fit(rows: Mapping[str, tuple[float, float]]) -> tuple[range, list[str]]:
    """The vocabulary that gives most of the paper's rounded counts.

    Args:
        rows: The fewest and the most tokens that give a row its count, by row.

    Returns:
        The vocabularies that fit as many rows as any does, and those rows.
    """
    # the best interval begins where the interval of some row begins
    fitting = [
        [row for row, (fewest, most) in rows.items() if fewest <= start <= most]
        for start, _ in rows.values()
    ]
    best = max(fitting, key=len)
    fewest = max(math.ceil(rows[row][0]) for row in best)
    most = min(math.floor(rows[row][1]) for row in best)
    return range(fewest, most + 1), best


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value, from the lowest; equal ones share the mean of their places.

    Args:
        values: Numbers.

    Returns:
        Places from 1.
    """
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's coefficient: whether two lists order the same things alike.

    Args:
        left: A number for each thing.
        right: Another, in the same order.

    Returns:
        1 for the same order, -1 for the reverse, about 0 for no relation; None where one of them
        has no order.
    """
    places = torch.tensor([ranks(left), ranks(right)], dtype=torch.float64)  # [2, things]
    if (places.amin(dim=1) == places.amax(dim=1)).any():
        return None
    return float(torch.corrcoef(places)[0, 1])


def scaled_sizes(row: str, scale: int, layers: int, dropout: float) -> dict[str, float]:
    """A row's change, made to a smaller base: every ratio to the base is the paper's.

    Args:
        row: Of Table 3.
        scale: What all widths are divided by; heads stay as many.
        layers: N of the smaller base.
        dropout: Of the smaller base.

    Returns:
        Fields of the configuration.

    Raises:
        ValueError: If a width or a number of layers would not be whole.
    """
    base, sizes = (VanillaTransformerConfig.from_paper(name) for name in ("base", row))
    heads = sizes.encoder_attention_heads
    widths = {
        "hidden_size": sizes.d_model,
        "encoder_ffn_dim": sizes.encoder_ffn_dim,
        "decoder_ffn_dim": sizes.decoder_ffn_dim,
        "d_k": sizes.d_k or sizes.d_model // heads,
        "d_v": sizes.d_v or sizes.d_model // heads,
    }
    for name, width in widths.items():
        if scale < 1 or width % scale:
            raise ValueError(f"scale must divide {name} of row {row}, {width}, got {scale}.")
    if layers < 1 or sizes.encoder_layers * layers % base.encoder_layers:
        raise ValueError(
            f"layers must give row {row} a whole number, {sizes.encoder_layers} / "
            f"{base.encoder_layers} of it, got {layers}."
        )
    depth = sizes.encoder_layers * layers // base.encoder_layers
    return {
        **{name: width // scale for name, width in widths.items()},
        "encoder_layers": depth,
        "decoder_layers": depth,
        "dropout": sizes.dropout / base.dropout * dropout,
    }


def scaled_configs(flags: argparse.Namespace) -> dict[str, TrainConfig]:
    """The runs of the scaled rows: what differs is what the row changes, and the folder.

    Args:
        flags: As `add_flags` declares them, and `output_dir`.

    Returns:
        Settings by row.

    Raises:
        ValueError: If a setting does not fit.
    """
    warmup_steps = flags.warmup_steps
    if warmup_steps is None:
        warmup_steps = max(1, flags.max_steps // 3)
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps must be at least 1, got {warmup_steps}.")
    factor = flags.learning_rate_factor
    if factor is None:
        # eq. (3) at its highest is (d_model * warmup_steps)^-0.5
        factor = math.sqrt(warmup_steps / TrainConfig.warmup_steps)
    shared = {
        name: getattr(flags, name)
        for name in ("dataset", "name", "source_lang", "target_lang", "max_length", "max_steps")
    }
    shared |= {
        "tokens_per_step": flags.tokens_per_step,
        "seed": flags.seed,
        "warmup_steps": warmup_steps,
        "learning_rate_factor": factor,
        "vocab_size": flags.learned_vocab_size,
        # a step is smaller than the paper's, and each group of it is computed on its own
        "length_groups_per_step": 4,
        # Table 3 has the last weights as they are
        "num_averaged_checkpoints": 1,
        "eval_every_steps": flags.max_steps,
        "save_every_steps": max(1, flags.max_steps // 10),
    }
    configs = {}
    for row in flags.rows:
        own = {
            "model": scaled_sizes(row, flags.scale, flags.layers, flags.dropout),
            "output_dir": str(Path(flags.output_dir) / "rows" / row),
        }
        configs[row] = load_config(f"paper-{row}", shared | own)
        configs[row].model_config(flags.learned_vocab_size)
    return configs


def _sizes(config: VanillaTransformerConfig, label_smoothing: float) -> list[float]:
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


def _rows_section(counts: Mapping[str, Mapping[str, int]], vocab_size: int) -> Section:
    rows = []
    for row, parts in counts.items():
        recipe = load_config(f"paper-{row}")
        sizes = _sizes(recipe.model_config(vocab_size), recipe.label_smoothing)
        paper = PAPER[row]
        rows.append(
            [row, *sizes, sum(parts.values()) / MILLION, *paper[2:], paper.perplexity, paper.bleu]
        )
    shares = {row: parts["embedding"] / sum(parts.values()) for row, parts in counts.items()}
    least, most = min(shares, key=shares.get), max(shares, key=shares.get)
    return Section(
        name="rows",
        title="Every row, built",
        says="Each row but big changes one thing of the base model. Each is built as the package "
        "builds any model, and its weights are counted, not computed from a formula. The embedding "
        f"is one matrix for source, target and output: with {vocab_size:,} tokens it is from "
        f"{shares[least]:.0%} ({least}) to {shares[most]:.0%} ({most}) of the weights. The decoder "
        "has more than the encoder, for each of its layers attends twice. Rows A change the heads "
        "and keep the weights as many; D changes dropout and label smoothing, which have none; E "
        "learns a vector for "
        "each position of either side. PPL and BLEU here are the paper's.",
        columns=("row", *SIZE_COLUMNS, "params (M)", "paper's (M)", "PPL", "BLEU"),
        rows=rows,
        figure=_draw_counts(counts),
        numbers={"parameters": {row: dict(parts) for row, parts in counts.items()}},
    )


def _draw_counts(counts: Mapping[str, Mapping[str, int]]) -> "Figure":
    figure, axes = new_figure(7.0, 1.6 + 0.24 * len(counts))
    names = list(counts)
    colors = {"embedding": "0.75", "positions": "C3", "encoder": "C0", "decoder": "C1"}
    left = [0.0] * len(names)
    for part, color in colors.items():
        widths = [counts[row][part] / MILLION for row in names]
        if any(widths):
            axes.barh(names, widths, left=left, color=color, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    given = {row: PAPER[row].parameters for row in names if PAPER[row].parameters}
    if given:
        axes.plot(
            list(given.values()), list(given), "k|", markersize=11, mew=2, label="the paper's"
        )
    axes.invert_yaxis()
    axes.set_xlabel("millions of parameters")
    axes.set_ylabel("row")
    axes.legend()
    return figure


def _parameters_section(counts: Mapping[str, Mapping[str, int]], vocab_size: int) -> Section:
    implied, rows = {}, []
    base = sum(parameters_by_part(paper_sizes("base", vocab_size)).values()) / MILLION
    for row, parts in counts.items():
        paper = PAPER[row].parameters
        if paper is None:
            continue
        config = paper_sizes(row, vocab_size)
        ours = sum(parts.values())
        tokens = implied_vocabulary(config, paper * MILLION)
        implied[row] = (tokens, ROUNDING / config.d_model)
        change = ours / MILLION - base
        rows.append(
            [
                row,
                ours,
                paper,
                ours / MILLION - paper,
                round(tokens),
                change,
                paper - PAPER["base"].parameters,
            ]
        )
    intervals = {row: (tokens - error, tokens + error) for row, (tokens, error) in implied.items()}
    fitting, best = vocabularies_that_fit(intervals)
    others = ", ".join(
        f"{row} wants {fewest:,.0f} to {most:,.0f}"
        for row, (fewest, most) in intervals.items()
        if row not in best
    )
    exact = [row for row in rows if abs(row[3]) <= ROUNDING / MILLION]
    # of two counts, each rounded to a million
    added = [row for row in rows if row[0] != "base"]
    alike = [row for row in added if abs(row[5] - row[6]) <= 2 * ROUNDING / MILLION]
    if vocab_size == TrainConfig.vocab_size:
        size, model = ", the size of section 5.1,", f"as described, with {vocab_size:,} tokens,"
    else:
        size = f" (section 5.1 says about {TrainConfig.vocab_size:,})"
        model = f"with {vocab_size:,} tokens"
    says = (
        f"With {vocab_size:,} tokens{size} {len(exact)} of {len(rows)} counts round to the "
        "paper's. "
    )
    if added:
        says += (
            "What a row adds to base or takes from it, the last two columns, agrees within "
            f"rounding in {len(alike)} of {len(added)}: the layers are the same, and what is left "
            "is the embedding, so each count says how many tokens it would take. "
        )
    return Section(
        name="parameters",
        title="Parameters beside the paper's, and the vocabulary that they imply",
        says=says
        + f"{fitting[0]:,} to {fitting[-1]:,} tokens give {len(best)} of {len(rows)} rows their "
        f"count" + (f"; {others}. No single vocabulary gives all of them" if others else "") + ". "
        f"The paper does not say how it counted; a model {model} has {base:.2f} million "
        "parameters as base.",
        columns=(
            "row",
            "parameters",
            "paper's (M)",
            "off by (M)",
            "implied vocabulary",
            "from base (M)",
            "paper's from base (M)",
        ),
        rows=rows,
        figure=_draw_vocabularies(implied, vocab_size),
    )


def _draw_vocabularies(implied: Mapping[str, tuple[float, float]], vocab_size: int) -> "Figure":
    figure, axes = new_figure(7.0, 1.4 + 0.25 * len(implied))
    tokens, errors = zip(*implied.values(), strict=True)
    axes.errorbar(tokens, list(implied), xerr=errors, fmt="o", capsize=4, label="implied")
    axes.axvline(vocab_size, color="k", linestyle="--", label=f"{vocab_size:,} tokens")
    axes.invert_yaxis()
    axes.set_xlabel("tokens that give the paper's count, which is rounded to a million")
    axes.set_ylabel("row")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _built_section(configs: Mapping[str, TrainConfig], flags: argparse.Namespace) -> Section:
    rows = [
        [row, *_sizes(config.model_config(config.vocab_size), config.label_smoothing)]
        for row, config in configs.items()
    ]
    config = next(iter(configs.values()))
    return Section(
        name="built",
        title="The rows as they are trained here",
        says=f"All widths are the paper's divided by {flags.scale}, the base has {flags.layers} "
        f"layers a stack and dropout {flags.dropout}, the other rows theirs in the paper's ratio; "
        "heads and label smoothing are the paper's own. Each row is trained on "
        f"{' '.join(filter(None, (flags.dataset, flags.name)))}, {flags.source_lang} to "
        f"{flags.target_lang}, for {config.max_steps:,} steps of {config.tokens_per_step:,} "
        f"tokens, {config.warmup_steps:,} of them warm-up, {config.learning_rate_factor:.3g} "
        f"times the rate of section 5.3, with seed {config.seed} and one vocabulary of "
        f"{flags.learned_vocab_size:,} tokens. The paper trained big three times as long as the "
        "others; here all have the same steps.",
        columns=("row", *SIZE_COLUMNS),
        rows=rows,
    )


def _trained_section(results: Mapping[str, "RowResult"], flags: argparse.Namespace) -> Section:
    rows = [
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
        ([row[place] for row in rows], [row[place + 1] for row in rows]) for place in (2, 4)
    )
    correlations = {
        "PPL": rank_correlation(*perplexities),
        "BLEU": rank_correlation(*bleus),
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
        says=f"On the validation split, of the last weights, not averaged; PPL is per token and of "
        f"the loss without smoothing, BLEU is {signature}. Ours cannot equal the paper's, on "
        "another corpus and at another size: what can be compared is the order of the rows. "
        f"Spearman's rank correlation with the paper's order is {said}, over {len(rows)} rows; 1 "
        f"is the same order, 0 none. The best row here is {best['PPL']} by PPL and "
        f"{best['BLEU']} by BLEU. One seed: rows that lie near each other may change places with "
        "another.",
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
        numbers={"rank_correlation": correlations, "signature": signature, "seed": flags.seed},
    )


def _draw_ranks(
    results: Mapping[str, "RowResult"], correlations: Mapping[str, float | None]
) -> "Figure":
    figure, plots = new_figure(10.0, 5.4, columns=2)
    names = list(results)
    orders = {
        "PPL": (
            [result.perplexity for result in results.values()],
            [PAPER[row].perplexity for row in names],
        ),
        # the highest is the best
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
            # what stands at the edge must not squeeze the plot
            label.set_in_layout(False)
        value = correlations[name]
        axes.set_title(name if value is None else f"{name}, rank correlation {value:.2f}")
        axes.set_xlabel("place in the paper, 1 is the best")
        axes.set_ylabel("place here, 1 is the best")
        axes.locator_params(integer=True)
        axes.set_aspect("equal")
        axes.margins(0.1)
    plots[0][0].legend(fontsize=8)
    return figure
