"""Load, encode and filter the corpora of a run, and plan its steps. Section 5.1."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from ..config import TrainConfig
from .batches import BatchPlan, Collator, TrainingSteps, compute_shares
from .corpus import (
    dataset_commit,
    describe_pair_files,
    is_available_offline,
    load_translations,
    text_hash,
    texts_of,
)
from .held_out import drop_overlapping_pairs, hold_out
from .leaks import PAIR, SENTENCE, LeakFinder, count_leaks, describe_leaks, find_leaks
from .mojibake import GARBLED
from .pairs import (
    Pairs,
    Segmentation,
    count_verdicts,
    encode_pairs,
    filter_pairs,
    format_counts,
    prepare_pairs,
    refuse_unusable,
)
from .streaming import Stream, StreamedSteps

logger = logging.getLogger(__name__)

# number of pairs of the streams to learn a vocabulary from: their sentences, two for each pair, are
# as many as `learn_vocabulary` keeps by default
VOCABULARY_PAIRS = 1_000_000
# reason why the leaks of a streamed run are not counted
STREAMED_TEXT_REASON = "the training text is streamed"


@dataclass
class Texts:
    """Corpora of a run, as text.

    Args:
        train: Training split of each corpus.
        names: Name of each corpus.
        corpus_weights: Relative share of each corpus; None if an epoch contains every pair once.
        validation: Validation split of the main corpus, if there is one.
        commits: Commit of each corpus on the Hub; None for a local corpus.
        languages: Source and target language.
        left_out_counts: Number of pairs of each corpus that were removed from its training split
            because they are held-out pairs or share a sentence with one; empty without
            `validation_pairs`.
        test: Test split of the main corpus, if there is one.
    """

    train: list[datasets.Dataset] | list[datasets.IterableDataset]
    names: list[str]
    corpus_weights: list[float] | None
    validation: datasets.Dataset | None
    commits: list[str | None]
    languages: tuple[str, str]
    left_out_counts: list[int]
    test: datasets.Dataset | None = None

    @cached_property
    def hashes(self) -> list[str]:
        """SHA-256 of the training split of each corpus; not available for streams."""
        return [text_hash(rows, self.languages, "train") for rows in self.train]

    @cached_property
    def evaluation_texts(self) -> dict[str, list[list[str]]]:
        """Sources and targets of the validation and test splits, by split, without absent ones."""
        splits = {"validation": self.validation, "test": self.test}
        return {
            split: texts_of(rows.with_format("arrow")[:], self.languages, split, repair=True)
            for split, rows in splits.items()
            if rows is not None and len(rows)
        }

    @cached_property
    def leak_hits(self) -> np.ndarray:
        """Hits of `leak_finder` in the training text, [hits, 4]; not available for streams."""
        return find_leaks(self.train, self.hashes, self.leak_finder)

    @property
    def leak_finder(self) -> LeakFinder:
        """Finder of all sentences of `evaluation_texts`, which are numbered split after split."""
        sides = [
            list(itertools.chain(*side))
            for side in zip(*self.evaluation_texts.values(), strict=True)
        ]
        sources, targets = sides or ([], [])
        return LeakFinder(sources, targets, self.languages)

    def leak_hits_of(self, split: str) -> np.ndarray:
        """Return the hits for the sentences of one split of `evaluation_texts`.

        Args:
            split: Name of the split.

        Returns:
            Rows of `leak_hits` with a sentence of this split, numbered within the split.
        """
        first_sentence = 0
        for other_split, (sources, _) in self.evaluation_texts.items():
            if other_split == split:
                break
            first_sentence += len(sources)
        sentence_numbers = self.leak_hits[:, SENTENCE]
        split_hits = self.leak_hits[
            (sentence_numbers >= first_sentence)
            & (sentence_numbers < first_sentence + len(sources))
        ]
        split_hits[:, SENTENCE] -= first_sentence
        return split_hits


@dataclass
class Data:
    """Tokenized data of a run.

    Args:
        texts: Text of the run.
        tokenizer: Tokenizer of the run.
        pairs: Training pairs, corpus after corpus; None if the corpora are streamed.
        corpus_sizes: Number of pairs of each corpus, dropped pairs included; empty if the corpora
            are streamed.
        validation: Validation pairs, if there are any.
        facts: Facts about the data to write to `environment.txt`, by name.
    """

    texts: Texts
    tokenizer: PreTrainedTokenizerBase
    pairs: Pairs | None
    corpus_sizes: list[int]
    validation: Pairs | None
    facts: dict[str, str]


def load_main_corpus(config: TrainConfig) -> dict[str, datasets.Dataset]:
    """Load the corpus that has the validation and test splits of a run.

    Args:
        config: Settings of the run.

    Returns:
        Splits of the corpus by name. With the setting `validation_pairs`, the split "validation"
        contains the held-out pairs.

    Raises:
        ValueError: If the corpus cannot be loaded; or if `validation_pairs` is set, and the corpus
            has a validation split or too few usable pairs.
    """
    return add_validation_split(_load_corpus(_corpus_settings(config)[0], config), config)


def add_validation_split(
    splits: dict[str, datasets.Dataset], config: TrainConfig
) -> dict[str, datasets.Dataset]:
    """Add the pairs that a run holds out as the split "validation".

    Args:
        splits: Splits of the main corpus.
        config: Settings of the run.

    Returns:
        The splits. The split "train" still contains the held-out pairs, which `load_texts` removes.

    Raises:
        ValueError: If the corpus has a validation split, or too few usable pairs.
    """
    if config.validation_pairs is None or "train" not in splits:
        return splits
    if "validation" in splits:
        raise ValueError(
            f"validation_pairs must be null because {config.dataset!r} has a split 'validation', "
            f"got {config.validation_pairs}."
        )
    languages = (config.source_lang, config.target_lang)
    validation_split = hold_out(
        splits["train"], languages, config.validation_pairs, config.seed, config.dataset
    )
    return {**splits, "validation": validation_split}


def _corpus_settings(config: TrainConfig) -> list[dict[str, Any]]:
    setting_names = ("dataset", "name", "revision", "columns", "weight")
    return [{setting: getattr(config, setting) for setting in setting_names}, *config.mix]


def _load_corpus(corpus: dict[str, Any], config: TrainConfig) -> dict[str, datasets.Dataset]:
    return load_translations(
        corpus["dataset"],
        corpus["name"],
        config.source_lang,
        config.target_lang,
        revision=corpus["revision"],
        streaming=config.streaming,
        columns=corpus["columns"],
    )


def load_texts(config: TrainConfig) -> Texts:
    """Load the corpora of a run.

    Args:
        config: Settings of the run.

    Returns:
        Training splits of all corpora, and the validation and test splits of the main corpus.

    Raises:
        ValueError: If a corpus cannot be loaded, has no split "train", keeps no pair besides the
            held-out pairs, or has exactly the pairs of the validation split.
    """
    corpora = _corpus_settings(config)
    languages = (config.source_lang, config.target_lang)
    texts = Texts([], [], None, None, [], languages, [])
    for corpus in corpora:
        location = corpus["dataset"], corpus["name"], corpus["revision"]
        splits = load_main_corpus(config) if corpus is corpora[0] else _load_corpus(corpus, config)
        if "train" not in splits:
            files = describe_pair_files(location[0], *languages)
            raise ValueError(
                f"dataset {location[0]!r} must have a split 'train', got {', '.join(splits)}"
                f"{f' in a folder{files}' if files else '.'}"
            )
        if corpus is corpora[0]:
            texts.validation, texts.test = splits.get("validation"), splits.get("test")
            if texts.validation is not None:
                # refuse a missing text before a vocabulary is learned
                texts_of(texts.validation.with_format("arrow")[:], languages, "validation")
        train_rows = splits["train"]
        if config.validation_pairs is not None:
            train_rows = drop_overlapping_pairs(train_rows, texts.validation, languages)
            texts.left_out_counts.append(len(splits["train"]) - len(train_rows))
            if len(train_rows) == 0:
                raise ValueError(
                    f"validation_pairs must leave pairs of {location[0]} to train on, got "
                    f"{config.validation_pairs:,}: every pair shares a sentence "
                    "with the held-out pairs. Use a smaller number."
                )
        texts.train.append(train_rows)
        texts.names.append(" ".join(filter(None, location)))
        texts.commits.append(dataset_commit(*location, *languages))
    if config.weight is not None:
        texts.corpus_weights = [corpus["weight"] for corpus in corpora]
    if texts.validation is not None and not config.streaming:
        _refuse_validation_in_training(texts)
    return texts


def _refuse_validation_in_training(texts: Texts):
    validation_sha256 = text_hash(texts.validation, texts.languages, "validation")
    if validation_sha256 in texts.hashes:
        raise ValueError(
            "the split 'validation' must have other pairs than the training text, got the pairs of "
            f"{texts.names[texts.hashes.index(validation_sha256)]}. To hold out pairs of a corpus "
            "without this split, set --validation_pairs."
        )


def vocabulary_texts(texts: Texts, languages: Sequence[str], seed: int) -> Iterator[str]:
    """Generate the sentences to learn a vocabulary from, with the weights of the corpora.

    Args:
        texts: Text of the run; of streams only the first `VOCABULARY_PAIRS` pairs are read.
        languages: Languages of the sentences: source, target or both.
        seed: Seed of the run, which determines the order of a stream.

    Yields:
        Sentences in these languages, without pairs that have a wrong encoding.

    Raises:
        ValueError: If no sentence has text.
    """
    has_text = False
    for text in _readable_texts(texts, languages, seed):
        has_text = has_text or bool(text)
        yield text
    if not has_text:
        raise ValueError(
            f"{', '.join(texts.names)} must have a pair with text in UTF-8 on both sides to learn "
            "a vocabulary from, got none."
        )


def _readable_texts(texts: Texts, languages: Sequence[str], seed: int) -> Iterator[str]:
    if isinstance(texts.train[0], datasets.IterableDataset):
        weights = texts.corpus_weights or [1.0]
        for corpus_index, (rows, weight) in enumerate(zip(texts.train, weights, strict=True)):
            stream = Stream(rows, seed, corpus_index)
            # None ends a pass, so a corpus with fewer pairs than its share is read only once
            for table in iter(stream.tables().__next__, None):
                first_pair = stream.position["pairs"] - len(table)
                if first_pair >= VOCABULARY_PAIRS * weight / sum(weights):
                    break
                sides = texts_of(table, languages, "train", first_pair + 1, repair=True)
                for pair in zip(*sides, strict=True):
                    if not any(GARBLED.search(text) for text in pair):
                        yield from pair
        return
    sizes = [len(rows) for rows in texts.train]
    for rows, size, share in zip(
        texts.train, sizes, compute_shares(sizes, texts.corpus_weights), strict=True
    ):
        pair_index = 0
        for table in rows.with_format("arrow").iter(batch_size=1000):
            sides = texts_of(table, languages, "train", pair_index + 1, repair=True)
            for pair in zip(*sides, strict=True):
                # yield `share` pairs, spread evenly over the corpus: a share below the corpus size
                # skips pairs, and a larger share repeats pairs
                repeats = (pair_index + 1) * share // size - pair_index * share // size
                pair_index += 1
                if not any(GARBLED.search(text) for text in pair):
                    yield from itertools.chain(*itertools.repeat(pair, repeats))


def prepare_data(config: TrainConfig, texts: Texts, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Tokenize and filter the text of a run, and log how many pairs were dropped.

    Args:
        config: Settings of the run.
        texts: Text from `load_texts`.
        tokenizer: Tokenizer of the run.

    Returns:
        Tokenized training and validation pairs, with facts about them.

    Raises:
        ValueError: If no pair of a corpus is kept, most pairs of a corpus have a wrong encoding, or
            a setting such as `best_metric` needs a validation split and there is none.
    """
    validation, validation_sha256 = _prepare_validation(config, texts, tokenizer)
    facts = {
        "validation_sha256": validation_sha256,
        "dataset_commit": ", ".join(commit or "none" for commit in texts.commits),
    }
    if config.validation_pairs is not None:
        facts["held_out"] = _describe_held_out(config.validation_pairs, texts)
        logger.info("held out: %s", facts["held_out"])
    facts["leaks"] = _report_leaks(config, texts)
    if config.streaming:
        facts["cleaning"] = "counted in metrics.jsonl"
        return Data(texts, tokenizer, None, [], validation, facts)
    pairs, corpus_sizes = _prepare_training(config, texts, tokenizer)
    facts = {
        "text_sha256": ", ".join(texts.hashes),
        **facts,
        "cleaning": _report_cleaning(texts, pairs, corpus_sizes),
    }
    return Data(texts, tokenizer, pairs, corpus_sizes, validation, facts)


