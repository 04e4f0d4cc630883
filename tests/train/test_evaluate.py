"""Evaluation: translations of a split, in order, and their scores with signatures."""

import dataclasses
import errno
import gzip
import io
import json
import os
import shutil
import subprocess
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import equations
import pytest
import torch
import train_toys
from accelerate import Accelerator
from huggingface_hub import ModelCard
from sacrebleu.dataset import DATASETS
from torch.overrides import TorchFunctionMode

from vanilla_transformer import cli
from vanilla_transformer.loading import load_run
from vanilla_transformer.train import evaluate as evaluating
from vanilla_transformer.train import validation
from vanilla_transformer.train.data.leaks import describe_leaks
from vanilla_transformer.train.evaluate import evaluate, main, score_table
from vanilla_transformer.train.evaluation import task
from vanilla_transformer.train.evaluation.results import _copy_slow_scores, save_translations
from vanilla_transformer.train.evaluation.sets import read_files
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.recipe import save_config
from vanilla_transformer.train.run_folder.environment import read_environment
from vanilla_transformer.train.run_folder.files import read_recipe
from vanilla_transformer.train.scoring import confidence_intervals, score_translations
from vanilla_transformer.train.step import smoothed_loss_sum
from vanilla_transformer.train.validation import validation_loss


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    corpus = train_toys.write_corpus(folder / "corpus")
    train(train_toys.toy_config(corpus, folder / "run"))
    return folder / "run"


def test_scores_are_kept_with_their_signatures_and_translations(run):
    scores = evaluate(str(run), max_extra_tokens=50)
    assert scores["sentences"] == 7
    assert 0 <= scores["bleu"] <= 100
    assert scores["bleu_signature"].startswith(
        "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:"
    )
    assert "nc:6|nw:0" in scores["chrf_signature"]
    table = score_table(scores)
    assert f"{scores['bleu']:.2f}   {scores['bleu_signature']}" in table
    assert f"{scores['chrf']:.2f}   {scores['chrf_signature']}" in table
    assert scores["search"] == {
        "num_beams": 4,
        "length_penalty_alpha": 0.6,
        "max_extra_tokens": 50,
    }
    assert json.loads((run / "scores.json").read_text(encoding="utf-8"))["test"] == scores
    for side in ("source", "reference", "translation"):
        text = (run / f"hypotheses/test.{side}.txt").read_text(encoding="utf-8")
        assert text.count("\n") == 7
    card = ModelCard.load(run / "README.md")
    own = [result for result in card.data.eval_results if result.dataset_split == "test"]
    assert [result.metric_type for result in own] == ["bleu", "chrf"]
    assert scores["bleu_signature"] in card.text


def kept(run):
    return json.loads((run / "scores.json").read_text(encoding="utf-8"))


def headline(run):
    return [
        (result.dataset_split, result.metric_value)
        for result in ModelCard.load(run / "README.md").data.eval_results
    ]


def test_another_split_is_kept_beside_the_first(run):
    evaluate(str(run))
    evaluate(str(run), split="validation")
    assert {"test", "validation"} <= kept(run).keys()


def test_another_search_is_kept_beside_the_models_own(run):
    own = evaluate(str(run))
    before = headline(run)
    other = evaluate(str(run), num_beams=1, max_extra_tokens=1)
    key = "test-max_extra_tokens1-num_beams1"
    assert (kept(run)["test"], kept(run)[key]) == (own, other)
    assert (run / f"hypotheses/{key}.translation.txt").is_file()
    assert headline(run) == before
    assert f"| {key} |" in (run / "README.md").read_text(encoding="utf-8")
    # the given search is the model's default
    asked = evaluate(str(run), num_beams=4)
    assert kept(run)["test"] == asked


def test_other_data_is_kept_beside_the_runs_own(run, tmp_path):
    own = evaluate(str(run))
    before = headline(run)
    evaluate(str(run), source_lang="de", target_lang="en")
    other = train_toys.write_corpus(tmp_path / "other", pairs=5)
    evaluate(str(run), dataset=str(other))
    assert kept(run)["test"] == own
    keys = [key for key in kept(run) if key.endswith(("-de-en", "-en-de"))]
    assert len(keys) == 2
    assert keys[0].endswith("-test-de-en")
    assert keys[1].endswith("other-test-en-de")
    assert headline(run) == before
    # the run's own dataset, given by name
    again = evaluate(str(run), dataset=own["dataset"], source_lang="en")
    assert kept(run)["test"] == again


