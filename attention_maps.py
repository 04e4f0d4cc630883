"""Attention weights of every head for one sentence and its translation. Section 3.2.3.

Shapes as in the model: N layers, h heads, S source tokens, T target tokens, Q queries, K keys.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .alignment_vanilla_transformer import prefix_texts, return_weights, weights_of
from .changes_vanilla_transformer import changed, evaluating
from .checks_vanilla_transformer import with_output_object
from .pipeline_vanilla_transformer import TranslationPipeline

# symbol that is shown for a token that consists of spaces
SPACE = "\u2423"


class Word(NamedTuple):
    """Word, punctuation mark or special token, with the indices of its tokens."""

    text: str
    tokens: list[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionWeights:
    """Weights of the three kinds of attention, with the tokens of their rows and columns.

    In row t, the decoder reads `inputs[t]` and predicts `target[t]`, the next token.

    Attributes:
        source: Tokens of the source, the end token last, [S].
        inputs: Tokens that the decoder reads, the start token first, [T].
        target: Tokens that the decoder predicts, the end token last, [T].
        source_words: Words of the source; a special token is a word.
        target_words: Words of the target; a special token is a word.
        translation: Target as text.
        encoder: Encoder self-attention, [N, h, S, S].
        decoder: Decoder self-attention, 0 where the future is hidden, [N, h, T, T].
        cross: Encoder-decoder attention, [N, h, T, S].
    """

    source: list[str]
    inputs: list[str]
    target: list[str]
    source_words: list[Word]
    target_words: list[Word]
    translation: str
    encoder: Tensor
    decoder: Tensor
    cross: Tensor

    def hidden(self) -> Tensor:
        """Return which inputs (columns) the causal mask hides in which rows. Section 3.2.3.

        Returns:
            True where the column comes after the row, [T, T].
        """
        length = len(self.inputs)
        return torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)

    def by_word(self) -> "AttentionWeights":
        """Return the weights between words.

        Weights are averaged over the tokens of a query word and summed over the tokens of a key
        word. So the weights of a query word still sum to 1.

        Returns:
            Weights with words in place of tokens.
        """
        # the inputs are the target, shifted right by one, without its last token
        inputs = [Word(self.inputs[0], [0])]
        for word in self.target_words:
            tokens = [token + 1 for token in word.tokens if token + 1 < len(self.inputs)]
            inputs += [Word(word.text, tokens)] if tokens else []
        words_of_sides = {
            "source": self.source_words,
            "target": self.target_words,
            "inputs": inputs,
        }
        token_indices = {
            name: [word.tokens for word in words] for name, words in words_of_sides.items()
        }
        joined_words = {
            name: [Word(word.text, [index]) for index, word in enumerate(words)]
            for name, words in words_of_sides.items()
        }
        return replace(
            self,
            source=[word.text for word in self.source_words],
            inputs=[word.text for word in inputs],
            target=[word.text for word in self.target_words],
            source_words=joined_words["source"],
            target_words=joined_words["target"],
            encoder=_join_tokens(self.encoder, token_indices["source"], token_indices["source"]),
            decoder=_join_tokens(self.decoder, token_indices["inputs"], token_indices["inputs"]),
            cross=_join_tokens(self.cross, token_indices["target"], token_indices["source"]),
        )


@torch.no_grad()
def attention_weights(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | Tensor | None = None,
    **search: Any,
) -> AttentionWeights:
    """Return the attention weights of a model for a sentence and a translation.

    Args:
        model: Trained model; its mode and its attention function are restored at the end.
        tokenizer: Tokenizer of the model.
        source: Sentence.
        target: Translation, as a text or as token ids with the end token, [T]; by default the
            model's own translation.
        search: Settings of `generate` for the model's own translation, such as `num_beams`.

    Returns:
        The weights on the CPU, in float32.

    Raises:
        ValueError: If a text has no word or is too long for the model, a layer returns no weights,
            or the layers of a stack have different numbers of heads.
    """
    for name, text in (("source", source), ("target", target)):
        if isinstance(text, str) and not text.strip():
            raise ValueError(f"{name} must have a word, got {text!r}.")
    pipeline = TranslationPipeline(model, tokenizer, device=model.device)
    token_ids = pipeline.preprocess([source])["input_ids"]
    source_ids = torch.tensor(token_ids, device=model.device)  # [1, S]
    if target is None:
        search_ids = pipeline.forward({"input_ids": source_ids}, **search)["ids"][0, 1:]
        # tokens after the end token are padding up to the length of a longer translation
        first_end = (search_ids == tokenizer.eos_token_id).nonzero()[:1, 0]
        target_length = int(first_end) + 1 if len(first_end) else None
        target_ids = search_ids[:target_length][None].to(model.device)  # [1, T]
    elif isinstance(target, Tensor):
        target_ids = target[None].to(model.device)  # [1, T]
    else:
        token_ids = pipeline.preprocess([target])["input_ids"]
        target_ids = torch.tensor(token_ids, device=model.device)  # [1, T]
    inputs = model.prepare_decoder_input_ids_from_labels(target_ids)  # [1, T]

    with changed(model, return_weights), evaluating(model):
        outputs = model(
            **with_output_object(model, {"input_ids": source_ids, "decoder_input_ids": inputs}),
            output_attentions=True,
        )
        encoder, decoder, cross = (
            _stack_layers(weights_of(outputs, model, f"{name}_attentions"), name)
            for name in ("encoder", "decoder", "cross")
        )
    source_tokens, target_tokens = source_ids[0].tolist(), target_ids[0].tolist()
    return AttentionWeights(
        source=token_texts(tokenizer, source_tokens),
        inputs=token_texts(tokenizer, inputs[0].tolist()),
        target=token_texts(tokenizer, target_tokens),
        source_words=words_of(tokenizer, source_tokens),
        target_words=words_of(tokenizer, target_tokens),
        translation=tokenizer.decode(target_tokens, skip_special_tokens=True),
        encoder=encoder,
        decoder=decoder,
        cross=cross,
    )


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token.

    Args:
        tokenizer: Tokenizer of the ids.
        ids: Token ids.

    Returns:
        Texts, none of them empty.
    """
    texts = []
    for token_id in ids:
        text = tokenizer.decode([token_id]).strip() or SPACE
        # a token that is only a part of a character has no text, so its name is shown
        texts.append(tokenizer.convert_ids_to_tokens(token_id) if "\ufffd" in text else text)
    return texts


