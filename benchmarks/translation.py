"""Translation: greedy and beam search over batches, against the peers with the same weights."""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..conversion import from_marian
from ..paper.study import Section
from .contest import COLUMNS, Contender, matrix_product, numbers_of, race, ratio_figure, rows_of
from .peers import MARIAN, OURS, build_marian
from .training import dtype_of
from .work import Corpus, model_config, read_corpus, search_flops

OURS_INT8 = f"{OURS} int8"
CTRANSLATE2 = "CTranslate2 "
# of sentences of the text: which a piece is taken from
LENGTHS = {"short": (0.1, 0.5), "long": (0.8, 1.0)}
# translations that may differ where two scores are nearer than the rounding of float32
FEWEST_EQUAL = 0.9


class Piece(NamedTuple):
    """Ids of sentences, how many tokens each translation is to have, and of how many beams."""

    sentences: list[list[int]]
    steps: int
    num_beams: int


class Search:
    """Search by one engine, sentences in and token ids out.

    Args:
        name: `OURS`, `OURS_INT8`, `MARIAN` or one of `ctranslate2_names`.
        size: One of `work.SIZES`.
        tokenizer: Of the text.
        flags: Of the command line.
    """

    def __init__(
        self,
        name: str,
        size: str,
        tokenizer: PreTrainedTokenizerBase,
        flags: argparse.Namespace,
    ):
        self.name, self.tokenizer = name, tokenizer
        self.device = torch.device(flags.device)
        self.dtype = dtype_of(flags.config)
        torch.manual_seed(flags.config.seed)
        # the same weights for all
        model: PreTrainedModel = build_marian(model_config(size, flags.model_vocab_size)).eval()
        if name != MARIAN:
            model = from_marian(model)
        if name.startswith(CTRANSLATE2):
            self.engine = load_ctranslate2(model, tokenizer, name, self.device)
            self.tokens = self.engine_tokens(model, tokenizer)
        else:
            self.model = model.to(self.device, self.dtype)
        # without a length penalty this is the search of the others
        self.settings = {} if name == MARIAN else {"length_penalty_alpha": 0.0}
        if name == OURS_INT8:
            self.settings["int8"] = True

    @staticmethod
    def engine_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The names that the engine has for ids.

        Args:
            model: The model.
            tokenizer: Its tokenizer.

        Returns:
            A name for each row of the embedding.
        """
        from ..export.parts import vocabulary

        return vocabulary(model, tokenizer)

    def __call__(self, piece: Piece) -> list[list[int]]:
        """Translate.

        Args:
            piece: What.

        Returns:
            The ids of each translation.
        """
        sentences, steps, num_beams = piece
        if self.name.startswith(CTRANSLATE2):
            results = self.engine.translate_batch(
                [[self.tokens[token] for token in ids] for ids in sentences],
                beam_size=num_beams,
                min_decoding_length=steps,
                max_decoding_length=steps,
                length_penalty=0,
            )
            places = {token: index for index, token in enumerate(self.tokens)}
            return [[places[token] for token in found.hypotheses[0]] for found in results]
        padded = self.tokenizer.pad({"input_ids": sentences}, return_tensors="pt")
        with torch.no_grad():
            ids = self.model.generate(
                **padded.to(self.device),
                num_beams=num_beams,
                do_sample=False,
                min_new_tokens=steps,
                max_new_tokens=steps,
                max_length=None,
                use_cache=True,
                **self.settings,
            )
        return ids[:, 1:].tolist()


def load_ctranslate2(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    device: torch.device,
) -> Any:
    """A model of this package in CTranslate2.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        name: One of `ctranslate2_names`.
        device: Where.

    Returns:
        A `ctranslate2.Translator` with as many threads as torch has.
    """
    import ctranslate2

    from ..export.ctranslate2 import to_ctranslate2

    with tempfile.TemporaryDirectory() as folder:
        compute_type = name.removeprefix(CTRANSLATE2)
        quantization = "int8" if compute_type.startswith("int8") else "float32"
        to_ctranslate2(model, tokenizer, Path(folder, "model"), quantization)
        return ctranslate2.Translator(
            str(Path(folder, "model")),
            device=device.type,
            compute_type=compute_type,
            intra_threads=torch.get_num_threads(),
            inter_threads=1,
        )


def ctranslate2_names(device: torch.device, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """CTranslate2 in the types that compare with a model's.

    Args:
        device: Where.
        dtype: Of the model; on a processor it has float32 and int8 only.

    Returns:
        Names of contenders that are here, and of those that are not.
    """
    types = ["float32", "int8"]
    if device.type != "cpu" and dtype != torch.float32:
        half = str(dtype).removeprefix("torch.")
        types = [half, f"int8_{half}"]
    names = [CTRANSLATE2 + kind for kind in types]
    try:
        import ctranslate2

        import vanilla_transformer.export.ctranslate2  # noqa: F401
    except ImportError:
        return [], names
    try:
        is_here = set(types) <= ctranslate2.get_supported_compute_types(device.type)
    except (RuntimeError, ValueError):
        # no GPU that it can use
        is_here = False
    return (names, []) if is_here else ([], names)


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Compare searches, a section for each size of model.

    Args:
        flags: Of the command line.

    Yields:
        Sections.
    """
    corpus = read_corpus(flags.config, flags.model_vocab_size)
    for size in flags.sizes:
        yield _forced(size, corpus, flags)


