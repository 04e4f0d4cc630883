"""`vanilla-transformer paper probe`: trained candidates, and positions in the states of layers."""

import json
from dataclasses import replace

import pytest
import torch
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer import sinusoidal_encoding
from vanilla_transformer.cli import main
from vanilla_transformer.paper import probe
from vanilla_transformer.paper.order_task import (
    COPYING,
    WHO_CHASES_WHOM,
    CandidatePositions,
    predict,
    small_model,
    who_chases_whom,
)
from vanilla_transformer.paper.positional_encoding import candidate_encoding, word_embeddings
from vanilla_transformer.paper.probe import (
    NUM_POSITIONS,
    WORDS_ALONE,
    linear_probe,
    probe_section,
    states_of_layers,
)


def test_a_probe_reads_positions_that_are_there_and_no_others():
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(NUM_POSITIONS).repeat(40)
    noise = torch.randn(2, len(positions), 32, generator=generator)
    table = sinusoidal_encoding(NUM_POSITIONS, 32)[positions]
    found = linear_probe(table + 0.01 * noise[0], positions, table + 0.01 * noise[1], positions)
    assert found == (1.0, 0.0)
    found = linear_probe(noise[0], positions, noise[1], positions)
    assert found.accuracy < 2 / NUM_POSITIONS
    # two random positions of twelve are four apart on average
    assert 3 < found.mean_error < 5


def test_the_distance_of_a_probe_is_measured():
    states = torch.tensor([[0.0], [1.0], [2.0], [0.1], [1.1], [2.1]])
    positions = torch.tensor([0, 1, 2, 0, 1, 2])
    found = linear_probe(states, positions, torch.tensor([[0.0], [2.0], [2.0]]), positions[:3])
    # the second state is read as position 2 in place of 1
    assert found == pytest.approx((2 / 3, 1 / 3))


def test_states_are_those_of_the_model_at_the_first_positions():
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    pair = (TEXTS[2], TEXTS[4])
    states, positions = states_of_layers(model, tokenizer, [pair, pair])
    ids = tokenizer(pair[0], return_tensors="pt").input_ids
    kept = min(ids.shape[1], NUM_POSITIONS)
    assert list(states["encoder"]) == [
        WORDS_ALONE,
        "words + positions",
        "after layer 1",
        "after layer 2",
    ]
    assert list(states["decoder"]) == [WORDS_ALONE, "words + positions", "after layer 1"]
    words = word_embeddings(model)[ids[0, :kept]]
    torch.testing.assert_close(states["encoder"][WORDS_ALONE], torch.cat((words, words)))
    both = words + sinusoidal_encoding(kept, model.config.d_model)
    torch.testing.assert_close(states["encoder"]["words + positions"][:kept], both)
    memory = model.get_encoder()(ids).last_hidden_state[0, :kept]
    torch.testing.assert_close(states["encoder"]["after layer 2"][kept:], memory)
    assert positions["encoder"].tolist() == [*range(kept), *range(kept)]
    assert len(positions["decoder"]) == len(states["decoder"][WORDS_ALONE])


@pytest.mark.parametrize("name", ["integer", "fraction", "sine", "binary"])
def test_a_candidate_is_added_to_the_first_features(name):
    x = torch.randn(2, 6, 8)
    added = CandidatePositions(name)(x) - x
    expected = candidate_encoding(name, 6, 8)
    width = expected.shape[1]
    torch.testing.assert_close(added[1, :, :width], expected)
    assert not added[:, :, width:].any()


def test_a_small_model_has_its_candidate_in_both_stacks():
    source = torch.tensor([[3, 4, 5, 6]])
    given = small_model("sinusoidal", 8, 4, COPYING).eval()
    replaced = small_model("integer", 8, 4, COPYING).eval()
    stacks = (replaced.model.encoder, replaced.model.decoder)
    assert [stack.positions.name for stack in stacks] == ["integer"] * 2
    assert not torch.allclose(*(predict(model, source, source)[0] for model in (given, replaced)))
    for stack in stacks:
        stack.positions.name = "sinusoidal"
    # the same weights, and the same positions as the model's own
    torch.testing.assert_close(*(predict(model, source, source)[0] for model in (given, replaced)))


