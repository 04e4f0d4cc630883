"""Write the digests of released code into the package: `make digests`.

Digests of the library's models are written for the installed version of transformers. Digests for
other versions stay.
"""

import pprint
import sys
from pathlib import Path

import transformers

from vanilla_transformer.conversion.library_code import LIBRARY_CODE
from vanilla_transformer.identity_vanilla_transformer import digests_of

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "identity_vanilla_transformer.py"
LIBRARY_TABLE = ROOT / "conversion" / "library_code.py"
BEGIN = "RELEASED: dict[str, dict[str, str]] = "
LIBRARY_BEGIN = "LIBRARY_CODE: dict[str, dict[str, dict[str, str]]] = "
# released files, and the names that the engine depends on; all names if there is no list
FILES: dict[str, tuple[str, ...]] = {
    "modeling_vanilla_transformer.py": (),
    "train/devices/cpu_kernels.py": ("CheapDropout", "OneDnnLinear", "attention_in_float32"),
}
LIBRARY_FILES = (
    "models/marian/modeling_marian.py",
    "models/fsmt/modeling_fsmt.py",
    "models/m2m_100/modeling_m2m_100.py",
)
VERSION = transformers.__version__.rsplit(".", 1)[0]


def current_digests():
    """Compute the digests of the package's files as they are, by module and name."""
    tables = {}
    for file, names in FILES.items():
        digests = digests_of((ROOT / file).read_text(encoding="utf-8"))
        tables[Path(file).stem] = {name: digests[name] for name in names or sorted(digests)}
    return tables


def current_library_digests():
    """Compute the digests of the installed library's files, by module and name."""
    folder = Path(transformers.__file__).parent
    texts = {Path(file).stem: (folder / file).read_text(encoding="utf-8") for file in LIBRARY_FILES}
    return {name: dict(sorted(digests_of(text).items())) for name, text in texts.items()}


def main():
    """Rewrite the tables of digests."""
    write_table(TABLE, BEGIN, current_digests())
    versions = {**LIBRARY_CODE, VERSION: current_library_digests()}
    write_table(LIBRARY_TABLE, LIBRARY_BEGIN, dict(sorted(versions.items())))


def write_table(path, begin, table):
    """Write a table at the end of a file as Python, which the formatter then puts into lines."""
    text = path.read_text(encoding="utf-8")
    table_text = pprint.pformat(table, sort_dicts=False)
    path.write_text(text[: text.index(begin) + len(begin)] + table_text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
