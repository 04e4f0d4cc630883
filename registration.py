"""Registration of the public classes with the Auto classes of transformers."""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
)

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    sinusoidal_encoding,
)
from .pipeline_vanilla_transformer import (
    TranslationPipeline,
    register_translation_task,
)
from .tokenization.tokenization_vanilla_transformer import VanillaTransformerTokenizer

__all__ = [
    "TranslationPipeline",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerTokenizer",
    "sinusoidal_encoding",
]

# a test runner may import the package a second time, under the name of the checkout's folder, so
# every registration may replace an earlier one
AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig, exist_ok=True)
AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(
    VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, exist_ok=True
)
AutoTokenizer.register(
    VanillaTransformerConfig, tokenizer_class=VanillaTransformerTokenizer, exist_ok=True
)
register_translation_task()


def _conversion_of(model: PreTrainedModel) -> Any:
    # imported here, because this imports the model classes of transformers that can be converted
    from .conversion.shared_weights import SharedConversion

    return SharedConversion(model)


TranslationPipeline.make_conversion = staticmethod(_conversion_of)
