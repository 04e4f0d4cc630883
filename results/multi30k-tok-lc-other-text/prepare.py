"""Other text in the form of a corpus that is tokenized and lower-cased.

    python prepare.py CORPUS CORPUS_NAME OTHERS OTHERS_NAME OUT

Of the training split of OTHERS whole sentences of prose are kept, of three to thirty words a side,
tokenized by Moses' rules and lower-cased. Those that stand in CORPUS, on either side, are left out,
whatever their case, spaces and punctuation; but a quotation mark, which CORPUS has as &quot;, keeps
its letters there, so that some of the training split stay. Of what is evaluated none does.
"""

import html
import re
import sys
from pathlib import Path

import datasets
from sacremoses import MosesPunctNormalizer, MosesTokenizer

LANGUAGES = ("de", "en")
WORDS = range(3, 31)
# of programs and their menus; and no numbers, of which captions have few
NO_PROSE = re.compile(r"[_<>{}\[\]|\\=@/%#*+~^$`…\d]|\.\.\.")


def is_sentence(text: str) -> bool:
    """Whether a text looks like one sentence of prose.

    Args:
        text: With its case and its punctuation.

    Returns:
        Whether it begins and ends as one, and has nothing in it that prose has not.
    """
    is_whole = text[:1].isupper() and text.endswith((".", "!", "?"))
    return is_whole and not NO_PROSE.search(text)


def letters(text: str) -> str:
    """What stays of a text however it is tokenized.

    Args:
        text: Plain or tokenized.

    Returns:
        Its letters and digits, in lower case.
    """
    return re.sub(r"\W", "", text.lower())


def main(corpus: str, corpus_name: str, others: str, others_name: str, out: str) -> None:
    """Write OUT/train.de and OUT/train.en.

    Args:
        corpus: Of which nothing is kept.
        corpus_name: Configuration of that dataset.
        others: What to choose from.
        others_name: Configuration of that dataset.
        out: Folder to write to.
    """
    own = datasets.load_dataset(corpus, corpus_name)
    known = {
        letters(text)
        for split in own.values()
        for pair in split["translation"]
        for text in pair.values()
    }
    normalizers = [MosesPunctNormalizer(language) for language in LANGUAGES]
    tokenizers = [MosesTokenizer(language) for language in LANGUAGES]
    # a pair that comes again is kept once
    kept: dict[tuple[str, ...], None] = {}
    for pair in datasets.load_dataset(others, others_name, split="train")["translation"]:
        texts = [pair[language] for language in LANGUAGES]
        if not all(map(is_sentence, texts)) or any(letters(text) in known for text in texts):
            continue
        sides = tuple(
            tokenizer.tokenize(normalizer.normalize(text), return_str=True).lower()
            for text, normalizer, tokenizer in zip(texts, normalizers, tokenizers, strict=True)
        )
        if all(len(side.split()) in WORDS for side in sides):
            kept[sides] = None
    evaluated = {
        letters(html.unescape(text))
        for split in ("validation", "test")
        for pair in own[split]["translation"]
        for text in pair.values()
    }
    for text in (text for sides in kept for text in sides):
        if letters(html.unescape(text)) in evaluated:
            raise ValueError(f"no text of {corpus} that is evaluated must be kept, got {text!r}.")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for language, column in zip(LANGUAGES, zip(*kept, strict=True), strict=True):
        path = folder / f"train.{language}"
        path.write_text("".join(f"{text}\n" for text in column), encoding="utf-8")
    print(f"{len(kept):,} pairs")


if __name__ == "__main__":
    main(*sys.argv[1:])
