"""HTTP interface of the server: the API of LibreTranslate."""

import asyncio
import hmac
import json
import logging
import traceback
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from itertools import chain, islice
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

# imported at the start, so that its absence is an error now: FastAPI imports it at the first form
import python_multipart  # noqa: F401
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from ..console import shown
from ..pipeline_vanilla_transformer import join_translations
from .bounded_requests import BoundedRequests
from .html_texts import AlignedText, HtmlTexts, aligned_text
from .models import Model, Translation, language_name
from .translation_queue import Job, TranslationQueue

# largest size of a character in JSON, two escapes such as \ud83d\ude00; and of everything in a
# request except its texts
BYTES_PER_CHARACTER, OTHER_BYTES = 12, 1 << 14
AUTO = "auto"
# formats of a text; the translation has the same format
TEXT, HTML = "text", "html"
JSON_TYPE, FORM_TYPE = "application/json", "application/x-www-form-urlencoded"
# header that asks a refused client to try again after this number of seconds
RETRY_HEADERS = {"Retry-After": "1"}

logger = logging.getLogger(__name__)


class Limits(NamedTuple):
    """Limits of the server.

    Attributes:
        max_characters: Maximum number of characters in all texts of a request together.
        max_waiting: Maximum number of requests that wait for their response at the same time.
        timeout: Time in seconds after which a request without a response is refused.
        api_key: Key that every translation request must contain; None if no key is needed.
    """

    max_characters: int
    max_waiting: int
    timeout: float
    api_key: str | None


class TranslationRequest(NamedTuple):
    """Validated request for translations.

    Attributes:
        texts: Texts to translate.
        is_html: Whether the texts are HTML.
        is_list: Whether the client sent a list of texts; the response then has lists.
        model: Model that translates the texts.
        source: Language of the texts.
        target: Language of the translations.
        num_alternatives: Number of further translations of each text.
    """

    texts: list[str]
    is_html: bool
    is_list: bool
    model: Model
    source: str
    target: str
    num_alternatives: int


