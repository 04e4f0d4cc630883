"""Section 6.3: phrase structure trees as sequences of tokens, and back.

A tree is stored flat: its words, and its brackets with the positions of their words. If brackets
have the same span, as in a unary chain, the outer bracket comes first.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..train.data.text_files import lines_of, opened, read_lines

# target token of every word; the source sentence has the words
WORD = "XX"
# tag of traces and other empty elements
EMPTY_TAG = "-NONE-"
# label of a bracket around the whole tree here, and the labels that treebanks use for this bracket
TOP = "TOP"
ROOTS = ("", TOP, "ROOT", "S1")
SUFFIXES = (".mrg", ".ptb", ".tree")
PACKED = ("", ".gz", ".xz")
# reasons why tokens are not a tree
UNKNOWN = "a token that is neither a bracket nor a word"
OUTSIDE = "a word outside all brackets"
MISMATCH = "a closing bracket that does not match the open one"
NOTHING = "an empty bracket"
SECOND = "more than one tree"
UNCLOSED = "a bracket that is not closed"
FEW = "too few words"
MANY = "too many words"

# only ASCII spaces separate words; a no-break space is part of a word
_PARTS = re.compile(r"[()]|[^\s()]+", re.ASCII)


class Bracket(NamedTuple):
    """A constituent.

    Attributes:
        label: Label, for example NP.
        start: Position of the first word.
        end: Position after the last word.
    """

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class Tree:
    """The phrase structure tree of a sentence.

    Attributes:
        words: Words of the sentence.
        tags: Part of speech of each word.
        brackets: Constituents from left to right, each before the constituents inside it.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    brackets: tuple[Bracket, ...]

    def __str__(self) -> str:
        """Return the tree as bracketed text on one line."""
        parts: list[str] = []
        for kind, item in walk(self):
            if kind == ")":
                parts[-1] += ")"
            else:
                word = f"({self.tags[item]} {self.words[item]})" if kind == WORD else ""
                parts.append(word or f"({item.label}")
        return " ".join(parts)


