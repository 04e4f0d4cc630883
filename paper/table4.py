"""Section 6.3, Table 4: English constituency parsing, which is translation into brackets."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drawing import new_figure
from .evalb import (
    CorpusScore,
    SentenceScore,
    matches,
    score_corpus,
    score_sentence,
    scored_brackets,
)
from .parsing import parse, prepare_treebank
from .study import Section
from .trained import add_model_flag, load_trained
from .trees import (
    WORD,
    Bracket,
    Tree,
    clean,
    linearize,
    malformation,
    read_trees,
    tree_from_tokens,
    trees_in,
    walk,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# parser, training, F1 on section 23 of the Wall Street Journal
TABLE_4 = (
    ("Vinyals et al. 2014", "WSJ only", 88.3),
    ("Petrov et al. 2006", "WSJ only", 90.4),
    ("Zhu et al. 2013", "WSJ only", 90.4),
    ("Dyer et al. 2016", "WSJ only", 91.7),
    ("Transformer (4 layers)", "WSJ only", 91.3),
    ("Zhu et al. 2013", "semi-supervised", 91.3),
    ("Huang & Harper 2009", "semi-supervised", 91.3),
    ("McClosky et al. 2006", "semi-supervised", 92.1),
    ("Vinyals et al. 2014", "semi-supervised", 92.1),
    ("Transformer (4 layers)", "semi-supervised", 92.7),
    ("Luong et al. 2015", "multi-task", 93.0),
    ("Dyer et al. 2016", "generative", 93.3),
)
TRANSFORMER = "Transformer (4 layers)"
# two readings of one sentence: where is the telescope?
EXAMPLE = (
    "(S (NP (PRP We)) (VP (VBD saw) (NP (DT the) (NN moon)) "
    "(PP (IN with) (NP (DT a) (NN telescope)))) (. .))"
)
OTHER_READING = (
    "(S (NP (PRP We)) (VP (VBD saw) (NP (NP (DT the) (NN moon)) "
    "(PP (IN with) (NP (DT a) (NN telescope))))) (. .))"
)
LENGTHS = ((1, 10), (11, 20), (21, 30), (31, 40), (41, None))
# words of a tree that fits a picture
SHOWN_WORDS = (6, 16)
MATCHED, WRONG, NOT_SCORED = "#2a6f97", "#c1121f", "#8d99ae"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked of this study.

    Args:
        parser: Of the command line.
    """
    group = parser.add_argument_group("prepare a treebank, to train on with recipe paper-parsing")
    group.add_argument(
        "--prepare", metavar="FOLDER", type=Path, help="for train.en, train.tree and so on"
    )
    for split, what in (
        ("train", "to train on"),
        ("validation", "to validate with; the last of those to train on if not given"),
        ("test", "to evaluate with"),
    ):
        group.add_argument(
            f"--{split}",
            metavar="TREES",
            nargs="+",
            default=[],
            help=f"bracketed files or folders {what}",
        )
    group = parser.add_argument_group("parse with a trained model, and score")
    add_model_flag(group, default=None)
    group.add_argument(
        "--trees", metavar="TREES", nargs="+", help="bracketed files or folders: the gold trees"
    )
    group.add_argument(
        "--num_sentences", type=int, default=50, help="the first so many; 0: all (%(default)s)"
    )
    group.add_argument("--num_beams", type=int, help="beam size; the model's own if not given")
    group.add_argument(
        "--batch_size", type=int, default=32, help="sentences at a time (%(default)s)"
    )


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Table 4; how a tree becomes a sentence and is scored; and how a model of ours parses.

    Args:
        flags: As `add_flags` declares them.

    Yields:
        One section for a treebank that is prepared; else three, and three more with a model.

    Raises:
        ValueError: If a flag lacks another, or a treebank or model cannot be read.
    """
    _refuse_halves(flags)
    if flags.prepare is not None:
        yield preparation(flags.prepare, flags.train, flags.validation, flags.test)
        return
    # what cannot be read is refused before anything is shown
    found = iter(()) if flags.model is None else results(flags)
    yield published()
    yield example(is_all=flags.model is None)
    yield rules()
    yield from found


def _refuse_halves(flags: argparse.Namespace):
    if flags.prepare is not None and not flags.train:
        raise ValueError("train must be given with prepare, got none.")
    if flags.prepare is None and (flags.train or flags.validation or flags.test):
        raise ValueError("prepare must be given with train, validation and test, got none.")
    if (flags.model is None) != (flags.trees is None):
        raise ValueError("model and trees must be given together, got one.")
    if flags.prepare is not None and flags.model is not None:
        raise ValueError("prepare must be alone, for a model is trained after it, got model too.")
    if flags.num_sentences < 0:
        raise ValueError(f"num_sentences must not be negative, got {flags.num_sentences}.")
    if flags.batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {flags.batch_size}.")


def preparation(
    folder: Path, train: Sequence[str], validation: Sequence[str], test: Sequence[str]
) -> Section:
    """Write a treebank as text to train on, and say what is in it.

    Args:
        folder: Gets `train.en`, `train.tree` and so on.
        train: Files or folders of bracketed trees.
        validation: The same; taken from those to train on if empty.
        test: The same.

    Returns:
        The counts.

    Raises:
        ValueError: If a file cannot be read or holds no tree.
    """
    counts = prepare_treebank(folder, train, validation, test)
    total = sum(counts.values(), Counter())
    tags, empty = total["function tags"], total["empty elements"]
    names = list(dict.fromkeys(name for found in counts.values() for name in found))
    return Section(
        name="treebank",
        title="The treebank as pairs of sentences",
        says=f"{folder} has a line for each of {total['trees']:,} sentences and a line for its "
        f"tree. Parsers are scored without traces and function tags: {tags:,} tags and {empty:,} "
        "empty elements are gone. To train: `vanilla-transformer train paper-parsing --dataset "
        f"{folder}`, or parsing-small on processors.",
        columns=("split", *names),
        rows=[[split, *(found[name] for name in names)] for split, found in counts.items()],
    )


def published() -> Section:
    """Table 4 as it stands in the paper.

    Returns:
        Its rows and their bars.
    """
    figure, axes = new_figure(7.0, 4.4)
    rows = TABLE_4[::-1]
    colors = [MATCHED if parser == TRANSFORMER else NOT_SCORED for parser, _, _ in rows]
    bars = axes.barh(range(len(rows)), [f1 for *_, f1 in rows], color=colors)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_yticks(range(len(rows)), [f"{parser}, {training}" for parser, training, _ in rows])
    axes.set_xlim(86, 94.5)
    axes.set_xlabel("labeled bracket F1 on section 23 (the axis starts at 86)")
    own = {training: f1 for parser, training, f1 in TABLE_4 if parser == TRANSFORMER}
    others = [f1 for parser, training, f1 in TABLE_4 if training in own and parser != TRANSFORMER]
    beaten = sum(
        own[training] > f1
        for parser, training, f1 in TABLE_4
        if training in own and parser != TRANSFORMER
    )
    return Section(
        name="published",
        title="What the paper reports",
        says="A parser is a translator into brackets: nothing in the model was made for trees. The "
        f"paper's {TRANSFORMER} still beats {beaten} of the {len(others)} parsers with the same "
        f"training data, at {own['WSJ only']} F1 with 40,000 trees and {own['semi-supervised']} "
        "with more text that another parser has parsed. These numbers are the paper's own.",
        columns=("parser", "training", "F1 on WSJ 23"),
        rows=TABLE_4,
        figure=figure,
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
    figure, (axes,) = _tree_figure([tree])
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
    """What EVALB counts, on two readings of one sentence.

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


