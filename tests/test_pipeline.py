"""The translation pipeline: text in, text out, around the model's own search."""

import copy
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    pipeline,
)
from transformers.pipelines.pt_utils import KeyDataset
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer import (
    TranslationPipeline,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerTokenizer,
)
from vanilla_transformer import generation_vanilla_transformer as generation
from vanilla_transformer import pipeline_vanilla_transformer as pipeline_module
from vanilla_transformer.batches_vanilla_transformer import batches_by_length
from vanilla_transformer.changes_vanilla_transformer import evaluating
from vanilla_transformer.kernels_vanilla_transformer import Int8Linear, PackedLinear
from vanilla_transformer.pipeline_vanilla_transformer import TEXTS_PER_WINDOW, join_translations


@pytest.fixture(scope="module")
def tokenizer() -> VanillaTransformerTokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer) -> VanillaTransformerForConditionalGeneration:
    return make_model(tokenizer)


@pytest.fixture
def translate(model, tokenizer) -> TranslationPipeline:
    return TranslationPipeline(model, tokenizer, device="cpu")


def alone(model, tokenizer, text: str, **search) -> list[str]:
    """Translate one text with the model's own search."""
    ids = model.generate(**tokenizer(text, return_tensors="pt"), **search)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def texts_of(results: list[dict[str, str]]) -> list[str]:
    return [result["translation_text"] for result in results]


def test_the_translation_of_a_text_is_the_models(translate, model, tokenizer):
    found = alone(model, tokenizer, TEXTS[0])
    assert found[0]
    assert translate(TEXTS[0]) == [{"translation_text": found[0]}]


@pytest.mark.parametrize(
    "batching", [{}, {"batch_size": 1}, {"batch_size": 2}, {"tokens_per_batch": 30}]
)
def test_a_list_keeps_its_order_however_it_is_batched(translate, model, tokenizer, batching):
    expected = [alone(model, tokenizer, text)[0] for text in TEXTS]
    assert len(set(expected)) == len(TEXTS)
    assert texts_of(translate(TEXTS, **batching)) == expected
    assert texts_of(translate(tuple(reversed(TEXTS)), **batching)) == expected[::-1]


def test_texts_of_similar_length_are_searched_together(translate, model, monkeypatch):
    shapes = []
    generate = type(model).generate

    def recording(self, input_ids, **search):
        shapes.append(tuple(input_ids.shape))
        return generate(self, input_ids=input_ids, **search)

    monkeypatch.setattr(type(model), "generate", recording)
    translate(TEXTS, batch_size=2)
    lengths = sorted((len(ids) for ids in translate.tokenizer(TEXTS).input_ids), reverse=True)
    assert shapes == [(2, lengths[0]), (2, lengths[2]), (1, lengths[4])]


def test_workers_and_numbers_of_numpy_are_accepted(translate):
    expected = translate(TEXTS)
    assert translate(TEXTS, num_workers=2, batch_size=np.int64(2)) == expected


@given(
    st.dictionaries(st.integers(0, 99), st.integers(1, 20), max_size=30),
    st.none() | st.integers(1, 5),
    st.integers(1, 60),
)
def test_batches_hold_every_text_once_and_keep_their_bounds(lengths, batch_size, tokens_per_batch):
    batches = batches_by_length(lengths, batch_size, tokens_per_batch)
    assert sorted(itertools.chain(*batches)) == sorted(lengths)
    for batch in batches:
        assert batch_size is None or len(batch) <= batch_size
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= tokens_per_batch


@pytest.mark.parametrize(
    ("settings", "most_texts"), [({}, 4), ({"num_beams": 8}, 2), ({"required_terms": ["a"]}, 2)]
)
def test_a_batch_has_no_more_logits_than_fit_into_memory(
    translate, model, tokenizer, monkeypatch, settings, most_texts
):
    assert len(tokenizer("a", add_special_tokens=False).input_ids) == 1
    texts = TEXTS * 2
    expected = translate(texts, **settings)
    sizes = []
    generate = type(model).generate

    def recording(self, input_ids, **search):
        sizes.append(len(input_ids))
        return generate(self, input_ids=input_ids, **search)

    monkeypatch.setattr(type(model), "generate", recording)
    assert translate(texts, **settings) == expected
    assert sizes == [10]
    monkeypatch.setattr(pipeline_module, "MOST_LOGITS_PER_STEP", 4 * 4 * len(tokenizer) + 1)
    sizes.clear()
    assert translate(texts, **settings) == expected
    assert max(sizes) == most_texts
    sizes.clear()
    translate(texts, batch_size=1, **settings)
    assert sizes == [1] * 10
    # a text is a batch of its own even if its logits are too many
    monkeypatch.setattr(pipeline_module, "MOST_LOGITS_PER_STEP", 1)
    sizes.clear()
    assert translate(texts, **settings) == expected
    assert sizes == [1] * 10


