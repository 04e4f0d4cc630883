"""Memory of a step, and the size of a micro-batch."""

import ctypes
import json
import os
import subprocess
import sys

import psutil
import pytest
import torch
import train_toys

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.train import loop
from vanilla_transformer.train import run as setup
from vanilla_transformer.train.__main__ import main
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.devices import memory
from vanilla_transformer.train.devices.distribution import open_accelerator
from vanilla_transformer.train.devices.fused_loss import block_bytes
from vanilla_transformer.train.devices.memory import (
    bytes_per_token,
    fixed_step_bytes,
    free_bytes,
    max_micro_batch_tokens,
    state_bytes,
)
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.run_folder.checkpoint import checkpoints, read_state
from vanilla_transformer.train.run_folder.run_state import RunState

pytestmark = pytest.mark.usefixtures("new_process")

# the peak of two steps over what there was before the model
MEASURE = """
import json, sys, torch
from accelerate import Accelerator
from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.schedule import make_scheduler, learning_rate_of
from vanilla_transformer.train.step import mask_for_sdpa, training_step

def kilobytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

row, fields, precision, rows, length = json.loads(sys.argv[1])
config = VanillaTransformerConfig.from_paper(row, **fields)
accelerator = Accelerator(cpu=True, mixed_precision="no" if precision == "fp32" else precision)
ids = torch.randint(3, config.vocab_size, (rows, length))
mask = torch.ones_like(ids)
mask[0, -1] = 0
batch = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids.clone(), labels=ids.clone())
before = kilobytes("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
model = VanillaTransformerForConditionalGeneration(config)
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, fused=True)
prepared = accelerator.prepare(model, optimizer)
prepared[0].train()
for _ in range(2):
    scheduler = make_scheduler(optimizer, learning_rate_of(TrainConfig(), config.d_model))
    training_step(accelerator, *prepared, scheduler, [mask_for_sdpa(batch)], label_smoothing=0.1)
print(json.dumps([model.num_parameters(), (kilobytes("VmHWM") - before) * 1024]))
"""
SMALL = {"hidden_size": 128, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "vocab_size": 10_000}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells it on Linux")
@pytest.mark.parametrize(
    ("row", "fields", "precision", "rows", "length"),
    [
        ("base", SMALL, "fp32", 32, 32),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("C4", {"vocab_size": 1000}, "fp32", 64, 32),
                ("base", {"vocab_size": 37_000}, "fp32", 32, 32),
                ("base", {"vocab_size": 1000}, "bf16", 64, 32),
                ("B1", {"vocab_size": 1000}, "fp32", 16, 128),
                ("base", {"attention_dropout": 0.1, "activation_dropout": 0.1}, "fp32", 16, 128),
                ("C1", {"vocab_size": 16_000, "norm_first": True}, "fp32", 64, 32),
            )
        ),
    ],
)
def test_a_step_takes_the_memory_that_was_estimated(row, fields, precision, rows, length):
    case = json.dumps([row, fields, precision, rows, length])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, case],
        env=train_toys.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_parameters, measured = json.loads(done.stdout)
    config = VanillaTransformerConfig.from_paper(row, **fields)
    state = sum(state_bytes(TrainConfig(precision=precision), num_parameters).values())
    # a loss of few tokens is of fewer than a block
    scores = 4 * rows * length * config.vocab_size
    state += fixed_step_bytes(config, precision, "cpu") - max(0, block_bytes("cpu") - scores)
    estimated = state + rows * length * bytes_per_token(config, precision, length, "cpu")
    assert measured > rows * length * 100_000, "nothing was measured"
    # a little more is safe, too little is not
    assert 0.95 < estimated / measured < 1.5


def test_what_is_kept_beside_the_weights_counts():
    parts = state_bytes(TrainConfig(precision="bf16", ema_decay=0.999), 10)
    assert parts == {
        "weights": 40,
        "gradients": 40,
        "Adam's moments": 80,
        "half-precision weights": 20,
        "moving average": 40,
    }
    assert sum(state_bytes(TrainConfig(), 10).values()) == 160


def test_processes_of_a_host_share_its_memory_and_a_container_has_less(tmp_path, monkeypatch):
    class Available:
        available = 8_000

    monkeypatch.setattr(psutil, "virtual_memory", Available)
    monkeypatch.setattr(memory, "CGROUP_FOLDER", tmp_path)
    cpu = torch.device("cpu")
    assert free_bytes(cpu, 2) == 4_000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 5000\n")
    assert free_bytes(cpu, 1) == 8_000
    (tmp_path / "memory.max").write_text("6000\n")
    assert free_bytes(cpu, 1) == 5_000


@pytest.fixture
def fitting(monkeypatch):
    """Return a function from free gigabytes and device to the tokens of a micro-batch."""

    def fit(gigabytes, device="cpu", num_processes=1, **settings):
        monkeypatch.setattr(memory, "free_bytes", lambda *given: int(gigabytes * 1e9))
        config = TrainConfig(**settings)
        sizes = config.model_config(37_000)
        device = torch.device(device)
        return max_micro_batch_tokens(config, sizes, 63_000_000, device, num_processes)

    return fit


