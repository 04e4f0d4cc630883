"""Whole runs, with any number of processes and killed at any time, give the same model."""

import dataclasses
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from unittest.mock import MagicMock

import equations
import pytest
import torch
import train_toys
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.atomic_files import locked_folder
from vanilla_transformer.loading import load_run
from vanilla_transformer.train import loop, step
from vanilla_transformer.train import run as setup
from vanilla_transformer.train.averaging import average_run, average_weights
from vanilla_transformer.train.data.batches import TrainingSteps
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.recipe import load_config, save_config
from vanilla_transformer.train.run_folder import checkpoint as checkpointing
from vanilla_transformer.train.run_folder import environment
from vanilla_transformer.train.run_folder.checkpoint import checkpoints
from vanilla_transformer.train.run_folder.environment import read_environment
from vanilla_transformer.train.run_folder.files import read_metrics, read_recipe
from vanilla_transformer.train.run_folder.plots import draw_attention
from vanilla_transformer.train.vocabulary import load_tokenizer, prepare_tokenizer

pytestmark = pytest.mark.usefixtures("new_process")

TIMES = ("tokens_per_second",)


@pytest.fixture(scope="module")
def whole_run(corpus, tmp_path_factory):
    """Uninterrupted run of 12 steps; an epoch has more than 4 and fewer than 12."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(train_toys.toy_config(corpus, folder))
    return folder


def curve(folder):
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in read_metrics(folder)
    ]


def test_a_run_leaves_a_folder_that_loads_and_translates(whole_run):
    for name in (
        *("config.json", "model.safetensors", "generation_config.json", "tokenizer.json"),
        *("README.md", "recipe.yaml", "environment.txt", "metrics.jsonl"),
        *("pictures/loss.png", "pictures/attention.png", "tokenizer/tokenizer.json"),
    ):
        assert (whole_run / name).stat().st_size > 0, name
    model = AutoModelForSeq2SeqLM.from_pretrained(whole_run)
    tokenizer = AutoTokenizer.from_pretrained(whole_run)
    inputs = tokenizer("ant bee cat", return_tensors="pt")
    output = model.generate(**inputs)
    assert 1 < output.shape[1] <= 1 + inputs["input_ids"].shape[1] + 50
    settings = GenerationConfig.from_pretrained(whole_run)
    assert (settings.num_beams, settings.length_penalty_alpha) == (4, 0.6)
    assert settings.max_extra_tokens == 50


def test_the_model_of_a_run_is_the_average_of_its_last_checkpoints(whole_run):
    found = checkpoints(whole_run / "checkpoints")
    assert [path.name for path in found] == ["step-8", "step-12"]
    average = average_weights(found)
    saved = train_toys.weights(whole_run)
    assert average.keys() == saved.keys()
    assert all(torch.equal(average[name], saved[name]) for name in saved)


def test_a_run_says_how_it_went(whole_run):
    lines = read_metrics(whole_run)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    # before anything is learned every token is about as likely
    assert losses[0] == pytest.approx(math.log(290), rel=0.3)
    assert [line["step"] for line in lines if "validation_loss" in line] == [6, 12]
    assert all(line["non_padding"] > 0.7 for line in lines if "loss" in line)
    environment = (whole_run / "environment.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch: 2\.", environment, re.MULTILINE)
    assert re.search(r"^tokenizer_sha256: [0-9a-f]{64}$", environment, re.MULTILINE)
    assert re.search(r"^text_sha256: [0-9a-f]{64}$", environment, re.MULTILINE)
    assert re.search(r"^dataset_commit: none$", environment, re.MULTILINE)
    assert re.search(r"^cleaning: .*: kept 90, wrong_encoding 0, ", environment, re.MULTILINE)
    assert re.search(r"^pairs: 90$", environment, re.MULTILINE)


def test_a_run_notes_the_commit_of_the_package_and_whether_it_was_changed(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)

    def noted():
        return environment.environment_facts()["commit"]

    module = tmp_path / "train/run_folder/environment.py"
    module.parent.mkdir(parents=True)
    module.write_text("", encoding="utf-8")
    git("init")
    git("add", "train")
    git("commit", "-m", "x", "--no-gpg-sign")
    monkeypatch.setattr(environment, "__file__", str(module))
    commit = git("rev-parse", "HEAD").stdout.strip()
    assert len(commit) >= 40
    assert noted() == commit
    module.write_text("changed", encoding="utf-8")
    assert noted() == f"{commit} (dirty)"
    # installed somewhere inside a checkout of something else
    monkeypatch.setattr(
        environment, "__file__", str(tmp_path / "train/lib/run_folder/environment.py")
    )
    assert noted() == "none"


def test_what_must_not_change_a_run_leaves_its_losses(whole_run):
    losses = [line["loss"] for line in read_metrics(whole_run) if "loss" in line]
    assert losses[:3] == pytest.approx([6.2522, 5.4815, 4.8731], abs=1e-3)


def test_settings_reach_the_step_the_save_and_the_search(corpus, tmp_path, monkeypatch):
    of_steps, rates, kept_seconds = [], [], []
    real_step, real_save = loop.training_step, checkpointing.save_checkpoint

    def step_noted(accelerator, model, optimizer, scheduler, batches, **settings):
        of_steps.append(settings)
        rates.append(optimizer.param_groups[0]["lr"])
        return real_step(accelerator, model, optimizer, scheduler, batches, **settings)

    def save_noted(*given, keep_seconds, **others):
        kept_seconds.append(keep_seconds)
        return real_save(*given, keep_seconds=keep_seconds, **others)

    monkeypatch.setattr(loop, "training_step", step_noted)
    monkeypatch.setattr(checkpointing, "save_checkpoint", save_noted)
    of_a_step = {"label_smoothing": 0.3, "max_grad_norm": 0.7}
    of_the_run = {"averaged_minutes": 2.0, "max_steps": 3}
    of_the_rate = {"warmup_steps": 2, "learning_rate_factor": 0.5}
    search = {"num_beams": 3, "length_penalty_alpha": 0.3, "max_extra_tokens": 7}
    settings = {**of_a_step, **of_the_run, **of_the_rate, **search}
    train(train_toys.toy_config(corpus, tmp_path / "run", **settings))
    assert of_steps == [{**of_a_step, "has_own_loss": False}] * 3
    # the learning rate of the optimizer; the log computes its own
    expected = [0.5 * equations.learning_rate(number, 16, 2) for number in (1, 2, 3)]
    assert rates == pytest.approx(expected)
    assert kept_seconds == [120]
    for folder in ("run", "run/checkpoints/step-3"):
        kept = GenerationConfig.from_pretrained(tmp_path / folder)
        assert {name: getattr(kept, name) for name in search} == search


def test_the_seed_says_what_the_first_weights_are(corpus, tmp_path):
    tables = []
    for seed in (1, 1, 2):
        config = train_toys.toy_config(corpus, tmp_path, seed=seed)
        model, _, _ = setup._make_model_and_collator(config, VanillaTransformerTokenizer())
        tables.append(model.lm_head.weight)
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_dropout_is_another_for_each_seed_step_and_process(monkeypatch):
    seeds = []
    monkeypatch.setattr(
        loop, "training_step", lambda *given, **named: seeds.append(torch.initial_seed())
    )
    for seed in (1, 2):
        for step_number in (1, 2):
            for process in (0, 1):
                run = MagicMock(moving_average=None)
                run.config.seed, run.accelerator.process_index = seed, process
                loop.make_step(run, step_number, [])
    assert len(seeds) == len(set(seeds)) == 8


def test_the_gradient_scale_of_half_precision_is_resumed(corpus, tmp_path, monkeypatch):
    real_open = loop.distribution.open_accelerator

    def with_a_scaler(config):
        accelerator = real_open(config)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        return accelerator

    monkeypatch.setattr(loop.distribution, "open_accelerator", with_a_scaler)
    train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=3))
    train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=4), resume=True)
    scalers = [
        checkpointing.read_optimizer(path)["scaler"]
        for path in checkpoints(tmp_path / "run/checkpoints")
    ]
    assert [scaler["scale"] for scaler in scalers] == [8.0, 16.0]


def test_a_loss_scaled_too_high_costs_steps_and_no_weights(corpus, tmp_path, monkeypatch):
    real_open, real_suit = loop.distribution.open_accelerator, loop.distribution.use_cpu_kernels

    def with_a_scaler(config):
        accelerator = real_open(config)
        # the gradient of a loss of some 5, times this, is beyond float16 until it was halved
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        # which accelerate does on a GPU only
        accelerator.autocast = lambda: torch.autocast("cpu", torch.float16)
        return accelerator

    monkeypatch.setattr(loop.distribution, "open_accelerator", with_a_scaler)
    monkeypatch.setattr(
        loop.distribution, "use_cpu_kernels", lambda model, is_half: real_suit(model, True)
    )
    settings = {"max_steps": 40, "warmup_steps": 20, "save_every_steps": 1, "max_skipped_steps": 20}
    train(train_toys.toy_config(corpus, tmp_path / "half", **settings))
    monkeypatch.undo()
    train(train_toys.toy_config(corpus, tmp_path / "whole", **settings))
    half, whole = (
        [line for line in read_metrics(tmp_path / name) if "learning_rate" in line]
        for name in ("half", "whole")
    )
    skipped = half[-1]["skipped"]
    last = checkpoints(tmp_path / "half/checkpoints")[-1]
    assert 2 <= skipped <= 20
    assert checkpointing.read_optimizer(last)["scaler"]["scale"] == 2.0 ** (24 - skipped)
    assert [line["skipped"] for line in half[:2]] == [1, 2]
    # the steps that count come later and do the same
    assert half[-1]["loss"] == pytest.approx(whole[-1 - skipped]["loss"], rel=0.1)
    assert half[-1]["loss"] < 0.9 * whole[0]["loss"]
    for weight in train_toys.weights(last).values():
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, weight.half().float())


class Wrapper(torch.nn.Module):
    """Stand-in for the wrapper of accelerate around a model on several processes."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        return self.module(**inputs)


