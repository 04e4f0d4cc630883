"""Tokenizers that are given to a run: SentencePiece models, and those of the library."""

import pytest
import train_toys
from library_models import make_pieces
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vanilla_transformer.train.data.prepare import load_texts
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.vocabulary import load_tokenizer, refuse_unknown_text

WORDS = ["[UNK]", "[CLS]", "[SEP]", *train_toys.WORDS]


def make(special, template=None):
    """Return a tokenizer of words; a template of BERT's kind adds special tokens."""
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **special)


@pytest.mark.parametrize(
    ("special", "template", "eos", "added"),
    [
        # like those of BERT, of BART and of GPT-2
        ({"sep_token": "[SEP]", "cls_token": "[CLS]"}, "[CLS] $A [SEP]", "[SEP]", ["<pad>"]),
        ({"eos_token": "[SEP]", "bos_token": "[CLS]"}, "[CLS] $A [SEP]", "[SEP]", ["<pad>"]),
        ({"eos_token": "[SEP]"}, None, "[SEP]", ["<pad>"]),
        ({"pad_token": "[CLS]"}, None, "</s>", ["</s>"]),
        ({"pad_token": "[CLS]", "eos_token": "[SEP]"}, "$A [SEP]", "[SEP]", []),
    ],
)
def test_the_tokens_that_training_needs_are_added(special, template, eos, added, tmp_path, caplog):
    caplog.set_level("INFO")
    given = make(special, template)
    given.padding_side = "left"
    given.save_pretrained(tmp_path / "given")
    tokenizer = load_tokenizer(str(tmp_path / "given"))
    assert tokenizer.eos_token == eos
    assert tokenizer.padding_side == "right"
    assert [token for token in tokenizer.get_vocab() if token not in WORDS] == added
    assert len(tokenizer) == len(WORDS) + len(added)
    ids = [WORDS.index("cat"), WORDS.index("dog"), tokenizer.eos_token_id]
    assert tokenizer("cat dog").input_ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "cat dog"
    assert all(token in caplog.text for token in added)
    tokenizer.save_pretrained(tmp_path / "kept")
    again = load_tokenizer(str(tmp_path / "kept"))
    assert again("cat dog").input_ids == ids
    assert again.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("suffix", [".model", ".spm"])
def test_a_run_takes_a_sentencepiece_model(suffix, tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    path, _ = make_pieces(tmp_path)
    path = path.rename(path.with_suffix(suffix))
    for side in ("train", "validation"):
        for language in ("en", "de"):
            file = corpus / f"{side}.{language}"
            letters = file.read_text().translate(str.maketrans("bjkqxyz", "aaaaaaa"))
            file.write_text(letters)
    config = train_toys.toy_config(corpus, tmp_path / "run", tokenizer=str(path), max_steps=1)
    assert train(config)
    kept = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert kept("the cat").input_ids[-1] == kept.eos_token_id == 2
    assert len(load_texts(config).train) == 1


def test_a_file_of_the_library_tokenizers_needs_its_name(tmp_path):
    make({}, None).backend_tokenizer.save(str(tmp_path / "mine.json"))
    with pytest.raises(ValueError, match=r"got the file .*mine\.json': name it tokenizer\.json"):
        load_tokenizer(str(tmp_path / "mine.json"))
    (tmp_path / "mine.json").rename(tmp_path / "tokenizer.json")
    assert load_tokenizer(str(tmp_path))("cat").input_ids[0] == WORDS.index("cat")


def test_a_sentencepiece_model_that_is_not_there_is_refused():
    with pytest.raises(
        ValueError, match=r"tokenizer must be a file that exists, got 'my/x\.model'"
    ):
        load_tokenizer("my/x.model")


def test_a_folder_with_only_a_sentencepiece_model_is_refused_with_its_file(tmp_path):
    path, _ = make_pieces(tmp_path)
    with pytest.raises(ValueError, match=rf"got the folder .* with {path.name}: give a file\."):
        load_tokenizer(str(tmp_path))


def save_words(folder, model):
    """Save a tokenizer as the library tokenizers does: without the names of special tokens."""
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def config(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    return train_toys.toy_config(corpus, tmp_path / "run", tokenizer=str(tmp_path / "given"))


@pytest.mark.parametrize("kind", [models.WordLevel, models.WordPiece])
def test_a_tokenizer_that_fails_for_unknown_text_is_refused(kind, config, tmp_path):
    save_words(tmp_path / "given", kind({"cat": 0, "dog": 1}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match=r"given' must have a token for unknown text, got: Word"):
        train(config)


def test_a_tokenizer_that_loses_text_says_so(config, tmp_path, caplog):
    letters = {letter: number for number, letter in enumerate(sorted(set("".join(WORDS))))}
    texts = load_texts(config)
    for name, decoder, settings in (
        ("both", None, {}),
        ("decoder", decoders.BPEDecoder(), {}),
        ("unknown", None, {"unk_token": "c"}),
        ("neither", decoders.BPEDecoder(), {"unk_token": "c"}),
    ):
        caplog.clear()
        folder = save_words(tmp_path / name, models.BPE(letters, [], **settings))
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if decoder is not None:
            backend.decoder = decoder
        backend.save(str(folder / "tokenizer.json"))
        refuse_unknown_text(load_tokenizer(str(folder)), config, texts)
        assert ("leaves out each character" in caplog.text) == (name in ("both", "decoder"))
        assert ("has no decoder" in caplog.text) == (name in ("both", "unknown"))


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (models.WordLevel({"[UNK]": 0, "ж": 1}, unk_token="[UNK]"), r"sentences are '\[UNK\]'"),
        (models.BPE({"ж": 0}, []), "it gives no tokens for .* sentences"),
    ],
    ids=["unknown tokens", "no tokens"],
)
def test_a_tokenizer_that_knows_nothing_of_the_text_is_refused(model, found, config, tmp_path):
    save_words(tmp_path / "given", model)
    with pytest.raises(ValueError, match=rf"given' must cover the text in 'en', but .*{found}"):
        train(config)


def test_a_file_that_is_no_tokenizer_is_refused_without_the_advice_to_give_its_folder(tmp_path):
    (tmp_path / "codes.bpe").write_text("#version: 0.2\nt h\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"codes\.bpe' of another format\.$"):
        load_tokenizer(str(tmp_path / "codes.bpe"))
