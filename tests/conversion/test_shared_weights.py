"""Models of the library search on the engine with their own weights, as these are at the time."""

import copy

import library_models
import pytest
import torch
from library_models import KINDS, SENTENCES, make_bart, make_marian
from transformers import LogitsProcessorList

from vanilla_transformer import TranslationPipeline
from vanilla_transformer import engine_checks_vanilla_transformer as engine_checks
from vanilla_transformer.conversion import shared_weights
from vanilla_transformer.conversion.shared_weights import SharedConversion

SEARCH = {"max_new_tokens": 7, "num_beams": 3}
MAKERS = {name: KINDS[name] for name in ("marian", "fsmt", "m2m100", "nllb")}


@pytest.fixture(params=MAKERS)
def pair(request, pieces, tmp_path):
    torch.manual_seed(3)
    maker, languages = MAKERS[request.param]
    model, tokenizer = maker(pieces, tmp_path)
    return model.eval(), tokenizer, languages


def by_hand(model, tokenizer, languages, **search):
    texts = library_models.by_hand(model, tokenizer, SENTENCES, languages, **{**SEARCH, **search})
    return [{"translation_text": text} for text in texts]


@pytest.mark.parametrize(
    "search",
    [
        {},
        {"num_beams": 1},
        {"length_penalty": 0.3, "early_stopping": True},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
        {"forced_bos_token_id": 9, "min_length": 5},
    ],
)
def test_the_engine_gives_the_translations_of_the_library(pair, searched, search):
    model, tokenizer, languages = pair
    expected = by_hand(model, tokenizer, languages, **search)
    assert not searched
    translate = TranslationPipeline(model, tokenizer, **languages)
    assert translate(SENTENCES, **{**SEARCH, **search}, engine="required") == expected
    assert searched


def test_sampling_draws_what_the_library_draws(pair, searched):
    model, tokenizer, languages = pair
    search = {"do_sample": True, "num_beams": 1, "max_new_tokens": 7}
    torch.manual_seed(5)
    expected = by_hand(model, tokenizer, languages, **search)[0]
    torch.manual_seed(5)
    (found,) = TranslationPipeline(model, tokenizer, **languages)(SENTENCES[0], **search)
    assert searched
    assert found == expected


def test_the_configuration_of_the_model_sets_the_search(pair, searched):
    model, tokenizer, languages = pair
    translate = TranslationPipeline(model, tokenizer, **languages)
    for beams, length in ((2, 5), (4, 8)):
        model.generation_config.update(num_beams=beams, max_length=length)
        expected = by_hand(model, tokenizer, languages, num_beams=beams, max_new_tokens=None)
        assert translate(SENTENCES) == expected
    assert searched


def test_the_weights_are_not_copied(pair):
    model, *_ = pair
    converted, reason = SharedConversion(model).for_engine()
    assert reason is None
    theirs = {parameter.data_ptr() for parameter in model.parameters()}
    own = [p for p in converted.parameters() if p.data_ptr() not in theirs]
    # the bias of Marian's logits is a buffer
    assert sum(p.numel() for p in own) <= converted.config.vocab_size


def scale_in_place(model):
    model.model.encoder.layers[0].fc1.weight.data.mul_(-2)


def replace_parameter(model):
    linear = model.model.decoder.layers[0].fc2
    linear.weight = torch.nn.Parameter(-2 * linear.weight.detach())


def change_embedding(model):
    model.get_input_embeddings().weight.data[5:15] *= -3


def change_setting(model):
    for module in (model.model.encoder, model.model.encoder.embed_tokens):
        if hasattr(module, "embed_scale"):
            module.embed_scale = 0.01


def add_hook(model):
    model.model.encoder.layers[0].fc1.register_forward_hook(lambda module, inputs, output: -output)


def replace_generate(model):
    plain = model.generate
    model.generate = lambda **settings: plain(**{**settings, "max_new_tokens": 4})


def replace_a_step_of_the_search(model):
    plain = model._get_logits_processor

    def with_another(*args, **kwargs):
        return LogitsProcessorList(
            [*plain(*args, **kwargs), lambda ids, scores: scores.roll(1, dims=-1)]
        )

    model._get_logits_processor = with_another


def patch_method(model):
    layer = model.model.decoder.layers[0]
    plain = layer.fc1.forward
    layer.fc1.forward = lambda x: plain(-x)


