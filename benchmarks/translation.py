"""Measure greedy and beam search over batches, beside the peers with the same weights."""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks_vanilla_transformer import engine_precision
from ..conversion import from_marian
from ..conversion.m2m100 import from_m2m100
from ..conversion.shared_weights import SharedConversion
from ..kernels_vanilla_transformer import has_bf16_instructions
from ..paper.study import Section
from .peers import M2M100, MARIAN, OURS, build_m2m100, build_marian
from .timing import (
    COLUMNS,
    Implementation,
    build_matrix_product,
    numbers_of,
    ratio_figure,
    rows_of,
    time_in_turn,
)
from .training import dtype_of
from .work import MODELS, Corpus, model_config, read_corpus, search_flops

OURS_BF16, OURS_INT8 = f"{OURS} bf16", f"{OURS} int8"
# settings of our searches in each precision
OUR_SEARCHES: dict[str, dict[str, Any]] = {
    OURS: {},
    OURS_BF16: {"precision": "bf16"},
    OURS_INT8: {"int8": True},
}
# for each search of the library, the functions that build and convert its model
LIBRARY_MODELS: dict[str, Any] = {
    MARIAN: (build_marian, from_marian),
    M2M100: (build_m2m100, from_m2m100),
}
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
        name: One of `OUR_SEARCHES`, `MARIAN`, `M2M100` or one of `ctranslate2_names`.
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
        build, convert = LIBRARY_MODELS[library_name(size)]
        model: PreTrainedModel = build(model_config(size, flags.model_vocab_size)).eval()
        self.conversion = None
        if name in OUR_SEARCHES and size in MODELS:
            self.conversion = SharedConversion(model)
        elif name not in LIBRARY_MODELS:
            model = convert(model, copy=False)
        if name.startswith(CTRANSLATE2):
            self.engine = load_ctranslate2(model, tokenizer, name, self.device)
            self.tokens = self.engine_tokens(model, tokenizer)
            # built here, because it takes milliseconds, and calls are timed
            self.ids_of_tokens = {token: index for index, token in enumerate(self.tokens)}
        else:
            self.model = model.to(self.device, self.dtype)
        # all hypotheses have the same length, so an alpha of 0 makes our search equal to the others
        is_of_library = name in LIBRARY_MODELS or self.conversion is not None
        self.settings = {} if is_of_library else {"length_penalty_alpha": 0.0}
        self.settings |= OUR_SEARCHES.get(name, {})

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
                [[self.tokens[token_id] for token_id in token_ids] for token_ids in sentences],
                beam_size=num_beams,
                min_decoding_length=steps,
                max_decoding_length=steps,
                length_penalty=0,
            )
            return [
                [self.ids_of_tokens[token] for token in result.hypotheses[0]] for result in results
            ]
        padded = self.tokenizer.pad({"input_ids": sentences}, return_tensors="pt")
        model = self.model
        if self.conversion is not None:
            # check the conversion before each batch, as the pipeline does
            model, _ = self.conversion.for_engine(engine_precision(self.settings))
        with torch.no_grad():
            token_ids = model.generate(
                **padded.to(self.device),
                num_beams=num_beams,
                do_sample=False,
                min_new_tokens=steps,
                max_new_tokens=steps,
                max_length=None,
                use_cache=True,
                **self.settings,
            )
        return token_ids[:, 1:].tolist()


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
    compute_types = ["float32", "int8"]
    if device.type != "cpu" and dtype != torch.float32:
        half_dtype = str(dtype).removeprefix("torch.")
        compute_types = [half_dtype, f"int8_{half_dtype}"]
    names = [CTRANSLATE2 + compute_type for compute_type in compute_types]
    try:
        import ctranslate2

        import vanilla_transformer.export.ctranslate2  # noqa: F401
    except ImportError:
        return [], names
    try:
        is_supported = set(compute_types) <= ctranslate2.get_supported_compute_types(device.type)
    except (RuntimeError, ValueError):
        # CTranslate2 raises if it cannot use the GPU
        is_supported = False
    return (names, []) if is_supported else ([], names)


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Compare the searches of all implementations, for each model size.

    Args:
        flags: Flags of the command line.

    Yields:
        One section for each model size.
    """
    corpus = read_corpus(flags.config, flags.model_vocab_size)
    for size in flags.models or flags.sizes:
        yield _size_section(size, corpus, flags)


def our_searches(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the searches of `OUR_SEARCHES` that run on a device with weights of a dtype."""
    if device.type != "cpu" or dtype != torch.float32:
        return [OURS]
    return [OURS, *([OURS_BF16] if has_bf16_instructions() else []), OURS_INT8]


