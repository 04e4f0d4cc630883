"""Read files of fairseq, OpenNMT-py and JoeyNMT: checkpoints, without running code, and text."""

import argparse
import errno
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..console import LONGEST_VALUE, shortened
from ..loading import foreign_advice
from ..records import refuse_lfs_pointer
from ..weight_checks import UNREADABLE, check_stored

# special tokens of fairseq and OpenNMT-py, without padding
NAMED_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
# advice for checkpoints whose vocabulary is stored in classes
OLD_OPENNMT = (
    " Convert a checkpoint of OpenNMT-py 2 first, with tools/convertv2_v3.py of the repository of "
    "OpenNMT-py 3."
)
# entry with the weights of the model, and the toolkits whose checkpoints have it
TOOLKITS = {"model": "fairseq or OpenNMT-py", "model_state": "JoeyNMT"}


def read_checkpoint(path: str | Path, weights_entry: str = "model") -> dict[str, Any]:
    """Read a checkpoint without running code that the file may contain.

    Args:
        path: File that torch wrote.
        weights_entry: Name of the entry with the weights of the model.

    Returns:
        The content. Beside tensors and plain values, only `argparse.Namespace` is allowed, a class
        for training settings.

    Raises:
        ValueError: If the file is not a checkpoint, needs another class, or stores fewer elements
            of a tensor than its shape needs.
        OSError: If the file cannot be read.
    """
    if not Path(path).is_file():
        what_exists = "a folder" if Path(path).is_dir() else "no such file"
        raise ValueError(
            f"a checkpoint must be a file, got {what_exists}: {path}.{foreign_advice(path)}"
        )
    refuse_lfs_pointer(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            # mmap fails for a compressed archive, which could be far larger in memory than on disk
            checkpoint = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    # torch reads a file named .safetensors too
    except (*UNREADABLE, SafetensorError, OSError) as error:
        # EINVAL means that torch read beyond the end of a truncated file: report it as unreadable
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        # quote only the class: torch's message explains how to load the file in spite of the risk
        needed_class = re.search(r"GLOBAL (\S+)", str(error))
        is_old = needed_class and needed_class[1].startswith(("onmt.", "torchtext."))
        raise ValueError(
            f"{path} must be a checkpoint of tensors and settings alone, which runs no code, got "
            + (
                f"one that needs {needed_class.group(1)}.{OLD_OPENNMT if is_old else ''}"
                if needed_class
                else f"a file that torch cannot read.{foreign_advice(path)}"
            )
        ) from error
    entries = checkpoint if isinstance(checkpoint, dict) else {type(checkpoint).__name__: None}
    if not isinstance(entries.get(weights_entry), dict):
        other_toolkits = (name for entry, name in TOOLKITS.items() if entry in entries)
        advice = "".join(f" This may be a checkpoint of {name}." for name in other_toolkits)
        raise ValueError(
            f"{path} must be a checkpoint of {TOOLKITS[weights_entry]}, with the entry "
            f"'{weights_entry}', got {shortened(', '.join(map(str, entries)), LONGEST_VALUE)}."
            f"{advice or foreign_advice(path)}"
        )
    # a model that was saved inside DistributedDataParallel has this prefix
    checkpoint[weights_entry] = {
        str(name).removeprefix("module."): tensor
        for name, tensor in checkpoint[weights_entry].items()
    }
    # OpenNMT-py stores the output projection under its own key
    for key in (weights_entry, "generator"):
        weights = checkpoint.get(key)
        for name, tensor in weights.items() if isinstance(weights, dict) else ():
            check_stored(tensor, name, path)
    return checkpoint


def settings_of(value: Any) -> dict[str, Any] | None:
    """Return training settings as a mapping.

    Args:
        value: Settings from a checkpoint.

    Returns:
        The settings by name; None if the value is neither a dict nor an `argparse.Namespace`.
    """
    if isinstance(value, argparse.Namespace):
        return vars(value)
    return value if isinstance(value, dict) else None


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file.

    Args:
        path: File.

    Returns:
        The lines, without line ends.

    Raises:
        ValueError: If the file is not UTF-8.
        OSError: If the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8, got other bytes: {error}.") from error
    # `splitlines` would also split at the other line separators of Unicode, which may be tokens
    return text.removesuffix("\n").split("\n") if text else []


def token_tokenizer(
    tokens: list[str], special_tokens: dict[str, str], adds_eos: bool
) -> PreTrainedTokenizerFast:
    """Build a tokenizer for tokenized text, which has spaces between the tokens.

    Args:
        tokens: Tokens in the order of their ids.
        special_tokens: Special tokens by their names in transformers, such as `unk_token`.
        adds_eos: Whether the tokenizer adds the end token to every text.

    Returns:
        The tokenizer; decoded text also has spaces between the tokens.
    """
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=special_tokens["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_eos:
        add_end_token(backend, special_tokens["eos_token"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)


def add_end_token(backend: Tokenizer, eos_token: str):
    """Let a tokenizer add the end token to every text.

    Args:
        backend: Tokenizer with the end token in its vocabulary.
        eos_token: End token.
    """
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", eos_token], special_tokens=[(eos_token, backend.token_to_id(eos_token))]
    )
