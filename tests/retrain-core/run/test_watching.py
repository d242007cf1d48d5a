"""Watchers are registered for the block alone, even when a later one is refused."""

from __future__ import annotations

import pytest

from retrain.api import PluginError, hookimpl
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
