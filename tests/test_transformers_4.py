"""transformers 4.57: its pipeline on the same models, and our exports in programs that need it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from document_blocks import ROOT, blocks, train_small_demo
from library_models import SENTENCES, make_bart, make_marian, make_pieces
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.cli import main

pytestmark = pytest.mark.slow

# its own dependencies, without torch, which both share
PACKAGES = ["transformers==4.57.6", "tokenizers==0.22.2", "huggingface-hub<1.0"]
# it needs transformers 4; without its own dependencies, which both share
OPTIMUM = ["optimum-onnx==0.1.0", "optimum==2.1.0"]
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

SEARCHES = {
    "greedy": {"num_beams": 1},
    "beams": {"num_beams": 4, "length_penalty": 0.0, "early_stopping": "never"},
}
EXPORTS = """
import json, sys

import ctranslate2
import transformers
from optimum.onnxruntime import ORTModelForSeq2SeqLM
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

assert transformers.__version__.startswith("4."), transformers.__version__
texts, searches = json.load(sys.stdin)
found = {}
for kind, auto_class in (
    ("marian", AutoModelForSeq2SeqLM),
    ("onnx", ORTModelForSeq2SeqLM),
    ("transformersjs", ORTModelForSeq2SeqLM),
):
    model, tokenizer = auto_class.from_pretrained(kind), AutoTokenizer.from_pretrained(kind)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    for name, search in searches.items():
        ids = model.generate(**inputs, max_new_tokens=12, **search)
        found[f"{kind}, {name}"] = tokenizer.batch_decode(ids, skip_special_tokens=True)
tokenizer = AutoTokenizer.from_pretrained("ctranslate2")
sources = [tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) for text in texts]
translator = ctranslate2.Translator("ctranslate2")
results = translator.translate_batch(sources, beam_size=1, max_decoding_length=12)
found["ctranslate2, greedy"] = [
    tokenizer.decode(tokenizer.convert_tokens_to_ids(result.hypotheses[0])) for result in results
]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def version_4(tmp_path_factory):
    """Folder with transformers 4.57."""
    folder = tmp_path_factory.mktemp("version-4")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    done = subprocess.run([*install, *PACKAGES, *OPTIMUM], capture_output=True, text=True)
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


def in_version_4(program, version_4, folder, inputs=None):
    """Return the output of a program in a folder with transformers 4.57."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(version_4)},
        input=json.dumps(inputs),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exports_translate_in_programs_for_version_4(version_4, tmp_path):
    for package in ("ctranslate2", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for kind in ("marian", "onnx", "transformersjs", "ctranslate2"):
        assert main(["export", kind, str(tmp_path / "model"), str(tmp_path / kind)]) == 0
    texts = [*TEXTS, "</s> Zürich, 東京  😀"]
    pipeline = TranslationPipeline(model, tokenizer)
    greedy = pipeline(texts, num_beams=1, max_new_tokens=12, max_extra_tokens=None)
    # with beams, a hypothesis that ends outside the beam is lost in the library's search
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "marian")
    read = AutoTokenizer.from_pretrained(tmp_path / "marian")
    inputs = read(texts, padding=True, return_tensors="pt")
    ids = theirs.generate(**inputs, max_new_tokens=12, **SEARCHES["beams"])
    expected = {
        "greedy": [one["translation_text"] for one in greedy],
        "beams": read.batch_decode(ids, skip_special_tokens=True),
    }
    output = in_version_4(EXPORTS, version_4, tmp_path, [texts, SEARCHES])
    found = json.loads(output.splitlines()[-1])
    assert len(found) == 7
    for name, translations in found.items():
        assert translations == expected[name.split(", ")[1]], name
        assert len(set(translations)) > 2


def test_the_programs_of_the_guide_run_with_version_4(version_4, tmp_path):
    train_small_demo(tmp_path)
    for kind in ("marian", "onnx"):
        run = str(tmp_path / "runs" / "demo")
        assert main(["export", kind, run, f"{run}-{kind}"]) == 0
    guide = (ROOT / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")
    programs = [
        block
        for _, block in blocks(guide, "python")
        if "optimum" in block or "demo-marian" in block
    ]
    assert len(programs) == 2
    outputs = [in_version_4(program, version_4, tmp_path) for program in programs]
    # both programs search with `generate`
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 2
