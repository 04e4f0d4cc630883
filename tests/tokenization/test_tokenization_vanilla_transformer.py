"""The tokenizer of section 5.1: its properties for any text, also after saving and loading."""

import copy
import inspect
import json
import multiprocessing
import pickle
import subprocess
import sys
import unicodedata
from pathlib import Path
from random import Random

import datasets
import dill
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, TokenizersBackend

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerTokenizer
from vanilla_transformer.tokenization.learning import learn_vocabulary

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>"]
# literal special tokens are the most frequent words, and still no merges may make them
CORPUS = [
    "The small cat sleeps. Die kleine Katze schläft.",
    "the cat of the house isn't the cat </s> <s> <pad> <unk>",
    "a</s>b</s>c <unk><unk><pad><pad><s>",
] * 30
HARD_CHARACTERS = (
    " \n\r\t\x00\x1f\u00a0\u2028\u2581ĠĊaeñ\u0301\u0323ﬁ한\u1112\u1161<>/s😀\u200d\ufeff\ufffd"
)

texts = st.one_of(
    st.text(),
    st.text(st.sampled_from(HARD_CHARACTERS)),
    st.lists(st.sampled_from([*SPECIAL_TOKENS, " ", "the", "cat"]) | st.text(max_size=3)).map(
        "".join
    ),
)
hundreds = settings(max_examples=300, deadline=None, database=None)


@pytest.fixture(scope="module")
def tokenizer() -> VanillaTransformerTokenizer:
    return VanillaTransformerTokenizer().train_new_from_iterator(CORPUS, 320)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(params=["itself", "auto", "plain"])
def reloaded(request, folder) -> TokenizersBackend:
    if request.param == "itself":
        return VanillaTransformerTokenizer.from_pretrained(folder)
    if request.param == "plain":
        return TokenizersBackend.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def back(tokenizer: TokenizersBackend, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True)


def save_foreign(path: Path, vocab: list[str]) -> Path:
    numbered = {token: index for index, token in enumerate(vocab)}
    Tokenizer(models.BPE(vocab=numbered, merges=[])).save(str(path / "tokenizer.json"))
    return path


@hundreds
@given(text=texts)
def test_a_text_in_nfc_comes_back_exactly(tokenizer, text):
    assert back(tokenizer, nfc(text)) == nfc(text)


@hundreds
@given(text=texts)
@example(text="\u0301\u08d3")
def test_every_text_comes_back_up_to_nfc(tokenizer, text):
    # normalized once more: tokenizers and Python know different versions of Unicode, whose NFC
    # orders the newest combining marks differently
    assert nfc(back(tokenizer, text)) == nfc(text)


@pytest.mark.parametrize(
    "text", ["", " ", "   ", "\n", " a", "  a ", "a\r\n\tb  ", "\x00", "😀 </s>", "▁a", "e\u0301"]
)
def test_spaces_and_control_characters_stay(tokenizer, reloaded, text):
    assert back(tokenizer, text) == back(reloaded, text) == nfc(text)


@hundreds
@given(text=texts)
def test_ids_are_in_the_vocabulary_and_only_the_last_is_special(tokenizer, text):
    *ids, last = tokenizer(text)["input_ids"]
    assert last == tokenizer.eos_token_id
    assert all(len(SPECIAL_TOKENS) <= index < len(tokenizer) for index in ids)


def test_special_tokens_come_first_and_in_order(tokenizer):
    for made in (VanillaTransformerTokenizer(), tokenizer):
        named = [made.pad_token_id, made.bos_token_id, made.eos_token_id, made.unk_token_id]
        assert named == [0, 1, 2, 3]
        assert made.convert_ids_to_tokens(named) == SPECIAL_TOKENS


def test_an_untrained_tokenizer_encodes_bytes():
    tokenizer = VanillaTransformerTokenizer()
    assert len(tokenizer) == len(SPECIAL_TOKENS) + 256
    assert len(tokenizer.tokenize("für")) == len(" für".encode())


def test_a_word_has_the_same_tokens_at_the_start_of_a_text_as_inside(tokenizer):
    assert tokenizer.tokenize("cat") == ["Ġcat"]
    for word in ("cat", "Katze", "unheard"):
        assert tokenizer.tokenize(f"the {word}") == ["Ġthe", *tokenizer.tokenize(word)]


