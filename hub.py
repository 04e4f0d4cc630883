"""Publish a model so that it loads by name, with and without this package installed."""

import inspect
import json
import os
import pickle
import re
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import CommitInfo, HfApi, ModelCard, constants
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
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import (
    custom_object_save,
    get_class_from_dynamic_module,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from .atomic_files import whole_folder
from .console import TRUST, a_folder, naming, refuse_code, sentence_of
from .generation_vanilla_transformer import check_numbers, check_search_tokens
from .identity_vanilla_transformer import file_difference
from .pipeline_vanilla_transformer import TASK, check_tokenizer
from .records import TEXT, Kind, list_of, mapping, one_of, or_null, read_json, read_text, whole
from .registration import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerTokenizer,
)
from .sizes import refuse_other_sizes

PUBLIC_CLASS = VanillaTransformerForConditionalGeneration
AUTO_CLASS = "AutoModelForSeq2SeqLM"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
CARD_FILE = "README.md"
ADAPTER_FILE = "adapter_config.json"
DTYPE = Kind(
    "the name of a floating-point dtype of torch",
    lambda name: (
        isinstance(dtype := getattr(torch, str(name).removeprefix("torch."), None), torch.dtype)
        and dtype.is_floating_point
    ),
)
# what every reader of a configuration needs to know of it; the class of the model knows the rest
CONFIG = mapping(
    optional={
        "model_type": TEXT,
        "architectures": or_null(list_of(TEXT)),
        "auto_map": mapping(others=TEXT),
        "custom_pipelines": mapping(others=mapping()),
        "vocab_size": whole(1),
        "dtype": or_null(DTYPE),
        "torch_dtype": or_null(DTYPE),
    }
)
# a token is text, or what is known of it
TOKEN = Kind(
    "text, a mapping or null", lambda value: value is None or isinstance(value, str | dict)
)
TOKENIZER = mapping(
    optional={
        **{f"{name}_token": TOKEN for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk")},
        "tokenizer_class": or_null(TEXT),
        # 1e30 stands for no limit
        "model_max_length": or_null(
            Kind("a number above 0", lambda value: type(value) in (int, float) and value > 0)
        ),
        "padding_side": one_of("left", "right"),
        "truncation_side": one_of("left", "right"),
    }
)
# what torch raises where a file is cut off, or another kind of file
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, struct.error)
# that tokenizers of converted models need
TOKENIZER_PACKAGES = ("sentencepiece", "sacremoses")
# for a command that runs no code of a tokenizer
WITHOUT_CODE = (
    "Load the tokenizer in Python, and save its backend_tokenizer as a PreTrainedTokenizerFast, "
    "which needs no code."
)
# what a run folder holds beside the model, and a reader of the card may ask for
RUN_FILES = (
    "recipe.yaml",
    "environment.txt",
    "metrics.jsonl",
    "scores.json",
    "average.json",
    "hypotheses",
    "pictures",
)
# base of the errors of the Hub's HTTP client, whichever that is
HTTP_ERROR = HfHubHTTPError.__bases__[0]
# seconds that the Hub has to say whether it has a model
HUB_TIMEOUT = 10
# what a run may be, for errors
RUN = "run must be a run folder, a model folder or a Hub name"
# a push replaces what an earlier one left, however many weight files or modules that had
REPLACED_FILES = ["model*.safetensors", "model.safetensors.index.json", "*_vanilla_transformer.py"]


