"""Steps that conversions share: rename weights, build the model, load weights, set its search."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import (
    LAYER_FIELDS,
    TOKEN_ID_FIELDS,
    VanillaTransformerConfig,
)
from ..generation_vanilla_transformer import set_paper_search
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..sizes import FLOAT32_BYTES, num_weights, refuse_beyond_memory, refuse_impossible
from ..weight_checks import check_fit

Value = TypeVar("Value")
# converted model, its tokenizer or None, and a text about the tokenizer
Converted = tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase | None, str]
# pieces of weight names in BART, Marian, FSMT and M2M100, and our pieces
BART_RENAMES = {
    ".self_attn.": ".self_attention.",
    ".self_attn_layer_norm.": ".self_attention_norm.",
    ".encoder_attn.": ".cross_attention.",
    ".encoder_attn_layer_norm.": ".cross_attention_norm.",
    ".final_layer_norm.": ".feed_forward_norm.",
    ".layer_norm.": ".norm.",
    ".fc1.": ".feed_forward.fc1.",
    ".fc2.": ".feed_forward.fc2.",
}

# fields with the same name and meaning in our configuration and in those of Marian, FSMT and M2M100
SAME_FIELDS = (
    *LAYER_FIELDS,
    "max_position_embeddings",
    "activation_function",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    *TOKEN_ID_FIELDS,
)

# settings of `generate` that contain token ids
TOKEN_SETTINGS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "pad_token_id",
    "sequence_bias",
    "suppress_tokens",
)
# settings of `generate` that say which tokens may follow, without token ids
NUMERIC_TOKEN_SETTINGS = (
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "repetition_penalty",
)


def rename_weights(weights: dict[str, Tensor], renames: dict[str, str]) -> dict[str, Tensor]:
    """Rename the weights of another model to our names.

    Args:
        weights: Tensors by the other model's names.
        renames: Pieces of the other model's names, and our pieces; replaced in this order.

    Returns:
        The same tensors by our names.
    """
    renamed_weights = {}
    for name, tensor in weights.items():
        for other_piece, our_piece in renames.items():
            name = name.replace(other_piece, our_piece)
        renamed_weights[name] = tensor
    return renamed_weights


def layer_weights(model: nn.Module, stack: str) -> dict[str, Tensor]:
    """Return the layer weights of one stack of a model that uses BART's names.

    Args:
        model: Model with `model.encoder.layers` and `model.decoder.layers`.
        stack: "encoder" or "decoder".

    Returns:
        Tensors by our names.
    """
    prefix = f"model.{stack}.layers."
    bart_weights = {
        name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)
    }
    return rename_weights(bart_weights, BART_RENAMES)


def bart_fields(bart_config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of our configuration for a Marian, FSMT or M2M100 model.

    Args:
        bart_config: Configuration of the other model.

    Returns:
        Our fields, without `vocab_size`.

    Raises:
        ValueError: If the embeddings are not scaled, or encoder and decoder have different numbers
            of heads.
    """
    if not bart_config.scale_embedding:
        raise ValueError(
            "scale_embedding must be true: section 3.4 multiplies by sqrt(d_model), got false."
        )
    encoder_heads, decoder_heads = (
        bart_config.encoder_attention_heads,
        bart_config.decoder_attention_heads,
    )
    if encoder_heads != decoder_heads:
        raise ValueError(
            "encoder_attention_heads and decoder_attention_heads must be equal, for heads of one "
            f"width, got {encoder_heads} and {decoder_heads}."
        )
    return {name: getattr(bart_config, name) for name in SAME_FIELDS} | {
        "hidden_size": bart_config.d_model,
        "position_layout": "halves",
        "attention_bias": True,
    }


