"""Cache of files that are computed from text, such as token ids. Files are written atomically."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import datasets

from ...atomic_files import free_space, is_disk_full, make_folder, to_disk, unfinished_path


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
        OSError: If the cache cannot be written, or its disk is full; names it.
    """
    code_version = hashlib.sha256(
        b"".join(Path(file).read_bytes() for file in code_files)
    ).hexdigest()[:16]
    folder = Path(datasets.config.HF_DATASETS_CACHE, "vanilla_transformer", code_version)
    path = folder / name
    with _naming_cache():
        is_cached = path.is_file()
    if not is_cached:
        # before `write`, which may fail because it cannot read the text
        refuse_unwritable_cache(folder)
        unfinished_file = unfinished_path(path)
        try:
            with naming_full_cache():
                write(unfinished_file)
            if unfinished_file.is_file():
                to_disk(unfinished_file)
                unfinished_file.replace(path)
                to_disk(path.parent)
        finally:
            unfinished_file.unlink(missing_ok=True)
    return path


def refuse_unwritable_cache(folder: Path) -> None:
    """Refuse a cache of `datasets` that cannot be written.

    Args:
        folder: Folder in the cache to write to; created if it does not exist.

    Raises:
        OSError: If no file can be written there; names the cache.
    """
    trial_file = unfinished_path(folder / "trial")
    with _naming_cache():
        make_folder(folder)
        trial_file.touch()
        trial_file.unlink()


@contextlib.contextmanager
def naming_full_cache() -> Iterator[None]:
    """Add the name of the cache of `datasets` to the error of a full disk.

    Raises:
        OSError: If the disk is full. The error has no `errno`, so that no caller concludes that the
            disk of a run folder is full.
    """
    try:
        yield
    except Exception as error:
        # `datasets` raises an error of its own. The causes of an error can form a circle
        causes = [error]
        while isinstance(cause := causes[-1].__cause__, Exception) and cause not in causes:
            causes.append(cause)
        if not any(map(is_disk_full, causes)):
            raise
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        raise OSError(
            f"the cache of datasets, {cache}, cannot be written ({free_space(cache)}): remove "
            "files from its disk, or set the environment variable HF_HOME to a folder on another "
            "disk."
        ) from error


@contextlib.contextmanager
def _naming_cache() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            "the cache of datasets must be a folder that can be written, got "
            f"{datasets.config.HF_DATASETS_CACHE}: set the environment variable HF_HOME to another "
            f"folder ({error.strerror})."
        ) from error
