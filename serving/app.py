"""HTTP interface of the server: the API of LibreTranslate."""

import asyncio
import hmac
import json
import logging
import traceback
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

# FastAPI imports this package at the first form
import python_multipart  # noqa: F401
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from ..console import shown
from .bounded_requests import BoundedRequests
from .models import Model, language_name
from .translation_queue import Job, TranslationQueue

# bytes of a character in JSON that is escaped, and of all that is no text
BYTES_PER_CHARACTER, OTHER_BYTES = 12, 1 << 14
AUTO = "auto"
# seconds until a client that was refused may ask again
RETRY = {"Retry-After": "1"}

logger = logging.getLogger(__name__)


class Limits(NamedTuple):
    """Limits of the server.

    Attributes:
        max_characters: Most characters of the texts of a request.
        max_waiting: Most requests that wait for their answer at a time.
        timeout: Seconds after which a request is refused.
        api_key: Key that every translation needs; None for none.
    """

    max_characters: int
    max_waiting: int
    timeout: float
    api_key: str | None


class Order(NamedTuple):
    """Request for translations, checked.

    Attributes:
        texts: Texts to translate.
        is_list: Whether the client sent a list.
        model: Model that translates them.
        source: Language of the texts.
        target: Language of the translations.
        num_alternatives: Number of further translations of each text.
    """

    texts: list[str]
    is_list: bool
    model: Model
    source: str
    target: str
    num_alternatives: int


class Api:
    """Endpoints of the server.

    Args:
        models: Model for each source language and each of its target languages.
        queue: Queue that translates.
        limits: What the server accepts.
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
        """Say that the server runs."""
        return JSONResponse({"status": "ok"})

    async def detect(self) -> None:
        """Refuse to detect a language.

        Raises:
            HTTPException: Always.
        """
        raise HTTPException(400, "languages are not detected by this server: name the source.")

    async def translate(self, request: Request) -> Response:
        """Translate a text or a list of texts.

        Args:
            request: Request with the fields `q`, `source` and `target`.

        Returns:
            `translatedText`, and `alternatives` if the client asked for some.

        Raises:
            HTTPException: If the request is refused.
        """
        if self.num_waiting >= self.limits.max_waiting:
            raise HTTPException(
                429,
                f"requests that wait must be at most {self.limits.max_waiting:,}: try again later.",
                RETRY,
            )
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self.limits.timeout):
                return JSONResponse(await self._answer(request))
        except TimeoutError:
            raise HTTPException(
                503,
                f"a request must end within {self.limits.timeout:g} seconds, and this one did not: "
                "try again later, or send less text.",
                RETRY,
            ) from None
        except ClientDisconnect:
            return Response()
        except AnyHTTPException:
            raise
        # here and not in a handler of Starlette, which raises the error again, so that the server
        # would close the connection
        except Exception as error:
            return _failed(error)
        finally:
            self.num_waiting -= 1

    async def _answer(self, request: Request) -> dict[str, Any]:
        fields = await read_fields(request)
        self._check_key(fields.get("api_key"))
        order = self._order(fields)
        parts, job = await run_in_threadpool(_prepared, order)
        found = await self._translations(request, job) if job.sentences else []
        sentences = iter(found)
        texts = [_joined(split, sentences, order.num_alternatives) for split in parts]
        best = [translations[0] for translations in texts]
        answer: dict[str, Any] = {"translatedText": best if order.is_list else best[0]}
        if order.num_alternatives:
            others = [translations[1:] for translations in texts]
            answer["alternatives"] = others if order.is_list else others[0]
        return answer

    async def _translations(self, request: Request, job: Job) -> list[list[str]]:
        """Wait for translations as long as the client does."""
        self.queue.put(job)
        found = asyncio.wrap_future(job.found)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((found, gone), return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                raise ClientDisconnect
            return found.result()
        finally:
            self.queue.drop(job)
            found.cancel()
            gone.cancel()

    def _check_key(self, given: Any) -> None:
        if self.limits.api_key is None:
            return
        if given is None:
            raise HTTPException(403, "api_key must be given to this server.")
        # bytes, because texts may have characters beyond ASCII
        keys = [str(key).encode("utf-8", "surrogatepass") for key in (given, self.limits.api_key)]
        if not hmac.compare_digest(*keys):
            raise HTTPException(403, "api_key must be a key of this server, got another one.")

    def _order(self, fields: Mapping[str, Any]) -> Order:
        """Check the fields of a request, without the tokens of its texts."""
        for name in ("q", "source", "target"):
            if fields.get(name) is None:
                raise HTTPException(400, f"{name} must be given.")
        q, kind = fields["q"], fields.get("format") or "text"
        texts = q if isinstance(q, list) else [q]
        if not all(isinstance(text, str) for text in texts):
            raise HTTPException(400, "q must be a text or a list of texts, got another type.")
        if kind != "text":
            raise HTTPException(400, f"format must be text, got {shown(kind)}.")
        num_characters = sum(map(len, texts))
        if num_characters > self.limits.max_characters:
            raise HTTPException(
                413,
                f"q must have at most {self.limits.max_characters:,} characters, got "
                f"{num_characters:,}.",
            )
        model = self._model(fields["source"], fields["target"])
        most = model.max_translations - 1
        alternatives = fields.get("alternatives") or 0
        # a form has texts only
        if isinstance(alternatives, str) and alternatives.isdecimal():
            alternatives = int(alternatives)
        if type(alternatives) is not int or not 0 <= alternatives <= most:
            raise HTTPException(
                400,
                f"alternatives must be a whole number from 0 to {most}, got {shown(alternatives)}.",
            )
        return Order(
            texts, isinstance(q, list), model, fields["source"], fields["target"], alternatives
        )

    def _model(self, source: Any, target: Any) -> Model:
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


def _prepared(order: Order) -> tuple[list[list[str]], Job]:
    """Split texts into sentences; return the parts of each text, and the job of all sentences."""
    for text in order.texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise HTTPException(
                400, f"q must be valid Unicode, got an unpaired surrogate at index {error.start}."
            ) from None
    model, source, target = order.model, order.source, order.target
    parts = [model.split(text, source) for text in order.texts]
    sentences = [part.strip() for split in parts for part in split if part.strip()]
    try:
        num_tokens = model.count_tokens(sentences, source, target)
    except ValueError as error:
        raise HTTPException(413, str(error)) from None
    num_translations = 1 + order.num_alternatives
    return parts, Job(model, source, target, num_translations, sentences, num_tokens)


def _joined(parts: list[str], found: Iterator[list[str]], num_alternatives: int) -> list[str]:
    """Put translations in the place of the sentences of a text.

    Args:
        parts: Sentences with the white space around them, and white space.
        found: Iterator over the translations of the sentences.
        num_alternatives: Number of translations beside the best.

    Returns:
        Translations of the text, best first, without equal ones.
    """
    texts = [""] * (1 + num_alternatives)
    for part in parts:
        sentence = part.strip()
        translations = next(found) if sentence else [sentence] * len(texts)
        start, _, end = part.partition(sentence) if sentence else (part, "", "")
        texts = [
            text + start + translation + end
            for text, translation in zip(texts, translations, strict=True)
        ]
    return list(dict.fromkeys(texts))


async def _disconnected(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_fields(request: Request) -> dict[str, Any]:
    """Read the fields of a request: from JSON, or from a form and the query of the URL.

    Args:
        request: Request.

    Returns:
        The fields by name.

    Raises:
        HTTPException: If the body is no JSON object or no form, or not UTF-8.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    try:
        text = body.decode("utf-8")
        if kind == "application/json":
            fields = json.loads(text)
            if not isinstance(fields, dict):
                raise HTTPException(400, "a request must be a JSON object, got another type.")
            return fields
        form = {}
        if kind == "multipart/form-data":
            sent = await request.form(max_files=0, max_part_size=len(body))
            form = {name: value for name, value in sent.items() if isinstance(value, str)}
        elif kind == "application/x-www-form-urlencoded":
            form = _decoded(text)
        return {**form, **_decoded(request.scope["query_string"].decode("utf-8"))}
    except UnicodeDecodeError:
        raise HTTPException(400, "a request must be UTF-8, got other bytes.") from None
    # arrays and objects may be nested too deeply, and numbers too long
    except (ValueError, RecursionError):
        raise HTTPException(400, "a request must be JSON, got text that is none.") from None


