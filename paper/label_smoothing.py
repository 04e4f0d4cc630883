"""Section 5.4: the effect of label smoothing on the target, the loss, and a model's confidence.

Shapes: V tokens in the vocabulary, W words of the toy task, B sentences, T tokens.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..drawing import new_figure
from ..train.config import TrainConfig
from ..train.step import smoothed_loss_sum
from .order_task import FIRST_WORD, ToyTraining, predict, small_model, train_small_model
from .study import Section
from .table3.rows import PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHINGS = (0.0, 0.1, 0.2)
BASE_VOCAB = TrainConfig.vocab_size
VOCAB_SIZES = (10, BASE_VOCAB)
NUM_SENTENCES = 512
NUM_POINTS = 200
# steps of the bisection in `lowest_at`
HALVINGS = 40
# name of the row of Table 3 for each epsilon
ROWS = {0.0: "D3", 0.1: "base", 0.2: "D4"}
# a model has learned the task if its accuracy is at most this far below the best possible accuracy
LEARNED = 0.01
# lowest and highest probability of the true token in the plot of the loss; a large epsilon lowers
# the first
UNSURE, SURE = 0.3, 1 - 1e-6
AMBIGUOUS_WORDS_TRAINING = ToyTraining(
    steps=400, sentences_per_step=256, warmup_steps=100, learning_rate_factor=0.25
)


def smoothed_target(label: int, vocab_size: int, label_smoothing: float) -> Tensor:
    """Return the target distribution of the package's loss, computed from its gradient.

    The gradient of a cross entropy with respect to the logits is the softmax minus the target.

    Args:
        label: Id of the true token.
        vocab_size: Vocabulary size V.
        label_smoothing: Smoothing epsilon_ls.

    Returns:
        Target probabilities, [V].
    """
    logits = torch.zeros(1, 1, vocab_size, requires_grad=True)
    smoothed_loss_sum(logits, torch.tensor([[label]]), label_smoothing).backward()
    gradient: Any = logits.grad
    target = (logits.softmax(dim=-1) - gradient).detach()[0, 0]  # [V]
    # a target below 1e-6 / V is a rounding error of the difference of two numbers near 1 / V
    return target.masked_fill(target.abs() < 1e-6 / vocab_size, 0.0)


def least_loss(vocab_size: int, label_smoothing: float) -> float:
    """Return the entropy of a smoothed target, the lowest possible loss.

    Args:
        vocab_size: Vocabulary size V.
        label_smoothing: Smoothing epsilon_ls.

    Returns:
        Entropy in nats; 0 without smoothing.
    """
    if label_smoothing == 0:
        return 0.0
    other = label_smoothing / vocab_size
    true = 1 - label_smoothing + other
    return -(true * math.log(true) + (vocab_size - 1) * other * math.log(other))


def loss_at(probability: Tensor, vocab_size: int, label_smoothing: float) -> Tensor:
    """Return the package's loss at probabilities of the true token; the others share the rest.

    Args:
        probability: Probabilities of the true token, above 0 and below 1, [points].
        vocab_size: Vocabulary size V.
        label_smoothing: Smoothing epsilon_ls.

    Returns:
        Losses in nats, [points].
    """
    rest = ((1 - probability) / (vocab_size - 1)).log()  # [points]
    losses = []
    for true, others in zip(probability.log(), rest, strict=True):
        logits = others.repeat(vocab_size)
        logits[0] = true
        label = torch.zeros(1, 1, dtype=torch.long)
        losses.append(smoothed_loss_sum(logits[None, None], label, label_smoothing))
    return torch.stack(losses)


def lowest_at(vocab_size: int, label_smoothing: float) -> float:
    """Find the probability at which the package's loss is lowest, by bisection of its gradient.

    The loss is a float32 sum over the vocabulary. Near its minimum, rounding errors are larger than
    the changes of the loss, so its values do not show where the minimum is.

    Args:
        vocab_size: Vocabulary size V.
        label_smoothing: Smoothing epsilon_ls.

    Returns:
        Probability of the true token; `SURE` if the loss still falls at this probability.
    """
    low, high = 0.0, SURE
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        probability = torch.tensor([middle], dtype=torch.double, requires_grad=True)
        loss_at(probability, vocab_size, label_smoothing).sum().backward()
        gradient: Any = probability.grad
        low, high = (middle, high) if gradient < 0 else (low, middle)
    return high


def ambiguous_words(num_words: int = 16) -> Tensor:
    """Return the probability of each translation of each word of a toy language.

    A word is translated as itself with a probability that rises linearly, from 0.4 for word 0 to 1
    for the last word. The next three words share the remaining probability equally; word 0 follows
    the last word.

    Args:
        num_words: Number of words W.

    Returns:
        Probabilities, one row per source word, [W, W].
    """
    own = torch.linspace(0.4, 1.0, num_words)
    table = torch.diag(own)
    for step in (1, 2, 3):
        table += torch.diag((1 - own) / 3).roll(step, dims=1)
    return table


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """Confidence and accuracy of a trained model's first choice.

    Attributes:
        confidence: Mean probability of the first choice, by word, [W].
        accuracy: Probability that the first choice is correct, by word, [W].
        perplexity: Perplexity against the true translations.
    """

    confidence: Tensor
    accuracy: Tensor
    perplexity: float

    def calibration_error(self) -> float:
        """Return the mean absolute difference between confidence and accuracy of a word."""
        return float((self.confidence - self.accuracy).abs().mean())


def confidence_after(
    label_smoothing: float,
    table: Tensor,
    training: ToyTraining = AMBIGUOUS_WORDS_TRAINING,
    seed: int = 0,
) -> Confidence:
    """Train a small model on words with several translations; each batch has new sentences.

    The true probabilities of the translations are known, so accuracy and perplexity are computed as
    expectations, not from sampled translations.

    Args:
        label_smoothing: Smoothing epsilon_ls.
        table: Probabilities from `ambiguous_words`, [W, W].
        training: Sizes and training settings of the model.
        seed: Seed of weights and sentences.

    Returns:
        Confidence, accuracy and perplexity of the model.
    """
    num_words, length = len(table), 4
    random = torch.Generator().manual_seed(seed)

    def sentences(count: int) -> tuple[Tensor, Tensor]:
        source = torch.randint(num_words, (count, length), generator=random)
        chosen = torch.multinomial(table[source.flatten()], 1, generator=random)
        return source + FIRST_WORD, chosen.view_as(source) + FIRST_WORD

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield sentences(training.sentences_per_step)

    model = small_model("sinusoidal", FIRST_WORD + num_words, length, training, seed)
    training = dataclasses.replace(training, label_smoothing=label_smoothing)
    train_small_model(model, batches(), training)
    source, target = sentences(NUM_SENTENCES)
    with torch.no_grad():
        logits, _ = predict(model, source, target)
    log_probs = logits.double().log_softmax(dim=-1).flatten(0, 1).cpu()  # [B T, V]
    words = source.flatten() - FIRST_WORD  # [B T]
    # the special tokens before the first word are never a translation
    truth = torch.nn.functional.pad(table[words].double(), (FIRST_WORD, 0))  # [B T, V]
    highest, choice = log_probs.max(dim=-1)
    right = truth.gather(1, choice[:, None])[:, 0]
    return Confidence(
        confidence=_by_word(highest.exp(), words, num_words),
        accuracy=_by_word(right, words, num_words),
        perplexity=math.exp(-float((truth * log_probs).sum(dim=-1).mean())),
    )


def _by_word(values: Tensor, words: Tensor, num_words: int) -> Tensor:
    return torch.stack([values[words == word].mean() for word in range(num_words)])


def best_perplexity(label_smoothing: float, table: Tensor) -> float:
    """Return the perplexity of a model that fits the smoothed targets exactly.

    Args:
        label_smoothing: Smoothing epsilon_ls.
        table: Probabilities from `ambiguous_words`, [W, W].

    Returns:
        Perplexity against the true translations.
    """
    table = table.double()
    learned = (1 - label_smoothing) * table + label_smoothing / (FIRST_WORD + len(table))
    return math.exp(-float(torch.special.xlogy(table, learned).sum(dim=-1).mean()))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument(
        "--label_smoothing",
        type=float,
        nargs="+",
        default=list(SMOOTHINGS),
        help="values of epsilon (%(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=AMBIGUOUS_WORDS_TRAINING.steps,
        help="training steps of each small model (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of weights and words (%(default)s)"
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Show the target, the loss, and the confidence of small models.

    Args:
        flags: Flags that `add_flags` declares.

    Yields:
        Three sections.

    Raises:
        ValueError: If epsilon is below 0 or at least 1, or the number of steps is below 1.
    """
    smoothings = sorted(set(flags.label_smoothing))
    for value in smoothings:
        if not 0 <= value < 1:
            raise ValueError(f"label_smoothing must be from 0 to below 1, got {value}.")
    if flags.steps < 1:
        raise ValueError(f"steps must be at least 1, got {flags.steps}.")
    yield _target_section(smoothings)
    yield _loss_section(smoothings)
    table = ambiguous_words()
    training = dataclasses.replace(AMBIGUOUS_WORDS_TRAINING, steps=flags.steps)
    found = {value: confidence_after(value, table, training, flags.seed) for value in smoothings}
    yield confidence_section(found, table)


