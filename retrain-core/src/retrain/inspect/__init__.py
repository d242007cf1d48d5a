"""Looks into runs: status, diff, the credit of each token, where the signal went, a step computed again.

Begin with `status_scan.py` and `diff_data.py`; `signal/` and `replay/` are plugins of their own. Reads runs through
`records`, and never imports a campaign or an engine.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

COMMANDS = (
    ("train", "trace", "Try the configured flow of credit on synthetic data, without a model.", "trace_command"),
    (
        "look",
        "credit",
        "Show the credit of a run's completions token by token, as assigned or under another flow.",
        "credit_command",
    ),
    (
        "look",
        "status",
        "Show the state of the runs below a folder; of one its resume and forecast.",
        "status_command",
    ),
    ("compare", "diff", "Compare two runs: results, settings, code, packages, data, first divergence.", "diff_command"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """Commands that inspect a flow, a run or many runs."""
    for group, name, summary, module in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.inspect.{module}:command", traits=group))
