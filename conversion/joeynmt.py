"""Convert checkpoints of JoeyNMT's Transformer, which is pre-norm or post-norm."""

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..console import LONGEST_VALUE, shortened
from ..loading import foreign_advice
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..records import (
    NUMBER,
    TEXT,
    TRUTH,
    check,
    either,
    list_of,
    mapping,
    one_of,
    or_null,
    read_text,
    whole_number,
)
from ..tokenization.sentence_pieces import SPACE, read_sentence_pieces
from .toolkit_files import add_end_token, read_checkpoint, read_lines, token_tokenizer
from .weights import Converted, build_model, number_of_layers, rename_weights, required_entry

# description of the weights in error messages
WEIGHTS_ORIGIN = "the weights of JoeyNMT's Transformer"
ONE_VOCABULARY = "source and target must share one vocabulary (the same voc_file for src and trg)"
CONFIG_FILE = "config.yaml"
# largest configuration; PyYAML needs far more memory than the text
MOST_CHARACTERS = 1 << 20
STACKS = ("encoder", "decoder")
# default names of the special tokens with the ids 0 to 3
SPECIAL_TOKENS = {
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "eos_token": "</s>",
}
UNK_ID, PAD_ID, BOS_ID, EOS_ID = range(4)
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
# values of settings that a configuration leaves out
DEFAULT_TYPES = {"encoder": "recurrent", "decoder": "transformer"}
DEFAULT_HEADS = {"encoder": 4, "decoder": 8}
STACK_SCHEMA = mapping(
    optional={
        "type": TEXT,
        "num_heads": whole_number(1),
        "layer_norm": one_of("pre", "post"),
        "alpha": NUMBER,
        "activation": one_of(*ACTIVATIONS),
        "dropout": NUMBER,
        "embeddings": mapping(optional={"scale": TRUTH}),
    }
)
# settings of a text; those of JoeyNMT 1 are the same for both sides
TEXT_SCHEMAS = {
    "level": one_of("word", "bpe", "char"),
    "lowercase": TRUTH,
    "normalize": TRUTH,
    "tokenizer_type": one_of("sentencepiece", "subword-nmt"),
    "bpe_type": TEXT,
    "voc_file": or_null(TEXT),
    "src_vocab": or_null(TEXT),
    "trg_vocab": or_null(TEXT),
    "has_prompt": TRUTH,
    "tokenizer_cfg": mapping(
        optional=dict.fromkeys(("pretokenizer", "model_file", "codes", "separator"), TEXT)
    ),
}
SIDE_SCHEMA = mapping({"lang": TEXT}, TEXT_SCHEMAS)
CONFIG_SCHEMA = mapping(
    {
        "model": mapping({"encoder": STACK_SCHEMA, "decoder": STACK_SCHEMA}),
        "data": mapping(
            # in JoeyNMT 1, a language
            dict.fromkeys(("src", "trg"), either(SIDE_SCHEMA, TEXT)),
            {
                **TEXT_SCHEMAS,
                "special_symbols": mapping(
                    optional={
                        **dict.fromkeys(SPECIAL_TOKENS, TEXT),
                        "sep_token": or_null(TEXT),
                        "lang_tags": list_of(TEXT),
                    }
                ),
            },
        ),
    },
    {"testing": mapping(optional={"generate_unk": TRUTH})},
)
# settings of JoeyNMT's search that the paper's search replaces
SEARCH_SETTINGS = (
    "beam_size",
    "beam_alpha",
    "alpha",
    "max_output_length",
    "repetition_penalty",
    "no_repeat_ngram_size",
)
# pieces of JoeyNMT's weight names and our pieces; replaced in this order
RENAMES = {
    "coder.layer_norm.": "coder.norm.",
    ".feed_forward.layer_norm.": ".feed_forward_norm.",
    ".pwff_layer.0.": ".fc1.",
    ".pwff_layer.3.": ".fc2.",
    ".src_src_att.": ".self_attention.",
    ".trg_trg_att.": ".self_attention.",
    ".src_trg_att.": ".cross_attention.",
    ".x_layer_norm.": ".self_attention_norm.",
    ".dec_layer_norm.": ".cross_attention_norm.",
    ".layer_norm.": ".self_attention_norm.",
    ".q_layer.": ".q_proj.",
    ".k_layer.": ".k_proj.",
    ".v_layer.": ".v_proj.",
    "_attention.output_layer.": "_attention.out_proj.",
}
# names of source embedding, target embedding and output projection
EMBEDDINGS_AND_OUTPUT = (
    "src_embed.lut.weight",
    "trg_embed.lut.weight",
    "decoder.output_layer.weight",
)
# tables of sinusoids
SINUSOIDS = ("encoder.pe.pe", "decoder.pe.pe")
# description of a tokenizer that does not split text itself
READS_TOKENS = "reads tokens separated by spaces"
# replacements of the setting `normalize`: quotation marks, after Unicode's NFKC, and spaces
QUOTATION_MARKS: tuple[tuple[str | Regex, str], ...] = (
    ("\u2019", "'"),
    ("\u201c", '"'),
    ("\u201d", '"'),
)
EXTRA_SPACES: tuple[tuple[str | Regex, str], ...] = (
    ("\u200b", ""),
    # spaces and ideographic spaces
    (Regex("[ \u3000]+"), " "),
    *((f" {mark}", mark) for mark in "?!,.:"),
)


