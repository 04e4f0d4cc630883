"""The web page, laid out as a Hugging Face Space: `vanilla-transformer space` serves it."""

import argparse
import functools
import io
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import gradio as gr
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.attention_maps import AttentionWeights, attention_weights
from vanilla_transformer.console import run_command, sentence_of
from vanilla_transformer.paper.attention import KINDS, draw_matrix
from vanilla_transformer.paper.positional_encoding import (
    CANDIDATES,
    LEAST_DISTANCE,
    PAPER_BASE,
    candidate_encoding,
    collisions,
    first_repeat,
    smallest_distance,
    usual_step,
)
from vanilla_transformer.paper.positional_pictures import (
    draw_dot_product,
    draw_heatmap,
    draw_similarity,
)
from vanilla_transformer.paper.schedule import Schedule, draw_schedules
from vanilla_transformer.paper.trained import DEMO, load_trained
from vanilla_transformer.pictures import DOTS_PER_INCH, label_places, new_figure
from vanilla_transformer.search_vanilla_transformer import gnmt_length_penalty

TITLE = "The Transformer of “Attention Is All You Need”"
MAX_BEAMS = 8
# of a picture of attention: more would fill the memory, and could not be read
MAX_WORDS = 100
# models stay loaded, the last so many
KEPT_MODELS = 2
CROSS = "cross"
PICTURES = {
    "heatmap": "The encoding",
    "similarity": "Cosine similarity of every two positions",
    "dot_product": "Dot product against distance",
}
MEAN = "mean of all"
SENTENCES = [
    "Oscar wants to learn Hungarian, Croatian, or Polish.",
    "Anna gets up at 7:00 AM every day.",
    "Last year, Jonas visited Italy and Poland.",
]
# a page that is used offline must not ask another host for letters
FONT = ["system-ui", "sans-serif"]
FONT_MONO = ["ui-monospace", "monospace"]


class Hypothesis(NamedTuple):
    """A translation that the search found, and how it was rated.

    Attributes:
        text: What it says.
        ids: Its tokens with the start token, [T + 1].
        log_probability: Natural logarithm of its probability, given the source.
        score: The log probability over the length penalty; the search ranks by it.
    """

    text: str
    ids: Tensor
    log_probability: float
    score: float


