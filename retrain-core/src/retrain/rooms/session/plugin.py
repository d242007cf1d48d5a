"""Registers `[resume]`."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import TableTraits
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.spec import PluginSpec


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """The table that continues an earlier run."""
    factory, traits = "retrain.rooms.session.table:ResumeTable", TableTraits(flag_prefix="resume_")
    register(PluginSpec(name="resume", summary="Continue an earlier run.", factory=factory, traits=traits))
