"""Labeled bracket F1 by the rules of EVALB and its COLLINS.prm, as in Table 4.

Brackets are compared by label and span, after punctuation is removed. `TOP` does not count, ADVP
and PRT are one label, and only the part of a label before - or = counts.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .trees import EMPTY_TAG, TOP, Bracket, Tree

# EVALB does not count words with these tags or brackets with these labels
DELETED = (TOP, EMPTY_TAG, ",", ":", "``", "''", ".")
# pairs of labels that EVALB treats as one label, the second
EQUAL_LABELS = {"PRT": "ADVP"}


@dataclass(frozen=True)
class SentenceScore:
    """Counts of matching brackets in one sentence.

    Attributes:
        status: "valid"; "error" if there is no tree, or a tree over other words; "skipped" if the
            sentence has no words that count.
        matched: Number of brackets that both trees have.
        gold: Number of brackets of the gold tree.
        predicted: Number of brackets of the predicted tree.
        crossing: Number of predicted brackets that cross a gold bracket: the two brackets overlap,
            and neither contains the other.
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
        errors: Number of sentences without a tree over their words.
        skipped: Number of sentences without words that count.
        matched: Number of brackets that both trees have, in all sentences that count.
        gold: Number of brackets of the gold trees, in the same sentences.
        predicted: Number of brackets of the predicted trees, in the same sentences.
        recall: Percentage of gold brackets that match.
        precision: Percentage of predicted brackets that match.
        f1: Harmonic mean of recall and precision, in percent.
        complete: Percentage of sentences in which all brackets match.
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
    """Return the words that count: all except punctuation and empty elements.

    Args:
        tree: Any tree.

    Returns:
        Words that count, in order.
    """
    return [word for word, tag in zip(tree.words, tree.tags, strict=True) if tag not in DELETED]


def scored_brackets(tree: Tree) -> list[Bracket | None]:
    """Return the brackets in the form that EVALB compares.

    Args:
        tree: Any tree.

    Returns:
        For each bracket of the tree, a bracket with positions in `scored_words`; None if the
        bracket does not count.
    """
    # for each position in the sentence, the number of words before it that count
    positions = [0]
    for tag in tree.tags:
        positions.append(positions[-1] + (tag not in DELETED))
    found = []
    for label, start, end in tree.brackets:
        bare = re.split("[-=]", label)[0]
        bracket = Bracket(EQUAL_LABELS.get(bare, bare), positions[start], positions[end])
        found.append(None if bare in DELETED or bracket.start == bracket.end else bracket)
    return found


def matches(gold: Tree, predicted: Tree) -> list[bool]:
    """Return which predicted brackets match a gold bracket; a gold bracket matches at most once.

    Args:
        gold: Gold tree.
        predicted: Predicted tree over the same words.

    Returns:
        For each bracket of the predicted tree, whether it counts and matches.
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
        gold: Gold tree.
        predicted: Predicted tree, with tags for its punctuation; None if there is no tree.

    Returns:
        Counts of the sentence.
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

    EVALB leaves out sentences with errors, which rewards a parser that returns no tree for hard
    sentences. Here the gold brackets of these sentences count as missed by default.

    Args:
        scores: Scores of all sentences.
        leave_out_errors: Whether to leave out sentences with errors, as EVALB does.

    Returns:
        Totals, with recall, precision and F1.
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
        # equal to 2 r p / (r + p), but without a division by zero if nothing matches
        f1=200 * matched / max(gold + predicted, 1),
        complete=100 * complete / max(len(counted), 1),
        crossing=sum(score.crossing for score in counted) / max(statuses["valid"], 1),
    )
