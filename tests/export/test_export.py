"""Exported models: each engine gives the same probabilities and the same translations."""

import copy
import json
import logging
import sys

import numpy as np
import pytest
import torch
from library_models import (
    LANGUAGES,
    SENTENCES,
    by_hand,
    make_fsmt_of_two,
    make_m2m,
    make_marian,
    make_pieces,
    search_by_hand,
)
from safetensors.torch import load_file
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer.cli import main
from vanilla_transformer.conversion import from_fsmt, from_m2m100
from vanilla_transformer.export.command import run
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    sinusoidal_encoding,
)

ctranslate2 = pytest.importorskip("ctranslate2")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from ctranslate2.converters import TransformersConverter  # noqa: E402
from ctranslate2_search import InCTranslate2, gnmt_score  # noqa: E402

from vanilla_transformer.export import transformersjs  # noqa: E402
from vanilla_transformer.export.ctranslate2 import LOWEST_BIAS, to_ctranslate2  # noqa: E402
from vanilla_transformer.export.marian import to_marian  # noqa: E402
from vanilla_transformer.export.onnx import (  # noqa: E402
    DECODER_FILE,
    DECODER_WITH_PAST_FILE,
    ENCODER_FILE,
    EncoderGraph,
    to_onnx,
)
from vanilla_transformer.export.transformersjs import (  # noqa: E402
    MERGED_FILE,
    save_tokenizer_for_javascript,
    to_transformersjs,
)

# configurations that every engine has to support
KINDS = {
    "paper": {},
    "halves": {"position_layout": "halves"},
    "biases": {"attention_bias": True, "output_bias": True},
    "other wavelengths": {
        "position_base": 300.0,
        "position_offset": 2,
        "position_layout": "halves",
    },
    "learned positions": {
        "position_encoding": "learned",
        "position_offset": 1,
        "max_position_embeddings": 30,
    },
    "no positions": {"position_encoding": "none"},
    "gelu": {"activation_function": "gelu"},
    "gelu by tanh": {"activation_function": "gelu_new"},
    "silu": {"activation_function": "silu"},
    "swish": {"activation_function": "swish"},
    "norm first": {"norm_first": True, "layer_norm_eps": 1e-3},
    "untied": {"tie_word_embeddings": False},
    "narrow keys": {"d_k": 3, "d_v": 7},
    "narrow values": {"d_k": 8, "d_v": 5, "attention_bias": True},
    "heads of each stack": {"decoder_attention_heads": 3, "d_k": 6, "d_v": 6},
}
MARIAN_KINDS = (
    "paper",
    "halves",
    "biases",
    "other wavelengths",
    "learned positions",
    "no positions",
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def model_of(tokenizer, **fields):
    """Model in which every weight matters, and every token may be generated."""
    model = make_model(tokenizer, **fields)
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.generation_config.suppress_tokens = None
    model.generation_config.max_extra_tokens = 8
    return model


@pytest.fixture(params=KINDS)
def model(request, tokenizer):
    return model_of(tokenizer, **KINDS[request.param])


@pytest.fixture
def source(tokenizer):
    return tokenizer(TEXTS, padding=True, return_tensors="pt")


def written(ids, eos=2):
    """Return the tokens of a translation between start and end token."""
    ids = list(ids)[1:]
    return ids[: ids.index(eos)] if eos in ids else ids


def reference(model, source, **search):
    """Translate with this package."""
    settings = {"max_new_tokens": 12, "max_extra_tokens": None, **search}
    ids = model.generate(
        input_ids=source["input_ids"], attention_mask=source["attention_mask"], **settings
    )
    return [written(row) for row in ids.tolist()]


def our_log_probs(model, source_ids, target_ids):
    """Return the log probability of each target token, and of the end token."""
    start, eos = model.config.decoder_start_token_id, model.config.eos_token_id
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([source_ids]),
            decoder_input_ids=torch.tensor([[start, *target_ids]]),
        ).logits[0]
    return logits.log_softmax(-1)[range(len(target_ids) + 1), [*target_ids, eos]].tolist()


def test_ctranslate2_gives_every_token_our_probability(model, tokenizer, tmp_path):
    to_ctranslate2(model, tokenizer, tmp_path, num_positions=30)
    engine = InCTranslate2(tmp_path, tokenizer)
    sources = tokenizer(TEXTS)["input_ids"]
    targets = [ids[:-1] for ids in reversed(sources)]
    scores = engine.translator.score_batch(
        [engine.tokens(ids) for ids in sources], [engine.tokens(ids) for ids in targets]
    )
    for source_ids, target_ids, score in zip(sources, targets, scores, strict=True):
        expected = our_log_probs(model, source_ids, target_ids)
        np.testing.assert_allclose(score.log_probs, expected, atol=1e-4)


def test_ctranslate2_gives_our_translations(tokenizer, source, tmp_path):
    model = model_of(tokenizer)
    to_ctranslate2(model, tokenizer, tmp_path)
    engine = InCTranslate2(tmp_path, tokenizer)
    greedy = engine.translate(TEXTS, beam_size=1)
    ours = reference(model, source, num_beams=1)
    assert [engine.ids(result.hypotheses[0]) for result in greedy] == ours
    ours = reference(model, source, num_beams=4)
    assert [engine.ids(tokens) for tokens in engine.paper_search(TEXTS)] == ours
    assert len({tuple(ids) for ids in ours}) > 2


