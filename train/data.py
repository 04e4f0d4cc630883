"""Parallel text, batches of about equal length, and what each process sees at each step. Sec. 5.1.

The sentences of a step depend on corpus, seed and batch size alone: not on the number of processes,
nor on the memory of each. Random are the order among pairs of about equal length, which groups of
such pairs make a step, and the order of the steps; every pair comes once an epoch.
"""

import gzip
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import datasets
import numpy as np
import torch
from datasets.fingerprint import Hasher
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.configuration_vanilla_transformer import closest_name
from vanilla_transformer.train.run_folder import tokenizer_hash
from vanilla_transformer.train.step import IGNORED

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
# widens the choice of neighbors in the order by length, for a little padding
LENGTH_NOISE = 1.5


def load_translations(
    dataset: str, name: str | None, source_lang: str, target_lang: str
) -> datasets.DatasetDict:
    """Load parallel text in the translation schema: one column, a text for each language.

    Args:
        dataset: "demo", a Hub name, a local folder, or a prefix of text files: `PREFIX.en`,
            or in a folder `train.en`, `validation.en`, `test.en`; plain or .gz.
        name: Configuration of the dataset; text files have none.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        The splits, with the one column "translation".

    Raises:
        ValueError: If it cannot be loaded, or lacks a language or a split to train on.
    """
    text_files = _text_files(dataset, source_lang, target_lang)
    if dataset == "demo":
        from vanilla_transformer.train.demo_corpus import build_demo_corpus

        splits = build_demo_corpus()
    elif text_files:
        splits = datasets.DatasetDict(
            {
                split: _read_text_files(*paths, source_lang, target_lang)
                for split, paths in text_files.items()
            }
        )
    else:
        try:
            splits = datasets.load_dataset(dataset, name)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"dataset {dataset!r} with name {name!r} cannot be loaded: "
                f"{' '.join(str(error.__cause__ or error).split())}"
            ) from error
    for split, rows in splits.items():
        known = _languages(dataset, rows)
        for setting, language in (("source_lang", source_lang), ("target_lang", target_lang)):
            if language not in known:
                raise ValueError(
                    f"{setting} must be one of {', '.join(known)} in split {split} of dataset "
                    f"{dataset!r}, got {language!r}.{closest_name(language, known)}"
                )
    return splits.select_columns("translation")


def _languages(dataset: str, rows: datasets.Dataset) -> list[str]:
    column = rows.features.get("translation")
    if isinstance(column, datasets.Translation):
        return sorted(column.languages)
    if isinstance(column, dict):
        return sorted(column)
    raise ValueError(
        f"dataset {dataset!r} must have a column 'translation', a text for each language, "
        f"got {', '.join(rows.column_names)}."
    )


