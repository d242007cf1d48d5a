"""Registers `[squeeze]`."""

from __future__ import annotations

from collections.abc import Callable

from retrain.config.keys import TableTraits
from retrain.hookspecs import hookimpl
from retrain.plugins.spec import PluginSpec


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """The table of rank analysis."""
    traits = TableTraits(flag_prefix="squeeze_")
    factory = "retrain.squeeze.table:SqueezeTable"
    register(PluginSpec(name="squeeze", summary="LoRA rank analysis.", factory=factory, traits=traits))