def _decoded(text: str) -> dict[str, Any]:
    return dict(parse_qsl(text, keep_blank_values=True, errors="strict"))


async def _refused(request: Request, error: Any) -> JSONResponse:
    """Answer a refused request with a sentence."""
    sentence = error.detail
    if sentence == HTTPStatus(error.status_code).phrase:
        path = shown(request.scope["path"])
        sentence = f"path must be /translate, /languages or /health, got {path}."
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            sentence = f"method of {path} must be {error.headers['Allow']}, got {request.method}."
    return JSONResponse({"error": sentence}, error.status_code, error.headers)


def _failed(error: Exception) -> JSONResponse:
    """Answer after an error of the program; the log names it without its message."""
    # a message may quote the text of a client
    lines = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a request failed with %s:\n%s", type(error).__name__, lines.rstrip())
    return JSONResponse({"error": "the server could not answer: its log has the reason."}, 500)


def build_app(
    models: Mapping[str, Mapping[str, Model]], queue: TranslationQueue, limits: Limits
) -> FastAPI:
    """Build the application.

    Args:
        models: Model for each source language and each of its target languages.
        queue: Queue that translates.
        limits: What the server accepts.

    Returns:
        ASGI application.
    """
    api = Api(models, queue, limits)
    max_bytes = BYTES_PER_CHARACTER * limits.max_characters + OTHER_BYTES
    # pages of every origin may read answers: an answer depends on its request alone
    middleware = [
        Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["GET", "POST"]),
        Middleware(BoundedRequests, max_bytes=max_bytes),
    ]
    # without the pages of FastAPI, which load scripts from other servers
    app = FastAPI(openapi_url=None, middleware=middleware)
    app.add_exception_handler(AnyHTTPException, _refused)
    for path, endpoint, methods in (
        ("/translate", api.translate, ["POST"]),
        ("/detect", api.detect, ["POST"]),
        ("/languages", api.languages, ["GET", "HEAD"]),
        ("/health", api.health, ["GET", "HEAD"]),
    ):
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    return app
