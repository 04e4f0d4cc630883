"""Kernels of the inference engine: products, top-k and exponentials equal plain torch."""

import copy
import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vanilla_transformer import kernels_vanilla_transformer as kernels


# about 2^16 scores, from which on they are divided into groups
@given(
    st.sampled_from([1, 15, 16, 17]), st.integers(1, 20), st.integers(-99, 99), st.integers(0, 999)
)
def test_the_largest_are_those_of_topk(rows, count, difference, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, 2**16 // rows + difference, generator=generator)
    expected = scores.topk(count, dim=1)
    values, indices = kernels.grouped_topk(scores, count)
    assert values.tolist() == expected.values.tolist()
    assert indices.tolist() == expected.indices.tolist()
    assert kernels.index_of_largest(scores).tolist() == expected.indices[:, 0].tolist()


# few scores, and enough to be divided into groups
@pytest.mark.parametrize("rows", [20, 60])
@pytest.mark.parametrize("positions", [(5000, 70), (64, 6000, 9999), (9998, 9999), (100, 101)])
def test_of_equal_scores_the_first_is_the_largest(rows, positions):
    for largest in (50.0, torch.inf, torch.nan):
        scores = torch.randn(rows, 10_000)
        scores[7, list(positions)] = largest
        found = kernels.index_of_largest(scores)
        assert found.tolist() == scores.argmax(dim=1).tolist()
        assert found[7] == min(positions)


@pytest.mark.parametrize("rows", [20, 60])
def test_the_first_of_scores_without_a_largest_is_taken(rows):
    scores = torch.randn(rows, 10_000)
    scores[8] = -torch.inf
    assert kernels.index_of_largest(scores).tolist() == scores.argmax(dim=1).tolist()


@pytest.mark.parametrize("shift", [0.0, 50.0, 500.0, -500.0])
def test_a_sum_of_exponentials_does_not_overflow(shift):
    logits = torch.randn(3, 50) + shift
    expected = logits.logsumexp(dim=1, keepdim=True)
    highest = logits.amax(dim=1, keepdim=True)
    torch.testing.assert_close(kernels.log_sum_exp_(logits, highest), expected)


def test_exponentials_are_those_of_the_math_module():
    exponents = [-math.inf, -120.0, -86.5, -20.25, -1.0, -1e-6, 0.0, 0.5, 20.25, 60.0]
    numbers = torch.tensor(exponents)
    found = kernels.exp_(numbers)
    assert found is numbers
    expected = torch.tensor([math.exp(exponent) for exponent in exponents])
    # a rounding error of an exponent of 60 changes the result by a factor of 60 / 2^24
    torch.testing.assert_close(found, expected, rtol=8e-6, atol=1e-38)


@pytest.mark.parametrize("num_rows", [1, 2, 31, 129, 300])
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("library", ["mkl", "onednn", None])
def test_a_product_is_that_of_the_layers_for_any_number_of_rows(
    monkeypatch, num_rows, library, is_large
):
    if library is not None and not kernels._is_available_and_correct(library):
        pytest.skip(f"this torch has no kernels of {library} for packed weights")
    monkeypatch.setattr(kernels, "packing_library", lambda: library)
    if is_large:
        monkeypatch.setattr(kernels, "MAX_PACKED_ELEMENTS", 40 * 70)
        monkeypatch.setattr(kernels, "_is_available_and_correct", lambda _: library == "onednn")
    for inputs, outputs, bias in ((40, 70, True), (600, 90, False)):
        layers = [torch.nn.Linear(inputs, outputs + more, bias=bias) for more in (0, 3)]
        x = torch.randn(num_rows, inputs)
        with torch.no_grad():
            expected = torch.cat([layer(x) for layer in layers], dim=1)
            found = kernels.PackedLinear(layers)(x)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            rectified = kernels.PackedLinear(layers[:1], then_relu=True)(x)
            torch.testing.assert_close(rectified, layers[0](x).relu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [3, 64, 77])
def test_few_rows_are_multiplied_in_parts_on_a_cpu_with_avx2(monkeypatch, outputs, dtype, is_large):
    if not kernels._is_available_and_correct("onednn"):
        pytest.skip("this torch has no kernels of oneDNN for packed weights")
    monkeypatch.setattr(kernels, "packing_library", lambda: "onednn")
    monkeypatch.setattr(kernels, "has_mkl_and_avx2", lambda: True)
    if is_large:
        monkeypatch.setattr(kernels, "MAX_PACKED_ELEMENTS", 1)
    in_parts = []
    product_in_parts = kernels.product_in_parts
    monkeypatch.setattr(
        kernels,
        "product_in_parts",
        lambda x, *given: in_parts.append(len(x)) or product_in_parts(x, *given),
    )
    layers = [torch.nn.Linear(40, outputs + more, bias=not more, dtype=dtype) for more in (0, 3)]
    with torch.no_grad():
        for used, then_relu in ((layers, False), (layers[:1], True), (layers[1:], True)):
            linear = kernels.PackedLinear(used, then_relu)
            for num_rows in (1, 4, 5):
                x = torch.randn(num_rows, 40)
                exact_layers = [copy.deepcopy(layer).float() for layer in used]
                expected = torch.cat([layer(x) for layer in exact_layers], dim=1)
                expected = expected.relu() if then_relu else expected
                torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)
    # weights of another dtype would need a second copy in float32
    assert set(in_parts) == ({1, 4} if dtype == torch.float32 else set())


