"""Translate a split and score it: `accelerate launch -m vanilla_transformer.train.evaluate RUN`."""

import argparse
import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..atomic_files import write_atomically
from ..changes_vanilla_transformer import evaluating
from ..configuration_vanilla_transformer import closest_name
from ..console import add_trust_flag, parse_flags, print_line, require_nonempty_path, run_command
from ..identity_vanilla_transformer import difference_outside_layers
from ..loading import check_local, load
from ..pipeline_vanilla_transformer import TranslationPipeline
from ..records import read_text
from .config import TrainConfig, bleu_tokenizer_of, check_columns, refuse_one_language
from .data.batches import IGNORED
from .data.corpus import is_available_offline, load_translations, text_hash, texts_of
from .data.leaks import PAIR, SENTENCE, LeakFinder, count_leaks, describe_leaks, find_leaks
from .data.prepare import (
    STREAMED_TEXT_REASON,
    add_validation_split,
    explaining_recipe,
    load_texts,
)
from .data.tables import Columns
from .devices.distribution import (
    COLLECTIVE_TIMEOUT,
    in_all_processes,
    is_launched_on_cpu,
    leave_process_group,
    main_process_first,
)
from .devices.fused_loss import block_bytes
from .evaluation_sets import read_files, read_sacrebleu_set, refuse_sacrebleu_set
from .recipe import RECIPE_FILE, parse_yaml_value
from .run_folder.environment import read_environment
from .run_folder.files import (
    SCORES_FILE,
    describe_average,
    lock_run_folder,
    read_recipe,
    read_scores,
)
from .run_folder.model_card import (
    COMPOUND_BLEU,
    METRICS,
    format_intervals,
    is_of_other_weights,
    write_model_card,
)
from .scoring import (
    COMET_MODEL,
    comet_program,
    comet_score,
    compare_translations,
    confidence_intervals,
    score_translations,
)
from .step import REPLICATED, smoothed_loss_sum
from .translate import SEARCH_FLAGS, add_search_flags, fitting_lines, one_line, translate_lines

logger = logging.getLogger(__name__)

# seconds to wait for another evaluation, which locks the folder only while it writes
SECONDS_TO_WAIT = 10.0
# first word of `Evaluation.dataset` for a test set of sacreBLEU
SACREBLEU = "sacrebleu"
# arguments of `evaluate` that choose a split of a dataset
DATASET_ARGUMENTS = ("split", "dataset", "name", "revision", "columns")


@torch.no_grad()
def validation_loss(
    accelerator: Accelerator, model: PreTrainedModel, batches: Iterable[dict[str, Tensor]]
) -> float:
    """Compute the loss without label smoothing and without dropout, over all processes.

    Args:
        accelerator: Accelerator of the run, which determines device and precision.
        model: Model, not wrapped; the mode of each module is restored afterwards.
        batches: Batches of this process.

    Returns:
        Mean loss per target token, in nats.
    """
    # summed in float32, because float64 is not available on every device
    loss_sum = torch.zeros((), device=accelerator.device)
    num_tokens = torch.zeros((), dtype=torch.long, device=accelerator.device)
    # not compiled, because compiling graphs without gradients takes longer than these batches
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        for batch in batches:
            inputs = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            labels = inputs.pop("labels")
            with accelerator.autocast():
                loss_sum += _loss_sum(accelerator, model, inputs, labels)
            num_tokens += (labels != IGNORED).sum()
    loss_sum, num_tokens = accelerator.reduce((loss_sum, num_tokens), reduction="sum")
    return float(loss_sum) / int(num_tokens)


