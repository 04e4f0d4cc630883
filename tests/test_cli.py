"""Each command works, and fails with one sentence."""

import io
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vanilla_transformer.cli import main
from vanilla_transformer.console import run_command
from vanilla_transformer.loading import load_run
from vanilla_transformer.train import loop
from vanilla_transformer.train.demo import contents, translation_table

SMALL_MODEL = "{hidden_size: 16, encoder_layers: 1, decoder_layers: 1, encoder_ffn_dim: 16}"
SMALL = ["--vocab_size", "300", "--model", SMALL_MODEL, "--tokens_per_step", "1000"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run folder of four steps, with two checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    arguments = ["--output_dir", str(folder), "--max_steps", "4", "--save_every_steps", "2"]
    assert main(["tokenize", "demo", *SMALL, "--output_dir", str(folder)]) == 0
    assert main(["train", "demo", *SMALL, *arguments]) == 0
    return folder


def test_tokenize_replaces_no_recipe_of_the_user(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("# what I think of it\ndataset: demo\n", encoding="utf-8")
    assert main(["tokenize", str(recipe), *SMALL, "--output_dir", str(tmp_path)]) == 1
    assert "with a recipe.yaml, which would be replaced" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [recipe]
    assert recipe.read_text(encoding="utf-8").startswith("# what I think")


@pytest.mark.parametrize("command", [["tokenize"], ["train"], ["train", "--dry_run"]])
def test_what_cannot_be_trained_is_refused_before_any_text_is_read(command, capsys, tmp_path):
    folder = tmp_path / "run"
    for given, message in (
        (["--vocab_size", "120"], "vocab_size must be at least 260"),
        (["--paper_row", "Z9"], "got 'Z9'"),
    ):
        words = [command[0], "demo", *SMALL, *command[1:], *given, "--dataset", "nowhere/at-all"]
        assert main([*words, "--output_dir", str(folder)]) == 1
        assert message in capsys.readouterr().err
        assert not folder.exists()


def test_a_dry_run_of_tokenize_leaves_nothing(capsys, tmp_path):
    folder = tmp_path / "run"
    assert main(["tokenize", "demo", *SMALL, "--output_dir", str(folder), "--dry_run"]) == 0
    assert "vocab_size: 300" in capsys.readouterr().out
    assert not folder.exists()


def test_the_help_of_tokenize_says_which_flags_it_refuses(capsys):
    with pytest.raises(SystemExit):
        main(["tokenize", "--help"])
    assert "--resume, --dry_run measured and --tokenizer are refused" in capsys.readouterr().out


def test_average_evaluate_and_the_table(run, capsys):
    assert main(["average", str(run), "--num_checkpoints", "2"]) == 0
    assert "the mean of 2 checkpoints" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--num_beams", "1", "--max_extra_tokens", "1"]) == 0
    out = capsys.readouterr().out
    assert "nrefs:1|case:mixed|eff:no|tok:13a" in out
    assert "exact match" in out
    assert "num_beams 1, length_penalty_alpha 0.6, max_extra_tokens 1" in out
    kept = "test-max_extra_tokens1-num_beams1"
    table = translation_table(run / "hypotheses", kept, 5)
    first = (run / "hypotheses" / f"{kept}.source.txt").read_text().splitlines()[0]
    assert first[:20] in table
    assert "README.md" in contents(run)


def test_translate_writes_every_line_in_order(run, capsys, monkeypatch, tmp_path):
    lines = "The party is on Monday.\n\nYes.\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    bounds = ["--num_beams", "2", "--max_extra_tokens", "2"]
    assert main(["translate", str(run), *bounds]) == 0
    from_stdin = capsys.readouterr().out.split("\n")
    assert len(from_stdin) == 4
    assert from_stdin[1] == ""
    (tmp_path / "lines.txt").write_text(lines)
    assert main(["translate", str(run), str(tmp_path / "lines.txt"), *bounds]) == 0
    assert capsys.readouterr().out.split("\n") == from_stdin


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "demoo"], "Did you mean 'demo'?"),
        (["train", "demo", "--warmup_step", "3"], "Did you mean 'warmup_steps'?"),
        (["train", "demo", "--max_steps", "few"], "max_steps"),
        (["tokenize", "demo", "--dataset", "no/such/folder"], "no/such/folder"),
        (["tokenize", "demo", "--resume"], "--resume must not be given to tokenize"),
        (
            ["tokenize", "demo", "--tokenizer", "some/model"],
            "tokenizer must be null for `tokenize`",
        ),
        (["average", "no_such_run"], "no_such_run"),
        (["evaluate", "no_such_run"], "no_such_run"),
        (["translate", "./no_such_run"], "no_such_run"),
        (["push", "./no_such_run", "name"], "repo_id must be user/name, got 'name'"),
    ],
)
def test_an_error_is_one_sentence(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not list(tmp_path.glob("runs/*/*.safetensors"))


def test_a_checkpoint_translates_like_any_model(run, capsys, tmp_path):
    (tmp_path / "lines.txt").write_text("Yes.\n")
    checkpoint = run / "checkpoints" / "step-2"
    assert main(["translate", str(checkpoint), str(tmp_path / "lines.txt")]) == 0
    assert capsys.readouterr().out.endswith("\n")
    _, tokenizer = load_run(checkpoint)
    assert tokenizer.get_vocab() == load_run(run)[1].get_vocab()
    assert load_run(checkpoint)[0].generation_config.max_extra_tokens == 50


def test_push_uses_its_flags(capsys, monkeypatch):
    pushed = []

    def push_to_hub(*arguments, **options):
        pushed.append((arguments, options))
        return SimpleNamespace(commit_url="where it is")

    monkeypatch.setattr("vanilla_transformer.publishing.push_to_hub", push_to_hub)
    flags = ["--private", "--revision", "next", "--commit_message", "a new one"]
    flags.append("--trust_remote_code")
    assert main(["push", "some/run", "user/name", *flags]) == 0
    assert main(["push", "some/run", "user/name"]) == 0
    options = {"private": True, "revision": "next", "commit_message": "a new one"}
    options["trust_remote_code"] = True
    run_and_name = ("some/run", "user/name")
    # without a flag, the function or the account's default decides
    assert pushed == [(run_and_name, options), (run_and_name, {"trust_remote_code": False})]
    assert capsys.readouterr().out == "where it is\n" * 2


def test_an_interrupted_training_does_not_report_success(monkeypatch):
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (None, 0)):
        monkeypatch.setattr(loop, "train_until_signal", lambda config, resume, it=number: it)
        assert main(["train", "demo"]) == status


