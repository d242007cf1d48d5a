"""What the engine measures about its work, and the names of these metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain.api import MetricSpec

if TYPE_CHECKING:
    from retrain_local.sampling.schedule import Schedule

ABSENT = "nothing was sampled by engine pytorch"
METRICS = [
    MetricSpec(
        name="engine_prompt_reuse",
        meaning="Share of prompt tokens whose keys and values were cached, from the group's prompt or an earlier turn.",
        absent=ABSENT,
    ),
    MetricSpec(
        name="engine_rows_put_aside",
        meaning="How often a running completion was preempted because the keys and values of all did not fit.",
        absent=ABSENT,
    ),
    MetricSpec(
        name="engine_live_rows_mean",
        meaning="Completions decoded together, mean over decoding steps.",
        absent=ABSENT,
    ),
]


@dataclass(slots=True)
class EngineCounters:
    """Counts since the metrics were last read."""

    steps: int = 0
    row_steps: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0

    def add(self, schedule: Schedule) -> None:
        """Add the counts of a schedule."""
        self.preempted += schedule.preempted
        self.prompt_tokens += schedule.prompt_tokens
        self.computed_tokens += schedule.computed_tokens

    def fields(self) -> Mapping[str, float]:
        """Finite numbers by the names of `METRICS`; nothing when nothing was sampled."""
        if not self.steps:
            return {}
        return {
            "engine_prompt_reuse": 1.0 - self.computed_tokens / max(1, self.prompt_tokens),
            "engine_rows_put_aside": float(self.preempted),
            "engine_live_rows_mean": self.row_steps / self.steps,
        }
