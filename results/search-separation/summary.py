"""Print the speed of two versions, medians over the repeats: `python summary.py repeats`."""

import json
import statistics
import sys
from pathlib import Path

CONTENDERS = ("this package", "this package int8")
found: dict = {}
for path in sorted(Path(sys.argv[1]).glob("*-*/study.json")):
    version = path.parent.name.partition("-")[0]
    (section,) = json.loads(path.read_text(encoding="utf-8"))["sections"].values()
    for row in section["rows"]:
        row = dict(zip(section["columns"], row, strict=True))
        if row["contender"] in CONTENDERS:
            speeds = found.setdefault((row["search"], row["contender"]), {"old": [], "new": []})
            speeds[version].append((row["tokens/s"], row["ratio"]))
ends = "lowest | highest | relative to Marian |"
print("| search | | old, tokens/s | new, tokens/s | new / old |", ends)
print("|---|---|--:|--:|--:|--:|--:|--:|")
for (search, contender), speeds in found.items():
    pairs = list(zip(speeds["old"], speeds["new"], strict=True))
    ratios = [new[0] / old[0] for old, new in pairs]
    beside = statistics.median(new[1] for _, new in pairs)
    beside /= statistics.median(old[1] for old, _ in pairs)
    old, new = (statistics.median(speed for speed, _ in speeds[version]) for version in speeds)
    print(
        f"| {search} | {contender} | {old:.4g} | {new:.4g} | {statistics.median(ratios):.3f} "
        f"| {min(ratios):.3f} | {max(ratios):.3f} | {beside:.3f} |"
    )
