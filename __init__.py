"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), for transformers.

Importing the package registers its classes with AutoConfig, AutoModel, AutoModelForSeq2SeqLM,
AutoTokenizer and `pipeline("translation")`.
"""

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from vanilla_transformer.console import fast_imports

__version__ = "0.1.0"

__all__ = [
    "TranslationPipeline",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerTokenizer",
    "load",
    "sinusoidal_encoding",
]

# importing torch takes seconds, so the command imports it only after parsing its arguments, at the
# first use of a public name. sys.argv[0] is "-m" until `python -m` has imported the package
_program = getattr(sys, "argv", [""])[0]
_is_command = PurePath(_program).name in ("vanilla-transformer", "vanilla-transformer.exe") or (
    _program == "-m" and "vanilla_transformer.cli" in sys.orig_argv
)

if TYPE_CHECKING or not _is_command:
    with fast_imports():
        from vanilla_transformer.loading import load
        from vanilla_transformer.registration import (
            TranslationPipeline,
            VanillaTransformerConfig,
            VanillaTransformerForConditionalGeneration,
            VanillaTransformerModel,
            VanillaTransformerTokenizer,
            sinusoidal_encoding,
        )
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from vanilla_transformer import loading, registration

        return getattr(loading if name == "load" else registration, name)