@torch.inference_mode()
def find_hypotheses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    num_beams: int,
    length_penalty_alpha: float,
) -> list[Hypothesis]:
    """Translate a sentence, and give every hypothesis of the beam. Section 6.1.

    Args:
        model: A trained model.
        tokenizer: Its tokenizer.
        source: A sentence.
        num_beams: Beam size; so many hypotheses are given.
        length_penalty_alpha: Alpha of the length penalty.

    Returns:
        The hypotheses, best first.

    Raises:
        ValueError: If the source is empty, or too long for the model.
    """
    if not source.strip():
        raise ValueError("the sentence must have words, got only white space.")
    ids = TranslationPipeline(model, tokenizer, device=model.device).preprocess([source])[0]
    inputs = {"input_ids": torch.tensor([ids], device=model.device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    found = model.generate(
        **inputs,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        length_penalty_alpha=length_penalty_alpha,
    )  # [num_beams, T + 1]
    inputs = {name: value.expand(num_beams, -1) for name, value in inputs.items()}
    logits = model(**inputs, decoder_input_ids=found[:, :-1]).logits.float()
    tokens = found[:, 1:]  # [num_beams, T]
    # a token counts if none before it was the end: what stands after the end is padding
    goes_on = tokens.ne(model.config.eos_token_id).cumprod(dim=1)
    counts = torch.cat((torch.ones_like(goes_on[:, :1]), goes_on[:, :-1]), dim=1)
    of_tokens = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    lengths = counts.sum(1).tolist()
    hypotheses = [
        Hypothesis(
            tokenizer.decode(row, skip_special_tokens=True),
            row[: length + 1],
            value,
            value / gnmt_length_penalty(length, length_penalty_alpha),
        )
        for row, length, value in zip(
            found, lengths, (of_tokens * counts).sum(1).tolist(), strict=True
        )
    ]
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


def build_page(model_name: str = DEMO) -> gr.Blocks:
    """Build the page.

    Args:
        model_name: Of the model that translates at first: a run folder, model folder or Hub name.

    Returns:
        The page, to be launched.
    """
    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        gr.Markdown(f"# {TITLE}")
        with gr.Tab("Translate"):
            _translation_tab(model_name)
        with gr.Tab("Positions"):
            _positions_tab(page)
        with gr.Tab("Learning rate"):
            _schedule_tab(page)
    return page


def _translation_tab(model_name: str):
    attention = gr.State()
    with gr.Row():
        with gr.Column():
            source = gr.Textbox(SENTENCES[0], label="Sentence", lines=2, elem_id="source")
            model = gr.Textbox(
                model_name, label="Model: run folder, model folder or Hub name", elem_id="model"
            )
            beams = gr.Slider(1, MAX_BEAMS, 4, step=1, label="Beam size", elem_id="beams")
            alpha = gr.Slider(
                0, 2, 0.6, step=0.1, label="Alpha of the length penalty", elem_id="alpha"
            )
            button = gr.Button("Translate", variant="primary", elem_id="translate")
            gr.Examples(SENTENCES, source)
        with gr.Column():
            table = gr.Dataframe(
                headers=["translation", "log P", "score"],
                datatype=["str", "number", "number"],
                label="Hypotheses, best first; score = log P / ((5 + length) / 6)^alpha",
                interactive=False,
                wrap=True,
                column_widths=["56%", "22%", "22%"],
                elem_id="hypotheses",
            )
    kinds = [(kind.title, name) for name, kind in KINDS.items()]
    kind = gr.Radio(kinds, value=CROSS, label="Attention", elem_id="kind")
    with gr.Row():
        layer = gr.Dropdown([1], value=1, label="Layer", elem_id="layer")
        head = gr.Dropdown([MEAN], value=MEAN, label="Head", elem_id="head")
    plot = _picture("attention", "What each word attends to")

    shown = [attention, kind, layer, head]
    draw = _in_sentences(draw_attention)
    asked = [model, source, beams, alpha, kind]
    button.click(_in_sentences(_translate), asked, [table, attention, layer, head]).success(
        draw, shown, plot
    )
    kind.input(_in_sentences(_choices), [attention, kind], [layer, head]).success(draw, shown, plot)
    for choice in (layer, head):
        choice.input(draw, shown, plot)


def _positions_tab(page: gr.Blocks):
    gr.Markdown("Section 3.5: what tells the model where a word stands, and what else could.")
    with gr.Row():
        with gr.Column():
            inputs = [
                gr.Dropdown(
                    list(CANDIDATES), value="sinusoidal", label="Encoding", elem_id="encoding"
                ),
                gr.Slider(
                    0,
                    6,
                    math.log10(PAPER_BASE),
                    step=0.1,
                    label="Base of the wavelengths, as a power of 10",
                    elem_id="base",
                ),
                gr.Slider(2, 512, 128, step=2, label="d_model", elem_id="d_model"),
                gr.Slider(2, 512, 64, step=1, label="Positions", elem_id="positions"),
                gr.Slider(
                    0,
                    1,
                    LEAST_DISTANCE,
                    step=0.01,
                    label="Two positions look the same up to this share of the usual step",
                    elem_id="tolerance",
                ),
            ]
            found = gr.Markdown(elem_id="found")
        with gr.Column(scale=2):
            outputs = [found, *(_picture(name, label) for name, label in PICTURES.items())]
    _draw_at_once(page, _explore_positions, inputs, outputs)


def _schedule_tab(page: gr.Blocks):
    gr.Markdown(
        "Section 5.3: the rate rises for the warm-up steps, then falls with the inverse square "
        "root of the step."
    )
    with gr.Row():
        with gr.Column():
            inputs = [
                gr.Slider(64, 2048, 512, step=64, label="d_model", elem_id="rate_d_model"),
                gr.Slider(100, 20000, 4000, step=100, label="Warm-up steps", elem_id="warmup"),
                gr.Slider(0.1, 5, 1, step=0.1, label="Factor", elem_id="factor"),
                gr.Slider(1000, 300000, 100000, step=1000, label="Steps", elem_id="steps"),
            ]
        with gr.Column(scale=2):
            plot = _picture("schedule", "The learning rate against the steps")
    _draw_at_once(page, _draw_schedule, inputs, plot)


def _picture(name: str, title: str) -> gr.Image:
    gr.Markdown(f"**{title}**")
    return gr.Image(
        format="png",
        type="pil",
        show_label=False,
        interactive=False,
        buttons=["download", "fullscreen"],
        alt_text=title,
        elem_id=name,
    )


def _as_image(figure: Any) -> Image.Image:
    file = io.BytesIO()
    figure.savefig(file, dpi=DOTS_PER_INCH)
    return Image.open(file)


def _draw_at_once(page: gr.Blocks, draw: Callable, inputs: list, outputs: Any):
    # while a slider moves only the last place counts
    gr.on(
        [page.load, *(choice.change for choice in inputs)],
        _in_sentences(draw),
        inputs,
        outputs,
        show_progress="hidden",
        trigger_mode="always_last",
    )


_load = functools.lru_cache(maxsize=KEPT_MODELS)(load_trained)


def _translate(model_name: str, source: str, num_beams: float, alpha: float, kind: str):
    _refuse_empty(num_beams, alpha)
    model, tokenizer = _load(model_name.strip())
    hypotheses = find_hypotheses(model, tokenizer, source, int(num_beams), alpha)
    rows = [
        [hypothesis.text, round(hypothesis.log_probability, 2), round(hypothesis.score, 2)]
        for hypothesis in hypotheses
    ]
    weights = attention_weights(model, tokenizer, source, hypotheses[0].ids[1:]).by_word()
    return rows, weights, *_choices(weights, kind)


def _choices(weights: AttentionWeights | None, kind: str):
    """The layers and heads of a kind: encoder and decoder may have other numbers of them."""
    num_layers, num_heads = getattr(weights, kind).shape[:2] if weights else (1, 0)
    layers = gr.Dropdown(list(range(1, num_layers + 1)), value=num_layers)
    return layers, gr.Dropdown([MEAN, *range(1, num_heads + 1)], value=MEAN)


def draw_attention(
    weights: AttentionWeights | None, kind: str, layer: int, head: int | str
) -> Image.Image:
    """Draw what each word attends to.

    Args:
        weights: Of a translation, between words; None where there is none yet.
        kind: "encoder", "decoder" or "cross".
        layer: Counted from 1.
        head: Counted from 1; `MEAN` for all of the layer.

    Returns:
        The picture.

    Raises:
        ValueError: If there is no translation, or it has too many words to be drawn.
    """
    if weights is None:
        raise ValueError("there must be a translation to look at, got none yet.")
    queries, keys = getattr(weights, KINDS[kind].queries), getattr(weights, KINDS[kind].keys)
    most = max(len(queries), len(keys))
    if most > MAX_WORDS:
        raise ValueError(f"attention is drawn for at most {MAX_WORDS} words, got {most}.")
    figure, axes = new_figure(2.0 + 0.32 * len(keys), 1.5 + 0.27 * len(queries))
    image = draw_matrix(axes, weights, kind, layer - 1, None if head == MEAN else head - 1)
    label_places(axes, queries, keys)
    axes.set_ylabel("asks")
    axes.set_xlabel("is asked")
    figure.colorbar(image, label="weight")
    return _as_image(figure)


def _explore_positions(
    name: str, power: float, d_model: float, num_positions: float, tolerance: float
):
    _refuse_empty(power, d_model, num_positions, tolerance)
    encoding = candidate_encoding(name, int(num_positions), int(d_model), 10.0**power)
    distance = tolerance * usual_step(encoding)
    repeat = first_repeat(encoding, distance)
    met = f"{repeat.position}, like {repeat.earlier}" if repeat else "none"
    formula = CANDIDATES[name].replace("base", f"{10.0**power:,.4g}")
    found = (
        f"`{formula}`\n\nThe nearest two of {len(encoding)} positions are "
        f"{smallest_distance(encoding):.3g} apart, the usual step is {usual_step(encoding):.3g}; "
        f"{collisions(encoding, distance):,} pairs look the same; the first that looks like an "
        f"earlier one: {met}."
    )
    pictures = (draw_heatmap(encoding), draw_similarity(encoding), draw_dot_product(encoding))
    return found, *map(_as_image, pictures)


def _refuse_empty(*values: float | None):
    # a number that was deleted from its field
    if None in values:
        raise ValueError("every slider must have a number, got an empty one.")


def _draw_schedule(d_model: float, warmup_steps: float, factor: float, max_steps: float):
    _refuse_empty(d_model, warmup_steps, factor, max_steps)
    schedule = Schedule(int(d_model), int(warmup_steps), factor, int(max_steps))
    name = f"d_model {schedule.d_model}, warm-up {schedule.warmup_steps}"
    return _as_image(draw_schedules({name: schedule}))


def _in_sentences(function: Callable) -> Callable:
    """Show what goes wrong by what was given as one sentence, until the user closes it."""

    @functools.wraps(function)
    def wrapped(*inputs):
        try:
            return function(*inputs)
        except Exception as error:
            sentence = sentence_of(error)
            if sentence is None:
                raise
            raise gr.Error(sentence, duration=None, print_exception=False) from error

    return wrapped


def serve(
    model_name: str = DEMO, host: str | None = None, port: int | None = None, **more: Any
) -> Any:
    """Serve the page until it is interrupted.

    Args:
        model_name: Of the model that translates at first.
        host: Address to listen on; this machine alone if not given.
        port: To listen on; the first that is free from 7860 if not given.
        more: Settings of gradio's `launch`.

    Returns:
        What gradio's `launch` returns, where `prevent_thread_lock` is given.

    Raises:
        OSError: If the port is taken.
    """
    theme = gr.themes.Default(font=FONT, font_mono=FONT_MONO)
    return build_page(model_name).launch(
        server_name=host, server_port=port, theme=theme, footer_links=[], **more
    )


def run(argv: list[str], prog: str = "vanilla_transformer.space.app") -> None:
    """Serve the page as a command line says.

    Args:
        argv: The arguments.
        prog: Name of the command, for its help.

    Raises:
        ValueError: If there is no such port.
        OSError: If the port is taken.
    """
    parser = argparse.ArgumentParser(prog=prog, description="Serve the web page.")
    parser.add_argument(
        "--model", default=DEMO, help="run folder, model folder or Hub name (%(default)s)"
    )
    parser.add_argument("--host", help="address to listen on; this machine alone if not given")
    parser.add_argument("--port", type=int, help="7860 or the next that is free if not given")
    flags = parser.parse_args(argv)
    if flags.port is not None and not 0 < flags.port < 65536:
        raise ValueError(f"port must be from 1 to 65535, got {flags.port}.")
    serve(flags.model, flags.host, flags.port)


if __name__ == "__main__":
    sys.exit(run_command(run))
