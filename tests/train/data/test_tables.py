"""Tables and records with a column for each language: the same pairs in files of every kind."""

import gzip
import json
import logging
import tempfile
import zipfile
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import train_toys
from corpus_files import OPENERS, as_csv, as_jsonl, as_tmx, as_tsv, write_every_kind
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather

from vanilla_transformer.train.data.corpus import (
    SPLITS,
    has_columns,
    is_hub_name,
    load_translations,
    text_hash,
)
from vanilla_transformer.train.data.prepare import load_texts
from vanilla_transformer.train.data.text_files import MAX_LINE_BYTES
from vanilla_transformer.train.recipe import load_config

LANGUAGES = ("en", "de")
PAIRS = [(f'"{number}" of, a; b', f'„{number}“ 5" & <c>') for number in range(9)]
# without what ends a line or a column, and what XML cannot hold
TEXT = st.text(
    st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufeff\ufffe\uffff"),
    max_size=20,
)


@pytest.fixture(params=[False, True], ids=["stored", "streamed"])
def streaming(request):
    return request.param


def read(dataset, streaming=False, columns=None, split="train"):
    """Return the pairs of a split."""
    found = load_translations(str(dataset), None, *LANGUAGES, streaming=streaming, columns=columns)
    return [tuple(row["translation"][it] for it in LANGUAGES) for row in found[split]]


def write(path, text):
    """Write a file exactly as given."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6))
@settings(max_examples=12)
def test_the_same_pairs_are_the_same_text_in_every_kind_of_file(pairs):
    hashes = set()
    with tempfile.TemporaryDirectory() as folder:
        names = write_every_kind(Path(folder), pairs)
        for name in names:
            rows = load_translations(name, None, *LANGUAGES)["train"]
            hashes.add(text_hash(rows, LANGUAGES, "train"))
    assert len(names) == 9
    assert len(hashes) == 1


@pytest.mark.parametrize("compression", OPENERS)
def test_every_kind_of_file_can_be_compressed_and_streamed(compression, streaming, tmp_path):
    for name in write_every_kind(tmp_path, PAIRS, compression):
        assert read(name, streaming) == PAIRS, name


def test_suffixes_are_read_in_any_case(streaming, tmp_path):
    for compression in ("", ".gz"):
        for name in write_every_kind(tmp_path, PAIRS, compression)[:-2]:
            path = Path(name)
            path = path.rename(path.with_name(path.name.upper()))
            assert read(path, streaming) == PAIRS
    for language in LANGUAGES:
        (tmp_path / f"moses.{language}.gz").rename(tmp_path / f"packed.{language}.GZ")
    assert read(tmp_path / "packed", streaming) == PAIRS
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("train.JSONL", "dev.jsonl", "test.Json.GZ"):
        with OPENERS[".gz" if name.endswith("GZ") else ""](folder / name, "wt") as file:
            file.write(as_jsonl(PAIRS))
    for split in SPLITS:
        assert read(folder, streaming, split=split) == PAIRS
    with pytest.raises(ValueError, match="dataset must be a file that exists"):
        read("some/pairs.TSV")


def test_a_folder_has_a_file_of_any_kind_for_each_split(streaming, tmp_path):
    write(tmp_path / "train.tsv", as_tsv(PAIRS))
    write(tmp_path / "validation.CSV", as_csv(PAIRS[:4]))
    write(tmp_path / "test.Tmx", as_tmx(PAIRS[:2]))
    found = {split: read(tmp_path, streaming, split=split) for split in SPLITS}
    assert found == {"train": PAIRS, "validation": PAIRS[:4], "test": PAIRS[:2]}


@pytest.mark.parametrize(
    "names",
    [
        ("train/a.tsv", "validation/b.tsv"),
        ("data/train.csv", "data/dev.csv"),
        ("data/train-00000-of-00001.tsv", "data/validation-00000-of-00001.tsv"),
    ],
)
def test_tables_in_subfolders_are_read_by_the_same_rules(names, streaming, tmp_path):
    pairs = [*PAIRS, ("NA", '"null'), ("5", "a")]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        write(path, (as_csv if path.suffix == ".csv" else as_tsv)(pairs))
    assert [read(tmp_path, streaming, split=split) for split in SPLITS[:2]] == [pairs] * 2


def test_several_tables_of_a_subfolder_are_read_one_after_another(streaming, tmp_path):
    (tmp_path / "train").mkdir()
    for index in range(3):
        write(tmp_path / f"train/{index}.tsv", as_tsv(PAIRS[3 * index :][:3]))
    assert read(tmp_path, streaming) == PAIRS


def test_packed_tables_and_text_without_a_language_are_refused_with_what_to_do(tmp_path):
    for folder in ("packed", "text"):
        (tmp_path / folder).mkdir()
    with zipfile.ZipFile(tmp_path / "packed/train.zip", "w") as archive:
        archive.writestr("train.csv", as_csv(PAIRS))
    with pytest.raises(ValueError, match=r"train\.zip must be a table \(.tsv or .csv\): unpack it"):
        read(tmp_path / "packed")
    for language in LANGUAGES:
        write(tmp_path / f"text/train.{language}.txt", "a\n")
    message = r"has train\.de\.txt, train\.en\.txt: text must be .* such as train\.en and train\.de"
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "text")


def test_a_stream_of_a_table_resumes_in_the_middle(tmp_path):
    for name in write_every_kind(tmp_path, PAIRS):
        rows = load_translations(name, None, *LANGUAGES, streaming=True)["train"]
        stream = rows.with_format("arrow")
        tables = stream.iter(2)
        texts = next(tables)["translation"].to_pylist()
        state = stream.state_dict()
        again = load_translations(name, None, *LANGUAGES, streaming=True)["train"]
        again = again.with_format("arrow")
        again.load_state_dict(state)
        for table in again.iter(2):
            texts += table["translation"].to_pylist()
        assert [(text["en"], text["de"]) for text in texts] == PAIRS, name


def test_quotes_are_text_in_tabs_and_quote_in_csv(tmp_path):
    write(tmp_path / "x.tsv", '"a" b\t"c\n"d\te\n')
    assert read(tmp_path / "x.tsv") == [('"a" b', '"c'), ('"d', "e")]
    write(tmp_path / "x.csv", 'id,de,en\r\n1,"c, ""d""","a\r\nb"\r\n2,5" e,f\r\n')
    assert read(tmp_path / "x.csv") == [("a\nb", 'c, "d"'), ("f", '5" e')]


