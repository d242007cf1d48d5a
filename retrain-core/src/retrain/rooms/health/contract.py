"""What a health monitor must do, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


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
