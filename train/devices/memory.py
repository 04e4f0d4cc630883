"""Estimate the memory that training needs, and the largest micro-batch that fits into it."""

import ctypes
import os
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedConfig

from ...sizes import FLOAT32_BYTES, num_weights, refuse_beyond_memory, size_of
from ..config import TrainConfig
from .fused_loss import block_bytes

# number of tensors of the logits' size that a loss with all logits keeps: logits,
# log-probabilities, and the gradient of one of them
LOGITS_COPIES = 3
# number of tensors of the attention weights' size that eager attention keeps: the weights; with
# dropout also the mask and the output of dropout
ATTENTION_COPIES, ATTENTION_COPIES_WITH_DROPOUT = 1, 3
# factor for temporary tensors of the backward pass, and for memory that the allocator cannot use
ACTIVATION_FACTOR = 1.35
# share of the free memory to use; the rest is for drivers, buffers of libraries and other programs
USABLE_SHARE = 0.9
# memory for buffers and kernels of matrix libraries, and for gaps between tensors
LIBRARY_BYTES = 2**26
# largest useful micro-batch on a CPU, where larger micro-batches are not faster
CPU_MICRO_BATCH_TOKENS = 4096
# number of source and target tokens that a GPU computes in the time that its host needs to launch a
# micro-batch. An H200 trained the base model in bf16 on 700 tokens per millisecond. Its host, a
# slow one, needed 70 ms for a micro-batch, the time of 49,000 tokens; this value assumes a host
# that needs 12 ms
LAUNCH_TOKENS = 8192
# largest useful micro-batch on a GPU, padding included, as a multiple of the process's share of the
# tokens of a step. It is above 1, so that a micro-batch can contain the whole share and its padding
PADDING_FACTOR = 2
CGROUP_FOLDER = Path("/sys/fs/cgroup")
# parameters of glibc's mallopt, as malloc.h numbers them
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# size in bytes from which glibc maps an allocation separately, and unmaps it when it is freed; the
# second value is for older versions of glibc, which refuse the first
MMAP_THRESHOLDS = (2**30, 2**25)
# free bytes at the top of the heap above which glibc returns them to the system: the largest int32
TRIM_THRESHOLD = 2**31 - 1
# environment variables for the number of kernels that oneDNN, and torch's layer above oneDNN, cache
KERNEL_CACHE_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# number of kernels to cache; a step uses about thirty for each shape of a micro-batch
CACHED_KERNELS = 128


def state_bytes(config: TrainConfig, num_parameters: int) -> dict[str, int]:
    """Return the memory of weights, gradients and optimizer state.

    Args:
        config: Settings of the run.
        num_parameters: Number of parameters that this process stores.

    Returns:
        Size of each part in bytes, by name.
    """
    bytes_by_name = {
        "weights": FLOAT32_BYTES * num_parameters,
        "gradients": FLOAT32_BYTES * num_parameters,
        "Adam's moments": 2 * FLOAT32_BYTES * num_parameters,
    }
    if config.precision != "fp32":
        # autocast keeps one copy for all micro-batches of a step
        bytes_by_name["half-precision weights"] = FLOAT32_BYTES // 2 * num_parameters
    if config.ema_decay is not None:
        bytes_by_name["moving average"] = FLOAT32_BYTES * num_parameters
    return bytes_by_name


def refuse_too_large(
    config: TrainConfig, model_config: PreTrainedConfig, device: torch.device, num_processes: int
) -> None:
    """Refuse a model that is too large for the host memory, before the model is made.

    Args:
        config: Settings of the run.
        model_config: Sizes of the model.
        device: Device of this process.
        num_processes: Number of processes.

    Raises:
        ValueError: If the processes on this machine need more host memory than it has.
    """
    bytes_by_name = state_bytes(config, num_weights(model_config))
    # with a GPU, host memory is needed only for the weights, which every process makes there first
    needed_bytes = sum(bytes_by_name.values()) if device.type == "cpu" else bytes_by_name["weights"]
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    refuse_beyond_memory(local_processes * needed_bytes, "the training of this model")


