"""The server of the pages: on this machine alone, read-only, and only for who knows the address with its token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from retrain.records.run import is_run
from retrain.records.runs.campaign_status import CampaignStatus, read_campaign
from retrain.report.shell import Page
from retrain.report.watch.page import render, render_campaign
from retrain.report.watch.watched import WatchedRun
from retrain.web import Server

LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 18
EVERY_S = 2.0  # between two looks of the page at a run that goes on
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class WatchServer(Server):
    """Serves a run's page below `/TOKEN/`; of a campaign the list of its runs, and theirs below `/TOKEN/run/NAME/`.

    Reads files when asked. `looked` is called with the campaign that a list shows.
    """

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
        self._run = WatchedRun(folder) if is_run(folder) else None
        self._runs: dict[str, tuple[Path, WatchedRun]] = {}  # of a campaign, by name: those whose pages were opened
        routes = [Route("/{path:path}", self._respond)]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _refuse})
        super().__init__(app, LOOPBACK, port)
        self.hosts = tuple(f"{name}:{self.port}" for name in (LOOPBACK, "localhost"))
        self.url = f"{self.origin}/{self.token}/"

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
        found = self._run_of(name) if head == "run" and slash else None
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

    def _respond(self, request: Request) -> Response:
        """The page, its data, or nothing at all for anybody else; in a thread, since it reads files."""
        token, _, what = request.path_params["path"].partition("/")
        is_ours = request.headers.get("host") in self.hosts  # another site's name may point here
        found: Page | Mapping[str, Any] | None = None
        if is_ours and secrets.compare_digest(token.encode(), self.token.encode()):
            found = self.answer(what, dict(request.query_params))
        if found is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        if isinstance(found, Page):
            policy = {"Content-Security-Policy": found.policy}
            return _response(HTTPStatus.OK, "text/html", found.html, policy)
        return _response(HTTPStatus.OK, "application/json", json.dumps(found, allow_nan=False, separators=(",", ":")))


async def _refuse(request: Request, error: Exception) -> Response:
    is_method = isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED
    status = HTTPStatus.NOT_IMPLEMENTED if is_method else HTTPStatus.NOT_FOUND
    return _response(status, "text/plain", f"{status.phrase.capitalize()}.\n")


def _response(status: HTTPStatus, kind: str, text: str, more: Mapping[str, str] | None = None) -> Response:
    headers = {"Content-Type": f"{kind}; charset=utf-8", **HEADERS, **(more or {})}
    return Response(text.encode("utf-8", errors="replace"), status, headers)