def with_other_ids(model, source, as_list=False):
    """Let a search start with one other token and end with another one; return both."""
    for start in range(4, model.config.vocab_size):
        model.generation_config.decoder_start_token_id = start
        found = reference(model, source, num_beams=1)
        first_ids = {start, *(ids[0] for ids in found)}
        # by default, CTranslate2 does not generate an end token first
        for end in {token for ids in found for token in ids} - first_ids:
            model.generation_config.eos_token_id = [2, end] if as_list else end
            return start, end
    raise AssertionError


def test_ctranslate2_starts_and_ends_as_generate_does(tokenizer, source, tmp_path):
    model = model_of(tokenizer)
    _, end = with_other_ids(model, source)
    to_ctranslate2(model, tokenizer, tmp_path)
    engine = InCTranslate2(tmp_path, tokenizer)
    found = [engine.ids(one.hypotheses[0]) for one in engine.translate(TEXTS, beam_size=1)]
    ours = model.generate(**source, num_beams=1, max_new_tokens=12, max_extra_tokens=None)
    assert found == [written(row, end) for row in ours.tolist()]
    assert any(end in row for row in ours.tolist())


def test_ctranslate2_never_generates_forbidden_tokens(tokenizer, source, tmp_path):
    for bias in (False, True):
        model = model_of(tokenizer, output_bias=bias)
        free = reference(model, source, num_beams=1)
        model.generation_config.bad_words_ids = [[free[0][0]]]
        model.generation_config.suppress_tokens = [free[1][0], free[2][0]]
        to_ctranslate2(model, tokenizer, tmp_path / str(bias))
        engine = InCTranslate2(tmp_path / str(bias), tokenizer)
        found = [engine.ids(one.hypotheses[0]) for one in engine.translate(TEXTS, beam_size=1)]
        assert found == reference(model, source, num_beams=1) != free


def test_suppressed_ids_outside_of_the_vocabulary_are_ignored(tokenizer, source, tmp_path):
    model = model_of(tokenizer)
    last = len(tokenizer) - 1
    model.generation_config.suppress_tokens = [-1, last + 1, last + 20]
    expected = reference(model, source, num_beams=1)
    to_ctranslate2(model, tokenizer, tmp_path / "ct2")
    engine = InCTranslate2(tmp_path / "ct2", tokenizer)
    found = [engine.ids(one.hypotheses[0]) for one in engine.translate(TEXTS, beam_size=1)]
    assert found == expected
    # -1 is not the last token
    sources = [engine.tokens(tokenizer(TEXTS[0])["input_ids"])]
    (score,) = engine.translator.score_batch(sources, [engine.tokens([last])])
    assert score.log_probs[0] > LOWEST_BIAS / 2
    to_marian(model, tokenizer, tmp_path / "marian")
    search = GenerationConfig.from_pretrained(tmp_path / "marian")
    assert {-1, last + 1, last + 20} <= {*search.suppress_tokens}


@pytest.mark.parametrize("quantization", ["float32", "int8"])
def test_ctranslate2_translates_with_the_tokenizer_of_its_folder(quantization, tokenizer, tmp_path):
    to_ctranslate2(model_of(tokenizer), tokenizer, tmp_path, quantization)
    ours = InCTranslate2(tmp_path, tokenizer)
    theirs = InCTranslate2(tmp_path, AutoTokenizer.from_pretrained(tmp_path))
    assert type(theirs.tokenizer) is PreTrainedTokenizerFast
    texts = [*TEXTS, "</s> is text", " Zürich, 東京  "]
    found, expected = (
        [
            engine.tokenizer.decode(engine.ids(result.hypotheses[0]))
            for result in engine.translate(texts, beam_size=2)
        ]
        for engine in (theirs, ours)
    )
    assert found == expected
    assert len(set(found)) > 2


def test_the_penalty_of_ctranslate2_is_another_formula(tokenizer, tmp_path):
    model = model_of(tokenizer)
    to_ctranslate2(model, tokenizer, tmp_path)
    engine = InCTranslate2(tmp_path, tokenizer)
    settings = {"beam_size": 4, "num_hypotheses": 4, "return_scores": True}
    plain, penalized = (
        engine.translate(TEXTS, length_penalty=penalty, **settings) for penalty in (1e-6, 0.6)
    )
    compared = 0
    for result, other in zip(plain, penalized, strict=True):
        log_probs = dict(zip(map(tuple, result.hypotheses), result.scores, strict=True))
        for hypothesis, score in zip(other.hypotheses, other.scores, strict=True):
            log_prob = log_probs.get(tuple(hypothesis))
            if log_prob is not None and hypothesis:
                assert score == pytest.approx(log_prob / len(hypothesis) ** 0.6, rel=1e-4)
                compared += 1
    assert compared > 5


@pytest.mark.parametrize(
    ("quantization", "error", "most_bytes"), [("float16", 5e-3, 2.4), ("int8", 0.1, 1.7)]
)
def test_quantized_weights_change_little(tokenizer, tmp_path, quantization, error, most_bytes):
    model = model_of(tokenizer, d_model=64, encoder_ffn_dim=256)
    # logits as large as those of trained models
    model.get_input_embeddings().weight.data /= 8
    to_ctranslate2(model, tokenizer, tmp_path, quantization, num_positions=30)
    size = (tmp_path / "model.bin").stat().st_size
    assert size < most_bytes * model.num_parameters()
    # without VNNI, a CPU rounds int8 products more than quantization rounds the weights
    engine = InCTranslate2(tmp_path, tokenizer, compute_type="float32")
    for ids in tokenizer(TEXTS)["input_ids"]:
        tokens = engine.tokens(ids)
        score = engine.translator.score_batch([tokens], [tokens[:-1]])[0]
        expected = np.array(our_log_probs(model, ids, ids[:-1]))
        assert 0 < np.abs(np.array(score.log_probs) - expected).mean() < error


