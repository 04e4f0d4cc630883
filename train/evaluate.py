"""How good a model is: loss while it trains, BLEU and chrF of its translations. Section 6.1."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from sacrebleu.metrics import BLEU, CHRF
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.configuration_vanilla_transformer import closest_name
from vanilla_transformer.hub import load_run
from vanilla_transformer.train.corpus import load_translations, texts_of
from vanilla_transformer.train.run_folder import (
    RECIPE_FILE,
    SCORES_FILE,
    read_recipe,
    read_scores,
    write_model_card,
)
from vanilla_transformer.train.step import IGNORED, smoothed_loss_sum


@torch.no_grad()
def validation_loss(
    accelerator: Accelerator, model: PreTrainedModel, batches: Iterable[dict[str, Tensor]]
) -> float:
    """The loss without smoothing and without dropout, over all processes.

    Args:
        accelerator: Knows the processes and the precision.
        model: The model, not wrapped for several processes; trains on afterwards.
        batches: What this process has of the split.

    Returns:
        Loss for each target token.
    """
    model.eval()
    # not every accelerator has float64
    loss_sum = torch.zeros((), device=accelerator.device)
    num_tokens = torch.zeros((), dtype=torch.long, device=accelerator.device)
    for batch in batches:
        inputs = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        labels = inputs.pop("labels")
        with accelerator.autocast():
            logits = model(**inputs, use_cache=False).logits
        loss_sum += smoothed_loss_sum(logits, labels, 0.0)
        num_tokens += (labels != IGNORED).sum()
    model.train()
    loss_sum, num_tokens = accelerator.reduce((loss_sum, num_tokens), reduction="sum")
    return float(loss_sum) / int(num_tokens)


def load_model(run: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load what translates, onto the accelerator if there is one.

    Args:
        run: A run folder, a model folder or a Hub name.

    Returns:
        The model, ready to translate, and its tokenizer.

    Raises:
        ValueError: If it cannot be loaded.
    """
    model, tokenizer = load_run(run)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.eval().to(device), tokenizer


def translate_lines(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lines: Iterable[str],
    **search: Any,
) -> Iterator[str]:
    """Translate as many lines as are asked for, with the search of the model's generation config.

    Args:
        model: A model with a decoder and a head.
        tokenizer: Its tokenizer.
        lines: A sentence each, without its line feed.
        search: Settings of `generate` that differ, `num_beams` for one.

    Yields:
        A translation each, in order.
    """
    pipeline = TranslationPipeline(model, tokenizer, device=model.device)
    for translations in pipeline(iter(lines), **search):
        yield " ".join(translations[0]["translation_text"].split("\n"))