class TextSettings(NamedTuple):
    """Settings of the text of one side.

    Args:
        lang: Language, for Moses.
        split: Way to split text into tokens: "word", "char", "sentencepiece" or "subword-nmt".
        is_old: Whether the settings are those of JoeyNMT 1, which reads text that is already split.
        has_moses: Whether Moses tokenizes the text before it is split.
        normalize: Whether characters and spaces are normalized.
        lowercase: Whether the text is lowercased.
        has_prompt: Whether a text may begin with a prompt.
        model_file: SentencePiece model, or empty.
        codes: File of BPE codes, or empty.
        separator: End of a BPE piece that does not end a word.
        voc_file: Vocabulary, or empty.
    """

    lang: str
    split: str
    is_old: bool
    has_moses: bool
    normalize: bool
    lowercase: bool
    has_prompt: bool
    model_file: str
    codes: str
    separator: str
    voc_file: str


def from_joeynmt(source: str | Path) -> VanillaTransformerForConditionalGeneration:
    """Convert a checkpoint of JoeyNMT to this package; the same ids give the same logits.

    Args:
        source: Checkpoint file with `config.yaml` in its folder, or a model folder, whose
            `best.ckpt` is read.

    Returns:
        The model in evaluation mode, in float32 on the CPU.

    Raises:
        ValueError: If the model is outside this architecture; the message names the reason.
        OSError: If a file cannot be read.
    """
    checkpoint = _checkpoint_file(source)
    weights = read_checkpoint(checkpoint, "model_state")["model_state"]
    config = _read_config(checkpoint.parent)
    _refuse_foreign(config, weights)
    source_embeddings, target_embeddings, output_weight = (
        required_entry(weights, name, WEIGHTS_ORIGIN) for name in EMBEDDINGS_AND_OUTPUT
    )
    if len(source_embeddings) != len(target_embeddings):
        raise ValueError(
            f"{ONE_VOCABULARY}, got separate vocabularies of {len(source_embeddings)} and "
            f"{len(target_embeddings)} tokens."
        )
    # tied embeddings have the settings of the encoder
    target_stack = "encoder" if config["model"].get("tied_embeddings") else "decoder"
    source_embeddings = _scaled(source_embeddings, config["model"]["encoder"])
    target_embeddings = _scaled(target_embeddings, config["model"][target_stack])
    embeddings_are_equal = torch.equal(source_embeddings, target_embeddings)
    is_tied = embeddings_are_equal and torch.equal(target_embeddings, output_weight)
    stack_weights = {
        f"model.{name}": tensor
        for name, tensor in weights.items()
        if name not in (*EMBEDDINGS_AND_OUTPUT, *SINUSOIDS)
    }
    our_weights = rename_weights(stack_weights, RENAMES) | {
        "model.encoder.embed_tokens.weight": source_embeddings,
        "model.decoder.embed_tokens.weight": target_embeddings,
        "lm_head.weight": output_weight,
    }
    our_config = VanillaTransformerConfig(
        **_fields(config, weights),
        vocab_size=len(target_embeddings),
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        decoder_start_token_id=BOS_ID,
        tie_word_embeddings=is_tied,
    )
    model = build_model(our_config, our_weights, "a JoeyNMT model")
    # JoeyNMT's beam search generates neither these tokens nor an empty translation
    excluded_ids = [PAD_ID, BOS_ID, *range(EOS_ID + 1, len(_special_tokens(config)))]
    if not config.get("testing", {}).get("generate_unk", True):
        excluded_ids.append(UNK_ID)
    model.generation_config.bad_words_ids = [[token_id] for token_id in excluded_ids]
    model.generation_config.min_new_tokens = 1
    return model


