"""Runs that are stopped by a signal, lose their launcher, or have a stalled process."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import train_toys
from torch.utils.data import DataLoader
from train_toys import FOREVER, last_step, wait_until

from vanilla_transformer.console import EXIT_SIGNAL
from vanilla_transformer.train import loop
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.run_folder.checkpoint import checkpoints, newest_intact

pytestmark = pytest.mark.usefixtures("new_process")

ENDLESS = {"eval_every_steps": 50_000, "save_every_steps": FOREVER, "max_steps": FOREVER}


@pytest.fixture
def recipe(corpus, tmp_path):
    """Recipe of a run that does not end by itself."""
    settings = train_toys.toy_settings(corpus, tmp_path / "run", **ENDLESS)
    return train_toys.write_recipe(tmp_path / "toy.yaml", settings)


def the_saved_step(folder):
    """Return the only checkpoint, which must be intact."""
    (saved,) = checkpoints(folder / "checkpoints")
    assert newest_intact(folder / "checkpoints") == (saved, [])
    return int(saved.name.split("-")[1])


def last_line(stderr):
    return stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(start, recipe, tmp_path, name):
    process = start(recipe)
    wait_until(lambda: last_step(tmp_path / "run") >= 2, process)
    number = getattr(signal, name)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    step = the_saved_step(tmp_path / "run")
    assert f"{name}: the run ends after this step" in stderr
    assert (
        last_line(stderr)
        == f"{name}: step {step} is saved. To resume, add --resume to the command."
    )


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_before_the_first_step_says_that_nothing_is_saved(start, recipe, tmp_path, name):
    process = start(recipe)
    # it prepares the text
    wait_until((tmp_path / "run").exists, process)
    number = getattr(signal, name)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert (
        last_line(stderr)
        == f"{name}: no step is saved yet. To resume, add --resume to the command."
    )
    assert "Traceback" not in stderr
    assert not list((tmp_path / "run").glob("**/*unfinished*"))


def test_a_second_signal_ends_the_run_at_once(corpus, tmp_path, start):
    # a step that takes minutes
    model = {"hidden_size": 256, "encoder_layers": 6, "decoder_layers": 6}
    settings = {**ENDLESS, "tokens_per_step": 400_000, "model": model}
    own = train_toys.write_corpus(tmp_path / "corpus", pairs=20_000)
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml", train_toys.toy_settings(own, tmp_path / "run", **settings)
    )
    process = start(recipe)
    wait_until((tmp_path / "run/metrics.jsonl").exists, process)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    time.sleep(2.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == EXIT_SIGNAL + signal.SIGTERM


def test_a_second_signal_ends_a_single_operation_that_is_long():
    # as a backward pass is: the interpreter calls no handler meanwhile
    code = """if True:
        import time, torch
        from vanilla_transformer.train.ending import noticing_requests
        torch.set_num_threads(1)
        numbers = torch.ones(6000, 6000)
        with noticing_requests(prints_requests=False) as requests, requests.deferred():
            print("begins", flush=True)
            torch.linalg.svd(numbers)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=train_toys.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "begins\n"
        process.send_signal(signal.SIGINT)
        time.sleep(2.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == EXIT_SIGNAL + signal.SIGINT
    finally:
        process.kill()
        process.communicate()


def test_a_signal_that_is_ignored_stays_ignored(recipe, tmp_path):
    script = "trap '' HUP; exec " + " ".join(train_toys.command(recipe))
    process = subprocess.Popen(
        ["bash", "-c", script], env=train_toys.environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: last_step(tmp_path / "run") >= 2, process)
        process.send_signal(signal.SIGHUP)
        before = last_step(tmp_path / "run")
        wait_until(lambda: last_step(tmp_path / "run") > before + 20, process)
    finally:
        process.kill()
        process.communicate()


def test_a_run_whose_terminal_is_closed_saves_its_step(recipe, tmp_path):
    script = (
        "import os, pty, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "process, terminal = pty.fork()\n"
        "if process == 0:\n"
        "    os.execv(sys.argv[1], sys.argv[1:])\n"
        "print(process, flush=True)\n"
        "import select\n"
        "while True:\n"
        "    if select.select([terminal, sys.stdin], [], [])[0] != [terminal]: break\n"
        "    os.read(terminal, 65536)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, *train_toys.command(recipe)],
        env=train_toys.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = psutil.Process(int(holder.stdout.readline()))
    try:
        wait_until(lambda: last_step(tmp_path / "run") >= 2, holder)
        # the system sends SIGHUP to whatever runs on a terminal that is gone
        holder.kill()
        run.wait(100)
    except psutil.TimeoutExpired:
        run.kill()
        raise
    finally:
        holder.kill()
        holder.communicate()
    assert the_saved_step(tmp_path / "run") >= 2


def processes_of(process):
    """Return the training processes of a launcher."""
    found = psutil.Process(process.pid).children(recursive=True)
    return [it for it in found if "vanilla_transformer.train" in " ".join(it.cmdline())]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_last_line_of_a_launched_run_says_what_is_saved(start, recipe, tmp_path, number):
    process = start(recipe, processes=2)
    wait_until(lambda: last_step(tmp_path / "run") >= 2, process)
    # as from a terminal: the launcher and its processes get it, and the launcher passes it on
    for member in (psutil.Process(process.pid), *processes_of(process)):
        member.send_signal(number)
    _, stderr = process.communicate(timeout=300)
    step = the_saved_step(tmp_path / "run")
    name = signal.Signals(number).name
    assert (
        last_line(stderr)
        == f"{name}: step {step} is saved. To resume, add --resume to the command."
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_no_process_outlives_a_launcher_that_is_killed(start, recipe, tmp_path, processes):
    process = start(recipe, processes=processes)
    wait_until(lambda: last_step(tmp_path / "run") >= 2, process)
    members = processes_of(process)
    assert len(members) == processes
    process.kill()
    _, alive = psutil.wait_procs(members, timeout=300)
    assert not alive
    assert the_saved_step(tmp_path / "run") >= 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_demo_that_ends(begin, tmp_path, number):
    command = [Path(sys.executable).with_name("vanilla-transformer"), "demo"]
    process = begin(command, cwd=tmp_path)
    folder = tmp_path / "runs/demo"
    wait_until(lambda: last_step(folder) >= 1, process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, alive = psutil.wait_procs(family, timeout=300)
    for member in alive:
        member.kill()
    _, stderr = process.communicate()
    assert not alive
    step = the_saved_step(folder)
    assert process.returncode == (128 + number if number != signal.SIGKILL else -number)
    assert f"step {step} is saved. To resume, add --resume to the command." in stderr


def test_a_process_that_is_stopped_ends_the_run_and_is_named(start, recipe, tmp_path):
    process = start(recipe, "--stall_minutes", "0.1", "--save_every_steps", "2", processes=2)
    wait_until(lambda: last_step(tmp_path / "run") >= 4, process)
    stopped = next(it for it in processes_of(process) if it.environ()["RANK"] == "1")
    stopped.send_signal(signal.SIGSTOP)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode != 0
    said = (
        "error: process 1 of the run sent no heartbeat for 6 seconds (stall_minutes). The last "
        "checkpoint is intact: resume with --resume."
    )
    assert stderr.count(said) == 1
    assert newest_intact(tmp_path / "run/checkpoints")[0] is not None
    assert not stopped.is_running()


def test_a_main_process_that_is_stopped_is_named_by_another(start, recipe, tmp_path):
    process = start(recipe, "--stall_minutes", "0.1", processes=2)
    wait_until(lambda: last_step(tmp_path / "run") >= 4, process)
    stopped = next(it for it in processes_of(process) if it.environ()["RANK"] == "0")
    stopped.send_signal(signal.SIGSTOP)
    _, stderr = process.communicate(timeout=300)
    assert stderr.count("error: process 0 of the run sent no heartbeat for 6 seconds") == 1


def test_a_worker_that_dies_is_one_sentence(start, recipe, tmp_path):
    process = start(recipe, "--num_workers", "1")
    wait_until(lambda: last_step(tmp_path / "run") >= 2, process)
    (worker,) = psutil.Process(process.pid).children()
    worker.kill()
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert last_line(stderr).startswith(
        "error: a process that prepares batches died, there is no checkpoint yet: resume with "
    )


def test_a_worker_whose_pipe_closes_before_its_end_is_heard_of_is_one_sentence(
    corpus, tmp_path, monkeypatch
):
    others = set(psutil.Process().children())
    batches = iter(DataLoader(range(10), num_workers=1))

    def die(run, requests):
        next(batches)
        (worker,) = set(psutil.Process().children()) - others
        threading.Timer(0.3, worker.kill).start()
        raise ConnectionResetError

    monkeypatch.setattr(loop, "_train_and_average", die)
    config = train_toys.toy_config(corpus, tmp_path / "run", num_workers=1)
    with pytest.raises(OSError, match="a process that prepares batches died, there is no"):
        train(config)


@pytest.mark.parametrize("changes", [{}, {"max_steps": 1}, {"ema_decay": 0.9}])
def test_a_run_whose_weights_are_not_finite_ends_with_an_error_and_no_model(
    corpus, tmp_path, changes
):
    settings = {"learning_rate_factor": 1e300, "max_skipped_steps": 1000, **changes}
    with pytest.raises(FloatingPointError, match="must be finite"):
        train(train_toys.toy_config(corpus, tmp_path / "run", **settings))
    assert not list((tmp_path / "run").glob("**/*.safetensors"))


def test_a_run_whose_last_step_is_skipped_is_made_of_the_steps_before(
    corpus, tmp_path, monkeypatch, caplog
):
    from vanilla_transformer.train import step as loop_step

    real_step, real_loss = loop.training_step, loop_step.batch_loss_sum

    def last_step_without_a_loss(accelerator, model, optimizer, scheduler, batches, **settings):
        factor = float("inf") if scheduler.last_epoch == 11 else 1.0
        monkeypatch.setattr(loop_step, "batch_loss_sum", lambda *given: factor * real_loss(*given))
        return real_step(accelerator, model, optimizer, scheduler, batches, **settings)

    monkeypatch.setattr(loop, "training_step", last_step_without_a_loss)
    assert train(train_toys.toy_config(corpus, tmp_path / "run"))
    assert [it.name for it in checkpoints(tmp_path / "run/checkpoints")] == ["step-4", "step-8"]
    assert (
        "Step 12 was skipped and is not saved: the model is averaged from checkpoints up to step-8"
        in caplog.text
    )
