"""The benchmarks run, and refuse to time models that compute different results."""

import argparse
import ast
import contextlib
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import train_toys
from sacrebleu.metrics import BLEU

from vanilla_transformer.benchmarks import (
    identical,
    marian_trainer,
    peers,
    startup,
    timing,
    training,
    translation,
    work,
)
from vanilla_transformer.benchmarks.__main__ import main, parser, split_arguments
from vanilla_transformer.benchmarks.peers import MARIAN, OURS
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.recipe import parse_arguments
from vanilla_transformer.train.run_folder.files import read_metrics


@pytest.fixture
def flags(tmp_path):
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    settings = train_toys.toy_settings(corpus, tmp_path / "run", tokens_per_step=500)
    recipe = train_toys.write_recipe(tmp_path / "toy.yaml", settings)
    return ["--recipe", str(recipe), "--output_dir", str(tmp_path / "out"), "--device", "cpu"]


def measured(capsys, *flags):
    assert main([*map(str, flags)]) == 0
    return capsys.readouterr().out


def test_the_preparation_of_a_corpus_is_measured(flags, capsys):
    table = measured(capsys, "data", *flags, "--millions", 0.01)
    assert re.search(r"^pairs +90$", table, re.MULTILINE)
    assert re.search(r"^counts +kept 90, wrong_encoding 0", table, re.MULTILINE)
    assert re.search(r"^non-padding tokens +[5-9]\d\.\d\d%$", table, re.MULTILINE)
    assert re.search(r"^planned +10,000 pairs, \d+ steps an epoch$", table, re.MULTILINE)