def fixed_step_bytes(config: PreTrainedConfig, precision: str, device: str) -> int:
    """Return the temporary memory of a step that does not depend on the size of the batch.

    Args:
        config: Sizes of the model.
        precision: One of `config.PRECISIONS`.
        device: Device type, such as "cuda" or "cpu".

    Returns:
        Size in bytes of a block of logits, a second gradient of the embedding, and buffers of
        libraries. In half precision, the loss also keeps a half-precision copy of the embedding,
        and on a GPU one of the logits.
    """
    logits_bytes = block_bytes(device)
    embedding_bytes = FLOAT32_BYTES * config.vocab_size * config.d_model
    if precision != "fp32":
        logits_bytes += 0 if device == "cpu" else logits_bytes // 2
        embedding_bytes += embedding_bytes // 2
    return logits_bytes + embedding_bytes + LIBRARY_BYTES


def bytes_per_token(
    config: PreTrainedConfig,
    precision: str,
    max_length: int,
    device: str,
    uses_fused_loss: bool = True,
) -> int:
    """Return the activation memory of one source token and one target token, kept until backward.

    Args:
        config: Sizes of the model.
        precision: One of `config.PRECISIONS`.
        max_length: Number of tokens of the longest sentence; matters only if attention is not
            fused, because the attention weights of a token are then kept.
        device: Device type, such as "cuda" or "cpu".
        uses_fused_loss: Whether the fused loss is used, for which each process must have all
            weights; if not, the loss keeps all logits.

    Returns:
        Size in bytes, a conservative estimate: it may be too large.
    """
    # in half-precision training, matrix products use half precision, but sums and norms use fp32.
    # The output of a norm is kept in both precisions
    product_bytes = FLOAT32_BYTES if precision == "fp32" else FLOAT32_BYTES // 2
    norm_bytes = FLOAT32_BYTES if precision == "fp32" else FLOAT32_BYTES + product_bytes
    d_model = config.d_model
    # mask of dropout, sum of the residual connection, and output of the norm
    add_and_norm_bytes = d_model * (product_bytes + FLOAT32_BYTES + norm_bytes)

    def attention_bytes(num_heads: int) -> int:
        # models of other classes have no d_k and d_v
        d_k = getattr(config, "d_k", None) or d_model // num_heads
        d_v = getattr(config, "d_v", None) or d_model // num_heads
        # query, key, value, and the context twice: per head and concatenated
        projection_bytes = num_heads * (2 * d_k + 3 * d_v) * product_bytes
        has_dropout = size_of(config, "attention_dropout") > 0
        # torch's fused attention needs equal d_k and d_v, and on a CPU it has no dropout
        is_fused = d_k == d_v and (device != "cpu" or not has_dropout)
        # eager attention is not fused: it keeps the attention weights
        is_fused &= config._attn_implementation != "eager"
        copies = ATTENTION_COPIES_WITH_DROPOUT if has_dropout else ATTENTION_COPIES
        weights_bytes = 0 if is_fused else copies * num_heads * max_length * product_bytes
        return projection_bytes + weights_bytes + add_and_norm_bytes

    def feed_forward_bytes(d_ff: int) -> int:
        copies = 3 if size_of(config, "activation_dropout") else 1
        return copies * d_ff * product_bytes + add_and_norm_bytes

    encoder_layer_bytes = attention_bytes(size_of(config, "encoder_attention_heads"))
    encoder_layer_bytes += feed_forward_bytes(size_of(config, "encoder_ffn_dim"))
    decoder_layer_bytes = 2 * attention_bytes(size_of(config, "decoder_attention_heads"))
    decoder_layer_bytes += feed_forward_bytes(size_of(config, "decoder_ffn_dim"))
    # source and target: embedding with position, and mask and output of dropout
    embedding_bytes = 2 * 3 * d_model * FLOAT32_BYTES
    logits_bytes = 0 if uses_fused_loss else LOGITS_COPIES * FLOAT32_BYTES * config.vocab_size
    layers_bytes = (
        size_of(config, "encoder_layers") * encoder_layer_bytes
        + size_of(config, "decoder_layers") * decoder_layer_bytes
    )
    return int(ACTIVATION_FACTOR * (layers_bytes + embedding_bytes + logits_bytes))


