"""BPE-dropout, Provilkov et al. 2020."""

import collections
import itertools
import math
import random

import datasets
import numpy as np
import pytest
import sentencepiece
import train_toys
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.tokenization.bpe_dropout import BpeDropout
from vanilla_transformer.tokenization.learning import learn_vocabulary
from vanilla_transformer.train.data.batches import Collator
from vanilla_transformer.train.data.pairs import Segmentation, encode_pairs
from vanilla_transformer.train.data.prepare import load_texts, make_steps, prepare_data
from vanilla_transformer.train.recipe import load_config
from vanilla_transformer.train.vocabulary import load_tokenizer

SENTENCES = ["the lower the lowest", "das Haus der Häuser", "newer, slower; 1999 (S (NP"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return learn_vocabulary(SENTENCES, 300, progress=False)


def spelled(tokenizer, text, dropout, seed=0):
    [encoding] = tokenizer.backend_tokenizer.encode_batch([text])
    return BpeDropout(tokenizer, dropout)(encoding, random.Random(seed))


@given(text=st.text(max_size=40) | st.sampled_from(SENTENCES))
def test_without_dropout_the_tokens_are_the_tokenizers(tokenizer, text):
    assert spelled(tokenizer, text, 0.0) == tokenizer(text).input_ids


@given(
    text=st.text(max_size=40) | st.sampled_from(SENTENCES),
    dropout=st.floats(0, 1),
    seed=st.integers(),
)
def test_every_segmentation_decodes_to_the_text(tokenizer, text, dropout, seed):
    ids = spelled(tokenizer, text, dropout, seed)
    plain = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == tokenizer.decode(plain)
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) >= len(plain)


def test_without_merges_a_text_is_its_bytes(tokenizer):
    text = "Häuser"
    assert len(spelled(tokenizer, text, 1.0)) == len(f" {text}".encode()) + 1


def chances(pieces, ranks, dropout):
    """Return the probability of each segmentation, by enumeration."""
    places = [place for place, pair in enumerate(itertools.pairwise(pieces)) if pair in ranks]
    # the first merge that is kept: all before it are skipped
    places.sort(key=lambda place: (ranks[pieces[place], pieces[place + 1]], place))
    total = collections.Counter({tuple(pieces): dropout ** len(places)})
    for left_out, place in enumerate(places):
        joined = (*pieces[:place], pieces[place] + pieces[place + 1], *pieces[place + 2 :])
        chance = dropout**left_out * (1 - dropout)
        for spelling, then in chances(joined, ranks, dropout).items():
            total[spelling] += chance * then
    return total


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("word", "merges"),
    [
        ("cabca", [("a", "b"), ("c", "a"), ("ab", "c"), ("ca", "ab"), ("b", "c")]),
        # pairs that overlap, and several positions of a pair
        ("aaaaab", [("a", "a"), ("aa", "a"), ("a", "ab"), ("a", "b"), ("aa", "aa")]),
    ],
)
def test_each_segmentation_has_the_probability_of_the_rule(tokenizer, word, merges, dropout):
    vocab = dict(tokenizer.get_vocab())
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    known = VanillaTransformerTokenizer(vocab, merges)
    expected = chances((*word,), {pair: i for i, pair in enumerate(merges)}, dropout)
    assert math.isclose(sum(expected.values()), 1)
    assert len(expected) > 5
    dropper, generator, draws = BpeDropout(known, dropout), random.Random(7), 20_000
    seen = collections.Counter(
        tuple(known.convert_ids_to_tokens(dropper.segment_word(word, generator)))
        for _ in range(draws)
    )
    assert set(seen) <= set(expected)
    for spelling, share in expected.items():
        spread = math.sqrt(draws * share * (1 - share))
        assert abs(seen[spelling] - draws * share) < 5 * spread + 1


def test_a_long_word_needs_few_random_numbers(tokenizer):
    # a text without spaces is one word
    class Counted(random.Random):
        count = 0

        def random(self):
            self.count += 1
            return super().random()

    word, generator = "thelowerthelowest" * 40, Counted(3)
    assert len(BpeDropout(tokenizer, 0.1).segment_word(word, generator)) < len(word)
    assert generator.count < 3 * len(word)


