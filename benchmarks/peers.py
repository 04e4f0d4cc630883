"""The peers: the same sizes in other packages, and what makes of them a model of this one."""

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


class Peer(NamedTuple):
    """Another implementation of the same model.

    Attributes:
        flag: What it is called on a command line.
        build: Makes one of the same sizes, with random weights.
        loss_sum: The smoothed loss of a batch, summed over its target tokens.
        convert: Makes a model of this package of one; None where there is no such way.
        needs: A module that must be there.
    """

    flag: str
    build: Callable[[VanillaTransformerConfig], nn.Module]
    loss_sum: Callable[[nn.Module, dict[str, Tensor], float], Tensor]
    convert: Callable[[nn.Module], PreTrainedModel] | None
    needs: str = "transformers"

    def is_installed(self) -> bool:
        """Whether it can be measured here."""
        try:
            importlib.import_module(self.needs)
        # some are there and cannot be loaded by this version of Python
        except (ImportError, ValueError):
            return False
        return True


def marian_config(config: VanillaTransformerConfig) -> MarianConfig:
    """The Marian of the same sizes.

    Args:
        config: Of our model.

    Returns:
        Its configuration, with the library's biases and its order of sines and cosines.
    """
    same = {name: getattr(config, name) for name in (*SAME_FIELDS, "vocab_size", "d_model")}
    return MarianConfig(
        **same,
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        forced_eos_token_id=None,
    )


def build_marian(config: VanillaTransformerConfig) -> MarianMTModel:
    """transformers' Marian.

    Args:
        config: Of our model.

    Returns:
        A model of the same sizes.
    """
    return MarianMTModel(marian_config(config))


def build_fsmt(config: VanillaTransformerConfig) -> FSMTForConditionalGeneration:
    """transformers' FSMT, with one embedding matrix.

    Args:
        config: Of our model.

    Returns:
        A model of the same sizes.
    """
    same = {name: getattr(config, name) for name in (*SAME_FIELDS, "d_model")}
    model = FSMTForConditionalGeneration(
        FSMTConfig(
            **same,
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
    """torch.nn.Transformer between tied embeddings.

    Args:
        config: Of our model.
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
            # the paper drops neither weights of attention nor what is inside feed-forward
            layer.dropout.p = layer.self_attn.dropout = 0.0
            if hasattr(layer, "multihead_attn"):
                layer.multihead_attn.dropout = 0.0
        self.dropout = nn.Dropout(config.dropout)
        table = sinusoidal_encoding(config.max_position_embeddings, config.d_model)
        self.register_buffer("positions", table, persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor):
        """Score the next tokens.

        Args:
            input_ids: [B, S].
            attention_mask: 1 for a source token, 0 for padding, [B, S].
            decoder_input_ids: [B, T].

        Returns:
            Logits, [B, T, V].
        """
        length = decoder_input_ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        padding = attention_mask == 0
        states = self.stacks(
            self._embed(input_ids),
            self._embed(decoder_input_ids),
            tgt_mask=future,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return states @ self.embedding.weight.T

    def _embed(self, ids: Tensor) -> Tensor:
        scaled = self.embedding(ids) * math.sqrt(self.config.d_model)
        return self.dropout(scaled + self.positions[: ids.shape[1]])


def convert_torch(module: TorchTransformer) -> PreTrainedModel:
    """A model of this package.

    Args:
        module: The other one.

    Returns:
        The same function.
    """
    return from_torch(module.stacks, module.embedding.weight)


def build_joeynmt(config: VanillaTransformerConfig) -> nn.Module:
    """JoeyNMT's model.

    Args:
        config: Of our model.

    Returns:
        A model of the same sizes, with its own loss.
    """
    from joeynmt.model import build_model
    from joeynmt.vocabulary import Vocabulary

    # its special tokens come first, in this order
    names = ("unk", "pad", "bos", "eos")
    special = {f"{name}_token": f"<{name}>" for name in names}
    special |= {f"{name}_id": index for index, name in enumerate(names)}
    tokens = [str(index) for index in range(config.vocab_size - len(names))]
    vocabulary = Vocabulary(tokens, SimpleNamespace(**special, lang_tags=[], sep_token=None))

    def stack(layers: int, heads: int, inner: int) -> dict[str, Any]:
        return {
            "type": "transformer",
            "num_layers": layers,
            "num_heads": heads,
            "ff_size": inner,
            "hidden_size": config.d_model,
            "dropout": config.dropout,
            "layer_norm": "post",
            "embeddings": {
                "embedding_dim": config.d_model,
                "scale": True,
                "dropout": config.dropout,
            },
        }

    settings = {
        "tied_embeddings": True,
        "tied_softmax": True,
        "initializer": "xavier_uniform",
        "embed_initializer": "xavier_uniform",
        "encoder": stack(
            config.encoder_layers, config.encoder_attention_heads, config.encoder_ffn_dim
        ),
        "decoder": stack(
            config.decoder_layers, config.decoder_attention_heads, config.decoder_ffn_dim
        ),
    }
    return build_model(settings, vocabulary, vocabulary)


def _joeynmt_loss_sum(model: nn.Module, tensors: dict[str, Tensor], smoothing: float) -> Tensor:
    if model.loss_function is None:
        model.loss_function = ("crossentropy", smoothing)
    is_label = tensors["labels"] != IGNORED
    # ids 0 and 1 change places: its padding token is not ours
    swap = torch.arange(len(model.src_vocab), device=is_label.device)
    swap[:2] = swap[:2].flip(0)
    pad = model.pad_index
    source_mask = tensors["attention_mask"].bool()
    loss, *_ = model(
        return_type="loss",
        src=swap[tensors["input_ids"]].masked_fill(~source_mask, pad),
        trg_input=swap[tensors["decoder_input_ids"]].masked_fill(~is_label, pad),
        trg=swap[tensors["labels"].clamp(min=0)].masked_fill(~is_label, pad),
        src_mask=source_mask[:, None],
        src_length=source_mask.sum(1),
        trg_mask=is_label[:, None],
    )
    return loss


def _library_loss_sum(model: nn.Module, tensors: dict[str, Tensor], smoothing: float) -> Tensor:
    inputs = {name: tensor for name, tensor in tensors.items() if name != "labels"}
    # FSMT makes the mask of the future by itself
    logits = model(**inputs, use_cache=False).logits
    return smoothed_loss_sum(logits, tensors["labels"], smoothing)


def _torch_loss_sum(model: nn.Module, tensors: dict[str, Tensor], smoothing: float) -> Tensor:
    inputs = {name: tensor for name, tensor in tensors.items() if name != "labels"}
    return smoothed_loss_sum(model(**inputs), tensors["labels"], smoothing)


PEERS = {
    MARIAN: Peer("marian", build_marian, _library_loss_sum, from_marian),
    "transformers FSMT": Peer("fsmt", build_fsmt, _library_loss_sum, from_fsmt),
    "torch.nn.Transformer": Peer(
        "torch", TorchTransformer, _torch_loss_sum, convert_torch, "torch"
    ),
    "JoeyNMT": Peer("joeynmt", build_joeynmt, _joeynmt_loss_sum, None, "joeynmt.model"),
}
