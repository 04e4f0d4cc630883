"""Web page in the layout of a Hugging Face Space, which `vanilla-transformer space` serves."""

import argparse
import functools
import io
import logging
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
from gradio.processing_utils import save_file_to_cache
from gradio.utils import get_upload_folder
from PIL import Image
from starlette.middleware import Middleware
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.attention_maps import AttentionWeights, attention_weights, words_of
from vanilla_transformer.console import parse_flags, run_command, sentence_of, shown
from vanilla_transformer.drawing import DOTS_PER_INCH, label_rows_and_columns, new_figure
from vanilla_transformer.paper.attention.kinds import KINDS
from vanilla_transformer.paper.attention.pictures import draw_matrix
from vanilla_transformer.paper.positional_encoding import (
    CANDIDATES,
    LEAST_DISTANCE,
    PAPER_BASE,
    candidate_encoding,
    collisions,
    first_repeat,
    median_step,
    smallest_distance,
)
from vanilla_transformer.paper.positions.pictures import (
    draw_dot_product,
    draw_heatmap,
    draw_similarity,
)
from vanilla_transformer.paper.schedule import Schedule, draw_schedules
from vanilla_transformer.paper.trained import DEMO_RUN, load_trained
from vanilla_transformer.serving.bounded_requests import BoundedRequests

TITLE = "The Transformer of “Attention Is All You Need”"
# longest sentence that a visitor may enter, in characters
MAX_CHARACTERS = 1000
# longest sentence in tokens, which limits memory and time
MAX_TOKENS = 256
# longest translation, in tokens beyond the length of its source
MAX_EXTRA_TOKENS = 50
# longest time of a search with its scores, in seconds
MAX_SECONDS = 30
# maximum number of words in a picture of attention: a larger picture would take too much memory,
# and its words could not be read
MAX_WORDS = 100
TRANSLATIONS_AT_ONCE = 2
# maximum number of requests in the queue; further requests are refused
MAX_WAITING = 100
# maximum number of visitors whose attention weights are stored
MAX_SESSIONS = 100
MAX_REQUEST_BYTES = 1 << 20
# seconds between two deletions of picture files, and age in seconds from which a file is deleted
PICTURE_DELETION_SECONDS = (600, 3600)
# number of settings of the positions tab whose pictures are cached
MAX_CACHED_POSITIONS = 64
CROSS = "cross"
ENCODING = "sinusoidal"
PICTURES = {
    "heatmap": "Encoding",
    "similarity": "Cosine similarity of every two positions",
    "dot_product": "Dot product against distance",
}
MEAN = "mean of all heads"
SENTENCES = [
    "Oscar wants to learn Hungarian, Croatian, or Polish.",
    "Anna gets up at 7:00 AM every day.",
    "Last year, Jonas visited Italy and Poland.",
]
# system fonts: the page works offline, without requests to a font server
FONT = ["system-ui", "sans-serif"]
FONT_MONO = ["ui-monospace", "monospace"]
NO_TRANSLATION = "attention needs a translation, got none yet."
PAPER_URL = "https://arxiv.org/abs/1706.03762"
DEMO_VOCABULARY_NOTE = (
    "The demo's model was trained on dates, times, numbers, money, countries, languages and a few "
    "first names, as in the examples. It has never seen other words."
)

logger = logging.getLogger(__name__)


class Setting(NamedTuple):
    """Numeric setting that visitors choose with a slider.

    Attributes:
        label: Label on the page.
        lowest: Smallest value.
        highest: Largest value.
        default: Initial value.
        step: Distance between two values on the slider.
    """

    label: str
    lowest: float
    highest: float
    default: float
    step: float

    def slider(self, name: str) -> gr.Slider:
        """Return a slider for the setting.

        Args:
            name: Id of the element on the page.
        """
        return gr.Slider(
            self.lowest,
            self.highest,
            self.default,
            step=self.step,
            label=self.label,
            elem_id=name,
        )

    def check(self, value: Any) -> float:
        """Refuse a value outside the range of the slider.

        Args:
            value: Value that a visitor has sent, of any type.

        Returns:
            The value.

        Raises:
            ValueError: If the value is not a number or is outside the range.
        """
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and self.lowest <= value <= self.highest):
            raise ValueError(
                f"{self.label!r} must be a number from {self.lowest:,} to {self.highest:,}, got "
                f"{shown(value)}."
            )
        return value


