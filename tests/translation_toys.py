"""A small untrained model whose translations are readable."""

import torch
from transformers import GenerationConfig

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)

TEXTS = [
    "the small cat sleeps",
    "dogs",
    "the cat and the small dog sleep in the house",
    "a house",
    "in the small house the dogs sleep",
]


def make_tokenizer() -> VanillaTransformerTokenizer:
    """Return a tokenizer that was trained on the texts."""
    return VanillaTransformerTokenizer().train_new_from_iterator(TEXTS * 20, vocab_size=290)


def make_model(
    tokenizer: VanillaTransformerTokenizer, **options
) -> VanillaTransformerForConditionalGeneration:
    """Return a model with the paper's search, whose translations are readable and differ."""
    sizes = {
        "d_model": 24,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 32,
    }
    torch.manual_seed(0)
    config = VanillaTransformerConfig(**{"vocab_size": len(tokenizer), **sizes, **options})
    model = VanillaTransformerForConditionalGeneration(config).eval()
    # a seed with which translations are not empty, and each setting of the search changes them
    torch.manual_seed(13)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        num_beams=4,
        length_penalty_alpha=0.6,
        max_extra_tokens=3,
        suppress_tokens=[
            index
            for index in range(len(tokenizer))
            if not tokenizer.decode([index]).isalpha() and index != tokenizer.eos_token_id
        ],
    )
    return model
