"""Progress bar, metrics and trackers of a run."""

import fcntl
import json
import math
import os
import pty
import re
import struct
import subprocess
import termios
import time

import pytest
import train_toys
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from accelerate.utils import LoggerType
from tqdm import tqdm

from vanilla_transformer.train import progress as reporting
from vanilla_transformer.train.__main__ import main
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.progress import BAR_FORMAT, Progress
from vanilla_transformer.train.run_folder.files import read_metrics
from vanilla_transformer.train.run_folder.run_state import NON_PADDING_TOKENS, POSITIONS

pytestmark = pytest.mark.usefixtures("new_process")


@pytest.fixture
def progress(corpus, tmp_path):
    config = train_toys.toy_config(corpus, tmp_path)
    return Progress(tmp_path, config, 0, None, Accelerator(cpu=True))


def test_a_number_that_is_not_finite_is_no_number_of_json(progress, tmp_path):
    progress.write(step=1, loss=math.inf, grad_norm=math.nan, epoch=0.5)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "epoch": 0.5,
    }


def test_a_clock_that_stands_still_divides_nothing_by_zero(progress, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: progress.start_time)
    progress.log(step=1, learning_rate=0.1)
    assert read_metrics(tmp_path)[0]["tokens_per_second"] == 0.0


def test_metrics_survive_a_resume_that_is_killed(corpus, tmp_path, monkeypatch):
    def killed(descriptor):
        raise KeyboardInterrupt

    lines = '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    monkeypatch.setattr(os, "fsync", killed)
    config = train_toys.toy_config(corpus, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Progress(tmp_path, config, 2, None, Accelerator(cpu=True))
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def screen(command, columns):
    """Return all lines that a command shows on a terminal, overwritten ones too."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    process = subprocess.Popen(command, env=train_toys.environment(), stdout=child, stderr=child)
    os.close(child)
    shown = b""
    while True:
        try:
            shown += os.read(parent, 4096)
        except OSError:
            break
    assert process.wait() == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_bar_fits_the_terminal(corpus, tmp_path, columns):
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml", train_toys.toy_settings(corpus, tmp_path / "run")
    )
    lines = screen(train_toys.command(recipe), columns)
    bars = [line for line in lines if "/12" in line]
    assert all(len(line) <= columns for line in bars)
    last = bars[-1]
    for part in ("12/12", "left", "loss ", "lr ", "tok/s", "val "):
        assert part in last
    assert "█" in last


def test_the_bar_of_a_run_of_days_on_eight_fast_devices_fits(progress, monkeypatch):
    progress.window |= {"loss": 3e7, "tokens": 1e7, POSITIONS: 100, NON_PADDING_TOKENS: 97}
    now = progress.start_time + 18
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress.log(step=1, learning_rate=4.9e-4)
    for more, end in (({}, "val 1.500"), ({"bleu": 27.34, "chrf": 55.5}, "BLEU 27.3")):
        progress.log_scores(1, {"loss": 1.5, "perplexity": 4.5, **more})
        text = progress.bar.desc
        line = tqdm.format_meter(123456, 300000, 1e5, ncols=80, bar_format=BAR_FORMAT, prefix=text)
        assert line.rstrip().endswith(f"loss 3.000 lr 4.9e-04 555,556 tok/s {end}")
        assert "123456/300000" in line
        assert "left" in line


def test_what_is_written_can_be_read_again(progress):
    progress.write(step=1, loss=1e45, grad_norm=float("inf"), perplexity=float("nan"), skipped=2)
    [line] = read_metrics(progress.path.parent)
    assert line == {"step": 1, "loss": None, "grad_norm": None, "perplexity": None, "skipped": 2}


def test_the_bar_of_a_run_with_a_time_budget_marks_its_steps_as_an_estimate(corpus, tmp_path):
    config = train_toys.toy_config(corpus, tmp_path, max_minutes=9)
    estimating = Progress(tmp_path, config, 0, None, Accelerator(cpu=True))
    assert f"0/~{config.max_steps} " in str(estimating.bar)


def test_a_log_file_does_not_get_a_line_a_moment(corpus, tmp_path):
    steps = {"max_steps": 100, "eval_every_steps": 100, "save_every_steps": 100}
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml", train_toys.toy_settings(corpus, tmp_path / "run", **steps)
    )
    started = time.monotonic()
    said = train_toys.run_command(recipe).stderr
    # as it begins, around the look at the validation loss, and as it ends
    most = 4 + (time.monotonic() - started) // reporting.SECONDS_BETWEEN_LINES
    assert 1 <= said.count("/100 ") <= most


@pytest.mark.parametrize("processes", [0, 2])
def test_a_training_logs_only_what_a_user_has_to_know(corpus, tmp_path, processes):
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml", train_toys.toy_settings(corpus, tmp_path / "run")
    )
    log = train_toys.run_command(recipe, processes=processes).stderr
    # a progress bar, or advice that depends on the cores of the machine
    is_other = re.compile(r"\||.*\[\d\d:\d\d|Each process uses \d+ of \d+ cores\.").match
    lines = [line for line in re.split("[\r\n]+", log) if line.strip() and not is_other(line)]
    beginnings = [
        "validation pairs: kept 11,",
        "sentences in the training text, validation: source 0 exact",
        "sentences in the training text, test: source 1 exact",
        "These sentences can make the scores too high.",
        f"training pairs of {corpus}: kept 90,",
        "parameters 12,440, pairs 90,",
        "step 6: validation loss ",
        "step 12: validation loss ",
        "the mean of 2 checkpoints, of steps 8, 12, is in ",
    ]
    known = [next(filter(line.startswith, beginnings), line) for line in lines]
    assert known == beginnings


def tensorboard(folder):
    """Return the numbers in event files of TensorBoard, by name and step."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_shows_what_metrics_have_also_after_a_resume(corpus, tmp_path):
    settings = {"report_to": "tensorboard", "save_every_steps": 3}
    folder = tmp_path / "run"
    train(train_toys.toy_config(corpus, folder, **settings, max_steps=8))
    (folder / "checkpoints/step-8").rename(tmp_path / "step-8")
    train(train_toys.toy_config(corpus, folder, **settings), resume=True)
    shown = tensorboard(folder / "trackers/vanilla_transformer")
    metrics = read_metrics(folder)
    assert len(metrics) > 12
    for name in ("loss", "learning_rate", "tokens_per_second", "non_padding", "validation_loss"):
        expected = {line["step"]: line[name] for line in metrics if name in line}
        assert shown[name] == pytest.approx(expected, rel=1e-6), name
    (recipe, *_) = folder.glob("trackers/vanilla_transformer/*/hparams.yml")
    assert "tokens_per_step: 300" in recipe.read_text()


def test_a_tracker_is_refused_by_name(corpus, tmp_path, monkeypatch, capsys):
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml", train_toys.toy_settings(corpus, tmp_path / "run")
    )
    monkeypatch.setattr(reporting, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    for given, expected in (
        ("tensorbord", "got 'tensorbord'. Did you mean 'tensorboard'?"),
        ("[tensorboard, 7]", "got 7."),
        ("tensorboard, wandb", "report_to 'wandb' must be installed, but its package is missing."),
    ):
        assert main([str(recipe), "--report_to", given]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert line.endswith(expected)
    assert not (tmp_path / "run").exists()


class UsageError(Exception):
    """Error of a tracker, which is no built-in error."""


@pytest.mark.parametrize("call", ["start", "log"])
def test_an_error_of_a_tracker_names_the_tracker(corpus, tmp_path, monkeypatch, capsys, call):
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml", train_toys.toy_settings(corpus, tmp_path / "run", max_steps=4)
    )

    def fail(*_, **__):
        raise UsageError("No API key configured.")

    monkeypatch.setattr(TensorBoardTracker, call, fail)
    assert main([str(recipe), "--report_to", "tensorboard"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: report_to must name trackers that work, or be none, got tensorboard: UsageError: "
        "No API key configured."
    )
    assert main([str(recipe), "--resume"]) == 0


def test_none_means_no_tracker(corpus, tmp_path):
    assert train_toys.toy_config(corpus, tmp_path, report_to="none").report_to == []
    both = train_toys.toy_config(corpus, tmp_path, report_to="tensorboard, wandb").report_to
    assert both == ["tensorboard", "wandb"]
