"""Ensembles: the mean of the probabilities of several models, computed by hand."""

import math

import equations
import pytest
import torch
from library_models import make_marian, make_pieces
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.cli import main


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make(tokenizer, seed, **options):
    """Return a model with other weights, and sizes if they are given."""
    model = make_model(tokenizer, **options)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.8)
    return model


@pytest.fixture(scope="module")
def models(tokenizer):
    return [
        make(tokenizer, 1),
        make(tokenizer, 2, d_model=32, decoder_layers=2),
        make(tokenizer, 3, norm_first=True),
    ]


def mean_logarithms(models, source, target):
    """Logarithm of the mean probability of each token after a target, in plain Python."""
    rows = []
    for model in models:
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])
            ).logits
        rows.append([math.exp(it) for it in equations.log_softmax(logits[0, -1].tolist())])
    return [math.log(sum(row) / len(rows)) for row in zip(*rows, strict=True)]


def greedy_by_hand(models, source, limit):
    target = [models[0].config.decoder_start_token_id]
    suppressed = set(models[0].generation_config.suppress_tokens)
    for _ in range(limit):
        logarithms = mean_logarithms(models, source, target)
        allowed = [token for token in range(len(logarithms)) if token not in suppressed]
        target.append(max(allowed, key=logarithms.__getitem__))
        if target[-1] == models[0].config.eos_token_id:
            break
    return target


@pytest.mark.parametrize("count", [2, 3])
def test_greedy_search_takes_the_token_of_the_highest_mean_probability(tokenizer, models, count):
    used = models[:count]
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        source = inputs["input_ids"][0].tolist()
        expected = greedy_by_hand(used, source, len(source) + 3)
        found = used[0].generate(**inputs, num_beams=1, ensemble=used[1:])
        assert found[0].tolist() == expected


@pytest.mark.parametrize(
    "search",
    [
        {"num_return_sequences": 3},
        {"num_beams": 1},
        {"length_penalty_alpha": None, "length_penalty": 0.8, "num_return_sequences": 2},
    ],
)
def test_scores_are_sums_of_the_logarithms_of_mean_probabilities(tokenizer, models, search):
    translate = TranslationPipeline(models[0], tokenizer, device="cpu", ensemble=models[1:])
    settings = {**search, "return_scores": True, "return_tensors": True}
    for text, found in zip(TEXTS, translate(TEXTS, **settings), strict=True):
        source = tokenizer(text)["input_ids"]
        for one in found if isinstance(found, list) else [found]:
            ids = one["translation_token_ids"].tolist()
            for place, (_, logarithm) in enumerate(one["token_log_probabilities"], start=1):
                expected = mean_logarithms(models, source, ids[:place])[ids[place]]
                assert logarithm == pytest.approx(expected, abs=1e-4)


def test_an_ensemble_of_one_model_twice_is_the_model(tokenizer, models):
    translate = TranslationPipeline(models[1], tokenizer, device="cpu")
    assert translate(TEXTS, ensemble=[models[1]]) == translate(TEXTS)


def test_batches_do_not_change_translations(tokenizer, models):
    translate = TranslationPipeline(models[0], tokenizer, device="cpu", ensemble=models[1:])
    assert translate(TEXTS) == [translate(text)[0] for text in TEXTS]
    assert translate(TEXTS) != TranslationPipeline(models[0], tokenizer)(TEXTS)


