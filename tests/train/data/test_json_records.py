"""Parallel text in JSON files: another type than text is refused by record, text is unchanged."""

import gzip
import json
import time
from pathlib import Path

import datasets
import pytest

from vanilla_transformer.train.data import json_records
from vanilla_transformer.train.data.corpus import load_translations, texts_of

GOOD = [
    {"translation": {"en": f'say "{number}"', "de": f"sag »{number}« \\ 5"}} for number in range(60)
]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read(folder, streaming, split="train"):
    """Read the texts of both sides as training does."""
    rows = load_translations(str(folder), None, "en", "de", streaming=streaming)[split]
    sides = [[], []]
    for table in rows.with_format("arrow").iter(1000):
        for side, texts in zip(sides, texts_of(table, ["en", "de"], split, 1, True), strict=True):
            side += texts
    return sides


@pytest.fixture(params=[False, True], ids=["stored", "streamed"])
def streaming(request):
    return request.param


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(json_records, "BYTES_PER_READ", 500)


@pytest.mark.parametrize("place", [0, 30, 60])
@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"translation": {"en": 5, "de": "5"}}, "a text in 'en', got number"),
        ({"translation": {"en": "5", "de": 5.5}}, "a text in 'de', got number"),
        ({"translation": {"en": ["a"], "de": "5"}}, "a text in 'en', got array"),
        ({"translation": {"en": True, "de": "5"}}, "a text in 'en', got boolean"),
        ({"translation": {"en": {"a": "b"}, "de": "5"}}, "a text in 'en', got object"),
        ({"translation": "a"}, "an object in 'translation', got string"),
        ({"translation": ["a", "b"]}, "an object in 'translation', got array"),
        (5, "an object, got number"),
        ("x", "an object, got string"),
    ],
    ids=repr,
)
def test_another_type_than_text_is_refused_with_its_file_and_record(
    record, message, place, streaming, tmp_path
):
    write(tmp_path / "train.jsonl", [*GOOD[:place], record, *GOOD[place:]])
    with pytest.raises(ValueError, match=rf"train\.jsonl record {place + 1} must have {message}"):
        read(tmp_path, streaming)


def test_a_number_is_refused_in_every_chunk_and_file(streaming, small_chunks, tmp_path):
    numbers = [{"translation": {"en": number, "de": number}} for number in range(60)]
    write(tmp_path / "train-1.jsonl", [*GOOD, *GOOD, *numbers])
    with pytest.raises(ValueError, match=r"train-1\.jsonl record 121 must have a text in"):
        read(tmp_path, streaming)
    write(tmp_path / "train-1.jsonl", GOOD)
    write(tmp_path / "train-2.jsonl", numbers)
    with pytest.raises(ValueError, match=r"train-2\.jsonl record 1 must have a text in"):
        read(tmp_path, streaming)


def test_blank_lines_are_not_counted_as_records(streaming, small_chunks, tmp_path):
    lines = [json.dumps(record) for record in [*GOOD, {"translation": {"en": 1, "de": "1"}}]]
    (tmp_path / "train.jsonl").write_text("\n\n  \n".join(["", *lines]) + "\n\n")
    with pytest.raises(
        ValueError, match=r"train\.jsonl record 61 .*: {\"translation\": {\"en\": 1"
    ):
        read(tmp_path, streaming)


def test_a_key_that_is_missing_in_a_record_is_an_empty_side(streaming, tmp_path):
    odd = [
        {"translation": {"en": "left"}},
        {"translation": {}},
        {},
        {"translation": None},
        {"translation": {"en": None, "de": "right"}},
        {"translation": {"en": "a", "de": "b", "fr": 3}, "id": 7, "notes": [1, "x", {}]},
    ]
    for records in (odd + GOOD, GOOD + odd):
        write(tmp_path / "train.jsonl", records)
        found = list(zip(*read(tmp_path, streaming), strict=True))
        sides = [record.get("translation") or {} for record in records]
        assert found == [(side.get("en") or "", side.get("de") or "") for side in sides]


def test_texts_that_look_like_other_types_stay_as_they_are(streaming, small_chunks, tmp_path):
    texts = ["5", "true", "null", "[1, 2]", '{"en": "x"}', '"quoted"', "2020-01-01T00:00:00", ""]
    texts += ["a\\nb", "\u2028", "caf\u00e9", "\U0001f600", " \t ", "1e5"]
    for records in ([(text, text) for text in texts], [("2020-01-01 00:00:00",) * 2] * 80):
        pairs = [{"translation": {"en": left, "de": right}} for left, right in records]
        write(tmp_path / "train.jsonl", pairs)
        assert read(tmp_path, streaming) == [[left for left, _ in records]] * 2


