"""Every private name of a library that the package calls or overrides, in one place.

A new version of a library may remove a private name. The bounds of `setup.cfg` exclude untested
versions; these tests list the names that an untested version lacks.
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import vanilla_transformer

ROOT = Path(vanilla_transformer.__file__).parent
PARTS = ("conversion", "export", "paper", "serving", "space", "tokenization", "train")
OPTIONAL = ("ctranslate2", "deepspeed")
# private names by the full name of the class or module that has them
PRIVATE_NAMES = {
    # replaced: the score of a sample, which must be a number of Python
    "sacrebleu.metrics.base.Metric": ("_compute_score_from_stats",),
    # the interval of a bootstrap, which is public only as text
    "sacrebleu.metrics.base.Score": ("_ci", "_mean"),
    "transformers.generation.utils.GenerationMixin": (
        # overridden: the loops of `generate`, which the search of this package replaces
        "_beam_search",
        "_sample",
        # overridden: the check of the model's arguments, which may be those of a changed part
        "_validate_model_kwargs",
        # overridden: no cache if a changed model cannot use one
        "_prepare_cache_for_generation",
        # called: the arguments of the next step
        "_update_model_kwargs_for_generation",
        # called by these loops for the logits, and overridden in the stand-in for a model
        "_prefill",
        # called: steps of these loops
        "_has_unfinished_sequences",
        "_valid_auto_compile_criteria",
    ),
    "transformers.generation.configuration_utils.GenerationConfig": (
        "_from_model_config",
        "_get_default_generation_params",
    ),
    # set on the configuration of a search while `generate` prepares it
    "transformers.generation.utils": (
        "_eos_token_tensor",
        "_pad_token_tensor",
        # a method that the beam search calls if the model has it
        "_get_top_k_continuations",
        "_reorder_cache",
    ),
    "transformers.models.nllb.tokenization_nllb.NllbTokenizer": ("_build_translation_inputs",),
    "transformers.modeling_utils.PreTrainedModel": (
        # the Auto class that a class is registered with, whose file `save_pretrained` copies
        "_auto_class",
        "_can_compile_fullgraph",
        "_can_record_outputs",
        "_check_and_adjust_attn_implementation",
        "_get_resized_embeddings",
        "_init_weights",
        "_keys_to_ignore_on_save",
        "_no_split_modules",
        "_resize_token_embeddings",
        "_skip_keys_device_placement",
        "_supports_flash_attn",
        "_supports_flex_attn",
        "_supports_sdpa",
        "_tied_weights_keys",
        "_tp_plan",
    ),
    "transformers.configuration_utils.PreTrainedConfig": ("_attn_implementation",),
    "transformers.pipelines.base": (
        "_batch_size",
        "_forward_params",
        "_postprocess_params",
        "_preprocess_params",
        "_registered_impl",
    ),
    "transformers.pipelines.base.Pipeline": (
        "_forward",
        "_load_feature_extractor",
        "_load_image_processor",
        "_load_processor",
        "_load_tokenizer",
        "_load_video_processor",
        "_sanitize_parameters",
    ),
    # of the progress bars that are open
    "tqdm.std.tqdm": ("_instances",),
    # set by Accelerator.prepare, which wraps the forward of a model
    "accelerate.accelerator": ("_original_forward",),
    "accelerate.state.AcceleratorState": ("_reset_state",),
    "transformers.tokenization_utils_base": ("_extra_special_tokens", "_special_tokens_map"),
    "transformers.tokenization_utils_base.PreTrainedTokenizerBase": (
        "_add_tokens",
        "_decode",
        "_save_pretrained",
    ),
    "datasets.arrow_dataset": ("_fingerprint",),
    "datasets.builder": ("_generate_tables", "_info", "_split_generators"),
    "torch": ("_assert_async", "_foreach_add_", "_foreach_mul_", "_foreach_sub"),
    "torch.cpu": ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_vnni_supported"),
    "torch.nn.Module": ("_compiled_call_impl",),
    "torch.library": ("_impls",),
    "torch.overrides": ("_get_current_function_mode_stack",),
    "torch.utils._python_dispatch": ("_get_current_dispatch_mode_stack",),
    "torch.Tensor": ("_backward_hooks", "_version"),
    "torch.nn.modules.module": (
        "_backward_hooks",
        "_backward_pre_hooks",
        "_call_impl",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_modules",
        "_non_persistent_buffers_set",
    ),
    # of builds for x86
    "torch.ops.mkl": ("_mkl_linear", "_mkl_reorder_linear_weight"),
    "torch.ops.mkldnn": ("_linear_pointwise", "_reorder_linear_weight"),
    # installed by the extras alone
    "ctranslate2.converters.converter": ("_load",),
    "deepspeed.runtime.bf16_optimizer": ("_lazy_init_hp_params_optimizer_state",),
}
# of Python's own library
OF_PYTHON = {
    "_ArgumentGroup",
    "_SubParsersAction",
    "_abc_impl",
    "_actions",
    "_asdict",
    "_exit",
    "_option_string_actions",
    "_replace",
}
# what torch adds to each class of an autograd function
ADDED_BY_TORCH = {"_backward_cls"}


def test_the_installed_libraries_have_each_private_name():
    gone = [
        f"{version_of(address)} has no {address}.{name}, which the package uses: see what took "
        "its place before this version is allowed in setup.cfg."
        for address, names in PRIVATE_NAMES.items()
        if (owner := found(address)) is not None
        for name in names
        if not hasattr(owner, name) and not re.search(rf"\b{name}\b", source_of(owner))
    ]
    assert not gone, "\n".join(gone)


def found(address: str) -> Any:
    """Return a class or a module, or None if this machine cannot have it."""
    if address.startswith("torch.ops.mkl") and not torch.backends.mkl.is_available():
        return None
    parts = address.split(".")
    if parts[0] in OPTIONAL and importlib.util.find_spec(parts[0]) is None:
        return None
    owner = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(owner, part):
            importlib.import_module(".".join(parts[:number]))
        owner = getattr(owner, part)
    return owner


def source_of(owner: Any) -> str:
    return inspect.getsource(owner) if inspect.isclass(owner) or inspect.ismodule(owner) else ""


def version_of(address: str) -> str:
    library = address.partition(".")[0]
    return f"{library} {importlib.metadata.version(library)}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def trees() -> Iterator[ast.AST]:
    """Yield every file of the package, without its tests and results."""
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] in PARTS or path.parent == ROOT:
            yield ast.parse(path.read_text(encoding="utf-8"))


def names_in_code() -> tuple[set[str], set[str]]:
    """Return the private names that the package reads from libraries, and those it defines."""
    read, made = set(), set()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                made.add(name)
            case ast.ClassDef(name=name):
                made.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                made.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                made.add(name)
            case ast.Attribute(attr=name) | ast.alias(name=name):
                read.add(name)
    return {name for name in read if is_private(name)}, made


def test_each_private_name_that_the_package_calls_is_listed():
    read, made = names_in_code()
    listed = {name for names in PRIVATE_NAMES.values() for name in names}
    assert len(read - made) > 20
    assert read - made - listed == OF_PYTHON & read


def test_each_private_name_that_the_package_overrides_is_listed():
    listed = {name for names in PRIVATE_NAMES.values() for name in names}
    overridden = set()
    for module in pkgutil.walk_packages(vanilla_transformer.__path__, "vanilla_transformer."):
        if module.name.split(".")[1] in PARTS or "_vanilla_transformer" in module.name:
            for kind in vars(importlib.import_module(module.name)).values():
                overridden |= overridden_by(kind) if inspect.isclass(kind) else set()
    assert {"_sample", "_init_weights", "_forward", "_load"} <= overridden
    assert overridden - listed <= OF_PYTHON | ADDED_BY_TORCH


def overridden_by(kind: type) -> set[str]:
    """Return the private names of a library's classes that classes of the package override."""
    ours, theirs = set(), set()
    for each in kind.__mro__:
        is_ours = each.__module__.startswith("vanilla_transformer.")
        (ours if is_ours else theirs).update(filter(is_private, vars(each)))
    return ours & theirs
