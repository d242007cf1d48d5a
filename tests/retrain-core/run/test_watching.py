"""Watchers are registered for the block alone, even when a later one is refused."""

from __future__ import annotations

from typing import Any

import pytest

from retrain.api import PluginError, Watcher, hookimpl
from retrain.kernel.errors import HookError
from retrain.kernel.parts import Run
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.session import watching


class Good:
    @hookimpl
    def retrain_run_end(self) -> None:
        """Any hook will do."""


class Faulty:
    @hookimpl
    def retrain_run_edn(self) -> None:
        """A misspelt hook."""


def test_a_refused_watcher_leaves_none_registered() -> None:
    plugins, good = load_plugins({}), Good()
    with pytest.raises(PluginError, match="Faulty cannot be used"), watching(plugins, [good, Faulty()]):
        pytest.fail("the block runs although a watcher was refused")
    assert not plugins.pluggy.is_registered(good)


class Methods(Watcher):
    """No hooks."""

    def phase(self, step: int, phase: str) -> None:
        raise ValueError(f"no {phase}")


def test_a_watcher_needs_no_hook_and_is_named_when_it_fails() -> None:
    absent: Any = None
    run = Run(parts=absent, records=absent, stops=absent, progress=absent, view=absent, watchers=(Watcher(), Methods()))
    with (
        watching(load_plugins({}), run.watchers),
        pytest.raises(HookError, match=r"Methods\.phase raised ValueError: no sampling"),
    ):
        run.enter(0, "sampling")
    assert run.ask_watchers("step_line", {"step": 0}) == []