def parse_treebank(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gold: Sequence[Tree],
    *,
    constrained: bool,
    **search: int | float | None,
) -> list[Tree | str]:
    """Parse the sentences of a treebank.

    Args:
        model: Trained on trees.
        tokenizer: Its own.
        gold: The treebank; its tags say which words are punctuation, nothing else of it is used.
        constrained: Search among trees only.
        search: As in `parse`.

    Returns:
        For each sentence its tree, or why what the model gave is none.

    Raises:
        ValueError: If the model is none of trees.
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
    """Score what `parse_treebank` gives.

    Args:
        gold: The treebank.
        parsed: For each sentence its tree, or why there is none.

    Returns:
        A score for each sentence.
    """
    return [
        score_sentence(tree, None if isinstance(found, str) else found)
        for tree, found in zip(gold, parsed, strict=True)
    ]


def results(flags: argparse.Namespace) -> Iterator[Section]:
    """How a trained model parses, searching freely and among trees only.

    Args:
        flags: As `add_flags` declares them.

    Returns:
        The sections: the scores beside the paper's; one tree; F1 by length. Trees and model are
        read at once, and searched when the first is asked for.

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
    yield _tree_section(gold, parsed["among trees only"], scores["among trees only"])
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
        title="How the model parses",
        says=f"Searching freely, {shares[free]:.1f}% of {count:,} outputs are trees over the "
        f"sentence's words{f'; the others have {lacks}' if lacks else ''}. Held to trees, "
        f"{shares[constrained]:.1f}% are, and F1 goes from {totals[free].f1:.2f} to "
        f"{totals[constrained].f1:.2f}. A sentence without a tree has all its brackets missed; "
        "EVALB leaves it out, and so does the last column. Another treebank than the "
        "paper's, or a smaller model, is another task: the paper's rows are for the scale.",
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
    fits = [
        index
        for index, (tree, score) in enumerate(zip(gold, scores, strict=True))
        if SHOWN_WORDS[0] <= len(tree.words) <= SHOWN_WORDS[1] and score.status == "valid"
    ]
    if not fits:
        # of punctuation alone there is nothing to score
        fits = [index for index, score in enumerate(scores) if score.status == "valid"] or [0]
    # neither the best nor the worst, and one to learn from
    fits = [index for index in fits if each[index] < 100] or fits
    index = min(fits, key=lambda place: abs(each[place] - whole))
    tree, found = gold[index], parsed[index]
    score = scores[index]
    return Section(
        name="tree",
        title="One tree, gold and predicted",
        says=f"Sentence {index + 1}, whose F1 of {each[index]:.1f} is near the whole's "
        f"{whole:.1f}: {score.matched} of {score.predicted} predicted brackets are right, of "
        f"{score.gold} gold ones. Red is what the other tree lacks, grey what does not count.",
        columns=("tree", "tokens"),
        rows=[
            [title, " ".join(linearize(shown))]
            for title, shown in (("gold", tree), ("predicted", found))
        ],
        figure=tree_pair(tree, found),
        numbers={"gold": str(tree), "predicted": str(found)},
    )


