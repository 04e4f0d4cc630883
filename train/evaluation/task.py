"""Data of an evaluation: arguments, defaults from the recipe of a run, and sentences."""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

import datasets

from ...configuration_vanilla_transformer import closest_name
from ...console import require_nonempty_path
from ...loading import check_local
from ..config import TrainConfig, bleu_tokenizer_of, check_columns, refuse_one_language
from ..data.corpus import has_columns, load_translations, text_hash, texts_of
from ..data.prepare import add_validation_split, explaining_recipe
from ..data.tables import Columns
from ..recipe import RECIPE_FILE
from ..run_folder.environment import read_environment
from ..run_folder.files import read_recipe
from ..scoring import comet_program, score_translations
from .sets import read_files, read_sacrebleu_set, refuse_sacrebleu_set

logger = logging.getLogger(__name__)

# first word of `Evaluation.dataset` for a test set of sacreBLEU
SACREBLEU = "sacrebleu"
# arguments of `evaluate` that choose a split of a dataset
DATASET_ARGUMENTS = ("split", "dataset", "name", "revision", "columns")


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


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of `train.evaluate.evaluate`, with paths as text."""

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


def resolve_request(request: Request) -> Evaluation:
    """Check the arguments of `evaluate`, and fill in the defaults from the recipe of a run.

    Args:
        request: The arguments.

    Returns:
        Model, data and settings of the evaluation.

    Raises:
        ValueError: If arguments contradict each other, are missing, or name a language, test set,
            folder or tokenizer that cannot be used.
    """
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
    columns = request.columns or None
    check_columns(columns, source_lang, target_lang)
    split, dataset, name, revision = request.split, request.dataset, request.name, request.revision
    streaming = False
    if test_set is None:
        split = split or "test"
        if recipe is not None and dataset in (None, recipe.dataset):
            dataset, name = recipe.dataset, name or recipe.name
            revision = revision or recipe.revision
            # streaming stores no copy of the dataset and loads evaluation splits into memory; the
            # training split would stay a stream, which cannot be evaluated
            streaming = recipe.streaming and split != "train"
        # the columns of a recipe also apply to other datasets that have columns
        languages = source_lang, target_lang
        if request.columns is None and recipe is not None and _has_languages(recipe, *languages):
            columns = recipe.columns if has_columns(str(dataset), *languages) else None
    if request.sacrebleu is not None:
        refuse_sacrebleu_set(request.sacrebleu, source_lang, target_lang)
    if recipe is not None:
        _refuse_other_languages(recipe, source_lang, target_lang)
        if (target_lang, source_lang) == (recipe.source_lang, recipe.target_lang):
            logger.warning(
                "The run translates from %s to %s, and is scored in the other direction.",
                target_lang,
                source_lang,
            )
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


def _check_test_set(request: Request) -> str | None:
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


def _check_arguments(request: Request, dataset: str | None) -> TrainConfig | None:
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


def load_sentences(task: Evaluation) -> list[list[str]]:
    """Load the sentences of an evaluation.

    Args:
        task: Data of the evaluation.

    Returns:
        The sources, then one or more lists of references.

    Raises:
        ValueError: If the data cannot be read, have no such split, or are not the pairs that the
            run held out.
    """
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
        remedy = "another text with --dataset, --source or --sacrebleu"
        explanation = explaining_recipe(task.recipe, path, remedy)
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
