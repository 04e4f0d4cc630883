"""Count equal translations of a model and its exports: `python -m ...benchmarks.exports RUN`."""

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import onnxruntime
import torch
from transformers import (
    AutoTokenizer,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..console import run_command
from ..export.ctranslate2 import to_ctranslate2
from ..export.marian import to_marian
from ..export.onnx import (
    DECODER_FILE,
    DECODER_WITH_PAST_FILE,
    ENCODER_FILE,
    run_graph,
    to_onnx,
)
from ..export.transformersjs import to_transformersjs
from ..loading import load_run
from ..paper.study import Section, show_study
from ..pipeline_vanilla_transformer import TranslationPipeline
from ..search_vanilla_transformer import gnmt_length_penalty
from ..train.translate import one_line, translate_lines
from .work import run_parser, texts_of_run

NUM_BEAMS = 4
ALPHA = 0.6
# largest number of tokens in a translation, so far above what a sentence needs that no search
# reaches it
MAX_NEW_TOKENS = 200
SENTENCES_PER_BATCH = 25
# CTranslate2's search ends when `PATIENCE` * `NUM_BEAMS` hypotheses are complete
PATIENCE = 2
# value of CTranslate2's length penalty that comes nearest to our length penalty with `ALPHA`
NEAREST_PENALTY = 0.5
# nearly 0, because with 0 CTranslate2's search ends with its first hypothesis
NO_PENALTY = 1e-6


class Engines:
    """Translations of a model and of its exports.

    Args:
        run: Run folder, model folder or Hub name.
        folder: Folder for the exports.
    """

    def __init__(self, run: str, folder: Path):
        self.model, self.tokenizer = load_run(run)
        self.pipeline = TranslationPipeline(self.model, self.tokenizer)
        self.folder = folder

    def ours(self, texts: list[str], **search: float | None) -> list[str]:
        """Translate with this package.

        Args:
            texts: Sentences.
            search: Settings of `generate` that differ from the paper's beam search.

        Returns:
            Translations.
        """
        paper_search = {"num_beams": NUM_BEAMS, "length_penalty_alpha": ALPHA}
        # the other engines have no `max_extra_tokens`, the limit that depends on the source
        length_limits = {"max_new_tokens": MAX_NEW_TOKENS, "max_extra_tokens": None}
        return list(
            translate_lines(self.pipeline, texts, **{**paper_search, **length_limits, **search})
        )

    def ctranslate2(self, texts: list[str], quantization: str, **search: float) -> list[str]:
        """Translate with CTranslate2.

        Args:
            texts: Sentences.
            quantization: Type of the stored weights.
            search: Settings of CTranslate2's search. Without settings, our length penalty ranks the
                hypotheses of CTranslate2's beam search.

        Returns:
            Translations.
        """
        folder = self.folder / quantization
        if not folder.exists():
            to_ctranslate2(self.model, self.tokenizer, folder, quantization)
        translator = ctranslate2.Translator(str(folder), intra_threads=torch.get_num_threads())
        search_settings = search or {
            "beam_size": NUM_BEAMS,
            "num_hypotheses": PATIENCE * NUM_BEAMS,
            "patience": PATIENCE,
            "length_penalty": NO_PENALTY,
        }
        sources = [
            self.tokenizer.convert_ids_to_tokens(self.tokenizer(text).input_ids) for text in texts
        ]
        results = translator.translate_batch(
            sources, return_scores=True, max_decoding_length=MAX_NEW_TOKENS, **search_settings
        )
        best_hypotheses = [result.hypotheses[0] for result in results]
        if not search:
            best_hypotheses = [
                max(
                    zip(result.scores, result.hypotheses, strict=True),
                    # our length penalty also counts the end token
                    key=lambda scored: scored[0] / gnmt_length_penalty(len(scored[1]) + 1, ALPHA),
                )[1]
                for result in results
            ]
        return [
            self._decode(self.tokenizer.convert_tokens_to_ids(tokens)) for tokens in best_hypotheses
        ]

    def marian(self, texts: list[str], **search: float | str) -> list[str]:
        """Translate with transformers' Marian.

        Args:
            texts: Sentences.
            search: Settings of `generate`.

        Returns:
            Translations.
        """
        folder = self.folder / "marian"
        if not folder.exists():
            to_marian(self.model, self.tokenizer, folder)
        model: PreTrainedModel = MarianMTModel.from_pretrained(folder).eval()
        # the export has other token ids, so use the exported tokenizer
        tokenizer = AutoTokenizer.from_pretrained(folder)
        translations = []
        for batch in self._batches(texts, tokenizer):
            with torch.no_grad():
                ids = model.generate(**batch, max_length=MAX_NEW_TOKENS + 1, **search)
                translations += tokenizer.batch_decode(ids, skip_special_tokens=True)
        return list(map(one_line, translations))

    def onnx(self, texts: list[str]) -> list[str]:
        """Translate with ONNX Runtime, by greedy search.

        Args:
            texts: Sentences.

        Returns:
            Translations.
        """
        folder = self.folder / "onnx"
        to_onnx(self.model, self.tokenizer, folder)
        return self._search_greedily(
            texts,
            folder / ENCODER_FILE,
            folder / DECODER_FILE,
            folder / DECODER_WITH_PAST_FILE,
        )

    def transformersjs(self, texts: list[str], ending: str) -> list[str]:
        """Translate with the graphs for transformers.js in ONNX Runtime, by greedy search.

        Args:
            texts: Sentences.
            ending: End of the file names, "" for float32 or "_quantized" for int8.

        Returns:
            Translations.
        """
        folder = self.folder / "transformersjs"
        if not folder.exists():
            to_transformersjs(self.model, self.tokenizer, folder)
        decoder = folder / "onnx" / f"decoder_model_merged{ending}.onnx"
        return self._search_greedily(
            texts, folder / "onnx" / f"encoder_model{ending}.onnx", decoder, decoder
        )

    def _search_greedily(self, texts: list[str], *graph_paths: Path) -> list[str]:
        encoder, decoder, decoder_with_past = (
            onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            for path in graph_paths
        )
        end_id = self.model.config.eos_token_id
        token_ids = []
        for batch in self._batches(texts, self.tokenizer):
            ids, mask = (batch[name].numpy() for name in ("input_ids", "attention_mask"))
            inputs = {
                **run_graph(encoder, {"input_ids": ids, "attention_mask": mask}),
                "encoder_attention_mask": mask,
                "input_ids": np.full((len(ids), 1), self.model.config.decoder_start_token_id),
            }
            inputs["encoder_hidden_states"] = inputs.pop("last_hidden_state")
            decoder_session, new_ids = decoder, list[np.ndarray]()
            while len(new_ids) < MAX_NEW_TOKENS:
                outputs = run_graph(decoder_session, inputs)
                new_ids.append(outputs.pop("logits")[:, -1:].argmax(-1))
                if (np.concatenate(new_ids, axis=1) == end_id).any(axis=1).all():
                    break
                decoder_session, inputs["input_ids"] = decoder_with_past, new_ids[-1]
                inputs |= {
                    name.replace("present", "past_key_values"): state
                    for name, state in outputs.items()
                }
            token_ids += np.concatenate(new_ids, axis=1).tolist()
        return [self._decode(ids) for ids in token_ids]

    @staticmethod
    def _batches(
        texts: list[str], tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[dict[str, torch.Tensor]]:
        for start in range(0, len(texts), SENTENCES_PER_BATCH):
            batch_texts = texts[start : start + SENTENCES_PER_BATCH]
            yield tokenizer(batch_texts, padding=True, return_tensors="pt").data

    def _decode(self, ids: list[int]) -> str:
        end_id = self.model.config.eos_token_id
        ids = ids[: ids.index(end_id)] if end_id in ids else ids
        return one_line(self.tokenizer.decode(ids, skip_special_tokens=True))


def sections(run: str, texts: list[str]) -> Iterator[Section]:
    """Translate the same sentences with each engine, and count equal translations.

    Args:
        run: Run folder, model folder or Hub name.
        texts: Sentences.

    Yields:
        One section.
    """
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(run, Path(folder))
        beam_translations = engines.ours(texts)
        greedy_translations = engines.ours(texts, num_beams=1, length_penalty_alpha=None)
        unpenalized_translations = engines.ours(texts, length_penalty_alpha=0.0)
        ctranslate2_search = {
            "beam_size": NUM_BEAMS,
            "patience": PATIENCE,
            "length_penalty": NEAREST_PENALTY,
        }
        marian_search: dict[str, Any] = {
            "num_beams": NUM_BEAMS,
            "length_penalty": 0.0,
            "early_stopping": "never",
        }
        comparisons = [
            (
                "CTranslate2 float32",
                "ours",
                beam_translations,
                engines.ctranslate2(texts, "float32"),
            ),
            (
                "CTranslate2 float32",
                "its own",
                beam_translations,
                engines.ctranslate2(texts, "float32", **ctranslate2_search),
            ),
            (
                "CTranslate2 float32",
                "greedy",
                greedy_translations,
                engines.ctranslate2(texts, "float32", beam_size=1),
            ),
            (
                "CTranslate2 float16",
                "ours",
                beam_translations,
                engines.ctranslate2(texts, "float16"),
            ),
            ("CTranslate2 int8", "ours", beam_translations, engines.ctranslate2(texts, "int8")),
            ("ONNX Runtime", "greedy", greedy_translations, engines.onnx(texts)),
            (
                "transformers.js float32",
                "greedy",
                greedy_translations,
                engines.transformersjs(texts, ""),
            ),
            (
                "transformers.js int8",
                "greedy",
                greedy_translations,
                engines.transformersjs(texts, "_quantized"),
            ),
            ("Marian", "greedy", greedy_translations, engines.marian(texts, num_beams=1)),
            (
                "Marian",
                "no length penalty",
                unpenalized_translations,
                engines.marian(texts, **marian_search),
            ),
        ]
    rows = [
        (engine, search, sum(map(str.__eq__, expected, actual)), len(texts))
        for engine, search, expected, actual in comparisons
    ]
    yield Section(
        name="exports",
        title="Equal translations of a model and its exports",
        finding=f"The same {len(texts):,} sentences, {NUM_BEAMS} beams and a length penalty of "
        f"{ALPHA}, greedy search, or beams without a penalty. In the rows with our search, "
        "CTranslate2's hypotheses are ranked by our length penalty; its own penalty is another "
        f"formula. {rows[0][2]:,} are then equal in float32, {rows[4][2]:,} with int8 weights. The "
        "graphs for transformers.js are computed by ONNX Runtime.",
        columns=("engine", "search", "equal", "sentences"),
        rows=rows,
    )


def _measure(argv: list[str]):
    parser = run_parser("exports", "Count equal translations of a model and its exports.")
    parser.add_argument("--num_sentences", type=int, help="number of sentences (default: all)")
    flags = parser.parse_args(argv)
    if flags.num_sentences is not None and flags.num_sentences < 1:
        raise ValueError(f"num_sentences must be at least 1, got {flags.num_sentences}.")
    texts, _ = texts_of_run(Path(flags.run), flags.split, flags.num_sentences)
    show_study(sections(flags.run, texts), "Exported models", flags.output_dir)


# `main` shows an error as one sentence, and returns the exit status
main = partial(run_command, _measure)


if __name__ == "__main__":
    sys.exit(main())
