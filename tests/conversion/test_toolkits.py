"""Converted checkpoints of fairseq and OpenNMT-py: the same logits, tokens and translations.

`tests/peers` was made by `make_peer_checkpoints.py`, with fairseq's and OpenNMT-py's own code.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import types
from argparse import Namespace
from math import erf, exp, pi, sqrt, tanh
from pathlib import Path

import peer_models
import pytest
import torch
from peer_models import fsmt, m2m100, marian
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    FSMTTokenizer,
    MarianTokenizer,
    pipeline,
)

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.cli import main
from vanilla_transformer.conversion import from_fairseq, from_opennmt
from vanilla_transformer.conversion.fairseq import _read_dictionary, fairseq_with_tokenizer
from vanilla_transformer.conversion.toolkit_files import read_lines
from vanilla_transformer.loading import read_tokenizer

PEERS = Path(peer_models.__file__).parent / "peers"
CONVERT = {"fairseq": from_fairseq, "opennmt": from_opennmt}
NAMES = ("fairseq-post", "fairseq-pre", "opennmt", "opennmt-concat")
# settings of the library's search that equal those of the peers
NO_PAPER = {"length_penalty_alpha": None, "max_extra_tokens": None}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Output folder of the command for each peer's checkpoint."""
    folder = tmp_path_factory.mktemp("converted")
    for name in NAMES:
        kind = name.partition("-")[0]
        assert main(["convert", kind, str(PEERS / name / "model.pt"), str(folder / name)]) == 0
    return folder


def peer(name):
    return json.loads((PEERS / name / "expected.json").read_text(encoding="utf-8"))


def loaded(folder):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    assert isinstance(model, VanillaTransformerForConditionalGeneration)
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_equal_the_peers(name, converted):
    model, _ = loaded(converted / name)
    peer_models.assert_logits_equal(model, peer(name))


@pytest.mark.parametrize("name", ["fairseq-post", "fairseq-pre"])
@pytest.mark.parametrize(
    ("found", "search"),
    [
        ("greedy", {"num_beams": 1}),
        # fairseq divides by the length, and stops after as many finished hypotheses as beams
        ("beam5", {"num_beams": 5, "length_penalty": 1.0, "early_stopping": True}),
    ],
)
def test_fairseqs_texts_get_fairseqs_tokens_and_translations(name, found, search, converted):
    model, tokenizer = loaded(converted / name)
    assert isinstance(tokenizer, FSMTTokenizer)
    expected = peer(name)
    ids = tokenizer(expected["texts"])["input_ids"]
    assert ids == expected["text_ids"]
    search = {**search, **NO_PAPER, "max_new_tokens": 40}
    written = [model.generate(torch.tensor([row]), **search)[0, 1:].tolist() for row in ids]
    assert written == expected[found]
    assert len({len(row) for row in written}) > 1


def test_the_pipeline_gives_fairseqs_texts(converted):
    translate = pipeline("translation", model=str(converted / "fairseq-post"))
    expected = peer("fairseq-post")
    search = {"num_beams": 5, "early_stopping": True, "max_new_tokens": 40, **NO_PAPER}
    found = translate(expected["texts"], **search)
    assert [one["translation_text"] for one in found] == expected["beam5_texts"]