def test_ctranslate2_knows_the_languages_of_m2m100(pieces, tmp_path):
    torch.manual_seed(3)
    source_model, tokenizer = make_m2m(pieces, tmp_path)
    assert "__de__" not in tokenizer.get_vocab()
    texts, target = SENTENCES[:3], tokenizer.lang_code_to_token["de"]
    to_ctranslate2(from_m2m100(source_model.eval()), tokenizer, tmp_path / "ct2")
    engine = InCTranslate2(tmp_path / "ct2", AutoTokenizer.from_pretrained(tmp_path / "ct2"))
    engine.tokenizer.src_lang = "en"
    found = engine.translate(texts, beam_size=1, target_prefix=[[target]] * len(texts))
    expected = search_by_hand(
        source_model, tokenizer, texts, LANGUAGES, max_new_tokens=12, num_beams=1
    )
    ids = [engine.ids(result.hypotheses[0]) for result in found]
    assert ids == [written(rows[0].tolist()) for rows in expected]
    assert {row[0] for row in ids} == {tokenizer.get_lang_id("de")}
    assert len({tuple(row) for row in ids}) > 1


def test_ctranslate2_has_the_vocabularies_of_source_and_target(pieces, tmp_path):
    source_model, tokenizer = make_fsmt_of_two(pieces, tmp_path, extra=[])
    source_model.generation_config.forced_eos_token_id = None
    to_ctranslate2(from_fsmt(source_model.eval()), tokenizer, tmp_path / "ct2")
    engine = ctranslate2.Translator(str(tmp_path / "ct2"))
    sources = [[*tokenizer.tokenize(text), "</s>"] for text in SENTENCES[:3]]
    found = [
        tokenizer.convert_tokens_to_string(result.hypotheses[0])
        for result in engine.translate_batch(sources, beam_size=1, max_decoding_length=12)
    ]
    search = {"max_new_tokens": 12, "num_beams": 1}
    assert found == by_hand(source_model, tokenizer, SENTENCES[:3], {}, **search)
    assert len(set(found)) > 1


def test_an_id_without_a_token_can_be_exported(tokenizer, tmp_path):
    model = model_of(tokenizer, vocab_size=len(tokenizer) + 3)
    to_ctranslate2(model, tokenizer, tmp_path)
    names = json.loads((tmp_path / "shared_vocabulary.json").read_text(encoding="utf-8"))
    assert len(names) == len(set(names)) == len(tokenizer) + 3


class InOnnx:
    """Exported folder in ONNX Runtime, from token ids to token ids."""

    def __init__(self, folder, start=1, eos=2):
        self.start, self.eos = start, eos
        self.encoder, self.decoder, self.decoder_with_past = (
            onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
            for name in (ENCODER_FILE, DECODER_FILE, DECODER_WITH_PAST_FILE)
        )

    def log_probs(self, logits):
        return torch.from_numpy(logits[:, -1]).log_softmax(-1).numpy()

    def first(self, ids, mask):
        """Return the log probabilities of the first token, and the cache."""
        memory = self.encoder.run(None, {"input_ids": ids, "attention_mask": mask})[0]
        logits, *present = self.decoder.run(
            None,
            {
                "encoder_attention_mask": mask,
                "input_ids": np.full((len(ids), 1), self.start),
                "encoder_hidden_states": memory,
            },
        )
        names = [one.name for one in self.decoder.get_outputs()[1:]]
        cache = dict(zip(names, present, strict=True))
        return self.log_probs(logits), cache

    def next(self, tokens, mask, cache):
        """Return the log probabilities of one more token, and the longer cache."""
        past = {name.replace("present", "past_key_values"): one for name, one in cache.items()}
        logits, *grown = self.decoder_with_past.run(
            None,
            {"encoder_attention_mask": mask, "input_ids": np.array(tokens)[:, None], **past},
        )
        names = [one.name for one in self.decoder_with_past.get_outputs()[1:]]
        return self.log_probs(logits), cache | dict(zip(names, grown, strict=True))

    def greedy(self, ids, mask, steps):
        log_probs, cache = self.first(ids, mask)
        sentences = [[self.start] for _ in ids]
        for _ in range(steps):
            tokens = log_probs.argmax(-1)
            for sentence, token in zip(sentences, tokens, strict=True):
                sentence.append(int(token))
            log_probs, cache = self.next(tokens, mask, cache)
        return [written(sentence) for sentence in sentences]

    def beam(self, ids, mask, steps, num_beams=4):
        """Search of section 6.1 for one sentence, in plain lists."""
        log_probs, cache = self.first(ids, mask)
        beams, complete = [(0.0, [])], []
        for step in range(1, steps + 1):
            candidates = sorted(
                (
                    (score + float(row[token]), [*tokens, token], place)
                    for place, ((score, tokens), row) in enumerate(
                        zip(beams, log_probs, strict=True)
                    )
                    for token in np.argsort(-row)[: 2 * num_beams].tolist()
                ),
                reverse=True,
            )[: 2 * num_beams]
            complete += [
                (gnmt_score(score, step), tokens[:-1])
                for score, tokens, _ in candidates
                if tokens[-1] == self.eos
            ]
            going_on = [one for one in candidates if one[1][-1] != self.eos][:num_beams]
            beams = [(score, tokens) for score, tokens, _ in going_on]
            places = [place for _, _, place in going_on]
            cache = {name: one[places] for name, one in cache.items()}
            rows = np.repeat(mask, len(beams), axis=0)
            log_probs, cache = self.next([tokens[-1] for _, tokens in beams], rows, cache)
        if not complete:
            return beams[0][1]
        return max(complete)[1]


