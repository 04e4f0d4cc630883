"""`make demo`, from beginning to end, and its error if training fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ctranslate2_search import InCTranslate2
from transformers import AutoTokenizer

from vanilla_transformer.cli import main
from vanilla_transformer.train.demo import run_demo


def demo(folder):
    """Run the demo in a folder, or resume it."""
    return subprocess.run(
        [Path(sys.executable).with_name("vanilla-transformer"), "demo"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.slow
def test_the_demo_translates_unseen_sentences_and_ctranslate2_agrees(tmp_path):
    done = demo(tmp_path)
    run = tmp_path / "runs" / "demo"
    scores = json.loads((run / "scores.json").read_text())["test"]
    assert scores["sentences"] == 500
    assert scores["bleu"] >= 90
    assert scores["bleu_signature"] in done.stdout
    for name in ("README.md", "pictures/loss.png", "pictures/attention.png", "metrics.jsonl"):
        assert (run / name).stat().st_size > 500
    # a finished run is only evaluated again
    metrics = (run / "metrics.jsonl").read_text()
    again = demo(tmp_path)
    assert (run / "metrics.jsonl").read_text() == metrics
    assert again.stdout.split("data  ")[0] == done.stdout.split("data  ")[0]
    # the same search in CTranslate2 finds the same translations
    exported = tmp_path / "exported"
    assert main(["export", "ctranslate2", str(run), str(exported)]) == 0
    sources, ours = (
        (run / "hypotheses" / f"test.{side}.txt").read_text(encoding="utf-8").splitlines()
        for side in ("source", "translation")
    )
    engine = InCTranslate2(exported, AutoTokenizer.from_pretrained(run), longest=100)
    theirs = [engine.tokenizer.decode(engine.ids(found)) for found in engine.paper_search(sources)]
    assert len(theirs) == 500
    assert theirs == ours


def test_a_training_that_fails_is_not_evaluated(tmp_path, capfd):
    (tmp_path / "a_file").write_text("in the way")
    with pytest.raises(
        ValueError, match="training failed with exit status 1, so there is no model to evaluate"
    ):
        run_demo(str(tmp_path / "a_file"))
    errors = [line for line in capfd.readouterr().err.splitlines() if "rror" in line]
    assert errors == [f"error: output_dir must be a folder, got the file {tmp_path / 'a_file'}."]
