"""An example sentence: its tree as tokens, and the score of a second reading."""

from collections import Counter
from dataclasses import asdict

from ...drawing import wrap_text
from ..evalb import score_corpus, score_sentence
from ..study import Section
from ..trees import WORD, Tree, linearize, tree_from_tokens, trees_in, walk
from .pictures import MATCHED, draw_tree, tree_figure, tree_pair

# two readings of one sentence: who has the telescope?
EXAMPLE = (
    "(S (NP (PRP We)) (VP (VBD saw) (NP (DT the) (NN moon)) "
    "(PP (IN with) (NP (DT a) (NN telescope)))) (. .))"
)
OTHER_READING = (
    "(S (NP (PRP We)) (VP (VBD saw) (NP (NP (DT the) (NN moon)) "
    "(PP (IN with) (NP (DT a) (NN telescope))))) (. .))"
)


def example_section(has_model: bool) -> Section:
    """Show a tree and its linearization, and read the tree back from the tokens.

    Args:
        has_model: Whether the study also scores a model. If not, the text names the commands that
            train and score one.

    Returns:
        Section with a table row for each token.
    """
    tree = _tree(EXAMPLE)
    tokens = linearize(tree)
    rebuilt_tree = tree_from_tokens(tokens, tree.words, tree.tags)
    rows, depth = [], 0
    for step_number, (token, (kind, item)) in enumerate(
        zip(tokens, walk(tree), strict=True), start=1
    ):
        depth += {"(": 1, ")": -1, WORD: 0}[kind]
        verb = {"(": "opens", ")": "closes", WORD: "is the word"}[kind]
        item_name = tree.words[item] if kind == WORD else item.label
        rows.append([step_number, token, f"{verb} {item_name}", depth])
    figure, (axes,) = tree_figure([tree])
    draw_tree(axes, tree, [MATCHED] * len(tree.brackets))
    figure.supxlabel(wrap_text(figure, " ".join(tokens)), fontsize=10)
    finding = (
        f"The tree over {len(tree.words)} words becomes {len(tokens)} tokens. Each bracket has an "
        f"opening and a closing token with its label. Every word is {WORD}: the source has the "
        "words, and parts of speech are not scored. Together with the sentence, the tokens give "
        f"{'the same tree' if rebuilt_tree == tree else 'another tree'} again. If a token is "
        "missing or doubled, or if brackets cross, the tokens are not a tree. The search can be "
        "restricted to trees."
    )
    if not has_model:
        finding += (
            " To parse with a model, prepare a treebank with --prepare, train recipe paper-parsing "
            "or parsing-small on it, and run this command with --model RUN --trees FILE."
        )
    return Section(
        name="linearized",
        title="From a tree to a sequence of brackets and back",
        finding=finding,
        columns=("step", "token", "meaning", "open brackets"),
        rows=rows,
        figure=figure,
        message=f"A tree over {len(tree.words)} words becomes {len(tokens)} tokens "
        f"({WORD}: a word)",
    )


def rules_section() -> Section:
    """Score one parse of a sentence against another by the rules of EVALB.

    Returns:
        Section with a table row for each bracket of either reading.
    """
    gold, other_reading = _tree(EXAMPLE), _tree(OTHER_READING)
    score = score_corpus([score_sentence(gold, other_reading)])
    rows = []
    in_gold, in_other = Counter(gold.brackets), Counter(other_reading.brackets)
    for bracket in sorted(in_gold | in_other, key=lambda bracket: (bracket.start, -bracket.end)):
        words = " ".join(gold.words[bracket.start : bracket.end])
        rows.append([bracket.label, words, bracket in in_gold, bracket in in_other])
    return Section(
        name="rules",
        title="How a tree is scored",
        finding="A predicted bracket is correct if the gold tree has a bracket with the same label "
        "over the same words; punctuation does not count. Here one phrase is attached elsewhere, "
        f"which adds one bracket: {score.matched} of {score.predicted} predicted brackets are "
        f"correct, precision {score.precision:.1f}. All {score.gold} gold brackets are found, "
        f"recall {score.recall:.1f}; F1, their harmonic mean, is {score.f1:.1f}. In the picture, "
        "brackets without a match in the other tree are red.",
        columns=("bracket", "words", "gold", "predicted"),
        rows=rows,
        figure=tree_pair(gold, other_reading),
        message=f"{score.matched} of {score.predicted} predicted brackets are correct "
        "(red: no match)",
        numbers=asdict(score),
    )


def _tree(text: str) -> Tree:
    (tree,) = trees_in([text], "the example")
    return tree