def _prepare_validation(
    config: TrainConfig, texts: Texts, tokenizer: PreTrainedTokenizerBase
) -> tuple[Pairs | None, str]:
    """Return the validation pairs and the hash of their text; None and "none" without a split."""
    if texts.validation is not None:
        validation_sha256 = text_hash(texts.validation, texts.languages, "validation")
        encoded_validation = encode_pairs(
            texts.validation, "validation", tokenizer, *texts.languages, validation_sha256
        )
        validation = Pairs(encoded_validation, filter_pairs(encoded_validation, config.max_length))
        counts = count_verdicts(validation.verdicts)
        refuse_unusable(counts, "validation")
        logger.info("validation pairs: %s", format_counts(counts))
        return validation, validation_sha256
    hint = "" if config.streaming else " To hold out 1,000 pairs, set --validation_pairs 1000."
    if config.best_metric or config.validation_sample:
        setting = "best_metric" if config.best_metric else "validation_sample"
        raise ValueError(
            f"{setting} must be null for {texts.names[0]}, which has no split 'validation'.{hint}"
        )
    logger.warning(
        "%s has no split 'validation': there is no validation loss.%s", texts.names[0], hint
    )
    return None, "none"


@contextmanager
def explaining_recipe(recipe: TrainConfig, path: Path, remedy: str) -> Iterator[None]:
    """Add to an error about a missing corpus which recipe names it, and where relative paths start.

    Args:
        recipe: Settings of a run.
        path: File of the recipe.
        remedy: What to give instead of the path, and with which flags, as the end of a sentence.

    Raises:
        ValueError: The error of the block.
    """
    try:
        yield
    except ValueError as error:
        corpora = [recipe.dataset, *(corpus["dataset"] for corpus in recipe.mix)]
        languages = recipe.source_lang, recipe.target_lang
        if not all(is_available_offline(dataset, *languages) for dataset in corpora):
            error.add_note(
                f"{path} names this dataset; relative paths start from the folder in which the "
                f"training was started: run the command there, or give {remedy}"
            )
        raise


