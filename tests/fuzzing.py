"""Damage files that commands read, and check how the commands end.

`python tests/fuzzing.py FOLDER` trains a run in FOLDER. Then `python tests/fuzzing.py FOLDER FIRST
COUNT` tries the cases FIRST, FIRST + 1, ... on it, and writes a line of JSON for each failure.
"""

import gzip
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# time limit of a command, in seconds
LONGEST_CASE = 120
# memory limit of a command beyond that of the imports, in bytes
MOST_MEMORY = 3 << 30
LONGEST_SENTENCE = 2500
LAST_STEP = 9

RUN_FILES = (
    "recipe.yaml",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "metrics.jsonl",
    "scores.json",
    "average.json",
    "environment.txt",
    "README.md",
    "hypotheses/test.source.txt",
    "hypotheses/test.translation.txt",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "text_sha256.txt")
CHECKPOINT_FILES = (
    "state.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "ema.safetensors",
    "optimizer.pt",
)
TEXT_FILES = ("train.en", "train.de", "validation.de", "test.en", "test.de")
RECORD_FILES = (
    *("pairs.jsonl", "pairs.json", "packed.jsonl.gz", "pairs.parquet", "pairs.arrow"),
    *("pairs.tsv", "pairs.csv", "pairs.tmx"),
)

COMMANDS: dict[str, list[str]] = {
    "resume": ["train", "pristine.yaml", "--resume", "--max_steps", str(LAST_STEP)],
    "average": ["average", "run"],
    "evaluate": ["evaluate", "run"],
    "against": ["evaluate", "run", "--against", "run"],
    "translate": ["translate", "run", "corpus/test.en"],
    "export": ["export_for_hub", "run"],
    "load": ["load_run", "run"],
    "load checkpoint": ["load_run", "run/checkpoints/step-8"],
    "curve": ["paper", "curve", "run", "--output_dir", "out"],
    "dry run": ["train", "run/recipe.yaml", "--dry_run"],
    "train": ["train", "pristine.yaml", "--max_steps", "1", "--output_dir", "new"],
}


class Case(NamedTuple):
    """Mutation of a file, and a command that reads the file."""

    seed: int
    file: str
    mutation: str
    command: str


def _targets() -> list[tuple[str, tuple[str, ...]]]:
    readers = {
        "recipe.yaml": ("resume", "average", "evaluate", "curve", "dry run", "dry run"),
        "metrics.jsonl": ("resume", "average", "curve", "evaluate"),
        "scores.json": ("average", "evaluate"),
        "average.json": ("evaluate", "evaluate"),
        "environment.txt": ("average", "evaluate", "resume"),
        "README.md": ("export",),
        "hypotheses/test.source.txt": ("against", "average"),
        "hypotheses/test.translation.txt": ("against", "average"),
    }
    of_models = ("evaluate", "translate", "export", "load", "load", "load")
    targets = [(f"run/{name}", readers.get(name, of_models)) for name in RUN_FILES]
    targets += [(f"run/tokenizer/{name}", ("resume", "average")) for name in TOKENIZER_FILES]
    for name in CHECKPOINT_FILES:
        commands = ("resume", "resume", "average", "load checkpoint")
        targets.append((f"run/checkpoints/step-8/{name}", commands))
    targets += [(f"corpus/{name}", ("train", "resume", "evaluate")) for name in TEXT_FILES]
    targets.append(("corpus/test.en", ("translate",)))
    targets += [(f"records/{name}", ("train",)) for name in RECORD_FILES]
    return targets


TARGETS = _targets()

# ---- mutations ----

ODD_VALUES = (
    *(None, True, False, 0, 1, -1, 7, 10**9, -(10**9), 2**63, 10**30, 0.5, -0.5, 1e308, 1e-320),
    *("", "x", "8", "null", "../../x", "/", "a\0b", "\ud800", "é", "x" * 10_000, "float13", "nan"),
    *([], {}, [None], [[]], [1, "x"], {"": None}, {"x": {"y": [0]}}, [0] * 3000, "\n", "<pad>"),
)
ODD_BYTES = (
    *(b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\r", b"\n", b"\n\n", b"\x80", b"\xc3"),
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"- ", b"&a ", b"*a", b"!!", b"<<: ", b"#"),
    *(b"!!python/object/apply:os.system ['true']", b"? ", b"---\n", b"...\n", b"%YAML 9.9\n"),
)
NUMBERS = (
    *(b"-1", b"0", b"1e999", b"-1e999", b"NaN", b"Infinity", b"9" * 400, b"9" * 5000, b"1.5"),
    *(b"true", b"null", b'"8"', b"[]", b"{}", b"9223372036854775808", b"0x10", b"1_0", b"01"),
)
BOMB = (
    "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n"
    + "".join(
        f"{name}: &{name} [{', '.join(f'*{before}' for _ in range(9))}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
).encode()


def _flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _flip_in_header(data: bytes, rng: random.Random) -> bytes:
    head = min(len(data), rng.choice((16, 256, 4096)))
    return _flip(data[:head], rng) + data[head:]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _cut_begin(data: bytes, rng: random.Random) -> bytes:
    return data[rng.randrange(len(data) + 1) :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice((*ODD_BYTES, rng.randbytes(9))) + data[at:]


def _remove_part(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 10, 100)) :]


