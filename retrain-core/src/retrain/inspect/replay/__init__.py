"""A stored step again: as it was, to the bit, and under other credit and losses.

Registers `retrain replay`.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """`retrain replay`."""
    summary = "Replay a step of a run: as it was, and the gradient under other credit and losses."
    register(
        PluginSpec(name="replay", summary=summary, factory="retrain.inspect.replay.command:command", traits="look")
    )
