"""Translate a split and score it: `accelerate launch -m vanilla_transformer.train.evaluate RUN`."""

import argparse
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ..console import add_trust_flag, parse_flags, print_line, run_command
from ..loading import load
from ..pipeline_vanilla_transformer import TranslationPipeline
from .config import TrainConfig
from .data.corpus import is_available_offline
from .data.leaks import (
    PAIR,
    SENTENCE,
    LeakFinder,
    count_leaks,
    describe_leaks,
    find_leaks,
    hash_inputs,
)
from .data.prepare import STREAMED_TEXT_REASON, load_texts
from .data.tables import Columns
from .devices.distribution import (
    in_all_processes,
    join_processes,
    leave_process_group,
    main_process_first,
)
from .evaluation.results import (
    refuse_unwritable,
    result_name_of,
    result_paths,
    save_scores,
    save_translations,
    translations_to_compare,
)
from .evaluation.task import Evaluation, Request, load_sentences, resolve_request
from .recipe import parse_yaml_value
from .run_folder.environment import read_environment
from .run_folder.files import SCORES_FILE, describe_average, read_scores
from .run_folder.model_card import COMPOUND_BLEU, METRICS, format_intervals
from .scoring import (
    COMET_MODEL,
    comet_score,
    compare_translations,
    confidence_intervals,
    score_translations,
)
from .translate import SEARCH_FLAGS, add_search_flags, fitting_lines, translate_shared

logger = logging.getLogger(__name__)


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
        trust_remote_code: Whether to run the Python code that is saved with the model.
        columns: Column of each language in a table or in records; by default those of the run, if
            the dataset has columns. An empty mapping stands for columns with the languages as
            names.
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
    request = Request(
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
    task = in_all_processes(lambda: resolve_request(request))
    # the main process prepares the data, and the others then find it in the cache
    sources, *references = main_process_first(lambda: load_sentences(task))
    title = task.split or task.dataset
    int8 = bool(search.get("int8"))
    pipeline, average = in_all_processes(
        lambda: _load_with_average(task, state.device, trust_remote_code, int8)
    )
    model = pipeline.model
    in_all_processes(lambda: list(fitting_lines([sources], pipeline, title)))
    result_name = result_name_of(task, search, model)
    # the engine changes only the speed, so it is not recorded among the settings of the search
    engine_option = {"engine": search.pop("engine")} if "engine" in search else {}
    if other_run is not None:
        other_result_name, other_translations = in_all_processes(
            lambda: translations_to_compare(other_run, task, result_name, sources, references)
        )
    main_process_first(
        lambda: refuse_unwritable(state, task.folder, result_name, sources, references)
    )
    started = time.monotonic()
    translations = translate_shared(state, pipeline, sources, title, **search, **engine_option)
    seconds = time.monotonic() - started
    if not state.is_main_process:
        return None
    # the translations are saved before scoring, so that they are kept if scoring fails
    is_unchanged = save_translations(task.folder, result_name, sources, references, translations)
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
    save_scores(task, result_name, scores, is_unchanged, model.num_parameters())
    translations_path = result_paths(task.folder, result_name)[-1]
    logger.info(
        "The translations are in %s, the scores in %s.",
        translations_path,
        task.folder / SCORES_FILE,
    )
    return scores


def _load_with_average(task: Evaluation, *options: Any) -> tuple[TranslationPipeline, str | None]:
    """Load model and tokenizer, and describe which checkpoints the model is the average of."""
    folder = Path(task.run) if task.recipe is not None else None
    while True:
        average = describe_average(folder) if folder else None
        pipeline = load(task.run, *options)
        # load again if another command has replaced the model in the meantime
        if average == (describe_average(folder) if folder else None):
            return pipeline, average


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
        scores["leaks"] = _leaks_in_training(task, task.recipe, sources, references)
    if comet is not None:
        scores["comet"] = comet_score(sources, translations, references[0], comet)
        # `comet-score` reads a single reference for each sentence
        reference_note = (
            f", the first of {len(references)} references" if len(references) > 1 else ""
        )
        scores["comet_signature"] = f"{comet}{reference_note}"
    return scores


def _leaks_in_training(
    task: Evaluation, recipe: TrainConfig, sources: list[str], references: list[list[str]]
) -> dict[str, Any] | str:
    """Count the sentences that are in the training text, or return why they cannot be counted.

    Counts that an earlier evaluation has saved are returned without reading the training text.
    """
    if recipe.streaming:
        return STREAMED_TEXT_REASON
    training_languages = recipe.source_lang, recipe.target_lang
    test_languages = task.source_lang, task.target_lang
    if {*test_languages} != {*training_languages}:
        return f"the training text is in {' and '.join(training_languages)}"
    finder = LeakFinder(sources, list(chain(*references)), test_languages)
    inputs_sha256 = None
    try:
        training_sha256 = next(iter(read_environment(Path(task.run))), {}).get("text_sha256")
        # with `drop_leaks`, the counts also depend on the evaluation splits that training has read
        if training_sha256 is not None and not recipe.drop_leaks:
            inputs_sha256 = hash_inputs(training_sha256, finder)
            for score in read_scores(task.folder).values():
                saved_leaks: Any = score.get("leaks")
                if isinstance(saved_leaks, dict) and (
                    saved_leaks.get("inputs_sha256") == inputs_sha256
                ):
                    return saved_leaks
        corpora = [recipe.dataset, *(corpus["dataset"] for corpus in recipe.mix)]
        if not all(is_available_offline(dataset, *training_languages) for dataset in corpora):
            return "the training text is not on this machine"
        texts = load_texts(recipe)
        if training_sha256 not in (None, ", ".join(texts.hashes)):
            return "the training text has changed since the training"
        if task.data_name_parts == [task.split] and task.split in texts.evaluation_texts:
            hits = texts.leak_hits_of(task.split)
        else:
            hits = find_leaks(texts.train, texts.hashes, finder)
        if recipe.drop_leaks:
            # the run dropped these pairs, so it was not trained on them
            hits = hits[~np.isin(hits[:, PAIR], texts.leak_hits[:, PAIR])]
    except (ValueError, OSError) as error:
        logger.warning("The training text cannot be read: %s", error)
        return "the training text cannot be read"
    # sentences are counted from 1, like the lines of the saved sources
    leaks = {**count_leaks(hits), "sentences": (np.unique(hits[:, SENTENCE]) + 1).tolist()}
    return leaks if inputs_sha256 is None else {**leaks, "inputs_sha256": inputs_sha256}


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
        description="Translate a split or a test set and score it: BLEU, chrF, and BLEU as in the "
        "paper.",
    )
    parser.add_argument("run", metavar="RUN", help="run folder, model folder or Hub name")
    parser.add_argument("--split", help="split of the dataset to translate (default: test)")
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
        help="text file with the references for --source; may be given several times, for "
        "several references",
    )
    parser.add_argument(
        "--sacrebleu",
        metavar="NAME",
        help="test set of sacreBLEU to translate instead of a split, such as wmt14/full",
    )
    parser.add_argument("--source_lang", help="language to translate from")
    parser.add_argument("--target_lang", help="language to translate into")
    parser.add_argument(
        "--bleu_tokenizer", help="tokenizer of sacreBLEU (default: that of the run or the language)"
    )
    parser.add_argument(
        "--comet",
        metavar="MODEL",
        nargs="?",
        const=COMET_MODEL,
        help="also score with COMET (%(const)s)",
    )
    parser.add_argument("--against", metavar="RUN", help="compare with another run's translations")
    parser.add_argument("--output_dir", help="folder for hypotheses and scores (default: RUN)")
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
