"""First bytes of packed text files, and the errors of those that are cut off."""

import lzma
import zlib

# first bytes of a gzip file
GZIP = b"\x1f\x8b"
# what reading raises where a packed file is not whole
CUT_SHORT = (OSError, EOFError, zlib.error, lzma.LZMAError)
