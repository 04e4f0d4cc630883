"""The model of a run: the mean of its last checkpoints. Section 6.1."""

from pathlib import Path

import pytest
import torch
import train_toys

from vanilla_transformer.train.averaging import average_run, average_weights
from vanilla_transformer.train.checkpoint import (
    checkpoints,
    load_weights,
    read_weights,
    save_checkpoint,
)
from vanilla_transformer.train.loop import train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return train_toys.write_corpus(tmp_path_factory.mktemp("corpus"))


def make_model(seed=0):
    return train_toys.toy_model(seed, hidden_size=8)


def save(folder: Path, step: int):
    model = make_model(seed=step)
    save_checkpoint(folder, step, model, torch.optim.Adam(model.parameters()), {}, keep=9)
    return model


def test_an_average_is_the_mean_of_each_weight(tmp_path):
    models = [save(tmp_path, step) for step in (1, 2, 3)]
    average = average_weights(checkpoints(tmp_path))
    assert len(average) > 10
    for name, tensor in average.items():
        mean = sum(model.state_dict()[name].double() for model in models) / 3
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


def test_an_averaged_model_is_tied_as_before_and_loads(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    model = make_model()
    average = average_weights(checkpoints(tmp_path))
    load_weights(model, average)
    table = model.model.encoder.embed_tokens.weight
    assert model.lm_head.weight is table
    assert model.model.decoder.embed_tokens.weight is table
    assert torch.equal(table, next(v for k, v in average.items() if v.shape == (19, 8)))
    model.save_pretrained(tmp_path / "out")
    assert read_weights(tmp_path / "out").keys() == average.keys()


def test_an_average_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one checkpoint, got none"):
        average_weights([])


def test_fewer_checkpoints_can_be_averaged_afterwards(corpus, tmp_path):
    train(train_toys.toy_config(corpus, tmp_path / "run"))
    assert average_run(tmp_path / "run", 1) == 1
    train_toys.assert_same_bits(tmp_path / "run", tmp_path / "run/checkpoints/step-12")
    with pytest.raises(ValueError, match="has 2 checkpoints to average, got 3"):
        average_run(tmp_path / "run", 3)
    with pytest.raises(ValueError, match=r"must be a run folder, with recipe\.yaml"):
        average_run(tmp_path)
