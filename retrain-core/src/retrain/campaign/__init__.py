"""Campaigns: conditions x seeds from one file, each run in a separate process and folder; on this machine, Ray or
Slurm.

Begin with `planned.py` (the grid), `schedule.py` (who runs when) and `session.py` (the command). Imports
`verdicts` (it decides when enough seeds have run) and nothing that draws pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retrain.kernel.declared import ConfigClaim, PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

TABLE = "campaign"
TEMPLATES = {
    "campaign": ("Two conditions x six seeds of a real model.", "CAMPAIGN"),
    "campaign-tiny": ("Two conditions x six seeds on your CPU, in minutes.", "TINY"),
    "factorial": ("Two factors of two levels x eight seeds on your CPU, in minutes.", "FACTORIAL"),
    "sensitivity": ("Two conditions at five learning rates on your CPU, in minutes.", "SENSITIVITY"),
    "campaign-tuned": ("Two conditions, tuned alike, x six seeds on your CPU.", "TUNED"),
    "campaign-tasks": ("Two tasks in one run: two conditions x seven seeds on your CPU, in minutes.", "TASKS"),
}
LAUNCHERS = {
    "subprocess": ("Processes of this machine.", "processes"),
    "ray": ("Tasks of an existing Ray cluster (extra `ray`).", "ray_launcher"),
    "slurm": ("Jobs of a Slurm cluster.", "slurm_launcher"),
}


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    traits = TableTraits(flag_prefix="campaign_", starts_runs=True)
    factory = "retrain.records.campaign_table:CampaignTable"
    register(PluginSpec(name=TABLE, summary="Conditions x seeds.", factory=factory, traits=traits))


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    summary = "Run the conditions x seeds of a TOML file with [campaign]."
    register(PluginSpec(name="campaign", summary=summary, factory="retrain.campaign.session:command", traits="train"))


@hookimpl
def retrain_register_launchers(register: Callable[[PluginSpec], None]) -> None:
    for name, (summary, module) in LAUNCHERS.items():
        factory, params = f"retrain.campaign.{module}:build", f"retrain.campaign.{module}:Options"
        register(PluginSpec(name=name, summary=summary, factory=factory, params=params))


@hookimpl
def retrain_register_init_templates(register: Callable[[PluginSpec], None]) -> None:
    for name, (summary, constant) in TEMPLATES.items():
        factory = f"retrain.campaign.templates:{constant}"
        register(PluginSpec(name=name, summary=summary, factory=factory, traits="campaign.toml"))


@hookimpl
def retrain_claim_config(document: Mapping[str, Any]) -> ConfigClaim | None:
    if TABLE not in document:
        return None
    return ConfigClaim(command="campaign", explain="retrain.campaign.load:explain")