def pieces_of(
    corpus: Corpus, text: str, batch_size: int, num_beams: int, count: int, seed: int
) -> list[Piece]:
    """Batches to translate, of sentences of like length, as `translate` sorts them.

    Args:
        corpus: What to take them from.
        text: One of `LENGTHS`.
        batch_size: Sentences of a batch.
        num_beams: Hypotheses of each sentence.
        count: Batches.
        seed: Of the choice.

    Returns:
        Pieces; translations have as many tokens as the references in the mean.
    """
    first, last = (int(share * len(corpus.rows)) for share in LENGTHS[text])
    order = np.argsort(corpus.source_lengths, kind="stable")[first:last]
    random = np.random.default_rng(seed)
    pieces = []
    for _ in range(count):
        start = random.integers(max(1, len(order) - batch_size + 1))
        numbers = order[start : start + batch_size]
        ids = [list(map(int, row)) for row in corpus.rows[numbers]["input_ids"]]
        steps = round(float(corpus.target_lengths[numbers].mean()))
        pieces.append(Piece(ids, steps, num_beams))
    return pieces


def _forced(size: str, corpus: Corpus, flags: argparse.Namespace) -> Section:
    device, dtype = torch.device(flags.device), dtype_of(flags.config)
    peers, absent = ctranslate2_names(device, dtype)
    is_float32 = dtype == torch.float32
    own = [OURS, MARIAN]
    if flags.device == "cpu" and is_float32:
        own.append(OURS_INT8)
    names = [*own, *peers]
    kinds = [
        (num_beams, text, batch_size)
        for num_beams in flags.beams
        for text in LENGTHS
        for batch_size in flags.batch_sizes
    ]
    titles = [
        f"{'greedy' if num_beams == 1 else f'beam {num_beams}'}, {batch_size} {text}"
        for num_beams, text, batch_size in kinds
    ]
    pieces = [
        piece
        for num_beams, text, batch_size in kinds
        for piece in pieces_of(
            corpus, text, batch_size, num_beams, flags.batches, flags.config.seed
        )
    ]
    config = model_config(size, flags.model_vocab_size)
    amounts = [len(piece.sentences) * piece.steps for piece in pieces]
    flops = [
        search_flops(config, list(map(len, piece.sentences)), piece.num_beams, piece.steps)
        for piece in pieces
    ]
    contenders = [
        Contender(name, Search, (name, size, corpus.tokenizer, flags), pieces, amounts, flops)
        for name in names
    ]
    matrix = matrix_product(device, dtype, len(pieces))
    equal: dict[str, dict[str, str]] = {}

    def check(found: dict[str, list[Any]]):
        for number, title in enumerate(titles):
            translations = {name: found[name][number] for name in names}
            # searches in half precision part; beams at equal scores too, but not many
            equal[title] = equality(translations, must_be_same=is_float32)

    starts = range(0, len(pieces), flags.batches)
    *results, product = race([*contenders, matrix], flags.rounds, device, check, starts)
    tables, numbers, rows = {}, {}, []
    for title, start in zip(titles, starts, strict=True):
        some = [result.part(slice(start, start + flags.batches)) for result in results]
        tables[title] = rows_of(some, MARIAN, product)
        numbers[title] = {**numbers_of(some, product), "equal": equal[title]}
        rows += [(title, *row[:-1], equal[title][row[0]], row[-1]) for row in tables[title]]
    return Section(
        name=f"translation-{size}",
        title=f"Translation, {size}",
        says="Every search with the same random weights and as many tokens a sentence as the "
        f"references have, vocabulary {flags.model_vocab_size:,}, {flags.config.precision}; "
        "sentences of a batch are of like length. Equal is the share of tokens that are those of "
        f"{MARIAN}; two scores nearer than rounding may change places. Each contender has a "
        "process of its own, and does each batch in its turn; ratios are medians over batches and "
        "rounds, with quartiles; memory is that of all searches, beyond what the imports took."
        + (f" Absent here: {', '.join(absent)}." if absent else ""),
        columns=("search", *COLUMNS[:-1], "equal", COLUMNS[-1]),
        rows=rows,
        figure=ratio_figure(tables, MARIAN),
        numbers={"searches": numbers},
    )


def equality(found: dict[str, list[list[int]]], must_be_same: bool) -> dict[str, str]:
    """How many tokens of each engine are those of Marian.

    Args:
        found: Translations by engine.
        must_be_same: Whether this package's are to be Marian's, nearly all.

    Returns:
        Shares.

    Raises:
        ValueError: If they must, and are not.
    """
    shares = {}
    for name, translations in found.items():
        pairs = list(zip(translations, found[MARIAN], strict=True))
        same = sum(sum(map(lambda a, b: a == b, *pair)) for pair in pairs)
        share = same / sum(len(theirs) for _, theirs in pairs)
        if name == OURS and must_be_same:
            refuse_others(share)
        shares[name] = f"{share:.0%}"
    return shares


def refuse_others(share: float) -> None:
    """Refuse to time a search that finds something else than Marian's.

    Args:
        share: Of what it found, how much is Marian's, from 0 to 1.

    Raises:
        ValueError: If that is less than nearly all.
    """
    if share < FEWEST_EQUAL:
        raise ValueError(f"translations must be those of {MARIAN}, got {share:.0%} equal.")