def _target_section(smoothings: Sequence[float]) -> Section:
    rows = []
    for vocab_size in VOCAB_SIZES:
        for value in smoothings:
            target = smoothed_target(0, vocab_size, value)
            least = least_loss(vocab_size, value)
            # the target is a small difference of float32 numbers: only three digits are exact
            true, other = float(target[0]), float(f"{float(target[1]):.3g}")
            rows.append([vocab_size, value, true, other, 1 - value, least, math.exp(least)])
    vocab_size, label = VOCAB_SIZES[0], 3
    figure, all_axes = new_figure(10.0, 3.4, 1, len(smoothings))
    for number, value in enumerate(smoothings):
        axes = all_axes[0, number] if len(smoothings) > 1 else all_axes
        target = smoothed_target(label, vocab_size, value)
        bars = axes.bar(range(vocab_size), target.numpy(), color="#31688e")
        bars[label].set_color("#fd8d3c")
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
        axes.set_ylim(0.0, 1.1)
        axes.set_title(f"epsilon {value:g}: entropy {least_loss(vocab_size, value):.2f} nats")
        axes.set_xticks(range(vocab_size))
        axes.set_xlabel(f"token of a vocabulary of {vocab_size}")
        axes.set_ylabel("probability in the target")
    last = rows[-1]
    return Section(
        name="target",
        title="The smoothed target",
        finding="The true token keeps a probability of 1 - epsilon. The rest is spread over the "
        "whole vocabulary, including the true token, as in torch's loss. The authors' code spreads "
        f"it over the other tokens only; with {last[0]:,} tokens the difference is negligible (the "
        f"true token gets {last[2]:.6f} instead of {last[4]:.6f} at epsilon {last[1]:g}). A "
        f"smoothed target has an entropy, {last[5]:.2f} nats in this case, and no loss can be "
        "lower. So losses with different epsilon are not comparable. The probabilities are "
        "computed from the gradient of the package's loss.",
        columns=(
            "vocabulary",
            "epsilon",
            "true token",
            "each other token",
            "true token, authors' code",
            "lowest loss (nats)",
            "exp(lowest loss)",
        ),
        rows=rows,
        figure=figure,
        message="Label smoothing gives epsilon of the true token's probability (orange) to all "
        "tokens alike",
    )


