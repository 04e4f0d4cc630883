"""Registration of the public classes with the Auto classes of transformers."""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.pipelines import PIPELINE_REGISTRY, REMOVED_TASKS

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    sinusoidal_encoding,
)
from .pipeline_vanilla_transformer import TASK, TranslationPipeline, languages_of
from .tokenization.tokenization_vanilla_transformer import VanillaTransformerTokenizer

__all__ = [
    "TranslationPipeline",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerTokenizer",
    "sinusoidal_encoding",
]


class _NoDefaultModel:
    """Stand-in for a default model: raises an error when transformers looks for a model in it."""

    def __contains__(self, key: Any) -> bool:
        raise ValueError(
            f"model must be given, as in pipeline({TASK!r}, model=...): no model is the default of "
            "this task."
        )


def _register_translation_task():
    """Make `pipeline("translation", model=...)` build a `TranslationPipeline`.

    transformers refuses removed tasks before it looks for registered tasks. So the task is deleted
    from the list of removed tasks.
    """
    REMOVED_TASKS.pop(TASK, None)
    task_entry = TranslationPipeline._registered_impl[TASK]
    PIPELINE_REGISTRY.supported_tasks[TASK] = {**task_entry, "default": _NoDefaultModel()}
    check_library_task = type(PIPELINE_REGISTRY).check_task

    def check_task(task: str) -> tuple[str, dict, Any]:
        # a task with languages is looked up as TASK; the pipeline still receives the whole name
        if task.startswith(f"{TASK}_"):
            languages_of(task)
            task = TASK
        return check_library_task(PIPELINE_REGISTRY, task)

    PIPELINE_REGISTRY.check_task = check_task
    # a model on the Hub refers to its copy of the pipeline in `custom_pipelines`, and transformers
    # would ask the user to trust the copy, although this package is installed. So this property
    # reads as empty; the setter still stores the value, which is then saved
    VanillaTransformerConfig.custom_pipelines = property(
        lambda self: {},
        lambda self, value: vars(self).__setitem__("custom_pipelines", value),
    )


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
_register_translation_task()


def _conversion_of(model: PreTrainedModel) -> Any:
    # this module is imported here, because it imports the model classes that can be converted
    from .conversion.shared_weights import SharedConversion

    return SharedConversion(model)


TranslationPipeline.make_conversion = staticmethod(_conversion_of)
