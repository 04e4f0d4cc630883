"""Cache of files that are computed from text, such as token ids. Files are written atomically."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets

from ...atomic_files import NOT_ALLOWED, make_folder, to_disk, unfinished_path


def ensure_cached_file(name: str, code_files: Sequence[str], write: Callable[[Path], None]) -> Path:
    """Return the path of a file in the cache, and write the file if it is absent.

    The caches of `datasets` do not suffice: they depend on the path of a corpus, and their files
    can be empty after a power loss.

    Args:
        name: Name of the file. It must differ if any input that determines the content differs.
        code_files: Source files of the code that computes the content. They are part of the path,
            so changed code does not read old files.
        write: Function that writes the file to a given path. If it writes no file, nothing is
            cached.

    Returns:
        Path of the file.

    Raises:
        OSError: If the cache cannot be written; names it.
    """
    code_version = hashlib.sha256(
        b"".join(Path(file).read_bytes() for file in code_files)
    ).hexdigest()[:16]
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    path = cache / "vanilla_transformer" / code_version / name
    if not path.is_file():
        unfinished_file = unfinished_path(path)
        # tried before `write`, which may fail because it cannot read the text
        try:
            make_folder(path.parent)
            unfinished_file.touch()
            unfinished_file.unlink()
        except OSError as error:
            if error.errno not in NOT_ALLOWED:
                raise
            raise OSError(
                f"the cache of datasets must be a folder that can be written, got {cache}: set the "
                f"environment variable HF_HOME to another folder ({error.strerror})."
            ) from error
        try:
            write(unfinished_file)
            if unfinished_file.is_file():
                to_disk(unfinished_file)
                unfinished_file.replace(path)
                to_disk(path.parent)
        finally:
            unfinished_file.unlink(missing_ok=True)
    return path
