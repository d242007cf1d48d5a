"""Pages: a campaign or runs as one file that needs no network, a run watched while it continues, credit as colours.

Begin with `shell.py` and `parts.py`, which every page of the core is made with, then `page.py`; `watch/` is the live
page. Draws what `verdicts` says and decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

COMMANDS = (
    ("look", "watch", "Serve a page that follows a run while it goes on: RUN.", "watch.command:command"),
    ("compare", "report", "Write one offline page about a campaign or a set of runs.", "command:command"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """Commands that write or serve pages."""
    for group, name, summary, factory in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.report.{factory}", traits=group))
