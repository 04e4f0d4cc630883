"""Section 5.4: the smoothed target, the lowest loss, and the confidence of a model."""

import json
import math

import equations
import pytest
import torch

from vanilla_transformer.cli import main
from vanilla_transformer.paper.label_smoothing import (
    Confidence,
    ambiguous_words,
    best_perplexity,
    confidence_after,
    confidence_section,
    least_loss,
    loss_at,
    smoothed_target,
)
from vanilla_transformer.paper.order_task import ToyTraining


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.3])
def test_the_rest_of_the_probability_is_spread_over_the_whole_vocabulary(label_smoothing):
    target = smoothed_target(2, 8, label_smoothing)
    expected = torch.full((8,), label_smoothing / 8)
    expected[2] += 1 - label_smoothing
    torch.testing.assert_close(target, expected)


def test_without_smoothing_the_other_tokens_get_exactly_0_and_with_a_little_they_get_more():
    assert smoothed_target(3, 10, 0.0).tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    # the target is a difference of numbers near 1 / V in float32, whose rounding differs between
    # CPUs: an error of 0.01% of them is a tenth of the target
    assert smoothed_target(0, 37_000, 1e-3)[1:].tolist() == pytest.approx(
        [1e-3 / 37_000] * 36_999, rel=0.3
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.3])
def test_no_loss_is_below_the_entropy_of_the_target(label_smoothing):
    target = smoothed_target(0, 8, label_smoothing).tolist()
    least = least_loss(8, label_smoothing)
    assert least == pytest.approx(-sum(p * math.log(p) for p in target if p > 0), abs=1e-6)
    probability = torch.linspace(0.2, 0.999, 400, dtype=torch.double)
    losses = loss_at(probability, 8, label_smoothing)
    assert losses.min() >= least - 1e-6
    best = 1 - label_smoothing + label_smoothing / 8
    found = loss_at(torch.tensor([min(best, 1 - 1e-9)], dtype=torch.double), 8, label_smoothing)
    assert float(found) == pytest.approx(least, abs=1e-6)


def test_the_loss_is_the_cross_entropy_of_target_and_model():
    probability = torch.tensor([0.5], dtype=torch.double)
    row = equations.log_softmax([math.log(0.5), *[math.log(0.5 / 4)] * 4])
    target = smoothed_target(0, 5, 0.2).tolist()
    expected = -sum(p * x for p, x in zip(target, row, strict=True))
    assert float(loss_at(probability, 5, 0.2)) == pytest.approx(expected, rel=1e-5)


def test_every_word_has_one_most_frequent_translation():
    table = ambiguous_words(9)
    torch.testing.assert_close(table.sum(dim=1), torch.ones(9))
    assert torch.equal(table.argmax(dim=1), torch.arange(9))
    assert (table[0] > 0).sum() == 4
    assert (table[-1] > 0).sum() == 1


def test_smoothing_raises_the_perplexity_of_a_perfect_model():
    table = ambiguous_words()
    without, some, more = (best_perplexity(value, table) for value in (0.0, 0.1, 0.2))
    entropy = -sum(p * math.log(p) for row in table.tolist() for p in row if p > 0) / len(table)
    assert without == pytest.approx(math.exp(entropy))
    assert without < some < more


def test_the_calibration_error_is_a_distance():
    found = Confidence(
        confidence=torch.tensor([0.5, 0.9]), accuracy=torch.tensor([0.7, 0.6]), perplexity=1.0
    )
    assert found.calibration_error() == pytest.approx(0.25)


def section_of(accuracy, *smoothings):
    """Return the section for models with this accuracy and the same confidence."""
    table = torch.tensor([[0.7, 0.3], [0.1, 0.9]])
    known = torch.tensor([accuracy, accuracy])
    result = Confidence(confidence=known, accuracy=known, perplexity=3.0)
    return confidence_section(dict.fromkeys(smoothings, result), table)


