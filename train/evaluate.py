"""Translate a split and score it: `accelerate launch -m vanilla_transformer.train.evaluate RUN`."""

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..atomic_files import write_whole
from ..configuration_vanilla_transformer import closest_name
from ..console import a_folder, add_trust_flag, run_command
from ..hub import check_local
from ..identity_vanilla_transformer import stacks_difference
from ..pipeline_vanilla_transformer import evaluating
from ..records import read_text
from .config import TrainConfig, bleu_tokenizer_of
from .data.batches import IGNORED
from .data.corpus import load_translations, texts_of
from .devices.distribution import (
    LONGEST_WAIT,
    is_launched_on_cpu,
    leave_processes,
    main_process_first,
    together,
)
from .devices.fused_loss import block_bytes
from .recipe import RECIPE_FILE
from .run_folder.files import SCORES_FILE, describe_average, hold_run, read_recipe, read_scores
from .run_folder.model_card import COMPOUND_BLEU, METRICS, write_model_card
from .scoring import (
    COMET_MODEL,
    comet_program,
    comet_score,
    compare_translations,
    score_translations,
)
from .step import REPLICATED, smoothed_loss_sum
from .translate import SEARCH, add_search, fitting_lines, load_model, one_line, translate_lines

# an evaluation has the folder of its results only while it writes them
SECONDS_TO_WAIT = 10.0