def test_beam_search_finds_what_the_sum_of_all_paths_says(tokenizer, models):
    """With as many beams as paths, the best hypothesis is that of an exhaustive search."""
    few = [5, 40, models[0].config.eos_token_id]
    others = [token for token in range(models[0].config.vocab_size) if token not in few]
    source = tokenizer(TEXTS[0], return_tensors="pt")
    found = models[0].generate(
        **source,
        ensemble=models[1:],
        num_beams=12,
        suppress_tokens=others,
        max_new_tokens=2,
        max_extra_tokens=None,
    )
    start = models[0].config.decoder_start_token_id
    ids = source["input_ids"][0].tolist()
    first = mean_logarithms(models, ids, [start])
    paths = {}
    for one in few:
        if one == few[-1]:
            paths[(one,)] = first[one] / equations.length_penalty(1, 0.6)
            continue
        second = mean_logarithms(models, ids, [start, one])
        for two in few:
            total = first[one] + second[two]
            paths[(one, two)] = total / equations.length_penalty(2, 0.6)
    complete = {path: score for path, score in paths.items() if path[-1] == few[-1]}
    best = max(complete, key=complete.__getitem__)
    assert tuple(found[0, 1 : len(best) + 1].tolist()) == best


def test_the_command_translates_with_several_models(tokenizer, models, tmp_path, capsys):
    names = []
    for number, model in enumerate(models):
        names.append(str(tmp_path / f"model-{number}"))
        model.save_pretrained(names[-1])
        tokenizer.save_pretrained(names[-1])
    (tmp_path / "lines.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    assert main(["translate", *names, str(tmp_path / "lines.txt")]) == 0
    translate = TranslationPipeline(models[0], tokenizer, device="cpu", ensemble=models[1:])
    expected = [found["translation_text"] for found in translate(TEXTS)]
    assert capsys.readouterr().out.splitlines() == expected

    other = tokenizer.train_new_from_iterator(["other words"] * 20, vocab_size=len(tokenizer))
    other.save_pretrained(names[1])
    assert main(["translate", *names, str(tmp_path / "lines.txt")]) == 1
    assert "must have the same vocabulary, but that of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: it.half(), "model 2 of the ensemble must have the dtype"),
        (lambda it: it.train(), "cannot run on the inference engine: the model is in training"),
        (lambda it: setattr(it.config, "vocab_size", 7), "must have the vocab_size"),
        (lambda it: setattr(it.config, "eos_token_id", 7), "must have the eos_token_id"),
        (
            lambda it: setattr(it.lm_head, "forward", lambda x: x),
            "model 2 of the ensemble cannot run on the inference engine",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused(tokenizer, models, change, message):
    other = make(tokenizer, 4)
    change(other)
    with pytest.raises(ValueError, match=message):
        models[0].generate(**tokenizer(TEXTS[0], return_tensors="pt"), ensemble=[other])


def test_a_member_that_changes_during_a_search_is_refused(tokenizer, models):
    other = make(tokenizer, 4)

    def change(ids, scores):
        with torch.no_grad():
            other.lm_head.weight.mul_(2)
        return scores

    with pytest.raises(ValueError, match="the model must stay the same during a search"):
        models[0].generate(
            **tokenizer(TEXTS[0], return_tensors="pt"), ensemble=[other], logits_processor=[change]
        )


def test_an_ensemble_needs_the_engine_and_one_class(tokenizer, models, tmp_path):
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    with pytest.raises(ValueError, match="ensemble needs the inference engine, got engine='off'"):
        models[0].generate(**inputs, ensemble=models[1:], engine="off")
    with pytest.raises(ValueError, match="ensemble needs the inference engine, which cannot be"):
        models[0].generate(**inputs, ensemble=models[1:], use_cache=False)
    memory = models[0].get_encoder()(**inputs)
    with pytest.raises(ValueError, match="encoder_outputs must not be given with ensemble"):
        models[0].generate(encoder_outputs=memory, ensemble=models[1:])
    marian, words = make_marian(make_pieces(tmp_path), tmp_path)
    with pytest.raises(ValueError, match="ensemble must be of models of this package, got a Mari"):
        TranslationPipeline(marian, words)("a house", ensemble=[marian])
    with pytest.raises(ValueError, match=r"must be a VanillaTransformerFor.*, got a MarianMTModel"):
        models[0].generate(**inputs, ensemble=[marian])
