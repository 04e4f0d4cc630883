"""Work of the benchmarks: batches of text, model sizes, and floating-point operations."""

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
from ..train.data.batches import Collator, count_steps, plan_steps
from ..train.data.corpus import load_translations, texts_of
from ..train.data.pairs import drop_untrainable, encode_pairs, pair_lengths
from ..train.data.prepare import load_texts, vocabulary_texts
from ..train.run_folder.files import read_recipe

DEVICES = ("cpu", "cuda")
# base and big of Table 3; small suits a corpus of some 30,000 sentences
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
    # for tests only
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
# sizes of popular models of transformers, with their vocabulary sizes
MODELS: dict[str, dict[str, Any]] = {
    "opus-mt": {"vocab_size": 58101, "activation_function": "swish"},
    "nllb-600m": {
        **SIZES["big"],
        "vocab_size": 256206,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "norm_first": True,
    },
    # for tests only
    "toy-opus-mt": {**SIZES["toy"], "activation_function": "swish"},
    "toy-nllb": {**SIZES["toy"], "norm_first": True},
}


def model_config(size: str, vocab_size: int, **fields: Any) -> VanillaTransformerConfig:
    """Return the configuration of a model.

    Args:
        size: One of `SIZES` or `MODELS`.
        vocab_size: Size of the vocabulary, unless `MODELS` gives the model's own.
        fields: Further fields that differ from the paper's base model.

    Returns:
        The configuration, with the special tokens of the package's tokenizer.
    """
    sizes = SIZES[size] if size in SIZES else MODELS[size]
    return VanillaTransformerConfig(**{"vocab_size": vocab_size, **sizes, **fields})


@dataclass
class Corpus:
    """Tokenized corpus.

    Attributes:
        texts: Sentences of both languages.
        tokenizer: Tokenizer that was learned from the sentences.
        rows: Token ids of the pairs, `input_ids` and `labels`.
        source_lengths: Number of tokens in each source.
        target_lengths: Number of tokens in each target.
    """

    texts: list[str]
    tokenizer: PreTrainedTokenizerBase
    rows: datasets.Dataset
    source_lengths: np.ndarray
    target_lengths: np.ndarray


def read_corpus(config: TrainConfig, model_vocab_size: int | None = None) -> Corpus:
    """Read the corpus of a recipe, and learn its vocabulary.

    Args:
        config: Settings of a run.
        model_vocab_size: Vocabulary size of the models that read the token ids; None for no models.

    Returns:
        The corpus, with the pairs that training would keep.

    Raises:
        ValueError: If the vocabulary of the models is smaller than that of the corpus.
    """
    languages = (config.source_lang, config.target_lang)
    texts = load_texts(config)
    sentences = list(vocabulary_texts(texts, languages, config.seed))
    tokenizer = learn_vocabulary(sentences, config.vocab_size, progress=False)
    if model_vocab_size is not None and model_vocab_size < len(tokenizer):
        raise ValueError(
            f"model_vocab_size must be at least {len(tokenizer):,}, the vocabulary size of the "
            f"corpus, got {model_vocab_size:,}: set a smaller --vocab_size."
        )
    rows = encode_pairs(texts.train[0], "train", tokenizer, *languages)
    rows = drop_untrainable(rows, config.max_length)
    return Corpus(sentences, tokenizer, rows, *pair_lengths(rows))


def add_device(parser: argparse.ArgumentParser):
    """Add `--device` and `--threads` to a command line.

    Args:
        parser: Parser of the command line.
    """
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help=f"device of the models, {' or '.join(DEVICES)} (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="number of CPU threads (default: torch's)")


def open_device(flags: argparse.Namespace):
    """Check the device, and set the number of threads.

    Args:
        flags: Flags of a command line with `add_device`.

    Raises:
        ValueError: If there is no such device.
    """
    if flags.device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {flags.device!r}.")
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu, because torch finds no GPU, got cuda.")
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)


def run_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser for a benchmark of a trained model.

    Args:
        name: Name of the module.
        description: Description for the help.

    Returns:
        A parser with run, split and output folder.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m vanilla_transformer.benchmarks.{name}",
        allow_abbrev=False,
        description=description,
    )
    parser.add_argument("run", metavar="RUN", help="run folder; its corpus is translated")
    parser.add_argument("--split", default="test", help="split to translate (default: %(default)s)")
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("runs", name),
        help="output folder (default: %(default)s)",
    )
    return parser


def texts_of_run(run: Path, split: str, num_sentences: int | None) -> tuple[list[str], list[str]]:
    """Return sentences and references from the corpus of a run.

    Args:
        run: Run folder.
        split: Split of the corpus.
        num_sentences: Largest number of sentences; None for all.

    Returns:
        Sources and references.

    Raises:
        ValueError: If there is no such split.
    """
    recipe = read_recipe(run)
    languages = recipe.source_lang, recipe.target_lang
    splits = load_translations(recipe.dataset, recipe.name, *languages, revision=recipe.revision)
    if split not in splits:
        raise ValueError(f"split must be one of {', '.join(splits)}, got {split!r}.")
    sources, references = texts_of(
        splits[split].with_format("arrow")[:num_sentences], languages, split
    )
    return sources, references


