"""The handler of the tests' HTTP servers: whole answers over kept connections, and no log; programs that listen."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer
from typing import Any

from tests.kit.server_process import free_port


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the body would wait 40 ms for the acknowledgement of the headers

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        self.send(status, json.dumps(content).encode(), **headers)

    def send(self, status: int, body: bytes, **headers: str) -> None:
        """Send a whole response; `Content_Type` is the header Content-Type."""
        with suppress(OSError):  # the client has hung up
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing: tests keep their output clean."""


@contextmanager
def in_a_thread(server: BaseServer, *, end: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Serve for the duration of the block, `end` before the rest ends; gives the port."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        end()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def on_a_port(program: Path | str, *arguments: str) -> Iterator[str]:
    """The URL of a Python program that listens on the port of its first argument."""
    process, port = _listening(program, arguments)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _listening(program: Path | str, arguments: tuple[str, ...], tries: int = 3) -> tuple[subprocess.Popen[bytes], int]:
    """The program and its port, another one when somebody else has taken the free one first."""
    port = free_port()
    process = subprocess.Popen([sys.executable, str(program), str(port), *arguments], stderr=subprocess.DEVNULL)
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0 and process.poll() is None:
                return process, port
        time.sleep(0.1)  # the test's time limit ends a wait in vain
    assert tries > 1, f"{program} ends with {process.returncode}"
    return _listening(program, arguments, tries - 1)
