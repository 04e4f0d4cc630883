"""Export to transformers' Marian, for tools that support OPUS-MT models."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerBase,
)

from ..atomic_files import atomic_folder
from ..comparison import batch_to_compare, refuse_difference
from ..configuration_vanilla_transformer import TOKEN_ID_FIELDS, VanillaTransformerConfig
from ..conversion.weights import BART_RENAMES, SAME_FIELDS, rename_weights
from ..generation_vanilla_transformer import SEARCH_FIELDS
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..tokenization.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from .check import DIFFERS, refuse_changed_model
from .parts import position_table, save_tokenizer, vocabulary

# pieces of our weight names, and Marian's pieces
RENAMES = {ours: theirs for theirs, ours in BART_RENAMES.items()}
# ends of Marian's names for matrices whose columns are features of the residual stream
RESIDUAL_COLUMNS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc1.weight")
# ends of Marian's names for matrices and biases whose rows are features of the residual stream
RESIDUAL_ROWS = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")
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
# position settings for which Marian computes the same sinusoids itself
MARIAN_POSITIONS = {"position_encoding": "sinusoidal", "position_base": 10000, "position_offset": 0}


@torch.no_grad()
def to_marian(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    num_positions: int | None = None,
):
    """Write a folder that `MarianMTModel.from_pretrained` loads, with the tokenizer.

    Marian's positional encoding has all sines before all cosines. If sines and cosines alternate in
    the model, the export reorders the features of the residual stream. Any other positional
    encoding is saved as weights, which are lost if the exported model is saved again.

    Two more changes prepare the model for CTranslate2's converter. The converter removes the last
    token, which is Marian's padding token, so our padding token gets the last id. The converter
    starts the decoder from a zero vector, so the embedding of the start token is subtracted from
    all embeddings. All logits of a position then differ from those of the model by the same number,
    and the probabilities stay the same.

    Args:
        model: Model to export.
        tokenizer: Tokenizer of the model.
        folder: Output folder.
        num_positions: Number of positions in Marian's table, which limits the length of sources and
            translations in tokens. By default, the number of learned positions, or
            `USUAL_POSITIONS` if the model has none.

    Raises:
        ValueError: If Marian does not support the model, the code of the model is not the released
            one, or Marian computes other logits; the message names the reason.
    """
    ours = model.config
    check_marian_can(ours)
    refuse_changed_model(model, "Marian")
    tables = {
        f"model.{name}.embed_positions.weight": position_table(stack, num_positions)
        for name, stack in (("encoder", model.get_encoder()), ("decoder", model.get_decoder()))
    }
    new_ids = torch.arange(ours.vocab_size)
    if isinstance(tokenizer, VanillaTransformerTokenizer) and ours.pad_token_id is not None:
        new_ids[[ours.pad_token_id, -1]] = new_ids[[-1, ours.pad_token_id]]
    config = marian_config(ours, len(tables["model.encoder.embed_positions.weight"]))
    for name in TOKEN_ID_FIELDS:
        setattr(config, name, _with_new_ids(getattr(config, name), new_ids))
    theirs = MarianMTModel(config)
    weights = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    table = weights["model.encoder.embed_tokens.weight"]
    bias = weights.pop("lm_head.bias", torch.zeros(ours.vocab_size))
    layers = rename_weights(weights, RENAMES)
    missing_bias = {
        name: torch.zeros_like(tensor)
        for name, tensor in theirs.state_dict().items()
        if name.endswith("_proj.bias")
    }
    layers = missing_bias | {name: tensor for name, tensor in layers.items() if ".layers." in name}
    uses_marian_positions = all(
        getattr(ours, name) == value for name, value in MARIAN_POSITIONS.items()
    )
    if uses_marian_positions and ours.position_layout == "interleaved":
        order = torch.cat((torch.arange(0, ours.d_model, 2), torch.arange(1, ours.d_model, 2)))
        layers = {name: _reordered(name, tensor, order) for name, tensor in layers.items()}
        table = table[:, order]
    start = table[ours.decoder_start_token_id]
    layers |= _first_layers(layers, math.sqrt(ours.d_model) * start)
    # `new_ids` also gives the old id of each new row, because a swap of two ids is its own inverse
    table, bias = (table - start)[new_ids], bias[new_ids]
    theirs.load_state_dict(
        layers
        | dict.fromkeys(
            (
                "model.shared.weight",
                "model.encoder.embed_tokens.weight",
                "model.decoder.embed_tokens.weight",
                "lm_head.weight",
            ),
            table,
        )
        | {"final_logits_bias": bias[None]},
        # not strict, because the sinusoids are missing: the new Marian model has its own
        strict=False,
    )
    theirs.generation_config = marian_search(model.generation_config, config, new_ids)
    names = vocabulary(model, tokenizer)
    with atomic_folder(folder) as unfinished:
        theirs.save_pretrained(unfinished)
        if not uses_marian_positions:
            # `save_pretrained` leaves out Marian's positions, but loading reads them from the file
            path = unfinished / "model.safetensors"
            save_file(load_file(path) | _contiguous(tables), path, metadata={"format": "pt"})
        save_tokenizer(tokenizer, unfinished, lambda content: _renumbered(content, names, new_ids))
        batch = batch_to_compare(model, config.max_position_embeddings)
        exported = MarianMTModel.from_pretrained(unfinished, dtype=torch.float32).eval()
        inputs = batch._replace(source=new_ids[batch.source], target=new_ids[batch.target]).inputs()
        found, expected = (
            logits.log_softmax(-1)
            for logits in (exported(**inputs).logits[..., new_ids], batch.logits)
        )
        refuse_difference(found, expected, batch.logits, DIFFERS.format("Marian"))


def check_marian_can(config: VanillaTransformerConfig):
    """Refuse a configuration that Marian does not support.

    Args:
        config: Configuration of the model.

    Raises:
        ValueError: If a field has an unsupported value; the message names the field.
    """
    expected = {"norm_first": False, "tie_word_embeddings": True, "layer_norm_eps": 1e-5}
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name} must be {value} for Marian, which supports no other value, got "
                f"{getattr(config, name)}."
            )
    heads = {config.encoder_attention_heads, config.decoder_attention_heads}
    for name in ("d_k", "d_v"):
        width = getattr(config, name)
        if width is not None and {width * number for number in heads} != {config.d_model}:
            raise ValueError(
                f"{name} must be d_model / heads for Marian, got {width} with d_model "
                f"{config.d_model} and {', '.join(map(str, sorted(heads)))} heads."
            )


def marian_config(config: VanillaTransformerConfig, num_positions: int) -> MarianConfig:
    """Describe a model by a Marian configuration, which other programs support.

    Args:
        config: Configuration of the model.
        num_positions: Value of `max_position_embeddings`.

    Returns:
        Marian's configuration with the sizes and the token ids of the model.
    """
    return MarianConfig(
        **{name: getattr(config, name) for name in SAME_FIELDS}
        | {"max_position_embeddings": num_positions},
        d_model=config.d_model,
        vocab_size=config.vocab_size,
        scale_embedding=True,
        forced_eos_token_id=None,
        architectures=["MarianMTModel"],
    )


def marian_search(
    ours: GenerationConfig, theirs: MarianConfig, new_ids: Tensor | None = None
) -> GenerationConfig:
    """Convert the search settings of a model to settings of transformers' own `generate`.

    Args:
        ours: Search settings of the model.
        theirs: Marian's configuration, with the new token ids.
        new_ids: New id of each token, if the export changes ids, [V].

    Returns:
        Search settings without those that only this package supports.
    """
    settings = ours.to_diff_dict()
    alpha = settings.get("length_penalty_alpha")
    if alpha is not None:
        # transformers divides scores by length ** length_penalty, which is close to our
        # ((5 + length) / 6) ** alpha, but not equal
        settings["length_penalty"] = float(alpha)
    settings = {
        name: value
        for name, value in settings.items()
        if name not in SEARCH_FIELDS and not name.startswith("_")
    }
    if new_ids is not None:
        for name in settings.keys() & set(TOKEN_SETTINGS):
            settings[name] = _with_new_ids(settings[name], new_ids)
    longest = ours.max_length or theirs.max_position_embeddings
    return GenerationConfig(
        **settings
        | {name: getattr(theirs, name) for name in TOKEN_ID_FIELDS}
        | {"max_length": min(longest, theirs.max_position_embeddings)}
    )


def _with_new_ids(value: Any, new_ids: Tensor) -> Any:
    """Replace the token ids in a setting: an id, a list, or the biases of token sequences."""
    if isinstance(value, int):
        return int(new_ids[value])
    if isinstance(value, dict):
        return {_with_new_ids(ids, new_ids): bias for ids, bias in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_new_ids(one, new_ids) for one in value)
    return value


def _renumbered(content: dict[str, Any], names: list[str], new_ids: Tensor) -> dict[str, Any]:
    """Return the content of `tokenizer.json` with the new ids, and with a token for every id."""
    # tokenizers reads the id of an added token from the vocabulary if the token is in it
    content["model"]["vocab"] = {names[old]: new for new, old in enumerate(new_ids.tolist())}
    for token in content["added_tokens"]:
        token["id"] = int(new_ids[token["id"]])
    # a tokenizer that adds no end token has no post-processor
    for special in (content["post_processor"] or {"special_tokens": {}})["special_tokens"].values():
        special["ids"] = _with_new_ids(special["ids"], new_ids)
    return content


def _first_layers(layers: dict[str, Tensor], shift: Tensor) -> dict[str, Tensor]:
    """Return biases of the first layers that undo the subtraction of `shift` from their input."""
    biases = {}
    for stack in ("encoder", "decoder"):
        attention = f"model.{stack}.layers.0.self_attn"
        for part in ("q", "k", "v"):
            name = f"{attention}.{part}_proj"
            biases[f"{name}.bias"] = layers[f"{name}.bias"] + layers[f"{name}.weight"] @ shift
        # the residual connection adds the layer's input to this output, so `shift` is restored here
        biases[f"{attention}.out_proj.bias"] = layers[f"{attention}.out_proj.bias"] + shift
    return biases


def _reordered(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    if name.endswith(RESIDUAL_COLUMNS):
        return tensor[:, order]
    return tensor[order] if name.endswith(RESIDUAL_ROWS) or "norm" in name else tensor


def _contiguous(tables: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: table.float().cpu().contiguous() for name, table in tables.items()}


__all__ = ["check_marian_can", "marian_config", "marian_search", "to_marian"]