def _loss_section(smoothings: Sequence[float]) -> Section:
    bests = [1 - value + value / BASE_VOCAB for value in smoothings]
    least, most = (
        torch.tensor([min(UNSURE, min(bests) / 2), SURE], dtype=torch.double).logit().tolist()
    )
    probability = torch.linspace(least, most, NUM_POINTS, dtype=torch.double).sigmoid()  # [points]
    figure, axes = new_figure(7.5, 4.4)
    rows = []
    for value, best in zip(smoothings, bests, strict=True):
        losses = loss_at(probability, BASE_VOCAB, value)
        lowest = lowest_at(BASE_VOCAB, value)
        lowest_loss = float(loss_at(torch.tensor([lowest], dtype=torch.double), BASE_VOCAB, value))
        (line,) = axes.plot(probability, losses, label=f"epsilon {value:g}")
        axes.axhline(least_loss(BASE_VOCAB, value), color=line.get_color(), ls=":", linewidth=1)
        # without smoothing the loss falls up to probability 1, so there is no minimum to mark
        if lowest < SURE:
            axes.plot(lowest, lowest_loss, "o", color=line.get_color())
        rows.append(
            [
                value,
                lowest,
                best,
                lowest_loss,
                least_loss(BASE_VOCAB, value),
                float(losses[-1]),
            ]
        )
    axes.set_xscale("logit")
    axes.set_xlabel("probability that the model gives the true token")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend(title="dot: lowest loss\ndotted: entropy of the target")
    last = rows[-1]
    finding = (
        "The package's loss against the probability of the true token; the other "
        f"{BASE_VOCAB - 1:,} tokens share the rest equally. Without smoothing the loss falls as "
        "long as this probability rises."
    )
    if last[0]:
        finding += (
            f" With epsilon {last[0]:g} it is lowest at {last[1]:.3f}, where it equals the entropy "
            f"of the target ({last[3]:.3f}, by the formula {last[4]:.3f}), and rises to "
            f"{last[5]:.3f} at a probability of {SURE:.6f}. So the logits need not grow without "
            "bound."
        )
    return Section(
        name="loss",
        title="The loss penalizes overconfidence",
        finding=finding,
        columns=(
            "epsilon",
            "lowest at probability",
            "by the formula",
            "lowest loss (nats)",
            "entropy of the target",
            f"loss at {SURE:.6f}",
        ),
        rows=rows,
        figure=figure,
        message="With label smoothing, a probability near 1 raises the loss "
        f"(vocabulary of {BASE_VOCAB:,} tokens)",
    )


