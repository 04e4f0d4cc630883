"""The installed package: a wheel with every module, cheap imports, one copy of each class."""

import ast
import configparser
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import translation_toys

from vanilla_transformer.console import EXTRA_OF_PACKAGE

ROOT = Path(__file__).parent.parent
DATA = (
    "py.typed",
    "train/recipes/*.yaml",
    "train/launch/*",
    "space/README.md",
    "space/requirements.txt",
)
NOT_SHIPPED = {"tests", "results", "benchmarks", "docs", "site", "build", "dist", "runs"}


def python(code, *arguments, cwd, path=None):
    """Run code in a clean process; `path` is where the package is, instead of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(path) if path else ""}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the checkout: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            copy = folder / "checkout" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, folder / "checkout"], check=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_module_and_recipe(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = [
        path.relative_to(ROOT)
        for pattern in ("*.py", "*/**/*.py", *DATA)
        for path in ROOT.glob(pattern)
        if not path.relative_to(ROOT).parts[0].startswith(".")
        and path.relative_to(ROOT).parts[0] not in NOT_SHIPPED
        # packages of the explainer's page
        and "node_modules" not in path.parts
    ]
    assert len(shipped) > 20
    missing = [str(path) for path in shipped if f"vanilla_transformer/{path}" not in names]
    assert not missing
    extra = [name for name in names if name.startswith(("tests/", "vanilla_transformer/tests"))]
    assert not extra


def test_an_installed_wheel_trains_and_translates(wheel, tmp_path):
    installed = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", installed, wheel],
        check=True,
    )
    code = """
import sys
# an editable install would find the checkout first
sys.meta_path = [f for f in sys.meta_path if "editable" not in str(f).lower()]
import vanilla_transformer
from vanilla_transformer.train.__main__ import main
assert vanilla_transformer.__file__.startswith(sys.argv[1]), vanilla_transformer.__file__
small = "{hidden_size: 16, encoder_layers: 1, decoder_layers: 1, encoder_ffn_dim: 16}"
assert main(["demo", "--max_steps", "2", "--vocab_size", "300", "--model", small]) == 0
from transformers import pipeline
print(pipeline("translation", model="runs/demo")("Hello", max_new_tokens=3))
"""
    out = python(code, str(installed), cwd=tmp_path, path=installed)
    assert "translation_text" in out


# hides the packages of the extras, as if `pip install .` had been all
WITHOUT_EXTRAS = """
import importlib.abc, sys
from vanilla_transformer.console import EXTRA_OF_PACKAGE
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in EXTRA_OF_PACKAGE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["vanilla-transformer", *sys.argv[1:]]
from vanilla_transformer.cli import main
sys.exit(main())
"""


def test_the_wheel_without_extras_translates_and_names_the_extra_of_other_commands(wheel, tmp_path):
    installed = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", installed]
    subprocess.run([*install, wheel], check=True)
    tokenizer = translation_toys.make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    translation_toys.make_model(tokenizer).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Two dogs run.\nA man.\n", encoding="utf-8")
    out = python(WITHOUT_EXTRAS, "translate", "model", "text.txt", cwd=tmp_path, path=installed)
    assert out.count("\n") == 2
    for arguments, package, extra in (
        (["train", "demo"], "datasets", "train"),
        (["evaluate", "model"], "datasets", "train"),
        (["paper", "schedule"], "matplotlib", "train"),
        (["space"], "gradio", "space"),
        (["serve", "model"], "uvicorn", "serve"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_EXTRAS, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert done.stderr == (
            f"error: this command needs the package {package}, which is not installed: pip install "
            f"'vanilla_transformer[{extra}]', or in a clone '.[{extra}]'.\n"
        )


def test_every_package_of_an_extra_is_declared_in_it():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    for package, extra in EXTRA_OF_PACKAGE.items():
        # pyarrow comes with datasets; a module may have another name than its package
        others = {"pyarrow": "datasets", "python_multipart": "python-multipart"}
        assert others.get(package, package) in extras[extra].lower()
        assert f"\n{package}" not in setup["options"]["install_requires"].lower()


def test_importing_the_package_leaves_training_out(tmp_path):
    code = "import sys, json, vanilla_transformer; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(python(code, cwd=tmp_path))
    assert "transformers" in loaded
    heavy = ("datasets", "matplotlib", "sacrebleu", "babel", "num2words")
    assert not [name for name in heavy if name in loaded]
    assert not [name for name in loaded if name.startswith("vanilla_transformer.train")]


def test_help_imports_no_library(tmp_path):
    code = """
