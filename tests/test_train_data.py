"""Parallel text, and batches of about equal length. Section 5.1."""

import gzip
import os

import datasets
import numpy as np
import pytest
import torch
import train_toys
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.train import data
from vanilla_transformer.train.data import (
    Collator,
    TrainingSteps,
    drop_untrainable,
    encode_pairs,
    evaluation_batches,
    lengths,
    load_translations,
    plan_steps,
    read_lines,
    split_step,
)
from vanilla_transformer.train.step import IGNORED


@pytest.fixture(scope="module")
def sizes():
    """Lengths of 20,000 pairs, spread as in real text."""
    random = np.random.default_rng(5)
    source = np.clip(random.lognormal(3.1, 0.6, 20_000), 2, 200).astype(np.int64)
    target = np.clip(source * random.lognormal(0.05, 0.2, 20_000), 2, 200).astype(np.int64)
    return source, target


def planned(sizes, seed=1, epoch=0, tokens_per_step=8000, groups=8):
    return plan_steps(*sizes, tokens_per_step, groups, seed, epoch)


def test_every_sentence_comes_once_an_epoch(sizes):
    for epoch in range(3):
        steps = planned(sizes, epoch=epoch)
        seen = np.concatenate([group for step in steps for group in step])
        assert sorted(seen) == list(range(20_000))
        assert len(steps) == len(planned(sizes))


def test_a_step_has_about_the_tokens_asked_for_and_none_is_small(sizes):
    steps = [np.concatenate(step) for step in planned(sizes)]
    for side in sizes:
        tokens = np.array([side[step].sum() for step in steps])
        # a group may be over its share by one sentence
        assert tokens.max() < 1.05 * 8000
        assert tokens.min() > 0.6 * 8000
        assert tokens.mean() > 0.85 * 8000


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_the_sentences_of_a_step_do_not_depend_on_the_number_of_processes(sizes, num_processes):
    for groups in planned(sizes)[:20]:
        shares = split_step(groups, *sizes, 1000, num_processes)
        assert len(shares) == num_processes
        assert len({len(share) for share in shares}) == 1
        seen = np.concatenate([part for share in shares for part in share])
        assert sorted(seen) == sorted(np.concatenate(groups))


def test_a_micro_batch_fits_into_memory(sizes):
    for cap in (250, 1000, 8000):
        parts = split_step(planned(sizes)[0], *sizes, cap, 2)
        for part in parts[0] + parts[1]:
            assert len(part) * max(sizes[0][part].max(), sizes[1][part].max()) <= cap


def test_at_least_95_of_100_positions_are_tokens(sizes):
    real = padded = 0
    for groups in planned(sizes):
        for part in split_step(groups, *sizes, 2000, 1)[0]:
            real += sum(side[part].sum() for side in sizes)
            padded += sum(len(part) * side[part].max() for side in sizes)
    assert real / padded > 0.95


def test_the_order_is_another_in_each_epoch_and_for_each_seed_but_the_same_again(sizes):
    def first(**options):
        return np.sort(np.concatenate(planned(sizes, **options)[0])).tolist()

    assert first() == first()
    assert first() != first(epoch=1)
    assert first() != first(seed=2)


def test_sentences_meet_new_neighbors_in_the_next_epoch(sizes):
    steps = [[np.concatenate(step) for step in planned(sizes, epoch=epoch)] for epoch in (0, 1)]
    step_before = np.empty(20_000, dtype=int)
    for number, step in enumerate(steps[0]):
        step_before[step] = number
    shares = [np.bincount(step_before[step]).max() / len(step) for step in steps[1]]
    assert np.mean(shares) < 0.2


@pytest.mark.parametrize("sentences", [1, 2, 3, 9])
def test_a_corpus_can_be_smaller_than_a_step(sentences):
    sizes = np.full(sentences, 5), np.arange(2, sentences + 2)
    steps = plan_steps(*sizes, tokens_per_step=30, length_groups_per_step=4, seed=1, epoch=0)
    seen = [int(index) for step in steps for group in step for index in group]
    assert sorted(seen) == list(range(sentences))
    assert all(len(group) for step in steps for group in step)


def test_what_cannot_be_batched_is_refused():
    sizes = np.array([5, 40]), np.array([5, 6])
    with pytest.raises(ValueError, match="longest sentence, of 40 tokens, got 30"):
        plan_steps(*sizes, 30, 1, 1, 0)
    with pytest.raises(ValueError, match="at least one sentence, got none"):
        plan_steps(np.array([]), np.array([]), 30, 1, 1, 0)
    with pytest.raises(ValueError, match="got 30 and one of 40 tokens"):
        split_step([np.array([0, 1])], *sizes, 30, 1)
    with pytest.raises(ValueError, match="at least one sentence for each process, got 2 for 4"):
        split_step([np.array([0, 1])], *sizes, 100, 4)


