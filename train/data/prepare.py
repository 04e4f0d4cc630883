"""Load, encode and filter the corpora of a run, and plan its steps. Section 5.1."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from ..config import TrainConfig
from .batches import Collator, TrainingSteps, shares_of
from .corpus import dataset_commit, load_translations, text_hash, texts_of, validation_hint
from .held_out import hold_out, without
from .leaks import PAIR, SENTENCE, LeakFinder, count_leaks, describe_leaks, find_leaks
from .pairs import (
    GARBLED,
    Pairs,
    Spelling,
    counts_of,
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
STREAMED = "the training text is streamed"


@dataclass
class Texts:
    """Corpora of a run, as text.

    Args:
        train: Training split of each corpus.
        names: Name of each corpus.
        weights: Relative share of each corpus; None if an epoch contains every pair once.
        validation: Validation split of the main corpus, if there is one.
        commits: Commit of each corpus on the Hub; None for a local corpus.
        languages: Source and target language.
        left_out: Number of pairs of each corpus that were removed from its training split because
            they are held-out pairs or share a sentence with one; empty without `validation_pairs`.
        test: Test split of the main corpus, if there is one.
    """

    train: list[datasets.Dataset] | list[datasets.IterableDataset]
    names: list[str]
    weights: list[float] | None
    validation: datasets.Dataset | None
    commits: list[str | None]
    languages: tuple[str, str]
    left_out: list[int]
    test: datasets.Dataset | None = None

    @cached_property
    def hashes(self) -> list[str]:
        """SHA-256 of the training split of each corpus; not available for streams."""
        return [text_hash(rows, self.languages, "train") for rows in self.train]

    @cached_property
    def held_out(self) -> dict[str, list[list[str]]]:
        """Sources and targets of the validation and test splits, by split, without absent ones."""
        splits = {"validation": self.validation, "test": self.test}
        return {
            split: texts_of(rows.with_format("arrow")[:], self.languages, split, repair=True)
            for split, rows in splits.items()
            if rows is not None and len(rows)
        }

    @cached_property
    def leaks(self) -> np.ndarray:
        """Hits of `leak_finder` in the training text, [hits, 4]; not available for streams."""
        return find_leaks(self.train, self.hashes, self.leak_finder)

    @property
    def leak_finder(self) -> LeakFinder:
        """Finder of all sentences of `held_out`, which are numbered split after split."""
        sides = [list(itertools.chain(*side)) for side in zip(*self.held_out.values(), strict=True)]
        sources, targets = sides or ([], [])
        return LeakFinder(sources, targets, self.languages)

    def leaks_of(self, split: str) -> np.ndarray:
        """Return the hits for the sentences of one split of `held_out`.

        Args:
            split: Name of the split.

        Returns:
            Rows of `leaks` with a sentence of this split, numbered within the split.
        """
        first = 0
        for name, (sources, _) in self.held_out.items():
            if name == split:
                break
            first += len(sources)
        numbers = self.leaks[:, SENTENCE]
        found = self.leaks[(numbers >= first) & (numbers < first + len(sources))]
        found[:, SENTENCE] -= first
        return found


@dataclass
class Data:
    """Tokenized data of a run.

    Args:
        texts: Text of the run.
        tokenizer: Tokenizer of the run.
        pairs: Training pairs, corpus after corpus; None if the corpora are streamed.
        sizes: Number of pairs of each corpus, dropped pairs included; empty if the corpora are
            streamed.
        validation: Validation pairs, if there are any.
        facts: Facts about the data to write to `environment.txt`, by name.
    """

    texts: Texts
    tokenizer: PreTrainedTokenizerBase
    pairs: Pairs | None
    sizes: list[int]
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
    return with_validation(_load(_corpora(config)[0], config), config)


def with_validation(
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
    held_out = hold_out(
        splits["train"], languages, config.validation_pairs, config.seed, config.dataset
    )
    return {**splits, "validation": held_out}


def _corpora(config: TrainConfig) -> list[dict[str, Any]]:
    names = ("dataset", "name", "revision", "columns", "weight")
    return [{name: getattr(config, name) for name in names}, *config.mix]


def _load(corpus: dict[str, Any], config: TrainConfig) -> dict[str, datasets.Dataset]:
    return load_translations(
        corpus["dataset"],
        corpus["name"],
        config.source_lang,
        config.target_lang,
        corpus["revision"],
        config.streaming,
        corpus["columns"],
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
    corpora = _corpora(config)
    languages = (config.source_lang, config.target_lang)
    texts = Texts([], [], None, None, [], languages, [])
    for corpus in corpora:
        source = corpus["dataset"], corpus["name"], corpus["revision"]
        splits = load_main_corpus(config) if corpus is corpora[0] else _load(corpus, config)
        if "train" not in splits:
            raise ValueError(
                f"dataset {source[0]!r} must have a split 'train', got {', '.join(splits)}."
            )
        if corpus is corpora[0]:
            texts.validation, texts.test = splits.get("validation"), splits.get("test")
        rows = splits["train"]
        if config.validation_pairs is not None:
            rows = without(rows, texts.validation, languages)
            texts.left_out.append(len(splits["train"]) - len(rows))
            if len(rows) == 0:
                raise ValueError(
                    f"validation_pairs must leave pairs of {source[0]} to train on, got "
                    f"{config.validation_pairs:,}, which have a sentence of every pair."
                )
        texts.train.append(rows)
        texts.names.append(" ".join(filter(None, source)))
        texts.commits.append(dataset_commit(*source, *languages))
    if config.weight is not None:
        texts.weights = [corpus["weight"] for corpus in corpora]
    if texts.validation is not None and not config.streaming:
        _refuse_trained_on(texts)
    return texts


def _refuse_trained_on(texts: Texts):
    sha256 = text_hash(texts.validation, texts.languages, "validation")
    if sha256 in texts.hashes:
        raise ValueError(
            "the split 'validation' must have other pairs than the training text, got the pairs of "
            f"{texts.names[texts.hashes.index(sha256)]}. To hold out pairs of a corpus without "
            "this split, set --validation_pairs."
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
    is_read = False
    for text in _readable_texts(texts, languages, seed):
        is_read = is_read or bool(text)
        yield text
    if not is_read:
        raise ValueError(
            f"{', '.join(texts.names)} must have a pair with text in UTF-8 on both sides to learn "
            "a vocabulary from, got none."
        )


def _readable_texts(texts: Texts, languages: Sequence[str], seed: int) -> Iterator[str]:
    if isinstance(texts.train[0], datasets.IterableDataset):
        weights = texts.weights or [1.0]
        for number, (rows, weight) in enumerate(zip(texts.train, weights, strict=True)):
            stream = Stream(rows, seed, number)
            # None ends a pass, so a corpus with fewer pairs than its share is read only once
            for table in iter(stream.tables().__next__, None):
                first = stream.position["pairs"] - len(table)
                if first >= VOCABULARY_PAIRS * weight / sum(weights):
                    break
                sides = texts_of(table, languages, "train", first + 1, repair=True)
                for pair in zip(*sides, strict=True):
                    if not any(GARBLED.search(text) for text in pair):
                        yield from pair
        return
    sizes = [len(rows) for rows in texts.train]
    for rows, size, share in zip(texts.train, sizes, shares_of(sizes, texts.weights), strict=True):
        line = 0
        for table in rows.with_format("arrow").iter(batch_size=1000):
            sides = texts_of(table, languages, "train", line + 1, repair=True)
            for pair in zip(*sides, strict=True):
                # yield `share` pairs, spread evenly over the corpus: a share below the corpus size
                # skips pairs, and a larger share repeats pairs
                repeats = (line + 1) * share // size - line * share // size
                line += 1
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
    languages = (config.source_lang, config.target_lang)
    commits = ", ".join(commit or "none" for commit in texts.commits)
    validation, validation_sha256 = None, "none"
    if texts.validation is not None:
        validation_sha256 = text_hash(texts.validation, languages, "validation")
        rows = encode_pairs(
            texts.validation, "validation", tokenizer, *languages, validation_sha256
        )
        validation = Pairs(rows, filter_pairs(rows, config.max_length))
        counts = counts_of(validation.verdicts)
        refuse_unusable(counts, "validation")
        logger.info("validation pairs: %s", format_counts(counts))
    else:
        hint = validation_hint(config.dataset, config.streaming)
        if config.best_metric or config.validation_sample:
            name = "best_metric" if config.best_metric else "validation_sample"
            raise ValueError(
                f"{name} must be null for {texts.names[0]}, which has no split 'validation'.{hint}"
            )
        logger.warning(
            "%s has no split 'validation': there is no validation loss.%s", texts.names[0], hint
        )
    shared = {"validation_sha256": validation_sha256, "dataset_commit": commits}
    if config.validation_pairs is not None:
        others = texts.left_out[0] - config.validation_pairs, *texts.left_out[1:]
        shared["held_out"] = (
            f"{config.validation_pairs:,} pairs for validation; left out with one of their "
            "sentences: "
            + ", ".join(
                f"{count:,} of {name}" for count, name in zip(others, texts.names, strict=True)
            )
        )
        logger.info("held out: %s", shared["held_out"])
    if config.streaming:
        shared["leaks"] = describe_leaks(STREAMED)
        logger.warning("sentences in the training text: %s", shared["leaks"])
        facts = {**shared, "cleaning": "counted in metrics.jsonl"}
        return Data(texts, tokenizer, None, [], validation, facts)
    found_leaks = {split: count_leaks(texts.leaks_of(split)) for split in texts.held_out}
    leaks = [f"{split}: {describe_leaks(found)}" for split, found in found_leaks.items()]
    for line in leaks:
        logger.info("sentences in the training text, %s", line)
    if not config.drop_leaks and any(found["pairs"] for found in found_leaks.values()):
        logger.warning(
            "The scores of these sentences say less about new text. `--drop_leaks true` leaves the "
            "training pairs out."
        )
    shared["leaks"] = "; ".join(leaks) or "none"
    parts = [
        encode_pairs(rows, "train", tokenizer, *languages, text_sha256)
        for rows, text_sha256 in zip(texts.train, texts.hashes, strict=True)
    ]
    sizes = [len(part) for part in parts]
    spelled = [
        encode_pairs(rows, "train", tokenizer, *languages, text_sha256, spelling)
        for spelling in _spellings(config)
        for rows, text_sha256 in zip(texts.train, texts.hashes, strict=True)
    ]
    leaking = np.unique(texts.leaks[:, PAIR]) if config.drop_leaks else None
    pairs = prepare_pairs(parts, **_rules(config), spelled=spelled, leaks=leaking)
    lines = []
    ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    for name, (first, last) in zip(texts.names, ends, strict=True):
        counts = counts_of(pairs.verdicts[first:last])
        lines.append(f"{name}: {format_counts(counts)}")
        logger.info("training pairs of %s", lines[-1])
        refuse_unusable(counts, name)
    facts = {"text_sha256": ", ".join(texts.hashes), **shared, "cleaning": "; ".join(lines)}
    return Data(texts, tokenizer, pairs, sizes, validation, facts)


def _spellings(config: TrainConfig) -> list[Spelling]:
    source, target = config.bpe_dropout, config.bpe_dropout_target
    dropout = (source, source if target is None else target)
    if not any(dropout):
        return []
    return [Spelling(dropout, config.seed, number) for number in range(config.num_spellings)]


def _rules(config: TrainConfig) -> dict[str, Any]:
    names = ("max_length", "max_length_ratio", "drop_duplicates")
    return {name: getattr(config, name) for name in names}


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
        launch_tokens: Argument of `batches.split_step`.

    Returns:
        Steps of this process.

    Raises:
        ValueError: If the longest sentence has more tokens than `tokens_per_step`, or the streams
            have no usable pair or another text than before the run was interrupted.
    """
    shared: dict[str, Any] = {
        "collator": collator,
        "tokens_per_step": config.tokens_per_step,
        "length_groups_per_step": config.length_groups_per_step,
        "tokens_per_micro_batch": config.tokens_per_micro_batch,
        "block_pairs": config.block_pairs,
        "seed": config.seed,
        "num_processes": num_processes,
        "process_index": process_index,
        "launch_tokens": launch_tokens,
        "weights": data.texts.weights,
    }
    if data.pairs is not None:
        num_spellings = len(_spellings(config)) or 1
        return TrainingSteps(data.pairs, sizes=data.sizes, num_spellings=num_spellings, **shared)
    return StreamedSteps(
        data.texts.train,
        tokenizer=data.tokenizer,
        languages=(config.source_lang, config.target_lang),
        rules=_rules(config),
        position=position,
        leak_finder=data.texts.leak_finder if config.drop_leaks else None,
        **shared,
    )