def push_to_hub(
    run: str | Path | TranslationPipeline,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str = "Upload model, tokenizer and code",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> CommitInfo:
    """Publish weights, configurations, tokenizer, model card and code, as one commit.

    Everything is written and checked before the first request, and nothing of it can be seen before
    all of it can.

    Args:
        run: A run folder, a model folder, a Hub name, or a pipeline with its model and tokenizer.
        repo_id: Where to, `user/name`; made if it does not exist.
        private: Whether a new repository is private; None leaves it to the account's default.
        token: For the Hub; None takes the one that `hf auth login` left.
        commit_message: Of the one commit.
        revision: Branch to commit to, made if it does not exist; None for the main one.
        trust_remote_code: Run the Python code that is saved with the model.

    Returns:
        The commit, with its address in `commit_url`.

    Raises:
        ValueError: If the run cannot be read, its tokenizer is not its model's, or the Hub does not
            take it.
    """
    if repo_id.count("/") != 1:
        raise ValueError(f"repo_id must be user/name, got {repo_id!r}.")
    validate_repo_id(repo_id)
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        export_for_hub(run, folder, repo_id, trust_remote_code)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                delete_patterns=REPLACED_FILES,
            )
        except HfHubHTTPError as error:
            if error.response.status_code in (401, 403):
                raise ValueError(
                    f"repo_id must be one that your token may write to (`hf auth login` sets it), "
                    f"got {repo_id!r}: {error.server_message or 'no valid token'}."
                ) from error
            raise
        except (HTTP_ERROR, ConnectionError) as error:
            raise ValueError(
                f"the Hub at {api.endpoint} cannot be reached ({error}): nothing was published."
            ) from error


def export_for_hub(
    run: str | Path | TranslationPipeline,
    folder: str | Path,
    repo_id: str = "user/name",
    trust_remote_code: bool = False,
):
    """Write what `push_to_hub` publishes into a local folder.

    The folder loads with `trust_remote_code=True` where this package is not installed.

    Args:
        run: A run folder, a model folder, a Hub name, or a pipeline with its model and tokenizer.
        folder: Where to write; made if it does not exist.
        repo_id: The name by which the model card tells to load it.
        trust_remote_code: Run the Python code that is saved with the model.

    Raises:
        ValueError: If the run cannot be read, its tokenizer is not its model's, or its class has no
            `model_type` of its own.
    """
    folder = a_folder(folder, "folder")
    model, tokenizer = load_run(run, trust_remote_code)
    is_ours = type(model) is PUBLIC_CLASS
    if not is_ours and model.config.model_type == VanillaTransformerConfig.model_type:
        raise ValueError(
            f"to publish {type(model).__name__}, its configuration class must have another "
            f"model_type than {model.config.model_type!r}, by which the Auto classes load the "
            "released model."
        )
    if isinstance(run, str | Path):
        _refuse_foreign_links(Path(run))
    with whole_folder(folder) as unfinished:
        _write_files(run, model, tokenizer, unfinished, repo_id)


def _refuse_foreign_links(run: Path):
    """Refuse links that lead out of a folder that is published."""
    home = run.resolve()
    # the Hub's cache keeps the files of its snapshots beside them
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    for parent, folders, files in os.walk(run):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not any(map(path.resolve().is_relative_to, homes)):
                raise ValueError(
                    f"{path} is a link to {os.readlink(path)}, outside of {run}, and would be "
                    "published. Remove the link, or replace it by the file."
                )


def _write_files(
    run: str | Path | TranslationPipeline,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    repo_id: str,
):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # the classes are not registered for this, as every later save of the process would then ask to
    # trust its code; the copies are flat, relative imports included
    addresses = {}
    if type(model) is PUBLIC_CLASS:
        custom_object_save(PUBLIC_CLASS, folder)
        addresses["auto_map"] = {
            "AutoConfig": _address(VanillaTransformerConfig),
            "AutoModel": _address(VanillaTransformerModel),
            AUTO_CLASS: _address(PUBLIC_CLASS),
        }
    custom_object_save(TranslationPipeline, folder)
    pipelines = {TASK: {"impl": _address(TranslationPipeline), "pt": [AUTO_CLASS]}}
    _edit_json(folder / CONFIG_FILE, custom_pipelines=pipelines, **addresses)
    # a converted model may keep the tokenizer it came with, which needs no code of ours
    if isinstance(tokenizer, VanillaTransformerTokenizer):
        custom_object_save(VanillaTransformerTokenizer, folder)
        addresses = [_address(VanillaTransformerTokenizer), None]
        _edit_json(folder / TOKENIZER_FILE, auto_map={"AutoTokenizer": addresses})
    if isinstance(run, str | Path):
        for name in RUN_FILES:
            source = Path(run, name)
            if source.is_dir():
                shutil.copytree(source, folder / name, dirs_exist_ok=True)
            elif source.is_file():
                shutil.copyfile(source, folder / name)
    _write_card(run, folder, repo_id, model)