def test_words_split_beforehand_are_words_of_a_text(tokenizer):
    words = ["the", "cat", "Katze"]
    split = tokenizer(words, is_split_into_words=True)
    assert split["input_ids"] == tokenizer(" ".join(words))["input_ids"]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_literal_special_token_is_text(tokenizer, reloaded, token):
    for text in (token, f"the {token} cat", f"a{token}b", f"{token} {token}"):
        ids = tokenizer(text)["input_ids"]
        assert [index for index in ids if index < len(SPECIAL_TOKENS)] == [tokenizer.eos_token_id]
        assert reloaded(text)["input_ids"] == ids
        assert back(reloaded, text) == text


def test_an_option_finds_special_tokens_in_texts(folder):
    tokenizer = VanillaTransformerTokenizer.from_pretrained(folder, split_special_tokens=False)
    assert tokenizer("the</s>")["input_ids"][-2:] == [2, 2]


def test_labels_end_with_the_end_token(tokenizer):
    batch = tokenizer(["the cat"], text_target=["die Katze"])
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert batch["labels"] == tokenizer(["die Katze"])["input_ids"]
    assert batch["labels"][0][-1] == tokenizer.eos_token_id


def test_a_saved_tokenizer_is_the_same_tokenizer(tokenizer, reloaded):
    assert reloaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    for text in [*CORPUS[:3], " a", "", "größer als 1,000"]:
        assert reloaded(text).data == tokenizer(text).data


def test_the_auto_class_gives_our_class(folder):
    VanillaTransformerConfig().save_pretrained(folder)
    assert type(AutoTokenizer.from_pretrained(folder)) is VanillaTransformerTokenizer
    (folder / "config.json").unlink()


def test_a_saved_tokenizer_needs_none_of_our_code(tokenizer, folder):
    texts = ["the cat </s>", "  a <pad>", "größer"]
    program = (
        "import json, sys\n"
        "from transformers import AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "assert 'vanilla_transformer' not in sys.modules\n"
        "ids = tokenizer(json.loads(sys.argv[2]))['input_ids']\n"
        "print(json.dumps([type(tokenizer).__name__, ids]))"
    )
    command = [sys.executable, "-c", program, str(folder), json.dumps(texts)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == ["TokenizersBackend", tokenizer(texts)["input_ids"]]


def test_a_token_that_a_user_adds_is_found_and_keeps_the_text_around_it(folder, tmp_path):
    tokenizer = VanillaTransformerTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    tokenizer.add_tokens(["<2fr>"], special_tokens=True)
    tokenizer.add_tokens(["<ent>"])
    tokenizer.save_pretrained(tmp_path)
    text = "<2de> the cat<2fr>  a <ent>b</s>"
    for made in (tokenizer, VanillaTransformerTokenizer.from_pretrained(tmp_path)):
        ids = made(text)["input_ids"]
        assert [index for index in ids if index >= size] == [size, size + 1, size + 2]
        assert ids[-1] == 2
        assert 2 not in ids[:-1]
        assert made.decode(ids) == text + "</s>"
        assert made.decode(ids, skip_special_tokens=True) == "the cat  a <ent>b</s>"
        assert made.tokenize("<2de> the") == ["<2de>", *made.tokenize("the")]


def in_another_process(tokenizer, text):
    return tokenizer(text)["input_ids"], tokenizer.decode(tokenizer(text)["input_ids"])


def mapped(tokenizer, text):
    rows = datasets.Dataset.from_dict({"text": [text] * 4})
    return rows.map(lambda row: tokenizer(row["text"]), num_proc=2)["input_ids"][3]


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda tokenizer: pickle.loads(pickle.dumps(tokenizer)),
    "dill": lambda tokenizer: dill.loads(dill.dumps(tokenizer)),
    "a copy of a copy": lambda tokenizer: copy.deepcopy(pickle.loads(pickle.dumps(tokenizer))),
}


