"""Scores of translations, compared with hand calculation and other programs. Section 6.1."""

import json
import math
import random
import shutil
import stat
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import train_toys
from sacrebleu.metrics import BLEU, CHRF

from vanilla_transformer.train import config, scoring
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.scoring import (
    comet_score,
    compare_translations,
    compound_bleu,
    confidence_intervals,
    score_translations,
    split_compounds,
)


def test_equal_translations_score_100_and_match():
    texts = ["Das ist eine ganz gute Sache .", "Noch ein Satz mit vielen Worten ."]
    scores = score_translations(texts, texts, target_lang="de")
    for name in ("bleu", "chrf", "compound_bleu"):
        assert scores[name] == pytest.approx(100)
    assert scores["exact_match"] == 1
    assert score_translations([texts[0], "Nein ."], texts)["exact_match"] == 0.5


def test_text_that_is_already_tokenized_is_not_tokenized_again():
    scores = score_translations(["a-b c d e"], ["a-b c d e"], bleu_tokenizer="none")
    assert "tok:none" in scores["bleu_signature"]
    with pytest.raises(ValueError, match="bleu_tokenizer must be one of"):
        score_translations(["a"], ["a"], bleu_tokenizer="13b")


CHINESE = ["今天天气很好\uff0c我们去公园。", "火车十点离开柏林。", "他昨天没有来上班。"]
NEARLY = ["今天天气很好\uff0c我们去公园玩。", "火车十点离开柏林。", "他昨天没来上班。"]


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [
        ("zh", "zh"),
        ("zh-Hant", "zh"),
        ("zho_Hans", "zh"),
        ("cmn", "zh"),
        ("ja", "char"),
        ("ko-KR", "char"),
        ("th", "char"),
        ("de", "13a"),
        ("cs_CZ", "13a"),
        (None, "13a"),
    ],
)
def test_a_language_has_the_tokenizer_that_finds_its_words(language, tokenizer, monkeypatch):
    # the packages for Japanese and Korean may not be installed
    monkeypatch.setattr(config, "BLEU_MODULES", {"ja-mecab": ("none",), "ko-mecab": ("none",)})
    scores = score_translations(NEARLY, CHINESE, target_lang=language)
    assert f"|tok:{tokenizer}|" in scores["bleu_signature"]
    expected = BLEU(tokenize=tokenizer).corpus_score(NEARLY, [CHINESE]).score
    assert scores["bleu"] == expected
    assert (expected > 60) == (tokenizer != "13a")
    assert ("compound_bleu" in scores) == (language == "de")
    if language is not None:
        assert TrainConfig(dataset="x", target_lang=language).bleu_tokenizer == tokenizer


def test_japanese_and_korean_use_their_tokenizers_if_installed(monkeypatch):
    monkeypatch.setattr(config, "BLEU_MODULES", {"ja-mecab": ("json",), "ko-mecab": ("json",)})
    assert config.bleu_tokenizer_of("ja") == "ja-mecab"
    assert config.bleu_tokenizer_of("kor") == "ko-mecab"


def test_a_tokenizer_that_finds_no_words_causes_a_warning(caplog):
    scores = score_translations(NEARLY, CHINESE, "13a", "zh")
    assert "|tok:13a|" in scores["bleu_signature"]
    assert "treats whole sentences in zh as words: use --bleu_tokenizer zh" in caplog.text


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("Ein Rich-Text-Format.", "Ein Rich ##AT##-##AT## Text ##AT##-##AT## Format ."),
        # a letter between two hyphens matches only one of them
        ("a-b-c", "a ##AT##-##AT## b-c"),
        # except a letter of two bytes
        ("a-é-b", "a ##AT##-##AT## é ##AT##-##AT## b"),
        ("von 10-20 bis - ja", "von 10 ##AT##-##AT## 20 bis - ja"),
        ("z. B. Dr. Müller, „heute“ …", "z. B. Dr. Müller , „ heute &quot; ..."),
        ("Ende\uff08\uff11\uff09", "Ende ( 1 )"),
    ],
)
def test_compounds_are_split_as_the_paper_did(text, split):
    assert split_compounds([text], "de") == [split]


@pytest.mark.skipif(shutil.which("perl") is None, reason="needs perl")
def test_hyphens_are_split_as_by_the_script_of_the_paper():
    rng = random.Random(4)
    letters = ["a", "é", "-", "-", " ", "文", "1"]
    lines = ["".join(rng.choices(letters, k=rng.randint(1, 12))) for _ in range(300)]
    # what the tokenizer does to them comes first either way
    tokenized = [line.replace(" ##AT##-##AT## ", "-") for line in split_compounds(lines, "de")]
    script = r"s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g"
    done = subprocess.run(
        ["perl", "-ple", script],
        input="".join(f"{line}\n" for line in tokenized).encode(),
        capture_output=True,
        check=True,
    )
    split = split_compounds(lines, "de")
    assert done.stdout.decode().split("\n")[:-1] == split
    assert sum("##AT##" in line for line in split) > 100


