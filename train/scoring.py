"""Score translations: BLEU, chrF, BLEU as the paper computes it, and COMET. Section 6.1."""

import importlib.metadata
import json
import logging
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from operator import contains
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Score
from sacrebleu.significance import PairedTest

from ..configuration_vanilla_transformer import closest_name
from .config import bleu_tokenizer_of

logger = logging.getLogger(__name__)

COMET_PROGRAM = "comet-score"
COMET_MODEL = "Unbabel/wmt22-comet-da"
# tokenizer of sacreBLEU for languages that separate words by spaces
DEFAULT_TOKENIZER = "13a"
# tokenizer for text that is already tokenized
ALREADY_TOKENIZED = "none"
# samples of the bootstrap, as many as sacreBLEU draws by default in a comparison
BOOTSTRAP_SAMPLES = 1000
# largest number of sentences that get confidence intervals: sacreBLEU keeps all samples in memory,
# 100 kB for each sentence
MOST_RESAMPLED = 20_000
# as in the original script, the pattern matches bytes. Therefore in `a-é-b` both hyphens are split,
# because `é` has two bytes and can be in two matches, and in `a-b-c` only the first one is
HYPHENATED_LETTERS = re.compile(rb"(\S)-(\S)")


def score_translations(
    translations: Sequence[str],
    references: Sequence[str],
    bleu_tokenizer: str | None = None,
    target_lang: str | None = None,
    more_references: Sequence[Sequence[str]] = (),
) -> dict[str, Any]:
    """Score translations against references with sacreBLEU.

    Args:
        translations: Translations of the model.
        references: Reference translations.
        bleu_tokenizer: Tokenizer of sacreBLEU, "none" for text that is already tokenized; by
            default the tokenizer for `target_lang`.
        target_lang: Target language. `compound_bleu` is computed in addition if Moses supports the
            language and spaces separate its words.
        more_references: Further reference translations of the same sentences.

    Returns:
        `bleu` and `chrf`, each with its signature; `exact_match`, the share of translations that
        equal one of their references, from 0 to 1; `empty`, the number of empty translations;
        `sentences`, the number of all sentences.

    Raises:
        ValueError: If there are no references, the numbers of translations and references differ,
            or the tokenizer is unknown, not installed or cannot be downloaded.
    """
    if len(translations) != len(references) or not references:
        raise ValueError(
            "references must not be empty, and must be as many as the translations, "
            f"got {len(translations)} translations for {len(references)} references."
        )
    language_tokenizer = bleu_tokenizer_of(target_lang)
    bleu_tokenizer = bleu_tokenizer or language_tokenizer
    refuse_bleu_tokenizer(bleu_tokenizer)
    has_words = language_tokenizer == DEFAULT_TOKENIZER
    if bleu_tokenizer == DEFAULT_TOKENIZER and not has_words:
        logger.warning(
            "BLEU with the tokenizer %s treats whole sentences in %s as words: use "
            "--bleu_tokenizer %s.",
            DEFAULT_TOKENIZER,
            target_lang,
            language_tokenizer,
        )
    scores: dict[str, Any] = {"sentences": len(references)}
    all_references = [references, *more_references]
    for name, metric in _metrics(bleu_tokenizer).items():
        scores[name] = metric.corpus_score(translations, all_references).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    num_matches = sum(map(contains, zip(*all_references, strict=True), translations))
    scores["exact_match"] = num_matches / len(references)
    scores["empty"] = sum(not translation.strip() for translation in translations)
    if (
        has_words
        and target_lang is not None
        and bleu_tokenizer != ALREADY_TOKENIZED
        and _moses_supports(target_lang)
    ):
        score, signature = compound_bleu(translations, references, target_lang, more_references)
        scores |= {"compound_bleu": score, "compound_bleu_signature": signature}
    return scores


