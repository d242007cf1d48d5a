"""Registers the keys of `[algorithm]` that work with any advantage."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import TableTraits
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import PluginSpec


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """`batch_norm` and `advantage_clip`."""
    factory, traits = "retrain.credit.table:AdvantageKeys", TableTraits(extends=True)
    register(PluginSpec(name="algorithm", summary="What any advantage may end with.", factory=factory, traits=traits))
