"""Translation of lines: in order, as they arrive, and through any pipe."""

import bz2
import gzip
import io
import lzma
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_toys
import transformers

from vanilla_transformer import TranslationPipeline
from vanilla_transformer import engine_checks_vanilla_transformer as engine_checks
from vanilla_transformer import generation_vanilla_transformer as generation
from vanilla_transformer.cli import main
from vanilla_transformer.kernels_vanilla_transformer import Bf16Linear, Int8Linear, PackedLinear
from vanilla_transformer.loading import load, load_run
from vanilla_transformer.train import evaluate, translate
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.run_folder.files import read_recipe
from vanilla_transformer.train.translate import arriving_lines, translate_lines


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translate")
    corpus = train_toys.write_corpus(folder / "corpus")
    train(train_toys.toy_config(corpus, folder / "run"))
    return folder / "run"


def test_lines_come_back_in_order_whatever_their_lengths(run):
    pipeline = load(run)
    lines = ["ant bee cat dog elk fox", "gnu", "", "hen ibis jay", "kite " * 9]
    # a model with so little training would generate nothing
    search = {"max_extra_tokens": 9, "min_new_tokens": 8}
    together = list(translate_lines(pipeline, lines, **search))
    alone = [next(translate_lines(pipeline, [line], **search)) for line in lines]
    assert together == alone
    assert together[2] == ""
    assert len(set(together)) > 3


def test_a_search_that_is_out_of_memory_names_the_settings_to_lower():
    def search(lines, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    search.model = SimpleNamespace(generation_config=SimpleNamespace(num_beams=4))
    with pytest.raises(MemoryError, match=r"4 beams .* smaller num_beams or max_extra_tokens"):
        list(translate_lines(search, ["ant"]))


def test_languages_that_are_not_those_of_the_run_are_refused(run, tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    lines.write_text("ant\n")
    assert main(["translate", str(run), str(lines), "--src_lang", "en", "--tgt_lang", "fr"]) == 1
    assert "tgt_lang must be 'de': the model translates en to de" in capsys.readouterr().err
    assert main(["translate", str(run), str(lines), "--src_lang", "en", "--tgt_lang", "de"]) == 0
    languages = {"model": str(run), "device": "cpu"}
    transformers.pipeline("translation_en_to_de", **languages)
    with pytest.raises(ValueError, match="src_lang must be 'en'"):
        transformers.pipeline("translation_de_to_en", **languages)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ([], PackedLinear),
        (["--int8"], Int8Linear),
        (["--int8", "--num_beams", "1"], Int8Linear),
        (["--precision", "fp32"], PackedLinear),
        pytest.param(
            ["--precision", "bf16"],
            Bf16Linear,
            marks=pytest.mark.skipif(
                not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
                reason="this CPU has no bf16 kernels",
            ),
        ),
    ],
)
def test_the_precision_is_a_flag(run, tmp_path, monkeypatch, flags, kind):
    monkeypatch.setattr(engine_checks, "has_bf16_instructions", lambda: True)
    kinds = []
    begin = generation.begin_decoding

    def recording(engine, *args):
        kinds.append(type(engine.vocabulary))
        return begin(engine, *args)

    monkeypatch.setattr(generation, "begin_decoding", recording)
    (tmp_path / "lines.txt").write_text("ant bee cat\n")
    lines = list(translate.run([str(run), str(tmp_path / "lines.txt"), *flags], "translate"))
    assert len(lines) == 1
    assert kinds == [kind]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_accepts_weights_in_half_precision(run, tmp_path, dtype):
    model, tokenizer = load_run(run)
    for name, kind in (("half", dtype), ("whole", torch.float32)):
        model.to(dtype).to(kind).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "lines.txt").write_text("ant bee cat\ndog elk\n")
    half, whole = (
        list(
            translate.run(
                [str(tmp_path / name), str(tmp_path / "lines.txt"), "--int8"], "translate"
            )
        )
        for name in ("half", "whole")
    )
    assert half == whole
    flags = ["--dataset", str(read_recipe(run).dataset), "--source_lang", "en"]
    flags += ["--target_lang", "de", "--int8", "--engine", "required"]
    assert evaluate.main([str(tmp_path / "half"), *flags]) == 0


@pytest.mark.parametrize("end", list("\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"))
def test_a_translation_is_one_line_for_every_reader(end, run, tmp_path, monkeypatch):
    postprocess = TranslationPipeline.postprocess

    def broken(self, outputs):
        return [{"translation_text": f"a{end}b"} for _ in postprocess(self, outputs)]

    monkeypatch.setattr(TranslationPipeline, "postprocess", broken)
    (tmp_path / "lines.txt").write_text("ant bee cat\ndog elk\n")
    assert list(translate.run([str(run), str(tmp_path / "lines.txt")], "translate")) == ["a b"] * 2
    evaluate.evaluate(str(run), output_dir=str(tmp_path / "scores"))
    (file,) = (tmp_path / "scores" / "hypotheses").glob("*.translation.txt")
    assert file.read_text(encoding="utf-8").splitlines() == ["a b"] * 7


def test_a_file_whose_lines_end_with_carriage_returns_is_named(run, tmp_path):
    path = tmp_path / "old.txt"
    for content in (b"ant bee\rcat\rdog\r", b"ant\rbee"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"old.txt must end its lines with line feeds"):
            list(translate.run([str(run), str(path)], "translate"))
    for content in (b"ant bee\r", b"ant\r\nbee\r\n", b"ant\rbee\ncat"):
        path.write_bytes(content)
        assert list(translate.run([str(run), str(path)], "translate"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("ant\nbee\n".encode("utf-16"), "must be UTF-8, got UTF-16 by its byte order mark."),
        (b"\xfe\xff\0a\0\n", "must be UTF-8, got UTF-16 by its byte order mark."),
        ("ant\nbee\n".encode("utf-16-le"), "must be UTF-8, .* NUL .* `iconv -f UTF-16LE -t UTF-8`"),
        ("ant\nbee\n".encode("utf-16-be"), "must be UTF-8, .* NUL .* `iconv -f UTF-16BE -t UTF-8`"),
        (
            gzip.compress(b"ant\n", mtime=0),
            "must be text, or have the suffix .gz, got a gzip file.",
        ),
        (bz2.compress(b"ant\n"), "must be text, or have the suffix .bz2, got a bzip2 file."),
        (lzma.compress(b"ant\n"), "must be text, or have the suffix .xz, got an xz file."),
        (
            b"\x28\xb5\x2f\xfd\x24\x04\x21",
            "must be text, or have the suffix .zst, got a Zstandard file.",
        ),
    ],
    ids=["UTF-16", "big-endian UTF-16", "UTF-16LE", "UTF-16BE", "gzip", "bzip2", "xz", "zstd"],
)
def test_a_file_of_another_encoding_is_named(run, tmp_path, monkeypatch, content, sentence):
    path = tmp_path / "lines.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"lines.txt {sentence}"):
        list(translate.run([str(run), str(path)], "translate"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    with pytest.raises(ValueError, match=rf"^stdin {sentence}"):
        list(translate.run([str(run)], "translate"))


@pytest.mark.parametrize("is_stdin", [False, True])
def test_a_file_is_not_translated_into_itself(tmp_path, is_stdin):
    path = tmp_path / "lines.txt"
    path.write_text("ant\n")
    with path.open("rb") as read, path.open("ab") as write:
        done = subprocess.run(
            command(tmp_path, *([] if is_stdin else [str(path)])),
            stdin=read if is_stdin else None,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    name = "stdin" if is_stdin else path
    assert done.stderr.startswith(f"error: {name} must not be the file to which stdout is written:")
    assert done.returncode == 1
    assert path.read_text() == "ant\n"


def test_lines_are_read_as_they_arrive():
    read, write = os.pipe()
    with open(read, "rb") as file:
        windows = arriving_lines(file, "pipe")
        os.write(write, b"ein\ndrei\r\nzw")
        assert next(windows) == ["ein", "drei"]
        os.write(write, b"\xc3")
        os.write(write, b"\xb6lf\n\n")
        assert next(windows) == ["zw\u00f6lf", ""]
        os.write(write, b"last")
        os.close(write)
        assert list(windows) == [["last"]]


class Drops:
    """Pipe that returns a few bytes at a time, and counts them."""

    def __init__(self, text, size):
        self.text, self.size, self.given = text, size, 0

    def read1(self, _):
        part = self.text[self.given : self.given + self.size]
        self.given += len(part)
        return part


@pytest.mark.parametrize("size", [7, 4096, 65536])
def test_time_grows_with_the_length_of_a_line_not_with_its_square(size):
    seconds = []
    for length in (100_000, 1_000_000):
        start = time.perf_counter()
        text = b"x" * length + b"\nlast"
        assert sum(map(len, arriving_lines(Drops(text, size), "pipe"))) == 2
        seconds.append(time.perf_counter() - start)
    # copying the line with each part would take 100 times as long
    assert seconds[1] < 40 * seconds[0] + 0.5


def test_a_stream_without_line_feeds_is_read_up_to_the_maximum_line_length():
    pipe = Drops(b"one\n" + b"x" * (8 << 20), 65536)
    windows = arriving_lines(pipe, "stdin")
    assert next(windows) == ["one"]
    with pytest.raises(ValueError, match="stdin line 2 must have at most 1,048,576 bytes"):
        next(windows)
    assert pipe.given < (1 << 20) + 3 * 65536


@pytest.mark.parametrize("place", [0, 1, 700])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_line_with_too_many_tokens_is_refused_by_number(
    place, is_packed, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(translate, "MAX_LINE_TOKENS", 20)
    lines = ["ant bee"] * place + ["ant bee " * 40, "cat"]
    path = tmp_path / ("lines.gz" if is_packed else "lines")
    text = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(text) if is_packed else text)
    assert main(["translate", str(run), str(path), *BOUNDS]) == 1
    out, said = capsys.readouterr()
    # the lines before it are translated
    assert out.count("\n") == place
    assert f"{path} line {place + 1} must have at most 20 tokens, got " in said
    assert "split the line into sentences" in said


def test_sentences_of_a_line_may_be_longer_together_than_a_line(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(translate, "MAX_LINE_TOKENS", 20)
    path = tmp_path / "lines.txt"
    path.write_text("ant bee. Cat dog elk. Fox gnu hen. Ibis jay kite.\n\nant\n")
    assert main(["translate", str(run), str(path)]) == 1
    assert "`translate --split_sentences` does this" in capsys.readouterr().err
    for flags in (["--split_sentences"], ["--split_sentences", "en"]):
        assert main(["translate", str(run), str(path), *flags]) == 0
        lines = capsys.readouterr().out.split("\n")
        assert len(lines) == 4
        assert lines[1] == ""


def test_a_model_with_fewer_positions_has_a_lower_limit(run, tmp_path):
    pipeline = load(run)
    config = pipeline.model.config
    config.position_encoding, config.max_position_embeddings = "learned", 9
    windows = translate.fitting_lines([["ant"], ["bee " * 30]], pipeline, "file")
    assert next(windows) == ["ant"]
    with pytest.raises(ValueError, match="file line 2 must have at most 9 tokens, got "):
        next(windows)


def test_a_line_of_a_megabyte_is_refused_at_once(run, tmp_path, capsys):
    (tmp_path / "lines").write_text("ant " * 250_000)
    assert main(["translate", str(run), str(tmp_path / "lines")]) == 1
    assert "line 1 must have at most 4,096 tokens, got " in capsys.readouterr().err
    (tmp_path / "lines").write_text("ant " * 300_000)
    assert main(["translate", str(run), str(tmp_path / "lines")]) == 1
    assert "line 1 must have at most 1,048,576 bytes" in capsys.readouterr().err


def test_an_evaluation_refuses_a_sentence_with_too_many_tokens(run, tmp_path, monkeypatch):
    monkeypatch.setattr("vanilla_transformer.train.translate.MAX_LINE_TOKENS", 4)
    with pytest.raises(ValueError, match=r"test line \d must have at most 4 tokens, got "):
        evaluate.evaluate(str(run), output_dir=str(tmp_path / "scores"))


def test_a_line_longer_than_a_pipe_is_one_line(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("x" * 200_000 + "\ny\n")
    with path.open("rb") as file:
        assert [len(line) for lines in arriving_lines(file, "") for line in lines] == [
            200_000,
            1,
        ]


def test_a_line_that_is_not_utf_8_is_counted_from_the_first():
    read, write = os.pipe()
    with open(read, "rb") as file:
        windows = arriving_lines(file, "pipe")
        os.write(write, b"one\ntwo\n")
        assert next(windows) == ["one", "two"]
        os.write(write, b"thr\xff\n")
        with pytest.raises(ValueError, match="pipe line 3 must be UTF-8"):
            next(windows)
        os.close(write)


def test_the_lines_before_one_that_is_not_utf_8_are_translated(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes(b"one\ntwo\nthr\xff\nfour\n")
    with path.open("rb") as file:
        windows = arriving_lines(file, "file")
        assert next(windows) == ["one", "two"]
        with pytest.raises(ValueError, match="file line 3 must be UTF-8"):
            next(windows)


def test_a_dash_is_stdin(run, monkeypatch):
    text = b"the dog sleeps\nthe cat sleeps\n"
    found = []
    for file in (["-"], []):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        found.append(list(translate.run([str(run), *file, *BOUNDS], prog="translate")))
    assert found[0] == found[1]
    assert len(found[0]) == 2


def command(run, *arguments):
    return [sys.executable, "-m", "vanilla_transformer.cli", "translate", str(run), *arguments]


BOUNDS = ["--num_beams", "1", "--max_extra_tokens", "1"]


def test_a_file_that_cannot_be_read_is_named_before_a_model_is_loaded(tmp_path):
    path = tmp_path / "no.txt"
    with pytest.raises(ValueError, match=rf"{path} cannot be read: No such file"):
        list(translate.run([str(tmp_path / "no-model"), str(path)], prog="translate"))


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["owner/model", "owner/model-2"], None),
        (["owner/model", "owner/t5-v1.1-base"], None),
        (["owner/model", "owner/model-2", "texts.en"], "texts.en"),
        (["owner/model", "texts"], "texts"),
        (["owner/model", "data/texts.en"], "data/texts.en"),
        (["owner/model", "../texts"], "../texts"),
        (["owner/model", "/data/texts"], "/data/texts"),
        (["owner/model", "here/texts"], "here/texts"),
    ],
)
def test_the_last_word_is_a_model_if_it_can_only_be_one(words, file, tmp_path, monkeypatch):
    def load_ensemble(runs, **_):
        raise LookupError(runs)

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr(translate, "load_ensemble", load_ensemble)
    if file is None:
        with pytest.raises(LookupError) as error:
            list(translate.run(words, prog="translate"))
        assert error.value.args == (words,)
    else:
        with pytest.raises(ValueError, match=rf"^{re.escape(file)} cannot be read: No such file"):
            list(translate.run(words, prog="translate"))


def test_the_ends_of_a_term_that_a_line_does_not_have_are_not_compared(monkeypatch):
    searches, search = [], translate.has_whole_words
    monkeypatch.setattr(
        translate, "has_whole_words", lambda *it: searches.append(it) or search(*it)
    )
    glossary = {f"term {number}.": str(number) for number in range(1000)}
    line = "a term 7., xterm 8. and term 9.5"
    assert translate.glossary_targets(line, glossary) == ["7"]
    assert len(searches) == 3


@pytest.mark.parametrize(
    ("term", "found", "not_found"),
    [
        ("train", ["The train.", "trains train"], ["trains", "untrain", "train_1", "9train"]),
        ("ab ab", ["xab ab ab"], ["xab ab abx"]),
        # scripts without spaces
        ("\u72ac", ["\u3053\u308c\u306f\u72ac\u3067\u3059\u3002", "\u72ac"], []),
        ("\u72d7", ["\u6211\u7684\u72d7\u662f\u9ed1\u8272\u7684"], []),
        ("\u30a2\u30a4", ["\u3053\u306e\u30a2\u30a4\u306f"], []),
        (
            "\u0e2b\u0e21\u0e32",
            ["\u0e19\u0e35\u0e48\u0e2b\u0e21\u0e32\u0e04\u0e23\u0e31\u0e1a"],
            [],
        ),
        (
            "\u0e99\u0ec9\u0eb3",
            ["\u0e81\u0eb4\u0e99\u0e99\u0ec9\u0eb3\u0ec1\u0ea5\u0ec9\u0ea7"],
            [],
        ),
        ("GPU", ["\u3053\u306eGPU\u306f", "\u0e19\u0e35\u0e48GPU"], ["\u3053\u306eGPUs\u306f"]),
        # a mark belongs to the character before it, also at the end of a term in Thai
        ("\u0e14\u0e34", [], ["\u0e14\u0e34\u0e48"]),
        (
            "\u0930\u093e\u092e",
            ["\u0930\u093e\u092e \u0918\u0930"],
            ["\u0930\u093e\u092e\u093e", "\u0915\u093e\u0930\u093e\u092e"],
        ),
        ("Ma", ["Ma nner"], ["Ma\u0308nner", "M\u0308Ma"]),
        # one text in NFC and NFD
        ("caf\xe9", ["cafe\u0301", "caf\xe9"], ["cafe", "cafe\u0301s"]),
        ("cafe\u0301", ["cafe\u0301", "caf\xe9"], ["cafe", "caf\xe9s"]),
    ],
)
def test_a_glossary_applies_to_whole_words_in_every_script(term, found, not_found, tmp_path):
    (tmp_path / "glossary.tsv").write_text(f"{term}\ttarget\n", encoding="utf-8")
    glossary = translate.read_glossary(tmp_path / "glossary.tsv")
    for line in found:
        assert translate.glossary_targets(line, glossary) == ["target"], line
    for line in not_found:
        assert translate.glossary_targets(line, glossary) == [], line


def test_one_term_in_two_unicode_forms_needs_one_target(tmp_path):
    path = tmp_path / "glossary.tsv"
    path.write_text("caf\xe9\tBar\ncafe\u0301\tLokal\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2 must have another source term"):
        translate.read_glossary(path)


def test_a_file_can_be_compressed(run, tmp_path):
    text = b"the dog sleeps\nthe cat sleeps\n"
    (tmp_path / "plain").write_bytes(text)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(text)[:-12])
    plain, packed, cut = (
        translate.run([str(run), str(tmp_path / name), *BOUNDS], prog="translate")
        for name in ("plain", "packed.gz", "cut.gz")
    )
    assert list(packed) == list(plain)
    with pytest.raises(ValueError, match=r"cut\.gz cannot be read to its end"):
        list(cut)


def test_more_translations_than_beams_are_refused(run, tmp_path, capsys):
    source = tmp_path / "source"
    source.write_text("cat dog\n")
    for num_beams in ("1", "2"):
        flags = ["--num_beams", num_beams, "--num_return_sequences", "3"]
        assert main(["translate", str(run), str(source), *flags]) == 1
        expected = f"num_return_sequences must be at most num_beams, {num_beams}, got 3"
        assert expected in capsys.readouterr().err
    assert main(["translate", str(run), str(source), "--num_beams", "0"]) == 1
    assert "num_beams must be an integer of at least 1, got 0" in capsys.readouterr().err


def test_several_files_are_refused(run, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for file in files:
        Path(file).write_text("ant\n")
    for words in ([*files], [files[0], "-"], [files[0], str(run)]):
        assert main(["translate", str(run), *words]) == 1
        assert capsys.readouterr().err == (
            f"error: only the last argument may be a file, got the file {files[0]} before it: run "
            "the command once for each file, with the file as the last argument.\n"
        )


def test_a_file_without_permission_is_named(run, tmp_path, monkeypatch, capsys):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(translate.Path, "open", refuse)
    assert main(["translate", str(run), str(tmp_path / "source")]) == 1
    assert f"{tmp_path / 'source'} cannot be read: Permission denied." in capsys.readouterr().err


def test_too_many_beams_for_the_memory_give_a_clear_error(run, tmp_path, capsys):
    source = tmp_path / "source"
    source.write_text("cat dog\n")
    # more bytes than any machine can address
    assert main(["translate", str(run), str(source), "--num_beams", str(10**15)]) == 1
    said = capsys.readouterr().err.strip().split("\n")[-1]
    assert said.startswith("error: out of memory: a batch with 1,000,000,000")


def test_a_slow_pipe_gets_each_translation_at_once(run):
    process = subprocess.Popen(
        command(run, *BOUNDS), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    # without an answer the test would wait forever
    guard = threading.Timer(120, process.kill)
    guard.start()
    for line in ("ant bee cat dog\n", "elk fox gnu\n", "\n"):
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer.endswith("\n"), "it was killed"
    assert answer == "\n"
    process.stdin.close()
    assert process.stdout.read() == ""
    assert process.wait() == 0
    guard.cancel()


def test_a_reader_that_closes_the_pipe_ends_the_command_silently(run, tmp_path):
    (tmp_path / "lines.txt").write_text("ant bee\n" * 2000)
    translate = " ".join(command(run, *BOUNDS, str(tmp_path / "lines.txt")))
    done = subprocess.run(
        ["bash", "-c", f"{translate} | head -n 2; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.count("\n") == 2
    assert done.stderr == ""


def test_the_progress_is_shown_only_on_a_terminal(run, tmp_path):
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    (tmp_path / "lines.txt").write_text("ant bee\n" * 3)
    arguments = command(run, *BOUNDS, str(tmp_path / "lines.txt"))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=theirs, text=True, check=True)
    os.close(theirs)
    shown = b""
    try:
        while arrived := os.read(ours, 4096):
            shown += arrived
    except OSError:
        # a terminal whose program has ended raises this error
        pass
    os.close(ours)
    assert done.stdout.count("\n") == 3
    assert b"3 lines" in shown
    assert b"lines/s" in shown
    piped = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert (piped.stdout, piped.stderr) == (done.stdout, "")
