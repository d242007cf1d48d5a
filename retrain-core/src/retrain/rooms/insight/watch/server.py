"""The server of the page: on this machine alone, read-only, and only for who knows the address with its token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from retrain.kernel.errors import ConfigError
from retrain.rooms.evidence.runs.run_status import MARK, read_run
from retrain.rooms.insight.report.chart_specs import LEARNING, part_charts, set_charts
from retrain.rooms.insight.report.text import plain
from retrain.rooms.insight.watch.browse import SHOWN, completions, newest_step
from retrain.rooms.insight.watch.page import chart_data, policy, render
from retrain.rooms.insight.watch.tail import Tail
from retrain.rooms.session.records.reading import number, read_object

LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 18
EVERY_S = 2.0  # between two looks of the page at a run that goes on
CLIENT_TIMEOUT_S = 30.0
NOT_SENT = ("path", "pid", "trainer", "accepted")  # of a status: nothing that the page shows
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class WatchServer(ThreadingHTTPServer):
    """Serves one run's page below `/TOKEN/`. Reads files when asked, and keeps no thread of its own."""

    daemon_threads = True

    def __init__(self, run: Path, port: int = 0, *, every_s: float = EVERY_S) -> None:
        self.run, self.every_s, self.token = run, every_s, secrets.token_urlsafe(TOKEN_BYTES)
        self.tail = Tail(run / "metrics.jsonl")
        super().__init__((LOOPBACK, port), _Handler)
        self.hosts = tuple(f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost"))
        self.url = f"http://{self.hosts[0]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is nothing to report."""

    def data(self, query: Mapping[str, str]) -> dict[str, Any]:
        """How the run stands, and the rows that the page has not got yet."""
        generation, first, rows = self.tail.since(_int(query, "generation"), _int(query, "rows"))
        names = self.tail.names
        newest = newest_step(self.run / "emergence" / "generations.jsonl")
        return {
            "status": self._status(),
            "generation": generation,
            "first": first,
            "rows": rows,
            "newest_step": newest,
            "charts": [chart_data(spec, LEARNING) for spec in (*set_charts(names), *part_charts(names))],
        }

    def completions(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A few completions of a step."""
        shown = query.get("shown", "all")
        return completions(
            self.run / "emergence" / "generations.jsonl",
            max(_int(query, "step"), 0),
            first=max(_int(query, "first"), 0),
            shown=shown if shown in SHOWN else "all",
            correct_above=self._number("scoring", "correct_above", 0.0),
        )

    def _status(self) -> dict[str, Any]:
        if not (self.run / MARK).is_file():
            return {"status": "gone"}
        found = read_run(self.run).as_data()
        kept = {name: value for name, value in found.items() if name not in NOT_SENT}
        progress = {
            name: plain(value) if isinstance(value, str) else number(value) for name, value in found["progress"].items()
        }
        shown = {name: plain(value, 2000) if isinstance(value, str) else value for name, value in kept.items()}
        return shown | {"progress": progress, "model": plain(self._manifest("model").get("model", ""))}

    def _number(self, table: str, key: str, default: float) -> float:
        found = number(self._manifest(table).get(key))
        return default if found is None else found

    def _manifest(self, table: str) -> Mapping[str, Any]:
        try:
            found = read_object(self.run / MARK).get("config", {}).get(table)
        except (ConfigError, AttributeError):
            return {}
        return found if isinstance(found, dict) else {}


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = CLIENT_TIMEOUT_S
    server_version, sys_version = "retrain", ""

    def do_GET(self) -> None:
        """The page, its data, or nothing at all for anybody else."""
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        """The same without content."""
        self._answer(has_body=False)

    def log_message(self, *_: Any) -> None:
        """Requests are not logged: the token is part of the address."""

    def _answer(self, *, has_body: bool) -> None:
        address = urlsplit(self.path)
        token, _, what = address.path.removeprefix("/").partition("/")
        is_ours = self.headers.get("Host", "") in self.server.hosts  # a name of somebody's that points here is not
        if not is_ours or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "Not found.\n", has_body=has_body)
            return
        query = {name: values[-1] for name, values in parse_qs(address.query, max_num_fields=8).items()}
        if what == "":
            self._send(HTTPStatus.OK, "text/html", render(self.server.run, self.server.every_s), has_body=has_body)
        elif what in ("data", "completions"):
            content = self.server.data(query) if what == "data" else self.server.completions(query)
            written = json.dumps(content, allow_nan=False, separators=(",", ":"))
            self._send(HTTPStatus.OK, "application/json", written, has_body=has_body)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "Not found.\n", has_body=has_body)

    def _send(self, status: HTTPStatus, kind: str, text: str, *, has_body: bool) -> None:
        content = text.encode("utf-8", errors="replace")
        self.send_response(status)
        admitted = {"Content-Security-Policy": policy()} if kind == "text/html" else {}
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS, **admitted}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if has_body:
            self.wfile.write(content)


def _int(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
