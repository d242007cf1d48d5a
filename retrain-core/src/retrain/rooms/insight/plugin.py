"""Registers the commands of this room."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.spec import PluginSpec

COMMANDS = (
    ("trace", "Try the configured flow of credit on synthetic data, without a model.", "trace_command:command"),
    (
        "credit",
        "Show the credit of a run's completions token by token, as assigned or under another flow.",
        "credit_command:command",
    ),
    (
        "resume-check",
        "Report what `--resume` of a run would restore and what not, without loading a model.",
        "resume_check_command:command",
    ),
    ("status", "Show the state of the runs and campaigns below a folder.", "status_command:command"),
    ("top", "Watch the active runs.", "status_command:top"),
    ("watch", "Serve a page that follows a run while it goes on: RUN.", "watch.command:command"),
    ("score", "Score again the texts on which a run's reward failed: --replay PATH.", "score_command:command"),
    ("compare", "Compare conditions over their seeds, with tests and intervals.", "compare.command:command"),
    ("forecast", "Forecast the last held-out rate of a run, from finished runs beside it.", "forecast.command:command"),
    ("report", "Write one offline page about a campaign or a set of runs.", "report.command:command"),
    ("diff", "Compare two runs: results, settings, code, packages, data, first divergence.", "diff_command:command"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """Commands that inspect a flow, a run or many runs."""
    for name, summary, factory in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.rooms.insight.{factory}"))
