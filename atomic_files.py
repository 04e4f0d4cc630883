"""Files and folders that are whole or absent, and that one command at a time writes to."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock, Timeout

LOCK_FILE = ".lock"
# no space, more than the user's share, and a file larger than the file system takes
DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", None), errno.EFBIG)
# what some network file systems answer to every lock
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextlib.contextmanager
def held(folder: Path, seconds: float = 0.0) -> Iterator[bool]:
    """Keep a folder from the other commands of this package until the block ends.

    The lock ends with the process, also with one that is killed. A file system without locks keeps
    nobody away.

    Args:
        folder: Folder to write to; made, with its parents, if it does not exist. What was made and
            is empty at the end is removed.
        seconds: Time to wait for another command that has the folder.

    Yields:
        Whether the folder is locked; False on a file system without locks.

    Raises:
        ValueError: If another command has the folder, or it is a file.
        OSError: If the folder cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir must be a folder, got the file {folder}.")
    made: list[Path] = []
    path = folder / LOCK_FILE
    lock = FileLock(path, timeout=seconds, fallback_to_soft=False, thread_local=False)
    try:
        while True:
            made += make_folder(folder)
            # whoever had the folder may have removed it meanwhile
            with contextlib.suppress(FileNotFoundError):
                lock.acquire()
                break
    except Timeout as error:
        raise ValueError(
            f"{folder} is in use by another command. Wait until it ends, or choose another "
            "output_dir."
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield lock.is_locked
    finally:
        # before the release: after it, the file may be the lock of another command
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()
        with contextlib.suppress(OSError):
            for place in made:
                place.rmdir()


def refuse_links(folder: Path, names: Collection[str]):
    """Refuse links where a command writes: they lead to files outside of the folder.

    Args:
        folder: Folder that a command writes to.
        names: Names of the files and folders in it that the command may write.

    Raises:
        ValueError: If one of them, or something inside of one, is a link; says which.
    """
    for name in names:
        path = folder / name
        inside = (
            Path(parent, it) for parent, *them in os.walk(path) for part in them for it in part
        )
        for found in (path, *inside):
            if found.is_symlink():
                raise ValueError(
                    f"{found} is a link to {os.readlink(found)}, and commands write only to the "
                    f"files of {folder} itself. Replace the link by what it leads to."
                )


def make_folder(folder: Path) -> list[Path]:
    """Make a folder, with its parents, that is still there after a power loss.

    Args:
        folder: Folder; nothing happens if it exists.

    Returns:
        The folders that were made, each before its parent.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        to_disk(place.parent)
    return missing


def unfinished_path(path: Path) -> Path:
    """Return a new hidden name beside a file or folder, to write to before it takes its place.

    Args:
        path: File or folder that is to be written.

    Returns:
        Path in the same folder. Commands that were killed leave such files; `hold_run` and the next
        save remove them.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is as before, or whole, after a kill or a power loss.

    Args:
        path: File; its folder exists. A link is replaced, not followed.
        content: All that the file holds; text is written in UTF-8.
    """
    unfinished = unfinished_path(path)
    try:
        with unfinished.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    to_disk(path.parent)


@contextlib.contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """Give a folder to write to; all of its files go to `folder` if nothing was raised, or none.

    A new or empty folder gets all of them in one step. Otherwise each file takes the place of the
    one of its name, the weights last.

    Args:
        folder: Folder of the result; made if it does not exist.

    Yields:
        An empty folder.

    Raises:
        ValueError: If another command has written to a new or empty folder meanwhile.
        OSError: If the disk is full; says how much is free.
    """
    folder = Path(folder).resolve()
    is_one_step = not folder.exists() or not (any(folder.iterdir()) or os.path.ismount(folder))
    place = folder.parent if is_one_step else folder
    make_folder(place)
    unfinished = unfinished_path(place / folder.name)
    unfinished.mkdir()
    try:
        yield unfinished
        all_to_disk(unfinished)
        if is_one_step:
            _take_place(unfinished, folder)
        else:
            _move_files(unfinished, folder)
    except Exception as error:
        # some libraries say it with an error of their own
        is_full = getattr(error, "errno", None) in DISK_FULL or "No space left" in str(error)
        if not is_full:
            raise
        raise OSError(
            f"{folder} cannot be written with {free_space(place)}, and no unfinished file was "
            f"left: {' '.join(str(error).split())}"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _take_place(unfinished: Path, folder: Path):
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        unfinished.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise ValueError(
            f"{folder} must be new or empty, and another command has written to it meanwhile. "
            "Choose another folder."
        ) from error
    to_disk(folder.parent)


def _move_files(unfinished: Path, folder: Path):
    # the weights come last: without them the folder does not load
    files = [path for path in unfinished.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.suffix == ".safetensors"):
        target = folder / path.relative_to(unfinished)
        make_folder(target.parent)
        path.replace(target)
        # the order on the disk is the order here
        to_disk(target.parent)
    shutil.rmtree(unfinished)


def remove(path: Path):
    """Remove a file, a link or a folder with all that is in it, as far as it can be removed.

    Args:
        path: What to remove.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def to_disk(path: Path):
    """Have a file or the entries of a folder on the disk, where a power loss leaves them.

    Args:
        path: File or folder.
    """
    # Windows has no descriptors of folders, and flushes only files that are open for writing
    is_windows = os.name == "nt"
    if is_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def all_to_disk(folder: Path):
    """Have a folder, and all files and folders in it, on the disk.

    Args:
        folder: Folder.
    """
    with ThreadPoolExecutor() as threads:
        list(threads.map(to_disk, (*folder.rglob("*"), folder)))


def free_space(folder: Path) -> str:
    """Return how much can still be written, in words.

    Args:
        folder: Folder to write to; it may not exist yet.

    Returns:
        Number of kB.
    """
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free // 1000:,} kB free"
