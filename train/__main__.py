"""`accelerate launch -m vanilla_transformer.train RECIPE --field value ...`."""

import sys

from ..console import EXIT_SIGNAL, run_command
from .recipe import parse_arguments


def run(argv: list[str], prog: str = "vanilla_transformer.train") -> int:
    """Train as a command line says.

    Args:
        argv: The arguments.
        prog: Name of the command, for its help.

    Returns:
        0 if the run is finished; 128 and the number of the signal that asked it to end.

    Raises:
        ValueError: If a setting, the data or the folder does not fit.
        FloatingPointError: If the loss stays infinite or not a number.
        OSError: If a file cannot be written.
    """
    config, switches = parse_arguments(argv, prog)
    # the libraries of training are not needed to refuse a setting
    if switches.dry_run:
        from .dry_run import describe

        sys.stdout.write(describe(config, switches.recipe) + "\n")
        return 0
    from .loop import train_until_asked

    number = train_until_asked(config, resume=switches.resume)
    return 0 if number is None else EXIT_SIGNAL + number


def main(argv: list[str] | None = None) -> int:
    """Train, and turn what goes wrong into one sentence.

    Args:
        argv: The arguments; the process's own if not given.

    Returns:
        0 if the run is finished, 1 if it was refused, 128 and the number of the signal that asked
        it to end.
    """
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
