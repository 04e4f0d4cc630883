"""Learning of the vocabulary that source and target share. Section 5.1."""

import hashlib
import json
import logging
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .tokenization_vanilla_transformer import VanillaTransformerTokenizer, symbol_token

logger = logging.getLogger(__name__)

# longest word to learn from: the time to learn from a word is quadratic in its length, and a text
# with a longer word, such as an encoded picture, says nothing about the language
LONGEST_WORD = 10_000


def refuse_small_vocabulary(vocab_size: int, num_symbols: int = 0) -> None:
    """Refuse a vocabulary that is too small for the tokens that every vocabulary has.

    Args:
        vocab_size: Number of tokens.
        num_symbols: Number of symbols, words that are one token each.

    Raises:
        ValueError: If the vocabulary is too small. The message names the smallest size.
    """
    smallest = len(VanillaTransformerTokenizer()) + num_symbols
    if vocab_size < smallest:
        tokens = "the special tokens and the single bytes"
        if num_symbols:
            tokens = f"the special tokens, the single bytes and {num_symbols:,} symbols"
        raise ValueError(f"vocab_size must be at least {smallest}, for {tokens}, got {vocab_size}.")


def learn_vocabulary(
    texts: Iterable[str | Mapping],
    vocab_size: int,
    *,
    symbols: Sequence[str] = (),
    max_sentences: int = 2_000_000,
    seed: int = 0,
    progress: bool = True,
) -> VanillaTransformerTokenizer:
    """Learn one BPE vocabulary from sentences of both languages. Section 5.1.

    The texts are read once. A text with a word of more than `LONGEST_WORD` characters is left out.
    A uniform sample of at most `max_sentences` is kept, so that memory depends on the sample, not
    on the corpus. Counting the words of all texts would need no sample, but the number of distinct
    words grows with the corpus without a limit. The same texts, seed and sizes give the same
    vocabulary, bit for bit.

    Args:
        texts: Iterable of sentences, or of rows of a translation dataset, {"de": ..., "en": ...},
            of which every language is used. A stream is possible.
        vocab_size: Number of tokens, with the special tokens and the single bytes.
        symbols: Words that become one token each, even if no text contains them; `vocab_size`
            includes them.
        max_sentences: Maximum number of sentences to learn from.
        seed: Seed of the sample.
        progress: Show progress bars on stderr.

    Returns:
        The tokenizer. It has fewer tokens than asked for, with a warning, if no further pair of
        tokens occurs twice.

    Raises:
        ValueError: If `vocab_size` or `max_sentences` is too small, a text is not a string, or
            there is no text.
    """
    if isinstance(texts, str | Mapping):
        raise ValueError(
            f"texts must be an iterable of sentences, such as one split of a dataset, "
            f"got one {type(texts).__name__}."
        )
    tokenizer = VanillaTransformerTokenizer()
    refuse_small_vocabulary(vocab_size, len(symbols))
    if max_sentences < 1:
        raise ValueError(f"max_sentences must be at least 1, got {max_sentences}.")
    sentences = tqdm(_read_sentences(texts), "read", unit=" sentences", disable=not progress)
    sample = _draw_sample(sentences, max_sentences, seed)
    if not sample:
        raise ValueError("texts must hold at least one sentence, got none.")
    # the trainer's progress bar would write to stdout, so another bar shows the counting of words,
    # which takes most of the time. A pair that occurs only once says nothing about the language
    tokenizer = tokenizer.train_new_from_iterator(
        tqdm(sample, "count words", unit=" sentences", disable=not progress),
        vocab_size - len(symbols),
        min_frequency=2,
        show_progress=False,
    )
    if len(tokenizer) + len(symbols) < vocab_size:
        logger.warning(
            "The vocabulary has %d tokens, not the requested %d: no other pair of tokens occurs "
            "twice in %d sentences. Use more text or a smaller vocabulary size.",
            len(tokenizer) + len(symbols),
            vocab_size,
            len(sample),
        )
    return _with_symbols(tokenizer, symbols) if symbols else tokenizer


def _with_symbols(
    tokenizer: VanillaTransformerTokenizer, symbols: Sequence[str]
) -> VanillaTransformerTokenizer:
    learned_model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocab = dict(learned_model["vocab"])
    for symbol in symbols:
        # a symbol may also be a word of the texts, whose token then exists already
        vocab.setdefault(symbol_token(symbol), len(vocab))
    merges = [tuple(pair) for pair in learned_model["merges"]]
    return VanillaTransformerTokenizer(vocab, merges, symbols=list(symbols))


def _read_sentences(rows: Iterable[str | Mapping]) -> Iterator[str]:
    for row in rows:
        if isinstance(row, str):
            # spaces in a row are a word of the tokenizer too
            if row and (
                len(row) <= LONGEST_WORD
                or max(map(len, re.findall(r"\S+|\s+", row))) <= LONGEST_WORD
            ):
                yield row
        elif isinstance(row, Mapping):
            yield from _read_sentences(row.values())
        else:
            raise ValueError(
                f"texts must be strings, or mappings from language to string, got {row!r}."
            )


def _draw_sample(sentences: Iterable[str], size: int, seed: int) -> list[str]:
    # reservoir sampling: each of the first n sentences is kept with probability size / n
    generator = random.Random(seed)
    sample = []
    for index, sentence in enumerate(sentences):
        if index < size:
            sample.append(sentence)
        else:
            position = generator.randrange(index + 1)
            if position < size:
                sample[position] = sentence
    return sample


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash a tokenizer, to recognize exactly the same vocabulary and segmentation.

    Args:
        tokenizer: Fast tokenizer.

    Returns:
        SHA-256 of the tokenizer's definition in JSON, in hexadecimal.
    """
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
