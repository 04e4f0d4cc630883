"""Write files and folders atomically, and lock folders for one command at a time."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

LOCK_FILE = ".lock"
# error numbers: disk full, quota exceeded, file larger than the file system allows
DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", None), errno.EFBIG)
# texts that identify the error of a full disk if the library gives no error number: the first ones
# are from Rust, the next two from torch's writer, and the last one from the C++ streams of torch
DISK_FULL_TEXTS = (
    "No space left",
    *(f"(os error {number})" for number in DISK_FULL),
    "PytorchStreamWriter",
    "inline_container.cc",
    "iostream error",
)
# error numbers: permission denied, operation not permitted, read-only file system
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
# error numbers: a file is where a folder must be, a link leads nowhere or to itself
NO_FOLDER = (errno.ENOTDIR, errno.EEXIST, errno.ELOOP)
# error numbers of network file systems that do not support locks
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextlib.contextmanager
def _naming(path: Path, numbers: Collection[int | None] = NOT_ALLOWED) -> Iterator[None]:
    """Name the final path, not that of an unfinished file or a lock, if it cannot be written.

    An error without `strerror` has been raised by this function, and is not changed.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in numbers or error.strerror is None:
            raise
        space_text = f" ({free_space(path.parent)})" if error.errno in DISK_FULL else ""
        named_error = OSError(f"{path} cannot be written{space_text}: {error.strerror}.")
        # callers recognize a full disk by this number
        named_error.errno = error.errno
        raise named_error from error


@contextlib.contextmanager
def locked_folder(folder: Path, seconds: float = 0.0) -> Iterator[bool]:
    """Lock a folder against other commands of this package within a `with` block.

    The operating system releases the lock when the process ends, even if the process is killed. On
    a file system without locks, nothing is locked.

    Args:
        folder: Folder to write to; created with its parents if it does not exist. Created folders
            that are still empty at the end are removed.
        seconds: Time to wait for another command that holds the lock.

    Yields:
        Whether the folder is locked; False on a file system without locks.

    Raises:
        ValueError: If another command holds the lock, or the path is a file or below one.
        OSError: If the folder cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir must be a folder, got the file {folder}.")
    created_folders: list[Path] = []
    lock_path = folder / LOCK_FILE
    lock = FileLock(lock_path, timeout=seconds, fallback_to_soft=False, thread_local=False)
    try:
        while True:
            with _naming(folder):
                created_folders += make_folder(folder)
            # the previous holder may have removed the folder in the meantime
            with contextlib.suppress(FileNotFoundError), _naming(folder):
                lock.acquire()
                break
    except Timeout as error:
        raise ValueError(
            f"{folder} is in use by another command. Wait until it ends, or choose another "
            "output_dir."
        ) from error
    except OSError as error:
        if error.errno in NO_FOLDER:
            raise ValueError(
                f"output_dir must be a folder that can be made, got {folder}: {error.strerror}."
            ) from error
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield lock.is_locked
    finally:
        # unlink before the release: after the release, the file may be the lock of another command
        with contextlib.suppress(OSError):
            lock_path.unlink()
        lock.release()
        with contextlib.suppress(OSError):
            for created_folder in created_folders:
                created_folder.rmdir()


def refuse_links(folder: Path, names: Iterable[str], is_recursive: bool = True):
    """Refuse symbolic links among the files that a command writes: they may leave the folder.

    Args:
        folder: Folder that a command writes to.
        names: Names of the files and folders in `folder` that the command may write.
        is_recursive: Whether to refuse links inside of these folders too.

    Raises:
        ValueError: If one of these files and folders, or anything inside, is a symbolic link; the
            message names the link.
    """
    for name in names:
        path = folder / name
        inner_paths = (
            Path(parent, inner_name)
            for parent, *names_by_kind in (os.walk(path) if is_recursive else ())
            for names_of_kind in names_by_kind
            for inner_name in names_of_kind
        )
        for link in (path, *inner_paths):
            if link.is_symlink():
                raise ValueError(
                    f"{link} is a link to {os.readlink(link)}, and commands write only to "
                    f"the files of {folder} itself. Replace the link by its target."
                )


def make_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents durably, so that they survive a power loss.

    Args:
        folder: Folder to create; nothing happens if it exists.

    Returns:
        The folders that were created, each before its parent.
    """
    missing_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing_folders:
        to_disk(path.parent)
    return missing_folders


