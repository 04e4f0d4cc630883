"""Learning the vocabulary of section 5.1: any corpus, bounded memory, reproducible."""

import hashlib
import os
import subprocess
import sys
from collections import Counter

import pytest
from datasets import Dataset

from vanilla_transformer.tokenization.learning import (
    LONGEST_WORD,
    _draw_sample,
    learn_vocabulary,
)

SMALLEST = 260  # four special tokens, 256 bytes
ROWS = [
    {"de": f"Der Hund {index} läuft schnell nach Hause.", "en": f"The dog {index} runs home fast."}
    for index in range(60)
]
SENTENCES = [sentence for row in ROWS for sentence in row.values()]


def learned(texts=SENTENCES, vocab_size=320, **kwargs) -> str:
    return learn_vocabulary(texts, vocab_size, progress=False, **kwargs).backend_tokenizer.to_str()


class Counted(str):
    """A sentence; the class counts the sentences in memory."""

    alive = 0
    most_alive = 0

    def __init__(self, _):
        Counted.alive += 1
        Counted.most_alive = max(Counted.most_alive, Counted.alive)

    def __del__(self):
        Counted.alive -= 1


def test_a_text_with_a_word_that_takes_long_to_learn_from_is_left_out():
    word = "xz" * (LONGEST_WORD // 2)
    long_texts = [f"{word}x", f"the dog {word}x runs", " " * (LONGEST_WORD + 1)]
    assert learned([*SENTENCES, *long_texts]) == learned(SENTENCES)
    assert learned([*SENTENCES, f"{word} {word}"]) != learned(SENTENCES)


def test_the_vocabulary_has_the_size_asked_for():
    for vocab_size in (SMALLEST, SMALLEST + 1, 333):
        assert len(learn_vocabulary(SENTENCES, vocab_size, progress=False)) == vocab_size


def test_frequent_words_of_both_languages_become_single_tokens():
    tokenizer = learn_vocabulary(SENTENCES, 400, progress=False)
    for word in ("Hund", "läuft", "dog", "runs"):
        assert len(tokenizer.tokenize(word)) == 1


def test_an_iterator_a_column_and_whole_rows_give_the_same_vocabulary():
    dataset = Dataset.from_list([{"translation": row} for row in ROWS])
    expected = learned()
    assert learned(iter(SENTENCES)) == expected
    assert learned(ROWS) == expected
    assert learned(dataset["translation"]) == expected
    assert learned(dataset) == expected
    assert learned(dataset.to_iterable_dataset()) == expected


def test_the_same_corpus_and_seed_give_the_same_vocabulary_in_any_process():
    program = (
        "import hashlib\n"
        "from vanilla_transformer.tokenization.learning import learn_vocabulary\n"
        f"texts = {SENTENCES!r}\n"
        "tokenizer = learn_vocabulary(texts, 320, max_sentences=50, seed=3, progress=False)\n"
        "print(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())"
    )
    here = learned(max_sentences=50, seed=3)
    environment = {**os.environ, "PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    there = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert there.stdout.strip() == hashlib.sha256(here.encode()).hexdigest()
    assert learned(max_sentences=50, seed=3) == here
    assert learned(max_sentences=50, seed=4) != here


def test_memory_holds_no_more_sentences_than_the_sample():
    learned((Counted(sentence) for sentence in SENTENCES), max_sentences=7)
    # also the sentence just read, and the previous one, which the loop still holds
    assert 7 <= Counted.most_alive <= 7 + 2


def test_every_sentence_has_the_same_chance():
    draws = 3000
    counts = Counter(
        sentence for seed in range(draws) for sentence in _draw_sample("abcdef", 2, seed)
    )
    assert sum(counts.values()) == 2 * draws
    for sentence in "abcdef":
        # four standard deviations around a third
        assert counts[sentence] / draws == pytest.approx(1 / 3, abs=4 * (2 / 9 / draws) ** 0.5)


def test_a_corpus_smaller_than_the_sample_is_used_whole():
    assert sorted(_draw_sample(iter(SENTENCES), len(SENTENCES), 0)) == sorted(SENTENCES)
    assert learned(max_sentences=len(SENTENCES)) == learned()


def test_too_little_text_gives_a_smaller_vocabulary_and_a_warning(caplog):
    tokenizer = learn_vocabulary(["abc abc xyz"], 5000, progress=False)
    assert tokenizer.tokenize("abc xyz") == ["Ġabc", "Ġ", "x", "y", "z"]  # xyz occurs once
    assert f"has {len(tokenizer)} tokens, not the requested 5000" in caplog.text


def test_a_vocabulary_that_is_full_warns_of_nothing(caplog):
    learned(vocab_size=300)
    assert caplog.text == ""


def test_progress_is_shown_on_stderr_or_not_at_all(capfd):
    learned()
    assert capfd.readouterr() == ("", "")
    learn_vocabulary(SENTENCES, 300)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert f"read: {len(SENTENCES)} sentences" in shown.err
    assert "count words: 100%" in shown.err


@pytest.mark.parametrize(
    ("texts", "kwargs", "message"),
    [
        ([], {}, "at least one sentence, got none"),
        (["", {"de": ""}], {}, "at least one sentence, got none"),
        (
            SENTENCES,
            {"vocab_size": SMALLEST - 1},
            "at least 260, for the special tokens and the single bytes, got 259",
        ),
        (SENTENCES, {"max_sentences": 0}, "max_sentences must be at least 1, got 0"),
        (["fine", None], {}, "must be strings.* got None"),
        ([{"id": 5, "translation": ROWS[0]}], {}, "must be strings.* got 5"),
        ("one text", {}, "iterable of sentences.* got one str"),
        ({"train": ROWS}, {}, "one split of a dataset, got one dict"),
    ],
)
def test_invalid_arguments_are_refused_by_name(texts, kwargs, message):
    with pytest.raises(ValueError, match=message):
        learned(texts, **kwargs)