def test_what_is_around_the_model_is_gone_before_the_group_of_processes(
    corpus, tmp_path, monkeypatch, stop_at
):
    real_prepare = loop.distribution.prepare
    wrappers, left = [], []

    def prepare(accelerator, *given):
        model, *optimizers = real_prepare(accelerator, *given)
        wrapper = Wrapper(model)
        accelerator._models.append(wrapper)
        wrappers.append(weakref.ref(wrapper))
        return wrapper, *optimizers

    monkeypatch.setattr(loop.distribution, "prepare", prepare)
    monkeypatch.setattr(setup.Accelerator, "end_training", lambda _: left.append(wrappers[-1]()))
    stop_at(train_toys.toy_config(corpus, tmp_path / "run", max_steps=2), 1)
    train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=2), resume=True)
    assert left == [None, None]


def test_a_run_in_two_parts_is_the_run_in_one(corpus, whole_run, tmp_path):
    # the first part ends in the middle of an epoch, between two saves and two logs
    assert train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=5))
    assert train(train_toys.toy_config(corpus, tmp_path / "run"), resume=True)
    train_toys.assert_same_bits(
        tmp_path / "run/checkpoints/step-12", whole_run / "checkpoints/step-12"
    )
    whole = curve(whole_run)
    parts = [line for line in curve(tmp_path / "run") if line["step"] != 5 or "loss" in line]
    assert parts == whole


