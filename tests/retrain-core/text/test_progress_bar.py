"""The bar of a long command: on a terminal with the time left, otherwise one line without control characters."""

from __future__ import annotations

import sys
import time

import pytest

from retrain.kernel.contracts.context import PhaseProgress
from retrain.text.tables import progress_bar


@pytest.mark.parametrize(("term", "is_terminal"), [("xterm", False), ("dumb", True), ("unknown", True)])
def test_a_stream_that_cannot_be_redrawn_gets_one_line(
    term: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with progress_bar("merging \x1b[2J", PhaseProgress()):
        pass
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.strip().isprintable()


@pytest.mark.parametrize("is_colorless", [False, True])
def test_a_terminal_gets_a_bar_with_the_time_left(
    is_colorless: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)  # older rich takes an empty one for set
    if is_colorless:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = PhaseProgress()
    with progress_bar("merging", progress):
        progress.begin("tensors", 4)
        time.sleep(0.01)
        progress.add(1)
        print("result")
    shown = capsys.readouterr()
    assert shown.out == "result\n"  # stdout is left as it is
    assert "merging" in shown.err
    assert "25%" in shown.err
    assert "time left" in shown.err
    assert ("\x1b[36m" in shown.err) != is_colorless
