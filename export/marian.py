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
from ..checks_vanilla_transformer import SEARCH_FIELDS
from ..comparison import batch_to_compare, refuse_difference
from ..configuration_vanilla_transformer import TOKEN_ID_FIELDS, VanillaTransformerConfig
from ..conversion.weights import BART_RENAMES, SAME_FIELDS, TOKEN_SETTINGS, rename_weights
from ..deviations_vanilla_transformer import without_bias
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..tokenization.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from .check import DIFFERS, refuse_changed_model
from .parts import position_table, save_tokenizer, vocabulary, with_search_ids

# pieces of our weight names, and Marian's pieces
RENAMES = {our_piece: marian_piece for marian_piece, our_piece in BART_RENAMES.items()}
# ends of Marian's names for matrices whose columns are features of the residual stream
RESIDUAL_COLUMNS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc1.weight")
# ends of Marian's names for matrices and biases whose rows are features of the residual stream
RESIDUAL_ROWS = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")
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

    Two more changes prepare the model for CTranslate2's converter:

    - The converter removes the last token, which is Marian's padding token. So the export gives the
      last id to the padding token of a `VanillaTransformerTokenizer`.
    - The converter starts the decoder from a zero vector. So the export subtracts the embedding of
      the start token from all embeddings. All logits of a position then differ from those of the
      model by the same number, and the probabilities stay the same.

    Args:
        model: Model to export.
        tokenizer: Tokenizer of the model.
        folder: Output folder.
        num_positions: Number of positions in Marian's table, which limits the length of sources and
            translations in tokens. By default, the number of learned positions, or
            `USUAL_POSITIONS` of `export/parts.py` if the model has none.

    Raises:
        ValueError: If Marian does not support the model, the code of the model is not the released
            one, or Marian computes other probabilities; the message names the reason.
    """
    refuse_unsupported(model.config)
    refuse_changed_model(model, "Marian")
    model = with_search_ids(model)
    our_config = model.config
    position_tables = {
        f"model.{name}.embed_positions.weight": position_table(stack, num_positions)
        for name, stack in (("encoder", model.get_encoder()), ("decoder", model.get_decoder()))
    }
    num_positions = len(position_tables["model.encoder.embed_positions.weight"])
    new_ids = torch.arange(our_config.vocab_size)
    if isinstance(tokenizer, VanillaTransformerTokenizer) and our_config.pad_token_id is not None:
        new_ids[[our_config.pad_token_id, -1]] = new_ids[[-1, our_config.pad_token_id]]
    # a swap is its own inverse
    old_ids = new_ids
    exported_config = marian_config(our_config, num_positions)
    for name in TOKEN_ID_FIELDS:
        setattr(exported_config, name, _replace_ids(getattr(exported_config, name), new_ids))
    marian = MarianMTModel(exported_config)
    # strict=False, because the weights lack the sinusoids, which the new Marian model computes
    marian.load_state_dict(_marian_weights(model, marian, old_ids), strict=False)
    marian.generation_config = marian_generation_config(
        model.generation_config, exported_config, new_ids
    )
    tokens = vocabulary(model, tokenizer)
    with atomic_folder(folder) as unfinished:
        marian.save_pretrained(unfinished)
        if not _uses_marian_positions(our_config):
            # `save_pretrained` leaves out Marian's positions, but loading reads them from the file
            path = unfinished / "model.safetensors"
            saved_weights = load_file(path) | _contiguous(position_tables)
            save_file(saved_weights, path, metadata={"format": "pt"})
        save_tokenizer(
            tokenizer,
            unfinished,
            lambda content: _renumber_tokens(content, tokens, new_ids, old_ids),
        )
        _refuse_other_probabilities(model, unfinished, num_positions, new_ids)


def refuse_unsupported(config: VanillaTransformerConfig):
    """Refuse a configuration that Marian does not support.

    Args:
        config: Configuration of the model.

    Raises:
        ValueError: If a field has an unsupported value; the message names the field.
    """
    supported = {"norm_first": False, "tie_word_embeddings": True, "layer_norm_eps": 1e-5}
    for name, supported_value in supported.items():
        if getattr(config, name) != supported_value:
            raise ValueError(
                f"{name} must be {supported_value} for Marian, which supports no other value, got "
                f"{getattr(config, name)}."
            )
    head_counts = {config.encoder_attention_heads, config.decoder_attention_heads}
    for name in ("d_k", "d_v"):
        width = getattr(config, name)
        if width is not None and {width * count for count in head_counts} != {config.d_model}:
            raise ValueError(
                f"{name} must be d_model / heads for Marian, got {width} with d_model "
                f"{config.d_model} and {', '.join(map(str, sorted(head_counts)))} heads."
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


def marian_generation_config(
    our_search: GenerationConfig, exported_config: MarianConfig, new_ids: Tensor | None = None
) -> GenerationConfig:
    """Convert the search settings of a model to settings of transformers' own `generate`.

    Args:
        our_search: Search settings of the model.
        exported_config: Marian's configuration of the exported model, with the new token ids.
        new_ids: New id of each token, if the export changes ids, [V].

    Returns:
        Search settings without those that only this package supports.
    """
    settings = our_search.to_diff_dict()
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
            settings[name] = _replace_ids(settings[name], new_ids)
    num_positions = exported_config.max_position_embeddings
    max_length = min(our_search.max_length or num_positions, num_positions)
    return GenerationConfig(
        **{name: getattr(exported_config, name) for name in TOKEN_ID_FIELDS}
        | settings
        | {"max_length": max_length}
    )


def _uses_marian_positions(config: VanillaTransformerConfig) -> bool:
    return all(getattr(config, name) == value for name, value in MARIAN_POSITIONS.items())


def _marian_weights(
    model: VanillaTransformerForConditionalGeneration, marian: MarianMTModel, old_ids: Tensor
) -> dict[str, Tensor]:
    """Return the weights of a model for Marian, without positions; `old_ids` are by new id, [V]."""
    config = model.config
    our_weights = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    embeddings = our_weights["model.encoder.embed_tokens.weight"]
    output_bias = our_weights.pop("lm_head.bias", torch.zeros(config.vocab_size))
    renamed_weights = rename_weights(our_weights, RENAMES)
    # the values for a model whose attention has no biases; Marian's always has them
    zero_biases = {
        name: torch.zeros_like(tensor)
        for name, tensor in marian.state_dict().items()
        if name.endswith("_proj.bias")
    }
    layer_weights = zero_biases | {
        name: tensor for name, tensor in renamed_weights.items() if ".layers." in name
    }
    if _uses_marian_positions(config) and config.position_layout == "interleaved":
        order = torch.cat((torch.arange(0, config.d_model, 2), torch.arange(1, config.d_model, 2)))
        layer_weights = {
            name: _reorder_features(name, tensor, order) for name, tensor in layer_weights.items()
        }
        embeddings = embeddings[:, order]
    start_embedding = embeddings[config.decoder_start_token_id]
    layer_weights |= _corrected_biases(layer_weights, math.sqrt(config.d_model) * start_embedding)
    marian_embeddings = (embeddings - start_embedding)[old_ids]
    return (
        layer_weights
        | dict.fromkeys(
            (
                "model.shared.weight",
                "model.encoder.embed_tokens.weight",
                "model.decoder.embed_tokens.weight",
                "lm_head.weight",
            ),
            marian_embeddings,
        )
        | {"final_logits_bias": output_bias[old_ids][None]}
    )


def _refuse_other_probabilities(
    model: VanillaTransformerForConditionalGeneration,
    folder: Path,
    num_positions: int,
    new_ids: Tensor,
):
    """Refuse an export whose probabilities differ from those of the model."""
    batch = batch_to_compare(model, num_positions)
    exported = MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = batch._replace(source=new_ids[batch.source], target=new_ids[batch.target]).inputs()
    exported_logits = exported(**inputs).logits[..., new_ids]
    refuse_difference(
        exported_logits.log_softmax(-1),
        batch.logits.log_softmax(-1),
        without_bias(batch.logits, model.lm_head.bias),
        DIFFERS.format("Marian"),
    )


def _replace_ids(value: Any, new_ids: Tensor) -> Any:
    """Replace the token ids in a setting: an id, a list, or the biases of token sequences."""
    if isinstance(value, int):
        # a negative end token ends no sequence, and ids beyond the vocabulary suppress nothing
        return int(new_ids[value]) if 0 <= value < len(new_ids) else value
    if isinstance(value, dict):
        return {_replace_ids(ids, new_ids): bias for ids, bias in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace_ids(item, new_ids) for item in value)
    return value


def _renumber_tokens(
    content: dict[str, Any], tokens: list[str], new_ids: Tensor, old_ids: Tensor
) -> dict[str, Any]:
    """Return the content of `tokenizer.json` with the new ids, and with a token for every id."""
    # tokenizers reads the id of an added token from the vocabulary if the token is in it
    content["model"]["vocab"] = {
        tokens[old_id]: new_id for new_id, old_id in enumerate(old_ids.tolist())
    }
    for added_token in content["added_tokens"]:
        added_token["id"] = int(new_ids[added_token["id"]])
    # a tokenizer that adds no end token has no post-processor
    post_processor = content["post_processor"] or {}
    for processor in post_processor.get("processors", [post_processor]):
        for special_token in processor.get("special_tokens", {}).values():
            special_token["ids"] = _replace_ids(special_token["ids"], new_ids)
        # the tokens of BertProcessing and RobertaProcessing, each with its id
        for name in ("cls", "sep"):
            if name in processor:
                processor[name] = _replace_ids(processor[name], new_ids)
    return content


def _corrected_biases(layer_weights: dict[str, Tensor], shift: Tensor) -> dict[str, Tensor]:
    """Return biases of the first layers that undo the subtraction of `shift` from their input."""
    biases = {}
    for stack in ("encoder", "decoder"):
        attention = f"model.{stack}.layers.0.self_attn"
        for projection in ("q_proj", "k_proj", "v_proj"):
            bias_name = f"{attention}.{projection}.bias"
            shift_of_output = layer_weights[f"{attention}.{projection}.weight"] @ shift
            biases[bias_name] = layer_weights[bias_name] + shift_of_output
        # the residual connection adds the layer's input to this output, so `shift` is restored here
        bias_name = f"{attention}.out_proj.bias"
        biases[bias_name] = layer_weights[bias_name] + shift
    return biases


def _reorder_features(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    if name.endswith(RESIDUAL_COLUMNS):
        return tensor[:, order]
    return tensor[order] if name.endswith(RESIDUAL_ROWS) or "norm" in name else tensor


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float().cpu().contiguous() for name, tensor in tensors.items()}
