"""Sections 3.1 and 3.2.3: one pass over a sentence gives the losses of all steps."""

import json

import equations
import pytest
import torch
import train_toys

from vanilla_transformer.cli import main
from vanilla_transformer.paper.teacher_forcing import (
    WAYS,
    losses_of_one_pass,
    losses_step_by_step,
)


@pytest.fixture
def model():
    return train_toys.toy_model(pad_token_id=0, decoder_start_token_id=1).eval()


@pytest.fixture
def pair():
    return torch.tensor([[5, 9, 4, 2]]), torch.tensor([[7, 3, 3, 11, 2]])


def test_one_pass_has_the_losses_of_the_equations(pair):
    model = train_toys.toy_model(pad_token_id=0, decoder_start_token_id=1, decoder_layers=1).eval()
    source, labels = pair
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    # each position is computed from the tokens before it alone, so no mask is needed
    expected = []
    for t, label in enumerate(labels[0].tolist()):
        read = [1, *labels[0].tolist()[:t]]
        row = equations.logits(source[0].tolist(), read, weights, num_layers=1, num_heads=2)
        expected.append(-equations.log_softmax(row[-1])[label])
    found = losses_of_one_pass(model, source, labels)
    assert found.tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("position_encoding", ["sinusoidal", "learned"])
def test_step_by_step_gives_the_losses_of_one_pass(pair, use_cache, position_encoding):
    model = train_toys.toy_model(
        pad_token_id=0, decoder_start_token_id=1, position_encoding=position_encoding
    ).eval()
    expected = losses_of_one_pass(model, *pair)
    found = losses_step_by_step(model, *pair, use_cache=use_cache)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # the losses are not all equal
    assert expected.std() > 0.1


def test_with_the_cache_a_step_reads_one_token_and_without_it_all(model, pair):
    read = []
    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for function, expected in (
        (lambda: losses_of_one_pass(model, *pair), [5]),
        (lambda: losses_step_by_step(model, *pair, use_cache=True), [1] * 5),
        (lambda: losses_step_by_step(model, *pair, use_cache=False), [1, 2, 3, 4, 5]),
    ):
        read.clear()
        function()
        assert read == expected


def test_the_study_counts_passes_and_positions(tmp_path):
    command = ["paper", "teacher-forcing", "--output_dir", str(tmp_path), "--lengths", "2", "4"]
    assert main([*command, "--sentence", "Anna is here.", "--translation", "Anna ist da."]) == 0
    written = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))["sections"]
    rows = {row[0]: row[1:] for row in written["losses"]["rows"]}
    length = len(written["losses"]["tokens"])
    assert length > 3
    assert rows[WAYS[0]][:2] == [1, length]
    assert rows[WAYS[1]][:2] == [length, length]
    assert rows[WAYS[2]][:2] == [length, length * (length + 1) / 2]
    for way in WAYS:
        assert rows[way][3] < 1e-5
        assert sum(written["losses"]["losses"][way]) / length == pytest.approx(rows[way][2])
    assert [row[0] for row in written["time"]["rows"]] == [2, 4]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--sentence", "Anna"], "must be given together"),
        (["--sentence", "", "--translation", ""], "sentence must not be empty, got ''."),
        (["--sentence", " ", "--translation", "Anna"], "sentence must have a word, got ' '."),
        (["--sentence", "Anna", "--translation", " "], "translation must have a word, got ' '."),
        (["--lengths", "0"], "lengths must be at least 1, got 0."),
    ],
)
def test_half_a_pair_a_text_without_a_word_and_length_0_are_refused(
    flags, sentence, tmp_path, capsys
):
    assert main(["paper", "teacher-forcing", "--output_dir", str(tmp_path), *flags]) == 1
    assert sentence in capsys.readouterr().err
