"""Converted models of transformers and torch: the same logits and the same translations."""

import pytest
import torch
from peer_models import fsmt, m2m100, marian
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForSeq2SeqLM,
    MarianMTModel,
)
from transformers.masking_utils import eager_mask

from vanilla_transformer.conversion import check, from_fsmt, from_m2m100, from_marian, from_torch


def without_norms(**options):
    module = torch.nn.Transformer(12, 3, 1, 1, 20, **options)
    module.encoder.norm = module.decoder.norm = None
    return module


def with_another_norm(module):
    module.decoder.layers[0].norm3.eps = 0.1
    return module


PEERS = {
    "marian": (marian, from_marian),
    "fsmt": (lambda: fsmt(tied=False), from_fsmt),
    "fsmt-tied": (lambda: fsmt(tied=True), from_fsmt),
    "m2m100": (m2m100, from_m2m100),
}


@pytest.fixture(params=PEERS)
def pair(request):
    build, convert = PEERS[request.param]
    theirs = build()
    return theirs, convert(theirs)


@pytest.fixture
def source(pair, batch):
    """Padded sources with the peer's special tokens."""
    pad = pair[0].config.pad_token_id
    ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, pad)
    return {"input_ids": ids, "attention_mask": batch["attention_mask"]}


def test_the_logits_equal_the_peers(pair, source, batch):
    theirs, ours = pair
    target = batch["decoder_input_ids"].clone()
    target[:, 0] = theirs.config.decoder_start_token_id
    with torch.no_grad():
        expected = theirs(**source, decoder_input_ids=target, use_cache=False).logits
        actual = ours(**source, decoder_input_ids=target).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# each mode of the library's search, for both models; padding is forbidden, because FSMT's positions
