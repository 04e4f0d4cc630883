"""Small models for two tasks that need word order, with and without positions. Section 3.5.

The first task turns "A chases B" into "B flees A", and needs the order of the two names. The
second copies a sequence of symbols, and needs the position of each symbol.

Shapes: B sentences, T tokens of the source and of the target.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..modeling_vanilla_transformer import VanillaTransformerEncoder
from ..train.schedule import learning_rate, make_scheduler
from ..train.step import smoothed_loss_sum
from .positional_encoding import candidate_encoding

# token ids; the ids below the first word are special tokens
START_TOKEN = 1
FIRST_WORD_TOKEN = 3
CHASES_TOKEN, FLEES_TOKEN, FIRST_NAME_TOKEN = 3, 4, 5
# one in this many pairs of names is a test pair
TEST_PAIR_DIVISOR = 4


@dataclass(frozen=True)
class ToyTraining:
    """Sizes of a small model, and settings of its training.

    Attributes:
        d_model: Width; the feed-forward layers are four times as wide.
        layers: Number of layers, of the encoder and of the decoder.
        num_heads: Number of heads h.
        steps: Training steps.
        sentences_per_step: Sentences per batch.
        warmup_steps: Warm-up steps of section 5.3's schedule.
        learning_rate_factor: Factor on the learning rate of section 5.3.
        label_smoothing: epsilon_ls of section 5.4.
    """

    d_model: int = 32
    layers: int = 1
    num_heads: int = 4
    steps: int = 150
    sentences_per_step: int = 64
    warmup_steps: int = 50
    learning_rate_factor: float = 0.5
    label_smoothing: float = 0.0


class TaskScores(NamedTuple):
    """Share of test sentences with all words correct, and mean loss of a word in nats."""

    accuracy: float
    loss: float


WHO_CHASES_WHOM = ToyTraining()
COPYING = ToyTraining(d_model=48, steps=500, sentences_per_step=32, warmup_steps=150)


class CandidatePositions(nn.Module):
    """Sum of embeddings and the encoding of a candidate; replaces the model's `PositionalEncoding`.

    A candidate with fewer than d_model features is added to the first features.

    Args:
        name: One of `CANDIDATES`.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, first_position: int | Tensor = 0) -> Tensor:
        """Add the encodings of positions 0 to T - 1, [B, T, d_model] to [B, T, d_model].

        Args:
            x: Scaled embeddings of a whole sentence, [B, T, d_model].
            first_position: Not used; must be 0, because "fraction" needs the whole sentence.
        """
        encoding = candidate_encoding(self.name, x.shape[1], x.shape[2])  # [T, d]
        return x + F.pad(encoding, (0, x.shape[2] - encoding.shape[1])).to(x)


