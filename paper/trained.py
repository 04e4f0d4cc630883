"""The trained model that a study looks at."""

import argparse
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..console import add_trust_flag
from ..train.translate import load_model

DEMO = "runs/demo"


def add_model_flag(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, default: str | None = DEMO
) -> None:
    """Add the flag that chooses a model to a study.

    Args:
        parser: Parser of the study, or a group of its flags.
        default: Model to use without the flag; None if the study needs no model.
    """
    parser.add_argument(
        "--model",
        metavar="RUN",
        default=default,
        help="a run folder, model folder or Hub name"
        + (" (%(default)s)" if default else "; no trained model if not given"),
    )
    add_trust_flag(parser)


def load_trained(
    run: str, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that the flags of a study name.

    Args:
        run: A run folder, a model folder or a Hub name.
        trust_remote_code: Run the Python code that is saved with the model.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        ValueError: If it cannot be loaded.
    """
    # a folder that is not there would be looked for on the Hub
    if run == DEMO and not Path(run).is_dir():
        raise ValueError(
            f"model must be a trained model, got none in {run}: `make demo` trains one, "
            "or --model names another."
        )
    return load_model(run, trust_remote_code=trust_remote_code)
