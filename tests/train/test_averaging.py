"""Averaged model of a run, from checkpoints or a moving average. Section 6.1."""

import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import train_toys

from vanilla_transformer.cli import main
from vanilla_transformer.loading import load_run
from vanilla_transformer.train import averaging, loop
from vanilla_transformer.train import step as loop_step
from vanilla_transformer.train.averaging import MovingAverage, average_run, average_weights
from vanilla_transformer.train.evaluate import evaluate
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.recipe import load_config
from vanilla_transformer.train.run_folder.checkpoint import (
    EMA_FILE,
    checkpoints,
    load_weights,
    read_state,
    read_weights,
    save_checkpoint,
    write_state,
)


def make_model(seed=0):
    return train_toys.toy_model(seed, hidden_size=8)


def save(folder: Path, step: int, keep_seconds: float | None = None, **state):
    model = make_model(seed=step)
    optimizer = torch.optim.Adam(model.parameters())
    weights, others = dict(model.named_parameters()), optimizer.state_dict()
    state = {"step": step, "seconds": 0.0, **state}
    files = {"model": model, "weights": weights, "optimizer_state": others}
    save_checkpoint(folder, state, **files, keep=9, keep_seconds=keep_seconds)
    return model


def test_an_average_is_the_mean_of_each_weight(tmp_path):
    models = [save(tmp_path, step) for step in (1, 2, 3)]
    average = average_weights(checkpoints(tmp_path))
    assert len(average) > 10
    for name, tensor in average.items():
        mean = sum(model.state_dict()[name].double() for model in models) / 3
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


def test_an_averaged_model_is_tied_as_before_and_loads(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    model = make_model()
    average = average_weights(checkpoints(tmp_path))
    load_weights(model, average)
    table = model.model.encoder.embed_tokens.weight
    assert model.lm_head.weight is table
    assert model.model.decoder.embed_tokens.weight is table
    assert torch.equal(table, next(v for k, v in average.items() if v.shape == (19, 8)))
    model.save_pretrained(tmp_path / "out")
    assert read_weights(tmp_path / "out").keys() == average.keys()


def test_an_average_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one checkpoint, got none"):
        average_weights([])


def test_fewer_checkpoints_can_be_averaged_afterwards(corpus, tmp_path):
    train(train_toys.toy_config(corpus, tmp_path / "run"))
    assert (
        average_run(tmp_path / "run", num_checkpoints=1) == "the mean of 1 checkpoint, of step 12"
    )
    train_toys.assert_same_bits(tmp_path / "run", tmp_path / "run/checkpoints/step-12")
    with pytest.raises(
        ValueError, match=r"num_checkpoints must be from 1 to 2, .* averaged, got 3"
    ):
        average_run(tmp_path / "run", num_checkpoints=3)
    with pytest.raises(ValueError, match=r"must be a run folder, with recipe\.yaml"):
        average_run(tmp_path)


def steps(folder):
    return [read_state(path)["step"] for path in checkpoints(folder)]


def test_checkpoints_are_kept_for_as_long_as_they_may_be_averaged(tmp_path):
    for step, seconds in ((1, 10.0), (2, 40.0), (3, 69.0), (4, 100.0), (5, 101.0)):
        save(tmp_path, step, keep_seconds=60.0, seconds=seconds)
    assert steps(tmp_path) == [3, 4, 5]
    # however long the last one took
    save(tmp_path, 6, keep_seconds=60.0, seconds=1000.0)
    assert steps(tmp_path) == [6]


def set_minutes(run: Path, minutes: dict[int, float]):
    """Pretend that the checkpoints were made after the given minutes of training."""
    for path in checkpoints(run / "checkpoints"):
        state = read_state(path)
        state["seconds"] = 60 * minutes[state["step"]]
        write_state(path, state)


def test_the_checkpoints_of_the_last_minutes_are_averaged(corpus, tmp_path):
    run = tmp_path / "run"
    train(train_toys.toy_config(corpus, run, averaged_minutes=60.0, num_averaged_checkpoints=1))
    found = checkpoints(run / "checkpoints")
    assert steps(run / "checkpoints") == [4, 8, 12]
    assert_same_weights(train_toys.weights(run), average_weights(found))
    set_minutes(run, {4: 10.0, 8: 20.0, 12: 30.5})
    for minutes, expected in ((11.0, found[1:]), (10.0, found[2:]), (99.0, found)):
        average_run(run, minutes=minutes)
        assert_same_weights(train_toys.weights(run), average_weights(expected))
    # what the recipe says
    average_run(run)
    assert_same_weights(train_toys.weights(run), average_weights(found))


def assert_same_weights(left, right):
    assert left.keys() == right.keys()
    assert len(left) > 10
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_resumed_run_continues_to_count_its_training_time(corpus, tmp_path):
    config = train_toys.toy_config(corpus, tmp_path / "run", max_steps=5)
    train(config)
    set_minutes(tmp_path / "run", {4: 7.0, 5: 8.0})
    train(train_toys.toy_config(corpus, tmp_path / "run"), resume=True)
    seconds = read_state(checkpoints(tmp_path / "run/checkpoints")[-1])["seconds"]
    assert 480 < seconds < 600


def test_a_moving_average_is_the_sum_it_is_defined_by():
    model = make_model()
    name, weight = next(iter(model.named_parameters()))
    average = MovingAverage(model, decay=0.5)
    expected = weight.flatten()[3].item()
    for step in range(1, 21):
        weight.data += torch.randn_like(weight)
        is_skipped = step == 4
        average.update(step, torch.tensor(is_skipped))
        decay = min(0.5, (1 + step) / (10 + step))
        if not is_skipped:
            expected = decay * expected + (1 - decay) * weight.flatten()[3].item()
        assert average.averages[name].flatten()[3].item() == pytest.approx(expected, rel=1e-5)
    assert decay == 0.5, "it never came to the decay itself"


def moving_average(run: Path, step: int):
    return read_weights(run / f"checkpoints/step-{step}", EMA_FILE)


EVERY_STEP = {"save_every_steps": 1, "num_averaged_checkpoints": 20}


def test_the_model_of_a_run_can_be_the_moving_average(corpus, tmp_path):
    train(train_toys.toy_config(corpus, tmp_path / "run", ema_decay=0.3, **EVERY_STEP))
    assert steps(tmp_path / "run/checkpoints") == list(range(1, 13))
    for step in range(2, 13):
        decay = min(0.3, (1 + step) / (10 + step))
        before, now = (moving_average(tmp_path / "run", at) for at in (step - 1, step))
        after = train_toys.weights(tmp_path / f"run/checkpoints/step-{step}")
        assert before.keys() == now.keys() == after.keys()
        for name, tensor in after.items():
            expected = decay * before[name].double() + (1 - decay) * tensor.double()
            torch.testing.assert_close(now[name].double(), expected, rtol=1e-5, atol=1e-7)
    assert_same_weights(train_toys.weights(tmp_path / "run"), moving_average(tmp_path / "run", 12))
    assert any(not torch.equal(now[name], after[name]) for name in now)


def test_a_resumed_moving_average_is_bit_identical(corpus, tmp_path):
    settings = {"ema_decay": 0.9, "save_every_steps": 3}
    train(train_toys.toy_config(corpus, tmp_path / "whole", **settings))
    train(train_toys.toy_config(corpus, tmp_path / "parts", **settings, max_steps=5))
    train(train_toys.toy_config(corpus, tmp_path / "parts", **settings), resume=True)
    train_toys.assert_same_bits(tmp_path / "parts", tmp_path / "whole")
    assert_same_weights(
        moving_average(tmp_path / "parts", 12), moving_average(tmp_path / "whole", 12)
    )


def test_a_run_resumes_only_with_the_same_ema_decay(corpus, tmp_path):
    train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=1))
    with pytest.raises(ValueError, match=r"ema_decay was None, got 0\.9"):
        train(train_toys.toy_config(corpus, tmp_path / "run", ema_decay=0.9), resume=True)


