"""The translation pipeline with models of the library: languages, prefixes, form of the results."""

import pickle

import library_models
import numpy as np
import pytest
import torch
from library_models import (
    PREFIX,
    SENTENCES,
    make_bart,
    make_fsmt,
    make_fsmt_of_two,
    make_m2m,
    make_marian,
    make_marian_of_two,
    make_mbart,
    make_nllb,
    make_t5,
)
from transformers import FSMTTokenizer, GenerationConfig, MarianTokenizer, pipeline

from vanilla_transformer import TranslationPipeline

TEXTS = SENTENCES[:3]
SEARCH = {"max_new_tokens": 7, "num_beams": 2}


ONE_PAIR = {"marian": make_marian, "fsmt": make_fsmt, "bart": make_bart, "t5": make_t5}
# maker, languages, and another language
MULTILINGUAL = {
    "m2m100": (make_m2m, "en", "de", "fr"),
    "nllb": (make_nllb, "eng_Latn", "deu_Latn", "fra_Latn"),
    "mbart50": (make_mbart, "en_XX", "de_DE", "fr_XX"),
}


def make(maker, pieces, folder):
    torch.manual_seed(3)
    model, tokenizer = maker(pieces, folder)
    return model.eval(), tokenizer


def by_hand(model, tokenizer, texts, languages, **search):
    return library_models.by_hand(model, tokenizer, texts, languages, **{**SEARCH, **search})


def texts_of(results):
    return [result["translation_text"] for result in results]


@pytest.mark.parametrize("name", ONE_PAIR)
def test_a_model_of_one_pair_translates_as_by_hand(name, pieces, tmp_path):
    model, tokenizer = make(ONE_PAIR[name], pieces, tmp_path)
    translate = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")
    expected = by_hand(model, tokenizer, TEXTS, {})
    assert len(set(expected)) > 1
    assert texts_of(translate(TEXTS, **SEARCH)) == expected
    # languages that a model of one pair has anyway were always allowed
    languages = {"src_lang": "en", "tgt_lang": "de"}
    assert texts_of(translate(TEXTS, **SEARCH, **languages)) == expected


@pytest.mark.parametrize("name", MULTILINGUAL)
def test_a_multilingual_model_translates_as_by_hand(name, pieces, tmp_path):
    maker, source, target, other = MULTILINGUAL[name]
    model, tokenizer = make(maker, pieces, tmp_path)
    expected = {}
    for code in (target, other):
        languages = {"src_lang": source, "tgt_lang": code}
        expected[code] = by_hand(model, tokenizer, TEXTS, languages)
    assert expected[target] != expected[other]
    languages = {"src_lang": source, "tgt_lang": target}
    built = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", **languages)
    assert texts_of(built(TEXTS, **SEARCH)) == expected[target]
    # those of the call win
    assert texts_of(built(TEXTS, **SEARCH, tgt_lang=other)) == expected[other]
    task = f"translation_{source}_to_{target}"
    built = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
    assert texts_of(built(TEXTS, **SEARCH)) == expected[target]


@pytest.mark.parametrize("name", MULTILINGUAL)
def test_unknown_and_missing_languages_are_refused(name, pieces, tmp_path):
    maker, source, target, _ = MULTILINGUAL[name]
    model, tokenizer = make(maker, pieces, tmp_path)
    translate = TranslationPipeline(model, tokenizer)
    with pytest.raises(ValueError, match=f"src_lang and tgt_lang .*{source}"):
        translate(TEXTS[0])
    with pytest.raises(ValueError, match=f"tgt_lang must be a language .*{target}.* got 'xx'"):
        translate(TEXTS[0], src_lang=source, tgt_lang="xx")
    with pytest.raises(ValueError, match=r"src_lang must be a language .* got 'xx'"):
        pipeline(f"translation_xx_to_{target}", model=model, tokenizer=tokenizer, device="cpu")


def test_a_task_with_other_languages_than_the_models_is_refused(pieces, tmp_path):
    model, tokenizer = make(make_marian, pieces, tmp_path)
    pipeline("translation_en_to_de", model=model, tokenizer=tokenizer, device="cpu")
    with pytest.raises(ValueError, match=r"src_lang must be .en.: .* en to de, got .fr."):
        pipeline("translation_fr_to_de", model=model, tokenizer=tokenizer, device="cpu")
    translate = TranslationPipeline(model, tokenizer)
    for code in ("de_DE", "eng", "", 3):
        with pytest.raises(ValueError, match=rf"src_lang must be 'en': .* got {code!r}"):
            translate(TEXTS[0], src_lang=code)
    for code in ("en-US", "en_XX", "EN"):
        assert translate(TEXTS[0], src_lang=code) == translate(TEXTS[0])
    # a model for several languages, which are chosen by a token in the text
    tokenizer.target_lang = "ROMANCE"
    pipeline("translation_en_to_fr", model=model, tokenizer=tokenizer, device="cpu")