def _describe_held_out(num_pairs: int, texts: Texts) -> str:
    first_count, *other_counts = texts.left_out_counts
    excluded_counts = (first_count - num_pairs, *other_counts)
    exclusions = ", ".join(
        f"{count:,} of {name}" for count, name in zip(excluded_counts, texts.names, strict=True)
    )
    unit, owner = ("pair", "its") if num_pairs == 1 else ("pairs", "their")
    return (
        f"{num_pairs:,} {unit} for validation; left out with one of {owner} sentences: {exclusions}"
    )


def _report_leaks(config: TrainConfig, texts: Texts) -> str:
    """Log and describe the evaluation sentences that the training text contains."""
    if config.streaming:
        leaks = describe_leaks(STREAMED_TEXT_REASON)
        logger.warning("sentences in the training text: %s", leaks)
        return leaks
    leak_counts = {
        split: count_leaks(texts.leak_hits_of(split)) for split in texts.evaluation_texts
    }
    leak_lines = [f"{split}: {describe_leaks(counts)}" for split, counts in leak_counts.items()]
    for line in leak_lines:
        logger.info("sentences in the training text, %s", line)
    if not config.drop_leaks and any(counts["pairs"] for counts in leak_counts.values()):
        logger.warning(
            "These sentences can make the scores too high. Set `--drop_leaks true` to leave the "
            "training pairs that contain them out."
        )
    return "; ".join(leak_lines) or "none"