def test_a_collator_pads_each_side_and_shifts_the_labels():
    batch = Collator(pad_token_id=0, decoder_start_token_id=1, vocab_size=9)(
        {"input_ids": [[5, 6, 7, 2], [8, 2]], "labels": [[3, 2], [4, 5, 2]]}
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7, 2], [8, 2, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[3, 2, IGNORED], [4, 5, 2]]
    assert batch["decoder_input_ids"].tolist() == [[1, 3, 2], [1, 4, 5]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"input_ids": [[9, 2]], "labels": [[2]]}, "input_ids must be ids below 9, got 9"),
        ({"input_ids": [[2]], "labels": [[-100, 2]]}, "labels must be ids below 9, got -100"),
        ({"input_ids": [], "labels": []}, "at least one sentence, got none"),
    ],
)
def test_a_collator_refuses_ids_out_of_the_vocabulary_and_an_empty_batch(rows, message):
    with pytest.raises(ValueError, match=message):
        Collator(pad_token_id=0, decoder_start_token_id=1, vocab_size=9)(rows)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return train_toys.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def rows(corpus):
    texts = load_translations(str(corpus), None, "en", "de")
    return encode_pairs(texts["train"], "train", VanillaTransformerTokenizer(), "en", "de")


def steps_of(rows, **options):
    settings = {"tokens_per_step": 900, "length_groups_per_step": 3, "tokens_per_micro_batch": 200}
    return TrainingSteps(rows, Collator(0, 1, 260), **settings, seed=1, **options)


def as_set(batches):
    return sorted(row.tolist() for batch in batches for row in batch["input_ids"])


def test_a_step_can_be_asked_for_in_any_order(rows):
    forward, other = steps_of(rows), steps_of(rows)
    later = forward.steps_per_epoch + 2
    expected = [forward[index] for index in range(later + 1)]
    for index in (later, 1, later - 1, 0):
        for batch, again in zip(expected[index], other[index], strict=True):
            assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert as_set(expected[0]) != as_set(expected[forward.steps_per_epoch])


def test_processes_share_a_step_without_overlap(rows):
    def sentences(batches):
        return sorted(
            tuple(ids[mask.bool()].tolist())
            for batch in batches
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        )

    alone = sentences(steps_of(rows)[0])
    shares = [steps_of(rows, num_processes=2, process_index=index)[0] for index in range(2)]
    assert len(shares[0]) == len(shares[1])
    assert sentences(shares[0] + shares[1]) == alone


def test_evaluation_sees_each_pair_once_on_any_number_of_processes(rows):
    tokens = int(lengths(rows)[1].sum())
    for processes in (1, 3):
        batches = [
            batch
            for index in range(processes)
            for batch in evaluation_batches(rows, Collator(0, 1, 260), 200, processes, index)
        ]
        assert sum(len(batch["labels"]) for batch in batches) == len(rows)
        assert sum(int((batch["labels"] != IGNORED).sum()) for batch in batches) == tokens


def test_empty_and_long_pairs_are_left_out_and_counted():
    texts = datasets.Dataset.from_dict(
        {
            "translation": [
                {"en": "a cat", "de": "eine Katze"},
                {"en": "", "de": "nichts"},
                {"en": "much " * 40, "de": "viel"},
                {"en": "a dog", "de": "ein Hund"},
            ]
        }
    )
    encoded = encode_pairs(texts, "train", VanillaTransformerTokenizer(), "en", "de")
    kept, counts = drop_untrainable(encoded, "train", max_length=50)
    assert counts == {"kept": 2, "empty": 1, "too_long": 1}
    assert len(kept) == 2
    with pytest.raises(ValueError, match="got 1 with an empty and 3 with a too long side"):
        drop_untrainable(encoded, "train", max_length=3)


def test_the_direction_is_the_one_asked_for(corpus):
    texts = load_translations(str(corpus), None, "de", "en")
    tokenizer = VanillaTransformerTokenizer()
    encoded = encode_pairs(texts["test"], "test", tokenizer, "de", "en")
    first = (corpus / "test.de").read_text(encoding="utf-8").split("\n")[0]
    assert tokenizer.decode(encoded[0]["input_ids"], skip_special_tokens=True) == first


def test_text_files_can_be_compressed_and_named_by_a_prefix(tmp_path):
    for lang, text in (("en", "one\u2028line\ntwo\n"), ("de", "eins\nzwei\n")):
        with gzip.open(tmp_path / f"news.{lang}.gz", "wt", encoding="utf-8") as file:
            file.write(text)
    texts = load_translations(str(tmp_path / "news"), None, "en", "de")
    assert list(texts) == ["train"]
    assert texts["train"]["translation"][:] == [
        {"en": "one\u2028line", "de": "eins"},
        {"en": "two", "de": "zwei"},
    ]


