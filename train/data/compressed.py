"""Compressed text files: first bytes of gzip, and the errors of truncated files."""

import lzma
import zlib

# first bytes of a gzip file
GZIP = b"\x1f\x8b"
# what reading a truncated file raises
TRUNCATED = (OSError, EOFError, zlib.error, lzma.LZMAError)
