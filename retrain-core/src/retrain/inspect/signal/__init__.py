"""What a run drew and what it was good for: tokens by cause, prompts, credit, cost of held-out gain.

Registers `retrain signal` and its section of a report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.report import ReportSection
    from retrain.kernel.contracts.views import RunView


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """`retrain signal`."""
    summary = "Account for every token that a run or campaign drew: what taught, what did not and why."
    register(
        PluginSpec(name="signal", summary=summary, factory="retrain.inspect.signal.command:command", traits="look")
    )


@hookimpl
def retrain_report_sections(run: RunView, campaign: Path | None) -> Mapping[str, ReportSection] | None:
    """Tokens by cause, the forecast chance and the credit by uncertainty of the run that a report shows."""
    from retrain.inspect.signal.report_section import report_section

    section = report_section(run)
    return {"Signal account": section} if section else None
