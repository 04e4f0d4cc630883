import json
import os
from pathlib import Path

import pytest

from vanilla_transformer.records import (
    ANYTHING,
    NOTHING,
    NUMBER,
    TEXT,
    list_of,
    mapping,
    or_null,
    read_json,
    read_json_lines,
    read_text,
    refuse_lfs_pointer,
    whole_number,
)

KIND = mapping(
    {"step": whole_number(0), "names": list_of(TEXT, least=1)},
    {
        "loss": or_null(NUMBER),
        "any": ANYTHING,
        "sizes": mapping(other_items=whole_number(0), other_names="[a-z]+"),
    },
    other_items=NOTHING,
)
GOOD = {"step": 3, "names": ["a"]}


@pytest.mark.parametrize(
    "more", [{}, {"loss": None}, {"loss": 0.5}, {"sizes": {"a": 3}}, {"any": {"a": [{"b": 1}]}}]
)
def test_content_that_matches_its_description_is_read(more, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps({**GOOD, **more}))
    assert read_json(path, KIND) == {**GOOD, **more}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 3}', "file.json must have names, got"),
        ('{"step": true, "names": ["a"]}', "step must be an integer of at least 0, got True"),
        ('{"step": -1, "names": ["a"]}', "step must be an integer of at least 0, got -1"),
        ('{"step": 3.0, "names": ["a"]}', "step must be an integer of at least 0, got 3.0"),
        (f'{{"step": {10**30}, "names": ["a"]}}', "step must be an integer of at least 0"),
        ('{"step": 3, "names": []}', "names must be a list of at least 1, got"),
        ('{"step": 3, "names": ["a", 1]}', r"names\[1\] must be text, got 1"),
        (r'{"step": 3, "names": ["\u0000"]}', r"names\[0\] must be text, got '\\x00'"),
        (r'{"step": 3, "names": ["\ud800"]}', r"names\[0\] must be text, got '\\ud800'"),
        ('{"step": 3, "names": ["a"], "more": 1}', "file.json must not have 'more'"),
        (
            '{"step": 3, "names": ["a"], "loss": 1e999}',
            r"loss must be a number of at most 2\^63 - 1 in size or null",
        ),
        ('{"step": 3, "names": ["a"], "loss": NaN}', "must be JSON, .* NaN is not a JSON number"),
        ('{"step": 3, "names": ["a"], "sizes": {"../a": 1}}', "sizes must not have '../a'"),
        ('{"step": 3, "step": 4, "names": ["a"]}', "must be JSON, .* 'step' is given twice"),
        ("[" * 100_000, "file.json must be JSON, got lists or mappings that are too deep"),
        ("9" * 5000, "file.json must be JSON, got '999"),
        ("[]", "file.json must be a mapping"),
        ("", "file.json must be JSON, got ''"),
        ("{", "file.json must be JSON, got '{'"),
        (json.dumps({**GOOD, "step": "x" * 10**6}), "step must be an integer .*xxx"),
    ],
)
def test_other_content_is_refused_in_a_short_sentence(text, message, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        read_json(path, KIND)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 600


def test_a_bad_line_is_named_and_an_unfinished_one_left_out(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_json_lines(path, mapping({"step": whole_number(0)})) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"step": "2"}\n')
    with pytest.raises(ValueError, match=r"file\.jsonl line 2: step must be an integer"):
        read_json_lines(path, mapping({"step": whole_number(0)}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfea\x00", "must be UTF-8, got invalid start byte at byte 0"),
        (b"abc\xc3", "must be UTF-8, got unexpected end of data at byte 3"),
    ],
)
def test_a_file_that_is_not_utf_8_is_named(content, message, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} {message}"):
        read_text(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing", "endless", "loop"])
def test_a_path_that_is_no_file_is_refused_at_once(kind, tmp_path):
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "missing":
        path.symlink_to("/dev/zero" if kind == "endless" else path)
    with pytest.raises(ValueError, match=f"{path} must be a file"):
        read_text(path)


def test_a_redirected_file_is_not_opened_to_look_for_a_pointer(monkeypatch):
    # on macOS, bytes that are read from /dev/stdin cannot be read again
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("opened"))
    refuse_lfs_pointer("/dev/stdin")
