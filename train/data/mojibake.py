"""Find text with a wrong encoding.

Mojibake is UTF-8 text that was decoded as Windows-1252, so that each byte of a character became a
character of its own.
"""

import re

# characters of the continuation bytes of UTF-8, 0x80 to 0xBF, without the bytes that Windows-1252
# leaves undefined
_CONTINUATIONS = bytes(
    byte for byte in range(0x80, 0xC0) if byte not in b"\x81\x8d\x8f\x90\x9d"
).decode("cp1252")
# the two groups of characters of `_CONTINUATIONS` that correct text can contain after a word in
# capital letters, such as the closing quotation mark, a symbol, in «ALEMÃ»
_PUNCTUATION = "\u2026\u2019\u201c\u201d\u2013\u2014"
_SYMBOLS = "\xa0\xad«»°§®·\u00b4²³™\u2039\u203a"
_CAPITAL_LETTERS, _SMALL_LETTERS = (
    "".join(filter(has_case, map(chr, [*range(0x250), *range(0x1E00, 0x1F00)])))
    for has_case in (str.isupper, str.islower)
)
# every match begins with one of these characters, so that a search skips quickly to the next one.
# Each alternative then checks by a lookbehind which character it is
GARBLED = re.compile(
    "[\ufffd\x80-\x9f\0ÂÃÅâ](?:{})".format(
        "|".join(
            pattern.format(
                clear=re.escape("".join(sorted({*_CONTINUATIONS} - {*_PUNCTUATION, *_SYMBOLS}))),
                second=re.escape(_CONTINUATIONS),
                marks=_PUNCTUATION,
                symbols=_SYMBOLS,
                capitals=_CAPITAL_LETTERS,
                small=_SMALL_LETTERS,
            )
            for pattern in (
                # a replacement character, a C1 control character, or a NUL byte of UTF-16 text
                "(?<=[\ufffd\x80-\x9f\0])",
                "(?<=[ÂÃ])[{clear}]",
                "(?<=â)€[{second}]",
                "(?<=Å)[{marks}](?=[{small}])",
                # a letter inside or at the start of a word in lower case
                "(?<=[{small}]Ã)[{marks}{symbols}]",
                "(?<=Ã)(?<![{capitals}]Ã)[{marks}{symbols}](?=[{small}])",
                # the word à, whose second byte becomes a no-break space
                "(?<=Ã)(?<!\\SÃ)\xa0(?!\\S)",
                # a symbol such as ° or ». In correct text, a symbol can follow Â if Â ends a word
                # in capital letters, begins the text, or follows an opening quotation mark
                "(?<=[^{capitals}«\u201c\u2018\u201e\"'(]Â)[{symbols}]",
                # N° (number), where N is not the end of a word
                "(?<=NÂ)(?<![^\\W\\d_]NÂ)°",
            )
        )
    )
)
