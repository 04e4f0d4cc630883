"""How much memory training takes, and how large a micro-batch fits into what there is."""

import ctypes
import os
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedConfig

from ...sizes import num_weights, refuse_beyond_memory, size_of
from ..config import TrainConfig
from .fused_loss import FLOAT32_BYTES, block_bytes

# scores of the vocabulary, their log-probabilities, and the gradient of one of them
VOCABULARY_COPIES = 3
# what is kept of the attention weights where they are not computed piece by piece: themselves;
# with dropout on them its mask and what it left as well
SCORE_COPIES, SCORE_COPIES_WITH_DROPOUT = 1, 3
# what comes and goes in backward, and what the allocator cannot use
SLACK = 1.35
# what a driver, a library's own buffers and other programs may yet take of what is free
USABLE = 0.9
# buffers and kernels of the libraries that multiply, and what the allocator keeps between tensors
LIBRARY_BYTES = 2**26
# more of them at once is no faster on a processor
CPU_TOKENS = 4096
CGROUP = Path("/sys/fs/cgroup")
# parameters of glibc's mallopt, as malloc.h numbers them
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# larger tensors come from the system and go back to it
LARGEST_KEPT = (2**30, 2**25)
MOST_KEPT = 2**31 - 1
# where oneDNN, and torch's own layer above it, read how many kernels they keep; a step has some
# thirty for each shape of a micro-batch
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KEPT_KERNELS = 128


def state_bytes(config: TrainConfig, num_parameters: int) -> dict[str, int]:
    """Memory that does not depend on the batch.

    Args:
        config: Settings of the run.
        num_parameters: Of the model, or of the part of it that this process holds.

    Returns:
        Bytes, by what takes them.
    """
    parts = {
        "weights": FLOAT32_BYTES * num_parameters,
        "gradients": FLOAT32_BYTES * num_parameters,
        "Adam's moments": 2 * FLOAT32_BYTES * num_parameters,
    }
    if config.precision != "fp32":
        # made once for all micro-batches of a step
        parts["half-precision weights"] = FLOAT32_BYTES // 2 * num_parameters
    if config.ema_decay is not None:
        parts["moving average"] = FLOAT32_BYTES * num_parameters
    return parts


def refuse_too_large(
    config: TrainConfig, model_config: PreTrainedConfig, device: torch.device, num_processes: int
) -> None:
    """Refuse a model that this machine cannot hold, before any of it is made.

    Args:
        config: Settings of the run.
        model_config: Sizes of the model.
        device: Where this process trains.
        num_processes: Processes that share a step.

    Raises:
        ValueError: If it needs more memory than the machine has.
    """
    parts = state_bytes(config, num_weights(model_config))
    # every process makes the weights in the memory of the host
    needed = sum(parts.values()) if device.type == "cpu" else parts["weights"]
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    refuse_beyond_memory(processes_here * needed, "the training of this model")


def batchless_bytes(config: PreTrainedConfig, precision: str, device: str) -> int:
    """Memory that a step takes, however large the batch.

    Args:
        config: Sizes of the model.
        precision: One of `config.PRECISIONS`.
        device: "cuda", "cpu" and so on.

    Returns:
        Bytes: some scores of the vocabulary, a gradient of the embedding beside that of the
        micro-batches before, and what the libraries take for themselves; in half precision the
        loss has a copy of the embedding, and on an accelerator of its scores.
    """
    scores, embedding = block_bytes(device), FLOAT32_BYTES * config.vocab_size * config.d_model
    if precision != "fp32":
        scores += 0 if device == "cpu" else scores // 2
        embedding += embedding // 2
    return scores + embedding + LIBRARY_BYTES


