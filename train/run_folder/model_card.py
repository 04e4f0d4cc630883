"""The model card of a run: what the model is, how good it is, how it was trained, on what."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from transformers import GenerationConfig, PreTrainedConfig

from ...atomic_files import write_whole
from ...hub import read_config
from ...records import read_text
from ...sizes import size_of
from ..config import TrainConfig
from ..data.corpus import is_on_hub
from ..recipe import RECIPE_FILE
from .environment import read_environment
from .files import describe_average, read_average, read_metrics, read_scores

METRICS = {"bleu": "BLEU", "chrf": "chrF", "comet": "COMET"}
DIGITS = {"comet": 4}
COMPOUND_BLEU = "compound-split tokenised BLEU"
EXAMPLES = 3


def write_model_card(folder: Path, config: TrainConfig, num_parameters: int) -> None:
    """Write `README.md` from what stands in the run folder: recipe, curve, scores if there are any.

    Args:
        folder: The run folder, with its model.
        config: Settings of the run.
        num_parameters: Of the model, tied ones counted once.

    Raises:
        ValueError: If what was kept of evaluations is damaged; says which file.
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
        f"{num_parameters:,} parameters, trained from nothing for {steps:,} steps on "
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
            ("loss.png", "Loss over the steps"),
            ("attention.png", "Attention of the last decoder layer to the source"),
        )
        if (folder / "pictures" / name).is_file()
    ]
    recipe = read_text(folder / RECIPE_FILE).strip()
    parts += [
        "All settings, `recipe.yaml`, as the training takes them "
        "(`vanilla-transformer train recipe.yaml`):\n",
        f"```yaml\n{recipe}\n```\n",
        "## Environment\n",
        *_environment(folder),
    ]
    write_whole(folder / "README.md", "\n".join(parts))


def _model_name(config: TrainConfig) -> str:
    if config.model_class is None:
        return 'The Transformer of "Attention Is All You Need" (Vaswani et al., 2017)'
    return f"A model of the class {config.model_class.rpartition(':')[2]}"


def _trust(config: TrainConfig) -> str:
    return ", trust_remote_code=True" if config.has_model_file else ""


def _search_text(folder: Path, config: TrainConfig) -> str:
    """Return the sentence on the model's own search."""
    search = GenerationConfig.from_pretrained(folder)
    if getattr(search, "length_penalty_alpha", None) is None:
        return (
            "The model is searched with the beam search of transformers: "
            f"{search.num_beams} beams, length penalty length^{search.length_penalty}, "
            f"at most {search.max_length} tokens.\n"
        )
    return (
        f"It searches as the paper does, section 6.1: beam {config.num_beams}, length penalty "
        f"((5 + length) / 6)^{config.length_penalty_alpha}, at most {config.max_extra_tokens} "
        "tokens more than the source.\n"
    )


