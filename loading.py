"""Load the model, tokenizer and configuration of a run, a folder or a Hub name."""

import errno
import fnmatch
import glob
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    get_tokenizer_config,
    tokenizer_class_from_name,
)
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, cached_file

from .checks_vanilla_transformer import (
    check_numbers,
    check_search_tokens,
    check_tokenizer,
    vocab_size_of,
)
from .console import TRUST, add_file_to_errors, refuse_code, sentence_of
from .records import (
    TEXT,
    Schema,
    list_of,
    mapping,
    one_of,
    or_null,
    read_json,
    read_text,
    refuse_lfs_pointer,
    whole_number,
)
from .registration import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from .released_code_vanilla_transformer import file_difference
from .sizes import WEIGHT_FILES, refuse_other_sizes
from .weight_checks import UNREADABLE, check_fit

PUBLIC_CLASS = VanillaTransformerForConditionalGeneration
AUTO_CLASS = "AutoModelForSeq2SeqLM"
ADAPTER_FILE = "adapter_config.json"
DTYPE_SCHEMA = Schema(
    "the name of a floating-point dtype of torch",
    lambda name: (
        isinstance(dtype := getattr(torch, str(name).removeprefix("torch."), None), torch.dtype)
        and dtype.is_floating_point
    ),
)
# fields of any `config.json` that this package reads; the configuration class checks the others
CONFIG_SCHEMA = mapping(
    optional={
        "model_type": TEXT,
        "architectures": or_null(list_of(TEXT)),
        "auto_map": mapping(other_items=TEXT),
        "custom_pipelines": mapping(other_items=mapping()),
        "vocab_size": whole_number(1),
        "dtype": or_null(DTYPE_SCHEMA),
        "torch_dtype": or_null(DTYPE_SCHEMA),
    }
)
# a special token is text, or a mapping of the properties of an AddedToken
TOKEN_SCHEMA = Schema(
    "text, a mapping or null", lambda value: value is None or isinstance(value, str | dict)
)
TOKENIZER_SCHEMA = mapping(
    optional={
        **{
            f"{name}_token": TOKEN_SCHEMA
            for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk")
        },
        "tokenizer_class": or_null(TEXT),
        # 1e30 means no limit
        "model_max_length": or_null(
            Schema("a number above 0", lambda value: type(value) in (int, float) and value > 0)
        ),
        # a list in files of old versions
        "auto_map": Schema(
            "a mapping of addresses", lambda value: isinstance(value, dict | list | None)
        ),
        "padding_side": one_of("left", "right"),
        "truncation_side": one_of("left", "right"),
    }
)
# optional packages that some tokenizers of transformers need
TOKENIZER_PACKAGES = ("sentencepiece", "sacremoses")
# files of tokenizers that the Hub keeps in LFS
TOKENIZER_FILES = ("tokenizer.json", "sentencepiece.bpe.model", "spiece.model", "source.spm")
# advice in commands that never run the code of a tokenizer
TOKENIZER_WITHOUT_CODE = (
    "Load the tokenizer in Python, and save its backend_tokenizer as a PreTrainedTokenizerFast, "
    "which needs no code."
)
# base class of the HTTP client's errors: of requests or of httpx, by the version of huggingface_hub
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
# seconds to wait until the Hub answers whether it has a model
HUB_TIMEOUT = 10
# settings of `from_pretrained` that `load` does not have; a pipeline ignores a dtype
LIBRARY_SETTINGS = (
    "attn_implementation",
    "cache_dir",
    "device_map",
    "dtype",
    "quantization_config",
    "revision",
    "subfolder",
    "token",
    "torch_dtype",
)
NOT_CONVERTED = (
    "cannot be converted: use its own toolkit, or train a model of this package on its "
    "translations."
)
SOCKEYE = f" A model of Sockeye {NOT_CONVERTED}"
TENSORFLOW = f" A model of TensorFlow (OpenNMT-tf, tensor2tensor) {NOT_CONVERTED}"
# advice about models that no kind of `convert` reads, by patterns of their file names
FOREIGN_FILES = {
    "*.npz": (
        " Convert a model of Marian (.npz) with `python -m "
        "transformers.models.marian.convert_marian_to_pytorch` of transformers 4."
    ),
    "params.best": SOCKEYE,
    "params.[0-9][0-9][0-9][0-9][0-9]": SOCKEYE,
    "model.[0-9][0-9].safetensors": f" A model of Eole {NOT_CONVERTED}",
    "*.index": TENSORFLOW,
    "*.data-?????-of-?????": TENSORFLOW,
    "saved_model.pb": TENSORFLOW,
    "model.bin": (
        " The file model.bin is a model of CTranslate2: use the model that it was exported from."
    ),
}
# start of the errors about a run
RUN_RULE = "run must be a run folder, a model folder or a Hub name"


