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
UNCOUNTED_LABELS = (TOP, EMPTY_TAG, ",", ":", "``", "''", ".")
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
    return [
        word for word, tag in zip(tree.words, tree.tags, strict=True) if tag not in UNCOUNTED_LABELS
    ]


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
        positions.append(positions[-1] + (tag not in UNCOUNTED_LABELS))
    counted_brackets = []
    for label, start, end in tree.brackets:
        bare_label = re.split("[-=]", label)[0]
        bracket = Bracket(
            EQUAL_LABELS.get(bare_label, bare_label), positions[start], positions[end]
        )
        counted_brackets.append(
            None if bare_label in UNCOUNTED_LABELS or bracket.start == bracket.end else bracket
        )
    return counted_brackets


def matches(gold: Tree, predicted: Tree) -> list[bool]:
    """Return which predicted brackets match a gold bracket; a gold bracket matches at most once.

    Args:
        gold: Gold tree.
        predicted: Predicted tree over the same words.

    Returns:
        For each bracket of the predicted tree, whether it counts and matches.
    """
    unmatched = Counter(scored_brackets(gold))
    del unmatched[None]
    is_match = []
    for bracket in scored_brackets(predicted):
        is_match.append(unmatched[bracket] > 0)
        unmatched[bracket] -= is_match[-1]
    return is_match


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
    predicted_brackets = [bracket for bracket in scored_brackets(predicted) if bracket is not None]
    crossing = sum(
        any(_cross(bracket, gold_bracket) for gold_bracket in gold_brackets)
        for bracket in predicted_brackets
    )
    matched = sum(matches(gold, predicted))
    return SentenceScore("valid", matched, len(gold_brackets), len(predicted_brackets), crossing)


def _cross(left: Bracket, right: Bracket) -> bool:
    first, second = sorted((left, right), key=lambda bracket: bracket.start)
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
    counted_scores = [
        score
        for score in scores
        if score.status == "valid" or (score.status == "error" and not leave_out_errors)
    ]
    matched = sum(score.matched for score in counted_scores)
    gold = sum(score.gold for score in counted_scores)
    predicted = sum(score.predicted for score in counted_scores)
    recall = 100 * matched / max(gold, 1)
    precision = 100 * matched / max(predicted, 1)
    num_complete = sum(
        score.status == "valid" and score.matched == score.gold == score.predicted
        for score in counted_scores
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
        complete=100 * num_complete / max(len(counted_scores), 1),
        crossing=sum(score.crossing for score in counted_scores) / max(statuses["valid"], 1),
    )