@pytest.mark.parametrize("task", ["translation_en", "translation_en_de", "translation_to_de"])
def test_a_task_without_two_languages_is_refused(task, pieces, tmp_path):
    model, tokenizer = make(make_marian, pieces, tmp_path)
    with pytest.raises(ValueError, match=f"translation_XX_to_YY, got '{task}'"):
        pipeline(task, model=model, tokenizer=tokenizer, device="cpu")


@pytest.mark.parametrize("task", ["translation", "translation_en_to_de"])
def test_a_task_without_a_model_is_refused(task):
    with pytest.raises(ValueError, match="model must be given"):
        pipeline(task)


def test_prefix_and_search_of_a_task_come_from_the_configuration(pieces, tmp_path):
    model, tokenizer = make(make_t5, pieces, tmp_path)
    texts = [PREFIX + text for text in TEXTS]
    translate = pipeline("translation_en_to_de", model=model, tokenizer=tokenizer, device="cpu")
    length = {"max_new_tokens": SEARCH["max_new_tokens"]}
    assert texts_of(translate(TEXTS, **length)) == by_hand(model, tokenizer, texts, {}, num_beams=3)
    assert texts_of(translate(TEXTS, **SEARCH)) == by_hand(model, tokenizer, texts, {})
    # the configuration is as it was
    assert model.config.task_specific_params["translation_en_to_de"]["prefix"] == PREFIX


def test_the_default_search_is_that_of_version_4(pieces, tmp_path):
    model, tokenizer = make(make_bart, pieces, tmp_path)
    translate = TranslationPipeline(model, tokenizer)
    # translations that end at the limit only
    model.generation_config.update(suppress_tokens=[2], forced_eos_token_id=None)
    model.config.max_position_embeddings = 300
    positions = torch.nn.Parameter(torch.randn(302, 16))
    for stack in (model.get_encoder(), model.get_decoder()):
        stack.embed_positions.weight = positions
    wished = {"num_beams": 4, "max_new_tokens": 256}
    expected = by_hand(model, tokenizer, TEXTS, {}, **wished)
    assert max(map(len, expected)) > 100
    assert texts_of(translate(TEXTS)) == expected
    # settings of the call, of a given configuration and of the model come first
    expected = by_hand(model, tokenizer, TEXTS, {}, num_beams=4, max_new_tokens=None, max_length=9)
    assert texts_of(translate(TEXTS, max_length=9)) == expected
    given = GenerationConfig(max_length=9, num_beams=1, suppress_tokens=[2])
    expected = by_hand(model, tokenizer, TEXTS, {}, num_beams=1, max_new_tokens=None, max_length=9)
    assert texts_of(translate(TEXTS, generation_config=given)) == expected
    model.generation_config.update(max_length=9, num_beams=1)
    assert texts_of(translate(TEXTS)) == expected


def test_the_default_search_ends_where_the_positions_end(pieces, tmp_path):
    model, tokenizer = make(make_bart, pieces, tmp_path)
    model.generation_config.update(suppress_tokens=[2], forced_eos_token_id=None)
    expected = by_hand(model, tokenizer, TEXTS, {}, num_beams=4, max_new_tokens=40)
    assert texts_of(TranslationPipeline(model, tokenizer)(TEXTS)) == expected


def test_results_have_text_or_token_ids_or_both(pieces, tmp_path):
    model, tokenizer = make(make_marian, pieces, tmp_path)
    translate = TranslationPipeline(model, tokenizer, **SEARCH)
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    ids = model.generate(**inputs, **SEARCH)[0]
    (both,) = translate(TEXTS[0], return_tensors=True, return_text=True)
    assert both.keys() == {"translation_text", "translation_token_ids"}
    assert torch.equal(both["translation_token_ids"], ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == both["translation_text"]
    (tensors,) = translate(TEXTS[0], return_tensors=True)
    assert tensors.keys() == {"translation_token_ids"}
    (text,) = translate(TEXTS[0], return_tensors=False)
    assert text == {"translation_text": both["translation_text"]}
    # an empty text has no tokens
    assert len(translate("", return_tensors=True)[0]["translation_token_ids"]) == 0


def test_a_long_text_is_truncated_on_request(pieces, tmp_path):
    model, tokenizer = make(make_marian, pieces, tmp_path)
    translate = TranslationPipeline(model, tokenizer, **SEARCH)
    text = " ".join(TEXTS * 4)
    with pytest.raises(ValueError, match="at most 40 tokens"):
        translate(text)
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=40)
    assert inputs["input_ids"].shape == (1, 40)
    expected = tokenizer.decode(model.generate(**inputs, **SEARCH)[0], skip_special_tokens=True)
    assert translate(text, truncation=True) == [{"translation_text": expected}]


