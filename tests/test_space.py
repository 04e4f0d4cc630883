"""The web page: its functions by themselves, then in a browser, as a person uses it."""

import shutil
from urllib.parse import urlsplit

import pytest
import torch
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.attention_maps import attention_weights
from vanilla_transformer.cli import main
from vanilla_transformer.search_vanilla_transformer import gnmt_length_penalty

gradio = pytest.importorskip("gradio", reason="gradio is not installed")

from vanilla_transformer.space.app import (  # noqa: E402
    MAX_WORDS,
    MEAN,
    build_page,
    draw_attention,
    find_hypotheses,
    serve,
)

SENTENCE = TEXTS[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"width": 390, "height": 844}
SECONDS = 30


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A model that nobody trained, and its tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, encoder_layers=3, decoder_layers=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(run_folder):
    return (
        VanillaTransformerForConditionalGeneration.from_pretrained(run_folder).eval(),
        VanillaTransformerTokenizer.from_pretrained(run_folder),
    )


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_the_scores_are_those_that_the_search_ranks_by(loaded, alpha):
    model, tokenizer = loaded
    hypotheses = find_hypotheses(model, tokenizer, SENTENCE, 4, alpha)
    searched = model.generate(
        **tokenizer(SENTENCE, return_tensors="pt"),
        num_beams=4,
        num_return_sequences=4,
        length_penalty_alpha=alpha,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = [hypothesis.score for hypothesis in hypotheses]
    torch.testing.assert_close(torch.tensor(scores), searched.sequences_scores)
    for hypothesis in hypotheses:
        length = len(hypothesis.ids) - 1
        expected = hypothesis.log_probability / gnmt_length_penalty(length, alpha)
        assert hypothesis.score == pytest.approx(expected)
    assert len({tuple(hypothesis.ids.tolist()) for hypothesis in hypotheses}) == 4


def test_a_sentence_without_words_is_refused(loaded):
    with pytest.raises(ValueError, match="must have words"):
        find_hypotheses(*loaded, "  \n", 2, 0.6)


def test_attention_between_more_words_than_can_be_drawn_is_refused(loaded):
    # the end token is one more
    most, more = (
        attention_weights(*loaded, " ".join(["cat"] * count), "dogs sleep").by_word()
        for count in (MAX_WORDS - 1, MAX_WORDS)
    )
    width, _ = draw_attention(most, "cross", 1, MEAN).size
    assert width == 120 * (2.0 + 0.32 * MAX_WORDS)
    for kind in ("cross", "encoder"):
        with pytest.raises(ValueError, match=r"for at most 100 words, got 101\."):
            draw_attention(more, kind, 1, MEAN)
    # of two words there is still a picture
    assert draw_attention(more, "decoder", 1, MEAN).size[0] < width


@pytest.fixture(scope="module")
def address(run_folder):
    """Where the page is served, with that model."""
    _, local_address, _ = serve(str(run_folder), prevent_thread_lock=True, quiet=True)
    yield local_address
    gradio.close_all(verbose=False)


def test_the_page_is_for_this_machine_alone_where_no_address_is_given(address):
    assert urlsplit(address).hostname == "127.0.0.1"


def test_a_taken_port_is_said_in_one_sentence(address, capsys):
    taken = str(urlsplit(address).port)
    assert main(["space", "--port", taken]) == 1
    assert taken in capsys.readouterr().err


def test_a_port_that_cannot_be_is_refused(capsys):
    assert main(["space", "--port", "99999"]) == 1
    assert "port must be from 1 to 65535, got 99999" in capsys.readouterr().err


def test_the_page_builds_without_a_model():
    page = build_page("nowhere")
    labels = {getattr(block, "label", None) for block in page.blocks.values()}
    assert {"Sentence", "Beam size", "Layer", "Head", "Warm-up steps"} <= labels
    assert isinstance(page, gradio.Blocks)


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, address):
    """The page as someone opens it, on a machine that reaches nothing else."""
    opened = browser.new_page()
    opened.set_default_timeout(1000 * SECONDS)
    outside = []

    def refuse(route):
        outside.append(route.request.url)
        route.abort()

    opened.route(lambda url: not url.startswith(("data:", "blob:", address)), refuse)
    opened.goto(address)
    opened.locator("#translate").wait_for()
    yield opened
    opened.close()
    assert not outside, "the page must need no other host"


