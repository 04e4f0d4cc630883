"""Section 6.1: the paper's search against exhaustive search and invariances."""

import copy
import math

import equations
import numpy as np
import pytest
import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    EncoderDecoderCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    NoBadWordsLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TextStreamer,
)

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer import search_vanilla_transformer as search_module
from vanilla_transformer.generation_vanilla_transformer import set_paper_search
from vanilla_transformer.search_vanilla_transformer import PaperBeamSearch, gnmt_length_penalty

PAPER = {"num_beams": 4, "length_penalty_alpha": 0.6, "max_extra_tokens": 6}


@pytest.fixture
def model(small_model):
    """A model whose translations differ in tokens and lengths."""
    model = small_model(hidden_size=48, vocab_size=23, dropout=0.0)
    for name, parameter in model.named_parameters():
        if "_proj.weight" in name:
            parameter.data.normal_(std=0.3)
        elif "embed_tokens" in name:
            parameter.data.normal_(std=0.2)
    return model


@pytest.fixture
def source(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def without_padding(rows, pad=0):
    return [[token for token in row if token != pad] for row in rows.tolist()]


def test_the_penalty_is_the_papers_formula():
    for length in (1, 2, 17):
        for alpha in (-0.5, 0.0, 0.6, 1.0):
            expected = equations.length_penalty(length, alpha)
            assert gnmt_length_penalty(length, alpha) == pytest.approx(expected)


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.6, 2.0])
def test_a_wide_enough_beam_finds_what_exhaustive_search_finds(small_model, alpha):
    model = small_model(vocab_size=5)
    source = torch.tensor([[3, 4, 2]])
    max_length = 4
    encoded = model.get_encoder()(source).last_hidden_state

    def next_log_probs(tokens):
        target = torch.tensor([[1, *tokens]])
        with torch.no_grad():
            logits = model(encoder_outputs=(encoded,), decoder_input_ids=target).logits
        return equations.log_softmax(logits[0, -1].tolist())

    expected = equations.exhaustive_search(next_log_probs, 5, 2, max_length, alpha)
    found = model.generate(
        source,
        num_beams=128,
        num_return_sequences=10,
        length_penalty_alpha=alpha,
        max_extra_tokens=max_length - source.shape[1],
        return_dict_in_generate=True,
        output_scores=True,
    )
    for row, score, (tokens, expected_score) in zip(
        found.sequences.tolist(), found.sequences_scores.tolist(), expected, strict=False
    ):
        assert row[1 : 1 + len(tokens)] == tokens
        assert score == pytest.approx(expected_score, rel=1e-4)
    assert len(found.sequences) == 10


@pytest.mark.parametrize("search", [PAPER, {"num_beams": 1}, {"num_beams": 3}])
@pytest.mark.parametrize(
    "rules",
    [
        {"bad_words_ids": [[5], [7]]},
        {"suppress_tokens": [5, 7], "renormalize_logits": True},
        {"forced_bos_token_id": 9, "forced_eos_token_id": 2, "max_new_tokens": 6},
        {"min_new_tokens": 4, "bad_words_ids": [[5]], "renormalize_logits": True},
    ],
)
def test_rules_choose_the_tokens_that_the_processors_choose(model, source, search, rules):
    # another processor, after which the rules do not apply
    processors = LogitsProcessorList([lambda ids, scores: scores])
    expected = model.generate(**source, **search, **rules, logits_processor=processors)
    assert model.generate(**source, **search, **rules).tolist() == expected.tolist()


@pytest.mark.parametrize("search", [PAPER, {"num_beams": 1}, {"num_beams": 2}])
def test_a_bad_word_outside_of_the_vocabulary_is_refused(model, source, search):
    for bad in ([99999], [3, 99999]):
        with pytest.raises(ValueError, match="99999"):
            model.generate(**source, **{**search, "bad_words_ids": [[4], bad]})


def test_a_score_is_the_log_probability_over_the_penalty(model, source):
    found = model.generate(
        **source, **PAPER, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    for row, ids, mask in zip(range(4), source["input_ids"], source["attention_mask"], strict=True):
        target = without_padding(found.sequences)[row]
        with torch.no_grad():
            logits = model(
                input_ids=ids[None, : mask.sum()], decoder_input_ids=torch.tensor([target[:-1]])
            ).logits[0]
        log_prob = sum(
            equations.log_softmax(scores)[token]
            for scores, token in zip(logits.tolist(), target[1:], strict=True)
        )
        expected = log_prob / equations.length_penalty(len(target) - 1, 0.6)
        assert found.sequences_scores[row].item() == pytest.approx(expected, rel=1e-4)
    transitions = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    lengths = (found.beam_indices >= 0).sum(dim=1)
    penalties = gnmt_length_penalty(lengths, 0.6)
    torch.testing.assert_close(
        transitions.sum(dim=1) / penalties, found.sequences_scores, rtol=1e-4, atol=1e-4
    )


def test_batch_size_and_order_do_not_change_a_translation(model):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 12, (64,), generator=generator)
    ids = torch.randint(3, 23, (64, 12), generator=generator)
    mask = (torch.arange(12) < lengths[:, None]).long()
    ids = ids * mask
    together = without_padding(model.generate(ids, attention_mask=mask, **PAPER))
    assert len({len(row) for row in together}) > 3
    order = torch.randperm(64, generator=generator)
    shuffled = without_padding(model.generate(ids[order], attention_mask=mask[order], **PAPER))
    assert shuffled == [together[i] for i in order]
    for row in range(0, 64, 9):
        alone = model.generate(ids[row : row + 1, : lengths[row]], **PAPER)
        assert without_padding(alone)[0] == together[row]


