"""Section 3.4: look-up, the factor sqrt(d_model), and one matrix for three uses."""

import argparse
import json
import math

import equations
import pytest
import torch
import train_toys

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.cli import main
from vanilla_transformer.paper.embeddings import (
    MATRIX_USES,
    embedding_size,
    gradients_by_use,
    one_hot_product,
    sections,
)


def test_a_one_hot_row_times_the_matrix_is_identical_to_the_row():
    table, ids = torch.randn(301, 17), torch.randint(301, (40,))
    assert torch.equal(one_hot_product(ids, table), table[ids])


def test_the_root_mean_square_of_positions_is_one_over_root_two_and_of_scaled_words_one():
    found = embedding_size(train_toys.toy_model(vocab_size=3000, hidden_size=64))
    assert found.positions == pytest.approx(1 / math.sqrt(2), rel=1e-6)
    rows = [equations.positional_encoding(position, 64) for position in range(9)]
    mean = sum(value**2 for row in rows for value in row) / (9 * 64)
    assert math.sqrt(mean) == pytest.approx(found.positions, rel=1e-6)
    assert found.unscaled == pytest.approx(64**-0.5, rel=0.02)
    assert found.scaled == pytest.approx(1.0, rel=0.02)


def test_learned_positions_are_measured():
    model = train_toys.toy_model(position_encoding="learned", max_position_embeddings=9)
    model.get_encoder().positions.table.weight.data.fill_(3.0)
    assert embedding_size(model).positions == pytest.approx(3.0)


def test_a_model_without_positions_is_refused_before_any_output(tmp_path, capsys):
    tokenizer = VanillaTransformerTokenizer()
    model = train_toys.toy_model(vocab_size=len(tokenizer), position_encoding="none")
    model.save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    command = ["paper", "embeddings", "--model", str(tmp_path / "run")]
    capsys.readouterr()
    assert main([*command, "--output_dir", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr()
    assert shown.err == "error: model must have positions, got position_encoding 'none'.\n"
    assert not shown.out


def test_the_gradient_of_the_one_matrix_is_the_sum_over_its_uses():
    model = train_toys.toy_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source, target = torch.randint(4, 19, (2, 3, 5)).unbind()
    found = gradients_by_use(model, source, target.roll(1, dims=1), target)
    uses = [found[use] for use in MATRIX_USES]
    torch.testing.assert_close(sum(uses), found["tied"])
    # all uses have a gradient; that of the encoder's input is on the source tokens only
    assert all(gradient.norm() > 0 for gradient in uses)
    read = found["source"].abs().sum(dim=1) > 0
    assert read.nonzero().flatten().tolist() == source.unique().tolist()
    # the model has not changed and has no gradients
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Return the sections for a model with tripled embeddings."""
    folder = tmp_path_factory.mktemp("embeddings")
    tokenizer = VanillaTransformerTokenizer()
    model = train_toys.toy_model(vocab_size=len(tokenizer))
    model.get_input_embeddings().weight.data *= 3
    model.save_pretrained(folder / "run")
    tokenizer.save_pretrained(folder / "run")
    command = ["paper", "embeddings", "--model", str(folder / "run")]
    assert main([*command, "--output_dir", str(folder / "out")]) == 0
    return json.loads((folder / "out" / "study.json").read_text(encoding="utf-8"))["sections"]


def test_the_study_counts_the_parameters_that_tying_saves(study):
    assert list(study) == ["one_hot", "factor", "tie"]
    assert study["one_hot"]["equal"]
    # 2 V d for each token
    assert study["one_hot"]["rows"][0][1] == 64 * 2 * 37_000 * 512
    assert "share 1 address in memory" in study["tie"]["says"]
    counts = study["tie"]["parameters"]
    for row in ("base", "big", "C4"):
        millions = counts[row]["tied"] / 1e6
        assert round(millions, 2) == equations.PARAMETERS[row]
    assert counts["base"]["untied"] - counts["base"]["tied"] == 2 * 37_000 * 512
    assert study["tie"]["gradient_difference"] < 1e-5


def test_a_trained_model_is_compared_with_its_initial_weights(study):
    rows = {row[0]: row[1:] for row in study["factor"]["rows"]}
    untrained, trained = rows["this model, untrained"], rows["this model, trained"]
    assert trained[2] / untrained[2] == pytest.approx(3.0, rel=0.1)


def test_positions_that_are_smaller_than_the_words_are_not_called_larger(tmp_path):
    tokenizer = VanillaTransformerTokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 9}
    model = train_toys.toy_model(position_encoding="learned", **sizes)
    model.get_input_embeddings().weight.data.fill_(0.5)
    model.get_encoder().positions.table.weight.data.fill_(0.125)
    model.save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    study = sections(
        argparse.Namespace(model=str(tmp_path / "run"), trust_remote_code=False, seed=0)
    )
    factor = next(section for section in study if section.name == "factor")
    assert "its positions would be 0.25 times as large" in factor.finding
    assert "smaller" not in factor.finding
    # the positions of each model are marked
    marks = [line.get_xdata()[0] for line in factor.figure.axes[0].lines]
    assert marks == [row[4] for row in factor.rows]
    assert marks[-1] == 0.125