BEAMS = Setting("Beam size", 1, 8, 4, 1)
ALPHA = Setting("Alpha of the length penalty", 0, 2, 0.6, 0.1)
POSITIONS = {
    "base": Setting("Base of the wavelengths, as a power of 10", 0, 6, math.log10(PAPER_BASE), 0.1),
    "d_model": Setting("d_model", 2, 512, 128, 2),
    "positions": Setting("Positions", 2, 512, 64, 1),
    "tolerance": Setting(
        "Tolerance: positions closer than this fraction of the median step count as equal",
        0,
        1,
        LEAST_DISTANCE,
        0.01,
    ),
}
SCHEDULE = {
    "rate_d_model": Setting("d_model", 64, 2048, 512, 64),
    "warmup": Setting("Warm-up steps", 100, 20000, 4000, 100),
    "factor": Setting("Factor", 0.1, 5, 1, 0.1),
    "steps": Setting("Steps", 1000, 300000, 100000, 1000),
}


def _check_choice(label: str, value: Any, choices: Sequence[Any]) -> Any:
    if value not in choices:
        raise ValueError(
            f"{label} must be one of {', '.join(map(str, choices))}, got {shown(value)}."
        )
    return value


class Hypothesis(NamedTuple):
    """Hypothesis of the beam with its score.

    Attributes:
        text: Text of the hypothesis.
        ids: Token ids with the start token, [T + 1].
        log_probability: Natural logarithm of its probability, given the source.
        score: Log probability divided by the length penalty; the search ranks by it.
    """

    text: str
    ids: Tensor
    log_probability: float
    score: float


def find_hypotheses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    num_beams: int,
    length_penalty_alpha: float,
) -> list[Hypothesis]:
    """Translate a sentence, and return all hypotheses of the beam. Section 6.1.

    Args:
        model: Trained model.
        tokenizer: Tokenizer of the model.
        source: Sentence to translate.
        num_beams: Beam size, and number of hypotheses.
        length_penalty_alpha: Alpha of the length penalty.

    Returns:
        The hypotheses, best first.

    Raises:
        ValueError: If the source is empty, or longer than the page or the model allows.
        TimeoutError: If the search takes more than `MAX_SECONDS`.
    """
    if not isinstance(source, str):
        raise ValueError(f"the sentence must be text, got {shown(source)}.")
    if not source.strip():
        raise ValueError("the sentence must have words, got only white space.")
    if len(source) > MAX_CHARACTERS:
        raise ValueError(
            f"the sentence must have at most {MAX_CHARACTERS:,} characters, got {len(source):,}."
        )
    pipeline = TranslationPipeline(model, tokenizer, device=model.device)
    source_ids = pipeline.preprocess([source])["input_ids"][0]
    if len(source_ids) > MAX_TOKENS:
        raise ValueError(
            f"the sentence must have at most {MAX_TOKENS} tokens, got {len(source_ids)}."
        )
    model_extra_tokens = getattr(model.generation_config, "max_extra_tokens", None)
    max_extra_tokens = MAX_EXTRA_TOKENS
    if model_extra_tokens is not None:
        max_extra_tokens = min(max_extra_tokens, model_extra_tokens)
    start = time.monotonic()
    results = pipeline(
        source,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        length_penalty_alpha=length_penalty_alpha,
        max_extra_tokens=max_extra_tokens,
        max_time=MAX_SECONDS,
        return_scores=True,
        return_tensors=True,
        return_text=True,
    )
    if time.monotonic() - start > MAX_SECONDS:
        raise TimeoutError(
            f"The search took longer than {MAX_SECONDS} seconds. Use a shorter sentence or a "
            "smaller beam size."
        )
    hypotheses = [
        Hypothesis(
            result["translation_text"],
            result["translation_token_ids"][: len(result["token_log_probabilities"]) + 1],
            result["log_probability"],
            result["score"],
        )
        for result in results
    ]
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