def test_what_is_counted_between_two_lines_survives_a_stop(corpus, tmp_path):
    settings = {"log_every_steps": 4, "save_every_steps": 3, "num_averaged_checkpoints": 9}
    config = train_toys.toy_config(corpus, tmp_path / "run", **settings, max_steps=8)
    train(config)
    expected = curve(tmp_path / "run")
    assert [line["step"] for line in expected if "loss" in line] == [4, 8]
    for path in checkpoints(tmp_path / "run/checkpoints")[1:]:
        path.rename(tmp_path / path.name)
    train(config, resume=True)
    assert curve(tmp_path / "run") == expected


def test_a_save_killed_in_the_middle_costs_nothing_but_time(
    corpus, whole_run, tmp_path, monkeypatch
):
    class Killed(BaseException):
        pass

    def killed_at_step_8(path):
        if "step-8" in str(path):
            raise Killed

    config = train_toys.toy_config(corpus, tmp_path / "run")
    monkeypatch.setattr(checkpointing, "finish", killed_at_step_8)
    with pytest.raises(Killed):
        train(config)
    monkeypatch.undo()
    folder = tmp_path / "run/checkpoints"
    assert list(folder.glob(".step-8.*.unfinished/model.safetensors"))
    assert [path.name for path in checkpoints(folder)] == ["step-4"]
    assert train(config, resume=True)
    train_toys.assert_same_bits(tmp_path / "run", whole_run)
    assert curve(tmp_path / "run") == curve(whole_run)


@pytest.fixture
def stop_at(monkeypatch):
    """Return a function that runs a training and stops it in a given step."""

    def stop(config, at, resume=False):
        real_step = loop.make_step

        def asked_to_end(run, step, batches):
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            return real_step(run, step, batches)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "make_step", asked_to_end)
            assert not train(config, resume=resume)

    return stop


def test_a_run_that_was_asked_to_end_and_resumed_ends_with_the_same_model(
    corpus, whole_run, tmp_path, stop_at
):
    config = train_toys.toy_config(corpus, tmp_path / "run")
    stop_at(config, 3)
    stop_at(config, 10, resume=True)
    found = checkpoints(tmp_path / "run/checkpoints")
    assert [path.name for path in found] == ["step-4", "step-8", "step-10"]
    assert train(config, resume=True)
    train_toys.assert_same_bits(tmp_path / "run", whole_run)
    assert curve(tmp_path / "run") == curve(whole_run)


def test_a_stop_that_becomes_the_end_counts(corpus, tmp_path, stop_at):
    stop_at(train_toys.toy_config(corpus, tmp_path / "run"), 10)
    assert average_run(tmp_path / "run") == "the mean of 2 checkpoints, of steps 4, 8"
    assert train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=10), resume=True)
    assert train(train_toys.toy_config(corpus, tmp_path / "whole", max_steps=10))
    train_toys.assert_same_bits(tmp_path / "run", tmp_path / "whole")


def test_a_stop_alone_can_be_averaged(corpus, tmp_path, stop_at):
    stop_at(train_toys.toy_config(corpus, tmp_path / "run"), 3)
    assert average_run(tmp_path / "run") == "the mean of 1 checkpoint, of step 3"
    train_toys.assert_same_bits(tmp_path / "run", tmp_path / "run/checkpoints/step-3")


def test_a_setting_of_the_launcher_does_not_divide_the_loss(
    corpus, whole_run, tmp_path, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    train(train_toys.toy_config(corpus, tmp_path / "run"))
    assert curve(tmp_path / "run") == curve(whole_run)


def test_a_model_that_cannot_be_is_refused_before_the_data_is_prepared(corpus, tmp_path):
    positions = {"position_encoding": "learned", "max_position_embeddings": 50}
    with pytest.raises(ValueError, match=r"max_length must be at most 50, .* got 60"):
        train(train_toys.toy_config(corpus, tmp_path / "run", model=positions))
    assert not (tmp_path / "run").exists()


def test_what_is_refused_leaves_no_folder_behind(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"train\.fr must exist beside"):
        train(train_toys.toy_config(corpus, tmp_path / "run", source_lang="fr"))
    assert not (tmp_path / "run").exists()
    # unless it holds something of the user's
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"train\.fr must exist beside"):
        train(train_toys.toy_config(corpus, tmp_path / "run", source_lang="fr"))
    assert (tmp_path / "run/notes.txt").is_file()