@pytest.mark.parametrize("name", ["opennmt", "opennmt-concat"])
def test_the_command_gives_opennmts_translations(name, converted, tmp_path, capsys):
    expected = peer(name)
    (tmp_path / "lines").write_text("".join(f"{text}\n" for text in expected["texts"]))
    words = ["translate", str(converted / name), str(tmp_path / "lines"), "--num_beams", "1"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == expected["greedy_texts"]


def test_a_converted_checkpoint_searches_as_the_paper_does(converted):
    for name in NAMES:
        config = loaded(converted / name)[0].generation_config
        settings = config.num_beams, config.length_penalty_alpha, config.max_extra_tokens
        assert settings == (4, 0.6, 50)


def test_padding_is_never_generated_as_in_fairseq(converted):
    model, tokenizer = loaded(converted / "fairseq-post")
    ids = tokenizer(peer("fairseq-post")["texts"][0], return_tensors="pt")["input_ids"]
    raised = {"sequence_bias": {(1,): 99.0}, "max_new_tokens": 3}
    assert 1 not in model.generate(ids, **raised)[0]
    assert 1 in model.generate(ids, **raised, bad_words_ids=[[0]])[0]


def test_moses_uses_the_given_languages(converted, tmp_path):
    checkpoint = str(PEERS / "fairseq-post" / "model.pt")
    languages = ["--source_lang", "fr", "--target_lang", "it"]
    assert main(["convert", "fairseq", checkpoint, str(tmp_path / "out"), *languages]) == 0
    given, own = (loaded(path)[1] for path in (tmp_path / "out", converted / "fairseq-post"))
    assert (given.src_lang, given.tgt_lang) == ("fr", "it")
    assert (own.src_lang, own.tgt_lang) == ("en", "de")
    assert given.tokenize("l'amour") != own.tokenize("l'amour")


def test_without_codes_tokens_are_read_and_written(tmp_path, capsys):
    source = PEERS / "fairseq-post"
    for name in ("model.pt", "dict.en.txt", "dict.de.txt"):
        shutil.copy(source / name, tmp_path)
    words = ["convert", "fairseq", str(tmp_path / "model.pt"), str(tmp_path / "out")]
    assert main(words) == 0
    assert "but no BPE codes (bpecodes or code)" in capsys.readouterr().out
    _, tokenizer = loaded(tmp_path / "out")
    assert tokenizer("The mole L@@ xyz")["input_ids"] == [
        tokenizer.convert_tokens_to_ids(token) for token in ("The", "mole", "L@@", "<unk>", "</s>")
    ]
    assert tokenizer.decode(tokenizer("C@@ at mole")["input_ids"][:-1]) == "C@@ at mole"


def test_without_a_dictionary_there_is_no_tokenizer(tmp_path, capsys):
    shutil.copy(PEERS / "fairseq-post" / "model.pt", tmp_path)
    words = ["convert", "fairseq", str(tmp_path / "model.pt"), str(tmp_path / "out")]
    assert main(words) == 0
    assert "No tokenizer" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


@pytest.mark.parametrize(
    ("line", "token"),
    [("wort 1", "wort"), ("<unk> 1 #fairseq:overwrite", "<unk>"), ("a b 1\r", "a b")],
)
def test_a_dictionary_is_read_as_fairseq_reads_it(line, token, tmp_path):
    (tmp_path / "dict.en.txt").write_text(f"x 2\n{line}\n", newline="")
    assert _read_dictionary(tmp_path / "dict.en.txt")[4:] == ["x", token]


@pytest.mark.parametrize("line", ["wort\t1", "wort", "wort one", "1", ""])
def test_a_line_of_a_dictionary_without_a_count_is_refused(line, tmp_path):
    (tmp_path / "dict.en.txt").write_text(f"x 2\n{line}\n")
    with pytest.raises(ValueError, match=r"dict\.en\.txt line 2 must be a token, a space and its"):
        _read_dictionary(tmp_path / "dict.en.txt")


def grouped(checkpoint):
    """Put the settings of each stack into a group of its own, as fairseq 0.12 may do."""
    settings = vars(checkpoint["cfg"]["model"])
    for stack in ("encoder", "decoder"):
        names = [name for name in settings if name.startswith(f"{stack}_")]
        settings[stack] = {name.removeprefix(f"{stack}_"): settings.pop(name) for name in names}


def prefixed(checkpoint):
    """Name the weights as DistributedDataParallel does."""
    checkpoint["model"] = {f"module.{name}": tensor for name, tensor in checkpoint["model"].items()}


def old(checkpoint):
    """Name the weights as the first versions of fairseq do."""
    weights = checkpoint["model"]
    for name in list(weights):
        tensor = weights.pop(name)
        norms = ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"]
        if name.startswith("encoder."):
            del norms[1]
        for number, norm in enumerate(norms):
            name = name.replace(f".{norm}.", f".layer_norms.{number}.")
        name = name.replace("decoder.output_projection.weight", "decoder.embed_out")
        weights[name] = tensor
    for stack in ("encoder", "decoder"):
        weights[f"{stack}.embed_positions.weights"] = torch.zeros(9, 8)
    assert {"encoder.layers.0.layer_norms.1.weight", "decoder.embed_out"} <= weights.keys()


@pytest.mark.parametrize("change", [grouped, prefixed, old])
def test_other_forms_of_a_checkpoint_of_fairseq_are_read(change, tmp_path):
    checkpoint = checkpoint_of("fairseq-pre")
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "model.pt")
    expected, model = map(from_fairseq, (PEERS / "fairseq-pre" / "model.pt", tmp_path / "model.pt"))
    assert model.config.to_dict() == expected.config.to_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("name", ["fairseq-post", "opennmt", "joeynmt-pieces"])
