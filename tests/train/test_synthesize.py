"""Corpora of translations: `distill` and `back-translate`."""

import gzip
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import train_toys

from vanilla_transformer.cli import main
from vanilla_transformer.loading import load
from vanilla_transformer.train import synthesize
from vanilla_transformer.train.data.corpus import load_translations
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.run_folder.files import read_metrics
from vanilla_transformer.train.translate import search_lines

MODULE = "vanilla_transformer.train.synthesize"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run folder of a model that has learned a little."""
    folder = tmp_path_factory.mktemp("synthesize")
    corpus = train_toys.write_corpus(folder / "corpus", pairs=90)
    settings = {"max_steps": 400, "learning_rate_factor": 0.2, "model": {"hidden_size": 32}}
    steps = {"eval_every_steps": 400, "save_every_steps": 200}
    train(train_toys.toy_config(corpus, folder / "run", **settings, **steps))
    return folder / "run"


@pytest.fixture
def lines(tmp_path):
    """File with 1,300 lines, three blocks, some of them empty or too long."""
    words = train_toys.WORDS
    lines = [f"{words[i % 16]} {words[i // 16 % 16]} {i}" for i in range(1300)]
    lines[3], lines[700], lines[1299] = "", "  ", " ".join(words * 20)
    path = tmp_path / "mono.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(synthesize, "BLOCK_LINES", 20)


def pairs_of(folder):
    text = (folder / "train.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        ("pairs.tsv", "ant bee\tbee ant\n", "a tab"),
        ("sockeye.out", '{"sentence_id": 1, "translation": "ant bee"}\n', "JSON or markup"),
    ],
)
def test_lines_with_more_than_a_sentence_are_translated_with_a_warning(
    name, line, found, run, tmp_path, capsys, caplog
):
    path = tmp_path / name
    path.write_text(line, encoding="utf-8")
    out = ["--output_dir", str(tmp_path / "out")]
    assert main(["distill", str(run), "--source", str(path), *out]) == 0, capsys.readouterr().err
    assert f"The first line of {path} has {found}, but whole lines are translated" in caplog.text


def test_training_files_of_iwslt_are_translated_without_their_metadata(run, tmp_path, capsys):
    path = tmp_path / "train.tags.en-de.en"
    path.write_text("<url>http://a.b/c</url>\n<title>ant bee</title>\n cat \n", encoding="utf-8")
    out = tmp_path / "out"
    words = ["distill", str(run), "--source", str(path), "--output_dir", str(out)]
    assert main(words) == 0, capsys.readouterr().err
    assert [pair["en"] for pair in pairs_of(out)] == ["ant bee", "cat"]


def test_the_corpus_is_on_the_disk_before_the_blocks_are_removed(run, tmp_path, monkeypatch):
    out, flush, flushed = tmp_path / "out", os.fsync, []
    words = ["distill", str(run), "--output_dir", str(out)]
    remove = synthesize.remove

    def checked_remove(path):
        assert {(out / "train.jsonl").stat().st_ino, out.stat().st_ino} <= set(flushed)
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(synthesize, "_read_block", lambda _: (_ for _ in ()).throw(OSError(28)))
        assert main(words) == 1
    assert sorted(path.name for path in out.iterdir()) == ["blocks", "synthetic.json"]
    monkeypatch.setattr(synthesize, "write_atomically", Path.write_text)
    monkeypatch.setattr(os, "fsync", lambda it: flushed.append(os.fstat(it).st_ino) or flush(it))
    monkeypatch.setattr(synthesize, "remove", checked_remove)
    assert main(words) == 0
    assert sorted(path.name for path in out.iterdir()) == ["synthetic.json", "train.jsonl"]


def test_a_pair_is_not_garbled_by_the_seam_of_its_texts(run, tmp_path):
    # "Ã" and "¤" next to each other are a wrongly decoded "ä"
    task = synthesize.Task("distill", (), tmp_path, "en", "de", (), None, {}, None, 100, None, "")
    pipeline = load(run)

    def translated(first, second):
        search = [[{"translation_text": second, "score": 0.0}]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(synthesize, "search_lines", lambda *_, **__: iter(search))
            return synthesize._translate_block(task, pipeline, [first], 0)

    assert translated("Ã", "¤") == [{"en": "Ã", "de": "¤", "score": 0.0}]
    assert translated("a", "Ã¤") == [{"dropped": "with a wrong encoding"}]


def test_the_sources_of_the_training_text_are_translated(run, tmp_path, capsys):
    assert (
        main(["distill", str(run), "--output_dir", str(tmp_path / "kd"), "--num_beams", "2"]) == 0
    )
    said = capsys.readouterr().out
    rows = load_translations(str(run.parent / "corpus"), None, "en", "de")["train"]
    sources = [row["translation"]["en"] for row in rows]
    found = pairs_of(tmp_path / "kd")
    expected = search_lines(load(run), sources, return_scores=True, num_beams=2)
    expected = [(text, best) for text, (best, *_) in zip(sources, expected, strict=True)]
    expected = [it for it in expected if it[1]["translation_text"].strip()]
    assert len(expected) > 70
    for pair, (source, best) in zip(found, expected, strict=True):
        assert pair["en"] == source
        assert pair.keys() == {"en", "de", "score"}
        assert pair["de"] == best["translation_text"].strip()
        assert pair["score"] == pytest.approx(best["score"], abs=6e-5)
    assert said.startswith(f"{len(expected)} pairs are in {tmp_path / 'kd'}, dropped: ")
    assert "train with --source_lang en --target_lang de --mix" in said


def test_an_ensemble_is_a_teacher(run, lines, tmp_path, capsys):
    """The pairs are those of a search with both models; another second model is refused."""
    checkpoint = run / "checkpoints" / "step-200"
    words = ["distill", str(run), str(checkpoint), "--source", str(lines), "--num_beams", "2"]
    assert main([*words, "--output_dir", str(tmp_path / "kd")]) == 0
    found = pairs_of(tmp_path / "kd")
    texts = [pair["en"] for pair in found]
    first, second = load(run), load(checkpoint)
    together = first(texts, num_beams=2, return_scores=True, ensemble=[second.model])
    for pair, expected in zip(found, together, strict=True):
        assert pair["de"] == expected["translation_text"].strip()
        assert pair["score"] == pytest.approx(expected["score"], abs=2e-4)
    alone = [result["translation_text"] for result in first(texts, num_beams=2)]
    assert [pair["de"] for pair in found] != alone
    capsys.readouterr()
    words[2] = str(run)
    assert main([*words, "--output_dir", str(tmp_path / "kd")]) == 1
    assert "weights_sha256 was" in capsys.readouterr().err


def test_the_corpus_of_a_back_translation_can_be_mixed(run, lines, tmp_path, capsys):
    out = tmp_path / "bt"
    words = ["back-translate", str(run), "--target", str(lines), "--output_dir", str(out)]
    assert main([*words, "--tag", "<BT>", "--max_length", "60"]) == 0
    said = capsys.readouterr().out
    found = pairs_of(out)
    given = lines.read_text(encoding="utf-8").splitlines()
    # the original text is the target of a model from German to English
    assert {pair["en"] for pair in found} <= {it for it in given[:-1] if it.strip()}
    assert all(pair["de"].removeprefix("<BT> ").strip() for pair in found)
    assert all(pair["de"].startswith("<BT> ") for pair in found)
    assert said.startswith(f"{len(found):,} pairs are in {out}, dropped: 1 too long, ")
    assert ", 2 without text" in said
    assert "train with --source_lang de --target_lang en --mix" in said
    config = train_toys.toy_config(
        run.parent / "corpus",
        tmp_path / "run",
        source_lang="de",
        target_lang="en",
        mix=[{"dataset": str(out)}],
        max_steps=2,
    )
    train(config)
    assert "validation_loss" in read_metrics(tmp_path / "run")[-1]
    assert f"{out}: kept {len(found):,}, " in (tmp_path / "run/environment.txt").read_text()


def test_pairs_with_a_low_score_are_dropped(run, tmp_path, capsys):
    main(["distill", str(run), "--output_dir", str(tmp_path / "all")])
    every = pairs_of(tmp_path / "all")
    limit = sorted(pair["score"] for pair in every)[30]
    words = ["distill", str(run), "--output_dir", str(tmp_path / "best"), f"--min_score={limit}"]
    assert main(words) == 0
    assert pairs_of(tmp_path / "best") == [pair for pair in every if pair["score"] >= limit]
    counts = json.loads((tmp_path / "best/synthetic.json").read_text())["counts"]
    assert counts["with a low score"] == 30
    assert counts["kept"] == len(every) - 30
    assert sum(counts.values()) == 90
    # nothing is lost if the limit was too high
    folder = tmp_path / "none"
    assert main([*words[:-2], str(folder), "--min_score=1"]) == 1
    assert "at least one pair must be kept, got " in capsys.readouterr().err
    assert main([*words[:-2], str(folder), words[-1]]) == 0
    assert pairs_of(folder) == pairs_of(tmp_path / "best")
    # the same command again finds everything done
    before = (tmp_path / "best/train.jsonl").stat().st_mtime_ns
    assert main(words) == 0
    assert (tmp_path / "best/train.jsonl").stat().st_mtime_ns == before


def test_samples_depend_on_the_seed_alone(run, lines, tmp_path):
    def sample(name, *flags):
        words = ["distill", str(run), "--source", str(lines), "--output_dir", str(tmp_path / name)]
        assert main([*words, "--sample", *flags]) == 0
        return pairs_of(tmp_path / name)

    first = sample("first", "--seed", "5")
    assert sample("again", "--seed", "5") == first
    assert sample("other", "--seed", "6") != first
    beams = tmp_path / "beams"
    assert main(["distill", str(run), "--source", str(lines), "--output_dir", str(beams)]) == 0
    assert pairs_of(beams) != first
    # blocks with the same lines get other samples
    both = tmp_path / "both.txt"
    both.write_text(lines.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    both.write_text(both.read_text(encoding="utf-8") * 40, encoding="utf-8")
    words = ["distill", str(run), "--source", str(both), "--output_dir", str(tmp_path / "same")]
    assert main([*words, "--sample", "--temperature", "3"]) == 0
    drawn = [pair["de"] for pair in pairs_of(tmp_path / "same")]
    assert drawn[:20] != drawn[20:]


def launched(run, lines, out, *flags, processes=0):
    arguments = ["distill", str(run), "--source", str(lines), "--output_dir", str(out), *flags]
    return train_toys.command(*arguments, processes=processes, module=MODULE)


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGTERM], [signal.SIGINT] * 2])
def test_an_interrupted_command_resumes(run, lines, tmp_path, begin, signals):
    sample = ["--sample", "--seed", "3"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    environment = train_toys.environment()
    subprocess.run(launched(run, lines, whole, *sample), env=environment, check=True)
    for number in signals:
        process = begin(
            launched(run, lines, parts, *sample), env=environment, stderr=subprocess.PIPE
        )
        done = len(list(parts.glob("blocks/*.jsonl")))
        train_toys.wait_until(
            lambda done=done: len(list(parts.glob("blocks/*.jsonl"))) > done, process
        )
        process.send_signal(number)
        said = process.communicate()[1]
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        if number != signal.SIGKILL:
            assert "blocks are translated: run the same command again to resume." in said
    assert not (parts / "train.jsonl").exists()
    stored = {path: path.stat().st_mtime_ns for path in parts.glob("blocks/*.jsonl")}
    assert stored
    # the text is found by its content
    moved = shutil.move(lines, tmp_path / "moved.txt")
    subprocess.run(launched(run, moved, parts, *sample), env=environment, check=True)
    assert (parts / "train.jsonl").read_bytes() == (whole / "train.jsonl").read_bytes()
    names = sorted(path.name for path in parts.iterdir() if not path.name.startswith("."))
    assert names == ["synthetic.json", "train.jsonl"]


def test_two_processes_share_the_lines(run, lines, tmp_path):
    written = []
    for processes in (0, 2):
        out = tmp_path / str(processes)
        command = launched(run, lines, out, processes=processes)
        done = subprocess.run(
            command,
            env=train_toys.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.count("pairs are in") == 1
        written.append((out / "train.jsonl").read_bytes())
    assert written[0] == written[1]
    assert len(written[0].splitlines()) > 1000


def test_another_command_in_the_folder_is_refused(run, lines, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["distill", str(run), "--source", str(lines), "--output_dir", str(out)]
    assert main([*words, "--num_beams", "1"]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    other = tmp_path / "other.txt"
    other.write_text("ant bee\n", encoding="utf-8")
    for changed, problem in (
        ([*words, "--num_beams", "2"], "search was {'num_beams': 1}, got {'num_beams': 2}"),
        ([*words, "--num_beams", "1", "--tag", "x"], "tag was '', got 'x'"),
        ([*words[:3], str(other), *words[4:], "--num_beams", "1"], "lines was 1300, got 1"),
        (
            ["back-translate", str(run), "--target", str(lines), *words[4:], "--num_beams", "1"],
            "command was 'distill', got 'back-translate'",
        ),
        ([*words, "--num_beams", "1", "--min_score=-1"], "min_score must be None, as when"),
    ):
        assert main(changed) == 1
        assert problem in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine", encoding="utf-8")
    assert main([*words[:-1], str(mine)]) == 1
    assert (
        f"output_dir must be new or empty, got {mine} with other files." in capsys.readouterr().err
    )
    assert [path.name for path in mine.iterdir() if path.name[0] != "."] == ["notes.txt"]


def test_compressed_files_are_read_one_after_another(run, tmp_path):
    paths = [tmp_path / "a.txt.gz", tmp_path / "b.txt"]
    paths[0].write_bytes(gzip.compress(b"ant bee\ncat\n"))
    paths[1].write_bytes(b"dog\n")
    words = ["distill", str(run), "--source", *map(str, paths)]
    assert main([*words, "--output_dir", str(tmp_path / "out")]) == 0
    assert [pair["en"] for pair in pairs_of(tmp_path / "out")] == ["ant bee", "cat", "dog"]


def test_a_pipe_is_refused_because_it_cannot_be_read_again(run, tmp_path, capsys):
    flags = ["--source", train_toys.pipe_of("ant\n"), "--output_dir", str(tmp_path / "out")]
    assert main(["distill", str(run), *flags]) == 1
    assert "reads again, got the pipe /dev/fd/" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source", "missing.txt"], "missing.txt cannot be read: No such file"),
        (["--source", "{empty}"], "empty.txt must have at least one line, got none"),
        (["--tag", " x"], "tag must be text of one line without spaces around it, got ' x'"),
        (["--tag", "a\nb"], "tag must be text of one line"),
        (["--temperature", "1"], "temperature must be given with sample"),
        (["--sample", "--num_beams", "4"], "num_beams must not be given with sample"),
        (["--sample", "--temperature", "0"], "temperature must be above 0, got 0.0"),
        (["--sample", "--seed", "-1"], "seed must be at least 0, got -1"),
        (["--max_length", "0"], "max_length must be at least 1, got 0"),
        (["--target_lang", "en"], "target_lang must be de, as in the recipe of "),
    ],
)
def test_flags_that_do_not_fit_are_refused(run, tmp_path, capsys, flags, message):
    empty = tmp_path / "empty.txt"
    empty.touch()
    flags = [flag.format(empty=empty) for flag in flags]
    assert main(["distill", str(run), "--output_dir", str(tmp_path / "out"), *flags]) == 1
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))


def test_a_model_without_a_recipe_needs_languages_and_text(run, tmp_path, capsys):
    model = tmp_path / "model"
    load(run).save_pretrained(model)
    words = ["distill", str(model), "--output_dir", str(tmp_path / "out")]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "source_lang and target_lang must be given for" in said
    assert said.endswith("the folder has no recipe.yaml.\n")
    assert main(["distill", "runs/missing", *words[2:]]) == 1
    assert capsys.readouterr().err.endswith("got 'runs/missing': no such folder.\n")
    assert main([*words, "--source_lang", "en", "--target_lang", "en"]) == 1
    assert "target_lang must differ from source_lang, got 'en' for both." in capsys.readouterr().err
    words += ["--source_lang", "en", "--target_lang", "xx"]
    assert main(words) == 1
    assert "source must be given, because only the stored training text" in capsys.readouterr().err
    table = tmp_path / "text.csv"
    table.write_text("ant,bee\n")
    assert main([*words, "--source", str(table)]) == 1
    assert "text.csv must have a sentence on each line, got .csv: " in capsys.readouterr().err
    text = tmp_path / "text"
    text.write_text("ant bee\ncat dog elk\n", encoding="utf-8")
    assert main([*words, "--source", str(text)]) == 0
    assert pairs_of(tmp_path / "out")[0].keys() == {"en", "xx", "score"}


def test_the_module_names_its_commands(capsys):
    assert synthesize.main(["destill"]) == 1
    said = capsys.readouterr().err
    assert "the first argument must be distill or back-translate, got destill." in said
