"""Start processes with the package imported already, for tests that start hundreds."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

# forkserver, not fork: torch's threads in this process would not survive a fork
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["vanilla_transformer.cli", "vanilla_transformer.train.loop"])


def begin(work: Callable[..., Any], *arguments: Any, said: str = os.devnull):
    """Start a process in its own process group, with its output in a file."""
    process = CONTEXT.Process(target=_run, args=(said, work, arguments))
    process.start()
    return process


def _run(said, work, arguments):
    os.setsid()
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.exit(work(*arguments))
