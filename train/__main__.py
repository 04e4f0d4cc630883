"""`accelerate launch -m vanilla_transformer.train RECIPE --field value ...`."""

import logging
import sys

from vanilla_transformer.train.config import parse_arguments


def main(argv: list[str] | None = None, prog: str = "vanilla_transformer.train") -> int:
    """Train as a command line says.

    Args:
        argv: The arguments; the process's own if not given.
        prog: Name of the command, for its help.

    Returns:
        0 if the run is finished, 1 if it was refused, 143 if it was asked to end before.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
    try:
        config, switches = parse_arguments(sys.argv[1:] if argv is None else argv, prog)
        # the libraries of training are not needed to refuse a setting
        from transformers.utils import logging as library_logging

        from vanilla_transformer.train.loop import describe, train

        # a bar for each save would tear that of the training
        library_logging.disable_progress_bar()
        if switches.dry_run:
            sys.stdout.write(describe(config) + "\n")
            return 0
        return 0 if train(config, resume=switches.resume) else 143
    except (ValueError, OSError, FloatingPointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
