"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), for transformers.

Importing the package registers its classes with AutoConfig, AutoModel, AutoModelForSeq2SeqLM,
AutoTokenizer and `pipeline("translation")`.
"""

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

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

# importing torch takes seconds, so the console script imports it only after parsing its arguments,
# at the first use of a public name
_is_console_script = PurePath(getattr(sys, "argv", [""])[0]).stem == "vanilla-transformer"

if TYPE_CHECKING or not _is_console_script:
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
