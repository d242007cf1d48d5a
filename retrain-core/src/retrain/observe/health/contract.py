"""`[health]`, the contract of a health monitor, and its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from retrain.kernel.config.keys import Table, free
from retrain.kernel.declared import Kind


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
        """Return every fault of this step, repeated while it lasts. Fields may be absent."""

    def state(self) -> Mapping[str, Any]:
        """Return everything that a resume needs, as JSON; called at each checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""


class HealthTable(Table):
    """Warnings about runs that learn nothing."""

    monitors: list[str] = free(["default", "gaming"], "Health monitors, by name; [] = none.", names=Kind.HEALTH_MONITOR)
    policy: Literal["warn", "stop"] = free(
        "warn", "warn, or stop: save a checkpoint and end with exit code 1 at the first finding."
    )
    steps: int = free(3, "Steps in a row that make a finding.", ge=1)
    truncation: float = free(
        0.9, "Finding above this share of completions cut off at max_tokens; 1 = never.", ge=0.0, le=1.0
    )
    entropy_collapse: float = free(
        0.1, "Finding below this fraction of the entropy of the first steps; 0 = never.", ge=0.0, lt=1.0
    )
    entropy_explosion: float = free(
        5.0, "Finding above this multiple of the entropy of the first steps; 0 = never.", ge=0.0
    )
    length_collapse: float = free(
        0.1, "Finding below this fraction of the mean length of the first steps; 0 = never.", ge=0.0, lt=1.0
    )
    ratio_drift: float = free(0.1, "Finding when |ratio_mean - 1| is above this; 0 = never.", ge=0.0)
    ess_frac: float = free(0.5, "Finding when ess_frac is below this; 0 = never.", ge=0.0, lt=1.0)