def walk(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Walk through a tree from left to right.

    Args:
        tree: Tree without empty brackets.

    Yields:
        "(" or ")" with the bracket that opens or closes, or `WORD` with the position of a word.
    """
    inside: list[Bracket] = []
    coming = list(reversed(tree.brackets))
    for position in range(len(tree.words) + 1):
        while inside and inside[-1].end == position:
            yield ")", inside.pop()
        while coming and coming[-1].start == position:
            inside.append(coming.pop())
            yield "(", inside[-1]
        if position < len(tree.words):
            yield WORD, position


def linearize(tree: Tree) -> list[str]:
    """Linearize a tree as Vinyals et al. 2015 do: the target of section 6.3.

    Opening and closing brackets have labels, and every word is the same `WORD`. The source has the
    words, and parts of speech are not scored.

    Args:
        tree: Tree without empty elements, from `clean`.

    Returns:
        Tokens, for example `(NP`, `XX`, `)NP`.
    """
    return [WORD if kind == WORD else f"{kind}{item.label}" for kind, item in walk(tree)]


def tree_from_tokens(tokens: Sequence[str], words: Sequence[str], tags: Sequence[str]) -> Tree:
    """Read a linearized tree.

    Args:
        tokens: Tokens in the format of `linearize`.
        words: Words of the sentence.
        tags: Part of speech of each word, which the tokens do not contain.

    Returns:
        Tree over the words.

    Raises:
        ValueError: If the tokens are not a tree over this number of words. The message says why.
    """
    brackets, lacking = _read_tokens(tokens, len(words))
    if lacking is not None:
        raise ValueError(f"tokens must be a tree over {len(words)} words, got {lacking}.")
    return Tree(tuple(words), tuple(tags), tuple(brackets))


def malformation(tokens: Sequence[str], num_words: int) -> str | None:
    """Return the reason why tokens are not a tree, or None.

    Args:
        tokens: Tokens to check.
        num_words: Number of words in the sentence.

    Returns:
        First reason from left to right; None for a tree over this number of words.
    """
    return _read_tokens(tokens, num_words)[1]


def _read_tokens(tokens: Sequence[str], num_words: int) -> tuple[list[Bracket], str | None]:
    brackets: list[Bracket] = []
    inside: list[int] = []
    position = 0
    for token in tokens:
        kind, label = token[:1], token[1:]
        if token != WORD and (kind not in "()" or not label):
            return brackets, UNKNOWN
        if brackets and not inside:
            return brackets, SECOND
        if token == WORD:
            if not inside:
                return brackets, OUTSIDE
            position += 1
        elif kind == "(":
            inside.append(len(brackets))
            brackets.append(Bracket(label, position, position))
        else:
            if not inside or brackets[inside[-1]].label != label:
                return brackets, MISMATCH
            index = inside.pop()
            if brackets[index].start == position:
                return brackets, NOTHING
            brackets[index] = brackets[index]._replace(end=position)
    if inside:
        return brackets, UNCLOSED
    if position != num_words:
        return brackets, FEW if position < num_words else MANY
    return brackets, None


@dataclass
class _Open:
    """A bracket that has been opened but not yet closed while text is read."""

    line: int
    start: int
    label: str | None = None
    words: list[str] = field(default_factory=list)
    # index in the list of brackets; None until a bracket opens inside this one
    index: int | None = None


def read_trees(paths: Iterable[str | Path]) -> Iterator[Tree]:
    """Read bracketed trees without changes; a tree may span lines, and a line may have many trees.

    Args:
        paths: Files (plain, .gz or .xz), or folders; the treebank files of a folder are sorted.

    Yields:
        Trees, in order. A leaf of several words becomes one word that contains spaces.

    Raises:
        ValueError: If a file does not exist, or has text that is not a tree. The message has the
            line.
    """
    for path in _treebank_files(paths):
        with opened(path) as file:
            yield from trees_in(read_lines(lines_of(file), str(path)), str(path))


def _treebank_files(paths: Iterable[str | Path]) -> Iterator[Path]:
    endings = tuple(suffix + packed for suffix in SUFFIXES for packed in PACKED)
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        found = sorted(file for file in path.rglob("*") if file.name.endswith(endings))
        if not found:
            raise ValueError(
                f"{path} must have files that end in {', '.join(SUFFIXES)} (plain, .gz or .xz), "
                "got none."
            )
        yield from found


def trees_in(lines: Iterable[str], name: str) -> Iterator[Tree]:
    """Read bracketed trees from text.

    Args:
        lines: Lines of the text.
        name: Name of the text, for error messages.

    Yields:
        Trees, in the format of `read_trees`.

    Raises:
        ValueError: If the text contains anything but trees. The message has the line.
    """
    inside: list[_Open] = []
    words: list[str] = []
    tags: list[str] = []
    brackets: list[Bracket] = []
    number = 0
    before = ""
    for number, line in enumerate(lines, start=1):
        for part in _PARTS.findall(line):
            if part == "(":
                if inside:
                    _begin_child(inside[-1], brackets, f"{name} line {number}")
                inside.append(_Open(number, len(words)))
            elif not inside:
                raise ValueError(
                    f"{name} line {number} must have balanced brackets, got {part!r} outside all "
                    "brackets."
                )
            elif part != ")":
                _add_word(inside[-1], part, before == "(", f"{name} line {number}")
            else:
                done = inside.pop()
                if done.words:
                    words.append(" ".join(done.words))
                    tags.append(done.label or "")
                elif done.index is None:
                    raise ValueError(
                        f"{name} line {number} must not have empty brackets, got "
                        f"({done.label or ''})."
                    )
                else:
                    brackets[done.index] = Bracket(done.label or "", done.start, len(words))
                if not inside:
                    yield Tree(tuple(words), tuple(tags), tuple(brackets))
                    words, tags, brackets = [], [], []
            before = part
    if inside:
        raise ValueError(
            f"{name} line {inside[0].line} must have balanced brackets, got {len(inside)} still "
            f"open at the end of the text, line {number}."
        )


def _begin_child(parent: _Open, brackets: list[Bracket], where: str):
    if parent.words:
        raise ValueError(
            f"{where} must have either words or brackets in a bracket, got {parent.words[0]!r} "
            "beside a bracket."
        )
    if parent.index is None:
        parent.index = len(brackets)
        brackets.append(Bracket("", 0, 0))


def _add_word(parent: _Open, word: str, is_label: bool, where: str):
    if is_label:
        parent.label = word
    elif parent.index is not None:
        raise ValueError(
            f"{where} must have either words or brackets in a bracket, got {word!r} beside a "
            "bracket."
        )
    elif parent.label is None:
        raise ValueError(f"{where} must have a tag before each word, got {word!r} without a tag.")
    else:
        parent.words.append(word)


def clean(tree: Tree, counts: Counter | None = None) -> Tree | None:
    """Remove elements that are not scored: traces, function tags, brackets around the whole tree.

    A leaf of several words becomes several leaves. If no other bracket contains all words, a
    bracket `TOP` contains them.

    Args:
        tree: Tree from `read_trees`.
        counts: Counter to which the numbers of removed elements are added, by kind.

    Returns:
        Tree in which every bracket has a word and the first bracket has all words. None if no word
        is left.
    """
    counts = Counter() if counts is None else counts
    words: list[str] = []
    tags: list[str] = []
    # for each position in the old sentence, the position in the new sentence
    positions = [0]
    for word, tag in zip(tree.words, tree.tags, strict=True):
        parts = [] if tag == EMPTY_TAG else word.split(" ")
        counts["empty elements"] += not parts
        counts["leaves of several words"] += len(parts) > 1
        words.extend(parts)
        tags.extend([tag] * len(parts))
        positions.append(len(words))
    brackets = []
    for label, start, end in tree.brackets:
        # cut at the first - or =, so that NP-SBJ=2 becomes NP; keep the first character, because
        # the label -LRB- begins with a hyphen
        bare = label[:1] + re.split("[-=]", label[1:])[0]
        counts["function tags"] += bare != label
        if positions[start] < positions[end]:
            brackets.append(Bracket(bare, positions[start], positions[end]))
    if not words:
        return None
    whole = (0, len(words))
    while len(brackets) > 1 and brackets[0].label in ROOTS and brackets[1][1:] == whole:
        del brackets[0]
    if not brackets:
        brackets = [Bracket(TOP, *whole)]
    if brackets[0].label in ROOTS:
        brackets[0] = Bracket(TOP, *whole)
    return Tree(tuple(words), tuple(tags), tuple(brackets))
