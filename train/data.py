"""From the settings of a run to the pairs it trains on. Section 5.1."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.train.batches import Collator, TrainingSteps, shares_of
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.corpus import (
    dataset_commit,
    load_translations,
    text_hash,
    texts_of,
)
from vanilla_transformer.train.pairs import (
    NO_TEXT,
    Pairs,
    counts_of,
    encode_pairs,
    judge,
    prepare_pairs,
    refuse_useless,
    say_counts,
)

logger = logging.getLogger(__name__)


@dataclass
class Texts:
    """The text of a run.

    Args:
        train: What to train on, corpus after corpus.
        names: What the corpora are called.
        weights: Their shares; None where all pairs come once an epoch.
        validation: The split to watch the loss on, if there is one.
        commits: Where on the Hub each corpus was, if it was there.
    """

    train: list[datasets.Dataset]
    names: list[str]
    weights: list[float] | None
    validation: datasets.Dataset | None
    commits: list[str | None]


@dataclass
class Data:
    """What a run trains on.

    Args:
        pairs: To train on, corpus after corpus.
        sizes: How many pairs each corpus has.
        weights: As in `Texts`.
        validation: Pairs to watch the loss on.
        facts: What to note of it all.
    """

    pairs: Pairs
    sizes: list[int]
    weights: list[float] | None
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
    texts = Texts([], [], None, None, [])
    for corpus in corpora:
        place = [corpus[name] for name in ("dataset", "name", "revision")]
        splits = _load(corpus, config)
        if "train" not in splits:
            raise ValueError(
                f"dataset {place[0]!r} must have a split 'train', got {', '.join(splits)}."
            )
        texts.train.append(splits["train"])
        texts.names.append(" ".join(filter(None, place)))
        texts.commits.append(dataset_commit(*place))
        if corpus is corpora[0]:
            texts.validation = splits.get("validation")
    if config.weight is not None:
        texts.weights = [corpus["weight"] for corpus in corpora]
    return texts


def vocabulary_texts(texts: Texts, languages: Sequence[str]) -> Iterator[str]:
    """The sentences to learn a vocabulary from: each corpus has its share of them.

    Args:
        texts: Of the run.
        languages: Source and target.

    Yields:
        Sentences of both languages; those of pairs with a wrong encoding are left out.
    """
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
    hashes = [text_hash(rows, languages) for rows in texts.train]
    parts = [
        encode_pairs(rows, "train", tokenizer, *languages, text_sha256)
        for rows, text_sha256 in zip(texts.train, hashes, strict=True)
    ]
    sizes = [len(part) for part in parts]
    rules = (config.max_length, config.max_length_ratio, config.drop_duplicates)
    pairs = prepare_pairs(parts, *rules)
    said = []
    ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    for name, (first, last) in zip(texts.names, ends, strict=True):
        counts = counts_of(pairs.judged[2, first:last])
        said.append(f"{name}: {say_counts(counts)}")
        logger.info("training pairs of %s", said[-1])
        refuse_useless(counts, name)
    facts = {
        "text_sha256": ", ".join(hashes),
        "dataset_commit": ", ".join(commit or "none" for commit in texts.commits),
        "cleaning": "; ".join(said),
    }
    validation = None
    if texts.validation is not None:
        rows = encode_pairs(texts.validation, "validation", tokenizer, *languages)
        validation = Pairs(rows, judge(rows, config.max_length))
        counts = counts_of(validation.judged[2])
        refuse_useless(counts, "validation")
        logger.info("validation pairs: %s", say_counts(counts))
    return Data(pairs, sizes, texts.weights, validation, facts)


def make_steps(
    config: TrainConfig, data: Data, collator: Collator, num_processes: int, process_index: int
) -> TrainingSteps:
    """Plan what a process sees at each step.

    Args:
        config: Settings of the run.
        data: From `prepare_data`.
        collator: Makes a micro-batch.
        num_processes: How many there are.
        process_index: Which of them this is.

    Returns:
        The steps.
    """
    return TrainingSteps(
        data.pairs,
        collator,
        config.tokens_per_step,
        config.length_groups_per_step,
        config.tokens_per_micro_batch,
        config.seed,
        num_processes,
        process_index,
        config.block_pairs,
        data.sizes,
        data.weights,
    )
