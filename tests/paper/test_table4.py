"""Section 6.3 and Table 4: linearized trees, their scores, and a search among trees only."""

import gzip
import itertools
import json
import lzma
import random
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PYEVALB.parser import create_from_bracket_string
from PYEVALB.scorer import Scorer
from train_toys import toy_model, toy_settings

from vanilla_transformer.cli import main
from vanilla_transformer.paper.evalb import score_corpus, score_sentence
from vanilla_transformer.paper.parsing import TreeConstraint, parse, prepare_treebank
from vanilla_transformer.paper.table4 import model_scores
from vanilla_transformer.paper.trees import (
    EMPTY_BRACKET,
    MISMATCHED_BRACKET,
    SECOND_TREE,
    TOO_FEW_WORDS,
    TOO_MANY_WORDS,
    UNCLOSED_BRACKET,
    UNKNOWN_TOKEN,
    WORD_OUTSIDE,
    Bracket,
    Tree,
    clean,
    linearize,
    malformation,
    read_trees,
    tree_from_tokens,
    trees_in,
)
from vanilla_transformer.tokenization.learning import learn_vocabulary
from vanilla_transformer.train.config import TrainConfig
from vanilla_transformer.train.loop import train
from vanilla_transformer.train.recipe import load_config
from vanilla_transformer.train.vocabulary import prepare_tokenizer

LABELS = ["S", "NP", "VP", "ADVP", "PRT", "TOP", "NP-SBJ=2"]
TAGS = ["NN", "VB", ",", ".", "``"]
hundreds = settings(max_examples=100, deadline=None, database=None)


@st.composite
def structures(draw, num_words, labels=LABELS):
    """Draw brackets over this number of words."""
    brackets = []

    def fill(start, end):
        chain = draw(st.lists(st.sampled_from(labels), min_size=1, max_size=2))
        brackets.extend(Bracket(label, start, end) for label in chain)
        if end - start < 2:
            return
        cuts = sorted(draw(st.sets(st.integers(start + 1, end - 1), max_size=3)))
        for first, last in itertools.pairwise([start, *cuts, end]) if cuts else []:
            if draw(st.booleans()):
                fill(first, last)

    fill(0, num_words)
    return tuple(brackets)


@st.composite
def tree_pairs(draw, labels=LABELS, tags=TAGS):
    """Draw two trees over one sentence."""
    size = draw(st.integers(1, 9))
    words = tuple(f"w{index}" for index in range(size))
    drawn = tuple(draw(st.lists(st.sampled_from(tags), min_size=size, max_size=size)))
    return tuple(Tree(words, drawn, draw(structures(size, labels))) for _ in range(2))


def tree_of(text: str) -> Tree:
    (tree,) = trees_in([text], "text")
    return tree


def test_a_tree_is_written_as_section_6_3s_models_read_it():
    tree = tree_of("(S (NP (DT The) (NN cat)) (VP (VBZ sleeps)) (. .))")
    assert tree.words == ("The", "cat", "sleeps", ".")
    assert tree.brackets == (Bracket("S", 0, 4), Bracket("NP", 0, 2), Bracket("VP", 2, 3))
    assert " ".join(linearize(tree)) == "(S (NP XX XX )NP (VP XX )VP XX )S"


@hundreds
@given(pair=tree_pairs())
def test_a_tree_comes_back_from_its_tokens_and_from_its_text(pair):
    for tree in pair:
        tokens = linearize(tree)
        assert len(tokens) == len(tree.words) + 2 * len(tree.brackets)
        assert malformation(tokens, len(tree.words)) is None
        assert tree_from_tokens(tokens, tree.words, tree.tags) == tree
        assert tree_of(str(tree)) == tree