def test_a_stream_is_measured(flags, capsys):
    options = ("--streaming", "true", "--block_pairs", 40, "--blocks", 3)
    table = measured(capsys, "data", *flags, *options)
    assert re.findall(r"^block (\d) +from step", table, re.MULTILINE) == ["0", "1", "2"]


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize(("precision", "sampling"), [("fp32", []), ("bf16", ["--group_by_length"])])
def test_marian_learns_a_runs_corpus_with_its_updates_and_rate(
    precision, sampling, tmp_path, capsys
):
    corpus, run, out = (tmp_path / name for name in ("corpus", "run", "out"))
    train_toys.write_corpus(corpus)
    train(train_toys.toy_config(corpus, run, max_steps=12, cooldown_steps=6))
    command = [str(run), "--output_dir", str(out), "--max_steps", "6", "--splits", "validation"]
    command += ["--precision", precision, *sampling]
    assert marian_trainer.main(command) == 0
    scores = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    assert set(scores) > {"parameters", "validation-last", "validation-averaged"}
    assert scores["validation-last"]["bleu_signature"] in capsys.readouterr().out
    lines = (out / "validation-averaged.translation.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == scores["validation-averaged"]["sentences"]
    history = json.loads((out / "checkpoints/log_history.json").read_text(encoding="utf-8"))
    rates = {line["step"]: line["learning_rate"] for line in history if "learning_rate" in line}
    ours = {line["step"]: line.get("learning_rate") for line in read_metrics(run)}
    for step in (1, 2, 3):
        assert rates[step] == pytest.approx(ours[step])
    # the last half falls to 0, as in the run
    for step, share in ((4, 3 / 4), (5, 2 / 4), (6, 1 / 4)):
        assert rates[step] == pytest.approx(ours[3] * share)
    for wrong in ("0", "13"):
        with pytest.raises(ValueError, match=f"from 1 to the run's 12, got {wrong}"):
            marian_trainer.main([*command[:3], "--max_steps", wrong])
    with pytest.raises(ValueError, match=r"splits must be some of .*validation.*, got 'tset'"):
        marian_trainer.main([*command[:3], "--splits", "validation,tset"])


SMALLEST = ("--sizes", "toy", "--batches", 1, "--rounds", 1)


@pytest.mark.slow
def test_a_device_is_checked_against_the_cpu(flags, tmp_path, capsys):
    measured(capsys, "device", *flags, "--sizes", "toy", "--model_vocab_size", 300)
    study = json.loads((tmp_path / "out/study.json").read_text(encoding="utf-8"))["sections"]
    assert list(study) == ["device-arithmetic", "device-runs", "device-search"]
    runs = {row[0]: row for row in study["device-runs"]["rows"]}
    # the CPU is compared with itself
    assert runs["cpu: fp32, resumed"][1:4] == [runs["cpu: fp32"][1], 0.0, 2e-3]
    assert runs["cpu: bf16"][2] > 0
    assert [row[1] for row in study["device-search"]["rows"]] == [1.0, 1.0]


@pytest.mark.slow
def test_training_and_translation_are_measured_beside_the_same_function_of_a_peer(
    flags, tmp_path, capsys
):
    options = ("--model_vocab_size", 300, "--tokens_per_batch", 60, "--beams", 2)
    measured(capsys, "training", "translation", *flags, *SMALLEST, *options, "--batch_sizes", 3)
    study = json.loads((tmp_path / "out/study.json").read_text(encoding="utf-8"))
    training, translation = study["sections"]["training-toy"], study["sections"]["translation-toy"]
    ours, marian = training["rows"][:2]
    assert [ours[0], marian[0]] == [peers.OURS, peers.MARIAN]
    assert marian[1:4] == [1, 1, 1]
    rates = {row[0]: row[4] for row in training["rows"]}
    seconds = training["seconds"]
    # with one batch and one round, the ratio of times is the ratio of rates
    times = seconds[peers.MARIAN][0][0] / seconds[peers.OURS][0][0]
    assert rates[peers.OURS] / rates[peers.MARIAN] == pytest.approx(times) == ours[1]
    assert set(training["differences"]) == {
        name for name, peer in peers.PEERS.items() if peer.convert is not None
    }
    assert all(difference < 1e-4 for difference in training["differences"].values())
    assert [row[:2] for row in translation["rows"]][:2] == [
        ["beam 2, 3 short", peers.OURS],
        ["beam 2, 3 short", peers.MARIAN],
    ]
    assert all(row[-2] == "100%" for row in translation["rows"] if row[1] == peers.OURS)
    assert "torch" in study["environment"]


@pytest.mark.parametrize("name", [n for n, peer in peers.PEERS.items() if peer.convert is not None])
def test_timed_models_compute_the_same_function(name, monkeypatch):
    flags = argparse.Namespace(model_vocab_size=30, config=TrainConfig())
    random = np.random.default_rng(0)
    rows = {key: random.integers(3, 30, (4, 5)) for key in ("input_ids", "labels")}
    batch = work.Batch(work.Collator(0, 1, 30)(rows), np.full(4, 5), np.full(4, 5))
    assert 0 <= training.difference(name, "toy", batch, flags) < 1e-5
    peer = peers.PEERS[name]
    monkeypatch.setitem(
        peers.PEERS, name, peer._replace(loss_sum=lambda *given: 1.01 * peer.loss_sum(*given))
    )
    with pytest.raises(ValueError, match=f"of {name} must agree with ours to 0.001, got 0.01"):
        training.difference(name, "toy", batch, flags)


def test_a_timed_model_does_not_diverge():
    flags = argparse.Namespace(model_vocab_size=30, config=TrainConfig(), device="cpu")
    trainee = training.Trainee(OURS, "toy", flags)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 30, (4, 5)))
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    batch = work.Batch(
        {**tensors, "decoder_input_ids": ids.roll(1, 1)}, np.full(4, 5), np.full(4, 5)
    )
    for _ in range(10):
        trainee(batch)
    assert trainee.schedule.get_last_lr() == [training.LEARNING_RATE]


