"""Models that a user edits: forward, generate, training and export do what the edit says."""

import inspect

import pytest
import torch
from conftest import SMALL
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GenerationMixin,
    T5Config,
    T5EncoderModel,
)
from transformers.masking_utils import eager_mask
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
)
from translation_toys import TEXTS, make_tokenizer

from vanilla_transformer import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from vanilla_transformer import checks_vanilla_transformer as checks
from vanilla_transformer import decoding_vanilla_transformer as decoding
from vanilla_transformer import modeling_vanilla_transformer as modeling
from vanilla_transformer.alignment_vanilla_transformer import head_weights
from vanilla_transformer.attention_maps import attention_weights
from vanilla_transformer.checks_vanilla_transformer import RELEASED_ARGUMENTS
from vanilla_transformer.comparison import batch_to_compare
from vanilla_transformer.decoding_vanilla_transformer import CACHE_NAME
from vanilla_transformer.engine_checks_vanilla_transformer import reason_against_engine
from vanilla_transformer.export.onnx import to_onnx

WIDTH = SMALL["hidden_size"]
SEARCHES = [
    {"num_beams": 1},
    {"num_beams": 3},
    {"num_beams": 3, "length_penalty_alpha": 0.6},
    {"num_beams": 3, "length_penalty_alpha": 0.6, "use_cache": False},
]


