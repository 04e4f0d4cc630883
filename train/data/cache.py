"""Cache of files that are made from text. A file in the cache is always complete."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets

from ...atomic_files import make_folder, to_disk, unfinished_path


def cached(name: str, code: Sequence[str], write: Callable[[Path], None]) -> Path:
    """Return the path of a file in the cache, and write the file if it is absent.

    The caches of `datasets` depend on the path of a corpus, and can be empty after a power loss.

    Args:
        name: Name of the file, which depends on everything that determines its content.
        code: Source files of the code that makes the file; changed code gets new files.
        write: Function that writes the file to a given path; it may write nothing.

    Returns:
        Path of the file.
    """
    version = hashlib.sha256(b"".join(Path(file).read_bytes() for file in code)).hexdigest()[:16]
    path = Path(datasets.config.HF_DATASETS_CACHE, "vanilla_transformer", version, name)
    if not path.is_file():
        make_folder(path.parent)
        unfinished = unfinished_path(path)
        try:
            write(unfinished)
            if unfinished.is_file():
                to_disk(unfinished)
                unfinished.replace(path)
                to_disk(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)
    return path