def test_quotes_of_csv_in_a_table_with_tabs_are_text_with_a_warning(tmp_path, caplog):
    rows = [("a", "b"), ('"a"', '""b""'), ('say "a"', "b"), ("c", '"d"')]
    write(tmp_path / "x.tsv", as_tsv(rows))
    assert read(tmp_path / "x.tsv") == rows
    assert caplog.messages == []
    # pandas and Excel write tables so
    text = as_csv(rows, delimiter="\t")
    write(tmp_path / "x.tsv", text)
    assert read(tmp_path / "x.tsv")[2] == ('"say ""a"""', "b")
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path / 'x.tsv'} line 3 has quotes as in CSV, which are read ")
    write(tmp_path / "x.csv", f"sep=\t\n{text}")
    assert read(tmp_path / "x.csv") == rows


@pytest.mark.parametrize("separator", [",", ";", "|", "\t"])
def test_a_csv_file_can_name_its_separator(separator, streaming, tmp_path):
    write(tmp_path / "x.csv", f"\ufeffsep={separator}\r\n{as_csv(PAIRS, delimiter=separator)}")
    assert read(tmp_path / "x.csv", streaming) == PAIRS


@pytest.mark.parametrize("line", ['"sep=;"', "SEP=;"])
def test_the_line_that_names_the_separator_may_be_quoted_or_in_capitals(line, tmp_path):
    write(tmp_path / "x.csv", f"{line}\r\nen;de\r\na, b;c\r\n")
    assert read(tmp_path / "x.csv") == [("a, b", "c")]


