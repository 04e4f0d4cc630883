"""Constraints on single translations: their beginning, and terms.

This file turns the settings `target_prefix`, `required_terms` and `forbidden_terms` of the pipeline
into settings of `generate`.
"""

import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import LogitsProcessorList

from .scores_vanilla_transformer import decoder_rows
from .terms_vanilla_transformer import ByteVocabulary, ForbiddenTerms

# settings whose value is for all texts, or a list with one value for each text
TARGET_SETTINGS = ("target_prefix", "required_terms", "forbidden_terms")


class Constraints(NamedTuple):
    """Requirements of one translation.

    `prompt_ids` contains the token ids of the decoder's prompt, `required_terms` the token ids of
    each required term, and `forbidden_terms` the spellings of each forbidden term.
    """

    prompt_ids: Sequence[int]
    required_terms: dict[str, list[int]]
    forbidden_terms: dict[str, set[str]]


def is_for_each_text(name: str, value: Any) -> bool:
    """Return whether a setting of `TARGET_SETTINGS` is a list with one value for each text.

    Args:
        name: Name of the setting.
        value: Its value.
    """
    if not isinstance(value, list | tuple):
        return False
    return name == "target_prefix" or any(isinstance(item, list | tuple) for item in value)


def values_for_texts(name: str, value: Any, num_texts: int) -> list[Any] | None:
    """Return a setting of `TARGET_SETTINGS` for each text, or None if it is not given.

    Args:
        name: Name of the setting.
        value: Its value.
        num_texts: Number of texts.

    Raises:
        ValueError: If the value is invalid, or is a list whose length is not the number of texts.
    """
    if value is None:
        return None
    values = value if is_for_each_text(name, value) else [value] * num_texts
    if len(values) != num_texts:
        raise ValueError(
            f"{name} must be one value for all texts, or a list with one for each of the "
            f"{num_texts} texts, got {len(values)}."
        )
    for text_value in values:
        text_items = [text_value] if name == "target_prefix" else text_value
        is_list = name == "target_prefix" or isinstance(text_value, list | tuple)
        if not is_list or not all(isinstance(item, str) for item in text_items):
            expected = "a text" if name == "target_prefix" else "a list of texts"
            raise ValueError(f"{name} must be {expected}, got {text_value!r}.")
        if name != "target_prefix" and not all(item.strip() for item in text_items):
            raise ValueError(f"{name} must have no empty term, got {text_value!r}.")
    return list(values)


def read_constraints(
    target_settings: Mapping[str, Any],
    num_texts: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokenize: Callable[[list[str]], list[list[int]]],
    make_vocabulary: Callable[[], ByteVocabulary],
) -> list[Constraints]:
    """Turn the settings of all texts into the requirements of each translation.

    Args:
        target_settings: Values of `TARGET_SETTINGS`.
        num_texts: Number of texts.
        model: Model, whose first decoder token begins a prompt.
        tokenizer: Tokenizer of the model.
        tokenize: Function that returns the token ids of translations.
        make_vocabulary: Function that returns the bytes of the model's tokens.

    Returns:
        Requirements of the translation of each text.

    Raises:
        ValueError: If a setting is invalid, or a required term has characters that the vocabulary
            lacks, or contains a forbidden term.
    """

    def tokenize_nfc(texts: list[str]) -> list[list[int]]:
        # a tokenizer without a normalizer would turn a text in NFD into other or unknown tokens
        return tokenize([unicodedata.normalize("NFC", text) for text in texts])

    no_values: list[Any] = [()] * num_texts
    prefixes, required_terms, forbidden_terms = (
        values_for_texts(name, target_settings[name], num_texts) or no_values
        for name in TARGET_SETTINGS
    )
    prompts = no_values
    if prefixes is not no_values:
        prompts = _prefix_prompts(prefixes, model, tokenizer, tokenize_nfc)
    ids_of_terms = _ids_of_terms({*chain.from_iterable(required_terms)}, tokenizer, tokenize_nfc)
    spellings: dict[str, set[str]] = {}
    if any(forbidden_terms):
        spellings = _spellings_of_terms(
            {*chain.from_iterable(forbidden_terms)}, tokenizer, tokenize_nfc, make_vocabulary()
        )

    @cache
    def spelled(terms: Sequence[str]) -> dict[str, set[str]]:
        # the result is cached, because all texts may have the same long list of terms
        return {term: spellings[term] for term in terms}

    constraints = [
        Constraints(
            prompt,
            {term: ids_of_terms[term] for term in required},
            spelled(tuple(forbidden)),
        )
        for prompt, required, forbidden in zip(
            prompts, required_terms, forbidden_terms, strict=True
        )
    ]
    for constraint in constraints:
        if constraint.required_terms and constraint.forbidden_terms:
            _refuse_contradiction(constraint, make_vocabulary())
    return constraints


