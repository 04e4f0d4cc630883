"""Convert checkpoints of fairseq's `transformer` architectures with a joined dictionary."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import FSMTTokenizer, PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .toolkit_files import (
    NAMED_TOKENS,
    read_checkpoint,
    read_lines,
    settings_of,
    token_tokenizer,
)
from .weights import (
    BART_RENAMES,
    Converted,
    build_model,
    number_of_layers,
    rename_weights,
    required_entry,
    split_projections,
)

# description of the weights in error messages
WEIGHTS_ORIGIN = "the weights of fairseq's transformer"
# tokens with the ids 0 to 3, which fairseq puts before the tokens of a dictionary file
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
BOS_ID, PAD_ID, EOS_ID = 0, 1, 2
# settings that select another architecture if they are on, and their meanings
FOREIGN_SETTINGS = {
    "layernorm_embedding": "a norm of the embeddings (BART and mBART)",
    "no_scale_embedding": "embeddings that are not multiplied by sqrt(d_model)",
    "adaptive_input": "adaptive embeddings",
    "adaptive_softmax_cutoff": "an adaptive softmax",
    "char_inputs": "character inputs",
    "no_cross_attention": "a decoder without cross-attention",
    "cross_self_attention": "attention to source and target at once",
    "encoder_layers_to_keep": "layers left out",
    "decoder_layers_to_keep": "layers left out",
}
# entries that are not parameters of the model: copies of weights that fairseq 0.12 stores for a
# fused kernel of torch, version numbers, and buffers of sinusoidal positions
UNUSED_ENTRIES = re.compile(
    r"\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)$|\.version$"
    r"|\.embed_positions\.(_float_tensor|weights)$"
)
# names of the norms that the first versions of fairseq only number
NUMBERED_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
# names of the embeddings and of the output projection
EMBEDDINGS_AND_OUTPUT = (
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "decoder.output_projection.weight",
)
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_new", "swish": "silu"}
# names that fairseq's hub interface accepts for the file of BPE codes
CODES_FILES = ("bpecodes", "code")


def from_fairseq(checkpoint: str | Path) -> VanillaTransformerForConditionalGeneration:
    """Convert a checkpoint of fairseq to this package; the same ids give the same logits.

    Args:
        checkpoint: Checkpoint file of fairseq.

    Returns:
        The model in evaluation mode, in float32 on the CPU.

    Raises:
        ValueError: If the model is outside this architecture; the message names the reason.
        OSError: If the file cannot be read.
    """
    return _convert(read_checkpoint(checkpoint))


def fairseq_with_tokenizer(
    checkpoint: str | Path, source_lang: str | None = None, target_lang: str | None = None
) -> Converted:
    """Convert a checkpoint, and build a tokenizer from the dictionary and BPE codes next to it.

    Args:
        checkpoint: Checkpoint file of fairseq. The folder of the file may contain the dictionary as
            `dict.LANG.txt`, and the BPE codes as `bpecodes` or `code`.
        source_lang: Source language; by default, the one in the checkpoint's settings.
        target_lang: Target language; by default, the one in the checkpoint's settings.

    Returns:
        The model of `from_fairseq`, the tokenizer or None, and one sentence about the tokenizer.
        With BPE codes, the tokenizer is an `FSMTTokenizer`, which applies Moses, then BPE. Without
        BPE codes, the tokenizer reads and writes tokens of the dictionary with spaces between them.
        Without a dictionary, the tokenizer is None.

    Raises:
        ValueError: If the model is outside this architecture, the dictionaries of source and target
            differ, the dictionary and the embedding differ in size, the file of BPE codes is
            invalid, or Moses needs the languages and they are unknown.
        OSError: If a file cannot be read.
    """
    content = read_checkpoint(checkpoint)
    model = _convert(content)
    settings = _settings(content)
    languages = [
        source_lang or settings.get("source_lang"),
        target_lang or settings.get("target_lang"),
    ]
    return model, *_tokenizer(Path(checkpoint).parent, languages, model.config.vocab_size)


def _convert(content: dict[str, Any]) -> VanillaTransformerForConditionalGeneration:
    settings, weights = _settings(content), _with_new_names(content["model"])
    arch = settings.get("arch", "fairseq's")
    if not all(f"{stack}.embed_tokens.weight" in weights for stack in ("encoder", "decoder")):
        raise ValueError(f"the model must have an encoder and a decoder, got arch {arch}.")
    for name, meaning in FOREIGN_SETTINGS.items():
        if settings.get(name):
            raise ValueError(
                f"{name} must be off, got {settings[name]} with arch {arch}: that is {meaning}, "
                "outside this architecture."
            )
    source_embeddings, target_embeddings = (
        weights[f"{stack}.embed_tokens.weight"] for stack in ("encoder", "decoder")
    )
    source_width, target_width = source_embeddings.shape[1], target_embeddings.shape[1]
    if source_width != target_width:
        raise ValueError(
            "encoder_embed_dim and decoder_embed_dim must be equal, got "
            f"{source_width} and {target_width}."
        )
    if len(source_embeddings) != len(target_embeddings):
        raise ValueError(
            "source and target must share one dictionary (--joined-dictionary), got separate "
            f"vocabularies of {len(source_embeddings)} and {len(target_embeddings)} tokens."
        )
    output_weight = weights.get("decoder.output_projection.weight", target_embeddings)
    our_weights = _stack_weights(weights, settings)
    our_weights |= {
        "model.encoder.embed_tokens.weight": source_embeddings,
        "model.decoder.embed_tokens.weight": target_embeddings,
        "lm_head.weight": output_weight,
    }
    embeddings_are_equal = torch.equal(source_embeddings, target_embeddings)
    is_tied = embeddings_are_equal and torch.equal(target_embeddings, output_weight)
    config = VanillaTransformerConfig(
        **_fields(settings, weights), vocab_size=len(target_embeddings), tie_word_embeddings=is_tied
    )
    model = build_model(config, our_weights, f"arch {arch}")
    # fairseq's search never generates padding
    model.generation_config.bad_words_ids = [[PAD_ID]]
    return model


def _tokenizer(
    folder: Path, languages: list[str | None], vocab_size: int
) -> tuple[PreTrainedTokenizerBase | None, str]:
    dictionary_files = sorted(folder.glob("dict.*.txt"))
    if not dictionary_files:
        return None, f"No tokenizer: {folder} has no dict.LANG.txt."
    tokens, *other_dictionaries = map(_read_dictionary, dictionary_files)
    if any(other_tokens != tokens for other_tokens in other_dictionaries):
        raise ValueError(
            "source and target must share one dictionary (--joined-dictionary), got different ones "
            f"in {', '.join(path.name for path in dictionary_files)}."
        )
    if len(tokens) != vocab_size:
        num_special = len(SPECIAL_TOKENS)
        raise ValueError(
            f"{dictionary_files[0]} must have {vocab_size - num_special} tokens, as the "
            f"embedding has beside the {num_special} special ones, got "
            f"{len(tokens) - num_special}."
        )
    codes_file = next((folder / name for name in CODES_FILES if (folder / name).is_file()), None)
    if codes_file is None:
        tokenizer = token_tokenizer(tokens, NAMED_TOKENS | {"pad_token": "<pad>"}, adds_eos=True)
        return tokenizer, (
            f"The tokenizer reads and writes tokens separated by spaces: {folder} has a dictionary "
            f"but no BPE codes ({' or '.join(CODES_FILES)})."
        )
    if None in languages:
        raise ValueError(
            "source_lang and target_lang must be given, for the Moses tokenizer: the checkpoint "
            "does not have them."
        )
    return _fsmt_tokenizer(tokens, codes_file, languages), f"The tokenizer is that of {codes_file}."


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    """Return the training settings, which versions of fairseq store under different keys."""
    setting_groups = settings_of(content.get("cfg")) or {}
    settings = settings_of(content.get("args")) or settings_of(setting_groups.get("model"))
    if settings is None:
        raise ValueError("the checkpoint must be fairseq's, with args or cfg, got neither.")
    # fairseq 0.12 may have the settings of each stack in a group of its own
    grouped_settings = {
        f"{group_name}_{name}": value
        for group_name, group in settings.items()
        for name, value in (settings_of(group) or {}).items()
    }
    settings = grouped_settings | settings
    task_settings = settings_of(setting_groups.get("task")) or {}
    languages = {name: task_settings.get(name) for name in ("source_lang", "target_lang")}
    return languages | {name: value for name, value in settings.items() if value is not None}


def _with_new_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights that had other names before fairseq 0.10, as fairseq does."""
    new_weights = {}
    for name, tensor in weights.items():
        for number, norm in enumerate(NUMBERED_NORMS.get(name.split(".")[0], ())):
            name = name.replace(f".layer_norms.{number}.", f".{norm}.")
        if name == "decoder.embed_out":
            name = "decoder.output_projection.weight"
        new_weights[name] = tensor
    return new_weights


