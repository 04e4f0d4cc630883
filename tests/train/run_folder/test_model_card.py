"""A model card agrees with the files of the run, and the Hub can read it."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import train_toys
import yaml
from huggingface_hub import ModelCard

from vanilla_transformer.publishing import export_for_hub
from vanilla_transformer.train.averaging import average_run
from vanilla_transformer.train.evaluate import evaluate
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.recipe import load_config
from vanilla_transformer.train.run_folder.environment import read_environment, write_environment
from vanilla_transformer.train.run_folder.files import read_recipe
from vanilla_transformer.train.run_folder.model_card import write_model_card


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    corpus = train_toys.write_corpus(folder / "corpus")
    train(train_toys.toy_config(corpus, folder / "run", learning_rate_factor=2.0))
    evaluate(str(folder / "run"))
    return folder / "run"


def card(run, commits=None, **changes):
    """Write the card with other settings, and with the given commits of the corpora."""
    settings = {**vars(read_recipe(run)), **changes}
    environment = run / "environment.txt"
    before = environment.read_text()
    if commits is not None:
        environment.write_text(before.replace("dataset_commit: none", f"dataset_commit: {commits}"))
    try:
        write_model_card(run, load_config("paper-base", settings), 12_440)
    finally:
        environment.write_text(before)
    return ModelCard.load(run / "README.md")


def test_a_card_names_sizes_steps_average_and_losses(run):
    text = card(run).text
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for fact in (
        "trained from scratch for 12 steps on `corpus`. Its weights are the mean of 2 checkpoints, "
        "of steps 8, 12.",
        "| parameters | 12,440, embeddings included |",
        "| layers | 1 in the encoder, 2 in the decoder |",
        "| d_model, d_ff, heads | 16, 24, 2 |",
        "| vocabulary | 290 tokens, shared by both languages |",
        "| batch | about 300 source and 300 target tokens per step |",
        "| learning rate | section 5.3, 5 warm-up steps, times 2 |",
        f"| steps | 12, {metrics[-2]['epoch']:.1f} epochs |",
        f"| loss | {metrics[-2]['loss']:.3f} training, smoothed; "
        f"{metrics[-1]['validation_loss']:.3f} validation, perplexity "
        f"{metrics[-1]['validation_perplexity']:.2f} |",
        "![Loss against steps](pictures/loss.png)",
        "at most 50 tokens more than the source",
    ):
        assert fact in text
    cores, threads = os.cpu_count(), torch.get_num_threads()
    used = f"{cores}" if threads >= cores else f"{threads} of {cores}"
    assert re.search(rf"\| time \| \d+ s on {used} CPU cores \|", text)
    sources = (run / "hypotheses/test.source.txt").read_text().splitlines()
    assert f"| {sources[0]} | {' '.join(sources[0].split()[::-1])} | " in text


@pytest.mark.parametrize(
    ("threads", "processes", "said"),
    [
        (1, 1, "1 of 8 CPU cores"),
        (3, 2, "6 of 8 CPU cores, 2 processes"),
        (4, 2, "8 CPU cores, 2 processes"),
        (16, 1, "8 CPU cores"),
    ],
)
def test_a_card_has_the_number_of_used_cores(threads, processes, said, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "elsewhere")
    path = folder / "environment.txt"
    text = path.read_text(encoding="utf-8")
    for name, fact in {
        "cpus": 8,
        "threads_per_process": threads,
        "processes": processes,
        "gpus": "none",
    }.items():
        text = re.sub(rf"^{name}: .*$", f"{name}: {fact}", text, flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")
    assert re.search(rf"\| time \| \d+ s on {said} \|", card(folder).text)


def test_a_card_has_no_change_of_a_start_that_saved_no_checkpoint(run, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "changed"))
    starts = [
        "first_step: 5\nchanged: seed 2 (was 1)",
        "first_step: 5",
        "first_step: 9\nchanged: x",
    ]
    with (folder / "environment.txt").open("a", encoding="utf-8") as file:
        file.write("".join(f"{start}\n\n" for start in starts))
    assert "| changed settings | from step 9 on: x |" in card(folder).text


def test_a_card_has_the_last_finite_loss(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "skipped")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = next(line["loss"] for line in reversed(lines) if "loss" in line)
    # the last steps were all skipped, and the validation loss was not finite
    lines.append({**lines[-2], "step": 99, "loss": None})
    lines.append({"step": 99, "validation_loss": None, "validation_perplexity": None})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert f"| loss | {expected:.3f} training, smoothed |" in card(folder).text


def test_a_card_contains_the_recipe_of_the_run(run, tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", card(run).text, re.DOTALL)
    (tmp_path / "again.yaml").write_text(block)
    assert load_config(str(tmp_path / "again.yaml")) == read_recipe(run)


def test_the_results_of_a_card_are_read_as_written(run, tmp_path):
    scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))["test"]
    for name in (run, tmp_path / "published"):
        if name != run:
            export_for_hub(run, name, "user/name")
        data = ModelCard.load(name / "README.md").data
        assert (data.language, data.pipeline_tag) == (["en", "de"], "translation")
        # through the data classes and back
        assert type(data)(**yaml.safe_load(data.to_yaml())).to_dict() == data.to_dict()
        found = {result.metric_type: result for result in data.eval_results}
        assert list(found) == ["bleu", "chrf"]
        for metric, result in found.items():
            assert result.metric_value == round(scores[metric], 2)
            assert scores[f"{metric}_signature"] in result.metric_name
            assert (result.dataset_type, result.dataset_split) == ("corpus", "test")
        assert data.datasets is None


def test_a_card_names_a_dataset_on_the_hub_but_not_a_local_one(run):
    data = card(run, dataset="wmt/wmt14", name="de-en", commits="0" * 40).data
    assert data.datasets == ["wmt/wmt14"]
    result = data.eval_results[0]
    assert (result.dataset_type, result.dataset_config) == ("wmt/wmt14", "de-en")
    own = card(run)
    assert own.data.datasets is None
    assert str(run.parent) not in own.text.split("## Results")[1].split("## Training")[0]


def test_a_card_names_the_mixed_corpora(run):
    mix = [{"dataset": "some/corpus", "name": "de-en"}, {"dataset": "../texts/crawl"}]
    commits = ", ".join(["0" * 40, "1" * 40, "none", "0" * 40])
    mixed = [*mix, {"dataset": "wmt/wmt14"}]
    found = card(run, dataset="wmt/wmt14", name="de-en", mix=mixed, commits=commits)
    named = "`wmt/wmt14`, `de-en` and `some/corpus`, `de-en` and `crawl` and `wmt/wmt14`. Its"
    assert f"for 12 steps on {named}" in found.text
    assert found.data.datasets == ["wmt/wmt14", "some/corpus"]
    commits = ", ".join(["none", "1" * 40, "none"])
    assert card(run, mix=mix, commits=commits).data.datasets == ["some/corpus"]
    # local when the run began, even if no longer here
    assert card(run, dataset="some/corpus").data.datasets is None


def test_a_card_has_a_license_only_if_the_recipe_has_one(run):
    assert card(run, license="apache-2.0").data.license == "apache-2.0"
    assert card(run).data.license is None
    assert "license" not in card(run).content.split("---")[1]


def test_scores_of_other_weights_are_not_results_of_the_model(run, tmp_path):
    own = "the mean of 2 checkpoints, of steps 8, 12"
    evaluate(str(run), num_beams=1, against=str(run))
    before = card(run).text
    assert "| test | 7 |" in before
    assert "test-num_beams1 against test of " in before
    assert "The first sentences of test; " in before
    average_run(run, num_checkpoints=1)
    found = ModelCard.load(run / "README.md")
    assert found.data.eval_results is None
    assert f"| test, of other weights: {own} | 7 |" in found.text
    assert "test-num_beams1, of other weights, against test of " in found.text
    assert "The first sentences of test, by other weights; " in found.text
    average_run(run)
    assert "| test | 7 |" in card(run).text


def test_scores_of_another_search_are_not_results_of_the_model(run):
    assert "| test | 7 |" in card(run).text
    other = card(run, length_penalty_alpha=1.0)
    assert other.data.eval_results is None
    search = "num_beams 4, length_penalty_alpha 0.6, max_extra_tokens 50"
    assert f"| test, by another search: {search} | 7 |" in other.text


def test_the_time_names_all_machines_of_the_run(run):
    environment = run / "environment.txt"
    before = environment.read_text()
    on_gpu = before.replace("gpus: none", "gpus: NVIDIA H200")
    try:
        environment.write_text(f"{on_gpu}{before}{before}")
        text = card(run).text
    finally:
        environment.write_text(before)
    assert re.search(r"\| time \| \d+ s on NVIDIA H200, then [^,|]* CPU cores \|", text)


def test_a_card_is_written_even_if_the_environment_is_truncated(run, tmp_path):
    own = Path(shutil.copytree(run, tmp_path / "own"))
    environment = own / "environment.txt"
    environment.write_text(environment.read_text()[:60])
    assert "| time |" not in card(own).text
    (own / "hypotheses/test.translation.txt").write_text("one\n")
    with pytest.raises(
        ValueError, match=r"translation.txt must have as many lines as .*, 7, got 1"
    ):
        card(own)


def test_a_command_with_line_feeds_is_written_on_one_line(tmp_path, monkeypatch):
    words = ["--mix", "\n- dataset: it's\n\n", "--max_steps", "3"]
    monkeypatch.setattr("sys.argv", ["train", *words])
    write_environment(tmp_path, {"first_step": 1})
    (start,) = read_environment(tmp_path)
    assert start["first_step"] == "1"
    command = f"printf '%s\\0' {start['command'][start['command'].index('--mix') :]}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == words


def test_the_current_folder_is_named_by_its_full_name(run, monkeypatch):
    folder = Path(read_recipe(run).dataset).resolve()
    monkeypatch.chdir(folder)
    found = card(run, dataset=".")
    assert f"for 12 steps on `{folder.name}`" in found.text
    assert {one.dataset_type for one in found.data.eval_results} == {folder.name}


def test_a_card_shows_the_first_of_several_starts(run):
    environment = run / "environment.txt"
    before = environment.read_text()
    environment.write_text(before + before.replace("first_step: 1", "first_step: 5"))
    text = card(run).text
    environment.write_text(before)
    assert "The first of 2 starts; `environment.txt` contains all." in text
    assert text.count("first_step:") == 1
    assert " starts; " not in card(run).text


def test_the_table_has_every_score_that_was_computed(run):
    path = run / "scores.json"
    before = path.read_text(encoding="utf-8")
    scores = json.loads(before)
    extra = {"comet": 0.81254, "comet_signature": "Unbabel/wmt22-comet-da"}
    comparison = {"score": 31.0, "ci": 1.25, "other": 29.5, "other_ci": 1.5, "p_value": 0.012}
    extra["against"] = {"runs/other": {"bleu": {**comparison, "signature": "bs:1000|seed:12345"}}}
    scores["validation"] = {**scores["test"], **extra, "split": "validation"}
    del scores["validation"]["compound_bleu"], scores["validation"]["compound_bleu_signature"]
    path.write_text(json.dumps(scores))
    found = card(run)
    path.write_text(before)
    rows = [line for line in found.text.split("\n") if line.startswith(("| test |", "| valid"))]
    assert rows[0].split(" | ")[4:6] == ["-", f"{scores['test']['compound_bleu']:.2f}"]
    assert rows[1].split(" | ")[4:6] == ["0.8125", "-"]
    assert "- COMET, validation: `Unbabel/wmt22-comet-da`" in found.text
    assert "BLEU 31.00 ± 1.25 against 29.50 ± 1.50, p = 0.0120: `bs:1000|seed:12345`" in found.text
    metrics = [(result.dataset_split, result.metric_type) for result in found.data.eval_results]
    assert ("validation", "comet") in metrics
    assert ("test", "comet") not in metrics
