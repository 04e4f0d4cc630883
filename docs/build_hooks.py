"""Hooks of `make docs`: pages for linked files of the repository, reference pages, formulas.

The Markdown of `docs/` links to source files and results as GitHub shows them. The site has a page
for each of them under `repository/`.
"""

import contextlib
import html
import io
import json
import os
import posixpath
import re
import tempfile
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# the folder of the site for files that are not in docs/
OUTSIDE = "repository"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^\s*(`{3,})")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".txt": "text",
    "": "text",
}
MAX_CODE_BYTES = 200_000
HELP_COLUMNS = "90"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)

_package = tempfile.TemporaryDirectory()


# before mkdocstrings reads its settings
@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show mkdocstrings the package under its name, whatever the checkout is called."""
    package = Path(_package.name) / "vanilla_transformer"
    package.mkdir(exist_ok=True)
    for path in [*ROOT.glob("*.py"), *(init.parent for init in ROOT.glob("*/__init__.py"))]:
        if not (package / path.name).exists():
            (package / path.name).symlink_to(path)
    handlers = config.plugins["mkdocstrings"].config.handlers
    handlers.setdefault("python", {})["paths"] = [_package.name]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page or a copy of each file outside of `docs/` that a page links to."""
    waiting = [
        (f"docs/{file.src_uri}", file.content_string)
        for file in files.documentation_pages()
        if file.src_uri.endswith(".md")
    ]
    while waiting:
        source, text = waiting.pop()
        for target in _targets(source, text):
            name = _page_name(target)
            if name is None or name in files.src_uris:
                continue
            path = ROOT / target
            if not name.endswith(".md"):
                files.append(File.generated(config, name, abs_src_path=str(path)))
                continue
            content = _page_of(path)
            files.append(File.generated(config, name, content=content))
            waiting.append((_readable(target), content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of `docs/` to the pages of the site, and fill the reference pages."""
    if page.file.src_uri == "reference/cli.md":
        markdown = re.sub(r"<!-- commands.*?-->", lambda _: _commands(), markdown)
    if page.file.src_uri == "reference/recipes.md":
        markdown = re.sub(r"<!-- recipes.*?-->", lambda _: _recipes(), markdown)
    source = _repository_path(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match) -> str:
        target = _target(source, link[2])
        name = None if target is None else _page_name(target)
        if name is None or name not in files.src_uris:
            return link[0]
        _, mark, place = link[2].partition("#")
        return f"{link[1]}{posixpath.relpath(name, here or '.')}{mark}{place}{link[3]}"

    return "".join(
        line if is_code else LINK.sub(rewritten, line) for line, is_code in _lines(markdown)
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn formulas into MathML, which browsers show without a script."""
    return FORMULA.sub(_mathml, html)


def _mathml(formula: re.Match) -> str:
    display = "inline" if formula[2] == "(" else "block"
    return convert(html.unescape(formula[3]).strip(), display=display)


def _lines(markdown: str):
    """Yield each line, and whether it is inside a block of code."""
    fence = None
    for line in markdown.splitlines(keepends=True):
        mark = FENCE.match(line)
        if mark and fence is None:
            fence = mark[1]
            yield line, True
        elif mark and mark[1] == fence:
            fence = None
            yield line, True
        else:
            yield line, fence is not None


def _targets(source: str, markdown: str) -> list[str]:
    """Return the files and folders of the repository that a page links to."""
    text = "".join(line for line, is_code in _lines(markdown) if not is_code)
    found = (_target(source, link[2]) for link in LINK.finditer(text))
    return [target for target in found if target is not None]


def _target(source: str, link: str) -> str | None:
    """Return the path in the repository that a relative link names, or None."""
    path = link.partition("#")[0]
    if not path or ":" in path or path.startswith("/"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    return target if (ROOT / target).exists() and not target.startswith("..") else None


def _readable(target: str) -> str:
    """Return the file that is shown for a file or folder."""
    if not (ROOT / target).is_dir():
        return target
    has_page = (ROOT / target / "README.md").exists()
    return f"{target}/README.md" if has_page else f"{target}/index"


def _page_name(target: str) -> str | None:
    """Return the name in the site's sources of a file or folder of the repository."""
    path = ROOT / target
    shown = _readable(target)
    if shown.startswith("docs/") and not shown.endswith(".ipynb"):
        return shown.removeprefix("docs/")
    if path.is_dir() or path.suffix == ".ipynb":
        return f"{OUTSIDE}/{shown}" if shown.endswith(".md") else f"{OUTSIDE}/{shown}.md"
    if path.suffix == ".md":
        return f"{OUTSIDE}/{target}"
    if path.suffix in LANGUAGES and path.stat().st_size <= MAX_CODE_BYTES:
        return f"{OUTSIDE}/{target}.md"
    return f"{OUTSIDE}/{target}"


def _repository_path(name: str) -> str:
    """Return the path in the repository of a page, by its name in the site's sources."""
    if name.startswith(f"{OUTSIDE}/"):
        return name.removeprefix(f"{OUTSIDE}/")
    return f"docs/{name}"


def _page_of(path: Path) -> str:
    if path.is_dir():
        if (path / "README.md").exists():
            return (path / "README.md").read_text(encoding="utf-8")
        return _listing(path)
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return _notebook(path)
    text = path.read_text(encoding="utf-8")
    fence = "`" * (2 + max(map(len, re.findall("`+", text)), default=1))
    title = path.relative_to(ROOT).as_posix()
    return (
        f"---\nsearch:\n  exclude: true\n---\n# `{title}`\n\n"
        f"{fence}{LANGUAGES[path.suffix]}\n{text.rstrip()}\n{fence}\n"
    )


def _listing(folder: Path) -> str:
    """List the files of a folder, with links to those that are shown as pages."""
    lines = [f"---\nsearch:\n  exclude: true\n---\n# `{folder.relative_to(ROOT).as_posix()}/`\n"]
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__pycache__")):
            continue
        is_page = path.suffix in LANGUAGES and path.is_file()
        name = f"{path.name}/" if path.is_dir() else path.name
        lines.append(f"* [{name}]({path.name})" if is_page else f"* {name}")
    return "\n".join(lines) + "\n"


def _notebook(path: Path) -> str:
    """Return the cells of a notebook as Markdown, with what they printed and drew."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = "".join(data["image/png"]).replace("\n", "")
                parts.append(
                    f'<img alt="output of the cell" src="data:image/png;base64,{picture}">'
                )
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _commands() -> str:
    """Return the help of every command."""
    from vanilla_transformer import cli
    from vanilla_transformer.paper.__main__ import STUDIES

    (verbs,) = (action.choices for action in cli._parser()._actions if action.choices)
    parts = []
    for verb in verbs:
        parts.append(f"## {verb}\n\n{_help([verb])}")
        parts += [_help([verb, study]) for study in STUDIES if verb == "paper"]
    return "\n\n".join(parts)


def _help(words: list[str]) -> str:
    from vanilla_transformer.cli import main

    os.environ["COLUMNS"] = HELP_COLUMNS
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    command = f"vanilla-transformer {' '.join(words)} --help"
    return f'```text title="{command}"\n{printed.getvalue().rstrip()}\n```'


def _recipes() -> str:
    """Return every recipe: what it reproduces, and its settings."""
    recipes = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "train" / "recipes").glob("*.yaml"))
    }
    first_lines = {name: text.splitlines()[0].removeprefix("# ") for name, text in recipes.items()}
    rows = [f"| [{name}](#{name.lower()}) | {line} |" for name, line in first_lines.items()]
    table = "\n".join(["| recipe | reproduces |", "|---|---|", *rows])
    settings = [f"## {name}\n\n```yaml\n{text.rstrip()}\n```" for name, text in recipes.items()]
    return "\n\n".join([table, *settings])