def score_translations(
    translations: Sequence[str], references: Sequence[str], bleu_tokenizer: str = "13a"
) -> dict[str, Any]:
    """Compare translations with references, by sacreBLEU.

    Args:
        translations: What the model said.
        references: What a person said.
        bleu_tokenizer: Of sacreBLEU: "none" for text that is already tokenized.

    Returns:
        `bleu` and `chrf` with their signatures, `exact_match` between 0 and 1, and `sentences`.

    Raises:
        ValueError: If there is nothing to compare, not as many of both, or no such tokenizer.
    """
    if len(translations) != len(references) or not references:
        raise ValueError(
            "there must be one translation for each of one or more references, "
            f"got {len(translations)} for {len(references)}."
        )
    if bleu_tokenizer not in BLEU.TOKENIZERS:
        raise ValueError(
            f"bleu_tokenizer must be one of {', '.join(BLEU.TOKENIZERS)}, got {bleu_tokenizer!r}."
        )
    scores: dict[str, Any] = {"sentences": len(references)}
    for name, metric in (("bleu", BLEU(tokenize=bleu_tokenizer)), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(translations, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    matches = sum(map(str.__eq__, translations, references))
    return {**scores, "exact_match": matches / len(references)}


def evaluate(
    run: str,
    split: str = "test",
    dataset: str | None = None,
    name: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    bleu_tokenizer: str = "13a",
    output_dir: str | None = None,
    **search: Any,
) -> dict[str, Any]:
    """Translate a split, score it, and keep both.

    Leaves `hypotheses/` and `scores.json`, and puts the scores into the model card of a run. They
    are kept by the name of the split; with other data or another search than the run's own, those
    are part of the name.

    Args:
        run: A run folder, a model folder or a Hub name.
        split: Which split to translate.
        dataset: As in `load_translations`; the run's own if not given, with the three that follow.
        name: Configuration of the dataset.
        source_lang: Language to translate from.
        target_lang: Language to translate into.
        bleu_tokenizer: Of sacreBLEU.
        output_dir: Where to leave the results; the run folder if not given.
        search: Settings of `generate` that differ from the model's, `num_beams` for one.

    Returns:
        The scores, as in `score_translations`, with what was translated and how fast.

    Raises:
        ValueError: If model, dataset or split cannot be had.
    """
    is_run = (Path(run) / RECIPE_FILE).is_file()
    if dataset is None and not is_run:
        raise ValueError(
            f"run must be a run folder, or dataset be given, got {run!r} without a {RECIPE_FILE}."
        )
    if not is_run and None in (source_lang, target_lang):
        raise ValueError("source_lang and target_lang must be given with dataset, got one or none.")
    recipe = read_recipe(Path(run)) if is_run else None
    source_lang, target_lang = (
        source_lang or recipe.source_lang,
        target_lang or recipe.target_lang,
    )
    revision = None
    if dataset is None:
        dataset, name, revision = recipe.dataset, name or recipe.name, recipe.revision
    if output_dir is None and not Path(run).is_dir():
        raise ValueError(f"output_dir must be given where the model is no folder, as in {run!r}.")
    folder = Path(output_dir or run)

    texts = load_translations(dataset, name, source_lang, target_lang, revision)
    if split not in texts:
        raise ValueError(
            f"split must be one of {', '.join(texts)}, got {split!r}."
            + closest_name(split, list(texts))
        )
    sources, references = texts_of(
        texts[split].with_format("arrow")[:], [source_lang, target_lang], split
    )
    model, tokenizer = load_model(run)
    started = time.monotonic()
    translations = list(
        tqdm(
            translate_lines(model, tokenizer, sources, **search),
            total=len(sources),
            desc=f"translating {split}",
            unit=" sentences",
        )
    )
    seconds = time.monotonic() - started
    scores = {
        "dataset": dataset,
        "name": name,
        "split": split,
        "source_lang": source_lang,
        "target_lang": target_lang,
        **score_translations(translations, references, bleu_tokenizer),
        "search": {
            field: search.get(field, getattr(model.generation_config, field, None))
            for field in ("num_beams", "length_penalty_alpha", "max_extra_tokens")
        },
        "seconds": seconds,
    }
    data = (dataset, name, source_lang, target_lang)
    is_own = is_run and data == (
        recipe.dataset,
        recipe.name,
        recipe.source_lang,
        recipe.target_lang,
    )
    key = [split] if is_own else [dataset, *filter(None, [name]), split, source_lang, target_lang]
    key += [
        f"{field}{value}"
        for field, value in sorted(search.items())
        if value != getattr(model.generation_config, field, None)
    ]
    _keep(
        folder,
        re.sub(r"[^\w.-]+", "-", "-".join(key)).strip("-"),
        scores,
        {"source": sources, "reference": references, "translation": translations},
    )
    if is_run and folder == Path(run):
        write_model_card(folder, recipe, model.num_parameters())
    return scores


def score_table(scores: Mapping[str, Any]) -> str:
    """The scores of one split, to be read.

    Args:
        scores: From `evaluate`.

    Returns:
        A line for each.
    """
    dataset = " ".join(filter(None, (scores["dataset"], scores["name"])))
    search = ", ".join(f"{name} {value}" for name, value in scores["search"].items())
    lines = {
        "data": f"{dataset}, {scores['split']}, {scores['source_lang']}-{scores['target_lang']}, "
        f"{scores['sentences']:,} sentences",
        "BLEU": f"{scores['bleu']:.2f}   {scores['bleu_signature']}",
        "chrF": f"{scores['chrf']:.2f}   {scores['chrf_signature']}",
        "exact match": f"{scores['exact_match']:.1%}",
        "search": f"{search}; {scores['seconds']:.1f} s",
    }
    return "\n".join(f"{name:12} {value}" for name, value in lines.items())


def _keep(folder: Path, key: str, scores: dict[str, Any], texts: dict[str, list[str]]):
    (folder / "hypotheses").mkdir(parents=True, exist_ok=True)
    for side, lines in texts.items():
        # a text with a line feed would put the files out of step
        flat = [" ".join(line.split("\n")) + "\n" for line in lines]
        path = folder / "hypotheses" / f"{key}.{side}.txt"
        path.write_text("".join(flat), encoding="utf-8")
    all_scores = {**read_scores(folder), key: scores}
    unfinished = folder / f".{SCORES_FILE}.unfinished"
    unfinished.write_text(json.dumps(all_scores, indent=1, ensure_ascii=False), encoding="utf-8")
    unfinished.replace(folder / SCORES_FILE)
