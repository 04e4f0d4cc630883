"""Positions in trained models: candidates for an encoding on two tasks, and a probe of each layer.

A state is the vector of a token after a layer. Shapes: P tokens, Q test tokens, d features.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..console import add_trust_flag
from ..drawing import new_figure, write_message
from ..records import read_text
from . import order_task
from .order_task import COPYING, WHO_CHASES_WHOM
from .positional_encoding import word_embeddings
from .study import Section, join_names
from .trained import DEMO, load_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CANDIDATES = ("integer", "fraction", "sine", "binary", "sinusoidal", "none")
NUM_SYMBOLS, LENGTH = 16, 12
# number of first positions that are probed; few sentences are long enough for later positions
NUM_POSITIONS = 12
WORDS = "words alone"
# L2 penalty of the probe, a softmax regression, and its maximum number of L-BFGS iterations
DECAY, ITERATIONS = 1e-4, 100


class Probed(NamedTuple):
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
        default=[DEMO],
        help="run folders with translations of the test split, for example one for each seed "
        f"({DEMO})",
    )
    add_trust_flag(parser)
    parser.add_argument(
        "--num_sentences", type=int, default=400, help="test sentences to probe (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed of the tasks (%(default)s)")
    parser.add_argument("--num_seeds", type=int, default=3, help="seeds of each task (%(default)s)")
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
    for name, least in (("num_sentences", 2), ("num_seeds", 1)):
        if getattr(flags, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(flags, name)}.")
    if not flags.no_train:
        yield tasks_section(range(flags.seed, flags.seed + flags.num_seeds))
    yield probe_section(flags.models, flags.num_sentences, flags.trust_remote_code)


def linear_probe(
    states: Tensor, positions: Tensor, test_states: Tensor, test_positions: Tensor
) -> Probed:
    """Fit a linear classifier from states to positions, and test the classifier on other states.

    Args:
        states: States to fit on, [P, d].
        positions: Position of each state, [P].
        test_states: States to test on, [Q, d].
        test_positions: Position of each test state, [Q].

    Returns:
        Results on the test states; the position with the highest logit is the prediction.
    """
    mean, deviation = states.mean(dim=0), states.std(dim=0).clamp(min=1e-6)
    inputs, tested = (
        F.pad((one - mean) / deviation, (0, 1), value=1.0) for one in (states, test_states)
    )
    weights = torch.zeros(inputs.shape[1], int(positions.max()) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(inputs @ weights, positions) + DECAY * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    read = (tested @ weights.detach()).argmax(dim=1)
    apart = (read - test_positions).abs().double()
    return Probed((apart == 0).double().mean().item(), apart.mean().item())


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
        its entry `WORDS` has the embeddings of the words without positions. The second has the
        position of each token, [P]. Tokens of a sentence after the first `NUM_POSITIONS` are left
        out.
    """
    found: dict[str, dict[str, list[Tensor]]] = {"encoder": {}, "decoder": {}}
    positions: dict[str, list[Tensor]] = {"encoder": [], "decoder": []}
    table = word_embeddings(model)
    for source, target in pairs:
        ids = tokenizer(source, return_tensors="pt").input_ids
        labels = tokenizer(text_target=target, return_tensors="pt").input_ids
        read = model.prepare_decoder_input_ids_from_labels(labels)
        output = model(
            input_ids=ids.to(model.device),
            decoder_input_ids=read.to(model.device),
            output_hidden_states=True,
            use_cache=False,
        )
        for stack, tokens, states in (
            ("encoder", ids, output.encoder_hidden_states),
            ("decoder", read, output.decoder_hidden_states),
        ):
            kept = min(tokens.shape[1], NUM_POSITIONS)
            positions[stack].append(torch.arange(kept))
            found[stack].setdefault(WORDS, []).append(table[tokens[0, :kept]])
            for layer, values in enumerate(states):
                name = f"after layer {layer}" if layer else "words + positions"
                found[stack].setdefault(name, []).append(values[0, :kept].float().cpu())
    return (
        {
            stack: {name: torch.cat(parts) for name, parts in layers.items()}
            for stack, layers in found.items()
        },
        {stack: torch.cat(parts) for stack, parts in positions.items()},
    )


