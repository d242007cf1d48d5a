"""The live pages of a run and of a campaign: their data, and their server: local, read-only, for holders of the token.

The pages hold no data of a run; their scripts request it while the run continues.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from retrain.kernel.config.toml_file import open_regular
from retrain.records.reading import number, parse_record
from retrain.records.record_names import CAMPAIGN_FILE, GENERATIONS, METRICS
from retrain.records.run import Run, is_run
from retrain.records.runs.campaign_status import CampaignRun, CampaignStatus, progress_text, read_campaign
from retrain.records.runs.run_status import status_of_run
from retrain.report import chart_specs
from retrain.report.completions import STEP_BYTES, Card, card_of, last_step, lines_of, record_of
from retrain.report.parts import Excerpt, Link, Paragraph, Part, Piece, Pill, Table, Words, lede, plain
from retrain.report.shell import CLOSED, Page, inert, page
from retrain.text.amounts import ABSENT, duration
from retrain.web import Server

AT_A_TIME = 12  # completions
SHOWN = ("all", "right", "wrong", "not trained")
# Paths and process ids of this machine are of no use on the page, and need not leave the process.
NOT_SENT = ("path", "pid", "trainer", "accepted")


class WatchedRun:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = Tail(folder / METRICS)
        self._generations = folder / GENERATIONS

    def data(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the state of the run, and the rows that the page does not have yet."""
        generation, first, rows = self._tail.since(_int(query, "generation"), _int(query, "rows"))
        names = self._tail.names
        added = (*chart_specs.set_charts(names), *chart_specs.task_charts(names), *chart_specs.part_charts(names))
        return {
            "status": self._status(),
            "generation": generation,
            "first": first,
            "rows": rows,
            "newest_step": last_step(self._generations),
            "charts": [chart_data(spec, chart_specs.LEARNING) for spec in added],
        }

    def completions(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return completions `first` and following of a step, among those `shown`: all, right, wrong or not trained.

        `items` are their texts and numbers, `count` is the number of all; with `is_cut` not all of the step was read.
        """
        step, first, shown = max(_int(query, "step"), 0), max(_int(query, "first"), 0), query.get("shown", "all")
        correct_above = number(Run(self._folder).table("scoring").get("correct_above")) or 0.0
        items: list[dict[str, Any]] = []
        count = size = 0
        # The file may have been removed since the page was opened.
        with suppress(OSError), open_regular(self._generations) as stream:
            for offset, line in lines_of(stream, step, most_bytes=STEP_BYTES):
                size += len(line)
                if (record := record_of(line)) is None:
                    continue
                item = _item(card_of(record, kind="", offset=offset), correct_above)
                right = item["is_right"]
                kinds = {"not trained": not item["trained"], "right": right is True, "wrong": right is False}
                if not kinds.get(shown, True):
                    continue
                if first <= count < first + AT_A_TIME:
                    items.append(item)
                count += 1
        return {"step": step, "first": first, "count": count, "items": items, "is_cut": size > STEP_BYTES}

    def _status(self) -> dict[str, Any]:
        if not is_run(self._folder):
            return {"status": "gone"}
        found = status_of_run(self._folder).as_data()
        progress = {
            name: plain(value) if isinstance(value, str) else number(value) for name, value in found["progress"].items()
        }
        shown = {
            name: plain(value, 2000) if isinstance(value, str) else value
            for name, value in found.items()
            if name not in NOT_SENT
        }
        return shown | {"progress": progress, "model": plain(Run(self._folder).table("model").get("model", ""))}


def _int(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    # isdigit also accepts digits of other scripts, and int() takes quadratic time for long ones.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1


def chart_data(spec: chart_specs.ChartSpec, group: str) -> dict[str, Any]:
    """Return a chart for the script; names of parts and sets come from plugins."""
    texts = {"group": group, "title": plain(spec.title), "note": spec.note, "unit": spec.unit.value}
    return texts | {"fields": spec.fields, "is_graded": spec.is_graded, "is_pooling": spec.is_pooling}


def _item(sample: Card, correct_above: float) -> dict[str, Any]:
    names = {name: plain(getattr(sample, name)) for name in ("group", "index", "example_id", "outcome", "stop_reason")}
    texts = {}
    for name in ("prompt", "completion", "reference", "detail"):
        excerpt: Excerpt = getattr(sample, name)
        head, tail = (plain(part, len(part), kept="\n\t") for part in (excerpt.head, excerpt.tail))
        texts[name] = {"head": head, "tail": tail, "left_out": excerpt.left_out}
    return {
        **texts,
        **names,
        "reward": sample.reward,
        "is_right": None if sample.reward is None else sample.reward > correct_above,
        "num_tokens": sample.num_tokens,
        "trained": sample.trained,
        "parts": {plain(name): value for name, value in sample.rewards.items()},
    }


# The numbers of a run as it writes them: each look reads only the new part of `metrics.jsonl`.

# A long record takes several looks, so that no request blocks for seconds.
LOOK_BYTES = 16 << 20
# A longer record loses every second row, repeatedly: more points than pixels only slow the browser.
MOST_ROWS = 4_000
# Read again before the new part: a resumed run may have rewound the file and extended it since.
SEAM_BYTES = 256
Row = Mapping[str, float]


class Tail:
    """The rows of a run: step, and the numbers that charts show.

    `generation` changes when rows that were given out no longer hold: the file was replaced or rewound, or rows were
    thinned. Safe to use from several threads.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = Lock()
        self._identity: tuple[int, int] | None = None
        self._offset, self._seam = 0, b""
        self._stride, self._since_kept = 1, 0
        self.generation = 0
        self.rows: list[Row] = []

    def since(self, generation: int, count: int) -> tuple[int, int, list[Row]]:
        """Return the current generation, the index of the first returned row, and the rows after `count` known ones."""
        with self._lock:
            self._look()
            first = count if generation == self.generation and 0 <= count <= len(self.rows) else 0
            return self.generation, first, self.rows[first:]

    @property
    def names(self) -> set[str]:
        with self._lock:
            return {name for row in self.rows for name in row}

    def _look(self) -> None:
        """Read the new part of the file, or all of it if it was replaced or rewound."""
        try:
            with open_regular(self._file) as stream:
                info = os.fstat(stream.fileno())
                identity = info.st_dev, info.st_ino
                stream.seek(self._offset - len(self._seam))
                # The size does not show a rewind: the file may have grown past the old end.
                is_continued = info.st_size >= self._offset and stream.read(len(self._seam)) == self._seam
                if identity != self._identity or not is_continued:
                    self._identity = identity
                    self._offset, self._seam, self._stride, self._since_kept = 0, b"", 1, 0
                    self.rows = []
                    self.generation += 1
                stream.seek(self._offset)
                block = stream.read(LOOK_BYTES)
        except OSError:  # the file does not exist yet, or was removed: earlier rows stay
            return
        end = block.rfind(b"\n") + 1
        if not end and len(block) == LOOK_BYTES:
            # A line longer than a look holds no step, and waiting for its end would stop the page for good.
            end = len(block)
        for line in block[:end].splitlines():
            self._take(line)
        self._offset += end
        self._seam = (self._seam + block[:end])[-SEAM_BYTES:]

    def _take(self, line: bytes) -> None:
        try:
            record = parse_record(line, allow_nan=True, allow_overflow=True)
        except (ValueError, RecursionError):  # a damaged line hides no other
            return
        if type(record.get("step")) is not int:
            return
        self._since_kept += 1
        if self._since_kept < self._stride and not _is_evaluated(record):
            return
        self._since_kept = 0
        self.rows.append(_row(record))
        if len(self.rows) > MOST_ROWS:
            self.rows = [row for at, row in enumerate(self.rows) if at % 2 == 0 or _is_evaluated(row)]
            self._stride *= 2
            self.generation += 1


def _is_evaluated(row: Mapping[str, Any]) -> bool:
    return "eval_correct_rate" in row or "eval_time_s" in row


def _row(record: Mapping[str, Any]) -> Row:
    """Return the numbers that charts show, with counts as shares or as a speed."""
    named = (
        (name, number(record.get(name)))
        for name in dict.fromkeys(("step", *chart_specs.FIELDS, *chart_specs.named_fields(record)))
    )
    row = {name: value for name, value in named if value is not None}
    totals = {name: sum(row.get(each, 0.0) for each in fields) for name, fields in chart_specs.RATIOS.items()}
    shown = {name: row[name] / total for name, total in totals.items() if name in row and total > 0}
    return {name: value for name, value in row.items() if name not in chart_specs.RATIOS} | shown


# The pages, and their server.


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
    charts = [chart_data(spec, group) for group, specs in chart_specs.CHARTS.items() for spec in specs]
    setup = {
        "charts": charts,
        "pass_prefix": chart_specs.PASS_PREFIX,
        "at_a_time": AT_A_TIME,
        "every_ms": 1000 * every_s,
    }
    scripts = ("theme.js", "watch_run.js")
    return _page("watch_run.html.jinja", run, scripts, setup, campaign=campaign, shown=SHOWN)


def render_campaign(folder: Path, campaign: CampaignStatus | None, every_s: float) -> Page:
    """Return the page about a campaign's folder; `campaign` is None if it cannot be read any more.

    Its script refreshes the table, and each run has a link to its page.
    """
    parts: list[Part] = [Paragraph([f"{CAMPAIGN_FILE} is gone, or cannot be read."], "alert")]
    if campaign is not None:
        rows = [_run_row(run) for run in campaign.runs]
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


def _run_row(run: CampaignRun) -> tuple[Piece, ...]:
    status = run.status
    if status is None:
        state = "failed" if run.has_failed else "not started" if run.is_needed else "not needed"
        return (run.name, _pill(state), *[ABSENT] * 4)
    rates = (
        chart_specs.value_text(rate, chart_specs.Unit.SHARE) for rate in (status.correct_rate, status.held_out_rate)
    )
    left = duration(status.left_s) if status.is_live else ""
    link = Link(run.name, f"run/{quote(run.name, safe='')}/")
    total = "?" if status.max_steps is None else status.max_steps
    return (link, _pill(status.state), f"{status.step}/{total}", *rates, left)


def _pill(state: str) -> Pill:
    return Pill(state, KINDS.get(state, "bad"))
