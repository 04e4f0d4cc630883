"""Files that are there whole, or as they were before."""

import os
from pathlib import Path


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