@pytest.mark.parametrize("recipe_of_before", [False, True])
def test_a_start_that_is_refused_leaves_no_vocabulary_of_the_refused_text(
    corpus, tmp_path, recipe_of_before
):
    config = train_toys.toy_config(corpus, tmp_path / "run", max_length=1, max_steps=1)
    if recipe_of_before:
        (tmp_path / "run").mkdir()
        save_config(config, tmp_path / "run/recipe.yaml")
    with pytest.raises(ValueError, match="must have a pair"):
        train(config)
    left = [path.name for path in (tmp_path / "run").glob("*")]
    assert left == (["recipe.yaml"] if recipe_of_before else [])
    assert (tmp_path / "run").exists() is recipe_of_before


def test_two_do_not_train_in_one_folder(corpus, tmp_path):
    config = train_toys.toy_config(corpus, tmp_path, max_steps=1)
    with (
        locked_folder(tmp_path),
        pytest.raises(ValueError, match=f"{tmp_path} is in use by another command"),
    ):
        train(config)
    assert train(config)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork processes")
def test_a_folder_is_free_once_its_holder_is_killed_though_its_child_lives(tmp_path):
    holder = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from vanilla_transformer.atomic_files import locked_folder\n"
        "with locked_folder(Path(sys.argv[1])):\n"
        "    if os.fork() == 0:\n"
        "        print(os.getpid(), flush=True)\n"
        "    time.sleep(100)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)],
        env=train_toys.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(process.stdout.readline())
    try:
        with (
            pytest.raises(ValueError, match="is in use by another command"),
            locked_folder(tmp_path),
        ):
            pass
        process.kill()
        process.wait()
        with locked_folder(tmp_path):
            os.kill(child, 0)
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
        process.communicate()


def test_batches_prepared_by_workers_are_the_same(corpus, whole_run, tmp_path):
    assert train(train_toys.toy_config(corpus, tmp_path / "run", num_workers=2))
    train_toys.assert_same_bits(tmp_path / "run", whole_run)


def test_a_run_is_not_overwritten(corpus, whole_run):
    with pytest.raises(ValueError, match=r"--resume must be given, got .* with step-12"):
        train(train_toys.toy_config(corpus, whole_run))


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_whose_checkpoints_are_damaged_does_not_begin_again(
    corpus, whole_run, tmp_path, resume
):
    run = Path(shutil.copytree(whole_run, tmp_path / "run"))
    for path in checkpoints(run / "checkpoints"):
        (path / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"intact checkpoint, got step-12, whose optimizer\.pt"):
        train(train_toys.toy_config(corpus, run), resume=resume)
    assert curve(run) == curve(whole_run)


def test_a_run_does_not_resume_with_other_settings_or_other_data(corpus, tmp_path):
    own = train_toys.write_corpus(tmp_path / "corpus")
    train(train_toys.toy_config(own, tmp_path / "run", max_steps=4))
    with pytest.raises(ValueError, match="tokens_per_step was 300, got 400"):
        train(train_toys.toy_config(own, tmp_path / "run", tokens_per_step=400), resume=True)
    train_toys.write_corpus(tmp_path / "corpus", pairs=70, seed=8)
    with pytest.raises(ValueError, match=r"its own data: pairs was 90, got 70; source_tokens"):
        train(train_toys.toy_config(own, tmp_path / "run"), resume=True)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_run_does_not_resume_with_other_validation_text(tmp_path, is_streamed):
    own = train_toys.write_corpus(tmp_path / "corpus")
    stream = {"streaming": True, "block_pairs": 30, "tokens_per_step": 200}
    settings = stream if is_streamed else {}
    train(train_toys.toy_config(own, tmp_path / "run", max_steps=4, **settings))
    for language in ("en", "de"):
        path = own / f"validation.{language}"
        path.write_text(path.read_text().replace("ant", "tan"))
    with pytest.raises(ValueError, match=r"its own data: validation_sha256 was \w+, got \w+\.$"):
        train(train_toys.toy_config(own, tmp_path / "run", **settings), resume=True)


def test_a_checkpoint_that_is_not_used_is_named(corpus, tmp_path, caplog):
    train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=8))
    (tmp_path / "run/checkpoints/step-8/optimizer.pt").unlink()
    with caplog.at_level("WARNING", logger="vanilla_transformer"):
        assert train(train_toys.toy_config(corpus, tmp_path / "run"), resume=True)
    said = "step-8, whose optimizer.pt is missing, truncated or changed: not used."
    assert f"{said} The run resumes from step-4." in caplog.text


