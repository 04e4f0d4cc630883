"""Batches of texts of similar length, the maximum length of a source, and padding."""

from collections.abc import Mapping

from transformers import PreTrainedConfig

# default maximum number of source tokens in a batch, with padding
TOKENS_PER_BATCH = 4096


def batches_by_length(
    lengths: Mapping[int, int],
    batch_size: int | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[list[int]]:
    """Group texts of similar length into batches.

    Args:
        lengths: Number of tokens of each text, by the index of the text.
        batch_size: Maximum number of texts in a batch; None for no maximum.
        tokens_per_batch: Maximum number of tokens in a batch, with padding; a longer text is a
            batch of its own.

    Returns:
        The indices of each batch, longest texts first, so that a batch that does not fit into
        memory fails early.
    """
    batches: list[list[int]] = []
    for index in sorted(lengths, key=lengths.__getitem__, reverse=True):
        # the first text of a batch is its longest
        if (
            not batches
            or len(batches[-1]) == batch_size
            or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > tokens_per_batch
        ):
            batches.append([])
        batches[-1].append(index)
    return batches


def max_source_tokens(config: PreTrainedConfig) -> int | None:
    """Return the maximum length of a source.

    Args:
        config: Configuration of any encoder-decoder.

    Returns:
        Number of tokens, or None if there is no maximum, as with sinusoidal positions.
    """
    if getattr(config, "position_encoding", "learned") != "learned":
        return None
    return getattr(config, "max_position_embeddings", None)


def without_padding(ids: list[int], end: int | list[int] | None, pad: int | None) -> list[int]:
    """Return the tokens of a translation without padding, with the end token if there is one.

    Args:
        ids: Token ids, without the start token.
        end: Token or tokens that end a translation.
        pad: Padding token.
    """
    end_ids = {end} if isinstance(end, int) else set(end or ())
    length = next((place for place, token in enumerate(ids, 1) if token in end_ids), None)
    if length is None:
        length = len(ids)
        while length and ids[length - 1] == pad:
            length -= 1
    return ids[:length]
