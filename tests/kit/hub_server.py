"""A stand-in for the endpoints of the hub that an upload of small files uses; it keeps what it was sent."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from tests.kit.http_handler import Handler, in_a_thread


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

    class HubHandler(Handler):
        def do_GET(self) -> None:
            self.reply({"id": "me/sums", "sha": "0" * 40, "siblings": []})

        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("authorization", ""))
            body = self.body()
            if hub.status != 200:
                self.reply({"error": "You do not have the rights"}, hub.status)
            elif self.path == "/api/repos/create":
                hub.made.append(json.loads(body))
                self.reply({"url": f"{hub.url}/me/sums", "name": "me/sums"})
            elif self.path == "/api/validate-yaml":
                self.reply({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                names = [each["path"] for each in json.loads(body)["files"]]
                files = [{"path": n, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for n in names]
                self.reply({"files": files})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.reply({"commitUrl": f"{hub.url}/me/sums/commit/1", "commitOid": "1" * 40, "success": True})
            else:
                self.reply({"error": self.path}, 404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    with in_a_thread(server) as port:
        hub.url = f"http://127.0.0.1:{port}"
        yield hub
