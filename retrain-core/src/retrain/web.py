"""The web server of every API and page: a Starlette application on uvicorn, in a thread of this process.

It is directly above the kernel, because `use` and `report` both serve pages. Nothing else may import it: a training run
that serves nothing loads neither uvicorn nor Starlette.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
from http import HTTPStatus
from typing import Any, Self

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_S = 60.0  # seconds without a byte, in either direction
MOST_CONNECTIONS = 256  # a flood of connections must not take all file descriptors of the process
GRACE_S = 1.0  # seconds for answers in progress when the server closes
LOG = logging.getLogger("retrain.web")
LOG.setLevel(logging.ERROR)  # uvicorn warns about malformed requests, but the user of a server cannot repair them


class Server:
    """Serves `app` while the block runs. It listens from its construction on, so that no client comes too early."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        is_ipv6 = ":" in host
        self._socket = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
        )
        self.host, self.port = self._socket.getsockname()[:2]
        self.origin = f"http://[{self.host}]:{self.port}" if is_ipv6 else f"http://{self.host}:{self.port}"
        config = uvicorn.Config(
            app,
            http=_Protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            headers=[("server", "retrain")],
            workers=1,  # or WEB_CONCURRENCY would be read
            timeout_keep_alive=int(IDLE_S),
            # A reserve: `_Protocol.shutdown` ends every connection after GRACE_S.
            timeout_graceful_shutdown=int(5 * GRACE_S),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="web", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Protocol(H11Protocol):
    """The protocol of uvicorn with three additions.

    Connections are limited in number; a connection whose client neither sends nor takes the bytes that are due ends
    after `IDLE_S`; and a request that is not HTTP is refused with an error object of the API's form.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger, self.access_log = LOG, False  # an address may hold a token
        self._received = 0
        self._next_look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._end_if_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(GRACE_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        # Half an answer is out: a second status line in its body would be read as part of it.
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        status = HTTPStatus(getattr(sys.exception(), "error_status_hint", 400))
        error = {"message": msg, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error})
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        self.transport.close()

    def _end_if_idle(self, before: object = None) -> None:
        """End the connection if it is the client's turn and no byte has moved since the check `before`."""
        is_answering = self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)
        now = self._received, self.transport.get_write_buffer_size(), is_answering
        if now == before and (self.flow.write_paused or self.transport.is_closing() or not is_answering):
            self.transport.abort()
        else:
            self._next_look = self.loop.call_later(IDLE_S, self._end_if_idle, now)
