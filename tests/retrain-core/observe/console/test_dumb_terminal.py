"""A terminal that cannot move its cursor gets plain lines."""

from __future__ import annotations

import logging
import sys

import pytest

from retrain.kernel.plugins.discover import load_plugins
from retrain.observe.console.console import PlainLines, run_console


@pytest.mark.parametrize("term", ["dumb", "DUMB", "unknown"])
def test_a_terminal_without_a_cursor_gets_plain_lines(
    term: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with run_console(load_plugins()):
        handlers = logging.getLogger("retrain").handlers
        assert any(isinstance(each, PlainLines) for each in handlers)
        logging.getLogger("retrain").info("Step 1")
    assert capsys.readouterr().out == "Step 1\n"
