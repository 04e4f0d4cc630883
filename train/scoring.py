"""How good translations are: BLEU, chrF, the paper's own way to count BLEU, COMET. Section 6.1."""

import importlib.metadata
import json
import logging
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sacremoses
import torch
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from sacremoses.corpus import NonbreakingPrefixes

from ..configuration_vanilla_transformer import closest_name
from .config import bleu_tokenizer_of

logger = logging.getLogger(__name__)

COMET_PROGRAM = "comet-score"
COMET_MODEL = "Unbabel/wmt22-comet-da"
# for languages that separate words by spaces
DEFAULT = "13a"
# text that is already tokenized is compared as it is
NOT_TOKENIZED_AGAIN = "none"
# bytes, as in the script, where the half of a letter can be all that stands between two hyphens
HYPHEN = re.compile(rb"(\S)-(\S)")


def score_translations(
    translations: Sequence[str],
    references: Sequence[str],
    bleu_tokenizer: str | None = None,
    target_lang: str | None = None,
) -> dict[str, Any]:
    """Compare translations with references, by sacreBLEU.

    Args:
        translations: What the model said.
        references: What a person said.
        bleu_tokenizer: Tokenizer of sacreBLEU, "none" for text that is already tokenized; by
            default the one for `target_lang`.
        target_lang: Their language, to count `compound_bleu` as well where Moses knows it and
            spaces separate its words.

    Returns:
        `bleu` and `chrf` with their signatures, `exact_match` between 0 and 1, and `sentences`.

    Raises:
        ValueError: If there is nothing to compare, not as many of both, or no such tokenizer or
            not what it needs.
    """
    if len(translations) != len(references) or not references:
        raise ValueError(
            "there must be one translation for each of one or more references, "
            f"got {len(translations)} for {len(references)}."
        )
    own_tokenizer = bleu_tokenizer_of(target_lang)
    bleu_tokenizer = bleu_tokenizer or own_tokenizer
    refuse_bleu_tokenizer(bleu_tokenizer)
    has_words = own_tokenizer == DEFAULT
    if bleu_tokenizer == DEFAULT and not has_words:
        logger.warning(
            "BLEU with the tokenizer %s takes whole sentences of %s for words: give "
            "--bleu_tokenizer %s.",
            DEFAULT,
            target_lang,
            own_tokenizer,
        )
    scores: dict[str, Any] = {"sentences": len(references)}
    for name, metric in _metrics(bleu_tokenizer).items():
        scores[name] = metric.corpus_score(translations, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    matches = sum(map(str.__eq__, translations, references))
    scores["exact_match"] = matches / len(references)
    known = NonbreakingPrefixes().available_langs.values()
    if has_words and target_lang in known and bleu_tokenizer != NOT_TOKENIZED_AGAIN:
        score, signature = compound_bleu(translations, references, target_lang)
        scores |= {"compound_bleu": score, "compound_bleu_signature": signature}
    return scores


def refuse_bleu_tokenizer(name: str) -> None:
    """Refuse a tokenizer that sacreBLEU does not have.

    Args:
        name: Of the tokenizer.

    Raises:
        ValueError: If there is no such tokenizer.
    """
    if name not in BLEU.TOKENIZERS:
        raise ValueError(
            f"bleu_tokenizer must be one of {', '.join(BLEU.TOKENIZERS)}, got {name!r}."
            + closest_name(name, list(BLEU.TOKENIZERS))
        )


def _metrics(bleu_tokenizer: str) -> dict[str, BLEU | CHRF]:
    # a sentence that ends in " ." is no sign of a mistake where the text comes tokenized
    is_tokenized = bleu_tokenizer == NOT_TOKENIZED_AGAIN
    try:
        bleu = BLEU(tokenize=bleu_tokenizer, force=is_tokenized)
    except (RuntimeError, ImportError) as error:
        raise ValueError(
            f"bleu_tokenizer must have what it needs installed, got {bleu_tokenizer!r}: "
            f"{' '.join(str(error).split())}"
        ) from error
    return {"bleu": bleu, "chrf": CHRF()}


def compound_bleu(
    translations: Sequence[str], references: Sequence[str], language: str
) -> tuple[float, str]:
    """BLEU as the paper counted it: on Moses' tokens, with compounds split at their hyphens.

    What tensor2tensor's get_ende_bleu.sh computes. It is higher than sacreBLEU's on the same text,
    and not to be compared with it.

    Args:
        translations: What the model said.
        references: What a person said.
        language: Of both, one that Moses knows.

    Returns:
        The score, and what says how it was counted.
    """
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    sides = [split_compounds(side, language) for side in (translations, references)]
    score = metric.corpus_score(sides[0], [sides[1]]).score
    tokens = f"tok:moses-{language}-compounds"
    signature = str(metric.get_signature()).replace("tok:none", tokens)
    return score, f"{signature}|sacremoses:{importlib.metadata.version('sacremoses')}"


def split_compounds(texts: Sequence[str], language: str) -> list[str]:
    """Tokenize as Moses does, and split compounds at their hyphens.

    Args:
        texts: Sentences.
        language: One that Moses knows.

    Returns:
        Their tokens, separated by spaces.
    """
    normalizer = sacremoses.MosesPunctNormalizer()
    tokenizer = sacremoses.MosesTokenizer(language)
    tokenized = (
        tokenizer.tokenize(normalizer.replace_unicode_punct(text), return_str=True)
        for text in texts
    )
    return [HYPHEN.sub(rb"\1 ##AT##-##AT## \2", text.encode()).decode() for text in tokenized]


def comet_program() -> str:
    """Find the program that computes COMET.

    Returns:
        Its path.

    Raises:
        ValueError: If it is not installed.
    """
    program = shutil.which(COMET_PROGRAM)
    if program is None:
        raise ValueError(
            f"comet needs the program {COMET_PROGRAM}, got none: `pipx install unbabel-comet`; it "
            "needs older libraries than this package, and so an environment of its own."
        )
    return program


def comet_score(
    sources: Sequence[str],
    translations: Sequence[str],
    references: Sequence[str],
    model: str = COMET_MODEL,
) -> float:
    """Let COMET judge translations.

    Args:
        sources: What was translated.
        translations: What the model said.
        references: What a person said.
        model: One of COMET's models, a Hub name or a checkpoint.

    Returns:
        The mean over the sentences.

    Raises:
        ValueError: If COMET is not installed, or ends with an error.
    """
    sides = {"sources": sources, "translations": translations, "references": references}
    with tempfile.TemporaryDirectory() as folder:
        command = [comet_program(), "--model", model, "--only_system", "--quiet"]
        command += ["--gpus", str(int(torch.cuda.is_available()))]
        for name, lines in sides.items():
            path = Path(folder, name)
            # a sentence a line, whatever COMET takes for the end of one
            text = "".join(" ".join(line.split()) + "\n" for line in lines)
            path.write_text(text, encoding="utf-8")
            command += [f"--{name}", str(path)]
        out = Path(folder, "scores.json")
        command += ["--to_json", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or "nothing said").split("\n")[-1]
            raise ValueError(
                f"{COMET_PROGRAM} must end well, got exit {done.returncode}: {last.strip()}"
            )
        (sentences,) = json.loads(out.read_text(encoding="utf-8")).values()
    return sum(sentence["COMET"] for sentence in sentences) / len(sentences)


def compare_translations(
    translations: Sequence[str],
    others: Sequence[str],
    references: Sequence[str],
    bleu_tokenizer: str = "13a",
) -> dict[str, dict[str, Any]]:
    """Whether one model is better than another, by paired bootstrap resampling.

    Args:
        translations: What the model said.
        others: What the other model said.
        references: What a person said.
        bleu_tokenizer: Of sacreBLEU.

    Returns:
        For `bleu` and `chrf`: `score` and `other`, each with the half width of its 95% confidence
        interval as `ci` and `other_ci`; `p_value`, the probability of so large a difference between
        equal models; `signature`, which says how many samples were drawn from which seed.
    """
    metrics = _metrics(bleu_tokenizer)
    systems = [("other", others), ("this", translations)]
    signatures, results = PairedTest(systems, metrics, [references], test_type="bs")()
    comparison = {}
    # the test calls the metrics by names of its own
    for name, metric in zip(metrics, signatures, strict=True):
        other, this = results[metric]
        # the test counts larger differences alone, and would take equal models for different
        p_value = this.p_value if this.score != other.score else 1.0
        comparison[name] = {
            # some of them are numpy's
            "score": float(this.score),
            "ci": float(this.ci),
            "other": float(other.score),
            "other_ci": float(other.ci),
            "p_value": float(p_value),
            "signature": str(signatures[metric]),
        }
    return comparison
