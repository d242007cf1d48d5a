"""A stand-in for the endpoints of the hub that an upload of small files uses; it keeps what it was sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """`files` by name, `made` the bodies of create requests, `tokens` the authorisations seen."""

    url: str = ""
    status: int = 200
    files: dict[str, bytes] = field(default_factory=dict)
    made: list[dict[str, Any]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer({"id": "me/sums", "sha": "0" * 40, "siblings": []})

        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("authorization", ""))
            body = self.rfile.read(int(self.headers["content-length"]))
            if hub.status != 200:
                self.answer({"error": "You do not have the rights"}, hub.status)
            elif self.path == "/api/repos/create":
                hub.made.append(json.loads(body))
                self.answer({"url": f"{hub.url}/me/sums", "name": "me/sums"})
            elif self.path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                names = [each["path"] for each in json.loads(body)["files"]]
                files = [{"path": n, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for n in names]
                self.answer({"files": files})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.answer({"commitUrl": f"{hub.url}/me/sums/commit/1", "commitOid": "1" * 40, "success": True})
            else:
                self.answer({"error": self.path}, 404)

        def answer(self, content: Any, status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
