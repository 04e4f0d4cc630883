"""Write the model card of a run: description, results, training data and settings of the model."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from transformers import GenerationConfig, PreTrainedConfig

from ...atomic_files import write_atomically
from ...loading import read_config
from ...records import read_text
from ...sizes import size_of
from ..config import TrainConfig
from ..data.corpus import is_hub_name
from ..data.leaks import DEFINITION, describe_leaks
from ..recipe import RECIPE_FILE
from .environment import read_environment
from .files import describe_average, read_average, read_metrics, read_scores

METRICS = {"bleu": "BLEU", "chrf": "chrF", "comet": "COMET"}
METRIC_DIGITS = {"comet": 4}
COMPOUND_BLEU = "compound-split tokenised BLEU"
NUM_EXAMPLES = 3


def write_model_card(folder: Path, config: TrainConfig, num_parameters: int) -> None:
    """Write `README.md` from the files of a run folder: recipe, metrics, and scores if any.

    Args:
        folder: Run folder with a model.
        config: Settings of the run.
        num_parameters: Number of parameters of the model; tied weights count once.

    Raises:
        ValueError: If a file of an evaluation is damaged; names the file.
    """
    average = describe_average(folder)
    scores = {key: score for key, score in read_scores(folder).items() if "bleu" in score}
    steps = max((line["step"] for line in read_metrics(folder)), default=0)
    corpora, hub_datasets = _list_corpora(config), _find_hub_datasets(folder, config)
    title = folder.resolve().name
    sections = [
        f"---\n{_make_metadata(title, config, scores, average, hub_datasets).to_yaml()}\n---\n",
        f"# {title}: {config.source_lang} to {config.target_lang}\n",
        f"{_describe_model(config)}, with "
        f"{num_parameters:,} parameters, trained from scratch for {steps:,} steps on "
        f"{' and '.join(_describe_corpus(corpus, hub_datasets) for corpus in corpora)}."
        f"{f' Its weights are {average}.' if average else ''}\n",
        "```python\nimport vanilla_transformer\nfrom transformers import pipeline\n\n"
        f'translate = pipeline("translation", model="{folder.as_posix()}"'
        f"{_trust_argument(config)})\n"
        'print(translate("..."))\n```\n',
        _describe_search(folder, config),
        "## Results\n",
        _format_results(scores, average, config),
        *_format_examples(folder, scores, average),
        "## Training\n",
        _format_facts(folder, config, num_parameters),
    ]
    sections += [
        f"![{caption}](pictures/{picture})\n"
        for picture, caption in (
            ("loss.png", "Loss against steps"),
            ("attention.png", "Attention of the last decoder layer to the source"),
        )
        if (folder / "pictures" / picture).is_file()
    ]
    recipe = read_text(folder / RECIPE_FILE).strip()
    sections += [
        "All settings, as `recipe.yaml` (train with `vanilla-transformer train recipe.yaml`):\n",
        f"```yaml\n{recipe}\n```\n",
        "## Environment\n",
        *_format_environment(folder),
    ]
    write_atomically(folder / "README.md", "\n".join(sections))


def _describe_model(config: TrainConfig) -> str:
    if config.model_class is None:
        return 'The Transformer of "Attention Is All You Need" (Vaswani et al., 2017)'
    return f"A model of the class {config.model_class.rpartition(':')[2]}"


def _trust_argument(config: TrainConfig) -> str:
    return ", trust_remote_code=True" if config.has_model_file else ""


def _describe_search(folder: Path, config: TrainConfig) -> str:
    """Return the sentence about the model's default search."""
    generation_config = GenerationConfig.from_pretrained(folder)
    if getattr(generation_config, "length_penalty_alpha", None) is None:
        return (
            "Translation uses the beam search of transformers: "
            f"{generation_config.num_beams} beams, "
            f"length penalty length^{generation_config.length_penalty}, "
            f"at most {generation_config.max_length} tokens.\n"
        )
    return (
        f"Translation uses the beam search of the paper, section 6.1: beam size "
        f"{config.num_beams}, length penalty ((5 + length) / 6)^{config.length_penalty_alpha}, "
        f"at most {config.max_extra_tokens} tokens more than the source.\n"
    )