def _text_files(dataset: str, *languages: str) -> dict[str, list[Path]]:
    found = {}
    for split in SPLITS:
        prefixes = [str(Path(dataset, split))] + [dataset] * (split == "train")
        for prefix in prefixes:
            paths = [
                next(
                    (p for p in (Path(f"{prefix}.{lang}{z}") for z in ("", ".gz")) if p.is_file()),
                    None,
                )
                for lang in languages
            ]
            if all(paths):
                found[split] = paths
            elif any(paths):
                missing = languages[paths.index(None)]
                raise ValueError(
                    f"{prefix}.{missing} must exist beside {next(filter(None, paths))}."
                )
    return found


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def read_lines(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode lines of text. Only a line feed ends one: text may hold Unicode's other separators.

    Args:
        lines: A file opened for bytes, or what gives the same.
        name: Of the file, for an error.

    Yields:
        The lines, without their ends.

    Raises:
        ValueError: If a line is not UTF-8; says which.
    """
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} line {number} must be UTF-8, got {error.reason}.") from error
        yield text.rstrip("\r\n")


def _text_lines(path: Path) -> Iterator[str]:
    try:
        with _open(path) as file:
            yield from read_lines(file, str(path))
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read to its end: {error}") from error


def _text_pairs(
    source: Path, target: Path, source_lang: str, target_lang: str, stamp: str
) -> Iterator[dict]:
    for source_text, target_text in zip(_text_lines(source), _text_lines(target), strict=True):
        yield {"translation": {source_lang: source_text, target_lang: target_text}}


def _read_text_files(
    source: Path, target: Path, source_lang: str, target_lang: str
) -> datasets.Dataset:
    counts = [sum(1 for _ in _text_lines(path)) for path in (source, target)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"{source} and {target} must have as many lines, got {counts[0]} and {counts[1]}."
        )
    if counts[0] == 0:
        raise ValueError(f"{source} must have at least one line, got none.")
    return datasets.Dataset.from_generator(
        _text_pairs,
        features=datasets.Features(
            {"translation": datasets.Translation(languages=[source_lang, target_lang])}
        ),
        gen_kwargs={
            "source": source,
            "target": target,
            "source_lang": source_lang,
            "target_lang": target_lang,
            # a file that changed is read again, not taken from the cache; a list would be taken
            # for the parts of a corpus
            "stamp": str([_stamp(path) for path in (source, target)]),
        },
    )


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def checked_texts(
    pairs: Sequence[dict[str, str]], languages: Sequence[str], split: str, first_line: int = 1
) -> list[list[str]]:
    """Take the texts of some languages out of a column of translations.

    Args:
        pairs: Rows of the column "translation".
        languages: The languages wanted.
        split: Name of the split, for an error.
        first_line: Number of the first row in the split, for an error.

    Returns:
        The texts, a list for each language.

    Raises:
        ValueError: If a side of a row is no text; says which.
    """
    for line, pair in enumerate(pairs, start=first_line):
        for language in languages:
            if not isinstance(pair[language], str):
                raise ValueError(
                    f"{split} line {line} must have text in {language!r}, got {pair[language]!r}."
                )
    return [[pair[language] for pair in pairs] for language in languages]


def encode_pairs(
    rows: datasets.Dataset,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    source_lang: str,
    target_lang: str,
) -> datasets.Dataset:
    """Turn texts into token ids; the result is cached by text, tokenizer and languages.

    Args:
        rows: A split, with the column "translation".
        split: Its name, for an error.
        tokenizer: A fast one, which ends each sentence with its end token.
        source_lang: Language to translate from.
        target_lang: Language to translate into.

    Returns:
        The columns "input_ids", "labels", "source_length" and "target_length".

    Raises:
        ValueError: If a row is no text; says which.
    """
    ids = datasets.List(datasets.Value("int32"))
    length = datasets.Value("int32")
    # the tokenizer itself would not do: one that was learned is another object than the same loaded
    name = [rows._fingerprint, tokenizer_hash(tokenizer), source_lang, target_lang, "encode_pairs"]
    return rows.map(
        _encode,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        features=datasets.Features(
            {"input_ids": ids, "labels": ids, "source_length": length, "target_length": length}
        ),
        fn_kwargs={
            "split": split,
            "tokenizer": tokenizer,
            "languages": [source_lang, target_lang],
        },
        new_fingerprint=Hasher.hash(name),
        desc=f"tokenizing {split}",
    )


def _encode(
    rows: dict[str, list],
    indices: list[int],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    languages: list[str],
) -> dict[str, list]:
    texts = checked_texts(rows["translation"], languages, split, first_line=indices[0] + 1)
    source, target = (tokenizer(side, return_attention_mask=False)["input_ids"] for side in texts)
    return {
        "input_ids": source,
        "labels": target,
        "source_length": [len(ids) for ids in source],
        "target_length": [len(ids) for ids in target],
    }


def lengths(rows: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of all pairs, in tokens.

    Args:
        rows: From `encode_pairs`.

    Returns:
        Of the sources, and of the targets.
    """
    columns = rows.with_format("numpy")
    return columns["source_length"][:], columns["target_length"][:]


def drop_untrainable(
    rows: datasets.Dataset, split: str, max_length: int
) -> tuple[datasets.Dataset, dict[str, int]]:
    """Leave out pairs with an empty or a too long side, and say how many.

    Args:
        rows: From `encode_pairs`.
        split: Its name, for the log.
        max_length: Most tokens of either side, the end token included.

    Returns:
        The pairs to train on, and how many were kept and left out.

    Raises:
        ValueError: If nothing is left.
    """
    source_lengths, target_lengths = lengths(rows)
    # an empty sentence is its end token
    is_empty = np.minimum(source_lengths, target_lengths) <= 1
    is_long = np.maximum(source_lengths, target_lengths) > max_length
    keep = ~(is_empty | is_long)
    counts = {
        "kept": int(keep.sum()),
        "empty": int(is_empty.sum()),
        "too_long": int((is_long & ~is_empty).sum()),
    }
    logger.info(
        "%s: %d pairs kept, %d with an empty side and %d above %d tokens left out",
        split,
        counts["kept"],
        counts["empty"],
        counts["too_long"],
        max_length,
    )
    if counts["kept"] == 0:
        raise ValueError(
            f"{split} must have a pair of at most {max_length} tokens with two sides, got "
            f"{counts['empty']} with an empty and {counts['too_long']} with a too long side."
        )
    if keep.all():
        return rows, counts
    return rows.select(np.flatnonzero(keep)), counts


def plan_steps(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    tokens_per_step: int,
    length_groups_per_step: int,
    seed: int,
    epoch: int,
) -> list[list[np.ndarray]]:
    """Divide an epoch into steps, and each step into groups of about equal length. Section 5.1.

    Args:
        source_lengths: Tokens of each source, [sentences].
        target_lengths: Tokens of each target, [sentences].
        tokens_per_step: About how many source tokens, and how many target tokens, a step has.
        length_groups_per_step: Groups that a step is drawn from.
        seed: Of the run.
        epoch: Counted from 0; as many steps as in any other.

    Returns:
        For each step its groups, each an array of sentence numbers.

    Raises:
        ValueError: If there is no sentence, or one does not fit into a step.
    """
    sentences = len(source_lengths)
    if sentences == 0:
        raise ValueError("an epoch must have at least one sentence, got none.")
    longest = int(max(source_lengths.max(), target_lengths.max()))
    if longest > tokens_per_step:
        raise ValueError(
            f"tokens_per_step must hold the longest sentence, of {longest} tokens, "
            f"got {tokens_per_step}."
        )
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(sentences)
    source = source_lengths[shuffled] + LENGTH_NOISE * random.random(sentences)
    target = target_lengths[shuffled]
    # sources turn back at each target length, so that neighbors are alike on both sides
    order = shuffled[np.lexsort((np.where(target % 2 == 0, source, -source), target))]

    # the larger side bounds both; equal shares leave no small last step
    tokens = np.cumsum(np.maximum(source_lengths, target_lengths)[order])
    num_steps = -(-int(tokens[-1]) // tokens_per_step)
    groups_per_step = min(length_groups_per_step, sentences // num_steps)
    num_groups = num_steps * groups_per_step
    number = np.arange(1, num_groups)
    cuts = np.searchsorted(tokens, tokens[-1] / num_groups * number, side="right")
    # no group without a sentence
    cuts = np.maximum.accumulate(np.maximum(cuts, 1) - number) + number
    cuts = np.minimum(cuts, sentences - num_groups + number)
    groups = np.split(order, cuts)
    drawn = random.permutation(num_groups).reshape(num_steps, groups_per_step)
    return [[groups[index] for index in step] for step in drawn]


def split_step(
    groups: Sequence[np.ndarray],
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    tokens_per_micro_batch: int,
    num_processes: int,
) -> list[list[np.ndarray]]:
    """Cut a step into micro-batches that fit into memory, as many for each process.

    Args:
        groups: The sentences of the step, each group of about equal length.
        source_lengths: Tokens of each source, [sentences].
        target_lengths: Tokens of each target, [sentences].
        tokens_per_micro_batch: Most source or target tokens of a micro-batch, padding included.
        num_processes: Processes that share the step.

    Returns:
        For each process its micro-batches, each an array of sentence numbers.

    Raises:
        ValueError: If a sentence does not fit, or there are fewer sentences than processes.
    """
    longer = np.maximum(source_lengths, target_lengths)

    def padded(part: np.ndarray) -> int:
        return len(part) * int(longer[part].max())

    parts = []
    for group in groups:
        pieces = max(1, -(-padded(group) // tokens_per_micro_batch) - 1)
        while any(padded(part) > tokens_per_micro_batch for part in np.array_split(group, pieces)):
            pieces += 1
            if pieces > len(group):
                raise ValueError(
                    "tokens_per_micro_batch must hold every sentence, "
                    f"got {tokens_per_micro_batch} and one of {longer[group].max()} tokens."
                )
        parts += np.array_split(group, pieces)
    while len(parts) % num_processes:
        largest = max(
            (part for part in parts if len(part) > 1), key=padded, default=np.empty(0, dtype=int)
        )
        if len(largest) == 0:
            raise ValueError(
                "a step must have at least one sentence for each process, "
                f"got {sum(map(len, groups))} for {num_processes}: raise tokens_per_step."
            )
        index = next(index for index, part in enumerate(parts) if part is largest)
        parts[index : index + 1] = np.array_split(largest, 2)
    # what runs at the same time on all processes is about equally large
    parts.sort(key=padded, reverse=True)
    return [parts[process::num_processes] for process in range(num_processes)]


class Collator:
    """Pads sentences to a batch.

    Args:
        pad_token_id: Fills the shorter sources and decoder inputs.
        decoder_start_token_id: What the decoder reads first.
        vocab_size: Every id must be below it.
    """

    def __init__(self, pad_token_id: int, decoder_start_token_id: int, vocab_size: int):
        self.pad_token_id = pad_token_id
        self.decoder_start_token_id = decoder_start_token_id
        self.vocab_size = vocab_size

    def __call__(self, rows: dict[str, Sequence[Sequence[int]]]) -> dict[str, Tensor]:
        """Make the tensors of one micro-batch.

        Args:
            rows: Columns "input_ids" and "labels" of some pairs.

        Returns:
            `input_ids` and `attention_mask`, [B, S]; `labels`, `IGNORED` where padded, and
            `decoder_input_ids`, the labels shifted right, [B, T].

        Raises:
            ValueError: If there is no pair, or an id is not in the vocabulary.
        """
        if len(rows["input_ids"]) == 0:
            raise ValueError("a batch must have at least one sentence, got none.")
        input_ids = _padded(rows["input_ids"], self.pad_token_id)
        labels = _padded(rows["labels"], self.pad_token_id)
        for name, ids in (("input_ids", input_ids), ("labels", labels)):
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise ValueError(f"{name} must be ids below {self.vocab_size}, got {wrong}.")
        attention_mask = _is_token(rows["input_ids"], input_ids)
        start = torch.full_like(labels[:, :1], self.decoder_start_token_id)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask.long(),
            "decoder_input_ids": torch.cat((start, labels[:, :-1]), dim=1),
            "labels": labels.where(_is_token(rows["labels"], labels), IGNORED),
        }


def _padded(sentences: Sequence[Sequence[int]], pad_token_id: int) -> Tensor:
    array = np.full((len(sentences), max(map(len, sentences))), pad_token_id, dtype=np.int64)
    for row, ids in zip(array, sentences, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(array)


def _is_token(sentences: Sequence[Sequence[int]], padded: Tensor) -> Tensor:
    sizes = torch.tensor([len(ids) for ids in sentences])
    return torch.arange(padded.shape[1]) < sizes[:, None]


class TrainingSteps(torch.utils.data.Dataset):
    """What one process sees at each step: a function of the step, so that a run can go on anywhere.

    Args:
        rows: Pairs to train on, from `encode_pairs`.
        collator: Makes a micro-batch.
        tokens_per_step: As in `plan_steps`.
        length_groups_per_step: As in `plan_steps`.
        tokens_per_micro_batch: As in `split_step`.
        seed: As in `plan_steps`.
        num_processes: As in `split_step`.
        process_index: Which of them this is.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        collator: Collator,
        tokens_per_step: int,
        length_groups_per_step: int,
        tokens_per_micro_batch: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
    ):
        self.rows = rows.select_columns(["input_ids", "labels"]).with_format("numpy")
        self.source_lengths, self.target_lengths = lengths(rows)
        self.collator = collator
        self.tokens_per_step = tokens_per_step
        self.length_groups_per_step = length_groups_per_step
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.seed = seed
        self.num_processes = num_processes
        self.process_index = process_index
        self._load_epoch(0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every epoch."""
        return len(self._plan)

    def fingerprint(self) -> dict[str, int]:
        """What must be the same where a run is resumed.

        Returns:
            Numbers of pairs, of tokens and of steps.
        """
        return {
            "pairs": len(self.rows),
            "source_tokens": int(self.source_lengths.sum()),
            "target_tokens": int(self.target_lengths.sum()),
            "steps_per_epoch": self.steps_per_epoch,
        }

    def __getitem__(self, steps_done: int) -> list[dict[str, Tensor]]:
        """The micro-batches of this process for the step after `steps_done` others.

        Args:
            steps_done: Steps before it, over all epochs.

        Returns:
            Micro-batches, from `Collator`.
        """
        epoch, index = divmod(steps_done, self.steps_per_epoch)
        if epoch != self._epoch:
            self._load_epoch(epoch)
        parts = split_step(
            self._plan[index],
            self.source_lengths,
            self.target_lengths,
            self.tokens_per_micro_batch,
            self.num_processes,
        )[self.process_index]
        return [self.collator(self.rows[part]) for part in parts]

    def _load_epoch(self, epoch: int):
        self._epoch = epoch
        self._plan = plan_steps(
            self.source_lengths,
            self.target_lengths,
            self.tokens_per_step,
            self.length_groups_per_step,
            self.seed,
            epoch,
        )


def evaluation_batches(
    rows: datasets.Dataset,
    collator: Collator,
    tokens_per_micro_batch: int,
    num_processes: int = 1,
    process_index: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Go once through a split, each pair on one process.

    Args:
        rows: Pairs, from `encode_pairs`.
        collator: Makes a micro-batch.
        tokens_per_micro_batch: As in `split_step`.
        num_processes: Processes that share the split.
        process_index: Which of them this is.

    Yields:
        Micro-batches of this process.
    """
    sizes = lengths(rows)
    steps = plan_steps(*sizes, tokens_per_micro_batch, length_groups_per_step=1, seed=0, epoch=0)
    parts = [
        part
        for groups in steps
        for part in split_step(groups, *sizes, tokens_per_micro_batch, num_processes=1)[0]
    ]
    columns = rows.select_columns(["input_ids", "labels"]).with_format("numpy")
    for part in parts[process_index::num_processes]:
        yield collator(columns[part])
