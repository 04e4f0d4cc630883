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
    build_matrix_product,
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
# small, because a model that diverges has logits whose exponentials are denormal numbers, which are
# slow on a CPU
LEARNING_RATE = 1e-4
# relative tolerance of loss and gradient, because implementations add thousands of float32 numbers
# in different orders
MAX_DIFFERENCE = 1e-3


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
            self.wrapped_model, optimizer, self.optimizer = distribution.prepare(
                self.accelerator, self.model, self.settings
            )
            self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: LEARNING_RATE)
            return
        self.peer = PEERS[MARIAN if name == MARIAN_RANDOM else name]
        self.model = self.peer.build(config).to(self.device).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, fused=True)
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
                self.wrapped_model,
                self.optimizer,
                self.schedule,
                [mask_for_sdpa(batch.tensors)],
                label_smoothing=smoothing,
            )
            return
        tensors = {
            name: tensor.to(self.device, non_blocking=True)
            for name, tensor in batch.tensors.items()
        }
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
        ValueError: If the device of the accelerator differs from that of the flags.
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
    requested_peers = [
        name for name, peer in PEERS.items() if name == MARIAN or peer.flag in flags.peers
    ]
    names = [OURS, *(name for name in requested_peers if PEERS[name].is_installed())]
    absent_peers = [name for name in requested_peers if name not in names]
    for size in flags.sizes:
        similar_length_batches = bucketed_batches(
            corpus, flags.tokens_per_batch, flags.batches, flags.config.seed
        )
        random_sentence_batches = random_batches(
            corpus, RANDOM_SENTENCES, flags.batches, flags.config.seed
        )
        yield _section(
            size, names, absent_peers, similar_length_batches, random_sentence_batches, flags
        )


def _section(
    size: str,
    names: Sequence[str],
    absent_peers: Sequence[str],
    similar_length_batches: list[Batch],
    random_sentence_batches: list[Batch],
    flags: argparse.Namespace,
) -> Section:
    config = model_config(size, flags.model_vocab_size)
    device = torch.device(flags.device)
    differences = {
        name: difference(name, size, similar_length_batches[0], flags)
        for name in names
        if name != OURS and PEERS[name].convert is not None
    }

    def build_implementation(name: str, batches: list[Batch]) -> Implementation:
        return Implementation(
            name,
            Trainee,
            (name, size, flags),
            batches,
            [batch.tokens for batch in batches],
            [training_flops(config, batch) for batch in batches],
        )

    implementations = [build_implementation(name, similar_length_batches) for name in names]
    times_random_batches = "usual" in flags.peers
    implementations += [
        build_implementation(name, random_sentence_batches)
        for name in (MARIAN_RANDOM, OURS_RANDOM)
        if times_random_batches
    ]
    matrix_implementation = build_matrix_product(device, dtype_of(flags.config), flags.batches)
    *results, matrix_result = time_in_turn(
        [*implementations, matrix_implementation], flags.rounds, device
    )
    rows = rows_of(results, MARIAN, matrix_result)
    non_padding_share = sum(batch.tokens for batch in random_sentence_batches) / sum(
        batch.tensors["input_ids"].numel() + batch.tensors["labels"].numel()
        for batch in random_sentence_batches
    )
    differences_text = ", ".join(
        f"{name} to {largest_difference:.0e}" for name, largest_difference in differences.items()
    )
    random_batches_note = (
        f"; the last two on {RANDOM_SENTENCES} random sentences, with {1 - non_padding_share:.0%} "
        "padding, the first of them with the library's label smoother"
        if times_random_batches
        else ""
    )
    finding = (
        f"Forward, smoothed loss, backward and Adam on batches of about {flags.tokens_per_batch:,} "
        f"target tokens and sentences of similar length, {flags.config.precision}, vocabulary "
        f"{flags.model_vocab_size:,}{random_batches_note}. With equal weights, loss and gradient "
        f"in float32 agree with {differences_text}, relative to the largest. Each implementation "
        "has its own process, and they do each batch in turn; ratios are medians over batches and "
        "rounds, with quartiles; memory is beyond that after the imports. A product of large "
        "matrices ran at "
        f"{numbers_of([], matrix_result)['matrix_product_flops_per_second'] / 1e9:,.0f} GFLOP/s."
        + (f" Not installed: {', '.join(absent_peers)}." if absent_peers else "")
    )
    return Section(
        name=f"training-{size}",
        title=f"Training step, {size}",
        finding=finding,
        columns=COLUMNS,
        rows=rows,
        figure=ratio_figure({f"training, {size}": rows}, MARIAN),
        numbers={**numbers_of(results, matrix_result), "differences": differences},
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
    peer_model = peer.build(model_config(size, flags.model_vocab_size)).eval()
    if peer.convert is None:
        raise ValueError(f"{name} must have a conversion to this package, but has none.")
    our_model = peer.convert(peer_model)
    tensors = batch.tensors
    expected_loss = peer.loss_sum(peer_model, tensors, smoothing)
    expected_loss.backward()
    # use the kernels of the timed step: linear layers in training mode use oneDNN, and all other
    # modules stay in evaluation mode, without dropout
    use_cpu_kernels(our_model, is_half=False)
    for module in our_model.modules():
        module.training = isinstance(module, nn.Linear)
    label_indices = (tensors["labels"].flatten() != IGNORED).nonzero()[:, 0]
    actual_loss = fused_loss_sum(
        our_model, **tensors, label_indices=label_indices, label_smoothing=smoothing
    )
    actual_loss.backward()
    gradients = [
        _embedding_gradient(model, flags.model_vocab_size) for model in (peer_model, our_model)
    ]
    gradient_difference = (gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()
    largest_difference = max(
        float(gradient_difference),
        float(((actual_loss - expected_loss) / expected_loss).detach().abs()),
    )
    if not largest_difference < MAX_DIFFERENCE:
        raise ValueError(
            f"loss and gradient of {name} must agree with ours to {MAX_DIFFERENCE}, got "
            f"{largest_difference:.1g}."
        )
    return largest_difference


def _embedding_gradient(model: nn.Module, vocab_size: int) -> Tensor:
    """Return the sum of the embeddings' gradients, to which every part of the model contributes."""
    gradients = [
        parameter.grad
        for parameter in model.parameters()
        if parameter.grad is not None and parameter.shape[0] == vocab_size and parameter.ndim == 2
    ]
    return torch.stack(gradients).sum(0)
