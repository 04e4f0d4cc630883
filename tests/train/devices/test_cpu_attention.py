"""Attention of a training step in half precision on a CPU: equation (1), in bf16 or float32."""

import math

import pytest
import torch
import train_toys
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer.modeling_vanilla_transformer import (
    FeedForward,
    MultiHeadAttention,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.train.devices import cpu_kernels
from vanilla_transformer.train.devices.cpu_kernels import (
    CPU_ATTENTION,
    CheapDropout,
    half_precision_attention,
    use_cpu_kernels,
)

BATCH, HEADS, QUERIES, KEYS, WIDTH = 5, 2, 6, 9, 8


def padding():
    mask = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
    mask[1, ..., 4:] = False
    mask[3, ..., 1:] = False
    return mask


def later_hidden():
    return torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()


MASKS = {
    "no mask": (None, None),
    "padding": (padding(), padding()),
    "padding and later positions": ((padding() & later_hidden()), (padding() & later_hidden())),
    "one for all sentences": (later_hidden()[None, None], later_hidden()[None, None]),
    "each head its own": (
        (heads := torch.ones(BATCH, HEADS, QUERIES, KEYS).bernoulli_(0.7).bool() | padding()),
        heads,
    ),
    "causal without a mask": (None, later_hidden()),
}


class Attended(TorchDispatchMode):
    """Record the precision of torch's attention and of batched products."""

    def __init__(self):
        super().__init__()
        self.kernels, self.products = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in str(func):
            self.kernels.append(args[0].dtype)
        if "bmm" in str(func):
            self.products.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def with_bf16(monkeypatch):
    """Pretend that this CPU has instructions for bf16; without them the results are the same."""
    monkeypatch.setattr(cpu_kernels, "has_bf16_instructions", lambda: True)


def attention_module(is_causal=False):
    module = MultiHeadAttention(train_toys.toy_model().config, is_causal=is_causal)
    return module.train()


def random_heads(length):
    # a view like that of the model, [B, h, length, d_k]
    x = torch.randn(BATCH, length, HEADS * WIDTH).bfloat16().requires_grad_()
    return x.view(BATCH, length, HEADS, WIDTH).transpose(1, 2)


def equation(query, key, value, allowed):
    """Softmax(Q K^T / sqrt(d_k)) V, [B, T, h, d_v], in float64. Section 3.2.1."""
    scores = query.double() @ key.double().mT / math.sqrt(WIDTH)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    return (scores.softmax(-1) @ value.double()).transpose(1, 2)


@pytest.mark.parametrize(("mask", "allowed"), MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("sentences", [1, 2, BATCH])
def test_products_in_bf16_are_equation_1_with_its_gradients(
    with_bf16, monkeypatch, mask, allowed, sentences
):
    torch.manual_seed(2)
    module = attention_module(is_causal=mask is None and allowed is not None)
    query, key, value = random_heads(QUERIES), random_heads(KEYS), random_heads(KEYS)
    grad = torch.randn(BATCH, QUERIES, HEADS, WIDTH).bfloat16()
    expected = equation(query, key, value, allowed)
    expected_grads = torch.autograd.grad(expected, (query, key, value), grad.double())
    monkeypatch.setattr(cpu_kernels, "SCORES_IN_CACHE", sentences * HEADS * QUERIES * KEYS)
    masks = [mask]
    if mask is not None:
        lowest = torch.finfo(torch.float32).min
        masks.append(torch.zeros(mask.shape).masked_fill_(~mask, lowest))
    for form in masks:
        with Attended() as attended:
            context, weights = half_precision_attention(
                module, query, key, value, form, scaling=WIDTH**-0.5
            )
            grads = torch.autograd.grad(context, (query, key, value), grad)
        assert weights is None
        assert not attended.kernels
        assert set(attended.products) == {torch.bfloat16}
        assert len(attended.products) == 6 * math.ceil(BATCH / sentences)
        torch.testing.assert_close(context.double(), expected, rtol=0.02, atol=0.02)
        for found, wanted in zip(grads, expected_grads, strict=True):
            error = (found.double() - wanted).norm() / wanted.norm()
            assert error < 0.01


@pytest.mark.parametrize(
    "case",
    ["search", "dropout", "long", "other CPU", "float32", "learned bias", "all hidden", "setting"],
)
def test_elsewhere_torch_computes_the_attention_in_float32(with_bf16, monkeypatch, case):
    torch.manual_seed(2)
    module = attention_module()
    query, key, value = random_heads(QUERIES), random_heads(KEYS), random_heads(KEYS)
    mask, settings = torch.zeros(BATCH, 1, QUERIES, KEYS, dtype=torch.bfloat16), {}
    if case == "search":
        module.eval()
    elif case == "dropout":
        settings = {"dropout": 0.5}
    elif case == "long":
        monkeypatch.setattr(cpu_kernels, "LONGEST_FOR_BF16", KEYS - 1)
    elif case == "other CPU":
        monkeypatch.setattr(cpu_kernels, "has_bf16_instructions", lambda: False)
    elif case == "float32":
        query, key, value = query.float(), key.float(), value.float()
    elif case == "learned bias":
        mask.requires_grad_()
    elif case == "all hidden":
        mask = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
        mask[2] = False
    else:
        settings = {"is_causal": False}
    with Attended() as attended:
        context, _ = half_precision_attention(
            module, query, key, value, mask, scaling=WIDTH**-0.5, **settings
        )
        context.sum().backward()
    assert set(attended.kernels) | set(attended.products) == {torch.float32}
    assert context.dtype == query.dtype
    if case == "learned bias":
        assert mask.grad is not None
    if case == "all hidden":
        assert context[2].abs().max() == 0
    elif case != "dropout":
        expected = equation(query, key, value, None)
        torch.testing.assert_close(context.double(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_step_in_half_precision_has_the_loss_and_gradients_of_the_plain_model(
    monkeypatch, tmp_path, has_bf16
):
    monkeypatch.setattr(cpu_kernels, "has_bf16_instructions", lambda: has_bf16)
    toy_batch = train_toys.toy_batch()
    model = train_toys.toy_model(dropout=0.0).train()
    parameters = tuple(model.parameters())
    expected = model(**toy_batch).loss
    expected_grads = torch.autograd.grad(expected, parameters)
    use_cpu_kernels(model, is_half=True)
    assert model.config._attn_implementation == CPU_ATTENTION
    # without half precision, the masks and kernels are the same, so nothing changes
    again = model(**toy_batch).loss
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    again_grads = torch.autograd.grad(again, parameters)
    torch.testing.assert_close(again_grads, expected_grads, rtol=0, atol=0)

    with Attended() as attended, torch.autocast("cpu", torch.bfloat16):
        loss = model(**toy_batch).loss
        grads = torch.autograd.grad(loss, parameters)
    # the encoder's layers have one attention, the decoder's have two
    layers = model.config.encoder_layers + 2 * model.config.decoder_layers
    if has_bf16:
        assert attended.products == 6 * layers * [torch.bfloat16]
        assert not attended.kernels
    else:
        assert attended.kernels == 2 * layers * [torch.float32]
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-2)
    found, wanted = (torch.cat([each.flatten() for each in all]) for all in (grads, expected_grads))
    assert (found - wanted).norm() < 0.1 * wanted.norm()

    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert CPU_ATTENTION not in (tmp_path / "config.json").read_text(encoding="utf-8")


class OwnLoss(VanillaTransformerForConditionalGeneration):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.loss = output.logits.logsumexp(-1).mean()
        return output


class OwnFeedForward(FeedForward):
    def forward(self, x):
        return super().forward(x) * 2


def test_a_model_class_of_a_user_trains_with_the_kernels_if_its_modules_are_released():
    torch.manual_seed(3)
    model = OwnLoss(train_toys.toy_model(dropout=0.1).config).train()
    use_cpu_kernels(model, is_half=True)
    assert model.config._attn_implementation == CPU_ATTENTION
    assert type(model.model.encoder.dropout) is CheapDropout
    output = model(**train_toys.toy_batch())
    torch.testing.assert_close(output.loss, output.logits.logsumexp(-1).mean())

    # an own module may be used in any way
    model = OwnLoss(train_toys.toy_model(dropout=0.1).config).train()
    model.own = torch.nn.Dropout(0.1)
    use_cpu_kernels(model, is_half=True)
    assert {type(model.own), type(model.model.encoder.dropout)} == {torch.nn.Dropout}

    changed = train_toys.toy_model(dropout=0.1).train()
    changed.model.decoder.layers[1].feed_forward.__class__ = OwnFeedForward
    use_cpu_kernels(changed, is_half=True)
    assert changed.config._attn_implementation == "sdpa"
    assert type(changed.model.encoder.dropout) is torch.nn.Dropout
