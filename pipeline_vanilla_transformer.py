"""Translation pipeline: text in, text out. Version 5 of transformers has no such pipeline.

The model's own `generate` searches; this file turns texts into batches and ids into texts. It is
copied to the Hub beside the model, and `custom_pipelines` of the configuration names it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSeq2SeqLM,
    Pipeline,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .configuration_vanilla_transformer import VanillaTransformerConfig

TASK = "translation"
# source tokens of a batch, with padding
TOKENS_PER_BATCH = 4096
# number of texts that are read ahead from an iterator, to sort them by length
TEXTS_PER_WINDOW = 256


class TranslationPipeline(Pipeline):
    """Translation of texts with any encoder-decoder model and its tokenizer.

    `TranslationPipeline(model, tokenizer)("Hello")` returns `[{"translation_text": ...}]`. A list
    gives one such mapping for each text. A generator or a dataset gives an iterator over the
    results of the single texts. Texts of similar length are translated in one batch; the results
    keep the order of the texts.

    Settings of `generate` (`num_beams`, `length_penalty_alpha`, `num_return_sequences` ...) may be
    given here, for every call, or with the texts.

    Args:
        model: Encoder-decoder with a language model head.
        tokenizer: Tokenizer of the model.
        batch_size: Maximum number of texts in a batch.
        tokens_per_batch: Maximum number of source tokens in a batch, with padding; a longer text is
            a batch of its own.
        **kwargs: Arguments of every pipeline of the library, such as `device`, and settings of
            `generate`.

    Raises:
        ValueError: If the model cannot translate, or the tokenizer does not belong to the model.
    """

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
        super().__init__(model=model, tokenizer=tokenizer, task=task, **kwargs)

    def __call__(self, inputs: str | Iterable[str], batch_size: int | None = None, **kwargs) -> Any:
        """Translate.

        Args:
            inputs: A text, a list of texts, or a generator, dataset or other iterable of texts,
                which is read while the translations are read.
            batch_size: Maximum number of texts in a batch; 1 also turns reading ahead off.
            **kwargs: `tokens_per_batch`, and settings of `generate`.

        Returns:
            For a text, `num_return_sequences` mappings with `translation_text`. For a list, one
            mapping for each text, or a list of mappings if `num_return_sequences` is above 1.
            Otherwise an iterator over the results of the single texts.

        Raises:
            TypeError: If the inputs are not texts.
            ValueError: If a text is too long for the model or has a token outside its vocabulary,
                or a setting is invalid.
        """
        prepare, search, _ = self._sanitize_parameters(**kwargs)
        batching = {
            "batch_size": self._batch_size if batch_size is None else batch_size,
            **self._preprocess_params,
            **prepare,
        }
        search = {**self._forward_params, **search}
        for name, size in batching.items():
            if size is None and name == "batch_size":
                continue
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}.")
        if isinstance(inputs, str):
            return self._translate([inputs], batching, search)[0]
        if isinstance(inputs, list | tuple):
            results = self._translate(list(inputs), batching, search)
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
        return self._stream(inputs, batching, search)

    def preprocess(self, input_: list[str]) -> list[list[int]]:
        """Turn texts into token ids, and refuse texts that the model cannot read.

        Args:
            input_: Texts.

        Returns:
            Token ids of each text.

        Raises:
            TypeError: If a text is not a string.
            ValueError: If a text is too long, has a token outside the model's vocabulary, or has
                an unpaired surrogate, which is not valid Unicode.
        """
        for text in input_:
            if not isinstance(text, str):
                raise TypeError(
                    f"each text must be a string, got {type(text).__name__} "
                    f"({_shortened(text)}). KeyDataset(dataset, column) takes a dataset's column."
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"each text must be valid Unicode, got an unpaired surrogate at index "
                    f"{error.start}: {_shortened(text)}."
                ) from None
        if not input_:
            return []
        ids = self.tokenizer(input_)["input_ids"]
        longest = max_source_tokens(self.model.config)
        vocab_size = self.model.get_input_embeddings().num_embeddings
        for text, text_ids in zip(input_, ids, strict=True):
            if longest is not None and len(text_ids) > longest:
                raise ValueError(
                    f"a text must have at most {longest} tokens, the number of positions of the "
                    f"model, got {len(text_ids)}: {_shortened(text)}."
                )
            if text_ids and max(text_ids) >= vocab_size:
                raise ValueError(
                    f"token ids must be below the model's vocabulary size {vocab_size}, "
                    f"got {max(text_ids)}: {_shortened(text)}."
                )
        return ids

    def _forward(self, input_tensors: dict[str, Tensor], **search) -> dict[str, Tensor]:
        with evaluating(self.model):
            output = self.model.generate(**input_tensors, **search)
        return {"ids": output if isinstance(output, Tensor) else output.sequences}

    def postprocess(self, model_outputs: dict[str, Tensor]) -> list[dict[str, str]]:
        """Turn the ids of translations into text.

        Args:
            model_outputs: `ids`, token ids of the translations, [translations, T].

        Returns:
            A mapping with `translation_text` for each translation.
        """
        texts = self.tokenizer.batch_decode(model_outputs["ids"], skip_special_tokens=True)
        return [{"translation_text": text} for text in texts]

    def _sanitize_parameters(self, **parameters) -> tuple[dict, dict, dict]:
        batching = {
            name: parameters.pop(name) for name in ("tokens_per_batch",) if name in parameters
        }
        return batching, parameters, {}

    def _stream(
        self, texts: Iterable[str], batching: dict[str, Any], search: dict[str, Any]
    ) -> Iterator[list[dict[str, str]]]:
        window = TEXTS_PER_WINDOW if batching["batch_size"] != 1 else 1
        texts = iter(texts)
        while read := list(islice(texts, window)):
            yield from self._translate(read, batching, search)

    def _translate(
        self, texts: list[str], batching: dict[str, Any], search: dict[str, Any]
    ) -> list[list[dict[str, str]]]:
        """Return the translations of each text, in the order of the texts."""
        ids = self.preprocess(texts)
        # the argument, else the given configuration, else that of the model, else 1
        configs = (search.get("generation_config"), self.model.generation_config)
        counts = (getattr(config, "num_return_sequences", None) for config in configs)
        search = dict(search)
        given = search.get("num_return_sequences")
        if given is None:
            search.pop("num_return_sequences", None)
        count = next(filter(None, counts), 1) if given is None else given
        if type(count) is not int or count < 1:
            raise ValueError(
                f"num_return_sequences must be a whole number of at least 1, got {count!r}."
            )
        # the translation of an empty text is empty; each batch overwrites the results of its texts
        results = [[{"translation_text": ""} for _ in range(count)] for _ in texts]
        filled = [index for index, text in enumerate(texts) if text.strip()]
        lengths = {index: len(ids[index]) for index in filled}
        for batch in batches_by_length(lengths, **batching):
            # the first token of a source must have the first position
            inputs = self.tokenizer.pad(
                {"input_ids": [ids[index] for index in batch]},
                padding_side="right",
                return_tensors="pt",
            )
            inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            translations = self.postprocess(self.forward(inputs, **search))
            for row, index in enumerate(batch):
                results[index] = translations[row * count : (row + 1) * count]
        return results


# `save_pretrained` of the library reads this attribute, and copies this file beside the model
TranslationPipeline._registered_impl = {
    TASK: {"impl": TranslationPipeline, "pt": (AutoModelForSeq2SeqLM,), "type": "text"}
}


# model in evaluation mode -> number of threads that use it, training mode of each module before
_EVALUATED: dict[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]] = {}
_EVALUATED_LOCK = Lock()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep a model in evaluation mode, and restore the mode of each of its modules at the end.

    If several threads use the model, the last one restores the modes.

    Args:
        model: Any model.
    """
    with _EVALUATED_LOCK:
        count, before = _EVALUATED.get(model, (0, []))
        if not count:
            before = [(module, module.training) for module in model.modules()]
            model.eval()
        _EVALUATED[model] = (count + 1, before)
    try:
        yield
    finally:
        with _EVALUATED_LOCK:
            count, before = _EVALUATED.pop(model)
            if count > 1:
                _EVALUATED[model] = (count - 1, before)
            else:
                if before[0][1]:
                    # `train` also discards the weights that the inference engine has packed
                    model.train()
                # modules of the model may have been in different modes
                for module, training in before:
                    module.training = training


