"""The recorders of a run, kept apart from it: whatever one raises is told once, by name, and training goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.watchers import Recorder
from retrain.kernel.terminal_text import printable
from retrain.rooms.session.records.secrets import hide_text

LOG = logging.getLogger("retrain")
MAX_REASON_CHARS = 300
OPTIONAL = frozenset({"state", "restore", "checkpoint"})


def recorder_names(config: Config) -> dict[str, str]:
    """The recorders of a configuration, each with the key that asks for it; `wandb_project` asks for `wandb`."""
    names = dict.fromkeys(config.logging.recorders, "logging.recorders")
    return ({"wandb": "logging.wandb_project"} if config.value("logging.wandb_project", "") else {}) | names


class Recorders:
    """Every recorder by its name; a call here is that call on each of them, in order.

    A recorder whose `start` failed is not called again but for `state` and `finish`. `state`, `restore` and
    `checkpoint` may be missing in a recorder.
    """

    def __init__(self, recorders: Mapping[str, Recorder]) -> None:
        self._recorders = dict(recorders)
        self._started: set[str] = set()
        self._reported: set[str] = set()

    @contextmanager
    def running(self, manifest: Mapping[str, Any], folder: Path) -> Iterator[None]:
        """`start` before the block and `finish` after it, however it ends."""
        for name in self._recorders:
            is_good, _ = self._call(name, "start", manifest, folder)
            if is_good:
                self._started.add(name)
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
            raise
        finally:
            for name in self._recorders:
                self._call(name, "finish", error)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A line of `metrics.jsonl`."""
        for name in self._started_in_order():
            self._call(name, "step", metrics)

    def checkpoint(self, folder: Path, checkpoint: str) -> None:
        """An adapter that is complete on disk in `folder`, with the name of its checkpoint."""
        for name in self._started_in_order():
            self._call(name, "checkpoint", folder, checkpoint)

    def state(self) -> dict[str, dict[str, Any]]:
        """What each recorder needs to continue, by name of the recorder, as JSON; without those that need nothing."""
        states: dict[str, dict[str, Any]] = {}
        for name in self._recorders:
            _, state = self._call(name, "state")
            if not state:
                continue
            try:
                states[name] = json.loads(json.dumps(dict(state), allow_nan=False))
            except (TypeError, ValueError) as error:  # a checkpoint must not fail for it
                self._report(name, "state", error)
        return states

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give each recorder what its `state` returned; before `running`. One that is new in this run starts afresh."""
        for name in self._recorders:
            if name in states:
                self._call(name, "restore", states[name])

    def _started_in_order(self) -> list[str]:
        return [name for name in self._recorders if name in self._started]

    def _call(self, name: str, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Whether the call went well, and its result."""
        recorder = self._recorders[name]
        if method in OPTIONAL and not hasattr(recorder, method):
            return True, None
        try:
            return True, getattr(recorder, method)(*arguments)
        except Exception as error:  # a fault of a recorder is never one of the run
            self._report(name, method, error)
            return False, None

    def _report(self, name: str, method: str, error: Exception) -> None:
        if name in self._reported:
            return
        self._reported.add(name)
        reason = printable(" ".join(hide_text(f"{type(error).__name__}: {error}").split())[:MAX_REASON_CHARS])
        LOG.warning("Recorder %r failed in %s(): %s. Training goes on; its records have gaps.", name, method, reason)
        LOG.debug("Recorder %r failed", name, exc_info=error)
