"""Loading of parallel text. Section 5.1."""

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import train_toys
from hub_stand_in import StoredFile, running_hub

from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.data import corpus as corpora
from vanilla_transformer.train.data.corpus import is_local, load_translations, text_hash, texts_of
from vanilla_transformer.train.data.prepare import load_texts
from vanilla_transformer.train.data.text_files import MAX_LINE_BYTES, read_lines


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


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('<srcset setid="newstest2014">', "JSON or markup"),
        ('{"text": "one"}', "JSON or markup"),
        ("0\tone", "a tab"),
    ],
)
def test_text_files_with_more_than_sentences_are_read_with_a_warning(line, name, tmp_path, caplog):
    write_pair(tmp_path, f"{line}\n".encode(), b"eins\n")
    for _ in range(2):  # also if the pairs are in the cache
        caplog.clear()
        texts = load_translations(str(tmp_path), None, "en", "de")["train"]["translation"][:]
        assert texts == [{"en": line, "de": "eins"}]
        # other libraries may log when their objects are deleted
        records = [it for it in caplog.records if it.name.startswith("vanilla_transformer")]
        assert [record.getMessage() for record in records] == [
            f"The first line of {tmp_path / 'train.en'} has {name}, but whole lines are read: give "
            "a file with only a sentence on each line."
        ]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_training_files_of_iwslt_are_read_without_their_metadata(suffix, tmp_path):
    files = {
        "de": "<url>http://a.b/c</url>\n<keywords>talks, text</keywords>\n<talkid>1</talkid>\n"
        "<title>Der Titel</title>\n<description>Worum es geht</description>\n"
        "Vielen Dank. <Lachen>\n<reviewer href='x'>A</reviewer>\n <translator>B</translator>\n",
        # the sides have a different number of lines with metadata
        "en": '<doc docid="1" genre="lectures">\n<url>http://a.b/c</url>\n<speaker>A</speaker>\n'
        "<title> The title </title>\n<description>What it is about</description>\n"
        "Thank you. <Laughter>\n</doc>\n",
    }
    for language, text in files.items():
        path = tmp_path / f"train.tags.de-en.{language}{suffix}"
        path.write_bytes(gzip.compress(text.encode()) if suffix else text.encode())
    texts = load_translations(str(tmp_path / "train.tags.de-en"), None, "en", "de")
    assert texts["train"]["translation"][:] == [
        {"en": "The title", "de": "Der Titel"},
        {"en": "What it is about", "de": "Worum es geht"},
        {"en": "Thank you. <Laughter>", "de": "Vielen Dank. <Lachen>"},
    ]
    if not suffix:
        path.write_text(f"{files['en']}One more\n", encoding="utf-8")
        with pytest.raises(ValueError, match="same number of lines, got 4 and 3"):
            load_translations(str(tmp_path / "train.tags.de-en"), None, "en", "de")


def test_a_changed_file_is_read_again(tmp_path):
    train_toys.write_corpus(tmp_path, pairs=5)
    assert len(load_translations(str(tmp_path), None, "en", "de")["train"]) == 5
    train_toys.write_corpus(tmp_path, pairs=6)
    assert len(load_translations(str(tmp_path), None, "en", "de")["train"]) == 6


