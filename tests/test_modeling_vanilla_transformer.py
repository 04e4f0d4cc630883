"""Sections 3.1 to 3.5: the model against the equations, torch's Transformer and invariances."""

import copy
import math
import re

import equations
import pytest
import torch
from packaging.version import Version
from safetensors import safe_open
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
)
from transformers.masking_utils import eager_mask

from vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    sinusoidal_encoding,
)
from vanilla_transformer.conversion import from_torch
from vanilla_transformer.decoding_vanilla_transformer import CACHE_NAME
from vanilla_transformer.modeling_vanilla_transformer import (
    eager_attention,
    scaled_dot_product_attention,
)

LOW = torch.finfo(torch.float32).min


def close(actual, expected, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def plain_weights(model):
    return {name: tensor.double().tolist() for name, tensor in model.state_dict().items()}


def test_attention_is_equation_1():
    query, key, value = torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 6)
    context, weights = scaled_dot_product_attention(query, key, value, None)
    close(context, torch.tensor(equations.attention(query.tolist(), key.tolist(), value.tolist())))
    close(weights.sum(dim=-1), torch.ones(5))


def test_a_masked_key_has_the_effect_of_an_absent_one():
    query, key, value = torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 6)
    only_first_three = torch.tensor([0.0, 0, 0, LOW, LOW, LOW, LOW])
    context, _ = scaled_dot_product_attention(query, key, value, only_first_three)
    expected = equations.attention(query.tolist(), key[:3].tolist(), value[:3].tolist())
    close(context, torch.tensor(expected))


def test_the_whole_model_is_the_papers_equations(small_model):
    model = small_model(decoder_layers=2, decoder_ffn_dim=20)
    source, target = [5, 9, 4, 17, 2, 8, 2], [1, 7, 3, 11, 6]
    with torch.no_grad():
        ours = model(
            input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])
        ).logits[0]
    expected = equations.logits(source, target, plain_weights(model), num_layers=2, num_heads=3)
    close(ours, torch.tensor(expected), atol=1e-5)


def test_the_sinusoids_are_section_3_5():
    expected = torch.tensor([equations.positional_encoding(p, 6) for p in range(40)])
    close(sinusoidal_encoding(40, 6), expected)
    assert sinusoidal_encoding(40, 6).dtype == torch.float32


def test_the_sinusoids_are_exact_at_large_positions():
    far = torch.tensor(equations.positional_encoding(123_456, 8))
    close(sinusoidal_encoding(123_457, 8)[-1], far)


def test_halves_are_the_same_features_in_another_order():
    interleaved = sinusoidal_encoding(30, 10, base=100.0)
    halves = sinusoidal_encoding(30, 10, base=100.0, layout="halves")
    close(halves, torch.cat((interleaved[:, 0::2], interleaved[:, 1::2]), dim=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_model": 7}, "d_model must be even.*got 7"),
        ({"base": 0.0}, "base must be positive, got 0.0"),
        ({"layout": "mixed"}, "layout must be 'interleaved' or 'halves', got 'mixed'"),
        ({"num_positions": -1}, "num_positions must not be negative, got -1"),
    ],
)
def test_a_wrong_encoding_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sinusoidal_encoding(**{"num_positions": 4, "d_model": 6, **arguments})


def embedded_for_torch(model, ids):
    x = model.get_input_embeddings()(ids) * math.sqrt(model.config.d_model)
    return x + sinusoidal_encoding(ids.shape[1], model.config.d_model)


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_own_transformer_gives_the_same_states(batch, norm_first):
    theirs = nn.Transformer(
        d_model=12,
        nhead=3,
        num_encoder_layers=2,
        num_decoder_layers=4,
        dim_feedforward=20,
        batch_first=True,
        norm_first=norm_first,
    ).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    if not norm_first:
        # torch adds a norm after each stack, which the paper does not have
        theirs.encoder.norm = theirs.decoder.norm = None
    model = from_torch(theirs, torch.randn(23, 12))
    assert model.config.norm_first == norm_first
    source, target = batch["input_ids"], batch["decoder_input_ids"]
    padding = batch["attention_mask"] == 0
    with torch.no_grad():
        expected = theirs(
            embedded_for_torch(model, source),
            embedded_for_torch(model, target),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1]),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        close(model.model(**batch).last_hidden_state, expected, atol=1e-5)