def test_a_copy_of_the_tokenizer_serves_where_it_lies(corpus, whole_run, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        shutil.copytree(whole_run / "tokenizer", place)
    settings = {"max_steps": 4, "tokenizer": str(first)}
    train(train_toys.toy_config(corpus, tmp_path / "run", **settings))
    settings |= {"max_steps": 6, "tokenizer": str(second)}
    assert train(train_toys.toy_config(corpus, tmp_path / "run", **settings), resume=True)
    vocabulary = json.loads((second / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary["model"]["merges"].reverse()
    (second / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    settings |= {"max_steps": 8, "tokenizer": str(first)}
    train(train_toys.toy_config(corpus, tmp_path / "run", **settings), resume=True)
    settings |= {"max_steps": 10, "tokenizer": str(second)}
    with pytest.raises(ValueError, match="have the vocabulary of tokenizer"):
        train(train_toys.toy_config(corpus, tmp_path / "run", **settings), resume=True)


def test_a_vocabulary_is_not_taken_for_one_of_other_text(tmp_path):
    own = train_toys.write_corpus(tmp_path / "corpus")
    config = train_toys.toy_config(own, tmp_path / "run", max_steps=1)
    learned = prepare_tokenizer(config)
    assert prepare_tokenizer(config).get_vocab() == learned.get_vocab()
    train_toys.write_corpus(tmp_path / "corpus", seed=8)
    for begin in (prepare_tokenizer, train):
        with pytest.raises(ValueError, match=r"learned from the same text: .* Remove .*tokenizer"):
            begin(config)
    shutil.rmtree(tmp_path / "run/tokenizer")
    assert train(config)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_run_does_not_resume_with_a_replaced_tokenizer(corpus, tmp_path, is_streamed):
    stream = {"streaming": True, "block_pairs": 30, "tokens_per_step": 200}
    settings = {"max_steps": 4, **(stream if is_streamed else {})}
    train(train_toys.toy_config(corpus, tmp_path / "run", **settings))
    # as many tokens, but joined in another order
    path = tmp_path / "run/tokenizer/tokenizer.json"
    definition = json.loads(path.read_text(encoding="utf-8"))
    definition["model"]["merges"].reverse()
    path.write_text(json.dumps(definition), encoding="utf-8")
    settings["max_steps"] = 6
    with pytest.raises(ValueError, match=r"its own data: tokenizer_sha256 was \w+, got \w+\.$"):
        train(train_toys.toy_config(corpus, tmp_path / "run", **settings), resume=True)


def test_a_run_does_not_resume_with_other_special_tokens(tmp_path):
    own = train_toys.write_corpus(tmp_path / "corpus")
    train(train_toys.toy_config(own, tmp_path / "run", max_steps=4))
    path = tmp_path / "run" / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "bos_token": settings["eos_token"]}))
    with pytest.raises(ValueError, match=r"its own data: bos_token was <s>, got </s>\.$"):
        train(train_toys.toy_config(own, tmp_path / "run"), resume=True)


def test_a_run_resumes_after_its_text_was_moved_and_says_what_changed(corpus, tmp_path, caplog):
    with caplog.at_level("WARNING", logger="vanilla_transformer"):
        train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=2), resume=True)
    assert f"no checkpoint in {tmp_path / 'run'}: the run begins with step 1" in caplog.text
    moved = Path(shutil.copytree(corpus, tmp_path / "moved"))
    caplog.clear()
    with caplog.at_level("INFO", logger="vanilla_transformer"):
        train(
            train_toys.toy_config(moved, tmp_path / "run", max_steps=3, label_smoothing=0.5),
            resume=True,
        )
    change = "max_steps 3 (was 2); label_smoothing 0.5 (was 0.1)"
    assert f"From step 3 on: {change}." in caplog.text
    assert "The run resumes after step 2." in caplog.text
    assert re.search(r"parameters [\d,]+, pairs \d+, source tokens [\d,]+, target ", caplog.text)
    assert "no checkpoint" not in caplog.text
    assert read_environment(tmp_path / "run")[-1]["changed"] == change
    card = (tmp_path / "run/README.md").read_text(encoding="utf-8")
    assert f"| changed settings | from step 3 on: {change} |" in card


def test_a_run_resumes_with_the_given_settings_of_adam(corpus, tmp_path):
    train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=2))
    given = {"adam_beta1": 0.8, "adam_beta2": 0.5, "adam_epsilon": 1e-3}
    train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=3, **given), resume=True)
    (before,), (after,) = (
        checkpointing.read_optimizer(path)["optimizer"]["param_groups"]
        for path in checkpoints(tmp_path / "run/checkpoints")
    )
    assert (before["betas"], before["eps"]) == ((0.9, 0.98), 1e-9)
    assert (after["betas"], after["eps"]) == ((0.8, 0.5), 1e-3)


def test_a_run_does_not_go_back_to_an_earlier_step(corpus, whole_run):
    before = (whole_run / "recipe.yaml").read_bytes()
    with pytest.raises(ValueError, match=r"max_steps must be at least 12, .* got 6"):
        train(train_toys.toy_config(corpus, whole_run, max_steps=6), resume=True)
    assert (whole_run / "recipe.yaml").read_bytes() == before


def test_a_loss_that_stays_infinite_ends_the_run_with_advice(corpus, tmp_path):
    config = train_toys.toy_config(
        corpus, tmp_path / "run", learning_rate_factor=1e30, max_skipped_steps=3, max_steps=30
    )
    with pytest.raises(FloatingPointError, match=r"3 steps in a row.*learning_rate_factor"):
        train(config)