def split_projections(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split each fused projection [3 d_model, d_model] into the ones for query, key and value.

    Args:
        weights: Tensors by name; the fused ones are called `in_proj_weight` and `in_proj_bias`.

    Returns:
        The tensors by name, with three in place of each fused one.
    """
    split_weights = {}
    for name, tensor in weights.items():
        if "in_proj_" not in name:
            split_weights[name] = tensor
            continue
        attention, weight_or_bias = name.split("in_proj_")
        for letter, projection in zip("qkv", tensor.chunk(3), strict=True):
            split_weights[f"{attention}{letter}_proj.{weight_or_bias}"] = projection
    return split_weights


def number_of_layers(weights: dict[str, Tensor], prefix: str) -> int:
    """Count the layers of a stack.

    Args:
        weights: Tensors by the other model's names.
        prefix: Beginning of the weights' names, before the index of the layer.

    Returns:
        The number of layers.
    """
    layers = {name[len(prefix) :].split(".")[0] for name in weights if name.startswith(prefix)}
    return len(layers)


def required_entry(entries: dict[str, Value], name: str, origin: str) -> Value:
    """Return a weight or a setting that must exist.

    Args:
        entries: Weights or settings by the other model's names.
        name: Name of the entry.
        origin: Description of the entries, for the error.

    Returns:
        The weight or setting.

    Raises:
        ValueError: If there is no such entry.
    """
    if name not in entries:
        raise ValueError(f"{origin} must be complete, but {name} is missing.")
    return entries[name]


def check_class(name: str, value: Any, expected_class: type):
    """Refuse an argument of the wrong class.

    Args:
        name: Name of the argument, for the error.
        value: Value of the argument.
        expected_class: Expected class.

    Raises:
        TypeError: If the value is of another class.
    """
    if not isinstance(value, expected_class):
        raise TypeError(
            f"{name} must be a {expected_class.__name__}, got a {type(value).__name__}."
        )


def build_model(
    config: VanillaTransformerConfig,
    weights: dict[str, Tensor],
    origin: str,
    copy: bool = True,
    search: GenerationConfig | None = None,
) -> VanillaTransformerForConditionalGeneration:
    """Build a model with given weights and the paper's search settings.

    Args:
        config: Configuration of the model.
        weights: All parameters, by our names; one tensor may have several names.
        origin: Model that the weights come from, for the error.
        copy: Whether to copy all weights. If False, the model shares the tensors that are already
            in float32 on the CPU.
        search: Search settings of the other model. Those that say which tokens may follow are kept.

    Returns:
        The model in evaluation mode, in float32 on the CPU.

    Raises:
        ValueError: If a parameter is missing, left over or of another shape, or the model is too
            large for this machine.
    """
    refuse_impossible(config, origin)
    refuse_beyond_memory(FLOAT32_BYTES * num_weights(config), origin)
    # the meta device allocates no memory for initial weights, which are replaced below
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    check_fit(model, weights, origin)
    # a tensor with several names is copied once if the model ties its weights, and else once for
    # each name, because `save_pretrained` leaves out shared tensors that the configuration does not
    # tie
    keys = {
        name: name if copy and not config.tie_word_embeddings else id(tensor)
        for name, tensor in weights.items()
    }
    model_tensors: dict[str | int, Tensor] = {}
    for name, tensor in weights.items():
        if keys[name] not in model_tensors:
            model_tensor = tensor.detach().to("cpu", torch.float32)
            if copy:
                model_tensor = model_tensor.clone(memory_format=torch.contiguous_format)
            model_tensors[keys[name]] = model_tensor
    model_weights = {name: model_tensors[key] for name, key in keys.items()}
    model.load_state_dict(model_weights, assign=True)
    model.tie_weights()
    set_paper_search(model)
    for name in (*TOKEN_SETTINGS, *NUMERIC_TOKEN_SETTINGS):
        # a forced end acts only at the length limit, which the paper's search replaces
        if getattr(search, name, None) is not None and name != "forced_eos_token_id":
            setattr(model.generation_config, name, getattr(search, name))
    return model.eval()