class Api:
    """Endpoints of the server.

    Args:
        models: Model for each source language and each of its target languages.
        queue: Queue that translates the sentences.
        limits: Limits of the server.
    """

    def __init__(
        self,
        models: Mapping[str, Mapping[str, Model]],
        queue: TranslationQueue,
        limits: Limits,
    ):
        self.models = models
        self.queue = queue
        self.limits = limits
        self.num_waiting = 0
        codes = {*models, *(target for targets in models.values() for target in targets)}
        self.known_languages = [
            {"code": code, "name": language_name(code), "targets": sorted(models.get(code, ()))}
            for code in sorted(codes, key=language_name)
        ]

    async def languages(self) -> JSONResponse:
        """List the languages, with the target languages of each."""
        return JSONResponse(self.known_languages)

    async def health(self) -> JSONResponse:
        """Report that the server is running."""
        return JSONResponse({"status": "ok"})

    async def detect(self) -> None:
        """Refuse to detect a language.

        Raises:
            HTTPException: Always.
        """
        raise HTTPException(400, "This server does not detect languages. Name the source.")

    async def translate(self, request: Request) -> Response:
        """Translate a text or a list of texts.

        Args:
            request: Request with the fields `q`, `source` and `target`.

        Returns:
            `translatedText`, and `alternatives` if the client asked for some.

        Raises:
            HTTPException: If the request is invalid, exceeds a limit, or lacks the key.
        """
        if self.num_waiting >= self.limits.max_waiting:
            raise HTTPException(
                429,
                f"The server already has {self.limits.max_waiting:,} waiting requests. Try again "
                "later.",
                RETRY_HEADERS,
            )
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self.limits.timeout):
                return JSONResponse(await self._answer(request))
        except TimeoutError:
            raise HTTPException(
                503,
                f"The request took longer than {self.limits.timeout:g} seconds. Try again later, "
                "or send less text.",
                RETRY_HEADERS,
            ) from None
        except ClientDisconnect:
            return Response()
        except AnyHTTPException:
            raise
        # answer here, not in an exception handler of Starlette: Starlette re-raises the error after
        # the handler, so that the server would close the connection
        except Exception as error:
            return _answer_failure(error)
        finally:
            self.num_waiting -= 1

    async def _answer(self, request: Request) -> dict[str, Any]:
        fields = await read_fields(request)
        self._check_key(fields.get("api_key"))
        translation_request = self._validate(fields)
        documents, job = await run_in_threadpool(_split_texts, translation_request)
        sentence_translations = await self._run_job(request, job) if job.sentences else []
        remaining_translations = iter(sentence_translations)
        text_translations = [
            document.join(remaining_translations, translation_request.num_alternatives)
            for document in documents
        ]
        best = [translations[0] for translations in text_translations]
        is_list = translation_request.is_list
        answer: dict[str, Any] = {"translatedText": best if is_list else best[0]}
        if translation_request.num_alternatives:
            alternatives = [translations[1:] for translations in text_translations]
            answer["alternatives"] = alternatives if is_list else alternatives[0]
        return answer

    async def _run_job(self, request: Request, job: Job) -> list[list[Translation]]:
        """Put a job into the queue, and wait for it as long as the client is connected."""
        self.queue.put(job)
        translations = asyncio.wrap_future(job.translations)
        disconnection = asyncio.ensure_future(_wait_for_disconnection(request))
        try:
            await asyncio.wait((translations, disconnection), return_when=asyncio.FIRST_COMPLETED)
            if not translations.done():
                raise ClientDisconnect
            return translations.result()
        finally:
            self.queue.drop(job)
            translations.cancel()
            disconnection.cancel()

    def _check_key(self, sent_key: Any) -> None:
        if self.limits.api_key is None:
            return
        if sent_key is None:
            raise HTTPException(403, "api_key must be given to this server.")
        # compare bytes, because `compare_digest` refuses strings with characters beyond ASCII
        sent_bytes, api_key_bytes = (
            str(key).encode("utf-8", "surrogatepass") for key in (sent_key, self.limits.api_key)
        )
        if not hmac.compare_digest(sent_bytes, api_key_bytes):
            raise HTTPException(403, "The api_key is not valid for this server.")

    def _validate(self, fields: Mapping[str, Any]) -> TranslationRequest:
        """Validate the fields of a request; `_split_texts` checks Unicode and number of tokens."""
        for name in ("q", "source", "target"):
            if fields.get(name) is None:
                raise HTTPException(400, f"{name} must be given.")
        q, text_format = fields["q"], fields.get("format") or TEXT
        is_list = isinstance(q, list)
        texts = q if is_list else [q]
        if not all(isinstance(text, str) for text in texts):
            raise HTTPException(400, "q must be a text or a list of texts, got another type.")
        if text_format not in (TEXT, HTML):
            raise HTTPException(400, f"format must be {TEXT} or {HTML}, got {shown(text_format)}.")
        num_characters = sum(map(len, texts))
        if num_characters > self.limits.max_characters:
            raise HTTPException(
                413,
                f"q must have at most {self.limits.max_characters:,} characters, got "
                f"{num_characters:,}.",
            )
        source, target = fields["source"], fields["target"]
        model = self._find_model(source, target)
        max_alternatives = model.max_translations - 1
        alternatives = fields.get("alternatives") or 0
        # the values in a form are strings, which may have more digits than `int` accepts
        if isinstance(alternatives, str) and len(alternatives) <= len(str(max_alternatives)):
            alternatives = int(alternatives) if alternatives.isdecimal() else alternatives
        if type(alternatives) is not int or not 0 <= alternatives <= max_alternatives:
            raise HTTPException(
                400,
                f"alternatives must be an integer from 0 to {max_alternatives}, got "
                f"{shown(alternatives)}.",
            )
        is_html = text_format == HTML
        return TranslationRequest(texts, is_html, is_list, model, source, target, alternatives)

    def _find_model(self, source: Any, target: Any) -> Model:
        sources = ", ".join(sorted(self.models))
        if source == AUTO:
            raise HTTPException(
                400, f"source must be one of {sources}, got {AUTO!r}: languages are not detected."
            )
        if not isinstance(source, str) or source not in self.models:
            raise HTTPException(400, f"source must be one of {sources}, got {shown(source)}.")
        targets = self.models[source]
        if not isinstance(target, str) or target not in targets:
            raise HTTPException(
                400,
                f"target must be one of {', '.join(sorted(targets))} for the source {source!r}, "
                f"got {shown(target)}.",
            )
        return targets[target]


