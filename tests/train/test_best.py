"""Runs that end when their time is over or their validation score gets worse."""

import dataclasses
import itertools
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import train_toys
from train_toys import FOREVER, last_step

from vanilla_transformer.cli import main
from vanilla_transformer.loading import load
from vanilla_transformer.train import loop
from vanilla_transformer.train.averaging import average_run, average_weights
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.data.prepare import load_texts
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.run import Run, _drop_outdated, metric_of
from vanilla_transformer.train.run_folder.checkpoint import (
    EMA_FILE,
    checkpoints,
    checkpoints_around,
    read_state,
    read_weights,
)
from vanilla_transformer.train.run_folder.files import read_average, read_metrics, read_recipe
from vanilla_transformer.train.run_folder.run_state import RunState
from vanilla_transformer.train.schedule import learning_rate
from vanilla_transformer.train.scoring import score_translations

EACH_STEP = {"eval_every_steps": 1, "save_every_steps": 1, "num_averaged_checkpoints": 3}


def saved_steps(folder):
    return [read_state(path)["step"] for path in checkpoints(folder / "checkpoints")]


@pytest.fixture
def losses(monkeypatch):
    """Replace the validation losses by those of a list that the test fills."""
    found = []
    monkeypatch.setattr(loop, "validation_loss", lambda *_: found.pop(0))
    return found


def test_a_run_ends_after_its_minutes_and_can_get_more(corpus, tmp_path, caplog):
    caplog.set_level("INFO")
    folder = tmp_path / "run"
    settings = {"max_steps": FOREVER, "save_every_steps": FOREVER, "eval_every_steps": FOREVER}
    config = train_toys.toy_config(corpus, folder, **settings, max_minutes=0.1)
    assert train(config)
    (step,) = saved_steps(folder)
    assert step > 1
    state = read_state(folder / f"checkpoints/step-{step}")
    assert state["seconds"] >= 6
    assert not state["is_stop"]
    assert read_average(folder)["steps"] == [step]
    assert f"The run ends with step {step}: its 0.1 minutes are over." in caplog.text
    # as after the last step, for any intervals
    last = read_metrics(folder)[-2:]
    assert [line["step"] for line in last] == [step, step]
    assert "validation_loss" in last[1]
    # nothing is left to train
    assert train(config, resume=True)
    assert saved_steps(folder) == [step]
    assert last_step(folder) == step
    more = train_toys.toy_config(corpus, folder, **settings, max_minutes=0.2)
    assert train(more, resume=True)
    assert saved_steps(folder)[-1] > step


def test_two_processes_end_together_after_their_minutes(corpus, tmp_path):
    settings = train_toys.toy_settings(
        corpus, tmp_path / "run", max_steps=FOREVER, save_every_steps=FOREVER, max_minutes=0.1
    )
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    said = train_toys.run_command(recipe, processes=2).stderr
    (step,) = saved_steps(tmp_path / "run")
    assert said.count(f"The run ends with step {step}: ") == 1
    assert read_average(tmp_path / "run")["steps"] == [step]


@pytest.mark.parametrize("processes", [0, 2])
def test_less_time_than_a_step_takes_is_refused(corpus, tmp_path, processes):
    settings = train_toys.toy_settings(corpus, tmp_path / "run")
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    with pytest.raises(AssertionError) as raised:
        train_toys.run_command(recipe, "--max_minutes", "1e-7", processes=processes)
    found = re.findall(
        r"error: max_minutes must be longer than a step, which took [\d.]+ seconds, got 1e-07\.",
        str(raised.value),
    )
    assert len(found) == 1
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    # the same folder serves with more time
    train_toys.run_command(recipe, processes=processes)


@pytest.fixture
def steps_of_one_second(monkeypatch):
    """Let each step of training take one second, and nothing else any time."""
    monkeypatch.setattr(Run, "seconds", property(lambda run: float(run.progress.bar.n)))


def seconds(number):
    return number / 60


