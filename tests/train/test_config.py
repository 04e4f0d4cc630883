"""Settings from defaults, recipes and the command line."""

import copy
import dataclasses
import re
import time

import pytest

from vanilla_transformer.train.__main__ import main
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.recipe import (
    RECIPES_FOLDER,
    load_config,
    parse_arguments,
    read_recipe_file,
    save_config,
)
from vanilla_transformer.train.resuming import (
    describe_changes,
    refuse_late_cooldown,
    refuse_other_run,
    refuse_other_vocabulary,
)


def test_the_paper_is_the_default():
    config = load_config("paper-base")
    assert dataclasses.replace(config, output_dir=None) == TrainConfig()
    assert (config.warmup_steps, config.label_smoothing, config.tokens_per_step) == (
        4000,
        0.1,
        25000,
    )
    assert (config.adam_beta1, config.adam_beta2, config.adam_epsilon) == (0.9, 0.98, 1e-9)
    sizes = config.model_config(37000)
    assert (sizes.d_model, sizes.encoder_layers, sizes.dropout) == (512, 6, 0.1)


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_paper():
    config, _ = parse_arguments(
        ["paper-big", "--warmup_steps", "8000", "--model", "{dropout: 0.1}"]
    )
    assert (config.max_steps, config.warmup_steps) == (300000, 8000)
    sizes = config.model_config(37000)
    assert (sizes.d_model, sizes.dropout) == (1024, 0.1)


def test_null_removes_an_optional_text():
    config, _ = parse_arguments(["demo", "--name", "null", "--tokenizer", "null"])
    assert (config.name, config.tokenizer) == (None, None)
    # a language must be there, and this may be one
    assert parse_arguments(["paper-base", "--source_lang", "null"])[0].source_lang == "null"


def test_one_field_of_a_recipes_model_can_be_changed():
    config = load_config("demo", {"model": {"dropout": 0.25}})
    assert config.model == {**load_config("demo").model, "dropout": 0.25}


def test_a_field_by_its_other_name_takes_the_place_of_the_recipes():
    config = load_config("demo", {"model": {"d_model": 64}})
    assert config.model == {**load_config("demo").model, "hidden_size": 64}
    assert config.model_config(100).d_model == 64


