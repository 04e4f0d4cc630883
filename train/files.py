"""Files that are there whole, or as they were before, and a folder for one process."""

import contextlib
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

# what gzip's files begin with
GZIP = b"\x1f\x8b"
# what reading raises where a packed file is not whole
CUT_SHORT = (OSError, EOFError, zlib.error, lzma.LZMAError)

_held: set[int] = set()


def _leave_to_parent():
    # a worker that outlives a killed run must not keep its folder from the run that goes on
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a folder from other processes that ask for it so, until it is left or the process ends.

    Args:
        folder: It exists. Where its file system knows no locks, nothing is kept.

    Raises:
        ValueError: If another process holds it.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"output_dir must be that of no running training, got {folder}, in which another "
                "process trains."
            ) from error
        except OSError:
            # some network file systems lock no folder
            pass
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a text so that whoever stops in between, or the power, leaves the file as it was.

    Args:
        path: The file; its folder exists.
        text: All of it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        # some file systems put a file under its name before what it holds is on the disk
        os.fsync(file.fileno())
    unfinished.replace(path)
