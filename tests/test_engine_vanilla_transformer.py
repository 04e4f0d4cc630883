"""The inference engine finds the same translations as the model's own modules."""

import copy
import gc
import platform
import subprocess
import sys
import weakref

import pytest
import torch
from accelerate import cpu_offload
from fake_graphs import FakeGraphs, HostOperators
from peft import LoraConfig, get_peft_model
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from vanilla_transformer import checks_vanilla_transformer as checks
from vanilla_transformer import deviations_vanilla_transformer as deviations
from vanilla_transformer import engine_checks_vanilla_transformer as engine_checks
from vanilla_transformer import engine_vanilla_transformer as engine
from vanilla_transformer import generation_vanilla_transformer as generation
from vanilla_transformer import identity_vanilla_transformer as identity
from vanilla_transformer import kernels_vanilla_transformer as kernels
from vanilla_transformer.decoding_vanilla_transformer import CACHE_NAME
from vanilla_transformer.search_vanilla_transformer import PaperBeamSearch, WholeSearchCriteria

PAPER = {"num_beams": 4, "length_penalty_alpha": 0.6, "max_extra_tokens": 6}
GREEDY = {"num_beams": 1, "max_extra_tokens": 6}


@pytest.fixture
def lively_model(small_model):
    """A function from configuration fields to a model whose translations differ."""

    def build(**fields):
        model = small_model(**{"hidden_size": 48, "dropout": 0.0, **fields})
        for name, parameter in model.named_parameters():
            if "_proj.weight" in name:
                parameter.data.normal_(std=0.3)
            elif "embed_tokens" in name or "table" in name:
                parameter.data.normal_(std=0.2)
        return model

    return build


