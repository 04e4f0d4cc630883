"""The command `vanilla-transformer COMMAND`: each command imports one module and calls it."""

import argparse
import sys
from pathlib import Path
from typing import Any

from .console import (
    add_file_to_errors,
    add_trust_flag,
    fast_imports,
    log_to_stderr,
    print_line,
    refuse_unknown,
    run_command,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Command-line arguments; those of the process if not given.

    Returns:
        The exit status, as `run_command` returns it.
    """
    # without logging, which imports transformers, `--help` answers at once
    return run_command(_run_subcommand, argv, logs=False)


def _run_subcommand(argv: list[str]) -> int | None:
    arguments, command_arguments = _parser().parse_known_args(argv)
    if not arguments.takes_more:
        refuse_unknown(arguments.parser, command_arguments)
    with fast_imports():
        log_to_stderr()
    return arguments.run(arguments, command_arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vanilla-transformer",
        description='Train and use the Transformer of "Attention Is All You Need".',
        epilog="`vanilla-transformer COMMAND --help` shows the flags of a command. With "
        "--traceback, an error shows its traceback.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add_command(name: str, run: Any, help_text: str, takes_more: bool = False):
        added = commands.add_parser(
            name,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}.",
            add_help=not takes_more,
            allow_abbrev=False,
        )
        added.set_defaults(run=run, parser=added, takes_more=takes_more)
        return added

    demo = add_command("demo", _demo, "train, evaluate and translate on the built-in corpus")
    demo.add_argument("--output_dir", default="runs/demo", help="run folder (default: %(default)s)")
    add_command("new", _new, "write the recipe of a new model for a corpus", takes_more=True)
    add_command("tokenize", _tokenize, "learn the vocabulary of a recipe", takes_more=True)
    add_command(
        "train", _train, "train a recipe, from raw text to averaged weights", takes_more=True
    )

    average = add_command("average", _average, "average the checkpoints of a run into its model")
    average.add_argument("run_folder", metavar="RUN", help="run folder")
    group = average.add_argument_group(
        "checkpoints", "at most one of these flags; without a flag, the recipe decides"
    )
    group.add_argument(
        "--num_checkpoints", type=int, help="average the last NUM_CHECKPOINTS checkpoints"
    )
    group.add_argument(
        "--minutes", type=float, help="average the checkpoints of the last minutes of training"
    )
    group.add_argument("--ema", action="store_true", help="use the moving average of the weights")
    average.add_argument("--output_dir", help="folder for the model (default: RUN)")
    add_trust_flag(average)

    add_command("evaluate", _evaluate, "translate and score a split or a test set", takes_more=True)
    add_command(
        "translate", _translate, "translate lines of a file or stdin to stdout", takes_more=True
    )

    add_command("score", _score, "compute log-probabilities of given translations", takes_more=True)
    add_command(
        "align",
        _align,
        "align the words of sources and given translations",
        takes_more=True,
    )

    add_command(
        "distill",
        _synthesize,
        "make training data for a smaller model",
        takes_more=True,
    )
    add_command(
        "back-translate",
        _synthesize,
        "make training data by back-translation",
        takes_more=True,
    )
    add_command("serve", _serve, "serve translations over HTTP", takes_more=True)
    add_command(
        "paper", _paper, "reproduce a table, figure or section of the paper", takes_more=True
    )
    add_command("space", _space, "serve the web page", takes_more=True)
    add_command(
        "explain", _explain, "explain a translation in the browser, offline", takes_more=True
    )
    add_command("convert", _convert, "convert a checkpoint from another toolkit", takes_more=True)
    add_command("export", _export, "export a model to another inference engine", takes_more=True)

    push = add_command("push", _push, "publish a model on the Hub, with its code")
    push.add_argument("model", metavar="RUN", help="run folder, model folder or Hub name")
    push.add_argument("repo_id", metavar="USER/NAME", help="repository on the Hub")
    push.add_argument(
        "--private", action="store_true", default=None, help="make a new repository private"
    )
    push.add_argument("--revision", help="branch (default: the main branch)")
    push.add_argument("--commit_message", help="commit message")
    add_trust_flag(push)
    return parser


def _demo(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .train.demo import run_demo

    print_line(run_demo(arguments.output_dir))


def _new(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .train.new import run

    print_line(run(command_arguments, "vanilla-transformer new"))


def _tokenize(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .train.recipe import MEASURED_PREVIEW, parse_arguments

    config, switches = parse_arguments(
        command_arguments,
        "vanilla-transformer tokenize",
        "Learn the vocabulary of a recipe, and save it in the run folder. The flags are those of\n"
        "`train`, but --resume, --dry_run measured and --tokenizer are refused.",
    )
    if switches.resume:
        raise ValueError("--resume must not be given to tokenize: there is nothing to resume.")
    if switches.dry_run == MEASURED_PREVIEW:
        raise ValueError(
            "--dry_run must not be 'measured' for tokenize, which trains no model to measure."
        )
    if config.tokenizer is not None:
        raise ValueError(
            f"tokenizer must be null for `tokenize`, which learns one, got {config.tokenizer!r}."
        )
    if switches.dry_run:
        with fast_imports():
            from .train.dry_run import describe

        print_line(describe(config, switches.recipe))
        return
    with fast_imports():
        from .tokenization.learning import refuse_small_vocabulary
        from .train.run_folder.files import lock_run_folder
        from .train.vocabulary import prepare_tokenizer

    refuse_small_vocabulary(config.vocab_size)
    # refuse model sizes here that `train` would refuse only later
    config.model_config(config.vocab_size)
    with lock_run_folder(config.folder):
        tokenizer = prepare_tokenizer(config)
    print_line(f"{len(tokenizer):,} tokens in {config.output_dir}/tokenizer")


def _train(arguments: argparse.Namespace, command_arguments: list[str]) -> int:
    with fast_imports():
        from .train.__main__ import run

    return run(command_arguments, "vanilla-transformer train")


def _average(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .train.averaging import average_run

    with add_file_to_errors(arguments.run_folder):
        average = average_run(
            arguments.run_folder,
            num_checkpoints=arguments.num_checkpoints,
            minutes=arguments.minutes,
            ema=arguments.ema,
            output_dir=arguments.output_dir,
            trust_remote_code=arguments.trust_remote_code,
        )
    print_line(f"{average}, is in {Path(arguments.output_dir or arguments.run_folder)}")


def _evaluate(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .train.evaluate import run

    table = run(command_arguments, "vanilla-transformer evaluate")
    if table is not None:
        print_line(table)


def _translate(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .train.translate import run

    for line in run(command_arguments, "vanilla-transformer translate"):
        print_line(line, flush=True)


def _paper(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .paper.__main__ import run

    run(command_arguments, "vanilla-transformer paper")


def _score(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .train.score import run

    for line in run(command_arguments, "vanilla-transformer score"):
        print_line(line)


def _align(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .train.align import run

    for line in run(command_arguments, "vanilla-transformer align"):
        print_line(line)


def _synthesize(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .train.synthesize import run

    summary = run(arguments.command, command_arguments, f"vanilla-transformer {arguments.command}")
    if summary is not None:
        print_line(summary)


def _serve(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .serving.command import run

    run(command_arguments, "vanilla-transformer serve")


def _space(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .space.app import run

    run(command_arguments, "vanilla-transformer space")


def _explain(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .explainer.command import run

    run(command_arguments, "vanilla-transformer explain")


def _convert(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .conversion.command import run

    print_line(run(command_arguments, "vanilla-transformer convert"))


def _export(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .export.command import run

    print_line(run(command_arguments, "vanilla-transformer export"))


def _push(arguments: argparse.Namespace, command_arguments: list[str]):
    with fast_imports():
        from .publishing import push_to_hub

    names = ("private", "revision", "commit_message", "trust_remote_code")
    given_options = {name: getattr(arguments, name) for name in names}
    options = {name: value for name, value in given_options.items() if value is not None}
    commit = push_to_hub(arguments.model, arguments.repo_id, **options)
    print_line(commit.commit_url)


if __name__ == "__main__":
    sys.exit(main())