@torch.no_grad()
def validation_loss(
    accelerator: Accelerator, model: PreTrainedModel, batches: Iterable[dict[str, Tensor]]
) -> float:
    """The loss without smoothing and without dropout, over all processes.

    Args:
        accelerator: Knows the processes and the precision.
        model: The model, not wrapped for several processes; trains on afterwards.
        batches: What this process has of the split.

    Returns:
        Loss for each target token.
    """
    # not every accelerator has float64
    loss_sum = torch.zeros((), device=accelerator.device)
    num_tokens = torch.zeros((), dtype=torch.long, device=accelerator.device)
    with evaluating(model):
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
    if accelerator.distributed_type not in REPLICATED or stacks_difference(model) is not None:
        # with a part of the weights on each process only a module has all of its own, and an edited
        # model is called as it is
        return smoothed_loss_sum(model(**inputs, use_cache=False).logits, labels, 0.0)
    states = model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    # a score is there as it is computed, in float32, and as a log-probability
    rows = max(1, block_bytes(states.device.type) // (3 * 4 * model.config.vocab_size))
    parts = zip(states.split(rows), labels.flatten().split(rows), strict=True)
    return sum(smoothed_loss_sum(model.lm_head(x)[None], label, 0.0) for x, label in parts)


def evaluate(
    run: str | Path,
    split: str = "test",
    dataset: str | Path | None = None,
    name: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    revision: str | None = None,
    bleu_tokenizer: str | None = None,
    comet: str | None = None,
    against: str | Path | None = None,
    output_dir: str | Path | None = None,
    trust_remote_code: bool = False,
    **search: Any,
) -> dict[str, Any] | None:
    """Translate a split, score it, and keep both.

    Works as one process, or as one of many that `accelerate launch` started: each translates its
    share, and the main one scores every sentence once.

    Leaves `hypotheses/` and `scores.json`, and puts the scores into the model card of a run. They
    are kept by the name of the split; with other data, another search or another tokenizer than
    the run's own, those are part of the name.

    Args:
        run: A run folder, a model folder or a Hub name.
        split: Which split to translate.
        dataset: As in `load_translations`; the run's own if not given, with the four that follow.
        name: Configuration of the dataset.
        source_lang: Language to translate from.
        target_lang: Language to translate into.
        revision: Commit, branch or tag of a dataset on the Hub.
        bleu_tokenizer: Tokenizer of sacreBLEU; by default that of the run or the language.
        comet: The model of COMET to score with as well.
        against: Another run, whose kept translations of the same split are to be compared.
        output_dir: Where to leave the results; the run folder if not given.
        trust_remote_code: Run the Python code that is saved with the model.
        search: Settings of `generate` that differ from the model's, `num_beams` for one.

    Returns:
        The scores, as in `score_translations`, with what was translated and how fast; nothing where
        this is not the main process.

    Raises:
        ValueError: If model, dataset, split, COMET or the other run's translations cannot be had.
    """
    state = _processes()
    run, dataset, against, output_dir = (
        str(place) if isinstance(place, Path) else place
        for place in (run, dataset, against, output_dir)
    )
    recipe = together(
        lambda: _check_arguments(run, dataset, source_lang, target_lang, output_dir, comet)
    )
    is_run = recipe is not None
    source_lang, target_lang = (
        source_lang or recipe.source_lang,
        target_lang or recipe.target_lang,
    )
    if dataset is None:
        dataset, name = recipe.dataset, name or recipe.name
    streaming = False
    if is_run and dataset == recipe.dataset:
        revision = revision or recipe.revision
        # a stream stores nothing, but has the splits to evaluate with whole
        streaming = recipe.streaming and split != "train"
    data = (dataset, name, source_lang, target_lang)
    is_own = is_run and (*data, revision) == (
        recipe.dataset,
        recipe.name,
        recipe.source_lang,
        recipe.target_lang,
        recipe.revision,
    )
    is_of_recipe = is_run and target_lang == recipe.target_lang
    own_tokenizer = recipe.bleu_tokenizer if is_of_recipe else bleu_tokenizer_of(target_lang)
    bleu_tokenizer = bleu_tokenizer or own_tokenizer
    # a slip is found before a long translation, not after
    together(lambda: score_translations(["a"], ["a"], bleu_tokenizer))
    folder = Path(run if output_dir is None else output_dir)

    # the others then find what the main process has prepared
    sources, references = main_process_first(
        lambda: _load_split(split, *data, revision=revision, streaming=streaming)
    )
    int8 = bool(search.get("int8"))
    model, tokenizer, average = together(
        lambda: _load(run, is_run, state.device, trust_remote_code, int8)
    )
    together(lambda: list(fitting_lines([sources], model, tokenizer, split)))
    data_key = (
        [split]
        if is_own
        else [dataset, *filter(None, [name, revision]), split, source_lang, target_lang]
    )
    settings = [
        field if value is True else f"{field}{value}"
        for field, value in sorted(search.items())
        if field != "engine" and value != getattr(model.generation_config, field, None)
    ]
    settings += [f"bleu_tokenizer-{bleu_tokenizer}"] * (bleu_tokenizer != own_tokenizer)
    key = _file_name(data_key + settings)
    # who computes the search changes no translation
    engine = {"engine": search.pop("engine")} if "engine" in search else {}
    if against is not None:
        # a run keeps this search too, and beside itself it is no worse and no better
        is_itself = Path(against).resolve() in (Path(run).resolve(), folder.resolve())
        keys = [_file_name(data_key)] if is_itself else [key, split]
        kept = (Path(against), keys, sources, references)
        other_key, others = together(lambda: _kept_translations(*kept))
    main_process_first(lambda: _refuse_unwritable(state, folder, key))
    started = time.monotonic()
    translations = _translate_shared(state, model, tokenizer, sources, split, search | engine)
    seconds = time.monotonic() - started
    if not state.is_main_process:
        return None
    # whatever becomes of the scores
    kept = {
        path: "".join(f"{line}\n" for line in map(one_line, lines))
        for path, lines in zip(
            _kept_files(folder, key), (sources, references, translations), strict=True
        )
    }
    with hold_run(folder, SECONDS_TO_WAIT):
        is_known = all(
            path.is_file() and path.read_bytes() == text.encode() for path, text in kept.items()
        )
        for path, text in kept.items():
            write_whole(path, text)
    scores = {
        "dataset": dataset,
        "name": name,
        "revision": revision,
        "split": split,
        "source_lang": source_lang,
        "target_lang": target_lang,
        **score_translations(translations, references, bleu_tokenizer, target_lang),
        "search": {
            **{field: getattr(model.generation_config, field, None) for field in SEARCH},
            **search,
        },
        "seconds": seconds,
        "processes": state.num_processes,
    }
    if is_run:
        scores["average"] = average
    if comet is not None:
        scores["comet"] = comet_score(sources, translations, references, comet)
        scores["comet_signature"] = comet
    if against is not None:
        comparison = compare_translations(translations, others, references, bleu_tokenizer)
        scores["against"] = {f"{other_key} of {against}": comparison}
    # another evaluation may have left its scores meanwhile
    with hold_run(folder, SECONDS_TO_WAIT):
        before = read_scores(folder)
        if is_known and key in before:
            _keep_comparisons(scores, before[key])
        all_scores = {**before, key: scores}
        write_whole(folder / SCORES_FILE, json.dumps(all_scores, indent=1, ensure_ascii=False))
        if is_run and folder.resolve() == Path(run).resolve():
            write_model_card(folder, recipe, model.num_parameters())
    return scores


def _load(
    run: str, is_run: bool, *how: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str | None]:
    """Load a model with its tokenizer, and say what the model is the average of."""
    while True:
        before = describe_average(Path(run)) if is_run else None
        model, tokenizer = load_model(run, *how)
        # another command may have put another average there
        if before == (describe_average(Path(run)) if is_run else None):
            return model, tokenizer, before


def _check_arguments(
    run: str,
    dataset: str | None,
    source_lang: str | None,
    target_lang: str | None,
    output_dir: str | None,
    comet: str | None,
) -> TrainConfig | None:
    """Give the recipe of a run, and refuse what cannot be evaluated."""
    is_run = (a_folder(run, "run") / RECIPE_FILE).is_file()
    if output_dir is not None:
        a_folder(output_dir, "output_dir")
    if dataset is None and not is_run:
        check_local(run, "run must be a run folder")
        what = f"{run!r} without a {RECIPE_FILE}" if Path(run).is_dir() else f"no folder {run!r}"
        raise ValueError(f"run must be a run folder, or dataset be given, got {what}.")
    if not is_run and None in (source_lang, target_lang):
        raise ValueError("source_lang and target_lang must be given with dataset, got one or none.")
    if output_dir is None and not Path(run).is_dir():
        raise ValueError(f"output_dir must be given where the model is no folder, as in {run!r}.")
    if comet is not None:
        comet_program()
    recipe = read_recipe(Path(run)) if is_run else None
    source_lang = source_lang or recipe.source_lang
    if source_lang == (target_lang or recipe.target_lang):
        raise ValueError(f"target_lang must differ from source_lang, got {source_lang!r} for both.")
    return recipe


def _load_split(
    split: str, dataset: str, name: str | None, source_lang: str, target_lang: str, **how: Any
) -> list[list[str]]:
    texts = load_translations(dataset, name, source_lang, target_lang, **how)
    if split not in texts:
        raise ValueError(
            f"split must be one of {', '.join(texts)}, got {split!r}."
            + closest_name(split, list(texts))
        )
    return texts_of(texts[split].with_format("arrow")[:], [source_lang, target_lang], split)


def _processes() -> PartialState:
    """The processes that work together, on processors where the user says so or nothing else is."""
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or is_launched_on_cpu()
    return PartialState(cpu=cpu, timeout=LONGEST_WAIT)


def _translate_shared(
    state: PartialState,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    split: str,
    search: dict[str, Any],
) -> list[str]:
    """Every source translated once, on all processes, in order."""
    share = slice(state.process_index, None, state.num_processes)
    own = list(
        tqdm(
            translate_lines(model, tokenizer, sources[share], **search),
            total=len(sources[share]),
            desc=f"translating {split}",
            unit=" sentences",
            disable=not state.is_main_process,
        )
    )
    translations = [""] * len(sources)
    for rank, part in enumerate(gather_object([own])):
        translations[rank :: state.num_processes] = part
    return translations


def _file_name(parts: list[str]) -> str:
    return re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-")


def _keep_comparisons(scores: dict[str, Any], before: Mapping[str, Any]) -> None:
    """What else was found of the same translations holds still, and took long to find."""
    if "against" in before and before["bleu_signature"] == scores["bleu_signature"]:
        scores["against"] = {**before["against"], **scores.get("against", {})}
    if "comet" in before and "comet" not in scores:
        scores |= {name: before[name] for name in ("comet", "comet_signature")}


def _kept_translations(
    folder: Path, keys: Iterable[str], sources: list[str], references: list[str]
) -> tuple[str, list[str]]:
    """What another run has translated the same sources to, and under which of the keys."""
    for key in keys:
        sides = _kept_files(folder, key)
        if all(path.is_file() for path in sides):
            kept = [[one_line(line) for line in read_text(path).split("\n")[:-1]] for path in sides]
            if kept[:2] == [list(map(one_line, side)) for side in (sources, references)]:
                if len(kept[2]) != len(sources):
                    raise ValueError(
                        f"{sides[2]} must have {len(sources):,} lines, one for each sentence, got "
                        f"{len(kept[2]):,}: evaluate that run again."
                    )
                return key, kept[2]
    raise ValueError(
        f"against must be a run with kept translations of the same sentences, got {folder} without "
        f"them under {' or '.join(dict.fromkeys(keys))}: evaluate it first."
    )


def score_table(scores: Mapping[str, Any]) -> str:
    """The scores of one split, to be read.

    Args:
        scores: From `evaluate`.

    Returns:
        A line for each.
    """
    dataset = " ".join(filter(None, (scores["dataset"], scores["name"])))
    search = ", ".join(f"{name} {value}" for name, value in scores["search"].items())
    lines = {
        "data": f"{dataset}, {scores['split']}, {scores['source_lang']}-{scores['target_lang']}, "
        f"{scores['sentences']:,} sentences",
        "BLEU": f"{scores['bleu']:.2f}   {scores['bleu_signature']}",
        "chrF": f"{scores['chrf']:.2f}   {scores['chrf_signature']}",
    }
    if "compound_bleu" in scores:
        lines["as in paper"] = (
            f"{scores['compound_bleu']:.2f}   {COMPOUND_BLEU}, {scores['compound_bleu_signature']}"
        )
    if "comet" in scores:
        lines["COMET"] = f"{scores['comet']:.4f}   {scores['comet_signature']}"
    lines["exact match"] = f"{scores['exact_match']:.1%}"
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


def _kept_files(folder: Path, key: str) -> list[Path]:
    """Where sources, references and translations of a split are kept, in this order."""
    sides = ("source", "reference", "translation")
    return [folder / "hypotheses" / f"{key}.{side}.txt" for side in sides]


def _refuse_unwritable(state: PartialState, folder: Path, key: str):
    """Find out before a long translation, not after, that nothing could be left there."""
    read_scores(folder)
    try:
        if state.is_main_process:
            # a training that has the folder keeps it for long
            with hold_run(folder, SECONDS_TO_WAIT):
                pass
        (folder / "hypotheses").mkdir(parents=True, exist_ok=True)
        # it says whether the system takes such a name
        _kept_files(folder, key)[0].stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ValueError(
            f"output_dir must be a folder that results can be written to, got {folder}: {error}"
        ) from error


def run(argv: list[str], prog: str = "vanilla_transformer.train.evaluate") -> str | None:
    """Evaluate as a command line says.

    Args:
        argv: The arguments.
        prog: Name of the command, for its help.

    Returns:
        The table of scores; nothing where this is not the main process.

    Raises:
        ValueError: If model, dataset, split, COMET or the other run's translations cannot be had.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Translate a split and score it: BLEU, chrF, and BLEU as the paper counted it.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, model folder or Hub name")
    parser.add_argument("--split", help="of the dataset; test if not given")
    parser.add_argument("--dataset", help="another dataset than the run's own")
    parser.add_argument("--name", help="the dataset's configuration")
    parser.add_argument("--revision", help="commit, branch or tag of a dataset on the Hub")
    parser.add_argument("--source_lang", help="language to translate from")
    parser.add_argument("--target_lang", help="language to translate into")
    parser.add_argument(
        "--bleu_tokenizer", help="tokenizer of sacreBLEU (that of the run, or of the language)"
    )
    parser.add_argument(
        "--comet", metavar="MODEL", nargs="?", const=COMET_MODEL, help="and COMET (%(const)s)"
    )
    parser.add_argument("--against", metavar="RUN", help="compare with another run's translations")
    parser.add_argument("--output_dir", help="for hypotheses and scores; RUN if not given")
    add_search(parser)
    add_trust_flag(parser)
    if not _processes().is_main_process:
        logging.getLogger("vanilla_transformer").setLevel(logging.ERROR)
        datasets.disable_progress_bars()
    scores = evaluate(**vars(parser.parse_args(argv)))
    leave_processes()
    return None if scores is None else score_table(scores)


def main(argv: list[str] | None = None) -> int:
    """Evaluate, and turn what goes wrong into one sentence.

    Args:
        argv: The arguments; the process's own if not given.

    Returns:
        0 if all went well, 1 if it was refused.
    """

    def print_table(argv: list[str]):
        table = run(argv)
        if table is not None:
            sys.stdout.write(table + "\n")

    return run_command(print_table, argv)


if __name__ == "__main__":
    sys.exit(main())
