"""Measure time and memory of the search for leaks in synthetic training text.

    python results/leaks/synthetic_pairs.py PAIRS FOLDER

The pairs are those of data/mini-wmt14. Each copy of the corpus rotates the words of every sentence
by another number of words, so that its n-grams differ. FOLDER gets the text as an Arrow file.
"""

import argparse
import resource
import time
from pathlib import Path

import datasets
import pyarrow as pa

from vanilla_transformer.train.data.corpus import load_translations, texts_of
from vanilla_transformer.train.data.leaks import LeakFinder, count_leaks, find_leaks

LANGUAGES = ("en", "de")
NAME = "de-en"


def rotated(text: str, number: int) -> str:
    """Return a sentence whose first words are moved to its end."""
    words = text.split(" ")
    number %= len(words)
    return " ".join(words[number:] + words[:number])


def write_pairs(sides: tuple[list[str], ...], num_pairs: int, path: Path) -> None:
    """Write copies of a corpus to an Arrow file.

    Args:
        sides: Sources and targets of the corpus.
        num_pairs: Number of pairs to write.
        path: New file.
    """
    fields = pa.struct([(language, pa.string()) for language in LANGUAGES])
    schema = pa.schema([("translation", fields)])
    size = len(sides[0])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for copy, first in enumerate(range(0, num_pairs, size)):
            texts = [
                [rotated(text, copy) for text in side[: min(size, num_pairs - first)]]
                for side in sides
            ]
            column = pa.StructArray.from_arrays(
                [pa.array(side, pa.string()) for side in texts], LANGUAGES
            )
            batch = pa.record_batch([column], schema)
            for start in range(0, len(batch), 10_000):
                writer.write_batch(batch.slice(start, 10_000))


def memory(name: str) -> float:
    """Return a size of this process in GiB: RssAnon for its own memory, VmHWM for the peak."""
    (line,) = (it for it in Path("/proc/self/status").read_text().splitlines() if name in it)
    return int(line.split()[1]) / 2**20


def main() -> None:
    """Write the text, search in it, and print time and memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", type=int, help="number of training pairs")
    parser.add_argument("folder", type=Path, help="folder of the Arrow file")
    flags = parser.parse_args()
    splits = load_translations("data/mini-wmt14", NAME, *LANGUAGES)
    texts = {
        name: texts_of(rows.with_format("arrow")[:], LANGUAGES, name)
        for name, rows in splits.items()
    }
    path = flags.folder / "train.arrow"
    if not path.exists():
        flags.folder.mkdir(parents=True, exist_ok=True)
        write_pairs(texts["train"], flags.pairs, path)
    rows = datasets.Dataset.from_file(str(path))
    sources, targets = (
        texts["validation"][side] + texts["test"][side] for side in range(len(LANGUAGES))
    )
    del texts, splits
    print(f"{len(rows):,} pairs, {path.stat().st_size / 2**30:.2f} GiB of text")
    started = time.monotonic(), time.process_time()
    hits = find_leaks([rows], [f"rotated {len(rows)}"], LeakFinder(sources, targets, LANGUAGES))
    print(count_leaks(hits))
    wall, cpu = time.monotonic() - started[0], time.process_time() - started[1]
    print(f"{wall / 60:.1f} minutes, {cpu / 60:.1f} minutes of CPU time")
    print(
        f"own memory at the end {memory('RssAnon'):.2f} GiB, peak with pages of the file "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )


if __name__ == "__main__":
    main()
