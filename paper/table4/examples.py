"""One sentence as an example: how a tree becomes tokens, and how it is scored."""

from collections import Counter
from dataclasses import asdict

from ..evalb import score_corpus, score_sentence
from ..study import Section
from ..trees import WORD, Tree, linearize, tree_from_tokens, trees_in, walk
from .pictures import MATCHED, draw_tree, tree_figure, tree_pair

# two readings of one sentence: where is the telescope?
EXAMPLE = (
    "(S (NP (PRP We)) (VP (VBD saw) (NP (DT the) (NN moon)) "
    "(PP (IN with) (NP (DT a) (NN telescope)))) (. .))"
)
OTHER_READING = (
    "(S (NP (PRP We)) (VP (VBD saw) (NP (NP (DT the) (NN moon)) "
    "(PP (IN with) (NP (DT a) (NN telescope))))) (. .))"
)


def example(is_all: bool) -> Section:
    """A tree, the tokens that are its linearization, and the tree that comes back.

    Args:
        is_all: Whether no model follows, so that the next command is to be said.

    Returns:
        A line for each token.
    """
    tree = _tree(EXAMPLE)
    tokens = linearize(tree)
    again = tree_from_tokens(tokens, tree.words, tree.tags)
    rows, depth = [], 0
    for number, (token, (kind, item)) in enumerate(zip(tokens, walk(tree), strict=True), start=1):
        depth += {"(": 1, ")": -1, WORD: 0}[kind]
        meaning = {"(": "opens", ")": "closes", WORD: "is the word"}[kind]
        what = tree.words[item] if kind == WORD else item.label
        rows.append([number, token, f"{meaning} {what}", depth])
    figure, (axes,) = tree_figure([tree])
    draw_tree(axes, tree, [MATCHED] * len(tree.brackets))
    says = (
        f"The {len(tree.words)} words of the sentence become {len(tokens)} tokens: each bracket "
        f"opens and closes under its name, and every word is {WORD}, for the source says which it "
        "is, and parts of speech are not scored. Read back with the sentence, the tokens give "
        f"{'the same tree' if again == tree else 'another tree'}; left out, doubled or crossed, "
        "they give none, and the search can be held to those that do."
    )
    if is_all:
        says += (
            " To parse with a model: --prepare a treebank, train recipe paper-parsing or "
            "parsing-small on it, and give this command --model RUN --trees FILE."
        )
    return Section(
        name="linearized",
        title="From a tree to a sentence of brackets and back",
        says=says,
        columns=("step", "token", "what it does", "brackets open"),
        rows=rows,
        figure=figure,
    )


def rules() -> Section:
    """Show what EVALB counts, on two parses of one sentence.

    Returns:
        A line for each bracket of either reading.
    """
    gold, other = _tree(EXAMPLE), _tree(OTHER_READING)
    score = score_corpus([score_sentence(gold, other)])
    rows = []
    in_gold, in_other = Counter(gold.brackets), Counter(other.brackets)
    for bracket in sorted(in_gold | in_other, key=lambda one: (one.start, -one.end)):
        words = " ".join(gold.words[bracket.start : bracket.end])
        rows.append([bracket.label, words, bracket in in_gold, bracket in in_other])
    return Section(
        name="rules",
        title="How a tree is scored",
        says=f"A bracket is right if the gold tree has one of its label over the same words, "
        f"punctuation left out. One phrase attached elsewhere adds one bracket here: "
        f"{score.matched} of {score.predicted} predicted brackets match, precision "
        f"{score.precision:.1f}, and all {score.gold} gold brackets are found, recall "
        f"{score.recall:.1f}; F1, their harmonic mean, is {score.f1:.1f}. In the picture what the "
        "other tree lacks is red.",
        columns=("bracket", "words", "gold", "predicted"),
        rows=rows,
        figure=tree_pair(gold, other),
        numbers=asdict(score),
    )


def _tree(text: str) -> Tree:
    (tree,) = trees_in([text], "the example")
    return tree
