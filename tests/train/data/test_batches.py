"""Batches of pairs of similar length. Section 5.1."""

import collections
import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import train_toys
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.train.data import batches
from vanilla_transformer.train.data.batches import (
    IGNORED,
    BatchPlan,
    Collator,
    TrainingSteps,
    compute_shares,
    count_steps,
    draw_epoch_order,
    evaluation_batches,
    plan_steps,
    split_step,
)
from vanilla_transformer.train.data.corpus import load_translations
from vanilla_transformer.train.data.pairs import encode_pairs, pair_lengths, prepare_pairs


def spread(pairs):
    """Return lengths of pairs, distributed as in real text."""
    random = np.random.default_rng(5)
    source = np.clip(random.lognormal(3.1, 0.6, pairs), 2, 200).astype(np.int64)
    target = np.clip(source * random.lognormal(0.05, 0.2, pairs), 2, 200).astype(np.int64)
    return source, target


@pytest.fixture(scope="module")
def sizes():
    return spread(20_000)


def planned(sizes, seed=1, epoch=0, tokens_per_step=8000, groups=8):
    num_steps = count_steps(int(np.maximum(*sizes).sum()), tokens_per_step)
    return plan_steps(*sizes, num_steps, groups, np.random.default_rng([seed, epoch]))


def test_every_sentence_comes_once_an_epoch(sizes):
    for epoch in range(3):
        steps = planned(sizes, epoch=epoch)
        seen = np.concatenate([group for step in steps for group in step])
        assert sorted(seen) == list(range(20_000))
        assert len(steps) == len(planned(sizes))


def test_every_step_has_about_tokens_per_step(sizes):
    steps = [np.concatenate(step) for step in planned(sizes)]
    for side in sizes:
        tokens = np.array([side[step].sum() for step in steps])
        # a group can exceed its share by one sentence
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


def non_padding(sizes, tokens_per_step, tokens_per_micro_batch):
    real = padded = 0
    for groups in planned(sizes, tokens_per_step=tokens_per_step):
        for part in split_step(groups, *sizes, tokens_per_micro_batch, 1)[0]:
            real += sum(side[part].sum() for side in sizes)
            padded += sum(len(part) * side[part].max() for side in sizes)
    return real / padded


def time_of(sizes, parts, launch_tokens):
    return sum(
        launch_tokens + len(part) * sum(int(side[part].max()) for side in sizes) for part in parts
    )


def partitions(parts):
    """All ways to put parts, in their order, into groups."""
    if not parts:
        yield []
        return
    for size in range(1, len(parts) + 1):
        for rest in partitions(parts[size:]):
            yield [np.concatenate(parts[:size]), *rest]


def test_the_choice_of_parts_reads_each_pair_of_parts_once():
    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    parts = Counted((1, length, length) for length in range(1, 65))
    assert batches._choose_parts_to_merge(parts, 10**6, 10**6) == [[*range(64)]]
    assert parts.reads < 64**2


@pytest.mark.parametrize("cap", [3000, 8000, 20_000])
@pytest.mark.parametrize("launch_tokens", [100, 3000, 10**6])
def test_groups_share_a_micro_batch_where_padding_costs_less_than_a_launch(
    sizes, cap, launch_tokens
):
    for groups in planned(sizes)[:10]:
        apart = split_step(groups, *sizes, cap, 1)[0]
        shared = split_step(groups, *sizes, cap, 1, launch_tokens)[0]
        assert sorted(np.concatenate(shared)) == sorted(np.concatenate(groups))
        apart.sort(key=lambda part: max(side[part].max() for side in sizes))
        allowed = [
            parts
            for parts in partitions(apart)
            if all(len(p) * max(side[p].max() for side in sizes) <= cap for p in parts)
        ]
        fastest = min(time_of(sizes, parts, launch_tokens) for parts in allowed)
        assert time_of(sizes, shared, launch_tokens) == fastest
        if launch_tokens == 10**6:
            assert len(shared) == min(map(len, allowed))


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
def test_processes_get_equally_many_shared_micro_batches(sizes, num_processes):
    for groups in planned(sizes)[:20]:
        shares = split_step(groups, *sizes, 16_000, num_processes, 8192)
        assert len({len(share) for share in shares}) == 1
        seen = np.concatenate([part for share in shares for part in share])
        assert sorted(seen) == sorted(np.concatenate(groups))
        # without a launch time they would be eight groups
        assert num_processes * len(shares[0]) < 8 or num_processes == 8


def test_at_least_97_of_100_positions_are_tokens():
    assert non_padding(spread(200_000), 25_000, 4096) > 0.97
    assert non_padding(spread(200_000), 25_000, 25_000) > 0.97


def test_with_a_tenth_of_the_text_95_of_100_positions_are_tokens(sizes):
    assert non_padding(sizes, 8000, 2000) > 0.95


