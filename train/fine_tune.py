"""Fine-tune any checkpoint of this package with `Seq2SeqTrainer` of transformers.

Use this example as it is, or copy it. It accepts every flag of `Seq2SeqTrainingArguments`, and runs
in one or several processes.

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
    get_scheduler,
    set_seed,
)
from transformers.integrations import get_available_reporting_integrations
from transformers.utils import CONFIG_NAME

from ..atomic_files import is_disk_full, locked_folder
from ..batches_vanilla_transformer import max_source_tokens
from ..console import run_command, sentence_of
from ..generation_vanilla_transformer import set_paper_search
from ..loading import ADAPTER_FILE, load_run
from ..publishing import push_to_hub
from ..records import mapping, read_json, whole_number
from .config import bleu_tokenizer_of, check_columns
from .data.batches import IGNORED
from .data.corpus import is_hub_name, load_translations
from .data.pairs import drop_untrainable, encode_pairs, pair_lengths
from .data.tables import Columns
from .devices.distribution import (
    disable_cudnn_attention,
    in_all_processes,
    is_launched_on_cpu,
    leave_process_group,
    main_process_first,
)
from .recipe import parse_yaml_value
from .run_folder.checkpoint import refuse_not_finite
from .scoring import score_translations
from .trainer import FusedTrainer

logger = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"
LAST_CHECKPOINT = "last"


@dataclass
class FineTuneArguments:
    """Arguments that `Seq2SeqTrainingArguments` does not have, for the model and the dataset."""

    run: str = field(metadata={"help": "run folder, model folder or Hub name to start from"})
    dataset: str = field(
        metadata={"help": "Hub name, local folder or prefix of text files; as in training"}
    )
    source_lang: str = field(metadata={"help": "language to translate from"})
    target_lang: str = field(metadata={"help": "language to translate into"})
    name: str | None = field(default=None, metadata={"help": "configuration of the dataset"})
    columns: str | None = field(
        default=None,
        metadata={"help": "column of each language, as {en: NAME, de: NAME}; as in training"},
    )
    max_length: int = field(
        default=256, metadata={"help": "maximum number of tokens of a sentence to train on"}
    )
    lora_rank: int = field(
        default=0,
        metadata={"help": "rank of low-rank adapters to train; 0 to train all weights"},
    )
    bleu_tokenizer: str | None = field(
        default=None,
        metadata={"help": "tokenizer of sacreBLEU; that of the target language if not given"},
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "run the Python code that is saved with the model; read it first"},
    )


class KeepGenerationConfig(TrainerCallback):
    """Callback that restores the generation configuration after each batch of an evaluation.

    `Seq2SeqTrainer` writes the library's defaults into this configuration, a maximum length of 20
    tokens among them. The search of this package ignores that default, but other programs that read
    the saved file would truncate translations.

    Args:
        model: The model whose `generate` is called.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.generation_config = copy.deepcopy(model.generation_config)

    def on_prediction_step(self, *args, **kwargs):
        """Restore the generation configuration."""
        self.model.generation_config = copy.deepcopy(self.generation_config)


def compute_metrics(
    prediction: EvalPrediction,
    tokenizer: PreTrainedTokenizerBase,
    num_sentences: int,
    bleu_tokenizer: str = "13a",
) -> dict[str, Any]:
    """Score the token ids from `predict_with_generate` against the ids of the references.

    Args:
        prediction: `predictions` [sentences, T] and `label_ids` [sentences, T'], padded with the
            padding token or -100.
        tokenizer: Tokenizer of the model.
        num_sentences: Number of sentences in the split.
        bleu_tokenizer: Tokenizer of sacreBLEU.

    Returns:
        Scores from `score_translations`: BLEU and chrF with their signatures.
    """
    translations, references = (
        # several processes fill the last batch with the first sentences, which are cut off here
        tokenizer.batch_decode(
            np.where(ids == IGNORED, tokenizer.pad_token_id, ids)[:num_sentences],
            skip_special_tokens=True,
        )
        for ids in (prediction.predictions, prediction.label_ids)
    )
    return score_translations(translations, references, bleu_tokenizer)