@hundreds
@given(pair=tree_pairs(), index=st.integers(0, 10**6))
def test_no_tree_survives_a_token_lost_or_doubled(pair, index):
    tree = pair[0]
    tokens = linearize(tree)
    index %= len(tokens)
    for broken in (
        tokens[:index] + tokens[index + 1 :],
        tokens[: index + 1] + tokens[index:],
    ):
        assert malformation(broken, len(tree.words)) is not None
        with pytest.raises(ValueError, match="tokens must be a tree over"):
            tree_from_tokens(broken, tree.words, tree.tags)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ("(S XX the )S", UNKNOWN_TOKEN),
        ("(S XX ( )S", UNKNOWN_TOKEN),
        ("XX XX", WORD_OUTSIDE),
        (")S (S XX XX", MISMATCHED_BRACKET),
        ("(S (NP XX )S )NP", MISMATCHED_BRACKET),
        ("(S (NP )NP XX XX )S", EMPTY_BRACKET),
        ("(S XX )S (S XX )S", SECOND_TREE),
        ("(S XX )S XX", SECOND_TREE),
        ("(S XX XX", UNCLOSED_BRACKET),
        ("(S XX )S", TOO_FEW_WORDS),
        ("", UNKNOWN_TOKEN),
        ("(S XX XX XX )S", TOO_MANY_WORDS),
        ("(S XX XX )S", None),
    ],
)
def test_malformed_tokens_have_a_reason(tokens, reason):
    assert malformation(tokens.split(" "), 2) == reason


def test_trees_are_read_however_they_are_laid_out(tmp_path):
    flat = "(S (NP (NN cat)) (VP (VB runs)))"
    spread = "( (S\n  (NP\t(NN cat) )\r\n\n  (VP (VB runs))) )"
    texts = {
        "a/1.mrg": spread,
        "a/2.mrg.gz": f"{flat} {flat}\n{flat}",
        "a/3.tree.xz": "\ufeff" + spread + spread,
        "a/notes.txt": "no tree",
        "one": flat,
    }
    (tmp_path / "a").mkdir()
    for name, text in texts.items():
        opener = {"gz": gzip.open, "xz": lzma.open}.get(name.rsplit(".")[-1], open)
        with opener(tmp_path / name, "wb") as file:
            file.write(text.encode())
    trees = [clean(tree) for tree in read_trees([tmp_path / "a", tmp_path / "one"])]
    assert trees == [tree_of(flat)] * 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(S (NN a))\n(S (NP (NN b))\n(S (NN c))", "line 2 must have balanced .* got 1 still open"),
        ("(S (NN a))\n)", r"line 2 must have balanced brackets, got '\)' outside"),
        ("(S (NN a)) word", "line 1 must have balanced .* got 'word' outside all brackets"),
        ("(S (NN a)\n(NP ))", r"line 2 must not have empty brackets, got \(NP\)"),
        ("(S word (NN a))", "line 1 must have either words or brackets .* got 'word' beside"),
        ("(S (NN a)\n word)", "line 2 must have either words or brackets .* got 'word' beside"),
    ],
)
def test_text_that_is_no_tree_is_refused_with_its_file_and_line(tmp_path, text, message):
    path = tmp_path / "bad.mrg"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"bad\.mrg {message}"):
        list(read_trees([path]))


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path):
    (tmp_path / "cut.xz").write_bytes(lzma.compress(b"(S (NN a))" * 99)[:-20])
    with pytest.raises(ValueError, match=r"cut\.xz cannot be read to its end"):
        list(read_trees([tmp_path / "cut.xz"]))
    with pytest.raises(ValueError, match="none cannot be read: No such file"):
        list(read_trees([tmp_path / "none"]))
    with pytest.raises(ValueError, match=r"must have files that end in \.mrg.* got none"):
        list(read_trees([tmp_path]))


def test_elements_that_are_not_scored_are_removed_and_counted():
    text = (
        "( (S (NP-SBJ-1 (-NONE- *)) (VP (VBD saw) (SBAR=2 (-NONE- 0) (S (-NONE- *T*)))"
        " (NP (NP (DT a) (NN New York)) (-LRB- -LRB-))) (. .)) )"
    )
    counts = Counter()
    tree = clean(tree_of(text), counts)
    assert str(tree) == (
        "(S (VP (VBD saw) (NP (NP (DT a) (NN New) (NN York)) (-LRB- -LRB-))) (. .))"
    )
    assert +counts == Counter(
        {"empty elements": 3, "function tags": 2, "leaves of several words": 1}
    )
    assert clean(tree_of("(S (NP (-NONE- *)))")) is None


def test_the_outermost_bracket_always_holds_all_words():
    assert str(clean(tree_of("(ROOT (S (NN a)))"))) == "(S (NN a))"
    assert str(clean(tree_of("( (TOP (S (NN a))))"))) == "(S (NN a))"
    assert str(clean(tree_of("( (S (NN a)) (. .))"))) == "(TOP (S (NN a)) (. .))"
    assert str(clean(tree_of("(NN a)"))) == "(TOP (NN a))"
    # a no-break space is part of a word
    assert clean(tree_of("(NP (NN a\u00a0b))")).words == ("a\u00a0b",)