def words_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[Word]:
    """Group tokens into words at spaces; the punctuation around a word is a word of its own.

    Args:
        tokenizer: Tokenizer of the ids.
        ids: Token ids of a sentence.

    Returns:
        The words in order. Every token belongs to exactly one word; each special token is a word.
    """
    words = []
    special_ids = set(tokenizer.all_special_ids)
    for is_special, group in groupby(enumerate(ids), key=lambda pair: pair[1] in special_ids):
        indexed_tokens = list(group)
        if is_special:
            words += [Word(tokenizer.decode([token]), [index]) for index, token in indexed_tokens]
        else:
            words += _ordinary_words(tokenizer, indexed_tokens)
    return words


def _ordinary_words(
    tokenizer: PreTrainedTokenizerBase, indexed_tokens: Sequence[tuple[int, int]]
) -> list[Word]:
    ids = [token for _, token in indexed_tokens]
    prefixes = prefix_texts(tokenizer, ids, clean_up_tokenization_spaces=False)
    text = prefixes[-1]
    spans = list(_spans(text))
    if not spans:
        return [Word(text.strip(), [index for index, _ in indexed_tokens])]
    words = [Word(text[start:end], []) for start, end in spans]
    ends = [end for _, end in spans]
    for (index, _), prefix in zip(indexed_tokens, prefixes, strict=False):
        # a token that begins inside a character belongs to the word of this character
        token_start = len(prefix.rstrip("\ufffd"))
        word_number = min(bisect_right(ends, token_start), len(spans) - 1)
        words[word_number].tokens.append(index)
    # a token that spans several words belongs to the first; words without tokens are left out
    return [word for word in words if word.tokens]


def _spans(text: str) -> Iterable[tuple[int, int]]:
    for chunk in re.finditer(r"\S+", text):
        inner_places = [i for i in range(*chunk.span()) if not _is_punctuation(text[i])]
        if not inner_places:
            yield chunk.span()
            continue
        inner_start, inner_end = inner_places[0], inner_places[-1] + 1
        for start, end in (
            (chunk.start(), inner_start),
            (inner_start, inner_end),
            (inner_end, chunk.end()),
        ):
            if start < end:
                yield start, end


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


def _join_tokens(
    weights: Tensor, queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]
) -> Tensor:
    rows = torch.stack([weights[:, :, tokens].mean(dim=2) for tokens in queries], dim=2)
    return torch.stack([rows[..., tokens].sum(dim=-1) for tokens in keys], dim=-1)


def _stack_layers(layers: Sequence[Tensor], name: str) -> Tensor:
    head_counts = [weights.shape[1] for weights in layers]
    if len(set(head_counts)) > 1:
        raise ValueError(
            f"all layers must have the same number of heads to be shown together, got "
            f"{head_counts} in {name} attention."
        )
    return torch.stack([weights[0].float().cpu() for weights in layers])  # [N, h, Q, K]
