"""Evaluation sentences in the training text, compared with a search in plain Python."""

import random
import unicodedata

import datasets
import numpy as np
import pytest
import train_toys
from train_toys import prepared, write_texts

from vanilla_transformer.train.data import leaks
from vanilla_transformer.train.data.batches import Collator
from vanilla_transformer.train.data.corpus import text_hash
from vanilla_transformer.train.data.leaks import (
    BLOCK_PAIRS,
    LeakFinder,
    count_leaks,
    describe_leaks,
    find_leaks,
    normalize,
)
from vanilla_transformer.train.data.pairs import VERDICTS
from vanilla_transformer.train.data.prepare import load_texts, make_steps

# as the documentation defines them
NEAR_SHARE, NGRAM, FEWEST = 0.7, 5, 4


def plain_units(text):
    """Units of a sentence, character by character."""
    text = unicodedata.normalize("NFKC", text).casefold()
    kinds = ("P", "Z")
    spaced = [
        " "
        if unicodedata.category(one)[0] in kinds or unicodedata.category(one) in ("Cc", "Cf", "Sk")
        else one
        for one in text
    ]
    return "".join(spaced).split()


def plain_ngrams(units):
    return {tuple(units[i : i + NGRAM]) for i in range(len(units) - NGRAM + 1)}


def plain_hits(sides, held_out):
    """All hits, by a comparison of every training sentence with every evaluation sentence."""
    hits = set()
    for side, (texts, sentences) in enumerate(zip(sides, held_out, strict=True)):
        for pair, text in enumerate(texts):
            for number, sentence in enumerate(sentences):
                own, wanted = plain_units(text), plain_units(sentence)
                grams = plain_ngrams(wanted)
                shared = len(grams & plain_ngrams(own))
                if wanted and own == wanted:
                    hits.add((pair, side, number, 0))
                elif len(grams) >= FEWEST and shared >= NEAR_SHARE * len(grams) - 1e-9:
                    hits.add((pair, side, number, 1))
    return hits


def changed(rng, words):
    """A sentence as another source has it: with other words, case, punctuation and spaces."""
    words = [rng.choice("ab\u00e9") if rng.random() < 0.12 else word for word in words]
    words = rng.choices("xyz", k=rng.choice([0, 0, 2])) + words
    text = rng.choice([" ", "  ", "\u00a0", ", ", " \u2013 "]).join(words)
    text = rng.choice([str.upper, str.title, str])(text)
    return rng.choice(["", "\u201e", "("]) + text + rng.choice(["", ".", "\u2026", " !\t"])


def random_corpus(seed):
    rng = random.Random(seed)
    letters = ["a", "b", "c", "stra\u00dfe", "\ufb01n", "\uff21", "\u00e9", "7"]
    sentences = [rng.choices(letters, k=rng.randint(1, 14)) for _ in range(40)]
    held_out = [[changed(rng, words) for words in sentences] for _ in range(2)]
    held_out[0][3] = held_out[1][5] = "..."
    train = [
        [changed(rng, rng.choice([*sentences, rng.choices(letters, k=9)])) for _ in range(300)]
        for _ in range(2)
    ]
    train[0][7] = "\u2026 !"
    train[1][8] = "two\nlines and a\x0bb"
    return train, held_out


@pytest.mark.parametrize("seed", range(5))
def test_the_hits_are_those_of_a_search_in_plain_python(seed):
    train, held_out = random_corpus(seed)
    found = LeakFinder(*held_out, ("en", "de")).find(train, first_pair=100)
    assert found.dtype == np.int32
    hits = {(pair - 100, *rest) for pair, *rest in found.tolist()}
    assert len(hits) == len(found)
    expected = plain_hits(train, held_out)
    kinds = [sum(hit[3] == kind for hit in expected) for kind in (0, 1)]
    assert min(kinds) > 20
    assert hits == expected


def test_how_the_text_is_divided_does_not_matter(monkeypatch):
    train, held_out = random_corpus(9)
    pairs = [{"translation": {"en": en, "de": de}} for en, de in zip(*train, strict=True)]
    rows = datasets.Dataset.from_list(pairs)
    parts = [rows.select(range(120)), rows.select(range(120, 300))]
    found = []
    for corpora, size in (([rows], BLOCK_PAIRS), (parts, 7)):
        monkeypatch.setattr(leaks, "BLOCK_PAIRS", size)
        hashes = [text_hash(part, ("en", "de"), "train") for part in corpora]
        hits = find_leaks(corpora, hashes, LeakFinder(*held_out, ("en", "de")))
        found.append(sorted(map(tuple, hits.tolist())))
    assert len(found[0]) > 50
    assert found[0] == found[1]


def test_equal_hashes_are_no_proof(monkeypatch):
    def every_pair(sentences, lines):
        long = [number for number, line in enumerate(sentences.lines) if line.count(" ") >= 7]
        return [[index, number] for index in range(len(lines)) for number in long]

    train, held_out = random_corpus(2)
    expected = LeakFinder(*held_out, ("en", "de")).find(train).tolist()
    monkeypatch.setattr(leaks.EvaluationSentences, "_find_candidates", every_pair)
    assert LeakFinder(*held_out, ("en", "de")).find(train).tolist() == expected


