"""Fine-tuning with the library's trainer: training, scores, saved files and publishing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_toys
from accelerate.state import AcceleratorState
from hub_stand_in import TOKEN, running_hub
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from vanilla_transformer import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.engine_checks_vanilla_transformer import reason_against_engine
from vanilla_transformer.generation_vanilla_transformer import set_paper_search
from vanilla_transformer.loading import load_run
from vanilla_transformer.train.data.corpus import load_translations
from vanilla_transformer.train.fine_tune import main
from vanilla_transformer.train.scoring import score_translations

pytestmark = pytest.mark.usefixtures("new_process")

MODULE = "vanilla_transformer.train.fine_tune"
SEARCH = {"num_beams": 3, "length_penalty_alpha": 0.7, "max_extra_tokens": 12}
WITHOUT_THE_PACKAGE = "import sys; sys.modules['vanilla_transformer'] = None"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Sentences of one to nine words: 24 to train on, 11 to evaluate."""
    return train_toys.write_corpus(tmp_path_factory.mktemp("corpus"), pairs=24)


@pytest.fixture(scope="module")
def translations(corpus):
    return load_translations(str(corpus), None, "en", "de")


@pytest.fixture(scope="module")
def tokenizer(translations):
    texts = [text for pair in translations["train"]["translation"] for text in pair.values()]
    return VanillaTransformerTokenizer().train_new_from_iterator(texts * 2, vocab_size=290)


@pytest.fixture(scope="module")
def save_base(tokenizer, tmp_path_factory):
    """Function that saves a model with the given fields of the configuration."""

    def save(**fields) -> Path:
        config = VanillaTransformerConfig(
            **{
                "vocab_size": len(tokenizer),
                "hidden_size": 24,
                "encoder_layers": 1,
                "decoder_layers": 2,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "decoder_ffn_dim": 40,
                "dropout": 0.0,
                **fields,
            }
        )
        torch.manual_seed(0)
        model = VanillaTransformerForConditionalGeneration(config)
        set_paper_search(model, **SEARCH)
        folder = tmp_path_factory.mktemp("base")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def base(save_base):
    return save_base()


def flags(run, corpus, output_dir, **settings) -> list[str]:
    given = {
        "dataset": corpus,
        "source_lang": "en",
        "target_lang": "de",
        "output_dir": output_dir,
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        **settings,
    }
    return [str(run), *(f"--{name}={value}" for name, value in given.items())]


def tuned(run, corpus, output_dir, **settings) -> Path:
    assert main(flags(run, corpus, output_dir, **settings)) == 0
    return output_dir


def weights(folder):
    return load_file(folder / "model.safetensors")


