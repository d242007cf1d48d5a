"""Registers what this room adds to a run and to the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.spec import PluginSpec

if TYPE_CHECKING:
    from retrain.kernel.contracts.views import RunView

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("ledger", "Verify or show the ledger of what was run, looked at and found.", "ledger.command:command"),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """Commands about the ledger."""
    for name, summary, factory in COMMANDS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.rooms.evidence.{factory}"))


@hookimpl
def retrain_run_start(run: RunView) -> None:
    """Record in the ledger that the run began."""
    from retrain.rooms.evidence.ledger.watch import begin  # only a run needs it

    begin(run)


@hookimpl
def retrain_run_end(run: RunView, error: BaseException | None) -> None:
    """Record in the ledger how the run ended, with the hashes of its records."""
    from retrain.rooms.evidence.ledger.watch import end  # only a run needs it

    end(run, error)
