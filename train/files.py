"""Files that are there whole, or as they were before."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text in such a way that whoever stops in between leaves the file as it was.

    Args:
        path: The file; its folder exists.
        text: All of it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8", newline="\n")
    unfinished.replace(path)
