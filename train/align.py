"""Align the words of given pairs: `vanilla-transformer align RUN --source FILE --target FILE`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..alignment_vanilla_transformer import HEADS_FIELD, choose_heads
from ..atomic_files import refuse_links, write_atomically
from ..console import add_trust_flag
from ..loading import GENERATION_FILE, load
from ..pipeline_vanilla_transformer import evaluating
from .score import add_pairs, count_pairs, read_pairs
from .translate import add_languages

# pairs that are read to choose heads: each is read once for each of its source tokens
MOST_PAIRS = 200


def run(argv: list[str], prog: str) -> Iterator[str]:
    """Run the command line.

    A progress bar appears on stderr if stderr is a terminal and stdout is not.

    Args:
        argv: Arguments of the command line.
        prog: Name of the command, for its help.

    Yields:
        Alignment of each pair in Pharaoh's format, or what was chosen.

    Raises:
        ValueError: If a file cannot be read, the files differ in their number of lines, the model
            cannot be loaded, or a line is not UTF-8 or too long for the model.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Find the words of sentences and translations that belong together, with the "
        "attention of a model, and write a line of pairs source-target for each sentence, such as "
        "0-0 1-2: numbers of words between spaces, from 0.",
    )
    parser.add_argument("run", metavar="RUN", help="run folder, model folder or Hub name")
    add_pairs(parser)
    parser.add_argument(
        "--choose_heads",
        action="store_true",
        help=f"choose the attention heads that align these pairs best, with the first {MOST_PAIRS} "
        f"of them, and save them in the {GENERATION_FILE} of RUN, a folder; give validation data",
    )
    add_languages(parser)
    add_trust_flag(parser)
    settings = vars(parser.parse_args(argv))
    name, chooses = settings.pop("run"), settings.pop("choose_heads")
    trust = settings.pop("trust_remote_code")
    files = [settings.pop(side) for side in ("source", "target")]
    if chooses and not Path(name).is_dir():
        raise ValueError(f"run must be a folder with choose_heads, got {name!r}.")
    num_lines = count_pairs(files)
    pipeline = load(name, trust_remote_code=trust)
    if not chooses:
        for pairs in read_pairs(pipeline, files, num_lines, "aligning"):
            for found in pipeline.align(*pairs, **settings):
                yield " ".join(f"{source}-{target}" for source, target in found)
        return
    sources, targets = next(read_pairs(pipeline, files, num_lines, "choosing"), ([], []))
    encoded = pipeline.encode_pairs(sources[:MOST_PAIRS], targets[:MOST_PAIRS], **settings)
    model = pipeline.model
    with evaluating(model):
        heads, share = choose_heads(model, pipeline.tokenizer, *encoded)
    config = model.generation_config
    setattr(config, HEADS_FIELD, heads)
    refuse_links(Path(name), [GENERATION_FILE])
    write_atomically(Path(name, GENERATION_FILE), config.to_json_string())
    yield (
        f"{len(heads)} heads (layer.head, from 0): {' '.join(f'{a}.{b}' for a, b in heads)}; they "
        f"find the source token that a target token needs most for {share:.1%} of target tokens"
    )
