"""Weights of the Transformer's relatives, as models of this package."""

from vanilla_transformer.conversion.fairseq import from_fairseq
from vanilla_transformer.conversion.fsmt import from_fsmt
from vanilla_transformer.conversion.marian import from_marian
from vanilla_transformer.conversion.opennmt import from_opennmt
from vanilla_transformer.conversion.torch import from_torch

__all__ = ["from_fairseq", "from_fsmt", "from_marian", "from_opennmt", "from_torch"]