def test_a_micro_batch_is_what_fits_and_no_more_than_helps(fitting):
    assert fitting(100) == 4096
    few, more = fitting(2), fitting(3)
    assert 256 <= few < more < 4096
    # on a GPU, more tokens are faster, but at most its part of a step and as much padding
    assert fitting(100, "cuda") == 50_000
    assert fitting(100, "cuda", num_processes=8) == 6250
    assert fitting(100, "cuda", num_processes=8, tokens_per_step=1600) == 400
    assert 50_000 > fitting(7, "cuda", precision="bf16") > fitting(7, "cuda")


def test_only_the_processes_of_a_host_share_its_memory(monkeypatch):
    sharing = []
    monkeypatch.setattr(
        memory, "free_bytes", lambda device, processes: sharing.append(processes) or 10**11
    )
    config, cpu = TrainConfig(), torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    max_micro_batch_tokens(config, config.model_config(37_000), 63_000_000, cpu, 8)
    # processes that were started by hand do not have this variable
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    max_micro_batch_tokens(config, config.model_config(37_000), 63_000_000, cpu, 8)
    assert sharing == [2, 8]


def test_a_process_with_a_part_of_the_weights_has_the_scores_of_all_tokens():
    sizes = TrainConfig().model_config(37_000)
    whole, part = (
        bytes_per_token(sizes, "fp32", 99, "cpu", uses_fused_loss)
        for uses_fused_loss in (True, False)
    )
    # in two precisions, and their log-probabilities
    assert part - whole >= 3 * 4 * 37_000


def test_what_cannot_fit_is_refused(fitting):
    with pytest.raises(ValueError, match=r"cpu must have 1\.\d GB .* max_length 256, got 0\.6 GB"):
        fitting(0.6)


def settings_of(run):
    return dict(
        line.split(": ", 1) for line in (run / "environment.txt").read_text().splitlines() if line
    )


def test_a_resumed_run_keeps_its_size_of_micro_batches(corpus, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    monkeypatch.setattr(setup, "max_micro_batch_tokens", lambda *given: 77)
    train(train_toys.toy_config(corpus, whole, tokens_per_micro_batch=None))
    train(train_toys.toy_config(corpus, parts, tokens_per_micro_batch=None, max_steps=5))
    # now there would be more room
    monkeypatch.setattr(setup, "max_micro_batch_tokens", lambda *given: 300)
    train(train_toys.toy_config(corpus, parts, tokens_per_micro_batch=None), resume=True)
    train_toys.assert_same_bits(parts, whole)
    assert read_state(checkpoints(parts / "checkpoints")[-1])["tokens_per_micro_batch"] == 77
    assert settings_of(parts)["tokens_per_micro_batch"] == "77"
    assert "tokens_per_micro_batch: null" in (parts / "recipe.yaml").read_text()


def test_other_processes_have_other_memory(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "max_micro_batch_tokens", lambda *given: 300)
    model = train_toys.toy_model()
    accelerator = open_accelerator(TrainConfig())
    free = train_toys.toy_config(corpus, tmp_path, tokens_per_micro_batch=None)
    fixed = train_toys.toy_config(corpus, tmp_path, tokens_per_micro_batch=90)

    def tokens(config, **saved):
        return setup._fill_in_micro_batch_size(
            config, accelerator, model, RunState(**saved)
        ).tokens_per_micro_batch

    assert tokens(free) == 300
    assert tokens(free, num_processes=1, tokens_per_micro_batch=77) == 77
    assert tokens(free, num_processes=2, tokens_per_micro_batch=77) == 300
    assert tokens(fixed, num_processes=1, tokens_per_micro_batch=77) == 90
    # what fits on every one of them
    monkeypatch.setattr(accelerator, "gather", lambda own: torch.cat((own, own - 180)))
    assert tokens(free) == 120


def test_out_of_memory_ends_in_one_sentence(corpus, tmp_path, monkeypatch, capsys):
    def full(*given, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    recipe = train_toys.write_recipe(
        tmp_path / "toy.yaml", train_toys.toy_settings(corpus, tmp_path / "run")
    )
    monkeypatch.setattr(loop, "training_step", full)
    assert main([str(recipe)]) == 1
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert last == (
        "error: out of memory in step 1: resume with --resume and tokens_per_micro_batch below 80."
    )


def test_another_error_of_a_step_is_not_taken_for_out_of_memory(corpus, tmp_path, monkeypatch):
    def broken(*given, **settings):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(loop, "training_step", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train(train_toys.toy_config(corpus, tmp_path / "run"))


SHAPES = """
import ctypes, torch
from vanilla_transformer.train.devices.memory import keep_freed_memory

class Usage(ctypes.Structure):
    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]

usage = ctypes.CDLL(None).mallinfo2
usage.restype = Usage
keep_freed_memory()
torch.set_num_threads(1)
weight = torch.ones(64, 64, dtype=torch.bfloat16)
for rows in range(1, 501):
    torch.mm(torch.ones(rows, 64, dtype=torch.bfloat16), weight)
    if rows in (250, 500):
        # what is in use, as malloc.h has it
        print(usage().field_7)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_kernels_for_many_shapes_of_batches_do_not_pile_up():
    # torch and the allocator read their settings once in a process
    done = subprocess.run(
        [sys.executable, "-c", SHAPES], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert after - before < 50e6


def test_how_many_kernels_are_kept_can_be_set(monkeypatch):
    first, second = memory.KERNEL_CACHE_VARIABLES
    monkeypatch.setenv(first, "7")
    monkeypatch.delenv(second, raising=False)
    memory.keep_freed_memory()
    assert (os.environ[first], os.environ[second]) == ("7", str(memory.CACHED_KERNELS))