class _Document(NamedTuple):
    """Text of a request, divided into what is translated.

    Attributes:
        parts_of_texts: For each text in the document, its parts: sentences with the white space
            around them, or only white space.
        html_texts: HTML of the texts; None for a document that is one text.
    """

    parts_of_texts: list[list[str]]
    html_texts: HtmlTexts | None

    def join(
        self, sentence_translations: Iterator[list[Translation]], num_alternatives: int
    ) -> list[str]:
        """Replace the sentences of the document by their translations.

        Args:
            sentence_translations: Iterator over the translations of each sentence, best first.
            num_alternatives: Number of translations in addition to the best one.

        Returns:
            Translations of the document, best first, without duplicates.
        """
        ranked_texts = [
            _join_translations(parts, sentence_translations, num_alternatives)
            for parts in self.parts_of_texts
        ]
        documents = []
        for rank in range(1 + num_alternatives):
            texts = [ranked[rank] for ranked in ranked_texts]
            documents.append(self.html_texts.join(texts) if self.html_texts else texts[0].text)
        return list(dict.fromkeys(documents))


def _split_texts(translation_request: TranslationRequest) -> tuple[list[_Document], Job]:
    """Split texts into sentences; return a document for each text, and one job of all sentences."""
    texts, is_html, _, model, source, target, num_alternatives = translation_request
    documents = []
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise HTTPException(
                400, f"q must be valid Unicode, got an unpaired surrogate at index {error.start}."
            ) from None
        html_texts = HtmlTexts(text) if is_html else None
        translated_texts = html_texts.texts if html_texts else [text]
        parts_of_texts = [model.split(each, source) for each in translated_texts]
        documents.append(_Document(parts_of_texts, html_texts))
    parts = [part for document in documents for part in chain(*document.parts_of_texts)]
    sentences = [part.strip() for part in parts if part.strip()]
    is_aligned = any(it.html_texts and it.html_texts.needs_alignment for it in documents)
    try:
        num_tokens = model.count_tokens(sentences, source, target)
    except ValueError as error:
        raise HTTPException(413, str(error)) from None
    job = Job(model, source, target, 1 + num_alternatives, is_aligned, sentences, num_tokens)
    return documents, job


def _join_translations(
    parts: list[str], sentence_translations: Iterator[list[Translation]], num_alternatives: int
) -> list[AlignedText]:
    """Return the translations of a text, best first, from those of its sentences."""
    num_sentences = sum(bool(part.strip()) for part in parts)
    translations = list(islice(sentence_translations, num_sentences))
    texts = []
    for rank in range(1 + num_alternatives):
        sentences = [ranked[rank] for ranked in translations]
        translated_parts = join_translations(parts, [sentence.text for sentence in sentences])
        word_pairs = [sentence.word_pairs for sentence in sentences]
        texts.append(aligned_text(parts, translated_parts, word_pairs))
    return texts


