"""`retrain doctor`: whether this machine has everything that a configuration needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.diagnosis import Diagnosis
    from retrain.kernel.registry import Plugins


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    summary = "Check that this machine has everything that a configuration needs, with a fix for each gap."
    register(PluginSpec(name="doctor", summary=summary, factory="retrain.tools.doctor.command:command", traits="train"))


@hookimpl(tryfirst=True)
def retrain_diagnose(config: Config | None, plugins: Plugins) -> Sequence[Diagnosis]:
    from retrain.tools.doctor.checks import diagnose_machine, diagnose_parts, diagnose_reach

    return [*diagnose_machine(config), *diagnose_parts(config, plugins), *diagnose_reach(config, plugins)]
