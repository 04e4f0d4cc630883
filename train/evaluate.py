"""Translate a split and score it: `accelerate launch -m vanilla_transformer.train.evaluate RUN`."""

import argparse
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
from ..configuration_vanilla_transformer import closest_name
from ..console import add_trust_flag, checked_folder, parse_flags, run_command
from ..identity_vanilla_transformer import difference_outside_layers
from ..loading import check_local, load
from ..pipeline_vanilla_transformer import TranslationPipeline, evaluating
from ..records import read_text
from .config import TrainConfig, bleu_tokenizer_of
from .data.batches import IGNORED
from .data.corpus import is_available_offline, load_translations, texts_of
from .data.leaks import PAIR, SENTENCE, LeakFinder, count_leaks, describe_leaks, find_leaks
from .data.prepare import STREAMED_TEXT_REASON, add_validation_split, load_texts
from .devices.distribution import (
    COLLECTIVE_TIMEOUT,
    in_all_processes,
    is_launched_on_cpu,
    leave_process_group,
    main_process_first,
)
from .devices.fused_loss import block_bytes
from .evaluation_sets import read_files, read_sacrebleu_set, refuse_sacrebleu_set
from .recipe import RECIPE_FILE
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
from .translate import SEARCH, add_search, fitting_lines, one_line, translate_lines

logger = logging.getLogger(__name__)

