"""SentencePiece models as fast tokenizers: the ids are those of SentencePiece."""

import pytest
import sentencepiece
from transformers import AutoTokenizer

from vanilla_transformer.tokenization.sentence_pieces import read_sentence_pieces

LINES = [
    f"The {color} house number {n} stands in the street, isn't it?"
    for n in range(40)
    for color in ("red", "green", "blue")
] + ["Straße, Käse und Öl: 5 €", "a\u3000b ﬁne ①"]
TEXTS = [
    *LINES[:3],
    LINES[-1],
    " two  spaces   and more ",
    "unknown: 漢字 \U0001f600",
    "a <sep> b<sep>c",
    "\u2581 is a space",
    "",
    "tab\tand\nline",
]


def make(folder, **settings):
    (folder / "text").write_text("\n".join(LINES * 2), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        **{
            "input": str(folder / "text"),
            "model_prefix": str(folder / "spm"),
            "vocab_size": 120,
            "hard_vocab_limit": False,
            "minloglevel": 2,
            **settings,
        }
    )
    return folder / "spm.model"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model_type": "bpe"},
        {"user_defined_symbols": ["<sep>"], "pad_id": 3},
        {"model_type": "bpe", "user_defined_symbols": ["<sep>"]},
        {"byte_fallback": True, "vocab_size": 400},
        {"model_type": "bpe", "byte_fallback": True, "vocab_size": 400},
        {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
        {"normalization_rule_name": "identity"},
        {"normalization_rule_name": "nmt_nfkc_cf", "model_type": "bpe"},
        {"model_type": "char"},
        {"model_type": "char", "byte_fallback": True, "vocab_size": 400},
        {"model_type": "char", "user_defined_symbols": ["<sep>"]},
    ],
    ids=str,
)
def test_the_ids_are_those_of_sentencepiece(settings, tmp_path):
    path = make(tmp_path, **settings)
    ours, theirs = read_sentence_pieces(path), sentencepiece.SentencePieceProcessor(str(path))
    assert len(ours) == theirs.get_piece_size()
    for text in TEXTS:
        ids = ours(text, add_special_tokens=False).input_ids
        assert ids == theirs.encode(text), text
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)
    for name in ("unk", "bos", "eos", "pad"):
        expected = getattr(theirs, f"{name}_id")()
        assert getattr(ours, f"{name}_token_id") == (None if expected < 0 else expected)
    ours.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(TEXTS).input_ids == ours(TEXTS).input_ids


@pytest.mark.parametrize("content", ["cut", "text", "empty", "words"])
def test_another_file_is_refused(content, tmp_path):
    path = make(tmp_path, **({"model_type": "word"} if content == "words" else {}))
    whole = path.read_bytes()
    others = {"cut": whole[: len(whole) // 2], "text": b"<s>\n</s>\nthe\n", "empty": b""}
    path.write_bytes(others.get(content, whole))
    with pytest.raises(
        ValueError, match=r"must be a unigram, BPE or character model of SentencePiece, got"
    ):
        read_sentence_pieces(path)


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
def test_a_model_whose_pieces_end_with_the_space_is_refused(model_type, tmp_path):
    path = make(tmp_path, model_type=model_type, treat_whitespace_as_suffix=True)
    with pytest.raises(ValueError, match=r"whose pieces begin with the space, .* end with it: "):
        read_sentence_pieces(path)
