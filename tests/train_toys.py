"""Toy corpus and toy run for the tests of training."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

import vanilla_transformer.train
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.data.batches import IGNORED
from vanilla_transformer.train.data.prepare import Data, Texts, load_texts, prepare_data
from vanilla_transformer.train.recipe import load_config
from vanilla_transformer.train.run_folder.files import read_metrics

LAUNCH_FILES = Path(vanilla_transformer.train.__path__[0]) / "launch"
WORDS = "ant bee cat dog elk fox gnu hen ibis jay kite lynx mole newt owl pig".split()  # noqa: SIM905
# seconds after which a run that should take some of them hangs
LONGEST_RUN = 900
# steps of a run that a test ends
FOREVER = 50_000


def write_corpus(folder: Path, pairs: int = 90, seed: int = 3) -> Path:
    """Write text files in which the German is the reversed English."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", pairs), ("validation", 11), ("test", 7)):
        sources = [rng.choices(WORDS, k=rng.randint(1, 9)) for _ in range(count)]
        for lang, step in (("en", 1), ("de", -1)):
            lines = [" ".join(words[::step]) + "\n" for words in sources]
            (folder / f"{split}.{lang}").write_text("".join(lines), encoding="utf-8")
    return folder


def pipe_of(text: str) -> str:
    """Return the path of a pipe with a text, as `<(command)` of a shell gives it."""
    reading_end, writing_end = os.pipe()
    os.write(writing_end, text.encode())
    os.close(writing_end)
    return f"/dev/fd/{reading_end}"


def toy_settings(corpus: Path, output_dir: Path, **changes) -> dict:
    """Return the settings of a run that takes seconds."""
    settings = {
        "dataset": str(corpus),
        "name": None,
        "vocab_size": 290,
        "max_length": 60,
        "model": {
            "hidden_size": 16,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
        },
        "tokens_per_step": 300,
        "length_groups_per_step": 3,
        "tokens_per_micro_batch": 80,
        "max_steps": 12,
        "warmup_steps": 5,
        "log_every_steps": 1,
        "eval_every_steps": 6,
        "save_every_steps": 4,
        "num_averaged_checkpoints": 2,
        "output_dir": str(output_dir),
    }
    model = {**settings["model"], **changes.pop("model", {})}
    return {**settings, **changes, "model": model}


def toy_model(seed: int = 0, **fields) -> VanillaTransformerForConditionalGeneration:
    """Return a random model of some thousand weights; `fields` change its configuration."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 19,
        "hidden_size": 8,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 12,
        "decoder_ffn_dim": 12,
    }
    return VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(**{**sizes, **fields})
    )


def toy_config(corpus: Path, output_dir: Path, **changes) -> TrainConfig:
    """Return toy settings as a `TrainConfig`."""
    return load_config("paper-base", toy_settings(corpus, output_dir, **changes))


def write_recipe(path: Path, settings: dict) -> Path:
    """Write toy settings as a recipe."""
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def toy_batch() -> dict[str, torch.Tensor]:
    """Four sources of 5 tokens and targets of 6; one source and two targets have padding."""
    torch.manual_seed(1)
    labels = torch.randint(3, 19, (4, 6))
    labels[1, 2:] = IGNORED
    labels[3, 1:] = IGNORED
    mask = torch.ones(4, 5, dtype=torch.long)
    mask[2, 3:] = 0
    return {
        "input_ids": torch.randint(3, 19, (4, 5)),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(3, 19, (4, 6)),
        "labels": labels,
    }


def command(
    recipe: Path,
    *flags: str,
    processes: int = 0,
    module: str = "vanilla_transformer.train",
    launch_file: str | None = None,
) -> list[str]:
    """The command line of a run; of `accelerate launch` where the number of processes is given.

    With a launch file of the package, the run uses the CPU in the layout of this file.
    """
    run = [str(recipe), *flags]
    module = ["-m", module]
    if not processes:
        return [sys.executable, *module, *run]
    # this is how accelerate starts several processes, on whatever device
    kind = ["--multi_gpu"] if processes > 1 else []
    if launch_file is not None:
        kind = ["--config_file", str(LAUNCH_FILES / launch_file)]
        module = [str(Path(__file__).parent / "parts_on_cpu.py")]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *kind]
    launch += ["--num_processes", str(processes), "--num_machines", "1", "--main_process_port", "0"]
    return [*launch, "--mixed_precision", "no", "--dynamo_backend", "no", *module, *run]


def environment() -> dict[str, str]:
    """Return an environment with as many CPU threads as here; their number changes rounding."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    # said only where it must be, so that the tests find out what happens where it is not
    device = {"ACCELERATE_USE_CPU": "true"} if torch.accelerator.is_available() else {}
    return {**os.environ, **threads, **device}


def run_command(*arguments, **options) -> subprocess.CompletedProcess:
    """Run a training to its end, and show its output if it fails."""
    result = subprocess.run(
        command(*arguments, **options),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONGEST_RUN,
    )
    assert result.returncode == 0, result.stderr
    return result


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a run folder or a checkpoint."""
    return load_file(folder / "model.safetensors")


def assert_same_bits(run: Path, other: Path):
    """Check that the weights of two runs are bit-identical, and not empty."""
    left, right = weights(run), weights(other)
    assert left.keys() == right.keys()
    assert len(left) > 10
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def wait_until(happened: Callable[[], bool], process: subprocess.Popen, seconds: float = 300):
    """Wait until a function returns True; fail if the process ends before."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def last_step(folder: Path) -> int:
    """Return the last step in the metrics of a run."""
    return max((line["step"] for line in read_metrics(folder)), default=0)


def curve(folder: Path) -> list[dict]:
    """Return the metrics of a run without the speed."""
    return [
        {name: value for name, value in line.items() if name != "tokens_per_second"}
        for line in read_metrics(folder)
    ]


def write_texts(folder: Path, **splits: list[str]) -> str:
    """Write text files with English lines; the German lines are the same after a mark."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in splits.items():
        for lang, mark in (("en", ""), ("de", "~")):
            text = "".join(f"{mark}{line}\n" for line in lines)
            (folder / f"{split}.{lang}").write_text(text, encoding="utf-8")
    return str(folder)


def prepared(config: TrainConfig) -> tuple[Texts, Data]:
    """Load and tokenize the texts of a recipe, with a tokenizer of bytes."""
    texts = load_texts(config)
    return texts, prepare_data(config, texts, VanillaTransformerTokenizer())
