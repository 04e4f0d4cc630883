# Copyright 2026 The vanilla_transformer authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Sizes and options of the model; every default is the base row of Table 3."""

import difflib
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN

# for each row of Table 3, the fields that differ from base. D3 and D4 are empty, because these rows
# differ in label smoothing only, which is a training setting
PAPER_ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "A1": {"encoder_attention_heads": 1, "decoder_attention_heads": 1},
    "A2": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "A3": {"encoder_attention_heads": 16, "decoder_attention_heads": 16},
    "A4": {"encoder_attention_heads": 32, "decoder_attention_heads": 32},
    "B1": {"d_k": 16},
    "B2": {"d_k": 32},
    "C1": {"encoder_layers": 2, "decoder_layers": 2},
    "C2": {"encoder_layers": 4, "decoder_layers": 4},
    "C3": {"encoder_layers": 8, "decoder_layers": 8},
    "C4": {"hidden_size": 256, "d_k": 32, "d_v": 32},
    "C5": {"hidden_size": 1024, "d_k": 128, "d_v": 128},
    "C6": {"encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024},
    "C7": {"encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096},
    "D1": {"dropout": 0.0},
    "D2": {"dropout": 0.2},
    "D3": {},
    "D4": {},
    "E": {"position_encoding": "learned"},
    "big": {
        "hidden_size": 1024,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "dropout": 0.3,
    },
}

# sizes of the layers; these fields have the same names in Marian, BART and other models
LAYER_FIELDS = (
    "encoder_layers",
    "encoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_layers",
    "decoder_attention_heads",
    "decoder_ffn_dim",
)
# upper bound of integer sizes, far above the size of any model
LARGEST_SIZE = 2**31 - 1
# upper bounds of the fields that must be positive; 1e30 is still finite in float32
LARGEST = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", *LAYER_FIELDS, "d_k", "d_v", "max_position_embeddings"),
        LARGEST_SIZE,
    ),
    **dict.fromkeys(("position_base", "layer_norm_eps", "initializer_gain"), 1e30),
}
TOKEN_ID_FIELDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

# keys that transformers writes into config.json or accepts, but that are not fields of the class
LIBRARY_KEYS = {
    "attn_implementation",
    "auto_map",
    "custom_pipelines",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "tie_last_hidden_states",
    "tokenizer_class",
    "torch_dtype",
    "use_bfloat16",
}

# keys of other models, whose source and target may have separate vocabularies
SEPARATE_VOCABULARY_KEYS = {
    "decoder_vocab_size",
    "share_encoder_decoder_embeddings",
    "source_vocab_size",
    "src_vocab_size",
    "target_vocab_size",
    "tgt_vocab_size",
}


