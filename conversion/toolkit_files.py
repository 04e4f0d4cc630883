"""What fairseq and OpenNMT-py keep in files: a checkpoint, read safely, and a list of tokens."""

import argparse
import errno
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..weight_checks import UNREADABLE, check_stored


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint without running code that it may hold.

    Args:
        path: A file that torch wrote.

    Returns:
        What is in it; the settings of a training as an `argparse.Namespace`, the one class allowed.

    Raises:
        ValueError: If it is no checkpoint, needs another class, or holds less of a tensor than its
            shape says.
        OSError: If it cannot be read.
    """
    if not Path(path).is_file():
        kind = "a folder" if Path(path).is_dir() else "no such file"
        raise ValueError(f"a checkpoint must be a file, got {kind}: {path}.")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            # from the file's own pages: a packed archive, larger than it looks, is not read
            checkpoint = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except (*UNREADABLE, OSError) as error:
        # of a file that was cut off, torch reads where nothing is
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        # torch says at length how to trust the file nevertheless
        needed = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{path} must be a checkpoint of tensors and settings alone, which runs no code, got "
            + (
                f"one that needs {needed.group(1)}."
                if needed
                else "a file that torch does not read."
            )
        ) from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), dict):
        raise ValueError(f"{path} must be a checkpoint with a model, got none in it.")
    # OpenNMT-py keeps the output projection apart
    for part in ("model", "generator"):
        weights = checkpoint.get(part)
        for name, tensor in weights.items() if isinstance(weights, dict) else ():
            check_stored(tensor, name, path)
    return checkpoint


def settings_of(value: Any) -> dict[str, Any] | None:
    """Settings as a mapping, in either form that they are saved in.

    Args:
        value: From a checkpoint.

    Returns:
        The settings by name; None for anything but a mapping or an `argparse.Namespace`.
    """
    if isinstance(value, argparse.Namespace):
        return vars(value)
    return value if isinstance(value, dict) else None


def read_lines(path: Path) -> list[str]:
    """The lines of a text file.

    Args:
        path: The file.

    Returns:
        Them, without their ends.

    Raises:
        ValueError: If it is not UTF-8.
        OSError: If it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8, got other bytes: {error}.") from error
    # a token may be one of the other characters that Unicode ends lines with
    return text.removesuffix("\n").split("\n") if text else []


def token_tokenizer(
    tokens: list[str], pad: str, bos: str, eos: str, unk: str, ends: bool
) -> PreTrainedTokenizerFast:
    """A tokenizer of texts that are cut into tokens already, with spaces between.

    Args:
        tokens: By id.
        pad: The token that fills up a batch.
        bos: The token that begins a sentence.
        eos: The token that ends a sentence.
        unk: The token for what is no token.
        ends: Whether the end token follows every text.

    Returns:
        The tokenizer, which also gives texts back as tokens.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=unk))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, ids[eos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk
    )


__all__ = ["read_checkpoint", "read_lines", "settings_of", "token_tokenizer"]
