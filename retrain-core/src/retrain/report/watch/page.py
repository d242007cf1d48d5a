"""The pages of a run and of a campaign: no data of a run; their scripts ask for it while the run continues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from retrain.records.record_names import CAMPAIGN_FILE
from retrain.records.runs.campaign_status import CampaignRun, CampaignStatus, progress_text
from retrain.report.chart_specs import CHARTS, PASS_PREFIX, Unit, value_text
from retrain.report.parts import Link, Paragraph, Part, Piece, Pill, Table, Words, lede
from retrain.report.shell import CLOSED, Page, inert, page
from retrain.report.watch.watched import AT_A_TIME, SHOWN, chart_data
from retrain.text.amounts import ABSENT, duration

POLICY = f"{CLOSED}; connect-src 'self'"  # its script asks only this server
HEADS = ("run", "state", "step", "correct", "held out", "left")
KINDS = {"running": "live", "stale": "live", "done": "ended", "not started": "open", "not needed": "open"}


def render(run: Path, every_s: float, *, campaign: str = "") -> Page:
    """The page about a run folder, of which it knows only the name; it asks for news every few seconds.

    With the name of a `campaign` it leads back to the list of that campaign's runs.
    """
    charts = [chart_data(spec, group) for group, specs in CHARTS.items() for spec in specs]
    setup = {"charts": charts, "pass_prefix": PASS_PREFIX, "at_a_time": AT_A_TIME, "every_ms": 1000 * every_s}
    scripts = ("theme.js", "watch/watch.js")
    return _page("run.html.jinja", run, scripts, setup, campaign=campaign, shown=SHOWN)


def render_campaign(folder: Path, campaign: CampaignStatus | None, every_s: float) -> Page:
    """The page about a campaign's folder; `campaign` is None if it cannot be read any more.

    Its script renews the table, and each run has a link to its page.
    """
    parts: list[Part] = [Paragraph([f"{CAMPAIGN_FILE} is gone, or cannot be read."], "alert")]
    if campaign is not None:
        rows = [_row(run) for run in campaign.runs]
        state = Words([_pill(campaign.state), progress_text(campaign)])
        parts = [lede(state), Table("Runs", HEADS, rows, num_names=2, is_caption_shown=False)]
    setup = {"every_ms": 1000 * every_s}
    return _page("campaign.html.jinja", folder, ("watch/campaign.js",), setup, parts=parts)


def _page(template: str, folder: Path, scripts: Sequence[str], setup: dict[str, Any], **values: Any) -> Page:
    return page(
        f"report/watch/{template}",
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
