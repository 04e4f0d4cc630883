"""`make demo`: the main job from nothing, on the embedded corpus."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from ..console import Interrupted, a_folder
from ..records import read_text
from .ending import STARTER, noticing_requests
from .evaluate import evaluate, score_table

SHOWN_SENTENCES = 12
COLUMN_WIDTH = 38


def run_demo(output_dir: str | Path = "runs/demo") -> str:
    """Train on the embedded corpus through `accelerate launch`, translate its test split, score it.

    A run that was interrupted goes on; one that is finished is only evaluated.

    Args:
        output_dir: The run folder.

    Returns:
        Translations beside their references, scores, and where everything lies.

    Raises:
        ValueError: If training ended with an error, which it has printed itself.
    """
    folder = a_folder(output_dir, "output_dir")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    launch += ["--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["-m", "vanilla_transformer.train", "demo", "--output_dir", str(folder), "--resume"]
    # the launcher's own default is one thread
    environment = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), **os.environ}
    environment[STARTER] = str(os.getpid())
    status = _run_to_its_end(launch, environment)
    if status:
        raise ValueError(f"training must end well to be evaluated, got exit {status}.")
    scores = evaluate(folder)
    return "\n\n".join(
        [
            translation_table(folder / "hypotheses", "test", SHOWN_SENTENCES),
            score_table(scores),
            contents(folder),
        ]
    )


def _run_to_its_end(launch: list[str], environment: dict[str, str]) -> int:
    """Run the training, and pass on to it what asks this command to end."""
    with noticing_requests(is_told=False) as requests, requests.deferred():
        launcher = subprocess.Popen(launch, env=environment)
        is_passed_on = False
        while True:
            try:
                status = launcher.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                number = requests.pending()
            if number is not None and not is_passed_on:
                # a launcher of one process would end without it
                for process in psutil.Process(launcher.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
                is_passed_on = True
    if requests.number is not None:
        raise Interrupted(requests.number)
    return status


def translation_table(folder: Path, split: str, num_sentences: int) -> str:
    """Some translations of a split, spread over it, beside source and reference.

    Args:
        folder: Of the hypotheses.
        split: Which they are of.
        num_sentences: How many to show.

    Returns:
        A table of three columns; a translation that is not the reference has a mark.
    """
    columns = [
        read_text(folder / f"{split}.{side}.txt").split("\n")[:-1]
        for side in ("source", "reference", "translation")
    ]
    every = max(1, len(columns[0]) // num_sentences)
    lines = [_row(["source", "reference", "translation"]), "-" * (3 * COLUMN_WIDTH + 6)]
    for source, reference, translation in list(zip(*columns, strict=True))[::every][:num_sentences]:
        mark = "" if translation == reference else "* "
        cells = [
            textwrap.wrap(text, COLUMN_WIDTH) for text in (source, reference, mark + translation)
        ]
        for i in range(max(map(len, cells))):
            lines.append(_row([cell[i] if i < len(cell) else "" for cell in cells]))
        lines.append("")
    return "\n".join([*lines, "* not word for word the reference"])


def _row(cells: list[str]) -> str:
    return "   ".join(cell.ljust(COLUMN_WIDTH) for cell in cells).rstrip()


def contents(folder: Path) -> str:
    """What lies in a run folder, and how to go on from it.

    Args:
        folder: The run folder.

    Returns:
        A line for each part that is there.
    """
    parts = {
        "model.safetensors": "the averaged model; the folder loads with from_pretrained",
        "README.md": "its model card",
        "recipe.yaml": "every setting of the run",
        "metrics.jsonl": "what was logged",
        "pictures/loss.png": "loss against steps",
        "pictures/attention.png": "what each word of one translation looked at",
        "hypotheses": "all translations, with sources and references",
        "checkpoints": "what `--resume` needs",
    }
    width = max(len(str(folder / name)) for name in parts)
    lines = [
        f"{folder / name!s:{width}}  {what}"
        for name, what in parts.items()
        if (folder / name).exists()
    ]
    sentence = "Last year, Jonas visited Italy and Poland."
    translate = f"echo '{sentence}' | vanilla-transformer translate {folder}"
    return "\n".join([*lines, "", f"Go on:  {translate}"])
