"""Section 5.4: the effect of label smoothing on the target, the loss, and a model's confidence.

Shapes: V tokens in the vocabulary, W words of the toy task, B sentences, T tokens.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..drawing import new_figure
from ..train.config import TrainConfig
from ..train.step import smoothed_loss_sum
from .order_task import FIRST_WORD_TOKEN, ToyTraining, predict, small_model, train_small_model
from .study import Section
from .table3.rows import PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHINGS = (0.0, 0.1, 0.2)
BASE_VOCAB_SIZE = TrainConfig.vocab_size
VOCAB_SIZES = (10, BASE_VOCAB_SIZE)
NUM_SENTENCES = 512
NUM_POINTS = 200
# steps of the bisection in `find_lowest_loss_probability`
NUM_HALVINGS = 40
# name of the row of Table 3 for each epsilon
TABLE_3_ROW_BY_EPSILON = {0.0: "D3", 0.1: "base", 0.2: "D4"}
# a model has learned the task if its accuracy is at most this far below the best possible accuracy
LEARNED_MARGIN = 0.01
# lowest and highest probability of the true token in the plot of the loss; a large epsilon lowers
# the first
LOWEST_PROBABILITY, HIGHEST_PROBABILITY = 0.3, 1 - 1e-6
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
    other_probability = label_smoothing / vocab_size
    true_probability = 1 - label_smoothing + other_probability
    return -(
        true_probability * math.log(true_probability)
        + (vocab_size - 1) * other_probability * math.log(other_probability)
    )


def loss_at(probability: Tensor, vocab_size: int, label_smoothing: float) -> Tensor:
    """Return the package's loss at probabilities of the true token; the others share the rest.

    Args:
        probability: Probabilities of the true token, above 0 and below 1, [points].
        vocab_size: Vocabulary size V.
        label_smoothing: Smoothing epsilon_ls.

    Returns:
        Losses in nats, [points].
    """
    other_log_probs = ((1 - probability) / (vocab_size - 1)).log()  # [points]
    losses = []
    for true_log_prob, other_log_prob in zip(probability.log(), other_log_probs, strict=True):
        logits = other_log_prob.repeat(vocab_size)
        logits[0] = true_log_prob
        label = torch.zeros(1, 1, dtype=torch.long)
        losses.append(smoothed_loss_sum(logits[None, None], label, label_smoothing))
    return torch.stack(losses)


def find_lowest_loss_probability(vocab_size: int, label_smoothing: float) -> float:
    """Find the probability at which the package's loss is lowest, by bisection of its gradient.

    The loss is a float32 sum over the vocabulary. Near its minimum, rounding errors are larger than
    the changes of the loss, so its values do not show where the minimum is.

    Args:
        vocab_size: Vocabulary size V.
        label_smoothing: Smoothing epsilon_ls.

    Returns:
        Probability of the true token; `HIGHEST_PROBABILITY` if the loss still falls there.
    """
    low, high = 0.0, HIGHEST_PROBABILITY
    for _ in range(NUM_HALVINGS):
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
    self_probabilities = torch.linspace(0.4, 1.0, num_words)
    translation_probabilities = torch.diag(self_probabilities)
    for word_offset in (1, 2, 3):
        other_probabilities = torch.diag((1 - self_probabilities) / 3)
        translation_probabilities += other_probabilities.roll(word_offset, dims=1)
    return translation_probabilities


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
    translation_probabilities: Tensor,
    training: ToyTraining = AMBIGUOUS_WORDS_TRAINING,
    seed: int = 0,
) -> Confidence:
    """Train a small model on words with several translations; each batch has new sentences.

    The true probabilities of the translations are known, so accuracy and perplexity are computed as
    expectations, not from sampled translations.

    Args:
        label_smoothing: Smoothing epsilon_ls.
        translation_probabilities: Probabilities from `ambiguous_words`, [W, W].
        training: Sizes and training settings of the model.
        seed: Seed of weights and sentences.

    Returns:
        Confidence, accuracy and perplexity of the model.
    """
    num_words, length = len(translation_probabilities), 4
    generator = torch.Generator().manual_seed(seed)

    def make_sentences(num_sentences: int) -> tuple[Tensor, Tensor]:
        source = torch.randint(num_words, (num_sentences, length), generator=generator)
        translations = torch.multinomial(
            translation_probabilities[source.flatten()], 1, generator=generator
        )
        return source + FIRST_WORD_TOKEN, translations.view_as(source) + FIRST_WORD_TOKEN

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield make_sentences(training.sentences_per_step)

    model = small_model("sinusoidal", FIRST_WORD_TOKEN + num_words, length, training, seed)
    training = dataclasses.replace(training, label_smoothing=label_smoothing)
    train_small_model(model, batches(), training)
    source, target = make_sentences(NUM_SENTENCES)
    with torch.no_grad():
        logits, _ = predict(model, source, target)
    log_probs = logits.double().log_softmax(dim=-1).flatten(0, 1).cpu()  # [B T, V]
    words = source.flatten() - FIRST_WORD_TOKEN  # [B T]
    # the special tokens before the first word are never a translation
    true_probabilities = torch.nn.functional.pad(
        translation_probabilities[words].double(), (FIRST_WORD_TOKEN, 0)
    )  # [B T, V]
    highest_log_probs, first_choices = log_probs.max(dim=-1)
    choice_accuracies = true_probabilities.gather(1, first_choices[:, None])[:, 0]
    return Confidence(
        confidence=_mean_by_word(highest_log_probs.exp(), words, num_words),
        accuracy=_mean_by_word(choice_accuracies, words, num_words),
        perplexity=math.exp(-float((true_probabilities * log_probs).sum(dim=-1).mean())),
    )


def _mean_by_word(values: Tensor, words: Tensor, num_words: int) -> Tensor:
    return torch.stack([values[words == word].mean() for word in range(num_words)])


def best_perplexity(label_smoothing: float, translation_probabilities: Tensor) -> float:
    """Return the perplexity of a model that fits the smoothed targets exactly.

    Args:
        label_smoothing: Smoothing epsilon_ls.
        translation_probabilities: Probabilities from `ambiguous_words`, [W, W].

    Returns:
        Perplexity against the true translations.
    """
    targets = translation_probabilities.double()
    vocab_size = FIRST_WORD_TOKEN + len(targets)
    smoothed_targets = (1 - label_smoothing) * targets + label_smoothing / vocab_size
    cross_entropies = -torch.special.xlogy(targets, smoothed_targets).sum(dim=-1)
    return math.exp(float(cross_entropies.mean()))


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
        help=f"values of epsilon (default: {' '.join(map(str, SMOOTHINGS))})",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=AMBIGUOUS_WORDS_TRAINING.steps,
        help="training steps of each small model (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="random seed of weights and words (default: %(default)s)",
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
    for epsilon in smoothings:
        if not 0 <= epsilon < 1:
            raise ValueError(f"label_smoothing must be from 0 to below 1, got {epsilon}.")
    if flags.steps < 1:
        raise ValueError(f"steps must be at least 1, got {flags.steps}.")
    yield _target_section(smoothings)
    yield _loss_section(smoothings)
    translation_probabilities = ambiguous_words()
    training = dataclasses.replace(AMBIGUOUS_WORDS_TRAINING, steps=flags.steps)
    confidence_by_epsilon = {
        epsilon: confidence_after(epsilon, translation_probabilities, training, flags.seed)
        for epsilon in smoothings
    }
    yield confidence_section(confidence_by_epsilon, translation_probabilities)


class TargetRow(NamedTuple):
    """A row of the table of smoothed targets: the last number is exp(lowest loss)."""

    vocab_size: int
    epsilon: float
    true_probability: float
    other_probability: float
    true_probability_of_authors: float
    lowest_loss: float
    perplexity: float


def _target_section(smoothings: Sequence[float]) -> Section:
    rows = []
    for vocab_size in VOCAB_SIZES:
        for epsilon in smoothings:
            target = smoothed_target(0, vocab_size, epsilon)
            lowest_loss = least_loss(vocab_size, epsilon)
            # the target is a small difference of float32 numbers: only three digits are exact
            true_probability, other_probability = float(target[0]), float(f"{float(target[1]):.3g}")
            rows.append(
                TargetRow(
                    vocab_size=vocab_size,
                    epsilon=epsilon,
                    true_probability=true_probability,
                    other_probability=other_probability,
                    true_probability_of_authors=1 - epsilon,
                    lowest_loss=lowest_loss,
                    perplexity=math.exp(lowest_loss),
                )
            )
    vocab_size, label = VOCAB_SIZES[0], 3
    figure, all_axes = new_figure(10.0, 3.4, 1, len(smoothings))
    for panel_index, epsilon in enumerate(smoothings):
        axes = all_axes[0, panel_index] if len(smoothings) > 1 else all_axes
        target = smoothed_target(label, vocab_size, epsilon)
        bars = axes.bar(range(vocab_size), target.numpy(), color="#31688e")
        bars[label].set_color("#fd8d3c")
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
        axes.set_ylim(0.0, 1.1)
        axes.set_title(f"epsilon {epsilon:g}: entropy {least_loss(vocab_size, epsilon):.2f} nats")
        axes.set_xticks(range(vocab_size))
        axes.set_xlabel(f"token of a vocabulary of {vocab_size}")
        axes.set_ylabel("probability in the target")
    last_row = rows[-1]
    return Section(
        name="target",
        title="The smoothed target",
        finding="The true token keeps a probability of 1 - epsilon. The rest is spread over the "
        "whole vocabulary, including the true token, as in torch's loss. The authors' code spreads "
        f"it over the other tokens only; with {last_row.vocab_size:,} tokens the difference is "
        f"negligible (the true token gets {last_row.true_probability:.6f} instead of "
        f"{last_row.true_probability_of_authors:.6f} at epsilon {last_row.epsilon:g}). A smoothed "
        f"target has an entropy, {last_row.lowest_loss:.2f} nats in this case, and no loss can be "
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


class LossRow(NamedTuple):
    """A row of the table of losses: the lowest loss, as measured and by its formula."""

    epsilon: float
    lowest_loss_probability: float
    formula_probability: float
    lowest_loss: float
    target_entropy: float
    loss_at_highest_probability: float


def _loss_section(smoothings: Sequence[float]) -> Section:
    formula_probabilities = [1 - epsilon + epsilon / BASE_VOCAB_SIZE for epsilon in smoothings]
    first_probability = min(LOWEST_PROBABILITY, min(formula_probabilities) / 2)
    plot_range = torch.tensor([first_probability, HIGHEST_PROBABILITY], dtype=torch.double)
    first_logit, last_logit = plot_range.logit().tolist()
    logits = torch.linspace(first_logit, last_logit, NUM_POINTS, dtype=torch.double)
    probability = logits.sigmoid()  # [points]
    figure, axes = new_figure(7.5, 4.4)
    rows = []
    for epsilon, formula_probability in zip(smoothings, formula_probabilities, strict=True):
        losses = loss_at(probability, BASE_VOCAB_SIZE, epsilon)
        lowest_loss_probability = find_lowest_loss_probability(BASE_VOCAB_SIZE, epsilon)
        lowest_point = torch.tensor([lowest_loss_probability], dtype=torch.double)
        lowest_loss = float(loss_at(lowest_point, BASE_VOCAB_SIZE, epsilon))
        target_entropy = least_loss(BASE_VOCAB_SIZE, epsilon)
        (line,) = axes.plot(probability, losses, label=f"epsilon {epsilon:g}")
        axes.axhline(target_entropy, color=line.get_color(), ls=":", linewidth=1)
        # without smoothing the loss falls up to probability 1, so there is no minimum to mark
        if lowest_loss_probability < HIGHEST_PROBABILITY:
            axes.plot(lowest_loss_probability, lowest_loss, "o", color=line.get_color())
        rows.append(
            LossRow(
                epsilon=epsilon,
                lowest_loss_probability=lowest_loss_probability,
                formula_probability=formula_probability,
                lowest_loss=lowest_loss,
                target_entropy=target_entropy,
                loss_at_highest_probability=float(losses[-1]),
            )
        )
    axes.set_xscale("logit")
    axes.set_xlabel("probability that the model gives the true token")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend(title="dot: lowest loss\ndotted: entropy of the target")
    last_row = rows[-1]
    finding = (
        "The package's loss against the probability of the true token; the other "
        f"{BASE_VOCAB_SIZE - 1:,} tokens share the rest equally. Without smoothing the loss falls "
        "as long as this probability rises."
    )
    if last_row.epsilon:
        finding += (
            f" With epsilon {last_row.epsilon:g} it is lowest at "
            f"{last_row.lowest_loss_probability:.3f}, where it equals the entropy of the target "
            f"({last_row.lowest_loss:.3f}, by the formula {last_row.target_entropy:.3f}), and "
            f"rises to {last_row.loss_at_highest_probability:.3f} at a probability of "
            f"{HIGHEST_PROBABILITY:.6f}. So the logits need not grow without bound."
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
            f"loss at {HIGHEST_PROBABILITY:.6f}",
        ),
        rows=rows,
        figure=figure,
        message="With label smoothing, a probability near 1 raises the loss "
        f"(vocabulary of {BASE_VOCAB_SIZE:,} tokens)",
    )


class ConfidenceRow(NamedTuple):
    """A row of the table of confidence: means over the words, and the row of Table 3, if any."""

    epsilon: float
    confidence: float
    accuracy: float
    calibration_error: float
    perplexity: float
    target_perplexity: float
    paper_row: str | None
    paper_perplexity: float | None
    paper_bleu: float | None


def confidence_section(
    confidence_by_epsilon: Mapping[float, Confidence], translation_probabilities: Tensor
) -> Section:
    """Compare confidence, accuracy and perplexity of models trained with different epsilon.

    Args:
        confidence_by_epsilon: Results by epsilon, in ascending order.
        translation_probabilities: Probabilities from `ambiguous_words`, [W, W].

    Returns:
        Section with a line for each epsilon.
    """
    rows = []
    for epsilon, model_confidence in confidence_by_epsilon.items():
        table_3_row = TABLE_3_ROW_BY_EPSILON.get(epsilon)
        paper_result = None if table_3_row is None else PAPER[table_3_row]
        rows.append(
            ConfidenceRow(
                epsilon=epsilon,
                confidence=float(model_confidence.confidence.mean()),
                accuracy=float(model_confidence.accuracy.mean()),
                calibration_error=model_confidence.calibration_error(),
                perplexity=model_confidence.perplexity,
                target_perplexity=best_perplexity(epsilon, translation_probabilities),
                paper_row=table_3_row,
                paper_perplexity=None if paper_result is None else paper_result.perplexity,
                paper_bleu=None if paper_result is None else paper_result.bleu,
            )
        )
    return Section(
        name="confidence",
        title="The confidence of a model",
        finding=_confidence_findings(rows, confidence_by_epsilon, translation_probabilities),
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
        figure=draw_calibration(confidence_by_epsilon),
        message="Label smoothing makes a model less confident; a dot is one of the "
        f"{len(translation_probabilities)} words of a toy language",
    )


def _confidence_findings(
    rows: Sequence[ConfidenceRow],
    confidence_by_epsilon: Mapping[float, Confidence],
    translation_probabilities: Tensor,
) -> str:
    first_row, last_row = rows[0], rows[-1]
    best_accuracy = float(translation_probabilities.diag().mean())
    finding = (
        "The same small model, trained with different epsilon on words with up to four "
        "translations. The most frequent translation of a word is correct in "
        f"{float(translation_probabilities.diag().min()):.0%} to "
        f"{float(translation_probabilities.diag().max()):.0%} of the cases, {best_accuracy:.1%} on "
        "average."
    )
    if len(rows) > 1:
        finding += (
            f" With epsilon {first_row.epsilon:g} and {last_row.epsilon:g} the model's first "
            f"choice is correct in {first_row.accuracy:.1%} and {last_row.accuracy:.1%} of the "
            f"cases, its confidence is {first_row.confidence:.1%} and {last_row.confidence:.1%}, "
            f"and its perplexity is {first_row.perplexity:.3f} and {last_row.perplexity:.3f}. A "
            "model that fits the smoothed targets exactly has a perplexity of "
            f"{first_row.target_perplexity:.3f} and {last_row.target_perplexity:.3f}."
        )
    if min(row.accuracy for row in rows) < best_accuracy - LEARNED_MARGIN:
        finding += (
            " The training is too short: the model does not yet choose the most frequent "
            "translation of each word."
        )
    if confidence_by_epsilon.keys() >= TABLE_3_ROW_BY_EPSILON.keys():
        finding += (
            " The paper's perplexity rises from D3 through base to D4, and its BLEU is highest for "
            "base. This toy task is not real text: every training sentence is new."
        )
    if 0.0 in confidence_by_epsilon:
        finding += (
            " Without smoothing the mean absolute difference between confidence and accuracy is "
            f"{confidence_by_epsilon[0.0].calibration_error():.3f}."
        )
    return finding


def draw_calibration(confidence_by_epsilon: Mapping[float, Confidence]) -> "Figure":
    """Draw confidence against accuracy, one dot per word.

    Args:
        confidence_by_epsilon: Results by epsilon.

    Returns:
        Figure with one color per epsilon.
    """
    figure, axes = new_figure(5.6, 5.0)
    axes.plot([0.35, 1.0], [0.35, 1.0], color="0.5", linestyle="--", label="perfect calibration")
    for epsilon, model_confidence in confidence_by_epsilon.items():
        axes.plot(
            model_confidence.confidence,
            model_confidence.accuracy,
            "o",
            label=f"epsilon {epsilon:g}",
            alpha=0.8,
        )
    axes.set_xlabel("confidence: highest probability of the model")
    axes.set_ylabel("accuracy of that choice")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
