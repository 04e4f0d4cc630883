"""SECURITY.md: each promise names tests that exist."""

import re
from pathlib import Path

import pytest

import vanilla_transformer

ROOT = Path(vanilla_transformer.__file__).parent
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
PROMISES = PAGE.split("## Guarantees")[1].split("\n| ")[2:]


def test_security_md_has_guarantees():
    assert len(PROMISES) > 10


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[:40])
def test_each_guarantee_names_tests_that_exist(row):
    names = re.findall(r"`(test_\w+)`", row)
    assert names
    files = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("test_*.py")]
    for name in names:
        assert any(f"def {name}(" in text for text in files), name


def test_every_command_is_in_the_table():
    from vanilla_transformer.cli import _parser

    (commands,) = (action.choices for action in _parser()._actions if action.choices)
    table = PAGE.split("## What each command does")[1].split("## Guarantees")[0]
    assert set(commands) <= set(re.findall(r"`([\w-]+)`", table))
