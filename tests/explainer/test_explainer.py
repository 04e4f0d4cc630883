"""The explainer: its graphs, its files and its command, then the page in a browser."""

import contextlib
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer import TranslationPipeline, VanillaTransformerForConditionalGeneration
from vanilla_transformer.cli import main
from vanilla_transformer.explainer import command
from vanilla_transformer.paper import positional_encoding as encodings

pytest.importorskip("onnxruntime")

import onnxruntime

from vanilla_transformer.explainer.files import MOST_TOKENS, corpus_of, save_for_page
from vanilla_transformer.explainer.graphs import DECODER_FILE, ENCODER_FILE, run_graph
from vanilla_transformer.explainer.weights import FEWEST_MOVED_ELEMENTS, WEIGHTS_FILE

WEB = Path(command.__file__).parent / "web"
SENTENCE = TEXTS[2]
# the page shows four decimals
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PHONE = {"width": 375, "height": 812}
DESKTOP = {"width": 1280, "height": 900}
SECONDS = 60
CALIBRATION = {"threshold": -0.25, "poor_below": 0.75, "poor_above": 0.125, "chrf": 40.0}
MODEL_FILES = (ENCODER_FILE, DECODER_FILE, WEIGHTS_FILE, "tokenizer.json", "tokenizer_config.json")
REGISTRY = "https://registry.npmjs.org/"
HARD_TEXTS = [
    "no-break\u00a0space, thin\u2009space, ideographic\u3000space",
    "digits 0123456789, ١٢٣, ½, ²",
    "it's, they've, IT'S",
    "emoji 😀, flag 🇩🇪, thumbs 👍🏽",
    "e\u0301 composed é, ﬁ ligature",
    "日本語 中文 한국어",
    "<s> </s><pad> <unk>names</s>",
    "( brackets ) in ( a tree )",
    "<b>bold</b> & \"quoted\" 'text'",
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Untrained model with its tokenizer, and a recipe that names the corpus of the demo."""
    folder = tmp_path_factory.mktemp("runs") / "toy"
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, encoder_layers=3, decoder_layers=2)
    model.generation_config.calibration = CALIBRATION
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    recipe = "dataset: demo\nsource_lang: en\ntarget_lang: de\n"
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(run_folder):
    return VanillaTransformerForConditionalGeneration.from_pretrained(run_folder).eval()


@pytest.fixture(scope="module")
def model_folder(run_folder, tmp_path_factory):
    """The files of the model that the page reads."""
    folder = tmp_path_factory.mktemp("model")
    command.write_model(str(run_folder), folder)
    return folder


@torch.no_grad()
def values_of(model, source, target):
    """Every value of figure 1 by its name, from hooks on the modules of the model."""
    found, hooks = {}, []

    def record(name, module, takes_input=False):
        def hook(_, inputs, output):
            found[name] = (inputs[0] if takes_input else output).detach()[0]

        hooks.append(module.register_forward_hook(hook))

    for stack, part in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        record(f"{stack}.input", part.positions)
        record(f"{stack}.embeddings", part.positions, takes_input=True)
        for number, layer in enumerate(part.layers):
            for kind, name in (("self", "self_attention"), ("cross", "cross_attention")):
                if not hasattr(layer, name):
                    continue
                attention, prefix = getattr(layer, name), f"{stack}.{number}.{kind}"
                for one in ("query", "key", "value"):
                    record(f"{prefix}.{one}", getattr(attention, f"{one[0]}_proj"))
                record(f"{prefix}.joined", attention.out_proj, takes_input=True)
                record(f"{prefix}.output", attention.out_proj)
                record(f"{prefix}.norm", getattr(layer, f"{name}_norm"))
            record(f"{stack}.{number}.ff.inner", layer.feed_forward.fc2, takes_input=True)
            record(f"{stack}.{number}.ff.output", layer.feed_forward.fc2)
            record(f"{stack}.{number}.ff.norm", layer.feed_forward_norm)
    model.set_attn_implementation("eager")
    source, target = torch.tensor([source]), torch.tensor([target])
    outputs = model(input_ids=source, decoder_input_ids=target, output_attentions=True)
    for hook in hooks:
        hook.remove()
    found["logits"] = outputs.logits[0]
    for name, weights in (
        ("encoder.{}.self", outputs.encoder_attentions),
        ("decoder.{}.self", outputs.decoder_attentions),
        ("decoder.{}.cross", outputs.cross_attentions),
    ):
        for number, one in enumerate(weights):
            found[f"{name.format(number)}.weights"] = one[0]
    for stack in ("encoder", "decoder"):
        found[f"{stack}.positions"] = found[f"{stack}.input"] - found[f"{stack}.embeddings"]
    for name in [name for name in found if name.endswith((".query", ".key", ".value", ".joined"))]:
        heads = found[name].unflatten(-1, (4, -1)).transpose(0, 1)  # [h, T, d_k]
        found[name.replace("joined", "context")] = heads
    for name in [name for name in found if name.endswith(".query")]:
        prefix = name.removesuffix(".query")
        query, key = found[name], found[f"{prefix}.key"]
        found[f"{prefix}.scores"] = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return {name: value for name, value in found.items() if not name.endswith(".joined")}


def run_file(path, **inputs):
    """Run a graph in ONNX Runtime."""
    return run_graph(onnxruntime.InferenceSession(path), inputs)


def graph_values(folder, source, target):
    """Every value of the graphs by its name."""
    values = run_file(folder / ENCODER_FILE, input_ids=torch.tensor([source]).numpy())
    memory = [*values.values()][-1]
    inputs = {"input_ids": torch.tensor([target]).numpy(), "memory": memory}
    values |= run_file(folder / DECODER_FILE, **inputs)
    return {name: torch.from_numpy(value) for name, value in values.items()}


def test_every_value_of_the_graphs_is_that_of_the_model(model, tokenizer, model_folder):
    source = tokenizer(SENTENCE)["input_ids"]
    target = [model.config.decoder_start_token_id, 40, 50, 60, 70]
    expected = values_of(model, source, target)
    found = graph_values(model_folder, source, target)
    assert set(found) == set(expected)
    assert len(found) > 60
    for name, value in found.items():
        # positions have no batch axis
        shown = value.reshape(expected[name].shape)
        assert torch.allclose(shown, expected[name], **CLOSE), name


def test_a_prefix_of_any_length_and_number_has_the_same_values(model, tokenizer, model_folder):
    source = tokenizer(SENTENCE)["input_ids"]
    target = [model.config.decoder_start_token_id, 40, 50, 60]
    whole = graph_values(model_folder, source, target)
    memory = whole["encoder.2.ff.norm"].numpy()
    for length in (1, 3):
        prefixes = torch.tensor([target[:length]] * 3).numpy()
        found = run_file(
            model_folder / DECODER_FILE, input_ids=prefixes, memory=memory.repeat(3, axis=0)
        )
        for row in found["logits"]:
            torch.testing.assert_close(torch.from_numpy(row), whole["logits"][0, :length], **CLOSE)


def test_the_description_has_what_the_page_needs(model, tokenizer, model_folder):
    about = json.loads((model_folder / "model.json").read_text(encoding="utf-8"))
    assert about["corpus"] == "demo"
    assert (about["num_beams"], about["alpha"], about["max_extra_tokens"]) == (4, 0.6, 3)
    assert about["ends"] == [tokenizer.eos_token_id]
    assert about["calibration"] == CALIBRATION
    assert about["suppressed"] == sorted(model.generation_config.suppress_tokens)
    assert len(about["tokens"]) == len(tokenizer)
    assert about["most_tokens"] == MOST_TOKENS
    for name in (ENCODER_FILE, DECODER_FILE, WEIGHTS_FILE, "tokenizer.json"):
        assert about["bytes"][name] == (model_folder / name).stat().st_size
    text = (model_folder / "model.json").read_text(encoding="utf-8")
    assert str(model_folder) not in text


@pytest.mark.parametrize("is_half", [False, True])
def test_each_weight_is_stored_once_and_in_the_precision_of_the_checkpoint(
    is_half, tokenizer, tmp_path
):
    model = make_model(tokenizer, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64).eval()
    # the same inner width in both stacks, and equal weights of two shapes
    with torch.no_grad():
        for layer in (model.get_encoder().layers[0], model.get_decoder().layers[0]):
            layer.feed_forward.fc1.weight.fill_(0.1)
            layer.feed_forward.fc2.weight.fill_(0.1)
    model = model.half() if is_half else model
    save_for_page(model, tokenizer, tmp_path)
    large = {
        (one.shape, tuple(one.flatten().tolist()))
        for one in model.parameters()
        if one.numel() >= FEWEST_MOVED_ELEMENTS
    }
    table = MOST_TOKENS + model.generation_config.max_extra_tokens
    numbers = sum(len(values) for _, values in large) - 32 * 64  # of the same bytes
    size = (tmp_path / WEIGHTS_FILE).stat().st_size
    assert size == numbers * (2 if is_half else 4) + table * 32 * 4
    source, target = tokenizer(SENTENCE)["input_ids"], [model.config.decoder_start_token_id, 40]
    expected = values_of(model.float(), source, target)["logits"]
    torch.testing.assert_close(
        graph_values(tmp_path, source, target)["logits"][0], expected, **CLOSE
    )


@pytest.mark.parametrize(
    ("options", "search", "sentence"),
    [
        ({"norm_first": True}, {}, "norm_first must be False, as in figure 1, got True."),
        ({}, {"min_length": 3}, "min_length must not be set, because the page lacks it, got 3."),
        ({}, {"bad_words_ids": [[5, 6]]}, "bad_words_ids must have single tokens for the page"),
    ],
)
def test_a_model_that_the_page_cannot_explain_is_refused(
    options, search, sentence, tokenizer, tmp_path
):
    model = make_model(tokenizer, **options)
    model.generation_config.update(**search)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        save_for_page(model, tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dataset", "shown"),
    [("demo", "demo"), ("wmt/wmt14", "wmt/wmt14"), ("/home/somebody/corpus", None), ("here", None)],
)
def test_the_page_names_a_corpus_but_no_path(dataset, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "recipe.yaml").write_text(f"dataset: {dataset}\n", encoding="utf-8")
    assert corpus_of(tmp_path) == shown
    (tmp_path / "recipe.yaml").write_text("dataset: [", encoding="utf-8")
    with pytest.raises(ValueError, match="must be a recipe in YAML"):
        corpus_of(tmp_path)


def test_learned_positions_bound_the_sentence(tokenizer, tmp_path):
    options = {"position_encoding": "learned", "max_position_embeddings": 20}
    save_for_page(make_model(tokenizer, **options), tokenizer, tmp_path)
    about = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    assert about["most_tokens"] + about["max_extra_tokens"] <= 20


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A folder that stands for the built page."""
    page = tmp_path / "dist"
    (page / "assets").mkdir(parents=True)
    (page / "index.html").write_text("<!doctype html>", encoding="utf-8")
    for name in ("a.js", "b.wasm", "c.mjs"):
        (page / "assets" / name).write_text("0", encoding="utf-8")
    monkeypatch.setattr(command, "PAGE", page)
    return page


def test_the_static_folder_has_page_and_model(run_folder, built, tmp_path):
    site = tmp_path / "site"
    assert main(["explain", "--model", str(run_folder), "--output_dir", str(site)]) == 0
    for name in ("index.html", "assets/b.wasm", "model/model.json", f"model/{DECODER_FILE}"):
        assert (site / name).is_file()


def test_bad_input_of_the_command_ends_in_one_sentence(
    run_folder, built, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    full = str(built)
    for arguments, sentence in (
        (["--port", "0"], "port must be from 1 to 65535, got 0."),
        (["--output_dir", full], "output_dir must be a new or an empty folder, got "),
        (["--output_dir", "new"], "model must be a trained model, got none in runs/demo"),
        (["--output_dir", "new", "--model", "nothing/here"], "run must be a run folder"),
    ):
        assert main(["explain", *arguments]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert sentence in error
        assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(command, "PAGE", tmp_path / "none")
    assert main(["explain"]) == 1
    assert "Build it with `make explainer`, which needs Node.js." in capsys.readouterr().err
    monkeypatch.setattr(command, "PAGE", built)
    monkeypatch.delitem(sys.modules, "vanilla_transformer.explainer.files")
    monkeypatch.delitem(sys.modules, "vanilla_transformer.explainer.graphs")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["explain", "--model", str(run_folder), "--output_dir", "new"]) == 1
    assert "pip install onnx onnxscript onnxruntime." in capsys.readouterr().err


def test_a_command_that_sigterm_ends_leaves_no_temporary_files(built, tmp_path, monkeypatch):
    def write_site(_, folder, *__):
        (folder / "model.onnx").touch()
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("the signal was ignored")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(command, "write_site", write_site)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def ignore(number, frame):
        pass

    handler = signal.signal(signal.SIGTERM, ignore)
    try:
        assert main(["explain", "--port", str(port)]) == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is ignore
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.fixture
def address(built):
    with serving(built) as address:
        yield address


@contextlib.contextmanager
def serving(folder):
    """Serve a folder in a thread, and yield its address."""
    with command.open_server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_server_listens_on_this_machine_and_serves_only_its_folder(address, built):
    (built.parent / "secret.txt").write_text("secret", encoding="utf-8")
    for path in ("/assets/", "/../secret.txt", "/%2e%2e/secret.txt", "/nothing"):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(address + path)
        assert error.value.code == 404
    for path, kind in (
        ("/", "text/html; charset=utf-8"),
        ("/assets/a.js", "text/javascript; charset=utf-8"),
        ("/assets/b.wasm", "application/wasm"),
        ("/assets/c.mjs", "text/javascript; charset=utf-8"),
    ):
        answer = urllib.request.urlopen(address + path)
        assert answer.headers["Content-Type"] == kind
        is_built = path.startswith("/assets/")
        assert ("immutable" in answer.headers["Cache-Control"]) == is_built
    with command.open_server(built, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        with (
            pytest.raises(OSError, match=r"Port \d+ is already in use. Choose another port with"),
            command.open_server(built, server.server_port),
        ):
            pass


def test_a_request_that_is_not_http_gets_an_error_and_no_traceback(address, capsys):
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
        client.sendall(b"\x16\x03\x01 a browser asks for https\r\n")
        assert b"Error code: 400" in client.makefile("rb").read()
    assert capsys.readouterr().err == ""


def test_a_browser_that_closes_its_connection_leaves_no_traceback(address, built, capsys):
    # more than the buffers of both sockets hold
    (built / "assets" / "weights.bin").write_bytes(bytes(32 << 20))
    port = int(address.rpartition(":")[2])
    before = set(threading.enumerate())
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
        client.sendall(b"GET /assets/weights.bin HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(8) == b"HTTP/1.0"
        handling = set(threading.enumerate()) - before
        assert len(handling) == 1
        # close at once, without waiting for the rest of the data
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for thread in handling:
        thread.join(SECONDS)
    assert capsys.readouterr().err == ""


def test_the_packages_of_the_page_have_exact_versions_and_digests():
    package = json.loads((WEB / "package.json").read_text(encoding="utf-8"))
    wanted = package["dependencies"] | package["devDependencies"]
    assert len(wanted) > 5
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    lock = json.loads((WEB / "package-lock.json").read_text(encoding="utf-8"))
    found = [one for name, one in lock["packages"].items() if name]
    assert len(found) > len(wanted)
    for one in found:
        assert one["integrity"].startswith("sha512-")
        # npm may leave out the address of its public registry
        assert one.get("resolved", REGISTRY).startswith(REGISTRY)


def test_the_english_of_the_page_is_in_one_file():
    others = [path for path in WEB.glob("src/*.ts") if path.name != "text.ts"]
    assert len(others) > 10
    for path in others:
        source = re.sub(r"/\*.*?\*/|//.*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.findall(r"""["'`>][A-Z][a-z]+ [a-z]+""", source), path.name


# ---- the page in a browser ----

in_browser = [pytest.mark.browser, pytest.mark.node]


@pytest.fixture(scope="module")
def site(run_folder, tmp_path_factory):
    """Address of the page, built from the sources, with the untrained model."""
    missing = [program for program in ("node", "npm") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    folder = tmp_path_factory.mktemp("web")
    shutil.copytree(
        WEB, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules", "dist")
    )
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the packages cannot be installed: {done.stderr.strip()[-200:]}")
    build = ["npm", "run", "build"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "PAGE", folder / "dist")
        target = tmp_path_factory.mktemp("site")
        command.write_site(str(run_folder), target)
    with serving(target) as address:
        yield address


class Opened:
    """A page with what it logs and asks for."""

    def __init__(self, browser, site, **settings):
        self.site = site
        self.context = browser.new_context(**{"viewport": DESKTOP, **settings})
        self.page = self.context.new_page()
        self.errors, self.outside = [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console",
            lambda one: self.errors.append(one.text) if one.type in ("error", "warning") else None,
        )
        self.page.on(
            "request",
            lambda one: (
                None
                if one.url.startswith((site, "data:", "blob:"))
                else self.outside.append(one.url)
            ),
        )

    def open(self, **state):
        self.page.goto("about:blank")
        self.page.goto(f"{self.site}/#{urlencode(state)}")
        self.page.locator("body[data-ready]").wait_for(timeout=1000 * SECONDS)
        return self.page

    def settled(self):
        """Wait until no search runs."""
        self.page.locator("body:not(.is-working)").wait_for(timeout=1000 * SECONDS)
        self.page.evaluate("() => new Promise(requestAnimationFrame)")

    def translation(self):
        return self.page.locator("#translation").inner_text()

    def codes(self):
        """Return the open table of codes, [positions, features]."""
        rows = self.page.locator('[data-box="positions"] tbody tr').all()
        cells = [row.locator("td").all_inner_texts() for row in rows]
        return torch.tensor([[number(cell) for cell in row] for row in cells])

    def numbers(self, box):
        """Open a box, and return the numbers of its table, [rows, columns]."""
        place = self.page.locator(f'[data-box="{box}"]')
        if not place.locator("details").evaluate("one => one.open"):
            place.locator("summary").click()
        place.locator(".katex").first.wait_for()
        rows = place.locator(".numbers").evaluate(
            "table => [...table.querySelectorAll('tbody tr')]"
            ".map(row => [...row.querySelectorAll('td')].map(one => one.textContent))"
        )
        return torch.tensor([[number(cell) for cell in row] for row in rows])


def number(cell):
    return float(cell.replace("\u2212", "-").replace("∞", "inf"))


@pytest.fixture
def opened(browser, site, request):
    one = Opened(browser, site, **getattr(request, "param", {}))
    yield one
    one.context.close()
    assert not one.errors
    assert not one.outside


def searched(model, tokenizer, sentence, beams, alpha):
    """Return the translation of the package, its score and its token ids."""
    inputs = tokenizer(sentence, return_tensors="pt")
    settings = {"num_beams": beams, "return_dict_in_generate": True, "output_scores": True}
    settings |= {"length_penalty_alpha": alpha} if beams > 1 else {}
    found = model.generate(**inputs, **settings)
    ids = found.sequences[0, 1:].tolist()
    score = float(found.sequences_scores[0]) if beams > 1 else None
    return tokenizer.decode(ids, skip_special_tokens=True), score, ids


def wasm_of(page):
    """Return the path of the runtime that the page has loaded."""
    names = page.evaluate("performance.getEntriesByType('resource').map(one => one.name)")
    (name,) = [name for name in names if name.endswith(".wasm")]
    return f"assets/{name.rpartition('/')[2]}"


class TestPage:
    pytestmark = in_browser

    def test_the_page_asks_no_other_host_and_logs_no_error(self, opened, model, tokenizer):
        page = opened.open()
        example = page.locator("#sentence").input_value()
        assert example == "In April 2005, Laura moved to Dublin."
        assert opened.translation() == searched(model, tokenizer, example, 4, 0.6)[0]
        assert "dates, times, numbers" in page.locator(".knows").inner_text()
        assert page.locator(".example").count() >= 3
        runtime, model_size = re.search(
            r"Runtime: (\d+\.\d) MB\. Model: (\d+\.\d) MB", page.inner_text("#sizes")
        ).groups()
        sizes = {
            path: page.request.get(f"{opened.site}/{path}").headers["content-length"]
            for path in (*(f"model/{name}" for name in MODEL_FILES), wasm_of(page))
        }
        assert float(runtime) == pytest.approx(int(sizes.pop(wasm_of(page))) / 1e6, abs=0.051)
        assert float(model_size) == pytest.approx(sum(map(int, sizes.values())) / 1e6, abs=0.051)
        policy = page.locator("meta[http-equiv]").get_attribute("content")
        assert "connect-src 'self'" in policy

    @pytest.mark.parametrize(("beams", "alpha"), [(1, 0.6), (2, 0.0), (4, 0.6), (8, 1.8)])
    def test_the_translation_is_that_of_generate(self, beams, alpha, opened, model, tokenizer):
        for sentence in TEXTS:
            page = opened.open(s=sentence, beams=beams, alpha=alpha)
            text, score, _ = searched(model, tokenizer, sentence, beams, alpha)
            assert opened.translation() == text
            cells = page.locator(".is-hypotheses tbody tr").first.locator("td").all_inner_texts()
            total, penalty, shown = map(number, cells[1:])
            assert shown == pytest.approx(total / penalty, abs=2e-3)
            if score is not None:
                assert shown == pytest.approx(score, abs=1e-3)

    def test_the_numbers_of_the_page_are_those_of_the_model(self, opened, model, tokenizer):
        layer, head, step = 2, 3, 3
        opened.open(s=SENTENCE, el=layer, eh=head, dl=layer, dh=head, step=step)
        source = tokenizer(SENTENCE)["input_ids"]
        ids = searched(model, tokenizer, SENTENCE, 4, 0.6)[2]
        values = values_of(model, source, [model.config.decoder_start_token_id, *ids[:-1]])
        boxes = {f"embeddings-{part}": f"encoder.{part}" for part in ("embeddings", "input")}
        boxes |= {"d-embeddings-positions": "decoder.positions"}
        for short, prefix in (
            ("e", "encoder.1.self"),
            ("d", "decoder.1.self"),
            ("c", "decoder.1.cross"),
        ):
            for part in ("query", "key", "value", "scores", "weights", "context", "output"):
                boxes[f"{short}-{part}"] = f"{prefix}.{part}"
            boxes[f"{short}-norm-norm"] = f"{prefix}.norm"
        for short, prefix in (("e", "encoder.1.ff"), ("d", "decoder.1.ff")):
            boxes |= {f"{short}-ff-{part}": f"{prefix}.{part}" for part in ("inner", "output")}
            boxes[f"{short}-ff-norm-norm"] = f"{prefix}.norm"
        boxes["e-norm-before"] = "encoder.0.ff.norm"
        for box, name in boxes.items():
            expected = values[name] if values[name].dim() == 2 else values[name][head - 1]
            of_source = box.startswith("e") or box in ("c-key", "c-value")
            expected = expected if of_source else expected[:step]
            if box == "d-scores":
                future = torch.ones_like(expected).triu(1).bool()
                expected = expected.masked_fill(future, -torch.inf)
            found = opened.numbers(box)
            torch.testing.assert_close(found, expected, **TOLERANCE)
        logits = values["logits"][step - 1]
        found = opened.numbers("next")
        best = logits.topk(9)
        torch.testing.assert_close(found[:9, 0], best.values, **TOLERANCE)
        torch.testing.assert_close(found[:9, 1], logits.softmax(-1)[best.indices], **TOLERANCE)

    def test_each_sentence_is_translated_alone_and_marked_if_the_model_is_unsure(
        self, opened, model, tokenizer
    ):
        sentences = ["The small cat sleeps.", "Dogs!", "Dr. Smith sleeps in the house."]
        found = TranslationPipeline(model, tokenizer, device="cpu")(sentences, return_scores=True)
        means = [one["log_probability"] / len(one["token_log_probabilities"]) for one in found]
        is_unsure = [mean < CALIBRATION["threshold"] for mean in means]
        assert set(is_unsure) == {True, False}, means
        page = opened.open(s="  ".join(sentences))
        assert opened.translation() == " ".join(one["translation_text"] for one in found)
        parts = page.locator("#translation .part")
        marked = "all => all.map(one => one.classList.contains('is-unsure'))"
        assert parts.evaluate_all(marked) == is_unsure
        assert "75% of such translations were poor" in page.locator(".unsure-note").inner_text()
        for part, sentence in enumerate(sentences, start=1):
            parts.nth(part - 1).click()
            opened.settled()
            page.wait_for_function(
                "part => document.querySelectorAll('#translation .part')[part]"
                ".ariaPressed === 'true'",
                arg=part - 1,
            )
            assert opened.numbers("tokens")[:, 0].tolist() == tokenizer(sentence)["input_ids"]
            assert (f"part={part}" in page.url) == (part > 1)
        page.reload()
        page.locator("body[data-ready]").wait_for(timeout=1000 * SECONDS)
        assert opened.numbers("tokens")[:, 0].tolist() == tokenizer(sentences[-1])["input_ids"]
        opened.open(s=sentences[is_unsure.index(False)])
        assert not page.locator("#translation button").count()
        assert not page.locator(".unsure-note").inner_text()

    def test_tokens_are_those_of_the_tokenizer(self, opened, tokenizer):
        for text in HARD_TEXTS:
            opened.open(s=text, beams=1)
            ids = tokenizer(text)["input_ids"]
            if len(ids) > MOST_TOKENS:
                continue
            assert opened.numbers("tokens")[:, 0].tolist() == ids

    @pytest.mark.parametrize(
        "name", ["integer", "fraction", "sine", "pairs", "binary", "sinusoidal"]
    )
    def test_codes_of_positions_are_those_of_the_package(self, name, opened):
        n, d, base = 40, 16, 100.0
        page = opened.open(code=name, n=n, d=d, base=base, open="positions")
        expected = encodings.candidate_encoding(name, n, d, base)
        torch.testing.assert_close(opened.codes(), expected, **TOLERANCE)
        pairs = encodings.collisions(expected, 0.1 * encodings.median_step(expected))
        says = page.locator("#positions .card").nth(1).inner_text()
        assert (f"{pairs} pair" in says) if pairs else ("No two positions are the same" in says)

    def test_a_learned_table_begins_random_and_has_the_same_rows_in_every_text(self, opened):
        tables = []
        for n in (20, 40):
            opened.open(code="learned", n=n, d=16, open="positions")
            tables.append(opened.codes())
        short, long = tables
        assert long.shape == (40, 16)
        torch.testing.assert_close(long[:20], short, **TOLERANCE)
        # as the package begins: normal, with a standard deviation of d ** -0.5
        assert long.std().item() == pytest.approx(0.25, rel=0.1)
        assert abs(long.mean().item()) < 0.03

    def test_every_control_changes_the_page_and_the_link(self, opened):
        page = opened.open(s=SENTENCE)
        page.emulate_media(reduced_motion="reduce")
        seen = {page.url}

        def moved(what):
            opened.settled()
            page.wait_for_function("url => location.href !== url", arg=url, timeout=5000)
            assert page.url not in seen, what
            seen.add(page.url)

        for name, value in (("el", "3"), ("eh", "4"), ("dl", "2"), ("dh", "2"), ("beams", "2")):
            url = page.url
            page.locator(f'label[for="{name}-{value}"]').click()
            moved(name)
        for name, value in (
            *(("step", "2"), ("alpha", "1.5"), ("base", "2"), ("d", "20"), ("n", "30")),
            *(("k", "7"), ("pos", "21")),
        ):
            url = page.url
            page.locator(f"#{name}").fill(value)
            moved(name)
        for value in ("integer", "fraction", "sine", "pairs", "binary", "learned"):
            url = page.url
            page.locator(f'label[for="code-{value}"]').click()
            moved(value)
        for click in (
            page.get_by_label("Next step"),
            page.get_by_label("Show head 1").first,
            page.locator('#e-heads [data-key="q1"]'),
            page.locator('#c-heads [data-key="q0"]'),
            page.locator('[data-box="e-query"] summary'),
            page.locator(".is-theme"),
            page.locator(".top a").nth(2),
            page.locator(".example").nth(1),
        ):
            url = page.url
            click.click()
            moved(str(click))

    def test_the_state_survives_a_reload_of_the_link(self, opened):
        opened.open(
            s=SENTENCE,
            el=3,
            eh=2,
            dl=2,
            dh=4,
            step=2,
            word=1,
            beams=3,
            alpha=1.2,
            code="pairs",
            n=30,
            theme="dark",
            open="e-query,next",
        )
        page = opened.page

        def view():
            opened.settled()
            return {
                "link": page.url,
                "translation": opened.translation(),
                "chosen": page.locator("input:checked").evaluate_all("all => all.map(it => it.id)"),
                "sliders": page.locator("input[type=range]").evaluate_all(
                    "all => all.map(it => it.value)"
                ),
                "open": page.locator("details[open]").count(),
                "theme": page.locator("html").get_attribute("data-theme"),
                "numbers": page.locator('[data-box="e-query"] td').all_inner_texts(),
                "canvas": page.locator("canvas").evaluate_all(
                    "all => all.map(it => it.toDataURL())"
                ),
            }

        before = view()
        assert before["chosen"] == ["el-3", "eh-2", "dl-2", "dh-4", "beams-3", "code-pairs"]
        assert (before["open"], before["theme"]) == (2, "dark")
        page.reload()
        page.locator("body[data-ready]").wait_for(timeout=1000 * SECONDS)
        assert view() == before

    def test_bad_input_gets_a_sentence(self, opened, model, tokenizer):
        page = opened.open(s=SENTENCE)
        translation = opened.translation()
        for given, sentence in (
            ("", "Enter a sentence"),
            ("   ", "Enter a sentence"),
            ("a" * 5000, "at most 1,000 characters, got 5,000"),
            ("😀" * 30, "at most 60 tokens"),
        ):
            page.locator("#sentence").fill(given)
            page.locator("#sentence").press("Enter")
            opened.settled()
            assert sentence in page.locator(".message").inner_text()
            assert opened.translation() == translation
            # the old translation is pale: it is not the answer
            assert float(page.locator(".result").evaluate("it => getComputedStyle(it).opacity")) < 1
        page.locator("#sentence").fill("😀 the cat <i>")
        page.locator("#sentence").press("Enter")
        opened.settled()
        assert page.locator(".message").inner_text() == ""
        expected = searched(model, tokenizer, "😀 the cat <i>", 4, 0.6)[0]
        assert opened.translation() == expected

    def test_sentences_of_the_old_translation_can_be_chosen_after_bad_input(
        self, opened, tokenizer
    ):
        sentences = ["The small cat sleeps.", "Dr. Smith sleeps in the house."]
        page = opened.open(s=" ".join(sentences))
        page.locator("#sentence").fill("")
        page.locator("#sentence").press("Enter")
        assert "Enter a sentence" in page.locator(".message").inner_text()
        page.locator("#translation .part").nth(1).click()
        page.wait_for_function(
            "() => document.querySelectorAll('#translation .part')[1].ariaPressed === 'true'"
        )
        assert opened.numbers("tokens")[:, 0].tolist() == tokenizer(sentences[1])["input_ids"]

    def test_a_link_of_any_kind_opens(self, opened):
        page = opened.open(
            s=SENTENCE,
            el=99,
            eh=-4,
            step="x",
            beams="1e9",
            alpha="NaN",
            code="none",
            base=0,
            d=7,
            n=0,
            k=1000,
            pos=-1,
            word=3.7,
            theme="pink",
            unknown=1,
            open=",,<b>",
        )
        assert opened.translation()
        assert page.locator("#code-sinusoidal").is_checked()
        assert page.locator("#el-3").is_checked()

    def test_words_show_their_weights_to_the_keyboard(self, opened):
        page = opened.open(s=SENTENCE)
        word = page.locator('#e-heads [data-key="q1"]')
        word.focus()
        said = page.locator("#e-heads .said")
        assert re.search(r"takes \d+% from", said.inner_text())
        page.keyboard.press("Enter")
        assert "word=1" in page.url
        assert page.evaluate("document.activeElement.dataset.key") == "q1"
        page.locator('#e-heads [data-key="k0"]').focus()
        assert "is read by" in said.inner_text()
        page.locator("#step").focus()
        page.keyboard.press("ArrowRight")
        assert "step=" in page.url

    def test_a_row_of_the_decoder_says_what_it_reads_and_what_it_writes(
        self, opened, model, tokenizer
    ):
        ids = searched(model, tokenizer, SENTENCE, 4, 0.6)[2]
        page = opened.open(s=SENTENCE, step=2)
        names = page.evaluate("fetch('model/model.json').then(it => it.json())")["tokens"]
        page.locator('#c-heads [data-key="q1"]').focus()
        said = page.locator("#c-heads .said").inner_text()
        assert f"reads “{names[ids[0]]}”, and predicts “{names[ids[1]]}”, takes " in said
        # later rows are not computed yet
        page.locator('#c-heads [data-key="q3"]').dispatch_event("pointerenter")
        assert page.locator("#c-heads .said").inner_text() == said
        page.locator("#step").fill("1")
        opened.settled()
        assert page.get_by_label("Previous step").is_disabled()
        page.locator("#step").fill(str(len(ids)))
        opened.settled()
        assert page.get_by_label("Next step").is_disabled()

    def test_the_tree_says_its_numbers_to_the_keyboard(self, opened):
        page = opened.open(s=SENTENCE)
        node = page.locator("#search .node").nth(3)
        node.focus()
        said = page.locator("#tip").inner_text()
        assert said == node.get_attribute("aria-label")
        assert re.search(r"\d", said)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") != said

    @pytest.mark.parametrize(
        "opened",
        [
            {"viewport": size, "color_scheme": scheme}
            for size in (PHONE, DESKTOP)
            for scheme in ("light", "dark")
        ],
        indirect=True,
        ids=lambda one: f"{one['viewport']['width']}-{one['color_scheme']}",
    )
    def test_nothing_is_wider_than_the_screen_empty_or_tiny(self, opened):
        page = opened.open()
        width = page.viewport_size["width"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # pictures that are there have a size, and something that is drawn
        for canvas in page.locator("canvas").all():
            box = canvas.bounding_box()
            assert box["width"] > 20
            assert box["height"] > 20
        tiny = page.evaluate(
            """() => [...document.querySelectorAll("main *, .hero *, footer *")]
              .filter(one => !one.closest(".katex, svg, .sr, option") && one.childNodes.length
                && [...one.childNodes].some(it => it.nodeType === 3 && it.textContent.trim())
                && parseFloat(getComputedStyle(one).fontSize) < 11)
              .map(one => one.outerHTML.slice(0, 80))"""
        )
        assert not tiny
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll("button, input, svg[role=img], [role=img]")]
              .filter(one => !(one.getAttribute("aria-label") || one.textContent.trim()
                || document.querySelector(`label[for="${one.id}"]`)))
              .map(one => one.outerHTML.slice(0, 80))"""
        )
        assert not unnamed

    def test_the_positions_are_drawn_once_in_a_frame(self, opened):
        page = opened.open(n=128, d=128)
        drawings = page.evaluate(
            """async () => {
                const frame = () => new Promise(requestAnimationFrame);
                const drawings = () => performance.getEntriesByName("positions").length;
                const slider = document.querySelector("#base");
                const numbers = [];
                for (const changes of [1, 20]) {
                    await frame();
                    performance.clearMeasures();
                    for (let change = 1; change <= changes; change++) {
                        slider.value = String(change / 10);
                        slider.dispatchEvent(new Event("input", { bubbles: true }));
                    }
                    await frame();
                    await frame();
                    numbers.push(drawings());
                }
                return numbers;
            }"""
        )
        assert drawings == [1, 1]

    def test_a_missing_model_is_one_sentence(self, browser, site):
        context = browser.new_context()
        page = context.new_page()
        page.route("**/model/model.json", lambda route: route.fulfill(status=404))
        page.goto(site)
        page.locator(".is-error").wait_for()
        assert page.locator(".is-error").inner_text().startswith("The model cannot be loaded.")
        context.close()