def hide_a_linear_layer(model):
    layer = model.model.decoder.layers[0]
    plain = layer.fc1
    object.__setattr__(layer, "fc1", lambda x: -plain(x))


def replace_the_function_of_an_activation(model):
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        if hasattr(layer.activation_fn, "act"):
            layer.activation_fn.act = torch.sin
        else:
            layer.activation_fn = torch.nn.Tanh()


@pytest.mark.parametrize(
    "change",
    [
        hide_a_linear_layer,
        replace_the_function_of_an_activation,
        scale_in_place,
        replace_parameter,
        change_embedding,
        change_setting,
        add_hook,
        patch_method,
        replace_generate,
        replace_a_step_of_the_search,
    ],
)
def test_a_change_of_the_model_changes_the_translations(pair, change):
    model, tokenizer, languages = pair
    translate = TranslationPipeline(model, tokenizer, **languages)
    before = translate(SENTENCES, **SEARCH)
    change(model)
    expected = by_hand(model, tokenizer, languages)
    assert expected != before
    assert translate(SENTENCES, **SEARCH) == expected


def test_a_global_hook_runs_in_the_models_own_modules(pair):
    model, tokenizer, languages = pair
    translate = TranslationPipeline(model, tokenizer, **languages)
    before = translate(SENTENCES, **SEARCH)
    attention = type(model.model.encoder.layers[0].self_attn)

    def turned(module, args, output):
        return (-2 * output[0], *output[1:]) if isinstance(module, attention) else None

    hook = torch.nn.modules.module.register_module_forward_hook(turned)
    try:
        expected = by_hand(model, tokenizer, languages)
        assert expected != before
        assert translate(SENTENCES, **SEARCH) == expected
    finally:
        hook.remove()
    assert translate(SENTENCES, **SEARCH, engine="required") == before


def test_autocast_applies_to_the_models_own_modules(pair, searched):
    model, tokenizer, languages = pair
    translate = TranslationPipeline(model, tokenizer, **languages)
    translate(SENTENCES, **SEARCH)
    assert searched
    searched.clear()
    with torch.autocast("cpu", torch.bfloat16):
        expected = translate(SENTENCES, **SEARCH, engine="off")
        assert translate(SENTENCES, **SEARCH) == expected
    assert not searched


def test_an_activation_that_is_restored_is_converted_again(pair):
    model, tokenizer, languages = pair
    translate = TranslationPipeline(model, tokenizer, **languages)
    before = translate(SENTENCES, **SEARCH)
    layer = model.model.decoder.layers[0]
    plain = layer.activation_fn
    layer.activation_fn = torch.nn.Tanh()
    with pytest.raises(ValueError, match="cannot be used"):
        translate(SENTENCES, **SEARCH, engine="required")
    layer.activation_fn = plain
    assert translate(SENTENCES, **SEARCH, engine="required") == before


def test_a_pipeline_translates_with_the_model_it_has(pair):
    model, tokenizer, languages = pair
    translate = TranslationPipeline(model, tokenizer, **languages)
    before = translate(SENTENCES, **SEARCH)
    translate.model = copy.deepcopy(model)
    scale_in_place(translate.model)
    expected = by_hand(translate.model, tokenizer, languages)
    assert expected != before
    assert translate(SENTENCES, **SEARCH, engine="required") == expected
    translate.model = model
    assert translate(SENTENCES, **SEARCH) == before


def test_a_padding_token_in_a_text_has_the_position_of_the_library(pair):
    model, tokenizer, languages = pair
    translate = TranslationPipeline(model, tokenizer, **languages)
    texts = [f"the {tokenizer.pad_token} small cat", "a house is small"]
    for text in texts:
        for search in (SEARCH, {**SEARCH, "target_prefix": texts[0]}):
            expected = translate(text, **search, engine="off")
            assert translate(text, **search) == expected


def test_a_change_of_the_bias_of_logits_is_seen(pieces, tmp_path):
    model, tokenizer = make_marian(pieces, tmp_path)
    translate = TranslationPipeline(model.eval(), tokenizer)
    translate(SENTENCES, **SEARCH)
    model.final_logits_bias[0, 7] = 1e4
    expected = by_hand(model, tokenizer, {})
    assert translate(SENTENCES, **SEARCH) == expected


