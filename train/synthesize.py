"""Corpora of translations: knowledge distillation and back-translation.

`accelerate launch -m vanilla_transformer.train.synthesize distill RUN --output_dir FOLDER` shares
the sentences among several processes.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedModel

from ..atomic_files import atomic_file, locked_folder, make_folder, remove, write_atomically
from ..batches_vanilla_transformer import max_source_tokens
from ..console import (
    Interrupted,
    add_trust_flag,
    parse_flags,
    print_line,
    require_nonempty_path,
    run_command,
)
from ..pipeline_vanilla_transformer import TranslationPipeline
from ..records import TEXT, mapping, read_json, whole_number
from ..tokenization.learning import tokenizer_hash
from .config import TrainConfig, refuse_one_language
from .data.corpus import texts_of
from .data.mojibake import GARBLED
from .data.prepare import explaining_recipe, load_texts
from .data.text_files import NO_SENTENCE, opened, read_sentences, refuse_other_format
from .devices.distribution import (
    in_all_processes,
    join_processes,
    leave_process_group,
    main_process_first,
)
from .ending import noticing_requests
from .recipe import RECIPE_FILE
from .run_folder.files import read_recipe
from .translate import add_search_flags, load_ensemble, one_line, search_lines

logger = logging.getLogger(__name__)

DISTILL, BACK_TRANSLATE = "distill", "back-translate"
# lines that are translated and saved together
BLOCK_LINES = 500
# files of the folder: the pairs, the settings, and until the end a subfolder of translated blocks
PAIRS_FILE, PLAN_FILE, BLOCKS_FOLDER = "train.jsonl", "synthetic.json", "blocks"
# settings that may change before a command is resumed, because hashes of the files are compared
PATH_SETTINGS = ("models", "files")
PLAN_FORMAT = mapping({"command": TEXT, "lines": whole_number(1)})
# decimal places of a score in the corpus: further ones depend on the number of threads
SCORE_DIGITS = 4
# default of `max_length`, in tokens, for a model without a recipe
DEFAULT_MAX_LENGTH = 256
# reasons to drop a pair
TOO_LONG, NO_TEXT = "too long", "without text"
EMPTY_TRANSLATION, LOW_SCORE = "with an empty translation", "with a low score"
WRONG_ENCODING = "with a wrong encoding"


class Task(NamedTuple):
    """Settings of a command that makes a corpus of translations.

    Attributes:
        command: `distill` or `back-translate`.
        models: Run folders, model folders or Hub names. Several models form an ensemble.
        folder: Folder of the corpus.
        source_lang: Language that the models translate from.
        target_lang: Language that the models translate into.
        files: Text files to translate; empty for the training text of the run.
        recipe: Recipe of the first model; None if it is no run.
        search: Settings of the pipeline's call that differ from those of the first model.
        seed: Seed of sampling; None if nothing is sampled.
        max_length: Longest line that is translated, in tokens.
        min_score: Lowest score of a pair; None for any.
        tag: Text before each translation; empty for none.
    """

    command: str
    models: tuple[str, ...]
    folder: Path
    source_lang: str
    target_lang: str
    files: tuple[str, ...]
    recipe: TrainConfig | None
    search: dict[str, Any]
    seed: int | None
    max_length: int
    min_score: float | None
    tag: str


def synthesize(task: Task, trust_remote_code: bool = False) -> dict[str, int] | None:
    """Translate lines and write them as a corpus, or resume an interrupted call.

    Works in one process, or in several processes of `accelerate launch`, which share the lines in
    blocks. Up to rounding, the corpus does not depend on the number of processes.

    Args:
        task: Settings of the command.
        trust_remote_code: Whether to run the Python code that is saved with the model.

    Returns:
        Number of kept pairs, and of dropped ones by reason; None in processes other than the main
        process.

    Raises:
        ValueError: If the model or a file cannot be read, there is no line, or the folder has other
            files or belongs to another command.
        Interrupted: If a signal asks the command to end; complete blocks are kept.
    """
    state = join_processes()
    with contextlib.ExitStack() as until_end:
        until_end.enter_context(noticing_requests(prints_requests=False))

        def lock():
            # two commands in one folder would overwrite each other's files
            if state.is_main_process:
                until_end.enter_context(locked_folder(task.folder))

        in_all_processes(lock)
        # the text is read before the model is loaded, so that a wrong file is reported early
        num_lines, text_sha256 = main_process_first(lambda: _measure_text(task))
        settings = {
            "device": state.device,
            "trust_remote_code": trust_remote_code,
            "int8": bool(task.search.get("int8")),
        }
        pipeline, models = in_all_processes(lambda: load_ensemble(task.models, **settings))
        tokenizer_sha256 = tokenizer_hash(pipeline.tokenizer)
        plan = _make_plan(task, models, tokenizer_sha256, num_lines, text_sha256)
        main_process_first(lambda: _write_or_check_plan(state, task.folder, plan))
        try:
            _translate_blocks(state, task, pipeline, num_lines)
        except Interrupted:
            if state.is_main_process:
                num_done = len(list((task.folder / BLOCKS_FOLDER).glob("*.jsonl")))
                logger.warning(
                    "%d of %d blocks are translated: run the same command again to resume.",
                    num_done,
                    -(-num_lines // BLOCK_LINES),
                )
            raise
        state.wait_for_everyone()
        return _join_blocks(task, num_lines) if state.is_main_process else None


def _measure_text(task: Task) -> tuple[int, str]:
    """Return the number of lines to translate, and their SHA-256."""
    for path in task.files:
        if Path(path).is_fifo():
            raise ValueError(
                f"source must be a file, which a resumed command reads again, got the pipe {path}."
            )
    num_lines, sha256 = 0, hashlib.sha256()
    for line in _lines_to_translate(task):
        num_lines += 1
        sha256.update(f"{line}\n".encode())
    if num_lines == 0:
        names = " and ".join(task.files) or task.models[0]
        raise ValueError(f"{names} must have at least one line, got none.")
    for path in task.files:
        with opened(Path(path)) as file:
            first_line = next(read_sentences(file, Path(path)), "")
        if "\t" in first_line:
            logger.warning(
                "The first line of %s has a tab, but whole lines are translated; `cut -f 1` "
                "takes the first column of a file.",
                path,
            )
        if NO_SENTENCE.match(first_line):
            logger.warning(
                "The first line of %s has JSON or markup, but whole lines are translated.", path
            )
    return num_lines, sha256.hexdigest()


def _training_rows(task: Task) -> list[datasets.Dataset]:
    recipe = task.recipe
    if recipe is None or recipe.streaming:
        actual = "streamed text" if recipe else f"a model without {RECIPE_FILE}"
        raise ValueError(
            f"source must be given, because only the stored training text of a run can be read, "
            f"got {actual}."
        )
    with explaining_recipe(recipe, Path(task.models[0], RECIPE_FILE), "another text with --source"):
        rows: Any = load_texts(recipe).train
    return rows


def _lines_to_translate(task: Task) -> Iterator[str]:
    """Read the lines to translate, in order."""
    for path in task.files:
        refuse_other_format(path)
        with opened(Path(path)) as file:
            yield from read_sentences(file, Path(path))
    if task.files:
        return
    languages = (task.source_lang, task.target_lang)
    for rows in _training_rows(task):
        for table in rows.with_format("arrow").iter(BLOCK_LINES):
            yield from texts_of(table, languages, "train", repair=True)[0]


def _write_or_check_plan(state: PartialState, folder: Path, plan: Mapping[str, Any]):
    """Write the settings of a new folder; refuse a folder with other settings or files."""
    path = folder / PLAN_FILE
    if path.exists():
        old_plan = read_json(path, PLAN_FORMAT)
        differences = [
            f"{name} was {old_plan.get(name)!r}, got {value!r}"
            for name, value in plan.items()
            if name not in PATH_SETTINGS and old_plan.get(name) != value
        ]
        if differences:
            raise ValueError(
                f"output_dir must be new, or be continued with the same settings: "
                f"{'; '.join(differences)}."
            )
        return
    if any(entry for entry in folder.glob("*") if not entry.name.startswith(".")):
        raise ValueError(f"output_dir must be new or empty, got {folder} with other files.")
    if state.is_local_main_process:
        make_folder(folder / BLOCKS_FOLDER)
        write_atomically(path, json.dumps(plan, indent=1, ensure_ascii=False) + "\n")


def _make_plan(
    task: Task,
    models: Iterable[PreTrainedModel],
    tokenizer_sha256: str,
    num_lines: int,
    text_sha256: str,
) -> dict[str, Any]:
    """Return all settings and hashes that determine the pairs, except `min_score`."""
    weights = hashlib.sha256()
    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            weights.update(name.encode())
            weights.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return {
        "command": task.command,
        "models": list(task.models),
        "weights_sha256": weights.hexdigest(),
        "tokenizer_sha256": tokenizer_sha256,
        "source_lang": task.source_lang,
        "target_lang": task.target_lang,
        "files": list(task.files),
        "text_sha256": text_sha256,
        "lines": num_lines,
        "search": task.search,
        "seed": task.seed,
        "max_length": task.max_length,
        "tag": task.tag,
    }


def _translate_blocks(
    state: PartialState, task: Task, pipeline: TranslationPipeline, num_lines: int
):
    """Translate those blocks of this process that are not saved yet."""
    if (task.folder / PAIRS_FILE).exists():
        return
    lines = _lines_to_translate(task)
    with tqdm(
        total=num_lines, desc="translating", unit=" lines", disable=not state.is_main_process
    ) as bar:
        blocks = iter(lambda: list(islice(lines, BLOCK_LINES)), [])
        for number, block in enumerate(blocks):
            path = _block_path(task, number)
            if number % state.num_processes == state.process_index and not path.exists():
                records = _translate_block(task, pipeline, block, number)
                text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
                write_atomically(path, text)
            # the bar counts the blocks of all processes, which translate about equally fast
            bar.update(len(block))


def _block_path(task: Task, number: int) -> Path:
    return task.folder / BLOCKS_FOLDER / f"{number:08}.jsonl"


def _translate_block(
    task: Task, pipeline: TranslationPipeline, block: list[str], number: int
) -> list[dict[str, Any]]:
    """Translate a block; the record of a dropped pair has the reason in place of the texts."""
    lengths = [len(ids) for ids in pipeline.tokenizer(block)["input_ids"]]
    max_tokens = min(task.max_length, max_source_tokens(pipeline.model.config) or task.max_length)
    reasons = [
        TOO_LONG if length > max_tokens else None if line.strip() else NO_TEXT
        for line, length in zip(block, lengths, strict=True)
    ]
    texts = [line for line, reason in zip(block, reasons, strict=True) if reason is None]
    if task.seed is not None:
        # each block has its own seed, so that samples do not depend on the number of processes
        seeds = np.random.SeedSequence([task.seed, number])
        torch.manual_seed(int(seeds.generate_state(1)[0]))
    results = (
        search_lines(pipeline, texts, return_scores=True, **task.search) if texts else iter(())
    )
    records = []
    for line, reason in zip(block, reasons, strict=True):
        if reason is not None:
            records.append({"dropped": reason})
            continue
        best_result = next(results)[0]
        translation = one_line(best_result["translation_text"]).strip()
        if not translation or any(map(GARBLED.search, (line, translation))):
            records.append({"dropped": WRONG_ENCODING if translation else EMPTY_TRANSLATION})
            continue
        records.append(
            {
                task.source_lang: line,
                task.target_lang: f"{task.tag} {translation}" if task.tag else translation,
                "score": round(best_result["score"], SCORE_DIGITS),
            }
        )
    return records


def _join_blocks(task: Task, num_lines: int) -> dict[str, int]:
    """Join the blocks to the corpus, without the pairs below `min_score`; return the counts."""
    path, plan_path = task.folder / PAIRS_FILE, task.folder / PLAN_FILE
    plan = read_json(plan_path, PLAN_FORMAT)
    if path.exists():
        if plan.get("min_score") != task.min_score:
            raise ValueError(
                f"min_score must be {plan.get('min_score')}, as when {path} was written, got "
                f"{task.min_score}."
            )
        remove(task.folder / BLOCKS_FOLDER)
        counts: dict[str, int] = plan["counts"]
        return counts
    block_numbers = range(-(-num_lines // BLOCK_LINES))
    missing_blocks = [number for number in block_numbers if not _block_path(task, number).exists()]
    if missing_blocks:
        raise ValueError(
            f"output_dir must be a folder that all machines share, got {task.folder} without "
            f"{len(missing_blocks):,} of {len(block_numbers):,} blocks."
        )
    reason_counts = Counter({"kept": 0})
    with atomic_file(path) as file:
        for line in chain.from_iterable(
            _read_block(_block_path(task, number)) for number in block_numbers
        ):
            record = json.loads(line)
            reason = record.get("dropped")
            if reason is None and task.min_score is not None and record["score"] < task.min_score:
                reason = LOW_SCORE
            reason_counts[reason or "kept"] += 1
            if reason is None:
                file.write(line)
        counts = dict(sorted(reason_counts.items()))
        if not reason_counts["kept"]:
            raise ValueError(
                "at least one pair must be kept, got only dropped pairs: "
                f"{_describe_dropped(counts)}."
            )
        # the settings are written before the pairs, so that a command that is killed in between can
        # be resumed: it then joins the blocks again
        plan |= {"min_score": task.min_score, "counts": counts}
        write_atomically(plan_path, json.dumps(plan, indent=1, ensure_ascii=False) + "\n")
    remove(task.folder / BLOCKS_FOLDER)
    return counts


def _read_block(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        yield from file


def _make_parser(command: str, prog: str) -> argparse.ArgumentParser:
    is_back_translation = command == BACK_TRANSLATE
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description=(
            "Translate text of the target language back into the source language, and write both "
            "as a corpus to train on (Sennrich et al. 2016)."
            if is_back_translation
            else "Translate the sources of the training text, or other text, and write both as a "
            "corpus to train a smaller model on (Kim and Rush 2016)."
        ),
    )
    model_role = (
        "model that translates from the target to the source language"
        if is_back_translation
        else "teacher model"
    )
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help=f"{model_role}: run folder or Hub name; several models form an ensemble",
    )
    parser.add_argument(
        "--target" if is_back_translation else "--source",
        dest="files",
        metavar="FILE",
        nargs="+",
        required=is_back_translation,
        default=(),
        help="text files to translate, plain or compressed"
        + ("" if is_back_translation else " (default: the training text of the run)"),
    )
    parser.add_argument("--output_dir", required=True, help="folder of the corpus")
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}_lang",
            default=None,
            help=f"{side} language of the first MODEL, if it is not a run folder",
        )
    pair_group = parser.add_argument_group("pairs")
    pair_group.add_argument(
        "--min_score",
        type=float,
        default=None,
        help="drop pairs with a lower log-probability divided by the length penalty",
    )
    pair_group.add_argument(
        "--max_length",
        type=int,
        default=None,
        help=f"drop lines with more tokens (default: that of the run, or {DEFAULT_MAX_LENGTH})",
    )
    pair_group.add_argument(
        "--tag", default="", help="text to put before each translation, such as '<BT>'"
    )
    sampling_group = parser.add_argument_group("sampling, in place of beam search")
    sampling_group.add_argument(
        "--sample",
        action="store_true",
        default=False,
        help="draw translations from the model (Edunov et al. 2018)",
    )
    sampling_group.add_argument("--temperature", type=float, help="temperature of sampling")
    sampling_group.add_argument(
        "--top_k", type=int, help="sample from the TOP_K most probable tokens"
    )
    sampling_group.add_argument(
        "--seed", type=int, default=1, help="seed of sampling (default: %(default)s)"
    )
    add_search_flags(parser)
    add_trust_flag(parser)
    return parser


def _make_task(command: str, flags: dict[str, Any]) -> Task:
    """Check the flags, and fill in languages and `max_length` from the recipe of a run."""
    models, tag, search = flags.pop("models"), flags.pop("tag"), flags
    folder, is_sampled = Path(search.pop("output_dir")), search.pop("sample")
    seed, min_score, max_length, files = (
        search.pop(name) for name in ("seed", "min_score", "max_length", "files")
    )
    languages = {side: search.pop(f"{side}_lang") for side in ("source", "target")}
    recipe = None
    model, *_ = [require_nonempty_path(name, "model") for name in models]
    if (model / RECIPE_FILE).is_file():
        recipe = read_recipe(model)
        for side, flag_value in languages.items():
            languages[side] = getattr(recipe, f"{side}_lang")
            if flag_value not in (None, languages[side]):
                raise ValueError(
                    f"{side}_lang must be {languages[side]}, as in the recipe of {model}, got "
                    f"{flag_value!r}."
                )
    missing_flags = [f"{side}_lang" for side, flag_value in languages.items() if not flag_value]
    if missing_flags:
        reason = f"the folder has no {RECIPE_FILE}" if model.is_dir() else "no such folder"
        raise ValueError(
            f"{' and '.join(missing_flags)} must be given for a model that is not a run folder, "
            f"got {str(model)!r}: {reason}."
        )
    refuse_one_language(languages["source"], languages["target"])
    if tag != one_line(tag).strip():
        raise ValueError(f"tag must be text of one line without spaces around it, got {tag!r}.")
    sampling_flags = [name for name in ("temperature", "top_k") if name in search]
    if sampling_flags and not is_sampled:
        raise ValueError(f"{sampling_flags[0]} must be given with sample.")
    if is_sampled and "num_beams" in search:
        raise ValueError("num_beams must not be given with sample, which has no beams.")
    for name in sampling_flags:
        if not search[name] > 0:
            raise ValueError(f"{name} must be above 0, got {search[name]}.")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}.")
    if is_sampled:
        search |= {"do_sample": True, "num_beams": 1}
    if max_length is None:
        max_length = recipe.max_length if recipe is not None else DEFAULT_MAX_LENGTH
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}.")
    return Task(
        command=command,
        models=tuple(models),
        folder=require_nonempty_path(folder, "output_dir"),
        source_lang=languages["source"],
        target_lang=languages["target"],
        files=tuple(files),
        recipe=recipe,
        search=search,
        seed=seed if is_sampled else None,
        max_length=max_length,
        min_score=min_score,
        tag=tag,
    )


def run(command: str, argv: list[str], prog: str) -> str | None:
    """Run the command line of `distill` or `back-translate`.

    Args:
        command: `distill` or `back-translate`.
        argv: Arguments of the command line.
        prog: Name of the command, for its help.

    Returns:
        Counts of pairs, and flags to train with them; None in processes other than the main one.

    Raises:
        ValueError: As in `synthesize`, or if flags contradict each other.
    """
    flags = vars(parse_flags(_make_parser(command, prog), argv))
    trust = flags.pop("trust_remote_code")
    state = join_processes()
    if not state.is_main_process:
        logging.getLogger("vanilla_transformer").setLevel(logging.ERROR)
        datasets.disable_progress_bars()
    task = in_all_processes(lambda: _make_task(command, flags))
    counts = synthesize(task, trust)
    leave_process_group()
    return None if counts is None else _summarize(task, counts)


def _summarize(task: Task, counts: Mapping[str, int]) -> str:
    pair = (task.source_lang, task.target_lang)
    source, target = reversed(pair) if task.command == BACK_TRANSLATE else pair
    return (
        f"{counts['kept']:,} pairs are in {task.folder}, dropped: "
        f"{_describe_dropped(counts) or 'none'}\n"
        f"train with --source_lang {source} --target_lang {target} "
        f"--mix '[{{dataset: {task.folder}}}]'"
    )


def _describe_dropped(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items() if name != "kept")


def main(argv: list[str] | None = None) -> int:
    """Run a command, and report an error as one sentence on stderr.

    Args:
        argv: `distill` or `back-translate`, and the arguments of this command; by default the
            arguments of the process.

    Returns:
        Exit status: 0, or 1 after an error.
    """

    def print_summary(argv: list[str]):
        commands = (DISTILL, BACK_TRANSLATE)
        if not argv or argv[0] not in commands:
            first_argument = argv[0] if argv else "none"
            raise ValueError(
                f"the first argument must be {' or '.join(commands)}, got {first_argument}."
            )
        summary = run(argv[0], argv[1:], f"vanilla_transformer.train.synthesize {argv[0]}")
        if summary is not None:
            print_line(summary)

    return run_command(print_summary, argv)


if __name__ == "__main__":
    sys.exit(main())