def _find_hub_datasets(folder: Path, config: TrainConfig) -> list[str]:
    """Return the corpora that readers of the card can find on the Hub."""
    corpus_datasets = [corpus["dataset"] for corpus in _list_corpora(config)]
    first_start = next(iter(read_environment(folder)), {})
    commits = first_start.get("dataset_commit", "").split(", ")
    # a corpus that was local when the run began is excluded: its path may not exist for this
    # process, and would then look like a Hub name
    local_datasets = [
        dataset
        for dataset, commit in zip(corpus_datasets, commits, strict=False)
        if commit == "none"
    ]
    languages = (config.source_lang, config.target_lang)
    return [
        dataset
        for dataset in dict.fromkeys(corpus_datasets)
        if dataset not in local_datasets and is_hub_name(dataset, *languages)
    ]


def _make_metadata(
    title: str,
    config: TrainConfig,
    scores: Mapping[str, Mapping[str, Any]],
    average: str | None,
    hub_datasets: list[str],
) -> ModelCardData:
    language_pair = f"{config.source_lang}-{config.target_lang}"
    results = [
        EvalResult(
            task_type="translation",
            task_name=f"Translation {language_pair}",
            # a corpus that is not on the Hub gets the name of its folder
            dataset_type=config.dataset
            if config.dataset in hub_datasets
            else _folder_name(config.dataset),
            dataset_name=f"{_folder_name(config.dataset)} {config.name or ''}".strip(),
            dataset_config=config.name,
            dataset_split=score["split"],
            metric_type=metric,
            metric_name=f"{label} ({score[f'{metric}_signature']})",
            metric_value=round(score[metric], METRIC_DIGITS.get(metric, 2)),
        )
        for key, score in scores.items()
        # a score with other data, another search or other weights is not a result of this model
        if key == score["split"]
        and not is_of_other_weights(score, average)
        and _describe_other_search(key, score, config) is None
        for metric, label in METRICS.items()
        if metric in score
    ]
    return ModelCardData(
        # a formal language has no language code
        language=[
            language
            for language in (config.source_lang, config.target_lang)
            if language != config.symbol_lang
        ],
        license=config.license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_transformer", "translation"],
        datasets=hub_datasets or None,
        model_name=title if results else None,
        eval_results=results or None,
    )


def _list_corpora(config: TrainConfig) -> list[dict[str, Any]]:
    return [{"dataset": config.dataset, "name": config.name}, *config.mix]


def _folder_name(dataset: str) -> str:
    # resolve the path first, because "." has no name
    return Path(dataset).resolve().name


def _describe_corpus(corpus: Mapping[str, Any], hub_datasets: list[str]) -> str:
    dataset, config_name = corpus["dataset"], corpus["name"]
    dataset_name = dataset if dataset in hub_datasets else _folder_name(dataset)
    return f"`{dataset_name}`, `{config_name}`" if config_name else f"`{dataset_name}`"


def _format_results(
    scores: Mapping[str, Mapping[str, Any]], average: str | None, config: TrainConfig
) -> str:
    if not scores:
        return "Not evaluated yet.\n"
    # one column for each metric that at least one score contains
    labels = {**METRICS, "compound_bleu": COMPOUND_BLEU}
    labels = {
        name: label
        for name, label in labels.items()
        if any(name in score for score in scores.values())
    }
    lines = [f"| split | sentences | {' | '.join(labels.values())} | exact match |"]
    lines += ["|---" * (len(labels) + 3) + "|"]
    for key, score in scores.items():
        has_other_weights = is_of_other_weights(score, average)
        other_search = _describe_other_search(key, score, config)
        cells = [
            key
            + (f", of other weights: {score['average']}" if has_other_weights else "")
            + (f", by another search: {other_search}" if other_search else "")
        ]
        cells.append(f"{score['sentences']:,}")
        cells += [
            f"{score[name]:.{METRIC_DIGITS.get(name, 2)}f}" if name in score else "-"
            for name in labels
        ]
        lines.append(f"| {' | '.join(cells)} | {score['exact_match']:.1%} |")
    lines.append("")
    for name, label in labels.items():
        signature_field = f"{name}_signature"
        signatures = [score[signature_field] for score in scores.values() if name in score]
        for signature in dict.fromkeys(signatures):
            split_keys = [
                key for key, score in scores.items() if score.get(signature_field) == signature
            ]
            lines.append(f"- {label}, {', '.join(split_keys)}: `{signature}`")
    lines += [
        f"- 95% confidence intervals, {key}: {format_intervals(score['intervals'])}"
        for key, score in scores.items()
        if "intervals" in score
    ]
    leak_counts = {key: score["leaks"] for key, score in scores.items() if "leaks" in score}
    if leak_counts:
        lines += ["", f"Sentences that the training text contains ({DEFINITION}):", ""]
        lines += [f"- {key}: {describe_leaks(counts)}" for key, counts in leak_counts.items()]
    for key, score in scores.items():
        for other_model, comparison in score.get("against", {}).items():
            heading = f"{key}, of other weights," if is_of_other_weights(score, average) else key
            lines += ["", f"{heading} against {other_model}, paired bootstrap, 95% confidence:", ""]
            lines += [
                f"- {METRICS[name]} {result['score']:.2f} ± {result['ci']:.2f} against "
                f"{result['other']:.2f} ± {result['other_ci']:.2f}, p = {result['p_value']:.4f}: "
                f"`{result['signature']}`"
                for name, result in comparison.items()
            ]
    if "compound_bleu" in labels:
        lines += [
            "",
            f"The paper's tables report {COMPOUND_BLEU}. It is usually higher than sacreBLEU's "
            "BLEU on the same text; the two cannot be compared.",
        ]
    return "\n".join(lines) + "\n"


