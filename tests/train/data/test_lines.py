"""Texts to translate: columns of tables and JSON lines, and subtitles."""

import bz2
import gzip
import io
import json
import lzma
import re
import sys

import pytest
import translation_toys

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.cli import main
from vanilla_transformer.train.data.lines import (
    format_translated_subtitle,
    read_subtitles,
    split_subtitle,
)
from vanilla_transformer.train.data.text_files import opened

TEXTS = translation_toys.TEXTS[:3]
SUBTITLES = """1
00:00:01,000 --> 00:00:02,500
the small cat
sleeps

2
00:00:03,250 --> 00:00:04,000
dogs
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a model, and its pipeline."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = translation_toys.make_tokenizer()
    toy = translation_toys.make_model(tokenizer)
    toy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), TranslationPipeline(toy, tokenizer, device="cpu")


def texts_of(results):
    return [found["translation_text"] for found in results]


@pytest.mark.parametrize(
    ("name", "column", "line"),
    [
        ("table.tsv", "2", lambda text: f"id\t{text}\tmore"),
        ("table.txt", "1", lambda text: f"{text}\tmore"),
        ("lines.jsonl", "text", lambda text: json.dumps({"text": text, "id": 3})),
        ("LINES.JSONL", "1", lambda text: json.dumps({"1": text})),
        ("lines.jsonl", "text.en", lambda text: json.dumps({"text.en": text})),
        (
            "lines.jsonl",
            "translation.en",
            lambda text: json.dumps({"translation": {"en": text, "de": "x"}}),
        ),
    ],
)
def test_a_column_is_translated(model, tmp_path, capsys, name, column, line):
    folder, translate = model
    path = tmp_path / name
    path.write_text("".join(f"{line(text)}\n" for text in TEXTS))
    assert main(["translate", folder, str(path), "--column", column]) == 0
    assert capsys.readouterr().out.splitlines() == texts_of(translate(TEXTS))


def test_lines_with_tabs_are_translated_whole_and_said(model, tmp_path, capsys, caplog):
    folder, translate = model
    path = tmp_path / "table.tsv"
    path.write_text("dogs\tcats\ndogs\n")
    assert main(["translate", folder, str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == texts_of(translate(["dogs\tcats", "dogs"]))
    assert caplog.text.count("--column 1") == 1
    caplog.clear()
    assert main(["translate", folder, str(path), "--column", "1"]) == 0
    assert "--column" not in caplog.text


@pytest.mark.parametrize(
    ("name", "column", "content", "message"),
    [
        ("a.tsv", "3", "dogs\tb\tdogs\nb\tc\n", "a.tsv line 2 must have a column 3, got 2 columns"),
        (
            "a.tsv",
            "en",
            "dogs\n",
            "column must be a number from 1 for a tab-separated file, got 'en'",
        ),
        ("a.tsv", "0", "dogs\n", "column must be a number from 1"),
        (
            "a.jsonl",
            "en",
            '{"en": "dogs"}\n{"de": "x"}\n',
            "line 2 must have the field 'en', got",
        ),
        (
            "a.jsonl",
            "en",
            '{"en": "dogs"}\n{"en": 3}\n',
            "field 'en' of .* line 2 must be text",
        ),
        (
            "a.jsonl",
            "en",
            '{"en": "dogs"}\n{"en": "a \\ud83d"}\n',
            "field 'en' of .* line 2 must be valid Unicode, got an unpaired surrogate at index 2",
        ),
        ("a.jsonl", "en", '{"en": "dogs"}\n[]\n', "line 2 must have the field 'en', got no object"),
        ("a.json", "en", '[\n{"en": "dogs"}\n]\n', r"line 1 must be .* JSON lines \(.jsonl\)"),
        ("a.json", "en", '[{"en": "dogs"}]\n', r"got no object, as JSON lines \(.jsonl\) have"),
        ("a.csv", "1", "dogs,a\n", r"got .csv: convert it to .tsv, or name"),
        ("a.vtt.gz", "1", "", r"a.vtt.gz must .* got .vtt: convert the subtitles to .srt"),
        (
            "a.jsonl",
            "en",
            '{"en": "dogs"}\n{"en\n',
            "line 2 must be a JSON object, as in JSON lines ",
        ),
    ],
)
def test_a_column_that_is_not_there_is_refused(
    model, tmp_path, capsys, name, column, content, message
):
    folder, translate = model
    path = tmp_path / name
    path.write_text(content)
    assert main(["translate", folder, str(path), "--column", column]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert re.search(message, captured.err), captured.err
    # the lines before it are translated
    expected = texts_of(translate(["dogs"])) if " line 2" in captured.err else []
    assert captured.out.splitlines() == expected


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.json",
        "a.HTML",
        "a.docx",
        "a.tmx.gz",
        "a.po",
        "a.SGM",
        "a.sgml.gz",
        "a.sdlxliff",
        "a.rtf",
        "a.tar.gz",
    ],
)
def test_a_file_of_another_format_is_refused(model, tmp_path, capsys, name):
    path, suffix = tmp_path / name, name.removesuffix(".gz")[1:].lower()
    path.write_text("dogs\n")
    plain = tmp_path / "a.json.en"
    plain.write_text("dogs\n")
    pair = ["--source", str(path), "--target", str(plain)]
    for words in (
        ["translate", model[0], str(path)],
        *([command, model[0], *pair] for command in ("score", "align")),
    ):
        assert main(words) == 1
        assert (
            f"{name} must have a sentence on each line, got {suffix}: " in capsys.readouterr().err
        )
    assert main(["translate", model[0], str(plain)]) == 0


@pytest.mark.parametrize(
    ("line", "is_warned"),
    [
        ('{"en": "dogs"}', True),
        ('[{"en": "dogs"}]', True),
        ("<p>dogs</p>", True),
        ("<!DOCTYPE html>", True),
        ("%PDF-1.4", True),
        ("PK\x03\x04", True),
        ("< dogs {cats} [a]", False),
    ],
)
def test_lines_that_look_like_no_sentence_are_said(
    model, tmp_path, capsys, caplog, line, is_warned
):
    path = tmp_path / "lines.txt"
    path.write_text(f"{line}\n")
    assert main(["translate", model[0], str(path)]) == 0
    assert ("has JSON or markup" in caplog.text) == is_warned


@pytest.mark.parametrize(("first_line", "number"), [("1\n", 2), ("WEBVTT\n\n", 3)])
def test_subtitles_without_a_suffix_are_said(model, tmp_path, capsys, caplog, first_line, number):
    path = tmp_path / "film.txt"
    path.write_text(f"{first_line}00:01.000 --> 00:02.000\ndogs\n\n2\n00:03.000 --> 00:04.000\n")
    assert main(["translate", model[0], str(path)]) == 0
    assert caplog.text.count(f"Line {number} of {path} has the times of a subtitle") == 1
    assert caplog.text.count("times of a subtitle") == 1


@pytest.mark.parametrize("name", ["film.srt", "FILM.SRT"])
def test_subtitles_are_translated_to_subtitles(model, tmp_path, capsys, name):
    pytest.importorskip("srt")
    folder, translate = model
    path = tmp_path / name
    path.write_text(SUBTITLES)
    assert main(["translate", folder, str(path)]) == 0
    first, second = texts_of(translate(["the small cat sleeps", "dogs"]))
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.splitlines()[:2] for block in blocks[:2]] == [
        ["1", "00:00:01,000 --> 00:00:02,500"],
        ["2", "00:00:03,250 --> 00:00:04,000"],
    ]
    assert [" ".join(block.splitlines()[2:]) for block in blocks[:2]] == [first, second]


def test_subtitles_without_a_number_are_numbered():
    pytest.importorskip("srt")
    times = ["00:00:01,000 --> 00:00:02,500", "00:00:03,250 --> 00:00:04,000"]
    for starts, numbers in ((["", ""], [1, 2]), (["7\n", ""], [7, 2]), (["", "9\n"], [1, 9])):
        blocks = [f"{start}{time}\ndogs\n\n" for start, time in zip(starts, times, strict=True)]
        subtitles = read_subtitles(io.BytesIO("".join(blocks).encode()), "film.srt")
        assert [subtitle.index for subtitle in subtitles] == numbers


def test_markup_inside_a_subtitle_is_counted(model, tmp_path, capsys, caplog):
    pytest.importorskip("srt")
    path = tmp_path / "film.srt"
    path.write_text(SUBTITLES.replace("sleeps", "<i>sleeps</i>").replace("dogs", "<b>dogs</b>"))
    assert main(["translate", model[0], str(path)]) == 0
    (dogs,) = texts_of(model[1](["dogs"]))
    assert f"<b>{dogs}</b>" in capsys.readouterr().out
    assert "film.srt: markup that encloses only some words of a subtitle" in caplog.text
    assert "Subtitles with such markup: 1." in caplog.text


def test_a_translation_has_as_many_lines_as_its_subtitle():
    srt = pytest.importorskip("srt")
    (subtitle, *_) = srt.parse(SUBTITLES)
    parts = split_subtitle(subtitle.content)
    lines = format_translated_subtitle(subtitle, parts, ["die kleine Katze schläft"]).splitlines()
    assert lines[2:] == ["die kleine", "Katze schläft"]
    assert format_translated_subtitle(subtitle, parts, ["nein"]).splitlines()[2:] == ["nein"]


@pytest.mark.parametrize(
    ("content", "texts", "translated", "loses_markup"),
    [
        ("<i>dogs</i>", ["dogs"], "<i>DOGS</i>", False),
        (
            "{\\an8}<font color='red'><b>the\ndog</b></font>",
            ["the dog"],
            "{\\an8}<font color='red'><b>THE\nDOG</b></font>",
            False,
        ),
        ("<i>a</i> or <i>b</i>", ["a or b"], "A OR B", True),
        ("a <i>dog</i>", ["a dog"], "A DOG", True),
        ("{\\an8}{\\b1} a{\\b0} dog", ["a dog"], "{\\an8}{\\b1}A DOG", True),
        ("- dogs\n- a cat\nsleeps", ["dogs", "a cat sleeps"], "- DOGS\n- A CAT\nSLEEPS", False),
        (
            "<i>\u2013 dogs\n\u2013 cats</i>",
            ["dogs", "cats"],
            "<i>\u2013 DOGS\n\u2013 CATS</i>",
            False,
        ),
        (
            "<i>\u2014 dogs</i>\n\u2014 <b>cats</b>",
            ["dogs", "cats"],
            "<i>\u2014 DOGS</i>\n\u2014 <b>CATS</b>",
            False,
        ),
        ("<i>- dogs</i> bark", ["dogs bark"], "- DOGS BARK", True),
        ("dogs\n- cats", ["dogs", "cats"], "DOGS\n- CATS", False),
        (
            "-Is the dog here?\n-<i>No.</i>\n-\u00bfQu\u00e9?",
            ["Is the dog here?", "No.", "\u00bfQu\u00e9?"],
            "-IS THE DOG HERE?\n-<i>NO.</i>\n-\u00bfQU\u00c9?",
            False,
        ),
        ("-5\n--a", ["-5 --a"], "-5\n--A", False),
        ("-5 < 3 - x", ["-5 < 3 - x"], "-5 < 3 - X", False),
        ("", [""], "", False),
    ],
)
def test_markup_and_dashes_surround_translations(content, texts, translated, loses_markup):
    srt = pytest.importorskip("srt")
    (subtitle, *_) = srt.parse(SUBTITLES)
    parts = split_subtitle(content)
    assert [part.text for part in parts] == texts
    assert any(part.has_markup for part in parts) == loses_markup
    formatted = format_translated_subtitle(subtitle, parts, [text.upper() for text in texts])
    assert formatted.split("\n", 2)[2].rstrip("\n") == translated


@pytest.mark.parametrize("content", ["no subtitles\n", ""])
def test_a_file_without_subtitles_is_refused(model, tmp_path, capsys, content):
    pytest.importorskip("srt")
    path = tmp_path / "film.srt"
    path.write_text(content)
    assert main(["translate", model[0], str(path)]) == 1
    assert "film.srt must hold subtitles, got " in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--jsonl"], ["--scores"], ["--num_return_sequences", "2"], ["--column", "1"]]
)
def test_flags_for_lines_are_refused_with_subtitles(model, tmp_path, capsys, flags):
    (tmp_path / "film.srt").write_text(SUBTITLES)
    assert main(["translate", model[0], str(tmp_path / "film.srt"), *flags]) == 1
    assert "must not be given: subtitles are translated to subtitles" in capsys.readouterr().err


def test_subtitles_without_their_package_are_refused(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "srt", None)
    (tmp_path / "film.srt").write_text(SUBTITLES)
    assert main(["translate", model[0], str(tmp_path / "film.srt")]) == 1
    expected = (
        "this command needs the package srt, which is not installed: pip install "
        "'vanilla_transformer[text]'"
    )
    assert expected in capsys.readouterr().err


OPENERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def compressed(suffix, content):
    if suffix == ".zst":
        home = "compression" if sys.version_info >= (3, 14) else "backports"
        zstd = pytest.importorskip(f"{home}.zstd")
        return zstd.compress(content)
    return OPENERS[suffix](content)


@pytest.mark.parametrize("suffix", [*OPENERS, ".zst"])
def test_a_compressed_file_is_read_to_its_end_or_refused(suffix, tmp_path):
    path, content = tmp_path / f"text{suffix}", "".join(f"line {n}\n" for n in range(5000)).encode()
    path.write_bytes(compressed(suffix, content))
    with opened(path) as file:
        assert b"".join(file) == content
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="cannot be read to its end"), opened(path) as file:
        file.read()
    path.write_bytes(b"no such format")
    with pytest.raises(ValueError, match="cannot be read to its end"), opened(path) as file:
        file.read()


def test_a_file_of_zstd_without_its_package_is_refused(tmp_path, monkeypatch):
    if sys.version_info >= (3, 14):
        pytest.skip("zstd is a part of Python")
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    monkeypatch.delattr("backports.zstd", raising=False)
    (tmp_path / "text.zst").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"needs backports.zstd, which is not installed: pip install"
    ):
        opened(tmp_path / "text.zst").__enter__()
