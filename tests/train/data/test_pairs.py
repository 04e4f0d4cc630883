"""Sentence pairs as token ids: encoding, filtering, counts and cache. Section 5.1."""

import collections
import shutil

import datasets
import numpy as np
import pytest
import train_toys
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.train.data import pairs as pairing
from vanilla_transformer.train.data.corpus import load_translations
from vanilla_transformer.train.data.pairs import (
    VERDICTS,
    count_verdicts,
    drop_untrainable,
    encode_pairs,
    encode_table,
    filter_pairs,
    prepare_pairs,
    refuse_unusable,
)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_pairs_have_the_given_direction(corpus):
    texts = load_translations(str(corpus), None, "de", "en")
    tokenizer = VanillaTransformerTokenizer()
    encoded = encode_pairs(texts["test"], "test", tokenizer, "de", "en")
    first = (corpus / "test.de").read_text(encoding="utf-8").split("\n")[0]
    assert tokenizer.decode(encoded[0]["input_ids"], skip_special_tokens=True) == first


def test_a_side_of_several_references_is_named(tmp_path):
    pair = {"en": "ant", "de": ["bee", "cat"]}
    datasets.Dataset.from_list([{"translation": pair}]).to_parquet(tmp_path / "texts.parquet")
    texts = load_translations(str(tmp_path / "texts.parquet"), None, "en", "de")["train"]
    with pytest.raises(ValueError, match=r"train line 1 must have text in 'de', got \['bee', 'c"):
        encode_pairs(texts, "train", VanillaTransformerTokenizer(), "en", "de")


def test_text_is_tokenized_once_by_a_tokenizer_learned_or_loaded(tmp_path, monkeypatch):
    corpus = train_toys.write_corpus(tmp_path / "corpus", pairs=40)
    texts = load_translations(str(corpus), None, "en", "de")["train"]
    words = [text for pair in texts["translation"] for text in pair.values()]
    learned = VanillaTransformerTokenizer().train_new_from_iterator(words * 2, vocab_size=280)
    learned.save_pretrained(tmp_path / "tokenizer")
    rows = encode_pairs(texts, "train", learned, "en", "de")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    calls = []
    encode = pairing.encode_table
    monkeypatch.setattr(
        pairing, "encode_table", lambda *a, **kw: calls.append(1) or encode(*a, **kw)
    )
    again = encode_pairs(texts, "train", loaded, "en", "de")
    assert not calls
    assert again[:] == rows[:]
    # another tokenizer or the other direction tokenizes again
    turned = encode_pairs(texts, "train", loaded, "de", "en")
    bytes_alone = encode_pairs(texts, "train", VanillaTransformerTokenizer(), "en", "de")
    assert len(calls) == 2
    assert turned[0]["input_ids"] == rows[0]["labels"]
    assert bytes_alone[0] != rows[0]
    # changed code tokenizes again
    monkeypatch.setattr(pairing, "CODE_FILES", (__file__,))
    encode_pairs(texts, "train", loaded, "en", "de")
    assert len(calls) == 3


def test_a_line_without_text_is_named():
    pairs = [{"en": "a", "de": "b"}] * 2 + [{"en": "c", "de": None}]
    texts = datasets.Dataset.from_dict({"translation": pairs})
    # the error shows the pair, which helps to find it in files that are read in another order
    message = "validation line 3 must have text in 'de', got None in .*'en': 'c'"
    with pytest.raises(ValueError, match=message):
        encode_pairs(texts, "validation", VanillaTransformerTokenizer(), "en", "de")


def as_rows(pairs):
    return datasets.Dataset.from_list(
        [{"translation": dict(zip(("en", "de"), p, strict=True))} for p in pairs]
    )


def encoded(pairs, split="train"):
    """Encode pairs as `encode_pairs` does, but without the cache."""
    table = as_rows(pairs).with_format("arrow")[:]
    tokenizer = VanillaTransformerTokenizer()
    return datasets.Dataset(encode_table(table, [0], split, tokenizer, ["en", "de"]))