# count on from a padding token that it generates
LENGTHS = {"max_new_tokens": 9, "sequence_bias": {(2,): 1.0}, "suppress_tokens": [0, 1]}
MODES = {
    "greedy": {"num_beams": 1},
    "beam": {"num_beams": 4},
    "n-best": {"num_beams": 4, "num_return_sequences": 3},
    "length penalty": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    "canonical": {"num_beams": 5, "length_penalty": 0.0, "early_stopping": "never"},
    "processors": {"num_beams": 3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "sampled": {"do_sample": True, "num_beams": 1, "top_k": 5},
    "beam sampled": {"do_sample": True, "num_beams": 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_the_librarys_search_gives_the_peers_translations(pair, source, mode):
    theirs, ours = pair
    settings = {**MODES[mode], **LENGTHS}
    outputs = []
    for model in (theirs, ours):
        own = {"length_penalty_alpha": None, "max_extra_tokens": None} if model is ours else {}
        torch.manual_seed(3)
        outputs.append(model.generate(**source, **settings, **own))
    assert outputs[1].tolist() == outputs[0].tolist()
    assert len({tuple(row) for row in outputs[1].tolist()}) > 1


def test_generate_returns_the_same_as_the_peers(pair, source):
    theirs, ours = pair
    settings = {
        **LENGTHS,
        "num_beams": 3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected = theirs.generate(**source, **settings)
    own = {"length_penalty_alpha": None, "max_extra_tokens": None}
    actual = ours.generate(**source, **settings, **own)
    assert actual.keys() == expected.keys()
    for name in ("sequences", "beam_indices"):
        assert actual[name].tolist() == expected[name].tolist()
    for name in ("sequences_scores", "scores", "logits"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4)


def test_the_papers_search_without_a_penalty_is_the_librarys_beam_search(pair, source):
    theirs, ours = pair
    canonical = theirs.generate(
        **source, num_beams=5, length_penalty=0.0, early_stopping="never", **LENGTHS
    )
    paper_search = ours.generate(
        **source, num_beams=5, length_penalty_alpha=0.0, max_extra_tokens=None, **LENGTHS
    )
    eos = theirs.config.eos_token_id
    compared = 0
    for expected, actual in zip(canonical.tolist(), paper_search.tolist(), strict=True):
        # without a complete hypothesis, the two searches truncate differently
        if eos in expected[1:]:
            length = expected.index(eos, 1) + 1
            assert actual[:length] == expected[:length]
            compared += 1
    assert compared


def test_a_converted_model_searches_as_the_paper_does(pair, tmp_path):
    ours = pair[1]
    ours.save_pretrained(tmp_path)
    config = type(ours).from_pretrained(tmp_path).generation_config
    assert (config.num_beams, config.length_penalty_alpha, config.max_extra_tokens) == (4, 0.6, 50)


def test_tokens_that_marian_forbids_stay_forbidden(tmp_path):
    theirs = marian()
    theirs.final_logits_bias[0, 0] = 9.0
    theirs.generation_config.bad_words_ids = [[0]]
    from_marian(theirs).save_pretrained(tmp_path)
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    source = torch.randint(3, 23, (2, 6))
    written = ours.generate(source, min_new_tokens=4, max_new_tokens=4)[:, 1:]
    assert 0 not in written
    assert 0 in ours.generate(source, max_new_tokens=4, bad_words_ids=[[1]])[:, 1:]


KEPT = {
    "bad_words_ids": [[3], [7, 8]],
    "begin_suppress_tokens": [10],
    "decoder_start_token_id": 5,
    "eos_token_id": [2, 12],
    "forced_bos_token_id": 11,
    "min_length": 4,
    "no_repeat_ngram_size": 2,
    "repetition_penalty": 1.3,
    # padding, from which FSMT's positions count on, and another token
    "suppress_tokens": [0, 1, 9],
}


@pytest.mark.parametrize("kind", PEERS)
def test_a_converted_model_may_write_the_tokens_that_its_source_may(kind, batch, tmp_path):
    build, convert = PEERS[kind]
    theirs = build()
    theirs.generation_config.update(**KEPT, num_beams=3, forced_eos_token_id=2, max_length=9)
    convert(theirs).save_pretrained(tmp_path)
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    search = ours.generation_config
    assert {name: getattr(search, name) for name in KEPT} == KEPT
    assert (search.num_beams, search.max_length, search.forced_eos_token_id) == (4, None, None)
    inputs = {"input_ids": batch["input_ids"].clamp(min=3), "num_beams": 1, "max_new_tokens": 9}
    theirs.generation_config.forced_eos_token_id = None
    own = {"length_penalty_alpha": None, "max_extra_tokens": None}
    assert ours.generate(**inputs, **own).tolist() == theirs.generate(**inputs).tolist()


def test_the_activation_of_a_torch_module_may_be_a_module():
    module = without_norms()
    for activation, name in (
        (torch.nn.GELU(), "gelu"),
        (torch.nn.GELU(approximate="tanh"), "gelu_pytorch_tanh"),
        (torch.nn.ReLU(), "relu"),
    ):
        for stack in (module.encoder, module.decoder):
            stack.layers[0].activation = activation
        assert from_torch(module, torch.zeros(9, 12)).config.activation_function == name


@pytest.mark.parametrize(
    ("convert", "given", "message"),
    [
        (from_marian, [torch.nn.Linear(2, 2)], "model must be a MarianMTModel, got a Linear"),
        (from_fsmt, [{}], "model must be a FSMTForConditionalGeneration, got a dict"),
        (from_torch, [{}, torch.zeros(9, 12)], "module must be a Transformer, got a dict"),
        (
            from_torch,
            [without_norms(), torch.nn.Embedding(9, 12)],
            "embedding must be a Tensor, got a Embedding",
        ),
        (
            from_torch,
            [torch.nn.Transformer(12, 3, custom_encoder=torch.nn.Identity()), torch.zeros(9, 12)],
            "module.encoder must be a TransformerEncoder, got a Identity",
        ),
    ],
)
def test_an_argument_of_the_wrong_class_is_named(convert, given, message):
    with pytest.raises(TypeError, match=message):
        convert(*given)


def test_stacks_of_a_torch_module_may_differ_in_width():
    decoder = torch.nn.TransformerDecoderLayer(12, 3, 28)
    module = torch.nn.Transformer(
        12, 3, 2, 2, 20, custom_decoder=torch.nn.TransformerDecoder(decoder, 2)
    )
    module.encoder.norm = None
    ours = from_torch(module.eval(), torch.randn(9, 12))
    assert (ours.config.encoder_ffn_dim, ours.config.decoder_ffn_dim) == (20, 28)
    source, target = torch.randint(9, (2, 5, 3))
    encoder, decoder = ours.model.encoder, ours.model.decoder
    with torch.no_grad():
        read = encoder.positions(encoder.embed_tokens(source) * 12**0.5)
        written = decoder.positions(decoder.embed_tokens(target) * 12**0.5)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(3)
        expected = module(read.transpose(0, 1), written.transpose(0, 1), tgt_mask=mask)
        expected = expected.transpose(0, 1)
        found = ours.model(input_ids=source, decoder_input_ids=target).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_positions_of_marian_that_are_no_sinusoids_are_kept(batch):
    theirs = marian(max_position_embeddings=30)
    theirs.model.encoder.embed_positions.weight.data.normal_()
    ours = from_marian(theirs)
    assert ours.config.position_encoding == "learned"
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).logits, theirs(**batch, use_cache=False).logits)
    assert from_marian(marian()).config.position_encoding == "sinusoidal"


def test_converted_embeddings_are_tied_if_the_peers_were():
    assert from_fsmt(fsmt(tied=True)).config.tie_word_embeddings
    assert not from_fsmt(fsmt(tied=False)).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("build", "convert", "message"),
    [
        (lambda: marian(scale_embedding=False), from_marian, "scale_embedding must be true"),
        (lambda: marian(decoder_attention_heads=4), from_marian, "must be equal.* got 3 and 4"),
        (
            lambda: marian(share_encoder_decoder_embeddings=False, decoder_vocab_size=23),
            from_marian,
            "share one matrix",
        ),
        (lambda: fsmt(False, tgt_vocab_size=25), from_fsmt, "must be equal.* got 23 and 25"),
        (lambda: m2m100(tie_word_embeddings=False), from_m2m100, "share one matrix"),
        (lambda: m2m100(scale_embedding=False), from_m2m100, "scale_embedding must be true"),
        (
            lambda: torch.nn.Transformer(12, 3, 1, 1, 20),
            lambda module: from_torch(module, torch.zeros(9, 12)),
            "encoder.norm must be None if norm_first is False",
        ),
        (
            lambda: without_norms(norm_first=True),
            lambda module: from_torch(module, torch.zeros(9, 12)),
            "encoder.norm must be given if norm_first is True",
        ),
        (
            lambda: without_norms(activation=torch.tanh),
            lambda module: from_torch(module, torch.zeros(9, 12)),
            "activation must be ReLU or GELU",
        ),
        (
            # in torch, only the encoder's layers keep the module
            lambda: without_norms(activation=torch.nn.GELU()),
            lambda module: from_torch(module, torch.zeros(9, 12)),
            "activation must be the same in all layers of a model, got gelu, relu",
        ),
        (
            lambda: torch.nn.Transformer(
                12,
                3,
                1,
                1,
                norm_first=True,
                custom_decoder=torch.nn.TransformerDecoder(
                    torch.nn.TransformerDecoderLayer(12, 4, norm_first=True), 1
                ),
            ),
            lambda module: from_torch(module, torch.zeros(9, 12)),
            "nhead must be the same in all layers of a model, got 3, 4",
        ),
        (
            lambda: with_another_norm(without_norms()),
            lambda module: from_torch(module, torch.zeros(9, 12)),
            "layer_norm_eps must be the same in all layers of a model, got 1e-05, 0.1",
        ),
        (
            lambda: without_norms(bias=False),
            lambda module: from_torch(module, torch.zeros(9, 12)),
            "bias must be true",
        ),
        (
            lambda: torch.nn.Transformer(12, 3, 0, 1, 20, norm_first=True),
            lambda module: from_torch(module, torch.zeros(9, 12)),
            "encoder and decoder must have layers, got 0 and 1",
        ),
    ],
)
def test_an_unsupported_model_is_named(build, convert, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        convert(model)


class OtherMarian(MarianMTModel):
    """Subclass with another computation."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = 2 * outputs.logits
        return outputs


def test_a_peer_with_changed_code_is_refused(monkeypatch):
    def hooked():
        model = marian()
        model.model.encoder.layers[0].register_forward_hook(lambda *_: None)
        return model

    def registered():
        model = marian()
        AttentionInterface.register("mine", lambda *args, **kwargs: None)
        AttentionMaskInterface.register("mine", eager_mask)
        model.set_attn_implementation("mine")
        return model

    def layered():
        model = marian()
        model.model.decoder.layers[1].fc1 = torch.nn.Sequential(model.model.decoder.layers[1].fc1)
        return model

    def causal():
        model = marian()
        model.model.encoder.layers[0].self_attn.is_causal = True
        return model

    def rescaled():
        model = marian()
        model.model.decoder.layers[0].self_attn.scaling = 4.0
        return model

    def renormed():
        model = marian()
        model.model.shared.max_norm = 100.0
        return model

    for build, message in (
        (renormed, "model.shared has max_norm"),
        (rescaled, "model.decoder.layers.0.self_attn has the scaling 4.0"),
        (causal, "model.encoder.layers.0.self_attn has is_causal True"),
        (
            lambda: OtherMarian(marian().config),
            "OtherMarian is of the class .*test_library_models.OtherMarian",
        ),
        (hooked, "model.encoder.layers.0 has a forward hook"),
        (registered, "its attention function 'mine' is not that of transformers"),
        (layered, "model.decoder.layers.1.fc1 is of the class torch.*Sequential"),
    ):
        with pytest.raises(ValueError, match=f"with the code of transformers: .*{message}"):
            from_marian(build())
    model = marian()
    monkeypatch.setattr(type(model.model.encoder.layers[0]), "forward", lambda self, x, *_, **__: x)
    with pytest.raises(ValueError, match="MarianEncoderLayer was changed after"):
        from_marian(model)


def test_a_token_that_is_forbidden_hides_no_other_logits():
    model = marian()
    model.final_logits_bias[0, 7] = -1e9
    from_marian(model)
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_scale *= 0.5
    with pytest.raises(ValueError, match="but the logits differ by up to"):
        from_marian(model)


def test_stacks_with_changed_code_are_refused():
    class MyLayer(torch.nn.TransformerEncoderLayer):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    module = without_norms()
    module.encoder.layers[0] = MyLayer(12, 3, 20)
    with pytest.raises(ValueError, match=r"layers\.0 is of the class .*test_library.*\.MyLayer"):
        from_torch(module, torch.randn(23, 12))


def test_a_conversion_with_other_logits_is_refused(monkeypatch):
    before = check.batch_to_compare

    def moved(*args):
        batch = before(*args)
        batch.logits[1, 2, 3] += 1.0
        return batch

    monkeypatch.setattr(check, "batch_to_compare", moved)
    for convert, peer in ((from_marian, marian()), (from_fsmt, fsmt(tied=True))):
        with pytest.raises(ValueError, match="a conversion must compute what its source computes"):
            convert(peer)
    monkeypatch.setattr(check, "batch_to_compare", before)
    ours = from_torch(without_norms(), torch.randn(23, 12))
    with torch.no_grad():
        ours.model.decoder.layers[0].feed_forward.fc2.weight.mul_(-1)
    with pytest.raises(ValueError, match="but the states differ by up to"):
        check.check_decoder_states(without_norms(), ours)
