"""Positions in trained models: candidates for an encoding on two tasks, and a probe of each layer.

A state is the vector of a token after a layer. Shapes: P tokens, Q test tokens, d features.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..console import add_trust_flag
from ..drawing import new_figure, write_message
from . import order_task
from .order_task import COPYING, WHO_CHASES_WHOM
from .positional_encoding import word_embeddings
from .study import Section, join_names
from .trained import DEMO_RUN, load_trained, saved_translations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CANDIDATES = ("integer", "fraction", "sine", "binary", "sinusoidal", "none")
NUM_SYMBOLS, COPIED_LENGTH = 16, 12
# number of first positions that are probed; few sentences are long enough for later positions
NUM_POSITIONS = 12
WORDS_ALONE = "words alone"
# L2 penalty of the probe, a softmax regression, and its maximum number of L-BFGS iterations
PROBE_DECAY, PROBE_ITERATIONS = 1e-4, 100


class ProbeResult(NamedTuple):
    """Share of test tokens with an exactly predicted position, and mean error in positions."""

    accuracy: float
    mean_error: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument(
        "--models",
        metavar="RUN",
        nargs="+",
        default=[DEMO_RUN],
        help="run folders with translations of the test split, for example one for each seed "
        f"({DEMO_RUN})",
    )
    add_trust_flag(parser)
    parser.add_argument(
        "--num_sentences",
        type=int,
        default=400,
        help="test sentences to probe (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="first seed of the tasks (default: %(default)s)"
    )
    parser.add_argument(
        "--num_seeds", type=int, default=3, help="seeds of each task (default: %(default)s)"
    )
    parser.add_argument(
        "--no_train", action="store_true", help="skip the section that trains small models"
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Train small models with each candidate, and probe the states of trained models.

    Args:
        flags: Flags of `add_flags`.

    Yields:
        One or two sections.

    Raises:
        ValueError: If `num_sentences` is below 2, `num_seeds` is below 1, or a run has no model or
            too few translations.
    """
    for flag_name, smallest_value in (("num_sentences", 2), ("num_seeds", 1)):
        value = getattr(flags, flag_name)
        if value < smallest_value:
            raise ValueError(f"{flag_name} must be at least {smallest_value}, got {value}.")
    if not flags.no_train:
        yield tasks_section(range(flags.seed, flags.seed + flags.num_seeds))
    yield probe_section(flags.models, flags.num_sentences, flags.trust_remote_code)


