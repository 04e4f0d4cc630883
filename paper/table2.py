"""Table 2: quality against the work of training. Sections 5.2 and 6.1."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from .. import VanillaTransformerForConditionalGeneration
from ..drawing import new_figure
from ..modeling_vanilla_transformer import MultiHeadAttention
from ..train.config import TrainConfig
from ..train.dry_run import flops_per_token
from ..train.recipe import RECIPE_FILE, load_config
from ..train.run_folder.files import (
    SCORES_FILE,
    read_metrics,
    read_recipe,
    read_scores,
    vocabulary_size,
)
from .study import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class System(NamedTuple):
    """A row of Table 2: BLEU on newstest2014 and training FLOPs, where reported."""

    name: str
    bleu_de: float | None
    bleu_fr: float | None
    flops_de: float | None
    flops_fr: float | None


SINGLE_MODELS = (
    System("ByteNet", 23.75, None, None, None),
    System("Deep-Att + PosUnk", None, 39.2, None, 1.0e20),
    System("GNMT + RL", 24.6, 39.92, 2.3e19, 1.4e20),
    System("ConvS2S", 25.16, 40.46, 9.6e18, 1.5e20),
    System("MoE", 26.03, 40.56, 2.0e19, 1.2e20),
)
ENSEMBLES = (
    System("Deep-Att + PosUnk ensemble", None, 40.4, None, 8.0e20),
    System("GNMT + RL ensemble", 26.30, 41.16, 1.8e20, 1.1e21),
    System("ConvS2S ensemble", 26.36, 41.29, 7.7e19, 1.2e21),
)
TRANSFORMERS = (
    System("Transformer (base)", 27.3, 38.1, 3.3e18, 3.3e18),
    System("Transformer (big)", 28.4, 41.8, 2.3e19, 2.3e19),
)


class Training(NamedTuple):
    """Training time of a model in the paper. Section 5.2."""

    recipe: str
    french_recipe: str
    system: System
    hours: float
    seconds_per_step: float


TRAININGS = (
    Training("paper-base", "paper-base-en-fr", TRANSFORMERS[0], 12, 0.4),
    Training("paper-big", "paper-big-en-fr", TRANSFORMERS[1], 3.5 * 24, 1.0),
)
# section 5.2, and the footnote of section 6.1: what a P100 sustains, in single precision
GPUS = 8
TFLOPS_PER_GPU = 9.5
TERA = 1e12
# forward is one product with a weight, backward two
PASSES = 3


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument(
        "--sentence_length",
        type=int,
        default=30,
        help="tokens of a sentence, for the products of attention itself (%(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(__file__).parents[1] / "results",
        help="folder of run folders whose scores to show; the checkout's results if not given",
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """The work of training, the paper's table, and what runs of this package have.

    Args:
        flags: As `add_flags` declares them.

    Yields:
        Three sections.

    Raises:
        ValueError: If a flag has a value that it cannot have.
    """
    if flags.sentence_length < 1:
        raise ValueError(f"sentence_length must be at least 1, got {flags.sentence_length}.")
    counted = {
        training.system.name: training_flops(load_config(training.recipe), flags.sentence_length)
        for training in TRAININGS
    }
    yield _work_section(counted, flags.sentence_length)
    runs = scored_runs(flags.results, flags.sentence_length)
    ours = {name: sum(parts.values()) for name, parts in counted.items()}
    french = {
        training.system.name: sum(
            training_flops(load_config(training.french_recipe), flags.sentence_length).values()
        )
        for training in TRAININGS
    }
    yield _table_section(ours, french, runs)
    yield _runs_section(runs)


def training_flops(config: TrainConfig, sentence_length: int) -> dict[str, float]:
    """Count the FLOPs of the matrix products of a training run, forward and backward.

    Args:
        config: Settings of the run.
        sentence_length: Tokens of a sentence, source and target.

    Returns:
        Floating-point operations, those of products with weights by the part of the model that has
        them, and those between queries, keys and values apart.

    Raises:
        ValueError: If the model cannot be.
    """
    sizes = config.model_config(config.vocab_size)
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(sizes)
    per_token = {
        "encoder": flops_per_token(model.get_encoder()),
        "decoder": flops_per_token(model.get_decoder()),
        "output projection": flops_per_token(nn.ModuleList([model.lm_head])),
        "attention itself": PASSES
        * sentence_length
        * (
            attention_width(model.get_encoder().layers)
            + attention_width(model.get_decoder().layers)
        ),
    }
    tokens = config.tokens_per_step * config.max_steps
    return {part: float(tokens * flops) for part, flops in per_token.items()}


def attention_width(layers: nn.Module) -> int:
    """Count the FLOPs of equation (1) for each query and key.

    Args:
        layers: Number of layers of a stack.

    Returns:
        Floating-point operations, summed over the attentions.
    """
    return sum(
        2 * (layer.k_proj.out_features + layer.v_proj.out_features)
        for layer in layers.modules()
        if isinstance(layer, MultiHeadAttention)
    )


def sustained_flops(hours: float, gpus: int = GPUS, teraflops: float = TFLOPS_PER_GPU) -> float:
    """Estimate training FLOPs as the paper does: time x GPUs x sustained FLOP/s.

    Args:
        hours: Training time, in hours.
        gpus: Number of GPUs.
        teraflops: What one of them sustains, in TFLOP/s.

    Returns:
        Floating-point operations.
    """
    return hours * 3600 * gpus * teraflops * TERA


class ScoredRun(NamedTuple):
    """A run of this package that was evaluated.

    Attributes:
        name: Name of the run folder.
        corpus: Corpus of training and evaluation.
        split: Split of the corpus.
        direction: Languages, "en-de".
        bleu: BLEU of sacreBLEU.
        signature: Signature of sacreBLEU.
        compound_bleu: As the paper counted it, where that is known.
        flops: FLOPs of the training; None if the size of the vocabulary is not known.
        is_papers: Whether corpus and split are those of Table 2.
    """

    name: str
    corpus: str
    split: str
    direction: str
    bleu: float
    signature: str
    compound_bleu: float | None
    flops: float | None
    is_papers: bool


def scored_runs(folder: Path, sentence_length: int) -> list[ScoredRun]:
    """Read the BLEU of every run folder in a folder.

    Args:
        folder: Folder of run folders; it need not exist.
        sentence_length: As in `training_flops`.

    Returns:
        The runs that have one, by name, an entry for each split.
    """
    runs = []
    for path in sorted(folder.glob(f"*/{SCORES_FILE}")):
        run = path.parent
        if not (run / RECIPE_FILE).is_file():
            continue
        config = read_recipe(run)
        metrics = read_metrics(run)
        # a run may have been ended early
        config.max_steps = metrics[-1]["step"] if metrics else config.max_steps
        flops, vocab_size = None, vocabulary_size(run, config)
        if vocab_size is not None:
            config.vocab_size = vocab_size
            flops = sum(training_flops(config, sentence_length).values())
        runs += [
            ScoredRun(
                run.name,
                " ".join(filter(None, (scores["dataset"], scores["name"]))),
                scores["split"],
                f"{scores['source_lang']}-{scores['target_lang']}",
                scores["bleu"],
                scores["bleu_signature"],
                scores.get("compound_bleu"),
                flops,
                # newstest2014, as the defaults have it
                (scores["dataset"], scores["split"]) == (TrainConfig.dataset, "test"),
            )
            for scores in read_scores(run).values()
            if "bleu" in scores
        ]
    return runs


def _work_section(counted: dict[str, dict[str, float]], sentence_length: int) -> Section:
    rows, shares, rates = [], [], []
    for training in TRAININGS:
        config = load_config(training.recipe)
        name, parts = training.system.name, counted[training.system.name]
        total = sum(parts.values())
        estimate = sustained_flops(training.hours)
        shares.append(total / estimate)
        rates.append(total / config.max_steps / training.seconds_per_step / GPUS / TERA)
        rows.append(
            [
                name,
                training.hours,
                GPUS,
                TFLOPS_PER_GPU,
                estimate,
                training.system.flops_de,
                config.tokens_per_step * config.max_steps,
                total,
                shares[-1],
                rates[-1],
            ]
        )
    attention = [parts["attention itself"] / sum(parts.values()) for parts in counted.values()]
    return Section(
        name="work",
        title="The work of training: as the paper estimates it, and counted",
        says=f"The paper's FLOPs are time, times {GPUS} GPUs, times the {TFLOPS_PER_GPU} TFLOP/s "
        "that it assumes a P100 sustains: what the machines could have done in that time. Counted "
        "are the matrix products that the model itself asks for, forward and backward, over the "
        f"paper's steps of {config.tokens_per_step:,} source and target tokens: {shares[0]:.0%} of "
        f"the estimate for base and {shares[1]:.0%} for big. By the paper's seconds a step each "
        f"GPU did {rates[0]:.1f} and {rates[1]:.1f} TFLOP/s of them; the wider products of big use "
        "it better. The products between queries, keys and values, which grow with the square of "
        "the length, are "
        f"{attention[0]:.1%} and {attention[1]:.1%} of the work with sentences of "
        f"{sentence_length} tokens: nearly all is products with weights.",
        columns=(
            "model",
            "hours",
            "GPUs",
            "TFLOP/s each",
            "product",
            "paper's FLOPs",
            "tokens a side",
            "counted FLOPs",
            "share",
            "TFLOP/s done",
        ),
        rows=rows,
        figure=_draw_work(counted),
        numbers={"counted": counted, "sentence_length": sentence_length},
    )


def _draw_work(counted: dict[str, dict[str, float]]) -> "Figure":
    figure, plots = new_figure(9.0, 3.2, columns=2)
    for axes, training in zip(plots[0], TRAININGS, strict=True):
        name = training.system.name
        bottom = 0.0
        for number, (part, flops) in enumerate(counted[name].items()):
            axes.bar("counted", flops, bottom=bottom, label=part, color=f"C{number}", width=0.6)
            bottom += flops
        axes.bar("the paper's\nestimate", training.system.flops_de, color="0.75", width=0.6)
        axes.set_title(name)
        axes.set_ylabel("FLOPs of training")
    plots[0][0].legend(loc="upper left", fontsize=9)
    return figure


def _table_section(
    ours: dict[str, float], french: dict[str, float], runs: Sequence[ScoredRun]
) -> Section:
    rows = [
        [*system, ours.get(system.name), french.get(system.name)]
        for system in (*SINGLE_MODELS, *TRANSFORMERS, *ENSEMBLES)
    ]
    peers = [
        system for system in (*SINGLE_MODELS, *ENSEMBLES) if system.bleu_de and system.flops_de
    ]
    best = max(peers, key=lambda system: system.bleu_de)
    base, big = TRANSFORMERS
    return Section(
        name="table2",
        title="BLEU on newstest2014 and FLOPs of training",
        says=f"As the paper reports them. Base is {base.bleu_de - best.bleu_de:.1f} BLEU above "
        f"the best of the others into German, {best.name}, at {base.flops_de / best.flops_de:.1%} "
        f"of its work; big is {big.bleu_de - best.bleu_de:.1f} above it at "
        f"{big.flops_de / best.flops_de:.0%}. All of the paper's FLOPs are estimates of time on "
        "machines; the last columns are what our count gives for the same training, into German "
        f"{ours[base.name] / base.flops_de:.0%} and {ours[big.name] / big.flops_de:.0%} of it. "
        "The table has big into French at 41.8, the text of section 6.1 at 41.0. It gives no FLOPs "
        "for ByteNet, which the picture therefore lacks.",
        columns=(
            "model",
            "en-de",
            "en-fr",
            "FLOPs en-de",
            "FLOPs en-fr",
            "our count, en-de",
            "our count, en-fr",
        ),
        rows=rows,
        # BLEU counted another way has no place on the paper's axis
        figure=_draw_table(
            (ours, french),
            [run for run in runs if run.is_papers and None not in (run.compound_bleu, run.flops)],
        ),
    )


def _draw_table(ours: Sequence[dict[str, float]], runs: Sequence[ScoredRun]) -> "Figure":
    figure, plots = new_figure(11.0, 4.6, columns=2)
    groups = (
        (SINGLE_MODELS, "o", "C0", "others, single"),
        (ENSEMBLES, "s", "C7", "others, ensembles"),
        (TRANSFORMERS, "*", "C3", "Transformer, the paper's estimate"),
    )
    for axes, (place, language) in zip(plots[0], enumerate(("de", "fr")), strict=True):
        for systems, marker, color, label in groups:
            points = [
                (system.name.removesuffix(" ensemble"), system[3 + place], system[1 + place])
                for system in systems
                if system[1 + place] and system[3 + place]
            ]
            _, flops, bleu = zip(*points, strict=True)
            axes.scatter(flops, bleu, marker=marker, color=color, label=label, s=60, zorder=3)
            # neighbours have their names on either side, above and below
            side, align = (-7, "right") if systems is SINGLE_MODELS else (7, "left")
            for number, (name, *point) in enumerate(sorted(points, key=lambda entry: -entry[2])):
                offset = (side, -4 if number % 2 else 4)
                axes.annotate(
                    name,
                    point,
                    offset,
                    textcoords="offset points",
                    fontsize=8,
                    ha=align,
                    va="top" if number % 2 else "bottom",
                )
        for system in TRANSFORMERS:
            counted, bleu = ours[place][system.name], system[1 + place]
            # the same training, counted
            axes.plot([counted, system[3 + place]], [bleu, bleu], color="C3", lw=1, ls=":")
            label = "the same, our count" if system is TRANSFORMERS[0] else None
            axes.scatter(
                counted, bleu, marker="*", facecolor="none", edgecolor="C3", label=label, s=60
            )
        for run in runs:
            if run.direction == f"en-{language}":
                axes.scatter(run.flops, run.compound_bleu, marker="x", color="k")
                axes.annotate(run.name, (run.flops, run.compound_bleu), fontsize=8)
        axes.set_xscale("log")
        axes.margins(x=0.36, y=0.12)
        axes.set_title(f"English to {'German' if language == 'de' else 'French'}")
        axes.set_xlabel("FLOPs of training")
        axes.set_ylabel("BLEU on newstest2014")
        axes.grid(alpha=0.3)
    handles, labels = plots[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    return figure


def _runs_section(runs: Sequence[ScoredRun]) -> Section:
    columns = (
        "run",
        "corpus",
        "split",
        "direction",
        "BLEU",
        "as in the paper",
        "FLOPs",
        "signature",
    )
    rows = [
        [
            run.name,
            run.corpus,
            run.split,
            run.direction,
            run.bleu,
            run.compound_bleu,
            run.flops,
            run.signature,
        ]
        for run in runs
    ]
    comparable = sum(run.is_papers for run in runs)
    if not runs:
        says = (
            "No run with scores was found: an installed package has no results, a checkout keeps "
            "them in its folder results. --results names another folder of run folders."
        )
    else:
        says = (
            f"{len(runs)} scores of runs of this package. {comparable or 'None'} of them "
            f"{'is' if comparable == 1 else 'are'} on WMT14 and newstest2014: BLEU on another "
            "corpus is no measure beside the paper's, for it says as much about the sentences as "
            "about the model, and neither is BLEU counted another way. FLOPs are counted as above, "
            "for the steps that each run made."
        )
    return Section(name="runs", title="Runs of this package", says=says, columns=columns, rows=rows)
