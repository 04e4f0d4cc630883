"""Memory that training needs, and the micro-batch that fits into the free memory."""

import ctypes
import os
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedConfig

from ...sizes import num_weights, refuse_beyond_memory, size_of
from ..config import TrainConfig
from .fused_loss import FLOAT32_BYTES, block_bytes

# logits, log-probabilities, and the gradient of one of them
VOCABULARY_COPIES = 3
# copies of attention weights that eager attention keeps: the weights; with dropout also its mask
# and output
SCORE_COPIES, SCORE_COPIES_WITH_DROPOUT = 1, 3
# temporary tensors of backward, and memory that the allocator cannot use
SLACK = 1.35
# the rest of the free memory is for drivers, buffers of libraries and other programs
USABLE = 0.9
# buffers and kernels of matrix libraries, and gaps that the allocator leaves between tensors
LIBRARY_BYTES = 2**26
# larger micro-batches are not faster on a CPU
CPU_TOKENS = 4096
# source and target tokens that cost a GPU as much time as the launch of a micro-batch costs its
# host. An H200 trained the base model in bf16 on 700 tokens a millisecond. Its host, a slow one,
# needed 70 ms for a micro-batch, so 49,000 tokens; this value assumes a host that needs 12 ms
LAUNCH_TOKENS = 8192
# a micro-batch on a GPU may have this many positions for each token of a step
PADDING_FACTOR = 2
CGROUP = Path("/sys/fs/cgroup")
# parameters of glibc's mallopt, as malloc.h numbers them
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# largest size that the C library keeps; the second value is for older versions of glibc
MMAP_THRESHOLDS = (2**30, 2**25)
TRIM_THRESHOLD = 2**31 - 1
# environment variables for the number of kernels that oneDNN, and torch's layer above it, keep; a
# step uses about thirty for each shape of a micro-batch
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KEPT_KERNELS = 128


def state_bytes(config: TrainConfig, num_parameters: int) -> dict[str, int]:
    """Return the memory of weights, gradients and optimizer state.

    Args:
        config: Settings of the run.
        num_parameters: Number of parameters in this process.

    Returns:
        Bytes of each part, by name.
    """
    parts = {
        "weights": FLOAT32_BYTES * num_parameters,
        "gradients": FLOAT32_BYTES * num_parameters,
        "Adam's moments": 2 * FLOAT32_BYTES * num_parameters,
    }
    if config.precision != "fp32":
        # one copy for all micro-batches of a step
        parts["half-precision weights"] = FLOAT32_BYTES // 2 * num_parameters
    if config.ema_decay is not None:
        parts["moving average"] = FLOAT32_BYTES * num_parameters
    return parts


def refuse_too_large(
    config: TrainConfig, model_config: PreTrainedConfig, device: torch.device, num_processes: int
) -> None:
    """Refuse a model that is too large for this machine, before it is made.

    Args:
        config: Settings of the run.
        model_config: Sizes of the model.
        device: Device of this process.
        num_processes: Number of processes.

    Raises:
        ValueError: If training needs more memory than the machine has.
    """
    parts = state_bytes(config, num_weights(model_config))
    # every process makes the weights in host memory
    needed = sum(parts.values()) if device.type == "cpu" else parts["weights"]
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    refuse_beyond_memory(processes_here * needed, "the training of this model")