def verdicts(pairs, max_length=50, **rules):
    return [VERDICTS[index] for index in filter_pairs(encoded(pairs), max_length, **rules)[2]]


GOOD = ("a cat", "eine Katze")
# letters of German and French beyond ASCII, and punctuation of printed text
LETTERS = [*"äöüßÄÖÜàâçéèêëîïôùûœÂÇÉÈÊÔ«»°", "\u2013", "\u2019", "\u201c", "\u2026"]
TEXT = ["Âge, Ô, NÃO, ÅR", "AMANHÃ\u201d \u2013 5€", "l\u2019Â\u2026", "â €, 20 °C"]


@pytest.mark.parametrize(
    ("pair", "verdict"),
    [
        (GOOD, "kept"),
        (("", "nichts"), "empty"),
        (("something", " \t\u3000"), "empty"),
        (("much " * 40, "viel"), "too_long"),
        (("caf\ufffd", "Kaffee"), "wrong_encoding"),
        (("a\x92s", "eines"), "wrong_encoding"),
        # UTF-8 that was decoded as cp1252, and text that looks similar
        *((("x", f"a{letter}b".encode().decode("cp1252")), "wrong_encoding") for letter in LETTERS),
        *((("x", word), "kept") for word in [*LETTERS, *TEXT]),
        (("cat", "K\x00a\x00t\x00z\x00e\x00"), "wrong_encoding"),
        # the first of two reasons counts
        (("", "caf\ufffd"), "wrong_encoding"),
        # unusual but valid text
        (("na\u00efve \u00a0 \U0001f600", "\u2028\u00df\u4e2d"), "kept"),
    ],
)
def test_a_pair_is_dropped_for_the_first_reason_that_applies(pair, verdict):
    assert verdicts([GOOD, pair]) == ["kept", verdict]


def test_the_length_ratio_does_not_count_the_end_token():
    # without a learned vocabulary the tokens are bytes, after a leading space
    pairs = [("aaaaa", "bb"), ("a", "bbb"), ("aaaaaa", "bb"), ("a", "bbbb")]
    assert verdicts(pairs, max_length_ratio=2.0) == ["kept", "kept", *["length_ratio"] * 2]
    assert verdicts(pairs) == ["kept"] * 4


words = st.text("ab ", min_size=0, max_size=4)


@settings(deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=30))
def test_only_the_first_of_equal_pairs_is_kept(pairs):
    expected, seen = [], set()
    for pair in pairs:
        is_empty = not all(text.strip() for text in pair)
        expected.append("empty" if is_empty else "duplicate" if pair in seen else "kept")
        seen.add(pair)
    assert verdicts(pairs, drop_duplicates=True) == expected
    assert set(verdicts(pairs)) <= {"kept", "empty"}


def test_duplicates_are_found_across_chunks(monkeypatch):
    random = np.random.default_rng(3)
    pairs = [(f"cat {i}", f"Katze {j}") for i, j in random.integers(0, 20, (500, 2))]
    rows = encoded(pairs)
    whole = filter_pairs(rows, 50, drop_duplicates=True)
    monkeypatch.setattr(pairing, "PAIRS_PER_CHUNK", 13)
    in_parts = filter_pairs(rows, 50, drop_duplicates=True)
    assert (whole == in_parts).all()
    assert count_verdicts(whole[2])["kept"] == len(set(pairs))
    assert count_verdicts(whole[2])["duplicate"] > 0


def test_pairs_that_differ_only_in_the_boundary_between_sides_are_no_duplicates():
    pairs = [("ab", "c"), ("a", "bc"), ("a\n1", "b"), ("a", "1\nb")]
    assert verdicts(pairs, drop_duplicates=True) == ["kept"] * 4


