"""The HTTP side: who may ask, how much, and what happens to clients that send nonsense or go away."""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from retrain.text.terminal_text import printable
from retrain.use.serving.objects import Writer, error_object, model_object
from retrain.use.serving.parse import RequestError, parse
from retrain.use.serving.responses import ResponseWriter, parse_response
from retrain.use.serving.service import Answer, Answers, Choice, DisconnectedError

LOG = logging.getLogger("retrain")
IDLE_S = 60.0  # without a byte, in either direction
MOST_BODY, MOST_OF_STRANGERS = 32 * 2**20, 2**20
MOST_CONNECTIONS = 256
COMPLETIONS, CHATS, RESPONSES = ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
MODELS = "/v1/models"
Pieces = Iterator[tuple[Choice, str, slice]]
RETRIES = "x-stainless-retry-count"  # how OpenAI's own clients number the tries of a request


class HttpServer(ThreadingHTTPServer):
    """A thread per connection; each waits for the one thread that samples. `service_of` says who may ask what.

    Requests are logged at `log_level`, and `refusal` is what clients without a right token are told.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_address = True

    log_level = logging.INFO
    refusal = "a token is needed: Authorization: Bearer TOKEN, as printed when the server started"

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.created = int(time.time())
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, Handler)

    def service_of(self, token: str) -> Answers | None:
        """Who answers a client with this token; None refuses it."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Where clients find it."""
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes) else str(host)
        return f"http://[{name}]:{port}/v1" if ":" in name else f"http://{name}:{port}/v1"

    def server_bind(self) -> None:
        """Bind without asking a name server who we are, which can take seconds."""
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for a connection, or none where there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See `ThreadingMixIn`."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are none of our errors."""
        LOG.debug("a connection ended", exc_info=True)