class NoFloat64(TorchFunctionMode):
    """Stand-in for a device without float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


class Guess(torch.nn.Module):
    """Model that predicts the next token only from the last one."""

    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Embedding(9, 9)

    def forward(self, decoder_input_ids, use_cache):
        return SimpleNamespace(logits=self.scores(decoder_input_ids))


def test_the_loss_needs_no_float64_and_weighs_every_token_the_same():
    model = Guess()
    ids = torch.randint(9, (3, 4))
    labels = torch.tensor([[5, 2, -100, -100], [1, 8, 7, 2], [2, -100, -100, -100]])
    batches = [{"decoder_input_ids": ids[rows], "labels": labels[rows]} for rows in ([0, 1], [2])]
    with NoFloat64():
        loss = validation_loss(Accelerator(cpu=True), model, batches)
    log_probs = [equations.log_softmax(row) for row in model.scores.weight.tolist()]
    losses = [
        -log_probs[token][label]
        for token, label in zip(ids.flatten().tolist(), labels.flatten().tolist(), strict=True)
        if label != -100
    ]
    assert len(losses) == 7
    assert loss == pytest.approx(sum(losses) / 7, rel=1e-5)
    assert model.training


def test_the_loss_never_holds_the_scores_of_all_tokens(monkeypatch):
    model = train_toys.toy_model(output_bias=True)
    torch.nn.init.normal_(model.lm_head.bias)
    ids = torch.randint(3, 19, (2, 5))
    labels = ids.clone()
    labels[1, 2:] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    expected = smoothed_loss_sum(model.eval()(**inputs).logits, labels, 0.0) / 7
    held = []

    def counted(scores, *given):
        held.append(scores.numel())
        return smoothed_loss_sum(scores, *given)

    # a hook on a module would count as a change of the model, for which all logits are computed
    monkeypatch.setattr(validation, "smoothed_loss_sum", counted)
    # memory for four tokens: logits in two precisions, and log-probabilities
    monkeypatch.setattr(validation, "block_bytes", lambda device: 4 * 19 * 3 * 4)
    model.train()
    loss = validation_loss(Accelerator(cpu=True), model, [{**inputs, "labels": labels}])
    assert held == [4 * 19, 4 * 19, 2 * 19]
    assert loss == pytest.approx(expected.item(), rel=1e-6)


def test_wrong_arguments_are_refused(run, tmp_path):
    with pytest.raises(ValueError, match="bleu_tokenizer must be one of"):
        evaluate(str(run), bleu_tokenizer="13b")
    with pytest.raises(ValueError, match=r"split must be one of train, .* Did you mean 'test'"):
        evaluate(str(run), split="tets")
    with pytest.raises(
        ValueError,
        match=r"run must be a run folder, or dataset, source or sacrebleu must be given",
    ):
        evaluate(str(tmp_path))
    with pytest.raises(ValueError, match=r"run must be a run folder, got .*: no such folder"):
        evaluate(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="source_lang and target_lang must be given"):
        evaluate(str(tmp_path), dataset="demo")


def test_the_bleu_of_the_paper_has_its_own_name(run):
    scores = evaluate(str(run), max_extra_tokens=50)
    assert "tok:moses-de-compounds" in scores["compound_bleu_signature"]
    line = next(line for line in score_table(scores).split("\n") if "moses" in line)
    assert line.startswith("as in paper")
    assert f"{scores['compound_bleu']:.2f}   compound-split tokenised BLEU, " in line
    card = ModelCard.load(run / "README.md")
    assert {result.metric_type for result in card.data.eval_results} == {"bleu", "chrf"}
    assert scores["compound_bleu_signature"] in card.text


def test_another_tokenizer_of_bleu_is_kept_beside_the_runs_own(run, tmp_path):
    own = evaluate(str(run))
    other = evaluate(str(run), bleu_tokenizer="none")
    assert "tok:none" in other["bleu_signature"]
    assert (kept(run)["test"], kept(run)["test-bleu_tokenizer-none"]) == (own, other)
    # the recipe says that the text is already tokenized
    tokenized = tmp_path / "tokenized"
    shutil.copytree(run, tokenized)
    text = (tokenized / "recipe.yaml").read_text(encoding="utf-8")
    assert "bleu_tokenizer: 13a" in text
    text = text.replace("bleu_tokenizer: 13a", "bleu_tokenizer: none")
    (tokenized / "recipe.yaml").write_text(text, encoding="utf-8")
    assert evaluate(str(tokenized))["bleu_signature"] == other["bleu_signature"]
    assert "tok:none" in kept(tokenized)["test"]["bleu_signature"]


@pytest.mark.slow
def test_a_trained_model_translates_the_same_in_one_process_and_in_two(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus", pairs=300)
    settings = {"max_steps": 400, "save_every_steps": 400, "warmup_steps": 100}
    config = train_toys.toy_config(corpus, tmp_path / "run", **settings, model={"hidden_size": 32})
    train(config)
    scores = check_that_two_processes_do_what_one_does(tmp_path / "run", tmp_path / "out")
    assert scores["bleu"] > 5


@pytest.fixture
def talker(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "talker")
    model, _ = load_run(folder)
    # a model with so little training would generate nothing
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight.data, std=0.5)
    model.save_pretrained(folder)
    return folder


def test_several_processes_translate_each_sentence_once(talker, tmp_path):
    check_that_two_processes_do_what_one_does(talker, tmp_path / "out")


@pytest.mark.parametrize(
    ("slip", "sentence"),
    [
        (("--split", "tets"), "split must be one of"),
        (("--bleu_tokenizer", "13b"), "bleu_tokenizer must be one of"),
    ],
)
def test_several_processes_print_an_error_once(talker, tmp_path, slip, sentence):
    command = train_toys.command(
        talker,
        *(*slip, "--output_dir", str(tmp_path)),
        processes=2,
        module="vanilla_transformer.train.evaluate",
    )
    environment = train_toys.environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count(f"error: {sentence}") == 1, done.stderr


def check_that_two_processes_do_what_one_does(folder, out):
    own = evaluate(str(folder))
    assert own["sentences"] == 7
    result = train_toys.run_command(
        *(folder, "--output_dir", str(out)),
        processes=2,
        module="vanilla_transformer.train.evaluate",
    )
    shared = kept(out)["test"]
    assert (own.pop("processes"), shared["processes"]) == (1, 2)
    # printed once, by the main process
    assert result.stdout == score_table(shared) + "\n"
    for name in own.keys() - {"seconds"}:
        assert shared[name] == own[name]
    sides = {
        path.name: (path.read_bytes(), (folder / "hypotheses" / path.name).read_bytes())
        for path in (out / "hypotheses").iterdir()
    }
    assert len(sides) == 3
    assert all(left == right for left, right in sides.values())
    assert len(set(sides["test.translation.txt"][0].split(b"\n"))) > 5
    return own


def test_two_runs_are_compared_by_saved_translations(run, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("hypotheses"))
    message = "saved translations of the same sentences, got .* without them under validation: eval"
    with pytest.raises(ValueError, match=message):
        evaluate(str(run), split="validation", against=str(other))
    before = evaluate(str(other), split="validation", num_beams=1, max_extra_tokens=2)
    key = "validation-max_extra_tokens2-num_beams1"
    for side in ("source", "reference", "translation"):
        path = other / f"hypotheses/{key}.{side}.txt"
        path.rename(other / f"hypotheses/validation.{side}.txt")
    assert main([str(run), "--split", "validation", "--against", str(other)]) == 0
    out = capsys.readouterr().out
    comparison = kept(run)["validation"]["against"][f"validation of {other}"]
    assert comparison["chrf"]["other"] == pytest.approx(before["chrf"])
    assert comparison["chrf"]["score"] == pytest.approx(kept(run)["validation"]["chrf"])
    assert f"against validation of {other}, paired bootstrap" in out
    assert f"p = {comparison['chrf']['p_value']:.4f}   {comparison['chrf']['signature']}" in out
    # translations by weights that a later training has replaced
    older = Path(shutil.copytree(other, tmp_path / "older"))
    scores = kept(older)
    scores["validation"]["average"] = "the mean of 2 checkpoints, of steps 1, 2"
    (older / "scores.json").write_text(json.dumps(scores))
    with pytest.raises(
        ValueError, match=r"whose saved translations are from its model, got .* steps 1, 2"
    ):
        evaluate(str(run), split="validation", against=str(older))
    # the same translations again, and a comparison with a third run
    third = Path(shutil.copytree(other, tmp_path / "third"))
    evaluate(str(run), split="validation")
    evaluate(str(run), split="validation", against=str(third))
    assert kept(run)["validation"]["against"] == {
        f"validation of {other}": comparison,
        f"validation of {third}": comparison,
    }
    # the same names, other sentences
    (other / "hypotheses/validation.source.txt").write_text("ant\n" * 11)
    with pytest.raises(ValueError, match="saved translations of the same sentences"):
        evaluate(str(run), split="validation", against=str(other))


def test_errors_of_writing_and_comparing_are_found_before_the_translation(
    run, tmp_path, monkeypatch, capsys
):
    def translated(*given):
        raise AssertionError("it was translated")

    other = Path(shutil.copytree(run, tmp_path / "other"))
    evaluate(str(other))
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    monkeypatch.setattr(evaluating, "translate_shared", translated)
    (tmp_path / "file").touch()
    assert main([str(run), "--output_dir", str(tmp_path / "file")]) == 1
    assert "output_dir must be a folder, got the file" in capsys.readouterr().err
    assert main([str(run), "--bleu_tokenizer", "13b"]) == 1
    assert "bleu_tokenizer must be one of" in capsys.readouterr().err
    for text, message in (('{"test": {', "scores.json must be JSON"), ("[]", "must be a mapping")):
        (other / "scores.json").write_text(text)
        assert main([str(other)]) == 1
        assert message in capsys.readouterr().err
        assert (other / "scores.json").read_text() == text
    path = other / "hypotheses/test.translation.txt"
    for text in (b"one\n", before[path] + b"one more\n"):
        path.write_bytes(text)
        assert main([str(run), "--against", str(other)]) == 1
        lines = text.count(b"\n")
        message = f"{path} must have 7 lines, one for each sentence, got {lines}"
        assert message in capsys.readouterr().err


def test_translations_are_saved_even_if_scoring_fails(run, tmp_path, monkeypatch):
    def failed(*given):
        raise ValueError("no score today")

    own = Path(shutil.copytree(run, tmp_path / "own", ignore=shutil.ignore_patterns("hypo*")))
    monkeypatch.setattr(task, "comet_program", lambda: None)
    monkeypatch.setattr(evaluating, "comet_score", failed)
    with pytest.raises(ValueError, match="no score today"):
        evaluate(str(own), comet="any")
    assert len((own / "hypotheses/test.translation.txt").read_text().splitlines()) == 7


def test_a_full_disk_keeps_the_translations_of_an_evaluation(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    (folder / "hypotheses").mkdir(parents=True)
    written = []

    def fill(descriptor):
        written.append(descriptor)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fill)
    path = folder / "hypotheses/test.translation.txt"
    reference = folder / "hypotheses/test.reference.txt"
    with pytest.raises(OSError, match=rf"^{reference} cannot be written \([\d,]+ kB free\): No"):
        save_translations(folder, "test", ["a"], [["b"]], ["c"])
    assert path.read_text(encoding="utf-8") == "c\n"


def test_the_run_folder_gets_the_card_under_any_of_its_paths(run, tmp_path, monkeypatch):
    own = Path(shutil.copytree(run, tmp_path / "own"))
    (own / "scores.json").unlink(missing_ok=True)
    (own / "README.md").write_text("")
    monkeypatch.chdir(tmp_path)
    evaluate("own", output_dir=str(own))
    assert "| test | 7 |" in (own / "README.md").read_text(encoding="utf-8")


def test_another_search_is_always_compared_with_the_default_search(talker, monkeypatch):
    compared = []
    monkeypatch.setattr(
        evaluating, "compare_translations", lambda *given: compared.append(given) or {}
    )
    evaluate(str(talker))
    own = (talker / "hypotheses/test.translation.txt").read_text(encoding="utf-8").split("\n")[:-1]
    search = {"num_beams": 1, "max_extra_tokens": 2}
    for _ in range(2):
        assert list(evaluate(str(talker), **search, against=str(talker))["against"]) == [
            f"test of {talker}"
        ]
        translations, others, *_ = compared.pop()
        assert others == own != translations
    # with other data as well
    data = {"source_lang": "de", "target_lang": "en"}
    evaluate(str(talker), **data)
    for _ in range(2):
        (name,) = evaluate(str(talker), **data, **search, against=str(talker))["against"]
        assert name.endswith(f"-test-de-en of {talker}")


def test_a_comparison_names_the_search_of_the_other_run(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other", ignore=shutil.ignore_patterns("hypotheses"))
    evaluate(str(other))
    for key in ("test", "test-num_beams1"):
        scores = evaluate(str(run), num_beams=1, against=str(other))
        assert f"against {key} of {other}, paired bootstrap" in score_table(scores)
        card = (run / "README.md").read_text(encoding="utf-8")
        assert f"test-num_beams1 against {key} of {other}, paired bootstrap" in card
        evaluate(str(other), num_beams=1)


def test_comparisons_are_dropped_when_the_translations_change(run, tmp_path):
    own = Path(shutil.copytree(run, tmp_path / "own"))
    other = Path(shutil.copytree(run, tmp_path / "other"))
    evaluate(str(other))
    evaluate(str(own), against=str(other))
    path = own / "hypotheses/test.translation.txt"
    path.write_text("another\n" + path.read_text(encoding="utf-8").split("\n", 1)[1])
    assert "against" not in evaluate(str(own))


def test_the_data_of_an_evaluation_is_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        evaluate("run", "test", "demo")


def test_the_other_direction_of_a_run_is_scored_with_a_warning(run, caplog):
    own = dict.fromkeys(task.Request.__dataclass_fields__)
    own |= {"run": str(run), "references": ()}
    task.resolve_request(task.Request(**own))
    assert not caplog.messages
    task.resolve_request(task.Request(**own | {"source_lang": "de", "target_lang": "en"}))
    (warning,) = caplog.messages
    assert warning == "The run translates from en to de, and is scored in the other direction."


def test_equal_source_and_target_languages_are_refused(run, capsys):
    assert main([str(run), "--source_lang", "de"]) == 1
    said = capsys.readouterr().err
    assert "target_lang must differ from source_lang, got 'de' for both. For paraphrases" in said


def test_a_test_set_of_wmt_in_sgml_is_refused_with_the_command_that_extracts_it(
    run, tmp_path, capsys
):
    path = tmp_path / "newstest.sgm"
    path.write_text('<srcset><seg id="1">ant bee</seg></srcset>\n', encoding="utf-8")
    assert main([str(run), "--source", str(path), "--reference", str(path)]) == 1
    said = capsys.readouterr().err
    assert "newstest.sgm must have a sentence on each line, got .sgm: write the text of its" in said
    assert "`sacrebleu -t wmt14 -l en-de --echo src`" in said


def test_a_missing_corpus_of_a_recipe_is_not_reported_as_an_argument(run, tmp_path, capsys):
    elsewhere = shutil.copytree(run, tmp_path / "elsewhere")
    config = read_recipe(elsewhere)
    # a path that is relative to the folder of the training
    save_config(dataclasses.replace(config, dataset="texts/of/mine"), elsewhere / "recipe.yaml")
    note = (
        f"({elsewhere / 'recipe.yaml'} names this dataset; relative paths start from the folder in "
        "which the training was started: run the command there, or give another text with "
    )
    assert main([str(elsewhere)]) == 1
    said = capsys.readouterr().err
    assert f"got 'texts/of/mine': no such folder {note}--dataset, --source or " in said
    out = tmp_path / "distilled"
    assert cli.main(["distill", str(elsewhere), "--output_dir", str(out)]) == 1
    assert f"got 'texts/of/mine': no such folder {note}--source)." in capsys.readouterr().err
    # here the user names the dataset
    assert main([str(elsewhere), "--dataset", "texts/of/others"]) == 1
    assert "got 'texts/of/others': no such folder.\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '<srcset setid="newstest">\n<seg id="1">ant bee</seg>\n',
            "has JSON or markup, but whole lines are scored.",
        ),
        (
            "ant\tbee\nbee\tant\n",
            "has a tab, but whole lines are scored. To score the pairs of a table, give --dataset.",
        ),
    ],
)
def test_other_formats_than_lines_are_scored_with_a_warning(tmp_path, caplog, text, message):
    path, lines = tmp_path / "newstest.txt", tmp_path / "lines.txt"
    path.write_text(text, encoding="utf-8")
    lines.write_text("ant < bee\nbee\n", encoding="utf-8")
    read_files([lines, path])
    (warning,) = caplog.messages
    assert warning == f"The first line of {path} {message}"


def test_the_only_split_of_a_file_is_proposed(run, tmp_path, capsys):
    table = tmp_path / "pairs.tsv"
    table.write_text("en\tde\nant\tbee\n", encoding="utf-8")
    assert main([str(run), "--dataset", str(table)]) == 1
    said = capsys.readouterr().err
    assert f"got 'test'. --split train scores all pairs of {table}. --source and" in said


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no folder in which none can be made")
def test_a_folder_that_cannot_be_made_is_refused_before_the_translation(run, capsys, monkeypatch):
    monkeypatch.setattr(evaluating, "translate_shared", lambda *_, **__: pytest.fail("translated"))
    assert main([str(run), "--output_dir", "/proc/no/folder"]) == 1
    said = capsys.readouterr().err
    assert "output_dir must be a folder that results can be written to, got /proc/no/folder" in said


def test_an_end_of_line_inside_a_text_does_not_shift_lines(run, tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    (corpus / "test.en").write_bytes(b"ant\rbee cat\n")
    (corpus / "test.de").write_bytes(b"cat\rbee ant\n")
    kept_before = shutil.ignore_patterns("hypotheses", "scores.json")
    folder = shutil.copytree(run, tmp_path / "run", ignore=kept_before)
    recipe = (folder / "recipe.yaml").read_text(encoding="utf-8")
    recipe = recipe.replace(f"dataset: {read_recipe(run).dataset}", f"dataset: {corpus}")
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    assert evaluate(str(folder))["sentences"] == 1
    rows = (folder / "README.md").read_text(encoding="utf-8").split("| source | reference |")[1]
    rows = rows.split("\n\n")[0].split("\n")[2:]
    assert len(rows) == 1
    assert rows[0].startswith("| ant bee cat | cat bee ant |")
    assert "against" in evaluate(str(folder), against=str(folder))


def test_a_missing_comet_is_reported_before_the_translation(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(evaluating, "load", lambda *given: pytest.fail("too late"))
    assert main([str(run), "--comet"]) == 1
    assert "comet needs the program comet-score" in capsys.readouterr().err


def test_comet_is_saved_with_the_other_scores(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(task, "comet_program", lambda: "comet-score")
    scored = []
    monkeypatch.setattr(evaluating, "comet_score", lambda *given: scored.append(given) or 0.8125)
    assert main([str(run), "--comet", "Unbabel/another", "--output_dir", str(tmp_path)]) == 0
    assert "COMET        0.8125   Unbabel/another" in capsys.readouterr().out
    assert kept(tmp_path)["test"]["comet"] == 0.8125
    texts = [
        (tmp_path / f"hypotheses/test.{side}.txt").read_text(encoding="utf-8").split("\n")[:-1]
        for side in ("source", "translation", "reference")
    ]
    assert scored == [(*texts, "Unbabel/another")]


def test_slow_scores_of_other_translations_are_not_kept():
    new = {"bleu_signature": "nrefs:1", "chrf": 2.0, "exact_match": 0.5}
    slow = {"comet": 0.8125, "comet_signature": "any", "against": {"other": {}}}
    same = dict(new)
    _copy_slow_scores(same, {**new, **slow})
    assert same == {**new, **slow}
    # an evaluation of other translations has ended before its scores were saved
    others = {**new, "chrf": 2.5}
    _copy_slow_scores(others, {**new, **slow})
    assert others == {**new, "chrf": 2.5}


def test_a_run_is_evaluated_with_the_revision_it_was_trained_on(run, tmp_path, monkeypatch):
    class Asked(BaseException):
        pass

    def asked(*place, revision, streaming, columns, repair):
        raise Asked(*place[1:], revision, streaming)

    recipe = read_recipe(run)
    named_recipe = dataclasses.replace(recipe, name="de-en", revision="v1.0")
    save_config(named_recipe, tmp_path / "recipe.yaml")
    monkeypatch.setattr(task, "load_translations", asked)
    for named in ({}, {"dataset": recipe.dataset}):
        with pytest.raises(Asked) as own:
            evaluate(str(tmp_path), **named)
        assert own.value.args == ("de-en", "en", "de", "v1.0", False)
    # an evaluation needs whole splits: with streaming, only the training split is not whole
    save_config(dataclasses.replace(recipe, streaming=True), tmp_path / "recipe.yaml")
    for split, is_streamed in (("train", False), ("test", True)):
        with pytest.raises(Asked) as streamed:
            evaluate(str(tmp_path), split=split)
        assert streamed.value.args == (None, "en", "de", None, is_streamed)
    with pytest.raises(Asked) as other:
        evaluate(str(tmp_path), dataset="some/corpus", name="x")
    assert other.value.args == ("x", "en", "de", None, False)
    for named in ({}, {"dataset": "some/corpus"}):
        with pytest.raises(Asked) as newer:
            evaluate(str(tmp_path), split="train", revision="v2.0", **named)
        assert newer.value.args == (None, "en", "de", "v2.0", False)


def test_another_revision_counts_as_other_data(run, tmp_path, monkeypatch):
    own = Path(shutil.copytree(run, tmp_path / "own"))
    loaded = task.load_translations
    monkeypatch.setattr(
        task, "load_translations", lambda *place, revision, **how: loaded(*place, **how)
    )
    assert evaluate(str(own), revision="v2.0")["revision"] == "v2.0"
    (key,) = kept(own).keys() - kept(run).keys()
    assert key.endswith("-v2.0-test-en-de")
    assert kept(run)["test"]["revision"] is None


LINES = [["ant bee cat", "dog", "elk fox"], ["cat bee ant", "dog", "fox elk"]]


def write_lines(folder, **sides):
    """Write one file for each side; return their paths."""
    paths = []
    for name, lines in sides.items():
        paths.append(folder / f"news.{name}")
        paths[-1].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return paths


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="pipes have no paths")
def test_a_test_set_may_come_from_pipes():
    paths = []
    for text in (b"ant bee\nowl\n", b"bee\nelk"):
        read, write = os.pipe()
        os.write(write, text)
        os.close(write)
        paths.append(f"/dev/fd/{read}")
    assert read_files(paths) == [["ant bee", "owl"], ["bee", "elk"]]
    for path in paths:
        os.close(int(Path(path).name))


def test_a_custom_test_set_can_have_several_references(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = Path(shutil.copytree(run, tmp_path / "own"))
    before = headline(own)
    (tmp_path / "my").mkdir()
    other = ["cat bee", "owl", "fox elk"]
    files = [
        path.relative_to(tmp_path)
        for path in write_lines(tmp_path / "my", en=LINES[0], de=LINES[1], de2=other)
    ]
    with gzip.open("my/news.de2.gz", "wb") as file:
        file.write(files[2].read_bytes())
    flags = ["--source", files[0], "--reference", files[1], "--reference", "my/news.de2.gz"]
    assert main(["own", *map(str, flags)]) == 0
    name = "my-news.en-2-references-en-de"
    scores = kept(own)[name]
    assert scores["references"] == ["my/news.de", "my/news.de2.gz"]
    assert (scores["dataset"], scores["split"], scores["sentences"]) == ("my/news.en", None, 3)
    assert scores["bleu_signature"].startswith("nrefs:2|")
    texts = {
        side: (own / f"hypotheses/{name}.{side}.txt").read_text("utf-8").splitlines()
        for side in ("source", "reference", "reference2", "translation")
    }
    assert [*texts.values()][:3] == [*LINES, other]
    expected = score_translations(texts["translation"], LINES[1], None, "de", [other])
    assert {name: scores[name] for name in expected} == expected
    assert "data         my/news.en, en-de, 3 sentences" in capsys.readouterr().out
    # the score is not one of the dataset of the run
    assert headline(own) == before
    assert f"| {name} | 3 |" in (own / "README.md").read_text(encoding="utf-8")
    # one path, and the function: the same result and a comparison with itself
    assert evaluate(own, source=files[0], reference=files[1])["sentences"] == 3
    against = evaluate(own, source=files[0], reference=files[1:2], num_beams=1, against=own)
    assert list(against["against"]) == [f"my-news.en-en-de of {own}"]
    assert kept(own)[name] == scores


def test_results_of_other_sentences_are_not_replaced(run, tmp_path, monkeypatch):
    own = Path(shutil.copytree(run, tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    files = {"source": "news.en", "reference": "news.de"}
    write_lines(tmp_path, en=LINES[0], de=LINES[1])
    first = evaluate(own, **files)
    assert evaluate(own, **files)["bleu"] == first["bleu"]
    before = (own / "scores.json").read_bytes()
    for side in ("en", "de"):
        write_lines(tmp_path, **{"en": LINES[0], "de": LINES[1], side: ["dog", "elk", "fox"]})
        with pytest.raises(
            ValueError, match=r"name news\.en-en-de, got other lines in .*\.txt\. Set"
        ):
            evaluate(own, **files)
    assert (own / "scores.json").read_bytes() == before


def test_a_table_is_evaluated_with_the_columns_of_the_run_or_with_others(
    run, tmp_path, monkeypatch, capsys
):
    own = Path(shutil.copytree(run, tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    columns = {"en": "English", "de": "German"}
    save_config(dataclasses.replace(read_recipe(run), columns=columns), own / "recipe.yaml")
    lines = [f"{one}\t{two}\n" for one, two in zip(*LINES, strict=True)]
    Path("test.tsv").write_text("English\tGerman\n" + "".join(lines))
    Path("plain.tsv").write_text("".join(lines))
    data = ["--split", "train", "--dataset"]
    assert main(["own", *data, "test.tsv"]) == 0
    assert (
        main([str(run), *data, "test.tsv", "--output_dir", "out", "--columns", str(columns)]) == 0
    )
    for folder in (own, tmp_path / "out"):
        source = folder / "hypotheses/test.tsv-train-en-de.source.txt"
        assert source.read_text().splitlines() == LINES[0]
    assert main(["own", *data, "plain.tsv"]) == 1
    assert "must have the columns English and German" in capsys.readouterr().err
    assert main(["own", *data, "plain.tsv", "--columns", "null"]) == 0
    # text files have no columns
    write_lines(tmp_path, en=LINES[0], de=LINES[1])
    assert main(["own", *data, "news"]) == 0
    assert main(["own", *data, "news", "--columns", str(columns)]) == 1
    assert "columns must be null because 'news' has no columns" in capsys.readouterr().err
    assert main(["own", *data, "plain.tsv", "--columns", "{en: 2, de: 1}"]) == 1
    assert "other sentences under the name plain.tsv-train-en-de" in capsys.readouterr().err
    assert main(["own", *data, "plain.tsv", "--columns", "{en: 1}"]) == 1
    assert "columns must give a name, or a number from 1, for each of" in capsys.readouterr().err


def test_a_dash_is_no_file_and_the_path_of_stdin_is_named():
    with pytest.raises(
        ValueError, match=r"^- cannot be read: No such file or directory\. Give /dev/"
    ):
        read_files(["-", "-"])


def test_files_can_be_pipes(run, tmp_path, capsys):
    texts = ["".join(f"{line}\n" for line in lines) for lines in LINES[:2]]
    pipes = ["--source", train_toys.pipe_of(texts[0]), "--reference", train_toys.pipe_of(texts[1])]
    assert main([str(run), *pipes, "--output_dir", str(tmp_path / "out")]) == 0
    (references,) = (tmp_path / "out/hypotheses").glob("*.reference.txt")
    assert references.read_text() == texts[1]
    pipe = train_toys.pipe_of("\n")
    assert main([str(run), "--source", pipe, "--reference", train_toys.pipe_of(texts[1])]) == 1
    assert f"{pipe} and /dev/fd/" in capsys.readouterr().err


def test_invalid_utf_8_is_refused_in_every_split(run, tmp_path, capsys):
    (tmp_path / "latin.tsv").write_bytes("bee\tant\ncat\tgrün\n".encode("latin-1"))
    data = ["--dataset", str(tmp_path / "latin.tsv"), "--split", "train"]
    assert main([str(run), *data, "--output_dir", str(tmp_path / "out")]) == 1
    assert "latin.tsv line 2 must be UTF-8" in capsys.readouterr().err


def test_a_wrong_test_set_is_refused_before_a_model_is_loaded(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluating, "load", lambda *given: pytest.fail("too late"))
    source, target = write_lines(tmp_path, en=LINES[0], de=LINES[1])
    short, empty = write_lines(tmp_path, short=LINES[1][:2], empty=[])
    sacrebleu = ("--sacrebleu", "wmt14")
    for flags, message in (
        ((source, short), f"{source} and {short} must have the same number of lines, got 3 and 2"),
        ((empty, target), f"{empty} must have at least one line, got none"),
        ((source, empty), f"{empty} must have at least one line, got none"),
        ((source, tmp_path / "no"), f"{tmp_path / 'no'} cannot be read: No such file"),
        ((source,), "source and reference must be given together, got no reference"),
        ((None, target), "source and reference must be given together, got no source"),
        ((source, target, *sacrebleu), "and sacrebleu must be given, got source, sacrebleu"),
        ((source, target, "--split", "test"), "sacrebleu must be given, got source, split"),
        ((source, target, "--target_lang", "es"), "target_lang must be en or de, the languages of"),
        ((None, None, "--sacrebleu", "wmt14-full"), "Did you mean 'wmt14/full'?"),
        ((None, None, "--sacrebleu", "newstest"), "got 'newstest'. `sacrebleu --list` lists them"),
        (
            (None, None, *sacrebleu, "--target_lang", "fi"),
            "must be a language pair of sacreBLEU's wmt14, one of cs-en, en-cs, de-en, ",
        ),
    ):
        source_flags = [["--source", flags[0]]] if flags[0] else []
        reference = [["--reference", flags[1]]] if flags[1:2] and flags[1] else []
        words = [*chain(*source_flags, *reference), *flags[2:]]
        assert main([str(run), *map(str, words)]) == 1
        err = capsys.readouterr().err
        assert message in err
        assert "Traceback" not in err


def put_sacrebleu_set(folder, name="wmt14", pair="en-de"):
    """Write a test set as sacreBLEU stores it after a download."""
    (folder / name / "raw").mkdir(parents=True)
    fields = {"src": LINES[0], "ref": LINES[1]}
    for field in ("src", "ref", "docid", "genre", "origlang"):
        text = "".join(f"{line}\n" for line in fields.get(field, ()))
        (folder / name / f"{name}.{pair}.{field}").write_text(text, encoding="utf-8")


def test_a_test_set_of_sacrebleu_is_found_in_its_folder(run, tmp_path):
    put_sacrebleu_set(tmp_path / "sets")
    done = subprocess.run(
        train_toys.command(
            run,
            *("--sacrebleu", "wmt14", "--output_dir", str(tmp_path / "out")),
            module="vanilla_transformer.train.evaluate",
        ),
        env={**train_toys.environment(), "SACREBLEU": str(tmp_path / "sets")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "data         sacrebleu wmt14, en-de, 3 sentences" in done.stdout
    scores = kept(tmp_path / "out")["sacrebleu-wmt14-en-de"]
    assert (scores["dataset"], scores["split"]) == ("sacrebleu wmt14", None)
    source = tmp_path / "out/hypotheses/sacrebleu-wmt14-en-de.source.txt"
    assert source.read_text(encoding="utf-8").splitlines() == LINES[0]


def test_without_a_network_a_test_set_is_refused_in_one_sentence(
    run, tmp_path, monkeypatch, capsys
):
    def unreachable(*given):
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setattr(DATASETS["wmt14"], "_outdir", str(tmp_path))
    monkeypatch.setattr(DATASETS["wmt14"], "_rawdir", str(tmp_path / "raw"))
    assert main([str(run), "--sacrebleu", "wmt14"]) == 1
    err = capsys.readouterr().err
    assert "error: sacreBLEU's wmt14 for en-de cannot be downloaded or read: <urlopen error" in err
    assert "Traceback" not in err
    # sacreBLEU ends the process if the file is another one than it was
    monkeypatch.setattr("urllib.request.urlopen", lambda *given: io.BytesIO(b"<html>"))
    assert main([str(run), "--sacrebleu", "wmt14"]) == 1
    assert "wmt14 for en-de cannot be downloaded or read: see above" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flores101", "flores200", "spBLEU-1K"])
@pytest.mark.parametrize(
    ("failure", "reason"),
    [(URLError("no network"), "<urlopen error no network>"), (SystemExit(1), "see above")],
)
def test_without_a_network_a_tokenizer_of_bleu_is_refused_in_one_sentence(
    run, tmp_path, monkeypatch, capsys, name, failure, reason
):
    def fail(*given):
        raise failure

    monkeypatch.setattr("urllib.request.urlopen", fail)
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.SACREBLEU_DIR", str(tmp_path))
    assert main([str(run), "--bleu_tokenizer", name]) == 1
    sentence = f"tokenizer of bleu_tokenizer, '{name}', cannot be downloaded or read by sacreBLEU: "
    assert f"error: the {sentence}{reason}.\n" in capsys.readouterr().err


def test_intervals_are_printed_and_kept(run):
    scores = evaluate(str(run))
    texts = [
        (run / f"hypotheses/test.{side}.txt").read_text(encoding="utf-8").split("\n")[:-1]
        for side in ("translation", "reference")
    ]
    intervals = confidence_intervals(texts[0], texts[1:])
    assert kept(run)["test"]["intervals"] == intervals
    chrf = f"chrF {intervals['chrf']['mean']:.2f} ± {intervals['chrf']['ci']:.2f}"
    assert f"\n95% interval BLEU {intervals['bleu']['mean']:.2f} ± " in score_table(scores)
    card = (run / "README.md").read_text(encoding="utf-8")
    for text in (score_table(scores), card):
        assert f"{chrf}   bs:1000|seed:12345" in text
    assert "- 95% confidence intervals, test: BLEU " in card


def in_training(text):
    """Lines of a table of scores, or of a card, on the sentences in the training text."""
    return [line.split(maxsplit=2)[2] for line in text.splitlines() if "in training " in line]


def test_files_outside_of_the_folder_give_results_that_are_not_hidden(run, tmp_path, monkeypatch):
    own = Path(shutil.copytree(run, tmp_path / "runs" / "own"))
    for language in ("en", "de"):
        (tmp_path / f"set.{language}").write_text("one two\n")
    monkeypatch.chdir(tmp_path / "runs")
    evaluate("own", source="../set.en", reference="../set.de", num_beams=1)
    assert list(own.glob("hypotheses/set.en-*.translation.txt"))
    assert not list(own.glob("hypotheses/.*"))


def test_results_of_a_long_path_keep_its_end(run, tmp_path, monkeypatch):
    folders = [tmp_path / f"{letter}{'x' * 120}" / ("é" * 60) for letter in "ab"]
    out = tmp_path / "out"
    for folder in folders:
        folder.mkdir(parents=True)
        for language in ("en", "de"):
            (folder / f"set.{language}").write_text("ant bee\n", encoding="utf-8")
        files = {"source": folder / "set.en", "reference": folder / "set.de"}
        evaluate(str(run), **files, num_beams=1, output_dir=out)
    first_name, second_name = kept(out)
    assert first_name[:9] != second_name[:9]
    assert first_name[9:] == second_name[9:]
    assert first_name.endswith("éé-set.en-en-de-num_beams1")
    assert len(first_name.encode()) <= 150
    for name in (first_name, second_name):
        assert (out / f"hypotheses/{name}.translation.txt").is_file()


@pytest.fixture
def leaky(tmp_path):
    """A run whose training text contains sentences of its test split."""
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    for language in ("en", "de"):
        test, train = (corpus / f"{split}.{language}" for split in ("test", "train"))
        lines = test.read_text(encoding="utf-8").splitlines(keepends=True)
        text = train.read_text(encoding="utf-8") + lines[2].upper() + lines[4]
        train.write_text(text, encoding="utf-8")
    return corpus


@pytest.mark.parametrize("drop", [False, True])
def test_the_sentences_that_were_trained_on_are_counted(leaky, drop, tmp_path, monkeypatch):
    folder = tmp_path / "leaky"
    train(train_toys.toy_config(leaky, folder, drop_leaks=drop))
    scores = evaluate(folder)
    # some of the short sentences may be in the text by chance
    before = read_environment(folder)[0]["leaks"].split("; ")[1]
    found = scores["leaks"]
    assert kept(folder)["test"]["leaks"] == found
    if drop:
        assert {count for name, count in found.items() if name != "sentences"} == {0}
        assert found["sentences"] == []
        assert ", in 0 training pairs" not in before
    else:
        assert {3, 5} <= set(found["sentences"])
        assert found["source_exact"] >= 2
        assert found["target_exact"] >= 2
        assert before == f"test: {describe_leaks(found)}"
    assert in_training(score_table(scores)) == [describe_leaks(found)]
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"\n- test: {describe_leaks(found)}\n" in card
    # the same sentences as a test set of their own, and in the other direction
    sides = [leaky / "test.en", leaky / "test.de"]
    assert evaluate(folder, source=sides[0], reference=sides[1:])["leaks"] == found
    turned = {"source_lang": "de", "target_lang": "en"}
    back = evaluate(folder, source=sides[1], reference=sides[:1], **turned)["leaks"]
    assert back["target_exact"] == found["source_exact"]
    assert back["source_exact"] == found["target_exact"]
    # counts of the same sentences are kept, so that the training text need not be read again
    copies = [shutil.copy(path, tmp_path) for path in sides]
    shutil.rmtree(leaky)
    again = evaluate(folder, source=copies[0], reference=copies[1:])["leaks"]
    assert again == ("the training text is not on this machine" if drop else found)
    others = evaluate(folder, source=copies[1], reference=copies[:1])["leaks"]
    assert others == "the training text is not on this machine"


def test_what_cannot_be_counted_says_why(run, leaky, tmp_path, monkeypatch):
    own = Path(shutil.copytree(run, tmp_path / "own", ignore=shutil.ignore_patterns("scores.json")))
    recipe = read_recipe(own)
    source, target = write_lines(tmp_path, en=LINES[0], de=LINES[1])
    for changes, reason in (
        ({"streaming": True}, "the training text is streamed"),
        ({"dataset": str(leaky)}, "the training text has changed since the training"),
        ({"dataset": "another/corpus"}, "the training text is not on this machine"),
        ({"dataset": str(tmp_path)}, "the training text cannot be read"),
        ({"target_lang": "deu"}, "the training text is in en and deu"),
    ):
        save_config(dataclasses.replace(recipe, **changes), own / "recipe.yaml")
        scores = evaluate(own, source=source, reference=target, target_lang="de")
        assert scores["leaks"] == reason
        assert in_training(score_table(scores)) == [f"not counted, because {reason}"]


def test_every_flag_reaches_the_evaluation(monkeypatch):
    given = []
    monkeypatch.setattr(evaluating, "evaluate", lambda **settings: given.append(settings))
    data = {"split": "train", "dataset": "some/corpus", "name": "x", "revision": "v1"}
    data["columns"] = {"en": 1, "de": 2}
    languages = {"source_lang": "de", "target_lang": "en"}
    scoring = {"bleu_tokenizer": "none", "comet": "y", "against": "other", "output_dir": "out"}
    search = {"num_beams": 2, "length_penalty_alpha": 0.5, "max_extra_tokens": 3}
    search["precision"] = "bf16"
    settings = {**data, **languages, **scoring, **search}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    assert main(["run", *flags, "--int8"]) == 0
    sets = ["--source=a", "--reference=b", "--reference=c", "--sacrebleu=d"]
    assert main(["run", "--trust_remote_code", *sets]) == 0
    assert given == [
        {"run": "run", **settings, "int8": True, "trust_remote_code": False},
        {
            "run": "run",
            "trust_remote_code": True,
            "source": "a",
            "reference": ["b", "c"],
            "sacrebleu": "d",
        },
    ]
