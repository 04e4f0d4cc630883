"""Measure time and memory from text to batches, and the padding of the batches."""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ..paper.study import Section
from ..train.config import TrainConfig
from ..train.data.batches import BatchPlan, Collator, TrainingSteps, split_step
from ..train.data.corpus import text_hash
from ..train.data.pairs import Pairs, encode_pairs, filter_pairs, prepare_pairs
from ..train.data.prepare import load_texts, make_steps, prepare_data
from ..train.run_folder.run_state import STREAM_POSITIONS
from ..train.vocabulary import prepare_tokenizer
from .timing import memory

MILLION = 1_000_000
# micro-batch size for a recipe that derives this size from the memory of a device
TOKENS_PER_MICRO_BATCH = 4096


@dataclass
class Table:
    """Table of measurements.

    Args:
        lines: Pairs of name and measurement.
        pairs_per_second: Sentence pairs per second in each stage, by the name of the stage.
    """

    lines: list[tuple[str, str]] = field(default_factory=list)
    pairs_per_second: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, text: str):
        """Add a line.

        Args:
            name: Name of the measurement.
            text: Result.
        """
        self.lines.append((name, text))

    @contextmanager
    def time_stage(self, stage: str, num_pairs: int) -> Iterator[None]:
        """Time the block, and add a line with its time scaled to a million pairs.

        Args:
            stage: Name of the stage.
            num_pairs: Number of pairs in the block.

        Yields:
            None.
        """
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        yield
        scale = MILLION / num_pairs
        wall_seconds = (time.perf_counter() - wall_start) * scale
        cpu_seconds = (time.process_time() - cpu_start) * scale
        rate = MILLION / wall_seconds
        self.pairs_per_second[stage] = rate
        self.add(
            stage, f"{wall_seconds:,.2f} s, {cpu_seconds:,.2f} s of CPU time; {rate:,.0f} pairs/s"
        )


def measure_corpus(config: TrainConfig, table: Table, num_steps: int) -> Pairs:
    """Measure each stage of the preparation of a corpus, without a cache.

    Args:
        config: Settings of a run.
        table: Table for the results.
        num_steps: Number of steps to build batches for.

    Returns:
        The tokenized pairs, with the result of the cleaning.
    """
    texts = load_texts(config)
    languages = (config.source_lang, config.target_lang)
    num_pairs = sum(map(len, texts.train))
    table.add("pairs", f"{num_pairs:,}")
    with table.time_stage("vocabulary", num_pairs):
        tokenizer = prepare_tokenizer(config, texts)
    with table.time_stage("hash of the text", num_pairs):
        corpus_hashes = [text_hash(corpus_rows, languages, "train") for corpus_rows in texts.train]
    with table.time_stage("tokens", num_pairs):
        encoded_corpora = [
            encode_pairs(corpus_rows, "train", tokenizer, *languages, corpus_hash)
            for corpus_rows, corpus_hash in zip(texts.train, corpus_hashes, strict=True)
        ]
    length_limits = (config.max_length, config.max_length_ratio)
    with table.time_stage("cleaning", num_pairs):
        prepared_pairs = prepare_pairs(encoded_corpora, *length_limits, config.drop_duplicates)
    with table.time_stage("cleaning with repeats", num_pairs):
        filter_pairs(prepared_pairs.rows, *length_limits, drop_duplicates=True)
    prepared_data = prepare_data(config, texts, tokenizer)
    table.add("counts", prepared_data.facts["cleaning"].rsplit(": ")[-1])
    collator = Collator(tokenizer.pad_token_id, tokenizer.pad_token_id, len(tokenizer))
    steps: Any = make_steps(config, prepared_data, collator, num_processes=1, process_index=0)
    padded_tokens = non_padding_tokens = 0
    target_tokens = []
    for step in range(steps.steps_per_epoch):
        block, index_in_block = steps.find_block(step)
        groups, (source_lengths, target_lengths) = block.steps[index_in_block], block.lengths
        for micro_batch in split_step(
            groups, source_lengths, target_lengths, steps.plan.tokens_per_micro_batch, 1
        )[0]:
            for lengths in (source_lengths, target_lengths):
                padded_tokens += len(micro_batch) * int(lengths[micro_batch].max())
                non_padding_tokens += int(lengths[micro_batch].sum())
        target_tokens.append(sum(int(target_lengths[group].sum()) for group in groups))
    table.add("steps an epoch", f"{len(target_tokens):,}")
    table.add("non-padding tokens", f"{non_padding_tokens / padded_tokens:.2%}")
    table.add(
        "target tokens a step", f"{np.mean(target_tokens):,.0f} +- {np.std(target_tokens):,.0f}"
    )
    num_measured_steps = min(num_steps, len(target_tokens))
    started = time.process_time()
    for step in range(num_measured_steps):
        steps[step]
    table.add(
        "batches", f"{1000 * (time.process_time() - started) / num_measured_steps:.1f} ms a step"
    )
    return prepared_pairs