def add_adapters(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """Freeze a model, and add low-rank adapters to the query and value projections.

    Args:
        model: The model.
        rank: Rank of the adapters.

    Returns:
        The model, wrapped by peft.

    Raises:
        ValueError: If peft is not installed.
    """
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError as error:
        raise ValueError(
            "lora_rank needs peft, which is not installed: pip install peft."
        ) from error
    config = LoraConfig(
        task_type=TaskType.SEQ_2_SEQ_LM,
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "v_proj"],
    )
    return get_peft_model(model, config)


def load_rows(
    options: FineTuneArguments, splits: list[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Dataset]:
    """Load splits of the dataset, and encode them as token ids.

    Args:
        options: Model and dataset.
        splits: Splits to load, "train" among them.
        tokenizer: Tokenizer of the model.

    Returns:
        Rows of each split; "train" has only pairs that can be trained on.

    Raises:
        ValueError: If a split or a language is missing, or no pair is left to train on.
    """
    texts = load_translations(
        options.dataset,
        options.name,
        options.source_lang,
        options.target_lang,
        columns=_parse_columns(options),
    )
    for split in splits:
        if split not in texts:
            raise ValueError(
                f"dataset {options.dataset!r} must have a split {split!r}, got {', '.join(texts)}."
            )
    rows = {
        split: encode_pairs(
            texts[split], split, tokenizer, options.source_lang, options.target_lang
        )
        for split in splits
    }
    rows["train"] = drop_untrainable(rows["train"], options.max_length)
    return rows


def _parse_columns(options: FineTuneArguments) -> Columns | None:
    columns = None if options.columns is None else parse_yaml_value("columns", options.columns)
    check_columns(columns, options.source_lang, options.target_lang)
    return columns


def fine_tune(options: FineTuneArguments, args: Seq2SeqTrainingArguments) -> dict[str, Any]:
    """Train a model further, save it, and on request evaluate and publish it.

    The weights of the model in `output_dir` have the same dtype as before. Adapters are merged into
    the weights; the subfolder `adapter` contains the adapters alone, for peft.

    Args:
        options: Model and dataset.
        args: Training arguments of the library.

    Returns:
        Scores of the validation split; empty without `do_eval`, `eval_strategy` or
        `predict_with_generate`.

    Raises:
        ValueError: If a setting, the model or the dataset cannot be used.
    """
    in_all_processes(lambda: check_arguments(options, args))
    with contextlib.ExitStack() as until_end:
        if args.process_index == 0:
            until_end.enter_context(locked_folder(Path(args.output_dir)))
        return _fine_tune(options, args)


def _fine_tune(options: FineTuneArguments, args: Seq2SeqTrainingArguments) -> dict[str, Any]:
    # new adapters are random and are created before the trainer sets its seed, so set the seed now
    set_seed(args.seed)
    disable_cudnn_attention()
    model, tokenizer = in_all_processes(lambda: _load_model(options))
    dtype = model.dtype
    if not options.lora_rank and dtype != torch.float32:
        # an update of a weight is smaller than the spacing of numbers in half precision, so that
        # rounding would undo the update
        model.float()
        logger.info("The weights are trained in float32, and saved in %s.", dtype)
    # a model that was saved by another tool may have no maximum length of a translation
    if getattr(model.generation_config, "length_penalty_alpha", None) is None:
        set_paper_search(model)
    is_evaluated = args.do_eval or args.predict_with_generate
    splits = ["train", "validation"] if is_evaluated else ["train"]
    # the main process prepares the data, and the others then find it in the cache
    rows = main_process_first(lambda: load_rows(options, splits, tokenizer))
    max_positions = max_source_tokens(model.config)
    # sentences that are too long for the model are refused, because without them the evaluation
    # would score another split
    if max_positions is not None and is_evaluated:
        in_all_processes(lambda: _refuse_longer(rows["validation"], max_positions))
    # the model is published at the end, because the library would publish every checkpoint, without
    # the code to load it
    publishes, args.push_to_hub = args.push_to_hub, False
    trainer = _make_trainer(options, args, model, tokenizer, rows)
    _train(trainer, args, options.lora_rank)
    _save(options, trainer, model, tokenizer, dtype)
    scores = trainer.evaluate() if is_evaluated else {}
    if scores:
        trainer.save_metrics("eval", scores)
    if trainer.is_world_process_zero():
        write_card(options, args, trainer.state.global_step, scores)
        if publishes:
            commit = push_to_hub(
                args.output_dir,
                args.hub_model_id,
                private=args.hub_private_repo,
                token=args.hub_token,
                revision=args.hub_revision,
            )
            logger.info("published: %s", commit.commit_url)
    return scores


def _make_trainer(
    options: FineTuneArguments,
    args: Seq2SeqTrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: dict[str, Dataset],
) -> FusedTrainer:
    # padding on the right: the first token of a sentence must have the first position
    padding_tokenizer = copy.copy(tokenizer)
    padding_tokenizer.padding_side = "right"
    score_function = None
    if args.predict_with_generate:
        score_function = partial(
            compute_metrics,
            tokenizer=tokenizer,
            num_sentences=len(rows["validation"]),
            bleu_tokenizer=options.bleu_tokenizer or bleu_tokenizer_of(options.target_lang),
        )
    trainer = FusedTrainer(
        model=add_adapters(model, options.lora_rank) if options.lora_rank else model,
        args=args,
        # with label smoothing the trainer removes the labels from the model's inputs, so the model
        # needs decoder_input_ids; a collator with the model creates them
        data_collator=DataCollatorForSeq2Seq(padding_tokenizer, model=model),
        train_dataset=rows["train"],
        eval_dataset=rows.get("validation"),
        processing_class=tokenizer,
        compute_metrics=score_function,
    )
    trainer.add_callback(KeepGenerationConfig(model))
    return trainer


def _train(trainer: FusedTrainer, args: Seq2SeqTrainingArguments, lora_rank: int):
    checkpoint = args.resume_from_checkpoint
    if checkpoint == LAST_CHECKPOINT:
        checkpoint = str(last_checkpoint(Path(args.output_dir)))
    if checkpoint is not None:
        _refuse_other_rank(Path(checkpoint), lora_rank)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except (SafetensorError, RuntimeError) as error:
        if "Error(s) in loading state_dict" in str(error):
            raise ValueError(
                "resume_from_checkpoint must be a checkpoint of the same model with the same "
                f"lora_rank, got {checkpoint!r}: {error}"
            ) from error
        # safetensors and torch raise other errors than OSError on a full disk
        if not is_disk_full(error):
            raise
        raise OSError(f"{args.output_dir} cannot be written: {error}") from error


def _refuse_other_rank(checkpoint: Path, lora_rank: int):
    adapter_config = checkpoint / ADAPTER_FILE
    saved_rank = 0
    if adapter_config.is_file():
        saved_rank = read_json(adapter_config, mapping({"r": whole_number()}))["r"]
    if checkpoint.is_dir() and saved_rank != lora_rank:
        raise ValueError(
            "resume_from_checkpoint must be a checkpoint of the same model with the same "
            f"lora_rank, got {checkpoint} with lora_rank {saved_rank}, and {lora_rank} now."
        )


def _save(
    options: FineTuneArguments,
    trainer: FusedTrainer,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
):
    """Save the trained model with weights of a dtype, and its adapters if there are any."""
    local_weights = {
        name: weight.to_local() if isinstance(weight, DTensor) else weight
        for name, weight in model.named_parameters()
    }
    refuse_not_finite(local_weights, "the trained weights")
    trainer.save_state()
    if model.dtype != dtype:
        _round_weights(model, dtype)
    folder = trainer.args.output_dir
    trainer.save_model(str(Path(folder, ADAPTER_FOLDER)) if options.lora_rank else None)
    if options.lora_rank:
        # adapters are merged now, because a later evaluation in half precision rounds the weights
        # in place
        merged_model = trainer.model.merge_and_unload()
        if trainer.is_world_process_zero():
            merged_model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    elif model.dtype != dtype and trainer.is_world_process_zero():
        saved_model = type(model).from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        saved_model.save_pretrained(folder)
    if trainer.is_world_process_zero():
        # safetensors gives only the owner permission to read a file
        mode = Path(folder, CONFIG_NAME).stat().st_mode
        for path in Path(folder).rglob("*.safetensors"):
            path.chmod(mode & 0o666)


@torch.no_grad()
def _round_weights(model: PreTrainedModel, dtype: torch.dtype):
    """Round weights in float32 to the values that a dtype can represent."""
    for weight in model.parameters():
        weight.copy_(weight.to(dtype))


def last_checkpoint(folder: Path) -> Path:
    """Find the newest complete checkpoint, with the trainer's state, which is written last.

    Args:
        folder: Output folder.

    Returns:
        Folder of the checkpoint.

    Raises:
        ValueError: If there is no complete checkpoint.
    """
    complete_checkpoints = [
        path
        for path in folder.glob("checkpoint-*")
        if (path / "trainer_state.json").is_file() and path.name.split("-")[1].isdecimal()
    ]
    if not complete_checkpoints:
        raise ValueError(
            f"resume_from_checkpoint needs a complete checkpoint in {folder}, got none."
        )
    return max(complete_checkpoints, key=lambda path: int(path.name.split("-")[1]))


def write_card(
    options: FineTuneArguments, args: Seq2SeqTrainingArguments, steps: int, scores: dict[str, Any]
):
    """Write the model card: base model, dataset and scores.

    Args:
        options: Model and dataset.
        args: Training arguments of the library.
        steps: Number of training steps.
        scores: Scores of the validation split.
    """
    folder = Path(args.output_dir)
    name = folder.resolve().name
    # a local path means nothing to readers of the card
    is_on_hub = is_hub_name(options.dataset, options.source_lang, options.target_lang)
    dataset = options.dataset if is_on_hub else Path(options.dataset).name
    is_local = Path(options.run).exists()
    base_name = Path(options.run).resolve().name if is_local else options.run
    results = [
        EvalResult(
            task_type="translation",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_config=options.name,
            dataset_split="validation",
            metric_type=metric,
            metric_name=f"{label} ({scores[f'eval_{metric}_signature']})",
            metric_value=round(scores[f"eval_{metric}"], 2),
        )
        for metric, label in (("bleu", "BLEU"), ("chrf", "chrF"))
        if f"eval_{metric}" in scores
    ]
    card_data = ModelCardData(
        language=[options.source_lang, options.target_lang],
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_transformer", "translation"],
        base_model=None if is_local else options.run,
        model_name=name if results else None,
        eval_results=results or None,
    )
    card = f"""---
{card_data.to_yaml()}
---

# {name}: {options.source_lang} to {options.target_lang}

`{base_name}`, fine-tuned for {steps:,} steps on `{dataset}`.

```python
import vanilla_transformer
from transformers import pipeline

translate = pipeline("translation", model="{folder.as_posix()}")
```
"""
    card += "".join(f"\n* {result.metric_name}: {result.metric_value}" for result in results)
    (folder / "README.md").write_text(f"{card.rstrip()}\n", encoding="utf-8")


def _load_model(options: FineTuneArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_run(options.run, options.trust_remote_code)
    max_positions = max_source_tokens(model.config)
    if max_positions is not None and options.max_length > max_positions:
        raise ValueError(
            f"max_length must be at most {max_positions}, the number of positions of the model, "
            f"got {options.max_length}."
        )
    return model, tokenizer


def _refuse_longer(rows: Dataset, max_positions: int):
    num_tokens = int(max(map(np.max, pair_lengths(rows))))
    if num_tokens > max_positions:
        raise ValueError(
            f"validation must have at most {max_positions} tokens per sentence, the number of "
            f"positions of the model, got a sentence of {num_tokens}."
        )


def check_arguments(options: FineTuneArguments, args: Seq2SeqTrainingArguments):
    """Refuse arguments that would otherwise fail after the training.

    Args:
        options: Model and dataset.
        args: Training arguments of the library.

    Raises:
        ValueError: If a setting cannot be used.
    """
    if options.lora_rank < 0:
        raise ValueError(f"lora_rank must not be negative, got {options.lora_rank}.")
    if args.push_to_hub and "/" not in (args.hub_model_id or ""):
        raise ValueError(
            f"hub_model_id must be user/name with push_to_hub, got {args.hub_model_id!r}."
        )
    # refuse fp16 on a CPU, where accelerate would silently use fp32
    if args.fp16 and args.device.type == "cpu":
        raise ValueError("fp16 must be false on a CPU, got true.")
    _parse_columns(options)
    # raises an error if sacreBLEU does not have this tokenizer
    scores = score_translations(["a"], ["a"], options.bleu_tokenizer)
    _refuse_unknown_metric(args, scores)
    _refuse_scheduler(args)
    for name in args.report_to:
        if name not in get_available_reporting_integrations():
            raise ValueError(f"report_to {name!r} must be installed, but its package is missing.")
    folder = Path(args.output_dir)
    if args.resume_from_checkpoint is None and folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"output_dir must be empty, or resume_from_checkpoint be {LAST_CHECKPOINT!r} or one "
            f"of its checkpoints, got {args.output_dir!r}."
        )


def _refuse_unknown_metric(args: Seq2SeqTrainingArguments, scores: dict[str, Any]):
    """Refuse a metric that no evaluation has: the library would fail after the first evaluation."""
    metrics = ["loss"]
    if args.predict_with_generate:
        metrics += [name for name, score in scores.items() if not isinstance(score, str)]
    name = args.metric_for_best_model
    if name is not None and name.removeprefix("eval_") not in metrics:
        is_score = name.removeprefix("eval_") in scores
        raise ValueError(
            f"metric_for_best_model must be one of {', '.join(metrics)}, got {name!r}."
            + (" Scores of translations need --predict_with_generate." if is_score else "")
        )


def _refuse_scheduler(args: Seq2SeqTrainingArguments):
    """Refuse missing or unknown `lr_scheduler_kwargs`, which some schedulers need."""
    # a scheduler may compare its settings with the learning rate
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    try:
        get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=0,
            num_training_steps=1,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_kwargs must fit lr_scheduler_type {args.lr_scheduler_type.value!r}, "
            f"got {args.lr_scheduler_kwargs}: {error}"
        ) from error


def run(argv: list[str]):
    """Run the command line of fine-tuning, and print the scores.

    Args:
        argv: Arguments of the command line.

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
    # the library's parser accepts only flags, so RUN becomes one
    if argv and not argv[0].startswith("-"):
        argv = ["--run", *argv]
    if is_launched_on_cpu():
        parser.set_defaults(use_cpu=True)
    try:
        options, args = parser.parse_args_into_dataclasses(argv)
        if args.process_index > 0:
            logging.getLogger("vanilla_transformer").setLevel(logging.WARNING)
        scores = fine_tune(options, args)
    except ImportError as error:
        # some values of the library's settings need other packages, such as --optim adamw_8bit
        if sentence_of(error) is not None:
            raise
        raise ValueError(f"a setting needs a package that is not installed: {error}") from error
    leave_process_group()
    if args.process_index == 0:
        sys.stdout.write("".join(f"{name} = {value}\n" for name, value in scores.items()))


# shows an error as one sentence on stderr, and returns the exit status: 0, or 1 after an error
main = partial(run_command, run)


if __name__ == "__main__":
    sys.exit(main())
