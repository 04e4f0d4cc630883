"""Section 6.3: phrase structure trees as sequences of tokens, and back.

A tree is held flat: its words, and its brackets with the places of the words they span. Brackets
of one span, as in a unary chain, stand the outer one first.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..train.data.text_files import lines_of, opened, read_lines

# stands for every word of the target: which word it is, the source says
WORD = "XX"
# the tag of a trace or of another empty element
EMPTY_TAG = "-NONE-"
# a bracket around a whole tree that says nothing of it; where it is the only one, it has this name
TOP = "TOP"
ROOTS = ("", TOP, "ROOT", "S1")
SUFFIXES = (".mrg", ".ptb", ".tree")
PACKED = ("", ".gz", ".xz")
# why tokens are no tree
UNKNOWN = "a token that is neither bracket nor word"
OUTSIDE = "a word outside of all brackets"
MISMATCH = "a bracket closed that is not the one open"
NOTHING = "a bracket with nothing in it"
SECOND = "more than one tree"
UNCLOSED = "a bracket not closed"
FEW = "too few words"
MANY = "too many words"

# only ASCII's spaces part words: a no-break space belongs to one
_PARTS = re.compile(r"[()]|[^\s()]+", re.ASCII)


class Bracket(NamedTuple):
    """A constituent.

    Attributes:
        label: Its name, NP for one.
        start: Place of its first word.
        end: Place after its last word.
    """

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class Tree:
    """The structure of a sentence.

    Attributes:
        words: The sentence.
        tags: The part of speech of each word.
        brackets: The constituents, each before those inside it, from left to right.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    brackets: tuple[Bracket, ...]

    def __str__(self) -> str:
        """The tree as bracketed text, on one line."""
        parts = []
        for kind, item in walk(self):
            if kind == ")":
                parts[-1] += ")"
            else:
                word = f"({self.tags[item]} {self.words[item]})" if kind == WORD else ""
                parts.append(word or f"({item.label}")
        return " ".join(parts)


def walk(tree: Tree) -> Iterator[tuple[str, int | Bracket]]:
    """Walk through a tree from left to right.

    Args:
        tree: Any tree without empty brackets.

    Yields:
        "(" or ")" with the bracket that opens or closes, or `WORD` with the place of a word.
    """
    inside: list[Bracket] = []
    coming = list(reversed(tree.brackets))
    for place in range(len(tree.words) + 1):
        while inside and inside[-1].end == place:
            yield ")", inside.pop()
        while coming and coming[-1].start == place:
            inside.append(coming.pop())
            yield "(", inside[-1]
        if place < len(tree.words):
            yield WORD, place


def linearize(tree: Tree) -> list[str]:
    """Write a tree as a sentence of brackets, as Vinyals et al. 2015 do: section 6.3's target.

    Every opening bracket has its label, every closing one too, and every word is the same `WORD`.
    The words are known from the source, and parts of speech are not scored.

    Args:
        tree: Without empty elements, from `clean`.

    Returns:
        The tokens: `(NP`, `)NP`, `XX`.
    """
    return [
        WORD if kind == WORD else f"{kind}{item.label}"  # item is a bracket there
        for kind, item in walk(tree)
    ]


def tree_from_tokens(tokens: Sequence[str], words: Sequence[str], tags: Sequence[str]) -> Tree:
    """Read a linearized tree.

    Args:
        tokens: As `linearize` writes them.
        words: The sentence.
        tags: The part of speech of each word, which the tokens do not say.

    Returns:
        The tree.

    Raises:
        ValueError: If the tokens are no tree over so many words; says why.
    """
    brackets, lacking = _read_tokens(tokens, len(words))
    if lacking is not None:
        raise ValueError(f"tokens must be a tree over {len(words)} words, got {lacking}.")
    return Tree(tuple(words), tuple(tags), tuple(brackets))


def malformation(tokens: Sequence[str], num_words: int) -> str | None:
    """Return the reason why tokens are no tree, or None.

    Args:
        tokens: What may be a linearized tree.
        num_words: Number of words in the sentence.

    Returns:
        The first reason from left to right; None for a tree over so many words.
    """
    return _read_tokens(tokens, num_words)[1]