def test_a_positional_table_that_is_changed_is_seen(pieces, tmp_path):
    model, tokenizer = make_marian(pieces, tmp_path)
    translate = TranslationPipeline(model.eval(), tokenizer)
    translate(SENTENCES, **SEARCH)
    model.model.encoder.embed_positions.weight.data.mul_(-3)
    expected = by_hand(model, tokenizer, {})
    assert translate(SENTENCES, **SEARCH) == expected


def test_a_model_that_changes_its_type_translates_with_it(pair, searched):
    model, tokenizer, languages = pair
    translate = TranslationPipeline(model, tokenizer, **languages)
    translate(SENTENCES, **SEARCH)
    assert searched
    searched.clear()
    model.double()
    assert translate(SENTENCES, **SEARCH) == by_hand(model, tokenizer, languages)
    # the engine packs float32 only
    assert not searched
    model.float()
    assert translate(SENTENCES, **SEARCH) == by_hand(model, tokenizer, languages)
    assert searched


def test_a_conversion_has_one_type(pair):
    model, *_ = pair
    conversion = SharedConversion(model)
    conversion.for_engine()
    model.double()
    assert conversion.for_engine() == (
        None,
        "weights must be float32, bfloat16 or float16, got float64",
    )
    tensors = conversion._converted.state_dict().values()
    assert {tensor.dtype for tensor in tensors} == {torch.float64}


def test_a_conversion_that_was_refused_is_not_tried_again(pair, monkeypatch):
    model, *_ = pair
    conversion, tried = SharedConversion(model), []

    def refuse(model, copy):
        tried.append(model.dtype)
        raise ValueError("no.")

    monkeypatch.setitem(shared_weights.CONVERSIONS, type(model), refuse)
    assert conversion.for_engine() == conversion.for_engine() == (None, "no")
    model.double()
    assert conversion.for_engine() == (None, "no")
    assert tried == [torch.float32, torch.float64]


def test_a_pipeline_can_be_copied_after_a_translation(pair):
    model, tokenizer, languages = pair
    translate = TranslationPipeline(model, tokenizer, **languages)
    expected = translate(SENTENCES, **SEARCH)
    other = copy.deepcopy(translate)
    assert other(SENTENCES, **SEARCH) == expected
    # the copy has weights of its own
    scale_in_place(other.model)
    assert other(SENTENCES, **SEARCH) == by_hand(other.model, tokenizer, languages)
    assert translate(SENTENCES, **SEARCH) == expected


def test_a_model_in_bf16_runs_its_own_modules_on_a_cpu_without_bf16(pair, searched, monkeypatch):
    monkeypatch.setattr(engine_checks, "has_bf16_instructions", lambda: False)
    model, tokenizer, languages = pair
    half_model = copy.deepcopy(model).bfloat16()
    translate = TranslationPipeline(half_model, tokenizer, **languages)
    expected = by_hand(half_model, tokenizer, languages)
    assert translate(SENTENCES, **SEARCH) == expected
    assert translate(SENTENCES, **SEARCH, precision="bf16") == expected
    assert not searched
    # in float32, with rounded weights and exact sinusoids
    rounded_model = copy.deepcopy(model)
    for name, parameter in rounded_model.named_parameters():
        if "embed_positions" not in name:
            parameter.data = parameter.data.bfloat16().float()
    expected = by_hand(rounded_model, tokenizer, languages)
    assert translate(SENTENCES, **SEARCH, precision="fp32") == expected
    assert searched
    with pytest.raises(ValueError, match=r"precision='bf16' needs .* no instructions for bf16"):
        TranslationPipeline(model, tokenizer, **languages)(SENTENCES, precision="bf16")


def test_the_modules_can_be_chosen(pair, searched):
    model, tokenizer, languages = pair
    expected = by_hand(model, tokenizer, languages)
    translate = TranslationPipeline(model, tokenizer, **languages)
    assert translate(SENTENCES, **SEARCH, engine="off") == expected
    assert not searched
    assert translate(SENTENCES, **SEARCH, int8=True)
    assert searched


def test_what_does_not_convert_says_so(pieces, tmp_path):
    model, tokenizer = make_bart(pieces, tmp_path)
    translate = TranslationPipeline(model.eval(), tokenizer)
    for setting in ({"int8": True}, {"engine": "required"}):
        with pytest.raises(ValueError, match="cannot be used: BartForConditionalGeneration is not"):
            translate(SENTENCES, **SEARCH, **setting)
    assert translate(SENTENCES, **SEARCH, engine="auto") == by_hand(model, tokenizer, {})
