"""From the settings of a run to the pairs it trains on. Section 5.1."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from ..config import TrainConfig
from .batches import Collator, TrainingSteps, shares_of
from .corpus import dataset_commit, load_translations, other_validation, text_hash, texts_of
from .pairs import (
    NO_TEXT,
    Pairs,
    Spelling,
    counts_of,
    encode_pairs,
    judge,
    prepare_pairs,
    refuse_useless,
    say_counts,
)
from .streaming import Stream, StreamedSteps

logger = logging.getLogger(__name__)

# of a stream, to learn a vocabulary from: as many sentences as `learn_vocabulary` keeps
VOCABULARY_PAIRS = 1_000_000


@dataclass
class Texts:
    """The text of a run.

    Args:
        train: What to train on, corpus after corpus.
        names: What the corpora are called.
        weights: Their shares; None where all pairs come once an epoch.
        validation: The split to watch the loss on, if there is one.
        commits: Where on the Hub each corpus was, if it was there.
        languages: Source and target.
    """

    train: list[datasets.Dataset] | list[datasets.IterableDataset]
    names: list[str]
    weights: list[float] | None
    validation: datasets.Dataset | None
    commits: list[str | None]
    languages: tuple[str, str]

    @cached_property
    def hashes(self) -> list[str]:
        """SHA-256 of each corpus to train on; none of a stream can be known."""
        return [text_hash(rows, self.languages, "train") for rows in self.train]


@dataclass
class Data:
    """What a run trains on.

    Args:
        texts: The text it is made of.
        tokenizer: What it is made with.
        pairs: To train on, corpus after corpus; None where they are streamed.
        sizes: How many pairs each corpus has.
        validation: Pairs to watch the loss on.
        facts: What to note of it all.
    """

    texts: Texts
    tokenizer: PreTrainedTokenizerBase
    pairs: Pairs | None
    sizes: list[int]
    validation: Pairs | None
    facts: dict[str, str]


def load_main_corpus(config: TrainConfig) -> dict[str, datasets.Dataset]:
    """Load the corpus that a run is validated and evaluated with.

    Args:
        config: Settings of the run.

    Returns:
        Its splits.

    Raises:
        ValueError: If it cannot be loaded.
    """
    return _load(
        {"dataset": config.dataset, "name": config.name, "revision": config.revision}, config
    )


def _load(corpus: dict[str, Any], config: TrainConfig) -> dict[str, datasets.Dataset]:
    return load_translations(
        corpus["dataset"],
        corpus["name"],
        config.source_lang,
        config.target_lang,
        corpus["revision"],
        config.streaming,
    )


def load_texts(config: TrainConfig) -> Texts:
    """Load the corpora of a run.

    Args:
        config: Its settings.

    Returns:
        The splits to train on, and the main corpus's to validate with.

    Raises:
        ValueError: If a corpus cannot be loaded, or has no split to train on.
    """
    main = {"dataset": config.dataset, "name": config.name, "revision": config.revision}
    corpora = [main | {"weight": config.weight}, *config.mix]
    texts = Texts([], [], None, None, [], (config.source_lang, config.target_lang))
    for corpus in corpora:
        place = [corpus[name] for name in ("dataset", "name", "revision")]
        splits = _load(corpus, config)
        if "train" not in splits:
            raise ValueError(
                f"dataset {place[0]!r} must have a split 'train', got {', '.join(splits)}."
            )
        texts.train.append(splits["train"])
        texts.names.append(" ".join(filter(None, place)))
        texts.commits.append(dataset_commit(*place, config.source_lang, config.target_lang))
        if corpus is corpora[0]:
            texts.validation = splits.get("validation")
    if config.weight is not None:
        texts.weights = [corpus["weight"] for corpus in corpora]
    return texts


def vocabulary_texts(texts: Texts, languages: Sequence[str], seed: int) -> Iterator[str]:
    """The sentences to learn a vocabulary from: each corpus has its share of them.

    Args:
        texts: Of the run; of streams the first `VOCABULARY_PAIRS`.
        languages: Source and target.
        seed: Of the run; says what comes first in a stream.

    Yields:
        Sentences of both languages; those of pairs with a wrong encoding are left out.

    Raises:
        ValueError: If there are none.
    """
    is_read = False
    for text in _readable_texts(texts, languages, seed):
        is_read = is_read or bool(text)
        yield text
    if not is_read:
        raise ValueError(
            f"{', '.join(texts.names)} must have a pair with text in UTF-8 on both sides, to learn "
            "a vocabulary from, got none."
        )


def _readable_texts(texts: Texts, languages: Sequence[str], seed: int) -> Iterator[str]:
    if isinstance(texts.train[0], datasets.IterableDataset):
        weights = texts.weights or [1.0]
        for number, (rows, weight) in enumerate(zip(texts.train, weights, strict=True)):
            stream = Stream(rows, seed, number)
            # all of a small corpus is enough
            for table in iter(stream.tables().__next__, None):
                first = stream.place["pairs"] - len(table)
                if first >= VOCABULARY_PAIRS * weight / sum(weights):
                    break
                sides = texts_of(table, languages, "train", first + 1, repair=True)
                for pair in zip(*sides, strict=True):
                    if not any(NO_TEXT.search(text) for text in pair):
                        yield from pair
        return
    sizes = [len(rows) for rows in texts.train]
    for rows, size, share in zip(texts.train, sizes, shares_of(sizes, texts.weights), strict=True):
        line = 0
        for table in rows.with_format("arrow").iter(batch_size=1000):
            sides = texts_of(table, languages, "train", line + 1, repair=True)
            for pair in zip(*sides, strict=True):
                # spread evenly over the corpus, again and again if its share is larger
                repeats = (line + 1) * share // size - line * share // size
                line += 1
                if not any(NO_TEXT.search(text) for text in pair):
                    yield from itertools.chain(*itertools.repeat(pair, repeats))


def prepare_data(config: TrainConfig, texts: Texts, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Tokenize and clean the text of a run, and say what was left out.

    Args:
        config: Settings of the run.
        texts: From `load_texts`.
        tokenizer: Of the run.

    Returns:
        The pairs to train on, and those to validate with.

    Raises:
        ValueError: If nothing is left of a corpus, or it was read with a wrong encoding.
    """
    languages = (config.source_lang, config.target_lang)
    commits = ", ".join(commit or "none" for commit in texts.commits)
    validation, validation_sha256 = None, "none"
    if texts.validation is not None:
        validation_sha256 = text_hash(texts.validation, languages, "validation")
        rows = encode_pairs(
            texts.validation, "validation", tokenizer, *languages, validation_sha256
        )
        validation = Pairs(rows, judge(rows, config.max_length))
        counts = counts_of(validation.judged[2])
        refuse_useless(counts, "validation")
        logger.info("validation pairs: %s", say_counts(counts))
    else:
        logger.warning(
            "%s has no split 'validation': the loss on text that is not trained on is not known.%s",
            texts.names[0],
            other_validation(config.dataset),
        )
    shared = {"validation_sha256": validation_sha256, "dataset_commit": commits}
    if config.streaming:
        facts = {**shared, "cleaning": "as it is read, in metrics.jsonl"}
        return Data(texts, tokenizer, None, [], validation, facts)
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
    pairs = prepare_pairs(parts, **_rules(config), spelled=spelled)
    said = []
    ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    for name, (first, last) in zip(texts.names, ends, strict=True):
        counts = counts_of(pairs.judged[2, first:last])
        said.append(f"{name}: {say_counts(counts)}")
        logger.info("training pairs of %s", said[-1])
        refuse_useless(counts, name)
    facts = {"text_sha256": ", ".join(texts.hashes), **shared, "cleaning": "; ".join(said)}
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
) -> TrainingSteps | StreamedSteps:
    """Plan what a process sees at each step.

    Args:
        config: Settings of the run.
        data: From `prepare_data`.
        collator: Makes a micro-batch.
        num_processes: How many there are.
        process_index: Which of them this is.
        position: Of the last step, where a stream is gone on with.

    Returns:
        The steps.

    Raises:
        ValueError: If the pairs cannot be trained on, or a stream is not what it was.
    """
    shared = {
        "collator": collator,
        "tokens_per_step": config.tokens_per_step,
        "length_groups_per_step": config.length_groups_per_step,
        "tokens_per_micro_batch": config.tokens_per_micro_batch,
        "block_pairs": config.block_pairs,
        "seed": config.seed,
        "num_processes": num_processes,
        "process_index": process_index,
        "weights": data.texts.weights,
    }
    if data.pairs is not None:
        spellings = {"num_spellings": len(_spellings(config)) or 1}
        return TrainingSteps(data.pairs, sizes=data.sizes, **spellings, **shared)
    return StreamedSteps(
        data.texts.train,
        tokenizer=data.tokenizer,
        languages=(config.source_lang, config.target_lang),
        rules=_rules(config),
        position=position,
        **shared,
    )