def test_an_unknown_part_or_size_is_refused(flags, capsys):
    assert main(["trainin", *flags]) == 1
    assert "'trainin' is not a part." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["training", "--sizes", "bigg"])
    assert "'bigg'" in capsys.readouterr().err
    assert main(["training", *flags, "--rounds", "0"]) == 1
    assert "rounds must be at least 1, got 0." in capsys.readouterr().err
    for name in ("threads", "steps", "longest"):
        assert main(["training", *flags, f"--{name}", "0"]) == 1
        assert f"{name} must be at least 1, got 0." in capsys.readouterr().err
    assert main(["training", *flags, "--busy", "-1"]) == 1
    assert "busy must be at least 0, got -1." in capsys.readouterr().err
    assert main(["training", *flags, "--device", "tpu"]) == 1
    assert "device must be one of cpu, cuda, got 'tpu'." in capsys.readouterr().err
    for text in ("0", "4,", "a"):
        with pytest.raises(SystemExit):
            main(["translation", "--beams", text])
        assert f"separated by commas, got {text!r}" in capsys.readouterr().err
    for part in ("training", "translation"):
        assert main([part, *flags, "--model_vocab_size", "9"]) == 1
        assert "at least 2" in (error := capsys.readouterr().err)
        assert error.endswith(
            "the vocabulary size of the corpus, got 9: set a smaller --vocab_size.\n"
        )
    assert main(["training", *flags, "--datasett", "x"]) == 1
    assert "Did you mean" in capsys.readouterr().err


def test_the_value_of_a_training_setting_is_no_part(flags, capsys):
    assert main([*flags, "--name", "training", "--rounds", "0"]) == 1
    assert "rounds must be at least 1, got 0." in capsys.readouterr().err
    # the parts may be before the flags, between them and after them
    command = ["training", "--name=data", "startup", "--seed", "3", "--recipe", "demo", "data"]
    _, other_arguments = parser().parse_known_args(command)
    assert split_arguments(other_arguments) == (
        ["training", "startup", "data"],
        ["--name=data", "--seed", "3"],
    )
    assert main([*flags, "trainin"]) == 1
    assert "'trainin' is not a part. Did you mean 'training'?" in capsys.readouterr().err


def test_a_timed_call_does_not_read_the_whole_vocabulary():
    class Tokens(list):
        def __iter__(self):
            pytest.fail("it reads every token")

    search = object.__new__(translation.Search)
    search.name = f"{translation.CTRANSLATE2}float32"
    search.tokens, search.ids_of_tokens = Tokens(["a", "b", "c"]), {"a": 0, "b": 1, "c": 2}
    search.engine = SimpleNamespace(
        translate_batch=lambda texts, **_: [SimpleNamespace(hypotheses=[text]) for text in texts]
    )
    sentences = [[2, 0], [1]]
    assert search(translation.Piece(sentences, 2, 4)) == sentences


def test_different_translations_end_the_measurement():
    found = {OURS: [[1, 2, 3], [4]], MARIAN: [[1, 2, 5], [4]]}
    assert translation.equality(found, MARIAN, must_be_same=False) == {OURS: "75%", MARIAN: "100%"}
    with pytest.raises(ValueError, match="must be those of transformers Marian, got 75% equal"):
        translation.equality(found, MARIAN, must_be_same=True)


def test_peers_that_are_not_asked_for_take_no_memory(flags, monkeypatch):
    seen = []
    monkeypatch.setattr(training, "_section", lambda size, names, *rest: seen.append(names))
    smallest = [*flags, *map(str, SMALLEST), "--tokens_per_batch", "60"]
    for given in ("torch", "marian,usual"):
        parsed, rest = parser().parse_known_args([*smallest, "--peers", given])
        parsed.config, _ = parse_arguments([parsed.recipe, *rest])
        list(training.sections(parsed))
    assert seen == [[OURS, MARIAN, "torch.nn.Transformer"], [OURS, MARIAN]]
    with pytest.raises(SystemExit):
        parser().parse_args(["--peers", "marain"])


@pytest.mark.parametrize(
    "model", [startup.OUR_MODEL, startup.MARIAN_MODEL], ids=lambda it: it["name"]
)
def test_the_script_of_the_startup_benchmark_runs_without_a_package(model):
    imports = [
        node
        for node in ast.walk(ast.parse(startup.TRANSLATE.format(**model)))
        if isinstance(node, ast.ImportFrom)
    ]
    assert len(imports) == 2
    for node in imports:
        assert node.level == 0
        assert hasattr(importlib.import_module(node.module), node.names[0].name)


