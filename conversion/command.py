"""The command: `vanilla-transformer convert KIND SOURCE OUT`."""

import argparse
from pathlib import Path

from transformers import (
    FSMTForConditionalGeneration,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from ..atomic_files import whole_folder
from ..console import empty_folder
from ..loading import WITHOUT_CODE, check_local, load_whole, read_tokenizer
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..pipeline_vanilla_transformer import check_tokenizer
from .fairseq import fairseq_tokenizer, from_fairseq
from .fsmt import from_fsmt
from .marian import from_marian
from .opennmt import from_opennmt, opennmt_tokenizer

Converted = tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase | None, str]
# the library's own classes, by the name that a configuration has for them
LIBRARY = {
    "marian": (MarianMTModel, from_marian),
    "fsmt": (FSMTForConditionalGeneration, from_fsmt),
}
HELP = {
    "marian": "transformers' Marian, the OPUS-MT models among them",
    "fsmt": "transformers' FSMT, the WMT19 models of fairseq among them",
    "fairseq": "a checkpoint of fairseq, with dictionary and BPE codes in its folder",
    "opennmt": "a checkpoint of OpenNMT-py",
}


def run(argv: list[str], prog: str) -> str:
    """Convert as a command line says.

    Args:
        argv: The arguments.
        prog: Name of the command, for its help.

    Returns:
        What was written: the model, and one sentence on the tokenizer.

    Raises:
        ValueError: If the source cannot be read, is outside this architecture, or the folder is in
            use.
        OSError: If a file cannot be read.
    """
    arguments = _parser(prog).parse_args(argv)
    folder = empty_folder(arguments.out)
    source = arguments.source
    if arguments.kind in LIBRARY:
        model, tokenizer, sentence = _from_library(arguments.kind, source)
    elif arguments.kind == "fairseq":
        languages = (arguments.source_lang, arguments.target_lang)
        model = from_fairseq(source)
        tokenizer, sentence = fairseq_tokenizer(source, *languages)
    else:
        model = from_opennmt(source)
        tokenizer, sentence = opennmt_tokenizer(source)
    if tokenizer is not None:
        check_tokenizer(model, tokenizer)
    with whole_folder(folder) as unfinished:
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
    return f"{model.num_parameters():,} parameters in {folder}\n{sentence}"


def _from_library(kind: str, source: str) -> Converted:
    """A model of transformers, with the tokenizer it came with."""
    model_class, convert = LIBRARY[kind]
    check_local(source, "SOURCE must be a folder or a Hub name")
    try:
        found = PreTrainedConfig.get_config_dict(source)[0].get("model_type")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"SOURCE must be a model of transformers' {kind}, got {source}: {error}"
        ) from error
    if found != kind:
        raise ValueError(f"SOURCE must be of the kind {kind}, got one of {found}: {source}.")
    model = convert(load_whole(model_class, source).eval())
    files = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "vocab-src.json")
    if Path(source).is_dir() and not any(Path(source, name).is_file() for name in files):
        return model, None, f"No tokenizer: {source} has none."
    tokenizer = read_tokenizer(source, remedy=WITHOUT_CODE)
    if tokenizer.eos_token is None:
        # FSMT's calls the token that ends a text a separator
        tokenizer.eos_token = tokenizer.sep_token
    return model, tokenizer, "The tokenizer is the one that it came with."


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Make a model of this package from one of a relative.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for kind, help_text in HELP.items():
        added = kinds.add_parser(kind, help=help_text, description=help_text, allow_abbrev=False)
        is_file = kind not in LIBRARY
        added.add_argument(
            "source", metavar="SOURCE", help="a file" if is_file else "a folder or a Hub name"
        )
        added.add_argument("out", metavar="OUT", help="a new or an empty folder")
        if kind == "fairseq":
            for side in ("source", "target"):
                added.add_argument(
                    f"--{side}_lang", help="for Moses; as the checkpoint says if not given"
                )
    return parser
