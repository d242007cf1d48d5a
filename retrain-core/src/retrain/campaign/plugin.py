"""Registers `[campaign]`."""

from __future__ import annotations

from collections.abc import Callable

from retrain.config.keys import TableTraits
from retrain.hookspecs import hookimpl
from retrain.plugins.spec import PluginSpec


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """The table of a sweep."""
    traits = TableTraits(flag_prefix="campaign_", pending="campaigns are not built yet")
    factory = "retrain.campaign.table:CampaignTable"
    register(PluginSpec(name="campaign", summary="Conditions x seeds.", factory=factory, traits=traits))
