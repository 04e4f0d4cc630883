"""`vanilla-transformer paper [NAME]`: a table, figure or section of the paper, computed."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import NamedTuple

from ..configuration_vanilla_transformer import closest_name
from ..console import a_folder, run_command


class Study(NamedTuple):
    """A study: its section of the paper, its subject, and the module that computes it."""

    place: str
    title: str
    module: str


STUDIES = {
    "scaling": Study("section 3.2.1", "Why scores are divided by the root of d_k", "scaling"),
    "attention": Study("sections 3.2 and 4", "What the heads of a model attend to", "attention"),
    "teacher-forcing": Study(
        "sections 3.1 and 3.2.3", "All positions in one pass, or step by step", "teacher_forcing"
    ),
    "embeddings": Study(
        "section 3.4", "One-hot rows, the factor sqrt(d_model), one matrix", "embeddings"
    ),
    "positions": Study("section 3.5", "Positional encoding", "positions"),
    "table1": Study(
        "table 1, section 4", "What a layer costs, and how far a signal goes", "table1"
    ),
    "schedule": Study("section 5.3", "The learning rate against the steps", "schedule"),
    "smoothing": Study("section 5.4", "What label smoothing does", "label_smoothing"),
    "curve": Study("sections 5 and 6", "How runs went: loss, rate, speed, gradient", "curve"),
    "table2": Study("table 2, section 6.1", "BLEU against the work of training", "table2"),
    "table3": Study("table 3, section 6.2", "Every row, counted and trained", "table3"),
    "table4": Study(
        "table 4, section 6.3", "English constituency parsing as translation", "table4"
    ),
}


def listing() -> str:
    """List all studies, in the paper's order.

    Returns:
        A line each.
    """
    from .study import text_table

    rows = [(name, study.place, study.title) for name, study in STUDIES.items()]
    return text_table(("name", "in the paper", "what it shows"), rows)


def run(argv: list[str], prog: str = "vanilla_transformer.paper") -> None:
    """Compute a study: its findings to stdout; page, numbers and pictures into a folder.

    Each study is a module with two functions: `add_flags(parser)`, and `sections(flags)`, which
    gives the sections one by one.

    Args:
        argv: Command-line arguments.
        prog: Name of the command, for its help.

    Raises:
        ValueError: If there is no such study, or a flag has a value that it cannot have.
    """
    if not argv or argv[0].startswith("-"):
        parser = argparse.ArgumentParser(
            prog=prog,
            description="Compute a table, figure or section of the paper.",
            epilog=f"studies:\n{listing()}\n\n`{prog} NAME --help` says more.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("name", nargs="?", metavar="NAME", help="one of the studies below")
        parser.parse_args(argv)
        sys.stdout.write(listing() + "\n")
        return
    name = argv[0]
    if name not in STUDIES:
        known = closest_name(name, list(STUDIES))
        raise ValueError(
            f"{name!r} is not a study of the paper.{known} They are {', '.join(STUDIES)}."
        )
    from .study import show_study

    study = STUDIES[name]
    module = importlib.import_module(f"vanilla_transformer.paper.{study.module}")
    parser = argparse.ArgumentParser(
        prog=f"{prog} {name}",
        description=f"{study.title}: {study.place} of the paper.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output_dir",
        default=str(Path("runs") / "paper" / name),
        help="folder for page, numbers and pictures (%(default)s)",
    )
    module.add_flags(parser)
    flags = parser.parse_args(argv[1:])
    flags.output_dir = a_folder(flags.output_dir, "output_dir")
    title = f"{study.title}, {study.place}"
    show_study(module.sections(flags), title, flags.output_dir)


def main(argv: list[str] | None = None) -> int:
    """Compute a study; report an error as one sentence.

    Args:
        argv: Command-line arguments; those of the process if not given.

    Returns:
        0 on success, 1 on an error.
    """
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