def test_an_interrupted_command_prints_no_error(capsys):
    def stopped(arguments):
        raise KeyboardInterrupt

    assert run_command(stopped) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "output", "status", "said"),
    [
        ("train demo --dry_run", "| true", 0, ""),
        ("train --help", "| true", 0, ""),
        ("--help", "| true", 0, ""),
        (
            "train demo --dry_run",
            "> /dev/full",
            1,
            "error: stdout cannot be written: No space left on device.\n",
        ),
    ],
)
def test_a_closed_or_full_output_ends_the_command(words, output, status, said):
    # Python flushes the buffer at the very end
    environment = {name: one for name, one in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = f"{sys.executable} -m vanilla_transformer.cli {words} {output}"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (status, said)


def test_a_full_output_is_named_after_the_first_line(run):
    # a container often has this variable
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vanilla_transformer.cli", "translate", str(run)],
            input="ant bee\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert done.returncode == 1
    assert done.stderr == "error: stdout cannot be written: No space left on device.\n"


def test_a_closed_stream_is_named(run):
    for closed, name in (("<&-", "stdin"), (">&-", "stdout")):
        command = f"{sys.executable} -m vanilla_transformer.cli translate {run} {closed}"
        done = subprocess.run(
            ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (
            1,
            f"error: {name} must be open, got a closed one.\n",
        )


def test_a_run_without_a_model_names_the_command_that_makes_one(run, capsys, tmp_path):
    shutil.copytree(run / "checkpoints", tmp_path / "run/checkpoints")
    assert main(["translate", str(tmp_path / "run")]) == 1
    message = (
        f"a run that has no model yet: `vanilla-transformer average {tmp_path / 'run'}` averages"
    )
    assert message in capsys.readouterr().err


def test_a_line_that_is_not_utf_8_is_named(run, capsys, tmp_path):
    (tmp_path / "latin.txt").write_bytes("one\nzw\xf6lf\n".encode("latin-1"))
    assert main(["translate", str(run), str(tmp_path / "latin.txt")]) == 1
    assert "latin.txt line 2 must be UTF-8" in capsys.readouterr().err


def test_an_unknown_command_shows_the_usage(capsys):
    for arguments in (["tranlate", "x"], []):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert "usage: vanilla-transformer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("translate x --beams=3", "--beams is not a flag. Did you mean '--num_beams'?"),
        ("evaluate x --sorce f", "--sorce is not a flag. Did you mean '--source'?"),
        (
            "score x --source s --target t --jsonlines",
            "--jsonlines is not a flag. Did you mean '--jsonl'?",
        ),
        ("average x --minute 3", "--minute is not a flag. Did you mean '--minutes'?"),
        ("paper table1 --output o", "--output is not a flag. Did you mean '--output_dir'?"),
        ("serve x --prot 8000", "--prot is not a flag. Did you mean '--port'?"),
        (
            "export marian r o --quantisation int8",
            "--quantisation is not a flag. Did you mean '--quantization'?",
        ),
        ("push x y z", "z is one argument too many."),
    ],
)
def test_an_unknown_flag_names_the_closest_one(arguments, message, capsys):
    words = arguments.split()
    assert main(words) == 1
    command = " ".join(words[: 2 if words[0] == "paper" else 1])
    error = f"error: {message} `vanilla-transformer {command} --help` shows the usage.\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["evaluate", "RUN", "--dataset", ""], "--dataset"),
        (["evaluate", "RUN", "--split="], "--split"),
        (
            ["evaluate", "RUN", "--source", "a.txt", "--reference", "a.txt", "--reference="],
            "--reference",
        ),
        (["translate", "RUN", "--src_lang", ""], "--src_lang"),
        (["distill", "RUN", "--output_dir", "out", "--source="], "--source"),
        (["paper", "table3", "--output_dir", ""], "--output_dir"),
        (["serve", "RUN", "--host="], "--host"),
    ],
)
def test_the_value_of_a_shell_variable_that_is_not_set_is_refused(arguments, name, capsys):
    assert main(arguments) == 1
    assert f"{name} must not be empty, got ''." in capsys.readouterr().err


def test_the_page_names_gradio_if_it_is_not_installed(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "vanilla_transformer.space.app", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["space"]) == 1
    assert "pip install 'vanilla_transformer[space]'" in capsys.readouterr().err
