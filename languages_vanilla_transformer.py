"""Languages of a model and of its tokenizer."""

import re
from pathlib import Path

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