def test_a_stop_sequence_ends_a_translation(pieces, tmp_path):
    model, tokenizer = make(make_marian, pieces, tmp_path)
    translate = TranslationPipeline(model, tokenizer, **SEARCH)
    (whole,) = translate(TEXTS[0], return_tensors=True)
    word = tokenizer.decode(whole["translation_token_ids"][3:4])
    first = tokenizer.encode(word, add_special_tokens=False)[0]
    (cut,) = translate(TEXTS[0], return_tensors=True, stop_sequence=word, num_beams=1)
    expected = model.generate(
        **tokenizer(TEXTS[0], return_tensors="pt"), **{**SEARCH, "num_beams": 1}, eos_token_id=first
    )
    assert torch.equal(cut["translation_token_ids"], expected[0])
    with pytest.raises(ValueError, match="stop_sequence must have at least one token, got ''"):
        translate(TEXTS[0], stop_sequence="")


def reverse_of(tokenizer, folder):
    """Return the tokenizer of the other direction, with the files of both vocabularies swapped."""
    tokenizer.save_pretrained(folder)
    if isinstance(tokenizer, FSMTTokenizer):
        return FSMTTokenizer(
            langs=["de", "en"],
            src_vocab_file=str(folder / "vocab-tgt.json"),
            tgt_vocab_file=str(folder / "vocab-src.json"),
            merges_file=str(folder / "merges.txt"),
        )
    return MarianTokenizer(
        source_spm=str(folder / "target.spm"),
        target_spm=str(folder / "source.spm"),
        vocab=str(folder / "target_vocab.json"),
        target_vocab_file=str(folder / "vocab.json"),
        source_lang="de",
        target_lang="en",
        separate_vocabs=True,
    )


@pytest.mark.parametrize("maker", [make_marian_of_two, make_fsmt_of_two])
def test_source_and_target_have_their_own_vocabularies(maker, pieces, tmp_path):
    model, tokenizer = make(maker, pieces, tmp_path)
    reverse = reverse_of(tokenizer, tmp_path)
    translate = TranslationPipeline(model, tokenizer, **SEARCH)
    # Moses splits "l'anno" in English, but not in German
    texts, targets = TEXTS, ["das Haus bellt", "l'anno ist klein", "another"]
    source_ids, target_ids = translate.encode_pairs(texts, targets)
    assert source_ids == tokenizer(texts)["input_ids"]
    assert target_ids == reverse(targets)["input_ids"]
    scored = translate.score(texts, targets)[0]["token_log_probabilities"]
    text = "".join(token for token, _ in scored[:-1]).replace("</w>", " ").replace("▁", " ")
    assert text.split() == targets[0].split()
    (pairs,) = translate.align(texts[:1], targets[:1])
    assert [word for _, word in pairs] == [0, 1, 2]
    assert all(word < len(texts[0].split()) for word, _ in pairs)
    (whole,) = translate(TEXTS[0], return_tensors=True, return_text=True, num_beams=1)
    word = whole["translation_text"].split()[-1]
    ids = reverse(word, add_special_tokens=False)["input_ids"]
    (cut,) = translate(TEXTS[0], return_tensors=True, stop_sequence=word, num_beams=1)
    whole_ids = whole["translation_token_ids"].tolist()
    assert cut["translation_token_ids"].tolist() == whole_ids[: whole_ids.index(ids[0]) + 1]


def test_a_pipeline_goes_to_another_process_after_its_use(pieces, tmp_path):
    model, tokenizer = make(make_marian_of_two, pieces, tmp_path)
    translate = TranslationPipeline(model, tokenizer, **SEARCH)
    settings = {"forbidden_terms": ["house"], "target_prefix": "the", "return_scores": True}
    expected = translate(TEXTS, **settings)
    copied = pickle.loads(pickle.dumps(translate))
    assert copied(TEXTS, **settings) == expected == translate(TEXTS, **settings)


def test_the_library_gets_plain_numbers(pieces, tmp_path):
    model, tokenizer = make(make_marian, pieces, tmp_path)
    translate = TranslationPipeline(model, tokenizer)
    # the library refuses a number of NumPy here
    found = translate(TEXTS, **SEARCH, no_repeat_ngram_size=np.int64(2))
    assert found == translate(TEXTS, **SEARCH, no_repeat_ngram_size=2)
