"""The fused loss and the CPU kernels: same losses and gradients as the plain model."""

import weakref
from collections import Counter

import pytest
import torch
import train_toys
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer.engine_checks_vanilla_transformer import reason_against_engine
from vanilla_transformer.train.data.batches import IGNORED
from vanilla_transformer.train.devices import cpu_kernels, fused_loss
from vanilla_transformer.train.devices.cpu_kernels import (
    CheapDropout,
    OneDnnLinear,
    use_cheap_dropout,
    use_cpu_kernels,
    use_onednn,
)
from vanilla_transformer.train.devices.fused_loss import fused_loss_sum
from vanilla_transformer.train.step import mask_for_sdpa, smoothed_loss_sum

MODELS = {
    "the paper's": {},
    "with biases": {"output_bias": True, "attention_bias": True},
    "untied": {"tie_word_embeddings": False, "output_bias": True},
    "normalized first": {"norm_first": True},
    "learned positions": {"position_encoding": "learned", "max_position_embeddings": 9},
}
LOSS_CODE = {"eager": "_loss_and_gradients", "compiled": "_loss_and_gradients_compiled"}


@pytest.fixture
def batch():
    return train_toys.toy_batch()


def label_indices_of(labels):
    return (labels.flatten() != IGNORED).nonzero()[:, 0]


def taken(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def plain(model, batch, smoothing):
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return smoothed_loss_sum(model(**inputs).logits, batch["labels"], smoothing)


def quick(model, batch, smoothing):
    return fused_loss_sum(
        model,
        **mask_for_sdpa(batch),
        label_indices=label_indices_of(batch["labels"]),
        label_smoothing=smoothing,
    )


@pytest.fixture(params=["eager", "compiled"])
def loss_code(request, monkeypatch):
    """Compute the loss in tiles, or with the code that is compiled on a GPU."""
    if request.param == "compiled":
        monkeypatch.setattr(fused_loss, "_is_compiled", lambda model: True)
        monkeypatch.setattr(fused_loss, "_compiled_block", lambda: fused_loss._loss_of_block)
    return getattr(fused_loss, LOSS_CODE[request.param])


@pytest.mark.usefixtures("loss_code")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("columns", [1, 7, 1000])
def test_loss_and_gradients_are_those_of_the_plain_model(kind, rows, columns, batch, monkeypatch):
    # so many tokens at a time of the 15 that count, and of the vocabulary of 19
    monkeypatch.setattr(fused_loss, "CPU_BLOCK_BYTES", 4 * 19 * rows)
    monkeypatch.setattr(fused_loss, "CPU_TILE_BYTES", 4 * min(rows, 15) * columns)
    model = train_toys.toy_model(seed=2, dropout=0.0, **MODELS[kind]).train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    for smoothing in (0.0, 0.1):
        expected, actual = plain(model, batch, smoothing), quick(model, batch, smoothing)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        gradients = taken(model, expected / 7), taken(model, actual / 7)
        assert len(gradients[0]) > 20
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


def test_where_nothing_is_padded_the_states_are_taken_as_they_are(batch):
    batch["labels"] = torch.randint(3, 19, (4, 6))
    model = train_toys.toy_model(seed=2, dropout=0.0).train()
    expected, actual = (taken(model, loss(model, batch, 0.1)) for loss in (plain, quick))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_compiled_loss_is_the_same(batch, monkeypatch):
    monkeypatch.setattr(fused_loss, "_is_compiled", lambda model: True)
    monkeypatch.setattr(fused_loss, "CPU_BLOCK_BYTES", 4 * 19 * 4)
    for fields in MODELS.values():
        model = train_toys.toy_model(seed=2, dropout=0.0, **fields).train()
        expected, actual = (taken(model, loss(model, batch, 0.1)) for loss in (plain, quick))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_run_compiles_its_loss_on_a_gpu_only():
    model = train_toys.toy_model()
    assert not fused_loss._is_compiled(model.to("meta"))
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.compile()
    assert fused_loss._is_compiled(model)
    assert not fused_loss._is_compiled(model.to_empty(device="cpu"))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_scores_that_differ_by_hundreds_overflow_nowhere(is_compiled, monkeypatch):
    monkeypatch.setattr(fused_loss, "_compiled_block", lambda: fused_loss._loss_of_block)
    torch.manual_seed(0)
    states = torch.randn(5, 8, requires_grad=True)
    weight = (300 * torch.randn(19, 8)).requires_grad_()
    labels = torch.tensor([3, 0, 18, 7, 7])
    expected = smoothed_loss_sum((states @ weight.T)[None], labels[None], 0.1)
    expected_gradients = torch.autograd.grad(expected, (states, weight))
    actual = fused_loss.LossOfStates.apply(states, weight, None, labels, 0.1, None, is_compiled)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(actual, (states, weight))
    # sums of scores in the thousands, in another order
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [-300.0, -40.0, 0.0, 60.0, 300.0])
def test_logits_may_be_as_high_or_low_as_they_like(shift, dtype, monkeypatch):
    # softmax and gradient do not depend on a number that is added to all logits
    monkeypatch.setattr(fused_loss, "CPU_BLOCK_BYTES", 19 * 3 * 4)
    monkeypatch.setattr(fused_loss, "CPU_TILE_BYTES", 3 * 7 * 4)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(5, 8, generator=generator).to(dtype).float()
    weight = torch.randn(19, 8, generator=generator).to(dtype).float()
    bias, labels = torch.randn(19, generator=generator), torch.tensor([3, 0, 18, 7, 7])
    exact = [tensor.double().requires_grad_() for tensor in (states, weight, bias)]
    exact_logits = exact[0] @ exact[1].T + exact[2] + shift
    expected = torch.nn.functional.cross_entropy(
        exact_logits, labels, label_smoothing=0.1, reduction="sum"
    )
    expected_gradients = torch.autograd.grad(expected, exact)
    loss, gradients = fused_loss._loss_and_gradients(
        states, weight, bias + shift, labels, 0.1, dtype
    )
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for actual, exact_gradient in zip(gradients, expected_gradients, strict=True):
        largest = exact_gradient.abs().max()
        assert (actual - exact_gradient).abs().max() < tolerance * largest