def test_finished_sentences_stay_in_the_batch_of_the_modules(model, source, monkeypatch):
    # an edited module may compute something else from a smaller batch
    rows = []
    forward = type(model).forward

    def counting(self, *args, **kwargs):
        rows.append(kwargs["decoder_input_ids"].shape[0])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counting)
    lengths = model.generate(**source, **PAPER, engine="off").ne(0).sum(dim=1)
    assert len(lengths.unique()) > 1
    assert set(rows) == {16}


def test_the_source_length_bounds_every_translation(model, source):
    never_ending = {"suppress_tokens": [2], "bad_words_ids": [[0]]}
    lengths = source["attention_mask"].sum(dim=1).tolist()
    modes = [{"num_beams": 4, "length_penalty_alpha": 0.6}, {"num_beams": 1}, {"num_beams": 3}]
    modes += [{"do_sample": True}, {"do_sample": True, "num_beams": 2}]
    for mode in modes:
        out = model.generate(**source, **mode, **never_ending, max_extra_tokens=3)
        # the library's beam search pads with the end token if the padding token is 0
        new_tokens = [sum(token not in (0, 2) for token in row[1:]) for row in out.tolist()]
        assert new_tokens == [n + 3 for n in lengths], mode


def test_an_explicit_length_bounds_every_sentence(model, source):
    out = model.generate(**source, **PAPER, max_new_tokens=2)
    assert out.shape[1] <= 3


class Hasten(LogitsProcessor):
    """Processor that makes further tokens less likely with the length of a hypothesis."""

    def __call__(self, input_ids, scores):
        hastened = scores - 0.3 * input_ids.shape[1]
        hastened[:, 2] = scores[:, 2]
        return hastened


def test_early_stopping_does_not_change_the_result(model, source, monkeypatch):
    settings = {"num_beams": 4, "length_penalty_alpha": 0.6, "max_new_tokens": 30}
    settings["logits_processor"] = [Hasten()]
    steps = []
    advance = PaperBeamSearch._advance

    def never_done(self, log_probs, tokens, step):
        steps.append(step)
        return advance(self, log_probs, tokens, step) & (step >= self.limits)

    stopped = model.generate(**source, **settings)
    monkeypatch.setattr(PaperBeamSearch, "_advance", never_done)
    assert model.generate(**source, **settings).tolist() == stopped.tolist()
    assert 4 < stopped.shape[1] < 20
    assert max(steps) == 30


class Plant(LogitsProcessor):
    """Processor that sets the log-probabilities of each step; those of the last step stay."""

    def __init__(self, *steps):
        self.steps = steps

    def __call__(self, input_ids, scores):
        planted = torch.full_like(scores, -torch.inf)
        step = min(input_ids.shape[1], len(self.steps)) - 1
        for token, log_prob in self.steps[step].items():
            planted[:, token] = log_prob
        return planted


@pytest.mark.parametrize(("alpha", "log_prob", "length"), [(2.0, -1.5, 8), (-0.7, -0.8, 2)])
def test_the_search_continues_while_the_penalty_can_change_the_best(
    model, source, alpha, log_prob, length
):
    # the longer hypothesis scores higher than the end token alone only when it is complete
    assert log_prob / equations.length_penalty(length, alpha) > -1.0
    assert log_prob / equations.length_penalty(2 if length > 2 else 30, alpha) < -1.0
    planted = Plant({2: -1.0, 5: log_prob}, *[{5: 0.0}] * (length - 2), {2: 0.0})
    settings = {"num_beams": 2, "length_penalty_alpha": alpha, "max_new_tokens": 30}
    found = model.generate(**source, **settings, logits_processor=[planted])
    assert without_padding(found) == [[1, *[5] * (length - 1), 2]] * 4


def test_enough_hypotheses_stay_open_beside_those_that_end(model, source):
    planted = Plant({5: -1.0, 6: -1.0}, {2: -1.0, 3: -1.0, 7: -2.0}, *[{7: 0.0}] * 2, {2: 0.0})
    settings = {"num_beams": 2, "length_penalty_alpha": 2.0, "max_new_tokens": 9}
    found = model.generate(**source, **settings, eos_token_id=[2, 3], logits_processor=[planted])
    for row in without_padding(found):
        assert row[2:] == [7, 7, 7, 2]


def test_a_streamer_receives_each_token(model, source):
    class Streamer:
        tokens = []
        is_ended = False

        def put(self, tokens):
            self.tokens += tokens.tolist() if tokens.dim() == 1 else tokens[0].tolist()

        def end(self):
            self.is_ended = True

    streamer = Streamer()
    out = model.generate(source["input_ids"][:1], num_beams=1, max_new_tokens=9, streamer=streamer)
    assert streamer.is_ended
    assert streamer.tokens == out[0].tolist()
    assert len(streamer.tokens) > 2


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("engine", ["auto", "off"])
def test_a_streamer_of_several_beams_is_refused(model, source, do_sample, engine):
    settings = {"num_beams": 3, "do_sample": do_sample, "engine": engine}
    with pytest.raises(ValueError, match="num_beams must be 1 with a streamer, got 3"):
        model.generate(**source, **settings, streamer=TextStreamer(None))


