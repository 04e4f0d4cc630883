"""The translation pipeline beside that of transformers 4.57, on the same saved models."""

import json
import os
import subprocess
import sys

import pytest
import torch
from library_models import SENTENCES, make_bart, make_marian, make_pieces

pytestmark = pytest.mark.slow

# its own dependencies, without torch, which both share
PACKAGES = ["transformers==4.57.6", "tokenizers==0.22.2", "huggingface-hub<1.0"]
PROGRAM = """
import json, sys

if sys.argv[2] == "5":
    import vanilla_transformer
import transformers
from transformers import pipeline

assert transformers.__version__.startswith(sys.argv[2]), transformers.__version__
texts = {texts}


def plain(value):
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {{name: plain(one) for name, one in value.items()}}
    return value.tolist() if hasattr(value, "tolist") else value


translate = pipeline("translation_en_to_de", model=sys.argv[1], device="cpu")
generated = translate(text for text in texts)
found = {{
    "text": translate(texts[0]),
    "list": translate(texts),
    "list of one": translate(texts[:1]),
    "two for a text": translate(texts[0], num_return_sequences=2, num_beams=3),
    "two for a list": translate(texts, num_return_sequences=2, num_beams=3),
    "generator": list(generated),
    "token ids": translate(texts[0], return_tensors=True),
    "batches": translate(texts, batch_size=2),
    "short": translate(texts, max_length=5),
    "cut": translate(texts, truncation=True),
    "spaces": translate(texts, clean_up_tokenization_spaces=True),
    "greedy": translate(texts, num_beams=1),
}}
print(json.dumps(plain(found)))
"""


@pytest.fixture(scope="module")
def version_4(tmp_path_factory):
    """Folder with transformers 4.57."""
    folder = tmp_path_factory.mktemp("version-4")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    done = subprocess.run([*install, *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"transformers 4.57 cannot be installed: {done.stderr.strip()[-200:]}")
    return folder


@pytest.mark.parametrize("make", [make_marian, make_bart])
def test_results_are_those_of_version_4(make, version_4, tmp_path):
    torch.manual_seed(3)
    model, tokenizer = make(make_pieces(tmp_path), tmp_path)
    # version 4 replaces the model's number of beams by 4
    model.generation_config.update(max_length=12, num_beams=4)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    program = PROGRAM.format(texts=SENTENCES[:3])
    found = {}
    for version in ("4", "5"):
        own = {"PYTHONPATH": str(version_4)} if version == "4" else {}
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "model", version],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found[version] = json.loads(done.stdout.splitlines()[-1])
    for name, expected in found["4"].items():
        assert found["5"][name] == expected, name