class Models:
    """Models of the page, each loaded at its first use.

    Args:
        names: Run folders, model folders or Hub names.
    """

    def __init__(self, names: Sequence[str]):
        self.names = list(names)
        self.loaded_models: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]] = {}
        self.lock = threading.Lock()

    def get(self, name: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return a model and its tokenizer.

        Args:
            name: Name that a visitor has sent, of any type.

        Returns:
            The model in evaluation mode, and its tokenizer.

        Raises:
            ValueError: If the page does not offer the model, or the model cannot be loaded. The
                reason is only logged, because it may reveal details of the machine.
        """
        _check_choice("model", name, self.names)
        with self.lock:
            if name not in self.loaded_models:
                try:
                    model, tokenizer = load_trained(name)
                except Exception as error:
                    sentence = sentence_of(error)
                    if sentence is None:
                        raise
                    logger.warning("%s", sentence)
                    raise ValueError(
                        f"model {name!r} cannot be loaded: the reason is in the log of the server."
                    ) from error
                # only the "eager" attention returns weights. It is set once, because a switch after
                # loading would affect translations of other visitors that are in progress
                model.set_attn_implementation("eager")
                self.loaded_models[name] = model, tokenizer
        return self.loaded_models[name]


def build_page(model_names: str | Sequence[str] = DEMO_RUN) -> gr.Blocks:
    """Build the page.

    Args:
        model_names: Run folders, model folders or Hub names that visitors choose from, the first
            one as default; or one name.

    Returns:
        The page, which is not launched yet.
    """
    models = Models([model_names] if isinstance(model_names, str) else model_names)
    with gr.Blocks(
        title=TITLE, analytics_enabled=False, delete_cache=PICTURE_DELETION_SECONDS
    ) as page:
        gr.Markdown(f"# {TITLE}")
        with gr.Tab("Translate"):
            _translation_tab(models)
        with gr.Tab("Positions"):
            _positions_tab()
        with gr.Tab("Learning rate"):
            _schedule_tab()
    # no API, because its requests would bypass the queue
    return page.queue(max_size=MAX_WAITING, api_open=False)


def _translation_tab(models: Models):
    gr.Markdown(
        "Type an English sentence, or choose an example, and press Enter. Beam search keeps the "
        f"best hypotheses of each step ([section 6.1]({PAPER_URL})); a larger alpha favors longer "
        f"ones. The picture below shows what each word attends to ([section 3.2]({PAPER_URL})). "
        "Look for rows whose brightest cell is not on the diagonal: there the word order changes."
    )
    if any(Path(name).name == Path(DEMO_RUN).name for name in models.names):
        gr.Markdown(DEMO_VOCABULARY_NOTE)
    # the first example is part of the page, so it is computed once and not for each visitor
    rows, weights, picture, note_text = _example(models)
    # attention weights between words, or the reason why there are none
    attention = gr.State(weights)
    layers, heads = _layers_and_heads(weights, CROSS)
    with gr.Row():
        with gr.Column():
            source = gr.Textbox(
                SENTENCES[0],
                label="Sentence",
                info=f"at most {MAX_CHARACTERS:,} characters",
                # Enter submits the sentence only if `lines` is 1
                lines=1,
                max_lines=4,
                elem_id="source",
            )
            model = gr.Dropdown(models.names, label="Model", elem_id="model")
            beams, alpha = BEAMS.slider("beams"), ALPHA.slider("alpha")
            button = gr.Button("Translate", variant="primary", elem_id="translate")
            examples = gr.Examples(SENTENCES, source)
        with gr.Column():
            table = gr.Dataframe(
                rows,
                headers=["translation", "log P", "score"],
                datatype=["str", "number", "number"],
                label="Hypotheses, best first; score = log P / ((5 + length) / 6)^alpha",
                interactive=False,
                wrap=True,
                column_widths=["56%", "22%", "22%"],
                elem_id="hypotheses",
            )
    titles_and_names = [(kind.title, name) for name, kind in KINDS.items()]
    kind = gr.Radio(titles_and_names, value=CROSS, label="Attention", elem_id="kind")
    with gr.Row():
        layer = gr.Dropdown(layers, value=layers[-1], label="Layer", elem_id="layer")
        head = gr.Dropdown(heads, value=MEAN, label="Head", elem_id="head")
    plot = _picture("attention", "Attention of each word", picture)
    note = gr.Markdown(note_text, elem_id="note")

    def _translate(model_name: Any, source: Any, num_beams: Any, alpha: Any, kind: Any):
        num_beams, alpha = int(BEAMS.check(num_beams)), ALPHA.check(alpha)
        _check_choice("attention", kind, list(KINDS))
        hypotheses, weights = translate(*models.get(model_name), source, num_beams, alpha)
        return _rows(hypotheses), weights, *_choices(weights, kind)

    draw_inputs, draw_outputs = [attention, kind, layer, head], [plot, note]
    draw, translate_sentence = _with_error_sentences(_draw), _with_error_sentences(_translate)
    translate_inputs = [model, source, beams, alpha, kind]
    for on_event in (button.click, source.submit, examples.load_input_event.then):
        # first clear the results of the previous sentence, without waiting in the queue
        on_event(
            lambda: (None, NO_TRANSLATION, None, ""),
            None,
            [table, attention, plot, note],
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        ).then(
            translate_sentence,
            translate_inputs,
            [table, attention, layer, head],
            api_name="_translate",
            # gradio does not check the values, because `_translate` has better error messages
            preprocess=False,
            concurrency_id="translate",
            concurrency_limit=TRANSLATIONS_AT_ONCE,
        ).success(draw, draw_inputs, draw_outputs, api_name="draw_attention")
    kind.input(_with_error_sentences(_choices), [attention, kind], [layer, head]).success(
        draw, draw_inputs, draw_outputs
    )
    for choice in (layer, head):
        choice.input(draw, draw_inputs, draw_outputs)


def _example(models: Models) -> tuple[list, AttentionWeights | str, Image.Image | None, str]:
    """Return the rows, weights, picture and note of the first example, by the first model."""
    try:
        hypotheses, weights = translate(
            *models.get(models.names[0]), SENTENCES[0], int(BEAMS.default), ALPHA.default
        )
    except (ValueError, TimeoutError) as error:
        return [], NO_TRANSLATION, None, str(error)
    layers, _ = _layers_and_heads(weights, CROSS)
    return _rows(hypotheses), weights, *_draw(weights, CROSS, layers[-1], MEAN)


def _rows(hypotheses: Sequence[Hypothesis]) -> list[list[str | float]]:
    return [
        [hypothesis.text, round(hypothesis.log_probability, 2), round(hypothesis.score, 2)]
        for hypothesis in hypotheses
    ]


def _draw(
    weights: AttentionWeights | str | None, kind: str, layer: int, head: int | str
) -> tuple[Image.Image | None, str]:
    """Return a picture and an empty note, or None and the reason why there is no picture."""
    if weights is None or isinstance(weights, str):
        return None, weights or NO_TRANSLATION
    return draw_attention(weights, kind, layer, head), ""


def _positions_tab():
    gr.Markdown(
        f"The sinusoidal positional encoding ([section 3.5]({PAPER_URL})), and alternatives. Each "
        "row of the first picture is a position. Look for positions with the same row: the model "
        "could not tell them apart. A smaller base, or another encoding, has such positions. The "
        "second and the third picture show that the similarity of two positions depends only on "
        "their distance."
    )
    # the first pictures are part of the page, so they are drawn once and not for each visitor
    defaults = [setting.default for setting in POSITIONS.values()]
    facts_text, *pictures = _explore_positions(ENCODING, *defaults)
    with gr.Row():
        with gr.Column():
            encodings = list(CANDIDATES)
            inputs = [
                gr.Dropdown(encodings, value=ENCODING, label="Encoding", elem_id="encoding"),
                *(setting.slider(name) for name, setting in POSITIONS.items()),
            ]
            facts = gr.Markdown(facts_text, elem_id="found")
        with gr.Column(scale=2):
            plots = [
                _picture(name, label, picture)
                for (name, label), picture in zip(PICTURES.items(), pictures, strict=True)
            ]
    _draw_on_change(_explore_positions, inputs, [facts, *plots])


def _schedule_tab():
    gr.Markdown(
        f"The learning rate ([section 5.3]({PAPER_URL})) rises linearly during warm-up, then "
        "decays with the inverse square root of the step. A longer warm-up lowers the peak, and so "
        "does a wider model."
    )
    first_picture = _draw_schedule(*(setting.default for setting in SCHEDULE.values()))
    with gr.Row():
        with gr.Column():
            inputs = [setting.slider(name) for name, setting in SCHEDULE.items()]
        with gr.Column(scale=2):
            plot = _picture("schedule", "Learning rate against step", first_picture)
    _draw_on_change(_draw_schedule, inputs, plot)


def _picture(name: str, title: str, first_picture: Image.Image | None = None) -> gr.Image:
    gr.Markdown(f"**{title}**")
    return gr.Image(
        first_picture,
        format="png",
        type="pil",
        show_label=False,
        interactive=False,
        # no buttons, because they would cover a part of the picture
        buttons=[],
        alt_text=title,
        elem_id=name,
    )


def _draw_on_change(draw: Callable, inputs: list, outputs: Any):
    # "always_last": while a drawing is in progress, gradio keeps only the last value of a slider
    gr.on(
        [component.change for component in inputs],
        _with_error_sentences(draw),
        inputs,
        outputs,
        show_progress="hidden",
        trigger_mode="always_last",
        preprocess=False,
    )


def _as_image(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png))


def _as_png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=DOTS_PER_INCH)
    return file.getvalue()


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    num_beams: int,
    length_penalty_alpha: float,
) -> tuple[list[Hypothesis], AttentionWeights | str]:
    """Translate a sentence, and return attention between words for the best hypothesis.

    Args:
        model: Trained model.
        tokenizer: Tokenizer of the model.
        source: Sentence to translate.
        num_beams: Beam size.
        length_penalty_alpha: Alpha of the length penalty.

    Returns:
        The hypotheses, best first, and the attention weights or the reason why there are none.

    Raises:
        ValueError: If the source is empty, or longer than the page or the model allows.
        TimeoutError: If the search takes more than `MAX_SECONDS`.
    """
    hypotheses = find_hypotheses(model, tokenizer, source, num_beams, length_penalty_alpha)
    target_ids = hypotheses[0].ids[1:]
    both_texts = (tokenizer(source)["input_ids"], target_ids.tolist())
    # check the number of words now, before the attention weights take memory
    num_words = max(len(words_of(tokenizer, ids)) for ids in both_texts)
    if num_words > MAX_WORDS:
        return hypotheses, _too_many_words(num_words)
    return hypotheses, attention_weights(model, tokenizer, source, target_ids).by_word()


def _too_many_words(num_words: int) -> str:
    return f"attention is drawn for at most {MAX_WORDS} words, got {num_words}."


def _choices(weights: AttentionWeights | str, kind: str):
    """Return new choices of layers and heads, whose numbers may differ in encoder and decoder."""
    _check_choice("attention", kind, list(KINDS))
    layers, heads = _layers_and_heads(weights, kind)
    return gr.Dropdown(layers, value=layers[-1]), gr.Dropdown(heads, value=MEAN)


def _layers_and_heads(
    weights: AttentionWeights | str, kind: str
) -> tuple[list[int], list[int | str]]:
    num_layers, num_heads = (
        (1, 0) if isinstance(weights, str) else _num_layers_and_heads(weights, kind)
    )
    return list(range(1, num_layers + 1)), [MEAN, *range(1, num_heads + 1)]


def _num_layers_and_heads(weights: AttentionWeights, kind: str) -> tuple[int, int]:
    return getattr(weights, kind).shape[:2]


def draw_attention(
    weights: AttentionWeights | str | None, kind: str, layer: int, head: int | str
) -> Image.Image:
    """Draw the attention of each word.

    Args:
        weights: Attention weights of a translation, between words; or the reason why there are
            none, or None.
        kind: "encoder", "decoder" or "cross".
        layer: Number of the layer, from 1.
        head: Number of the head, from 1; `MEAN` for the mean of the layer's heads.

    Returns:
        The picture.

    Raises:
        ValueError: If there is no translation, it has too many words to be drawn, or there is no
            such kind, layer or head.
    """
    if weights is None or isinstance(weights, str):
        raise ValueError(weights or NO_TRANSLATION)
    _check_choice("attention", kind, list(KINDS))
    queries, keys = getattr(weights, KINDS[kind].queries), getattr(weights, KINDS[kind].keys)
    num_words = max(len(queries), len(keys))
    if num_words > MAX_WORDS:
        raise ValueError(_too_many_words(num_words))
    num_layers, num_heads = _num_layers_and_heads(weights, kind)
    layer = int(_check_choice("layer", layer, range(1, num_layers + 1)))
    _check_choice("head", head, [MEAN, *range(1, num_heads + 1)])
    figure, axes = new_figure(2.0 + 0.32 * len(keys), 1.5 + 0.27 * len(queries))
    image = draw_matrix(axes, weights, kind, layer - 1, None if head == MEAN else int(head) - 1)
    label_rows_and_columns(axes, queries, keys)
    axes.set_ylabel("query")
    axes.set_xlabel("key")
    figure.colorbar(image, label="weight")
    return _as_image(_as_png(figure))


def _explore_positions(name: Any, *values: Any) -> tuple[Any, ...]:
    _check_choice("encoding", name, list(CANDIDATES))
    checked_values = [
        setting.check(value) for setting, value in zip(POSITIONS.values(), values, strict=True)
    ]
    facts_text, *pictures = _draw_positions(name, *checked_values)
    return facts_text, *map(_as_image, pictures)


@functools.lru_cache(maxsize=MAX_CACHED_POSITIONS)
def _draw_positions(
    name: str, power: float, d_model: float, num_positions: float, tolerance: float
) -> tuple[Any, ...]:
    base = 10.0**power
    encoding = candidate_encoding(name, int(num_positions), int(d_model), base)
    distance = tolerance * median_step(encoding)
    repeat = first_repeat(encoding, distance)
    repeat_text = f"{repeat.position}, like {repeat.earlier}" if repeat else "none"
    formula = CANDIDATES[name].replace("base", f"{base:,.0f}" if base >= 1000 else f"{base:.4g}")
    facts_text = (
        f"`{formula}`\n\nSmallest distance between two of {len(encoding)} positions: "
        f"{smallest_distance(encoding):.3g}. Median step: {median_step(encoding):.3g}. Pairs that "
        f"look the same: {collisions(encoding, distance):,}. First position that looks like an "
        f"earlier one: {repeat_text}."
    )
    pictures = (draw_heatmap(encoding), draw_similarity(encoding), draw_dot_product(encoding))
    return facts_text, *map(_as_png, pictures)


def _draw_schedule(*values: Any) -> Image.Image:
    d_model, warmup_steps, factor, max_steps = (
        setting.check(value) for setting, value in zip(SCHEDULE.values(), values, strict=True)
    )
    schedule = Schedule(int(d_model), int(warmup_steps), factor, int(max_steps))
    name = f"d_model {schedule.d_model}, warm-up {schedule.warmup_steps}"
    return _as_image(_as_png(draw_schedules({name: schedule})))


def _as_file(value: Any) -> Any:
    """Save a picture as a new file, because gradio would overwrite a file that others read."""
    if not isinstance(value, Image.Image):
        return value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "image.png")
        value.save(path)
        return save_file_to_cache(path, get_upload_folder())


def _with_error_sentences(function: Callable) -> Callable:
    """Wrap a function so that the page shows an error as one sentence until a visitor closes it."""

    @functools.wraps(function)
    def wrapped(*inputs):
        try:
            outputs = function(*inputs)
            if isinstance(outputs, tuple):
                return tuple(map(_as_file, outputs))
            return _as_file(outputs)
        except Exception as error:
            sentence = sentence_of(error)
            if sentence is None:
                raise
            raise gr.Error(sentence, duration=None, print_exception=False) from error

    return wrapped


def serve(
    model_names: str | Sequence[str] = DEMO_RUN,
    host: str | None = None,
    port: int | None = None,
    **launch_arguments: Any,
) -> Any:
    """Serve the page until the command is interrupted.

    Args:
        model_names: Models that visitors choose from, as in `build_page`.
        host: Address to listen on; only this machine if not given.
        port: Port to listen on; the first free one from 7860 if not given.
        launch_arguments: Further arguments of gradio's `launch`.

    Returns:
        Result of gradio's `launch`, if `launch_arguments` has `prevent_thread_lock`.

    Raises:
        OSError: If the port is in use.
    """
    theme = gr.themes.Default(font=FONT, font_mono=FONT_MONO)
    # the page accepts no files, and does not record the text of visitors
    safe_arguments = {
        "max_file_size": 1,
        "state_session_capacity": MAX_SESSIONS,
        "run_history": False,
        "enable_monitoring": False,
        "app_kwargs": {"middleware": [Middleware(BoundedRequests, max_bytes=MAX_REQUEST_BYTES)]},
    }
    return build_page(model_names).launch(
        server_name=host,
        server_port=port,
        theme=theme,
        footer_links=[],
        **{**safe_arguments, **launch_arguments},
    )


def run(argv: list[str], prog: str = "vanilla_transformer.space.app") -> None:
    """Run the command.

    Args:
        argv: Command-line arguments.
        prog: Name of the command, for its help.

    Raises:
        ValueError: If the port is out of range.
        OSError: If the port is in use.
    """
    parser = argparse.ArgumentParser(
        prog=prog, allow_abbrev=False, description="Serve the web page."
    )
    parser.add_argument(
        "--model",
        nargs="+",
        metavar="RUN",
        default=[DEMO_RUN],
        help="run folders, model folders or Hub names that visitors choose from (default: "
        f"{DEMO_RUN})",
    )
    parser.add_argument("--host", help="address to listen on (default: only this machine)")
    parser.add_argument("--port", type=int, help="port (default: the first free one from 7860)")
    flags = parse_flags(parser, argv)
    if flags.port is not None and not 0 < flags.port < 65536:
        raise ValueError(f"port must be from 1 to 65535, got {flags.port}.")
    serve(flags.model, flags.host, flags.port)


if __name__ == "__main__":
    sys.exit(run_command(run))
