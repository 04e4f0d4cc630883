"""Load the models of the server, and find the languages between which they translate."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from babel import Locale
from babel.core import get_global
from transformers import StoppingCriteriaList
from transformers.utils import cached_file

from ..languages_vanilla_transformer import language_codes
from ..loading import load
from ..pipeline_vanilla_transformer import DEFAULT_SEARCH, TranslationPipeline
from ..train.recipe import RECIPE_FILE, read_recipe_file

# code of a language, with its script or region, as in zh-Hant and pt-BR
LANGUAGE = r"\w+(?:-[A-Z][a-z]{3})?(?:-[A-Z]{2})?"
# argument of the command that names the languages of a model, as in en-de=runs/demo
MODEL_WITH_LANGUAGES = re.compile(rf"(?P<source>{LANGUAGE})-(?P<target>{LANGUAGE})=(?P<name>.+)")
# names of the attributes that contain the languages of a tokenizer: Marian's, then FSMT's
LANGUAGE_ATTRIBUTES = (("source_lang", "target_lang"), ("src_lang", "tgt_lang"))
# maximum number of source tokens in a sentence: memory and time grow with the square of this number
MAX_SENTENCE_TOKENS = 1024
# language whose rules split text into sentences, for languages without a two-letter code
DEFAULT_RULES_LANGUAGE = "en"
# number of letters in the code of a script, such as Latn
SCRIPT_LETTERS = 4


class Translation(NamedTuple):
    """Translation of a sentence.

    Attributes:
        text: The translation, without white space around it.
        word_pairs: Pairs of source word and word of the translation, as `return_alignment` of the
            pipeline gives them; empty if the words are not aligned.
    """

    text: str
    word_pairs: Sequence[tuple[int, int]] = ()


class Model(NamedTuple):
    """Model, and the languages of its tokenizer.

    Attributes:
        name: Run folder, model folder or Hub name.
        pipeline: Pipeline with model and tokenizer.
        tokenizer_codes: Language code in the tokenizer for each language code of the API; empty if
            the tokenizer is not multilingual.
    """

    name: str
    pipeline: TranslationPipeline
    tokenizer_codes: Mapping[str, str]

    @property
    def max_translations(self) -> int:
        """Largest number of translations of a sentence: the beam size."""
        return self.pipeline.model.generation_config.num_beams or DEFAULT_SEARCH["num_beams"]

    def split(self, text: str, source: str) -> list[str]:
        """Split a text into sentences. A sentence ends at the latest with its line.

        Args:
            text: Any text.
            source: Language of the text.

        Returns:
            Sentences with the white space around them; their concatenation is the text.
        """
        language = source.partition("-")[0]
        has_rules = len(language) == len(DEFAULT_RULES_LANGUAGE)
        rules_language = language if has_rules else DEFAULT_RULES_LANGUAGE
        lines = text.splitlines(keepends=True)
        return [part for line in lines for part in self.pipeline.split(line, rules_language)]

    def count_tokens(self, sentences: Sequence[str], source: str, target: str) -> int:
        """Count the source tokens, and refuse sentences that are too long.

        Args:
            sentences: Sentences to translate.
            source: Language of the sentences.
            target: Language of the translations.

        Returns:
            Number of tokens of all sentences together.

        Raises:
            ValueError: If a sentence is too long for the server or for the model.
        """
        languages = self._languages(source, target)
        sources = self.pipeline.preprocess(list(sentences), **languages)
        lengths = [len(source_ids) for source_ids in sources["input_ids"]]
        longest = max(lengths, default=0)
        if longest > MAX_SENTENCE_TOKENS:
            raise ValueError(
                f"a sentence must have at most {MAX_SENTENCE_TOKENS:,} tokens, got {longest:,}."
            )
        return sum(lengths)

    def translate(
        self,
        sentences: Sequence[str],
        source: str,
        target: str,
        num_translations: int = 1,
        is_aligned: bool = False,
        stopping_criteria: StoppingCriteriaList | None = None,
    ) -> list[list[Translation]]:
        """Translate sentences in one call of the pipeline.

        Args:
            sentences: Sentences to translate.
            source: Language of the sentences.
            target: Language of the translations.
            num_translations: Number of translations of each sentence.
            is_aligned: Whether to align the words.
            stopping_criteria: Criteria that end the search early.

        Returns:
            Translations of each sentence, best first.
        """
        outputs = self.pipeline(
            list(sentences),
            num_return_sequences=num_translations,
            return_alignment=is_aligned,
            stopping_criteria=stopping_criteria,
            **self._languages(source, target),
        )
        # for one translation a sentence, the pipeline returns no list of translations
        outputs_of_sentences = outputs if num_translations > 1 else [[output] for output in outputs]
        return [
            [
                Translation(output["translation_text"].strip(), output.get("alignment", ()))
                for output in sentence_outputs
            ]
            for sentence_outputs in outputs_of_sentences
        ]

    def _languages(self, source: str, target: str) -> dict[str, Any]:
        if not self.tokenizer_codes:
            return {}
        return {"src_lang": self.tokenizer_codes[source], "tgt_lang": self.tokenizer_codes[target]}


def load_models(names: Iterable[str], trust_remote_code: bool) -> dict[str, dict[str, Model]]:
    """Load models, and translate a word with each, to refuse models that cannot translate.

    Args:
        names: Run folders, model folders or Hub names, with or without their languages, as in
            "en-de=runs/demo".
        trust_remote_code: Whether to run the Python code that is saved with a model.

    Returns:
        The model for each source language and each of its target languages.

    Raises:
        ValueError: If a model cannot be loaded, its languages are not known or not readable, or two
            models translate between the same languages.
    """
    pipelines: dict[str, TranslationPipeline] = {}
    models: dict[str, dict[str, Model]] = {}
    for name_with_languages in names:
        # a path can have the form of a model with its languages, as in lr-sweep=0.1
        is_path = Path(name_with_languages).exists()
        match = None if is_path else MODEL_WITH_LANGUAGES.fullmatch(name_with_languages)
        name = match["name"] if match else name_with_languages
        if match is None and "=" in name and not is_path:
            raise ValueError(
                "languages of a model must be written as in en-de=my/model or en-zh-Hant=my/model, "
                f"got {name}."
            )
        if name not in pipelines:
            pipelines[name] = load(name, trust_remote_code=trust_remote_code)
        stated_pair = (match["source"], match["target"]) if match else None
        model, pairs = _model_and_pairs(name, pipelines[name], stated_pair)
        for source, target in pairs:
            earlier_model = models.setdefault(source, {}).setdefault(target, model)
            if earlier_model is not model:
                raise ValueError(
                    f"models must translate between different languages, got {earlier_model.name} "
                    f"and {name}, both from {source} to {target}."
                )
        source, target = pairs[0]
        model.translate(model.split("a", source), source, target)
    return models


def _model_and_pairs(
    name: str, pipeline: TranslationPipeline, stated_pair: tuple[str, str] | None
) -> tuple[Model, list[tuple[str, str]]]:
    """Return a model, and its pairs of source and target language."""
    tokenizer_codes = _tokenizer_codes(language_codes(pipeline.tokenizer))
    if tokenizer_codes:
        pairs = list(permutations(tokenizer_codes, 2))
    elif stated_pair is None:
        pairs = [_recorded_pair(name, pipeline)]
    else:
        # T5 gets its languages from the name of the pipeline's task
        task = "translation_{}_to_{}".format(*stated_pair).replace("-", "_")
        device = pipeline.device
        pipeline = TranslationPipeline(pipeline.model, pipeline.tokenizer, task, device=device)
    if stated_pair is not None:
        source, target = map(api_code, stated_pair)
        for code in (source, target) if tokenizer_codes else ():
            if code not in tokenizer_codes:
                raise ValueError(
                    f"languages of {name} must be of {', '.join(tokenizer_codes)}, got {code!r}."
                )
        pairs = [(source, target)]
    return Model(name, pipeline, tokenizer_codes), pairs


def _recorded_pair(name: str, pipeline: TranslationPipeline) -> tuple[str, str]:
    """Return the languages that the tokenizer or the recipe of a model names."""
    recorded_pairs = [
        [getattr(pipeline.tokenizer, attribute, None) for attribute in attributes]
        for attributes in LANGUAGE_ATTRIBUTES
    ]
    recipe_file = cached_file(
        name,
        RECIPE_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if recipe_file is not None:
        settings, _ = read_recipe_file(recipe_file)
        recorded_pairs.append([settings.get("source_lang"), settings.get("target_lang")])
    for source, target in recorded_pairs:
        if source and target:
            return api_code(str(source)), api_code(str(target))
    raise ValueError(
        f"languages of {name} must be known, got a model that does not name them: write them "
        f"before it, as in en-de={name}."
    )


def _tokenizer_codes(codes: Iterable[str]) -> dict[str, str]:
    """Map each language code of the API to the code of a tokenizer."""
    tokenizer_codes: dict[str, str] = {}
    for code in codes:
        short_code = api_code(code)
        # two codes of NLLB can have the same short code; the second code is then not shortened
        if short_code in tokenizer_codes:
            short_code = code.replace("_", "-")
        tokenizer_codes[short_code] = code
    return tokenizer_codes


def api_code(code: str) -> str:
    """Return the code of a language in the API: ISO 639, with a script if it is not the usual one.

    Args:
        code: Code of a tokenizer or a user, such as "de", "de_DE" (mBART), "zho_Hant" (NLLB) or
            "zh-TW".

    Returns:
        Code of the API, such as "de" or "zh-Hant".
    """
    language, *subtags = re.split("[_-]", code)
    language = get_global("language_aliases").get(language, language)
    usual_subtags, implied_subtags = (
        get_global("likely_subtags").get("_".join(parts), "").split("_")
        # a region can imply a script, as in zh-TW
        for parts in ([language], [language, *subtags])
    )
    scripts = [
        subtag
        for subtag in dict.fromkeys((*subtags, *implied_subtags))
        if len(subtag) == SCRIPT_LETTERS and subtag not in usual_subtags
    ]
    return "-".join((language, *scripts))


def language_name(code: str) -> str:
    """Return the English name of a language.

    Args:
        code: Code of the API.

    Returns:
        The name, or the code if the language has none in Unicode's CLDR.
    """
    english = Locale("en")
    language, _, script = code.partition("-")
    name = english.languages.get(language, language)
    return f"{name} ({english.scripts.get(script, script)})" if script else name