@pytest.fixture(scope="module")
def with_added(folder):
    tokenizer = VanillaTransformerTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    tokenizer.add_tokens(["Zürich"])
    return tokenizer


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_tokenizer_encodes_and_decodes_the_same(way, with_added):
    text = "<2de> <s> In Zürich</s> the<pad>"
    ids = with_added(text)["input_ids"]
    made = COPIES[way](with_added)
    assert made(text)["input_ids"] == ids
    assert made.decode(ids) == with_added.decode(ids) == text + "</s>"
    assert made.decode(ids, True) == "<s> In Zürich</s> the<pad>"
    found = COPIES[way](VanillaTransformerTokenizer(split_special_tokens=False))("a</s>")
    assert found["input_ids"][-2:] == [2, 2]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_tokenizer_in_another_process_is_the_same(method, with_added):
    text = "<2de> <s> In Zürich</s> the<pad>"
    with multiprocessing.get_context(method).Pool(1) as pool:
        ids, decoded = pool.apply(in_another_process, (with_added, text))
    assert (ids, decoded) == in_another_process(with_added, text)


def test_a_tokenizer_in_the_processes_of_datasets_is_the_same(with_added):
    text = "<2de> <s> In Zürich</s> the<pad>"
    assert mapped(with_added, text) == with_added(text)["input_ids"]


ADDED = [
    "Zürich",
    "<2de>",
    "ĠX",
    "naïve",
    "Łódź",
    "ß²",
    "東京",
    "e\u0301a",
    "a b",
    "x\ny",
    "🙂",
    "^$",
]
ADDED += ["a|b", "the", " foo", "ñ.", "Ünï"]


@pytest.mark.parametrize("special", [False, True])
def test_any_added_token_comes_back(special, folder, tmp_path):
    tokenizer = VanillaTransformerTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(ADDED, special_tokens=special)
    tokenizer.save_pretrained(tmp_path)
    saved = VanillaTransformerTokenizer.from_pretrained(tmp_path)
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    random = Random(0)
    pieces = [*ADDED, " ", "香港", "é", "the cat", "ü", "größer"]
    for _ in range(300):
        text = "".join(random.choices(pieces, k=random.randint(1, 6)))
        ids = tokenizer(text)["input_ids"]
        assert saved(text)["input_ids"] == ids
        expected = nfc(text) + "</s>"
        for made in (tokenizer, saved):
            assert nfc(made.decode(ids)) == expected
        assert nfc(file.decode(ids, skip_special_tokens=False)) == expected
        assert nfc("".join(saved.batch_decode([ids]))) == expected


def test_a_token_that_is_the_symbol_of_a_byte_is_refused(folder):
    tokenizer = VanillaTransformerTokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match="token 'é' cannot be added"):
        tokenizer.add_tokens(["é"])
    # the caller may choose the names of special tokens
    vocab = tokenizer.get_vocab()
    vocab["«pad»"] = vocab.pop("<pad>")
    named = VanillaTransformerTokenizer(vocab, [], pad_token="«pad»")
    assert named.pad_token_id == 0
    assert named.decode(named("香 é")["input_ids"], skip_special_tokens=True) == "香 é"


def test_other_classes_find_and_skip_an_added_special_token(with_added, tmp_path):
    with_added.save_pretrained(tmp_path / "prefixed", filename_prefix="x")
    with_added.save_pretrained(tmp_path)
    text = "<2de> the cat in Zürich"
    ids = with_added(text)["input_ids"]
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain = TokenizersBackend.from_pretrained(tmp_path)
    ours = VanillaTransformerTokenizer.from_pretrained(tmp_path)
    assert file.encode(text).ids == plain(text)["input_ids"] == ours(text)["input_ids"] == ids
    for decode in (file.decode, *(one.decode for one in (plain, ours))):
        assert decode(ids, skip_special_tokens=True) == "the cat in Zürich"
    # this class still encodes the names of the named ones as text
    assert ours("the </s>")["input_ids"] == with_added("the </s>")["input_ids"]
    found = VanillaTransformerTokenizer.from_pretrained(tmp_path, split_special_tokens=False)
    assert found("the</s>")["input_ids"][-2:] == [2, 2]