async def _wait_for_disconnection(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_fields(request: Request) -> dict[str, Any]:
    """Read the fields of a request: from JSON, or from a form and the query of the URL.

    Args:
        request: Request of any content type.

    Returns:
        The fields by name. A field in the query replaces the field of this name in a form.

    Raises:
        HTTPException: If the body is compressed, not UTF-8, or not the JSON object or form that its
            content type names, or a field is given twice.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity")
    # some clients name the character set instead, which other servers ignore
    if encoding.lower() not in ("identity", "utf-8"):
        raise HTTPException(400, f"The request must not be compressed, got {shown(encoding)}.")
    body = await request.body()
    try:
        if content_type == JSON_TYPE:
            # RFC 8259 allows a parser to ignore a byte order mark
            fields = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_unrepeated)
            if not isinstance(fields, dict):
                raise HTTPException(400, "The JSON body must be an object.")
            return fields
        text = body.decode("utf-8")
        form_fields = {}
        if content_type == "multipart/form-data":
            try:
                form = await request.form(max_files=0, max_part_size=len(body))
            except AnyHTTPException as error:
                if "files" not in error.detail:
                    raise
                raise HTTPException(
                    400, "The request must not contain a file. Send the text as q."
                ) from None
            items = [item for item in form.multi_items() if isinstance(item[1], str)]
            form_fields = _unrepeated(items)
        # curl sends any body as a form
        elif content_type == FORM_TYPE and not text.lstrip().startswith("{"):
            form_fields = _parse_url_encoded(text)
        elif body:
            raise HTTPException(
                400,
                f"Content-Type must be {JSON_TYPE} for a JSON object, or that of a form, got "
                f"{shown(content_type)}.",
            )
        query = request.scope["query_string"].decode("utf-8")
        return {**form_fields, **_parse_url_encoded(query)}
    except UnicodeDecodeError:
        raise HTTPException(400, "The request is not valid UTF-8.") from None
    # Python's parser raises RecursionError for deep nesting, and ValueError for a number that is
    # too long
    except (ValueError, RecursionError):
        raise HTTPException(400, "The body is not valid JSON.") from None


def _parse_url_encoded(text: str) -> dict[str, Any]:
    return _unrepeated(parse_qsl(text, keep_blank_values=True, errors="strict"))


def _unrepeated(items: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(items)
    if len(fields) < len(items):
        names = [name for name, _ in items]
        repeated = next(name for name in names if names.count(name) > 1)
        raise HTTPException(
            400, f"{shown(repeated)[1:-1]} must be given once. JSON takes a list of texts as q."
        )
    return fields


async def _answer_refusal(request: Request, error: Any) -> JSONResponse:
    """Respond to a refused request with one sentence."""
    sentence = error.detail
    # for an unknown path or method, Starlette gives only the phrase of the status
    if sentence == HTTPStatus(error.status_code).phrase:
        path = shown(request.scope["path"])
        sentence = f"path must be /translate, /languages or /health, got {path}."
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            sentence = f"method of {path} must be {error.headers['Allow']}, got {request.method}."
    return JSONResponse({"error": sentence}, error.status_code, error.headers)


def _answer_failure(error: Exception) -> JSONResponse:
    """Respond after an unexpected error; log its type and traceback, but not its message."""
    # the message may quote the text of a client
    trace = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a request failed with %s:\n%s", type(error).__name__, trace.rstrip())
    return JSONResponse({"error": "The server failed. Its log has the reason."}, 500)


def build_app(
    models: Mapping[str, Mapping[str, Model]], queue: TranslationQueue, limits: Limits
) -> FastAPI:
    """Build the application.

    Args:
        models: Model for each source language and each of its target languages.
        queue: Queue that translates the sentences.
        limits: Limits of the server.

    Returns:
        ASGI application.
    """
    api = Api(models, queue, limits)
    max_bytes = BYTES_PER_CHARACTER * limits.max_characters + OTHER_BYTES
    # pages of every origin may read the responses, because a response depends only on its request
    middleware = [
        Middleware(
            CORSMiddleware,
            allow_origins=["*"],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        ),
        Middleware(BoundedRequests, max_bytes=max_bytes),
    ]
    # openapi_url=None removes the documentation pages, which load scripts from other servers.
    # redirect_slashes=False, because a redirect of /translate/ would name http, and not the https
    # of a proxy in front of the server
    app = FastAPI(openapi_url=None, middleware=middleware, redirect_slashes=False)
    app.add_exception_handler(AnyHTTPException, _answer_refusal)
    for path, endpoint, methods in (
        ("/translate", api.translate, ["POST"]),
        ("/detect", api.detect, ["POST"]),
        ("/languages", api.languages, ["GET", "HEAD"]),
        ("/health", api.health, ["GET", "HEAD"]),
    ):
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    return app
