"""Convert line-aligned text to a dataset of JSON lines, as the commands of results/ read it.

    python results/prepare_pairs.py FOLDER NAME SPLIT=PREFIX [SPLIT=PREFIX ...] [--join_bpe]
        [--train_pairs N]

NAME, such as en-de, is the name of the configuration and the pair of languages. The files
PREFIX.en and PREFIX.de (.gz too) become FOLDER/NAME/SPLIT.jsonl. FOLDER/README.md, the list of all
configurations, is replaced. --train_pairs keeps N random pairs of the split train, the same ones
each time.
"""

import argparse
import gzip
import json
import random
from pathlib import Path


def read_lines(prefix: str, language: str, join_bpe: bool) -> list[str]:
    """Read one side of a split.

    Args:
        prefix: Path without the language.
        language: Language code, the extension of the file.
        join_bpe: Whether to undo BPE: to join subwords by removing "@@ ".

    Returns:
        The lines, without their ends.
    """
    path = Path(f"{prefix}.{language}")
    data = path.read_bytes() if path.is_file() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    text = data.decode("utf-8")
    lines = text.removesuffix("\n").split("\n")
    return [line.replace("@@ ", "") if join_bpe else line for line in lines]


def main() -> None:
    """Write the splits and the list of configurations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the dataset")
    parser.add_argument("name", help="configuration, such as en-de")
    parser.add_argument("splits", nargs="+", metavar="SPLIT=PREFIX", help="text of each split")
    parser.add_argument("--join_bpe", action="store_true", help='remove "@@ " from the text')
    parser.add_argument("--train_pairs", type=int, help="number of random training pairs to keep")
    flags = parser.parse_args()
    languages = flags.name.split("-")
    (flags.folder / flags.name).mkdir(parents=True, exist_ok=True)
    for pair in flags.splits:
        split, prefix = pair.split("=", 1)
        sides = [read_lines(prefix, language, flags.join_bpe) for language in languages]
        if split == "train" and flags.train_pairs is not None:
            kept = sorted(random.Random(1).sample(range(len(sides[0])), flags.train_pairs))
            sides = [[side[number] for number in kept] for side in sides]
        path = flags.folder / flags.name / f"{split}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for texts in zip(*sides, strict=True):
                record = {"translation": dict(zip(languages, texts, strict=True))}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{path}: {len(sides[0]):,} pairs")
    names = sorted(path.parent.name for path in flags.folder.glob("*/train.jsonl"))
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in names)
    (flags.folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")


if __name__ == "__main__":
    main()
