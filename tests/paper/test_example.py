"""`vanilla-transformer paper example`: figure 1 by hand, against the equations in plain Python."""

import json
import math
import re

import equations
import pytest
import torch
from document_blocks import ROOT

from vanilla_transformer.cli import main
from vanilla_transformer.paper.example import (
    D_MODEL,
    NUM_HEADS,
    SOURCE,
    TARGET,
    TOKENS,
    boxes,
    example_model,
    number,
    show,
    token_ids,
)
from vanilla_transformer.paper.example_picture import draw, draw_steps

KEPT = ROOT / "results" / "paper" / "example" / "study.json"
PICTURES = ROOT / "docs" / "pictures" / "example"


@pytest.fixture(scope="module")
def found():
    """Return the matrices of each box by their symbols, as nested lists."""
    return {
        name: {matrix.name: matrix.values.tolist() for matrix in box.matrices}
        for name, box in boxes().items()
    }


def same(found, expected):
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5, msg=str(expected)
    )


def test_the_whole_model_is_figure_1_in_plain_python(found):
    model = example_model()
    weights = {name: weight.tolist() for name, weight in model.state_dict().items()}
    source, target = (ids[0].tolist() for ids in token_ids())
    same(found["linear"]["logits"], equations.logits(source, target, weights, 1, NUM_HEADS))
    same(found["encoder norm 2"]["x"], equations.encode(source, weights, 1, NUM_HEADS))


@pytest.mark.parametrize(("stack", "words"), [("encoder", SOURCE), ("decoder", TARGET)])
def test_the_input_is_the_scaled_embedding_and_the_position(found, stack, words):
    box = found[f"{stack} input"]
    table = found["linear"]["E"]
    same(box["E"], [table[TOKENS.index(word)] for word in words])
    same(box["PE"], [equations.positional_encoding(pos, D_MODEL) for pos in range(3)])
    scaled = [[math.sqrt(D_MODEL) * value for value in row] for row in box["E"]]
    same(box["x"], equations.add(scaled, box["PE"]))


@pytest.mark.parametrize(
    ("name", "before", "memory"),
    [
        ("encoder self-attention", "encoder input", "encoder input"),
        ("decoder self-attention", "decoder input", "decoder input"),
        ("decoder cross-attention", "decoder norm 1", "encoder norm 2"),
    ],
)
def test_each_matrix_of_attention_follows_from_those_before_it(found, name, before, memory):
    box = found[name]
    for symbol, source in (("Q", before), ("K", memory), ("V", memory)):
        same(box[symbol], equations.matmul(found[source]["x"], box[f"W^{symbol}"]))
    heads = []
    for head in (1, 2):
        columns = slice(2 * head - 2, 2 * head)
        query, key, value = ([row[columns] for row in box[symbol]] for symbol in "QKV")
        scores = equations.matmul(query, equations.transpose(key))
        for row, values in enumerate(scores):
            for column, score in enumerate(values):
                hidden = name == "decoder self-attention" and column > row
                values[column] = -math.inf if hidden else score / math.sqrt(2)
        same(box[f"scores {head}"], scores)
        same(box[f"weights {head}"], [equations.softmax(row) for row in scores])
        heads.append(equations.matmul(box[f"weights {head}"], value))
    same(box["heads"], [[*one, *two] for one, two in zip(*heads, strict=True)])
    same(box["output"], equations.matmul(box["heads"], box["W^O"]))


@pytest.mark.parametrize(
    ("norm", "before", "sublayer"),
    [
        ("encoder norm 1", "encoder input", "encoder self-attention"),
        ("encoder norm 2", "encoder norm 1", "encoder feed-forward"),
        ("decoder norm 1", "decoder input", "decoder self-attention"),
        ("decoder norm 2", "decoder norm 1", "decoder cross-attention"),
        ("decoder norm 3", "decoder norm 2", "decoder feed-forward"),
    ],
)
def test_add_and_norm_takes_the_input_and_the_output_of_the_sublayer(found, norm, before, sublayer):
    box = found[norm]
    same(box["x + output"], equations.add(found[before]["x"], found[sublayer]["output"]))
    plain = {"norm.weight": [1.0] * D_MODEL, "norm.bias": [0.0] * D_MODEL}
    same(box["x"], equations.layer_norm(box["x + output"], plain, "norm"))


