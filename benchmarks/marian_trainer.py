"""Train transformers' Marian with `Seq2SeqTrainer` on the corpus of one of our runs.

Batches are those of the library's translation example: a fixed number of sentences, random or of
similar length, padded to the longest. Corpus, vocabulary, model size, number of updates, learning
rate of each step and label smoothing are those of our run; the number of target tokens per step is
about the same. The last checkpoint and the average of the last checkpoints are scored as in our
run.

    python -m vanilla_transformer.benchmarks.marian_trainer RUN --output_dir OUT
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    DataCollatorForSeq2Seq,
    MarianMTModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from .. import VanillaTransformerConfig
from ..console import run_command
from ..train.averaging import average_weights
from ..train.config import PRECISIONS, TrainConfig
from ..train.data.corpus import texts_of
from ..train.data.pairs import drop_untrainable, encode_pairs, pair_lengths
from ..train.data.prepare import load_main_corpus
from ..train.run_folder.environment import write_environment
from ..train.run_folder.files import read_recipe
from ..train.schedule import learning_rate_of, make_scheduler
from ..train.scoring import score_translations
from ..train.vocabulary import load_tokenizer
from .peers import marian_config


class _ScheduledTrainer(Seq2SeqTrainer):
    """Trainer of the library with a given learning rate for each step."""

    def __init__(self, schedule: Callable[[int], float], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._schedule = schedule

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LambdaLR:
        self.lr_scheduler = make_scheduler(optimizer or self.optimizer, self._schedule)
        return self.lr_scheduler


def train_marian(
    recipe: TrainConfig,
    model: MarianMTModel,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: Path,
    sampling: str = "random",
) -> float:
    """Train Marian, or resume from the last checkpoint.

    Args:
        recipe: Settings of our run.
        model: Marian model.
        tokenizer: Tokenizer of our run.
        output_dir: Folder for the trainer's checkpoints.
        sampling: Value of the library's `train_sampling_strategy`.

    Returns:
        Training time of this call, in seconds, without earlier calls.
    """
    languages = (recipe.source_lang, recipe.target_lang)
    training_pairs = encode_pairs(load_main_corpus(recipe)["train"], "train", tokenizer, *languages)
    training_pairs = drop_untrainable(training_pairs, recipe.max_length)
    target_tokens = pair_lengths(training_pairs)[1].mean()
    training_arguments = Seq2SeqTrainingArguments(
        output_dir=str(output_dir),
        max_steps=recipe.max_steps,
        train_sampling_strategy=sampling,
        per_device_train_batch_size=round(recipe.tokens_per_step / target_tokens),
        # a factor on the schedule
        learning_rate=1.0,
        adam_beta1=recipe.adam_beta1,
        adam_beta2=recipe.adam_beta2,
        adam_epsilon=recipe.adam_epsilon,
        max_grad_norm=recipe.max_grad_norm or 0.0,
        label_smoothing_factor=recipe.label_smoothing,
        save_steps=recipe.save_every_steps,
        save_total_limit=recipe.num_averaged_checkpoints,
        logging_steps=recipe.log_every_steps,
        seed=recipe.seed,
        bf16=recipe.precision == "bf16",
        fp16=recipe.precision == "fp16",
        # the library allows bf16 on a CPU only with `use_cpu`
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
    )
    trainer = _ScheduledTrainer(
        schedule=learning_rate_of(recipe, model.config.d_model),
        model=model,
        args=training_arguments,
        train_dataset=training_pairs.select_columns(["input_ids", "labels"]),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    started = time.monotonic()
    last_checkpoint = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
    trainer.train(resume_from_checkpoint=last_checkpoint)
    (output_dir / "log_history.json").write_text(json.dumps(trainer.state.log_history, indent=1))
    return time.monotonic() - started


@torch.no_grad()
def translate(
    model: MarianMTModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    batch_size: int = 64,
    **search: Any,
) -> list[str]:
    """Translate with the library's search, in batches that keep the order of the sentences.

    Args:
        model: Marian model.
        tokenizer: Tokenizer of our run.
        sources: Sentences.
        batch_size: Number of sentences in a batch.
        search: Settings of `generate` that differ from the library's defaults.

    Returns:
        Translations, in the order of the sentences.
    """
    model.eval()
    translations = []
    for start in range(0, len(sources), batch_size):
        batch = tokenizer(sources[start : start + batch_size], padding=True, return_tensors="pt")
        ids = model.generate(
            input_ids=batch["input_ids"].to(model.device),
            attention_mask=batch["attention_mask"].to(model.device),
            **{"max_new_tokens": batch["input_ids"].shape[1] + 50, "max_length": None, **search},
        )
        translations += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return translations


def main(argv: list[str] | None = None) -> int:
    """Train Marian, and score its translations.

    Args:
        argv: Command-line arguments; those of the process if not given.

    Returns:
        Exit status 0.

    Raises:
        ValueError: If `--max_steps` is below 1 or above the run's, or a split does not exist.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run folder of this package")
    parser.add_argument("--output_dir", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--max_steps",
        type=int,
        help="number of updates (default: that of the run); a cooldown keeps its share of them",
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="precision of training (default: that of the run)"
    )
    parser.add_argument(
        "--group_by_length",
        action="store_true",
        help="batches of sentences of similar length, with the library's option of this name",
    )
    parser.add_argument(
        "--splits", default="validation,test", help="splits to score (default: %(default)s)"
    )
    flags = parser.parse_args(argv)
    recipe = read_recipe(flags.run)
    if flags.max_steps is not None:
        if not 1 <= flags.max_steps <= recipe.max_steps:
            raise ValueError(
                f"max_steps must be from 1 to the run's {recipe.max_steps}, got {flags.max_steps}."
            )
        cooldown_steps = round(recipe.cooldown_steps * flags.max_steps / recipe.max_steps)
        recipe = dataclasses.replace(
            recipe, max_steps=flags.max_steps, cooldown_steps=cooldown_steps
        )
    recipe.precision = flags.precision or recipe.precision
    corpus = load_main_corpus(recipe)
    splits = flags.splits.split(",")
    for split in splits:
        if split not in corpus:
            raise ValueError(f"splits must be some of {', '.join(corpus)}, got {split!r}.")
    tokenizer = load_tokenizer(str(flags.run / "tokenizer"))
    set_seed(recipe.seed)
    our_config = VanillaTransformerConfig.from_pretrained(flags.run)
    model = MarianMTModel(marian_config(our_config))
    output_dir = flags.output_dir
    sampling = "group_by_length" if flags.group_by_length else "random"
    training_seconds = train_marian(recipe, model, tokenizer, output_dir / "checkpoints", sampling)

    languages = (recipe.source_lang, recipe.target_lang)
    checkpoints = sorted(
        (output_dir / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name[11:])
    )
    scores = {"parameters": model.num_parameters(), "seconds_of_last_start": training_seconds}
    for name, scored_checkpoints in (("last", checkpoints[-1:]), ("averaged", checkpoints)):
        # a checkpoint has tied weights only once and no position tables, so names may be missing
        _, unexpected = model.load_state_dict(average_weights(scored_checkpoints), strict=False)
        assert not unexpected
        model.tie_weights()
        for split in splits:
            split_rows = corpus[split].with_format("arrow")[:]
            sources, references = texts_of(split_rows, languages, split)
            translations = translate(model, tokenizer, sources, num_beams=recipe.num_beams)
            key = f"{split}-{name}"
            scores[key] = score_translations(translations, references, recipe.bleu_tokenizer)
            translation_lines = "".join(line + "\n" for line in translations)
            (output_dir / f"{key}.translation.txt").write_text(translation_lines, encoding="utf-8")
            print(key, f"{scores[key]['bleu']:.2f}", scores[key]["bleu_signature"])
    (output_dir / "scores.json").write_text(json.dumps(scores, indent=1), encoding="utf-8")
    write_environment(output_dir, {"processes": 1})
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