def _on_hub(folder: Path, config: TrainConfig) -> list[str]:
    """The corpora that readers of the card find on the Hub."""
    corpora = [corpus["dataset"] for corpus in _corpora(config)]
    began = next(iter(read_environment(folder)), {})
    commits = began.get("dataset_commit", "").split(", ")
    # what lay beside the run when it began may not be seen from here
    local = [dataset for dataset, commit in zip(corpora, commits, strict=False) if commit == "none"]
    languages = (config.source_lang, config.target_lang)
    return [
        dataset
        for dataset in dict.fromkeys(corpora)
        if dataset not in local and is_on_hub(dataset, *languages)
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
            # text that is on no Hub has no name there, and what it is called here must do
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
        # with other data, another search or other weights it is not a result of this model
        if key == score["split"]
        and not _is_of_others(score, average)
        and _other_search(key, score, config) is None
        for metric, label in METRICS.items()
        if metric in score
    ]
    return ModelCardData(
        # a formal language has no code there
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
    # "." has a name too
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
    # a column for what was measured somewhere
    labels = {**METRICS, "compound_bleu": COMPOUND_BLEU}
    labels = {
        name: label
        for name, label in labels.items()
        if any(name in score for score in scores.values())
    }
    lines = [f"| split | sentences | {' | '.join(labels.values())} | exact match |"]
    lines += ["|---" * (len(labels) + 3) + "|"]
    for key, score in scores.items():
        is_other, search = _is_of_others(score, average), _other_search(key, score, config)
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
    for key, score in scores.items():
        for other, comparison in score.get("against", {}).items():
            shown = f"{key}, of other weights," if _is_of_others(score, average) else key
            lines += ["", f"{shown} beside {other}, by paired bootstrap, with 95% confidence:", ""]
            lines += [
                f"- {METRICS[name]} {result['score']:.2f} ± {result['ci']:.2f} against "
                f"{result['other']:.2f} ± {result['other_ci']:.2f}, p = {result['p_value']:.4f}: "
                f"`{result['signature']}`"
                for name, result in comparison.items()
            ]
    if "compound_bleu" in labels:
        lines += [
            "",
            f"The paper's tables count {COMPOUND_BLEU}, most often higher than sacreBLEU's BLEU on "
            "the same text, and not to be compared with it.",
        ]
    return "\n".join(lines) + "\n"


def _is_of_others(score: Mapping[str, Any], average: str | None) -> bool:
    """Whether a score is of weights that the run had before it was averaged anew."""
    return score.get("average", average) != average


def _other_search(key: str, score: Mapping[str, Any], config: TrainConfig) -> str | None:
    """By which search a score was found that stands under its split's name, if not the run's own.

    Where a search was asked for it is part of the name.
    """
    # an earlier version did not note it
    search = score.get("search", {})
    # a model of another class does not have the paper's settings
    own = {name: it for name, it in search.items() if it is not None}
    if key != score["split"] or all(getattr(config, name, None) == it for name, it in own.items()):
        return None
    return ", ".join(f"{name} {it}" for name, it in search.items())


def _examples(
    folder: Path, scores: Mapping[str, Mapping[str, Any]], average: str | None
) -> list[str]:
    """The first sentences of a split of the run's own data."""
    own = [key for key, score in scores.items() if key == score["split"]]
    split = min(own, key=lambda key: _is_of_others(scores[key], average), default=None)
    if split is None:
        return []
    sides = ("source", "reference", "translation")
    paths = [folder / "hypotheses" / f"{split}.{side}.txt" for side in sides]
    if not all(path.is_file() for path in paths):
        return []
    # what follows the last line feed is no sentence
    columns = [read_text(path).split("\n")[:-1] for path in paths]
    for path, column in zip(paths, columns, strict=True):
        if len(column) != len(columns[0]):
            raise ValueError(
                f"{path} must have as many lines as {paths[0].name}, {len(columns[0]):,}, got "
                f"{len(column):,}: evaluate again."
            )
    others = ", by other weights" if _is_of_others(scores[split], average) else ""
    lines = [f"The first sentences of {split}{others}; `hypotheses/` has all of them.", ""]
    lines += ["| source | reference | translation |", "|---|---|---|"]
    for row in itertools.islice(zip(*columns, strict=True), EXAMPLES):
        cells = (" ".join(text.replace("|", "\\|").split()) for text in row)
        lines.append(f"| {' | '.join(cells)} |")
    return ["\n".join(lines) + "\n"]


def _facts(folder: Path, config: TrainConfig, num_parameters: int) -> str:
    """What a reader looks for first, of all that recipe, log and environment say."""
    model = PreTrainedConfig.from_dict(read_config(folder))
    # a configuration is saved with the names of its own fields
    width = getattr(model, "hidden_size", None) or model.d_model
    metrics = read_metrics(folder)
    # of steps that were all skipped there is no loss
    last = next((line for line in reversed(metrics) if line.get("loss") is not None), {})
    checked = next((line for line in reversed(metrics) if "validation_loss" in line), {})
    facts = {
        "parameters": f"{num_parameters:,}, embeddings included",
        "layers": f"{size_of(model, 'encoder_layers')} of the encoder, "
        f"{size_of(model, 'decoder_layers')} of the decoder",
        "d_model, d_ff, heads": f"{width}, {size_of(model, 'encoder_ffn_dim')}, "
        f"{size_of(model, 'encoder_attention_heads')}",
        "vocabulary": f"{model.vocab_size:,} tokens, of both languages",
        "dropout, label smoothing": f"{size_of(model, 'dropout')}, {config.label_smoothing}",
        "batch": f"about {config.tokens_per_step:,} source and {config.tokens_per_step:,} target "
        "tokens a step",
        "rate": f"section 5.3, {config.warmup_steps:,} warm-up steps, times "
        f"{config.learning_rate_factor:g}"
        + (f", falling in the last {config.cooldown_steps:,}" if config.cooldown_steps else ""),
        "precision": config.precision,
    }
    environment = read_environment(folder)
    changes = [
        f"{start['changed']}, from step {start['first_step']} on"
        for start in environment
        if "changed" in start
    ]
    if changes:
        facts["changed on the way"] = "; ".join(changes)
    losses = []
    if last:
        facts["steps"] = f"{last['step']:,}, {last['epoch']:.1f} epochs"
        losses.append(f"{last['loss']:.3f} in training, smoothed")
    if checked.get("validation_perplexity") is not None:
        losses.append(
            f"{checked['validation_loss']:.3f} in validation, "
            f"a perplexity of {checked['validation_perplexity']:.2f}"
        )
    if losses:
        facts["loss"] = "; ".join(losses)
    seconds = (read_average(folder) or {}).get("seconds")
    needed = {"gpus", "cpus", "threads_per_process", "processes"}
    # what someone has cut off is not known
    if seconds is not None and environment and all(needed <= start.keys() for start in environment):
        # a run may have gone on elsewhere
        devices = dict.fromkeys(map(_devices, environment))
        facts["time"] = f"{_duration(seconds)} on {', then '.join(devices)}"
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in facts.items())]) + "\n"


def _devices(start: Mapping[str, str]) -> str:
    """What a start of a run has computed on."""
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
        return ["Not known.\n"]
    starts = []
    if len(blocks) > 1:
        starts = [f"The first of {len(blocks)} starts; `environment.txt` has all.\n"]
    text = "\n".join(f"{name}: {fact}" for name, fact in blocks[0].items())
    return [*starts, f"```\n{text}\n```\n"]