def _length_section(gold: Sequence[Tree], scores: dict[str, list[SentenceScore]]) -> Section:
    rows = []
    for least, most in LENGTHS:
        places = [
            index
            for index, tree in enumerate(gold)
            if least <= len(tree.words) and (most is None or len(tree.words) <= most)
        ]
        if places:
            f1 = [score_corpus(found[index] for index in places).f1 for found in scores.values()]
            rows.append([f"{least}-{most}" if most else f"{least} and more", len(places), *f1])
    figure, axes = new_figure(6.5, 3.6)
    for column, (name, color) in enumerate(
        zip(scores, (NOT_SCORED, MATCHED), strict=True), start=2
    ):
        axes.plot([row[column] for row in rows], marker="o", label=name, color=color)
    axes.set_xticks(range(len(rows)), [f"{row[0]}\n({row[1]})" for row in rows])
    axes.set_xlabel("words of the sentence (number of sentences)")
    axes.set_ylabel("F1")
    axes.grid(alpha=0.3)
    axes.legend()
    shortest, longest = rows[0], rows[-1]
    return Section(
        name="lengths",
        title="F1 by the length of the sentence",
        says=f"Among trees only, sentences of {shortest[0]} words have an F1 of {shortest[3]:.1f}, "
        f"those of {longest[0]} words {longest[3]:.1f}. A longer sentence has more places where a "
        "phrase can be attached, and one slip early in the brackets moves what follows.",
        columns=("words", "sentences", *(f"F1, {name}" for name in scores)),
        rows=rows,
        figure=figure,
    )


