"""Convert models of other toolkits to models of this package."""

from .fairseq import from_fairseq
from .fsmt import from_fsmt
from .joeynmt import from_joeynmt
from .m2m100 import from_m2m100
from .marian import from_marian
from .opennmt import from_opennmt
from .torch import from_torch

__all__ = [
    "from_fairseq",
    "from_fsmt",
    "from_joeynmt",
    "from_m2m100",
    "from_marian",
    "from_opennmt",
    "from_torch",
]
