"""Measure training steps: forward, smoothed loss, backward and fused Adam, beside the peers."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from .. import VanillaTransformerForConditionalGeneration
from ..paper.study import Section
from ..train.config import TrainConfig
from ..train.data.batches import IGNORED
from ..train.devices import distribution
from ..train.devices.cpu_kernels import use_cpu_kernels
from ..train.devices.fused_loss import fused_loss_sum
from ..train.step import mask_for_sdpa, training_step
from .peers import MARIAN, OURS, PEERS
from .timing import (
    COLUMNS,
    Implementation,
    matrix_product,
    numbers_of,
    ratio_figure,
    rows_of,
    time_in_turn,
)
from .work import (
    Batch,
    bucketed_batches,
    model_config,
    random_batches,
    read_corpus,
    training_flops,
)

MARIAN_RANDOM = "transformers Marian, random sentences"
OURS_RANDOM = "this package, the same random sentences"
# number of sentences in a batch of random sentences
RANDOM_SENTENCES = 64
# relative tolerance of loss and gradient, because implementations add thousands of float32 numbers
# in different orders
SAME = 1e-3


class Trainee:
    """Model with its optimizer; a call is a training step.

    Args:
        name: `OURS`, `OURS_RANDOM`, `MARIAN_RANDOM` or one of `PEERS`.
        size: One of `work.SIZES`.
        flags: Flags of the command line.
        fields: Further fields of the configuration.
    """

    def __init__(self, name: str, size: str, flags: argparse.Namespace, **fields: Any):
        self.name = name
        self.smoother = LabelSmoother(epsilon=flags.config.label_smoothing)
        self.settings: TrainConfig = flags.config
        self.device = torch.device(flags.device)
        config = model_config(size, flags.model_vocab_size, **fields)
        torch.manual_seed(self.settings.seed)
        if name in (OURS, OURS_RANDOM):
            self.model = VanillaTransformerForConditionalGeneration(config).train()
            self.accelerator = open_accelerator(self.settings, self.device)
            prepared = distribution.prepare(self.accelerator, self.model, self.settings)
            self.wrapped, _, self.optimizer = prepared
            self.schedule = torch.optim.lr_scheduler.ConstantLR(prepared[1], factor=1e-4)
            return
        self.peer = PEERS[MARIAN if name == MARIAN_RANDOM else name]
        self.model = self.peer.build(config).to(self.device).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        if self.settings.compile:
            self.model.compile(dynamic=True)

    def __call__(self, batch: Batch) -> None:
        """Update the weights once.

        Args:
            batch: Training batch.
        """
        smoothing = self.settings.label_smoothing
        if self.name in (OURS, OURS_RANDOM):
            # the step of our training loop
            training_step(
                self.accelerator,
                self.wrapped,
                self.optimizer,
                self.schedule,
                [mask_for_sdpa(batch.tensors)],
                smoothing,
            )
            return
        tensors = self.on_device(batch)
        dtype = dtype_of(self.settings)
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            if self.name == MARIAN_RANDOM:
                inputs = {name: tensor for name, tensor in tensors.items() if name != "labels"}
                loss = self.smoother(self.model(**inputs, use_cache=False), tensors["labels"])
            else:
                loss = self.peer.loss_sum(self.model, tensors, smoothing)
                loss = loss / batch.target_lengths.sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def on_device(self, batch: Batch) -> dict[str, Tensor]:
        """Copy the tensors of a batch to the device of the model.

        Args:
            batch: Batch on the CPU.

        Returns:
            Tensors on the device.
        """
        return {
            name: tensor.to(self.device, non_blocking=True)
            for name, tensor in batch.tensors.items()
        }


def dtype_of(settings: TrainConfig) -> torch.dtype:
    """Return the dtype of matrix products.

    Args:
        settings: Settings of a run.

    Returns:
        The dtype that belongs to the precision of the run.
    """
    return distribution.HALF_PRECISION_DTYPES.get(settings.precision, torch.float32)


def open_accelerator(settings: TrainConfig, device: torch.device) -> Accelerator:
    """Open the accelerator for training on one device.

    Args:
        settings: Settings of a run.
        device: Device from the flags.

    Returns:
        The accelerator of `distribution.open_accelerator`.

    Raises:
        ValueError: If the accelerator has another device than the flags.
    """
    accelerator = distribution.open_accelerator(settings)
    if accelerator.device.type != device.type:
        raise ValueError(f"device must be {accelerator.device.type} here, got {device.type}.")
    return accelerator


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Compare training steps of the implementations, for each size.

    Args:
        flags: Flags of the command line.

    Yields:
        One section for each size.
    """
    corpus = read_corpus(flags.config, flags.model_vocab_size)
    asked = [name for name, peer in PEERS.items() if name == MARIAN or peer.flag in flags.peers]
    names = [OURS, *(name for name in asked if PEERS[name].is_installed())]
    absent = [name for name in asked if name not in names]
    for size in flags.sizes:
        bucketed = bucketed_batches(
            corpus, flags.tokens_per_batch, flags.batches, flags.config.seed
        )
        random = random_batches(corpus, RANDOM_SENTENCES, flags.batches, flags.config.seed)
        yield _section(size, names, absent, bucketed, random, flags)


