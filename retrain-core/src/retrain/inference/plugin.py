"""Registers `[inference]`."""

from __future__ import annotations

from collections.abc import Callable

from retrain.declared import TableTraits
from retrain.hookspecs import hookimpl
from retrain.plugins.spec import PluginSpec


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """The table of the inference engine."""
    traits = TableTraits(flag_prefix="inference_")
    factory = "retrain.inference.table:InferenceTable"
    register(PluginSpec(name="inference", summary="Which engine draws completions.", factory=factory, traits=traits))
