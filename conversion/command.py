"""The command: `vanilla-transformer convert KIND SOURCE OUT`."""

import argparse
from pathlib import Path
from typing import Any

from transformers import (
    FSMTForConditionalGeneration,
    M2M100ForConditionalGeneration,
    MarianMTModel,
    PreTrainedModel,
)
from transformers.utils import CONFIG_NAME

from ..atomic_files import atomic_folder
from ..checks_vanilla_transformer import check_tokenizer
from ..console import parse_flags, require_empty_folder
from ..loading import (
    TOKENIZER_WITHOUT_CODE,
    check_local,
    conversion_advice,
    foreign_advice,
    load_whole,
    read_config,
    read_tokenizer,
)
from .fairseq import fairseq_with_tokenizer
from .fsmt import from_fsmt
from .joeynmt import joeynmt_search, joeynmt_with_tokenizer
from .m2m100 import from_m2m100
from .marian import from_marian
from .opennmt import opennmt_with_tokenizer
from .weights import Converted

# transformers class and conversion function of each `model_type`
TRANSFORMERS_KINDS = {
    "marian": (MarianMTModel, from_marian),
    "fsmt": (FSMTForConditionalGeneration, from_fsmt),
    "m2m_100": (M2M100ForConditionalGeneration, from_m2m100),
}
HELP = {
    "marian": "a Marian model of transformers, such as OPUS-MT",
    "fsmt": "an FSMT model of transformers, such as fairseq's WMT19 models",
    "m2m_100": "an M2M100 model of transformers, or a dense NLLB model",
    "fairseq": "a checkpoint of fairseq, with dictionary and BPE codes in its folder",
    "opennmt": "a checkpoint of OpenNMT-py",
    "joeynmt": "a checkpoint or a model folder of JoeyNMT, with configuration and vocabulary",
}
SOURCE_HELP = dict.fromkeys(TRANSFORMERS_KINDS, "folder or Hub name") | {
    "joeynmt": "file or folder"
}
# starts of names in a generation configuration that do not change translations
NO_SEARCH_SETTINGS = ("_", "output_", "return_", "transformers_version", "use_cache")


def run(argv: list[str], prog: str) -> str:
    """Run the command.

    Args:
        argv: Command-line arguments.
        prog: Name of the command, for its help.

    Returns:
        Number of parameters and output folder, a line with one sentence about the tokenizer, and a
        line with the settings that the paper's search has replaced, if there are any.

    Raises:
        ValueError: If the source is not of the given kind or is outside this architecture, or the
            output folder is not empty.
        OSError: If a file cannot be read.
    """
    arguments = parse_flags(_parser(prog), argv)
    folder = require_empty_folder(arguments.out)
    source = arguments.source
    if arguments.kind in TRANSFORMERS_KINDS:
        model, tokenizer, tokenizer_sentence = _from_library(arguments.kind, source)
    elif arguments.kind == "fairseq":
        languages = (arguments.source_lang, arguments.target_lang)
        model, tokenizer, tokenizer_sentence = fairseq_with_tokenizer(source, *languages)
    elif arguments.kind == "joeynmt":
        model, tokenizer, tokenizer_sentence = joeynmt_with_tokenizer(source)
        tokenizer_sentence += _replaced_line(joeynmt_search(source))
    else:
        model, tokenizer, tokenizer_sentence = opennmt_with_tokenizer(source)
    if tokenizer is not None:
        check_tokenizer(model, tokenizer)
    with atomic_folder(folder) as unfinished:
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
    return f"{model.num_parameters():,} parameters in {folder}\n{tokenizer_sentence}"


def _from_library(kind: str, source: str) -> Converted:
    """Convert a model of transformers, and load its tokenizer."""
    model_class, convert = TRANSFORMERS_KINDS[kind]
    check_local(source, "SOURCE must be a folder or a Hub name")
    try:
        model_type = read_config(source).get("model_type")
    except OSError as error:
        raise ValueError(
            f"SOURCE must be a model of transformers' {kind}, got {source}: {error}"
            f"{conversion_advice(Path(source))}"
        ) from error
    if model_type is None:
        raise ValueError(
            f"SOURCE must be of the kind {kind}, got {source}, whose {CONFIG_NAME} names no "
            f"model_type.{foreign_advice(source)}"
        )
    if model_type != kind:
        advice = (
            f"Use the kind {model_type}."
            if model_type in TRANSFORMERS_KINDS
            else "`translate` and `load` take encoder-decoders of transformers without conversion."
        )
        raise ValueError(
            f"SOURCE must be of the kind {kind}, got one of {model_type}: {source}. {advice}"
        )
    source_model = load_whole(model_class, source).eval()
    model = convert(source_model)
    replaced = _replaced_settings(source_model, model)
    tokenizer_files = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "vocab-src.json")
    has_tokenizer = any(Path(source, name).is_file() for name in tokenizer_files)
    if Path(source).is_dir() and not has_tokenizer:
        return model, None, f"No tokenizer: {source} has none.{replaced}"
    tokenizer = read_tokenizer(source, remedy=TOKENIZER_WITHOUT_CODE)
    if tokenizer.eos_token is None:
        # FSMT's tokenizer has no `eos_token`: its `sep_token` ends a sentence
        tokenizer.eos_token = tokenizer.sep_token
    return model, tokenizer, f"The tokenizer is that of the source.{replaced}"


def _replaced_settings(source: PreTrainedModel, converted: PreTrainedModel) -> str:
    """Return a line with the source's search settings that the converted model does not have."""
    settings = {
        name: value
        for name, value in source.generation_config.to_diff_dict().items()
        if not name.startswith(NO_SEARCH_SETTINGS)
        and getattr(converted.generation_config, name, None) != value
    }
    return _replaced_line(settings)


def _replaced_line(settings: dict[str, Any]) -> str:
    words = [f"{name}={value}" for name, value in settings.items()]
    return f"\nThe paper's search replaces {', '.join(words)}." if words else ""


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Convert a checkpoint from another toolkit to a model of this package.",
    )
    subparsers = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for kind, help_text in HELP.items():
        subparser = subparsers.add_parser(
            kind, help=help_text, description=help_text, allow_abbrev=False
        )
        subparser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP.get(kind, "file"))
        subparser.add_argument("out", metavar="OUT", help="new or empty folder")
        if kind == "fairseq":
            for side in ("source", "target"):
                subparser.add_argument(
                    f"--{side}_lang",
                    help=f"{side} language, for Moses (default: that of the checkpoint)",
                )
    return parser