def test_a_generator_is_read_only_as_far_as_needed(translate):
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield TEXTS[number % len(TEXTS)]

    results = translate(endless(), num_beams=1)
    assert read == []
    first = [result[0] for result in itertools.islice(results, 3)]
    assert len(read) == TEXTS_PER_WINDOW
    assert first == translate(TEXTS[:3], num_beams=1)
    read.clear()
    next(translate(endless(), batch_size=1))
    assert read == [0]


def test_datasets_stream_too(translate):
    rows = datasets.Dataset.from_list([{"en": text, "de": ""} for text in TEXTS])
    expected = [[result] for result in translate(TEXTS)]
    for texts in (KeyDataset(rows, "en"), rows["en"], (row["en"] for row in rows)):
        results = translate(texts)
        assert not isinstance(results, list)
        assert list(results) == expected


def test_an_empty_text_has_an_empty_translation(translate):
    assert translate("") == [{"translation_text": ""}]
    assert translate(" \n") == [{"translation_text": ""}]
    results = translate(["", TEXTS[0], ""])
    assert texts_of(results) == ["", *texts_of(translate(TEXTS[0])), ""]
    assert translate([]) == []
    assert list(translate(iter([]))) == []


def test_each_translation_is_decoded_once(translate, monkeypatch):
    num_decoded = []
    decode = translate.tokenizer.batch_decode

    def counted(ids, **settings):
        num_decoded.append(len(ids))
        return decode(ids, **settings)

    monkeypatch.setattr(translate.tokenizer, "batch_decode", counted)
    assert len(translate(TEXTS)) == sum(num_decoded) == len(TEXTS)


def test_several_translations_of_each_text_come_as_lists(translate, model, tokenizer):
    results = translate([TEXTS[1], "", TEXTS[0]], num_return_sequences=3)
    assert [len(result) for result in results] == [3, 3, 3]
    assert texts_of(results[2]) == alone(model, tokenizer, TEXTS[0], num_return_sequences=3)
    assert texts_of(results[1]) == ["", "", ""]
    assert texts_of(translate(TEXTS[1], num_return_sequences=3)) == texts_of(results[0])


def test_the_model_may_set_the_number_of_translations(tokenizer):
    model = make_model(tokenizer)
    model.generation_config.num_return_sequences = 2
    translate = TranslationPipeline(model, tokenizer, device="cpu")
    shorter = GenerationConfig(num_beams=3, max_new_tokens=2)
    for search in ({}, {"generation_config": shorter}):
        results = translate([*TEXTS, ""], **search)
        assert [len(result) for result in results] == [2] * (len(TEXTS) + 1)
        for text, result in zip(TEXTS, results, strict=False):
            assert texts_of(result) == alone(model, tokenizer, text, **search)
    assert len(translate(TEXTS[0], num_return_sequences=3)) == 3


@pytest.mark.parametrize(
    "search",
    [
        {"num_beams": 1},
        {"length_penalty_alpha": 2.0},
        {"max_extra_tokens": 0},
        {"max_new_tokens": 2},
        {"generation_config": GenerationConfig(max_new_tokens=2)},
        {"num_beams": 1, "return_dict_in_generate": True, "output_scores": True},
    ],
)
def test_settings_reach_the_search(translate, model, tokenizer, search):
    plain = {name: value for name, value in search.items() if name != "return_dict_in_generate"}
    plain.pop("output_scores", None)
    expected = [alone(model, tokenizer, text, **plain)[0] for text in TEXTS]
    assert expected != texts_of(translate(TEXTS))
    assert texts_of(translate(TEXTS, **search)) == expected
    of_every_call = TranslationPipeline(model, tokenizer, device="cpu", **search)
    assert texts_of(of_every_call(TEXTS)) == expected


@pytest.mark.parametrize("settings", [{}, {"return_scores": True}, {"return_alignment": True}])
def test_a_model_that_torch_has_compiled_translates(model, tokenizer, translate, settings):
    compiled = torch.compile(model, backend="eager")
    translate_compiled = pipeline("translation", model=compiled, tokenizer=tokenizer, device="cpu")
    assert translate_compiled(TEXTS[:1], **settings) == translate(TEXTS[:1], **settings)


