"""Run a command: write logs to stderr, report an error as one sentence, return an exit status."""

import argparse
import atexit
import contextlib
import gc
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

# advice for code that is not trusted
TRUST = "Read this code, then set trust_remote_code=True (--trust_remote_code) to run it."
# exit status of a command that a signal ended, as in a shell: this plus the number of the signal
EXIT_SIGNAL = 128
# flag of every command: print the traceback of an error
TRACEBACK = "--traceback"
# maximum number of characters of an error on stderr, and of a value in an error
LONGEST_ERROR, LONGEST_VALUE = 2000, 100
# names of the modules with users' models that `train --model_class` has loaded
CUSTOM_MODULES: set[str] = set()
# for each optional package, the extra of setup.cfg that installs the package
EXTRA_OF_PACKAGE = {
    **dict.fromkeys(("datasets", "pyarrow", "sacrebleu", "sacremoses", "matplotlib"), "train"),
    **dict.fromkeys(("babel", "num2words"), "demo"),
    "gradio": "space",
    **dict.fromkeys(("fastapi", "uvicorn", "python_multipart"), "serve"),
    **dict.fromkeys(("sentencex", "srt"), "text"),
}


class Interrupted(KeyboardInterrupt):
    """Exception for a signal that asks the command to end.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def fast_imports() -> Iterator[None]:
    """Import modules without the garbage collector, which would take up to a fifth of the time.

    Imports create hundreds of thousands of objects, and hardly one of them is garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # move the new objects to the oldest generation, so that the next collection, of the
            # youngest generation, does not read them. Objects that a program has frozen stay frozen
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def run_command(
    command: Callable[[list[str]], int | None], argv: list[str] | None = None, logs: bool = True
) -> int:
    """Run a command; show an error as one sentence on stderr, or a traceback with `--traceback`.

    Args:
        command: Function that takes the arguments without `--traceback`, and returns its exit
            status or None.
        argv: Command-line arguments; those of the process if not given.
        logs: Whether to set up logging first. This imports transformers, which takes time.

    Returns:
        The exit status: the command's own, 1 after an error, 128 plus the number of the signal
        after a signal.
    """
    atexit.register(_freeze_objects)
    all_arguments = sys.argv[1:] if argv is None else argv
    arguments = [argument for argument in all_arguments if argument != TRACEBACK]
    _write_utf_8()
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
        # the reader of the output has closed the pipe, as `head` does, which is not an error
        return 0
    except (SystemExit, GeneratorExit):
        raise
    # a panic of a Rust library is a BaseException, not an Exception
    except BaseException as error:
        _close_progress_bars()
        if TRACEBACK in all_arguments:
            raise
        if location := _location_in_custom_code(error):
            error.add_note(f"in {location}")
        if not _is_reported_by_first_process():
            sys.stderr.write(f"error: {sentence_of(error) or _unexpected_sentence(error)}\n")
        return 1


def _freeze_objects():
    """Exclude all objects from the garbage collection at the exit, which would take seconds."""
    # extension modules that are made with nanobind, such as Triton's, expect that all of their
    # objects are freed at the exit, and print a list of those that are not
    if not any(metaclass.__module__ == "nanobind" for metaclass in type.__subclasses__(type)):
        gc.freeze()


def _write_utf_8():
    """Set stdout to UTF-8 with line feeds in every locale, as for all files and stdin."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")


def _close_progress_bars():
    """Close the open progress bars, so that the error begins on a new line."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(tqdm.tqdm._instances) if tqdm else ():
        bar.close()


