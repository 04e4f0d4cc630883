"""Check the sizes that a configuration declares, before a model with these sizes is built."""

from pathlib import Path
from typing import Any

import psutil
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME, cached_file

from .configuration_vanilla_transformer import LAYER_FIELDS, VanillaTransformerConfig

# names of this package's fields in the configurations of T5 and similar models
T5_NAMES = {
    "encoder_layers": "num_layers",
    "encoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "d_ff",
    "decoder_layers": "num_decoder_layers",
    "decoder_attention_heads": "num_heads",
    "decoder_ffn_dim": "d_ff",
    "dropout": "dropout_rate",
}
# names of the vocabulary size in the configurations of Marian and FSMT
VOCABULARY_FIELDS = ("vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size")
# largest number of layers in a stack, and of weights; more layers take minutes to build, even if no
# memory is allocated for their weights
MOST_LAYERS, MOST_WEIGHTS = 1000, 10**13
# number of weights by which a configuration may exceed the weight files. If fewer are missing, the
# later check of the loaded weights names a missing weight
SPARE_WEIGHTS = 2**22
FLOAT32_BYTES = 4
# names of weight files, in the order in which transformers looks for them
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
WEIGHT_SUFFIXES = (".safetensors", ".bin")
CGROUP = Path("/sys/fs/cgroup")


def size_of(config: PreTrainedConfig, name: str) -> Any:
    """Return a field of a configuration, under its name in this package or in T5.

    Args:
        config: Configuration of a model.
        name: Name of the field in this package.

    Returns:
        The value; 0 if the configuration has no such field.
    """
    return getattr(config, name, getattr(config, T5_NAMES.get(name, name), 0))


def num_weights(config: PreTrainedConfig) -> int:
    """Count the weights of a model's matrices from the sizes in its configuration.

    Args:
        config: Configuration of an encoder-decoder.

    Returns:
        Number of weights, without biases and norms; an estimate for models of other packages.
    """
    is_ours = isinstance(config, VanillaTransformerConfig)
    d_model = size_of(config, "d_model")
    num_embeddings = max(size_of(config, name) or 0 for name in VOCABULARY_FIELDS)
    # untied: embeddings of source and target, and the output projection
    num_embeddings *= 3 if is_ours and not config.tie_word_embeddings else 1
    if not is_ours or config.position_encoding == "learned":
        num_embeddings += 2 * size_of(config, "max_position_embeddings")

    def attention_weights(num_heads: int) -> int:
        d_k, d_v = (
            getattr(config, name, None)
            or getattr(config, "d_kv", None)
            or d_model // max(num_heads, 1)
            for name in ("d_k", "d_v")
        )
        return 2 * num_heads * (d_k + d_v) * d_model

    (encoder_depth, encoder_heads, encoder_width), (decoder_depth, decoder_heads, decoder_width) = (
        [size_of(config, f"{stack}_{name}") for name in ("layers", "attention_heads", "ffn_dim")]
        for stack in ("encoder", "decoder")
    )
    encoder_layer = attention_weights(encoder_heads) + 2 * encoder_width * d_model
    decoder_layer = 2 * attention_weights(decoder_heads) + 2 * decoder_width * d_model
    layers = encoder_depth * encoder_layer + decoder_depth * decoder_layer
    return num_embeddings * d_model + layers


def _describe_sizes(config: PreTrainedConfig) -> str:
    names = ("vocab_size", "d_model", *LAYER_FIELDS, "d_k", "d_v", "max_position_embeddings")
    sizes = {name: size_of(config, name) for name in names}
    return ", ".join(f"{name} {size:,}" for name, size in sizes.items() if size)


def refuse_impossible(config: PreTrainedConfig, origin: str | Path) -> None:
    """Refuse sizes that are too large for any model, before a layer is built.

    Args:
        config: Configuration of an encoder-decoder.
        origin: File or model that declares the sizes, for the error.

    Raises:
        ValueError: If the stacks have too many layers, or the model too many weights.
    """
    for name in ("encoder_layers", "decoder_layers"):
        if size_of(config, name) > MOST_LAYERS:
            raise ValueError(
                f"{origin}: {name} must be at most {MOST_LAYERS:,}, got {size_of(config, name):,}."
            )
    declared_weights = num_weights(config)
    if declared_weights > MOST_WEIGHTS:
        raise ValueError(
            f"{origin}: a model must have at most {MOST_WEIGHTS:,} weights, got "
            f"{declared_weights:,} by {_describe_sizes(config)}."
        )


def refuse_beyond_memory(needed_bytes: int, data_name: str) -> None:
    """Refuse data that is larger than the memory of this machine.

    Args:
        needed_bytes: Size of the data, in bytes.
        data_name: Name of the data, for the error.

    Raises:
        ValueError: If the data is larger than the total memory, free or in use.
    """
    memory_bytes = psutil.virtual_memory().total
    # the limit of a container may be lower
    limit_file = CGROUP / "memory.max"
    if limit_file.is_file() and (limit_text := limit_file.read_text().strip()) != "max":
        memory_bytes = min(memory_bytes, int(limit_text))
    if needed_bytes > memory_bytes:
        raise ValueError(
            f"{data_name} must fit into the memory of this machine, which has "
            f"{memory_bytes / 1e9:,.1f} GB, got {needed_bytes / 1e9:,.1f} GB."
        )


def refuse_other_sizes(config: PreTrainedConfig, source: str | Path) -> None:
    """Refuse a configuration that declares many more weights than the weight files contain.

    Args:
        config: Configuration of the source.
        source: Folder or Hub name.

    Raises:
        ValueError: If the files are too small for the weights, or too large for the memory.
    """
    refuse_impossible(config, Path(source, CONFIG_NAME))
    num_bytes = _weight_bytes(source)
    if num_bytes is None:
        return
    declared_weights = num_weights(config)
    # a weight takes at least one byte, so the files contain at most as many weights as bytes
    if declared_weights > num_bytes + SPARE_WEIGHTS:
        raise ValueError(
            f"{Path(source, CONFIG_NAME)} must declare the sizes of its weights, got "
            f"{declared_weights:,} weights by {_describe_sizes(config)}, and files of "
            f"{num_bytes:,} bytes."
        )
    refuse_beyond_memory(num_bytes, f"the weights of {source}")


def _weight_bytes(source: str | Path) -> int | None:
    """Return the size of a model's weight files in bytes, or None if no file is local."""
    folder = Path(source)
    if not folder.is_dir():
        files = (
            cached_file(source, name, _raise_exceptions_for_missing_entries=False)
            for name in WEIGHT_FILES
        )
        first_file = next((file for file in files if file), None)
        # the files that an index names are not downloaded yet
        if first_file is None or first_file.endswith(".json"):
            return None
        folder = Path(first_file).parent
    sizes = [path.stat().st_size for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES]
    return sum(sizes) if sizes else None