def _loss_sum(
    accelerator: Accelerator, model: PreTrainedModel, inputs: dict[str, Tensor], labels: Tensor
) -> Tensor:
    if (
        accelerator.distributed_type not in REPLICATED
        or difference_outside_layers(model) is not None
    ):
        # a sharded weight is whole only inside the forward of its module, and an edited model must
        # run its own forward
        return smoothed_loss_sum(model(**inputs, use_cache=False).logits, labels, 0.0)
    hidden_states = model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    # each logit is stored three times, in at most 4 bytes: as computed, in float32, and as a
    # log-probability
    block_rows = max(1, block_bytes(hidden_states.device.type) // (3 * 4 * model.config.vocab_size))
    blocks = zip(hidden_states.split(block_rows), labels.flatten().split(block_rows), strict=True)
    losses = (
        smoothed_loss_sum(model.lm_head(block)[None], block_labels, 0.0)
        for block, block_labels in blocks
    )
    return sum(losses, start=torch.zeros((), device=hidden_states.device))


@dataclass(frozen=True)
class Evaluation:
    """Model, data and settings of an evaluation, with the defaults filled in.

    Args:
        run: Run folder, model folder or Hub name.
        recipe: Settings of the run; None if the model is not in a run folder.
        folder: Folder for the results.
        split: Split to translate; None for files and for a test set of sacreBLEU.
        dataset: Dataset, as for `load_translations`; or the source file, or the name of a test set
            of sacreBLEU.
        name: Configuration of the dataset.
        source_lang: Language to translate from.
        target_lang: Language to translate into.
        revision: Commit, branch or tag of a dataset on the Hub.
        columns: Column of each language in a table or in records.
        streaming: Whether the dataset is read without storing a copy.
        references: Reference files; empty for a dataset and for a test set of sacreBLEU.
        bleu_tokenizer: Tokenizer of sacreBLEU.
        default_tokenizer: Default of `bleu_tokenizer`, from the recipe or the target language.
    """

    run: str
    recipe: TrainConfig | None
    folder: Path
    split: str | None
    dataset: str
    name: str | None
    source_lang: str
    target_lang: str
    revision: str | None
    columns: Columns | None
    streaming: bool
    references: tuple[str, ...]
    bleu_tokenizer: str
    default_tokenizer: str

    @property
    def data_name_parts(self) -> list[str]:
        """Parts of the data's name in the results: only the split for the run's own dataset."""
        names = ("dataset", "name", "source_lang", "target_lang", "revision", "columns")
        recipe = self.recipe
        if (
            self.split is not None
            and recipe is not None
            and all(getattr(self, field) == getattr(recipe, field) for field in names)
        ):
            return [self.split]
        dataset_parts = filter(None, [self.dataset, self.name, self.revision, self.split])
        num_references = len(self.references)
        reference_parts = [f"{num_references} references"] if num_references > 1 else []
        return [*dataset_parts, *reference_parts, self.source_lang, self.target_lang]


def evaluate(
    run: str | Path,
    split: str | None = None,
    *,
    dataset: str | Path | None = None,
    name: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    revision: str | None = None,
    source: str | Path | None = None,
    reference: str | Path | Sequence[str | Path] = (),
    sacrebleu: str | None = None,
    bleu_tokenizer: str | None = None,
    comet: str | None = None,
    against: str | Path | None = None,
    output_dir: str | Path | None = None,
    trust_remote_code: bool = False,
    columns: Columns | None = None,
    **search: Any,
) -> dict[str, Any] | None:
    """Translate a split or a test set, score the translations, and save both.

    Works in one process, or in several processes of `accelerate launch`: each process translates
    its share, and the main process scores all sentences.

    Writes `hypotheses/` and `scores.json`, and adds the scores to the model card of a run. Results
    are saved under the name of the split, or of the file or the test set of sacreBLEU. If data,
    search or BLEU tokenizer differ from the run's own, they become part of this name.

    Args:
        run: Run folder, model folder or Hub name.
        split: Split of the dataset, by default "test".
        dataset: Name on the Hub, folder or file of a dataset. The defaults of `dataset`, `name`,
            `source_lang`, `target_lang` and `revision` are the run's own.
        name: Configuration of the dataset.
        source_lang: Language to translate from.
        target_lang: Language to translate into.
        revision: Commit, branch or tag of a dataset on the Hub.
        source: Text file to translate instead of a split, plain or compressed.
        reference: Reference file or files, each with as many lines as the source file.
        sacrebleu: Name of a test set of sacreBLEU to translate instead of a split.
        bleu_tokenizer: Tokenizer of sacreBLEU; by default that of the run, or of the language.
        comet: COMET model to score with in addition; None for no COMET score.
        against: Other run; its saved translations of the same sentences are compared with these.
        output_dir: Folder for the results; by default the run folder.
        trust_remote_code: Run the Python code that is saved with the model.
        columns: Column of each language in a table or in records; by default those of the run. An
            empty mapping stands for columns with the languages as names.
        search: Settings of `generate` that differ from the model's, `num_beams` for example.

    Returns:
        Scores, as in `score_translations`, with the data, the search and the time; None in
        processes other than the main process.

    Raises:
        ValueError: If model, dataset, split, file, COMET or the other run's translations are
            missing, arguments contradict each other, the held-out pairs of the run have changed, or
            results of other sentences have the same name.
    """
    state = join_processes()
    other_run = None if against is None else str(against)
    reference_paths = [reference] if isinstance(reference, str | Path) else reference
    request = _Request(
        run=str(run),
        split=split,
        dataset=None if dataset is None else str(dataset),
        name=name,
        source_lang=source_lang,
        target_lang=target_lang,
        revision=revision,
        source=None if source is None else str(source),
        references=tuple(map(str, reference_paths)),
        sacrebleu=sacrebleu,
        bleu_tokenizer=bleu_tokenizer,
        comet=comet,
        output_dir=None if output_dir is None else str(output_dir),
        columns=columns,
    )
    task = in_all_processes(lambda: _resolve_request(request))
    # the main process prepares the data, and the others then find it in the cache
    sources, *references = main_process_first(lambda: _load_texts(task))
    title = task.split or task.dataset
    int8 = bool(search.get("int8"))
    pipeline, average = in_all_processes(
        lambda: _load_with_average(task, state.device, trust_remote_code, int8)
    )
    model = pipeline.model
    in_all_processes(lambda: list(fitting_lines([sources], pipeline, title)))
    result_name = _result_name(task, search, model)
    # the engine changes only the speed, so it is not recorded among the settings of the search
    engine_option = {"engine": search.pop("engine")} if "engine" in search else {}
    if other_run is not None:
        other_result_name, other_translations = in_all_processes(
            lambda: _translations_to_compare(other_run, task, result_name, sources, references)
        )
    main_process_first(
        lambda: _refuse_unwritable(state, task.folder, result_name, sources, references)
    )
    started = time.monotonic()
    translations = translate_shared(state, pipeline, sources, title, **search, **engine_option)
    seconds = time.monotonic() - started
    if not state.is_main_process:
        return None
    # saved before scoring, so that they are kept if scoring fails
    is_unchanged = _save_translations(task.folder, result_name, sources, references, translations)
    scores = _compute_scores(task, sources, references, translations, comet)
    defaults = {field: getattr(model.generation_config, field, None) for field in SEARCH_FLAGS}
    scores |= {"search": {**defaults, **search}, "seconds": seconds}
    scores["processes"] = state.num_processes
    if task.recipe is not None:
        scores["average"] = average
    if other_run is not None:
        comparison = compare_translations(
            translations, other_translations, references[0], task.bleu_tokenizer, references[1:]
        )
        scores["against"] = {f"{other_result_name} of {other_run}": comparison}
    _save_scores(task, result_name, scores, is_unchanged, model.num_parameters())
    translations_path = _result_paths(task.folder, result_name)[-1]
    logger.info(
        "The translations are in %s, the scores in %s.",
        translations_path,
        task.folder / SCORES_FILE,
    )
    return scores


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Arguments of `evaluate`, with paths as text."""

    run: str
    split: str | None
    dataset: str | None
    name: str | None
    source_lang: str | None
    target_lang: str | None
    revision: str | None
    source: str | None
    references: tuple[str, ...]
    sacrebleu: str | None
    bleu_tokenizer: str | None
    comet: str | None
    output_dir: str | None
    columns: Columns | None


def _resolve_request(request: _Request) -> Evaluation:
    """Check the arguments of `evaluate`, and fill in the defaults from the recipe of a run."""
    test_set = _check_test_set(request)
    recipe = _check_arguments(request, request.dataset or test_set)
    source_lang, target_lang = request.source_lang, request.target_lang
    if recipe is not None:
        source_lang, target_lang = (
            source_lang or recipe.source_lang,
            target_lang or recipe.target_lang,
        )
    elif source_lang is None or target_lang is None:
        raise ValueError(
            "source_lang and target_lang must be given with dataset, source or sacrebleu, got one "
            "or none of them."
        )
    refuse_one_language(source_lang, target_lang)
    columns = request.columns
    if columns is None and recipe is not None and _has_languages(recipe, source_lang, target_lang):
        columns = recipe.columns
    columns = columns or None
    check_columns(columns, source_lang, target_lang)
    split, dataset, name, revision = request.split, request.dataset, request.name, request.revision
    streaming = False
    if test_set is None:
        split = split or "test"
        if recipe is not None and dataset is None:
            dataset, name = recipe.dataset, name or recipe.name
        if recipe is not None and dataset == recipe.dataset:
            revision = revision or recipe.revision
            # streaming stores no copy of the dataset and loads evaluation splits into memory; the
            # training split would stay a stream, which cannot be evaluated
            streaming = recipe.streaming and split != "train"
    if request.sacrebleu is not None:
        refuse_sacrebleu_set(request.sacrebleu, source_lang, target_lang)
    if recipe is not None:
        _refuse_other_languages(recipe, source_lang, target_lang)
    default_bleu_tokenizer = bleu_tokenizer_of(target_lang)
    if recipe is not None and target_lang == recipe.target_lang:
        default_bleu_tokenizer = recipe.bleu_tokenizer or default_bleu_tokenizer
    bleu_tokenizer = request.bleu_tokenizer or default_bleu_tokenizer
    # refuse a wrong tokenizer before the translation, which takes long
    score_translations(["a"], ["a"], bleu_tokenizer)
    return Evaluation(
        run=request.run,
        recipe=recipe,
        folder=Path(request.run if request.output_dir is None else request.output_dir),
        split=split,
        dataset=str(test_set or dataset),
        name=name,
        source_lang=source_lang,
        target_lang=target_lang,
        revision=revision,
        columns=columns,
        streaming=streaming,
        references=request.references,
        bleu_tokenizer=bleu_tokenizer,
        default_tokenizer=default_bleu_tokenizer,
    )


def _refuse_other_languages(recipe: TrainConfig, *languages: str):
    """Refuse languages that are not those of a run; only codes of two letters are certain."""
    run_languages = (recipe.source_lang, recipe.target_lang)
    for name, code in zip(("source_lang", "target_lang"), languages, strict=True):
        is_certain = all(len(language) == 2 for language in (code, *run_languages))
        if is_certain and code not in run_languages:
            raise ValueError(
                f"{name} must be {' or '.join(run_languages)}, the languages of the run, got "
                f"{code!r}."
            )


def _check_test_set(request: _Request) -> str | None:
    """Refuse several test sets at once; return the name of one that is not a dataset, or None."""
    source, sacrebleu = request.source, request.sacrebleu
    if (source is None) != (not request.references):
        missing_argument = "source" if source is None else "reference"
        raise ValueError(f"source and reference must be given together, got no {missing_argument}.")
    dataset_names = [name for name in DATASET_ARGUMENTS if getattr(request, name) is not None]
    test_set_names = [name for name in ("source", "sacrebleu") if getattr(request, name)]
    if test_set_names and len(test_set_names + dataset_names) > 1:
        raise ValueError(
            "one of a dataset, source and sacrebleu must be given, got "
            f"{', '.join(test_set_names + dataset_names)}."
        )
    return source or (sacrebleu and f"{SACREBLEU} {sacrebleu}")


def _load_with_average(task: Evaluation, *options: Any) -> tuple[TranslationPipeline, str | None]:
    """Load model and tokenizer, and describe which checkpoints the model is the average of."""
    folder = Path(task.run) if task.recipe is not None else None
    while True:
        average = describe_average(folder) if folder else None
        pipeline = load(task.run, *options)
        # load again if another command has replaced the model in the meantime
        if average == (describe_average(folder) if folder else None):
            return pipeline, average


def _check_arguments(request: _Request, dataset: str | None) -> TrainConfig | None:
    """Refuse arguments that cannot be used; return the settings of a run, or None."""
    run, output_dir = request.run, request.output_dir
    is_run = (require_nonempty_path(run, "run") / RECIPE_FILE).is_file()
    if output_dir is not None:
        require_nonempty_path(output_dir, "output_dir")
    if dataset is None and not is_run:
        check_local(run, "run must be a run folder")
        run_problem = (
            f"{run!r} without a {RECIPE_FILE}" if Path(run).is_dir() else f"no folder {run!r}"
        )
        raise ValueError(
            f"run must be a run folder, or dataset, source or sacrebleu must be given, got "
            f"{run_problem}."
        )
    if output_dir is None and not Path(run).is_dir():
        raise ValueError(f"output_dir must be given if the model is not a folder, got {run!r}.")
    if request.comet is not None:
        comet_program()
    return read_recipe(Path(run)) if is_run else None


def _load_texts(task: Evaluation) -> list[list[str]]:
    """Load the sources, and one or more lists of references."""
    languages = task.source_lang, task.target_lang
    if task.references:
        return read_files([task.dataset, *task.references])
    if task.split is None:
        return read_sacrebleu_set(task.dataset.removeprefix(f"{SACREBLEU} "), *languages)
    names = ("dataset", "name", "revision", "columns")
    recipe = task.recipe
    if recipe is not None and not (
        all(getattr(task, name) == getattr(recipe, name) for name in names)
        and _has_languages(recipe, *languages)
    ):
        recipe = None
    explanation: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if task.recipe is not None and task.dataset == task.recipe.dataset:
        path = Path(task.run, RECIPE_FILE)
        flags = "--dataset, --source or --sacrebleu"
        explanation = explaining_recipe(task.recipe, path, flags)
    with explanation:
        splits = load_translations(
            task.dataset,
            task.name,
            *languages,
            revision=task.revision,
            streaming=task.streaming,
            columns=task.columns,
            repair=task.split != "train",
        )
    if recipe is not None:
        splits = add_validation_split(splits, recipe)
        if recipe.validation_pairs is not None and task.split == "validation":
            _refuse_other_held_out_pairs(Path(task.run), recipe, splits["validation"])
    if task.split not in splits:
        is_other_file = recipe is None and list(splits) == ["train"]
        raise ValueError(
            f"split must be one of {', '.join(splits)}, got {task.split!r}."
            + closest_name(task.split, list(splits))
            + f" --split train scores all pairs of {task.dataset}." * is_other_file
            + " --source and --reference take a test set from text files."
        )
    return texts_of(splits[task.split].with_format("arrow")[:], languages, task.split)


def _has_languages(recipe: TrainConfig, *languages: str) -> bool:
    return {*languages} == {recipe.source_lang, recipe.target_lang}


def _refuse_other_held_out_pairs(folder: Path, recipe: TrainConfig, validation: datasets.Dataset):
    """Refuse held-out pairs that the run was trained on, because its corpus has changed."""
    first_environment = next(iter(read_environment(folder)), {})
    actual_hash = text_hash(validation, (recipe.source_lang, recipe.target_lang), "validation")
    saved_hash = first_environment.get("validation_sha256", actual_hash)
    if saved_hash != actual_hash:
        raise ValueError(
            f"the split 'validation' must have the {recipe.validation_pairs:,} pairs that the run "
            f"held out, but {recipe.dataset} has changed since the training: validation_sha256 was "
            f"{saved_hash}, got {actual_hash}."
        )


def _result_name(task: Evaluation, search: Mapping[str, Any], model: PreTrainedModel) -> str:
    """Return the name of the results: the data, and the settings that differ from the defaults."""
    changed_settings = [
        field if value is True else f"{field}{'-' * isinstance(value, str)}{value}"
        for field, value in sorted(search.items())
        if field != "engine" and value != getattr(model.generation_config, field, None)
    ]
    if task.bleu_tokenizer != task.default_tokenizer:
        changed_settings.append(f"bleu_tokenizer-{task.bleu_tokenizer}")
    return _file_name(task.data_name_parts + changed_settings)


def _translations_to_compare(
    against: str,
    task: Evaluation,
    result_name: str,
    sources: list[str],
    references: list[list[str]],
) -> tuple[str, list[str]]:
    """Return the saved translations to compare with, and the name that they are saved under."""
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


def _save_translations(
    folder: Path,
    result_name: str,
    sources: list[str],
    references: list[list[str]],
    translations: list[str],
) -> bool:
    """Save sources, references and translations; return whether the same ones were there before."""
    sides = (sources, *references, translations)
    text_by_path = _text_by_path(folder, result_name, sides)
    with lock_run_folder(folder, SECONDS_TO_WAIT):
        is_unchanged = all(
            path.is_file() and path.read_bytes() == text.encode()
            for path, text in text_by_path.items()
        )
        for path, text in text_by_path.items():
            write_atomically(path, text)
    return is_unchanged


def _text_by_path(
    folder: Path, result_name: str, sides: Sequence[Sequence[str]]
) -> dict[Path, str]:
    """Return the texts to save by path, for sources, references and translations."""
    paths = _result_paths(folder, result_name, len(sides) - 2)
    return {
        path: "".join(f"{line}\n" for line in map(one_line, lines))
        for path, lines in zip(paths, sides, strict=True)
    }


def _compute_scores(
    task: Evaluation,
    sources: list[str],
    references: list[list[str]],
    translations: list[str],
    comet: str | None,
) -> dict[str, Any]:
    """Score the translations; return the fields that name the data, then the scores."""
    fields = ("dataset", "name", "revision", "split", "source_lang", "target_lang")
    scores = {field: getattr(task, field) for field in fields}
    if task.references:
        scores["references"] = list(task.references)
    scores |= score_translations(
        translations, references[0], task.bleu_tokenizer, task.target_lang, references[1:]
    )
    intervals = confidence_intervals(translations, references, task.bleu_tokenizer)
    if intervals is not None:
        scores["intervals"] = intervals
    if task.recipe is not None:
        scores["leaks"] = _count_leaks_in_training(task, task.recipe, sources, references)
    if comet is not None:
        scores["comet"] = comet_score(sources, translations, references[0], comet)
        # `comet-score` reads a single reference for each sentence
        reference_note = (
            f", the first of {len(references)} references" if len(references) > 1 else ""
        )
        scores["comet_signature"] = f"{comet}{reference_note}"
    return scores


def _count_leaks_in_training(
    task: Evaluation, recipe: TrainConfig, sources: list[str], references: list[list[str]]
) -> dict[str, Any] | str:
    """Count the sentences that are in the training text, or return why they cannot be counted."""
    if recipe.streaming:
        return STREAMED_TEXT_REASON
    training_languages = recipe.source_lang, recipe.target_lang
    test_languages = task.source_lang, task.target_lang
    if {*test_languages} != {*training_languages}:
        return f"the training text is in {' and '.join(training_languages)}"
    corpora = [recipe.dataset, *(corpus["dataset"] for corpus in recipe.mix)]
    if not all(is_available_offline(dataset, *training_languages) for dataset in corpora):
        return "the training text is not on this machine"
    try:
        texts = load_texts(recipe)
        first_environment = next(iter(read_environment(Path(task.run))), {})
        if first_environment.get("text_sha256") not in (None, ", ".join(texts.hashes)):
            return "the training text has changed since the training"
        if task.data_name_parts == [task.split] and task.split in texts.evaluation_texts:
            hits = texts.leak_hits_of(task.split)
        else:
            finder = LeakFinder(sources, list(chain(*references)), test_languages)
            hits = find_leaks(texts.train, texts.hashes, finder)
        if recipe.drop_leaks:
            # the run dropped these pairs, so it was not trained on them
            hits = hits[~np.isin(hits[:, PAIR], texts.leak_hits[:, PAIR])]
    except (ValueError, OSError) as error:
        logger.warning("The training text cannot be read: %s", error)
        return "the training text cannot be read"
    # counted from 1, as the lines of the saved sources
    return {**count_leaks(hits), "sentences": (np.unique(hits[:, SENTENCE]) + 1).tolist()}


def _save_scores(
    task: Evaluation,
    result_name: str,
    scores: dict[str, Any],
    is_unchanged: bool,
    num_parameters: int,
):
    """Add the scores to `scores.json`, and to the model card if the folder is that of the run."""
    with lock_run_folder(task.folder, SECONDS_TO_WAIT):
        # read under the lock, because another evaluation may have saved scores in the meantime
        saved_scores = read_scores(task.folder)
        if is_unchanged and result_name in saved_scores:
            _copy_slow_scores(scores, saved_scores[result_name])
        text = json.dumps({**saved_scores, result_name: scores}, indent=1, ensure_ascii=False)
        write_atomically(task.folder / SCORES_FILE, text)
        if task.recipe is not None and task.folder.resolve() == Path(task.run).resolve():
            write_model_card(task.folder, task.recipe, num_parameters)


def join_processes() -> PartialState:
    """Join the processes that a launcher started, on CPUs if asked for or if there is no GPU.

    Returns:
        State of the processes.
    """
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or is_launched_on_cpu()
    return PartialState(cpu=cpu, timeout=COLLECTIVE_TIMEOUT)


def translate_shared(
    state: PartialState,
    pipeline: TranslationPipeline,
    sources: list[str],
    title: str | None = None,
    **search: Any,
) -> list[str]:
    """Translate sentences, divided among all processes. All processes must call this.

    Args:
        state: State of the processes.
        pipeline: Model and tokenizer.
        sources: Sentences.
        title: Name of the data in the progress bar; None for no progress bar.
        search: Settings of the pipeline's call that differ from the model's.

    Returns:
        Translations of all sentences, in order.
    """
    share = slice(state.process_index, None, state.num_processes)
    own_translations = list(
        tqdm(
            translate_lines(pipeline, sources[share], **search),
            total=len(sources[share]),
            desc=f"translating {title}",
            unit=" sentences",
            disable=title is None or not state.is_main_process,
        )
    )
    translations = [""] * len(sources)
    for rank, rank_translations in enumerate(gather_object([own_translations])):
        translations[rank :: state.num_processes] = rank_translations
    return translations


def _file_name(parts: list[str]) -> str:
    # a leading dot, as of a path that begins with "..", would hide the files
    return re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-.")


def _copy_slow_scores(scores: dict[str, Any], old_scores: Mapping[str, Any]) -> None:
    """Copy comparisons and COMET, which are slow, from earlier scores of the same translations."""
    if "against" in old_scores and old_scores["bleu_signature"] == scores["bleu_signature"]:
        scores["against"] = {**old_scores["against"], **scores.get("against", {})}
    if "comet" in old_scores and "comet" not in scores:
        scores |= {name: old_scores[name] for name in ("comet", "comet_signature")}


def _find_saved_translations(
    folder: Path, candidate_names: Iterable[str], sources: list[str], references: list[list[str]]
) -> tuple[str, list[str]]:
    """Return the first name with saved translations of the same pairs, and the translations."""
    for result_name in candidate_names:
        paths = _result_paths(folder, result_name, len(references))
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


def score_table(scores: Mapping[str, Any]) -> str:
    """Format the scores of one split as text.

    Args:
        scores: Scores from `evaluate`.

    Returns:
        One line for each score.
    """
    dataset_name = " ".join(filter(None, (scores["dataset"], scores["name"])))
    data_name = ", ".join(filter(None, (dataset_name, scores["split"])))
    search = ", ".join(f"{name} {value}" for name, value in scores["search"].items())
    label_values = {
        "data": f"{data_name}, {scores['source_lang']}-{scores['target_lang']}, "
        f"{scores['sentences']:,} sentences",
        "BLEU": f"{scores['bleu']:.2f}   {scores['bleu_signature']}",
        "chrF": f"{scores['chrf']:.2f}   {scores['chrf_signature']}",
    }
    if "intervals" in scores:
        label_values["95% interval"] = format_intervals(scores["intervals"])
    if "compound_bleu" in scores:
        label_values["as in paper"] = (
            f"{scores['compound_bleu']:.2f}   {COMPOUND_BLEU}, {scores['compound_bleu_signature']}"
        )
    if "comet" in scores:
        label_values["COMET"] = f"{scores['comet']:.4f}   {scores['comet_signature']}"
    label_values["exact match"] = f"{scores['exact_match']:.1%}"
    if scores.get("empty"):
        label_values["empty"] = f"{scores['empty']:,} of {scores['sentences']:,} translations"
    if "leaks" in scores:
        label_values["in training"] = describe_leaks(scores["leaks"])
    label_values["search"] = f"{search}; {scores['seconds']:.1f} s"
    table = "\n".join(f"{name:12} {value}" for name, value in label_values.items())
    for other_name, comparison in scores.get("against", {}).items():
        table += f"\n\nagainst {other_name}, paired bootstrap, with 95% confidence intervals\n"
        table += "\n".join(
            f"{METRICS[name]:12} {result['score']:.2f} ± {result['ci']:.2f} against "
            f"{result['other']:.2f} ± {result['other_ci']:.2f}, p = {result['p_value']:.4f}   "
            f"{result['signature']}"
            for name, result in comparison.items()
        )
    return table


def _result_paths(folder: Path, result_name: str, num_references: int = 1) -> list[Path]:
    """Return the paths of saved sources, references and translations, in this order."""
    more_references = [f"reference{number}" for number in range(2, num_references + 1)]
    sides = ("source", "reference", *more_references, "translation")
    return [folder / "hypotheses" / f"{result_name}.{side}.txt" for side in sides]


def _refuse_unwritable(
    state: PartialState,
    folder: Path,
    result_name: str,
    sources: list[str],
    references: list[list[str]],
):
    """Refuse a folder that cannot be written to, or has results of other sentences.

    This happens before the translation, which takes long.
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
            _result_paths(folder, result_name)[0].stat()
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


def run(argv: list[str], prog: str = "vanilla_transformer.train.evaluate") -> str | None:
    """Run the command line of an evaluation.

    Args:
        argv: Arguments of the command line.
        prog: Name of the command, for its help.

    Returns:
        Table of scores; None in processes other than the main process.

    Raises:
        ValueError: If model, dataset, split, file, COMET or the other run's translations are
            missing, or arguments contradict each other.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Translate a split or a test set and score it: BLEU, chrF, and BLEU as the "
        "paper counted it.",
    )
    parser.add_argument("run", metavar="RUN", help="run folder, model folder or Hub name")
    parser.add_argument("--split", help="split of the dataset to translate (test)")
    parser.add_argument("--dataset", help="dataset to translate instead of the run's own")
    parser.add_argument("--name", help="configuration of the dataset")
    parser.add_argument("--revision", help="commit, branch or tag of a dataset on the Hub")
    parser.add_argument(
        "--columns",
        help="column of each language, as {en: NAME, de: NAME}, or by number; null if the column "
        "names are the languages (default: the columns of the run)",
    )
    parser.add_argument(
        "--source", metavar="FILE", help="text file to translate instead of a split"
    )
    parser.add_argument(
        "--reference",
        metavar="FILE",
        action="append",
        help="text file with the references for --source; give the flag again for each further "
        "reference",
    )
    parser.add_argument(
        "--sacrebleu",
        metavar="NAME",
        help="test set of sacreBLEU to translate instead of a split, such as wmt14/full",
    )
    parser.add_argument("--source_lang", help="language to translate from")
    parser.add_argument("--target_lang", help="language to translate into")
    parser.add_argument(
        "--bleu_tokenizer", help="tokenizer of sacreBLEU (that of the run or the language)"
    )
    parser.add_argument(
        "--comet",
        metavar="MODEL",
        nargs="?",
        const=COMET_MODEL,
        help="also score with COMET (%(const)s)",
    )
    parser.add_argument("--against", metavar="RUN", help="compare with another run's translations")
    parser.add_argument("--output_dir", help="folder for hypotheses and scores (RUN)")
    add_search_flags(parser)
    add_trust_flag(parser)
    if not join_processes().is_main_process:
        logging.getLogger("vanilla_transformer").setLevel(logging.ERROR)
        datasets.disable_progress_bars()
    arguments = vars(parse_flags(parser, argv))
    if "columns" in arguments:
        arguments["columns"] = parse_yaml_value("columns", arguments["columns"]) or {}
    scores = evaluate(**arguments)
    leave_process_group()
    return None if scores is None else score_table(scores)


def main(argv: list[str] | None = None) -> int:
    """Run the evaluation as a command, and report an error as one sentence on stderr.

    Args:
        argv: Arguments of the command line; by default those of the process.

    Returns:
        Exit status: 0, or 1 after an error.
    """

    def print_table(argv: list[str]):
        table = run(argv)
        if table is not None:
            print_line(table)

    return run_command(print_table, argv)


if __name__ == "__main__":
    sys.exit(main())
