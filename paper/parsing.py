"""Section 6.3: constituency parsing as translation, from a sentence to its linearized tree."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .. import TranslationPipeline
from ..tokenization.tokenization_vanilla_transformer import symbol_token
from ..train.data.corpus import SPLITS
from .trees import WORD, Tree, clean, linearize, read_trees

# the languages of the text that a parser is trained on
SOURCE_LANG, TARGET_LANG = "en", "tree"
# of the trees to train on, where none are given to validate with: the last ones, which are mostly
# of texts that the others are not of
VALIDATION_SHARE = 0.05
# section 6.3: the most tokens of a tree beyond the sentence's own
MAX_EXTRA_TOKENS = 300
# what is counted of a treebank before what was taken away
COUNTS = ("trees", "words", "brackets", "longest sentence", "longest tree")
# an opening bracket, a closing one and the end token
TOKENS_BESIDE_WORDS = 3


class TreeConstraint(LogitsProcessor):
    """Lets only those tokens follow that can still become a tree over the sentence's words.

    A word or an opening bracket may come while words are left; the innermost bracket may close,
    under its own name, when it holds something, and the outermost only when all words are there;
    the end comes after it and nowhere else. Brackets open only while there is room to close them,
    so that every hypothesis can end as a tree, and every complete one is a tree. What may follow
    keeps the model's own score.

    Args:
        tokenizer: Tokenizer of a parsing model: its symbols are `WORD` and the brackets.
        num_words: Words of each sentence, [B].
        limits: Most tokens of each tree, the end token among them, [B].

    Raises:
        ValueError: If the tokenizer knows no brackets, or a limit leaves no room for a tree.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_words: Tensor, limits: Tensor):
        device = num_words.device
        labels = _labels(tokenizer)
        names = [f"{kind}{label}" for kind in "()" for label in labels]
        ids = tokenizer.convert_tokens_to_ids([symbol_token(name) for name in [WORD, *names]])
        self.word, self.end = ids[0], tokenizer.eos_token_id
        # ids of the opening and of the closing bracket of each label, [2, labels]
        self.brackets = torch.tensor(ids[1:], device=device).view(2, -1)
        # what each token opens, or closes: the number of its label, or -1, [2, V]
        self.labels = torch.full((2, len(tokenizer)), -1, device=device)
        self.labels.scatter_(
            1, self.brackets, torch.arange(len(labels), device=device).repeat(2, 1)
        )
        self.num_words, self.limits = num_words, limits
        short = limits < num_words + TOKENS_BESIDE_WORDS
        if short.any():
            raise ValueError(
                f"a tree must have room for {int(num_words[short][0]) + TOKENS_BESIDE_WORDS} "
                f"tokens, its words, a bracket and the end, got {int(limits[short][0])}: raise "
                "max_extra_tokens."
            )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leave the scores of what may follow, and no others.

        Args:
            input_ids: The trees so far, the same number of rows for each sentence, [R, T].
            scores: For every token, [R, V].

        Returns:
            The scores, -inf where a token may not follow, [R, V].
        """
        rows = input_ids.shape[0] // self.num_words.shape[0]
        num_words = self.num_words.repeat_interleave(rows)  # [R]
        limits = self.limits.repeat_interleave(rows)
        opened, closed = self.labels[:, input_ids]  # [R, T]
        opens, closes, is_word = opened >= 0, closed >= 0, input_ids == self.word
        depth = (opens.int() - closes.int()).cumsum(dim=1)
        now = depth[:, -1]
        # the innermost open bracket is the last one that led to the depth of now
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        leads = opens & (depth == now[:, None])
        innermost = torch.where(leads, places, -1).amax(dim=1).clamp(min=0)
        label = opened.gather(1, innermost[:, None]).clamp(min=0)  # [R, 1]

        words_left = num_words - is_word.sum(dim=1)
        used = (opens | closes | is_word).sum(dim=1)
        # one more bracket needs two tokens, the words, the brackets open now and the end the rest
        has_room = limits - used >= 2 + words_left + now + 1
        may_open = (words_left > 0) & ((now > 0) | (used == 0)) & has_room
        may_close = (now > 0) & ~opens[:, -1] & ((now > 1) | (words_left <= 0))

        allowed = torch.zeros_like(scores, dtype=torch.bool)
        allowed[:, self.brackets[0]] = may_open[:, None]
        allowed[:, self.word] = (now > 0) & (words_left > 0)
        allowed.scatter_(1, self.brackets[1][label], may_close[:, None])
        allowed[:, self.end] = (now == 0) & (used > 0)
        return scores.masked_fill(~allowed, -torch.inf)


def _labels(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    symbols = set(getattr(tokenizer, "symbols", []))
    labels = sorted(name[1:] for name in symbols if name[0] == "(" and f"){name[1:]}" in symbols)
    if WORD not in symbols or not labels:
        raise ValueError(
            f"tokenizer must have {WORD} and the brackets of trees as symbols, as training with "
            f"symbol_lang gives it, got {len(symbols)} symbols."
        )
    return labels


class ParsingPipeline(TranslationPipeline):
    """Translates sentences into linearized trees, every one of which is a tree."""

    def _forward(self, input_tensors: dict[str, Tensor], **search) -> dict[str, Tensor]:
        # words hold no space, so that a sentence still says how many it has
        texts = self.tokenizer.batch_decode(input_tensors["input_ids"], skip_special_tokens=True)
        lengths = input_tensors["attention_mask"].sum(dim=1)
        num_words = lengths.new_tensor([len(text.split(" ")) for text in texts])
        limits = lengths + search["max_extra_tokens"]
        constraint = TreeConstraint(self.tokenizer, num_words, limits)
        search["logits_processor"] = LogitsProcessorList([constraint])
        return super()._forward(input_tensors, **search)


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
        sentences: Words without spaces, at least one each.
        constrained: Search among trees only; if not, the search is free to end as no tree.
        batch_size: Most sentences searched together.
        search: Settings of `generate` that differ from the model's, `num_beams` for one.

    Yields:
        The tokens of each tree, in order.

    Raises:
        ValueError: If the model is none of trees, or a tree has no room.
    """
    if constrained:
        _labels(tokenizer)
    extra = getattr(model.generation_config, "max_extra_tokens", None)
    search = {"max_extra_tokens": MAX_EXTRA_TOKENS if extra is None else extra, **search}
    kind = ParsingPipeline if constrained else TranslationPipeline
    pipeline = kind(model, tokenizer, device=model.device)
    texts = (" ".join(words) for words in sentences)
    for translations in pipeline(texts, batch_size=batch_size, **search):
        yield translations[0]["translation_text"].split(" ")