def unfinished_path(path: Path) -> Path:
    """Return a temporary hidden path in the same folder, to be renamed to the final one.

    Args:
        path: Final path of the file or folder.

    Returns:
        The temporary path. A killed command leaves such files behind; `lock_run_folder` and the
        next save remove them.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing, and move it to `path` at the end of a `with` block.

    A kill or a power loss leaves either the old or the new content. After an error, the old content
    remains, and the temporary file is removed.

    Args:
        path: File in an existing folder. A symbolic link is replaced, not followed.

    Yields:
        The temporary file, open for writing bytes.

    Raises:
        OSError: If the file cannot be written; names `path`, and the free space on a full disk.
    """
    unfinished_file = unfinished_path(path)
    with _naming(path, DISK_FULL):
        try:
            with _naming(path):
                file = unfinished_file.open("xb")
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished_file.replace(path)
        except BaseException:
            unfinished_file.unlink(missing_ok=True)
            raise
        to_disk(path.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a kill or a power loss leaves either its old or its new content.

    Args:
        path: File in an existing folder. A symbolic link is replaced, not followed.
        content: Whole content of the file; text is written in UTF-8.
    """
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """Collect files in a temporary folder, and move all of them to `folder` at the end.

    After an error, no file is moved. If `folder` is new or empty, all files appear in one step,
    because the temporary folder is renamed. Otherwise each file replaces the file of the same name,
    the weights last.

    Args:
        folder: Final folder; created if it does not exist.

    Yields:
        The temporary folder, empty.

    Raises:
        ValueError: If another command writes to the new or empty folder in the meantime.
        OSError: If the disk is full; the message states the free space.
    """
    folder = Path(folder).resolve()
    is_one_step = not folder.exists() or not (any(folder.iterdir()) or os.path.ismount(folder))
    parent = folder.parent if is_one_step else folder
    unfinished_folder = unfinished_path(parent / folder.name)
    with _naming(folder):
        make_folder(parent)
        unfinished_folder.mkdir()
    try:
        yield unfinished_folder
        finish_all(unfinished_folder)
        if is_one_step:
            _rename_folder(unfinished_folder, folder)
        else:
            _move_files(unfinished_folder, folder)
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise OSError(
            f"{folder} cannot be written ({free_space(parent)}), and all unfinished files were "
            f"removed: {' '.join(str(error).split())}"
        ) from error
    finally:
        shutil.rmtree(unfinished_folder, ignore_errors=True)


def is_disk_full(error: Exception) -> bool:
    """Return whether an error means that the disk is full.

    Args:
        error: Error of the operating system, or of a library that writes a file.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in DISK_FULL
    return any(text in str(error) for text in DISK_FULL_TEXTS)


def _rename_folder(unfinished_folder: Path, folder: Path):
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        unfinished_folder.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise ValueError(
            f"{folder} must be new or empty, but another command has written to it in the "
            "meantime. Choose another folder."
        ) from error
    to_disk(folder.parent)


def _move_files(unfinished_folder: Path, folder: Path):
    # weights last: a folder without weights does not load, so no half-written model loads
    files = [path for path in unfinished_folder.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.suffix == ".safetensors"):
        target = folder / path.relative_to(unfinished_folder)
        make_folder(target.parent)
        path.replace(target)
        # flush after each file, so that the disk keeps this order after a power loss
        to_disk(target.parent)
    shutil.rmtree(unfinished_folder)


def remove(path: Path):
    """Remove a file, a link or a whole folder; ignore files that cannot be removed.

    Args:
        path: File, link or folder.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def to_disk(path: Path):
    """Flush a file or the entries of a folder to the disk, so that they survive a power loss.

    Args:
        path: File or folder.
    """
    # Windows cannot open a folder, and flushes only files that are open for writing
    is_windows = os.name == "nt"
    if is_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finish(path: Path):
    """Flush a file or the entries of a folder to the disk; give a file the usual permissions.

    safetensors gives only the owner permission to read a file.

    Args:
        path: File in a folder of its own that the command has just created, or folder.
    """
    if path.is_file():
        # those of the folder, which are limited by the umask; `os.umask` is not safe with threads
        path.chmod(path.parent.stat().st_mode & 0o666)
    to_disk(path)


def finish_all(folder: Path):
    """Flush a folder, with all files and folders in it, to the disk, with the usual permissions.

    Args:
        folder: Folder that the command has just created.
    """
    with ThreadPoolExecutor() as threads:
        list(threads.map(finish, (*folder.rglob("*"), folder)))


def free_space(folder: Path) -> str:
    """Return the free space on the disk of a folder, for messages.

    Args:
        folder: Folder to write to; it need not exist yet.

    Returns:
        Text such as "1,234 kB free".
    """
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free // 1000:,} kB free"