@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 1024), (32, 2**20 + 1)])
def test_a_large_weight_is_read_from_its_layer(inputs, outputs):
    layers = [torch.nn.Linear(inputs, size) for size in (outputs, 8)]
    linear = kernels.PackedLinear(layers)
    x = torch.randn(3, inputs)
    with torch.no_grad():
        for layer in layers:
            layer.weight.data.normal_()
            layer.bias.data.normal_()
        expected = torch.cat([layer(x) for layer in layers], dim=1)
        torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="this torch has no kernels for packed weights"
)
def test_a_library_that_is_right_for_one_number_of_rows_is_not_used(monkeypatch):
    right = kernels.mkl_product

    def right_for_those_packed_for(x, *weights, **named):
        return right(x, *weights, **named) + (x.shape[0] != kernels.PACKED_ROWS)

    monkeypatch.setattr(kernels, "mkl_product", right_for_those_packed_for)
    monkeypatch.setattr(kernels, "is_intel", lambda: True)
    monkeypatch.setattr(
        kernels, "_is_available_and_correct", kernels._is_available_and_correct.__wrapped__
    )
    tried_anew = functools.cache(kernels.packing_library.__wrapped__)
    monkeypatch.setattr(kernels, "packing_library", tried_anew)
    layer, x = torch.nn.Linear(40, 70), torch.randn(3, 40)
    with torch.no_grad():
        torch.testing.assert_close(kernels.PackedLinear([layer])(x), layer(x))
    assert tried_anew() is None


@pytest.mark.parametrize(
    ("is_intel", "there", "chosen"),
    [
        (True, {"mkl", "onednn"}, "mkl"),
        (True, {"onednn"}, None),
        (False, {"mkl", "onednn"}, "onednn"),
        (False, {"mkl"}, "mkl"),
        (False, set(), None),
    ],
)
def test_the_packing_library_is_available_and_correct(monkeypatch, is_intel, there, chosen):
    monkeypatch.setattr(kernels, "is_intel", lambda: is_intel)
    monkeypatch.setattr(kernels, "_is_available_and_correct", there.__contains__)
    assert kernels.packing_library.__wrapped__() == chosen


def test_a_torch_without_these_kernels_multiplies_too(monkeypatch):
    def gone(*_, **__):
        raise AttributeError("no such operator")

    monkeypatch.setattr(kernels, "onednn_product", gone)
    monkeypatch.setattr(kernels, "mkl_product", gone)
    monkeypatch.setattr(
        kernels, "_is_available_and_correct", kernels._is_available_and_correct.__wrapped__
    )
    assert kernels.packing_library.__wrapped__() is None


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 kernels"
)
@pytest.mark.parametrize("num_rows", [1, 4, 80, 130])
@pytest.mark.parametrize("then_relu", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(30, 20), (1024, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bf16_product_is_the_product_of_the_rounded_numbers(
    num_rows, then_relu, inputs, outputs, dtype
):
    layers = [torch.nn.Linear(inputs, size).to(dtype) for size in (outputs, 7)]
    x = torch.randn(num_rows, inputs)
    found = kernels.Bf16Linear(layers, then_relu)(x)
    assert found.dtype == (torch.bfloat16 if then_relu else torch.float32)
    exact = torch.cat(
        [
            x.bfloat16().double() @ layer.weight.detach().bfloat16().double().T
            + layer.bias.detach().bfloat16().double()
            for layer in layers
        ],
        dim=1,
    )
    expected = exact.relu() if then_relu else exact
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("num_rows", [1, 4, 80])
@pytest.mark.parametrize("then_relu", [False, True])
def test_an_int8_product_is_the_product_of_the_rounded_numbers(num_rows, then_relu, monkeypatch):
    layers = [torch.nn.Linear(30, outputs) for outputs in (20, 7)]
    x = torch.randn(num_rows, 30)
    with torch.no_grad():
        plain = torch.cat([layer(x) for layer in layers], dim=1)
    linear = kernels.Int8Linear(layers, then_relu)
    # x is rounded as torch does it, the weights of each output by hand
    scale, zero = torch._choose_qparams_per_tensor(x, linear.uses_seven_bits)
    rounded = scale * ((x / scale).round() + zero).clamp(0, 255).sub(zero)
    expected = []
    for layer in layers:
        step = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        expected.append(rounded @ (step * (layer.weight.detach() / step).round()).T + layer.bias)
    expected = torch.cat(expected, dim=1).detach()
    if then_relu:
        plain, expected = plain.relu(), expected.relu()
    for few in (0, 2**19):
        monkeypatch.setattr(kernels, "FEW_OUTPUTS", few)
        found = linear(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found, plain, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("has_vnni", [False, True])
def test_few_rows_have_a_kernel_of_their_own_with_vnni(has_vnni, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_vnni)
    known = {*kernels.INT8_KERNELS} & {*torch.backends.quantized.supported_engines}
    linear = kernels.Int8Linear([torch.nn.Linear(8, 5)])
    assert linear.uses_seven_bits is not has_vnni
    assert len(linear.weights) == (max(1, len(known)) if has_vnni else 1)
    if not has_vnni:
        return
    monkeypatch.setattr(linear, "weights", ["few", "many"])
    monkeypatch.setattr(linear, "multiply", lambda x, weight, _: weight)
    monkeypatch.setattr(kernels, "FEW_OUTPUTS", 5 * 12)
    assert linear(torch.ones(12, 8)) == "few"
    assert linear(torch.ones(13, 8)) == "many"
