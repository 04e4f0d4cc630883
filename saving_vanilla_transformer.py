"""Saving of models, as a part of `save_pretrained` of transformers ("the library")."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files

from .checks_vanilla_transformer import SEARCH_FIELDS, warn_once

# name of the released model's class
HEAD_CLASS = "VanillaTransformerForConditionalGeneration"
# entries of a configuration that name code in the folder of the model
ADDRESS_FIELDS = ("auto_map", "custom_pipelines")

# for type checkers, the mixin derives from the model class whose attributes its methods use
_Base: Any = PreTrainedModel if TYPE_CHECKING else object


class SavingMixin(_Base):
    """Mixin that saves a model with its search settings and with all of its weights.

    It precedes `PreTrainedModel` among the base classes, whose method it overrides.
    """

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any):
        """Save the model as transformers does, with all that loading needs.

        Args:
            save_directory: Output folder.
            args: Arguments of `save_pretrained` of transformers.
            kwargs: Arguments of `save_pretrained` of transformers.
        """
        if self.can_generate():
            config = self.generation_config
            if any(getattr(config, name, None) is not None for name in SEARCH_FIELDS):
                # otherwise the library would rebuild the generation configuration of a new model
                # from the model's configuration, without these settings
                config._from_model_config = False
        self._warn_of_other_weights(kwargs.get("state_dict"))
        if shared_names := self._undeclared_ties():
            warn_once(
                "%s.save_pretrained saves a copy of its own for %s, because tie_word_embeddings is "
                "False.",
                type(self).__name__,
                " and ".join(sorted(shared_names)),
            )
            state_dict = dict(kwargs.get("state_dict") or self.state_dict())
            # otherwise the library would not save these weights, and loading would initialize them
            state_dict |= {
                name: state_dict[name].clone() for name in shared_names & state_dict.keys()
            }
            kwargs["state_dict"] = state_dict
        with without_missing_code(self.config, type(self), save_directory):
            super().save_pretrained(save_directory, *args, **kwargs)

    def _undeclared_ties(self) -> set[str]:
        """Return the names of weights that are tied, although the configuration unties them."""
        if self.config.tie_word_embeddings:
            return set()
        tied_in_stacks = getattr(self.base_model, "_tied_weights_keys", None) or {}
        tied_names = {
            *(self._tied_weights_keys or {}),
            *(f"{self.base_model_prefix}.{name}" for name in tied_in_stacks),
        }
        first_names: dict[nn.Parameter, str] = {}
        return {
            name
            for name, weight in self.named_parameters(remove_duplicate=False)
            if first_names.setdefault(weight, name) != name and name in tied_names
        }

    def _warn_of_other_weights(self, state_dict: Mapping[str, Tensor] | None):
        """Warn if a model of the released class has weights that this class cannot load."""
        if type(self).__name__ != HEAD_CLASS or getattr(self, "_hf_peft_config_loaded", False):
            return
        if getattr(self, "hf_quantizer", None) is not None:
            return
        with torch.device("meta"):
            released_state = type(self)(self.config).state_dict()
        state = self.state_dict() if state_dict is None else state_dict
        weights, released_weights = (
            {(name, getattr(weight, "shape", None)) for name, weight in each.items()}
            for each in (state, released_state)
        )
        # a state dictionary from the user may contain tied weights under only one of their names
        missing_copies = self.all_tied_weights_keys.keys() - state.keys()
        names = {name for name, _ in weights ^ released_weights}
        if different_names := sorted(names - missing_copies):
            warn_once(
                "%s cannot load this changed model: %s weights differ from those of the "
                "configuration, the first is %s. If layers were removed, set encoder_layers and "
                "decoder_layers of the configuration; make other changes in a class of your own.",
                type(self).__name__,
                str(len(different_names)),
                different_names[0],
            )


@contextmanager
def without_missing_code(
    config: PreTrainedConfig, model_class: type[PreTrainedModel], folder: str | PathLike
) -> Iterator[None]:
    """Leave addresses of code out of a configuration, if the saved model lacks the code.

    A published model names its code in `auto_map` and `custom_pipelines`. If the classes of
    an installed package load this model, `save_pretrained` copies no code.

    Args:
        config: Configuration of the model.
        model_class: Class of the model.
        folder: Folder that the model is saved to within the `with` block.
    """
    file_names = {path.name for path in Path(folder).glob("*.py")}
    # `save_pretrained` copies the file of a registered class and all files that this file imports,
    # except the file of a notebook or a script
    if model_class._auto_class is not None and model_class.__module__ != "__main__":
        class_file = str(sys.modules[model_class.__module__].__file__)
        copied_files = class_file, *get_relative_import_files(class_file)
        file_names |= {Path(file).name for file in copied_files}
    entries = vars(config)
    before = {name: entries.pop(name) for name in ADDRESS_FIELDS if entries.get(name)}
    for name, addresses in before.items():
        kept = {
            key: address for key, address in addresses.items() if _is_in_files(address, file_names)
        }
        if kept:
            entries[name] = kept
    try:
        yield
    finally:
        entries |= before


def _is_in_files(address: Any, file_names: set[str]) -> bool:
    """Return whether the code at an address is in one of the files, or in another repository."""
    if isinstance(address, dict):
        address = address["impl"]
    modules = [address] if isinstance(address, str) else [part for part in address if part]
    return all("--" in part or f"{part.partition('.')[0]}.py" in file_names for part in modules)


__all__ = ["SavingMixin"]