GOLD = "(S (NP (PRP We)) (VP (VBD saw) (NP (DT the) (NN moon)) (PP (IN with) (NP (NN it)))) (. .))"


@pytest.mark.parametrize(
    ("gold", "predicted", "matched", "in_gold", "in_predicted", "crossing"),
    [
        # the same tree, under a root that does not count
        (GOLD, f"(TOP {GOLD})", 6, 6, 6, 0),
        # a label is part of a bracket
        (GOLD, GOLD.replace("(PP", "(SBAR"), 5, 6, 6, 0),
        # function tags are not, in either tree
        (GOLD, GOLD.replace("(NP (PRP", "(NP-SBJ=1 (PRP"), 6, 6, 6, 0),
        # ADVP and PRT are one label
        (
            "(VP (VB go) (PRT (RP up)) (ADVP (RB now)))",
            "(VP (VB go) (ADVP (RP up)) (PRT (RB now)))",
            3,
            3,
            3,
            0,
        ),
        # punctuation belongs to no span, so its attachment does not matter
        ("(S (NP (NN a) (, ,)) (VP (VB b)))", "(S (NP (NN a)) (, ,) (VP (VB b)))", 3, 3, 3, 0),
        ("(S (PRN (: -)) (NN a))", "(S (: -) (NN a))", 1, 1, 1, 0),
        # each bracket is matched once
        ("(NP (NP (NN a)))", "(NP (NN a))", 1, 2, 1, 0),
        ("(NP (NN a))", "(NP (NP (NP (NN a))))", 1, 1, 3, 0),
        # overlapping without nesting is crossing, counted once for each predicted bracket
        (
            "(S (X (NN a) (NN b)) (X (NN c) (NN d)))",
            "(S (NN a) (Y (NN b) (NN c)) (NN d))",
            1,
            3,
            2,
            1,
        ),
        ("(S (NN a) (X (NN b) (NN c)))", "(S (X (NN a) (NN b)) (NN c))", 1, 2, 2, 1),
    ],
)
def test_evalb_by_hand(gold, predicted, matched, in_gold, in_predicted, crossing):
    score = score_sentence(tree_of(gold), tree_of(predicted))
    assert score.status == "valid"
    found = (score.matched, score.gold, score.predicted, score.crossing)
    assert found == (matched, in_gold, in_predicted, crossing)


def nested_brackets(text):
    """Return words and brackets (label, start, end) as the program EVALB reads them."""
    parts = re.findall(r"[()]|[^\s()]+", text)
    words, found = [], []

    def read(index):
        label, start, own = parts[index + 1], len(words), len(found)
        index += 2
        if parts[index] not in "()":
            if label not in (",", ":", "``", "''", "."):
                words.append(parts[index])
            return index + 2
        found.append(None)
        while parts[index] != ")":
            index = read(index)
        found[own] = (label.split("-")[0].split("=")[0], start, len(words))
        return index + 1

    read(0)
    kept = [bracket for bracket in found if bracket[0] != "TOP" and bracket[1] < bracket[2]]
    return words, kept


@hundreds
@given(pair=tree_pairs())
def test_the_counts_are_those_of_the_algorithm_of_evalb(pair):
    (words, gold), (_, predicted) = (nested_brackets(str(tree)) for tree in pair)
    left, matched, crossing = list(predicted), 0, 0
    for label, start, end in gold:
        for other in left:
            is_label = label == other[0] or {label, other[0]} == {"ADVP", "PRT"}
            if is_label and (start, end) == other[1:]:
                left.remove(other)
                matched += 1
                break
    for _, start, end in predicted:
        crossing += any(
            first < start < last < end or start < first < end < last for _, first, last in gold
        )
    score = score_sentence(*pair)
    if not words:
        assert score.status == "skipped"
    else:
        found = (score.matched, score.gold, score.predicted, score.crossing)
        assert found == (matched, len(gold), len(predicted), crossing)


@hundreds
@given(pair=tree_pairs(labels=["S", "NP", "VP"], tags=["NN"]))
def test_scores_are_those_of_pyevalb(pair):
    # PYEVALB has no rules for punctuation, TOP and equal labels, and counts a repeated bracket once
    if any(len(set(tree.brackets)) < len(tree.brackets) for tree in pair):
        return
    gold, predicted = (create_from_bracket_string(str(tree)) for tree in pair)
    theirs = Scorer().score_trees(gold, predicted)
    ours = score_sentence(*pair)
    assert (ours.matched, ours.gold, ours.predicted, ours.crossing) == (
        theirs.matched_brackets,
        theirs.gold_brackets,
        theirs.test_brackets,
        theirs.cross_brackets,
    )