def _location_in_custom_code(error: BaseException) -> str | None:
    """Return file and line of a user's model that raised an exception, or called what raised it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if error.__cause__ is not None:
        frames += traceback.walk_tb(error.__cause__.__traceback__)
    for frame, line in reversed(frames):
        module = frame.f_globals.get("__name__") or ""
        if module in CUSTOM_MODULES or module.startswith("transformers_modules."):
            return f"{frame.f_code.co_filename}, line {line}"
    return None


def _unexpected_sentence(error: BaseException) -> str:
    name = type(error).__name__
    # several modules, such as re and zlib, call their exception just "error"
    if name == "error":
        name = f"{type(error).__module__}.error"
    sentence = _with_notes(error, f"{name}: {error}" if str(error) else name)
    # the message of a syntax error names the file
    if _location_in_custom_code(error) is not None or isinstance(error, SyntaxError):
        return sentence
    return (
        f"unexpected {sentence.removesuffix('.')}. This is a bug in vanilla_transformer, or an "
        f"unsupported file. Run the command with {TRACEBACK} for details."
    )


def _flush_output():
    """Flush stdout, so that a write error is raised here and not when the interpreter exits."""
    # Python sets stdout to None if the process was started without it
    if sys.stdout is None:
        return
    try:
        with _naming_stdout():
            sys.stdout.flush()
    except OSError:
        # otherwise the interpreter flushes stdout again when it exits, and fails
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        os.close(null_device)
        raise


@contextlib.contextmanager
def _naming_stdout() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(f"stdout cannot be written: {error.strerror}.") from error


def print_line(line: object, flush: bool = False):
    """Print a line to stdout; an error names stdout.

    Args:
        line: Line or lines to print, without the last line feed.
        flush: Whether to flush the buffer of stdout after the line.

    Raises:
        OSError: If the line cannot be written.
    """
    with _naming_stdout():
        print(line, flush=flush)


def _is_reported_by_first_process() -> bool:
    """Return whether the first process of this machine reports the same error."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return False
    from torch import distributed

    # before the processes are connected, all of them run the same checks and fail with the same
    # error; afterwards one process may fail alone
    return not (distributed.is_available() and distributed.is_initialized())


def log_to_stderr():
    """Log the messages of the package to stderr, and hide transformers' progress bars."""
    from transformers.utils import logging as library_logging

    # transformers shows a bar for each file that it loads or saves, which would break the lines of
    # the commands' own bars
    library_logging.disable_progress_bar()
    logger = logging.getLogger("vanilla_transformer")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def require_nonempty_path(path: str | Path, name: str) -> Path:
    """Return the path of a folder; refuse an empty path, which would be the current folder.

    Args:
        path: Path of the folder.
        name: Name of the argument, for the error.

    Returns:
        The path.

    Raises:
        ValueError: If the path is empty, contains a NUL character, or begins with ~.
    """
    # Path("") is "."
    if not str(path).strip() or "\0" in str(path):
        raise ValueError(f"{name} must be the path of a folder, got {shown(str(path))}.")
    refuse_home_sign(path, name)
    return Path(path)


def refuse_home_sign(path: str | Path, name: str):
    """Refuse a path that begins with ~, which would be a folder with this name.

    Args:
        path: Path of a file or folder.
        name: Name of the argument or setting, for the error.

    Raises:
        ValueError: If the path begins with ~.
    """
    if Path(path).parts[:1] == ("~",):
        raise ValueError(
            f"{name} must be a path without ~, which only a shell replaces, and only at the "
            f"beginning of an argument, got {shown(str(path))}: write out the home folder."
        )


def require_empty_folder(path: str | Path, name: str = "OUT") -> Path:
    """Check that a path is a new or an empty folder, so that no file is overwritten.

    Args:
        path: Path of the folder.
        name: Name of the argument, for the error.

    Returns:
        The path.

    Raises:
        ValueError: If the path is a file, or a folder with files.
    """
    folder = require_nonempty_path(path, name)
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise ValueError(f"{name} must be a new or an empty folder, got {folder}.")
    return folder


def add_trust_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup):
    """Add `--trust_remote_code`, which allows a command to run the code of a model.

    Args:
        parser: Parser of the command, or a group of its flags.
    """
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        # explicit, because some parsers suppress the default of flags that are not given
        default=False,
        help="run the Python code that is saved with the model; read it first",
    )


