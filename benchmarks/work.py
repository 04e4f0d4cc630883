"""What is measured: text as batches, models by size, and the useful work that they are."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import VanillaTransformerConfig
from ..tokenization.learning import learn_vocabulary
from ..train.config import TrainConfig
from ..train.data.batches import Collator, plan_steps, steps_for
from ..train.data.corpus import load_translations, texts_of
from ..train.data.pairs import drop_untrainable, encode_pairs, lengths
from ..train.data.prepare import load_texts, vocabulary_texts
from ..train.run_folder.files import read_recipe

DEVICES = ("cpu", "cuda")
# Table 3's base and big, and the size that text of some 30,000 sentences is enough for
SIZES: dict[str, dict[str, Any]] = {
    "base": {},
    "small": {
        "hidden_size": 256,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 1024,
        "decoder_ffn_dim": 1024,
    },
    "big": {
        "hidden_size": 1024,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "dropout": 0.3,
    },
    # for tests: does everything, measures nothing
    "toy": {
        "hidden_size": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    },
}


def model_config(size: str, vocab_size: int, **fields: Any) -> VanillaTransformerConfig:
    """Sizes of a model.

    Args:
        size: One of `SIZES`.
        vocab_size: Tokens of its vocabulary.
        fields: What else differs from the paper's base model.

    Returns:
        Its configuration, with the special tokens of the package's tokenizer.
    """
    return VanillaTransformerConfig(**SIZES[size], vocab_size=vocab_size, **fields)


@dataclass
class Corpus:
    """Text, and what it is as tokens.

    Attributes:
        texts: Sentences of both languages.
        tokenizer: Learned from them.
        rows: Token ids of the pairs, `input_ids` and `labels`.
        source_lengths: Tokens of each source.
        target_lengths: Tokens of each target.
    """

    texts: list[str]
    tokenizer: PreTrainedTokenizerBase
    rows: datasets.Dataset
    source_lengths: np.ndarray
    target_lengths: np.ndarray


def read_corpus(config: TrainConfig, model_vocab_size: int | None = None) -> Corpus:
    """Read the text of a recipe, and learn its vocabulary.

    Args:
        config: Settings of a run.
        model_vocab_size: Tokens of the models that are to read it, if any are.

    Returns:
        The pairs that can be trained on.

    Raises:
        ValueError: If the models have fewer tokens than the text.
    """
    languages = (config.source_lang, config.target_lang)
    texts = load_texts(config)
    sentences = list(vocabulary_texts(texts, languages, config.seed))
    tokenizer = learn_vocabulary(sentences, config.vocab_size, progress=False)
    if model_vocab_size is not None and model_vocab_size < len(tokenizer):
        raise ValueError(
            f"model_vocab_size must be at least {len(tokenizer):,}, the text's own, got "
            f"{model_vocab_size:,}: --vocab_size makes that smaller."
        )
    rows = encode_pairs(texts.train[0], "train", tokenizer, *languages)
    rows, _ = drop_untrainable(rows, "train", config.max_length)
    return Corpus(sentences, tokenizer, rows, *lengths(rows))


def add_device(parser: argparse.ArgumentParser):
    """Let a command line say where models are.

    Args:
        parser: Gets `--device` and `--threads`.
    """
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help=f"of the models, of {', '.join(DEVICES)} (%(default)s)",
    )
    parser.add_argument("--threads", type=int, help="of a processor; as torch has it if not given")


def open_device(flags: argparse.Namespace):
    """Check what was said, and take so many threads.

    Args:
        flags: Of a command line with `add_device`.

    Raises:
        ValueError: If there is no such device.
    """
    if flags.device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {flags.device!r}.")
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu where torch finds no GPU, got cuda.")
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)


def run_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The command line of a benchmark of a trained model.

    Args:
        name: Of its module.
        description: What it does.

    Returns:
        A parser of the run, the split and the folder to write to.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m vanilla_transformer.benchmarks.{name}",
        allow_abbrev=False,
        description=description,
    )
    made.add_argument("run", metavar="RUN", help="a run folder, whose data is translated")
    made.add_argument("--split", default="test", help="of its data (%(default)s)")
    made.add_argument("--output_dir", type=Path, default=Path("runs", name), help="(%(default)s)")
    return made


def texts_of_run(run: Path, split: str, count: int | None) -> tuple[list[str], list[str]]:
    """Sentences and references of the data that a run was trained on.

    Args:
        run: Its folder.
        split: Of the data.
        count: The first so many; all if None.

    Returns:
        Both sides.

    Raises:
        ValueError: If there is no such split.
    """
    recipe = read_recipe(run)
    sides = [recipe.source_lang, recipe.target_lang]
    splits = load_translations(recipe.dataset, recipe.name, *sides, recipe.revision)
    if split not in splits:
        raise ValueError(f"split must be one of {', '.join(splits)}, got {split!r}.")
    source, target = texts_of(splits[split].with_format("arrow")[:count], sides, split)
    return source, target


@dataclass
class Batch:
    """Tensors, and the useful work that they are.

    Attributes:
        tensors: As `Collator` makes them.
        source_lengths: Tokens of each source, without padding.
        target_lengths: Tokens of each target.
    """

    tensors: dict[str, Tensor]
    source_lengths: np.ndarray
    target_lengths: np.ndarray

    @property
    def tokens(self) -> int:
        """Source and target tokens, without padding."""
        return int(self.source_lengths.sum() + self.target_lengths.sum())


def bucketed_batches(corpus: Corpus, tokens: int, count: int, seed: int) -> list[Batch]:
    """Batches of sentences about as long, as training has them. Section 5.1.

    Args:
        corpus: What to take them from.
        tokens: Tokens of a batch, about, of its larger side.
        count: How many.
        seed: Of the choice.

    Returns:
        Batches.

    Raises:
        ValueError: If the corpus has fewer.
    """
    sides = (corpus.source_lengths, corpus.target_lengths)
    num_steps = steps_for(int(np.maximum(*sides).sum()), tokens)
    if num_steps < count:
        raise ValueError(f"the text must have {count} batches of {tokens} tokens, got {num_steps}.")
    steps = plan_steps(*sides, num_steps, 1, np.random.default_rng(seed))
    return [_batch(corpus, groups[0]) for groups in steps[:count]]


def random_batches(corpus: Corpus, sentences: int, count: int, seed: int) -> list[Batch]:
    """Batches of sentences as they come, padded to the longest: the usual recipe.

    Args:
        corpus: What to take them from.
        sentences: Of a batch.
        count: How many.
        seed: Of the choice.

    Returns:
        Batches.
    """
    random = np.random.default_rng(seed)
    return [
        _batch(corpus, random.choice(len(corpus.rows), sentences, replace=False))
        for _ in range(count)
    ]


def _batch(corpus: Corpus, numbers: np.ndarray) -> Batch:
    tokenizer = corpus.tokenizer
    start = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    collator = Collator(tokenizer.pad_token_id, start, len(tokenizer))
    return Batch(
        collator(corpus.rows[numbers]),
        corpus.source_lengths[numbers],
        corpus.target_lengths[numbers],
    )


def training_flops(config: VanillaTransformerConfig, batch: Batch) -> float:
    """Useful work of a training step: products with weights, and those of attention itself.

    Args:
        config: Sizes of the model.
        batch: What it is trained on.

    Returns:
        Floating-point operations, forward and backward; padding is no work.
    """
    width, source, target = config.d_model, batch.source_lengths, batch.target_lengths
    encoder, decoder = config.encoder_layers, config.decoder_layers
    # query, key, value and output projection; cross-attention's keys and values are the source's
    weights = (
        encoder * (4 * width**2 + 2 * width * config.encoder_ffn_dim) * source.sum()
        + decoder * 2 * width**2 * source.sum()
        + decoder * (6 * width**2 + 2 * width * config.decoder_ffn_dim) * target.sum()
        + config.vocab_size * width * target.sum()
    )
    pairs = encoder * np.square(source).sum()
    pairs += decoder * (np.square(target) + source * target).sum()
    return float(6 * weights + 12 * width * pairs)


def search_flops(
    config: VanillaTransformerConfig, source_lengths: Sequence[int], num_beams: int, steps: int
) -> float:
    """Useful work of a search in which every sentence has as many steps.

    Args:
        config: Sizes of the model.
        source_lengths: Tokens of each source.
        num_beams: Hypotheses of each sentence.
        steps: Tokens of each hypothesis.

    Returns:
        Floating-point operations; padding is no work.
    """
    width, source = config.d_model, np.asarray(source_lengths)
    encoder, decoder = config.encoder_layers, config.decoder_layers
    rows = len(source) * num_beams * steps
    weights = (
        encoder * (4 * width**2 + 2 * width * config.encoder_ffn_dim) * source.sum()
        + decoder * 2 * width**2 * source.sum()
        + decoder * (6 * width**2 + 2 * width * config.decoder_ffn_dim) * rows
        + config.vocab_size * width * rows
    )
    pairs = encoder * np.square(source).sum()
    past = len(source) * num_beams * steps * (steps + 1) / 2
    pairs += decoder * (num_beams * steps * source.sum() + past)
    return float(2 * weights + 4 * width * pairs)
