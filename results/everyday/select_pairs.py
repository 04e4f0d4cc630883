"""Select short everyday sentences of a parallel corpus, and split them.

    python results/everyday/select_pairs.py DATASET NAME FOLDER --without CAPTIONS en-de

DATASET and NAME are the corpus and its configuration, FOLDER is the new dataset, with the
configuration en-de. Selected are pairs of one to twelve words that are whole sentences of common
words, and no sentence of the dataset after --without. No source and no target of the validation and
test set is in the training set.
"""

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path

import datasets

LONGEST = 12
HELD_OUT = 2000
# most common English words of sentences with a personal pronoun, in which all words of a selected
# sentence must be
NUM_WORDS = 9000
SENTENCE = re.compile(r"[A-ZÄÖÜ\"„][\w äöüÄÖÜß,.;:!?'\u2019\"„“-]*[.!?][\"“]?")
# a sentence after the first one, as people write in a chat: "Great! have a good meal."
LOWER_CASE = re.compile(r"[.!?] [a-zäöü]")
PERSONAL = re.compile(r"\b(I|you|he|she|we|they|me|him|her|us|my|your|Tom|Mary)\b", re.IGNORECASE)
WORD = re.compile(r"[\w'\u2019]+")


def words_of(text: str) -> list[str]:
    """Return the words of a sentence in lower case."""
    return WORD.findall(text.lower().replace("\u2019", "'"))


def is_short_sentence(text: str) -> bool:
    """Return whether a text is one short sentence without codes and digits of a manual."""
    return (
        1 <= len(words_of(text)) <= LONGEST
        and SENTENCE.fullmatch(text) is not None
        and not re.search(r"\d{5}|_|\w\.\w|[A-Z]{3}", text)
        and not LOWER_CASE.search(text)
    )


def select(pairs: list[tuple[str, str]], without: set[str]) -> list[tuple[str, str]]:
    """Return the everyday pairs, each once.

    Args:
        pairs: English and German texts.
        without: English and German texts that are not selected.

    Returns:
        Selected pairs in their order.
    """
    short = [
        pair for pair in pairs if all(map(is_short_sentence, pair)) and without.isdisjoint(pair)
    ]
    counts = Counter(
        word for english, _ in short if PERSONAL.search(english) for word in set(words_of(english))
    )
    common = {word for word, _ in counts.most_common(NUM_WORDS)}
    return list(dict.fromkeys(pair for pair in short if common.issuperset(words_of(pair[0]))))


def split(pairs: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Hold out validation and test pairs, each with a source and a target that occur once.

    Args:
        pairs: Selected pairs.

    Returns:
        Pairs of each split.
    """
    counts = [Counter(pair[side] for pair in pairs) for side in (0, 1)]
    single = [pair for pair in pairs if all(counts[side][pair[side]] == 1 for side in (0, 1))]
    if len(single) < 2 * HELD_OUT:
        raise SystemExit(
            f"the corpus must have at least {2 * HELD_OUT:,} everyday pairs with a source and a "
            f"target that occur once, got {len(single):,}."
        )
    held_out = random.Random(1).sample(single, 2 * HELD_OUT)
    taken = set(held_out)
    return {
        "train": [pair for pair in pairs if pair not in taken],
        "validation": held_out[:HELD_OUT],
        "test": held_out[HELD_OUT:],
    }


def read_pairs(dataset: str, name: str, split: str | None = None) -> list[tuple[str, str]]:
    """Read the English and German texts of a split, or of all splits, of a dataset."""
    splits = datasets.load_dataset(dataset, name)
    chosen = list(splits.values()) if split is None else [splits[split]]
    languages = getattr(chosen[0].features.get("translation"), "languages", None)
    languages = languages or list(chosen[0][0].get("translation", ()))
    if not {"en", "de"} <= set(languages):
        raise SystemExit(
            f"{dataset} must have translations of en and de, got {', '.join(languages) or 'none'}."
        )
    pairs = (pair for rows in chosen for pair in rows["translation"])
    return [(pair["en"].strip(), pair["de"].strip()) for pair in pairs]


def main() -> None:
    """Write the splits and the list of configurations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", help="corpus with English and German")
    parser.add_argument("name", help="its configuration")
    parser.add_argument("folder", type=Path, help="folder of the new dataset")
    parser.add_argument(
        "--without",
        nargs=2,
        metavar=("DATASET", "NAME"),
        help="dataset and configuration whose sentences are not selected",
    )
    flags = parser.parse_args()
    pairs = read_pairs(flags.dataset, flags.name, "train")
    without = (
        {text for pair in read_pairs(*flags.without) for text in pair} if flags.without else set()
    )
    (flags.folder / "en-de").mkdir(parents=True, exist_ok=True)
    for name, chosen in split(select(pairs, without)).items():
        path = flags.folder / "en-de" / f"{name}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for english, german in chosen:
                record = {"translation": {"en": english, "de": german}}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{path}: {len(chosen):,} pairs")
    text = "---\nconfigs:\n- config_name: en-de\n  data_dir: en-de\n---\n"
    (flags.folder / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
