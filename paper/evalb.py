"""Labeled bracket F1 by the rules of EVALB and its COLLINS.prm, as Table 4 has it.

A bracket counts with its label and the words it spans, after punctuation is taken out. `TOP` does
not count, ADVP and PRT are one label, and of a label only what stands before - or = is looked at.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .trees import EMPTY_TAG, TOP, Bracket, Tree

# as tags these take their words out of the sentence, as labels their brackets out of the count
DELETED = (TOP, EMPTY_TAG, ",", ":", "``", "''", ".")
EQUAL_LABELS = {"PRT": "ADVP"}


@dataclass(frozen=True)
class SentenceScore:
    """Counts of matching brackets in one sentence.

    Attributes:
        status: "valid"; "error" where there is no tree, or one over other words; "skipped" where
            nothing is left to score.
        matched: Brackets that both trees have.
        gold: Brackets of the gold tree.
        predicted: Brackets of the predicted tree.
        crossing: Predicted brackets that overlap one of the gold tree and neither holds the other.
    """

    status: str
    matched: int = 0
    gold: int = 0
    predicted: int = 0
    crossing: int = 0


@dataclass(frozen=True)
class CorpusScore:
    """Totals as EVALB prints them.

    Attributes:
        sentences: Number of all sentences.
        errors: Number of those without a tree over their words.
        skipped: Number of those with nothing to score.
        matched: Brackets that both trees have, over all sentences that count, as what follows.
        gold: Brackets of the gold trees.
        predicted: Brackets of the predicted trees.
        recall: Percentage of gold brackets that match.
        precision: Percentage of predicted brackets that match.
        f1: Harmonic mean of recall and precision, in percent.
        complete: Percentage of sentences of which all brackets match.
        crossing: Mean number of crossing brackets per sentence with a tree.
    """

    sentences: int
    errors: int
    skipped: int
    matched: int
    gold: int
    predicted: int
    recall: float
    precision: float
    f1: float
    complete: float
    crossing: float


def scored_words(tree: Tree) -> list[str]:
    """Return the words that count: all but punctuation.

    Args:
        tree: Tree of any kind.

    Returns:
        The words, in order.
    """
    return [word for word, tag in zip(tree.words, tree.tags, strict=True) if tag not in DELETED]


def scored_brackets(tree: Tree) -> list[Bracket | None]:
    """Return the brackets as EVALB compares them.

    Args:
        tree: Tree of any kind.

    Returns:
        For each bracket of the tree what is compared, with places among `scored_words`; None for
        one that does not count.
    """
    # where each place of the sentence is among the words that count
    places = [0]
    for tag in tree.tags:
        places.append(places[-1] + (tag not in DELETED))
    found = []
    for label, start, end in tree.brackets:
        bare = re.split("[-=]", label)[0]
        bracket = Bracket(EQUAL_LABELS.get(bare, bare), places[start], places[end])
        found.append(None if bare in DELETED or bracket.start == bracket.end else bracket)
    return found


def matches(gold: Tree, predicted: Tree) -> list[bool]:
    """Return which predicted brackets match; each gold bracket matches once.

    Args:
        gold: The tree as it should be.
        predicted: A tree over the same words.

    Returns:
        For each bracket of the predicted tree whether it counts and matches.
    """
    left = Counter(scored_brackets(gold))
    del left[None]
    found = []
    for bracket in scored_brackets(predicted):
        found.append(left[bracket] > 0)
        left[bracket] -= found[-1]
    return found


def score_sentence(gold: Tree, predicted: Tree | None) -> SentenceScore:
    """Compare a predicted tree with the gold tree.

    Args:
        gold: The tree as it should be.
        predicted: Its tags say which of its words are punctuation; None where a parser gave none.

    Returns:
        The counts.
    """
    gold_brackets = [bracket for bracket in scored_brackets(gold) if bracket is not None]
    if predicted is None or scored_words(gold) != scored_words(predicted):
        return SentenceScore("error", gold=len(gold_brackets))
    if not scored_words(predicted):
        return SentenceScore("skipped")
    brackets = [bracket for bracket in scored_brackets(predicted) if bracket is not None]
    crossing = sum(any(_cross(one, other) for other in gold_brackets) for one in brackets)
    matched = sum(matches(gold, predicted))
    return SentenceScore("valid", matched, len(gold_brackets), len(brackets), crossing)


def _cross(one: Bracket, other: Bracket) -> bool:
    first, second = sorted((one, other), key=lambda bracket: bracket.start)
    return first.start < second.start < first.end < second.end


def score_corpus(scores: Iterable[SentenceScore], leave_out_errors: bool = False) -> CorpusScore:
    """Sum the scores of all sentences.

    EVALB itself leaves sentences with errors out, which rewards a parser for giving no tree where
    it is unsure. Here their gold brackets count as missed, unless that is asked for.

    Args:
        scores: Scores of all sentences.
        leave_out_errors: Do as EVALB does.

    Returns:
        The totals, and what they come to.
    """
    scores = list(scores)
    statuses = Counter(score.status for score in scores)
    counted = [
        score
        for score in scores
        if score.status == "valid" or (score.status == "error" and not leave_out_errors)
    ]
    matched = sum(score.matched for score in counted)
    gold = sum(score.gold for score in counted)
    predicted = sum(score.predicted for score in counted)
    recall = 100 * matched / max(gold, 1)
    precision = 100 * matched / max(predicted, 1)
    complete = sum(
        score.status == "valid" and score.matched == score.gold == score.predicted
        for score in counted
    )
    return CorpusScore(
        sentences=len(scores),
        errors=statuses["error"],
        skipped=statuses["skipped"],
        matched=matched,
        gold=gold,
        predicted=predicted,
        recall=recall,
        precision=precision,
        # 2 r p / (r + p), without a division by nothing
        f1=200 * matched / max(gold + predicted, 1),
        complete=100 * complete / max(len(counted), 1),
        crossing=sum(score.crossing for score in counted) / max(statuses["valid"], 1),
    )
