"""Who watches a run: recorders and health monitors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong with the run as a whole, as a health monitor sees it.

    `state` names it in `metrics.jsonl` (`truncation`, `entropy_collapse`: lower case and underscores). `message` says
    the cause and the smallest fix, naming a key of the configuration. `severity` "stop" ends the run whatever
    `[health] policy` says, "warn" leaves that to the policy.
    """

    state: str
    message: str
    severity: Literal["warn", "stop"] = "warn"


class HealthMonitor(Protocol):
    """Watches the lines of `metrics.jsonl` for a run that goes on and learns nothing.

    Whatever a method raises is reported once, by the monitor's name, and never stops training. What it finds must
    depend on the lines alone, so that a resumed run finds the same.
    """

    def observe(self, metrics: Mapping[str, Any]) -> Sequence[Finding]:
        """All that is wrong at this step, for as long as it is; before the line is written. Fields may be absent."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON; asked at each checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
