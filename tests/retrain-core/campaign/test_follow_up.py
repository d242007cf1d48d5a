"""What plugins do after a run that is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrain.api import hookimpl
from retrain.campaign.load import Campaign
from retrain.campaign.planned import plan_runs
from retrain.campaign.schedule import FollowUpResult, FollowUps
from retrain.kernel.registry import Owner, Plugins


class Analysis:
    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    @hookimpl
    def retrain_campaign_run_done(self, run: Path, is_first: bool) -> dict[str, Any] | None:
        self.seen.append((run.name, is_first))
        if len(self.seen) == 2:
            raise OSError("disk full")
        return {"analysis": {"rank": 4}} if is_first else None


def test_each_run_once_and_errors_are_told(load_text: Callable[..., Campaign], toy_plugins: Plugins) -> None:
    analysis = Analysis()
    toy_plugins.add(analysis, Owner(distribution="tests", source="analysis"))
    campaign = load_text()
    runs = plan_runs(campaign, Path("out"))[:3]
    follow_ups = FollowUps(campaign, toy_plugins, Path("out"), frozenset())
    for number, run in enumerate(runs):
        follow_ups.submit(run, is_first=number == 0)
    results: list[FollowUpResult] = []
    while follow_ups.num_open:
        results += follow_ups.finished()
    assert analysis.seen == [(runs[0].name, True), (runs[1].name, False), (runs[2].name, False)]
    assert [result.fields for result in results] == [{"analysis": {"rank": 4}}, {}, {}]
    assert "disk full" in results[1].error
    assert "tests:analysis" in results[1].error
    assert results[2].error == ""
