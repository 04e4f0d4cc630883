"""Convert SentencePiece models (.model) to fast tokenizers.

A model file is a Protocol Buffers message. This file parses the few fields that a tokenizer needs,
so that neither the package protobuf nor the package sentencepiece is needed.
"""

import re
import struct
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast

# character that stands for a space in a piece
SPACE = "\u2581"
# field numbers of the messages ModelProto, SentencePiece, TrainerSpec and NormalizerSpec
MODEL_PIECES, MODEL_TRAINER, MODEL_NORMALIZER = 1, 2, 3
PIECE_TEXT, PIECE_SCORE, PIECE_TYPE = 1, 2, 3
TRAINER_MODEL_TYPE, TRAINER_SPACE_SUFFIX, TRAINER_BYTE_FALLBACK = 3, 24, 35
# fields of TrainerSpec with the ids of special tokens: field number and default value
SPECIAL_IDS = {
    "unk_token": (40, 0),
    "bos_token": (41, 1),
    "eos_token": (42, 2),
    "pad_token": (43, -1),
}
NORMALIZER_CHARACTERS, NORMALIZER_DUMMY_PREFIX = 2, 3
NORMALIZER_REMOVE_SPACES, NORMALIZER_ESCAPE_SPACES = 4, 5
# values of `PIECE_TYPE`
NORMAL, USER_DEFINED = 1, 4
# values of `TRAINER_MODEL_TYPE`
UNIGRAM, BYTE_PAIRS, CHARACTERS = 1, 2, 4


def read_sentence_pieces(path: str | Path) -> PreTrainedTokenizerFast:
    """Read a SentencePiece model as a fast tokenizer that gives the same ids.

    Args:
        path: File of a unigram, BPE or character model.

    Returns:
        The tokenizer, with the special tokens that the model has.

    Raises:
        ValueError: If the file is not such a model, or its pieces have the space at their end.
    """
    try:
        model = _parse_fields(Path(path).read_bytes())
        pieces = [_parse_piece(_parse_fields(piece)) for piece in model.get(MODEL_PIECES, [])]
        trainer_fields, normalizer_fields = (
            _parse_fields(model[field][0]) for field in (MODEL_TRAINER, MODEL_NORMALIZER)
        )
        model_type = _last_value(trainer_fields, TRAINER_MODEL_TYPE, UNIGRAM)
        if not pieces or model_type not in (UNIGRAM, BYTE_PAIRS, CHARACTERS):
            raise ValueError
    except (ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        raise ValueError(
            "tokenizer must be a unigram, BPE or character model of SentencePiece, got "
            f"{str(path)!r}."
        ) from error
    if _last_value(trainer_fields, TRAINER_SPACE_SUFFIX, False):
        raise ValueError(
            "tokenizer must be a SentencePiece model whose pieces begin with the space, but the "
            f"pieces of {str(path)!r} end with it: train the model without "
            "treat_whitespace_as_suffix."
        )
    user_defined = [piece for piece, _, piece_type in pieces if piece_type == USER_DEFINED]
    special_ids = {name: _last_value(trainer_fields, *field) for name, field in SPECIAL_IDS.items()}
    # the id -1 means no such token; as a varint it is 2**64 - 1, which is outside of the range
    special_tokens = {
        name: pieces[index][0] for name, index in special_ids.items() if index in range(len(pieces))
    }
    falls_back_to_bytes = bool(_last_value(trainer_fields, TRAINER_BYTE_FALLBACK, False))
    if model_type == UNIGRAM:
        scores = [(piece, score) for piece, score, _ in pieces]
        tokenizer = Tokenizer(
            Unigram(scores, special_ids["unk_token"], byte_fallback=falls_back_to_bytes)
        )
    else:
        tokenizer = Tokenizer(
            BPE(
                vocab={piece: index for index, (piece, _, _) in enumerate(pieces)},
                # a character model has none
                merges=_reconstruct_merges(pieces),
                unk_token=special_tokens.get("unk_token"),
                fuse_unk=True,
                byte_fallback=falls_back_to_bytes,
                ignore_merges=bool(user_defined),
            )
        )
    has_prefix = bool(_last_value(normalizer_fields, NORMALIZER_DUMMY_PREFIX, True))
    tokenizer.normalizer = _make_normalizer(normalizer_fields, has_prefix)
    pre_tokenizer_steps: list[Any] = []
    if has_prefix:
        pre_tokenizer_steps.append(
            pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False)
        )
    if user_defined:
        longest_first = sorted(user_defined, key=len, reverse=True)
        pre_tokenizer_steps.append(
            pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pre_tokenizer_steps)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            *([decoders.ByteFallback()] if falls_back_to_bytes else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if has_prefix else []),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)


def _make_normalizer(fields: dict[int, list], has_prefix: bool) -> normalizers.Normalizer:
    steps: list[Any] = []
    if characters := _last_value(fields, NORMALIZER_CHARACTERS, b""):
        steps.append(normalizers.Precompiled(characters))
    if _last_value(fields, NORMALIZER_REMOVE_SPACES, True):
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if _last_value(fields, NORMALIZER_ESCAPE_SPACES, True):
        steps.append(normalizers.Replace(" ", SPACE))
    if has_prefix:
        # SentencePiece adds a prefix to every text, but Metaspace skips a text that begins with one
        steps.append(normalizers.Replace(Regex(rf"\A{SPACE}"), SPACE * 2))
    return normalizers.Sequence(steps)


def _reconstruct_merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Reconstruct the merges of a BPE model, which stores only the pieces that merges produce."""
    normal_pieces = {
        piece: (score, index)
        for index, (piece, score, piece_type) in enumerate(pieces)
        if piece_type == NORMAL
    }
    ranked_merges = [
        (-score, index, piece[:split_position], piece[split_position:])
        for piece, (score, index) in normal_pieces.items()
        for split_position in range(1, len(piece))
        if piece[:split_position] in normal_pieces and piece[split_position:] in normal_pieces
    ]
    return [(left, right) for _, _, left, right in sorted(ranked_merges)]


def _parse_piece(fields: dict[int, list]) -> tuple[str, float, int]:
    score = struct.unpack("<f", fields[PIECE_SCORE][-1])[0] if PIECE_SCORE in fields else 0.0
    return fields[PIECE_TEXT][-1].decode(), score, _last_value(fields, PIECE_TYPE, NORMAL)


def _last_value(fields: dict[int, list], number: int, default: Any) -> Any:
    return fields.get(number, [default])[-1]


def _parse_fields(message: bytes) -> dict[int, list]:
    """Parse the fields of a message by number: varints as integers, all other values as bytes."""
    fields: dict[int, list] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        tag = varint()
        # wire type: 0 is a varint, 1 and 5 have a fixed size, 2 begins with its size
        wire_type = tag & 7
        if wire_type == 0:
            value: int | bytes = varint()
        elif wire_type in (1, 2, 5):
            size = {1: 8, 5: 4}.get(wire_type) or varint()
            value = message[position : position + size]
            position += size
        else:
            raise ValueError
        fields.setdefault(tag >> 3, []).append(value)
    if position != len(message):
        raise ValueError
    return fields