def losses(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    return [line["loss"] for line in state["log_history"] if "loss" in line]


def scores_of(folder):
    return json.loads((folder / "eval_results.json").read_text())


def translated(folder, sentences):
    return [line["translation_text"] for line in TranslationPipeline(*load_run(folder))(sentences)]


def sides(translations, split):
    pairs = translations[split]["translation"][:]
    return [pair["en"] for pair in pairs], [pair["de"] for pair in pairs]


@pytest.fixture(scope="module")
def learned(base, corpus, tmp_path_factory):
    """Model that was trained for some epochs, with an evaluation in batches of three."""
    # this fixture runs before the one that resets the state for each test
    AcceleratorState._reset_state(reset_partial_state=True)
    return tuned(
        base,
        corpus,
        tmp_path_factory.mktemp("learned") / "run",
        learning_rate=5e-3,
        max_steps=150,
        eval_strategy="steps",
        eval_steps=75,
        save_steps=150,
        per_device_eval_batch_size=3,
        predict_with_generate=True,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_four_small_batches_are_the_same_step_as_one_large_batch(
    base, corpus, tmp_path, smoothing, lora_rank
):
    settings = {
        "lora_rank": lora_rank,
        "label_smoothing_factor": smoothing,
        "max_steps": 3,
        "learning_rate": 0.3,
        "optim": "sgd",
        # a clipped gradient would hide a loss of the wrong scale
        "max_grad_norm": 0,
    }
    whole = tuned(base, corpus, tmp_path / "whole", per_device_train_batch_size=8, **settings)
    parts = tuned(
        base,
        corpus,
        tmp_path / "parts",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        **settings,
    )
    assert losses(whole) == pytest.approx(losses(parts), rel=1e-5)
    assert losses(whole)[2] < losses(whole)[0]
    torch.testing.assert_close(weights(whole), weights(parts), rtol=1e-5, atol=1e-6)


def assert_scored_as_by_hand(folder, translations):
    sources, references = sides(translations, "validation")
    by_hand = score_translations(translated(folder, sources), references)
    scores = {name: scores_of(folder)[f"eval_{name}"] for name in by_hand}
    assert scores == {
        name: pytest.approx(value) if isinstance(value, float) else value
        for name, value in by_hand.items()
    }


def test_the_scores_are_those_of_the_pipeline(learned, translations):
    assert_scored_as_by_hand(learned, translations)
    scores = scores_of(learned)
    # BLEU can be 0 on so little text, chrF cannot
    assert scores["eval_chrf"] > 0
    assert "tok:13a" in scores["eval_bleu_signature"]


def test_an_evaluation_ignores_the_default_length_of_the_library(
    base, corpus, translations, tokenizer, tmp_path
):
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    folder = tuned(
        base,
        corpus,
        tmp_path / "run",
        predict_with_generate=True,
        per_device_eval_batch_size=3,
        **settings,
    )
    # the model has not learned to end a sentence
    model, _ = load_run(folder)
    for text in sides(translations, "validation")[0]:
        inputs = tokenizer(text, return_tensors="pt")
        length = model.generate(**inputs).shape[1] - 1
        assert length == inputs["input_ids"].shape[1] + SEARCH["max_extra_tokens"]
    assert_scored_as_by_hand(folder, translations)


def test_the_result_keeps_the_search_of_the_base_model(base, learned):
    expected = GenerationConfig.from_pretrained(base).to_dict()
    assert SEARCH.items() <= expected.items()
    for folder in (learned, learned / "checkpoint-150"):
        assert GenerationConfig.from_pretrained(folder).to_dict() == expected


def test_a_model_without_a_search_gets_that_of_the_paper(base, corpus, tmp_path):
    bare = shutil.copytree(base, tmp_path / "bare")
    (bare / "generation_config.json").unlink()
    folder = tuned(bare, corpus, tmp_path / "run", max_steps=1)
    search = GenerationConfig.from_pretrained(folder)
    assert (search.num_beams, search.length_penalty_alpha) == (4, 0.6)
    assert search.max_extra_tokens == 50


def test_the_result_loads_as_any_model_and_its_card_has_the_scores(learned):
    model = AutoModelForSeq2SeqLM.from_pretrained(learned)
    tokenizer = AutoTokenizer.from_pretrained(learned)
    assert type(model) is VanillaTransformerForConditionalGeneration
    assert type(tokenizer) is VanillaTransformerTokenizer
    card = (learned / "README.md").read_text()
    scores = scores_of(learned)
    assert f"BLEU ({scores['eval_bleu_signature']}): {scores['eval_bleu']:.2f}".rstrip("0") in card
    assert "model-index" in card
    paths = [learned / "config.json", *learned.rglob("*.safetensors")]
    assert len({path.stat().st_mode for path in paths}) == 1 < len(paths)


def test_a_card_names_no_path(base, corpus, learned):
    card = (learned / "README.md").read_text()
    assert f"`{base.name}`, fine-tuned for 150 steps on `{corpus.name}`" in card
    # except the line that loads the model, which publishing changes
    others = [line for line in card.splitlines() if "pipeline(" not in line]
    assert not any(str(path.parent) in line for path in (base, corpus, learned) for line in others)


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(save_base, corpus, tmp_path):
    base = save_base(dropout=0.3)
    settings = {"max_steps": 7, "save_steps": 4, "learning_rate": 1e-2}
    whole = tuned(base, corpus, tmp_path / "whole", **settings)
    resumed = tmp_path / "resumed"
    # an epoch has three steps: this one stopped within the second
    shutil.copytree(whole / "checkpoint-4", resumed / "checkpoint-4")
    # a checkpoint that a full disk or a kill left incomplete
    shutil.copytree(whole / "checkpoint-4", resumed / "checkpoint-6")
    (resumed / "checkpoint-6" / "trainer_state.json").unlink()
    tuned(base, corpus, resumed, resume_from_checkpoint="last", **settings)
    train_toys.assert_same_bits(whole, resumed)
    assert losses(whole) == losses(resumed)
    moved = weights(resumed / "checkpoint-4")["model.encoder.embed_tokens.weight"]
    assert not torch.equal(moved, weights(whole)["model.encoder.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_trained_in_float32(dtype, base, corpus, tmp_path):
    model, tokenizer = load_run(base)
    for name, kind in (("half", dtype), ("whole", torch.float32)):
        model.to(dtype).to(kind).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    before = weights(tmp_path / "half")
    settings = {"learning_rate": 3e-5, "max_steps": 6, "save_steps": 3, "do_eval": True}
    half, whole = (
        tuned(tmp_path / name, corpus, tmp_path / f"{name}-tuned", **settings)
        for name in ("half", "whole")
    )
    found, expected = weights(half), weights(whole)
    assert {weight.dtype for weight in found.values()} == {dtype}
    assert all(torch.equal(weight, expected[name].to(dtype)) for name, weight in found.items())
    assert load_run(half)[0].dtype == dtype
    # a checkpoint keeps the float32 weights, and so the small steps
    kept = weights(half / "checkpoint-3")
    assert {weight.dtype for weight in kept.values()} == {torch.float32}
    moved = [kept[name] != before[name].float() for name in kept]
    assert sum(map(torch.sum, moved)) > 0.9 * sum(map(torch.numel, moved))
    go_on = flags(tmp_path / "half", corpus, half, **settings, resume_from_checkpoint="last")
    shutil.rmtree(half / "checkpoint-6")
    assert main(go_on) == 0
    assert all(torch.equal(weight, found[name]) for name, weight in weights(half).items())


def test_a_tokenizer_that_pads_on_the_left_trains_the_same(base, corpus, tmp_path):
    left = Path(shutil.copytree(base, tmp_path / "left"))
    AutoTokenizer.from_pretrained(base, padding_side="left").save_pretrained(left)
    assert AutoTokenizer.from_pretrained(left).padding_side == "left"
    found, expected = (
        weights(tuned(run, corpus, tmp_path / name, max_steps=3))
        for run, name in ((left, "a"), (base, "b"))
    )
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "a").padding_side == "left"


def test_lora_trains_only_adapters_and_peft_loads_them(base, corpus, translations, tmp_path):
    from peft import PeftModel

    folder = tuned(
        base,
        corpus,
        tmp_path / "run",
        lora_rank=3,
        learning_rate=0.05,
        max_steps=20,
        predict_with_generate=True,
        per_device_eval_batch_size=3,
    )
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in name for name in adapter)
    before, after = weights(base), weights(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".q_proj." in name or ".v_proj." in name}

    model, tokenizer = load_run(base)
    sources, references = sides(translations, "validation")
    with_adapter = PeftModel.from_pretrained(model, folder / "adapter").eval()
    inputs = tokenizer(sources, return_tensors="pt", padding=True)
    found = tokenizer.batch_decode(with_adapter.generate(**inputs), skip_special_tokens=True)
    assert found == translated(folder, sources)
    assert found != translated(base, sources)
    scored = score_translations(found, references)
    assert scores_of(folder)["eval_chrf"] == pytest.approx(scored["chrf"])
    # the folder of the adapters alone is loaded with its base model
    merged, _ = load_run(folder / "adapter")
    assert reason_against_engine(merged.eval()) is None
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, after.get(name, weight), rtol=0, atol=1e-6)
    assert translated(folder / "adapter", sources) == found


def test_adapters_without_a_base_model_say_what_is_missing(base, tmp_path, monkeypatch):
    folder = tmp_path / "adapters"
    folder.mkdir()
    config = folder / "adapter_config.json"
    config.write_text('{"peft_type": "LORA"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"base_model_name_or_path"):
        load_run(folder)
    entries = {"peft_type": "LORA", "target_modules": ["q_proj"], "r": 2}

    def refuse(base_name, message, **changes):
        content = {**entries, "base_model_name_or_path": str(base_name), **changes}
        config.write_text(json.dumps(content), "utf-8")
        with pytest.raises(ValueError, match=message):
            load_run(folder)

    refuse("no/such", "'no/such'")
    refuse(folder, "must have a base model, got '.*adapters', which holds adapters")
    refuse(base, r"adapters '.*' must have adapter_model.safetensors")
    (folder / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com\n")
    refuse(base, r"adapter_model\.safetensors must be a complete file, got a pointer of Git LFS")
    (folder / "adapter_model.safetensors").write_bytes(b"no weights")
    refuse(base, r"adapters '.*' cannot be read: ")
    refuse(base, r"adapters '.*' cannot be loaded: 'FOO'", peft_type="FOO")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"holds adapters, which need peft.*pip install peft"):
        load_run(folder)


def test_adapters_are_merged_in_the_precision_they_were_trained_in(base, corpus, tmp_path):
    settings = {
        "max_steps": 2,
        "lora_rank": 2,
        "learning_rate": 0.05,
        "predict_with_generate": True,
    }
    whole = tuned(base, corpus, tmp_path / "whole", **settings)
    rounded = tuned(base, corpus, tmp_path / "rounded", bf16_full_eval=True, **settings)
    train_toys.assert_same_bits(whole, rounded)


def test_adapters_can_be_resumed(base, corpus, tmp_path):
    settings = {"max_steps": 5, "save_steps": 4, "learning_rate": 1e-2, "lora_rank": 2}
    whole = tuned(base, corpus, tmp_path / "whole", **settings)
    resumed = tmp_path / "resumed"
    shutil.copytree(whole / "checkpoint-4", resumed / "checkpoint-4")
    tuned(base, corpus, resumed, resume_from_checkpoint="last", **settings)
    train_toys.assert_same_bits(whole, resumed)


def launched(*arguments):
    # despite its name, this flag starts several processes on CPUs too
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    launch += ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", MODULE]
    environment = train_toys.environment()
    return subprocess.run([*launch, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("slip", "sentence"),
    [
        ({"fp16": True}, "fp16 must be false on a CPU, got true."),
        ({"lora_rank": -1}, "lora_rank must not be negative"),
        ({"run": "no/such/run"}, "run must be"),
    ],
)
def test_two_processes_print_an_error_once(base, corpus, tmp_path, slip, sentence):
    done = launched(*flags(**{"run": base, **slip}, corpus=corpus, output_dir=tmp_path / "run"))
    assert done.returncode == 1
    assert done.stderr.count(f"error: {sentence}") == 1, done.stderr
    assert not (tmp_path / "run").exists()


def test_two_processes_train_the_same_as_one(base, corpus, tmp_path):
    settings = {
        "max_steps": 4,
        "label_smoothing_factor": 0.1,
        # Adam would amplify rounding in a gradient near zero
        "optim": "sgd",
        "learning_rate": 0.3,
        "max_grad_norm": 0,
        "predict_with_generate": True,
    }
    one = tuned(base, corpus, tmp_path / "one", per_device_train_batch_size=8, **settings)
    two = tmp_path / "two"
    # eleven sentences, two per process: the last batch repeats one
    small = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 2}
    done = launched(*flags(base, corpus, two, **settings, **small))
    assert done.returncode == 0, done.stderr
    assert (two / "checkpoint-4" / "rng_state_1.pth").is_file()
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    torch.testing.assert_close(weights(two), weights(one), rtol=1e-5, atol=1e-6)
    assert scores_of(two)["eval_chrf"] == pytest.approx(scores_of(one)["eval_chrf"])
    assert scores_of(two)["eval_sentences"] == 11


def test_from_the_hub_and_back_to_it(base, corpus, translations, tmp_path):
    sources, _ = sides(translations, "test")
    output_dir = tmp_path / "run"
    with running_hub() as hub:
        push = [sys.executable, "-m", "vanilla_transformer.cli", "push"]
        _run([*push, str(base), "user/base"], hub, tmp_path / "owner")
        settings = {"max_steps": 3, "save_steps": 1, "learning_rate": 1e-2}
        published = {"push_to_hub": True, "hub_model_id": "user/tuned"}
        published |= {"hub_private_repo": True, "hub_revision": "next", "hub_token": TOKEN}
        arguments = flags("user/base", corpus, output_dir, **settings, **published)
        # nobody is logged in here: only the flag gives permission
        _run([sys.executable, "-m", MODULE, *arguments], hub, tmp_path / "author", token=None)
        repository = hub.repositories["models", "user/tuned"]
        assert repository.private
        # published once, at the end: the library would push each checkpoint
        assert [len(list(repository.history(branch))) for branch in ("main", "next")] == [1, 2]
        code = f"""
{WITHOUT_THE_PACKAGE}
import json
from transformers import pipeline
tuned = {{"model": "user/tuned", "revision": "next"}}
translate = pipeline("translation", **tuned, trust_remote_code=True)
print(json.dumps([line["translation_text"] for line in translate({sources!r})]))
"""
        said = _run([sys.executable, "-c", code], hub, tmp_path / "reader")
    assert json.loads(said) == translated(output_dir, sources)
    assert b"base_model: user/base" in (output_dir / "README.md").read_bytes()


def _run(command, hub, home, token=TOKEN) -> str:
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        command,
        env={**kept, **hub.environment(home, token)},
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"target_lang": "fr"}, "train.fr must exist beside"),
        ({"dataset": "nowhere/nothing"}, "got 'nowhere/nothing': no such folder"),
        ({"max_length": 1}, "train must have a pair that can be used"),
        ({"lora_rank": -1}, "lora_rank must not be negative, got -1."),
        ({"bleu_tokenizer": "14a"}, "bleu_tokenizer must be one of"),
        (
            {"columns": "{en: 1, fr: 2}"},
            "columns must give a name, or a number from 1, for each of",
        ),
        ({"learning_rat": 0.1}, "learning_rat"),
        (
            {"resume_from_checkpoint": "last"},
            "resume_from_checkpoint needs a complete checkpoint in ",
        ),
        ({"push_to_hub": True}, "hub_model_id must be user/name with push_to_hub, got None."),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(
    base, corpus, tmp_path, capsys, monkeypatch, settings, sentence
):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    folder = tmp_path / "run"
    settings = {"max_steps": 1, "predict_with_generate": True, **settings}
    assert main(flags(base, corpus, folder, **settings)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert sentence in said
    assert not (folder / "model.safetensors").exists()


def test_the_columns_of_a_table_can_be_given(base, tmp_path, capsys, caplog):
    table = tmp_path / "pairs.csv"
    table.write_text("German,English\nAmeise,ant\nBiene,bee\n")
    settings = {"columns": "{en: English, de: German}", "max_steps": 1}
    with caplog.at_level("INFO", logger="vanilla_transformer"):
        tuned(base, table, tmp_path / "run", **settings)
    assert "train: kept 2," in caplog.text + capsys.readouterr().err


def test_a_corpus_without_validation_can_be_trained_on_but_not_evaluated(
    base, corpus, tmp_path, capsys
):
    only_train = tmp_path / "corpus"
    only_train.mkdir()
    for language in ("en", "de"):
        shutil.copy(corpus / f"train.{language}", only_train)
    tuned(base, only_train, tmp_path / "run", max_steps=1)
    arguments = flags(base, only_train, tmp_path / "no", max_steps=1, eval_strategy="epoch")
    assert main(arguments) == 1
    assert "must have a split 'validation', got train." in capsys.readouterr().err


def test_a_folder_that_is_not_empty_is_not_overwritten(base, corpus, learned, capsys):
    assert main(flags(base, corpus, learned, max_steps=1)) == 1
    assert "output_dir must be empty" in capsys.readouterr().err


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_refused(base, corpus, tmp_path, capsys):
    broken = shutil.copytree(base, tmp_path / "broken")
    words = [f"{a}{b}" for a in "qwertz" for b in "asdfgh"]
    other = VanillaTransformerTokenizer().train_new_from_iterator(words * 50, vocab_size=320)
    other.save_pretrained(broken)
    assert main(flags(broken, corpus, tmp_path / "run", max_steps=1)) == 1
    assert "tokenizer must be the model's own" in capsys.readouterr().err


def test_sentences_beyond_the_learned_positions_are_refused(save_base, corpus, tmp_path, capsys):
    base = save_base(position_encoding="learned", max_position_embeddings=64)
    assert main(flags(base, corpus, tmp_path / "run", max_steps=1)) == 1
    assert "max_length must be at most 64" in capsys.readouterr().err


def test_validation_beyond_the_learned_positions_is_refused(save_base, corpus, tmp_path, capsys):
    base = save_base(position_encoding="learned", max_position_embeddings=64)
    longer = shutil.copytree(corpus, tmp_path / "corpus")
    with (longer / "validation.en").open("a") as source, (longer / "validation.de").open("a") as to:
        source.write("ant " * 90 + "\n")
        to.write("ant\n")
    settings = {"max_steps": 1, "max_length": 60, "do_eval": True}
    assert main(flags(base, longer, tmp_path / "run", **settings)) == 1
    assert "validation must have at most 64 tokens per sentence" in capsys.readouterr().err
    tuned(base, corpus, tmp_path / "fits", **settings)


def test_lora_without_peft_says_how_to_install_it(base, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(flags(base, corpus, tmp_path / "run", max_steps=1, lora_rank=2)) == 1
    assert "pip install peft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metric_for_best_model": "bleu"}, "got 'bleu'. Scores of translations need --predict"),
        (
            {"metric_for_best_model": "chrff", "predict_with_generate": True},
            "one of loss, sentences, bleu, chrf, exact_match, empty, got 'chrff'.",
        ),
        (
            {"use_liger_kernel": True},
            "error: a setting needs a package that is not installed: You have set `use_liger",
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "error: lr_scheduler_kwargs must fit lr_scheduler_type 'warmup_stable_decay', got None",
        ),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": '{"cycles": 2}'},
            "error: lr_scheduler_kwargs must fit lr_scheduler_type 'cosine', got {'cycles': 2}",
        ),
    ],
)
def test_a_setting_that_the_library_cannot_use_is_named(
    base, corpus, tmp_path, capsys, settings, message
):
    assert main(flags(base, corpus, tmp_path / "run", max_steps=1, **settings)) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_scheduler_is_checked_with_the_learning_rate(base, corpus, tmp_path, capsys):
    settings = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": '{"lr_end": 0.005}'}
    runs = [
        main(flags(base, corpus, tmp_path / str(rate), max_steps=1, learning_rate=rate, **settings))
        for rate in (0.01, 0.001)
    ]
    assert runs == [0, 1]
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: lr_scheduler_kwargs must fit lr_scheduler_type 'polynomial'")


@pytest.mark.parametrize(("rank", "other_rank"), [(2, 4), (2, 0), (0, 2)])
def test_a_checkpoint_of_adapters_resumes_only_with_their_rank(
    base, corpus, tmp_path, capsys, rank, other_rank
):
    settings = {"max_steps": 1, "save_steps": 1}
    folder = tmp_path / "run"
    assert main(flags(base, corpus, folder, lora_rank=rank, **settings)) == 0
    resumed = flags(
        base,
        corpus,
        folder,
        lora_rank=other_rank,
        resume_from_checkpoint="last",
        **settings | {"max_steps": 2},
    )
    assert main(resumed) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: resume_from_checkpoint must be a checkpoint of the same model ")
    assert error.endswith(f"with lora_rank {rank}, and {other_rank} now.")


def test_a_tracker_that_is_not_installed_is_named(base, corpus, tmp_path, capsys):
    assert main(flags(base, corpus, tmp_path / "run", max_steps=1, report_to="wandb")) == 1
    assert (
        "report_to 'wandb' must be installed, but its package is missing."
        in capsys.readouterr().err
    )
