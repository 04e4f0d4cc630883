"""Tokenizer of a run: learned, given, or already in the run folder. Section 5.1."""

import logging
from itertools import islice
from pathlib import Path

from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME

from ..atomic_files import atomic_folder, finish_all, write_atomically
from ..loading import TOKENIZER_WITHOUT_CODE, check_local, read_tokenizer
from ..records import read_text
from ..tokenization.learning import learn_vocabulary, tokenizer_hash
from ..tokenization.sentence_pieces import SPACE, read_sentence_pieces
from .config import TrainConfig
from .data.prepare import Texts, load_texts, vocabulary_texts
from .recipe import RECIPE_FILE, load_config, recipe_text, save_config
from .resuming import refuse_other_vocabulary
from .run_folder.environment import ENVIRONMENT_FILE
from .run_folder.files import METRICS_FILE, refuse_other_files

logger = logging.getLogger(__name__)

# sentences to test a given tokenizer on, and the largest share of unknown tokens in them
SAMPLED_SENTENCES, MOST_UNKNOWN = 1000, 0.5
# text that hardly any vocabulary has: the cuneiform sign A
RARE_TEXT = "\U00012000"
# suffixes of the files of SentencePiece models
PIECE_SUFFIXES = (".model", ".spm")
# file beside a learned vocabulary, with the SHA-256 of each corpus that it was learned from
TEXT_FILE = "text_sha256.txt"


def prepare_tokenizer(
    config: TrainConfig, texts: Texts | None = None, old_config: TrainConfig | None = None
) -> PreTrainedTokenizerBase:
    """Load or learn the tokenizer of a run, and save it in the run folder.

    Args:
        config: Settings of the run.
        texts: Corpora to learn from; loaded if not given.
        old_config: Settings so far of a run that is resumed, which `refuse_other_run` compares.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If the tokenizer cannot be loaded, has too many unknown tokens in the text, was
            learned with other settings or from other text, or differs from the tokenizer in the run
            folder; or if a file that does not belong to a run would be replaced.
    """
    folder = config.folder
    tokenizer_folder = folder / "tokenizer"
    if old_config is None and not tokenizer_folder.is_dir():
        refuse_files_of_no_run(folder, config)
    saved_config = old_config if tokenizer_folder.is_dir() else None
    if old_config is None and tokenizer_folder.is_dir():
        # the user may have edited the recipe in the run folder
        recipes = [path / RECIPE_FILE for path in (tokenizer_folder, folder)]
        saved_configs = (load_config(str(recipe)) for recipe in recipes if recipe.is_file())
        saved_config = next(saved_configs, None)
    # if the run folder has a copy of the given tokenizer, the original may be gone
    if config.tokenizer is not None and (
        saved_config is None or saved_config.tokenizer != config.tokenizer
    ):
        tokenizer = load_tokenizer(config.tokenizer)
        texts = texts or load_texts(config)
        refuse_unknown_text(tokenizer, config, texts)
        if tokenizer_folder.is_dir():
            saved_tokenizer = load_tokenizer(str(tokenizer_folder))
            if tokenizer_hash(saved_tokenizer) != tokenizer_hash(tokenizer):
                raise ValueError(
                    f"output_dir must be new, or have the vocabulary of tokenizer "
                    f"{config.tokenizer!r}, got another one in {tokenizer_folder}."
                )
    elif tokenizer_folder.is_dir():
        if saved_config is not None and config.tokenizer is None and old_config is None:
            refuse_other_vocabulary(config, saved_config)
            _refuse_vocabulary_of_other_text(config, texts or load_texts(config), tokenizer_folder)
        tokenizer = load_tokenizer(str(tokenizer_folder))
    else:
        texts = texts or load_texts(config)
        tokenizer = learn_tokenizer(config, texts)
    if not tokenizer_folder.is_dir():
        with atomic_folder(tokenizer_folder) as unfinished:
            save_tokenizer(tokenizer, unfinished)
            if texts is not None and config.tokenizer is None and not config.streaming:
                write_atomically(unfinished / TEXT_FILE, ", ".join(texts.hashes) + "\n")
            # save the recipe with the tokenizer, so that the origin of the tokenizer is known
            for path in (unfinished, folder):
                save_config(config, path / RECIPE_FILE)
    return tokenizer


