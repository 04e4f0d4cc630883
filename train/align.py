"""Align the words of given pairs: `vanilla-transformer align RUN --source FILE --target FILE`."""

from collections.abc import Iterator
from pathlib import Path

from transformers.utils import GENERATION_CONFIG_NAME

from ..alignment_vanilla_transformer import HEADS_FIELD, choose_heads
from ..atomic_files import refuse_links, write_atomically
from ..changes_vanilla_transformer import evaluating
from ..console import parse_flags
from .score import load_with_pairs, pairs_parser

# largest number of pairs that are read to choose heads: the model reads each pair as many times as
# it has source tokens, each time without one of them
MOST_PAIRS = 200


def run(argv: list[str], prog: str) -> Iterator[str]:
    """Run the command line.

    A progress bar appears on stderr if stderr is a terminal and stdout is not.

    Args:
        argv: Arguments of the command line.
        prog: Name of the command, for its help.

    Yields:
        Alignment of each pair in Pharaoh format; with `--choose_heads`, the chosen heads.

    Raises:
        ValueError: If an argument cannot be used, or RUN is not a folder in which the heads can be
            saved.
    """
    parser = pairs_parser(
        prog,
        "Align the words of sentences and their translations by the attention of a model. Write "
        "one line for each sentence pair, with pairs of source and target word numbers, from 0, "
        "such as 0-0 1-2. Words are separated by spaces.",
    )
    parser.add_argument(
        "--choose_heads",
        action="store_true",
        help=f"choose the attention heads that align the first {MOST_PAIRS} pairs best, and save "
        f"them in the {GENERATION_CONFIG_NAME} of RUN, which must be a folder; use validation data",
    )
    settings = vars(parse_flags(parser, argv))
    folder, chooses_heads = Path(settings["run"]), settings.pop("choose_heads")
    if chooses_heads and not folder.is_dir():
        raise ValueError(f"run must be a folder with choose_heads, got {settings['run']!r}.")
    pipeline, pairs = load_with_pairs(settings, "aligning")
    if not chooses_heads:
        for sources, targets in pairs:
            for alignment in pipeline.align(sources, targets, **settings):
                yield " ".join(f"{source}-{target}" for source, target in alignment)
        return
    sources, targets = next(pairs, ([], []))
    encoded_pairs = pipeline.encode_pairs(sources[:MOST_PAIRS], targets[:MOST_PAIRS], **settings)
    model = pipeline.model
    with evaluating(model):
        heads, share = choose_heads(model, pipeline.tokenizer, *encoded_pairs)
    config = model.generation_config
    setattr(config, HEADS_FIELD, heads)
    refuse_links(folder, [GENERATION_CONFIG_NAME])
    write_atomically(folder / GENERATION_CONFIG_NAME, config.to_json_string())
    heads_text = " ".join(f"{layer}.{head}" for layer, head in heads)
    yield (
        f"{len(heads)} heads (layer.head, from 0): {heads_text}; for {share:.1%} of target tokens, "
        "their weight is largest at the source token whose removal lowers the probability most"
    )
