"""Fixtures of all test files: small models, whose sizes all differ, and a clean process."""

import contextlib
import os
import shutil
import signal
import subprocess

import datasets
import psutil
import pytest
import torch
import train_toys
from accelerate.state import AcceleratorState
from hypothesis import settings
from library_models import make_pieces
from translation_toys import make_model, make_tokenizer

from vanilla_transformer import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer import generation_vanilla_transformer as generation
from vanilla_transformer.train.ending import SIGNALS

# processes of pytest-xdist share the cores
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = max(1, torch.get_num_threads() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)

# the time of an example depends on the load of the machine
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SMALL = {
    "vocab_size": 23,
    "hidden_size": 12,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 20,
    "decoder_layers": 3,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 18,
}


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tokenize again in each session, also in subprocesses: a cache would hide failures."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder))
        yield


@pytest.fixture(scope="session")
def pieces(tmp_path_factory):
    """SentencePiece model for the tokenizers of the library."""
    return make_pieces(tmp_path_factory.mktemp("pieces"))


@pytest.fixture(scope="module")
def translate():
    """Pipeline of a small untrained model whose translations are readable."""
    tokenizer = make_tokenizer()
    return TranslationPipeline(make_model(tokenizer), tokenizer, device="cpu")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def searched(monkeypatch):
    """The engine of each search, in order."""
    engines = []
    begin = generation.begin_decoding

    def recording(engine, *args):
        engines.append(engine)
        return begin(engine, *args)

    monkeypatch.setattr(generation, "begin_decoding", recording)
    return engines


@pytest.fixture(autouse=True)
def same_threads():
    """Refuse a test that changes the number of threads: compiled code is made for one number.

    If a library changes the number of OpenMP without torch, a compiled kernel writes past its
    buffers, and the process crashes in another test.
    """
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Folder of a toy corpus."""
    return train_toys.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def new_process():
    """Reset the process layout and precision that accelerate keeps from the first run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    # fixtures of the next test may use accelerate before this fixture runs
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


def default_signals():
    """Restore the default handlers of signals that the parent ignores."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def begin():
    """A function from a command to its process, which does not outlive its test."""
    started = []

    def begin(command, **settings):
        settings = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, **settings}
        # these tests may run under nohup, which ignores one
        process = subprocess.Popen(command, text=True, preexec_fn=default_signals, **settings)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            # a launcher gives each of its processes a group of its own
            head = psutil.Process(process.pid)
            for member in (*head.children(recursive=True), head):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.communicate()


@pytest.fixture
def start(begin):
    """A function from a recipe and flags to a process that does not outlive its test."""

    def start(recipe, *flags, processes=0):
        # a process and its data workers are a group that one signal reaches
        command = train_toys.command(recipe, *flags, processes=processes)
        return begin(command, env=train_toys.environment(), start_new_session=True)

    return start


@pytest.fixture
def small_model():
    """A function from configuration fields to a small model in evaluation mode."""

    def build(**fields):
        config = VanillaTransformerConfig(**{**SMALL, **fields})
        model = VanillaTransformerForConditionalGeneration(config).eval()
        # initial biases are 0 and norms 1, which would hide errors
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model

    return build


@pytest.fixture
def batch():
    """Four sources of 7, 5, 4 and 2 tokens, padded, and targets of 5 tokens."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(3, 23, (4, 7), generator=generator)
    mask = torch.ones_like(source)
    for row, length in enumerate((7, 5, 4, 2)):
        source[row, length - 1] = 2
        source[row, length:] = 0
        mask[row, length:] = 0
    target = torch.randint(3, 23, (4, 5), generator=generator)
    target[:, 0] = 1
    return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}