def load(
    name: str | Path,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    int8: bool = False,
    **settings: Any,
) -> TranslationPipeline:
    """Load a model for translation: one of this package, or an encoder-decoder of transformers.

    The inference engine runs the search if it supports the model. Marian (OPUS-MT), FSMT, M2M100
    and NLLB models are converted for the engine, and share their weights with the converted model.
    Other models run their own modules.

    Args:
        name: Run folder, checkpoint of a run, model folder or Hub name. Adapters of peft are merged
            into the base model that their configuration names.
        device: Device of the model; by default the CUDA GPU if there is one, otherwise the CPU.
        trust_remote_code: Whether to run the Python code that is saved with the model.
        int8: Whether to quantize the linear layers to int8, for which the model is first converted
            to float32.
        **settings: Settings of `TranslationPipeline` and of `generate`, such as `src_lang`,
            `tgt_lang` and `num_beams`.

    Returns:
        Pipeline with the model in evaluation mode.

    Raises:
        ValueError: If the model cannot be loaded or cannot translate, the tokenizer does not belong
            to the model, or a setting is one of `from_pretrained`.
    """
    for setting in LIBRARY_SETTINGS:
        if setting in settings:
            raise ValueError(
                f"load does not take {setting}: give it to from_pretrained of the model, and pass "
                "model and tokenizer to a TranslationPipeline."
            )
    model, tokenizer = load_run(name, trust_remote_code, of_library=True)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if int8:
        settings["int8"] = True
        model.to(torch.float32)
    return TranslationPipeline(model.eval().to(device), tokenizer, device=device, **settings)


def load_run(
    run: str | Path | TranslationPipeline,
    trust_remote_code: bool = False,
    of_library: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and the tokenizer of a run.

    Args:
        run: Run folder, checkpoint of a run, model folder, Hub name, or a pipeline, whose model and
            tokenizer are returned.
        trust_remote_code: Whether to run the Python code that is saved with the model.
        of_library: Whether to load any encoder-decoder of transformers; if false, only those that a
            run of this package trained.

    Returns:
        Model and tokenizer.

    Raises:
        ValueError: If model or tokenizer cannot be read, the tokenizer does not belong to the
            model, or the code of the model's class is missing or not trusted.
    """
    if isinstance(run, TranslationPipeline):
        return run.model, run.tokenizer
    check_local(run, RUN_RULE)
    if Path(run, "checkpoints").is_dir() and not Path(run, CONFIG_NAME).exists():
        raise ValueError(
            f"{RUN_RULE}, got {str(run)!r}, a run that has no model yet: `vanilla-transformer "
            f"average {run}` averages its checkpoints into one."
        )
    if _has_file(run, ADAPTER_FILE) and not _has_file(run, CONFIG_NAME):
        return _load_with_adapters(run, trust_remote_code, of_library)
    if Path(run).is_dir() and not Path(run, CONFIG_NAME).is_file():
        raise ValueError(
            f"{RUN_RULE}, got {str(run)!r}, a folder without {CONFIG_NAME}."
            f"{conversion_advice(Path(run))}"
        )
    try:
        model = load_whole(_model_class_of(run, trust_remote_code, of_library), run, of_library)
        # the tokenizer of a checkpoint is in the run folder
        is_in_run = Path(run).is_dir() and Path(run).resolve().parent.name == "checkpoints"
        is_checkpoint = is_in_run and not Path(run, TOKENIZER_CONFIG_FILE).is_file()
        tokenizer_source = Path(run).resolve().parents[1] / "tokenizer" if is_checkpoint else run
    except (OSError, StrictDataclassError) as error:
        raise ValueError(f"{RUN_RULE}, got {str(run)!r}: {sentence_of(error)}") from error
    tokenizer = read_tokenizer(tokenizer_source, trust_remote_code)
    check_tokenizer(model, tokenizer)
    return model, tokenizer


def _load_with_adapters(
    adapters: str | Path, trust_remote_code: bool, of_library: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model of adapters, and merge the adapters into it."""
    try:
        from peft import PeftModel
        from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
    except ImportError as error:
        raise ValueError(
            f"{adapters} holds adapters, which need peft, which is not installed: pip install peft."
        ) from error
    entries = read_json(
        Path(cached_file(str(adapters), ADAPTER_FILE)), mapping({"base_model_name_or_path": TEXT})
    )
    base = entries["base_model_name_or_path"]
    if Path(base, ADAPTER_FILE).is_file() and not Path(base, CONFIG_NAME).is_file():
        raise ValueError(
            f"adapters {str(adapters)!r} must have a base model, got {base!r}, which holds "
            "adapters too."
        )
    model, tokenizer = load_run(base, trust_remote_code, of_library)
    if _has_file(adapters, TOKENIZER_CONFIG_FILE):
        tokenizer = read_tokenizer(adapters, trust_remote_code)
    if not (_has_file(adapters, SAFETENSORS_WEIGHTS_NAME) or _has_file(adapters, WEIGHTS_NAME)):
        raise ValueError(f"adapters {str(adapters)!r} must have {SAFETENSORS_WEIGHTS_NAME}.")
    for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME):
        refuse_lfs_pointer(Path(adapters, name))
    try:
        model = PeftModel.from_pretrained(model, str(adapters)).merge_and_unload()
    except SafetensorError as error:
        raise ValueError(f"adapters {str(adapters)!r} cannot be read: {error}.") from error
    # peft has no error of its own: an unknown method is a KeyError, one that cannot be merged is an
    # AttributeError
    except (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"adapters {str(adapters)!r} cannot be loaded: {error}") from error
    check_tokenizer(model, tokenizer)
    return model, tokenizer


