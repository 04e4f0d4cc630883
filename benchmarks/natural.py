"""Translation with a trained model: `python -m vanilla_transformer.benchmarks.natural RUN`.

The benchmark `translation` uses random weights, so it must set the length of each translation.
Here, a trained model translates the corpus of its run, and each translation ends with its end
token. Each engine reads text and writes text, as in practice.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, MarianMTModel

from ..batches_vanilla_transformer import TOKENS_PER_BATCH
from ..console import run_command
from ..export.marian import to_marian
from ..loading import load_run
from ..paper.study import Section, show_study
from ..pipeline_vanilla_transformer import TranslationPipeline
from ..train.config import PRECISIONS
from ..train.devices.distribution import HALF_PRECISION_DTYPES
from ..train.run_folder.files import read_recipe
from ..train.scoring import score_translations
from ..train.translate import one_line, translate_lines
from .marian_trainer import translate
from .peers import MARIAN, OURS
from .timing import Implementation, numbers_of, ratio_figure, rows_of, time_in_turn
from .translation import (
    CTRANSLATE2,
    OUR_SEARCHES,
    ctranslate2_names,
    load_ctranslate2,
    our_searches,
    refuse_other_translations,
)
from .work import add_device, open_device, run_parser, texts_of_run

MARIAN_UNSORTED = f"{MARIAN}, unsorted"
# number of sentences in a call of an engine, and in a batch of transformers' Marian
SENTENCES_PER_CALL, MARIAN_BATCH_SIZE = 256, 32


class Translator:
    """Translation from text to text by one engine, with the weights of a run.

    Args:
        name: One of `OUR_SEARCHES`, `MARIAN`, `MARIAN_UNSORTED` or one of `ctranslate2_names`.
        run: Run folder.
        num_beams: Beam size.
        max_new_tokens: Largest number of tokens in a translation.
        device: Device of the model.
        dtype: Type of weights and hidden states.
    """

    def __init__(
        self,
        name: str,
        run: str,
        num_beams: int,
        max_new_tokens: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.name, self.num_beams, self.max_new_tokens = name, num_beams, max_new_tokens
        self.model, self.tokenizer = load_run(run)
        if name.startswith(CTRANSLATE2):
            self.engine = load_ctranslate2(self.model, self.tokenizer, name, torch.device(device))
            return
        if name not in OUR_SEARCHES:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "model")
                to_marian(self.model, self.tokenizer, path)
                self.model = MarianMTModel.from_pretrained(path)
                # the export has other token ids, so use the exported tokenizer
                self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model.to(device, dtype).eval()

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """Translate sentences.

        Args:
            texts: Sentences.

        Returns:
            Translations, in the order of the sentences.
        """
        if self.name in OUR_SEARCHES:
            return list(
                translate_lines(
                    TranslationPipeline(self.model, self.tokenizer, device=self.model.device),
                    texts,
                    num_beams=self.num_beams,
                    length_penalty_alpha=0.0,
                    max_new_tokens=self.max_new_tokens,
                    max_extra_tokens=None,
                    **OUR_SEARCHES[self.name],
                )
            )
        if self.name.startswith(CTRANSLATE2):
            return self._by_ctranslate2(texts)
        order = list(range(len(texts)))
        if self.name == MARIAN:
            order = sorted(order, key=lambda index: len(texts[index]))
        ordered_texts = [texts[index] for index in order]
        translations = translate(
            self.model,
            self.tokenizer,
            ordered_texts,
            MARIAN_BATCH_SIZE,
            num_beams=self.num_beams,
            length_penalty=0.0,
            max_new_tokens=self.max_new_tokens,
        )
        return [one_line(text) for _, text in sorted(zip(order, translations, strict=True))]

    def _by_ctranslate2(self, texts: Sequence[str]) -> list[str]:
        # CTranslate2 itself sorts sentences by length
        results = self.engine.translate_batch(
            [
                self.tokenizer.convert_ids_to_tokens(ids)
                for ids in self.tokenizer(list(texts)).input_ids
            ],
            beam_size=self.num_beams,
            length_penalty=0,
            max_decoding_length=self.max_new_tokens,
            max_batch_size=TOKENS_PER_BATCH,
            batch_type="tokens",
        )
        ids = [self.tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
        return list(map(one_line, self.tokenizer.batch_decode(ids, skip_special_tokens=True)))


def sections(
    texts: list[str], references: list[str], flags: argparse.Namespace
) -> Iterator[Section]:
    """Translate the same sentences with each engine.

    Args:
        texts: Sentences.
        references: Reference translations.
        flags: Flags of the command line.

    Yields:
        One section.
    """
    device, dtype = (
        torch.device(flags.device),
        HALF_PRECISION_DTYPES.get(flags.precision, torch.float32),
    )
    ctranslate2_engines, absent_engines = ctranslate2_names(device, dtype)
    names = [*our_searches(device, dtype), MARIAN, MARIAN_UNSORTED, *ctranslate2_engines]
    pieces = [
        texts[start : start + SENTENCES_PER_CALL]
        for start in range(0, len(texts), SENTENCES_PER_CALL)
    ]
    amounts = [len(piece) for piece in pieces]
    arguments = flags.run, flags.num_beams, flags.max_new_tokens, flags.device, dtype
    implementations = [
        Implementation(name, Translator, (name, *arguments), pieces, amounts) for name in names
    ]
    translations: dict[str, list[str]] = {}
    num_equal: dict[str, int] = {}

    def check(outputs: dict[str, list[list[str]]]):
        translations.update({name: list(chain(*outputs[name])) for name in names})
        expected = translations[MARIAN]
        num_equal.update(
            {name: sum(map(str.__eq__, translations[name], expected)) for name in names}
        )
        # check only float32, because rounding in half precision changes translations
        if dtype == torch.float32:
            refuse_other_translations(num_equal[OURS] / len(texts))

    results = time_in_turn(implementations, flags.rounds, device, check, range(len(pieces)))
    bleu_tokenizer = read_recipe(Path(flags.run)).bleu_tokenizer
    scores = {
        name: score_translations(translations[name], references, bleu_tokenizer) for name in names
    }
    bleu = {name: score["bleu"] for name, score in scores.items()}
    signature = scores[OURS]["bleu_signature"]
    rows = [
        (name, *ratio, rate, f"{bleu[name]:.2f}", num_equal[name], peak)
        for name, *ratio, rate, _, peak in rows_of(results, MARIAN, None)
    ]
    yield Section(
        name="natural",
        title="Translation with a trained model",
        finding=f"{len(texts):,} sentences, {SENTENCES_PER_CALL} in a call, {flags.num_beams} "
        f"beams without length penalty, {flags.precision} unless the name says otherwise. {MARIAN} "
        f"has batches of {MARIAN_BATCH_SIZE}, sorted by length in its first row and in the given "
        f"order in its second. The others build batches of at most {TOKENS_PER_BATCH:,} tokens "
        f"themselves. Times include tokenization. Equal: translations that {MARIAN} gives too. "
        f"BLEU is {signature}. Each implementation has its own process, and they do each piece in "
        "turn; ratios are medians over pieces and rounds, with quartiles; memory is beyond that "
        "after the imports."
        + (f" Not installed: {', '.join(absent_engines)}." if absent_engines else ""),
        columns=(
            "implementation",
            "ratio",
            "lower quartile",
            "upper quartile",
            "sentences/s",
            "BLEU",
            "equal",
            "peak MB",
        ),
        rows=rows,
        figure=ratio_figure({f"{flags.num_beams} beams": rows}, MARIAN),
        numbers={**numbers_of(results, None), "bleu": bleu, "equal": num_equal},
    )


def _measure(argv: list[str]):
    parser = run_parser(
        "natural", "Time translation with a trained model, on the corpus of its run."
    )
    parser.add_argument(
        "--num_sentences",
        type=int,
        default=4 * SENTENCES_PER_CALL,
        help="number of sentences (default: %(default)s)",
    )
    parser.add_argument("--num_beams", type=int, default=4, help="beam size (default: %(default)s)")
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=200,
        help="largest number of tokens in a translation (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="repetitions of all sentences (default: %(default)s)"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="precision of the models (default: %(default)s)",
    )
    add_device(parser)
    flags = parser.parse_args(argv)
    for name in ("num_sentences", "num_beams", "max_new_tokens", "rounds", "threads"):
        value: Any = getattr(flags, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    open_device(flags)
    if flags.device == "cpu" and flags.precision != "fp32":
        raise ValueError(f"precision must be fp32 on a CPU, got {flags.precision}.")
    texts, references = texts_of_run(Path(flags.run), flags.split, flags.num_sentences)
    show_study(
        sections(texts, references, flags), "Translation with a trained model", flags.output_dir
    )


# `main` shows an error as one sentence, and returns the exit status
main = partial(run_command, _measure)


if __name__ == "__main__":
    sys.exit(main())
