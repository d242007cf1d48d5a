"""The contract of a health monitor, and its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem with the run as a whole, found by a health monitor.

    `state` names it in `metrics.jsonl` (`truncation`, `entropy_collapse`: lower case and underscores). `message` gives
    the cause and the smallest fix, naming a key of the configuration. `severity` "stop" ends the run regardless of
    `[health] policy`, "warn" leaves the decision to the policy.
    """

    state: str
    message: str
    severity: Literal["warn", "stop"] = "warn"


class HealthMonitor(Protocol):
    """Detects from the lines of `metrics.jsonl` a run that continues without learning.

    An exception in a method is reported once, by the monitor's name, and never stops training. Findings must depend
    only on the lines, so that a resumed run has the same ones.
    """

    def observe(self, metrics: Mapping[str, Any]) -> Sequence[Finding]:
        """Everything wrong at this step, repeated while it lasts; before the line is written. Fields may be absent."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON; called at each checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
