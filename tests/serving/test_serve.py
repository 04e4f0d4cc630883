"""The server, as a process of its own, and a real client of LibreTranslate."""

import contextlib
import gzip
import html
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import train_toys
from document_blocks import ROOT, blocks, commands
from library_models import make_fsmt, make_marian, make_nllb, make_pieces, make_t5
from translation_toys import TEXTS, make_model, make_tokenizer

from vanilla_transformer import load
from vanilla_transformer.cli import main
from vanilla_transformer.serving import command as serving_command

for package in ("fastapi", "uvicorn", "babel", "sentencex", "libretranslatepy"):
    pytest.importorskip(package)

import httpx  # noqa: E402
from libretranslatepy import LibreTranslateAPI  # noqa: E402
from transformers import StoppingCriteriaList  # noqa: E402

from vanilla_transformer.serving.app import _join_translations  # noqa: E402
from vanilla_transformer.serving.models import (  # noqa: E402
    MAX_SENTENCE_TOKENS,
    Translation,
    api_code,
    language_name,
    load_models,
)
from vanilla_transformer.serving.translation_queue import (  # noqa: E402
    Job,
    StopIfCancelled,
    TranslationQueue,
)

PROGRAM = Path(__file__).parent.parent / "observed_server.py"
# other tests may take the cores meanwhile
SECONDS = 180
KEY = "the key of ä test"
FR_EN = {"source": "fr", "target": "en"}
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
# words of the errors of text that must not be in the log
SECRET = "my-secret-text"


