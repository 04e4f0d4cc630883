"""Required and forbidden terms and prefixes of translations: by enumeration, and as text."""

import re
import unicodedata

import equations
import pytest
import torch
from library_models import KINDS, SENTENCES, save
from tokenizers import normalizers
from translation_toys import TEXTS, make_model, make_tokenizer

import vanilla_transformer
from vanilla_transformer import TranslationPipeline
from vanilla_transformer.cli import main
from vanilla_transformer.constraints_vanilla_transformer import TARGET_SETTINGS, read_constraints
from vanilla_transformer.languages_vanilla_transformer import target_tokenizer
from vanilla_transformer.terms_vanilla_transformer import (
    ByteVocabulary,
    ForbiddenTerms,
    term_matches,
    token_bytes,
)

# more texts, which a search with different terms and prefixes divides into several batches
MANY = [*TEXTS, "", "the dogs", *TEXTS[::-1]]
TERMS = ["house", "small dog"]


@pytest.fixture(scope="module")
def free():
    """Model that may write all letters and spaces, and so can spell a word in several ways."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.generation_config.suppress_tokens = [
        index
        for index, part in enumerate(token_bytes(tokenizer))
        if not part.strip().isalpha() and index != tokenizer.eos_token_id
    ]
    model.generation_config.max_extra_tokens = 12
    return TranslationPipeline(model, tokenizer, device="cpu")


@pytest.fixture
def folder(free, tmp_path):
    free.model.save_pretrained(tmp_path / "model")
    free.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "source.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    return tmp_path


def texts_of(results):
    return [result["translation_text"] for result in results]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([9], [0, 0, 0]),
        ([9, 1], [1, 0, 0]),
        ([9, 1, 2], ["met", 0, 0]),
        ([9, 1, 1], [1, 0, 0]),
        ([1, 2, 9, 3, 1], ["met", 2, 0]),
        ([3, 1, 3], [0, 1, 0]),
        ([3, 1, 4, 1, 2], ["met", "met", 0]),
        ([5, 1], [1, 0, "met"]),
    ],
)
def test_a_term_is_found_wherever_it_stands(ids, expected):
    terms = torch.tensor([[[1, 2, -1], [3, 1, 4], [5, -1, -1]]])
    is_met, begun = (it[0, 0].tolist() for it in term_matches(torch.tensor([[ids]]), terms))
    found = ["met" if met else count for met, count in zip(is_met, begun, strict=True)]
    assert found == expected


@pytest.mark.parametrize("alpha", [0.0, 0.6, None])
@pytest.mark.parametrize("terms", [[[5, 40]], [[40], [5, 5]], [[40, 5], [5, 40]]])
def test_the_best_translation_with_the_terms_is_that_of_an_exhaustive_search(
    translate, alpha, terms
):
    model = translate.model
    end, start = model.config.eos_token_id, model.config.decoder_start_token_id
    few = [5, 40, 60, end]
    source = translate.tokenizer(TEXTS[0], return_tensors="pt")

    def next_log_probs(tokens):
        read = torch.tensor([[start, *(few[it] for it in tokens)]])
        with torch.no_grad():
            row = model(**source, decoder_input_ids=read).logits[0, -1]
        logarithms = equations.log_softmax(row.tolist())
        return [logarithms[token] for token in few]

    found = equations.exhaustive_search(next_log_probs, len(few), 3, 5, alpha or 0.0)
    sentences = [([few[it] for it in tokens], score) for tokens, score in found]
    if alpha is None:
        sentences = [(ids, score / len(ids) ** 0.7) for ids, score in sentences]
    expected = [
        (ids, score)
        for ids, score in sorted(sentences, key=lambda one: -one[1])
        if all(any(ids[at : at + len(term)] == term for at in range(len(ids))) for term in terms)
    ]
    output = model.generate(
        **source,
        required_tokens=[terms],
        num_beams=300,
        num_return_sequences=3,
        suppress_tokens=[it for it in range(model.config.vocab_size) if it not in few],
        max_new_tokens=5,
        max_extra_tokens=None,
        length_penalty_alpha=alpha,
        length_penalty=0.7 if alpha is None else 1.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for row, score, (ids, expected_score) in zip(
        output.sequences.tolist(), output.sequences_scores.tolist(), expected, strict=False
    ):
        assert row[1 : len(ids) + 1] == ids
        assert score == pytest.approx(expected_score, abs=1e-4)


@pytest.mark.parametrize("engine", ["required", "off"])
def test_a_negative_end_token_forbids_no_term(translate, engine):
    model, source = translate.model, translate.tokenizer(TEXTS[0], return_tensors="pt")
    # as an index, -1 would be this token
    search = {"required_tokens": [[[model.config.vocab_size - 1]]], "engine": engine}
    expected = model.generate(**source, **search)
    end_tokens = [model.config.eos_token_id, -1]
    assert model.generate(**source, **search, eos_token_id=end_tokens).equal(expected)


@pytest.mark.parametrize("search", [{}, {"num_beams": 1}, {"engine": "off"}, {"int8": True}])
def test_translations_contain_the_terms(translate, search):
    for terms in ([["house"], TERMS, ["cat"], [], ["dogs", "sleep"]], [TERMS] * len(TEXTS)):
        found = texts_of(translate(TEXTS, required_terms=terms, **search))
        for text, required in zip(found, terms, strict=True):
            assert all(term in text for term in required)
    assert texts_of(translate(TEXTS, required_terms=[], **search)) == texts_of(
        translate(TEXTS, **search)
    )


def test_terms_that_a_translation_has_anyway_change_nothing_or_find_a_better_one(translate):
    plain = translate(TEXTS, return_tensors=True, return_text=True, return_scores=True)
    terms = []
    for result in plain:
        term = result["translation_text"].split()[0]
        ids = translate.tokenizer(term)["input_ids"][:-1]
        is_own = result["translation_token_ids"][1 : len(ids) + 1].tolist() == ids
        terms.append([term] if is_own else [])
    assert any(terms)
    found = translate(TEXTS, required_terms=terms, return_scores=True)
    for before, after in zip(plain, found, strict=True):
        # a search with more beams may find a better translation
        is_better = after["score"] > before["score"]
        assert is_better or after["translation_text"] == before["translation_text"]


def test_all_translations_of_an_n_best_list_differ_and_have_the_terms(translate):
    for found in translate(TEXTS, required_terms=["house"], num_return_sequences=4):
        texts = texts_of(found)
        assert len(set(texts)) == 4
        assert all("house" in text for text in texts)


@pytest.mark.parametrize("search", [{}, {"num_beams": 1}, {"engine": "off"}])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_no_tokenization_spells_a_forbidden_term(free, length, search):
    terms = []
    for _ in range(4):
        found = texts_of(free(TEXTS, forbidden_terms=terms, **search))
        assert not any(term in text for text in found for term in terms)
        parts = [text[at : at + length] for text in found for at in range(len(text) - length + 1)]
        terms.append(max(filter(str.strip, parts), key=parts.count))


def test_a_space_before_a_term_forbids_only_words_that_begin_with_it(free):
    assert any("cat cat" in text for text in texts_of(free(TEXTS, num_beams=1)))
    found = texts_of(free(TEXTS, num_beams=1, forbidden_terms=[" cat", " w"]))
    assert not any(word.startswith(("cat", "w")) for text in found for word in text.split())


def test_the_bytes_of_a_character_do_not_spell_a_forbidden_term():
    """A byte-level vocabulary has one token for each byte of a rare character."""
    tokenizer = make_tokenizer()
    parts = token_bytes(tokenizer)
    *begun, last, _ = tokenizer("dö")["input_ids"]
    assert b"".join(parts[token] for token in begun) == b" d\xc3"
    assert parts[last] == b"\xb6"
    forbid = ForbiddenTerms([["ö"], ["dö"], ["do"]], ByteVocabulary(parts))
    scores = forbid(torch.tensor([[1, *begun]] * 3), torch.zeros(3, len(parts)))
    assert (scores[:2, last] == -torch.inf).all()
    assert scores[2, last] == 0
    assert (scores[0] == -torch.inf).sum() == sum(
        part.startswith(b"\xb6") or "ö".encode() in part for part in parts
    )


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_term_in_each_unicode_form_is_forbidden_and_required(translate, form):
    text = unicodedata.normalize(form, "dö")
    (result,) = translate("a house", required_terms=[text], suppress_tokens=None)
    assert "dö" in result["translation_text"]
    assert translate("a house", target_prefix=text)[0]["translation_text"].startswith("dö")
    with pytest.raises(ValueError, match=r"must not contain a forbidden term, got 'dö', which"):
        translate("a house", required_terms=["dö"], forbidden_terms=[text])


def read(tokenizer, **target_settings):
    """Read the constraints of one translation."""
    (constraint,) = read_constraints(
        {**dict.fromkeys(TARGET_SETTINGS), **target_settings},
        1,
        None,
        tokenizer,
        lambda texts: tokenizer(texts)["input_ids"] if texts else [],
        lambda: ByteVocabulary(token_bytes(tokenizer)),
    )
    return constraint


def test_a_forbidden_term_has_both_unicode_forms_and_the_text_of_its_tokens():
    tokenizer = make_tokenizer()
    expected = {
        "dog": {"dog"},
        " dog": {" dog"},
        " ö": {" ö", " o\u0308"},
        " o\u0308": {" ö", " o\u0308"},
    }
    assert read(tokenizer, forbidden_terms=list(expected)).forbidden_terms == expected
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert read(tokenizer, forbidden_terms=["Hund "]).forbidden_terms == {
        "Hund ": {"Hund ", "hund "}
    }
    # the tokenizer removes all characters of a term
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    assert read(tokenizer, forbidden_terms=["x"]).forbidden_terms == {"x": {"x"}}


def test_a_required_term_is_in_nfc_if_the_tokenizer_has_no_normalizer():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([])
    ids = [read(tokenizer, required_terms=[term]).required_terms[term] for term in ("ö", "o\u0308")]
    assert ids[0] == ids[1]
    assert "ö".encode() in ByteVocabulary(token_bytes(tokenizer)).join(ids[1])


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_the_library_keep_the_spelling_of_a_forbidden_term(kind, pieces, tmp_path):
    save(kind, pieces, tmp_path)
    tokenizer = target_tokenizer(vanilla_transformer.load(tmp_path).tokenizer)
    found = read(tokenizer, forbidden_terms=[" the house"]).forbidden_terms
    assert found == {" the house": {" the house"}}


def test_a_term_is_forbidden_for_its_text_only(free):
    plain = texts_of(free(TEXTS))
    terms = [[text[:3]] if place % 2 else [] for place, text in enumerate(plain)]
    found = texts_of(free(TEXTS, forbidden_terms=terms))
    for place, (text, before) in enumerate(zip(found, plain, strict=True)):
        assert (text == before) == (place % 2 == 0)
        assert not any(term in text for term in terms[place])


def test_a_translation_begins_with_its_prefix(translate):
    prefixes = ["the house", "", "in the", "cat", "the small dog"]
    found = translate(TEXTS, target_prefix=prefixes, return_scores=True)
    for text, prefix, result in zip(TEXTS, prefixes, found, strict=True):
        assert result["translation_text"].startswith(prefix)
        ids = translate.tokenizer(text, return_tensors="pt")
        prompt = [translate.model.config.decoder_start_token_id]
        if prefix:
            prompt += translate.tokenizer(prefix)["input_ids"][:-1]
        expected = translate.model.generate(**ids, decoder_input_ids=torch.tensor([prompt]))
        decoded = translate.tokenizer.decode(expected[0], skip_special_tokens=True)
        assert result["translation_text"] == decoded
        # the prefix counts in the scores
        own = sum(logarithm for _, logarithm in result["token_log_probabilities"])
        assert own == pytest.approx(result["log_probability"])
        assert len(result["token_log_probabilities"]) >= len(prompt)
    assert texts_of(translate(TEXTS, target_prefix="a house")) != texts_of(translate(TEXTS))


def test_batches_do_not_change_translations(translate):
    """Each text alone gives what all give together, whatever the others wish."""
    prefixes = [["", "the", "a house"][place % 3] for place in range(len(MANY))]
    required = [[[], ["dog"], ["small dog", "house"]][place % 3] for place in range(len(MANY))]
    forbidden = [[[], ["t"]][place % 2] for place in range(len(MANY))]
    constraints = {
        "target_prefix": prefixes,
        "required_terms": required,
        "forbidden_terms": forbidden,
    }
    found = translate(MANY, **constraints)
    for place, (text, result) in enumerate(zip(MANY, found, strict=True)):
        own = {name: [values[place]] for name, values in constraints.items()}
        assert translate([text], **own) == [result]
    assert found[MANY.index("")] == {"translation_text": ""}


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_the_library_begin_with_a_prefix_and_avoid_terms(kind, pieces, tmp_path):
    save(kind, pieces, tmp_path)
    languages = KINDS[kind][1]
    translate = vanilla_transformer.load(tmp_path, num_beams=2, max_new_tokens=8, **languages)
    plain = texts_of(translate(SENTENCES))
    prefixed = texts_of(translate(SENTENCES, target_prefix="the house"))
    # the library's tokenizer of M2M100 writes the language before
    assert all(text.removeprefix("__de__ ").startswith("the house") for text in prefixed)
    letter = max("abcdefghijklmnopqrstuvwxyz", key=lambda it: "".join(plain).count(it))
    # M2M100's languages are not among the tokens of its vocabulary
    if letter in "".join(plain) and kind != "m2m100":
        found = texts_of(translate(SENTENCES, forbidden_terms=[letter]))
        assert not any(letter in text for text in found)


@pytest.mark.parametrize("kind", ["marian", "m2m100", "nllb"])
def test_models_of_the_library_that_the_engine_runs_take_required_terms(kind, pieces, tmp_path):
    save(kind, pieces, tmp_path)
    languages = KINDS[kind][1]
    translate = vanilla_transformer.load(tmp_path, num_beams=2, max_new_tokens=9, **languages)
    found = texts_of(translate(SENTENCES, required_terms=["house"]))
    assert all("house" in text for text in found)
    assert all(
        "house" in text
        for text in texts_of(translate(SENTENCES, required_terms=["house"], length_penalty=0.3))
    )


def test_terms_that_the_vocabulary_cannot_spell_are_refused(pieces, tmp_path):
    save("marian", pieces, tmp_path)
    translate = vanilla_transformer.load(tmp_path)
    with pytest.raises(ValueError, match="characters of the vocabulary, got '\u4e00'"):
        translate("the house", required_terms=["house", "\u4e00"])


def test_other_models_of_the_library_refuse_required_terms(pieces, tmp_path):
    save("t5", pieces, tmp_path)
    with pytest.raises(ValueError, match="required_terms needs the inference engine"):
        vanilla_transformer.load(tmp_path)("the house", required_terms=["house"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "m2m100"])
def test_the_texts_of_tokens_are_those_of_decode(kind, pieces, tmp_path):
    save(kind, pieces, tmp_path)
    tokenizer = target_tokenizer(vanilla_transformer.load(tmp_path).tokenizer)
    parts = token_bytes(tokenizer)
    ids = tokenizer("the cat sleeps in the house")["input_ids"]
    text = b"".join(parts[token] for token in ids).decode()
    assert text.strip() == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"required_terms": "house"}, "required_terms must be a list of texts, got 'house'"),
        ({"required_terms": ["house", 3]}, "required_terms must be a list of texts, got"),
        ({"required_terms": [" "]}, "required_terms must have no empty term"),
        ({"required_terms": [["house"]]}, "one for each of the 5 texts, got 1"),
        ({"required_terms": ["house"], "do_sample": True}, "do_sample must be False"),
        ({"forbidden_terms": [""]}, "forbidden_terms must have no empty term"),
        ({"target_prefix": ["a", "b"]}, "one for each of the 5 texts, got 2"),
        ({"target_prefix": 3}, "target_prefix must be a text, got 3"),
        ({"target_prefix": "a", "split_sentences": "en"}, "with split_sentences"),
        ({"required_terms": ["house"] * 20}, None),
        (
            {"required_terms": ["house in the dog", "dogs sleep cat", "small a small"]},
            "the settings of the search must allow a translation, but forbid every one of "
            r"'.*' with required_terms \['house in the dog', 'dogs sleep cat', ",
        ),
        (
            {"required_terms": ["house"], "forbidden_terms": ["house"]},
            "must not contain a forbidden term, got 'house', which contains 'house'",
        ),
        (
            {"required_terms": [["cat"], [], [], ["house"], []], "forbidden_terms": ["ous"]},
            "must not contain a forbidden term, got 'house', which contains 'ous'",
        ),
    ],
)
def test_constraints_that_cannot_be_met_are_refused(translate, constraints, message):
    if message is None:
        assert all("house" in text for text in texts_of(translate(TEXTS, **constraints)))
        return
    with pytest.raises(ValueError, match=message):
        translate(TEXTS, **constraints)


def test_an_impossible_search_names_its_text_and_its_terms(free):
    texts = ["a house", "the small cat", "dogs"]
    expected = "every one of 'the small cat' with required_terms ['dog', 'sleep', 'house in the "
    long_term = "house in the dog " * 9
    with pytest.raises(ValueError, match=re.escape(expected)) as error:
        free(
            texts,
            required_terms=[[], ["dog", "sleep", long_term], []],
            forbidden_terms=[[], ["cat"], []],
        )
    assert str(error.value).endswith("... and forbidden_terms ['cat'].")
    search = {"prefix_allowed_tokens_fn": lambda row, ids: [free.tokenizer.eos_token_id]}
    with pytest.raises(ValueError, match=r"allow no more translations of 'dogs'\.$"):
        free("dogs", num_return_sequences=2, **search)


def test_a_list_for_each_text_needs_a_list_of_texts(translate):
    with pytest.raises(ValueError, match="pass the texts as a list"):
        list(translate(iter(TEXTS), target_prefix=["a"] * len(TEXTS)))
    found = list(translate(iter(TEXTS), required_terms=["house"]))
    assert all("house" in result[0]["translation_text"] for result in found)


def test_a_split_text_avoids_terms(free):
    texts = ["the small cat sleeps. dogs sleep.", "a house."]
    plain = texts_of(free(texts, split_sentences="en"))
    terms = [[plain[0][:2]], []]
    found = texts_of(free(texts, split_sentences="en", forbidden_terms=terms))
    assert terms[0][0] not in found[0]
    assert found[1] == plain[1]


@pytest.mark.parametrize(
    "required",
    [[], [[[3]], [[3]]], [[[]]], [[[10**6]]], [[[-1]]], [[["a"]]]],
    ids=["none", "two", "empty", "too high", "negative", "text"],
)
def test_token_ids_that_are_no_terms_are_refused(translate, required):
    source = translate.tokenizer(TEXTS[0], return_tensors="pt")
    if not required:
        expected = translate.model.generate(**source)
        assert torch.equal(translate.model.generate(**source, required_tokens=required), expected)
        return
    with pytest.raises(ValueError, match="required_tokens"):
        translate.model.generate(**source, required_tokens=required)


def test_the_command_takes_terms_prefix_and_glossary(folder, capsys):
    source = str(folder / "source.txt")
    arguments = ["translate", str(folder / "model"), source]
    flags = ["--required_term", "house", "--forbidden_term", "cat", "--target_prefix", "the"]
    assert main([*arguments, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(TEXTS)
    for line in lines:
        assert line.startswith("the")
        assert "house" in line
        assert "cat" not in line
    glossary = folder / "glossary.tsv"
    glossary.write_text("dogs\tsmall dogs\tanimals\nhouse\thouse\n\ncat\tcat\n", encoding="utf-8")
    assert main([*arguments, "--glossary", str(glossary)]) == 0
    for text, line in zip(TEXTS, capsys.readouterr().out.splitlines(), strict=True):
        words = text.split()
        for term, translation in (("dogs", "small dogs"), ("house", "house"), ("cat", "cat")):
            if term in words:
                assert translation in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("dogs\n", "line 1 must have a source term, a tab and a target term, got 'dogs'"),
        ("a\tb\n\tc\n", "line 2 must have a source term"),
        ("en-US\tde\na\tb\n", "line 1 must have a source term and a target term, got the names"),
        ("Source term\tTarget term\tNote\n", "got the names of columns, 'Source term"),
        (
            "a\tb\na\tc\n",
            "line 2 must have another source term: 'a' already has the target term 'b'",
        ),
    ],
)
def test_a_glossary_that_cannot_be_used_is_refused(content, message, folder, capsys):
    glossary = folder / "glossary.tsv"
    glossary.write_text(content, encoding="utf-8")
    arguments = [str(folder / "model"), str(folder / "source.txt"), "--glossary", str(glossary)]
    assert main(["translate", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_glossary_is_refused_with_sentences(folder, capsys):
    (folder / "glossary.tsv").write_text("dogs\tdogs\n")
    arguments = [str(folder / "model"), str(folder / "source.txt")]
    flags = ["--glossary", str(folder / "glossary.tsv"), "--split_sentences", "en"]
    assert main(["translate", *arguments, *flags]) == 1
    assert "glossary must not be given with split_sentences." in capsys.readouterr().err
