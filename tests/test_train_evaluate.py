"""Translations of a split, in order, and their scores with signatures."""

import json
from types import SimpleNamespace

import paper
import pytest
import torch
import train_toys
from accelerate import Accelerator
from huggingface_hub import ModelCard
from torch.overrides import TorchFunctionMode

from vanilla_transformer.hub import load_run
from vanilla_transformer.train.evaluate import (
    evaluate,
    score_table,
    score_translations,
    translate_lines,
    validation_loss,
)
from vanilla_transformer.train.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    corpus = train_toys.write_corpus(folder / "corpus")
    train(train_toys.toy_config(corpus, folder / "run"))
    return folder / "run"


def test_scores_are_kept_with_their_signatures_and_translations(run):
    scores = evaluate(str(run), max_extra_tokens=50)
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
        "max_extra_tokens": 50,
    }
    assert json.loads((run / "scores.json").read_text(encoding="utf-8"))["test"] == scores
    for side in ("source", "reference", "translation"):
        text = (run / f"hypotheses/test.{side}.txt").read_text(encoding="utf-8")
        assert text.count("\n") == 7
    card = ModelCard.load(run / "README.md")
    assert [result.metric_type for result in card.data.eval_results] == ["bleu", "chrf"]
    assert scores["bleu_signature"] in card.text


def kept(run):
    return json.loads((run / "scores.json").read_text(encoding="utf-8"))


def headline(run):
    return [
        (result.dataset_split, result.metric_value)
        for result in ModelCard.load(run / "README.md").data.eval_results
    ]


def test_another_split_is_kept_beside_the_first(run):
    evaluate(str(run))
    evaluate(str(run), split="validation")
    assert {"test", "validation"} <= kept(run).keys()


def test_another_search_is_kept_beside_the_models_own(run):
    own = evaluate(str(run))
    before = headline(run)
    other = evaluate(str(run), num_beams=1, max_extra_tokens=1)
    key = "test-max_extra_tokens1-num_beams1"
    assert (kept(run)["test"], kept(run)[key]) == (own, other)
    assert (run / f"hypotheses/{key}.translation.txt").is_file()
    assert headline(run) == before
    assert f"| {key} |" in (run / "README.md").read_text(encoding="utf-8")
    # what is asked for is what the model does anyway
    asked = evaluate(str(run), num_beams=4)
    assert kept(run)["test"] == asked


def test_other_data_is_kept_beside_the_runs_own(run, tmp_path):
    own = evaluate(str(run))
    before = headline(run)
    evaluate(str(run), source_lang="de", target_lang="en")
    other = train_toys.write_corpus(tmp_path / "other", pairs=5)
    evaluate(str(run), dataset=str(other))
    assert kept(run)["test"] == own
    keys = [key for key in kept(run) if key.endswith(("-de-en", "-en-de"))]
    assert len(keys) == 2
    assert keys[0].endswith("-test-de-en")
    assert keys[1].endswith("other-test-en-de")
    assert headline(run) == before
    # the run's own, by its name
    again = evaluate(str(run), dataset=own["dataset"], source_lang="en")
    assert kept(run)["test"] == again


class NoFloat64(TorchFunctionMode):
    """A device that has none."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


class Guess(torch.nn.Module):
    """A model that guesses the next token from the last one alone."""

    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Embedding(9, 9)

    def forward(self, decoder_input_ids, use_cache):
        return SimpleNamespace(logits=self.scores(decoder_input_ids))


def test_the_loss_needs_no_float64_and_weighs_every_token_the_same():
    model = Guess()
    ids = torch.randint(9, (3, 4))
    labels = torch.tensor([[5, 2, -100, -100], [1, 8, 7, 2], [2, -100, -100, -100]])
    batches = [{"decoder_input_ids": ids[rows], "labels": labels[rows]} for rows in ([0, 1], [2])]
    with NoFloat64():
        loss = validation_loss(Accelerator(cpu=True), model, batches)
    log_probs = [paper.log_softmax(row) for row in model.scores.weight.tolist()]
    losses = [
        -log_probs[token][label]
        for token, label in zip(ids.flatten().tolist(), labels.flatten().tolist(), strict=True)
        if label != -100
    ]
    assert len(losses) == 7
    assert loss == pytest.approx(sum(losses) / 7, rel=1e-5)
    assert model.training


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
    with pytest.raises(
        ValueError,
        match=r"run must be a run folder, or dataset be given",
    ):
        evaluate(str(tmp_path))
    with pytest.raises(ValueError, match="source_lang and target_lang must be given"):
        evaluate(str(tmp_path), dataset="demo")
