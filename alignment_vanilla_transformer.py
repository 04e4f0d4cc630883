"""Word alignment from encoder-decoder attention.

A word of the translation is aligned with the source word that the decoder attends to most when it
predicts the word of the translation. Heads differ much in how well they align. `choose_heads`
compares them with a reference that needs no manual alignments: the source token whose removal
makes the target token least probable (Li et al. 2019).

Shapes: B sources, M translations of these sources, S source tokens, T target tokens, h heads of a
layer.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .changes_vanilla_transformer import changed
from .checks_vanilla_transformer import with_output_object
from .scores_vanilla_transformer import decoder_rows, token_log_probabilities

# field of a generation configuration; Whisper's has the same name
HEADS_FIELD = "alignment_heads"
# prefixes of modules whose attention functions compute equation (1) but may not return its weights
KNOWN_CODE = ("transformers.", "vanilla_transformer.")
# maximum number of heads whose weights are averaged
MOST_HEADS = 16
# number of tokens whose texts are computed together; as many tokens before them are decoded again
TOKENS_PER_WINDOW = 32


def return_weights(model: PreTrainedModel) -> Callable[[], Any]:
    """Make the attention of a model return its weights.

    Args:
        model: Any model. A user's own attention function is not replaced, because it may compute
            something other than equation (1).

    Returns:
        Function that restores the attention function.
    """
    implementation = model.config._attn_implementation
    # None for "eager", which is not in the registry
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if function is not None and function.__module__.startswith(KNOWN_CODE):
        model.set_attn_implementation("eager")
    return partial(model.set_attn_implementation, implementation)


def weights_of(
    output: Any, model: PreTrainedModel, name: str = "cross_attentions"
) -> tuple[Tensor, ...]:
    """Return the attention weights of a model output, [B, h, Q, K] per layer.

    Args:
        output: Output of the model with `output_attentions`.
        model: The model.
        name: Field of the output, by default that of encoder-decoder attention.

    Raises:
        ValueError: If a layer returns no weights.
    """
    weights = [each for each in output.get(name) or () if each is not None]
    stack = model.get_encoder() if name.startswith("encoder") else model.get_decoder()
    layers = getattr(stack, "layers", None)
    num_layers = len(layers) if isinstance(layers, nn.ModuleList) else len(weights)
    # the library leaves out layers without weights, so the index of a layer would be wrong
    if not weights or len(weights) < num_layers:
        found = f"those of {len(weights)} of {num_layers} layers" if weights else "None"
        raise ValueError(
            f"the attention function {model.config._attn_implementation!r} must return its "
            f"weights, got {found} in {name}. A changed attention must return them too, and be a "
            "subclass of the attention that it replaces."
        )
    return tuple(weights)


@torch.no_grad()
def head_weights(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    targets: Sequence[Sequence[int]],
    heads: Sequence[Sequence[int]] | None = None,
) -> list[Tensor]:
    """Return the encoder-decoder attention weights for each predicted target token.

    Args:
        model: Any encoder-decoder with encoder-decoder attention, in evaluation mode.
        inputs: `input_ids` and `attention_mask` of the sources, [B, S], on the model's device.
        targets: Token ids of M translations, without start token; M is a multiple of B, and the
            translations of one source are consecutive.
        heads: Pairs of layer and head, counted from 0, whose weights are returned; all heads if
            None.

    Returns:
        For each translation, weights in float32 on the CPU, [heads, T, S].

    Raises:
        ValueError: If the model does not have one of the heads, or returns no weights.
    """
    ids = decoder_rows(model, targets)[:, :-1].to(inputs["input_ids"].device)
    targets_per_source = len(targets) // len(inputs["input_ids"])
    repeated_inputs = {
        name: tensor.repeat_interleave(targets_per_source, dim=0) for name, tensor in inputs.items()
    }
    with changed(model, return_weights):
        caller: nn.Module = model
        is_changed = "forward" in vars(model) or model._forward_hooks or model._forward_pre_hooks
        # the encoder may not accept the further arguments of a changed model
        is_changed = is_changed or not {"input_ids", "attention_mask"}.issuperset(inputs)
        if type(model).forward.__module__.startswith(KNOWN_CODE) and not is_changed:
            # the encoder runs by itself, because its attention weights are not used and would take
            # memory. The source tokens are passed too, because FSMT does not hide later target
            # tokens without them. The model without its head computes no logits
            repeated_inputs["encoder_outputs"] = model.get_encoder()(**repeated_inputs)
            caller = model.base_model
        output = caller(
            **with_output_object(caller, repeated_inputs),
            decoder_input_ids=ids,
            output_attentions=True,
            use_cache=False,
        )
        layer_weights = weights_of(output, model)
    if heads is None:
        heads = [
            (layer, head)
            for layer, layer_weight in enumerate(layer_weights)
            for head in range(layer_weight.shape[1])
        ]
    for layer, head in heads:
        if layer >= len(layer_weights) or head >= layer_weights[layer].shape[1]:
            raise ValueError(
                f"{HEADS_FIELD} must be pairs of a layer below {len(layer_weights)} and a head "
                f"below {layer_weights[0].shape[1]}, got {[layer, head]}."
            )
    selected_weights = [layer_weights[layer][:, head] for layer, head in heads]
    stacked_weights = torch.stack(selected_weights, dim=1).float().cpu()
    return [
        weights[:, : len(tokens)] for weights, tokens in zip(stacked_weights, targets, strict=True)
    ]


def default_heads(model: PreTrainedModel) -> list[list[int]]:
    """Return the default heads for alignment: all heads of the second-to-last layer.

    Garg et al. 2019 found that of six layers, this layer aligns best. A decoder of one or two
    layers aligns best with its last layer, whose heads are then returned.

    Args:
        model: Any encoder-decoder.
    """
    config: Any = model.config
    num_layers = getattr(config, "decoder_layers", None) or config.num_hidden_layers
    num_heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
    layer = num_layers - 2 if num_layers > 2 else num_layers - 1
    return [[layer, head] for head in range(num_heads)]


def word_indices(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], has_unknown: bool = True
) -> list[int | None]:
    """Return the index of the word that each token belongs to.

    Args:
        tokenizer: Tokenizer of the ids.
        ids: Token ids of a text.
        has_unknown: Whether an unknown token stands for a word of the text. It does in a text that
            was tokenized, but not in a generated translation, whose text omits unknown tokens.

    Returns:
        For each token, the index of a word between spaces, from 0; None for a special token.
    """
    # `all_special_ids` lacks the language tokens of some tokenizers, so it is not used
    texts_with_special, texts_without_special = (
        tokenizer.batch_decode([[token] for token in ids], skip_special_tokens=skips)
        for skips in (False, True)
    )
    special_ids = {
        token
        for token, text, text_without_special in zip(
            ids, texts_with_special, texts_without_special, strict=True
        )
        if text.strip()
        and not text_without_special.strip()
        and not (has_unknown and token == tokenizer.unk_token_id)
    }
    ordinary_ids = [token for token in ids if token not in special_ids]
    prefixes = prefix_texts(tokenizer, ordinary_ids)[1:]
    num_words = len(prefixes[-1].split()) if prefixes else 0
    ordinary_indices: list[int | None] = []
    for prefix in prefixes:
        num_prefix_words = len(prefix.split())
        # a space at the end of a prefix belongs to the next word, if there is one
        word_index = (
            num_prefix_words if not prefix or prefix[-1].isspace() else num_prefix_words - 1
        )
        ordinary_indices.append(min(word_index, num_words - 1) if num_words else None)
    remaining_indices = iter(ordinary_indices)
    return [None if token in special_ids else next(remaining_indices) for token in ids]


def prefix_texts(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], **decode_settings: Any
) -> list[str]:
    """Return the texts of the first 0, 1, 2, ... tokens of a text.

    Args:
        tokenizer: Tokenizer of the ids.
        ids: T token ids.
        decode_settings: Arguments of `decode`.

    Returns:
        1 + T texts.
    """
    ids = list(ids)
    texts = [""]
    while len(texts) <= len(ids):
        # a character that begins before a window may end in it, so the window begins earlier
        start = len(texts) - 1
        while start and texts[start].endswith("\ufffd"):
            start -= 1
        window_end = min(len(texts) - 1 + TOKENS_PER_WINDOW, len(ids))
        window_start = max(0, start - TOKENS_PER_WINDOW)
        text_before, *window_texts = tokenizer.batch_decode(
            [ids[window_start:end] for end in range(start, window_end + 1)], **decode_settings
        )
        if not all(text.startswith(text_before) for text in window_texts):
            break
        del texts[start + 1 :]
        texts += [texts[start] + text[len(text_before) :] for text in window_texts]
    else:
        if texts[-1] == tokenizer.decode(ids, **decode_settings):
            return texts
    # some tokenizers change the text before a token
    return tokenizer.batch_decode([ids[:end] for end in range(len(ids) + 1)], **decode_settings)


def aligned_words(
    weights: Tensor, source: Sequence[int | None], target: Sequence[int | None]
) -> list[tuple[int, int]]:
    """Align each word of a translation with the word of the source that has the largest weight.

    Args:
        weights: Weights of tokens, [T, S].
        source: Word index of each source token, from `word_indices`; None or negative if the token
            belongs to no word.
        target: Word index of each target token, or None.

    Returns:
        Pairs of source word index and target word index, in the order of the target words.
    """
    word_of_column = {
        position: word for position, word in enumerate(source) if word is not None and word >= 0
    }
    word_of_row = {position: word for position, word in enumerate(target) if word is not None}
    if not word_of_column or not word_of_row:
        return []
    source_words, target_words = list(word_of_column.values()), list(word_of_row.values())
    word_weights = weights[list(word_of_row)][:, list(word_of_column)]
    weights_by_target = torch.zeros(1 + max(target_words), len(word_of_column))
    weights_by_target.index_add_(0, torch.tensor(target_words), word_weights)
    weights_by_word = torch.zeros(len(weights_by_target), 1 + max(source_words))
    weights_by_word.index_add_(1, torch.tensor(source_words), weights_by_target)
    best_sources = weights_by_word.argmax(dim=1).tolist()
    return [(best_sources[word], word) for word in sorted(set(target_words))]


def choose_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
) -> tuple[list[list[int]], float]:
    """Choose the heads that align best, without manual alignments.

    The reference for a target token is the source token whose removal makes the target token least
    probable. Heads are sorted by their agreement with the references. The result is the best n
    heads, n at most `MOST_HEADS`, for the n at which their mean weights agree best.

    Args:
        model: Any encoder-decoder with encoder-decoder attention, in evaluation mode.
        tokenizer: Tokenizer of the model.
        sources: Token ids of sentences, for example of the validation set.
        targets: Token ids of the translations of `sources`, without start token.

    Returns:
        Pairs of layer and head, and the share of target tokens whose reference the mean weights of
        these heads find.

    Raises:
        ValueError: If no sentence pair has two source tokens and a target token that are not
            special, or the model returns no weights.
    """
    special_ids = set(tokenizer.all_special_ids)
    pair_weights, reference_columns = [], []
    for source, target in zip(sources, targets, strict=True):
        columns = [position for position, token in enumerate(source) if token not in special_ids]
        rows = [position for position, token in enumerate(target) if token not in special_ids]
        if len(columns) < 2 or not rows:
            continue
        ids = torch.tensor([source], device=model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        (head_attention,) = head_weights(model, inputs, [target])
        pair_weights.append(head_attention[:, rows][:, :, columns].transpose(0, 1))  # [T, heads, S]
        reference_columns.append(_most_needed_columns(model, inputs, target, columns)[rows])
    if not pair_weights:
        raise ValueError(
            "at least one pair must have two source tokens and a target token, got none."
        )
    expected_columns = torch.cat(reference_columns)
    best_columns = [weights.argmax(dim=2) for weights in pair_weights]
    head_order = _agreement(best_columns, expected_columns).argsort(descending=True)
    shares = [
        float(
            _agreement(
                [weights[:, head_order[:count]].mean(dim=1).argmax(1) for weights in pair_weights],
                expected_columns,
            )
        )
        for count in range(1, min(MOST_HEADS, len(head_order)) + 1)
    ]
    count = 1 + max(range(len(shares)), key=shares.__getitem__)
    num_heads = len(default_heads(model))
    heads = [list(divmod(int(head_index), num_heads)) for head_index in head_order[:count]]
    return heads, shares[count - 1]


def _most_needed_columns(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    target: Sequence[int],
    columns: Sequence[int],
) -> Tensor:
    """Return, for each target token, the index in `columns` of its reference source token, [T]."""
    num_columns = len(columns)
    mask = inputs["attention_mask"].repeat(num_columns, 1)
    mask[torch.arange(num_columns), torch.tensor(columns)] = 0
    inputs_without_token = {
        "input_ids": inputs["input_ids"].repeat(num_columns, 1),
        "attention_mask": mask,
    }
    log_probs = token_log_probabilities([model], inputs_without_token, [target] * num_columns)
    return torch.tensor(log_probs).argmin(dim=0)


def _agreement(found_columns: Sequence[Tensor], expected_columns: Tensor) -> Tensor:
    """Return the share of tokens, [...], whose columns, [T, ...], are the expected ones, [T]."""
    columns = torch.cat(tuple(found_columns))
    is_equal = columns == expected_columns.view(-1, *[1] * (columns.dim() - 1))
    return is_equal.float().mean(dim=0)