def test_pairs_of_a_group_have_similar_lengths_on_both_sides(sizes):
    groups = [group for step in planned(sizes) for group in step]
    for side in sizes:
        within = np.mean([side[group].std() for group in groups])
        assert within < 0.15 * side.std()


def test_the_order_depends_on_epoch_and_seed_and_is_reproducible(sizes):
    def first(**options):
        return np.sort(np.concatenate(planned(sizes, **options)[0])).tolist()

    assert first() == first()
    assert first() != first(epoch=1)
    assert first() != first(seed=2)


def test_sentences_share_a_step_with_other_sentences_in_the_next_epoch(sizes):
    steps = [[np.concatenate(step) for step in planned(sizes, epoch=epoch)] for epoch in (0, 1)]
    step_before = np.empty(20_000, dtype=int)
    for number, step in enumerate(steps[0]):
        step_before[step] = number
    shares = [np.bincount(step_before[step]).max() / len(step) for step in steps[1]]
    assert np.mean(shares) < 0.2


@pytest.mark.parametrize("sentences", [1, 2, 3, 9])
def test_a_corpus_can_be_smaller_than_a_step(sentences):
    sizes = np.full(sentences, 5), np.arange(2, sentences + 2)
    steps = planned(sizes, tokens_per_step=30, groups=4)
    seen = [int(index) for step in steps for group in step for index in group]
    assert sorted(seen) == list(range(sentences))
    assert all(len(group) for step in steps for group in step)


def test_fewer_sentences_than_processes_are_refused():
    sizes = np.array([5, 40]), np.array([5, 6])
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


def encoded(folder):
    texts = load_translations(str(folder), None, "en", "de")
    return encode_pairs(texts["train"], "train", VanillaTransformerTokenizer(), "en", "de")


@pytest.fixture(scope="module")
def pairs(corpus):
    return prepare_pairs([encoded(corpus)], max_length=60)


def steps_of(pairs, **options):
    settings = {"tokens_per_step": 300, "length_groups_per_step": 3, "tokens_per_micro_batch": 80}
    settings |= {"block_pairs": 500_000, "seed": 1}
    of_corpora = {
        name: options.pop(name)
        for name in ("corpus_sizes", "weights", "num_segmentations")
        if name in options
    }
    plan = BatchPlan(collator=Collator(0, 1, 260), **{**settings, **options})
    return TrainingSteps(pairs, plan, **of_corpora)


def sentences(batches):
    return sorted(
        tuple(ids[mask.bool()].tolist())
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    )


def test_the_order_of_a_seed_is_the_recorded_one(pairs):
    steps = steps_of(pairs, tokens_per_step=150)
    found = []
    for number in (0, steps.steps_per_epoch + 1):
        block, index = steps.find_block(number)
        found.append([block.pair_indices[group].tolist() for group in block.steps[index]])
    assert found[0] == [[43, 54, 64, 86, 4, 14], [46, 13], [18, 27, 50]]
    assert found[1] == [[88, 37], [6, 54, 14, 57, 1, 86], [32]]


def sources(pairs, numbers=None):
    numbers = pairs.kept_indices() if numbers is None else np.asarray(numbers)
    return sorted(tuple(ids.tolist()) for ids in pairs[numbers]["input_ids"])


def test_steps_can_be_read_in_any_order(pairs):
    forward, other = (steps_of(pairs, block_pairs=25) for _ in range(2))
    later = forward.steps_per_epoch + 2
    expected = [forward[index].batches for index in range(later + 1)]
    for index in (later, 1, later - 1, 0):
        for batch, again in zip(expected[index], other[index].batches, strict=True):
            assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert sentences(expected[0]) != sentences(expected[forward.steps_per_epoch])


@pytest.mark.parametrize("block_pairs", [1, 7, 25, 40, 500])
def test_every_pair_comes_once_an_epoch_however_it_is_cut_into_blocks(pairs, block_pairs):
    steps = steps_of(pairs, block_pairs=block_pairs)
    for epoch in range(2):
        first = epoch * steps.steps_per_epoch
        seen = [
            sentence
            for index in range(steps.steps_per_epoch)
            for sentence in sentences(steps[first + index].batches)
        ]
        assert sorted(seen) == sources(pairs)


@pytest.mark.parametrize("block_pairs", [1, 3, 7, 20])
def test_every_step_gets_a_sentence_even_if_steps_have_only_one(block_pairs):
    lengths = np.full(40, 10)
    lengths[:2] = 5
    alike = SimpleNamespace(
        rows=lengths,
        source_lengths=lengths,
        target_lengths=lengths,
        kept_indices=lambda first=0, last=None: np.arange(40)[first:last],
    )
    steps = steps_of(alike, tokens_per_step=10, block_pairs=block_pairs)
    assert steps.steps_per_epoch == 39
    planned = [steps.find_block(number) for number in range(39)]
    found = [block.pair_indices[group] for block, index in planned for group in block.steps[index]]
    assert sorted(np.concatenate(found).tolist()) == list(range(40))


