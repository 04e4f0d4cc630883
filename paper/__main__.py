"""`vanilla-transformer paper [NAME]`: compute a table, figure or section of the paper."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import NamedTuple

from ..configuration_vanilla_transformer import closest_name
from ..console import parse_flags, print_line, require_nonempty_path, run_command


class Study(NamedTuple):
    """A study: its section of the paper, its title, and the module that computes it."""

    section: str
    title: str
    module: str


STUDIES = {
    "example": Study(
        "section 3, figure 1", "A model by hand: three words, four features", "example"
    ),
    "scaling": Study("section 3.2.1", "Why scores are divided by sqrt(d_k)", "scaling"),
    "attention": Study("sections 3.2 and 4", "Attention of the heads of a model", "attention"),
    "teacher-forcing": Study(
        "sections 3.1 and 3.2.3",
        "Teacher forcing: one pass instead of one step per token",
        "teacher_forcing",
    ),
    "embeddings": Study(
        "section 3.4",
        "Embeddings: look-up, the factor sqrt(d_model), one shared matrix",
        "embeddings",
    ),
    "positions": Study("section 3.5", "Positional encoding", "positions"),
    "probe": Study("section 3.5", "Positions in trained models: candidates, layers", "probe"),
    "table1": Study("table 1, section 4", "Cost and path length of a layer", "table1"),
    "schedule": Study("section 5.3", "Learning rate schedule", "schedule"),
    "smoothing": Study("section 5.4", "Label smoothing", "label_smoothing"),
    "curve": Study(
        "sections 5 and 6", "Training curves: loss, learning rate, speed, gradient norm", "curve"
    ),
    "table2": Study("table 2, section 6.1", "BLEU and training cost", "table2"),
    "table3": Study("table 3, section 6.2", "Model variations: parameters and training", "table3"),
    "table4": Study(
        "table 4, section 6.3", "English constituency parsing as translation", "table4"
    ),
}


def listing() -> str:
    """List all studies, in the paper's order.

    Returns:
        A table with one line for each study.
    """
    from .study import text_table

    rows = [(name, study.section, study.title) for name, study in STUDIES.items()]
    return text_table(("name", "in the paper", "subject"), rows)


def run(argv: list[str], prog: str = "vanilla_transformer.paper") -> None:
    """Compute a study: print its findings, and write page, numbers and pictures to a folder.

    Each study is a module with two functions: `add_flags(parser)` declares its flags, and
    `sections(flags)` yields its sections.

    Args:
        argv: Command-line arguments.
        prog: Name of the command in help texts.

    Raises:
        ValueError: If the study is unknown, a flag has an invalid value, or the study raises it.
    """
    if not argv or argv[0].startswith("-"):
        parser = argparse.ArgumentParser(
            prog=prog,
            description="Compute a table, figure or section of the paper.",
            epilog=f"studies:\n{listing()}\n\n`{prog} NAME --help` lists the flags of a study.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("name", nargs="?", metavar="NAME", help="one of the studies below")
        parse_flags(parser, argv)
        print_line(listing())
        return
    name = argv[0]
    if name not in STUDIES:
        suggestion = closest_name(name, list(STUDIES))
        raise ValueError(
            f"NAME must be a study of the paper, got {name!r}.{suggestion} "
            f"The studies are {', '.join(STUDIES)}."
        )
    from .study import show_study

    study = STUDIES[name]
    module = importlib.import_module(f"vanilla_transformer.paper.{study.module}")
    parser = argparse.ArgumentParser(
        prog=f"{prog} {name}",
        description=f"{study.title}: {study.section} of the paper.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output_dir",
        default=str(Path("runs") / "paper" / name),
        help="folder for page, numbers and pictures (default: %(default)s)",
    )
    parser.add_argument("--pictures_dir", help="folder for the pictures (that of the page)")
    module.add_flags(parser)
    flags = parse_flags(parser, argv[1:])
    flags.output_dir = require_nonempty_path(flags.output_dir, "output_dir")
    pictures_folder = flags.pictures_dir
    if pictures_folder is not None:
        pictures_folder = require_nonempty_path(pictures_folder, "pictures_dir")
    title = f"{study.title}, {study.section}"
    show_study(module.sections(flags), title, flags.output_dir, pictures_folder)


if __name__ == "__main__":
    sys.exit(run_command(run))
