"""Measure start-up times: imports, help of the command line, first translation."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer
from ..paper.study import Section
from .peers import build_marian
from .timing import Implementation, numbers_of, ratio_figure, ratios, time_in_turn
from .work import model_config

LIBRARY = "import transformers' Marian"
# program that translates once; both models get token ids from the same tokenizer
TRANSLATE = """
import sys, torch
from {module} import {name}
from vanilla_transformer import VanillaTransformerTokenizer
tokenizer = VanillaTransformerTokenizer.from_pretrained(sys.argv[1])
model = {name}.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    model.generate(**tokenizer("Hello world.", return_tensors="pt"), num_beams=1, max_new_tokens=8)
"""
OUR_MODEL = {"module": "vanilla_transformer", "name": "VanillaTransformerForConditionalGeneration"}
MARIAN_MODEL = {"module": "transformers", "name": "MarianMTModel"}


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Time new processes, each from its start to its end.

    Args:
        flags: Flags of the command line.

    Yields:
        One section.
    """
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: str(Path(folder, name)) for name in ("ours", "marian")}
        tokenizer = VanillaTransformerTokenizer()
        config = model_config("small", flags.model_vocab_size)
        VanillaTransformerForConditionalGeneration(config).save_pretrained(folders["ours"])
        build_marian(config).save_pretrained(folders["marian"])
        for model_folder in folders.values():
            tokenizer.save_pretrained(model_folder)
        help_code = "from vanilla_transformer.cli import main; main(['translate', '--help'])"
        programs = {
            LIBRARY: ["-c", "from transformers import MarianMTModel"],
            "this package: import": ["-c", "import vanilla_transformer"],
            "import torch": ["-c", "import torch"],
            "this package: command line's help": ["-c", help_code],
            "transformers Marian: first translation": [
                "-c",
                TRANSLATE.format(**MARIAN_MODEL),
                folders["marian"],
            ],
            "this package: first translation": [
                "-c",
                TRANSLATE.format(**OUR_MODEL),
                folders["ours"],
            ],
        }
        implementations = [
            Implementation(name, Program, (), [[sys.executable, *program]], [1])
            for name, program in programs.items()
        ]
        results = time_in_turn(implementations, max(flags.rounds, 3), torch.device("cpu"))
    rows = [
        (result.name, *ratios(result, results[0]), float(result.seconds.min()))
        for result in results
    ]
    yield Section(
        name="startup",
        title="Start-up times",
        finding="Each row is a new process, timed from start to end, with files in the page cache; "
        f"ratios to {LIBRARY}, medians with quartiles.",
        columns=("process", "ratio", "lower quartile", "upper quartile", "seconds"),
        rows=rows,
        figure=ratio_figure({"start": rows}, LIBRARY),
        numbers=numbers_of(results, None),
    )


class Program:
    """Implementation that runs a command."""

    def __call__(self, command: list[str]) -> None:
        """Run a command to its end.

        Args:
            command: Program and arguments.
        """
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
