"""Teacher forcing: all target positions in one pass, or step by step. Sections 3.1 and 3.2.3.

Shapes as in the model: S source tokens, T target tokens.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..attention_maps import token_texts
from ..batches_vanilla_transformer import max_source_tokens
from ..decoding_vanilla_transformer import CACHE_NAME
from ..drawing import new_figure
from ..tokenization.learning import learn_vocabulary
from ..train.data.demo_corpus import build_demo_corpus
from ..train.step import smoothed_loss_sum
from .study import Section
from .trained import add_optional_model_flag, load_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_SENTENCES = 8
NUM_REPEATS = 3
TARGET_LENGTHS = (8, 16, 32, 64, 128)
# sentence pairs from which the vocabulary of the random model is learned
NUM_VOCABULARY_PAIRS = 500
# vocabulary size of the random model
VOCAB_SIZE = 600
# sizes of the random model
RANDOM_MODEL_SIZES = {
    "hidden_size": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
}
ONE_PASS = "one pass"
STEPS_WITH_CACHE = "step by step, with cache"
STEPS_WITHOUT_CACHE = "step by step, without cache"
WAYS = (ONE_PASS, STEPS_WITH_CACHE, STEPS_WITHOUT_CACHE)


class TimedLosses(NamedTuple):
    """Losses of the target tokens, [T], and seconds of the fastest repeat."""

    losses: Tensor
    seconds: float


@torch.no_grad()
def losses_of_one_pass(model: PreTrainedModel, source: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each target token as in training, in one pass. Section 3.2.3.

    Args:
        model: Model in evaluation mode.
        source: Source tokens, [1, S].
        labels: Target tokens, [1, T].

    Returns:
        Losses in nats, [T].
    """
    decoder_inputs = model.prepare_decoder_input_ids_from_labels(labels)  # [1, T]
    logits = model(input_ids=source, decoder_input_ids=decoder_inputs, use_cache=False).logits
    return _token_losses(logits, labels)


@torch.no_grad()
def losses_step_by_step(
    model: PreTrainedModel, source: Tensor, labels: Tensor, use_cache: bool
) -> Tensor:
    """Return the losses of `losses_of_one_pass`, computed token by token. Section 3.1.

    The steps are those of a translation, but each step reads the true tokens.

    Args:
        model: Model in evaluation mode.
        source: Source tokens, [1, S].
        labels: Target tokens, [1, T].
        use_cache: Whether to use the KV cache; without the cache, each step reads all tokens before
            it again.

    Returns:
        Losses in nats, [T].
    """
    decoder_inputs = model.prepare_decoder_input_ids_from_labels(labels)  # [1, T]
    memory = model.get_encoder()(input_ids=source)
    logits, cache = [], None
    for num_read in range(1, labels.shape[1] + 1):
        first_read = num_read - 1 if use_cache else 0
        step_inputs = decoder_inputs[:, first_read:num_read]
        outputs = model(
            encoder_outputs=memory,
            decoder_input_ids=step_inputs,
            cache=cache,
            use_cache=use_cache,
            logits_to_keep=1,
        )
        logits.append(outputs.logits)
        cache = outputs.get(CACHE_NAME)
    return _token_losses(torch.cat(logits, dim=1), labels)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    # `smoothed_loss_sum` sums over tokens, so call it once for each token to get separate losses
    return torch.stack(
        [smoothed_loss_sum(logits[:, [t]], labels[:, [t]], 0.0) for t in range(labels.shape[1])]
    ).cpu()


def time_losses(model: PreTrainedModel, source: Tensor, labels: Tensor) -> dict[str, TimedLosses]:
    """Compute the losses of a sentence in each of `WAYS`, and measure the time.

    Args:
        model: Model in evaluation mode.
        source: Source tokens, [1, S].
        labels: Target tokens, [1, T].

    Returns:
        Losses and seconds, by `WAYS`.
    """
    function_by_way: dict[str, Callable[[], Tensor]] = {
        ONE_PASS: lambda: losses_of_one_pass(model, source, labels),
        STEPS_WITH_CACHE: lambda: losses_step_by_step(model, source, labels, use_cache=True),
        STEPS_WITHOUT_CACHE: lambda: losses_step_by_step(model, source, labels, use_cache=False),
    }
    timed_losses = {}
    for way, function in function_by_way.items():
        seconds = []
        for _ in range(NUM_REPEATS):
            # `function` copies the losses to the CPU, so it returns after the device has finished
            start_time = time.perf_counter()
            losses = function()
            seconds.append(time.perf_counter() - start_time)
        timed_losses[way] = TimedLosses(losses, min(seconds))
    return timed_losses


