"""Looks into runs: status, diff, the credit of each token, the use of each sample, a step computed again.

Begin with `diff.py`. Runs are read through `records`; a campaign or an engine is never imported.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

COMMANDS = (
    ("train", "trace", "Try the configured flow of credit on synthetic data, without a model.", "trace_command"),
    ("look", "credit", "Show the credit of completions token by token, as assigned or recomputed.", "credit_command"),
    ("look", "replay", "Replay a step of a run, and its gradient under other credit and losses.", "replay.command"),
    ("look", "status", "Show the state of the runs below a folder; of one its resume and forecast.", "status_command"),
    ("compare", "diff", "Compare two runs: results, settings, code, packages, data, first divergence.", "diff_command"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    for group, name, summary, module in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.inspect.{module}:command", traits=group))