def joeynmt_with_tokenizer(source: str | Path) -> Converted:
    """Convert a checkpoint, and build a tokenizer from vocabulary and configuration next to it.

    Args:
        source: Checkpoint file of JoeyNMT, or a model folder, as for `from_joeynmt`.

    Returns:
        The model, the tokenizer or None, and a text about the tokenizer. The tokenizer splits text
        into words, characters or the pieces of a SentencePiece model. If JoeyNMT uses subword-nmt
        or Moses, the tokenizer reads text that these programs have split, and the text says so.
        Without a vocabulary, the tokenizer is None.

    Raises:
        ValueError: If the model is outside this architecture, the vocabularies of source and target
            differ, the vocabulary and the embedding differ in size, or a file is invalid.
        OSError: If a file cannot be read.
    """
    model = from_joeynmt(source)
    return model, *_tokenizer(_checkpoint_file(source).parent, model.config.vocab_size)


def _tokenizer(folder: Path, vocab_size: int) -> tuple[PreTrainedTokenizerBase | None, str]:
    config = _read_config(folder)
    settings, target_settings = (_text_settings(config, side) for side in ("src", "trg"))
    vocabulary_file = _vocabulary_file(folder, "src", settings)
    target_vocabulary_file = _vocabulary_file(folder, "trg", target_settings)
    if vocabulary_file is None or target_vocabulary_file is None:
        return None, f"No tokenizer: {folder} has no src_vocab.txt and trg_vocab.txt."
    # the file of a user may lack the special tokens
    tokens, target_tokens = (
        list(dict.fromkeys([*_special_tokens(config), *read_lines(path)]))
        for path in (vocabulary_file, target_vocabulary_file)
    )
    if tokens != target_tokens:
        raise ValueError(f"{ONE_VOCABULARY}, got different ones in {folder}.")
    if len(tokens) != vocab_size:
        raise ValueError(
            f"{vocabulary_file} must have {vocab_size} tokens, as the embedding has, got "
            f"{len(tokens)}."
        )
    special_tokens = dict(zip(SPECIAL_TOKENS, tokens, strict=False))
    tokenizer, what_it_does = _splitting_tokenizer(folder, settings, tokens, special_tokens)
    backend = tokenizer.backend_tokenizer
    is_split = what_it_does != READS_TOKENS
    steps_before, own_normalizers = _text_steps(settings, vocabulary_file, is_split)
    own_normalizers += filter(None, [backend.normalizer])
    backend.normalizer = normalizers.Sequence(own_normalizers)
    backend.decoder = decoders.Sequence(_decoding_steps(target_settings, backend.decoder))
    sentences = [f"The tokenizer {what_it_does}."]
    if steps_before:
        sentences.append(f"First prepare a text as JoeyNMT does: {', then '.join(steps_before)}.")
    if target_settings.has_moses:
        command = f"sacremoses -l {target_settings.lang} detokenize"
        sentences.append(f"The translations need `{command}`.")
    return tokenizer, " ".join(sentences)


