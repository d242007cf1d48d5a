"""A small Tinker service over real HTTP, around `tests.kit.tinker_toy`: the wire of SkyRL-tx 0.3 and SDK 0.16.1."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer

from tests.kit.http_handler import Handler, in_a_thread
from tests.kit.tinker_toy import Toy


class _Handler(Handler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def do_GET(self) -> None:
        toy, parts = self.server.toy, self.path.split("/")
        toy.calls.append((parts[-1], None))
        if parts[-1] == "healthz":
            self.reply({"status": "ok"})
        elif parts[-1] == "get_server_capabilities":
            self.reply({"supported_models": [{"model_name": name} for name in toy.models]})
        elif parts[-1] == "archive" and (parts[-4], parts[-2]) in toy.exports:
            host = self.headers["Host"]
            self.reply({}, 302, Location=f"http://{host}{self.path.removesuffix('archive')}download")
        elif parts[-1] == "download":
            self.send(200, toy.archive(parts[-4], parts[-2]), Content_Type="application/octet-stream")
        else:
            self.reply({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        toy, path = self.server.toy, self.path.rsplit("/", 1)[-1]
        body = json.loads(self.body())
        if not self.headers.get("X-API-Key", "").startswith("tml-"):
            self.reply({"detail": "Invalid API key"}, 401)
            return
        if toy.faults.statuses[path]:
            self.reply({"detail": "made to fail"}, toy.faults.statuses[path].pop(0))
            return
        if path in toy.faults.hang:
            self.server.stopped.wait(60)
            return
        if path == "retrieve_future":
            time.sleep(toy.faults.latency_s)
            if toy.faults.gate is not None:
                toy.faults.gate.wait()
        try:
            answer = toy.handle(path, body)
        except KeyError as error:
            self.reply({"detail": f"Checkpoint not found: {error}"}, 404)
            return
        failed = path == "retrieve_future" and isinstance(answer, dict) and "error" in answer
        self.reply({"detail": answer["error"]} if failed else answer, 400 if failed else 200)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, toy: Toy, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.toy = toy
        self.stopped = threading.Event()
        self.connections: set[socket.socket] = set()

    def die(self) -> None:
        """Stop listening and cut every connection, as a killed process does."""
        self.stopped.set()
        self.shutdown()
        self.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(toy: Toy, port: int = 0) -> Iterator[str]:
    """Serve a toy on loopback; gives its URL."""
    server = _Server(toy, port)
    with in_a_thread(server, end=server.die) as found:
        yield f"http://127.0.0.1:{found}"
