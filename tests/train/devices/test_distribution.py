"""Runs with other layouts and numbers of processes: same losses, weights and checkpoints."""

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_toys
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file

from vanilla_transformer.train import dry_run, loop
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.devices import cpu_kernels, distribution
from vanilla_transformer.train.devices.distribution import open_accelerator
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.run_folder.checkpoint import checkpoints, read_optimizer
from vanilla_transformer.train.run_folder.files import read_metrics
from vanilla_transformer.train.vocabulary import prepare_tokenizer

pytestmark = pytest.mark.usefixtures("new_process")

# the rate is one at which a run is stable: one that is not multiplies each rounding
SETTINGS = {
    "model": {"dropout": 0.0},
    # with seed 1 an activation comes within rounding of the kink of max(0, x), and goes either way
    "seed": 2,
    "max_steps": 50,
    "warmup_steps": 100,
    "max_grad_norm": 1.0,
    "save_every_steps": 45,
    "eval_every_steps": 25,
}


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """Run of one process with one micro-batch per step."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    config = train_toys.toy_config(corpus, folder, **SETTINGS, tokens_per_micro_batch=300)
    assert config.label_smoothing == 0.1
    assert train(config)
    return folder


def launched(corpus, folder, *flags, processes=2, launch_file=None, **changes):
    recipe = train_toys.write_recipe(
        folder.with_suffix(".yaml"),
        train_toys.toy_settings(corpus, folder, **{**SETTINGS, **changes}),
    )
    train_toys.run_command(recipe, *flags, processes=processes, launch_file=launch_file)
    environment = (folder / "environment.txt").read_text(encoding="utf-8")
    assert f"processes: {processes}\n" in environment
    return environment


@pytest.fixture(scope="module")
def of_two(corpus, tmp_path_factory):
    """The same run with two processes and a copy of the model on each."""
    folder = tmp_path_factory.mktemp("two") / "run"
    assert "layout: MULTI_CPU\n" in launched(corpus, folder)
    return folder


@pytest.fixture(scope="module")
def of_parts(corpus, tmp_path_factory):
    """The same run with two processes and a part of the model on each."""
    folder = tmp_path_factory.mktemp("parts") / "run"
    assert "layout: FSDP\n" in launched(corpus, folder, launch_file="fsdp2.yaml")
    return folder


def assert_same_run(run, other, first_step=1, weight_tolerance=1e-4):
    """Compare losses to 1e-5, and weights of each checkpoint relative to their size."""
    curves = [
        [line for line in read_metrics(folder) if line["step"] >= first_step]
        for folder in (run, other)
    ]
    assert len(curves[0]) == len(curves[1]) > 5
    for line, expected in zip(*curves, strict=True):
        for name in {"loss", "validation_loss"} & expected.keys():
            assert line[name] == pytest.approx(expected[name], rel=1e-5), (name, line["step"])
        if "grad_norm" in expected:
            # rounding shows more in a sum of squares of small differences
            assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert line.get("learning_rate") == expected.get("learning_rate")
    saved = [path.name for path in checkpoints(run / "checkpoints") if path.name != "step-45"]
    assert saved[-1] == "step-50"
    for name in saved:
        left, right = (train_toys.weights(folder / "checkpoints" / name) for folder in (run, other))
        assert left.keys() == right.keys()
        for key, weight in right.items():
            assert left[key].dtype == torch.float32
            assert (left[key] - weight).norm() <= weight_tolerance * weight.norm(), (name, key)


def test_the_runs_to_compare_learn_and_clip(alone):
    lines = [line for line in read_metrics(alone) if "loss" in line]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    norms = [line["grad_norm"] for line in lines]
    assert min(norms) < SETTINGS["max_grad_norm"] < max(norms)


def test_micro_batches_in_turn_do_what_one_batch_does(corpus, alone, tmp_path, monkeypatch):
    numbers = []
    real_step = loop.training_step
    monkeypatch.setattr(
        loop,
        "training_step",
        lambda *given, **settings: numbers.append(len(given[4])) or real_step(*given, **settings),
    )
    train(
        train_toys.toy_config(
            corpus, tmp_path / "run", **{**SETTINGS, "tokens_per_micro_batch": 70}
        )
    )
    assert len(numbers) == 50
    assert min(numbers) >= 4
    assert_same_run(tmp_path / "run", alone)


def test_two_processes_train_as_one_does(alone, of_two):
    assert_same_run(of_two, alone)


def test_torchrun_may_start_the_processes(corpus, of_two, tmp_path):
    folder = tmp_path / "run"
    settings = train_toys.toy_settings(corpus, folder, **SETTINGS)
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc_per_node", "2", "-m", "vanilla_transformer.train", str(recipe)],
        env={**train_toys.environment(), "ACCELERATE_USE_CPU": "false"},
        capture_output=True,
        text=True,
        timeout=train_toys.LONGEST_RUN,
    )
    assert done.returncode == 0, done.stderr
    assert "processes: 2\n" in (folder / "environment.txt").read_text(encoding="utf-8")
    assert_same_run(folder, of_two)


def test_processes_with_a_part_of_the_model_train_as_one_does(alone, of_parts):
    assert_same_run(of_parts, alone)


def without_the_last_checkpoint(run, folder):
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints/step-50")
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step-45"]
    return folder


@pytest.mark.parametrize("before", ["of_two", "of_parts"])
def test_a_checkpoint_of_two_processes_resumes_with_one(corpus, tmp_path, request, before):
    run = request.getfixturevalue(before)
    folder = without_the_last_checkpoint(run, tmp_path / "run")
    saved = read_optimizer(folder / "checkpoints/step-45")["optimizer"]["state"]
    assert all(slots["step"] == 45 for slots in saved.values())
    assert train(train_toys.toy_config(corpus, folder, **SETTINGS), resume=True)
    assert_same_run(folder, run, first_step=46)


LAYOUTS = {
    "four copies": (4, None),
    "two parts": (2, "fsdp2.yaml"),
    "three parts": (3, "fsdp2.yaml"),
    "two of DeepSpeed": (2, "deepspeed.yaml"),
}


@pytest.fixture(params=LAYOUTS)
def other_layout(request):
    processes, launch_file = LAYOUTS[request.param]
    if launch_file == "deepspeed.yaml":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    return {"processes": processes, "launch_file": launch_file}


@pytest.mark.slow
@pytest.mark.parametrize("before", ["of_two", "of_parts"])
def test_a_checkpoint_resumes_in_another_layout(corpus, tmp_path, request, before, other_layout):
    run = request.getfixturevalue(before)
    folder = without_the_last_checkpoint(run, tmp_path / "run")
    launched(corpus, folder, "--resume", **other_layout)
    assert_same_run(folder, run, first_step=46)


@pytest.mark.slow
def test_a_checkpoint_of_deepspeed_resumes_with_one_process(corpus, alone, tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    assert "layout: DEEPSPEED\n" in launched(
        corpus, tmp_path / "whole", launch_file="deepspeed.yaml"
    )
    assert_same_run(tmp_path / "whole", alone)
    folder = without_the_last_checkpoint(tmp_path / "whole", tmp_path / "run")
    assert train(train_toys.toy_config(corpus, folder, **SETTINGS), resume=True)
    assert_same_run(folder, tmp_path / "whole", first_step=46)


@pytest.mark.slow
def test_a_larger_run_does_not_depend_on_its_layout_either(tmp_path, other_layout):
    corpus = train_toys.write_corpus(tmp_path / "corpus", pairs=2000)
    settings = {
        "model": {
            "dropout": 0.0,
            "hidden_size": 64,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
        },
        "tokens_per_step": 2000,
        "tokens_per_micro_batch": 600,
        # the paper's: at ten times its rate a model of this size multiplies rounding a thousandfold
        "warmup_steps": 4000,
    }
    config = train_toys.toy_config(corpus, tmp_path / "alone", **{**SETTINGS, **settings})
    train(config)
    launched(corpus, tmp_path / "run", **other_layout, **settings)
    # biases begin at 0 and come to 5e-4 in these steps: rounding is 1e-4 of that on some CPUs
    assert_same_run(tmp_path / "run", tmp_path / "alone", weight_tolerance=5e-4)


@pytest.mark.slow
def test_half_precision_with_parts_keeps_full_precision_in_the_checkpoint(
    corpus, alone, tmp_path, other_layout
):
    launched(corpus, tmp_path / "run", precision="bf16", ema_decay=0.9, **other_layout)
    loss, expected = (
        next(line["validation_loss"] for line in reversed(read_metrics(folder)))
        for folder in (tmp_path / "run", alone)
    )
    # a small model learns fast, so rounding changes the loss
    assert loss == pytest.approx(expected, rel=5e-2)
    assert loss != expected
    for name in ("model", "ema"):
        path = tmp_path / f"run/checkpoints/step-50/{name}.safetensors"
        for weight in train_toys.load_file(path).values():
            assert weight.dtype == torch.float32
            # weights that were rounded in each step would all be bf16 numbers
            assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.slow
def test_a_loss_that_stays_infinite_ends_every_layout_with_advice(corpus, tmp_path, other_layout):
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml",
        train_toys.toy_settings(
            corpus, tmp_path / "run", learning_rate_factor=1e30, max_skipped_steps=3
        ),
    )
    done = subprocess.run(
        train_toys.command(recipe, **other_layout),
        env=train_toys.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.search(r"error: .* 3 steps in a row .* try a lower learning", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("launch_file", [None, "fsdp2.yaml"])
def test_a_compiled_model_learns_the_same(corpus, alone, tmp_path, launch_file):
    processes = 1 if launch_file is None else 2
    options = {"processes": processes, "launch_file": launch_file}
    launched(corpus, tmp_path / "run", **options, compile=True)
    # names of the compiler must not come into it
    assert_same_run(tmp_path / "run", alone)


def test_attention_of_a_run_makes_no_plan_for_each_shape(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    open_accelerator(TrainConfig())
    assert asked == [False]


def test_a_compiled_run_needs_few_graphs(corpus, tmp_path, monkeypatch):
    plain = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **options: plain(module, **options, backend="eager"),
    )
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"]
    settings = {**SETTINGS, "max_steps": 30, "eval_every_steps": 10, "compile": True}
    config = train_toys.toy_config(corpus, tmp_path / "run", **settings)
    assert train(config)
    # encoder and decoder; twice if two lengths of the first batch are equal, or a length is 1
    assert 2 <= counters["stats"]["unique_graphs"] - before <= 5


def test_a_compiler_of_the_launcher_leaves_no_names(corpus, alone, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    before = torch._dynamo.utils.counters["frames"]["ok"]
    config = train_toys.toy_config(corpus, tmp_path / "run", **{**SETTINGS, "max_steps": 2})
    assert train(config)
    assert torch._dynamo.utils.counters["frames"]["ok"] > before
    assert train_toys.weights(tmp_path / "run").keys() == train_toys.weights(alone).keys()
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    expected = [line["loss"] for line in read_metrics(alone) if "loss" in line][:2]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_processes_wait_for_hours_while_the_first_prepares_the_data():
    accelerator = open_accelerator(TrainConfig())
    assert accelerator.init_handler.timeout >= timedelta(hours=1)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "MEGATRON_LM"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "FSDP on cpu"),
        # started by a launcher, and not aware of each other
        ({"WORLD_SIZE": "2", "ACCELERATE_TORCH_DEVICE": "cpu"}, "2 processes on cpu"),
    ],
)
def test_a_layout_that_is_not_supported_is_refused(monkeypatch, variables, named):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ValueError, match=f"FSDP2 or DeepSpeed ZeRO 1 or 2 .*, got {named}"):
        open_accelerator(TrainConfig())


def test_a_way_to_distribute_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(distribution.Accelerator, "distributed_type", DistributedType.XLA)
    with pytest.raises(ValueError, match=r"FSDP2 or DeepSpeed .*, got XLA"):
        open_accelerator(TrainConfig())


def with_deepspeed(**changes):
    plugin = {
        "zero_stage": 2,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "deepspeed_config": {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}},
    }
    return SimpleNamespace(deepspeed_plugin=SimpleNamespace(**{**plugin, **changes}))


@pytest.mark.parametrize(
    ("changes", "precision", "message"),
    [
        ({"zero_stage": 3}, "fp32", "got DeepSpeed with zero_stage 3"),
        ({"offload_optimizer_device": "cpu"}, "fp32", "with offload_optimizer_device cpu"),
        ({"deepspeed_config": {"bf16": {"enabled": True}}}, "bf16", "leave bf16 to the setting"),
        ({}, "fp16", "must be fp32 or bf16 with DeepSpeed, got 'fp16'"),
    ],
)
def test_unsupported_settings_of_deepspeed_are_refused(changes, precision, message):
    with pytest.raises(ValueError, match=message):
        distribution._check_deepspeed(with_deepspeed(**changes), TrainConfig(precision=precision))


def test_deepspeed_neither_divides_nor_clips_by_settings_of_its_own():
    for bound, expected in ((None, 0.0), (0.7, 0.7)):
        accelerator = with_deepspeed()
        distribution._check_deepspeed(accelerator, TrainConfig(max_grad_norm=bound))
        settings = accelerator.deepspeed_plugin.deepspeed_config
        assert settings["gradient_clipping"] == expected
        assert settings["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(("version", "offload"), [(1, "false"), (2, "true")])
def test_the_first_fsdp_and_its_offload_are_refused(monkeypatch, version, offload):
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", offload)
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    with pytest.raises(ValueError, match=r"got FSDP with fsdp_(version 1|offload_params)"):
        distribution._check_fsdp(SimpleNamespace(state=state))


def test_a_missing_deepspeed_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(distribution, "is_deepspeed_available", lambda: False)
    with pytest.raises(ValueError, match="DeepSpeed must be installed"):
        open_accelerator(TrainConfig())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("one-gpu", "NO"),
        ("one-node", "MULTI_GPU"),
        ("several-nodes", "MULTI_GPU"),
        ("cpu", "MULTI_GPU"),
        ("fsdp2", "FSDP"),
        ("deepspeed", "DEEPSPEED"),
    ],
)
def test_accelerate_understands_the_launch_files(name, kind):
    config = load_config_from_file(str(train_toys.LAUNCH_FILES / f"{name}.yaml"))
    assert config.distributed_type == kind
    assert config.num_processes >= 1
    assert (config.num_machines > 1) == (name == "several-nodes")


def test_all_launch_files_are_tested():
    assert {path.name for path in train_toys.LAUNCH_FILES.iterdir()} == {
        *("one-gpu.yaml", "one-node.yaml", "several-nodes.yaml", "cpu.yaml"),
        *("fsdp2.yaml", "deepspeed.yaml", "slurm.sh"),
    }


@pytest.mark.parametrize(
    # before the processes meet, when they have met, when one prepares for all, and after that
    "wrong",
    [
        {"label_smoothing": 2.0},
        {"precision": "fp16"},
        {"vocab_size": 9},
        {"dataset": "not/there"},
        {"tokens_per_step": 5},
    ],
)
def test_an_error_of_all_processes_is_printed_once(corpus, tmp_path, wrong):
    settings = train_toys.toy_settings(corpus, tmp_path / "run", **wrong)
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    done = subprocess.run(
        train_toys.command(recipe, processes=2),
        env={**train_toys.environment(), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count(f"error: {next(iter(wrong))}") == 1, done.stderr
    # the launcher prints a traceback because the processes that it started have failed
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr


def run_as_two_machines(folder: Path, recipe: Path, *flags: list[str]) -> list[tuple[str, int]]:
    """Run two processes in separate folders; return their output and exit statuses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    started = []
    for rank, own_flags in enumerate(flags):
        own = folder / str(rank)
        own.mkdir(exist_ok=True)
        process = subprocess.Popen(
            train_toys.command(recipe, *own_flags),
            env={**train_toys.environment(), **address, "RANK": str(rank), "LOCAL_RANK": "0"},
            stderr=subprocess.PIPE,
            text=True,
            cwd=own,
        )
        started.append(process)
    return [(process.communicate(timeout=300)[1], process.returncode) for process in started]