def _section(
    size: str,
    names: Sequence[str],
    absent: Sequence[str],
    bucketed: list[Batch],
    random: list[Batch],
    flags: argparse.Namespace,
) -> Section:
    config = model_config(size, flags.model_vocab_size)
    device = torch.device(flags.device)
    differences = {
        name: difference(name, size, bucketed[0], flags)
        for name in names
        if name != OURS and PEERS[name].convert is not None
    }

    def implementation(name: str, batches: list[Batch]) -> Implementation:
        return Implementation(
            name,
            Trainee,
            (name, size, flags),
            batches,
            [batch.tokens for batch in batches],
            [training_flops(config, batch) for batch in batches],
        )

    implementations = [implementation(name, bucketed) for name in names]
    has_random = "usual" in flags.peers
    implementations += [
        implementation(name, random) for name in (MARIAN_RANDOM, OURS_RANDOM) if has_random
    ]
    matrix = matrix_product(device, dtype_of(flags.config), flags.batches)
    *results, product = time_in_turn([*implementations, matrix], flags.rounds, device)
    rows = rows_of(results, MARIAN, product)
    non_padding = sum(batch.tokens for batch in random) / sum(
        batch.tensors["input_ids"].numel() + batch.tensors["labels"].numel() for batch in random
    )
    equal = ", ".join(f"{name} to {worst:.0e}" for name, worst in differences.items())
    on_random = (
        f"; the last two on {RANDOM_SENTENCES} random sentences, with {1 - non_padding:.0%} "
        "padding, the first of them with the library's label smoother"
        if has_random
        else ""
    )
    finding = (
        f"Forward, smoothed loss, backward and Adam on batches of about {flags.tokens_per_batch:,} "
        f"target tokens and sentences of similar length, {flags.config.precision}, vocabulary "
        f"{flags.model_vocab_size:,}{on_random}. With equal weights, loss and gradient in float32 "
        f"agree with {equal}, relative to the largest. Each implementation has its own process, "
        "and they do each batch in turn; ratios are medians over batches and rounds, with "
        "quartiles; memory is beyond that after the imports. A product of large matrices ran at "
        f"{numbers_of([], product)['matrix_product_flops_per_second'] / 1e9:,.0f} GFLOP/s."
        + (f" Not installed: {', '.join(absent)}." if absent else "")
    )
    return Section(
        name=f"training-{size}",
        title=f"Training step, {size}",
        finding=finding,
        columns=COLUMNS,
        rows=rows,
        figure=ratio_figure({f"training, {size}": rows}, MARIAN),
        numbers={**numbers_of(results, product), "differences": differences},
    )


def difference(name: str, size: str, batch: Batch, flags: argparse.Namespace) -> float:
    """Compare loss and gradient of a peer with those of its conversion to this package.

    Args:
        name: One of `PEERS`.
        size: One of `work.SIZES`.
        batch: Batch to compute the loss on.
        flags: Flags of the command line.

    Returns:
        The larger of two relative differences: of the loss, and of the embeddings' gradient.

    Raises:
        ValueError: If the difference is not below the tolerance, or the peer has no conversion.
    """
    peer, smoothing = PEERS[name], flags.config.label_smoothing
    torch.manual_seed(flags.config.seed)
    theirs = peer.build(model_config(size, flags.model_vocab_size)).eval()
    if peer.convert is None:
        raise ValueError(f"{name} must have a conversion to this package, and has none.")
    ours = peer.convert(theirs)
    tensors = batch.tensors
    expected = peer.loss_sum(theirs, tensors, smoothing)
    expected.backward()
    # use the kernels of the timed step: linear layers in training mode use oneDNN, and all other
    # modules stay in evaluation mode, without dropout
    use_cpu_kernels(ours, is_half=False)
    for module in ours.modules():
        module.training = isinstance(module, nn.Linear)
    label_indices = (tensors["labels"].flatten() != IGNORED).nonzero()[:, 0]
    actual = fused_loss_sum(ours, **tensors, label_indices=label_indices, label_smoothing=smoothing)
    actual.backward()
    gradients = [_embedding_gradient(model, flags.model_vocab_size) for model in (theirs, ours)]
    gap = (gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()
    worst = max(float(gap), float(((actual - expected) / expected).detach().abs()))
    if not worst < SAME:
        raise ValueError(
            f"loss and gradient of {name} must agree with ours to {SAME}, got {worst:.1g}."
        )
    return worst


def _embedding_gradient(model: nn.Module, vocab_size: int) -> Tensor:
    """Return the sum of the embeddings' gradients, to which every part of the model contributes."""
    tables = [
        parameter.grad
        for parameter in model.parameters()
        if parameter.grad is not None and parameter.shape[0] == vocab_size and parameter.ndim == 2
    ]
    return torch.stack(tables).sum(0)
