"""From settings to pairs: corpora that are mixed with weights, and the facts on them."""

import collections
import gzip
import json

import pytest
import train_toys
from train_toys import prepared, write_texts

from vanilla_transformer.train.data.batches import Collator
from vanilla_transformer.train.data.prepare import (
    load_texts,
    make_steps,
    vocabulary_texts,
)
from vanilla_transformer.train.recipe import load_config, parse_arguments


@pytest.fixture
def corpora(tmp_path):
    large = write_texts(tmp_path / "large", train=[f"l{i}" for i in range(12)], validation=["v"])
    small = write_texts(tmp_path / "small", train=["s0", "s1", "s2"], validation=["never"])
    return large, small


def config_of(tmp_path, dataset, **settings):
    return train_toys.toy_config(dataset, tmp_path / "run", **settings)


def test_without_weights_corpora_are_concatenated(corpora, tmp_path):
    config = config_of(tmp_path, corpora[0], mix=[{"dataset": corpora[1]}])
    texts, data = prepared(config)
    assert data.corpus_sizes == [12, 3]
    assert texts.corpus_weights is None
    assert len(data.pairs.kept_indices()) == 15
    # the validation split is that of the main corpus
    assert texts.validation["translation"][:] == [{"en": "v", "de": "~v"}]


@pytest.mark.parametrize(
    ("weights", "large", "small"), [(None, 1, 1), ((1, 4), 0.25, 4), ((3, 1), 11 / 12, 4 / 3)]
)
def test_each_corpus_has_its_share_of_the_vocabulary(weights, large, small, corpora, tmp_path):
    weights = weights or (None, None)
    config = config_of(
        tmp_path,
        corpora[0],
        weight=weights[0],
        mix=[{"dataset": corpora[1], "weight": weights[1]}],
    )
    sentences = list(vocabulary_texts(load_texts(config), ["en", "de"], seed=1))
    # the weights do not change the number of sentences
    assert len(sentences) == 30
    for letter, size, share in (("l", 12, large), ("s", 3, small)):
        counts = collections.Counter(s for s in sentences if s.strip("~")[0] == letter)
        assert counts.total() == round(2 * size * share)
        assert max(counts.values()) - min(counts.values() if share >= 1 else [0]) <= 1


def test_each_corpus_has_its_share_of_an_epoch(corpora, tmp_path):
    mix = [{"dataset": corpora[1], "weight": 4}]
    config = config_of(tmp_path, corpora[0], weight=1, mix=mix)
    _, data = prepared(config)
    steps = make_steps(config, data, Collator(0, 1, 260), num_processes=1, process_index=0)
    seen = collections.Counter(
        text[0]
        for number in range(steps.steps_per_epoch)
        for batch in steps[number].batches
        for text in data.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
    )
    assert seen == {"l": 3, "s": 12}


def test_a_run_records_the_dropped_pairs_and_the_hash_of_each_corpus(corpora, tmp_path, caplog):
    caplog.set_level("INFO")
    repeated = write_texts(
        tmp_path / "more", train=["l3", "new", "new", "caf\ufffd", "", "x" * 80, "q"]
    )
    # with its mark, the German side of the shortest line is half as long again
    rules = {"drop_duplicates": True, "max_length_ratio": 1.4}
    config = config_of(tmp_path, corpora[0], mix=[{"dataset": repeated}], **rules)
    _, data = prepared(config)
    nothing = "wrong_encoding 0, empty 0, leak 0, too_long 0, length_ratio 0, duplicate 0"
    said = [
        f"{corpora[0]}: kept 12, {nothing}",
        # one of its lines is in the other corpus too
        f"{repeated}: kept 1, wrong_encoding 1, empty 1, leak 0, too_long 1, length_ratio 1, "
        "duplicate 2",
    ]
    assert data.facts["cleaning"] == "; ".join(said)
    assert all(line in caplog.text for line in said)
    assert data.facts["dataset_commit"] == "none, none"
    hashes = data.facts["text_sha256"].split(", ")
    assert len(set(hashes)) == 2
    assert all(len(digest) == 64 for digest in hashes)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_side_counts_as_empty(streaming, tmp_path):
    rows = [{"translation": {"en": f"n{i}", "de": None if i == 5 else "x"}} for i in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "validation.jsonl").write_text(json.dumps(rows[0]) + "\n")
    config = config_of(tmp_path, tmp_path, streaming=streaming)
    texts, data = prepared(config)
    spoken = list(vocabulary_texts(texts, ("en", "de"), seed=1))
    assert (spoken.count(""), spoken.count("x")) == (1, 8)
    if streaming:
        (step,) = [make_steps(config, data, Collator(0, 1, 260), 1, 0)[0]]
        counts = step.position["block_counts"]
        assert (counts["kept"], counts["empty"]) == (8, 1)
    else:
        assert ": kept 8, wrong_encoding 0, empty 1," in data.facts["cleaning"]
    # every sentence of the validation split counts
    (tmp_path / "validation.jsonl").write_text(json.dumps(rows[5]) + "\n")
    with pytest.raises(ValueError, match="validation line 1 must have text in 'de', got None in"):
        load_texts(config)