def test_a_space_before_the_quotes_of_csv_makes_them_text_with_a_warning(tmp_path, caplog):
    write(tmp_path / "x.csv", 'en, de\na "b",c "d"\n" a","b"\n')
    assert read(tmp_path / "x.csv") == [('a "b"', 'c "d"'), (" a", "b")]
    assert caplog.messages == []
    write(tmp_path / "x.csv", 'en, de\n"a", "b"\n"c", "d"\n')
    assert read(tmp_path / "x.csv") == [("a", ' "b"'), ("c", ' "d"')]
    (warning,) = caplog.messages
    assert warning.endswith(
        "x.csv line 2 has quotes as in CSV, which are read as text. To read the text without "
        "quotes, remove the spaces before the quotes."
    )


def test_empty_lines_before_a_table_do_not_hide_its_separator(tmp_path):
    for delimiter in (",", ";"):
        write(tmp_path / "x.csv", "\n\r\n" + as_csv(PAIRS, delimiter=delimiter))
        assert read(tmp_path / "x.csv") == PAIRS
    write(tmp_path / "x.csv", "\n\nen;de\na;b;c\n")
    with pytest.raises(ValueError, match="line 4 must have 2 columns, as line 3 has, got 3"):
        read(tmp_path / "x.csv")


@pytest.mark.parametrize(
    "pair",
    [
        ("English", "Englisch"),
        ("a source", "target"),
        ("target", "das Ziel"),
        ("is German", "ist Deutsch"),
        ("Latin", "Latin"),
    ],
)
def test_a_first_line_with_a_pair_is_not_taken_for_names(pair, tmp_path):
    write(tmp_path / "x.tsv", as_tsv([pair], header=None))
    assert read(tmp_path / "x.tsv") == [pair]


def test_the_columns_of_a_table_without_names_are_logged_with_their_first_texts(
    streaming, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "vanilla_transformer")
    path = write(tmp_path / "x.tsv", "Deutsch\tEnglisch\nHaus\thouse\n")
    for _ in range(2):
        read(path, streaming)
    message = (
        f"{path} has no names of columns: column 1 is read as en ('Deutsch'), column 2 is read as "
        "de ('Englisch'). To read them in the other order: --columns '{en: 2, de: 1}'."
    )
    assert caplog.messages == [message]
    caplog.clear()
    read(write(tmp_path / "x.csv", "1,a,b\n"), streaming, {"en": 3, "de": 2})
    message = "x.csv has no names of columns: column 3 is read as en ('b'), column 2 is read as de "
    assert caplog.messages == [f"{tmp_path}/{message}('a')."]
    caplog.clear()
    read(write(tmp_path / "x.tsv", "de\ten\nHaus\thouse\n"), streaming)
    assert caplog.messages == []


def test_a_csv_file_with_semicolons_and_no_names_is_refused_with_the_line_that_it_needs(tmp_path):
    path = write(tmp_path / "x.csv", "a, b;c, d\ne;f\n")
    columns = {"en": 1, "de": 2}
    message = r"line 2 must have 3 columns, .* got 1\. If ';' separates .*, add the line sep=; bef"
    with pytest.raises(ValueError, match=message):
        read(path, columns=columns)
    write(path, f"sep=;\n{path.read_text()}")
    assert read(path, columns=columns) == [("a, b", "c, d"), ("e", "f")]


@pytest.mark.parametrize("name", ["news-commentary-v16.de-en.tsv", "DE-EN.tsv.gz"])
def test_a_name_with_the_target_first_needs_the_columns(name, streaming, tmp_path):
    text = b"b\ta\nd\tc\n"
    write(tmp_path / name, gzip.compress(text) if name.endswith(".gz") else text)
    message = rf"{name}, because its name has de-en, .* in de: --columns '{{en: 2, de: 1}}'\."
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name, streaming)
    assert read(tmp_path / name, streaming, {"en": 2, "de": 1}) == [("a", "b"), ("c", "d")]
    for name in ("news.en-de.tsv", "nde-en.tsv"):
        write(tmp_path / name, text)
        assert read(tmp_path / name, streaming) == [("b", "a"), ("d", "c")]


