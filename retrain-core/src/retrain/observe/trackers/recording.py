"""Passes the lines and checkpoints of a run to its recorders; an exception in one never stops training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.types import Kind
from retrain.observe.trackers.contract import Recorder, TrackerKeys
from retrain.run.fault_guard import FaultGuard
from retrain.text.secrets import redacted

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.views import RunView

STATE = "recorders"
OPTIONAL = frozenset({"state", "restore", "checkpoint"})


def recorder_names(config: Config) -> dict[str, str]:
    """The recorders of a configuration, each with the key that selects it; `wandb_project` selects `wandb`."""
    names = dict.fromkeys(config.logging.recorders, "logging.recorders")
    return ({"wandb": "logging.wandb_project"} if config.table("logging", TrackerKeys).wandb_project else {}) | names


def watch_run(context: PluginContext) -> Recorders:
    names = recorder_names(context.config)
    return Recorders({name: build_part(Kind.RECORDER, name, path, context) for name, path in names.items()})


class Recorders:
    """Every recorder by its name, in order; after a failed `start` it gets only `state` and `finish`."""

    def __init__(self, recorders: Mapping[str, Recorder]) -> None:
        self._recorders = dict(recorders)
        self._started: set[str] = set()
        self._guard = FaultGuard("Recorder", "Training continues; its records have gaps.")

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        for name, saved in state.get(STATE, {}).items():
            if name in self._recorders:
                self._call(name, "restore", saved)

    @hookimpl
    def retrain_run_start(self, run: RunView) -> None:
        manifest = redacted(run.manifest)
        self._started = {name for name in self._recorders if self._call(name, "start", manifest, run.folder)}

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> None:
        for name in self._started_in_order():
            self._call(name, "step", redacted(metrics))

    @hookimpl
    def retrain_save_state(self, name: str, folder: Path | None) -> dict[str, Any]:
        if folder is not None:
            for recorder in self._started_in_order():
                self._call(recorder, "checkpoint", folder, name)
            return {}
        methods = {name: getattr(recorder, "state", dict) for name, recorder in self._recorders.items()}
        states = {name: self._guard.state(name, method) for name, method in methods.items()}
        return {STATE: {name: state for name, state in states.items() if state}}

    @hookimpl
    def retrain_run_end(self, error: BaseException | None) -> None:
        for name in self._recorders:
            self._call(name, "finish", error)

    def _started_in_order(self) -> list[str]:
        return [name for name in self._recorders if name in self._started]

    def _call(self, name: str, method: str, *arguments: Any) -> bool:
        """True if the call succeeded, or the recorder lacks an optional method."""
        recorder = self._recorders[name]
        if method in OPTIONAL and not hasattr(recorder, method):
            return True
        return self._guard.call(name, method, getattr(recorder, method), *arguments)[0]
