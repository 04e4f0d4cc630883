"""What is written whole is there whole, or as it was before."""

from pathlib import Path

import pytest

from vanilla_transformer.files import write_whole


def test_a_text_takes_the_place_of_another(tmp_path):
    path = tmp_path / "recipe.yaml"
    for text in ("dataset: demo\n", "dataset: größer\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_whoever_stops_in_between_leaves_what_there_was(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    write_whole(path, "dataset: demo\n")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "dataset: other\n")
    assert path.read_text(encoding="utf-8") == "dataset: demo\n"
