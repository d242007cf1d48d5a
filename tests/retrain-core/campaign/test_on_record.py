"""Records of a campaign in the ledger, and the plugins that follow a run that is done."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.api import hookimpl
from retrain.campaign.load import Campaign
from retrain.campaign.manifest import CampaignRecord
from retrain.campaign.planned import plan_runs
from retrain.campaign.report_lines import Lines
from retrain.campaign.schedule import FollowUpResult, FollowUps
from retrain.kernel.registry import Owner, Plugins
from retrain.verdicts.ledger.chain import NAME
from retrain.verdicts.ledger.history import read_chain
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Options
from retrain.verdicts.wording.command import command as compare_command
from tests.kit.invoke import invoke

SEEDS = "seeds = [7]\nmax_steps = 2\n"
PLAN = '\n[campaign.plan]\nhypothesis = "they differ"\nprimary_metric = "correct_rate"\n'
RUN = "grpo+toy_index_s7"


def test_a_ledger_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / NAME).mkdir()
    record = CampaignRecord(tmp_path / "out", Lines(1, parallel=False))
    record.attempt("a_s1", 1, continues=False)
    record.ended("done", done=1, failed=0)
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("not in the ledger") == 1


@pytest.mark.long
def test_a_finished_run_that_is_deleted_and_run_again_is_named(
    write: Callable[..., Path], finish: Callable[..., tuple[int, str, str]]
) -> None:
    write(SEEDS, more=PLAN)
    code, out, err = finish("c.toml", "--log-dir", "logs/out")
    assert (code, err) == (0, ""), out
    kinds = [entry.record["kind"] for entry in read_chain(Path("logs") / NAME)]
    runs = ["attempt_started", "run_started", "run_ended"] * 2
    assert kinds == ["campaign_opened", "plan_sealed", *runs, "campaign_ended"]
    study = comparison_with_ledger([Path("logs/out")], Options())
    assert study.notices == ()
    assert invoke(compare_command, ["--ledger"]).exit_code == 0

    shutil.rmtree(Path("logs/out/runs") / RUN)
    assert finish("c.toml", "--log-dir", "logs/out")[0] == 0
    study = comparison_with_ledger([Path("logs/out")], Options())
    assert any(f"{RUN}, begun" in line and "is gone; it was run again" in line for line in study.notices)
    assert study.standing == "exploratory"
    assert invoke(compare_command, ["--ledger"]).exit_code == 1


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