def _model_class_of(
    run: str | Path, trust_remote_code: bool, of_library: bool
) -> type[PreTrainedModel]:
    """Return the class that a model was saved with; refuse code that is not trusted."""
    config_entries = read_config(run)
    auto_map = config_entries.get("auto_map") or {}
    code_class = _class_in_folder(run, auto_map.get(AUTO_CLASS, ""), trust_remote_code)
    if code_class is not None:
        return code_class
    config_class = _config_class_of(run, config_entries, trust_remote_code)
    class_name = next(iter(config_entries.get("architectures") or []), PUBLIC_CLASS.__name__)
    if issubclass(config_class, VanillaTransformerConfig):
        if class_name != PUBLIC_CLASS.__name__:
            raise ValueError(
                f"{run} was saved by the class {class_name}, but holds no code of that class. Load "
                f"the model with {class_name}.from_pretrained, and pass model and tokenizer to a "
                "TranslationPipeline."
            )
        return PUBLIC_CLASS
    # a run may have trained a class of transformers
    recipe = Path(run, "recipe.yaml")
    library_class: Any = getattr(transformers, class_name, None)
    # no Auto class is used here, because it would run the code that the folder names
    is_model = inspect.isclass(library_class) and issubclass(library_class, PreTrainedModel)
    if is_model and recipe.is_file() and f"transformers:{class_name}" in read_text(recipe):
        return library_class
    if of_library and config_class in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[config_class]
    expected = "an encoder-decoder for translation" if of_library else "a vanilla_transformer"
    raise ValueError(f"run must be {expected}, got a {config_entries.get('model_type')}: {run}.")


def _class_in_folder(
    run: str | Path, address: str, trust_remote_code: bool
) -> type[PreTrainedModel] | None:
    """Return the class at an address in a folder; None if it is of this package, or not given."""
    if not address:
        return None
    difference = None
    if address == auto_map_address(PUBLIC_CLASS):
        # a published model of this package refers to code that is already installed here
        code_file = cached_file(
            run, f"{address.split('.')[0]}.py", _raise_exceptions_for_missing_entries=False
        )
        difference = file_difference(code_file) if code_file else None
        if difference is None:
            return None
    if not trust_remote_code:
        refuse_code(Path(run, CONFIG_NAME), _describe_code(address, difference))
    model_class = get_class_from_dynamic_module(address, str(run))
    # the class is registered, so that `save_pretrained` copies its file too
    model_class.register_for_auto_class(AUTO_CLASS)
    return model_class