@pytest.fixture
def spoilt(monkeypatch):
    """Numbers of steps whose loss is infinite."""
    real_step, real_loss = loop.training_step, step.batch_loss_sum
    numbers = []

    def training_step(accelerator, model, optimizer, scheduler, batches, **settings):
        factor = math.inf if scheduler.last_epoch + 1 in numbers else 1.0
        monkeypatch.setattr(step, "batch_loss_sum", lambda *given: factor * real_loss(*given))
        return real_step(accelerator, model, optimizer, scheduler, batches, **settings)

    monkeypatch.setattr(loop, "training_step", training_step)
    return numbers


@pytest.fixture
def saved(monkeypatch):
    """The steps after which a checkpoint was saved, with whether only to stop."""
    real_save = loop.save_step
    found = []

    def save(run, step, is_stop=False):
        found.append((step, is_stop))
        real_save(run, step, is_stop)

    monkeypatch.setattr(loop, "save_step", save)
    return found


def test_no_good_checkpoint_is_removed_for_weights_that_may_be_damaged(
    corpus, tmp_path, spoilt, saved
):
    spoilt += [8, 9]
    settings = {"num_averaged_checkpoints": 1, "save_every_steps": 4}
    config = train_toys.toy_config(corpus, tmp_path / "run", **settings)
    # a save that is due waits for the next step that counts
    assert train(config)
    assert saved == [(4, False), (10, False), (12, False)]
    spoilt[:] = range(8, 13)
    config = dataclasses.replace(config, output_dir=str(tmp_path / "stopped"), max_skipped_steps=3)
    with pytest.raises(FloatingPointError, match="resume with --resume"):
        train(config)
    assert [path.name for path in checkpoints(tmp_path / "stopped/checkpoints")] == ["step-4"]
    spoilt.clear()
    assert train(config, resume=True)


def test_a_late_save_is_made_after_resuming(corpus, tmp_path, spoilt, saved, monkeypatch):
    spoilt += [8, 9]
    config = train_toys.toy_config(corpus, tmp_path, save_every_steps=4)
    real_log = loop._log_step

    def log(run, step, result):
        real_log(run, step, result)
        if step == 9:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "_log_step", log)
    assert not train(config)
    assert train(config, resume=True)
    assert saved == [(4, False), (9, True), (10, False), (12, False)]


def test_a_skipped_step_is_counted(corpus, tmp_path, spoilt):
    spoilt.append(3)
    assert train(train_toys.toy_config(corpus, tmp_path / "run"))
    skipped = [line["skipped"] for line in read_metrics(tmp_path / "run") if "skipped" in line]
    assert skipped == [0, 0] + [1] * 10


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_ends_a_worker_is_said_as_it_was_found(corpus, tmp_path, monkeypatch, num_workers):
    real = TrainingSteps.__getitem__

    def without_the_third(steps, steps_done):
        if steps_done == 2:
            raise json.JSONDecodeError("no text", "x", 0)
        return real(steps, steps_done)

    monkeypatch.setattr(TrainingSteps, "__getitem__", without_the_third)
    config = train_toys.toy_config(corpus, tmp_path / "run", num_workers=num_workers)
    with pytest.raises(ValueError, match=r"^no text: line 1 column 1 \(char 0\)$"):
        train(config)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("unknown", ["en", "de"])
def test_a_tokenizer_that_does_not_know_the_text_is_refused(unknown, streaming, tmp_path):
    words = {"en": ["ant", "bee", "cat"], "de": ["\u043c\u0438\u0440", "\u0434\u043e\u043c"]}
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for language, known in words.items():
        lines = [f"{known[number % len(known)]} {known[0]}\n" for number in range(50)]
        (corpus / f"train.{language}").write_text("".join(lines), encoding="utf-8")
    other = next(language for language in words if language != unknown)

    def save(known, folder):
        vocab = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *known])}
        backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
        PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ).save_pretrained(folder)
        return {"tokenizer": str(folder), "streaming": streaming}

    known = save(words[other] + words[unknown][:1], tmp_path / "most")
    assert len(prepare_tokenizer(train_toys.toy_config(corpus, tmp_path / "good", **known))) > 5
    known = save(words[other], tmp_path / "some")
    message = f"must cover the text in '{unknown}', but 100 of the 100 tokens of 50 sentences"
    with pytest.raises(ValueError, match=message):
        prepare_tokenizer(train_toys.toy_config(corpus, tmp_path / "run", **known))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_can_be_given(corpus, whole_run, tmp_path):
    brought = Path(shutil.copytree(whole_run / "tokenizer", tmp_path / "brought"))
    settings = {"tokenizer": str(brought), "max_steps": 1}
    train(train_toys.toy_config(corpus, tmp_path / "run", **settings))
    expected = AutoTokenizer.from_pretrained(brought).get_vocab()
    shutil.rmtree(brought)
    # the run keeps its own
    settings["max_steps"] = 2
    train(train_toys.toy_config(corpus, tmp_path / "run", **settings), resume=True)
    average_run(tmp_path / "run")
    for part in ("", "tokenizer"):
        assert AutoTokenizer.from_pretrained(tmp_path / "run" / part).get_vocab() == expected
    assert load_run(tmp_path / "run/checkpoints/step-1")[1].get_vocab() == expected
    with pytest.raises(
        ValueError, match=r"tokenizer must be a folder, a Hub name or .*, got .* no such folder"
    ):
        prepare_tokenizer(train_toys.toy_config(corpus, tmp_path, tokenizer=str(tmp_path / "no")))


