"""Converted checkpoints of JoeyNMT: the same logits, tokens and translations.

`tests/peers/joeynmt-*` was made by `make_peer_checkpoints.py`, with JoeyNMT's own code.
"""

import json
import os
import re
import shutil
import unicodedata
from pathlib import Path

import peer_models
import pytest
import torch
import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from vanilla_transformer.cli import main
from vanilla_transformer.conversion import from_fairseq, from_joeynmt
from vanilla_transformer.conversion.joeynmt import joeynmt_with_tokenizer

PEERS = Path(peer_models.__file__).parent / "peers"
NAMES = ("joeynmt-pieces", "joeynmt-words", "joeynmt-characters", "joeynmt-codes")
# settings of the library's search that equal those of JoeyNMT
SEARCHES = {
    "greedy_texts": {"num_beams": 1, "length_penalty_alpha": None, "max_extra_tokens": None},
    "beam5_texts": {"num_beams": 5, "length_penalty_alpha": 1.0, "max_extra_tokens": None},
}


def expected(name):
    return json.loads((PEERS / name / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Output folder of the command for each peer's model folder."""
    folder = tmp_path_factory.mktemp("converted")
    for name in NAMES:
        assert main(["convert", "joeynmt", str(PEERS / name), str(folder / name)]) == 0
    return folder


@pytest.fixture
def peer(tmp_path):
    """Return a function that copies a model folder, and changes its configuration."""

    def copy(name, change=None):
        folder = tmp_path / name
        if not folder.exists():
            shutil.copytree(PEERS / name, folder)
        if change is not None:
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            # `safe_load` returns one object for an anchor and its aliases
            config = json.loads(json.dumps(config))
            change(config)
            (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return folder

    return copy


def joeynmt_tokenizer(folder):
    return joeynmt_with_tokenizer(folder)[1:]


def change_weights(folder, change):
    checkpoint = torch.load(folder / "best.ckpt", weights_only=True)
    change(checkpoint["model_state"])
    torch.save(checkpoint, folder / "best.ckpt")


def loaded(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(
        folder
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_equal_joeynmts(name, converted):
    model, _ = loaded(converted / name)
    peer_models.assert_logits_equal(model, expected(name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("search", SEARCHES)
def test_texts_get_joeynmts_tokens_and_translations(name, search, converted):
    model, tokenizer = loaded(converted / name)
    results = expected(name)
    texts = results["texts"]
    if name == "joeynmt-codes":
        # pieces of subword-nmt
        rows = results["text_ids"]
        texts = [" ".join(tokenizer.convert_ids_to_tokens(row[:-1])) for row in rows]
    assert tokenizer(texts)["input_ids"] == results["text_ids"]
    translate = pipeline("translation", model=model, tokenizer=tokenizer)
    found = translate(texts, max_new_tokens=60, **SEARCHES[search])
    assert [one["translation_text"] for one in found] == results[search]
    assert len(set(results[search])) > 4


def test_the_four_models_cover_the_architectures_of_joeynmt(converted):
    configs = {name: loaded(converted / name)[0].config for name in NAMES}
    assert {config.norm_first for config in configs.values()} == {False, True}
    assert {config.tie_word_embeddings for config in configs.values()} == {False, True}
    activations = {config.activation_function for config in configs.values()}
    assert activations == {"relu", "gelu", "silu"}
    scales = {
        yaml.safe_load((PEERS / name / "config.yaml").read_text())["model"]["encoder"][
            "embeddings"
        ]["scale"]
        for name in NAMES
    }
    assert scales == {False, True}


def test_the_command_says_what_it_has_done(peer, tmp_path, capsys):
    folder = peer("joeynmt-codes", lambda config: config["testing"].update(repetition_penalty=-1))
    assert main(["convert", "joeynmt", str(folder / "best.ckpt"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "The tokenizer reads tokens separated by spaces. First prepare a text as JoeyNMT does: "
        f"`subword-nmt apply-bpe --codes {folder}/bpecodes --separator @@ --vocabulary "
        f"<(sed 's/$/ 1/' {folder}/src_vocab.txt)`.",
        "The paper's search replaces beam_size=5, beam_alpha=1.0, max_output_length=60.",
    ]


def test_a_folder_is_its_best_checkpoint(peer):
    folder = peer("joeynmt-words")
    best = from_joeynmt(folder).state_dict()
    shutil.copy(folder / "best.ckpt", folder / "600.ckpt")
    change_weights(folder, lambda weights: weights["src_embed.lut.weight"].zero_())
    other = from_joeynmt(folder).state_dict()
    assert not other["model.encoder.embed_tokens.weight"].any()
    (folder / "best.ckpt").rename(folder / "300.ckpt")
    with pytest.raises(ValueError, match=r"a folder with best\.ckpt, got .* has 300\.ckpt, 600\."):
        from_joeynmt(folder)
    (folder / "latest.ckpt").symlink_to("600.ckpt")
    found = from_joeynmt(folder).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in best.items())
    (folder / "latest.ckpt").unlink()
    (folder / "300.ckpt").unlink()
    found = from_joeynmt(folder).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in best.items())
    (folder / "600.ckpt").unlink()
    with pytest.raises(ValueError, match=r"which has no checkpoint \(\.ckpt\)\.$"):
        from_joeynmt(folder)


def setting(stack, **settings):
    return lambda config: config["model"][stack].update(settings)


def both(**settings):
    def change(config):
        for stack in ("encoder", "decoder"):
            config["model"][stack].update(settings)

    return change


def text(**settings):
    def change(config):
        for side in ("src", "trg"):
            config["data"][side].update(settings)

    return change


# settings of a text that is neither lowercased nor normalized
PLAIN = {"lowercase": False, "normalize": False}


def without_norm(config):
    del config["model"]["encoder"]["layer_norm"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("joeynmt-words", setting("encoder", alpha=0.5), r"model\.encoder\.alpha must be 1, got 0"),
        ("joeynmt-words", setting("decoder", alpha=2), "a weight of the residual connections"),
        ("joeynmt-words", setting("encoder", type="recurrent"), "that is a recurrent network"),
        ("joeynmt-words", setting("encoder", layer_norm="pre"), "layer_norm of encoder and decod"),
        ("joeynmt-words", both(layer_norm="pre"), "complete, but model.decoder.norm.bias is miss"),
        ("joeynmt-pieces", both(layer_norm="post"), r"must all have a parameter .* got model\.dec"),
        (
            "joeynmt-words",
            both(layer_norm="rms"),
            r"layer_norm must be one of pre, post, got 'rms'",
        ),
        ("joeynmt-words", without_norm, "a pre-norm encoder without a final norm, outside"),
        ("joeynmt-words", setting("decoder", num_heads=4), "must be equal, got 2 and 4"),
        (
            "joeynmt-words",
            setting("encoder", activation="gelu"),
            "must be equal, got gelu and relu",
        ),
        ("joeynmt-words", both(activation="tanh"), "activation must be one of relu, gelu, swish"),
        (
            "joeynmt-words",
            both(num_heads="2"),
            r"config\.yaml: model\.\w+\.num_heads must be an",
        ),
        ("joeynmt-words", text(has_prompt=True), r"data\.src\.has_prompt must be false, got true"),
        ("joeynmt-words", lambda config: config.pop("model"), r"config\.yaml must have model, got"),
        ("joeynmt-words", lambda config: config["data"].pop("trg"), r"data must have trg, got"),
    ],
)
def test_another_architecture_is_named(name, change, message, peer):
    with pytest.raises(ValueError, match=message):
        from_joeynmt(peer(name, change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.update({"trg_embed.lut.weight": torch.zeros(80, 16)}),
            r"one vocabulary \(the same voc_file for src and trg\), got separate vocabularies of "
            "77 and 80 tokens",
        ),
        (
            lambda weights: weights.update({"encoder.rnn.weight_ih_l0": torch.zeros(4, 4)}),
            "encoder.rnn.weight_ih_l0, which belongs to a recurrent network",
        ),
        (lambda weights: weights.pop("src_embed.lut.weight"), "complete, but src_embed.lut.weight"),
        (
            lambda weights: weights.pop("encoder.layers.0.feed_forward.pwff_layer.0.weight"),
            "complete, but encoder.layers.0.feed_forward",
        ),
        (
            lambda weights: weights.pop("decoder.layers.1.dec_layer_norm.bias"),
            "complete, but model",
        ),
    ],
)
def test_other_weights_are_named(change, message, peer):
    folder = peer("joeynmt-words")
    change_weights(folder, change)
    with pytest.raises(ValueError, match=message):
        from_joeynmt(folder)


def test_joeynmt_1_is_pre_norm_and_reads_tokens(peer):
    def old(config):
        for stack in ("encoder", "decoder"):
            del config["model"][stack]["layer_norm"]
        config["data"] = {"src": "en", "trg": "de", "level": "bpe", "lowercase": True}

    folder = peer("joeynmt-pieces")
    expected_model = from_joeynmt(folder)
    model = from_joeynmt(peer("joeynmt-pieces", old))
    assert model.config.to_dict() == expected_model.config.to_dict()
    assert model.config.norm_first
    tokenizer, sentence = joeynmt_tokenizer(folder)
    assert sentence == (
        "The tokenizer reads tokens separated by spaces. First prepare a text as JoeyNMT does: the "
        "program that split your training text."
    )
    assert tokenizer("\u2581 E a\u00a0N")["input_ids"] == [
        *tokenizer.convert_tokens_to_ids(["\u2581", "e", "a", "n"]),
        3,
    ]
    peer("joeynmt-pieces", lambda config: config["data"].update(bpe_type="sentencepiece"))
    tokenizer, _ = joeynmt_tokenizer(folder)
    ids = tokenizer("\u2581 e a \u2581 n")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ea n"


def test_special_tokens_may_have_other_names_and_some_are_never_generated(peer):
    def rename(config):
        names = {"unk_token": "[U]", "pad_token": "[P]", "bos_token": "[B]", "eos_token": "[E]"}
        config["data"]["special_symbols"] = {
            **names,
            "sep_token": "[S]",
            "sep_id": 4,
            "lang_tags": ["[x]", "[y]"],
        }
        config["testing"]["generate_unk"] = False

    folder = peer("joeynmt-words", rename)
    for side in ("src", "trg"):
        path = folder / f"{side}_vocab.txt"
        # three of the words become the other special tokens
        words = path.read_text(encoding="utf-8").splitlines()[7:]
        path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    model = from_joeynmt(folder)
    assert model.generation_config.bad_words_ids == [[1], [2], [4], [5], [6], [0]]
    tokenizer, _ = joeynmt_tokenizer(folder)
    assert tokenizer.all_special_tokens == ["[B]", "[E]", "[U]", "[P]"]
    assert tokenizer("[x] no_word")["input_ids"] == [5, 0, 3]
    assert len(tokenizer) == model.config.vocab_size
    # the end token is never the first
    raised = {"sequence_bias": {(3,): 99.0}, "max_new_tokens": 5}
    ids = torch.tensor([[9, 3]])
    assert len(model.generate(ids, **raised)[0]) == 3
    assert len(model.generate(ids, **raised, min_new_tokens=0)[0]) == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"tokenizer_cfg": {"pretokenizer": "moses"}, "normalize": False},
            "The tokenizer splits text at spaces. First prepare a text as JoeyNMT does: "
            "`sacremoses -l en tokenize`. The translations need `sacremoses -l de detokenize`.",
        ),
        (
            {"tokenizer_cfg": {"pretokenizer": "moses"}},
            "does: NFKC, ' and \" as quotation marks, no space before ? ! , . :, then `sacremoses "
            "-l en normalize tokenize`. The translations",
        ),
        (
            {"level": "bpe", "tokenizer_cfg": {"model_file": "pieces.model"}, "normalize": False},
            "spaces. First prepare a text as JoeyNMT does: lowercase, then SentencePiece with "
            "pieces.model.",
        ),
    ],
)
def test_steps_before_the_tokenizer_are_named(changes, sentence, peer):
    folder = peer("joeynmt-words", text(**changes))
    tokenizer, found = joeynmt_tokenizer(folder)
    assert sentence in found
    # a step before Moses or a split is not done a second time
    is_lowercased = tokenizer("MOLE")["input_ids"] == tokenizer("mole")["input_ids"]
    assert is_lowercased == ("lowercase" not in found)
    is_normalized = tokenizer("mole .")["input_ids"] == tokenizer("mole.")["input_ids"]
    assert not is_normalized


def test_text_is_normalized_as_joeynmt_does(peer):
    tokenizer, _ = joeynmt_tokenizer(peer("joeynmt-words"))
    given = " A \ufb01ne\u200b  \u201cMole\u201d\u3000owl\u2019s , \uff21 . : ok ! ?"
    plain = unicodedata.normalize("NFKC", given)
    for old, new in (("\u2019", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\u200b", "")):
        plain = plain.replace(old, new)
    plain = re.sub(" +", " ", plain)
    for mark in "?!,.:":
        plain = plain.replace(f" {mark}", mark)
    normalizer = tokenizer.backend_tokenizer.normalizer
    assert normalizer.normalize_str(given) == plain.strip().lower()
    assert plain.strip() != given


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
def test_the_pieces_are_those_of_sentencepiece_with_joeynmts_ids(model_type, peer, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = expected("joeynmt-words")["texts"]
    (tmp_path / "texts").write_text("".join(f"{text}\n" for text in texts * 5))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts"),
        model_prefix=str(tmp_path / "spm"),
        model_type=model_type,
        vocab_size=74 if model_type != "char" else 80,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(str(tmp_path / "spm.model"))
    pieces = [theirs.id_to_piece(index) for index in range(len(theirs))]
    folder = peer(
        "joeynmt-words",
        text(level="bpe", tokenizer_cfg={"model_file": "x/spm.model"}, **PLAIN),
    )
    shutil.copy(tmp_path / "spm.model", folder)
    # JoeyNMT sorts in the special tokens, and a vocabulary may have more tokens
    more = [f"extra{index}" for index in range(76 - len(pieces))]
    vocabulary = ["<unk>", "<pad>", "<s>", "</s>", *more, *reversed(pieces[3:])]
    for side in ("src", "trg"):
        text_of_file = "".join(f"{token}\n" for token in vocabulary)
        (folder / f"{side}_vocab.txt").write_text(text_of_file, encoding="utf-8")
    tokenizer, sentence = joeynmt_tokenizer(folder)
    assert sentence == f"The tokenizer is that of {folder / 'spm.model'}."
    ids = {token: index for index, token in enumerate(vocabulary)}
    for one in [*texts, "owl  pig", "Newts zebra \u00e9", ""]:
        plain = re.sub(" +", " ", one)
        expected_ids = [ids.get(piece, 0) for piece in theirs.encode(plain, out_type=str)]
        assert tokenizer(one)["input_ids"] == [*expected_ids, 3], one
        if 0 not in expected_ids:
            assert tokenizer.decode([ids["\u2581"], *expected_ids]) == plain
    # SentencePiece splits a piece that is not in the vocabulary, our tokenizer cannot
    for side in ("src", "trg"):
        text_of_file = "".join(f"{token}\n" for token in [*vocabulary[:-1], "extra"])
        (folder / f"{side}_vocab.txt").write_text(text_of_file, encoding="utf-8")
    _, sentence = joeynmt_tokenizer(folder)
    assert "SentencePiece with x/spm.model" in sentence


def test_the_vocabulary_of_the_configuration_is_read_from_the_folder(peer):
    folder = peer("joeynmt-words", text(voc_file="models/words.txt"))
    tokenizer, _ = joeynmt_tokenizer(folder)
    (folder / "src_vocab.txt").rename(folder / "words.txt")
    (folder / "trg_vocab.txt").unlink()
    again, _ = joeynmt_tokenizer(folder)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_a_vocabulary_that_is_missing_or_another_is_named(peer, tmp_path, capsys):
    folder = peer("joeynmt-words")
    path = folder / "trg_vocab.txt"
    words = path.read_text(encoding="utf-8")
    path.write_text(words + "another\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"must share one vocabulary .* got different ones in"):
        joeynmt_tokenizer(folder)
    (folder / "src_vocab.txt").write_text(words + "another\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"src_vocab\.txt must have 77 tokens, as the embedding has, got 78"
    ):
        joeynmt_tokenizer(folder)
    path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"trg_vocab\.txt must be UTF-8"):
        joeynmt_tokenizer(folder)
    path.unlink()
    assert main(["convert", "joeynmt", str(folder), str(tmp_path / "out")]) == 0
    assert f"No tokenizer: {folder} has no src_vocab.txt" in capsys.readouterr().out
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"must have config\.yaml, got none in"),
        (b"a: 5\nb: [", r"config\.yaml line 2 must be YAML: expected the node content"),
        (b"a: 2020-99-99", r"config\.yaml must be YAML: month must be in"),
        (b"[" * 9999, r"config\.yaml must be YAML: maximum recursion"),
        (b"\xff", r"config\.yaml must be UTF-8"),
        (b"\3", r"config\.yaml must be YAML: unacceptable character"),
        (b"- 5", r"config\.yaml must be a mapping"),
        (b"5: x\na: x", r"config\.yaml must have model, got"),
        (b"a: x\n" * 300_000, r"must be of at most 1,048,576 characters, got 1,500,000"),
        (b"a: !!python/object/apply:os.mkdir [made]", r"line 1 must be YAML: could not determine"),
    ],
)
def test_a_configuration_that_is_none_is_named(content, message, peer):
    folder = peer("joeynmt-words")
    (folder / "config.yaml").unlink()
    if content is not None:
        (folder / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        from_joeynmt(folder)


class Code:
    """Code that a checkpoint must not run."""

    def __reduce__(self):
        return (os.mkdir, ("made",))


def test_a_checkpoint_runs_no_code(peer, monkeypatch):
    folder = peer("joeynmt-words")
    monkeypatch.chdir(folder)
    checkpoint = torch.load("best.ckpt", weights_only=True)
    torch.save({**checkpoint, "stats_state": Code()}, "best.ckpt")
    with pytest.raises(ValueError, match=r"which runs no code, got one that needs .*mkdir"):
        from_joeynmt(folder)
    assert not Path("made").exists()


def test_a_checkpoint_that_is_cut_off_or_none_is_named(peer):
    path = peer("joeynmt-words") / "best.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    # torch's zip format, and its older format
    for is_zip in (True, False):
        torch.save(checkpoint, path, _use_new_zipfile_serialization=is_zip)
        from_joeynmt(path)
        whole = path.read_bytes()
        for size in (0, 100, len(whole) // 2, len(whole) - 500):
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=f"{path} must be a checkpoint.*torch cannot read"):
                from_joeynmt(path)
    with pytest.raises(ValueError, match="a checkpoint must be a file, got no such file"):
        from_joeynmt(path.with_name("nowhere"))


def test_the_toolkits_are_not_confused(peer):
    with pytest.raises(ValueError, match=r"of fairseq .* got model_state, .* checkpoint of JoeyNM"):
        from_fairseq(PEERS / "joeynmt-words" / "best.ckpt")
    path = peer("joeynmt-words") / "model.pt"
    shutil.copy(PEERS / "fairseq-post" / "model.pt", path)
    message = r"of JoeyNMT, with the entry 'model_state', got .*This may be .*of fairseq or OpenNMT"
    with pytest.raises(ValueError, match=message):
        from_joeynmt(path)