def test_findings_on_confidence_follow_the_numbers():
    learned, begun = (section_of(accuracy, 0.0, 0.1, 0.2).finding for accuracy in (0.8, 0.06))
    assert "is correct in 80.0% and 80.0%" in learned
    assert "is correct in 6.0% and 6.0%" in begun
    assert "The training is too short" in begun
    assert "The training is too short" not in learned
    # the numbers are equal, so the text must not claim a difference
    for claim in ("learns how often", "stays", "falls", "perplexity rises from 3", "calibrated"):
        assert claim not in learned + begun
    assert "difference between confidence and accuracy is 0.000" in begun


@pytest.mark.parametrize("smoothings", [(0.1,), (0.0, 0.1), (0.3, 0.4)])
def test_the_text_compares_with_the_papers_rows_only_if_all_are_in_the_table(smoothings):
    assert "from D3 through base to D4" in section_of(0.8, 0.0, 0.1, 0.15, 0.2).finding
    finding = section_of(0.8, *smoothings).finding
    assert "D3" not in finding
    assert ("Without smoothing" in finding) == (0.0 in smoothings)


def test_a_model_is_as_confident_as_its_targets():
    table = torch.tensor([[0.7, 0.3], [0.0, 1.0]])
    training = ToyTraining(
        d_model=16, steps=400, sentences_per_step=512, warmup_steps=40, learning_rate_factor=0.5
    )
    found = confidence_after(0.2, table, training)
    # five tokens in total, including three special tokens before the first word
    sure = [0.8 * p + 0.2 / 5 for p in table.max(dim=1).values.tolist()]
    assert found.confidence.tolist() == pytest.approx(sure, abs=0.03)
    assert found.accuracy.tolist() == pytest.approx(table.diag().tolist(), abs=1e-6)
    assert found.perplexity == pytest.approx(best_perplexity(0.2, table), rel=0.05)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoothing")
    command = ["paper", "smoothing", "--output_dir", str(folder), "--steps", "5"]
    assert main([*command, "--label_smoothing", "0.2", "0", "0.15", "0.99999"]) == 0
    return json.loads((folder / "study.json").read_text(encoding="utf-8"))["sections"]


def test_the_papers_results_stand_beside_its_rows(study):
    assert list(study) == ["target", "loss", "confidence"]
    rows = {row[0]: row[1:] for row in study["confidence"]["rows"]}
    assert list(rows) == [0.0, 0.15, 0.2, 0.99999]
    assert rows[0.0][-3:] == ["D3", 4.67, 25.3]
    assert rows[0.2][-3:] == ["D4", 5.47, 25.7]
    assert "least possible" not in study["confidence"]["columns"]
    assert rows[0.15][-3:] == [None] * 3


def test_the_loss_is_lowest_if_the_model_equals_the_target(study):
    for epsilon, found, formula, lowest, entropy, _ in study["loss"]["rows"]:
        assert formula == 1 - epsilon + epsilon / 37_000
        assert found == pytest.approx(formula, rel=1e-3)
        assert lowest == pytest.approx(entropy, abs=1e-3)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        (("--label_smoothing", "1.0"), "label_smoothing must be from 0 to below 1, got 1.0."),
        (("--steps", "0"), "steps must be at least 1, got 0."),
    ],
)
def test_an_invalid_flag_is_refused(flag, sentence, capsys, tmp_path):
    assert main(["paper", "smoothing", "--output_dir", str(tmp_path), *flag]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_smoothing_lowers_confidence_but_not_accuracy():
    table = ambiguous_words()
    without, smoothed = (confidence_after(value, table) for value in (0.0, 0.1))
    assert without.calibration_error() < 0.04 < smoothed.calibration_error()
    assert float(smoothed.accuracy.mean()) == pytest.approx(float(table.diag().mean()), abs=0.01)
    assert without.perplexity < smoothed.perplexity
