"""Log-probabilities: by hand, of the search, of CTranslate2, and on the command line."""

import json
import math
import warnings

import equations
import pytest
import torch
from library_models import KINDS, SENTENCES, search_by_hand
from train_toys import pipe_of
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer import TranslationPipeline
from vanilla_transformer import scores_vanilla_transformer as scores
from vanilla_transformer.cli import main

SCORES = {"return_dict_in_generate": True, "output_scores": True}


@pytest.fixture
def folder(translate, tmp_path):
    """Model folder, sources and translations."""
    translate.model.save_pretrained(tmp_path / "model")
    translate.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "source.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    (tmp_path / "target.txt").write_text("".join(f"{text}\n" for text in TEXTS[::-1]))
    return tmp_path


def by_hand(model, source, target):
    """Logarithms of the tokens of one translation, one step at a time in plain Python."""
    found = []
    for place, token in enumerate(target):
        read = [model.config.decoder_start_token_id, *target[:place]]
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([read])
            ).logits
        found.append(equations.log_softmax(logits[0, -1].tolist())[token])
    return found


@pytest.mark.parametrize("most_logits", [2**26, 1])
def test_a_score_is_the_sum_of_the_logarithms_of_all_tokens(translate, monkeypatch, most_logits):
    monkeypatch.setattr(scores, "MOST_LOGITS", most_logits)
    found = translate.score(TEXTS, TEXTS[::-1])
    for source, target, result in zip(TEXTS, TEXTS[::-1], found, strict=True):
        ids = translate.tokenizer([source, target])["input_ids"]
        expected = by_hand(translate.model, *ids)
        tokens, logarithms = zip(*result["token_log_probabilities"], strict=True)
        assert list(tokens) == translate.tokenizer.convert_ids_to_tokens(ids[1])
        assert logarithms == pytest.approx(expected, abs=1e-4)
        assert result["log_probability"] == pytest.approx(math.fsum(expected), abs=1e-4)
        penalty = equations.length_penalty(len(ids[1]), 0.6)
        assert result["score"] == pytest.approx(math.fsum(expected) / penalty, abs=1e-4)


@pytest.mark.parametrize(
    "search",
    [
        {"num_return_sequences": 3},
        {"length_penalty_alpha": 1.0},
        {"length_penalty_alpha": None, "length_penalty": 0.7, "num_return_sequences": 2},
    ],
)
def test_scores_of_translations_are_those_of_the_search(translate, search):
    results = translate(TEXTS, **search, return_scores=True, return_tensors=True)
    for text, found in zip(TEXTS, results, strict=True):
        inputs = translate.tokenizer(text, return_tensors="pt")
        expected = translate.model.generate(**inputs, **search, **SCORES)
        found = found if isinstance(found, list) else [found]
        assert len(found) == len(expected.sequences_scores)
        for one, score, ids in zip(
            found, expected.sequences_scores.tolist(), expected.sequences.tolist(), strict=True
        ):
            length = len(one["token_log_probabilities"])
            assert one["translation_token_ids"].tolist()[: length + 1] == ids[: length + 1]
            assert not set(ids[length + 1 :]) - {*translate.tokenizer.all_special_ids}
            assert one["score"] == pytest.approx(score, abs=1e-4)
    plain = translate(TEXTS, **search)
    with_scores = translate(TEXTS, **search, return_scores=True)
    first = [it[0] if isinstance(it, list) else it for it in with_scores]
    assert [it["translation_text"] for it in first] == [
        (it[0] if isinstance(it, list) else it)["translation_text"] for it in plain
    ]


@pytest.mark.parametrize("name", KINDS)
def test_scores_of_models_of_the_library_are_those_of_its_search(name, pieces, tmp_path):
    torch.manual_seed(3)
    make, languages = KINDS[name]
    model, tokenizer = make(pieces, tmp_path)
    model.eval()
    # the library counts a forced end token as certain
    model.generation_config.forced_eos_token_id = None
    search = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
    translate = TranslationPipeline(model, tokenizer, **languages)
    results = translate(SENTENCES, **search, return_scores=True)
    by_hand = search_by_hand(model, tokenizer, SENTENCES, languages, **search, **SCORES)
    for found, expected in zip(results, by_hand, strict=True):
        scored = zip(found, expected.sequences_scores.tolist(), strict=True)
        for one, score in scored:
            assert one["score"] == pytest.approx(score, abs=1e-4)