def test_a_replaced_special_token_is_text(folder, tmp_path):
    VanillaTransformerTokenizer.from_pretrained(folder, eos_token="[E]").save_pretrained(tmp_path)
    tokenizer = VanillaTransformerTokenizer.from_pretrained(tmp_path)
    for text in ("a </s>", "a [E]"):
        *ids, last = tokenizer(text)["input_ids"]
        assert last == tokenizer.eos_token_id == len(tokenizer) - 1
        assert not {2, last}.intersection(ids)
        assert back(tokenizer, text) == text


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must hold a tokenizer\.json, got none"):
        VanillaTransformerTokenizer.from_pretrained(tmp_path)


def test_a_vocabulary_without_special_tokens_is_refused(tmp_path):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    save_foreign(tmp_path, ["<s>", "<unk>", *alphabet])
    with pytest.raises(ValueError, match=r"special tokens .* got 258 tokens without <pad>, </s>"):
        VanillaTransformerTokenizer.from_pretrained(tmp_path)
    named = VanillaTransformerTokenizer.from_pretrained(tmp_path, pad_token="[P]", eos_token="[E]")
    assert {named.pad_token_id, named.eos_token_id} == {258, 259}


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    model = models.Unigram([("a", -1.0), ("<unk>", -2.0)], unk_id=1)
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"must hold the special tokens .* got 2 tokens without"):
        VanillaTransformerTokenizer.from_pretrained(tmp_path)


def test_a_vocabulary_without_the_bytes_is_refused(tmp_path):
    save_foreign(tmp_path, [*SPECIAL_TOKENS, "a", "b"])
    with pytest.raises(ValueError, match=r"must hold all 256 byte symbols.* got 2"):
        VanillaTransformerTokenizer.from_pretrained(tmp_path)


SYMBOLS = ["(NP", ")NP", "(N", ")N", "XX", "(é"]
symbol_texts = st.lists(st.sampled_from([*SYMBOLS, " ", "  ", "cat", "XX's", "(", "NP"])).map(
    "".join
)


@pytest.fixture(scope="module")
def with_symbols() -> VanillaTransformerTokenizer:
    return learn_vocabulary(CORPUS, 320, symbols=SYMBOLS, progress=False)


def test_a_symbol_is_one_token_wherever_it_stands_between_spaces(with_symbols):
    assert len(with_symbols) == 320
    tokens = with_symbols.tokenize("(NP (N XX )N (é )NP")
    assert tokens == ["Ġ(NP", "Ġ(N", "ĠXX", "Ġ)N", "Ġ(Ã©", "Ġ)NP"]
    symbol_ids = with_symbols.convert_tokens_to_ids(tokens)
    inside = with_symbols.convert_tokens_to_ids(with_symbols.tokenize("the(NP (NPs aXX)N"))
    assert not set(symbol_ids).intersection(inside)


@hundreds
@given(text=texts | symbol_texts)
def test_a_text_with_symbols_comes_back_too(with_symbols, text):
    assert back(with_symbols, nfc(text)) == nfc(text)


def test_symbols_do_not_change_the_tokens_of_other_text(with_symbols):
    plain = learn_vocabulary(CORPUS, 320 - len(SYMBOLS), progress=False)
    for text in CORPUS[:3]:
        assert with_symbols(text)["input_ids"] == plain(text)["input_ids"]


def test_symbols_are_saved(with_symbols, tmp_path):
    with_symbols.save_pretrained(tmp_path)
    text = "(NP XX )NP (NPs"
    for kind in (VanillaTransformerTokenizer, AutoTokenizer, TokenizersBackend):
        loaded = kind.from_pretrained(tmp_path)
        assert loaded(text)["input_ids"] == with_symbols(text)["input_ids"]
        assert back(loaded, text) == text
    assert VanillaTransformerTokenizer.from_pretrained(tmp_path).symbols == SYMBOLS


def test_all_arguments_of_a_tokenizer_are_saved(tokenizer):
    parameters = inspect.signature(VanillaTransformerTokenizer.__init__).parameters
    settings = set(parameters) - {"self", "vocab", "merges", "kwargs"}
    assert "symbols" in settings
    assert settings <= set(tokenizer.init_kwargs)