def test_the_command_reads_a_checkpoint_once(name, tmp_path, monkeypatch):
    read_files = []

    def load(path, **settings):
        read_files.append(Path(path).name)
        return load_of_torch(path, **settings)

    load_of_torch = torch.load
    monkeypatch.setattr(torch, "load", load)
    file = "best.ckpt" if name.startswith("joeynmt") else "model.pt"
    kind = name.partition("-")[0]
    assert main(["convert", kind, str(PEERS / name / file), str(tmp_path / "out")]) == 0
    assert read_files == [file]


def test_two_dictionaries_are_refused(tmp_path):
    for path in (PEERS / "fairseq-post").iterdir():
        shutil.copy(path, tmp_path)
    with (tmp_path / "dict.de.txt").open("a") as dictionary:
        dictionary.write("wort 1\n")
    with pytest.raises(ValueError, match=r"different ones in dict\.de\.txt, dict\.en\.txt"):
        fairseq_with_tokenizer(tmp_path / "model.pt")


def checkpoint_of(name):
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(PEERS / name / "model.pt", weights_only=True)


def setting(**settings):
    def change(checkpoint):
        options = checkpoint.get("opt") or checkpoint["cfg"]["model"]
        vars(options).update(settings)

    return change


def entry(name, value):
    def change(checkpoint):
        checkpoint["model"][name] = value

    return change


def weight(name, *shape):
    return entry(name, torch.zeros(*shape))


def without(name):
    def change(checkpoint):
        del checkpoint["model"][name]

    return change


def other_vocabulary(checkpoint):
    checkpoint["vocab"]["tgt"] = [*checkpoint["vocab"]["tgt"], "another"]


def parts(**others):
    return lambda checkpoint: checkpoint.update(others)


def without_heads(checkpoint):
    del checkpoint["opt"].heads


def vocabulary(change):
    def apply(checkpoint):
        both = checkpoint["vocab"]
        both["src"] = both["tgt"] = change(both["tgt"])

    return apply