def test_fields_of_the_model_take_numbers_with_an_exponent(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {dropout: 1e-1, layer_norm_eps: 1.5e-6}\n", encoding="utf-8")
    config, _ = parse_arguments([str(path), "--model", "{attention_dropout: 2E-1}"])
    sizes = config.model_config(100)
    assert (sizes.dropout, sizes.layer_norm_eps, sizes.attention_dropout) == (0.1, 1.5e-6, 0.2)


def test_a_recipe_can_be_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 7\nadam_epsilon: 1e-8\n", encoding="utf-8")
    config = load_config(str(path))
    assert (config.seed, config.adam_epsilon, config.output_dir) == (7, 1e-8, "runs/mine")


def test_saved_settings_are_read_back_equal(tmp_path):
    config = load_config("demo", {"max_grad_norm": 2})
    save_config(config, tmp_path / "recipe.yaml")
    assert load_config(str(tmp_path / "recipe.yaml")) == config


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["dmo"], "recipe must be .* one of demo, .* got 'dmo'. Did you mean 'demo'"),
        (["demo", "--warmup", "5"], "warmup is not a setting. Did you mean 'warmup_steps'"),
        (["demo", "--dropout", "0"], r"a field of model: use --model '{dropout: VALUE}', or mod"),
        (["demo", "--d_model=8"], "d_model is not a setting, but a field of model: use --model"),
        (["demo", "--encoder_layers=2"], "encoder_layers is not a setting, but a field of model"),
        (["demo", "--batch_size", "64"], "not a setting. Use tokens_per_step: approximate source"),
        (["demo", "--beam_size", "5"], "beam_size is not a setting. Use num_beams: beam size"),
        (["demo", "--lr", "1e-4"], "lr is not a setting. Use learning_rate_factor: factor on the"),
        (["demo", "--epochs", "3"], "epochs is not a setting. Use max_steps: training steps"),
        (["demo", "--zzz", "5"], "zzz is not a setting. The settings are dataset, name"),
        (["demo", "--max_steps", "many"], "max_steps must be of type int, got 'many'"),
        (["demo", "--max_steps", "1.5"], "max_steps must be of type int, got 1.5"),
        (["demo", "--max_steps", "true"], "max_steps must be of type int, got True"),
        (["demo", "--max_steps", "0"], "max_steps must be at least 1, got 0"),
        (["demo", "--max_steps"], "max_steps: expected one argument"),
        (["demo", "--label_smoothing", "1"], "label_smoothing must be at least 0 and below 1"),
        (["demo", "--precision", "bf61"], "precision must be one of .* Did you mean 'bf16'"),
        (["demo", "--model", "[1]"], r"model must be of type dict, got \[1\]"),
        (["demo", "--model", "{"], "model must be a YAML value, got '{'"),
        (["demo", "--target_lang", "en"], "target_lang must differ from source_lang"),
        (["demo", "--symbol_lang", "fr"], "symbol_lang must be null, en or de, got 'fr'"),
        (["demo", "--tokens_per_micro_batch", "99"], "tokens_per_micro_batch must be at least max"),
        (["demo", "--tokens_per_micro_batch", "0"], "tokens_per_micro_batch must be at least 1"),
        (["demo", "twice"], "'twice' is one argument too many"),
        (["demo", "--dry_run", "--model", "{d_modle: 5}"], "d_modle is not a field .*'d_model'"),
        (["demo", "--dry_run", "--model", "{d_model: 5}"], "d_model must be"),
        (["demo", "--model", "{1: 2}"], "line 1, column 2: must have text as names, got '1'"),
        (["demo", "--model", "{no: 2}"], "must have text as names, got 'no': put other words into"),
        (["demo", "--model", "{d_model: 8, hidden_size: 8}"], "hidden_size once, got two of its"),
        (["demo", "--columns", "{en: 2, de: 2}"], "en and de, none twice, got {'en': 2, 'de': 2}"),
        (["demo", "--mix", "[{dataset: no}]"], "each with a dataset, got {'dataset': False}"),
        (["demo", "--mix", "[{dataset: a, name: 2017}]"], "name must be .* got 2017: put text"),
        (["demo", "--max_minutes", "1:30"], "must have no 0 in front and no colon, got '1:30'"),
        (["demo", "--model", "{row: B1}"], "model: row is not a field"),
        (["demo", "--model", "{num_labels: x}"], "model: num_labels is not a field"),
        (["demo", "--model", "{id2label: 3}"], "model: id2label is not a field"),
        (["demo", "--model", "{dtype: foo}"], "model must not hold dtype: precision is a setting"),
        (["demo", "--model", "{attn_implementation: mine}"], "not saved with a model"),
        (
            ["demo", "--model_class", "file.py"],
            "model_class must be FILE.py:CLASS or transformers:CLASS, got",
        ),
        (
            ["demo", "--dry_run", "--model", "{src_vocab_size: 5}"],
            "source and target share vocab_size tokens",
        ),
        (["demo", "--model", "{vocab_size: 5}"], "vocab_size: it is a setting of its own"),
        (["demo", "--model", "{pad_token_id: 7}"], "model must not hold pad_token_id: it is the t"),
        (
            ["demo", "--seed", "4294967296"],
            "seed must be at least 0 and below 4294967296, got 4294967296",
        ),
        (
            ["demo", "--source_lang", " "],
            "source_lang must be valid Unicode text, and not empty, got ' '",
        ),
        (
            ["demo", "--dataset", ""],
            "dataset must be valid Unicode text, and not empty, got ''",
        ),
        (["demo", "--dry_run", "--paper_row", "bog"], "got 'bog'. Did you mean 'big'"),
        (
            ["demo", "--model", "{dropout: 0.1, dropout: 0.2}"],
            "model must be a YAML value, .*: line 1, column 16: 'dropout' is given twice",
        ),
        (["demo", "--license", "None"], "license must be null for no value, got None"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(argv, message, capsys):
    with pytest.raises(ValueError, match=message):
        parse_arguments(argv)[0].model_config(1000)
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_step: 5", "max_step is not a setting. Did you mean 'max_steps'"),
        ("max_steps: few", "max_steps must be of type int, got 'few'"),
        ("max_steps: 1e-3", "max_steps must be of type int, got '1e-3'"),
        ("max_steps: 1e999", "max_steps must be of type int, got '1e999'"),
        ("max_steps: 1e30", "max_steps must be at most"),
        ("- 5", "must map names to values"),
        ("", "must have settings, such as dataset, .* got an empty file"),
        (" \n\n", "must have settings, such as dataset, .* got an empty file"),
        ("a: b: c", "must be YAML"),
        ("max_steps: 5\nseed: 2\nmax_steps: 7\n", "line 3, column 1: 'max_steps' is given twice"),
        ("measured: {device: x}", "measured must be a list of runs, each with device, time"),
        (
            "measured: [{device: x, score: 5}]",
            "measured must be a list of runs, .* got .*'score': 5",
        ),
    ],
)
def test_a_wrong_setting_in_a_recipe_is_refused(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_config(str(path))


@pytest.mark.parametrize(
    "name",
    [f.name for f in dataclasses.fields(TrainConfig) if "float" in str(f.type)],
)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", ".nan"])
def test_a_number_that_is_not_finite_is_refused(name, text):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        parse_arguments(["paper-base", f"--{name}={text}"])


def test_measured_results_are_no_settings_and_are_not_saved_with_a_run(tmp_path):
    path = tmp_path / "mine.yaml"
    facts = "{device: d, time: t, score: s, signature: g, results: r}"
    path.write_text(f"max_steps: 5\nmeasured: [{facts}]\n", encoding="utf-8")
    settings, measured = read_recipe_file(str(path))
    assert settings == {"max_steps": 5}
    assert [run["score"] for run in measured] == ["s"]
    save_config(load_config(str(path)), tmp_path / "recipe.yaml")
    settings, measured = read_recipe_file(str(tmp_path / "recipe.yaml"))
    assert (settings["max_steps"], measured) == (5, [])


def test_a_run_resumes_with_its_own_data_and_any_number_of_steps():
    before = load_config("demo")
    refuse_other_run(load_config("demo", {"max_steps": 9, "log_every_steps": 3}), before)
    with pytest.raises(ValueError, match="tokens_per_step was 3000, got 77; seed was 1, got 2"):
        refuse_other_run(
            load_config("demo", {"tokens_per_step": 77, "max_length": 70, "seed": 2}),
            dataclasses.replace(before, tokens_per_step=3000, max_length=70),
        )


def test_a_field_with_its_default_value_makes_no_other_run():
    before = load_config("demo")
    refuse_other_run(load_config("demo", {"model": {"initializer_gain": 1, "d_k": None}}), before)
    with pytest.raises(ValueError, match=r"model was .*, got .*'initializer_gain': 0\.5"):
        refuse_other_run(load_config("demo", {"model": {"initializer_gain": 0.5}}), before)


def test_the_path_of_a_corpus_may_change_unless_it_is_streamed():
    before = load_config("demo", {"dataset": "here/text"})
    refuse_other_run(load_config("demo", {"dataset": "there/text"}), before)
    mixed = [
        load_config("demo", {"mix": [{"dataset": dataset, "name": name}]})
        for dataset, name in (("here", "a"), ("there", "a"), ("there", "b"))
    ]
    refuse_other_run(mixed[1], mixed[0])
    with pytest.raises(ValueError, match="mix was"):
        refuse_other_run(mixed[2], mixed[0])
    streamed = load_config("demo", {"dataset": "there/text", "streaming": True})
    with pytest.raises(ValueError, match="dataset was 'here/text', got 'there/text'"):
        refuse_other_run(streamed, dataclasses.replace(before, streaming=True))


def test_the_path_of_a_tokenizer_may_change():
    here, there = (load_config("demo", {"tokenizer": place}) for place in ("here", "there"))
    refuse_other_run(there, here)
    with pytest.raises(ValueError, match="tokenizer was 'here', got None"):
        refuse_other_run(load_config("demo"), here)


def test_a_cooldown_does_not_begin_before_the_step_that_a_run_resumes_from():
    before = load_config("demo", {"max_steps": 100})
    for steps in (20, 50):
        refuse_late_cooldown(
            load_config("demo", {"max_steps": 150, "cooldown_steps": steps}), before, 100
        )
    falling = load_config("demo", {"max_steps": 150, "cooldown_steps": 51})
    with pytest.raises(ValueError, match=r"cooldown_steps must be at most 50, .* got 51"):
        refuse_late_cooldown(falling, before, 100)
    # one that was stopped while it fell
    refuse_late_cooldown(falling, falling, 120)


def test_a_moved_run_does_not_resume_in_its_old_folder(tmp_path, monkeypatch):
    folder = tmp_path / "moved"
    (folder / "checkpoints").mkdir(parents=True)
    recipe = folder / "recipe.yaml"
    save_config(load_config("demo", {"output_dir": str(tmp_path / "before")}), recipe)
    with pytest.raises(ValueError, match=r"output_dir must be given .* its checkpoints are in"):
        parse_arguments([str(recipe), "--resume"])
    given = ["--output_dir", str(folder)]
    assert parse_arguments([str(recipe), "--resume", *given])[0].output_dir == str(folder)
    save_config(load_config("demo", {"output_dir": str(folder)}), recipe)
    assert parse_arguments([str(recipe), "--resume"])[0].output_dir == str(folder)
    # a recipe of the package is not in a run folder
    monkeypatch.chdir(folder)
    assert parse_arguments(["demo", "--resume"])[0].output_dir == "runs/demo"


def test_a_whole_number_may_have_an_exponent(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("max_steps: 2e3\nwarmup_steps: 1E+2\n", encoding="utf-8")
    config = load_config(str(path), {"eval_every_steps": "5e1"})
    numbers = (config.max_steps, config.warmup_steps, config.eval_every_steps)
    assert numbers == (2000, 100, 50)
    assert all(type(number) is int for number in numbers)


def test_a_copy_of_a_recipe_without_settings_has_the_defaults(tmp_path):
    copy = tmp_path / "paper-base.yaml"
    copy.write_bytes((RECIPES_FOLDER / "paper-base.yaml").read_bytes())
    assert load_config(copy) == load_config("paper-base")


def test_help_shows_a_value_as_the_flag_takes_it(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "the paper does not clip (default: null)" in shown
    assert "store no copy (default: false)" in shown
    assert "sec. 5.3 (default: 1e-09)" in shown
    assert "None)" not in shown
    assert "[--dry_run [measured]]" in shown
    assert "Train a recipe, from raw text" in shown


def test_changed_settings_of_a_step_are_described():
    before = load_config("demo")
    assert describe_changes(load_config("demo", {"seed": 3, "log_every_steps": 9}), before) == ""
    given = {"label_smoothing": 0.5, "precision": "bf16", "max_steps": 900}
    assert describe_changes(load_config("demo", given), before) == (
        "max_steps 900 (was 700); label_smoothing 0.5 (was 0.1); precision 'bf16' (was 'fp32')"
    )


def test_a_vocabulary_is_not_taken_for_one_of_other_settings():
    before = load_config("demo")
    others = {"max_steps": 9, "max_length": 70, "tokens_per_step": 77, "label_smoothing": 0.2}
    refuse_other_vocabulary(load_config("demo", others), before)
    with pytest.raises(ValueError, match="vocab_size was 2000, got 8000; seed was 1, got 2"):
        refuse_other_vocabulary(load_config("demo", {"vocab_size": 8000, "seed": 2}), before)


VOCABULARY = {
    *("dataset", "name", "revision", "weight", "mix", "streaming", "source_lang", "target_lang"),
    *("tokenizer", "vocab_size", "symbol_lang", "seed", "columns", "validation_pairs"),
}
RUN = VOCABULARY | {
    *("max_length", "max_length_ratio", "drop_duplicates", "drop_leaks", "block_pairs"),
    *("paper_row", "model"),
    *(
        "model_class",
        "tokens_per_step",
        "length_groups_per_step",
        "bpe_dropout",
        "bpe_dropout_target",
    ),
    *("num_spellings", "ema_decay"),
}


@pytest.mark.parametrize(
    ("refuse", "expected"),
    [(refuse_other_run, RUN - {"dataset"}), (refuse_other_vocabulary, VOCABULARY)],
)
def test_what_would_be_another_run_or_vocabulary_is_refused_by_name(refuse, expected):
    before = TrainConfig()
    others = {"paper_row": "big", "model": {"dropout": 0.7}}
    others["model_class"] = "transformers:MarianMTModel"
    refused = {}
    for field in dataclasses.fields(TrainConfig):
        changed = copy.copy(before)
        setattr(changed, field.name, others.get(field.name, "another"))
        try:
            refuse(changed, before)
        except ValueError as error:
            refused[field.name] = str(error)
    assert refused.keys() == expected
    assert all(f" {name} was " in message for name, message in refused.items())


def test_a_sentence_beyond_the_learned_positions_is_refused():
    positions = {"position_encoding": "learned", "max_position_embeddings": 80}
    config = load_config("demo", {"max_length": 81, "model": positions})
    with pytest.raises(ValueError, match=r"max_length must be at most 80, .* got 81"):
        config.model_config(1000)
    fits = load_config("demo", {"max_length": 80, "model": positions})
    assert fits.model_config(1000).max_position_embeddings == 80
    sinusoids = load_config("demo", {"max_length": 81, "model": {"max_position_embeddings": 80}})
    assert sinusoids.model_config(1000).position_encoding == "sinusoidal"


def test_another_dataset_has_no_configuration_unless_it_is_named():
    assert load_config("paper-base").name == "de-en"
    assert load_config("paper-base", {"dataset": "my/texts"}).name is None
    assert load_config("paper-base", {"dataset": "my/texts", "name": "a"}).name == "a"


def test_another_dataset_of_a_recipe_has_no_configuration_either(tmp_path):
    recipe = tmp_path / "mine.yaml"
    for text, name in (("", None), ("name: a\n", "a"), ("name: null\n", None)):
        recipe.write_text("dataset: my/texts\n" + text)
        assert load_config(str(recipe)).name == name
        assert load_config(str(recipe), {"name": "b"}).name == "b"
    recipe.write_text("dataset: my/texts\nrevision: v1\n")
    assert load_config(str(recipe)).revision == "v1"
    assert load_config(str(recipe), {"dataset": "my/others"}).revision is None
    recipe.write_text("warmup_steps: 10\n")
    assert load_config(str(recipe)).name == "de-en"
    assert TrainConfig(dataset="my/texts").name is None
    assert TrainConfig().name == "de-en"
    # where it was another's by default it is named
    assert load_config("mini-wmt14").name == "de-en"


BOMB = "a: &a [lol, lol, lol]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BOMB, "line 1, column 4: must be without references"),
        ("model: *a", "must be without references"),
        ("model: &a {d_model: 8}", "must be without references"),
        ("model: {<<: {d_model: 8}}", "must have text as names, got '<<'"),
        ("a: " * 3000, "must be YAML"),
        ("[" * 50_000, "must be at most 20 levels deep, got more"),
        ("- " * 50_000, "must be at most 20 levels deep, got more"),
        ("{a: " * 50_000, "must be at most 20 levels deep, got more"),
        ("seed: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("seed: !x 5", "could not determine a constructor"),
        ("? [a, b]\n: 5", "must have text as names"),
        ("1: 5", "must have text as names, got '1'"),
        ("seed: " + "9" * 10_000, "numbers must be shorter, got '999"),
        ("seed: " + ":".join(["1"] * 300_000), "numbers must be shorter"),
        ("seed: 010", "no 0 in front and no colon, got '010': write a decimal number"),
        ("name: 1:30.5", "no colon, got '1:30.5': write a decimal number, or put text into quotes"),
        ("target_lang: no", "target_lang must be of type str, got False: put text that YAML reads"),
        ("seed: 0x" + "f" * 90, "seed must be at most"),
        ("learning_rate_factor: 1e999", "learning_rate_factor must be a finite number"),
        ("seed: 9999-99-99", "must be YAML: month must be in"),
        ("seed: !!binary x", "must be YAML"),
        ('dataset: "a\\0b"', "dataset must be valid Unicode text"),
        ('dataset: "\\ud800"', "dataset must be valid Unicode text"),
        ("output_dir: ''", "output_dir must be valid Unicode text, and not empty"),
        ("output_dir: ~/a", "output_dir must be a path without ~, which only a shell replaces"),
        ("mix: [{dataset: ~/a.tsv}]", "dataset must be a path without ~, .* got '~/a.tsv'"),
        ("mix: [{dataset: ''}]", "dataset must be valid Unicode text, and not empty"),
        ("x" * 2_000_000, "must be of at most 1,000,000 characters, got 2,000,000"),
        (f"{'x' * 1000}: 5", "is not a setting"),
        (f"? {'x' * 900_000}\n: 5", "is not a setting"),
        (f"seed: {'x' * 900_000}", "seed must be of type int, got 'xxx"),
        (f"measured: {'x' * 900_000}", "measured must be a list of runs"),
        ("seed: 5\0", "must be YAML: unacceptable character"),
        ("seed: 5".encode("utf-16"), "must be UTF-8, got invalid start byte at byte 0"),
        (b"seed: \xff", "must be UTF-8, got invalid start byte at byte 6"),
    ],
)
def test_what_no_recipe_holds_is_refused_at_once_in_a_short_sentence(
    content, message, tmp_path, capsys
):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.monotonic()
    assert main([str(path), "--dry_run"]) == 1
    # a busy machine takes some seconds for a million characters
    assert time.monotonic() - began < 60
    said = capsys.readouterr().err
    assert re.match(f"error: .*{message}", said), said[:500]
    assert said.count("\n") == 1
    assert len(said) < 2500


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes("max_steps: 5".encode("utf-8-sig"))
    assert load_config(path).max_steps == 5


@pytest.mark.parametrize("name", ["dataset", "output_dir", "tokenizer"])
def test_a_path_object_is_accepted_as_text(name, tmp_path):
    config = load_config("paper-base", {name: tmp_path, "mix": [{"dataset": tmp_path}]})
    assert getattr(config, name) == str(tmp_path)
    assert config.mix[0]["dataset"] == str(tmp_path)
