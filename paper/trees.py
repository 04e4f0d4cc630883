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
ROOT_LABELS = ("", TOP, "ROOT", "S1")
TREEBANK_SUFFIXES = (".mrg", ".ptb", ".tree")
COMPRESSION_SUFFIXES = ("", ".gz", ".xz")
# reasons why tokens are not a tree
UNKNOWN_TOKEN = "a token that is neither a bracket nor a word"
WORD_OUTSIDE = "a word outside all brackets"
MISMATCHED_BRACKET = "a closing bracket that does not match the open one"
EMPTY_BRACKET = "an empty bracket"
SECOND_TREE = "more than one tree"
UNCLOSED_BRACKET = "a bracket that is not closed"
TOO_FEW_WORDS = "too few words"
TOO_MANY_WORDS = "too many words"

# only ASCII spaces separate words; a no-break space is part of a word
_BRACKETS_AND_WORDS = re.compile(r"[()]|[^\s()]+", re.ASCII)


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
    open_brackets: list[Bracket] = []
    next_brackets = list(reversed(tree.brackets))
    for position in range(len(tree.words) + 1):
        while open_brackets and open_brackets[-1].end == position:
            yield ")", open_brackets.pop()
        while next_brackets and next_brackets[-1].start == position:
            open_brackets.append(next_brackets.pop())
            yield "(", open_brackets[-1]
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
    brackets, reason = _read_tokens(tokens, len(words))
    if reason is not None:
        raise ValueError(f"tokens must be a tree over {len(words)} words, got {reason}.")
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
    open_indices: list[int] = []
    position = 0
    for token in tokens:
        kind, label = token[:1], token[1:]
        if token != WORD and (kind not in "()" or not label):
            return brackets, UNKNOWN_TOKEN
        if brackets and not open_indices:
            return brackets, SECOND_TREE
        if token == WORD:
            if not open_indices:
                return brackets, WORD_OUTSIDE
            position += 1
        elif kind == "(":
            open_indices.append(len(brackets))
            brackets.append(Bracket(label, position, position))
        else:
            if not open_indices or brackets[open_indices[-1]].label != label:
                return brackets, MISMATCHED_BRACKET
            index = open_indices.pop()
            if brackets[index].start == position:
                return brackets, EMPTY_BRACKET
            brackets[index] = brackets[index]._replace(end=position)
    if open_indices:
        return brackets, UNCLOSED_BRACKET
    if position != num_words:
        return brackets, TOO_FEW_WORDS if position < num_words else TOO_MANY_WORDS
    return brackets, None


@dataclass
class _OpenBracket:
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
    file_endings = tuple(
        suffix + compression for suffix in TREEBANK_SUFFIXES for compression in COMPRESSION_SUFFIXES
    )
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        treebank_files = sorted(
            file for file in path.rglob("*") if file.name.endswith(file_endings)
        )
        if not treebank_files:
            raise ValueError(
                f"{path} must have files that end in {', '.join(TREEBANK_SUFFIXES)} (plain, .gz or "
                ".xz), got none."
            )
        yield from treebank_files


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
    open_brackets: list[_OpenBracket] = []
    words: list[str] = []
    tags: list[str] = []
    brackets: list[Bracket] = []
    line_number = 0
    previous_part = ""
    for line_number, line in enumerate(lines, start=1):
        for part in _BRACKETS_AND_WORDS.findall(line):
            if part == "(":
                if open_brackets:
                    _begin_child(open_brackets[-1], brackets, f"{name} line {line_number}")
                open_brackets.append(_OpenBracket(line_number, len(words)))
            elif not open_brackets:
                raise ValueError(
                    f"{name} line {line_number} must have balanced brackets, got {part!r} outside "
                    "all brackets."
                )
            elif part != ")":
                _add_word(
                    open_brackets[-1], part, previous_part == "(", f"{name} line {line_number}"
                )
            else:
                closed_bracket = open_brackets.pop()
                if closed_bracket.words:
                    words.append(" ".join(closed_bracket.words))
                    tags.append(closed_bracket.label or "")
                elif closed_bracket.index is None:
                    raise ValueError(
                        f"{name} line {line_number} must not have empty brackets, got "
                        f"({closed_bracket.label or ''})."
                    )
                else:
                    brackets[closed_bracket.index] = Bracket(
                        closed_bracket.label or "", closed_bracket.start, len(words)
                    )
                if not open_brackets:
                    yield Tree(tuple(words), tuple(tags), tuple(brackets))
                    words, tags, brackets = [], [], []
            previous_part = part
    if open_brackets:
        raise ValueError(
            f"{name} line {open_brackets[0].line} must have balanced brackets, got "
            f"{len(open_brackets)} still open at the end of the text, line {line_number}."
        )


def _begin_child(parent: _OpenBracket, brackets: list[Bracket], location: str):
    if parent.words:
        raise ValueError(
            f"{location} must have either words or brackets in a bracket, got {parent.words[0]!r} "
            "beside a bracket."
        )
    if parent.index is None:
        parent.index = len(brackets)
        brackets.append(Bracket("", 0, 0))


def _add_word(parent: _OpenBracket, word: str, is_label: bool, location: str):
    if is_label:
        parent.label = word
    elif parent.index is not None:
        raise ValueError(
            f"{location} must have either words or brackets in a bracket, got {word!r} beside a "
            "bracket."
        )
    elif parent.label is None:
        raise ValueError(
            f"{location} must have a tag before each word, got {word!r} without a tag."
        )
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
        leaf_words = [] if tag == EMPTY_TAG else word.split(" ")
        counts["empty elements"] += not leaf_words
        counts["leaves of several words"] += len(leaf_words) > 1
        words.extend(leaf_words)
        tags.extend([tag] * len(leaf_words))
        positions.append(len(words))
    brackets = []
    for label, start, end in tree.brackets:
        # cut at the first - or =, so that NP-SBJ=2 becomes NP; keep the first character, because
        # the label -LRB- begins with a hyphen
        bare_label = label[:1] + re.split("[-=]", label[1:])[0]
        counts["function tags"] += bare_label != label
        if positions[start] < positions[end]:
            brackets.append(Bracket(bare_label, positions[start], positions[end]))
    if not words:
        return None
    whole_span = (0, len(words))
    while len(brackets) > 1 and brackets[0].label in ROOT_LABELS and brackets[1][1:] == whole_span:
        del brackets[0]
    if not brackets:
        brackets = [Bracket(TOP, *whole_span)]
    if brackets[0].label in ROOT_LABELS:
        brackets[0] = Bracket(TOP, *whole_span)
    return Tree(tuple(words), tuple(tags), tuple(brackets))
