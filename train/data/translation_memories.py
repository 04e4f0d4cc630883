"""Read pairs from translation memories in the format TMX 1.4."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.parsers import expat

from .json_records import MAX_RECORD_BYTES
from .text_files import opened

# number of bytes to read at once
CHUNK = 1 << 20
# elements inside a segment whose content is markup of the original document, not text
CODES = ("bpt", "ept", "it", "ph", "ut")
# limits for a damaged file: number of characters that are kept of a language tag, and number of
# tags that an error lists
LONGEST_TAG, MOST_TAGS = 35, 100


def read_memory(path: Path, languages: Sequence[str]) -> Iterator[dict[str, str | None]]:
    """Read the pairs of a translation memory.

    The language "en" also matches the tags of its regions, such as "en-US". A translation unit with
    several texts of a language gives several pairs.

    Args:
        path: Path of the file, plain or compressed.
        languages: Source and target language.

    Yields:
        Text of each language; None for the side that is missing in a unit.

    Raises:
        ValueError: If the file is not a complete TMX file, declares entities, or has no text in one
            of the languages.
    """
    found: set[str] = set()
    lacking = set(languages)
    for unit in _units(path):
        sides: list[list[str | None]] = [
            [text for tag, text in unit if _is_of(tag, language)] for language in languages
        ]
        if lacking:
            found.update(tag for tag, _ in unit[: MOST_TAGS - len(found)])
            lacking -= {it for it, side in zip(languages, sides, strict=True) if side}
        if not any(sides):
            continue
        sources, targets = (side or [None] for side in sides)
        # pair the first source with every target, and the other sources with the first target: each
        # text occurs, without a pair for every combination
        pairs = [(sources[0], target) for target in targets]
        pairs += [(source, targets[0]) for source in sources[1:]]
        for pair in pairs:
            yield dict(zip(languages, pair, strict=True))
    if lacking:
        raise ValueError(
            f"{path} must have texts in {' and '.join(map(repr, sorted(lacking)))}, got "
            f"{', '.join(sorted(found)) or 'no texts'}."
        )


def _is_of(tag: str, language: str) -> bool:
    tag, language = (name.casefold().replace("_", "-") for name in (tag, language))
    return tag == language or tag.startswith(f"{language}-")


class _Memory:
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
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._read
        self.parser.EntityDeclHandler = self._refuse_entity
        self.parser.SkippedEntityHandler = self._refuse_entity
        self.units: list[list[tuple[str, str]]] = []
        # position of the end tag of the last complete unit, in bytes
        self.end = 0
        self.is_begun = False
        self._unit: list[tuple[str, str]] = []
        self._language = ""
        # parts of the text of the current segment; None outside of segments
        self._text: list[str] | None = None
        # nesting depth inside an element of `CODES`, whose content is skipped; 0 outside
        self._depth = 0

    def _start(self, name: str, attributes: dict[str, str]):
        if not self.is_begun and name != "tmx":
            raise ValueError(f"{self.path} must be a TMX file, got XML of the kind {name!r}.")
        self.is_begun = True
        if self._depth or (self._text is not None and name in CODES):
            self._depth += 1
        elif name == "tu":
            self._unit = []
        elif name == "tuv":
            # TMX versions before 1.4 have the attribute "lang"
            tag = attributes.get("xml:lang") or attributes.get("lang", "")
            self._language = tag[:LONGEST_TAG]
        elif name == "seg":
            self._text = []

    def _end(self, name: str):
        if self._depth:
            self._depth -= 1
        elif name == "seg" and self._text is not None:
            self._unit.append((self._language, "".join(self._text)))
            self._text = None
        elif name == "tu":
            self.units.append(self._unit)
            self.end = self.parser.CurrentByteIndex

    def _read(self, text: str):
        if self._text is not None and not self._depth:
            self._text.append(text)

    def _refuse_entity(self, name: str, *_: object):
        raise ValueError(f"{self.path} must be TMX without entities of its own, got {name!r}.")


def _units(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield the units of a translation memory as (language tag, text) pairs, in bounded memory."""
    memory, num_bytes = _Memory(path), 0
    with opened(path) as file:
        try:
            while chunk := file.read(CHUNK):
                num_bytes += len(chunk)
                memory.parser.Parse(chunk)
                yield from memory.units
                memory.units.clear()
                if num_bytes - memory.end > MAX_RECORD_BYTES:
                    raise ValueError(
                        f"{path} must have units of at most {MAX_RECORD_BYTES:,} bytes, got a "
                        "longer one."
                    )
            memory.parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise ValueError(f"{path} must be a whole TMX file, got XML with {error}.") from error
    yield from memory.units