def test_greedy_search_needs_no_end_or_padding_token(model, source):
    settings = {"num_beams": 1, "max_new_tokens": 5}
    expected = model.generate(**source, **settings, suppress_tokens=[2])
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    found = model.generate(**source, **settings, suppress_tokens=[2])
    assert found.tolist() == expected.tolist()


CACHES = [{}, {"use_cache": False}, {"cache_implementation": "static"}]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_caches_and_kernels_find_the_same(model, source, cache, attention):
    expected = without_padding(model.generate(**source, **PAPER))
    model.set_attn_implementation(attention)
    assert without_padding(model.generate(**source, **PAPER, **cache)) == expected


class Collector:
    """A streamer that keeps the tokens it receives."""

    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.tokens.append("end")


MODES = {
    "greedy": {"num_beams": 1, "no_repeat_ngram_size": 2},
    "paper": PAPER,
    "library's beam": {"num_beams": 3, "no_repeat_ngram_size": 2},
    "sampled": {"do_sample": True, "num_beams": 1},
    "beam sampled": {"do_sample": True, "num_beams": 2},
    "n-best": {**PAPER, "num_return_sequences": 3},
    "streamed": {"num_beams": 1, "streamer": Collector},
    "assisted": {"num_beams": 1, "assistant_model": copy.deepcopy},
}


@pytest.mark.parametrize("engine", ["auto", "off"])
@pytest.mark.parametrize("mode", MODES)
def test_every_search_finds_the_same_with_any_cache_and_without(model, source, mode, engine):
    if mode in ("streamed", "assisted"):
        source = {name: ids[:1] for name, ids in source.items()}

    def tokens(**cache):
        settings = dict(MODES[mode])
        if "assistant_model" in settings:
            settings["assistant_model"] = copy.deepcopy(model)
        streamer = None
        if "streamer" in settings:
            streamer = settings["streamer"] = Collector()
        torch.manual_seed(7)
        ids = model.generate(**source, **settings, max_new_tokens=12, engine=engine, **cache)
        if streamer is not None:
            assert streamer.tokens == [*ids[0].tolist(), "end"]
        return ids.tolist()

    def empty():
        return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache())

    plain = tokens()
    assert len({tuple(row) for row in plain}) >= min(3, len(plain))
    assert tokens(cache=empty()) == plain
    assert tokens(past_key_values=empty()) == plain
    # assisted decoding of the library needs a cache, before 5.24 a growing one
    if mode != "assisted":
        assert tokens(use_cache=False) == plain
        assert tokens(cache_implementation="static") == plain


@pytest.mark.parametrize("search", [PAPER, {**PAPER, "num_beams": 1}])
def test_half_of_the_first_tokens_in_int8_are_those_in_float32(model, source, search):
    exact = model.generate(**source, **search, engine="required")
    rounded = model.generate(**source, **search, int8=True, engine="required")
    assert (exact[:, 1] == rounded[:, 1]).float().mean() >= 0.5


def test_none_overrides_a_setting_of_the_model(model, source):
    free = model.generate(**source, **PAPER)
    model.generation_config.suppress_tokens = [int(free[0, 1])]
    model.generation_config.length_penalty_alpha = 0.6
    assert model.generate(**source, **PAPER).tolist() != free.tolist()
    assert model.generate(**source, **PAPER, suppress_tokens=None).tolist() == free.tolist()
    library = model.generate(**source, num_beams=4, max_new_tokens=9, length_penalty_alpha=None)
    del model.generation_config.length_penalty_alpha
    assert library.tolist() == model.generate(**source, num_beams=4, max_new_tokens=9).tolist()


def test_settings_in_the_models_configuration_are_refused_as_the_library_does(model, source):
    model.config.num_beams = 3
    with pytest.raises(ValueError, match="modified the pretrained model configuration"):
        model.generate(**source)


def test_a_static_cache_holds_heads_of_two_widths(small_model, source):
    model = small_model(d_k=5, d_v=2)
    expected = without_padding(model.generate(**source, **PAPER))
    static = model.generate(**source, **PAPER, cache_implementation="static")
    assert without_padding(static) == expected


@pytest.mark.parametrize("search", [PAPER, {"num_beams": 1}])
def test_a_static_cache_is_compiled_once_and_whole(model, source, search):
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=True)
    # by default the library compiles on a GPU only
    compiled._compile_all_devices = True
    settings = {**search, "cache_implementation": "static", "compile_config": compiled}
    expected = model.generate(**source, **search)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        assert model.generate(**source, **settings).tolist() == expected.tolist()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("num_return_sequences", [2, 4])
