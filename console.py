"""What every command of the package does alike: where it writes, and how it fails."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

# what a user can do about code that is not trusted
TRUST = "Read this code, then set trust_remote_code=True (--trust_remote_code) to run it."
# what a shell says of a command that a signal ended, beyond the number of the signal
EXIT_SIGNAL = 128


class Interrupted(KeyboardInterrupt):
    """A signal has asked the command to end.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def run_command(command: Callable[[], int | None], logs: bool = True) -> int:
    """Run a command; what goes wrong by what it was given becomes one sentence on stderr.

    Args:
        command: Does the work, and returns its exit status or nothing.
        logs: Whether it logs; one that does not need not wait for the library.

    Returns:
        The exit status: the command's own, 1 after a sentence, 128 and the number of the signal
        where one stopped it.
    """
    if logs:
        _log_to_stderr()
    try:
        try:
            return command() or 0
        finally:
            _flush_output()
    except KeyboardInterrupt as error:
        return EXIT_SIGNAL + getattr(error, "number", signal.SIGINT)
    except BrokenPipeError:
        # whoever read the output has had enough of it
        return 0
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        if not _is_said_by_another():
            sys.stderr.write(f"error: {sentence}\n")
        return 1


def _flush_output():
    """Find out now that output cannot be written; Python would say so as the process ends."""
    # of a process that was started with a closed one there is none
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        # nor is it tried again at the end
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise


def _is_said_by_another() -> bool:
    """Whether the first process of this machine was started in the same way and says the same."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return False
    from torch import distributed

    # once they have met, each may have an error of its own
    return not (distributed.is_available() and distributed.is_initialized())


def _log_to_stderr():
    from transformers.utils import logging as library_logging

    # a bar for each file that is loaded or saved would tear those of the commands
    library_logging.disable_progress_bar()
    logger = logging.getLogger("vanilla_transformer")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def empty_folder(path: str | Path) -> Path:
    """A folder to write into, where nothing can be lost.

    Args:
        path: Where it is, or is to be.

    Returns:
        The same.

    Raises:
        ValueError: If something is there already.
    """
    folder = Path(path)
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise ValueError(f"OUT must be a new or an empty folder, got {folder}.")
    return folder


def add_trust_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup):
    """Add the flag that lets a command run the code of a model class.

    Args:
        parser: Parser of the command, or a group of its flags.
    """
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        # also where a parser leaves out flags that are not given
        default=False,
        help="run the Python code that is saved with the model; read it first",
    )


def refuse_code(file: str | Path, code: str, remedy: str = TRUST) -> NoReturn:
    """Refuse to run the code that a file names.

    Args:
        file: File that names the code.
        code: Code that the file names.
        remedy: Sentence that says what to do.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{file} names code to run, {code}. {remedy}")


def sentence_of(error: Exception) -> str | None:
    """What an error says to the user.

    Args:
        error: What was raised.

    Returns:
        One sentence; None for an error that is a defect of the program.
    """
    from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError
    from safetensors import SafetensorError

    # the library wraps the sentence that matters; a type that is wrong it says itself
    if isinstance(error, StrictDataclassError) and isinstance(error.__cause__, ValueError):
        error = error.__cause__
    # the base of the Hub's errors is that of its HTTP client, whichever that is; safetensors has an
    # error of its own for a file that cannot be read or written
    expected = (ValueError, OSError, FloatingPointError, MemoryError, SafetensorError)
    expected += (HfHubHTTPError.__bases__[0], StrictDataclassError)
    return " ".join(str(error).split()) if isinstance(error, expected) else None
