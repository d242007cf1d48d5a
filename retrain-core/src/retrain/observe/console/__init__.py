"""The console output of a run: its lines, and the panel below them on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext


@hookimpl
def retrain_watch_run(context: PluginContext) -> object:
    from retrain.observe.console.console import RunLines  # only a run needs it

    return RunLines(context)