def format_intervals(intervals: Mapping[str, Any]) -> str:
    """Format confidence intervals as text.

    Args:
        intervals: Intervals from `confidence_intervals`.

    Returns:
        Mean over the bootstrap samples ± half the width of the interval, for BLEU and chrF, and the
        signature, which names the number of samples and the seed.
    """
    interval_text = ", ".join(
        f"{METRICS[name]} {intervals[name]['mean']:.2f} ± {intervals[name]['ci']:.2f}"
        for name in ("bleu", "chrf")
    )
    return f"{interval_text}   {intervals['signature']}"


def is_of_other_weights(score: Mapping[str, Any], average: str | None) -> bool:
    """Return whether a score belongs to weights that a later average has replaced."""
    return score.get("average", average) != average


def _describe_other_search(key: str, score: Mapping[str, Any], config: TrainConfig) -> str | None:
    """Return the search of a score if it is not the run's default search, else None.

    Only a score that is named after its split is checked, because other names contain the search.
    """
    search = score["search"]
    # a model of another class lacks the settings of the paper's search; their values are None
    known_settings = {name: value for name, value in search.items() if value is not None}
    is_default = all(getattr(config, name, None) == value for name, value in known_settings.items())
    if key != score["split"] or is_default:
        return None
    return ", ".join(f"{name} {value}" for name, value in search.items())


def _format_examples(
    folder: Path, scores: Mapping[str, Mapping[str, Any]], average: str | None
) -> list[str]:
    """Return a table with the first sentences of a split of the run's dataset."""
    dataset_splits = [key for key, score in scores.items() if key == score["split"]]
    split = min(
        dataset_splits, key=lambda key: is_of_other_weights(scores[key], average), default=None
    )
    if split is None:
        return []
    sides = ("source", "reference", "translation")
    paths = [folder / "hypotheses" / f"{split}.{side}.txt" for side in sides]
    if not all(path.is_file() for path in paths):
        return []
    # the text after the last line feed is not a sentence
    columns = [read_text(path).split("\n")[:-1] for path in paths]
    for path, column in zip(paths, columns, strict=True):
        if len(column) != len(columns[0]):
            raise ValueError(
                f"{path} must have as many lines as {paths[0].name}, {len(columns[0]):,}, got "
                f"{len(column):,}: evaluate the run again."
            )
    weights_note = ", by other weights" if is_of_other_weights(scores[split], average) else ""
    lines = [f"The first sentences of {split}{weights_note}; `hypotheses/` contains all.", ""]
    lines += ["| source | reference | translation |", "|---|---|---|"]
    for sentences in itertools.islice(zip(*columns, strict=True), NUM_EXAMPLES):
        cells = (" ".join(text.replace("|", "\\|").split()) for text in sentences)
        lines.append(f"| {' | '.join(cells)} |")
    return ["\n".join(lines) + "\n"]