def test_the_edges_of_the_definition():
    def kinds(sentence, *texts):
        finder = LeakFinder([sentence], [""], ("en", "de"))
        return [{hit[3] for hit in finder.find([[text], ["x"]]).tolist()} or None for text in texts]

    ten = "a b c d e f g h i j k l m n"  # ten 5-grams
    assert kinds(ten, "x a b c d e f g h i j k x", "x a b c d e f g h i j x") == [{1}, None]
    assert kinds("a b c d e f g", "a b c d e f g h", "A, b c (d) e f-g!") == [None, {0}]
    assert kinds("a b c d e f g h", "a b c d e f g h i", "a b c d e f g") == [{1}, {1}]
    # its only n-gram is not enough
    assert kinds("ha " * 12, "ha " * 13) == [None]
    assert kinds("", "", "a") == kinds("?!", "", "!") == [None, None]


def test_languages_without_spaces_are_compared_by_characters():
    assert normalize(["\u4eca\u5929 \u597d\u3002", "A\uff22"], "zh-Hant") == [
        "\u4eca \u5929 \u597d",
        "a b",
    ]
    assert normalize(["\u4eca\u5929 \u597d\u3002"], "en") == ["\u4eca\u5929 \u597d"]
    finder = LeakFinder(["\u706b\u8eca\u5341\u70b9\u79bb\u5f00\u67cf\u6797"], [""], ("zh", "en"))
    text = "\u4f46\u662f\u706b\u8eca\u5341\u70b9\u79bb\u5f00\u67cf\u6797\u3002"
    assert finder.find([[text], ["x"]]).tolist() == [[0, 0, 0, 1]]


def test_marks_of_letters_are_no_separators():
    # consonants with different vowel signs
    assert normalize(["\u0915\u093f", "\u0915\u093e"], "hi") == ["\u0915\u093f", "\u0915\u093e"]


def test_each_sentence_counts_once():
    hits = [[4, 0, 1, 0], [4, 0, 2, 1], [5, 0, 1, 1], [6, 0, 2, 1], [6, 1, 2, 0], [7, 1, 0, 1]]
    counts = count_leaks(np.array(hits, np.int32))
    assert counts == {
        "source_exact": 1,
        "source_near": 1,
        "target_exact": 1,
        "target_near": 1,
        "pairs": 4,
    }
    assert describe_leaks(counts) == (
        "source 1 exact and 1 near, target 1 exact and 1 near, in 4 training pairs"
    )
    assert describe_leaks("it is secret") == "not counted, because it is secret"


def test_further_references_are_versions_of_the_same_sentences():
    finder = LeakFinder(["s", "t"], ["a", "b", "c", "a"], ("en", "de"))
    hits = finder.find([["x", "y", "z"], ["C", "a", "b"]]).tolist()
    assert sorted(hits) == [[0, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [2, 1, 1, 0]]


LONG = "one two three four five six seven eight nine"


@pytest.fixture
def corpora(tmp_path):
    """A corpus with leaks, and one to mix."""
    main = write_texts(
        tmp_path / "main",
        train=["a b", "Only here.", LONG + " ten", "c", "d"],
        validation=["only here", "nowhere"],
        test=[LONG, "d!"],
    )
    return main, write_texts(tmp_path / "more", train=["C d e", "D", "f"])


@pytest.mark.parametrize("drop", [False, True])
def test_exactly_the_leaking_pairs_are_dropped(drop, corpora, tmp_path, caplog):
    caplog.set_level("INFO")
    mix = [{"dataset": corpora[1]}]
    config = train_toys.toy_config(corpora[0], tmp_path / "run", mix=mix, drop_leaks=drop)
    _, data = prepared(config)
    assert data.facts["leaks"] == (
        "validation: source 1 exact and 0 near, target 1 exact and 0 near, in 1 training pair; "
        "test: source 1 exact and 1 near, target 1 exact and 1 near, in 3 training pairs"
    )
    assert f"in the training text, {data.facts['leaks'].split('; ')[1]}" in caplog.text
    found = [VERDICTS[it] for it in data.pairs.verdicts]
    leaking = ["kept", "leak", "leak", "kept", "leak", "kept", "leak", "kept"]
    assert found == (leaking if drop else ["kept"] * 8)
    counts = [line.split("leak ")[1][0] for line in data.facts["cleaning"].split("; ")]
    assert counts == (["3", "1"] if drop else ["0", "0"])


@pytest.mark.parametrize("drop", [False, True])
def test_a_stream_drops_them_as_it_is_read(drop, corpora, tmp_path, caplog):
    settings = {"streaming": True, "drop_leaks": drop, "tokens_per_step": 400}
    config = train_toys.toy_config(corpora[0], tmp_path / "run", **settings)
    _, data = prepared(config)
    steps = make_steps(config, data, Collator(0, 1, 260), num_processes=1, process_index=0)
    step = steps[0]
    assert step.position["block_counts"]["leak"] == (3 if drop else 0)
    texts = {
        text
        for batch in step.batches
        for text in data.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
    }
    assert texts == ({"a b", "c"} if drop else {"a b", "c", "Only here.", "d", LONG + " ten"})
    assert data.facts["leaks"] == "not counted, because the training text is streamed"
    assert data.facts["leaks"] in caplog.text


def test_the_search_is_not_repeated(corpora, tmp_path, monkeypatch):
    config = train_toys.toy_config(corpora[0], tmp_path / "run", mix=[{"dataset": corpora[1]}])
    first = load_texts(config).leak_hits
    monkeypatch.setattr(LeakFinder, "find", lambda *given: pytest.fail("searched again"))
    assert (load_texts(config).leak_hits == first).all()
    assert len(first) == 8


def test_a_corpus_without_other_splits_has_no_leaks(tmp_path):
    folder = write_texts(tmp_path / "texts", train=["a", "b"])
    _, data = prepared(train_toys.toy_config(folder, tmp_path / "run", drop_leaks=True))
    assert data.facts["leaks"] == "none"
    assert len(data.pairs.kept_indices()) == 2
