"""What every command of the package does alike: where it writes, and how it fails."""

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

# what a user can do about code that is not trusted
TRUST = "Read this code, then set trust_remote_code=True (--trust_remote_code) to run it."
# what a shell says of a command that a signal ended, beyond the number of the signal
EXIT_SIGNAL = 128
# flag of every command
TRACEBACK = "--traceback"
# most characters of an error on stderr, and of a value in it
LONGEST_ERROR, LONGEST_VALUE = 2000, 100


class Interrupted(KeyboardInterrupt):
    """A signal has asked the command to end.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def run_command(
    command: Callable[[list[str]], int | None], argv: list[str] | None = None, logs: bool = True
) -> int:
    """Run a command; an error becomes one sentence on stderr, or a traceback with `--traceback`.

    Args:
        command: Function that takes the arguments without `--traceback`, does the work, and returns
            its exit status or nothing.
        argv: The arguments; the process's own if not given.
        logs: Whether it logs; one that does not need not wait for the library.

    Returns:
        The exit status: the command's own, 1 after a sentence, 128 and the number of the signal
        where one stopped it.
    """
    given = sys.argv[1:] if argv is None else argv
    arguments = [argument for argument in given if argument != TRACEBACK]
    if logs:
        log_to_stderr()
    try:
        try:
            return command(arguments) or 0
        finally:
            _flush_output()
    except KeyboardInterrupt as error:
        return EXIT_SIGNAL + getattr(error, "number", signal.SIGINT)
    except BrokenPipeError:
        # whoever read the output has had enough of it
        return 0
    except (SystemExit, GeneratorExit):
        raise
    # the panic of a library in Rust is no Exception
    except BaseException as error:
        _end_bars()
        if len(arguments) < len(given):
            raise
        if not _is_said_by_another():
            sys.stderr.write(f"error: {sentence_of(error) or _unexpected(error)}\n")
        return 1


def _end_bars():
    """End the progress bars that are still open: they have no end of line yet."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(tqdm.tqdm._instances) if tqdm else ():
        bar.close()


def _unexpected(error: BaseException) -> str:
    name = type(error).__name__
    sentence = _with_file(error, f"{name}: {error}" if str(error) else name)
    return (
        f"unexpected {sentence.removesuffix('.')}. This is a defect of vanilla_transformer, or a "
        f"file that it does not understand: {TRACEBACK} shows where."
    )


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


def log_to_stderr():
    """Write the messages of the package to stderr, and hide the library's progress bars."""
    from transformers.utils import logging as library_logging

    # a bar for each file that is loaded or saved would tear those of the commands
    library_logging.disable_progress_bar()
    logger = logging.getLogger("vanilla_transformer")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def a_folder(path: str | Path, name: str) -> Path:
    """Take the path of a folder, and refuse an empty one, which would be the folder of the process.

    Args:
        path: Path of the folder.
        name: Name of the argument, for the error.

    Returns:
        The path.

    Raises:
        ValueError: If it is empty, or can be no path.
    """
    # a path without parts is "."
    if not str(path).strip() or "\0" in str(path):
        raise ValueError(f"{name} must be the path of a folder, got {shown(str(path))}.")
    return Path(path)


def empty_folder(path: str | Path) -> Path:
    """A folder to write into, where nothing can be lost.

    Args:
        path: Where it is, or is to be.

    Returns:
        The same.

    Raises:
        ValueError: If something is there already.
    """
    folder = a_folder(path, "OUT")
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


@contextlib.contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Name a file in every error that arises while it is read.

    Args:
        file: File or folder; an error that names it already stays as it is.
    """
    try:
        yield
    except Exception as error:
        if not getattr(error, "__notes__", ()) and str(file) not in str(error):
            error.add_note(f"in {file}")
        raise


def shown(value: Any) -> str:
    """Return a value as an error shows it.

    Args:
        value: Value of a setting or of a file.

    Returns:
        Its `repr`, shortened.
    """
    return shortened(repr(value), LONGEST_VALUE)


def shortened(text: str, length: int) -> str:
    """Leave out the middle of a long text.

    Args:
        text: Any text.
        length: Number of characters that it may have.

    Returns:
        The text, with "..." for what was left out.
    """
    half = (length - 3) // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"


def sentence_of(error: BaseException) -> str | None:
    """What an error says to the user.

    Args:
        error: What was raised.

    Returns:
        One sentence, with the file where it arose; None for an error that is a defect of the
        program.
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
    return _with_file(error, str(error)) if isinstance(error, expected) else None


def _with_file(error: BaseException, sentence: str) -> str:
    sentence = shortened(" ".join(sentence.split()), LONGEST_ERROR)
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{sentence.removesuffix('.')} ({notes})." if notes else sentence
