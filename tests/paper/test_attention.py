"""Sections 3.2 and 4: attention weights of the model, alignments and statistics of heads."""

import argparse
import io
import json
import math

import equations
import pytest
import torch
import train_toys
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.attention_maps import (
    SPACE,
    AttentionWeights,
    Word,
    attention_weights,
    words_of,
)
from vanilla_transformer.cli import main
from vanilla_transformer.drawing import new_figure
from vanilla_transformer.modeling_vanilla_transformer import eager_attention
from vanilla_transformer.paper.attention import add_flags, sections
from vanilla_transformer.paper.attention.alignment import align, count_aligned_to_themselves
from vanilla_transformer.paper.attention.head_tasks import KEY_KINDS, head_statistics
from vanilla_transformer.paper.attention.inside_head import inside_head
from vanilla_transformer.paper.attention.one_sentence import word_section
from vanilla_transformer.paper.attention.pictures import draw_grid, draw_matrix


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer of single bytes."""
    return VanillaTransformerTokenizer()


@pytest.fixture
def model(tokenizer):
    return train_toys.toy_model(
        vocab_size=len(tokenizer),
        encoder_layers=2,
        decoder_layers=3,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
    )


def test_the_weights_are_those_of_a_registered_attention_function(model, tokenizer):
    def even(module, query, key, value, attention_mask, **kwargs):
        return eager_attention(module, 0 * query, key, value, attention_mask)

    def silent(module, query, key, value, attention_mask, **kwargs):
        return even(module, query, key, value, attention_mask)[0], None

    for name, function in (("even", even), ("silent", silent)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, eager_mask)
    model.set_attn_implementation("even")
    weights = attention_weights(model, tokenizer, "ab", "cd").cross
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / weights.shape[-1]))
    model.set_attn_implementation("silent")
    with pytest.raises(ValueError, match="'silent' must return its weights, got None"):
        attention_weights(model, tokenizer, "ab", "cd")


def planted(encoder=None, decoder=None, cross=None, source="a b c </s>", target="x y </s>"):
    """Return weights of one layer from lists of heads; by default uniform weights."""
    source, target = source.split(), target.split()
    inputs = ["<s>", *target[:-1]]
    causal = torch.ones(len(inputs), len(inputs)).tril()
    kinds = {
        "encoder": torch.ones(1, len(source), len(source)) / len(source),
        "decoder": (causal / causal.sum(dim=-1, keepdim=True))[None],
        "cross": torch.ones(1, len(target), len(source)) / len(source),
    }
    given = {"encoder": encoder, "decoder": decoder, "cross": cross}
    for name, heads in given.items():
        if heads is not None:
            kinds[name] = torch.tensor(heads)
    return AttentionWeights(
        source=source,
        inputs=inputs,
        target=target,
        source_words=[Word(text, [i]) for i, text in enumerate(source)],
        target_words=[Word(text, [i]) for i, text in enumerate(target)],
        translation=" ".join(target[:-1]),
        **{name: heads[None] for name, heads in kinds.items()},
    )


def shifted(size, step):
    """Return a head that attends `step` positions later, or to the end if there is none."""
    return [
        [float(k == (q + step if 0 <= q + step < size else size - 1)) for k in range(size)]
        for q in range(size)
    ]


def test_the_weights_are_equation_1_without_the_values(model, tokenizer):
    source = "ab c"
    found = attention_weights(model, tokenizer, source, "d")
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    x = equations.embed(tokenizer(source).input_ids, weights)
    name = "model.encoder.layers.0.self_attention"
    query, key = (equations.linear(x, weights, f"{name}.{part}_proj") for part in "qk")
    d_k = len(query[0]) // 2
    for head in range(2):
        columns = slice(head * d_k, (head + 1) * d_k)
        scores = equations.matmul(
            [row[columns] for row in query], equations.transpose([row[columns] for row in key])
        )
        expected = [equations.softmax([x / math.sqrt(d_k) for x in row]) for row in scores]
        torch.testing.assert_close(
            found.encoder[0, head], torch.tensor(expected), rtol=1e-5, atol=1e-6
        )


class Reordered(VanillaTransformerForConditionalGeneration):
    def forward(self, attention_mask=None, input_ids=None, **inputs):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **inputs)


def test_a_forward_may_have_its_arguments_in_another_order(model, tokenizer):
    expected = attention_weights(model, tokenizer, "abc", "de")
    model.__class__ = Reordered
    found = attention_weights(model, tokenizer, "abc", "de")
    assert torch.equal(found.encoder, expected.encoder)
    assert torch.equal(found.cross, expected.cross)


def test_a_target_may_be_a_text_or_its_tokens(model, tokenizer):
    by_text = attention_weights(model, tokenizer, "abc", "de")
    ids = torch.tensor(tokenizer("de").input_ids)
    by_tokens = attention_weights(model, tokenizer, "abc", ids)
    assert by_tokens.target == by_text.target == [SPACE, "d", "e", "</s>"]
    assert torch.equal(by_tokens.decoder, by_text.decoder)
    assert torch.equal(by_tokens.cross, by_text.cross)


def test_there_is_a_weight_for_each_layer_head_query_and_key(model, tokenizer):
    found = attention_weights(model, tokenizer, "abc", "de")
    # this tokenizer adds a token for the space before a sentence
    assert found.source == [SPACE, "a", "b", "c", "</s>"]
    # each row is labelled with the token that it predicts
    assert found.inputs == ["<s>", SPACE, "d", "e"]
    assert found.target == [SPACE, "d", "e", "</s>"]
    assert found.encoder.shape == (2, 2, 5, 5)
    assert found.decoder.shape == (3, 2, 4, 4)
    assert found.cross.shape == (3, 2, 4, 5)
    for values in (found.encoder, found.decoder, found.cross):
        torch.testing.assert_close(values.sum(dim=-1), torch.ones(values.shape[:-1]))
    assert found.decoder[..., found.hidden()].eq(0).all()
    assert found.decoder[..., ~found.hidden()].gt(0).all()


def test_reading_the_weights_does_not_change_the_model(model, tokenizer):
    model.train()
    before = model.config._attn_implementation
    assert before != "eager"
    first = attention_weights(model, tokenizer, "abc", max_new_tokens=4)
    assert model.training
    assert model.config._attn_implementation == before
    # without dropout, although the model is in training mode
    of_several = attention_weights(
        model, tokenizer, "abc", max_new_tokens=4, num_beams=3, num_return_sequences=3
    )
    assert "<pad>" not in of_several.target
    second = attention_weights(model, tokenizer, "abc", max_new_tokens=4)
    assert first.target == second.target
    assert torch.equal(first.cross, second.cross)


def test_a_text_without_a_word_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match=r"source must have a word, got ' '"):
        attention_weights(model, tokenizer, " ")
    with pytest.raises(ValueError, match=r"target must have a word, got ''"):
        attention_weights(model, tokenizer, "a", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It costs $77.00.", ["It", "costs", "$", "77.00", "."]),
        ("Don't (go)!", ["Don't", "(", "go", ")!"]),
        ("In Düsseldorf — 3 °C", ["In", "Düsseldorf", "—", "3", "°", "C"]),
        ("नमस्ते दुनिया।", ["नमस्ते", "दुनिया", "।"]),
        (" two  spaces ", ["two", "spaces"]),
    ],
)
def test_tokens_are_merged_to_words_and_none_is_lost(tokenizer, text, words):
    ids = tokenizer(text).input_ids
    found = words_of(tokenizer, ids)
    assert [word.text for word in found] == [*words, "</s>"]
    assert sorted(token for word in found for token in word.tokens) == list(range(len(ids)))
    for word in found:
        assert tokenizer.decode([ids[token] for token in word.tokens]).strip() == word.text


def test_the_weights_of_a_query_word_are_a_mean_and_those_of_a_key_word_a_sum():
    weights = planted(
        encoder=[[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.0, 0.4, 0.6]]],
        cross=[[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.0, 0.4, 0.6]]],
        source="Düssel dorf </s>",
        target="x y </s>",
    )
    joined = AttentionWeights(
        **{
            **vars(weights),
            "source_words": [Word("Düsseldorf", [0, 1]), Word("</s>", [2])],
            "target_words": [Word("xy", [0, 1]), Word("</s>", [2])],
        }
    ).by_word()
    assert (joined.source, joined.target) == (["Düsseldorf", "</s>"], ["xy", "</s>"])
    assert joined.inputs == ["<s>", "xy"]
    expected = torch.tensor([[(0.3 + 0.8) / 2, (0.7 + 0.2) / 2], [0.4, 0.6]])
    torch.testing.assert_close(joined.encoder[0, 0], expected)
    torch.testing.assert_close(joined.cross[0, 0], expected)
    # the mean of 1/2, 1/2, 0 and 1/3, 1/3, 1/3; the last two columns are summed
    torch.testing.assert_close(joined.decoder[0, 0, 1], torch.tensor([5 / 12, 7 / 12]))


def test_an_alignment_is_the_source_word_with_the_highest_weight():
    crossed = [[0.1, 0.6, 0.2, 0.1], [0.3, 0.1, 0.2, 0.4], [0.0, 0.0, 0.0, 1.0]]
    straight = [[0.9, 0.1, 0.0, 0.0], [0.0, 0.9, 0.1, 0.0], [0.0, 0.0, 0.0, 1.0]]
    weights = planted(cross=[crossed, straight])
    # the end token is not a word, even with the highest weight
    links = align(weights, layer=0, head=0)
    assert [link[:2] for link in links] == [("x", "b"), ("y", "a")]
    assert [link.weight for link in links] == pytest.approx([0.6, 0.3])
    assert [link[:2] for link in align(weights, layer=0, head=1)] == [("x", "a"), ("y", "b")]
    mean = align(weights, layer=0)
    assert [link[:2] for link in mean] == [("x", "a"), ("y", "b")]
    assert [link.weight for link in mean] == pytest.approx([0.5, 0.5])


def test_words_aligned_to_themselves_are_counted():
    right = [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    wrong = [[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    weights = planted(cross=[right, wrong], source="Anna 3 . </s>", target="3 Anna </s>")
    assert count_aligned_to_themselves([weights, weights], 0, 0) == (4, 4)
    assert count_aligned_to_themselves([weights], 0, 1) == (1, 2)
    assert count_aligned_to_themselves([weights], None) == (0, 2)
    # a word that occurs twice in a sentence does not count
    twice = planted(cross=[right], source="3 3 . </s>", target="3 . </s>")
    assert count_aligned_to_themselves([twice], 0) == (0, 0)


@pytest.mark.parametrize(("step", "position"), [(0, "own"), (-1, "previous"), (1, "next")])
def test_the_share_of_a_position_shows_a_head_that_attends_to_it(step, position):
    size = 6
    weights = planted(encoder=[shifted(size, step)], source="a b c d e </s>")
    ((found,),) = head_statistics([weights], "encoder")
    # weights on the end token count as `special` only
    on_end = {0: 1, -1: 1, 1: 2}[step]
    assert found.shares["special"] == pytest.approx(on_end / size)
    assert found.shares[position] == pytest.approx((size - on_end) / size)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.entropy == 0.0


def test_a_uniform_head_has_the_entropy_of_the_number_of_keys():
    weights = planted(source="a b c d </s>", target="x y </s>")
    for uses_uniform_weights in (False, True):
        ((found,),) = head_statistics([weights], "encoder", uses_uniform_weights)
        assert found.entropy == pytest.approx(math.log(5))
        expected = sum(abs(q - k) for q in range(5) for k in range(5)) / 25
        assert found.distance == pytest.approx(expected)
        # the start token attends only to itself and is not counted; then two keys, then three
        ((found,),) = head_statistics([weights], "decoder", uses_uniform_weights)
        assert found.entropy == pytest.approx((math.log(2) + math.log(3)) / 2)
        assert found.shares == pytest.approx(
            {"own": 5 / 12, "previous": 1 / 6, "next": 0.0, "special": 5 / 12, "other": 0.0}
        )


def test_every_query_of_every_sentence_has_the_same_weight_in_the_mean():
    one = planted(encoder=[shifted(4, 0)])
    two = planted(encoder=[shifted(7, -1)], source="a b c d e f </s>")
    ((found,),) = head_statistics([one, two], "encoder")
    assert found.shares["own"] == pytest.approx(3 / 11)
    assert found.shares["previous"] == pytest.approx(6 / 11)


def test_masked_positions_are_drawn_differently_from_zero():
    weights = planted()
    _, axes = new_figure(2.0, 2.0)
    drawn = draw_matrix(axes, weights, "decoder", 0, 0).get_array()
    assert drawn.mask.tolist() == weights.hidden().tolist()
    assert drawn.mask.any()
    _, axes = new_figure(2.0, 2.0)
    assert not draw_matrix(axes, weights, "cross", 0, 0).get_array().mask.any()
    assert axes.patch.get_hatch()


def test_a_grid_has_a_row_for_each_layer_and_a_column_for_each_head(model, tokenizer):
    weights = attention_weights(model, tokenizer, "abc", "de")
    figure = draw_grid(weights, "cross")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [f"layer {i}, head {j}" for i in (1, 2, 3) for j in (1, 2)]


def test_the_dollar_signs_of_a_word_are_no_formula():
    section = word_section(planted(source="A$$AP c </s>"), None)
    assert "“A$$AP”" in section.finding
    section.figure.savefig(io.BytesIO())


@pytest.fixture
def run(model, tokenizer, tmp_path):
    """Return a model folder with translations, as `evaluate` writes them."""
    folder = tmp_path / "run"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "hypotheses").mkdir()
    for side, text in (("source", "ab 3\ncd\n\n"), ("translation", "3 ab\nce\n\n")):
        (folder / "hypotheses" / f"test.{side}.txt").write_text(text, encoding="utf-8")
    return folder


def test_the_study_has_all_its_sections_and_pictures(run, tmp_path, capsys):
    command = ["paper", "attention", "--model", str(run), "--sentence", "ab 3 c"]
    command += ["--translation", "3 d", "--output_dir", str(tmp_path / "out")]
    assert main(command) == 0
    assert "In 2 sentences of the test split" in " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "out" / "study.json").read_text(encoding="utf-8"))
    found = written["sections"]
    kinds = ["encoder", "decoder", "cross"]
    assert list(found) == [*kinds, "equation-1", "head", "word", "alignment", "tasks"]
    for kind, layers in zip(kinds, (2, 3, 3), strict=True):
        assert len(found[kind]["weights"]) == layers
    assert [row[0] for row in found["alignment"]["rows"]] == ["3", "d"]
    # two heads per layer, and a row of uniform weights for each kind
    rows = found["tasks"]["rows"]
    assert len(rows) == 2 * 2 + 3 * 2 + 3 * 2 + 3
    for row in rows:
        assert sum(row[-len(KEY_KINDS) :]) == pytest.approx(1.0)
    for name in found:
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5_000


def shown(run, *flags):
    """Return the sections of the study by name, without writing files."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    sentence = ["--sentence", "ab 3 c", "--translation", "3 d"]
    arguments = parser.parse_args(["--model", str(run), *sentence, *flags])
    return {section.name: section for section in sections(arguments)}


