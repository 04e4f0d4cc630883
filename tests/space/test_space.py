"""Web page: its functions alone, then the page in a browser."""

import copy
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer import generation_vanilla_transformer as generation
from vanilla_transformer import scores_vanilla_transformer as scores_module
from vanilla_transformer.attention_maps import attention_weights
from vanilla_transformer.cli import main
from vanilla_transformer.console import shown
from vanilla_transformer.search_vanilla_transformer import gnmt_length_penalty

gradio = pytest.importorskip("gradio", reason="gradio is not installed")

import httpx  # noqa: E402
from gradio_client import Client  # noqa: E402
from gradio_client.exceptions import AppError  # noqa: E402
from gradio_client.utils import QueueError  # noqa: E402

from vanilla_transformer.space import app  # noqa: E402
from vanilla_transformer.space.app import (  # noqa: E402
    MAX_WORDS,
    MEAN,
    build_page,
    draw_attention,
    find_hypotheses,
    serve,
    translate,
)

SENTENCE = TEXTS[2]
PHONE = {"width": 390, "height": 844}
SECONDS = 30


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Untrained model, and its tokenizer."""
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
    # the end token counts too
    most, more = (
        attention_weights(*loaded, " ".join(["cat"] * count), "dogs sleep").by_word()
        for count in (MAX_WORDS - 1, MAX_WORDS)
    )
    width, _ = draw_attention(most, "cross", 1, MEAN).size
    assert width == 120 * (2.0 + 0.32 * MAX_WORDS)
    for kind in ("cross", "encoder"):
        with pytest.raises(ValueError, match=r"for at most 100 words, got 101\."):
            draw_attention(more, kind, 1, MEAN)
    # a picture of two words is still drawn
    assert draw_attention(more, "decoder", 1, MEAN).size[0] < width


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("cat " * 250 + "x", "at most 1,000 characters, got 1,001"),
        ("x" * (1 << 20), "at most 1,000 characters, got 1,048,576"),
        ("\u4e2d" * 100, "at most 256 tokens, got 302"),
        ("\U0001f600" * 1000, "at most 256 tokens, got 4002"),
        (None, "must be text, got None"),
        ([SENTENCE], "must be text, got "),
        ("cat\ud83d", "valid Unicode"),
    ],
    ids=["letters", "many letters", "tokens", "many tokens", "none", "list", "half"],
)
def test_a_sentence_that_is_too_long_or_none_is_refused_before_the_search(
    source, sentence, loaded, monkeypatch
):
    model, tokenizer = loaded
    monkeypatch.setattr(model, "generate", lambda **_: pytest.fail("it searches"))
    with pytest.raises(ValueError, match=sentence) as refused:
        find_hypotheses(model, tokenizer, source, 2, 0.6)
    assert len(str(refused.value)) < 200


def test_a_search_that_takes_too_long_ends_and_says_so(loaded, monkeypatch):
    model, tokenizer = loaded
    steps = []
    begin = generation.begin_decoding

    def slow(*given):
        decoding = begin(*given)

        def slowed(read):
            def next_step(*given):
                steps.append(time.sleep(0.1))
                return read(*given)

            return next_step

        # greedy search reads tokens with `step`, beam search with `select`
        decoding.step, decoding.select = slowed(decoding.step), slowed(decoding.select)
        return decoding

    monkeypatch.setattr(generation, "begin_decoding", slow)
    find_hypotheses(model, tokenizer, SENTENCE, 1, 0.6)
    assert len(steps) > 8
    monkeypatch.setattr(app, "MAX_SECONDS", 0.15)
    for beams in (1, 4):
        steps.clear()
        with pytest.raises(TimeoutError, match=r"The search took longer than 0.15 seconds"):
            find_hypotheses(model, tokenizer, SENTENCE, beams, 0.6)
        assert 1 < len(steps) < 6


def test_a_sentence_is_translated_with_several_end_tokens(loaded):
    model, tokenizer = loaded
    expected = find_hypotheses(model, tokenizer, SENTENCE, 4, 0.6)
    model = copy.deepcopy(model)
    for config in (model.config, model.generation_config):
        config.eos_token_id = [tokenizer.eos_token_id, tokenizer.unk_token_id or 0]
    found = find_hypotheses(model, tokenizer, SENTENCE, 4, 0.6)
    assert [it.text for it in found] == [it.text for it in expected]
    assert [it.score for it in found] == pytest.approx([it.score for it in expected])


def test_a_translation_is_bounded_whatever_the_model_allows(run_folder):
    model = VanillaTransformerForConditionalGeneration.from_pretrained(run_folder).eval()
    tokenizer = VanillaTransformerTokenizer.from_pretrained(run_folder)
    length = len(tokenizer(SENTENCE)["input_ids"])
    for own in (None, 0, 3, 10**9):
        model.generation_config.max_extra_tokens = own
        # a model that never ends
        model.generation_config.suppress_tokens.append(model.config.eos_token_id)
        (found,) = find_hypotheses(model, tokenizer, SENTENCE, 1, 0.6)
        extra_tokens = own if own in (0, 3) else app.MAX_EXTRA_TOKENS
        assert len(found.ids) - 1 == length + extra_tokens


def test_the_scores_are_the_same_made_for_one_beam_at_a_time(loaded, monkeypatch):
    together = find_hypotheses(*loaded, SENTENCE, 4, 0.6)
    monkeypatch.setattr(scores_module, "MOST_LOGITS", 1)
    for alone, found in zip(find_hypotheses(*loaded, SENTENCE, 4, 0.6), together, strict=True):
        assert alone.text == found.text
        assert alone.ids.tolist() == found.ids.tolist()
        assert alone.score == pytest.approx(found.score, abs=1e-4)


def test_weights_that_cannot_be_drawn_are_not_computed(loaded, monkeypatch):
    monkeypatch.setattr(app, "MAX_WORDS", 3)
    monkeypatch.setattr(app, "attention_weights", lambda *_: pytest.fail("they are made"))
    hypotheses, reason = translate(*loaded, SENTENCE, 2, 0.6)
    assert len(hypotheses) == 2
    with pytest.raises(ValueError, match="for at most 3 words, got "):
        draw_attention(reason, "cross", 1, MEAN)


def test_concurrent_visitors_get_their_own_results(run_folder):
    models = app.Models([str(run_folder)])
    tasks = [(text, beams, alpha) for text in TEXTS for beams in (1, 4) for alpha in (0.0, 1.5)]

    def visit(task):
        hypotheses, weights = translate(*models.get(str(run_folder)), *task)
        return [(it.text, it.ids.tolist(), it.score) for it in hypotheses], weights

    alone = [visit(task) for task in tasks]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(visit, tasks * 3))
    for (expected, weights), (found, other) in zip(alone * 3, together, strict=True):
        assert [it[:2] for it in found] == [it[:2] for it in expected]
        assert [it[2] for it in found] == pytest.approx([it[2] for it in expected], abs=1e-4)
        for kind in ("encoder", "decoder", "cross"):
            torch.testing.assert_close(getattr(other, kind), getattr(weights, kind))


@pytest.fixture(scope="module")
def address(run_folder):
    """Address of the page with this model."""
    _, local_address, _ = serve(str(run_folder), prevent_thread_lock=True, quiet=True)
    yield local_address
    gradio.close_all(verbose=False)


def test_the_page_listens_only_on_this_machine_by_default(address):
    assert urlsplit(address).hostname == "127.0.0.1"


@pytest.fixture(scope="module")
def client(address):
    """Client of the page without a browser."""
    return Client(address, verbose=False)


def refusal(client, function, *values):
    with pytest.raises(AppError) as refused:
        client.predict(*values, api_name=f"/{function}")
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert len(sentence) < 400
    assert "verbose error" not in sentence, "it is a traceback"
    return sentence


# values outside the range of every slider
NUMBERS = [10**6, 10**400, -1, None, "4", True, [4], {"a": 4}]
TOO_LONG = "Oscar wants to learn Hungarian, Croatian, or Polish. " * 400


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: repr(value)[:9])
def test_numbers_that_a_slider_cannot_have_are_refused(value, client, run_folder):
    before = str(run_folder), SENTENCE
    for values, name in (
        ((value, 0.6), "Beam size"),
        ((4, value), "Alpha of the length penalty"),
    ):
        assert f"'{name}' must be a number from" in refusal(
            client, "_translate", *before, *values, "cross"
        )
    for function, values in (
        ("_explore_positions", ["sinusoidal", 4, 128, 64, 0.1]),
        ("_draw_schedule", [512, 4000, 1, 10000]),
    ):
        for place in range(function == "_explore_positions", len(values)):
            wrong = [*values[:place], value, *values[place + 1 :]]
            assert "must be a number from" in refusal(client, function, *wrong)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_values_that_are_not_plain_numbers_are_refused(value, address, run_folder):
    for setting in (app.BEAMS, *app.POSITIONS.values(), *app.SCHEDULE.values()):
        with pytest.raises(ValueError, match="must be a number from"):
            setting.check(float(value))
    body = json.dumps({"data": ["sinusoidal", 4, "X", 64, 0.1]}).replace('"X"', value)
    call = f"{address}gradio_api/call/_explore_positions"
    joined = httpx.post(call, content=body, headers={"Content-Type": "application/json"})
    answer = httpx.get(f"{call}/{joined.json()['event_id']}").text
    assert "event: error" in answer
    assert "'d_model' must be a number from 2 to 512, got " in answer


@pytest.mark.parametrize("value", ["nothing", "__class__", None, 5, ["cross"], {}, "x" * 10**5])
def test_a_kind_of_attention_or_an_encoding_that_does_not_exist_is_refused(
    value, client, run_folder
):
    asked = (str(run_folder), SENTENCE, 2, 0.6)
    assert "attention must be one of encoder, decoder, cross" in refusal(
        client, "_translate", *asked, value
    )
    assert "encoding must be one of integer" in refusal(
        client, "_explore_positions", value, 4, 128, 64, 0.1
    )


def test_a_text_that_is_too_long_is_refused_whoever_sends_it(client, run_folder):
    for text in (TOO_LONG, "x" * 1001, "x" * 900_000):
        assert "at most 1,000 characters, got " in refusal(
            client, "_translate", str(run_folder), text, 4, 0.6, "cross"
        )
    with pytest.raises(httpx.HTTPStatusError, match="413"):
        client.predict(str(run_folder), "x" * (2 << 20), 4, 0.6, "cross", api_name="/_translate")


def test_the_page_does_not_reveal_paths_of_the_machine(client, tmp_path, run_folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "secret"}')
    names = ["/etc", "/etc/passwd", "/no/such", "../../x", "~root", ".", "", "\0", "a\0b", None, 5]
    names += [str(tmp_path), str(tmp_path / "empty"), str(tmp_path / "config.json")]
    names += [f"{run_folder}/", f"{run_folder}/.", "Helsinki-NLP/opus-mt-en-de", [str(run_folder)]]
    sentences = {
        refusal(client, "_translate", name, SENTENCE, 2, 0.6, "cross").replace(
            f"got {shown(name)}.", "got NAME."
        )
        for name in names
    }
    assert sentences == {f"model must be one of {run_folder}, got NAME."}


def test_the_reason_why_a_model_cannot_be_loaded_is_only_logged(tmp_path, caplog):
    (tmp_path / "empty").mkdir()
    names = [str(tmp_path / "empty"), str(tmp_path / "none")]
    models = app.Models(names)
    for name, reason in zip(names, ("a folder without config.json", "no such folder"), strict=True):
        with pytest.raises(ValueError, match="cannot be loaded: the reason is in the log") as why:
            models.get(name)
        assert str(why.value).startswith(f"model {name!r} cannot be loaded")
        assert reason in caplog.messages[-1]


def test_visitors_choose_among_the_models_that_are_offered(run_folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run_folder, other)
    names = [str(run_folder), str(other)]
    page = build_page(names)
    (field,) = (block for block in page.blocks.values() if block.elem_id == "model")
    assert [value for _, value in field.choices] == names
    assert field.value == names[0]
    models = app.Models(names)
    first, second = (models.get(name)[0] for name in names)
    assert first is not second
    assert models.get(names[0])[0] is first


@pytest.mark.parametrize(
    "value", [("nothing", 1, MEAN), ("cross", 3, MEAN), ("cross", 0, MEAN), ("cross", 1, 5)]
)
def test_a_layer_or_a_head_that_does_not_exist_is_refused(value, loaded, client, run_folder):
    _, weights = translate(*loaded, SENTENCE, 1, 0.6)
    with pytest.raises(ValueError, match="must be one of"):
        draw_attention(weights, *value)
    client.predict(str(run_folder), SENTENCE, 1, 0.6, "cross", api_name="/_translate")
    # gradio's components have their own errors
    assert "list of choices" in refusal(client, "draw_attention", *value)


@pytest.mark.parametrize("value", [[1], None, "1", {}, -1, float("nan")])
def test_a_layer_is_one_number(value, loaded):
    _, weights = translate(*loaded, SENTENCE, 1, 0.6)
    for choices in ((value, MEAN), (1, value)):
        with pytest.raises(ValueError, match="must be one of"):
            draw_attention(weights, "cross", *choices)


def test_the_files_of_the_machine_are_not_served(address, run_folder):
    for path in ("/etc/passwd", run_folder / "config.json", run_folder / "model.safetensors"):
        for route in (f"file={path}", f"file/{path}", f"file=//{path}", f"file=/tmp/../{path}"):
            assert httpx.get(f"{address}gradio_api/{route}").status_code in (403, 404)
    for route in ("config", "gradio_api/info"):
        assert httpx.get(f"{address}{route}").status_code == 200
    assert httpx.get(f"{address}gradio_api/runs").status_code == 404
    assert httpx.get(f"{address}monitoring").status_code == 403


def test_the_page_takes_no_files_and_no_request_outside_its_queue(address, run_folder):
    for size in (2, 5000, 3 << 20):
        sent = httpx.post(f"{address}gradio_api/upload", files={"files": ("a.bin", b"x" * size)})
        assert sent.status_code in (400, 413)
    asked = {"data": [str(run_folder), SENTENCE, 1, 0.6, "cross"], "session_hash": "a"}
    assert httpx.post(f"{address}gradio_api/run/_translate", json=asked).status_code == 404

    def parts():
        yield b'{"data": ["'
        for _ in range(3 << 4):
            yield b"x" * 65536

    sent = httpx.post(
        f"{address}gradio_api/queue/join",
        content=parts(),
        headers={"Content-Type": "application/json"},
    )
    assert sent.status_code == 413
    assert "at most 1,048,576 bytes" in json.dumps(sent.json())


def test_a_page_that_is_opened_draws_nothing(run_folder):
    page = build_page(str(run_folder))
    events = [event for function in page.fns.values() for _, event in function.targets]
    assert "click" in events
    assert "load" not in events
    first = {block.elem_id: getattr(block, "value", None) for block in page.blocks.values()}
    assert all(first[name] for name in (*app.PICTURES, "schedule", "found", "attention"))
    assert first["hypotheses"]["data"]
    assert first["source"] == app.SENTENCES[0]


def test_a_page_whose_model_cannot_be_loaded_says_so_at_once(tmp_path):
    page = build_page(str(tmp_path / "none"))
    (note,) = (block.value for block in page.blocks.values() if block.elem_id == "note")
    assert note.startswith(f"model '{tmp_path / 'none'}' cannot be loaded")


def test_what_the_model_of_the_demo_knows_is_said_beside_it_only(run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "demo")
    for folder, is_said in ((run_folder, False), (tmp_path / "demo", True)):
        texts = [getattr(block, "value", None) for block in build_page(str(folder)).blocks.values()]
        assert (app.DEMO_VOCABULARY_NOTE in texts) == is_said


@pytest.mark.parametrize(
    ("power", "shown_base"),
    [(0, "1"), (1.3, "19.95"), (3.7, "5,012"), (4, "10,000"), (6, "1,000,000")],
)
def test_bases_are_shown_without_exponents(power, shown_base):
    found, *_ = app._explore_positions("sinusoidal", power, 8, 4, 0.1)
    assert f"/ {shown_base}^" in found or f"{shown_base}^" in found
    assert "e+" not in found.partition("`\n")[0]


def test_visitors_who_ask_for_the_same_get_the_same_whole_picture(client, address):
    clients = [client, *(Client(address, verbose=False) for _ in range(5))]
    values = (256, 4000, 1, 50000)
    with ThreadPoolExecutor(len(clients)) as pool:
        paths = pool.map(lambda it: it.predict(*values, api_name="/_draw_schedule"), clients * 4)
        pictures = {Path(path).read_bytes() for path in paths}
    assert len(pictures) == 1
    assert pictures.pop().startswith(b"\x89PNG")


def test_a_request_to_a_full_queue_gets_an_error(run_folder, monkeypatch):
    monkeypatch.setattr(app, "MAX_WAITING", 1)
    goes_on = threading.Event()
    get = app.Models.get
    served, address, _ = serve(str(run_folder), prevent_thread_lock=True, quiet=True)
    # the page has translated its example
    monkeypatch.setattr(app.Models, "get", lambda *given: goes_on.wait(60) and get(*given))
    try:
        asked = (str(run_folder), SENTENCE, 1, 0.6, "cross")
        functions = served.get_blocks().fns.items()
        number = next(it for it, function in functions if function.api_name == "_translate")
        join = {"data": asked, "session_hash": "a", "fn_index": number}
        statuses = [
            httpx.post(f"{address}gradio_api/queue/join", json=join).status_code for _ in range(9)
        ]
        # the requests that are handled at a time, and one in the queue
        assert statuses.count(503) >= 9 - app.TRANSLATIONS_AT_ONCE - 1
        assert statuses[0] == 200
        goes_on.set()
        visitor, start = Client(address, verbose=False), time.monotonic()
        rows = None
        while rows is None:
            try:
                rows, *_ = visitor.predict(*asked, api_name="/_translate")
            except QueueError:
                assert time.monotonic() - start < SECONDS
                time.sleep(0.1)
        assert len(rows["data"]) == 1
    finally:
        goes_on.set()
        served.get_blocks().close(verbose=False)


def test_a_port_in_use_is_refused_in_one_sentence(address, capsys):
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


@pytest.fixture
def page(browser, address):
    """Open page, in a browser that can reach no other host."""
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
    """Wait for a new picture, and return its address."""
    page.wait_for_function(
        "([name, before]) => { const image = document.querySelector(`#${name} img`);"
        " return image && image.src && image.src !== before; }",
        arg=[name, other_than],
    )
    return page.locator(f"#{name} img").get_attribute("src")


def ask(page, text):
    page.locator("#source textarea").fill(text)
    page.locator("#translate").click()


def shown_hypotheses(page):
    """Return the rows of the table, in order."""
    rows = page.locator("#hypotheses").get_by_role("row").all()
    cells = [row.get_by_role("gridcell").all_inner_texts() for row in rows]
    return [[cell.strip() for cell in row] for row in cells if row]


def choose(page, name, option):
    page.locator(f"#{name} input").click()
    page.get_by_role("option", name=option, exact=True).click()


@pytest.mark.browser
def test_a_visitor_translates_and_sees_every_kind_of_attention(page, loaded):
    example = picture(page, "attention")
    ask(page, SENTENCE)
    first = picture(page, "attention", other_than=example)
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
    # the encoder has one more layer
    page.get_by_label("encoder self-attention", exact=True).check()
    fifth = picture(page, "attention", other_than=fourth)
    assert page.locator("#layer input").input_value() == "3"
    assert len({first, second, third, fourth, fifth}) == 5


@pytest.mark.browser
def test_a_smaller_beam_gives_fewer_hypotheses(page):
    page.locator("#beams input[type=number]").fill("2")
    page.locator("#beams input[type=number]").press("Enter")
    example = picture(page, "attention")
    ask(page, SENTENCE)
    picture(page, "attention", other_than=example)
    assert len(shown_hypotheses(page)) == 2


@pytest.mark.browser
def test_a_page_opens_with_a_translated_example(page, loaded):
    best, *_ = find_hypotheses(*loaded, app.SENTENCES[0], 4, 0.6)
    picture(page, "attention")
    assert shown_hypotheses(page)[0][0] == best.text


@pytest.mark.browser
def test_enter_translates(page, loaded):
    example = picture(page, "attention")
    page.locator("#source textarea").fill(SENTENCE)
    page.locator("#source textarea").press("Enter")
    picture(page, "attention", other_than=example)
    best, *_ = find_hypotheses(*loaded, SENTENCE, 4, 0.6)
    assert shown_hypotheses(page)[0][0] == best.text


@pytest.mark.browser
def test_a_chosen_example_is_translated(page, loaded):
    example = picture(page, "attention")
    page.get_by_role("button", name=app.SENTENCES[1]).click()
    picture(page, "attention", other_than=example)
    best, *_ = find_hypotheses(*loaded, app.SENTENCES[1], 4, 0.6)
    assert shown_hypotheses(page)[0][0] == best.text


@pytest.mark.browser
def test_too_many_words_for_a_picture_are_said_in_place_of_the_picture(page, monkeypatch):
    monkeypatch.setattr(app, "MAX_WORDS", 2)
    picture(page, "attention")
    ask(page, SENTENCE)
    page.get_by_text("attention is drawn for at most 2 words, got").wait_for()
    assert page.locator("#attention img").count() == 0
    assert page.get_by_text("Error", exact=True).count() == 0
    assert shown_hypotheses(page)


@pytest.mark.browser
@pytest.mark.parametrize(
    ("text", "sentence"),
    [("   ", "must have words"), (TOO_LONG, "at most 1,000 characters")],
)
def test_bad_input_is_answered_with_a_sentence(page, text, sentence):
    picture(page, "attention")
    ask(page, text)
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
    # the two positions, 5 and 11, are on both sides of a crest; its wavelength is 6.28 positions
    page.get_by_text("like an earlier one: 11, like 5").wait_for()


@pytest.mark.browser
@pytest.mark.parametrize("tab", ["Translate", "Positions", "Learning rate"])
def test_the_page_fits_a_phone(page, tab):
    page.set_viewport_size(PHONE)
    page.get_by_role("tab", name=tab).click()
    if tab == "Translate":
        example = picture(page, "attention")
        ask(page, SENTENCE)
        picture(page, "attention", other_than=example)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
