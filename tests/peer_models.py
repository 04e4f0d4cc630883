"""Small Marian, FSMT and M2M100 models with weights that translate differently."""

import torch
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
)


def randomized(model):
    """Set weights that give different translations of different lengths."""
    for name, parameter in model.named_parameters():
        # positions are parameters in these models, and must not change
        if "embed_positions" in name:
            continue
        if "_proj.weight" in name or "embed_tokens" in name or "shared" in name:
            parameter.data.normal_(std=0.3)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def assert_logits_equal(model, expected):
    """Compare the logits of a converted model with those that the peer's own code computed."""
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(expected["source"]),
            decoder_input_ids=torch.tensor(expected["target"]),
        ).logits
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=1e-4, atol=1e-4)


def marian(**fields):
    sizes = {
        "vocab_size": 23,
        "d_model": 48,
        "encoder_layers": 2,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 20,
        "decoder_layers": 3,
        "decoder_attention_heads": 3,
        "decoder_ffn_dim": 18,
        "scale_embedding": True,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 2,
        "forced_eos_token_id": None,
        "activation_function": "swish",
    }
    model = MarianMTModel(MarianConfig(**{**sizes, **fields}))
    model.final_logits_bias.normal_(std=0.1)
    return randomized(model)


def fsmt(tied, **fields):
    sizes = {
        "src_vocab_size": 23,
        "tgt_vocab_size": 23,
        "langs": ["en", "de"],
        "d_model": 48,
        "encoder_layers": 2,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 20,
        "decoder_layers": 3,
        "decoder_attention_heads": 3,
        "decoder_ffn_dim": 18,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }
    model = randomized(FSMTForConditionalGeneration(FSMTConfig(**{**sizes, **fields})))
    decoder = model.model.decoder
    decoder.output_projection.weight = decoder.embed_tokens.weight
    if tied:
        model.model.encoder.embed_tokens.weight = decoder.embed_tokens.weight
    return model


def m2m100(**fields):
    sizes = {
        "vocab_size": 23,
        "d_model": 48,
        "encoder_layers": 2,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 20,
        "decoder_layers": 3,
        "decoder_attention_heads": 3,
        "decoder_ffn_dim": 18,
        "max_position_embeddings": 40,
    }
    return randomized(M2M100ForConditionalGeneration(M2M100Config(**{**sizes, **fields})))
