"""Registers the samplers `thompson`, `curriculum` and `replay`."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.spec import PluginSpec

SAMPLERS = {
    "thompson": "Prompts whose chance to teach is largest in a draw from the posterior of each rate.",
    "curriculum": "Prompts in order of a difficulty field: a window that moves with the steps, or with the rate.",
    "replay": "The order of `uniform`, and prompts that taught nothing when seen and are forecast to do so now.",
}


@hookimpl
def retrain_register_samplers(register: Callable[[PluginSpec], None]) -> None:
    """The samplers that learn from the outcomes of earlier steps."""
    for name, summary in SAMPLERS.items():
        module = f"retrain.rooms.samplers.{name}"
        register(PluginSpec(name=name, summary=summary, factory=f"{module}:create", params=f"{module}:Params"))