def test_a_missing_text_in_the_ted_talks_is_empty(tmp_path):
    write(tmp_path / "x.tsv", "talk_name\ten\tde\n1\ta\t__NULL__\n1\tb\tc\n")
    assert read(tmp_path / "x.tsv") == [("a", ""), ("b", "c")]


def test_columns_are_found_by_name_in_any_order_and_case(tmp_path):
    write(tmp_path / "x.tsv", "\ufeffid\t DE\tEn\r\n1\tb\ta\r\n\r\n2\td\tc\r\n")
    assert read(tmp_path / "x.tsv") == [("a", "b"), ("c", "d")]


def test_the_setting_columns_names_or_numbers_them(streaming, tmp_path):
    write(tmp_path / "x.tsv", "7\ta\tby me\tb\n8\tc\tby you\td\n")
    assert read(tmp_path / "x.tsv", streaming, {"en": 2, "de": 4}) == [("a", "b"), ("c", "d")]
    # a text that is a number is no name of a column
    write(tmp_path / "n.tsv", "2\t1\n3\t4\n")
    assert read(tmp_path / "n.tsv", streaming, {"en": 2, "de": 1}) == [("1", "2"), ("4", "3")]
    names = {"en": "Source", "de": "Target"}
    rows = [{"Source": "a", "Target": "b", "en": 5, "translation": {"en": "x", "de": "y"}}]
    write(tmp_path / "x.jsonl", json.dumps(rows[0]))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "x.parquet"))
    write(tmp_path / "x.csv", "Source,Target,en,de\na,b,x,y\n")
    # the type of text in files of Polars and DuckDB
    table = pa.table({name: pa.array([rows[0][name]], pa.string_view()) for name in names.values()})
    feather.write_feather(table, tmp_path / "x.arrow", compression="uncompressed")
    for name in ("x.jsonl", "x.parquet", "x.csv", "x.arrow"):
        assert read(tmp_path / name, streaming, names) == [("a", "b")], name


@pytest.mark.parametrize("root", ["translation", "data"])
def test_columns_can_be_fields_of_other_fields(root, streaming, tmp_path):
    rows = [{root: {"eng_Latn": "a", "deu": {"text": "b"}}, "en": "x", "id": 1}]
    rows += [{root: {"eng_Latn": "c", "deu": None}, "en": "x", "id": 2}]
    write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "x.parquet"))
    columns = {"en": f"{root}.eng_Latn", "de": f"{root}.deu.text"}
    for name in ("x.jsonl", "x.parquet"):
        assert read(tmp_path / name, streaming, columns) == [("a", "b"), ("c", None)], name
        for wrong in (f"{root}.deu_Latn", f"{root}.deu", root):
            with pytest.raises(ValueError, match=rf"{wrong}|must have a text in"):
                read(tmp_path / name, streaming, {**columns, "de": wrong})
    # a dot can also be part of a name
    rows = [{"a.b": "c", "a": {"b": "x", "c": "d"}}]
    write(tmp_path / "x.jsonl", json.dumps(rows[0]))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "x.parquet"))
    for name in ("x.jsonl", "x.parquet"):
        assert read(tmp_path / name, streaming, {"en": "a.b", "de": "a.c"}) == [("c", "d")], name


@pytest.mark.parametrize("kind", ["moses", "memory.tmx", "folder", "demo"])
def test_columns_of_a_corpus_without_columns_are_refused(kind, tmp_path):
    write_every_kind(tmp_path, PAIRS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "memory.tmx").rename(tmp_path / "folder/train.tmx")
    write(tmp_path / "memory.tmx", as_tmx(PAIRS))
    dataset = "demo" if kind == "demo" else tmp_path / kind
    assert not has_columns(str(dataset), *LANGUAGES)
    with pytest.raises(ValueError, match=r"columns must be null because .* has no columns, got {"):
        read(dataset, columns={"en": 1, "de": 2})
    write(tmp_path / "folder/validation.tsv", as_tsv(PAIRS, header=None))
    columns = {"en": 1, "de": 2}
    assert read(tmp_path / "folder", columns=columns, split="validation") == PAIRS


