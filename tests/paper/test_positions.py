"""Section 3.5: positional encoding, its properties, and attention with and without it."""

import argparse
import itertools
import json
import math
from dataclasses import replace

import equations
import numpy
import pytest
import torch

from vanilla_transformer import sinusoidal_encoding
from vanilla_transformer.cli import main
from vanilla_transformer.paper import positional_encoding as encodings
from vanilla_transformer.paper import positions
from vanilla_transformer.paper.order_task import (
    COPYING,
    WHO_CHASES_WHOM,
    chase_sentences,
    copying_losses,
    encode_in_two_orders,
    losses_by_position,
    small_model,
    split_name_pairs,
    who_chases_whom,
)
from vanilla_transformer.paper.positional_encoding import candidate_encoding
from vanilla_transformer.paper.positions import order, pictures, sinusoids

BASES = (10000.0, 100.0, 1.0, 7.5)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the sections of the study that do not train a model."""
    folder = tmp_path_factory.mktemp("positions")
    flags = ["--no_train", "--num_positions", "50", "--d_model", "32"]
    assert main(["paper", "positions", *flags, "--output_dir", str(folder)]) == 0
    content = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    page = (folder / "README.md").read_text(encoding="utf-8")
    for name in content["sections"]:
        assert (folder / f"{name}.png").is_file() == (f"({name}.png)" in page)
    return content["sections"]


def test_every_picture_has_a_title():
    parser = argparse.ArgumentParser()
    positions.add_flags(parser)
    flags = parser.parse_args(["--no_train", "--num_positions", "20", "--d_model", "16"])
    drawn = [one for one in positions.sections(flags) if one.figure is not None]
    titles = [section.message or section.figure.get_suptitle() for section in drawn]
    assert len(titles) == 13
    assert all(titles)
    assert "All properties hold for 8 pairs and sinusoidal" in titles


def test_the_worked_example_is_exact_to_two_decimals(written):
    river, bank = written["worked-example"]["rows"]
    assert river[2:] == ["0.00", "1.00", "0.00", "1.00", "0.00", "1.00"]
    assert bank[2:] == ["0.84", "0.54", "0.05", "1.00", "0.00", "1.00"]
    exact = [equations.positional_encoding(position, 6) for position in (0, 1)]
    torch.testing.assert_close(
        torch.tensor(written["worked-example"]["encoding"]), torch.tensor(exact)
    )


@pytest.mark.parametrize("base", BASES)
def test_sinusoids_are_those_of_the_paper_at_every_base(base):
    exact = [equations.positional_encoding(position, 8, base) for position in range(40)]
    found = candidate_encoding("sinusoidal", 40, 8, base)
    torch.testing.assert_close(found, torch.tensor(exact), rtol=0, atol=1e-6)


@pytest.mark.parametrize("base", BASES)
def test_a_pair_repeats_after_its_wavelength(base):
    lengths = encodings.wavelengths(10, base).tolist()
    assert lengths[0] == pytest.approx(2 * math.pi)
    assert lengths[-1] == pytest.approx(2 * math.pi * base ** (8 / 10))
    for pair, length in enumerate(lengths):
        for position in (0, 3):
            here = equations.positional_encoding(position, 10, base)
            there = equations.positional_encoding(position + length, 10, base)
            assert here[2 * pair : 2 * pair + 2] == pytest.approx(there[2 * pair : 2 * pair + 2])


def test_the_fraction_is_one_for_the_second_of_two_words_and_a_half_of_four():
    assert candidate_encoding("fraction", 2, 2)[1].item() == 1.0
    assert candidate_encoding("fraction", 4, 2)[1].item() == 0.5


def test_the_binary_code_is_the_binary_number():
    for position, bits in enumerate(candidate_encoding("binary", 37, 8).int().tolist()):
        assert "".join(map(str, reversed(bits))) == f"{position:08b}"
    # more bits than an int64 has
    assert candidate_encoding("binary", 5, 128).sum(dim=1).tolist() == [0, 1, 1, 2, 1]


def test_the_divisors_of_pairs_are_integers():
    found = candidate_encoding("pairs", 30, 6)
    exact = [
        [kind(position / divisor) for divisor in (1, 2, 3) for kind in (math.sin, math.cos)]
        for position in range(30)
    ]
    torch.testing.assert_close(found, torch.tensor(exact), rtol=0, atol=1e-6)
    torch.testing.assert_close(candidate_encoding("sine and cosine", 30, 6), found[:, :2])
    torch.testing.assert_close(candidate_encoding("sine", 30, 6), found[:, :1])


def test_a_learned_table_is_that_of_the_model(small_model):
    state = torch.get_rng_state()
    table = candidate_encoding("learned", 300, 40, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(table, candidate_encoding("learned", 300, 40, seed=3))
    assert not torch.equal(table, candidate_encoding("learned", 300, 40, seed=4))
    # initialized like the embeddings
    assert table.std().item() == pytest.approx(40**-0.5, rel=0.03)
    model = small_model(position_encoding="learned", max_position_embeddings=9)
    rows = model.model.encoder.positions.table.weight.detach()
    assert torch.equal(encodings.model_encoding(model, 20), rows)


def test_the_encoding_of_a_model_follows_its_settings(small_model):
    model = small_model(position_base=50.0, position_layout="halves", position_offset=2)
    expected = sinusoidal_encoding(9, 12, 50.0, "halves")[2:]
    torch.testing.assert_close(encodings.model_encoding(model, 7), expected)
    with pytest.raises(ValueError, match="got position_encoding 'none'"):
        encodings.model_encoding(small_model(position_encoding="none"), 7)


def test_words_are_scaled_as_the_model_scales_them(small_model):
    model = small_model()
    states = model.get_encoder()(torch.arange(3, 10)[None], output_hidden_states=True)
    embedded = states.hidden_states[0][0]
    scaled = encodings.word_embeddings(model)[3:10] + encodings.model_encoding(model, 7)
    torch.testing.assert_close(embedded, scaled)


def test_equal_positions_are_counted_as_by_hand():
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(12, 3, generator=generator)
    table[7], table[9], table[10] = table[2], table[2] + 0.01, table[4] - 0.01
    rows = table.tolist()
    apart = {
        (late, early): math.dist(rows[late], rows[early])
        for late in range(12)
        for early in range(late)
    }
    assert encodings.smallest_distance(table[:7]) == pytest.approx(
        min(distance for (late, _), distance in apart.items() if late < 7)
    )
    for tolerance in (0.0, 0.05, 1.0):
        near = sorted(pair for pair, distance in apart.items() if distance <= tolerance)
        assert encodings.collisions(table, tolerance) == len(near)
        assert encodings.first_repeat(table, tolerance) == near[0]
    assert encodings.first_repeat(table[:7], 0.05) is None
    similarity = encodings.cosine_similarity_matrix(table)
    for early, late in itertools.product(range(12), repeat=2):
        dot = sum(x * y for x, y in zip(rows[early], rows[late], strict=True))
        expected = dot / math.hypot(*rows[early]) / math.hypot(*rows[late])
        assert similarity[early, late].item() == pytest.approx(expected)


def test_base_1_repeats_after_seven_waves_and_the_base_of_the_paper_never():
    for base, repeat in ((1.0, (44, 0)), (100.0, None), (10000.0, None)):
        table = sinusoidal_encoding(64, 128, base)
        tolerance = 0.1 * encodings.median_step(table)
        assert encodings.first_repeat(table, tolerance) == repeat
        # pairs 44 apart: 0 and 44 to 19 and 63
        assert encodings.collisions(table, tolerance) == (20 if repeat else 0)


def test_similarity_reaches_farther_with_a_larger_base():
    reaches = [encodings.reach(128, base) for base in (1.0, 100.0, 10000.0)]
    assert reaches == sorted(reaches)
    assert len(set(reaches)) == 3
    for base, reach in zip((1.0, 100.0, 10000.0), reaches, strict=True):
        here, before, there = (
            equations.positional_encoding(position, 128, base) for position in (0, reach - 1, reach)
        )
        dot, dot_before = (
            sum(x * y for x, y in zip(here, other, strict=True)) for other in (there, before)
        )
        assert dot <= 0 < dot_before
    assert encodings.reach(128, 10000.0, farthest=100) is None


@pytest.mark.parametrize("offset", [-7, -1, 0, 1, 30])
@pytest.mark.parametrize("base", BASES)
def test_one_matrix_moves_every_position(offset, base):
    matrix = encodings.offset_map(offset, 6, base)
    for position in (7, 8, 50):
        here = equations.positional_encoding(position, 6, base)
        there = equations.positional_encoding(position + offset, 6, base)
        moved = equations.matmul(matrix.tolist(), equations.transpose([here]))
        assert [row[0] for row in moved] == pytest.approx(there, abs=1e-9)


def test_offsets_add_up_and_are_inverted_by_the_transpose():
    one, two, back = (encodings.offset_map(k, 10) for k in (1, 2, -1))
    torch.testing.assert_close(one @ one, two)
    torch.testing.assert_close(back @ one, torch.eye(10, dtype=torch.float64))
    assert torch.equal(back, one.T)
    assert not torch.allclose(back, one)


def test_the_dot_product_depends_only_on_the_distance():
    found = encodings.dot_product_by_offset([-9, 0, 4, 9], 12, 300.0).tolist()
    assert found[0] == pytest.approx(found[3])
    assert found[1] == pytest.approx(6)
    for position in (9, 10, 77):
        here = equations.positional_encoding(position, 12, 300.0)
        for offset, dot in zip((-9, 0, 4, 9), found, strict=True):
            there = equations.positional_encoding(position + offset, 12, 300.0)
            assert sum(x * y for x, y in zip(here, there, strict=True)) == pytest.approx(dot)


def test_a_rotated_query_attends_k_positions_later(written):
    assert [row[:2] for row in written["direction"]["rows"]] == [[-5, 20], [0, 25], [5, 30]]


@pytest.mark.parametrize("num_positions", [3, 4, 8, 9])
def test_a_short_sentence_has_a_score_in_every_column(num_positions):
    section = positions.direction(num_positions, 16, 10000.0)
    (_, here, turned), k = section.rows, section.rows[2][0]
    assert here[1] + k == turned[1] <= num_positions - 1
    assert list(section.columns[2:]) == [
        f"score at {here[1] - k}",
        *(f"at {here[1] + j}" for j in (0, k)),
    ]
    # rotated by M_k, the position k later has the score that the position itself had
    assert turned[4] == pytest.approx(here[3])


def test_repeats_and_variation_at_one_distance_are_measured(monkeypatch):
    finding = positions.bases(64, 2, [10000.0, 100.0]).finding
    repeats = [f"{base} (position 44, same as 0)" for base in ("10,000", "100")]
    assert f"With base {' and '.join(repeats)}, positions repeat." in finding
    assert "positions are different" not in finding
    section = positions.bases(64, 16, [10000.0])
    assert "With base 10,000, all 64 positions are different." in section.finding
    assert section.rows[0][-1] < 1e-6
    # its similarity matrix is symmetric too
    table = candidate_encoding("learned", 64, 16)
    monkeypatch.setattr(sinusoids, "sinusoidal_encoding", lambda *sizes: table)
    assert positions.bases(64, 16, [10000.0]).rows[0][-1] > 0.5


def test_slow_pairs_are_mentioned_only_if_there_are_any():
    assert "change slowly: 47 of the 64 pairs" in positions.table(64, 128, 1e4).finding
    for num_positions, base, count in ((64, 1.0, 64), (4, 1e4, 0), (4, 1.0, 0), (4, 0.1, 51)):
        finding = positions.table(num_positions, 128, base).finding
        assert "slow" not in finding
        assert finding.endswith(
            f"{count} of the 64 pairs complete a wave within {num_positions} positions."
        )


def test_equal_wavelengths_are_not_called_a_progression():
    finding = positions.waves(64, 128, 1e4).finding
    assert "from 2 pi = 6.283 to 54,410 positions" in finding
    assert "= 62,832, the end of the progression in the paper, would be" in finding
    finding = positions.waves(64, 128, 1.0).finding
    assert finding == "Every pair has the wavelength 2 pi = 6.283 positions."
    finding = positions.waves(64, 128, 2.0).finding
    assert "6.283 to 12.43 positions" in finding
    assert "2 * 2 pi = 12.57 would be the wavelength of the next pair" in finding


def test_a_similarity_that_stays_positive_has_no_zero(monkeypatch):
    monkeypatch.setattr(sinusoids, "FARTHEST_DISTANCE", 2000)
    ends = "reaches zero at distance 1,707 (base 10,000); beyond this distance"
    stays = "With base 1e+06 it is positive up to distance 2,000."
    for bases, said in (([1e4], (1, 0)), ([1e6], (0, 1)), ([1e4, 1e6], (1, 1))):
        finding = positions.reaches(128, bases).finding
        assert (ends in finding, stays in finding, "reaches zero" in finding) == (
            said[0],
            said[1],
            said[0],
        )


def test_only_the_base_of_the_paper_is_called_so(written):
    assert "geometric wavelengths of the paper need 3 pairs." in written["pairs"]["says"]
    finding = positions.more_pairs(1.0).finding
    assert finding.endswith("the geometric wavelengths with base 1 need more than 8 pairs.")


def test_a_dot_product_that_does_not_fall_is_the_same_in_both_directions():
    section = positions.dot_products(64, 16, 1.0)
    products = [row[1] for row in section.rows]
    assert products != sorted(products, reverse=True)
    assert "falls" not in section.finding
    assert "the same in both directions" in section.finding


@pytest.mark.parametrize(
    ("d_model", "base", "said"),
    [
        (128, 1e4, "the frequency halves every 4.8 pairs, so each bit has several waves."),
        (16, 1e4, "the frequency halves every 0.6 pairs."),
        (128, 1.0, "no pair has half the frequency of the first."),
        (128, 1.5, "no pair has half the frequency of the first."),
        (128, 0.5, "no pair has half the frequency of the first."),
    ],
)
def test_several_waves_per_bit_are_mentioned_only_if_there_are_any(d_model, base, said):
    assert positions.binary(d_model, base).finding.endswith(f"with base {base:,g}, {said}")


def test_the_best_matrix_of_an_offset_is_found():
    angles = torch.arange(60)[:, None] * torch.tensor([0.3, 1.1])
    turning = torch.cat((angles.sin(), angles.cos()), dim=1)
    assert encodings.linear_map_residual(turning, 3) < 1e-5
    noise = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    assert encodings.linear_map_residual(noise, 3) > 0.5


def test_every_simple_candidate_fails_for_its_own_reason():
    failures = {
        "integer": {"bounded", "extends", "linear offset"},
        "fraction": {"same step", "extends", "linear offset"},
        "sine": {"unique", "smooth", "linear offset"},
        "sine and cosine": {"unique"},
        "pairs": {"unique"},
        "binary": {"smooth", "linear offset"},
        "sinusoidal": set(),
        "learned": {"deterministic", "smooth", "extends", "linear offset"},
    }
    assert list(failures) == list(encodings.CANDIDATES)
    for name, expected in failures.items():
        width = {"pairs": 4, "binary": 16}.get(name, 64)
        found = encodings.properties(name, 256, width)
        assert list(found) == list(encodings.PROPERTIES)
        assert {rule for rule, one in found.items() if not one.holds} == expected, name


def test_the_study_names_the_candidates_with_all_properties(written):
    finding = written["properties"]["says"]
    assert finding.startswith("16 pairs and sinusoidal have all properties over 512 positions.")
    rows = {row[0]: row[1:] for row in written["properties"]["rows"]}
    assert [one[:3] for one in rows["2 pairs"]].count("no:") == 1
    fraction = written["properties"]["rows"][1]
    assert fraction[4] == "no: 0.5, 0.25, 0.0156"


def test_more_waves_repeat_later(written):
    rows = written["pairs"]["rows"]
    assert [row[0] for row in rows] == list(range(1, 9))
    assert rows[0] == [1, 44, 44]
    # 7 * 4 pi is nearly 88, 10 * 12 pi nearly 377
    assert [row[1] for row in rows[1:3]] == [88, 377]
    assert rows[2][2] is None
    # with 6 pairs still 377
    assert [row[1] for row in rows[5:]] == [377, None, None]
    assert "pos / 3) need 7 pairs, and" in written["pairs"]["says"]


def test_bits_change_half_as_often_from_one_to_the_next():
    bits = encodings.position_bits(2**6 + 1, 7)
    # the last step sets the highest bit and clears all others
    assert encodings.flip_rates(bits > 0).tolist() == [2.0**-bit for bit in range(7)]
    # a sine changes its sign twice per wave
    halving = encodings.flip_rates(sinusoidal_encoding(4001, 8, 2.0**4) >= 0)[::2]
    expected = [2.0**-pair / math.pi for pair in range(4)]
    assert halving.tolist() == pytest.approx(expected, rel=0.01)


def test_a_sine_of_zero_counts_as_positive():
    section = positions.binary(16, 10000.0)
    changes = [256 * row[4] for row in section.rows]
    assert changes == [math.floor(256 / math.pi / 2**pair) for pair in range(5)]
    assert [row[2] for row in section.rows] == [2.0**-bit for bit in range(5)]
    for axes, row in zip(section.figure.axes, section.rows, strict=False):
        (bits,), wave = axes.images, axes.lines[0]
        values = numpy.interp(range(32), wave.get_xdata(), wave.get_ydata())
        # each bit is drawn above a wave of its period
        assert (values > 0).tolist() == (bits.get_array()[0] > 0).tolist()
        assert f"wave of period {row[1]:g}" in axes.get_yticklabels()[0].get_text()


def test_the_angle_of_subspaces_is_measured():
    generator = torch.Generator().manual_seed(0)
    words = torch.zeros(50, 6)
    words[:, :2] = torch.randn(50, 2, generator=generator)
    angle = math.radians(30)
    turned = torch.eye(6)
    turned[0, 0] = turned[3, 3] = math.cos(angle)
    turned[0, 3], turned[3, 0] = math.sin(angle), -math.sin(angle)
    found = encodings.overlap(words, words @ turned, 2)
    assert found.smallest_angle == pytest.approx(0, abs=1e-4)
    assert found.mean_angle == pytest.approx(15, abs=1e-4)
    apart = encodings.overlap(words, words.roll(2, dims=1), 2)
    assert (apart.word_energy, apart.position_energy) == pytest.approx((0, 0), abs=1e-12)
    assert (apart.smallest_angle, apart.mean_cosine) == pytest.approx((90, 0), abs=1e-4)
    same = encodings.overlap(words, 3 * words, 2)
    assert same.word_energy == pytest.approx(1)
    assert same.position_to_word == pytest.approx(9)
    assert encodings.num_directions_for(words, 0.999) == 2
    with pytest.raises(ValueError, match="between 1 and 6, got 7"):
        encodings.overlap(words, words, 7)


def test_wider_embeddings_are_closer_to_orthogonal_to_the_positions(written):
    columns = written["addition"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in written["addition"]["rows"]]
    for row in rows:
        assert row["energy of words along positions"] == pytest.approx(row["k / d_model"], rel=0.1)
        # for random directions the mean of |cosine| is about sqrt(2 / (pi d))
        expected = math.sqrt(2 / math.pi / row["d_model"])
        assert row["mean |cosine|"] == pytest.approx(expected, rel=0.05)
    angles = [row["mean principal angle"] for row in rows]
    assert angles == sorted(angles)


def test_concatenation_is_counted_as_by_hand():
    for extra in (0, 64):
        width, inner, d_ff, tokens = 512 + extra, 512, 2048, 32
        attention = 4 * width * inner
        feed_forward = 2 * width * d_ff
        matrices = 6 * (attention + feed_forward) + 6 * (2 * attention + feed_forward)
        others = 12 * (d_ff + width) + (2 + 3) * 6 * 2 * width
        cost = encodings.concatenation_cost(extra)
        assert cost.parameters == matrices + others
        # Q K^T and the weighted sums of values, in eighteen attention sub-layers
        scores = 18 * 2 * tokens * tokens * inner
        assert cost.flops == 2 * (matrices * tokens + scores)


def test_the_words_of_a_trained_model_are_compared_with_its_own_positions(small_model):
    section = positions.trained_addition(small_model(), 10, 0)
    assert [row[0] for row in section.rows] == ["trained", "random"]
    assert "23 word embeddings" in section.finding
    with pytest.raises(ValueError, match="got position_encoding 'none'"):
        positions.trained_addition(small_model(position_encoding="none"), 10, 0)


@pytest.mark.parametrize("order", [[2, 1, 0], [3, 0, 4, 1, 2, 5]])
def test_without_positions_the_order_of_words_cannot_be_seen(small_model, order):
    tokens = list(range(5, 5 + len(order)))
    differences = {}
    for name in ("none", "sinusoidal", "learned"):
        encoder = small_model(position_encoding=name).get_encoder()
        plain, moved = encode_in_two_orders(encoder, tokens, order)
        differences[name] = (plain - moved).abs().max().item()
        # the vectors of the second sentence are returned in the order of the first
        alone = encoder(torch.tensor([[tokens[index] for index in order]])).last_hidden_state[0]
        torch.testing.assert_close(moved[order], alone, rtol=1e-5, atol=1e-6)
    assert differences["none"] < 1e-5
    assert min(differences["sinusoidal"], differences["learned"]) > 0.01


def test_the_study_shows_the_two_orders(written):
    rows = {row[0]: row[1:] for row in written["two-orders"]["rows"]}
    assert max(rows["none"]) < 1e-5
    assert min(rows["sinusoidal"]) > 0.01


def test_a_test_pair_is_not_a_training_pair_in_either_order():
    trained, unseen = (set(map(tuple, part.tolist())) for part in split_name_pairs(9, seed=2))
    assert not trained & unseen
    assert {pair[::-1] for pair in unseen} == unseen
    assert len(trained) + len(unseen) == 9 * 8
    source, target = chase_sentences(torch.tensor([[6, 8]]))
    assert source.tolist() == [[6, 3, 8]]
    assert target.tolist() == [[8, 4, 6]]


def test_a_model_without_positions_guesses_the_order():
    training = replace(WHO_CHASES_WHOM, steps=80, sentences_per_step=32)
    assert who_chases_whom("sinusoidal", training=training, num_names=8).accuracy > 0.9
    assert who_chases_whom("none", training=training, num_names=8).accuracy <= 0.5


def test_learned_positions_fail_beyond_the_trained_length():
    training = replace(COPYING, d_model=32, steps=150, warmup_steps=50)
    usual, longer = copying_losses("learned", 0, training, 4, 8, num_symbols=8)
    assert (len(usual), len(longer)) == (4, 8)
    assert usual.mean() < 0.3 * math.log(8)
    assert longer[4:].mean() > math.log(8)


def test_the_loss_by_position_is_cross_entropy():
    source, target = torch.randint(3, 8, (2, 20, 6), generator=torch.Generator().manual_seed(1))
    model = small_model("sinusoidal", 8, 6, COPYING, seed=1).eval().cpu()
    before = torch.cat((torch.ones(20, 1, dtype=torch.long), target[:, :-1]), dim=1)
    with torch.no_grad():
        logits = model(input_ids=source, decoder_input_ids=before).logits
    for position, loss in enumerate(losses_by_position(model, source, target).tolist()):
        exact = [
            -equations.log_softmax(row)[symbol]
            for row, symbol in zip(
                logits[:, position].tolist(), target[:, position].tolist(), strict=True
            )
        ]
        assert loss == pytest.approx(sum(exact) / 20, rel=1e-4)


def test_features_that_leave_their_range_are_counted():
    table = torch.tensor([[0.0, 1, 5], [1, 0, 6], [0.5, 2, 5], [0.2, 0, 5.5]])
    assert encodings.share_of_new_values(table, 2) == pytest.approx(1 / 3)
    assert encodings.share_of_new_values(table, 2, margin=0.9) == pytest.approx(1 / 3)
    assert encodings.share_of_new_values(table, 2, margin=1.1) == 0


def test_a_band_shows_where_the_dot_product_depends_on_the_position():
    def width_of_band(table):
        (axes,) = pictures.draw_dot_product(table).axes
        extents = axes.collections[0].get_paths()[0].vertices
        at_10 = extents[extents[:, 0] == 10][:, 1]
        return at_10.max() - at_10.min()

    assert width_of_band(sinusoidal_encoding(30, 16)) < 1e-5
    assert width_of_band(candidate_encoding("integer", 30, 16)) > 10


def test_the_sections_that_train_report_accuracies_and_losses(written, monkeypatch):
    assert not {"order-task", "length"} & set(written)
    monkeypatch.setattr(order, "WHO_CHASES_WHOM", replace(WHO_CHASES_WHOM, steps=1))
    monkeypatch.setattr(order, "COPYING", replace(COPYING, steps=1))
    section = positions.order_accuracies(seed=5)
    assert list(section.columns) == ["positions", "seed 5", "seed 6", "seed 7", "mean"]
    assert [row[0] for row in section.rows] == ["sinusoidal", "learned", "none"]
    section = positions.length_extrapolation(seed=5)
    for name, usual, within, first, past in section.rows:
        losses = {
            kind: [sum(values) / 2 for values in zip(*curves[name], strict=True)]
            for kind, curves in section.numbers["losses"].items()
        }
        assert usual == pytest.approx(sum(losses["usual"]) / 12)
        assert within == pytest.approx(sum(losses["longer"][:12]) / 12)
        assert first == pytest.approx(losses["longer"][12])
        assert past == pytest.approx(sum(losses["longer"][12:]) / 12)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--d_model", "7"], "d_model must be even, for sin/cos pairs, and positive, got 7."),
        (["--base", "100", "0"], "base must be positive, got 0.0."),
        (["--base", "100", "nan"], "base must be finite, got nan."),
        (["--base", "inf"], "base must be finite, got inf."),
        (["--num_positions", "2"], "num_positions must be between 3 and 4096, got 2."),
        (["--num_positions", "70000"], "num_positions must be between 3 and 4096, got 70000."),
        (["--d_model", "4098"], "d_model must be at most 4096, got 4098."),
        (["--model", "runs/demo"], "`make demo` trains one"),
        (["--model", "nowhere/at/all"], "run must be a run folder"),
    ],
)
def test_bad_input_is_one_sentence(flags, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["paper", "positions", *flags, "--output_dir", str(tmp_path / "out")]) == 1
    assert sentence in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))


def test_a_model_without_positions_is_refused_before_anything_is_shown(
    small_model, monkeypatch, capsys, tmp_path
):
    model = small_model(position_encoding="none")
    monkeypatch.setattr(positions, "load_trained", lambda *given: (model, None))
    command = ["paper", "positions", "--no_train", "--model", "x", "--output_dir", str(tmp_path)]
    assert main(command) == 1
    shown = capsys.readouterr()
    assert "got position_encoding 'none'" in shown.err
    assert not shown.out


def test_a_table_with_two_features_is_one_wave():
    section = positions.waves(5, 2, 10000.0)
    assert [row[0] for row in section.rows] == [0]
    (axes,) = section.figure.axes
    assert "6.3" in axes.get_title(loc="left")


def test_an_invalid_encoding_is_refused():
    with pytest.raises(ValueError, match=r"got 'sinusoid'\. Did you mean 'sinusoidal'"):
        candidate_encoding("sinusoid", 8, 4)
    with pytest.raises(ValueError, match=r"at most 2\^4 for 4 bits, got 17"):
        candidate_encoding("binary", 17, 4)
    with pytest.raises(ValueError, match="at least 64, got 20"):
        encodings.properties("sine", 20, 4)