def test_every_pair_is_counted_once():
    pairs = [GOOD, GOOD, ("", "x"), ("a " * 60, "b"), ("\ufffd", "c"), ("aaaaaaaaa", "b")]
    pairs.append(("leaks", "here"))
    rows = encoded(pairs)
    rules = {"max_length_ratio": 3.0, "drop_duplicates": True, "leaking_pairs": np.array([6])}
    counts = count_verdicts(filter_pairs(rows, 50, **rules)[2])
    assert counts == dict.fromkeys(VERDICTS, 1)
    assert count_verdicts(filter_pairs(encoded([GOOD]), 50)[2]) == {
        **dict.fromkeys(VERDICTS, 0),
        "kept": 1,
    }


def test_untrainable_pairs_are_dropped_before_fine_tuning(caplog):
    caplog.set_level("INFO")
    rows = drop_untrainable(encoded([GOOD, ("", "x"), ("a dog", "ein Hund")]), 50)
    assert len(rows) == 2
    assert "train: kept 2, wrong_encoding 0, empty 1, leak 0, too_long 0" in caplog.text


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            [("", "x"), ("a " * 60, "b")],
            "news must have a pair that can be used, got .*empty 1, leak 0, too_long 1",
        ),
        (
            [("caf\ufffd", "b"), ("\ufffd", "b"), GOOD],
            "news must be UTF-8 without signs .* in at least half of its pairs, got kept 1, wrong",
        ),
        # valid UTF-8
        (
            [("a\x85b", "c"), GOOD, ("d", "\x92e")],
            r"such as .* control characters U\+0080 to U\+009F",
        ),
    ],
)
def test_a_corpus_without_usable_pairs_is_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        refuse_unusable(count_verdicts(filter_pairs(encoded(pairs), 50)[2]), "news")


def test_pairs_are_read_by_index_from_concatenated_corpora():
    pairs = [(f"{'x' * (i % 7)} {i}", f"nummer {i}") for i in range(40)]
    parts = [encoded(pairs[:9]), encoded(pairs[9:10]), encoded(pairs[10:])]
    taken = prepare_pairs(parts, max_length=50)
    random = np.random.default_rng(0)
    for numbers in (
        np.arange(40),
        random.permutation(40)[:11],
        np.array([9]),
        np.array([8, 10, 8]),
    ):
        found = taken[numbers]
        tokenizer = VanillaTransformerTokenizer()
        for column, side in (("input_ids", 0), ("labels", 1)):
            texts = tokenizer.batch_decode(found[column], skip_special_tokens=True)
            assert texts == [pairs[number][side] for number in numbers]
        assert [len(ids) for ids in found["labels"]] == taken.target_lengths[numbers].tolist()


def test_a_copy_of_the_text_elsewhere_is_not_tokenized_again(corpus, tmp_path, monkeypatch):
    tokenizer = VanillaTransformerTokenizer()
    texts = load_translations(str(corpus), None, "en", "de")["train"]
    rows = encode_pairs(texts, "train", tokenizer, "en", "de")
    shutil.copytree(corpus, tmp_path / "copy")
    monkeypatch.setattr(pairing, "encode_table", lambda *a, **kw: pytest.fail("tokenized again"))
    copied = load_translations(str(tmp_path / "copy"), None, "en", "de")["train"]
    assert copied.cache_files != texts.cache_files
    assert encode_pairs(copied, "train", tokenizer, "en", "de")[:] == rows[:]


def test_pairs_are_filtered_once_for_the_same_rules(corpus, monkeypatch):
    texts = load_translations(str(corpus), None, "en", "de")["train"]
    rows = [encode_pairs(texts, "train", VanillaTransformerTokenizer(), "en", "de")]
    first = prepare_pairs(rows, 41)
    assert isinstance(first.lengths_and_verdicts, np.memmap)
    calls = collections.Counter()
    real = pairing.filter_pairs
    monkeypatch.setattr(pairing, "filter_pairs", lambda *a: calls.update(filtered=1) or real(*a))
    assert (prepare_pairs(rows, 41).lengths_and_verdicts == first.lengths_and_verdicts).all()
    assert calls["filtered"] == 0
    assert len(prepare_pairs(rows, 7).kept_indices()) < len(first.kept_indices())
