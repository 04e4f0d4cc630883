"""Write and read `environment.txt`, the environment of a run."""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...atomic_files import write_atomically
from ...console import shown
from ...records import read_text

LIBRARIES = (
    "vanilla_transformer",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "safetensors",
    "sacrebleu",
    "sacremoses",
)
ENVIRONMENT_FILE = "environment.txt"


def environment_facts() -> dict[str, Any]:
    """Collect facts about this process and its machine.

    Returns:
        Command, machine, library versions and commit, by name.
    """
    return {
        # keep the command on one line: a line feed in an argument becomes $'\n', which a shell
        # reads as a line feed
        "command": shlex.join([*_program_words(), *sys.argv[1:]]).replace("\n", "'$'\\n''"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        "gpus": ", ".join(
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        )
        or "none",
        **{name: _library_version(name) for name in LIBRARIES},
        "commit": _git_commit(),
    }


def write_environment(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the environment of a run to `environment.txt`; a resumed run appends to the file.

    Args:
        folder: Run folder.
        facts: Further facts to write, by name.
    """
    all_facts = {**environment_facts(), **facts}
    path = folder / ENVIRONMENT_FILE
    earlier_text = read_text(path) if path.exists() else ""
    start_block = "".join(f"{name}: {value}\n" for name, value in all_facts.items())
    write_atomically(path, f"{earlier_text}{start_block}\n")


def _program_words() -> list[str]:
    """Return the first words of the command line, the program, without its path on this machine."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is None:
        return [Path(sys.argv[0]).name]
    return ["python", "-m", module.name.removesuffix(".__main__")]


def _library_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    package_folder = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package_folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # an installed package can be inside the checkout of another project, whose commit says
        # nothing about this package
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package_folder.resolve():
            return "none"
        return git("rev-parse", "HEAD") + (" (dirty)" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"


def read_environment(folder: Path) -> list[dict[str, str]]:
    """Read `environment.txt`.

    Args:
        folder: Run folder.

    Returns:
        Facts by name, for each start of the run.

    Raises:
        ValueError: If the file is not text, or a count such as `cpus` is not an integer.
    """
    path = folder / ENVIRONMENT_FILE
    blocks = read_text(path).replace("\r\n", "\n").split("\n\n") if path.exists() else []
    starts = [
        dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        for block in blocks
        if block.strip()
    ]
    for start in starts:
        for name in ("cpus", "threads_per_process", "processes"):
            if not re.fullmatch("[0-9]{1,9}", start.get(name, "0")):
                raise ValueError(f"{path}: {name} must be an integer, got {shown(start[name])}.")
    return starts
