"""Training of the user's own model class: `--model_class FILE.py:CLASS`."""

import contextlib
import importlib.util
import inspect
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.func import functional_call
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from .. import modeling_vanilla_transformer as modeling
from ..atomic_files import write_atomically
from ..changes_vanilla_transformer import evaluating
from ..configuration_vanilla_transformer import (
    LAYER_FIELDS,
    SEPARATE_VOCABULARY_KEYS,
    TOKEN_ID_FIELDS,
    VanillaTransformerConfig,
    closest_name,
)
from ..console import CUSTOM_MODULES
from ..generation_vanilla_transformer import SearchMixin, set_paper_search
from ..loading import AUTO_CLASS
from ..sizes import T5_NAMES, size_of
from .data.batches import IGNORED

if TYPE_CHECKING:
    from .config import TrainConfig

# arguments that training passes to `forward`
FORWARD_ARGUMENTS = ("input_ids", "attention_mask", "decoder_input_ids", "use_cache")
# configuration fields that training reads
SIZE_FIELDS = ("vocab_size", "d_model", *LAYER_FIELDS)
# further fields of a row of Table 3 that configurations of other classes can have
SHARED_FIELDS = ("activation_function", "dropout", "attention_dropout", "activation_dropout")
# content that the file of each loaded module had when it was loaded
_LOADED_CODE: dict[ModuleType, bytes] = {}


def model_class_of(config: "TrainConfig", folder: Path | None = None) -> type[PreTrainedModel]:
    """Return the class of the model that a run trains.

    Args:
        config: Settings of the run.
        folder: Run folder, which contains a copy of the file once the run has begun.

    Returns:
        Class of this package, or the class that `model_class` names.

    Raises:
        ValueError: If there is no such file or class, the file differs from the copy in the run
            folder, or the class cannot be trained.
    """
    if config.model_class is None:
        return modeling.VanillaTransformerForConditionalGeneration
    source, _, name = config.model_class.rpartition(":")
    module: ModuleType = transformers
    if source != "transformers":
        module = _load_module(Path(source), None if folder is None else folder / Path(source).name)
    model_class: Any = getattr(module, name, None)
    if not _is_model(model_class):
        # to check each name of transformers would import all its models, so these names are not
        # filtered
        is_library = module is transformers
        attribute_names = [
            attribute
            for attribute in dir(module)
            if is_library or _is_model(vars(module).get(attribute))
        ]
        raise ValueError(
            f"model_class must name a PreTrainedModel, got {config.model_class!r}."
            + closest_name(name, [attribute for attribute in attribute_names if attribute != name])
        )
    _refuse_untrainable_class(model_class)
    if module is not transformers:
        if name in modeling.__all__:
            # when the model is loaded, the package's class of this name would be used instead
            raise ValueError(
                f"model_class must have a name of its own, got {name}: rename the class."
            )
        # `save_pretrained` then saves the file with the weights, and names it in config.json
        model_class.register_for_auto_class(AUTO_CLASS)
        if model_class.config_class.__module__ == module.__name__:
            model_class.config_class.register_for_auto_class()
    return model_class


def _is_model(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, PreTrainedModel)


def _load_module(path: Path, saved_copy: Path | None) -> ModuleType:
    existing_copy = saved_copy if saved_copy is not None and saved_copy.is_file() else None
    if (
        path.is_file()
        and existing_copy is not None
        and path.read_bytes() != existing_copy.read_bytes()
    ):
        raise ValueError(
            f"model_class must be in the file that the run began with: {path} differs from "
            f"{existing_copy}. Give another output_dir to train another model."
        )
    if not path.is_file() and existing_copy is None:
        raise ValueError(f"model_class must be FILE.py:CLASS, but the file {path} does not exist.")
    path = (path if existing_copy is None or path.is_file() else existing_copy).resolve()
    # a name of its own, so that `import utils` elsewhere does not find a user's utils.py. No module
    # of the package has this name, because the code is not the package's
    module_name, code = f"vanilla_transformer_model_class.{path.stem}", path.read_bytes()
    loaded_module = sys.modules.get(module_name)
    # a file that was edited is loaded again
    if loaded_module is not None and _LOADED_CODE[loaded_module] == code:
        return loaded_module
    # a file with Python code always has a loader
    spec: Any = importlib.util.spec_from_file_location(module_name, path)
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    CUSTOM_MODULES.add(module_name)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    _LOADED_CODE[module] = code
    return module


def _forward_arguments(model_class: type[PreTrainedModel]) -> set[str]:
    """Return the names of the arguments that `forward` takes, or passes on to a base class."""
    argument_names: set[str] = set()
    classes: tuple[Any, ...] = model_class.__mro__
    for base_class in classes:
        if "forward" in vars(base_class):
            parameters = inspect.signature(base_class.forward).parameters
            argument_names |= parameters.keys()
            # with **kwargs, other arguments are passed on to the forward of the base class
            if not any(
                parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()
            ):
                break
    return argument_names