def test_a_run_keeps_the_tokenizer_that_it_began_with(corpus, whole_run, tmp_path):
    settings = {"tokenizer": str(whole_run / "tokenizer"), "max_steps": 1}
    prepare_tokenizer(train_toys.toy_config(corpus, tmp_path / "run", **settings))
    # what does not shape it may change before the first step
    prepare_tokenizer(train_toys.toy_config(corpus, tmp_path / "run", **settings, seed=2))
    prepare_tokenizer(train_toys.toy_config(corpus, tmp_path / "other", vocab_size=280))
    settings["tokenizer"] = str(tmp_path / "other/tokenizer")
    with pytest.raises(ValueError, match=r"have the vocabulary of .*, got another one in .*run"):
        train(train_toys.toy_config(corpus, tmp_path / "run", **settings))
    # the same tokens, but joined in another order
    shutil.copytree(whole_run / "tokenizer", tmp_path / "reversed")
    path = tmp_path / "reversed" / "tokenizer.json"
    definition = json.loads(path.read_text(encoding="utf-8"))
    definition["model"]["merges"].reverse()
    path.write_text(json.dumps(definition), encoding="utf-8")
    settings["tokenizer"] = str(path.parent)
    with pytest.raises(ValueError, match=r"have the vocabulary of .*reversed', got another one in"):
        train(train_toys.toy_config(corpus, tmp_path / "run", **settings))
    with pytest.raises(ValueError, match=r"tokenizer was '.*', got None"):
        train(train_toys.toy_config(corpus, tmp_path / "run"))


def test_a_vocabulary_learned_with_other_settings_is_not_taken(corpus, tmp_path):
    learned = prepare_tokenizer(train_toys.toy_config(corpus, tmp_path / "run"))
    assert read_recipe(tmp_path / "run").vocab_size == 290
    with pytest.raises(ValueError, match="vocab_size was 290, got 280"):
        train(train_toys.toy_config(corpus, tmp_path / "run", vocab_size=280))
    # the recipe in the run folder may be edited
    recipe = tmp_path / "run/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("vocab_size: 290", "vocab_size: 280"))
    with pytest.raises(ValueError, match="vocab_size was 290, got 280"):
        train(load_config(str(recipe)))
    # how long to train does not shape it
    assert train(train_toys.toy_config(corpus, tmp_path / "run", max_steps=1))
    assert AutoTokenizer.from_pretrained(tmp_path / "run").get_vocab() == learned.get_vocab()