@pytest.mark.parametrize("kind", ["pairs.tsv", "pairs.jsonl", "pairs.parquet", "saved"])
def test_a_cache_that_cannot_be_made_is_named_for_every_kind_of_corpus(tmp_path, monkeypatch, kind):
    path = tmp_path / kind
    rows = datasets.Dataset.from_list([{"en": "a cat", "de": "eine Katze"}])
    if path.suffix == ".tsv":
        path.write_text("en\tde\na cat\teine Katze\n", encoding="utf-8")
    elif path.suffix == ".jsonl":
        rows.to_json(path)
    elif path.suffix == ".parquet":
        rows.to_parquet(path)
    else:
        rows.save_to_disk(path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file/cache")
    with pytest.raises(OSError, match=r"cache of datasets must be .*/file/cache: set .* HF_HOME"):
        load_translations(str(path), None, "en", "de")


@pytest.mark.parametrize("call", ["is_file", "mkdir", "touch"])
def test_a_cache_that_cannot_be_written_is_named_with_its_setting(tmp_path, monkeypatch, call):
    path = tmp_path / "pairs.tsv"
    path.write_text("en\tde\na cat\teine Katze\n", encoding="utf-8")

    original = getattr(Path, call)

    def refuse(path, *arguments, **options):
        if tmp_path / "cache" in (path, *path.parents):
            raise PermissionError(13, "Permission denied")
        return original(path, *arguments, **options)

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(OSError, match=r"cache of datasets must be .*/cache: set .* HF_HOME"):
        load_translations(str(path), None, "en", "de")


# an error of the operating system for a file that grows too large is also one of a full disk
FULL_DISK = """
import resource, sys
from vanilla_transformer.train.data.corpus import load_translations

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, -1))
for path in sys.argv[1:]:
    try:
        load_translations(path, None, "en", "de")
    except OSError as error:
        print(error, error.errno)
"""


def test_a_full_disk_names_the_cache_for_every_kind_of_corpus(tmp_path):
    rows = datasets.Dataset.from_list([{"en": f"cat {i}", "de": f"Katze {i}"} for i in range(5000)])
    rows.to_csv(tmp_path / "pairs.csv")
    rows.to_json(tmp_path / "pairs.jsonl")
    rows.to_parquet(tmp_path / "pairs.parquet")
    paths = [str(tmp_path / f"pairs.{suffix}") for suffix in ("csv", "jsonl", "parquet")]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *paths],
        env={**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    sentences = done.stdout.splitlines()
    assert len(sentences) == 3, done.stderr
    for sentence in sentences:
        assert sentence.startswith(f"the cache of datasets, {tmp_path}/cache, cannot be written")
        assert sentence.endswith("HF_HOME to a folder on another disk. None")


def test_reading_a_file_does_not_invalidate_its_cache(tmp_path):
    train_toys.write_corpus(tmp_path, pairs=5)
    before = load_translations(str(tmp_path), None, "en", "de")["train"]
    for path in tmp_path.iterdir():
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns + 10**9, status.st_mtime_ns))
    after = load_translations(str(tmp_path), None, "en", "de")["train"]
    assert len(before.cache_files) == 1
    assert before.cache_files == after.cache_files


def test_a_local_dataset_of_the_translation_schema_loads(tmp_path):
    (tmp_path / "train.jsonl").write_text(
        '{"translation": {"en": "a", "de": "b"}}\n' * 3, encoding="utf-8"
    )
    assert len(load_translations(str(tmp_path), None, "en", "de")["train"]) == 3
    with pytest.raises(ValueError, match=r"source_lang must be one of de, en .*, got 'fr'"):
        load_translations(str(tmp_path), None, "fr", "de")


def test_a_dataset_without_a_name_is_refused():
    with pytest.raises(ValueError, match="dataset must not be empty, got ''"):
        load_translations("", None, "en", "de")


def test_a_folder_without_the_languages_is_refused_with_the_files_that_it_has(tmp_path):
    write_pair(tmp_path, b"a\n", b"b\n")
    with pytest.raises(ValueError, match=r"cannot be loaded, and has train.de, train.en: "):
        load_translations(str(tmp_path), None, "fr", "cs")
    # the names of FLORES
    for split in ("dev", "devtest"):
        for language in ("eng_Latn", "deu_Latn"):
            (tmp_path / f"{language}.{split}").write_bytes(b"a\n")
    for language in ("en", "de"):
        (tmp_path / f"train.{language}").unlink()
    message = r"and has deu_Latn\.dev, .*: it must have .*, such as train\.en and train\.de$"
    with pytest.raises(ValueError, match=message):
        load_translations(str(tmp_path), None, "en", "de")


def test_a_folder_with_a_test_set_in_xml_is_refused_with_its_files(tmp_path):
    (tmp_path / "newstest2021.de-en.xml").write_text("<dataset/>\n", encoding="utf-8")
    message = r"cannot be loaded, and has newstest2021\.de-en\.xml: it must have a table or records"
    with pytest.raises(ValueError, match=message):
        load_translations(str(tmp_path), None, "en", "de")


def write_pair(folder, english, german):
    (folder / "train.en").write_bytes(english)
    (folder / "train.de").write_bytes(german)


@pytest.mark.parametrize(
    ("english", "german", "message"),
    [
        (b"a\nb\nc\n", b"a\nb\n", "train.de must have the same number of lines, got 3 and 2"),
        (b"a\nb", b"a\nb\n\n", "train.de must have the same number of lines, got 2 and 3"),
        (b"", b"", "at least one line, got none"),
        ("a\nb".encode("utf-16"), b"a\nb", "train.en must be UTF-8, got UTF-16"),
        (b"a\nb", b"\xfe\xff\0a", "train.de must be UTF-8"),
        (
            "„Ō“ is a text\n".encode("utf-16-le"),
            b"a",
            "train.en must be UTF-8, got UTF-16 by its NUL in .*`iconv -f UTF-16LE -t UTF-8`",
        ),
        (b"a\nb", "a\nb\n".encode("utf-16-be"), "train.de must be UTF-8, .* -f UTF-16BE"),
        (
            gzip.compress(b"a\nb", mtime=0),
            b"a\nb",
            "train.en must be text, or have the suffix .gz, got a gzip",
        ),
    ],
)
def test_files_that_are_not_parallel_text_are_refused(english, german, message, tmp_path):
    write_pair(tmp_path, english, german)
    with pytest.raises(ValueError, match=message):
        load_translations(str(tmp_path), None, "en", "de")


