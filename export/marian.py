"""To transformers' Marian, for tools that know the OPUS-MT models and not this package."""

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

from ..atomic_files import whole_folder
from ..comparison import batch_to_compare, refuse_difference
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..conversion.weights import BART_PARTS, SAME_FIELDS, renamed
from ..generation_vanilla_transformer import SEARCH_FIELDS
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..tokenization.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from .check import DIFFERS, refuse_changed_model
from .parts import position_table

PARTS = {ours: theirs for theirs, ours in BART_PARTS.items()}
# which dimension of a weight belongs to the residual stream, by the end of Marian's name for it
RESIDUAL_COLUMNS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc1.weight")
RESIDUAL_ROWS = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")
# the only sinusoids that Marian makes itself
OWN_POSITIONS = {"position_encoding": "sinusoidal", "position_base": 10000, "position_offset": 0}


@torch.no_grad()
def to_marian(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    num_positions: int | None = None,
):
    """Write what `MarianMTModel.from_pretrained` loads, with the tokenizer beside it.

    Marian's sinusoids have all sines first: where ours alternate, the features of the residual
    stream are put into that order. Positions of another kind are written as the weights that they
    are in Marian, and stay right for as long as the folder is not saved again from there.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        folder: Where to write.
        num_positions: Length of the longest sentence that is to be read or written, in tokens;
            Marian has a table of positions. If not given, 1,024, or as many as were learned.

    Raises:
        ValueError: If the model has what Marian does not, its code is not the released one, or
            Marian computes other logits; the message says what.
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
    layers = renamed(weights, PARTS)
    missing_bias = {
        name: torch.zeros_like(tensor)
        for name, tensor in theirs.state_dict().items()
        if name.endswith("_proj.bias")
    }
    layers = missing_bias | {name: tensor for name, tensor in layers.items() if ".layers." in name}
    makes_own = all(getattr(ours, name) == value for name, value in OWN_POSITIONS.items())
    if makes_own and ours.position_layout == "interleaved":
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
        # positions are the one thing left
        strict=False,
    )
    theirs.generation_config = _generation_config(model.generation_config, config)
    with whole_folder(folder) as unfinished:
        theirs.save_pretrained(unfinished)
        if not makes_own:
            # the library leaves them out, since it makes them anew where they are not in the file
            path = unfinished / "model.safetensors"
            save_file(load_file(path) | _contiguous(tables), path, metadata={"format": "pt"})
        _save_tokenizer(tokenizer, unfinished)
        batch = batch_to_compare(model, len(tables["model.encoder.embed_positions.weight"]))
        found = MarianMTModel.from_pretrained(unfinished, dtype=torch.float32).eval()
        found = found(**batch.inputs())
        refuse_difference(found.logits, batch.logits, batch.logits, DIFFERS.format("Marian"))


def check_marian_can(config: VanillaTransformerConfig):
    """Refuse what Marian has no name for.

    Args:
        config: Of the model.

    Raises:
        ValueError: If there is such a thing; says which.
    """
    expected = {"norm_first": False, "tie_word_embeddings": True, "layer_norm_eps": 1e-5}
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name} must be {value} for Marian, which has nothing else, got "
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
        # the library's is length ** length_penalty: of one kind with ours, not the same
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
    """Save a tokenizer of ours under the class that every version of the library knows."""
    if not isinstance(tokenizer, VanillaTransformerTokenizer):
        tokenizer.save_pretrained(folder)
        return
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_for_others(),
        pad_token=tokenizer.pad_token,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        # this class finds tokens that a user has added only if it splits none of them
        split_special_tokens=tokenizer.split_special_tokens and not tokenizer.extra_special_tokens,
        extra_special_tokens=tokenizer.extra_special_tokens,
    )
    plain.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


__all__ = ["check_marian_can", "to_marian"]