def draw_pieces(
    corpus: Corpus, length_class: str, batch_size: int, num_beams: int, count: int, seed: int
) -> list[Piece]:
    """Draw batches of sentences of similar length, because `translate` sorts sentences by length.

    Args:
        corpus: Corpus of the sentences.
        length_class: One of `LENGTHS`.
        batch_size: Number of sentences in a batch.
        num_beams: Beam size.
        count: Number of batches.
        seed: Seed of the draw.

    Returns:
        Batches; each translation has the average number of tokens of the references.
    """
    first_rank, last_rank = (int(share * len(corpus.rows)) for share in LENGTHS[length_class])
    order = np.argsort(corpus.source_lengths, kind="stable")[first_rank:last_rank]
    random = np.random.default_rng(seed)
    pieces = []
    for _ in range(count):
        start = random.integers(max(1, len(order) - batch_size + 1))
        pair_indices = order[start : start + batch_size]
        sentences = [
            list(map(int, token_ids)) for token_ids in corpus.rows[pair_indices]["input_ids"]
        ]
        steps = round(float(corpus.target_lengths[pair_indices].mean()))
        pieces.append(Piece(sentences, steps, num_beams))
    return pieces


def _size_section(size: str, corpus: Corpus, flags: argparse.Namespace) -> Section:
    device, dtype = torch.device(flags.device), dtype_of(flags.config)
    ctranslate2_searches, absent_searches = ctranslate2_names(device, dtype)
    is_float32 = dtype == torch.float32
    library = library_name(size)
    ours, *ours_in_lower_precision = our_searches(device, dtype)
    torch_searches = [ours, library, *ours_in_lower_precision]
    names = [*torch_searches, *ctranslate2_searches]
    settings = [
        (num_beams, length_class, batch_size)
        for num_beams in flags.beams
        for length_class in LENGTHS
        for batch_size in flags.batch_sizes
    ]
    titles = [
        f"{'greedy' if num_beams == 1 else f'beam {num_beams}'}, {batch_size} {length_class}"
        for num_beams, length_class, batch_size in settings
    ]
    pieces = [
        piece
        for num_beams, length_class, batch_size in settings
        for piece in draw_pieces(
            corpus, length_class, batch_size, num_beams, flags.batches, flags.config.seed
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
    matrix_implementation = build_matrix_product(device, dtype, len(pieces))
    equal_shares: dict[str, dict[str, str]] = {}

    def check(outputs: dict[str, list[Any]]):
        for warm_up_index, title in enumerate(titles):
            translations = {name: outputs[name][warm_up_index] for name in names}
            # require equality in float32 only: in half precision, rounding changes translations
            equal_shares[title] = equality(translations, library, must_be_same=is_float32)

    starts = range(0, len(pieces), flags.batches)
    *results, matrix_result = time_in_turn(
        [*implementations, matrix_implementation], flags.rounds, device, check, starts
    )
    tables, numbers, rows = {}, {}, []
    for title, start in zip(titles, starts, strict=True):
        piece_results = [
            result.select_pieces(slice(start, start + flags.batches)) for result in results
        ]
        tables[title] = rows_of(piece_results, library, matrix_result)
        numbers[title] = {**numbers_of(piece_results, matrix_result), "equal": equal_shares[title]}
        rows += [
            (title, name, *measurements, equal_shares[title][name], peak)
            for name, *measurements, peak in tables[title]
        ]
    return Section(
        name=f"translation-{size}",
        title=f"Translation, {size}",
        finding="All searches have the same random weights; translations are as long as "
        f"references; vocabulary {config.vocab_size:,}, {flags.config.precision}; sentences of a "
        f"batch are of similar length. Equal is the share of tokens that {library} gives too; two "
        "scores closer than rounding may change places. Each implementation has its own process, "
        "and the implementations do each batch in turn; ratios are medians over batches and "
        "rounds, with quartiles; memory is that of all searches, beyond that after the imports."
        + (f" Not installed: {', '.join(absent_searches)}." if absent_searches else ""),
        columns=("search", *COLUMNS[:-1], "equal", COLUMNS[-1]),
        rows=rows,
        figure=ratio_figure(tables, library),
        numbers={"searches": numbers},
    )


def equality(
    translations_by_engine: dict[str, list[list[int]]], library: str, must_be_same: bool
) -> dict[str, str]:
    """Return the share of tokens that each engine has in common with the library.

    Args:
        translations_by_engine: Translations, by name of the engine.
        library: Name of the library's search among them.
        must_be_same: Whether to refuse translations of this package that differ from the library's.

    Returns:
        Shares in percent, by engine.

    Raises:
        ValueError: If `must_be_same`, and fewer than `FEWEST_EQUAL` of the tokens are equal.
    """
    shares = {}
    for name, translations in translations_by_engine.items():
        pairs = list(zip(translations, translations_by_engine[library], strict=True))
        num_equal = sum(sum(map(lambda a, b: a == b, *pair)) for pair in pairs)
        share = num_equal / sum(len(library_ids) for _, library_ids in pairs)
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
