"""Checks of arguments, ids, search settings and tokenizers; each error names what is wrong."""

import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_vanilla_transformer import closest_name

# arguments that transformers passes to every `forward`, for its decorators, the loss or the head
LIBRARY_ARGUMENTS = (
    "logits_to_keep",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "use_cache",
)
# arguments of `forward` of the released model, of its stacks and of their layers
RELEASED_ARGUMENTS = (
    "attention_mask",
    "cache",
    "decoder_attention_mask",
    "decoder_input_ids",
    "decoder_inputs_embeds",
    "encoder_attention_mask",
    "encoder_hidden_states",
    "encoder_outputs",
    "input_ids",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "mask",
    "memory",
    "memory_mask",
    "past_key_values",
    "use_cache",
    "x",
)
# settings that this package adds to a generation configuration
SEARCH_FIELDS = ("length_penalty_alpha", "max_extra_tokens", "precision", "int8", "engine")
ENGINES = ("auto", "off", "required")
# precisions in which a CPU can compute the linear layers of a search
SEARCH_PRECISIONS = ("fp32", "bf16")
# minimum of each integer setting in a generation configuration
MINIMUM_OF_SETTING = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "min_length": 0,
    "max_length": 1,
    "max_extra_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "top_k": 0,
}
# default `max_length` of transformers, which no user has set
LIBRARY_MAX_LENGTH = GenerationConfig()._get_default_generation_params()["max_length"]
# largest absolute value of `length_penalty_alpha`: a translation of thousands of tokens still has a
# finite score
MAX_LENGTH_PENALTY_ALPHA = 10
# settings of a generation configuration that may be any finite number
NUMBER_SETTINGS = (
    "length_penalty_alpha",
    "length_penalty",
    "temperature",
    "top_p",
    "repetition_penalty",
)
# settings for tokens that the decoder reads or that the search forces
TOKEN_SETTINGS = (
    "decoder_start_token_id",
    "bos_token_id",
    "pad_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)

logger = logging.getLogger(__name__)


def check_arguments(
    model: PreTrainedModel, arguments: Mapping[str, Any], eager_attention: Callable
):
    """Refuse arguments that neither `forward` nor a layer nor the attention function reads.

    Args:
        model: Stack whose `forward` received the arguments.
        arguments: Values by name; None means that the argument was not given.
        eager_attention: The model's own attention function.

    Raises:
        TypeError: If an argument is unknown; the message names the closest known argument.
    """
    given_names = [name for name, it in arguments.items() if it is not None]
    unknown_names = [name for name in given_names if name not in LIBRARY_ARGUMENTS]
    if not unknown_names:
        return
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(
        model.config._attn_implementation, eager_attention
    )
    parameters = inspect.signature(attention).parameters
    accepted_names = [name for name, it in parameters.items() if it.kind != it.VAR_KEYWORD]
    accepts_others = len(accepted_names) < len(parameters)
    # these two functions ignore further keyword arguments; other functions may read those that they
    # accept
    if accepts_others and attention not in (eager_attention, sdpa_attention_forward):
        return
    accepted_names += sorted(own_arguments(model))
    known_names = [*inspect.signature(type(model).forward).parameters, *accepted_names]
    for name in unknown_names:
        if name not in accepted_names:
            raise TypeError(
                f"{type(model).__name__}.forward got the unknown argument {name!r}; its "
                f"attention function does not accept it either.{closest_name(name, known_names)}"
            )


def own_arguments(model: nn.Module) -> set[str]:
    """Return the arguments of `forward` that the released model does not have.

    Args:
        model: Whole model, or one of its stacks, whose layers receive further arguments.

    Returns:
        Names that `forward` of the model or of a layer declares. Modules in a layer count too if
        they accept any argument, as attentions do.
    """
    names = set()
    layers = getattr(model, "layers", ())
    layers = list(layers) if isinstance(layers, Iterable) else []
    for module in (model, *itertools.chain.from_iterable(layer.modules() for layer in layers)):
        parameters = _parameters_of(module.forward)
        is_reached = module is model or module in layers
        if is_reached or any(it.kind == it.VAR_KEYWORD for it in parameters):
            names |= {
                it.name
                for it in parameters
                if it.kind == it.KEYWORD_ONLY
                or it.default is not it.empty
                # a layer gets such an argument by its position
                or (module is model and it.kind == it.POSITIONAL_OR_KEYWORD)
            }
    return names.difference(RELEASED_ARGUMENTS)


def _parameters_of(forward: Callable) -> Iterable[inspect.Parameter]:
    # a method is another object at each access, but its function is not. Other callables are not
    # cached, because they may hold a model
    if inspect.ismethod(forward):
        return _parameters_of_function(forward.__func__)[1:]
    return inspect.signature(forward).parameters.values()


@functools.cache
def _parameters_of_function(function: Callable) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


def arguments_of_stack(
    stack: nn.Module, other_stack: nn.Module, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Leave out arguments that only the other stack of a model declares.

    Args:
        stack: Encoder or decoder.
        other_stack: Decoder or encoder.
        arguments: Values by name, of both stacks.

    Returns:
        Values by name, for `stack`, which returns an output object for them.
    """
    if all(name in LIBRARY_ARGUMENTS for name in arguments):
        return with_output_object(stack, arguments)
    other_names = own_arguments(other_stack) - own_arguments(stack)
    stack_arguments = {name: value for name, value in arguments.items() if name not in other_names}
    return with_output_object(stack, stack_arguments)


def with_output_object(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Add the argument with which a model returns an output object, if its default is a tuple.

    Args:
        model: Whole model or one of its stacks, of any class.
        arguments: Values by name, for the model.

    Returns:
        Values by name, with `return_dict` only if the model would return a tuple without it.
    """
    returns_tuple = getattr(getattr(model, "config", None), "return_dict", True) is False
    return {**arguments, "return_dict": True} if returns_tuple else dict(arguments)


def check_search_settings(config: GenerationConfig):
    """Refuse invalid search settings, and settings that contradict each other.

    Args:
        config: Generation configuration with all fields of `SEARCH_FIELDS`.

    Raises:
        ValueError: If a value is invalid or out of range, two length penalties are given, or the
            paper's beam search is combined with a setting that it does not support.
    """
    alpha = config.length_penalty_alpha
    engine_precision(vars(config))
    if config.engine is not None and config.engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {config.engine!r}.")
    check_numbers(vars(config))
    beams = config.num_beams
    if alpha is None:
        return
    if abs(alpha) > MAX_LENGTH_PENALTY_ALPHA:
        raise ValueError(
            f"length_penalty_alpha must be from -{MAX_LENGTH_PENALTY_ALPHA} to "
            f"{MAX_LENGTH_PENALTY_ALPHA}, got {alpha}."
        )
    if config.length_penalty not in (None, 1.0):
        raise ValueError(
            "length_penalty and length_penalty_alpha are two length penalties: give one, got "
            f"{config.length_penalty} and {alpha}; length_penalty_alpha=None selects the search of "
            "transformers."
        )
    if config.early_stopping is True:
        raise ValueError(
            "early_stopping must not be True with length_penalty_alpha, whose search stops when no "
            "open hypothesis can still win; length_penalty_alpha=None selects the search of "
            "transformers."
        )
    if config.eos_token_id is None and beams is not None and beams > 1:
        raise ValueError("eos_token_id must be set for length_penalty_alpha, got None.")


def check_mode(
    mode: GenerationMode, config: GenerationConfig, num_sentences: int, has_streamer: bool
):
    """Refuse searches that the library refuses too late, or only in some cases.

    Args:
        mode: Kind of search.
        config: Settings of the search.
        num_sentences: Number of sentences in the batch.
        has_streamer: Whether a streamer receives the tokens.

    Raises:
        ValueError: If several sentences are given for assisted decoding, or several beams with a
            streamer.
    """
    if mode == GenerationMode.ASSISTED_GENERATION and num_sentences > 1:
        # the library refuses a batch only after the assistant has encoded it
        raise ValueError(
            f"assisted decoding takes one sentence at a time, got a batch of {num_sentences}."
        )
    if has_streamer and (config.num_beams or 1) > 1:
        # the library refuses this only without sampling
        raise ValueError(f"num_beams must be 1 with a streamer, got {config.num_beams}.")


def engine_precision(settings: Mapping[str, Any]) -> str | None:
    """Return the precision that search settings select for the linear layers.

    Args:
        settings: Search settings by name.

    Returns:
        "fp32", "bf16" or "int8"; None for the precision of the model's weights.

    Raises:
        ValueError: If `int8` or `precision` has another value, or both are set.
    """
    int8, precision = settings.get("int8"), settings.get("precision")
    if int8 not in (None, True, False):
        raise ValueError(f"int8 must be True or False, got {int8!r}.")
    if precision is not None and precision not in SEARCH_PRECISIONS:
        raise ValueError(
            f"precision must be one of {', '.join(SEARCH_PRECISIONS)}, got {precision!r}."
        )
    if int8 and precision is not None:
        raise ValueError(f"precision must not be given with int8, got {precision!r}.")
    return "int8" if int8 else precision


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer, of Python or of NumPy.

    Args:
        value: Value of a setting.
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def plain_numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers of NumPy and torch, some of which transformers refuses, by those of Python.

    Args:
        settings: Search settings and inputs by name.

    Returns:
        Settings by name; arrays, and tensors that are inputs, stay as they are.
    """
    return {
        name: value.item() if _is_number_of_library(name, value) else value
        for name, value in settings.items()
    }


def _is_number_of_library(name: str, value: Any) -> bool:
    is_number = type(value).__module__ == "numpy" or (
        isinstance(value, Tensor) and name in (*MINIMUM_OF_SETTING, *NUMBER_SETTINGS)
    )
    return is_number and value.shape == ()


def check_numbers(settings: Mapping[str, Any]):
    """Refuse numeric search settings of a wrong type or out of range.

    Args:
        settings: Search settings by name; settings that are missing or None are not checked.

    Raises:
        ValueError: If a setting is of another type or out of range.
    """
    for name, minimum in MINIMUM_OF_SETTING.items():
        value = settings.get(name)
        if value is not None and not (is_whole(value) and value >= minimum):
            raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}.")
        # the sum of two such numbers fits into int64
        if value is not None and value >= 2**62:
            raise ValueError(f"{name} must be below {2**62}, got {value}.")
    for name in NUMBER_SETTINGS:
        value = settings.get(name)
        if value is None:
            continue
        # the comparison is false for NaN too, so NaN is refused
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max:
            raise ValueError(f"{name} must be a number, got {value!r}.")


def vocab_size_of(model: Any) -> int:
    """Return the number of tokens that a model or a stack reads.

    Args:
        model: Encoder, decoder or whole model, whose embedding may be of any class.

    Returns:
        Number of rows of the embedding. If the embedding has no `num_embeddings`, the maximum of
        `vocab_size` in the configuration and the rows of the largest table in the embedding.
    """
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        # the encoder or the decoder may be a plain module of torch
        embedding = model
    num_rows = getattr(embedding, "num_embeddings", None)
    if num_rows is not None:
        return num_rows
    tables = [module for module in embedding.modules() if isinstance(module, nn.Embedding)]
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", 0)
    # without any number, no id is too large
    return max([vocab_size, *(table.num_embeddings for table in tables)]) or sys.maxsize


def check_search_tokens(config: GenerationConfig, vocab_size: int):
    """Refuse special tokens that are not in the vocabulary.

    Args:
        config: Generation configuration.
        vocab_size: V.

    Raises:
        ValueError: If a token is not in the vocabulary. A negative `eos_token_id` is allowed: as in
            transformers, it ends no sequence.
    """
    for name in (*TOKEN_SETTINGS, "eos_token_id"):
        setting = getattr(config, name, None)
        minimum = None if name == "eos_token_id" else 0
        ids = setting.flatten().tolist() if isinstance(setting, Tensor) else setting
        for token_id in ids if isinstance(ids, list | tuple) else [ids]:
            if token_id is None:
                continue
            is_valid = is_whole(token_id) and (minimum is None or token_id >= minimum)
            if not is_valid or token_id >= vocab_size:
                rule = "an integer" if minimum is None else "at least 0 and"
                raise ValueError(
                    f"{name} must be {rule} below the vocabulary size {vocab_size}, got "
                    f"{token_id!r}."
                )


def check_terms(
    terms: Sequence[Sequence[Sequence[int]]],
    config: GenerationConfig,
    num_sentences: int,
    vocab_size: int,
):
    """Refuse terms that a translation cannot contain.

    Args:
        terms: For each sentence, its terms as lists of token ids.
        config: Settings of the search.
        num_sentences: B.
        vocab_size: V.

    Raises:
        ValueError: If there are not as many lists as sentences, a term has no token or a token
            outside the vocabulary, or the search samples or has no end token.
    """
    if len(terms) != num_sentences:
        raise ValueError(
            f"required_tokens must have a list of terms for each of the {num_sentences} sentences, "
            f"got {len(terms)}."
        )
    for term in itertools.chain.from_iterable(terms):
        if not term or not all(is_whole(token) and 0 <= token < vocab_size for token in term):
            raise ValueError(
                "each term of required_tokens must have token ids of at least 0 and below the "
                f"vocabulary size {vocab_size}, got {term!r}."
            )
    if config.do_sample:
        raise ValueError("do_sample must be False with required terms, got True.")
    if config.eos_token_id is None:
        raise ValueError("eos_token_id must be set for required terms, got None.")


def check_inputs(model: PreTrainedModel, inputs: Mapping[str, Any]):
    """Refuse inputs that the model cannot read together.

    Args:
        model: Model of this package.
        inputs: Inputs of the model.

    Raises:
        ValueError: If the batch is empty, an input has another number of dimensions, an id is not
            in the vocabulary, inputs are of different sizes, or a source is padded on the left.
    """
    has_encoder_outputs = inputs.get("encoder_outputs") is not None
    # with encoder outputs, `input_ids` are not read
    stacks = {} if has_encoder_outputs else {"input_ids": model.get_encoder()}
    stacks["decoder_input_ids"] = model.get_decoder()
    for name, stack in stacks.items():
        if inputs.get(name) is not None:
            check_ids(name, inputs[name], vocab_size_of(stack))
            if inputs[name].dim() != 2:
                raise ValueError(f"{name} must be [B, T], got {list(inputs[name].shape)}.")
    source_names = ("encoder_outputs",) if has_encoder_outputs else ("input_ids", "inputs_embeds")
    source_name = next((name for name in source_names if inputs.get(name) is not None), None)
    if source_name is None:
        return
    source = inputs[source_name]
    if has_encoder_outputs:
        source = next(iter(source.to_tuple()), None)
        if not isinstance(source, Tensor) or source.dim() != 3:
            found = list(source.shape) if isinstance(source, Tensor) else type(source).__name__
            raise ValueError(
                "encoder_outputs must begin with the output of the last layer, [B, S, d_model], "
                f"got {found}."
            )
    mask, prompt = inputs.get("attention_mask"), inputs.get("decoder_input_ids")
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask must be a tensor, got {type(mask).__name__}.")
    if mask is not None and mask.dim() < 2:
        raise ValueError(f"attention_mask must be [B, S], got {list(mask.shape)}.")
    for name, tensor, sizes in (
        ("attention_mask", mask, list(source.shape[:2])),
        ("decoder_input_ids", prompt, list(source.shape[:1])),
    ):
        # attention masks of other dimensions are for the modules
        if tensor is None or tensor.dim() != 2:
            continue
        found_sizes = list(tensor.shape[: len(sizes)])
        if found_sizes != sizes:
            raise ValueError(
                f"{name} must have the sizes {sizes} of {source_name}, got {found_sizes}."
            )
    # the output of an encoder already contains the positions
    has_positions = model.config.position_encoding != "none"
    if mask is None or mask.dim() != 2 or has_encoder_outputs or not has_positions:
        return
    if bool(((mask[:, 0] == 0) & (mask != 0).any(dim=1)).any()):
        raise ValueError(
            "attention_mask must have padding only on the right, because positions are counted "
            "from the first column, got a row that begins with 0: tokenize with "
            "padding_side='right'."
        )


def check_length(config: Any, length: int, noun: str):
    """Refuse a sequence that is longer than the learned positions.

    Args:
        config: Configuration of the model.
        length: Number of tokens of the longest sequence.
        noun: Name of the sequence, for the error.

    Raises:
        ValueError: If the model has fewer learned positions than the sequence has tokens.
    """
    if config.position_encoding == "learned" and length > config.max_position_embeddings:
        raise ValueError(
            f"A {noun} must have at most {config.max_position_embeddings} tokens, the number of "
            f"learned positions, got {length}."
        )


def check_ids(name: str, ids: Any, vocab_size: int):
    """Refuse ids that are not in the vocabulary.

    Args:
        name: Name of the argument, for the error.
        ids: Token ids, [B, T].
        vocab_size: V.

    Raises:
        ValueError: If the ids are not a tensor of integers, there are none, or an id is not in the
            vocabulary.
    """
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"{name} must be a tensor of integers, [B, T], got "
            f"{ids.dtype if isinstance(ids, Tensor) else type(ids).__name__}."
        )
    if ids.numel() == 0:
        raise ValueError(
            f"{name} must hold at least one sentence of one token, got {list(ids.shape)}."
        )
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{name} must be at least 0 and below the vocabulary size {vocab_size}, got "
            f"{lowest if lowest < 0 else highest}."
        )


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None):
    """Refuse a model that cannot translate, and a tokenizer that does not belong to the model.

    Args:
        model: Any model.
        tokenizer: Any tokenizer.

    Raises:
        ValueError: If the model has no decoder or no head, or the tokenizer is missing, has tokens
            outside the model's vocabulary, or has other ids for special tokens.
    """
    model_name = type(model).__name__
    if not (model.config.is_encoder_decoder and model.can_generate()):
        raise ValueError(
            f"model must be an encoder-decoder with a language model head, got {model_name}."
        )
    if tokenizer is None:
        raise ValueError(f"tokenizer must be given: {model_name} reads token ids, got None.")
    vocab_size = vocab_size_of(model)
    highest_id = max(tokenizer.get_vocab().values())
    if highest_id >= vocab_size:
        raise ValueError(
            f"tokenizer must be the model's own: the ids of the tokenizer go up to {highest_id}, "
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


@functools.cache
def warn_once(message: str, *values: str):
    """Warn once per process and values, because a program may search or save many times.

    Args:
        message: Warning, with a `%s` for each value.
        values: Values in the warning.
    """
    logger.warning(message, *values)
