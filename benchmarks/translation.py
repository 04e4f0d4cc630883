"""Measure greedy and beam search over batches, beside the peers with the same weights."""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..conversion import from_marian
from ..conversion.m2m100 import from_m2m100
from ..conversion.shared_weights import SharedConversion
from ..paper.study import Section
from .peers import M2M100, MARIAN, OURS, build_m2m100, build_marian
from .timing import (
    COLUMNS,
    Implementation,
    matrix_product,
    numbers_of,
    ratio_figure,
    rows_of,
    time_in_turn,
)
from .training import dtype_of
from .work import MODELS, Corpus, model_config, read_corpus, search_flops

OURS_INT8 = f"{OURS} int8"
# for each search of the library, the functions that build and convert its model
PEERS: dict[str, Any] = {MARIAN: (build_marian, from_marian), M2M100: (build_m2m100, from_m2m100)}
CTRANSLATE2 = "CTranslate2 "
# quantiles of the source lengths between which the sentences of a batch are drawn
LENGTHS = {"short": (0.1, 0.5), "long": (0.8, 1.0)}
# required share of equal tokens; below 1, because rounding may swap hypotheses with nearly equal
# scores
FEWEST_EQUAL = 0.9


class Piece(NamedTuple):
    """Batch of sentences as token ids, number of tokens in each translation, and beam size."""

    sentences: list[list[int]]
    steps: int
    num_beams: int


class Search:
    """Search of one engine, from token ids to token ids.

    Args:
        name: `OURS`, `OURS_INT8`, `MARIAN`, `M2M100` or one of `ctranslate2_names`.
        size: One of `work.SIZES` or `work.MODELS`.
        tokenizer: Tokenizer of the corpus.
        flags: Flags of the command line.
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
        # one seed and one builder give all implementations the same weights
        build, convert = PEERS[library_name(size)]
        model: PreTrainedModel = build(model_config(size, flags.model_vocab_size)).eval()
        self.conversion = None
        if name in (OURS, OURS_INT8) and size in MODELS:
            self.conversion = SharedConversion(model)
        elif name not in PEERS:
            model = convert(model, copy=False)
        if name.startswith(CTRANSLATE2):
            self.engine = load_ctranslate2(model, tokenizer, name, self.device)
            self.tokens = self.engine_tokens(model, tokenizer)
        else:
            self.model = model.to(self.device, self.dtype)
        # all hypotheses have the same length, so an alpha of 0 makes our search equal to the others
        is_of_library = name in PEERS or self.conversion is not None
        self.settings = {} if is_of_library else {"length_penalty_alpha": 0.0}
        if name == OURS_INT8:
            self.settings["int8"] = True

    @staticmethod
    def engine_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return CTranslate2's token for each id.

        Args:
            model: Model that was exported.
            tokenizer: Tokenizer of the corpus.

        Returns:
            Tokens by id.
        """
        from ..export.parts import vocabulary

        return vocabulary(model, tokenizer)

    def __call__(self, piece: Piece) -> list[list[int]]:
        """Translate a batch.

        Args:
            piece: Batch of sentences.

        Returns:
            Token ids of each translation.
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
            ids = {token: index for index, token in enumerate(self.tokens)}
            return [[ids[token] for token in found.hypotheses[0]] for found in results]
        padded = self.tokenizer.pad({"input_ids": sentences}, return_tensors="pt")
        model = self.model
        if self.conversion is not None:
            # check the conversion before each batch, as the pipeline does
            model, _ = self.conversion.for_engine(self.name == OURS_INT8)
        with torch.no_grad():
            ids = model.generate(
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


def library_name(size: str) -> str:
    """Return the name of the library's search for a model of this size.

    Args:
        size: One of `work.SIZES` or `work.MODELS`.
    """
    return M2M100 if "nllb" in size else MARIAN


def load_ctranslate2(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    device: torch.device,
) -> Any:
    """Export a model of this package to CTranslate2, and load the export.

    Args:
        model: Model to export.
        tokenizer: Tokenizer of the model.
        name: One of `ctranslate2_names`.
        device: Device of the engine.

    Returns:
        A `ctranslate2.Translator` with torch's number of threads.
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
    """Return the CTranslate2 implementations to compare with a model of a dtype.

    Args:
        device: Device of the model.
        dtype: Type of the model's weights; on a CPU, CTranslate2 runs in float32 and in int8.

    Returns:
        Names of the implementations that can run here, and of those that cannot.
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
        # CTranslate2 raises if it cannot use the GPU
        is_here = False
    return (names, []) if is_here else ([], names)


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Compare the searches of all implementations, for each model size.

    Args:
        flags: Flags of the command line.

    Yields:
        One section for each model size.
    """
    corpus = read_corpus(flags.config, flags.model_vocab_size)
    for size in flags.models or flags.sizes:
        yield _forced(size, corpus, flags)


