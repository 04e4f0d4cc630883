"""Text to tokens: learning the vocabulary, and sentences a second, there and back."""

import argparse
import importlib.util
import io
from collections.abc import Iterator
from typing import Any

import torch

from ..paper.study import Section
from ..tokenization.learning import learn_vocabulary
from .contest import Contender, Result, numbers_of, race, ratio_figure, ratios
from .peers import OURS
from .work import read_corpus

PEER = "SentencePiece BPE"
COLUMNS = ("contender", "ratio", "from", "to", "sentences/s", "peak MB")
# what is encoded at a time
CHUNK = 10_000


class Learner:
    """Learns a vocabulary.

    Args:
        name: `OURS` or `PEER`.
        vocab_size: How many tokens.
    """

    def __init__(self, name: str, vocab_size: int):
        self.name, self.vocab_size = name, vocab_size

    def __call__(self, texts: list[str]) -> None:
        """Learn.

        Args:
            texts: From what.
        """
        self.learned(texts)

    def learned(self, texts: list[str]) -> Any:
        """Learn.

        Args:
            texts: From what.

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
    """Turns texts into ids, or ids into texts.

    Args:
        name: `OURS` or `PEER`.
        vocab_size: Of its vocabulary.
        texts: What to learn it from.
        is_back: Whether from ids to texts.
    """

    def __init__(self, name: str, vocab_size: int, texts: list[str], is_back: bool):
        self.name, self.is_back = name, is_back
        self.tokenizer = Learner(name, vocab_size).learned(texts)
        self.ids: dict[str, Any] = {}

    def __call__(self, texts: list[str]) -> list[str] | None:
        """Do it.

        Args:
            texts: The texts; their ids are known from the first time on.

        Returns:
            The texts as they come back, or nothing.
        """
        if not self.is_back:
            self.encoded(texts)
            return None
        key = texts[0]
        if key not in self.ids:
            self.ids[key] = self.encoded(texts)
        if self.name == OURS:
            return self.tokenizer.batch_decode(self.ids[key], skip_special_tokens=True)
        return self.tokenizer.decode(self.ids[key])

    def encoded(self, texts: list[str]) -> Any:
        """The ids of texts.

        Args:
            texts: The texts.

        Returns:
            Their ids.
        """
        if self.name == OURS:
            return self.tokenizer(texts).input_ids
        return self.tokenizer.encode(texts)


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Time the tokenizer, beside SentencePiece where it is installed.

    Args:
        flags: Of the command line.

    Yields:
        Three sections.
    """
    texts, size = read_corpus(flags.config).texts, flags.config.vocab_size
    names = [OURS] + [PEER] * (importlib.util.find_spec("sentencepiece") is not None)
    contenders = [Contender(name, Learner, (name, size), [texts], [len(texts)]) for name in names]
    yield _section(
        "vocabulary",
        "Learning a vocabulary",
        f"{size:,} tokens from {len(texts):,} sentences.",
        race(contenders, flags.rounds, torch.device("cpu")),
    )
    some = texts[: CHUNK * flags.batches]
    chunks = [some[start : start + CHUNK] for start in range(0, len(some), CHUNK)]
    for is_back, title in ((False, "Texts to ids"), (True, "Ids to texts")):

        def check(found: dict[str, list[Any]]):
            if found[OURS][0] not in (None, chunks[0]):
                raise ValueError("texts must come back as they were, got others.")

        contenders = [
            Contender(name, Encoder, (name, size, texts, is_back), chunks, list(map(len, chunks)))
            for name in names
        ]
        yield _section(
            "decoding" if is_back else "encoding",
            title,
            f"{len(some):,} sentences, {CHUNK:,} at a time.",
            race(contenders, flags.rounds, torch.device("cpu"), check),
        )


def _section(name: str, title: str, says: str, results: list[Result]) -> Section:
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
        says=says
        + " Ratios are to the first line, medians with quartiles; the first time does not count."
        + (f" Absent here: {PEER}." if len(results) == 1 else ""),
        columns=COLUMNS,
        rows=rows,
        figure=ratio_figure({title: rows}, results[0].name),
        numbers=numbers_of(results, None),
    )
