"""What packed text files begin with, and how they fail."""

import lzma
import zlib

# what gzip's files begin with
GZIP = b"\x1f\x8b"
# what reading raises where a packed file is not whole
CUT_SHORT = (OSError, EOFError, zlib.error, lzma.LZMAError)