def learning_rates(folder):
    return {
        line["step"]: line["learning_rate"]
        for line in read_metrics(folder)
        if "learning_rate" in line
    }


def without_cooldown(config, step):
    return learning_rate(step, 16, config.warmup_steps, config.learning_rate_factor)


@pytest.mark.usefixtures("steps_of_one_second")
@pytest.mark.parametrize(("cooldown_steps", "begins"), [(5, 15), (10, 10), (15, 10)])
def test_a_cooldown_ends_with_the_time(corpus, tmp_path, caplog, cooldown_steps, begins):
    caplog.set_level("INFO")
    folder = tmp_path / "run"
    settings = {"max_steps": 1000, "cooldown_steps": cooldown_steps, "log_every_steps": 1}
    config = train_toys.toy_config(corpus, folder, **settings, max_minutes=seconds(20))
    assert train(config)
    assert last_step(folder) == 20
    # at most the second half of the time
    number = 20 - begins
    expected = {step: without_cooldown(config, step) for step in range(1, begins + 1)}
    expected |= {
        step: expected[begins] * (21 - step) / (number + 1) for step in range(begins + 1, 21)
    }
    assert learning_rates(folder) == pytest.approx(expected)
    assert f"The cooldown begins after step {begins} and takes {number} steps" in caplog.text
    assert "The run ends with step 20, the last one of its cooldown." in caplog.text
    assert f"linear cooldown of {number} steps" in (folder / "README.md").read_text()
    # nothing is left to train
    assert train(config, resume=True)
    assert last_step(folder) == 20
    assert "max_minutes 1.0, before" not in (folder / "environment.txt").read_text()
    # with more time the learning rate rises again, and decays before the new end
    longer = dataclasses.replace(config, max_minutes=seconds(60))
    assert train(longer, resume=True)
    assert "changed: max_minutes 1.0 (was 0.333" in (folder / "environment.txt").read_text()
    rates = learning_rates(folder)
    assert rates[21] == pytest.approx(without_cooldown(config, 21))
    assert max(rates) == 60
    assert rates[60] < rates[59] < without_cooldown(config, 59) / 2


