"""The output of a campaign, and the progress of its runs that it shows."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.campaign.load import Campaign
from retrain.campaign.planned import RunProgress, plan_runs, progress
from retrain.campaign.report_lines import Lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_plugins_log_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(2, parallel=False)
    logger = logging.getLogger("retrain")
    before = logger.level, logger.propagate, list(logger.handlers)
    with lines.shown():
        logger.info("Recommended rank: %d\x1b[2J", 4)
    logger.info("not any more")
    assert capsys.readouterr().out == "Recommended rank: 4\ufffd[2J\n"
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_on_a_terminal_the_running_runs_are_shown(
    load_text: Callable[..., Campaign], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_progress_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    assert progress(tmp_path) == RunProgress()
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": -1, "eval_correct_rate": 0.1}\n')
    assert progress(tmp_path) == RunProgress(steps_done=0)
    with file.open("a") as stream:
        stream.write('{"step": 0, "correct_rate": 0.5}\n{"step": 1, "correct_ra')
    assert progress(tmp_path) == RunProgress(steps_done=1, correct_rate=0.5)


@given(content=st.binary(max_size=300))
def test_progress_of_anything(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_bytes(content)
    progress(folder)
