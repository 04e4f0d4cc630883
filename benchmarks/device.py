"""Check that training and search compute on a GPU what they compute on a CPU.

`python -m vanilla_transformer.benchmarks device` runs the checks. On a machine without a GPU, the
checks compare the CPU with itself.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from .. import VanillaTransformerForConditionalGeneration
from ..engine_checks_vanilla_transformer import engine_for
from ..loading import load_run
from ..paper.study import Section
from ..train.config import TrainConfig
from ..train.data.batches import IGNORED, Collator
from ..train.devices import distribution, memory
from ..train.devices.fused_loss import fused_loss_sum
from ..train.recipe import save_config
from ..train.run_folder.files import read_metrics
from ..train.step import mask_for_sdpa, training_step
from .work import Batch, bucketed_batches, model_config, read_corpus

LABEL_SMOOTHING = 0.1
# allowed relative error of loss and gradient, compared with float64: norm of the difference divided
# by the norm in float64
MAX_ERROR = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
# allowed relative difference between the losses on the device and on the CPU, averaged over steps
MAX_LOSS_DIFFERENCE = {"fp32": 2e-3, "bf16": 3e-2, "fp16": 3e-2}
# required share of target tokens that are equal on the device and on the CPU; below 1, because
# rounding can swap candidates with nearly equal scores
MIN_EQUAL_SHARE = {torch.float32: 0.98, torch.bfloat16: 0.8}
SEARCH_COLUMNS = ("equal", "at least", "agrees", "seconds, engine", "seconds, modules")
# training steps of each run, and sentences of each search
NUM_STEPS, NUM_SENTENCES = 40, 64
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1, "max_extra_tokens": 20},
    "beam 4": {"num_beams": 4, "length_penalty_alpha": 0.6, "max_extra_tokens": 20},
}
# memory of a small GPU, in bytes
SMALL_GPU_BYTES = 8e9
# number of tokens in each sentence of the micro-batch that fills the small GPU
SENTENCE_TOKENS = 100
RUN_COLUMNS = ("device and run", "last loss", "difference", "allowed", "agrees", "tokens/s")


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Check arithmetic, runs, search and memory.

    Args:
        flags: Flags of the command line.

    Yields:
        One section for each check; the check of memory needs a GPU.
    """
    device = torch.device(flags.device)
    corpus = read_corpus(flags.config, flags.model_vocab_size)
    batch = bucketed_batches(corpus, 300, 1, flags.config.seed)[0]
    yield _arithmetic_section(flags, batch, device)
    with tempfile.TemporaryDirectory() as folder:
        yield _runs_section(flags, Path(folder), device)
        sentences = corpus.texts[: 2 * NUM_SENTENCES : 2]
        yield _search_section(Path(folder, "cpu"), sentences, device)
    if device.type == "cuda":
        yield _memory_section(flags, device)


def _section(name: str, title: str, finding: str, columns: Sequence[str], rows: list) -> Section:
    agrees_column = columns.index("agrees")
    failed_checks = [row[0] for row in rows if row[agrees_column] == "no"]
    result = f"Failed: {', '.join(failed_checks)}." if failed_checks else "All agree."
    return Section(
        name=f"device-{name}",
        title=title,
        finding=f"{finding} {result}",
        columns=columns,
        rows=rows,
        numbers={"failed": failed_checks},
    )


def _arithmetic_section(flags: argparse.Namespace, batch: Batch, device: torch.device) -> Section:
    config = model_config(flags.sizes[-1], flags.model_vocab_size, dropout=0.0)
    torch.manual_seed(flags.config.seed)
    model = VanillaTransformerForConditionalGeneration(config).train()
    expected = _float64_loss_and_gradient(model.double(), batch)
    rows = []
    for precision, max_error in MAX_ERROR.items():
        if device.type == "cpu" and precision == "fp16":
            continue
        # weights stay in float32, as in training; autocast computes products in `dtype`
        moved_model = model.float().to(device)
        dtype = distribution.HALF_PRECISION_DTYPES.get(precision, torch.float32)
        actual = _loss_and_gradient(moved_model, batch, dtype)
        loss_error, gradient_error = (
            float(
                (actual_tensor.double().cpu() - expected_tensor.cpu()).norm()
                / expected_tensor.norm().cpu()
            )
            for actual_tensor, expected_tensor in zip(actual, expected, strict=True)
        )
        rows.append(
            (
                precision,
                loss_error,
                gradient_error,
                max_error,
                _yes_or_no(max(loss_error, gradient_error) <= max_error),
            )
        )
    return _section(
        "arithmetic",
        "Loss and gradient",
        f"The {flags.sizes[-1]} model with random weights on one batch, compared with float64 on "
        "the CPU: norm of the difference over the norm.",
        (f"precision on {device.type}", "loss", "gradient", "allowed", "agrees"),
        rows,
    )