@pytest.mark.usefixtures("steps_of_one_second")
def test_a_run_stopped_during_its_cooldown_resumes_to_the_same_bits(corpus, tmp_path, monkeypatch):
    settings = {"max_steps": 1000, "cooldown_steps": 8, "log_every_steps": 1}
    whole, parts = (
        train_toys.toy_config(corpus, tmp_path / name, **settings, max_minutes=seconds(20))
        for name in ("whole", "parts")
    )
    assert train(whole)
    with monkeypatch.context() as patch:
        real = loop.make_step

        def stopping(run, step, batches):
            if step == 16:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(run, step, batches)

        patch.setattr(loop, "make_step", stopping)
        assert not train(parts)
    assert read_state(tmp_path / "parts/checkpoints/step-16")["cooldown"] == {
        "steps": 8,
        "last_step": 20,
        "max_minutes": seconds(20),
    }
    assert train(parts, resume=True)
    assert learning_rates(tmp_path / "parts") == learning_rates(tmp_path / "whole")
    found, expected = (train_toys.weights(tmp_path / name) for name in ("parts", "whole"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.usefixtures("steps_of_one_second")
def test_the_last_step_ends_a_run_before_its_time(corpus, tmp_path):
    folder = tmp_path / "run"
    settings = {"max_steps": 20, "cooldown_steps": 5, "log_every_steps": 1}
    config = train_toys.toy_config(corpus, folder, **settings, max_minutes=seconds(24))
    assert train(config)
    rates = learning_rates(folder)
    assert max(rates) == 20
    assert rates[15] == pytest.approx(without_cooldown(config, 15))
    assert rates[20] == pytest.approx(rates[15] / 6)
    assert not any("cooldown_steps" in line for line in read_metrics(folder))


@pytest.mark.usefixtures("steps_of_one_second")
def test_a_time_that_ends_in_the_warmup_is_warned_of(corpus, tmp_path, caplog):
    settings = {"max_steps": 1000, "cooldown_steps": 5, "warmup_steps": 16}
    config = train_toys.toy_config(corpus, tmp_path, **settings, max_minutes=seconds(20))
    assert train(config)
    assert "The warm-up of 16 steps is longer than max_minutes allows" in caplog.text


@pytest.mark.usefixtures("steps_of_one_second")
def test_a_run_that_ends_with_its_time_averages_its_last_fifth(corpus, tmp_path):
    settings = {"max_steps": 1000, "save_every_steps": 2, "num_averaged_checkpoints": 8}
    config = train_toys.toy_config(corpus, tmp_path, **settings, max_minutes=seconds(21))
    assert train(config)
    assert read_average(tmp_path)["steps"] == [18, 20, 21]
    # another number can be asked for
    average_run(tmp_path, num_checkpoints=5)
    assert read_average(tmp_path)["steps"] == [14, 16, 18, 20, 21]


@pytest.mark.usefixtures("steps_of_one_second")
def test_the_bar_counts_the_steps_that_the_time_allows(corpus, tmp_path, monkeypatch):
    totals = []
    real = loop._log_step
    monkeypatch.setattr(
        loop,
        "_log_step",
        lambda run, *given: totals.append(run.progress.bar.total) or real(run, *given),
    )
    settings = {"max_steps": 1000, "log_every_steps": 5}
    assert train(train_toys.toy_config(corpus, tmp_path, **settings, max_minutes=seconds(20)))
    assert totals == [1000, 20, 20, 20]


@pytest.mark.usefixtures("steps_of_one_second")
@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (
            {"max_steps": 1000, "max_minutes": 20 / 60},
            "step 20: to continue it, give a larger max_min",
        ),
        ({"max_steps": 6}, "step 6: to continue it, give a larger max_steps than 6."),
        (
            {"max_steps": 6, "max_minutes": 60},
            "step 6: to continue it, give a larger max_steps than 6, and a larger max_minutes than "
            "60 if this time is over.",
        ),
    ],
)
def test_a_finished_run_says_what_continues_it(corpus, tmp_path, caplog, settings, advice):
    caplog.set_level("INFO")
    config = train_toys.toy_config(corpus, tmp_path, **settings)
    assert train(config)
    assert "to continue it" not in caplog.text
    assert train(dataclasses.replace(config, label_smoothing=0.2), resume=True)
    assert f"The run has ended with {advice}" in caplog.text
    # no step was made with another setting
    assert "label_smoothing 0.2" not in (tmp_path / "environment.txt").read_text()
    assert "label_smoothing 0.2" not in caplog.text
    assert read_recipe(tmp_path).label_smoothing == 0.1


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({}, True),
        ({"patience": 3}, True),
        ({"bleu_tokenizer": "intl"}, False),
        ({"validation_sample": 9}, False),
        ({"best_metric": None}, False),
    ],
)
def test_a_best_score_counts_only_with_the_same_metric(changes, is_kept):
    config = TrainConfig(dataset="my/texts", best_metric="bleu", validation_sample=5)
    best = {"metric": metric_of(config), "step": 1, "score": 2.0, "later": 0}
    state = RunState(best_checkpoint=best)
    _drop_outdated(state, dataclasses.replace(config, **changes), config)
    assert state.best_checkpoint == (best if is_kept else None)


def test_two_processes_cool_down_together(corpus, tmp_path):
    settings = train_toys.toy_settings(
        corpus,
        tmp_path / "run",
        max_steps=FOREVER,
        save_every_steps=FOREVER,
        cooldown_steps=10,
        log_every_steps=1,
        max_minutes=0.05,
    )
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    said = train_toys.run_command(recipe, processes=2).stderr
    (number,) = re.findall(r"The cooldown begins after step \d+ and takes (\d+) steps", said)
    assert 1 <= int(number) <= 10
    rates = learning_rates(tmp_path / "run")
    (step,) = saved_steps(tmp_path / "run")
    assert rates[step] < rates[step - 1]


