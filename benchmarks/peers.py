"""Models of the same sizes in other toolkits, and their conversion to this package."""

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
)

from .. import VanillaTransformerConfig, sinusoidal_encoding
from ..conversion import from_fsmt, from_marian, from_torch
from ..conversion.weights import SAME_FIELDS
from ..train.data.batches import IGNORED
from ..train.step import smoothed_loss_sum

OURS = "this package"
MARIAN = "transformers Marian"
M2M100 = "transformers M2M100"


class Peer(NamedTuple):
    """Another implementation of the same model.

    Attributes:
        flag: Name on the command line.
        build: Function that returns a model of the same sizes, with random weights.
        loss_sum: Function that returns the smoothed loss, summed over the target tokens of a batch.
        convert: Function that converts the model to this package; None if there is none.
        required_module: Module that must be installed.
    """

    flag: str
    build: Callable[[VanillaTransformerConfig], nn.Module]
    loss_sum: Callable[[nn.Module, dict[str, Tensor], float], Tensor]
    convert: Callable[[Any], PreTrainedModel] | None
    required_module: str = "transformers"

    def is_installed(self) -> bool:
        """Return whether the module can be imported."""
        try:
            importlib.import_module(self.required_module)
        # an installed package may raise ValueError in a version of Python that it does not support
        except (ImportError, ValueError):
            return False
        return True


def marian_config(config: VanillaTransformerConfig) -> MarianConfig:
    """Return the configuration of a Marian model of the same sizes.

    Args:
        config: Configuration of our model.

    Returns:
        Configuration of Marian. Unlike the paper, Marian has biases in its attention, and all sines
        before all cosines.
    """
    shared_fields = {
        name: getattr(config, name) for name in (*SAME_FIELDS, "vocab_size", "d_model")
    }
    return MarianConfig(
        **shared_fields,
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        forced_eos_token_id=None,
    )


def build_marian(config: VanillaTransformerConfig) -> MarianMTModel:
    """Build transformers' Marian.

    Args:
        config: Configuration of our model.

    Returns:
        A model of the same sizes.
    """
    return MarianMTModel(marian_config(config))


def build_m2m100(config: VanillaTransformerConfig) -> M2M100ForConditionalGeneration:
    """Build transformers' M2M100, the class of NLLB.

    Args:
        config: Configuration of our model.

    Returns:
        A model of the same sizes.
    """
    shared_fields = {
        name: getattr(config, name) for name in (*SAME_FIELDS, "vocab_size", "d_model")
    }
    return M2M100ForConditionalGeneration(
        M2M100Config(**shared_fields, scale_embedding=True, forced_eos_token_id=None)
    )


