"""Measure the tokenizer: learning a vocabulary, encoding and decoding text."""

import argparse
import importlib.util
import io
from collections.abc import Iterator
from typing import Any

import torch

from ..paper.study import Section
from ..tokenization.learning import learn_vocabulary
from .peers import OURS
from .timing import Implementation, Result, numbers_of, ratio_figure, ratios, time_in_turn
from .work import read_corpus

PEER = "SentencePiece BPE"
COLUMNS = ("implementation", "ratio", "lower quartile", "upper quartile", "sentences/s", "peak MB")
# number of sentences that are encoded or decoded in one call
CHUNK = 10_000


class Learner:
    """Implementation that learns a vocabulary.

    Args:
        name: `OURS` or `PEER`.
        vocab_size: Size of the vocabulary.
    """

    def __init__(self, name: str, vocab_size: int):
        self.name, self.vocab_size = name, vocab_size

    def __call__(self, texts: list[str]) -> None:
        """Learn a vocabulary.

        Args:
            texts: Sentences.
        """
        self.learn(texts)

    def learn(self, texts: list[str]) -> Any:
        """Learn a vocabulary, and return its tokenizer.

        Args:
            texts: Sentences.

        Returns:
            The tokenizer.
        """
        if self.name == OURS:
            return learn_vocabulary(texts, self.vocab_size, progress=False)
        import sentencepiece

        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=self.vocab_size,
            model_type="bpe",
            hard_vocab_limit=False,
            num_threads=torch.get_num_threads(),
            minloglevel=2,
        )
        return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


class Encoder:
    """Implementation that encodes or decodes texts.

    Args:
        name: `OURS` or `PEER`.
        vocab_size: Size of the vocabulary.
        texts: Sentences to learn the vocabulary from.
        decodes: Whether to decode ids instead of encoding texts.
    """

    def __init__(self, name: str, vocab_size: int, texts: list[str], decodes: bool):
        self.name, self.decodes = name, decodes
        self.tokenizer = Learner(name, vocab_size).learn(texts)
        self.ids: dict[str, Any] = {}

    def __call__(self, texts: list[str]) -> list[str] | None:
        """Encode texts, or decode their ids.

        Args:
            texts: Texts. For decoding, the first call computes their ids, which later calls reuse.

        Returns:
            The decoded texts; None after encoding.
        """
        if not self.decodes:
            self.encode(texts)
            return None
        key = texts[0]
        if key not in self.ids:
            self.ids[key] = self.encode(texts)
        if self.name == OURS:
            return self.tokenizer.batch_decode(self.ids[key], skip_special_tokens=True)
        return self.tokenizer.decode(self.ids[key])

    def encode(self, texts: list[str]) -> Any:
        """Encode texts.

        Args:
            texts: Texts.

        Returns:
            Token ids.
        """
        if self.name == OURS:
            return self.tokenizer(texts).input_ids
        return self.tokenizer.encode(texts)


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Time the tokenizer, and SentencePiece if it is installed.

    Args:
        flags: Flags of the command line.

    Yields:
        Three sections.
    """
    texts, vocab_size = read_corpus(flags.config).texts, flags.config.vocab_size
    names = [OURS] + [PEER] * (importlib.util.find_spec("sentencepiece") is not None)
    implementations = [
        Implementation(name, Learner, (name, vocab_size), [texts], [len(texts)]) for name in names
    ]
    yield _section(
        "vocabulary",
        "Learning a vocabulary",
        f"{vocab_size:,} tokens from {len(texts):,} sentences.",
        time_in_turn(implementations, flags.rounds, torch.device("cpu")),
    )
    timed_texts = texts[: CHUNK * flags.batches]
    chunks = [timed_texts[start : start + CHUNK] for start in range(0, len(timed_texts), CHUNK)]
    for decodes, title in ((False, "Texts to ids"), (True, "Ids to texts")):

        def check(outputs: dict[str, list[Any]]):
            if outputs[OURS][0] not in (None, chunks[0]):
                raise ValueError("decoded texts must be equal to the encoded ones, got others.")

        implementations = [
            Implementation(
                name, Encoder, (name, vocab_size, texts, decodes), chunks, list(map(len, chunks))
            )
            for name in names
        ]
        yield _section(
            "decoding" if decodes else "encoding",
            title,
            f"{len(timed_texts):,} sentences, {CHUNK:,} at a time.",
            time_in_turn(implementations, flags.rounds, torch.device("cpu"), check),
        )


def _section(name: str, title: str, finding: str, results: list[Result]) -> Section:
    rows = [
        (
            result.name,
            *ratios(result, results[0]),
            float(result.rates.mean()),
            round(result.peak / 1e6),
        )
        for result in results
    ]
    return Section(
        name=name,
        title=title,
        finding=finding
        + " Ratios are to the first row, medians with quartiles; the warm-up does not count."
        + (f" Not installed: {PEER}." if len(results) == 1 else ""),
        columns=COLUMNS,
        rows=rows,
        figure=ratio_figure({title: rows}, results[0].name),
        numbers=numbers_of(results, None),
    )