def parse_flags(
    parser: argparse.ArgumentParser, argv: list[str], is_intermixed: bool = False
) -> argparse.Namespace:
    """Parse the arguments of a command.

    Args:
        parser: Parser of the command.
        argv: Command-line arguments.
        is_intermixed: Whether flags may stand between the positional arguments.

    Returns:
        The parsed arguments.

    Raises:
        ValueError: If an argument is unknown or empty; the message names the closest known flag.
    """
    parse = parser.parse_known_intermixed_args if is_intermixed else parser.parse_known_args
    arguments, unknown = parse(argv)
    refuse_unknown(parser, unknown)
    for action in parser._actions:
        value = getattr(arguments, action.dest, None)
        # such as the value of a shell variable that is not set
        is_empty = value == "" or (isinstance(value, list) and "" in value)
        if is_empty and value != action.default:
            name = action.option_strings[-1] if action.option_strings else action.metavar
            raise ValueError(f"{name} must not be empty, got ''.")
    return arguments


def refuse_unknown(parser: argparse.ArgumentParser, arguments: list[str]):
    """Refuse arguments that a parser did not recognize.

    Args:
        parser: Parser of the command.
        arguments: Arguments that the parser did not recognize, possibly none.

    Raises:
        ValueError: If there are such arguments; the message names the closest known flag.
    """
    if not arguments:
        return
    # this module is imported here, because it imports transformers, which `--help` does not need
    from .configuration_vanilla_transformer import closest_name

    parsers = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    flags = [flag for one_parser in parsers for flag in one_parser._option_string_actions]
    name = arguments[0].split("=")[0]
    raise ValueError(
        f"{name} is {'not a flag' if name.startswith('-') else 'one argument too many'}."
        f"{closest_name(name, flags)} `{parser.prog} --help` shows the usage."
    )


def refuse_code(file: str | Path, code: str, remedy: str = TRUST) -> NoReturn:
    """Refuse to run the code that a file refers to.

    Args:
        file: File that refers to the code.
        code: Description of the code.
        remedy: Sentence that says what the user can do.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{file} refers to custom code, {code}, which would be run. {remedy}")


@contextlib.contextmanager
def add_file_to_errors(file: str | Path) -> Iterator[None]:
    """Add the name of a file to an exception that is raised while the file is read.

    Args:
        file: File or folder. An exception that already names it or has a note is not changed.
    """
    try:
        yield
    except Exception as error:
        if not getattr(error, "__notes__", ()) and str(file) not in str(error):
            error.add_note(f"in {file}")
        raise


def shown(value: Any) -> str:
    """Return a value as text for an error message.

    Args:
        value: Value of a setting or of a file.

    Returns:
        The `repr` of the value, shortened.
    """
    return shortened(repr(value), LONGEST_VALUE)


def shortened(text: str, length: int) -> str:
    """Shorten a long text in its middle.

    Args:
        text: Any text.
        length: Largest number of characters.

    Returns:
        The text, with "..." for the part that was left out.
    """
    half = (length - 3) // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"


def sentence_of(error: BaseException) -> str | None:
    """Return the sentence that reports an error to the user.

    Args:
        error: Exception that was raised.

    Returns:
        One sentence, with the file that caused the error; None for an unexpected error, which is a
        bug.
    """
    from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError
    from safetensors import SafetensorError

    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        extra = EXTRA_OF_PACKAGE.get(package)
        return extra and (
            f"this command needs the package {package}, which is not installed: pip install "
            f"'vanilla_transformer[{extra}]', or in a clone '.[{extra}]'."
        )
    # `os.getcwd` names no file
    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_folder():
        return "the current folder does not exist any more: change to another folder."
    # huggingface_hub wraps the ValueError of a validator, so the cause is reported. Its own
    # messages about a wrong type are clear enough
    if isinstance(error, StrictDataclassError) and isinstance(error.__cause__, ValueError):
        error = error.__cause__
    # HfHubHTTPError derives from an error of requests or of httpx, depending on the version of
    # huggingface_hub. safetensors raises its own error if a file cannot be read or written
    expected: tuple[type, ...] = (ValueError, OSError, FloatingPointError, MemoryError)
    expected += (SafetensorError, HfHubHTTPError.__bases__[0], StrictDataclassError)
    return _with_notes(error, str(error)) if isinstance(error, expected) else None


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _with_notes(error: BaseException, sentence: str) -> str:
    sentence = shortened(" ".join(sentence.split()), LONGEST_ERROR)
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{sentence.removesuffix('.')} ({notes})." if notes else sentence