def test_symbols_and_added_tokens_stay_whole():
    tokenizer = learn_vocabulary(SENTENCES, 310, symbols=["(S", "(NP"], progress=False)
    tokenizer.add_tokens(["<2de>"], special_tokens=True)
    ids = spelled(tokenizer, "<2de> (S (NP lower", 1.0)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert {"<2de>", "Ġ(S", "Ġ(NP", "</s>"} <= set(tokens)
    assert "".join(tokens).count("lower") == 1
    assert "lower" not in tokens


def library_tokenizer(falls_back):
    """Tokenizer like Llama's, in which merges also make the names of tokens."""
    words = ["\u2581the", "\u2581lower", "\u2581new", "er", "<unk>", "<0xF0>"]
    merges = dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word)))
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256) if falls_back)]
    tokens += [part for left, right in merges for part in (left, right, left + right)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    model = models.BPE(vocab, [*merges], unk_token="<unk>", byte_fallback=falls_back)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    byte_decoders = [decoders.ByteFallback()] if falls_back else []
    tokenizer.decoder = decoders.Sequence([*byte_decoders, decoders.Metaspace()])
    tokenizer.add_tokens(["<2de>", "new"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"byte_fallback": True},
        {"user_defined_symbols": ["<2de>"]},
        {"control_symbols": ["<2de>"], "byte_fallback": True},
        "library",
        "library with bytes",
    ],
    ids=str,
)
def test_unknown_byte_and_added_tokens_stay_whole(settings, tmp_path):
    if isinstance(settings, str):
        tokenizer = library_tokenizer("bytes" in settings)
    else:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*SENTENCES, *["<unk> <0xF0> (x"] * 9]),
            model_prefix=str(tmp_path / "spm"),
            model_type="bpe",
            vocab_size=400,
            hard_vocab_limit=False,
            minloglevel=2,
            **settings,
        )
        tokenizer = load_tokenizer(str(tmp_path / "spm.model"))
    unknown = "<2de> the lower \U0001f600the<2de>lower \u6f22\u5b57new <unk> <0xF0>"
    for text in (*SENTENCES, unknown):
        plain = tokenizer(text).input_ids
        assert spelled(tokenizer, text, 1e-9) == plain
        ids = [spelled(tokenizer, text, 0.5, seed) for seed in range(9)]
        assert any(each != plain for each in ids)
        assert {tokenizer.decode(each) for each in ids} == {tokenizer.decode(plain)}


def test_a_tokenizer_without_merges_is_refused():
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), eos_token="a"
    )
    with pytest.raises(ValueError, match=r"bpe_dropout must be 0 .* got 0.1 and WordLevel"):
        BpeDropout(words, 0.1)
    letters = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    with pytest.raises(ValueError, match=r"bpe_dropout must be 0 for a tokenizer without merges"):
        BpeDropout(letters, 0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bpe_dropout": 1.5}, "bpe_dropout must be at least 0 and at most 1, got 1.5"),
        (
            {"bpe_dropout_target": -0.5},
            "bpe_dropout_target must be at least 0 and at most 1, got -0.5",
        ),
        ({"bpe_dropout": 0.1, "num_spellings": 0}, "num_spellings must be at least 1, got 0"),
        ({"bpe_dropout": 0.1, "streaming": True}, "bpe_dropout must be 0 with streaming"),
    ],
)
def test_an_invalid_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        load_config("demo", settings)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Training data of a run with three segmentations of each pair, and its steps."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    corpus = train_toys.write_corpus(tmp_path / "corpus", pairs=40)
    other = train_toys.write_corpus(tmp_path / "other", pairs=20, seed=8)
    config = train_toys.toy_config(
        corpus,
        tmp_path / "run",
        bpe_dropout=0.3,
        num_spellings=3,
        mix=[{"dataset": str(other)}],
        max_length=20,
        drop_duplicates=True,
    )
    texts = load_texts(config)
    lines = [text for rows in texts.train for pair in rows["translation"] for text in pair.values()]
    tokenizer = learn_vocabulary(lines, 290, progress=False)
    data = prepare_data(config, texts, tokenizer)
    return config, tokenizer, data, make_steps(config, data, Collator(0, 1, 290), 1, 0)


