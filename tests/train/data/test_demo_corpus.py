"""The corpus of the demo: CLDR in two languages, one translation for each English sentence."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import islice
from random import Random

import pytest
from babel import Locale
from datasets import Features, Translation

from vanilla_transformer.train.data import demo_corpus
from vanilla_transformer.train.data.demo_corpus import build_demo_corpus

SIZES = {"train": 1200, "validation": 60, "test": 70}


@pytest.fixture(scope="module")
def corpus():
    return build_demo_corpus()


def sentences(split, language):
    return [pair[language] for pair in split["translation"]]


def words(text):
    return re.findall(r"[^\W\d_]+|[0-9]|[^\w\s]", text)


def pairs_of(slot):
    return dict(demo_corpus._values_by_slot()[slot])


def fingerprint(hash_seed):
    code = (
        "import hashlib; from vanilla_transformer.train.data.demo_corpus import build_demo_corpus\n"
        f"corpus = build_demo_corpus(seed=5, **{SIZES})\n"
        "text = repr([(name, split['translation'][:]) for name, split in corpus.items()])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_seed_gives_the_same_corpus_in_every_process():
    here = build_demo_corpus(seed=5, **SIZES)
    text = repr([(name, split["translation"][:]) for name, split in here.items()])
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert fingerprint("1") == fingerprint("2") == expected


def test_another_seed_gives_other_sentences():
    first, second = (
        build_demo_corpus(seed=seed, **SIZES)["test"]["translation"] for seed in (1, 2)
    )
    assert first[:] != second[:]


def test_the_splits_have_the_given_sizes():
    corpus = build_demo_corpus(**SIZES)
    assert {name: len(split) for name, split in corpus.items()} == SIZES


def test_the_columns_are_those_of_wmt14(corpus):
    assert list(corpus) == ["train", "validation", "test"]
    for split in corpus.values():
        assert split.features == Features({"translation": Translation(languages=["de", "en"])})
        assert list(split[0]["translation"]) == ["de", "en"]


@pytest.mark.parametrize("language", ["en", "de"])
def test_no_sentence_occurs_twice(corpus, language):
    everything = [text for split in corpus.values() for text in sentences(split, language)]
    assert len(everything) == sum(map(len, corpus.values())) == len(set(everything))


def test_every_english_sentence_has_one_translation():
    # before duplicates are removed, which would hide a second translation
    rng, translations = Random(3), {}
    for _ in range(60_000):
        source, target = demo_corpus._draw_pair(rng)
        assert translations.setdefault(source, target) == target
    assert 40_000 < len(translations) < 60_000


def test_different_english_sentences_differ_in_german():
    drawn = dict(demo_corpus._draw_pair(Random(seed)) for seed in range(20_000))
    assert len(set(drawn.values())) == len(drawn)


@pytest.mark.parametrize("language", ["en", "de"])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_every_held_out_word_was_seen_several_times_in_training(corpus, split, language):
    seen = Counter(w for text in sentences(corpus["train"], language) for w in words(text))
    held_out = {w for text in sentences(corpus[split], language) for w in words(text)}
    assert len(held_out) > 300
    assert min(seen[word] for word in held_out) >= 3


def test_every_template_makes_many_sentences():
    rng = Random(0)
    for english, german in demo_corpus._TEMPLATES:
        slots = re.findall(r"{(\w+)}", english)
        assert sorted(slots) == sorted(re.findall(r"{(\w+)}", german))
        # a template with few different sentences would be rare in training
        drawn = set()
        for _ in range(500):
            filled = {}
            for slot in slots:
                filled[slot] = demo_corpus._fill_slot(slot, filled, rng)
            drawn.add(tuple(filled.values()))
        assert len(drawn) > 150, english


def test_sentences_are_neither_tables_nor_long(corpus):
    lengths = [len(text.split()) for text in sentences(corpus["train"], "en")]
    assert min(lengths) >= 2
    assert max(lengths) <= 26
    assert 6 < sum(lengths) / len(lengths) < 12


def test_sources_can_be_typed_on_any_keyboard(corpus):
    characters = {c for text in sentences(corpus["train"], "en") for c in text if not c.isascii()}
    assert characters <= set("£€°üé")


@pytest.mark.parametrize("language", ["en", "de"])
def test_spaces_are_single_and_only_between_words(corpus, language):
    for text in sentences(corpus["train"], language):
        assert text == text.strip()
        assert not re.search(r"\s\s|\s[,.:?]|[{}]", text)


def test_two_slots_of_one_kind_never_have_the_same_value():
    rng = Random(0)
    filled = {"weekday": ("Monday", "Montag")}
    drawn = {demo_corpus._fill_slot("weekday2", filled, rng) for _ in range(200)}
    assert len(drawn) == 6
    assert filled["weekday"] not in drawn


@pytest.mark.parametrize(
    ("slot", "english", "german"),
    [
        ("date_long", "March 3, 2024", "3. März 2024"),
        ("date_medium", "Mar 3, 2024", "03.03.2024"),
        ("date_short", "3/3/24", "03.03.24"),
        ("date_full", "Sunday, March 3, 2024", "Sonntag, 3. März 2024"),
        ("date_today", "Sunday, March 3, 2024", "Sonntag, der 3. März 2024"),
        ("date_on", "Sunday, March 3, 2024", "Sonntag, dem 3. März 2024"),
        ("quarter", "2nd quarter 2020", "2. Quartal 2020"),
        ("month", "March", "März"),
        ("on_weekdays", "Wednesdays", "mittwochs"),
        ("time", "4:05 PM", "16:05"),
        ("time", "12:00 AM", "00:00"),
        ("time", "12:30 PM", "12:30"),
        ("ahead", "in 3 days", "in 3 Tagen"),
        ("ago", "5 months ago", "vor 5 Monaten"),
        ("ago", "23 hours ago", "vor 23 Stunden"),
        ("stay", "3 days", "3 Tage"),
        ("count", "twenty-one", "einundzwanzig"),
        ("count", "thirty-seven", "siebenunddreißig"),
        ("many", "six hundred and sixty", "sechshundertsechzig"),
        ("ordinal", "third", "dritte"),
        ("ordinal", "twenty-first", "einundzwanzigste"),
        ("year_words", "nineteen eighty-four", "neunzehnhundertvierundachtzig"),
        ("sum", "seven times eight is fifty-six", "sieben mal acht sechsundfünfzig ist"),
        ("price", "€1,225.50", "1.225,50\N{NO-BREAK SPACE}€"),
        ("price", "$2.00", "2,00\N{NO-BREAK SPACE}$"),
        ("money", "25 Swiss francs", "25 Schweizer Franken"),
        ("percent", "12.5%", "12,5\N{NO-BREAK SPACE}%"),
        ("number", "41,100", "41.100"),
        ("weight", "2.5 kilograms", "2,5 Kilogramm"),
        ("celsius", "-4°C", "-4 °C"),
        ("speed", "50 km/h", "50 km/h"),
        ("city", "Vienna", "Wien"),
        ("far_city", "Mexico City", "Mexiko-Stadt"),
        ("to_country", "to Japan", "nach Japan"),
        ("to_country", "to Switzerland", "in die Schweiz"),
        ("from_country", "from Switzerland", "aus der Schweiz"),
        ("from_country", "from the Netherlands", "aus den Niederlanden"),
        ("language", "Greek", "Griechisch"),
        ("currency", "British pounds", "Britische Pfund"),
        ("thing_object", "the desk", "den Schreibtisch"),
    ],
)
def test_the_german_value_translates_the_english_value(slot, english, german):
    assert pairs_of(slot)[english] == german


def test_every_english_value_has_one_german_value():
    slots = demo_corpus._values_by_slot()
    assert len(slots) > 40
    for slot, pairs in slots.items():
        assert len(pairs) == len(set(pairs)) == len(dict(pairs)), slot


def test_plural_countries_are_inflected_from_their_cldr_names():
    # the inflected forms of "Vereinigte Staaten" are written by hand
    for code, (to, origin) in demo_corpus._COUNTRIES_PLURAL.items():
        name = Locale("de").territories[code]
        stem = name.split()[-1]
        assert stem in to
        assert stem in origin


def test_lists_follow_the_pattern_of_their_language():
    rng = Random(1)
    drawn = {demo_corpus._fill_slot("languages_or", {}, rng) for _ in range(50)}
    longest = max(drawn, key=lambda pair: len(pair[0].split(", ")))
    assert re.fullmatch(r"\w+, \w+, or \w+", longest[0])
    assert re.fullmatch(r"\w+, \w+ oder \w+", longest[1])


def test_german_word_order_differs_from_english_word_order(corpus):
    pairs = {pair["en"]: pair["de"] for pair in corpus["train"]["translation"]}
    source = next(en for en in pairs if re.fullmatch(r"(\w+) says that the train .+", en))
    assert pairs[source].endswith(" Uhr abfährt.")
    source = next(en for en in pairs if re.fullmatch(r"(\w+) bought the chair for .+", en))
    assert re.fullmatch(r"\w+ hat den Stuhl für .+ gekauft\.", pairs[source])


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_an_empty_split_is_refused(split):
    with pytest.raises(ValueError, match=f"{split} must be at least 1, got 0"):
        build_demo_corpus(**{**SIZES, split: 0})


def test_sizes_that_are_too_large_are_refused_with_the_maximum(monkeypatch):
    monkeypatch.setattr(demo_corpus, "_MAX_DRAWS", 2000)
    distinct = len(list(demo_corpus._draw_distinct_pairs(0)))
    assert 1500 < distinct <= 2000
    with pytest.raises(ValueError, match=rf"at most {distinct}, .+ got 5002\.$"):
        build_demo_corpus(seed=0, train=5000, validation=1, test=1)


def test_a_smaller_training_split_has_the_same_first_sentences():
    corpus = build_demo_corpus(seed=4, **SIZES)
    expected = list(islice(demo_corpus._draw_distinct_pairs(4), SIZES["train"]))
    assert [(p["en"], p["de"]) for p in corpus["train"]["translation"]] == expected
