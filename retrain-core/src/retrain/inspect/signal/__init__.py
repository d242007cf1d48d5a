"""`retrain signal`: the use of each sampled token: cause by cause, by prompt, its credit, the cost of a gain."""

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
    summary = "Account for every token that a run or campaign sampled: whether it taught, and why not."
    factory = "retrain.inspect.signal.command:command"
    register(PluginSpec(name="signal", summary=summary, factory=factory, traits="look"))


@hookimpl
def retrain_report_sections(run: RunView, campaign: Path | None) -> Mapping[str, ReportSection] | None:
    from retrain.inspect.signal.command import report_section

    section = report_section(run)
    return {"Signal account": section} if section else None