def test_heads_are_measured_on_the_test_split_and_not_on_the_drawn_sentence(run):
    found = shown(run, "--num_sentences", "1")
    assert found["tasks"].finding.startswith("Measured on one sentence of the test split.")
    # "ab 3" and "3 ab" share two words; "ab 3 c" and "3 d", which are drawn, share one
    assert found["alignment"].numbers["count_aligned_to_themselves"] == 2
    assert "2 words have the same spelling in both languages" in found["alignment"].finding


def test_without_translations_heads_are_measured_on_the_drawn_sentence(run):
    (run / "hypotheses" / "test.source.txt").unlink()
    found = shown(run, "--layer", "1", "--head", "2")
    assert found["tasks"].finding.startswith("Measured on this sentence.")
    # the layer and the head of the flags
    assert [row[1:3] for row in found["head"].rows] == [[1, 2]] * 3


def test_lines_from_a_word_to_itself_are_excluded_only_in_self_attention(run):
    finding = shown(run)["head"].finding
    assert (
        "strongest line, except for lines from a word to itself in self-attention, is in" in finding
    )


@pytest.mark.parametrize(("flag", "got"), [("--layer", "3"), ("--head", "0")])
def test_a_layer_or_head_that_does_not_exist_is_refused(run, flag, got):
    with pytest.raises(ValueError, match=rf"{flag[2:]} must be from 1 to 2, got {got}\."):
        shown(run, flag, got)


def test_the_error_for_a_missing_model_says_how_to_train_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["paper", "attention"]) == 1
    assert "`make demo` trains one" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_equation_1_in_one_head_gives_the_weights_of_the_model(model, tokenizer, kind):
    steps = inside_head(model, tokenizer, "abc", kind, layer=1, head=1, target="de")
    found = attention_weights(model, tokenizer, "abc", "de")
    torch.testing.assert_close(steps.weights, getattr(found, kind)[1, 1])
    assert steps.difference < 1e-6
    later = [
        [key > query for key in range(len(steps.key_tokens))]
        for query in range(len(steps.query_tokens))
    ]
    hidden = torch.tensor(later) if kind == "decoder" else torch.zeros(steps.scores.shape).bool()
    assert torch.equal(steps.scores.isinf(), hidden)
    expected = equations.attention(
        steps.query.tolist(),
        steps.key.tolist(),
        steps.value.tolist(),
        lambda query, key: bool(hidden[query, key]),
    )
    torch.testing.assert_close(steps.context, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_hooks_are_removed_from_the_model(model, tokenizer):
    inside_head(model, tokenizer, "abc", "cross", 0, 0, "de")
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(layers) > 40
    assert not any(layer._forward_hooks for layer in layers)
