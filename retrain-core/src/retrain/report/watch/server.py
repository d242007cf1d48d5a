"""The server of the pages: on this machine alone, read-only, and only for who knows the address with its token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from retrain.records.record_names import RUN_FILE
from retrain.records.runs.campaign_status import CampaignStatus, read_campaign
from retrain.report.shell import Page
from retrain.report.watch.page import render, render_campaign
from retrain.report.watch.watched import WatchedRun

LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 18
EVERY_S = 2.0  # between two looks of the page at a run that goes on
CLIENT_TIMEOUT_S = 30.0
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class WatchServer(ThreadingHTTPServer):
    """Serves a run's page below `/TOKEN/`; of a campaign the list of its runs, and theirs below `/TOKEN/run/NAME/`.

    Reads files when asked, and keeps no thread of its own. `looked` is called with the campaign that a list shows.
    """

    daemon_threads = True

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        every_s: float = EVERY_S,
        looked: Callable[[CampaignStatus], object] = lambda _: None,
    ) -> None:
        self._looked = looked
        self.folder, self.every_s, self.token = folder, every_s, secrets.token_urlsafe(TOKEN_BYTES)
        self._run = WatchedRun(folder) if (folder / RUN_FILE).is_file() else None
        self._runs: dict[str, tuple[Path, WatchedRun]] = {}  # of a campaign, by name: those whose pages were opened
        super().__init__((LOOPBACK, port), _Handler)
        self.hosts = tuple(f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost"))
        self.url = f"http://{self.hosts[0]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is nothing to report."""

    def answer(self, path: str, query: Mapping[str, str]) -> Page | Mapping[str, Any] | None:
        """The page or data at a path below the token; None if there is nothing."""
        if self._run is not None:
            return self._of_run(self.folder, self._run, path, query)
        if not path:
            if campaign := read_campaign(self.folder):
                self._looked(campaign)
            return render_campaign(self.folder, campaign, self.every_s)
        head, _, rest = path.partition("/")
        name, slash, what = rest.partition("/")
        found = self._run_of(unquote(name)) if head == "run" and slash else None
        return self._of_run(*found, what, query) if found else None

    def _of_run(self, folder: Path, run: WatchedRun, what: str, query: Mapping[str, str]) -> Page | Any:
        if what == "":
            return render(folder, self.every_s, campaign="" if run is self._run else self.folder.name)
        return {"data": run.data, "completions": run.completions}.get(what, lambda _: None)(query)

    def _run_of(self, name: str) -> tuple[Path, WatchedRun] | None:
        """A run of the campaign; only names of its manifest are ever looked for."""
        if name not in self._runs and (campaign := read_campaign(self.folder)):
            for run in campaign.runs:
                if run.name == name and run.status:
                    self._runs.setdefault(name, (run.status.path, WatchedRun(run.status.path)))
        return self._runs.get(name)


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
        found: Page | Mapping[str, Any] | None = None
        if is_ours and secrets.compare_digest(token.encode(), self.server.token.encode()):
            query = {name: values[-1] for name, values in parse_qs(address.query, max_num_fields=8).items()}
            found = self.server.answer(what, query)
        if isinstance(found, Page):
            policy = {"Content-Security-Policy": found.policy}
            self._send(HTTPStatus.OK, "text/html", found.html, policy, has_body=has_body)
        elif found is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "Not found.\n", has_body=has_body)
        else:
            written = json.dumps(found, allow_nan=False, separators=(",", ":"))
            self._send(HTTPStatus.OK, "application/json", written, has_body=has_body)

    def _send(
        self, status: HTTPStatus, kind: str, text: str, more: Mapping[str, str] | None = None, *, has_body: bool
    ) -> None:
        content = text.encode("utf-8", errors="replace")
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if has_body:
            self.wfile.write(content)
