"""Read pairs from translation memories in the format TMX 1.4."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.parsers import expat

from .json_records import MAX_RECORD_BYTES
from .text_files import opened

# number of bytes to read at once
BYTES_PER_READ = 1 << 20
# elements inside a segment whose content is markup of the original document, not text
MARKUP_ELEMENTS = ("bpt", "ept", "it", "ph", "ut")
# limits for a damaged file: number of characters that are kept of a language tag, and number of
# tags that an error lists
LONGEST_TAG, MOST_TAGS = 35, 100
# line breaks in a segment, with the indentation of the XML around them
LINE_BREAKS = re.compile(r"[ \t]*[\r\n][ \t\r\n]*")


def read_memory(path: Path, languages: Sequence[str]) -> Iterator[dict[str, str | None]]:
    """Read the pairs of a translation memory, with a space instead of each line break.

    The language "en" also matches the tags of its regions, such as "en-US". A tag that matches both
    languages belongs to the longer one: if the languages are "de" and "de-CH", the tag "de-CH"
    belongs to "de-CH". A translation unit with several texts of a language gives several pairs.

    Args:
        path: Path of the file, plain or compressed.
        languages: Source and target language.

    Yields:
        Text of each language; None for the side that is missing in a unit.

    Raises:
        ValueError: If the file is not a complete TMX file, declares entities, or has no text in one
            of the languages.
    """
    found_tags: set[str] = set()
    missing_languages = set(languages)
    for unit in _read_units(path):
        sides: list[list[str | None]] = [
            [text for tag, text in unit if _language_of(tag, languages) == language]
            for language in languages
        ]
        if missing_languages:
            found_tags.update(tag for tag, _ in unit[: MOST_TAGS - len(found_tags)])
            missing_languages -= {
                language for language, side in zip(languages, sides, strict=True) if side
            }
        if not any(sides):
            continue
        sources, targets = (side or [None] for side in sides)
        # pair the first source with every target, and the other sources with the first target, so
        # that each text occurs in a pair, but not every combination
        pairs = [(sources[0], target) for target in targets]
        pairs += [(source, targets[0]) for source in sources[1:]]
        for pair in pairs:
            yield dict(zip(languages, pair, strict=True))
    if missing_languages:
        raise ValueError(
            f"{path} must have texts in {' and '.join(map(repr, sorted(missing_languages)))}, got "
            f"{', '.join(sorted(found_tags)) or 'no texts'}."
        )


def _language_of(tag: str, languages: Sequence[str]) -> str | None:
    """Return the language with the longest code that is the start of a tag, or None."""
    tag, *codes = (f"{code.casefold().replace('_', '-')}-" for code in (tag, *languages))
    matches = [
        language for language, code in zip(languages, codes, strict=True) if tag.startswith(code)
    ]
    return max(matches, key=len, default=None)


class _MemoryParser:
    """XML parser with handlers that collect the texts of each translation unit.

    Entity declarations are refused, because a few lines of them can expand to more text than fits
    into memory. The parser reads no external files.

    Args:
        path: Path of the file, for an error.
    """

    def __init__(self, path: Path):
        self.path = path
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start_element
        self.parser.EndElementHandler = self._end_element
        self.parser.CharacterDataHandler = self._read_text
        self.parser.EntityDeclHandler = self._refuse_entity
        self.parser.SkippedEntityHandler = self._refuse_entity
        self.units: list[list[tuple[str, str]]] = []
        # position of the end tag of the last complete unit, in bytes
        self.last_unit_end = 0
        self.has_root = False
        self._current_unit: list[tuple[str, str]] = []
        self._current_tag = ""
        # parts of the text of the current segment; None outside of segments
        self._segment_parts: list[str] | None = None
        # nesting depth inside an element of `MARKUP_ELEMENTS`, whose content is skipped; 0 outside
        self._markup_depth = 0

    def _start_element(self, element: str, attributes: dict[str, str]):
        if not self.has_root and element != "tmx":
            raise ValueError(f"{self.path} must be a TMX file, got XML of the kind {element!r}.")
        self.has_root = True
        if self._markup_depth or (self._segment_parts is not None and element in MARKUP_ELEMENTS):
            self._markup_depth += 1
        elif element == "tu":
            self._current_unit = []
        elif element == "tuv":
            # TMX versions before 1.4 have the attribute "lang"
            tag = attributes.get("xml:lang") or attributes.get("lang", "")
            self._current_tag = tag[:LONGEST_TAG]
        elif element == "seg":
            self._segment_parts = []

    def _end_element(self, element: str):
        if self._markup_depth:
            self._markup_depth -= 1
        elif element == "seg" and self._segment_parts is not None:
            text = LINE_BREAKS.sub(" ", "".join(self._segment_parts))
            self._current_unit.append((self._current_tag, text))
            self._segment_parts = None
        elif element == "tu":
            self.units.append(self._current_unit)
            self.last_unit_end = self.parser.CurrentByteIndex

    def _read_text(self, text: str):
        if self._segment_parts is not None and not self._markup_depth:
            self._segment_parts.append(text)

    def _refuse_entity(self, name: str, *_: object):
        raise ValueError(f"{self.path} must be a TMX file that declares no entities, got {name!r}.")


def _read_units(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield the units of a translation memory as (language tag, text) pairs, in bounded memory."""
    memory_parser, num_bytes_read = _MemoryParser(path), 0
    with opened(path) as file:
        try:
            while chunk := file.read(BYTES_PER_READ):
                num_bytes_read += len(chunk)
                memory_parser.parser.Parse(chunk)
                yield from memory_parser.units
                memory_parser.units.clear()
                if num_bytes_read - memory_parser.last_unit_end > MAX_RECORD_BYTES:
                    raise ValueError(
                        f"{path} must have units of at most {MAX_RECORD_BYTES:,} bytes, got a "
                        "longer one."
                    )
            memory_parser.parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise ValueError(
                f"{path} must be a complete TMX file, got XML with {error}."
            ) from error
        # Python raises these errors for an encoding that it does not know, or that XML cannot have
        except (LookupError, ValueError) as error:
            if str(error).startswith(str(path)):
                raise
            raise ValueError(
                f"{path} must be XML in UTF-8, UTF-16 or an encoding with one byte per character, "
                f"got: {error}. Convert it to UTF-8, also in its first line."
            ) from error
    yield from memory_parser.units