def test_the_future_cannot_change_the_past(small_model, batch):
    model = small_model()
    changed = {**batch, "decoder_input_ids": batch["decoder_input_ids"].clone()}
    changed["decoder_input_ids"][:, 3:] = 4
    with torch.no_grad():
        before, after = model(**batch).logits, model(**changed).logits
    close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


def test_the_past_and_the_source_do_change_the_future(small_model, batch):
    model = small_model()
    with torch.no_grad():
        before = model(**batch).logits
        for name in ("input_ids", "decoder_input_ids"):
            changed = {**batch, name: batch[name].clone()}
            changed[name][:, 0] = 5
            assert not torch.allclose(before[:, -1], model(**changed).logits[:, -1])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_of_the_source_changes_nothing(small_model, batch, attention):
    model = small_model()
    model.set_attn_implementation(attention)
    with torch.no_grad():
        padded = model(**batch).logits
        for row in range(4):
            length = int(batch["attention_mask"][row].sum())
            alone = model(
                input_ids=batch["input_ids"][row : row + 1, :length],
                decoder_input_ids=batch["decoder_input_ids"][row : row + 1],
            ).logits
            close(padded[row : row + 1], alone, atol=1e-5)


def test_the_order_of_a_batch_does_not_matter(small_model, batch):
    model, order = small_model(), torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        whole = model(**batch).logits
        shuffled = model(**{name: rows[order] for name, rows in batch.items()}).logits
    close(shuffled, whole[order], atol=1e-5)


def test_padding_of_the_target_changes_nothing(small_model, batch):
    model = small_model()
    target = batch["decoder_input_ids"]
    padded = torch.cat((torch.zeros(4, 2, dtype=torch.long), target), dim=1)
    mask = (torch.arange(7) >= 2).long().expand(4, -1)
    junk = padded.clone()
    junk[:, :2] = 9
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        first, second = (
            model(**source, decoder_input_ids=ids, decoder_attention_mask=mask).logits[:, 2:]
            for ids in (padded, junk)
        )
    close(first, second)


CACHED = [
    {},
    {"position_encoding": "learned", "d_k": 5, "d_v": 2},
    {"decoder_attention_heads": 4, "d_k": 4, "d_v": 3},
]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("options", CACHED)
def test_decoding_with_and_without_a_cache_gives_the_same_logits(small_model, batch, options, name):
    model = small_model(**options)
    target = batch["decoder_input_ids"]
    with torch.no_grad():
        whole = model(**batch)
        cache = EncoderDecoderCache(
            DynamicCache(config=model.config), DynamicCache(config=model.config)
        )
        for first, last in ((0, 2), (2, 3), (3, 5)):
            part = model(
                attention_mask=batch["attention_mask"],
                encoder_outputs=(whole.encoder_last_hidden_state,),
                decoder_input_ids=target[:, first:last],
                **{name: cache},
            )
            assert part[CACHE_NAME] is cache
            close(part.logits, whole.logits[:, first:last], atol=1e-5)
    assert cache.get_seq_length() == 5


def test_a_cache_of_the_target_alone_gives_the_same_logits(small_model, batch):
    model = small_model()
    memory = {"attention_mask": batch["attention_mask"]}
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(**batch)
        memory["encoder_outputs"] = (whole.encoder_last_hidden_state,)
        for first, last in ((0, 2), (2, 5)):
            target = batch["decoder_input_ids"][:, first:last]
            part = model(**memory, decoder_input_ids=target, cache=cache)
            close(part.logits, whole.logits[:, first:last], atol=1e-5)
    assert cache.get_seq_length() == 5


def test_training_makes_no_cache(small_model, batch):
    model = small_model()
    assert CACHE_NAME in model(**batch, use_cache=True)
    assert CACHE_NAME not in model.train()(**batch, use_cache=True)


def test_the_two_names_of_the_cache_are_refused_together(small_model, batch):
    cache = DynamicCache()
    with pytest.raises(ValueError, match="cache and past_key_values are two names of one argument"):
        small_model()(**batch, cache=cache, past_key_values=cache)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "name", ["position_ids", "head_mask", "token_type_ids", "cu_seq_lens_q", "caches"]
)
def test_an_argument_that_would_be_ignored_is_refused(small_model, batch, attention, name):
    model = small_model()
    model.set_attn_implementation(attention)
    encoded = model.get_encoder()(batch["input_ids"])
    calls = [
        lambda **extra: model(**batch, **extra),
        lambda **extra: model.model(**batch, **extra),
        lambda **extra: model.get_encoder()(batch["input_ids"], **extra),
        lambda **extra: model(
            encoder_outputs=encoded, decoder_input_ids=batch["decoder_input_ids"], **extra
        ),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"forward got the unknown argument '{name}'"):
            call(**{name: torch.ones(4, 7)})
        call(**{name: None})