def _prefix_prompts(
    prefixes: list[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokenize: Callable[[list[str]], list[list[int]]],
) -> list[list[int]]:
    """Return the decoder's prompt for each prefix; no tokens for an empty prefix."""
    special_ids = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    start_ids = decoder_rows(model, [[]])[0].tolist()
    prompts = []
    for prefix, ids in zip(prefixes, tokenize(prefixes), strict=True):
        while ids and ids[-1] in special_ids:
            ids.pop()
        prompts.append(start_ids + ids if prefix.strip() else [])
    return prompts


def _ids_of_terms(
    terms: Collection[str],
    tokenizer: PreTrainedTokenizerBase,
    tokenize: Callable[[list[str]], list[list[int]]],
) -> dict[str, list[int]]:
    special_ids = set(tokenizer.all_special_ids)
    ids_of_terms = {}
    for term, ids in zip(terms, tokenize(list(terms)), strict=True):
        if tokenizer.unk_token_id in ids:
            raise ValueError(
                f"required_terms must consist of characters of the vocabulary, got {term!r}."
            )
        ids_of_terms[term] = [token for token in ids if token not in special_ids]
    return ids_of_terms


def _spellings_of_terms(
    terms: Collection[str],
    tokenizer: PreTrainedTokenizerBase,
    tokenize: Callable[[list[str]], list[list[int]]],
    vocabulary: ByteVocabulary,
) -> dict[str, set[str]]:
    """Return the texts that stand for each term: its Unicode forms, and the text of its tokens.

    The text of the tokens differs from the term if the tokenizer normalizes more than the Unicode
    form, such as the case.
    """
    spellings_of_terms = {}
    for term, ids in zip(terms, tokenize(list(terms)), strict=True):
        word = term.strip()
        spellings = {word, *(unicodedata.normalize(form, word) for form in ("NFC", "NFD"))}
        if tokenizer.unk_token_id not in ids:
            spellings.add(vocabulary.join(ids).decode(errors="replace").strip())
        # a tokenizer may remove all characters of a term
        spellings.discard("")
        spellings_of_terms[term] = {term.replace(word, spelling, 1) for spelling in spellings}
    return spellings_of_terms


def _refuse_contradiction(constraint: Constraints, vocabulary: ByteVocabulary):
    for required_term, ids in constraint.required_terms.items():
        text = vocabulary.join(ids)
        for forbidden_term, spellings in constraint.forbidden_terms.items():
            if any(spelling.encode() in text for spelling in spellings):
                raise ValueError(
                    f"required_terms must not contain a forbidden term, got {required_term!r}, "
                    f"which contains {forbidden_term!r}."
                )


def settings_with_constraints(
    search_settings: Mapping[str, Any],
    constraints: Sequence[Constraints],
    make_vocabulary: Callable[[], ByteVocabulary],
) -> dict[str, Any]:
    """Add the requirements of a batch to the settings of its search.

    Args:
        search_settings: Settings of `generate`.
        constraints: Requirements of each translation of the batch, with prompts of one length.
        make_vocabulary: Function that returns the bytes of the model's tokens.

    Returns:
        Settings of `generate`.

    Raises:
        ValueError: If the settings have a prompt, and a translation has a prefix.
    """
    settings = dict(search_settings)
    if constraints[0].prompt_ids:
        if settings.get("decoder_input_ids") is not None:
            raise ValueError("decoder_input_ids must not be given with target_prefix.")
        settings["decoder_input_ids"] = torch.tensor(
            [constraint.prompt_ids for constraint in constraints]
        )
    if constraints[0].required_terms:
        settings["required_tokens"] = [
            list(constraint.required_terms.values()) for constraint in constraints
        ]
    if constraints[0].forbidden_terms:
        forbid_terms = ForbiddenTerms(
            [
                list(chain.from_iterable(constraint.forbidden_terms.values()))
                for constraint in constraints
            ],
            make_vocabulary(),
        )
        settings["logits_processor"] = LogitsProcessorList(
            [*(settings.get("logits_processor") or ()), forbid_terms]
        )
    return settings