@pytest.mark.parametrize("single", ["$A", "<s> $A </s>", "<s> $A", "<unk> $A </s>", "$A <unk>"])
def test_the_tokens_that_every_text_gets_are_saved(single, folder, tmp_path):
    changed = VanillaTransformerTokenizer.from_pretrained(folder)
    if "<unk>" in single:
        special_tokens = [(token, changed.convert_tokens_to_ids(token)) for token in SPECIAL_TOKENS]
        changed.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=special_tokens
        )
    else:
        changed.add_bos_token, changed.add_eos_token = "<s>" in single, "</s>" in single
    text = "The cat"
    ids = changed(text)["input_ids"]
    assert ids != VanillaTransformerTokenizer.from_pretrained(folder)(text)["input_ids"]
    changed.save_pretrained(tmp_path)
    loaded = [
        kind.from_pretrained(tmp_path)
        for kind in (VanillaTransformerTokenizer, AutoTokenizer, TokenizersBackend)
    ]
    loaded.append(VanillaTransformerTokenizer(tokenizer_object=changed.backend_tokenizer))
    for tokenizer in loaded:
        assert tokenizer(text)["input_ids"] == ids
    assert loaded[0].add_bos_token == ("<s>" in single)
    assert loaded[0].add_eos_token == ("</s>" in single)
    retrained = changed.train_new_from_iterator(CORPUS, 300)
    added = [token for token in ids if token < len(SPECIAL_TOKENS)]
    assert [token for token in retrained(text)["input_ids"] if token < len(SPECIAL_TOKENS)] == added


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": None},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Digits(individual_digits=True)},
        {"decoder": decoders.ByteLevel()},
        {"decoder": decoders.Sequence([decoders.ByteLevel(), decoders.Replace("t", "d")])},
        {
            "decoder": decoders.Sequence(
                [decoders.Replace("t", "d"), decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
            )
        },
        {
            "normalizer": normalizers.NFKC(),
            "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True),
            "decoder": decoders.ByteLevel(),
        },
    ],
)
def test_a_changed_component_is_saved(changes, folder, tmp_path):
    plain, changed = (VanillaTransformerTokenizer.from_pretrained(folder) for _ in range(2))
    changed.add_tokens(["Zürich"])
    changed.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    for name, component in changes.items():
        setattr(changed.backend_tokenizer, name, component)
    text = "<2de> The ﬁrst CAT sat in Zürich in 1999."
    ids = changed(text)["input_ids"]
    decoded = changed.decode(ids)
    assert (ids, decoded) != (plain(text)["input_ids"], plain.decode(plain(text)["input_ids"]))
    changed.save_pretrained(tmp_path)
    loaded = VanillaTransformerTokenizer.from_pretrained(tmp_path)
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    for tokenizer in (
        loaded,
        AutoTokenizer.from_pretrained(again),
        VanillaTransformerTokenizer(tokenizer_object=changed.backend_tokenizer),
        pickle.loads(pickle.dumps(changed)),
    ):
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == decoded
    # a token that is added later leaves the change in place
    loaded.add_tokens(["Tromsø"])
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode(ids) == decoded


def test_a_setting_of_added_tokens_leaves_the_other_as_saved(folder, tmp_path):
    with_bos = VanillaTransformerTokenizer.from_pretrained(folder, add_bos_token=True)
    assert with_bos("")["input_ids"] == [1, 2]
    with_bos.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, add_eos_token=False)
    assert loaded("")["input_ids"] == [1]
    renamed = AutoTokenizer.from_pretrained(tmp_path, eos_token="<end>")
    assert renamed("")["input_ids"] == [1, renamed.eos_token_id] != [1, 2]


def test_invalid_symbols_are_refused(tokenizer):
    with pytest.raises(ValueError, match="symbols must be words without a space, got 'a b'"):
        VanillaTransformerTokenizer(symbols=["a b"])
    with pytest.raises(ValueError, match=r"at least 262, for .* and 2 symbols, got 261"):
        learn_vocabulary(CORPUS, 261, symbols=["(S", ")S"], progress=False)
    with pytest.raises(ValueError, match=r"hold every symbol, got none of \(S"):
        VanillaTransformerTokenizer(tokenizer.get_vocab(), [], symbols=["(S"])