def test_the_error_of_an_unknown_argument_names_the_closest_one(small_model, batch):
    with pytest.raises(TypeError, match=r"'input_embeds'.* Did you mean 'inputs_embeds'\?"):
        small_model()(**batch, input_embeds=torch.ones(4, 7, 12))


def test_an_attention_function_may_have_arguments_of_its_own(small_model, batch):
    def scaled(module, query, key, value, attention_mask, temperature=1.0, **kwargs):
        return eager_attention(module, query / temperature, key, value, attention_mask)

    def any_name(module, query, key, value, attention_mask, **kwargs):
        return scaled(module, query, key, value, attention_mask, kwargs.get("heat", 1.0))

    model = small_model()
    plain = model(**batch).logits
    for number, (function, name) in enumerate(((scaled, "temperature"), (any_name, "heat"))):
        AttentionInterface.register(f"test_{number}", function)
        AttentionMaskInterface.register(f"test_{number}", eager_mask)
        model.set_attn_implementation(f"test_{number}")
        close(model(**batch).logits, plain, atol=1e-5)
        assert not torch.allclose(model(**batch, **{name: 5.0}).logits, plain, atol=1e-3)


def test_without_positions_the_source_is_a_set(small_model):
    order = torch.tensor([2, 0, 3, 1])
    source = torch.tensor([[5, 9, 4, 17]])
    with torch.no_grad():
        unordered = small_model(position_encoding="none").get_encoder()
        close(
            unordered(source[:, order]).last_hidden_state,
            unordered(source).last_hidden_state[:, order],
            atol=1e-5,
        )
        ordered = small_model().get_encoder()
        moved = ordered(source).last_hidden_state[:, order]
        assert not torch.allclose(ordered(source[:, order]).last_hidden_state, moved, atol=1e-2)


def test_position_5000_works_on_a_model_of_any_length(small_model):
    model = small_model()
    source = torch.randint(3, 23, (1, 5_001))
    with torch.no_grad():
        first = model.model.encoder.positions(torch.zeros(1, 5_001, 12))[0, 5_000]
        close(first, torch.tensor(equations.positional_encoding(5_000, 12)))
        assert model(input_ids=source, decoder_input_ids=source[:, :2]).logits.isfinite().all()


def test_an_offset_moves_every_position(small_model):
    plain, moved = small_model(), small_model(position_offset=2)
    zeros = torch.zeros(1, 6, 12)
    close(moved.model.encoder.positions(zeros)[:, :4], plain.model.encoder.positions(zeros)[:, 2:])


def test_given_embeddings_are_scaled_like_those_of_ids(small_model, batch):
    model = small_model()
    table = model.get_input_embeddings()
    with torch.no_grad():
        embedded = model(
            inputs_embeds=table(batch["input_ids"]),
            attention_mask=batch["attention_mask"],
            decoder_inputs_embeds=table(batch["decoder_input_ids"]),
        )
        close(embedded.logits, model(**batch).logits)
    with pytest.raises(ValueError, match=r"Exactly one of input_ids and inputs_embeds.* got both"):
        model.get_encoder()(batch["input_ids"], inputs_embeds=table(batch["input_ids"]))


def test_a_target_that_is_missing_or_given_twice_is_named(small_model, batch):
    target, source = batch["decoder_input_ids"], batch["input_ids"]
    for model in (small_model(), small_model().model):
        with pytest.raises(ValueError, match=r"decoder_input_ids and .* neither.* from labels"):
            model(input_ids=source)
        embedded = model.get_input_embeddings()(target)
        with pytest.raises(ValueError, match=r"decoder_inputs_embeds must be given, got both"):
            model(input_ids=source, decoder_input_ids=target, decoder_inputs_embeds=embedded)


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("options", [{}, {"d_k": 4, "d_v": 8}])
def test_every_attention_function_computes_equation_1(small_model, batch, attention, options):
    if attention == "flex_attention":
        # torch's flex attention on a CPU needs a power of 2 as width of a head
        options = {"d_k": 16, "d_v": 16, **{name: 2 * size for name, size in options.items()}}
    model = small_model(**options)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**batch).logits
        model.set_attn_implementation(attention)
        assert model.config._attn_implementation == attention
        close(model(**batch).logits, expected, atol=1e-5)


