"""Parallel text, as it is read, cleaned and tokenized. Section 5.1."""

import gzip
import os

import datasets
import pytest
import train_toys
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.train import corpus as corpora
from vanilla_transformer.train.corpus import (
    drop_untrainable,
    encode_pairs,
    load_translations,
    read_lines,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return train_toys.write_corpus(tmp_path_factory.mktemp("corpus"))


def test_empty_and_long_pairs_are_left_out_and_counted():
    texts = datasets.Dataset.from_dict(
        {
            "translation": [
                {"en": "a cat", "de": "eine Katze"},
                {"en": "", "de": "nichts"},
                {"en": "much " * 40, "de": "viel"},
                {"en": "a dog", "de": "ein Hund"},
            ]
        }
    )
    encoded = encode_pairs(texts, "train", VanillaTransformerTokenizer(), "en", "de")
    kept, counts = drop_untrainable(encoded, "train", max_length=50)
    assert counts == {"kept": 2, "empty": 1, "too_long": 1}
    assert len(kept) == 2
    with pytest.raises(ValueError, match="got 1 with an empty and 3 with a too long side"):
        drop_untrainable(encoded, "train", max_length=3)


def test_the_direction_is_the_one_asked_for(corpus):
    texts = load_translations(str(corpus), None, "de", "en")
    tokenizer = VanillaTransformerTokenizer()
    encoded = encode_pairs(texts["test"], "test", tokenizer, "de", "en")
    first = (corpus / "test.de").read_text(encoding="utf-8").split("\n")[0]
    assert tokenizer.decode(encoded[0]["input_ids"], skip_special_tokens=True) == first


def test_text_files_can_be_compressed_and_named_by_a_prefix(tmp_path):
    for lang, text in (("en", "one\u2028line\ntwo\n"), ("de", "eins\nzwei\n")):
        with gzip.open(tmp_path / f"news.{lang}.gz", "wt", encoding="utf-8") as file:
            file.write(text)
    texts = load_translations(str(tmp_path / "news"), None, "en", "de")
    assert list(texts) == ["train"]
    assert texts["train"]["translation"][:] == [
        {"en": "one\u2028line", "de": "eins"},
        {"en": "two", "de": "zwei"},
    ]


def test_a_changed_file_is_read_again(tmp_path):
    train_toys.write_corpus(tmp_path, pairs=5)
    assert len(load_translations(str(tmp_path), None, "en", "de")["train"]) == 5
    train_toys.write_corpus(tmp_path, pairs=6)
    assert len(load_translations(str(tmp_path), None, "en", "de")["train"]) == 6


def test_a_file_that_was_only_read_is_the_same_file(tmp_path):
    train_toys.write_corpus(tmp_path, pairs=5)
    before = load_translations(str(tmp_path), None, "en", "de")["train"]
    for path in tmp_path.iterdir():
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns + 10**9, status.st_mtime_ns))
    after = load_translations(str(tmp_path), None, "en", "de")["train"]
    assert len(before.cache_files) == 1
    assert before.cache_files == after.cache_files


def test_text_is_tokenized_once_by_a_tokenizer_learned_or_loaded(tmp_path, monkeypatch):
    corpus = train_toys.write_corpus(tmp_path / "corpus", pairs=40)
    texts = load_translations(str(corpus), None, "en", "de")["train"]
    words = [text for pair in texts["translation"] for text in pair.values()]
    learned = VanillaTransformerTokenizer().train_new_from_iterator(words * 2, vocab_size=280)
    learned.save_pretrained(tmp_path / "tokenizer")
    rows = encode_pairs(texts, "train", learned, "en", "de")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    calls = []
    encode = corpora._encode
    monkeypatch.setattr(corpora, "_encode", lambda *a, **kw: calls.append(1) or encode(*a, **kw))
    again = encode_pairs(texts, "train", loaded, "en", "de")
    assert not calls
    assert again[:] == rows[:]
    # but by another, or the other way round, it is tokenized anew
    turned = encode_pairs(texts, "train", loaded, "de", "en")
    bytes_alone = encode_pairs(texts, "train", VanillaTransformerTokenizer(), "en", "de")
    assert len(calls) == 2
    assert turned[0]["input_ids"] == rows[0]["labels"]
    assert bytes_alone[0] != rows[0]


def test_a_local_dataset_of_the_translation_schema_loads(tmp_path):
    (tmp_path / "train.jsonl").write_text(
        '{"translation": {"en": "a", "de": "b"}}\n' * 3, encoding="utf-8"
    )
    assert len(load_translations(str(tmp_path), None, "en", "de")["train"]) == 3
    with pytest.raises(ValueError, match=r"source_lang must be one of de, en .*, got 'fr'"):
        load_translations(str(tmp_path), None, "fr", "de")


def write_pair(folder, english, german):
    (folder / "train.en").write_bytes(english)
    (folder / "train.de").write_bytes(german)


@pytest.mark.parametrize(
    ("english", "german", "message"),
    [
        (b"a\nb\nc\n", b"a\nb\n", "train.de must have as many lines, got 3 and 2"),
        (b"a\nb\n", b"a\n\xff\xfe\n", "train.de line 2 must be UTF-8"),
        (b"", b"", "at least one line, got none"),
    ],
)
def test_files_that_do_not_fit_are_refused(english, german, message, tmp_path):
    write_pair(tmp_path, english, german)
    with pytest.raises(ValueError, match=message):
        load_translations(str(tmp_path), None, "en", "de")


def test_a_cut_archive_is_refused(tmp_path):
    whole = gzip.compress(b"a line of text\n" * 50)
    (tmp_path / "train.en.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "train.de.gz").write_bytes(whole)
    with pytest.raises(ValueError, match=r"train.en.gz cannot be read to its end"):
        load_translations(str(tmp_path), None, "en", "de")


def test_only_a_line_feed_ends_a_line():
    lines = ["\ufeffone\r\n".encode(), "two\u2028three\n".encode(), b"\n", b"four"]
    assert list(read_lines(lines, "stdin")) == ["one", "two\u2028three", "", "four"]
    with pytest.raises(ValueError, match="stdin line 2 must be UTF-8"):
        list(read_lines([b"a\n", b"\xe9\n"], "stdin"))


def test_a_language_without_its_file_is_named(corpus):
    with pytest.raises(ValueError, match=r"train\.fr must exist beside .*train\.en"):
        load_translations(str(corpus), None, "en", "fr")


def test_a_dataset_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_translations(str(tmp_path / "nothing"), None, "en", "de")


def test_a_dataset_without_translations_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"must have a column 'translation'.*, got text"):
        load_translations(str(tmp_path), None, "en", "de")


def test_a_line_without_text_is_named():
    pairs = [{"en": "a", "de": "b"}] * 2 + [{"en": "c", "de": None}]
    texts = datasets.Dataset.from_dict({"translation": pairs})
    with pytest.raises(ValueError, match="validation line 3 must have text in 'de', got None"):
        encode_pairs(texts, "validation", VanillaTransformerTokenizer(), "en", "de")
