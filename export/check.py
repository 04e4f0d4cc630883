"""Refuse to export a changed model, because the other engine would lose the changes."""

import torch
from transformers import PreTrainedModel

from ..identity_vanilla_transformer import computing_modules, first_difference
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

# {} is the name of the other engine
DIFFERS = "an export must compute what its model computes, but the scores in {} differ"


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
        released_model = VanillaTransformerForConditionalGeneration(model.config)
    for kind, named_parts in (
        ("weight", lambda module: dict(module.named_parameters(remove_duplicate=False))),
        ("buffer", lambda module: dict(module.named_buffers(remove_duplicate=False))),
        ("submodule", lambda module: dict(module.named_modules(remove_duplicate=False))),
    ):
        model_parts, released_parts = named_parts(model), named_parts(released_model)
        added_names = [name for name in model_parts if name not in released_parts]
        missing_names = [name for name in released_parts if name not in model_parts]
        if added_names or missing_names:
            if added_names:
                change = f"the {kind} {added_names[0]}"
            else:
                change = f"no {kind} {missing_names[0]}"
            raise ValueError(
                f"{engine} supports only the released model, got {change}"
                + (f" and {len(added_names) - 1} more" if len(added_names) > 1 else "")
                + ". Export a changed model to ONNX."
            )
    difference = first_difference(computing_modules(model))
    if difference is not None:
        raise ValueError(
            f"{engine} supports only the released model, but {difference}. Export a changed model "
            "to ONNX."
        )
