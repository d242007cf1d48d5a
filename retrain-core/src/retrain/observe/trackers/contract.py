"""The contract of a recorder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Recorder(Protocol):
    """Receives what a run records, in addition to the JSONL files that are always written.

    An exception in a method is reported once, by the recorder's name, and never stops training. `state`, `restore` and
    `checkpoint` are optional: a recorder without them keeps nothing across a resume and receives no adapters.
    """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; called only on a resume, before `start`."""

    def start(self, manifest: Mapping[str, Any], folder: Path) -> None:
        """Called once per session with the content of `run.json`, secrets hidden, and the run's folder.

        After an exception here only `state` and `finish` are still called.
        """

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Receive each line of `metrics.jsonl` after it is written."""

    def checkpoint(self, folder: Path, name: str) -> None:
        """Receive each saved checkpoint: its complete folder, PEFT adapter included; read it only during the call."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON; called at each checkpoint."""

    def finish(self, error: BaseException | None = None) -> None:
        """Called once, however the run ends: `error` is what ended it, None if it reached its last step."""
