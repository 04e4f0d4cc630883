"""The command: `vanilla-transformer export KIND RUN OUT`."""

import argparse
from importlib import import_module

from ..console import add_trust_flag, parse_flags, require_empty_folder
from ..loading import load_run

# packages that an export needs, as `pip install` takes them
ONNX_PACKAGES = "onnx onnxscript onnxruntime"
PACKAGES = {
    "ctranslate2": "ctranslate2",
    "onnx": ONNX_PACKAGES,
    "transformersjs": ONNX_PACKAGES,
}


def run(argv: list[str], prog: str) -> str:
    """Run the command.

    Args:
        argv: Command-line arguments.
        prog: Name of the command, for its help.

    Returns:
        Size of the export in MB, and its folder.

    Raises:
        ValueError: If the run cannot be loaded, the output folder is not empty, a package for the
            export is not installed, or the engine does not support the model.
    """
    options = vars(parse_flags(_parser(prog), argv))
    kind, source, out, trust_remote_code = map(
        options.pop, ("kind", "run", "out", "trust_remote_code")
    )
    folder = require_empty_folder(out)
    try:
        export = getattr(import_module(f"vanilla_transformer.export.{kind}"), f"to_{kind}")
    except ModuleNotFoundError as error:
        packages = PACKAGES.get(kind, error.name)
        raise ValueError(
            f"this export needs the package {error.name}, which is not installed: pip install "
            f"{packages}."
        ) from error
    model, tokenizer = load_run(source, trust_remote_code)
    # the remaining options are the keyword arguments of this kind of export
    export(model.eval(), tokenizer, folder, **options)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{num_bytes / 1e6:.3g} MB in {folder}"


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Export a model, with its tokenizer, to another inference engine.",
    )
    subparsers = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    parsers = {}
    for kind, help_text in (
        ("ctranslate2", "for CTranslate2"),
        ("onnx", "three graphs for ONNX Runtime and optimum"),
        ("transformersjs", "for transformers.js, in browsers and Node.js"),
        ("marian", "for tools that load transformers' Marian, such as CTranslate2's converter"),
    ):
        subparser = subparsers.add_parser(
            kind, help=help_text, description=help_text, allow_abbrev=False
        )
        subparser.add_argument("run", metavar="RUN", help="run folder, model folder or Hub name")
        subparser.add_argument("out", metavar="OUT", help="new or empty folder")
        add_trust_flag(subparser)
        parsers[kind] = subparser
    parsers["ctranslate2"].add_argument(
        "--quantization", default="float32", help="float32, float16 or int8 (default: %(default)s)"
    )
    for kind in ("ctranslate2", "marian"):
        parsers[kind].add_argument(
            "--num_positions",
            type=int,
            help="length of the longest source or translation, in tokens (default: 1024, or the "
            "number of learned positions)",
        )
    return parser