def test_each_corpus_of_a_mixture_has_its_own_columns(tmp_path):
    write(tmp_path / "a.tsv", "en\tde\na\tb\n")
    write(tmp_path / "b.tsv", "d\tc\n")
    mix = [{"dataset": str(tmp_path / "b.tsv"), "columns": {"en": 2, "de": 1}}]
    texts = load_texts(load_config("demo", {"dataset": str(tmp_path / "a.tsv"), "mix": mix}))
    assert [rows["translation"][:] for rows in texts.train] == [
        [{"en": "a", "de": "b"}],
        [{"en": "c", "de": "d"}],
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.tsv", "en\tde\na\tb\n\nc\td\te\n", "line 4 must have 2 columns, as line 1 has, got 3"),
        ("x.tsv", "a\tb\nc\n", "line 2 must have 2 columns, as line 1 has, got 1"),
        ("x.csv", 'en,de\n"a\nb",c\nd\n', "line 4 must have 2 columns, as line 1 has, got 1"),
        ("x.tsv", "en\tfr\na\tb\n", "the columns en and de, got 1 'en', 2 'fr'. To read other"),
        ("x.tsv", "source\ttarget\n", r"got 1 'source', 2 .* --columns '{en: source, de: target}'"),
        ("x.tsv", "German\tEnglish\n", r"must have .* --columns '{en: English, de: German}'"),
        ("x.tsv", "en-US\tde_DE\n", r"must have .* --columns '{en: en-US, de: de_DE}'"),
        ("x.csv", "Source text, tgt,id\n", r"must have .* --columns '{en: Source text, de: tgt}'"),
        ("x.tsv", "English\tFrench\n", "columns en and de, got 1 'English', 2 'French'. To read"),
        ("x.tsv", "eng\tdeu_Latn\n", "columns en and de, got 1 'eng', 2 'deu_Latn'. To read"),
        ("x.tsv", "fr-FR\tit\n", "columns en and de, got 1 'fr-FR', 2 'it'. To read"),
        ("x.tsv", "a\tb\tc\n", r"3 'c'.* --columns '{en: COLUMN, de: COLUMN}'"),
        # the columns of a test set of the Tatoeba challenge
        (
            "x.tsv",
            "en\tde\tone\teins\n" * 2,
            r"names of columns only in its first line, got 1 'en', 2 'de', 3 'one', 4 'eins' in "
            r"line 2. Give the numbers .* --columns '{en: COLUMN, de: COLUMN}'",
        ),
        ("x.tsv", "a\n", "must have the columns en and de, got 1 'a'"),
        # R and pandas can write quotes around all cells
        (
            "x.tsv",
            '"de"\t"en"\n"b"\t"a"\n',
            r"no quotes around the names of its columns, got 1 '\"de\"', .* the suffix .csv, and",
        ),
        ("x.tsv", '"German"\t"English"\n', "no quotes around the names of its columns, got 1"),
        ("x.csv", "a,b\n", r"columns en and de, got 1 'a', 2 'b'.* --columns '{en: 1, de: 2}'"),
        ("x.tsv", "", "must have at least one line, got none"),
        ("x.csv", "\n\n", "must have the columns en and de, got"),
        ("x.tsv", "en\tde\n", "must have at least one pair, got none"),
        ("x.csv", 'en,de\n"a,b\n', "line 2 must be CSV with quotes as in RFC 4180, got: unexp"),
        ("x.csv", 'en,de\n"a"b,c\n', "line 2 must be CSV with quotes"),
        ("x.csv", 'en,de\na,b\n"c,d\n' + "e,f\n" * 9, "line 3 must be CSV with quotes .* unexp"),
        ("x.csv", '\n\nen,de\n"c,d\ne,f\n', "line 4 must be CSV with quotes .* unexp"),
        ("x.csv", 'en,de\n"a,b\nc,d"\n', "line 2 must have 2 columns, as line 1 has, got 1"),
        ("x.csv", 'sep=;\nen;de\n"c;d', "line 3 must be CSV with quotes"),
        ("x.csv", "en;de;x, y\n", "got 1 'en;de;x', 2 ' y'. If ';' sep.*, add the line sep=; bef"),
        ("x.csv", "en|de\n", r"got 1 'en\|de'. If '\|' separates the columns, add the line sep=\|"),
        ("x.csv", "de\ten\n", r"If '\\t' separates the columns, give .* suffix .tsv. To read"),
        ("x.csv", "sep=;\nen,de\n", "got 1 'en,de'. If ',' separates the columns, add"),
        ("x.csv", "a;b,c;d\n", "got 1 'a;b', 2 'c;d'. To read other columns"),
        ("x.csv", "a, b;c\n", "got 1 'a', 2 ' b;c'. If ';' separates the columns, add the line"),
        ("x.csv", "a\tb, c\n", r"2 ' c'. If '\\t' separates the columns, give the file the suffix"),
        ("x.tsv", "en\tde\ten\na\tb\tc\n", "one column 'en', got 1 'en', 2 'de', 3 'en'."),
        ("x.csv", "DE; EN;de\n", "must have one column 'de', got 1 'DE', 2 ' EN', 3 'de'."),
        ("x.csv", 'en,de\n"' + "a\n" * 200_000, "must be CSV with quotes .* limit"),
        ("x.csv", 'en,de\n"a\n' + '","\n' * 400_000, "row longer than 1,048,576 characters"),
        ("x.tsv", "a\tb\n".encode("utf-16"), "must be UTF-8, got UTF-16"),
        ("x.csv", "en,de\na,b\n".encode("utf-16-le"), "must be UTF-8, got UTF-16 by its NUL"),
        ("x.tsv", "a\tb\n".encode("utf-16-be"), "must be UTF-8, got UTF-16 by its NUL"),
        ("x.tsv", "a\tb\rc\td\r", "must end its lines with line feeds"),
        ("x.tsv", "a\t" + "b" * MAX_LINE_BYTES, "line 1 must have at most 1,048,576 bytes"),
        ("x.csv", "a,b\nc," + "b" * MAX_LINE_BYTES, "line 2 must have at most 1,048,576 bytes"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_its_line(name, text, message, streaming, tmp_path):
    write(tmp_path / name, text)
    with pytest.raises(ValueError, match=rf"{name} .*{message}|{name} {message}"):
        read(tmp_path / name, streaming)


def test_a_column_that_is_not_there_is_refused_with_those_that_are(streaming, tmp_path):
    rows = [{"en": "a", "number": 5, "de": "b"}]
    write(tmp_path / "x.jsonl", json.dumps(rows[0]))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "x.parquet"))
    write(tmp_path / "x.tsv", "en\tde\na\tb\n")
    for columns, name, message in (
        ({"en": "en", "de": "fr"}, "x.jsonl", "columns 'en' and 'fr', got de, en, number"),
        ({"en": "en", "de": "fr"}, "x.parquet", r"column 'fr' of text, got en \(string\), number"),
        ({"en": "en", "de": "fr"}, "x.tsv", "columns en and fr, got 1 'en', 2 'de'"),
        ({"en": 1, "de": 3}, "x.tsv", "columns 1 and 3, got 1 'en', 2 'de'"),
        ({"en": 2, "de": 1}, "x.tsv", r"a pair in its first line .* '{en: en, de: de}'"),
        ({"en": "en", "de": "number"}, "x.jsonl", "a text in 'number', got number"),
        ({"en": "en", "de": "number"}, "x.parquet", r"column 'number' of text, got"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name, streaming, columns)


def test_records_without_the_languages_are_refused_with_their_fields(streaming, tmp_path):
    write(tmp_path / "x.jsonl", '{"en": "a", "fr": "b"}\n')
    datasets.Dataset.from_list([{"en": "a", "fr": "b"}]).to_parquet(str(tmp_path / "x.parquet"))
    for name in ("x.jsonl", "x.parquet"):
        with pytest.raises(
            ValueError, match=r"must have a column 'translation' .*got en, fr.*--columns '{en: COL"
        ):
            read(tmp_path / name, streaming)


def test_a_field_beside_the_translation_is_not_its_text(tmp_path):
    write(tmp_path / "x.jsonl", '{"id": 5, "en": 6, "translation": {"en": "a", "id": "b"}}\n')
    rows = load_translations(str(tmp_path / "x.jsonl"), None, "en", "id")["train"]
    assert rows["translation"][:] == [{"en": "a", "id": "b"}]


def test_a_line_that_is_not_utf_8_is_replaced_in_training_and_refused_elsewhere(tmp_path):
    for name in ("train.tsv", "train.csv"):
        separator = b"\t" if name.endswith("tsv") else b","
        lines = [b"en" + separator + b"de", b"a" + separator + b"b", b"\xe9" + separator + b"c"]
        path = write(tmp_path / name, b"\n".join(lines))
        assert read(path) == [("a", "b"), ("\ufffd", "c")]
        validation_path = write(tmp_path / name.replace("train", "validation"), b"\n".join(lines))
        with pytest.raises(ValueError, match=r"validation\.[ct]sv line 3 must be UTF-8"):
            read(tmp_path, split="validation")
        path.unlink()
        validation_path.unlink()


def test_a_missing_text_is_counted_as_empty(tmp_path):
    write(tmp_path / "train.jsonl", '{"en": "a", "de": "b"}\n{"en": "c"}\n{"de": null}\n')
    rows = [{"en": "a", "de": "b"}, {"en": "c", "de": None}, {"en": None, "de": None}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "x.parquet"))
    for dataset in (tmp_path / "train.jsonl", tmp_path / "x.parquet"):
        config = train_toys.toy_config(dataset, tmp_path / "run")
        _, data = train_toys.prepared(config)
        assert ": kept 1, wrong_encoding 0, empty 2," in data.facts["cleaning"]


