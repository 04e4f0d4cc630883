"""Training step with the loss of section 5.4, in which all tokens weigh the same."""

import contextlib
import functools
import math
from types import SimpleNamespace

import equations
import pytest
import torch
import train_toys
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer.train import step
from vanilla_transformer.train.data.batches import IGNORED
from vanilla_transformer.train.step import (
    mask_for_sdpa,
    on_device,
    smoothed_loss_sum,
    training_step,
)


def plain_smoothed_loss(logits, labels, smoothing):
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        if label == IGNORED:
            continue
        log_probs = equations.log_softmax(row)
        for token, log_prob in enumerate(log_probs):
            target = smoothing / len(row) + (1 - smoothing) * (token == label)
            total -= target * log_prob
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_the_loss_is_the_cross_entropy_with_smoothed_targets(smoothing):
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7)
    labels = torch.tensor([[3, 0, 6, 2, IGNORED], [5, 1, IGNORED, IGNORED, IGNORED]])
    expected = plain_smoothed_loss(
        logits.flatten(0, 1).tolist(), labels.flatten().tolist(), smoothing
    )
    loss = smoothed_loss_sum(logits, labels, smoothing)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def batch():
    torch.manual_seed(1)
    labels = torch.randint(3, 19, (4, 6))
    labels[1, 2:] = IGNORED
    labels[3, 1:] = IGNORED
    inputs = torch.randint(3, 19, (4, 5))
    mask = torch.ones_like(inputs)
    mask[2, 3:] = 0
    decoder = torch.cat((torch.ones(4, 1, dtype=torch.long), labels[:, :-1]), dim=1)
    return {
        "input_ids": inputs,
        "attention_mask": mask,
        "decoder_input_ids": decoder.masked_fill(decoder == IGNORED, 0),
        "labels": labels,
    }


@pytest.fixture
def model():
    return train_toys.toy_model(seed=2, dropout=0.0).train()


def take_step(model, batches, **options):
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    wrapped, wrapped_optimizer = accelerator.prepare(model, optimizer)
    return training_step(
        accelerator, wrapped, wrapped_optimizer, scheduler, batches, label_smoothing=0.1, **options
    )


def updated(model, batches, **options):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = take_step(model, batches, **options)
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(before)
    return result, after


def test_how_a_step_is_split_does_not_matter(model, batch):
    rows = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)]
    whole_result, whole = updated(model, [batch])
    split_result, split = updated(model, rows)
    assert whole_result.num_tokens == split_result.num_tokens == 6 + 2 + 6 + 1
    assert float(split_result.loss) == pytest.approx(float(whole_result.loss), abs=1e-6)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)
    assert not torch.equal(whole["lm_head.weight"], model.lm_head.weight)


def train_in_a_group(model, inputs):
    """Take two steps. The replica is freed before its process group, which could hang otherwise."""
    replica = DistributedDataParallel(model)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.MULTI_CPU, autocast=contextlib.nullcontext
    )
    before = dict(vars(model))
    losses = []
    for _ in range(2):
        assert step.takes_fused_loss(accelerator, replica)
        losses.append(step.batch_loss_sum(accelerator, replica, inputs, 0.1))
        losses[-1].backward()
        assert vars(model) == before
    assert torch.equal(*losses)


@pytest.mark.parametrize("has_own_forward", [False, True])
def test_every_batch_of_several_processes_takes_the_fused_loss(
    model, batch, tmp_path, has_own_forward
):
    label_indices = (batch["labels"].flatten() != IGNORED).nonzero()[:, 0]
    inputs = {**batch, "label_indices": label_indices}
    if has_own_forward:
        # as accelerate does with mixed precision
        model._original_forward, model.forward = model.forward, functools.partial(model.forward)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        train_in_a_group(model, inputs)
    finally:
        torch.distributed.destroy_process_group()


def everything(model, optimizer):
    state = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [tensor.clone() for tensor in (*model.state_dict().values(), *state)]


def test_a_step_without_a_finite_loss_changes_nothing(model, batch, monkeypatch):
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    prepared = accelerator.prepare(model, optimizer)
    real_loss = step.batch_loss_sum

    def take_step(factor):
        monkeypatch.setattr(step, "batch_loss_sum", lambda *given: factor * real_loss(*given))
        return training_step(accelerator, *prepared, scheduler, [batch], label_smoothing=0.1)

    assert not take_step(1.0).is_skipped
    before = everything(model, optimizer)
    # weights, and two moments and a count of steps for each
    assert len(before) == len(model.state_dict()) + 3 * len(list(model.parameters()))
    for factor in (math.inf, math.nan, 1e38):
        assert take_step(factor).is_skipped
        for tensor, other in zip(everything(model, optimizer), before, strict=True):
            assert torch.equal(tensor, other)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not take_step(1.0).is_skipped
    assert not torch.equal(everything(model, optimizer)[0], before[0])


def test_clipping_bounds_the_gradient(model, batch):
    free, _ = updated(model, [batch])
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    bound = float(free.grad_norm) / 3
    clipped, after = updated(model, [batch], max_grad_norm=bound)
    moved = sum(float((after[name] - start[name]).square().sum()) for name in start) ** 0.5
    assert float(clipped.grad_norm) == pytest.approx(float(free.grad_norm))
    assert moved == pytest.approx(0.5 * bound, rel=1e-3)


def test_a_step_without_target_tokens_is_refused(model, batch):
    batch["labels"][:] = IGNORED
    with pytest.raises(ValueError, match="at least one target token"):
        take_step(model, [batch])
    with pytest.raises(ValueError, match="at least one batch"):
        take_step(model, [])


class Waits(TorchDispatchMode):
    """Count how often the host reads a number from the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        asked = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)
        self.count += operation.overloadpacket in asked
        return operation(*args, **(kwargs or {}))


def test_the_device_is_never_waited_for(model, batch):
    with Waits() as waits:
        result = take_step(model, [mask_for_sdpa(batch), mask_for_sdpa(batch)])
    assert waits.count == 0
    assert float(result.loss) > 0
    with Waits() as waits:
        take_step(model, [batch])
    # proves that waits are counted: transformers reads the values of a mask of two axes
    assert waits.count > 0


def test_the_form_of_the_mask_does_not_matter(model, batch):
    _, expected = updated(model, [batch])
    _, after = updated(model, [mask_for_sdpa(batch)])
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
    batch["attention_mask"][2, 3:] = 1
    assert "attention_mask" not in mask_for_sdpa(batch)
    _, other = updated(model, [batch])
    assert not torch.allclose(other["lm_head.weight"], expected["lm_head.weight"])
    _, after = updated(model, [mask_for_sdpa(batch)])
    torch.testing.assert_close(after, other, rtol=1e-5, atol=1e-6)


class HostTensor:
    """Tensor in host memory that notes how it is copied."""

    def __init__(self, pinned, copies):
        self.pinned, self.copies = pinned, copies

    def is_pinned(self):
        return self.pinned

    def pin_memory(self):
        return HostTensor(True, self.copies)

    def to(self, device, non_blocking=False):
        self.copies.append((device.type, self.pinned, non_blocking))
        return self


@pytest.mark.parametrize(("device", "expected"), [("cuda", [True, True]), ("cpu", [False, True])])
def test_a_gpu_gets_copies_from_pinned_memory(device, expected):
    copies = []
    batch = {"label_indices": HostTensor(False, copies), "input_ids": HostTensor(True, copies)}
    assert list(on_device(batch, torch.device(device))) == ["label_indices", "input_ids"]
    assert copies == [(device, pinned, True) for pinned in expected]
