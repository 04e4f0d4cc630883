"""Fine-tune any checkpoint of this package with the library's own `Seq2SeqTrainer`.

A worked example, to be used as it is or copied: every flag of `Seq2SeqTrainingArguments` holds, on
one process or on many.

    accelerate launch -m vanilla_transformer.train.fine_tune RUN --dataset ... --output_dir ...
"""

import contextlib
import copy
import logging
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from huggingface_hub import EvalResult, ModelCardData
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)
from transformers.integrations import get_available_reporting_integrations

from ..atomic_files import held
from ..console import run_command
from ..generation_vanilla_transformer import set_paper_search
from ..hub import load_run, push_to_hub
from ..pipeline_vanilla_transformer import max_source_tokens
from .config import bleu_tokenizer_of
from .data.batches import IGNORED
from .data.corpus import is_on_hub, load_translations
from .data.pairs import drop_untrainable, encode_pairs, lengths
from .devices.distribution import (
    is_launched_on_cpu,
    leave_processes,
    main_process_first,
    together,
)
from .run_folder.checkpoint import refuse_not_finite
from .scoring import score_translations
from .trainer import FusedTrainer

logger = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"
LAST = "last"


@dataclass
class FineTuneArguments:
    """What the library's arguments do not say: which model, and which text."""

    run: str = field(metadata={"help": "run folder, model folder or Hub name to start from"})
    dataset: str = field(
        metadata={"help": "Hub name, local folder or prefix of text files; as in training"}
    )
    source_lang: str = field(metadata={"help": "language to translate from"})
    target_lang: str = field(metadata={"help": "language to translate into"})
    name: str | None = field(default=None, metadata={"help": "configuration of the dataset"})
    max_length: int = field(
        default=256, metadata={"help": "longest sentence to train on, in tokens, either side"}
    )
    lora_rank: int = field(
        default=0,
        metadata={"help": "train low-rank adapters only, of this rank; 0 for all weights"},
    )
    bleu_tokenizer: str | None = field(
        default=None, metadata={"help": "of sacreBLEU; that of the target language if not given"}
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "run the Python code that is saved with the model; read it first"},
    )


