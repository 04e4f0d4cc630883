"""Every block of the README and the guides, run as written, in a folder with a small `runs/demo`.

And the results that they show, against those that are kept.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from document_blocks import (
    NUMBER,
    ROOT,
    SHELL_PAGES,
    SMALL,
    TRAINING,
    blocks,
    commands,
    train_small_demo,
)
from hub_stand_in import running_hub
from library_models import make_marian, make_pieces

from vanilla_transformer.train.evaluate import score_table

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in SHELL_PAGES}
BATCHES = (ROOT / "docs" / "concepts" / "batches.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    pytest.param(language, block, id=f"{name}-{number}")
    for name, text in {"README.md": README, **PAGES}.items()
    for number, (language, block) in enumerate(blocks(text, "bash", "python"))
]
MAX_README_BYTES = 8192
# after three steps no sentence ends before its bound
SHORT_SEARCH = ["--max_extra_tokens", "1"]

PAIRS = [{"de": f"Satz {i} ist kurz.", "en": f"Sentence {i} is short."} for i in range(40)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder and an environment of someone who has run the demo, before a Hub of their own."""
    folder = tmp_path_factory.mktemp("reader")
    train_small_demo(folder, *SHORT_SEARCH)
    page = (ROOT / "docs" / "guides" / "change-the-model.md").read_text(encoding="utf-8")
    (folder / "relative.py").write_text(blocks(page, "python")[0][1], encoding="utf-8")
    texts = folder / "my" / "texts"
    texts.mkdir(parents=True)
    for split, pairs in (("train", PAIRS), ("validation", PAIRS[:30])):
        for language in ("de", "en"):
            lines = "".join(f"{pair[language]}\n" for pair in pairs)
            (texts / f"{split}.{language}").write_text(lines, encoding="utf-8")
    (folder / "my" / "sentences.txt").write_text("The train is late.\n", encoding="utf-8")
    (folder / "my" / "translations.txt").write_text("Der Zug ist spät.\n", encoding="utf-8")
    put_tables(folder / "my")
    with running_hub() as hub:
        environment = {**os.environ, **hub.environment(folder / "home")}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment["HF_DATASETS_CACHE"] = str(folder / "cache")
        put_wmt14(hub, folder / "wmt14")
        put_opus_mt(hub, folder / "opus-mt")
        environment["SACREBLEU"] = str(put_newstest(folder / "sacrebleu"))
        yield folder, environment, set()


def put_tables(folder):
    """The tables of docs/guides/corpora.md, from which a thousand pairs can be held out."""
    forms = {
        "pairs.tsv": "Sentence {0} is short.\tSatz {0} ist kurz.\n",
        "numbered.tsv": "{0}\tSentence {0} is short.\tby me\tSatz {0} ist kurz.\n",
        "named.csv": '{0},"Satz {0}, er ist kurz.",Sentence {0} is short.\n',
    }
    for name, form in forms.items():
        header = "Number,Target,Source\n" if name.endswith("csv") else ""
        lines = "".join(form.format(number) for number in range(1100))
        (folder / name).write_text(header + lines, encoding="utf-8")


def put_newstest(folder):
    """A test set where sacreBLEU stores it after a download."""
    (folder / "wmt14" / "full").mkdir(parents=True)
    languages = {"src": "en", "ref": "de"}
    for field in ("src", "ref", "docid", "genre", "origlang"):
        lines = "".join(f"{pair[languages.get(field, 'en')]}\n" for pair in PAIRS[:5])
        (folder / "wmt14/full" / f"wmt14_full.en-de.{field}").write_text(lines, encoding="utf-8")
    return folder


def put_opus_mt(hub, folder):
    """A small Marian under the name of a large one."""
    (folder / "vocabulary").mkdir(parents=True)
    for part in make_marian(make_pieces(folder), folder / "vocabulary"):
        part.save_pretrained(folder / "model")
    hub.add_folder("Helsinki-NLP/opus-mt-en-de", folder / "model", "models")