def test_a_setting_of_the_call_wins_over_one_of_the_pipeline(model, tokenizer, translate):
    greedy = TranslationPipeline(model, tokenizer, device="cpu", num_beams=1)
    assert greedy(TEXTS) != translate(TEXTS)
    assert greedy(TEXTS, num_beams=4) == translate(TEXTS)


def test_int8_is_a_setting_of_the_search(translate, model, tokenizer, monkeypatch):
    kinds = []
    begin = generation.begin_decoding

    def recording(engine, *args):
        kinds.append(type(engine.vocabulary))
        return begin(engine, *args)

    monkeypatch.setattr(generation, "begin_decoding", recording)
    translate(TEXTS[0], int8=True)
    TranslationPipeline(model, tokenizer, device="cpu", int8=True)(TEXTS[0])
    translate(TEXTS[0])
    assert kinds == [Int8Linear, Int8Linear, PackedLinear]


def test_a_misspelt_setting_is_refused(translate):
    with pytest.raises(ValueError, match="num_beam"):
        translate(TEXTS[0], num_beam=2)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        TranslationPipeline(translate.model, translate.tokenizer, batch_size=0)(TEXTS)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        translate(TEXTS, batch_size=0)


def test_an_unpaired_surrogate_is_refused(translate):
    with pytest.raises(ValueError, match=r"an unpaired surrogate at index 5: 'dogs \\ud83d'"):
        translate(["dogs", "dogs \ud83d"])


@pytest.mark.parametrize("inputs", [None, 5, b"bytes", {"en": "text"}])
def test_an_input_that_is_not_a_text_is_refused_by_type(translate, inputs):
    with pytest.raises(TypeError, match=f"must be a string.*got {type(inputs).__name__}"):
        translate(inputs)


@pytest.mark.parametrize("wrong", [None, 5, ["nested"], {"en": "text"}])
def test_a_list_item_that_is_not_a_text_is_refused_by_type(translate, wrong):
    with pytest.raises(TypeError, match=f"must be a string, got {type(wrong).__name__}"):
        translate(["text", wrong])
    with pytest.raises(TypeError, match=f"must be a string, got {type(wrong).__name__}"):
        next(translate(iter([wrong])))


def test_a_text_longer_than_the_learned_positions_is_refused(tokenizer):
    model = make_model(tokenizer, position_encoding="learned", max_position_embeddings=8)
    translate = TranslationPipeline(model, tokenizer, device="cpu")
    text = "dogs " * 20
    with pytest.raises(ValueError, match=r"at most 8 tokens.*got \d+: 'dogs dogs"):
        translate(["dogs", text])
    assert translate("dogs")


def test_a_token_outside_of_the_vocabulary_is_named_with_its_text(model):
    tokenizer = make_tokenizer()
    translate = TranslationPipeline(model, tokenizer, device="cpu")
    tokenizer.add_tokens(["zebra"])
    size = model.config.vocab_size
    with pytest.raises(ValueError, match=rf"vocabulary size {size}, got {size}: 'a zebra runs'"):
        translate(["a dog runs", "a zebra runs"])


def test_a_text_is_not_truncated_without_a_maximum_length(translate):
    text = "dogs " * 30
    assert translate(text, truncation=True, max_new_tokens=3) == translate(text, max_new_tokens=3)


def test_sinusoids_translate_a_text_of_any_length(translate, model):
    text = "dogs " * (model.config.max_position_embeddings + 1)
    assert len(translate.tokenizer(text).input_ids) > model.config.max_position_embeddings
    assert len(translate(text, num_beams=1, max_new_tokens=3)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_token_id": 5}, "pad_token_id of the tokenizer is 0, of the model 5"),
        ({"eos_token_id": 7}, "eos_token_id of the tokenizer is 2, of the model 7"),
        ({"eos_token_id": [7, 9]}, r"eos_token_id of the tokenizer is 2, of the model \[7, 9\]"),
        ({"vocab_size": 100}, r"ids of the tokenizer go up to \d+, those of the model to 99"),
    ],
)
def test_the_tokenizer_of_another_model_is_refused(tokenizer, options, message):
    model = make_model(tokenizer, **options)
    with pytest.raises(ValueError, match=message):
        TranslationPipeline(model, tokenizer, device="cpu")