def bytes_per_token(
    config: PreTrainedConfig,
    precision: str,
    max_length: int,
    device: str,
    is_whole: bool = True,
) -> int:
    """Memory that one source and one target token of a micro-batch take until backward is through.

    Args:
        config: Sizes of the model.
        precision: One of `config.PRECISIONS`.
        max_length: The longest sentence, in tokens; decides only where attention is not fused.
        device: "cuda", "cpu" and so on.
        is_whole: Whether a process has all weights; if not, it keeps the scores of all tokens.

    Returns:
        Bytes, more rather than fewer.
    """
    # the products are in half precision, sums and norms are not; a norm's output is kept in both
    half = FLOAT32_BYTES if precision == "fp32" else FLOAT32_BYTES // 2
    kept_norm = FLOAT32_BYTES if precision == "fp32" else FLOAT32_BYTES + half
    d_model = config.d_model
    # dropout's mask, the sum, and its norm
    add_and_norm = d_model * (half + FLOAT32_BYTES + kept_norm)

    def attention(num_heads: int) -> int:
        # models of other classes have heads of one width
        d_k = getattr(config, "d_k", None) or d_model // num_heads
        d_v = getattr(config, "d_v", None) or d_model // num_heads
        # query, key and value, and the context twice: heads apart and side by side
        widths = num_heads * (2 * d_k + 3 * d_v) * half
        has_dropout = size_of(config, "attention_dropout") > 0
        is_fused = d_k == d_v and (device != "cpu" or not has_dropout)
        # eager attention keeps its scores
        is_fused &= config._attn_implementation != "eager"
        copies = SCORE_COPIES_WITH_DROPOUT if has_dropout else SCORE_COPIES
        scores = 0 if is_fused else copies * num_heads * max_length * half
        return widths + scores + add_and_norm

    def feed_forward(d_ff: int) -> int:
        copies = 3 if size_of(config, "activation_dropout") else 1
        return copies * d_ff * half + add_and_norm

    encoder, decoder = (
        [size_of(config, f"{stack}_{name}") for name in ("layers", "attention_heads", "ffn_dim")]
        for stack in ("encoder", "decoder")
    )
    encoder_layer = attention(encoder[1]) + feed_forward(encoder[2])
    decoder_layer = 2 * attention(decoder[1]) + feed_forward(decoder[2])
    # embedding with position, and dropout on it
    embeddings = 2 * 3 * d_model * FLOAT32_BYTES
    vocabulary = 0 if is_whole else VOCABULARY_COPIES * FLOAT32_BYTES * config.vocab_size
    layers = encoder[0] * encoder_layer + decoder[0] * decoder_layer
    return int(SLACK * (layers + embeddings + vocabulary))


def free_bytes(device: torch.device, processes: int) -> int:
    """Memory that this process can still have.

    Args:
        device: Where it trains.
        processes: How many share the host's memory.

    Returns:
        Bytes.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    available = psutil.virtual_memory().available
    # a container may have less than the machine
    limit, used = CGROUP / "memory.max", CGROUP / "memory.stat"
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        # the first line is what cannot be dropped
        taken = int(used.read_text().split()[1])
        available = min(available, int(limit.read_text()) - taken)
    return available // processes


def tokens_that_fit(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    num_parameters: int,
    device: torch.device,
    num_processes: int,
    is_whole: bool = True,
) -> int:
    """How large a micro-batch can be, when the weights are in memory and nothing else yet.

    Args:
        config: Settings of the run.
        model_config: Sizes of the model.
        num_parameters: Of the model, or of the part of it that this process holds.
        device: Where this process trains.
        num_processes: Processes that share a step.
        is_whole: As in `bytes_per_token`.

    Returns:
        Source or target tokens, padding included; never more than one process has of a step.

    Raises:
        ValueError: If the longest sentence does not fit.
    """
    parts = state_bytes(config, num_parameters)
    to_come = sum(parts.values()) - parts["weights"]
    to_come += batchless_bytes(model_config, config.precision, device.type)
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    free = free_bytes(device, processes_here)
    each = bytes_per_token(model_config, config.precision, config.max_length, device.type, is_whole)
    fitting = (int(USABLE * free) - to_come) // each
    if fitting < config.max_length:
        needed = (to_come + config.max_length * each) / USABLE
        raise ValueError(
            f"{device} must have {needed / 1e9:.1f} GB of memory free for this model and one "
            f"sentence of max_length {config.max_length}, got {free / 1e9:.1f} GB."
        )
    share = -(-config.tokens_per_step // num_processes)
    most = share if device.type == "cuda" else min(CPU_TOKENS, share)
    return min(fitting, max(most, config.max_length))


def keep_memory() -> None:
    """Let the C library keep what a step of training frees, for the next step.

    It would give large tensors back to the system, which makes them anew of empty pages: an eighth
    of the time of a step. Where there is no such library, nothing changes. oneDNN, where it
    multiplies, is to keep little: it makes a kernel for each shape of a batch, and thousands of
    them, between the tensors, leave the memory in so many pieces that to find one takes longer and
    longer.
    """
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(KEPT_KERNELS))
    allocator = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    # older versions of the library keep half of a heap at most
    if allocator is not None and any(
        allocator(M_MMAP_THRESHOLD, largest) for largest in LARGEST_KEPT
    ):
        allocator(M_TRIM_THRESHOLD, MOST_KEPT)
