"""The console output of a run: its lines, and the panel below them on a terminal.

Logs the lines of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext


@hookimpl
def retrain_watch_run(context: PluginContext) -> object:
    """The watcher that logs the lines of a run."""
    from retrain.observe.console.lines import RunLines  # only a run needs it

    return RunLines(context)
