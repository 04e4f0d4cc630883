"""Print the speed of two versions relative to Marian in the same repeat: relative.py OUT."""

import json
import statistics
import sys
from pathlib import Path

MARIAN = "transformers Marian"
found = {}
for path in sorted(Path(sys.argv[1]).glob("*-*/study.json")):
    version, _ = path.parent.name.split("-")
    (section,) = json.loads(path.read_text())["sections"].values()
    rows = [dict(zip(section["columns"], row, strict=True)) for row in section["rows"]]
    marian = {row["search"]: row["tokens/s"] for row in rows if row["contender"] == MARIAN}
    for row in rows:
        if row["contender"] != MARIAN:
            ratios = found.setdefault((row["search"], row["contender"]), {"old": [], "new": []})
            ratios[version].append(row["tokens/s"] / marian[row["search"]])
print("| search | | old | new | new / old |")
print("|---|---|--:|--:|--:|")
for (search, contender), ratios in found.items():
    old, new = (statistics.median(ratios[version]) for version in ("old", "new"))
    print(f"| {search} | {contender} | {old:.3f} | {new:.3f} | {new / old:.3f} |")