def _prepare_training(
    config: TrainConfig, texts: Texts, tokenizer: PreTrainedTokenizerBase
) -> tuple[Pairs, list[int]]:
    """Encode and filter the training text; return the pairs, and the size of each corpus."""

    def encode(segmentation: Segmentation | None = None) -> list[datasets.Dataset]:
        return [
            encode_pairs(rows, "train", tokenizer, *texts.languages, text_sha256, segmentation)
            for rows, text_sha256 in zip(texts.train, texts.hashes, strict=True)
        ]

    corpora = encode()
    pairs = prepare_pairs(
        corpora,
        **_filter_settings(config),
        segmented_corpora=list(itertools.chain(*map(encode, _segmentations(config)))),
        leaking_pairs=np.unique(texts.leak_hits[:, PAIR]) if config.drop_leaks else None,
    )
    return pairs, [len(corpus) for corpus in corpora]


def _report_cleaning(texts: Texts, pairs: Pairs, corpus_sizes: list[int]) -> str:
    """Log and describe how many pairs of each corpus are kept; refuse an unusable corpus."""
    cleaning_lines = []
    corpus_bounds = itertools.pairwise(itertools.accumulate(corpus_sizes, initial=0))
    for name, (first, last) in zip(texts.names, corpus_bounds, strict=True):
        counts = count_verdicts(pairs.verdicts[first:last])
        cleaning_lines.append(f"{name}: {format_counts(counts)}")
        logger.info("training pairs of %s", cleaning_lines[-1])
        refuse_unusable(counts, name)
    return "; ".join(cleaning_lines)