def test_useful_work_is_counted_sentence_by_sentence():
    config = work.model_config("toy", 300)
    batch = work.Batch({}, np.array([3, 5]), np.array([2, 4]))
    by_hand = 0
    for source, target in ((3, 2), (5, 4)):
        d, f, v = 16, 32, 300
        products = [(source, d, d)] * 4 + [(source, d, f)] * 2
        products += [(target, d, d)] * 6 + [(source, d, d)] * 2 + [(target, d, f)] * 2
        products += [(target, d, v), (source, d, source), (source, source, d)]
        products += [(target, d, target), (target, target, d)]
        products += [(target, d, source), (target, source, d)]
        # one product forward and two backward; each term is a multiplication and an addition
        by_hand += 3 * sum(2 * a * b * c for a, b, c in products)
    assert work.training_flops(config, batch) == by_hand


def test_useful_work_of_a_search_grows_with_each_step():
    config = work.model_config("toy", 300)
    d, f, v, beams = 16, 32, 300, 3
    by_hand = 0
    for source in (3, 5):
        products = [(source, d, d)] * 6 + [(source, d, f)] * 2
        products += [(source, d, source), (source, source, d)]
        for past in range(1, 5):
            products += beams * ([(1, d, d)] * 6 + [(1, d, f)] * 2 + [(1, d, v)])
            products += beams * [(1, d, past), (1, past, d), (1, d, source), (1, source, d)]
        by_hand += sum(2 * a * b * c for a, b, c in products)
    assert work.search_flops(config, [3, 5], beams, 4) == by_hand


class Locker:
    """Implementation that allocates system resources which must be released."""

    def __call__(self, piece):
        from multiprocessing import Lock

        self.lock = Lock()