# seconds to wait for another evaluation, which locks the folder only while it writes
SECONDS_TO_WAIT = 10.0
# first word of `Evaluation.dataset` for a test set of sacreBLEU
SACREBLEU = "sacrebleu"


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
    states = model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    # each logit is stored three times, in at most 4 bytes: as computed, in float32, and as a
    # log-probability
    rows = max(1, block_bytes(states.device.type) // (3 * 4 * model.config.vocab_size))
    parts = zip(states.split(rows), labels.flatten().split(rows), strict=True)
    losses = (smoothed_loss_sum(model.lm_head(x)[None], label, 0.0) for x, label in parts)
    return sum(losses, start=torch.zeros((), device=states.device))


@dataclass(frozen=True)
class Evaluation:
    """Model, data and settings of an evaluation, with the defaults filled in.

    Args:
        run: Run folder, model folder or Hub name.
        recipe: Settings of the run; None if the model is not in a run folder.
        folder: Folder for the results.
        split: Split to translate; None for files and for a test set of sacreBLEU.
        dataset: Argument of `load_translations`, the source file, or the name of the test set.
        name: Argument of `load_translations`.
        source_lang: Language to translate from.
        target_lang: Language to translate into.
        revision: Argument of `load_translations`.
        streaming: Argument of `load_translations`.
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
    streaming: bool
    references: tuple[str, ...]
    bleu_tokenizer: str
    default_tokenizer: str

    @property
    def data_name_parts(self) -> list[str]:
        """Parts of the data's name in the results: only the split for the run's own dataset."""
        names = ("dataset", "name", "source_lang", "target_lang", "revision")
        recipe = self.recipe
        if (
            self.split is not None
            and recipe is not None
            and all(getattr(self, it) == getattr(recipe, it) for it in names)
        ):
            return [self.split]
        parts = filter(None, [self.dataset, self.name, self.revision, self.split])
        return [*parts, self.source_lang, self.target_lang]


def evaluate(
    run: str | Path,
    split: str | None = None,
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
        dataset: Argument of `load_translations`. The defaults of `dataset`, `name`, `source_lang`,
            `target_lang` and `revision` are the run's own.
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
        search: Settings of `generate` that differ from the model's, `num_beams` for example.

    Returns:
        Scores, as in `score_translations`, with the data, the search and the time; None in
        processes other than the main process.

    Raises:
        ValueError: If model, dataset, split, file, COMET or the other run's translations are
            missing, or arguments contradict each other.
    """
    state = joined_processes()
    corpus = None if dataset is None else str(dataset)
    other = None if against is None else str(against)
    folder = None if output_dir is None else str(output_dir)
    paths = [reference] if isinstance(reference, str | Path) else reference
    files = (None if source is None else str(source), tuple(map(str, paths)), sacrebleu)
    data = (corpus, name, source_lang, target_lang, revision, *files)
    task = in_all_processes(lambda: _resolve(str(run), split, *data, bleu_tokenizer, comet, folder))
    # the main process prepares the data, and the others then find it in the cache
    sources, *references = main_process_first(lambda: _load_texts(task))
    title = task.split or task.dataset
    int8 = bool(search.get("int8"))
    pipeline, average = in_all_processes(
        lambda: _load_with_average(task, state.device, trust_remote_code, int8)
    )
    model = pipeline.model
    in_all_processes(lambda: list(fitting_lines([sources], pipeline, title)))
    key = _result_name(task, search, model)
    # the engine changes only the speed, so it is not recorded among the settings of the search
    engine = {"engine": search.pop("engine")} if "engine" in search else {}
    if other is not None:
        other_key, others = in_all_processes(
            lambda: _translations_to_compare(other, task, key, sources, references)
        )
    main_process_first(lambda: _refuse_unwritable(state, task.folder, key))
    started = time.monotonic()
    translations = translate_shared(state, pipeline, sources, title, **search, **engine)
    seconds = time.monotonic() - started
    if not state.is_main_process:
        return None
    # saved before scoring, so that they are kept if scoring fails
    is_unchanged = _save_translations(task.folder, key, sources, references, translations)
    scores = _scores_of(task, sources, references, translations, comet)
    defaults = {field: getattr(model.generation_config, field, None) for field in SEARCH}
    scores |= {"search": {**defaults, **search}, "seconds": seconds}
    scores["processes"] = state.num_processes
    if task.recipe is not None:
        scores["average"] = average
    if other is not None:
        comparison = compare_translations(
            translations, others, references[0], task.bleu_tokenizer, references[1:]
        )
        scores["against"] = {f"{other_key} of {other}": comparison}
    _save_scores(task, key, scores, is_unchanged, model.num_parameters())
    saved = _saved_files(task.folder, key)[-1]
    logger.info("The translations are in %s, the scores in %s.", saved, task.folder / SCORES_FILE)
    return scores


def _resolve(
    run: str,
    split: str | None,
    dataset: str | None,
    name: str | None,
    source_lang: str | None,
    target_lang: str | None,
    revision: str | None,
    source: str | None,
    references: tuple[str, ...],
    sacrebleu: str | None,
    bleu_tokenizer: str | None,
    comet: str | None,
    output_dir: str | None,
) -> Evaluation:
    """Check the arguments of `evaluate`, and fill in the defaults from the recipe of a run."""
    of_dataset = {"split": split, "dataset": dataset, "name": name, "revision": revision}
    test_set = _check_test_set(source, references, sacrebleu, of_dataset)
    recipe = _check_arguments(run, dataset or test_set, output_dir, comet)
    streaming = False
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
    if source_lang == target_lang:
        raise ValueError(f"target_lang must differ from source_lang, got {source_lang!r} for both.")
    if test_set is None:
        split = split or "test"
        if recipe is not None and dataset is None:
            dataset, name = recipe.dataset, name or recipe.name
        if recipe is not None and dataset == recipe.dataset:
            revision = revision or recipe.revision
            # streaming stores no copy of the dataset and loads evaluation splits into memory; the
            # training split would stay a stream, which cannot be evaluated
            streaming = recipe.streaming and split != "train"
    if sacrebleu is not None:
        refuse_sacrebleu_set(sacrebleu, source_lang, target_lang)
    default = bleu_tokenizer_of(target_lang)
    if recipe is not None and target_lang == recipe.target_lang:
        default = recipe.bleu_tokenizer or default
    bleu_tokenizer = bleu_tokenizer or default
    # refuse a wrong tokenizer before the translation, which takes long
    score_translations(["a"], ["a"], bleu_tokenizer)
    return Evaluation(
        run=run,
        recipe=recipe,
        folder=Path(run if output_dir is None else output_dir),
        split=split,
        dataset=str(test_set or dataset),
        name=name,
        source_lang=source_lang,
        target_lang=target_lang,
        revision=revision,
        streaming=streaming,
        references=references,
        bleu_tokenizer=bleu_tokenizer,
        default_tokenizer=default,
    )


def _check_test_set(
    source: str | None,
    references: tuple[str, ...],
    sacrebleu: str | None,
    of_dataset: Mapping[str, str | None],
) -> str | None:
    """Refuse several test sets at once; return the name of one that is no dataset, or None."""
    if (source is None) != (not references):
        missing = "source" if source is None else "reference"
        raise ValueError(f"source and reference must be given together, got no {missing}.")
    given = [name for name, value in of_dataset.items() if value is not None]
    named = [name for name, value in (("source", source), ("sacrebleu", sacrebleu)) if value]
    if named and len(named + given) > 1:
        raise ValueError(
            f"one of a dataset, source and sacrebleu must be given, got {', '.join(named + given)}."
        )
    return source or (sacrebleu and f"{SACREBLEU} {sacrebleu}")


def _load_with_average(task: Evaluation, *options: Any) -> tuple[TranslationPipeline, str | None]:
    """Load model and tokenizer, and describe which checkpoints the model is the average of."""
    folder = Path(task.run) if task.recipe is not None else None
    while True:
        before = describe_average(folder) if folder else None
        pipeline = load(task.run, *options)
        # load again if another command has replaced the model in the meantime
        if before == (describe_average(folder) if folder else None):
            return pipeline, before


def _check_arguments(
    run: str, dataset: str | None, output_dir: str | None, comet: str | None
) -> TrainConfig | None:
    """Refuse arguments that cannot be used; return the settings of a run, or None."""
    is_run = (checked_folder(run, "run") / RECIPE_FILE).is_file()
    if output_dir is not None:
        checked_folder(output_dir, "output_dir")
    if dataset is None and not is_run:
        check_local(run, "run must be a run folder")
        found = f"{run!r} without a {RECIPE_FILE}" if Path(run).is_dir() else f"no folder {run!r}"
        raise ValueError(
            f"run must be a run folder, or dataset, source or sacrebleu must be given, got {found}."
        )
    if output_dir is None and not Path(run).is_dir():
        raise ValueError(f"output_dir must be given if the model is not a folder, got {run!r}.")
    if comet is not None:
        comet_program()
    return read_recipe(Path(run)) if is_run else None


def _load_texts(task: Evaluation) -> list[list[str]]:
    """Load the sources, and one or more lists of references."""
    languages = task.source_lang, task.target_lang
    if task.references:
        return read_files([task.dataset, *task.references])
    if task.split is None:
        return read_sacrebleu_set(task.dataset.removeprefix(f"{SACREBLEU} "), *languages)
    names = ("dataset", "name", "revision")
    recipe = task.recipe
    if recipe is not None and not (
        all(getattr(task, name) == getattr(recipe, name) for name in names)
        and {*languages} == {recipe.source_lang, recipe.target_lang}
    ):
        recipe = None
    splits = load_translations(
        task.dataset,
        task.name,
        *languages,
        revision=task.revision,
        streaming=task.streaming,
        columns=None if recipe is None else recipe.columns,
    )
    if recipe is not None:
        splits = add_validation_split(splits, recipe)
    if task.split not in splits:
        raise ValueError(
            f"split must be one of {', '.join(splits)}, got {task.split!r}."
            + closest_name(task.split, list(splits))
            + " --source and --reference take a test set from text files."
        )
    return texts_of(splits[task.split].with_format("arrow")[:], languages, task.split)


def _result_name(task: Evaluation, search: Mapping[str, Any], model: PreTrainedModel) -> str:
    """Return the name of the results: the data, and the settings that differ from the defaults."""
    settings = [
        field if value is True else f"{field}{'-' * isinstance(value, str)}{value}"
        for field, value in sorted(search.items())
        if field != "engine" and value != getattr(model.generation_config, field, None)
    ]
    if task.bleu_tokenizer != task.default_tokenizer:
        settings.append(f"bleu_tokenizer-{task.bleu_tokenizer}")
    return _file_name(task.data_name_parts + settings)


def _translations_to_compare(
    against: str, task: Evaluation, key: str, sources: list[str], references: list[list[str]]
) -> tuple[str, list[str]]:
    """Return the saved translations to compare with, and the name that they are saved under."""
    other = Path(against)
    # a run is compared with itself to measure another search: use the results of its own search
    is_itself = other.resolve() in (Path(task.run).resolve(), task.folder.resolve())
    own = _file_name(task.data_name_parts)
    keys = [own] if is_itself else [key, task.split or own]
    found, translations = _saved_translations(other, keys, sources, references)
    score, average = read_scores(other).get(found, {}), describe_average(other)
    if average is not None and is_of_other_weights(score, average):
        raise ValueError(
            f"against must be a run whose translations are its model's, got {other} with "
            f"translations by {score['average']}, while the model is {average}: evaluate that run "
            "first."
        )
    return found, translations


def _save_translations(
    folder: Path, key: str, sources: list[str], references: list[list[str]], translations: list[str]
) -> bool:
    """Save sources, references and translations; return whether the same ones were there before."""
    texts = {
        path: "".join(f"{line}\n" for line in map(one_line, lines))
        for path, lines in zip(
            _saved_files(folder, key, len(references)),
            (sources, *references, translations),
            strict=True,
        )
    }
    with lock_run_folder(folder, SECONDS_TO_WAIT):
        is_unchanged = all(
            path.is_file() and path.read_bytes() == text.encode() for path, text in texts.items()
        )
        for path, text in texts.items():
            write_atomically(path, text)
    return is_unchanged


def _scores_of(
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
        scores["leaks"] = _leaks_of(task, task.recipe, sources, references)
    if comet is not None:
        scores["comet"] = comet_score(sources, translations, references[0], comet)
        # `comet-score` reads a single reference for each sentence
        others = f", the first of {len(references)} references" if len(references) > 1 else ""
        scores["comet_signature"] = f"{comet}{others}"
    return scores


def _leaks_of(
    task: Evaluation, recipe: TrainConfig, sources: list[str], references: list[list[str]]
) -> dict[str, Any] | str:
    """Count the sentences that are in the training text, or return why they cannot be counted."""
    if recipe.streaming:
        return STREAMED_TEXT_REASON
    languages = recipe.source_lang, recipe.target_lang
    own_languages = task.source_lang, task.target_lang
    if {*own_languages} != {*languages}:
        return f"the training text is in {' and '.join(languages)}"
    corpora = [recipe.dataset, *(corpus["dataset"] for corpus in recipe.mix)]
    if not all(is_available_offline(dataset, *languages) for dataset in corpora):
        return "the training text is not on this machine"
    try:
        texts = load_texts(recipe)
        began = next(iter(read_environment(Path(task.run))), {})
        if began.get("text_sha256") not in (None, ", ".join(texts.hashes)):
            return "the training text has changed since the training"
        if task.data_name_parts == [task.split] and task.split in texts.evaluation_texts:
            hits = texts.leak_hits_of(task.split)
        else:
            finder = LeakFinder(sources, list(chain(*references)), own_languages)
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
    task: Evaluation, key: str, scores: dict[str, Any], is_unchanged: bool, num_parameters: int
):
    """Add the scores to `scores.json`, and to the model card if the folder is that of the run."""
    with lock_run_folder(task.folder, SECONDS_TO_WAIT):
        # read under the lock, because another evaluation may have saved scores in the meantime
        before = read_scores(task.folder)
        if is_unchanged and key in before:
            _keep_comparisons(scores, before[key])
        text = json.dumps({**before, key: scores}, indent=1, ensure_ascii=False)
        write_atomically(task.folder / SCORES_FILE, text)
        if task.recipe is not None and task.folder.resolve() == Path(task.run).resolve():
            write_model_card(task.folder, task.recipe, num_parameters)


def joined_processes() -> PartialState:
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
    own = list(
        tqdm(
            translate_lines(pipeline, sources[share], **search),
            total=len(sources[share]),
            desc=f"translating {title}",
            unit=" sentences",
            disable=title is None or not state.is_main_process,
        )
    )
    translations = [""] * len(sources)
    for rank, part in enumerate(gather_object([own])):
        translations[rank :: state.num_processes] = part
    return translations


def _file_name(parts: list[str]) -> str:
    # a leading dot, as of a path that begins with "..", would hide the files
    return re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-.")


def _keep_comparisons(scores: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Copy comparisons and COMET, which are slow, from earlier scores of the same translations."""
    if "against" in before and before["bleu_signature"] == scores["bleu_signature"]:
        scores["against"] = {**before["against"], **scores.get("against", {})}
    if "comet" in before and "comet" not in scores:
        scores |= {name: before[name] for name in ("comet", "comet_signature")}


def _saved_translations(
    folder: Path, keys: Iterable[str], sources: list[str], references: list[list[str]]
) -> tuple[str, list[str]]:
    """Return the first key with saved translations of the same pairs, and the translations."""
    for key in keys:
        paths = _saved_files(folder, key, len(references))
        if all(path.is_file() for path in paths):
            *kept, translations = (
                [one_line(line) for line in read_text(path).split("\n")[:-1]] for path in paths
            )
            if kept == [list(map(one_line, side)) for side in (sources, *references)]:
                if len(translations) != len(sources):
                    raise ValueError(
                        f"{paths[-1]} must have {len(sources):,} lines, one for each sentence, got "
                        f"{len(translations):,}: evaluate that run again."
                    )
                return key, translations
    raise ValueError(
        f"against must be a run with saved translations of the same sentences, got {folder} "
        f"without them under {' or '.join(dict.fromkeys(keys))}: evaluate that run first."
    )


def score_table(scores: Mapping[str, Any]) -> str:
    """Format the scores of one split as text.

    Args:
        scores: Scores from `evaluate`.

    Returns:
        One line for each score.
    """
    dataset = " ".join(filter(None, (scores["dataset"], scores["name"])))
    data = ", ".join(filter(None, (dataset, scores["split"])))
    search = ", ".join(f"{name} {value}" for name, value in scores["search"].items())
    lines = {
        "data": f"{data}, {scores['source_lang']}-{scores['target_lang']}, "
        f"{scores['sentences']:,} sentences",
        "BLEU": f"{scores['bleu']:.2f}   {scores['bleu_signature']}",
        "chrF": f"{scores['chrf']:.2f}   {scores['chrf_signature']}",
    }
    if "intervals" in scores:
        lines["95% interval"] = format_intervals(scores["intervals"])
    if "compound_bleu" in scores:
        lines["as in paper"] = (
            f"{scores['compound_bleu']:.2f}   {COMPOUND_BLEU}, {scores['compound_bleu_signature']}"
        )
    if "comet" in scores:
        lines["COMET"] = f"{scores['comet']:.4f}   {scores['comet_signature']}"
    lines["exact match"] = f"{scores['exact_match']:.1%}"
    if scores.get("empty"):
        lines["empty"] = f"{scores['empty']:,} of {scores['sentences']:,} translations"
    if "leaks" in scores:
        lines["in training"] = describe_leaks(scores["leaks"])
    lines["search"] = f"{search}; {scores['seconds']:.1f} s"
    table = "\n".join(f"{name:12} {value}" for name, value in lines.items())
    for other, comparison in scores.get("against", {}).items():
        table += f"\n\nagainst {other}, paired bootstrap, with 95% confidence intervals\n"
        table += "\n".join(
            f"{METRICS[name]:12} {result['score']:.2f} ± {result['ci']:.2f} against "
            f"{result['other']:.2f} ± {result['other_ci']:.2f}, p = {result['p_value']:.4f}   "
            f"{result['signature']}"
            for name, result in comparison.items()
        )
    return table


def _saved_files(folder: Path, key: str, num_references: int = 1) -> list[Path]:
    """Return the paths of saved sources, references and translations, in this order."""
    others = [f"reference{number}" for number in range(2, num_references + 1)]
    sides = ("source", "reference", *others, "translation")
    return [folder / "hypotheses" / f"{key}.{side}.txt" for side in sides]


def _refuse_unwritable(state: PartialState, folder: Path, key: str):
    """Refuse a folder that cannot be written to, before the translation, which takes long."""
    read_scores(folder)
    try:
        if state.is_main_process:
            # fails if a training run uses the folder, which stays locked until the run ends
            with lock_run_folder(folder, SECONDS_TO_WAIT):
                pass
        (folder / "hypotheses").mkdir(parents=True, exist_ok=True)
        # fails if the name of the file is too long for the file system
        _saved_files(folder, key)[0].stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ValueError(
            f"output_dir must be a folder that results can be written to, got {folder}: {error}"
        ) from error


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
    parser.add_argument("--split", help="split of the dataset (test)")
    parser.add_argument("--dataset", help="another dataset than the run's own")
    parser.add_argument("--name", help="configuration of the dataset")
    parser.add_argument("--revision", help="commit, branch or tag of a dataset on the Hub")
    parser.add_argument(
        "--source", metavar="FILE", help="text file to translate instead of a split"
    )
    parser.add_argument(
        "--reference",
        metavar="FILE",
        action="append",
        help="references of this file; give the flag again for each further reference",
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
    add_search(parser)
    add_trust_flag(parser)
    if not joined_processes().is_main_process:
        logging.getLogger("vanilla_transformer").setLevel(logging.ERROR)
        datasets.disable_progress_bars()
    scores = evaluate(**vars(parse_flags(parser, argv)))
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
            sys.stdout.write(table + "\n")

    return run_command(print_table, argv)


if __name__ == "__main__":
    sys.exit(main())
