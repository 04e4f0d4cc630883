"""Text in, text out: the translation pipeline that version 5 of transformers no longer has.

The search is the model's own `generate`; this file turns texts into batches and ids into texts. It
travels to the Hub beside the model, whose `custom_pipelines` then name it.
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
# source tokens of a batch, padding included
TOKENS_PER_BATCH = 4096
# texts read ahead from what has no end in sight, to sort them by length
TEXTS_PER_WINDOW = 256


class TranslationPipeline(Pipeline):
    """Translates texts with any encoder-decoder model and its tokenizer.

    `TranslationPipeline(model, tokenizer)("Hello")` gives `[{"translation_text": ...}]`. A list
    gives one such mapping for each text, a generator or a dataset an iterator over what each text
    alone would give. Texts of like length are searched together, whatever the order given.

    Settings of `generate` (`num_beams`, `length_penalty_alpha`, `num_return_sequences` ...) may be
    given here, for every call, or with the texts.

    Args:
        model: A model with a decoder and a head.
        tokenizer: The model's own.
        batch_size: Number of texts searched together at most.
        tokens_per_batch: Number of source tokens, with padding, searched together at most; a
            longer text is searched alone.
        **kwargs: As for every pipeline of the library, `device` for one, and settings of
            `generate`.

    Raises:
        ValueError: If the model cannot translate, or the tokenizer is not the model's.
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

    def __call__(
        self, inputs: str | Iterable[str], batch_size: int | None = None, **kwargs
    ) -> list[dict[str, str]] | list[list[dict[str, str]]] | Iterator[list[dict[str, str]]]:
        """Translate.

        Args:
            inputs: A text, a list of texts, or a generator, dataset or other iterable of texts,
                which is read only as far as its translations are asked for.
            batch_size: Number of texts searched together at most; 1 also stops reading ahead.
            **kwargs: `tokens_per_batch`, and settings of `generate`.

        Returns:
            For a text, its translations, one mapping with `translation_text` for each of
            `num_return_sequences`; for a list, one mapping for each text, or a list of them where
            several translations were asked for; else an iterator over what each text alone gives.

        Raises:
            TypeError: If the inputs are not texts.
            ValueError: If a text is too long for the model, or has a token it does not know.
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
            # torch's datasets have items, but are no iterables in the eyes of Python
            if not isinstance(inputs, torch.utils.data.Dataset):
                raise TypeError(
                    "inputs must be a string, or a list, generator or dataset of strings, "
                    f"got {type(inputs).__name__}."
                )
            dataset = inputs
            inputs = (dataset[index] for index in range(len(dataset)))
        return self._stream(inputs, batching, search)

    def preprocess(self, input_: list[str]) -> list[list[int]]:
        """Turn texts into token ids, and refuse what the model cannot read.

        Args:
            input_: Texts.

        Returns:
            The ids of each.

        Raises:
            TypeError: If one is not a string.
            ValueError: If one is too long, or has a token that the model does not know.
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
                    f"each text must be whole characters, got half of one ({error.reason}) at "
                    f"place {error.start}: {_shortened(text)}."
                ) from None
        if not input_:
            return []
        ids = self.tokenizer(input_)["input_ids"]
        longest = max_source_tokens(self.model.config)
        vocab_size = self.model.get_input_embeddings().num_embeddings
        for text, text_ids in zip(input_, ids, strict=True):
            if longest is not None and len(text_ids) > longest:
                raise ValueError(
                    f"a text must have at most {longest} tokens, the number of positions that the "
                    f"model knows, got {len(text_ids)}: {_shortened(text)}."
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
            model_outputs: `ids`, [translations, T].

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
        """Translations of each text, in the order of the texts."""
        ids = self.preprocess(texts)
        # what a configuration leaves open, the model's own decides
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
        # nothing is translated by nothing; each batch overwrites the places of its texts
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
            for place, index in enumerate(batch):
                results[index] = translations[place * count : (place + 1) * count]
        return results


# by this the library's `save_pretrained` knows to put this file beside the model
TranslationPipeline._registered_impl = {
    TASK: {"impl": TranslationPipeline, "pt": (AutoModelForSeq2SeqLM,), "type": "text"}
}


# models that are in evaluation mode for a while: how many threads want it, and the modes before
_EVALUATED: dict[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]] = {}
_EVALUATED_LOCK = Lock()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode, and give each of its parts the mode before at the end.

    With several threads at once, the last one to leave does so.

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
                    model.train()
                # some of its parts may have been in another mode
                for module, training in before:
                    module.training = training


def batches_by_length(
    lengths: Mapping[int, int],
    batch_size: int | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[list[int]]:
    """Put texts of like length together.

    Args:
        lengths: Number of tokens of each text, by its index.
        batch_size: Number of texts in a batch at most; None for any.
        tokens_per_batch: Number of tokens in a batch at most, shorter texts counted as long as the
            longest; a text longer than this is a batch of its own.

    Returns:
        The indices of each batch. The longest come first: what does not fit fails early.
    """
    batches: list[list[int]] = []
    for index in sorted(lengths, key=lengths.__getitem__, reverse=True):
        # the first of a batch is its longest
        if (
            not batches
            or len(batches[-1]) == batch_size
            or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > tokens_per_batch
        ):
            batches.append([])
        batches[-1].append(index)
    return batches


def max_source_tokens(config: PreTrainedConfig) -> int | None:
    """The longest source that a model can read.

    Args:
        config: Of any encoder-decoder.

    Returns:
        A number of tokens, or None where there is no limit, as for our sinusoids.
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
        ValueError: If the model has no decoder or no head, the tokenizer is missing, has tokens
            beyond the model's vocabulary, or special tokens of other ids.
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
            f"tokenizer must be the model's own: its ids go up to {highest}, "
            f"the model's only to {vocab_size - 1}."
        )
    for token in ("pad_token_id", "eos_token_id"):
        known = getattr(model.config, token, None)
        allowed = known if isinstance(known, list) else [known]
        given = getattr(tokenizer, token)
        if given is None and token == "eos_token_id":
            # a few tokenizers call theirs something else
            continue
        if known is not None and given not in allowed:
            raise ValueError(
                f"tokenizer must be the model's own: its {token} is {given}, the model's {known}."
            )


def register_translation_task():
    """Make `pipeline("translation", model=...)` build a `TranslationPipeline`.

    The library refuses the name before it looks at what is registered, so the name leaves the list
    of removed tasks.
    """
    from transformers.pipelines import PIPELINE_REGISTRY, REMOVED_TASKS

    REMOVED_TASKS.pop(TASK, None)
    PIPELINE_REGISTRY.supported_tasks.update(TranslationPipeline._registered_impl)
    # a model from the Hub names the pipeline's file there, and the library would ask to trust that
    # code where the same is installed; what is set still reaches the saved file
    VanillaTransformerConfig.custom_pipelines = property(
        lambda self: {},
        lambda self, value: vars(self).__setitem__("custom_pipelines", value),
    )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


__all__ = ["TranslationPipeline", "register_translation_task"]