def test_contenders_give_back_what_they_took():
    program = (
        f"import sys; sys.path.append({str(Path(train_toys.__file__).parent)!r})\n"
        "import torch\n"
        "from test_benchmarks import Locker\n"
        "from vanilla_transformer.benchmarks import timing\n"
        "if __name__ == '__main__':\n"
        "    one = timing.Implementation('it', Locker, (), [1], [1], [1])\n"
        "    timing.time_in_turn([one], 1, torch.device('cpu'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        env=train_toys.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "leaked" not in done.stderr


class Quitter:
    """Implementation that ends its process."""

    def __call__(self, piece):
        sys.exit(7)


def test_a_contender_that_ends_is_named():
    # while it works and while it is built
    for quitter in (
        timing.Implementation("it", Quitter, (), [1], [1]),
        timing.Implementation("it", sys.exit, (7,), [1], [1]),
    ):
        with pytest.raises(RuntimeError, match=r"^it ended with exit 7; its error is above\.$"):
            timing.time_in_turn([quitter], 1, torch.device("cpu"))


class Sleeper:
    """Implementation that works for the time of a piece, and holds memory."""

    def __call__(self, piece):
        import time

        self.held = torch.ones(piece[1])
        time.sleep(piece[0])
        return piece


def test_a_race_times_each_piece_of_each_and_sees_its_memory():
    pieces = [(0.02, 1), (0.1, 30_000_000)]
    implementations = [timing.Implementation("it", Sleeper, (), pieces, [1, 2], [10, 20])]
    seen = []
    (result,) = timing.time_in_turn(implementations, 2, torch.device("cpu"), seen.append, range(2))
    assert seen == [{"it": pieces}]
    assert result.seconds.shape == (2, 2)
    assert (result.seconds >= [0.02, 0.1]).all()
    np.testing.assert_allclose(result.rates, [1, 2] / result.seconds)
    np.testing.assert_allclose(result.flop_rates, [10, 20] / result.seconds)
    # 30 million float32, allocated in the second piece
    assert result.peaks[0] < 60e6 < 115e6 < result.peaks[1] < 200e6


def test_a_server_answers_one_client_and_many(tmp_path, capsys):
    serve = pytest.importorskip("vanilla_transformer.benchmarks.serve")
    run, out = tmp_path / "run", tmp_path / "out"
    train(train_toys.toy_config(train_toys.write_corpus(tmp_path / "corpus"), run, max_steps=3))
    flags = ["--num_sentences", "5", "--clients", "3", "--rounds", "2"]
    assert serve.main([str(run), *flags, "--output_dir", str(out)]) == 0
    sections = json.loads((out / "study.json").read_text())["sections"]
    assert [row[:2] for row in sections["serve"]["rows"]] == [
        ["3 clients at a time", 10],
        ["one client", 5],
    ]
    assert all(0 < row[3] <= row[4] for row in sections["serve"]["rows"])
    assert len(sections["memory"]["rows"]) == 3
    # an answer that differs ends the measurement
    with contextlib.closing(serve.Server(str(run))) as server:
        with pytest.raises(ValueError, match="must be the translations of the pipeline"):
            serve._measure_round(server, ("en", "de"), ["ant"], ["another"], 1)
        with pytest.raises(ValueError, match="the server must translate"):
            serve._measure_round(server, ("xx", "de"), ["ant"], ["another"], 1)


def test_translation_with_a_trained_model_is_timed_and_scored(tmp_path, capsys, monkeypatch):
    natural = pytest.importorskip("vanilla_transformer.benchmarks.natural")
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    run = tmp_path / "run"
    train(train_toys.toy_config(corpus, run, max_steps=3, bleu_tokenizer="char"))
    sources, references = work.texts_of_run(run, "test", 5)
    assert [len(source) for source in sources] == [len(reference) for reference in references]
    assert len(sources) == 5
    # the toy has not learned to end a translation: it repeats a word up to the limit
    said = natural.Translator(natural.OURS, str(run), 1, 12)(sources)
    assert all(said)
    monkeypatch.setattr(natural, "texts_of_run", lambda *_: (sources, [*said[:4], "another one"]))
    monkeypatch.setattr(natural, "SENTENCES_PER_CALL", 3)
    out = tmp_path / "out"
    search = ["--num_beams", "1", "--max_new_tokens", "12"]
    assert natural.main([str(run), *search, "--output_dir", str(out)]) == 0
    section = json.loads((out / "study.json").read_text())["sections"]["natural"]
    rows = {row[0]: row for row in section["rows"]}
    ours = natural.our_searches(torch.device("cpu"), torch.float32)
    assert {natural.OURS, *ours} <= {*natural.OUR_SEARCHES}
    names = [*ours, natural.MARIAN, natural.MARIAN_UNSORTED]
    assert [name for name in rows if not name.startswith(natural.CTRANSLATE2)] == names
    assert rows[natural.MARIAN][1:4] == [1, 1, 1]
    # the same search in different batches
    for name in (natural.OURS, natural.MARIAN, natural.MARIAN_UNSORTED):
        assert rows[name][6] == 5
    assert natural.main([str(run), "--precision", "bf16", "--device", "cpu"]) == 1
    assert "precision must be fp32 on a CPU, got bf16." in capsys.readouterr().err
    metric = BLEU(tokenize="char", force=True)
    expected = metric.corpus_score(said, [[*said[:4], "another one"]]).score
    assert 10 < expected < 99
    assert float(rows[natural.OURS][5]) == pytest.approx(expected, abs=0.005)
    # two pieces of each, in one round
    assert np.shape(section["seconds"][natural.OURS]) == (1, 2)


def test_searches_of_a_model_of_the_library_are_compared(tmp_path, capsys):
    corpus, run = train_toys.write_corpus(tmp_path / "corpus"), tmp_path / "run"
    changes = {"model_class": "transformers:MarianMTModel", "model": {"scale_embedding": True}}
    train(train_toys.toy_config(corpus, run, max_steps=3, **changes))
    out = tmp_path / "out"
    assert identical.main([str(run), "--num_sentences", "4", "--output_dir", str(out)]) == 0
    section = json.loads((out / "study.json").read_text())["sections"]["identical"]
    assert [row[0] for row in section["rows"]] == list(identical.SEARCHES)
    for name, num_equal, num_close, num_other, apart in section["rows"]:
        assert num_equal + num_close == 4, name
        assert num_other == 0, name
        assert apart < identical.CLOSE_SCORES
    assert identical.main([str(run), "--num_sentences", "0"]) == 1
    assert "num_sentences must be at least 1, got 0." in capsys.readouterr().err


def test_a_model_that_the_engine_does_not_run_is_not_compared(tmp_path, capsys):
    corpus, run = train_toys.write_corpus(tmp_path / "corpus"), tmp_path / "run"
    model_class = "transformers:BartForConditionalGeneration"
    train(train_toys.toy_config(corpus, run, max_steps=1, model_class=model_class))
    assert identical.main([str(run)]) == 1
    assert "RUN must be a model that the inference engine runs, but Bart" in capsys.readouterr().err


@pytest.mark.parametrize("is_sorted", [True, False])
def test_batches_of_like_length_are_given_back_in_order(monkeypatch, is_sorted):
    natural = pytest.importorskip("vanilla_transformer.benchmarks.natural")
    texts, given = ["a b c", "d", "e f", "g\nh"], []

    def translate(model, tokenizer, sources, batch_size, **search):
        given.extend(sources)
        return [text.upper() for text in sources]

    monkeypatch.setattr(natural, "translate", translate)
    translator = natural.Translator.__new__(natural.Translator)
    translator.name = natural.MARIAN if is_sorted else natural.MARIAN_UNSORTED
    translator.model = translator.tokenizer = None
    translator.num_beams = translator.max_new_tokens = 1
    assert translator(texts) == ["A B C", "D", "E F", "G H"]
    assert given == (["d", "e f", "g\nh", "a b c"] if is_sorted else texts)


def test_invalid_flags_of_the_translation_benchmark_are_refused(tmp_path, capsys):
    natural = pytest.importorskip("vanilla_transformer.benchmarks.natural")
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    run = tmp_path / "run"
    train(train_toys.toy_config(corpus, run, max_steps=1))
    assert natural.main([str(run), "--split", "tset"]) == 1
    assert "validation, test, got 'tset'" in capsys.readouterr().err
    assert natural.main([str(run), "--num_beams", "0"]) == 1
    assert "num_beams must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_equal_translations_of_exports_are_counted(tmp_path, capsys, monkeypatch):
    exports = pytest.importorskip("vanilla_transformer.benchmarks.exports")
    corpus = train_toys.write_corpus(tmp_path / "corpus")
    run = tmp_path / "run"
    # trained until rounding cannot change a translation
    sizes = {"hidden_size": 48, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "dropout": 0.0}
    settings = {"model": sizes, "max_steps": 300, "warmup_steps": 100, "save_every_steps": 300}
    train(train_toys.toy_config(corpus, run, **settings))
    out = tmp_path / "out"
    assert exports.main([str(run), "--output_dir", str(out)]) == 0
    rows = json.loads((out / "study.json").read_text())["sections"]["exports"]["rows"]
    assert len(rows) == 10
    # some rows have int8 weights or another penalty
    assert [row[:2] for row in rows if row[2] < 7 and not row[0].endswith("int8")] in (
        [],
        [["CTranslate2 float32", "its own"]],
    )
    assert {row[3] for row in rows} == {7}
    ours = exports.Engines.ours
    monkeypatch.setattr(
        exports.Engines, "ours", lambda *a, **k: [f"{text}!" for text in ours(*a, **k)]
    )
    assert exports.main([str(run), "--output_dir", str(out)]) == 0
    rows = json.loads((out / "study.json").read_text())["sections"]["exports"]["rows"]
    assert {row[2] for row in rows} == {0}
    capsys.readouterr()
    assert exports.main([str(run), "--split", "tset"]) == 1
    assert "split must be one of train, validation, test, got 'tset'" in capsys.readouterr().err
