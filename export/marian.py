"""Export to transformers' Marian, for tools that support OPUS-MT models."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..atomic_files import atomic_folder
from ..comparison import batch_to_compare, refuse_difference
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..conversion.weights import BART_PARTS, SAME_FIELDS, rename_weights
from ..generation_vanilla_transformer import SEARCH_FIELDS
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..tokenization.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from .check import DIFFERS, refuse_changed_model
from .parts import position_table

PARTS = {ours: theirs for theirs, ours in BART_PARTS.items()}
# ends of Marian's names of weights whose columns or rows are features of the residual stream
RESIDUAL_COLUMNS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc1.weight")
RESIDUAL_ROWS = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")
# settings whose positional encoding Marian computes itself
MARIAN_POSITIONS = {"position_encoding": "sinusoidal", "position_base": 10000, "position_offset": 0}


@torch.no_grad()
def to_marian(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    num_positions: int | None = None,
):
    """Write a folder that `MarianMTModel.from_pretrained` loads, with the tokenizer.

    Marian's sinusoids have all sines first. If those of the model alternate with cosines, the
    features of the residual stream are reordered. Any other positional encoding is saved as
    weights; they are lost if Marian saves the model again.

    Args:
        model: Model to export.
        tokenizer: Tokenizer of the model.
        folder: Output folder.
        num_positions: Size of Marian's table of positions: tokens of the longest source or
            translation. If not given, 1,024, or the number of learned positions.

    Raises:
        ValueError: If Marian does not support the model, the code of the model is not the released
            one, or Marian computes other logits; names the reason.
    """
    ours = model.config
    check_marian_can(ours)
    refuse_changed_model(model, "Marian")
    tables = {
        f"model.{name}.embed_positions.weight": position_table(stack, num_positions)
        for name, stack in (("encoder", model.get_encoder()), ("decoder", model.get_decoder()))
    }
    config = MarianConfig(
        **{name: getattr(ours, name) for name in SAME_FIELDS}
        | {"max_position_embeddings": len(tables["model.encoder.embed_positions.weight"])},
        d_model=ours.d_model,
        vocab_size=ours.vocab_size,
        scale_embedding=True,
        forced_eos_token_id=None,
    )
    theirs = MarianMTModel(config)
    weights = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    table = weights["model.encoder.embed_tokens.weight"]
    bias = weights.pop("lm_head.bias", torch.zeros(ours.vocab_size))
    layers = rename_weights(weights, PARTS)
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
        # only the positions are missing
        strict=False,
    )
    theirs.generation_config = _generation_config(model.generation_config, config)
    with atomic_folder(folder) as unfinished:
        theirs.save_pretrained(unfinished)
        if not uses_marian_positions:
            # `save_pretrained` leaves out Marian's positions, but loading reads them from the file
            path = unfinished / "model.safetensors"
            save_file(load_file(path) | _contiguous(tables), path, metadata={"format": "pt"})
        _save_tokenizer(tokenizer, unfinished)
        batch = batch_to_compare(model, len(tables["model.encoder.embed_positions.weight"]))
        exported = MarianMTModel.from_pretrained(unfinished, dtype=torch.float32).eval()
        logits = exported(**batch.inputs()).logits
        refuse_difference(logits, batch.logits, batch.logits, DIFFERS.format("Marian"))


def check_marian_can(config: VanillaTransformerConfig):
    """Refuse a configuration that Marian does not support.

    Args:
        config: Configuration of the model.

    Raises:
        ValueError: If a field has an unsupported value; names the field.
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


def _reordered(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    if name.endswith(RESIDUAL_COLUMNS):
        return tensor[:, order]
    return tensor[order] if name.endswith(RESIDUAL_ROWS) or "norm" in name else tensor


def _contiguous(tables: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: table.float().cpu().contiguous() for name, table in tables.items()}


def _generation_config(ours: GenerationConfig, theirs: MarianConfig) -> GenerationConfig:
    settings = ours.to_diff_dict()
    alpha = settings.get("length_penalty_alpha")
    if alpha is not None:
        # transformers divides by length ** length_penalty, a formula close to ours, but not equal
        settings["length_penalty"] = float(alpha)
    settings = {
        name: value
        for name, value in settings.items()
        if name not in SEARCH_FIELDS and not name.startswith("_")
    }
    longest = ours.max_length or theirs.max_position_embeddings
    return GenerationConfig(
        **settings
        | {
            "pad_token_id": theirs.pad_token_id,
            "bos_token_id": theirs.bos_token_id,
            "eos_token_id": theirs.eos_token_id,
            "decoder_start_token_id": theirs.decoder_start_token_id,
            "max_length": min(longest, theirs.max_position_embeddings),
        }
    )


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path):
    """Save our tokenizer as the class that every version of transformers has."""
    if not isinstance(tokenizer, VanillaTransformerTokenizer):
        tokenizer.save_pretrained(folder)
        return
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_for_others(),
        pad_token=tokenizer.pad_token,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        # the class finds tokens that a user added only if it splits no special token
        split_special_tokens=tokenizer.split_special_tokens and not tokenizer.extra_special_tokens,
        extra_special_tokens=tokenizer.extra_special_tokens,
    )
    plain.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


__all__ = ["check_marian_can", "to_marian"]