def _read_tokens(tokens: Sequence[str], num_words: int) -> tuple[list[Bracket], str | None]:
    brackets: list[Bracket] = []
    inside: list[int] = []
    place = 0
    for token in tokens:
        kind, label = token[:1], token[1:]
        if token != WORD and (kind not in "()" or not label):
            return brackets, UNKNOWN
        if brackets and not inside:
            return brackets, SECOND
        if token == WORD:
            if not inside:
                return brackets, OUTSIDE
            place += 1
        elif kind == "(":
            inside.append(len(brackets))
            brackets.append(Bracket(label, place, place))
        else:
            if not inside or brackets[inside[-1]].label != label:
                return brackets, MISMATCH
            index = inside.pop()
            if brackets[index].start == place:
                return brackets, NOTHING
            brackets[index] = brackets[index]._replace(end=place)
    if inside:
        return brackets, UNCLOSED
    if place != num_words:
        return brackets, FEW if place < num_words else MANY
    return brackets, None


@dataclass
class _Open:
    """A bracket that is being read."""

    line: int
    start: int
    label: str | None = None
    words: list[str] = field(default_factory=list)
    # its place among the brackets, as soon as there is one inside it
    index: int | None = None


def read_trees(paths: Iterable[str | Path]) -> Iterator[Tree]:
    """Read bracketed trees as they are, one or many to a line or to a file.

    Args:
        paths: Files, plain, .gz or .xz, or folders, whose files of a treebank are read by name.

    Yields:
        The trees, in order. A leaf of several words is one with spaces in it.

    Raises:
        ValueError: If there is no such file, or what it holds is no tree; says which line.
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
                f"{path} must have files that end in {', '.join(SUFFIXES)}, also .gz or .xz, "
                "got none."
            )
        yield from found


def trees_in(lines: Iterable[str], name: str) -> Iterator[Tree]:
    """Read bracketed trees from text.

    Args:
        lines: The text.
        name: Name of the text, for an error.

    Yields:
        The trees, as `read_trees` gives them.

    Raises:
        ValueError: If the text holds something else; says in which line.
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
                    f"{name} line {number} must be brackets that are balanced, got {part!r} "
                    "outside of all."
                )
            elif part != ")":
                _add_word(inside[-1], part, before == "(", f"{name} line {number}")
            else:
                done = inside.pop()
                if done.words:
                    words.append(" ".join(done.words))
                    tags.append(done.label)
                elif done.index is None:
                    raise ValueError(
                        f"{name} line {number} must have something in every bracket, got none in "
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
            f"{name} line {inside[0].line} must be brackets that are balanced, got {len(inside)} "
            f"still open at line {number}, the last."
        )


def _begin_child(parent: _Open, brackets: list[Bracket], place: str):
    if parent.words:
        raise ValueError(
            f"{place} must have words or brackets in a bracket, got {parent.words[0]!r} beside one."
        )
    if parent.index is None:
        parent.index = len(brackets)
        brackets.append(Bracket("", 0, 0))


def _add_word(parent: _Open, word: str, is_label: bool, place: str):
    if is_label:
        parent.label = word
    elif parent.index is not None:
        raise ValueError(
            f"{place} must have words or brackets in a bracket, got {word!r} beside one."
        )
    elif parent.label is None:
        raise ValueError(f"{place} must have a tag before each word, got {word!r}.")
    else:
        parent.words.append(word)


def clean(tree: Tree, counts: Counter | None = None) -> Tree | None:
    """Remove what is not scored: traces, function tags, the bracket around a tree.

    Args:
        tree: From `read_trees`.
        counts: Where to count what was taken away, by name.

    Returns:
        A tree whose every bracket holds a word and whose first holds all; None if no word is left.
    """
    counts = Counter() if counts is None else counts
    words: list[str] = []
    tags: list[str] = []
    # where each place of the old sentence is in the new one
    places = [0]
    for word, tag in zip(tree.words, tree.tags, strict=True):
        parts = [] if tag == EMPTY_TAG else word.split(" ")
        counts["empty elements"] += not parts
        counts["leaves of several words"] += len(parts) > 1
        words.extend(parts)
        tags.extend([tag] * len(parts))
        places.append(len(words))
    brackets = []
    for label, start, end in tree.brackets:
        # -LRB- is a name, and NP-SBJ=2 one with two tags
        bare = label[:1] + re.split("[-=]", label[1:])[0]
        counts["function tags"] += bare != label
        if places[start] < places[end]:
            brackets.append(Bracket(bare, places[start], places[end]))
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