class KeepGenerationConfig(TrainerCallback):
    """Undoes what each batch of an evaluation leaves in the model's generation configuration.

    `Seq2SeqTrainer` writes the library's defaults into it. One is a longest output of 20 tokens:
    our search takes that for unset, but whatever else reads the saved file would cut there.

    Args:
        model: The model, as `generate` is called on it.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.generation_config = copy.deepcopy(model.generation_config)

    def on_prediction_step(self, *args, **kwargs):
        """Put the configuration back."""
        self.model.generation_config = copy.deepcopy(self.generation_config)


def compute_metrics(
    evaluated: EvalPrediction,
    tokenizer: PreTrainedTokenizerBase,
    num_sentences: int,
    bleu_tokenizer: str = "13a",
) -> dict[str, Any]:
    """Score the ids that `predict_with_generate` found against those of the references.

    Args:
        evaluated: `predictions` [sentences, T] and `label_ids` [sentences, T'], padded with the
            padding token or -100.
        tokenizer: The model's.
        num_sentences: How many were to be translated.
        bleu_tokenizer: Of sacreBLEU.

    Returns:
        As `score_translations`: BLEU and chrF with their signatures.
    """
    translations, references = (
        # several processes fill the last batch up with the first sentences once more
        tokenizer.batch_decode(
            np.where(ids == IGNORED, tokenizer.pad_token_id, ids)[:num_sentences],
            skip_special_tokens=True,
        )
        for ids in (evaluated.predictions, evaluated.label_ids)
    )
    return score_translations(translations, references, bleu_tokenizer)


def add_adapters(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """Freeze a model, and add low-rank adapters to the queries and values of every attention.

    Args:
        model: The model.
        rank: Of the adapters.

    Returns:
        peft's model around it.

    Raises:
        ValueError: If peft is not installed.
    """
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError as error:
        raise ValueError("lora_rank needs peft, got none: pip install peft.") from error
    config = LoraConfig(
        task_type=TaskType.SEQ_2_SEQ_LM,
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "v_proj"],
    )
    return get_peft_model(model, config)


def load_rows(
    ours: FineTuneArguments, splits: list[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Dataset]:
    """Load text and turn it into token ids.

    Args:
        ours: Says which text.
        splits: The splits to load, "train" among them.
        tokenizer: The model's.

    Returns:
        The rows of each split, without pairs that are too long to train on.

    Raises:
        ValueError: If a split or a language is missing, or nothing is left to train on.
    """
    texts = load_translations(ours.dataset, ours.name, ours.source_lang, ours.target_lang)
    for split in splits:
        if split not in texts:
            raise ValueError(
                f"dataset {ours.dataset!r} must have a split {split!r}, got {', '.join(texts)}."
            )
    rows = {
        split: encode_pairs(texts[split], split, tokenizer, ours.source_lang, ours.target_lang)
        for split in splits
    }
    rows["train"], _ = drop_untrainable(rows["train"], "train", ours.max_length)
    return rows


def fine_tune(ours: FineTuneArguments, args: Seq2SeqTrainingArguments) -> dict[str, Any]:
    """Train a model further, save it, and evaluate and publish it where asked for.

    The result in `output_dir` loads as a model, with weights of the type that they had before. With
    adapters it has them merged into its weights; they alone are in its subfolder `adapter`, for
    peft.

    Args:
        ours: Model and text.
        args: All else.

    Returns:
        The scores of the validation split; none without `do_eval`, `eval_strategy` or
        `predict_with_generate`.

    Raises:
        ValueError: If a setting, the model or the dataset cannot be used.
    """
    together(lambda: check_arguments(ours, args))
    with contextlib.ExitStack() as until_end:
        if args.process_index == 0:
            until_end.enter_context(held(Path(args.output_dir)))
        return _fine_tune(ours, args)


def _fine_tune(ours: FineTuneArguments, args: Seq2SeqTrainingArguments) -> dict[str, Any]:
    # new adapters are random, and made before the trainer sets its seed
    set_seed(args.seed)
    model, tokenizer = together(lambda: _load_model(ours))
    dtype = model.dtype
    if not ours.lora_rank and dtype != torch.float32:
        # a step is smaller than the distance of two numbers in half precision
        model.float()
        logger.info("the weights are trained in float32, and saved in %s", dtype)
    longest = max_source_tokens(model.config)
    # a model saved by other tools may not know how long a translation can get
    if getattr(model.generation_config, "length_penalty_alpha", None) is None:
        set_paper_search(model)
    is_evaluated = args.do_eval or args.predict_with_generate
    # the other processes then find what the first has prepared
    rows = main_process_first(
        lambda: load_rows(ours, ["train", *["validation"] * is_evaluated], tokenizer)
    )
    # to leave a sentence out would be to score another split
    if longest is not None and is_evaluated:
        together(lambda: _refuse_longer(rows["validation"], longest))

    # the library would publish every checkpoint, and without the code that loads it
    is_published, args.push_to_hub = args.push_to_hub, False
    # the first token of a sentence must have the first position
    padding = copy.copy(tokenizer)
    padding.padding_side = "right"
    trainer = FusedTrainer(
        model=add_adapters(model, ours.lora_rank) if ours.lora_rank else model,
        args=args,
        # with label smoothing the trainer hides the labels from the model; a collator that knows
        # the model makes the decoder_input_ids which it then needs
        data_collator=DataCollatorForSeq2Seq(padding, model=model),
        train_dataset=rows["train"],
        eval_dataset=rows.get("validation"),
        processing_class=tokenizer,
        compute_metrics=partial(
            compute_metrics,
            tokenizer=tokenizer,
            num_sentences=len(rows["validation"]),
            bleu_tokenizer=ours.bleu_tokenizer or bleu_tokenizer_of(ours.target_lang),
        )
        if args.predict_with_generate
        else None,
    )
    trainer.add_callback(KeepGenerationConfig(model))
    resumed = args.resume_from_checkpoint
    if resumed == LAST:
        resumed = str(last_checkpoint(Path(args.output_dir)))
    try:
        trainer.train(resume_from_checkpoint=resumed)
    except (SafetensorError, RuntimeError) as error:
        # the writers of safetensors and torch have their own names for a full disk
        if isinstance(error, SafetensorError) or "PytorchStreamWriter" in str(error):
            raise OSError(f"{args.output_dir} cannot be written: {error}") from error
        raise
    parts = {
        name: weight.to_local() if isinstance(weight, DTensor) else weight
        for name, weight in model.named_parameters()
    }
    refuse_not_finite(parts, "the trained weights")
    trainer.save_state()
    if model.dtype != dtype:
        _round_weights(model, dtype)
    trainer.save_model(str(Path(args.output_dir, ADAPTER_FOLDER)) if ours.lora_rank else None)
    if ours.lora_rank:
        # before an evaluation in half precision, which rounds the weights in place
        merged = trainer.model.merge_and_unload()
        if trainer.is_world_process_zero():
            merged.save_pretrained(args.output_dir)
            tokenizer.save_pretrained(args.output_dir)

    elif model.dtype != dtype and trainer.is_world_process_zero():
        saved = type(model).from_pretrained(args.output_dir, dtype=dtype, trust_remote_code=False)
        saved.save_pretrained(args.output_dir)

    scores = trainer.evaluate() if is_evaluated else {}
    if scores:
        trainer.save_metrics("eval", scores)
    if trainer.is_world_process_zero():
        write_card(ours, args, trainer.state.global_step, scores)
        if is_published:
            commit = push_to_hub(
                args.output_dir,
                args.hub_model_id,
                private=args.hub_private_repo,
                token=args.hub_token,
                revision=args.hub_revision,
            )
            logger.info("published: %s", commit.commit_url)
    return scores


@torch.no_grad()
def _round_weights(model: PreTrainedModel, dtype: torch.dtype):
    """Give weights in float32 the values that they are saved with."""
    for weight in model.parameters():
        weight.copy_(weight.to(dtype))


def last_checkpoint(folder: Path) -> Path:
    """The newest checkpoint that is whole: the trainer writes its own state last.

    Args:
        folder: The output folder.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: If there is none.
    """
    whole = [
        path
        for path in folder.glob("checkpoint-*")
        if (path / "trainer_state.json").is_file() and path.name.split("-")[1].isdecimal()
    ]
    if not whole:
        raise ValueError(f"resume_from_checkpoint needs a whole checkpoint in {folder}, got none.")
    return max(whole, key=lambda path: int(path.name.split("-")[1]))


def write_card(
    ours: FineTuneArguments, args: Seq2SeqTrainingArguments, steps: int, scores: dict[str, Any]
):
    """Write the model card: what was trained on what, and how good it is.

    Args:
        ours: Model and text.
        args: All else.
        steps: How many were made.
        scores: From `fine_tune`.
    """
    folder = Path(args.output_dir)
    name = folder.resolve().name
    # a path is a name to nobody else
    is_known = is_on_hub(ours.dataset, ours.source_lang, ours.target_lang)
    dataset = ours.dataset if is_known else Path(ours.dataset).name
    is_here = Path(ours.run).exists()
    source = Path(ours.run).resolve().name if is_here else ours.run
    results = [
        EvalResult(
            task_type="translation",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_config=ours.name,
            dataset_split="validation",
            metric_type=metric,
            metric_name=f"{label} ({scores[f'eval_{metric}_signature']})",
            metric_value=round(scores[f"eval_{metric}"], 2),
        )
        for metric, label in (("bleu", "BLEU"), ("chrf", "chrF"))
        if f"eval_{metric}" in scores
    ]
    data = ModelCardData(
        language=[ours.source_lang, ours.target_lang],
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_transformer", "translation"],
        base_model=None if is_here else ours.run,
        model_name=name if results else None,
        eval_results=results or None,
    )
    card = f"""---
{data.to_yaml()}
---

# {name}: {ours.source_lang} to {ours.target_lang}

`{source}`, fine-tuned for {steps:,} steps on `{dataset}`.

```python
import vanilla_transformer
from transformers import pipeline

translate = pipeline("translation", model="{folder.as_posix()}")
```
"""
    card += "".join(f"\n* {result.metric_name}: {result.metric_value}" for result in results)
    (folder / "README.md").write_text(f"{card.rstrip()}\n", encoding="utf-8")


def _load_model(ours: FineTuneArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_run(ours.run, ours.trust_remote_code)
    longest = max_source_tokens(model.config)
    if longest is not None and ours.max_length > longest:
        raise ValueError(
            f"max_length must be at most {longest}, the number of positions that the model knows, "
            f"got {ours.max_length}."
        )
    return model, tokenizer


def _refuse_longer(rows: Dataset, longest: int):
    found = int(max(map(np.max, lengths(rows))))
    if found > longest:
        raise ValueError(
            f"validation must have at most {longest} tokens a sentence, the number of positions "
            f"that the model knows, got one of {found}."
        )


def check_arguments(ours: FineTuneArguments, args: Seq2SeqTrainingArguments):
    """Refuse, before anything is loaded, what would only fail after the training.

    Args:
        ours: Model and text.
        args: All else.

    Raises:
        ValueError: If a setting cannot be used.
    """
    if ours.lora_rank < 0:
        raise ValueError(f"lora_rank must not be negative, got {ours.lora_rank}.")
    if args.push_to_hub and "/" not in (args.hub_model_id or ""):
        raise ValueError(
            f"hub_model_id must be user/name with push_to_hub, got {args.hub_model_id!r}."
        )
    # refuses a tokenizer that sacreBLEU does not have
    score_translations(["a"], ["a"], ours.bleu_tokenizer)
    for name in args.report_to:
        if name not in get_available_reporting_integrations():
            raise ValueError(f"report_to {name!r} must be installed, got no package of it.")
    folder = Path(args.output_dir)
    if args.resume_from_checkpoint is None and folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"output_dir must be empty, or resume_from_checkpoint be {LAST!r} or one of its "
            f"checkpoints, got {args.output_dir!r}."
        )


def run(argv: list[str]):
    """Fine-tune as a command line says, and print the scores.

    Args:
        argv: The arguments.

    Raises:
        ValueError: If a setting, the model or the dataset cannot be used.
        OSError: If a file cannot be written.
    """
    parser = HfArgumentParser(
        (FineTuneArguments, Seq2SeqTrainingArguments),
        prog="vanilla_transformer.train.fine_tune",
        usage="%(prog)s RUN --dataset DATASET --source_lang EN --target_lang DE --output_dir DIR "
        "[any flag of Seq2SeqTrainingArguments]",
        allow_abbrev=False,
    )
    # the library's parser knows flags only
    if argv and not argv[0].startswith("-"):
        argv = ["--run", *argv]
    if is_launched_on_cpu():
        parser.set_defaults(use_cpu=True)
    ours, args = parser.parse_args_into_dataclasses(argv)
    if args.process_index > 0:
        logging.getLogger("vanilla_transformer").setLevel(logging.WARNING)
    scores = fine_tune(ours, args)
    leave_processes()
    if args.process_index == 0:
        sys.stdout.write("".join(f"{name} = {value}\n" for name, value in scores.items()))


def main(argv: list[str] | None = None) -> int:
    """Fine-tune, and turn what goes wrong into one sentence.

    Args:
        argv: The arguments; the process's own if not given.

    Returns:
        0 if all went well, 1 if not.
    """
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