def _double_part(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    part = data[at : at + rng.choice((1, 10, 100, 10_000))]
    return data[:at] + part * rng.choice((2, 3, 50)) + data[at + len(part) :]


def _swap_parts(data: bytes, rng: random.Random) -> bytes:
    first, second = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[second:] + data[first:second] + data[:first]


def _change_number(data: bytes, rng: random.Random) -> bytes:
    found = list(re.finditer(rb"-?\d+(?:\.\d+)?", data[:100_000]))
    if not found:
        return _insert(data, rng)
    it = rng.choice(found)
    return data[: it.start()] + rng.choice(NUMBERS) + data[it.end() :]


def _change_word(data: bytes, rng: random.Random) -> bytes:
    found = list(re.finditer(rb"[A-Za-z_]+", data[:100_000]))
    if not found:
        return _insert(data, rng)
    it = rng.choice(found)
    word = rng.choice((b"", b"x", b"null", b"true", it[0] * 2, it[0][::-1], b"y" * 3000, b"~"))
    return data[: it.start()] + word + data[it.end() :]


def _change_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[other])
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at] = rng.choice((b"", b" ", b"\t", lines[at] * 2000, rng.randbytes(40)))
    return b"\n".join(lines)


def _replace_all(data: bytes, rng: random.Random) -> bytes:
    contents = (b"", b"\0" * 64, b"null", b"[]", b"{}", b"0", b'"x"', b"{", b"\n", b"[" * 100_000)
    deep = (b'{"a":' * 50_000, b"- " * 20_000, b"{a: " * 5000, BOMB, BOMB * 2, rng.randbytes(999))
    return rng.choice(contents + deep)


def _encode_otherwise(data: bytes, rng: random.Random) -> bytes:
    text = data.decode("latin-1")
    encodings = ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp037", "utf-7")
    if rng.random() < 0.2:
        return gzip.compress(data)
    return text.encode(rng.choice(encodings), "replace")


def _change_json(data: bytes, rng: random.Random) -> bytes:
    """Replace, add or remove a part of JSON, JSON lines or the header of a safetensors file."""
    for parse in (_whole_json, _line_json, _header_json, _yaml):
        found = parse(data, rng)
        if found is not None:
            value, write = found
            return write(_changed(value, rng))
    return _change_number(data, rng)


def _whole_json(data: bytes, rng: random.Random) -> tuple[Any, Callable] | None:
    try:
        return json.loads(data), lambda value: json.dumps(value, indent=1).encode()
    except ValueError:
        return None


def _line_json(data: bytes, rng: random.Random) -> tuple[Any, Callable] | None:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    try:
        value = json.loads(lines[at])
    except ValueError:
        return None
    before, after = lines[:at], lines[at + 1 :]
    return value, lambda value: b"\n".join([*before, json.dumps(value).encode(), *after])


def _header_json(data: bytes, rng: random.Random) -> tuple[Any, Callable] | None:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data):
        return None
    try:
        value = json.loads(data[8 : 8 + size])
    except ValueError:
        return None

    def write(value: Any) -> bytes:
        header = json.dumps(value).encode()
        return len(header).to_bytes(8, "little") + header + data[8 + size :]

    return value, write


def _yaml(data: bytes, rng: random.Random) -> tuple[Any, Callable] | None:
    import yaml

    # every text of a corpus is YAML too
    if b": " not in data or b"\0" in data:
        return None
    try:
        value = yaml.safe_load(data)
    except yaml.YAMLError:
        return None
    return value, lambda value: yaml.safe_dump(value, allow_unicode=True).encode(
        errors="surrogatepass"
    )


