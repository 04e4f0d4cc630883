"""The blocks of code in Markdown, and how their commands are tested."""

import re
from pathlib import Path

from vanilla_transformer.cli import main

ROOT = Path(__file__).parent.parent

SMALL_MODEL = "{hidden_size: 16, encoder_layers: 1, decoder_layers: 1, encoder_ffn_dim: 16}"
# settings that shorten a training run to seconds; the rest of a command is not changed
SMALL = [
    *("--vocab_size", "300", "--max_steps", "3", "--cooldown_steps", "0", "--model", SMALL_MODEL),
    *("--tokens_per_step", "900", "--save_every_steps", "1", "--num_averaged_checkpoints", "3"),
]
# as prose and tables write one
NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?(?![\d-])")
# pages, beside the README, whose commands are of several programs: tests/test_readme.py runs them
SHELL_PAGES = (
    "start/install.md",
    "start/demo.md",
    "start/translate.md",
    "guides/train.md",
    "guides/corpora.md",
    "guides/several-devices.md",
    "guides/evaluate.md",
    "guides/translate-files.md",
    "guides/terms.md",
    "guides/synthetic-data.md",
    "guides/fine-tune.md",
    "guides/publish.md",
    "guides/web-page.md",
    "guides/explainer.md",
    "results/speed.md",
)
TRAINING = re.compile(r"(vanilla-transformer |vanilla_transformer\.)train ")


def blocks(text, *languages):
    """The blocks of these languages, each with its language, in order."""
    names = "|".join(languages)
    return re.findall(rf"^```({names})\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(block):
    """The commands of a block, without comments, each on one line."""
    joined = block.replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in joined.splitlines() if line.strip()]


def train_small_demo(folder, *flags):
    """Leave a small `runs/demo` in a folder, as someone has it who has run the demo."""
    output_dir = str(folder / "runs" / "demo")
    assert main(["train", "demo", *SMALL, *flags, "--output_dir", output_dir]) == 0