def test_a_skipped_step_leaves_the_moving_average(corpus, tmp_path, monkeypatch):
    real_step, real_loss = loop.training_step, loop_step.batch_loss_sum

    def third_step_without_a_loss(accelerator, model, optimizer, scheduler, batches, **settings):
        is_third = scheduler.last_epoch == 2
        factor = math.inf if is_third else 1.0
        if is_third:
            os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(loop_step, "batch_loss_sum", lambda *given: factor * real_loss(*given))
        return real_step(accelerator, model, optimizer, scheduler, batches, **settings)

    monkeypatch.setattr(loop, "training_step", third_step_without_a_loss)
    settings = {"ema_decay": 0.9, **EVERY_STEP}
    # a skipped step is saved only where a run is asked to end
    config = train_toys.toy_config(corpus, tmp_path / "run", **settings, max_steps=4)
    assert not train(config)
    second, third = (moving_average(tmp_path / "run", step) for step in (2, 3))
    assert train(config, resume=True)
    fourth = moving_average(tmp_path / "run", 4)
    assert_same_weights(second, third)
    assert any(not torch.equal(third[name], fourth[name]) for name in third)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Run with checkpoints that contain moving averages."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(train_toys.toy_config(corpus, folder, ema_decay=0.9, num_averaged_checkpoints=3))
    return folder


