"""Training curves of sections 5 and 6 show the logged metrics."""

import argparse
import json
import math
import shutil

import pytest

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.cli import main
from vanilla_transformer.drawing import new_figure
from vanilla_transformer.paper.curve import sections
from vanilla_transformer.paper.label_smoothing import least_loss
from vanilla_transformer.train.recipe import load_config, save_config
from vanilla_transformer.train.run_folder.plots import draw_loss_curve, logged_values, plot_losses

LINES = [
    {"step": 5, "learning_rate": 1e-4, "grad_norm": 3.0, "loss": 6.0, "tokens_per_second": 90.0},
    {"step": 5, "validation_loss": 5.5, "validation_perplexity": 244.7},
    {"step": 10, "learning_rate": 2e-4, "grad_norm": 2.0, "loss": 4.0, "tokens_per_second": 110.0},
    {"step": 10, "validation_loss": 3.0, "validation_perplexity": 20.1},
    # all steps were skipped, and the loss was not finite
    {"step": 15, "learning_rate": 3e-4, "grad_norm": None, "loss": None, "tokens_per_second": 0.0},
    {"step": 15, "validation_loss": 3.5, "validation_perplexity": 33.1},
]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def curves(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


def test_a_curve_has_the_finite_points():
    assert logged_values(LINES, "loss") == ([5, 10], [6.0, 4.0])
    assert logged_values(LINES, "validation_loss") == ([5, 10, 15], [5.5, 3.0, 3.5])
    assert logged_values(LINES, "nothing") == ([], [])


def test_the_losses_of_a_run_are_drawn_alone_and_beside_others():
    _, axes = new_figure(3.0, 2.0)
    plot_losses(axes, LINES)
    assert curves(axes) == {
        "training, with label smoothing": [[5, 6.0], [10, 4.0]],
        "validation": [[5, 5.5], [10, 3.0], [15, 3.5]],
    }
    colors = [line.get_color() for line in axes.lines]
    assert colors[0] != colors[1]
    _, axes = new_figure(3.0, 2.0)
    plot_losses(axes, LINES, "a")
    plot_losses(axes, LINES, "b")
    assert list(curves(axes)) == [
        f"{run}, {what}"
        for run in "ab"
        for what in ("training, with label smoothing", "validation")
    ]
    colors = [line.get_color() for line in axes.lines]
    assert colors[0] == colors[1] != colors[2] == colors[3]


def test_a_run_without_a_loss_is_still_drawn(run):
    (run / "metrics.jsonl").write_text("", encoding="utf-8")
    draw_loss_curve(run)
    assert (run / "pictures" / "loss.png").stat().st_size > 500


def test_the_study_compares_the_logged_metrics_of_runs(run, tmp_path, capsys):
    other = shutil.copytree(run, tmp_path / "other")
    config = load_config("demo", {"label_smoothing": 0.2})
    save_config(config, other / "recipe.yaml")
    command = ["paper", "curve", str(run), str(other), "--output_dir", str(tmp_path / "out")]
    assert main(command) == 0
    found = json.loads((tmp_path / "out" / "study.json").read_text(encoding="utf-8"))
    rows = found["sections"]["curve"]["rows"]
    assert [row[0] for row in rows] == [str(run), str(other)]
    for row, floor in zip(rows, (None, least_loss(config.vocab_size, 0.2)), strict=True):
        assert row[1:] == [10, 6.0, 4.0, floor, 3.0, pytest.approx(math.exp(3.0)), 10, 90.0, 3.0]
    assert "lowest validation loss is 3.000 at step 10" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "out" / "curve.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("tokenizer", "saved", "expected"),
    [(None, None, 8000), (None, 900, 900), ("t", 900, 900), ("t", None, None)],
)
def test_the_lower_bound_uses_the_vocabulary_of_the_model(
    run, tmp_path, tokenizer, saved, expected
):
    save_config(load_config("demo", {"vocab_size": 8000}), run / "recipe.yaml")
    if tokenizer is not None:
        # the tokenizer may have been deleted since
        settings = {"tokenizer": str(tmp_path / tokenizer), "vocab_size": 37000}
        save_config(load_config("demo", settings), run / "recipe.yaml")
    if saved is not None:
        VanillaTransformerConfig(vocab_size=saved).save_pretrained(run)
    flags = argparse.Namespace(runs=[str(run)])
    (section,) = sections(flags)
    floor = None if expected is None else least_loss(expected, 0.1)
    assert section.rows[0][4] == floor
    assert ("its smoothed targets allow no loss below" in section.finding) == (floor is not None)


def test_a_folder_without_training_losses_is_refused(tmp_path, capsys):
    command = ["paper", "curve", str(tmp_path / "none"), "--output_dir", str(tmp_path / "out")]
    assert main(command) == 1
    assert "must be a run folder with training losses" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))
