"""Table 2: BLEU against training FLOPs. Sections 5.2 and 6.1."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    """Recipes and training time of one of the paper's models. Section 5.2."""

    recipe: str
    french_recipe: str
    system: System
    hours: float
    seconds_per_step: float


TRAININGS = (
    Training("paper-base", "paper-base-en-fr", TRANSFORMERS[0], 12, 0.4),
    Training("paper-big", "paper-big-en-fr", TRANSFORMERS[1], 3.5 * 24, 1.0),
)
# number of P100 GPUs. Section 5.2
NUM_GPUS = 8
# sustained single-precision speed of a P100. Section 6.1, footnote
TFLOPS_PER_GPU = 9.5
TERA = 1e12
# a product in the forward pass needs two more products of the same size in the backward pass
TRAINING_FACTOR = 3


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument(
        "--sentence_length",
        type=int,
        default=30,
        help="tokens per sentence, for the products inside attention (default: %(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(__file__).parents[1] / "results",
        help="folder of run folders whose scores to show; the results of the checkout if not given",
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Count the FLOPs of training, and show the paper's table and the runs of this package.

    Args:
        flags: Flags that `add_flags` declares.

    Yields:
        Three sections.

    Raises:
        ValueError: If the sentence length is below 1.
    """
    if flags.sentence_length < 1:
        raise ValueError(f"sentence_length must be at least 1, got {flags.sentence_length}.")
    flops_by_part = {
        training.system.name: training_flops(load_config(training.recipe), flags.sentence_length)
        for training in TRAININGS
    }
    yield _work_section(flops_by_part, flags.sentence_length)
    runs = scored_runs(flags.results, flags.sentence_length)
    our_flops = {name: sum(parts.values()) for name, parts in flops_by_part.items()}
    our_french_flops = {
        training.system.name: sum(
            training_flops(load_config(training.french_recipe), flags.sentence_length).values()
        )
        for training in TRAININGS
    }
    yield _table_section(our_flops, our_french_flops, runs)
    yield _runs_section(runs)


def training_flops(config: TrainConfig, sentence_length: int) -> dict[str, float]:
    """Count the FLOPs of the matrix products of a training run, forward and backward.

    Args:
        config: Settings of the run.
        sentence_length: Tokens per sentence, on the source and on the target side.

    Returns:
        FLOPs by part of the model: products with weights in each part, and products between
        queries, keys and values as "attention itself".

    Raises:
        ValueError: If the sizes of the model are invalid.
    """
    sizes = config.model_config(config.vocab_size)
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(sizes)
    per_token = {
        "encoder": flops_per_token(model.get_encoder()),
        "decoder": flops_per_token(model.get_decoder()),
        "output projection": flops_per_token(nn.ModuleList([model.lm_head])),
        "attention itself": TRAINING_FACTOR
        * sentence_length
        * (
            attention_flops_per_query_and_key(model.get_encoder().layers)
            + attention_flops_per_query_and_key(model.get_decoder().layers)
        ),
    }
    tokens = config.tokens_per_step * config.max_steps
    return {part: float(tokens * flops) for part, flops in per_token.items()}


def attention_flops_per_query_and_key(layers: nn.Module) -> int:
    """Count the FLOPs of equation (1) for one query and one key.

    Args:
        layers: Layers of a stack.

    Returns:
        FLOPs of the forward pass, summed over all attention sub-layers.
    """
    return sum(
        2 * (layer.k_proj.out_features + layer.v_proj.out_features)
        for layer in layers.modules()
        if isinstance(layer, MultiHeadAttention)
    )


def sustained_flops(hours: float) -> float:
    """Estimate training FLOPs as the paper does: time x GPUs x sustained FLOP/s.

    Args:
        hours: Training time, in hours.

    Returns:
        Estimated FLOPs.
    """
    return hours * 3600 * NUM_GPUS * TFLOPS_PER_GPU * TERA


class ScoredRun(NamedTuple):
    """An evaluated run of this package.

    Attributes:
        name: Path of the run folder, relative to the folder of results.
        corpus: Corpus of the evaluation.
        split: Split of this corpus.
        direction: Source and target language, for example "en-de".
        bleu: BLEU of sacreBLEU.
        signature: sacreBLEU's signature of the BLEU score.
        compound_bleu: BLEU with split compounds, as in the paper; None if unknown.
        flops: FLOPs of the training; None if the size of the vocabulary is unknown.
        is_comparable: Whether corpus and split are those of Table 2.
    """

    name: str
    corpus: str
    split: str
    direction: str
    bleu: float
    signature: str
    compound_bleu: float | None
    flops: float | None
    is_comparable: bool


def scored_runs(folder: Path, sentence_length: int) -> list[ScoredRun]:
    """Read the BLEU of every run folder in a folder and its subfolders.

    Args:
        folder: Folder of run folders; it need not exist.
        sentence_length: Tokens per sentence, as in `training_flops`.

    Returns:
        Runs with a BLEU score, sorted by name, one entry per split.
    """
    runs = []
    for scores_path in sorted(folder.rglob(SCORES_FILE)):
        run_folder = scores_path.parent
        if not (run_folder / RECIPE_FILE).is_file():
            continue
        config = read_recipe(run_folder)
        metrics = read_metrics(run_folder)
        # count the logged steps, because a run may have ended before max_steps
        config.max_steps = metrics[-1]["step"] if metrics else config.max_steps
        flops, vocab_size = None, vocabulary_size(run_folder, config)
        if vocab_size is not None:
            config.vocab_size = vocab_size
            flops = sum(training_flops(config, sentence_length).values())
        runs += [
            ScoredRun(
                run_folder.relative_to(folder).as_posix(),
                " ".join(filter(None, (scores["dataset"], scores["name"]))),
                scores["split"] or "",
                f"{scores['source_lang']}-{scores['target_lang']}",
                scores["bleu"],
                scores["bleu_signature"],
                scores.get("compound_bleu"),
                flops,
                # the default dataset and its test split, newstest2014
                (scores["dataset"], scores["split"]) == (TrainConfig.dataset, "test"),
            )
            for scores in read_scores(run_folder).values()
            if "bleu" in scores
        ]
    return runs


def _work_section(flops_by_part: dict[str, dict[str, float]], sentence_length: int) -> Section:
    rows, counted_shares, teraflops_per_gpu = [], [], []
    for training in TRAININGS:
        config = load_config(training.recipe)
        name, parts = training.system.name, flops_by_part[training.system.name]
        counted_flops = sum(parts.values())
        estimated_flops = sustained_flops(training.hours)
        counted_shares.append(counted_flops / estimated_flops)
        teraflops_per_gpu.append(
            counted_flops / config.max_steps / training.seconds_per_step / NUM_GPUS / TERA
        )
        rows.append(
            [
                name,
                training.hours,
                NUM_GPUS,
                TFLOPS_PER_GPU,
                estimated_flops,
                training.system.flops_de,
                config.tokens_per_step * config.max_steps,
                counted_flops,
                counted_shares[-1],
                teraflops_per_gpu[-1],
            ]
        )
    attention_shares = [
        parts["attention itself"] / sum(parts.values()) for parts in flops_by_part.values()
    ]
    return Section(
        name="work",
        title="FLOPs of training: the paper's estimate and a count",
        finding=f"The paper estimates FLOPs as training time, times {NUM_GPUS} GPUs, times "
        f"{TFLOPS_PER_GPU} TFLOP/s, the assumed sustained speed of a P100: what the GPUs could "
        "have computed in that time. The count has the matrix products of the model, forward and "
        f"backward, over the paper's steps of {config.tokens_per_step:,} source and target tokens. "
        f"It is {counted_shares[0]:.0%} of the estimate for base and {counted_shares[1]:.0%} for "
        f"big. With the paper's time per step, each GPU computed {teraflops_per_gpu[0]:.1f} "
        f"TFLOP/s for base and {teraflops_per_gpu[1]:.1f} for big, whose wider products use a GPU "
        "better. The products between queries, keys and values grow with the square of the length. "
        f"With sentences of {sentence_length} tokens they are {attention_shares[0]:.1%} (base) and "
        f"{attention_shares[1]:.1%} (big) of the count: nearly all FLOPs are products with "
        "weights.",
        columns=(
            "model",
            "hours",
            "GPUs",
            "assumed TFLOP/s per GPU",
            "time x GPUs x TFLOP/s",
            "paper's FLOPs",
            "tokens per side",
            "counted FLOPs",
            "counted / estimated",
            "counted TFLOP/s per GPU",
        ),
        rows=rows,
        figure=_draw_work(flops_by_part),
        message="Training needs less than half of what the GPUs could compute in that time "
        "(each panel has its own scale)",
        numbers={"counted": flops_by_part, "sentence_length": sentence_length},
    )


def _draw_work(flops_by_part: dict[str, dict[str, float]]) -> "Figure":
    figure, plots = new_figure(9.0, 3.2, columns=2)
    for axes, training in zip(plots[0], TRAININGS, strict=True):
        name = training.system.name
        bottom, counted_flops = 0.0, sum(flops_by_part[name].values())
        for color_number, (part, flops) in enumerate(flops_by_part[name].items()):
            # the label states the share, because a part of one percent is too thin to be seen
            label = f"{part}: {flops / counted_flops:.1%}"
            axes.bar(
                "counted", flops, bottom=bottom, label=label, color=f"C{color_number}", width=0.6
            )
            bottom += flops
        axes.bar("the paper's\nestimate", training.system.flops_de, color="0.75", width=0.6)
        axes.set_title(name)
        axes.set_ylabel("FLOPs of training")
        axes.legend(loc="upper left", fontsize=9)
    return figure


def _table_section(
    our_flops: dict[str, float], our_french_flops: dict[str, float], runs: Sequence[ScoredRun]
) -> Section:
    rows = [
        [*system, our_flops.get(system.name), our_french_flops.get(system.name)]
        for system in (*SINGLE_MODELS, *TRANSFORMERS, *ENSEMBLES)
    ]
    other_systems: list[Any] = [
        system for system in (*SINGLE_MODELS, *ENSEMBLES) if system.bleu_de and system.flops_de
    ]
    best = max(other_systems, key=lambda system: system.bleu_de)
    # Any, not System: the paper reports all numbers of its own models, so none of them is None
    paper_models: list[Any] = [*TRANSFORMERS]
    base, big = paper_models
    return Section(
        name="table2",
        title="BLEU on newstest2014 and FLOPs of training",
        finding="BLEU and FLOPs are those of the paper. For translation into German, the best of "
        f"the other systems is {best.name}. Base is {base.bleu_de - best.bleu_de:.1f} BLEU better, "
        f"with {base.flops_de / best.flops_de:.1%} of its FLOPs; big is "
        f"{big.bleu_de - best.bleu_de:.1f} BLEU better, with {big.flops_de / best.flops_de:.0%}. "
        "The paper estimates all FLOPs from training time. The last two columns are our count for "
        "the same training; for translation into German it is "
        f"{our_flops[base.name] / base.flops_de:.0%} of the estimate for base and "
        f"{our_flops[big.name] / big.flops_de:.0%} for big. For big and French, Table 2 reports "
        "41.8 BLEU and the text of section 6.1 reports 41.0. ByteNet is not in the picture, "
        "because the paper gives no FLOPs for it.",
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
        # only BLEU with split compounds is comparable to the paper's
        figure=_draw_table(
            (our_flops, our_french_flops),
            [
                run
                for run in runs
                if run.is_comparable and None not in (run.compound_bleu, run.flops)
            ],
        ),
        message="The big Transformer has the best BLEU, with less work than ensembles",
    )


def _draw_table(our_flops: Sequence[dict[str, float]], runs: Sequence[ScoredRun]) -> "Figure":
    figure, plots = new_figure(11.0, 4.6, columns=2)
    system_groups = (
        (SINGLE_MODELS, "o", "C0", "others, single"),
        (ENSEMBLES, "s", "C7", "others, ensembles"),
        (TRANSFORMERS, "*", "C3", "Transformer, the paper's estimate"),
    )
    for axes, language, flops_by_model in zip(plots[0], ("de", "fr"), our_flops, strict=True):
        bleu_field, flops_field = f"bleu_{language}", f"flops_{language}"
        for systems, marker, color, label in system_groups:
            points: list[tuple[str, Any, Any]] = [
                (
                    system.name.removesuffix(" ensemble"),
                    getattr(system, flops_field),
                    getattr(system, bleu_field),
                )
                for system in systems
                if getattr(system, bleu_field) and getattr(system, flops_field)
            ]
            _, flops, bleu = zip(*points, strict=True)
            axes.scatter(flops, bleu, marker=marker, color=color, label=label, s=60, zorder=3)
            # write the names above and below the points in turn, so that neighbours do not overlap
            horizontal_offset, alignment = (
                (-7, "right") if systems is SINGLE_MODELS else (7, "left")
            )
            for rank, (name, *point) in enumerate(
                sorted(points, key=lambda labeled_point: -labeled_point[2])
            ):
                offset = (horizontal_offset, -4 if rank % 2 else 4)
                axes.annotate(
                    name,
                    point,
                    offset,
                    textcoords="offset points",
                    fontsize=8,
                    ha=alignment,
                    va="top" if rank % 2 else "bottom",
                )
        for system in TRANSFORMERS:
            bleu, estimated_flops = getattr(system, bleu_field), getattr(system, flops_field)
            counted_flops = flops_by_model[system.name]
            # a dotted line connects the count and the estimate of the same training
            axes.plot([counted_flops, estimated_flops], [bleu, bleu], color="C3", lw=1, ls=":")
            legend_label = "Transformer, our count" if system is TRANSFORMERS[0] else None
            axes.scatter(
                counted_flops,
                bleu,
                marker="*",
                facecolor="none",
                edgecolor="C3",
                label=legend_label,
                s=60,
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
        "BLEU, split compounds",
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
    num_comparable = sum(run.is_comparable for run in runs)
    if not runs:
        finding = (
            "No run with scores was found. Only a checkout has the folder results; give another "
            "folder of run folders with --results."
        )
    else:
        finding = (
            f"{len(runs)} scores of runs of this package. {num_comparable or 'None'} of them "
            f"{'is' if num_comparable == 1 else 'are'} on WMT14 and newstest2014. BLEU on another "
            "corpus is not comparable to the paper's, because it depends on the sentences as much "
            "as on the model; nor is BLEU without split compounds. FLOPs are counted as above, for "
            "the steps that each run trained."
        )
    return Section(
        name="runs", title="Runs of this package", finding=finding, columns=columns, rows=rows
    )