def test_a_run_ends_when_the_loss_gets_no_better(corpus, tmp_path, losses, caplog):
    caplog.set_level("INFO")
    losses += [5.0, 4.0, float("inf"), 2.0, 2.0, 3.0, 2.5, 9.0]
    folder = tmp_path / "run"
    assert train(train_toys.toy_config(corpus, folder, **EACH_STEP, patience=4))
    assert losses == []
    assert last_step(folder) == 8
    # the last three, and three around the best one
    assert saved_steps(folder) == [3, 4, 5, 6, 7, 8]
    assert read_average(folder)["steps"] == [3, 4, 5]
    averaged = average_weights([folder / f"checkpoints/step-{step}" for step in (3, 4, 5)])
    found = train_toys.weights(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in averaged.items())
    ends = "The run ends with step 8: 4 checkpoints in a row are no better than that of step 4."
    assert ends in caplog.text
    # a requested average is that of the last checkpoints
    assert average_run(folder, num_checkpoints=2) == "the mean of 2 checkpoints, of steps 7, 8"
    assert average_run(folder) == "the mean of 3 checkpoints, of steps 3, 4, 5"


def test_a_run_that_gets_better_to_its_end_averages_the_last_ones(corpus, tmp_path, losses):
    losses += [9.0, 8.0, 7.0, 6.0, 5.0]
    folder = tmp_path / "run"
    train(train_toys.toy_config(corpus, folder, **EACH_STEP, max_steps=5, best_metric="loss"))
    assert saved_steps(folder) == read_average(folder)["steps"] == [3, 4, 5]


def test_every_checkpoint_is_evaluated(corpus, tmp_path, losses):
    losses += [2.0, 7.0, 6.0, 5.0, 4.0]
    folder = tmp_path / "run"
    steps = {"eval_every_steps": 3, "save_every_steps": 2, "max_steps": 7}
    train(train_toys.toy_config(corpus, folder, **steps, best_metric="loss"))
    evaluated = [line["step"] for line in read_metrics(folder) if "validation_loss" in line]
    # step 7 is the last one
    assert evaluated == [2, 3, 4, 6, 7]
    # only checkpoints count, so the evaluation of step 3 does not
    assert read_state(folder / "checkpoints/step-7")["best_checkpoint"]["step"] == 2


def test_patience_continues_to_count_after_a_resume(corpus, tmp_path, losses):
    folder = tmp_path / "run"
    losses += [3.0, 1.0, 2.0]
    train(train_toys.toy_config(corpus, folder, **EACH_STEP, patience=3, max_steps=3))
    losses += [2.0, 2.0, 0.0]
    train(train_toys.toy_config(corpus, folder, **EACH_STEP, patience=3), resume=True)
    assert losses == [0.0]
    assert saved_steps(folder)[-1] == 5
    # it has ended; more patience continues it
    train(train_toys.toy_config(corpus, folder, **EACH_STEP, patience=3), resume=True)
    assert losses == [0.0]
    more = train_toys.toy_config(corpus, folder, **EACH_STEP, patience=5, max_steps=6)
    train(more, resume=True)
    assert losses == []
    best = read_state(folder / "checkpoints/step-6")["best_checkpoint"]
    assert best == {"metric": "loss", "step": 6, "score": 0.0, "later": 0}


def test_a_stopped_run_ends_as_one_that_was_not(corpus, tmp_path):
    settings = {**EACH_STEP, "best_metric": "chrf", "validation_sample": 5, "max_steps": 9}
    train(train_toys.toy_config(corpus, tmp_path / "whole", **settings))
    for steps in (4, 9):
        config = train_toys.toy_config(
            corpus, tmp_path / "parts", **{**settings, "max_steps": steps}
        )
        train(config, resume=steps > 4)
    train_toys.assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    bests = [
        read_state(tmp_path / name / "checkpoints/step-9")["best_checkpoint"]
        for name in ("whole", "parts")
    ]
    assert bests[0] == bests[1]


