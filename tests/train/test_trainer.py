"""Trainer with the fused loss: same results as the library's trainer."""

import pytest
import torch
import torch.nn.functional as F
import train_toys
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.train import trainer
from vanilla_transformer.train.devices import cpu_kernels
from vanilla_transformer.train.devices.cpu_kernels import CheapDropout
from vanilla_transformer.train.trainer import FusedTrainer

pytestmark = pytest.mark.usefixtures("new_process")


@pytest.fixture(scope="module")
def tokenizer():
    texts = [f"word {number} of a few more" for number in range(40)]
    return VanillaTransformerTokenizer().train_new_from_iterator(texts, vocab_size=270)


@pytest.fixture
def rows(tokenizer):
    """Sixteen pairs with targets of one to sixteen numbers, so that every batch has padding."""
    pairs = [(f"word {n} of more", " ".join(map(str, range(n + 1)))) for n in range(16)]
    return [dict(tokenizer(source, text_target=target)) for source, target in pairs]


@pytest.fixture
def model(tokenizer):
    return train_toys.toy_model(vocab_size=len(tokenizer), dropout=0.0)


def collator_of(tokenizer, model):
    return DataCollatorForSeq2Seq(tokenizer, model=model)


@pytest.fixture
def trained(model, tokenizer, rows, tmp_path):
    """Return a function that trains the model with a trainer and returns losses and weights."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def train(kind, collator=None, compute_loss_func=None, **settings):
        model.load_state_dict(start)
        given = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0}
        given |= {"per_device_train_batch_size": 4, "use_cpu": True, "logging_steps": 1}
        given |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, **settings}
        made = kind(
            model=model,
            args=Seq2SeqTrainingArguments(str(tmp_path), **given),
            train_dataset=rows,
            data_collator=collator or collator_of(tokenizer, model),
            compute_loss_func=compute_loss_func,
        )
        made.train()
        losses = [line["loss"] for line in made.state.log_history if "loss" in line]
        assert len(losses) == 3
        return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}

    return train


def assert_same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    torch.testing.assert_close(one[1], other[1], rtol=1e-5, atol=1e-6)


@pytest.fixture
def forbid_scores(monkeypatch):
    """Return a function that makes the library's loss, which computes logits, fail."""

    def fail(*_, **__):
        raise AssertionError("the vocabulary was scored.")

    return lambda: monkeypatch.setattr(Seq2SeqTrainer, "compute_loss", fail)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"label_smoothing_factor": 0.1},
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3},
        {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
        {"gradient_checkpointing": True},
        {"bf16": True},
    ],
)
def test_a_step_is_that_of_the_library(trained, settings, forbid_scores):
    plain = trained(Seq2SeqTrainer, **settings)
    forbid_scores()
    fused = trained(FusedTrainer, **settings)
    if settings.get("bf16"):
        # the plain model rounds its scores to half precision
        assert fused[0] == pytest.approx(plain[0], rel=2e-2)
    else:
        assert_same(plain, fused)


@pytest.mark.parametrize(
    ("launched", "settings", "remedy"),
    [
        ("no", {}, None),
        ("no", {"bf16": True}, "set --bf16 false."),
        ("bf16", {}, "set --mixed_precision no of the launcher."),
    ],
)
def test_bf16_on_a_cpu_that_emulates_it_is_mentioned(
    trained, monkeypatch, caplog, launched, settings, remedy
):
    monkeypatch.setattr(cpu_kernels, "emulates_bf16", lambda: True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    trained(FusedTrainer, **settings)
    assert caplog.text.count("many times slower") == (remedy is not None)
    assert (remedy or "") in caplog.text


def test_a_collator_need_not_shift_the_labels(trained, tokenizer, forbid_scores):
    collator = DataCollatorForSeq2Seq(tokenizer)
    plain = trained(Seq2SeqTrainer, collator)
    forbid_scores()
    assert_same(plain, trained(FusedTrainer, collator))


def test_inputs_that_the_fused_loss_does_not_know_are_left_to_the_library(
    trained, tokenizer, model, monkeypatch
):
    def collator(rows):
        batch = collator_of(tokenizer, model)(rows)
        # hides the second token of each target from all that follow
        mask = torch.ones_like(batch["decoder_input_ids"])
        mask[:, 1] = 0
        return {**batch, "decoder_attention_mask": mask}

    monkeypatch.setattr(trainer, "batch_loss_sum", None)
    plain = trained(Seq2SeqTrainer, collator)
    assert_same(plain, trained(FusedTrainer, collator))
    assert trained(Seq2SeqTrainer)[0] != pytest.approx(plain[0], rel=1e-5)


def test_the_users_own_loss_is_used(trained, monkeypatch):
    def twice(outputs, labels, num_items_in_batch):
        logits, labels = outputs.logits.flatten(0, 1), labels.flatten()
        return 2 * F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch

    monkeypatch.setattr(trainer, "batch_loss_sum", None)
    plain = trained(Seq2SeqTrainer, compute_loss_func=twice)
    assert_same(plain, trained(FusedTrainer, compute_loss_func=twice))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_type", "ForCausalLM"),
        ("loss_function", lambda logits, labels, vocab_size, **_: logits.square().mean()),
    ],
)
def test_the_loss_of_the_users_model_is_used(trained, model, monkeypatch, name, value):
    released = trained(Seq2SeqTrainer)
    setattr(model, name, value)
    plain = trained(Seq2SeqTrainer)
    assert plain[0] != pytest.approx(released[0], rel=1e-5)
    monkeypatch.setattr(trainer, "batch_loss_sum", None)
    assert_same(plain, trained(FusedTrainer))


def test_noise_on_the_embeddings_is_added(trained, monkeypatch):
    monkeypatch.setattr(trainer, "batch_loss_sum", None)
    plain = trained(Seq2SeqTrainer, neftune_noise_alpha=20.0)
    assert_same(plain, trained(FusedTrainer, neftune_noise_alpha=20.0))
    assert trained(Seq2SeqTrainer)[0] != pytest.approx(plain[0], rel=1e-5)


def test_evaluation_is_the_librarys(model, tokenizer, rows, tmp_path):
    arguments = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    both = [
        kind(
            model=model,
            args=arguments,
            eval_dataset=rows,
            data_collator=collator_of(tokenizer, model),
        ).evaluate()["eval_loss"]
        for kind in (Seq2SeqTrainer, FusedTrainer)
    ]
    assert both[0] == both[1]


def test_every_model_that_is_trained_gets_the_cheap_dropout(model, tokenizer, rows, tmp_path):
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no"
    )
    made = FusedTrainer(
        model_init=lambda: train_toys.toy_model(vocab_size=len(tokenizer), dropout=0.1),
        args=arguments,
        train_dataset=rows,
        data_collator=collator_of(tokenizer, model),
    )
    made.train()
    found = [module for module in made.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert found
    assert all(isinstance(module, CheapDropout) for module in found if module.p)
    assert list(made.model.state_dict()) == list(model.state_dict())
