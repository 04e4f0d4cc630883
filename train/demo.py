"""`make demo`: train on the built-in corpus, translate its test split, and score it."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil

from ..console import Interrupted, require_nonempty_path
from ..records import read_text
from .devices.distribution import num_usable_cores
from .ending import STARTER_VARIABLE, noticing_requests
from .evaluate import evaluate, score_table

SHOWN_SENTENCES = 12
COLUMN_WIDTH = 38


def run_demo(output_dir: str | Path = "runs/demo") -> str:
    """Train on the built-in corpus by `accelerate launch`, and evaluate on its test split.

    An interrupted run is resumed. A finished run is only evaluated.

    Args:
        output_dir: Run folder.

    Returns:
        Translations next to their references, scores, and a list of the files.

    Raises:
        ValueError: If training failed; the training has printed its error.
    """
    folder = require_nonempty_path(output_dir, "output_dir")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    command += ["--num_processes", "1", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["-m", "vanilla_transformer.train", "demo", "--output_dir", str(folder), "--resume"]
    # without this variable the launcher limits the process to one thread
    environment = {"OMP_NUM_THREADS": str(num_usable_cores()), **os.environ}
    environment[STARTER_VARIABLE] = str(os.getpid())
    status = _run_and_forward_signals(command, environment)
    if status:
        raise ValueError(
            f"The training failed with exit status {status}, so there is no model to evaluate."
        )
    # the evaluation runs in a single process, so it returns scores
    scores: Any = evaluate(folder)
    return "\n\n".join(
        [
            translation_table(folder / "hypotheses", "test", SHOWN_SENTENCES),
            score_table(scores),
            contents(folder),
        ]
    )


def _run_and_forward_signals(command: list[str], environment: dict[str, str]) -> int:
    """Run the training, and forward signals that ask this command to end."""
    with noticing_requests(prints_requests=False) as requests, requests.deferred():
        launcher = subprocess.Popen(command, env=environment)
        is_forwarded = False
        while True:
            try:
                status = launcher.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                number = requests.pending()
            if number is not None and not is_forwarded:
                # the children get the signal, because the launcher of a single process would end
                # without waiting for this process
                for process in psutil.Process(launcher.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
                is_forwarded = True
    if requests.signal_number is not None:
        raise Interrupted(requests.signal_number)
    return status


def translation_table(folder: Path, split: str, num_sentences: int) -> str:
    """Format translations of evenly spaced sentences of a split, with source and reference.

    Args:
        folder: Folder of the translations.
        split: Split that was translated.
        num_sentences: Number of sentences to show.

    Returns:
        Table with three columns; an asterisk marks translations that differ from the reference.
    """
    columns = [
        read_text(folder / f"{split}.{side}.txt").split("\n")[:-1]
        for side in ("source", "reference", "translation")
    ]
    interval = max(1, len(columns[0]) // num_sentences)
    lines = [_row(["source", "reference", "translation"]), "-" * (3 * COLUMN_WIDTH + 6)]
    for source, reference, translation in list(zip(*columns, strict=True))[::interval][
        :num_sentences
    ]:
        mark = "" if translation == reference else "* "
        cells = [
            textwrap.wrap(text, COLUMN_WIDTH) for text in (source, reference, mark + translation)
        ]
        for i in range(max(map(len, cells))):
            lines.append(_row([cell[i] if i < len(cell) else "" for cell in cells]))
        lines.append("")
    return "\n".join([*lines, "* differs from the reference"])


def _row(cells: list[str]) -> str:
    return "   ".join(cell.ljust(COLUMN_WIDTH) for cell in cells).rstrip()


def contents(folder: Path) -> str:
    """List the files of a run folder, and show a command to continue with.

    Args:
        folder: Run folder.

    Returns:
        One line for each file that exists, and the command.
    """
    descriptions = {
        "model.safetensors": "averaged model; load the folder with from_pretrained",
        "README.md": "model card",
        "recipe.yaml": "all settings of the run",
        "metrics.jsonl": "logged metrics",
        "pictures/loss.png": "loss against steps",
        "pictures/attention.png": "attention of each word of one translation",
        "hypotheses": "all translations, with sources and references",
        "checkpoints": "checkpoints, for `--resume`",
    }
    width = max(len(str(folder / name)) for name in descriptions)
    lines = [
        f"{folder / name!s:{width}}  {description}"
        for name, description in descriptions.items()
        if (folder / name).exists()
    ]
    sentence = "Last year, Jonas visited Italy and Poland."
    translate = f"echo '{sentence}' | vanilla-transformer translate {folder}"
    return "\n".join([*lines, "", f"Next:  {translate}"])
