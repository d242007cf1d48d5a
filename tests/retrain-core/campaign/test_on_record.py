"""Records of a campaign in the ledger, plugins that follow a run that is done, and what is shown meanwhile."""

import io
import logging
import shutil
import sys
from pathlib import Path

import pytest

from retrain.api import hookimpl
from retrain.campaign.manifest import CampaignRecord
from retrain.campaign.planned import RunProgress, plan_runs, progress
from retrain.campaign.report_lines import Lines
from retrain.campaign.schedule import FollowUps
from retrain.kernel.registry import Owner
from retrain.verdicts.ledger.chain import NAME
from retrain.verdicts.ledger.history import read_chain
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Options
from retrain.verdicts.wording.command import command as compare_command
from tests.end_to_end.campaigns import manifest, wait_for
from tests.kit.campaigns import conditions
from tests.kit.invoke import invoke

SEEDS = "seeds = [7]\nmax_steps = 2\n"
PLAN = '\n[campaign.plan]\nhypothesis = "they differ"\nprimary_metric = "correct_rate"\n'
RUN = "grpo+toy_index_s7"


def test_a_ledger_that_cannot_be_written_is_told_once(tmp_path, capsys):
    (tmp_path / NAME).mkdir()
    record = CampaignRecord(tmp_path / "out", Lines(1, parallel=False))
    record.attempt("a_s1", 1, continues=False)
    record.ended("done", done=1, failed=0)
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("not in the ledger") == 1


@pytest.mark.long
def test_a_finished_run_that_is_deleted_and_run_again_is_named(write, finish):
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
    def __init__(self):
        self.seen = []

    @hookimpl
    def retrain_campaign_run_done(self, run, is_first):
        self.seen.append((run.name, is_first))
        if len(self.seen) == 2:
            raise OSError("disk full")
        return {"analysis": {"rank": 4}} if is_first else None


def test_each_run_once_and_errors_are_told(load_text, toy_plugins):
    analysis = Analysis()
    toy_plugins.add(analysis, Owner(distribution="tests", source="analysis"))
    campaign = load_text()
    runs = plan_runs(campaign, Path("out"))[:3]
    follow_ups = FollowUps(campaign, toy_plugins, Path("out"), frozenset())
    for number, run in enumerate(runs):
        follow_ups.submit(run, is_first=number == 0)
    results = []
    while follow_ups.num_open:
        results += follow_ups.finished()
    assert analysis.seen == [(runs[0].name, True), (runs[1].name, False), (runs[2].name, False)]
    assert [result.fields for result in results] == [{"analysis": {"rank": 4}}, {}, {}]
    assert "disk full" in results[1].error
    assert "tests:analysis" in results[1].error
    assert results[2].error == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_plugins_log_is_said(capsys):
    lines = Lines(2, parallel=False)
    logger = logging.getLogger("retrain")
    before = logger.level, logger.propagate, list(logger.handlers)
    with lines.shown():
        logger.info("Recommended rank: %d\x1b[2J", 4)
    logger.info("not any more")
    assert capsys.readouterr().out == "Recommended rank: 4\ufffd[2J\n"
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_on_a_terminal_the_running_runs_are_shown(load_text, monkeypatch):
    campaign = load_text()
    run = plan_runs(campaign, Path("out"))[0]
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.jsonl").write_text('{"step": 2, "correct_rate": 0.25}\n')
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    lines = Lines(4, parallel=True)
    with lines.shown():
        lines.show({run.name: run}, 1)
        lines.say("[bold]as it is[/bold] \N{SNOWMAN}")
    shown = terminal.getvalue()
    assert "1/4 runs done" in shown
    assert run.name in shown
    assert "step 3/4" in shown
    assert "correct 25.0%" in shown
    assert "[bold]as it is[/bold] \N{SNOWMAN}" in shown


def test_progress_is_that_of_the_last_whole_line(tmp_path):
    assert progress(tmp_path) == RunProgress()
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": -1, "eval_correct_rate": 0.1}\n')
    assert progress(tmp_path) == RunProgress(steps_done=0)
    with file.open("a") as stream:
        stream.write('{"step": 0, "correct_rate": 0.5}\n{"step": 1, "correct_ra')
    assert progress(tmp_path) == RunProgress(steps_done=1, correct_rate=0.5)


ONE = conditions("grpo+toy_index")


@pytest.mark.long
def test_a_stop_saves_and_the_same_command_finishes(write, start, finish):
    write("seeds = [1]\nmax_steps = 40\n", ONE)
    process = start("c.toml")
    run = Path("out/runs/grpo+toy_index_s1")
    wait_for(lambda: progress(run).steps_done > 2, process)
    process.terminate()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 75, out + err
    assert "Stopping (SIGTERM)" in out
    assert (manifest()["status"], manifest()["runs"][0]["status"]) == ("stopped", "stopped")
    assert 2 < progress(run).steps_done < 40
    code, out, err = finish("--resume", "out")  # by folder alone
    assert (code, err) == (0, ""), out
    assert "(continued)" in out
    assert progress(run).steps_done == 40
    code, _, err = finish("c.toml", "--resume", "out", "--lr", "0.5")
    assert code == 2
    assert "training.lr was 4e-05 and is now 0.5" in err