def confidence_section(found: Mapping[float, Confidence], table: Tensor) -> Section:
    """Compare confidence, accuracy and perplexity of models trained with different epsilon.

    Args:
        found: Results by epsilon, in ascending order.
        table: Probabilities from `ambiguous_words`, [W, W].

    Returns:
        Section with a line for each epsilon.
    """
    rows = []
    for value, result in found.items():
        row = ROWS.get(value)
        perplexity, bleu = (None, None) if row is None else PAPER[row][:2]
        rows.append(
            [
                value,
                float(result.confidence.mean()),
                float(result.accuracy.mean()),
                result.calibration_error(),
                result.perplexity,
                best_perplexity(value, table),
                row,
                perplexity,
                bleu,
            ]
        )
    return Section(
        name="confidence",
        title="The confidence of a model",
        finding=_confidence_findings(rows, found, table),
        columns=(
            "epsilon",
            "confidence",
            "accuracy",
            "calibration error",
            "perplexity",
            "of the smoothed targets",
            "paper's row",
            "paper's perplexity",
            "paper's BLEU",
        ),
        rows=rows,
        figure=draw_calibration(found),
        message="Label smoothing makes a model less confident; a dot is one of the "
        f"{len(table)} words of a toy language",
    )


def _confidence_findings(
    rows: Sequence[Sequence[Any]], found: Mapping[float, Confidence], table: Tensor
) -> str:
    first, last = rows[0], rows[-1]
    best_accuracy = float(table.diag().mean())
    finding = (
        "The same small model, trained with different epsilon on words with up to four "
        "translations. The most frequent translation of a word is correct in "
        f"{float(table.diag().min()):.0%} to {float(table.diag().max()):.0%} of the cases, "
        f"{best_accuracy:.1%} on average."
    )
    if len(rows) > 1:
        finding += (
            f" With epsilon {first[0]:g} and {last[0]:g} the model's first choice is correct in "
            f"{first[2]:.1%} and {last[2]:.1%} of the cases, its confidence is {first[1]:.1%} and "
            f"{last[1]:.1%}, and its perplexity is {first[4]:.3f} and {last[4]:.3f}. A model that "
            "fits the smoothed targets exactly has a perplexity of "
            f"{first[5]:.3f} and {last[5]:.3f}."
        )
    if min(row[2] for row in rows) < best_accuracy - LEARNED:
        finding += (
            " The training is too short: the model does not yet choose the most frequent "
            "translation of each word."
        )
    if found.keys() >= ROWS.keys():
        finding += (
            " The paper's perplexity rises from D3 through base to D4, and its BLEU is highest for "
            "base. This toy task is not real text: every training sentence is new."
        )
    if 0.0 in found:
        finding += (
            " Without smoothing the mean absolute difference between confidence and accuracy is "
            f"{found[0.0].calibration_error():.3f}."
        )
    return finding


def draw_calibration(found: Mapping[float, Confidence]) -> "Figure":
    """Draw confidence against accuracy, one dot per word.

    Args:
        found: Results by epsilon.

    Returns:
        Figure with one color per epsilon.
    """
    figure, axes = new_figure(5.6, 5.0)
    axes.plot([0.35, 1.0], [0.35, 1.0], color="0.5", linestyle="--", label="perfect calibration")
    for value, result in found.items():
        axes.plot(result.confidence, result.accuracy, "o", label=f"epsilon {value:g}", alpha=0.8)
    axes.set_xlabel("confidence: highest probability of the model")
    axes.set_ylabel("accuracy of that choice")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
