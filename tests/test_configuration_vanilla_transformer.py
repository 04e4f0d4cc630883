"""Section 3 and Table 3: sizes, and refused settings."""

import json

import equations
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)


def test_the_defaults_are_the_base_row_of_table_3():
    config = VanillaTransformerConfig()
    assert (config.d_model, config.encoder_ffn_dim, config.decoder_ffn_dim) == (512, 2048, 2048)
    assert (config.encoder_layers, config.decoder_layers) == (6, 6)
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (8, 8)
    assert config.head_dim == 64
    assert config.dropout == 0.1
    assert VanillaTransformerConfig.from_paper("base").to_dict() == config.to_dict()


@pytest.mark.parametrize("row", equations.PARAMETERS)
def test_each_row_has_the_parameters_that_follow_from_its_sizes(row):
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.from_paper(row))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert round(millions, 2) == equations.PARAMETERS[row]


@pytest.mark.parametrize("row", ["A1", "A2", "A3", "A4"])
def test_rows_a_change_heads_but_hardly_parameters(row):
    config = VanillaTransformerConfig.from_paper(row)
    heads = {"A1": 1, "A2": 4, "A3": 16, "A4": 32}[row]
    assert (config.encoder_attention_heads, config.head_dim) == (heads, 512 // heads)


def test_rows_d_and_e_change_dropout_and_positions():
    assert VanillaTransformerConfig.from_paper("D1").dropout == 0
    assert VanillaTransformerConfig.from_paper("D2").dropout == 0.2
    assert VanillaTransformerConfig.from_paper("E").position_encoding == "learned"
    base = VanillaTransformerConfig()
    for smoothing_row in ("D3", "D4"):
        assert VanillaTransformerConfig.from_paper(smoothing_row).to_dict() == base.to_dict()


def test_an_unknown_row_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"base, A1, .* big, got 'A5'"):
        VanillaTransformerConfig.from_paper("A5")


def test_d_model_is_an_alias_everywhere(tmp_path):
    config = VanillaTransformerConfig(d_model=64)
    assert config.hidden_size == config.d_model == 64
    config.d_model = 32
    assert config.hidden_size == 32
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 32
    assert AutoConfig.from_pretrained(tmp_path).d_model == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_modle": 5}, "d_modle is not a field .* Did you mean 'd_model'?"),
        ({"num_encoder_layers": 2}, "Did you mean 'encoder_layers'?"),
        ({"src_vocab_size": 8000}, "source and target share"),
        ({"share_encoder_decoder_embeddings": False}, "source and target share"),
    ],
)
def test_a_misspelt_field_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        VanillaTransformerConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 511, "d_k": 4, "d_v": 4}, "d_model must be even, for sin/cos pairs, got 511"),
        ({"d_model": 100}, "d_model must be divisible by the number of heads.* d_model 100"),
        ({"encoder_attention_heads": 4}, "d_k must be given .* got 4 and 8 heads"),
        ({"encoder_layers": 0}, "encoder_layers must be positive, got 0"),
        ({"encoder_attention_heads": 0}, "encoder_attention_heads must be positive, got 0"),
        ({"position_base": float("nan")}, "position_base must be positive, got nan"),
        ({"initializer_gain": 0.0}, "initializer_gain must be positive, got 0.0"),
        ({"activation_function": "rleu"}, "activation_function .* Did you mean 'relu'?"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder must be true"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"position_offset": -1}, "position_offset must not be negative, .* got -1"),
        ({"position_offset": 10**30}, "position_offset must .* at most 2,147,483,647, got 10{30}"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings must be at most 2,147,483,"),
        ({"position_base": 10**400}, "position_base must be at most 1e.30, got 10{400}"),
        ({"initializer_gain": 1e308}, "initializer_gain must be at most 1e.30, got 1e.308"),
        ({"eos_token_id": [2, 37000]}, r"eos_token_id must be below vocab_size \(37000\)"),
        ({"position_encoding": "rotary"}, "expected one of .* got rotary"),
        ({"d_model": "big"}, "expected int, got str"),
    ],
)
def test_a_wrong_size_is_refused_by_name(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        VanillaTransformerConfig(**fields)


def test_an_odd_width_is_allowed_without_sinusoids():
    config = VanillaTransformerConfig(d_model=15, d_k=4, d_v=4, position_encoding="learned")
    assert config.d_model == 15


def test_keys_of_the_library_are_accepted_and_saved(tmp_path):
    config = VanillaTransformerConfig(
        auto_map={"AutoModel": "a.B"}, attn_implementation="eager", torch_dtype="bfloat16"
    )
    config.a_users_own_note = "kept"
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.auto_map == {"AutoModel": "a.B"}
    assert again.dtype == torch.bfloat16
    assert again.a_users_own_note == "kept"


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float13", "int8", "", "nn", 16])
def test_an_invalid_dtype_is_refused(name, value):
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype of torch"):
        VanillaTransformerConfig(**{name: value})
    assert VanillaTransformerConfig(**{name: "bfloat16"}).dtype == torch.bfloat16
