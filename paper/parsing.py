"""Section 6.3: constituency parsing as translation, from a sentence to its linearized tree.

Shapes: B sentences, R hypotheses, T tokens so far, V tokens in the vocabulary.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .. import TranslationPipeline
from ..atomic_files import atomic_folder
from ..tokenization.tokenization_vanilla_transformer import symbol_token
from ..train.data.corpus import SPLITS
from .trees import WORD, Tree, clean, linearize, read_trees

# language codes of a parser's training data, which are also the endings of its files
SOURCE_LANG, TARGET_LANG = "en", "tree"
# share of the training trees that become the validation trees if no others are given. They are the
# last trees, because most of the last trees come from other texts than the trees before them
VALIDATION_SHARE = 0.05
# section 6.3: a tree has at most this many tokens more than its sentence
MAX_EXTRA_TOKENS = 300
# names of the counts of a treebank, in the order of the table; counts of removed elements follow
COUNTS = ("trees", "words", "brackets", "longest sentence", "longest tree")
# tokens of the smallest tree beside its words: an opening bracket, a closing bracket, the end token
TOKENS_BESIDE_WORDS = 3


class TreeConstraint(LogitsProcessor):
    """Logits processor that allows only tokens that can still lead to a tree over the sentence.

    A word or an opening bracket is allowed while words are left. A bracket may open only if enough
    tokens are left to close it. The innermost open bracket may close, with its own label, if it is
    not empty. The outermost bracket may close only after the last word, and the end token is
    allowed only after the outermost bracket has closed. So every hypothesis can become a tree, and
    every finished hypothesis is a tree. Allowed tokens keep the model's scores.

    Args:
        tokenizer: Tokenizer of a parsing model, with `WORD` and the brackets as symbols.
        num_words: Number of words of each sentence, [B].
        limits: Maximum number of tokens of each tree, including the end token, [B].

    Raises:
        ValueError: If the tokenizer has no brackets, or a limit is too low for a tree.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_words: Tensor, limits: Tensor):
        device = num_words.device
        labels = _bracket_labels(tokenizer)
        bracket_names = [f"{kind}{label}" for kind in "()" for label in labels]
        ids = tokenizer.convert_tokens_to_ids(
            [symbol_token(symbol) for symbol in [WORD, *bracket_names]]
        )
        self.word_id, self.end_id = ids[0], tokenizer.eos_token_id
        # token ids of the opening bracket and of the closing bracket of each label, [2, labels]
        self.brackets = torch.tensor(ids[1:], device=device).view(2, -1)
        # index of the label that each token opens (row 0) or closes (row 1), -1 for none, [2, V]
        self.labels = torch.full((2, len(tokenizer)), -1, device=device)
        self.labels.scatter_(
            1, self.brackets, torch.arange(len(labels), device=device).repeat(2, 1)
        )
        self.num_words, self.limits = num_words, limits
        is_too_short = limits < num_words + TOKENS_BESIDE_WORDS
        if is_too_short.any():
            raise ValueError(
                "the limit of a tree must be at least "
                f"{int(num_words[is_too_short][0]) + TOKENS_BESIDE_WORDS} tokens, for its words, "
                f"one pair of brackets and the end token, got {int(limits[is_too_short][0])}; "
                "raise max_extra_tokens."
            )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Replace the score of every token that is not allowed by -inf.

        Args:
            input_ids: Hypotheses so far, the same number for each sentence, [R, T].
            scores: Scores of all tokens, [R, V].

        Returns:
            Scores, -inf for tokens that are not allowed, [R, V].
        """
        num_beams = input_ids.shape[0] // self.num_words.shape[0]
        num_words = self.num_words.repeat_interleave(num_beams)  # [R]
        limits = self.limits.repeat_interleave(num_beams)
        opened_labels, closed_labels = self.labels[:, input_ids]  # [R, T]
        is_opening, is_closing, is_word = (
            opened_labels >= 0,
            closed_labels >= 0,
            input_ids == self.word_id,
        )
        depth = (is_opening.int() - is_closing.int()).cumsum(dim=1)
        current_depth = depth[:, -1]  # [R]
        # the innermost open bracket is the last bracket whose opening led to the current depth
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        is_candidate = is_opening & (depth == current_depth[:, None])
        innermost = torch.where(is_candidate, positions, -1).amax(dim=1).clamp(min=0)
        innermost_label = opened_labels.gather(1, innermost[:, None]).clamp(min=0)  # [R, 1]

        words_left = num_words - is_word.sum(dim=1)
        num_used = (is_opening | is_closing | is_word).sum(dim=1)
        # a new bracket needs two tokens; the words left, the open brackets and the end token follow
        has_room = limits - num_used >= 2 + words_left + current_depth + 1
        may_open = (words_left > 0) & ((current_depth > 0) | (num_used == 0)) & has_room
        may_close = (
            (current_depth > 0) & ~is_opening[:, -1] & ((current_depth > 1) | (words_left <= 0))
        )

        allowed = torch.zeros_like(scores, dtype=torch.bool)
        allowed[:, self.brackets[0]] = may_open[:, None]
        allowed[:, self.word_id] = (current_depth > 0) & (words_left > 0)
        allowed.scatter_(1, self.brackets[1][innermost_label], may_close[:, None])
        allowed[:, self.end_id] = (current_depth == 0) & (num_used > 0)
        return scores.masked_fill(~allowed, -torch.inf)


def _bracket_labels(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    symbols = set(getattr(tokenizer, "symbols", []))
    labels = sorted(name[1:] for name in symbols if name[0] == "(" and f"){name[1:]}" in symbols)
    if WORD not in symbols or not labels:
        raise ValueError(
            f"tokenizer must have {WORD} and the brackets of trees as symbols, got {len(symbols)} "
            "symbols; train with symbol_lang."
        )
    return labels


class ParsingPipeline(TranslationPipeline):
    """Translation pipeline from sentences to linearized trees; its search is limited to trees."""

    def _forward(
        self, input_tensors: dict[str, Tensor], *args: Any, **search: Any
    ) -> dict[str, Any]:
        # words contain no spaces, so the spaces of the decoded sentence give the number of words
        texts = self.tokenizer.batch_decode(input_tensors["input_ids"], skip_special_tokens=True)
        lengths = input_tensors["attention_mask"].sum(dim=1)
        num_words = lengths.new_tensor([len(text.split(" ")) for text in texts])
        limits = lengths + search["max_extra_tokens"]
        constraint = TreeConstraint(self.tokenizer, num_words, limits)
        search["logits_processor"] = LogitsProcessorList([constraint])
        return super()._forward(input_tensors, *args, **search)


def parse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Iterable[Sequence[str]],
    *,
    constrained: bool = True,
    batch_size: int | None = None,
    **search: int | float,
) -> Iterator[list[str]]:
    """Translate sentences into linearized trees.

    Args:
        model: Model trained on trees.
        tokenizer: Tokenizer of the model.
        sentences: Words of each sentence, without spaces, at least one.
        constrained: Whether to restrict the search to trees; the tokens that a free search returns
            need not be a tree.
        batch_size: Number of sentences per batch.
        search: Settings of `generate` that differ from the model's, for example `num_beams`.

    Yields:
        Tokens of the linearized tree of each sentence, in order.

    Raises:
        ValueError: If the model was not trained on trees, or a limit is too low for a tree.
    """
    if constrained:
        _bracket_labels(tokenizer)
    max_extra_tokens = getattr(model.generation_config, "max_extra_tokens", None)
    search = {
        "max_extra_tokens": MAX_EXTRA_TOKENS if max_extra_tokens is None else max_extra_tokens,
        **search,
    }
    pipeline_class = ParsingPipeline if constrained else TranslationPipeline
    pipeline = pipeline_class(model, tokenizer, device=model.device)
    texts = (" ".join(words) for words in sentences)
    for translations in pipeline(texts, batch_size=batch_size, **search):
        yield translations[0]["translation_text"].split(" ")


def prepare_treebank(
    folder: Path,
    train: Sequence[str | Path],
    validation: Sequence[str | Path] = (),
    test: Sequence[str | Path] = (),
) -> dict[str, Counter]:
    """Write the training data of a parser: one line per sentence, and one line per tree.

    Args:
        folder: Folder to write `train.en`, `train.tree` and so on to.
        train: Files or folders of bracketed trees for training.
        validation: Files or folders for validation; if empty, the last `VALIDATION_SHARE` of the
            training trees.
        test: Files or folders for evaluation; if empty, no test split is written.

    Returns:
        For each split the number of trees, words and brackets, the length of the longest sentence
        and of the longest tree, and the number of elements that `clean` removed, by kind.

    Raises:
        ValueError: If a file cannot be read or is not a treebank, or a split has no tree.
    """
    original_trees = {
        split: list(read_trees(paths)) if paths else []
        for split, paths in zip(SPLITS, (train, validation, test), strict=True)
    }
    if not validation:
        all_trees = original_trees["train"]
        num_train = len(all_trees) - round(VALIDATION_SHARE * len(all_trees))
        original_trees["train"], original_trees["validation"] = (
            all_trees[:num_train],
            all_trees[num_train:],
        )
    # the test split is optional, because training does not use it
    written_splits = SPLITS if test else SPLITS[:-1]
    counts = {split: Counter(dict.fromkeys(COUNTS, 0)) for split in written_splits}
    trees = {
        split: list(_clean_trees(original_trees[split], split_counts))
        for split, split_counts in counts.items()
    }
    for split, split_trees in trees.items():
        if not split_trees:
            raise ValueError(f"{split} must have at least one tree, got none.")
    with atomic_folder(folder) as unfinished_folder, ExitStack() as stack:
        for split, split_counts in counts.items():
            files = [
                stack.enter_context(
                    (unfinished_folder / f"{split}.{language}").open("w", encoding="utf-8")
                )
                for language in (SOURCE_LANG, TARGET_LANG)
            ]
            for tree in trees[split]:
                tokens = linearize(tree)
                for file, line_words in zip(files, (tree.words, tokens), strict=True):
                    file.write(" ".join(line_words) + "\n")
                split_counts["trees"] += 1
                split_counts["words"] += len(tree.words)
                split_counts["brackets"] += len(tree.brackets)
                split_counts["longest sentence"] = max(
                    split_counts["longest sentence"], len(tree.words)
                )
                split_counts["longest tree"] = max(split_counts["longest tree"], len(tokens))
    return counts


def _clean_trees(trees: Iterable[Tree], counts: Counter) -> Iterator[Tree]:
    for tree in trees:
        cleaned = clean(tree, counts)
        counts["trees without a word"] += cleaned is None
        if cleaned is not None:
            yield cleaned