def match_colors(tree: Tree, against: Tree) -> list[str]:
    """A color for each bracket: whether another tree has it too.

    Args:
        tree: The tree to draw.
        against: A tree over the same words.

    Returns:
        A color for each bracket, another one for those that are not scored.
    """
    return [
        NOT_SCORED if bracket is None else MATCHED if is_match else WRONG
        for bracket, is_match in zip(scored_brackets(tree), matches(against, tree), strict=True)
    ]


def tree_pair(gold: Tree, predicted: Tree) -> "Figure":
    """Draw two trees over one sentence, what either lacks of the other in red.

    Args:
        gold: The upper one.
        predicted: The lower one.

    Returns:
        The picture.
    """
    figure, axes = _tree_figure([gold, predicted])
    draw_tree(axes[0], gold, match_colors(gold, predicted))
    draw_tree(axes[1], predicted, match_colors(predicted, gold))
    axes[0].set_title("gold", loc="left")
    axes[1].set_title("predicted", loc="left")
    # a level is as high in both
    highest = max(one.get_ylim()[1] for one in axes)
    for one in axes:
        one.set_ylim(top=highest)
    return figure


def _tree_figure(trees: Sequence[Tree]) -> tuple["Figure", Sequence["Axes"]]:
    width = max(sum(_word_widths(tree)) for tree in trees)
    levels = max(max(_heights(tree)) for tree in trees) + 2
    size = (max(4.0, 0.105 * width), 0.42 * levels * len(trees))
    figure, axes = new_figure(*size, rows=len(trees))
    return figure, axes.flat if len(trees) > 1 else [axes]


def _word_widths(tree: Tree) -> list[int]:
    return [max(len(word), 3) + 2 for word in tree.words]


def _heights(tree: Tree) -> list[int]:
    """How many levels there are below each bracket."""
    heights = [1] * len(tree.brackets)
    inside: list[int] = []
    opened = 0
    for kind, _ in walk(tree):
        if kind == "(":
            inside.append(opened)
            opened += 1
        elif kind == ")":
            index = inside.pop()
            if inside:
                heights[inside[-1]] = max(heights[inside[-1]], heights[index] + 1)
    return heights


def draw_tree(axes: "Axes", tree: Tree, colors: Sequence[str]) -> None:
    """Draw a tree over its words.

    Args:
        axes: Where to.
        tree: The tree.
        colors: Of each bracket.
    """
    # a price is no formula
    text = {"ha": "center", "va": "center", "fontsize": 9, "parse_math": False}
    heights = _heights(tree)
    widths = _word_widths(tree)
    right = 0
    inside: list[tuple[int, Bracket, list[tuple[float, float]]]] = []
    opened = 0
    for kind, item in walk(tree):
        if kind == "(":
            inside.append((opened, item, []))
            opened += 1
            continue
        if kind == WORD:
            spot = (right + widths[item] / 2, 0.0)
            right += widths[item]
            axes.text(*spot, tree.words[item], **text)
        else:
            index, bracket, below = inside.pop()
            spot = ((below[0][0] + below[-1][0]) / 2, float(heights[index]))
            # a line down to each, from a bar over all: none crosses what is beside it
            line = {"color": colors[index], "lw": 0.9}
            bar = spot[1] - 0.5
            axes.plot([below[0][0], below[-1][0]], [bar, bar], **line)
            axes.plot([spot[0]] * 2, [spot[1] - 0.25, bar], **line)
            for x, y in below:
                axes.plot([x, x], [bar, y + 0.3], **line)
            axes.text(*spot, bracket.label, color=colors[index], fontweight="bold", **text)
        if inside:
            inside[-1][2].append(spot)
    axes.set_xlim(0, right)
    axes.set_ylim(-0.6, max(heights) + 0.6)
    axes.axis("off")