def test_a_changed_file_is_read_again(tmp_path):
    train_toys.write_corpus(tmp_path, pairs=5)
    assert len(load_translations(str(tmp_path), None, "en", "de")["train"]) == 5
    train_toys.write_corpus(tmp_path, pairs=6)
    assert len(load_translations(str(tmp_path), None, "en", "de")["train"]) == 6


def test_a_file_that_was_only_read_is_the_same_file(tmp_path):
    train_toys.write_corpus(tmp_path, pairs=5)
    before = load_translations(str(tmp_path), None, "en", "de")["train"]
    for path in tmp_path.iterdir():
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns + 10**9, status.st_mtime_ns))
    after = load_translations(str(tmp_path), None, "en", "de")["train"]
    assert len(before.cache_files) == 1
    assert before.cache_files == after.cache_files


def test_text_is_tokenized_once_by_a_tokenizer_learned_or_loaded(tmp_path, monkeypatch):
    corpus = train_toys.write_corpus(tmp_path / "corpus", pairs=40)
    texts = load_translations(str(corpus), None, "en", "de")["train"]
    words = [text for pair in texts["translation"] for text in pair.values()]
    learned = VanillaTransformerTokenizer().train_new_from_iterator(words * 2, vocab_size=280)
    learned.save_pretrained(tmp_path / "tokenizer")
    rows = encode_pairs(texts, "train", learned, "en", "de")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    calls = []
    encode = data._encode
    monkeypatch.setattr(data, "_encode", lambda *a, **kw: calls.append(1) or encode(*a, **kw))
    again = encode_pairs(texts, "train", loaded, "en", "de")
    assert not calls
    assert again[:] == rows[:]
    # but by another, or the other way round, it is tokenized anew
    turned = encode_pairs(texts, "train", loaded, "de", "en")
    bytes_alone = encode_pairs(texts, "train", VanillaTransformerTokenizer(), "en", "de")
    assert len(calls) == 2
    assert turned[0]["input_ids"] == rows[0]["labels"]
    assert bytes_alone[0] != rows[0]


def test_a_local_dataset_of_the_translation_schema_loads(tmp_path):
    (tmp_path / "train.jsonl").write_text(
        '{"translation": {"en": "a", "de": "b"}}\n' * 3, encoding="utf-8"
    )
    assert len(load_translations(str(tmp_path), None, "en", "de")["train"]) == 3
    with pytest.raises(ValueError, match=r"source_lang must be one of de, en .*, got 'fr'"):
        load_translations(str(tmp_path), None, "fr", "de")


def write_pair(folder, english, german):
    (folder / "train.en").write_bytes(english)
    (folder / "train.de").write_bytes(german)


@pytest.mark.parametrize(
    ("english", "german", "message"),
    [
        (b"a\nb\nc\n", b"a\nb\n", "train.de must have as many lines, got 3 and 2"),
        (b"a\nb\n", b"a\n\xff\xfe\n", "train.de line 2 must be UTF-8"),
        (b"", b"", "at least one line, got none"),
    ],
)
def test_files_that_do_not_fit_are_refused(english, german, message, tmp_path):
    write_pair(tmp_path, english, german)
    with pytest.raises(ValueError, match=message):
        load_translations(str(tmp_path), None, "en", "de")


def test_a_cut_archive_is_refused(tmp_path):
    whole = gzip.compress(b"a line of text\n" * 50)
    (tmp_path / "train.en.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "train.de.gz").write_bytes(whole)
    with pytest.raises(ValueError, match=r"train.en.gz cannot be read to its end"):
        load_translations(str(tmp_path), None, "en", "de")


def test_only_a_line_feed_ends_a_line():
    lines = ["\ufeffone\r\n".encode(), "two\u2028three\n".encode(), b"\n", b"four"]
    assert list(read_lines(lines, "stdin")) == ["one", "two\u2028three", "", "four"]
    with pytest.raises(ValueError, match="stdin line 2 must be UTF-8"):
        list(read_lines([b"a\n", b"\xe9\n"], "stdin"))


def test_a_language_without_its_file_is_named(corpus):
    with pytest.raises(ValueError, match=r"train\.fr must exist beside .*train\.en"):
        load_translations(str(corpus), None, "en", "fr")


def test_a_dataset_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_translations(str(tmp_path / "nothing"), None, "en", "de")


def test_a_dataset_without_translations_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"must have a column 'translation'.*, got text"):
        load_translations(str(tmp_path), None, "en", "de")


def test_a_line_without_text_is_named():
    pairs = [{"en": "a", "de": "b"}] * 2 + [{"en": "c", "de": None}]
    texts = datasets.Dataset.from_dict({"translation": pairs})
    with pytest.raises(ValueError, match="validation line 3 must have text in 'de', got None"):
        encode_pairs(texts, "validation", VanillaTransformerTokenizer(), "en", "de")