def test_the_integer_is_enough_for_the_order_of_two_names():
    training = replace(WHO_CHASES_WHOM, steps=80, sentences_per_step=32)
    found = who_chases_whom("integer", training=training, num_names=8)
    assert found.accuracy > 0.9
    without = who_chases_whom("none", training=training, num_names=8)
    assert without.accuracy <= 0.5
    assert found.loss < 0.2 < without.loss
    assert who_chases_whom("integer", training=training, num_names=8).accuracy == found.accuracy


@pytest.fixture
def runs(tmp_path):
    """Return two run folders with translations, as `evaluate` writes them."""
    folders = []
    tokenizer = make_tokenizer()
    for number in range(2):
        folder = tmp_path / f"run-{number}"
        make_model(tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "hypotheses").mkdir()
        for side in ("source", "translation"):
            text = "".join(f"{text}\n" for text in TEXTS * 2)
            (folder / "hypotheses" / f"test.{side}.txt").write_text(text, encoding="utf-8")
        folders.append(str(folder))
    return folders


def test_the_study_trains_each_candidate_and_probes_each_run(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probe, "WHO_CHASES_WHOM", replace(WHO_CHASES_WHOM, steps=1))
    monkeypatch.setattr(probe, "COPYING", replace(COPYING, steps=1))
    monkeypatch.setattr(probe, "CANDIDATES", ("integer", "none"))
    flags = ["--models", *runs, "--num_sentences", "8", "--num_seeds", "2", "--seed", "4"]
    assert main(["paper", "probe", *flags, "--output_dir", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "study.json").read_text("utf-8"))["sections"]
    assert list(written) == ["candidates", "probe"]
    columns = written["candidates"]["columns"]
    assert columns[3:] == ["copying: loss, seed 4", "copying: loss, seed 5", "mean"]
    for row in written["candidates"]["rows"]:
        assert row[-1] == pytest.approx(sum(row[3:5]) / 2)
    found = written["probe"]
    assert found["columns"][2:] == ["run 1", "run 2", "mean", "distance"]
    assert found["runs"] == runs
    for row in found["rows"]:
        # the two runs are the same model
        assert row[2] == row[3] == pytest.approx(row[4])
    assert "with the states of 2 trained models" in found["says"]
    for name in written:
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5_000


def test_a_state_with_its_position_is_read_better_than_the_word_alone(runs):
    rows = {tuple(row[:2]): row[-2] for row in probe_section(runs[:1], 8, False).rows}
    assert rows["encoder", "words + positions"] > rows["encoder", WORDS_ALONE]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--num_sentences", "1"], "num_sentences must be at least 2, got 1."),
        (["--num_seeds", "0"], "num_seeds must be at least 1, got 0."),
        (["--num_sentences", "11"], "num_sentences must be at most 10"),
        (["--models", "nowhere/at/all"], "run must be a run folder"),
    ],
)
def test_bad_input_is_one_sentence(flags, sentence, runs, tmp_path, capsys):
    command = ["paper", "probe", "--no_train", "--models", runs[0], *flags]
    assert main([*command, "--output_dir", str(tmp_path / "out")]) == 1
    assert sentence in capsys.readouterr().err


def test_a_run_without_translations_is_refused(runs, tmp_path, capsys):
    command = ["paper", "probe", "--no_train", "--models", runs[0]]
    for file in (tmp_path / "run-0" / "hypotheses").iterdir():
        file.unlink()
    assert main([*command, "--output_dir", str(tmp_path / "out")]) == 1
    assert "`vanilla-transformer evaluate` writes them" in capsys.readouterr().err