def load_run(
    run: str | Path | TranslationPipeline, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and the tokenizer of a run.

    Args:
        run: A run folder, one of its checkpoints, a model folder, a Hub name, or a pipeline, whose
            own are returned.
        trust_remote_code: Run the Python code that is saved with the model.

    Returns:
        Model and tokenizer.

    Raises:
        ValueError: If they cannot be read, the tokenizer is not the model's, or the model is of a
            class whose code is not trusted or not there.
    """
    if isinstance(run, TranslationPipeline):
        return run.model, run.tokenizer
    check_local(run, RUN)
    if Path(run, "checkpoints").is_dir() and not Path(run, CONFIG_FILE).exists():
        raise ValueError(
            f"{RUN}, got {str(run)!r}, a run without a model yet: `vanilla-transformer average "
            f"{run}` makes one of its checkpoints."
        )
    if Path(run).is_dir() and not Path(run, CONFIG_FILE).is_file():
        raise ValueError(f"{RUN}, got {str(run)!r}, a folder without {CONFIG_FILE}.")
    try:
        model = load_whole(_class_of(run, trust_remote_code), run)
        # a checkpoint has its tokenizer in the run folder
        is_of_a_run = Path(run).is_dir() and Path(run).resolve().parent.name == "checkpoints"
        is_checkpoint = is_of_a_run and not Path(run, TOKENIZER_FILE).is_file()
        home = Path(run).resolve().parents[1] / "tokenizer" if is_checkpoint else run
    except (OSError, StrictDataclassError) as error:
        raise ValueError(f"{RUN}, got {str(run)!r}: {sentence_of(error)}") from error
    tokenizer = read_tokenizer(home, trust_remote_code)
    check_tokenizer(model, tokenizer)
    return model, tokenizer


def _class_of(run: str | Path, trust_remote_code: bool) -> type[PreTrainedModel]:
    """Return the class that a model was saved with, and refuse code that is not trusted."""
    settings = read_config(run)
    auto_map, kind = settings.get("auto_map") or {}, settings.get("model_type")
    # what a published model of this package names is the code that is installed
    code = auto_map.get(AUTO_CLASS, "")
    name = next(iter(settings.get("architectures") or []), PUBLIC_CLASS.__name__)
    difference = None
    if code == _address(PUBLIC_CLASS):
        file = cached_file(
            run, f"{code.split('.')[0]}.py", _raise_exceptions_for_missing_entries=False
        )
        difference = file_difference(file) if file else None
    if code and (code != _address(PUBLIC_CLASS) or difference is not None):
        if not trust_remote_code:
            refuse_code(Path(run, CONFIG_FILE), _described(code, difference))
        model_class = get_class_from_dynamic_module(code, str(run))
        # it is saved with its file, as it was loaded
        model_class.register_for_auto_class(AUTO_CLASS)
        return model_class
    if kind in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[kind]
    else:
        if "AutoConfig" in auto_map and not trust_remote_code:
            refuse_code(Path(run, CONFIG_FILE), _described(auto_map["AutoConfig"]))
        config_class = type(AutoConfig.from_pretrained(run, trust_remote_code=trust_remote_code))
    if issubclass(config_class, VanillaTransformerConfig):
        if name != PUBLIC_CLASS.__name__:
            raise ValueError(
                f"{run} was saved by the class {name}, but holds no code of that class. Load the "
                f"model with {name}.from_pretrained, and pass model and tokenizer to a "
                "TranslationPipeline."
            )
        return PUBLIC_CLASS
    # a run may have trained a class of the library
    recipe, found = Path(run, "recipe.yaml"), getattr(transformers, name, None)
    # an Auto class would run the code that the folder names
    is_model = inspect.isclass(found) and issubclass(found, PreTrainedModel)
    if is_model and recipe.is_file() and f"transformers:{name}" in read_text(recipe):
        return found
    raise ValueError(f"run must be a vanilla_transformer, got a {kind}: {run}.")


def _described(address: str, difference: str | None = None) -> str:
    """Describe the code at an address of an `auto_map`."""
    home, _, address = address.rpartition("--")
    module, _, name = address.rpartition(".")
    return f"{module}.py{f' of {home}' if home else ''} ({difference or f'class {name}'})"


def read_config(source: str | Path) -> dict[str, Any]:
    """Read the configuration of a model as it was saved.

    Args:
        source: A folder or a Hub name.

    Returns:
        The content of `config.json`.

    Raises:
        OSError: If there is none.
        ValueError: If it is not as described by `CONFIG`.
    """
    path = cached_file(str(source), CONFIG_FILE)
    return read_json(Path(path), CONFIG)


def read_tokenizer(
    source: str | Path, trust_remote_code: bool = False, remedy: str = TRUST
) -> PreTrainedTokenizerBase:
    """Load a tokenizer, and name it where that fails.

    Args:
        source: A folder or a Hub name.
        trust_remote_code: Run the code that lies beside it.
        remedy: Sentence that says what to do about a tokenizer that needs this code.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If it cannot be read, or needs code that is not trusted or a package that is not
            installed.
    """
    try:
        settings = cached_file(
            str(source), TOKENIZER_FILE, _raise_exceptions_for_missing_entries=False
        )
        if settings is not None:
            read_json(Path(settings), TOKENIZER)
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except ImportError as error:
        names = [name for name in TOKENIZER_PACKAGES if name in str(error).lower()]
        if not names:
            raise
        raise ValueError(
            f"tokenizer {str(source)!r} needs {names[0]}, got none: pip install {names[0]}."
        ) from error
    # the library looks for a file by the name None where one of several files is missing, and the
    # Rust code of tokenizers panics
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        if "trust_remote_code=True" in str(error):
            addresses = get_tokenizer_config(source)["auto_map"]
            if isinstance(addresses, dict):
                addresses = addresses["AutoTokenizer"]
            code = _described(next(filter(None, reversed(addresses))))
            refuse_code(Path(source, TOKENIZER_FILE), code, remedy)
        raise ValueError(
            f"tokenizer {str(source)!r} cannot be loaded: {' '.join(str(error).split())}"
        ) from error


def _check_source(model_class: type[PreTrainedModel], source: str | Path):
    """Refuse a model whose files name something else to load, or declare what they do not hold.

    Args:
        model_class: Class of the model.
        source: A folder or a Hub name.

    Raises:
        OSError: If there is none.
        ValueError: If a file names other code or another model, cannot be read, or declares sizes
            that the weights do not have.
    """
    # one that cannot be read the library takes for one that is not there
    if _has_file(source, GENERATION_FILE):
        try:
            read_json(Path(cached_file(str(source), GENERATION_FILE)), mapping())
            GenerationConfig.from_pretrained(source)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{source} must have a {GENERATION_FILE} of search settings, or none, got one that "
                f"cannot be read: {error}"
            ) from error
    if _has_file(source, ADAPTER_FILE):
        raise ValueError(
            f"{source} must be a whole model, got adapters, whose {ADAPTER_FILE} names the model "
            "that they belong to. Merge them into this model first, with merge_and_unload of peft."
        )
    settings = read_config(source)
    kernel = settings.get("attn_implementation")
    if kernel is not None and "/" in str(kernel):
        remedy = "Remove attn_implementation from the file, and set it in Python."
        refuse_code(Path(source, CONFIG_FILE), f"the kernel {kernel} on the Hub", remedy)
    refuse_other_sizes(model_class.config_class.from_pretrained(source), source)


def _has_file(source: str | Path, name: str) -> bool:
    found = cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found is not None


def load_whole(model_class: type[PreTrainedModel], source: str | Path) -> PreTrainedModel:
    """Load a model, and refuse weights that the library would leave out, make up or stumble over.

    Args:
        model_class: Class of the model.
        source: A folder or a Hub name.

    Returns:
        The model.

    Raises:
        OSError: If there is none.
        ValueError: If a file is not whole, or a weight is left over, missing or of another shape;
            says which.
    """
    try:
        _check_source(model_class, source)
        model, loaded = model_class.from_pretrained(
            source,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    except (SafetensorError, AssertionError, json.JSONDecodeError, *UNREADABLE) as error:
        # torch says at length how to trust the file nevertheless
        reason = str(error).split("\n")[0] or type(error).__name__
        code = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"a file that would run {code[1]}" if code else reason
        raise ValueError(
            f"{source} must have whole files of weights that fit its {CONFIG_FILE}, got what "
            f"cannot be loaded: {reason}."
        ) from error
    missing, unexpected, mismatched = (
        loaded[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")
    )
    if missing or unexpected or mismatched:
        from .conversion.weights import check_fit

        weights = {name: part for name, part in model.state_dict().items() if name not in missing}
        weights |= dict.fromkeys(unexpected)
        weights |= {name: torch.empty(shape, device="meta") for name, shape, _ in mismatched}
        check_fit(model, weights, str(source))
    with naming(Path(source, GENERATION_FILE)):
        check_numbers(vars(model.generation_config))
        check_search_tokens(model.generation_config, model.get_input_embeddings().num_embeddings)
    return model


def check_local(source: str | Path, rule: str, kind: str = "model"):
    """Refuse what is neither a folder here nor on the Hub, before anything is loaded.

    Args:
        source: A folder or a Hub name.
        rule: What it must be, for the error.
        kind: "model" or "dataset".

    Raises:
        ValueError: If there is no such folder, and nothing of this name on the Hub, or it cannot be
            reached. The Hub is not asked if the folder that it would be in is there, or the name is
            not one that the Hub could have.
    """
    path, name = Path(source), str(source)
    if path.is_dir() and name.strip():
        return
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith(".")
    # a folder here may be called like a user of datasets
    is_beside = kind == "model" and path.parent != Path() and path.parent.is_dir()
    if is_name:
        try:
            validate_repo_id(name)
        except HFValidationError:
            is_name = False
    if not is_name or is_beside:
        raise ValueError(f"{rule}, got {name!r}: no such folder.")
    # what was loaded before serves without a network
    if Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).is_dir():
        return
    api = HfApi()
    try:
        # the library asks again and again for each file
        api.repo_info(name, repo_type=kind, timeout=HUB_TIMEOUT)
    except GatedRepoError:
        return
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{rule}, got {name!r}: no such folder, and no such {kind} on the Hub, or none that "
            "your token may read."
        ) from error
    except HfHubHTTPError:
        # the library says what else the Hub answers
        return
    except (HTTP_ERROR, ConnectionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{rule}, got {name!r}: no such folder, and the Hub at {api.endpoint} cannot be "
            f"reached ({reason})."
        ) from error


def _address(public: type) -> str:
    """Where a class is once its file has been copied."""
    return f"{public.__module__.rsplit('.', 1)[-1]}.{public.__name__}"


def _edit_json(path: Path, **entries: Any):
    content = read_json(path, mapping()) | entries
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_card(
    run: str | Path | TranslationPipeline, folder: Path, repo_id: str, model: PreTrainedModel
):
    """The run's own model card, which has its results, or a new one; with how to load it."""
    found = None
    if isinstance(run, str | Path):
        found = cached_file(str(run), CARD_FILE, _raise_exceptions_for_missing_entries=False)
    if found is None:
        card = ModelCard(
            f"# {repo_id.split('/')[-1]}\n\n"
            'The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), with '
            f"{model.num_parameters():,} parameters.\n"
        )
    else:
        card = ModelCard(read_text(Path(found)))
    for name, value in (
        ("library_name", "transformers"),
        ("pipeline_tag", TASK),
        ("tags", ["vanilla_transformer", TASK]),
    ):
        if card.data.get(name) is None:
            card.data[name] = value
    # the run's card tells to load the run's folder, which its readers do not have
    card.text = re.sub(
        r'pipeline\("translation", model="[^"]*"',
        f'pipeline("translation", model="{repo_id}"',
        card.text,
    )
    if "trust_remote_code=True" not in card.text:
        card.text = (
            f"{card.text.rstrip()}\n\n## Without the package\n\n"
            "```python\nfrom transformers import pipeline\n\n"
            f'translate = pipeline("translation", model="{repo_id}", trust_remote_code=True)\n'
            'print(translate("..."))\n```\n'
        )
    (folder / CARD_FILE).write_text(str(card), encoding="utf-8")


__all__ = ["export_for_hub", "load_run", "push_to_hub"]