def confidence_intervals(
    translations: Sequence[str],
    references: Sequence[Sequence[str]],
    bleu_tokenizer: str = DEFAULT_TOKENIZER,
) -> dict[str, Any] | None:
    """Estimate 95% confidence intervals of BLEU and chrF by sacreBLEU's bootstrap resampling.

    The seed is that of sacreBLEU, so that the same translations get the same intervals again.

    Args:
        translations: Translations of the model.
        references: One or more lists of reference translations.
        bleu_tokenizer: Tokenizer of sacreBLEU.

    Returns:
        For `bleu` and `chrf`: `mean` over the samples, and `ci`, half the width of the interval
        around this mean; `signature`, with the number of samples and the seed. None for more than
        `MOST_RESAMPLED` sentences.
    """
    if len(translations) > MOST_RESAMPLED:
        return None
    intervals: dict[str, Any] = {}
    metrics: dict[str, Any] = dict(_metrics(bleu_tokenizer))
    for name, metric in metrics.items():
        metric._compute_score_from_stats = partial(_plain_score, metric._compute_score_from_stats)
        score = metric.corpus_score(translations, references, n_bootstrap=BOOTSTRAP_SAMPLES)
        intervals[name] = {"mean": float(score._mean), "ci": float(score._ci)}
        signature = metric.get_signature().info
        intervals["signature"] = f"bs:{signature['bs']}|seed:{signature['seed']}"
    return intervals


def _plain_score(compute: Callable[[Any], Score], stats: Any) -> Score:
    """Return the score of a sample as a float: sacreBLEU cannot average numpy's floats and 0.0."""
    score = compute(stats)
    score.score = float(score.score)
    return score


def refuse_bleu_tokenizer(name: str | None) -> None:
    """Refuse a tokenizer that sacreBLEU does not have.

    Args:
        name: Name of the tokenizer.

    Raises:
        ValueError: If sacreBLEU has no such tokenizer.
    """
    if name not in BLEU.TOKENIZERS:
        raise ValueError(
            f"bleu_tokenizer must be one of {', '.join(BLEU.TOKENIZERS)}, got {name!r}."
            + closest_name(str(name), list(BLEU.TOKENIZERS))
        )


def _metrics(bleu_tokenizer: str) -> dict[str, BLEU | CHRF]:
    # `force` turns off a warning about sentences that end in " .", as all tokenized text does
    is_tokenized = bleu_tokenizer == ALREADY_TOKENIZED
    try:
        bleu = BLEU(tokenize=bleu_tokenizer, force=is_tokenized)
    except (RuntimeError, ImportError) as error:
        raise ValueError(
            f"bleu_tokenizer must have its packages installed, got {bleu_tokenizer!r}: "
            f"{' '.join(str(error).split())}"
        ) from error
    # sacreBLEU downloads some tokenizers; for a wrong certificate it logs the reason and exits
    except (OSError, SystemExit) as error:
        reason = "see above" if isinstance(error, SystemExit) else " ".join(str(error).split())
        raise ValueError(
            f"the tokenizer of bleu_tokenizer, {bleu_tokenizer!r}, cannot be downloaded or read by "
            f"sacreBLEU: {reason}."
        ) from error
    return {"bleu": bleu, "chrf": CHRF()}


def compound_bleu(
    translations: Sequence[str],
    references: Sequence[str],
    language: str,
    more_references: Sequence[Sequence[str]] = (),
) -> tuple[float, str]:
    """Compute BLEU as the paper does: on Moses tokens, with compounds split at their hyphens.

    This is the score of get_ende_bleu.sh in tensor2tensor. It is higher than sacreBLEU's BLEU on
    the same text; the two cannot be compared.

    Args:
        translations: Translations of the model.
        references: Reference translations.
        language: Target language, which Moses must support.
        more_references: Further reference translations of the same sentences.

    Returns:
        Score and signature.
    """
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    split_translations, *split_references = (
        split_compounds(side, language) for side in (translations, references, *more_references)
    )
    score = metric.corpus_score(split_translations, split_references).score
    tokenizer_signature = f"tok:moses-{language}-compounds"
    signature = str(metric.get_signature()).replace("tok:none", tokenizer_signature)
    return score, f"{signature}|sacremoses:{importlib.metadata.version('sacremoses')}"


def _moses_supports(language: str) -> bool:
    # importing sacremoses takes about a second
    from sacremoses.corpus import NonbreakingPrefixes

    return language in NonbreakingPrefixes().available_langs.values()