def _format_facts(folder: Path, config: TrainConfig, num_parameters: int) -> str:
    """Return a table with the main facts from recipe, metrics and environment."""
    model_config = PreTrainedConfig.from_dict(read_config(folder))
    # `PreTrainedConfig` has no aliases, so the width has the name that the model's class saves
    width = getattr(model_config, "hidden_size", None) or model_config.d_model
    metrics = read_metrics(folder)
    # the last line with a loss: a line has no loss if all its steps were skipped
    last_loss_line: dict[str, Any] = next(
        (line for line in reversed(metrics) if line.get("loss") is not None), {}
    )
    last_validation_line: dict[str, Any] = next(
        (line for line in reversed(metrics) if "validation_loss" in line), {}
    )
    # with max_minutes, a cooldown can be planned with fewer steps, and end before its last step
    cooldown_steps = config.cooldown_steps
    for line in metrics:
        if "cooldown_steps" in line:
            cooldown_steps = min(line["cooldown_steps"], metrics[-1]["step"] - line["step"])
    cooldown = f", linear cooldown of {cooldown_steps:,} steps"
    facts = {
        "parameters": f"{num_parameters:,}, embeddings included",
        "layers": f"{size_of(model_config, 'encoder_layers')} in the encoder, "
        f"{size_of(model_config, 'decoder_layers')} in the decoder",
        "d_model, d_ff, heads": f"{width}, {size_of(model_config, 'encoder_ffn_dim')}, "
        f"{size_of(model_config, 'encoder_attention_heads')}",
        "vocabulary": f"{model_config.vocab_size:,} tokens, shared by both languages",
        "dropout, label smoothing": f"{size_of(model_config, 'dropout')}, {config.label_smoothing}",
        "batch": f"about {config.tokens_per_step:,} source and {config.tokens_per_step:,} target "
        "tokens per step",
        "learning rate": f"section 5.3, {config.warmup_steps:,} warm-up steps, times "
        f"{config.learning_rate_factor:g}" + (cooldown if cooldown_steps else ""),
        "precision": config.precision,
    }
    starts = read_environment(folder)
    # a start that saved no checkpoint has no effect, and the next one has the same first step
    change_by_step = {start.get("first_step"): start.get("changed") for start in starts}
    changes = [f"from step {step} on: {text}" for step, text in change_by_step.items() if text]
    if changes:
        facts["changed settings"] = "; ".join(changes)
    loss_texts = []
    if last_loss_line:
        facts["steps"] = f"{last_loss_line['step']:,}, {last_loss_line['epoch']:.1f} epochs"
        loss_texts.append(f"{last_loss_line['loss']:.3f} training, smoothed")
    if last_validation_line.get("validation_perplexity") is not None:
        loss_texts.append(
            f"{last_validation_line['validation_loss']:.3f} validation, "
            f"perplexity {last_validation_line['validation_perplexity']:.2f}"
        )
    if loss_texts:
        facts["loss"] = "; ".join(loss_texts)
    average = read_average(folder)
    needed_facts = {"gpus", "cpus", "threads_per_process", "processes"}
    # a truncated environment.txt may lack these facts
    is_complete = starts and all(needed_facts <= start.keys() for start in starts)
    if average is not None and is_complete:
        # a run may have resumed on another machine
        devices = dict.fromkeys(map(_describe_devices, starts))
        facts["time"] = f"{_format_duration(average['seconds'])} on {', then '.join(devices)}"
    rows = [f"| {name} | {fact} |" for name, fact in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows]) + "\n"


def _describe_devices(start: Mapping[str, str]) -> str:
    """Return the devices that one start of a run has used."""
    devices, processes = start["gpus"], start["processes"]
    if devices == "none":
        cores = int(start["cpus"])
        used_cores = int(start["threads_per_process"]) * int(processes)
        devices = (
            f"{cores} CPU cores" if used_cores >= cores else f"{used_cores} of {cores} CPU cores"
        )
    return devices if processes == "1" else f"{devices}, {processes} processes"


def _format_duration(seconds: float) -> str:
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {remaining_seconds:02d} s" if minutes else f"{remaining_seconds} s"


def _format_environment(folder: Path) -> list[str]:
    starts = read_environment(folder)
    if not starts:
        return ["Unknown.\n"]
    intro_lines = []
    if len(starts) > 1:
        intro_lines = [f"The first of {len(starts)} starts; `environment.txt` contains all.\n"]
    text = "\n".join(f"{name}: {fact}" for name, fact in starts[0].items())
    return [*intro_lines, f"```\n{text}\n```\n"]