def test_processes_with_different_folders_do_not_resume(corpus, tmp_path):
    """The separate folders stand for two machines without a shared disk."""
    settings = train_toys.toy_settings(corpus, "run", max_steps=4)
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    for said, status in run_as_two_machines(tmp_path, recipe, [], []):
        assert status == 0, said
    flags = ["--resume", "--max_steps", "8"]
    (said, status), (other, other_status) = run_as_two_machines(tmp_path, recipe, flags, flags)
    assert (status, other_status) == (1, 1), said + other
    assert "error: all processes must have the same checkpoint, as in a folder that" in said
    assert "got step-4 in the main process and none in process 1" in said
    assert "rror" not in other


def test_processes_with_different_settings_do_not_begin(corpus, tmp_path):
    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml", train_toys.toy_settings(corpus, tmp_path / "run")
    )
    flags = [], ["--eval_every_steps", "5"]
    (said, status), (other, other_status) = run_as_two_machines(tmp_path, recipe, *flags)
    assert (status, other_status) == (1, 1), said + other
    assert (
        "error: all processes must have the same eval_every_steps, got 6 in the main process and "
        "5 in process 1.\n"
    ) in said
    assert "rror" not in other


def test_processes_that_stream_different_text_do_not_begin(corpus, tmp_path):
    run = tmp_path / "run"
    prepare_tokenizer(train_toys.toy_config(corpus, run))
    for rank in range(2):
        train_toys.write_corpus(tmp_path / str(rank) / "text", seed=rank)
    settings = train_toys.toy_settings(
        "text", "run", streaming=True, tokenizer=str(run / "tokenizer")
    )
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    (said, status), (other, other_status) = run_as_two_machines(tmp_path, recipe, [], [])
    assert (status, other_status) == (1, 1), said + other
    assert "error: all processes must have the same text, as in a folder that" in said
    assert "rror" not in other


