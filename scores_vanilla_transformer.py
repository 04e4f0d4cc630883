"""Log-probabilities of given translations, computed in one decoder pass over all tokens.

Shapes: B sentences, N translations of these sentences, T tokens of the longest translation with its
end token, S source positions, V tokens in the vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .checks_vanilla_transformer import vocab_size_of, with_output_object
from .ensemble_vanilla_transformer import mean_log_probs

# maximum number of logits in memory at a time
MOST_LOGITS = 2**26


@torch.no_grad()
def token_log_probabilities(
    models: Sequence[PreTrainedModel],
    inputs: Mapping[str, Tensor],
    targets: Sequence[Sequence[int]],
) -> list[list[float]]:
    """Compute the log-probability of each token, given the source and the tokens before it.

    Args:
        models: Encoder-decoders with the same vocabulary, in evaluation mode. With several models,
            the probability of a token is the mean of their probabilities.
        inputs: `input_ids` and `attention_mask` of the sources, [B, S], on the model's device.
        targets: Token ids of N translations, without start token and padding; N is a multiple of B,
            and the translations of one source are consecutive.

    Returns:
        For each translation, the natural log-probability of each token.

    Raises:
        ValueError: If the configuration names no token that starts a translation.
    """
    device, num_sources = inputs["input_ids"].device, len(inputs["input_ids"])
    ids = decoder_rows(models[0], targets).to(device)
    max_target_length = ids.shape[1] - 1
    if not max_target_length:
        return [[] for _ in targets]
    source_rows = torch.arange(len(targets), device=device) // (len(targets) // num_sources)
    vocab_size = vocab_size_of(models[0].get_decoder())
    rows_per_part = max(1, MOST_LOGITS // (max_target_length * vocab_size))
    log_probs_of_targets: list[list[float]] = []
    for target_part, source_part in zip(
        ids.split(rows_per_part), source_rows.split(rows_per_part), strict=True
    ):
        model_inputs = {name: tensor[source_part] for name, tensor in inputs.items()}
        # the encoder runs again for each translation of a source, because FSMT does not hide later
        # target tokens if it gets the encoder's output without the source tokens
        outputs = [
            model(
                **with_output_object(model, model_inputs),
                decoder_input_ids=target_part[:, :-1],
                use_cache=False,
            )
            for model in models
        ]
        # [rows, T, V]
        log_probs = mean_log_probs(
            [output.logits.float().log_softmax(dim=-1) for output in outputs]
        )
        log_probs_of_targets += log_probs.gather(2, target_part[:, 1:, None])[:, :, 0].tolist()
    return [
        target_log_probs[: len(tokens)]
        for target_log_probs, tokens in zip(log_probs_of_targets, targets, strict=True)
    ]


def decoder_rows(model: PreTrainedModel, targets: Sequence[Sequence[int]]) -> Tensor:
    """Return translations as decoder rows: start token and tokens, padded with the start token.

    Args:
        model: Any encoder-decoder.
        targets: Token ids of N translations, without start token and padding.

    Returns:
        Token ids, [N, 1 + T].

    Raises:
        ValueError: If the configuration names no token that starts a translation.
    """
    config = model.generation_config
    start_id = config.decoder_start_token_id
    start_id = config.bos_token_id if start_id is None else start_id
    if start_id is None:
        raise ValueError("decoder_start_token_id must be set to score a translation, got None.")
    ids = torch.full((len(targets), 1 + max(map(len, targets), default=0)), start_id)
    for row, tokens in enumerate(targets):
        ids[row, 1 : len(tokens) + 1] = torch.tensor(tokens)
    return ids