def fixed_step_bytes(config: PreTrainedConfig, precision: str, device: str) -> int:
    """Return the temporary memory of a step that does not depend on the size of the batch.

    Args:
        config: Sizes of the model.
        precision: One of `config.PRECISIONS`.
        device: Device type, such as "cuda" or "cpu".

    Returns:
        Bytes of a block of logits, a second gradient of the embedding, and buffers of libraries. In
        half precision the loss also has a copy of the embedding, and on a GPU of the logits.
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
    """Return the memory of one source token and one target token of a micro-batch until backward.

    Args:
        config: Sizes of the model.
        precision: One of `config.PRECISIONS`.
        max_length: Tokens of the longest sentence; only needed if attention is not fused.
        device: Device type, such as "cuda" or "cpu".
        is_whole: Whether each process has all weights; if not, the loss keeps all logits.

    Returns:
        Bytes, rounded up generously.
    """
    # matrix products use half precision, sums and norms do not; the output of a norm is kept in
    # both
    product_bytes = FLOAT32_BYTES if precision == "fp32" else FLOAT32_BYTES // 2
    norm_bytes = FLOAT32_BYTES if precision == "fp32" else FLOAT32_BYTES + product_bytes
    d_model = config.d_model
    # mask of dropout, sum, and output of the norm
    add_and_norm = d_model * (product_bytes + FLOAT32_BYTES + norm_bytes)

    def attention(num_heads: int) -> int:
        # models of other classes have no d_k and d_v
        d_k = getattr(config, "d_k", None) or d_model // num_heads
        d_v = getattr(config, "d_v", None) or d_model // num_heads
        # query, key, value, and the context twice: per head and concatenated
        widths = num_heads * (2 * d_k + 3 * d_v) * product_bytes
        has_dropout = size_of(config, "attention_dropout") > 0
        is_fused = d_k == d_v and (device != "cpu" or not has_dropout)
        # eager attention keeps its weights
        is_fused &= config._attn_implementation != "eager"
        copies = SCORE_COPIES_WITH_DROPOUT if has_dropout else SCORE_COPIES
        scores = 0 if is_fused else copies * num_heads * max_length * product_bytes
        return widths + scores + add_and_norm

    def feed_forward(d_ff: int) -> int:
        copies = 3 if size_of(config, "activation_dropout") else 1
        return copies * d_ff * product_bytes + add_and_norm

    encoder, decoder = (
        [size_of(config, f"{stack}_{name}") for name in ("layers", "attention_heads", "ffn_dim")]
        for stack in ("encoder", "decoder")
    )
    encoder_layer = attention(encoder[1]) + feed_forward(encoder[2])
    decoder_layer = 2 * attention(decoder[1]) + feed_forward(decoder[2])
    # embedding with position, and its dropout
    embeddings = 2 * 3 * d_model * FLOAT32_BYTES
    vocabulary = 0 if is_whole else VOCABULARY_COPIES * FLOAT32_BYTES * config.vocab_size
    layers = encoder[0] * encoder_layer + decoder[0] * decoder_layer
    return int(SLACK * (layers + embeddings + vocabulary))


def free_bytes(device: torch.device, processes: int) -> int:
    """Return the free memory for this process.

    Args:
        device: Device of this process.
        processes: Number of processes that share the host memory.

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
        # the first line is "anon", memory that the kernel cannot reclaim
        taken = int(used.read_text().split()[1])
        available = min(available, int(limit.read_text()) - taken)
    return available // processes


def max_micro_batch_tokens(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    num_parameters: int,
    device: torch.device,
    num_processes: int,
    is_whole: bool = True,
) -> int:
    """Return the largest micro-batch that fits into the free memory.

    Call it when the weights are in memory, but not yet gradients and optimizer state.

    Args:
        config: Settings of the run.
        model_config: Sizes of the model.
        num_parameters: Number of parameters in this process.
        device: Device of this process.
        num_processes: Number of processes.
        is_whole: Whether each process has all weights.

    Returns:
        Maximum number of source tokens, and of target tokens, padding included; at least
        `max_length`.

    Raises:
        ValueError: If the longest sentence does not fit.
    """
    parts = state_bytes(config, num_parameters)
    not_yet = sum(parts.values()) - parts["weights"]
    not_yet += fixed_step_bytes(model_config, config.precision, device.type)
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    free = free_bytes(device, processes_here)
    each = bytes_per_token(model_config, config.precision, config.max_length, device.type, is_whole)
    fitting = (int(USABLE * free) - not_yet) // each
    if fitting < config.max_length:
        needed = (not_yet + config.max_length * each) / USABLE
        raise ValueError(
            f"{device} must have {needed / 1e9:.1f} GB of memory free for this model and one "
            f"sentence of max_length {config.max_length}, got {free / 1e9:.1f} GB."
        )
    share = -(-config.tokens_per_step // num_processes)
    most = PADDING_FACTOR * share if device.type == "cuda" else min(CPU_TOKENS, share)
    return min(fitting, max(most, config.max_length))


def keep_memory() -> None:
    """Make the C library keep freed memory for the next step, and oneDNN keep few kernels.

    By default glibc returns large tensors to the system, and mapping new pages takes an eighth of
    the time of a step. With another C library nothing changes. oneDNN makes a kernel for each shape
    of a batch, and thousands of kernels between the tensors would fragment the memory, so that
    allocations become slower and slower.
    """
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(KEPT_KERNELS))
    allocator = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    # older versions of glibc keep at most half of a heap
    if allocator is not None and any(
        allocator(M_MMAP_THRESHOLD, largest) for largest in MMAP_THRESHOLDS
    ):
        allocator(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
