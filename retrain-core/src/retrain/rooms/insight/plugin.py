"""Registers the commands of this room."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.spec import PluginSpec

COMMANDS = (
    ("trace", "Try the configured flow of credit on synthetic data, without a model.", "trace_command:command"),
    (
        "credit",
        "Show, token by token, the credit of a run's completions, as it was or under another flow.",
        "credit_command:command",
    ),
    (
        "resume-check",
        "Say what `--resume` of a run would restore and what not, without loading a model.",
        "resume_check_command:command",
    ),
    ("status", "Show how the runs and campaigns below a folder stand.", "status_command:command"),
    ("top", "Watch what is running.", "status_command:top"),
    ("score", "Score again the texts on which a run's reward failed: --replay PATH.", "score_command:command"),
    ("compare", "Compare conditions over their seeds, with tests and intervals.", "compare.command:command"),
    ("report", "Write one offline page about a campaign or some runs.", "report.command:command"),
    ("diff", "Compare two runs: results, settings, code, packages, data, first divergence.", "diff_command:command"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """What looks at a flow, a run or many runs."""
    for name, summary, factory in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.rooms.insight.{factory}"))