def test_f1_of_a_corpus_is_that_of_all_its_brackets():
    gold = tree_of(GOLD)
    half = tree_of("(S (PRP We) (VBD saw) (NP (DT the) (NN moon)) (IN with) (NP (NN it)) (. .))")
    scores = [score_sentence(gold, tree) for tree in (gold, half, None)]
    total = score_corpus(scores)
    # 6 of 6, 3 of 3 and 0 of 0 predicted brackets; 6 gold ones each
    assert (total.matched, total.predicted, total.gold) == (9, 9, 18)
    assert (total.precision, total.recall) == (100, 50)
    assert total.f1 == pytest.approx(2 * 100 * 50 / 150)
    assert total.complete == pytest.approx(100 / 3)
    assert (total.sentences, total.errors, total.skipped) == (3, 1, 0)


def test_a_sentence_without_a_tree_is_missed_or_left_out_as_evalb_does():
    gold = tree_of(GOLD)
    other_words = tree_of(GOLD.replace("moon", "sun"))
    for missing in (None, other_words):
        scores = [score_sentence(gold, gold), score_sentence(gold, missing)]
        assert [score.status for score in scores] == ["valid", "error"]
        assert score_corpus(scores).recall == 50
        assert score_corpus(scores, leave_out_errors=True).recall == 100
    # a sentence with other punctuation is the same sentence
    assert score_sentence(gold, tree_of(GOLD.replace("(. .)", "(. !)"))).status == "valid"
    assert score_sentence(*[tree_of("(S (. .))")] * 2).status == "skipped"
    assert score_corpus([]).f1 == 0


BRACKETS = ["(S", ")S", "(NP", ")NP", "XX"]


@pytest.fixture(scope="module")
def tokenizer():
    return learn_vocabulary(["the cat sat on the mat"], 300, symbols=BRACKETS, progress=False)


def allowed_after(tokenizer, tokens, num_words, limit):
    constraint = TreeConstraint(tokenizer, torch.tensor([num_words]), torch.tensor([limit]))
    symbols = [tokenizer.tokenize(token)[0] for token in tokens]
    ids = [tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(symbols)]
    scores = constraint(torch.tensor([ids]), torch.zeros(1, len(tokenizer)))
    found = scores[0].isfinite().nonzero().flatten().tolist()
    return {tokenizer.decode([index]) for index in found}


@pytest.mark.parametrize(("num_words", "limit"), [(1, 4), (1, 8), (2, 8), (3, 6)])
def test_the_search_allows_exactly_the_tokens_that_can_still_lead_to_a_tree(
    tokenizer, num_words, limit
):
    possible = {}
    for length in range(limit):
        for tokens in itertools.product(BRACKETS, repeat=length):
            if malformation(tokens, num_words) is None:
                for length_before, token in enumerate([*tokens, "</s>"]):
                    possible.setdefault(tokens[:length_before], set()).add(token)
    assert len(possible) > limit
    for tokens, following in possible.items():
        assert allowed_after(tokenizer, tokens, num_words, limit) == following, tokens


@pytest.mark.parametrize(
    ("search", "alpha"),
    [({"num_beams": 1}, 0.3), ({"num_beams": 5}, 0.3), ({"num_beams": 3}, None)],
)
def test_an_untrained_model_gives_trees_over_the_words(tokenizer, search, alpha):
    rng = random.Random(0)
    sentences = [rng.choices(["the", "cat", "sat"], k=count) for count in (1, 7, 3, 12, 2)]
    lengths = [len(tokenizer(" ".join(words))["input_ids"]) for words in sentences]

    def malformed(trees):
        return [
            malformation(tokens, len(words)) for tokens, words in zip(trees, sentences, strict=True)
        ]

    found = set()
    for seed in range(2):
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model = toy_model(seed, vocab_size=len(tokenizer), decoder_start_token_id=1, **special)
        model.eval().generation_config.length_penalty_alpha = alpha
        for extra in (2, 12):
            trees = list(parse(model, tokenizer, sentences, max_extra_tokens=extra, **search))
            assert malformed(trees) == [None] * len(sentences)
            for tree, length in zip(trees, lengths, strict=True):
                # plus the end token
                assert len(tree) + 1 <= length + extra
            found.update(map(tuple, trees))
        free = parse(model, tokenizer, sentences, constrained=False, max_extra_tokens=12, **search)
        assert None not in malformed(free)
    assert len(found) > len(sentences) + 2, "the models have no influence on the trees"


