"""Select other text, and tokenize and lower-case it like a corpus.

    python prepare.py CORPUS CORPUS_NAME OTHERS OTHERS_NAME OUT

The script keeps whole sentences of prose of the training split of OTHERS, of three to thirty words
a side, tokenized by Moses' rules and lower-cased. It leaves out pairs with a sentence of CORPUS on
either side; case, spaces and punctuation are ignored. CORPUS writes a quotation mark as &quot;,
whose letters are compared, so that some sentences of its training split are kept. For the evaluated
splits the entity is decoded first, and the script stops if one of their sentences is kept.
"""

import html
import re
import sys
from pathlib import Path

import datasets
from sacremoses import MosesPunctNormalizer, MosesTokenizer

LANGUAGES = ("de", "en")
WORDS = range(3, 31)
# text of programs and menus, and numbers, which are rare in captions
NO_PROSE = re.compile(r"[_<>{}\[\]|\\=@/%#*+~^$`…\d]|\.\.\.")


def is_sentence(text: str) -> bool:
    """Return whether a text looks like one sentence of prose.

    Args:
        text: Text with its case and its punctuation.

    Returns:
        Whether the text begins and ends like a sentence and has only characters of prose.
    """
    is_whole = text[:1].isupper() and text.endswith((".", "!", "?"))
    return is_whole and not NO_PROSE.search(text)


def letters(text: str) -> str:
    """Return the part of a text that tokenization does not change.

    Args:
        text: Plain or tokenized text.

    Returns:
        Letters and digits of the text, in lower case.
    """
    return re.sub(r"\W", "", text.lower())


def main(corpus: str, corpus_name: str, others: str, others_name: str, out: str) -> None:
    """Write OUT/train.de and OUT/train.en.

    Args:
        corpus: Dataset whose sentences are left out.
        corpus_name: Configuration of `corpus`.
        others: Dataset to select from.
        others_name: Configuration of `others`.
        out: Output folder.
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
    # a dictionary keeps a repeated pair once, in the order of the text
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
            raise ValueError(f"no evaluated sentence of {corpus} must be kept, got {text!r}.")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for language, column in zip(LANGUAGES, zip(*kept, strict=True), strict=True):
        path = folder / f"train.{language}"
        path.write_text("".join(f"{text}\n" for text in column), encoding="utf-8")
    print(f"{len(kept):,} pairs")


if __name__ == "__main__":
    main(*sys.argv[1:])