def joeynmt_search(source: str | Path) -> dict[str, Any]:
    """Return the settings of JoeyNMT's search that the paper's search replaces.

    Args:
        source: Checkpoint file of JoeyNMT, or a model folder.

    Returns:
        Values by JoeyNMT's names, from the section `testing` of the configuration.

    Raises:
        ValueError: If the configuration is missing or invalid.
        OSError: If the configuration cannot be read.
    """
    settings = _read_config(_checkpoint_file(source).parent).get("testing", {})
    # -1 means that a setting is off
    return {name: settings[name] for name in SEARCH_SETTINGS if settings.get(name, -1) != -1}


def _checkpoint_file(source: str | Path) -> Path:
    """Return the given file, or the file that JoeyNMT loads from a model folder."""
    source = Path(source)
    if not source.is_dir():
        return source
    names = sorted(path.name for path in source.glob("*.ckpt") if path.is_file())
    for name in ("best.ckpt", "latest.ckpt"):
        if name in names:
            return source / name
    if len(names) != 1:
        raise ValueError(
            f"SOURCE must be a checkpoint of JoeyNMT, or a folder with best.ckpt, got {source}, "
            f"which has {shortened(', '.join(names), LONGEST_VALUE) or 'no checkpoint (.ckpt)'}."
            f"{foreign_advice(source)}"
        )
    return source / names[0]


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"the folder of a checkpoint of JoeyNMT must have {CONFIG_FILE}, got none in {folder}."
        )
    text = read_text(path)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"{path} must be of at most {MOST_CHARACTERS:,} characters, got {len(text):,}."
        )
    try:
        config = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line_number = error.problem_mark.line + 1
        raise ValueError(f"{path} line {line_number} must be YAML: {error.problem}.") from error
    # for an invalid date PyYAML raises a ValueError, for an invalid character another YAMLError
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be YAML: {' '.join(str(error).split())}.") from error
    check(config, CONFIG_SCHEMA, path)
    return config


def _refuse_foreign(config: dict[str, Any], weights: dict[str, Tensor]):
    """Refuse settings that this architecture does not have."""
    for stack in STACKS:
        settings = config["model"][stack]
        stack_type = settings.get("type", DEFAULT_TYPES[stack])
        if stack_type != "transformer":
            raise ValueError(
                f"model.{stack}.type must be transformer, got {stack_type}: that is a recurrent "
                "network, outside this architecture."
            )
        if settings.get("alpha", 1) != 1:
            raise ValueError(
                f"model.{stack}.alpha must be 1, got {settings['alpha']}: that is a weight of the "
                "residual connections, outside this architecture."
            )
    for side in ("src", "trg"):
        if _text_settings(config, side).has_prompt:
            raise ValueError(
                f"data.{side}.has_prompt must be false, got true: that is an embedding that marks "
                "prompts, outside this architecture."
            )
    is_named = "layer_norm" in config["model"]["encoder"]
    if not is_named and "encoder.layer_norm.weight" not in weights:
        raise ValueError(
            "model.encoder.layer_norm must be pre or post, got none: that is a pre-norm encoder "
            "without a final norm, outside this architecture."
        )


def _scaled(embeddings: Tensor, stack_settings: dict[str, Any]) -> Tensor:
    """Divide embeddings that JoeyNMT does not scale: our model multiplies by sqrt(d_model)."""
    if stack_settings.get("embeddings", {}).get("scale"):
        return embeddings
    return embeddings / embeddings.shape[1] ** 0.5


