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
DIGITS = {"comet": 4}
COMPOUND_BLEU = "compound-split tokenised BLEU"
EXAMPLES = 3


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
    corpora, on_hub = _corpora(config), _on_hub(folder, config)
    title = folder.resolve().name
    parts = [
        f"---\n{_metadata(title, config, scores, average, on_hub).to_yaml()}\n---\n",
        f"# {title}: {config.source_lang} to {config.target_lang}\n",
        f"{_model_name(config)}, with "
        f"{num_parameters:,} parameters, trained from scratch for {steps:,} steps on "
        f"{' and '.join(_data_name(corpus, on_hub) for corpus in corpora)}."
        f"{f' Its weights are {average}.' if average else ''}\n",
        "```python\nimport vanilla_transformer\nfrom transformers import pipeline\n\n"
        f'translate = pipeline("translation", model="{folder.as_posix()}"{_trust(config)})\n'
        'print(translate("..."))\n```\n',
        _search_text(folder, config),
        "## Results\n",
        _results(scores, average, config),
        *_examples(folder, scores, average),
        "## Training\n",
        _facts(folder, config, num_parameters),
    ]
    parts += [
        f"![{text}](pictures/{name})\n"
        for name, text in (
            ("loss.png", "Loss against steps"),
            ("attention.png", "Attention of the last decoder layer to the source"),
        )
        if (folder / "pictures" / name).is_file()
    ]
    recipe = read_text(folder / RECIPE_FILE).strip()
    parts += [
        "All settings, as `recipe.yaml` (train with `vanilla-transformer train recipe.yaml`):\n",
        f"```yaml\n{recipe}\n```\n",
        "## Environment\n",
        *_environment(folder),
    ]
    write_atomically(folder / "README.md", "\n".join(parts))


def _model_name(config: TrainConfig) -> str:
    if config.model_class is None:
        return 'The Transformer of "Attention Is All You Need" (Vaswani et al., 2017)'
    return f"A model of the class {config.model_class.rpartition(':')[2]}"


def _trust(config: TrainConfig) -> str:
    return ", trust_remote_code=True" if config.has_model_file else ""


def _search_text(folder: Path, config: TrainConfig) -> str:
    """Return the sentence about the model's default search."""
    search = GenerationConfig.from_pretrained(folder)
    if getattr(search, "length_penalty_alpha", None) is None:
        return (
            "Translation uses the beam search of transformers: "
            f"{search.num_beams} beams, length penalty length^{search.length_penalty}, "
            f"at most {search.max_length} tokens.\n"
        )
    return (
        f"Translation uses the beam search of the paper, section 6.1: beam size "
        f"{config.num_beams}, length penalty ((5 + length) / 6)^{config.length_penalty_alpha}, "
        f"at most {config.max_extra_tokens} tokens more than the source.\n"
    )


def _on_hub(folder: Path, config: TrainConfig) -> list[str]:
    """Return the corpora that readers of the card can find on the Hub."""
    corpora = [corpus["dataset"] for corpus in _corpora(config)]
    began = next(iter(read_environment(folder)), {})
    commits = began.get("dataset_commit", "").split(", ")
    # a corpus that was local when the run began is excluded: its path may not exist for this
    # process, and would then look like a Hub name
    local = [dataset for dataset, commit in zip(corpora, commits, strict=False) if commit == "none"]
    languages = (config.source_lang, config.target_lang)
    return [
        dataset
        for dataset in dict.fromkeys(corpora)
        if dataset not in local and is_hub_name(dataset, *languages)
    ]


