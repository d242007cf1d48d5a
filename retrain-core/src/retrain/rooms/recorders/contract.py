"""What a recorder must do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Recorder(Protocol):
    """Receives what a run writes down, beside the JSONL files that are always written.

    Whatever a method raises is reported once, by the recorder's name, and never stops training. `state`, `restore` and
    `checkpoint` are optional: a recorder without them keeps nothing over a resume and takes no adapters.
    """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave; on a resume alone, before `start`."""

    def start(self, manifest: Mapping[str, Any], folder: Path) -> None:
        """Once per session, with the content of `run.json`, secrets hidden, and the run's folder.

        After an exception here only `state` and `finish` are still called.
        """

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Each line of `metrics.jsonl`, after it was written."""

    def checkpoint(self, folder: Path, name: str) -> None:
        """Each saved checkpoint: its complete folder, with the PEFT adapter, to be read during the call only."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON; asked at each checkpoint."""

    def finish(self, error: BaseException | None = None) -> None:
        """Once, however the run ends: `error` is what ended it, None when it reached its last step."""