def measure_plan(config: TrainConfig, pairs: Pairs, millions: float, table: Table):
    """Measure the planning of an epoch for a corpus of any size.

    The sentence lengths of the planned corpus are drawn from a real corpus.

    Args:
        config: Settings of a run.
        pairs: Pairs of the real corpus.
        millions: Size of the planned corpus, in million pairs.
        table: Table for the results.
    """
    num_pairs = int(millions * MILLION)
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "filtered.npy")
        filtered = np.lib.format.open_memmap(path, "w+", np.int32, (3, num_pairs))
        kept_indices = pairs.kept_indices()
        for start in range(0, num_pairs, MILLION):
            num_drawn = min(MILLION, num_pairs - start)
            filtered[:, start : start + num_drawn] = pairs.lengths_and_verdicts[
                :, random.choice(kept_indices, num_drawn)
            ]
        filtered.flush()
        del filtered
        # writing 5 resets the peak memory of the process
        Path("/proc/self/clear_refs").write_text("5")
        memory_before = memory()
        plan = BatchPlan(
            collator=Collator(0, 0, 1),
            tokens_per_step=config.tokens_per_step,
            length_groups_per_step=config.length_groups_per_step,
            tokens_per_micro_batch=config.tokens_per_micro_batch or TOKENS_PER_MICRO_BATCH,
            block_pairs=config.block_pairs,
            seed=config.seed,
        )
        steps = TrainingSteps(Pairs(range(num_pairs), np.load(path, mmap_mode="r")), plan)
        table.add("planned", f"{num_pairs:,} pairs, {steps.steps_per_epoch:,} steps an epoch")
        for name in ("order of an epoch, first block", "a further block"):
            started = time.process_time()
            steps.find_block(0 if name.startswith("order") else steps.steps_per_epoch - 1)
            table.add(name, f"{time.process_time() - started:.2f} s of CPU time")
        memory_after = memory()
        growth = {
            name: (memory_after[name] - memory_before[name]) / millions for name in memory_after
        }
        table.add(
            "memory a million pairs",
            f"{growth['private']:.1f} MB private, {growth['file_backed']:.1f} MB of a shared file; "
            f"peak {growth['peak']:.1f} MB",
        )


def measure_stream(config: TrainConfig, num_blocks: int, table: Table):
    """Measure a streamed corpus: read the corpus block by block, and build all batches.

    Args:
        config: Settings of a run.
        num_blocks: Number of blocks to read.
        table: Table for the results.
    """
    texts = load_texts(config)
    tokenizer = prepare_tokenizer(config, texts)
    prepared_data = prepare_data(config, texts, tokenizer)
    collator = Collator(tokenizer.pad_token_id, tokenizer.pad_token_id, len(tokenizer))
    started = time.process_time()
    steps: Any = make_steps(config, prepared_data, collator, num_processes=1, process_index=0)
    step = 0
    while True:
        position = steps[step].position
        if position["block"] == num_blocks:
            break
        if position["first_step"] == step:
            table.add(
                f"block {position['block']}",
                f"from step {step:,}, in pass {position[STREAM_POSITIONS][0]['pass']}; "
                f"{memory()['private']:,.0f} MB, peak so far {memory()['peak']:,.0f} MB",
            )
        step += 1
    seconds = (time.process_time() - started) / (num_blocks * config.block_pairs / MILLION)
    table.add("reading to batches", f"{seconds:,.2f} s of CPU time for a million pairs")


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Measure the preparation of the corpus of a recipe, without a cache.

    Args:
        flags: Flags of the command line.

    Yields:
        One section.
    """
    config = flags.config
    if config.tokens_per_micro_batch is None:
        tokens = max(TOKENS_PER_MICRO_BATCH, config.max_length)
        config = dataclasses.replace(config, tokens_per_micro_batch=tokens)
    datasets.disable_progress_bars()
    table = Table()
    cache_before = datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory() as cache:
        # cache and run folder are empty, so no prepared data and no learned vocabulary are reused
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        config = dataclasses.replace(config, output_dir=cache)
        try:
            if config.streaming:
                measure_stream(config, flags.blocks, table)
            else:
                pairs = measure_corpus(config, table, flags.steps)
                measure_plan(config, pairs, flags.millions, table)
        finally:
            datasets.config.HF_DATASETS_CACHE = cache_before
    yield Section(
        name="data",
        title="From text to batches",
        finding="Wall time and CPU time are for a million pairs; memory is that of this process.",
        columns=("stage", "result"),
        rows=table.lines,
        numbers={"pairs_per_second": table.pairs_per_second},
    )