def test_a_block_holds_only_its_own_pairs(pairs):
    steps = steps_of(pairs, block_pairs=25, tokens_per_step=150)
    steps[0]
    # 90 pairs are four blocks, whose pairs are in proportion to their steps
    assert (
        len(steps._block.pair_indices) == 90 * len(steps._block.steps) // steps.steps_per_epoch < 25
    )
    assert 1 < len(steps._block.steps) < steps.steps_per_epoch / 2


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_all_processes_and_workers_together_see_the_same_steps(pairs, processes, num_workers):
    options = {"block_pairs": 30, "tokens_per_step": 500}
    alone = steps_of(pairs, **options)
    count = alone.steps_per_epoch + 2
    expected = [sentences(alone[index].batches) for index in range(count)]
    shares = [
        DataLoader(
            steps_of(pairs, **options, num_processes=processes, process_index=index),
            batch_size=None,
            sampler=range(count),
            num_workers=num_workers,
        )
        for index in range(processes)
    ]
    found = 0
    for step, parts in enumerate(zip(*shares, strict=True)):
        assert len({len(part.batches) for part in parts}) == 1
        assert sentences(batch for part in parts for batch in part.batches) == expected[step]
        found += 1
    assert found == count


def test_steps_can_be_pickled_for_a_spawned_process(pairs):
    steps = steps_of(pairs)
    expected = sentences(steps[1].batches)
    handed = pickle.loads(pickle.dumps(steps))
    assert handed._epoch_order is None
    assert sentences(handed[1].batches) == expected


def test_evaluation_sees_each_pair_once_on_any_number_of_processes(pairs):
    tokens = int(pair_lengths(pairs.rows)[1].sum())
    for processes in (1, 3):
        each = [
            list(evaluation_batches(pairs, Collator(0, 1, 260), 200, processes, index))
            for index in range(processes)
        ]
        # with a sharded model all processes need the same number of batches
        assert len({len(batches) for batches in each}) == 1
        counted = [batch["labels"] != IGNORED for batches in each for batch in batches]
        assert sum(int(labels.any(dim=1).sum()) for labels in counted) == len(pairs.rows)
        assert sum(int(labels.sum()) for labels in counted) == tokens


def test_a_pair_that_does_not_fit_into_a_step_is_refused(pairs):
    with pytest.raises(ValueError, match=r"tokens of the longest sentence, got 20"):
        steps_of(pairs, tokens_per_step=20)


def test_dropped_pairs_are_in_no_batch(corpus):
    few = prepare_pairs([encoded(corpus)], max_length=20)
    assert 0 < len(few.kept_indices()) < len(few.rows)
    steps = steps_of(few)
    seen = [s for index in range(steps.steps_per_epoch) for s in sentences(steps[index].batches)]
    assert sorted(seen) == sources(few)
    assert steps.fingerprint()["pairs"] == len(seen)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data(), st.integers(0, 5))
def test_each_corpus_gives_its_share_pass_by_pass(sizes, data, seed):
    weights = data.draw(
        st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)) | st.none()
    )
    shares = compute_shares(sizes, weights)
    assert sum(shares) == sum(sizes)
    if weights is None:
        assert shares == sizes
    else:
        for share, weight in zip(shares, weights, strict=True):
            assert abs(share - weight / sum(weights) * sum(sizes)) <= 1
    ends = np.cumsum([0, *sizes])
    corpora = [np.arange(first, last) for first, last in itertools.pairwise(ends)]
    epochs = [draw_epoch_order(corpora, shares, seed, epoch) for epoch in range(4)]
    for corpus, share in zip(corpora, shares, strict=True):
        seen = collections.Counter()
        for epoch in epochs:
            mine = epoch[np.isin(epoch, corpus)]
            assert len(mine) == share
            seen.update(mine.tolist())
            # every pair is used once before a pair is used again
            counts = [seen[number] for number in corpus.tolist()]
            assert max(counts) - min(counts) <= 1
            assert sum(counts) // len(corpus) == min(counts)


def test_a_mixed_epoch_has_the_given_shares(corpus, tmp_path):
    other = train_toys.write_corpus(tmp_path / "other", pairs=30, seed=11)
    both = [encoded(corpus), encoded(other)]
    pairs = prepare_pairs(both, max_length=60)
    own = set(sources(pairs, np.arange(90, 120))) - set(sources(pairs, np.arange(90)))
    steps = steps_of(pairs, corpus_sizes=[90, 30], weights=[1.0, 3.0], block_pairs=50)
    seen = [s for index in range(steps.steps_per_epoch) for s in sentences(steps[index].batches)]
    assert len(seen) == 120
    # 90 of 120 pairs are from the other corpus: each of its 30 pairs three times
    counts = collections.Counter(s for s in seen if s in own)
    assert set(counts) == own
    assert set(counts.values()) == {3}