def test_n_best_lists_are_sorted_and_begin_with_the_best(model, source, num_return_sequences):
    best = without_padding(model.generate(**source, **PAPER))
    listed = model.generate(
        **source,
        **PAPER,
        num_return_sequences=num_return_sequences,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = without_padding(listed.sequences)
    assert rows[::num_return_sequences] == best
    scores = listed.sequences_scores.view(4, num_return_sequences)
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    for first in range(0, len(rows), num_return_sequences):
        group = rows[first : first + num_return_sequences]
        assert len({tuple(row) for row in group}) == num_return_sequences
    plain = model.generate(**source, **PAPER, num_return_sequences=num_return_sequences)
    assert without_padding(plain) == rows


class Forbid(LogitsProcessor):
    """Processor that forbids another token in each sentence, by the index of its row."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores):
        rows = scores.shape[0] // len(self.tokens)
        for sentence, token in enumerate(self.tokens):
            scores[sentence * rows : (sentence + 1) * rows, token] = -torch.inf
        return scores


def test_a_processor_gets_every_sentence_in_its_row(model, source):
    plain = without_padding(model.generate(**source, **PAPER))
    forbidden = [row[1] for row in plain]
    out = without_padding(
        model.generate(**source, **PAPER, logits_processor=LogitsProcessorList([Forbid(forbidden)]))
    )
    assert all(token not in row[1:] for token, row in zip(forbidden, out, strict=True))
    for row in range(4):
        length = int(source["attention_mask"][row].sum())
        alone = model.generate(
            source["input_ids"][row : row + 1, :length],
            **PAPER,
            logits_processor=LogitsProcessorList([Forbid(forbidden[row : row + 1])]),
        )
        assert without_padding(alone)[0] == out[row]


def test_a_prefix_function_gets_the_index_of_the_sentence(model, source):
    asked = set()

    def allowed(sentence, ids):
        asked.add(sentence)
        return [3 + sentence, 2]

    out = model.generate(**source, **PAPER, prefix_allowed_tokens_fn=allowed, min_new_tokens=2)
    assert asked == {0, 1, 2, 3}
    for sentence, row in enumerate(without_padding(out)):
        assert set(row[1:]) <= {3 + sentence, 2}


def test_a_prefix_function_gets_only_real_hypotheses(model, source):
    lengths = set()

    def allowed(sentence, ids):
        assert int(ids[0]) == 1
        lengths.add(len(ids))
        # each sentence ends at another length
        return [2] if len(ids) > 2 * sentence + 1 else [3 + sentence]

    out = model.generate(**source, **PAPER, prefix_allowed_tokens_fn=allowed)
    for sentence, row in enumerate(without_padding(out)):
        assert row == [1, *[3 + sentence] * (2 * sentence + 1), 2][: len(row)]
    assert max(lengths) > 6


FEW = {
    "two tokens": ({"suppress_tokens": [0, 1, *range(4, 23)], "max_new_tokens": 1}, 2),
    "one sentence": (
        {
            "prefix_allowed_tokens_fn": lambda row, ids: [[5, 6, 2][min(len(ids) - 1, 2)]],
            "max_new_tokens": 5,
        },
        1,
    ),
    "words": ({"bad_words_ids": [[token] for token in range(23) if token != 2]}, 1),
    "nothing": ({"suppress_tokens": list(range(23)), "max_new_tokens": 3}, 0),
}


@pytest.mark.parametrize("engine", ["auto", "off"])
@pytest.mark.parametrize("constraint", FEW)
def test_forbidden_text_is_never_returned(model, source, constraint, engine):
    settings, allowed = FEW[constraint]
    search = {**PAPER, **settings, "engine": engine, "num_beams": 4}
    for count in range(1, 5):
        if count <= allowed:
            found = model.generate(**source, **search, num_return_sequences=count)
            assert len(found) == 4 * count
            rows = without_padding(found)
            assert all(len({*map(tuple, rows[i : i + count])}) == count for i in range(0, 4, count))
            continue
        message = f"num_return_sequences must be at most {allowed}, got {count}"
        message = message if allowed else "must allow a translation, but forbid every one"
        with pytest.raises(ValueError, match=message):
            model.generate(**source, **search, num_return_sequences=count)


@pytest.mark.parametrize("search", [PAPER, {"num_beams": 1}, {"num_beams": 3}])
def test_a_bad_word_may_have_another_bias(model, source, search):
    plain = model.generate(**source, **search)
    word = int(plain[0, 1])
    processor = NoBadWordsLogitsProcessor([[word]])
    processor.sequence_bias[word,] = 1e-6
    found = model.generate(**source, **search, logits_processor=[processor], engine="required")
    assert found.tolist() == plain.tolist()


def test_a_stopping_criterion_ends_a_hypothesis(model, source):
    def is_four_long(input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 4)

    out = model.generate(**source, **PAPER, stopping_criteria=[is_four_long])
    assert out.shape[1] <= 4


@pytest.mark.parametrize("search", [PAPER, {"num_beams": 1}, {"num_beams": 1, "use_cache": False}])
def test_a_given_criterion_replaces_the_librarys_of_the_same_class(model, source, search):
    for length in (4, 12):
        out = model.generate(
            **source,
            **search,
            max_length=7,
            min_new_tokens=11,
            stopping_criteria=[MaxLengthCriteria(length)],
        )
        assert out.shape[1] == length
    plain = model.generate(**source, **search, max_length=9)
    other = int(plain[0, 1])
    out = model.generate(
        **source, **search, max_length=9, stopping_criteria=[EosTokenCriteria([other, 2])]
    )
    for row in out.tolist():
        written = [token for token in row[1:] if token]
        assert not {other, 2} & set(written[:-1])
    assert out[0, 1:].tolist() == [other, *[0] * (out.shape[1] - 2)]


def test_a_prompt_is_kept(model, source):
    prompt = torch.tensor([[1, 9, 8]]).expand(4, -1)
    out = model.generate(**source, **PAPER, decoder_input_ids=prompt)
    assert out[:, :3].tolist() == prompt.tolist()


def test_a_bare_model_searches_as_the_library_does(model, source, monkeypatch):
    assert not hasattr(model.generation_config, "length_penalty_alpha")
    plain = model.generate(**source, num_beams=4, max_new_tokens=9)
    library = GenerationMixin._beam_search
    called = []

    def watched(*args, **kwargs):
        called.append(True)
        return library(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_beam_search", watched)
    assert model.generate(**source, num_beams=4, max_new_tokens=9).tolist() == plain.tolist()
    assert called
    called.clear()
    model.generate(**source, **PAPER)
    assert not called
    assert not hasattr(model.generation_config, "length_penalty_alpha")


def test_a_saved_search_is_the_search_of_the_loaded_model(model, source, tmp_path):
    set_paper_search(model, num_beams=3, length_penalty_alpha=0.7, max_extra_tokens=5)
    expected = model.generate(**source)
    model.save_pretrained(tmp_path)
    again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert again.generation_config.length_penalty_alpha == 0.7
    assert again.generate(**source).tolist() == expected.tolist()
    explicit = again.generate(**source, num_beams=3, length_penalty_alpha=0.7, max_extra_tokens=5)
    assert explicit.tolist() == expected.tolist()
    given = GenerationConfig(num_beams=1, decoder_start_token_id=1, eos_token_id=2, pad_token_id=0)
    greedy = again.generate(**source, generation_config=given)
    assert greedy.tolist() == again.generate(**source, num_beams=1).tolist()


def test_a_search_that_was_set_on_a_new_model_is_kept(model, source, tmp_path):
    for name, value in PAPER.items():
        setattr(model.generation_config, name, value)
    expected = model.generate(**source)
    model.save_pretrained(tmp_path)
    again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert {name: getattr(again.generation_config, name) for name in PAPER} == PAPER
    assert again.generate(**source).tolist() == expected.tolist()


def test_a_length_that_the_trainer_has_set_does_not_truncate(model):
    source = torch.randint(3, 23, (2, 30))
    set_paper_search(model)
    never_ending = {"suppress_tokens": [2]}
    for search in ({}, {"num_beams": 1}):
        expected = model.generate(source, **never_ending, **search)
        assert expected.shape[1] == 1 + 30 + 50
        model.generation_config.max_length = 20
        assert model.generate(source, **never_ending, **search).tolist() == expected.tolist()
        wished = model.generate(source, **never_ending, **search, max_length=20)
        assert wished.shape[1] == 20
        model.generation_config.max_length = None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length_penalty": 2.0}, "are two length penalties: give one, got 2.0 and 0.6"),
        ({"early_stopping": True}, "early_stopping must not be True with length_penalty_alpha"),
        ({"max_extra_tokens": -1}, "max_extra_tokens must be an integer of at least 0, got -1"),
        ({"max_extra_tokens": 3.5}, "max_extra_tokens must be an integer.* got 3.5"),
        ({"length_penalty_alpha": "0.6"}, "length_penalty_alpha must be a number, got '0.6'"),
        ({"num_beams": 0}, "num_beams must be an integer of at least 1, got 0"),
    ],
)
def test_settings_that_contradict_are_refused(model, source, settings, message):
    with pytest.raises(ValueError, match=message):
        model.generate(**source, **{**PAPER, **settings})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[5, 23, 2]], "below the vocabulary size 23, got 23"),
        ([[5, -100, 2]], "at least 0 .* got -100"),
        ([[]], r"at least one sentence of one token, got \[1, 0\]"),
    ],
)
def test_an_invalid_source_is_refused(model, ids, message):
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor(ids, dtype=torch.long))


def test_padding_on_the_left_is_refused_where_positions_count(small_model, batch):
    source, mask = batch["input_ids"].flip(1), batch["attention_mask"].flip(1)
    assert mask[:, 0].tolist() == [1, 0, 0, 0]
    message = "padding only on the right.* got a row that begins with 0.*padding_side='right'"
    model = small_model()
    for search in (PAPER, {"num_beams": 1, "max_new_tokens": 3}):
        with pytest.raises(ValueError, match=message):
            model.generate(source, attention_mask=mask, **search)
    # without positions, padding may be anywhere
    model = small_model(position_encoding="none")
    right = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model.generate(**right, **PAPER)
    left = source.clone()
    for row, length in enumerate(mask.sum(dim=1)):
        left[row, -length:] = left[row, -length:].flip(0)
    assert model.generate(left, attention_mask=mask, **PAPER).equal(expected)


def test_an_invalid_prompt_is_refused(model, source):
    prompt = torch.tensor([[1, 23]]).expand(4, -1)
    for mode in (PAPER, {"num_beams": 1}):
        with pytest.raises(ValueError, match=r"decoder_input_ids must be .* size 23, got 23"):
            model.generate(**source, **mode, decoder_input_ids=prompt)


def test_too_many_tokens_for_learned_positions_are_refused(small_model):
    model = small_model(position_encoding="learned", max_position_embeddings=9)
    with pytest.raises(ValueError, match="at most 9 tokens, the number of learned positions, got"):
        model.generate(torch.full((1, 10), 5), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"max_length must be at most 10.* got 11"):
        model.generate(torch.full((1, 9), 5), max_new_tokens=10)
    assert model.generate(torch.full((1, 9), 5), **PAPER).shape[1] <= 10
    prompt = torch.tensor([[1, 5, 6, 7]])
    prompted = model.generate(torch.full((1, 9), 5), **PAPER, decoder_input_ids=prompt)
    assert prompted.shape[1] <= 10


def test_greedy_and_assisted_decoding_agree(model, source):
    assistant = copy.deepcopy(model)
    for parameter in assistant.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    one = {name: ids[:1] for name, ids in source.items()}
    greedy = model.generate(**one, max_new_tokens=9)
    read = []
    assistant.get_encoder().register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True
    )
    assisted = model.generate(**one, max_new_tokens=9, assistant_model=assistant)
    assert assisted.tolist() == greedy.tolist()
    # the assistant reads the same source
    assert [ids.tolist() for ids in read] == [one["input_ids"].tolist()]
    with pytest.raises(ValueError, match="takes one sentence at a time, got a batch of 4"):
        model.generate(**source, max_new_tokens=9, assistant_model=assistant)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_beams", [0, -1, 1.5, "4", True]),
        ("num_return_sequences", [0, -1, 1.5, "4", True]),
        ("max_new_tokens", [0, -3, 1.5, "4", 10**30]),
        ("max_length", [0, -3, 1.5, "4", 10**30]),
        ("min_length", [-1, "4"]),
        ("min_new_tokens", [-1, "4"]),
        ("max_extra_tokens", [-1, 1.5, True, 10**30]),
        ("no_repeat_ngram_size", [-1, 0.5]),
        ("length_penalty_alpha", [math.nan, math.inf, "1", True, -100, 10.5]),
        ("length_penalty", [math.nan, "1"]),
        ("temperature", [math.inf, "1"]),
        ("decoder_start_token_id", [-1, 10**6, "1", 0.5]),
        ("bos_token_id", [-1, 10**6]),
        ("pad_token_id", [-1, 10**6]),
        ("eos_token_id", [10**6, [2, 10**6], "2"]),
        ("forced_bos_token_id", [10**6]),
        ("forced_eos_token_id", [10**6]),
    ],
)
def test_a_setting_out_of_range_is_refused(small_model, name, values):
    source = torch.tensor([[5, 6, 2]])
    for value in values:
        with pytest.raises(ValueError, match=f"{name}`? must be") as error:
            small_model().eval().generate(source, **{name: value})
        # a negative end token is allowed
        assert name != "eos_token_id" or "at least 0" not in str(error.value)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[5, 6]], "input_ids must be a tensor of integers, .* got list"),
        (torch.tensor([[5.0, 6.0]]), "input_ids must be a tensor of integers, .*float32"),
        (torch.tensor([5, 6]), r"input_ids must be \[B, T\], got \[2\]"),
        (torch.tensor([[5, 23]]), "input_ids must be at least 0 and below the vocabulary size 23"),
    ],
)
def test_inputs_that_are_not_token_ids_are_refused(small_model, ids, message):
    with pytest.raises(ValueError, match=message):
        small_model().eval().generate(ids)


def test_a_generation_configuration_of_another_type_is_refused(small_model):
    with pytest.raises(TypeError, match="generation_config must be a GenerationConfig, got dict"):
        small_model().generate(torch.tensor([[5, 2]]), generation_config={"num_beams": 2})


SEARCHES = [{"num_beams": 1}, PAPER, {"num_beams": 4, "length_penalty_alpha": None}]


class EndsAt(StoppingCriteria):
    """Criterion with a limit for each sentence of the batch."""

    def __init__(self, *limits):
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] >= self.limits.repeat_interleave(
            len(input_ids) // len(self.limits)
        )


@pytest.mark.parametrize("engine", ["auto", "off"])
@pytest.mark.parametrize("search", SEARCHES[:2])
def test_a_criterion_finds_each_sentence_in_its_row(model, source, search, engine):
    many = {name: tensor.repeat(4, 1)[:5] for name, tensor in source.items()}
    out = model.generate(
        **many,
        **{**search, "max_extra_tokens": 9, "suppress_tokens": [2]},
        engine=engine,
        stopping_criteria=[EndsAt(3, 9, 4, 7, 5)],
    )
    assert list(map(len, without_padding(out))) == [3, 9, 4, 7, 5]


class EndsAtFour(EosTokenCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 4)


class LimitOfFour(MaxLengthCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 4)


@pytest.mark.parametrize("engine", ["auto", "off"])
@pytest.mark.parametrize("criterion", [EndsAtFour(2), LimitOfFour(60)])
@pytest.mark.parametrize("search", SEARCHES)
def test_a_subclass_of_a_criterion_is_called(model, source, search, criterion, engine):
    settings = {**search, "max_extra_tokens": 9, "suppress_tokens": [2], "engine": engine}
    assert model.generate(**source, **settings).shape[1] > 4
    assert model.generate(**source, **settings, stopping_criteria=[criterion]).shape[1] == 4


@pytest.mark.parametrize("engine", ["auto", "off"])
@pytest.mark.parametrize("search", SEARCHES[:2])
def test_a_text_can_end_a_translation(translate, search, engine):
    tokenizer = translate.tokenizer
    inputs = tokenizer(["a dog and a cat"], return_tensors="pt")
    letters = tokenizer("a dog and a cat", add_special_tokens=False)["input_ids"]
    settings = {**search, "engine": engine, "max_new_tokens": 8}
    settings["prefix_allowed_tokens_fn"] = lambda sentence, ids: letters
    ids = translate.model.generate(**inputs, **settings)[0]
    assert len(ids) == 9
    stop = {"stop_strings": [tokenizer.decode(ids[1:3])], "tokenizer": tokenizer}
    assert translate.model.generate(**inputs, **settings, **stop).shape[1] < 9


def test_numbers_of_numpy_and_torch_are_numbers(model, source):
    expected = model.generate(**source, num_beams=2, max_new_tokens=5, length_penalty_alpha=0.5)
    found = model.generate(
        **source,
        num_beams=torch.tensor(2),
        max_new_tokens=torch.tensor(5),
        length_penalty_alpha=torch.tensor(0.5),
    )
    assert found.tolist() == expected.tolist()
    found = model.generate(
        **source,
        num_beams=np.int64(2),
        max_new_tokens=np.int32(5),
        length_penalty_alpha=np.float32(0.5),
        no_repeat_ngram_size=np.int64(0),
        do_sample=np.bool_(False),
    )
    assert found.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="num_beams must be an integer of at least 1, got True"):
        model.generate(**source, num_beams=True)


@pytest.mark.parametrize("engine", ["auto", "off"])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("attention_mask", lambda x: x[:1], r"attention_mask must have the sizes \[\d, 7\] of"),
        ("attention_mask", lambda x: x[:, :3], "input_ids, got .*3"),
        ("attention_mask", lambda x: x.tolist(), "attention_mask must be a tensor, got list"),
        ("attention_mask", lambda x: x[0], r"attention_mask must be \[B, S\], got \[7\]"),
        ("decoder_input_ids", lambda x: x[:1, :1], "decoder_input_ids must have the sizes"),
    ],
)
def test_inputs_of_different_sizes_are_refused(model, source, name, change, message, engine):
    changed = change(source.get(name, source["input_ids"]))
    with pytest.raises(ValueError, match=message):
        model.generate(**{**source, name: changed}, engine=engine)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", [tuple, list])
def test_encoder_outputs_may_be_a_tuple_or_a_list(model, source, search, kind):
    memory = model.get_encoder()(**source).last_hidden_state
    mask = source["attention_mask"]
    found = model.generate(encoder_outputs=kind([memory]), attention_mask=mask, **search)
    assert found.tolist() == model.generate(**source, **search).tolist()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("engine", ["auto", "off"])
def test_encoder_outputs_serve_many_searches(model, source, search, engine):
    encoded = model.get_encoder()(**source)
    given = {"encoder_outputs": encoded, "attention_mask": source["attention_mask"]}
    before = encoded.last_hidden_state.clone()
    expected = model.generate(**source, **search).tolist()
    for _ in range(2):
        assert model.generate(**given, **search, engine=engine).tolist() == expected
    torch.testing.assert_close(encoded.last_hidden_state, before, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ["auto", "off"])
def test_encoder_outputs_of_another_type_are_refused(model, source, engine):
    memory = model.get_encoder()(**source).last_hidden_state
    for given in (memory, {"last_hidden_state": memory}):
        message = f"must be a tuple or an output .* BaseModelOutput, got {type(given).__name__}"
        with pytest.raises(ValueError, match=message):
            model.generate(encoder_outputs=given, **PAPER, engine=engine)
    for given, found in (((memory[0],), r"\[7, 48\]"), ((), "NoneType")):
        message = rf"encoder_outputs must begin with .* \[B, S, d_model\], got {found}"
        with pytest.raises(ValueError, match=message):
            model.generate(encoder_outputs=given, **PAPER, engine=engine)


@pytest.mark.parametrize("search", [PAPER, {"num_beams": 1}, {"num_beams": 3}])
@pytest.mark.parametrize("engine", ["auto", "off"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint16, torch.uint8])
def test_integers_of_any_size_are_token_ids(model, source, search, engine, dtype):
    prompt = torch.tensor([[1, 9]]).expand(4, -1)
    expected = model.generate(**source, **search, decoder_input_ids=prompt)
    given = {**source, "input_ids": source["input_ids"].to(dtype)}
    found = model.generate(**given, **search, decoder_input_ids=prompt.to(dtype), engine=engine)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("search", [PAPER, {"num_beams": 1}])
@pytest.mark.parametrize("engine", ["auto", "off"])
def test_processors_and_criteria_may_return_other_types(model, source, search, engine):
    def process(ids, scores):
        return (0.3 * scores).double()

    def is_four_long(ids, scores, **kwargs):
        return torch.full((len(ids),), int(ids.shape[1] >= 4))

    expected = model.generate(
        **source, **search, max_length=4, logits_processor=[lambda ids, scores: 0.3 * scores]
    )
    found = model.generate(
        **source,
        **search,
        logits_processor=[process],
        stopping_criteria=[is_four_long],
        engine=engine,
    )
    assert found.tolist() == expected.tolist()


class WithState(VanillaTransformerForConditionalGeneration):
    """A model with state of its own for each hypothesis."""

    calls = ()

    def _reorder_cache(self, cache, rows):
        self.calls = (*self.calls, len(rows))
        cache.self_attention_cache.reorder_cache(rows)
        return cache


def test_a_class_reorders_its_own_state(model, source):
    expected = model.generate(**source, **PAPER, engine="off")
    model.__class__ = WithState
    assert model.generate(**source, **PAPER).tolist() == expected.tolist()
    # all rows stay
    assert set(model.calls) == {4 * len(source["input_ids"])}


def test_a_model_with_its_own_way_to_reorder_is_searched_with_it(model, source):
    before = model.generate(**source, **PAPER, engine="required")

    def reorder_wrongly(cache, rows):
        cache.self_attention_cache.reorder_cache(rows.flip(0))
        return cache

    model._reorder_cache = reorder_wrongly
    expected = model.generate(**source, **PAPER, engine="off").tolist()
    assert expected != before.tolist()
    assert model.generate(**source, **PAPER).tolist() == expected
    with pytest.raises(ValueError, match="has its own _reorder_cache"):
        model.generate(**source, **PAPER, engine="required")


@pytest.mark.parametrize("patched", [EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("engine", ["auto", "off"])
def test_replaced_code_of_the_librarys_criteria_runs(
    model, source, search, engine, patched, monkeypatch
):
    settings = {**search, "max_extra_tokens": 9, "suppress_tokens": [2], "engine": engine}
    assert model.generate(**source, **settings).shape[1] > 4
    monkeypatch.setattr(patched, "__call__", EndsAtFour.__call__)
    assert model.generate(**source, **settings).shape[1] == 4


@pytest.mark.parametrize("search", [{"num_beams": 1}, {"num_beams": 3}])
def test_a_given_cache_is_filled(model, source, search):
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache())
    model.generate(**source, **search, cache=cache, max_new_tokens=5)
    assert cache.get_seq_length() > 0
    with pytest.raises(ValueError, match=r"engine='required' needs .*: a cache is given"):
        model.generate(**source, **search, cache=cache, engine="required")


def test_custom_code_runs_with_and_without_the_settings_of_the_engine(translate):
    model, inputs = translate.model, translate.tokenizer("a dog and a cat", return_tensors="pt")
    seen = []

    def custom(model, input_ids, **_):
        seen.append(model)
        return input_ids.new_full((1, 3), 9)

    for settings in ({}, {"engine": "off"}, {"engine": "auto"}, {"int8": False}):
        found = model.generate(**inputs, **settings, custom_generate=custom)
        assert found.tolist() == [[9, 9, 9]]
        translate("a dog and a cat", **settings, custom_generate=custom)
    assert len(seen) == 8
    for settings in ({"engine": "required"}, {"int8": True}, {"precision": "bf16"}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))}.* custom_generate is given"):
            model.generate(**inputs, **settings, custom_generate=custom)


@pytest.mark.parametrize("is_own", [True, False], ids=["own", "bare"])
def test_custom_code_keeps_the_limit_by_the_source(model, source, is_own):
    def custom(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        return GenerationMixin._sample(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
        )

    set_paper_search(model, num_beams=1, max_extra_tokens=30)
    if not is_own:
        model.generation_config = GenerationConfig(
            pad_token_id=0, eos_token_id=2, decoder_start_token_id=1
        )
    for settings in (
        {"max_extra_tokens": 2},
        {"max_extra_tokens": 30},
        {"max_extra_tokens": 4, "max_new_tokens": 5},
        {"generation_config": GenerationConfig(max_extra_tokens=3)},
        {} if is_own else {"max_length": 9},
    ):
        expected = model.generate(**source, **settings)
        assert model.generate(**source, **settings, custom_generate=custom).equal(expected)
        ids, mask = source.values()
        found = model.generate(ids, attention_mask=mask, **settings, custom_generate=custom)
        assert found.equal(expected)


@pytest.mark.parametrize("patched", [LogitsProcessorList, SuppressTokensLogitsProcessor])
@pytest.mark.parametrize("search", SEARCHES)
def test_replaced_code_of_the_librarys_processors_runs(model, source, search, patched, monkeypatch):
    settings = {**search, "suppress_tokens": [7]}
    before = model.generate(**source, **settings).tolist()
    monkeypatch.setattr(patched, "__call__", lambda self, ids, scores: -scores)
    expected = model.generate(**source, **settings, engine="off").tolist()
    assert model.generate(**source, **settings).tolist() == expected != before


@pytest.mark.parametrize("engine", ["required", "off"])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_return_sequences": 4},
        {"stopping_criteria": [lambda ids, scores: ids[:, -1] * ids.shape[1] > 120]},
        {"required_tokens": [[[5, 6]], [[7]], [], [[8], [9]]]},
        {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 3},
    ],
    ids=["beams", "criterion", "terms", "scores"],
)
def test_the_allocated_length_changes_no_translation(model, source, monkeypatch, engine, settings):
    found = []
    for num_tokens in (1, 2, 5, 10**6):
        monkeypatch.setattr(search_module, "FIRST_NEW_TOKENS", num_tokens)
        given = {**PAPER, "max_extra_tokens": 13, "engine": engine, **settings}
        output = model.generate(**source, **given)
        tensors = [output] if isinstance(output, torch.Tensor) else list(output.to_tuple())[:4]
        found.append([it for it in tensors if isinstance(it, torch.Tensor)])
    assert found[0][0].shape[1] > 9
    for tensors in found[:-1]:
        assert len(tensors) == len(found[-1])
        for tensor, expected in zip(tensors, found[-1], strict=True):
            assert tensor.equal(expected)