import sys
sys.argv = ["/somewhere/vanilla-transformer", "--help"]
from vanilla_transformer.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0
assert not [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
import vanilla_transformer
assert vanilla_transformer.VanillaTransformerConfig().d_model == 512
from transformers import AutoConfig
assert AutoConfig.for_model("vanilla_transformer").d_model == 512
"""
    assert "usage: vanilla-transformer" in python(code, cwd=tmp_path)


def test_a_script_with_the_name_of_the_command_gets_the_classes(tmp_path):
    code = """
import sys
sys.argv = ["/somewhere/vanilla-transformer.py"]
import vanilla_transformer
from transformers import AutoConfig
assert AutoConfig.for_model("vanilla_transformer").d_model == 512
"""
    python(code, cwd=tmp_path)


def test_the_module_of_the_command_shows_its_help_without_a_library(tmp_path):
    words = [sys.executable, "-X", "importtime", "-m", "vanilla_transformer.cli", "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "usage: vanilla-transformer" in done.stdout
    assert "vanilla_transformer.console\n" in done.stderr
    assert not re.search(r"\| +(torch|transformers|numpy)\n", done.stderr)


def test_the_auto_classes_give_the_public_ones(tmp_path):
    code = """
import transformers
import vanilla_transformer as ours
config = ours.VanillaTransformerConfig(d_model=16, encoder_layers=1, decoder_layers=1)
assert type(transformers.AutoModel.from_config(config)) is ours.VanillaTransformerModel
model = transformers.AutoModelForSeq2SeqLM.from_config(config)
assert type(model) is ours.VanillaTransformerForConditionalGeneration
tokenizer = ours.VanillaTransformerTokenizer()
model.save_pretrained("m")
tokenizer.save_pretrained("m")
assert type(transformers.AutoTokenizer.from_pretrained("m")) is ours.VanillaTransformerTokenizer
assert type(transformers.AutoConfig.from_pretrained("m")) is ours.VanillaTransformerConfig
"""
    python(code, cwd=tmp_path)


def test_every_file_the_library_lints_is_linted():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    patterns = ("modeling_*.py", "configuration_*.py", "generation_*.py", "tokenization/token*.py")
    files = [path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern)]
    assert len(files) >= 4
    assert [str(path) for path in files if str(path) not in makefile] == []


def test_every_link_of_the_readme_leads_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_package_is_declared():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = set(setup["options"]["packages"].split())
    folders = [path.parent.relative_to(ROOT) for path in ROOT.glob("[!.]*/**/__init__.py")]
    found = {
        ".".join(("vanilla_transformer", *folder.parts))
        for folder in folders
        if folder.parts[0] not in NOT_SHIPPED
    }
    assert declared == found | {"vanilla_transformer"}


def test_nothing_at_the_root_imports_training():
    files = [path for path in ROOT.glob("*.py") if path.name not in ("cli.py", "__init__.py")]
    assert len(files) > 5
    for path in files:
        imported = re.findall(r"^from (\S+) import", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert [name for name in imported if name.startswith(".train")] == [], path.name


def test_the_package_imports_itself_by_relative_names():
    absolute = set()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")]:
        name = path.relative_to(ROOT)
        if name.parts[0] in NOT_SHIPPED - {"benchmarks"}:
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        modules = [it.module for it in nodes if isinstance(it, ast.ImportFrom) and not it.level]
        if any(module.startswith("vanilla_transformer") for module in modules):
            absolute.add(str(name))
    assert absolute == {"__init__.py", "space/app.py"}


def test_commits_are_linted_by_the_ruff_that_is_tested():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    pins = set(re.findall(r"\[(ruff==\S+)\]", hooks))
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert pins == {line for line in constraints if line.startswith("ruff==")}