def _segmentations(config: TrainConfig) -> list[Segmentation]:
    source_dropout, target_dropout = config.bpe_dropout, config.bpe_dropout_target
    side_dropouts = (source_dropout, source_dropout if target_dropout is None else target_dropout)
    if not any(side_dropouts):
        return []
    return [
        Segmentation(side_dropouts, config.seed, index) for index in range(config.num_spellings)
    ]


def _filter_settings(config: TrainConfig) -> dict[str, Any]:
    setting_names = ("max_length", "max_length_ratio", "drop_duplicates")
    return {setting: getattr(config, setting) for setting in setting_names}


def make_steps(
    config: TrainConfig,
    data: Data,
    collator: Collator,
    num_processes: int,
    process_index: int,
    position: dict[str, Any] | None = None,
    launch_tokens: int = 0,
) -> TrainingSteps | StreamedSteps:
    """Plan the steps of one process.

    Args:
        config: Settings of the run.
        data: Data from `prepare_data`.
        collator: Collator that makes the tensors of a micro-batch.
        num_processes: Number of processes.
        process_index: Index of this process.
        position: Position in the streams from which a streamed run resumes; None for other runs.
        launch_tokens: Launch overhead of a micro-batch on the device, in tokens; with 0, no groups
            share a micro-batch.

    Returns:
        Steps of this process.

    Raises:
        ValueError: If the longest sentence has more tokens than `tokens_per_step`, or the streams
            have no usable pair, or their text has changed since the run was interrupted.
    """
    # not None, because the caller has filled in a size that fits into memory
    tokens_per_micro_batch: Any = config.tokens_per_micro_batch
    plan = BatchPlan(
        collator=collator,
        tokens_per_step=config.tokens_per_step,
        length_groups_per_step=config.length_groups_per_step,
        tokens_per_micro_batch=tokens_per_micro_batch,
        block_pairs=config.block_pairs,
        seed=config.seed,
        num_processes=num_processes,
        process_index=process_index,
        launch_tokens=launch_tokens,
    )
    if data.pairs is not None:
        return TrainingSteps(
            data.pairs,
            plan,
            corpus_sizes=data.corpus_sizes,
            weights=data.texts.corpus_weights,
            num_segmentations=len(_segmentations(config)) or 1,
        )
    return StreamedSteps(
        data.texts.train,
        plan,
        weights=data.texts.corpus_weights,
        tokenizer=data.tokenizer,
        languages=(config.source_lang, config.target_lang),
        filter_settings=_filter_settings(config),
        position=position,
        leak_finder=data.texts.leak_finder if config.drop_leaks else None,
    )
