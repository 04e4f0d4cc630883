"""Languages of a model and of its tokenizer, and the vocabularies of source and target."""

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def model_languages(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> list[str | None]:
    """Return source and target language of a model of one direction.

    Args:
        model: Any model.
        tokenizer: Tokenizer of the model.

    Returns:
        The languages that the tokenizer names, as Marian's does, or the recipe in the folder that
        the model was loaded from, if its languages have codes of two letters; None if unknown.
    """
    names = ("source_lang", "target_lang")
    languages = [getattr(tokenizer, name, None) for name in names]
    folder = model.name_or_path
    recipe = Path(folder, "recipe.yaml")
    if languages == [None, None] and folder and recipe.is_file():
        text = recipe.read_text(encoding="utf-8", errors="replace")
        matches = [re.search(rf"^{name}: '?(\w\w)'?$", text, re.M) for name in names]
        languages = [match and match[1] for match in matches]
    return languages


def language_codes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the languages of a multilingual tokenizer.

    Args:
        tokenizer: Any tokenizer.

    Returns:
        Sorted codes; empty for a tokenizer that does not need languages.
    """
    if not hasattr(tokenizer, "_build_translation_inputs"):
        return []
    # M2M100 and SeamlessM4T write the code "en" as the token "__en__"
    special_tokens = getattr(tokenizer, "lang_code_to_id", tokenizer.all_special_tokens)
    special_values = tokenizer.special_tokens_map.values()
    basic_tokens = {token for token in special_values if isinstance(token, str)}
    return sorted({token.strip("_") for token in special_tokens if token not in basic_tokens})


def source_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that tokenizes and decodes source texts.

    The tokenizer of FSMT, and that of Marian with `separate_vocabs`, have two vocabularies: they
    tokenize with that of the source, and decode with that of the target.

    Args:
        tokenizer: Any tokenizer.

    Returns:
        The given tokenizer if it has one vocabulary, otherwise a copy.
    """
    if not hasattr(tokenizer, "get_tgt_vocab"):
        return tokenizer
    changes: dict[str, Any] = {"decoder": {id_: token for token, id_ in tokenizer.encoder.items()}}
    if hasattr(tokenizer, "separate_vocabs"):
        # Marian's tokenizer then decodes with the SentencePiece model of the source
        changes["separate_vocabs"] = False
    else:
        changes["tgt_lang"] = tokenizer.src_lang
    return _changed_copy(tokenizer, changes)


def target_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that tokenizes and decodes translations.

    Args:
        tokenizer: Any tokenizer.

    Returns:
        The given tokenizer if it has one vocabulary, otherwise a copy; see `source_tokenizer`.
    """
    if not hasattr(tokenizer, "get_tgt_vocab"):
        return tokenizer
    changes: dict[str, Any] = {"encoder": {token: id_ for id_, token in tokenizer.decoder.items()}}
    if hasattr(tokenizer, "separate_vocabs"):
        changes["current_encoder"] = changes["encoder"]
        changes["spm_source"] = changes["current_spm"] = tokenizer.spm_target
    else:
        changes["src_lang"] = tokenizer.tgt_lang
    return _changed_copy(tokenizer, changes)


def _changed_copy(
    tokenizer: PreTrainedTokenizerBase, changes: dict[str, Any]
) -> PreTrainedTokenizerBase:
    # `copy.copy` would read SentencePiece files again, so it is not used
    copied = object.__new__(type(tokenizer))
    vars(copied).update(vars(tokenizer), **changes)
    return copied
