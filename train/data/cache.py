"""Files that are made once from text, and are whole in the cache or absent."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets

from ...atomic_files import make_folder, to_disk, unfinished_path


def cached(name: str, code: Sequence[str], write: Callable[[Path], None]) -> Path:
    """Return the place of a file in the cache, and write the file if it is absent.

    The library's own caches depend on where a corpus lies, and can be empty after a power loss.

    Args:
        name: Name of the file, from all that its content depends on.
        code: Source files that make it; another version of the code has files of its own.
        write: Function that writes the file to the path that it is given; it may write nothing.

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