@pytest.mark.usefixtures("loss_code")
def test_half_precision_is_as_near_as_the_plain_models(batch):
    model = train_toys.toy_model(seed=2, dropout=0.0).train()
    exact = taken(model, plain(model, batch, 0.1))
    expected = float(plain(model, batch, 0.1).detach())
    distances = []
    for loss in (plain, quick):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, batch, 0.1)
        # bfloat16 has three digits
        assert float(value.detach()) == pytest.approx(expected, rel=1e-3)
        found = taken(model, value)
        distances.append(sum(float((found[name] - exact[name]).norm()) for name in exact))
    assert 0 < distances[1] < 1.5 * distances[0]


@pytest.mark.usefixtures("loss_code")
def test_a_loss_that_is_not_a_number_stays_one(batch):
    model = train_toys.toy_model(seed=2)
    model.lm_head.weight.data[5, 1] = torch.inf
    assert not torch.isfinite(quick(model, batch, 0.1))


@pytest.mark.usefixtures("loss_code")
def test_a_batch_of_which_no_label_counts_changes_nothing(batch):
    model = train_toys.toy_model().train()
    loss = quick(model, {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}, 0.1)
    assert loss == 0
    assert all(not gradient.any() for gradient in taken(model, loss).values())


@pytest.mark.usefixtures("loss_code")
@pytest.mark.parametrize("fields", [{}, {"output_bias": True}])
def test_weights_may_be_in_half_precision(batch, fields):
    model = train_toys.toy_model(dropout=0.0, **fields).train()
    expected = taken(model, plain(model, batch, 0.1))
    found = taken(model.bfloat16(), quick(model, batch, 0.1))
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
    expected, found = (
        torch.cat([tensor.flatten().float() for tensor in each.values()])
        for each in (expected, found)
    )
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_float16_is_enough_for_a_large_vocabulary_of_which_nothing_is_known(loss_code):
    # e^0 of each of 80,000 tokens: more than float16 can say, as is a small state in so many parts
    torch.manual_seed(0)
    states, weight = 0.01 * torch.randn(7, 4), 0.01 * torch.randn(80_000, 4)
    labels = torch.randint(80_000, (7,))
    found, expected = (
        loss_code(states, weight, None, labels, 0.1, kind)
        for kind in (torch.float16, torch.float32)
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=0)
    for half, full in zip(found[1][:2], expected[1][:2], strict=True):
        assert (half - full).norm() < 0.02 * full.norm()


@pytest.mark.parametrize("label", [IGNORED, 19])
def test_a_label_outside_the_vocabulary_is_refused(label):
    labels = torch.tensor([3, label])
    with pytest.raises(RuntimeError, match="labels must be from 0 to 18"):
        fused_loss.LossOfStates.apply(torch.ones(2, 8), torch.ones(19, 8), None, labels, 0.1, None)


