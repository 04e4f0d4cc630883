"""Texts of an HTML fragment, and the fragment with their translations."""

import html
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from itertools import accumulate, groupby
from typing import NamedTuple

# elements within a sentence (HTML Standard, section 4.5); every other tag ends a sentence
INLINE = {
    *("a", "abbr", "b", "bdi", "bdo", "big", "cite", "data", "del", "dfn", "em", "font", "i"),
    *("ins", "kbd", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup"),
    *("time", "tt", "u", "var"),
}
# elements without an end tag (HTML Standard, section 13.1.2)
VOID = {
    *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param"),
    *("source", "track", "wbr"),
}
# those of them that stand within a sentence
INLINE_VOID = {"img", "wbr"}
# elements whose content is not translated
UNTRANSLATED = {"code", "math", "script", "style", "svg"}
# those of them whose text has no character references
RAW_TEXT = {"script", "style"}
# element in which white space is shown as it is written
PREFORMATTED = "pre"
# white space between words, which HTML shows as one space
WHITE_SPACE = re.compile(r"(?<=\S)[ \t\n\r\f]+(?=\S)")
# largest number of nested elements within a sentence
MAX_DEPTH = 50


class AlignedText(NamedTuple):
    """Translation of a text.

    Attributes:
        text: The translation.
        word_pairs: For each word of the translation, the places of the source word that it is
            aligned with and of the word itself, as (start, end) in characters.
    """

    text: str
    word_pairs: list[tuple[tuple[int, int], tuple[int, int]]]


def aligned_text(
    parts: Sequence[str],
    translated_parts: Sequence[str],
    word_pairs: Sequence[Sequence[tuple[int, int]]],
) -> AlignedText:
    """Join the translations of sentences.

    Args:
        parts: Parts of a text: sentences with the white space around them, or only white space.
        translated_parts: The same parts of the translation.
        word_pairs: For each sentence, pairs of source word and word of the translation, from 0, as
            `return_alignment` of the pipeline gives them.

    Returns:
        The translation of the text.
    """
    places: list[tuple[tuple[int, int], tuple[int, int]]] = []
    remaining_pairs = iter(word_pairs)
    start = translated_start = 0
    for part, translated_part in zip(parts, translated_parts, strict=True):
        # without an alignment, the places of the words are not needed
        if part.strip() and (pairs := next(remaining_pairs)):
            words = _word_places(part, start)
            translated_words = _word_places(translated_part, translated_start)
            # a tokenizer may divide the words of a text in another way
            places += [
                (words[source], translated_words[target])
                for source, target in pairs
                if source < len(words) and target < len(translated_words)
            ]
        start += len(part)
        translated_start += len(translated_part)
    return AlignedText("".join(translated_parts), places)


def _word_places(part: str, start: int) -> list[tuple[int, int]]:
    return [(start + word.start(), start + word.end()) for word in re.finditer(r"\S+", part)]


class Piece(NamedTuple):
    """Part of an HTML fragment.

    Attributes:
        kind: "text" for a text to translate; "open" and "close" for the tags of an inline element;
            "break" for everything else, which ends a sentence.
        content: Text without character references, or markup as it is written in the result.
        element: Name of the element, for a tag of an inline element.
    """

    kind: str
    content: str
    element: str = ""


class Element(NamedTuple):
    """Inline element of a text.

    Attributes:
        opening: Start tag.
        closing: End tag.
        start: Place of the element's text in the whole text, in characters.
        end: End of this place.
        children: Elements in this element.
    """

    opening: str
    closing: str
    start: int
    end: int
    children: list["Element"]


class HtmlTexts:
    """Texts of an HTML fragment.

    A text with inline elements, such as links, is translated without its tags. The tags are then
    put around the words that are aligned with the words of the element.

    Args:
        fragment: HTML.

    Attributes:
        texts: Texts to translate, without tags and character references.
        needs_alignment: Whether a text has inline elements, so that `join` needs word pairs.
    """

    def __init__(self, fragment: str):
        parser = _Parser()
        parser.feed(fragment)
        parser.close()
        self._sections = [_Section(pieces) for pieces in _sections(parser.pieces)]
        self.texts = [section.text for section in self._sections if section.text]
        self.needs_alignment = any(section.elements for section in self._sections)

    def join(self, translations: Sequence[AlignedText]) -> str:
        """Put translations in place of the texts.

        Args:
            translations: Translation of each text.

        Returns:
            HTML.
        """
        remaining = iter(translations)
        return "".join(
            section.join(next(remaining)) if section.text else section.before
            for section in self._sections
        )


class _Parser(HTMLParser):
    """Parser that divides HTML into pieces."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.pieces: list[Piece] = []
        # name of each open element, and whether its content is translated
        self._open_elements: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        attributes = dict(attrs)
        classes = (attributes.get("class") or "").split()
        is_translated = (
            tag not in UNTRANSLATED
            and attributes.get("translate") != "no"
            and "notranslate" not in classes
        )
        is_inline = tag in INLINE or tag in INLINE_VOID
        self._add("open" if is_inline else "break", self.get_starttag_text() or "", tag)
        if tag in INLINE_VOID:
            self._add("close", "", tag)
        if tag not in VOID:
            self._open_elements.append((tag, self._is_translated and is_translated))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]):
        # HTML ignores the slash
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str):
        names = [name for name, _ in self._open_elements]
        if tag in names:
            # an element also ends the elements in it whose end tags are missing
            del self._open_elements[len(names) - 1 - names[::-1].index(tag) :]
        self._add("close" if tag in INLINE else "break", f"</{tag}>", tag)

    def handle_data(self, data: str):
        if self._open_elements and self._open_elements[-1][0] in RAW_TEXT:
            self._add("break", data)
        elif not self._is_translated:
            self._add("break", html.escape(data, quote=False))
        else:
            if self.pieces and self.pieces[-1].kind == "text":
                data = self.pieces.pop().content + data
            if all(name != PREFORMATTED for name, _ in self._open_elements):
                data = WHITE_SPACE.sub(" ", data)
            self._add("text", data)

    def handle_comment(self, data: str):
        self._add("break", f"<!--{data}-->")

    def handle_decl(self, decl: str):
        self._add("break", f"<!{decl}>")

    def handle_pi(self, data: str):
        self._add("break", f"<?{data}>")

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """Read `<![` as the start of a comment, as browsers do."""
        return self.parse_bogus_comment(i)

    @property
    def _is_translated(self) -> bool:
        return not self._open_elements or self._open_elements[-1][1]

    def _add(self, kind: str, content: str, element: str = ""):
        self.pieces.append(Piece(kind, content, element))


def _sections(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Divide pieces into breaks, and texts with their inline elements."""
    for section in _split_at_breaks(pieces):
        for part in _split_at_breaks(_without_lone_tags(section)):
            # the other tag of an element may be in another part
            yield from _split_at_breaks(_without_lone_tags(part))


def _split_at_breaks(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    for _, section in groupby(pieces, lambda piece: piece.kind == "break"):
        yield list(section)


def _without_lone_tags(pieces: list[Piece]) -> list[Piece]:
    """Return pieces in which each tag without the other tag of its element is a break."""
    lone_tags = set()
    open_tags: list[int] = []
    for index, piece in enumerate(pieces):
        if piece.kind == "open" and len(open_tags) < MAX_DEPTH:
            open_tags.append(index)
        elif piece.kind == "close" and open_tags and pieces[open_tags[-1]].element == piece.element:
            open_tags.pop()
        elif piece.kind != "text":
            lone_tags.add(index)
    lone_tags.update(open_tags)
    return [
        piece._replace(kind="break") if index in lone_tags else piece
        for index, piece in enumerate(pieces)
    ]


class _Section:
    """Breaks, or a text with its inline elements.

    Args:
        pieces: Breaks only, or pieces of the other kinds, in which each tag has the other tag of
            its element.

    Attributes:
        before: HTML before the text, or all of the HTML if there is no text.
        text: Text to translate; empty if there is none.
        elements: Elements of the text.
        after: HTML after the text.
    """

    def __init__(self, pieces: Sequence[Piece]):
        indices = [
            index
            for index, piece in enumerate(pieces)
            if piece.kind == "text" and piece.content.strip()
        ]
        start, end = (indices[0], indices[-1] + 1) if indices else (len(pieces), len(pieces))
        # a tag around the words stays where it is if the other tag of its element is not between
        # the words
        depths = [0, *accumulate(_depth(piece) for piece in pieces[start:end])]
        start -= _reach([_depth(piece) for piece in reversed(pieces[:start])], -min(depths))
        end += _reach([-_depth(piece) for piece in pieces[end:]], depths[-1] - min(depths))
        self.before, self.after = map(_html_of, (pieces[:start], pieces[end:]))
        self.text = ""
        self.elements: list[Element] = []
        open_tags: list[tuple[str, int, list[Element]]] = []
        siblings = self.elements
        for piece in pieces[start:end]:
            if piece.kind == "text":
                self.text += piece.content
            elif piece.kind == "open":
                open_tags.append((piece.content, len(self.text), siblings))
                siblings = []
            else:
                opening, element_start, parents = open_tags.pop()
                parents.append(
                    Element(opening, piece.content, element_start, len(self.text), siblings)
                )
                siblings = parents

    def join(self, translation: AlignedText) -> str:
        """Return the HTML of the section, with a translation in place of the text.

        Args:
            translation: Translation of the text.
        """
        text, _ = translation
        content = self._with_elements(self.elements, translation, 0, len(text))
        return f"{self.before}{content}{self.after}"

    def _with_elements(
        self, elements: Sequence[Element], translation: AlignedText, start: int, end: int
    ) -> str:
        """Return the HTML of a part of the translation with elements."""
        text, _ = translation
        result = ""
        placed = sorted(
            ((self._place(element, translation), element) for element in elements),
            key=lambda pair: pair[0][0],
        )
        for (element_start, element_end), element in placed:
            # elements must not overlap
            element_start = min(max(element_start, start), end)
            element_end = min(max(element_end, element_start), end)
            result += html.escape(text[start:element_start], quote=False)
            content = self._with_elements(element.children, translation, element_start, element_end)
            result += f"{element.opening}{content}{element.closing}"
            start = element_end
        return result + html.escape(text[start:end], quote=False)

    def _place(self, element: Element, translation: AlignedText) -> tuple[int, int]:
        """Return the start and end of an element in the translation, in characters."""
        text, word_pairs = translation
        if not word_pairs:
            return len(text), len(text)
        if not self.text[element.start : element.end].strip():
            # an element without words stands before the next word
            next_words = [place for source, place in word_pairs if source[0] >= element.start]
            position = min(next_words)[0] if next_words else word_pairs[-1][1][1]
            return position, position
        indices = [
            index
            for index, ((word_start, word_end), _) in enumerate(word_pairs)
            if word_start < element.end and word_end > element.start
        ]
        if not indices:
            # no word is aligned with the element, so the one at the same share of the text is taken
            share = (element.start + element.end) / (2 * len(self.text))
            indices = [min(int(share * len(word_pairs)), len(word_pairs) - 1)]
        # the longest run of words; words between other words are usually aligned wrongly
        runs = [
            [index for _, index in run]
            for _, run in groupby(enumerate(indices), lambda it: it[1] - it[0])
        ]
        run = max(runs, key=len)
        start, end = word_pairs[run[0]][1][0], word_pairs[run[-1]][1][1]
        # words have punctuation at their ends, which may be outside of the element
        words, element_words = text[start:end], self.text[element.start : element.end].strip()
        before, after = self.text[: element.start], self.text[element.end :]
        start += _num_outside(words, element_words, before[::-1])
        end -= _num_outside(words[::-1], element_words[::-1], after)
        places = [(start, end), *(self._place(child, translation) for child in element.children)]
        return min(start for start, _ in places), max(end for _, end in places)


def _num_outside(words: str, element_words: str, neighbours: str) -> int:
    """Return how many characters of punctuation at the start of words are outside of an element.

    Args:
        words: Words of the translation.
        element_words: Words of the element in the source.
        neighbours: What is before these words in the source, backwards.
    """
    num_outside = _num_punctuation(words)
    if num_outside == len(words):
        return 0
    if _num_punctuation(element_words):
        return min(num_outside, _num_punctuation(neighbours))
    return num_outside


def _num_punctuation(text: str) -> int:
    """Return the number of characters of punctuation at the start of a text."""
    match = re.match(r"[^\w\s]*", text)
    return 0 if match is None else match.end()


def _depth(piece: Piece) -> int:
    """Return the number of elements that a piece opens."""
    return {"open": 1, "close": -1}.get(piece.kind, 0)


def _reach(depths: Sequence[int], num_elements: int) -> int:
    """Return the number of pieces up to the missing tags of some elements."""
    return [0, *accumulate(depths)].index(num_elements)


def _html_of(pieces: Sequence[Piece]) -> str:
    return "".join(
        html.escape(piece.content, quote=False) if piece.kind == "text" else piece.content
        for piece in pieces
    )