def test_flash_attention_is_refused_where_keys_and_values_differ_in_width(small_model):
    with pytest.raises(ValueError, match="flash_attention_2 needs d_k equal to d_v, got d_k 5"):
        small_model(d_k=5, d_v=2).set_attn_implementation("flash_attention_2")


def test_states_and_all_three_attentions_are_recorded(small_model, batch):
    model = small_model()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**batch, output_attentions=True, output_hidden_states=True)
    assert [len(out.encoder_hidden_states), len(out.decoder_hidden_states)] == [3, 4]
    assert [tuple(w.shape) for w in out.encoder_attentions] == [(4, 3, 7, 7)] * 2
    assert [tuple(w.shape) for w in out.decoder_attentions] == [(4, 3, 5, 5)] * 3
    assert [tuple(w.shape) for w in out.cross_attentions] == [(4, 3, 5, 7)] * 3
    close(out.decoder_hidden_states[-1] @ model.lm_head.weight.T, out.logits, atol=1e-5)
    assert out.decoder_attentions[0].triu(1).abs().max() == 0
    padding = (batch["attention_mask"] == 0)[:, None, None]
    assert out.cross_attentions[-1].masked_select(padding).abs().max() == 0


def test_the_configuration_can_ask_for_tuples(small_model, batch):
    model = small_model()
    with torch.no_grad():
        expected = model(**batch), model.model(**batch)
        model.config.return_dict = False
        found = model(**batch), model.model(**batch)
        for values, output in zip(found, expected, strict=True):
            assert type(values) is tuple
            close(values[0], output[0])
            close(values[2:], output.to_tuple()[2:])
        close(model(**batch, return_dict=True).logits, expected[0].logits)
        loss, logits, _ = model(**batch, labels=batch["decoder_input_ids"])
    close(logits, expected[0].logits)
    assert loss > 0


def test_the_loss_is_the_mean_over_labels_that_are_not_ignored(small_model, batch):
    model = small_model()
    labels = torch.tensor([[5, 6, 2, -100], [8, 2, -100, -100], [9, 9, 9, 2], [7, 7, 2, -100]])
    source = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        out = model(**source, labels=labels)
        shifted = model.prepare_decoder_input_ids_from_labels(labels)
        assert shifted.tolist() == [[1, 5, 6, 2], [1, 8, 2, 0], [1, 9, 9, 9], [1, 7, 7, 2]]
        logits = model(**source, decoder_input_ids=shifted).logits
    log_probs = [[equations.log_softmax(row) for row in rows] for rows in logits.tolist()]
    counted = [
        -log_probs[b][t][label]
        for b, row in enumerate(labels.tolist())
        for t, label in enumerate(row)
        if label != -100
    ]
    assert out.loss.item() == pytest.approx(sum(counted) / len(counted), rel=1e-5)
    assert out.past_key_values is None


@pytest.mark.parametrize("token", ["decoder_start_token_id", "pad_token_id"])
def test_labels_cannot_be_shifted_without_special_tokens(small_model, token):
    model = small_model(**{token: None})
    with pytest.raises(ValueError, match=f"{token} must be set to shift labels, got None"):
        model.prepare_decoder_input_ids_from_labels(torch.tensor([[5, 2]]))


def test_how_a_batch_is_accumulated_does_not_change_loss_or_gradients(small_model, batch):
    model = small_model(dropout=0.0)
    labels = batch["decoder_input_ids"].masked_fill(batch["attention_mask"][:, :5] == 0, -100)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"labels": labels}
    count = (labels != -100).sum()

    def gradients(parts):
        twin = copy.deepcopy(model).train()
        loss = 0
        for rows in parts:
            part = {name: tensor[rows] for name, tensor in inputs.items()}
            part_loss = twin(**part, num_items_in_batch=count).loss
            part_loss.backward()
            loss += part_loss.item()
        return loss, [parameter.grad for parameter in twin.parameters()]

    whole_loss, whole = gradients([slice(0, 4)])
    split_loss, split = gradients([slice(0, 1), slice(1, 4)])
    assert split_loss == pytest.approx(whole_loss, rel=1e-6)
    close(split, whole, atol=1e-5)


def test_only_the_wanted_logits_are_computed(small_model, batch):
    model = small_model()
    with torch.no_grad():
        close(model(**batch, logits_to_keep=2).logits, model(**batch).logits[:, -2:])


