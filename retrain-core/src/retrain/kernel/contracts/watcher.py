"""The contract of a watcher, which follows one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain.kernel.contracts.views import RunView


class Watcher:
    """Base of what `retrain_watch_run` returns; override what is needed. Hooks work in it too, each with `hookimpl`.

    State of one run belongs in this object, never in a module.
    """

    def phase(self, step: int, phase: str) -> None:
        """The run enters `sampling`, `scoring`, `training`, `recording`, `eval` or `checkpoint`."""

    def step_line(self, metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Fields to add to the step's line, which is complete (evaluation and times included) and about to be written.

        Once per step. A watcher that judges the step (health) does so here, so that its finding goes into the line.
        """
        return None

    def describe_run(self, run: RunView) -> Mapping[str, Any] | None:
        """Entries to add to `run.json`, as JSON: `{"capacity": {...}}`.

        Called before the first step and when the run is over: the second result replaces the first. An exception is
        logged and ends nothing.
        """
        return None
