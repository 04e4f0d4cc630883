"""BPE-dropout: BPE that skips merges at random, Provilkov et al. 2020."""

import heapq
import itertools
import json
import random

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from .tokenization_vanilla_transformer import symbol_token


class BpeDropout:
    """BPE segmentation of tokenized sentences that applies a random part of the merges.

    The tokenizers library also has a `dropout`, but draws its random numbers without a seed.

    Args:
        tokenizer: Fast tokenizer with a BPE model.
        dropout: Probability of skipping a merge each time that the merge is possible.

    Raises:
        ValueError: If the model is not BPE, has no merges, or marks pieces by a prefix inside of a
            word or by a suffix at its end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropout: float):
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        marks = [model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")]
        if model["type"] != "BPE" or any(marks):
            raise ValueError(
                "bpe_dropout must be 0 for a tokenizer other than BPE without marks on its pieces, "
                f"got {dropout} and {model['type']} with the marks {marks}."
            )
        if not model["merges"]:
            raise ValueError(
                "bpe_dropout must be 0 for a tokenizer without merges, whose tokens are single "
                f"characters, got {dropout}."
            )
        self.dropout = dropout
        self._ids = model["vocab"]
        self._ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        merged_tokens = {"".join(pair) for pair in self._ranks}
        characters = {token for token in self._ids if len(token) == 1}
        # the text of these tokens is not their name, or must not be split
        self._segmented_tokens = (merged_tokens | characters).difference(
            (symbol_token(symbol) for symbol in getattr(tokenizer, "symbols", [])),
            map(str, tokenizer.added_tokens_decoder.values()),
            (model.get("unk_token"),),
            (f"<0x{byte:02X}>" for byte in range(256) if model.get("byte_fallback")),
        )

    def __call__(self, encoding: Encoding, generator: random.Random) -> list[int]:
        """Segment a sentence.

        Args:
            encoding: Sentence, encoded by the tokenizer.
            generator: Random number generator.

        Returns:
            Token ids. Symbols, unknown, byte, added and end tokens keep their ids.
        """
        ids: list[int] = []
        entries = zip(encoding.word_ids, encoding.tokens, encoding.ids, strict=True)
        for (_, is_segmented), run in itertools.groupby(
            entries,
            key=lambda entry: (
                entry[0],
                entry[0] is not None and entry[1] in self._segmented_tokens,
            ),
        ):
            _, tokens, unchanged_ids = zip(*run, strict=True)
            ids += self.segment_word("".join(tokens), generator) if is_segmented else unchanged_ids
        return ids

    def segment_word(self, word: str, generator: random.Random) -> list[int]:
        """Segment a word: repeat the merge of highest priority among those that are not skipped.

        Args:
            word: Word, or a part of it without unknown, byte and added tokens, in the characters of
                the vocabulary.
            generator: Random number generator.

        Returns:
            Token ids.
        """
        end = len(word)
        # the piece that begins at each position; "" if none does, and at the end
        pieces = [*word, ""]
        # positions of the pieces before and after each one; before the first one is the end
        previous_positions, next_positions = [*range(-1, end)], [*range(1, end + 1), end]
        # possible merges, as rank and position of the left piece. Both are looked up again, because
        # a later merge can change the pieces
        merges: list[tuple[int, int]] = []

        def rank_at(position: int) -> int | None:
            return self._ranks.get((pieces[position], pieces[next_positions[position]]))

        def push(position: int):
            if (rank := rank_at(position)) is not None:
                heapq.heappush(merges, (rank, position))

        for position in range(end):
            push(position)
        skipped_merges = []
        while merges:
            rank, position = merge = heapq.heappop(merges)
            if rank_at(position) != rank:
                continue
            if generator.random() < self.dropout:
                skipped_merges.append(merge)
                continue
            right_position = next_positions[position]
            pieces[position] += pieces[right_position]
            pieces[right_position] = ""
            next_positions[position] = next_positions[right_position]
            previous_positions[next_positions[position]] = position
            push(position)
            push(previous_positions[position])
            # after each merge, a skipped merge is possible again
            for skipped_merge in skipped_merges:
                heapq.heappush(merges, skipped_merge)
            skipped_merges = []
        return [self._ids[piece] for piece in pieces if piece]