def test_a_tokenizer_may_have_no_eos_token(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.eos_token = None
    assert TranslationPipeline(make_model(tokenizer), other, device="cpu")("dogs")


def test_one_of_several_end_tokens_is_enough(tokenizer):
    model = make_model(tokenizer, eos_token_id=[2, 5])
    assert TranslationPipeline(model, tokenizer, device="cpu")("dogs")


def test_a_model_that_cannot_translate_is_refused(tokenizer, model):
    with pytest.raises(ValueError, match=r"encoder-decoder .* got VanillaTransformerModel"):
        TranslationPipeline(VanillaTransformerModel(model.config), tokenizer)
    decoder = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"encoder-decoder .* got GPT2LMHeadModel"):
        TranslationPipeline(decoder, tokenizer)
    with pytest.raises(ValueError, match="tokenizer must be given"):
        TranslationPipeline(model)


def test_a_model_in_training_mode_translates_without_dropout_and_stays_in_it(tokenizer):
    model = make_model(tokenizer, dropout=0.5)
    translate = TranslationPipeline(model, tokenizer, device="cpu")
    expected = translate(TEXTS)
    model.train()
    assert translate(TEXTS) == expected
    assert model.training
    with pytest.raises(ValueError, match="num_beam"):
        translate(TEXTS, num_beam=2)
    assert model.training
    model.get_encoder().eval()
    frozen = [module.training for module in model.modules()]
    assert set(frozen) == {True, False}
    assert translate(TEXTS) == expected
    assert [module.training for module in model.modules()] == frozen


def test_a_tokenizer_that_pads_on_the_left_changes_no_translation(translate, model, tokenizer):
    left = copy.deepcopy(tokenizer)
    left.padding_side = "left"
    texts = [text for text in TEXTS if text]
    assert TranslationPipeline(model, left)(texts) == translate(texts)
    assert left.padding_side == "left"


def test_the_library_builds_it_under_the_removed_name(model, tokenizer, translate, tmp_path):
    built = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")
    assert type(built) is TranslationPipeline
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = pipeline("translation", model=str(tmp_path), device="cpu", num_beams=4)
    assert type(loaded) is TranslationPipeline
    assert built(TEXTS) == loaded(TEXTS) == translate(TEXTS)


@pytest.mark.parametrize("task", ["summarization", "text2text-generation"])
def test_other_removed_names_stay_removed(model, tokenizer, task):
    with pytest.raises(KeyError, match=task):
        pipeline(task, model=model, tokenizer=tokenizer)


def test_a_translation_model_of_the_library_gets_its_pipeline_back(tokenizer):
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=16,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    marian = MarianMTModel(config).eval()
    translate = pipeline("translation", model=marian, tokenizer=tokenizer, device="cpu")
    expected = [alone(marian, tokenizer, text, max_new_tokens=6)[0] for text in TEXTS[:2]]
    assert texts_of(translate(TEXTS[:2], max_new_tokens=6, num_beams=1)) == expected
    with pytest.raises(ValueError, match="at most 16 tokens"):
        translate("dogs " * 30)