def picture(page, name, other_than=None):
    """The address of a picture, once there is one, other than it was before."""
    page.wait_for_function(
        "([name, before]) => { const image = document.querySelector(`#${name} img`);"
        " return image && image.src && image.src !== before; }",
        arg=[name, other_than],
    )
    return page.locator(f"#{name} img").get_attribute("src")


def translate(page, text, model=None):
    page.locator("#source textarea").fill(text)
    if model is not None:
        page.locator("#model textarea, #model input").first.fill(model)
    page.locator("#translate").click()


def shown_hypotheses(page):
    """The rows of the table, in order."""
    rows = page.locator("#hypotheses").get_by_role("row").all()
    cells = [row.get_by_role("gridcell").all_inner_texts() for row in rows]
    return [[cell.strip() for cell in row] for row in cells if row]


def choose(page, name, option):
    page.locator(f"#{name} input").click()
    page.get_by_role("option", name=option, exact=True).click()


@pytest.mark.browser
def test_someone_translates_and_looks_into_every_kind_of_attention(page, loaded):
    translate(page, SENTENCE)
    first = picture(page, "attention")
    expected = find_hypotheses(*loaded, SENTENCE, 4, 0.6)
    assert shown_hypotheses(page) == [
        [found.text, f"{round(found.log_probability, 2)}", f"{round(found.score, 2)}"]
        for found in expected
    ]
    choose(page, "layer", "1")
    second = picture(page, "attention", other_than=first)
    choose(page, "head", "3")
    third = picture(page, "attention", other_than=second)
    page.get_by_label("decoder self-attention", exact=True).check()
    fourth = picture(page, "attention", other_than=third)
    # the encoder has a layer more
    page.get_by_label("encoder self-attention", exact=True).check()
    fifth = picture(page, "attention", other_than=fourth)
    assert page.locator("#layer input").input_value() == "3"
    assert len({first, second, third, fourth, fifth}) == 5


@pytest.mark.browser
def test_a_smaller_beam_gives_fewer_hypotheses(page):
    page.locator("#beams input[type=number]").fill("2")
    page.locator("#beams input[type=number]").press("Enter")
    translate(page, SENTENCE)
    picture(page, "attention")
    assert len(shown_hypotheses(page)) == 2


@pytest.mark.browser
@pytest.mark.parametrize(
    ("text", "model", "sentence"),
    [("   ", None, "must have words"), (SENTENCE, "/no/such/folder", "run must be a run folder")],
)
def test_bad_input_is_answered_with_a_sentence(page, text, model, sentence):
    translate(page, text, model)
    toast = page.get_by_test_id("toast-body")
    toast.wait_for()
    assert sentence in toast.inner_text()
    assert page.locator("#attention img").count() == 0


@pytest.mark.browser
@pytest.mark.parametrize(
    ("tab", "slider", "value", "name"),
    [
        ("Positions", "base", "2", "heatmap"),
        ("Positions", "positions", "40", "similarity"),
        ("Positions", "d_model", "32", "dot_product"),
        ("Learning rate", "warmup", "8000", "schedule"),
    ],
)
def test_a_slider_changes_the_picture(page, tab, slider, value, name):
    page.get_by_role("tab", name=tab).click()
    before = picture(page, name)
    page.locator(f"#{slider} input[type=number]").fill(value)
    picture(page, name, other_than=before)


@pytest.mark.browser
def test_the_findings_on_positions_follow_the_encoding(page):
    page.get_by_role("tab", name="Positions").click()
    page.get_by_text("like an earlier one: none").wait_for()
    choose(page, "encoding", "sine")
    # the two stand on both sides of the crest, at 5 and 11 of its 6.28 positions
    page.get_by_text("like an earlier one: 11, like 5").wait_for()


@pytest.mark.browser
@pytest.mark.parametrize("tab", ["Translate", "Positions", "Learning rate"])
def test_the_page_fits_a_phone(page, tab):
    page.set_viewport_size(PHONE)
    page.get_by_role("tab", name=tab).click()
    if tab == "Translate":
        translate(page, SENTENCE)
        picture(page, "attention")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
