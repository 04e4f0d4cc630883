"""Streaming: training text that is read during training, in blocks."""

import collections
import itertools
import json

import datasets
import pytest
import train_toys
from accelerate.state import AcceleratorState
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from train_toys import prepared, write_texts

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.train.data import streaming
from vanilla_transformer.train.data.batches import BatchPlan, Collator
from vanilla_transformer.train.data.corpus import load_translations
from vanilla_transformer.train.data.prepare import load_texts, vocabulary_texts
from vanilla_transformer.train.data.streaming import Stream, StreamedSteps
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.recipe import load_config
from vanilla_transformer.train.run_folder.checkpoint import checkpoints, read_state
from vanilla_transformer.train.run_folder.files import read_metrics
from vanilla_transformer.train.run_folder.run_state import STREAM_POSITIONS

TOKENIZER = VanillaTransformerTokenizer()


def numbered(sizes, first=0, mark=""):
    """Return a stream of files of the given sizes; all pairs are different."""
    shards = []
    for size in sizes:
        shards.append([(f"{mark}{first + i}", f"n{mark}{first + i}") for i in range(size)])
        first += size
    features = datasets.Features({"translation": datasets.Translation(languages=["en", "de"])})
    return datasets.IterableDataset.from_generator(
        of_shards, gen_kwargs={"shards": shards}, features=features
    )


def of_shards(shards):
    for shard in shards:
        for source, target in shard:
            yield {"translation": {"en": source, "de": target}}


def texts(table):
    return table and [pair["en"] for pair in table["translation"].to_pylist()]


def steps_of(corpora, weights=None, rules=None, position=None, **options):
    settings = {
        "tokens_per_step": 60,
        "length_groups_per_step": 3,
        "tokens_per_micro_batch": 60,
        "block_pairs": 40,
        "seed": 1,
    }
    return StreamedSteps(
        corpora,
        BatchPlan(collator=Collator(0, 1, 260), **{**settings, **options}),
        weights=weights,
        tokenizer=TOKENIZER,
        languages=["en", "de"],
        filter_settings={"max_length": 60, **(rules or {})},
        position=position,
    )


def sentences(batches):
    """Return the sources of micro-batches as sorted text."""
    return sorted(
        TOKENIZER.decode(ids, skip_special_tokens=True)
        for batch in batches
        for ids in batch["input_ids"]
    )


def seen(steps, first, last):
    return [sentences(steps[index].batches) for index in range(first, last)]


@pytest.fixture(autouse=True)
def _few_pairs_at_once(monkeypatch):
    # real corpora have far more pairs than are read at once
    monkeypatch.setattr(streaming, "READ_PAIRS", 4)
    monkeypatch.setattr(Stream.__init__, "__defaults__", (None, 4))
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_pass_has_every_pair_once_and_reads_the_files_in_a_new_order():
    rows, passes = numbered([9, 4, 1, 6, 3]), []
    tables = Stream(rows, seed=1, corpus_index=0).tables()
    for _ in range(3):
        # a pass ends with None
        read = list(itertools.chain(*map(texts, iter(tables.__next__, None))))
        assert sorted(read, key=int) == [str(number) for number in range(23)]
        passes.append(read)
    assert len(set(map(tuple, passes))) == 3
    # a file is read in its own order
    assert [number for number in map(int, passes[0]) if number < 9] == list(range(9))


@pytest.mark.parametrize("sizes", [[23], [9, 4, 1, 6, 3], [4, 4]])
def test_a_stream_resumes_at_any_position(sizes):
    stream = Stream(numbered(sizes), seed=1, corpus_index=0)
    positions, read = [], []
    for table in stream.tables():
        read.append(texts(table))
        positions.append(json.loads(json.dumps(stream.position)))
        if len(read) > 20:
            break
    for index, position in enumerate(positions[:-4]):
        other = Stream(numbered(sizes), seed=1, corpus_index=0, position=position).tables()
        assert [texts(next(other)) for _ in range(4)] == read[index + 1 : index + 5]


def test_a_block_is_the_next_pairs_of_the_stream():
    steps = steps_of([numbered([1000])])
    first, num_blocks, blocks = 0, 0, []
    while num_blocks < 3:
        position = steps[first].position
        assert position["first_step"] == first
        last = first + len(steps._block.steps)
        blocks += sorted(itertools.chain(*seen(steps, first, last)), key=int)
        num_blocks += 1
        first = last
    assert blocks == [str(number) for number in range(120)]


