"""The same pairs written to every kind of file that a corpus may be."""

import bz2
import csv
import gzip
import io
import json
import lzma
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import datasets

OPENERS = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def as_tsv(pairs, header=("en", "de")):
    return "".join("\t".join(row) + "\n" for row in [header, *pairs] if row)


def as_csv(pairs, header=("en", "de"), delimiter=","):
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([header, *pairs])
    return text.getvalue()


def as_jsonl(pairs):
    return "".join(json.dumps({"en": source, "de": target}) + "\n" for source, target in pairs)


def as_records(pairs):
    rows = [{"translation": {"en": source, "de": target}} for source, target in pairs]
    return "".join(json.dumps(row) + "\n" for row in rows)


def unit(*texts):
    """Return a unit of a translation memory, of texts with their language tags."""
    return "<tu>{}</tu>".format(
        "".join(f"<tuv xml:lang={quoteattr(tag)}><seg>{seg}</seg></tuv>" for tag, seg in texts)
    )


def memory(*units):
    """Return a translation memory as other programs write it."""
    body = "\n".join(units)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n'
        '<tmx version="1.4"><header srclang="en" segtype="sentence"/>\n'
        f"<body>\n{body}\n</body></tmx>\n"
    )


def as_tmx(pairs):
    return memory(
        *(unit(("en-GB", escape(source)), ("de", escape(target))) for source, target in pairs)
    )


# text of a file for some pairs, by the end of its name
KINDS = {
    "header.tsv": as_tsv,
    "plain.tsv": lambda pairs: as_tsv(pairs, header=None),
    "comma.csv": as_csv,
    "semicolon.csv": lambda pairs: as_csv(pairs, delimiter=";"),
    "fields.jsonl": as_jsonl,
    "records.jsonl": as_records,
    "memory.tmx": as_tmx,
}


def write_every_kind(folder: Path, pairs, compression: str = "") -> list[str]:
    """Write pairs to files of all kinds; return what names each as a dataset."""
    names = []
    for name, text_of in KINDS.items():
        path = folder / f"{name}{compression}"
        with OPENERS[compression](path, "wt", encoding="utf-8", newline="") as file:
            file.write(text_of(pairs))
        names.append(str(path))
    for side, language in enumerate(("en", "de")):
        path = folder / f"moses.{language}{compression}"
        with OPENERS[compression](path, "wt", encoding="utf-8", newline="") as file:
            file.writelines(f"{pair[side]}\n" for pair in pairs)
    rows = [{"de": target, "id": 7, "en": source} for source, target in pairs]
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "columns.parquet"))
    return [*names, str(folder / "moses"), str(folder / "columns.parquet")]