def test_several_averages_can_be_tried_without_a_change_to_the_run(run, tmp_path, capsys):
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    for flags, said in (
        (["--num_checkpoints", "2"], "the mean of 2 checkpoints, of steps 8, 12"),
        (["--minutes", "60"], "the mean of 3 checkpoints, of steps 4, 8, 12"),
        (["--ema"], "the exponential moving average of the weights at step 12, with decay 0.9"),
    ):
        folder = tmp_path / flags[0].strip("-")
        assert main(["average", str(run), *flags, "--output_dir", str(folder)]) == 0
        printed = capsys.readouterr()
        assert printed.out == f"{said}, is in {folder}\n"
        assert said not in printed.err
        assert said in (folder / "README.md").read_text(encoding="utf-8")
        assert load_run(folder)[0].generation_config.num_beams == 4
        assert not (folder / "checkpoints").exists()
        # the data of the run, without a flag
        assert evaluate(str(folder), split="validation", max_extra_tokens=1)["sentences"] == 11
    assert before == {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    train_toys.assert_same_bits(tmp_path / "ema", run)
    assert_same_weights(
        train_toys.weights(tmp_path / "num_checkpoints"),
        average_weights(checkpoints(run / "checkpoints")[1:]),
    )


def test_what_is_no_average_is_not_overwritten_by_one(run, tmp_path, capsys):
    names = ("README.md", "config.json", "generation_config.json", "tokenizer_config.json")
    for name in (*names, "pictures/loss.png"):
        folder = tmp_path / name.partition(".")[0].replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("mine")
        assert main(["average", str(run), "--output_dir", str(folder)]) == 1
        assert f"got {folder} with a {name}, which would be replaced" in capsys.readouterr().err
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert [path.read_text() for path in files] == ["mine"]
    again = tmp_path / "again"
    for _ in range(2):
        assert main(["average", str(run), "--output_dir", str(again)]) == 0
    assert main(["average", str(again)]) == 1
    assert f"{again} must have a checkpoint to average, got none" in capsys.readouterr().err


def test_the_weights_of_a_model_come_last(run, tmp_path, monkeypatch):
    own = Path(shutil.copytree(run, tmp_path / "run"))
    replaced = []
    replace = Path.replace

    def noticed(path, target):
        replaced.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", noticed)
    average_run(own)
    model = [name for name in replaced if (own / name).is_file()]
    assert model[-1] == "model.safetensors"
    assert {"config.json", "tokenizer.json"} < set(model)


def test_only_the_weights_of_a_checkpoint_are_averaged(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    found = checkpoints(copy / "checkpoints")
    for path in found:
        (path / "optimizer.pt").unlink()
    average_run(copy)
    train_toys.assert_same_bits(copy, run)
    for path in found:
        (path / EMA_FILE).unlink()
    with pytest.raises(ValueError, match=r"average, got .*step-12, whose ema\.saf"):
        average_run(copy)
    average_run(copy, num_checkpoints=3)
    assert_same_weights(train_toys.weights(copy), average_weights(found))


def test_an_average_is_made_and_described_where_the_text_is_gone(corpus, tmp_path, caplog):
    own = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    train(train_toys.toy_config(own, tmp_path / "run"))
    picture = tmp_path / "run/pictures/attention.png"
    assert picture.exists()
    shutil.rmtree(own)
    assert (
        average_run(tmp_path / "run", num_checkpoints=1) == "the mean of 1 checkpoint, of step 12"
    )
    assert "of step 12" in (tmp_path / "run/README.md").read_text(encoding="utf-8")
    assert "No picture of attention is drawn: dataset" in caplog.text
    # the one there was is of other weights
    assert not picture.exists()


def test_a_cache_that_cannot_be_written_costs_only_the_picture(monkeypatch, caplog):
    def unwritable(config):
        raise OSError("the cache of datasets must be a folder that can be written")

    monkeypatch.setattr(averaging, "load_main_corpus", unwritable)
    assert averaging._find_example_sentence(load_config("demo"), None, None) is None
    assert "No picture of attention is drawn: the cache of datasets must be" in caplog.text


def test_a_picture_is_drawn_of_a_sentence_that_the_model_can_read(corpus, tmp_path):
    own = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    for lang in ("en", "de"):
        (own / f"validation.{lang}").write_text("zyx " * 14 + "\nant bee cat dog elk\n")
    positions = {"position_encoding": "learned", "max_position_embeddings": 24}
    train(train_toys.toy_config(own, tmp_path / "run", model=positions, max_length=24, max_steps=1))
    assert (tmp_path / "run/pictures/attention.png").exists()


def test_an_average_that_cannot_be_had_is_refused(corpus, run, tmp_path, capsys):
    train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=1))
    for folder, flags, message in (
        (run, ["--minutes", "5", "--ema"], "got minutes 5.0 and ema True"),
        (run, ["--minutes", "0"], "minutes must be above 0, got 0.0"),
        (run, ["--minutes", "nan"], "minutes must be above 0, got nan"),
        (tmp_path / "run", ["--ema"], "must have a moving average, from training with ema_decay"),
        (tmp_path / "run", ["--output_dir", str(run)], "must not be another run's folder"),
    ):
        assert main(["average", str(folder), *flags]) == 1
        assert message in capsys.readouterr().err
    for settings, message in (
        ({"ema_decay": 1.0}, r"ema_decay must be above 0 and below 1, got 1\.0"),
        ({"averaged_minutes": 0}, r"averaged_minutes must be above 0, got 0\.0"),
        ({"averaged_minutes": 9, "ema_decay": 0.9}, "must not be given together, got 9.0 and 0.9"),
    ):
        with pytest.raises(ValueError, match=message):
            load_config("demo", settings)