# tracing takes seconds for each layer
ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1}
TWO_LAYERS = {"encoder_layers": 1, "decoder_layers": 2}


@pytest.fixture(
    scope="module",
    params=[
        {**KINDS["narrow keys"], **ONE_LAYER},
        pytest.param(TWO_LAYERS, marks=pytest.mark.slow),
        pytest.param({**KINDS["learned positions"], **TWO_LAYERS}, marks=pytest.mark.slow),
    ],
    ids=["narrow keys", "paper", "learned positions"],
)
def in_onnx(request, tokenizer, tmp_path_factory):
    model = model_of(tokenizer, **request.param)
    folder = tmp_path_factory.mktemp("onnx")
    to_onnx(model, tokenizer, folder)
    return model, InOnnx(folder)


def test_onnx_gives_our_translations(in_onnx, source, tokenizer):
    model, engine = in_onnx
    ids, mask = (source[name].numpy() for name in ("input_ids", "attention_mask"))
    ours = reference(model, source, num_beams=1)
    assert engine.greedy(ids, mask, 12) == ours
    found = [
        engine.beam(np.array([row]), np.ones((1, len(row)), dtype=np.int64), 12)
        for row in tokenizer(TEXTS)["input_ids"]
    ]
    ours = reference(model, source, num_beams=4)
    assert found == ours
    assert len({tuple(ids) for ids in ours}) > 2


def test_an_encoder_may_have_its_arguments_in_another_order(tokenizer, source):
    model = model_of(tokenizer)
    ids, mask = source["input_ids"], source["attention_mask"]
    expected = EncoderGraph(model)(ids, mask)
    forward = model.get_encoder().forward
    model.get_encoder().forward = lambda attention_mask, input_ids: forward(
        input_ids=input_ids, attention_mask=attention_mask
    )
    torch.testing.assert_close(EncoderGraph(model)(ids, mask), expected)


def test_the_graphs_of_onnx_take_any_size(in_onnx):
    model, engine = in_onnx
    generator = torch.Generator().manual_seed(1)
    for sentences, read, wrote in ((1, 1, 1), (3, 28, 7)):
        ids = torch.randint(4, 290, (sentences, read), generator=generator)
        target = torch.randint(4, 290, (sentences, wrote), generator=generator)
        mask = torch.ones_like(ids)
        mask[-1, read // 2 + 1 :] = 0
        memory = engine.encoder.run(
            None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        )[0]
        logits, *_ = engine.decoder.run(
            None,
            {
                "encoder_attention_mask": mask.numpy(),
                "input_ids": target.numpy(),
                "encoder_hidden_states": memory,
            },
        )
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
        np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4)


def swapped(ids, model):
    """Return the ids of an export to Marian, in which the padding token is the last one."""
    pad, last = model.config.pad_token_id, model.config.vocab_size - 1
    return torch.where(ids == pad, last, torch.where(ids == last, pad, ids))


@pytest.mark.parametrize("kind", MARIAN_KINDS)
def test_marian_gives_our_probabilities(kind, tokenizer, source, tmp_path):
    model = model_of(tokenizer, **KINDS[kind])
    to_marian(model, tokenizer, tmp_path)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert isinstance(theirs, MarianMTModel)
    inputs = {
        "input_ids": source["input_ids"],
        "attention_mask": source["attention_mask"],
        "decoder_input_ids": source["input_ids"].flip(0),
    }
    new_ids = swapped(torch.arange(len(tokenizer)), model)
    moved = {name: ids if "mask" in name else new_ids[ids] for name, ids in inputs.items()}
    with torch.no_grad():
        logits, expected = theirs(**moved).logits[..., new_ids], model(**inputs).logits
    actual, expected = logits.log_softmax(-1), expected.log_softmax(-1)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert ("lm_head.bias" in model.state_dict()) == (theirs.final_logits_bias != 0).any().item()


def test_marians_search_equals_ours_without_a_penalty(tokenizer, source, tmp_path):
    model = model_of(tokenizer)
    to_marian(model, tokenizer, tmp_path)
    theirs = MarianMTModel.from_pretrained(tmp_path).eval()
    read = AutoTokenizer.from_pretrained(tmp_path)(TEXTS, padding=True, return_tensors="pt")
    assert read["input_ids"].tolist() == swapped(source["input_ids"], model).tolist()
    search = {"num_beams": 4, "max_new_tokens": 12}
    ids = theirs.generate(
        input_ids=read["input_ids"],
        attention_mask=read["attention_mask"],
        length_penalty=0.0,
        early_stopping="never",
        **search,
    )
    assert [written(row) for row in swapped(ids, model).tolist()] == reference(
        model, source, length_penalty_alpha=0.0, **search
    )
    assert theirs.generation_config.num_beams == 4
    assert theirs.generation_config.length_penalty == 0.6


@pytest.mark.parametrize("as_list", [False, True])
def test_marian_starts_and_ends_as_generate_does(as_list, tokenizer, source, tmp_path):
    model = model_of(tokenizer)
    start, end = with_other_ids(model, source, as_list)
    to_marian(model, tokenizer, tmp_path)
    theirs = MarianMTModel.from_pretrained(tmp_path).eval()
    search = {"num_beams": 1, "max_new_tokens": 12}
    ids = theirs.generate(
        input_ids=swapped(source["input_ids"], model),
        attention_mask=source["attention_mask"],
        **search,
    )
    ours = model.generate(**source, **search, max_extra_tokens=None)
    assert swapped(ids, model).tolist() == ours.tolist()
    assert set(ours[:, 0].tolist()) == {start}
    assert theirs.generation_config.eos_token_id == ([2, end] if as_list else end)