LAYER = "decoder.layers.0"
OPENNMT_LAYER = "decoder.transformer_layers.0"
FOREIGN = [
    # fairseq's architectures
    ("fairseq-post", setting(layernorm_embedding=True), "layernorm_embedding must be off"),
    ("fairseq-post", setting(no_scale_embedding=True), r"not multiplied by sqrt\(d_model\)"),
    ("fairseq-post", setting(adaptive_softmax_cutoff=[9]), "that is an adaptive softmax, outside"),
    ("fairseq-post", setting(cross_self_attention=True), "source and target at once"),
    ("fairseq-post", setting(activation_fn="tanh"), "activation_fn must be one of relu"),
    ("fairseq-post", setting(decoder_attention_heads=4), "must be equal, got 2 and 4"),
    ("fairseq-post", setting(decoder_normalize_before=True), "must be equal, got False and True"),
    (
        "fairseq-post",
        weight("decoder.embed_tokens.weight", 70, 16),
        r"\(--joined-dictionary\), got separate vocabularies of 64 and 70",
    ),
    (
        "fairseq-post",
        weight("decoder.embed_tokens.weight", 64, 24),
        "encoder_embed_dim and decoder_embed_dim must be equal, got 16 and 24",
    ),
    (
        "fairseq-post",
        weight("decoder.output_projection.bias", 64),
        r"a parameter in the model, got model\.decoder\.output_projection\.bias",
    ),
    (
        "fairseq-post",
        weight("encoder.embed_tokens.lora_A", 4, 64),
        "embed_tokens.lora_A, which belongs to LoRA",
    ),
    (
        "fairseq-post",
        entry(f"{LAYER}.fc1.bias", 3),
        "must hold a tensor for decoder.layers.0.fc1.bias, got a int",
    ),
    (
        "fairseq-post",
        weight(f"{LAYER}.adapter.fc.weight", 3, 3),
        "adapter.fc.weight, which belongs to adapters",
    ),
    (
        "fairseq-post",
        weight("encoder.layernorm_embedding.weight", 16),
        r"belongs to a norm of the embeddings \(BART",
    ),
    (
        "fairseq-post",
        weight("encoder.embed_positions.weight", 9, 16),
        "belongs to learned positions",
    ),
    (
        "fairseq-post",
        weight(f"{LAYER}.self_attn.rotary_emb.inv_freq", 4),
        r"belongs to rotary positions \(RoPE\)",
    ),
    ("fairseq-post", weight(f"{LAYER}.fc2.bias", 3), r"of shape \[16\], got \[3\] in arch trans"),
    ("fairseq-post", without(f"{LAYER}.fc1.bias"), "must be complete, but model.decoder"),
    ("fairseq-post", without("encoder.embed_tokens.weight"), "an encoder and a decoder"),
    ("fairseq-post", without("encoder.layers.0.fc1.weight"), "complete, but encoder.layers.0.fc1"),
    ("fairseq-pre", without("decoder.embed_positions.weight"), "complete, but decoder.embed_pos"),
    ("fairseq-post", parts(cfg=None), "with args or cfg, got neither"),
    ("fairseq-post", parts(cfg={"model": "a text"}), "with args or cfg, got neither"),
    (
        "fairseq-post",
        setting(encoder_attention_heads=None, decoder_attention_heads=None),
        "the settings of fairseq's transformer must be complete, but encoder_att",
    ),
    # OpenNMT-py's architectures
    ("opennmt", parts(opt=None), "must be OpenNMT-py's"),
    ("opennmt", parts(vocab="a text"), "must be OpenNMT-py's"),
    ("opennmt", parts(generator="a text"), "must be OpenNMT-py's"),
    ("opennmt", parts(generator={}), "the generator .* must be complete, but weight"),
    ("opennmt", without("encoder.layer_norm.weight"), "complete, but encoder.layer_norm.weight"),
    (
        "opennmt",
        weight("encoder.embeddings.make_embedding.emb_luts.1.weight", 9, 16),
        "a parameter in the model, got model.encoder.embeddings.make_embedding.emb_luts.1.weight",
    ),
    ("opennmt", vocabulary(" ".join), "lists of plain tokens.* got str and str"),
    ("opennmt", vocabulary(lambda tokens: tokens[:-1]), "vocab_size|of shape"),
    (
        "opennmt",
        vocabulary(lambda tokens: [token.replace("<blank>", "<p>") for token in tokens]),
        "the special token <blank>, got none",
    ),
    ("opennmt", without_heads, "must be complete, but heads"),
    (
        "opennmt",
        without("encoder.embeddings.make_embedding.emb_luts.0.weight"),
        "complete, but encoder.embeddings",
    ),
    ("opennmt", setting(decoder_type="rnn"), "decoder_type must be transformer"),
    ("opennmt", setting(max_relative_positions=-1), r"got -1: that is rotary positions \(RoPE\)"),
    ("opennmt", setting(max_relative_positions=-2), r"\(ALiBi\), outside"),
    ("opennmt", setting(max_relative_positions=20), "got 20: that is relative positions"),
    ("opennmt", setting(pos_ffn_activation_fn="silu"), r"got silu: .*\(SwiGLU\)"),
    ("opennmt", setting(layer_norm="rms"), "got rms: that is RMSNorm"),
    ("opennmt", setting(num_experts=8), "got 8: that is a mixture of experts"),
    ("opennmt", setting(position_encoding_type="Other"), "SinusoidalConcat, got Other"),
    ("opennmt", without(f"{OPENNMT_LAYER}.feed_forward.w_1.weight"), "complete, but decoder.tran"),
    ("opennmt", setting(copy_attn=True), "that is a copy mechanism"),
    ("opennmt", setting(generator_function="sparsemax"), "got sparsemax: that is other prob"),
    ("opennmt", other_vocabulary, r"\(-share_vocab\), got separate vocabularies of 64 and 65"),
    ("opennmt", weight(f"{OPENNMT_LAYER}.feed_forward.w_3.weight", 24, 16), "SwiGLU"),
    (
        "opennmt",
        weight(f"{OPENNMT_LAYER}.odd.weight", 2),
        r"a parameter in the model, got model\.decoder",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), FOREIGN)
