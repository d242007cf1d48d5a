"""The lines of a run in a notebook: one display, updated in place, as text and as escaped HTML."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from retrain.kernel.registry import Plugins
from retrain.observe.console import panel
from retrain.observe.console.console import is_notebook, run_console
from retrain.text.terminal_text import OUTCOME_LEVEL

LOG = logging.getLogger("retrain")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """What a kernel's display was told: `display` once, then `update`; tests/docs has a real kernel."""
    calls: list[tuple[str, dict[str, str]]] = []

    class Handle:
        def display(self, bundle: dict[str, str], *, raw: bool) -> None:
            calls.append(("display", bundle))

        def update(self, bundle: dict[str, str], *, raw: bool) -> None:
            calls.append(("update", bundle))

    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    display: Any = ModuleType("IPython.display")
    display.DisplayHandle = Handle
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return calls


def test_lines_share_one_display(
    shown: list[tuple[str, dict[str, str]]],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MY_SERVICE_KEY", "sk-planted-0123456789")
    monkeypatch.setattr(panel, "PAUSE_S", 60.0)
    with run_console(plugins):
        LOG.warning("Health: <b>sk-planted-0123456789</b>\x1b[31m")
        for step in range(40):
            LOG.info("Step %d", step)
        LOG.debug("group")
        LOG.log(OUTCOME_LEVEL, "Training complete.")
    assert [call for call, _ in shown] == ["display", "update"], "what the pause held back comes at the end"
    lines = shown[-1][1]["text/plain"].split("\n")
    assert len(lines) == 1 + panel.LAST_LINES
    assert lines[0].startswith("Health: <b>(hidden)</b>"), "a warning does not scroll away"
    assert lines[1].startswith("Step ")
    assert lines[-1] == "Training complete."
    assert "&lt;b&gt;(hidden)" in shown[-1][1]["text/html"]
    assert not any("sk-planted" in text or "\x1b" in text for _, bundle in shown for text in bundle.values())
    with run_console(plugins, is_quiet=True):
        LOG.info("Step 1")
        LOG.log(OUTCOME_LEVEL, "Done, sk-planted-0123456789")
    assert capsys.readouterr().out == "Done, (hidden)\n"
    assert len(shown) == 2


def test_a_script_and_a_terminal_are_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not is_notebook()
    ipython: Any = ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    for shell in (None, SimpleNamespace()):
        ipython.get_ipython = lambda shell=shell: shell
        assert not is_notebook()
