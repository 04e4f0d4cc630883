"""Prepare the everyday model for the web page: calibrated scores, weights in float16, one file.

    python results/everyday/release.py RUN FOLDER --near DATASET NAME [--far DATASET NAME]
        [--sources FILE]

RUN is the run folder of the recipe everyday. FOLDER gets model, tokenizer and model card, and
FOLDER.zip the same in one file. The score of a translation is calibrated with 1,000 sentences of
the kind that the model learned, --near, and 1,000 of another kind, --far: the threshold is chosen
on the split validation, and measured on the split test. It goes into the model's generation config,
where the page finds it. FILE is Markdown for the model card: the corpora and their licenses.
"""

import argparse
import json
import shutil
from pathlib import Path

import datasets
import sacrebleu
import torch

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.loading import load_run

SENTENCES = 1000
# a translation with a lower chrF, against one reference, counts as poor
POOR = 40.0
NO_SOURCES = "Name the corpora and their licenses here before you publish the model."
CARD = """
## Training text

{sources}

## When the model is unsure

The calibrated score is the mean log-probability of a token. The page marks a translation with less
than {threshold:.2f}. Of {sentences:,} test translations {poor_below:.0%} of the marked ones are
poor, with a chrF below {chrf:.0f} against one reference, and {poor_above:.0%} of the others. The
test sentences are from {corpora}, as many from each.
"""


def scored(pipeline: TranslationPipeline, corpora: list[list[str]], split: str) -> torch.Tensor:
    """Translate sentences of a split, and return what calibration needs.

    Args:
        pipeline: Model and tokenizer.
        corpora: Datasets with their configurations.
        split: Name of the split.

    Returns:
        Mean log-probability of a token and chrF of each translation, [sentences, 2].
    """
    rows = []
    for dataset, name in corpora:
        loaded = datasets.load_dataset(dataset, name)
        if len(loaded.get(split, ())) < SENTENCES:
            raise SystemExit(
                f"{dataset} must have the split {split} with at least {SENTENCES:,} pairs, got "
                f"{', '.join(f'{one} with {len(rows):,}' for one, rows in loaded.items())}."
            )
        pairs = loaded[split].shuffle(seed=1).select(range(SENTENCES))["translation"]
        found = pipeline([pair["en"] for pair in pairs], return_scores=True, batch_size=32)
        for pair, best in zip(pairs, found, strict=True):
            tokens = best["token_log_probabilities"]
            chrf = sacrebleu.sentence_chrf(best["translation_text"], [pair["de"]]).score
            rows.append([best["log_probability"] / max(1, len(tokens)), chrf])
    return torch.tensor(rows)


def best_threshold(values: torch.Tensor, is_poor: torch.Tensor) -> float:
    """Return the threshold with the highest mean of both shares of correct answers.

    Args:
        values: Score of each translation, [N].
        is_poor: Whether it is poor, [N].

    Returns:
        The threshold: translations below it are taken for poor.
    """
    ordered = values.sort().values
    shares = [
        ((values < one)[is_poor].float().mean() + (values >= one)[~is_poor].float().mean()).item()
        for one in ordered
    ]
    return ordered[max(range(len(shares)), key=shares.__getitem__)].item()


def main() -> None:
    """Calibrate, convert and pack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="run folder")
    parser.add_argument("folder", type=Path, help="folder of the release")
    for flag in ("--near", "--far"):
        parser.add_argument(flag, nargs=2, required=flag == "--near", metavar=("DATASET", "NAME"))
    parser.add_argument("--sources", type=Path, metavar="FILE", help="corpora and licenses")
    flags = parser.parse_args()
    # read before the translations, which take minutes
    sources = NO_SOURCES if flags.sources is None else flags.sources.read_text(encoding="utf-8")
    model, tokenizer = load_run(flags.run)
    # the weights of the release are those that are calibrated
    model = model.half().float()
    pipeline = TranslationPipeline(model, tokenizer, device="cpu")
    corpora = [flags.near, *([flags.far] if flags.far else [])]
    values, chrf = scored(pipeline, corpora, "validation").unbind(1)
    threshold = best_threshold(values, chrf < POOR)
    values, chrf = scored(pipeline, corpora, "test").unbind(1)
    is_below, is_poor = values < threshold, chrf < POOR
    found = {
        "threshold": round(threshold, 4),
        "sentences": len(values),
        "marked": is_below.float().mean().item(),
        "poor_below": is_poor[is_below].float().mean().item(),
        "poor_above": is_poor[~is_below].float().mean().item(),
        "chrf": POOR,
    }
    parts = torch.stack((is_below, is_poor), 1).split(SENTENCES)
    for name, part in zip(("near", "far"), parts, strict=False):
        marked, poor = part.float().mean(0).tolist()
        found[name] = {"marked": marked, "poor": poor}
    model.generation_config.calibration = found
    model.half().save_pretrained(flags.folder)
    tokenizer.save_pretrained(flags.folder)
    card = Path(flags.run, "README.md").read_text(encoding="utf-8").rstrip("\n")
    names = " and ".join(f"`{dataset}` `{name}`" for dataset, name in corpora)
    text = f"{card}\n{CARD.format(**found, sources=sources.strip(), corpora=names)}"
    (flags.folder / "README.md").write_text(text, encoding="utf-8")
    packed = shutil.make_archive(str(flags.folder), "zip", flags.folder)
    print(json.dumps(found, indent=1))
    print(f"{packed}: {Path(packed).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