def test_marian_keeps_the_search_settings_that_it_has(tokenizer, tmp_path):
    model = model_of(tokenizer)
    settings = {
        "length_penalty": 2.0,
        "early_stopping": True,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [7],
        "bad_words_ids": [[0], [5, 0]],
        "forced_bos_token_id": 0,
        "max_length": 80,
    }
    model.generation_config.update(length_penalty_alpha=None, **settings)
    to_marian(model, tokenizer, tmp_path, num_positions=90)
    theirs = MarianMTModel.from_pretrained(tmp_path).generation_config
    last = len(tokenizer) - 1
    settings |= {"bad_words_ids": [[last], [5, last]], "forced_bos_token_id": last}
    settings |= {"pad_token_id": last, "eos_token_id": 2, "decoder_start_token_id": 1}
    assert {name: getattr(theirs, name) for name in settings} == settings
    assert not hasattr(theirs, "max_extra_tokens")
    # limited by its table of positions
    to_marian(model, tokenizer, tmp_path / "short", num_positions=70)
    assert MarianMTModel.from_pretrained(tmp_path / "short").generation_config.max_length == 70


def test_positions_are_exact_where_weights_are_in_half_precision(tokenizer, tmp_path):
    model = model_of(tokenizer, position_base=300.0, position_layout="halves").bfloat16()
    to_marian(model, tokenizer, tmp_path, num_positions=30)
    table = load_file(tmp_path / "model.safetensors")["model.encoder.embed_positions.weight"]
    torch.testing.assert_close(table, sinusoidal_encoding(30, 24, 300.0, layout="halves"))


def test_marian_makes_the_papers_positions_itself(tokenizer, tmp_path):
    to_marian(model_of(tokenizer), tokenizer, tmp_path / "own")
    assert not [name for name in load_file(tmp_path / "own" / "model.safetensors") if "pos" in name]
    other = model_of(tokenizer, position_base=300.0)
    to_marian(other, tokenizer, tmp_path / "table", num_positions=17)
    tables = load_file(tmp_path / "table" / "model.safetensors")
    assert tables["model.decoder.embed_positions.weight"].shape == (17, 24)


@pytest.mark.parametrize("fields", [{}, {"output_bias": True, "vocab_size": 293}])
def test_the_converter_of_ctranslate2_takes_an_export_to_marian(fields, tokenizer, tmp_path):
    model = model_of(tokenizer, **fields)
    to_marian(model, tokenizer, tmp_path / "marian")
    TransformersConverter(str(tmp_path / "marian")).convert(str(tmp_path / "theirs"))
    to_ctranslate2(model, tokenizer, tmp_path / "ours")
    engines = [
        InCTranslate2(tmp_path / "theirs", AutoTokenizer.from_pretrained(tmp_path / "marian")),
        InCTranslate2(tmp_path / "ours", tokenizer),
    ]
    texts = [*TEXTS, "</s> is text, Zürich  too"]
    for search in ({"beam_size": 1}, {"beam_size": 4, "length_penalty": 0.5}):
        found = [engine.translate(texts, **search, return_scores=True) for engine in engines]
        for theirs, ours in zip(*found, strict=True):
            assert theirs.hypotheses == ours.hypotheses
            assert theirs.scores == pytest.approx(ours.scores, rel=1e-3)
        assert len({tuple(result.hypotheses[0]) for result in found[0]}) > 2


@pytest.mark.filterwarnings("error:.*requires_grad:UserWarning")
@pytest.mark.parametrize("export", [to_ctranslate2, to_onnx, to_marian])
def test_an_export_with_a_trained_bias_does_not_warn(tokenizer, tmp_path, export):
    export(model_of(tokenizer, output_bias=True), tokenizer, tmp_path / "exported")


