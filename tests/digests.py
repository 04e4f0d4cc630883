"""Write the digests of the released code into the package: `make digests`."""

import sys
from pathlib import Path

from vanilla_transformer.identity_vanilla_transformer import digests_of

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "identity_vanilla_transformer.py"
BEGIN, END = "RELEASED: dict[str, dict[str, str]] = {", "}\n\n__all__"
# released files, and the names that the engine depends on; all names if there is no list
FILES: dict[str, tuple[str, ...]] = {
    "modeling_vanilla_transformer.py": (),
    "train/fused.py": ("CheapDropout", "OneDnnLinear", "attention_in_float32"),
}


def current_digests():
    """Compute the digests of the files as they are, by module and name."""
    tables = {}
    for file, names in FILES.items():
        digests = digests_of((ROOT / file).read_text(encoding="utf-8"))
        kept = names or sorted(digests)
        tables[Path(file).stem] = {name: digests[name] for name in kept}
    return tables


def main():
    """Rewrite the table of digests."""
    lines = []
    for module, digests in current_digests().items():
        lines += [f'    "{module}": {{\n']
        lines += [f'        "{name}": "{digest}",\n' for name, digest in digests.items()]
        lines += ["    },\n"]
    text = TABLE.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.rindex(END)
    TABLE.write_text(text[:begin] + "\n" + "".join(lines) + text[end:], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