def refuse_unknown_text(
    tokenizer: PreTrainedTokenizerBase, config: TrainConfig, texts: Texts
) -> None:
    """Refuse a tokenizer with too many unknown tokens in the text of a language.

    A tokenizer that loses text, because a part of it is missing, gets a warning.

    Args:
        tokenizer: Tokenizer that was given for the run.
        config: Settings of the run.
        texts: Text of the run.

    Raises:
        ValueError: If more than `MOST_UNKNOWN` of the tokens are unknown, or the tokenizer fails
            for unknown text.
    """
    _check_model(tokenizer, config.tokenizer)
    # a file of the library tokenizers names this token in its model only
    unknown_token = tokenizer.unk_token or getattr(
        tokenizer.backend_tokenizer.model, "unk_token", None
    )
    unknown_id = tokenizer.get_vocab().get(unknown_token)
    for language in (config.source_lang, config.target_lang):
        sample = list(islice(vocabulary_texts(texts, [language], config.seed), SAMPLED_SENTENCES))
        # tokens without the end token of each sentence
        tokens = [token for ids in tokenizer(sample).input_ids for token in ids[:-1]]
        num_unknown = tokens.count(unknown_id)
        # a tokenizer without a token for unknown text leaves such text out
        if num_unknown > MOST_UNKNOWN * len(tokens) or not tokens:
            found = (
                f"{num_unknown:,} of the {len(tokens):,} tokens of {len(sample):,} sentences are "
                f"{unknown_token!r}"
                if tokens
                else f"it gives no tokens for {len(sample):,} sentences"
            )
            raise ValueError(
                f"tokenizer {config.tokenizer!r} must cover the text in {language!r}, but {found}."
            )


def _check_model(tokenizer: PreTrainedTokenizerBase, source: str | None):
    """Refuse a tokenizer that fails for unknown text, and warn about one that loses text."""
    backend = tokenizer.backend_tokenizer
    try:
        tokens = backend.encode(RARE_TEXT, add_special_tokens=False).tokens
    # the tokenizers library raises a bare Exception
    except Exception as error:
        raise ValueError(
            f"tokenizer {source!r} must have a token for unknown text, got: {error}."
        ) from error
    if not "".join(tokens).strip(SPACE):
        logger.warning(
            "Tokenizer %s has no token for unknown text, so it leaves out each character that is "
            "not in its vocabulary.",
            source,
        )
    if backend.decoder is None and isinstance(backend.model, BPE | Unigram | WordPiece):
        logger.warning(
            "Tokenizer %s has no decoder, so its translations have a space between all tokens, "
            "also inside of words. Set the decoder of the tokenizer, and save it again.",
            source,
        )


def _refuse_vocabulary_of_other_text(config: TrainConfig, texts: Texts, tokenizer_folder: Path):
    # the hash of a streamed text is unknown before the text is read
    if config.streaming:
        return
    old_hashes = read_text(tokenizer_folder / TEXT_FILE).strip()
    new_hashes = ", ".join(texts.hashes)
    if new_hashes != old_hashes:
        raise ValueError(
            f"output_dir must be new, or have a vocabulary that was learned from the same text: "
            f"the SHA-256 of this text was {old_hashes}, got {new_hashes}. Remove "
            f"{tokenizer_folder} to learn a new vocabulary."
        )


def learn_tokenizer(
    config: TrainConfig, texts: Texts, progress: bool = True
) -> PreTrainedTokenizerBase:
    """Learn the vocabulary of a run. Section 5.1.

    Args:
        config: Settings of the run.
        texts: Text of the run.
        progress: Whether to show a progress bar.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If `vocab_size` is too small, or there is no text.
    """
    languages = [config.source_lang, config.target_lang]
    symbols = set()
    if config.symbol_lang is not None:
        languages.remove(config.symbol_lang)
        for text in vocabulary_texts(texts, [config.symbol_lang], config.seed):
            symbols.update(text.split())
    return learn_vocabulary(
        vocabulary_texts(texts, languages, config.seed),
        config.vocab_size,
        symbols=sorted(symbols),
        seed=config.seed,
        progress=progress,
    )


