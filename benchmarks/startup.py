"""How long it takes until something happens: imports, the command line, the first translation."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer
from ..paper.study import Section
from .contest import Contender, numbers_of, race, ratio_figure, ratios
from .peers import build_marian
from .work import model_config

LIBRARY = "import transformers' Marian"
# one translation, by the model's own tokenizer; the peer gets the same ids
TRANSLATE = """
import sys, torch
from {module} import {name}
from .. import VanillaTransformerTokenizer
tokenizer = VanillaTransformerTokenizer.from_pretrained(sys.argv[1])
model = {name}.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    model.generate(**tokenizer("Hello world.", return_tensors="pt"), num_beams=1, max_new_tokens=8)
"""
OURS = {"module": "vanilla_transformer", "name": "VanillaTransformerForConditionalGeneration"}
MARIAN = {"module": "transformers", "name": "MarianMTModel"}


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Time new processes.

    Args:
        flags: Of the command line.

    Yields:
        One section.
    """
    with tempfile.TemporaryDirectory() as folder:
        places = {name: str(Path(folder, name)) for name in ("ours", "marian")}
        tokenizer = VanillaTransformerTokenizer()
        config = model_config("small", flags.model_vocab_size)
        VanillaTransformerForConditionalGeneration(config).save_pretrained(places["ours"])
        build_marian(config).save_pretrained(places["marian"])
        for place in places.values():
            tokenizer.save_pretrained(place)
        verb = "from vanilla_transformer.cli import main; main(['translate', '--help'])"
        programs = {
            LIBRARY: ["-c", "from transformers import MarianMTModel"],
            "this package: import": ["-c", "import vanilla_transformer"],
            "import torch": ["-c", "import torch"],
            "this package: command line's help": ["-c", verb],
            "transformers Marian: first translation": [
                "-c",
                TRANSLATE.format(**MARIAN),
                places["marian"],
            ],
            "this package: first translation": ["-c", TRANSLATE.format(**OURS), places["ours"]],
        }
        contenders = [
            Contender(name, Program, (), [[sys.executable, *program]], [1])
            for name, program in programs.items()
        ]
        results = race(contenders, max(flags.rounds, 3), torch.device("cpu"))
    rows = [
        (result.name, *ratios(result, results[0]), float(result.seconds.min()))
        for result in results
    ]
    yield Section(
        name="startup",
        title="Until something happens",
        says="Each a process of its own, from its start to its end, files in the system's memory; "
        f"ratios to {LIBRARY}, medians with quartiles.",
        columns=("process", "ratio", "from", "to", "seconds"),
        rows=rows,
        figure=ratio_figure({"start": rows}, LIBRARY),
        numbers=numbers_of(results, None),
    )


class Program:
    """Runs a command to its end."""

    def __call__(self, command: list[str]) -> None:
        """Run it.

        Args:
            command: What to run.
        """
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
