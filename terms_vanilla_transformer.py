"""Terms that a translation must or must not contain.

For required terms, the beam search divides its beams into banks. All hypotheses in a bank contain
the same number of term tokens (grid beam search, Hokamp and Liu 2017). This number falls again if a
hypothesis leaves a term unfinished (Post and Vilar 2018). Forbidden terms are compared with the
bytes of the text, so that no other tokenization of a term is missed.

Shapes: as in `search_vanilla_transformer`, with M terms of a sentence, P tokens of the longest term
and N hypotheses.
"""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import LogitsProcessor

from .search_vanilla_transformer import Hypotheses, PaperBeamSearch

# maximum number of terms, and of ends of terms, whose matching tokens are cached
MOST_TERMS = 1024


class TermBeamSearch(PaperBeamSearch):
    """Beam search whose translations contain the terms of their sentence.

    The beams of a sentence are divided into banks of equal size, one bank for each number of term
    tokens in a hypothesis. The first bank is for the largest number, that of the sentence with the
    most term tokens, and the last bank for 0. Only a hypothesis with all terms may end.

    Args:
        *args: Arguments of `PaperBeamSearch`; `num_beams` is the number of beams in all banks.
        terms: For each sentence, its terms as lists of token ids.
    """

    def __init__(self, *args: Any, terms: Sequence[Sequence[Sequence[int]]]):
        super().__init__(*args)
        # every token is scored, because a term may need an improbable one
        self.rules = None
        # a negative end token ends no sequence, but would be the index of another token
        self.end_tokens = self.end_tokens[self.end_tokens >= 0]
        self.num_banks = num_banks(terms)
        self.bank_size = self.num_beams // self.num_banks
        self.terms = padded_terms(terms).to(self.open.ids.device)  # [B, M, P]

    def _choose_candidates(
        self, log_probs: Tensor, tokens: Tensor | None, step: int | Tensor
    ) -> tuple[Hypotheses, Tensor, Tensor]:
        totals = log_probs + self.open.scores[:, :, None]  # [B, R, V]
        num_sentences, num_rows, vocab_size = totals.shape
        terms = self.terms[self.sentence_indices]  # [B, M, P]
        is_met, num_begun = term_matches(
            self.open.ids[:, :, : self.prompt_length + step - 1], terms
        )
        is_open = ~is_met.all(dim=2)[:, :, None]  # [B, R, 1]
        end_totals = totals[:, :, self.end_tokens].masked_fill(is_open, -torch.inf)
        totals[:, :, self.end_tokens] = end_totals
        # the next token of each term that a hypothesis does not contain yet
        wide_terms = terms[:, None].expand(-1, num_rows, -1, -1)
        next_term_ids = wide_terms.gather(3, num_begun[..., None])[..., 0].clamp(min=0)  # [B, R, M]
        term_scores = []
        for term in range(terms.shape[1]):
            term_ids = next_term_ids[:, :, term, None]
            scores, is_taken = totals.gather(2, term_ids), ~is_met[:, :, term, None]
            term_scores.append(scores.masked_fill(~is_taken, -torch.inf))
            # this token is a candidate for its term, so it must not be a second candidate
            totals.scatter_(2, term_ids, scores.masked_fill(is_taken, -torch.inf))
        scores, flat_index = totals.view(num_sentences, self.num_banks, -1).topk(
            min(self.num_candidates // self.num_banks, self.bank_size * vocab_size), dim=2
        )
        banks = torch.arange(self.num_banks, device=flat_index.device)[:, None]
        rows = torch.arange(num_rows, device=flat_index.device)[:, None].expand_as(next_term_ids)
        free_beams = banks * self.bank_size + flat_index // vocab_size
        beams = torch.cat((free_beams.flatten(1), rows.flatten(1)), dim=1)  # [B, C]
        next_ids = torch.cat(
            ((flat_index % vocab_size).flatten(1), next_term_ids.flatten(1)), dim=1
        )
        candidates = self.open.pick(beams)
        candidates.scores = torch.cat(
            (scores.flatten(1), torch.cat(term_scores, 2).flatten(1)), dim=1
        )
        self._append(candidates, next_ids, beams, step)
        return candidates, next_ids, beams

    def _choose_open(self, candidates: Hypotheses, step: int | Tensor) -> tuple[Tensor, Tensor]:
        terms = self.terms[self.sentence_indices]
        is_met, num_begun = term_matches(candidates.ids[:, :, : self.prompt_length + step], terms)
        lengths = (terms >= 0).sum(dim=2)[:, None]  # [B, 1, M]
        tokens_met = (lengths * is_met).sum(dim=2) + (num_begun * ~is_met).amax(dim=2)  # [B, C]
        bank_candidates = [
            candidates.scores.masked_fill(tokens_met != count, -torch.inf).topk(self.bank_size, 1)
            for count in reversed(range(self.num_banks))
        ]
        scores, index = (
            torch.cat(bank_parts, dim=1) for bank_parts in zip(*bank_candidates, strict=True)
        )
        return scores, index

    def _fill_with_truncated(self, at_limit: Tensor, truncated: Hypotheses):
        is_met, _ = term_matches(truncated.ids, self.terms[self.sentence_indices])
        truncated.scores = truncated.scores.masked_fill(~is_met.all(dim=2), -torch.inf)
        super()._fill_with_truncated(at_limit, truncated.best(self.num_beams))


def num_banks(terms: Sequence[Sequence[Sequence[int]]]) -> int:
    """Return the number of banks: one more than the largest number of term tokens of a sentence.

    Args:
        terms: For each sentence, its terms as lists of token ids.
    """
    return 1 + max((sum(map(len, sentence_terms)) for sentence_terms in terms), default=0)


def padded_terms(terms: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return terms as a tensor of token ids, [B, M, P], padded with -1.

    Args:
        terms: For each sentence, its terms as lists of token ids.
    """
    num_terms = max(map(len, terms))
    longest_length = max(len(term) for sentence_terms in terms for term in sentence_terms)
    term_ids = torch.full((len(terms), num_terms, longest_length), -1)
    for sentence_index, sentence_terms in enumerate(terms):
        for term_index, term in enumerate(sentence_terms):
            term_ids[sentence_index, term_index, : len(term)] = torch.tensor(term)
    return term_ids


def term_matches(ids: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Return which terms each hypothesis contains, and how much of other terms it ends with.

    Args:
        ids: All tokens of each hypothesis, [B, N, T].
        terms: Terms of each sentence, padded with -1, [B, M, P].

    Returns:
        Two tensors, [B, N, M] each. The first is True for a term that the hypothesis contains, and
        for a term without tokens. The second is the number of first tokens of an unfinished term
        that the hypothesis ends with, and 0 for a term that it contains.
    """
    longest_length = terms.shape[2]
    windows = torch.nn.functional.pad(ids, (0, longest_length - 1), value=-2).unfold(
        2, longest_length, 1
    )
    wanted_ids = terms[:, None, :, None]  # [B, 1, M, 1, P]
    is_met = ((windows[:, :, None] == wanted_ids) | (wanted_ids < 0)).all(dim=4).any(dim=3)
    num_begun = torch.zeros_like(is_met, dtype=torch.long)
    lengths = (terms >= 0).sum(dim=2)[:, None]  # [B, 1, M]
    for count in range(1, min(longest_length, ids.shape[2] + 1)):
        last_ids = ids[:, :, None, -count:]
        is_begun = (last_ids == terms[:, None, :, :count]).all(dim=3) & (lengths > count)
        num_begun = num_begun.masked_fill(is_begun, count)
    return is_met, num_begun.masked_fill(is_met, 0)


class ForbiddenTerms(LogitsProcessor):
    """Logits processor that forbids each token that would complete a term in the text.

    Args:
        terms: Forbidden terms of each sentence, as text; case-sensitive.
        vocabulary: Tokens of the vocabulary as bytes.
    """

    def __init__(self, terms: Sequence[Sequence[str]], vocabulary: "ByteVocabulary"):
        self.terms = [[term.encode() for term in sentence_terms] for sentence_terms in terms]
        self.vocabulary = vocabulary
        self.longest_length = max(map(len, chain.from_iterable(self.terms)), default=0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Forbid tokens that would complete a term.

        Args:
            input_ids: All tokens of each hypothesis, the same number for each sentence, [rows, T].
            scores: Scores of the next token, [rows, V].

        Returns:
            Scores, -inf for forbidden tokens, [rows, V].
        """
        rows_per_sentence = len(input_ids) // len(self.terms)
        rows: list[int] = []
        columns: list[int] = []
        for row, ids in enumerate(input_ids.tolist()):
            text_end = self._text_end(ids)
            tokens = set().union(
                *(
                    self.vocabulary.completing(term, text_end)
                    for term in self.terms[row // rows_per_sentence]
                )
            )
            rows += [row] * len(tokens)
            columns += tokens
        is_forbidden = torch.zeros_like(scores, dtype=torch.bool)
        is_forbidden[rows, columns] = True
        return scores.masked_fill(is_forbidden, -torch.inf)

    def _text_end(self, ids: Sequence[int]) -> bytes:
        """Return the last bytes of a hypothesis, enough to contain the beginning of any term."""
        text_end = b""
        for token in reversed(ids):
            if len(text_end) >= self.longest_length:
                return text_end
            text_end = self.vocabulary.join([token]) + text_end
        # a space precedes the first word too, so that a term with a leading space matches there
        return b" " + text_end


class ByteVocabulary:
    """Vocabulary as bytes, with a search for the tokens that complete a term.

    Args:
        parts: Bytes that each token adds, by id, as `token_bytes` returns them.
    """

    def __init__(self, parts: Sequence[bytes]):
        self.parts = parts
        # the results are cached, because every step of a search looks up the same terms
        self._containing = lru_cache(MOST_TERMS)(self._find_containing)
        self._beginning = lru_cache(MOST_TERMS)(self._find_beginning)

    def join(self, ids: Sequence[int]) -> bytes:
        """Return the text of tokens as bytes.

        Args:
            ids: Token ids.
        """
        # the ids of M2M100's language tokens are above those of the vocabulary
        return b"".join(self.parts[token] for token in ids if token < len(self.parts))

    def _find_containing(self, text: bytes) -> set[int]:
        return {token for token, part in enumerate(self.parts) if text in part}

    def _find_beginning(self, text: bytes) -> set[int]:
        return {token for token, part in enumerate(self.parts) if part.startswith(text)}

    def completing(self, term: bytes, end: bytes) -> set[int]:
        """Return the tokens that would complete a term if they were appended to a text.

        Args:
            term: Bytes of the term.
            end: Last bytes of the text.
        """
        prefix_lengths = (length for length in range(1, len(term)) if end.endswith(term[:length]))
        return self._containing(term).union(
            *(self._beginning(term[length:]) for length in prefix_lengths)
        )


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Return the bytes that each token adds to the text of the tokens before.

    Args:
        tokenizer: Any tokenizer.

    Returns:
        UTF-8 bytes by token id, with the space of a token that begins or ends a word; empty for
        special tokens.
    """
    token_names = {token: name for name, token in tokenizer.get_vocab().items()}
    ids = range(max(token_names) + 1)
    special_ids = set(tokenizer.all_special_ids)
    if any(name.endswith("</w>") for name in token_names.values()):
        bytes_by_id = {
            token: name.replace("</w>", " ").encode() for token, name in token_names.items()
        }
        return [b"" if token in special_ids else bytes_by_id.get(token, b"") for token in ids]
    # each token is decoded between two words, so that `decode` strips none of its spaces
    word_ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    decode_settings = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    text_before = tokenizer.decode(word_ids, **decode_settings)
    text_of_both = tokenizer.decode([*word_ids, *word_ids], **decode_settings)
    text_after = text_of_both.removeprefix(text_before)
    texts = tokenizer.batch_decode(
        [[*word_ids, token, *word_ids] for token in ids], **decode_settings
    )
    return [
        _own_bytes(token_names.get(token, ""))
        # a token that is only a part of a character has no text, so its bytes come from its name
        if "\ufffd" in text
        else text.removeprefix(text_before).removesuffix(text_after).encode()
        for token, text in zip(ids, texts, strict=True)
    ]


def _own_bytes(name: str) -> bytes:
    """Return the bytes of a token by its name: <0xC3>, or the characters of byte-level BPE."""
    if match := re.fullmatch("<0x([0-9A-F]{2})>", name):
        return bytes.fromhex(match[1])
    values = _byte_values()
    return bytes(values[character] for character in name if character in values)


@cache
def _byte_values() -> dict[str, int]:
    """Return the byte that each character of byte-level BPE stands for."""
    return {character: value for value, character in bytes_to_unicode().items()}
