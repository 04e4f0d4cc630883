"""The trained model that a study measures: the flag `--model`, its default, and loading."""

import argparse
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..console import add_trust_flag
from ..loading import load_run
from ..records import read_text

DEMO_RUN = "runs/demo"
# the folder to which `make model` writes its trained model, with weights in float16
EVERYDAY_MODEL = "runs/everyday-fp16"


def add_model_flag(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    default: str | None = DEMO_RUN,
    help_without_default: str = "by default no trained model",
) -> None:
    """Add the flag `--model` to the flags of a study.

    Args:
        parser: Parser of the study, or a group of its flags.
        default: Model to use without the flag; None for no model.
        help_without_default: Help text for the case that there is no default model.
    """
    parser.add_argument(
        "--model",
        metavar="RUN",
        default=default,
        help="run folder, model folder or Hub name"
        + (" (default: %(default)s)" if default else f"; {help_without_default}"),
    )
    add_trust_flag(parser)


def add_optional_model_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--model`, whose default is the demo's model if it exists, or else no model.

    Args:
        parser: Parser of the study.
    """
    default = DEMO_RUN if Path(DEMO_RUN).is_dir() else None
    add_model_flag(parser, default, help_without_default=f"by default {DEMO_RUN} if it exists")


def explainer_model() -> str:
    """Return the default model of the explainer page.

    Returns:
        Folder of the model for everyday sentences if it exists, or else the run folder of the demo.
    """
    return EVERYDAY_MODEL if Path(EVERYDAY_MODEL).is_dir() else DEMO_RUN


def load_trained(
    run: str, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model of a study.

    Args:
        run: Run folder, model folder or Hub name.
        trust_remote_code: Whether to run Python code that is saved with the model.

    Returns:
        The model, in evaluation mode and on the CUDA GPU if there is one, and its tokenizer.

    Raises:
        ValueError: If the model cannot be loaded, or the demo's model has not been trained.
    """
    # check this here, because `load_run` looks for a missing folder as a name on the Hub
    if run == DEMO_RUN and not Path(run).is_dir():
        raise ValueError(
            f"model must be a trained model, got none in {run}: `make demo` trains one, "
            "or choose another one with --model."
        )
    model, tokenizer = load_run(run, trust_remote_code)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def saved_translations(run: str) -> list[tuple[str, str]]:
    """Read the translations of the test split that `evaluate` saved in a run folder.

    Args:
        run: Run folder.

    Returns:
        Sentences with their translations, without empty ones; none if `evaluate` has saved none.

    Raises:
        ValueError: If a file cannot be read.
    """
    folder = Path(run) / "hypotheses"
    files = [folder / f"test.{side}.txt" for side in ("source", "translation")]
    if not all(file.is_file() for file in files):
        return []
    sources, translations = (read_text(file).split("\n")[:-1] for file in files)
    pairs = zip(sources, translations, strict=True)
    return [pair for pair in pairs if all(text.strip() for text in pair)]