def ngram_counts(translation, reference):
    """For one sentence, by order: n-grams of the translation, those of them that match; lengths."""
    words, wanted = translation.split(), reference.split()
    stats = [len(words), len(wanted)]
    for order in range(1, 5):
        grams, allowed = (
            Counter(tuple(side[i : i + order]) for i in range(len(side) - order + 1))
            for side in (words, wanted)
        )
        stats += [sum((grams & allowed).values()), sum(grams.values())]
    return stats


def bleu_of_counts(counts):
    """The equation of multi-bleu: no smoothing."""
    length, reference_length, *pairs = (sum(column) for column in zip(*counts, strict=True))
    precisions = [
        match / max(total, 1) for match, total in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    if min(precisions) == 0:
        return 0.0
    penalty = min(1.0, math.exp(1 - reference_length / length))
    return 100 * penalty * math.exp(sum(map(math.log, precisions)) / 4)


def noisy(rng, sentence, share):
    return " ".join(rng.choice(train_toys.WORDS) if rng.random() < share else w for w in sentence)


@pytest.fixture(scope="module")
def corpus():
    """References, and what a better and a worse model made of them."""
    rng = random.Random(7)
    sentences = [rng.choices([*train_toys.WORDS, "x-y", "U-Boot-Bau,"], k=11) for _ in range(40)]
    return [[noisy(rng, words, share) for words in sentences] for share in (0.0, 0.1, 0.35)]


def test_the_papers_bleu_is_multi_bleu_on_split_compounds(corpus):
    references, better, worse = corpus
    for translations in (better, worse):
        score, signature = compound_bleu(translations, references, "de")
        sides = [split_compounds(side, "de") for side in (translations, references)]
        expected = bleu_of_counts(list(map(ngram_counts, *sides)))
        assert 10 < score < 95
        assert score == pytest.approx(expected, rel=1e-6)
        # with compounds split it is another number
        plain = bleu_of_counts(list(map(ngram_counts, translations, references)))
        assert score != pytest.approx(plain, rel=1e-3)
    assert "tok:moses-de-compounds|smooth:none" in signature
    assert "|sacremoses:" in signature


def test_a_translation_without_a_match_of_four_words_scores_nothing():
    assert compound_bleu(["ein Hund im Haus"], ["ein Hund am Haus"], "de")[0] == 0


def test_the_papers_bleu_is_only_where_it_is_defined():
    texts = ["Das ist gut ."]
    assert "compound_bleu" in score_translations(texts, texts, target_lang="fr")
    assert "compound_bleu" not in score_translations(texts, texts)
    assert "compound_bleu" not in score_translations(texts, texts, target_lang="tlh")
    assert "compound_bleu" not in score_translations(texts, texts, "none", target_lang="de")


def test_two_models_are_compared_by_drawing_the_test_set_anew(corpus):
    references, better, worse = corpus
    comparison = compare_translations(better, worse, references)
    for name, result in comparison.items():
        assert result["score"] > result["other"] + 10, name
        assert result["p_value"] < 0.01
        assert result["ci"] > 0 < result["other_ci"]
        assert "|bs:1000|seed:" in result["signature"]
    assert list(comparison) == ["bleu", "chrf"]
    expected = score_translations(better, references)
    assert comparison["chrf"]["score"] == pytest.approx(expected["chrf"])
    same = compare_translations(better, better, references)["bleu"]
    assert (same["score"], same["ci"]) == (same["other"], same["other_ci"])
    assert same["p_value"] == 1


def test_a_comparison_can_be_kept(corpus):
    references, better, worse = corpus
    comparison = compare_translations(better, worse, references)
    assert json.loads(json.dumps(comparison)) == comparison


def test_the_probability_of_a_difference_is_its_share_among_samples(corpus):
    references, better, _ = corpus
    rng = random.Random(2)
    # a little worse, so that the probability is neither 0 nor 1
    other = [noisy(rng, line.split(), 0.05) for line in better]
    result = compare_translations(better, other, references, "none")["bleu"]
    counts = [list(map(ngram_counts, side, references)) for side in (better, other)]
    differences = []
    for _ in range(1000):
        drawn = rng.choices(range(len(references)), k=len(references))
        scores = [bleu_of_counts([side[i] for i in drawn]) for side in counts]
        differences.append(abs(scores[0] - scores[1]))
    mean = sum(differences) / len(differences)
    real = abs(result["score"] - result["other"])
    share = sum(difference - mean > real for difference in differences) / len(differences)
    assert BLEU(tokenize="none", force=True).corpus_score(better, [references]).score == (
        pytest.approx(result["score"])
    )
    assert 0 < result["p_value"] < 1
    assert result["p_value"] == pytest.approx(share, abs=0.03)


def test_the_interval_is_that_of_the_middle_of_the_samples(corpus):
    references, better, _ = corpus
    found = confidence_intervals(better, [references], "none")
    assert found["signature"] == "bs:1000|seed:12345"
    counts = np.array(list(map(ngram_counts, better, references)))
    draws = np.random.default_rng(12345).choice(len(counts), size=(1000, len(counts)))
    scores = sorted(bleu_of_counts([counts[draw].sum(axis=0).tolist()]) for draw in draws)
    assert found["bleu"]["mean"] == pytest.approx(sum(scores) / 1000, rel=1e-5)
    # 2.5% of the samples are below the interval and 2.5% above
    assert found["bleu"]["ci"] == pytest.approx((scores[974] - scores[25]) / 2, rel=1e-5)
    chrf = CHRF().corpus_score(better, [references], n_bootstrap=1000)
    assert f"({found['chrf']['mean']:.2f} ± {found['chrf']['ci']:.2f})" in f"{chrf}".replace(
        "μ = ", ""
    )
    assert confidence_intervals(better, [references], "none") == found
    assert json.loads(json.dumps(found)) == found


def test_more_sentences_than_memory_holds_have_no_interval(corpus, monkeypatch):
    references, better, _ = corpus
    monkeypatch.setattr(scoring, "MOST_RESAMPLED", 39)
    assert confidence_intervals(better, [references]) is None


def test_samples_without_a_common_ngram_have_the_score_0():
    """sacreBLEU has 0 as a number of Python, and all other scores as numbers of numpy."""
    references = ["a b c d e"] + ["f g h i j"] * 5
    translations = ["a b c d e"] + ["k l m n o"] * 5
    found = confidence_intervals(translations, [references])
    assert 0.0 < found["bleu"]["mean"] < 100.0
    assert found["bleu"]["ci"] > 0.0


def test_a_translation_is_compared_with_every_reference(corpus):
    references, better, worse = corpus
    others = [worse[0], *better[1:]]
    scores = score_translations(better, references, target_lang="de", more_references=[others])
    both = [references, others]
    assert scores["bleu"] == BLEU().corpus_score(better, both).score
    assert scores["chrf"] == CHRF().corpus_score(better, both).score
    assert scores["bleu_signature"].startswith("nrefs:2|")
    assert "nrefs:2|" in scores["compound_bleu_signature"]
    assert scores["exact_match"] == 39 / 40
    assert scores["compound_bleu"] > score_translations(better, references, "13a", "de")["bleu"]
    compared = compare_translations(better, worse, references, more_references=[others])
    assert compared["bleu"]["score"] == pytest.approx(scores["bleu"])
    # the first translation differs from both references
    assert better[0] not in (references[0], others[0])


# accepts the flags of unbabel-comet's program, and writes the same kind of file
STAND_IN = """#!{python}
import argparse, json
parser = argparse.ArgumentParser()
for side in ("sources", "translations", "references", "to_json", "model", "gpus"):
    parser.add_argument("--" + side, required=True)
parser.add_argument("--only_system", action="store_true")
parser.add_argument("--quiet", action="store_true")
given = parser.parse_args()
if given.model == "none":
    raise SystemExit("Model 'none' not supported by COMET.")
read = [open(p, encoding="utf-8").read().split("\\n")[:-1]
        for p in (given.sources, given.translations, given.references)]
rows = [{{"src": s, "mt": t, "ref": r, "COMET": len(t) / len(r)}} for s, t, r in zip(*read)]
with open(given.to_json, "w") as file:
    json.dump({{given.translations: rows}}, file)
print("translations\\tscore: 0.5")
"""


@pytest.fixture
def comet(tmp_path, monkeypatch):
    """Install a stand-in for COMET, whose score is the ratio of the lengths."""
    program = tmp_path / "comet-score"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("comet")
def test_comet_scores_each_sentence_once():
    sources, references = ["a\u2028b", "c"], ["aaaa", "cc\r\ncc"]
    assert comet_score(sources, ["aaaa", "cc"], references) == pytest.approx((1 + 2 / 5) / 2)
    with pytest.raises(
        ValueError, match="comet-score failed with exit status 1: Model 'none' not supported"
    ):
        comet_score(["a"], ["b"], ["c"], "none")


def test_without_comet_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError, match="comet needs the program comet-score, which is not installed: `pipx"
    ):
        comet_score(["a"], ["b"], ["c"])


def test_a_bleu_tokenizer_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    with pytest.raises(ValueError, match=r"bleu_tokenizer must .* got 'ja-mecab': .*sacrebleu\[ja"):
        score_translations(["a"], ["a"], "ja-mecab")


def test_unequal_numbers_of_translations_and_references_are_refused():
    with pytest.raises(ValueError, match="must be as many as the translations"):
        score_translations(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="must be as many as the translations"):
        score_translations([], [])
