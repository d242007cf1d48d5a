"""Pages: a campaign or runs as one file that needs no network, a run watched while it continues, credit as colours.

Begin with `shell.py` and `parts.py`: every page of the core is made of them. Then read `page.py`, the report.
`verdicts.py` draws the comparison and decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

COMMANDS = (
    ("look", "watch", "Serve a page that follows a run while it trains: RUN."),
    ("compare", "report", "Write one offline page about a campaign or a set of runs."),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    for group, name, summary in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.report.commands:{name}", traits=group))
