"""Refuse to export a changed model, because the other engine would lose the changes."""

import torch
from transformers import PreTrainedModel

from ..identity_vanilla_transformer import computing_modules, first_difference
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

# {} is the name of the other engine
DIFFERS = "an export must compute what its model computes, and the scores in {} differ"


def refuse_changed_model(model: PreTrainedModel, engine: str):
    """Refuse a model that differs from the released model with the same configuration.

    Args:
        model: Model to export.
        engine: Name of the other engine, for the error.

    Raises:
        ValueError: If a weight, buffer or submodule is added or missing, or the code of a module is
            not the released one.
    """
    with torch.device("meta"):
        released = VanillaTransformerForConditionalGeneration(model.config)
    for kind, names in (
        ("weight", lambda it: dict(it.named_parameters(remove_duplicate=False))),
        ("buffer", lambda it: dict(it.named_buffers(remove_duplicate=False))),
        ("submodule", lambda it: dict(it.named_modules(remove_duplicate=False))),
    ):
        given, known = names(model), names(released)
        extra = [name for name in given if name not in known]
        missing = [name for name in known if name not in given]
        if extra or missing:
            what = f"the {kind} {extra[0]}" if extra else f"no {kind} {missing[0]}"
            raise ValueError(
                f"{engine} supports only the released model, got {what}"
                + (f" and {len(extra) - 1} more" if len(extra) > 1 else "")
                + ". Export a changed model to ONNX."
            )
    difference = first_difference(computing_modules(model))
    if difference is not None:
        raise ValueError(
            f"{engine} supports only the released model, and {difference}. Export a changed model "
            "to ONNX."
        )


__all__ = ["DIFFERS", "refuse_changed_model"]
