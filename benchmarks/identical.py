"""Compare searches with a trained model: `python -m vanilla_transformer.benchmarks.identical RUN`.

The run must have trained a model class of transformers. The model translates the corpus of the run
twice: with the library's own modules, and on the inference engine. Both use the library's search.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batches_vanilla_transformer import batches_by_length
from ..console import run_command
from ..conversion.shared_weights import SharedConversion
from ..loading import load_run
from ..paper.study import Section, show_study
from .work import run_parser, texts_of_run

# settings of the library's search; "end" and "common" stand for the end token and a frequent token
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "beam 4": {"num_beams": 4},
    "beam 6, early stopping": {"num_beams": 6, "length_penalty": 0.6, "early_stopping": True},
    "beam 4, exhaustive": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
    "no repeated trigrams": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "forced end": {"num_beams": 4, "max_new_tokens": 12, "forced_eos_token_id": "end"},
    "forbidden token": {"num_beams": 4, "bad_words_ids": "common"},
    "forced first token": {"num_beams": 4, "forced_bos_token_id": "common"},
}
# rounding may swap two hypotheses whose scores differ by less
CLOSE_SCORES = 1e-4
# largest number of tokens in a translation
MAX_NEW_TOKENS = 100

# token ids and score of a translation
Translation = tuple[list[int], float]


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
) -> Iterator[tuple[str, list[tuple[Translation, Translation]]]]:
    """Translate the same sentences with the library's modules and on the engine.

    Args:
        model: Model of transformers that this package can convert.
        tokenizer: Tokenizer of the model.
        texts: Sentences.

    Yields:
        Name of each search, and for each sentence two translations: the library's and ours. A
        translation consists of token ids and a score: the sum of the log-probabilities divided by
        the length penalty.

    Raises:
        ValueError: If the engine cannot run the model.
    """
    conversion = SharedConversion(model)
    converted, reason = conversion.for_engine()
    if converted is None:
        raise ValueError(f"RUN must be a model that the inference engine runs, but {reason}.")
    token_ids = tokenizer(texts)["input_ids"]
    batches = batches_by_length(
        {index: len(source_ids) for index, source_ids in enumerate(token_ids)}, batch_size=32
    )
    for name, settings in SEARCHES.items():
        search = {"max_new_tokens": MAX_NEW_TOKENS, **settings}
        for field, value in settings.items():
            if value == "end":
                search[field] = model.config.eos_token_id
            elif value == "common":
                token = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("in")[0])
                search[field] = [[token]] if field == "bad_words_ids" else token
        pairs: dict[int, tuple[Translation, Translation]] = {}
        for batch in tqdm(batches, desc=name, leave=False):
            inputs = tokenizer.pad(
                {"input_ids": [token_ids[batch_index] for batch_index in batch]},
                return_tensors="pt",
            )
            translations_by_model = [
                _search(searched_model, model, dict(inputs), search)
                for searched_model in (model, converted)
            ]
            pairs |= dict(zip(batch, zip(*translations_by_model, strict=True), strict=True))
        yield name, [pairs[index] for index in range(len(texts))]


def _search(
    searched_model: PreTrainedModel, model: PreTrainedModel, inputs: dict[str, Tensor], search: dict
) -> list[Translation]:
    with torch.no_grad():
        output = searched_model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_length=None,
            return_dict_in_generate=True,
            output_scores=True,
            **search,
            **({} if searched_model is model else {"engine": "required"}),
        )
    if search["num_beams"] > 1:
        scores = output.sequences_scores
    else:
        token_scores = model.compute_transition_scores(
            output.sequences, output.scores, normalize_logits=True
        )
        is_token = output.sequences[:, 1:] != model.config.pad_token_id
        scores = token_scores.masked_fill(~is_token, 0.0).sum(dim=1)
    end_id, pad_id = model.config.eos_token_id, model.config.pad_token_id
    translations = []
    for ids, score in zip(output.sequences[:, 1:].tolist(), scores.tolist(), strict=True):
        # padding follows the end token; searches never generate the padding token
        length = ids.index(end_id) + 1 if end_id in ids else len(ids)
        translations.append(([token for token in ids[:length] if token != pad_id], score))
    return translations


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Compare the translations of all `SEARCHES`.

    Args:
        flags: Flags of the command line.

    Yields:
        One section.
    """
    texts, _ = texts_of_run(Path(flags.run), flags.split, flags.num_sentences)
    model, tokenizer = load_run(flags.run)
    rows, different_pairs = [], {}
    for name, pairs in compare(model.eval(), tokenizer, texts):
        score_gaps = [abs(theirs - ours) for (_, theirs), (_, ours) in pairs]
        different_indices = [
            index for index, (theirs, ours) in enumerate(pairs) if theirs[0] != ours[0]
        ]
        num_close = sum(score_gaps[index] < CLOSE_SCORES for index in different_indices)
        largest_gap = max(score_gaps)
        different_pairs[name] = {index: pairs[index] for index in different_indices}
        num_equal, num_other = (
            len(texts) - len(different_indices),
            len(different_indices) - num_close,
        )
        rows.append((name, num_equal, num_close, num_other, largest_gap))
    yield Section(
        name="identical",
        title=f"{type(model).__name__} on the engine",
        finding=f"{len(texts):,} sentences of the split {flags.split} in float32, in batches of "
        f"32. Close: translations that differ, and whose scores differ by less than "
        f"{CLOSE_SCORES:g}. The score of a translation is its log-probability divided by the "
        "length penalty.",
        columns=("search", "identical", "close", "other", "largest difference of scores"),
        rows=rows,
        numbers={"different": different_pairs},
    )


def _compare(argv: list[str]):
    parser = run_parser("identical", "Compare the library's search on its modules and the engine.")
    parser.add_argument(
        "--num_sentences", type=int, default=1000, help="number of sentences (default: %(default)s)"
    )
    flags = parser.parse_args(argv)
    if flags.num_sentences < 1:
        raise ValueError(f"num_sentences must be at least 1, got {flags.num_sentences}.")
    show_study(sections(flags), "The library's search on the engine", flags.output_dir)


# `main` shows an error as one sentence, and returns the exit status
main = partial(run_command, _compare)


if __name__ == "__main__":
    sys.exit(main())
