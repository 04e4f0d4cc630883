"""Results of evaluations in a folder: `hypotheses/`, `scores.json` and the model card."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel

from ...atomic_files import write_atomically
from ...records import read_text
from ..run_folder.files import SCORES_FILE, describe_average, lock_run_folder, read_scores
from ..run_folder.model_card import is_of_other_weights, write_model_card
from ..translate import one_line
from .task import Evaluation

# seconds to wait for another evaluation, which locks the folder only while it writes
SECONDS_TO_WAIT = 10.0
# longest name of results, in bytes: most file systems allow 255, with suffixes
LONGEST_NAME = 150


def result_name_of(task: Evaluation, search: Mapping[str, Any], model: PreTrainedModel) -> str:
    """Name the results by the data and the settings that differ from the defaults.

    Args:
        task: Data of the evaluation.
        search: Settings of the search that were given.
        model: Model, whose generation configuration has the defaults of the search.

    Returns:
        First part of the names of the files.
    """
    changed_settings = [
        field if value is True else f"{field}{'-' * isinstance(value, str)}{value}"
        for field, value in sorted(search.items())
        if field != "engine" and value != getattr(model.generation_config, field, None)
    ]
    if task.bleu_tokenizer != task.default_tokenizer:
        changed_settings.append(f"bleu_tokenizer-{task.bleu_tokenizer}")
    return _file_name(task.data_name_parts + changed_settings)


def _file_name(parts: list[str]) -> str:
    # a leading dot, as of a path that begins with "..", would hide the files
    name = re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-.")
    if len(name.encode()) <= LONGEST_NAME:
        return name
    # the end is kept, because the end of a path is more specific than its beginning, and the
    # settings follow the path
    name_hash = hashlib.sha256(name.encode()).hexdigest()[:8]
    end = name.encode()[len(name_hash) + 1 - LONGEST_NAME :].decode(errors="ignore")
    return f"{name_hash}-{end.lstrip('-.')}"


def result_paths(folder: Path, result_name: str, num_references: int = 1) -> list[Path]:
    """Return the paths of saved sources, references and translations, in this order.

    Args:
        folder: Folder with the results.
        result_name: Name of the results.
        num_references: Number of references of each sentence.
    """
    more_references = [f"reference{number}" for number in range(2, num_references + 1)]
    sides = ("source", "reference", *more_references, "translation")
    return [folder / "hypotheses" / f"{result_name}.{side}.txt" for side in sides]


def _text_by_path(
    folder: Path, result_name: str, sides: Sequence[Sequence[str]]
) -> dict[Path, str]:
    """Return the texts to save by path, for sources, references and translations."""
    paths = result_paths(folder, result_name, len(sides) - 2)
    return {
        path: "".join(f"{line}\n" for line in map(one_line, lines))
        for path, lines in zip(paths, sides, strict=True)
    }


def refuse_unwritable(
    state: PartialState,
    folder: Path,
    result_name: str,
    sources: list[str],
    references: list[list[str]],
):
    """Refuse a folder that cannot be written to, or has results of other sentences.

    This happens before the translation, which takes long.

    Args:
        state: State of the processes.
        folder: Folder for the results.
        result_name: Name of the results.
        sources: Sources.
        references: One or more lists of references.

    Raises:
        ValueError: If the folder cannot be used.
    """
    read_scores(folder)
    try:
        if state.is_main_process:
            # fails if a training run uses the folder, which stays locked until the run ends
            with lock_run_folder(folder, SECONDS_TO_WAIT):
                pass
        (folder / "hypotheses").mkdir(parents=True, exist_ok=True)
        # fails if the name of the file is too long for the file system
        with contextlib.suppress(FileNotFoundError):
            result_paths(folder, result_name)[0].stat()
    except OSError as error:
        raise ValueError(
            f"output_dir must be a folder that results can be written to, got {folder}: {error}"
        ) from error
    *text_paths, _ = _text_by_path(folder, result_name, (sources, *references, [])).items()
    for path, text in text_paths:
        if path.is_file() and path.read_bytes() != text.encode():
            raise ValueError(
                f"output_dir must have no results of other sentences under the name "
                f"{result_name}, got other lines in {path}. Set another --output_dir, or remove "
                f"{folder}/hypotheses/{result_name}.* to replace them."
            )


def save_translations(
    folder: Path,
    result_name: str,
    sources: list[str],
    references: list[list[str]],
    translations: list[str],
) -> bool:
    """Save sources, references and translations.

    Args:
        folder: Folder for the results.
        result_name: Name of the results.
        sources: Sources.
        references: One or more lists of references.
        translations: Translations.

    Returns:
        Whether the same sentences and translations were there before.
    """
    sides = (sources, *references, translations)
    text_by_path = _text_by_path(folder, result_name, sides)
    with lock_run_folder(folder, SECONDS_TO_WAIT):
        is_unchanged = all(
            path.is_file() and path.read_bytes() == text.encode()
            for path, text in text_by_path.items()
        )
        # the translations first: they take long to make, and the others can be read again
        for path, text in reversed(text_by_path.items()):
            write_atomically(path, text)
    return is_unchanged


def save_scores(
    task: Evaluation,
    result_name: str,
    scores: dict[str, Any],
    is_unchanged: bool,
    num_parameters: int,
):
    """Add the scores to `scores.json`, and to the model card if the folder is that of the run.

    Args:
        task: Model and data of the evaluation.
        result_name: Name of the results.
        scores: Scores, to which slow scores of the same translations are added.
        is_unchanged: Whether the same translations were saved before.
        num_parameters: Number of parameters of the model, for its card.
    """
    with lock_run_folder(task.folder, SECONDS_TO_WAIT):
        # read under the lock, because another evaluation may have saved scores in the meantime
        saved_scores = read_scores(task.folder)
        if is_unchanged and result_name in saved_scores:
            _copy_slow_scores(scores, saved_scores[result_name])
        text = json.dumps({**saved_scores, result_name: scores}, indent=1, ensure_ascii=False)
        write_atomically(task.folder / SCORES_FILE, text)
        if task.recipe is not None and task.folder.resolve() == Path(task.run).resolve():
            write_model_card(task.folder, task.recipe, num_parameters)


def _copy_slow_scores(scores: dict[str, Any], old_scores: Mapping[str, Any]) -> None:
    """Copy comparisons and COMET, which are slow, from earlier scores of the same translations."""
    # an evaluation that was killed or has failed may have left new translations beside old scores
    if any(old_scores.get(name) != scores[name] for name in ("chrf", "exact_match")):
        return
    if "against" in old_scores and old_scores["bleu_signature"] == scores["bleu_signature"]:
        scores["against"] = {**old_scores["against"], **scores.get("against", {})}
    if "comet" in old_scores and "comet" not in scores:
        scores |= {name: old_scores[name] for name in ("comet", "comet_signature")}


def translations_to_compare(
    against: str,
    task: Evaluation,
    result_name: str,
    sources: list[str],
    references: list[list[str]],
) -> tuple[str, list[str]]:
    """Find the saved translations of another run, or of another search of this run.

    Args:
        against: Folder of the other run.
        task: Model and data of this evaluation.
        result_name: Name of the results of this evaluation.
        sources: Sources.
        references: One or more lists of references.

    Returns:
        Name that the translations are saved under, and the translations.

    Raises:
        ValueError: If there are no translations of the same sentences, or they are not those of the
            other run's present model.
    """
    other_folder = Path(against)
    # a run is compared with itself to measure another search: use the results of its own search
    is_itself = other_folder.resolve() in (Path(task.run).resolve(), task.folder.resolve())
    own_name = _file_name(task.data_name_parts)
    candidate_names = [own_name] if is_itself else [result_name, task.split or own_name]
    found_name, translations = _find_saved_translations(
        other_folder, candidate_names, sources, references
    )
    other_scores = read_scores(other_folder).get(found_name, {})
    average = describe_average(other_folder)
    if average is not None and is_of_other_weights(other_scores, average):
        raise ValueError(
            f"against must be a run whose saved translations are from its model, got "
            f"{other_folder} with translations by {other_scores['average']}, while the model is "
            f"{average}: evaluate that run first."
        )
    return found_name, translations


def _find_saved_translations(
    folder: Path, candidate_names: Iterable[str], sources: list[str], references: list[list[str]]
) -> tuple[str, list[str]]:
    """Return the first name with saved translations of the same pairs, and the translations."""
    for result_name in candidate_names:
        paths = result_paths(folder, result_name, len(references))
        if all(path.is_file() for path in paths):
            *saved_sides, translations = (
                [one_line(line) for line in read_text(path).split("\n")[:-1]] for path in paths
            )
            if saved_sides == [list(map(one_line, lines)) for lines in (sources, *references)]:
                if len(translations) != len(sources):
                    raise ValueError(
                        f"{paths[-1]} must have {len(sources):,} lines, one for each sentence, got "
                        f"{len(translations):,}: evaluate that run again."
                    )
                return result_name, translations
    raise ValueError(
        f"against must be a run with saved translations of the same sentences, got {folder} "
        f"without them under {' or '.join(dict.fromkeys(candidate_names))}: evaluate that run "
        "first."
    )
