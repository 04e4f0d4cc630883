"""Translation pipeline: text in, text out. transformers 5 has no such pipeline.

This file turns texts into batches of token ids, calls the model's `generate`, and turns the result
into texts. The file is copied to the Hub with the model, and `custom_pipelines` of the model's
configuration refers to the copy.
"""

import copy
import logging
import math
import operator
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from threading import Lock
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    Pipeline,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .alignment_vanilla_transformer import (
    HEADS_FIELD,
    aligned_words,
    default_heads,
    head_weights,
    word_indices,
)
from .batches_vanilla_transformer import (
    batches_by_length,
    max_source_tokens,
    without_padding,
)
from .changes_vanilla_transformer import evaluating
from .checks_vanilla_transformer import (
    LIBRARY_MAX_LENGTH,
    check_tokenizer,
    engine_precision,
    is_whole,
    plain_numbers,
    vocab_size_of,
)
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .constraints_vanilla_transformer import (
    TARGET_SETTINGS,
    Constraints,
    is_for_each_text,
    read_constraints,
    settings_with_constraints,
    values_for_texts,
)
from .engine_checks_vanilla_transformer import settings_that_need_engine
from .languages_vanilla_transformer import (
    language_codes,
    model_languages,
    source_tokenizer,
    target_tokenizer,
)
from .scores_vanilla_transformer import token_log_probabilities
from .search_vanilla_transformer import MissingTranslationError, length_penalty
from .terms_vanilla_transformer import ByteVocabulary, token_bytes

TASK = "translation"
# maximum number of logits of a step of the search, 0.5 GiB in float32
MOST_LOGITS_PER_STEP = 2**27
# number of texts that are read ahead from an iterator, to sort them by length
TEXTS_PER_WINDOW = 256
# settings of a call that are read before the search
PREPARE_SETTINGS = (
    *TARGET_SETTINGS,
    "tokens_per_batch",
    "split_sentences",
    "src_lang",
    "tgt_lang",
    "truncation",
)
# settings of a call that are read after the search, by `postprocess`
OUTPUT_SETTINGS = (
    "return_tensors",
    "return_text",
    "return_scores",
    "return_alignment",
    "clean_up_tokenization_spaces",
)
# search settings of this package that transformers does not have
PACKAGE_SEARCH_SETTINGS = ("length_penalty_alpha", "max_extra_tokens")
# search settings of the pipeline of transformers 4, for a model whose configuration has no others
DEFAULT_SEARCH = {"num_beams": 4, "max_new_tokens": 256}
# a tokenizer stores the truncation, padding and languages of a call while it tokenizes, so only one
# thread may call it
_TOKENIZER_LOCK = Lock()

logger = logging.getLogger(__name__)