def test_another_architecture_is_named(name, change, message, tmp_path):
    checkpoint = checkpoint_of(name)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=message):
        CONVERT[name.partition("-")[0]](tmp_path / "model.pt")


def test_the_kinds_are_not_confused(tmp_path):
    with pytest.raises(ValueError, match=r"must be OpenNMT-py's.* got args, cfg"):
        from_opennmt(PEERS / "fairseq-post" / "model.pt")
    with pytest.raises(ValueError, match="must be fairseq's, with args or cfg, got neither"):
        from_fairseq(PEERS / "opennmt" / "model.pt")


class Code:
    """Code that a checkpoint must not run."""

    def __reduce__(self):
        return (os.mkdir, ("made",))


def test_a_checkpoint_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({**checkpoint_of("fairseq-post"), "extra_state": Code()}, "model.pt")
    with pytest.raises(ValueError, match=r"which runs no code, got one that needs .*mkdir"):
        from_fairseq("model.pt")
    assert not Path("made").exists()
    Path("model.pt").write_text("a text")
    with pytest.raises(ValueError, match="got a file that torch cannot read"):
        from_fairseq("model.pt")


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("gelu", lambda x: x * (1 + erf(x / sqrt(2))) / 2),
        ("gelu_accurate", lambda x: x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2),
        ("swish", lambda x: x / (1 + exp(-x))),
    ],
)
def test_the_activations_are_fairseqs(name, formula, tmp_path):
    checkpoint = checkpoint_of("fairseq-post")
    setting(activation_fn=name)(checkpoint)
    torch.save(checkpoint, tmp_path / "model.pt")
    activation = from_fairseq(tmp_path / "model.pt").get_encoder().layers[0].feed_forward.activation
    points = [-3.0, -0.7, 0.0, 0.4, 2.0]
    expected = torch.tensor([formula(x) for x in points])
    # the formulas differ by more than this tolerance
    torch.testing.assert_close(activation(torch.tensor(points)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fairseq-post", "opennmt"])
def test_a_checkpoint_that_is_cut_off_or_none_is_named(name, tmp_path):
    path = tmp_path / "model.pt"
    convert = CONVERT[name.partition("-")[0]]
    # torch's zip format, and its older format
    for is_zip in (True, False):
        torch.save(checkpoint_of(name), path, _use_new_zipfile_serialization=is_zip)
        convert(path)
        whole = path.read_bytes()
        for size in (0, 100, *range(4000, 4040, 3), len(whole) // 2, len(whole) - 500):
            path.write_bytes(whole[:size])
            message = f"{path} must be a checkpoint.*torch cannot read"
            with pytest.raises(ValueError, match=message):
                convert(path)
    with pytest.raises(ValueError, match="a checkpoint must be a file, got a folder"):
        convert(tmp_path)
    with pytest.raises(ValueError, match="a checkpoint must be a file, got no such file"):
        convert(tmp_path / "nowhere")
    torch.save({"model_state": {}, "steps": 5}, path)
    with pytest.raises(ValueError, match="with the entry 'model', got model_state, steps"):
        convert(path)


def test_a_checkpoint_of_opennmt_py_2_is_refused_with_the_program_that_converts_it(tmp_path):
    # it pickles its vocabulary as classes
    module = types.ModuleType("onmt.inputters")
    module.Field = type("Field", (), {"__module__": "onmt.inputters"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "onmt", types.ModuleType("onmt"))
        patch.setitem(sys.modules, "onmt.inputters", module)
        torch.save({"model": {}, "vocab": {"src": module.Field()}}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"needs onmt\.inputters\.Field\. .*convertv2_v3\.py"):
        from_opennmt(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bpecodes", "#version: 0.2\nt h\ngarbage\n", "bpecodes line 3 must be two symbols"),
        ("dict.en.txt", "the 3\na 2\n", r"dict\.\w\w\.txt must have 60 tokens.* got 2"),
        ("dict.en.txt", b"\xff\xd3 3\n", r"dict\.en\.txt must be UTF-8"),
    ],
)
def test_files_that_do_not_belong_to_a_checkpoint_are_named(name, content, message, tmp_path):
    for path in (PEERS / "fairseq-post").iterdir():
        shutil.copy(path, tmp_path)
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        (tmp_path / name).write_text(content)
    if name == "dict.en.txt":
        shutil.copy(tmp_path / name, tmp_path / "dict.de.txt")
    with pytest.raises(ValueError, match=message.replace("en", "(en|de)")):
        fairseq_with_tokenizer(tmp_path / "model.pt")


def test_other_spaces_and_ends_of_lines_are_symbols(tmp_path):
    path = tmp_path / "dict.en.txt"
    path.write_text("\u2028 3\n\x85a 2\n\u00a0 1\n", encoding="utf-8")
    assert read_lines(path) == ["\u2028 3", "\x85a 2", "\u00a0 1"]
    for source in (PEERS / "fairseq-post").iterdir():
        shutil.copy(source, tmp_path)
    codes = tmp_path / "bpecodes"
    codes.write_text(codes.read_text() + "\u3000 \u00a0\n", encoding="utf-8")
    _, with_more, _ = fairseq_with_tokenizer(tmp_path / "model.pt")
    _, tokenizer, _ = fairseq_with_tokenizer(PEERS / "fairseq-post" / "model.pt")
    texts = peer("fairseq-post")["texts"]
    assert with_more(texts).input_ids == tokenizer(texts).input_ids


def test_settings_of_a_task_may_be_of_either_kind(tmp_path):
    checkpoint = checkpoint_of("fairseq-post")
    checkpoint["cfg"]["task"] = Namespace(**checkpoint["cfg"]["task"])
    torch.save(checkpoint, tmp_path / "model.pt")
    ours, theirs = (
        from_fairseq(path) for path in (tmp_path / "model.pt", PEERS / "fairseq-post" / "model.pt")
    )
    assert ours.config.to_dict() == theirs.config.to_dict()


def test_a_folder_that_is_not_there_is_not_asked_of_the_hub(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name in ("runs/nowhere", "./nowhere", str(tmp_path / "nowhere")):
        assert main(["convert", "marian", name, "out"]) == 1
        assert f"got '{name}': no such folder." in capsys.readouterr().err
        assert main(["export", "onnx", name, "out"]) == 1
        assert f"got '{name}': no such folder." in capsys.readouterr().err


def test_weights_that_are_cut_off_are_named(tmp_path, capsys):
    marian().save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    weights, whole = load_file(path), path.read_bytes()
    path.write_bytes(whole[:-9])
    words = ["convert", "marian", str(tmp_path / "theirs"), str(tmp_path / "out")]
    message = f"{tmp_path / 'theirs'} must have complete weight files"
    assert main(words) == 1
    assert message in capsys.readouterr().err
    # files of a published OPUS-MT model
    path.unlink()
    path = path.with_name("pytorch_model.bin")
    torch.save(weights, path)
    whole = path.read_bytes()
    # the third part ends inside the archive's list of files
    for part in (b"", whole[:100], whole[:5000], whole[:-300]):
        path.write_bytes(part)
        assert main(words) == 1
        assert message in capsys.readouterr().err
    path.write_bytes(whole)
    # the library would ignore the file, and search with its defaults
    search = tmp_path / "theirs" / "generation_config.json"
    whole = search.read_text()
    for part in (whole[:40], "[]"):
        search.write_text(part)
        assert main(words) == 1
        assert "must have a generation_config.json of search settings" in capsys.readouterr().err
    search.write_text(whole)
    assert main(words) == 0


def test_marian_keeps_its_tokenizer(tmp_path, capsys):
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = ["the small cat sleeps", "dogs", "the cat and the small dog", "a house"]
    (tmp_path / "texts").write_text("\n".join(texts * 3))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts"),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(str(tmp_path / "spm.model"))
    pieces = [spm.id_to_piece(index) for index in range(3, spm.get_piece_size())]
    ids = {token: index for index, token in enumerate(["</s>", "<unk>", *pieces, "<pad>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    own = MarianTokenizer(
        str(tmp_path / "spm.model"), str(tmp_path / "spm.model"), str(tmp_path / "vocab.json")
    )
    pad = len(ids) - 1
    theirs = marian(
        vocab_size=len(ids), pad_token_id=pad, decoder_start_token_id=pad, eos_token_id=0
    )
    theirs.generation_config.bad_words_ids = [[pad]]
    theirs.save_pretrained(tmp_path / "theirs")
    own.save_pretrained(tmp_path / "theirs")
    words = ["convert", "marian", str(tmp_path / "theirs"), str(tmp_path / "out")]
    assert main(words) == 0
    inputs = own(texts, padding=True, return_tensors="pt")
    search = {"num_beams": 4, "max_new_tokens": 12}
    expected = own.batch_decode(theirs.generate(**inputs, **search), skip_special_tokens=True)
    translate = pipeline("translation", model=str(tmp_path / "out"))
    found = translate(texts, **search, **NO_PAPER)
    assert [one["translation_text"] for one in found] == expected
    assert len(set(expected)) > 1
    # converted on one machine and used on another
    program = (
        "import sys\n"
        "sys.modules['sentencepiece'] = None\n"
        "from vanilla_transformer.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", program, "translate", str(tmp_path / "out")]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    message = (
        f"tokenizer '{tmp_path / 'out'}' needs sentencepiece, which is not installed: pip install"
    )
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
    # like an incomplete download
    (tmp_path / "theirs/source.spm").unlink()
    assert main(["convert", "marian", str(tmp_path / "theirs"), str(tmp_path / "half")]) == 1
    message = f"tokenizer '{tmp_path / 'theirs'}' cannot be loaded: it has no source.spm.\n"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "half").exists()


def test_fsmt_keeps_its_tokenizer(tmp_path):
    _, own, _ = fairseq_with_tokenizer(PEERS / "fairseq-post" / "model.pt")
    theirs = fsmt(tied=True, src_vocab_size=len(own), tgt_vocab_size=len(own))
    # the file has every tied matrix, like those of WMT19
    for module in (theirs.model.encoder.embed_tokens, theirs.model.decoder.output_projection):
        module.weight = torch.nn.Parameter(module.weight.detach().clone())
    theirs.save_pretrained(tmp_path / "theirs")
    own.eos_token = None
    own.save_pretrained(tmp_path / "theirs")
    words = ["convert", "fsmt", str(tmp_path / "theirs"), str(tmp_path / "out")]
    assert main(words) == 0
    texts = peer("fairseq-post")["texts"]
    search = {"num_beams": 3, "max_new_tokens": 9, "suppress_tokens": [0, 1]}
    translate = pipeline("translation", model=str(tmp_path / "out"))
    found = translate(texts, **search, **NO_PAPER)
    for text, one in zip(texts, found, strict=True):
        inputs = own(text, return_tensors="pt")
        ids = theirs.generate(inputs["input_ids"], **search)[0]
        assert one["translation_text"] == own.decode(ids, skip_special_tokens=True)
    (tmp_path / "theirs" / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"cannot be loaded: it has no merges\.txt\.$"):
        read_tokenizer(tmp_path / "theirs")


@pytest.mark.parametrize(("kind", "build"), [("marian", marian), ("m2m_100", m2m100)])
def test_a_model_without_tokenizer_is_converted_alone(kind, build, tmp_path, capsys):
    build().save_pretrained(tmp_path / "theirs")
    words = ["convert", kind, str(tmp_path / "theirs"), str(tmp_path / "out")]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "No tokenizer" in output
    assert "replaces" not in output
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_search_settings_that_convert_replaces_are_printed(tmp_path, capsys):
    theirs = marian()
    theirs.generation_config.update(max_length=30, num_beams=6, suppress_tokens=[9])
    theirs.save_pretrained(tmp_path / "theirs")
    assert main(["convert", "marian", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "The paper's search replaces max_length=30, num_beams=6."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "must be a model of transformers' marian, got .*theirs has no config.json"),
        ("{}", "must be of the kind marian, got .*, whose config.json names no model_type"),
        ("[]", "config.json must be a mapping"),
    ],
)
def test_a_library_model_needs_a_configuration(content, message, tmp_path, capsys):
    folder = tmp_path / "theirs"
    marian().save_pretrained(folder)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content, encoding="utf-8")
    assert main(["convert", "marian", str(folder), str(tmp_path / "out")]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_a_library_model_of_another_kind_or_with_other_weights_is_named(tmp_path, capsys):
    folder = tmp_path / "theirs"
    marian().save_pretrained(folder)
    assert main(["convert", "fsmt", str(folder), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "SOURCE must be of the kind fsmt, got one of marian" in error
    assert "Use the kind marian." in error
    config = BartConfig(d_model=16, encoder_attention_heads=2, decoder_attention_heads=2)
    config.save_pretrained(tmp_path / "bart")
    assert main(["convert", "marian", str(tmp_path / "bart"), str(tmp_path / "out")]) == 1
    assert "`translate` and `load` take encoder-decoders" in capsys.readouterr().err
    path = folder / "model.safetensors"
    weights = load_file(path)
    more = {**weights, "model.encoder.layernorm_embedding.weight": torch.zeros(48)}
    save_file(more, path, metadata={"format": "pt"})
    assert main(["convert", "marian", str(folder), str(tmp_path / "out")]) == 1
    assert "belongs to a norm of the embeddings (BART and mBART)" in capsys.readouterr().err
    name = "model.encoder.layers.0.fc1.bias"
    save_file({**weights, name: weights[name][1:]}, path, metadata={"format": "pt"})
    assert main(["convert", "marian", str(folder), str(tmp_path / "out")]) == 1
    assert f"error: {name} must be of shape" in capsys.readouterr().err
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    assert main(["convert", "marian", str(folder), str(tmp_path / "out")]) == 1
    assert "must be complete, but model.encoder.layers.0.fc1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