def test_the_scores_of_a_sample_are_those_of_the_checkpoint(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus", pairs=400)
    folder = tmp_path / "run"
    settings = {"max_steps": 300, "eval_every_steps": 150, "save_every_steps": 150}
    settings |= {"learning_rate_factor": 0.2, "model": {"hidden_size": 32}}
    config = train_toys.toy_config(corpus, folder, **settings, validation_sample=6)
    train(config)
    (first, last) = [line for line in read_metrics(folder) if "validation_bleu" in line]
    # 6 of 11 pairs, spread evenly
    rows = load_texts(config).validation.select([0, 1, 3, 5, 7, 9])
    pairs = [[row["translation"][lang] for row in rows] for lang in ("en", "de")]
    for line in (first, last):
        pipeline = load(folder)
        weights = read_weights(folder / f"checkpoints/step-{line['step']}")
        pipeline.model.load_state_dict(weights, strict=False)
        found = pipeline(pairs[0], num_beams=1)
        scores = score_translations([it["translation_text"] for it in found], pairs[1])
        assert line["validation_chrf"] == pytest.approx(scores["chrf"], abs=1e-9)
        assert line["validation_bleu"] == pytest.approx(scores["bleu"], abs=1e-9)
    assert last["validation_chrf"] > 0


def test_two_processes_translate_the_sample_as_one_does(corpus, tmp_path):
    for processes in (0, 2):
        folder = tmp_path / str(processes)
        settings = train_toys.toy_settings(corpus, folder, best_metric="bleu", validation_sample=7)
        recipe = train_toys.write_recipe(tmp_path / f"{processes}.yaml", settings)
        train_toys.run_command(recipe, processes=processes)
    scores = [
        [line["validation_chrf"] for line in read_metrics(tmp_path / name) if "epoch" not in line]
        for name in ("0", "2")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=5)
    assert len(scores[0]) == 4


def test_the_moving_average_is_that_of_the_best_checkpoint(corpus, tmp_path, losses):
    losses += [5.0, 1.0, 2.0, 3.0]
    folder = tmp_path / "run"
    settings = {**EACH_STEP, "max_steps": 4, "ema_decay": 0.5, "best_metric": "loss"}
    train(train_toys.toy_config(corpus, folder, **settings))
    assert read_average(folder)["steps"] == [2]
    kept = read_weights(folder / "checkpoints/step-2", EMA_FILE)
    found = train_toys.weights(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())


def test_the_checkpoints_around_a_step():
    steps = [10, 20, 30, 40, 50, 60]
    paths = [Path(f"step-{step}") for step in steps]
    for step, number in itertools.product(steps, range(1, 8)):
        found = [int(path.name[5:]) for path in checkpoints_around(step, number, paths)]
        assert step in found
        assert len(found) == min(number, len(steps))
        assert found == [it for it in steps if found[0] <= it <= found[-1]]
        before = found.index(step)
        after = len(found) - before - 1
        # in the middle, except near the ends
        assert 0 <= before - after <= 1 or found[0] == 10 or found[-1] == 60
    # the checkpoint of the step is gone
    assert checkpoints_around(35, 1, paths) == [Path("step-30")]
    assert checkpoints_around(5, 1, paths) == [Path("step-10")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"max_minutes": 0}, r"max_minutes must be above 0, got 0\.0"),
        ({"best_metric": "blue"}, "one of loss, bleu, chrf, got 'blue'. Did you mean 'bleu'"),
        ({"validation_sample": 0}, "validation_sample must be at least 1"),
        ({"patience": 2, "averaged_minutes": 3}, "averaged_minutes must be null .*, got 3"),
    ],
)
def test_settings_that_do_not_fit_are_refused(corpus, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        train_toys.toy_config(corpus, tmp_path / "run", **settings)


def test_the_defaults_of_the_metric(corpus, tmp_path):
    config = train_toys.toy_config(corpus, tmp_path, patience=3)
    assert (config.best_metric, config.validation_sample) == ("loss", None)
    config = train_toys.toy_config(corpus, tmp_path, best_metric="chrf")
    assert (config.patience, config.validation_sample) == (None, 200)


@pytest.mark.parametrize("setting", [{"patience": 2}, {"validation_sample": 5}])
def test_a_score_needs_a_validation_split(corpus, tmp_path, setting):
    for path in corpus.glob("validation.*"):
        path.unlink()
    name = "best_metric" if "patience" in setting else "validation_sample"
    needed = f"{name} must be null for .*, which has no split 'validation'. To hold out"
    with pytest.raises(ValueError, match=needed):
        train(train_toys.toy_config(corpus, tmp_path / "run", **setting))


@pytest.mark.parametrize("processes", [0, 2])
def test_a_measured_dry_run_says_how_long_the_run_takes(corpus, tmp_path, processes):
    folder = tmp_path / "runs" / "toy"
    settings = train_toys.toy_settings(corpus, folder, max_steps=FOREVER)
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    said = train_toys.run_command(recipe, "--dry_run", "measured", processes=processes).stdout
    assert list(tmp_path.iterdir()) == [recipe]
    assert said.count("\nmeasured\n") == 1
    facts = dict(re.findall(r"^  ([\w ]+): (.+)$", said.partition("\nmeasured\n")[2], re.M))
    assert facts["step"].endswith(" seconds, 50,000 of them")
    assert facts["evaluation"].endswith(" seconds, 8,334 of them")
    assert facts["checkpoint"].endswith(" seconds, 12,500 of them")
    costs = [facts[name].split()[0:3:2] for name in ("step", "evaluation", "checkpoint")]
    in_all = sum(float(seconds) * int(number.replace(",", "")) for seconds, number in costs)
    hours, minutes, seconds = map(int, facts["training"].split()[0].split(":"))
    assert 3600 * hours + 60 * minutes + seconds == pytest.approx(in_all, rel=0.02, abs=2)
    # the tokens of all pairs are counted exactly here, and estimated without training
    measured = float(facts["epochs"].split(",")[0])
    computed = float(re.search(r"epochs: about (\S+)", said)[1].replace(",", ""))
    assert computed == pytest.approx(measured, rel=0.3)


def test_a_measured_dry_run_says_how_many_steps_the_time_allows(corpus, tmp_path):
    settings = train_toys.toy_settings(corpus, tmp_path / "run", max_steps=FOREVER, max_minutes=0.1)
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    said = train_toys.run_command(recipe, "--dry_run", "measured").stdout
    assert "training: 0:00:06 (hours:minutes:seconds), after the preparation" in said
    (steps,) = re.findall(r"within max_minutes: about ([\d,]+) of 50,000 steps", said)
    (seconds,) = re.findall(r"step: ([\d.e-]+) seconds", said)
    assert 0 < int(steps.replace(",", "")) <= 6 / float(seconds)


def test_a_measured_dry_run_uses_the_vocabulary_that_is_there(corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", train_toys.toy_settings(corpus, folder))
    assert main(["tokenize", str(recipe)]) == 0
    before = sorted(folder.rglob("*"))
    assert main(["train", str(recipe), "--dry_run", "measured"]) == 0
    assert "\nmeasured\n" in capsys.readouterr().out
    assert sorted(folder.rglob("*")) == before
    assert main(["tokenize", str(recipe), "--dry_run", "measured"]) == 1


@pytest.mark.parametrize("words", [["--dry_run", "demo"], ["demo", "--dry_run"]])
def test_the_word_after_the_flag_can_be_the_recipe(words, capsys):
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("demo\n")
    assert "\nmeasured\n" not in said
