"""Exports in transformers.js: the same tokens and translations, in Node.js and in a browser."""

import functools
import json
import os
import shutil
import subprocess
import threading
import urllib.request
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from document_blocks import ROOT, blocks
from tokenizers import AddedToken
from translation_toys import make_tokenizer

from vanilla_transformer import TranslationPipeline, VanillaTransformerTokenizer
from vanilla_transformer.benchmarks.work import texts_of_run
from vanilla_transformer.cli import main
from vanilla_transformer.loading import load_run

pytest.importorskip("onnxruntime")

from vanilla_transformer.export.transformersjs import save_tokenizer_for_javascript

pytestmark = pytest.mark.node

PACKAGE = "@huggingface/transformers@4.3.1"
PAGE = (ROOT / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")
# the default of transformers.js
LONGEST = 256
# translations that are no sentences yet, but that depend on the source
TRAINING = [
    *("--vocab_size", "600", "--max_steps", "200", "--warmup_steps", "80"),
    *("--tokens_per_step", "1000", "--num_averaged_checkpoints", "1", "--eval_every_steps", "200"),
    *("--model", "{hidden_size: 48, encoder_layers: 2, decoder_layers: 2, encoder_ffn_dim: 96}"),
]
HARD_TEXTS = [
    "",
    " ",
    "  two spaces  before and after  ",
    " a",
    "line\nbreak\r\n\ttab",
    "no-break\u00a0space, thin\u2009space, ideographic\u3000space, line\u2028separator",
    "next\u0085line, \ufeffbyte order mark, zero\u200bwidth, \u180emongolian",
    "digits 0123456789, ١٢٣, ½, ², Ⅷ, 1,000.5 and 3x4y5z",
    "it's, they've, I'll, we'd, IT'S",
    "emoji 😀, family 👨‍👩‍👧, flag 🇩🇪, thumbs 👍🏽",
    "e\u0301 composed é, ﬁ ligature, Å angstrom \u212b",
    "日本語 中文 한국어 עברית हिन्दी",
    "<s> </s><pad> <unk>names</s> of special tokens<s>",
    "Zürich und Tōkyō, 東京",
    "( brackets ) in ( a tree )",
    "a\x00b\x7fc",
    "<2de>the cat",
    "<2de> the cat <2de>and<2de> the dog",
    " <2de> the cat",
]
TRANSLATE = """
import { readFileSync } from "node:fs";
import { AutoTokenizer, LogLevel, env, pipeline } from "@huggingface/transformers";

env.allowRemoteModels = false;
env.fetch = () => {
  throw new Error("no network");
};
env.logLevel = LogLevel.ERROR;
const { folder, dtype, batches, texts, ids } = JSON.parse(readFileSync(0, "utf-8"));
const found = {};
if (batches) {
  const translate = await pipeline("translation", folder, { dtype });
  found.translations = [];
  for (const batch of batches)
    found.translations.push(...(await translate(batch)).map((one) => one.translation_text));
} else {
  const tokenizer = await AutoTokenizer.from_pretrained(folder);
  found.ids = texts.map((text) => tokenizer(text, { return_tensor: false }).input_ids);
  found.texts = ids.map((some) => tokenizer.decode(some, { skip_special_tokens: true }));
}
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Folder with transformers.js."""
    missing = [program for program in ("node", "npm") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    folder = tmp_path_factory.mktemp("project")
    (folder / "package.json").write_text('{"type": "module"}')
    # only the GPU's libraries would be downloaded by the script
    done = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", PACKAGE],
        cwd=folder,
        env=os.environ | {"ONNXRUNTIME_NODE_INSTALL": "skip"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be installed: {done.stderr.strip()[-200:]}")
    (folder / "test.js").write_text(TRANSLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def demo(project):
    """Run with its export, in the folders that the guide names."""
    run = project / "runs" / "demo"
    assert main(["train", "demo", *TRAINING, "--output_dir", str(run)]) == 0
    assert main(["export", "transformersjs", str(run), f"{run}-js"]) == 0
    return run


def node(project, *arguments, **inputs):
    """Return the output of a program, which gets the inputs."""
    done = subprocess.run(
        ["node", *arguments],
        cwd=project,
        input=json.dumps(inputs),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ours(run, texts):
    """Return the translations of this package by greedy search."""
    pipeline = TranslationPipeline(*load_run(run))
    found = pipeline(texts, num_beams=1, max_new_tokens=LONGEST, max_extra_tokens=None)
    return [one["translation_text"] for one in found]


def with_additions():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["Zürich", "東京", AddedToken("cat")])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    return tokenizer


def with_symbols():
    return VanillaTransformerTokenizer(symbols=["(", ")", "<2de>"]).train_new_from_iterator(
        ["( <2de> the cat ) sleeps"] * 20, vocab_size=290
    )


@pytest.mark.parametrize("make", [make_tokenizer, with_additions, with_symbols])
def test_tokens_and_texts_are_ours(make, project):
    tokenizer = make()
    folder = project / make.__name__
    folder.mkdir()
    save_tokenizer_for_javascript(tokenizer, folder)
    ids = tokenizer(HARD_TEXTS)["input_ids"]
    # also bytes that are no text, and tokens in another order
    odd = [*ids, *(list(reversed(some)) for some in ids), [5, 2, 200, 100, 150, 2], [2, 1, 0, 3]]
    found = json.loads(node(project, "test.js", folder=str(folder), texts=HARD_TEXTS, ids=odd))
    for text, expected, some in zip(HARD_TEXTS, ids, found["ids"], strict=True):
        assert some == expected, text
    assert found["texts"] == tokenizer.batch_decode(odd, skip_special_tokens=True)


def test_translations_are_ours(demo, project):
    texts = texts_of_run(demo, "validation", 200)[0]
    expected = ours(demo, texts)
    assert len(set(expected)) > 50
    inputs = {"folder": f"{demo}-js", "dtype": "fp32"}
    for size in (1, 20):
        batches = [texts[first : first + size] for first in range(0, len(texts), size)]
        found = json.loads(node(project, "test.js", batches=batches, **inputs))
        assert found["translations"] == expected, size


def test_many_translations_of_int8_are_ours(demo, project):
    texts = texts_of_run(demo, "validation", 200)[0]
    batches = [[text] for text in texts]
    inputs = {"folder": f"{demo}-js", "dtype": "q8"}
    found = json.loads(node(project, "test.js", batches=batches, **inputs))["translations"]
    # the scores of a model in its first steps are close to each other
    assert sum(map(str.__eq__, found, ours(demo, texts))) > 25
    sizes = [
        (demo.with_name("demo-js") / "onnx" / f"decoder_model_merged{ending}.onnx").stat().st_size
        for ending in ("", "_quantized")
    ]
    assert sizes[1] < 0.5 * sizes[0]


def test_the_program_of_the_guide_prints_our_translations(demo, project):
    ((_, program),) = blocks(PAGE, "js")
    (project / "guide.js").write_text(program, encoding="utf-8")
    texts = [line.strip(' ",') for line in program.splitlines() if line.startswith('  "')]
    assert len(texts) == 2
    assert node(project, "guide.js").splitlines() == ours(demo, texts)


@pytest.fixture
def address(project):
    """Address of a server for the files of the project."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(project))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.browser
@pytest.mark.parametrize("dtype", ["fp32", "q8"])
def test_the_page_of_the_guide_translates_in_a_browser(dtype, browser, demo, project, address):
    ((_, page),) = blocks(PAGE, "html")
    assert '"q8"' in page
    (project / "index.html").write_text(page.replace('"q8"', f'"{dtype}"'), encoding="utf-8")
    assert urllib.request.urlopen(address).status == 200
    opened = browser.new_page()
    outside, errors = [], []
    opened.on("pageerror", lambda error: errors.append(error))

    def refuse(route):
        outside.append(route.request.url)
        route.abort()

    opened.route(lambda url: not url.startswith(("data:", "blob:", address)), refuse)
    opened.goto(address)
    text = "The train to Berlin leaves at 10:45 AM from platform 2."
    opened.locator("input").fill(text)
    opened.locator("input").press("Enter")
    opened.locator("output:not(:empty)").wait_for(timeout=60_000)
    found = opened.locator("output").inner_text()
    opened.close()
    assert not outside
    assert not errors
    if dtype == "fp32":
        assert found == ours(demo, [text])[0]