def _changed(value: Any, rng: random.Random) -> Any:
    # equal probability for every depth
    parts = list(value) if isinstance(value, dict) else list(range(_length(value)))
    inner = [key for key in parts if isinstance(value[key], dict | list) and value[key]]
    if inner and rng.random() < 0.6:
        key = rng.choice(inner)
        copy = value.copy()
        copy[key] = _changed(value[key], rng)
        return copy
    if not parts or rng.random() < 0.03:
        return rng.choice(ODD_VALUES)
    key, copy = rng.choice(parts), value.copy()
    kind = rng.randrange(6)
    if kind < 3:
        copy[key] = rng.choice(ODD_VALUES)
    elif kind == 3:
        del copy[key]
    elif kind == 4 and isinstance(copy, dict):
        copy[rng.choice(("", "x", f"{key}s", "a/b", "../x", "\0", "__class__"))] = copy.pop(key)
    else:
        copy[key] = copy[rng.choice(parts)]
    return copy


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


CONTENT = {
    function.__name__.strip("_"): function
    for function in (
        *(_flip, _flip_in_header, _cut, _cut_begin, _insert, _remove_part, _double_part),
        *(_swap_parts, _change_number, _change_word, _change_lines, _replace_all),
        *(_encode_otherwise, _change_json, _change_json, _change_json),
    )
}


def _as_folder(path: Path):
    path.unlink()
    path.mkdir()


def _as_pipe(path: Path):
    path.unlink()
    os.mkfifo(path)


def _as_link_to(target: str) -> Callable[[Path], None]:
    def link(path: Path):
        path.unlink()
        path.symlink_to(target)

    return link


PLACES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "folder": _as_folder,
    "pipe": _as_pipe,
    "endless": _as_link_to("/dev/zero"),
    "null": _as_link_to("/dev/null"),
    "dead link": _as_link_to("nowhere"),
    "link loop": _as_link_to("."),
}


def case_of(seed: int) -> Case:
    """Choose a file, a mutation and a command; the seed determines all three."""
    rng = random.Random(seed)
    file, commands = rng.choice(TARGETS)
    kinds = [*CONTENT] * 4 + [*PLACES]
    mutation, command = rng.choice(kinds + ["change_json"] * 12), rng.choice(commands)
    # `translate` may read its text from a pipe, which may be slow
    if command == "translate" and file.startswith("corpus") and mutation in ("pipe", "endless"):
        mutation = "missing"
    return Case(seed, file, mutation, command)


def mutate(folder: Path, case: Case):
    """Damage the file of a case."""
    path = folder / case.file
    if case.mutation in PLACES:
        PLACES[case.mutation](path)
        return
    rng = random.Random(f"content {case.seed}")
    data = path.read_bytes()
    # some mutations change nothing: try again
    for _ in range(20):
        changed = CONTENT[case.mutation](data, rng)
        if changed != data:
            break
    path.write_bytes(changed)


# ---- the run, and commands on it ----


def prepare(folder: Path):
    """Make a run, its corpus and files of records, and the reference weights of its next steps."""
    import corpus_files
    import pyarrow as pa
    import pyarrow.parquet
    import train_toys
    from datasets import Dataset

    from vanilla_transformer.train.evaluate import evaluate
    from vanilla_transformer.train.loop import train

    base = folder / "base"
    base.mkdir(parents=True)
    train_toys.write_corpus(base / "corpus")
    before = os.getcwd()
    os.chdir(base)
    try:
        changes = {"max_steps": 8, "ema_decay": 0.9, "warmup_steps": 5}
        settings = train_toys.toy_settings(Path("corpus"), Path("run"), **changes)
        train_toys.write_recipe(Path("pristine.yaml"), settings)
        train(train_toys.toy_config(Path("corpus"), Path("run"), **changes))
        evaluate("run")
        sides = [Path(f"corpus/train.{name}").read_text().split("\n")[:-1] for name in ("en", "de")]
        records = [
            {"translation": dict(zip(("en", "de"), pair, strict=True))}
            for pair in zip(*sides, strict=True)
        ]
        Path("records").mkdir()
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        Path("records/pairs.jsonl").write_bytes(lines)
        Path("records/packed.jsonl.gz").write_bytes(gzip.compress(lines))
        for text_of in (corpus_files.as_tsv, corpus_files.as_csv, corpus_files.as_tmx):
            text = text_of(list(zip(*sides, strict=True)))
            Path(f"records/pairs.{text_of.__name__.removeprefix('as_')}").write_text(text)
        Path("records/pairs.json").write_text(json.dumps(records))
        pyarrow.parquet.write_table(pa.Table.from_pylist(records), "records/pairs.parquet")
        Dataset.from_list(records).save_to_disk("records/made")
        shutil.move("records/made/data-00000-of-00001.arrow", "records/pairs.arrow")
        shutil.rmtree("records/made")
    finally:
        os.chdir(before)
    shutil.copytree(base, folder / "reference")
    os.chdir(folder / "reference")
    try:
        train(
            train_toys.toy_config(
                Path("corpus"), Path("run"), **{**changes, "max_steps": LAST_STEP}
            ),
            resume=True,
        )
    finally:
        os.chdir(before)