def tables(model):
    return [
        model.get_input_embeddings().weight,
        model.get_encoder().embed_tokens.weight,
        model.get_decoder().embed_tokens.weight,
        model.get_output_embeddings().weight,
    ]


def is_one_matrix(model):
    return len({table.data_ptr() for table in tables(model)}) == 1


def test_source_target_and_output_stay_one_matrix(small_model, tmp_path):
    model = small_model()
    assert is_one_matrix(model)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        shapes = [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    assert shapes.count((23, 12)) == 1
    assert is_one_matrix(VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path))
    model.resize_token_embeddings(31)
    assert is_one_matrix(model)
    assert {tuple(table.shape) for table in tables(model)} == {(31, 12)}
    assert is_one_matrix(model.to(torch.bfloat16))
    assert is_one_matrix(copy.deepcopy(model))
    another = nn.Embedding(29, 12)
    model.set_input_embeddings(another)
    assert model.get_decoder().embed_tokens is another
    model.tie_weights()
    assert is_one_matrix(model)


def test_all_three_untied_tables_are_resized(small_model, tmp_path):
    model = small_model(tie_word_embeddings=False)
    assert len({table.data_ptr() for table in tables(model)}) == 3
    before = [table.clone() for table in tables(model)]
    model.resize_token_embeddings(31)
    for table, old in zip(tables(model), before, strict=True):
        assert tuple(table.shape) == (31, 12)
        close(table[:23], old)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    close(tables(again), tables(model))
    again.set_input_embeddings(nn.Embedding(31, 12))
    close(tables(again)[2:], tables(model)[2:])


@pytest.mark.parametrize(
    ("dtype", "device_map"), [("float32", None), ("bfloat16", None), ("float32", "cpu")]
)
@pytest.mark.parametrize("position_encoding", ["sinusoidal", "learned"])
def test_loading_gives_back_the_logits(
    small_model, batch, tmp_path, dtype, device_map, position_encoding
):
    model = small_model(position_encoding=position_encoding)
    model.save_pretrained(tmp_path)
    again, info = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, dtype=dtype, device_map=device_map, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(again) is VanillaTransformerForConditionalGeneration
    assert again.dtype == getattr(torch, dtype)
    with torch.no_grad():
        expected = model.to(again.dtype)(**batch).logits
        close(again(**batch).logits, expected)
    assert is_one_matrix(again)


def test_the_headless_model_is_saved_whole_and_names_no_missing_code(small_model, batch, tmp_path):
    body = small_model(tie_word_embeddings=False).model
    body.decoder.embed_tokens.weight = body.encoder.embed_tokens.weight
    body.config.auto_map = {"AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel"}
    body.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert not hasattr(again.config, "auto_map")
    with torch.no_grad():
        close(again(**batch).last_hidden_state, body(**batch).last_hidden_state)


def test_the_headless_model_loads_from_the_same_file(small_model, batch, tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is VanillaTransformerModel
    with torch.no_grad():
        close(body(**batch).last_hidden_state, model.model(**batch).last_hidden_state)


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_the_initial_scale_is_that_of_the_positions_times_the_gain(small_model, gain):
    config = small_model(d_model=96, initializer_gain=gain).config
    model = VanillaTransformerForConditionalGeneration(config)
    embedded = model.get_input_embeddings().weight * math.sqrt(96)
    assert embedded.std().item() == pytest.approx(gain, rel=0.05)
    bound = gain * math.sqrt(6 / (96 + 20))
    inner = model.model.encoder.layers[0].feed_forward.fc1
    assert inner.weight.abs().max().item() == pytest.approx(bound, rel=0.05)
    assert inner.bias.abs().max() == 0


def test_dropout_is_where_section_5_4_puts_it(small_model, batch):
    model = small_model(dropout=0.5)
    with torch.no_grad():
        calm = model(**batch).logits
        model.train()
        first, second = model(**batch).logits, model(**batch).logits
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, calm)
    # once for each sub-layer of a layer, and once for embedding plus position of each stack
    calls = []
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p == 0.5:
            module.register_forward_hook(lambda module, args, output: calls.append(args[0].shape))
    model(**batch)
    assert len(calls) == (2 * 2 + 1) + (3 * 3 + 1)
    assert {shape[-1] for shape in calls} == {12}