def test_a_tokenizer_that_is_not_fast_is_refused(corpus, tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    config = train_toys.toy_config(corpus, tmp_path / "run", tokenizer=str(tmp_path / "bytes"))
    with pytest.raises(ValueError, match=r"tokenizer .* must be a fast one, got ByT5Tokenizer"):
        prepare_tokenizer(config)


def test_a_file_of_a_tokenizer_is_answered_with_its_folder(whole_run):
    with pytest.raises(ValueError, match=r"got the file .*tokenizer.json': give its folder\."):
        load_tokenizer(str(whole_run / "tokenizer" / "tokenizer.json"))


def test_a_tokenizer_with_gaps_in_its_numbers_is_refused(whole_run, tmp_path):
    folder = Path(shutil.copytree(whole_run / "tokenizer", tmp_path / "gaps"))
    definition = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = definition["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    message = rf"{folder}' must have the ids 0 to {len(vocabulary) - 1} .*, got the id 5,000"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(folder))


def test_text_in_another_encoding_is_named_before_a_vocabulary_is_learned(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    (corpus / "train.de").write_bytes("größer\n".encode("latin-1") * 90)
    with pytest.raises(ValueError, match="corpus must have a pair with text in UTF-8 on both"):
        train(train_toys.toy_config(corpus, tmp_path / "run"))
    assert not (tmp_path / "run/tokenizer").exists()


def test_a_full_disk_ends_in_one_sentence(corpus, tmp_path, monkeypatch, capsys):
    from vanilla_transformer.train.__main__ import main

    def full_disk(path):
        raise OSError(28, os.strerror(28))

    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml", train_toys.toy_settings(corpus, tmp_path / "run")
    )
    monkeypatch.setattr(checkpointing, "finish", full_disk)
    assert main([str(recipe)]) == 1
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert re.match(
        r"error: checkpoint .*step-4 cannot be written \(.* kB free\), "
        r"there is no checkpoint before it",
        last,
    )
    assert not checkpoints(tmp_path / "run/checkpoints")


@pytest.mark.parametrize(
    "name",
    ["recipe.yaml", "metrics.jsonl", "environment.txt", "tokenizer.json", "average.json"],
)
def test_a_file_that_no_run_has_left_is_not_replaced(corpus, tmp_path, name):
    (tmp_path / name).write_text("# mine")
    with pytest.raises(ValueError, match=f"got {tmp_path} with a {name}, which would be replaced"):
        train(train_toys.toy_config(corpus, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "# mine"


@pytest.mark.parametrize("name", ["metrics.jsonl", "environment.txt"])
def test_files_beside_a_vocabulary_of_no_run_are_not_replaced(corpus, whole_run, tmp_path, name):
    shutil.copytree(whole_run / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / name).write_text("# mine")
    with pytest.raises(ValueError, match=f"got {tmp_path} with a {name}, which would be replaced"):
        train(train_toys.toy_config(corpus, tmp_path))
    assert (tmp_path / name).read_text() == "# mine"


def test_a_run_that_left_no_more_than_its_recipe_begins_again(corpus, tmp_path):
    config = train_toys.toy_config(corpus, tmp_path, max_steps=1)
    save_config(config, tmp_path / "recipe.yaml")
    assert train(config)


def test_a_disk_that_is_full_between_checkpoints_ends_in_one_sentence(
    corpus, tmp_path, monkeypatch
):
    real_log = loop._log_step

    def log(run, step, result):
        if step == 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_log(run, step, result)

    monkeypatch.setattr(loop, "_log_step", log)
    with pytest.raises(
        OSError, match=r"run cannot be written \([\d,]+ kB free\), step-4 is intact"
    ):
        train(train_toys.toy_config(corpus, tmp_path / "run"))


def test_a_precision_that_the_device_lacks_is_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="precision must be fp32 or bf16 on a CPU, got 'fp16'"):
        train(train_toys.toy_config(corpus, tmp_path / "run", precision="fp16"))
    assert not (tmp_path / "run").exists()


def test_a_precision_that_a_gpu_would_emulate_is_refused(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(ValueError, match="must be fp32 or fp16 on Tesla T4, got 'bf16'"):
        loop.distribution._refuse_precision("bf16", torch.device("cuda"))
    loop.distribution._refuse_precision("fp16", torch.device("cuda"))


def test_a_score_that_cannot_be_counted_is_refused_before_the_training(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"bleu_tokenizer must be one of .*, got 'intel'.*intl"):
        train(train_toys.toy_config(corpus, tmp_path / "run", bleu_tokenizer="intel"))
    assert not (tmp_path / "run").exists()


def test_a_bleu_tokenizer_without_its_package_is_refused_before_the_training(
    corpus, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    settings = {"bleu_tokenizer": "ja-mecab", "validation_sample": 2}
    with pytest.raises(ValueError, match="bleu_tokenizer must have its packages installed"):
        train(train_toys.toy_config(corpus, tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_a_start_that_saved_no_step_leaves_no_facts(corpus, tmp_path, monkeypatch):
    def fail(run, step, batches):
        raise ValueError("no step today")

    config = train_toys.toy_config(corpus, tmp_path / "run", max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_step", fail)
        with pytest.raises(ValueError, match="no step today"):
            train(config)
    # the settings of the text may change until a step is saved
    assert train(dataclasses.replace(config, max_length=59))
    (start,) = read_environment(tmp_path / "run")
    assert start["first_step"] == "1"


def test_runs_of_one_process_may_differ_in_precision(corpus, whole_run, tmp_path):
    train(train_toys.toy_config(corpus, tmp_path / "half", precision="bf16"))
    train(train_toys.toy_config(corpus, tmp_path / "run"))
    train_toys.assert_same_bits(tmp_path / "run", whole_run)


def test_half_precision_is_used_where_asked_for(corpus, whole_run, tmp_path):
    train(train_toys.toy_config(corpus, tmp_path / "run", precision="bf16"))
    loss, expected = (
        curve(folder)[-1]["validation_loss"] for folder in (tmp_path / "run", whole_run)
    )
    assert loss == pytest.approx(expected, rel=1e-2)
    assert loss != expected
    assert all(
        tensor.dtype == torch.float32 for tensor in train_toys.weights(tmp_path / "run").values()
    )


def test_a_line_of_the_log_that_was_damaged_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step" 2}\n{"st', encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics.jsonl line 2 must be JSON, got '{\"step\" 2}'"):
        read_metrics(tmp_path)


def test_metrics_are_lines_of_json(whole_run):
    lines = (whole_run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == len([json.loads(line) for line in lines]) == 14


def test_a_recipe_with_an_unknown_setting_is_refused(whole_run, tmp_path):
    text = (whole_run / "recipe.yaml").read_text(encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(text + "warmup_step: 3\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"warmup_step is not a setting.*'warmup_steps'"):
        read_recipe(tmp_path)


def test_a_price_is_drawn_as_it_is_written(whole_run, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(whole_run)
    tokenizer = AutoTokenizer.from_pretrained(whole_run)
    tokenizer.add_tokens(["$\\frac$"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    draw_attention(tmp_path, model, tokenizer, "ant $\\frac$ bee")
    assert (tmp_path / "pictures/attention.png").stat().st_size > 500


def test_a_vocabulary_that_cannot_be_written_is_one_sentence(tmp_path):
    code = """
import resource, sys
from vanilla_transformer.cli import main
# as on a full disk: no file may grow beyond some kilobytes
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main(["tokenize", "demo", "--vocab_size", "2000", "--output_dir", sys.argv[1]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run" / "tokenizer").exists()