class Server:
    """Process of the command, with its events and its log.

    Args:
        begin: Function that starts a process.
        folder: New folder.
        arguments: Arguments of the command.
        variables: Variables of the environment.
    """

    def __init__(self, begin, folder, *arguments, **variables):
        self.folder = folder
        self.log = folder / "log"
        words = [sys.executable, str(PROGRAM), str(folder), *map(str, arguments), "--port", "0"]
        environment = {**train_toys.environment(), **variables}
        with self.log.open("w", encoding="utf-8") as log:
            self.process = begin(words, env=environment, stderr=log, stdout=subprocess.DEVNULL)
        self.wait(lambda: "serving at" in self.said())
        self.url = re.search(r"serving at (http://\S+)", self.said())[1]
        self.client = httpx.Client(base_url=self.url, timeout=SECONDS)
        (folder / "events").unlink(missing_ok=True)

    def said(self):
        return self.log.read_text(encoding="utf-8")

    def wait(self, condition):
        end = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end
            time.sleep(0.02)

    def events(self):
        path = self.folder / "events"
        return path.read_text(encoding="utf-8").split() if path.exists() else []

    def calls(self):
        """Return the number of sentences of each call of the pipeline."""
        return [int(event) for event in self.events() if event.isdecimal()]

    @contextlib.contextmanager
    def holding(self):
        """Hold the next call of the pipeline, and forget the earlier events."""
        (self.folder / "events").unlink(missing_ok=True)
        hold = self.folder / "hold"
        hold.touch()
        try:
            yield hold
        finally:
            hold.unlink(missing_ok=True)

    def wait_for(self, event, count):
        self.wait(lambda: self.events().count(event) >= count)

    def post(self, fields, path="/translate", **more):
        # ASCII, which can hold a lone surrogate too
        headers = {"Content-Type": JSON, **more}
        return self.client.post(path, content=json.dumps(fields), headers=headers)

    def translate(self, q, **fields):
        answer = self.post({"q": q, **FR_EN, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()


def starter():
    """Return a function that starts processes, and one that ends them."""
    processes = []

    def begin(words, **settings):
        processes.append(subprocess.Popen(words, **settings))
        return processes[-1]

    def end():
        for process in processes:
            process.kill()
            process.wait()

    return begin, end


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Untrained model of this package, with the languages of its recipe."""
    folder = tmp_path_factory.mktemp("runs") / "toy"
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text("source_lang: fr\ntarget_lang: en\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def library_folders(tmp_path_factory):
    """Untrained models of the library; the tokenizers of Marian and FSMT name their languages."""
    pieces, folders = make_pieces(tmp_path_factory.mktemp("pieces")), {}
    kinds = {"marian": make_marian, "nllb": make_nllb, "fsmt": make_fsmt, "t5": make_t5}
    for name, make in kinds.items():
        folders[name] = tmp_path_factory.mktemp(name)
        for part in make(pieces, tmp_path_factory.mktemp("vocabulary")):
            part.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def pipeline(run_folder):
    return load(run_folder, "cpu")


@pytest.fixture(scope="module")
def server(run_folder, library_folders, tmp_path_factory):
    begin, end = starter()
    yield Server(begin, tmp_path_factory.mktemp("server"), run_folder, library_folders["marian"])
    end()


@pytest.fixture(scope="module")
def small_server(run_folder, tmp_path_factory):
    """Server with a key and small limits."""
    begin, end = starter()
    flags = ["--max_characters", "40", "--max_waiting", "3", "--timeout", "8"]
    folder = tmp_path_factory.mktemp("small")
    yield Server(begin, folder, run_folder, *flags, VANILLA_TRANSFORMER_API_KEY=KEY)
    end()


def best(pipeline, text, **settings):
    return pipeline(text, **settings)[0]["translation_text"]


def test_a_real_client_gets_the_translations_of_the_pipeline(server, pipeline):
    client = LibreTranslateAPI(server.url)
    found = [client.translate(text, "fr", "en") for text in TEXTS]
    assert found == [best(pipeline, text) for text in TEXTS]
    assert len(set(found)) > 1
    assert client.languages() == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "fr", "name": "French", "targets": ["en"]},
        {"code": "de", "name": "German", "targets": []},
    ]
    with pytest.raises(urllib.error.HTTPError) as refused:
        client.detect(TEXTS[0])
    assert refused.value.code == 400
    assert "does not detect languages" in json.loads(refused.value.read())["error"]


def test_each_form_of_a_request_gets_the_same_answer(server, pipeline):
    # bytes beyond ASCII, which curl sends as they are
    text = "the größe cat"
    fields = {"q": text, **FR_EN}
    raw = "&".join(f"{name}={value}" for name, value in fields.items()).encode()
    post = server.client.post
    answers = [
        post("/translate", json=fields),
        post("/translate", data=fields),
        post("/translate", files={name: (None, value) for name, value in fields.items()}),
        post("/translate", params=fields),
        post("/translate", params=FR_EN, data={"q": text}),
        post("/translate", content=raw, headers={"Content-Type": FORM}),
    ]
    expected = {"translatedText": best(pipeline, text)}
    assert [answer.json() for answer in answers] == [expected] * len(answers)


def test_a_list_gets_a_list(server, pipeline):
    assert server.translate(TEXTS) == {"translatedText": [best(pipeline, text) for text in TEXTS]}
    assert server.translate([]) == {"translatedText": []}
    assert server.translate(["", " \n", TEXTS[0]])["translatedText"][:2] == ["", " \n"]


def test_alternatives_are_the_next_translations_of_the_search(server, pipeline):
    for text in TEXTS:
        found = pipeline(text, num_return_sequences=3)
        first, *others = dict.fromkeys(one["translation_text"].strip() for one in found)
        answer = server.translate(text, alternatives=2)
        assert answer == {"translatedText": first, "alternatives": others}
        assert server.translate([text], alternatives="2")["alternatives"] == [others]
    assert "alternatives" not in server.translate(text, alternatives=0)


def test_sentences_are_translated_alone_and_white_space_stays(server, pipeline):
    one, two, three = (f"{text}." for text in TEXTS[:3])
    text = f"  {one}  {two}\r\n\n\t{three}\n{TEXTS[3]}\n{TEXTS[4]}"
    a, b, c, d, e = (best(pipeline, it).strip() for it in (one, two, three, *TEXTS[3:]))
    with server.holding() as hold:
        hold.unlink()
        assert server.translate(text)["translatedText"] == f"  {a}  {b}\r\n\n\t{c}\n{d}\n{e}"
        assert server.calls() == [5]


def test_html_keeps_its_tags(server, pipeline):
    one, two, three = (f"{text}." for text in TEXTS[:3])
    a, b, c = (best(pipeline, it) for it in (one, two, three))
    page = f'<p class="x &amp; y">{one} {two}</p>\n<script>a && b</script><ul><li>{three}</ul>'
    expected = page.replace(one, html.escape(a)).replace(two, html.escape(b))
    expected = expected.replace(three, html.escape(c))
    assert server.translate(page, format="html")["translatedText"] == expected
    # a list of texts and an empty key, as some clients send them
    fields = {"q": [page, ""], **FR_EN, "format": "html", "api_key": ""}
    assert server.post(fields).json() == {"translatedText": [expected, ""]}
    linked = f"{TEXTS[0]} <a href='#'>{TEXTS[1]}</a> {TEXTS[2]}"
    answer = server.translate(linked, format="html", alternatives=2)
    plain = server.translate(" ".join(TEXTS[:3]), alternatives=2)
    for found in (answer["translatedText"], *answer["alternatives"]):
        assert re.fullmatch("[^<]*<a href='#'>[^<]*</a>[^<]*", found)
    found, *others = (
        [
            html.unescape(re.sub("<[^>]*>", "", text))
            for text in (it["translatedText"], *it["alternatives"])
        ]
        for it in (answer, plain)
    )
    assert [found] == others


def test_sentences_of_a_script_without_spaces_get_a_space():
    parts, translations = (
        ["你好。", "我来了。", "\n"],
        [
            [Translation("Hello.", [(0, 0)]), Translation("Hi.")],
            [Translation("I came.", [(0, 1)]), Translation("I am here.")],
        ],
    )
    best, other = _join_translations(parts, iter(translations), 1)
    assert (best.text, other.text) == ("Hello. I came.\n", "Hi. I am here.\n")
    assert best.word_pairs == [((0, 3), (0, 6)), ((3, 7), (9, 14))]
    assert not other.word_pairs
    assert _join_translations([" \n"], iter([]), 1) == 2 * [(" \n", [])]


def test_each_model_translates_its_own_languages(server, pipeline, library_folders):
    marian = load(library_folders["marian"], "cpu")
    text = "the small cat"
    answer = server.translate(text, source="en", target="de")
    assert answer["translatedText"] == best(marian, text).strip()
    assert answer["translatedText"] != best(pipeline, text)


def test_requests_that_arrive_together_are_translated_together(server, pipeline):
    texts = TEXTS * 4
    with server.holding() as hold, ThreadPoolExecutor(len(texts) + 2) as pool:
        first = pool.submit(server.translate, TEXTS[0])
        server.wait_for("1", 1)
        found = [pool.submit(server.translate, text) for text in texts]
        # another model cannot join them
        other = pool.submit(server.translate, "cat", source="en", target="de")
        server.wait_for("put", len(texts) + 2)
        hold.unlink()
        answers = [it.result()["translatedText"] for it in (first, *found)]
        other.result()
    assert answers == [best(pipeline, text) for text in (TEXTS[0], *texts)]
    assert sorted(server.calls()) == [1, 1, len(texts)]


def test_a_bad_request_does_not_harm_its_neighbors(server, pipeline):
    bad = [
        (413, {"q": "aé" * MAX_SENTENCE_TOKENS}),
        (400, {"q": json.loads('"\\ud800"')}),
        (400, {"q": [TEXTS[0], 5]}),
        (400, {"q": TEXTS[0], "target": "xx"}),
    ]
    with server.holding() as hold, ThreadPoolExecutor(8) as pool:
        good = [pool.submit(server.translate, text) for text in TEXTS[:3]]
        for status, fields in bad:
            answer = server.post({**FR_EN, **fields})
            assert answer.status_code == status
            assert set(answer.json()) == {"error"}
        server.wait_for("put", 3)
        hold.unlink()
        answers = [it.result()["translatedText"] for it in good]
    assert answers == [best(pipeline, text) for text in TEXTS[:3]]
    assert sum(server.calls()) == 3


def test_a_client_that_leaves_is_not_translated(server):
    body = json.dumps({"q": TEXTS[1], **FR_EN})
    head = f"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    address = httpx.URL(server.url)
    with server.holding() as hold, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.translate, TEXTS[0])
        server.wait_for("1", 1)
        with socket.create_connection((address.host, address.port)) as client:
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            server.wait_for("put", 2)
        server.wait_for("drop", 1)
        hold.unlink()
        first.result()
        server.translate(TEXTS[2])
    assert server.calls() == [1, 1]


def test_an_error_of_one_job_leaves_the_jobs_beside_it_their_translations():
    class FailingModel:
        calls = []
        may_begin = threading.Event()

        def translate(self, sentences, *_):
            self.calls.append(sentences)
            self.may_begin.wait(SECONDS)
            if "bad" in sentences:
                raise RuntimeError("this sentence")
            return [[sentence.upper()] for sentence in sentences]

    model, queue = FailingModel(), TranslationQueue()
    jobs = [
        Job(model, "fr", "en", 1, False, [text], 1) for text in ("first", "good", "bad", "fine")
    ]
    for job in jobs:
        queue.put(job)
        # the first job is alone, because it has begun before the others arrive
        while not model.calls:
            time.sleep(0.01)
    model.may_begin.set()
    queue.close()
    results = [job.translations.exception() or job.translations.result() for job in jobs]
    assert model.calls == [["first"], ["good", "bad", "fine"], ["good"], ["bad"], ["fine"]]
    assert (results[0], results[1], results[3]) == ([["FIRST"]], [["GOOD"]], [["FINE"]])
    assert str(results[2]) == "this sentence"


def test_a_search_ends_if_nobody_waits_for_it(pipeline):
    job = Job(None, "fr", "en", 1, False, TEXTS, 0)
    whole = pipeline(TEXTS)
    for is_cancelled in (False, True):
        job.is_cancelled = is_cancelled
        found = pipeline(TEXTS, stopping_criteria=StoppingCriteriaList([StopIfCancelled([job])]))
        assert (found == whole) != is_cancelled
    # the search continues if one of two jobs is not cancelled
    criteria = StoppingCriteriaList(
        [StopIfCancelled([job, Job(None, "fr", "en", 1, False, TEXTS, 0)])]
    )
    assert pipeline(TEXTS, stopping_criteria=criteria) == whole


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"q": None}, "q must be given."),
        ({"source": None}, "source must be given."),
        ({"target": None}, "target must be given."),
        ({"q": 5}, "q must be a text or a list of texts, got another type."),
        ({"q": {"a": "b"}}, "q must be a text or a list of texts"),
        (
            {"source": "auto"},
            "source must be one of en, fr, got 'auto': languages are not detected",
        ),
        ({"source": "xx"}, "source must be one of en, fr, got 'xx'."),
        ({"source": ["fr"]}, "source must be one of en, fr, got ['fr']."),
        ({"target": "de"}, "target must be one of en for the source 'fr', got 'de'."),
        ({"target": {}}, "target must be one of en for the source 'fr', got {}."),
        ({"format": "xml"}, "format must be text or html, got 'xml'."),
        ({"alternatives": 4}, "alternatives must be an integer from 0 to 3, got 4."),
        ({"alternatives": -1}, "alternatives must be an integer from 0 to 3, got -1."),
        ({"alternatives": True}, "alternatives must be an integer from 0 to 3, got True."),
        ({"alternatives": "x"}, "alternatives must be an integer from 0 to 3, got 'x'."),
        ({"alternatives": "9" * 5000}, "alternatives must be an integer from 0 to 3, got '999"),
    ],
)
def test_a_wrong_field_is_named(fields, sentence, server):
    answer = server.post({"q": TEXTS[0], **FR_EN, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(sentence)


@pytest.mark.parametrize(
    ("kind", "body", "sentence"),
    [
        (JSON, b"{", "The body is not valid JSON."),
        (JSON, b"", "The body is not valid JSON."),
        (JSON, b"[" * 50_000, "The body is not valid JSON."),
        (JSON, b"9" * 50_000, "The body is not valid JSON."),
        (JSON, b'["q"]', "The JSON body must be an object."),
        (JSON, b'{"q": "\xff"}', "The request is not valid UTF-8."),
        (FORM, b"q=\xff", "The request is not valid UTF-8."),
        (FORM, b"q=%FF", "The request is not valid UTF-8."),
        ("multipart/form-data", b"q=a", "Missing boundary"),
        ("text/plain", b"q=a", f"Content-Type must be {JSON} for a JSON object, or that of a form"),
        ("", b"q=a", f"Content-Type must be {JSON} for a JSON object, or that of a form, got ''"),
        (FORM, b' {"q": "a"}', f"Content-Type must be {JSON} for a JSON object"),
        (FORM, b"q=a&q=b", "q must be given once"),
        (JSON, b'{"q": "a", "q": "b"}', "q must be given once"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(kind, body, sentence, server):
    answer = server.client.post("/translate", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(sentence)


def test_compressed_bodies_are_refused_and_utf_8_is_not(server):
    fields = json.dumps({"q": TEXTS[0], **FR_EN}).encode()
    headers = {"Content-Type": JSON, "Content-Encoding": "gzip"}
    answer = server.client.post("/translate", content=gzip.compress(fields), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"] == "The request must not be compressed, got 'gzip'."
    headers = {"Content-Type": JSON, "Content-Encoding": "UTF-8"}
    answer = server.client.post("/translate", content=b"\xef\xbb\xbf" + fields, headers=headers)
    assert answer.json() == server.translate(TEXTS[0])
    parts = [("q", (None, "a")), ("q", (None, "b"))]
    answer = server.client.post("/translate", files=parts)
    assert answer.json()["error"].startswith("q must be given once")


def test_a_file_is_refused(server):
    answer = server.client.post("/translate", files={"q": ("a.txt", b"text")})
    assert answer.status_code == 400
    assert answer.json() == {"error": "The request must not contain a file. Send the text as q."}


def test_other_paths_and_methods_are_refused_in_json(server):
    paths = ("/", "/suggest", "/translate_file", "/docs", "/openapi.json", "/../etc/passwd")
    # a redirect would send text and key to an address without TLS
    for path in (*paths, "/translate/", "/health/"):
        answer = server.client.post(path)
        assert answer.status_code == 404
        assert "path must be /translate, /languages or /health" in answer.json()["error"]
    answer = server.client.get("/translate")
    assert answer.status_code == 405
    assert answer.json() == {"error": "method of '/translate' must be POST, got GET."}
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.head("/health").status_code == 200


def test_pages_of_every_origin_may_read_answers(server):
    origin = {"Origin": "https://example.org"}
    answer = server.post({"q": TEXTS[0], **FR_EN}, **origin)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type, authorization, x-requested-with",
    }
    allowed = server.client.options("/translate", headers={**origin, **asked})
    assert allowed.status_code == 200
    assert "POST" in allowed.headers["access-control-allow-methods"]


def test_the_server_listens_only_on_this_machine_by_default(server):
    listening = [
        it.laddr.ip
        for it in psutil.Process(server.process.pid).net_connections("inet")
        if it.status == psutil.CONN_LISTEN
    ]
    assert listening == [serving_command.HOST] == ["127.0.0.1"]


def test_neither_log_nor_answers_have_texts_or_paths(server, run_folder):
    before = server.said()
    fail = server.folder / "fail"
    fail.touch()
    try:
        answers = [server.post({"q": SECRET, **FR_EN}, Origin="https://example.org")]
        assert answers[0].status_code == 500
        assert answers[0].headers["access-control-allow-origin"] == "*"
    finally:
        fail.unlink()
    assert "RuntimeError" in server.said().removeprefix(before)
    answers.append(server.post({"q": f"{SECRET} {'a' * 5000}", **FR_EN}))
    answers.append(server.post({"q": SECRET + "é" * 2000, **FR_EN}))
    answers.append(server.client.get("/translate", params={"q": SECRET}))
    answers.append(server.client.get("/languages"))
    # the server still translates
    assert server.translate(SECRET)["translatedText"]
    assert SECRET not in server.said()
    for answer in answers:
        assert str(run_folder.parent) not in answer.text
        assert str(server.folder.parent) not in answer.text


def test_a_key_is_needed(small_server, pipeline):
    text = TEXTS[0]
    for fields in ({}, {"api_key": "another"}, {"api_key": ""}, {"api_key": 5}):
        answer = small_server.post({"q": text, **FR_EN, **fields})
        assert answer.status_code == 403
        assert re.search("api_key (must be given|is not valid)", answer.json()["error"])
        assert KEY not in answer.text
    with pytest.raises(urllib.error.HTTPError, match="403"):
        LibreTranslateAPI(small_server.url).translate(text, "fr", "en")
    client = LibreTranslateAPI(small_server.url, KEY)
    assert client.translate(text, "fr", "en") == best(pipeline, text)
    assert small_server.client.get("/languages").status_code == 200


def test_a_text_or_a_body_that_is_too_long_is_refused(small_server):
    for q in ("a" * 41, ["a" * 20, "b" * 21]):
        answer = small_server.post({"q": q, **FR_EN, "api_key": KEY})
        assert answer.status_code == 413
        assert answer.json() == {"error": "q must have at most 40 characters, got 41."}
    assert small_server.translate("😀" * 40, api_key=KEY)
    sent = 0

    def parts():
        nonlocal sent
        yield b'{"q": "'
        for _ in range(1000):
            sent += 1
            yield b"x" * 65536

    # the server may close the connection while the client sends
    answer = small_server.client.post("/translate", content=parts(), headers={"Content-Type": JSON})
    assert answer.status_code == 413
    assert answer.json() == {"error": "a request must have at most 16,864 bytes, got more."}


def test_a_request_to_a_full_queue_is_refused(small_server):
    with small_server.holding() as hold, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(small_server.translate, text, api_key=KEY) for text in "abc"]
        small_server.wait_for("put", 3)
        refused = small_server.post({"q": "d", **FR_EN, "api_key": KEY})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"].startswith("The server already has 3 waiting requests. ")
        # only translations wait
        assert small_server.client.get("/health").status_code == 200
        hold.unlink()
        for one in waiting:
            one.result()
    assert small_server.translate("e", api_key=KEY)


def test_a_request_that_takes_too_long_ends_and_frees_its_place(small_server):
    url = httpx.URL(small_server.url)
    fields = {"q": TEXTS[0], **FR_EN, "api_key": KEY}
    with small_server.holding() as hold, ThreadPoolExecutor(2) as pool:
        found = [pool.submit(small_server.post, fields)]
        small_server.wait_for("1", 1)
        found.append(pool.submit(small_server.post, fields))
        with socket.create_connection((url.host, url.port), timeout=SECONDS) as client:
            # a body that does not arrive
            client.sendall(b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            assert client.recv(100).startswith(b"HTTP/1.1 503")
        for one in found:
            answer = one.result()
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
            assert "took longer than 8 seconds" in answer.json()["error"]
        hold.unlink()
    assert small_server.translate(TEXTS[0], api_key=KEY)
    # the second one was not translated
    assert small_server.calls() == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_after_the_requests_that_wait(
    number, begin, run_folder, pipeline, tmp_path
):
    server = Server(begin, tmp_path, run_folder)
    url = httpx.URL(server.url)

    def is_closed():
        try:
            socket.create_connection((url.host, url.port)).close()
        except ConnectionRefusedError:
            return True
        return False

    assert not is_closed()
    with server.holding() as hold, ThreadPoolExecutor(2) as pool:
        found = [pool.submit(server.translate, text) for text in TEXTS[:2]]
        server.wait_for("put", 2)
        server.process.send_signal(number)
        server.wait(is_closed)
        hold.unlink()
        answers = [it.result()["translatedText"] for it in found]
    assert answers == [best(pipeline, text) for text in TEXTS[:2]]
    assert server.process.wait(SECONDS) == 0
    assert server.said().count("\n") == 1


def test_a_port_in_use_is_refused_in_one_sentence(run_folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(run_folder), "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert said == f"error: Port {port} is already in use. Choose another port with --port.\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port", "65536"], "port must be from 0 to 65535, got 65536."),
        (
            ["--host", "192.0.2.1", "--port", "0"],
            "host and port must be an address of this machine",
        ),
        (["--host", "no such host"], "host and port must be an address of this machine"),
        (["--host", "127..0.1"], "host must be a host name or an IP address, got '127..0.1'."),
        (["--max_characters", "0"], "max_characters must be above 0, got 0."),
        (["--max_waiting", "-1"], "max_waiting must be above 0, got -1."),
        (["--timeout", "nan"], "timeout must be above 0, got nan."),
        (["--api_key", ""], "--api_key must not be empty, got ''."),
    ],
)
def test_a_wrong_flag_is_refused_before_a_model_is_loaded(flags, sentence, capsys):
    assert main(["serve", "./no/such/run", *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {sentence}")
    assert said.count("\n") == 1


def test_an_empty_variable_is_no_key(monkeypatch, capsys):
    # else a server without a key would start where one was wanted
    monkeypatch.setenv(serving_command.KEY_VARIABLE, "")
    assert main(["serve", "./no/such/run"]) == 1
    assert capsys.readouterr().err == "error: api_key must not be empty.\n"


def test_a_model_must_name_its_languages(run_folder, tmp_path, capsys):
    for path in run_folder.iterdir():
        if path.name != "recipe.yaml":
            (tmp_path / path.name).symlink_to(path)
    assert main(["serve", str(tmp_path), "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert f"languages of {tmp_path} must be known" in said
    assert f"as in en-de={tmp_path}." in said
    languages = ["en-zh_Hant", "zh-Hant-pt-BR", "de-zh-Hant-TW"]
    names = [*(f"{pair}={tmp_path}" for pair in languages), str(run_folder)]
    models = load_models(names, False)
    assert {source: list(targets) for source, targets in models.items()} == {
        "en": ["zh-Hant"],
        "zh-Hant": ["pt"],
        "de": ["zh-Hant"],
        "fr": ["en"],
    }
    assert main(["serve", f"en-zh-de={tmp_path}", "--port", "0"]) == 1
    assert "must be written as in en-de=my/model or en-zh-Hant=" in capsys.readouterr().err


def test_a_folder_may_have_the_form_of_a_model_with_its_languages(
    run_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr-sweep=0.1").symlink_to(run_folder)
    assert list(load_models(["lr-sweep=0.1"], False)) == ["fr"]


def test_two_models_between_the_same_languages_are_refused(run_folder, capsys):
    assert main(["serve", str(run_folder), f"fr-en={run_folder}", "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert "models must translate between different languages" in said
    assert "both from fr to en." in said


def test_a_multilingual_model_offers_its_languages_by_their_short_codes(library_folders):
    folder = str(library_folders["nllb"])
    models = load_models([f"en-de={folder}", f"de-en={folder}"], False)
    assert list(models) == ["en", "de"]
    model = models["en"]["de"]
    assert model.tokenizer_codes["en"] == "eng_Latn"
    # each language that the tokenizer has can be asked for, under one code
    assert len(model.tokenizer_codes) == len(set(model.tokenizer_codes.values())) > 200
    assert {"zh", "zh-Hant", "ar", "sr", "pt"} <= set(model.tokenizer_codes)
    pipeline = load(folder, "cpu")
    languages = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
    text = "the small cat"
    expected = Translation(best(pipeline, text, **languages).strip())
    assert model.translate([text], "en", "de") == [[expected]]
    with pytest.raises(ValueError, match="got 'xx'"):
        load_models([f"en-xx={folder}"], False)
    every = load_models([folder], False)
    assert len(every) == len(model.tokenizer_codes)
    assert set(every["en"]) == set(model.tokenizer_codes) - {"en"}


@pytest.mark.parametrize(
    ("code", "short", "name"),
    [
        ("en", "en", "English"),
        ("de_DE", "de", "German"),
        ("en_XX", "en", "English"),
        ("zho_Hans", "zh", "Chinese"),
        ("zho_Hant", "zh-Hant", "Chinese (Traditional)"),
        ("zh-TW", "zh-Hant", "Chinese (Traditional)"),
        ("zh_CN", "zh", "Chinese"),
        ("ROMANCE", "ROMANCE", "ROMANCE"),
    ],
)
def test_a_code_is_that_of_the_standard_and_has_a_name(code, short, name):
    assert api_code(code) == short
    assert language_name(short) == name


def test_fsmt_has_the_languages_of_its_tokenizer_and_t5_those_of_its_task(library_folders):
    assert list(load_models([str(library_folders["fsmt"])], False)["en"]) == ["de"]
    folder = library_folders["t5"]
    with pytest.raises(ValueError, match="must be known"):
        load_models([str(folder)], False)
    (found,) = load_models([f"en-de={folder}"], False)["en"]["de"].translate(["cat"], "en", "de")
    # with the prefix of the task
    assert found[0].text == best(load(folder, "cpu", task="translation_en_to_de"), "cat").strip()
    assert found[0].text != best(load(folder, "cpu"), "cat").strip()


def test_a_marian_of_other_languages_is_refused(library_folders):
    with pytest.raises(ValueError, match="src_lang must be 'en'"):
        load_models([f"fr-de={library_folders['marian']}"], False)


def test_the_blocks_of_the_guide_run(server, capsys):
    page = (ROOT / "docs" / "guides" / "http.md").read_text(encoding="utf-8")
    assert f"http://{serving_command.HOST}:{serving_command.PORT}" in page
    page = page.replace(f"http://{serving_command.HOST}:{serving_command.PORT}", server.url)
    # the languages of the small model, which reads texts of any length
    page = page.replace("source=en -d target=de", "source=fr -d target=en")
    page = page.replace('"en", "de"', '"fr", "en"')
    num_curl = 0
    for language, block in blocks(page, "bash", "python"):
        if language == "python":
            exec(compile(block, "a block", "exec"), {})
            continue
        for command in commands(block):
            *variables, program = re.match(r"((?:[A-Z_]+=\S+ )?)(\S+)", command).groups()
            if program == "vanilla-transformer":
                words = shlex.split(command.removeprefix(variables[0]))[2:]
                flags = serving_command.build_parser("serve").parse_args(words)
                assert flags.models == ["runs/demo"]
                name = variables[0].partition("=")[0]
                assert name in ("", serving_command.KEY_VARIABLE)
                continue
            done = subprocess.run(["bash", "-ec", command], capture_output=True, check=True)
            assert list(json.loads(done.stdout)) == ["translatedText"]
            num_curl += 1
    assert num_curl == 2
    assert "'code': 'en', 'name': 'English'" in capsys.readouterr().out


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "./no/such/run"]) == 1
    assert "pip install 'vanilla_transformer[serve]'" in capsys.readouterr().err