def seen_in(steps, epoch):
    """Return the tokens of sources and targets of an epoch."""
    seen = []
    for index in range(epoch * steps.steps_per_epoch, (epoch + 1) * steps.steps_per_epoch):
        for batch in steps[index].batches:
            sources = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
            targets = zip(batch["labels"], batch["labels"] >= 0, strict=True)
            seen += [tuple(ids[row].tolist()) for side in (sources, targets) for ids, row in side]
    return sorted(seen)


def test_every_epoch_has_every_pair_once_with_another_segmentation(run):
    config, tokenizer, data, steps = run
    epochs = [seen_in(steps, epoch) for epoch in range(4)]
    assert epochs[0] == epochs[3]
    assert len({tuple(epoch) for epoch in epochs[:3]}) == 3

    verdicts = data.pairs.verdicts.reshape(3, -1)
    assert (verdicts == verdicts[0]).all()
    kept = np.flatnonzero(verdicts[0] == 0)
    longest = data.pairs.lengths_and_verdicts[:2].max(axis=0).reshape(3, -1).max(axis=0)
    assert 0 < len(kept) < 60
    assert longest[kept].max() <= config.max_length
    assert steps.fingerprint()["pairs"] == len(kept)
    lines = [
        tokenizer.decode(tokenizer(pair[language]).input_ids)
        for number, pair in enumerate(
            itertools.chain(*(r["translation"] for r in data.texts.train))
        )
        for language in ("en", "de")
        if number in kept
    ]
    for epoch in epochs:
        assert sorted(map(tokenizer.decode, epoch)) == sorted(lines)


def test_validation_and_evaluation_use_no_dropout(run):
    _, tokenizer, data, _ = run
    for number, pair in enumerate(data.texts.validation["translation"]):
        ids = data.validation[np.array([number])]
        assert ids["input_ids"][0].tolist() == tokenizer(pair["en"]).input_ids
        assert ids["labels"][0].tolist() == tokenizer(pair["de"]).input_ids


def test_a_segmentation_depends_on_seed_and_number_only(run):
    _, tokenizer, data, _ = run
    rows = data.texts.train[0]

    def sources(rows, *settings):
        encoded = encode_pairs(
            rows, "train", tokenizer, "en", "de", segmentation=Segmentation(*settings)
        )
        return encoded["input_ids"]

    both, other = (0.3, 0.3), (0.2, 0.3)
    first = sources(rows, both, 1, 0)
    assert sources(rows.select(range(25)), both, 1, 0) == first[:25]
    others = [sources(rows, *settings) for settings in ((both, 2, 0), (both, 1, 1), (other, 1, 0))]
    assert all(other != first for other in others)
    assert data.pairs.rows[: len(rows)]["input_ids"] == first


@pytest.mark.parametrize(("source", "target"), [(0.0, 0.4), (0.4, 0.0)])
def test_one_side_alone_can_have_dropout(tmp_path, source, target):
    corpus = train_toys.write_corpus(tmp_path / "corpus", pairs=30)
    dropout = {"bpe_dropout": source, "bpe_dropout_target": target, "num_spellings": 1}
    config = train_toys.toy_config(corpus, tmp_path / "run", **dropout)
    texts = load_texts(config)
    lines = [text for pair in texts.train[0]["translation"] for text in pair.values()]
    tokenizer = learn_vocabulary(lines, 290, progress=False)
    pairs = prepare_data(config, texts, tokenizer).pairs
    plain = encode_pairs(texts.train[0], "train", tokenizer, "en", "de")
    for column, chance in (("input_ids", source), ("labels", target)):
        assert (pairs.rows[column][:] != plain[column][:]) == (chance > 0)