@dataclass
class Batch:
    """Training batch with its sentence lengths.

    Attributes:
        tensors: Tensors of `Collator`.
        source_lengths: Number of tokens in each source, without padding.
        target_lengths: Number of tokens in each target, without padding.
    """

    tensors: dict[str, Tensor]
    source_lengths: np.ndarray
    target_lengths: np.ndarray

    @property
    def tokens(self) -> int:
        """Number of source and target tokens, without padding."""
        return int(self.source_lengths.sum() + self.target_lengths.sum())


def bucketed_batches(corpus: Corpus, tokens: int, num_batches: int, seed: int) -> list[Batch]:
    """Draw batches of sentences of similar length, as in training. Section 5.1.

    Args:
        corpus: Corpus of the sentences.
        tokens: Approximate number of tokens in a batch, counted on the longer side of each pair.
        num_batches: Number of batches.
        seed: Seed of the draw.

    Returns:
        Batches.

    Raises:
        ValueError: If the corpus has fewer than `num_batches` batches.
    """
    lengths = (corpus.source_lengths, corpus.target_lengths)
    num_steps = count_steps(int(np.maximum(*lengths).sum()), tokens)
    if num_steps < num_batches:
        raise ValueError(
            f"the corpus must have {num_batches} batches of {tokens} tokens, got {num_steps}."
        )
    steps = plan_steps(*lengths, num_steps, 1, np.random.default_rng(seed))
    return [_build_batch(corpus, groups[0]) for groups in steps[:num_batches]]


def random_batches(corpus: Corpus, num_sentences: int, num_batches: int, seed: int) -> list[Batch]:
    """Draw batches of random sentences, padded to the longest, as most toolkits do.

    Args:
        corpus: Corpus of the sentences.
        num_sentences: Number of sentences in a batch.
        num_batches: Number of batches.
        seed: Seed of the draw.

    Returns:
        Batches.
    """
    random = np.random.default_rng(seed)
    return [
        _build_batch(corpus, random.choice(len(corpus.rows), num_sentences, replace=False))
        for _ in range(num_batches)
    ]


def _build_batch(corpus: Corpus, pair_indices: np.ndarray) -> Batch:
    tokenizer = corpus.tokenizer
    start_id = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    collator = Collator(tokenizer.pad_token_id, start_id, len(tokenizer))
    return Batch(
        collator(corpus.rows[pair_indices]),
        corpus.source_lengths[pair_indices],
        corpus.target_lengths[pair_indices],
    )


def training_flops(config: VanillaTransformerConfig, batch: Batch) -> float:
    """Count the useful operations of a training step: products with weights and in attention.

    Args:
        config: Configuration of the model.
        batch: Training batch.

    Returns:
        Floating-point operations, forward and backward, without those on padding.
    """
    width, source, target = config.d_model, batch.source_lengths, batch.target_lengths
    encoder_layers, decoder_layers = config.encoder_layers, config.decoder_layers
    # multiply-adds with weights; cross-attention projects keys and values from source tokens
    weight_products = (
        encoder_layers * (4 * width**2 + 2 * width * config.encoder_ffn_dim) * source.sum()
        + decoder_layers * 2 * width**2 * source.sum()
        + decoder_layers * (6 * width**2 + 2 * width * config.decoder_ffn_dim) * target.sum()
        + config.vocab_size * width * target.sum()
    )
    # query-key pairs of attention; pairs that the causal mask hides count too
    attention_pairs = encoder_layers * np.square(source).sum()
    attention_pairs += decoder_layers * (np.square(target) + source * target).sum()
    # a multiply-add is 2 operations, backward takes twice as many as forward, and each pair takes
    # `width` multiply-adds for its score and `width` for its value
    return float(6 * weight_products + 12 * width * attention_pairs)


def search_flops(
    config: VanillaTransformerConfig, source_lengths: Sequence[int], num_beams: int, num_steps: int
) -> float:
    """Count the useful operations of a search with the same number of steps for each sentence.

    Args:
        config: Configuration of the model.
        source_lengths: Number of tokens in each source.
        num_beams: Beam size.
        num_steps: Number of tokens in each hypothesis.

    Returns:
        Floating-point operations, without those on padding.
    """
    width, source = config.d_model, np.asarray(source_lengths)
    encoder_layers, decoder_layers = config.encoder_layers, config.decoder_layers
    num_tokens = len(source) * num_beams * num_steps
    # multiply-adds and query-key pairs, as in `training_flops`
    weight_products = (
        encoder_layers * (4 * width**2 + 2 * width * config.encoder_ffn_dim) * source.sum()
        + decoder_layers * 2 * width**2 * source.sum()
        + decoder_layers * (6 * width**2 + 2 * width * config.decoder_ffn_dim) * num_tokens
        + config.vocab_size * width * num_tokens
    )
    attention_pairs = encoder_layers * np.square(source).sum()
    # with the KV cache, step t of a hypothesis attends to t target positions
    self_attention_pairs = len(source) * num_beams * num_steps * (num_steps + 1) / 2
    attention_pairs += decoder_layers * (
        num_beams * num_steps * source.sum() + self_attention_pairs
    )
    return float(2 * weight_products + 4 * width * attention_pairs)