def batches_by_length(
    lengths: Mapping[int, int],
    batch_size: int | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[list[int]]:
    """Group texts of similar length into batches.

    Args:
        lengths: Number of tokens of each text, by the index of the text.
        batch_size: Maximum number of texts in a batch; None for no maximum.
        tokens_per_batch: Maximum number of tokens in a batch, with padding; a longer text is a
            batch of its own.

    Returns:
        The indices of each batch, longest texts first: a batch that does not fit into memory fails
        early.
    """
    batches: list[list[int]] = []
    for index in sorted(lengths, key=lengths.__getitem__, reverse=True):
        # the first text of a batch is its longest
        if (
            not batches
            or len(batches[-1]) == batch_size
            or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > tokens_per_batch
        ):
            batches.append([])
        batches[-1].append(index)
    return batches


def max_source_tokens(config: PreTrainedConfig) -> int | None:
    """Return the maximum length of a source.

    Args:
        config: Configuration of any encoder-decoder.

    Returns:
        Number of tokens, or None without a maximum, as with our sinusoids.
    """
    if getattr(config, "position_encoding", "learned") != "learned":
        return None
    return getattr(config, "max_position_embeddings", None)


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None):
    """Refuse a model that cannot translate, and a tokenizer that is not the model's.

    Args:
        model: Any model.
        tokenizer: Any tokenizer.

    Raises:
        ValueError: If the model has no decoder or no head, or the tokenizer is missing, has tokens
            outside the model's vocabulary, or has other ids for special tokens.
    """
    name = type(model).__name__
    if not (model.config.is_encoder_decoder and model.can_generate()):
        raise ValueError(
            f"model must be an encoder-decoder with a language model head, got {name}."
        )
    if tokenizer is None:
        raise ValueError(f"tokenizer must be given: {name} reads token ids, got None.")
    vocab_size = model.get_input_embeddings().num_embeddings
    highest = max(tokenizer.get_vocab().values())
    if highest >= vocab_size:
        raise ValueError(
            f"tokenizer must be the model's own: the ids of the tokenizer go up to {highest}, "
            f"those of the model to {vocab_size - 1}."
        )
    for field in ("pad_token_id", "eos_token_id"):
        model_id, tokenizer_id = getattr(model.config, field, None), getattr(tokenizer, field)
        if tokenizer_id is None and field == "eos_token_id":
            # some tokenizers, such as BERT's, have no eos_token_id
            continue
        allowed = model_id if isinstance(model_id, list) else [model_id]
        if model_id is not None and tokenizer_id not in allowed:
            raise ValueError(
                f"tokenizer must be the model's own: {field} of the tokenizer is "
                f"{tokenizer_id}, of the model {model_id}."
            )


def register_translation_task():
    """Make `pipeline("translation", model=...)` build a `TranslationPipeline`.

    The library refuses removed tasks before it looks for registered ones. So the name is deleted
    from its list of removed tasks.
    """
    from transformers.pipelines import PIPELINE_REGISTRY, REMOVED_TASKS

    REMOVED_TASKS.pop(TASK, None)
    PIPELINE_REGISTRY.supported_tasks.update(TranslationPipeline._registered_impl)
    # a model on the Hub names its copy of this file in `custom_pipelines`, and the library would
    # ask to trust the copy, although this package is installed. So the property is always empty
    # when it is read; the setter stores the value, which is then saved
    VanillaTransformerConfig.custom_pipelines = property(
        lambda self: {},
        lambda self, value: vars(self).__setitem__("custom_pipelines", value),
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


__all__ = ["TranslationPipeline", "register_translation_task"]