def _float64_loss_and_gradient(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute loss and gradient with torch's own loss: the loss of training sums in float32."""
    inputs = {name: tensor for name, tensor in batch.tensors.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    loss = F.cross_entropy(
        logits.flatten(0, 1),
        batch.tensors["labels"].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=LABEL_SMOOTHING,
    )
    return _compute_gradient(model, loss)


def _loss_and_gradient(
    model: PreTrainedModel, batch: Batch, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute loss and gradient as a training step does."""
    device, tensors = model.device, batch.tensors
    label_indices = (tensors["labels"].flatten() != IGNORED).nonzero()[:, 0].to(device)
    inputs = {name: tensor.to(device) for name, tensor in mask_for_sdpa(tensors).items()}
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss = fused_loss_sum(
            model, **inputs, label_indices=label_indices, label_smoothing=LABEL_SMOOTHING
        )
    return _compute_gradient(model, loss)


def _compute_gradient(model: PreTrainedModel, loss: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss.backward()
    gradient = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return loss.detach(), torch.cat(gradient)


def _runs_section(flags: argparse.Namespace, folder: Path, device: torch.device) -> Section:
    """Train on the CPU, and with several settings on the device. `_search` reads the run "cpu"."""

    # no dropout, because dropout masks differ between devices
    shared: dict[str, Any] = {
        "model": {**flags.config.model, "dropout": 0.0},
        "max_steps": NUM_STEPS,
        "log_every_steps": 1,
        "precision": "fp32",
    }

    def train_and_read_losses(name: str, on_cpu: bool = False, **settings: Any) -> list[float]:
        config = dataclasses.replace(
            flags.config, output_dir=str(folder / name), **{**shared, **settings}
        )
        recipe = folder / f"{name}.yaml"
        save_config(config, recipe)
        _train([str(recipe), *(["--resume"] if (folder / name).exists() else [])], on_cpu)
        return [line["loss"] for line in read_metrics(folder / name) if "loss" in line]

    half_precision = _half_precision(device)
    cpu_losses = train_and_read_losses("cpu", on_cpu=True)
    settings_of_runs: dict[str, list[dict[str, Any]]] = {
        "fp32": [{}],
        half_precision: [{"precision": half_precision}],
        f"{half_precision}, compiled": [{"precision": half_precision, "compile": True}],
        "fp32, resumed": [{"max_steps": NUM_STEPS // 2}, {}],
    }
    rows = [
        ("cpu: fp32", cpu_losses[-1], 0.0, 0.0, "yes", _median_tokens_per_second(folder / "cpu"))
    ]
    for name, settings_of_parts in settings_of_runs.items():
        for settings in settings_of_parts:
            losses = train_and_read_losses(name, **settings)
        # average over the steps: rounding errors grow from step to step, so a single loss may
        # differ much
        difference = statistics.mean(
            abs(loss / cpu_loss - 1) for loss, cpu_loss in zip(losses, cpu_losses, strict=True)
        )
        max_difference = MAX_LOSS_DIFFERENCE[settings_of_parts[-1].get("precision", "fp32")]
        agrees = _yes_or_no(difference <= max_difference)
        row = (f"{device.type}: {name}", losses[-1], difference, max_difference, agrees)
        rows.append((*row, _median_tokens_per_second(folder / name)))
    return _section(
        "runs",
        "Runs",
        f"{NUM_STEPS} steps of {flags.recipe} without dropout: mean relative difference of the "
        "loss of a step from that of the same step on the CPU, and the median of the tokens per "
        "second.",
        RUN_COLUMNS,
        rows,
    )


def _half_precision(device: torch.device) -> str:
    is_cuda = device.type == "cuda"
    # training refuses bf16 on a GPU that only emulates bf16
    if is_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp16"
    return "bf16"


def _train(arguments: list[str], on_cpu: bool) -> None:
    environment = dict(os.environ)
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run(
        [sys.executable, "-m", "vanilla_transformer.train", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise ValueError(f"train {arguments[0]} ended with an error:\n{result.stderr[-2000:]}")


def _median_tokens_per_second(folder: Path) -> float:
    rates = [line["tokens_per_second"] for line in read_metrics(folder) if "loss" in line]
    return statistics.median(rates)


def _search_section(run_folder: Path, sentences: list[str], device: torch.device) -> Section:
    rows: list[tuple[Any, ...]] = []
    for name, settings in SEARCHES.items():
        model, tokenizer = load_run(str(run_folder))
        inputs = tokenizer(sentences, return_tensors="pt", padding=True)
        expected_ids, _ = _translate_and_time(model, inputs, **settings, engine="off")
        for dtype, min_equal_share in MIN_EQUAL_SHARE.items():
            if device.type == "cpu" and dtype != torch.float32:
                continue
            moved_model = model.to(device, dtype)
            _, reason = engine_for(moved_model)
            if reason is not None:
                rows.append((f"{name}, {dtype}: {reason}", None, min_equal_share, "no", None, None))
                continue
            ids, engine_seconds = _translate_and_time(moved_model, inputs, **settings)
            _, module_seconds = _translate_and_time(moved_model, inputs, **settings, engine="off")
            equal_share = _equal_share(ids, expected_ids, model.config.pad_token_id)
            title = f"{name}, {str(dtype).removeprefix('torch.')}"
            seconds = engine_seconds, module_seconds
            rows.append(
                (
                    title,
                    equal_share,
                    min_equal_share,
                    _yes_or_no(equal_share >= min_equal_share),
                    *seconds,
                )
            )
    return _section(
        "search",
        "Search",
        f"{len(sentences)} sentences with the trained model: share of tokens that are those of the "
        "model's own modules in float32 on the CPU, and the time of all sentences.",
        (f"search on {device.type}", *SEARCH_COLUMNS),
        rows,
    )


def _translate_and_time(model: PreTrainedModel, inputs: Any, **settings: Any) -> tuple[list, float]:
    inputs = inputs.to(model.device)
    with torch.no_grad():
        model.generate(**inputs, **settings)
        _synchronize(model.device)
        started = time.perf_counter()
        ids = model.generate(**inputs, **settings)
        _synchronize(model.device)
    return ids.tolist(), time.perf_counter() - started


def _equal_share(actual: list[list[int]], expected: list[list[int]], pad_id: int) -> float:
    token_pairs = [
        token_pair
        for translations in zip(actual, expected, strict=True)
        for token_pair in itertools.zip_longest(*translations, fillvalue=pad_id)
        if token_pair != (pad_id, pad_id)
    ]
    return sum(actual_id == expected_id for actual_id, expected_id in token_pairs) / len(
        token_pairs
    )


def _memory_section(flags: argparse.Namespace, device: torch.device) -> Section:
    """Train with the largest micro-batch for a small GPU, with torch limited to its memory."""
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    rows: list[tuple[Any, ...]] = []
    for precision in ("fp32", _half_precision(device)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(SMALL_GPU_BYTES / total_bytes)
        batch_tokens = None
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            batch_tokens = _train_with_largest_batch(flags, precision)
        torch.cuda.set_per_process_memory_fraction(1.0)
        peak_gigabytes = torch.cuda.max_memory_allocated() / 1e9
        rows.append(
            (
                precision,
                batch_tokens,
                SMALL_GPU_BYTES / 1e9,
                peak_gigabytes,
                _yes_or_no(batch_tokens is not None),
            )
        )
    return _section(
        "memory",
        "Memory",
        f"Training steps of the {flags.sizes[-1]} model with the micro-batch that fits a GPU of "
        f"{SMALL_GPU_BYTES / 1e9:.0f} GB; torch may not allocate more.",
        ("precision", "tokens of a micro-batch", "GB allowed", "peak GB", "agrees"),
        rows,
    )


def _train_with_largest_batch(flags: argparse.Namespace, precision: str) -> int:
    settings = TrainConfig(precision=precision, tokens_per_step=10**6)
    accelerator = distribution.open_accelerator(settings)
    config = model_config(flags.sizes[-1], flags.model_vocab_size)
    model = VanillaTransformerForConditionalGeneration(config).to(accelerator.device).train()
    wrapped_model, optimizer, wrapped_optimizer = distribution.prepare(accelerator, model, settings)
    free_bytes = SMALL_GPU_BYTES - torch.cuda.memory_reserved()
    with patch.object(memory, "free_bytes", lambda *_: free_bytes):
        tokens = memory.max_micro_batch_tokens(
            settings, config, model.num_parameters(), accelerator.device, 1
        )
    shape = tokens // SENTENCE_TOKENS, SENTENCE_TOKENS
    ids = torch.randint(4, flags.model_vocab_size, shape).tolist()
    collator = Collator(0, 0, flags.model_vocab_size)
    batch = mask_for_sdpa(collator({"input_ids": ids, "labels": ids}))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1e-4)
    for _ in range(3):
        training_step(
            accelerator,
            wrapped_model,
            wrapped_optimizer,
            schedule,
            [batch],
            label_smoothing=LABEL_SMOOTHING,
        )
    return tokens


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _yes_or_no(is_yes: bool) -> str:
    return "yes" if is_yes else "no"