def test_a_model_goes_to_marian_and_back(tokenizer, source, tmp_path):
    model = model_of(tokenizer)
    to_marian(model, tokenizer, tmp_path / "marian")
    assert main(["convert", "marian", str(tmp_path / "marian"), str(tmp_path / "again")]) == 0
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    same = AutoTokenizer.from_pretrained(tmp_path / "again")
    read = same(TEXTS, padding=True, return_tensors="pt")
    ours, theirs = (
        reference(*pair, num_beams=4) for pair in ((model, source), (again.eval(), read))
    )
    assert theirs == [swapped(torch.tensor(ids), model).tolist() for ids in ours]
    assert same.batch_decode(theirs) == tokenizer.batch_decode(ours)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("norm first", "norm_first must be False for Marian"),
        ("untied", "tie_word_embeddings must be True for Marian"),
        ("narrow keys", "d_k must be d_model / heads for Marian, got 3"),
        ("heads of each stack", "d_k must be d_model / heads for Marian"),
    ],
)
def test_an_option_that_marian_does_not_have_is_named(kind, message, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        to_marian(model_of(tokenizer, **KINDS[kind]), tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_option_that_ctranslate2_does_not_have_is_named(tokenizer, tmp_path):
    model = model_of(tokenizer, activation_function="mish")
    with pytest.raises(ValueError, match=r"activation_function must be one of relu.*got 'mish'"):
        to_ctranslate2(model, tokenizer, tmp_path / "out")
    model = model_of(tokenizer)
    with pytest.raises(ValueError, match=r"quantization must be .*got 'int7'"):
        to_ctranslate2(model, tokenizer, tmp_path / "out", "int7")
    with pytest.raises(ValueError, match="num_positions must be at least 1, got 0"):
        to_ctranslate2(model, tokenizer, tmp_path / "out", num_positions=0)
    learned = model_of(tokenizer, position_encoding="learned", max_position_embeddings=40)
    message = "num_positions must be at most 40, the number of learned positions, got 41"
    for export in (to_ctranslate2, to_marian):
        with pytest.raises(ValueError, match=message):
            export(learned, tokenizer, tmp_path / "out", num_positions=41)
    for ends in ([2, 3], -1):
        model = model_of(tokenizer)
        model.generation_config.eos_token_id = ends
        with pytest.raises(ValueError, match="eos_token_id must be one token for CTranslate2, got"):
            to_ctranslate2(model, tokenizer, tmp_path / "out")
    nameless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="must have an unknown token for CTranslate2, got none"):
        to_ctranslate2(model_of(tokenizer), nameless, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def squared(model):
    """Return a model with a changed feed-forward and the same weights."""
    model.model.encoder.layers[0].feed_forward.forward = lambda x: x.square()


def biased(model):
    """Return a model with one more weight."""
    attention = model.model.decoder.layers[0].self_attention
    attention.relative_bias = torch.nn.Parameter(torch.ones(3))


def buffered(model):
    """Return a model with one more buffer, which is not saved."""
    model.model.encoder.register_buffer("slopes", torch.ones(4), persistent=False)


def gated(model):
    """Return a model with one more submodule."""
    model.model.encoder.layers[1].gate = torch.nn.Identity()


def causal(model):
    """Return a model whose encoder is causal for batches without padding."""
    model.model.encoder.layers[0].self_attention.is_causal = True


@pytest.mark.parametrize("export", [to_ctranslate2, to_marian])
def test_a_token_that_is_forbidden_hides_no_other_scores(export, tokenizer, tmp_path):
    model = model_of(tokenizer, output_bias=True)
    model.lm_head.bias.data[7] = -1e9
    export(model, tokenizer, tmp_path / "good")
    for stack in (model.model.encoder, model.model.decoder):
        stack.layers[0].feed_forward.activation = torch.nn.SiLU()
    with pytest.raises(ValueError, match="must compute what its model computes"):
        export(model, tokenizer, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


@pytest.mark.parametrize("export", [to_ctranslate2, to_marian])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (causal, "model.encoder.layers.0.self_attention has is_causal True"),
        (
            squared,
            "model.encoder.layers.0.feed_forward has its own forward",
        ),
        (biased, "got the weight model.decoder.layers.0.self_attention.relative_bias"),
        (buffered, "got the buffer model.encoder.slopes"),
        (gated, "got the submodule model.encoder.layers.1.gate"),
    ],
)
def test_a_part_that_a_format_does_not_support_is_refused_by_name(
    export, change, message, tokenizer, tmp_path
):
    model = model_of(tokenizer)
    change(model)
    with pytest.raises(ValueError, match=message):
        export(model, tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["ctranslate2", "marian", "onnx"])
def test_an_export_that_computes_something_else_is_refused_and_leaves_nothing(
    kind, tokenizer, tmp_path, monkeypatch
):
    module = sys.modules[f"vanilla_transformer.export.{kind}"]
    before = module.batch_to_compare

    def moved(*args, **kwargs):
        batch = before(*args, **kwargs)
        # another score of one token at one position
        batch.logits[0, 1, batch.target[0, 2]] += 1.0
        return batch

    monkeypatch.setattr(module, "batch_to_compare", moved)
    model = model_of(tokenizer, **ONE_LAYER)
    with pytest.raises(ValueError, match=r"must compute what its model computes.*was discarded"):
        getattr(module, f"to_{kind}")(model, tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="must compute what its model computes"):
        getattr(module, f"to_{kind}")(model, tokenizer, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "notes.txt"]


def test_search_settings_that_ctranslate2_does_not_store_are_logged(tokenizer, tmp_path, caplog):
    model = model_of(tokenizer, **ONE_LAYER)
    to_ctranslate2(model, tokenizer, tmp_path / "plain")
    model.generation_config.repetition_penalty = 1.0
    model.generation_config.min_length = 0
    to_ctranslate2(model, tokenizer, tmp_path / "neutral")
    assert "does not store" not in caplog.text
    model.generation_config.forced_eos_token_id = 0
    model.generation_config.min_length = 1
    model.generation_config.forced_bos_token_id = 7
    model.generation_config.no_repeat_ngram_size = 3
    model.generation_config.sequence_bias = {(5,): -1.0}
    model.generation_config.bad_words_ids = [[5], [5, 6]]
    to_ctranslate2(model, tokenizer, tmp_path / "forced")
    token = tokenizer.convert_ids_to_tokens(7)
    for sentence in (
        f'forced_bos_token_id 7: give target_prefix=[["{token}"]] to translate_batch',
        "forced_eos_token_id 0: it has no such option",
        "min_length 1: give min_decoding_length to translate_batch",
        "no_repeat_ngram_size 3: give no_repeat_ngram_size to",
        "sequence_bias {(5,): -1.0}: it has no such option",
        "bad_words_ids [[5, 6]]: give suppress_sequences",
    ):
        assert f"CTranslate2 does not store {sentence}" in caplog.text


def test_marian_finds_and_leaves_out_a_special_token_of_the_user(tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    to_marian(model_of(tokenizer, **ONE_LAYER), tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("<2de> the cat")["input_ids"]
    assert len(tokenizer) - 1 in ids
    read = theirs("<2de> the cat")["input_ids"]
    assert 0 in read
    assert read == [0 if token == len(tokenizer) - 1 else token for token in ids]
    assert theirs.decode(read, skip_special_tokens=True) == "the cat"


def test_marian_keeps_the_post_processor_of_the_user(tokenizer, tmp_path):
    template = processors.TemplateProcessing(
        single="<2de> $A </s>", special_tokens=[("<2de>", len(tokenizer)), ("</s>", 2)]
    )
    kinds = (
        processors.BertProcessing(("</s>", 2), ("<2de>", len(tokenizer))),
        processors.RobertaProcessing(("</s>", 2), ("<2de>", len(tokenizer))),
        processors.Sequence([processors.ByteLevel(), template]),
    )
    for index, post_processor in enumerate(kinds):
        own_tokenizer = copy.deepcopy(tokenizer)
        own_tokenizer.add_special_tokens({"extra_special_tokens": ["<2de>"]})
        own_tokenizer.backend_tokenizer.post_processor = post_processor
        ids = own_tokenizer("the cat")["input_ids"]
        assert (ids[0], ids[-1]) == (len(tokenizer), 2)
        folder = tmp_path / str(index)
        to_marian(model_of(own_tokenizer, **ONE_LAYER), own_tokenizer, folder)
        assert AutoTokenizer.from_pretrained(folder)("the cat")["input_ids"] == [0, *ids[1:]]


def test_onnx_is_compared_without_padding_too(tokenizer, tmp_path):
    model = model_of(tokenizer, **ONE_LAYER)
    causal(model)
    with pytest.raises(ValueError, match="the scores in ONNX Runtime differ"):
        to_onnx(model, tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_onnx_traces_the_forward_that_a_user_wrote(tokenizer, tmp_path):
    class Scaled(VanillaTransformerForConditionalGeneration):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits = 3 * outputs.logits
            return outputs

    plain = model_of(tokenizer, **ONE_LAYER)
    model = Scaled(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    to_onnx(model, tokenizer, tmp_path)
    ids = np.array([[5, 6, 2]])
    found, _ = InOnnx(tmp_path).first(ids, np.ones_like(ids))
    with torch.no_grad():
        logits = plain(torch.from_numpy(ids), decoder_input_ids=torch.tensor([[1]])).logits
    np.testing.assert_allclose(found, (3 * logits[:, -1]).log_softmax(-1), atol=1e-4)


class InMergedOnnx(InOnnx):
    """Exported folder for transformers.js in ONNX Runtime."""

    def __init__(self, folder, ending, start=1, eos=2):
        self.start, self.eos = start, eos
        self.encoder, decoder = (
            onnxruntime.InferenceSession(
                folder / "onnx" / name.replace(".onnx", f"{ending}.onnx"),
                providers=["CPUExecutionProvider"],
            )
            for name in (ENCODER_FILE, MERGED_FILE)
        )
        self.decoder, self.decoder_with_past = Merged(decoder, False), Merged(decoder, True)


class Merged:
    """One of the two decoders in a merged one, called as transformers.js calls it."""

    def __init__(self, session, has_past):
        self.session, self.has_past = session, has_past

    def get_outputs(self):
        return self.session.get_outputs()

    def run(self, names, inputs):
        batch, length = inputs["encoder_attention_mask"].shape
        others = {
            "use_cache_branch": np.array([self.has_past]),
            "encoder_hidden_states": np.zeros((batch, length, 24), np.float32),
        }
        for one in self.session.get_inputs():
            if "past" in one.name:
                assert one.shape[0] == "batch_size"
                sizes = [batch, *(size if isinstance(size, int) else 0 for size in one.shape[1:])]
                others[one.name] = np.zeros(sizes, np.float32)
        return self.session.run(names, others | inputs)


@pytest.fixture(
    scope="module",
    params=[
        {**KINDS["narrow keys"], **ONE_LAYER},
        pytest.param({**KINDS["untied"], **TWO_LAYERS}, marks=pytest.mark.slow),
        pytest.param({**KINDS["learned positions"], **TWO_LAYERS}, marks=pytest.mark.slow),
    ],
    ids=["narrow keys", "untied", "learned positions"],
)
def in_merged_onnx(request, tokenizer, tmp_path_factory):
    model = model_of(tokenizer, **request.param)
    folder = tmp_path_factory.mktemp("transformersjs")
    to_transformersjs(model, tokenizer, folder)
    return model, folder


def test_the_merged_decoder_gives_our_translations(in_merged_onnx, source):
    model, folder = in_merged_onnx
    ids, mask = (source[name].numpy() for name in ("input_ids", "attention_mask"))
    ours = reference(model, source, num_beams=1)
    assert InMergedOnnx(folder, "").greedy(ids, mask, 12) == ours
    assert len({tuple(ids) for ids in ours}) > 2
    assert len(InMergedOnnx(folder, "_quantized").greedy(ids, mask, 12)) == len(ours)


def test_the_merged_decoder_has_each_weight_once(in_merged_onnx):
    model, folder = in_merged_onnx
    bytes_of_decoder = 4 * sum(one.numel() for one in model.get_decoder().parameters())
    size = (folder / "onnx" / MERGED_FILE).stat().st_size
    # the embedding also as the output matrix, and the graph
    assert size < bytes_of_decoder + 4 * model.lm_head.weight.numel() + 150_000


def test_only_the_advice_of_the_quantization_is_hidden(monkeypatch, caplog):
    def quantize(model, path, **_):
        logging.warning("Please consider to run pre-processing before quantization.")
        logging.warning("another warning")
        path.write_bytes(model)

    monkeypatch.setattr(transformersjs, "quantize_dynamic", quantize)
    monkeypatch.setattr(transformersjs.onnx, "load", lambda path: path.read_bytes())
    filters = [*logging.getLogger().filters]
    logging.disable(logging.INFO)
    try:
        assert transformersjs._quantize(b"model") == b"model"
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)
    assert caplog.messages == ["another warning"]
    assert logging.getLogger().filters == filters


def test_graphs_for_transformers_js_are_compared(tokenizer, tmp_path):
    model = model_of(tokenizer, **ONE_LAYER)
    causal(model)
    with pytest.raises(ValueError, match="the scores in ONNX Runtime differ"):
        to_transformersjs(model, tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_only_end_tokens_follow_an_end_token_in_transformers_js(in_merged_onnx, source):
    _, folder = in_merged_onnx
    engine = InMergedOnnx(folder, "")
    ids, mask = (source[name].numpy() for name in ("input_ids", "attention_mask"))
    _, cache = engine.first(ids, mask)
    log_probs, _ = engine.next([2, *[5] * (len(ids) - 1)], mask, cache)
    assert log_probs[0].argmax() == 2
    assert log_probs[0, 2] == pytest.approx(0)
    assert (log_probs[1:, 2] < -0.01).all()


def test_graphs_start_and_end_as_generate_does(tokenizer, source, tmp_path):
    model = model_of(tokenizer, **ONE_LAYER)
    start, end = with_other_ids(model, source, as_list=True)
    to_transformersjs(model, tokenizer, tmp_path)
    engine = InMergedOnnx(tmp_path, "")
    ids, mask = (source[name].numpy() for name in ("input_ids", "attention_mask"))
    _, cache = engine.first(ids, mask)
    log_probs, _ = engine.next([end] * len(ids), mask, cache)
    assert np.sort(np.argsort(log_probs)[:, -2:]).tolist() == [sorted([2, end])] * len(ids)
    search = GenerationConfig.from_pretrained(tmp_path)
    assert (search.decoder_start_token_id, search.eos_token_id) == (start, [2, end])


def test_a_graph_for_browsers_has_no_float64_and_no_path_of_this_machine(in_merged_onnx):
    _, folder = in_merged_onnx
    for path in (folder / "onnx").iterdir():
        assert b".py" not in path.read_bytes()
        model = onnx.load(path)
        assert not [
            one for one in model.graph.initializer if one.data_type == onnx.TensorProto.DOUBLE
        ]


def test_a_tokenizer_without_tokenizer_json_is_refused(tokenizer, tmp_path):
    (tmp_path / "pieces").mkdir()
    _, pieces = make_marian(make_pieces(tmp_path / "pieces"), tmp_path / "pieces")
    message = "must have a tokenizer.json for transformers.js, got one of MarianTokenizer"
    with pytest.raises(ValueError, match=message):
        to_transformersjs(model_of(tokenizer, **ONE_LAYER), pieces, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["pieces"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("normalizer", normalizers.Lowercase(), "the normalizer of .* got {'type': 'Lowercase'}"),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(), "the pre_tokenizer of the tokenizer must be"),
        (
            "decoder",
            decoders.ByteLevel(),
            "the decoder of the tokenizer must be unchanged for tran",
        ),
    ],
)
def test_a_changed_tokenizer_is_refused_for_transformers_js(name, change, message, tmp_path):
    changed = make_tokenizer()
    save_tokenizer_for_javascript(changed, tmp_path)
    setattr(changed.backend_tokenizer, name, change)
    with pytest.raises(ValueError, match=message):
        save_tokenizer_for_javascript(changed, tmp_path)


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """Model folder."""
    folder = tmp_path_factory.mktemp("saved")
    model_of(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("command", "files"),
    [
        (["ctranslate2"], {"model.bin", "shared_vocabulary.json", "tokenizer.json"}),
        (["marian", "--num_positions", "50"], {"model.safetensors", "tokenizer.json"}),
    ],
)
def test_the_command_writes_the_folder_once(command, files, saved, tmp_path, capsys):
    kind, *flags = command
    words = ["export", kind, str(saved), str(tmp_path / "out"), *flags]
    assert main(words) == 0
    assert f"MB in {tmp_path / 'out'}" in capsys.readouterr().out
    assert files < {path.name for path in (tmp_path / "out").iterdir()}
    assert main(words) == 1
    assert "OUT must be a new or an empty folder" in capsys.readouterr().err


def test_the_flags_of_the_command_reach_the_engine(saved, tmp_path):
    sizes = {}
    for quantization in ("float32", "int8"):
        out = tmp_path / quantization
        flags = ["--quantization", quantization, "--num_positions", "30"]
        assert main(["export", "ctranslate2", str(saved), str(out), *flags]) == 0
        sizes[quantization] = (out / "model.bin").stat().st_size
    assert sizes["int8"] < sizes["float32"] / 2


@pytest.mark.parametrize(
    ("kind", "package"), [("ctranslate2", "ctranslate2"), ("onnx", "onnxscript")]
)
def test_an_engine_that_is_not_installed_is_named(kind, package, saved, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, f"vanilla_transformer.export.{kind}")
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"needs the package {package}, which is not installed: pip install .*{package}"
    with pytest.raises(ValueError, match=message):
        run([kind, str(saved), str(tmp_path / "out")], "export")
    assert not (tmp_path / "out").exists()