def test_a_gradient_is_taken_once(batch):
    loss = quick(train_toys.toy_model(), batch, 0.1)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


class Largest(TorchDispatchMode):
    """Record the largest tensor with a dimension of the vocabulary."""

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size, self.tokens = vocab_size, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (self.vocab_size,):
            self.tokens = max(self.tokens, result.numel() // self.vocab_size)
        return result


def test_scores_of_all_tokens_are_never_in_memory(batch, monkeypatch):
    monkeypatch.setattr(fused_loss, "CPU_BLOCK_BYTES", 4 * 19 * 5)
    model = train_toys.toy_model(seed=2)
    with Largest(19) as plainly:
        plain(model, batch, 0.1).backward()
    # transposed weights have the width of the vocabulary too, and d_model rows
    assert plainly.tokens == 24
    with Largest(19) as fusedly:
        quick(model, batch, 0.1).backward()
    assert fusedly.tokens == 8 == model.config.d_model


def test_a_block_of_scores_is_gone_before_the_next_is_made(batch, monkeypatch):
    monkeypatch.setattr(fused_loss, "CPU_BLOCK_BYTES", 4 * 19 * 5)
    made, alive = [], []

    def watched(x, weight, product=fused_loss.product):
        is_score = weight.shape[0] == 19
        if is_score:
            alive.append(sum(score() is not None for score in made))
        result = product(x, weight)
        if is_score:
            made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(fused_loss, "product", watched)
    quick(train_toys.toy_model(seed=2), batch, 0.1)
    assert alive == [0, 0, 0]


def test_dropout_drops_its_share_and_keeps_the_mean():
    torch.manual_seed(3)
    dropout, x = CheapDropout(0.1), torch.full((1000, 1001), 2.0, requires_grad=True)
    y = dropout(x)
    share = float((y == 0).float().mean())
    # a million draws: three standard deviations
    assert share == pytest.approx(0.1, abs=0.001)
    kept = y[y != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 2 / 0.9), rtol=1e-4, atol=0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach() / 2)
    rows = (y == 0).float().mean(1)
    assert 0.06 < float(rows.min()) < float(rows.max()) < 0.14
    assert torch.equal(dropout.eval()(x), x)