def test_a_search_that_cannot_give_a_tree_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"at least 5 tokens, .* got 4; raise max_extra_tokens"):
        TreeConstraint(tokenizer, torch.tensor([1, 2]), torch.tensor([4, 4]))
    plain = learn_vocabulary(["the cat sat on the mat"], 290, progress=False)
    with pytest.raises(ValueError, match=r"tokenizer must have XX and the brackets .* got 0"):
        list(parse(toy_model(vocab_size=290), plain, [["the"]]))


def write_treebank(path, count, seed):
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        nouns = [f"(NP (DT the) (NN {rng.choice(['cat', 'dog', 'owl'])}))" for _ in range(2)]
        lines.append(
            f"( (S {nouns[0]} (VP (VBZ {rng.choice(['sees', 'hears'])}) {nouns[1]}) (. .)))"
        )
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_treebank_becomes_text_in_which_every_bracket_is_a_token(tmp_path):
    trees = write_treebank(tmp_path / "all.mrg", 100, 0)
    counts = prepare_treebank(tmp_path / "data", [trees], test=[trees])
    assert {split: found["trees"] for split, found in counts.items()} == {
        "train": 95,
        "validation": 5,
        "test": 100,
    }
    assert (counts["test"]["words"], counts["test"]["brackets"]) == (600, 400)
    assert (counts["test"]["longest sentence"], counts["test"]["longest tree"]) == (6, 14)
    words, tokens = (
        [
            line
            for split in ("train", "validation")
            for line in (tmp_path / "data" / f"{split}.{side}").read_text().splitlines()
        ]
        for side in ("en", "tree")
    )
    gold = [clean(tree) for tree in read_trees([trees])]
    assert words == [" ".join(tree.words) for tree in gold]
    assert tokens == [" ".join(linearize(tree)) for tree in gold]

    changes = {"target_lang": "tree", "symbol_lang": "tree", "vocab_size": 280}
    config = TrainConfig(**toy_settings(tmp_path / "data", tmp_path / "run", **changes))
    tokenizer = prepare_tokenizer(config)
    assert tokenizer.symbols == ["(NP", "(S", "(VP", ")NP", ")S", ")VP", "XX"]
    assert len(tokenizer.tokenize(tokens[0])) == len(tokens[0].split())


@pytest.mark.parametrize(
    ("num_trees", "names"), [(0, ["scores", "lengths"]), (1, ["scores", "tree", "lengths"])]
)
def test_a_predicted_tree_is_shown_if_there_is_one(tmp_path, monkeypatch, num_trees, names):
    gold = [clean(tree) for tree in read_trees([write_treebank(tmp_path / "all.mrg", 3, 0)])]
    predicted = [*["unclosed bracket"] * (3 - num_trees), *gold[3 - num_trees :]]
    monkeypatch.setattr(model_scores, "parse_treebank", lambda *_, **__: predicted)
    sections = [*model_scores._result_sections("run", None, None, gold, {})]
    assert [section.name for section in sections] == names
    assert all(section.numbers["predicted"] == str(gold[2]) for section in sections[1:-1])


def test_no_tree_to_train_on_is_refused(tmp_path):
    (tmp_path / "empty.mrg").write_text("( (S (-NONE- *)) )")
    with pytest.raises(ValueError, match="train must have at least one tree, got none"):
        prepare_treebank(tmp_path / "data", [tmp_path / "empty.mrg"])
    # a twentieth of five trees is none
    few = write_treebank(tmp_path / "few.mrg", 5, 0)
    with pytest.raises(ValueError, match="validation must have at least one tree, got none"):
        prepare_treebank(tmp_path / "data", [few])
    assert not (tmp_path / "data").exists()


def test_removed_elements_are_counted_by_split(tmp_path):
    tagged = tmp_path / "tagged.mrg"
    tagged.write_text("( (S (NP-SBJ (PRP We)) (VP (VBD saw)) (. .)) )\n" * 40)
    counts = prepare_treebank(tmp_path / "data", [tagged])
    assert {split: found["function tags"] for split, found in counts.items()} == {
        "train": 38,
        "validation": 2,
    }