def test_a_corpus_smaller_than_a_block_is_a_block():
    steps = steps_of([numbered([9, 8])], block_pairs=500)
    whole = sorted(map(str, range(17)))
    first = 0
    for block in range(3):
        assert steps[first].position["block"] == block
        assert steps[first].position[STREAM_POSITIONS][0]["pass"] == block
        last = first + len(steps._block.steps)
        assert sorted(itertools.chain(*seen(steps, first, last))) == whole
        first = last


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_all_processes_and_workers_together_see_the_same_steps(processes, num_workers):
    count = 25
    corpora = [numbered([30, 50]), numbered([12], mark="x")]
    expected = seen(steps_of(corpora, [3.0, 1.0]), 0, count)
    loaders = [
        DataLoader(
            steps_of(corpora, [3.0, 1.0], num_processes=processes, process_index=index),
            batch_size=None,
            sampler=range(count),
            num_workers=num_workers,
        )
        for index in range(processes)
    ]
    found = []
    for parts in zip(*loaders, strict=True):
        assert len({len(part.batches) for part in parts}) == 1
        assert len({json.dumps(part.position) for part in parts}) == 1
        found.append(sentences(batch for part in parts for batch in part.batches))
    assert found == expected
    # the small corpus was read more than once
    assert parts[0].position[STREAM_POSITIONS][1]["pass"] > 0


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    block_pairs=st.integers(5, 60),
    stop=st.integers(1, 20),
)
def test_a_resumed_stream_equals_an_uninterrupted_one(sizes, block_pairs, stop):
    options = {"block_pairs": block_pairs}
    whole = steps_of([numbered(sizes)], **options)
    items = [whole[index] for index in range(24)]
    position = json.loads(json.dumps(items[stop - 1].position))
    resumed = steps_of([numbered(sizes)], **options, position=position)
    for index in range(stop, 24):
        item = resumed[index]
        assert sentences(item.batches) == sentences(items[index].batches)
        without_streams = {STREAM_POSITIONS: 0}
        assert item.position | without_streams == items[index].position | without_streams


def test_a_corpus_has_its_share_of_the_blocks():
    steps = steps_of([numbered([100]), numbered([7], mark="x")], [9.0, 1.0], block_pairs=50)
    counts = collections.Counter(
        sentence[0] == "x" for step in seen(steps, 0, 200) for sentence in step
    )
    assert counts[True] / counts.total() == pytest.approx(0.1, abs=0.01)


def test_dropped_pairs_are_summed_over_blocks():
    pairs = [("a", "b"), ("", "b"), ("a", "b"), ("caf\ufffd", "b")]
    features = datasets.Features({"translation": datasets.Translation(languages=["en", "de"])})
    rows = datasets.IterableDataset.from_generator(
        of_shards, gen_kwargs={"shards": [pairs * 4]}, features=features
    )
    steps = steps_of([rows], rules={"drop_duplicates": True}, block_pairs=16)
    index = 0
    while steps[index].position["block"] < 2:
        index += 1
    position = steps[index].position
    # duplicates are found only within a block
    own = {"kept": 1, "wrong_encoding": 4, "empty": 4, "duplicate": 7}
    assert {name: position["block_counts"][name] for name in own} == own
    assert {name: position["counts"][name] for name in own} == {n: 2 * c for n, c in own.items()}


def test_a_later_block_without_usable_pairs_is_counted_and_skipped():
    good = [(f"a{i}", "b") for i in range(16)]
    rows = datasets.IterableDataset.from_generator(
        of_shards,
        gen_kwargs={"shards": [[*good, *[("", "b")] * 20, *[("caf\ufffd", "b")] * 12, *good]]},
        features=datasets.Features({"translation": datasets.Translation(["en", "de"])}),
    )
    steps = steps_of([rows], block_pairs=16)
    index = 0
    while steps[index].position["block"] == 0:
        index += 1
    step = steps[index]
    assert (step.position["block"], step.position["first_step"]) == (3, index)
    assert step.position["counts"] == {"kept": 16, "empty": 20, "wrong_encoding": 12}
    # a run resumes from there
    assert sentences(steps_of([rows], block_pairs=16, position=step.position)[index].batches) == (
        sentences(step.batches)
    )


def test_text_that_cannot_be_streamed_is_refused():
    with pytest.raises(ValueError, match="at least one pair to stream, got none"):
        steps_of([numbered([0])])
    with pytest.raises(ValueError, match="first block of the training text must have a pair"):
        steps_of([numbered([50])], rules={"max_length": 2})
    with pytest.raises(ValueError, match=r"the tokens of the longest sentence, got 3"):
        steps_of([numbered([50])], tokens_per_step=3)