def _config_class_of(
    run: str | Path, config_entries: dict[str, Any], trust_remote_code: bool
) -> type[PreTrainedConfig]:
    """Return the class of a configuration; refuse code that is not trusted."""
    auto_map, model_type = config_entries.get("auto_map") or {}, config_entries.get("model_type")
    if model_type is None and not auto_map:
        advice = foreign_advice(run) or (
            " Models of other programs, such as CTranslate2 and Eole, run only in these programs."
        )
        raise ValueError(
            f"{RUN_RULE}, got {str(run)!r}, whose {CONFIG_NAME} names no model_type.{advice}"
        )
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    if "AutoConfig" not in auto_map:
        raise ValueError(
            f"{RUN_RULE}, got {str(run)!r}, whose model_type {model_type!r} is not in transformers "
            f"{transformers.__version__}."
        )
    if not trust_remote_code:
        refuse_code(Path(run, CONFIG_NAME), _describe_code(auto_map["AutoConfig"]))
    return type(AutoConfig.from_pretrained(run, trust_remote_code=trust_remote_code))


def _describe_code(address: str, difference: str | None = None) -> str:
    """Describe the code at an address of an `auto_map`."""
    repository, _, address = address.rpartition("--")
    module, _, class_name = address.rpartition(".")
    origin = f" of {repository}" if repository else ""
    return f"{module}.py{origin} ({difference or f'class {class_name}'})"


def read_config(source: str | Path) -> dict[str, Any]:
    """Read the configuration of a model as it was saved.

    Args:
        source: Folder or Hub name.

    Returns:
        The content of `config.json`.

    Raises:
        OSError: If the source has no `config.json`.
        ValueError: If the content does not match `CONFIG_SCHEMA`.
    """
    path = cached_file(str(source), CONFIG_NAME)
    # transformers raises no error if this file is missing
    if path is None:
        raise OSError(f"{source} has no {CONFIG_NAME}.")
    return read_json(Path(path), CONFIG_SCHEMA)


def read_tokenizer(
    source: str | Path, trust_remote_code: bool = False, remedy: str = TRUST
) -> PreTrainedTokenizerBase:
    """Load a tokenizer; every error names its source.

    Args:
        source: Folder or Hub name.
        trust_remote_code: Whether to run the Python code that is saved with the tokenizer.
        remedy: Sentence that says what the user can do if the tokenizer needs this code.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If the tokenizer cannot be read, or needs code that is not trusted or a package
            that is not installed.
    """
    try:
        tokenizer_file = cached_file(
            str(source), TOKENIZER_CONFIG_FILE, _raise_exceptions_for_missing_entries=False
        )
        if tokenizer_file is not None:
            read_json(Path(tokenizer_file), TOKENIZER_SCHEMA)
        for name in TOKENIZER_FILES:
            refuse_lfs_pointer(Path(source, name))
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        # without a file of the vocabulary, some classes return a tokenizer with an empty
        # vocabulary. The generic class also looks for files with other names
        names = dict.fromkeys(tokenizer.vocab_files_names.values())
        files = [Path(source, name) for name in (*names, TOKENIZER_FILES[0])]
        is_generic = not names or type(tokenizer) is PreTrainedTokenizerFast
        if Path(source).is_dir() and not is_generic and not any(map(Path.is_file, files)):
            raise ValueError(f"it has none of {', '.join(names)}.")
        return tokenizer
    except ImportError as error:
        package_names = [name for name in TOKENIZER_PACKAGES if name in str(error).lower()]
        if not package_names:
            raise
        raise ValueError(
            f"tokenizer {str(source)!r} needs {package_names[0]}, which is not installed: pip "
            f"install {package_names[0]}."
        ) from error
    # every error is caught, because the errors of the libraries are unspecific: if one of several
    # files is missing, transformers opens a file named None. A panic of the Rust code in tokenizers
    # is a BaseException, not an Exception
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        if "trust_remote_code=True" in str(error):
            addresses = get_tokenizer_config(source)["auto_map"]
            if isinstance(addresses, dict):
                addresses = addresses["AutoTokenizer"]
            code_description = _describe_code(next(filter(None, reversed(addresses))))
            refuse_code(Path(source, TOKENIZER_CONFIG_FILE), code_description, remedy)
        reason = " ".join(str(error).split())
        is_opened_as_none = "PathLike object, not NoneType" in reason
        if is_opened_as_none and (missing_files := _missing_tokenizer_files(source)):
            reason = f"it has no {', '.join(missing_files)}."
        configurations = (TOKENIZER_CONFIG_FILE, CONFIG_NAME)
        has_no_class = not any(Path(source, name).is_file() for name in configurations)
        if has_no_class and "instantiate the backend tokenizer" in reason:
            reason = "it has no tokenizer.json, which `save` of the library tokenizers writes."
        raise ValueError(f"tokenizer {str(source)!r} cannot be loaded: {reason}") from error