@pytest.mark.parametrize("text", ["\0", "a\0", "\0a", "a\0b", "a\0b c\0d", "\0\0\0\0", "a\0\0\0"])
def test_a_nul_is_text(text, tmp_path):
    write_pair(tmp_path, f"{text}\n".encode(), b"a\n")
    rows = load_translations(str(tmp_path), None, "en", "de")["train"]
    assert rows["translation"][:] == [{"en": text, "de": "a"}]


def test_a_truncated_archive_is_refused(tmp_path):
    whole = gzip.compress(b"a line of text\n" * 50)
    (tmp_path / "train.en.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "train.de.gz").write_bytes(whole)
    with pytest.raises(ValueError, match=r"train.en.gz cannot be read to its end"):
        load_translations(str(tmp_path), None, "en", "de")


@pytest.mark.parametrize("name", ["train.en", "train.en.gz", "train.tsv", "train.tmx.xz"])
@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_corpus_in_git_lfs_is_named(name, form, tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n"
    for language in ("en", "de") if name.startswith("train.en") else ("en",):
        (tmp_path / name.replace(".en", f".{language}")).write_bytes(pointer)
    path = tmp_path / (name if corpora.PAIR_FILE.search(name) else "train")
    with pytest.raises(
        ValueError, match=rf"{name} must be a complete file, .* run `git lfs pull` in"
    ):
        load_translations(str(tmp_path if form == "folder" else path), None, "en", "de")


@pytest.mark.parametrize("name", ["train.jsonl", "train.json.gz", "train.parquet", "a/train.csv"])
def test_a_file_of_a_clone_in_git_lfs_is_named(name, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(
        ValueError, match=rf"{name} must be a complete file, got a pointer of Git LFS"
    ):
        load_translations(str(tmp_path), None, "en", "de")


def test_only_a_line_feed_ends_a_line():
    lines = ["\ufeffone\r\n".encode(), "two\u2028three\n".encode(), b"\n", b"four"]
    assert list(read_lines(lines, "stdin")) == ["one", "two\u2028three", "", "four"]
    with pytest.raises(ValueError, match="stdin line 2 must be UTF-8"):
        list(read_lines([b"a\n", b"\xe9\n"], "stdin"))


LONGEST = MAX_LINE_BYTES


def packed_zeros(megabytes):
    """Return a line of zeros, compressed to a thousandth of its length."""
    return gzip.compress(b"0" * (1 << 20)) * megabytes


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_length_of_a_line_is_limited(split, packed, tmp_path):
    opener = gzip.open if packed else open
    for change, is_refused in ((0, False), (1, True), (LONGEST, True)):
        # the line begins in one part of the file and ends in another
        line = b"x" * (LONGEST - 1 + change) + b"\n"
        for language in ("en", "de"):
            for name in ("train", split):
                with opener(tmp_path / f"{name}.{language}{packed}", "wb") as file:
                    file.write(b"a\nb\n" if name != split else b"a\n" + line + b"b")
        if is_refused:
            message = rf"{split}\.en{packed} line 2 must have at most 1,048,576 bytes, got more"
            with pytest.raises(ValueError, match=message):
                load_translations(str(tmp_path), None, "en", "de")
        else:
            rows = load_translations(str(tmp_path), None, "en", "de")[split]
            assert [len(row["en"]) for row in rows["translation"]] == [1, LONGEST - 1, 1]


def test_the_length_of_a_last_line_without_line_feed_is_limited(tmp_path):
    write_pair(tmp_path, b"a\n" + b"x" * (LONGEST + 1), b"a\nb\n")
    with pytest.raises(ValueError, match=r"train\.en line 2 must have at most"):
        load_translations(str(tmp_path), None, "en", "de")


PEAK = """
import resource, sys
from vanilla_transformer.train.data.corpus import load_translations
from vanilla_transformer.train.data.text_files import lines_of, opened, read_lines
from vanilla_transformer.train.translate import arriving_lines
from pathlib import Path

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
folder = Path(sys.argv[1])


def read(path):
    with opened(path) as file:
        return list(read_lines(lines_of(file), str(path)))


def translated(path):
    with opened(path) as file:
        return list(arriving_lines(file, str(path)))


for reader, name in (
    (read, "train.en.gz"),
    (translated, "train.en.gz"),
    *(
        (lambda path: load_translations(str(path), None, "en", "de"), name)
        for name in (".", "x.tsv.gz", "x.csv.gz", "line.jsonl.gz", "list.json.gz", "x.tmx.gz")
    ),
):
    try:
        reader(folder / name)
    except ValueError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_a_packed_line_of_any_length_is_refused_in_bounded_memory(tmp_path):
    zeros = packed_zeros(1000)
    for name in ("train.en.gz", "train.de.gz", "x.tsv.gz", "x.csv.gz", "line.jsonl.gz"):
        (tmp_path / name).write_bytes(zeros)
    for name, start in (
        ("list.json.gz", b'[{"translation": {"en": "'),
        ("x.tmx.gz", b'<tmx><body><tu><tuv xml:lang="en"><seg>'),
    ):
        (tmp_path / name).write_bytes(gzip.compress(start) + zeros)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    *sentences, megabytes = done.stdout.splitlines()
    assert [sentence.count("must ") for sentence in sentences] == [1] * 8, sentences
    assert all("line 1 must have at most 1,048,576 bytes" in it for it in sentences[:5])
    assert all("at most 10,485,760 bytes" in it for it in sentences[5:])
    assert int(megabytes) < 200


def test_a_language_without_its_file_is_named(corpus):
    with pytest.raises(ValueError, match=r"train\.fr must exist beside .*train\.en"):
        load_translations(str(corpus), None, "en", "fr")


def test_a_missing_dataset_is_refused(tmp_path):
    for name in (
        "notes.txt",
        "newstest.en.sgm",
        "corpus.txt.ZIP",
        "corpus.tar.xz",
        "de.po",
        "pairs.XLSX",
    ):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"Hub name, got 'a--b/c': no such folder"):
        load_translations("a--b/c", None, "en", "de")
    for name, sentence in (
        ("nothing", "dataset must be a file, a folder or a Hub name, got .*: no such folder"),
        ("nothing.jsonl", "dataset must be a file that exists, got"),
        (
            "notes.txt",
            "must be a file of records .*, a table .*, or the prefix of two text files, before .en"
            r".*notes.txt'\. If tabs separate its columns, give it the suffix .tsv\. If it has",
        ),
        (
            "newstest.en.sgm",
            r"newstest.en.sgm'\. Write the text of its segments to a text file for",
        ),
        ("de.po", r"got '.*de.po'\. Convert it to a translation memory \(\.tmx\)\."),
        ("pairs.XLSX", r"got '.*pairs.XLSX'\. Save it as a table \(\.csv\)\."),
        ("corpus.txt.ZIP", r"got '.*corpus.txt.ZIP'\. Unpack the archive\."),
        ("corpus.tar.xz", r"got '.*corpus.tar.xz'\. Unpack the archive\."),
    ):
        with pytest.raises(ValueError, match=sentence):
            load_translations(str(tmp_path / name), None, "en", "de")


@pytest.mark.parametrize("suffix", ["", ".gz", ".GZ"])
def test_one_of_two_text_files_names_their_prefix(suffix, tmp_path):
    prefix = tmp_path / "news.v1"
    for language in ("en", "pt_BR"):
        Path(f"{prefix}.{language}{suffix}").touch()
        Path(f"{tmp_path / 'alone'}.{language}x").touch()
    for language in ("en", "pt_BR"):
        with pytest.raises(ValueError, match=rf"Did you mean the prefix '{prefix}'\?"):
            load_translations(f"{prefix}.{language}{suffix}", None, "en", "pt_BR")
    with pytest.raises(ValueError, match=r"got '.*alone\.enx'\.$"):
        load_translations(str(tmp_path / "alone.enx"), None, "en", "pt_BR")


@pytest.mark.parametrize("prefix", ["news.v1", "wmt/news"])
def test_a_prefix_of_files_in_other_languages_is_refused_with_them(prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wmt").mkdir()
    for suffix in ("pt_BR.gz", "fr", "md", "v1"):
        Path(f"{prefix}.{suffix}").touch()
    message = (
        rf"before \.en and \.de, got '{prefix}', which has files in fr, pt_BR: set source_lang"
    )
    with pytest.raises(ValueError, match=message):
        load_translations(prefix, None, "en", "de")


@pytest.mark.parametrize(
    ("suffixes", "message"),
    [
        (("src.gz", "trg.gz"), r"in src, trg: set .*, or rename the files\."),
        (("eng_Latn", "DEU"), r"in DEU, eng_Latn: set .*, or rename the files\."),
        (("en.txt", "de.txt"), r"in de\.txt, en\.txt: rename the files, without \.txt\."),
    ],
)
def test_a_prefix_of_files_with_other_endings_is_refused_with_them(suffixes, message, tmp_path):
    for suffix in suffixes:
        (tmp_path / f"news.{suffix}").touch()
    with pytest.raises(ValueError, match=rf"before \.en and \.de, got '.*news', .* {message}"):
        load_translations(str(tmp_path / "news"), None, "en", "de")


@pytest.mark.parametrize("name", ["a[1]", "*", "a?"])
def test_a_folder_whose_name_is_a_pattern_is_not_read_as_another_folder(
    name, tmp_path, monkeypatch
):
    record = '{"translation": {"en": "a", "de": "b"}}\n'
    for folder, num_records in (("a1", 1), (name, 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(record * num_records, encoding="utf-8")
    path = tmp_path / name
    with pytest.raises(ValueError, match=r"absolute path has no \*, \? or \[, .* rename the"):
        load_translations(str(path), None, "en", "de")
    monkeypatch.chdir(path)
    with pytest.raises(ValueError, match=r"absolute path has no \*, \? or \[, .* rename the"):
        load_translations(".", None, "en", "de")
    # other readers find the folder as it is called
    assert len(load_translations(str(path / "train.jsonl"), None, "en", "de")["train"]) == 2
    (path / "train.jsonl").rename(path / "train.tsv")
    (path / "train.tsv").write_text("a\tb\n" * 3, encoding="utf-8")
    assert len(load_translations(str(path), None, "en", "de")["train"]) == 3


@pytest.mark.parametrize("dataset", ["a::b", "a::b/train.jsonl"])
def test_a_path_that_the_library_would_split_is_named(dataset, tmp_path):
    (tmp_path / "a::b").mkdir()
    path = tmp_path / "a::b/train.jsonl"
    path.write_text('{"translation": {"en": "a", "de": "b"}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"have no :: in its absolute path.* rename the folder"):
        load_translations(str(tmp_path / dataset), None, "en", "de")


def test_a_dataset_script_is_refused(tmp_path):
    (tmp_path / f"{tmp_path.name}.py").touch()
    with pytest.raises(ValueError, match=r"loaded, and has .*py: Dataset scripts are no longer"):
        load_translations(str(tmp_path), None, "en", "de")


def test_a_dataset_without_translations_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"must have a column 'translation'.*, got text"):
        load_translations(str(tmp_path), None, "en", "de")


def test_invalid_utf_8_is_replaced_in_a_training_split(tmp_path):
    write_pair(tmp_path, b"a\nb\n", b"a\n\xff\xfe\n")
    rows = load_translations(str(tmp_path), None, "en", "de")["train"]
    assert rows["translation"][1] == {"en": "b", "de": "\ufffd\ufffd"}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_invalid_utf_8_is_an_error_in_an_evaluation_split(split, tmp_path):
    train_toys.write_corpus(tmp_path, pairs=3)
    (tmp_path / f"{split}.de").write_bytes(b"a\n\xe9\n")
    (tmp_path / f"{split}.en").write_bytes(b"a\nb\n")
    with pytest.raises(ValueError, match=rf"{split}\.de line 2 must be UTF-8"):
        load_translations(str(tmp_path), None, "en", "de")


def garbled_table(german):
    """Return a table in which bytes that are not UTF-8 have the type of text."""
    raw = pa.array(german, pa.binary())
    texts = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2])
    english = pa.array(["x"] * len(german))
    return pa.table({"translation": pa.StructArray.from_arrays([english, texts], ["en", "de"])})


def test_invalid_utf_8_in_a_table_is_named_or_replaced():
    table = garbled_table([b"fein", b"sch\xf6n"])
    with pytest.raises(ValueError, match="validation line 12 in 'de' must be UTF-8"):
        texts_of(table, ["en", "de"], "validation", first_line=11)
    sides = texts_of(table, ["en", "de"], "train", repair=True)
    assert sides == [["x", "x"], ["fein", "sch\ufffdn"]]


def test_the_hash_of_a_text_does_not_depend_on_its_storage(corpus, tmp_path):
    languages = ["en", "de"]
    rows = load_translations(str(corpus), None, *languages)["train"]
    expected = text_hash(rows, languages, "train")
    pairs = rows["translation"][:]
    # other files, another order of columns, other chunks, a part of a larger table
    lines = "".join(
        json.dumps({"translation": dict(reversed(pair.items()))}) + "\n" for pair in pairs
    )
    (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8")
    others = [
        load_translations(str(tmp_path), None, *languages)["train"],
        datasets.concatenate_datasets([rows.select(range(40)), rows.select(range(40, 90))]),
        datasets.concatenate_datasets([rows, rows]).select(range(90, 180)),
        rows.select(list(range(90))[::-1]).select(list(range(90))[::-1]),
    ]
    assert [text_hash(other, languages, "train") for other in others] == [expected] * 4
    # one character, one pair, the direction, and the boundary of a text change the hash
    changed = [
        datasets.Dataset.from_list([{"translation": pair} for pair in altered])
        for altered in (
            [pairs[0] | {"en": pairs[0]["en"] + "x"}, *pairs[1:]],
            pairs[1:],
            [pairs[0] | {"en": pairs[0]["en"] + pairs[1]["en"]}, pairs[1] | {"en": ""}, *pairs[2:]],
        )
    ]
    found = [text_hash(other, languages, "train") for other in changed] + [
        text_hash(rows, ["de", "en"], "train")
    ]
    assert len({expected, *found}) == 5


@pytest.mark.parametrize("dataset", ["demo", "a folder"])
def test_a_revision_of_a_local_dataset_is_refused(dataset, corpus):
    dataset = str(corpus) if dataset == "a folder" else dataset
    with pytest.raises(ValueError, match=r"revision must be null because .* got 'v1'"):
        load_translations(dataset, None, "en", "de", revision="v1")


def wmt14(validation, test, name="de-en"):
    language = name.removesuffix("-en")
    return datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict({"translation": [{"en": "a", language: "b"}] * lines})
            for split, lines in (("train", 5), ("validation", validation), ("test", test))
            if lines is not None
        }
    )


@pytest.fixture
def on_hub(monkeypatch):
    """Function that sets the splits that the library finds on the Hub."""

    def found(splits):
        monkeypatch.setattr(corpora, "check_local", lambda *args: None)
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **options: None)
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: splits)

    return found


@pytest.mark.parametrize(
    ("name", "validation", "test"),
    [("de-en", 3000, 3003), ("fr-en", 3000, 3003), ("hi-en", 520, 2507)],
)
def test_a_complete_wmt14_is_accepted(name, validation, test, on_hub):
    on_hub(wmt14(validation, test, name))
    splits = load_translations("wmt/wmt14", name, "en", name.removesuffix("-en"))
    assert [len(rows) for rows in splits.values()] == [5, validation, test]


@pytest.mark.parametrize(
    ("validation", "test", "message"),
    [
        (3000, 2737, "test of wmt/wmt14 de-en must have 3,003 lines, got 2,737"),
        (2999, 3003, "validation of wmt/wmt14 de-en must have 3,000 lines, got 2,999"),
        (3000, None, "test of wmt/wmt14 de-en must have 3,003 lines, got 0"),
    ],
)
def test_an_incomplete_wmt14_is_refused(validation, test, message, on_hub):
    on_hub(wmt14(validation, test))
    # the Hub redirects from the former name
    for dataset in ("wmt/wmt14", "wmt14"):
        with pytest.raises(ValueError, match=message):
            load_translations(dataset, "de-en", "en", "de")


def test_a_folder_can_have_the_name_of_a_dataset_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "validation"):
        for language in ("de", "en"):
            path = tmp_path / "wmt14" / f"{split}.{language}"
            path.parent.mkdir(exist_ok=True)
            path.write_text("ein Haus\n", encoding="utf-8")
    splits = load_translations("wmt14", None, "en", "de")
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 1, "validation": 1}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_file_whose_lines_end_with_carriage_returns_is_named(split, tmp_path):
    write_pair(tmp_path, b"a\nb\n", b"a\nb\n")
    (tmp_path / f"{split}.en").write_bytes(b"a\rb\r")
    (tmp_path / f"{split}.de").write_bytes(b"a\nb\n")
    for end in (b"a\nb\n", b"a\rb\r"):
        (tmp_path / f"{split}.de").write_bytes(end)
        with pytest.raises(ValueError, match=r"\.en must end its lines with line feeds, got none"):
            load_translations(str(tmp_path), None, "en", "de")
    write_pair(tmp_path, b"a\r\nb\r\n", b"a\nb\r")
    (tmp_path / f"{split}.de").write_bytes(b"a\rc\nb")
    (tmp_path / f"{split}.en").write_bytes(b"a\r\nb\r\n")
    rows = load_translations(str(tmp_path), None, "en", "de")[split]
    assert rows["translation"][0] == {"en": "a", "de": "a\rc"}


def test_a_dataset_is_loaded_at_its_revision_and_its_commit_is_known(tmp_path):
    code = """
import sys
from vanilla_transformer.train.data.corpus import dataset_commit, load_translations
for revision in (None, "old", sys.argv[1]):
    rows = load_translations("some/corpus", None, "en", "de", revision=revision)["train"]
    print(len(rows), dataset_commit("some/corpus", None, revision, "en", "de"))
streamed = load_translations(
    "some/corpus", None, "en", "de", revision="old", streaming=True
)["train"]
print(len(list(streamed)), streamed.num_shards)
"""
    for pairs in (3, 4):
        folder = tmp_path / f"{pairs}"
        folder.mkdir()
        line = '{"translation": {"en": "a", "de": "b"}}\n'
        (folder / "train.jsonl").write_text(line * pairs, encoding="utf-8")
    with running_hub() as hub:
        hub.add_folder("some/corpus", tmp_path / "3", "datasets")
        repository = hub.repositories["datasets", "some/corpus"]
        old = repository.at("main").oid
        repository.tags["old"] = old
        content = (tmp_path / "4/train.jsonl").read_bytes()
        repository.commit("main", "one more", {"train.jsonl": StoredFile(content, False)})
        new = repository.at("main").oid
        done = subprocess.run(
            [sys.executable, "-c", code, old],
            env={**os.environ, **hub.environment(tmp_path / "home")},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == [f"4 {new}", f"3 {old}", f"3 {old}", "3 1"]


def test_records_from_the_hub_are_available_offline_after_the_first_read(tmp_path):
    code = """
from vanilla_transformer.train.data.corpus import load_translations
for pair in (("en", "de"), ("fr", "de")):
    print(load_translations("some/MyCorpus", None, *pair)["train"]["translation"][:])
"""
    records = '{"translation": {"en": "a", "de": "b", "fr": "c"}}\n'
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/train.jsonl").write_text(records, encoding="utf-8")

    def read(**environment):
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **hub.environment(tmp_path / "home"), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    with running_hub() as hub:
        hub.add_folder("some/MyCorpus", tmp_path / "corpus", "datasets")
        done = read()
        assert done.returncode == 0, done.stderr
        assert done.stdout == "[{'de': 'b', 'en': 'a'}]\n[{'de': 'b', 'fr': 'c'}]\n"
    assert read(HF_HUB_OFFLINE="1").stdout == done.stdout


def test_a_file_without_text_does_not_make_a_dataset_local(tmp_path):
    (tmp_path / "books.yaml").touch()
    (tmp_path / "news.en").touch()
    (tmp_path / "web.zh-Hant.gz").touch()
    assert not is_local(str(tmp_path / "books"), "en", "zh-Hant")
    assert is_local(str(tmp_path / "news"), "en", "zh-Hant")
    assert is_local(str(tmp_path / "web"), "en", "zh-Hant")
    assert is_local(str(tmp_path), "en", "zh-Hant")
    assert is_local("demo", "en", "zh-Hant")


@pytest.mark.parametrize(
    ("name", "languages"),
    [("pre", ("source", "target")), ("upp", ("EN", "DE")), ("corp[1]", ("en", "de"))],
)
def test_text_files_with_any_name_are_not_a_dataset_of_the_hub(name, languages, tmp_path):
    for language in languages:
        (tmp_path / f"{name}.{language}").write_text(f"{language}\n", encoding="utf-8")
    source_lang, target_lang = languages
    place = {"dataset": str(tmp_path / name), "name": None}
    config = TrainConfig(**place, source_lang=source_lang, target_lang=target_lang)
    texts = load_texts(config)
    assert texts.train[0]["translation"][:] == [dict(zip(languages, languages, strict=True))]
    assert texts.commits == [None]
    with pytest.raises(ValueError, match="revision must be null"):
        load_texts(dataclasses.replace(config, revision="v1"))


def write_table(path, pairs=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{path.stem} {number}\tb\n" for number in range(pairs)))


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
@pytest.mark.parametrize("kind", ["table", "text files", "records", "saved"])
def test_a_validation_split_has_one_of_four_names(name, kind, tmp_path):
    pair = {"en": "a", "de": "b"}
    for split in ("train", name):
        if kind == "table":
            write_table(tmp_path / f"{split}.tsv")
        elif kind == "text files":
            for language in pair:
                (tmp_path / f"{split}.{language}").write_text("a\n")
        elif kind == "records":
            (tmp_path / f"{split}.jsonl").write_text(json.dumps(pair))
    if kind == "saved":
        rows = datasets.Dataset.from_list([pair])
        datasets.DatasetDict({"train": rows, name: rows}).save_to_disk(tmp_path)
    assert set(load_translations(str(tmp_path), None, "en", "de")) == {"train", "validation"}


@pytest.mark.parametrize("names", [("val", "dev"), ("valid", "dev"), ("valid", "val", "dev")])
def test_several_splits_for_validation_are_refused_without_one_of_this_name(names, tmp_path):
    rows = datasets.Dataset.from_list([{"en": "a", "de": "b"}])
    splits = dict.fromkeys(("train", *names), rows)
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    message = f"must have one split for validation, got {' and '.join(names)}: give one"
    with pytest.raises(ValueError, match=message):
        load_translations(str(tmp_path / "saved"), None, "en", "de")
    datasets.DatasetDict({**splits, "validation": rows}).save_to_disk(tmp_path / "named")
    assert "validation" in load_translations(str(tmp_path / "named"), None, "en", "de")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train.en", "train.de", "train.tsv"), r"train\.en and \S+train\.de and \S+train\.tsv\."),
        (
            ("train.tsv", "train.csv"),
            r"split train must be .* \S+train\.tsv and \S+train\.csv\.",
        ),
        (("train.tsv", "train.jsonl"), r"\S+train\.tsv and \S+train\.jsonl\."),
        (("train.parquet", "train.jsonl"), r"\S+train\.jsonl and \S+train\.parquet\."),
        (("train.en", "train.en.gz", "train.de"), r"train\.en and \S+train\.en\.gz and \S+train"),
        (("train.tsv", "validation.tsv", "dev.tsv"), r"split validation must be .*dev\.tsv\."),
        (("train.tsv", "test.jsonl"), r"must all be records .*train\.tsv beside \S+test\.jsonl\."),
    ],
)
def test_a_file_that_would_not_be_read_is_named(names, message, tmp_path):
    for name in names:
        write_table(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        load_translations(str(tmp_path), None, "en", "de")


def test_a_folder_without_the_names_of_splits_lists_its_files(tmp_path):
    for name in ("corpus.en", "corpus.de", "README.de"):
        write_table(tmp_path / "moses" / name)
    hint = r"with corpus\.de, corpus\.en\. To read corpus\.\*, set --dataset \S+moses/corpus\."
    with pytest.raises(ValueError, match=f"must be a file, or a folder with files named .*{hint}"):
        load_translations(str(tmp_path / "moses"), None, "en", "de")
    for prefix in ("dev.tok", "train.tok", "train.bpe"):
        for language in ("en", "de"):
            write_table(tmp_path / "tok" / f"{prefix}.{language}")
    with pytest.raises(
        ValueError, match=r"To read train\.bpe\.\*, set --dataset \S+tok/train\.bpe"
    ):
        load_translations(str(tmp_path / "tok"), None, "en", "de")
    for name in ("train-00000-of-00002.tsv", "validation.tsv"):
        write_table(tmp_path / "shards" / name)
    config = TrainConfig(dataset=str(tmp_path / "shards"), name=None)
    message = r"got validation in a folder with train-00000-of-00002\.tsv, validation\.tsv\."
    with pytest.raises(ValueError, match=message):
        load_texts(config)


def test_text_files_of_a_split_may_have_longer_names_if_there_are_only_two(tmp_path):
    prefixes = ("train.en-de", "dev.tok", "test.2016", "test.2017", "notes.train")
    for prefix in prefixes:
        for language in ("en", "de"):
            write_table(tmp_path / f"{prefix}.{language}")
    splits = load_translations(str(tmp_path), None, "en", "de")
    assert {split: rows["translation"][0]["en"] for split, rows in splits.items()} == {
        "train": "train.en-de 0\tb",
        "validation": "dev.tok 0\tb",
    }
    for path in tmp_path.glob("test.2016.*"):
        path.unlink()
    for language in ("en", "de"):
        write_table(tmp_path / f"train.{language}")
    splits = load_translations(str(tmp_path), None, "en", "de")
    assert splits["train"]["translation"][0]["en"] == "train 0\tb"
    assert splits.keys() == {"train", "validation", "test"}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_that_datasets_has_saved_loads_without_its_cache_files(streaming, tmp_path):
    rows = datasets.Dataset.from_list([{"en": "a", "de": "b"}] * 3)
    rows.save_to_disk(tmp_path / "rows")
    datasets.load_from_disk(tmp_path / "rows").map(lambda row: {"en": row["en"] + "!"})
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "both")
    datasets.load_from_disk(tmp_path / "both").map(lambda row: {"en": row["en"] + "!"})
    assert list((tmp_path / "rows").glob("cache-*")), "`map` wrote no file"
    for name, lengths in (
        ("rows", {"train": 3}),
        ("both", {"train": 3, "test": 1}),
        ("both/test", {"train": 1}),
    ):
        splits = load_translations(str(tmp_path / name), None, "en", "de", streaming=streaming)
        assert {split: len(list(rows)) for split, rows in splits.items()} == lengths
        assert next(iter(splits["train"])) == {"translation": {"en": "a", "de": "b"}}


@pytest.mark.parametrize("text", ["{}", "[", '{"_data_files": [5]}', '{"splits": "train"}'])
def test_a_damaged_folder_of_datasets_is_refused_with_the_damaged_file(text, tmp_path):
    rows = datasets.Dataset.from_list([{"en": "a", "de": "b"}])
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "both")
    for name, file in (("rows", "state.json"), ("both", "dataset_dict.json")):
        (tmp_path / name / file).write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{name}/{file}\b.* must "):
            load_translations(str(tmp_path / name), None, "en", "de")