def split_compounds(texts: Sequence[str], language: str) -> list[str]:
    """Tokenize with the Moses tokenizer, and split compounds at their hyphens.

    Args:
        texts: Sentences.
        language: Language that Moses supports.

    Returns:
        Tokens of each sentence, separated by spaces.
    """
    import sacremoses

    normalizer = sacremoses.MosesPunctNormalizer()
    tokenizer = sacremoses.MosesTokenizer(language)
    tokenized = (
        tokenizer.tokenize(normalizer.replace_unicode_punct(text), return_str=True)
        for text in texts
    )
    return [
        HYPHENATED_LETTERS.sub(rb"\1 ##AT##-##AT## \2", text.encode()).decode()
        for text in tokenized
    ]


def comet_program() -> str:
    """Find the program that computes COMET.

    Returns:
        Path of the program.

    Raises:
        ValueError: If the program is not installed.
    """
    program = shutil.which(COMET_PROGRAM)
    if program is None:
        raise ValueError(
            f"comet needs the program {COMET_PROGRAM}, which is not installed: `pipx install "
            "unbabel-comet`. COMET needs older libraries than this package, so it needs its own "
            "environment."
        )
    return program


def comet_score(
    sources: Sequence[str],
    translations: Sequence[str],
    references: Sequence[str],
    model: str = COMET_MODEL,
) -> float:
    """Score translations with COMET.

    Args:
        sources: Source sentences.
        translations: Translations of the model.
        references: Reference translations.
        model: COMET model, a Hub name or a checkpoint.

    Returns:
        Mean score of the sentences.

    Raises:
        ValueError: If COMET is not installed, or ends with an error.
    """
    texts_of_side = {"sources": sources, "translations": translations, "references": references}
    with tempfile.TemporaryDirectory() as folder:
        command = [comet_program(), "--model", model, "--only_system", "--quiet"]
        command += ["--gpus", str(int(torch.cuda.is_available()))]
        for name, lines in texts_of_side.items():
            path = Path(folder, name)
            # one sentence on each line, without other characters that COMET could split at
            text = "".join(" ".join(line.split()) + "\n" for line in lines)
            path.write_text(text, encoding="utf-8")
            command += [f"--{name}", str(path)]
        scores_path = Path(folder, "scores.json")
        command += ["--to_json", str(scores_path)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            last_line = (process.stderr.strip() or "no message").split("\n")[-1]
            raise ValueError(
                f"{COMET_PROGRAM} failed with exit status {process.returncode}: {last_line.strip()}"
            )
        (sentence_scores,) = json.loads(scores_path.read_text(encoding="utf-8")).values()
    return sum(sentence["COMET"] for sentence in sentence_scores) / len(sentence_scores)


def compare_translations(
    translations: Sequence[str],
    others: Sequence[str],
    references: Sequence[str],
    bleu_tokenizer: str = "13a",
    more_references: Sequence[Sequence[str]] = (),
) -> dict[str, dict[str, Any]]:
    """Compare two models by paired bootstrap resampling.

    Args:
        translations: Translations of the model.
        others: Translations of the other model.
        references: Reference translations.
        bleu_tokenizer: Tokenizer of sacreBLEU.
        more_references: Further reference translations of the same sentences.

    Returns:
        For `bleu` and `chrf`: `score` and `other`, each with the half width of its 95% confidence
        interval as `ci` and `other_ci`; `p_value`, the probability of a difference of at least this
        size between equal models; `signature`, with the number of samples and the seed.
    """
    metrics = _metrics(bleu_tokenizer)
    systems = [("other", others), ("this", translations)]
    signatures, results = PairedTest(
        systems, metrics, [references, *more_references], test_type="bs"
    )()
    comparison = {}
    # the test has its own names for the metrics, in the same order
    for name, metric in zip(metrics, signatures, strict=True):
        both_results: Any = results[metric]
        other_result, own_result = both_results
        # for two equal systems, the test finds no sample with a larger difference, and would call
        # their difference of 0 significant
        p_value = own_result.p_value if own_result.score != other_result.score else 1.0
        comparison[name] = {
            # some values are numpy scalars, which json cannot write
            "score": float(own_result.score),
            "ci": float(own_result.ci),
            "other": float(other_result.score),
            "other_ci": float(other_result.ci),
            "p_value": float(p_value),
            "signature": str(signatures[metric]),
        }
    return comparison