def _fields(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return the fields of our configuration that describe the layers."""
    settings = {
        stack: {
            "num_heads": DEFAULT_HEADS[stack],
            # JoeyNMT 1 has no such setting, and is pre-norm
            "layer_norm": "pre" if f"{stack}.layer_norm.weight" in weights else "post",
            "activation": "relu",
            **config["model"][stack],
        }
        for stack in STACKS
    }
    for name in ("num_heads", "layer_norm", "activation"):
        encoder_value, decoder_value = (settings[stack][name] for stack in STACKS)
        if encoder_value != decoder_value:
            raise ValueError(
                f"{name} of encoder and decoder must be equal, got {encoder_value} and "
                f"{decoder_value}."
            )
    stack_fields = {}
    for stack in STACKS:
        stack_fields[f"{stack}_layers"] = number_of_layers(weights, f"{stack}.layers.")
        fc1_weight = required_entry(
            weights, f"{stack}.layers.0.feed_forward.pwff_layer.0.weight", WEIGHTS_ORIGIN
        )
        stack_fields[f"{stack}_ffn_dim"] = fc1_weight.shape[0]
        stack_fields[f"{stack}_attention_heads"] = settings[stack]["num_heads"]
    dropout = settings["encoder"].get("dropout", 0.1)
    return {
        **stack_fields,
        "hidden_size": weights[EMBEDDINGS_AND_OUTPUT[0]].shape[1],
        "norm_first": settings["encoder"]["layer_norm"] == "pre",
        "attention_bias": True,
        "activation_function": ACTIVATIONS[settings["encoder"]["activation"]],
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        "layer_norm_eps": 1e-6,
    }


def _special_tokens(config: dict[str, Any]) -> list[str]:
    """Return the tokens with which JoeyNMT begins a vocabulary."""
    symbols = config["data"].get("special_symbols", {})
    tokens = [symbols.get(name, default) for name, default in SPECIAL_TOKENS.items()]
    tokens += filter(None, [symbols.get("sep_token")])
    return tokens + symbols.get("lang_tags", [])


def _vocabulary_file(folder: Path, side: str, settings: TextSettings) -> Path | None:
    paths = [folder / name for name in (f"{side}_vocab.txt", Path(settings.voc_file).name)]
    return next((path for path in paths if path.is_file()), None)


def _text_settings(config: dict[str, Any], side: str) -> TextSettings:
    data = config["data"]
    is_old = isinstance(data[side], str)
    settings = data if is_old else data[side]
    tokenizer_settings = settings.get("tokenizer_cfg", {})
    level = settings.get("level", "word")
    default_type = settings.get("bpe_type", "subword-nmt" if is_old else "sentencepiece")
    return TextSettings(
        lang=data[side] if is_old else settings["lang"],
        split=settings.get("tokenizer_type", default_type) if level == "bpe" else level,
        is_old=is_old,
        has_moses=tokenizer_settings.get("pretokenizer", "none").lower() == "moses",
        normalize=settings.get("normalize", False),
        lowercase=settings.get("lowercase", False),
        has_prompt=settings.get("has_prompt", False),
        model_file=tokenizer_settings.get("model_file", ""),
        codes=tokenizer_settings.get("codes", ""),
        separator=tokenizer_settings.get("separator", "@@"),
        voc_file=settings.get(f"{side}_vocab" if is_old else "voc_file") or "",
    )


def _splitting_tokenizer(
    folder: Path, settings: TextSettings, tokens: list[str], special_tokens: dict[str, str]
) -> tuple[PreTrainedTokenizerFast, str]:
    """Return a tokenizer that splits text as JoeyNMT does, or reads tokens; and what it does."""
    if settings.split == "sentencepiece" and not settings.is_old:
        path = folder / Path(settings.model_file).name
        pieces_tokenizer = _pieces_tokenizer(path, tokens, special_tokens)
        if pieces_tokenizer is not None:
            return pieces_tokenizer, f"is that of {path}"
    tokenizer = token_tokenizer(tokens, special_tokens, adds_eos=True)
    backend = tokenizer.backend_tokenizer
    if settings.split == "char":
        # JoeyNMT 1 keeps the space
        if SPACE in tokens:
            backend.normalizer = normalizers.Replace(" ", SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        return tokenizer, "splits text into characters"
    if settings.split == "word":
        if not settings.is_old:
            backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
        return tokenizer, "splits text at spaces"
    return tokenizer, READS_TOKENS


def _pieces_tokenizer(
    path: Path, tokens: list[str], special_tokens: dict[str, str]
) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a SentencePiece model with the ids of a vocabulary.

    The tokenizer is None without the file, or if the vocabulary lacks some pieces: SentencePiece
    then splits these pieces further.
    """
    if not path.is_file():
        return None
    tokenizer = read_sentence_pieces(path)
    if tokenizer.get_vocab().keys() - {*tokens, *tokenizer.all_special_tokens}:
        return None
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    model = definition["model"]
    if model["type"] == "Unigram":
        scores = dict(model["vocab"])
        lowest_score = min(scores.values())
        model["vocab"] = [[token, scores.get(token, lowest_score)] for token in tokens]
        model["unk_id"] = UNK_ID
    else:
        model["vocab"] = {token: token_id for token_id, token in enumerate(tokens)}
        model["unk_token"] = special_tokens["unk_token"]
    definition["added_tokens"] = []
    backend = Tokenizer.from_str(json.dumps(definition))
    add_end_token(backend, special_tokens["eos_token"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)


def _text_steps(
    settings: TextSettings, vocabulary_file: Path, is_split: bool
) -> tuple[list[str], list[normalizers.Normalizer]]:
    """Return the steps before the tokenizer, and the normalizers that do the further steps."""
    # each step with normalizers that do the same, or None
    steps: list[tuple[str, list[normalizers.Normalizer] | None]] = []
    if settings.normalize:
        replacements = [normalizers.Replace(*pair) for pair in (*QUOTATION_MARKS, *EXTRA_SPACES)]
        name = "NFKC, ' and \" as quotation marks, no space before ? ! , . :"
        steps.append((name, [normalizers.NFKC(), *replacements, normalizers.Strip()]))
    if settings.has_moses:
        verbs = "normalize tokenize" if settings.normalize else "tokenize"
        steps.append((f"`sacremoses -l {settings.lang} {verbs}`", None))
    if settings.lowercase:
        steps.append(("lowercase", [normalizers.Lowercase()]))
    if not is_split:
        folder = vocabulary_file.parent
        codes, separator = folder / Path(settings.codes).name, shlex.quote(settings.separator)
        programs = {
            "sentencepiece": f"SentencePiece with {settings.model_file}",
            # subword-nmt expects a count for each token
            "subword-nmt": (
                f"`subword-nmt apply-bpe --codes {codes} --separator {separator} --vocabulary "
                f"<(sed 's/$/ 1/' {vocabulary_file})`"
            ),
        }
        own_program = "the program that split your training text"
        steps.append((own_program if settings.is_old else programs[settings.split], None))
    if settings.is_old:
        # JoeyNMT 1 lowercases the tokens
        steps.reverse()
    num_before = max((index for index, step in enumerate(steps, 1) if step[1] is None), default=0)
    names = [name for name, _ in steps[:num_before]]
    return names, [own for _, owns in steps[num_before:] for own in owns or []]


def _decoding_steps(
    settings: TextSettings, pieces_decoder: decoders.Decoder | None
) -> list[decoders.Decoder]:
    """Return decoders that make text from tokens as JoeyNMT does."""
    steps: list[Any]
    if pieces_decoder is not None:
        steps = [pieces_decoder]
    elif settings.split in ("char", "sentencepiece"):
        steps = [decoders.Fuse(), decoders.Replace(SPACE, " ")]
    else:
        # no token begins with a space, so WordPiece puts a space before each but the first
        steps = [decoders.WordPiece(prefix=" ", cleanup=False), decoders.Fuse()]
        if settings.split == "subword-nmt":
            end = Regex(rf"{re.escape(settings.separator)}\z")
            steps += [
                decoders.Replace(f"{settings.separator} ", ""),
                decoders.Replace(end, ""),
            ]
    removes_spaces = settings.normalize and not settings.has_moses
    if removes_spaces:
        steps += [decoders.Replace(*pair) for pair in EXTRA_SPACES]
    if removes_spaces or settings.split == "sentencepiece":
        steps.append(decoders.Replace(Regex(r"\A\s+|\s+\z"), ""))
    return steps