def build_fsmt(config: VanillaTransformerConfig) -> FSMTForConditionalGeneration:
    """Build transformers' FSMT, with one matrix for source, target and output.

    Args:
        config: Configuration of our model.

    Returns:
        A model of the same sizes.
    """
    shared_fields = {name: getattr(config, name) for name in (*SAME_FIELDS, "d_model")}
    model = FSMTForConditionalGeneration(
        FSMTConfig(
            **shared_fields,
            langs=["en", "de"],
            src_vocab_size=config.vocab_size,
            tgt_vocab_size=config.vocab_size,
            scale_embedding=True,
            forced_eos_token_id=None,
        )
    )
    decoder = model.model.decoder
    decoder.output_projection.weight = decoder.embed_tokens.weight
    model.model.encoder.embed_tokens.weight = decoder.embed_tokens.weight
    return model


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with tied embeddings.

    Args:
        config: Configuration of our model.
    """

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.stacks = nn.Transformer(
            config.d_model,
            config.encoder_attention_heads,
            config.encoder_layers,
            config.decoder_layers,
            config.encoder_ffn_dim,
            config.dropout,
            batch_first=True,
        )
        for stack in (self.stacks.encoder, self.stacks.decoder):
            stack.norm = None
        for layer in (*self.stacks.encoder.layers, *self.stacks.decoder.layers):
            # the paper has no dropout on attention weights or inside the feed-forward
            layer.dropout.p = layer.self_attn.dropout = 0.0
            if hasattr(layer, "multihead_attn"):
                layer.multihead_attn.dropout = 0.0
        self.dropout = nn.Dropout(config.dropout)
        self.positions: Tensor
        table = sinusoidal_encoding(config.max_position_embeddings, config.d_model)
        self.register_buffer("positions", table, persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor):
        """Return the logits of the next tokens.

        Args:
            input_ids: Source token ids, [B, S].
            attention_mask: 1 for a source token, 0 for padding, [B, S].
            decoder_input_ids: Target token ids, [B, T].

        Returns:
            Logits, [B, T, V].
        """
        length = decoder_input_ids.shape[1]
        causal_mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        padding = attention_mask == 0
        states = self.stacks(
            self._embed(input_ids),
            self._embed(decoder_input_ids),
            tgt_mask=causal_mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return states @ self.embedding.weight.T

    def _embed(self, ids: Tensor) -> Tensor:
        scaled = self.embedding(ids) * math.sqrt(self.config.d_model)
        return self.dropout(scaled + self.positions[: ids.shape[1]])


def build_joeynmt(config: VanillaTransformerConfig) -> nn.Module:
    """Build JoeyNMT's model.

    Args:
        config: Configuration of our model.

    Returns:
        A model of the same sizes, with JoeyNMT's loss.
    """
    from joeynmt.model import build_model
    from joeynmt.vocabulary import Vocabulary

    # JoeyNMT's vocabulary begins with these special tokens, in this order
    special_names = ("unk", "pad", "bos", "eos")
    special_tokens: dict[str, Any] = {f"{name}_token": f"<{name}>" for name in special_names}
    special_tokens |= {f"{name}_id": index for index, name in enumerate(special_names)}
    tokens = [str(index) for index in range(config.vocab_size - len(special_names))]
    vocabulary = Vocabulary(tokens, SimpleNamespace(**special_tokens, lang_tags=[], sep_token=None))

    def stack_settings(layers: int, heads: int, ffn_dim: int) -> dict[str, Any]:
        return {
            "type": "transformer",
            "num_layers": layers,
            "num_heads": heads,
            "ff_size": ffn_dim,
            "hidden_size": config.d_model,
            "dropout": config.dropout,
            "layer_norm": "post",
            "embeddings": {
                "embedding_dim": config.d_model,
                "scale": True,
                "dropout": config.dropout,
            },
        }

    model_settings = {
        "tied_embeddings": True,
        "tied_softmax": True,
        "initializer": "xavier_uniform",
        "embed_initializer": "xavier_uniform",
        "encoder": stack_settings(
            config.encoder_layers, config.encoder_attention_heads, config.encoder_ffn_dim
        ),
        "decoder": stack_settings(
            config.decoder_layers, config.decoder_attention_heads, config.decoder_ffn_dim
        ),
    }
    return build_model(model_settings, vocabulary, vocabulary)


def _joeynmt_loss_sum(model: Any, tensors: dict[str, Tensor], smoothing: float) -> Tensor:
    if model.loss_function is None:
        model.loss_function = ("crossentropy", smoothing)
    is_label = tensors["labels"] != IGNORED
    # swap ids 0 and 1, because JoeyNMT's padding token has id 1 and ours has id 0
    our_to_joeynmt_ids = torch.arange(len(model.src_vocab), device=is_label.device)
    our_to_joeynmt_ids[:2] = our_to_joeynmt_ids[:2].flip(0)
    pad_id = model.pad_index
    source_mask = tensors["attention_mask"].bool()
    loss, *_ = model(
        return_type="loss",
        src=our_to_joeynmt_ids[tensors["input_ids"]].masked_fill(~source_mask, pad_id),
        trg_input=our_to_joeynmt_ids[tensors["decoder_input_ids"]].masked_fill(~is_label, pad_id),
        trg=our_to_joeynmt_ids[tensors["labels"].clamp(min=0)].masked_fill(~is_label, pad_id),
        src_mask=source_mask[:, None],
        src_length=source_mask.sum(1),
        trg_mask=is_label[:, None],
    )
    return loss


def _library_loss_sum(model: nn.Module, tensors: dict[str, Tensor], smoothing: float) -> Tensor:
    inputs = {name: tensor for name, tensor in tensors.items() if name != "labels"}
    # the models build the causal mask themselves
    logits = model(**inputs, use_cache=False).logits
    return smoothed_loss_sum(logits, tensors["labels"], smoothing)


def _torch_loss_sum(model: nn.Module, tensors: dict[str, Tensor], smoothing: float) -> Tensor:
    inputs = {name: tensor for name, tensor in tensors.items() if name != "labels"}
    return smoothed_loss_sum(model(**inputs), tensors["labels"], smoothing)


PEERS = {
    MARIAN: Peer("marian", build_marian, _library_loss_sum, from_marian),
    "transformers FSMT": Peer("fsmt", build_fsmt, _library_loss_sum, from_fsmt),
    "torch.nn.Transformer": Peer(
        "torch",
        TorchTransformer,
        _torch_loss_sum,
        lambda module: from_torch(module.stacks, module.embedding.weight),
        "torch",
    ),
    "JoeyNMT": Peer("joeynmt", build_joeynmt, _joeynmt_loss_sum, None, "joeynmt.model"),
}