def closest_name(name: str, known_names: list[str]) -> str:
    """Return a hint at the closest valid name, to be appended to an error message.

    Args:
        name: Given name.
        known_names: Valid names.

    Returns:
        " Did you mean X?", or "" if no valid name is close.
    """
    close_names = difflib.get_close_matches(name, known_names, n=1, cutoff=0.6)
    return f" Did you mean {close_names[0]!r}?" if close_names else ""


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    """Sizes and options of a `VanillaTransformerModel`; the defaults are the paper's base model.

    `d_model` is an alias of `hidden_size`, as an attribute and as a constructor argument.

    Args:
        vocab_size: Number of tokens in the vocabulary that source and target share. Section 5.1.
        hidden_size: d_model, the width of every sub-layer's output. Section 3.1.
        encoder_layers: Number of encoder layers, N. Section 3.1.
        encoder_attention_heads: Number of attention heads in the encoder, h. Section 3.2.2.
        encoder_ffn_dim: Inner width of feed-forward networks in the encoder, d_ff. Section 3.3.
        decoder_layers: Number of decoder layers, N.
        decoder_attention_heads: Number of attention heads in the decoder, h.
        decoder_ffn_dim: Inner width of feed-forward networks in the decoder, d_ff.
        d_k: Width of a head's queries and keys; `hidden_size / heads` if None. Table 3, rows B.
        d_v: Width of a head's values; `hidden_size / heads` if None.
        position_encoding: "sinusoidal" (section 3.5), "learned" (Table 3, row E) or "none".
        position_base: Base of the sinusoids' wavelengths, 2 pi position_base^(2i / d_model); the
            10000 of section 3.5.
        position_layout: "interleaved", sines and cosines in alternating features as in the paper,
            or "halves", all sines before all cosines as in many other implementations.
        position_offset: Position index of the first token.
        max_position_embeddings: Number of learned positions; sinusoids have no limit.
        norm_first: Pre-norm: normalize the input of each sub-layer, and the output of each stack.
            The paper has post-norm: it normalizes the sum of each sub-layer's input and output.
        attention_bias: Biases in the four attention projections. The paper has none.
        output_bias: Bias of the output projection. The paper has none.
        activation_function: Activation of the feed-forward networks; section 3.3 has ReLU.
        dropout: Dropout probability of each sub-layer's output, and of the sum of embedding and
            positional encoding. Section 5.4.
        attention_dropout: Dropout probability of the attention weights. The paper has no such
            dropout.
        activation_dropout: Dropout probability after the activation of the feed-forward networks.
            The paper has no such dropout.
        layer_norm_eps: Number added to the variance in layer normalization. The paper does not
            state it.
        initializer_gain: Factor of the initial weights of all matrices. The paper does not state
            its initialization; with a factor of 1, it is that of the authors' code.
        pad_token_id: Token that pads the sentences of a batch to one length.
        bos_token_id: Token that begins a sentence.
        eos_token_id: Token that ends a sentence, or a list of them.
        decoder_start_token_id: Token that the decoder reads first.
        is_encoder_decoder: Always true; transformers reads it.
        use_cache: Whether the model returns a KV cache for the next decoding step.
        tie_word_embeddings: Whether source embedding, target embedding and output projection share
            one matrix. Section 3.4.

    Raises:
        ValueError: If a field is unknown, or dtype is not a floating-point dtype of torch.
        StrictDataclassError: If a field has the wrong type or is out of range, or two fields
            contradict each other, such as a number of heads that does not divide `hidden_size`.
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {
        "d_model": "hidden_size",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_dim",
    }

    vocab_size: int = 37000
    hidden_size: int = 512
    encoder_layers: int = 6
    encoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_layers: int = 6
    decoder_attention_heads: int = 8
    decoder_ffn_dim: int = 2048
    d_k: int | None = None
    d_v: int | None = None
    position_encoding: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    position_base: float | int = 10000.0
    position_layout: Literal["interleaved", "halves"] = "interleaved"
    position_offset: int = 0
    max_position_embeddings: int = 1024
    norm_first: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    layer_norm_eps: float = 1e-5
    initializer_gain: float | int = 1.0
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1
    is_encoder_decoder: bool = True
    use_cache: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        for alias, field in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, field, kwargs.pop(alias))
        self._refuse_unknown(kwargs)
        for given in (self.dtype, kwargs.get("torch_dtype")):
            dtype = getattr(torch, given, None) if isinstance(given, str) else given
            is_usable = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if given is not None and not is_usable:
                raise ValueError(
                    f"dtype must be a floating-point dtype of torch, like float32, got {given!r}."
                )
        super().__post_init__(**kwargs)

    @classmethod
    def from_paper(cls, row: str, **overrides) -> "VanillaTransformerConfig":
        """Return the configuration of one row of Table 3.

        Args:
            row: "base", "big", or the name of a variation: "A1" to "A4", "B1", ... "E".
            overrides: Further fields, such as `vocab_size`.

        Returns:
            The configuration of that row.

        Raises:
            ValueError: If Table 3 has no such row.
        """
        if row not in PAPER_ROWS:
            raise ValueError(
                f"row must be one of Table 3, {', '.join(PAPER_ROWS)}, got {row!r}."
                + closest_name(row, list(PAPER_ROWS))
            )
        return cls(**{**PAPER_ROWS[row], **overrides})

    @property
    def head_dim(self) -> int:
        """Width of a head's keys, by which transformers allocates a static cache."""
        return self.d_k or self.hidden_size // self.num_attention_heads

    @property
    def qk_head_dim(self) -> int | None:
        """Width of a head's keys if its values have another width, otherwise None.

        If this is not None, transformers allocates a static cache at its first update, with the
        widths of the keys and values in that update.
        """
        d_v = self.d_v or self.hidden_size // self.num_attention_heads
        return None if d_v == self.head_dim else self.head_dim

    def validate_architecture(self):
        """Validate the fields; transformers calls this on construction and saving.

        Raises:
            ValueError: If a field is out of range, or two fields contradict each other.
        """
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            # the comparison is false for NaN too, so NaN is refused
            if value is not None and not 0 < value <= largest:
                rule = f"at most {largest:,}" if value > largest else "positive"
                raise ValueError(f"{name} must be {rule}, got {value}.")
        super().validate_architecture()
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}."
                )
        if self.activation_function not in ACT2FN:
            raise ValueError(
                f"activation_function must be one of {', '.join(ACT2FN)}, got "
                f"{self.activation_function!r}."
                + closest_name(self.activation_function, list(ACT2FN))
            )
        if not self.is_encoder_decoder:
            raise ValueError("is_encoder_decoder must be true: the model has both, got false.")
        if not 0 <= self.position_offset <= LARGEST_SIZE:
            raise ValueError(
                f"position_offset must not be negative, and at most {LARGEST_SIZE:,}, got "
                f"{self.position_offset}."
            )
        if self.position_encoding == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(f"d_model must be even, for sin/cos pairs, got {self.hidden_size}.")
        self._validate_heads()
        self._validate_token_ids()

    def _validate_heads(self):
        heads = (self.encoder_attention_heads, self.decoder_attention_heads)
        for name in ("d_k", "d_v"):
            if getattr(self, name) is not None:
                continue
            if heads[0] != heads[1]:
                raise ValueError(
                    f"{name} must be given where encoder and decoder differ in heads, "
                    f"got {heads[0]} and {heads[1]} heads."
                )
            if self.hidden_size % heads[0]:
                raise ValueError(
                    f"d_model must be divisible by the number of heads, or {name} given, "
                    f"got d_model {self.hidden_size} and {heads[0]} heads."
                )

    def _validate_token_ids(self):
        for name in TOKEN_ID_FIELDS:
            ids = getattr(self, name)
            for token_id in ids if isinstance(ids, list) else [ids]:
                if token_id is not None and not 0 <= token_id < self.vocab_size:
                    raise ValueError(
                        f"{name} must be below vocab_size ({self.vocab_size}), got {token_id}."
                    )

    def _refuse_unknown(self, given_fields: dict):
        """Refuse misspelled fields, which the base class would silently keep as attributes."""
        # a saved configuration may have a user's own attributes, or keys of a newer transformers
        # version, so unknown names are allowed
        is_saved = self.transformers_version is not None
        known_fields = list(self.__dataclass_fields__) + list(self.attribute_map)
        for name in given_fields:
            if name in SEPARATE_VOCABULARY_KEYS:
                raise ValueError(
                    f"{name} must not be given: source and target share vocab_size tokens."
                )
            is_library_key = name in LIBRARY_KEYS or name in vars(GenerationConfig())
            if is_saved or is_library_key or name.startswith("_"):
                continue
            hint = closest_name(name, known_fields)
            raise ValueError(f"{name} is not a field of {type(self).__name__}.{hint}")


__all__ = ["VanillaTransformerConfig"]
