"""The live pages of a run and of a campaign, and their server: local, read-only, for holders of the token.

The pages hold no data of a run; their scripts request it while the run continues.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from retrain.records.record_names import CAMPAIGN_FILE
from retrain.records.run import is_run
from retrain.records.runs.campaign_status import CampaignRun, CampaignStatus, progress_text, read_campaign
from retrain.report.chart_specs import CHARTS, PASS_PREFIX, Unit, value_text
from retrain.report.parts import Link, Paragraph, Part, Piece, Pill, Table, Words, lede
from retrain.report.shell import CLOSED, Page, inert, page
from retrain.report.watched import AT_A_TIME, SHOWN, WatchedRun, chart_data
from retrain.text.amounts import ABSENT, duration
from retrain.web import Server

# The page's script may connect to this server and to nothing else.
POLICY = f"{CLOSED}; connect-src 'self'"
HEADS = ("run", "state", "step", "correct", "held out", "left")
KINDS = {"running": "live", "stale": "live", "done": "ended", "not started": "open", "not needed": "open"}
# Not 0.0.0.0: completions may be confidential, and the network can reach that.
LOOPBACK = "127.0.0.1"
# 144 bits: the address cannot be guessed.
TOKEN_BYTES = 18
# Steps take seconds, so a shorter pause between requests would show nothing new.
EVERY_S = 2.0
# Completions are untrusted text: browsers must not guess types, frame, cache or pass on the address with the token.
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class WatchServer(Server):
    """Serves a run's page at `/TOKEN/`; for a campaign the list of its runs, and each run at `/TOKEN/run/NAME/`.

    Files are read at each request. `on_look` is called with the campaign whose list is shown.
    """

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        every_s: float = EVERY_S,
        on_look: Callable[[CampaignStatus], object] = lambda _: None,
    ) -> None:
        self._on_look = on_look
        self.folder, self.every_s, self.token = folder, every_s, secrets.token_urlsafe(TOKEN_BYTES)
        self._run = WatchedRun(folder) if is_run(folder) else None
        # Kept between requests, because each has read its file up to an offset.
        self._runs: dict[str, tuple[Path, WatchedRun]] = {}
        routes = [Route("/{path:path}", self._respond)]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _refuse})
        super().__init__(app, LOOPBACK, port)
        self.hosts = tuple(f"{name}:{self.port}" for name in (LOOPBACK, "localhost"))
        self.url = f"{self.origin}/{self.token}/"

    def answer(self, path: str, query: Mapping[str, str]) -> Page | Mapping[str, Any] | None:
        """Return the page or data at a path below the token; None if there is nothing."""
        if self._run is not None:
            return self._of_run(self.folder, self._run, path, query)
        if not path:
            if campaign := read_campaign(self.folder):
                self._on_look(campaign)
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
        """Return a run of the campaign; only names in its manifest are ever looked up."""
        if name not in self._runs and (campaign := read_campaign(self.folder)):
            for run in campaign.runs:
                if run.name == name and run.status:
                    self._runs.setdefault(name, (run.status.path, WatchedRun(run.status.path)))
        return self._runs.get(name)

    def _respond(self, request: Request) -> Response:
        """Answer with the page or its data, or 404 without the token; in a thread, since it reads files."""
        token, _, what = request.path_params["path"].partition("/")
        # Another site's name may resolve to this machine.
        is_here = request.headers.get("host") in self.hosts
        found: Page | Mapping[str, Any] | None = None
        # Constant time: how long a refusal takes says nothing about the token.
        if is_here and secrets.compare_digest(token.encode(), self.token.encode()):
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


def render(run: Path, every_s: float, *, campaign: str = "") -> Page:
    """Return the page about a run folder; its script requests the data every few seconds.

    With the name of a `campaign` it links back to the list of that campaign's runs.
    """
    charts = [chart_data(spec, group) for group, specs in CHARTS.items() for spec in specs]
    setup = {"charts": charts, "pass_prefix": PASS_PREFIX, "at_a_time": AT_A_TIME, "every_ms": 1000 * every_s}
    scripts = ("theme.js", "watch_run.js")
    return _page("watch_run.html.jinja", run, scripts, setup, campaign=campaign, shown=SHOWN)


def render_campaign(folder: Path, campaign: CampaignStatus | None, every_s: float) -> Page:
    """Return the page about a campaign's folder; `campaign` is None if it cannot be read any more.

    Its script refreshes the table, and each run has a link to its page.
    """
    parts: list[Part] = [Paragraph([f"{CAMPAIGN_FILE} is gone, or cannot be read."], "alert")]
    if campaign is not None:
        rows = [_row(run) for run in campaign.runs]
        state = Words([_pill(campaign.state), progress_text(campaign)])
        parts = [lede(state), Table("Runs", HEADS, rows, num_names=2, is_caption_shown=False)]
    setup = {"every_ms": 1000 * every_s}
    return _page("watch_campaign.html.jinja", folder, ("watch_campaign.js",), setup, parts=parts)


def _page(template: str, folder: Path, scripts: Sequence[str], setup: dict[str, Any], **values: Any) -> Page:
    return page(
        f"report/{template}",
        scripts=scripts,
        policy=POLICY,
        kicker="retrain watch",
        title=folder.name or str(folder),
        setup=inert(setup),
        **values,
    )


def _row(run: CampaignRun) -> tuple[Piece, ...]:
    status = run.status
    if status is None:
        state = "failed" if run.has_failed else "not started" if run.is_needed else "not needed"
        return (run.name, _pill(state), *[ABSENT] * 4)
    rates = (value_text(rate, Unit.SHARE) for rate in (status.correct_rate, status.held_out_rate))
    left = duration(status.left_s) if status.is_live else ""
    link = Link(run.name, f"run/{quote(run.name, safe='')}/")
    total = "?" if status.max_steps is None else status.max_steps
    return (link, _pill(status.state), f"{status.step}/{total}", *rates, left)


def _pill(state: str) -> Pill:
    return Pill(state, KINDS.get(state, "bad"))