def small_model(
    position_encoding: str,
    vocab_size: int,
    num_positions: int,
    training: ToyTraining,
    seed: int = 0,
) -> VanillaTransformerForConditionalGeneration:
    """Create an untrained model of this package, without dropout.

    Args:
        position_encoding: "none", or one of `positional_encoding.CANDIDATES`.
        vocab_size: Vocabulary size V.
        num_positions: Number of rows of a learned table.
        training: Sizes of the model; its training settings are not used.
        seed: Seed of the initial weights.

    Returns:
        The model, on a CUDA GPU if there is one.
    """
    is_built_in = position_encoding in ("sinusoidal", "learned", "none")
    config = VanillaTransformerConfig(
        vocab_size=vocab_size,
        d_model=training.d_model,
        encoder_layers=training.layers,
        decoder_layers=training.layers,
        encoder_attention_heads=training.num_heads,
        decoder_attention_heads=training.num_heads,
        encoder_ffn_dim=4 * training.d_model,
        decoder_ffn_dim=4 * training.d_model,
        dropout=0.0,
        position_encoding=position_encoding if is_built_in else "none",
        max_position_embeddings=num_positions,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VanillaTransformerForConditionalGeneration(config)
    if not is_built_in:
        for stack in (model.model.encoder, model.model.decoder):
            stack.register_module("positions", CandidatePositions(position_encoding))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def train_small_model(
    model: VanillaTransformerForConditionalGeneration,
    batches: Iterator[tuple[Tensor, Tensor]],
    training: ToyTraining,
) -> None:
    """Train a model with Adam and the paper's learning rate. Sections 5.2 and 5.3.

    Args:
        model: Model to train; it is in evaluation mode afterwards.
        batches: Endless iterator of sources and targets, [B, T] each.
        training: Settings of the training, and the width that the learning rate depends on.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    rate_at_step = partial(
        learning_rate,
        d_model=training.d_model,
        warmup_steps=training.warmup_steps,
        factor=training.learning_rate_factor,
    )
    scheduler = make_scheduler(optimizer, rate_at_step)
    model.train()
    for source, target in itertools.islice(batches, training.steps):
        logits, target = predict(model, source, target)
        loss = smoothed_loss_sum(logits, target, training.label_smoothing) / target.numel()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()


def predict(
    model: VanillaTransformerForConditionalGeneration, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Predict each target token from the source and the target tokens before it.

    Args:
        model: Model of this package.
        source: Source tokens, [B, T].
        target: Target tokens, [B, T].

    Returns:
        Logits, [B, T, V], and targets, [B, T], on the device of the model.
    """
    source, target = source.to(model.device), target.to(model.device)
    decoder_inputs = torch.cat((torch.full_like(target[:, :1], START_TOKEN), target[:, :-1]), dim=1)
    return model(input_ids=source, decoder_input_ids=decoder_inputs, use_cache=False).logits, target


def chase_sentences(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Write "A chases B" and "B flees A" for each pair of names.

    Args:
        pairs: Token ids of A and B, [B, 2].

    Returns:
        Sources and targets, [B, 3] each.
    """
    first, second = pairs.T
    ones = torch.ones_like(first)
    return (
        torch.stack((first, ones * CHASES_TOKEN, second), dim=1),
        torch.stack((second, ones * FLEES_TOKEN, first), dim=1),
    )


def split_name_pairs(num_names: int, seed: int) -> tuple[Tensor, Tensor]:
    """Split all pairs of names into training pairs and test pairs.

    Both orders of two names are in the same part, so that no test pair is a swapped training pair.

    Args:
        num_names: Number of names.
        seed: Seed of the split.

    Returns:
        Training pairs and test pairs, [pairs, 2] each.
    """
    names = torch.arange(FIRST_NAME_TOKEN, FIRST_NAME_TOKEN + num_names)
    unordered_pairs = torch.combinations(names)
    generator = torch.Generator().manual_seed(seed)
    shuffled_pairs = unordered_pairs[torch.randperm(len(unordered_pairs), generator=generator)]
    num_test_pairs = len(unordered_pairs) // TEST_PAIR_DIVISOR
    test_pairs, training_pairs = (
        torch.cat((pairs, pairs.flip(1))) for pairs in shuffled_pairs.tensor_split([num_test_pairs])
    )
    return training_pairs, test_pairs


def who_chases_whom(
    position_encoding: str,
    seed: int = 0,
    training: ToyTraining = WHO_CHASES_WHOM,
    num_names: int = 20,
) -> TaskScores:
    """Train a small model to turn "A chases B" into "B flees A", and test it on unseen pairs.

    Args:
        position_encoding: "none", or one of `positional_encoding.CANDIDATES`.
        seed: Seed of the weights, the batches and the split of the pairs.
        training: Sizes of the model and its training.
        num_names: Number of names.

    Returns:
        Accuracy and loss on unseen pairs. The accuracy is the share of sentences with all words
        correct; it is about 0.5 if the order of the names is random.
    """
    training_pairs, test_pairs = split_name_pairs(num_names, seed)
    generator = torch.Generator().manual_seed(seed)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            pair_indices = torch.randint(
                len(training_pairs), (training.sentences_per_step,), generator=generator
            )
            yield chase_sentences(training_pairs[pair_indices])

    model = small_model(position_encoding, FIRST_NAME_TOKEN + num_names, 3, training, seed)
    train_small_model(model, batches(), training)
    with torch.no_grad():
        logits, target = predict(model, *chase_sentences(test_pairs))
    accuracy = (logits.argmax(dim=-1) == target).all(dim=1).float().mean().item()
    return TaskScores(
        accuracy, losses_by_position(model, *chase_sentences(test_pairs)).mean().item()
    )


def copying_losses(
    position_encoding: str,
    seed: int = 0,
    training: ToyTraining = COPYING,
    trained_length: int = 12,
    length: int = 24,
    num_symbols: int = 16,
    num_sentences: int = 256,
) -> tuple[Tensor, Tensor]:
    """Train a small model to copy sequences of symbols, and test it on longer sequences.

    The length of a training sequence is between half of `trained_length` and `trained_length`. A
    learned table has `length` rows; the rows beyond `trained_length` keep their initial values.

    Args:
        position_encoding: "none", or one of `positional_encoding.CANDIDATES`.
        seed: Seed of the weights and the batches.
        training: Sizes of the model and its training.
        trained_length: Length of the longest training sequence.
        length: Length of the longer test sequences.
        num_symbols: Number of symbols, all equally likely.
        num_sentences: Number of test sequences of each length.

    Returns:
        Mean loss at each position in nats, for sequences of `trained_length`, [trained_length],
        and for sequences of `length`, [length].
    """
    generator = torch.Generator().manual_seed(seed)

    def make_sequences(num_sequences: int, length: int) -> tuple[Tensor, Tensor]:
        first_symbol, end = FIRST_WORD_TOKEN, FIRST_WORD_TOKEN + num_symbols
        symbols = torch.randint(first_symbol, end, (num_sequences, length), generator=generator)
        return symbols, symbols

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        shortest = -(-trained_length // 2)
        while True:
            sequence_length = torch.randint(shortest, trained_length + 1, (), generator=generator)
            yield make_sequences(training.sentences_per_step, int(sequence_length))

    model = small_model(position_encoding, FIRST_WORD_TOKEN + num_symbols, length, training, seed)
    train_small_model(model, batches(), training)
    trained_length_losses, longer_losses = (
        losses_by_position(model, *make_sequences(num_sentences, test_length))
        for test_length in (trained_length, length)
    )
    return trained_length_losses, longer_losses


@torch.no_grad()
def losses_by_position(
    model: VanillaTransformerForConditionalGeneration, source: Tensor, target: Tensor
) -> Tensor:
    """Return the mean loss at each target position.

    Args:
        model: Model in evaluation mode.
        source: Source tokens, [B, T].
        target: Target tokens, [B, T].

    Returns:
        Mean loss at each position, in nats, [T].
    """
    logits, target = predict(model, source, target)
    log_probs = logits.double().log_softmax(dim=-1)
    return -log_probs.gather(-1, target[..., None]).squeeze(-1).mean(dim=0).cpu()


@torch.no_grad()
def encode_in_two_orders(
    encoder: VanillaTransformerEncoder, tokens: Sequence[int], order: Iterable[int]
) -> tuple[Tensor, Tensor]:
    """Encode a sentence, and the same words in another order.

    Args:
        encoder: Encoder in evaluation mode.
        tokens: Tokens of the sentence, [T].
        order: Indices of the tokens, in the order of the other sentence, [T].

    Returns:
        Vectors of the words in the first and in the other sentence, both in the order of the first
        sentence, [T, d_model] each.
    """
    order = list(order)
    sentences = torch.tensor([list(tokens), [tokens[index] for index in order]])
    sentence_vectors = encoder(input_ids=sentences.to(encoder.device)).last_hidden_state
    first_vectors, reordered_vectors = sentence_vectors
    restored_vectors = torch.empty_like(reordered_vectors)
    restored_vectors[order] = reordered_vectors
    return first_vectors, restored_vectors