def _missing_tokenizer_files(source: str | Path) -> list[str]:
    """Return the names of files that the class of a tokenizer needs and the source lacks."""
    class_name = get_tokenizer_config(source).get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(
        read_config(source).get("model_type")
    )
    tokenizer_class = class_name and tokenizer_class_from_name(class_name)
    file_names = getattr(tokenizer_class, "vocab_files_names", {})
    parameters = inspect.signature(tokenizer_class).parameters if file_names else {}
    names = [name for name in parameters if name in file_names]
    # FSMT's class has a default for each file, but needs all of them
    needed = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    return [file_names[name] for name in needed or names if not _has_file(source, file_names[name])]


def _check_source(model_class: type[PreTrainedModel], source: str | Path):
    """Refuse a model whose files refer to other code or another model, or declare wrong sizes.

    Args:
        model_class: Class of the model.
        source: Folder or Hub name.

    Raises:
        OSError: If there is no such model.
        ValueError: If a file refers to other code or another model, cannot be read, or declares
            sizes that the weights do not have.
    """
    # transformers silently ignores a generation configuration that it cannot read
    if _has_file(source, GENERATION_CONFIG_NAME):
        try:
            read_json(Path(cached_file(str(source), GENERATION_CONFIG_NAME)), mapping())
            GenerationConfig.from_pretrained(source)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{source} must have a {GENERATION_CONFIG_NAME} of search settings, or none, got "
                f"one that cannot be read: {error}"
            ) from error
    if _has_file(source, ADAPTER_FILE):
        raise ValueError(
            f"{source} must be a complete model, got adapters, whose {ADAPTER_FILE} names their "
            "base model. Merge them into this model first, with merge_and_unload of peft."
        )
    config_entries = read_config(source)
    kernel = config_entries.get("attn_implementation")
    if kernel is not None and "/" in str(kernel):
        remedy = "Remove attn_implementation from the file, and set it in Python."
        refuse_code(Path(source, CONFIG_NAME), f"the kernel {kernel} on the Hub", remedy)
    with add_file_to_errors(Path(source, CONFIG_NAME)):
        config = model_class.config_class.from_pretrained(source)
    weight_files = [path for name in WEIGHT_FILES if (path := Path(source, name)).exists()][:1]
    if weight_files and weight_files[0].suffix == ".json":
        weight_files = sorted(Path(source).glob("model-*.safetensors"))
    for path in weight_files:
        # this also opens the file: safetensors calls a file missing that it may not read
        refuse_lfs_pointer(path)
    refuse_other_sizes(config, source)


def _has_file(source: str | Path, name: str) -> bool:
    file = cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return file is not None