def test_a_model_whose_layers_torch_quantized_has_scores():
    tokenizer = make_tokenizer()
    model = make_model(tokenizer).eval()
    with warnings.catch_warnings(action="ignore"):
        torch.ao.quantization.quantize_dynamic(
            model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True
        )
    translate = TranslationPipeline(model, tokenizer, engine="off")
    found = translate(TEXTS, return_scores=True, target_prefix="the")
    assert all(result["log_probability"] < 0 for result in found)


def test_an_empty_text_has_an_empty_translation_that_is_certain(translate):
    found = translate(["", TEXTS[0]], return_scores=True)
    assert found[0]["log_probability"] == found[0]["score"] == 0.0
    assert found[0]["token_log_probabilities"] == []
    assert found[1]["log_probability"] < 0


def test_scores_are_those_of_ctranslate2(folder, translate):
    ctranslate2 = pytest.importorskip("ctranslate2")
    tokenizer, targets = translate.tokenizer, TEXTS[::-1]
    model = make_model(tokenizer)
    # CTranslate2's export gives the probability of forbidden tokens to the others
    model.generation_config.suppress_tokens = None
    model.save_pretrained(folder / "model")
    assert main(["export", "ctranslate2", str(folder / "model"), str(folder / "ct2")]) == 0
    translator = ctranslate2.Translator(str(folder / "ct2"), device="cpu")
    tokens = [
        [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(texts)["input_ids"]]
        for texts in (TEXTS, targets)
    ]
    # CTranslate2 adds the end token of the target
    expected = translator.score_batch(tokens[0], [row[:-1] for row in tokens[1]])
    for found, theirs in zip(translate.score(TEXTS, targets), expected, strict=True):
        logarithms = [logarithm for _, logarithm in found["token_log_probabilities"]]
        assert logarithms == pytest.approx(theirs.log_probs, abs=1e-4)


def lines_of(capsys, *words):
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_command_scores_a_pair_of_files(folder, translate, capsys):
    files = ["--source", folder / "source.txt", "--target", folder / "target.txt"]
    expected = translate.score(TEXTS, TEXTS[::-1])
    for line, found in zip(
        lines_of(capsys, "score", folder / "model", *files), expected, strict=True
    ):
        numbers = [float(it) for it in line.split("\t")]
        assert numbers == pytest.approx([found["log_probability"], found["score"]], abs=1e-4)
    flags = [*files, "--jsonl", "--length_penalty_alpha", "0"]
    records = [json.loads(it) for it in lines_of(capsys, "score", folder / "model", *flags)]
    assert [it["source"] for it in records] == TEXTS
    assert [it["target"] for it in records] == TEXTS[::-1]
    assert all(it["score"] == it["log_probability"] for it in records)


@pytest.mark.parametrize("command", ["score", "align"])
def test_files_can_be_pipes(command, folder, capsys):
    paths = [folder / "source.txt", folder / "target.txt"]
    files = ["--source", str(paths[0]), "--target", str(paths[1])]
    texts = [path.read_text() for path in paths]
    pipes = ["--source", pipe_of(texts[0]), "--target", pipe_of(texts[1])]
    expected = lines_of(capsys, command, folder / "model", *files)
    assert len(expected) == len(TEXTS)
    assert lines_of(capsys, command, folder / "model", *pipes) == expected
    pipes = ["--source", files[1], "--target", pipe_of("a house\n")]
    assert main([command, str(folder / "model"), *pipes]) == 1
    assert "must have the same number of lines, got 5 in" in capsys.readouterr().err


