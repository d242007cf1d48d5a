"""LoRA-Squeeze: the rank that an adapter needs, and the same adapter at a smaller one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import ConfigClaim, PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.report import ReportSection
    from retrain.kernel.contracts.views import RunView


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    traits = TableTraits(flag_prefix="squeeze_")
    factory = "retrain.tools.squeeze.table:SqueezeTable"
    register(PluginSpec(name="squeeze", summary="LoRA rank analysis.", factory=factory, traits=traits))


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    summary = "Show which rank an adapter needs, and write it at that rank."
    factory = "retrain.tools.squeeze.command:command"
    register(PluginSpec(name="squeeze", summary=summary, factory=factory, traits="tools"))


@hookimpl
def retrain_claim_config(document: Mapping[str, Any]) -> ConfigClaim | None:
    table = document.get("squeeze")
    if not isinstance(table, dict) or not table.get("adapter_path"):
        return None
    if {"training", "algorithm", "campaign"} & set(document):  # such a file does more than squeeze
        return None
    return ConfigClaim(command="squeeze", explain="retrain.tools.squeeze.command:explain")


@hookimpl
def retrain_campaign_run_done(
    config: Config, tables: frozenset[str], run: Path, campaign: Path, is_first: bool
) -> Mapping[str, Any] | None:
    if not is_first or "squeeze" not in tables:
        return None
    from retrain.records.run import Run
    from retrain.tools.squeeze.job import auto_squeeze
    from retrain.tools.squeeze.table import SqueezeTable

    settings = config.table("squeeze", SqueezeTable)
    adapter = settings.adapter_path or Run(run).adapters
    return {"squeeze": auto_squeeze(adapter, settings, campaign, wandb=config.as_dict()["logging"])}


@hookimpl
def retrain_report_sections(run: RunView, campaign: Path | None) -> Mapping[str, ReportSection] | None:
    from retrain.tools.squeeze.spectrum_pages import report_section

    section = report_section(run.folder, campaign)
    return {"Adapter rank": section} if section else None