def test_dropout_depends_only_on_the_seed():
    dropout, x = CheapDropout(0.5), torch.ones(40)

    def drawn(seed):
        torch.manual_seed(seed)
        return dropout(x), dropout(x)

    (first, second), (again, _), (other, _) = drawn(1), drawn(1), drawn(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_the_dropout_of_a_model_is_replaced_and_its_weights_are_not():
    model = train_toys.toy_model(dropout=0.3).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    use_cheap_dropout(model)
    changed = [module for module in model.modules() if isinstance(module, CheapDropout)]
    # one for each stack's embeddings and one for each layer; the feed-forward's has nothing to drop
    assert len(changed) == 2 + 3
    assert {module.p for module in changed} == {0.3}
    assert all(module.training for module in changed)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class Products(TorchDispatchMode):
    """Count matrix products by library."""

    def __init__(self):
        super().__init__()
        self.numbers = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "_linear_pointwise"):
            self.numbers[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def onednn(monkeypatch):
    """Pretend that oneDNN is faster on this CPU; its results are right on every CPU."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(cpu_kernels, "is_intel", lambda: False)
    monkeypatch.setattr(cpu_kernels, "SMALLEST_FOR_ONEDNN", 1)
    cpu_kernels.is_onednn_faster.cache_clear()
    yield
    cpu_kernels.is_onednn_faster.cache_clear()


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_a_step_by_onednn_is_the_plain_one(batch, onednn, fields, monkeypatch):
    model = train_toys.toy_model(dropout=0.0, **fields).train()
    expected = plain(model, batch, 0.1)
    gradients = taken(model, expected)
    # as is the sum over blocks of tokens and parts of the vocabulary
    monkeypatch.setattr(fused_loss, "CPU_BLOCK_BYTES", 4 * model.config.vocab_size * 5)
    monkeypatch.setattr(fused_loss, "CPU_TILE_BYTES", 4 * 10 * 5)
    use_cpu_kernels(model, is_half=False)
    with Products() as products:
        found = quick(model, batch, 0.1)
        found_gradients = taken(model, found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(found_gradients, gradients, rtol=1e-4, atol=1e-5)
    linears = [module for module in model.modules() if type(module) is OneDnnLinear]
    tiles = 2 * -(-len(label_indices_of(batch["labels"])) // 5)
    # one there and two back of each layer but the projection, and of each tile of the loss, for
    # which torch computes only the gradient of a bias
    assert products.numbers["_linear_pointwise"] == 3 * (len(linears) - 1 + tiles)
    assert products.numbers["mm"] == (tiles if model.config.output_bias else 0)
    assert products.numbers["addmm"] == 0


def test_weights_hooks_and_search_stay_where_products_are_onednns(batch, onednn):
    model = train_toys.toy_model(dropout=0.1)
    calls, names = [], list(model.state_dict())
    handle = model.model.encoder.layers[0].feed_forward.fc1.register_forward_hook(
        lambda *_: calls.append(1)
    )
    use_onednn(model)
    assert list(model.state_dict()) == names
    model(**{name: batch[name] for name in ("input_ids", "decoder_input_ids")})
    assert calls == [1]
    handle.remove()
    use_cpu_kernels(model, is_half=True)
    assert reason_against_engine(model.eval()) is None
    model.model.decoder.layers[1].dropout.train()
    assert reason_against_engine(model) == "model.decoder.layers.1.dropout is in training mode"


def test_a_loss_may_contain_a_gradient(batch, onednn):
    def penalty(model):
        torch.manual_seed(5)
        inputs = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
        weights = [model.lm_head.weight, model.model.decoder.layers[0].feed_forward.fc1.weight]
        loss = model(**inputs).logits.square().mean()
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        return taken(model, sum(gradient.square().sum() for gradient in gradients))

    model = train_toys.toy_model(dropout=0.0).train()
    model.set_attn_implementation("eager")
    expected = penalty(model)
    use_cpu_kernels(model, is_half=False)
    torch.testing.assert_close(penalty(model), expected, rtol=1e-4, atol=1e-6)
    # dropout too has a second derivative: twice as large an input drops the same elements
    x = torch.randn(50, requires_grad=True)
    torch.manual_seed(5)
    (gradient,) = torch.autograd.grad(CheapDropout(0.5)(x).square().sum(), x, create_graph=True)
    gradient.sum().backward()
    assert set(x.grad.tolist()) == {0.0, 8.0}


def test_products_do_not_break_a_compiled_graph(batch, onednn):
    model = train_toys.toy_model(dropout=0.0).train()
    inputs = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
    expected = model(**inputs).logits
    use_cpu_kernels(model, is_half=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, expected)


def test_other_layers_and_precisions_are_left_to_torch(onednn, monkeypatch):
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(Own(3, 3), torch.nn.Linear(3, 3))
    use_onednn(model)
    assert [type(module) for module in model] == [Own, OneDnnLinear]
    x = torch.randn(2, 1, 3)
    expected = torch.nn.Linear.forward(model[1], x)
    torch.testing.assert_close(model[1](x), expected)
    # what is given may lie in memory in any way
    torch.testing.assert_close(model[1](x.expand(2, 5, 3)), expected.expand(2, 5, 3))
    torch.testing.assert_close(model[1](x[0, 0]), expected[0, 0])
    with Products() as products, torch.autocast("cpu", torch.bfloat16):
        assert model[1](x).dtype == torch.bfloat16
    assert model[1](x[:0]).shape == (0, 1, 3)
    with products:
        torch.testing.assert_close(model.eval()[1](x), expected)
        assert model.train().double()[1](x.double()).dtype == torch.float64
        # a kernel for small matrices would be made for longer than it is used
        monkeypatch.setattr(cpu_kernels, "SMALLEST_FOR_ONEDNN", 10)
        model.float()[1](x)
    assert products.numbers["_linear_pointwise"] == 0


@pytest.mark.parametrize(
    ("capability", "is_intel", "is_right", "expected"),
    [
        ("AVX512", False, True, True),
        ("AVX2", False, True, False),
        ("AVX512", True, True, False),
        ("AVX512", False, False, False),
    ],
)
def test_onednn_is_taken_where_it_is_the_faster_and_right(
    onednn, monkeypatch, capability, is_intel, is_right, expected
):
    right = cpu_kernels.onednn_product
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(cpu_kernels, "is_intel", lambda: is_intel)
    monkeypatch.setattr(cpu_kernels, "onednn_product", lambda *args: right(*args) + (not is_right))
    assert cpu_kernels.is_onednn_faster() is expected


def test_another_attention_that_was_asked_for_is_kept():
    model = train_toys.toy_model()
    use_cpu_kernels(model, is_half=False)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    use_cpu_kernels(model, is_half=True)
    assert model.config._attn_implementation == "eager"