def test_a_stream_with_other_text_cannot_be_resumed():
    position = steps_of([numbered([500])])[30].position
    assert position["block"] > 0
    with pytest.raises(ValueError, match="resumed with the same text, got block"):
        steps_of([numbered([500], first=1)], position=position)
    with pytest.raises(ValueError, match="must not be before"):
        steps_of([numbered([500])], position=position)[3]


def stream_settings(corpus, folder, **changes):
    return train_toys.toy_config(
        corpus, folder, streaming=True, block_pairs=30, tokens_per_step=200, **changes
    )


def test_a_resumed_streamed_run_equals_an_uninterrupted_one(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    assert train(stream_settings(corpus, tmp_path / "whole"))
    # the first part ends in the middle of a block
    assert train(stream_settings(corpus, tmp_path / "run", max_steps=6))
    state = read_state(checkpoints(tmp_path / "run/checkpoints")[-1])
    assert 0 < state["stream_position"]["first_step"] < 6
    assert train(stream_settings(corpus, tmp_path / "run", num_workers=1), resume=True)
    train_toys.assert_same_bits(tmp_path / "run", tmp_path / "whole")
    reports = [line for line in read_metrics(tmp_path / "run") if "block" in line]
    assert reports == [line for line in read_metrics(tmp_path / "whole") if "block" in line]
    assert [line["block"] for line in reports] == list(range(len(reports)))
    assert len(reports) > 2
    assert reports[-1]["pairs_kept"] > reports[0]["pairs_kept"] > 0


def test_text_files_and_tables_are_streamed_alike(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus", pairs=50)
    whole = load_translations(str(corpus), None, "en", "de")["train"]["translation"][:]
    for part in range(2):
        rows = datasets.Dataset.from_list([{"translation": pair} for pair in whole[part::2]])
        (tmp_path / "tables").mkdir(exist_ok=True)
        rows.to_parquet(tmp_path / f"tables/train-0000{part}-of-00002.parquet")
    for folder, num_shards in ((corpus, 1), (tmp_path / "tables", 2)):
        rows = load_translations(str(folder), None, "en", "de", streaming=True)["train"]
        assert isinstance(rows, datasets.IterableDataset)
        assert rows.num_shards == num_shards
        tables = iter(Stream(rows, 1, 0).tables().__next__, None)
        read = [tuple(pair.values()) for t in tables for pair in t["translation"].to_pylist()]
        assert sorted(read) == sorted(tuple(pair.values()) for pair in whole)


def test_only_the_training_split_is_streamed(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"translation": {"en": "a", "de": "b"}}\n' * 3)
    (tmp_path / "validation.jsonl").write_text('{"translation": {"en": "v", "de": "w"}}\n')
    splits = load_translations(str(tmp_path), None, "en", "de", streaming=True)
    assert splits["validation"]["translation"][:] == [{"en": "v", "de": "w"}]
    assert isinstance(splits["train"], datasets.IterableDataset)


def test_a_vocabulary_is_learned_from_the_beginning_of_a_stream(tmp_path, monkeypatch):
    large = write_texts(tmp_path / "large", train=[f"l{i}" for i in range(40)])
    small = write_texts(tmp_path / "small", train=["s0", "s1", "s2"])
    monkeypatch.setattr("vanilla_transformer.train.data.prepare.VOCABULARY_PAIRS", 24)
    config = train_toys.toy_config(
        large,
        tmp_path / "run",
        streaming=True,
        weight=1,
        mix=[{"dataset": small, "weight": 1}],
    )
    found = list(vocabulary_texts(load_texts(config), ["en", "de"], seed=1))
    assert found[:4] == ["l0", "~l0", "l1", "~l1"]
    assert found[-6:] == ["s0", "~s0", "s1", "~s1", "s2", "~s2"]
    assert len(found) == 2 * (12 + 3)


def test_mixed_streams_need_weights(tmp_path):
    with pytest.raises(ValueError, match=r"weight must be given .* streamed.*got none"):
        load_config("demo", {"streaming": True, "mix": [{"dataset": "x"}]})


def test_a_streamed_run_has_the_facts_that_are_known(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    _, data = prepared(stream_settings(corpus, tmp_path / "run"))
    assert data.pairs is None
    assert len(data.validation.kept_indices()) == 11
    assert len(data.facts.pop("validation_sha256")) == 64
    assert data.facts == {
        "dataset_commit": "none",
        "leaks": "not counted, because the training text is streamed",
        "cleaning": "counted in metrics.jsonl",
    }