def pieces_of(
    corpus: Corpus, text: str, batch_size: int, num_beams: int, count: int, seed: int
) -> list[Piece]:
    """Draw batches of sentences of similar length, because `translate` sorts sentences by length.

    Args:
        corpus: Corpus of the sentences.
        text: One of `LENGTHS`.
        batch_size: Number of sentences in a batch.
        num_beams: Beam size.
        count: Number of batches.
        seed: Seed of the draw.

    Returns:
        Batches; each translation has the average number of tokens of the references.
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
    library = library_name(size)
    own = [OURS, library]
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
    implementations = [
        Implementation(name, Search, (name, size, corpus.tokenizer, flags), pieces, amounts, flops)
        for name in names
    ]
    matrix = matrix_product(device, dtype, len(pieces))
    equal: dict[str, dict[str, str]] = {}

    def check(found: dict[str, list[Any]]):
        for number, title in enumerate(titles):
            translations = {name: found[name][number] for name in names}
            # require equality in float32 only: in half precision, rounding changes translations
            equal[title] = equality(translations, library, must_be_same=is_float32)

    starts = range(0, len(pieces), flags.batches)
    *results, product = time_in_turn(
        [*implementations, matrix], flags.rounds, device, check, starts
    )
    tables, numbers, rows = {}, {}, []
    for title, start in zip(titles, starts, strict=True):
        some = [result.part(slice(start, start + flags.batches)) for result in results]
        tables[title] = rows_of(some, library, product)
        numbers[title] = {**numbers_of(some, product), "equal": equal[title]}
        rows += [(title, *row[:-1], equal[title][row[0]], row[-1]) for row in tables[title]]
    return Section(
        name=f"translation-{size}",
        title=f"Translation, {size}",
        finding="All searches have the same random weights; translations are as long as "
        f"references; vocabulary {config.vocab_size:,}, {flags.config.precision}; sentences of a "
        f"batch are of similar length. Equal is the share of tokens that {library} gives too; two "
        "scores closer than rounding may change places. Each implementation has its own process, "
        "and the implementations do each batch in turn; ratios are medians over batches and "
        "rounds, with quartiles; memory is that of all searches, beyond that after the imports."
        + (f" Not installed: {', '.join(absent)}." if absent else ""),
        columns=("search", *COLUMNS[:-1], "equal", COLUMNS[-1]),
        rows=rows,
        figure=ratio_figure(tables, library),
        numbers={"searches": numbers},
    )


def equality(found: dict[str, list[list[int]]], library: str, must_be_same: bool) -> dict[str, str]:
    """Return the share of tokens that each engine has in common with the library.

    Args:
        found: Translations by engine.
        library: Name of the library's search among them.
        must_be_same: Whether to refuse translations of this package that differ from the library's.

    Returns:
        Shares in percent, by engine.

    Raises:
        ValueError: If `must_be_same`, and fewer than `FEWEST_EQUAL` of the tokens are equal.
    """
    shares = {}
    for name, translations in found.items():
        pairs = list(zip(translations, found[library], strict=True))
        same = sum(sum(map(lambda a, b: a == b, *pair)) for pair in pairs)
        share = same / sum(len(theirs) for _, theirs in pairs)
        if name == OURS and must_be_same:
            refuse_other_translations(share)
        shares[name] = f"{share:.0%}"
    return shares


def refuse_other_translations(share: float) -> None:
    """Refuse to time a search whose translations differ too much from the library's.

    Args:
        share: Share of equal tokens or translations, from 0 to 1.

    Raises:
        ValueError: If the share is below `FEWEST_EQUAL`.
    """
    if share < FEWEST_EQUAL:
        raise ValueError(f"translations must be those of {MARIAN}, got {share:.0%} equal.")
