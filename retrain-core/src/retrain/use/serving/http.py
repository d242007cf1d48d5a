"""OpenAI's API over HTTP: authorisation, limits, and answers that are sent while they are sampled."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from retrain.use.serving.batcher import Inbox
from retrain.use.serving.objects import ResponseWriter, Writer, error_object, parse_response
from retrain.use.serving.parse import RequestError, parse
from retrain.use.serving.service import Answer, Answers
from retrain.web import Server

LINGER_S = 2.0  # seconds in which a client that is refused may continue to send
MOST_BODY, MOST_UNAUTHORISED = 32 * 2**20, 2**20
COMPLETIONS, CHATS, RESPONSES = ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
MODELS = "/v1/models"
# OpenAI's own clients number the tries of a request in this header.
RETRIES = "x-stainless-retry-count"
NO_TOKEN = "a token is needed: Authorization: Bearer TOKEN, as printed when the server started"
JSON_TYPE = "application/json"
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ApiServer(Server):
    """Serves the API to clients with a known token: `service_of(token)` returns their service, None if unknown.

    `refusal` is the message to clients without a known token.
    """

    def __init__(
        self, host: str, port: int, service_of: Callable[[str], Answers | None], *, refusal: str = NO_TOKEN
    ) -> None:
        self._service_of, self._refusal, self._created = service_of, refusal, int(time.time())
        routes = [
            *(Route(path, lambda _: _json_response({"status": "ok"})) for path in ("/health", "/v1/health")),
            *(Route(path, self._models) for path in (MODELS, f"{MODELS}/{{name:path}}")),
            *(Route(path, self._complete, methods=["POST"]) for path in ROUTES),
            Route("/{path:path}", self._nothing, methods=["GET", "POST"]),
        ]
        handlers = dict.fromkeys((RequestError, HTTPException, ClientDisconnect, Exception), _refuse)
        super().__init__(Starlette(routes=routes, exception_handlers=handlers), host, port)
        self.url = f"{self.origin}/v1"

    async def _models(self, request: Request) -> Response:
        service = self._service(request)
        common: dict[str, Any] = {"object": "model", "created": self._created, "owned_by": "retrain"}
        common |= {} if service.limit is None else {"max_model_len": service.limit}
        entries = {name: {"id": name, **common} for name in service.models}
        if "name" not in request.path_params:
            return _json_response({"object": "list", "data": list(entries.values())})
        entry = entries.get(request.path_params["name"])
        return _json_response(entry) if entry else await self._nothing(request)

    async def _complete(self, request: Request) -> _Reply:
        service, body = await self._read(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
            # a page in a browser must not be able to send requests without CORS
            raise RequestError(f"Content-Type must be {JSON_TYPE}", status=415)

        # Python's parser accepts NaN and Infinity, though JSON has neither.
        def no_constant(name: str) -> Any:
            raise ValueError(f"{name} is not JSON")

        try:
            content = json.loads(body, parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {str(error)[:200]}") from None
        path, is_retry = request.scope["path"], request.headers.get(RETRIES, "0") != "0"
        is_chat, is_response = path != COMPLETIONS, path == RESPONSES
        asked = parse_response(content) if is_response else parse(content, is_chat=is_chat)
        inbox = Inbox(asyncio.get_running_loop())
        answer = await run_in_threadpool(service.start, asked, inbox, is_chat=is_chat, is_retry=is_retry)
        return _Reply(service, answer, ResponseWriter(content, answer) if is_response else Writer(service, answer))

    async def _nothing(self, request: Request) -> Response:
        self._service(request)
        path = request.scope["path"][:80]
        raise RequestError(f"there is nothing at {path}; POST goes to {', '.join(ROUTES)}", status=404)

    def _service(self, request: Request) -> Answers:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        service = self._service_of(token if kind == "Bearer" else "")
        if service is None:
            raise RequestError(self._refusal, status=401, code="invalid_api_key")
        return service

    async def _read(self, request: Request) -> tuple[Answers, bytes]:
        length = request.headers.get("content-length")
        if length is None or "transfer-encoding" in request.headers:
            raise RequestError("a body with Content-Length is needed", status=411)
        # before the token is looked at: a client that is still sending would see no refusal, but a broken connection
        request.state.is_read = int(length) <= MOST_UNAUTHORISED
        body = await request.body() if request.state.is_read else b""
        service = self._service(request)
        if int(length) > MOST_BODY:
            raise RequestError(f"the body has more than {MOST_BODY >> 20} MiB", status=413)
        return service, body or await request.body()


def with_token(service: Answers, token: str) -> Callable[[str], Answers | None]:
    """Return the `service_of` of a single service; an empty `token` admits every client."""

    def service_of(given: str) -> Answers | None:
        # Takes the same time for every wrong token, so that none can be guessed piece by piece.
        return service if not token or hmac.compare_digest(given.encode(), token.encode()) else None

    return service_of


class _Reply:
    """An answer while it is sampled, whole or as a stream of events; dropped when its client disconnects."""

    def __init__(self, service: Answers, answer: Answer, writer: Writer | ResponseWriter) -> None:
        self._service, self._answer, self._writer = service, answer, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def disconnection() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        leaving = asyncio.create_task(disconnection())
        sending = asyncio.create_task(self._send(send, leaving))
        try:
            await asyncio.wait((leaving, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            leaving.cancel()
            sending.cancel()
            self._service.cancel(self._answer)

    async def _send(self, send: Send, leaving: asyncio.Task[None]) -> None:
        service, answer, writer = self._service, self._answer, self._writer

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def write_events(contents: Iterable[dict[str, Any]]) -> None:
            for content in contents:
                name = f"event: {content['type']}\n" if "type" in content else ""
                await write(f"{name}data: {json.dumps(content, allow_nan=False)}\n\n".encode())

        if answer.asked.stream:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            try:
                await write_events(writer.begin())
                async for choice, text, part in service.follow(answer):
                    await write_events(writer.grow(choice, text, part))
                service.finish(answer)
                await write_events(writer.end())
            except RequestError as error:
                # The status has been sent already, so the error becomes an event.
                await write_events([writer.failure(error)])
            await write(writer.done)
        else:
            async for _ in service.follow(answer):
                pass
            service.finish(answer)
            whole = _json_response(writer.whole())
            await send({"type": "http.response.start", "status": 200, "headers": whole.raw_headers})
            await write(bytes(whole.body))
        # Returns only once the client has taken the rest.
        await write(b"")
        if not leaving.done():
            # Before the last send, and with nothing to wait for: a quick client closes at once.
            service.delivered(answer)
            await send({"type": "http.response.body", "more_body": False})


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = RequestError(f"unsupported method {request.method[:80]!r}", status=501)
    # Also after a disconnection, when no client reads it.
    elif not isinstance(error, RequestError):
        error = RequestError(f"internal error: {type(error).__name__}", status=500)
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status not in (401, 404, 411, 413) or getattr(request.state, "is_read", False):
        return _json_response(error_object(error), error.status, headers)
    return _Refusal(json.dumps(error_object(error)), error.status, headers | {"Connection": "close"}, JSON_TYPE)


class _Refusal(Response):
    """A refusal of a request whose body is unread. The rest of the request is discarded for `LINGER_S` seconds.

    A connection that closes with unread bytes is reset, and the reset would take the answer from a client that is
    still sending.
    """

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "more_body": False})


def _json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content, allow_nan=False), status, headers, JSON_TYPE)