@pytest.mark.parametrize(
    "refused", ["refuse_disagreement({'rank': rank})", "main_process_first(lambda: 1 // rank)"]
)
def test_refused_processes_leave_their_group_before_they_end(refused, tmp_path):
    """A member that ends later than the others may be aborted."""
    script = tmp_path / "refused.py"
    script.write_text(
        "import atexit, os\n"
        "from accelerate import PartialState\n"
        "from torch import distributed\n"
        "from vanilla_transformer.train.devices import distribution\n"
        # called after those that are registered later
        "atexit.register(lambda: print(f'{distributed.is_initialized()}\\n', end='', flush=True))\n"
        "rank = PartialState(cpu=True).process_index\n"
        f"distribution.{refused}\n"
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    done = subprocess.run(
        [*launch, "--config_file", str(train_toys.LAUNCH_FILES / "cpu.yaml"), str(script)],
        env=train_toys.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "False", "False"], done.stderr


def test_processes_of_a_launch_file_know_of_each_other_without_a_gpu(tmp_path):
    script = tmp_path / "count.py"
    script.write_text(
        "from vanilla_transformer.train.config import TrainConfig\n"
        "from vanilla_transformer.train.devices.distribution import open_accelerator\n"
        "accelerator = open_accelerator(TrainConfig())\n"
        # in one piece: two processes write at the same time
        "print(f'{accelerator.process_index} of {accelerator.num_processes}\\n', end='')\n"
        "accelerator.end_training()\n"
    )
    environment = train_toys.environment()
    # nobody says that there is no GPU
    environment.pop("ACCELERATE_USE_CPU", None)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    done = subprocess.run(
        [*launch, "--config_file", str(train_toys.LAUNCH_FILES / "cpu.yaml"), str(script)],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0 of 2", "1 of 2"]


def test_the_script_for_slurm_starts_one_launcher_a_machine(tmp_path):
    stand_ins = {
        "scontrol": "printf 'node-a\\nnode-b\\n'",
        # as on two machines, one after the other
        "srun": 'shift 2; for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done',
        "accelerate": 'echo "$@"',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, text in stand_ins.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    done = subprocess.run(
        ["bash", str(train_toys.LAUNCH_FILES / "slurm.sh"), "paper-big", "--model", "{d_k: 64}"],
        env={**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    several = train_toys.LAUNCH_FILES / "several-nodes.yaml"
    assert done.stdout.splitlines() == [
        f"launch --config_file {several} --num_machines 2 --num_processes 8 --machine_rank {rank} "
        "--main_process_ip node-a -m vanilla_transformer.train paper-big --model {d_k: 64} --resume"
        for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("launched", "is_said"), [(None, False), ("no", False), ("bf16", False), ("fp16", True)]
)
def test_another_precision_of_the_launcher_is_mentioned(monkeypatch, caplog, launched, is_said):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if launched is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    distribution.open_accelerator(TrainConfig(precision="bf16"))
    assert ("is not used: the precision is bf16, which --precision sets" in caplog.text) == is_said


@pytest.mark.parametrize(
    ("machine", "has_instructions"), [("x86_64", True), ("AMD64", False), ("arm64", False)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bf16_on_a_cpu_that_emulates_it_is_mentioned(
    monkeypatch, caplog, precision, machine, has_instructions
):
    monkeypatch.setattr(cpu_kernels, "has_bf16_instructions", lambda: has_instructions)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    is_emulated = precision == "bf16" and machine == "AMD64"
    config = TrainConfig(precision=precision)
    assert ("many times slower" in dry_run.describe(config, "paper-base")) == is_emulated
    assert not caplog.text
    open_accelerator(config)
    assert caplog.text.count("set --precision fp32.") == is_emulated


@pytest.mark.parametrize(
    ("precision", "capability", "matmul", "is_said"),
    [
        ("fp32", (9, 0), "highest", True),
        ("fp32", (9, 0), "high", False),
        ("bf16", (9, 0), "highest", False),
        ("fp32", (7, 5), "highest", False),
    ],
)
def test_idle_tensor_cores_are_mentioned(
    monkeypatch, caplog, precision, capability, matmul, is_said
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: matmul)
    accelerator = SimpleNamespace(device=torch.device("cuda"), is_main_process=True)
    distribution._warn_of_idle_tensor_cores(precision, accelerator)
    assert ("--precision bf16 computes several times as fast" in caplog.text) == is_said


@pytest.mark.parametrize(
    ("usable", "is_main", "said"),
    [
        ({5}, True, ""),
        ({2, 5}, True, "Each process uses 1 of 2 cores. Set OMP_NUM_THREADS=2 before"),
        # the main process says it for all
        ({2, 5}, False, ""),
    ],
)
def test_only_cores_that_the_process_may_use_are_idle(usable, is_main, said, monkeypatch, caplog):
    # another process runs on another machine
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: usable, raising=False)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=2, is_main_process=is_main
    )
    distribution._warn_of_idle_cores(accelerator)
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)