def free_bytes(device: torch.device, local_processes: int) -> int:
    """Return the free memory for this process.

    Args:
        device: Device of this process.
        local_processes: Number of processes that share the host memory.

    Returns:
        Size in bytes.
    """
    if device.type == "cuda":
        # memory that torch's allocator has reserved, but that no tensor uses, is free too
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused_bytes
    available = psutil.virtual_memory().available
    # a container may have less memory than the machine
    limit_file, usage_file = CGROUP_FOLDER / "memory.max", CGROUP_FOLDER / "memory.stat"
    if limit_file.is_file() and usage_file.is_file() and limit_file.read_text().strip() != "max":
        # only the first line, "anon", counts as used: the kernel can reclaim the page cache
        used_bytes = int(usage_file.read_text().split()[1])
        available = min(available, int(limit_file.read_text()) - used_bytes)
    return available // local_processes


def max_micro_batch_tokens(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    num_parameters: int,
    device: torch.device,
    num_processes: int,
    uses_fused_loss: bool = True,
) -> int:
    """Return the largest micro-batch that fits into the free memory.

    Call this function when the weights are in memory, and gradients and optimizer state are not.

    Args:
        config: Settings of the run.
        model_config: Sizes of the model.
        num_parameters: Number of parameters that this process stores.
        device: Device of this process.
        num_processes: Number of processes.
        uses_fused_loss: Whether the loss is computed without keeping all logits.

    Returns:
        Maximum number of source tokens, and of target tokens, padding included; at least
        `max_length`.

    Raises:
        ValueError: If one sentence of `max_length` tokens does not fit into the free memory.
    """
    bytes_by_name = state_bytes(config, num_parameters)
    unallocated_bytes = sum(bytes_by_name.values()) - bytes_by_name["weights"]
    unallocated_bytes += fixed_step_bytes(model_config, config.precision, device.type)
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    available_bytes = free_bytes(device, local_processes)
    token_bytes = bytes_per_token(
        model_config, config.precision, config.max_length, device.type, uses_fused_loss
    )
    fitting_tokens = (int(USABLE_SHARE * available_bytes) - unallocated_bytes) // token_bytes
    if fitting_tokens < config.max_length:
        needed_bytes = (unallocated_bytes + config.max_length * token_bytes) / USABLE_SHARE
        raise ValueError(
            f"{device} must have {needed_bytes / 1e9:.1f} GB of memory free for this model and one "
            f"sentence of max_length {config.max_length}, got {available_bytes / 1e9:.1f} GB."
        )
    process_tokens = -(-config.tokens_per_step // num_processes)
    if device.type == "cuda":
        useful_tokens = PADDING_FACTOR * process_tokens
    else:
        useful_tokens = min(CPU_MICRO_BATCH_TOKENS, process_tokens)
    return min(fitting_tokens, max(useful_tokens, config.max_length))


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for the next step, and oneDNN cache few kernels.

    By default, glibc returns the memory of freed large tensors to the system, and mapping new pages
    for the next tensors takes an eighth of the time of a step. With another C library, nothing
    changes. oneDNN makes a kernel for each shape of a batch. Thousands of cached kernels between
    the tensors would fragment the memory, so that allocations become slower and slower.
    """
    for variable in KERNEL_CACHE_VARIABLES:
        os.environ.setdefault(variable, str(CACHED_KERNELS))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    # older versions of glibc refuse a threshold above half of the maximum size of a heap
    if mallopt is not None and any(
        mallopt(M_MMAP_THRESHOLD, threshold) for threshold in MMAP_THRESHOLDS
    ):
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
