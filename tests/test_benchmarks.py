"""What is measured can be measured anew."""

import re

import pytest
import train_toys

from vanilla_transformer.benchmarks.data_preparation import main


@pytest.fixture
def flags(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    settings = train_toys.toy_settings(corpus, tmp_path / "run", tokens_per_step=500)
    return [str(train_toys.write_recipe(tmp_path / "toy.yaml", settings))]


def measured(capsys, *flags):
    assert main([*map(str, flags)]) == 0
    return capsys.readouterr().out


def test_the_preparation_of_a_corpus_is_measured(flags, capsys):
    table = measured(capsys, *flags, "--millions", 0.01)
    assert re.search(r"^pairs +90$", table, re.MULTILINE)
    assert re.search(r"^counts +kept 90, wrong_encoding 0", table, re.MULTILINE)
    assert re.search(r"^tokens among the cells +[5-9]\d\.\d\d%$", table, re.MULTILINE)
    assert re.search(r"^planned +10,000 pairs, \d+ steps an epoch$", table, re.MULTILINE)


def test_a_stream_is_measured(flags, capsys):
    table = measured(capsys, *flags, "--streaming", "true", "--block_pairs", 40, "--blocks", 3)
    assert re.findall(r"^block (\d) +from step", table, re.MULTILINE) == ["0", "1", "2"]
