"""Section 3.4: what an embedding is, why it is scaled, and one matrix for three uses.

Shapes: T tokens, V tokens in the vocabulary, d_model width of the residual stream.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..drawing import new_figure
from ..train.config import TrainConfig
from ..train.step import smoothed_loss_sum
from .positional_encoding import model_encoding
from .study import Section
from .trained import add_model_flag, load_trained

VOCAB_SIZE = TrainConfig.vocab_size
NUM_TOKENS = 64
NUM_POSITIONS = 64
ROWS = ("C4", "base", "big")
# the size of a random embedding does not depend on how many there are
FEW_TOKENS = 2_000
MATRICES = ("the one matrix, or the source's", "the target's", "the output's")
USES = {
    "source": ("encoder's input", "model.encoder.embed_tokens.weight"),
    "target": ("decoder's input", "model.decoder.embed_tokens.weight"),
    "output": ("projection before the softmax", "lm_head.weight"),
}


@dataclass(frozen=True, kw_only=True)
class EmbeddingSize:
    """Root mean squares of a component of the embeddings and of the positional encoding.

    Attributes:
        d_model: Width.
        plain: As the matrix has them.
        scaled: Times sqrt(d_model), as the layers get them.
        positions: Root mean square of the positional encoding that is added.
    """

    d_model: int
    plain: float
    scaled: float
    positions: float


def one_hot_product(ids: Tensor, table: Tensor) -> Tensor:
    """Embed tokens as a one-hot row times the matrix.

    Args:
        ids: Token ids, [T].
        table: A row for each token of the vocabulary, [V, d_model].

    Returns:
        The embeddings, [T, d_model].
    """
    return F.one_hot(ids, len(table)).to(table.dtype) @ table


def embedding_size(model: PreTrainedModel, num_positions: int = NUM_POSITIONS) -> EmbeddingSize:
    """Measure the embeddings of a model beside what its encoder adds to them.

    Args:
        model: Any of ours.
        num_positions: How many positions to measure; fewer where a learned table has fewer.

    Returns:
        Their sizes.

    Raises:
        ValueError: If the model has no positions.
    """
    table = model.get_input_embeddings().weight.detach().float()  # [V, d_model]
    d_model = model.config.d_model
    plain = _root_mean_square(table)
    return EmbeddingSize(
        d_model=d_model,
        plain=plain,
        scaled=plain * math.sqrt(d_model),
        positions=_root_mean_square(model_encoding(model, num_positions)),
    )


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def gradients_by_use(
    model: PreTrainedModel, source: Tensor, inputs: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    """The gradient that each use of the matrix would get, if each had a copy of its own.

    Args:
        model: One whose three matrices are tied; is left as it was.
        source: Source tokens, [B, S].
        inputs: Target tokens, shifted right, [B, T].
        labels: Target tokens, [B, T].

    Returns:
        By the names of `USES`, and "tied" for what the one matrix gets, each [V, d_model].
    """
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    untied = VanillaTransformerForConditionalGeneration(config).eval()
    untied.load_state_dict(model.state_dict())
    tied = copy.deepcopy(model).eval()
    for each in (tied, untied):
        logits = each(input_ids=source, decoder_input_ids=inputs).logits
        smoothed_loss_sum(logits, labels, 0.0).backward()
    parameters = dict(untied.named_parameters())
    found = {use: parameters[name].grad for use, (_, name) in USES.items()}
    return {**found, "tied": tied.get_input_embeddings().weight.grad}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    add_model_flag(parser, default=None)
    parser.add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """The one-hot product, the factor, and the tie.

    Args:
        flags: As `add_flags` declares them.

    Yields:
        Three sections.

    Raises:
        ValueError: If there is no such model, or it has no positions.
    """
    torch.manual_seed(flags.seed)
    own = {}
    if flags.model is not None:
        trained, _ = load_trained(flags.model, flags.trust_remote_code)
        # a fresh one of the same sizes, to see what training has made of it
        fresh = VanillaTransformerForConditionalGeneration(trained.config)
        own = {
            "this model, at the start": embedding_size(fresh),
            "this model, trained": embedding_size(trained),
        }
    yield _one_hot_section()
    yield _factor_section(own, flags.model)
    yield _tie_section()


def _one_hot_section() -> Section:
    d_model = VanillaTransformerConfig.from_paper("base").d_model
    table = torch.randn(VOCAB_SIZE, d_model) * d_model**-0.5
    ids = torch.randint(VOCAB_SIZE, (NUM_TOKENS,))
    product, product_seconds = _timed(lambda: one_hot_product(ids, table))
    looked_up, look_up_seconds = _timed(lambda: F.embedding(ids, table))
    flops = 2 * NUM_TOKENS * VOCAB_SIZE * d_model
    bytes_of_rows = NUM_TOKENS * VOCAB_SIZE * table.element_size()
    bytes_of_ids = NUM_TOKENS * ids.element_size()
    difference = float((product - looked_up).abs().max())
    return Section(
        name="one_hot",
        title="A one-hot row times the matrix is the look-up",
        says="An embedding is a linear layer whose input is all zeros but for a 1, which picks a "
        f"row of the matrix. For {NUM_TOKENS} tokens, base's matrix of {VOCAB_SIZE:,} x {d_model} "
        f"gives the same either way, to the last bit (largest difference {difference:g}). But the "
        f"product multiplies {flops / 1e9:.1f} GFLOP, nearly all of it with 0, and took "
        f"{1e3 * product_seconds:.1f} ms; the look-up copies {NUM_TOKENS} rows, in "
        f"{1e3 * look_up_seconds:.3f} ms.",
        columns=("way", "FLOPs", "bytes of input", "milliseconds", "largest difference"),
        rows=[
            ["one-hot times matrix", flops, bytes_of_rows, 1e3 * product_seconds, None],
            ["look-up", 0, bytes_of_ids, 1e3 * look_up_seconds, difference],
        ],
        figure=_draw_one_hot(),
        numbers={"equal": torch.equal(product, looked_up)},
    )


def _timed(work: Callable[[], Tensor], repeats: int = 3) -> tuple[Tensor, float]:
    result, fastest = work(), math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        result = work()
        fastest = min(fastest, time.perf_counter() - started)
    return result, fastest


def _draw_one_hot():
    ids, table = torch.tensor([7, 2, 2, 9]), torch.randn(11, 6)
    parts = (
        (F.one_hot(ids, len(table)).float(), "a one-hot row a position", "token"),
        (table, "the matrix, a row a token", "component"),
        (one_hot_product(ids, table), "an embedding a position", "component"),
    )
    figure, all_axes = new_figure(10.0, 4.4, 1, 3)
    for axes, (values, title, xlabel) in zip(all_axes[0], parts, strict=True):
        image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-2.5, vmax=2.5)
        axes.set_title(title)
        axes.set_xlabel(xlabel)
        axes.set_xticks(range(values.shape[1]))
        axes.set_yticks(range(values.shape[0]))
    tokens = [f"{position}: token {token}" for position, token in enumerate(ids.tolist())]
    all_axes[0, 0].set_yticks(range(len(ids)), tokens)
    for axes, sign in ((all_axes[0, 1], "×"), (all_axes[0, 2], "=")):  # noqa: RUF001
        axes.text(-0.32, 0.5, sign, transform=axes.transAxes, fontsize=18, va="center")
    for row in sorted(set(ids.tolist())):
        box = {"fill": False, "edgecolor": "black", "linewidth": 2}
        all_axes[0, 1].add_patch(_rectangle(-0.5, row - 0.5, table.shape[1], **box))
    figure.colorbar(image, ax=all_axes, label="value", shrink=0.7)
    return figure


def _rectangle(left: float, top: float, width: float, **style):
    from matplotlib.patches import Rectangle

    return Rectangle((left, top), width, 1, **style)


def _factor_section(own: Mapping[str, EmbeddingSize], run: str | None) -> Section:
    found = {}
    for row in ROWS:
        config = VanillaTransformerConfig.from_paper(
            row, vocab_size=FEW_TOKENS, encoder_layers=1, decoder_layers=1
        )
        model = VanillaTransformerForConditionalGeneration(config)
        found[f"{row}, at the start"] = embedding_size(model)
    found |= own
    figure, axes = new_figure(8.0, 0.9 + 0.75 * len(found))
    places = range(len(found))
    for shift, field, label in (
        (-0.18, "plain", "as the matrix has them"),
        (0.18, "scaled", "times sqrt(d_model)"),
    ):
        values = [getattr(size, field) for size in found.values()]
        bars = axes.barh([place + shift for place in places], values, height=0.34, label=label)
        axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
    for place, size in enumerate(found.values()):
        label = None if place else "the model's positions"
        axes.plot([size.positions] * 2, [place - 0.4, place + 0.4], "k--", label=label)
    axes.set_yticks(
        places, [f"{name}\nd_model {size.d_model}" for name, size in found.items()], fontsize=9
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("root mean square of a component")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    base = found["base, at the start"]
    says = (
        "The matrix is drawn with a standard deviation of 1 / sqrt(d_model), which suits it as the "
        f"output projection: base's components are {base.plain:.3f} large. A sinusoid's are "
        f"{base.positions:.3f} = 1 / sqrt(2), since of every pair sin^2 + cos^2 = 1. Added as they "
        f"are, positions would be {base.positions / base.plain:.0f} times as large as the words in "
        f"base; times sqrt(d_model) the words are {base.scaled:.2f}, of a size with them whatever "
        "the width."
    )
    if own:
        size = found["this model, trained"]
        says += (
            f" In {run}, training has taken them from "
            f"{found['this model, at the start'].scaled:.2f} to {size.scaled:.2f}; without the "
            f"factor its positions would be {size.positions / size.plain:.3g} times as large."
        )
    return Section(
        name="factor",
        title="The factor sqrt(d_model), against the size of the positions",
        says=says,
        columns=(
            "model",
            "d_model",
            "embeddings",
            "times sqrt(d_model)",
            "positions",
            "positions / plain",
            "positions / scaled",
        ),
        rows=[
            [
                name,
                size.d_model,
                size.plain,
                size.scaled,
                size.positions,
                size.positions / size.plain,
                size.positions / size.scaled,
            ]
            for name, size in found.items()
        ],
        figure=figure,
    )


def _tie_section() -> Section:
    counts = {row: _count_parameters(row) for row in ROWS}
    config = VanillaTransformerConfig.from_paper(
        "base", vocab_size=100, d_model=64, encoder_layers=1, decoder_layers=1
    )
    model = VanillaTransformerForConditionalGeneration(config)
    addresses = {model.get_parameter(name).data_ptr() for _, name in USES.values()}
    source, target = torch.randint(100, (2, 8, 10)).unbind()
    start = torch.zeros_like(target[:, :1])
    inputs = torch.cat((start, target[:, :-1]), dim=1)
    gradients = gradients_by_use(model, source, inputs, target)
    tied = gradients.pop("tied")
    difference = float((sum(gradients.values()) - tied).abs().max() / tied.abs().max())
    figure, axes = new_figure(8.0, 3.6)
    colors = ["#31688e", "#35b779", "#90d743", "#fde725"]
    labels = []
    for place, (row, is_tied, (rest, matrix)) in enumerate(
        (row, is_tied, count) for row, both in counts.items() for is_tied, count in both.items()
    ):
        left = 0.0
        for number, (label, size) in enumerate(
            [("layers", rest), *((label, matrix) for label in MATRICES)]
        ):
            if number > 1 and is_tied:
                break
            label = label if place == 1 else None
            axes.barh(place, size / 1e6, left=left, color=colors[number], label=label)
            left += size / 1e6
        axes.text(left, place, f" {left:.1f}", va="center", fontsize=8)
        labels.append(f"{row}, {'one matrix' if is_tied else 'three'}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("parameters (millions)")
    figure.legend(loc="outside upper center", ncols=4, fontsize=8)
    (rest, matrix) = counts["base"][True]
    norms = {use: float(gradient.norm()) for use, gradient in gradients.items()}
    return Section(
        name="tie",
        title="One matrix, three uses",
        says=f"The encoder's input, the decoder's input and the output projection lie at "
        f"{len(addresses)} address{'es' if len(addresses) > 1 else ''} in memory: one "
        f"matrix, which a shared vocabulary makes possible. With {VOCAB_SIZE:,} tokens that saves "
        f"base {2 * matrix / 1e6:.2f}M of {(rest + 3 * matrix) / 1e6:.2f}M parameters. Its "
        f"gradient is the sum of what three copies would get (largest difference {difference:.0e} "
        "of the largest entry); a token that is only ever read still learns from the output, where "
        "every token is pushed at every step.",
        columns=("use", "in figure 1", "parameter", "norm of its share of the gradient"),
        rows=[[use, where, name, norms[use]] for use, (where, name) in USES.items()],
        figure=figure,
        numbers={
            "parameters": {
                row: {
                    "tied": rest + matrix,
                    "untied": both[False][0] + 3 * both[False][1],
                }
                for row, both in counts.items()
                for rest, matrix in [both[True]]
            },
            "gradient_difference": difference,
        },
    )


def _count_parameters(row: str) -> dict[bool, tuple[int, int]]:
    """Parameters of the layers and of one matrix, with the matrices tied and not."""
    found = {}
    for is_tied in (True, False):
        config = VanillaTransformerConfig.from_paper(
            row, vocab_size=VOCAB_SIZE, tie_word_embeddings=is_tied
        )
        # sizes alone need no memory
        with torch.device("meta"):
            model = VanillaTransformerForConditionalGeneration(config)
        matrix = VOCAB_SIZE * config.d_model
        found[is_tied] = (model.num_parameters() - (1 if is_tied else 3) * matrix, matrix)
    return found