class ApiServer(HttpServer):
    """One service for all who have the `token`; an empty one lets everybody in."""

    def __init__(self, address: tuple[str, int], service: Answers, token: str) -> None:
        self.service, self.token = service, token
        super().__init__(address)

    def service_of(self, token: str) -> Answers | None:
        """The service."""
        is_known = not self.token or hmac.compare_digest(token.encode(), self.token.encode())
        return self.service if is_known else None


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: HttpServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # so that nonsense gets an answer with a status line
    server_version, sys_version = "retrain", ""
    timeout = IDLE_S
    disable_nagle_algorithm = True
    _is_answered = False

    def do_GET(self) -> None:
        """The models, or a sign of life."""
        self._guarded(self._get)

    def do_POST(self) -> None:
        """A completion, a chat or a response."""
        self._guarded(self._post)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself, as JSON too; the connection ends, since its state is unknown."""
        self.close_connection = True
        self._refuse(RequestError(message or "the request cannot be read", status=int(code)))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: `_guarded` says it once a request is over."""

    def _guarded(self, work: Any) -> None:
        started, self._is_answered, status = time.monotonic(), False, 200
        try:
            work()
        except RequestError as error:
            status = error.status
            self._refuse(error)
        except (DisconnectedError, OSError):
            status, self.close_connection = 499, True
        if status != 200 or self.command == "POST":
            taken_s = time.monotonic() - started
            line = (self.command, printable(self.path)[:80], status, taken_s)
            LOG.log(self.server.log_level, "%s %s %d %.2f s", *line)

    def _get(self) -> None:
        path = self.path.partition("?")[0]
        if self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding"):
            self.close_connection = True  # a body that nobody reads would be taken for the next request
        if path in ("/health", "/v1/health"):
            self._send({"status": "ok"})
            return
        service = self._authorised()
        entries = {name: model_object(name, self.server.created, service.limit) for name in service.models}
        if path == MODELS:
            self._send({"object": "list", "data": list(entries.values())})
        elif path.removeprefix(f"{MODELS}/") in entries:
            self._send(entries[path.removeprefix(f"{MODELS}/")])
        else:
            raise RequestError(f"there is nothing at {path[:80]}", status=404)

    def _post(self) -> None:
        is_known = self.server.service_of(self._token()) is not None
        path, body = self.path.partition("?")[0], self._read(MOST_BODY if is_known else MOST_OF_STRANGERS)
        service = self._authorised()
        if path not in ROUTES:
            raise RequestError(f"there is nothing at {path[:80]}; there are {', '.join(ROUTES)}", status=404)
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # so that no page in a browser can ask without being allowed to
            raise RequestError("Content-Type must be application/json", status=415)
        try:
            content = json.loads(body, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {str(error)[:200]}") from None
        is_chat, is_retry = path != COMPLETIONS, self.headers.get(RETRIES, "0") != "0"
        asked = parse_response(content) if path == RESPONSES else parse(content, is_chat=is_chat)
        answer = service.start(asked, is_chat=is_chat, is_retry=is_retry)
        try:
            is_response = path == RESPONSES
            self._answer(service, answer, ResponseWriter(content, answer) if is_response else Writer(service, answer))
            service.delivered(answer)
        finally:
            service.cancel(answer)

    def _answer(self, service: Answers, answer: Answer, writer: Writer | ResponseWriter) -> None:
        pieces = service.follow(answer, self._is_alive)
        if not answer.asked.stream:
            for _ in pieces:
                pass
            service.finish(answer)
            self._send(writer.whole())
            return
        self._start_stream()
        if isinstance(writer, ResponseWriter):
            self._stream_response(service, answer, writer, pieces)
        else:
            self._stream(service, answer, writer, pieces)
        self._write_chunk(b"")

    def _stream(self, service: Answers, answer: Answer, writer: Writer, pieces: Pieces) -> None:
        # what comes first is known last
        waits = bool(answer.asked.top) or answer.asked.echo or bool(answer.asked.tools)
        try:
            for chunk in () if waits else writer.first_chunks():
                self._event(chunk)
            for choice, text, part in pieces:
                if not waits and (text or answer.asked.top is not None):
                    self._event(writer.chunk(choice, text, part))
            service.finish(answer)
            for chunk in [*(writer.first_chunks() if waits else ()), *writer.last_chunks(with_choices=waits)]:
                self._event(chunk)
        except RequestError as error:  # too late for another status
            self._event(error_object(error))
        self._write_chunk(b"data: [DONE]\n\n")

    def _stream_response(self, service: Answers, answer: Answer, writer: ResponseWriter, pieces: Pieces) -> None:
        waits = bool(answer.asked.tools)  # what of it is text is known last
        try:
            for event in [*writer.first_events(), *(() if waits else writer.message_events())]:
                self._named_event(event)
            for _, text, _ in pieces:
                if text and not waits:
                    self._named_event(writer.delta(text))
            service.finish(answer)
            for event in writer.last_events(with_text=waits):
                self._named_event(event)
        except RequestError as error:  # too late for another status
            self._named_event(writer.failure(error))

    def _named_event(self, content: Any) -> None:
        self._write_chunk(f"event: {content['type']}\ndata: {json.dumps(content, allow_nan=False)}\n\n".encode())

    def _authorised(self) -> Answers:
        service = self.server.service_of(self._token())
        if service is None:
            raise RequestError(self.server.refusal, status=401, code="invalid_api_key")
        return service

    def _token(self) -> str:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if kind == "Bearer" else ""

    def _read(self, most: int) -> bytes:
        """The body. A connection with one that cannot be read ends, since what follows is unknown."""
        try:
            length = int(self.headers.get("Content-Length", ""))
            if self.headers.get("Transfer-Encoding") or length < 0:
                raise ValueError
        except ValueError:
            self.close_connection = True
            raise RequestError("a body with Content-Length is needed", status=411) from None
        if length > most:
            self.close_connection = True
            self._authorised()
            raise RequestError(f"the body has more than {most >> 20} MiB", status=413)
        body = self.rfile.read(length)
        if len(body) < length:
            raise DisconnectedError
        return body

    def _is_alive(self) -> bool:
        """Whether the client is still there: one that has gone reads as an end of its side."""
        with suppress(OSError, ValueError):
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not readable or bool(self.connection.recv(1, socket.MSG_PEEK))
        return False

    def _refuse(self, error: RequestError) -> None:
        if self._is_answered:
            self.close_connection = True
            return
        try:
            self._send(error_object(error), error.status)
        except OSError:
            self.close_connection = True

    def _send(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content, allow_nan=False).encode()
        self._is_answered = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _start_stream(self) -> None:
        self._is_answered = True
        self._is_chunked = self.request_version != "HTTP/1.0"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        if self._is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self.end_headers()

    def _event(self, content: Any) -> None:
        self._write_chunk(f"data: {json.dumps(content, allow_nan=False)}\n\n".encode())

    def _write_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if self._is_chunked else data)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
