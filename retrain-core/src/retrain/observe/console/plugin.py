"""Shows a run on the console: a line per step, and the live panel below them on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.registry import Plugins


@hookimpl
def retrain_console(plugins: Plugins, is_quiet: bool) -> AbstractContextManager[None]:
    """Lines to stdout, and the panel if that is a terminal."""
    from retrain.observe.console.console import run_console  # only a run needs it

    return run_console(plugins, is_quiet=is_quiet)


@hookimpl
def retrain_watch_run(context: PluginContext) -> object:
    """The watcher that logs the lines of a run."""
    from retrain.observe.console.lines import RunLines  # only a run needs it

    return RunLines(context)