def refuse_files_of_no_run(folder: Path, config: TrainConfig):
    """Refuse to begin a run in a folder with files that are not those of an unfinished run.

    Args:
        folder: Run folder.
        config: Settings of the run.

    Raises:
        ValueError: If there is such a file; names the file.
    """
    rule = "output_dir must be new, or that of an unfinished run"
    refuse_other_files(folder, rule)
    recipe = folder / RECIPE_FILE
    if not ((folder / "tokenizer").is_dir() and recipe.is_file()):
        # a run that was killed at its beginning may have left its recipe without a tokenizer
        is_recipe_of_run = recipe.is_file() and recipe.read_bytes() == recipe_text(config).encode()
        refuse_other_files(
            folder,
            rule,
            [METRICS_FILE, ENVIRONMENT_FILE, *([] if is_recipe_of_run else [RECIPE_FILE])],
        )


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run.

    Args:
        source: Folder, Hub name, or file of a SentencePiece model (.model or .spm).

    Returns:
        Tokenizer that pads on the right, and adds its end token, and no other special token, to
        each sentence.

    Raises:
        ValueError: If the tokenizer cannot be loaded, needs its own code, is not fast, or has an id
            that is not below its number of tokens.
    """
    if source.endswith(PIECE_SUFFIXES):
        if not Path(source).is_file():
            raise ValueError(f"tokenizer must be a file that exists, got {source!r}.")
        tokenizer = read_sentence_pieces(source)
    else:
        rule = "tokenizer must be a folder, a Hub name or a SentencePiece file (.model or .spm)"
        path = Path(source)
        # a file of the library tokenizers, which can have any name
        if path.suffix == ".json" and path.name != "tokenizer.json" and path.is_file():
            raise ValueError(
                f"{rule}, got the file {source!r}: name it tokenizer.json, and give its folder."
            )
        # the folder of such a file, as of the merges of subword-nmt, cannot be read either
        if path.suffix != ".json" and path.is_file():
            raise ValueError(f"{rule}, got the file {source!r} of another format.")
        check_local(source, rule)
        pieces = sorted(file.name for file in path.glob("*") if file.suffix in PIECE_SUFFIXES)
        tokenizer_files = ("tokenizer.json", TOKENIZER_CONFIG_FILE, CONFIG_NAME)
        if pieces and not any((path / name).is_file() for name in tokenizer_files):
            raise ValueError(
                f"{rule}, got the folder {source!r} with {' and '.join(pieces)}: give a file."
            )
        tokenizer = read_tokenizer(source, remedy=TOKENIZER_WITHOUT_CODE)
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer {source!r} must be a fast one, got {type(tokenizer).__name__}."
        )
    tokenizer = _complete_special_tokens(tokenizer, source)
    # generate refuses padding on the left, because the first token has the first position
    tokenizer.padding_side = "right"
    highest = max(tokenizer.get_vocab().values())
    if highest >= len(tokenizer):
        raise ValueError(
            f"tokenizer {source!r} must have the ids 0 to {len(tokenizer) - 1:,} for its "
            f"{len(tokenizer):,} tokens, got the id {highest:,}."
        )
    return tokenizer


def _complete_special_tokens(
    tokenizer: PreTrainedTokenizerBase, source: str
) -> PreTrainedTokenizerBase:
    """Add the padding token and the end token if they are missing, and end each sentence."""
    added_tokens = {}
    if tokenizer.pad_token is None:
        added_tokens["pad_token"] = "<pad>"
    if tokenizer.eos_token is None:
        added_tokens["eos_token"] = tokenizer.sep_token or "</s>"
    if not added_tokens and tokenizer("").input_ids == [tokenizer.eos_token_id]:
        return tokenizer
    # the generic class is used, because a class of the library may replace the post-processor, and
    # so add other special tokens, when the tokenizer is loaded again
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
        **{**tokenizer.special_tokens_map, **added_tokens},
    )
    fast_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=["$A", fast_tokenizer.eos_token],
        special_tokens=[(fast_tokenizer.eos_token, fast_tokenizer.eos_token_id)],
    )
    addition_text = "".join(f" with the {name} {token!r}" for name, token in added_tokens.items())
    logger.info(
        "Tokenizer %s is used%s; %r ends each sentence.",
        source,
        addition_text,
        fast_tokenizer.eos_token,
    )
    return fast_tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer.

    Args:
        tokenizer: Fast tokenizer.
        folder: Folder to write to.

    Raises:
        OSError: If a file cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
        finish_all(folder)
    # the tokenizers library raises a bare Exception on a full disk
    except Exception as error:
        raise OSError(f"{folder} cannot be written: {' '.join(str(error).split())}") from error