@pytest.fixture
def source(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@pytest.fixture
def graphs(monkeypatch):
    """Count of the recorded steps; a search on the CPU records and replays as one on a GPU."""
    fake = FakeGraphs()
    monkeypatch.setattr(engine, "CAPTURING_DEVICES", ("cpu",))
    monkeypatch.setattr(engine, "captured", fake)
    return fake


@pytest.fixture(params=["step by step", "captured"])
def either_way(request):
    """Make the engine compute each step in Python, or replay a recorded step."""
    if request.param == "captured":
        request.getfixturevalue("graphs")
    return request.param


@pytest.fixture
def scores(monkeypatch):
    """The scores of each beam search, in order."""
    found = []
    run = PaperBeamSearch.run

    def recording(self):
        ids = run(self)
        found.append(self.results.scores)
        return ids

    monkeypatch.setattr(PaperBeamSearch, "run", recording)
    return found


MODELS = [
    {},
    {"norm_first": True},
    {"attention_bias": True, "output_bias": True},
    {"d_k": 7, "d_v": 5},
    {"position_encoding": "learned", "max_position_embeddings": 40, "position_offset": 2},
    {"position_encoding": "none"},
    {"position_layout": "halves", "position_offset": 3},
    {"encoder_attention_heads": 3, "decoder_attention_heads": 4, "d_k": 6, "d_v": 6},
    {"tie_word_embeddings": False},
    {"activation_function": "gelu"},
    {"vocab_size": 5003},
]
SEARCHES = [
    GREEDY,
    PAPER,
    {**PAPER, "num_beams": 3, "num_return_sequences": 2, "length_penalty_alpha": 0.0},
    {**PAPER, "length_penalty_alpha": -0.7, "min_new_tokens": 5, "suppress_tokens": [4, 9]},
    {**PAPER, "num_beams": 7, "decoder_input_ids": torch.tensor([[1, 9, 8, 5]]).expand(4, -1)},
    {**GREEDY, "decoder_input_ids": torch.tensor([[1, 9]]).expand(4, -1), "min_new_tokens": 3},
    {**PAPER, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    {**GREEDY, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("fields", MODELS, ids=str)
def test_engine_and_modules_find_the_same_in_every_model(
    lively_model, source, searched, scores, either_way, fields
):
    model = lively_model(**fields)
    for search in SEARCHES:
        expected = model.generate(**source, **search, engine="off")
        assert not searched
        found = model.generate(**source, **search)
        assert found.tolist() == expected.tolist(), search
        assert len(searched) == 1
        searched.clear()
    assert len(scores) == 2 * len([search for search in SEARCHES if search["num_beams"] > 1])
    for expected, found in zip(scores[::2], scores[1::2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("search", [GREEDY, PAPER, {**PAPER, "num_beams": 9}])
def test_long_translations_outgrow_the_first_slots(
    lively_model, source, searched, scores, either_way, monkeypatch, search
):
    monkeypatch.setattr(engine.CapturedDecoding, "first_slots", engine.FIRST_SLOTS)
    model = lively_model()
    search = {**search, "max_extra_tokens": 90, "min_new_tokens": 75}
    expected = model.generate(**source, **search, engine="off")
    assert expected.shape[1] > engine.FIRST_SLOTS
    assert model.generate(**source, **search).tolist() == expected.tolist()
    assert searched
    if scores:
        torch.testing.assert_close(scores[1], scores[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("search", [GREEDY, PAPER])
def test_many_sentences_of_many_lengths_in_any_order(lively_model, searched, either_way, search):
    model = lively_model(norm_first=True)
    lengths = torch.randint(2, 12, (40,))
    mask = (torch.arange(12) < lengths[:, None]).long()
    ids = torch.randint(3, 23, (40, 12)) * mask
    expected = model.generate(input_ids=ids, attention_mask=mask, **search, engine="off")
    # some end with the end token, some at their maximum length
    assert 0 < (expected == 2).any(dim=1).sum() < 40
    assert len(set((expected != 0).sum(dim=1).tolist())) > 3
    found = model.generate(ids, attention_mask=mask, **search)
    assert found.tolist() == expected.tolist()
    # hidden tokens before the end do not change the positions, for engine and modules
    mask[:, 1] = 0
    expected = model.generate(input_ids=ids, attention_mask=mask, **search, engine="off")
    assert model.generate(ids, attention_mask=mask, **search).tolist() == expected.tolist()
    assert len(searched) == 2


@pytest.mark.parametrize("search", [GREEDY, PAPER])
def test_finished_sentences_leave_the_engine(lively_model, source, monkeypatch, search):
    rows = []
    model = lively_model()
    # build and probe the engine before the count
    model.generate(**source, **search)
    read = engine.EngineDecoding._read_tokens

    def counting(self, tokens):
        rows.append(tokens.numel())
        return read(self, tokens)

    monkeypatch.setattr(engine.EngineDecoding, "_read_tokens", counting)
    model.generate(**source, **search)
    # the beams of a sentence are equal at first
    assert rows[0] == 4
    assert rows[1] == 4 * search["num_beams"]
    assert rows[1:] == sorted(rows[1:], reverse=True)
    assert rows[-1] < rows[1]


# the beam search records two graphs, the decoder's step and the selection; it replays the selection
# neither in its first step, which has one hypothesis, nor at the maximum length
@pytest.mark.parametrize(
    ("search", "num_graphs", "num_replays"), [(GREEDY, 1, 4), (PAPER, 2, 4 + 3)]
)
def test_a_captured_step_is_replayed_until_its_sizes_change(
    lively_model, source, graphs, search, num_graphs, num_replays
):
    model = lively_model()
    # the probe replays a step too, before the engine searches
    model.generate(**source, **search)
    assert graphs.num_replays >= 1
    graphs.num_graphs = graphs.num_replays = 0
    search = {**search, "min_new_tokens": 6, "max_new_tokens": 6, "max_extra_tokens": None}
    model.generate(**source, **search)
    assert (graphs.num_graphs, graphs.num_replays) == (num_graphs, num_replays)
    # sentences that end early leave when half of them have ended
    graphs.num_graphs = graphs.num_replays = 0
    many = {name: tensor.repeat(8, 1) for name, tensor in source.items()}
    steps = model.generate(**many, **{**search, "min_new_tokens": 0, "max_new_tokens": 40})
    assert graphs.num_graphs <= 4 * num_graphs
    assert graphs.num_replays >= num_graphs * (steps.shape[1] - 7)


@pytest.mark.parametrize("rule", [{}, {"suppress_tokens": [7, 8]}])
@pytest.mark.parametrize("search", [GREEDY, PAPER])
def test_the_cpu_launches_few_operators_beside_the_replays(
    lively_model, source, graphs, search, rule, monkeypatch
):
    # otherwise the mode that counts the operators would turn the engine off
    monkeypatch.setattr(identity, "_get_current_dispatch_mode_stack", list)
    model = lively_model()
    counts = []
    for length in (10, 10, 20):
        limits = {"min_new_tokens": length, "max_new_tokens": length, "max_extra_tokens": None}
        with HostOperators(graphs) as operators:
            model.generate(**source, **{**search, **rule, **limits})
        counts.append(operators.count)
    # the first search also builds the engine
    assert 0 < counts[2] - counts[1] <= 10 * 12


@pytest.mark.parametrize(
    "rules",
    [
        {"min_new_tokens": 5},
        {"suppress_tokens": [7, 8], "min_new_tokens": 3, "renormalize_logits": True},
        {"forced_eos_token_id": 2, "bad_words_ids": [[11], [12]]},
        {"max_extra_tokens": 1, "num_return_sequences": 2},
        {"length_penalty_alpha": 2.0, "eos_token_id": [2, 9, 10]},
    ],
)
def test_a_captured_search_follows_rules_that_change_from_step_to_step(
    lively_model, source, graphs, scores, rules
):
    model = lively_model()
    many = {name: tensor.repeat(8, 1) for name, tensor in source.items()}
    many["input_ids"] = many["input_ids"].clone()
    many["input_ids"][:, 0] = torch.arange(len(many["input_ids"])) % 18 + 5
    search = {**PAPER, "max_new_tokens": 14, **rules}
    expected = model.generate(**many, **search, engine="off")
    found = model.generate(**many, **search)
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-4, atol=1e-4)
    assert found.tolist() == expected.tolist()
    assert graphs.num_replays > 4


def test_a_criterion_of_the_whole_search_does_not_prevent_capturing(lively_model, source, graphs):
    class StopAtStep(WholeSearchCriteria):
        def __init__(self, step):
            self.remaining = step

        def is_met(self):
            self.remaining -= 1
            return self.remaining <= 0

    model = lively_model()
    search = {**PAPER, "min_new_tokens": 12, "max_new_tokens": 12, "max_extra_tokens": None}
    expected = model.generate(**source, **search)
    graphs.num_graphs = graphs.num_replays = 0
    criteria = StoppingCriteriaList([StopAtStep(1_000)])
    found = model.generate(**source, **search, stopping_criteria=criteria)
    assert found.tolist() == expected.tolist()
    # the decoder's step, and the selection; see above
    assert (graphs.num_graphs, graphs.num_replays) == (2, 10 + 9)
    # it ends captured searches and others alike: in the fourth step, each hypothesis has 4 tokens
    stopped = [
        model.generate(
            **source, **search, engine=engine, stopping_criteria=StoppingCriteriaList([criterion])
        )
        for engine in ("auto", "off")
        for criterion in [StopAtStep(4)]
    ]
    assert stopped[0].tolist() == stopped[1].tolist()
    assert stopped[0].shape[1] == 1 + 4


def test_encoder_outputs_of_another_width_are_refused(lively_model, source):
    model = lively_model()
    message = "encoder_outputs must have 48 numbers for each token, got 10"
    for search in (PAPER, GREEDY, {"num_beams": 2}):
        with pytest.raises(ValueError, match=message):
            model.generate(encoder_outputs=(torch.randn(4, 7, 10),), **search)


class Negated(torch.Tensor):
    """A tensor whose linear layers change the sign."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return -result if function is torch.nn.functional.linear else result


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "encoder_outputs"])
def test_inputs_of_a_class_of_tensors_are_searched_with_its_functions(
    lively_model, source, searched, name
):
    model = lively_model()
    memory = model.get_encoder()(**source).last_hidden_state
    given = {**source, "encoder_outputs": (memory.as_subclass(Negated),)}
    if name != "encoder_outputs":
        given = {**source, name: source[name].as_subclass(Negated)}
    for search in (PAPER, GREEDY):
        expected = model.generate(**given, **search, engine="off")
        assert model.generate(**given, **search).tolist() == expected.tolist()
        with pytest.raises(ValueError, match=f"{name} is of the class Negated"):
            model.generate(**given, **search, engine="required")
    assert not searched


def test_given_encoder_outputs_are_used(lively_model, source, searched):
    model = lively_model()
    encoded = model.get_encoder()(**source)
    given = {"encoder_outputs": encoded, "attention_mask": source["attention_mask"]}
    expected = model.generate(**source, **PAPER, engine="off")
    assert model.generate(**given, **PAPER).tolist() == expected.tolist()
    assert len(searched) == 1


def train_a_step(model):
    model.train()
    source = torch.tensor([[5, 6, 2]])
    torch.optim.SGD(model.parameters(), lr=0.5).zero_grad()
    model(input_ids=source, labels=source).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.eval()


def load_others(model):
    others = {name: weight.flip(0) for name, weight in model.state_dict().items()}
    model.load_state_dict(others)


def write_one_number_of_data(model):
    model.model.decoder.layers[1].feed_forward.fc2.weight.data[2, 3] += 9.0


def exchange_rows_of_data(model):
    weight = model.lm_head.weight.data
    weight.copy_(weight.flip(0))


def exchange_columns_of_data(model):
    weight = model.model.encoder.layers[0].feed_forward.fc1.weight.data
    weight.copy_(weight.flip(1))


def write_through_numpy(model):
    model.model.decoder.layers[0].cross_attention.k_proj.weight.detach().numpy()[:] *= -2.0


def move_a_norm(model):
    model.model.decoder.layers[0].feed_forward_norm.bias.data += torch.randn(48)


def replace_a_layer(model):
    layer = model.model.decoder.layers[2].self_attention
    layer.v_proj = torch.nn.Linear(48, 48, bias=False)


def replace_data(model):
    weight = model.model.encoder.layers[1].self_attention.out_proj.weight
    weight.data = torch.randn(48, 48)


def replace_activations(model):
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.feed_forward.activation = torch.nn.SiLU()


def set_another_base(model):
    model.config.position_base = 3.0


def merge_adapters(model):
    adapted = get_peft_model(model, LoraConfig(target_modules=["v_proj"], r=4))
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            weight.data.normal_(std=2.0)
    adapted.merge_and_unload()


CHANGES = [
    train_a_step,
    load_others,
    write_one_number_of_data,
    exchange_rows_of_data,
    exchange_columns_of_data,
    write_through_numpy,
    move_a_norm,
    replace_a_layer,
    replace_data,
    replace_activations,
    set_another_base,
    merge_adapters,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_packed_again(lively_model, source, searched, scores, change):
    model = lively_model()
    model.generate(**source, **PAPER)
    change(model)
    found = model.generate(**source, **PAPER)
    assert len(searched) == 2
    assert found.tolist() == model.generate(**source, **PAPER, engine="off").tolist()
    before, after, expected = scores
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)
    assert (before - after).abs().max() > 1e-3


def test_a_change_during_a_search_is_refused(lively_model, source):
    model = lively_model()
    layer = model.model.decoder.layers[0]

    def change_weights(ids, scores):
        with torch.no_grad():
            layer.feed_forward.fc1.weight.add_(0.1)
        return scores

    def add_a_hook(ids, scores, **kwargs):
        if not layer._forward_hooks:
            layer.register_forward_hook(lambda module, args, output: -output)
        return False

    def train_and_evaluate(ids, scores):
        model.train()
        model.eval()
        return scores

    for search in (PAPER, GREEDY, {"num_beams": 2}):
        search = {**search, "min_new_tokens": 3}
        expected = model.generate(**source, **search)
        found = model.generate(**source, **search, logits_processor=[train_and_evaluate])
        assert found.tolist() == expected.tolist()
        for given in (
            {"logits_processor": [change_weights]},
            {"stopping_criteria": [add_a_hook]},
        ):
            with pytest.raises(ValueError, match="has changed it: set engine='off'"):
                model.generate(**source, **search, **given)
            model.generate(**source, **search, **given, engine="off")
            layer._forward_hooks.clear()


def test_unchanged_weights_are_packed_once(lively_model, source, searched):
    model = lively_model()
    for search in (PAPER, GREEDY, PAPER):
        model.generate(**source, **search)
    assert searched[0] is searched[1] is searched[2]


def test_an_attribute_of_the_configuration_may_be_a_tensor(lively_model, source, searched):
    model = lively_model()
    model.config.prior = torch.rand(3)
    expected = model.generate(**source, **PAPER)
    model.config.prior = torch.rand(3)
    assert model.generate(**source, **PAPER).tolist() == expected.tolist()
    assert searched == [searched[0]] * 2


def test_packed_weights_are_freed_with_the_model_and_in_training(lively_model, source, searched):
    model = lively_model()
    model.generate(**source, **PAPER)
    packed = weakref.ref(searched.pop())
    model.train()
    gc.collect()
    assert packed() is None
    model.eval().generate(**source, **PAPER)
    packed = weakref.ref(searched.pop())
    copied = copy.deepcopy(model)
    del model
    gc.collect()
    assert packed() is None
    copied.generate(**source, **PAPER)
    assert searched


def add_hook(model):
    model.model.decoder.layers[0].register_forward_hook(lambda module, args, output: output * 0.5)


def add_adapters(model):
    get_peft_model(model, LoraConfig(target_modules=["v_proj"], r=2))


def wrap_forward(model):
    feed_forward = model.model.encoder.layers[0].feed_forward
    feed_forward.forward = lambda x: -x


def add_parametrization(model):
    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    linear = model.model.decoder.layers[0].feed_forward.fc1
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Doubled())


def offload(model):
    cpu_offload(model, execution_device=torch.device("cpu"))


OBSTACLES = [
    (
        offload,
        "VanillaTransformerForConditionalGeneration has its own forward",
    ),
    (lambda model: model.train(), "the model is in training mode"),
    (
        lambda model: model.model.encoder.dropout.train(),
        "model.encoder.dropout is in training mode",
    ),
    (lambda model: model.double(), "weights must be float32, bfloat16 or float16, got float64"),
    (add_hook, "model.decoder.layers.0 has a forward hook"),
    (add_adapters, "model.encoder.layers.0.self_attention.v_proj is of the class peft"),
    (
        wrap_forward,
        "model.encoder.layers.0.feed_forward has its own forward",
    ),
    (
        add_parametrization,
        "model.decoder.layers.0.feed_forward.fc1 is of the class torch.nn.utils",
    ),
]


def test_a_model_made_in_inference_mode_is_searched(lively_model, source, searched):
    with torch.inference_mode():
        model = copy.deepcopy(lively_model())
        expected = model.generate(**source, **PAPER, engine="off")
        assert model.generate(**source, **PAPER).tolist() == expected.tolist()
    assert searched


def test_another_default_dtype_changes_nothing(lively_model, source, searched):
    model = lively_model()
    expected = model.generate(**source, **PAPER, engine="off")
    kernels.packing_library.cache_clear()
    kernels._is_available_and_correct.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        found = model.generate(**source, **PAPER)
        assert kernels.packing_library() or not torch.backends.mkl.is_available()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.tolist() == expected.tolist()
    assert searched


def test_a_suppressed_token_may_have_probability_1(lively_model, source, searched):
    model = lively_model(output_bias=True)
    with torch.no_grad():
        model.lm_head.bias[2] = 95.0
    search = {**PAPER, "min_new_tokens": 5}
    expected = model.generate(**source, **search, engine="off")
    assert model.generate(**source, **search).tolist() == expected.tolist()
    assert searched


@pytest.mark.parametrize("search", [PAPER, GREEDY])
def test_suppressed_ids_outside_of_the_vocabulary_are_ignored(
    lively_model, source, searched, search
):
    model = lively_model(output_bias=True)
    last = model.config.vocab_size - 1
    with torch.no_grad():
        model.lm_head.bias[last] = 3.0
    expected = model.generate(**source, **search, engine="off")
    assert last in expected
    for absent in ([-1], [last + 1, last + 30]):
        found = model.generate(**source, **search, suppress_tokens=absent)
        assert found.tolist() == expected.tolist()
    assert searched
    assert last not in model.generate(**source, **search, suppress_tokens=[last])


@pytest.fixture
def told(monkeypatch):
    """Warnings of `generate`, which come once for each reason in a process."""
    checks.warn_once.cache_clear()
    messages = []
    monkeypatch.setattr(checks.logger, "warning", lambda text, *args: messages.append(text % args))
    return messages


@pytest.mark.parametrize(("change", "message"), OBSTACLES)
def test_the_modules_do_what_the_engine_cannot(
    lively_model, source, searched, told, change, message
):
    model = lively_model()
    change(model)
    for search in (PAPER, GREEDY):
        model.generate(**source, **search)
        for setting in ({"int8": True}, {"engine": "required"}):
            with pytest.raises(ValueError, match=f"needs the inference engine, .*: {message}"):
                model.generate(**source, **search, **setting)
        model.generate(**source, **search, engine="off")
    assert not searched
    assert len(told) == 1
    assert f"not the faster inference engine, because {message}" in told[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"return_dict_in_generate": True, "output_hidden_states": True},
            "output_hidden_states is set",
        ),
        ({"use_cache": False}, "use_cache is False"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"decoder_attention_mask": torch.ones(4, 1)}, "decoder_attention_mask is given"),
    ],
)
def test_the_modules_search_with_settings_that_the_engine_lacks(
    lively_model, source, searched, told, settings, message
):
    model = lively_model()
    model.generate(**source, **{**PAPER, **settings})
    for setting in ({"int8": True}, {"engine": "required"}):
        with pytest.raises(ValueError, match=f"needs the inference engine, .*: {message}"):
            model.generate(**source, **{**PAPER, **settings}, **setting)
    assert not searched
    # no warning: the setting is the choice of the user
    assert not told


@pytest.mark.parametrize(
    "search",
    [
        {"num_beams": 4},
        {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
        {"num_beams": 5, "no_repeat_ngram_size": 2, "num_return_sequences": 3},
        {"num_beams": 3, "early_stopping": "never", "repetition_penalty": 1.3},
        {"num_beams": 4, "forced_bos_token_id": 7, "bad_words_ids": [[9], [10, 11]]},
        {"num_beams": 2, "max_length": 6, "min_length": 4, "suppress_tokens": [5]},
        {"num_beams": 4, "bad_words_ids": [[9]], "forced_eos_token_id": 2},
        {"num_beams": 3, "suppress_tokens": [5, 9], "renormalize_logits": True},
        {"num_beams": 3, "forced_bos_token_id": 7, "num_return_sequences": 3, "min_new_tokens": 3},
        {"num_beams": 4, "eos_token_id": [2, 6]},
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 5, "top_p": 0.9},
        {"do_sample": True, "num_beams": 3, "temperature": 0.7},
        {"num_beams": 4, "decoder_input_ids": torch.tensor([[1, 5, 7]] * 4)},
    ],
)
def test_the_library_searches_on_the_engine_as_on_the_modules(
    lively_model, source, searched, search
):
    model = lively_model()
    search = {"max_new_tokens": 9, **search}
    if "max_length" in search:
        del search["max_new_tokens"]
    found = []
    for choice in ("required", "off"):
        torch.manual_seed(7)
        found.append(model.generate(**source, **search, engine=choice))
    assert len(searched) == 1
    assert found[0].unique().numel() > 2
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("search", "steps_with_all_tokens"),
    [
        ({}, 0),
        ({"suppress_tokens": [5], "renormalize_logits": True}, 0),
        # the first and the last token are forced
        ({"forced_bos_token_id": 7, "forced_eos_token_id": 2}, 2),
        ({"no_repeat_ngram_size": 2}, 9),
        ({"bad_words_ids": [[9, 10]]}, 9),
        ({"logits_processor": LogitsProcessorList([lambda ids, scores: scores])}, 9),
        ({"return_dict_in_generate": True, "output_scores": True}, 9),
        ({"do_sample": True}, 9),
    ],
)
def test_the_library_gets_only_tokens_that_can_continue_a_hypothesis(
    lively_model, source, monkeypatch, search, steps_with_all_tokens
):
    model, seen = lively_model(), []
    look = generation.EngineModel._get_top_k_continuations

    def looking(self, **kwargs):
        seen.append(kwargs["accumulated_log_probs"].shape[1])
        return look(self, **kwargs)

    monkeypatch.setattr(generation.EngineModel, "_get_top_k_continuations", looking)
    settings = {"num_beams": 3, "min_new_tokens": 9, "max_new_tokens": 9, "engine": "required"}
    model.generate(**source, **settings, **search)
    assert seen.count(3 * model.config.vocab_size) == steps_with_all_tokens
    assert len(seen) == 9


def test_the_library_streams_on_the_engine(lively_model, source, searched):
    class Streamer(BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append("end")

    model, streamer = lively_model(), Streamer()
    ids = source["input_ids"][:1]
    found = model.generate(ids, **GREEDY, streamer=streamer, engine="required")
    assert len(searched) == 1
    assert streamer.tokens == [*found[0].tolist(), "end"]
    assert torch.equal(found, model.generate(ids, **GREEDY, engine="off"))


def test_the_modules_run_under_autocast(lively_model, source, searched):
    model = lively_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate(**source, **PAPER)
        with pytest.raises(ValueError, match="autocast or compilation is active"):
            model.generate(**source, **PAPER, int8=True)
    assert not searched


@pytest.mark.parametrize(
    ("search", "more", "message"),
    [
        (PAPER, lambda model: {"synced_gpus": True}, "synced_gpus is set"),
        (GREEDY, lambda model: {"assistant_model": copy.deepcopy(model)}, "assisted generation"),
    ],
)
def test_int8_is_refused_where_the_engine_cannot_search(
    lively_model, source, search, more, message
):
    model = lively_model()
    one = {name: ids[:1] for name, ids in source.items()}
    with pytest.raises(ValueError, match=f"int8 needs the inference engine, .*{message}"):
        model.generate(**one, **search, **more(model), int8=True)


def test_recorded_outputs_do_not_turn_the_engine_off(lively_model, source, searched):
    model = lively_model()
    model.set_attn_implementation("eager")
    asked = {"return_dict_in_generate": True, "output_attentions": True}
    assert model.generate(**source, **PAPER, **asked).cross_attentions
    assert not searched
    model.generate(**source, **PAPER)
    assert len(searched) == 1


SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize(
    "search", [PAPER, {"num_beams": 1}, {"num_beams": 3, "length_penalty_alpha": None}]
)
def test_the_engine_returns_scores_if_it_is_required(lively_model, source, searched, search):
    model = lively_model()
    expected = model.generate(**source, **search, **SCORES)
    assert not searched
    found = model.generate(**source, **search, **SCORES, engine="required")
    assert len(searched) == 1
    assert set(found) | {CACHE_NAME} == set(expected) | {CACHE_NAME}
    assert found.get(CACHE_NAME) is None
    assert found.sequences.tolist() == expected.sequences.tolist()
    # rounding may change the order of the scores from which beams of finished sentences continue
    transitions = [
        model.compute_transition_scores(it.sequences, it.scores, it.get("beam_indices"))
        for it in (found, expected)
    ]
    torch.testing.assert_close(*transitions, rtol=1e-4, atol=1e-4)
    if "sequences_scores" in expected:
        torch.testing.assert_close(
            found.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4
        )
    shapes = [[step.shape for step in it.logits] for it in (found, expected)]
    assert shapes[0] == shapes[1]


def test_a_bias_of_many_outputs_is_seen_when_it_changes(lively_model, source, searched):
    # heads so wide that projections have 1,024 outputs, and are packed together
    sizes = {"d_k": 512, "d_v": 512, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = lively_model(**sizes, attention_bias=True)

    def scores(engine):
        return model.generate(**source, **PAPER, **SCORES, engine=engine).sequences_scores

    before = scores("required")
    projection = model.get_decoder().layers[0].self_attention.v_proj
    assert projection.out_features == 1024
    projection.bias.data += 30 * torch.randn(1024, generator=torch.Generator().manual_seed(0))
    after = scores("required")
    torch.testing.assert_close(after, scores("off"), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after, before, rtol=1e-3)
    assert len(searched) == 2


@pytest.mark.parametrize("settings", [{}, {"int8": True}, {"precision": "bf16"}])
@pytest.mark.parametrize("large", [-1e9, -torch.inf, 1e30])
def test_a_large_number_hides_no_change(lively_model, source, monkeypatch, settings, large):
    monkeypatch.setattr(engine_checks, "has_bf16_instructions", lambda: True)
    monkeypatch.setitem(engine_checks.CPU_LINEAR_CLASSES, "bf16", kernels.Int8Linear)
    model = lively_model(vocab_size=5000, output_bias=True)
    precision = "int8" if settings.get("int8") else settings.get("precision")
    model.lm_head.bias.data[1500] = -1e9 if large > 0 else large
    if large > 0:
        # a weight that no source token reads
        model.lm_head.weight.data[4000, 0] = large
    modules = engine_checks.computing_modules(model)
    linear_class = engine_checks.CPU_LINEAR_CLASSES[precision or "fp32"]
    before = engine_checks._state_of(modules, linear_class)
    assert engine_checks._is_equal(before, engine_checks._state_of(modules, linear_class))
    for weight in (model.lm_head.bias, model.lm_head.weight[4000]):
        weight.data[3] += 0.01
        after = engine_checks._state_of(modules, linear_class)
        is_read_in_place = weight.dim() and linear_class.is_used_in_place(model.lm_head.weight)
        assert engine_checks._is_equal(before, after) == is_read_in_place
        before = after


def test_an_engine_follows_the_configuration_and_a_refusal_ends_with_its_reason(
    lively_model, source, searched
):
    model = lively_model(tie_word_embeddings=False)
    model.generate(**source, **GREEDY, engine="required")
    model.config.a_field_of_mine = [1]
    model.generate(**source, **GREEDY, engine="required")
    embedding = model.model.encoder.embed_tokens.weight
    before = embedding.detach().clone()
    with torch.no_grad():
        embedding.fill_(torch.nan)
    with pytest.raises(ValueError, match="the logits of the engine differ"):
        model.generate(**source, **GREEDY, engine="required")
    with torch.no_grad():
        embedding.copy_(before)
    model.generate(**source, **GREEDY, engine="required")
    assert len(searched) == 3


def test_a_width_of_values_that_does_not_fit_the_weights_is_named(lively_model, source):
    model = lively_model()
    model.model.encoder.layers[0].self_attention.d_v = 7
    with pytest.raises(ValueError, match="an attention of the encoder has a d_v that does not"):
        model.generate(**source, **GREEDY, engine="required")


def test_a_table_with_too_few_positions_is_named(lively_model):
    model = lively_model(
        position_encoding="learned", max_position_embeddings=40, position_offset=2
    ).eval()
    assert engine_checks.reason_against_engine(model) is None
    table = model.model.decoder.positions.table
    model.model.decoder.positions.table = torch.nn.Embedding(40, table.embedding_dim)
    reason = engine_checks.reason_against_engine(model)
    assert reason == "the configuration has 42 positions, the table 40"


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_sparse_weights_run_the_modules(lively_model, source, searched, layout):
    model = lively_model()
    model.generate(**source, **GREEDY)
    linear = model.model.decoder.layers[0].feed_forward.fc1
    linear.weight = torch.nn.Parameter(linear.weight.detach().to_sparse(layout=layout))
    searched.clear()
    expected = model.generate(**source, **GREEDY, engine="off")
    assert model.generate(**source, **GREEDY).tolist() == expected.tolist()
    with pytest.raises(ValueError, match=r"fc1\.weight is not a dense parameter in memory"):
        model.generate(**source, **GREEDY, engine="required")
    assert not searched


def test_int8_gives_scores_only_without_a_cache(lively_model, source):
    with pytest.raises(
        ValueError, match="return_dict_in_generate is set, and the engine returns no cache"
    ):
        lively_model().generate(**source, **PAPER, **SCORES, int8=True)


@pytest.mark.parametrize("fields", [{}, {"norm_first": True, "output_bias": True}])
def test_int8_is_close_to_float32(lively_model, source, searched, scores, fields):
    model = lively_model(**fields, vocab_size=5003)
    search = {**PAPER, "min_new_tokens": 6, "max_new_tokens": 6}
    model.generate(**source, **search)
    model.generate(**source, **search, int8=True)
    exact, rounded = scores
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    assert not torch.equal(rounded, exact)
    for linear in (searched[1].vocabulary, searched[1].memory_projection):
        assert isinstance(linear, kernels.Int8Linear)


def test_the_setting_int8_is_saved(lively_model, source, searched, tmp_path):
    model = lively_model()
    generation.set_paper_search(model)
    model.generation_config.int8 = True
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    expected = model.generate(**source)
    assert again.generate(**source).tolist() == expected.tolist()
    again.generate(**source, int8=False)
    kinds = [type(search.vocabulary) for search in searched]
    assert kinds == [kernels.Int8Linear, kernels.Int8Linear, kernels.PackedLinear]


def test_int8_must_be_true_or_false(lively_model, source):
    with pytest.raises(ValueError, match="int8 must be True or False, got 'yes'"):
        lively_model().generate(**source, **PAPER, int8="yes")


needs_bf16_kernels = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 kernels"
)


@pytest.fixture
def with_bf16(monkeypatch):
    """A CPU with instructions for bf16, which may be emulated."""
    monkeypatch.setattr(engine_checks, "has_bf16_instructions", lambda: True)


@pytest.fixture
def without_bf16(monkeypatch):
    """A CPU without instructions for bf16."""
    monkeypatch.setattr(engine_checks, "has_bf16_instructions", lambda: False)


@needs_bf16_kernels
@pytest.mark.usefixtures("with_bf16", "either_way")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_first": True, "output_bias": True, "attention_bias": True},
        {"activation_function": "gelu", "position_encoding": "learned"},
    ],
)
def test_bf16_is_close_to_float32(lively_model, source, searched, scores, fields):
    model = lively_model(**fields, vocab_size=5003)
    search = {**PAPER, "min_new_tokens": 6, "max_new_tokens": 6}
    model.generate(**source, **search)
    model.generate(**source, **search, precision="bf16")
    half_model = copy.deepcopy(model).bfloat16()
    half_model.generate(**source, **search)
    exact, of_switch, of_half_model = scores
    for rounded in (of_switch, of_half_model):
        torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
        assert not torch.equal(rounded, exact)
    for found in searched[1:]:
        for linear in (found.vocabulary, found.memory_projection):
            assert isinstance(linear, kernels.Bf16Linear)


@needs_bf16_kernels
@pytest.mark.usefixtures("with_bf16")
def test_a_model_in_bf16_has_no_second_copy_of_large_weights(lively_model, source, searched):
    sizes = {"d_k": 512, "d_v": 512, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = lively_model(**sizes, hidden_size=1024, encoder_ffn_dim=1024)
    # attention to one of several equal scores would enlarge rounding errors
    for name, parameter in model.named_parameters():
        if "_proj.weight" in name:
            parameter.data.mul_(0.1)
    model.bfloat16().generate(**source, **PAPER, engine="required")
    (found,) = searched
    layer = model.get_encoder().layers[0]
    for linear, modules in (
        (found.encoder_layers[0].fc1, [layer.feed_forward.fc1]),
        (
            found.encoder_layers[0].self_attention.project,
            [layer.self_attention.q_proj, layer.self_attention.k_proj, layer.self_attention.v_proj],
        ),
    ):
        addresses = [weight.data_ptr() for weight, _ in linear.weights_in_place]
        assert addresses == [module.weight.data_ptr() for module in modules]


@pytest.mark.usefixtures("without_bf16")
def test_bf16_is_refused_on_a_cpu_without_its_instructions(lively_model, source, searched):
    reason = "precision='bf16' needs the inference engine, .* this CPU has no instructions for bf16"
    with pytest.raises(ValueError, match=reason):
        lively_model().generate(**source, **PAPER, precision="bf16")
    assert not searched


@pytest.mark.usefixtures("without_bf16")
def test_a_model_in_bf16_runs_its_modules_on_a_cpu_without_its_instructions(
    lively_model, source, searched, told
):
    model = lively_model().bfloat16()
    expected = model.generate(**source, **PAPER, engine="off")
    for settings in ({}, {"precision": "bf16"}, {"precision": "bf16", "engine": "off"}):
        assert torch.equal(model.generate(**source, **PAPER, **settings), expected)
    assert not searched
    assert len(told) == 1
    assert "precision='fp32'" in told[0]


@pytest.mark.usefixtures("without_bf16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_multiplied_in_float32_on_request(
    lively_model, source, searched, scores, dtype
):
    model = lively_model().to(dtype)
    found = model.generate(**source, **PAPER, precision="fp32")
    expected = copy.deepcopy(model).float().generate(**source, **PAPER)
    assert len(searched) == 2
    assert torch.equal(found, expected)
    torch.testing.assert_close(*scores)


@pytest.mark.usefixtures("with_bf16")
def test_only_a_precision_of_its_own_needs_the_engine(lively_model, source, searched):
    model = lively_model()
    expected = model.generate(**source, **PAPER, engine="off")
    found = model.generate(**source, **PAPER, engine="off", precision="fp32")
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="precision='bf16' needs the inference engine, got engine"):
        model.generate(**source, **PAPER, engine="off", precision="bf16")
    assert not searched


@pytest.mark.usefixtures("with_bf16")
def test_the_precision_is_one_of_two_and_excludes_int8(lively_model, source):
    model = lively_model()
    for wrong in ("fp16", "int8", True, 32):
        with pytest.raises(ValueError, match=f"precision must be one of fp32, bf16, got {wrong!r}"):
            model.generate(**source, **PAPER, precision=wrong)
    with pytest.raises(ValueError, match="precision must not be given with int8, got 'bf16'"):
        model.generate(**source, **PAPER, precision="bf16", int8=True)


@needs_bf16_kernels
@pytest.mark.usefixtures("with_bf16")
def test_the_precision_is_saved(lively_model, source, searched, tmp_path):
    model = lively_model()
    generation.set_paper_search(model)
    model.generation_config.precision = "bf16"
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again.generate(**source), model.generate(**source))
    again.generate(**source, precision="fp32")
    kinds = [type(search.vocabulary) for search in searched]
    assert kinds == [kernels.Bf16Linear, kernels.Bf16Linear, kernels.PackedLinear]


@pytest.mark.parametrize("search", [PAPER, GREEDY])
def test_scores_of_long_texts_are_made_in_parts(lively_model, source, scores, search, monkeypatch):
    model = lively_model()
    expected = model.generate(**source, **search)
    # four sentences, three heads and seven source tokens: three rows at a time, then one
    monkeypatch.setattr(engine, "MOST_SCORES", 4 * 3 * 7 * 3)
    assert torch.equal(model.generate(**source, **search), expected)
    monkeypatch.setattr(engine, "MOST_SCORES", 1)
    assert torch.equal(model.generate(**source, **search), expected)
    for found in scores[1:]:
        torch.testing.assert_close(found, scores[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "search",
    [
        PAPER,
        {**PAPER, "num_beams": 3, "min_new_tokens": 5, "suppress_tokens": [4, 9]},
        {"num_beams": 4, "max_new_tokens": 9, "length_penalty": 2.0},
        {"num_beams": 3, "max_new_tokens": 9, "suppress_tokens": [5], "renormalize_logits": True},
    ],
)
def test_tokens_are_selected_from_a_part_of_the_rows_at_a_time(
    lively_model, source, searched, scores, monkeypatch, search
):
    model = lively_model()
    expected = model.generate(**source, **search)
    (packed,) = searched
    vocabulary, part_sizes = packed.vocabulary, []

    def counting(states):
        part_sizes.append(len(states))
        return vocabulary(states)

    monkeypatch.setattr(packed, "vocabulary", counting)
    monkeypatch.setattr(engine, "MOST_LOGITS", 8 * packed.num_tokens)
    assert torch.equal(model.generate(**source, **search), expected)
    num_beams = search["num_beams"]
    # the first step has one row for each of the four sentences
    assert part_sizes[:3] == [4, 8, 4 * num_beams - 8]
    assert max(part_sizes) == 8
    for found in scores[1:]:
        torch.testing.assert_close(found, scores[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, which returns memory")
def test_a_step_does_not_clear_its_memory_anew():
    code = """
import resource, torch
from vanilla_transformer.kernels_vanilla_transformer import keep_freed_memory

def count_page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**22), torch.ones(2**22)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20

keep_freed_memory()
count_page_faults()
print(count_page_faults())
"""
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # without `keep_freed_memory`, each block of 16 MiB has 4,096 page faults
    assert int(output) < 100


def test_another_thread_may_have_made_a_shorter_table_of_positions(lively_model, monkeypatch):
    stack = engine.SearchEngine(lively_model()).stacks["encoder"]
    make, expected = stack.position_module, stack.positions(30)

    class Interrupted:
        """An encoding during which another thread stores its own table."""

        config = make.config

        def __call__(self, nothing):
            made = make(nothing)
            stack.position_table = made[0, :3]
            return made

    stack.position_table = None
    monkeypatch.setattr(stack, "position_module", Interrupted())
    assert torch.equal(stack.positions(30), expected)


def test_gradients_of_the_embeddings_do_not_turn_the_engine_off(lively_model, source, searched):
    model = lively_model()
    expected = model.generate(**source, **PAPER)
    model.enable_input_require_grads()
    assert torch.equal(model.generate(**source, **PAPER), expected)
    assert len(searched) == 2


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_the_search_keeps_its_scores_in_float32(lively_model, source, kind):
    model = lively_model()
    expected = model.generate(**source, **PAPER)
    torch.set_default_dtype(kind)
    try:
        found = model.generate(**source, **PAPER)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_an_engine_is_freed_with_its_weights(lively_model, source):
    model = lively_model()
    model.generate(**source, **PAPER)
    made = weakref.ref(engine_checks.engine_for(model)[0])
    assert made() is not None
    model.bfloat16().generate(**source, **PAPER)
    gc.collect()
    assert made() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"elementwise_affine": False}, {"bias": False}])
def test_a_norm_may_lack_weights(lively_model, source, options, dtype):
    model = lively_model()
    model.model.decoder.layers[0].feed_forward_norm = torch.nn.LayerNorm(48, **options)
    model.to(dtype)
    assert model.generate(**source, **PAPER, precision="fp32").shape[1] > 1
    if dtype == torch.float32:
        expected = model.generate(**source, **PAPER, engine="off")
        assert model.generate(**source, **PAPER).tolist() == expected.tolist()


@torch.no_grad()
def test_a_model_with_nearly_constant_logits_may_round_like_any_other(small_model):
    # after a few steps of training, a model gives nearly the same logits at every position
    torch.manual_seed(3)
    model = small_model(vocab_size=500)
    norm = model.model.decoder.layers[-1].feed_forward_norm
    norm.weight *= 1e-7
    norm.bias.copy_(torch.randn_like(norm.bias))
    assert engine_checks.engine_for(model)[1] is None
    source, target = torch.randint(500, (4, 5)), torch.randint(500, (4, 2, 4))
    logits = engine_checks._logits_of_modules(model, source, torch.ones_like(source), target)
    assert (logits.std(0) < 1e-5 * logits.abs().mean(0)).float().mean() > 0.9
    # an error in the last digits of a typical logit is one of rounding, a larger one is none
    typical = logits.abs().median()
    for relative_error, is_rounding in ((1e-6, True), (1e-4, False)):
        deviation = deviations.deviations(logits + relative_error * typical, logits, logits).max()
        assert (deviation < deviations.FLOAT32_TOLERANCE) == is_rounding


@pytest.mark.parametrize("bias", [-1e4, -torch.inf])
def test_a_large_bias_of_most_tokens_hides_no_deviation_of_the_others(small_model, bias):
    model = small_model(vocab_size=500, output_bias=True)
    model.lm_head.bias.data[50:] = bias
    logits = torch.randn(20, 500) + model.lm_head.bias.detach()
    units = deviations.without_bias(logits, model.lm_head.bias)
    changed = logits.clone()
    changed[:, 3] += 0.01
    found = deviations.deviations(changed, logits, units)
    assert 0.005 < found[:, 3].max() < 0.05
    assert engine_checks.engine_for(model)[1] is None