@pytest.mark.parametrize("field", ["attention_dropout", "activation_dropout"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_dropouts_that_the_paper_lacks_are_options(small_model, batch, field, attention):
    model = small_model(dropout=0.0, **{field: 0.5})
    model.set_attn_implementation(attention)
    with torch.no_grad():
        close(model(**batch).logits, model(**batch).logits)
        model.train()
        assert not torch.allclose(model(**batch).logits, model(**batch).logits)


def test_the_tensor_parallel_plan_names_every_matrix(small_model):
    model = small_model()
    patterns = [name.replace(".", r"\.").replace("*", r"\d+") for name in model.tp_plan]
    matrices = [
        name.removesuffix(".weight") for name, p in model.named_parameters() if p.dim() == 2
    ]
    assert len(matrices) > 20
    missed = [
        name for name in matrices if not any(re.fullmatch(pattern, name) for pattern in patterns)
    ]
    assert missed == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_the_gradients(small_model, batch, reentrant):
    model = small_model(dropout=0.0).train()

    def gradients():
        model.zero_grad()
        model(**batch, labels=batch["decoder_input_ids"]).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    layers = [*model.get_encoder().layers, *model.get_decoder().layers]
    computed = []
    for layer in layers:
        layer.feed_forward.register_forward_pre_hook(lambda part, _: computed.append(part))
    plain = gradients()
    assert len(computed) == len(layers)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    # a reentrant checkpoint follows gradients through its inputs only
    model.enable_input_require_grads()
    computed.clear()
    close(gradients(), plain)
    # without the stored activations each layer is computed twice
    assert len(computed) == 2 * len(layers)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="older torch cannot trace the library's own wrapper of forward",
)
def test_the_whole_graph_compiles(small_model, batch):
    model = small_model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        close(compiled(**batch).logits, model(**batch).logits, atol=1e-5)


def test_the_model_exports(small_model, batch):
    model = small_model()
    inputs = {**batch, "use_cache": False}
    with torch.no_grad():
        exported = torch.export.export(model, args=(), kwargs=inputs, strict=False)
        close(exported.module()(**inputs).logits, model(**batch).logits, atol=1e-5)


def test_no_mask_and_a_full_mask_are_the_same(small_model, batch):
    model = small_model()
    full = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    none = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
    with torch.no_grad():
        close(model(**full).logits, model(**none).logits)


def test_a_decoder_without_memory_is_refused(small_model):
    with pytest.raises(ValueError, match="encoder_hidden_states must be given"):
        small_model().get_decoder()(torch.tensor([[1, 2]]))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": [[5, 23]], "decoder_input_ids": [[1]]}, "token ids must be .* got 23"),
        ({"input_ids": [[5, -3]], "decoder_input_ids": [[1]]}, "token ids must be .* got -3"),
        ({"input_ids": [[5, 3]], "decoder_input_ids": [[99]]}, "token ids must be .* got 99"),
        ({"input_ids": [[5, 3]], "labels": [[4, 23]]}, "labels must be .* got 23"),
        ({"input_ids": [[5, 3]], "labels": [[23, 4]]}, "token ids must be .* got 23"),
    ],
)
def test_ids_outside_of_the_vocabulary_are_named_on_the_cpu(small_model, inputs, message):
    inputs = {name: torch.tensor(ids) for name, ids in inputs.items()}
    with pytest.raises(ValueError, match=message):
        small_model()(**inputs)


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize(("source_length", "target_length"), [(10, 1), (1, 10)])
def test_a_sequence_longer_than_the_learned_positions_is_refused(
    small_model, offset, source_length, target_length
):
    model = small_model(
        position_encoding="learned", max_position_embeddings=9, position_offset=offset
    )
    source, target = (torch.full((1, length), 5) for length in (source_length, target_length))
    message = "A sequence must have at most 9 tokens, the number of learned positions, got 10"
    with pytest.raises(ValueError, match=message):
        model(input_ids=source, decoder_input_ids=target)
    model(input_ids=source[:, :9], decoder_input_ids=target[:, :9])


def test_a_target_that_grows_beyond_the_learned_positions_is_refused(small_model):
    model = small_model(position_encoding="learned", max_position_embeddings=9)
    source, target = torch.full((1, 3), 5), torch.full((1, 9), 5)
    outputs = model(input_ids=source, decoder_input_ids=target, use_cache=True)
    cache = {CACHE_NAME: outputs[CACHE_NAME]}
    with pytest.raises(ValueError, match=r"at most 9 tokens, .* got 10"):
        model(input_ids=source, decoder_input_ids=target[:, :1], use_cache=True, **cache)