def put_wmt14(hub, folder):
    """A corpus in the schema and under the name of WMT14's."""
    names = {"de-en": "de", "fr-en": "fr"}
    for name, other in names.items():
        (folder / name).mkdir(parents=True)
        # these sentences differ from those of the texts that the corpus is mixed with
        rows = [
            {"translation": {other: f"Zeile {i}: sie ist lang.", "en": f"Line {i}: it is long."}}
            for i in range(40)
        ]
        # the numbers of lines of newstest2013 and newstest2014, which `train` checks
        for split, count in (("train", 40), ("validation", 3000), ("test", 3003)):
            lines = [json.dumps(rows[i % 40]) + "\n" for i in range(count)]
            (folder / name / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in names)
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    hub.add_folder("wmt/wmt14", folder, "datasets")


def shortened(command):
    """A command as it is tested: trainings get small, make is asked what it would do."""
    if command.startswith("make "):
        return f"make -C {ROOT} -n -o .venv/.ready {command.removeprefix('make ')}"
    if command.startswith("pip install "):
        # tests/test_package.py installs the wheel
        return "pip install --help"
    if command == "vanilla-transformer demo":
        return f"{command} --help"
    if TRAINING.search(command):
        return f"{command} {' '.join(map(repr, [*SMALL, *SHORT_SEARCH]))}"
    if command.startswith("vanilla-transformer paper positions"):
        return f"{command} --no_train"
    if command.startswith("vanilla-transformer space"):
        # it serves until it is interrupted; tests/space/test_space.py uses it in a browser
        return f"{command} --help"
    if command.startswith("vanilla-transformer explain"):
        # its page needs Node.js; tests/explainer/test_explainer.py uses it in a browser
        return f"{command} --help"
    if "distill " in command:
        # a model that has learned nothing translates the text of the demo for minutes
        return f"{command} --source my/sentences.txt"
    if "fine_tune" in command:
        return f"{command} --max_steps 2"
    return command


def test_the_readme_and_the_guides_have_their_blocks():
    assert len(BLOCKS) >= 25
    every = "\n".join(block.values[1] for block in BLOCKS)
    for needed in ("make demo", "train paper-base", "accelerate launch", "fine_tune", "push"):
        assert needed in every


def test_the_readme_fits_on_few_screens():
    assert len(README.encode()) <= MAX_README_BYTES
    assert 0 < len(table_rows(README, "## Results")) <= 6
    assert 0 < len(table_rows(README, "## Speed")) <= 6


def test_the_badges_are_true():
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    badges = re.findall(r"img.shields.io/badge/(\w+)-(.+)-\w+\)", README)
    assert [name for name, _ in badges] == ["license", "python"]
    assert f"license = {badges[0][1].replace('--', '-')}\n" in setup
    assert f"python_requires = >={badges[1][1].rstrip('+')}\n" in setup


@pytest.mark.parametrize(("language", "block"), BLOCKS)
def test_a_block_of_the_readme_or_a_guide_runs(language, block, reader):
    folder, environment, have_run = reader
    if language == "python":
        code = block
        if 'model="user/name"' in block:
            # the block before it has published this
            assert (folder / "published").exists()
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # what a comment says that a line prints
        for number in re.findall(r"\)  # (\d[\d,]*)", block):
            assert number in done.stdout
        return
    # a training command that is on two pages would begin in the same folder twice
    for command in [it for it in commands(block) if it not in have_run]:
        done = subprocess.run(
            ["bash", "-ec", shortened(command)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        have_run.add(command)
        if " push " in command:
            (folder / "published").touch()


def kept(path):
    return json.loads((ROOT / "results" / path).read_text(encoding="utf-8"))


def table_rows(text, heading):
    """The cells of the rows below a heading, up to the next."""
    section = re.split(r"^#+ ", text.split(f"{heading}\n")[1], flags=re.MULTILINE)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("*", "") for cell in row] for row in rows[1:]]