def _arguments(case: Case) -> list[str]:
    arguments = COMMANDS[case.command]
    if case.file.startswith("records/"):
        arguments = [*arguments, "--dataset", case.file]
    if case.command == "resume":
        arguments = [*arguments, "--output_dir", "run"]
    return arguments


def _perform(arguments: list[str]) -> int:
    from vanilla_transformer.cli import main
    from vanilla_transformer.console import run_command
    from vanilla_transformer.loading import load_run
    from vanilla_transformer.publishing import export_for_hub

    name, *rest = arguments
    calls = {
        "load_run": lambda _: load_run(rest[0]) and None,
        "export_for_hub": lambda _: export_for_hub(rest[0], "out"),
    }
    return run_command(calls[name], []) if name in calls else main(arguments)


def _in_child(case: Case, folder: Path) -> int:
    """Run a command in this process, a child that ends after it."""
    import faulthandler
    import resource

    for name, number in (("stdout", 1), ("stderr", 2)):
        descriptor = os.open(folder.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.dump_traceback_later(LONGEST_CASE, exit=True)
    used = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30,) * 2)
    os.chdir(folder)
    try:
        return _perform(_arguments(case))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1


def verdict(case: Case, status: int, said: str, folder: Path, reference: Path) -> str | None:
    """Return the failure of a command, or None."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.waitstatus_to_exitcode(status)
    if "Timeout (" in said:
        return "hang"
    if "Traceback (most recent" in said:
        return "traceback"
    if code == 0:
        return _wrong_result(case, folder, reference)
    if code != 1:
        return f"exit {code}"
    sentences = [line for line in said.splitlines() if line.startswith("error: ")]
    if len(sentences) != 1:
        return f"{len(sentences)} sentences"
    if sentences[0] != said.splitlines()[-1]:
        return "more after the sentence"
    if "error: unexpected " in said:
        return "unforeseen"
    if len(sentences[0]) > LONGEST_SENTENCE:
        return "a sentence without an end"
    names = (str(folder), *_settings(), *Path(case.file).parts, "step-8", "own data")
    if not any(name in sentences[0] for name in names):
        return "a sentence that names nothing"
    return None


def _settings() -> list[str]:
    from vanilla_transformer.train.config import TrainConfig

    return [*TrainConfig.__dataclass_fields__]


def _wrong_result(case: Case, folder: Path, reference: Path) -> str | None:
    if case.command != "resume":
        return None
    name = f"checkpoints/step-{LAST_STEP}/model.safetensors"
    if not (folder / "run" / name).is_file():
        return "no last step"
    same = (folder / "run" / name).read_bytes() == (reference / "run" / name).read_bytes()
    return None if same else "other weights in silence"


def try_cases(root: Path, seeds: range):
    """Try cases one after the other, and write failures to stdout."""
    import train_toys  # noqa: F401

    import vanilla_transformer.attention_maps
    import vanilla_transformer.cli
    import vanilla_transformer.loading
    import vanilla_transformer.paper.curve
    import vanilla_transformer.train.dry_run
    import vanilla_transformer.train.evaluate
    import vanilla_transformer.train.loop  # noqa: F401

    folder, reference = root / f"work-{seeds.start}" / "case", root / "reference"
    began = time.monotonic()
    for seed in seeds:
        case = case_of(seed)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(root / "base", folder)
        mutate(folder, case)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                code = _in_child(case, folder)
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 99
            os._exit(code)
        started = time.monotonic()
        _, status = os.waitpid(child, 0)
        said = (folder.parent / "stderr").read_text(encoding="utf-8", errors="replace")
        if seed % 100 == 99:
            print(f"tried until {seed}", file=sys.stderr, flush=True)
        fault = verdict(case, status, said, folder, reference)
        if fault is not None:
            facts = {**case._asdict(), "fault": fault, "seconds": time.monotonic() - started}
            print(json.dumps({**facts, "said": said.strip()[-1500:]}), flush=True)
    shutil.rmtree(folder.parent)
    seconds = time.monotonic() - began
    print(json.dumps({"tried": len(seeds), "seconds": round(seconds, 1)}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if len(sys.argv) == 2:
        prepare(Path(sys.argv[1]))
    else:
        first, count = map(int, sys.argv[2:4])
        try_cases(Path(sys.argv[1]), range(first, first + count))