def random_model(
    pairs: Sequence[tuple[str, str]], seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Create a small model with random weights.

    Args:
        pairs: Sentence pairs from which the vocabulary is learned.
        seed: Seed of the weights.

    Returns:
        The model, in evaluation mode, and its tokenizer.
    """
    texts = [text for pair in pairs for text in pair]
    tokenizer = learn_vocabulary(texts, VOCAB_SIZE, progress=False)
    torch.manual_seed(seed)
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
        **RANDOM_MODEL_SIZES,
    )
    return VanillaTransformerForConditionalGeneration(config).eval(), tokenizer


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this study.

    Args:
        parser: Parser of the command line.
    """
    add_optional_model_flag(parser)
    parser.add_argument("--sentence", help="source sentence; by default sentences of the demo")
    parser.add_argument("--translation", help="reference translation, required with --sentence")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=list(TARGET_LENGTHS),
        help=f"target lengths to time (default: {' '.join(map(str, TARGET_LENGTHS))})",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Compare the losses of one pass and of single steps, and the time of each at several lengths.

    Args:
        flags: Flags of `add_flags`.

    Yields:
        Two sections.

    Raises:
        ValueError: If the model does not exist, one of sentence and translation is missing or has
            no word, or a length is below 1.
    """
    if (flags.sentence is None) != (flags.translation is None):
        raise ValueError("sentence and translation must be given together, got only one of them.")
    for flag_name in ("sentence", "translation"):
        text = getattr(flags, flag_name)
        if text is not None and not text.strip():
            raise ValueError(f"{flag_name} must have a word, got {text!r}.")
    if min(flags.lengths) < 1:
        raise ValueError(f"lengths must be at least 1, got {min(flags.lengths)}.")
    pairs = []
    if flags.sentence is None or flags.model is None:
        splits = build_demo_corpus(train=NUM_VOCABULARY_PAIRS, validation=1, test=1)
        pairs = [(row["en"], row["de"]) for row in splits["train"]["translation"]]
    if flags.model is None:
        model, tokenizer = random_model(pairs, flags.seed)
    else:
        model, tokenizer = load_trained(flags.model, flags.trust_remote_code)
    shown_pairs = pairs[:NUM_SENTENCES]
    if flags.sentence is not None:
        shown_pairs = [(flags.sentence, flags.translation)]

    def encode(text: str) -> Tensor:
        return torch.tensor([tokenizer(text).input_ids], device=model.device)

    pair_ids = [(encode(source), encode(target)) for source, target in shown_pairs]
    # warm up, so that the time of the first set-up is not measured
    time_losses(model, *pair_ids[0])
    yield _losses_section(
        model, tokenizer, shown_pairs, pair_ids, is_trained=flags.model is not None
    )
    max_length = max_source_tokens(model.config)
    lengths = set(flags.lengths)
    if max_length is not None:
        lengths = {min(length, max_length) for length in lengths}
    first_source, _ = pair_ids[0]
    yield _time_section(model, first_source, sorted(lengths), flags.seed)


def _losses_section(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    shown_pairs: Sequence[tuple[str, str]],
    pair_ids: Sequence[tuple[Tensor, Tensor]],
    is_trained: bool,
) -> Section:
    timed_by_sentence = [time_losses(model, *pair) for pair in pair_ids]
    target_lengths = [labels.shape[1] for _, labels in pair_ids]
    longest_index = max(range(len(pair_ids)), key=target_lengths.__getitem__)
    num_target_tokens = sum(target_lengths)
    counts = {
        ONE_PASS: (len(pair_ids), num_target_tokens),
        STEPS_WITH_CACHE: (num_target_tokens, num_target_tokens),
        STEPS_WITHOUT_CACHE: (
            num_target_tokens,
            sum(length * (length + 1) // 2 for length in target_lengths),
        ),
    }
    differences = {
        way: max(
            float((timed_losses[way].losses - timed_losses[ONE_PASS].losses).abs().max())
            for timed_losses in timed_by_sentence
        )
        for way in WAYS
    }
    mean_losses = {
        way: sum(float(timed_losses[way].losses.sum()) for timed_losses in timed_by_sentence)
        / num_target_tokens
        for way in WAYS
    }
    milliseconds = {
        way: 1e3 * sum(timed_losses[way].seconds for timed_losses in timed_by_sentence)
        for way in WAYS
    }
    rows = [
        [way, *counts[way], mean_losses[way], differences[way], milliseconds[way]] for way in WAYS
    ]
    _, shown_target = shown_pairs[longest_index]
    _, shown_labels = pair_ids[longest_index]
    tokens = token_texts(tokenizer, shown_labels[0].tolist())
    shown_losses = {
        way: timed_losses.losses for way, timed_losses in timed_by_sentence[longest_index].items()
    }
    model_phrase = "a trained model" if is_trained else "a model with random weights"
    sentences_phrase = (
        f"{len(pair_ids)} sentences of the demo" if len(pair_ids) > 1 else "this sentence"
    )
    return Section(
        name="losses",
        title="One pass gives the losses of all steps",
        finding=f"The decoder of {model_phrase} reads {sentences_phrase} with {num_target_tokens} "
        "target tokens. Each position reads the true tokens before it, and the mask hides the "
        "later ones. So position t of one pass computes the same as step t. The mean loss is "
        f"{mean_losses[ONE_PASS]:.4f} nats. The losses agree up to rounding: the steps differ from "
        f"one pass by at most {differences[STEPS_WITH_CACHE]:.0e} with the cache of keys and "
        f"values, and by at most {differences[STEPS_WITHOUT_CACHE]:.0e} without it. Training needs "
        f"{counts[ONE_PASS][0]} decoder pass{'es' if len(pair_ids) > 1 else ''}, translation needs "
        f"{counts[STEPS_WITH_CACHE][0]}. The picture shows the sentence: {shown_target}",
        columns=(
            "way",
            "decoder passes",
            "positions computed",
            "mean loss (nats)",
            "largest difference",
            "milliseconds",
        ),
        rows=rows,
        figure=_draw_losses(tokens, shown_losses, math.log(model.config.vocab_size), is_trained),
        message="One pass gives each token the same loss as one step per token",
        numbers={"tokens": tokens, "losses": {way: shown_losses[way].tolist() for way in WAYS}},
    )


def _draw_losses(
    tokens: Sequence[str], losses: Mapping[str, Tensor], uniform_loss: float, is_trained: bool
) -> "Figure":
    figure, axes = new_figure(max(6.0, 1.5 + 0.34 * len(tokens)), 4.2)
    for way, marker, marker_size in zip(WAYS, "ox+", (9, 7, 9), strict=True):
        axes.plot(
            losses[way],
            marker,
            markersize=marker_size,
            label=way,
            fillstyle="none",
            markeredgewidth=1.5,
        )
    label = "ln V: uniform distribution"
    axes.axhline(uniform_loss, color="0.5", linestyle="--", linewidth=1, label=label)
    label_style = {"rotation": 60, "ha": "right", "rotation_mode": "anchor", "parse_math": False}
    axes.set_xticks(range(len(tokens)), tokens, **label_style)
    axes.set_xlabel("token to predict")
    axes.set_ylabel("loss (nats)")
    # most losses of a trained model are near 0, where only a logarithmic axis separates them
    axes.set_yscale("log" if is_trained else "linear")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _time_section(
    model: PreTrainedModel, source: Tensor, lengths: Sequence[int], seed: int
) -> Section:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        labels = torch.randint(model.config.vocab_size, (1, length), generator=generator)
        timed_losses = time_losses(model, source, labels.to(model.device))
        rows.append([length, *(1e3 * timed_losses[way].seconds for way in WAYS)])
    longest, one_pass_ms, with_cache_ms, without_cache_ms = rows[-1]
    cached_ratio, uncached_ratio = with_cache_ms / one_pass_ms, without_cache_ms / one_pass_ms
    return Section(
        name="time",
        title="Time of one pass and of the steps",
        finding=f"With {longest} target tokens one pass takes {one_pass_ms:.1f} ms. The steps take "
        f"{with_cache_ms:.1f} ms with the cache, {cached_ratio:.0f} times as long, and "
        f"{without_cache_ms:.1f} ms without it, {uncached_ratio:.0f} times as long. A recurrent "
        "network cannot compute all positions in one pass: its step t needs the state of step t - "
        "1, also in training (Table 1, sequential operations).",
        columns=("target tokens", *(f"{way} (ms)" for way in WAYS)),
        rows=rows,
        figure=_draw_times(rows),
        message=f"For {longest} target tokens, the steps with cache take "
        f"{cached_ratio:.0f} times as long as one pass",
    )


def _draw_times(rows: Sequence[Sequence[float]]) -> "Figure":
    figure, axes = new_figure(7.0, 4.2)
    lengths, *times = zip(*rows, strict=True)
    for way, milliseconds in zip(WAYS, times, strict=True):
        axes.plot(lengths, milliseconds, marker="o", label=way)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("target tokens")
    axes.set_ylabel("milliseconds")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
