"""Command line: `accelerate launch -m vanilla_transformer.train RECIPE --field value ...`."""

import os
import sys
from functools import partial

from ..console import EXIT_SIGNAL, fast_imports, print_line, run_command
from .recipe import MEASURED_PREVIEW, parse_arguments


def run(argv: list[str], prog: str = "vanilla_transformer.train") -> int:
    """Train with the settings of a command line.

    Args:
        argv: Command-line arguments.
        prog: Name of the command in the help text.

    Returns:
        0 if the run is finished; 128 plus the number of the signal that stopped it.

    Raises:
        ValueError: If a flag is unknown. Further errors are those of `loop.train`.
    """
    config, switches = parse_arguments(argv, prog)
    # a wrong setting is refused before the slow imports of the training libraries
    if switches.dry_run:
        with fast_imports():
            from .dry_run import describe

        text = describe(config, switches.recipe)
        if switches.dry_run == MEASURED_PREVIEW:
            with fast_imports():
                from .measuring import measure

            text += f"\n\n{measure(config)}"
        # only the main process prints
        if os.environ.get("RANK", "0") == "0":
            print_line(text)
        return 0
    with fast_imports():
        from .loop import train_until_signal

    signal_number = train_until_signal(config, resume=switches.resume)
    return 0 if signal_number is None else EXIT_SIGNAL + signal_number


# shows an error as one sentence, and returns the exit status: 0, 1 after an error, or 128 plus the
# number of the signal that stopped the run
main = partial(run_command, run)


if __name__ == "__main__":
    sys.exit(main())