def test_threads_that_translate_with_one_model_leave_it_in_the_mode_it_had(small_model):
    model = small_model()
    model.train()
    model.model.encoder.eval()
    before = [module.training for module in model.modules()]
    modes = []

    def enter(seconds):
        with evaluating(model):
            time.sleep(seconds)
            modes.append(model.training)

    # each thread begins before the previous one has ended
    threads = [Thread(target=enter, args=(seconds,)) for seconds in (0.2, 0.1, 0.3)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert modes == [False] * 3
    assert [module.training for module in model.modules()] == before


def test_threads_that_truncate_and_threads_that_do_not_share_a_tokenizer(model, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = 3
    translate = TranslationPipeline(model, tokenizer, device="cpu")
    texts = TEXTS[:1] * 50
    whole = tokenizer(texts)["input_ids"]
    truncated = [ids[:2] + ids[-1:] for ids in whole]
    assert len(whole[0]) > 3

    def encode(truncates):
        return [translate.encode_pairs(texts, texts, truncation=truncates) for _ in range(100)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(encode, [False, True] * 2))
    assert found == [[(whole, whole)] * 100, [(truncated, whole)] * 100] * 2


@pytest.mark.parametrize("count", [0, -1, 2.0, "2", True, []])
def test_the_number_of_translations_must_be_an_integer(translate, count):
    with pytest.raises(ValueError, match="num_return_sequences must be an integer of at least"):
        translate("dogs", num_return_sequences=count)


def test_the_default_number_of_translations_is_that_of_the_model(translate):
    assert translate("dogs", num_return_sequences=None) == translate("dogs")


LONG = "  The small cat sleeps.  Dogs, e.g. the small dog, sleep too.\n\nIs it a house?\tYes. "


def test_sentences_of_a_text_are_translated_alone_and_keep_the_space_between_them(
    translate, model, tokenizer
):
    sentences = [
        "The small cat sleeps.",
        "Dogs, e.g. the small dog, sleep too.",
        "Is it a house?",
        "Yes.",
    ]
    one, two, three, four = [alone(model, tokenizer, text)[0].strip() for text in sentences]
    found = translate(["", LONG, "\n \n", "dogs"], split_sentences="en")
    assert texts_of(found) == [
        "",
        f"  {one}  {two}\n\n{three}\t{four} ",
        "\n \n",
        alone(model, tokenizer, "dogs")[0].strip(),
    ]
    assert translate(LONG, split_sentences=True) == [found[1]]
    assert list(translate((text for text in [LONG]), split_sentences=True)) == [[found[1]]]


@pytest.mark.parametrize(
    ("parts", "translations", "expected"),
    [
        (["你好。", "我来了。 ", "再见"], ["Hello.", "I am here.", "Bye"], "Hello. I am here. Bye"),
        (["你好。", "\n", "再见。"], ["Hello.", "Bye."], "Hello.\nBye."),
        (["你好。", "啊。", "再见。"], ["Hello.", "", "Bye."], "Hello. Bye."),
        (["“你好。”", "他走了。"], ["“Hello.”", "He left."], "“Hello.” He left."),
        (["こんにちは。", "元気です。"], ["你好。", "我很好。"], "你好。我很好。"),
        (["你好。", "再见。"], ["안녕하세요.", "안녕."], "안녕하세요. 안녕."),
        # the text itself lacks the space, or the splitter is wrong
        (["Use Node.", "JS now."], ["Nutze Node.", "JS jetzt."], "Nutze Node.JS jetzt."),
        (["안녕.", "안녕."], ["Hi.", "Bye."], "Hi.Bye."),
    ],
)
def test_sentences_of_a_script_without_spaces_get_a_space_in_another_script(
    parts, translations, expected
):
    assert "".join(join_translations(parts, translations)) == expected


def test_the_sentences_of_a_text_without_spaces_are_translated_with_spaces(
    translate, model, tokenizer
):
    one, two = (alone(model, tokenizer, text)[0].strip() for text in ("你好。", "我来了。"))
    assert texts_of(translate(["你好。我来了。"], split_sentences="zh")) == [f"{one} {two}"]


def test_a_model_whose_outputs_are_tuples_gives_the_same_results(translate, model, tokenizer):
    tuple_model = copy.deepcopy(model)
    tuple_model.config.return_dict = False
    translate_with_tuples = TranslationPipeline(tuple_model, tokenizer, device="cpu")
    for engine in ("required", "off"):
        settings = {"return_scores": True, "return_alignment": True, "engine": engine}
        found = translate_with_tuples(TEXTS, **settings)
        assert found == translate(TEXTS, **settings)


def test_scores_of_sentences_are_added(translate):
    (found,) = translate(LONG, split_sentences=True, return_scores=True)
    assert len(found["sentences"]) == 4
    total = sum(it["log_probability"] for it in found["sentences"])
    assert found["log_probability"] == pytest.approx(total)
    mean = sum(it["score"] for it in found["sentences"]) / 4
    assert found["score"] == pytest.approx(mean)
    (nothing,) = translate("", split_sentences=True, return_scores=True)
    assert nothing == {
        "translation_text": "",
        "log_probability": 0.0,
        "score": 0.0,
        "sentences": [],
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split_sentences": "English"}, "split_sentences must be the language of the texts in tw"),
        ({"split_sentences": 3}, "split_sentences must be the language of the texts in two letter"),
        ({"num_return_sequences": 2}, "num_return_sequences must be 1 with split_sentences"),
        ({"return_tensors": True}, "return_tensors must be false with split_sentences"),
        ({"return_text": False}, "return_text must be true with split_sentences"),
    ],
)
def test_settings_that_splitting_does_not_allow_are_refused(translate, settings, message):
    with pytest.raises(ValueError, match=message):
        translate(LONG, **{"split_sentences": True, **settings})
    if "return_tensors" in settings:
        # as a setting of the pipeline
        pipe = TranslationPipeline(translate.model, translate.tokenizer, **settings)
        with pytest.raises(ValueError, match=message):
            pipe(LONG, split_sentences=True)


def test_splitting_without_its_package_is_refused(translate, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(
        ValueError, match="split_sentences needs sentencex, which is not installed: pip install"
    ):
        translate(LONG, split_sentences=True)