def test_a_parser_is_trained_and_scored_by_commands(tmp_path, capsys):
    training = write_treebank(tmp_path / "train.mrg", 60, 1)
    gold = write_treebank(tmp_path / "gold.mrg", 8, 2)
    command = ["paper", "table4", "--output_dir", str(tmp_path / "page")]
    prepared = str(tmp_path / "data")
    page = tmp_path / "page" / "README.md"
    page.parent.mkdir()
    page.write_text("scores of another run")
    assert main([*command, "--prepare", prepared, "--train", str(training)]) == 0
    assert page.read_text() == "scores of another run"
    assert "60 sentence pairs" in capsys.readouterr().out
    changes = {
        "target_lang": "tree",
        "symbol_lang": "tree",
        "max_steps": 40,
        "learning_rate_factor": 3.0,
        "eval_every_steps": 40,
        "save_every_steps": 40,
        "num_averaged_checkpoints": 1,
    }
    assert train(TrainConfig(**toy_settings(tmp_path / "data", tmp_path / "run", **changes)))
    capsys.readouterr()
    command += ["--model", str(tmp_path / "run"), "--trees", str(gold), "--num_sentences", "5"]
    assert main([*command, "--num_beams", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "100.0% are trees, and F1 changes from" in shown

    written = json.loads((tmp_path / "page" / "study.json").read_text(encoding="utf-8"))["sections"]
    free, constrained, *papers = written["scores"]["rows"]
    assert [row[2] for row in papers] == [91.3, 92.7]
    assert (free[1], constrained[1], constrained[7]) == ("5 sentences", "5 sentences", 100)
    totals = written["scores"]["totals"]["among trees only"]
    assert totals["gold"] == 5 * 4
    assert constrained[2] == totals["f1"] >= free[2]
    assert sum(row[1] for row in written["lengths"]["rows"]) == 5
    shown_tree = written["tree"]
    score = score_sentence(tree_of(shown_tree["gold"]), tree_of(shown_tree["predicted"]))
    assert f"{score.matched} of {score.predicted} predicted brackets" in shown_tree["says"]
    for picture in ("published", "linearized", "rules", "tree", "lengths"):
        assert (tmp_path / "page" / f"{picture}.png").stat().st_size > 5000


def test_the_study_shows_table_4_and_two_readings_of_a_sentence(tmp_path, capsys):
    assert main(["paper", "table4", "--output_dir", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "beats 7 of the 8 parsers" in shown
    assert "the tokens give the same tree" in shown
    # one bracket too many: 6 of 7
    assert "precision 85.7" in shown
    assert "recall 100.0; F1, their harmonic mean, is 92.3" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prepare", "x"], "train must be given with prepare"),
        (["--train", "x"], "prepare must be given with train"),
        (["--model", "x"], "model and trees must be given together"),
        (["--trees", "x"], "model and trees must be given together"),
        (["--prepare", "x", "--train", "y", "--model", "x", "--trees", "z"], "prepare must be"),
        (["--num_sentences", "-1"], "num_sentences must not be negative, got -1"),
        (["--batch_size", "0"], "batch_size must be at least 1, got 0"),
        (["--model", "x", "--trees", "none.mrg"], "none.mrg cannot be read: No such file"),
    ],
)
def test_incomplete_flags_are_refused(flags, message, tmp_path, capsys):
    assert main(["paper", "table4", "--output_dir", str(tmp_path), *flags]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_without_the_demo_the_error_says_how_to_train_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gold.mrg").write_text("(S (NP (PRP We)) (VP (VBD saw)) (. .))", encoding="utf-8")
    assert main(["paper", "table4", "--model", "runs/demo", "--trees", "gold.mrg"]) == 1
    assert "`make demo` trains one" in capsys.readouterr().err


def test_the_recipe_is_section_6_3():
    config = load_config("paper-parsing")
    sizes = config.model_config(config.vocab_size)
    assert (sizes.encoder_layers, sizes.decoder_layers, sizes.d_model) == (4, 4, 1024)
    assert (sizes.encoder_ffn_dim, sizes.encoder_attention_heads) == (2048, 8)
    assert config.vocab_size == 16_000
    search = (config.num_beams, config.length_penalty_alpha, config.max_extra_tokens)
    assert search == (21, 0.3, 300)
    small = load_config("parsing-small")
    assert (small.num_beams, small.length_penalty_alpha, small.max_extra_tokens) == search
    assert small.symbol_lang == config.symbol_lang == config.target_lang == "tree"
