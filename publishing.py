"""Publish a model on the Hub, so that it loads by name with and without this package."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME, cached_file

from .atomic_files import atomic_folder
from .console import require_nonempty_path
from .loading import (
    AUTO_CLASS,
    HTTP_ERROR,
    PUBLIC_CLASS,
    auto_map_address,
    load_run,
)
from .pipeline_vanilla_transformer import TASK
from .records import mapping, read_json, read_text
from .registration import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerModel,
    VanillaTransformerTokenizer,
)

CARD_FILE = "README.md"
# files of a run folder that are published with the model
RUN_FILES = (
    "recipe.yaml",
    "environment.txt",
    "metrics.jsonl",
    "scores.json",
    "average.json",
    "hypotheses",
    "pictures",
)
# folders of a run that are not published, although trackers make links in theirs
UNPUBLISHED_FOLDERS = {"checkpoints", "trackers"}
# a new push replaces all weight files and modules of the previous one, however many there were
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

    All files are written to a temporary folder and checked before the first request to the Hub.

    Args:
        run: Run folder, model folder, Hub name, or a pipeline with its model and tokenizer.
        repo_id: Repository, `user/name`; created if it does not exist.
        private: Whether a new repository is private; None for the account's default.
        token: Token for the Hub; None for the one that `hf auth login` saved.
        commit_message: Message of the commit.
        revision: Branch to commit to, created if it does not exist; None for the main branch.
        trust_remote_code: Whether to run the Python code that is saved with the model.

    Returns:
        The commit, with its address in `commit_url`.

    Raises:
        ValueError: If the run cannot be read, its tokenizer does not belong to its model, or the
            Hub refuses the upload or cannot be reached.
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
    """Write the files that `push_to_hub` publishes to a local folder.

    Without this package, the folder loads with `trust_remote_code=True`.

    Args:
        run: Run folder, model folder, Hub name, or a pipeline with its model and tokenizer.
        folder: Output folder; created if it does not exist.
        repo_id: Hub name in the loading example of the model card.
        trust_remote_code: Whether to run the Python code that is saved with the model.

    Raises:
        ValueError: If the run cannot be read, its tokenizer does not belong to its model, or its
            class is not of this package but has the same `model_type`.
    """
    folder = require_nonempty_path(folder, "folder")
    model, tokenizer = load_run(run, trust_remote_code)
    is_ours = type(model) is PUBLIC_CLASS
    if not is_ours and model.config.model_type == VanillaTransformerConfig.model_type:
        raise ValueError(
            f"the configuration of {type(model).__name__} must have another model_type than "
            f"{model.config.model_type!r}, for which the Auto classes load the released model."
        )
    if isinstance(run, str | Path):
        _refuse_foreign_links(Path(run))
    with atomic_folder(folder) as unfinished:
        _write_files(run, model, tokenizer, unfinished, repo_id)


def _refuse_foreign_links(run: Path):
    """Refuse symbolic links that point outside of a folder that is published."""
    real_folder = run.resolve()
    # the Hub's cache stores the files of a snapshot in a folder next to the snapshots
    allowed_folders = [real_folder]
    if real_folder.parent.name == "snapshots":
        allowed_folders.append(real_folder.parents[1] / "blobs")
    for parent, folders, files in os.walk(run):
        if Path(parent) == run:
            folders[:] = sorted(set(folders) - UNPUBLISHED_FOLDERS)
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not any(map(path.resolve().is_relative_to, allowed_folders)):
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
    # custom_object_save copies the file of a class and its relative imports into one folder. The
    # classes are not registered for this instead: `save_pretrained` would then copy their code in
    # every later save of this process, and the users of these models would have to trust it
    class_addresses = {}
    if type(model) is PUBLIC_CLASS:
        custom_object_save(PUBLIC_CLASS, folder)
        class_addresses["auto_map"] = {
            "AutoConfig": auto_map_address(VanillaTransformerConfig),
            "AutoModel": auto_map_address(VanillaTransformerModel),
            AUTO_CLASS: auto_map_address(PUBLIC_CLASS),
        }
    custom_object_save(TranslationPipeline, folder)
    pipeline_entries = {TASK: {"impl": auto_map_address(TranslationPipeline), "pt": [AUTO_CLASS]}}
    _edit_json(folder / CONFIG_NAME, custom_pipelines=pipeline_entries, **class_addresses)
    # a converted model may keep its original tokenizer, which needs no code of this package
    if isinstance(tokenizer, VanillaTransformerTokenizer):
        custom_object_save(VanillaTransformerTokenizer, folder)
        tokenizer_addresses = [auto_map_address(VanillaTransformerTokenizer), None]
        _edit_json(folder / TOKENIZER_CONFIG_FILE, auto_map={"AutoTokenizer": tokenizer_addresses})
    if isinstance(run, str | Path):
        for name in RUN_FILES:
            source = Path(run, name)
            if source.is_dir():
                shutil.copytree(source, folder / name, dirs_exist_ok=True)
            elif source.is_file():
                shutil.copyfile(source, folder / name)
    _write_model_card(run, folder, repo_id, model)


def _edit_json(path: Path, **entries: Any):
    content = read_json(path, mapping()) | entries
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read_model_card(path: Path) -> ModelCard:
    text = read_text(path)
    try:
        return ModelCard(text)
    # the metadata is not YAML, is not a mapping, or is a mapping whose keys are not text
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} must begin with its metadata in YAML: {reason}.") from error


def _write_model_card(
    run: str | Path | TranslationPipeline, folder: Path, repo_id: str, model: PreTrainedModel
):
    """Write the run's own model card, or a new card, and add how to load the model by Hub name."""
    card_file = None
    if isinstance(run, str | Path):
        card_file = cached_file(str(run), CARD_FILE, _raise_exceptions_for_missing_entries=False)
    if card_file is None:
        card = ModelCard(
            f"# {repo_id.split('/')[-1]}\n\n"
            'The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), with '
            f"{model.num_parameters():,} parameters.\n"
        )
    else:
        card = _read_model_card(Path(card_file))
    for name, value in (
        ("library_name", "transformers"),
        ("pipeline_tag", TASK),
        ("tags", ["vanilla_transformer", TASK]),
    ):
        if card.data.get(name) is None:
            card.data[name] = value
    # the example in the run's card loads the run folder, which readers on the Hub do not have
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