def load_whole(
    model_class: type[PreTrainedModel], source: str | Path, ignores_unknown: bool = False
) -> PreTrainedModel:
    """Load a model; refuse damaged files, and unknown, missing or misshapen weights.

    `from_pretrained` alone ignores unknown weights and initializes missing weights at random.

    Args:
        model_class: Class of the model.
        source: Folder or Hub name.
        ignores_unknown: Whether to ignore unknown weights if the class is one of transformers,
            whose old checkpoints have some; transformers logs a warning.

    Returns:
        The model.

    Raises:
        OSError: If there is no such model.
        ValueError: If a file cannot be read, or a weight is unknown, missing or of another shape;
            the message names the weight.
    """
    try:
        _check_source(model_class, source)
        model, loading_info = model_class.from_pretrained(
            source,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    except (SafetensorError, AssertionError, json.JSONDecodeError, OSError, *UNREADABLE) as error:
        # EINVAL means that torch read beyond the end of a truncated file
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        # only the first line is shown, because the other lines of torch's message explain how to
        # load the file in spite of the risk
        reason = str(error).split("\n")[0] or type(error).__name__
        code_match = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"a file that would run {code_match[1]}" if code_match else reason
        reason = "a truncated file" if isinstance(error, OSError) else reason
        raise ValueError(
            f"{source} must have complete weight files that fit its {CONFIG_NAME}, got files that "
            f"cannot be loaded: {reason}."
        ) from error
    missing_names, unexpected_names, mismatched_weights = (
        loading_info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")
    )
    if ignores_unknown and model_class.__module__.startswith("transformers."):
        unexpected_names = set()
    if missing_names or unexpected_names or mismatched_weights:
        weights = {
            name: tensor for name, tensor in model.state_dict().items() if name not in missing_names
        }
        weights |= dict.fromkeys(unexpected_names)
        weights |= {
            name: torch.empty(shape, device="meta") for name, shape, _ in mismatched_weights
        }
        check_fit(model, weights, str(source))
    with add_file_to_errors(Path(source, GENERATION_CONFIG_NAME)):
        check_numbers(vars(model.generation_config))
        check_search_tokens(model.generation_config, vocab_size_of(model.get_decoder()))
    return model


def conversion_advice(path: Path) -> str:
    """Return a sentence that says how to convert a model of another toolkit, or an empty string.

    Args:
        path: Folder or file that holds no model of transformers.
    """
    if advice := foreign_advice(path):
        return advice
    suffixes = {file.suffix for file in _files_of(path)}
    if ".ckpt" in suffixes:
        return " `vanilla-transformer convert joeynmt` reads checkpoints (.ckpt) of JoeyNMT."
    if ".pt" in suffixes:
        return " `vanilla-transformer convert` reads checkpoints (.pt) of fairseq and OpenNMT-py."
    return ""


def foreign_advice(path: str | Path) -> str:
    """Return a sentence about a model that this package does not read, or an empty string.

    Args:
        path: Folder, file, or name of files without their suffixes.
    """
    names = [file.name for file in _files_of(Path(path))]
    advices = (
        advice for pattern, advice in FOREIGN_FILES.items() if fnmatch.filter(names, pattern)
    )
    return next(advices, "")


def _files_of(path: Path) -> list[Path]:
    """Return a file, the files of a folder, or the files whose names begin with a name."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return list(path.iterdir())
    return list(path.parent.glob(f"{glob.escape(path.name)}.*"))


def is_allowed_on_hub(name: str) -> bool:
    """Return whether a name is valid on the Hub, without a request to the Hub.

    Args:
        name: Name, with or without a user.

    Returns:
        False for a path, and for a name that the Hub does not allow.
    """
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def check_local(source: str | Path, rule: str, kind: str = "model"):
    """Refuse a source that is neither a local folder nor on the Hub, before anything is loaded.

    No request is sent to the Hub if the parent folder of the source exists, or the name is not
    valid on the Hub.

    Args:
        source: Folder or Hub name.
        rule: Start of the error message: the name of the argument and its rule.
        kind: "model" or "dataset".

    Raises:
        ValueError: If there is no such folder, and the Hub has no such name or cannot be reached.
    """
    path, name = Path(source), str(source)
    if path.is_dir() and name.strip():
        return
    if path.is_file():
        advice = conversion_advice(path)
        raise ValueError(
            f"{rule}, got the file {name!r}{f'.{advice}' if advice else ': give its folder.'}"
        )
    # the parent folder of a dataset is not checked, because a local folder may have the name of a
    # user on the Hub
    is_in_folder = kind == "model" and path.parent != Path() and path.parent.is_dir()
    if is_in_folder or not is_allowed_on_hub(name):
        # an empty name is the current folder
        advice = "" if path.is_dir() else foreign_advice(path)
        raise ValueError(f"{rule}, got {name!r}: no such folder.{advice}")
    # the local cache has this model or dataset, so no network is needed
    if Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).is_dir():
        return
    api = HfApi()
    try:
        # one request here, because transformers would retry for each file
        api.repo_info(name, repo_type=kind, timeout=HUB_TIMEOUT)
    except GatedRepoError:
        return
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{rule}, got {name!r}: no such folder, and no such {kind} on the Hub, or none that "
            "your token may read."
        ) from error
    except HfHubHTTPError:
        # transformers reports the other error codes of the Hub
        return
    except (HTTP_ERROR, ConnectionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{rule}, got {name!r}: no such folder, and the Hub at {api.endpoint} cannot be "
            f"reached ({reason})."
        ) from error


def auto_map_address(public_class: type) -> str:
    """Return the address of a class in the `auto_map` of a folder that its file was copied to.

    Args:
        public_class: Class of this package.

    Returns:
        Name of the module and name of the class, with a dot between.
    """
    return f"{public_class.__module__.rsplit('.', 1)[-1]}.{public_class.__name__}"