def test_files_of_unequal_length_are_refused(folder, capsys):
    (folder / "short.txt").write_text("a house\n")
    files = ["--source", str(folder / "source.txt"), "--target", str(folder / "short.txt")]
    assert main(["score", str(folder / "model"), *files]) == 1
    captured = capsys.readouterr()
    assert "must have the same number of lines, got 5 in" in captured.err
    assert "and 1 in" in captured.err
    assert not captured.out


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("command", ["score", "align"])
def test_the_pairs_before_a_long_line_are_read(command, side, folder, capsys, monkeypatch):
    monkeypatch.setattr("vanilla_transformer.train.translate.MAX_LINE_TOKENS", 60)
    path = folder / f"{side}.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "a house " * 40, lines[4], ""]))
    files = ["--source", str(folder / "source.txt"), "--target", str(folder / "target.txt")]
    assert main([command, str(folder / "model"), *files]) == 1
    out, said = capsys.readouterr()
    assert out.count("\n") == 3
    assert f"{path} line 4 must have at most 60 tokens, got " in said


def test_translations_of_unequal_number_are_refused(translate):
    with pytest.raises(ValueError, match="translations must be as many as inputs, got 1 and 5"):
        translate.score(TEXTS, TEXTS[:1])


def test_the_command_writes_n_best_lists(folder, translate, capsys):
    flags = ["--num_return_sequences", "2", "--num_beams", "3"]
    expected = translate(TEXTS, num_return_sequences=2, num_beams=3, return_scores=True)
    words = ["translate", folder / "model", folder / "source.txt", *flags]
    plain = lines_of(capsys, *words)
    assert plain == [
        f"{number} ||| {one['translation_text']}"
        for number, found in enumerate(expected)
        for one in found
    ]
    for line, one in zip(
        lines_of(capsys, *words, "--scores"),
        [it for found in expected for it in found],
        strict=True,
    ):
        _, text, *numbers = line.split(" ||| ")
        assert text == one["translation_text"]
        assert [float(it) for it in numbers] == pytest.approx(
            [one["log_probability"], one["score"]], abs=1e-4
        )


def test_the_command_writes_json_lines(folder, translate, capsys):
    words = ["translate", folder / "model", folder / "source.txt", "--jsonl"]
    expected = translate(TEXTS)
    for text, line, one in zip(TEXTS, lines_of(capsys, *words), expected, strict=True):
        assert json.loads(line) == {"source": text, "translations": [one]}
    (first, *_) = lines_of(capsys, *words, "--scores")
    (found,) = json.loads(first)["translations"]
    total = math.fsum(logarithm for _, logarithm in found["token_log_probabilities"])
    assert found["log_probability"] == pytest.approx(total)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("H-0\t-0.53\tone two", "a tab"),
        ("0 ||| one two ||| F0= -3.4 ||| -0.5", "the separator |||"),
        ('{"sentence_id": 0, "translation": "one two"}', "JSON or markup"),
    ],
)
def test_the_output_of_other_programs_is_scored_with_a_warning(folder, capsys, caplog, line, name):
    path = folder / "hypotheses.txt"
    path.write_text(f"{line}\n", encoding="utf-8")
    (folder / "source.txt").write_text("one two\n", encoding="utf-8")
    files = ["--source", str(folder / "source.txt"), "--target", str(path)]
    assert main(["score", str(folder / "model"), *files]) == 0, capsys.readouterr().err
    assert caplog.messages == [
        f"The first line of {path} has {name}, but whole lines are read: give a file with only a "
        "sentence on each line."
    ]


def test_a_score_of_one_text_needs_a_list(translate):
    for inputs, translations in (("Hi.", ["Ja."]), (["Hi."], "Ja."), (iter(["Hi."]), ["Ja."])):
        with pytest.raises(TypeError, match=r"must be a list of texts, got (str|list_iterator)"):
            translate.score(inputs, translations)
        with pytest.raises(TypeError, match=r"must be a list of texts, got (str|list_iterator)"):
            translate.align(inputs, translations)
