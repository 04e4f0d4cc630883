"""Write the digests of released code into the package: `make digests`.

Digests of the library's models are written for the installed version of transformers. Digests for
other versions stay.
"""

import pprint
import re
import sys
from pathlib import Path

import transformers

from vanilla_transformer.conversion.library_code import DIFFERENT, library_digests
from vanilla_transformer.released_code_vanilla_transformer import digests_of

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "released_code_vanilla_transformer.py"
LIBRARY_TABLE = ROOT / "conversion" / "library_code.py"
# released files, and the names that the engine depends on; all names if there is no list
FILES: dict[str, tuple[str, ...]] = {
    "modeling_vanilla_transformer.py": (),
    "train/devices/cpu_kernels.py": ("CheapDropout", "OneDnnLinear", "half_precision_attention"),
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
    write_table(TABLE, "RELEASED", current_digests())
    versions = {version: library_digests(version) for version in DIFFERENT}
    versions = dict(sorted({**versions, VERSION: current_library_digests()}.items()))
    shared = {
        module: {
            name: digest
            for name, digest in table.items()
            if all(it[module].get(name) == digest for it in versions.values())
        }
        for module, table in versions[VERSION].items()
    }
    different = {
        version: {
            module: {name: digest for name, digest in table.items() if name not in shared[module]}
            for module, table in tables.items()
        }
        for version, tables in versions.items()
    }
    write_table(LIBRARY_TABLE, "SHARED", shared)
    write_table(LIBRARY_TABLE, "DIFFERENT", different)


def write_table(path, name, table):
    """Replace a table of a file as Python, which the formatter then puts into lines."""
    text = path.read_text(encoding="utf-8")
    before, line, after = re.split(f"^({name}: .* = )", text, maxsplit=1, flags=re.M)
    rest = after.partition("\n}\n")[2]
    lines = pprint.pformat(table, sort_dicts=False)[1:-1]
    path.write_text(f"{before}{line}{{\n{lines}\n}}\n{rest}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