def _fields(settings: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return the fields of our configuration, except `vocab_size` and `tie_word_embeddings`."""
    for name in ("attention_heads", "normalize_before", "learned_pos"):
        encoder_value, decoder_value = (
            settings.get(f"{stack}_{name}", False) for stack in ("encoder", "decoder")
        )
        if encoder_value != decoder_value:
            raise ValueError(
                f"encoder_{name} and decoder_{name} must be equal, got "
                f"{encoder_value} and {decoder_value}."
            )
    activation = settings.get("activation_fn", "relu")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation_fn must be one of {', '.join(ACTIVATIONS)}, got {activation!r}."
        )
    d_model = weights["encoder.embed_tokens.weight"].shape[1]
    position_fields = {
        "position_encoding": "sinusoidal",
        # with this base, our wavelengths equal fairseq's, 2 pi 10000^(2i / (d_model - 2))
        "position_base": 10000.0 ** (d_model / (d_model - 2)),
        "position_layout": "halves",
    }
    if settings.get("no_token_positional_embeddings"):
        position_fields = {"position_encoding": "none"}
    elif settings.get("encoder_learned_pos"):
        position_fields = {
            "position_encoding": "learned",
            "max_position_embeddings": _number_of_positions(weights),
        }
    stack_fields = {}
    for stack in ("encoder", "decoder"):
        stack_fields[f"{stack}_layers"] = number_of_layers(weights, f"{stack}.layers.")
        fc1_weight = required_entry(weights, f"{stack}.layers.0.fc1.weight", WEIGHTS_ORIGIN)
        stack_fields[f"{stack}_ffn_dim"] = fc1_weight.shape[0]
        heads_field = f"{stack}_attention_heads"
        stack_fields[heads_field] = required_entry(
            settings, heads_field, "the settings of fairseq's transformer"
        )
    return {
        **stack_fields,
        **position_fields,
        "hidden_size": d_model,
        # fairseq's first position is the id of the padding token plus 1
        "position_offset": PAD_ID + 1,
        "norm_first": bool(settings.get("encoder_normalize_before")),
        "attention_bias": True,
        "activation_function": ACTIVATIONS[activation],
        "dropout": settings.get("dropout", 0.1),
        "attention_dropout": settings.get("attention_dropout", 0.0),
        "activation_dropout": settings.get("activation_dropout")
        or settings.get("relu_dropout", 0.0),
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": EOS_ID,
    }


def _number_of_positions(weights: dict[str, Tensor]) -> int:
    """Return the number of positions that both stacks have learned."""
    tables = (
        required_entry(weights, f"{stack}.embed_positions.weight", WEIGHTS_ORIGIN)
        for stack in ("encoder", "decoder")
    )
    return min(len(table) for table in tables) - PAD_ID - 1


def _stack_weights(weights: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return all weights except `EMBEDDINGS_AND_OUTPUT`, under our names."""
    # `build_model` refuses unknown names
    parameters = {
        name: tensor for name, tensor in weights.items() if not UNUSED_ENTRIES.search(name)
    }
    stack_weights = {
        f"model.{name}": tensor
        for name, tensor in split_projections(parameters).items()
        if name not in EMBEDDINGS_AND_OUTPUT
    }
    renames = {**BART_RENAMES, "coder.layer_norm.": "coder.norm."}
    if settings.get("encoder_learned_pos"):
        num_rows = _number_of_positions(weights) + PAD_ID + 1
        renames[".embed_positions.weight"] = ".positions.table.weight"
        for stack in ("encoder", "decoder"):
            name = f"model.{stack}.embed_positions.weight"
            stack_weights[name] = stack_weights[name][:num_rows]
    return rename_weights(stack_weights, renames)


def _read_dictionary(path: Path) -> list[str]:
    """Return the tokens of a dictionary in the order of their ids; a line is token and count."""
    tokens = [*SPECIAL_TOKENS]
    for line_number, line in enumerate(read_lines(path), 1):
        # fairseq appends this mark to a line whose token replaces an earlier equal token
        token_and_count = line.rstrip().removesuffix(" #fairseq:overwrite")
        token, space, count = token_and_count.rpartition(" ")
        if not space or not count.isdecimal():
            raise ValueError(
                f"{path} line {line_number} must be a token, a space and its count, got {line!r}."
            )
        tokens.append(token)
    return tokens


def _fsmt_tokenizer(
    tokens: list[str], codes_file: Path, languages: list[str | None]
) -> FSMTTokenizer:
    """Return transformers' tokenizer for fairseq's models, which combines Moses and BPE."""
    # FSMTTokenizer marks the last piece of a word with </w>, fairseq marks all other pieces with @@
    fsmt_tokens = [
        token.removesuffix("@@") if token.endswith("@@") else f"{token}</w>"
        for token in tokens[len(SPECIAL_TOKENS) :]
    ]
    ids = {token: token_id for token_id, token in enumerate([*SPECIAL_TOKENS, *fsmt_tokens])}
    merges = []
    for line_number, line in enumerate(read_lines(codes_file), 1):
        if line.startswith("#version"):
            continue
        # do not split at other white space: a BPE symbol may be another white-space character
        symbols_and_count = line.rstrip(" ").split(" ")
        if len(symbols_and_count) not in (2, 3):
            raise ValueError(
                f"{codes_file} line {line_number} must be two symbols, and a count or nothing, "
                f"got {line!r}."
            )
        merges.append(" ".join(symbols_and_count[:2]))
    with tempfile.TemporaryDirectory() as folder:
        vocabulary_file, merges_file = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary_file.write_text(json.dumps(ids), encoding="utf-8")
        merges_file.write_text("".join(f"{merge}\n" for merge in merges), encoding="utf-8")
        return FSMTTokenizer(
            languages,
            str(vocabulary_file),
            str(vocabulary_file),
            str(merges_file),
            eos_token="</s>",
        )
