"""Batches of about equal length. Section 5.1."""

import numpy as np
import pytest
import torch
import train_toys

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.train.batches import (
    Collator,
    TrainingSteps,
    evaluation_batches,
    plan_steps,
    split_step,
)
from vanilla_transformer.train.corpus import encode_pairs, lengths, load_translations
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
