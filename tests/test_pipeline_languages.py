"""The translation pipeline with models of the library: languages, prefixes, form of the results."""

import json

import pytest
import sentencepiece
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartTokenizer,
    FSMTConfig,
    FSMTForConditionalGeneration,
    FSMTTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    NllbTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
    pipeline,
)

from vanilla_transformer import TranslationPipeline

TEXTS = ["the small cat sleeps in the house", "dogs bark at the small cat", "a house is small"]
SENTENCES = [*TEXTS, "das Haus ist klein", "die kleine Katze schläft", "Hunde bellen"]
SEARCH = {"max_new_tokens": 7, "num_beams": 2}
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    # weights so large that random models write different words
    "init_std": 1.0,
}
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
PREFIX = "translate English to German: "


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Pieces of a sentencepiece model and its file."""
    folder = tmp_path_factory.mktemp("pieces")
    folder.joinpath("text").write_text("\n".join([*SENTENCES, PREFIX] * 3))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "spm"),
        vocab_size=60,
        hard_vocab_limit=False,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    scores = [(model.id_to_piece(i), model.get_score(i)) for i in range(4, model.get_piece_size())]
    return folder / "spm.model", scores


def write_json(path, value):
    path.write_text(json.dumps(value))
    return str(path)


def numbered(tokens):
    return {token: index for index, token in enumerate(tokens)}


def make_marian(pieces, folder):
    file, scores = pieces
    vocab = numbered(["</s>", "<unk>", *(piece for piece, _ in scores), "<pad>"])
    tokenizer = MarianTokenizer(
        source_spm=str(file),
        target_spm=str(file),
        vocab=write_json(folder / "vocab.json", vocab),
        source_lang="en",
        target_lang="de",
    )
    pad = vocab["<pad>"]
    config = MarianConfig(
        vocab_size=len(vocab),
        pad_token_id=pad,
        eos_token_id=0,
        decoder_start_token_id=pad,
        forced_eos_token_id=0,
        **SIZES,
    )
    return MarianMTModel(config), tokenizer


def make_fsmt(pieces, folder):
    letters = sorted(set("".join(SENTENCES)) - {" "})
    tokens = [*SPECIAL, *letters, *(f"{letter}</w>" for letter in letters)]
    vocab = write_json(folder / "vocab.json", numbered(tokens))
    merges = folder / "merges.txt"
    merges.write_text("#version: 0.2\n")
    tokenizer = FSMTTokenizer(
        langs=["en", "de"],
        src_vocab_file=vocab,
        tgt_vocab_file=vocab,
        merges_file=str(merges),
    )
    config = FSMTConfig(
        langs=["en", "de"],
        src_vocab_size=len(tokens),
        tgt_vocab_size=len(tokens),
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        **SIZES,
    )
    return FSMTForConditionalGeneration(config), tokenizer


def make_bart(pieces, folder):
    letters = sorted(set("".join(SENTENCES)) | {"Ġ", "Ã", "¤"})
    tokens = [*SPECIAL, *letters, "<mask>"]
    tokenizer = BartTokenizer(vocab=numbered(tokens), merges=[])
    config = BartConfig(vocab_size=len(tokens), pad_token_id=1, eos_token_id=2, **SIZES)
    return BartForConditionalGeneration(config), tokenizer


def make_t5(pieces, folder):
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces[1]]
    tokenizer = T5Tokenizer(vocab=scores, extra_ids=0)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        initializer_factor=20.0,
        task_specific_params={"translation_en_to_de": {"prefix": PREFIX, "num_beams": 3}},
    )
    return T5ForConditionalGeneration(config), tokenizer


def make_m2m(pieces, folder):
    file, scores = pieces
    vocab = numbered([*SPECIAL, *(piece for piece, _ in scores)])
    tokenizer = M2M100Tokenizer(write_json(folder / "vocab.json", vocab), str(file))
    config = M2M100Config(
        vocab_size=max(tokenizer.lang_code_to_id.values()) + 1,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        **SIZES,
    )
    return M2M100ForConditionalGeneration(config), tokenizer


def make_nllb(pieces, folder):
    letters = sorted(set("".join(SENTENCES)) - {" "} | {"▁"})
    tokenizer = NllbTokenizer(vocab=numbered([*SPECIAL, *letters]), merges=[])
    config = M2M100Config(
        vocab_size=len(tokenizer),
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        **SIZES,
    )
    model = M2M100ForConditionalGeneration(config)
    # a random model would write languages, of which there are more than letters
    model.get_input_embeddings().weight.data[len(letters) + len(SPECIAL) :] *= 0.2
    return model, tokenizer


def make_mbart(pieces, folder):
    tokenizer = MBart50Tokenizer(vocab=[*((token, 0.0) for token in SPECIAL), *pieces[1]])
    config = MBartConfig(
        vocab_size=len(tokenizer),
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        **SIZES,
    )
    return MBartForConditionalGeneration(config), tokenizer


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


def by_hand(model, tokenizer, texts, **search):
    """Translate one text at a time as the documentation of the models says."""
    results = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        ids = model.generate(**inputs, **{**SEARCH, **search})
        results.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    return results


def texts_of(results):
    return [result["translation_text"] for result in results]


@pytest.mark.parametrize("name", ONE_PAIR)
def test_a_model_of_one_pair_translates_as_by_hand(name, pieces, tmp_path):
    model, tokenizer = make(ONE_PAIR[name], pieces, tmp_path)
    translate = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")
    expected = by_hand(model, tokenizer, TEXTS)
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
        tokenizer.src_lang = source
        # M2M100's language tokens are outside of its vocabulary
        ids = getattr(tokenizer, "lang_code_to_id", None)
        forced = ids[code] if ids else tokenizer.convert_tokens_to_ids(code)
        expected[code] = by_hand(model, tokenizer, TEXTS, forced_bos_token_id=forced)
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
    assert texts_of(translate(TEXTS, **length)) == by_hand(model, tokenizer, texts, num_beams=3)
    assert texts_of(translate(TEXTS, **SEARCH)) == by_hand(model, tokenizer, texts)
    # the configuration is as it was
    assert model.config.task_specific_params["translation_en_to_de"]["prefix"] == PREFIX


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


def test_a_long_text_is_cut_if_asked(pieces, tmp_path):
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
