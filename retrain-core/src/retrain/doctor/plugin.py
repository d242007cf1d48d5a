"""Registers `retrain doctor`, and what the kernel itself looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from retrain.hookspecs import hookimpl
from retrain.plugins.spec import PluginSpec

if TYPE_CHECKING:
    from retrain.config.resolved import Config
    from retrain.plugins.diagnosis import Diagnosis
    from retrain.plugins.manager import Plugins


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """One command."""
    summary = "Say whether this machine has what a configuration needs, and how to get what it lacks."
    register(PluginSpec(name="doctor", summary=summary, factory="retrain.doctor.command:command"))


@hookimpl(tryfirst=True)
def retrain_diagnose(config: Config | None, plugins: Plugins) -> Sequence[Diagnosis]:
    """Python, distributions, the parts of the configuration, folders, model, servers and keys."""
    from retrain.doctor.machine import diagnose_machine
    from retrain.doctor.parts import diagnose_parts
    from retrain.doctor.reach import diagnose_reach

    return [*diagnose_machine(config), *diagnose_parts(config, plugins), *diagnose_reach(config, plugins)]