class TranslationPipeline(Pipeline):
    """Translation of texts with any encoder-decoder model and its tokenizer.

    `TranslationPipeline(model, tokenizer)("Hello")` returns `[{"translation_text": ...}]`. For a
    list of texts, the pipeline returns one such mapping for each text; for a generator or a
    dataset, an iterator over the results of the single texts. Texts of similar length are
    translated in one batch; the results keep the order of the texts.

    Settings of a call and settings of `generate` (`num_beams`, `length_penalty_alpha`,
    `num_return_sequences` ...) may be passed to the constructor, for every call, or to a single
    call. Settings for the task in the model's configuration (`task_specific_params`, as in T5) also
    apply; the `prefix` among them is put before every text.

    Args:
        model: Encoder-decoder with a language model head.
        tokenizer: Tokenizer of the model.
        task: "translation", or a task with languages such as "translation_en_to_de".
        batch_size: Maximum number of texts in a batch; a large vocabulary with many beams limits
            the number further.
        tokens_per_batch: Maximum number of source tokens in a batch, with padding; a longer text is
            a batch of its own.
        **kwargs: Arguments of every pipeline of transformers, such as `device`, settings of a call,
            and settings of `generate`.

    Raises:
        ValueError: If the model cannot translate, the tokenizer does not belong to the model, or
            the tokenizer lacks a language.
    """

    # function that returns a `SharedConversion` of a model. The installed package sets it; in a
    # copy of this file on the Hub, it stays None
    make_conversion: ClassVar[Callable[[PreTrainedModel], Any] | None] = None
    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        task: str = TASK,
        **kwargs,
    ):
        check_tokenizer(model, tokenizer)
        languages = languages_of(task)
        task_settings = (getattr(model.config, "task_specific_params", None) or {}).get(task, {})
        settings = {**task_settings, **languages, **kwargs}
        prefix = settings.pop("prefix", getattr(model.config, "prefix", None))
        # cached results of `_made` by name, each with the objects that it was made of
        self._made_of: dict[str, tuple[tuple[Any, ...], Any]] = {}
        super().__init__(model=model, tokenizer=tokenizer, task=task, **settings)
        self.prefix = prefix or ""
        self._check_languages(**self._preprocess_params)

    def __call__(self, inputs: str | Iterable[str], batch_size: int | None = None, **kwargs) -> Any:
        """Translate texts.

        Args:
            inputs: A text, a list of texts, or a generator, dataset or other iterable of texts,
                which is read while the translations are read.
            batch_size: Maximum number of texts in a batch. With 1, an iterator is also read one
                text at a time.
            **kwargs: Settings of `generate`, and these settings of a call:

                - `tokens_per_batch`: Maximum number of source tokens in a batch, with padding.
                - `src_lang`, `tgt_lang`: Languages, for a multilingual model.
                - `split_sentences`: Translate each sentence of a text by itself, and keep the white
                  space between sentences. The value is the language whose rules end a sentence,
                  such as "en", or true for the model's language, or English if the model names
                  none.
                - `truncation`: Whether to truncate a text that is too long for the model.
                - `return_tensors`, `return_text`: Whether results have token ids, and whether they
                  have text. The default is text alone; with `return_tensors` it is ids alone.
                - `return_scores`: Whether results have the log-probabilities of `score`. With
                  `split_sentences`, a result has the sum of the log-probabilities, the mean score,
                  and the results of its `sentences`.
                - `return_alignment`: Whether results have the word pairs of `align`.
                - `target_prefix`: Text that the translation begins with.
                - `required_terms`: List of texts that the translation contains, in the same case.
                - `forbidden_terms`: List of texts that the translation does not contain.
                - `num_workers`: Not used, because tokenization takes little time.
                - `clean_up_tokenization_spaces`: Passed to `decode`.
                - `stop_sequence`: Text whose first token ends a translation.

                `target_prefix`, `required_terms` and `forbidden_terms` are for all texts, or a list
                with one value for each text. The translation of an empty text stays empty.

        Returns:
            For a text, `num_return_sequences` mappings with `translation_text`, or with
            `translation_token_ids`, a tensor [T]. For a list, one mapping for each text, or a list
            of mappings if `num_return_sequences` is above 1. Otherwise an iterator over the results
            of the single texts.

        Raises:
            TypeError: If the inputs are not texts.
            ValueError: If a text is too long for the model or has a token outside its vocabulary,
                or a setting is invalid.
        """
        kwargs.pop("num_workers", None)
        call_settings = self._group_settings(batch_size, kwargs)
        if isinstance(inputs, str):
            return self._translate([inputs], call_settings)[0]
        if isinstance(inputs, list | tuple):
            results = self._translate(list(inputs), call_settings)
            if all(len(result) == 1 for result in results):
                return [result[0] for result in results]
            return results
        if isinstance(inputs, bytes | Mapping) or not isinstance(inputs, Iterable):
            # torch's datasets have items, but no __iter__
            if not isinstance(inputs, torch.utils.data.Dataset):
                raise TypeError(
                    "inputs must be a string, or a list, generator or dataset of strings, "
                    f"got {type(inputs).__name__}."
                )
            dataset = inputs
            inputs = (dataset[index] for index in range(len(dataset)))
        return self._translate_stream(inputs, call_settings)

    def _group_settings(self, batch_size: int | None, settings: dict[str, Any]) -> "_CallSettings":
        """Group the settings of a call by their reader; check those of batches and languages."""
        prepare_settings, search_settings, output_settings = self._sanitize_parameters(**settings)
        prepare_settings = {**self._preprocess_params, **prepare_settings}
        self._check_languages(**prepare_settings)
        batch_settings = {"batch_size": self._batch_size if batch_size is None else batch_size}
        if "tokens_per_batch" in prepare_settings:
            batch_settings["tokens_per_batch"] = prepare_settings.pop("tokens_per_batch")
        for name, size in batch_settings.items():
            if size is None and name == "batch_size":
                continue
            if not is_whole(size) or size < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {size!r}.")
        split_sentences = prepare_settings.pop("split_sentences", False)
        target_settings = {name: prepare_settings.pop(name, None) for name in TARGET_SETTINGS}
        output_settings = {**self._postprocess_params, **output_settings}
        if split_sentences and output_settings.get("return_tensors"):
            raise ValueError("return_tensors must be false with split_sentences, got true.")
        if split_sentences and output_settings.get("return_text") is False:
            raise ValueError("return_text must be true with split_sentences, got false.")
        for name in ("target_prefix", "required_terms"):
            if split_sentences and target_settings[name]:
                raise ValueError(
                    f"{name} must not be given with split_sentences: {name} would apply to "
                    "every sentence of a text."
                )
        return _CallSettings(
            batch_settings,
            split_sentences,
            target_settings,
            prepare_settings,
            {**self._forward_params, **search_settings},
            output_settings,
        )

    def score(
        self, inputs: Sequence[str], translations: Sequence[str], **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Compute the log-probabilities of given translations.

        Args:
            inputs: Texts.
            translations: A translation of each text. Its text is tokenized again, so a translation
                of this model may have other tokens than in the search, with another probability.
            **kwargs: Settings of a call that concern texts and batches, and settings of `generate`
                that concern the length penalty.

        Returns:
            For each text, a mapping: `log_probability`, the natural logarithm of the probability of
            the translation with its end token; `score`, this logarithm divided by the length
            penalty of the model's search; `token_log_probabilities`, pairs of a token and its
            log-probability. A token that the search forces, such as a language token, has the
            log-probability 0.

        Raises:
            TypeError: If the inputs are not texts.
            ValueError: If there are not as many translations as texts, a text or translation is too
                long for the model or has a token outside its vocabulary, or a setting is invalid.
        """
        return self._compute_for_pairs(inputs, translations, self._score_targets, kwargs)

    def align(
        self, inputs: Sequence[str], translations: Sequence[str], **kwargs: Any
    ) -> list[list[tuple[int, int]]]:
        """Align the words of texts and their translations.

        Args:
            inputs: Texts.
            translations: A translation of each text.
            **kwargs: Settings of a call that concern texts and batches, and `alignment_heads`,
                pairs of layer and head of the encoder-decoder attention, counted from 0. The
                default is `alignment_heads` of the model's generation configuration, or else all
                heads of the second-to-last layer (of the last layer if there are at most two).

        Returns:
            For each text, pairs of the index of a source word and the index of the target word that
            belongs to it, counted from 0, in the order of the target words. Spaces separate words.
            With an ensemble, the attention is that of the first model.

        Raises:
            TypeError: If the inputs are not texts.
            ValueError: As for `score`, or if the model returns no attention weights.
        """
        return self._compute_for_pairs(inputs, translations, self._align_targets, kwargs)

    def _compute_for_pairs(
        self,
        inputs: Sequence[str],
        translations: Sequence[str],
        compute_batch: Callable[..., list[Any]],
        settings: dict[str, Any],
    ) -> list[Any]:
        """Apply a function to batches of sources and targets; return one result for each pair."""
        for name, texts in (("inputs", inputs), ("translations", translations)):
            if not isinstance(texts, Sequence) or isinstance(texts, str | bytes):
                raise TypeError(f"{name} must be a list of texts, got {type(texts).__name__}.")
        if len(inputs) != len(translations):
            raise ValueError(
                f"translations must be as many as inputs, got {len(translations):,} and "
                f"{len(inputs):,}."
            )
        call_settings = self._group_settings(None, settings)
        source_ids, target_ids, language_settings = self._tokenize_pairs(
            inputs, translations, call_settings
        )
        search_settings = {**call_settings.search_settings, **language_settings}
        own_rows = self._pop_own_rows(search_settings, len(inputs), is_scored=True)
        results: list[Any] = [None for _ in inputs]
        for batch in batches_by_length(
            dict(enumerate(map(len, source_ids))), **call_settings.batch_settings
        ):
            batch_inputs = self._pad([source_ids[index] for index in batch])
            batch_inputs |= {name: rows[batch] for name, rows in own_rows.items()}
            batch_inputs = {name: tensor.to(self.device) for name, tensor in batch_inputs.items()}
            batch_results = compute_batch(
                batch_inputs, [target_ids[index] for index in batch], search_settings
            )
            for index, result in zip(batch, batch_results, strict=True):
                results[index] = result
        return results

    def encode_pairs(
        self, inputs: Sequence[str], translations: Sequence[str], **kwargs: Any
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Tokenize texts and translations, as `score` and `align` do.

        Args:
            inputs: Texts.
            translations: Translations.
            **kwargs: Settings of a call that concern texts.

        Returns:
            Token ids of the texts, and of the translations with their end token.

        Raises:
            TypeError: If the inputs are not texts.
            ValueError: As for `score`.
        """
        source_ids, target_ids, _ = self._tokenize_pairs(
            inputs, translations, self._group_settings(None, kwargs)
        )
        return source_ids, target_ids

    def _tokenize_pairs(
        self, inputs: Sequence[str], translations: Sequence[str], call_settings: "_CallSettings"
    ) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
        encoded = self.preprocess(list(inputs), **call_settings.prepare_settings)
        target_ids = self._tokenize_targets(
            list(translations), call_settings.prepare_settings.get("tgt_lang")
        )
        return encoded.pop("input_ids"), target_ids, encoded

    def split(
        self, text: str, split_sentences: bool | str | None = True, src_lang: str | None = None
    ) -> list[str]:
        """Split a text into sentences, as the setting `split_sentences` does.

        Args:
            text: Any text.
            split_sentences: Language whose rules end a sentence, such as "en"; true for the model's
                language, or English if the model names none; false for the whole text.
            src_lang: Language of the text, for a multilingual model.

        Returns:
            Sentences with the white space around them, and white space between paragraphs. The
            concatenation of these parts is the text.

        Raises:
            ValueError: If the language has no code of two letters, or the package sentencex is not
                installed.
        """
        if not split_sentences:
            return [text]
        language = split_sentences
        if language is True:
            # mBART's codes are like en_XX; NLLB's, like eng_Latn, have three letters, and are
            # refused below
            code = src_lang or self._languages()[0] or "en"
            language = re.split("[_-]", code)[0]
        if not isinstance(language, str) or len(language) != 2:
            raise ValueError(
                "split_sentences must be the language of the texts in two letters, such as 'en', "
                f"got {language!r}."
            )
        try:
            from sentencex import segment
        except ImportError as error:
            raise ValueError(
                "split_sentences needs sentencex, which is not installed: pip install "
                "'vanilla_transformer[text]'"
            ) from error
        return list(segment(language, text))

    def _tokenize_targets(self, texts: list[str], tgt_lang: str | None) -> list[list[int]]:
        self._check_texts(texts)
        if not texts:
            return []
        tokenizer = self._target_tokenizer
        with _TOKENIZER_LOCK:
            if hasattr(tokenizer, "_build_translation_inputs"):
                tokenizer.tgt_lang = tgt_lang
            ids = tokenizer(text_target=texts)["input_ids"]
        max_tokens = max_source_tokens(self.model.config)
        vocab_size = vocab_size_of(self.model.get_decoder())
        self._check_token_ids(texts, ids, max_tokens, "a translation", vocab_size)
        return ids

    @property
    def _target_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._made("target tokenizer", target_tokenizer, self.tokenizer)

    def _search_config(self, search_settings: Mapping[str, Any]) -> GenerationConfig:
        """Return the settings of a search: those of the call, then those of the model."""
        config = copy.deepcopy(
            search_settings.get("generation_config") or self.model.generation_config
        )
        for name, value in search_settings.items():
            setattr(config, name, value)
        return config

    def _score_targets(
        self,
        inputs: Mapping[str, Tensor],
        target_ids: Sequence[Sequence[int]],
        search_settings: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Return the results of `score` for translations that are given as token ids."""
        config = self._search_config(search_settings)
        models = [self.model, *(search_settings.get("ensemble") or ())]
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(evaluating(model))
            target_logarithms = token_log_probabilities(models, inputs, target_ids)
        alpha, exponent = getattr(config, "length_penalty_alpha", None), config.length_penalty
        results = []
        for ids, logarithms in zip(target_ids, target_logarithms, strict=True):
            if ids and ids[0] == config.forced_bos_token_id:
                logarithms[0] = 0.0
            tokens = self.tokenizer.convert_ids_to_tokens(ids)
            log_probability = math.fsum(logarithms)
            penalty = length_penalty(len(ids), alpha, exponent) if ids else 1
            results.append(
                {
                    "log_probability": log_probability,
                    "score": log_probability / penalty,
                    "token_log_probabilities": list(zip(tokens, logarithms, strict=True)),
                }
            )
        return results

    def _align_targets(
        self,
        inputs: Mapping[str, Tensor],
        target_ids: Sequence[Sequence[int]],
        search_settings: Mapping[str, Any],
        is_from_search: bool = False,
    ) -> list[list[tuple[int, int]]]:
        """Return the alignments for token ids of translations.

        `is_from_search` is true for token ids from a search, and false for the ids of tokenized
        texts.
        """
        heads = getattr(self._search_config(search_settings), HEADS_FIELD, None)
        with evaluating(self.model):
            target_weights = head_weights(
                self.model, inputs, target_ids, heads or default_heads(self.model)
            )
        source_lengths = inputs["attention_mask"].sum(dim=1).tolist()
        num_prefix_words = len(self.prefix.split())
        tokenizer = self._made("source tokenizer", source_tokenizer, self.tokenizer)
        source_words: list[list[int | None]] = []
        for ids, source_length in zip(inputs["input_ids"].tolist(), source_lengths, strict=True):
            indices = word_indices(tokenizer, ids[:source_length])
            source_words.append(
                [None if index is None else index - num_prefix_words for index in indices]
            )
        targets_per_source = len(target_ids) // len(source_words)
        target_words = [word_indices(self.tokenizer, ids, not is_from_search) for ids in target_ids]
        return [
            aligned_words(
                weights.mean(dim=0),
                source_words[target_index // targets_per_source],
                target_words[target_index],
            )
            for target_index, weights in enumerate(target_weights)
        ]

    def preprocess(
        self,
        input_: list[str],
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        truncation: bool | str = False,
    ) -> dict[str, Any]:
        """Tokenize texts, and refuse texts that the model cannot read.

        Args:
            input_: Texts.
            src_lang: Language of the texts, for a multilingual tokenizer.
            tgt_lang: Language of the translations, for a multilingual tokenizer.
            truncation: Whether to truncate texts to the maximum length of model and tokenizer, or
                the name of one of the tokenizer's truncation strategies.

        Returns:
            `input_ids`, the token ids of each text, and for a multilingual tokenizer
            `forced_bos_token_id`, the id of the target language.

        Raises:
            TypeError: If a text is not a string.
            ValueError: If a text is too long, has a token outside the model's vocabulary, or has
                an unpaired surrogate, which is not valid Unicode.
        """
        self._check_texts(input_)
        if not input_:
            return {"input_ids": []}
        max_tokens = max_source_tokens(self.model.config)
        truncation_settings: dict[str, Any] = {}
        if truncation:
            truncation_settings["truncation"] = truncation
            # without a maximum of the model, the tokenizer truncates to its own, if it has one
            if max_tokens is not None:
                truncation_settings["max_length"] = min(max_tokens, self.tokenizer.model_max_length)
        encoded = self._tokenize_sources(
            [self.prefix + text for text in input_], src_lang, tgt_lang, truncation_settings
        )
        vocab_size = vocab_size_of(self.model)
        self._check_token_ids(input_, encoded["input_ids"], max_tokens, "a text", vocab_size)
        return encoded

    @staticmethod
    def _check_texts(texts: list[str]):
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(
                    f"each text must be a string, got {type(text).__name__} "
                    f"({_short_repr(text)}). For a column of a dataset, pass KeyDataset(dataset, "
                    "column) of transformers.pipelines.pt_utils."
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"each text must be valid Unicode, got an unpaired surrogate at index "
                    f"{error.start}: {_short_repr(text)}."
                ) from None

    @staticmethod
    def _check_token_ids(
        texts: list[str],
        token_ids: list[list[int]],
        max_tokens: int | None,
        text_noun: str,
        vocab_size: int,
    ):
        for text, text_ids in zip(texts, token_ids, strict=True):
            if max_tokens is not None and len(text_ids) > max_tokens:
                raise ValueError(
                    f"{text_noun} must have at most {max_tokens} tokens, the number of positions "
                    f"of the model, got {len(text_ids)}: {_short_repr(text)}."
                )
            if text_ids and max(text_ids) >= vocab_size:
                raise ValueError(
                    f"token ids must be below the model's vocabulary size {vocab_size}, "
                    f"got {max(text_ids)}: {_short_repr(text)}."
                )

    def _tokenize_sources(
        self,
        texts: list[str],
        src_lang: str | None,
        tgt_lang: str | None,
        truncation_settings: dict[str, Any],
    ) -> dict[str, Any]:
        build_inputs = getattr(self.tokenizer, "_build_translation_inputs", None)
        if build_inputs is None:
            with _TOKENIZER_LOCK:
                return {"input_ids": self.tokenizer(texts, **truncation_settings)["input_ids"]}
        if src_lang is None or tgt_lang is None:
            raise ValueError(
                "src_lang and tgt_lang must be given for a multilingual model, from "
                f"{', '.join(language_codes(self.tokenizer))}."
            )
        with _TOKENIZER_LOCK:
            encoded = build_inputs(
                texts,
                return_tensors=None,
                src_lang=src_lang,
                tgt_lang=tgt_lang,
                **truncation_settings,
            )
        return {name: encoded[name] for name in ("input_ids", "forced_bos_token_id")}

    def __getstate__(self) -> dict[str, Any]:
        # a copy begins with an empty cache, because some cached objects cannot be pickled
        return {**vars(self), "_made_of": {}}

    def _made(self, name: str, make: Callable[..., Any], *objects: Any) -> Any:
        """Return the cached result of `make(*objects)`; compute it again if the objects differ."""
        made = self._made_of.get(name)
        if made is None or any(map(operator.ne, made[0], objects)):
            made = self._made_of[name] = objects, make(*objects)
        return made[1]

    def _languages(self) -> list[str | None]:
        return self._made("languages", model_languages, self.model, self.tokenizer)

    def _check_languages(
        self, src_lang: str | None = None, tgt_lang: str | None = None, **settings: Any
    ):
        """Refuse a language that the tokenizer lacks, or a direction that is not the model's."""
        given_languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        tokenizer_languages = language_codes(self.tokenizer)
        for name, code in given_languages.items():
            if code is not None and tokenizer_languages and code not in tokenizer_languages:
                raise ValueError(
                    f"{name} must be a language of the tokenizer, "
                    f"{', '.join(tokenizer_languages)}, got {code!r}."
                )
        languages = [None, None] if tokenizer_languages else self._languages()
        for (name, code), expected in zip(given_languages.items(), languages, strict=True):
            # a longer code of a model may name a family of languages
            is_one_language = isinstance(expected, str) and len(expected) == 2
            # a region, as in en-US or en_XX, changes nothing
            language = re.split("[_-]", str(code))[0].lower()
            if is_one_language and code is not None and language != expected:
                raise ValueError(
                    f"{name} must be {expected!r}: the model translates {languages[0]} to "
                    f"{languages[1]}, got {code!r}."
                )

    def _forward(
        self,
        input_tensors: dict[str, Tensor],
        search_model: PreTrainedModel | None = None,
        return_scores: bool = False,
        return_alignment: bool = False,
        **search_settings,
    ) -> dict[str, Any]:
        prompt_ids = search_settings.get("decoder_input_ids")
        if prompt_ids is not None:
            search_settings["decoder_input_ids"] = prompt_ids.to(self.device)
        head_settings = {
            name: search_settings.pop(name) for name in (HEADS_FIELD,) if name in search_settings
        }
        with evaluating(self.model):
            # no `or`: a model compiled by `torch.compile` has no truth value
            model = self.model if search_model is None else search_model
            output = model.generate(**input_tensors, **search_settings)
        ids = output if isinstance(output, Tensor) else output.sequences
        outputs = {"ids": ids}
        if not (return_scores or return_alignment):
            return outputs
        config = self._search_config(search_settings)
        output_limits = [ids.shape[1]] * len(ids)
        max_extra_tokens = getattr(config, "max_extra_tokens", None)
        if max_extra_tokens is not None:
            # if the padding id is 0, transformers pads a sentence that reached its maximum length
            # with end tokens, so tokens beyond this length are dropped
            num_prefix_tokens = 0 if prompt_ids is None else prompt_ids.shape[1] - 1
            source_lengths = input_tensors["attention_mask"].sum(dim=1)
            limits = source_lengths + max_extra_tokens + num_prefix_tokens
            output_limits = limits.repeat_interleave(len(ids) // len(limits)).tolist()
        end_and_padding = config.eos_token_id, config.pad_token_id
        target_ids = [
            without_padding(output_ids[1 : limit + 1], *end_and_padding)
            for output_ids, limit in zip(ids.tolist(), output_limits, strict=True)
        ]
        if return_scores:
            outputs["scores"] = self._score_targets(input_tensors, target_ids, search_settings)
        if return_alignment:
            alignment_settings = {**search_settings, **head_settings}
            outputs["alignments"] = self._align_targets(
                input_tensors, target_ids, alignment_settings, True
            )
        return outputs

    def _missing_settings(self, search_settings: dict[str, Any]) -> dict[str, Any]:
        """Return those of `DEFAULT_SEARCH` that the model does not set; the call may set others."""
        model_settings = self.model.generation_config
        if (
            isinstance(self.model.config, VanillaTransformerConfig)
            or "generation_config" in search_settings
        ):
            return {}
        missing = {
            name: value
            for name, value in DEFAULT_SEARCH.items()
            if getattr(model_settings, name, None) is None
        }
        # transformers' default would truncate a translation after 20 tokens
        model_has_maximum = model_settings.max_length not in (None, LIBRARY_MAX_LENGTH)
        if "max_length" in search_settings or model_has_maximum:
            missing.pop("max_new_tokens", None)
        elif "max_new_tokens" in missing:
            # a decoder with learned positions has no more positions than the encoder
            most_tokens = max_source_tokens(self.model.config) or missing["max_new_tokens"]
            missing["max_new_tokens"] = min(missing["max_new_tokens"], most_tokens)
        return missing

    def _search_model(
        self,
        search_settings: dict[str, Any],
        has_terms: bool = False,
        has_padding_tokens: bool = False,
    ) -> PreTrainedModel:
        """Return the model to search with: the given model, or its conversion for the engine.

        If the given model is of transformers and is not converted, this package's settings are
        removed from the search.
        """
        if isinstance(self.model.config, VanillaTransformerConfig):
            return self.model
        if search_settings.get("ensemble"):
            raise ValueError(
                f"ensemble must be of models of this package, got a {type(self.model).__name__}."
            )
        engine = search_settings.get("engine", "auto")
        reason: str | None = "engine='off' is set"
        if search_settings.get("custom_generate") is not None:
            reason = "custom_generate is given"
        elif engine != "off":
            reason = "the package vanilla_transformer is not installed"
            make_conversion = type(self).make_conversion
            if make_conversion is not None:
                conversion = self._made("conversion", make_conversion, self.model)
                converted, reason = conversion.for_engine(
                    engine_precision(search_settings), has_padding_tokens
                )
                if converted is not None:
                    return converted
        engine_settings = {
            **settings_that_need_engine(self.model, search_settings),
            "engine='required'": engine == "required",
            "required_terms": has_terms,
        }
        engine_settings |= {
            name: search_settings.get(name) is not None for name in PACKAGE_SEARCH_SETTINGS
        }
        for name, is_set in engine_settings.items():
            if is_set:
                raise ValueError(
                    f"{name} needs the inference engine, which cannot be used: {reason}."
                )
        logger.info("%s runs its own modules, because %s.", type(self.model).__name__, reason)
        for name in ("engine", "precision", "int8", *PACKAGE_SEARCH_SETTINGS):
            search_settings.pop(name, None)
        return self.model

    def postprocess(
        self,
        model_outputs: dict[str, Any],
        return_tensors: bool = False,
        return_text: bool | None = None,
        return_scores: bool = False,
        return_alignment: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Turn the token ids of translations into results.

        Args:
            model_outputs: `ids`, token ids of the translations, [translations, T]; if requested,
                `scores`, their log-probabilities as mappings, and `alignments`, pairs of words.
            return_tensors: Whether results have `translation_token_ids`.
            return_text: Whether results have `translation_text`; None for true unless
                `return_tensors` is set.
            return_scores: Whether results have log-probabilities.
            return_alignment: Whether results have pairs of words.
            clean_up_tokenization_spaces: Passed to `decode`.

        Returns:
            A mapping for each translation.
        """
        results: list[dict[str, Any]] = [{} for _ in model_outputs["ids"]]
        if return_tensors:
            for result, ids in zip(results, model_outputs["ids"], strict=True):
                result["translation_token_ids"] = ids
        if return_text or (return_text is None and not return_tensors):
            texts = self.tokenizer.batch_decode(
                model_outputs["ids"],
                skip_special_tokens=True,
                clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            )
            for result, text in zip(results, texts, strict=True):
                result["translation_text"] = text
        if return_scores:
            for result, score in zip(results, model_outputs["scores"], strict=True):
                result.update(score)
        if return_alignment:
            for result, word_pairs in zip(results, model_outputs["alignments"], strict=True):
                result["alignment"] = word_pairs
        return results

    def _sanitize_parameters(self, **parameters) -> tuple[dict, dict, dict]:
        parameters = plain_numbers(parameters)
        prepare_settings, output_settings = (
            {name: parameters.pop(name) for name in names if name in parameters}
            for names in (PREPARE_SETTINGS, OUTPUT_SETTINGS)
        )
        stop_text = parameters.pop("stop_sequence", None)
        if stop_text is not None:
            with _TOKENIZER_LOCK:
                stop_ids = self._target_tokenizer.encode(stop_text, add_special_tokens=False)
            if not stop_ids:
                raise ValueError(
                    f"stop_sequence must have at least one token, got {stop_text!r} without any."
                )
            parameters["eos_token_id"] = stop_ids[0]
        return prepare_settings, parameters, output_settings

    def _translate_stream(
        self, texts: Iterable[str], call_settings: "_CallSettings"
    ) -> Iterator[list[dict[str, Any]]]:
        window_size = TEXTS_PER_WINDOW if call_settings.batch_settings["batch_size"] != 1 else 1
        for name, value in call_settings.target_settings.items():
            if is_for_each_text(name, value):
                raise ValueError(
                    f"{name} must be one value if the texts come from an iterator, got a list of "
                    "values: pass the texts as a list."
                )
        texts = iter(texts)
        while window_texts := list(islice(texts, window_size)):
            yield from self._translate(window_texts, call_settings)

    def _translate(
        self, texts: list[str], call_settings: "_CallSettings"
    ) -> list[list[dict[str, Any]]]:
        """Return the translations of each text, in the order of the texts."""
        if not call_settings.split_sentences:
            return self._translate_unsplit(texts, call_settings)
        if self._resolve_num_returned(dict(call_settings.search_settings)) > 1:
            raise ValueError(
                "num_return_sequences must be 1 with split_sentences: the translations of the "
                "sentences of a text form one text."
            )
        self._check_texts(texts)
        parts_of_texts = [
            self.split(
                text, call_settings.split_sentences, call_settings.prepare_settings.get("src_lang")
            )
            for text in texts
        ]
        sentences_of_texts = [
            [part.strip() for part in text_parts if part.strip()] for text_parts in parts_of_texts
        ]
        forbidden_terms = values_for_texts(
            "forbidden_terms", call_settings.target_settings["forbidden_terms"], len(texts)
        )
        if forbidden_terms is not None:
            sentence_counts = map(len, sentences_of_texts)
            terms_of_sentences = [
                terms
                for terms, count in zip(forbidden_terms, sentence_counts, strict=True)
                for _ in range(count)
            ]
            call_settings = call_settings._replace(
                target_settings={
                    **call_settings.target_settings,
                    "forbidden_terms": terms_of_sentences,
                }
            )
        sentence_results = iter(
            self._translate_unsplit(list(chain.from_iterable(sentences_of_texts)), call_settings)
        )
        return [
            [_join_sentences(text_parts, sentence_results, call_settings.output_settings)]
            for text_parts in parts_of_texts
        ]

    def _translate_unsplit(
        self, texts: list[str], call_settings: "_CallSettings"
    ) -> list[list[dict[str, Any]]]:
        encoded = self.preprocess(texts, **call_settings.prepare_settings)
        source_ids = encoded.pop("input_ids")
        search_settings = {
            **self._missing_settings(call_settings.search_settings),
            **call_settings.search_settings,
            **encoded,
        }
        output_flags = {
            name: call_settings.output_settings.get(name, False)
            for name in ("return_scores", "return_alignment")
        }
        own_rows = self._pop_own_rows(search_settings, len(texts), any(output_flags.values()))
        num_returned = self._resolve_num_returned(search_settings)
        tgt_lang = call_settings.prepare_settings.get("tgt_lang")
        tokenizer = self._target_tokenizer
        make_vocabulary = partial(
            self._made, "vocabulary", _byte_vocabulary, tokenizer, len(tokenizer)
        )
        constraints = read_constraints(
            call_settings.target_settings,
            len(texts),
            self.model,
            tokenizer,
            partial(self._tokenize_targets, tgt_lang=tgt_lang),
            make_vocabulary,
        )
        prompt_ids = [constraint.prompt_ids[1:] for constraint in constraints]
        search_model = self._search_model(
            search_settings,
            any(constraint.required_terms for constraint in constraints),
            any(self.model.config.pad_token_id in ids for ids in (*source_ids, *prompt_ids)),
        )
        results: list[list[dict[str, Any]]] = [
            [] if text.strip() else self._empty_results(num_returned, call_settings)
            for text in texts
        ]
        groups = _groups_of_texts(texts, source_ids, constraints)
        for (_, num_term_tokens, _), lengths in groups.items():
            batch_settings = self._limit_batches(
                call_settings, search_settings, num_term_tokens, num_returned
            )
            for batch in batches_by_length(lengths, **batch_settings):
                inputs = self._pad([source_ids[index] for index in batch])
                inputs |= {name: rows[batch] for name, rows in own_rows.items()}
                batch_constraints = [constraints[index] for index in batch]
                try:
                    outputs = self.forward(
                        inputs,
                        search_model=search_model,
                        **output_flags,
                        **settings_with_constraints(
                            search_settings, batch_constraints, make_vocabulary
                        ),
                    )
                except MissingTranslationError as error:
                    text = texts[batch[error.sentence]]
                    terms = _terms_phrase(batch_constraints[error.sentence])
                    raise ValueError(f"{error.rule} of {_short_repr(text)}{terms}.") from error
                translations = self.postprocess(outputs, **call_settings.output_settings)
                for batch_index, index in enumerate(batch):
                    start = batch_index * num_returned
                    results[index] = translations[start : start + num_returned]
        return results

    def _empty_results(
        self, num_returned: int, call_settings: "_CallSettings"
    ) -> list[dict[str, Any]]:
        """Return the results for an empty text, whose translation is empty."""
        empty_score = {"log_probability": 0.0, "score": 0.0, "token_log_probabilities": []}
        empty_outputs = {
            "ids": torch.empty(num_returned, 0, dtype=torch.long),
            "scores": [empty_score] * num_returned,
            "alignments": [[]] * num_returned,
        }
        return self.postprocess(empty_outputs, **call_settings.output_settings)

    def _limit_batches(
        self,
        call_settings: "_CallSettings",
        search_settings: Mapping[str, Any],
        num_term_tokens: int,
        num_returned: int,
    ) -> dict[str, Any]:
        """Return the settings of batches, with as many texts as `MOST_LOGITS_PER_STEP` allows."""
        num_beams = self._search_config(search_settings).num_beams
        # `generate` refuses a wrong number
        num_beams = num_beams if is_whole(num_beams) else 1
        num_hypotheses = max(num_beams * (1 + num_term_tokens), num_returned)
        vocab_size = vocab_size_of(self.model.get_decoder())
        most_texts = max(1, MOST_LOGITS_PER_STEP // (num_hypotheses * vocab_size))
        batch_size = call_settings.batch_settings["batch_size"] or most_texts
        return {**call_settings.batch_settings, "batch_size": min(batch_size, most_texts)}

    def _pop_own_rows(
        self, search_settings: dict[str, Any], num_texts: int, is_scored: bool
    ) -> dict[str, Tensor]:
        """Remove the arguments that a changed model declares from the settings, and return them.

        Each argument is a tensor with a row for each text. Other values stay in the settings. They
        are refused with scores and alignments, which would ignore them.
        """
        # models of transformers have no arguments of this kind
        own_arguments: set[str] = getattr(self.model, "_own_arguments", set)()
        rows = {}
        for name in own_arguments & search_settings.keys():
            value = search_settings[name]
            if value is None or not (isinstance(value, Tensor) or is_scored):
                continue
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != num_texts:
                found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"{name} must be a tensor with a row for each of the {num_texts} texts that "
                    f"are translated together, got {found}."
                )
            rows[name] = search_settings.pop(name)
        return rows

    def _resolve_num_returned(self, search_settings: dict[str, Any]) -> int:
        """Return the number of translations of each text; remove it from the search if None."""
        # from the argument, else from the given configuration, else from that of the model, else 1
        generation_configs = (
            search_settings.get("generation_config"),
            self.model.generation_config,
        )
        counts = (getattr(config, "num_return_sequences", None) for config in generation_configs)
        given_count = search_settings.get("num_return_sequences")
        if given_count is None:
            search_settings.pop("num_return_sequences", None)
        count = next(filter(None, counts), 1) if given_count is None else given_count
        if not is_whole(count) or count < 1:
            raise ValueError(
                f"num_return_sequences must be an integer of at least 1, got {count!r}."
            )
        return count

    def _pad(self, source_ids: list[list[int]]) -> dict[str, Tensor]:
        # on the right, because the first token of a source must have the first position
        inputs = self.tokenizer.pad(
            {"input_ids": source_ids}, padding_side="right", return_tensors="pt"
        )
        return {name: inputs[name] for name in ("input_ids", "attention_mask")}


class _CallSettings(NamedTuple):
    """Settings of a call, grouped by the function that reads them.

    `batch_settings` is for `batches_by_length`, `prepare_settings` for `preprocess`,
    `search_settings` for `generate` and `output_settings` for `postprocess`. `split_sentences` is
    the setting `split_sentences`, and `target_settings` contains `TARGET_SETTINGS`.
    """

    batch_settings: dict[str, Any]
    split_sentences: bool | str | None
    target_settings: dict[str, Any]
    prepare_settings: dict[str, Any]
    search_settings: dict[str, Any]
    output_settings: dict[str, Any]


def _groups_of_texts(
    texts: list[str], source_ids: list[list[int]], constraints: Sequence[Constraints]
) -> dict[tuple[int, int, bool], dict[int, int]]:
    """Group the texts that are not empty by what the translations of a batch have in common.

    This is the length of the prompt, the number of required tokens, on which the number of beams
    depends, and whether terms are forbidden.

    Returns:
        For each group, the number of source tokens of each text, by the index of the text.
    """
    groups: dict[tuple[int, int, bool], dict[int, int]] = defaultdict(dict)
    for index, (text, constraint) in enumerate(zip(texts, constraints, strict=True)):
        if text.strip():
            group_key = (
                len(constraint.prompt_ids),
                sum(map(len, constraint.required_terms.values())),
                bool(constraint.forbidden_terms),
            )
            groups[group_key][index] = len(source_ids[index])
    return groups


def join_translations(parts: Sequence[str], translations: Iterable[str]) -> list[str]:
    """Replace the sentences of a text by their translations.

    Args:
        parts: Parts of the text: sentences with the white space around them, or only white space.
        translations: Translation of each sentence.

    Returns:
        The parts with the translations, and the white space of the text. Where the source has no
        space because its script writes none between sentences, as that of Chinese, and the
        translations are in another script, a space is added.
    """
    next_translations = iter(translations)
    translated_parts: list[str] = []
    part_before = translated_before = ""
    for part in parts:
        sentence = part.strip()
        # the first occurrence is the sentence itself, because only white space is before it
        translated = (
            part.replace(sentence, next(next_translations).strip(), 1) if sentence else part
        )
        if (
            _is_joined(part_before, part)
            and _is_joined(translated_before, translated)
            and _is_unspaced(part_before[-1] + part[0])
            and not _is_unspaced(translated_before[-1] + translated[0])
        ):
            translated = f" {translated}"
        translated_parts.append(translated)
        part_before, translated_before = part, translated or translated_before
    return translated_parts


def _is_joined(before: str, after: str) -> bool:
    """Return whether no white space is between two texts, so that one word can span both."""
    return bool(before[-1:].strip() and after[:1].strip())


def _is_unspaced(characters: str) -> bool:
    """Return whether a character is of a script without spaces between sentences."""
    # these scripts and their punctuation are wide; Hangul is wide too, but is written with spaces
    return any(
        unicodedata.east_asian_width(character) in "WF"
        and not unicodedata.name(character, "").startswith("HANGUL")
        for character in characters
    )


def _join_sentences(
    parts: list[str],
    sentence_results: Iterator[list[dict[str, Any]]],
    output_settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Replace the sentences of a text by their translations; join scores and alignments."""
    num_sentences = sum(bool(part.strip()) for part in parts)
    results = [result for (result,) in islice(sentence_results, num_sentences)]
    translated_parts = join_translations(parts, [it["translation_text"] for it in results])
    joined: dict[str, Any] = {"translation_text": "".join(translated_parts)}
    if output_settings.get("return_alignment"):
        joined["alignment"] = _join_alignments(
            parts, translated_parts, [result["alignment"] for result in results]
        )
    if output_settings.get("return_scores"):
        joined["log_probability"] = math.fsum(result["log_probability"] for result in results)
        score_sum = math.fsum(result["score"] for result in results)
        joined["score"] = score_sum / max(1, len(results))
        joined["sentences"] = results
    return joined


def _join_alignments(
    parts: list[str], translated_parts: list[str], alignments: list[list[tuple[int, int]]]
) -> list[tuple[int, int]]:
    """Return the alignment of a text, from the word pairs of each of its sentences."""
    first_words = zip(parts, _first_words(parts), _first_words(translated_parts), strict=True)
    offsets = [(source, target) for part, source, target in first_words if part.strip()]
    word_pairs = (
        (source_offset + source, target_offset + target)
        for (source_offset, target_offset), pairs in zip(offsets, alignments, strict=True)
        for source, target in pairs
    )
    # sentences without a space between them can have the same pair
    return list(dict.fromkeys(word_pairs))


def _first_words(parts: list[str]) -> list[int]:
    """Return the index of the first word of each part in the whole text; spaces separate words."""
    first_words: list[int] = []
    num_words, part_before = 0, ""
    for part in parts:
        first_words.append(num_words - _is_joined(part_before, part))
        num_words = first_words[-1] + len(part.split())
        part_before = part or part_before
    return first_words


def languages_of(task: str) -> dict[str, str]:
    """Read the languages from the name of a task.

    Args:
        task: Name of the task, such as "translation" or "translation_en_to_de".

    Returns:
        `src_lang` and `tgt_lang`, if the task names them.

    Raises:
        ValueError: If the task is not a translation.
    """
    match = re.fullmatch(rf"{TASK}(_(?P<src_lang>\w+)_to_(?P<tgt_lang>\w+))?", task)
    if match is None:
        raise ValueError(f"task must be {TASK} or {TASK}_XX_to_YY, got {task!r}.")
    return {name: code for name, code in match.groupdict().items() if code is not None}


def _byte_vocabulary(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> ByteVocabulary:
    with _TOKENIZER_LOCK:
        return ByteVocabulary(token_bytes(tokenizer))


# transformers reads this attribute in `save_pretrained`, and copies this file into the model folder
TranslationPipeline._registered_impl = {
    TASK: {"impl": TranslationPipeline, "pt": (AutoModelForSeq2SeqLM,), "type": "text"}
}


def _terms_phrase(constraint: Constraints) -> str:
    terms = {
        "required_terms": list(constraint.required_terms),
        "forbidden_terms": list(constraint.forbidden_terms),
    }
    phrases = [f"{name} {_short_repr(values)}" for name, values in terms.items() if values]
    return f" with {' and '.join(phrases)}" if phrases else ""


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