def test_a_changed_table_is_read_again(tmp_path):
    path = write(tmp_path / "x.tsv", "a\tb\n")
    assert len(read(path)) == 1
    write(path, "a\tb\nc\td\n")
    assert len(read(path)) == 2


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"en": "x"},
        {"en": "x", "fr": "y"},
        {"en": "x", "de": "y", "fr": "z"},
        {"en": "x", "de": 2},
        {"en": 0, "de": 1},
        {"en": True, "de": False},
        {"en": "x", "de": "x"},
    ],
)
def test_columns_have_a_name_or_a_number_for_each_language(columns):
    message = (
        "columns must give a name, or a number from 1, for each of en and de, none twice, got {"
    )
    for setting in ({"columns": columns}, {"mix": [{"dataset": "x", "columns": columns}]}):
        with pytest.raises(ValueError, match=message):
            load_config("demo", setting)


def test_columns_belong_to_one_dataset(tmp_path):
    recipe = tmp_path / "x.yaml"
    recipe.write_text("dataset: x.tsv\ncolumns: {en: 1, de: 3}\n", encoding="utf-8")
    assert load_config(recipe, {"max_steps": 7}).columns == {"en": 1, "de": 3}
    assert load_config(recipe, {"dataset": "y.tsv"}).columns is None


def test_a_folder_with_tables_of_other_names_is_refused_with_them(tmp_path):
    write(tmp_path / "pairs.tsv", as_tsv(PAIRS))
    write(tmp_path / "memory.tmx.gz", b"")
    with pytest.raises(ValueError, match=r"named train, .* with memory\.tmx\.gz, pairs\.tsv\."):
        read(tmp_path)


def test_the_name_of_a_file_is_not_a_name_on_the_hub(tmp_path):
    assert not is_hub_name("my/pairs.tsv", *LANGUAGES)
    for name in ("pairs.tsv", "pairs.csv.gz", "memory.tmx"):
        with pytest.raises(ValueError, match="dataset must be a file that exists, got"):
            read(tmp_path / name)
