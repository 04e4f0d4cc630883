"""Section 3.2.1: the variance of the scores, and its effect on the softmax."""

import json
import math

import equations
import pytest
import torch

from vanilla_transformer.cli import main
from vanilla_transformer.paper.scaling import jacobian_norm, measure


@pytest.mark.parametrize(("d_k", "num_queries"), [(4, 1024), (64, 256), (512, 64)])
def test_the_variance_of_a_score_is_d_k(d_k, num_queries):
    for scale, variance in ((1.0, d_k), (d_k**-0.5, 1.0), ((8 * d_k) ** -0.5, 1 / 8)):
        found = measure(d_k, scale, num_queries=num_queries)
        assert found.variance == pytest.approx(variance, rel=0.06)


def test_the_weights_are_the_softmax_of_the_scaled_scores():
    found = measure(6, 0.3, num_keys=5, num_queries=2, seed=7)
    random = torch.Generator().manual_seed(7)
    query = torch.randn(2, 1, 6, generator=random)
    key = torch.randn(2, 5, 6, generator=random)
    rows = [
        equations.softmax([0.3 * sum(a * b for a, b in zip(q[0], k, strict=True)) for k in keys])
        for q, keys in zip(query.tolist(), key.tolist(), strict=True)
    ]
    entropies = [-sum(p * math.log(p) for p in row) for row in rows]
    assert found.entropy == pytest.approx(sum(entropies) / 2, rel=1e-5)
    assert found.largest_weight == pytest.approx(sum(map(max, rows)) / 2, rel=1e-5)


def test_the_norm_is_that_of_the_jacobian_of_softmax():
    scores = 3 * torch.randn(4, 9, dtype=torch.float64)
    expected = [
        torch.autograd.functional.jacobian(lambda row: row.softmax(dim=-1), row).norm()
        for row in scores
    ]
    torch.testing.assert_close(jacobian_norm(scores.softmax(dim=-1)), torch.stack(expected))


def test_the_norm_is_zero_if_one_weight_is_1():
    assert jacobian_norm(torch.tensor([0.0, 1.0, 0.0])) == 0.0
    assert jacobian_norm(torch.tensor([0.5, 0.5])) == pytest.approx(0.5)


def test_without_scaling_the_gradient_vanishes_as_d_k_grows_and_with_it_does_not():
    without = [measure(d_k, 1.0, num_queries=256) for d_k in (8, 64, 512)]
    scaled = [measure(d_k, d_k**-0.5, num_queries=256) for d_k in (8, 64, 512)]
    assert without[0].vanished_share < without[1].vanished_share < without[2].vanished_share
    assert without[2].median_jacobian_norm < scaled[2].median_jacobian_norm / 10
    for entry in scaled:
        assert entry.vanished_share == 0.0
        assert entry.median_jacobian_norm == pytest.approx(scaled[0].median_jacobian_norm, rel=0.06)
    # too small a factor: nearly equal weights, and a smaller gradient
    slip = measure(64, (8 * 64) ** -0.5)
    assert scaled[1].entropy < slip.entropy < math.log(64)
    assert slip.median_jacobian_norm < scaled[1].median_jacobian_norm


def test_a_width_of_zero_is_refused(capsys, tmp_path):
    command = ["paper", "scaling", "--output_dir", str(tmp_path)]
    assert main([*command, "--d_k", "0"]) == 1
    assert "d_k must be at least 1, got 0." in capsys.readouterr().err


def test_the_study_has_the_formula_beside_the_measurement(tmp_path, capsys):
    command = ["paper", "scaling", "--output_dir", str(tmp_path), "--d_k", "64", "4"]
    assert main(command) == 0
    sections = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))["sections"]
    rows = sections["variance"]["rows"]
    assert [row[0] for row in rows] == [4, 64]
    for row in rows:
        assert row[2::2] == [row[0], 1.0, 1 / 8]
        assert row[1::2] == pytest.approx(row[2::2], rel=0.06)
    # three ways to scale, two widths
    assert len(sections["softmax"]["rows"]) == 6
    assert f"the maximum is {math.log(64):.2f}" in " ".join(capsys.readouterr().out.split())