def _refuse_untrainable_class(model_class: type[PreTrainedModel]):
    name, config_class = model_class.__name__, model_class.config_class
    argument_names = _forward_arguments(model_class)
    missing_arguments = [
        argument for argument in FORWARD_ARGUMENTS if argument not in argument_names
    ]
    if missing_arguments:
        raise ValueError(
            f"model_class must have a forward with the arguments {', '.join(FORWARD_ARGUMENTS)}, "
            f"but {name}.forward has no {missing_arguments[0]}."
        )
    is_sequence_to_sequence = getattr(config_class, "is_encoder_decoder", False)
    if not (is_sequence_to_sequence and model_class.can_generate()):
        raise ValueError(
            f"model_class must be an encoder-decoder with a language model head, got {name}."
        )
    fields = _fields_of(config_class)
    for size_field in SIZE_FIELDS:
        if not {size_field, T5_NAMES.get(size_field)} & fields:
            raise ValueError(
                f"model_class must have a configuration with the field {size_field}, but "
                f"{config_class.__name__} has none."
            )


def _fields_of(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return the names of a configuration's own fields and their aliases."""
    own_classes = config_class.__mro__[: config_class.__mro__.index(PreTrainedConfig)]
    field_names = {name for own_class in own_classes for name in inspect.get_annotations(own_class)}
    return field_names | set(config_class.attribute_map)


def make_config(
    model_class: type[PreTrainedModel], paper_row: str, **changed_fields: Any
) -> PreTrainedConfig:
    """Return the configuration of a model.

    Args:
        model_class: Class of the model.
        paper_row: Row of Table 3 that gives the sizes.
        changed_fields: Fields that differ from this row.

    Returns:
        The configuration.

    Raises:
        ValueError: If the row or a field is unknown, a field has an invalid value, or a field would
            be lost when the model is saved and loaded.
    """
    config_class = model_class.config_class
    fields = _fields_of(config_class)
    for name in changed_fields:
        # fields of separate vocabularies pass, because the configuration has a better error
        allowed_fields = {
            *fields,
            *TOKEN_ID_FIELDS,
            "attn_implementation",
            *SEPARATE_VOCABULARY_KEYS,
        }
        if not {name, T5_NAMES.get(name)} & allowed_fields:
            raise ValueError(
                f"{name} is not a field of {config_class.__name__}."
                + closest_name(str(name), sorted(fields))
            )
    if issubclass(config_class, VanillaTransformerConfig):
        config = config_class.from_paper(paper_row, **changed_fields)
    else:
        aliases = VanillaTransformerConfig.attribute_map
        shared_names = {
            *SIZE_FIELDS,
            *SHARED_FIELDS,
            *aliases,
            *aliases.values(),
        } & changed_fields.keys()
        row_sizes = {
            our_name: changed_fields[other_name]
            for our_name, other_name in T5_NAMES.items()
            if other_name in changed_fields
        }
        row_sizes |= {name: changed_fields[name] for name in shared_names}
        row_config = VanillaTransformerConfig.from_paper(paper_row, **row_sizes)
        sizes = {name: getattr(row_config, name) for name in (*SIZE_FIELDS, *SHARED_FIELDS)}
        sizes |= {other_name: sizes[name] for name, other_name in T5_NAMES.items()}
        sizes["d_kv"] = row_config.d_k or row_config.d_model // row_config.encoder_attention_heads
        # the default token ids of the class belong to another vocabulary, so 0 replaces them
        sizes |= dict.fromkeys(TOKEN_ID_FIELDS, 0)
        sizes = {name: size for name, size in sizes.items() if name in fields}
        config = config_class(
            **sizes
            | {name: changed_fields[name] for name in changed_fields if name not in shared_names}
        )
    reloaded_config = config_class.from_dict(json.loads(config.to_json_string(use_diff=False)))
    for name in changed_fields:
        if name != "attn_implementation" and size_of(reloaded_config, name) != size_of(
            config, name
        ):
            raise ValueError(
                f"{name} would be lost when the model is saved: it was {size_of(config, name)!r}, "
                f"and would be {size_of(reloaded_config, name)!r}."
            )
    return config


def make_model(config: "TrainConfig", model_config: PreTrainedConfig) -> PreTrainedModel:
    """Create the model that a run trains, with initial weights.

    Args:
        config: Settings of the run.
        model_config: Configuration of the model.

    Returns:
        The model.

    Raises:
        ValueError: As in `model_class_of`, or if the model has another vocabulary size or shares
            weights that its class does not declare.
    """
    model = model_class_of(config, Path(config.output_dir or "."))(model_config)
    vocab_size = model_config.vocab_size
    embeddings = [model.get_output_embeddings()]
    # the user's encoder may have no embedding
    with contextlib.suppress(NotImplementedError):
        embeddings.append(model.get_input_embeddings())
    for embedding in embeddings:
        # an embedding of the user's own class may have no weight, or a weight of another shape
        is_table = isinstance(embedding, nn.Embedding | nn.Linear)
        if is_table and len(embedding.weight) != vocab_size:
            raise ValueError(
                f"{type(model).__name__} must have embeddings for vocab_size={vocab_size} tokens, "
                f"got {len(embedding.weight)}: set the field of {type(model_config).__name__} that "
                "sizes the embeddings with --model."
            )
    _refuse_undeclared_sharing(model)
    return model


def _refuse_undeclared_sharing(model: PreTrainedModel):
    # the library saves a weight with two names only if the class declares in `_tied_weights_keys`
    # which of them is tied to the other. `post_init` collects these declarations, so a class that
    # does not call it has none
    declared_names = getattr(model, "all_tied_weights_keys", {})
    first_names: dict[nn.Parameter, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name in declared_names:
            continue
        first_name = first_names.setdefault(weight, name)
        if first_name != name:
            raise ValueError(
                f"{type(model).__name__} must declare shared weights in `_tied_weights_keys`, or "
                f"they cannot be saved: {name!r} shares its weight with "
                f"{first_name!r}, but has no entry."
            )


def try_model(model: PreTrainedModel) -> bool:
    """Run `forward` and `generate` once, so that a broken model fails before training.

    Args:
        model: New model on the CPU. A model with GPU kernels cannot run there, so it is not tried.

    Returns:
        Whether the model has a loss of its own: with labels, its loss is not the mean cross entropy
        of its logits.

    Raises:
        ValueError: If the model or its search fails, or the logits do not have the shape [B, T, V].
    """
    name, vocab_size = type(model).__name__, model.config.vocab_size
    if model.config._attn_implementation.startswith("flash"):
        return False
    pad = model.config.pad_token_id
    first, second, third = [token for token in range(3, 7) if token != pad][:3]
    ids = torch.tensor([[first, second, third], [third, second, pad]])
    is_padding = ids == pad
    inputs = {"input_ids": ids, "attention_mask": (~is_padding).long()}
    labels = ids.masked_fill(is_padding, IGNORED)
    batch = {**inputs, "decoder_input_ids": ids, "use_cache": False}
    if "labels" in _forward_arguments(type(model)):
        batch["labels"] = labels
    search = {"num_beams": 2, "max_new_tokens": 3, "pad_token_id": pad}
    if isinstance(model, SearchMixin):
        search["engine"] = "off"
    outputs = []
    with torch.random.fork_rng(devices=[]), evaluating(model):
        try:
            for is_training in (True, False):
                model.train(is_training)
                # the model may count its calls, so the copies of its buffers take these two
                buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
                with torch.set_grad_enabled(is_training):
                    output = functional_call(model, buffers, (), batch)
                if getattr(output, "logits", None) is None:
                    raise TypeError(
                        "forward must return an output with `.logits`, as Seq2SeqLMOutput, got "
                        f"{type(output).__name__}."
                    )
                outputs.append(output)
            model.generate(**inputs, **search)
        except Exception as error:
            raise ValueError(
                f"{name} must run `forward` and `generate`, but failed on a batch of two "
                f"sentences: {type(error).__name__}: {error}"
            ) from error
    has_own_loss = False
    for output in outputs:
        if output.logits.shape != (*ids.shape, vocab_size):
            raise ValueError(
                f"the logits of {name} must have the shape {(*ids.shape, vocab_size)}, got "
                f"{tuple(output.logits.shape)}."
            )
        loss = getattr(output, "loss", None)
        cross_entropy = F.cross_entropy(output.logits.float().mT, labels)
        has_own_loss |= loss is not None and not torch.isclose(loss.float(), cross_entropy)
    return has_own_loss


def copy_model_file(config: "TrainConfig", folder: Path):
    """Copy the file of the model class into the run folder.

    Args:
        config: Settings of the run.
        folder: Run folder.
    """
    source = (config.model_class or "").rpartition(":")[0]
    copy_path = folder / Path(source).name
    if config.has_model_file and not copy_path.is_file():
        write_atomically(copy_path, Path(source).read_bytes())


def set_search(model: PreTrainedModel, config: "TrainConfig"):
    """Set the search settings of the recipe as the defaults of a model.

    Args:
        model: Model to change; a model of another class gets the library's nearest settings.
        config: Settings of the run.
    """
    if isinstance(model, SearchMixin):
        set_paper_search(
            model, config.num_beams, config.length_penalty_alpha, config.max_extra_tokens
        )
        return
    model_config = model.config
    max_positions = getattr(model_config, "max_position_embeddings", math.inf)
    model.generation_config = GenerationConfig(
        **{name: getattr(model_config, name, None) for name in TOKEN_ID_FIELDS},
        num_beams=config.num_beams,
        # the library's penalty, length ** length_penalty, is similar to the paper's
        length_penalty=config.length_penalty_alpha,
        max_length=min(max_positions, config.max_length + config.max_extra_tokens),
    )
