"""Table 1, section 4: cost of a layer, and path length between two positions."""

import json

import equations
import pytest
import torch

from vanilla_transformer.cli import main
from vanilla_transformer.paper import table1, table1_layers
from vanilla_transformer.paper.table1_layers import (
    KINDS,
    RECURRENT,
    chain_lengths,
    fused_self_attention,
    longest_chain,
    measure,
    path_lengths,
    restricted_self_attention,
    self_attention,
    slope,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(table1_layers, "MIN_RUNS", 1)
    monkeypatch.setattr(table1_layers, "MIN_SECONDS", 0.0)


def test_the_exponent_of_a_power_law_is_found():
    sizes = [3, 10, 40, 77]
    assert slope(sizes, [5 * size**1.7 for size in sizes]) == pytest.approx(1.7)
    assert slope(sizes, [8.0] * 4) == pytest.approx(0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_counted_flops_are_those_of_the_formula(kind):
    n, d, k, r = 24, 128, 5, 7
    written = KINDS[kind].flops.replace("^", "**").replace(" ", "*")
    expected = eval(written, {"n": n, "d": d, "k": k, "r": r})
    assert measure(kind, n, d, k, r, "cpu").flops == expected


def test_every_exponent_is_that_of_the_papers_formula():
    for kind in KINDS.values():
        names = {"n": 1, "d": 1, "k": 1, "r": 1}
        written = kind.complexity.replace("^", "**").replace(" ", "*")
        for letter, exponent in zip("nd", kind.exponents, strict=True):
            assert eval(written, {**names, letter: 2}) == 2**exponent


def test_equation_1_keeps_its_weights_and_the_fused_kernel_does_not():
    n, d, heads, size = 96, 128, 2, 4
    sequence = n * d * size
    saved_bytes = {kind: measure(kind, n, d, 3, 5, "cpu").saved_bytes for kind in KINDS}
    assert saved_bytes["self-attention"] == sequence + heads * n * n * size
    # the input, the output, and a sum for each query
    assert saved_bytes["self-attention, fused"] == 2 * sequence + heads * n * size
    # the input, and the input of the last product
    assert saved_bytes["projections"] == 2 * sequence


@pytest.mark.parametrize("width", [6, 128])
def test_restricted_attention_is_attention_that_hides_all_but_the_neighbours(width):
    x = torch.randn(1, 11, width, dtype=torch.float64)
    restricted = restricted_self_attention(x, 5)[0]
    heads = x[0].split(64, dim=-1)
    expected = [
        torch.tensor(
            equations.attention(*[head.tolist()] * 3, hidden=lambda q, k: abs(q - k) > 2),
            dtype=torch.float64,
        )
        for head in heads
    ]
    torch.testing.assert_close(restricted, torch.cat(expected, dim=-1))
    everything = restricted_self_attention(x, 2 * 11 + 1)
    torch.testing.assert_close(everything, self_attention(x))
    torch.testing.assert_close(fused_self_attention(x), self_attention(x))


def test_the_longest_chain_is_the_path_with_the_most_operations():
    x = torch.ones(2, requires_grad=True)
    assert longest_chain(x.exp()) == 1
    assert longest_chain(x.exp().sin().cos() + x.tan()) == 4
    state = x
    for _ in range(5000):
        state = state + 1
    assert longest_chain(state) == 5000


def test_only_a_recurrence_has_a_longer_chain_in_a_longer_sequence():
    short, middle, long = (chain_lengths(n, 3, 5) for n in (6, 9, 15))
    assert short.keys() == KINDS.keys()
    for kind in KINDS:
        if kind == RECURRENT:
            assert long[kind] - middle[kind] == 2 * (middle[kind] - short[kind]) > 0
        else:
            assert short[kind] == middle[kind] == long[kind]


@pytest.mark.parametrize(("kernel", "neighbourhood"), [(2, 3), (3, 9), (4, 5)])
@pytest.mark.parametrize("n", [2, 3, 9, 10, 17])
def test_a_path_length_measured_by_gradients_is_that_of_the_formula(n, kernel, neighbourhood):
    paths = path_lengths(n, kernel, neighbourhood)
    assert len(paths) == 5
    for kind, (measured, computed) in paths.items():
        assert measured == computed, kind
    assert paths["recurrent"][0] == n


def test_the_table_has_the_counts_beside_the_formula(tmp_path, monkeypatch, capsys):
    sizes = table1.Sizes((32, 64, 128), 64, (64, 128), 16)
    monkeypatch.setattr(table1, "DEFAULT_SIZES", sizes)
    monkeypatch.setattr(table1, "SHORT_LENGTHS", (4, 8))
    assert main(["paper", "table1", "--output_dir", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))["sections"]
    for name, letter in (("length", "n"), ("width", "d")):
        section = written[name]
        heads = section["columns"]
        formula, counted = heads.index(f"exponent of {letter}"), heads.index("of FLOPs")
        assert [row[0] for row in section["rows"]] == list(KINDS)
        for row in section["rows"]:
            assert row[counted] == pytest.approx(row[formula])
    ratios = {row[0]: row[2] for row in written["recurrence"]["rows"]}
    assert ratios[64] == pytest.approx(1)
    assert ratios[32] < ratios[64] < ratios[128]
    costs = written["length"]["costs"]
    for index, row in enumerate(written["recurrence"]["rows"]):
        seconds = {kind: own[index]["seconds"] for kind, own in costs.items()}
        assert row[3:] == [
            pytest.approx((seconds[kind] + seconds["projections"]) / seconds["recurrent"])
            for kind in ("self-attention", "self-attention, fused")
        ]
    assert "10 of 10 measured lengths are equal to the exact formula" in written["path"]["says"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--kernel", "1"], "kernel must be at least 2, got 1."),
        (["--neighbourhood", "4"], "neighbourhood must be odd and at least 3, got 4."),
    ],
)
def test_a_layer_without_neighbours_is_refused(flags, sentence, tmp_path, capsys):
    assert main(["paper", "table1", "--output_dir", str(tmp_path), *flags]) == 1
    assert sentence in capsys.readouterr().err