def test_the_scores_that_the_demo_prints_are_those_that_are_kept():
    [run] = set(re.findall(r"\(\.\./\.\./results/([^/)]*demo)/", PAGES["start/demo.md"]))
    table = score_table(kept(f"{run}/scores.json")["test"])
    assert f"\n{table}\n" in PAGES["start/demo.md"]
    # the README has some of its lines
    shown = [line for line in table.splitlines() if f"\n{line}\n" in README]
    assert {line.split()[0] for line in shown} >= {"data", "BLEU", "chrF", "search"}
    assert "\n".join(shown) in README


def scores_of(run):
    """BLEU and chrF on the test split, the mean of the seeds where a folder has several."""
    folder = ROOT / "results" / run
    found = []
    for path in [folder / "scores.json", *sorted(folder.glob("seed-*/scores.json"))]:
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            found += [one for one in content.values() if one["split"] == "test"]
    assert found
    return [f"{sum(one[key] for one in found) / len(found):.2f}" for key in ("bleu", "chrf")]


@pytest.mark.parametrize(
    ("text", "heading"),
    [(README, "## Results"), (RESULTS, "# Translation quality")],
    ids=["readme", "results"],
)
def test_the_scores_on_real_text_are_those_that_are_kept(text, heading):
    rows = table_rows(text, heading)
    assert len(rows) > 1
    for *_, bleu, chrf, folder in rows:
        assert [bleu, chrf] == scores_of(re.search(r"results/([^)]*)\)", folder)[1])


# as README names them, and as the studies do: one of training and one of search name the same thing
CONTENDERS = {
    "this package": ["this package"],
    "this package, int8": ["this package int8"],
    "this package, random sentences": ["this package, the same random sentences"],
    "Marian, random sentences": [
        "transformers Marian, random sentences",
        "transformers Marian, sentences as they come",
    ],
    "CTranslate2, float32": ["CTranslate2 float32"],
    "CTranslate2, int8": ["CTranslate2 int8"],
    "FSMT": ["transformers FSMT"],
    "torch.nn.Transformer": ["torch.nn.Transformer"],
    "JoeyNMT": ["JoeyNMT"],
}


@pytest.mark.parametrize(
    ("column", "study", "section", "which"),
    [
        (1, "training", "training-base", []),
        (2, "translation-base", "translation-base", ["beam 4, 32 short"]),
        (3, "translation-base", "translation-base", ["beam 4, 32 long"]),
        (4, "natural", "natural", []),
    ],
)
def test_the_speed_is_that_of_the_study_that_is_kept(column, study, section, which):
    tables = [table_rows(README, "## Speed"), table_rows(PAGES["results/speed.md"], "# Speed")]
    short, shown = ({row[0]: row[column] for row in table if row[column]} for table in tables)
    measured = kept(f"speed-amd/{study}/study.json")["sections"][section]
    names = {name: key for key, them in CONTENDERS.items() for name in them}
    expected = {}
    for row in measured["rows"]:
        *of_what, implementation, ratio, low, high = row[: measured["columns"].index("to") + 1]
        # the one that all are compared with has no row
        if of_what == which and implementation != "transformers Marian":
            expected[names[implementation]] = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
    assert len(expected) > 3
    assert shown == expected
    assert short.items() <= expected.items()


def test_the_memory_of_a_stream_is_that_of_the_studies_that_are_kept():
    after = []
    for copies in (1, 4, 16):
        study = kept(f"data-streaming/copies-{copies}/study.json")
        rows = dict(study["sections"]["data"]["rows"])
        after.append(re.search(r"; (\d+) MB,", rows["block 7"])[1])
    assert f"it is {after[0]}, {after[1]} and {after[2]} MB after\neight blocks" in BATCHES


def test_the_costs_of_data_are_those_of_the_studies_that_are_kept():
    """Each number of the table stands in one of the two studies."""
    table = BATCHES.split("\n| | measured |\n")[1].split("\n\n")[0]
    shown = {
        number for row in table.splitlines()[1:] for number in NUMBER.findall(row.split("|")[2])
    }
    studies = [kept(f"data-preparation/{kind}/study.json") for kind in ("stored", "streamed")]
    measured = [text for study in studies for _, text in study["sections"]["data"]["rows"]]
    assert len(shown) > 10
    assert shown <= {number for text in measured for number in NUMBER.findall(text)}
