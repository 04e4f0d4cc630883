"""The pages of docs/: code runs, quoted lines match the source, and links are valid."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
from document_blocks import (
    NUMBER,
    ROOT,
    SHELL_PAGES,
    SMALL,
    TRAINING,
    blocks,
    commands,
    train_small_demo,
)
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from library_models import make_marian, make_nllb, make_pieces
from nbclient import NotebookClient

from vanilla_transformer.cli import _parser, main
from vanilla_transformer.paper.__main__ import STUDIES

DOCS = ROOT / "docs"
PAGES = {
    page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8")
    for page in sorted(DOCS.rglob("*.md"))
}
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
PAPER = "results/paper"
STUDY_FOLDER = ROOT / PAPER
# these end in seconds; of the others, which their own tests compute, only the flags are read
QUICK = ("example", "scaling", "schedule", "curve", "table4")
# each block of these pages needs what the ones before it have left
IN_ORDER = "guides/serve.md"
CHANGE = "guides/change-the-model.md"
# tests/serving/test_serve.py runs its blocks with a server
HTTP = "guides/http.md"
# their first table; tests/test_readme.py compares it with the numbers of the runs
CHECKED_ELSEWHERE = ("results/README.md", "results/speed.md")
PEERS = ROOT / "tests" / "peers"
# names of models on the Hub: a folder of this name is taken in its place
LIBRARY_MODELS = {
    "Helsinki-NLP/opus-mt-en-de": make_marian,
    "facebook/nllb-200-distilled-600M": make_nllb,
}
TREES = ["(S (NP (PRP We)) (VP (VBD saw) (NP (DT the) (NN moon))) (. .))"] * 40


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """Return a folder with the run of the demo, texts, a treebank, and models of other toolkits."""
    folder = tmp_path_factory.mktemp("reader")
    train_small_demo(folder)
    (folder / "my").mkdir()
    (folder / "my" / "sentences.txt").write_text("See you on Monday.\n", encoding="utf-8")
    (folder / "my" / "translations.txt").write_text("Bis Montag.\n", encoding="utf-8")
    for split in ("train", "test"):
        (folder / "my" / f"{split}.mrg").write_text("\n".join(TREES), encoding="utf-8")
    shutil.copytree(PEERS / "fairseq-post", folder / "my" / "fairseq")
    shutil.copytree(PEERS / "opennmt", folder / "my" / "opennmt")
    shutil.copytree(PEERS / "joeynmt-pieces", folder / "my" / "joeynmt")
    pieces = make_pieces(tmp_path_factory.mktemp("pieces"))
    for name, make in LIBRARY_MODELS.items():
        for part in make(pieces, tmp_path_factory.mktemp("vocabulary")):
            part.save_pretrained(folder / name)
    return folder


def without_blocks(text):
    """Return the prose and the tables of a page."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text):
    """Return the targets of the links and pictures of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", without_blocks(text))


def of_every_page(find, without=(IN_ORDER, CHANGE, HTTP, *SHELL_PAGES)):
    """Return the results of `find` for each page, as cases of a test."""
    return [
        pytest.param(found, id=f"{name}-{number}")
        for name, text in PAGES.items()
        if name not in without
        for number, found in enumerate(find(text))
    ]


def python_blocks(text):
    """Return each block that runs, with its output on the page."""
    found = blocks(text, "python", "text")
    after = [*found, ("", "")][1:]
    return [
        (block, output if kind == "text" else "")
        for (language, block), (kind, output) in zip(found, after, strict=True)
        if language == "python"
    ]


def bash_blocks(text):
    return [block for _, block in blocks(text, "bash")]


def excerpts(text):
    """Return each block of our source, with the last file that is linked before it."""
    return [
        (re.findall(r"\]\(\.\./\.\./([^)\s]+\.py)\)", text[: block.start()])[-1], block.group(1))
        for block in re.finditer(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_and_picture_of_a_page_is_there(name):
    found = [link for link in links(PAGES[name]) if "://" not in link]
    assert found
    for link in found:
        path, _, place = link.partition("#")
        target = (DOCS / name).parent / path if path else DOCS / name
        assert target.exists(), link
        if place:
            headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
            # as GitHub names them
            assert place in [
                re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings
            ]


@pytest.mark.parametrize("name", PAGES)
def test_nothing_but_a_row_follows_a_row_of_a_table(name):
    # GitHub makes a cell of it
    assert not re.findall(r"^\|.*\n[^|\n].*", without_blocks(PAGES[name]), re.MULTILINE)


def test_the_index_leads_to_every_page():
    notebooks = {path.relative_to(DOCS).as_posix() for path in NOTEBOOKS}
    assert {*PAGES, *notebooks} - {"README.md"} <= set(links(PAGES["README.md"]))


def test_the_navigation_leads_to_every_page():
    named = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(PAGES)


def test_every_picture_that_a_page_shows_is_in_docs_and_every_one_there_is_shown():
    shown = set()
    others = [ROOT / "README.md", *(ROOT / PAPER).glob("*/README.md")]
    outside = {os.path.relpath(path, DOCS): path.read_text("utf-8") for path in others}
    for name, text in {**PAGES, **outside}.items():
        for link in links(text):
            if link.endswith((".png", ".svg")):
                shown.add(((DOCS / name).parent / link).resolve())
    assert shown == set(filter(Path.is_file, (DOCS / "pictures").resolve().rglob("*.*")))


def test_every_question_has_a_number_or_a_picture_and_a_link():
    questions, _, next_models = PAGES["questions.md"].partition("## What came next\n")
    answers = re.split(r"^### ", questions, flags=re.MULTILINE)[1:]
    assert len(answers) >= 20
    for answer in answers:
        question, _, text = answer.partition("\n")
        assert question.endswith("?")
        assert re.search(r"^```python|^\|--|^\|---|^!\[", text, re.MULTILINE), question
        assert [link for link in links(text) if link.endswith(".md") or ".md#" in link], question
    for name in ("BERT", "GPT", "MAE"):
        assert f"### {name} keeps the " in next_models


def test_the_table_of_commands_has_every_command():
    (all_commands,) = (action.choices for action in _parser()._actions if action.choices)
    shown = re.findall(r"^\| `([\w-]+)`", PAGES["reference/cli.md"], re.MULTILINE)
    assert shown == list(all_commands)


def test_every_name_of_the_reference_can_be_imported():
    names = [name for text in PAGES.values() for name in re.findall(r"^::: (\S+)", text, re.M)]
    assert len(names) > 20
    for name in names:
        parent, _, last = name.rpartition(".")
        assert hasattr(import_module(parent), last) or import_module(name)


def test_the_site_builds_without_a_broken_link(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "guides/train/index.html", "search/search_index.json"):
        assert (tmp_path / page).exists()
    assert "--tokens_per_step" in (tmp_path / "reference/cli/index.html").read_text("utf-8")
    model = (tmp_path / "reference/api/model/index.html").read_text("utf-8")
    assert "VanillaTransformerForConditionalGeneration.forward" in model
    assert "<math" in (tmp_path / "paper/attention/index.html").read_text("utf-8")


@pytest.mark.parametrize("case", of_every_page(python_blocks))
def test_a_block_of_python_prints_what_the_page_says(case, reader, monkeypatch, capsys):
    monkeypatch.chdir(reader)
    block, output = case
    exec(compile(block, "a block", "exec"), {})
    assert capsys.readouterr().out == output


def test_a_page_of_steps_runs_from_top_to_bottom(reader, monkeypatch, capsys):
    ctranslate2 = pytest.importorskip("ctranslate2")
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    monkeypatch.chdir(reader)
    found = blocks(PAGES[IN_ORDER], "bash", "python")
    assert {language for language, _ in found} == {"bash", "python"}
    for language, block in found:
        if language == "python":
            # tests/test_transformers_4.py runs the program that needs an environment of its own
            if "optimum" not in block:
                exec(compile(block, "a block", "exec"), {})
            continue
        for command in commands(block):
            program, *words = shlex.split(command)
            if program == "ct2-transformers-converter":
                monkeypatch.setattr(sys, "argv", [program, *words])
                ctranslate2.converters.transformers.main()
                continue
            assert program == "vanilla-transformer"
            assert main(words) == 0, command
    assert (reader / "runs" / "demo-marian-ct2" / "model.bin").is_file()
    for kind in ("ct2", "int8", "onnx", "js", "marian", "again"):
        assert (reader / "runs" / f"demo-{kind}" / "tokenizer.json").is_file()
    for folder in ("from-fairseq", "from-opennmt", "from-joeynmt"):
        assert (reader / "runs" / folder / "model.safetensors").is_file()


def test_a_changed_model_goes_from_its_first_line_to_the_hub(
    reader, tmp_path, monkeypatch, capsys, caplog, new_process
):
    caplog.set_level("INFO")
    shutil.copytree(reader / "my", tmp_path / "my")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    saved = re.compile(r"Save this as `(.+?)`[^`]*```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for file, code in saved.findall(PAGES[CHANGE]):
        (tmp_path / file).write_text(code, encoding="utf-8")
    rest = blocks(saved.sub("", PAGES[CHANGE]), "python", "text", "bash")
    for (language, block), (following, output) in zip(rest, [*rest[1:], ("", "")], strict=True):
        if language == "python":
            capsys.readouterr()
            exec(compile(block, "a block", "exec"), {})
            assert capsys.readouterr().out == (output if following == "text" else "")
        for command in commands(block) if language == "bash" else ():
            program, *words = shlex.split(command)
            assert program == "vanilla-transformer"
            words += SMALL if TRAINING.search(command) else []
            if words[0] == "evaluate":
                words += ["--num_beams", "1", "--max_extra_tokens", "1"]
            assert main(words) == 0, command
    assert caplog.text.count("The training loss is that of RDrop.") == 1
    for run, files in (("relative", {"relative.py"}), ("marian", set()), ("rdrop", {"rdrop.py"})):
        assert (tmp_path / "runs" / run / "model.safetensors").is_file()
        assert {path.name for path in (tmp_path / "runs" / run).glob("*.py")} == files


@pytest.mark.parametrize("case", of_every_page(excerpts, without=()))
def test_an_excerpt_matches_the_source_word_for_word(case):
    path, excerpt = case
    assert excerpt in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", of_every_page(bash_blocks))
def test_a_command_of_a_page_is_one(block, reader, monkeypatch, new_process):
    monkeypatch.chdir(reader)
    for command in commands(block):
        program, *words = shlex.split(command)
        assert program == "vanilla-transformer"
        if TRAINING.search(command):
            words += SMALL
        elif words[0] == "paper" and len(words) > 1 and words[1] not in QUICK:
            study = import_module(f"vanilla_transformer.paper.{STUDIES[words[1]].module}")
            monkeypatch.setattr(study, "sections", lambda flags: iter(()))
        elif "--trees" in words:
            words += ["--num_beams", "2", "--num_sentences", "2"]
        elif words[0] == "evaluate":
            # after three steps no sentence ends before its bound
            words += ["--num_beams", "1", "--max_extra_tokens", "1"]
        assert main(words) == 0, command


@pytest.mark.parametrize("name", [name for name in PAGES if name != "paper/README.md"])
def test_the_numbers_of_a_page_are_those_of_the_studies(name):
    text = without_blocks(PAGES[name])
    if name in CHECKED_ELSEWHERE:
        # the first table
        text = re.sub(r"(?:^\|.*\n)+", "", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"\$[^$]*\$|`[^`]*`|\]\([^)]*\)", " ", text)
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    # integers of the prose are mostly those of the paper's sections
    quoted = {*NUMBER.findall(tables), *(one for one in NUMBER.findall(text) if "." in one)}
    sections = set(re.findall(r"\b(?:[Ss]ections?|Python) (\d\.\d+(?:\.\d)?)", text))
    studies = set(re.findall(r"\]\((?:\.\./)+(results/[\w-]+/[\w-]+)/README\.md", PAGES[name]))
    # the pictures of a study of the paper are in a folder with its name
    shown = set(re.findall(r"\]\(\.\./pictures/([\w-]+)/", PAGES[name]))
    studies |= {f"{PAPER}/{one}" for one in shown if (ROOT / PAPER / one).is_dir()}
    # the page of a run is in the folder itself
    runs = set(re.findall(r"\]\((?:\.\./)+(results/[\w-]+)/README\.md[)#]", PAGES[name]))
    pages = [(ROOT / one / "README.md").read_text(encoding="utf-8") for one in studies | runs]
    known = {number for page in pages for number in NUMBER.findall(page)}
    assert len(quoted & known) > 5 or not studies
    assert quoted - sections <= known


def test_a_kept_study_names_its_command_and_where_it_ran():
    kept = sorted(STUDY_FOLDER.glob("*/study.json"))
    assert kept
    for path in kept:
        environment = json.loads(path.read_text(encoding="utf-8"))["environment"]
        assert environment["command"].startswith(f"vanilla-transformer paper {path.parent.name}")
        assert environment["torch"]
        for file in path.parent.glob("*.md"):
            assert environment["command"] in file.read_text(encoding="utf-8")


def printed(notebook):
    """Return the output of each code cell, without pictures."""
    return [
        "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_and_shows_what_it_holds(path, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    kept = nbformat.read(path, as_version=4)
    nbformat.validate(kept)
    notebook = nbformat.read(path, as_version=4)
    # no kernel that was installed elsewhere: the one of this environment
    specs = KernelSpecManager(kernel_dirs=[])
    assert specs.get_kernel_spec("python3").argv[0] in (sys.executable, "python")
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    NotebookClient(notebook, km=manager, timeout=600).execute()
    assert printed(notebook) == printed(kept)
    pictures = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= (6 if path.stem == "positional_encoding" else 2)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_questions_answers_and_links_that_lead_somewhere(path):
    cells = nbformat.read(path, as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    questions, answers = text.split("\n## Answers\n")
    numbers = re.findall(r"^> \*\*Question (\d+)\.\*\*", questions, re.MULTILINE)
    assert len(numbers) >= 8
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert re.findall(r"^\*\*(\d+)\.\*\*", answers, re.MULTILINE) == numbers
    targets = [link.partition("#")[0] for link in links(text) if "://" not in link]
    assert targets
    for target in targets:
        assert (path.parent / target).exists(), target