def test_the_splits_may_have_records_of_different_kinds(streaming, tmp_path):
    translations = [{"translation": {"en": "a", "de": "b"}}]
    texts = [{"en": "c", "de": "d"}]
    for train, validation in ((translations, texts), (texts, translations)):
        write(tmp_path / "train.jsonl", train)
        write(tmp_path / "validation.jsonl", validation)
        found = [read(tmp_path, streaming, split) for split in ("train", "validation")]
        expected = [[["a"], ["b"]], [["c"], ["d"]]]
        assert found == (expected if train is translations else expected[::-1])


def test_compressed_files_lists_and_single_files_are_read(streaming, tmp_path):
    content = "\ufeff" + json.dumps(GOOD, indent=2)
    (tmp_path / "train.json").write_text(content, encoding="utf-8")
    expected = [[record["translation"][side] for record in GOOD] for side in ("en", "de")]
    assert read(tmp_path, streaming) == expected
    (tmp_path / "train.json").unlink()
    with gzip.open(tmp_path / "train.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in GOOD)
    assert read(tmp_path, streaming) == expected
    write(tmp_path / "some [1] records.jsonl", GOOD)
    assert read(tmp_path / "some [1] records.jsonl", streaming) == expected
    cut = (tmp_path / "train.jsonl.gz").read_bytes()[:-20]
    (tmp_path / "train.jsonl.gz").write_bytes(cut)
    with pytest.raises(ValueError, match=r"train\.jsonl\.gz cannot be read to its end"):
        read(tmp_path / "train.jsonl.gz", streaming)


@pytest.mark.parametrize("folder", [".", "b[1]", "m.py"])
def test_a_file_is_read_from_any_folder(folder, streaming, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(exist_ok=True)
    write(Path(folder, "x.jsonl"), GOOD)
    expected = [[record["translation"][side] for record in GOOD] for side in ("en", "de")]
    assert read(Path(folder, "x.jsonl"), streaming) == expected
    rows = [record["translation"] for record in GOOD]
    datasets.Dataset.from_list([{"translation": row} for row in rows]).to_parquet("p.parquet")
    assert read("p.parquet", streaming) == expected


def test_records_need_not_be_on_separate_lines(streaming, tmp_path):
    expected = [[record["translation"][side] for record in GOOD] for side in ("en", "de")]
    for content in (
        "\n".join(json.dumps(record, indent=1) for record in GOOD),
        " ".join(json.dumps(record) for record in GOOD),
    ):
        (tmp_path / "train.json").write_text(content, encoding="utf-8")
        assert read(tmp_path, streaming) == expected
    (tmp_path / "train.json").unlink()
    # the name does not show the compression
    packed = gzip.compress("".join(json.dumps(record) + "\n" for record in GOOD).encode())
    (tmp_path / "train.jsonl").write_bytes(packed)
    assert read(tmp_path, streaming) == expected


def test_a_list_of_records_is_read_in_parts(streaming, small_chunks, tmp_path):
    expected = [[record["translation"][side] for record in GOOD] for side in ("en", "de")]
    for content in (json.dumps(GOOD), json.dumps(GOOD, indent=1), json.dumps(GOOD) + "\n \n"):
        # a character of several bytes can cross the boundary of two chunks
        for shift in range(3):
            (tmp_path / "train.json").write_text(" " * shift + content.replace('5"', '\xe45"'))
            read_texts = read(tmp_path, streaming)
            assert read_texts[0] == expected[0]
            assert read_texts[1] == [text[:-1] + "\xe45" for text in expected[1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(GOOD)[:-1], "record 61 must be a JSON record .* in a list, got ''"),
        (json.dumps(GOOD) + "5", "must hold records .* in one list or .*, got after the list: '5'"),
        ('["a", "b"]\n["c", "d"]\n', 'must hold records that are objects, .* got .*: \'\\["c", '),
        (json.dumps(GOOD)[:-1] + ",]", "record 61 must be a JSON record .* got ',\\]'"),
        (json.dumps(GOOD).replace(", {", "; {", 1), "record 2 must be a JSON record .* got '; "),
        (f"[{'[' * 100_000}", "must hold JSON records, got one that is nested too deeply"),
        (f'{{"a": {"[" * 100_000}', "must hold JSON records, got one that is nested too deeply"),
    ],
    ids=["no end", "more", "lines of lists", "comma", "no comma", "deep list", "deep record"],
)
def test_a_damaged_list_is_refused(content, message, streaming, tmp_path):
    (tmp_path / "train.json").write_text(content)
    with pytest.raises(ValueError, match=rf"train\.json {message}"):
        read(tmp_path, streaming)


@pytest.mark.parametrize("is_list", [False, True])
def test_the_length_of_a_record_is_limited(is_list, streaming, small_chunks, monkeypatch, tmp_path):
    monkeypatch.setattr(json_records, "MAX_RECORD_BYTES", 2000)
    for length, is_refused in ((1500, False), (2600, True)):
        long = {"translation": {"en": "x" * length, "de": "y"}}
        records = [*GOOD[:9], long, *GOOD]
        if is_list:
            (tmp_path / "train.json").write_text(json.dumps(records))
        else:
            write(tmp_path / "train.json", records)
        if is_refused:
            with pytest.raises(ValueError, match=r"record.* of at most 2,000 bytes"):
                read(tmp_path, streaming)
        else:
            assert len(read(tmp_path, streaming)[0]) == 70


def test_another_encoding_is_named(streaming, tmp_path):
    content = json.dumps([{"translation": {"en": "a", "de": "\xe4"}}], ensure_ascii=False)
    (tmp_path / "train.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"train\.json must be UTF-8, got invalid continuation"):
        read(tmp_path, streaming)


def test_invalid_json_is_refused_with_its_record(streaming, tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [json.dumps(record) for record in GOOD]
    path.write_text("\n".join([lines[0][:-1], *lines]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="record 1 must be a JSON record"):
        read(tmp_path, streaming)
    for bad, message in (
        (lines[0][:-1], "record 8 must be a JSON record"),
        ('{"translation": {"en": "\\ud83d", "de": "b"}}', "record 8 must be a JSON record"),
    ):
        path.write_text("\n".join([*lines[:7], bad, *lines]) + "\n", encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read(tmp_path, streaming)
    path.write_bytes("\n".join(lines).encode("utf-16"))
    with pytest.raises(ValueError, match=r"train\.jsonl must be UTF-8, got UTF-16"):
        read(tmp_path, streaming)


def test_records_without_names_are_refused(streaming, tmp_path):
    (tmp_path / "train.json").write_text('[["a", "\u00e4"], ["c", "d"]]')
    with pytest.raises(
        ValueError, match=r'got a record that is not an object, \["a", "\u00e4"\]\.'
    ):
        read(tmp_path, streaming)


def test_a_translation_that_is_a_list_is_refused_with_what_would_be_right(streaming, tmp_path):
    write(tmp_path / "train.jsonl", [{"id": 1, "translation": ["b", "a"]}])
    message = (
        r"got id, translation; 'translation' is \[\"b\", \"a\"\], not an object such as "
        r"\{\"en\": \"...\", \"de\": \"...\"\}\. To read other columns"
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path, streaming)


def test_the_fields_of_a_record_are_listed_in_bounded_length(streaming, tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(dict.fromkeys(map(str, range(9999)), "x")))
    with pytest.raises(
        ValueError, match=r"must have a column 'translation' .*, got 0, 1, 10, "
    ) as it:
        load_translations(str(tmp_path), None, "en", "de", streaming=streaming)
    assert len(str(it.value)) < 1000


def test_a_changed_file_is_read_again(tmp_path):
    write(tmp_path / "train.jsonl", GOOD[:5])
    assert len(read(tmp_path, False)[0]) == 5
    time.sleep(0.01)
    write(tmp_path / "train.jsonl", GOOD[5:10])
    assert read(tmp_path, False)[0] == [record["translation"]["en"] for record in GOOD[5:10]]


def test_languages_are_collected_from_all_records(small_chunks, streaming, tmp_path):
    write(tmp_path / "train.jsonl", [{"translation": {"en": "a"}}] * 99 + GOOD)
    assert read(tmp_path, streaming)[1][99] == GOOD[0]["translation"]["de"]
    write(tmp_path / "train.jsonl", [{"translation": {"en": "a", "cs": "b"}}] * 99)
    with pytest.raises(ValueError, match=r"target_lang must be one of cs, en .* got 'de'"):
        read(tmp_path, streaming)