def linear_probe(
    states: Tensor, positions: Tensor, test_states: Tensor, test_positions: Tensor
) -> ProbeResult:
    """Fit a linear classifier from states to positions, and test the classifier on other states.

    Args:
        states: States to fit on, [P, d].
        positions: Position of each state, [P].
        test_states: States to test on, [Q, d].
        test_positions: Position of each test state, [Q].

    Returns:
        Results on the test states; the position with the highest logit is the prediction.
    """
    state_mean, state_deviation = states.mean(dim=0), states.std(dim=0).clamp(min=1e-6)

    def standardize(states: Tensor) -> Tensor:
        # the last feature is 1, so that the last row of the weights is the bias
        return F.pad((states - state_mean) / state_deviation, (0, 1), value=1.0)

    inputs, test_inputs = standardize(states), standardize(test_states)
    weights = torch.zeros(inputs.shape[1], int(positions.max()) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=PROBE_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(inputs @ weights, positions) + PROBE_DECAY * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(compute_loss)
    predicted_positions = (test_inputs @ weights.detach()).argmax(dim=1)
    distances = (predicted_positions - test_positions).abs().double()
    return ProbeResult((distances == 0).double().mean().item(), distances.mean().item())


@torch.no_grad()
def states_of_layers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Return the states of all tokens after each layer of both stacks.

    Args:
        model: Trained model.
        tokenizer: Tokenizer of the model.
        pairs: Sentences with their translations.

    Returns:
        Two dictionaries by stack. The first has states by the name of the layer, [P, d_model] each;
        its entry `WORDS_ALONE` has the embeddings of the words without positions. The second has
        the position of each token, [P]. Tokens of a sentence after the first `NUM_POSITIONS` are
        left out.
    """
    states_by_stack: dict[str, dict[str, list[Tensor]]] = {"encoder": {}, "decoder": {}}
    positions: dict[str, list[Tensor]] = {"encoder": [], "decoder": []}
    word_vectors = word_embeddings(model)
    for source, target in pairs:
        input_ids = tokenizer(source, return_tensors="pt").input_ids
        labels = tokenizer(text_target=target, return_tensors="pt").input_ids
        decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
        output = model(
            input_ids=input_ids.to(model.device),
            decoder_input_ids=decoder_input_ids.to(model.device),
            output_hidden_states=True,
            use_cache=False,
        )
        for stack, token_ids, states_after_layers in (
            ("encoder", input_ids, output.encoder_hidden_states),
            ("decoder", decoder_input_ids, output.decoder_hidden_states),
        ):
            num_kept = min(token_ids.shape[1], NUM_POSITIONS)
            positions[stack].append(torch.arange(num_kept))
            by_layer = states_by_stack[stack]
            by_layer.setdefault(WORDS_ALONE, []).append(word_vectors[token_ids[0, :num_kept]])
            for layer, layer_states in enumerate(states_after_layers):
                layer_name = f"after layer {layer}" if layer else "words + positions"
                by_layer.setdefault(layer_name, []).append(layer_states[0, :num_kept].float().cpu())
    return (
        {
            stack: {
                layer_name: torch.cat(sentence_parts)
                for layer_name, sentence_parts in layers.items()
            }
            for stack, layers in states_by_stack.items()
        },
        {stack: torch.cat(sentence_parts) for stack, sentence_parts in positions.items()},
    )


def probe_run(
    run: str, num_sentences: int, trust_remote_code: bool = False
) -> dict[str, dict[str, ProbeResult]]:
    """Probe the layers of a trained model: fit on half of the sentences, test on the others.

    Args:
        run: Run folder with translations of the test split.
        num_sentences: Number of sentences.
        trust_remote_code: Whether to run Python code that is saved with the model.

    Returns:
        Results by stack and by layer.

    Raises:
        ValueError: If the run has no model, or fewer translations than sentences.
    """
    model, tokenizer = load_trained(run, trust_remote_code)
    pairs = saved_translations(run)
    if not pairs:
        raise ValueError(
            f"models must be runs with translations of the test split, got none in {run}: "
            "`vanilla-transformer evaluate` writes them."
        )
    if len(pairs) < num_sentences:
        raise ValueError(
            f"num_sentences must be at most {len(pairs)}, the translations in {run}, "
            f"got {num_sentences}."
        )
    num_fitted = num_sentences // 2
    states, positions = states_of_layers(model, tokenizer, pairs[:num_fitted])
    test_states, test_positions = states_of_layers(
        model, tokenizer, pairs[num_fitted:num_sentences]
    )
    return {
        stack: {
            name: linear_probe(
                layer_states, positions[stack], test_states[stack][name], test_positions[stack]
            )
            for name, layer_states in layers.items()
        }
        for stack, layers in states.items()
    }


def probe_section(runs: Sequence[str], num_sentences: int, trust_remote_code: bool) -> Section:
    """Show how well a linear probe predicts the position of a token from its state in each layer.

    Args:
        runs: Run folders, for example one for each seed.
        num_sentences: Number of test sentences.
        trust_remote_code: Whether to run Python code that is saved with a model.

    Returns:
        The section.
    """
    results_by_run = [probe_run(run, num_sentences, trust_remote_code) for run in runs]
    rows, clauses = [], []
    for stack, layers in results_by_run[0].items():
        mean_accuracies = {}
        for name in layers:
            layer_results = [run_results[stack][name] for run_results in results_by_run]
            accuracies = [result.accuracy for result in layer_results]
            mean_accuracies[name] = fmean(accuracies)
            mean_error = fmean([result.mean_error for result in layer_results])
            rows.append([stack, name, *accuracies, mean_accuracies[name], mean_error])
        last_layer = list(mean_accuracies)[-1]
        clauses.append(
            f"In the {stack} it is exact for {mean_accuracies['words + positions']:.0%} of the "
            f"tokens before the first layer, and for {mean_accuracies[last_layer]:.0%} "
            f"{last_layer}; the words without positions give {mean_accuracies[WORDS_ALONE]:.0%}."
        )
    models_phrase = "one trained model" if len(runs) == 1 else f"{len(runs)} trained models"
    return Section(
        name="probe",
        title="The position in the states of each layer",
        finding=f"A linear map reads the position of a token, one of the first {NUM_POSITIONS}, "
        f"from its state. It is a softmax regression, fitted on {num_sentences // 2} sentences and "
        f"tested on {num_sentences - num_sentences // 2} others, with the states of "
        f"{models_phrase}. "
        + " ".join(clauses)
        + " The distance is the mean number of positions by which the map is wrong.",
        columns=(
            "stack",
            "state",
            *(f"run {number}" for number in range(1, len(runs) + 1)),
            "mean",
            "distance",
        ),
        rows=rows,
        figure=draw_probe(results_by_run),
        numbers={"runs": list(runs)},
    )


def draw_probe(results_by_run: Sequence[Mapping[str, Mapping[str, ProbeResult]]]) -> "Figure":
    """Draw the accuracy of the probe after each layer: the mean as a line, each run as a dot.

    Args:
        results_by_run: Results of each run, by stack and layer.

    Returns:
        The picture.
    """
    figure, all_axes = new_figure(7.2, 3.4, 1, 2)
    for axes, stack in zip(all_axes.flat, ("encoder", "decoder"), strict=True):
        layer_names = [name for name in results_by_run[0][stack] if name != WORDS_ALONE]
        accuracies_by_run = [
            [run_results[stack][name].accuracy for name in layer_names]
            for run_results in results_by_run
        ]
        word_accuracies = [
            run_results[stack][WORDS_ALONE].accuracy for run_results in results_by_run
        ]
        for run_index, accuracies in enumerate(accuracies_by_run):
            label = None if run_index else "state, one run"
            axes.plot(
                range(len(layer_names)), accuracies, "o", color="C0", alpha=0.5, ms=4, label=label
            )
        means = [fmean(values) for values in zip(*accuracies_by_run, strict=True)]
        axes.plot(range(len(layer_names)), means, color="C0", label="state, mean of the runs")
        axes.axhline(
            fmean(word_accuracies), color="C1", linestyle="--", label="word without position"
        )
        chance = 1 / NUM_POSITIONS
        axes.axhline(chance, color="black", lw=0.8, ls=":", label=f"random guess: {chance:.2f}")
        axes.set_xticks(
            range(len(layer_names)), [name.replace(" + ", "\n+ ") for name in layer_names]
        )
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylim(0, 1.05)
        axes.set_title(stack, fontsize=10)
    all_axes.flat[0].set_ylabel(f"tokens with exact position\n(first {NUM_POSITIONS} positions)")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    last_layer = list(results_by_run[0]["encoder"])[-1]
    mean_accuracy = fmean(
        [run_results["encoder"][last_layer].accuracy for run_results in results_by_run]
    )
    write_message(
        figure,
        f"A linear map reads the position of {mean_accuracy:.0%} of the source tokens {last_layer}",
    )
    return figure


def tasks_section(seeds: Sequence[int]) -> Section:
    """Train small models on two tasks with each candidate for a positional encoding.

    Args:
        seeds: Seeds, one for each training of a candidate on a task.

    Returns:
        The section.
    """
    chase_scores = {
        name: [order_task.who_chases_whom(name, seed, WHO_CHASES_WHOM) for seed in seeds]
        for name in CANDIDATES
    }
    copied_lengths = COPIED_LENGTH, 2 * COPIED_LENGTH
    copying_losses = {
        name: [
            order_task.copying_losses(name, seed, COPYING, *copied_lengths, NUM_SYMBOLS)[0]
            .mean()
            .item()
            for seed in seeds
        ]
        for name in CANDIDATES
    }
    rows = [
        [
            name,
            fmean([scores.accuracy for scores in chase_scores[name]]),
            fmean([scores.loss for scores in chase_scores[name]]),
            *copying_losses[name],
            fmean(copying_losses[name]),
        ]
        for name in CANDIDATES
    ]
    ranked_names = sorted(CANDIDATES, key=lambda name: fmean(copying_losses[name]))
    loss_phrases = [f"{fmean(copying_losses[name]):.3g} ({name})" for name in ranked_names]
    return Section(
        name="candidates",
        title="Candidates for a positional encoding, trained",
        finding=f'Small models are trained to turn "A chases B" into "B flees A", for '
        f"{WHO_CHASES_WHOM.steps} steps, and to copy sequences of up to {COPIED_LENGTH} of "
        f"{NUM_SYMBOLS} symbols, for {COPYING.steps} steps, each with {len(seeds)} seeds. A "
        "candidate with fewer features than the model is added to the first features. Losses are "
        f"in nats per word; a random guess of a symbol has {math.log(NUM_SYMBOLS):.3g}. The mean "
        f"losses of copying are {join_names(loss_phrases)}.",
        columns=(
            "positions",
            "order: accuracy",
            "order: loss",
            *(f"copying: loss, seed {seed}" for seed in seeds),
            "mean",
        ),
        rows=rows,
        figure=draw_losses(copying_losses, math.log(NUM_SYMBOLS)),
    )


def draw_losses(losses_by_encoding: Mapping[str, Sequence[float]], chance: float) -> "Figure":
    """Draw the losses of the copying task: a bar for the mean, a dot for each seed.

    Args:
        losses_by_encoding: Losses of the seeds, by positional encoding.
        chance: Loss of a random guess.

    Returns:
        The picture.
    """
    figure, axes = new_figure(6.4, 3.4)
    for bar, losses in enumerate(losses_by_encoding.values()):
        labels = (None, None) if bar else ("mean of the seeds", "one seed")
        axes.bar(bar, fmean(losses), width=0.6, color="C0", alpha=0.5, label=labels[0])
        axes.plot([bar] * len(losses), losses, "o", color="black", ms=3, label=labels[1])
    axes.axhline(chance, color="black", linewidth=0.8, linestyle=":", label="random guess")
    axes.set_xticks(range(len(losses_by_encoding)), losses_by_encoding)
    axes.set_xlabel("positional encoding")
    axes.set_ylabel("loss, nats per symbol")
    best_encoding = min(losses_by_encoding, key=lambda name: fmean(losses_by_encoding[name]))
    write_message(
        figure, f"Copying {COPIED_LENGTH} symbols: “{best_encoding}” has the lowest mean loss"
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure
