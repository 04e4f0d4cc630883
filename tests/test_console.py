import gc
import io
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from tqdm import tqdm

from vanilla_transformer.console import (
    add_file_to_errors,
    fast_imports,
    print_line,
    require_nonempty_path,
    run_command,
)


def failing(error):
    def command(arguments):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("a rule\nin  two lines"), "error: a rule in two lines\n"),
        (TypeError("no rule"), "error: unexpected TypeError: no rule. This is a bug in "),
        (AttributeError("x" * 10_000), "error: unexpected AttributeError: xxx"),
        (RecursionError(), "error: unexpected RecursionError. This is"),
        (zlib.error("bad data"), "error: unexpected zlib.error: bad data. This is"),
        (type("PanicException", (BaseException,), {})("rust"), "error: unexpected PanicException"),
    ],
)
def test_every_error_is_one_short_sentence(error, sentence, capsys):
    assert run_command(failing(error), []) == 1
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert said.count("\n") == 1
    assert len(said) < 2500
    assert ("with --traceback for details" in said) == ("unexpected" in said)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_every_command_writes_utf_8_in_every_locale(monkeypatch, encoding):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding, newline="\r\n"))
    assert run_command(lambda _: print_line("ant ± 蟻"), [], logs=False) == 0
    assert output.getvalue() == "ant ± 蟻\n".encode()


def test_a_removed_current_folder_is_named(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert run_command(lambda _: print_line(Path("runs").resolve()), []) == 1
    said = capsys.readouterr().err
    assert said == "error: the current folder does not exist any more: change to another folder.\n"


@pytest.mark.parametrize("error", [ValueError("a rule"), TypeError("no rule")])
def test_traceback_is_shown_and_is_no_argument_of_the_command(error):
    got = []

    def command(arguments):
        got.extend(arguments)
        raise error

    with pytest.raises(type(error)):
        run_command(command, ["a", "--traceback", "b"])
    assert got == ["a", "b"]


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
def test_exits_that_are_no_errors_pass(error):
    with pytest.raises(type(error)):
        run_command(failing(error), [])


@pytest.mark.parametrize("error", [ValueError("a rule."), TypeError("no rule")])
def test_the_file_that_was_read_is_named(error, tmp_path, capsys):
    def command(arguments):
        with add_file_to_errors(tmp_path), add_file_to_errors(tmp_path / "file.json"):
            raise error

    assert run_command(command, []) == 1
    said = capsys.readouterr().err
    assert said.count(str(tmp_path)) == 1
    assert f"(in {tmp_path / 'file.json'})" in said


def test_an_error_begins_on_a_new_line_after_a_progress_bar(capsys):
    def command(arguments):
        bars = [tqdm(total=5), tqdm(total=7)]
        bars[0].update()
        raise ValueError("a rule")

    assert run_command(command, []) == 1
    said = capsys.readouterr().err
    assert said.split("\n")[-2] == "error: a rule"


@pytest.mark.parametrize("module", ["cli", "train", "paper"])
def test_every_command_line_takes_traceback(module):
    command = [sys.executable, "-m", f"vanilla_transformer.{module}"]
    command += ["train"] if module == "cli" else []
    command += ["./no-such-thing", "--traceback"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "--traceback" not in done.stderr


@pytest.mark.parametrize("path", ["", " ", "a\0b"])
def test_a_folder_without_a_name_is_refused(path):
    with pytest.raises(ValueError, match="output_dir must be the path of a folder"):
        require_nonempty_path(path, "output_dir")


@pytest.mark.parametrize("path", ["~", "~/runs/a"])
def test_a_folder_that_is_called_like_the_sign_of_the_home_folder_is_refused(path):
    with pytest.raises(ValueError, match=f"output_dir must be a path without ~, .*, got '{path}'"):
        require_nonempty_path(path, "output_dir")
    assert require_nonempty_path("runs/~", "output_dir") == Path("runs/~")


def test_the_garbage_collector_pauses_for_imports_only():
    with fast_imports():
        assert not gc.isenabled()
        # a module imports the package
        with fast_imports():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), fast_imports():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
    done = subprocess.run(
        [sys.executable, "-c", "import gc, vanilla_transformer; print(gc.isenabled())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


def test_the_garbage_collector_frees_the_objects_of_nanobind_at_the_exit():
    code = """if True:
        import atexit, gc
        from vanilla_transformer.console import run_command

        # the functions of atexit are called in reverse order
        atexit.register(lambda: print(gc.get_freeze_count()))
        run_command(lambda _: None, [], logs=False)
        # the class of the classes of every extension module that is made with nanobind
        nb_meta = type("nb_meta", (type,), {"__module__": "nanobind"})
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_the_garbage_collector_reads_imported_objects_neither_after_imports_nor_at_the_exit():
    code = """if True:
        import atexit, gc
        from vanilla_transformer.console import fast_imports, run_command

        def count_of_young():
            return len(gc.get_objects(generation=0)) + len(gc.get_objects(generation=1))

        with fast_imports():
            objects = [[] for _ in range(100_000)]
        print(count_of_young() < 10_000, gc.get_freeze_count())
        # the functions of atexit are called in reverse order. torch for GPUs has nanobind, whose
        # objects must be freed
        has_nanobind = any(it.__module__ == "nanobind" for it in type.__subclasses__(type))
        atexit.register(lambda: print((gc.get_freeze_count() > 100_000) != has_nanobind))
        run_command(lambda _: print(gc.get_freeze_count()), [], logs=False)
        gc.freeze()
        with fast_imports():
            pass
        print(gc.get_freeze_count() > 100_000)
        gc.unfreeze()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0", "0", "True", "True"]
