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
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE, SCORE, KIND = 1, 2, 3
MODEL_TYPE, BYTE_FALLBACK = 3, 35
# fields of TrainerSpec with the ids of special tokens: field number and default value
SPECIAL_IDS = {
    "unk_token": (40, 0),
    "bos_token": (41, 1),
    "eos_token": (42, 2),
    "pad_token": (43, -1),
}
CHARACTERS, DUMMY_PREFIX, REMOVE_SPACES, ESCAPE_SPACES = 2, 3, 4, 5
# values of `KIND`
NORMAL, USER_DEFINED = 1, 4
# values of `MODEL_TYPE`
UNIGRAM, BYTE_PAIRS = 1, 2


def read_sentence_pieces(path: str | Path) -> PreTrainedTokenizerFast:
    """Read a SentencePiece model as a fast tokenizer that gives the same ids.

    Args:
        path: File of a unigram or BPE model.

    Returns:
        The tokenizer, with the special tokens that the model has.

    Raises:
        ValueError: If the file is not a unigram or BPE model of SentencePiece.
    """
    try:
        model = _fields(Path(path).read_bytes())
        pieces = [_piece(_fields(piece)) for piece in model.get(PIECES, [])]
        trainer, normalizer = (_fields(model[field][0]) for field in (TRAINER, NORMALIZER))
        kind = _last(trainer, MODEL_TYPE, UNIGRAM)
        if not pieces or kind not in (UNIGRAM, BYTE_PAIRS):
            raise ValueError
    except (ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        raise ValueError(
            f"tokenizer must be a unigram or BPE model of SentencePiece, got {str(path)!r}."
        ) from error
    user_defined = [piece for piece, _, kind in pieces if kind == USER_DEFINED]
    ids = {name: _last(trainer, *field) for name, field in SPECIAL_IDS.items()}
    # the id -1 means no such token; as a varint it is 2**64 - 1, which is outside of the range
    special = {name: pieces[index][0] for name, index in ids.items() if index in range(len(pieces))}
    has_bytes = bool(_last(trainer, BYTE_FALLBACK, False))
    if kind == UNIGRAM:
        scores = [(piece, score) for piece, score, _ in pieces]
        tokenizer = Tokenizer(Unigram(scores, ids["unk_token"], byte_fallback=has_bytes))
    else:
        tokenizer = Tokenizer(
            BPE(
                vocab={piece: index for index, (piece, _, _) in enumerate(pieces)},
                merges=_merges(pieces),
                unk_token=special.get("unk_token"),
                fuse_unk=True,
                byte_fallback=has_bytes,
                ignore_merges=bool(user_defined),
            )
        )
    has_prefix = bool(_last(normalizer, DUMMY_PREFIX, True))
    tokenizer.normalizer = _normalizer(normalizer, has_prefix)
    steps: list[Any] = []
    if has_prefix:
        steps.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False))
    if user_defined:
        longest_first = sorted(user_defined, key=len, reverse=True)
        steps.append(
            pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            *([decoders.ByteFallback()] if has_bytes else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if has_prefix else []),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _normalizer(fields: dict[int, list], has_prefix: bool) -> normalizers.Normalizer:
    steps: list[Any] = []
    if characters := _last(fields, CHARACTERS, b""):
        steps.append(normalizers.Precompiled(characters))
    if _last(fields, REMOVE_SPACES, True):
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if _last(fields, ESCAPE_SPACES, True):
        steps.append(normalizers.Replace(" ", SPACE))
    if has_prefix:
        # SentencePiece adds a prefix to every text, but Metaspace skips a text that begins with one
        steps.append(normalizers.Replace(Regex(rf"\A{SPACE}"), SPACE * 2))
    return normalizers.Sequence(steps)


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Reconstruct the merges of a BPE model, which stores only the pieces that merges produce."""
    normal = {
        piece: (score, number)
        for number, (piece, score, kind) in enumerate(pieces)
        if kind == NORMAL
    }
    ranked = [
        (-score, number, piece[:end], piece[end:])
        for piece, (score, number) in normal.items()
        for end in range(1, len(piece))
        if piece[:end] in normal and piece[end:] in normal
    ]
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _piece(fields: dict[int, list]) -> tuple[str, float, int]:
    score = struct.unpack("<f", fields[SCORE][-1])[0] if SCORE in fields else 0.0
    return fields[PIECE][-1].decode(), score, _last(fields, KIND, NORMAL)


def _last(fields: dict[int, list], number: int, default: Any) -> Any:
    return fields.get(number, [default])[-1]


def _fields(message: bytes) -> dict[int, list]:
    """Parse the fields of a message by number: varints as integers, all other values as bytes."""
    found: dict[int, list] = {}
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
        key = varint()
        # wire type: 0 is a varint, 1 and 5 have a fixed size, 2 begins with its size
        kind = key & 7
        if kind == 0:
            value: int | bytes = varint()
        elif kind in (1, 2, 5):
            size = {1: 8, 5: 4}.get(kind) or varint()
            value = message[position : position + size]
            position += size
        else:
            raise ValueError
        found.setdefault(key >> 3, []).append(value)
    if position != len(message):
        raise ValueError
    return found


__all__ = ["read_sentence_pieces"]
