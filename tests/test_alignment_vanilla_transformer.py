"""Word alignment: of a model that reverses its source, by hand, and on the command line."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from library_models import KINDS, SENTENCES, save
from translation_toys import TEXTS

import vanilla_transformer
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.alignment_vanilla_transformer import (
    aligned_words,
    choose_heads,
    head_weights,
    prefix_texts,
    return_weights,
    word_indices,
)
from vanilla_transformer.changes_vanilla_transformer import _CHANGED, changed
from vanilla_transformer.cli import main
from vanilla_transformer.languages_vanilla_transformer import source_tokenizer


@pytest.fixture(scope="module")
def reversing():
    """Model of two layers that learned to write the tokens 10 to 29 in reverse order."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=30,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        dropout=0.0,
    )
    model = VanillaTransformerForConditionalGeneration(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(250):
        source, labels = reversed_batch(config, 32)
        loss = model(input_ids=source, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(num_threads)
    return model.eval()


def reversed_batch(config, size, length=7):
    tokens = torch.stack([torch.randperm(20)[:length] + 10 for _ in range(size)])
    end = torch.full((size, 1), config.eos_token_id)
    return torch.cat((tokens, end), dim=1), torch.cat((tokens.flip(1), end), dim=1)


class ReversingTokenizer:
    """The only attribute of a tokenizer that `choose_heads` reads."""

    all_special_ids = (0, 1, 2, 3)


def test_the_chosen_heads_align_a_model_that_reverses(reversing):
    torch.manual_seed(1)
    source, target = (it.tolist() for it in reversed_batch(reversing.config, 20))
    heads, share = choose_heads(reversing, ReversingTokenizer(), source, target)
    assert share > 0.9
    torch.manual_seed(2)
    source, target = reversed_batch(reversing.config, 50)
    inputs = {"input_ids": source, "attention_mask": torch.ones_like(source)}
    weights = head_weights(reversing, inputs, target.tolist(), heads)
    found = torch.stack([it.mean(dim=0)[:7, :7].argmax(dim=1) for it in weights])
    expected = torch.arange(6, -1, -1).expand_as(found)
    assert (found == expected).float().mean() > 0.9
    # heads differ: all of them together align worse
    everything = head_weights(reversing, inputs, target.tolist())
    worst = min(
        (torch.stack([it[head, :7, :7].argmax(1) for it in everything]) == expected).float().mean()
        for head in range(len(everything[0]))
    )
    assert worst < 0.9


def test_weights_are_those_of_the_row_that_predicts_a_token(translate):
    ids = translate.tokenizer(TEXTS[:3], padding=True, return_tensors="pt")
    ids.pop("token_type_ids", None)
    targets = translate.tokenizer(TEXTS[2:5])["input_ids"]
    found = head_weights(translate.model, ids, targets, [[0, 2], [0, 0]])
    start = translate.model.config.decoder_start_token_id
    translate.model.set_attn_implementation("eager")
    for row, (weights, target) in enumerate(zip(found, targets, strict=True)):
        length = int(ids["attention_mask"][row].sum())
        with torch.no_grad():
            output = translate.model(
                input_ids=ids["input_ids"][row : row + 1, :length],
                decoder_input_ids=torch.tensor([[start, *target]]),
                output_attentions=True,
            )
        cross = output.cross_attentions[0][0]  # [h, T + 1, S]
        assert weights.shape == (2, len(target), ids["input_ids"].shape[1])
        torch.testing.assert_close(weights[0, :, :length], cross[2, :-1])
        torch.testing.assert_close(weights[1, :, :length], cross[0, :-1])
    translate.model.set_attn_implementation("sdpa")


class NextIds(VanillaTransformerForConditionalGeneration):
    def forward(self, input_ids=None, **inputs):
        return super().forward(input_ids=input_ids + 1, **inputs)


def with_class(model):
    model.__class__ = NextIds


def with_hook(model):
    model.register_forward_pre_hook(
        lambda module, args, inputs: (args, {**inputs, "input_ids": inputs["input_ids"] + 1}),
        with_kwargs=True,
    )


def with_instance_forward(model):
    forward = model.forward
    model.forward = lambda input_ids, **inputs: forward(input_ids=input_ids + 1, **inputs)


@pytest.mark.parametrize("change", [with_class, with_hook, with_instance_forward])
def test_a_changed_forward_computes_the_weights(small_model, change):
    torch.manual_seed(0)
    model = small_model()
    ids = torch.randint(5, 20, (2, 6))
    targets = [[5, 6, 7], [8, 9]]
    expected = head_weights(model, {"input_ids": ids + 1}, targets)
    unchanged = head_weights(model, {"input_ids": ids}, targets)
    change(model)
    found = head_weights(model, {"input_ids": ids}, targets)
    for weights, wanted, other in zip(found, expected, unchanged, strict=True):
        torch.testing.assert_close(weights, wanted)
        assert (weights - other).abs().max() > 1e-3


def test_an_alignment_keeps_no_weights_of_the_encoder_and_computes_no_logits(
    translate, monkeypatch
):
    model = translate.model
    encoder_weights = []
    monkeypatch.setattr(model.lm_head, "forward", lambda states: pytest.fail("logits"))
    encoder = model.get_encoder()
    hook = encoder.register_forward_hook(
        lambda module, args, output: encoder_weights.append(output.attentions)
    )
    assert translate.align(TEXTS, TEXTS)
    hook.remove()
    assert encoder_weights == [None]


def test_words_are_aligned_with_the_largest_sum_of_weights():
    weights = torch.tensor(
        [
            # <lang> two tokens of a word, a word, </s>
            [0.0, 0.3, 0.3, 0.4, 0.0],
            [0.0, 0.1, 0.1, 0.3, 0.5],
            [0.9, 0.0, 0.0, 0.1, 0.0],
            [1.0, 0.0, 0.0, 0.0, 0.0],
        ]
    )
    found = aligned_words(weights, [None, 0, 0, 1, None], [0, 1, 1, None])
    assert found == [(0, 0), (1, 1)]
    # words of a prefix of the source have negative numbers
    assert aligned_words(weights, [-1, 0, 0, 1, None], [0, 1, 2, None]) == [(0, 0), (1, 1), (1, 2)]
    assert aligned_words(weights, [None] * 5, [0, 1, 1, None]) == []


# without special tokens in its files, the library's tokenizer of M2M100 writes languages as words
WITHOUT_LANGUAGES = [kind for kind in KINDS if kind != "m2m100"]


@pytest.mark.parametrize("kind", [None, *WITHOUT_LANGUAGES])
def test_tokens_belong_to_the_words_of_the_text(kind, translate, pieces, tmp_path):
    tokenizer = translate.tokenizer
    if kind is not None:
        save(kind, pieces, tmp_path)
        tokenizer = source_tokenizer(vanilla_transformer.load(tmp_path).tokenizer)
    text = "the cat sleeps in the house"
    ids = tokenizer(text)["input_ids"]
    indices = word_indices(tokenizer, ids)
    assert len(indices) == len(ids)
    assert indices[-1] is None
    for number, word in enumerate(text.split()):
        own = [token for token, it in zip(ids, indices, strict=True) if it == number]
        assert tokenizer.decode(own).strip() == word


def test_unknown_characters_keep_the_numbers_of_words(translate):
    ids = translate.tokenizer("the \u4e00 house")["input_ids"]
    numbers = [it for it in word_indices(translate.tokenizer, ids) if it is not None]
    assert sorted(set(numbers)) == [0, 1, 2]


@pytest.mark.parametrize("kind", WITHOUT_LANGUAGES)
def test_models_of_the_library_align(kind, pieces, tmp_path):
    save(kind, pieces, tmp_path)
    languages = KINDS[kind][1]
    translate = vanilla_transformer.load(tmp_path, num_beams=2, max_new_tokens=8, **languages)
    results = translate(SENTENCES, return_alignment=True)
    for text, result in zip(SENTENCES, results, strict=True):
        check_pairs(text, result["translation_text"], result["alignment"])
    plain = translate(SENTENCES)
    assert [it["translation_text"] for it in results] == [it["translation_text"] for it in plain]


def check_pairs(source, target, pairs):
    assert [word for _, word in pairs] == list(range(len(target.split())))
    assert all(0 <= word < len(source.split()) for word, _ in pairs)


def test_results_of_all_kinds_have_alignments(translate):
    texts = [*TEXTS, "", "the cat. the dogs sleep.\n\na house. dogs"]
    found = translate(texts, return_alignment=True, num_return_sequences=2, return_scores=True)
    for text, results in zip(texts, found, strict=True):
        for result in results:
            check_pairs(text, result["translation_text"], result["alignment"])
    alone = [translate(text, return_alignment=True)[0] for text in texts]
    assert alone == translate(texts, return_alignment=True)
    joined = translate(texts, return_alignment=True, split_sentences="en")
    for text, result in zip(texts, joined, strict=True):
        check_pairs(text, result["translation_text"], result["alignment"])
    heads = [[0, 1], [0, 3]]
    other = translate(texts, return_alignment=True, alignment_heads=heads)
    assert other != alone
    pairs = [it["alignment"] for it in other]
    given = [it["translation_text"] for it in other]
    assert translate.align(texts[:5], given[:5], alignment_heads=heads) == pairs[:5]


def test_sentences_without_a_space_between_them_share_a_word(translate):
    text = "the cat!The dogs sleep. A house"
    (found,) = translate([text], return_alignment=True, split_sentences="en")
    sources, targets = map(set, zip(*found["alignment"], strict=True))
    assert len(text.split()) == 6
    assert sources <= set(range(6))
    assert targets == set(range(len(found["translation_text"].split())))


def test_the_attention_function_of_the_model_is_restored(translate):
    before = translate.model.config._attn_implementation
    translate.align(TEXTS, TEXTS)
    assert translate.model.config._attn_implementation == before == "sdpa"
    assert not translate.model.training
    assert not _CHANGED


def test_threads_that_align_with_one_model_leave_its_attention_function(translate):
    model = translate.model
    first_has_begun, second_has_begun, first_has_ended = (threading.Event() for _ in range(3))
    implementations = []

    def first():
        with changed(model, return_weights):
            first_has_begun.set()
            assert second_has_begun.wait(60)

    def second():
        assert first_has_begun.wait(60)
        with changed(model, return_weights):
            second_has_begun.set()
            assert first_has_ended.wait(60)
            implementations.append(model.config._attn_implementation)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(first), pool.submit(second)]
        runs[0].result()
        first_has_ended.set()
        runs[1].result()
    assert implementations == ["eager"]
    assert model.config._attn_implementation == "sdpa"


LONG = "the small \u65e5\u672c cat, the \U0001f642\U0001f642 sleeps. " * 40


@pytest.mark.parametrize("kind", [None, "bart", "t5"])
def test_the_text_of_each_prefix_is_found_in_linear_time(kind, translate, pieces, tmp_path):
    tokenizer = translate.tokenizer
    if kind is not None:
        save(kind, pieces, tmp_path)
        tokenizer = vanilla_transformer.load(tmp_path).tokenizer
    ids = tokenizer(LONG)["input_ids"]
    spy = DecodingSpy(tokenizer)
    assert prefix_texts(spy, ids) == [tokenizer.decode(ids[:end]) for end in range(len(ids) + 1)]
    assert len(ids) > 400
    assert spy.num_tokens < 60 * len(ids)


def test_texts_of_prefixes_are_right_where_a_token_changes_the_text_before_it():
    tokenizer = DecodingSpy(None)
    ids = list(range(100))
    expected = ["", *(f"{end}." for end in range(1, 101))]
    assert prefix_texts(tokenizer, ids) == expected
    assert prefix_texts(tokenizer, []) == [""]


class DecodingSpy:
    """A tokenizer that counts the tokens that it decodes; without a tokenizer, text is a count."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_tokens = tokenizer, 0

    def decode(self, ids, **settings):
        self.num_tokens += len(ids)
        if self.tokenizer is None:
            return f"{len(ids)}." if ids else ""
        return self.tokenizer.decode(ids, **settings)

    def batch_decode(self, rows, **settings):
        return [self.decode(ids, **settings) for ids in rows]


def test_heads_that_the_model_lacks_are_refused(translate):
    with pytest.raises(ValueError, match=r"a layer below 1 and a head below 4, got \[1, 0\]"):
        translate.align(TEXTS, TEXTS, alignment_heads=[[1, 0]])


def test_the_commands_write_alignments(translate, tmp_path, capsys):
    translate.model.save_pretrained(tmp_path / "model")
    translate.tokenizer.save_pretrained(tmp_path / "model")
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text("".join(f"{text}\n" for text in TEXTS))
    model = str(tmp_path / "model")
    assert main(["translate", model, str(source), "--alignment"]) == 0
    lines = [line.split(" ||| ") for line in capsys.readouterr().out.splitlines()]
    results = translate(TEXTS, return_alignment=True)
    assert lines == [
        [it["translation_text"], " ".join(f"{a}-{b}" for a, b in it["alignment"])] for it in results
    ]
    assert main(["translate", model, str(source), "--alignment", "--jsonl"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])["translations"][0]
    assert first["alignment"] == [list(pair) for pair in results[0]["alignment"]]
    target.write_text("".join(f"{translation}\n" for translation, _ in lines))
    pairs = [model, "--source", str(source), "--target", str(target)]
    assert main(["align", *pairs]) == 0
    assert capsys.readouterr().out.splitlines() == [alignment for _, alignment in lines]

    assert main(["align", *pairs, "--choose_heads"]) == 0
    assert "source token whose removal lowers the probability most" in capsys.readouterr().out
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    expected = translate.align(
        TEXTS, [it for it, _ in lines], alignment_heads=saved["alignment_heads"]
    )
    assert main(["align", *pairs]) == 0
    assert capsys.readouterr().out.splitlines() == [
        " ".join(f"{a}-{b}" for a, b in it) for it in expected
    ]


def test_pairs_that_cannot_be_aligned_are_refused(translate, tmp_path, capsys):
    translate.model.save_pretrained(tmp_path / "model")
    translate.tokenizer.save_pretrained(tmp_path / "model")
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text("a house\ndogs\n")
    target.write_text("a house\n")
    pairs = ["--source", str(source), "--target", str(target)]
    assert main(["align", str(tmp_path / "model"), *pairs]) == 1
    assert "the same number of lines, got 2" in capsys.readouterr().err
    assert main(["align", "user/model", *pairs, "--choose_heads"]) == 1
    assert "run must be a folder with choose_heads" in capsys.readouterr().err
    source.write_text("")
    target.write_text("")
    assert main(["align", str(tmp_path / "model"), *pairs, "--choose_heads"]) == 1
    assert "two source tokens and a target token, got none" in capsys.readouterr().err
