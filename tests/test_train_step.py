"""The loss of section 5.4, and a step whose tokens all weigh the same."""

from types import SimpleNamespace

import paper
import pytest
import torch
import train_toys
from accelerate import Accelerator

from vanilla_transformer.train.step import IGNORED, smoothed_loss_sum, training_step


def plain_smoothed_loss(logits, labels, smoothing):
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        if label == IGNORED:
            continue
        log_probs = paper.log_softmax(row)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
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


def test_a_step_without_a_finite_loss_changes_nothing(model, batch):
    with torch.no_grad():
        model.model.decoder.layers[0].feed_forward.fc1.bias[0] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = take_step(model, [batch])
    assert result.is_skipped
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name
    assert all(parameter.grad is None for parameter in model.parameters())


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


class Guess(torch.nn.Module):
    """A model that guesses the next token from the last one alone."""

    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Embedding(19, 19)

    def forward(self, decoder_input_ids, **others):
        return SimpleNamespace(logits=self.scores(decoder_input_ids))


def test_the_device_is_waited_for_once_a_step(batch, monkeypatch):
    answers = []
    to_bool = torch.Tensor.__bool__
    monkeypatch.setattr(
        torch.Tensor, "__bool__", lambda tensor: answers.append(to_bool(tensor)) or answers[-1]
    )
    assert not take_step(Guess(), [batch, batch]).is_skipped
    # whether loss and gradient are finite, which decides over the step
    assert answers == [True]