def probe_run(
    run: str, num_sentences: int, trust_remote_code: bool = False
) -> dict[str, dict[str, Probed]]:
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
    files = [Path(run) / "hypotheses" / f"test.{side}.txt" for side in ("source", "translation")]
    if not all(file.is_file() for file in files):
        raise ValueError(
            f"models must be runs with translations of the test split, got none in {run}: "
            "`vanilla-transformer evaluate` writes them."
        )
    sides = [read_text(file).split("\n")[:-1] for file in files]
    pairs = [pair for pair in zip(*sides, strict=True) if all(map(str.strip, pair))]
    if len(pairs) < num_sentences:
        raise ValueError(
            f"num_sentences must be at most {len(pairs)}, the translations in {run}, "
            f"got {num_sentences}."
        )
    half = num_sentences // 2
    parts = (pairs[:half], pairs[half:num_sentences])
    (states, positions), (tested, truth) = (
        states_of_layers(model, tokenizer, part) for part in parts
    )
    return {
        stack: {
            name: linear_probe(values, positions[stack], tested[stack][name], truth[stack])
            for name, values in layers.items()
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
    found = [probe_run(run, num_sentences, trust_remote_code) for run in runs]
    rows, findings = [], []
    for stack, layers in found[0].items():
        for name in layers:
            values = [one[stack][name] for one in found]
            accuracies = [one.accuracy for one in values]
            mean_error = _mean([one.mean_error for one in values])
            rows.append([stack, name, *accuracies, _mean(accuracies), mean_error])
        exact = {row[1]: row[-2] for row in rows if row[0] == stack}
        last = list(exact)[-1]
        findings.append(
            f"In the {stack} it is exact for {exact['words + positions']:.0%} of the tokens before "
            f"the first layer, and for {exact[last]:.0%} {last}; the words without positions give "
            f"{exact[WORDS]:.0%}."
        )
    count = "one trained model" if len(runs) == 1 else f"{len(runs)} trained models"
    return Section(
        name="probe",
        title="The position in the states of each layer",
        finding=f"A linear map reads the position of a token, one of the first {NUM_POSITIONS}, "
        f"from its state. It is a softmax regression, fitted on {num_sentences // 2} sentences and "
        f"tested on {num_sentences - num_sentences // 2} others, with the states of {count}. "
        + " ".join(findings)
        + " The distance is the mean number of positions by which the map is wrong.",
        columns=(
            "stack",
            "state",
            *(f"run {number}" for number in range(1, len(runs) + 1)),
            "mean",
            "distance",
        ),
        rows=rows,
        figure=draw_probe(found),
        numbers={"runs": list(runs)},
    )


def draw_probe(found: Sequence[Mapping[str, Mapping[str, Probed]]]) -> "Figure":
    """Draw the accuracy of the probe after each layer: the mean as a line, each run as a dot.

    Args:
        found: Results of each run, by stack and layer.

    Returns:
        The picture.
    """
    figure, both = new_figure(7.2, 3.4, 1, 2)
    for axes, stack in zip(both.flat, ("encoder", "decoder"), strict=True):
        names = [name for name in found[0][stack] if name != WORDS]
        runs = [[one[stack][name].accuracy for name in names] for one in found]
        alone = [one[stack][WORDS].accuracy for one in found]
        for number, accuracies in enumerate(runs):
            label = None if number else "state, one run"
            axes.plot(range(len(names)), accuracies, "o", color="C0", alpha=0.5, ms=4, label=label)
        means = [_mean(values) for values in zip(*runs, strict=True)]
        axes.plot(range(len(names)), means, color="C0", label="state, mean of the runs")
        axes.axhline(_mean(alone), color="C1", linestyle="--", label="word without position")
        chance = 1 / NUM_POSITIONS
        axes.axhline(chance, color="black", lw=0.8, ls=":", label=f"random guess: {chance:.2f}")
        axes.set_xticks(range(len(names)), [name.replace(" + ", "\n+ ") for name in names])
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylim(0, 1.05)
        axes.set_title(stack, fontsize=10)
    both.flat[0].set_ylabel(f"tokens with exact position\n(first {NUM_POSITIONS} positions)")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    last = list(found[0]["encoder"])[-1]
    share = _mean([one["encoder"][last].accuracy for one in found])
    write_message(
        figure, f"A linear map reads the position of {share:.0%} of the source tokens {last}"
    )
    return figure


def tasks_section(seeds: Sequence[int]) -> Section:
    """Train small models on two tasks with each candidate for a positional encoding.

    Args:
        seeds: Seeds, one for each training of a candidate on a task.

    Returns:
        The section.
    """
    chased = {
        name: [order_task.who_chases_whom(name, seed, WHO_CHASES_WHOM) for seed in seeds]
        for name in CANDIDATES
    }
    copied = {
        name: [
            order_task.copying_losses(name, seed, COPYING, LENGTH, 2 * LENGTH, NUM_SYMBOLS)[0]
            .mean()
            .item()
            for seed in seeds
        ]
        for name in CANDIDATES
    }
    rows = [
        [
            name,
            _mean([one.accuracy for one in chased[name]]),
            _mean([one.loss for one in chased[name]]),
            *copied[name],
            _mean(copied[name]),
        ]
        for name in CANDIDATES
    ]
    ranked = sorted(CANDIDATES, key=lambda name: _mean(copied[name]))
    ends = [f"{_mean(copied[name]):.3g} ({name})" for name in ranked]
    return Section(
        name="candidates",
        title="Candidates for a positional encoding, trained",
        finding=f'Small models are trained to turn "A chases B" into "B flees A", for '
        f"{WHO_CHASES_WHOM.steps} steps, and to copy sequences of up to {LENGTH} of {NUM_SYMBOLS} "
        f"symbols, for {COPYING.steps} steps, each with {len(seeds)} seeds. A candidate with fewer "
        "features than the model is added to the first features. Losses are in nats per word; a "
        f"random guess of a symbol has {math.log(NUM_SYMBOLS):.3g}. The mean losses of copying are "
        f"{join_names(ends)}.",
        columns=(
            "positions",
            "order: accuracy",
            "order: loss",
            *(f"copying: loss, seed {seed}" for seed in seeds),
            "mean",
        ),
        rows=rows,
        figure=draw_losses(copied, math.log(NUM_SYMBOLS)),
    )


def draw_losses(found: Mapping[str, Sequence[float]], chance: float) -> "Figure":
    """Draw the losses of the copying task: a bar for the mean, a dot for each seed.

    Args:
        found: Losses of the seeds, by positional encoding.
        chance: Loss of a random guess.

    Returns:
        The picture.
    """
    figure, axes = new_figure(6.4, 3.4)
    for bar, losses in enumerate(found.values()):
        labels = (None, None) if bar else ("mean of the seeds", "one seed")
        axes.bar(bar, _mean(losses), width=0.6, color="C0", alpha=0.5, label=labels[0])
        axes.plot([bar] * len(losses), losses, "o", color="black", ms=3, label=labels[1])
    axes.axhline(chance, color="black", linewidth=0.8, linestyle=":", label="random guess")
    axes.set_xticks(range(len(found)), found)
    axes.set_xlabel("positional encoding")
    axes.set_ylabel("loss, nats per symbol")
    best = min(found, key=lambda name: _mean(found[name]))
    write_message(figure, f"Copying {LENGTH} symbols: “{best}” has the lowest mean loss")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