def _metadata(
    title: str,
    config: TrainConfig,
    scores: Mapping[str, Mapping[str, Any]],
    average: str | None,
    on_hub: list[str],
) -> ModelCardData:
    direction = f"{config.source_lang}-{config.target_lang}"
    results = [
        EvalResult(
            task_type="translation",
            task_name=f"Translation {direction}",
            # a corpus that is not on the Hub gets the name of its folder
            dataset_type=config.dataset
            if config.dataset in on_hub
            else _folder_name(config.dataset),
            dataset_name=f"{_folder_name(config.dataset)} {config.name or ''}".strip(),
            dataset_config=config.name,
            dataset_split=score["split"],
            metric_type=metric,
            metric_name=f"{label} ({score[f'{metric}_signature']})",
            metric_value=round(score[metric], DIGITS.get(metric, 2)),
        )
        for key, score in scores.items()
        # a score with other data, another search or other weights is not a result of this model
        if key == score["split"]
        and not is_of_other_weights(score, average)
        and _other_search(key, score, config) is None
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
        datasets=on_hub or None,
        model_name=title if results else None,
        eval_results=results or None,
    )


def _corpora(config: TrainConfig) -> list[dict[str, Any]]:
    return [{"dataset": config.dataset, "name": config.name}, *config.mix]


def _folder_name(dataset: str) -> str:
    # resolve the path first, because "." has no name
    return Path(dataset).resolve().name


def _data_name(corpus: Mapping[str, Any], on_hub: list[str]) -> str:
    dataset, name = corpus["dataset"], corpus["name"]
    shown = dataset if dataset in on_hub else _folder_name(dataset)
    return f"`{shown}`, `{name}`" if name else f"`{shown}`"


