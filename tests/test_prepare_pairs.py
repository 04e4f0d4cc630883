"""The script that makes the corpora of results/ from lines of text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "results/prepare_pairs.py"


@pytest.fixture
def text(tmp_path):
    """Write 50 numbered lines for each language."""
    for language in ("en", "de"):
        lines = "".join(f"{language} {number}\n" for number in range(50))
        (tmp_path / f"train.{language}").write_text(lines, encoding="utf-8")
    return tmp_path / "train"


def prepare(text, folder, *flags):
    command = [sys.executable, SCRIPT, folder, "en-de", f"train={text}", *flags]
    subprocess.run(command, check=True, capture_output=True)
    lines = (folder / "en-de/train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["translation"] for line in lines]


def test_all_pairs_are_converted_in_order(text, tmp_path):
    expected = [{"en": f"en {number}", "de": f"de {number}"} for number in range(50)]
    assert prepare(text, tmp_path / "corpus") == expected


def test_a_number_of_random_pairs_is_kept_the_same_each_time(text, tmp_path):
    everything = prepare(text, tmp_path / "all")
    first, again = (
        prepare(text, tmp_path / name, "--train_pairs", "20") for name in ("first", "again")
    )
    assert first == again
    assert len(first) == 20
    # in their order, and not the first ones
    assert first == [pair for pair in everything if pair in first]
    assert first != everything[:20]