@pytest.mark.parametrize(
    ("name", "before"),
    [("encoder feed-forward", "encoder norm 1"), ("decoder feed-forward", "decoder norm 2")],
)
def test_feed_forward_is_equation_2(found, name, before):
    box = found[name]
    inner = equations.matmul(found[before]["x"], box["W_1"])
    inner = [[max(0.0, a + b) for a, b in zip(row, *box["b_1"], strict=True)] for row in inner]
    same(box["inner"], inner)
    output = equations.matmul(box["inner"], box["W_2"])
    same(box["output"], equations.add(output, box["b_2"] * 3))


def test_the_most_probable_words_are_the_translation(found):
    probabilities = found["softmax"]["P"]
    same(probabilities, [equations.softmax(row) for row in found["linear"]["logits"]])
    best = [TOKENS[row.index(max(row))] for row in probabilities]
    assert best == ["die", "Katze", "schläft"]
    # the decoder reads each predicted word next
    assert list(TARGET[1:]) == best[:-1]


def test_the_weights_have_one_decimal():
    weights = [matrix for box in boxes().values() for matrix in box.matrices if matrix.is_weight]
    assert len(weights) == 3 * 4 + 2 * 4 + 1
    for matrix in weights:
        assert torch.equal((matrix.values * 10).round() / 10, matrix.values)


def test_the_kept_study_and_its_picture_have_these_numbers(found, tmp_path):
    assert main(["paper", "example", "--output_dir", str(tmp_path)]) == 0
    kept = json.loads(KEPT.read_text(encoding="utf-8"))["sections"]
    written = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))["sections"]
    names = ["figure-1", *(name.replace(" ", "-") for name in found), "steps"]
    assert list(kept) == list(written) == names
    for name, section in written.items():
        assert section["rows"] == kept[name]["rows"]
        assert section["says"] == kept[name]["says"]
    for name, drawn in (("figure-1.svg", draw(boxes())), ("steps.svg", draw_steps())):
        assert (PICTURES / name).read_text(encoding="utf-8") == drawn
        assert (tmp_path / name).read_text(encoding="utf-8") == drawn


def test_the_picture_has_every_number_of_every_matrix():
    drawn = draw(boxes())
    texts = [
        text.replace("\u2212", "-").replace("\u221e", "inf")
        for text in re.findall(r">([^<]*)</text>", drawn)
    ]
    for box in boxes().values():
        for matrix in box.matrices:
            for value in matrix.values.flatten().tolist():
                expected = f"{value:z.1f}" if matrix.is_weight else number(value)
                # each number of the picture is used once
                texts.remove(expected)
    assert not [text for text in texts if re.fullmatch(r"-?(\d+\.\d+|inf)", text)]


def test_only_the_decoder_in_training_computes_all_states_in_one_step():
    panels = re.findall(r"<g>(.*?)</g>", draw_steps(), re.DOTALL)
    shown = {
        re.search(r">([^<]*)</text>", panel)[1].split(":")[0]: (
            re.findall(r">(\d)</text>", panel),
            panel.count("stroke-dasharray"),
        )
        for panel in panels
    }
    in_turn = ["1", "2", "3", "4"]
    assert shown == {
        "RNN, training": (in_turn, 0),
        "Decoder, training": (["1"] * 4, 0),
        "RNN, inference": (in_turn, 3),
        "Decoder, inference": (in_turn, 3),
    }


def test_an_unknown_box_is_named_with_the_closest_one():
    assert show("linear").startswith("E ")
    with pytest.raises(ValueError, match=r"got 'encoder imput'\. Did you mean 'encoder input'"):
        show("encoder imput")
