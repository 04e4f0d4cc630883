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

LENGTH_RANGES = ((1, 10), (11, 20), (21, 30), (31, 40), (41, None))
# smallest and largest number of words of the tree in the picture, if there is such a tree
PICTURE_WORDS = (6, 16)


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


def model_sections(flags: argparse.Namespace) -> Iterator[Section]:
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
    model_name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gold: Sequence[Tree],
    search: Mapping[str, Any],
) -> Iterator[Section]:
    parsed = {
        name: parse_treebank(model, tokenizer, gold, constrained=constrained, **search)
        for name, constrained in (("free search", False), ("among trees only", True))
    }
    scores = {
        name: [
            score_sentence(tree, None if isinstance(tree_or_reason, str) else tree_or_reason)
            for tree, tree_or_reason in zip(gold, outputs, strict=True)
        ]
        for name, outputs in parsed.items()
    }
    yield _scores_section(model_name, parsed, scores)
    constrained_outputs = parsed["among trees only"]
    # a picture needs a tree, and a search with a length limit may find no tree for any sentence
    if not all(isinstance(tree_or_reason, str) for tree_or_reason in constrained_outputs):
        yield _tree_section(gold, constrained_outputs, scores["among trees only"])
    yield _length_section(gold, scores)


def _scores_section(
    model_name: str,
    parsed: dict[str, list[Tree | str]],
    scores: dict[str, list[SentenceScore]],
) -> Section:
    totals = {name: score_corpus(search_scores) for name, search_scores in scores.items()}
    totals_of_evalb = {
        name: score_corpus(search_scores, leave_out_errors=True)
        for name, search_scores in scores.items()
    }
    reasons = {
        name: Counter(
            tree_or_reason for tree_or_reason in outputs if isinstance(tree_or_reason, str)
        )
        for name, outputs in parsed.items()
    }
    tree_shares = {
        name: 100 * (1 - reasons[name].total() / len(outputs)) for name, outputs in parsed.items()
    }
    (free, constrained), num_sentences = parsed, len(parsed["free search"])
    reasons_text = ", ".join(
        f"{reason} ({frequency})" for reason, frequency in reasons[free].most_common()
    )
    our_rows = [
        [
            f"{model_name}, {name}",
            f"{num_sentences:,} sentences",
            *_score_cells(totals[name]),
            tree_share,
            totals_of_evalb[name].f1,
        ]
        for name, tree_share in tree_shares.items()
    ]
    paper_rows = [
        [f"the paper's {TRANSFORMER}, {training}", "WSJ 23", f1, *[None] * 6]
        for parser, training, f1 in TABLE_4
        if parser == TRANSFORMER
    ]
    return Section(
        name="scores",
        title="Parsing scores of the model",
        finding=f"With free search, {tree_shares[free]:.1f}% of {num_sentences:,} outputs are "
        "trees over the sentence's "
        f"words{f'; the errors of the others are {reasons_text}' if reasons_text else ''}. With "
        f"search among trees only, {tree_shares[constrained]:.1f}% are trees, and F1 changes from "
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
        rows=[*our_rows, *paper_rows],
        numbers={
            "totals": {name: asdict(total) for name, total in totals.items()},
            "malformed": {name: dict(reason_counts) for name, reason_counts in reasons.items()},
        },
    )


def _score_cells(score: CorpusScore) -> list[float]:
    return [score.f1, score.recall, score.precision, score.complete, score.crossing]


def _tree_section(
    gold: Sequence[Tree], outputs: Sequence[Tree | str], scores: Sequence[SentenceScore]
) -> Section:
    total_f1 = score_corpus(scores).f1
    sentence_f1 = [score_corpus([score]).f1 for score in scores]
    tree_indices = [
        index for index, tree_or_reason in enumerate(outputs) if not isinstance(tree_or_reason, str)
    ]
    scored_indices = [index for index in tree_indices if scores[index].status == "valid"]
    candidates = [
        index
        for index in scored_indices
        if PICTURE_WORDS[0] <= len(gold[index].words) <= PICTURE_WORDS[1]
    ]
    # the last resort is any tree: a sentence that is all punctuation has a tree but no score
    candidates = candidates or scored_indices or tree_indices
    # prefer sentences with an error, then the sentence whose F1 is closest to the total
    candidates = [index for index in candidates if sentence_f1[index] < 100] or candidates
    index = min(candidates, key=lambda candidate: abs(sentence_f1[candidate] - total_f1))
    gold_tree = gold[index]
    predicted_tree: Any = outputs[index]
    score = scores[index]
    return Section(
        name="tree",
        title="One gold tree and its prediction",
        finding=f"Sentence {index + 1}, with an F1 of {sentence_f1[index]:.1f}, close to the total "
        f"of {total_f1:.1f}: {score.matched} of {score.predicted} predicted brackets are correct; "
        f"the gold tree has {score.gold}. Brackets without a match in the other tree are red, and "
        "brackets that are not scored are grey.",
        columns=("tree", "tokens"),
        rows=[
            [title, " ".join(linearize(tree))]
            for title, tree in (("gold", gold_tree), ("predicted", predicted_tree))
        ],
        figure=tree_pair(gold_tree, predicted_tree),
        message=f"{score.matched} of {score.predicted} predicted brackets are correct "
        "(red: no match, grey: not scored)",
        numbers={"gold": str(gold_tree), "predicted": str(predicted_tree)},
    )


def _length_section(gold: Sequence[Tree], scores: dict[str, list[SentenceScore]]) -> Section:
    rows = []
    for fewest_words, most_words in LENGTH_RANGES:
        indices = [
            index
            for index, tree in enumerate(gold)
            if fewest_words <= len(tree.words)
            and (most_words is None or len(tree.words) <= most_words)
        ]
        if indices:
            f1_by_search = [
                score_corpus(search_scores[index] for index in indices).f1
                for search_scores in scores.values()
            ]
            rows.append(
                [
                    f"{fewest_words}-{most_words}" if most_words else f"{fewest_words} and more",
                    len(indices),
                    *f1_by_search,
                ]
            )
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
    short_words, _, _, short_f1 = rows[0]
    long_words, _, _, long_f1 = rows[-1]
    return Section(
        name="lengths",
        title="F1 by sentence length",
        finding=f"With search among trees only, sentences of {short_words} words have an F1 of "
        f"{short_f1:.1f}, and sentences of {long_words} words an F1 of {long_f1:.1f}. A "
        "phrase can be attached in more ways in a longer sentence, and one early error shifts all "
        "brackets after it.",
        columns=("words", "sentences", *(f"F1, {name}" for name in scores)),
        rows=rows,
        figure=figure,
        message=f"With search among trees only, F1 is {short_f1:.1f} for sentences of "
        f"{short_words} words and {long_f1:.1f} for sentences of {long_words} words",
    )
