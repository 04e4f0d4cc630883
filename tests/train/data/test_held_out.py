"""Validation pairs that are held out of a corpus."""

import dataclasses
import random

import pytest
import train_toys
from train_toys import write_corpus

from vanilla_transformer.train.data.held_out import hold_out
from vanilla_transformer.train.data.prepare import load_main_corpus, load_texts
from vanilla_transformer.train.evaluate import evaluate
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.recipe import load_config
from vanilla_transformer.train.run_folder.environment import read_environment
from vanilla_transformer.train.run_folder.files import read_metrics, read_recipe


@pytest.fixture
def table(tmp_path):
    """A table in which many sources and targets occur in several pairs."""
    rng = random.Random(5)
    pairs = [(f"s{rng.randrange(60)}", f"t{rng.randrange(60)}") for _ in range(80)]
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return path, pairs


def config_of(table, tmp_path, **settings):
    return train_toys.toy_config(table, tmp_path / "run", **settings)


def pairs_of(rows):
    return [(pair["en"], pair["de"]) for pair in rows["translation"]]


def test_no_sentence_of_the_held_out_pairs_is_trained_on(table, tmp_path):
    path, pairs = table
    other = tmp_path / "other.tsv"
    other.write_text("".join(f"{source}\tx{number}\n" for number, (source, _) in enumerate(pairs)))
    config = config_of(path, tmp_path, validation_pairs=9, mix=[{"dataset": str(other)}])
    texts = load_texts(config)
    held_out = pairs_of(texts.validation)
    assert len(held_out) == 9
    sources, targets = map(set, zip(*held_out, strict=True))
    expected = [
        [pair for pair in pairs if pair[0] not in sources and pair[1] not in targets],
        [
            (source, f"x{number}")
            for number, (source, _) in enumerate(pairs)
            if source not in sources
        ],
    ]
    assert [pairs_of(rows) for rows in texts.train] == expected
    assert texts.left_out_counts == [80 - len(expected[0]), 80 - len(expected[1])]
    assert texts.left_out_counts[0] > 9
    _, data = train_toys.prepared(config)
    assert data.facts["held_out"] == (
        "9 pairs for validation; left out with one of their sentences: "
        f"{texts.left_out_counts[0] - 9} of {path}, {texts.left_out_counts[1]} of {other}"
    )
    assert f"{path}: kept {len(expected[0])}," in data.facts["cleaning"]


def test_one_held_out_pair_is_no_plural(table, tmp_path):
    _, data = train_toys.prepared(config_of(table[0], tmp_path, validation_pairs=1))
    assert data.facts["held_out"].startswith(
        "1 pair for validation; left out with one of its sentences: "
    )


def test_the_seed_decides_which_pairs_are_held_out(table, tmp_path):
    drawn = [
        pairs_of(
            load_main_corpus(config_of(table[0], tmp_path, validation_pairs=9, seed=seed))[
                "validation"
            ]
        )
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    # they are in the order of the file, and from all of it
    remaining = iter(table[1])
    assert all(pair in remaining for pair in drawn[0])
    assert not set(drawn[0]) <= set(table[1][:40])
    assert not set(drawn[0]) <= set(table[1][40:])


def test_pairs_that_cannot_be_used_are_not_held_out(tmp_path):
    path = tmp_path / "pairs.tsv"
    lines = [b"a\t", b" \tb", b"caf\xe9\tc", b"d\te", b"f\tg", b"h\ti"]
    path.write_bytes(b"\n".join(lines * 5))
    found = load_main_corpus(config_of(path, tmp_path, validation_pairs=15))["validation"]
    assert sorted(pairs_of(found)) == [("d", "e")] * 5 + [("f", "g")] * 5 + [("h", "i")] * 5
    with pytest.raises(ValueError, match=r"must be at most 15, the pairs of .* used, got 16\."):
        load_main_corpus(config_of(path, tmp_path, validation_pairs=16))
    path.write_bytes(b"a\tb\n" * 5)
    with pytest.raises(
        ValueError, match=r"must leave pairs of .* to train on, got 3: every pair shares"
    ):
        load_texts(config_of(path, tmp_path, validation_pairs=3))


def test_they_are_refused_with_a_validation_split_and_with_streaming(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    with pytest.raises(
        ValueError, match=r"must be null because .* has a split 'validation', got 3"
    ):
        load_texts(config_of(corpus, tmp_path, validation_pairs=3))
    with pytest.raises(
        ValueError, match=r"validation_pairs must be null with streaming, .* folder"
    ):
        load_config("demo", {"validation_pairs": 3, "streaming": True})


def test_a_run_without_a_validation_split_says_how_to_get_one(table, tmp_path, caplog):
    train_toys.prepared(config_of(table[0], tmp_path))
    assert "To hold out 1,000 pairs, set --validation_pairs 1000." in caplog.text


@pytest.mark.parametrize("how", ["same text", "same pairs in another file"])
def test_a_validation_split_that_is_the_training_text_is_refused(how, tmp_path):
    write_corpus(tmp_path)
    pairs = [(tmp_path / f"train.{language}").read_text().splitlines() for language in ("en", "de")]
    if how == "same text":
        for language in ("en", "de"):
            (tmp_path / f"validation.{language}").write_bytes(
                (tmp_path / f"train.{language}").read_bytes()
            )
    else:
        for path in tmp_path.glob("validation.*"):
            path.unlink()
        rows = zip(*pairs, strict=True)
        (tmp_path / "validation.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"'validation' must have other pairs .* got the pairs of"):
        load_texts(config_of(tmp_path, tmp_path))


def test_a_run_records_them_resumes_with_them_and_is_evaluated_on_them(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    path = tmp_path / "pairs.tsv"
    sides = [(corpus / f"train.{language}").read_text().splitlines() for language in ("en", "de")]
    path.write_text("".join("\t".join(row) + "\n" for row in zip(*sides, strict=True)))
    config = config_of(path, tmp_path, validation_pairs=5, max_steps=4, num_beams=1)
    train(config)
    folder = config.folder
    held_out = load_main_corpus(config)["validation"]
    assert read_recipe(folder).validation_pairs == 5
    assert read_environment(folder)[0]["held_out"].startswith("5 pairs for validation; left out")
    assert any("validation_loss" in line for line in read_metrics(folder))
    evaluate(folder, "validation", max_extra_tokens=1)
    sources = (folder / "hypotheses").glob("validation*.source.txt")
    assert next(sources).read_text().splitlines() == [source for source, _ in pairs_of(held_out)]
    train(dataclasses.replace(config, max_steps=6), resume=True)
    with pytest.raises(ValueError, match="validation_pairs was 5, got 6"):
        train(dataclasses.replace(config, max_steps=6, validation_pairs=6), resume=True)
    path.write_text(f"one more\tein Paar\n{path.read_text()}")
    with pytest.raises(ValueError, match=r"the 5 pairs that the run held out, but .* has changed"):
        evaluate(folder, "validation")


def test_held_out_pairs_do_not_depend_on_the_kind_of_file(table, tmp_path):
    path, pairs = table
    for side, language in enumerate(("en", "de")):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        (tmp_path / f"moses.{language}").write_text(text)
    both = [
        load_main_corpus(config_of(dataset, tmp_path, validation_pairs=9))
        for dataset in (path, tmp_path / "moses")
    ]
    first, second = (pairs_of(splits["validation"]) for splits in both)
    assert first == second
    again = hold_out(both[1]["train"], ("de", "en"), 9, 1, "x")
    assert pairs_of(again) == first