def _results(
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
        is_other, search = is_of_other_weights(score, average), _other_search(key, score, config)
        cells = [
            key
            + (f", of other weights: {score['average']}" if is_other else "")
            + (f", by another search: {search}" if search else "")
        ]
        cells.append(f"{score['sentences']:,}")
        cells += [
            f"{score[name]:.{DIGITS.get(name, 2)}f}" if name in score else "-" for name in labels
        ]
        lines.append(f"| {' | '.join(cells)} | {score['exact_match']:.1%} |")
    lines.append("")
    for name, label in labels.items():
        field = f"{name}_signature"
        for signature in dict.fromkeys(score[field] for score in scores.values() if name in score):
            of = [key for key, score in scores.items() if score.get(field) == signature]
            lines.append(f"- {label}, {', '.join(of)}: `{signature}`")
    lines += [
        f"- 95% confidence intervals, {key}: {format_intervals(score['intervals'])}"
        for key, score in scores.items()
        if "intervals" in score
    ]
    leaks = {key: score["leaks"] for key, score in scores.items() if "leaks" in score}
    if leaks:
        lines += ["", f"Sentences that the training text contains ({DEFINITION}):", ""]
        lines += [f"- {key}: {describe_leaks(found)}" for key, found in leaks.items()]
    for key, score in scores.items():
        for other, comparison in score.get("against", {}).items():
            shown = f"{key}, of other weights," if is_of_other_weights(score, average) else key
            lines += ["", f"{shown} against {other}, paired bootstrap, 95% confidence:", ""]
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
    found = ", ".join(
        f"{METRICS[name]} {intervals[name]['mean']:.2f} ± {intervals[name]['ci']:.2f}"
        for name in ("bleu", "chrf")
    )
    return f"{found}   {intervals['signature']}"


def is_of_other_weights(score: Mapping[str, Any], average: str | None) -> bool:
    """Return whether a score belongs to weights that a later average has replaced."""
    return score.get("average", average) != average


def _other_search(key: str, score: Mapping[str, Any], config: TrainConfig) -> str | None:
    """Return the search of a score if it is not the run's default search, else None.

    Only a score that is named after its split is checked, because other names contain the search.
    """
    search = score["search"]
    # a model of another class lacks the settings of the paper's search; their values are None
    known = {name: value for name, value in search.items() if value is not None}
    is_default = all(getattr(config, name, None) == value for name, value in known.items())
    if key != score["split"] or is_default:
        return None
    return ", ".join(f"{name} {value}" for name, value in search.items())


def _examples(
    folder: Path, scores: Mapping[str, Mapping[str, Any]], average: str | None
) -> list[str]:
    """Return a table with the first sentences of a split of the run's dataset."""
    own = [key for key, score in scores.items() if key == score["split"]]
    split = min(own, key=lambda key: is_of_other_weights(scores[key], average), default=None)
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
    others = ", by other weights" if is_of_other_weights(scores[split], average) else ""
    lines = [f"The first sentences of {split}{others}; `hypotheses/` contains all.", ""]
    lines += ["| source | reference | translation |", "|---|---|---|"]
    for row in itertools.islice(zip(*columns, strict=True), EXAMPLES):
        cells = (" ".join(text.replace("|", "\\|").split()) for text in row)
        lines.append(f"| {' | '.join(cells)} |")
    return ["\n".join(lines) + "\n"]


def _facts(folder: Path, config: TrainConfig, num_parameters: int) -> str:
    """Return a table with the main facts from recipe, metrics and environment."""
    model = PreTrainedConfig.from_dict(read_config(folder))
    # `PreTrainedConfig` knows no aliases: the width has the name that the model's class saves
    width = getattr(model, "hidden_size", None) or model.d_model
    metrics = read_metrics(folder)
    # the last line with a loss: a line has no loss if all its steps were skipped
    last: dict[str, Any] = next(
        (line for line in reversed(metrics) if line.get("loss") is not None), {}
    )
    checked: dict[str, Any] = next(
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
        "layers": f"{size_of(model, 'encoder_layers')} in the encoder, "
        f"{size_of(model, 'decoder_layers')} in the decoder",
        "d_model, d_ff, heads": f"{width}, {size_of(model, 'encoder_ffn_dim')}, "
        f"{size_of(model, 'encoder_attention_heads')}",
        "vocabulary": f"{model.vocab_size:,} tokens, shared by both languages",
        "dropout, label smoothing": f"{size_of(model, 'dropout')}, {config.label_smoothing}",
        "batch": f"about {config.tokens_per_step:,} source and {config.tokens_per_step:,} target "
        "tokens per step",
        "learning rate": f"section 5.3, {config.warmup_steps:,} warm-up steps, times "
        f"{config.learning_rate_factor:g}" + (cooldown if cooldown_steps else ""),
        "precision": config.precision,
    }
    environment = read_environment(folder)
    changes = [
        f"from step {start['first_step']} on: {start['changed']}"
        for start in environment
        if "changed" in start
    ]
    if changes:
        facts["changed settings"] = "; ".join(changes)
    losses = []
    if last:
        facts["steps"] = f"{last['step']:,}, {last['epoch']:.1f} epochs"
        losses.append(f"{last['loss']:.3f} training, smoothed")
    if checked.get("validation_perplexity") is not None:
        losses.append(
            f"{checked['validation_loss']:.3f} validation, "
            f"perplexity {checked['validation_perplexity']:.2f}"
        )
    if losses:
        facts["loss"] = "; ".join(losses)
    average = read_average(folder)
    needed = {"gpus", "cpus", "threads_per_process", "processes"}
    # a truncated environment.txt may lack these facts
    is_complete = environment and all(needed <= start.keys() for start in environment)
    if average is not None and is_complete:
        # a run may have resumed on another machine
        devices = dict.fromkeys(map(_devices, environment))
        facts["time"] = f"{_duration(average['seconds'])} on {', then '.join(devices)}"
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in facts.items())]) + "\n"


def _devices(start: Mapping[str, str]) -> str:
    """Return the devices that one start of a run has used."""
    devices, processes = start["gpus"], start["processes"]
    if devices == "none":
        cores = int(start["cpus"])
        used = int(start["threads_per_process"]) * int(processes)
        devices = f"{cores} CPU cores" if used >= cores else f"{used} of {cores} CPU cores"
    return devices if processes == "1" else f"{devices}, {processes} processes"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _environment(folder: Path) -> list[str]:
    blocks = read_environment(folder)
    if not blocks:
        return ["Unknown.\n"]
    starts = []
    if len(blocks) > 1:
        starts = [f"The first of {len(blocks)} starts; `environment.txt` contains all.\n"]
    text = "\n".join(f"{name}: {fact}" for name, fact in blocks[0].items())
    return [*starts, f"```\n{text}\n```\n"]
