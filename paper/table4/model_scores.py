"""Scores of a trained model beside the paper's, with free and with constrained search."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drawing import new_figure
from ..evalb import CorpusScore, SentenceScore, score_corpus, score_sentence
from ..parsing import parse
from ..study import Section
from ..trained import load_trained
from ..trees import Tree, clean, linearize, malformation, read_trees, tree_from_tokens
from .paper_scores import TABLE_4, TRANSFORMER
from .pictures import MATCHED, NOT_SCORED, tree_pair

LENGTHS = ((1, 10), (11, 20), (21, 30), (31, 40), (41, None))
# smallest and largest number of words of the tree in the picture, if there is such a tree
SHOWN_WORDS = (6, 16)


def parse_treebank(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gold: Sequence[Tree],
    *,
    constrained: bool,
    **search: Any,
) -> list[Tree | str]:
    """Parse the sentences of a treebank.

    Args:
        model: Model trained on trees.
        tokenizer: Tokenizer of the model.
        gold: Gold trees. The model reads only the words; the tags are copied to the parsed trees,
            because scoring finds punctuation by its tags.
        constrained: Whether to restrict the search to trees.
        search: Search settings, as in `parse`.

    Returns:
        For each sentence its tree, or the reason why the output is not a tree.

    Raises:
        ValueError: If the model was not trained on trees.
    """
    outputs = tqdm(
        parse(model, tokenizer, (tree.words for tree in gold), constrained=constrained, **search),
        desc=f"parsing, {'constrained' if constrained else 'free'}",
        total=len(gold),
        unit=" sentences",
        disable=None,
    )
    return [
        malformation(tokens, len(tree.words)) or tree_from_tokens(tokens, tree.words, tree.tags)
        for tree, tokens in zip(gold, outputs, strict=True)
    ]


def score_treebank(gold: Sequence[Tree], parsed: Sequence[Tree | str]) -> list[SentenceScore]:
    """Score the output of `parse_treebank`.

    Args:
        gold: Gold trees.
        parsed: For each sentence its tree, or the reason why the output is not a tree.

    Returns:
        Score of each sentence.
    """
    return [
        score_sentence(tree, None if isinstance(found, str) else found)
        for tree, found in zip(gold, parsed, strict=True)
    ]


def results(flags: argparse.Namespace) -> Iterator[Section]:
    """Score the parses of a trained model, with a free search and one constrained to trees.

    Args:
        flags: Flags that `add_flags` declares.

    Returns:
        Sections with the scores, one tree, and F1 by length. Trees and model are read by this call;
        the search runs when the first section is requested.

    Raises:
        ValueError: If the model or the trees cannot be read.
    """
    trees = (tree for tree in map(clean, read_trees(flags.trees)) if tree is not None)
    gold = list(islice(trees, flags.num_sentences or None))
    if not gold:
        raise ValueError(f"trees must hold at least one tree, got none in {flags.trees}.")
    model, tokenizer = load_trained(flags.model, flags.trust_remote_code)
    search = {"batch_size": flags.batch_size}
    if flags.num_beams is not None:
        search["num_beams"] = flags.num_beams
    return _result_sections(Path(flags.model).name, model, tokenizer, gold, search)


def _result_sections(
    run: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gold: Sequence[Tree],
    search: Mapping[str, Any],
) -> Iterator[Section]:
    parsed = {
        name: parse_treebank(model, tokenizer, gold, constrained=constrained, **search)
        for name, constrained in (("free search", False), ("among trees only", True))
    }
    scores = {name: score_treebank(gold, found) for name, found in parsed.items()}
    yield _scores_section(run, parsed, scores)
    constrained = parsed["among trees only"]
    # a picture needs a tree, and a search with a length limit may find no tree for any sentence
    if not all(isinstance(found, str) for found in constrained):
        yield _tree_section(gold, constrained, scores["among trees only"])
    yield _length_section(gold, scores)


def _scores_section(
    model: str,
    parsed: dict[str, list[Tree | str]],
    scores: dict[str, list[SentenceScore]],
) -> Section:
    totals = {name: score_corpus(found) for name, found in scores.items()}
    lenient = {name: score_corpus(found, leave_out_errors=True) for name, found in scores.items()}
    reasons = {
        name: Counter(one for one in found if isinstance(one, str))
        for name, found in parsed.items()
    }
    shares = {
        name: 100 * (1 - reasons[name].total() / len(found)) for name, found in parsed.items()
    }
    (free, constrained), count = parsed, len(parsed["free search"])
    lacks = ", ".join(f"{reason} ({number})" for reason, number in reasons[free].most_common())
    ours = [
        [
            f"{model}, {name}",
            f"{count:,} sentences",
            *_numbers(totals[name]),
            share,
            lenient[name].f1,
        ]
        for name, share in shares.items()
    ]
    papers = [
        [f"the paper's {TRANSFORMER}, {training}", "WSJ 23", f1, *[None] * 6]
        for parser, training, f1 in TABLE_4
        if parser == TRANSFORMER
    ]
    return Section(
        name="scores",
        title="Parsing scores of the model",
        finding=f"With free search, {shares[free]:.1f}% of {count:,} outputs are trees over the "
        f"sentence's words{f'; the errors of the others are {lacks}' if lacks else ''}. With "
        f"search among trees only, {shares[constrained]:.1f}% are trees, and F1 changes from "
        f"{totals[free].f1:.2f} to {totals[constrained].f1:.2f}. If an output is not a tree, all "
        "gold brackets of its sentence count as missed. EVALB ignores these sentences; the last "
        "column is F1 without them. With another treebank or model size than the paper's, the "
        "scores are not comparable; the paper's rows only show the scale.",
        columns=(
            "parser",
            "test set",
            "F1",
            "recall",
            "precision",
            "complete %",
            "crossing",
            "trees %",
            "F1, EVALB",
        ),
        rows=[*ours, *papers],
        numbers={
            "totals": {name: asdict(total) for name, total in totals.items()},
            "malformed": {name: dict(found) for name, found in reasons.items()},
        },
    )


def _numbers(score: CorpusScore) -> list[float]:
    return [score.f1, score.recall, score.precision, score.complete, score.crossing]


def _tree_section(
    gold: Sequence[Tree], parsed: Sequence[Tree | str], scores: Sequence[SentenceScore]
) -> Section:
    whole = score_corpus(scores).f1
    each = [score_corpus([score]).f1 for score in scores]
    trees = [index for index, found in enumerate(parsed) if not isinstance(found, str)]
    valid = [index for index in trees if scores[index].status == "valid"]
    fits = [index for index in valid if SHOWN_WORDS[0] <= len(gold[index].words) <= SHOWN_WORDS[1]]
    # the last resort is any tree: a sentence that is all punctuation has a tree but no score
    fits = fits or valid or trees
    # prefer sentences with an error, then the sentence whose F1 is closest to the total
    fits = [index for index in fits if each[index] < 100] or fits
    index = min(fits, key=lambda one: abs(each[one] - whole))
    tree = gold[index]
    found: Any = parsed[index]
    score = scores[index]
    return Section(
        name="tree",
        title="One gold tree and its prediction",
        finding=f"Sentence {index + 1}, with an F1 of {each[index]:.1f}, close to the total of "
        f"{whole:.1f}: {score.matched} of {score.predicted} predicted brackets are correct; the "
        f"gold tree has {score.gold}. Brackets without a match in the other tree are red, and "
        "brackets that are not scored are grey.",
        columns=("tree", "tokens"),
        rows=[
            [title, " ".join(linearize(shown))]
            for title, shown in (("gold", tree), ("predicted", found))
        ],
        figure=tree_pair(tree, found),
        message=f"{score.matched} of {score.predicted} predicted brackets are correct "
        "(red: no match, grey: not scored)",
        numbers={"gold": str(tree), "predicted": str(found)},
    )


def _length_section(gold: Sequence[Tree], scores: dict[str, list[SentenceScore]]) -> Section:
    rows = []
    for least, most in LENGTHS:
        indices = [
            index
            for index, tree in enumerate(gold)
            if least <= len(tree.words) and (most is None or len(tree.words) <= most)
        ]
        if indices:
            f1 = [score_corpus(found[index] for index in indices).f1 for found in scores.values()]
            rows.append([f"{least}-{most}" if most else f"{least} and more", len(indices), *f1])
    figure, axes = new_figure(6.5, 3.6)
    for column, (name, color) in enumerate(
        zip(scores, (NOT_SCORED, MATCHED), strict=True), start=2
    ):
        axes.plot([row[column] for row in rows], marker="o", label=name, color=color)
    axes.set_xticks(range(len(rows)), [f"{row[0]}\n({row[1]})" for row in rows])
    axes.set_xlabel("words per sentence (number of sentences)")
    axes.set_ylabel("F1 of the labeled brackets, in %")
    axes.grid(alpha=0.3)
    axes.legend()
    shortest, longest = rows[0], rows[-1]
    return Section(
        name="lengths",
        title="F1 by sentence length",
        finding=f"With search among trees only, sentences of {shortest[0]} words have an F1 of "
        f"{shortest[3]:.1f}, and sentences of {longest[0]} words an F1 of {longest[3]:.1f}. A "
        "phrase can be attached in more ways in a longer sentence, and one early error shifts all "
        "brackets after it.",
        columns=("words", "sentences", *(f"F1, {name}" for name in scores)),
        rows=rows,
        figure=figure,
        message=f"With search among trees only, F1 is {shortest[3]:.1f} for sentences of "
        f"{shortest[0]} words and {longest[3]:.1f} for sentences of {longest[0]} words",
    )
