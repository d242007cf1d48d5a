"""The page of a campaign: its runs in a table that the script renews, each with a link to its page."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from retrain.records.record_names import CAMPAIGN_FILE
from retrain.records.runs.campaign_status import CampaignRun, CampaignStatus, progress_text
from retrain.report.chart_specs import Unit, value_text
from retrain.report.markup import table
from retrain.report.text import text
from retrain.report.watch.page import Page, document
from retrain.text.terminal_text import ABSENT, duration

HEADS = ("run", "state", "step", "correct", "held out", "left")


def render_campaign(folder: Path, campaign: CampaignStatus | None, every_s: float) -> Page:
    """The page about a campaign's folder; `campaign` is None if it cannot be read any more."""
    if campaign is None:
        shown = f'<p class="alert">{CAMPAIGN_FILE} is gone, or cannot be read.</p>'
    else:
        rows = table("Runs", HEADS, map(_row, campaign.runs), num_names=2, is_caption_shown=False)
        shown = f'<p class="lede">{_pill(campaign.state)} {text(progress_text(campaign))}</p>{rows}'
    main = f'<div id="runs">{shown}</div>'
    return document(folder.name or str(folder), "the runs", main, "campaign.js", {"every_ms": 1000 * every_s})


def _row(run: CampaignRun) -> list[str]:
    status = run.status
    if status is None:
        state = "failed" if run.has_failed else "not started" if run.is_needed else "not needed"
        return [text(run.name), _pill(state), *[ABSENT] * 4]
    rates = (value_text(rate, Unit.SHARE) for rate in (status.correct_rate, status.held_out_rate))
    left = duration(status.left_s) if status.is_live else ""
    link = f'<a href="run/{quote(run.name, safe="")}/">{text(run.name)}</a>'
    total = "?" if status.max_steps is None else status.max_steps
    return [link, _pill(status.state), f"{status.step}/{total}", *rates, left]


def _pill(state: str) -> str:
    kinds = {"running": "live", "stale": "live", "done": "ended", "not started": "open", "not needed": "open"}
    return f'<span class="pill {kinds.get(state, "bad")}">{text(state)}</span>'
