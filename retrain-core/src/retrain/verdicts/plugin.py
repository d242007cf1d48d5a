"""Registers the commands that judge, and the ledger's lines about a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import PluginSpec

if TYPE_CHECKING:
    from retrain.kernel.contracts.views import RunView

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("compare", "Compare conditions over their seeds, with tests and intervals.", "wording.command:command"),
    ("forecast", "Forecast the last held-out rate of a run, from finished runs beside it.", "forecast.command:command"),
    ("ledger", "Verify or show the ledger of what was run, looked at and found.", "ledger.command:command"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """Commands that judge, and that of the ledger."""
    for name, summary, factory in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.verdicts.{factory}", traits="compare"))


@hookimpl
def retrain_run_start(run: RunView) -> None:
    """Record in the ledger that the run began."""
    from retrain.verdicts.ledger.watch import begin  # only a run needs it

    begin(run)


@hookimpl
def retrain_run_end(run: RunView, error: BaseException | None) -> None:
    """Record in the ledger how the run ended, with the hashes of its records."""
    from retrain.verdicts.ledger.watch import end  # only a run needs it

    end(run, error)