def edited(edit, kind=VanillaTransformerForConditionalGeneration, **fields):
    """Return a small model that an edit has changed, and whose translations are long."""

    class Edited(kind):
        def __init__(self, config):
            super().__init__(config)
            edit(self)
            self.post_init()

    config = VanillaTransformerConfig(**{**SMALL, "output_bias": True, **fields})
    model = Edited(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.lm_head.bias.data[config.eos_token_id] = -3
    return model


@pytest.fixture
def source(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def add_speakers(x, speaker_ids):
    return x if speaker_ids is None else x + 3 * speaker_ids[:, None, None] * torch.arange(WIDTH)


class SpeakerHead(VanillaTransformerForConditionalGeneration):
    def forward(self, *args, speaker_ids=None, **kwargs):
        output = super().forward(*args, **kwargs)
        if speaker_ids is not None:
            output.logits = output.logits + speaker_ids[:, None, None] * torch.arange(23)
        return output


class SpeakerModel(VanillaTransformerModel):
    def forward(self, *args, speaker_ids=None, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = add_speakers(output.last_hidden_state, speaker_ids)
        return output


class SpeakerEncoder(modeling.VanillaTransformerEncoder):
    def forward(self, *args, speaker_ids=None, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = add_speakers(output.last_hidden_state, speaker_ids)
        return output


class SpeakerDecoder(modeling.VanillaTransformerDecoder):
    def forward(self, *args, speaker_ids=None, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = add_speakers(output.last_hidden_state, speaker_ids)
        return output


class SpeakerEncoderLayer(modeling.EncoderLayer):
    def forward(self, x, mask, speaker_ids=None, **kwargs):
        return super().forward(add_speakers(x, speaker_ids), mask, **kwargs)


class SpeakerDecoderLayer(modeling.DecoderLayer):
    def forward(self, x, *args, speaker_ids=None, **kwargs):
        return super().forward(add_speakers(x, speaker_ids), *args, **kwargs)


class SpeakerAttention(modeling.MultiHeadAttention):
    def forward(self, x, memory, mask, cache=None, speaker_ids=None, **kwargs):
        return super().forward(add_speakers(x, speaker_ids), memory, mask, cache, **kwargs)


def replace_encoder(model):
    model.model.encoder = SpeakerEncoder(model.config)


def replace_decoder(model):
    model.model.decoder = SpeakerDecoder(model.config)


def replace_model(model):
    model.model = SpeakerModel(model.config)


def replace_encoder_layers(model):
    model.model.encoder.layers[1] = SpeakerEncoderLayer(model.config)


def replace_decoder_layers(model):
    model.model.decoder.layers[2] = SpeakerDecoderLayer(model.config, 2)


def replace_all_layers(model):
    replace_encoder_layers(model)
    replace_decoder_layers(model)


def replace_attention(model):
    for index, layer in enumerate(model.model.decoder.layers):
        layer.self_attention = SpeakerAttention(model.config, 3, index, is_causal=True)


EDITS_WITH_ARGUMENTS = [
    (lambda model: None, SpeakerHead),
    *(
        (edit, VanillaTransformerForConditionalGeneration)
        for edit in (
            replace_model,
            replace_encoder,
            replace_decoder,
            replace_encoder_layers,
            replace_decoder_layers,
            replace_all_layers,
            replace_attention,
        )
    ),
]


@pytest.mark.parametrize(("edit", "kind"), EDITS_WITH_ARGUMENTS, ids=["head", *"mednlba"])
def test_an_argument_of_a_changed_part_reaches_it(edit, kind, source):
    model = edited(edit, kind)
    speaker_ids = torch.tensor([0, 1, 2, 3])
    target = source["input_ids"][:, :3]

    def step(speaker_ids):
        with torch.no_grad():
            return model(**source, decoder_input_ids=target, speaker_ids=speaker_ids).logits

    others = step(speaker_ids)
    torch.testing.assert_close(others[0], step(None)[0])
    assert not torch.allclose(others[1:], step(None)[1:])
    for search in SEARCHES:
        plain = model.generate(**source, **search, max_new_tokens=5)
        found = model.generate(**source, **search, max_new_tokens=5, speaker_ids=speaker_ids)
        assert found[0].tolist() == plain[0].tolist()
        assert found.tolist() != plain.tolist()
        if "length_penalty_alpha" in search:
            # the sentences alone give each sentence its own speaker, also with several beams
            alone = [
                model.generate(
                    **{name: tensor[row : row + 1] for name, tensor in source.items()},
                    **search,
                    max_new_tokens=5,
                    speaker_ids=speaker_ids[row : row + 1],
                )[0]
                for row in range(4)
            ]
            assert found.tolist() == [row.tolist() for row in alone]


def search_of_the_library(
    model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
):
    return GenerationMixin._sample(
        model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
    )


@pytest.mark.parametrize(("edit", "kind"), EDITS_WITH_ARGUMENTS, ids=["head", *"mednlba"])
def test_custom_code_searches_with_the_arguments_of_a_changed_part(edit, kind, source):
    model = edited(edit, kind)
    arguments = {**source, "speaker_ids": torch.tensor([0, 1, 2, 3]), "max_new_tokens": 5}
    found = model.generate(**arguments, custom_generate=search_of_the_library)
    assert found.equal(model.generate(**arguments))


@pytest.mark.parametrize(("edit", "kind"), EDITS_WITH_ARGUMENTS, ids=["head", *"mednlba"])
def test_an_argument_that_no_part_declares_is_refused(edit, kind, source):
    model = edited(edit, kind)
    unknown = {"speaker_idz": torch.tensor([0, 1, 2, 3])}
    with pytest.raises(TypeError, match="unknown argument 'speaker_idz'"):
        model(**source, decoder_input_ids=source["input_ids"], **unknown)
    with pytest.raises(ValueError, match="speaker_idz"):
        model.generate(**source, **unknown)


@torch.no_grad()
def greedily(model, inputs, num_tokens):
    """Translate by calling the whole model for each token, without a cache."""
    ids = torch.full((4, 1), model.config.decoder_start_token_id)
    for _ in range(num_tokens):
        logits = model(**inputs, decoder_input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return ids


class RequiringEncoder(SpeakerEncoder):
    def forward(self, input_ids, attention_mask, inputs_embeds, speaker_ids, **kwargs):
        return super().forward(
            input_ids, attention_mask, inputs_embeds, speaker_ids=speaker_ids, **kwargs
        )


class TemperatureDecoder(modeling.VanillaTransformerDecoder):
    def forward(self, input_ids, attention_mask, encoder_hidden_states, temperatures, **kwargs):
        output = super().forward(input_ids, attention_mask, encoder_hidden_states, **kwargs)
        output.last_hidden_state = output.last_hidden_state * temperatures[:, None, None]
        return output


@pytest.mark.parametrize("encoder", [SpeakerEncoder, RequiringEncoder])
def test_arguments_of_several_changed_parts_reach_them(encoder, source):
    def replace_both_stacks(model):
        model.model.encoder = encoder(model.config)
        model.model.decoder = TemperatureDecoder(model.config)

    model = edited(replace_both_stacks)
    model.generation_config.eos_token_id = None
    speakers = {"speaker_ids": torch.tensor([0, 1, 2, 3])}
    arguments = {"temperatures": torch.tensor([-1.0, 0.5, 1.0, 2.0])}
    expected = greedily(model, {**source, **speakers, **arguments}, 5)
    inputs = {**source, **speakers, **arguments, "max_new_tokens": 5}
    assert expected.equal(model.generate(**inputs))
    assert expected.equal(model.generate(**inputs, custom_generate=search_of_the_library))
    memory = model.get_encoder()(**source, inputs_embeds=None, **speakers)
    inputs |= {"eos_token_id": model.config.eos_token_id}
    given = {**inputs, "input_ids": None, "encoder_outputs": memory}
    for search in SEARCHES[1:]:
        assert model.generate(**inputs, **search).equal(model.generate(**given, **search))


def test_the_arguments_of_the_released_model_are_those_of_its_code():
    names = set()
    for kind in (
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerModel,
        modeling.VanillaTransformerEncoder,
        modeling.VanillaTransformerDecoder,
        modeling.EncoderLayer,
        modeling.DecoderLayer,
        modeling.MultiHeadAttention,
    ):
        names |= set(inspect.signature(kind.forward).parameters)
    assert names - {"self", "kwargs"} == set(RELEASED_ARGUMENTS)


def test_the_gradient_of_an_argument_passes_checkpoints(source):
    model = edited(replace_all_layers).train()
    model.gradient_checkpointing_enable()
    labels = source["input_ids"]
    model(**source, labels=labels, speaker_ids=torch.ones(4)).loss.backward()
    assert model.model.encoder.layers[0].feed_forward.fc1.weight.grad.abs().max() > 0


class FeedForwardLayer(modeling.DecoderLayer):
    def forward(self, x, mask, memory, memory_mask, cache=None, **kwargs):
        return self.add_and_norm(x, self.feed_forward, self.feed_forward_norm)


class ForgetfulLayer(modeling.DecoderLayer):
    def forward(self, x, mask, memory, memory_mask, cache=None, **kwargs):
        return super().forward(x, mask, memory, memory_mask, **kwargs)


@pytest.fixture
def warnings_of_search(monkeypatch):
    checks.warn_once.cache_clear()
    told = []
    monkeypatch.setattr(checks.logger, "warning", lambda text, *args: told.append(text % args))
    return told


class ConvolvedLayer(modeling.DecoderLayer):
    """Layer with a causal convolution, which the cache knows nothing of."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.mixing = nn.Conv1d(config.d_model, config.d_model, 3)

    def forward(self, x, *arguments, **kwargs):
        padded = nn.functional.pad(x.transpose(1, 2), (2, 0))
        return super().forward(x + self.mixing(padded).transpose(1, 2), *arguments, **kwargs)


class RecurrentLayer(ConvolvedLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.mixing = nn.GRU(config.d_model, config.d_model, batch_first=True)

    def forward(self, x, *arguments, **kwargs):
        return modeling.DecoderLayer.forward(self, self.mixing(x)[0], *arguments, **kwargs)


class AveragedLayer(modeling.DecoderLayer):
    """Layer of an average attention network: Zhang et al. (2018)."""

    def forward(self, x, *arguments, **kwargs):
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return super().forward(x + x.cumsum(1) / counts, *arguments, **kwargs)


class ShiftedLayer(modeling.DecoderLayer):
    """Layer in which half of each state is that of the token before."""

    def forward(self, x, *arguments, **kwargs):
        own, shifted = x.chunk(2, dim=-1)
        shifted = nn.functional.pad(shifted, (0, 0, 1, 0))[:, :-1]
        return super().forward(torch.cat((own, shifted), dim=-1), *arguments, **kwargs)


class CountedLayer(modeling.DecoderLayer):
    """Layer that counts positions from the first token of each call."""

    def forward(self, x, *arguments, **kwargs):
        return super().forward(x + torch.arange(x.shape[1])[:, None], *arguments, **kwargs)


class RememberingLayer(modeling.DecoderLayer):
    """Layer that keeps the last state of each row, which no beam search reorders."""

    def forward(self, x, *arguments, cache=None, **kwargs):
        is_first = cache is None or not cache.get_seq_length()
        before = torch.zeros_like(x[:, :1]) if is_first else self.last
        self.last = x[:, -1:]
        x = x + torch.cat((before, x[:, :-1]), dim=1)
        return super().forward(x, *arguments, cache=cache, **kwargs)


class RefusingLayer(modeling.DecoderLayer):
    def forward(self, *arguments, cache=None, **kwargs):
        if cache is not None:
            raise NotImplementedError("this layer reads no cache")
        return super().forward(*arguments, **kwargs)


NO_CACHE = "Edited.generate uses no cache, because"
STORES_NOTHING = "the layers [{}] of VanillaTransformerDecoder store nothing in it."
DIFFERS = "the logits with a cache differ from those of the whole target"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ForgetfulLayer, STORES_NOTHING),
        (ConvolvedLayer, DIFFERS),
        (RecurrentLayer, DIFFERS),
        (AveragedLayer, DIFFERS),
        (ShiftedLayer, DIFFERS),
        (CountedLayer, DIFFERS),
    ],
)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_layer_that_the_cache_does_not_serve_reads_all_tokens(
    kind, reason, index, source, warnings_of_search
):
    def replace(model):
        model.model.decoder.layers[index] = kind(model.config, index)

    model = edited(replace)
    for search in SEARCHES[:3]:
        expected = model.generate(**{**source, **search, "use_cache": False}, max_new_tokens=6)
        assert not warnings_of_search
        assert model.generate(**source, **search, max_new_tokens=6).equal(expected)
        told = warnings_of_search.pop()
        assert told.startswith(f"{NO_CACHE} {reason.format(index)}")
        warnings_of_search.clear()
        checks.warn_once.cache_clear()
    model.generation_config.eos_token_id = None
    assert greedily(model, source, 6).equal(model.generate(**source, max_new_tokens=6))


def use_layer(kind):
    def replace(model):
        model.model.decoder.layers[1] = kind(model.config, 1)

    return replace


class RepeatingModel(VanillaTransformerForConditionalGeneration):
    """Model that lowers the logits of all tokens in the target."""

    def forward(self, *args, decoder_input_ids=None, **kwargs):
        output = super().forward(*args, decoder_input_ids=decoder_input_ids, **kwargs)
        one_hot = nn.functional.one_hot(decoder_input_ids, output.logits.shape[-1])
        output.logits = output.logits - 2 * one_hot.cumsum(1)[:, -output.logits.shape[1] :]
        return output


def test_a_model_that_fails_with_a_cache_is_searched_without_one(source, warnings_of_search):
    model = edited(use_layer(RefusingLayer))
    for search in SEARCHES[:3]:
        expected = model.generate(**{**source, **search, "use_cache": False}, max_new_tokens=6)
        assert model.generate(**source, **search, max_new_tokens=6).equal(expected)
    reason = "the model fails with a cache (NotImplementedError: this layer reads no cache)"
    assert any(f"{NO_CACHE} {reason}" in told for told in warnings_of_search)


def test_a_state_that_no_search_reorders_needs_the_whole_target(source, warnings_of_search):
    def replace_first_layer(model):
        model.model.decoder.layers[0] = RememberingLayer(model.config, 0)

    model = edited(replace_first_layer)
    expected = model.generate(**source, num_beams=1, use_cache=False, max_new_tokens=6)
    assert model.generate(**source, num_beams=1, max_new_tokens=6).equal(expected)
    assert not any(NO_CACHE in told for told in warnings_of_search)
    for search in SEARCHES[1:3]:
        expected = model.generate(**{**source, **search, "use_cache": False}, max_new_tokens=6)
        assert model.generate(**source, **search, max_new_tokens=6).equal(expected)
    assert any(f"{NO_CACHE} {DIFFERS}" in told for told in warnings_of_search)


def test_a_model_whose_head_reads_the_whole_target_gets_it(source):
    model = edited(lambda model: None, RepeatingModel)
    model.generation_config.eos_token_id = None
    expected = greedily(model, source, 6)
    assert expected.equal(model.generate(**source, max_new_tokens=6))


def attend_to_near_tokens(module, query, key, value, mask, scaling, **kwargs):
    """Attention whose scores fall with the distance, counted from the first query of a call."""
    query_positions, key_positions = (torch.arange(states.shape[2]) for states in (query, key))
    scores = scaling * query @ key.mT - (query_positions[:, None] - key_positions).abs()
    weights = (scores if mask is None else scores + mask).softmax(dim=-1)
    return (weights @ value).transpose(1, 2), weights


def test_an_attention_function_that_counts_from_the_first_query_gets_the_whole_target(source):
    AttentionInterface.register("near", attend_to_near_tokens)
    AttentionMaskInterface.register("near", eager_mask)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**SMALL))
    model.set_attn_implementation("near")
    model.generation_config.eos_token_id = None
    expected = greedily(model.eval(), source, 6)
    assert expected.equal(model.generate(**source, max_new_tokens=6))


class GatedLayer(AveragedLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.gate = nn.Parameter(torch.zeros(()))
        self.factor, self.config = 1.0, config

    def sum_before(self, x):
        return x.cumsum(1)

    def forward(self, x, *arguments, **kwargs):
        factor = self.factor * self.gate * getattr(self.config, "shift", 1.0)
        x = x + factor * self.sum_before(x)
        return modeling.DecoderLayer.forward(self, x, *arguments, **kwargs)


def test_a_change_of_weights_code_or_settings_is_compared_again(
    source, warnings_of_search, monkeypatch
):
    model = edited(use_layer(GatedLayer))
    layer = model.model.decoder.layers[1]
    with torch.no_grad():
        layer.gate.zero_()
    changes = [
        (lambda: None, False),
        (lambda: nn.init.constant_(layer.gate, 2.0), True),
        (lambda: setattr(layer, "factor", 0.0), False),
        (lambda: setattr(layer, "factor", 3.0), True),
        (lambda: setattr(model.config, "shift", 0.0), False),
        (lambda: setattr(model.config, "shift", 2.0), True),
        (lambda: monkeypatch.setattr(GatedLayer, "sum_before", lambda self, x: 0 * x), False),
        (lambda: monkeypatch.setattr(GatedLayer, "sum_before", lambda self, x: x.cumsum(1)), True),
        (lambda: monkeypatch.setattr(layer, "sum_before", lambda x: 0 * x), False),
        (lambda: layer.register_forward_hook(lambda *args: args[2].cumsum(1)), True),
        (lambda: layer._forward_hooks.clear(), False),
        (lambda: setattr(layer, "forward", lambda x, *args, **kwargs: x.cumsum(1)), True),
    ]
    for change, is_told in changes:
        change()
        warnings_of_search.clear()
        checks.warn_once.cache_clear()
        expected = model.generate(**source, use_cache=False, max_new_tokens=6)
        assert model.generate(**source, max_new_tokens=6).equal(expected)
        assert any(NO_CACHE in told for told in warnings_of_search) == is_told


def test_a_layer_without_attention_needs_no_cache(source, warnings_of_search):
    model = edited(use_layer(FeedForwardLayer))
    for search in SEARCHES[:3]:
        expected = model.generate(**{**source, **search, "use_cache": False}, max_new_tokens=6)
        assert model.generate(**source, **search, max_new_tokens=6).equal(expected)
    assert not any(NO_CACHE in told for told in warnings_of_search)


class NoisyLayer(modeling.DecoderLayer):
    def forward(self, x, *arguments, **kwargs):
        return super().forward(nn.functional.dropout(x, 0.5), *arguments, **kwargs)


def test_the_comparison_draws_no_random_number_of_the_search(source, warnings_of_search):
    model = edited(use_layer(NoisyLayer))
    samples = []
    for _ in range(2):
        torch.manual_seed(1)
        samples.append(model.generate(**source, do_sample=True, max_new_tokens=6))
    assert samples[0].equal(samples[1])
    # with dropout, the logits with and without a cache cannot be compared
    assert not any(NO_CACHE in told for told in warnings_of_search)


def test_only_changed_code_is_compared_and_only_once(source, monkeypatch):
    calls = []

    class Counted(VanillaTransformerForConditionalGeneration):
        def forward(self, *args, **kwargs):
            calls.append(self)
            return super().forward(*args, **kwargs)

    model = edited(lambda model: None, Counted)
    numbers = []
    for _ in range(2):
        calls.clear()
        model.generate(**source, min_new_tokens=6, max_new_tokens=6)
        numbers.append(len(calls))
    assert numbers == [6 + 3 * decoding.NUM_COMPARED_TOKENS, 6]
    released = VanillaTransformerForConditionalGeneration(model.config).eval()
    monkeypatch.setattr(decoding, "ModuleDecoding", None)
    released.generate(**source, output_attentions=True, max_new_tokens=6)


class RecurrentDecoder(nn.Module):
    """Decoder that reads the whole target in each step."""

    def __init__(self, config, name="layers"):
        super().__init__()
        self.name = name
        self.embed_tokens = nn.Embedding(config.vocab_size, WIDTH)
        self.add_module(name, nn.GRU(WIDTH, WIDTH, batch_first=True))

    def forward(self, input_ids, encoder_hidden_states, encoder_attention_mask=None, **kwargs):
        states = self.get_submodule(self.name)(self.embed_tokens(input_ids))[0]
        scores = states @ encoder_hidden_states.mT
        if encoder_attention_mask is not None:
            scores = scores.masked_fill(encoder_attention_mask[:, None] == 0, -torch.inf)
        states = states + scores.softmax(-1) @ encoder_hidden_states
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)


class OwnDecoder(modeling.VanillaTransformerDecoder):
    def forward(self, *args, cache=None, past_key_values=None, use_cache=None, **kwargs):
        return super().forward(*args, **kwargs, use_cache=False)


def forget_everything(model):
    layers = (ForgetfulLayer(model.config, index) for index in range(3))
    model.model.decoder.layers = nn.ModuleList(layers)


def replace_decoder_by(kind, *names):
    def replace(model):
        model.model.decoder = kind(model.config, *names)

    return replace


@pytest.mark.parametrize(
    "edit",
    [
        replace_decoder_by(RecurrentDecoder),
        replace_decoder_by(RecurrentDecoder, "recurrence"),
        replace_decoder_by(OwnDecoder),
        forget_everything,
    ],
    ids=["recurrent", "recurrent, own name", "own", "layers"],
)
def test_a_decoder_that_stores_nothing_reads_the_whole_target(edit, source, warnings_of_search):
    model = edited(edit, tie_word_embeddings=False)
    for search in SEARCHES:
        expected = model.generate(**{**source, **search, "use_cache": False}, max_new_tokens=6)
        warnings_of_search.clear()
        checks.warn_once.cache_clear()
        found = model.generate(**{**source, **search, "use_cache": True}, max_new_tokens=6)
        assert found.equal(expected)
        assert "Edited.generate uses no cache, because" in warnings_of_search[-1]
    model.generation_config.eos_token_id = None
    assert greedily(model, source, 6).equal(model.generate(**source, max_new_tokens=6))


def forget_in_one_layer(model):
    model.model.decoder.layers[1] = ForgetfulLayer(model.config, 1)


@pytest.mark.parametrize(
    ("edit", "indices"),
    [
        (forget_in_one_layer, r"\[1\]"),
        (replace_decoder_by(RecurrentDecoder), r"\[0\]"),
        (replace_decoder_by(RecurrentDecoder, "recurrence"), r"\[0\]"),
    ],
    ids=["layer", "recurrent", "recurrent, own name"],
)
def test_a_layer_without_a_cache_is_not_exported_to_onnx(edit, indices, tmp_path):
    tokenizer = make_tokenizer()
    model = edited(edit, vocab_size=len(tokenizer), tie_word_embeddings=False)
    with pytest.raises(ValueError, match=f"the layers {indices} store none in self_attention"):
        to_onnx(model, tokenizer, tmp_path / "onnx")


def separate_vocabularies(source_size, target_size):
    def replace(model):
        model.model.encoder.embed_tokens = nn.Embedding(source_size, WIDTH)
        model.model.decoder.embed_tokens = nn.Embedding(target_size, WIDTH)
        model.lm_head = nn.Linear(WIDTH, target_size)

    return replace


@pytest.mark.parametrize("sizes", [(31, 23), (15, 23), (23, 31), (23, 15), (31, 15)])
def test_source_and_target_may_have_a_vocabulary_each(sizes):
    source_size, target_size = sizes
    kind = VanillaTransformerForConditionalGeneration
    changed = edited(separate_vocabularies(*sizes), tie_word_embeddings=False)
    # the classes of this model are the released ones, so the engine searches
    released = kind(changed.config).eval()
    separate_vocabularies(*sizes)(released)
    released.load_state_dict(changed.state_dict())
    source = torch.arange(3, source_size)[None]
    labels = torch.arange(3, target_size)[None]
    prompt = torch.tensor([[1, target_size - 1]])
    for model in (changed, released):
        for search in SEARCHES:
            arguments = {**search, "max_new_tokens": 5, "decoder_input_ids": prompt}
            modules = model.generate(source, **arguments, engine="off")
            assert model.generate(source, **arguments).equal(modules)
        logits = model(source, labels=labels).logits
        assert logits.shape == (1, target_size - 3, target_size)
        loss = model(source, labels=labels).loss
        torch.testing.assert_close(loss, nn.functional.cross_entropy(logits[0], labels[0]))
        for inputs, message in (
            ({"input_ids": source + 1}, rf"input_ids .* {source_size}, got {source_size}"),
            ({"decoder_input_ids": prompt + 1}, rf"{target_size}, got {target_size}"),
            ({"forced_bos_token_id": target_size}, rf"{target_size}, got {target_size}"),
        ):
            with pytest.raises(ValueError, match=message):
                model.generate(**{"input_ids": source, **inputs})
        with pytest.raises(ValueError, match=rf"labels .* {target_size}, got {target_size}"):
            model(source, labels=labels + 1)
    assert reason_against_engine(released) is None


def test_an_output_token_without_an_embedding_is_named(small_model, source):
    model = small_model()
    model.set_output_embeddings(nn.Linear(WIDTH, 40))
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "suppress_tokens": list(range(23))}
    for search in SEARCHES:
        for engine in ("off", "auto"):
            with pytest.raises(ValueError, match=r"below the vocabulary size 23, got [23]\d"):
                model.generate(**source, **search, **settings, engine=engine)


def test_separate_vocabularies_are_exported_to_onnx(tmp_path):
    tokenizer = make_tokenizer()
    sizes = len(tokenizer), 15
    changed = edited(separate_vocabularies(*sizes), tie_word_embeddings=False)
    to_onnx(changed, tokenizer, tmp_path)
    batch = batch_to_compare(changed)
    assert batch.source.max() > batch.target.max()


class FactorizedEmbedding(nn.Module):
    """Embedding without a `weight`."""

    def __init__(self, num_tokens):
        super().__init__()
        self.table = nn.Embedding(num_tokens, 4)
        self.projection = nn.Linear(4, WIDTH, bias=False)

    def forward(self, ids):
        return self.projection(self.table(ids))


def factorize_embeddings(model):
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_tokens = FactorizedEmbedding(model.config.vocab_size)


def test_an_embedding_may_be_of_any_class(tmp_path):
    tokenizer = make_tokenizer()
    model = edited(factorize_embeddings, vocab_size=len(tokenizer), tie_word_embeddings=False)
    translator = TranslationPipeline(model, tokenizer, device="cpu")
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    expected = model.generate(**inputs, num_beams=2, max_new_tokens=5)
    found = translator(TEXTS, num_beams=2, max_new_tokens=5, return_tensors=True)
    for row, entry in zip(expected, found, strict=True):
        tokens = entry["translation_token_ids"].tolist()
        assert row.tolist()[: len(tokens)] == tokens
    inputs["input_ids"][0, 0] = len(tokenizer)
    message = f"below the vocabulary size {len(tokenizer)}, got {len(tokenizer)}"
    for call in (model.generate, lambda **inputs: model(**inputs, labels=inputs["input_ids"])):
        with pytest.raises(ValueError, match=message):
            call(**inputs)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.generate(**tokenizer(TEXTS, return_tensors="pt", padding=True)).equal(
        model.generate(**tokenizer(TEXTS, return_tensors="pt", padding=True))
    )


class RecurrentEncoder(nn.Module):
    """Encoder that is no model of transformers."""

    def __init__(self, vocab_size, returned=BaseModelOutput):
        super().__init__()
        self.table = nn.Embedding(vocab_size, WIDTH)
        self.layers = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.returned = returned

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return self.returned(self.layers(self.table(input_ids))[0])


def small_encoder(kind, vocab_size):
    sizes = {"vocab_size": vocab_size, "num_hidden_layers": 2, "num_attention_heads": 3}
    t5_sizes = {"vocab_size": vocab_size, "d_model": WIDTH, "d_kv": 4, "d_ff": 20}
    if kind == "BERT":
        return BertModel(BertConfig(**sizes, hidden_size=WIDTH, intermediate_size=20), False)
    if kind == "DistilBERT":
        return DistilBertModel(DistilBertConfig(**sizes, hidden_size=WIDTH, hidden_dim=20))
    if kind == "T5":
        return T5EncoderModel(T5Config(**t5_sizes, num_layers=2, num_heads=3))
    return RecurrentEncoder(vocab_size)


@pytest.mark.parametrize("kind", ["BERT", "DistilBERT", "T5", "GRU"])
def test_the_encoder_may_be_one_of_transformers_or_torch(kind, tmp_path):
    tokenizer = make_tokenizer()

    def replace(model):
        model.model.encoder = small_encoder(kind, len(tokenizer))

    model = edited(replace, vocab_size=len(tokenizer), tie_word_embeddings=False)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    for search in SEARCHES:
        found = model.generate(**inputs, **search, max_new_tokens=5)
        outputs = model.get_encoder()(**inputs)
        arguments = {**search, "attention_mask": inputs["attention_mask"], "max_new_tokens": 5}
        assert found.equal(model.generate(**arguments, encoder_outputs=outputs))
        assert found.equal(model.generate(**{**inputs, **arguments, "use_cache": False}))
    translations = TranslationPipeline(model, tokenizer, device="cpu")(TEXTS, num_beams=2)
    assert len(translations) == len(TEXTS)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(weight.grad is not None for weight in model.model.encoder.parameters())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.generate(**inputs, max_new_tokens=5).equal(
        model.generate(**inputs, max_new_tokens=5)
    )
    wrong_id = {**inputs, "input_ids": inputs["input_ids"] + len(tokenizer)}
    with pytest.raises(ValueError, match=f"below the vocabulary size {len(tokenizer)}, got"):
        model.generate(**wrong_id)


def test_an_encoder_that_returns_no_output_of_transformers_is_named(source):
    def replace(model):
        model.model.encoder = RecurrentEncoder(23, returned=lambda x: x)

    model = edited(replace, tie_word_embeddings=False)
    memory = model.get_encoder()(**source)
    for call in (
        lambda: model(**source, labels=source["input_ids"]),
        lambda: model(encoder_outputs=memory, labels=source["input_ids"]),
        lambda: model.generate(**source),
        lambda: model.generate(encoder_outputs=memory),
    ):
        with pytest.raises(ValueError, match="such as BaseModelOutput, got Tensor"):
            call()
    with pytest.raises(NotImplementedError, match="but RecurrentEncoder has none"):
        model.get_input_embeddings()


class AnyNameEncoder(nn.Module):
    """Encoder around the released one, with its own name for further arguments."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, *inputs, **others):
        return self.encoder(*inputs, **others)


class TupleEncoder(nn.Module):
    """Encoder that takes no further arguments, and returns a tuple."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids, attention_mask=None, inputs_embeds=None):
        return self.encoder(input_ids, attention_mask, inputs_embeds).to_tuple()


def patch_encoder(model):
    forward = model.model.encoder.forward
    model.model.encoder.forward = lambda *inputs, **others: forward(*inputs, **others)


def wrap_encoder(model):
    model.model.encoder = AnyNameEncoder(model.model.encoder)


def wrap_tuple_encoder(model):
    model.model.encoder = TupleEncoder(model.model.encoder)


@pytest.mark.parametrize(
    "change",
    [patch_encoder, wrap_encoder, wrap_tuple_encoder],
)
def test_the_encoder_of_a_search_gets_what_that_of_forward_gets(change, source):
    model = edited(lambda model: None)
    search = {"num_beams": 3, "length_penalty_alpha": 0.6, "max_new_tokens": 6}
    searches = [{**source, **settings, "max_new_tokens": 6} for settings in SEARCHES]
    expected = [model.generate(**settings) for settings in searches]
    without_mask = model.generate(source["input_ids"], **search)
    assert without_mask.tolist() != expected[2].tolist()
    change(model)
    assert [model.generate(**settings).tolist() for settings in searches] == [
        each.tolist() for each in expected
    ]
    eos = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    assert greedily(model, source, 6).equal(model.generate(**source, max_new_tokens=6))
    assert without_mask.equal(model.generate(source["input_ids"], **search, eos_token_id=eos))


def test_an_encoder_that_returns_a_tuple_is_exported_to_onnx(tmp_path):
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "tie_word_embeddings": False}
    to_onnx(edited(wrap_tuple_encoder, **sizes), tokenizer, tmp_path)
    assert (tmp_path / "encoder_model.onnx").exists()


class SpeechEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.frames = nn.Linear(7, WIDTH)

    def forward(self, input_features=None, **kwargs):
        return (self.frames(input_features),)


class SpeechModel(VanillaTransformerForConditionalGeneration):
    main_input_name = "input_features"

    def __init__(self, config):
        super().__init__(config)
        self.model.encoder = SpeechEncoder()
        self.post_init()


def test_the_encoder_may_read_speech():
    model = edited(lambda model: None, SpeechModel, tie_word_embeddings=False)
    features = torch.randn(4, 9, 7)
    model(input_features=features, labels=torch.full((4, 3), 5)).loss.backward()
    model.generation_config.eos_token_id = None
    # 9 frames and 3 more tokens
    expected = greedily(model, {"input_features": features}, 12)
    assert expected.equal(model.generate(features, max_extra_tokens=3))
    assert expected.equal(model.generate(input_features=features, max_extra_tokens=3))
    for search in SEARCHES:
        settings = {**search, "eos_token_id": model.config.eos_token_id, "max_new_tokens": 5}
        found = model.generate(features, **settings)
        memory = model.get_encoder()(features)
        assert found.equal(model.generate(encoder_outputs=memory, **settings))
    with pytest.raises(ValueError, match="inputs and input_features are two names"):
        model.generate(features, input_features=features)


class AnyModel(nn.Module):
    """Encoder and decoder in a module of torch."""

    def __init__(self, config):
        super().__init__()
        self.stacks = VanillaTransformerModel(config)

    def forward(self, **kwargs):
        return self.stacks(**kwargs)

    def get_encoder(self, *args, **kwargs):
        return self.stacks.encoder

    def get_decoder(self):
        return self.stacks.decoder


def test_the_module_of_encoder_and_decoder_may_be_of_torch(source, tmp_path):
    def replace(model):
        model.model = AnyModel(model.config)

    model = edited(replace, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for search in SEARCHES:
        expected = model.generate(**{**source, **search, "use_cache": False}, max_new_tokens=6)
        assert expected.equal(model.generate(**source, **search, max_new_tokens=6))
        assert expected.equal(loaded.generate(**source, **search, max_new_tokens=6))


def test_the_embeddings_of_another_encoder_are_resized(source):
    def replace(model):
        model.model.encoder = small_encoder("BERT", 23)

    model = edited(replace, tie_word_embeddings=False)
    before = model.generate(**source, max_new_tokens=5, suppress_tokens=[23, 24])
    model.resize_token_embeddings(25)
    assert model.model.encoder.embeddings.word_embeddings.num_embeddings == 25
    assert before.equal(model.generate(**source, max_new_tokens=5, suppress_tokens=[23, 24]))


class GroupedAttention(modeling.MultiHeadAttention):
    """Attention with one head of keys and values for three heads of queries."""

    def __init__(self, config, num_heads=6, layer_idx=None, is_causal=False):
        super().__init__(config, num_heads, layer_idx, is_causal)
        self.num_key_value_groups = 3
        self.k_proj = nn.Linear(WIDTH, num_heads // 3 * self.d_k)
        self.v_proj = nn.Linear(WIDTH, num_heads // 3 * self.d_v)


def group_heads(model):
    for layer in model.model.encoder.layers:
        layer.self_attention = GroupedAttention(model.config)
    for index, layer in enumerate(model.model.decoder.layers):
        layer.self_attention = GroupedAttention(model.config, 6, index, is_causal=True)
        layer.cross_attention = GroupedAttention(model.config, 6, index)


SIX_HEADS = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}


def test_heads_may_share_keys_and_values(source):
    model = edited(group_heads, **SIX_HEADS)
    for search in SEARCHES:
        found = model.generate(**source, **search, max_new_tokens=6)
        assert found.equal(model.generate(**{**source, **search, "use_cache": False}, max_length=7))
        static = {**search, "use_cache": True, "cache_implementation": "static"}
        assert found.equal(model.generate(**source, **static, max_new_tokens=6))
    with torch.no_grad():
        expected = model(**source, labels=source["input_ids"]).logits
        model.set_attn_implementation("eager")
        output = model(**source, labels=source["input_ids"], output_attentions=True)
    torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=1e-5)
    for weights in (output.encoder_attentions, output.decoder_attentions, output.cross_attentions):
        assert {each.shape for each in weights} == {(4, 6, 7, 7)}


def test_heads_that_share_keys_are_refused_by_the_engine(source):
    released = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**SMALL)).eval()
    attention = released.model.decoder.layers[1].self_attention
    attention.k_proj = nn.Linear(WIDTH, attention.d_k, bias=False)
    found = released.generate(**source, num_beams=3, max_new_tokens=6)
    assert found.equal(released.generate(**source, num_beams=3, max_new_tokens=6, use_cache=False))
    with pytest.raises(ValueError, match="decoder has other heads of keys than of queries"):
        released.generate(**source, engine="required")


class SilentAttention(modeling.MultiHeadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)[0], None


def silence(stack, index, name):
    def replace(model):
        layer = getattr(model.model, stack).layers[index]
        old = getattr(layer, name)
        new = SilentAttention(model.config, 3, old.layer_idx, old.is_causal)
        setattr(layer, name, new)

    return replace


def drop_layers(model):
    model.model.encoder.layers = nn.ModuleList()


def give_a_layer_other_heads(model):
    model.model.encoder.layers[1].self_attention = modeling.MultiHeadAttention(model.config, 2)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (silence("encoder", 0, "self_attention"), "1 of 2 layers in encoder_attentions"),
        (silence("decoder", 1, "self_attention"), "2 of 3 layers in decoder_attentions"),
        (silence("decoder", 1, "cross_attention"), "2 of 3 layers in cross_attentions"),
        (drop_layers, "got None in encoder_attentions"),
        (give_a_layer_other_heads, r"got \[3, 2\] in encoder attention"),
    ],
    ids=["encoder", "decoder", "cross", "no layers", "heads"],
)
def test_weights_that_a_changed_attention_does_not_return_are_named(edit, message):
    tokenizer = make_tokenizer()
    model = edited(edit, vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match=message):
        attention_weights(model, tokenizer, TEXTS[0], max_new_tokens=3)
    if "cross" in message:
        inputs = tokenizer(TEXTS[:1], return_tensors="pt")
        with pytest.raises(ValueError, match=message):
            head_weights(model, inputs, [[5, 6]], heads=[[1, 0]])


def tie_head_to_target(model):
    model.lm_head.weight = model.model.decoder.embed_tokens.weight


def test_a_tie_that_the_configuration_lacks_loses_no_weights(source, tmp_path, warnings_of_search):
    model = edited(tie_head_to_target, tie_word_embeddings=False)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    kind = VanillaTransformerForConditionalGeneration
    released = kind(model.config).eval()
    tie_head_to_target(released)
    released.load_state_dict(model.state_dict())
    expected = model(**source, decoder_input_ids=source["input_ids"]).logits
    for name, each in (("changed", model), ("released", released)):
        each.save_pretrained(tmp_path / name)
        loaded = type(each).from_pretrained(tmp_path / name)
        found = loaded(**source, decoder_input_ids=source["input_ids"]).logits
        torch.testing.assert_close(found, expected)
    assert all("saves a copy of its own for lm_head.weight" in each for each in warnings_of_search)
    assert len(warnings_of_search) == 2


def test_a_change_that_loading_would_lose_is_named(small_model, tmp_path, warnings_of_search):
    model = small_model()
    model.save_pretrained(tmp_path)
    # as checkpoints of a training are saved
    untied = {name: each for name, each in model.state_dict().items() if name != "lm_head.weight"}
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path, state_dict=untied)
    assert not warnings_of_search
    model.model.decoder.layers = model.model.decoder.layers[:1]
    model.save_pretrained(tmp_path)
    (told,) = warnings_of_search
    assert "cannot load this changed model" in told
    assert "model.decoder.layers.1." in told
    model.config.decoder_layers = 1
    model.save_pretrained(tmp_path)
    assert len(warnings_of_search) == 1
    feed_forward = model.model.encoder.layers[1].feed_forward
    feed_forward.fc1 = nn.Linear(WIDTH, 5)
    feed_forward.fc2 = nn.Linear(5, WIDTH)
    model.save_pretrained(tmp_path)
    assert "3 weights differ" in warnings_of_search.pop()
    # the change of a user's class is in its code
    edited(replace_encoder_layers).save_pretrained(tmp_path)
    assert len(warnings_of_search) == 1


@pytest.mark.parametrize("settings", [{}, {"batch_size": 1}, {"batch_size": 2}])
@pytest.mark.parametrize("edit", [replace_decoder_layers, replace_encoder], ids=["decoder", "both"])
def test_the_pipeline_gives_each_text_its_own_arguments(edit, settings):
    tokenizer = make_tokenizer()
    model = edited(edit, vocab_size=len(tokenizer))
    # beams of equal scores would be ordered by rounding
    translator = TranslationPipeline(model, tokenizer, device="cpu", num_beams=1, max_new_tokens=5)
    # the pipeline sorts texts by length
    texts = ["a dog", "a cat sleeps on the mat", "a", "the dog and the cat"]
    speaker_ids = torch.tensor([1, 2, 0, 3])
    alone, scores = [], []
    for text, speaker_id in zip(texts, speaker_ids, strict=True):
        (entry,) = translator([text], speaker_ids=speaker_id[None], return_scores=True)
        alone.append(entry["translation_text"])
        scores.append(entry["log_probability"])
    arguments = {**settings, "speaker_ids": speaker_ids}
    found = translator(texts, **arguments, return_scores=True, return_alignment=True)
    assert [entry["translation_text"] for entry in found] == alone
    assert [entry["log_probability"] for entry in found] == pytest.approx(scores, rel=1e-4)
    plain = translator(texts, return_scores=True)
    assert scores != pytest.approx([entry["log_probability"] for entry in plain])
    pair_scores = [
        translator.score(texts, alone, **arguments)[index]["log_probability"] for index in range(4)
    ]
    assert pair_scores != pytest.approx(
        [entry["log_probability"] for entry in translator.score(texts, alone)]
    )
    assert len(translator.align(texts, alone, **arguments)) == 4
    with pytest.raises(ValueError, match=r"a row for each of the 4 texts .*, got \[3\]"):
        translator(texts, speaker_ids=speaker_ids[:3])
    with pytest.raises(ValueError, match=r"a row for each of the 4 texts .*, got int"):
        translator.score(texts, alone, speaker_ids=3)


class Wrapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, *args, **kwargs):
        x = self.layer(*args, **kwargs)
        return x + self.adapter(x)


def wrap_layers(model):
    layers = model.model.decoder.layers
    model.model.decoder.layers = nn.ModuleList(map(Wrapped, layers))


def wrap_one_layer_three_times(model):
    layer = model.model.decoder.layers[0]
    model.model.decoder.layers = nn.ModuleList(Wrapped(layer) for _ in range(3))


@pytest.mark.parametrize("edit", [wrap_layers, wrap_one_layer_three_times])
def test_wrapped_layers_are_searched_like_layers(edit, source, warnings_of_search):
    model = edited(edit)
    target = source["input_ids"][:, :6]
    with torch.no_grad():
        expected = model(**source, decoder_input_ids=target, use_cache=False).logits
        first = model(**source, decoder_input_ids=target[:, :5], use_cache=True)
        cache = first.get(CACHE_NAME)
        if edit is wrap_layers:
            step = {"decoder_input_ids": target[:, 5:], CACHE_NAME: cache}
            torch.testing.assert_close(model(**source, **step).logits, expected[:, 5:])
        else:
            # one index in the cache for three layers
            assert cache is None
    for search in SEARCHES:
        settings = {**source, **search, "engine": "off"}
        found = model.generate(**settings, max_new_tokens=6)
        assert found.equal(model.generate(**{**settings, "use_cache": False}, max_length=7))
    assert ("cache indices [0, 0, 0]" in str(warnings_of_search)) == (edit is not wrap_layers)