def prepare_treebank(
    folder: Path,
    train: Sequence[str | Path],
    validation: Sequence[str | Path] = (),
    test: Sequence[str | Path] = (),
) -> dict[str, Counter]:
    """Write what a parser is trained on: a line for each sentence, and one for its tree.

    Args:
        folder: Gets `train.en`, `train.tree` and so on.
        train: Files or folders of bracketed trees.
        validation: The same; where there is none, the last `VALIDATION_SHARE` of those to train on.
        test: The same.

    Returns:
        For each split the number of trees, words and brackets, the longest sentence and the longest
        tree, and what `clean` took away.

    Raises:
        ValueError: If a file cannot be read, holds no tree, or is no treebank.
    """
    read = {
        split: list(read_trees(paths)) if paths else []
        for split, paths in zip(SPLITS, (train, validation, test), strict=True)
    }
    if not validation:
        first = len(read["train"]) - round(VALIDATION_SHARE * len(read["train"]))
        read["train"], read["validation"] = read["train"][:first], read["train"][first:]
    # a test split is not needed to train
    wanted = SPLITS if test else SPLITS[:-1]
    counts = {split: Counter(dict.fromkeys(COUNTS, 0)) for split in wanted}
    trees = {split: list(_cleaned(read[split], found)) for split, found in counts.items()}
    for split, found in trees.items():
        if not found:
            raise ValueError(f"{split} must have at least one tree, got none.")
    folder.mkdir(parents=True, exist_ok=True)
    for split, found in counts.items():
        paths = [folder / f"{split}.{language}" for language in (SOURCE_LANG, TARGET_LANG)]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("w", encoding="utf-8")) for path in paths]
            for tree in trees[split]:
                tokens = linearize(tree)
                for file, parts in zip(files, (tree.words, tokens), strict=True):
                    file.write(" ".join(parts) + "\n")
                found["trees"] += 1
                found["words"] += len(tree.words)
                found["brackets"] += len(tree.brackets)
                found["longest sentence"] = max(found["longest sentence"], len(tree.words))
                found["longest tree"] = max(found["longest tree"], len(tokens))
    return counts


def _cleaned(trees: Iterable[Tree], counts: Counter) -> Iterator[Tree]:
    for tree in trees:
        cleaned = clean(tree, counts)
        counts["trees without a word"] += cleaned is None
        if cleaned is not None:
            yield cleaned