def test_a_run_without_a_validation_split_warns(tmp_path, caplog):
    folder = write_texts(tmp_path / "texts", train=["a", "b"])
    _, data = prepared(config_of(tmp_path, folder))
    assert data.facts["validation_sha256"] == "none"
    assert f"{folder} has no split 'validation': there is no validation loss" in caplog.text


def test_a_name_for_a_corpus_without_configurations_is_refused(corpora, tmp_path):
    for dataset in (corpora[0], "demo"):
        with pytest.raises(ValueError, match=f"name must be null because '{dataset}' has no conf"):
            load_texts(config_of(tmp_path, dataset, name="de-en"))


def test_a_folder_called_demo_is_a_folder(tmp_path, monkeypatch):
    write_texts(tmp_path / "demo", train=["my own"])
    monkeypatch.chdir(tmp_path)
    texts = load_texts(config_of(tmp_path, "demo"))
    assert texts.train[0]["translation"][:] == [{"en": "my own", "de": "~my own"}]


def test_a_file_with_another_encoding_is_refused(tmp_path):
    folder = tmp_path / "latin"
    write_texts(folder, train=["gut", "schön", "größer", "übel"])
    text = (folder / "train.de").read_text(encoding="utf-8")
    (folder / "train.de").unlink()
    with gzip.open(folder / "train.de.gz", "wb") as file:
        file.write(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin must be UTF-8 .* kept 1, wrong_encoding 3"):
        prepared(config_of(tmp_path, folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mix": [{"name": "x"}]}, "mix must be a list of mappings, each with a dataset, got"),
        ({"mix": {"dataset": "x"}}, r"mix must be of type list, .*a list of \{dataset: ..., name"),
        ({"mix": [{"dataset": "x", "wieght": 1}]}, r"got 'wieght'.*'weight'"),
        ({"mix": [{"dataset": "x", "weight": 1}]}, r"for none, got \[None, 1.0\]"),
        ({"mix": [{"dataset": "x"}], "weight": 2}, r"for none, got \[2.0, None\]"),
        ({"mix": [{"dataset": "x", "weight": 0}], "weight": 2}, "weight must be above 0, got 0.0"),
        ({"weight": -1}, "weight must be above 0, got -1.0"),
        ({"mix": [{"dataset": "x", "name": 3}]}, "name must be of type str or null, got 3"),
        ({"max_length_ratio": 0.5}, "max_length_ratio must be at least 1, got 0.5"),
        ({"block_pairs": 0}, "block_pairs must be at least 1, got 0"),
    ],
)
def test_wrong_settings_of_a_mixture_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        load_config("demo", settings)


def test_a_mixture_can_be_given_on_the_command_line():
    config, _ = parse_arguments(["demo", "--mix", "[{dataset: x, weight: 1}]", "--weight", "3"])
    corpus = {"dataset": "x", "name": None, "revision": None, "columns": None, "weight": 1.0}
    assert (config.mix, config.weight) == ([corpus], 3.0)


def test_a_corpus_without_a_training_split_is_named(corpora, tmp_path):
    other = write_texts(tmp_path / "other", test=["x"])
    with pytest.raises(ValueError, match=r"other' must have a split 'train', got test"):
        load_texts(config_of(tmp_path, corpora[0], mix=[{"dataset": other}]))
