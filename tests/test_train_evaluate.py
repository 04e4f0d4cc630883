"""Translations of a split, in order, and their scores with signatures."""

import json

import pytest
import train_toys
from huggingface_hub import ModelCard

from vanilla_transformer.hub import load_run
from vanilla_transformer.train.evaluate import (
    evaluate,
    score_table,
    score_translations,
    translate_lines,
)
from vanilla_transformer.train.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    corpus = train_toys.write_corpus(folder / "corpus")
    train(train_toys.toy_config(corpus, folder / "run"))
    return folder / "run"


def test_scores_are_kept_with_their_signatures_and_translations(run):
    scores = evaluate(str(run), max_extra_tokens=3)
    assert scores["sentences"] == 7
    assert 0 <= scores["bleu"] <= 100
    assert scores["bleu_signature"].startswith(
        "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:"
    )
    assert "nc:6|nw:0" in scores["chrf_signature"]
    table = score_table(scores)
    assert f"{scores['bleu']:.2f}   {scores['bleu_signature']}" in table
    assert f"{scores['chrf']:.2f}   {scores['chrf_signature']}" in table
    assert scores["search"] == {
        "num_beams": 4,
        "length_penalty_alpha": 0.6,
        "max_extra_tokens": 3,
    }
    assert json.loads((run / "scores.json").read_text(encoding="utf-8"))["test"] == scores
    for side in ("source", "reference", "translation"):
        text = (run / f"hypotheses/test.{side}.txt").read_text(encoding="utf-8")
        assert text.count("\n") == 7
    card = ModelCard.load(run / "README.md")
    assert [result.metric_type for result in card.data.eval_results] == ["bleu", "chrf"]
    assert scores["bleu_signature"] in card.text


def test_another_split_is_kept_beside_the_first(run):
    evaluate(str(run), split="validation", num_beams=1, max_extra_tokens=1)
    evaluate(str(run), num_beams=1, max_extra_tokens=1)
    assert set(json.loads((run / "scores.json").read_text(encoding="utf-8"))) == {
        "validation",
        "test",
    }


def test_lines_come_back_in_order_whatever_their_lengths(run):
    model, tokenizer = load_run(run)
    lines = ["ant bee cat dog elk fox", "gnu", "", "hen ibis jay", "kite " * 9]
    # a model that has learned this little would say nothing
    search = {"max_extra_tokens": 9, "min_new_tokens": 8}
    together = list(translate_lines(model, tokenizer, lines, **search))
    alone = [next(translate_lines(model, tokenizer, [line], **search)) for line in lines]
    assert together == alone
    assert together[2] == ""
    assert len(set(together)) > 3


def test_equal_translations_score_100_and_match():
    texts = ["Das ist eine ganz gute Sache .", "Noch ein Satz mit vielen Worten ."]
    scores = score_translations(texts, texts)
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)
    assert scores["exact_match"] == 1
    assert score_translations([texts[0], "Nein ."], texts)["exact_match"] == 0.5


def test_text_that_is_tokenized_already_can_be_left_so():
    scores = score_translations(["a-b c d e"], ["a-b c d e"], bleu_tokenizer="none")
    assert "tok:none" in scores["bleu_signature"]
    with pytest.raises(ValueError, match="bleu_tokenizer must be one of"):
        score_translations(["a"], ["a"], bleu_tokenizer="13b")


def test_what_cannot_be_compared_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="one translation for each"):
        score_translations(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="one translation for each"):
        score_translations([], [])
    with pytest.raises(ValueError, match=r"split must be one of train, .* Did you mean 'test'"):
        evaluate(str(run), split="tets")
    with pytest.raises(ValueError, match=r"dataset must be given where there is no recipe\.yaml"):
        evaluate(str(tmp_path))
    with pytest.raises(ValueError, match="source_lang and target_lang must be given"):
        evaluate(str(tmp_path), dataset="demo")
